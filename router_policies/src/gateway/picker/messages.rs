//! The messages of Envoy's external processing (`envoy.service.ext_proc.v3`), as far as a picker reads and writes
//! them. Fields that are not here are passed over when they are read.

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};
use std::collections::HashMap;

/// The one call of the service.
pub const PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// What a gateway sends.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingRequest {
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// With the first message of a stream.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
    #[prost(oneof = "Request", tags = "2, 3, 4, 5, 6, 7")]
    pub request: Option<Request>,
}

/// The part of a request or of its answer that a message brings.
#[derive(Clone, PartialEq, Oneof)]
pub enum Request {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// How the gateway sends bodies.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ProtocolConfiguration {
    #[prost(enumeration = "BodyMode", tag = "1")]
    pub request_body_mode: i32,
    #[prost(enumeration = "BodyMode", tag = "2")]
    pub response_body_mode: i32,
}

/// How a body is sent, and so how it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum BodyMode {
    /// Not at all.
    None = 0,
    /// In pieces, each of which is answered before the next.
    Streamed = 1,
    /// In one piece.
    Buffered = 2,
    /// Its beginning.
    BufferedPartial = 3,
    /// In pieces, and sent back in others.
    FullDuplexStreamed = 4,
    Grpc = 5,
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpBody {
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpTrailers {}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
    /// In place of `value`.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// What a picker answers.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingResponse {
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
    #[prost(oneof = "Response", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub response: Option<Response>,
}

/// The answer to one part; an immediate one ends the request.
#[derive(Clone, PartialEq, Oneof)]
pub enum Response {
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersResponse),
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersResponse),
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// The answer to headers or to a piece of a body.
#[derive(Clone, PartialEq, Message)]
pub struct CommonAnswer {
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrailersResponse {}

#[derive(Clone, PartialEq, Message)]
pub struct CommonResponse {
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
    #[prost(bool, tag = "5")]
    pub clear_route_cache: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    #[prost(string, repeated, tag = "2")]
    pub remove_headers: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    #[prost(enumeration = "AppendAction", tag = "3")]
    pub append_action: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum AppendAction {
    AppendIfExistsOrAdd = 0,
    AddIfAbsent = 1,
    OverwriteIfExistsOrAdd = 2,
}

#[derive(Clone, PartialEq, Message)]
pub struct BodyMutation {
    #[prost(oneof = "Mutation", tags = "1, 3")]
    pub mutation: Option<Mutation>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Mutation {
    /// All of the body that was sent in one piece.
    #[prost(bytes = "bytes", tag = "1")]
    Body(Bytes),
    /// A piece of one that was sent full-duplex.
    #[prost(message, tag = "3")]
    Streamed(HttpBody),
}

#[derive(Clone, PartialEq, Message)]
pub struct ImmediateResponse {
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// For the gateway's access log.
    #[prost(string, tag = "5")]
    pub details: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// What filters before this one have said of the request.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

/// `google.protobuf.Struct`.
#[derive(Clone, PartialEq, Message)]
pub struct Struct {
    #[prost(map = "string, message", tag = "1")]
    pub fields: HashMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Value {
    #[prost(oneof = "Kind", tags = "3, 5, 6")]
    pub kind: Option<Kind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Kind {
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(message, tag = "5")]
    Struct(Struct),
    #[prost(message, tag = "6")]
    List(ListValue),
}

#[derive(Clone, PartialEq, Message)]
pub struct ListValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self {
            kind: Some(Kind::Text(text)),
        }
    }
}

impl Struct {
    /// Of one field.
    pub fn of(name: &str, kind: Kind) -> Self {
        let value = Value { kind: Some(kind) };
        Self {
            fields: HashMap::from([(name.to_owned(), value)]),
        }
    }
}
