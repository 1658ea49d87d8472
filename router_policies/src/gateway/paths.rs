//! Every path that the router serves, by which methods, and what is there.
//!
//! A path that is not here is answered with 404, and another method with 405: what handles a path is reached through
//! this table alone. The docs' table of paths is made from it.

use super::{Reply, error, not_allowed};
use hyper::{Method, Response, StatusCode};
use serde::Serialize;

/// Paths that are handled alike. `ID` stands for a name, which may have slashes where it comes last.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Served {
    /// As in the header `Allow`.
    pub methods: &'static str,
    pub paths: &'static [&'static str],
    pub what: &'static str,
}

const fn served(
    methods: &'static str,
    paths: &'static [&'static str],
    what: &'static str,
) -> Served {
    Served {
        methods,
        paths,
        what,
    }
}

/// The first that fits a path counts.
pub const SERVED: [Served; 21] = [
    served(
        "POST",
        &["/generate", "/v1/completions", "/v1/chat/completions"],
        "streamed or not. The body reaches the worker byte for byte, except `strip_transfer_keys` and a model's alias",
    ),
    served(
        "POST",
        &["/v1/messages", "/v1/responses"],
        "the same, and `normalise_prompts`; errors in the API's shape",
    ),
    served(
        "POST",
        &["/v1/responses/ID/cancel"],
        "asks the worker that has the response",
    ),
    served(
        "GET, DELETE",
        &["/v1/responses/ID"],
        "the same; `previous_response_id` goes there too",
    ),
    served(
        "POST",
        &super::passthrough::PATHS,
        "passed to the worker with the fewest requests; no decision",
    ),
    served(
        "GET",
        &["/v1/models", "/v1/models/ID"],
        "the lists of all workers that are up, as one, with aliases",
    ),
    served(
        "GET",
        &[
            "/model_info",
            "/server_info",
            "/get_model_info",
            "/get_server_info",
        ],
        "answered by a worker that is up",
    ),
    served(
        "GET, HEAD",
        &["/health", "/livez", "/liveness"],
        "the router lives",
    ),
    served(
        "GET, HEAD",
        &["/readyz", "/readiness"],
        "a request could be placed now. In the first 5 s every worker must have answered once, in the first 15 s its \
         earlier KV events must be read",
    ),
    served(
        "GET, HEAD",
        &["/metrics"],
        "Prometheus; `router_policies/ops/` has a Grafana board and alert rules",
    ),
    served(
        "GET, POST",
        &["/workers"],
        "as SGLang's router; `POST` also takes the keys of a worker above",
    ),
    served("POST", &["/workers/ID/drain"], "it gets no new requests"),
    served("POST", &["/workers/ID/undrain"], "it gets new ones again"),
    served(
        "GET, DELETE",
        &["/workers/ID"],
        "one worker. The requests of one that is removed run to their end",
    ),
    served(
        "GET",
        &["/sessions"],
        "who has a place, where, and its tokens; who waits, since when, at which position and why",
    ),
    served(
        "GET",
        &["/sessions/ID"],
        "the same of one, and its turns among the last 1,024 decisions, each with what broke its prefix",
    ),
    served("GET", &["/record"], "what is recorded (`record`)"),
    served("POST", &["/record/start"], "recording is on"),
    served("POST", &["/record/stop"], "recording is off"),
    served(
        "GET, HEAD",
        &["/ui"],
        "a page for a browser: sessions and why they wait, workers, waits and cache hits since it was opened, a \
         session's turns. It only reads, and loads nothing from elsewhere",
    ),
    served(
        "GET",
        &["/decisions"],
        "the last decisions, newest first: `?limit=N`, at most 1,024",
    ),
];

/// What a path may be asked for; None where there is none.
fn methods(path: &str) -> Option<&'static str> {
    let is_it = |served: &&Served| served.paths.iter().any(|pattern| fits(pattern, path));
    SERVED.iter().find(is_it).map(|served| served.methods)
}

fn fits(pattern: &str, path: &str) -> bool {
    let Some((before, after)) = pattern.split_once("ID") else {
        return pattern == path;
    };
    let named = path.strip_prefix(before);
    named
        .and_then(|rest| rest.strip_suffix(after))
        .is_some_and(|name| !name.is_empty())
}

/// The answer where a path is not served, or not by this method; None where it is.
pub(super) fn refusal(method: &Method, path: &str) -> Option<Response<Reply>> {
    match methods(path) {
        None => Some(not_found(path)),
        Some(methods) if methods.split(", ").any(|one| one == method.as_str()) => None,
        Some(methods) => Some(not_allowed(methods)),
    }
}

/// There is nothing at this path.
pub(super) fn not_found(path: &str) -> Response<Reply> {
    let path = if path.is_empty() { "/" } else { path };
    let message = format!("{path}: no such path");
    error(StatusCode::NOT_FOUND, "not_found", &message)
}

#[cfg(test)]
mod tests {
    use super::super::{apis::Api, passthrough};
    use super::*;

    #[test]
    fn every_api_is_in_the_table_and_what_is_passed_on_too() {
        for path in Api::ALL.map(Api::path).iter().chain(&passthrough::PATHS) {
            assert_eq!(methods(path), Some("POST"), "{path}");
        }
    }

    #[test]
    fn a_path_has_the_methods_of_the_first_that_fits() {
        for (path, expected) in [
            ("/workers", Some("GET, POST")),
            ("/workers/a", Some("GET, DELETE")),
            ("/workers/a/drain", Some("POST")),
            ("/workers/a/b/undrain", Some("POST")),
            ("/sessions/a/b", Some("GET")),
            ("/sessions/", None),
            ("/v1/responses/a/cancel", Some("POST")),
            ("/v1/responses/a", Some("GET, DELETE")),
            ("/", None),
            ("/nowhere", None),
        ] {
            assert_eq!(methods(path), expected, "{path}");
        }
    }
}
