//! What answers say of their tokens: of the prompt, of its cached part and of the output.

use super::apis::Api;
use super::seam::Seam;
use crate::fleet::Usage;
use memchr::memmem::Finder;
use serde_json::value::RawValue;
use std::sync::LazyLock;

/// How the keys of all counts of tokens end. Made once: to make it takes longer than to look for it.
const COUNT: &[u8] = b"_tokens\":";
/// What stands before that where output tokens are counted, by OpenAI's APIs and by the others.
const OF_OPENAI: &[u8] = b"\"completion";
const OF_OTHERS: &[u8] = b"\"output";
static COUNTS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(COUNT));

/// What an engine says of prompt and cached tokens, found without parsing: engines escape quotes in
/// text, so the keys cannot come from the model. The last of equal keys counts.
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
    let mut of_others = None;
    for at in COUNTS.find_iter(data) {
        let (before, after) = (&data[..at], &data[at + COUNT.len()..]);
        let (count, is_output) = if before.ends_with(b"\"prompt") {
            (&mut usage.prompt_tokens, false)
        } else if before.ends_with(b"\"cached") {
            (&mut usage.cached_tokens, false)
        } else if before.ends_with(OF_OPENAI) {
            (&mut usage.output_tokens, true)
        } else if before.ends_with(OF_OTHERS) {
            (&mut of_others, true)
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
    usage.output_tokens = usage.output_tokens.or(of_others);
    usage
}

/// What an answer of `api` in one piece says of its tokens. What models and clients write is text with
/// escaped quotes in most APIs. In these two some of it is JSON (a tool's input, the schemas of tools) that
/// may have the same keys, so only the object that counts is looked at.
pub(super) fn usage_of_answer(api: Api, data: &[u8]) -> Usage {
    #[derive(serde::Deserialize)]
    struct Counted<'a> {
        #[serde(borrow)]
        usage: Option<&'a RawValue>,
    }
    let counted = match api {
        Api::Messages | Api::Responses => serde_json::from_slice::<Counted<'_>>(data).ok(),
        Api::Generate | Api::Completions | Api::Chat => None,
    };
    let usage = counted.and_then(|counted| counted.usage);
    usage_of_whole(usage.map_or(data, |usage| usage.get().as_bytes()))
}

/// The last count of this name. Looked for from the end, where it stands.
fn last_count(data: &[u8], name: &[u8]) -> Option<u64> {
    let mut ends = memchr::memrchr_iter(b':', data);
    ends.find_map(|end| {
        let key = data[..=end].strip_suffix(COUNT)?;
        key.ends_with(name).then_some(())?;
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
    pub fn feed(&mut self, data: &[u8]) {
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

    pub fn output_tokens(&self) -> Option<u64> {
        last_count(&self.0, OF_OPENAI).or_else(|| last_count(&self.0, OF_OTHERS))
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
        let messages = r#"{"type":"message","usage":{"input_tokens":40,"output_tokens":9}}"#;
        assert_eq!(of_whole(messages), Some(9));
        assert_eq!(of_whole(r#"{"text":"\"output_tokens\":5,"}"#), None);
    }

    #[test]
    fn what_a_model_calls_a_tool_with_is_no_count() {
        // Anthropic's API has a tool's input as JSON and not as text, OpenAI's newer one the tools' schemas.
        let named = r#"{"prompt_tokens":5,"cached_tokens":900000,"completion_tokens":3,"output_tokens":800000}"#;
        let message = format!(
            r#"{{"type":"message","content":[{{"type":"tool_use","name":"report","input":{named}}}],"usage":{{"input_tokens":40,"output_tokens":9}}}}"#
        );
        let response = format!(
            r#"{{"object":"response","tools":[{{"parameters":{{"examples":[{named}]}}}}],"usage":{{"input_tokens":40,"input_tokens_details":{{"cached_tokens":32}},"output_tokens":9}}}}"#
        );
        for (api, body, cached_tokens) in [
            (Api::Messages, message, None),
            (Api::Responses, response, Some(32)),
        ] {
            let expected = Usage {
                prompt_tokens: None,
                cached_tokens,
                output_tokens: Some(9),
            };
            assert_eq!(usage_of_answer(api, body.as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn the_last_count_of_a_messages_stream_counts() {
        let mut end = End::default();
        end.feed(br#"data: {"usage":{"input_tokens":40,"output_tokens":1}}"#);
        assert_eq!(end.output_tokens(), Some(1));
        end.feed(b"\n\ndata: {\"usage\":{\"output_tokens\": 9}}\n\ndata: {\"text\":\"a: b\"}\n\n");
        assert_eq!(end.output_tokens(), Some(9));
        end.feed(b"data: {\"usage\":{\"output_tokens\":");
        assert_eq!(end.output_tokens(), Some(9), "the next is not there yet");
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
