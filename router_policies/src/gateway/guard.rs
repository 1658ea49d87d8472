//! Who may change the workers.
//!
//! With an admin token, who has it. Without one, who is on this machine and is no web page: a page that
//! is open in a browser here can send requests to a loopback address too, but not without the browser
//! naming the page (`Origin`) or the name by which it found the address (`Host`), and not as JSON without
//! asking first.

use super::{Gateway, keys};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, ORIGIN};
use hyper::http::uri::Authority;

/// Why a change is refused, if it is.
pub(super) fn refusal(
    gateway: &Gateway,
    headers: &HeaderMap,
    has_body: bool,
) -> Option<(StatusCode, &'static str)> {
    match &gateway.config.admin_token {
        Some(token) => (!has_token(headers, token)).then_some((
            StatusCode::FORBIDDEN,
            "changing the workers needs the admin token as Authorization: Bearer",
        )),
        None if !gateway.is_loopback => Some((
            StatusCode::FORBIDDEN,
            "changing the workers needs the admin token as Authorization: Bearer",
        )),
        None => without_token(headers, has_body),
    }
}

/// Why the inside is not shown to whoever needs no key and no token for it, if it is not: a name that a web page
/// has pointed to a loopback address is no reason to.
pub(super) fn refusal_to_show(
    gateway: &Gateway,
    headers: &HeaderMap,
) -> Option<(StatusCode, &'static str)> {
    let is_open = gateway.config.admin_token.is_none() && !gateway.keys.are_needed();
    (is_open && gateway.is_loopback && !is_to_loopback(headers)).then_some((
        StatusCode::FORBIDDEN,
        "Host: expected a loopback address; from elsewhere, this needs an admin token",
    ))
}

/// Whether a request names a loopback address as the one that it wants, and no other.
fn is_to_loopback(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    host.is_some_and(is_loopback_host) && hosts.next().is_none()
}

fn without_token(headers: &HeaderMap, has_body: bool) -> Option<(StatusCode, &'static str)> {
    let value = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if !is_to_loopback(headers) {
        let message = "Host: expected a loopback address; from elsewhere, changing the workers \
                       needs an admin token";
        return Some((StatusCode::FORBIDDEN, message));
    }
    if headers.contains_key(ORIGIN) {
        let message = "a web page may not change the workers without the admin token";
        return Some((StatusCode::FORBIDDEN, message));
    }
    let is_json = value(CONTENT_TYPE).is_some_and(|kind| {
        let (kind, _) = kind.split_once(';').unwrap_or((kind, ""));
        kind.trim().eq_ignore_ascii_case("application/json")
    });
    (has_body && !is_json).then_some((
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "Content-Type: expected application/json",
    ))
}

fn is_loopback_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    keys::bearer(headers).is_some_and(|given| keys::is_same(given, token.as_bytes()))
}
