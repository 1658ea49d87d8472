//! What the router found out of its workers, said once at the start: what each is, what is known of it, what each
//! missing thing costs, and the flag that gives it.
//!
//! A worker that speaks vLLM where nobody said so is entered again as what it is. Where all workers name the same
//! folder of a model and it is on this machine, its tokenizer and chat template are read from there.

use super::apis::Api;
use super::encoder::PromptEncoder;
use super::engine_info::{self, EngineInfo};
use super::sglang_tools::Release;
use super::{FIRST_CHECKS, Gateway};
use crate::config::{Engine, WorkerSpec};
use decision::fleet::WorkerSnapshot;
use decision::policy::Role;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// How often it is looked whether all workers have been asked.
const LOOK: Duration = Duration::from_millis(50);

/// What workers said of themselves, by their ids.
#[derive(Default)]
pub(crate) struct Found {
    workers: Mutex<BTreeMap<String, Said>>,
    /// The first block has been written.
    is_told: AtomicBool,
    /// All that have been asked speak vLLM.
    is_all_vllm: AtomicBool,
    /// The oldest release of those that speak SGLang and may share requests.
    oldest: Mutex<Option<Release>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Said {
    engine: Engine,
    /// It has said so.
    is_known: bool,
    version: Option<String>,
    release: Option<Release>,
    /// It may prefill for others, or have others prefill for it.
    is_sharing: bool,
    /// Of the model, as the engine names it.
    folder: Option<String>,
    ranks: u64,
    kv_events: Option<String>,
}

/// What a worker is that was entered as SGLang, where that is something else that is known.
pub(super) async fn other_engine(gateway: &Gateway, spec: &WorkerSpec) -> Option<Engine> {
    if spec.engine != Engine::Sglang {
        return None;
    }
    (engine_info::owner(gateway, spec).await.as_deref() == Some("vllm")).then_some(Engine::Vllm)
}

/// Enters a worker again as what it is; false where its settings do not allow that.
pub(super) fn enter_again(gateway: &Arc<Gateway>, spec: &WorkerSpec, engine: Engine) -> bool {
    let again = WorkerSpec {
        engine,
        ..spec.clone()
    };
    let again = match again.normalise() {
        Ok(again) => again,
        Err(message) => {
            log::warn!("{message}; it says that it is {engine:?}");
            return false;
        }
    };
    let workers = gateway.fleet.snapshot();
    let mut same = workers.iter().filter(|worker| worker.spec.id == spec.id);
    let is_draining = same.any(|worker| worker.draining);
    gateway.fleet.remove_worker(&spec.id);
    match gateway.add_worker(again) {
        Ok(()) => {
            gateway.fleet.set_draining(&spec.id, is_draining);
            true
        }
        Err(message) => {
            log::warn!("{message}");
            false
        }
    }
}

/// Takes note of a worker that has come up.
pub(super) async fn learn(gateway: &Arc<Gateway>, spec: &WorkerSpec, info: &EngineInfo) {
    let folder = match &info.folder {
        Some(folder) => Some(folder.clone()),
        None => engine_info::root(gateway, spec).await,
    };
    let is_known = info.run.is_some() || info.kv_capacity_tokens.is_some();
    let said = Said {
        engine: spec.engine,
        is_known,
        version: match spec.engine {
            Engine::Sglang => info.version.clone(),
            Engine::Vllm => engine_info::version(gateway, spec).await,
        },
        release: info.release,
        is_sharing: spec.role != Role::Colocated,
        folder,
        ranks: info.ranks,
        kv_events: info.kv_events.clone(),
    };
    let known = gateway.found.note(&spec.id, said.clone());
    if gateway.config.tokenizer.is_none() {
        choose_tokenizer(gateway).await;
    }
    let is_news = known.as_ref() != Some(&said);
    if gateway.found.is_told.load(Ordering::Relaxed) && is_news {
        let workers = gateway.fleet.snapshot();
        if let Some(worker) = workers.iter().find(|worker| worker.spec.id == spec.id) {
            log::info!("{}", gateway.found.told(gateway, worker));
        }
    }
}

/// Has prompts encoded with the tokenizer of the folder that all workers name, if it is on this machine.
async fn choose_tokenizer(gateway: &Arc<Gateway>) {
    let folder = gateway.found.one_folder();
    let folder = folder.filter(|folder| folder.join("tokenizer.json").is_file());
    let Some(folder) = folder else {
        *gateway.encoder.write() = None;
        return;
    };
    if gateway.encoder.read().is_some() {
        return;
    }
    let at_once = gateway.config.threads.div_ceil(2);
    let first = gateway.fleet.snapshot().into_iter().next();
    let engine = first.map_or(Engine::Sglang, |first| first.spec.engine);
    let loading =
        tokio::task::spawn_blocking(move || PromptEncoder::load(&folder, at_once, engine));
    match loading.await {
        Ok(Ok(encoder)) => *gateway.encoder.write() = Some(encoder),
        Ok(Err(message)) => log::warn!("{message}"),
        Err(failure) => log::warn!("tokenizer: {failure}"),
    }
}

/// Says what was found once every worker has been asked, or some time after the start.
pub(super) async fn announce(gateway: Weak<Gateway>) {
    let until = Instant::now() + FIRST_CHECKS;
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        if Arc::strong_count(&gateway.unasked) > 1 && Instant::now() < until {
            continue;
        }
        gateway.found.is_told.store(true, Ordering::Relaxed);
        let workers = gateway.fleet.snapshot();
        let told = workers
            .iter()
            .map(|worker| gateway.found.told(&gateway, worker));
        let told: Vec<_> = told.collect();
        if !told.is_empty() {
            log::info!("what was found\n{}", told.join("\n"));
        }
        return;
    }
}

impl Found {
    fn note(&self, id: &str, said: Said) -> Option<Said> {
        let mut workers = self.workers.lock();
        let known = workers.insert(id.to_owned(), said);
        self.sum_up(&workers);
        known
    }

    fn sum_up(&self, workers: &BTreeMap<String, Said>) {
        let is_all_vllm = workers.values().all(|said| said.engine == Engine::Vllm);
        self.is_all_vllm.store(is_all_vllm, Ordering::Relaxed);
        let is_sharing = |said: &&Said| said.is_sharing && said.engine == Engine::Sglang;
        let sharing = workers.values().filter(is_sharing);
        let releases = sharing.map(|said| said.release.unwrap_or(Release::OLDEST));
        *self.oldest.lock() = releases.min();
    }

    /// Whether all workers that have been asked can share a request of this API.
    pub fn can_share(&self, api: Api) -> bool {
        let first = api.shape().separates;
        let is_new = |oldest: Release| oldest >= first;
        first == Release::OLDEST || self.oldest.lock().is_none_or(is_new)
    }

    /// Whether all workers that have been asked speak vLLM, and some have been.
    pub fn is_all_vllm(&self) -> bool {
        self.is_all_vllm.load(Ordering::Relaxed)
    }

    /// The folder that all workers name which have been asked.
    fn one_folder(&self) -> Option<PathBuf> {
        let workers = self.workers.lock();
        let mut folders = workers.values().map(|said| said.folder.as_deref());
        let first = folders.next()??;
        folders
            .all(|folder| folder == Some(first))
            .then(|| Path::new(first).to_owned())
    }

    /// A worker has left the fleet.
    pub fn forget(&self, id: &str) {
        let mut workers = self.workers.lock();
        workers.remove(id);
        self.sum_up(&workers);
    }

    /// What is known of a worker, a line, and what is missing, a line each.
    fn told(&self, gateway: &Gateway, worker: &WorkerSnapshot) -> String {
        let spec = &worker.spec;
        let (id, url) = (&spec.id, &spec.url);
        let Some(said) = self.workers.lock().get(id).cloned() else {
            return format!("worker {id}: {url} does not answer yet");
        };
        let name = match (said.is_known, said.engine) {
            (false, _) => "an engine that is not known",
            (true, Engine::Sglang) => "SGLang",
            (true, Engine::Vllm) => "vLLM",
        };
        let mut known = match &said.version {
            Some(version) => format!("{name} {version}"),
            None => name.to_owned(),
        };
        let mut missing = Vec::new();
        let mut note = |fact: Option<String>, lack: String| match fact {
            Some(fact) => {
                let _ = write!(known, ", {fact}");
            }
            None => missing.push(lack),
        };
        let models = gateway.models.of(id);
        note(
            (!models.is_empty()).then(|| format!("model {}", models.join(", "))),
            "model: none is listed by /v1/models".to_owned(),
        );
        let capacity = worker.kv_capacity_tokens.map(|tokens| match said.ranks {
            0 | 1 => format!("KV cache of {tokens} tokens"),
            ranks => format!("KV cache of {tokens} tokens in {ranks} data-parallel ranks"),
        });
        note(
            capacity,
            format!(
                "KV capacity: nobody ever waits for it, so that more may be sent than fits; --worker {url},kv_capacity_tokens=N"
            ),
        );
        note(
            gateway.models.context_of(id).map(|tokens| format!("context of {tokens} tokens")),
            "context length: prompts that are too long are refused by the engine, after they have waited".to_owned(),
        );
        let encoder = gateway.encoder.read().clone();
        let tokenizer = encoder
            .as_ref()
            .map(|encoder| match encoder.reads_conversations() {
                true => "tokenizer and chat template",
                false => "tokenizer",
            });
        note(
            tokenizer.map(str::to_owned),
            "tokenizer: texts are counted by their bytes, and cached prefixes guessed; --tokenizer FOLDER".to_owned(),
        );
        if encoder.is_some_and(|encoder| !encoder.reads_conversations()) {
            note(
                None,
                "chat template: conversations are counted by their bytes; put chat_template.jinja beside the tokenizer".to_owned(),
            );
        }
        let published = said.kv_events.as_deref().map_or_else(
            || "tcp://HOST:PORT, once the engine has --kv-events-config".to_owned(),
            |endpoint| endpoint.replace('*', spec.host()),
        );
        note(
            spec.kv_events
                .as_ref()
                .map(|endpoint| format!("KV events from {endpoint}")),
            format!(
                "KV events: what it has cached is estimated; --worker {url},kv_events={published}"
            ),
        );
        let mut text = format!("worker {id}: {known}");
        for lack in missing {
            let _ = write!(text, "\n  missing: {lack}");
        }
        text
    }
}

/// The data-parallel ranks that SGLang says it has, and the endpoint of its KV events.
pub(super) fn in_server_info(info: &Value) -> (u64, Option<String>) {
    let ranks = info.get("dp_size").and_then(Value::as_u64).unwrap_or(1);
    let config = info.get("kv_events_config").and_then(Value::as_str);
    let config = config.and_then(|text| serde_json::from_str::<Value>(text).ok());
    let is_zmq = |config: &Value| config.get("publisher").is_some_and(|it| it == "zmq");
    let config = config.filter(is_zmq);
    let endpoint = config.map(|config| {
        let endpoint = config.get("endpoint").and_then(Value::as_str);
        endpoint.unwrap_or("tcp://*:5557").to_owned()
    });
    (ranks.max(1), endpoint)
}
