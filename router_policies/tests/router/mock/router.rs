//! A router under test, and what its tests ask of it.

use super::MockWorker;
use decision::fleet::Fleet;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use router_policies::config::{Config, WorkerSpec};
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub struct Router {
    pub url: String,
    /// Where gateways ask.
    pub picker: Option<std::net::SocketAddr>,
    pub fleet: Arc<Fleet>,
    pub client: Client<HttpConnector, Full<Bytes>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Router {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn worker(mock: &MockWorker, id: &str, role: &str) -> WorkerSpec {
    let mut spec = json!({"url": mock.url, "id": id, "role": role});
    if role == "prefill" {
        spec["bootstrap_port"] = 8998.into();
    }
    serde_json::from_value(spec).expect("a worker")
}

impl Router {
    pub async fn start(policy: &str, workers: Vec<WorkerSpec>) -> Self {
        Self::with(Config {
            policy: policy.to_owned(),
            workers,
            ..Config::default()
        })
        .await
    }

    pub async fn with(config: Config) -> Self {
        let router = Self::begin(config).await;
        until("all workers are up", || {
            router.fleet.snapshot().iter().all(|w| w.healthy)
        })
        .await;
        router
    }

    /// One that has only just started.
    pub async fn begin(config: Config) -> Self {
        let config = Config {
            port: 0,
            drain_timeout_s: 1.0,
            ..config
        };
        let server = Server::bind(config).await.expect("binds");
        let url = format!("http://{}", server.address().expect("bound"));
        let fleet = server.fleet();
        Self {
            url,
            picker: server.picker_address(),
            fleet,
            client: Client::builder(TokioExecutor::new()).build_http(),
            task: tokio::spawn(server.serve(std::future::pending())),
        }
    }

    pub async fn send(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Response<hyper::body::Incoming> {
        let mut request = Request::post(format!("{}{path}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body)).expect("a request");
        self.client.request(request).await.expect("an answer")
    }

    pub async fn post(&self, path: &str, body: Value) -> (StatusCode, String) {
        let response = self.send(path, &[], body.to_string().into_bytes()).await;
        let status = response.status();
        (status, text(response).await)
    }

    /// As `post`, saying that the body is JSON.
    pub async fn post_json(&self, path: &str, body: Value) -> (StatusCode, String) {
        let headers = [("content-type", "application/json")];
        let body = body.to_string().into_bytes();
        let response = self.send(path, &headers, body).await;
        let status = response.status();
        (status, text(response).await)
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        let request = Request::get(format!("{}{path}", self.url))
            .body(Full::default())
            .expect("a request");
        let response = self.client.request(request).await.expect("an answer");
        let status = response.status();
        (status, text(response).await)
    }

    /// Waits until the metrics have this line.
    pub async fn counts(&self, line: &str) {
        let begun = Instant::now();
        while !self.get("/metrics").await.1.lines().any(|it| it == line) {
            assert!(begun.elapsed() < PATIENCE, "waited in vain: {line}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn idle(&self) {
        until("nothing is reserved", || self.fleet.is_idle()).await;
    }
}

pub async fn text(response: Response<hyper::body::Incoming>) -> String {
    let bytes = response
        .into_body()
        .collect()
        .await
        .expect("a whole answer")
        .to_bytes();
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// How long something may take that comes at once on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn generate(stream: bool) -> Value {
    json!({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}, "stream": stream})
}
