//! `GET /ui`: a page that shows what `/sessions`, `/workers` and `/metrics` say. It holds nothing that is secret, so
//! that no token is needed for the page itself; it asks for the token and sends it with its own questions.

use super::{Gateway, Reply, error};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Response, StatusCode};
use std::hash::{BuildHasher, RandomState};

const PAGE: &str = include_str!("ui.html");
/// Stands in the page for what its own style and script have in common with the policy that lets them run.
const NONCE: &str = "NONCE";
/// Stands in the page for whether it has to ask for a token first.
const ASKS: &str = "ASKS";

pub(super) fn page(gateway: &Gateway, query: Option<&str>) -> Response<Reply> {
    if query.is_some_and(|query| query.split('&').any(|pair| pair.starts_with("token="))) {
        let message = "token: addresses stay in histories and logs; the page asks for it";
        return error(StatusCode::BAD_REQUEST, "invalid_request_error", message);
    }
    let nonce = [0, 1].map(|half: u8| format!("{:016x}", RandomState::new().hash_one(half)));
    let nonce = nonce.concat();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'"
    );
    let asks = gateway.config.admin_token.is_some() || gateway.keys.are_needed();
    let page = PAGE
        .replace(NONCE, &nonce)
        .replacen(ASKS, &asks.to_string(), 1);
    let body = Bytes::from(page);
    let mut response = Response::new(Reply::Whole(Full::from(body)));
    let headers = response.headers_mut();
    let fixed = HeaderValue::from_static;
    headers.insert(CONTENT_TYPE, fixed("text/html; charset=utf-8"));
    headers.insert(CACHE_CONTROL, fixed("no-store"));
    headers.insert(REFERRER_POLICY, fixed("no-referrer"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, fixed("nosniff"));
    if let Ok(policy) = HeaderValue::try_from(policy) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
    response
}
