//! Pods as workers: they come, are not ready, go and come back, as clients see it.

use crate::mock::MockWorker;
use crate::mock::kubernetes::ApiServer;
use crate::mock::logged;
use crate::mock::router::{Router, text, until};
use hyper::StatusCode;
use router_policies::config::Config;
use router_policies::gateway::check;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn config(settings: Value) -> Config {
    serde_json::from_value(json!({"port": 0, "kubernetes": settings})).expect("a configuration")
}

/// The workers, and whether each gets new requests.
fn workers(router: &Router) -> BTreeMap<String, bool> {
    let workers = router.fleet.snapshot().into_iter();
    workers
        .map(|it| (it.spec.id.clone(), it.healthy && !it.draining))
        .collect()
}

/// Whether anything is reserved on it.
fn has_requests(router: &Router, id: &str) -> bool {
    let workers = router.fleet.snapshot();
    workers
        .iter()
        .any(|it| it.spec.id == id && it.load.requests > 0)
}

async fn are(router: &Router, expected: &[(&str, bool)]) {
    let expected = expected.iter().map(|(id, gets)| ((*id).to_owned(), *gets));
    let expected: BTreeMap<String, bool> = expected.collect();
    until(&format!("workers {expected:?}"), || {
        workers(router) == expected
    })
    .await;
}

/// A turn of this session; its status, its worker, and what came.
async fn turn(router: &Router, session: usize) -> (StatusCode, String, String) {
    let ids: Vec<usize> = (0..600).map(|i| session * 1_000 + i).collect();
    let body = json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "stream": true});
    let session = format!("s{session}");
    let headers = [("x-session-id", &*session)];
    let body = body.to_string().into_bytes();
    let answer = router.send("/generate", &headers, body).await;
    let status = answer.status();
    let worker = answer.headers().get("x-deltaserve-worker");
    let worker = worker.map(|it| it.to_str().expect("text").to_owned());
    (status, worker.unwrap_or_default(), text(answer).await)
}

/// Sessions whose turns follow each other until they are told to stop.
struct Load {
    is_over: Arc<AtomicBool>,
    sessions: Vec<tokio::task::JoinHandle<usize>>,
}

impl Load {
    fn begin(router: &Arc<Router>, sessions: usize) -> Self {
        let is_over = Arc::<AtomicBool>::default();
        let sessions = (0..sessions).map(|session| {
            let (router, is_over) = (Arc::clone(router), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut turns = 0;
                while !is_over.load(Ordering::SeqCst) {
                    let (status, worker, said) = turn(&router, session).await;
                    assert_eq!(status, 200, "session {session} on {worker}: {said}");
                    assert!(said.ends_with("data: [DONE]\n\n"), "on {worker}: {said}");
                    turns += 1;
                }
                turns
            })
        });
        Self {
            sessions: sessions.collect(),
            is_over,
        }
    }

    /// Turns that were served: all.
    async fn end(self) -> usize {
        self.is_over.store(true, Ordering::SeqCst);
        let mut turns = 0;
        for session in self.sessions {
            turns += session.await.expect("no turn is lost");
        }
        turns
    }
}

fn running(mock: &MockWorker) -> usize {
    mock.behaviour.running.load(Ordering::SeqCst)
}

fn served(mock: &MockWorker) -> usize {
    mock.behaviour.served.load(Ordering::SeqCst)
}

async fn serves_more(mock: &MockWorker) {
    let before = served(mock);
    until("it serves", || served(mock) > before + 2).await;
}

async fn slow_worker() -> MockWorker {
    let mock = MockWorker::start().await;
    let behaviour = &mock.behaviour;
    behaviour.first_token_us.store(10_000, Ordering::Relaxed);
    behaviour.token_us.store(5_000, Ordering::Relaxed);
    mock
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_come_are_not_ready_and_go_under_load_and_no_request_is_lost() {
    let mut api = ApiServer::start().await;
    let [a, b, c, d] = [
        slow_worker().await,
        slow_worker().await,
        slow_worker().await,
        slow_worker().await,
    ];
    api.put("a", &a, true);
    let router = Arc::new(Router::begin(config(api.settings())).await);
    are(&router, &[("a", true)]).await;
    let load = Load::begin(&router, 12);
    serves_more(&a).await;
    // One comes, and is ready later.
    api.put("b", &b, false);
    api.put("c", &c, true);
    serves_more(&c).await;
    assert_eq!(served(&b), 0, "it is not ready");
    api.set_ready("b", true);
    serves_more(&b).await;
    // One is not ready: what runs there ends, its sessions go elsewhere, and it comes back.
    api.set_ready("a", false);
    are(&router, &[("a", false), ("b", true), ("c", true)]).await;
    until("what ran has ended", || !has_requests(&router, "a")).await;
    let before = served(&a);
    serves_more(&b).await;
    assert_eq!(served(&a), before, "it gets nothing new");
    api.set_ready("a", true);
    serves_more(&a).await;
    // One goes, as Kubernetes lets pods go: it is drained first.
    api.begin_to_delete("b");
    are(&router, &[("a", true), ("b", false), ("c", true)]).await;
    until("what ran has ended", || !has_requests(&router, "b")).await;
    api.delete("b");
    are(&router, &[("a", true), ("c", true)]).await;
    let by_b = served(&b);
    drop(b);
    // Another one of its name comes.
    api.put("b", &d, true);
    serves_more(&d).await;
    // The API server goes for a while.
    api.stop();
    serves_more(&c).await;
    api.delete("c");
    api.come_back().await;
    are(&router, &[("a", true), ("b", true)]).await;
    until("what ran has ended", || running(&c) == 0).await;
    serves_more(&a).await;
    // A pod that has ended stays to be looked at.
    api.set("b", "/status/phase", "Failed".into());
    are(&router, &[("a", true)]).await;
    let turns = load.end().await;
    assert_eq!(turns, [&a, &c, &d].map(served).iter().sum::<usize>() + by_b);
    router.idle().await;
}

#[tokio::test]
async fn a_session_moves_when_its_pod_is_not_ready_and_keeps_its_place_there() {
    let api = ApiServer::start().await;
    let [a, b] = [MockWorker::start().await, MockWorker::start().await];
    api.put("a", &a, true);
    let router = Router::begin(config(api.settings())).await;
    are(&router, &[("a", true)]).await;
    assert_eq!(turn(&router, 1).await.1, "a");
    api.put("b", &b, true);
    are(&router, &[("a", true), ("b", true)]).await;
    assert_eq!(turn(&router, 1).await.1, "a", "it stays");
    api.set_ready("a", false);
    are(&router, &[("a", false), ("b", true)]).await;
    assert_eq!(turn(&router, 1).await.1, "b", "it moves");
    api.set_ready("a", true);
    are(&router, &[("a", true), ("b", true)]).await;
    assert_eq!(
        turn(&router, 1).await.1,
        "b",
        "it stays where its prefix is"
    );
    api.delete("b");
    are(&router, &[("a", true)]).await;
    assert_eq!(turn(&router, 1).await.1, "a");
    router.idle().await;
}

#[tokio::test]
async fn only_pods_with_the_labels_are_workers_and_what_is_wrong_with_one_is_said() {
    logged::begin();
    let api = ApiServer::start().await;
    let mock = MockWorker::start().await;
    api.put("kube-test", &mock, true);
    api.set(
        "kube-test",
        "/metadata/labels",
        json!({"app": "sglang", "tier": "test"}),
    );
    api.put("kube-wrong", &mock, true);
    api.set(
        "kube-wrong",
        "/metadata/labels",
        json!({"app": "sglang", "deltaserve/role": "cook"}),
    );
    api.put("kube-w", &mock, true);
    let router = Router::begin(config(api.settings())).await;
    are(&router, &[("kube-w", true)]).await;
    let said = logged::lines_with("pod kube-wrong: deltaserve/role: unknown variant `cook`");
    assert_eq!(said.len(), 1, "{said:?}");
    // A role is changed: it is another worker.
    let labels = json!({"app": "sglang", "deltaserve/role": "decode"});
    api.set("kube-w", "/metadata/labels", labels);
    until("it has its role", || {
        let workers = router.fleet.snapshot();
        workers
            .iter()
            .any(|it| it.spec.role == decision::policy::Role::Decode)
    })
    .await;
    // It has the labels no longer.
    api.set("kube-w", "/metadata/labels", json!({"app": "vllm"}));
    are(&router, &[]).await;
}

#[tokio::test]
async fn what_is_drained_or_removed_by_hand_stays_so_until_its_pod_changes() {
    let api = ApiServer::start().await;
    let [a, b] = [MockWorker::start().await, MockWorker::start().await];
    api.put("a", &a, true);
    api.put("b", &b, true);
    let router = Router::begin(config(api.settings())).await;
    are(&router, &[("a", true), ("b", true)]).await;
    assert!(router.fleet.set_draining("a", true));
    assert!(router.fleet.remove_worker("b"));
    let labels = json!({"app": "sglang", "version": "2"});
    api.set("a", "/metadata/labels", labels.clone());
    api.set("b", "/metadata/labels", labels);
    let c = MockWorker::start().await;
    api.put("c", &c, true);
    are(&router, &[("a", false), ("c", true)]).await;
    api.put("b", &MockWorker::start().await, true);
    until("the next pod of its name is a worker", || {
        workers(&router).contains_key("b")
    })
    .await;
    api.set_ready("a", false);
    api.set_ready("a", true);
    until("it is ready again", || workers(&router)["a"]).await;
}

/// What `--check` says.
async fn checked(settings: Value) -> Result<Vec<String>, String> {
    let config = config(settings);
    let unreached = tokio::task::spawn_blocking(move || check(config, None));
    let unreached = unreached.await.expect("no panic")?;
    Ok(unreached.into_iter().map(|it| it.words).collect())
}

#[tokio::test]
async fn a_check_asks_kubernetes_and_the_pods() {
    let api = ApiServer::start().await;
    let mock = MockWorker::start().await;
    assert_eq!(checked(api.settings()).await, Ok(Vec::new()));
    api.put("a", &mock, true);
    assert_eq!(checked(api.settings()).await, Ok(Vec::new()));
    mock.behaviour.healthy.store(false, Ordering::SeqCst);
    api.put("b", &mock, true);
    api.set(
        "b",
        "/metadata/annotations",
        json!({"deltaserve/port": "http"}),
    );
    let said = checked(api.settings()).await.expect("it would start");
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].starts_with("pod b: deltaserve/port: expected a number"),
        "{said:?}"
    );
    assert!(
        said[1].starts_with("worker a: ") && said[1].ends_with("HTTP 503"),
        "{said:?}"
    );
    // What Kubernetes refuses.
    let mut settings = api.settings();
    settings["selector"] = "app in".into();
    let said = checked(settings).await.expect_err("a wrong selector");
    assert!(
        said.starts_with("kubernetes: ") && said.contains("unable to parse"),
        "{said}"
    );
    api.refuse(Some(403));
    let said = checked(api.settings()).await.expect_err("forbidden");
    assert!(
        said.starts_with("kubernetes: ") && said.contains("cannot list resource"),
        "{said}"
    );
    api.refuse(None);
    api.write_kubeconfig("another-token");
    let said = checked(api.settings()).await.expect_err("unauthorized");
    assert!(
        said.starts_with("kubernetes: ") && said.contains("Unauthorized"),
        "{said}"
    );
    std::fs::write(api.kubeconfig(), "clusters: 7").expect("a file");
    let said = checked(api.settings()).await.expect_err("no kubeconfig");
    let begin = format!("kubernetes.kubeconfig: {}: ", api.kubeconfig().display());
    assert!(said.starts_with(&begin) && !said.contains('\n'), "{said}");
    std::fs::remove_file(api.kubeconfig()).expect("a file");
    let said = checked(api.settings()).await.expect_err("no kubeconfig");
    assert!(said.starts_with(&begin), "{said}");
}
