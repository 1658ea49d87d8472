//! What is read of a gateway's messages, and written into those that answer them.

use super::messages::{
    AppendAction, BodyMutation, CommonAnswer, CommonResponse, HeaderMutation, HeaderValue,
    HeaderValueOption, HttpBody, HttpHeaders, HttpStatus, ImmediateResponse, Kind, Mutation,
    ProcessingResponse, Response as Answer, Struct, TrailersResponse,
};
use crate::gateway::Reply;
use crate::gateway::dispatch::DECISION_ID;
use crate::gateway::fault::WORKER;
use crate::gateway::splice::Pieces;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{
    CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue as Header,
    TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Request, Response, StatusCode, Uri};
use std::net::SocketAddr;

/// Where a request goes, as gateways read it: in a header, and in metadata of this namespace.
const DESTINATION: &str = "x-gateway-destination-endpoint";
const NAMESPACE: &str = "envoy.lb";
/// Where it is prefilled, as llm-d's sidecar beside the worker that answers reads it.
const PREFILLER: &str = "x-prefiller-host-port";

/// Gateways take pieces of bodies of up to 64 KiB, with what is around them.
const PIECE_BYTES: usize = 62_000;

/// A request's head.
pub(super) struct Head {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    /// It has no body.
    pub end_of_stream: bool,
}

/// The bytes of a header's value.
fn value_of(header: &HeaderValue) -> &[u8] {
    match header.raw_value.is_empty() {
        true => header.value.as_bytes(),
        false => &header.raw_value,
    }
}

impl Head {
    pub fn of(sent: HttpHeaders) -> Result<Self, &'static str> {
        let (mut method, mut uri) = (None, None);
        let mut headers = HeaderMap::new();
        for header in sent.headers.unwrap_or_default().headers {
            let value = value_of(&header);
            match header.key.as_str() {
                ":method" => method = Method::from_bytes(value).ok(),
                ":path" => uri = Uri::try_from(value).ok(),
                name => {
                    let name = match name {
                        ":authority" => Ok(HOST),
                        name => HeaderName::from_bytes(name.as_bytes()),
                    };
                    if let (Ok(name), Ok(value)) = (name, Header::from_bytes(value)) {
                        headers.append(name, value);
                    }
                }
            }
        }
        Ok(Self {
            method: method.ok_or(":method: expected a method")?,
            uri: uri.ok_or(":path: expected a path")?,
            headers,
            end_of_stream: sent.end_of_stream,
        })
    }

    /// As the router's own front reads it.
    pub fn path(&self) -> &str {
        let path = self.uri.path();
        match path.trim_end_matches('/') {
            "" => path,
            trimmed => trimmed,
        }
    }

    pub fn as_parts(&self) -> Parts {
        let mut request = Request::new(());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request.into_parts().0
    }
}

/// What becomes of a request on its way to its worker.
pub(super) struct Change {
    /// Path and query at the worker, if they may be others.
    pub target: Option<PathAndQuery>,
    /// The worker that answers, and the one that prefills.
    pub to: (SocketAddr, Option<SocketAddr>),
    pub headers: HeaderMap,
    /// The body is another.
    pub is_changed: bool,
}

fn set(name: &str, value: &[u8]) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: name.to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value),
        }),
        append_action: AppendAction::OverwriteIfExistsOrAdd as i32,
    }
}

impl Change {
    /// In the request's headers. A body that is sent in pieces is of `length` bytes.
    fn mutation(&self, head: &Head, length: Option<usize>) -> HeaderMutation {
        /// Are the gateway's own.
        static KEPT: [HeaderName; 3] = [HOST, CONTENT_LENGTH, TRANSFER_ENCODING];
        let mut set_headers = vec![set(DESTINATION, self.to.0.to_string().as_bytes())];
        let mut remove_headers = Vec::new();
        match self.to.1 {
            Some(prefill) => set_headers.push(set(PREFILLER, prefill.to_string().as_bytes())),
            // A client's own would have the sidecar ask whom it names.
            None if head.headers.contains_key(PREFILLER) => {
                remove_headers.push(PREFILLER.to_owned());
            }
            None => {}
        }
        let asked = head.uri.path_and_query();
        if let Some(target) = self.target.as_ref().filter(|it| asked != Some(it)) {
            set_headers.push(set(":path", target.as_str().as_bytes()));
        }
        for name in self.headers.keys() {
            let is_named = [DESTINATION, PREFILLER].contains(&name.as_str());
            let (before, after) = (head.headers.get_all(name), self.headers.get_all(name));
            if before != after && !is_named {
                set_headers.extend(
                    after
                        .iter()
                        .map(|value| set(name.as_str(), value.as_bytes())),
                );
            }
        }
        for name in head.headers.keys() {
            if !self.headers.contains_key(name) && !KEPT.contains(name) {
                remove_headers.push(name.as_str().to_owned());
            }
        }
        if let Some(length) = length.filter(|_| head.headers.contains_key(CONTENT_LENGTH)) {
            set_headers.push(set(CONTENT_LENGTH.as_str(), length.to_string().as_bytes()));
        }
        HeaderMutation {
            set_headers,
            remove_headers,
        }
    }

    fn metadata(&self) -> Struct {
        let destination = Kind::Text(self.to.0.to_string());
        Struct::of(
            NAMESPACE,
            Kind::Struct(Struct::of(DESTINATION, destination)),
        )
    }

    fn response(&self, head: &Head, length: Option<usize>) -> CommonResponse {
        CommonResponse {
            header_mutation: Some(self.mutation(head, length)),
            body_mutation: None,
            clear_route_cache: true,
        }
    }
}

fn answered(
    response: CommonResponse,
    part: impl FnOnce(CommonAnswer) -> Answer,
) -> ProcessingResponse {
    let response = Some(response);
    ProcessingResponse {
        dynamic_metadata: None,
        response: Some(part(CommonAnswer { response })),
    }
}

/// The answer to a request's headers whose body has to come before more can be said.
pub(super) fn go_on_with_body() -> ProcessingResponse {
    answered(CommonResponse::default(), Answer::RequestHeaders)
}

/// The answer to a piece of an answer's body that stays as it is.
pub(super) fn unchanged() -> ProcessingResponse {
    answered(CommonResponse::default(), Answer::ResponseBody)
}

/// The answer to a request's headers, whose body is sent back in pieces if there is one.
pub(super) fn headers(head: &Head, change: &Change, length: usize) -> ProcessingResponse {
    let length = (!head.end_of_stream).then_some(length);
    ProcessingResponse {
        dynamic_metadata: Some(change.metadata()),
        ..answered(change.response(head, length), Answer::RequestHeaders)
    }
}

/// The answer to a request's body that came in one piece.
pub(super) fn whole(head: &Head, change: &Change, body: &Pieces) -> ProcessingResponse {
    let mut response = change.response(head, None);
    if change.is_changed {
        let body = Mutation::Body(body.concat().into());
        response.body_mutation = Some(BodyMutation {
            mutation: Some(body),
        });
    }
    ProcessingResponse {
        dynamic_metadata: Some(change.metadata()),
        ..answered(response, Answer::RequestBody)
    }
}

/// A body that is sent back, the last piece of it marked if it `ends` with that.
pub(super) fn pieces(
    body: impl IntoIterator<Item = Bytes>,
    ends: bool,
    part: fn(CommonAnswer) -> Answer,
) -> Vec<ProcessingResponse> {
    let mut pieces: Vec<Bytes> = body
        .into_iter()
        .flat_map(|whole| {
            let begins = (0..whole.len()).step_by(PIECE_BYTES);
            let piece = |begin| whole.slice(begin..whole.len().min(begin + PIECE_BYTES));
            begins.map(piece).collect::<Vec<_>>()
        })
        .collect();
    if pieces.is_empty() {
        pieces.push(Bytes::new());
    }
    let last = pieces.len() - 1;
    let each = pieces.into_iter().enumerate().map(|(at, body)| {
        let piece = HttpBody {
            body,
            end_of_stream: ends && at == last,
        };
        let response = CommonResponse {
            body_mutation: Some(BodyMutation {
                mutation: Some(Mutation::Streamed(piece)),
            }),
            ..CommonResponse::default()
        };
        answered(response, part)
    });
    each.collect()
}

pub(super) fn trailers(part: fn(TrailersResponse) -> Answer) -> ProcessingResponse {
    ProcessingResponse {
        dynamic_metadata: None,
        response: Some(part(TrailersResponse {})),
    }
}

/// The status of a worker's answer, and whether it is a stream of events.
pub(super) fn status_of(head: &HttpHeaders) -> (StatusCode, bool) {
    let all = head.headers.iter().flat_map(|all| &all.headers);
    let find = |name: &str| {
        let header = all.clone().find(|header| header.key == name);
        header.map(value_of).unwrap_or_default()
    };
    let status = StatusCode::from_bytes(find(":status"));
    let is_stream = find(CONTENT_TYPE.as_str()).starts_with(b"text/event-stream");
    (status.unwrap_or(StatusCode::BAD_GATEWAY), is_stream)
}

/// The answer to a worker's headers: the client is told who answers, as by the router's own front.
pub(super) fn answer_headers(worker: &str, decision_id: Option<&str>) -> ProcessingResponse {
    let mut set_headers = vec![set(WORKER.as_str(), worker.as_bytes())];
    if let Some(id) = decision_id {
        set_headers.push(set(DECISION_ID.as_str(), id.as_bytes()));
    }
    let response = CommonResponse {
        header_mutation: Some(HeaderMutation {
            set_headers,
            remove_headers: Vec::new(),
        }),
        ..CommonResponse::default()
    };
    answered(response, Answer::ResponseHeaders)
}

/// An answer of the router's own.
pub(super) async fn immediate(response: Response<Reply>) -> ProcessingResponse {
    let (parts, body) = response.into_parts();
    let body = body.collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let headers = parts.headers.iter();
    let set_headers = headers.map(|(name, value)| set(name.as_str(), value.as_bytes()));
    let answer = ImmediateResponse {
        status: Some(HttpStatus {
            code: i32::from(parts.status.as_u16()),
        }),
        headers: Some(HeaderMutation {
            set_headers: set_headers.collect(),
            remove_headers: Vec::new(),
        }),
        body,
        details: "deltaserve".to_owned(),
    };
    ProcessingResponse {
        dynamic_metadata: None,
        response: Some(Answer::Immediate(answer)),
    }
}
