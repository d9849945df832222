//! Labels on the command line.

use crate::error::Error;
use api::{Labels, LabelsChange};

/// Labels of a new object.
#[derive(clap::Args, Debug)]
pub struct LabelsArgs {
    /// A label, for programs to find it by; repeatable
    #[arg(long = "labels", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
}

impl LabelsArgs {
    /// The labels.
    pub fn labels(&self) -> Labels {
        self.labels.iter().cloned().collect()
    }
}

/// A selection of objects.
#[derive(clap::Args, Debug)]
pub struct SelectionArgs {
    /// Only those with this label; repeated: with all of them
    #[arg(long = "labels", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
}

impl SelectionArgs {
    /// The query of the list.
    pub fn query(&self) -> Vec<(&'static str, String)> {
        self.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))).collect()
    }
}

/// A change of labels.
#[derive(clap::Args, Debug)]
pub struct RelabelArgs {
    /// Its name
    pub name: String,
    /// KEY=VALUE sets a label, KEY- removes it
    #[arg(value_name = "KEY=VALUE|KEY-", required = true)]
    changes: Vec<String>,
}

impl RelabelArgs {
    /// The change.
    ///
    /// # Errors
    /// When an argument is neither.
    pub fn change(&self) -> Result<LabelsChange, Error> {
        let change = |text: &String| match (label(text), text.strip_suffix('-')) {
            (Ok((key, value)), _) => Ok((key, Some(value))),
            (Err(_), Some(key)) => Ok((key.to_owned(), None)),
            (Err(_), None) => Err(Error::Usage(format!("{text}: want KEY=VALUE or KEY-"))),
        };
        self.changes.iter().map(change).collect()
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("want KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Labels in a line.
pub fn line(labels: &Labels) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", ")
}
