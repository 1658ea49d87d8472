//! The HTTP side: accept, parse, decide, dispatch, stream, account, shut down.
//!
//! Owns every socket. Policies and the fleet's counters are reached only through [`Fleet`].

mod admin;
mod admission;
mod aliases;
mod apart;
pub mod apis;
mod attempt;
pub mod body;
mod buffers;
mod chat_template;
mod client;
mod content_format;
mod conversation;
mod cursor;
mod departure;
mod dispatch;
mod doctor;
mod dumped_tools;
mod encoder;
mod engine_info;
mod exchange;
mod fault;
mod found;
mod guard;
mod headers;
mod health;
mod keepalive;
mod keys;
mod kubernetes;
mod kv_events;
mod load;
mod metrics;
mod models;
mod mooncake;
mod normalise;
mod passthrough;
pub mod paths;
mod patience;
mod peers;
pub mod picker;
mod pictures;
mod pieces;
mod prompts;
mod reason;
mod record;
mod redact;
mod resolve;
mod reuse;
mod seam;
mod session;
mod sessions;
mod sglang_tools;
mod short_ids;
mod silence;
pub mod splice;
mod sse;
mod stored;
mod stream;
mod tls;
mod too_long;
mod traces;
mod ui;
mod usage;
mod values;
mod vocabulary;
mod waiting;

use crate::config::{Config, Engine, WorkerSpec};
use admission::Admission;
use apis::Api;
use buffers::{Budget, Buffers, NotCollected};
use bytes::Bytes;
use client::Socket;
use decision::fleet::Fleet;
use decision::fleet::admission::settings;
use decision::fleet::log::{Event, EventSink};
use decision::policy::{Policy, Role};
use encoder::PromptEncoder;
use exchange::RequestContext;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{
    ALLOW, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER, TRANSFER_ENCODING,
    WWW_AUTHENTICATE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use keys::{Keys, Wants};
use metrics::Metrics;
use parking_lot::RwLock;
use reason::Reason;
use reuse::{NotingConnector, WorkerClient};
use splice::Pieces;
pub use sse::SseProgress;
use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use traces::Tracer;

/// Idle connections to workers are closed before uvicorn's keep-alive of 5 s closes them, so that
/// no request is sent on a connection that the worker is closing.
const IDLE_CONNECTION: Duration = Duration::from_secs(4);
/// What a connection reads at once. Larger reads are no faster, and this stays in the processor's
/// cache until the body is put together.
const READ_BYTES: usize = 128 << 10;
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a router that ends waits for the last of its traces to be taken.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked, while the router stops, whether the requests have ended whose clients have left.
const DRAIN_LOOK: Duration = Duration::from_millis(50);
/// For so long a router that has just started waits for workers that have not answered yet before it says
/// that it is ready.
const FIRST_CHECKS: Duration = Duration::from_secs(5);
/// For so long it waits for what workers' KV events told before it came: ten thousand batches, as engines keep.
const FIRST_REPLAYS: Duration = Duration::from_secs(15);
/// Events that wait for the decision log's disk, at most: some ten MB, and minutes of a busy router.
const MAX_UNWRITTEN_EVENTS: usize = 1 << 16;
/// What a worker may say of itself, at most: metrics of large engines are some hundred kB.
const MAX_REPORT_BYTES: usize = 16 << 20;

/// What every request handler shares.
pub(crate) struct Gateway {
    pub fleet: Arc<Fleet>,
    pub config: Config,
    pub client: WorkerClient,
    pub ranks: mooncake::Ranks,
    pub models: models::Models,
    pub aliases: aliases::Aliases,
    pub metrics: Arc<Metrics>,
    pub admission: Admission,
    pub buffers: Buffers,
    /// Given, or of the folder that all workers name.
    pub encoder: RwLock<Option<Arc<PromptEncoder>>>,
    pub found: found::Found,
    pub vocabulary: vocabulary::Vocabulary,
    pub keys: Keys,
    pub cache_keys: session::CacheKeys,
    pub doctor: Arc<doctor::Doctor>,
    pub pictures: Arc<pictures::Pictures>,
    /// Where what goes by is recorded.
    pub recorder: Option<Arc<record::Recorder>>,
    /// Which worker has which response.
    pub stored: Arc<stored::Stored>,
    pub asked: passthrough::Asked,
    /// None where nobody wants traces.
    pub tracer: Option<Tracer>,
    /// Counts up while any worker is down or suspected to hang, to wake the requests that wait.
    pub alarms: tokio::sync::watch::Sender<u64>,
    pub is_loopback: bool,
    /// True once a router that stops waits no longer for what runs.
    pub is_cutting_off: tokio::sync::watch::Sender<bool>,
    /// Something looks again and again at the requests that wait for room.
    pub is_pumping: waiting::IsPumping,
    began: Instant,
    /// Held by all that watch a worker which they have not asked yet.
    unasked: Arc<()>,
    /// Held by all that read what a worker's KV events told before this router came.
    unread: Arc<()>,
}

/// Bodies that the gateway answers with.
pub(crate) enum Reply {
    Whole(Full<Bytes>),
    Stream(Box<stream::Answer>),
    /// One that has begun before its answer.
    Waiting(Box<patience::Waiting>),
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
            Self::Waiting(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Stream(_) | Self::Waiting(_) => false,
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Stream(_) | Self::Waiting(_) => http_body::SizeHint::default(),
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
    with_body(status, &apis::openai_error(kind, status.as_u16(), message))
}

/// An error in the shape that clients of `api` read.
pub(crate) fn error_of(api: Api, status: StatusCode, kind: &str, message: &str) -> Response<Reply> {
    with_body(status, &(api.shape().error)(kind, status.as_u16(), message))
}

fn with_body(status: StatusCode, body: &serde_json::Value) -> Response<Reply> {
    let mut response = json(status, body);
    if matches!(
        status,
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
    ) {
        let headers = response.headers_mut();
        headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    if status == StatusCode::UNAUTHORIZED {
        let headers = response.headers_mut();
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
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
        let metrics = Arc::new(Metrics::new(&config.policy));
        let sink = match &config.decision_log {
            Some(path) => {
                let metrics = Arc::clone(&metrics);
                let kept_bytes = config.decision_log_max_bytes();
                EventSink::to_bounded_file(path, kept_bytes, move |events| metrics.lost(events))?
                    .holding_at_most(MAX_UNWRITTEN_EVENTS)
            }
            None => EventSink::in_memory(),
        };
        let observer = Arc::clone(&metrics);
        let doctor = Arc::<doctor::Doctor>::default();
        let examiner = Arc::clone(&doctor);
        let pictures = Arc::<pictures::Pictures>::default();
        let counter = Arc::clone(&pictures);
        let kept_bytes = (config.record_max_mb * 1e6) as u64;
        let recorder = config.record.as_deref();
        let recorder = recorder.map(|path| record::Recorder::start(path, kept_bytes));
        let recorder = recorder.transpose()?;
        let records = recorder.clone();
        let sink = sink.observing(move |event| {
            observer.saw(event);
            let Event::Finish(finish) = event else {
                return;
            };
            if let Some((why, tokens)) = examiner.ended(finish) {
                observer.broken_prefix(&finish.worker.id, why.word(), tokens);
            }
            counter.ended(finish);
            if let Some(recorder) = &records {
                recorder.ended(finish);
            }
        });
        let rule = settings::build(&config.admission)?;
        let fleet = Fleet::new(policy, config.policy.clone(), sink, fastrand::u64(..));
        // Until one is known to be gone: a router that has just started takes no more than its part.
        fleet.count_peers(config.peers.len() as i64);
        let fleet = fleet
            .with_admission(rule)
            .with_tenants(config.tenant_list())
            .with_secret(RandomState::new().hash_one(0));
        let client = client_of(&config)?;
        let of_spans = Arc::clone(&metrics);
        let tracer = Tracer::start(&config, &client, move |spans| of_spans.lost_spans(spans))?;
        let aliases = aliases::Aliases::new(&config.models);
        Ok(Arc::new(Self {
            fleet: Arc::new(fleet),
            admission: Admission::new(config.max_inflight, config.max_queued),
            buffers: Buffers::new(
                config.max_held_bytes,
                Duration::from_secs_f64(config.body_timeout_s),
            ),
            vocabulary: vocabulary::Vocabulary::new(config.vocab_size),
            keys: Keys::load(&config)?,
            cache_keys: session::CacheKeys::default(),
            doctor,
            pictures,
            recorder,
            stored: Arc::default(),
            asked: passthrough::Asked::default(),
            tracer,
            alarms: tokio::sync::watch::Sender::new(0),
            is_cutting_off: tokio::sync::watch::Sender::new(false),
            config,
            client,
            ranks: mooncake::Ranks::default(),
            models: models::Models::default(),
            aliases,
            metrics,
            encoder: RwLock::new(encoder),
            found: found::Found::default(),
            is_loopback,
            is_pumping: waiting::IsPumping::default(),
            began: Instant::now(),
            unasked: Arc::default(),
            unread: Arc::default(),
        }))
    }

    /// Whether clients may come: the policy could place a request, and, when the router has just started,
    /// every worker has been asked once, and what its KV events told before has been read. Before the
    /// first, the first worker to answer would get requests for models that only another serves, and all
    /// sessions would begin on it; before the second, it would be believed to hold what it evicted since.
    pub fn is_ready(&self) -> bool {
        let is_over = |held: &Arc<()>, within: Duration| {
            Arc::strong_count(held) == 1 || self.began.elapsed() >= within
        };
        is_over(&self.unasked, FIRST_CHECKS)
            && is_over(&self.unread, FIRST_REPLAYS)
            && self.fleet.is_ready()
    }

    /// Waits until the router waits no longer for what runs.
    pub fn cut_off(&self) -> impl Future<Output = ()> + use<> {
        let mut is_cutting_off = self.is_cutting_off.subscribe();
        async move {
            if is_cutting_off.wait_for(|is| *is).await.is_err() {
                // It ends in another way.
                std::future::pending().await
            }
        }
    }

    /// What of a client's headers a worker gets.
    fn forwarded(&self, mut headers: HeaderMap, request_id: &str) -> HeaderMap {
        if self.keys.are_needed() {
            keys::remove(&mut headers);
        }
        headers::forwarded(headers, request_id, self.config.strip_transfer_keys)
    }

    /// The fields of a body that override what a client says of the moving of KV.
    fn overrides(&self, scanned: &body::Scanned, engine: Engine) -> Vec<String> {
        match self.config.strip_transfer_keys {
            true => scanned.overrides(engine),
            false => Vec::new(),
        }
    }

    /// A request's whole body: see [`Gateway::collect_of`].
    async fn collect(
        &self,
        client: &client::Client,
        headers: &HeaderMap,
        owner: Option<u64>,
        mut body: Incoming,
        deadline: Instant,
        on_more: impl FnMut(&[u8], usize),
    ) -> Result<(Bytes, Budget), NotCollected> {
        let collected = self.collect_of(owner, &mut body, deadline, on_more).await;
        match collected {
            Ok(_) => client.has_sent_body(),
            Err(NotCollected::TooLarge | NotCollected::NoRoom | NotCollected::NoShare) => {
                Box::pin(client.pass_over(headers, body)).await;
            }
            // It has been waited for.
            Err(_) => {}
        }
        collected
    }

    /// A whole body: see [`Buffers::collect`]. What is still coming at `deadline`, or when the router waits no
    /// longer, is given up, so that its client is told.
    async fn collect_of<B>(
        &self,
        owner: Option<u64>,
        body: &mut B,
        deadline: Instant,
        on_more: impl FnMut(&[u8], usize),
    ) -> Result<(Bytes, Budget), NotCollected>
    where
        B: http_body::Body<Data = Bytes, Error: std::error::Error> + Unpin,
    {
        let limit = self.config.max_body_bytes;
        let collected = self.buffers.collect(owner, body, limit, on_more);
        // Asked for only where the body does not come at once, as most do.
        let is_cut_off = async { self.cut_off().await };
        tokio::select! {
            biased;
            collected = tokio::time::timeout_at(deadline, collected) => {
                collected.unwrap_or(Err(NotCollected::TimeIsOver))
            }
            () = is_cut_off => Err(NotCollected::ShuttingDown),
        }
    }

    /// Adds a worker and starts watching its health.
    pub fn add_worker(self: &Arc<Self>, spec: WorkerSpec) -> Result<(), String> {
        let spec = spec.normalise()?;
        let spec = self.fleet.add_worker(spec)?;
        if self.config.load_interval_s > 0.0 {
            tokio::spawn(load::watch(Arc::downgrade(self), Arc::clone(&spec)));
        }
        let unasked = Arc::clone(&self.unasked);
        tokio::spawn(health::watch(Arc::downgrade(self), spec, unasked));
        Ok(())
    }

    async fn handle(
        self: Arc<Self>,
        client: Arc<client::Client>,
        request: Request<Incoming>,
    ) -> Response<Reply> {
        let now = Instant::now();
        let deadline = now + Duration::from_secs_f64(self.config.request_timeout_s);
        client.begin(now, deadline);
        let path = request.uri().path();
        let path = match path.trim_end_matches('/') {
            "" => path,
            trimmed => trimmed,
        };
        if request.headers().contains_key(&headers::FROM_ROUTER) {
            let message = "a router is no worker: this request came from one";
            let refusal = error(StatusCode::LOOP_DETECTED, "loop_detected", message);
            return unread(&client, request, refusal).await;
        }
        let api = Api::at(path);
        let reaches_model = api.is_some() || passthrough::is_passed_on(path);
        let codings = request.headers().get_all(TRANSFER_ENCODING).iter();
        let is_plain = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"chunked");
        if reaches_model && !codings.into_iter().all(is_plain) {
            // Its bytes would be taken for what they are the coding of.
            let message = "transfer-encoding: expected none, or chunked alone";
            let refusal = error(
                StatusCode::NOT_IMPLEMENTED,
                "invalid_request_error",
                message,
            );
            self.metrics.refused(StatusCode::NOT_IMPLEMENTED);
            return unread(&client, request, refusal).await;
        }
        if !http_body::Body::is_end_stream(request.body()) {
            client.sends_body();
        }
        if reaches_model
            && let Some((status, kind, message)) =
                self.keys.refusal(request.headers(), Wants::Model)
        {
            self.metrics.refused(status);
            let refusal = match api {
                Some(api) => error_of(api, status, kind, message),
                None => passthrough::refusal(path, status, kind, message),
            };
            return unread(&client, request, refusal).await;
        }
        match (request.method(), api) {
            (&Method::POST, Some(api)) => {
                let context = RequestContext::new(Arc::clone(&client), api, deadline);
                let serving = Box::pin(dispatch::handle(self, context, request));
                patience::answer(&client, serving).await
            }
            // Boxed, so that the requests above do not carry the room for these.
            (&Method::POST, None) if passthrough::is_passed_on(path) => {
                Box::pin(passthrough::handle(&self, &client, deadline, request)).await
            }
            _ if reaches_model => unread(&client, request, not_allowed("POST")).await,
            _ => {
                let answer = Box::pin(admin::handle(&self, &client, request));
                // Asked for only where the answer does not come at once, as most do.
                let is_cut_off = async { self.cut_off().await };
                let (status, kind, message) = tokio::select! {
                    biased;
                    answer = tokio::time::timeout_at(deadline, answer) => match answer {
                        Ok(answer) => return answer,
                        Err(_) => (StatusCode::REQUEST_TIMEOUT, "timeout", fault::TIME_IS_OVER),
                    },
                    () = is_cut_off => (
                        StatusCode::SERVICE_UNAVAILABLE,
                        "shutting_down",
                        fault::SHUTTING_DOWN,
                    ),
                };
                error(status, kind, message)
            }
        }
    }

    /// Whether an answer of this status says that the worker does not take the key that the router sent it. Of a
    /// client's own key, which reaches workers that have none of theirs, it says so to the client.
    pub fn is_refused_by(&self, spec: &WorkerSpec, status: StatusCode) -> bool {
        let is_ours = spec.api_key.is_some() || self.keys.are_needed();
        is_ours && status == StatusCode::UNAUTHORIZED
    }

    /// Sends a request without a body to one worker.
    pub async fn get(
        &self,
        spec: &WorkerSpec,
        path: &str,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), String> {
        let mut headers = HeaderMap::new();
        authorise(&mut headers, spec);
        let url = format!("{}{path}", spec.url);
        self.get_with(&url, headers, timeout).await
    }

    /// Sends a request without a body.
    pub async fn get_url(
        &self,
        url: &str,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), String> {
        self.get_with(url, HeaderMap::new(), timeout).await
    }

    async fn get_with(
        &self,
        url: &str,
        headers: HeaderMap,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), String> {
        let answer = ask(&self.client, url, headers, timeout).await;
        answer.map_err(|reason| reason.words)
    }
}

/// Sends a request without a body, as a router does.
async fn ask(
    client: &WorkerClient,
    url: &str,
    mut headers: HeaderMap,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), Reason> {
    let other = |words: String| Reason {
        words,
        is_refused: false,
    };
    let request = Request::get(url).body(Pieces::default());
    let mut request = request.map_err(|error| other(error.to_string()))?;
    headers.insert(headers::FROM_ROUTER.clone(), HeaderValue::from_static("1"));
    *request.headers_mut() = headers;
    let exchange = async {
        let again = request.clone();
        let sent = reuse::send(client, request, || Some(again)).await;
        let response = sent.map_err(Reason::of)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_REPORT_BYTES);
        let body = body
            .collect()
            .await
            .map_err(|error| other(error.to_string()))?;
        Ok((status, body.to_bytes()))
    };
    let late = || other(format!("no answer within {:.0} s", timeout.as_secs_f64()));
    tokio::time::timeout(timeout, exchange)
        .await
        .unwrap_or_else(|_| Err(late()))
}

/// What a worker's health check that answers so says of it.
fn unhealthy(status: StatusCode) -> String {
    match status {
        StatusCode::LOOP_DETECTED => "HTTP 508: it is a router, and no worker".to_owned(),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            format!(
                "HTTP {}: it does not take the router's key (its api_key)",
                status.as_u16()
            )
        }
        _ => format!("HTTP {}", status.as_u16()),
    }
}

/// What sends requests to workers.
fn client_of(config: &Config) -> Result<WorkerClient, String> {
    let mut connector = resolve::connector();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(Duration::from_secs_f64(config.connect_timeout_s)));
    keepalive::probe_workers(&mut connector);
    let connector = tls::connector(connector, config.worker_ca_file.as_deref())?;
    Ok(Client::builder(TokioExecutor::new())
        .pool_idle_timeout(IDLE_CONNECTION)
        .pool_timer(TokioTimer::new())
        .build(NotingConnector(connector)))
}

/// Puts the worker's own key into the headers of a request to it.
pub(crate) fn authorise(headers: &mut HeaderMap, spec: &WorkerSpec) {
    if let Some(key) = &spec.api_key
        && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {}", key.as_str()))
    {
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
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
    // Pods come and go.
    if fleet.could_place() || config.kubernetes.is_some() {
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

/// A worker that does not answer its health check well.
pub struct Unreached {
    /// One line that names the worker and the cause.
    pub words: String,
    /// Nothing listens there: it may not have started yet.
    pub may_start: bool,
}

/// How long [`check`] waits for a worker: SGLang's health check takes a second and more.
const CHECK_PATIENCE: Duration = Duration::from_secs(10);

/// Whether a router of `config` would start and could place a request, without starting it; returns the workers
/// that do not answer.
///
/// # Errors
/// One line that names the field, or what is missing.
pub fn check(config: Config, policy: Option<Box<dyn Policy>>) -> Result<Vec<Unreached>, String> {
    let policy = match policy {
        Some(policy) => policy,
        None => decision::policy::build(&config.policy, config.policy_params.clone())?,
    };
    let mut config = config.normalise()?;
    if let (Some(certificates), Some(key)) = (&config.tls_cert_file, &config.tls_key_file) {
        tls::acceptor(certificates, key, "http/1.1")?;
    }
    let client = client_of(&config)?;
    Keys::load(&config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let mut wrong = Vec::new();
    if let Some(kubernetes) = &config.kubernetes {
        let (workers, of_pods) = runtime.block_on(kubernetes::workers_now(kubernetes))?;
        config.workers.extend(workers);
        wrong = of_pods;
    }
    let fleet = Fleet::new(policy, config.policy.clone(), EventSink::in_memory(), 0);
    let fleet = Arc::new(fleet);
    for spec in &config.workers {
        fleet.add_worker(spec.clone().normalise()?)?;
    }
    if let Some(missing) = missing(&config, &fleet) {
        return Err(missing);
    }
    let wrong = wrong.into_iter().map(|words| Unreached {
        words,
        may_start: false,
    });
    Ok(runtime.block_on(async {
        let mut asked = tokio::task::JoinSet::new();
        for (at, spec) in config.workers.into_iter().enumerate() {
            let client = client.clone();
            asked.spawn(async move { (at, unreached(&client, &spec).await) });
        }
        let mut found = asked.join_all().await;
        found.sort_by_key(|(at, _)| *at);
        let unreached = found.into_iter().filter_map(|(_, unreached)| unreached);
        wrong.chain(unreached).collect()
    }))
}

async fn unreached(client: &WorkerClient, spec: &WorkerSpec) -> Option<Unreached> {
    let mut headers = HeaderMap::new();
    authorise(&mut headers, spec);
    let url = format!("{}/health", spec.url);
    let (why, may_start) = match ask(client, &url, headers, CHECK_PATIENCE).await {
        Ok((status, _)) if status.is_success() => return None,
        Ok((status, _)) => (unhealthy(status), false),
        Err(reason) => (reason.words, reason.is_refused),
    };
    Some(Unreached {
        words: format!(
            "worker {}: {} does not answer /health: {why}",
            spec.id, spec.url
        ),
        may_start,
    })
}

/// A bound router, not serving yet.
pub struct Server {
    gateway: Arc<Gateway>,
    listener: TcpListener,
    /// Where gateways ask.
    picker: Option<TcpListener>,
    /// Where clients and gateways speak TLS.
    tls: Option<[TlsAcceptor; 2]>,
}

/// What a connection is for, by its place in [`Server::tls`].
const TO_FRONT: usize = 0;
const TO_PICKER: usize = 1;

impl Server {
    /// Binds the address and registers the workers. Needs a tokio runtime.
    ///
    /// # Errors
    /// One line that names the address, field or file.
    pub async fn bind(config: Config) -> Result<Self, String> {
        let policy = decision::policy::build(&config.policy, config.policy_params.clone())?;
        Self::bind_with(config, policy).await
    }

    /// Like [`Server::bind`], with a policy that is not of this crate's table.
    ///
    /// # Errors
    /// As [`Server::bind`].
    pub async fn bind_with(config: Config, policy: Box<dyn Policy>) -> Result<Self, String> {
        let config = config.normalise()?;
        let encoder = match &config.tokenizer {
            Some(path) => {
                let engine = config
                    .workers
                    .first()
                    .map_or(Engine::Sglang, |first| first.engine);
                Some(PromptEncoder::load(
                    path,
                    config.threads.div_ceil(2),
                    engine,
                )?)
            }
            None => None,
        };
        let tls = match (&config.tls_cert_file, &config.tls_key_file) {
            (Some(certificates), Some(key)) => Some([
                tls::acceptor(certificates, key, "http/1.1")?,
                tls::acceptor(certificates, key, "h2")?,
            ]),
            _ => None,
        };
        let pods = match &config.kubernetes {
            Some(kubernetes) => Some(kubernetes::pods_of(kubernetes).await?),
            None => None,
        };
        let listener = listen("", &config.host, config.port).await?;
        let picker = match &config.picker {
            Some(picker) => Some(listen("picker.", &picker.host, picker.port).await?),
            None => None,
        };
        let is_loopback = listener
            .local_addr()
            .is_ok_and(|address| address.ip().is_loopback());
        let gateway = Gateway::new(config, policy, encoder, is_loopback)?;
        tokio::spawn(silence::watch(Arc::downgrade(&gateway)));
        tokio::spawn(found::announce(Arc::downgrade(&gateway)));
        if gateway.config.api_keys_file.is_some() {
            tokio::spawn(keys::watch(Arc::downgrade(&gateway)));
        }
        for peer in &gateway.config.peers {
            tokio::spawn(peers::watch(Arc::downgrade(&gateway), peer.clone()));
        }
        for spec in gateway.config.workers.clone() {
            gateway.add_worker(spec)?;
        }
        if let Some(pods) = pods {
            let unasked = Arc::clone(&gateway.unasked);
            tokio::spawn(kubernetes::watch(Arc::downgrade(&gateway), pods, unasked));
        }
        if let Some(missing) = missing(&gateway.config, &gateway.fleet) {
            log::warn!("{missing}; POST /workers adds one");
        }
        Ok(Self {
            gateway,
            listener,
            picker,
            tls,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket has no address.
    pub fn address(&self) -> std::io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// Where gateways ask, if they may.
    pub fn picker_address(&self) -> Option<std::net::SocketAddr> {
        self.picker.as_ref()?.local_addr().ok()
    }

    /// What the router knows of its workers.
    pub fn fleet(&self) -> Arc<Fleet> {
        Arc::clone(&self.gateway.fleet)
    }

    /// What opens the log files again under their names, after they were moved away, and reads the file of keys
    /// again.
    pub fn reopen_logs(&self) -> impl Fn() + Send + use<> {
        let gateway = Arc::clone(&self.gateway);
        move || {
            gateway.fleet.sink().reopen();
            gateway.keys.reload();
        }
    }

    /// Serves until `stop` resolves, then lets running requests end, at most `drain_timeout_s`; what runs
    /// longer is told so. Those that no worker has yet are told at once to come again.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self {
            gateway,
            listener,
            picker,
            tls,
        } = self;
        let connections = GracefulShutdown::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let of_picker = async {
                match &picker {
                    Some(picker) => picker.accept().await,
                    None => std::future::pending().await,
                }
            };
            let (accepted, to) = tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => (accepted, TO_FRONT),
                accepted = of_picker => (accepted, TO_PICKER),
            };
            let (socket, address) = match accepted {
                Ok((socket, address)) => (socket, address.ip()),
                Err(error) => {
                    // Out of descriptors, most likely: let some close.
                    log::warn!("accept: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let _ = socket.set_nodelay(true);
            let gateway = Arc::clone(&gateway);
            let watcher = connections.watcher();
            let tls = tls.as_ref().map(|tls| tls[to].clone());
            tokio::spawn(async move {
                let Some(tls) = tls else {
                    return match to {
                        TO_PICKER => picker::serve_connection(gateway, socket, watcher).await,
                        _ => serve_connection(gateway, socket, address, watcher).await,
                    };
                };
                match tokio::time::timeout(HEADER_TIMEOUT, tls.accept(socket)).await {
                    Ok(Ok(socket)) if to == TO_PICKER => {
                        picker::serve_connection(gateway, socket, watcher).await;
                    }
                    Ok(Ok(socket)) => serve_connection(gateway, socket, address, watcher).await,
                    Ok(Err(error)) => log::debug!("client connection: {error}"),
                    Err(_) => log::debug!("client connection: no TLS handshake"),
                }
            });
        }
        drop((listener, picker));
        gateway.admission.close();
        let drain = Duration::from_secs_f64(gateway.config.drain_timeout_s.max(0.0));
        let ended = async {
            connections.shutdown().await;
            // Requests whose clients have left: see `departure`.
            while gateway.fleet.has_kept_queues() && !gateway.fleet.is_idle() {
                tokio::time::sleep(DRAIN_LOOK).await;
            }
        };
        let mut ended = std::pin::pin!(ended);
        if tokio::time::timeout(drain, &mut ended).await.is_err() {
            log::warn!(
                "requests were still running after {:.0} s",
                drain.as_secs_f64()
            );
            gateway.is_cutting_off.send_replace(true);
            let _ = tokio::time::timeout(client::LAST_WORDS, ended).await;
        }
        if let Some(recorder) = &gateway.recorder {
            recorder.write();
        }
        if let Some(tracer) = &gateway.tracer {
            // A collector that is gone must not keep the router.
            let _ = tokio::time::timeout(FLUSH_PATIENCE, tracer.flush()).await;
        }
    }
}

/// Listens where the configuration says, in the keys that begin with `section`.
async fn listen(section: &str, host: &str, port: u16) -> Result<TcpListener, String> {
    let address = format!("{host}:{port}");
    let listener = TcpListener::bind(&address).await.map_err(|error| {
        format!("{section}host, {section}port: cannot listen on {address}: {error}")
    })?;
    keepalive::probe_clients(&listener);
    Ok(listener)
}

/// The answer to a request of which only the headers were read.
async fn unread(
    client: &client::Client,
    request: Request<Incoming>,
    answer: Response<Reply>,
) -> Response<Reply> {
    let (head, body) = request.into_parts();
    // Boxed, so that requests that are served do not carry the room for it.
    Box::pin(client.pass_over(&head.headers, body)).await;
    answer
}

/// Serves the requests of one connection.
async fn serve_connection<S>(gateway: Arc<Gateway>, socket: S, address: IpAddr, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let client = Arc::new(client::Client::at(address));
    let cutting_off = gateway.is_cutting_off.subscribe();
    let of_requests = Arc::clone(&client);
    let service = service_fn(move |request| {
        let handled = Arc::clone(&gateway).handle(Arc::clone(&of_requests), request);
        async move { Ok::<_, Infallible>(handled.await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(READ_BYTES)
        .serve_connection(Socket::new(socket, Arc::clone(&client)), service);
    let connection = watcher.watch(connection);
    let connection = async {
        if let Err(error) = connection.await {
            log::debug!("client connection: {error}");
        }
    };
    client.drive(connection, cutting_off).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn every_router_knows_sessions_by_numbers_of_its_own() {
        for admission in [json!({}), json!({"rule": "off"})] {
            let mut known = Vec::new();
            for _ in 0..2 {
                let server = Server::bind(Config {
                    port: 0,
                    policy: "round_robin".to_owned(),
                    admission: admission.clone(),
                    ..Config::default()
                });
                let server = server.await.expect("binds");
                known.push(server.fleet().session_key("s1"));
            }
            // Numbers that everybody can reckon are those of a fleet without a secret.
            let policy = decision::policy::build("round_robin", json!({})).expect("a policy");
            let name = "round_robin".to_owned();
            let open = Fleet::new(policy, name, EventSink::in_memory(), 0).session_key("s1");
            assert!(!known.contains(&open), "{admission}");
            assert_ne!(known[0], known[1], "{admission}");
        }
    }
}
