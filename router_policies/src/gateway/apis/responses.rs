//! `POST /v1/responses`: OpenAI's newer API, which Codex speaks. Each request carries the whole
//! conversation; one that names an earlier response (`previous_response_id`) is compared by what it
//! carries, and can only be served where that response is kept.

use super::{Counts, PromptKeys, Separates, Shape, openai_error};
use crate::fleet::Usage;
use serde::Deserialize;
use serde_json::Value;

pub(super) static SHAPE: Shape = Shape {
    path: "/v1/responses",
    prompt: PromptKeys::Conversation {
        before: &["tools", "instructions"],
        turns: "input",
    },
    limits: &["max_output_tokens"],
    ends: &ENDS,
    end: "response.completed",
    separates: Separates::None,
    error: openai_error,
    error_event: Some("error"),
    counts: Some(&Counts {
        events: &ENDS,
        read: counted,
    }),
};

/// The events that end a stream. Each has the whole response, with what it took.
const ENDS: [&str; 3] = [
    "response.completed",
    "response.incomplete",
    "response.failed",
];

/// What the event that ends a stream, or a whole response, counts. Whole ones of SGLang (0.5.17) have the names of
/// OpenAI's chats. Where the engine itself runs tools (vLLM 0.26.0, gpt-oss), its sums are of all turns, and what it
/// says of the first is of the prompt that the router knows.
fn counted(data: &[u8]) -> Usage {
    #[derive(Deserialize)]
    struct Counting {
        response: Option<Ended>,
        usage: Option<Counted>,
    }
    #[derive(Deserialize)]
    struct Ended {
        usage: Option<Counted>,
    }
    #[derive(Deserialize)]
    struct Counted {
        input_tokens: Option<u64>,
        input_tokens_details: Option<Details>,
        output_tokens: Option<u64>,
        prompt_tokens: Option<u64>,
        prompt_tokens_details: Option<Details>,
        completion_tokens: Option<u64>,
    }
    #[derive(Deserialize)]
    struct Details {
        cached_tokens: Option<u64>,
        input_tokens_per_turn: Option<Vec<u64>>,
        cached_tokens_per_turn: Option<Vec<u64>>,
    }
    let Ok(Counting { response, usage }) = serde_json::from_slice(data) else {
        return Usage::default();
    };
    let Some(usage) = response.and_then(|response| response.usage).or(usage) else {
        return Usage::default();
    };
    let details = usage.input_tokens_details.or(usage.prompt_tokens_details);
    let first = |turns: &Option<Vec<u64>>| turns.as_ref().and_then(|turns| turns.first().copied());
    let of_first = details.as_ref().map(|details| {
        (
            first(&details.input_tokens_per_turn),
            first(&details.cached_tokens_per_turn).or(details.cached_tokens),
        )
    });
    let (prompt, cached) = of_first.unwrap_or_default();
    let all = usage.input_tokens.or(usage.prompt_tokens);
    let output = usage.output_tokens.or(usage.completion_tokens);
    Usage::counted(prompt.or(all), cached, output)
}

/// An error as an event of a stream: with a type and a number as all events of this API have, and with the
/// object that OpenAI's clients look for to raise it.
pub(super) fn error_event(kind: &str, code: u16, message: &str, events: u64) -> Value {
    let mut event = openai_error(kind, code, message);
    event["type"] = "error".into();
    event["code"] = kind.into();
    event["message"] = message.into();
    event["param"] = Value::Null;
    event["sequence_number"] = events.into();
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_counts_by_its_own_names_or_by_those_of_chats() {
        let usage = |prompt_tokens, cached_tokens, output_tokens| Usage {
            prompt_tokens,
            cached_tokens,
            output_tokens,
        };
        let whole = usage(Some(40), Some(32), Some(9));
        for (data, expected) in [
            // SGLang 0.5.17, streamed and not; the latter where nothing was cached.
            (
                r#"{"response":{"id":"resp_1","output":[],"tools":[],"usage":{"input_tokens":40,"input_tokens_details":{"cached_tokens":32},"output_tokens":9,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":49}},"sequence_number":7,"type":"response.completed"}"#,
                whole,
            ),
            (
                r#"{"object":"response","output":[],"usage":{"prompt_tokens":40,"total_tokens":49,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":32},"reasoning_tokens":0},"tools":[]}"#,
                whole,
            ),
            (
                r#"{"object":"response","usage":{"prompt_tokens":40,"total_tokens":49,"completion_tokens":9,"prompt_tokens_details":null,"reasoning_tokens":0}}"#,
                usage(Some(40), None, Some(9)),
            ),
            // SGLang 0.5.17, a stream of gpt-oss: it counts nothing of those.
            (
                r#"{"response":{"usage":{"input_tokens":0,"input_tokens_details":{"cached_tokens":0},"output_tokens":0,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":0}},"type":"response.completed"}"#,
                Usage::default(),
            ),
            // vLLM 0.26.0, and where it ran a tool.
            (
                r#"{"response":{"usage":{"input_tokens":40,"input_tokens_details":{"cached_tokens":32,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":9,"total_tokens":49}},"type":"response.completed"}"#,
                whole,
            ),
            (
                r#"{"object":"response","usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":72,"input_tokens_per_turn":[40,60],"cached_tokens_per_turn":[32,40]},"output_tokens":9,"total_tokens":109}}"#,
                whole,
            ),
            (
                r#"{"response":{"usage":null},"type":"response.failed"}"#,
                Usage::default(),
            ),
            (r#"{"response":{"status":"failed"}}"#, Usage::default()),
            (r#"{"usage":{"input_tokens":"40"}}"#, Usage::default()),
            (r#"{"usage":{"input_tokens":40"#, Usage::default()),
        ] {
            assert_eq!(counted(data.as_bytes()), expected, "{data}");
        }
    }
}
