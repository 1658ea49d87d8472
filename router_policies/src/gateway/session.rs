//! Which session a request belongs to, and what is said of it: where clients say so.
//!
//! Headers come before the body, and what names one conversation before what may name a person.
//! `x-session-id` is ours and what several clients send; `x-smg-routing-key` is SGLang's router's;
//! Claude Code sends `x-claude-code-session-id` since 2.1.86 and has the session in the body's
//! `metadata.user_id` besides (coder/aibridge pull request 241, anthropics/claude-code issue 40119);
//! and, with the requests of a sub-agent, `x-claude-code-agent-id`: that is a session of its own, and the
//! session its parent.
//! Codex sends `session-id`, earlier `session_id`, and `prompt_cache_key` in the body
//! (raine/claude-code-proxy pull request 156); OpenCode sends `x-session-affinity`.

use super::body::Scanned;
use super::headers::{ENDS, IDLE, PARENT, REQUEST_ID, header, is_hint};
use decision::fleet::prefix::hash::PromptHashes;
use decision::fleet::{Hints, random_id};
use hyper::header::{HeaderMap, HeaderName};
use lru::LruCache;
use parking_lot::Mutex;
use serde_json::Value;
use std::num::NonZeroUsize;

static HEADERS: [HeaderName; 6] = [
    HeaderName::from_static("x-session-id"),
    HeaderName::from_static("x-smg-routing-key"),
    HeaderName::from_static("x-claude-code-session-id"),
    HeaderName::from_static("session-id"),
    HeaderName::from_static("session_id"),
    HeaderName::from_static("x-session-affinity"),
];

/// Of a sub-agent of Claude Code.
static AGENT: HeaderName = HeaderName::from_static("x-claude-code-agent-id");

/// Longer ids are kept as what names them: their beginning and a hash.
const MAX_ID_BYTES: usize = 256;
/// As much of a longer id as is kept.
const KEPT_BYTES: usize = 64;

/// The name that the headers give the session.
fn in_headers(headers: &HeaderMap) -> Option<String> {
    let is_named = headers.keys().any(|name| HEADERS.contains(name));
    let find = || HEADERS.iter().find_map(|name| header(headers, name));
    is_named.then(find).flatten()
}

/// The session that the headers name, else the one that the body names. `is_shared` says whether a cache key is
/// the name of many conversations.
pub(super) fn of(
    headers: &HeaderMap,
    in_body: Named,
    is_shared: impl FnOnce(&str) -> bool,
) -> Option<String> {
    let session = in_headers(headers).or_else(|| match in_body {
        Named::ByCacheKey(key) => (!is_shared(&key)).then_some(key),
        Named::BySession(session) => Some(session),
        Named::Not => None,
    })?;
    Some(bounded(match header(headers, &AGENT) {
        Some(agent) => format!("{session}/{agent}"),
        None => session,
    }))
}

/// What the client says of its session, for admission. What cannot be read says nothing.
/// `session` is as [`of`] has it.
pub(super) fn hints(headers: &HeaderMap, session: Option<&str>) -> Hints {
    if !headers.keys().any(|name| is_hint(name) || *name == AGENT) {
        return Hints::default();
    }
    let of_agent = || {
        let agent = header(headers, &AGENT)?;
        let (parent, own) = session?.rsplit_once('/')?;
        (own == agent).then(|| parent.to_owned())
    };
    let is_said = |value: String| matches!(value.as_str(), "1" | "true");
    let seconds = header(headers, &IDLE).and_then(|value| value.parse().ok());
    let parent = PARENT.iter().find_map(|name| header(headers, name));
    let parent = parent.or_else(of_agent);
    Hints {
        ends: header(headers, &ENDS).is_some_and(is_said),
        idle_s: seconds.filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0),
        // As the parent's own requests name it.
        parent_session: parent.map(bounded),
    }
}

/// The id of a request that is passed on as it is: its client's, or one of ours.
pub(super) fn request_id(headers: &HeaderMap) -> String {
    header(headers, &REQUEST_ID).map_or_else(|| random_id(fastrand::u64(..)), bounded)
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

/// A call beside a conversation has no more tokens.
const ASIDE_TOKENS: u64 = 2_048;

/// Whether a request may be a call beside its session's conversation, such as Claude Code's for a title or to see
/// whether anybody answers: small, without tools, and going on from nothing that the engine keeps.
pub(super) fn may_be_aside(scanned: &Scanned, prompt: &PromptHashes, body: &[u8]) -> bool {
    scanned.is_conversation
        && prompt.tokens() <= ASIDE_TOKENS
        && scanned.previous_response.is_none()
        && memchr::memmem::find(body, b"\"tools\"").is_none()
}

/// What a body has that may name a session. Other ids of a user name somebody who may have many.
#[derive(Default)]
pub(super) struct InBody {
    pub prompt_cache_key: Option<String>,
    pub metadata_user_id: Option<String>,
}

/// How a body names its session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Named {
    #[default]
    Not,
    /// A client may give all of its conversations one.
    ByCacheKey(String),
    BySession(String),
}

impl InBody {
    pub fn session(self) -> Named {
        let named = |id: Option<String>| id.filter(|id| !id.is_empty()).map(bounded);
        let of_metadata = || named(session_in(self.metadata_user_id.as_deref()?));
        match named(self.prompt_cache_key) {
            Some(key) => Named::ByCacheKey(key),
            None => of_metadata().map_or(Named::Not, Named::BySession),
        }
    }
}

/// Cache keys that requests had of late.
const CACHE_KEYS: NonZeroUsize = NonZeroUsize::new(1 << 14).expect("not 0");
/// A conversation begins anew now and then, as where it is compacted. So many times in a row it does not.
const STRANGERS: u32 = 3;

/// Which `prompt_cache_key`s are the names of many conversations: their prompts do not go on from each other.
pub(crate) struct CacheKeys(Mutex<LruCache<(u64, String), Newest>>);

/// The newest prompt under a key.
#[derive(Clone, Copy, Default)]
struct Newest {
    /// Blocks of it, and the state behind them.
    blocks: usize,
    state: u64,
    /// Prompts in a row that did not go on from the one before.
    strangers: u32,
}

impl Default for CacheKeys {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(CACHE_KEYS)))
    }
}

impl CacheKeys {
    /// Whether the key of a tenant, with which this prompt comes, is that of many conversations. Once it is, it
    /// stays so for as long as it is remembered.
    pub fn is_shared(&self, tenant: u64, key: &str, prompt: &PromptHashes) -> bool {
        let mut keys = self.0.lock();
        let newest = keys.get_or_insert_mut((tenant, key.to_owned()), Newest::default);
        if newest.strangers >= STRANGERS {
            return true;
        }
        let (Some(blocks), Some(&state)) =
            (prompt.states.len().checked_sub(1), prompt.states.last())
        else {
            // Too short to tell; one conversation is no longer so after a few turns.
            newest.strangers += 1;
            return newest.strangers >= STRANGERS;
        };
        let goes_on =
            newest.blocks == 0 || prompt.states.get(newest.blocks - 1) == Some(&newest.state);
        *newest = Newest {
            blocks: blocks + 1,
            state,
            strangers: match goes_on {
                true => 0,
                false => newest.strangers + 1,
            },
        };
        newest.strangers >= STRANGERS
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
        ] {
            let named = InBody {
                metadata_user_id: Some(user_id.to_owned()),
                ..InBody::default()
            };
            assert_eq!(named.session(), Named::BySession(session.to_owned()));
        }
        let person = InBody {
            metadata_user_id: Some("somebody".to_owned()),
            ..InBody::default()
        };
        assert_eq!(
            person.session(),
            Named::Not,
            "a person has many conversations"
        );
    }

    #[test]
    fn a_sub_agent_is_a_session_whose_parent_is_known() {
        let mut headers = HeaderMap::new();
        let value = hyper::header::HeaderValue::from_static;
        headers.insert("x-claude-code-session-id", value("s1"));
        let of = |headers: &HeaderMap| of(headers, Named::Not, |_| false);
        let session = of(&headers);
        assert_eq!(session.as_deref(), Some("s1"));
        assert_eq!(hints(&headers, session.as_deref()), Hints::default());
        headers.insert(&AGENT, value("a7"));
        headers.insert("x-claude-code-parent-agent-id", value("main"));
        let session = of(&headers);
        assert_eq!(session.as_deref(), Some("s1/a7"));
        let parent = hints(&headers, session.as_deref()).parent_session;
        assert_eq!(parent.as_deref(), Some("s1"));
        headers.insert("x-parent-session", value("other"));
        let parent = hints(&headers, session.as_deref()).parent_session;
        assert_eq!(parent.as_deref(), Some("other"), "said in so many words");
    }

    #[test]
    fn a_session_may_have_a_name_in_any_script() {
        let named = |bytes: &[u8]| {
            let value = hyper::header::HeaderValue::from_bytes(bytes).expect("a header");
            let mut headers = HeaderMap::new();
            headers.insert("x-session-id", value);
            let in_body = Named::BySession("the body's".to_owned());
            of(&headers, in_body, |_| false)
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
    fn a_cache_key_of_many_conversations_names_none() {
        let prompt = |conversation: u32, turns: u32| {
            let own = (0..turns * 100).map(|i| conversation * 10_000 + i);
            let tokens: Vec<u32> = (0..200).chain(own).collect();
            PromptHashes::of_tokens(&tokens, 16)
        };
        let keys = CacheKeys::default();
        for turns in 1..20 {
            assert!(!keys.is_shared(1, "one", &prompt(1, turns)));
        }
        assert!(!keys.is_shared(1, "one", &prompt(9, 1)), "it was compacted");
        assert!(!keys.is_shared(1, "one", &prompt(9, 2)));
        let many = (1..=4).map(|conversation| keys.is_shared(1, "app", &prompt(conversation, 1)));
        assert_eq!(many.collect::<Vec<_>>(), [false, false, false, true]);
        assert!(keys.is_shared(1, "app", &prompt(4, 2)), "it stays so");
        assert!(!keys.is_shared(2, "app", &prompt(4, 3)), "another tenant's");
        let short = (1..=3).map(|_| keys.is_shared(3, "short", &PromptHashes::default()));
        assert_eq!(short.collect::<Vec<_>>(), [false, false, true]);
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
