//! Text prompts and conversations as token ids, where the user gave the tokenizer of the model that is
//! served.
//!
//! Owns the tokenizer, what of a request it is asked for, and how many encodings run at once.

use super::apis::{Api, PromptKeys};
use super::body::Scanned;
use super::chat_template::ChatTemplate;
use super::conversation::Reader;
use super::pieces::Pieces;
use super::sglang_tools::Release;
use crate::config::Engine;
use bytes::Bytes;
use decision::fleet::prefix::hash::{PromptHashes, TokenHasher};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokenizers::Tokenizer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests with more text than this, as it stands in the body, are compared by their bytes: it is
/// about a quarter of a million tokens, and encoding it takes a sizeable part of a second.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// The same of a conversation's whole body, of which most was encoded with the turn before.
const MAX_CONVERSATION_BYTES: usize = 4 << 20;

/// The tokenizer that the workers' engines use too.
pub(crate) struct PromptEncoder {
    tokenizer: Tokenizer,
    chats: Option<Chats>,
    /// Encoding keeps a core busy: without a bound, a burst of long prompts would take them all from
    /// the threads that serve.
    turns: Arc<Semaphore>,
    at_once: usize,
    /// By client: one that sends many long texts waits for itself, not others for it.
    of_clients: Mutex<HashMap<u64, Arc<Semaphore>>>,
}

/// How long a request waits for its prompt to be encoded; then its bytes have to do.
const PATIENCE: Duration = Duration::from_secs(2);
/// So many clients' turns are remembered before those of clients that have nothing to encode are looked for.
const MANY_CLIENTS: usize = 64;

/// What conversations need besides.
struct Chats {
    template: ChatTemplate,
    reader: RwLock<Reader>,
    pieces: Pieces,
}

impl PromptEncoder {
    /// Reads a `tokenizer.json`, or the one in a folder, and the chat template beside it, for `at_once`
    /// encodings at a time. Conversations are read as `engine` reads them.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn load(path: &Path, at_once: usize, engine: Engine) -> Result<Arc<Self>, String> {
        let file = if path.is_dir() {
            path.join("tokenizer.json")
        } else {
            path.to_owned()
        };
        let failed = |error: &dyn std::fmt::Display| {
            let message = error.to_string().replace('\n', " ");
            format!("tokenizer: {}: {message}", file.display())
        };
        let bytes = std::fs::read(&file).map_err(|error| failed(&error))?;
        let mut tokenizer = Tokenizer::from_bytes(bytes)
            .map_err(|error| failed(&format_args!("expected a tokenizer.json: {error}")))?;
        // Engines encode the whole prompt and nothing else, whatever the file was saved with.
        tokenizer
            .with_truncation(None)
            .map_err(|error| failed(&error))?;
        tokenizer.with_padding(None);
        let folder = file.parent().unwrap_or(Path::new(""));
        let template = ChatTemplate::load(folder).unwrap_or_else(|message| {
            log::warn!("tokenizer: {message}; conversations are compared by their bytes");
            None
        });
        let chats = template.map(|template| Chats {
            reader: RwLock::new(Reader {
                engine,
                drops_attribution: false,
                release: Release::OLDEST,
                in_parts: template.in_parts,
                knows_developers: template.knows_developers,
                shows_later_systems: template.shows_later_systems,
            }),
            template,
            pieces: Pieces::new(&tokenizer),
        });
        Ok(Arc::new(Self {
            tokenizer,
            chats,
            turns: Arc::new(Semaphore::new(at_once)),
            at_once,
            of_clients: Mutex::default(),
        }))
    }

    /// Has conversations read from now on as this engine does it, and this release of SGLang.
    pub(super) fn learn_engine(&self, engine: Engine, release: Option<Release>) {
        if let Some(chats) = &self.chats {
            let mut reader = chats.reader.write();
            reader.engine = engine;
            reader.release = release.unwrap_or(reader.release);
        }
    }

    /// Whether there is a chat template.
    pub fn reads_conversations(&self) -> bool {
        self.chats.is_some()
    }

    /// The prompt in blocks of `block` tokens, as the engine will count it; `None` where it is no text,
    /// too long, or not what the tokenizer takes, so that the scan's own hashes remain.
    pub async fn encode(
        self: &Arc<Self>,
        api: Api,
        body: &Bytes,
        scanned: &Scanned,
        block: usize,
        client: Option<u64>,
    ) -> Option<PromptHashes> {
        let texts = scanned.texts.clone();
        let is_conversation = matches!(api.shape().prompt, PromptKeys::Conversation { .. });
        if is_conversation {
            if self.chats.is_none() || body.len() > MAX_CONVERSATION_BYTES {
                return None;
            }
        } else {
            let bytes: usize = texts.iter().map(Range::len).sum();
            // A list that mixes text and token ids is for the engine to refuse; of more texts than are
            // noted, not all are known.
            if texts.is_empty() || texts.len() != scanned.prompts || bytes > MAX_TEXT_BYTES {
                return None;
            }
        }
        let add_special_tokens = scanned.add_special_tokens;
        let drops_attribution = scanned.cut.is_some();
        let turn = tokio::time::timeout(PATIENCE, self.turn(client))
            .await
            .ok()??;
        let (encoder, body) = (Arc::clone(self), body.clone());
        let encoding = tokio::task::spawn_blocking(move || {
            // Held to the end of the work, which goes on where the client leaves.
            let _turn = turn;
            if is_conversation {
                encoder.conversation(api, &body, block, drops_attribution)
            } else {
                encoder.hashes(&body, &texts, block, add_special_tokens)
            }
        });
        match encoding.await {
            Ok(Ok(prompt)) => Some(prompt),
            Ok(Err(message)) => {
                log::debug!("tokenizer: {message}");
                None
            }
            Err(failure) => {
                log::warn!("tokenizer: {failure}");
                None
            }
        }
    }

    /// A turn to encode. A client has as many in the queue as run at once.
    async fn turn(
        &self,
        client: Option<u64>,
    ) -> Option<(Option<OwnedSemaphorePermit>, OwnedSemaphorePermit)> {
        let of_client = client.map(|client| {
            let mut all = self.of_clients.lock();
            if all.len() >= MANY_CLIENTS {
                all.retain(|_, turns| Arc::strong_count(turns) > 1);
            }
            let turns = all.entry(client);
            Arc::clone(turns.or_insert_with(|| Arc::new(Semaphore::new(self.at_once))))
        });
        let own = match of_client {
            Some(turns) => Some(turns.acquire_owned().await.ok()?),
            None => None,
        };
        let turn = Arc::clone(&self.turns).acquire_owned().await.ok()?;
        Some((own, turn))
    }

    /// A conversation's hashes, as the chat template has it.
    fn conversation(
        &self,
        api: Api,
        body: &[u8],
        block: usize,
        drops_attribution: bool,
    ) -> Result<PromptHashes, String> {
        let no_text = || "not a conversation of texts".to_owned();
        let chats = self.chats.as_ref().ok_or_else(no_text)?;
        let mut reader = *chats.reader.read();
        reader.drops_attribution |= drops_attribution;
        let said = reader.read(api, body).ok_or_else(no_text)?;
        let text = chats.template.render(said.messages, said.tools, said.more);
        let text = text.map_err(|error| format!("chat template: {error}"))?;
        // Of code and prose a token is three to four bytes.
        let mut hasher = TokenHasher::with_capacity(block, text.len() / 3);
        chats
            .pieces
            .encode(&self.tokenizer, &text, |ids| hasher.extend(ids))?;
        Ok(hasher.finish())
    }

    /// The first text's hashes, with the length of all.
    fn hashes(
        &self,
        body: &[u8],
        texts: &[Range<usize>],
        block: usize,
        add_special_tokens: bool,
    ) -> Result<PromptHashes, String> {
        let mut first: Option<PromptHashes> = None;
        for text in texts {
            let text: String =
                serde_json::from_slice(&body[text.clone()]).map_err(|error| error.to_string())?;
            let encoding = self
                .tokenizer
                .encode_fast(text, add_special_tokens)
                .map_err(|error| error.to_string())?;
            let ids = encoding.get_ids();
            match &mut first {
                Some(first) => first.length += ids.len(),
                None => {
                    let mut hasher = TokenHasher::with_capacity(block, ids.len());
                    hasher.extend(ids);
                    first = Some(hasher.finish());
                }
            }
        }
        first.ok_or_else(|| "no text".to_owned())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::body::scan;
    use super::*;
    use serde_json::{Value, json};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// Bytes, two merges, a first special token, and truncation that must not count.
    pub fn tokenizer_json() -> Value {
        let mut letters: Vec<_> = ByteLevel::alphabet().into_iter().collect();
        letters.sort_unstable();
        let mut tokens: Vec<String> = letters.iter().map(ToString::to_string).collect();
        tokens.extend(["th", "the", "<s>"].map(str::to_owned));
        let vocab: serde_json::Map<_, _> = (0..)
            .zip(&tokens)
            .map(|(i, token)| (token.clone(), json!(i)))
            .collect();
        let first = vocab["<s>"].clone();
        json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
            "padding": null,
            "added_tokens": [{"id": first, "content": "<s>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [first], "tokens": ["<s>"]}}},
            "decoder": null,
            "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", "th e"]},
        })
    }

    fn load(json: &str) -> Result<Arc<PromptEncoder>, String> {
        load_with(json, None)
    }

    fn load_with(json: &str, template: Option<&str>) -> Result<Arc<PromptEncoder>, String> {
        load_for(Engine::Sglang, json, template)
    }

    fn load_for(
        engine: Engine,
        json: &str,
        template: Option<&str>,
    ) -> Result<Arc<PromptEncoder>, String> {
        let folder = std::env::temp_dir().join(format!("router-encoder-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
        std::fs::write(folder.join("tokenizer.json"), json).map_err(|e| e.to_string())?;
        if let Some(template) = template {
            let file = folder.join("chat_template.jinja");
            std::fs::write(file, template).map_err(|e| e.to_string())?;
        }
        let loaded = PromptEncoder::load(&folder, 1, engine);
        std::fs::remove_dir_all(&folder).map_err(|e| e.to_string())?;
        loaded
    }

    async fn encode(encoder: &Arc<PromptEncoder>, api: Api, body: &str) -> Option<PromptHashes> {
        let body = Bytes::from(body.to_owned());
        let scanned = scan(api, &body, 2, 16).expect("valid");
        encoder.encode(api, &body, &scanned, 2, None).await
    }

    #[tokio::test]
    async fn one_clients_many_texts_do_not_stand_before_anothers() {
        let encoder = load(&tokenizer_json().to_string()).expect("a tokenizer");
        let running = encoder.turn(Some(1)).await.expect("a turn");
        let order = Arc::new(Mutex::new(Vec::new()));
        let asked = [1, 1, 1, 1, 2].map(|client| {
            let (encoder, order) = (Arc::clone(&encoder), Arc::clone(&order));
            tokio::spawn(async move {
                let _turn = encoder.turn(Some(client)).await.expect("a turn");
                order.lock().push(client);
            })
        });
        // All of them stand in their queues.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        drop(running);
        for waits in asked {
            waits.await.expect("its turn came");
        }
        let at = order.lock().iter().position(|&client| client == 2);
        assert!(at.is_some_and(|at| at <= 1), "{at:?}");
    }

    #[tokio::test]
    async fn text_is_hashed_as_its_token_ids_are() {
        let encoder = load(&tokenizer_json().to_string()).expect("valid");
        let id = |token: &str| encoder.tokenizer.token_to_id(token).expect("known");
        let the = [id("<s>"), id("the"), id("\u{120}"), id("the")];
        let expected = PromptHashes::of_tokens(&the, 2);
        for body in [
            r#"{"text":"the the"}"#,
            r#"{"text":["the the"], "add_special_tokens": false}"#,
            r#"{"text":"\u0074he\u0020the","stream":true}"#,
        ] {
            let found = encode(&encoder, Api::Generate, body).await;
            assert_eq!(found.as_ref(), Some(&expected), "{body}");
        }
        let body = r#"{"prompt": "the the", "add_special_tokens": false}"#;
        assert_eq!(
            encode(&encoder, Api::Completions, body).await,
            Some(PromptHashes::of_tokens(&the[1..], 2))
        );
        // Escapes are what they stand for: é is two bytes, the pair one character of four.
        let escaped = encode(
            &encoder,
            Api::Generate,
            r#"{"text":"\"\\\n\u00e9\ud83d\ude00"}"#,
        );
        assert_eq!(
            escaped.await.map(|prompt| prompt.length),
            Some(1 + 3 + 2 + 4)
        );
    }

    #[tokio::test]
    async fn of_several_texts_the_first_is_compared_and_all_are_counted() {
        let encoder = load(&tokenizer_json().to_string()).expect("valid");
        let body = r#"{"prompt": ["the the", "the"]}"#;
        let found = encode(&encoder, Api::Completions, body)
            .await
            .expect("text");
        let first = encode(&encoder, Api::Completions, r#"{"prompt": "the the"}"#).await;
        assert_eq!(Some(found.states), first.map(|prompt| prompt.states));
        assert_eq!(found.length, 4 + 2);
    }

    #[tokio::test]
    async fn what_is_no_text_or_too_much_of_it_stays_as_the_scan_has_it() {
        let encoder = load(&tokenizer_json().to_string()).expect("valid");
        let long = "the ".repeat(MAX_TEXT_BYTES / 4);
        for (api, body) in [
            (Api::Generate, r#"{"input_ids": [1, 2]}"#.to_owned()),
            (
                Api::Generate,
                r#"{"text": "the", "input_ids": [1]}"#.to_owned(),
            ),
            (Api::Generate, r#"{"text": "\ud83d"}"#.to_owned()),
            (Api::Generate, r#"{"text": "\x"}"#.to_owned()),
            (Api::Completions, r#"{"prompt": [[1], "the"]}"#.to_owned()),
            (Api::Chat, r#"{"messages": ["the"]}"#.to_owned()),
            (Api::Generate, json!({"text": long}).to_string()),
        ] {
            assert_eq!(encode(&encoder, api, &body).await, None, "{api:?}");
        }
    }

    const TEMPLATE: &str = "{% if tools %}<s>{{ tools | tojson }}{% endif %}\
        {% for message in messages %}<s>{{ message.role }} {{ message.content }}\
        {% for call in message.tool_calls or [] %}{{ call.function.arguments.at }}{% endfor %}\
        {% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}";

    #[tokio::test]
    async fn conversations_of_all_apis_are_the_tokens_that_the_template_makes_of_them() {
        let encoder = load_with(&tokenizer_json().to_string(), Some(TEMPLATE)).expect("valid");
        let tokens = |text: &str| {
            let encoding = encoder.tokenizer.encode_fast(text, false).expect("text");
            PromptHashes::of_tokens(encoding.get_ids(), 2)
        };
        let called =
            tokens("<s>system the\nlaw<s>user the<s>assistant 7<s>tool the end<s>assistant");
        let anthropic = json!({
            "system": [{"type": "text", "text": "the"}, {"type": "text", "text": "law"}],
            "messages": [
                {"role": "user", "content": "the"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "look", "input": {"at": 7}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "the end"}]},
                ]},
            ],
        });
        let chat = json!({
            "messages": [
                {"role": "system", "content": "the\nlaw"},
                {"role": "user", "content": [{"type": "text", "text": "the"}]},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 7}"}},
                ]},
                {"role": "tool", "tool_call_id": "1", "content": "the end"},
            ],
        });
        let responses = json!({
            "instructions": "the\nlaw",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "the"}]},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{\"at\": 7}"},
                {"type": "function_call_output", "call_id": "1", "output": "the end"},
            ],
        });
        for (api, body) in [
            (Api::Messages, anthropic),
            (Api::Chat, chat),
            (Api::Responses, responses),
        ] {
            let found = encode(&encoder, api, &body.to_string()).await;
            assert_eq!(found.as_ref(), Some(&called), "{api:?}");
        }
        let asked = r#"{"input": "the", "model": "m"}"#;
        let found = encode(&encoder, Api::Responses, asked).await;
        assert_eq!(found, Some(tokens("<s>user the<s>assistant")));
    }

    /// Codex says what it is told in messages of the role `developer`.
    #[tokio::test]
    async fn what_developers_say_comes_first_as_engines_have_it() {
        let said = |role: &str, texts: &[&str]| {
            let part = |text: &&str| json!({"type": "input_text", "text": text});
            json!({"role": role, "content": texts.iter().map(part).collect::<Vec<_>>()})
        };
        let [first, user, second] = [
            said("developer", &["the", "law"]),
            said("user", &["end"]),
            said("developer", &["the"]),
        ];
        let as_input = json!({"input": [first, user, second]});
        let knows = format!("{TEMPLATE}{{# 'developer' #}}");
        for (engine, template, shown) in [
            (
                Engine::Sglang,
                TEMPLATE,
                "<s>system the\n\nlaw\n\nthe<s>user end<s>assistant",
            ),
            (
                Engine::Vllm,
                TEMPLATE,
                "<s>system the\nlaw\n\nthe<s>user end<s>assistant",
            ),
            (
                Engine::Vllm,
                knows.as_str(),
                "<s>developer the\nlaw<s>user end<s>developer the<s>assistant",
            ),
        ] {
            let json = tokenizer_json().to_string();
            let encoder = load_for(engine, &json, Some(template)).expect("valid");
            let expected = encoder.tokenizer.encode_fast(shown, false).expect("text");
            let expected = PromptHashes::of_tokens(expected.get_ids(), 2);
            let found = encode(&encoder, Api::Responses, &as_input.to_string()).await;
            assert_eq!(found, Some(expected), "{engine:?}");
        }
        // SGLang says since 0.5.20 who said it, and leaves it in its place since 0.5.22 where the
        // template shows it there.
        let first_alone = format!(
            "{{% for m in messages %}}{{% if m.role == 'system' and not loop.first %}}\
             {{{{ raise_exception('late') }}}}{{% endif %}}{{% endfor %}}{TEMPLATE}"
        );
        let labelled = "<s>system Developer instructions:\nthe\n\nlaw\n\n\
                        Developer instructions:\nthe<s>user end<s>assistant";
        for (release, template, shown) in [
            ("0.5.21", TEMPLATE, labelled),
            ("0.5.23", first_alone.as_str(), labelled),
            (
                "0.5.23",
                TEMPLATE,
                "<s>system Developer instructions:\nthe law<s>user end\
                 <s>system Developer instructions:\nthe<s>assistant",
            ),
        ] {
            let encoder = load_with(&tokenizer_json().to_string(), Some(template)).expect("valid");
            let known = Release::of(release).expect("a version");
            encoder.learn_engine(Engine::Sglang, Some(known));
            let expected = encoder.tokenizer.encode_fast(shown, false).expect("text");
            let expected = PromptHashes::of_tokens(expected.get_ids(), 2);
            let found = encode(&encoder, Api::Responses, &as_input.to_string()).await;
            assert_eq!(found, Some(expected), "{release}");
        }
    }

    #[tokio::test]
    async fn an_assistants_turn_of_responses_is_one_message_as_sglang_has_it() {
        let text = |text: &str| json!([{"type": "output_text", "text": text}]);
        let items = json!([
            {"role": "user", "content": "the"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "law"}],
             "encrypted_content": "sglang-reasoning-v1.x"},
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"at\": 7}"},
            {"type": "function_call_output", "call_id": "c", "output": text("x")},
        ]);
        let patched = json!([
            {"role": "user", "content": "the"},
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "end"},
            {"type": "custom_tool_call_output", "call_id": "c",
             "output": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]},
        ]);
        let packed = json!([
            {"role": "user", "content": "the"},
            {"type": "reasoning", "summary": [], "encrypted_content": "sglang-reasoning-v1.x"},
        ]);
        let template = format!(
            "{{% for m in messages %}}{{{{ m.reasoning_content }}}}\
             {{% for call in m.tool_calls or [] %}}{{{{ call.function.arguments.input }}}}\
             {{% endfor %}}{{% endfor %}}{TEMPLATE}"
        );
        for (release, input, shown) in [
            (
                "0.5.17",
                &items,
                Some("law<s>user the<s>assistant a\n\nb7<s>tool x<s>assistant"),
            ),
            ("0.5.17", &patched, None),
            (
                "0.5.23",
                &patched,
                Some("end<s>user the<s>assistant <s>tool xy<s>assistant"),
            ),
            ("0.5.23", &packed, None),
        ] {
            let encoder = load_with(&tokenizer_json().to_string(), Some(&template)).expect("valid");
            let known = Release::of(release).expect("a version");
            encoder.learn_engine(Engine::Sglang, Some(known));
            let expected = shown.map(|shown| {
                let expected = encoder.tokenizer.encode_fast(shown, false).expect("text");
                PromptHashes::of_tokens(expected.get_ids(), 2)
            });
            let body = json!({"input": input}).to_string();
            let found = encode(&encoder, Api::Responses, &body).await;
            assert_eq!(found, expected, "{release}: {input}");
        }
    }

    #[tokio::test]
    async fn tools_stand_in_front_as_sglang_shows_them() {
        let encoder = load_with(&tokenizer_json().to_string(), Some(TEMPLATE)).expect("valid");
        let shown = r#"<s>[{"type": "function", "function": {"description": null, "name": "look", "parameters": {"b": 1, "a": 2}, "strict": false}, "defer_loading": null}]<s>user the<s>assistant"#;
        for (api, tools) in [
            (
                Api::Chat,
                r#"{"type": "function", "function": {"name": "look", "parameters": {"b":1,"a":2}}}"#,
            ),
            (
                Api::Messages,
                r#"{"name": "look", "input_schema": {"b":1,"a":2}}"#,
            ),
            (
                Api::Responses,
                r#"{"type": "web_search"}, {"type": "function", "name": "look", "parameters": {"b":1,"a":2}}"#,
            ),
        ] {
            let turns = if api == Api::Responses {
                "input"
            } else {
                "messages"
            };
            let body = format!(
                r#"{{"{turns}": [{{"role": "user", "content": "the"}}], "tools": [{tools}]}}"#
            );
            let shown = match api {
                Api::Messages => shown.replacen("null", r#""""#, 1),
                _ => shown.to_owned(),
            };
            let expected = encoder.tokenizer.encode_fast(shown, false).expect("text");
            let expected = PromptHashes::of_tokens(expected.get_ids(), 2);
            assert_eq!(
                encode(&encoder, api, &body).await,
                Some(expected),
                "{api:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_conversation_that_is_not_all_text_stays_as_the_scan_has_it() {
        let encoder = load_with(&tokenizer_json().to_string(), Some(TEMPLATE)).expect("valid");
        let picture = r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}"#;
        let goes_on = r#"{"input": "the", "previous_response_id": "r"}"#;
        for (api, body) in [(Api::Chat, picture), (Api::Responses, goes_on)] {
            assert_eq!(encode(&encoder, api, body).await, None, "{api:?}");
        }
        let without = load(&tokenizer_json().to_string()).expect("valid");
        let body = r#"{"messages": [{"role": "user", "content": "the"}]}"#;
        assert_eq!(encode(&without, Api::Chat, body).await, None);
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let missing = Path::new("/nowhere/tokenizer.json");
        let missing = PromptEncoder::load(missing, 1, Engine::Vllm)
            .err()
            .expect("missing");
        let broken = load("{\"model\":\n7}").err().expect("broken");
        for (error, expected) in [
            (missing, "tokenizer: /nowhere/tokenizer.json: No such file"),
            (broken, "tokenizer.json: expected a tokenizer.json: "),
        ] {
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
