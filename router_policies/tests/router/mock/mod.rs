//! A worker that speaks enough of SGLang's and vLLM's HTTP for tests and benchmarks, and that can
//! be told to misbehave.

#![allow(dead_code, reason = "each test and benchmark uses its own part")]

pub mod envoy;
pub mod kubernetes;
pub mod logged;
pub mod router;

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Answers with this status.
    Status(u16),
    /// Answers in one piece, with this status and body.
    Says(u16, &'static str),
    /// Closes the connection instead of answering.
    CloseAtOnce,
    /// Closes the connection after this many events.
    CloseAfter(usize),
    /// Ends the stream properly, but without `[DONE]`, after this many events.
    TruncateAfter(usize),
    /// Never answers.
    Stall,
    /// Stops for good after this many events.
    StallAfter(usize),
    /// The first event is SGLang's abort, with this status.
    Abort(u16),
    /// As `Refuse(500)` where the request's `user` is "poison".
    Poison,
    /// Closes the connection instead of answering where the request's `user` is "poison".
    PoisonBreaks,
    /// As vLLM's decode worker where the KV does not arrive: an error to what was prefilled elsewhere, in
    /// a chat's stream behind the event that opens it.
    LostTransfer,
    /// Sends a stream of these pieces, as they are cut here, and then ends it as told.
    Raw(&'static [&'static str], End),
    /// Answers 101, to a client that asked for no other protocol.
    Switch,
    /// Answers as SGLang does that has no tokenizer: this status, or inside a stream as its code.
    Refuse(u16),
}

/// The scheduler's own time in load reports of SGLang, or the KV in use in those of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    None,
    GoesOn,
    StandsStill,
}

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Properly,
    /// The connection breaks.
    Broken,
}

/// How the worker behaves; can be changed while it runs.
pub struct Behaviour {
    pub fault: Mutex<Fault>,
    pub healthy: AtomicBool,
    pub tokens: AtomicUsize,
    pub first_token_us: AtomicU64,
    pub token_us: AtomicU64,
    /// Spaces at the end of an answer that is no stream.
    pub padding_bytes: AtomicUsize,
    pub bodies: Mutex<Vec<Vec<u8>>>,
    /// Of every generation request.
    pub headers: Mutex<Vec<hyper::HeaderMap>>,
    /// And its path with its query.
    pub targets: Mutex<Vec<String>>,
    pub keep_bodies: AtomicBool,
    /// Accepts connections and requests, and answers none of them.
    pub hangs: AtomicBool,
    /// The paths of those requests.
    pub unanswered: Mutex<Vec<String>>,
    /// Reports its load as SGLang does.
    pub reports_load: AtomicBool,
    /// What its load reports say of the scheduler's own time.
    pub clock: Mutex<Clock>,
    /// Load reports are not answered while requests run.
    pub loads_block: AtomicBool,
    pub health_hangs: AtomicBool,
    /// Reports its load as vLLM does, with counters that stand still.
    pub reports_metrics: AtomicBool,
    /// What `/server_info` says of the engine's start; 0 says nothing.
    pub started: AtomicU64,
    /// Which `/v1/models` lists.
    pub models: Mutex<Vec<&'static str>>,
    /// How many tokens it takes of each; 0 says nothing.
    pub max_model_len: AtomicU64,
    /// Which release of SGLang `/server_info` names.
    pub version: Mutex<&'static str>,
    /// The folder that `/model_info` names.
    pub model_path: Mutex<String>,
    /// Says that it is vLLM, and not SGLang.
    pub is_vllm: AtomicBool,
    /// Of the first of them, which it lists too.
    pub adapters: Mutex<Vec<&'static str>>,
    /// Responses that it keeps, by their ids.
    pub responses: Mutex<Vec<&'static str>>,
    /// Data-parallel ranks that the bootstrap server names, and how often it was asked.
    pub dp_ranks: AtomicUsize,
    pub queries: AtomicUsize,
    /// What answers in one piece say of the prompt's tokens.
    pub prompt_tokens: AtomicU64,
    /// What answers say of cached tokens.
    pub cached_tokens: AtomicU64,
    /// Requests being answered now.
    pub running: AtomicUsize,
    pub served: AtomicUsize,
    /// Requests answered with [`Fault::Refuse`].
    pub refused: AtomicUsize,
    /// Requests whose connection went away before the answer's end.
    pub aborted: AtomicUsize,
}

/// A port that stays its worker's while that is dead: bound, without anything that listens. No other test gets it,
/// neither to listen on nor as the near end of a connection.
pub struct Port(TcpSocket);

impl Port {
    fn free() -> Self {
        let port = Self::socket();
        port.0
            .bind(([127, 0, 0, 1], 0).into())
            .expect("a free port");
        port
    }

    fn socket() -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        // The kernel lets another bind to it that says the same, as long as one of them listens at most.
        socket.set_reuseaddr(true).expect("an option");
        Self(socket)
    }

    async fn listen(&self) -> TcpListener {
        let address = self.0.local_addr().expect("bound");
        loop {
            let again = Self::socket();
            if again.0.bind(address).is_ok()
                && let Ok(listener) = again.0.listen(1024)
            {
                return listener;
            }
            // The task of the one before may not have ended yet.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

pub struct MockWorker {
    pub url: String,
    port: Arc<Port>,
    pub behaviour: Arc<Behaviour>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for MockWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl MockWorker {
    pub async fn start() -> Self {
        Self::start_on(Arc::new(Port::free())).await
    }

    /// Dies, with its connections; its port is kept.
    pub fn die(self) -> Arc<Port> {
        Arc::clone(&self.port)
    }

    pub async fn start_on(port: Arc<Port>) -> Self {
        let listener = port.listen().await;
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let behaviour = Arc::new(Behaviour {
            fault: Mutex::new(Fault::None),
            healthy: AtomicBool::new(true),
            tokens: AtomicUsize::new(4),
            first_token_us: AtomicU64::new(0),
            token_us: AtomicU64::new(0),
            padding_bytes: AtomicUsize::new(0),
            bodies: Mutex::new(Vec::new()),
            headers: Mutex::new(Vec::new()),
            targets: Mutex::new(Vec::new()),
            keep_bodies: AtomicBool::new(true),
            hangs: AtomicBool::new(false),
            unanswered: Mutex::new(Vec::new()),
            reports_load: AtomicBool::new(false),
            clock: Mutex::new(Clock::None),
            loads_block: AtomicBool::new(false),
            health_hangs: AtomicBool::new(false),
            reports_metrics: AtomicBool::new(false),
            started: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(100),
            cached_tokens: AtomicU64::new(10),
            models: Mutex::new(vec!["mock", "listed/only"]),
            max_model_len: AtomicU64::new(0),
            version: Mutex::new("0.5.17"),
            model_path: Mutex::new("mock".to_owned()),
            is_vllm: AtomicBool::new(false),
            adapters: Mutex::new(Vec::new()),
            responses: Mutex::new(Vec::new()),
            dp_ranks: AtomicUsize::new(1),
            queries: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            served: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            aborted: AtomicUsize::new(0),
        });
        let shared = Arc::clone(&behaviour);
        let task = tokio::spawn(async move {
            // Aborting this task aborts its connections too: that is a worker's death.
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let Ok((socket, _)) = listener.accept().await else {
                    return;
                };
                while connections.try_join_next().is_some() {}
                let _ = socket.set_nodelay(true);
                let shared = Arc::clone(&shared);
                let service = service_fn(move |request| answer(Arc::clone(&shared), request));
                connections.spawn(async move {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(socket), service)
                        .await;
                });
            }
        });
        Self {
            url,
            port,
            behaviour,
            task,
        }
    }

    pub fn set_fault(&self, fault: Fault) {
        *self.behaviour.fault.lock() = fault;
    }

    pub fn bodies(&self) -> Vec<serde_json::Value> {
        let bodies = self.behaviour.bodies.lock();
        bodies
            .iter()
            .map(|body| serde_json::from_slice(body).expect("bodies are JSON"))
            .collect()
    }
}

struct Running {
    behaviour: Arc<Behaviour>,
    complete: bool,
}

impl Running {
    fn begin(behaviour: &Arc<Behaviour>) -> Self {
        behaviour.running.fetch_add(1, Ordering::SeqCst);
        Self {
            behaviour: Arc::clone(behaviour),
            complete: false,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.behaviour.running.fetch_sub(1, Ordering::SeqCst);
        if !self.complete {
            self.behaviour.aborted.fetch_add(1, Ordering::SeqCst);
        }
    }
}

type Body = http_body_util::Either<http_body_util::Full<Bytes>, StreamBody<Events>>;

/// Events from a task; ends the connection with an error if the task says so.
pub struct Events(mpsc::Receiver<Result<Bytes, Broken>>);

#[derive(Debug)]
pub struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("told to break")
    }
}

impl std::error::Error for Broken {}

impl futures_core::Stream for Events {
    type Item = Result<Frame<Bytes>, Broken>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0
            .poll_recv(cx)
            .map(|item| item.map(|bytes| bytes.map(Frame::data)))
    }
}

fn whole(status: u16, kind: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    Response::builder()
        .status(StatusCode::from_u16(status).expect("a status"))
        .header("content-type", kind)
        .body(Body::Left(http_body_util::Full::new(body.into())))
        .expect("a response")
}

pub fn refusal(status: u16) -> String {
    format!(
        r#"{{"object":"error","message":"The engine initialized with skip_tokenizer_init=True cannot accept text prompts.","type":"BadRequestError","param":null,"code":{status}}}"#
    )
}

pub fn refusal_stream(status: u16) -> String {
    format!(
        "data: {{\"error\":{{\"message\":\"The engine initialized with skip_tokenizer_init=True cannot accept text prompts.\",\"type\":\"invalid_request_error\",\"code\":{status},\"retryable\":false}}}}\n\ndata: [DONE]\n\n"
    )
}

/// As SGLang 0.5.17 ends a streamed request that its scheduler will not run.
pub fn abort(status: u16) -> String {
    format!(
        "data: {{\"text\":\"\",\"meta_info\":{{\"finish_reason\":{{\"type\":\"abort\",\"message\":\"told to abort\",\"status_code\":{status},\"err_type\":null}}}}}}\n\n"
    )
}

async fn pause(us: u64) {
    if us > 0 {
        tokio::time::sleep(Duration::from_micros(us)).await;
    }
}

async fn answer(
    behaviour: Arc<Behaviour>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Broken> {
    let path = request.uri().path().to_owned();
    let request_path = path.clone();
    let load = || behaviour.running.load(Ordering::SeqCst);
    if behaviour.hangs.load(Ordering::SeqCst) {
        let _running = Running::begin(&behaviour);
        behaviour.unanswered.lock().push(path);
        return std::future::pending().await;
    }
    match path.as_str() {
        "/v1/loads" if behaviour.reports_load.load(Ordering::SeqCst) => {
            while behaviour.loads_block.load(Ordering::SeqCst) && load() > 0 {
                pause(10_000).await;
            }
            let now_s = std::time::UNIX_EPOCH
                .elapsed()
                .expect("a clock")
                .as_secs_f64();
            let clock = match *behaviour.clock.lock() {
                Clock::None => String::new(),
                Clock::GoesOn => format!(r#""timestamp":{now_s},"#),
                Clock::StandsStill => r#""timestamp":1000.5,"#.to_owned(),
            };
            let report = format!(
                r#"{{"timestamp":{now_s},"loads":[{{{clock}"num_running_reqs":{},"num_waiting_reqs":0,"num_used_tokens":0,"max_total_num_tokens":1000000}}]}}"#,
                load()
            );
            return Ok(whole(200, "application/json", report));
        }
        "/metrics" if behaviour.reports_metrics.load(Ordering::SeqCst) => {
            let kv_in_use = match *behaviour.clock.lock() {
                Clock::None => String::new(),
                Clock::GoesOn => {
                    format!(
                        "vllm:kv_cache_usage_perc 0.{:06}\n",
                        fastrand::u32(..1_000_000)
                    )
                }
                Clock::StandsStill => "vllm:kv_cache_usage_perc 0.5\n".to_owned(),
            };
            let metrics = format!(
                "vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n\
                 vllm:generation_tokens_total 7.0\nvllm:prompt_tokens_total 9.0\n{kv_in_use}"
            );
            return Ok(whole(200, "text/plain", metrics));
        }
        "/health" | "/health_generate" if behaviour.health_hangs.load(Ordering::SeqCst) => {
            return std::future::pending().await;
        }
        "/health" | "/health_generate" => {
            let status = if behaviour.healthy.load(Ordering::SeqCst) {
                200
            } else {
                503
            };
            return Ok(whole(status, "text/plain", ""));
        }
        "/model_info" | "/get_model_info" => {
            let path = behaviour.model_path.lock().clone();
            let info = serde_json::json!({"model_path": path, "is_generation": true});
            return Ok(whole(200, "application/json", info.to_string()));
        }
        "/server_info" | "/get_server_info" | "/version"
            if behaviour.is_vllm.load(Ordering::SeqCst) =>
        {
            return Ok(match path.as_str() {
                "/version" => whole(200, "application/json", r#"{"version":"0.26.0"}"#),
                _ => whole(404, "text/plain", ""),
            });
        }
        "/metrics" if behaviour.is_vllm.load(Ordering::SeqCst) => {
            let metrics = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\"} 1.0\n";
            return Ok(whole(200, "text/plain", metrics));
        }
        "/server_info" | "/get_server_info" => {
            let startup_time = match behaviour.started.load(Ordering::SeqCst) {
                0 => "null".to_owned(),
                started => format!("{{\"load_weight\":{started}.5}}"),
            };
            let info = format!(
                r#"{{"model_path":{},"served_model_name":"mock","max_total_num_tokens":1000000,"page_size":1,"tp_size":1,"dp_size":1,"version":"{}","api_key":"the-engines-secret","admin_api_key":"the-engines-secret","startup_time":{startup_time},"random_seed":1}}"#,
                serde_json::Value::from(behaviour.model_path.lock().as_str()),
                behaviour.version.lock()
            );
            return Ok(whole(200, "application/json", info));
        }
        "/v1/models" => {
            let models = behaviour.models.lock();
            let adapters = behaviour.adapters.lock();
            let context = match behaviour.max_model_len.load(Ordering::SeqCst) {
                0 => String::new(),
                tokens => format!(r#","max_model_len":{tokens}"#),
            };
            let owner = match behaviour.is_vllm.load(Ordering::SeqCst) {
                true => r#","owned_by":"vllm""#,
                false => "",
            };
            let entries = models
                .iter()
                .map(|id| format!(r#"{{"id":"{id}"{owner}{context}}}"#));
            let of_adapters = adapters
                .iter()
                .map(|id| format!(r#"{{"id":"{id}","parent":"{}"}}"#, models[0]));
            let data = entries.chain(of_adapters).collect::<Vec<_>>().join(",");
            let list = format!(r#"{{"object":"list","data":[{data}]}}"#);
            return Ok(whole(200, "application/json", list));
        }
        "/query" => {
            behaviour.queries.fetch_add(1, Ordering::SeqCst);
            let ranks = 0..behaviour.dp_ranks.load(Ordering::SeqCst);
            let ranks =
                ranks.map(|rank| format!(r#""{rank}":{{"engine_id":"engine-{}"}}"#, 7 + rank));
            let answer = format!("{{{}}}", ranks.collect::<Vec<_>>().join(","));
            return Ok(whole(200, "application/json", answer));
        }
        path if path.starts_with("/v1/responses/") => {
            let rest = &path["/v1/responses/".len()..];
            let id = rest.trim_end_matches("/cancel");
            let found = behaviour.responses.lock().contains(&id);
            let said = format!(r#"{{"id":"{id}","asked":"{} {rest}"}}"#, request.method());
            return Ok(whole(
                if found { 200 } else { 404 },
                "application/json",
                said,
            ));
        }
        "/v1/models/mock" => {
            return Ok(whole(200, "application/json", r#"{"id":"mock"}"#));
        }
        "/generate"
        | "/v1/completions"
        | "/v1/chat/completions"
        | "/v1/messages"
        | "/v1/responses"
        | "/v1/messages/count_tokens"
        | "/v1/embeddings"
        | "/tokenize"
        | "/detokenize" => {}
        _ => return Ok(whole(404, "text/plain", "")),
    }
    let mut running = Running::begin(&behaviour);
    if behaviour.keep_bodies.load(Ordering::Relaxed) {
        behaviour.headers.lock().push(request.headers().clone());
        behaviour.targets.lock().push(request.uri().to_string());
    }
    let body = request
        .into_body()
        .collect()
        .await
        .map_err(|_| Broken)?
        .to_bytes();
    // The last of equal keys counts, as in the engines' parsers; it is near the end, if anywhere, and
    // looking through a large prompt would be the larger part of what benchmarks measure.
    let end = &body[body.len().saturating_sub(4096)..];
    let stream = memchr::memmem::rfind(end, b"\"stream\":")
        .is_some_and(|at| end[at + 9..].trim_ascii_start().starts_with(b"true"));
    if behaviour.keep_bodies.load(Ordering::Relaxed) {
        behaviour.bodies.lock().push(body.to_vec());
    }
    let mut fault = *behaviour.fault.lock();
    if matches!(fault, Fault::Poison | Fault::PoisonBreaks) {
        let is_poison = memchr::memmem::find(end, b"\"poison\"").is_some();
        fault = match (is_poison, fault) {
            (true, Fault::Poison) => Fault::Refuse(500),
            (true, _) => Fault::CloseAtOnce,
            (false, _) => Fault::None,
        };
    }
    if fault == Fault::LostTransfer {
        let was_sent = memchr::memmem::find(end, b"\"do_remote_prefill\":true").is_some();
        fault = match (was_sent, stream) {
            (false, _) => Fault::None,
            (true, false) => Fault::Status(500),
            (true, true) if path == "/v1/chat/completions" => Fault::Raw(
                &[
                    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
                    "data: {\"error\":{\"message\":\"Internal server error\",\"type\":\"InternalServerError\",\"code\":500}}\n\n",
                    "data: [DONE]\n\n",
                ],
                End::Properly,
            ),
            (true, true) => Fault::Raw(
                &[
                    "data: {\"error\":{\"message\":\"Internal server error\",\"type\":\"InternalServerError\",\"code\":500}}\n\n",
                    "data: [DONE]\n\n",
                ],
                End::Properly,
            ),
        };
    }
    // More than the sockets on the way to a client hold.
    let is_flood = memchr::memmem::find(end, b"\"flood\"").is_some();
    let tokens = match behaviour.tokens.load(Ordering::Relaxed) {
        _ if is_flood => 500_000,
        tokens => tokens,
    };
    match fault {
        Fault::Status(status) => {
            running.complete = true;
            return Ok(whole(
                status,
                "application/json",
                r#"{"error":{"message":"told to fail"}}"#,
            ));
        }
        Fault::Says(status, body) => {
            running.complete = true;
            return Ok(whole(status, "application/json", body));
        }
        Fault::Refuse(status) => {
            running.complete = true;
            behaviour.refused.fetch_add(1, Ordering::SeqCst);
            return Ok(if stream {
                whole(
                    200,
                    "text/event-stream; charset=utf-8",
                    refusal_stream(status),
                )
            } else {
                whole(status, "application/json", refusal(status))
            });
        }
        Fault::CloseAtOnce => return Err(Broken),
        Fault::Switch => return Ok(whole(101, "text/plain", "")),
        Fault::Stall => std::future::pending().await,
        _ => {}
    }
    pause(behaviour.first_token_us.load(Ordering::Relaxed)).await;
    let cached_tokens = behaviour.cached_tokens.load(Ordering::Relaxed);
    let event = move |i: usize| match path.as_str() {
        "/v1/messages" => Bytes::from(format!(
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{\"type\":\"text_delta\",\"text\":\"t{i}\"}}}}\n\n"
        )),
        "/v1/responses" => Bytes::from(format!(
            "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"delta\":\"t{i}\"}}\n\n"
        )),
        _ => Bytes::from(format!(
            "data: {{\"text\":\"t{i}\",\"meta_info\":{{\"prompt_tokens\":100,\"cached_tokens\":{cached_tokens},\"completion_tokens\":{i}}}}}\n\n"
        )),
    };
    if !stream {
        if fault != Fault::None {
            return Err(Broken);
        }
        for _ in 1..tokens {
            pause(behaviour.token_us.load(Ordering::Relaxed)).await;
        }
        running.complete = true;
        behaviour.served.fetch_add(1, Ordering::SeqCst);
        if memchr::memmem::find(&body, b"\"do_remote_decode\":true").is_some() {
            let text = r#"{"text":"h","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[4]}}"#;
            return Ok(whole(200, "application/json", text));
        }
        let prompt_tokens = behaviour.prompt_tokens.load(Ordering::Relaxed);
        let text = format!(
            r#"{{"text":"hello","meta_info":{{"prompt_tokens":{prompt_tokens},"cached_tokens":10,"completion_tokens":4}}}}"#
        );
        let padding = behaviour.padding_bytes.load(Ordering::Relaxed);
        let text = [text.as_bytes(), &vec![b' '; padding]].concat();
        return Ok(whole(200, "application/json", text));
    }
    let (sender, receiver) = mpsc::channel(64);
    let done: &'static [u8] = match request_path.as_str() {
        "/v1/messages" => b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        "/v1/responses" => {
            b"event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n"
        }
        _ => b"data: [DONE]\n\n",
    };
    tokio::spawn(async move {
        let mut running = running;
        if let Fault::Raw(pieces, end) = fault {
            for piece in pieces {
                let _ = sender.send(Ok(Bytes::from_static(piece.as_bytes()))).await;
                // So that each piece is a read of its own on the other side.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            if end == End::Broken {
                let _ = sender.send(Err(Broken)).await;
            }
            running.complete = end == End::Properly;
            return;
        }
        if let Fault::Abort(status) = fault {
            for event in [abort(status), "data: [DONE]\n\n".to_owned()] {
                let _ = sender.send(Ok(Bytes::from(event))).await;
            }
            running.complete = true;
            return;
        }
        for i in 1..=tokens {
            match fault {
                Fault::CloseAfter(n) if i > n => {
                    // Let what was sent reach the network first.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    let _ = sender.send(Err(Broken)).await;
                    return;
                }
                Fault::TruncateAfter(n) if i > n => return,
                Fault::StallAfter(n) if i > n => {
                    sender.closed().await;
                    return;
                }
                _ => {}
            }
            if i > 1 {
                pause(running.behaviour.token_us.load(Ordering::Relaxed)).await;
            }
            if sender.send(Ok(event(i))).await.is_err() {
                return;
            }
        }
        if sender.send(Ok(Bytes::from_static(done))).await.is_ok() {
            running.complete = true;
            running.behaviour.served.fetch_add(1, Ordering::SeqCst);
        }
    });
    Ok(Response::builder()
        .header("content-type", "text/event-stream")
        .body(Body::Right(StreamBody::new(Events(receiver))))
        .expect("a response"))
}

/// A connection of a client that hardly reads: a few kilobytes wait for it, and a stream soon stands still.
pub async fn narrow_connection(address: &str) -> tokio::net::TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a small buffer");
    let address = address.parse().expect("an address");
    socket.connect(address).await.expect("a connection")
}
