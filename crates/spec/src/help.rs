//! Help texts: every kind with its keys, in columns.

use crate::Kind;
use std::fmt::Write;

/// Columns of the help.
pub const HELP_WIDTH: usize = 100;
/// The column of the help where the text of a key begins.
pub const KEY_TEXT: usize = 32;

/// Every kind with its keys, for `--help`.
pub fn help(roles: &[(&str, &[&'static Kind])]) -> String {
    let mut text = String::new();
    for (title, kinds) in roles {
        let _ = writeln!(text, "{title}:");
        for kind in *kinds {
            let _ = writeln!(text, "  {}: {}", kind.name, kind.about);
            for key in kind.keys {
                let field = format!("      {}={}", key.name, key.value);
                text.push_str(&with_column(field, key.about));
            }
        }
        text.push('\n');
    }
    text
}

/// Lines with `field` on the left and the words of `about` from column [`KEY_TEXT`] on.
fn with_column(field: String, about: &str) -> String {
    let mut text = String::new();
    let mut line = field;
    let mut column = line.chars().count();
    if column >= KEY_TEXT {
        text = line + "\n";
        (line, column) = (String::new(), 0);
    }
    for word in about.split(' ') {
        let length = word.chars().count();
        if column > KEY_TEXT && column + 1 + length > HELP_WIDTH {
            text.push_str(&line);
            text.push('\n');
            (line, column) = (String::new(), 0);
        }
        let gap = if column > KEY_TEXT { 1 } else { KEY_TEXT - column };
        line.extend(std::iter::repeat_n(' ', gap));
        line.push_str(word);
        column += gap + length;
    }
    text + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_too_long_has_a_line_of_its_own() {
        let long = with_column("      soft-deadline-ms=N|auto|off".into(), "time");
        assert_eq!(long, format!("      soft-deadline-ms=N|auto|off\n{:32}time\n", ""));
    }
}
