//! `POST /v1/responses`: OpenAI's newer API, which Codex speaks. Each request carries the whole
//! conversation; one that names an earlier response (`previous_response_id`) is compared by what it
//! carries, and can only be served where that response is kept.

use super::super::patience::Opening;
use super::{Counts, PromptKeys, Release, Shape, Waits, openai_error};
use decision::fleet::Usage;
use decision::fleet::log::unix_now_s;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

const CREATED: &str = "response.created";
const IN_PROGRESS: &str = "response.in_progress";

pub(super) static SHAPE: Shape = Shape {
    path: "/v1/responses",
    prompt: PromptKeys::Conversation {
        before: &["tools", "instructions"],
        turns: "input",
    },
    limits: &["max_output_tokens"],
    ends: &ENDS,
    end: "response.completed",
    separates: Release::SHARING_RESPONSES,
    error: openai_error,
    error_event: Some("error"),
    waits: Waits::Numbered,
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

/// An event that keeps a client waiting: the first says that there is a response, those behind it that it is in
/// progress. Codex counts events alone as signs of life. The response's id is the router's own, for the engine's is
/// not known yet. OpenAI's package refuses a stream in which it changes: so the events that follow have it too.
pub(in super::super) fn waiting(opening: &Opening, number: u64) -> String {
    let kind = match number {
        0 => CREATED,
        _ => IN_PROGRESS,
    };
    let mut event = in_progress(opening);
    event["type"] = kind.into();
    event["sequence_number"] = number.into();
    format!("event: {kind}\ndata: {event}\n\n")
}

fn in_progress(opening: &Opening) -> Value {
    json!({"response": {
        "id": opening.response_id(),
        "object": "response",
        "created_at": unix_now_s() as u64,
        "status": "in_progress",
        "model": opening.model,
        "output": [],
        "error": null,
        "incomplete_details": null,
        "parallel_tool_calls": true,
        "tool_choice": "auto",
        "tools": [],
        "usage": null,
    }})
}

/// The end of a stream that has had so many events (`number`) and comes to an answer of another status than 200:
/// the error's own code, that status and its `Retry-After`, in the words on which Codex acts.
pub(in super::super) fn failed(
    opening: &Opening,
    number: u64,
    (code, status, retry_after): (Option<&str>, StatusCode, Option<&str>),
    message: &str,
) -> String {
    let is_full = matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    let code = code.unwrap_or(match is_full {
        true => "rate_limit_exceeded",
        false if status.is_client_error() => "invalid_prompt",
        false => "server_error",
    });
    let message = match retry_after.filter(|_| is_full) {
        Some(seconds) => format!("{message}. Please try again in {seconds}s."),
        None => message.to_owned(),
    };
    let mut event = in_progress(opening);
    event["type"] = "response.failed".into();
    event["sequence_number"] = number.into();
    event["response"]["status"] = "failed".into();
    event["response"]["error"] = json!({"code": code, "message": message});
    format!("event: response.failed\ndata: {event}\n\n")
}

/// Appends an event of a worker to `events`, its number raised by those that the client had before, and the response
/// called as the client was `told`; one that says once more that there is a response says that it is in progress.
/// Comes with the response's own id, where the event has it.
pub(in super::super) fn renumber(
    event: &[u8],
    by: u64,
    told: &str,
    events: &mut Vec<u8>,
) -> Option<String> {
    #[derive(Deserialize)]
    struct Numbered<'a> {
        #[serde(borrow, rename = "type")]
        kind: Option<&'a RawValue>,
        #[serde(borrow)]
        sequence_number: Option<&'a RawValue>,
        #[serde(borrow)]
        response: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Response<'a> {
        #[serde(borrow)]
        id: Option<&'a RawValue>,
    }
    let mut own_id = None;
    let is_created = |value: &&[u8]| value.trim_ascii() == CREATED.as_bytes();
    for line in event.split_inclusive(|&byte| byte == b'\n') {
        if line
            .strip_prefix(b"event:")
            .is_some_and(|it| is_created(&it))
        {
            events.extend_from_slice(format!("event: {IN_PROGRESS}\n").as_bytes());
            continue;
        }
        let data = line.strip_prefix(b"data:");
        let Some(Ok(found)) = data.map(serde_json::from_slice::<Numbered<'_>>) else {
            events.extend_from_slice(line);
            continue;
        };
        let begin = line.as_ptr() as usize;
        let place = |raw: &RawValue| {
            let at = raw.get().as_ptr() as usize - begin;
            at..at + raw.get().len()
        };
        let number = |raw: &RawValue| raw.get().parse::<u64>().ok();
        let kind = found
            .kind
            .filter(|raw| raw.get().trim_matches('"') == CREATED);
        let kind = kind.map(|raw| (place(raw), format!("\"{IN_PROGRESS}\"")));
        let number = found
            .sequence_number
            .and_then(|raw| Some((place(raw), number(raw)?.saturating_add(by).to_string())));
        let id = found.response.and_then(|raw| {
            let response: Response<'_> = serde_json::from_str(raw.get()).ok()?;
            let own: String = serde_json::from_str(response.id?.get()).ok()?;
            own_id.get_or_insert(own);
            Some((place(response.id?), Value::from(told).to_string()))
        });
        let mut changes: Vec<_> = kind.into_iter().chain(number).chain(id).collect();
        changes.sort_by_key(|(place, _)| place.start);
        let mut copied = 0;
        for (place, new) in changes {
            events.extend_from_slice(&line[copied..place.start]);
            events.extend_from_slice(new.as_bytes());
            copied = place.end;
        }
        events.extend_from_slice(&line[copied..]);
    }
    own_id
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
