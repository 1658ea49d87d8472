//! An API server of Kubernetes as far as watching pods goes: lists, watches that end, bookmarks, label selectors,
//! tokens, and versions that it has forgotten (410).

use super::{MockWorker, Port};
use bytes::Bytes;
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const NAMESPACE: &str = "serving";
const TOKEN: &str = "the-token-of-a-service-account";

#[derive(Default)]
struct State {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// What became of which pod: before and after.
    changes: Vec<(u64, Option<Value>, Option<Value>)>,
    /// Versions up to this one cannot be watched from.
    forgotten: u64,
    /// The status of all answers.
    refuses: Option<u16>,
    watches: usize,
}

impl State {
    fn change(&mut self, name: &str, after: Option<Value>) {
        self.version += 1;
        let mut after = after;
        if let Some(pod) = &mut after {
            pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        }
        let before = match &after {
            Some(pod) => self.pods.insert(name.to_owned(), pod.clone()),
            None => self.pods.remove(name),
        };
        self.changes.push((self.version, before, after));
    }
}

pub struct ApiServer {
    port: Arc<Port>,
    state: Arc<Mutex<State>>,
    version: Arc<watch::Sender<u64>>,
    task: tokio::task::JoinHandle<()>,
    folder: PathBuf,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl ApiServer {
    pub async fn start() -> Self {
        let port = Arc::new(Port::free());
        let state = Arc::new(Mutex::new(State::default()));
        let version = Arc::new(watch::Sender::new(0));
        let folder = std::env::temp_dir().join(format!("kubernetes-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).expect("a folder");
        let task = serve(&port, &state, &version).await;
        let this = Self {
            port,
            state,
            version,
            task,
            folder,
        };
        this.write_kubeconfig(TOKEN);
        this
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("config")
    }

    pub fn write_kubeconfig(&self, token: &str) {
        let address = self.port.0.local_addr().expect("bound");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "router", "user": {"token": token}}],
            "contexts": [{"name": "here",
                "context": {"cluster": "here", "user": "router", "namespace": NAMESPACE}}],
        });
        std::fs::write(self.kubeconfig(), config.to_string()).expect("a file");
    }

    /// What `[kubernetes]` says of it.
    pub fn settings(&self) -> Value {
        json!({"selector": "app=sglang,tier!=test", "port": 30000, "kubeconfig": self.kubeconfig()})
    }

    /// A pod with this worker in it comes, or is another one from now on.
    pub fn put(&self, name: &str, mock: &MockWorker, is_ready: bool) {
        let (host, port) = mock
            .url
            .trim_start_matches("http://")
            .split_once(':')
            .expect("a port");
        let uid = format!("{name} of {port}");
        let status = if is_ready { "True" } else { "False" };
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid,
                "labels": {"app": "sglang"},
                "annotations": {"deltaserve/port": port, "deltaserve/kv_capacity_tokens": "10000"}},
            "spec": {"containers": [{"name": "engine"}]},
            "status": {"phase": "Running", "podIP": host,
                "conditions": [{"type": "Ready", "status": status}]},
        });
        self.change(name, |_| Some(pod));
    }

    /// It is another one from now on, or gone.
    pub fn change(&self, name: &str, change: impl FnOnce(Option<Value>) -> Option<Value>) {
        let mut state = self.state.lock();
        let after = change(state.pods.get(name).cloned());
        state.change(name, after);
        self.version.send_replace(state.version);
    }

    pub fn set(&self, name: &str, pointer: &str, value: Value) {
        self.change(name, |pod| {
            let mut pod = pod.expect("a pod");
            *pod.pointer_mut(pointer).expect("a field") = value;
            Some(pod)
        });
    }

    pub fn set_ready(&self, name: &str, is_ready: bool) {
        let status = if is_ready { "True" } else { "False" };
        self.set(name, "/status/conditions/0/status", status.into());
    }

    /// It is to end, and takes its time.
    pub fn begin_to_delete(&self, name: &str) {
        self.change(name, |pod| {
            let mut pod = pod.expect("a pod");
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            Some(pod)
        });
    }

    pub fn delete(&self, name: &str) {
        self.change(name, |_| None);
    }

    /// Answers with nothing but this status, or well again.
    pub fn refuse(&self, status: Option<u16>) {
        self.state.lock().refuses = status;
    }

    /// Breaks all connections and takes no more.
    pub fn stop(&self) {
        self.task.abort();
    }

    /// Comes back, and knows nothing of what was before now but what there is.
    pub async fn come_back(&mut self) {
        {
            let mut state = self.state.lock();
            state.version += 1;
            state.forgotten = state.version;
        }
        self.task = serve(&self.port, &self.state, &self.version).await;
    }

    /// Watches that have begun.
    pub fn watches(&self) -> usize {
        self.state.lock().watches
    }
}

async fn serve(
    port: &Arc<Port>,
    state: &Arc<Mutex<State>>,
    version: &Arc<watch::Sender<u64>>,
) -> tokio::task::JoinHandle<()> {
    let listener = port.listen().await;
    let (state, version) = (Arc::clone(state), Arc::clone(version));
    tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            let (state, version) = (Arc::clone(&state), Arc::clone(&version));
            let service = service_fn(move |request| {
                let answer = answer(&state, version.subscribe(), &request);
                async move { Ok::<_, std::convert::Infallible>(answer) }
            });
            connections.spawn(async move {
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(socket), service)
                    .await;
            });
        }
    })
}

type Body = http_body_util::Either<http_body_util::Full<Bytes>, StreamBody<Lines>>;

/// The events of a watch.
pub struct Lines(mpsc::Receiver<Bytes>);

impl futures_core::Stream for Lines {
    type Item = Result<Frame<Bytes>, std::convert::Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let line = self.0.poll_recv(cx);
        line.map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}

fn whole(status: u16, body: &Value) -> Response<Body> {
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(Body::Left(body.to_string().into()))
        .expect("a response")
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code})
}

fn answer(
    state: &Arc<Mutex<State>>,
    changed: watch::Receiver<u64>,
    request: &Request<Incoming>,
) -> Response<Body> {
    let refuses = state.lock().refuses;
    if let Some(code) = refuses {
        let message = "pods is forbidden: the service account cannot list resource \"pods\"";
        return whole(code, &status(code, "Forbidden", message));
    }
    let token = request.headers().get("authorization");
    if token.is_none_or(|it| it.as_bytes() != format!("Bearer {TOKEN}").as_bytes()) {
        return whole(401, &status(401, "Unauthorized", "Unauthorized"));
    }
    if request.uri().path() != format!("/api/v1/namespaces/{NAMESPACE}/pods") {
        return whole(404, &status(404, "NotFound", "there is no such path"));
    }
    let query = request.uri().query().unwrap_or_default();
    let query: BTreeMap<String, String> = query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), unescaped(value)))
        .collect();
    let Some(selector) = query
        .get("labelSelector")
        .and_then(|text| Selector::of(text))
    else {
        let message = "unable to parse requirement: found '', expected: identifier";
        return whole(400, &status(400, "BadRequest", message));
    };
    if query
        .get("watch")
        .is_none_or(|watch| watch != "true" && watch != "1")
    {
        let state = state.lock();
        let chosen = state.pods.values().filter(|pod| selector.takes(pod));
        let items: Vec<&Value> = chosen.collect();
        let version = state.version.to_string();
        let list = json!({"kind": "PodList", "apiVersion": "v1",
            "metadata": {"resourceVersion": version}, "items": items});
        return whole(200, &list);
    }
    let from = query.get("resourceVersion").and_then(|it| it.parse().ok());
    let seconds = query.get("timeoutSeconds").and_then(|it| it.parse().ok());
    let (sender, receiver) = mpsc::channel(64);
    tokio::spawn(watch_pods(
        Arc::clone(state),
        changed,
        selector,
        from.expect("a version"),
        Duration::from_secs(seconds.expect("an end")),
        sender,
    ));
    Response::builder()
        .header("content-type", "application/json")
        .body(Body::Right(StreamBody::new(Lines(receiver))))
        .expect("a response")
}

async fn watch_pods(
    state: Arc<Mutex<State>>,
    mut changed: watch::Receiver<u64>,
    selector: Selector,
    from: u64,
    time: Duration,
    sender: mpsc::Sender<Bytes>,
) {
    let mut at = from;
    let end = tokio::time::sleep(time);
    tokio::pin!(end);
    let is_forgotten = {
        let mut state = state.lock();
        state.watches += 1;
        from < state.forgotten
    };
    if is_forgotten {
        let gone = status(410, "Expired", "too old resource version");
        let event = json!({"type": "ERROR", "object": gone});
        let _ = sender.send(format!("{event}\n").into()).await;
        return;
    }
    loop {
        let mut events = Vec::new();
        {
            let state = state.lock();
            for (version, before, after) in state.changes.iter().filter(|it| it.0 > at) {
                let was = before.as_ref().filter(|pod| selector.takes(pod));
                let is = after.as_ref().filter(|pod| selector.takes(pod));
                let (kind, pod) = match (was, is) {
                    (None, None) => continue,
                    (None, Some(pod)) => ("ADDED", pod),
                    (Some(_), Some(pod)) => ("MODIFIED", pod),
                    (Some(pod), None) => ("DELETED", pod),
                };
                let mut pod = pod.clone();
                pod["metadata"]["resourceVersion"] = version.to_string().into();
                events.push(json!({"type": kind, "object": pod}));
            }
            at = at.max(state.version);
        }
        let bookmark = json!({"kind": "Pod", "apiVersion": "v1", "spec": {"containers": []},
            "metadata": {"resourceVersion": at.to_string(), "creationTimestamp": null}});
        events.push(json!({"type": "BOOKMARK", "object": bookmark}));
        for event in events {
            if sender.send(format!("{event}\n").into()).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = &mut end => return,
            () = sender.closed() => return,
            changed = changed.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// `key=value` and `key!=value`, joined by commas.
struct Selector(Vec<(String, bool, String)>);

impl Selector {
    fn of(text: &str) -> Option<Self> {
        let one = |text: &str| {
            let (key, value) = text.split_once('=')?;
            let (key, wants) = match key.strip_suffix('!') {
                Some(key) => (key, false),
                None => (key, true),
            };
            (!key.is_empty()).then(|| (key.to_owned(), wants, value.to_owned()))
        };
        text.split(',').map(one).collect::<Option<_>>().map(Self)
    }

    fn takes(&self, pod: &Value) -> bool {
        self.0.iter().all(|(key, wants, value)| {
            let is = pod["metadata"]["labels"][key] == value.as_str();
            is == *wants
        })
    }
}

/// A value of a query with its %XX as what they stand for.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('%');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = u8::from_str_radix(&part[..2], 16).expect("an escape");
        plain.push(char::from(code));
        plain.push_str(&part[2..]);
    }
    plain
}
