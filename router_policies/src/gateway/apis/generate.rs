//! `POST /generate`, SGLang's own API: token ids or text, a batch of either.

use super::{PromptKeys, Release, Shape, Waits, openai_error};

pub(super) static SHAPE: Shape = Shape {
    path: "/generate",
    prompt: PromptKeys::Prompts {
        first: "input_ids",
        second: Some("text"),
    },
    // Inside `sampling_params`.
    limits: &["max_new_tokens"],
    ends: &[],
    end: "[DONE]",
    separates: Release::OLDEST,
    error: openai_error,
    error_event: None,
    waits: Waits::InSilence,
    counts: None,
};
