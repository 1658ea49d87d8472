//! Headers on their way through the router: what belongs to one connection, or to the router alone, stays
//! behind.
//!
//! A request has few headers and there are many names to look for, so each header is compared with all
//! of them, once: to look every name up takes several times as long.

use hyper::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use smallvec::SmallVec;

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// What a router sends has it. A router takes nothing that has: a router among the workers of another, or of its
/// own, would send requests in a circle.
pub(super) static FROM_ROUTER: HeaderName = HeaderName::from_static("x-deltaserve-router");

/// SGLang (0.5.17) lets headers of this kind override fields of the body.
const OVERRIDES: &str = "x-override-";

/// What is said of a request's session to the router alone.
pub(super) static ENDS: HeaderName = HeaderName::from_static("x-session-end");
pub(super) static IDLE: HeaderName = HeaderName::from_static("x-session-idle-s");
pub(super) static PARENT: [HeaderName; 2] = [
    HeaderName::from_static("x-parent-session"),
    HeaderName::from_static("x-session-parent"),
];

/// A request's headers that are not the worker's business.
static OF_CONNECTION: [HeaderName; 12] = [
    HOST,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    CONNECTION,
    EXPECT,
    PROXY_AUTHORIZATION,
    // Errors, ends of streams and token counts are read in answers, and written into them.
    ACCEPT_ENCODING,
    KEEP_ALIVE,
    TE,
    TRAILER,
    UPGRADE,
    HeaderName::from_static("proxy-connection"),
];

/// An answer's headers that are not the client's business.
static OF_WORKERS_CONNECTION: [HeaderName; 5] = [
    CONNECTION,
    TRANSFER_ENCODING,
    CONTENT_LENGTH,
    UPGRADE,
    KEEP_ALIVE,
];

/// Whether a header of this name is said to the router alone.
pub(super) fn is_hint(name: &HeaderName) -> bool {
    *name == ENDS || *name == IDLE || PARENT.contains(name)
}

/// A header's value, if it is there and not empty. Where it is no UTF-8 it is read as Latin-1, which some
/// clients send.
pub(super) fn header(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let value = headers.get(name)?.as_bytes();
    let text = match std::str::from_utf8(value) {
        Ok(text) => text.to_owned(),
        Err(_) => value.iter().copied().map(char::from).collect(),
    };
    (!text.is_empty()).then_some(text)
}

/// The client's headers, less those that belong to its connection or to the router alone and, if
/// `strips`, those by which engines let fields of the body be overridden.
pub(super) fn forwarded(mut headers: HeaderMap, request_id: &str, strips: bool) -> HeaderMap {
    let named = named_by_connection(&headers);
    remove(&mut headers, |name| {
        OF_CONNECTION.contains(name)
            || named.contains(name)
            || is_hint(name)
            || (strips && name.as_str().starts_with(OVERRIDES))
    });
    if let Ok(value) = HeaderValue::from_str(request_id) {
        headers.insert(REQUEST_ID, value);
    }
    headers.insert(FROM_ROUTER.clone(), HeaderValue::from_static("1"));
    headers
}

/// Takes those out of a worker's answer that belong to its connection.
pub(super) fn remove_workers_own(headers: &mut HeaderMap) {
    let named = named_by_connection(headers);
    remove(headers, |name| {
        OF_WORKERS_CONNECTION.contains(name) || named.contains(name)
    });
}

/// What `Connection` names belongs to the connection too.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect()
}

fn remove(headers: &mut HeaderMap, is_private: impl Fn(&HeaderName) -> bool) {
    let private = headers.keys().filter(|name| is_private(name));
    let private: SmallVec<[HeaderName; 4]> = private.cloned().collect();
    for name in private {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_workers_connection_names_stays_with_it() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("x-kept", "1"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        remove_workers_own(&mut headers);
        let left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(left, ["x-kept"]);
    }
}
