//! Which models, and LoRA adapters under names of their own, each worker serves: by its own list.
//!
//! A request goes to workers that list the model that it names. One that nobody lists goes anywhere: an
//! engine with one model may take any name, and one that does not says so better than a router can.

use super::Gateway;
use crate::config::WorkerSpec;
use hyper::StatusCode;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

const PATH: &str = "/v1/models";
const PATIENCE: Duration = Duration::from_secs(10);

struct Listed {
    spec: Arc<WorkerSpec>,
    names: Vec<String>,
}

/// What workers have listed, by their ids.
#[derive(Default)]
pub(crate) struct Models {
    listed: Mutex<BTreeMap<String, Listed>>,
    /// Not all list the same.
    differ: AtomicBool,
}

impl Models {
    /// Asks a worker that is up for its list.
    pub async fn learn(&self, gateway: &Gateway, spec: &Arc<WorkerSpec>) {
        if let Ok((status, body)) = gateway.get(spec, PATH, PATIENCE).await
            && status.is_success()
            && let Ok(list) = serde_json::from_slice::<Value>(&body)
        {
            let ids = entries(&list)
                .iter()
                .filter_map(|entry| entry["id"].as_str());
            let names: Vec<String> = ids.map(str::to_owned).collect();
            let spec = Arc::clone(spec);
            let mut listed = self.listed.lock();
            listed.insert(spec.id.clone(), Listed { spec, names });
            self.compare(&listed);
        }
    }

    /// A registration has left the fleet.
    pub fn forget(&self, spec: &Arc<WorkerSpec>) {
        let mut listed = self.listed.lock();
        if listed
            .get(&spec.id)
            .is_some_and(|known| Arc::ptr_eq(&known.spec, spec))
        {
            listed.remove(&spec.id);
            self.compare(&listed);
        }
    }

    fn compare(&self, listed: &BTreeMap<String, Listed>) {
        let mut names = listed.values().map(|known| &known.names);
        let first = names.next();
        let differ = names.any(|names| Some(names) != first);
        self.differ.store(differ, Ordering::Relaxed);
    }

    /// Whether it matters which model a request names.
    pub fn differ(&self) -> bool {
        self.differ.load(Ordering::Relaxed)
    }

    /// Ids of the workers that do not serve `model` while others do.
    pub fn not_serving(&self, model: Option<&str>) -> Vec<String> {
        let Some(model) = model.filter(|_| self.differ()) else {
            return Vec::new();
        };
        // SGLang (0.5.17) takes an adapter's name behind that of its model.
        let (base, adapter) = model.rsplit_once(':').unwrap_or((model, model));
        let listed = self.listed.lock();
        for name in [model, adapter, base] {
            let (serving, others): (Vec<_>, Vec<_>) = listed
                .iter()
                .partition(|(_, known)| known.names.iter().any(|listed| listed == name));
            if !serving.is_empty() {
                return others.into_iter().map(|(id, _)| id.clone()).collect();
            }
        }
        Vec::new()
    }
}

fn entries(list: &Value) -> &[Value] {
    list["data"].as_array().map_or(&[][..], Vec::as_slice)
}

/// The lists of all workers that are up, as one: what several list, as the first of them does.
///
/// # Errors
/// Why nobody answered, with the status of the last that did.
pub(super) async fn merged(gateway: &Arc<Gateway>) -> Result<Value, (StatusCode, String)> {
    let mut asked = JoinSet::new();
    let up = gateway.fleet.snapshot().into_iter().filter(|w| w.healthy);
    for (at, worker) in up.enumerate() {
        let gateway = Arc::clone(gateway);
        asked.spawn(async move {
            let answer = gateway.get(&worker.spec, PATH, PATIENCE).await;
            (at, worker.spec, answer)
        });
    }
    let mut lists: BTreeMap<usize, Value> = BTreeMap::new();
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    let mut last = (unavailable, "no worker is up".to_owned());
    while let Some(answered) = asked.join_next().await {
        let Ok((at, spec, answer)) = answered else {
            continue;
        };
        match answer {
            Ok((status, body)) if status.is_success() => {
                if let Ok(list) = serde_json::from_slice(&body) {
                    lists.insert(at, list);
                }
            }
            Ok((status, _)) => last = (status, format!("worker {}: HTTP {status}", spec.id)),
            Err(failure) => last = (unavailable, format!("worker {}: {failure}", spec.id)),
        }
    }
    let mut lists = lists.into_values();
    let mut all = lists.next().ok_or(last)?;
    for list in lists {
        for entry in entries(&list) {
            let is_new = !entries(&all).iter().any(|known| known["id"] == entry["id"]);
            if let Some(data) = all["data"].as_array_mut().filter(|_| is_new) {
                data.push(entry.clone());
            }
        }
    }
    Ok(all)
}

/// One model of the merged list.
pub(super) fn entry<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    entries(list).iter().find(|entry| entry["id"] == *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn models(lists: &[(&str, &[&str])]) -> Models {
        let models = Models::default();
        let mut listed = models.listed.lock();
        for (id, names) in lists {
            let spec = json!({"id": id, "url": format!("http://{id}:1")});
            let spec = Arc::new(serde_json::from_value(spec).expect("a worker"));
            let names = names.iter().map(|&name| name.to_owned()).collect();
            listed.insert((*id).to_owned(), Listed { spec, names });
        }
        models.compare(&listed);
        drop(listed);
        models
    }

    #[test]
    fn a_model_goes_to_those_that_list_it() {
        let known = models(&[("a", &["m"]), ("b", &["m", "sql"]), ("c", &["other"])]);
        let not_serving = |model| known.not_serving(Some(model));
        assert_eq!(not_serving("m"), ["c"]);
        assert_eq!(not_serving("sql"), ["a", "c"]);
        assert_eq!(not_serving("m:sql"), ["a", "c"], "as SGLang names adapters");
        assert_eq!(not_serving("m:unheard-of"), ["c"]);
        assert!(not_serving("unheard-of").is_empty(), "an engine says so");
        assert!(known.not_serving(None).is_empty());
        let same = models(&[("a", &["m"]), ("b", &["m"])]);
        assert!(same.not_serving(Some("x")).is_empty());
    }

    #[test]
    fn what_has_left_counts_no_more() {
        let known = models(&[("a", &["m"]), ("b", &["other"])]);
        let spec = Arc::clone(&known.listed.lock()["b"].spec);
        known.forget(&Arc::new((*spec).clone()));
        assert_eq!(
            known.not_serving(Some("other")),
            ["a"],
            "another registration"
        );
        known.forget(&spec);
        assert!(known.not_serving(Some("other")).is_empty());
    }
}
