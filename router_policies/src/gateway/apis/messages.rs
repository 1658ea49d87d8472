//! `POST /v1/messages`: Anthropic's API, which Claude Code speaks.

use super::{Counts, PromptKeys, Release, Shape, Waits};
use decision::fleet::Usage;
use serde::Deserialize;
use serde_json::{Value, json};

pub(super) static SHAPE: Shape = Shape {
    path: "/v1/messages",
    prompt: PromptKeys::Conversation {
        before: &["tools", "system"],
        turns: "messages",
    },
    limits: &["max_tokens"],
    ends: &["message_stop"],
    end: "message_stop",
    separates: Release::SHARING_MESSAGES,
    error,
    error_event: Some("error"),
    waits: Waits::Hearing("event: ping\ndata: {\"type\":\"ping\"}\n\n"),
    counts: Some(&Counts {
        events: &["message_start", "message_delta"],
        read: counted,
    }),
};

/// What a `message_start`, a `message_delta` or a whole message counts. SGLang (0.5.17) says in the first event
/// what it read of the prompt, and in the other how long its answer is; vLLM (0.26.0) says both in both, and in
/// the second alone what was cached. By this API's definition a prompt is the sum of what was read anew, read from
/// the cache and written to it, and both engines keep to that.
fn counted(data: &[u8]) -> Usage {
    #[derive(Deserialize)]
    struct Counting {
        message: Option<Begun>,
        usage: Option<Counted>,
    }
    #[derive(Deserialize)]
    struct Begun {
        usage: Option<Counted>,
    }
    #[derive(Deserialize)]
    struct Counted {
        input_tokens: Option<u64>,
        cache_creation_input_tokens: Option<u64>,
        cache_read_input_tokens: Option<u64>,
        output_tokens: Option<u64>,
    }
    let Ok(Counting { message, usage }) = serde_json::from_slice(data) else {
        return Usage::default();
    };
    let is_begin = message.is_some();
    let Some(usage) = message.and_then(|message| message.usage).or(usage) else {
        return Usage::default();
    };
    let cached = usage.cache_read_input_tokens;
    let written = usage.cache_creation_input_tokens;
    let prompt = usage.input_tokens.map(|new| {
        new.saturating_add(cached.unwrap_or(0))
            .saturating_add(written.unwrap_or(0))
    });
    // An answer that begins has hardly any.
    let output = usage.output_tokens.filter(|_| !is_begin);
    Usage::counted(prompt, cached.filter(|_| prompt.is_some()), output)
}

/// An error in the shape that Anthropic's clients read. Its type is one of those that they know.
pub(in super::super) fn error(kind: &str, code: u16, message: &str) -> Value {
    let kind = match (kind, code) {
        (_, 413) => "request_too_large",
        (_, 401) => "authentication_error",
        (_, 403) => "permission_error",
        (_, 400..=402 | 405..=428) => "invalid_request_error",
        (_, 404) => "not_found_error",
        (_, 429) => "rate_limit_error",
        (_, 503) => "overloaded_error",
        ("timeout", _) => "timeout_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_what_was_read_anew_and_what_was_cached() {
        let usage = |prompt_tokens, cached_tokens, output_tokens| Usage {
            prompt_tokens,
            cached_tokens,
            output_tokens,
        };
        for (data, expected) in [
            // SGLang 0.5.17, whose second event leaves the prompt out; the first one where nothing was cached.
            (
                r#"{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"model":"m","usage":{"input_tokens":8,"output_tokens":0,"cache_read_input_tokens":32}}}"#,
                usage(Some(40), Some(32), None),
            ),
            (
                r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":40,"output_tokens":0}}}"#,
                usage(Some(40), None, None),
            ),
            (
                r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":9}}"#,
                usage(None, None, Some(9)),
            ),
            // vLLM 0.26.0, streamed and not.
            (
                r#"{"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"input_tokens":8,"output_tokens":9,"cache_read_input_tokens":32}}"#,
                usage(Some(40), Some(32), Some(9)),
            ),
            (
                r#"{"id":"chatcmpl-1","type":"message","role":"assistant","content":[{"type":"text","text":"a"}],"model":"m","stop_reason":"max_tokens","usage":{"input_tokens":8,"output_tokens":9,"cache_read_input_tokens":32}}"#,
                usage(Some(40), Some(32), Some(9)),
            ),
            // As the API is described.
            (
                r#"{"type":"message","usage":{"input_tokens":8,"cache_creation_input_tokens":4,"cache_read_input_tokens":28,"cache_creation":{"ephemeral_5m_input_tokens":4},"output_tokens":9}}"#,
                usage(Some(40), Some(28), Some(9)),
            ),
            (
                r#"{"type":"message","usage":{"input_tokens":40,"cache_creation_input_tokens":null,"cache_read_input_tokens":0,"output_tokens":9}}"#,
                usage(Some(40), Some(0), Some(9)),
            ),
            // SGLang 0.5.17 where its chat has no usage to tell: nothing was counted.
            (
                r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":0,"output_tokens":0}}}"#,
                Usage::default(),
            ),
            (
                r#"{"type":"message_start","message":{"content":[]}}"#,
                Usage::default(),
            ),
            (r#"{"type":"message_delta","usage":null}"#, Usage::default()),
            (
                r#"{"usage":{"input_tokens":18446744073709551615,"cache_read_input_tokens":5}}"#,
                usage(Some(u64::MAX), Some(5), None),
            ),
            (
                r#"{"usage":{"input_tokens":-1,"output_tokens":9}}"#,
                Usage::default(),
            ),
            (r#"{"usage":{"input_tokens":40"#, Usage::default()),
            ("", Usage::default()),
        ] {
            assert_eq!(counted(data.as_bytes()), expected, "{data}");
        }
    }
}
