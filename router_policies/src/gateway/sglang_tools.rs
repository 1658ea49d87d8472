//! Tools as SGLang's chat templates get them: dumped from the objects that it reads a request into, whose
//! fields and their order differ from release to release.
//!
//! Read off 0.5.17 and 0.5.23, and which of the releases between them changed what; the tests have what
//! both made of the same tools.

use super::apis::Api;
use super::values::{get, none, text_of};
use minijinja::Value;

/// A release of SGLang. What is not known is taken to be the oldest that is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Release([u32; 3]);

impl Release {
    pub const OLDEST: Self = Self([0, 5, 17]);
    /// `/v1/responses` labels what developers say, and takes tools of the type `custom`.
    pub const WITH_CUSTOM_TOOLS: Self = Self([0, 5, 20]);
    /// `/v1/responses` leaves what the system says where it stands, if the template shows it there.
    pub const WITH_INLINE_SYSTEM: Self = Self([0, 5, 22]);
    /// `/v1/responses` takes the fields by which a prefill and a decode worker find each other.
    pub const SHARING_RESPONSES: Self = Self([0, 5, 20]);
    /// So does `/v1/messages`.
    pub const SHARING_MESSAGES: Self = Self([0, 5, 22]);
    /// Tools keep the order in which the client wrote their fields.
    const WITH_CLIENTS_ORDER: Self = Self([0, 5, 23]);

    pub fn words(self) -> String {
        let [major, minor, patch] = self.0;
        format!("SGLang {major}.{minor}.{patch}")
    }

    /// Of a version such as `0.5.23` or `0.5.23.post1`.
    pub fn of(version: &str) -> Option<Self> {
        let mut numbers = version.split('.').map(|part| {
            let digits = part.find(|letter: char| !letter.is_ascii_digit());
            part[..digits.unwrap_or(part.len())].parse().ok()
        });
        let mut next = || numbers.next().flatten();
        Some(Self([next()?, next()?, next()?]))
    }
}

/// The tools, of which the model is shown `only` that of a name, where one is given; `None` where they
/// cannot be read.
pub(super) fn shown(
    release: Release,
    api: Api,
    given: &Value,
    only: Option<&str>,
) -> Option<Vec<Value>> {
    let mut tools = Vec::new();
    for given in given.try_iter().ok()? {
        let Some(function) = function_of(release, api, &given)? else {
            continue;
        };
        if only.is_some_and(|only| text_of(&function, "name").as_deref() != Some(only)) {
            continue;
        }
        let tool = [
            ("type", Value::from("function")),
            ("function", function),
            ("defer_loading", deferred(api, &given).unwrap_or_else(none)),
        ];
        tools.push(tool.into_iter().collect());
    }
    Some(tools)
}

/// Whether the tool is left to be looked for, where that is handed on.
fn deferred(api: Api, given: &Value) -> Option<Value> {
    (api != Api::Responses)
        .then(|| get(given, "defer_loading"))
        .flatten()
}

/// The function of a tool; the inner `None` where the model is not shown it.
#[allow(clippy::option_option)]
fn function_of(release: Release, api: Api, given: &Value) -> Option<Option<Value>> {
    let kind = text_of(given, "type");
    let is_custom = kind.as_deref() == Some("custom");
    let is_shown = match api {
        Api::Messages => kind.is_none() || is_custom,
        Api::Responses => {
            kind.as_deref() == Some("function")
                || (is_custom && release >= Release::WITH_CUSTOM_TOOLS)
        }
        _ => true,
    };
    if !is_shown {
        return Some(None);
    }
    let own = match api {
        Api::Chat => get(given, "function")?,
        _ => given.clone(),
    };
    let name = Value::from(text_of(&own, "name")?);
    let (description, parameters) = match api {
        Api::Responses if is_custom => {
            (described(&own).map(Value::from), Some(one_text_as_input()))
        }
        // Without one it is an empty text.
        Api::Messages => (
            Some(get(&own, "description").unwrap_or_else(|| Value::from(""))),
            get(&own, "input_schema"),
        ),
        _ => (get(&own, "description"), get(&own, "parameters")),
    };
    let keeps_order = release >= Release::WITH_CLIENTS_ORDER;
    let strict = match get(&own, "strict") {
        // Before, SGLang did not read it there.
        Some(_) if api == Api::Messages && !keeps_order => Some(Value::from(false)),
        None if api == Api::Chat && keeps_order => None,
        given => Some(given.unwrap_or_else(|| Value::from(false))),
    };
    let defer = match api {
        Api::Responses => None,
        _ => get(&own, "defer_loading").or_else(|| deferred(api, given)),
    };
    let value_of = |field: &str| match field {
        "description" => Some(description.clone().unwrap_or_else(none)),
        "name" => Some(name.clone()),
        "parameters" => Some(parameters.clone().unwrap_or_else(none)),
        "strict" => strict.clone(),
        "defer_loading" => defer.clone(),
        _ => None,
    };
    let mut order: Vec<String> = match api {
        _ if !keeps_order => Vec::new(),
        Api::Chat => own
            .try_iter()
            .ok()?
            .filter_map(|key| key.as_str().map(str::to_owned))
            .collect(),
        // The order in which it hands them on itself.
        _ => ["name", "description"].map(str::to_owned).to_vec(),
    };
    for field in FIELDS {
        if !order.iter().any(|known| known == field) {
            order.push(field.to_owned());
        }
    }
    let fields = order
        .into_iter()
        .filter_map(|field| value_of(&field).map(|value| (field, value)));
    Some(Some(fields.collect()))
}

/// The fields of a function in SGLang's own order.
const FIELDS: [&str; 5] = [
    "description",
    "name",
    "parameters",
    "strict",
    "defer_loading",
];

/// What a tool of the type `custom` says of itself, with the grammar that its input follows.
fn described(tool: &Value) -> Option<String> {
    let said = text_of(tool, "description").filter(|text| !text.is_empty());
    let format = get(tool, "format");
    let grammar = format.filter(|format| text_of(format, "type").as_deref() == Some("grammar"));
    let grammar = grammar.map(|grammar| {
        let syntax = text_of(&grammar, "syntax").filter(|text| !text.is_empty());
        let syntax = syntax.unwrap_or_else(|| "lark".to_owned());
        let definition = text_of(&grammar, "definition").unwrap_or_default();
        format!("The payload must conform to this {syntax} grammar:\n{definition}")
    });
    let parts: Vec<_> = said.into_iter().chain(grammar).collect();
    (!parts.is_empty()).then(|| parts.join("\n\n"))
}

/// The key of the one argument that a tool of the type `custom` has.
pub(super) const CUSTOM_INPUT: &str = "input";

fn one_text_as_input() -> Value {
    fn object<const N: usize>(fields: [(&'static str, Value); N]) -> Value {
        fields.into_iter().collect()
    }
    let text = object([
        ("type", Value::from("string")),
        (
            "description",
            Value::from("The freeform text payload for this tool."),
        ),
    ]);
    object([
        ("type", Value::from("object")),
        ("properties", object([(CUSTOM_INPUT, text)])),
        ("required", Value::from(vec![Value::from(CUSTOM_INPUT)])),
        ("additionalProperties", Value::from(false)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(version: &str, api: Api, tools: &str) -> String {
        let given: Value = serde_json::from_str(tools).expect("JSON");
        let release = Release::of(version).expect("a version");
        let found = shown(release, api, &given, None).expect("tools");
        serde_json::to_string(&Value::from(found)).expect("a value")
    }

    /// What both releases themselves made of them.
    #[test]
    fn tools_are_dumped_as_each_release_dumps_them() {
        let responses = r#"[{"type":"function","parameters":{"b":1},"strict":true,"name":"look","defer_loading":true},
            {"type":"web_search"},{"type":"namespace","name":"n","tools":[]}]"#;
        assert_eq!(
            told("0.5.17", Api::Responses, responses),
            r#"[{"type":"function","function":{"description":null,"name":"look","parameters":{"b":1},"strict":true},"defer_loading":null}]"#
        );
        assert_eq!(
            told("0.5.23", Api::Responses, responses),
            r#"[{"type":"function","function":{"name":"look","description":null,"parameters":{"b":1},"strict":true},"defer_loading":null}]"#
        );
        let chat = r#"[{"type":"function","function":{"name":"look","parameters":{"b":1}}},
            {"function":{"parameters":{},"name":"l","strict":true,"description":"d","x":1},"type":"function","defer_loading":true}]"#;
        assert_eq!(
            told("0.5.17", Api::Chat, chat),
            concat!(
                r#"[{"type":"function","function":{"description":null,"name":"look","parameters":{"b":1},"strict":false},"defer_loading":null},"#,
                r#"{"type":"function","function":{"description":"d","name":"l","parameters":{},"strict":true,"defer_loading":true},"defer_loading":true}]"#
            )
        );
        assert_eq!(
            told("0.5.23", Api::Chat, chat),
            concat!(
                r#"[{"type":"function","function":{"name":"look","parameters":{"b":1},"description":null},"defer_loading":null},"#,
                r#"{"type":"function","function":{"parameters":{},"name":"l","strict":true,"description":"d","defer_loading":true},"defer_loading":true}]"#
            )
        );
        let messages = r#"[{"input_schema":{"a":1},"name":"n"},{"type":"web_search_20250305","name":"web_search"}]"#;
        assert_eq!(
            told("0.5.17", Api::Messages, messages),
            r#"[{"type":"function","function":{"description":"","name":"n","parameters":{"a":1},"strict":false},"defer_loading":null}]"#
        );
        assert_eq!(
            told("0.5.23", Api::Messages, messages),
            r#"[{"type":"function","function":{"name":"n","description":"","parameters":{"a":1},"strict":false},"defer_loading":null}]"#
        );
    }

    #[test]
    fn custom_tools_are_functions_of_one_text_since_0_5_20() {
        let tools = r#"[{"type":"custom","name":"p","description":"d","format":{"type":"grammar","syntax":"lark","definition":"x"}},
            {"type":"custom","name":"q"}]"#;
        assert_eq!(told("0.5.19", Api::Responses, tools), "[]");
        let parameters = concat!(
            r#"{"type":"object","properties":{"input":{"type":"string","#,
            r#""description":"The freeform text payload for this tool."}},"#,
            r#""required":["input"],"additionalProperties":false}"#
        );
        let said = r"d\n\nThe payload must conform to this lark grammar:\nx";
        assert_eq!(
            told("0.5.23", Api::Responses, tools),
            format!(
                r#"[{{"type":"function","function":{{"name":"p","description":"{said}","parameters":{parameters},"strict":false}},"defer_loading":null}},{{"type":"function","function":{{"name":"q","description":null,"parameters":{parameters},"strict":false}},"defer_loading":null}}]"#
            )
        );
    }

    #[test]
    fn releases_are_told_apart_by_their_numbers() {
        let of = |version| Release::of(version).expect("a version");
        assert!(of("0.5.9") < of("0.5.17"));
        assert!(of("0.5.23") < of("0.6.0rc1"));
        assert_eq!(of("0.5.23.post1"), of("0.5.23"));
        for version in ["", "unknown", "0.5", "0.x.1"] {
            assert_eq!(Release::of(version), None, "{version}");
        }
    }
}
