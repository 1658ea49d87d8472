//! `POST /v1/responses`: OpenAI's newer API, which Codex speaks. Each request carries the whole
//! conversation; one that names an earlier response (`previous_response_id`) is compared by what it
//! carries, and can only be served where that response is kept.

use super::{PromptKeys, Separates, Shape, openai_error};
use serde_json::Value;

pub(super) static SHAPE: Shape = Shape {
    path: "/v1/responses",
    prompt: PromptKeys::Conversation {
        before: &["tools", "instructions"],
        turns: "input",
    },
    limits: &["max_output_tokens"],
    ends: &[
        "response.completed",
        "response.incomplete",
        "response.failed",
    ],
    end: "response.completed",
    separates: Separates::None,
    error: openai_error,
    error_event: Some("error"),
};

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
