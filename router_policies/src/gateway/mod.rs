//! The HTTP side: accept, parse, decide, dispatch, stream, account, shut down.
//!
//! Owns every socket. Policies and the fleet's counters are reached only through [`Fleet`].

mod admin;
mod admission;
pub mod body;
mod buffers;
mod client;
mod dispatch;
mod encoder;
mod health;
mod kv_events;
mod load;
mod metrics;
mod short_ids;
mod stream;
mod waiting;

use crate::config::{Config, WorkerSpec};
use crate::fleet::Fleet;
use crate::fleet::log::EventSink;
use crate::fleet::residency::settings;
use crate::policy::{Policy, Role};
use admission::Admission;
use body::{Api, Pieces};
use buffers::Buffers;
use bytes::Bytes;
use client::Socket;
use encoder::PromptEncoder;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use metrics::Metrics;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
pub use stream::SseProgress;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// Idle connections to workers are closed before uvicorn's keep-alive of 5 s closes them, so that
/// no request is sent on a connection that the worker is closing.
const IDLE_CONNECTION: Duration = Duration::from_secs(4);
/// What a connection reads at once. Larger reads are no faster, and this stays in the processor's
/// cache until the body is put together.
const READ_BYTES: usize = 128 << 10;
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// What every request handler shares.
pub(crate) struct Gateway {
    pub fleet: Arc<Fleet>,
    pub config: Config,
    pub client: Client<HttpConnector, Pieces>,
    pub metrics: Arc<Metrics>,
    pub admission: Admission,
    pub buffers: Buffers,
    pub encoder: Option<Arc<PromptEncoder>>,
    pub is_loopback: bool,
    /// Something looks again and again at the requests that wait for room.
    pub is_pumping: waiting::IsPumping,
}

/// Bodies that the gateway answers with.
pub(crate) enum Reply {
    Whole(Full<Bytes>),
    Stream(Box<stream::Answer>),
}

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Whole(body) => Pin::new(body)
                .poll_frame(cx)
                .map_err(|error| match error {}),
            Self::Stream(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Stream(_) => false,
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Stream(_) => http_body::SizeHint::default(),
        }
    }
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, value: &impl serde::Serialize) -> Response<Reply> {
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Reply::Whole(Full::from(body)));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// An error in the shape that OpenAI's and SGLang's clients read.
pub(crate) fn error(status: StatusCode, kind: &str, message: &str) -> Response<Reply> {
    let mut response = json(
        status,
        &serde_json::json!({"error": {"message": message, "type": kind, "code": status.as_u16()}}),
    );
    if matches!(
        status,
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
    ) {
        let headers = response.headers_mut();
        headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// The answer to a method that a path does not have.
pub(crate) fn not_allowed(methods: &'static str) -> Response<Reply> {
    let mut response = error(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        &format!("expected {methods}"),
    );
    let methods = HeaderValue::from_static(methods);
    response.headers_mut().insert(ALLOW, methods);
    response
}

impl Gateway {
    fn new(
        config: Config,
        policy: Box<dyn Policy>,
        encoder: Option<Arc<PromptEncoder>>,
        is_loopback: bool,
    ) -> Result<Arc<Self>, String> {
        let metrics = Arc::new(Metrics::new());
        let sink = match &config.decision_log {
            Some(path) => EventSink::to_file(path)?,
            None => EventSink::in_memory(),
        };
        let observer = Arc::clone(&metrics);
        let sink = sink.observing(move |event| observer.saw(event));
        let residency = settings::build(&config.residency)?;
        let fleet = Fleet::new(policy, config.policy.clone(), sink, fastrand::u64(..));
        let fleet = fleet.with_residency(residency);
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs_f64(config.connect_timeout_s)));
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_CONNECTION)
            .pool_timer(TokioTimer::new())
            .build(connector);
        Ok(Arc::new(Self {
            fleet: Arc::new(fleet),
            admission: Admission::new(config.max_inflight, config.max_queued),
            config,
            client,
            metrics,
            buffers: Buffers::default(),
            encoder,
            is_loopback,
            is_pumping: waiting::IsPumping::default(),
        }))
    }

    /// Adds a worker and starts watching its health.
    pub fn add_worker(self: &Arc<Self>, spec: WorkerSpec) -> Result<(), String> {
        let spec = spec.normalise()?;
        self.fleet.add_worker(spec.clone())?;
        if self.config.load_interval_s > 0.0 {
            tokio::spawn(load::watch(Arc::downgrade(self), spec.clone()));
        }
        if let Some(endpoint) = spec.kv_events.clone() {
            tokio::spawn(kv_events::follow(
                Arc::downgrade(&self.fleet),
                spec.clone(),
                endpoint,
            ));
        }
        tokio::spawn(health::watch(Arc::downgrade(self), spec));
        Ok(())
    }

    async fn handle(
        self: Arc<Self>,
        client: Arc<client::Client>,
        request: Request<Incoming>,
    ) -> Response<Reply> {
        let deadline = Instant::now() + Duration::from_secs_f64(self.config.request_timeout_s);
        client.begin(deadline);
        let path = request.uri().path();
        let api = match path {
            "/generate" => Some(Api::Generate),
            "/v1/completions" => Some(Api::Completions),
            "/v1/chat/completions" => Some(Api::Chat),
            _ => None,
        };
        match (request.method(), api) {
            (&Method::POST, Some(api)) => {
                dispatch::handle(&self, client, deadline, api, request).await
            }
            (_, Some(_)) => not_allowed("POST"),
            _ => tokio::time::timeout_at(deadline, admin::handle(&self, request))
                .await
                .unwrap_or_else(|_| {
                    error(
                        StatusCode::REQUEST_TIMEOUT,
                        "timeout",
                        dispatch::TIME_IS_OVER,
                    )
                }),
        }
    }

    /// Sends a request without a body to one worker.
    pub async fn get(
        &self,
        spec: &WorkerSpec,
        path: &str,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), String> {
        self.get_url(&format!("{}{path}", spec.url), timeout).await
    }

    /// Sends a request without a body.
    pub async fn get_url(
        &self,
        url: &str,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), String> {
        let request = Request::get(url)
            .body(Pieces::default())
            .map_err(|error| error.to_string())?;
        let exchange = async {
            let response = self.client.request(request).await.map_err(describe)?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(describe)?;
            Ok((status, body.to_bytes()))
        };
        tokio::time::timeout(timeout, exchange)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {:.0} s", timeout.as_secs_f64())))
    }
}

/// An error with its causes, in one line.
pub(crate) fn describe(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// What is missing where `fleet` could place no request of any kind even with every worker up.
fn missing(config: &Config, fleet: &Fleet) -> Option<String> {
    if fleet.could_place() {
        return None;
    }
    let has = |roles: &[Role]| {
        let workers = &config.workers;
        workers.iter().any(|worker| roles.contains(&worker.role))
    };
    let missing = if config.workers.is_empty() {
        "no worker is configured"
    } else if has(&[Role::Prefill]) && !has(&[Role::Decode, Role::Elastic]) {
        "there is no decode (or elastic) worker"
    } else if has(&[Role::Decode, Role::Elastic]) && !has(&[Role::Prefill]) {
        "there is no prefill worker"
    } else if has(&[Role::Prefill]) {
        "there is no colocated (or elastic) worker, as one that serves a request on one worker needs"
    } else {
        "there are no prefill and decode (or elastic) workers, as one that separates needs"
    };
    let policy = fleet.policy_name();
    Some(format!("policy {policy} can place no request: {missing}"))
}

/// Whether a router of `config` would start and could place a request, without starting it.
///
/// # Errors
/// One line that names the field, or what is missing.
pub fn check(config: Config, policy: Option<Box<dyn Policy>>) -> Result<(), String> {
    let policy = match policy {
        Some(policy) => policy,
        None => crate::policy::build(&config.policy, config.policy_params.clone())?,
    };
    let config = config.normalise()?;
    let fleet = Fleet::new(policy, config.policy.clone(), EventSink::in_memory(), 0);
    let fleet = Arc::new(fleet);
    for spec in &config.workers {
        fleet.add_worker(spec.clone().normalise()?)?;
    }
    missing(&config, &fleet).map_or(Ok(()), Err)
}

/// A bound router, not serving yet.
pub struct Server {
    gateway: Arc<Gateway>,
    listener: TcpListener,
}

impl Server {
    /// Binds the address and registers the workers. Needs a tokio runtime.
    ///
    /// # Errors
    /// One line that names the address, field or file.
    pub async fn bind(config: Config) -> Result<Self, String> {
        let policy = crate::policy::build(&config.policy, config.policy_params.clone())?;
        Self::bind_with(config, policy).await
    }

    /// Like [`Server::bind`], with a policy that is not of this crate's table.
    ///
    /// # Errors
    /// As [`Server::bind`].
    pub async fn bind_with(config: Config, policy: Box<dyn Policy>) -> Result<Self, String> {
        let config = config.normalise()?;
        let encoder = match &config.tokenizer {
            Some(path) => Some(PromptEncoder::load(path, config.threads.div_ceil(2))?),
            None => None,
        };
        let address = format!("{}:{}", config.host, config.port);
        let listener = TcpListener::bind(&address)
            .await
            .map_err(|error| format!("host, port: cannot listen on {address}: {error}"))?;
        let is_loopback = listener
            .local_addr()
            .is_ok_and(|address| address.ip().is_loopback());
        let gateway = Gateway::new(config, policy, encoder, is_loopback)?;
        for spec in gateway.config.workers.clone() {
            gateway.add_worker(spec)?;
        }
        if let Some(missing) = missing(&gateway.config, &gateway.fleet) {
            log::warn!("{missing}; POST /workers adds one");
        }
        Ok(Self { gateway, listener })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket has no address.
    pub fn address(&self) -> std::io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// What the router knows of its workers.
    pub fn fleet(&self) -> Arc<Fleet> {
        Arc::clone(&self.gateway.fleet)
    }

    /// Serves until `stop` resolves, then lets running requests end, at most `drain_timeout_s`.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { gateway, listener } = self;
        let connections = GracefulShutdown::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => accepted,
            };
            let socket = match accepted {
                Ok((socket, _)) => socket,
                Err(error) => {
                    // Out of descriptors, most likely: let some close.
                    log::warn!("accept: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let _ = socket.set_nodelay(true);
            let shared = Arc::clone(&gateway);
            let client = Arc::new(client::Client::default());
            let of_requests = Arc::clone(&client);
            let service = service_fn(move |request| {
                let handled = Arc::clone(&shared).handle(Arc::clone(&of_requests), request);
                async move { Ok::<_, Infallible>(handled.await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(READ_BYTES)
                .serve_connection(Socket::new(socket, Arc::clone(&client)), service);
            let connection = connections.watch(connection);
            tokio::spawn(async move {
                let connection = async {
                    if let Err(error) = connection.await {
                        log::debug!("client connection: {error}");
                    }
                };
                client.drive(connection).await;
            });
        }
        drop(listener);
        let drain = Duration::from_secs_f64(gateway.config.drain_timeout_s.max(0.0));
        if tokio::time::timeout(drain, connections.shutdown())
            .await
            .is_err()
        {
            log::warn!(
                "requests were still running after {:.0} s",
                drain.as_secs_f64()
            );
        }
    }
}
