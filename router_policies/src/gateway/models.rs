//! Which models, and LoRA adapters under names of their own, each worker serves: by its own list.
//!
//! A request goes to workers that list the model that it names. One that nobody lists goes anywhere: an
//! engine with one model may take any name, and one that does not says so better than a router can.

use super::Gateway;
use super::aliases::Aliases;
use super::apis::Api;
use crate::config::WorkerSpec;
use decision::fleet::Fleet;
use hyper::StatusCode;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

const PATH: &str = "/v1/models";
const PATIENCE: Duration = Duration::from_secs(10);

struct Model {
    name: String,
    /// A LoRA adapter: engines list it with the model that it belongs to as its `parent`.
    is_adapter: bool,
    /// Tokens of prompt and answer that it takes; none where it does not say.
    context: Option<u64>,
}

impl Model {
    fn of(entry: &Value) -> Option<Self> {
        Some(Self {
            name: entry["id"].as_str()?.to_owned(),
            is_adapter: !entry["parent"].is_null(),
            context: entry["max_model_len"].as_u64(),
        })
    }
}

struct Listed {
    spec: Arc<WorkerSpec>,
    models: Vec<Model>,
}

impl Listed {
    /// How much a request for `model` may take here: an adapter takes what its model takes, and an engine
    /// with one model may take any name.
    fn context(&self, model: Option<&str>) -> Option<u64> {
        let known = |of: &&Model| of.context.is_some();
        let named = self.models.iter().filter(known);
        let mut named = named.filter(|known| model == Some(known.name.as_str()));
        named.next().or(self.models.iter().find(known))?.context
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.models.iter().map(|model| &*model.name)
    }
}

/// What workers have listed, by their ids.
pub(crate) struct Models {
    listed: Mutex<BTreeMap<String, Listed>>,
    /// Not all list the same.
    differ: AtomicBool,
    /// Some list adapters.
    has_adapters: AtomicBool,
    /// The shortest context of all; `u64::MAX` where none is known.
    shortest: AtomicU64,
}

impl Default for Models {
    fn default() -> Self {
        Self {
            listed: Mutex::default(),
            differ: AtomicBool::default(),
            has_adapters: AtomicBool::default(),
            shortest: AtomicU64::new(u64::MAX),
        }
    }
}

impl Models {
    /// Asks a worker that is up for its list. One that cuts prompts that are too long takes any.
    pub async fn learn(&self, gateway: &Gateway, spec: &Arc<WorkerSpec>, cuts_prompts: bool) {
        if let Ok((status, body)) = gateway.get(spec, PATH, PATIENCE).await
            && status.is_success()
            && let Ok(list) = serde_json::from_slice::<Value>(&body)
        {
            let mut models: Vec<_> = entries(&list).iter().filter_map(Model::of).collect();
            if cuts_prompts {
                models.iter_mut().for_each(|model| model.context = None);
            }
            let spec = Arc::clone(spec);
            let mut listed = self.listed.lock();
            listed.insert(spec.id.clone(), Listed { spec, models });
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
        let mut all = listed.values();
        let first = all.next();
        let differ = all.any(|known| first.is_some_and(|first| !known.names().eq(first.names())));
        self.differ.store(differ, Ordering::Relaxed);
        let mut models = listed.values().flat_map(|known| &known.models);
        let has_adapters = models.any(|model| model.is_adapter);
        self.has_adapters.store(has_adapters, Ordering::Relaxed);
        let models = listed.values().flat_map(|known| &known.models);
        let shortest = models.filter_map(|model| model.context).min();
        self.shortest
            .store(shortest.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// What every model takes that says how much: a request of fewer tokens need not be looked at.
    pub fn shortest_context(&self) -> u64 {
        self.shortest.load(Ordering::Relaxed)
    }

    /// How many tokens of prompt and answer a request for `model` may have at most; none where a worker
    /// that may serve it does not say.
    pub fn context(&self, model: Option<&str>, fleet: &Fleet) -> Option<u64> {
        let excluded = self.not_serving(model);
        let listed = self.listed.lock();
        let workers = fleet.snapshot().into_iter();
        let may_serve = workers.filter(|worker| !excluded.contains(&worker.spec.id));
        let mut contexts = may_serve.map(|worker| listed.get(&worker.spec.id)?.context(model));
        contexts.try_fold(None, |longest, context| Some(longest.max(Some(context?))))?
    }

    /// The names that a worker lists.
    pub fn of(&self, worker: &str) -> Vec<String> {
        let listed = self.listed.lock();
        let names = listed.get(worker).into_iter().flat_map(Listed::names);
        names.map(str::to_owned).collect()
    }

    /// How much a worker's first model takes.
    pub fn context_of(&self, worker: &str) -> Option<u64> {
        self.listed.lock().get(worker)?.context(None)
    }

    /// Whether it matters which model a request names.
    pub fn differ(&self) -> bool {
        self.differ.load(Ordering::Relaxed)
    }

    /// The adapter that a request for `model` is served with, if it is.
    pub fn adapter(&self, model: &str) -> Option<String> {
        let parts = parts(model);
        // Most names are those of models, and nothing has to be looked up then.
        if parts.is_none() && !self.has_adapters.load(Ordering::Relaxed) {
            return None;
        }
        let listed = self.listed.lock();
        let mut models = listed.values().flat_map(|known| &known.models);
        match models.find(|known| known.name == model) {
            Some(known) => known.is_adapter.then(|| model.to_owned()),
            None => parts.map(|(_, adapter)| adapter.to_owned()),
        }
    }

    /// Whether workers list models, and none lists this one or what it is an adapter of.
    pub fn is_unknown(&self, model: &str) -> bool {
        let (base, adapter) = parts(model).unwrap_or((model, model));
        let listed = self.listed.lock();
        let mut names = listed.values().flat_map(Listed::names).peekable();
        names.peek().is_some() && names.all(|name| ![model, base, adapter].contains(&name))
    }

    /// Ids of the workers that do not serve `model` while others do.
    pub fn not_serving(&self, model: Option<&str>) -> Vec<String> {
        let Some(model) = model.filter(|_| self.differ()) else {
            return Vec::new();
        };
        let (base, adapter) = parts(model).unwrap_or((model, model));
        let listed = self.listed.lock();
        for name in [model, adapter, base] {
            let (serving, others): (Vec<_>, Vec<_>) = listed
                .iter()
                .partition(|(_, known)| known.names().any(|listed| listed == name));
            if !serving.is_empty() {
                return others.into_iter().map(|(id, _)| id.clone()).collect();
            }
        }
        Vec::new()
    }
}

/// A model and its adapter, in one name as SGLang (0.5.17) takes it.
fn parts(model: &str) -> Option<(&str, &str)> {
    model.rsplit_once(':')
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
    add_aliases(&mut all, &gateway.aliases);
    Ok(all)
}

/// As clients of `api` are told that there is no such model.
pub(super) fn unknown(api: Api, model: &str) -> Value {
    match api {
        Api::Messages => (api.shape().error)("not_found_error", 404, &format!("model: {model}")),
        _ => json!({"error": {
            "message": format!("The model `{model}` does not exist or you do not have access to it."),
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }}),
    }
}

/// Adds the names that stand for models to their list, each as the model that it stands for.
fn add_aliases(list: &mut Value, aliases: &Aliases) {
    for (name, model) in aliases.all() {
        let is_new = entry(list, name).is_none();
        let Some(mut of_model) = entry(list, model).filter(|_| is_new).cloned() else {
            continue;
        };
        of_model["id"] = name.into();
        of_model["root"] = model.into();
        if let Some(data) = list["data"].as_array_mut() {
            data.push(of_model);
        }
    }
}

/// One model of the merged list.
pub(super) fn entry<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    entries(list).iter().find(|entry| entry["id"] == *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of adapters begin with a plus sign.
    fn models(lists: &[(&str, &[&str])]) -> Models {
        let models = Models::default();
        let mut listed = models.listed.lock();
        for (id, names) in lists {
            let spec = json!({"id": id, "url": format!("http://{id}:1")});
            let spec = Arc::new(serde_json::from_value(spec).expect("a worker"));
            let models = names.iter().map(|name| Model {
                name: name.trim_start_matches('+').to_owned(),
                is_adapter: name.starts_with('+'),
                context: None,
            });
            let models = models.collect();
            listed.insert((*id).to_owned(), Listed { spec, models });
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
    fn an_adapter_is_known_by_its_list_or_by_the_models_name_in_front() {
        let known = models(&[("a", &["m"]), ("b", &["m", "+sql", "base:tagged"])]);
        let adapter = |model| known.adapter(model);
        assert_eq!(adapter("m"), None);
        assert_eq!(adapter("sql").as_deref(), Some("sql"));
        assert_eq!(adapter("m:sql").as_deref(), Some("sql"));
        assert_eq!(adapter("m:loaded-later").as_deref(), Some("loaded-later"));
        assert_eq!(adapter("base:tagged"), None, "a model's whole name");
        assert_eq!(adapter("unheard-of"), None);
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
