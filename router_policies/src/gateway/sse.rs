//! Server-sent events: counted as they pass, and looked into only where they may be errors.
//!
//! A line ends with LF, CR LF or CR, as the standard (WHATWG) has it. Nothing here depends on how
//! the bytes were cut on their way.

use super::seam::Seam;
use hyper::StatusCode;
use memchr::memchr2;
use memchr::memmem::Finder;
use serde_json::Value;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::LazyLock;

/// Follows an event stream without parsing what is in it: counts events that carry data, and
/// remembers whether the stream has come to its proper end and whether it carried an error.
#[derive(Debug, Default)]
pub struct SseProgress {
    /// The beginning of the line that has not ended yet, and its length.
    line: SmallVec<[u8; LINE_BYTES]>,
    line_bytes: usize,
    /// The last line ended with CR: an LF that follows belongs to it.
    after_return: bool,
    /// The event that has not ended yet has a line of any kind, and one of data.
    has_begun: bool,
    has_data: bool,
    /// That event is `[DONE]`, or the last one was.
    last_is_done: bool,
    /// The event that has not ended yet has the name by which this API's streams end.
    is_named_end: bool,
    /// Such an event has come.
    has_ended: bool,
    has_error: bool,
    /// An abort's mark may lie across two pieces.
    seam: Seam<{ ABORT.len() - 1 }>,
    /// The names of the events by which streams end; those of most APIs end with `[DONE]` alone.
    ends: &'static [&'static str],
    /// The names of the events that are looked into.
    looked_into: &'static [&'static str],
    /// The event that has not ended yet has such a name, and has not become too long.
    is_kept: bool,
    /// What has come of it behind its name, line by line.
    kept: Vec<u8>,
    /// The API repeats what clients say in its events, so that an abort's mark may be theirs.
    echoes: bool,
}

/// As much of a line as is looked at.
const LINE_BYTES: usize = 48;

/// Longer events are not looked into. Those that count a response's tokens have all of it once more, and of the
/// request what it was told of tools and instructions.
pub(super) const MAX_KEPT_BYTES: usize = 4 << 20;

/// SGLang's finish reason of a request that its scheduler gave up. Engines escape quotes in text, so
/// that it cannot come from the model.
const ABORT: &[u8] = b"\"type\":\"abort\"";
/// Made once: to make one takes longer than to look through a piece of a stream.
static ABORTS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(ABORT));
static ERRORS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));
static FAILURES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"response.failed\""));
static ROLES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"role\""));
/// Events of `/v1/responses` that SGLang (0.5.17) and vLLM (0.26.0) send before they have scheduled the request.
const ANNOUNCEMENTS: [&str; 3] = [
    "response.created",
    "response.queued",
    "response.in_progress",
];
static DELTAS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"delta\""));

impl SseProgress {
    /// For an API whose streams end with an event of one of these names.
    pub fn ending_with(ends: &'static [&'static str]) -> Self {
        Self {
            ends,
            ..Self::default()
        }
    }

    /// For an API in whose events an abort's mark says nothing.
    pub(super) fn echoing(self, echoes: bool) -> Self {
        Self { echoes, ..self }
    }

    /// Has [`SseProgress::feed_and_look`] show the events of these names.
    pub(super) fn looking_into(self, names: &'static [&'static str]) -> Self {
        Self {
            looked_into: names,
            ..self
        }
    }

    /// Takes the next bytes; returns the number of events, other than `[DONE]`, that they end.
    pub fn feed(&mut self, data: &[u8]) -> u64 {
        self.feed_and_look(data, |_| {})
    }

    /// The same; `look` gets the data of each event that ends there and has a name to look for.
    pub(super) fn feed_and_look(&mut self, mut data: &[u8], mut look: impl FnMut(&[u8])) -> u64 {
        let mut events = 0;
        self.has_error |= !self.echoes && (self.seam.feed(data, is_abort) || is_abort(data));
        loop {
            if self.after_return && !data.is_empty() {
                self.after_return = false;
                data = data.strip_prefix(b"\n").unwrap_or(data);
            }
            let Some(end) = memchr2(b'\n', b'\r', data) else {
                if self.is_kept {
                    self.keep(data, false);
                }
                self.extend_line(data);
                return events;
            };
            if self.is_kept {
                self.keep(&data[..end], true);
            }
            let is_event = if self.line_bytes == 0 {
                // Nearly every line comes in one piece.
                self.end_line(&data[..end.min(LINE_BYTES)], end)
            } else {
                self.extend_line(&data[..end]);
                let line = std::mem::take(&mut self.line);
                let line_bytes = std::mem::take(&mut self.line_bytes);
                self.end_line(&line, line_bytes)
            };
            events += u64::from(is_event);
            if !self.has_begun && self.is_kept {
                self.is_kept = false;
                // Its blank line has been kept too.
                if let Some(event) = first_event(&std::mem::take(&mut self.kept)) {
                    look(&event);
                }
            }
            self.after_return = data[end] == b'\r';
            data = &data[end + 1..];
        }
    }

    fn keep(&mut self, bytes: &[u8], ends_line: bool) {
        if self.kept.len() + bytes.len() >= MAX_KEPT_BYTES {
            self.is_kept = false;
            self.kept = Vec::new();
            return;
        }
        self.kept.extend_from_slice(bytes);
        if ends_line {
            self.kept.push(b'\n');
        }
    }

    fn extend_line(&mut self, bytes: &[u8]) {
        let room = LINE_BYTES - self.line.len();
        self.line.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.line_bytes += bytes.len();
    }

    /// Takes a line of `line_bytes` that begins with `line`. Whether it ends an event other than `[DONE]`.
    fn end_line(&mut self, line: &[u8], line_bytes: usize) -> bool {
        let is_empty = line_bytes == 0;
        if let Some(value) = line.strip_prefix(b"data:") {
            let is_whole = line_bytes <= LINE_BYTES;
            self.has_data = true;
            self.last_is_done = is_whole && value.trim_ascii() == b"[DONE]";
            self.has_error |= begins_as_error(value);
        } else if let Some(name) = line.strip_prefix(b"event:") {
            let name = name.trim_ascii();
            self.has_error |= matches!(name, b"error" | b"response.failed");
            let is_one_of = |names: &[&str]| names.iter().any(|it| it.as_bytes() == name);
            self.is_named_end = is_one_of(self.ends);
            self.is_kept = is_one_of(self.looked_into);
            self.kept.clear();
        }
        self.has_begun = !is_empty;
        if !is_empty {
            return false;
        }
        let has_data = std::mem::take(&mut self.has_data);
        let is_named_end = std::mem::take(&mut self.is_named_end);
        self.has_ended |= has_data && is_named_end;
        has_data && !self.last_is_done
    }

    /// Whether the stream is complete: its last event was `data: [DONE]`, or one of the names by which
    /// this API's streams end has come.
    pub fn is_done(&self) -> bool {
        self.has_ended || (self.last_is_done && !self.line.starts_with(b"data:"))
    }

    /// As [`SseProgress::is_done`], of a stream after which nothing comes: its last line, or the blank line
    /// behind it, may lack its end.
    pub fn is_done_at_end(&self) -> bool {
        let is_last_line = self.line_bytes <= LINE_BYTES
            && self
                .line
                .strip_prefix(b"data:")
                .is_some_and(|value| value.trim_ascii() == b"[DONE]");
        let lacks_blank_line = self.line_bytes == 0 && self.has_data && self.is_named_end;
        is_last_line || lacks_blank_line || self.is_done()
    }

    /// Whether an event that has passed was an error.
    pub fn has_error(&self) -> bool {
        self.has_error
    }

    /// What must come first so that the next event stands on its own, whatever was cut short before.
    pub fn separator(&self) -> &'static str {
        match (self.line_bytes, self.has_begun) {
            (0, false) => "",
            // An event that lacks only its blank line is whole.
            (0, true) => "\n",
            _ => "\n\n",
        }
    }
}

/// Whether a worker's answer, or a piece of one, says that it gave the request up.
pub(super) fn is_abort(data: &[u8]) -> bool {
    ABORTS.find(data).is_some()
}

/// Values of a key "error" where there was none.
const NOTHING: [&[u8]; 4] = [b"null", b"false", b"\"\"", b"0"];

/// Whether such a value says that there was an error.
fn says_error(error: &Value) -> bool {
    match error {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Number(number) => number.as_f64() != Some(0.0),
        _ => true,
    }
}

/// Whether an event's data, of which this is the beginning, is an error object.
fn begins_as_error(data: &[u8]) -> bool {
    let visible = data.iter().filter(|byte| !byte.is_ascii_whitespace());
    let mut bytes = visible.copied();
    if !goes_on_with(&mut bytes, b"{\"") {
        return false;
    }
    match bytes.next() {
        // Some engines have a key "error" in every event, which then says nothing.
        Some(b'e') => {
            goes_on_with(&mut bytes, b"rror\":") && {
                let value: Vec<u8> = bytes.take(5).collect();
                !NOTHING.iter().any(|nothing| value.starts_with(nothing))
            }
        }
        Some(b'o') => goes_on_with(&mut bytes, b"bject\":\"error\""),
        Some(b't') => goes_on_with(&mut bytes, b"ype\":\"error\""),
        _ => false,
    }
}

/// Takes from `bytes` as long as they are the `expected` ones; whether all were.
fn goes_on_with(bytes: &mut impl Iterator<Item = u8>, expected: &[u8]) -> bool {
    expected.iter().all(|&byte| bytes.next() == Some(byte))
}

/// The data of the first event that has any, once that event has ended.
pub(super) fn first_event(stream: &[u8]) -> Option<Vec<u8>> {
    events(stream).next()
}

/// The data of the events that have any and have ended.
pub(super) fn events(stream: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let mut rest = stream;
    std::iter::from_fn(move || {
        let mut data: Option<Vec<u8>> = None;
        while let Some(end) = memchr2(b'\n', b'\r', rest) {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            let is_pair = rest[end] == b'\r' && after.first() == Some(&b'\n');
            rest = &after[usize::from(is_pair)..];
            if let Some(value) = line.strip_prefix(b"data:") {
                let value = value.strip_prefix(b" ").unwrap_or(value);
                match &mut data {
                    None => data = Some(value.to_vec()),
                    Some(data) => {
                        data.push(b'\n');
                        data.extend_from_slice(value);
                    }
                }
            } else if line.is_empty() && data.is_some() {
                return data;
            }
        }
        None
    })
}

/// The bytes of the first event, with the blank line that ends it, once that is there.
pub(super) fn event_bytes(stream: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let end = at + memchr2(b'\n', b'\r', &stream[at..])?;
        let is_blank = end == at;
        let is_pair = stream[end] == b'\r' && stream.get(end + 1) == Some(&b'\n');
        at = end + 1 + usize::from(is_pair);
        if is_blank {
            return Some(at);
        }
    }
}

/// Whether an event is the one that opens a chat's or a message's stream: it names the role and has no text
/// yet.
pub(super) fn is_opening(data: &[u8]) -> bool {
    is_of(data, &["message_start"]) || opens_chat(data)
}

fn opens_chat(data: &[u8]) -> bool {
    if ROLES.find(data).is_none() || DELTAS.find(data).is_none() {
        return false;
    }
    let Ok(event) = serde_json::from_slice::<Value>(data) else {
        return false;
    };
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    let opens = |choice: &Value| {
        let is_over = choice
            .get("finish_reason")
            .is_some_and(|reason| !reason.is_null());
        let delta = choice.get("delta").and_then(Value::as_object);
        let says_nothing = |delta: &serde_json::Map<String, Value>| {
            let mut fields = delta.iter().filter(|(key, _)| *key != "role");
            delta.contains_key("role") && fields.all(|(_, value)| is_empty(value))
        };
        !is_over && delta.is_some_and(says_nothing)
    };
    let choices = event.get("choices").and_then(Value::as_array);
    choices.is_some_and(|choices| !choices.is_empty() && choices.iter().all(opens))
}

/// Whether an event of `/v1/responses` says that there will be an answer, and nothing of it yet.
pub(super) fn is_announcement(data: &[u8]) -> bool {
    is_of(data, &ANNOUNCEMENTS)
}

/// Whether an event's `type` is one of these.
fn is_of(data: &[u8], kinds: &[&str]) -> bool {
    #[derive(serde::Deserialize)]
    struct Event<'a> {
        #[serde(borrow, rename = "type")]
        kind: Cow<'a, str>,
    }
    let event = serde_json::from_slice::<Event<'_>>(data);
    event.is_ok_and(|event| kinds.contains(&&*event.kind))
}

/// What an event says went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EventError {
    /// What the engine would have answered, had it not begun a stream.
    pub status: StatusCode,
}

/// The error that an event's data is, if it is one.
pub(super) fn error_in(data: &[u8]) -> Option<EventError> {
    if ERRORS.find(data).is_none() && !is_abort(data) && FAILURES.find(data).is_none() {
        return None;
    }
    let Ok(event) = serde_json::from_slice::<Value>(data) else {
        // Cut short by the worker, but an error all the same.
        let status = StatusCode::BAD_GATEWAY;
        return begins_as_error(data).then_some(EventError { status });
    };
    let is_text = |place: &str, texts: &[&str]| {
        let found = event.pointer(place).and_then(Value::as_str);
        found.is_some_and(|text| texts.contains(&text))
    };
    let is_error = event.get("error").is_some_and(says_error)
        || is_text("/object", &["error"])
        || is_text("/type", &["error", "response.failed"])
        || is_text("/meta_info/finish_reason/type", &["abort"]);
    is_error.then(|| EventError {
        status: status_in(&event).unwrap_or(StatusCode::BAD_GATEWAY),
    })
}

/// The status that an error event names: as `code`, as its finish reason's `status_code`, or by its type, as
/// Anthropic's API calls errors.
fn status_in(event: &Value) -> Option<StatusCode> {
    let places = [
        "/error/code",
        "/code",
        "/meta_info/finish_reason/status_code",
    ];
    let named = || {
        Some(match event.pointer("/error/type")?.as_str()? {
            "invalid_request_error" => 400,
            "authentication_error" => 401,
            "permission_error" => 403,
            "not_found_error" => 404,
            "request_timeout_error" => 408,
            "request_too_large" => 413,
            "rate_limit_error" => 429,
            "overloaded_error" => 503,
            _ => return None,
        })
    };
    let code = places
        .iter()
        .find_map(|place| event.pointer(place)?.as_u64());
    let code = code.or_else(named)?;
    StatusCode::from_u16(u16::try_from(code).ok()?)
        .ok()
        .filter(|status| status.is_client_error() || status.is_server_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_event_is_found_however_lines_end_and_whatever_precedes_it() {
        for stream in [
            "data: {\"error\":1}\n\n",
            ": ping\n\nevent: x\ndata: {\"error\":1}\n\n",
            "\r\n: ping\r\n\r\ndata:{\"error\":1}\r\n\r\n",
            "data: {\"error\":1}\r\r",
        ] {
            for cut in 0..stream.len() {
                let begin = &stream.as_bytes()[..cut];
                // The blank line's CR ends it, with or without an LF after it.
                let is_blank_line_there = stream.ends_with("\r\n") && cut + 1 == stream.len();
                assert_eq!(
                    first_event(begin).is_some(),
                    is_blank_line_there,
                    "{stream:?} {cut}"
                );
            }
            assert_eq!(
                first_event(stream.as_bytes()),
                Some(b"{\"error\":1}".to_vec())
            );
        }
    }

    #[test]
    fn the_event_that_opens_a_chat_has_a_role_and_no_text() {
        for (data, is) in [
            (
                r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
                true,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[]}}]}"#,
                true,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":"a"}}]}"#,
                false,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":"stop"}]}"#,
                false,
            ),
            (r#"{"choices":[{"delta":{"content":""}}]}"#, false),
            (r#"{"error":{"message":"\"role\" \"delta\""}}"#, false),
        ] {
            assert_eq!(is_opening(data.as_bytes()), is, "{data}");
        }
    }

    #[test]
    fn what_announces_an_answer_is_told_from_the_answer() {
        for (data, is) in [
            (
                r#"{"response":{"status":"in_progress"},"type":"response.created"}"#,
                true,
            ),
            (r#"{"type":"response.in_progress"}"#, true),
            (
                r#"{"type":"response.output_item.added","item":{"type":"response.created"}}"#,
                false,
            ),
            (r#"{"type":"response.failed"}"#, false),
            ("[DONE]", false),
        ] {
            assert_eq!(is_announcement(data.as_bytes()), is, "{data}");
        }
    }

    #[test]
    fn errors_are_told_from_answers_that_speak_of_errors() {
        for (data, status) in [
            (r#"{"error":{"message":"m","code":400}}"#, Some(400)),
            (r#"{ "error" : {"message":"m"}}"#, Some(502)),
            (r#"{"object":"error","message":"m","code":503}"#, Some(503)),
            (
                r#"{"type":"error","error":{"type":"api_error"}}"#,
                Some(502),
            ),
            (
                r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":400}}}"#,
                Some(400),
            ),
            (r#"{"type":"response.failed","response":{}}"#, Some(502)),
            (r#"{"error":{"messa"#, Some(502)),
            (r#"{"text":"\"error\" and \"abort\"","error":null}"#, None),
            (
                r#"{"choices":[{"delta":{"content":"{\"error\":1}"}}],"k":"error"}"#,
                None,
            ),
        ] {
            let found = error_in(data.as_bytes()).map(|error| error.status.as_u16());
            assert_eq!(found, status, "{data}");
        }
    }

    #[test]
    fn a_key_error_that_says_nothing_is_none() {
        for nothing in ["null", "false", "\"\"", "0"] {
            let data = format!("{{\"error\":{nothing},\"choices\":[]}}");
            assert!(error_in(data.as_bytes()).is_none(), "{data}");
            assert!(!begins_as_error(data.as_bytes()), "{data}");
        }
        for error in ["{}", "{\"code\":500}", "\"out of memory\"", "true"] {
            let data = format!("{{\"error\":{error}}}");
            assert!(error_in(data.as_bytes()).is_some(), "{data}");
            assert!(begins_as_error(data.as_bytes()), "{data}");
        }
    }

    #[test]
    fn an_error_in_the_midst_of_a_stream_is_noted_however_it_is_cut() {
        for (event, expected) in [
            ("data: {\"error\": {\"code\": 500}}\n\n", true),
            ("data:{\"error\":{}}\r\r", true),
            (
                "data: {\"object\":\"error\",\"message\":\"m\"}\r\n\r\n",
                true,
            ),
            ("event: error\ndata: {\"x\":1}\n\n", true),
            (
                "data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\"}}}\n\n",
                true,
            ),
            ("data: {\"error\":null,\"text\":\"a\"}\n\n", false),
            ("data: {\"text\":\"{\\\"error\\\":1}\"}\n\n", false),
        ] {
            let stream = format!("data: {{\"text\":\"a\"}}\n\n{event}");
            for cut in 0..=stream.len() {
                let (head, tail) = stream.as_bytes().split_at(cut);
                let mut progress = SseProgress::default();
                progress.feed(head);
                progress.feed(tail);
                assert_eq!(progress.has_error(), expected, "{event:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn what_is_cut_short_is_closed_before_another_event() {
        for (begin, separator) in [
            ("", ""),
            ("data: 1\n\n", ""),
            ("data: 1\r\n\r\n", ""),
            ("data: 1\n", "\n"),
            ("data: 1\r\n", "\n"),
            ("event: x\n", "\n"),
            ("data: {\"text\":\"ab", "\n\n"),
            ("data: [DONE]", "\n\n"),
        ] {
            let mut progress = SseProgress::default();
            progress.feed(begin.as_bytes());
            assert_eq!(progress.separator(), separator, "{begin:?}");
        }
    }

    #[test]
    fn a_stream_that_ends_may_lack_the_end_of_its_last_line_and_nothing_of_the_line() {
        for (stream, is) in [
            ("data: 1\n\ndata: [DONE]", true),
            ("data: 1\n\ndata:[DONE] ", true),
            ("data: 1\n\ndata: [DONE]\r", true),
            ("data: 1\n\ndata: [DONE", false),
            ("data: 1\n\ndata: [DONE]1", false),
            ("data: 1\n\n", false),
            ("event: message_stop\ndata: {}\n", true),
            ("event: message_stop\ndata: {", false),
            ("event: message_stop\n", false),
            ("event: message_delta\ndata: {}\n", false),
        ] {
            let mut progress = SseProgress::ending_with(&["message_stop"]);
            progress.feed(stream.as_bytes());
            assert_eq!(progress.is_done_at_end(), is, "{stream:?}");
        }
    }

    #[test]
    fn a_stream_may_end_with_an_event_of_a_name() {
        let stream = b"event: message_delta\ndata: {}\n\nevent: message_stop\ndata: {}\n\n";
        for cut in 0..=stream.len() {
            let (head, tail) = stream.split_at(cut);
            let mut progress = SseProgress::ending_with(&["message_stop"]);
            let events = progress.feed(head);
            assert_eq!(progress.is_done(), cut == stream.len());
            assert_eq!(events + progress.feed(tail), 2);
            assert!(progress.is_done());
            let mut other = SseProgress::default();
            other.feed(stream);
            assert!(!other.is_done());
        }
    }

    proptest! {
        #[test]
        fn events_are_counted_however_the_stream_is_cut(
            events in 1usize..20, cuts in proptest::collection::vec(1usize..40, 1..30),
            end in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
        ) {
            let mut text: Vec<u8> = (0..events)
                .flat_map(|i| format!("data: {{\"text\": \"{i}\"}}{end}{end}").into_bytes())
                .collect();
            text.extend_from_slice(format!("data: [DONE]{end}{end}").as_bytes());
            let mut progress = SseProgress::default();
            let (mut counted, mut rest) = (0, &text[..]);
            for cut in cuts.iter().cycle() {
                let (head, tail) = rest.split_at((*cut).min(rest.len()));
                counted += progress.feed(head);
                rest = tail;
                if rest.is_empty() {
                    break;
                }
                prop_assert!(!progress.is_done() || rest.trim_ascii().is_empty());
            }
            prop_assert_eq!(counted, events as u64);
            prop_assert!(progress.is_done());
        }

        #[test]
        fn no_bytes_make_it_panic(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..30), 0..10),
        ) {
            let mut progress = SseProgress::default();
            for chunk in chunks {
                first_event(&chunk);
                error_in(&chunk);
                progress.feed(&chunk);
            }
            progress.is_done();
        }
    }
}
