//! The model's chat template, rendered as Hugging Face's `apply_chat_template` renders it.
//!
//! Owns the template, what templates may call, and how values become JSON there. What a conversation
//! is in the template's terms is [`super::conversation`]'s.

use super::content_format::InParts;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use std::io;
use std::path::Path;

const DEFAULT: &str = "default";
/// Used instead of the default one where a request has tools, if the model has it.
const WITH_TOOLS: &str = "tool_use";
/// Tokens that templates know by these names.
const NAMED_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// A compiled chat template.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    has_one_with_tools: bool,
    pub in_parts: InParts,
    /// It names the role `developer`.
    pub knows_developers: bool,
    /// It shows what the system says later in a conversation, where that stands.
    pub shows_later_systems: bool,
}

impl ChatTemplate {
    /// The template of a model's `folder`: of `chat_template.jinja`, else of `tokenizer_config.json`;
    /// `None` where neither has one.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn load(folder: &Path) -> Result<Option<Self>, String> {
        let config_file = folder.join("tokenizer_config.json");
        let config: serde_json::Value = match std::fs::read(&config_file) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| format!("{}: {error}", config_file.display()))?,
            Err(_) => serde_json::Value::Null,
        };
        let own_file = folder.join("chat_template.jinja");
        let templates: Vec<(String, String)> = match std::fs::read_to_string(&own_file) {
            Ok(template) => vec![(DEFAULT.to_owned(), template)],
            Err(_) => match &config["chat_template"] {
                serde_json::Value::String(template) => vec![(DEFAULT.to_owned(), template.clone())],
                serde_json::Value::Array(several) => several
                    .iter()
                    .filter_map(|one| {
                        let text = |key: &str| one[key].as_str().map(str::to_owned);
                        Some((text("name")?, text("template")?))
                    })
                    .collect(),
                _ => return Ok(None),
            },
        };
        let tokens = NAMED_TOKENS.iter().filter_map(|&name| {
            let token = &config[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name, text.to_owned()))
        });
        Self::new(templates, tokens)
            .map(Some)
            .map_err(|error| format!("{}: chat template: {error}", folder.display()))
    }

    fn new(
        templates: Vec<(String, String)>,
        tokens: impl Iterator<Item = (&'static str, String)>,
    ) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", refuse);
        for (name, token) in tokens {
            environment.add_global(name, token);
        }
        let in_parts = InParts::of(templates.iter().map(|(_, template)| template.as_str()));
        let knows_developers = templates
            .iter()
            .any(|(_, template)| names_developers(template));
        for (name, template) in templates {
            environment.add_template_owned(name, template)?;
        }
        environment.get_template(DEFAULT)?;
        let has_one_with_tools = environment.get_template(WITH_TOOLS).is_ok();
        let mut template = Self {
            environment,
            has_one_with_tools,
            in_parts,
            knows_developers,
            shows_later_systems: false,
        };
        template.shows_later_systems = template.finds_later_system();
        Ok(template)
    }

    /// Renders a conversation in which the system speaks twice, by which SGLang (0.5.22) tells.
    fn finds_later_system(&self) -> bool {
        const LATER: &str = "__later_system__";
        let said = [
            ("system", "t"),
            ("user", "t"),
            ("system", LATER),
            ("user", "t"),
        ];
        let said = said.map(|(role, text)| -> Value {
            let keys = [("role", role), ("content", text)];
            keys.into_iter()
                .map(|(key, value)| (key, Value::from(value)))
                .collect()
        });
        self.render(said.to_vec(), None, Vec::new())
            .is_ok_and(|text| text.contains(LATER))
    }

    /// The text that the model gets. `tools` is a list or none; `more` are the request's own variables.
    ///
    /// # Errors
    /// What the template says, where it refuses the conversation.
    pub fn render(
        &self,
        messages: Vec<Value>,
        tools: Option<Value>,
        more: Vec<(String, Value)>,
    ) -> Result<String, Error> {
        let name = if tools.is_some() && self.has_one_with_tools {
            WITH_TOOLS
        } else {
            DEFAULT
        };
        let variables: Value = [
            ("add_generation_prompt".to_owned(), Value::from(true)),
            ("documents".to_owned(), Value::from(())),
        ]
        .into_iter()
        .chain(more)
        .chain([
            ("messages".to_owned(), Value::from(messages)),
            ("tools".to_owned(), tools.unwrap_or_else(|| Value::from(()))),
        ])
        .collect();
        self.environment.get_template(name)?.render(variables)
    }
}

/// Whether the template names the role `developer`, by which vLLM 0.26.0 tells.
fn names_developers(template: &str) -> bool {
    template.contains("\"developer\"") || template.contains("'developer'")
}

/// What templates call to refuse a conversation.
fn refuse(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// JSON as Python's `json.dumps(…, ensure_ascii=False)` writes it; Jinja's own filter escapes HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let mut text = Vec::new();
    let written = match indent {
        Some(spaces) => {
            let spaces = " ".repeat(spaces.min(16));
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut text, pretty,
            ))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut text, InOneLine,
        )),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    String::from_utf8(text)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// A space behind every comma and colon, as Python has them.
struct InOneLine;

impl InOneLine {
    fn comma<W: ?Sized + io::Write>(writer: &mut W, first: bool) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }
}

impl Formatter for InOneLine {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        Self::comma(writer, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        Self::comma(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(template: &str, messages: &str, tools: Option<&str>) -> Result<String, Error> {
        let value = |json: &str| serde_json::from_str::<Value>(json).expect("JSON");
        let templates = vec![(DEFAULT.to_owned(), template.to_owned())];
        let tokens = [("eos_token", "</s>".to_owned())];
        let messages = value(messages).try_iter()?.collect();
        ChatTemplate::new(templates, tokens.into_iter())?.render(
            messages,
            tools.map(value),
            Vec::new(),
        )
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let tools = r#"[{"name":"f","b":[1,2.5,null,true],"a":{"é":"<&'"}}]"#;
        let found = rendered("{{ tools[0] | tojson }}", "[]", Some(tools)).expect("valid");
        assert_eq!(
            found,
            r#"{"name": "f", "b": [1, 2.5, null, true], "a": {"é": "<&'"}}"#
        );
        let found = rendered("{{ tools | tojson(indent=2) }}", "[]", Some("[{\"a\":1}]"));
        assert_eq!(found.expect("valid"), "[\n  {\n    \"a\": 1\n  }\n]");
    }

    #[test]
    fn what_templates_of_published_models_use_is_there() {
        let template = "{%- set ns = namespace(last=0) %}\n{% for m in messages %}\n    \
            {%- if m.role == 'skip' %}{% continue %}{% endif %}\
            {%- if m.content.startswith('a') %}{{ m.content.split('-')[1].strip() + eos_token }}{% endif %}\
            {%- set ns.last = loop.index0 %}\
            {%- if not m.tool_calls and m.reasoning is not defined %}.{% endif %}\n{% endfor %}\
            {{- messages[::-1][0].role ~ ns.last }}{% if tools %}never{% endif %}\
            {%- if add_generation_prompt %}>{% endif %}";
        let messages = r#"[{"role":"u","content":"a- b"},{"role":"skip","content":"x"},{"role":"v","content":"c"}]"#;
        assert_eq!(
            rendered(template, messages, None).expect("valid"),
            "b</s>..v2>"
        );
    }

    #[test]
    fn a_conversation_that_the_template_refuses_is_an_error() {
        let template = "{{ raise_exception('roles must alternate') }}";
        let error = rendered(template, "[]", None).expect_err("refused");
        assert!(
            error.to_string().contains("roles must alternate"),
            "{error}"
        );
    }
}
