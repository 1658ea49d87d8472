//! The APIs that generate text: where each has its prompt, its limit and its stream's end, and what
//! its errors look like. One file each; what they share is here.

mod chat;
mod completions;
mod generate;
mod messages;
pub(super) mod responses;

use super::sglang_tools::Release;
use decision::fleet::{Outcome, Usage};
use hyper::StatusCode;

/// Which request format a body follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// SGLang's own.
    Generate,
    Completions,
    Chat,
    /// Anthropic's.
    Messages,
    Responses,
}

/// Where a body has its prompt, by the keys of the outer object.
#[derive(Clone, Copy, Debug)]
pub enum PromptKeys {
    /// A prompt or a list of them: `first` is looked at, and `second` where that is absent.
    Prompts {
        first: &'static str,
        second: Option<&'static str>,
    },
    /// What a chat template puts in front of the turns (tools, instructions), in that order, and the
    /// turns. Compared as the bytes that the client sent.
    Conversation {
        before: &'static [&'static str],
        turns: &'static str,
    },
}

/// What one API looks like.
pub struct Shape {
    pub path: &'static str,
    pub prompt: PromptKeys,
    /// Keys of the limit on output tokens; the last one that is there counts.
    pub limits: &'static [&'static str],
    /// Names of the events that end a stream, where `[DONE]` does not.
    pub ends: &'static [&'static str],
    /// What is said of a stream that lacks its end.
    pub end: &'static str,
    /// The first release of SGLang that can prefill a request of this API on one worker and decode it on another.
    /// vLLM can (0.26.0 and 0.32.0).
    pub(in crate::gateway) separates: Release,
    /// An error as a JSON object.
    pub error: fn(kind: &str, code: u16, message: &str) -> serde_json::Value,
    /// The name of an event that is an error.
    pub error_event: Option<&'static str>,
    /// What keeps the client of a stream waiting that has no answer yet.
    pub waits: Waits,
    /// Where its answers count tokens. None where they do by the names of OpenAI's chats and have what models
    /// and clients wrote as text alone, in which quotes are escaped: the names are then found without parsing.
    pub counts: Option<&'static Counts>,
}

/// What keeps a client waiting, in each API's own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Nothing: its clients take the first bytes for the first tokens.
    InSilence,
    /// This, again and again.
    Hearing(&'static str),
    /// Numbered events of a response that has begun.
    Numbered,
}

/// A comment of an event stream, which clients of OpenAI's APIs pass over.
const COMMENT: &str = ": waiting\n\n";

/// Where answers count tokens that may have the same names elsewhere: in the input of a tool that the model
/// called, or in the schemas of the client's tools.
#[derive(Debug)]
pub struct Counts {
    /// The events of a stream that count.
    pub events: &'static [&'static str],
    /// What the data of such an event, or an answer in one piece, counts.
    pub read: fn(&[u8]) -> Usage,
}

impl Api {
    pub const ALL: [Self; 5] = [
        Self::Generate,
        Self::Completions,
        Self::Chat,
        Self::Messages,
        Self::Responses,
    ];

    pub fn shape(self) -> &'static Shape {
        match self {
            Self::Generate => &generate::SHAPE,
            Self::Completions => &completions::SHAPE,
            Self::Chat => &chat::SHAPE,
            Self::Messages => &messages::SHAPE,
            Self::Responses => &responses::SHAPE,
        }
    }

    pub fn at(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|api| api.path() == path)
    }

    pub fn path(self) -> &'static str {
        self.shape().path
    }

    pub(super) fn ends(self) -> &'static [&'static str] {
        self.shape().ends
    }

    pub(super) fn counts(self) -> Option<&'static Counts> {
        self.shape().counts
    }

    pub(super) fn end(self) -> &'static str {
        self.shape().end
    }

    /// An error as the end of a stream.
    pub(super) fn told_in_stream(self, error: &serde_json::Value) -> String {
        match (self.shape().error_event, self.end()) {
            (Some(name), _) => format!("event: {name}\ndata: {error}\n\n"),
            (None, end) => format!("data: {error}\n\ndata: {end}\n\n"),
        }
    }

    /// The event by which a stream ends that cannot go on after so many `events`.
    pub(super) fn error_event(self, outcome: Outcome, message: &str, events: u64) -> String {
        let (kind, code) = match outcome {
            Outcome::Timeout => ("timeout", StatusCode::GATEWAY_TIMEOUT),
            Outcome::RouterError => ("shutting_down", StatusCode::SERVICE_UNAVAILABLE),
            _ => ("worker_error", StatusCode::BAD_GATEWAY),
        };
        let error = match self {
            Self::Responses => responses::error_event(kind, code.as_u16(), message, events),
            _ => (self.shape().error)(kind, code.as_u16(), message),
        };
        match self.shape().error_event {
            Some(name) => format!("event: {name}\ndata: {error}\n\n"),
            None => format!("data: {error}\n\n"),
        }
    }
}

/// An error in the shape that OpenAI's and SGLang's clients read.
pub(super) fn openai_error(kind: &str, code: u16, message: &str) -> serde_json::Value {
    serde_json::json!({"error": {"message": message, "type": kind, "code": code}})
}
