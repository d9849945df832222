//! Tables for people.

/// Rows under a heading, each column as wide as it has to be; columns of numbers to the right.
pub fn table<const N: usize>(heading: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([heading[column].chars().count()]).max().unwrap_or(0)
    };
    let is_number = |column: usize| {
        let is_number = |row: &[String; N]| row[column].chars().next().is_none_or(|c| c.is_ascii_digit());
        !rows.is_empty() && rows.iter().all(is_number)
    };
    let columns: Vec<(usize, bool)> = (0..N).map(|column| (width(column), is_number(column))).collect();
    let line = |cells: Vec<&str>| {
        let cells = cells.into_iter().zip(&columns).map(|(cell, (width, is_number))| match is_number {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(heading.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

/// Names and values, one a line.
pub fn fields(rows: &[(&str, String)]) -> String {
    let rows: Vec<_> = rows.iter().filter(|(_, value)| !value.is_empty()).collect();
    let width = rows.iter().map(|(name, _)| name.len() + 2).max().unwrap_or(0).max(12);
    rows.iter().map(|(name, value)| format!("{name:<width$}{value}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_they_have_to_be() {
        let rows = [["a", "5", ""], ["long", "10", "x y"]].map(|row| row.map(str::to_owned));
        assert_eq!(table(["NAME", "N", "WHAT"], &rows), "NAME   N  WHAT\na      5\nlong  10  x y");
        assert_eq!(table(["NAME"], &[]), "NAME");
        assert_eq!(table(["µs"], &[["5".to_owned()]]), "µs\n 5");
        assert_eq!(fields(&[("name", "a".into()), ("none", String::new())]), "name        a");
        let long = fields(&[("name", "a".into()), ("most clients", "4".into())]);
        assert_eq!(long, "name          a\nmost clients  4");
    }
}
