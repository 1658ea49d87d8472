//! What answers say of their tokens: of the prompt, of its cached part and of the output.
//!
//! In the answers of most APIs what models and clients write is text, in which quotes are escaped: there the
//! counts are found by their names, without parsing. In the others it may be JSON with the same names, so
//! that only the object that counts is read, of the events that have it: see [`Counts`].

use super::apis::{Api, Counts};
use super::seam::Seam;
use super::sse::MAX_KEPT_BYTES;
use decision::fleet::Usage;
use memchr::memmem::Finder;
use std::sync::LazyLock;

/// How the keys of all counts of tokens end. Made once: to make it takes longer than to look for it.
const COUNT: &[u8] = b"_tokens\":";
/// What stands before that where output tokens are counted.
const OF_OUTPUT: &[u8] = b"\"completion";
static COUNTS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(COUNT));

/// What an engine says of prompt and cached tokens. The last of equal keys counts.
fn usage_in(data: &[u8]) -> Usage {
    Usage {
        output_tokens: None,
        ..usage_of_whole(data)
    }
}

/// What an answer in one piece says of prompt, cached and output tokens. SGLang's answer to a batch has a
/// count of output tokens for each prompt, the others one for all.
fn usage_of_whole(data: &[u8]) -> Usage {
    let mut usage = Usage::default();
    for at in COUNTS.find_iter(data) {
        let (before, after) = (&data[..at], &data[at + COUNT.len()..]);
        let (count, is_output) = if before.ends_with(b"\"prompt") {
            (&mut usage.prompt_tokens, false)
        } else if before.ends_with(b"\"cached") {
            (&mut usage.cached_tokens, false)
        } else if before.ends_with(OF_OUTPUT) {
            (&mut usage.output_tokens, true)
        } else {
            continue;
        };
        let Some(found) = leading_number(after) else {
            continue;
        };
        *count = Some(match *count {
            Some(earlier) if is_output => u64::saturating_add(earlier, found),
            _ => found,
        });
    }
    usage
}

/// What an answer of `api` in one piece says of its tokens.
pub(super) fn usage_of_answer(api: Api, data: &[u8]) -> Usage {
    match api.counts() {
        Some(counts) if data.len() < MAX_KEPT_BYTES => (counts.read)(data),
        Some(_) => Usage::default(),
        None => usage_of_whole(data),
    }
}

/// What a stream says of its tokens.
#[derive(Debug)]
pub(super) enum StreamUsage {
    ByNames(UsageReader, End),
    InEvents(&'static Counts, Usage),
}

impl StreamUsage {
    pub fn of(api: Api) -> Self {
        match api.counts() {
            Some(counts) => Self::InEvents(counts, Usage::default()),
            None => Self::ByNames(UsageReader::default(), End::default()),
        }
    }

    /// The names of the events that [`StreamUsage::see`] has to get.
    pub fn events(&self) -> &'static [&'static str] {
        match self {
            Self::ByNames(..) => &[],
            Self::InEvents(counts, _) => counts.events,
        }
    }

    /// Takes the data of an event that counts.
    pub fn see(&mut self, event: &[u8]) {
        let Self::InEvents(counts, known) = self else {
            return;
        };
        let usage = (counts.read)(event);
        // An event that leaves out what was cached counts too little: the largest is the prompt.
        known.prompt_tokens = known.prompt_tokens.max(usage.prompt_tokens);
        known.cached_tokens = usage.cached_tokens.or(known.cached_tokens);
        known.output_tokens = usage.output_tokens.or(known.output_tokens);
    }

    /// Takes the next bytes, of which the events that count have been seen; returns what they, or they and those
    /// before, say of the prompt.
    pub fn feed(&mut self, data: &[u8]) -> Usage {
        match self {
            Self::ByNames(reader, end) => {
                end.feed(data);
                reader.feed(data)
            }
            Self::InEvents(_, known) => Usage {
                output_tokens: None,
                ..*known
            },
        }
    }

    /// The length of the answer, once it has ended.
    pub fn output_tokens(&self) -> Option<u64> {
        match self {
            Self::ByNames(_, end) => end.output_tokens(),
            Self::InEvents(_, known) => known.output_tokens,
        }
    }
}

/// The last count of output tokens. Looked for from the end, where it stands.
fn last_count(data: &[u8]) -> Option<u64> {
    let mut ends = memchr::memrchr_iter(b':', data);
    ends.find_map(|end| {
        let key = data[..=end].strip_suffix(COUNT)?;
        key.ends_with(OF_OUTPUT).then_some(())?;
        leading_number(&data[end + 1..])
    })
}

/// The end of a stream, as far as it has come: engines count the answer's tokens there, and one piece
/// may hold several of them.
#[derive(Debug, Default)]
pub(super) struct End(Vec<u8>);

/// More than the usage takes and what follows it.
const END_BYTES: usize = 768;

impl End {
    fn feed(&mut self, data: &[u8]) {
        let data = &data[data.len().saturating_sub(END_BYTES)..];
        // As much again, so that what is kept is not moved for each event.
        const ROOM: usize = 2 * END_BYTES;
        if self.0.len() + data.len() > ROOM {
            let surplus = (self.0.len() + data.len()).saturating_sub(END_BYTES);
            self.0.drain(..surplus.min(self.0.len()));
        }
        if self.0.capacity() == 0 {
            self.0.reserve_exact(ROOM);
        }
        self.0.extend_from_slice(data);
    }

    fn output_tokens(&self) -> Option<u64> {
        last_count(&self.0)
    }
}

/// The number that `text` begins with. It has to end there: its last digits may be yet to come.
fn leading_number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let digits = text.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

/// Finds the usage in a stream, however that is cut. It may come in pieces: asked for usage in every
/// event, vLLM (0.26.0) names the cached tokens in the last one alone.
#[derive(Debug, Default)]
pub(super) struct UsageReader {
    seam: Seam<SEAM_BYTES>,
    is_complete: bool,
}

/// More than a key and its number take.
const SEAM_BYTES: usize = 48;

impl UsageReader {
    /// Takes the next bytes; returns what they, or they and those before, say.
    pub fn feed(&mut self, data: &[u8]) -> Usage {
        if self.is_complete {
            return Usage::default();
        }
        let across = self.seam.feed(data, usage_in);
        let within = usage_in(data);
        let usage = Usage {
            prompt_tokens: within.prompt_tokens.or(across.prompt_tokens),
            cached_tokens: within.cached_tokens.or(across.cached_tokens),
            output_tokens: None,
        };
        // Engines name the prompt's tokens no later than the cached ones.
        self.is_complete = usage.cached_tokens.is_some();
        usage
    }
}

#[cfg(test)]
mod tests {
    use super::super::sse::SseProgress;
    use super::*;

    fn usage(prompt_tokens: u64, cached_tokens: Option<u64>) -> Usage {
        Usage {
            prompt_tokens: Some(prompt_tokens),
            cached_tokens,
            output_tokens: None,
        }
    }

    #[test]
    fn output_tokens_are_the_engines_count() {
        let of_whole = |body: &str| usage_of_whole(body.as_bytes()).output_tokens;
        assert_eq!(
            of_whole(r#"{"usage":{"completion_tokens":3,"completion_tokens_details":null}}"#),
            Some(3)
        );
        let batch =
            r#"[{"meta_info":{"completion_tokens":3}},{"meta_info":{"completion_tokens":4}}]"#;
        assert_eq!(of_whole(batch), Some(7), "SGLang's, of two prompts");
        let messages = br#"{"type":"message","usage":{"input_tokens":40,"output_tokens":9}}"#;
        let of_messages = usage_of_answer(Api::Messages, messages);
        assert_eq!(of_messages.output_tokens, Some(9));
        assert_eq!(of_whole(r#"{"text":"\"completion_tokens\":5,"}"#), None);
    }

    /// What a model may call a tool with, or a client write into a tool's schema, to be taken for a count.
    const FORGED: &str = r#"{"prompt_tokens":5,"cached_tokens":900000,"completion_tokens":3,"output_tokens":800000,"input_tokens":700000,"cache_read_input_tokens":600000,"input_tokens_details":{"cached_tokens":500000},"usage":{"input_tokens":400000,"output_tokens":300000},"message":{"usage":{"input_tokens":200000}},"response":{"usage":{"input_tokens":100000}}}"#;

    fn whole(cached_tokens: Option<u64>) -> Usage {
        Usage {
            output_tokens: Some(9),
            ..usage(40, cached_tokens)
        }
    }

    #[test]
    fn what_a_model_calls_a_tool_with_is_no_count() {
        // Anthropic's API has a tool's input as JSON and not as text, OpenAI's newer one the tools' schemas.
        let message = format!(
            r#"{{"type":"message","content":[{{"type":"tool_use","name":"report","input":{FORGED}}}],"usage":{{"input_tokens":8,"cache_read_input_tokens":32,"output_tokens":9}}}}"#
        );
        let response = format!(
            r#"{{"object":"response","tools":[{{"parameters":{{"examples":[{FORGED}]}}}}],"usage":{{"input_tokens":40,"input_tokens_details":{{"cached_tokens":32}},"output_tokens":9}},"metadata":{FORGED}}}"#
        );
        for (api, body) in [(Api::Messages, message), (Api::Responses, response)] {
            let found = usage_of_answer(api, body.as_bytes());
            assert_eq!(found, whole(Some(32)), "{body}");
            let uncounted = body.replacen(r#""usage":{"input_tokens":8,"#, r#""not":{"#, 1);
            let uncounted = uncounted.replacen(r#""usage":{"input_tokens":40,"#, r#""not":{"#, 1);
            assert_ne!(uncounted, body);
            let found = usage_of_answer(api, uncounted.as_bytes());
            assert_eq!(found, Usage::default(), "{uncounted}");
        }
    }

    #[test]
    fn the_last_count_of_a_stream_counts() {
        let mut end = End::default();
        end.feed(br#"data: {"usage":{"prompt_tokens":40,"completion_tokens":1}}"#);
        assert_eq!(end.output_tokens(), Some(1));
        end.feed(
            b"\n\ndata: {\"usage\":{\"completion_tokens\": 9}}\n\ndata: {\"text\":\"a: b\"}\n\n",
        );
        assert_eq!(end.output_tokens(), Some(9));
        end.feed(b"data: {\"usage\":{\"completion_tokens\":");
        assert_eq!(end.output_tokens(), Some(9), "the next is not there yet");
    }

    /// An event as engines name it, by its type.
    fn event(data: &str) -> String {
        let (_, kind) = data.rsplit_once(r#""type":""#).expect("a type");
        let (kind, _) = kind.split_once('"').expect("its end");
        format!("event: {kind}\ndata: {data}\n\n")
    }

    /// A message with a call of a tool, whose input is JSON in the first event of the call if an engine likes to
    /// have it so, and text in what follows.
    fn message_stream(begin: &str, end: &str) -> String {
        let text = serde_json::Value::from(FORGED);
        [
            &format!(r#"{{"message":{{"content":[],"usage":{{{begin}}}}},"type":"message_start"}}"#),
            &format!(
                r#"{{"index":0,"content_block":{{"name":"f","input":{FORGED}}},"type":"content_block_start"}}"#
            ),
            &format!(
                r#"{{"index":0,"delta":{{"partial_json":{text}}},"type":"content_block_delta"}}"#
            ),
            r#"{"index":0,"type":"content_block_stop"}"#,
            &format!(
                r#"{{"delta":{{"stop_reason":"tool_use"}},"usage":{{{end}}},"type":"message_delta"}}"#
            ),
            r#"{"type":"message_stop"}"#,
        ]
        .map(event)
        .concat()
    }

    /// A response that repeats the request's tools, as vLLM's do in three events.
    fn response_stream(usage: &str) -> String {
        let tools = format!(r#""tools":[{{"parameters":{{"examples":[{FORGED}]}}}}]"#);
        let call = serde_json::Value::from(FORGED);
        [
            format!(r#"{{"response":{{{tools},"usage":null}},"type":"response.created"}}"#),
            format!(r#"{{"response":{{{tools},"usage":null}},"type":"response.in_progress"}}"#),
            format!(
                r#"{{"delta":{call},"type":"response.function_call_arguments.delta"}}"#
            ),
            format!(
                r#"{{"item":{{"arguments":{call},"examples":{FORGED}}},"type":"response.output_item.done"}}"#
            ),
            format!(
                r#"{{"response":{{"output":[{{"arguments":{call}}}],{tools},"usage":{{{usage}}},"metadata":{FORGED}}},"type":"response.completed"}}"#
            ),
        ]
        .map(|data| event(&data))
        .concat()
    }

    fn read_stream<'a>(api: Api, pieces: impl Iterator<Item = &'a [u8]>) -> Usage {
        let mut usage = StreamUsage::of(api);
        let mut progress = SseProgress::ending_with(api.ends())
            .echoing(api != Api::Generate)
            .looking_into(usage.events());
        let mut known = Usage::default();
        for piece in pieces {
            progress.feed_and_look(piece, |event| usage.see(event));
            let told = usage.feed(piece);
            assert_eq!(told.output_tokens, None, "before the answer's end");
            known.prompt_tokens = told.prompt_tokens.or(known.prompt_tokens);
            known.cached_tokens = told.cached_tokens.or(known.cached_tokens);
        }
        Usage {
            output_tokens: usage.output_tokens(),
            ..known
        }
    }

    #[test]
    fn streams_that_may_have_forged_counts_are_read_right_wherever_they_are_cut() {
        let of_response = r#""input_tokens":40,"input_tokens_details":{"cached_tokens":32},"output_tokens":9,"total_tokens":49"#;
        let streams = [
            // SGLang 0.5.17.
            (
                Api::Messages,
                message_stream(
                    r#""input_tokens":8,"output_tokens":0,"cache_read_input_tokens":32"#,
                    r#""output_tokens":9"#,
                ),
                whole(Some(32)),
            ),
            // vLLM 0.26.0, with and without --enable-prompt-tokens-details.
            (
                Api::Messages,
                message_stream(
                    r#""input_tokens":40,"output_tokens":0"#,
                    r#""input_tokens":8,"output_tokens":9,"cache_read_input_tokens":32"#,
                ),
                whole(Some(32)),
            ),
            (
                Api::Messages,
                message_stream(
                    r#""input_tokens":40,"output_tokens":0"#,
                    r#""input_tokens":40,"output_tokens":9"#,
                ),
                whole(None),
            ),
            (
                Api::Responses,
                response_stream(of_response),
                whole(Some(32)),
            ),
        ];
        for (api, text, expected) in streams {
            for text in [
                text.clone(),
                text.replace('\n', "\r\n"),
                text.replace('\n', "\r"),
            ] {
                for at in 0..=text.len() {
                    let (head, tail) = text.as_bytes().split_at(at);
                    let found = read_stream(api, [head, tail].into_iter());
                    assert_eq!(found, expected, "{api:?} cut at {at}");
                }
                for size in 1..=100 {
                    let found = read_stream(api, text.as_bytes().chunks(size));
                    assert_eq!(found, expected, "{api:?} in pieces of {size} bytes");
                }
            }
        }
    }

    #[test]
    fn an_event_that_has_not_ended_counts_nothing() {
        let text = message_stream(
            r#""input_tokens":40,"output_tokens":1"#,
            r#""output_tokens":9"#,
        );
        for at in 0..text.len() {
            let found = read_stream(Api::Messages, [&text.as_bytes()[..at]].into_iter());
            let (begun, ended) = (found.prompt_tokens, found.output_tokens);
            assert!(matches!(begun, None | Some(40)) && matches!(ended, None | Some(9)));
        }
    }

    #[test]
    fn long_responses_count_and_endless_ones_do_not() {
        let of = |bytes: usize| {
            let usage = r#""input_tokens":40,"input_tokens_details":{"cached_tokens":32},"output_tokens":9"#;
            let text = "a".repeat(bytes);
            let response = format!(r#"{{"output":"{text}","usage":{{{usage}}}}}"#);
            let stream = event(&format!(
                r#"{{"response":{response},"type":"response.completed"}}"#
            ));
            let of_stream = read_stream(Api::Responses, stream.as_bytes().chunks(16_384));
            let of_whole = usage_of_answer(Api::Responses, response.as_bytes());
            assert_eq!(of_stream, of_whole);
            of_whole
        };
        assert_eq!(of(1 << 20), whole(Some(32)));
        assert_eq!(of(MAX_KEPT_BYTES), Usage::default());
    }

    #[test]
    fn a_streams_output_tokens_stand_at_its_end_however_it_is_cut() {
        let mut text: String = (1..=30)
            .map(|i| {
                let so_far = "word ".repeat(50 * i);
                format!("data: {{\"text\":\"{so_far}\",\"meta_info\":{{\"completion_tokens\":{},\"cached_tokens\":8}}}}\n\n", 4 * i)
            })
            .collect();
        text += "data: [DONE]\n\n";
        for size in [1, 7, 100, 767, 769, 5_000, text.len()] {
            let mut end = End::default();
            text.as_bytes()
                .chunks(size)
                .for_each(|piece| end.feed(piece));
            assert_eq!(end.output_tokens(), Some(120), "pieces of {size} bytes");
            assert!(end.0.len() <= 2 * END_BYTES);
        }
    }

    #[test]
    fn usage_is_found_in_every_dialect() {
        let sglang = br#"data: {"text":"a","meta_info":{"prompt_tokens":12,"cached_tokens":8}}"#;
        assert_eq!(usage_in(sglang), usage(12, Some(8)));
        let openai = br#"{"usage": {"prompt_tokens": 12, "prompt_tokens_details": null}}"#;
        assert_eq!(usage_in(openai), usage(12, None));
        let escaped = br#"{"text":"\"prompt_tokens\":5, \"cached_tokens\":5,"}"#;
        assert_eq!(usage_in(escaped), Usage::default());
        // vLLM 0.26.0, not streamed.
        let vllm = br#"{"id":"cmpl-84ed71fb465fca8b","object":"text_completion","created":1795273654,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.26.0-1242819d","usage":{"prompt_tokens":40,"total_tokens":43,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32,"created_cache_tokens":null,"multimodal_tokens":null}},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
        assert_eq!(usage_in(vllm), usage(40, Some(32)));
    }

    /// A stream of vLLM 0.26.0, asked for `include_usage` and, if `continuous`, for
    /// `continuous_usage_stats`.
    fn vllm_stream(continuous: bool) -> Vec<u8> {
        let head = r#"{"id":"cmpl-a38c3203e9d45fb3","object":"text_completion","created":1795273654,"model":"m","choices":["#;
        let mut text = String::new();
        for tokens in 1..=3 {
            let reason = if tokens == 3 { r#""length""# } else { "null" };
            text += &format!(
                r#"data: {head}{{"index":0,"text":"","logprobs":null,"finish_reason":{reason},"stop_reason":null,"prompt_token_ids":null,"token_ids":null}}]"#
            );
            if continuous {
                let total = 40 + tokens;
                text += &format!(
                    r#","usage":{{"prompt_tokens":40,"total_tokens":{total},"completion_tokens":{tokens}}}"#
                );
            }
            text += "}\n\n";
        }
        text += &format!(
            r#"data: {head}],"usage":{{"prompt_tokens":40,"total_tokens":43,"completion_tokens":3,"prompt_tokens_details":{{"cached_tokens":32}}}},"system_fingerprint":"vllm-0.26.0-1242819d"}}"#
        );
        text += "\n\ndata: [DONE]\n\n";
        text.into_bytes()
    }

    fn read_usage<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Usage {
        let mut reader = UsageReader::default();
        let mut known = Usage::default();
        for piece in pieces {
            let usage = reader.feed(piece);
            known.prompt_tokens = usage.prompt_tokens.or(known.prompt_tokens);
            known.cached_tokens = usage.cached_tokens.or(known.cached_tokens);
        }
        known
    }

    #[test]
    fn vllms_cached_tokens_are_found_wherever_the_stream_is_cut() {
        for continuous in [false, true] {
            let text = vllm_stream(continuous);
            for at in 0..=text.len() {
                let (head, tail) = text.split_at(at);
                let found = read_usage([head, tail].into_iter());
                assert_eq!(found, usage(40, Some(32)), "cut at {at}");
            }
            for size in 1..=2 * SEAM_BYTES {
                let found = read_usage(text.chunks(size));
                assert_eq!(found, usage(40, Some(32)), "pieces of {size} bytes");
            }
        }
    }
}
