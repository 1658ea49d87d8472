//! Values of a request's JSON as chat templates get them.

use minijinja::Value;

/// A value that is there.
pub(super) fn some(value: Value) -> Option<Value> {
    (!value.is_none() && !value.is_undefined()).then_some(value)
}

/// What is null to a template.
pub(super) fn none() -> Value {
    Value::from(())
}

/// A key's value, if it has one.
pub(super) fn get(value: &Value, key: &str) -> Option<Value> {
    value.get_attr(key).ok().and_then(some)
}

/// The same, where it is a text.
pub(super) fn text_of(value: &Value, key: &str) -> Option<String> {
    get(value, key)?.as_str().map(str::to_owned)
}
