//! A gateway that asks an endpoint picker, as Envoy's ext_proc filter does: one stream a request.

use super::router::Router;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Request as HttpRequest};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use router_policies::gateway::picker::grpc::{self, Messages, Sender, Sent, Unread};
use router_policies::gateway::picker::messages::{
    self, BodyMode, CommonAnswer, HeaderMap as Headers, HeaderMutation, HeaderValue, HttpBody,
    HttpHeaders, ImmediateResponse, Kind, Metadata, Mutation, ProcessingRequest,
    ProcessingResponse, ProtocolConfiguration, Request, Response, Struct,
};
use std::collections::HashMap;

/// A gateway's connection to a picker.
pub struct Envoy {
    picker: hyper::client::conn::http2::SendRequest<Sent>,
    socket: std::net::TcpStream,
    pub modes: [BodyMode; 2],
    /// The endpoints that it leaves to choose from.
    pub subset: Option<String>,
}

impl Drop for Envoy {
    fn drop(&mut self) {
        // As one that is killed.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

/// What the picker said.
#[derive(Debug)]
pub enum Said {
    /// The request goes on.
    Go(Going),
    Refused(u16, HashMap<String, String>, String),
}

/// A request as it leaves the gateway.
#[derive(Debug, Default)]
pub struct Going {
    pub destination: String,
    pub set: HashMap<String, String>,
    pub removed: Vec<String>,
    pub body: Vec<u8>,
    /// The largest piece that the body came back in.
    pub largest: usize,
}

pub struct Call {
    out: Option<Sender>,
    answers: Messages<hyper::body::Incoming, ()>,
    modes: [BodyMode; 2],
    sent: Vec<u8>,
}

fn headers(all: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let headers = all.iter().map(|(name, value)| HeaderValue {
        key: (*name).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    });
    HttpHeaders {
        headers: Some(Headers {
            headers: headers.collect(),
        }),
        end_of_stream,
    }
}

fn piece(body: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody {
        body: Bytes::copy_from_slice(body),
        end_of_stream,
    }
}

fn told(mutation: Option<&HeaderMutation>) -> HashMap<String, String> {
    let set = mutation.into_iter().flat_map(|it| &it.set_headers);
    let headers = set.filter_map(|it| it.header.as_ref());
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).expect("text");
    headers
        .map(|header| (header.key.clone(), text(&header.raw_value)))
        .collect()
}

impl Envoy {
    pub async fn before(router: &Router) -> Self {
        let address = router.picker.expect("a picker");
        let io = tokio::net::TcpStream::connect(address).await;
        let io = io.expect("a connection").into_std().expect("a socket");
        let socket = io.try_clone().expect("a socket");
        let io = tokio::net::TcpStream::from_std(io).expect("a socket");
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (picker, connection) = builder.handshake(TokioIo::new(io)).await.expect("HTTP/2");
        tokio::spawn(async move {
            let _ = connection.await;
        });
        Self {
            picker,
            socket,
            modes: [BodyMode::FullDuplexStreamed; 2],
            subset: None,
        }
    }

    /// Begins a call of any kind.
    pub async fn call(&self, path: &str) -> Result<Call, HeaderMap> {
        let (out, sent) = grpc::stream();
        let request = HttpRequest::post(format!("http://picker{path}"))
            .header("content-type", "application/grpc")
            .body(sent);
        let mut picker = self.picker.clone();
        let answer = picker.send_request(request.expect("a request"));
        let answer = answer.await.expect("an answer");
        if answer.headers().contains_key("grpc-status") {
            return Err(answer.headers().clone());
        }
        Ok(Call {
            out: Some(out),
            answers: Messages::new(answer.into_body(), usize::MAX),
            modes: self.modes,
            sent: Vec::new(),
        })
    }

    /// Sends a request's headers, and its body in pieces of `size` bytes as the picker takes them.
    pub async fn send(
        &self,
        (method, path): (&str, &str),
        with: &[(&str, &str)],
        body: &[u8],
        size: usize,
    ) -> Call {
        let mut call = self.call(messages::PATH).await.expect("a picker");
        call.sent = body.to_vec();
        let length = body.len().to_string();
        let own = [
            (":method", method),
            (":path", path),
            (":authority", "models.example"),
            ("content-length", &length),
        ];
        let subset = self.subset.clone().map(|subset| Metadata {
            filter_metadata: HashMap::from([(
                "envoy.lb.subset_hint".to_owned(),
                Struct::of("x-gateway-destination-endpoint-subset", Kind::Text(subset)),
            )]),
        });
        let [request_body_mode, response_body_mode] = self.modes.map(|mode| mode as i32);
        let first = ProcessingRequest {
            metadata_context: subset,
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode,
                response_body_mode,
            }),
            request: Some(Request::RequestHeaders(headers(
                &[&own, with].concat(),
                body.is_empty(),
            ))),
        };
        call.out().send(&first).await.expect("a picker");
        if self.modes[0] == BodyMode::Buffered {
            let Some(Response::RequestHeaders(go_on)) = call.next().await else {
                panic!("the body is waited for");
            };
            assert_eq!(go_on.response.expect("one").header_mutation, None);
            call.tell(Request::RequestBody(piece(body, true))).await;
        } else if !body.is_empty() {
            for part in body.chunks(size) {
                call.tell(Request::RequestBody(piece(part, false))).await;
            }
            // As Envoy does where the client's end comes by itself.
            call.tell(Request::RequestBody(piece(b"", true))).await;
        }
        call
    }

    /// Sends a request, has its worker serve it, and passes the answer through the picker: what the client gets.
    pub async fn serve(
        &self,
        path: &str,
        with: &[(&str, &str)],
        body: &serde_json::Value,
    ) -> (u16, HashMap<String, String>, String) {
        let body = body.to_string();
        let mut call = self.send(("POST", path), with, body.as_bytes(), 1000).await;
        match call.said().await {
            Said::Refused(status, headers, text) => (status, headers, text),
            Said::Go(going) => {
                let (status, kind, answer) = asked(path, &going).await;
                call.pass(status, &kind, &answer).await
            }
        }
    }
}

/// What a worker answers to a request: status, content type and body.
pub async fn asked(path: &str, going: &Going) -> (u16, String, Vec<u8>) {
    let mut request = HttpRequest::post(format!("http://{}{path}", going.destination));
    for (name, value) in &going.set {
        if !name.starts_with(':') && name != "content-length" {
            request = request.header(name, value);
        }
    }
    let request = request.body(Full::from(going.body.clone()));
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let answer = client.request(request.expect("a request")).await;
    let (head, body) = answer.expect("an answer").into_parts();
    let kind = head.headers["content-type"].to_str().expect("text");
    let body = body.collect().await.expect("a whole answer").to_bytes();
    (head.status.as_u16(), kind.to_owned(), body.to_vec())
}

impl Call {
    fn out(&self) -> &Sender {
        self.out.as_ref().expect("it goes on")
    }

    pub async fn tell(&self, part: Request) {
        let message = ProcessingRequest {
            request: Some(part),
            ..ProcessingRequest::default()
        };
        // The picker may have answered and left.
        let _ = self.out().send(&message).await;
    }

    /// Ends its own half, as Envoy does whose client has left.
    pub async fn half_close(&mut self) {
        self.out
            .take()
            .expect("it goes on")
            .end(grpc::Status::OK)
            .await;
    }

    async fn next_message(&mut self) -> Result<Option<ProcessingResponse>, Unread<()>> {
        let next = |cx: &mut std::task::Context<'_>| self.answers.poll_next(cx, |_| Ok(()));
        std::future::poll_fn(next).await
    }

    /// The next answer; none at the end of the stream.
    pub async fn next(&mut self) -> Option<Response> {
        let message = self.next_message().await.expect("a message");
        message.map(|message| message.response.expect("a response"))
    }

    /// What the picker says of the request.
    pub async fn said(&mut self) -> Said {
        let is_whole = self.modes[0] == BodyMode::Buffered;
        let message = self.next_message().await.expect("a message");
        let message = message.expect("an answer");
        let metadata = message.dynamic_metadata;
        let head: CommonAnswer = match message.response {
            Some(Response::RequestHeaders(head)) if !is_whole => head,
            Some(Response::RequestBody(head)) if is_whole => head,
            Some(Response::Immediate(refusal)) => return refused(refusal),
            other => panic!("{other:?}"),
        };
        let head = head.response.expect("one");
        assert!(head.clear_route_cache);
        let mutation = head.header_mutation.expect("where it goes");
        let set = told(Some(&mutation));
        let destination = set["x-gateway-destination-endpoint"].clone();
        let told = Kind::Text(destination.clone());
        let told = Struct::of("x-gateway-destination-endpoint", told);
        let told = Struct::of("envoy.lb", Kind::Struct(told));
        assert_eq!(metadata, Some(told));
        let mut going = Going {
            destination,
            set,
            removed: mutation.remove_headers,
            ..Going::default()
        };
        if is_whole {
            going.body = match head.body_mutation.map(|body| body.mutation) {
                Some(Some(Mutation::Body(body))) => body.to_vec(),
                None => self.sent.clone(),
                other => panic!("{other:?}"),
            };
            return Said::Go(going);
        }
        loop {
            let Some(Response::RequestBody(part)) = self.next().await else {
                panic!("a piece of the body");
            };
            let part = part.response.expect("one").body_mutation.expect("a piece");
            let Some(Mutation::Streamed(part)) = part.mutation else {
                panic!("a piece");
            };
            going.body.extend_from_slice(&part.body);
            going.largest = going.largest.max(part.body.len());
            if part.end_of_stream {
                return Said::Go(going);
            }
        }
    }

    /// Passes an answer's head through the picker: the headers that it sets.
    pub async fn pass_head(&mut self, status: u16, kind: &str) -> HashMap<String, String> {
        let status = status.to_string();
        let head = headers(&[(":status", &status), ("content-type", kind)], false);
        self.tell(Request::ResponseHeaders(head)).await;
        let Some(Response::ResponseHeaders(head)) = self.next().await else {
            panic!("the head");
        };
        told(head.response.expect("one").header_mutation.as_ref())
    }

    /// Passes a piece of an answer through the picker: as the client gets it.
    pub async fn pass_piece(&mut self, body: &[u8], is_last: bool) -> Vec<u8> {
        self.tell(Request::ResponseBody(piece(body, is_last))).await;
        let mut back = Vec::new();
        loop {
            let Some(Response::ResponseBody(answer)) = self.next().await else {
                panic!("a piece");
            };
            let mutation = answer.response.expect("one").body_mutation;
            if self.modes[1] != BodyMode::FullDuplexStreamed {
                assert_eq!(mutation, None);
                return body.to_vec();
            }
            let Some(Mutation::Streamed(part)) = mutation.expect("a piece").mutation else {
                panic!("a piece");
            };
            back.extend_from_slice(&part.body);
            if back.len() >= body.len() {
                assert_eq!(part.end_of_stream, is_last);
                return back;
            }
        }
    }

    /// Passes an answer through the picker.
    pub async fn pass(
        &mut self,
        status: u16,
        kind: &str,
        body: &[u8],
    ) -> (u16, HashMap<String, String>, String) {
        let headers = self.pass_head(status, kind).await;
        let mut got = Vec::new();
        match self.modes[1] {
            BodyMode::None => got = body.to_vec(),
            BodyMode::Buffered => got = self.pass_piece(body, true).await,
            _ => {
                for part in body.chunks(50) {
                    got.extend(self.pass_piece(part, false).await);
                }
                self.pass_piece(b"", true).await;
            }
        }
        (status, headers, String::from_utf8(got).expect("text"))
    }
}

fn refused(refusal: ImmediateResponse) -> Said {
    let status = refusal.status.expect("a status").code;
    let body = String::from_utf8(refusal.body.to_vec()).expect("text");
    Said::Refused(status as u16, told(refusal.headers.as_ref()), body)
}
