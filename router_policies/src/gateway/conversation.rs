//! What a chat template is given for a request: the messages and tools of three APIs in the form of
//! OpenAI's chat, as the engines turn them into it.
//!
//! Engines differ in small things (how parts of text are joined, which keys a tool has): read off
//! SGLang 0.5.17 to 0.5.23 and vLLM 0.32.0. A difference that is missed here costs no more than a few cached
//! tokens that are believed elsewhere than they are.

use super::apis::Api;
use super::content_format::InParts;
use super::dumped_tools::dumped_tools;
use super::sglang_tools::{self, CUSTOM_INPUT, Release};
use super::values::{get, none, some, text_of};
use crate::config::Engine;
use minijinja::Value;
use serde::Deserialize;

/// What a template is rendered with.
#[derive(Debug)]
pub(super) struct Conversation {
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// The request's own variables (`chat_template_kwargs`).
    pub more: Vec<(String, Value)>,
}

/// The keys of a body that matter here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Body {
    messages: Value,
    tools: Value,
    tool_choice: Value,
    chat_template_kwargs: Value,
    reasoning_effort: Value,
    continue_final_message: Value,
    add_generation_prompt: Value,
    system: Value,
    input: Value,
    instructions: Value,
    previous_response_id: Value,
}

/// Turns bodies into conversations for one kind of engine and one template.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    pub engine: Engine,
    /// Claude Code's line of attribution does not reach the engine; vLLM leaves it out itself.
    pub drops_attribution: bool,
    /// Where that is SGLang.
    pub release: Release,
    pub in_parts: InParts,
    /// The template has the role `developer`.
    pub knows_developers: bool,
    /// The template shows what the system says where it stands, also later in a conversation.
    pub shows_later_systems: bool,
}

impl Reader {
    /// The conversation of a body; `None` where it is none, or holds what is no text (pictures), or
    /// goes on from what the client did not send.
    pub fn read(self, api: Api, body: &[u8]) -> Option<Conversation> {
        let mut body: Body = serde_json::from_slice(body).ok()?;
        let mut said = Said::default();
        match api {
            Api::Chat => {
                if body.continue_final_message.is_true() {
                    return None;
                }
                for message in body.messages.try_iter().ok()? {
                    said.0.push(Message::of_chat(&message)?);
                }
            }
            Api::Messages => said.read_messages(self, &body)?,
            Api::Responses => said.read_responses(self, &body)?,
            Api::Generate | Api::Completions => return None,
        }
        match self.engine {
            Engine::Sglang if api == Api::Responses => {
                said.join_assistants();
                let stays = self.shows_later_systems && self.release >= Release::WITH_INLINE_SYSTEM;
                if !stays {
                    said.lead_with_one_system("\n\n");
                }
            }
            Engine::Vllm if !self.knows_developers && said.has_developers() => {
                said.lead_with_one_system("\n");
            }
            _ => {}
        }
        let tools = self.tools(api, &mut body)?;
        let mut more: Vec<(String, Value)> = Vec::new();
        if let Some(effort) = some(std::mem::take(&mut body.reasoning_effort)) {
            more.push(("reasoning_effort".to_owned(), effort));
        }
        if let Some(given) = some(body.add_generation_prompt) {
            more.push(("add_generation_prompt".to_owned(), given));
        }
        if let Ok(keys) = body.chat_template_kwargs.try_iter() {
            for key in keys {
                let value = body.chat_template_kwargs.get_item(&key).ok()?;
                more.push((key.as_str()?.to_owned(), value));
            }
        }
        let messages = said.0.into_iter().map(|one| one.finish(self)).collect();
        Some(Conversation {
            messages,
            tools,
            more,
        })
    }

    /// The tools as the template gets them; the outer `None` where they cannot be read.
    #[allow(clippy::option_option)]
    fn tools(self, api: Api, body: &mut Body) -> Option<Option<Value>> {
        let choice = &body.tool_choice;
        let is_none =
            choice.as_str() == Some("none") || text_of(choice, "type").as_deref() == Some("none");
        if body.tools.is_none()
            || body.tools.is_undefined()
            || (is_none && (self.engine == Engine::Sglang || api == Api::Responses))
        {
            return Some(None);
        }
        if self.engine == Engine::Sglang {
            // It shows the model the one that it has to call, and no other.
            let chosen = || get(choice, "function").and_then(|chosen| text_of(&chosen, "name"));
            let only = match api {
                Api::Messages => text_of(choice, "name"),
                Api::Responses => text_of(choice, "name").or_else(chosen),
                _ => chosen(),
            };
            let tools = sglang_tools::shown(self.release, api, &body.tools, only.as_deref())?;
            return Some((!tools.is_empty()).then(|| Value::from(tools)));
        }
        if api == Api::Responses {
            let tools = dumped_tools(&body.tools)?;
            return Some((tools.len() != Some(0)).then_some(tools));
        }
        let mut tools = Vec::new();
        for given in body.tools.try_iter().ok()? {
            let function = match api {
                Api::Chat => get(&given, "function")?,
                _ => given.clone(),
            };
            let name = ("name", Value::from(text_of(&function, "name")?));
            let description = (
                "description",
                get(&function, "description").unwrap_or_else(none),
            );
            let schema = if api == Api::Messages {
                "input_schema"
            } else {
                "parameters"
            };
            let parameters = ("parameters", get(&function, schema).unwrap_or_else(none));
            let strict = get(&function, "strict").map(|strict| ("strict", strict));
            let function: Value = [name, description, parameters]
                .into_iter()
                .chain(strict)
                .collect();
            let tool = [("type", Value::from("function")), ("function", function)];
            tools.push(tool.into_iter().collect::<Value>());
        }
        Some((!tools.is_empty()).then(|| Value::from(tools)))
    }
}

/// One message, its content still in parts.
#[derive(Debug, Default)]
struct Message {
    role: String,
    /// `None` where there is no content at all.
    texts: Option<Vec<String>>,
    is_list: bool,
    tool_calls: Vec<Value>,
    /// Other keys that the client sent, as they are.
    others: Vec<(String, Value)>,
}

impl Message {
    fn new(role: &str, text: String) -> Self {
        Self {
            role: role.to_owned(),
            texts: Some(vec![text]),
            ..Self::default()
        }
    }

    fn of_chat(message: &Value) -> Option<Self> {
        let mut found = Self::default();
        for key in message.try_iter().ok()? {
            let value = message.get_item(&key).ok()?;
            match key.as_str()? {
                "role" => found.role = value.as_str()?.to_owned(),
                "content" => {
                    found.is_list = value.as_str().is_none() && !value.is_none();
                    if let Some(content) = some(value) {
                        found.texts = Some(texts_of(&content)?);
                    }
                }
                "tool_calls" => {
                    if let Some(calls) = some(value) {
                        for call in calls.try_iter().ok()? {
                            let function = get(&call, "function")?;
                            let arguments = get(&function, "arguments").unwrap_or_else(none);
                            let id = text_of(&call, "id").unwrap_or_default();
                            found.tool_calls.push(tool_call(
                                id,
                                text_of(&function, "name")?,
                                &arguments,
                            ));
                        }
                    }
                }
                other => found
                    .others
                    .extend(some(value).map(|value| (other.to_owned(), value))),
            }
        }
        Some(found)
    }

    fn finish(self, reader: Reader) -> Value {
        let content = match self.texts {
            None => Value::from(""),
            Some(texts)
                if reader.in_parts.before(reader.engine)
                    && (self.is_list || reader.engine == Engine::Vllm) =>
            {
                texts
                    .into_iter()
                    .map(|text| {
                        let part = [("type", Value::from("text")), ("text", Value::from(text))];
                        part.into_iter().collect::<Value>()
                    })
                    .collect::<Vec<_>>()
                    .into()
            }
            Some(texts) => Value::from(texts.join(match reader.engine {
                Engine::Sglang => " ",
                Engine::Vllm => "\n",
            })),
        };
        let calls = (!self.tool_calls.is_empty())
            .then(|| ("tool_calls".to_owned(), Value::from(self.tool_calls)));
        [
            ("role".to_owned(), Value::from(self.role)),
            ("content".to_owned(), content),
        ]
        .into_iter()
        .chain(calls)
        .chain(self.others)
        .collect()
    }
}

/// The messages so far.
#[derive(Default)]
struct Said(Vec<Message>);

impl Said {
    fn has_developers(&self) -> bool {
        self.0.iter().any(|message| message.role == "developer")
    }

    /// What the system and developers say becomes one message before all others, as templates expect
    /// it; the parts of each are joined by `between_parts`.
    fn lead_with_one_system(&mut self, between_parts: &str) {
        let (first, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.0)
            .into_iter()
            .partition(|message| matches!(message.role.as_str(), "system" | "developer"));
        let texts = first.into_iter().filter_map(|message| message.texts);
        let texts: Vec<_> = texts.map(|texts| texts.join(between_parts)).collect();
        let system = (!texts.is_empty()).then(|| Message::new("system", texts.join("\n\n")));
        self.0 = system.into_iter().chain(others).collect();
    }

    /// What the system says, as one text; nothing where that is empty.
    fn push_system(&mut self, reader: Reader, content: &Value) -> Option<()> {
        let mut texts = texts_of(content)?;
        if reader.engine == Engine::Vllm || reader.drops_attribution {
            // Claude Code's line differs from session to session.
            texts.retain(|text| !text.starts_with("x-anthropic-billing-header"));
        }
        texts.retain(|text| !text.is_empty());
        if !texts.is_empty() {
            let between = match reader.engine {
                Engine::Sglang => "\n",
                Engine::Vllm => "",
            };
            self.0.push(Message::new("system", texts.join(between)));
        }
        Some(())
    }

    /// Anthropic's: content in blocks, the system prompt and tools' results beside the turns.
    fn read_messages(&mut self, reader: Reader, body: &Body) -> Option<()> {
        let engine = reader.engine;
        if let Some(system) = some(body.system.clone()) {
            self.push_system(reader, &system)?;
        }
        for message in body.messages.try_iter().ok()? {
            let role = text_of(&message, "role")?;
            let content = get(&message, "content")?;
            if engine == Engine::Vllm && role == "system" {
                self.push_system(reader, &content)?;
                continue;
            }
            if let Some(text) = content.as_str() {
                self.0.push(Message::new(&role, text.to_owned()));
                continue;
            }
            let mut turn = Message {
                role,
                ..Message::default()
            };
            for block in content.try_iter().ok()? {
                match text_of(&block, "type")?.as_str() {
                    "text" => {
                        let text = text_of(&block, "text")?;
                        if engine == Engine::Sglang || !text.is_empty() {
                            turn.texts.get_or_insert_default().push(text);
                        }
                    }
                    "tool_use" => {
                        let input = get(&block, "input").unwrap_or_else(none);
                        let id = text_of(&block, "id").unwrap_or_default();
                        turn.tool_calls
                            .push(tool_call(id, text_of(&block, "name")?, &input));
                    }
                    "tool_result" => {
                        // Whatever the client said before it comes before it.
                        if engine == Engine::Sglang && turn.texts.is_some() {
                            let before = Message {
                                role: turn.role.clone(),
                                ..Message::default()
                            };
                            let before = std::mem::replace(&mut turn, before);
                            self.0.push(before.in_blocks());
                        }
                        let result = match get(&block, "content") {
                            Some(content) => texts_of(&content)?,
                            None => Vec::new(),
                        };
                        let mut answer = Message::new("tool", result.join("\n"));
                        let id = text_of(&block, "tool_use_id").unwrap_or_default();
                        answer
                            .others
                            .push(("tool_call_id".to_owned(), Value::from(id)));
                        self.0.push(answer);
                    }
                    "thinking" | "redacted_thinking" => {}
                    _ => return None,
                }
            }
            if turn.texts.is_some() || !turn.tool_calls.is_empty() || turn.role != "user" {
                self.0.push(turn.in_blocks());
            }
        }
        Some(())
    }

    /// OpenAI's newer API: one list of messages, calls and their outputs.
    fn read_responses(&mut self, reader: Reader, body: &Body) -> Option<()> {
        let is_sglang = reader.engine == Engine::Sglang;
        let takes_custom = is_sglang && reader.release >= Release::WITH_CUSTOM_TOOLS;
        if !body.previous_response_id.is_undefined() && !body.previous_response_id.is_none() {
            return None;
        }
        if let Some(instructions) = some(body.instructions.clone()) {
            self.0
                .push(Message::new("system", instructions.as_str()?.to_owned()));
        }
        if let Some(text) = body.input.as_str() {
            self.0.push(Message::new("user", text.to_owned()));
            return Some(());
        }
        for item in body.input.try_iter().ok()? {
            match text_of(&item, "type").as_deref() {
                None | Some("message") => {
                    let mut message = Message::new(&text_of(&item, "role")?, String::new());
                    let content = get(&item, "content")?;
                    message.is_list = content.as_str().is_none();
                    let mut texts = texts_of(&content)?;
                    if takes_custom && message.role == "developer" {
                        label(&mut texts);
                    }
                    if is_sglang && message.role == "developer" {
                        "system".clone_into(&mut message.role);
                    }
                    message.texts = Some(texts);
                    self.0.push(message);
                }
                Some("function_call") => {
                    let arguments = get(&item, "arguments").unwrap_or_else(none);
                    self.call(&item, &arguments)?;
                }
                Some("custom_tool_call") if takes_custom => {
                    let input = text_of(&item, "input").unwrap_or_default();
                    let arguments: Value =
                        [(CUSTOM_INPUT, Value::from(input))].into_iter().collect();
                    self.call(&item, &arguments)?;
                }
                Some(kind @ ("function_call_output" | "custom_tool_call_output"))
                    if takes_custom || kind == "function_call_output" =>
                {
                    let between = if is_sglang { "" } else { "\n" };
                    let output = texts_of(&get(&item, "output")?)?.join(between);
                    let mut answer = Message::new("tool", output);
                    let id = text_of(&item, "call_id").unwrap_or_default();
                    answer
                        .others
                        .push(("tool_call_id".to_owned(), Value::from(id)));
                    self.0.push(answer);
                }
                Some("reasoning") if is_sglang => {
                    if let Some(thought) = thought_of(&item)? {
                        self.0.push(Message {
                            role: "assistant".to_owned(),
                            others: vec![(THOUGHT.to_owned(), Value::from(thought))],
                            ..Message::default()
                        });
                    }
                }
                Some("reasoning") => {}
                Some(_) => return None,
            }
        }
        Some(())
    }

    /// Notes the call of an item, as one of the assistant's turn that it belongs to.
    fn call(&mut self, item: &Value, arguments: &Value) -> Option<()> {
        let id = text_of(item, "call_id").unwrap_or_default();
        let call = tool_call(id, text_of(item, "name")?, arguments);
        match self.0.last_mut() {
            Some(last) if last.role == "assistant" => last.tool_calls.push(call),
            _ => self.0.push(Message {
                role: "assistant".to_owned(),
                tool_calls: vec![call],
                ..Message::default()
            }),
        }
        Some(())
    }

    /// What the assistant thought, said and called in one turn becomes one message.
    fn join_assistants(&mut self) {
        let mut joined: Vec<Message> = Vec::new();
        for message in std::mem::take(&mut self.0) {
            match joined.last_mut() {
                Some(last) if last.role == "assistant" && message.role == "assistant" => {
                    last.join(message);
                }
                _ => joined.push(message),
            }
        }
        self.0 = joined;
    }
}

/// The key of what an assistant thought.
const THOUGHT: &str = "reasoning_content";

/// What SGLang puts in front of what developers say in `/v1/responses`.
fn label(texts: &mut Vec<String>) {
    const LABEL: &str = "Developer instructions:";
    match texts.first_mut() {
        Some(first) => *first = format!("{LABEL}\n{first}"),
        None => texts.push(LABEL.to_owned()),
    }
}

/// What an item says that the assistant thought, its summary before its content; the outer `None` where
/// that is packed.
#[allow(clippy::option_option)]
fn thought_of(item: &Value) -> Option<Option<String>> {
    for key in ["summary", "content"] {
        let parts = get(item, key).and_then(|parts| parts.try_iter().ok());
        let texts = parts.into_iter().flatten();
        let texts: Vec<_> = texts
            .filter_map(|part| text_of(&part, "text").filter(|text| !text.is_empty()))
            .collect();
        if !texts.is_empty() {
            return Some(Some(texts.join("\n")));
        }
    }
    let packed = text_of(item, "encrypted_content");
    match packed.is_some_and(|packed| packed.starts_with("sglang-reasoning-")) {
        true => None,
        false => Some(None),
    }
}

impl Message {
    /// Adds what the same assistant went on with, as SGLang does.
    fn join(&mut self, more: Self) {
        let is_empty = |texts: &Option<Vec<String>>| {
            texts
                .as_ref()
                .is_none_or(|texts| texts.iter().all(String::is_empty))
        };
        if !is_empty(&more.texts) {
            if is_empty(&self.texts) {
                (self.texts, self.is_list) = (more.texts, more.is_list);
            } else if let (Some(texts), Some(others)) = (&mut self.texts, more.texts) {
                if self.is_list || more.is_list {
                    texts.extend(others);
                    self.is_list = true;
                } else {
                    *texts = vec![[texts.concat(), others.concat()].join("\n\n")];
                }
            }
        }
        self.tool_calls.extend(more.tool_calls);
        for (key, value) in more.others {
            match self.others.iter_mut().find(|(known, _)| *known == key) {
                Some((_, before)) if key == THOUGHT => {
                    *before = format!("{before}\n{value}").into()
                }
                Some(_) => {}
                None => self.others.push((key, value)),
            }
        }
    }

    /// Of a message that came in blocks: one block is a text, several are parts.
    fn in_blocks(mut self) -> Self {
        self.is_list = self.texts.as_ref().is_some_and(|texts| texts.len() != 1);
        self
    }
}

/// A call as templates get it: its arguments are an object, whatever the client sent.
fn tool_call(id: String, name: String, arguments: &Value) -> Value {
    let arguments = match arguments.as_str() {
        Some(text) => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
        None => arguments.clone(),
    };
    let arguments =
        some(arguments).unwrap_or_else(|| std::iter::empty::<(String, Value)>().collect());
    let function: Value = [("name", Value::from(name)), ("arguments", arguments)]
        .into_iter()
        .collect();
    [
        ("id", Value::from(id)),
        ("type", Value::from("function")),
        ("function", function),
    ]
    .into_iter()
    .collect()
}

/// The texts of a content: itself, or its parts; `None` where a part is no text.
fn texts_of(content: &Value) -> Option<Vec<String>> {
    if let Some(text) = content.as_str() {
        return Some(vec![text.to_owned()]);
    }
    content
        .try_iter()
        .ok()?
        .map(|part| match part.as_str() {
            Some(text) => Some(text.to_owned()),
            None => match text_of(&part, "type").as_deref() {
                Some("text" | "input_text" | "output_text") => text_of(&part, "text"),
                _ => None,
            },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read_by(engine: Engine, messages: &serde_json::Value) -> serde_json::Value {
        let reader = Reader {
            engine,
            drops_attribution: false,
            release: Release::OLDEST,
            in_parts: InParts::default(),
            knows_developers: false,
            shows_later_systems: true,
        };
        let body = json!({"messages": messages}).to_string();
        let found = reader.read(Api::Messages, body.as_bytes()).expect("read");
        serde_json::to_value(found.messages).expect("messages")
    }

    #[test]
    fn vllm_joins_later_system_messages_and_leaves_out_what_is_empty() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let line = "x-anthropic-billing-header: cch=1";
        let messages = json!([
            {"role": "user", "content": [text("a"), text(""), text("b")]},
            {"role": "system", "content": [text(line), text("c"), text(""), text("d")]},
            {"role": "system", "content": line},
            {"role": "system", "content": []},
        ]);
        let said = |role: &str, content: &str| json!({"role": role, "content": content});
        assert_eq!(
            read_by(Engine::Vllm, &messages),
            json!([said("user", "a\nb"), said("system", "cd")])
        );
    }
}
