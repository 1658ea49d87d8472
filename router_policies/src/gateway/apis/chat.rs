//! `POST /v1/chat/completions`: OpenAI's chat. Chat templates put the tools in front of the turns.

use super::{COMMENT, PromptKeys, Release, Shape, Waits, openai_error};

pub(super) static SHAPE: Shape = Shape {
    path: "/v1/chat/completions",
    prompt: PromptKeys::Conversation {
        before: &["tools"],
        turns: "messages",
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
