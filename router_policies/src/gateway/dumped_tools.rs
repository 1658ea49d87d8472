//! Tools of `/v1/responses` as vLLM's chat templates get them: vLLM 0.26.0 dumps the objects of
//! OpenAI's package that it read them into (`construct_tool_dicts`; openai 3.52.0), with every field
//! in the package's order, null where the client sent nothing.

use super::values::{get, none, text_of};
use minijinja::Value;

/// Fields in the order in which they are dumped.
type Fields = &'static [&'static str];

const FUNCTION: Fields = &[
    "name",
    "parameters",
    "strict",
    "type",
    "allowed_callers",
    "async_",
    "defer_loading",
    "description",
    "output_schema",
];
const FUNCTION_IN_NAMESPACE: Fields = &[
    "name",
    "type",
    "allowed_callers",
    "async_",
    "defer_loading",
    "description",
    "output_schema",
    "parameters",
    "strict",
];
const WEB_SEARCH: Fields = &[
    "type",
    "external_web_access",
    "filters",
    "search_context_size",
    "user_location",
];
const CUSTOM: Fields = &[
    "name",
    "type",
    "allowed_callers",
    "async_",
    "defer_loading",
    "description",
    "format",
];
const TEXT_FORMAT: Fields = &["type"];
const GRAMMAR_FORMAT: Fields = &["definition", "syntax", "type"];

/// The tools, those of namespaces among them; `None` where one is of a kind that is not known here.
pub(super) fn dumped_tools(given: &Value) -> Option<Value> {
    let mut tools = Vec::new();
    for tool in given.try_iter().ok()? {
        match text_of(&tool, "type")?.as_str() {
            "function" => tools.push(dumped(&tool, FUNCTION, &[])?),
            "namespace" => {
                let namespace = text_of(&tool, "name")?;
                for inner in get(&tool, "tools")?.try_iter().ok()? {
                    if text_of(&inner, "type")? == "function" {
                        let name =
                            Value::from(format!("{namespace}__{}", text_of(&inner, "name")?));
                        tools.push(dumped(&inner, FUNCTION_IN_NAMESPACE, &[("name", name)])?);
                    }
                }
            }
            "web_search"
                if ["filters", "user_location"]
                    .iter()
                    .all(|key| get(&tool, key).is_none()) =>
            {
                tools.push(dumped(&tool, WEB_SEARCH, &[])?);
            }
            "custom" => {
                let format = match get(&tool, "format") {
                    None => none(),
                    Some(format) => match text_of(&format, "type")?.as_str() {
                        "text" => dumped(&format, TEXT_FORMAT, &[])?,
                        "grammar" => dumped(&format, GRAMMAR_FORMAT, &[])?,
                        _ => return None,
                    },
                };
                tools.push(dumped(&tool, CUSTOM, &[("format", format)])?);
            }
            _ => return None,
        }
    }
    let tools = tools.into_iter().map(|tool| {
        let wrapped = [("type", Value::from("function")), ("function", tool)];
        wrapped.into_iter().collect::<Value>()
    });
    Some(tools.collect())
}

/// `given` with its `fields` in their order, then what else it has; some of them `instead`.
fn dumped(given: &Value, fields: Fields, instead: &[(&str, Value)]) -> Option<Value> {
    let mut found: Vec<(String, Value)> = Vec::new();
    for &field in fields {
        let sent = if field == "async_" { "async" } else { field };
        let value = match instead.iter().find(|(name, _)| *name == field) {
            Some((_, value)) => Some(value.clone()),
            None => get(given, sent),
        };
        found.push((field.to_owned(), value.unwrap_or_else(none)));
    }
    for key in given.try_iter().ok()? {
        let name = key.as_str()?;
        if name != "async" && !fields.contains(&name) {
            found.push((name.to_owned(), given.get_item(&key).ok()?));
        }
    }
    Some(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(tools: &str) -> Option<String> {
        let given: Value = serde_json::from_str(tools).expect("JSON");
        dumped_tools(&given).map(|found| serde_json::to_string(&found).expect("a value"))
    }

    /// What vLLM 0.26.0 itself made of them.
    #[test]
    fn tools_are_dumped_as_vllm_dumps_them() {
        let function = r#"[{"type": "function", "name": "f", "extra": {"b": 1, "a": 2}}]"#;
        assert_eq!(
            told(function).expect("known"),
            concat!(
                r#"[{"type":"function","function":{"name":"f","parameters":null,"strict":null,"#,
                r#""type":"function","allowed_callers":null,"async_":null,"defer_loading":null,"#,
                r#""description":null,"output_schema":null,"extra":{"b":1,"a":2}}}]"#
            )
        );
        let namespace = concat!(
            r#"[{"type":"namespace","name":"n","description":"d","tools":[{"type":"function","#,
            r#""name":"f","strict":false,"parameters":{"type":"object"},"async":true},"#,
            r#"{"type":"custom","name":"c"}]}]"#
        );
        assert_eq!(
            told(namespace).expect("known"),
            concat!(
                r#"[{"type":"function","function":{"name":"n__f","type":"function","#,
                r#""allowed_callers":null,"async_":true,"defer_loading":null,"description":null,"#,
                r#""output_schema":null,"parameters":{"type":"object"},"strict":false}}]"#
            )
        );
        let others = concat!(
            r#"[{"type":"web_search","external_web_access":false},{"type":"custom","name":"p","#,
            r#""description":"d","format":{"type":"grammar","syntax":"lark","definition":"x"}}]"#
        );
        assert_eq!(
            told(others).expect("known"),
            concat!(
                r#"[{"type":"function","function":{"type":"web_search","#,
                r#""external_web_access":false,"filters":null,"search_context_size":null,"#,
                r#""user_location":null}},{"type":"function","function":{"name":"p","#,
                r#""type":"custom","allowed_callers":null,"async_":null,"defer_loading":null,"#,
                r#""description":"d","format":{"definition":"x","syntax":"lark","type":"grammar"}}}]"#
            )
        );
    }

    #[test]
    fn what_is_not_known_is_left_to_the_bytes() {
        assert_eq!(told(r#"[{"type": "local_shell"}]"#), None);
        assert_eq!(
            told(r#"[{"type": "web_search", "filters": {"allowed_domains": []}}]"#),
            None
        );
        assert_eq!(told("[7]"), None);
    }
}
