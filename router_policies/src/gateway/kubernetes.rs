//! Pods as workers: the router watches those of a label and adds, drains and removes workers as they come, are not
//! ready, and go.
//!
//! Owns which pod is which worker. A worker that it has added is like any other: its health is asked, and it may be
//! drained and removed by hand. While Kubernetes does not answer, the workers stay as they are.

use super::{Gateway, describe};
use crate::config::{Kubernetes, PREFIX, WorkerSpec};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Config};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Kubernetes ends a watch after so long, and another one begins. A connection that breaks without a word is noticed
/// a little later.
const WATCH_S: u32 = 60;
const READ_PATIENCE: Duration = Duration::from_secs(WATCH_S as u64 + 30);
/// How long [`workers_now`] waits.
const CHECK_PATIENCE: Duration = Duration::from_secs(10);

/// The pods of a namespace, for whom Kubernetes knows.
///
/// # Errors
/// One line that names the field.
pub(super) async fn pods_of(kubernetes: &Kubernetes) -> Result<Api<Pod>, String> {
    let config = match &kubernetes.kubeconfig {
        Some(path) => of_file(path.clone()).await,
        None => {
            let found = Config::infer().await;
            found.map_err(|error| format!("kubernetes.kubeconfig: there is none: {error}"))
        }
    };
    let mut config = config?;
    config.read_timeout = Some(READ_PATIENCE);
    config.reset_reader_on_write = true;
    let namespace = kubernetes.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config);
    let client = client.map_err(|error| format!("kubernetes.kubeconfig: {}", describe(error)))?;
    Ok(Api::namespaced(client, &namespace))
}

async fn of_file(path: PathBuf) -> Result<Config, String> {
    let failed = |error| {
        // What is wrong with YAML is shown in further lines.
        let words = describe(error);
        let first = words.lines().next().unwrap_or_default();
        format!("kubernetes.kubeconfig: {}: {first}", path.display())
    };
    let file = Kubeconfig::read_from(&path).map_err(failed)?;
    let options = KubeConfigOptions::default();
    Config::from_custom_kubeconfig(file, &options)
        .await
        .map_err(failed)
}

/// The workers that there are now, and a line for each pod that says something wrong.
///
/// # Errors
/// One line that says why Kubernetes does not tell.
pub(super) async fn workers_now(
    kubernetes: &Kubernetes,
) -> Result<(Vec<WorkerSpec>, Vec<String>), String> {
    let pods = pods_of(kubernetes).await?;
    let which = ListParams::default().labels(&kubernetes.selector);
    let listed = tokio::time::timeout(CHECK_PATIENCE, pods.list(&which)).await;
    let listed = match listed {
        Ok(listed) => listed.map_err(|error| format!("kubernetes: {}", describe(error)))?,
        Err(_) => return Err("kubernetes: no answer".to_owned()),
    };
    let (mut workers, mut wrong) = (Vec::new(), Vec::new());
    for pod in &listed {
        match seen(kubernetes, pod) {
            Seen::Ready(spec) => workers.push(*spec),
            Seen::Wrong(message) => wrong.push(message),
            Seen::NotReady | Seen::Ended => {}
        }
    }
    Ok((workers, wrong))
}

/// What a pod is to the router.
#[derive(Debug, PartialEq)]
enum Seen {
    Ready(Box<WorkerSpec>),
    NotReady,
    /// It will never be ready again.
    Ended,
    /// It says what no worker can be.
    Wrong(String),
}

fn seen(kubernetes: &Kubernetes, pod: &Pod) -> Seen {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Seen::Ended;
    }
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let is_ready = conditions.any(|it| it.type_ == "Ready" && it.status == "True");
    let address = status.and_then(|status| status.pod_ip.as_deref());
    let (Some(address), true, None) = (address, is_ready, &pod.metadata.deletion_timestamp) else {
        return Seen::NotReady;
    };
    let said = [&pod.metadata.labels, &pod.metadata.annotations];
    let said = said.into_iter().flatten().flatten();
    // Of a label and an annotation of the same key the latter counts.
    let own: BTreeMap<&str, &str> = said
        .filter_map(|(key, text)| Some((key.strip_prefix(PREFIX)?, &**text)))
        .collect();
    let name = name_of(pod);
    match kubernetes.worker_at(name, address, &own) {
        Ok(spec) => Seen::Ready(Box::new(spec)),
        Err(message) => Seen::Wrong(format!("pod {name}: {PREFIX}{message}")),
    }
}

fn name_of(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// A pod that is a worker.
struct Known {
    /// Another pod of the same name is another worker.
    uid: Option<String>,
    spec: WorkerSpec,
    is_ready: bool,
}

/// The workers that are pods, by their names.
#[derive(Default)]
struct Pods {
    known: HashMap<String, Known>,
    /// What was said of pods that are none.
    told: HashMap<String, String>,
}

/// Keeps the workers of `gateway` as the pods are, as long as it is there. `unasked` is dropped once all have been
/// added that there are now.
pub(super) async fn watch(gateway: Weak<Gateway>, pods: Api<Pod>, unasked: Arc<()>) {
    let Some(selector) = gateway.upgrade().and_then(|gateway| {
        let kubernetes = gateway.config.kubernetes.as_ref()?;
        Some(kubernetes.selector.clone())
    }) else {
        return;
    };
    let which = watcher::Config::default()
        .labels(&selector)
        .timeout(WATCH_S);
    let events = watcher::watcher(pods, which).default_backoff();
    let mut events = std::pin::pin!(events);
    let mut unasked = Some(unasked);
    let mut workers = Pods::default();
    let mut listed = Vec::new();
    let mut trouble = None;
    while let Some(event) = events.next().await {
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                let why = describe(error);
                if trouble.as_ref() != Some(&why) {
                    log::warn!("kubernetes: {why}; the workers stay as they are");
                    trouble = Some(why);
                }
                continue;
            }
        };
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(pod) => listed.push(pod),
            Event::InitDone => {
                if trouble.take().is_some() {
                    log::info!("kubernetes: it answers again");
                }
                workers.are(&gateway, &listed);
                listed.clear();
                unasked = None;
            }
            Event::Apply(pod) => workers.changed(&gateway, &pod),
            Event::Delete(pod) => workers.gone(&gateway, name_of(&pod)),
        }
    }
    drop(unasked);
}

impl Pods {
    /// These are all pods.
    fn are(&mut self, gateway: &Arc<Gateway>, pods: &[Pod]) {
        let names: HashSet<&str> = pods.iter().map(name_of).collect();
        let gone = self.known.keys().filter(|name| !names.contains(&***name));
        // First: another pod may have the address by now.
        for name in gone.cloned().collect::<Vec<_>>() {
            self.gone(gateway, &name);
        }
        self.told.retain(|name, _| names.contains(&**name));
        for pod in pods {
            self.changed(gateway, pod);
        }
    }

    fn gone(&mut self, gateway: &Gateway, name: &str) {
        self.told.remove(name);
        if self.known.remove(name).is_some() && gateway.fleet.remove_worker(name) {
            log::info!("worker {name}: its pod is gone");
        }
    }

    fn changed(&mut self, gateway: &Arc<Gateway>, pod: &Pod) {
        let Some(kubernetes) = &gateway.config.kubernetes else {
            return;
        };
        let (name, uid) = (name_of(pod), &pod.metadata.uid);
        if self.known.get(name).is_some_and(|known| known.uid != *uid) {
            self.gone(gateway, name);
        }
        let spec = match seen(kubernetes, pod) {
            Seen::Ready(spec) => *spec,
            Seen::NotReady => return self.set_ready(gateway, name, false),
            Seen::Ended => return self.gone(gateway, name),
            Seen::Wrong(message) => return self.tell(name, message),
        };
        if self.known.get(name).is_some_and(|known| known.spec != spec) {
            self.gone(gateway, name);
        }
        if self.known.contains_key(name) {
            return self.set_ready(gateway, name, true);
        }
        match gateway.add_worker(spec.clone()) {
            Ok(()) => {
                log::info!("worker {name}: a pod at {}", spec.url);
                self.told.remove(name);
                let known = Known {
                    uid: uid.clone(),
                    spec,
                    is_ready: true,
                };
                self.known.insert(name.to_owned(), known);
            }
            Err(message) => self.tell(name, message),
        }
    }

    fn set_ready(&mut self, gateway: &Gateway, name: &str, is_ready: bool) {
        let Some(known) = self.known.get_mut(name) else {
            return;
        };
        // What has been drained by hand stays so until its pod changes.
        if std::mem::replace(&mut known.is_ready, is_ready) != is_ready
            && gateway.fleet.set_draining(name, !is_ready)
        {
            match is_ready {
                true => log::info!("worker {name}: its pod is ready again"),
                false => {
                    log::info!("worker {name}: its pod is not ready, and gets no new requests")
                }
            }
        }
    }

    /// Says once what is wrong with a pod. One that is a worker stays one.
    fn tell(&mut self, name: &str, message: String) {
        if self.told.get(name) != Some(&message) {
            log::warn!("{message}");
            self.told.insert(name.to_owned(), message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(metadata: Value, status: Value) -> Pod {
        let pod = json!({"metadata": metadata, "status": status});
        serde_json::from_value(pod).expect("a pod")
    }

    fn ready(is: &str) -> Value {
        let conditions = json!([
            {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": is},
        ]);
        json!({"phase": "Running", "podIP": "10.0.0.7", "conditions": conditions})
    }

    fn seen_as(metadata: Value, status: Value) -> Seen {
        let kubernetes = json!({"selector": "app=sglang", "port": 30000});
        let kubernetes: Kubernetes = serde_json::from_value(kubernetes).expect("settings");
        seen(&kubernetes, &pod(metadata, status))
    }

    #[test]
    fn only_a_pod_that_is_ready_and_stays_is_a_worker() {
        let named = json!({"name": "w-0"});
        let Seen::Ready(spec) = seen_as(named.clone(), ready("True")) else {
            panic!("it is a worker");
        };
        assert_eq!((&*spec.id, &*spec.url), ("w-0", "http://10.0.0.7:30000"));
        assert_eq!(seen_as(named.clone(), ready("False")), Seen::NotReady);
        let pending = json!({"phase": "Pending"});
        assert_eq!(seen_as(named.clone(), pending), Seen::NotReady);
        let leaving = json!({"name": "w-0", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(seen_as(leaving, ready("True")), Seen::NotReady);
        let mut ended = ready("False");
        for phase in ["Succeeded", "Failed"] {
            ended["phase"] = phase.into();
            assert_eq!(seen_as(named.clone(), ended.clone()), Seen::Ended);
        }
    }

    #[test]
    fn labels_and_annotations_say_what_a_pod_is_and_annotations_count() {
        let metadata = json!({
            "name": "w-0",
            "labels": {"app": "sglang", "deltaserve/role": "prefill", "deltaserve/page_size": "16"},
            "annotations": {"deltaserve/bootstrap_port": "8998", "deltaserve/page_size": "64"},
        });
        let Seen::Ready(spec) = seen_as(metadata, ready("True")) else {
            panic!("it is a worker");
        };
        assert_eq!(spec.role, decision::policy::Role::Prefill);
        assert_eq!((spec.bootstrap_port, spec.page_size), (Some(8998), 64));
        let metadata = json!({"name": "w-0", "labels": {"deltaserve/role": "cook"}});
        let Seen::Wrong(message) = seen_as(metadata, ready("True")) else {
            panic!("there is no such role");
        };
        assert!(
            message.starts_with("pod w-0: deltaserve/role: unknown variant"),
            "{message}"
        );
    }
}
