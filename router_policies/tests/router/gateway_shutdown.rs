//! What becomes of requests that still run when a router that stops has waited for them for long enough.

use crate::mock::router::{generate, text, until, worker};
use crate::mock::{MockWorker, narrow_connection};
use decision::fleet::Fleet;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use router_policies::config::Config;
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A router that can be stopped, before one worker.
struct Stoppable {
    address: String,
    client: Client<HttpConnector, Full<Bytes>>,
    fleet: Arc<Fleet>,
    log: PathBuf,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Stoppable {
    async fn before(mock: &MockWorker, drain_timeout_s: f64) -> Self {
        let config = Config {
            drain_timeout_s,
            ..Config::default()
        };
        Self::with(mock, config).await
    }

    async fn with(mock: &MockWorker, config: Config) -> Self {
        let log = std::env::temp_dir().join(format!("router-stop-{:x}.jsonl", fastrand::u64(..)));
        let server = Server::bind(Config {
            port: 0,
            policy: "round_robin".to_owned(),
            workers: vec![worker(mock, "w", "colocated")],
            decision_log: Some(log.clone()),
            ..config
        })
        .await
        .expect("binds");
        let (stop, stopped) = oneshot::channel();
        let address = server.address().expect("bound").to_string();
        let fleet = server.fleet();
        let serving = tokio::spawn(server.serve(async move {
            let _ = stopped.await;
        }));
        until("the worker is up", || fleet.snapshot()[0].healthy).await;
        Self {
            address,
            client: Client::builder(TokioExecutor::new()).build_http(),
            fleet,
            log,
            stop,
            serving,
        }
    }

    fn send(&self, path: &str, body: &Value) -> JoinHandle<Response<Incoming>> {
        let url = format!("http://{}{path}", self.address);
        let body = Full::from(body.to_string());
        let request = Request::post(url).body(body).expect("a request");
        let answer = self.client.request(request);
        tokio::spawn(async { answer.await.expect("an answer") })
    }

    /// Stops it; how long that took, and what the log says at last of each request.
    async fn stop(self, requests: usize) -> (Duration, Vec<Value>) {
        let begun = Instant::now();
        self.stop.send(()).expect("it serves");
        self.serving.await.expect("it stops");
        let took = begun.elapsed();
        assert!(self.fleet.is_idle(), "nothing is reserved");
        let finishes = || -> Vec<Value> {
            let lines = std::fs::read_to_string(&self.log).unwrap_or_default();
            let events = lines.lines().filter_map(|it| serde_json::from_str(it).ok());
            events
                .filter(|it: &Value| it["event"] == "finish")
                .collect()
        };
        until("it is logged", || finishes().len() == requests).await;
        let finishes = finishes();
        std::fs::remove_file(&self.log).expect("removed");
        (took, finishes)
    }
}

const MESSAGE: &str = "the router was shutting down";

#[tokio::test]
async fn streams_that_a_stopping_router_cuts_off_end_with_an_error_of_their_api() {
    let mock = MockWorker::start().await;
    mock.behaviour.tokens.store(1_000_000, Ordering::SeqCst);
    mock.behaviour.token_us.store(10_000, Ordering::SeqCst);
    let router = Stoppable::before(&mock, 0.3).await;
    let said = json!([{"role": "user", "content": "hi"}]);
    let asked = [
        ("/generate", generate(true), "/error/type", "shutting_down"),
        (
            "/v1/chat/completions",
            json!({"messages": said, "stream": true}),
            "/error/type",
            "shutting_down",
        ),
        (
            "/v1/messages",
            json!({"messages": said, "max_tokens": 9, "stream": true}),
            "/error/type",
            "overloaded_error",
        ),
        (
            "/v1/responses",
            json!({"input": "hi", "stream": true}),
            "/code",
            "shutting_down",
        ),
    ];
    let mut streams = Vec::new();
    for (path, body, place, kind) in &asked {
        let answer = router.send(path, body).await.expect("sent");
        assert_eq!(answer.status(), StatusCode::OK);
        streams.push((tokio::spawn(text(answer)), *path, *place, *kind));
    }
    let (took, finishes) = router.stop(asked.len()).await;
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    for (stream, path, place, kind) in streams {
        let text = stream.await.expect("a whole answer");
        let last = text.trim_end().rsplit("\n\n").next().expect("an event");
        let (name, data) = last.split_once("data: ").expect("an event with data");
        let named = matches!(path, "/v1/messages" | "/v1/responses");
        assert_eq!(name, if named { "event: error\n" } else { "" });
        let event: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(event.pointer(place), Some(&Value::from(kind)), "{event}");
        assert_eq!(event["error"]["message"], MESSAGE);
    }
    for finish in finishes {
        assert_eq!(finish["outcome"], "router_error", "{finish}");
        assert_eq!(finish["error"], MESSAGE, "{finish}");
    }
    until("the worker is told", || {
        mock.behaviour.aborted.load(Ordering::SeqCst) == asked.len()
    })
    .await;
}

#[tokio::test]
async fn requests_without_an_answer_are_told_that_the_router_stops() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(60_000_000, Ordering::SeqCst);
    let router = Stoppable::before(&mock, 0.0).await;
    let answers = [false, true].map(|streams| router.send("/generate", &generate(streams)));
    until("they run", || {
        mock.behaviour.running.load(Ordering::SeqCst) == 2
    })
    .await;
    let (took, finishes) = router.stop(2).await;
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    for answer in answers {
        let answer = answer.await.expect("sent");
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.headers()["retry-after"], "1");
        let error: Value = serde_json::from_str(&text(answer).await).expect("JSON");
        assert_eq!(error["error"]["type"], "shutting_down");
        assert_eq!(error["error"]["message"], MESSAGE);
    }
    for finish in finishes {
        assert_eq!(finish["outcome"], "router_error", "{finish}");
        assert_eq!(finish["status"], 503, "{finish}");
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_keeps_no_router_from_stopping() {
    let mock = MockWorker::start().await;
    let router = Stoppable::before(&mock, 0.3).await;
    let mut socket = narrow_connection(&router.address).await;
    let body = json!({"input_ids": [1], "user": "flood", "stream": true}).to_string();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let request = [head, body].concat();
    socket.write_all(request.as_bytes()).await.expect("sent");
    until("it is reserved", || !router.fleet.is_idle()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (took, finishes) = router.stop(1).await;
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    assert_eq!(finishes[0]["outcome"], "router_error", "{}", finishes[0]);
    let mut bytes = Vec::new();
    let _ = socket.read_to_end(&mut bytes).await;
    assert!(
        !bytes.ends_with(b"0\r\n\r\n"),
        "the client can tell that it is not whole"
    );
}

#[tokio::test]
async fn uploads_that_a_stopping_router_still_reads_are_answered() {
    let mock = MockWorker::start().await;
    let router = Stoppable::before(&mock, 0.3).await;
    let asked = [
        ("/generate", "/error/type", "shutting_down"),
        ("/v1/messages", "/error/type", "overloaded_error"),
        ("/v1/embeddings", "/error/type", "shutting_down"),
        ("/workers", "/error/type", "shutting_down"),
    ];
    let mut uploads = Vec::new();
    for (path, place, kind) in asked {
        for reads in [true, false] {
            let mut socket = tokio::net::TcpStream::connect(&router.address)
                .await
                .expect("a connection");
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\n\
                 content-type: application/json\r\ncontent-length: 9000000\r\n\r\n"
            );
            let begin = [head.as_bytes(), b"{\"input_ids\": [1"].concat();
            socket.write_all(&begin).await.expect("sent");
            uploads.push((socket, reads, place, kind));
        }
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let answers: Vec<_> = uploads
        .into_iter()
        .map(|(mut socket, reads, place, kind)| {
            tokio::spawn(async move {
                let mut answer = Vec::new();
                if reads {
                    let read = socket.read_to_end(&mut answer).await;
                    read.expect("an answer, and the connection's end");
                } else {
                    // It goes on sending, and looks for an answer late.
                    for _ in 0..60 {
                        let sent = socket.write_all(&[b' '; 1_000]).await;
                        sent.expect("no reset before it was read");
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    let read = socket.read_to_end(&mut answer).await;
                    read.expect("an answer, and the connection's end");
                }
                (String::from_utf8(answer).expect("UTF-8"), place, kind)
            })
        })
        .collect();
    let (took, _) = router.stop(0).await;
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    for answer in answers {
        let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
        let (answer, place, kind) = answer.expect("it is answered").expect("it is read");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let head = head.to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 503 "), "{head}");
        assert!(head.contains("retry-after: 1"), "{head}");
        assert!(head.contains("connection: close"), "{head}");
        let error: Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(error.pointer(place), Some(&Value::from(kind)), "{error}");
        assert_eq!(error["error"]["message"], MESSAGE);
    }
    assert!(mock.bodies().is_empty());
}

#[tokio::test]
async fn questions_that_are_passed_on_are_told_that_the_router_stops() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(60_000_000, Ordering::SeqCst);
    let router = Stoppable::before(&mock, 0.3).await;
    let answer = router.send("/v1/embeddings", &json!({"input": "hi"}));
    until("it runs", || !mock.bodies().is_empty()).await;
    let (took, _) = router.stop(0).await;
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    let answer = answer.await.expect("sent");
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers()["retry-after"], "1");
    assert!(text(answer).await.contains(MESSAGE));
}

#[tokio::test]
async fn questions_about_the_model_are_told_that_the_router_stops() {
    let mock = MockWorker::start().await;
    let router = Stoppable::before(&mock, 0.3).await;
    mock.behaviour.hangs.store(true, Ordering::SeqCst);
    let asked = Request::get(format!("http://{}/model_info", router.address));
    let answer = router
        .client
        .request(asked.body(Full::default()).expect("a request"));
    let answer = tokio::spawn(answer);
    until("the worker is asked", || {
        let unanswered = mock.behaviour.unanswered.lock();
        unanswered.iter().any(|path| path == "/model_info")
    })
    .await;
    let (took, _) = router.stop(0).await;
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
    let answer = answer.expect("in time").expect("asked").expect("an answer");
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers()["retry-after"], "1");
    assert!(text(answer).await.contains(MESSAGE));
}

#[tokio::test]
async fn a_connection_on_which_a_body_was_sent_that_nobody_wanted_ends_with_the_router() {
    let mock = MockWorker::start().await;
    let router = Stoppable::before(&mock, 30.0).await;
    let mut socket = tokio::net::TcpStream::connect(&router.address)
        .await
        .expect("a connection");
    let request = "POST /workers/w/drain HTTP/1.1\r\nhost: localhost\r\n\
                   content-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    socket.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = [0; 12];
    socket.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 202");
    // Its client keeps it, for whatever it may ask next.
    let (took, _) = router.stop(0).await;
    assert!(took < Duration::from_secs(2), "it took {took:?}");
}

/// An answer's status and the bytes of its headers and body, which has a length.
async fn answer_on(socket: &mut tokio::net::TcpStream) -> String {
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(socket.read_u8().await.expect("an answer"));
    }
    let head = String::from_utf8(answer).expect("text");
    let length = head.to_ascii_lowercase();
    let (_, length) = length.split_once("content-length: ").expect("a length");
    let (length, _) = length.split_once('\r').expect("a line");
    let mut body = vec![0; length.parse().expect("a number")];
    socket.read_exact(&mut body).await.expect("a body");
    head
}

#[tokio::test]
async fn a_connection_on_which_a_request_was_refused_unread_is_kept_and_ends_with_the_router() {
    let keys = std::env::temp_dir().join(format!("router-keys-{:x}", fastrand::u64(..)));
    std::fs::write(&keys, "a-clients-key\n").expect("written");
    let body = generate(false).to_string();
    // Of a size that counts, which is more than there is room for.
    let long = json!({"input_ids": [1], "user": "x".repeat(8_000)}).to_string();
    let with_keys = || Config {
        api_keys_file: Some(keys.clone()),
        ..Config::default()
    };
    let small = || Config {
        max_body_bytes: 10,
        ..Config::default()
    };
    let full = Config {
        max_held_bytes: 5_000,
        ..Config::default()
    };
    let gzip = "content-encoding: gzip\r\n";
    for (config, asked, headers, body, status) in [
        (with_keys(), "POST /generate", "", &body, 401),
        (with_keys(), "POST /v1/embeddings", "", &body, 401),
        (Config::default(), "POST /generate", gzip, &body, 415),
        (small(), "POST /generate", "", &body, 413),
        (small(), "POST /v1/embeddings", "", &body, 413),
        (full, "POST /generate", "", &long, 503),
        (Config::default(), "PUT /generate", "", &body, 405),
        (Config::default(), "PUT /v1/embeddings", "", &body, 405),
    ] {
        let bytes = body.len();
        let length = format!("content-length: {bytes}\r\n");
        let chunk = format!("{bytes:x}\r\n{body}\r\n0\r\n\r\n");
        let chunked = "transfer-encoding: chunked\r\n".to_owned();
        for (framing, body) in [(length, body.clone()), (chunked, chunk)] {
            let head = format!("{asked} HTTP/1.1\r\nhost: localhost\r\n{framing}{headers}\r\n");
            // Many clients send a body when its headers are sent.
            for later in [None, Some(Duration::from_millis(20))] {
                let mock = MockWorker::start().await;
                let router = Stoppable::with(&mock, config.clone()).await;
                let mut socket = tokio::net::TcpStream::connect(&router.address)
                    .await
                    .expect("a connection");
                for _ in 0..2 {
                    if let Some(later) = later {
                        socket.write_all(head.as_bytes()).await.expect("sent");
                        tokio::time::sleep(later).await;
                        socket.write_all(body.as_bytes()).await.expect("sent");
                    } else {
                        let whole = [&*head, &*body].concat();
                        socket.write_all(whole.as_bytes()).await.expect("sent");
                    }
                    let answer = answer_on(&mut socket).await;
                    let expected = format!("HTTP/1.1 {status} ");
                    assert!(answer.starts_with(&expected), "{asked}: {answer}");
                }
                // Its client keeps it, for whatever it may ask next.
                let (took, _) = router.stop(0).await;
                let which = format!("{status} {framing} {later:?}");
                assert!(took < Duration::from_secs(2), "{which}: {took:?}");
            }
        }
    }
    std::fs::remove_file(&keys).expect("removed");
}

#[tokio::test]
async fn who_asks_before_it_sends_a_long_body_is_refused_without_being_told_to_send_it() {
    let mock = MockWorker::start().await;
    let router = Stoppable::before(&mock, 30.0).await;
    for framing in ["content-length: 9000000", "transfer-encoding: chunked"] {
        for (asked, status) in [
            ("POST /generate", "HTTP/1.1 415 "),
            ("POST /health", "HTTP/1.1 405 "),
        ] {
            let mut socket = tokio::net::TcpStream::connect(&router.address)
                .await
                .expect("a connection");
            let head = format!(
                "{asked} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
                 content-encoding: gzip\r\n{framing}\r\n\r\n"
            );
            socket.write_all(head.as_bytes()).await.expect("sent");
            let answer = answer_on(&mut socket).await;
            assert!(answer.starts_with(status), "{asked}: {answer}");
        }
    }
    router.stop(0).await;
}
