//! Requests that are too long for their model, in the words on which agents act: Claude Code compacts, or
//! asks for less, on Anthropic's words alone, and Codex says why on OpenAI's code.
//!
//! The router says so itself where it knows the prompt's tokens and the model's context length. Else an
//! engine's own words are told in those of the API.

use super::Gateway;
use super::apis::Api;
use super::body::Scanned;
use bytes::Bytes;
use decision::fleet::prefix::hash::{PromptHashes, Unit};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

/// Larger answers are no errors of this kind.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// vLLM's name for a prompt that it is to cut itself.
const CUTS: &[u8] = b"truncate_prompt_tokens";

/// What of a request is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLong {
    /// Where they are known.
    pub prompt_tokens: Option<u64>,
    /// That the client asks for; none where the prompt alone is too long.
    pub max_tokens: Option<u64>,
    /// The model's context length, tokens.
    pub limit: u64,
}

/// What is too long of a request whose prompt has been counted, if its count is exact and every worker that
/// may serve it says how much it takes.
pub(super) fn of_request(
    gateway: &Gateway,
    api: Api,
    bytes: &[u8],
    scanned: &Scanned,
    prompt: &PromptHashes,
) -> Option<TooLong> {
    if prompt.unit != Unit::Tokens || scanned.prompts != 1 {
        return None;
    }
    let prompt_tokens = prompt.length as u64;
    // Of a response, vLLM (0.26.0) takes a limit beyond the context for none; SGLang's own API cuts it.
    let takes_less = matches!(api, Api::Responses | Api::Generate);
    let max_tokens = scanned.max_output_tokens.filter(|_| !takes_less);
    let all = prompt_tokens.saturating_add(max_tokens.unwrap_or(0));
    if all <= gateway.models.shortest_context() {
        return None;
    }
    let limit = gateway
        .models
        .context(scanned.model.as_deref(), &gateway.fleet)?;
    if all <= limit || memchr::memmem::find(bytes, CUTS).is_some() {
        return None;
    }
    Some(TooLong {
        prompt_tokens: Some(prompt_tokens),
        max_tokens: max_tokens.filter(|_| prompt_tokens <= limit),
        limit,
    })
}

/// An engine's answer in the words of `api`, if it says that the request is too long. `counted` is what the
/// router knows of the prompt's tokens.
pub(super) fn translated(
    api: Api,
    status: StatusCode,
    answer: &Response<Bytes>,
    counted: Option<u64>,
) -> Option<Response<Bytes>> {
    let is_error = status.is_client_error() || status.is_server_error();
    if !is_error || api == Api::Generate || answer.body().len() > MAX_ERROR_BYTES {
        return None;
    }
    let mut found = said(&String::from_utf8_lossy(answer.body()))?;
    found.prompt_tokens = counted.max(found.prompt_tokens);
    if found
        .prompt_tokens
        .is_some_and(|tokens| tokens > found.limit)
    {
        found.max_tokens = None;
    }
    let body = serde_json::to_vec(&found.told(api)).unwrap_or_default();
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = StatusCode::BAD_REQUEST;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    Some(response)
}

/// Finds SGLang's (0.5.17) and vLLM's (0.26.0 and before) words in an error.
fn said(text: &str) -> Option<TooLong> {
    let after = |marks: &[&str]| marks.iter().find_map(|mark| number_after(text, mark));
    let before = |marks: &[&str]| marks.iter().find_map(|mark| number_before(text, mark));
    let limit = after(&[
        "context length is ",
        "context length (",
        "context length of ",
        "model length of ",
        "This model supports at most ",
    ])?;
    let prompt_tokens = after(&["The input (", "prompt (length "]).or_else(|| {
        before(&[
            " tokens from the input messages",
            " input tokens",
            " in the messages",
        ])
    });
    let max_tokens = after(&["is too large: "]).or_else(|| {
        before(&[
            " tokens for the completion",
            " in the completion",
            " output tokens",
        ])
    });
    let is_beyond = |tokens: u64| tokens > limit;
    (prompt_tokens.is_some() || max_tokens.is_some()).then_some(TooLong {
        prompt_tokens,
        max_tokens: max_tokens.filter(|_| !prompt_tokens.is_some_and(is_beyond)),
        limit,
    })
}

fn number_after(text: &str, mark: &str) -> Option<u64> {
    let (_, rest) = text.split_once(mark)?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

fn number_before(text: &str, mark: &str) -> Option<u64> {
    let (begin, _) = text.split_once(mark)?;
    let digits = begin.bytes().rev().take_while(u8::is_ascii_digit).count();
    begin[begin.len() - digits..].parse().ok()
}

impl TooLong {
    /// The error as clients of `api` read it.
    pub fn told(&self, api: Api) -> Value {
        match api {
            Api::Messages => (api.shape().error)("invalid_request_error", 400, &self.anthropics()),
            _ => json!({"error": {
                "message": self.openais(),
                "type": "invalid_request_error",
                "param": match api {
                    Api::Responses => "input",
                    Api::Chat => "messages",
                    _ => "prompt",
                },
                "code": "context_length_exceeded",
            }}),
        }
    }

    fn anthropics(&self) -> String {
        let limit = self.limit;
        match (self.prompt_tokens, self.max_tokens) {
            (Some(prompt), Some(asked)) => {
                format!(
                    "input length and `max_tokens` exceed context limit: {prompt} + {asked} > {limit}, decrease input length or `max_tokens` and try again"
                )
            }
            (None, Some(asked)) => {
                format!(
                    "max_tokens: {asked} > {limit}, which is the maximum allowed number of output tokens for this model"
                )
            }
            (Some(prompt), None) => {
                format!("prompt is too long: {prompt} tokens > {limit} maximum")
            }
            (None, None) => format!("prompt is too long: > {limit} maximum"),
        }
    }

    fn openais(&self) -> String {
        let limit = self.limit;
        let said = format!("This model's maximum context length is {limit} tokens.");
        match (self.prompt_tokens, self.max_tokens) {
            (Some(prompt), Some(asked)) => {
                let all = prompt.saturating_add(asked);
                format!(
                    "{said} However, you requested {all} tokens ({prompt} in the messages, {asked} in the completion). Please reduce the length of the messages or completion."
                )
            }
            (None, Some(asked)) => {
                format!(
                    "{said} However, you requested {asked} tokens in the completion. Please reduce the length of the completion."
                )
            }
            (Some(prompt), None) => {
                format!(
                    "{said} However, your messages resulted in {prompt} tokens. Please reduce the length of the messages."
                )
            }
            (None, None) => format!("{said} Please reduce the length of the messages."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_words_are_told_in_those_that_claude_code_acts_on() {
        for (text, expected) in [
            // SGLang 0.5.17.
            (
                "The input (238616 tokens) is longer than the model's context length (200000 tokens).",
                "prompt is too long: 238616 tokens > 200000 maximum",
            ),
            (
                "Requested token count exceeds the model's maximum context length of 32768 tokens. You requested a total of 40000 tokens: 30000 tokens from the input messages and 10000 tokens for the completion.",
                "input length and `max_tokens` exceed context limit: 30000 + 10000 > 32768",
            ),
            (
                "max_completion_tokens is too large: 64000.This model supports at most 32768 completion tokens, whereas you provided 64000.",
                "max_tokens: 64000 > 32768",
            ),
            // vLLM, several releases.
            (
                "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4000 in the messages, 1000 in the completion). Please reduce the length.",
                "input length and `max_tokens` exceed context limit: 4000 + 1000 > 4096",
            ),
            (
                "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens. Please reduce the length of the input messages.",
                "prompt is too long: 5000 tokens > 4096 maximum",
            ),
            (
                "This model's maximum context length is 4096 tokens. However, you requested 1000 output tokens and your prompt contains at least 4097 input tokens, for a total of at least 5097 tokens.",
                "prompt is too long: 4097 tokens > 4096 maximum",
            ),
            (
                "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 tokens and your request has 100 input tokens (5000 > 4096 - 100).",
                "input length and `max_tokens` exceed context limit: 100 + 5000 > 4096",
            ),
            (
                "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
                "prompt is too long: 5000 tokens > 4096 maximum",
            ),
        ] {
            let body = json!({"object": "error", "message": text, "code": 400}).to_string();
            for status in [400, 500] {
                let status = StatusCode::from_u16(status).expect("a status");
                let answer = Response::new(Bytes::from(body.clone()));
                let told = translated(Api::Messages, status, &answer, None).expect(text);
                assert_eq!(told.status(), StatusCode::BAD_REQUEST);
                let told: Value = serde_json::from_slice(told.body()).expect("JSON");
                assert_eq!(told["error"]["type"], "invalid_request_error");
                let message = told["error"]["message"].as_str().expect("a message");
                assert!(message.starts_with(expected), "{message}");
            }
        }
    }

    #[test]
    fn other_errors_and_answers_stay_as_they_are() {
        let told = |status: u16, text: &str| {
            let status = StatusCode::from_u16(status).expect("a status");
            let answer = Response::new(Bytes::from(text.to_owned()));
            translated(Api::Chat, status, &answer, Some(9))
        };
        let answer = "This model's maximum context length is 10 tokens: 5 input tokens";
        assert!(told(200, answer).is_none());
        assert!(told(400, answer).is_some());
        assert!(told(500, "out of memory: 5 input tokens").is_none());
        assert!(told(400, "the context length is of no interest").is_none());
    }

    #[test]
    fn what_the_router_counted_says_which_of_both_is_too_long() {
        let text = "max_completion_tokens is too large: 64000.This model supports at most 32768 completion tokens";
        let answer = Response::new(Bytes::from(text));
        let told = |counted| {
            let bad = StatusCode::BAD_REQUEST;
            let told = translated(Api::Messages, bad, &answer, Some(counted)).expect("told");
            String::from_utf8_lossy(told.body()).into_owned()
        };
        assert!(told(30_000).contains("30000 + 64000 > 32768"));
        assert!(told(40_000).contains("prompt is too long: 40000 tokens > 32768 maximum"));
    }
}
