//! `POST /v1/completions`: OpenAI's older API, which takes token ids as well as text.

use super::{COMMENT, PromptKeys, Release, Shape, Waits, openai_error};

pub(super) static SHAPE: Shape = Shape {
    path: "/v1/completions",
    prompt: PromptKeys::Prompts {
        first: "prompt",
        second: None,
    },
    limits: &["max_tokens", "max_completion_tokens"],
    ends: &[],
    end: "[DONE]",
    separates: Release::OLDEST,
    error: openai_error,
    error_event: None,
    waits: Waits::Hearing(COMMENT),
    counts: None,
};
