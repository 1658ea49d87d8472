//! `POST /v1/responses`: OpenAI's newer API, which Codex speaks. Each request carries the whole
//! conversation; one that names an earlier response (`previous_response_id`) is compared by what it
//! carries, and can only be served where that response is kept.

use super::{PromptKeys, Separates, Shape, openai_error};

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
