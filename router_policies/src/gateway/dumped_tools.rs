//! Tools of `/v1/responses` as vLLM's chat templates get them. vLLM (0.32.0 and, by its source, 0.33.0)
//! makes each a function of the chat API (`construct_tool_dicts`), and shows no other kinds.

use super::values::{get, none, text_of};
use minijinja::Value;

/// The parameters of a custom tool: all of a call is one text.
const FREE_TEXT: &str = r#"{"type":"object","properties":{"input":{"type":"string",
"description":"The freeform text payload for this tool."}},"required":["input"],
"additionalProperties":false}"#;

/// The tools, those of namespaces among them; `None` where they cannot be read.
pub(super) fn dumped_tools(given: &Value) -> Option<Value> {
    let free_text = || serde_json::from_str(FREE_TEXT).ok();
    let mut tools = Vec::new();
    for tool in given.try_iter().ok()? {
        let own_name = || text_of(&tool, "name");
        match text_of(&tool, "type")?.as_str() {
            "function" => tools.push(function(own_name()?, &tool, get(&tool, "parameters"))),
            "custom" => tools.push(function(own_name()?, &tool, free_text())),
            "namespace" => {
                for inner in get(&tool, "tools")?.try_iter().ok()? {
                    if text_of(&inner, "type")? == "function" {
                        let name = format!("{}__{}", own_name()?, text_of(&inner, "name")?);
                        tools.push(function(name, &inner, get(&inner, "parameters")));
                    }
                }
            }
            _ => {}
        }
    }
    Some(tools.into_iter().collect())
}

/// `given` under a `name`. What it lacks is null; `strict` and `defer_loading` are then left out.
fn function(name: String, given: &Value, parameters: Option<Value>) -> Value {
    let mut fields = vec![
        ("name", Value::from(name)),
        (
            "description",
            get(given, "description").unwrap_or_else(none),
        ),
        ("parameters", parameters.unwrap_or_else(none)),
    ];
    for field in ["strict", "defer_loading"] {
        fields.extend(get(given, field).map(|value| (field, value)));
    }
    let function: Value = fields.into_iter().collect();
    [("type", Value::from("function")), ("function", function)]
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(tools: &str) -> Option<String> {
        let given: Value = serde_json::from_str(tools).expect("JSON");
        dumped_tools(&given).map(|found| serde_json::to_string(&found).expect("a value"))
    }

    /// What vLLM 0.32.0 itself made of them.
    #[test]
    fn tools_are_dumped_as_vllm_dumps_them() {
        let bare = r#"[{"type": "function", "name": "f", "extra": {"b": 1, "a": 2}}]"#;
        assert_eq!(
            told(bare).expect("known"),
            concat!(
                r#"[{"type":"function","function":{"name":"f","description":null,"#,
                r#""parameters":null}}]"#
            )
        );
        let whole = concat!(
            r#"[{"defer_loading":true,"strict":false,"async":true,"type":"function","name":"f","#,
            r#""parameters":{"type":"object","b":1,"a":2},"description":"d"}]"#
        );
        assert_eq!(
            told(whole).expect("known"),
            concat!(
                r#"[{"type":"function","function":{"name":"f","description":"d","parameters":"#,
                r#"{"type":"object","b":1,"a":2},"strict":false,"defer_loading":true}}]"#
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
                r#"[{"type":"function","function":{"name":"n__f","description":null,"#,
                r#""parameters":{"type":"object"},"strict":false}}]"#
            )
        );
        let others = concat!(
            r#"[{"type":"web_search","external_web_access":false},{"type":"local_shell"},"#,
            r#"{"type":"custom","name":"p","description":"d","format":{"type":"text"}}]"#
        );
        assert_eq!(
            told(others).expect("known"),
            concat!(
                r#"[{"type":"function","function":{"name":"p","description":"d","parameters":"#,
                r#"{"type":"object","properties":{"input":{"type":"string","description":"#,
                r#""The freeform text payload for this tool."}},"required":["input"],"#,
                r#""additionalProperties":false}}}]"#
            )
        );
    }

    #[test]
    fn what_cannot_be_read_is_left_to_the_bytes() {
        for tools in [
            "[7]",
            r#"[{"type": "function"}]"#,
            r#"{"type": "function"}"#,
        ] {
            assert_eq!(told(tools), None, "{tools}");
        }
    }
}
