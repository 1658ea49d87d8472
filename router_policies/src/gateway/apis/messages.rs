//! `POST /v1/messages`: Anthropic's API, which Claude Code speaks.

use super::{PromptKeys, Separates, Shape};
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
    separates: Separates::None,
    error,
    error_event: Some("error"),
};

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
