//! The labels that an object may have.

use crate::api_error::ApiError;
use api::{Labels, LabelsChange, MAX_LABEL_KEY, MAX_LABEL_VALUE, MAX_LABELS};

/// Checks labels.
///
/// # Errors
/// When there are too many, or a key or value is invalid.
pub fn check(labels: &Labels) -> Result<(), ApiError> {
    if labels.len() > MAX_LABELS {
        let detail = format!("{} labels: at most {MAX_LABELS}", labels.len());
        return Err(ApiError::invalid(detail));
    }
    labels.iter().try_for_each(|(key, value)| check_one(key, value))
}

fn check_one(key: &str, value: &str) -> Result<(), ApiError> {
    let is_key = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    let fault = if !(1..=MAX_LABEL_KEY).contains(&key.len()) || !key.bytes().all(is_key) {
        format!("want a key of 1 to {MAX_LABEL_KEY} letters, digits and ._-/")
    } else if value.len() > MAX_LABEL_VALUE {
        format!("a value of {} bytes: at most {MAX_LABEL_VALUE}", value.len())
    } else if value.chars().any(char::is_control) {
        "a value with control characters".into()
    } else {
        return Ok(());
    };
    Err(ApiError::invalid(format!("label {key:?}: {fault}")))
}

/// The labels after a change.
///
/// # Errors
/// As [`check`].
pub fn changed(before: &Labels, change: &LabelsChange) -> Result<Labels, ApiError> {
    let mut after = before.clone();
    for (key, value) in change {
        // The key of a label that is removed, too.
        check_one(key, value.as_deref().unwrap_or_default())?;
        match value {
            Some(value) => drop(after.insert(key.clone(), value.clone())),
            None => drop(after.remove(key)),
        }
    }
    check(&after)?;
    Ok(after)
}

/// Labels in a sentence.
pub fn describe(labels: &Labels) -> String {
    let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if labels.is_empty() { "no labels".into() } else { format!("labels: {}", labels.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(of: &[(&str, &str)]) -> Labels {
        of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn labels_have_limits() {
        let fault = |key: &str, value: &str| check(&labels(&[(key, value)])).unwrap_err().detail;
        check(&labels(&[(&"k".repeat(63), &"ä".repeat(128)), ("csi.name/of-it", "")])).unwrap();
        for key in ["", &"k".repeat(64), "a=b", "a b", "ä"] {
            assert_eq!(
                fault(key, "v"),
                format!("label {key:?}: want a key of 1 to 63 letters, digits and ._-/")
            );
        }
        assert_eq!(fault("k", &"v".repeat(257)), "label \"k\": a value of 257 bytes: at most 256");
        assert_eq!(fault("k", "a\n"), "label \"k\": a value with control characters");
        let many: Labels = (0..33).map(|number| (number.to_string(), String::new())).collect();
        assert_eq!(check(&many).unwrap_err().detail, "33 labels: at most 32");
    }

    #[test]
    fn a_change_sets_and_removes_labels_and_leaves_the_others() {
        let change = [("a".to_owned(), Some("2".to_owned())), ("b".into(), None), ("d".into(), None)].into();
        let after = changed(&labels(&[("a", "1"), ("b", "1"), ("c", "1")]), &change).unwrap();
        assert_eq!(after, labels(&[("a", "2"), ("c", "1")]));
        assert_eq!(describe(&after), "labels: a=2, c=1");
        for (key, value) in [("a=", Some(String::new())), ("a=", None), ("", None)] {
            assert!(changed(&after, &[(key.to_owned(), value)].into()).is_err(), "{key:?}");
        }
    }
}
