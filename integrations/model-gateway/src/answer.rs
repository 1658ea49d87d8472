//! What an answer teaches the decision: when its first token came, how many there were, what the engine counted, and
//! how it ended. The bytes are passed on as they are.

use axum::body::{Body, Bytes};
use axum::response::Response;
use decision::fleet::{Outcome, Reservation, Usage};
use http::header::CONTENT_LENGTH;
use http_body::{Frame, SizeHint};
use serde_json::Value;
use smg::worker::WorkerLoadGuard;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// Of an answer in one piece, or of one event, so much is kept to be read.
const MAX_KEPT_BYTES: usize = 8 << 20;

/// What ends with an answer.
pub struct Turn {
    pub reservation: Reservation,
    pub is_stream: bool,
    pub counted: Option<WorkerLoadGuard>,
}

/// The same answer, which tells the decision what comes.
pub fn watched(mut turn: Turn, response: Response) -> Response {
    if turn.is_stream {
        turn.reservation.streams();
    }
    let (head, body) = response.into_parts();
    let length = head.headers.get(CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse().ok());
    let reader = Reader {
        is_stream: turn.is_stream,
        ..Reader::default()
    };
    let watched = Watched {
        body,
        turn: Some(turn),
        reader,
        status: head.status.as_u16(),
        is_answer: head.status.is_success(),
        left_bytes: length,
    };
    Response::from_parts(head, Body::new(watched))
}

struct Watched {
    body: Body,
    /// None once it has ended. Dropped before, its client has left.
    turn: Option<Turn>,
    reader: Reader,
    status: u16,
    is_answer: bool,
    /// By the answer's own head; nobody asks for more.
    left_bytes: Option<u64>,
}

impl Watched {
    fn take(&mut self, data: &[u8]) {
        let pieces = self.reader.take(data);
        if let Some(turn) = self.turn.as_mut().filter(|_| self.is_answer) {
            turn.reservation.output(pieces);
        }
        self.left_bytes = self
            .left_bytes
            .map(|left| left.saturating_sub(data.len() as u64));
    }

    fn end(&mut self, failed: Option<String>) {
        let Some(turn) = self.turn.take() else { return };
        let Turn {
            mut reservation,
            counted,
            ..
        } = turn;
        reservation.report(self.reader.usage());
        let outcome = match (&failed, self.is_answer) {
            (Some(_), _) => Outcome::WorkerError,
            (None, true) => Outcome::Ok,
            (None, false) => Outcome::Rejected,
        };
        reservation.finish(outcome, Some(self.status), failed);
        drop(counted);
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    this.take(data);
                }
                // Nobody may ask for the end of what has a length.
                if this.body.is_end_stream() || this.left_bytes == Some(0) {
                    this.end(None);
                }
            }
            Some(Err(error)) => this.end(Some(error.to_string())),
            None => this.end(None),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Reads an answer as it comes.
#[derive(Default)]
struct Reader {
    is_stream: bool,
    /// A line, or an answer in one piece, as far as it has come.
    kept: Vec<u8>,
    /// The rest of what is too long to be kept.
    skips: bool,
    is_begun: bool,
    /// Events with counts: the first, and the last.
    counts: [Option<Vec<u8>>; 2],
}

impl Reader {
    /// Takes the next bytes; returns how many pieces of the answer they end.
    fn take(&mut self, data: &[u8]) -> u64 {
        if !self.is_stream {
            self.keep(data);
            return u64::from(!std::mem::replace(&mut self.is_begun, true));
        }
        let mut pieces = 0;
        for part in data.split_inclusive(|&byte| byte == b'\n') {
            self.keep(part);
            if part.ends_with(b"\n") {
                pieces += u64::from(self.line());
            }
        }
        pieces
    }

    fn keep(&mut self, data: &[u8]) {
        self.skips |= self.kept.len() + data.len() > MAX_KEPT_BYTES;
        if self.skips {
            self.kept.clear();
        } else {
            self.kept.extend_from_slice(data);
        }
    }

    /// Takes a line that has ended; whether it is a piece of the answer.
    fn line(&mut self) -> bool {
        let skipped = std::mem::take(&mut self.skips);
        let line = std::mem::take(&mut self.kept);
        let Some(event) = line.strip_prefix(b"data:") else {
            self.kept = line;
            self.kept.clear();
            return skipped;
        };
        let event = event.trim_ascii();
        if event == b"[DONE]" {
            return false;
        }
        if has(event, b"\"usage\":{") || has(event, b"\"usage\": {") || has(event, b"\"meta_info\"")
        {
            let at = usize::from(self.counts[0].is_some());
            self.counts[at] = Some(event.to_vec());
        }
        true
    }

    fn usage(&self) -> Usage {
        if !self.is_stream {
            return usage_in(&self.kept);
        }
        let mut told = Usage::default();
        for of in self.counts.iter().flatten().map(|event| usage_in(event)) {
            told.prompt_tokens = told.prompt_tokens.max(of.prompt_tokens);
            told.cached_tokens = of.cached_tokens.or(told.cached_tokens);
            told.output_tokens = of.output_tokens.or(told.output_tokens);
        }
        told
    }
}

fn has(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// What an engine counted: SGLang's own API, OpenAI's and Anthropic's. Of several prompts, those of the first.
fn usage_in(text: &[u8]) -> Usage {
    let Ok(said) = serde_json::from_slice::<Value>(text) else {
        return Usage::default();
    };
    let said = said.get(0).unwrap_or(&said);
    let count = |of: &Value, name: &str| of.get(name).and_then(Value::as_u64);
    if let Some(info) = said.get("meta_info") {
        return Usage::counted(
            count(info, "prompt_tokens"),
            count(info, "cached_tokens"),
            count(info, "completion_tokens"),
        );
    }
    let inside = ["message", "response"]
        .iter()
        .find_map(|name| said.get(name));
    let usage = inside
        .unwrap_or(said)
        .get("usage")
        .filter(|it| it.is_object());
    let Some(usage) = usage.or_else(|| said.get("usage")) else {
        return Usage::default();
    };
    if let Some(prompt) = count(usage, "prompt_tokens") {
        let details = usage.get("prompt_tokens_details");
        let cached = details.and_then(|of| count(of, "cached_tokens"));
        return Usage::counted(Some(prompt), cached, count(usage, "completion_tokens"));
    }
    let details = usage.get("input_tokens_details");
    if let Some(cached) = details.and_then(|of| count(of, "cached_tokens")) {
        let prompt = count(usage, "input_tokens");
        return Usage::counted(prompt, Some(cached), count(usage, "output_tokens"));
    }
    // Anthropic's input is what was neither read from the cache nor written to it.
    let read = count(usage, "cache_read_input_tokens");
    let written = count(usage, "cache_creation_input_tokens");
    let prompt = count(usage, "input_tokens").map(|new| {
        let known = read.unwrap_or(0).saturating_add(written.unwrap_or(0));
        new.saturating_add(known)
    });
    Usage::counted(prompt, read, count(usage, "output_tokens"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(usage: Usage) -> [Option<u64>; 3] {
        [
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
        ]
    }

    #[test]
    fn every_apis_counts_are_read() {
        for (text, expected) in [
            (
                r#"{"output_ids":[1],"meta_info":{"prompt_tokens":9,"cached_tokens":8,"completion_tokens":1}}"#,
                [Some(9), Some(8), Some(1)],
            ),
            (
                r#"{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}}}"#,
                [Some(9), Some(8), Some(1)],
            ),
            (
                r#"{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":null}}"#,
                [Some(9), None, Some(1)],
            ),
            (
                r#"{"response":{"usage":{"input_tokens":9,"output_tokens":1,"input_tokens_details":{"cached_tokens":8}}}}"#,
                [Some(9), Some(8), Some(1)],
            ),
            (
                r#"{"usage":{"input_tokens":1,"cache_read_input_tokens":8,"output_tokens":1}}"#,
                [Some(9), Some(8), Some(1)],
            ),
            (r#"{"usage":null}"#, [None; 3]),
            ("no JSON", [None; 3]),
        ] {
            assert_eq!(told(usage_in(text.as_bytes())), expected, "{text}");
        }
    }

    #[test]
    fn a_stream_is_read_wherever_it_is_cut() {
        let stream = concat!(
            "event: message_start\n",
            "data: {\"message\":{\"usage\":{\"input_tokens\":1,\"cache_read_input_tokens\":8}}}\n\n",
            ": a comment\n\n",
            "data: {\"delta\":1}\n\n",
            "data: {\"usage\":{\"output_tokens\":5}}\n\n",
            "data: [DONE]\n\n",
        );
        for cut in 0..stream.len() {
            let mut reader = Reader {
                is_stream: true,
                ..Reader::default()
            };
            let (one, other) = stream.as_bytes().split_at(cut);
            assert_eq!(reader.take(one) + reader.take(other), 3, "cut at {cut}");
            assert_eq!(told(reader.usage()), [Some(9), Some(8), Some(5)]);
        }
    }

    #[test]
    fn an_answer_in_one_piece_is_one_piece() {
        let mut reader = Reader::default();
        let pieces: Vec<_> = [r#"{"usage":{"prompt_"#, r#"tokens":3}}"#]
            .iter()
            .map(|part| reader.take(part.as_bytes()))
            .collect();
        assert_eq!(pieces, [1, 0]);
        assert_eq!(told(reader.usage()), [Some(3), None, None]);
    }
}
