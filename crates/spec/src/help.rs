//! Help texts: every kind with its keys, in columns.

use crate::Kind;
use std::fmt::Write;

/// Columns of the help, and the column where the text of a key begins.
const HELP_WIDTH: usize = 100;
const KEY_TEXT: usize = 32;

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
    use crate::key;

    #[test]
    fn help_keeps_to_its_columns() {
        static LONG: Kind = Kind {
            name: "disk",
            about: "a test",
            keys: &[
                key("path", "PATH", "the file"),
                key(
                    "soft-deadline-ms",
                    "N|auto|off",
                    "time after which a read is also computed from the other members of the array",
                ),
            ],
        };
        let text = help(&[("Devices", &[&LONG])]);
        for line in text.lines().filter(|line| line.starts_with("      ")) {
            assert!(line.chars().count() <= HELP_WIDTH, "{line}");
            let is_field_alone = !line.trim().contains(' ');
            let has_gap = line.chars().nth(KEY_TEXT - 1) == Some(' ');
            assert!(is_field_alone || has_gap, "a key runs into its text: {line}");
        }
        let long = with_column("      soft-deadline-ms=N|auto|off".into(), "time");
        assert_eq!(long, format!("      soft-deadline-ms=N|auto|off\n{:32}time\n", ""));
    }
}
