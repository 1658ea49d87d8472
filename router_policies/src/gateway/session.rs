//! Which session a request belongs to, and what is said of it: where clients say so.
//!
//! Headers come before the body, and what names one conversation before what may name a person.
//! `x-session-id` is ours and what several clients send; `x-smg-routing-key` is SGLang's router's;
//! Claude Code sends `x-claude-code-session-id` since 2.1.86 and has the session in the body's
//! `metadata.user_id` besides (coder/aibridge pull request 241, anthropics/claude-code issue 40119);
//! Codex sends `session-id`, earlier `session_id`, and `prompt_cache_key` in the body
//! (raine/claude-code-proxy pull request 156); OpenCode sends `x-session-affinity`.

use super::headers::{ENDS, IDLE, PARENT, header, is_hint};
use crate::fleet::Hints;
use hyper::header::{HeaderMap, HeaderName};
use serde_json::Value;

static HEADERS: [HeaderName; 6] = [
    HeaderName::from_static("x-session-id"),
    HeaderName::from_static("x-smg-routing-key"),
    HeaderName::from_static("x-claude-code-session-id"),
    HeaderName::from_static("session-id"),
    HeaderName::from_static("session_id"),
    HeaderName::from_static("x-session-affinity"),
];

/// Longer ids are kept as what names them: their beginning and a hash.
const MAX_ID_BYTES: usize = 256;
/// As much of a longer id as is kept.
const KEPT_BYTES: usize = 64;

/// The session that the headers name, else the one that the body names.
pub(super) fn of(headers: &HeaderMap, in_body: Option<String>) -> Option<String> {
    let is_named = headers.keys().any(|name| HEADERS.contains(name));
    let find = || HEADERS.iter().find_map(|name| header(headers, name));
    let named = is_named.then(find).flatten();
    named.or(in_body).map(bounded)
}

/// What the client says of its session, for residency. What cannot be read says nothing.
pub(super) fn hints(headers: &HeaderMap) -> Hints {
    if !headers.keys().any(is_hint) {
        return Hints::default();
    }
    let is_said = |value: String| matches!(value.as_str(), "1" | "true");
    let seconds = header(headers, &IDLE).and_then(|value| value.parse().ok());
    let parent = PARENT.iter().find_map(|name| header(headers, name));
    Hints {
        ends: header(headers, &ENDS).is_some_and(is_said),
        idle_s: seconds.filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0),
        // As the parent's own requests name it.
        parent_session: parent.map(bounded),
    }
}

/// An id that is kept in memory and in the log, whatever a client sent.
pub(super) fn bounded(id: String) -> String {
    if id.len() <= MAX_ID_BYTES {
        return id;
    }
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    let mut end = KEPT_BYTES;
    while !id.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…{:016x}", &id[..end], hasher.finish())
}

/// What a body has that may name a session.
#[derive(Default)]
pub(super) struct InBody {
    pub prompt_cache_key: Option<String>,
    pub metadata_user_id: Option<String>,
    pub user: Option<String>,
}

impl InBody {
    pub fn session(self) -> Option<String> {
        let of_metadata = self.metadata_user_id.map(|id| match session_in(&id) {
            Some(session) => session,
            None => id,
        });
        let named = self.prompt_cache_key.or(of_metadata).or(self.user);
        named.filter(|id| !id.is_empty()).map(bounded)
    }
}

/// The session in Claude Code's `metadata.user_id`: `user_…_account_…_session_UUID`, or, since
/// 2.1.78, JSON with a key `session_id`.
fn session_in(user_id: &str) -> Option<String> {
    if user_id.starts_with('{') {
        let parts: Value = serde_json::from_str(user_id).ok()?;
        return Some(parts.get("session_id")?.as_str()?.to_owned());
    }
    let (_, session) = user_id.rsplit_once("_session_")?;
    Some(session.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_session_of_claude_code_is_found_in_both_of_its_shapes() {
        for (user_id, session) in [
            ("user_ab12_account__session_57a121ec", "57a121ec"),
            (
                r#"{"device_id":"d","account_uuid":"","session_id":"54c1eb09"}"#,
                "54c1eb09",
            ),
            ("somebody", "somebody"),
        ] {
            let named = InBody {
                metadata_user_id: Some(user_id.to_owned()),
                user: Some("u".to_owned()),
                ..InBody::default()
            };
            assert_eq!(named.session().as_deref(), Some(session));
        }
    }

    #[test]
    fn a_session_may_have_a_name_in_any_script() {
        let named = |bytes: &[u8]| {
            let value = hyper::header::HeaderValue::from_bytes(bytes).expect("a header");
            let mut headers = HeaderMap::new();
            headers.insert("x-session-id", value);
            of(&headers, Some("the body's".to_owned()))
        };
        assert_eq!(
            named("Müller/日本".as_bytes()).as_deref(),
            Some("Müller/日本")
        );
        // As clients send it whose headers are in Latin-1.
        assert_eq!(named(b"M\xfcller").as_deref(), Some("Müller"));
        assert_ne!(named(b"M\xfcller"), named(b"M\xf6ller"));
    }

    #[test]
    fn a_long_id_is_kept_short_and_told_from_others() {
        let long = |end: char| format!("{}{end}", "é".repeat(5_000_000));
        let (a, b) = (bounded(long('a')), bounded(long('b')));
        assert!(a.len() < 128 && b.len() < 128);
        assert_ne!(a, b);
        assert_eq!(a, bounded(long('a')));
        assert_eq!(bounded("short".to_owned()), "short");
    }
}
