//! What is said of values that are wrong: the field, and what was expected, in a person's words.

use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// Reads `T` from a tree of JSON.
///
/// # Errors
/// One line that names the field and what was expected.
pub fn read<T: DeserializeOwned>(tree: serde_json::Value) -> Result<T, String> {
    serde_path_to_error::deserialize(tree)
        .map_err(|error| described(error.path(), &error.inner().to_string()))
}

/// serde's message with the field that it is about.
pub fn described(path: &serde_path_to_error::Path, message: &str) -> String {
    let message = plainly(message);
    // Where a key is unknown or missing, the path is that of the table that has it or has it not.
    match path.to_string().as_str() {
        "." => message,
        path if message.starts_with("unknown field") => {
            let table = path.rsplit_once('.').map_or("", |(table, _)| table);
            let separator = if table.is_empty() { "" } else { ": " };
            format!("{table}{separator}{message}")
        }
        path => format!("{path}: {message}"),
    }
}

/// serde's message, in one line, with its names for Rust's types as what a person would write.
pub fn plainly(message: &str) -> String {
    let mut text = message.replace('\n', " ");
    for (rusts, plain) in [
        ("expected u16", "expected a whole number from 0 to 65535"),
        ("expected u64", "expected a whole number"),
        ("expected usize", "expected a whole number"),
        ("expected f64", "expected a number"),
        ("expected path string", "expected a path"),
        ("expected a string", "expected text"),
        ("expected a boolean", "expected true or false"),
    ] {
        text = text.replace(rusts, plain);
    }
    text
}

/// Checks that `value` lies in `range`; the error names the field.
pub fn within<T: PartialOrd + Display>(
    field: &str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), String> {
    if range.contains(&value) {
        return Ok(());
    }
    let (least, most) = range.into_inner();
    Err(format!(
        "{field}: expected a number from {least} to {most}, not {value}"
    ))
}
