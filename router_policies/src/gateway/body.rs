//! Request bodies: what routing needs is scanned out of the bytes in one pass, and no tree is built. A
//! long prompt's token ids, which take most of that time, are read while the rest of the body is on its
//! way.
//!
//! Bodies are otherwise forwarded byte for byte. The scan follows JSON's structure but leaves the
//! validation of values that routing does not need to the engine.

use super::apart::{self, Apart};
pub use super::apis::Api;
use super::apis::PromptKeys;
pub use super::cursor::Malformed;
use super::cursor::{Cursor, TokenRun};
use super::pictures::{Picture, Pictures};
use super::prompts::{Conversation, Places, Prompts};
use super::{normalise, session};
use crate::config::Engine;
use decision::fleet::prefix::hash::PromptHashes;
use serde_json::Value;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// What routing needs of a body.
#[derive(Clone, Debug, PartialEq)]
pub struct Scanned {
    /// Of several prompts: the first one's prefix, with the length of all.
    pub prompt: PromptHashes,
    pub prompts: usize,
    /// It is one of messages.
    pub is_conversation: bool,
    /// Where the prompts that are text stand, each with its quotes; not those of a chat, and of a great many
    /// only the first.
    pub texts: SmallVec<[Range<usize>; 1]>,
    /// Whether the engine puts special tokens around text; vLLM's clients may say no.
    pub add_special_tokens: bool,
    pub stream: bool,
    pub max_output_tokens: Option<u64>,
    /// The session that the body names; see [`session`].
    pub session: session::Named,
    /// The response that it goes on from.
    pub previous_response: Option<String>,
    /// The model, or the LoRA adapter, that the body names.
    pub model: Option<String>,
    /// What sets its KV apart from that of the same tokens elsewhere.
    pub apart: Apart,
    /// SGLang's own request id, if the client chose one.
    pub rid: Option<String>,
    /// It chose one for each of several prompts.
    pub has_rids: bool,
    /// Answers asked for each prompt.
    pub answers: u64,
    /// The largest token id of the prompts.
    pub largest_token: Option<u32>,
    /// The body has keys by which clients could steer the moving of KV; ours override them.
    pub has_transfer_keys: bool,
    /// What of it is left out: see [`super::normalise`].
    pub(super) cut: Option<Range<usize>>,
    pub(super) places: Places,
    /// The pictures of a conversation.
    pub(super) pictures: Vec<Picture>,
    /// What vLLM may get in the place of a `vllm_xargs` by which the client steers the moving of KV.
    pub xargs: Option<String>,
    /// Position of the outer object's closing brace.
    pub(super) close: usize,
    pub(super) is_empty: bool,
}

/// Keys of bodies by which engines are told where KV comes from and goes to. They are the router's to
/// set: a client's could read other clients' KV, or make a worker connect anywhere.
pub(super) const SGLANG_TRANSFER_KEYS: [&str; 6] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
];
pub(super) const VLLM_TRANSFER_KEYS: [&str; 2] = ["kv_transfer_params", "ec_transfer_params"];

impl Scanned {
    /// The fields that override what a client says of the moving of KV to an engine, as JSON.
    pub fn overrides(&self, engine: Engine) -> Vec<String> {
        let names = match engine {
            Engine::Sglang => &SGLANG_TRANSFER_KEYS[..],
            Engine::Vllm => &VLLM_TRANSFER_KEYS[..],
        };
        let names = names.iter().filter(|_| self.has_transfer_keys);
        let mut fields: Vec<String> = names.map(|name| format!("\"{name}\":null")).collect();
        if let (Engine::Vllm, Some(xargs)) = (engine, &self.xargs) {
            fields.push(format!("\"{XARGS}\":{xargs}"));
        }
        fields
    }
}

/// vLLM reads a sampling parameter's further arguments from here, and takes the transfer keys among them for
/// those of the body.
const XARGS: &str = "vllm_xargs";

/// `vllm_xargs` without the transfer keys; none where it has none of them. What serde does not read as the
/// engine might (`NaN`, half a surrogate) goes as a whole.
fn without_transfer_keys(raw: &[u8]) -> Option<String> {
    let Ok(value) = serde_json::from_slice::<Value>(raw) else {
        return Some("null".to_owned());
    };
    let Value::Object(mut all) = value else {
        return None;
    };
    let before = all.len();
    all.retain(|name, _| !VLLM_TRANSFER_KEYS.contains(&name.as_str()));
    (all.len() < before).then(|| Value::Object(all).to_string())
}

/// How many answers are asked for: engines read 3, 3.0 and "3". What cannot be read may be several.
fn answers_in(raw: &[u8]) -> u64 {
    if raw == b"null" {
        return 1;
    }
    let digits = raw.trim_ascii().strip_prefix(b"\"").unwrap_or(raw);
    let digits = digits.strip_suffix(b"\"").unwrap_or(digits).trim_ascii();
    let number = std::str::from_utf8(digits)
        .ok()
        .and_then(|text| text.parse::<f64>().ok());
    number.map_or(2, |number| number as u64)
}

/// Whether an engine reads this as true.
fn is_true(raw: &[u8]) -> bool {
    let word = raw.strip_prefix(b"\"").unwrap_or(raw);
    let word = word.strip_suffix(b"\"").unwrap_or(word);
    let trues: [&[u8]; 6] = [b"true", b"1", b"on", b"yes", b"y", b"t"];
    trues.iter().any(|it| word.eq_ignore_ascii_case(it))
}

fn unsigned(raw: &[u8]) -> Option<u64> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

fn text(raw: &[u8]) -> Option<String> {
    serde_json::from_slice(raw).ok()
}

/// Scans a body. Token prompts are hashed in blocks of `block` tokens, text in blocks of
/// `text_block` tokens' worth of bytes.
///
/// # Errors
/// The body is not a JSON object, or has no prompt that this API reads.
pub fn scan(api: Api, body: &[u8], block: usize, text_block: usize) -> Result<Scanned, Malformed> {
    Scanner::new(api, block, text_block).scan(body)
}

/// Where nobody counts them.
static UNKNOWN: LazyLock<Arc<Pictures>> = LazyLock::new(Arc::default);

/// Scans a body that comes in pieces.
pub struct Scanner {
    api: Api,
    block: usize,
    text_block: usize,
    normalises: bool,
    pictures: Arc<Pictures>,
    /// As much of the beginning as was searched for a list of token ids.
    searched: usize,
    run: Option<TokenRun>,
}

/// A prompt that does not begin within so many bytes is read when the body is whole.
const SEARCHED_BYTES: usize = 64 << 10;

impl Scanner {
    /// See [`scan`].
    pub fn new(api: Api, block: usize, text_block: usize) -> Self {
        Self {
            api,
            block,
            text_block,
            normalises: false,
            pictures: Arc::clone(&UNKNOWN),
            searched: 0,
            run: None,
        }
    }

    /// Whether what changes in front of what is the same is left out.
    #[must_use]
    pub fn normalising(mut self, normalises: bool) -> Self {
        self.normalises = normalises;
        self
    }

    /// What is known of pictures.
    #[must_use]
    pub(super) fn counting(mut self, pictures: &Arc<Pictures>) -> Self {
        self.pictures = Arc::clone(pictures);
        self
    }

    /// Reads the prompt's token ids as far as they go in the beginning of a body that is announced to
    /// have so many `bytes`.
    pub fn scan_ahead(&mut self, begin: &[u8], bytes: usize) {
        let mut cursor = Cursor {
            bytes: begin,
            at: 0,
            run: None,
            long: Vec::new(),
        };
        if let Some(run) = &mut self.run {
            // Before the first id comes a bracket.
            if run.at > run.start {
                run.take_short_ids(begin);
            }
        } else if matches!(self.api.shape().prompt, PromptKeys::Prompts { .. })
            && self.searched < SEARCHED_BYTES
            && self.searched * 2 <= begin.len()
        {
            // Twice as much each time: one byte after the other must not cost their square.
            self.searched = begin.len();
            // What fails for want of the rest is found again when all is there.
            let _ = self.object(&mut cursor, bytes);
            self.run = cursor.run;
        }
    }

    /// Scans the whole body.
    ///
    /// # Errors
    /// See [`scan`].
    pub fn scan(mut self, body: &[u8]) -> Result<Scanned, Malformed> {
        let mut cursor = Cursor {
            bytes: body,
            at: 0,
            run: self.run.take(),
            long: Vec::new(),
        };
        self.object(&mut cursor, body.len())
    }

    fn object(&self, cursor: &mut Cursor<'_>, bytes: usize) -> Result<Scanned, Malformed> {
        let Self {
            api,
            block,
            text_block,
            ..
        } = *self;
        let shape = api.shape();
        let mut prompts: Option<Prompts> = None;
        let mut second_choice: Option<Prompts> = None;
        let mut conversation = Conversation::default();
        let mut add_special_tokens = true;
        let mut stream = false;
        let mut max_output_tokens = None;
        let mut named = session::InBody::default();
        let mut rid = None;
        let mut previous_response = None;
        let mut has_rids = false;
        let mut xargs = None;
        let mut model = None;
        let mut apart = Apart::default();
        let mut answers = 1;
        let mut has_transfer_keys = false;
        let mut cut = None;
        let outer = cursor.object(|cursor, key| {
            match shape.prompt {
                PromptKeys::Prompts { first, second } => {
                    let choice = if key == first.as_bytes() {
                        Some(&mut prompts)
                    } else {
                        let is_second = second.is_some_and(|second| key == second.as_bytes());
                        is_second.then_some(&mut second_choice)
                    };
                    if let Some(choice) = choice
                        && cursor.peek() != Some(b'n')
                    {
                        *choice = Some(Prompts::read(cursor, block, text_block, bytes)?);
                        return Ok(());
                    }
                }
                PromptKeys::Conversation { before, turns } => {
                    cursor.peek();
                    let start = cursor.at;
                    if conversation.take(cursor, key, before, turns)? {
                        if self.normalises && api == Api::Messages && key == b"system" {
                            let found = normalise::attribution(&cursor.bytes[start..cursor.at]);
                            cut = found.map(|it| start + it.start..start + it.end);
                            if let Some(cut) = &cut {
                                let rest = &cursor.bytes[cut.end..cursor.at];
                                conversation.shorten(key, before, rest);
                            }
                        }
                        return Ok(());
                    }
                }
            }
            match (api, key) {
                (Api::Generate, b"sampling_params") if cursor.peek() == Some(b'{') => {
                    cursor.object(|cursor, key| {
                        let raw = cursor.value()?;
                        match key {
                            b"max_new_tokens" => max_output_tokens = unsigned(raw),
                            b"n" => answers = answers_in(raw),
                            _ => {}
                        }
                        Ok(())
                    })?;
                }
                (Api::Completions, b"add_special_tokens") => {
                    add_special_tokens = cursor.value()? != b"false";
                }
                (_, b"stream") => stream = is_true(cursor.value()?),
                (Api::Completions | Api::Chat, b"n" | b"best_of") => {
                    answers = answers.max(answers_in(cursor.value()?));
                }
                (_, b"metadata") if cursor.peek() == Some(b'{') => {
                    cursor.object(|cursor, key| {
                        let raw = cursor.value()?;
                        if key == b"user_id" {
                            named.metadata_user_id = text(raw);
                        }
                        Ok(())
                    })?;
                }
                (_, b"prompt_cache_key") => named.prompt_cache_key = text(cursor.value()?),
                (Api::Responses, b"previous_response_id") => {
                    previous_response = text(cursor.value()?);
                }
                (_, b"rid") => {
                    let raw = cursor.value()?;
                    rid = text(raw);
                    has_rids = raw.starts_with(b"[");
                }
                (_, b"vllm_xargs") => xargs = without_transfer_keys(cursor.value()?),
                (_, b"model") => model = text(cursor.value()?),
                (_, b"lora_path") => {
                    let raw = cursor.value()?;
                    apart.lora_path = apart::name(raw);
                    if api == Api::Generate {
                        model = text(raw);
                    }
                }
                (_, b"cache_salt") => apart.cache_salt = apart::name(cursor.value()?),
                (_, b"extra_key") => apart.extra_key = apart::name(cursor.value()?),
                _ if api != Api::Generate
                    && shape.limits.iter().any(|limit| key == limit.as_bytes()) =>
                {
                    max_output_tokens = unsigned(cursor.value()?).or(max_output_tokens);
                }
                _ => {
                    let mut names = SGLANG_TRANSFER_KEYS.iter().chain(&VLLM_TRANSFER_KEYS);
                    has_transfer_keys |= names.any(|name| key == name.as_bytes());
                    cursor.value()?;
                }
            }
            Ok(())
        })?;
        if cursor.peek().is_some() {
            return cursor.fail("the end of the body");
        }
        let places = std::mem::take(&mut conversation.places);
        let mut pictures = Vec::new();
        let found = match shape.prompt {
            PromptKeys::Prompts { .. } => prompts.or(second_choice),
            PromptKeys::Conversation { .. } => {
                let picture = |raw: &[u8]| self.pictures.of(model.as_deref(), raw);
                conversation
                    .finish(text_block, picture)
                    .map(|(prompt, found)| {
                        pictures = found;
                        Prompts::one(prompt)
                    })
            }
        };
        let Some(found) = found else {
            cursor.at = outer.close;
            return cursor.fail(match api {
                Api::Generate => "a key \"input_ids\" or \"text\"",
                Api::Completions => "a key \"prompt\"",
                Api::Chat | Api::Messages => "a key \"messages\"",
                Api::Responses => "a key \"input\"",
            });
        };
        let Some(mut prompt) = found.first else {
            cursor.at = outer.close;
            return cursor.fail("at least one prompt");
        };
        prompt.length += found.more;
        Ok(Scanned {
            prompt,
            prompts: found.count,
            is_conversation: matches!(shape.prompt, PromptKeys::Conversation { .. }),
            texts: found.texts,
            add_special_tokens,
            stream,
            max_output_tokens,
            session: named.session(),
            previous_response,
            model,
            apart,
            rid,
            has_rids,
            answers,
            largest_token: found.largest_token,
            has_transfer_keys,
            cut,
            places,
            pictures,
            xargs,
            close: outer.close,
            is_empty: outer.is_empty,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::prompts::MAX_TEXTS;
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn scan16(api: Api, body: &[u8]) -> Result<Scanned, Malformed> {
        scan(api, body, 16, 16)
    }

    #[test]
    fn token_prompts_are_counted_exactly_and_options_are_read() {
        let body = json!({
            "input_ids": (0..100).collect::<Vec<u32>>(), "stream": true, "rid": "r\"1",
            "sampling_params": {"stop": ["}"], "max_new_tokens": 7}, "text": null,
        });
        let scanned = scan16(Api::Generate, body.to_string().as_bytes()).expect("valid");
        assert_eq!(scanned.prompt.tokens(), 100);
        assert_eq!(scanned.prompt.states.len(), 6);
        assert!(scanned.stream);
        assert_eq!(scanned.max_output_tokens, Some(7));
        assert_eq!(scanned.rid.as_deref(), Some("r\"1"));
    }

    #[test]
    fn what_sets_a_prompts_cache_apart_is_read_in_every_api() {
        let apart = |more: &str| {
            let prompt = r#""input_ids":[1],"prompt":[1],"messages":"m","input":"i""#;
            let body = format!("{{{prompt}{more}}}");
            let read = Api::ALL.map(|api| scan16(api, body.as_bytes()).expect("valid").apart);
            assert!(read.iter().all(|other| *other == read[0]));
            let [first, ..] = read;
            first
        };
        let text = |text: &str| Some(text.to_owned());
        let more = r#","lora_path":"sql","cache_salt":"s\u00e9l","extra_key":null"#;
        let read = apart(more);
        assert_eq!(
            (read.lora_path, read.cache_salt, read.extra_key),
            (text("sql"), text("sél"), None)
        );
        let of_batch = apart(r#","lora_path":["a",null],"extra_key":"k""#);
        assert_eq!(
            (of_batch.lora_path, of_batch.extra_key),
            (text(r#"["a",null]"#), text("k"))
        );
        assert_eq!(apart(""), Apart::default());
    }

    #[test]
    fn a_longer_conversation_extends_the_states_of_a_shorter_one() {
        let turn = |n: usize| {
            let messages: Vec<_> = (0..n)
                .map(|i| json!({"role": "user", "content": "x".repeat(200 + i)}))
                .collect();
            let body = json!({"messages": messages, "prompt_cache_key": "u"}).to_string();
            scan16(Api::Chat, body.as_bytes()).expect("valid")
        };
        let (short, long) = (turn(2), turn(3));
        assert!(long.prompt.states.starts_with(&short.prompt.states));
        assert!(short.prompt.states.len() > 5);
        assert_eq!(short.session, session::Named::ByCacheKey("u".to_owned()));
    }

    #[test]
    fn a_picture_counts_as_a_picture_and_not_as_the_text_that_carries_it() {
        let data = |letter: &str| letter.repeat(900_000);
        let openai = |letter| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", data(letter))}});
        let anthropic = |letter| json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data(letter)}});
        let responses = |letter| json!({"type": "input_image", "image_url": format!("data:image/png;base64,{}", data(letter))});
        let typed = |letter: &str| json!({"type": "text", "text": format!("data:image/png;base64,{}", data(letter))});
        let length = |api, key: &str, part: Value, after: &str| {
            let turns =
                json!([{"role": "user", "content": [part]}, {"role": "user", "content": after}]);
            scan16(api, json!({key: turns}).to_string().as_bytes())
                .expect("valid")
                .prompt
        };
        for (api, key, part) in [
            (
                Api::Chat,
                "messages",
                &openai as &dyn Fn(&'static str) -> Value,
            ),
            (Api::Messages, "messages", &anthropic),
            (Api::Responses, "input", &responses),
        ] {
            let with = length(api, key, part("A"), "x");
            assert!((1_000..3_000).contains(&with.tokens()), "{}", with.tokens());
            assert_eq!(with.pictures, 1);
            let longer = length(api, key, part("A"), &"x".repeat(2_000));
            assert!(
                longer
                    .states
                    .starts_with(&with.states[..with.states.len() - 2])
            );
            let other = length(api, key, part("B"), "x");
            assert_ne!(other.states.last(), with.states.last());
            // What a client writes as text is text.
            assert!(length(api, key, typed("A"), "x").tokens() > 200_000);
        }
    }

    #[test]
    fn what_is_looked_at_counts_where_it_is_by_its_address_too_and_what_is_text_does_not() {
        let url = "https://example.org/a/picture.png";
        let pdf = "JVBERi0x".repeat(100);
        let words = "some words ".repeat(100);
        for (api, part, expected) in [
            (
                Api::Chat,
                json!({"type": "image_url", "image_url": {"url": url}}),
                2,
            ),
            (
                Api::Chat,
                json!({"type": "image_url", "image_url": {"detail": "low", "url": url}}),
                2,
            ),
            (
                Api::Messages,
                json!({"type": "image", "source": {"type": "url", "url": url}}),
                2,
            ),
            (
                Api::Messages,
                json!({"type": "document", "source": {"type": "url", "url": url}}),
                2,
            ),
            (
                Api::Messages,
                json!({"type": "document", "source": {"type": "base64", "data": pdf}}),
                2,
            ),
            (
                Api::Messages,
                json!({"type": "document", "source": {"type": "text", "data": words}}),
                0,
            ),
            (
                Api::Responses,
                json!({"type": "input_image", "image_url": url}),
                2,
            ),
            (
                Api::Responses,
                json!({"type": "input_file", "file_url": url}),
                2,
            ),
            (
                Api::Messages,
                json!({"type": "tool_use", "input": {"prompt": "p", "url": url}}),
                0,
            ),
            (
                Api::Messages,
                json!({"type": "tool_use", "input": {"url": url}}),
                0,
            ),
            (Api::Chat, json!({"type": "text", "text": url}), 0),
        ] {
            let key = match api {
                Api::Responses => "input",
                _ => "messages",
            };
            let body = json!({key: [{"role": "user", "content": [part, "between", part]}]});
            let scanned = scan16(api, body.to_string().as_bytes()).expect("valid");
            assert_eq!(scanned.pictures.len(), expected, "{body}");
            assert_eq!(scanned.prompt.pictures, expected as u64);
        }
    }

    #[test]
    fn of_two_conversations_the_last_counts_with_its_pictures_alone() {
        let url = format!("data:image/png;base64,{}", "A".repeat(9_000));
        let picture = json!([{"role": "user", "content": [{"image_url": {"url": url}}]}]);
        for last in ["\"hi\"", "[]"] {
            let body = format!(r#"{{"messages":{picture},"messages":{last}}}"#);
            let prompt = scan16(Api::Chat, body.as_bytes()).expect("valid").prompt;
            assert_eq!((prompt.pictures, prompt.tokens() <= 1), (0, true), "{last}");
        }
    }

    #[test]
    fn several_prompts_count_together() {
        let body = br#"{"prompt": [[1,2,3],[4,5]], "max_tokens": 9}"#;
        let scanned = scan(Api::Completions, body, 1, 16).expect("valid");
        assert_eq!((scanned.prompts, scanned.prompt.tokens()), (2, 5));
        assert_eq!(scanned.max_output_tokens, Some(9));
    }

    #[test]
    fn a_long_prompt_is_read_while_it_comes() {
        let tokens: Vec<u32> = (0..50_000).collect();
        let body = json!({"input_ids": tokens, "stream": true}).to_string();
        let body = body.as_bytes();
        let mut scanner = Scanner::new(Api::Generate, 16, 16);
        for end in (0..body.len()).step_by(10_000) {
            scanner.scan_ahead(&body[..end], body.len());
            let read = scanner.run.as_ref().map_or(0, |run| run.at);
            assert!(read + 100 > end, "{read} of {end}");
        }
        assert_eq!(scanner.scan(body), scan16(Api::Generate, body));
    }

    #[test]
    fn many_small_texts_are_counted_and_not_noted_one_by_one() {
        let texts = vec![""; 100_000];
        let body = json!({"prompt": texts}).to_string();
        let scanned = scan16(Api::Completions, body.as_bytes()).expect("valid");
        assert_eq!(scanned.prompts, texts.len());
        assert!(scanned.texts.capacity() <= 2 * MAX_TEXTS);
    }

    #[test]
    fn malformed_bodies_name_the_place() {
        for (body, offset) in [
            (&b"[]"[..], 0),
            (b"", 0),
            (b"{\"input_ids\":[1,x]}", 16),
            (b"{\"input_ids\":[1,-2]}", 16),
            (b"{\"input_ids\":[1]", 16),
            (b"{\"input_ids\":[1]} x", 18),
            (b"{\"text\":\"abc", 12),
            (b"{\"a\":[}", 6),
            (b"{\"a\":1}", 6),
        ] {
            let error = scan16(Api::Generate, body).expect_err("malformed");
            assert_eq!(
                error.offset,
                offset,
                "{error} in {}",
                String::from_utf8_lossy(body)
            );
        }
    }

    proptest! {
        #[test]
        fn token_ids_are_read_as_serde_reads_them(
            tokens in proptest::collection::vec(
                prop_oneof![0u32..12, 0u32..200_000, any::<u32>()], 0..60),
            spacing in 0usize..3,
        ) {
            let body = match spacing {
                0 => json!({"input_ids": tokens}).to_string(),
                1 => format!("{{\"input_ids\": {tokens:?}}}"),
                _ => serde_json::to_string_pretty(&json!({"input_ids": tokens})).expect("JSON"),
            };
            let scanned = scan(Api::Generate, body.as_bytes(), 1, 16).expect("valid");
            prop_assert_eq!(scanned.prompt, PromptHashes::of_tokens(&tokens, 1));
        }

        #[test]
        fn a_body_that_comes_in_pieces_is_scanned_as_if_it_came_whole(
            prompts in proptest::collection::vec(proptest::collection::vec(
                prop_oneof![0u32..12, 0u32..200_000, any::<u32>()], 0..60), 1..3),
            spacing in 0usize..3,
            cuts in proptest::collection::vec(0usize..1_500, 0..12),
            wrong in proptest::option::of((0usize..1_500, any::<u8>())),
        ) {
            let value = match &prompts[..] {
                [one] => json!({"max_tokens": 3, "prompt": one, "user": "u"}),
                several => json!({"max_tokens": 3, "prompt": several, "user": "u"}),
            };
            let mut body = match spacing {
                0 => value.to_string(),
                1 => value.to_string().replace(',', ", "),
                _ => serde_json::to_string_pretty(&value).expect("JSON"),
            }
            .into_bytes();
            if let Some((at, byte)) = wrong {
                let at = at % body.len();
                body[at] = byte;
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % body.len()).collect();
            cuts.sort_unstable();
            let mut scanner = Scanner::new(Api::Completions, 2, 16);
            for cut in cuts {
                scanner.scan_ahead(&body[..cut], body.len());
            }
            prop_assert_eq!(scanner.scan(&body), scan(Api::Completions, &body, 2, 16));
        }

        #[test]
        fn no_bytes_make_the_scan_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for api in [Api::Generate, Api::Completions, Api::Chat] {
                let _ = scan16(api, &bytes);
            }
        }

        #[test]
        fn a_cut_or_flipped_body_never_panics(cut in 0usize..80, flip in 0usize..80, bit in 0u8..8) {
            let mut body =
                br#"{"input_ids":[1,22,333],"text":"a\"b\\","sampling_params":{"max_new_tokens":3},"x":[{}]}"#
                    .to_vec();
            if let Some(byte) = body.get_mut(flip) {
                *byte ^= 1 << bit;
            }
            body.truncate(body.len() - cut.min(body.len()));
            let _ = scan16(Api::Generate, &body);
        }
    }
}
