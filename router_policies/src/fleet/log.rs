//! Decision and finish events: their shape, the recent ones kept for `/decisions`, and the file.
//!
//! Requests hand events over without waiting; a thread of its own serialises and writes them.

use super::Outcome;
use super::residency::sessions::Name;
use super::residency::{GiveUp, ResidencyRecord, WaitReason};
use crate::config::WorkerSpec;
use crate::policy::Reason;
use parking_lot::Mutex;
use serde::ser::{SerializeMap, SerializeStruct};
use serde::{Serialize, Serializer};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Decisions kept in memory.
const RECENT: usize = 1024;

pub type WorkerName = Arc<WorkerSpec>;

/// A route with the workers' names.
#[derive(Clone, Debug)]
pub enum NamedRoute {
    Local {
        worker: WorkerName,
    },
    PrefillDecode {
        prefill: WorkerName,
        decode: WorkerName,
    },
}

/// Where the knowledge of cached tokens came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixSource {
    Estimate,
    /// From the KV events of the worker that prefills.
    Events,
}

/// What a decision took from one worker.
#[derive(Clone, Debug)]
pub struct Reserved {
    pub worker: WorkerName,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
}

/// A decision event.
#[derive(Debug)]
pub struct DecisionRecord {
    pub decision_id: String,
    pub ts_unix_s: f64,
    pub request_id: String,
    pub session_id: Option<String>,
    pub policy: String,
    pub route: NamedRoute,
    pub reason: Reason,
    pub input_tokens: u64,
    pub new_tokens: u64,
    pub cached_tokens: Vec<(WorkerName, u64)>,
    pub prefix_source: PrefixSource,
    pub alternatives: Vec<(NamedRoute, f64)>,
    pub predicted_s: Option<f64>,
    pub reserved: Vec<Reserved>,
    pub decision_us: f64,
    pub residency: ResidencyRecord,
}

/// A finish event.
#[derive(Debug, Serialize)]
pub struct FinishRecord {
    pub decision_id: String,
    pub ts_unix_s: f64,
    pub outcome: Outcome,
    pub status: Option<u16>,
    /// From the decision; none where the answer came in one piece.
    pub first_token_s: Option<f64>,
    /// From the request's headers, as its client sees it: with its wait and its failed attempts.
    pub client_first_token_s: Option<f64>,
    pub duration_s: f64,
    pub output_chunks: u64,
    pub error: Option<String>,
    /// As the engine reported them, if it did.
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    /// What the router believed of the answering worker.
    pub believed_cached_tokens: u64,
    /// Tokens that the session had been served before and that were computed again; none where the
    /// engine did not say what was cached.
    pub recomputed_tokens: Option<u64>,
    /// The worker that answered; the decision event names it.
    #[serde(skip)]
    pub worker: WorkerName,
    /// The route's kind, and when its first token was expected, from the decision, by the rates that are
    /// learnt. The decision event has what its policy predicted.
    #[serde(skip)]
    pub kind: &'static str,
    #[serde(skip)]
    pub expected_first_token_s: f64,
}

/// A turn begins to wait for room.
#[derive(Debug, Serialize)]
pub struct WaitRecord {
    pub ts_unix_s: f64,
    pub request_id: String,
    pub session_id: Option<Name>,
    pub reason: WaitReason,
    /// Turns that wait, this one included.
    pub waiting: usize,
}

/// A session gives up its place on a worker.
#[derive(Debug, Serialize)]
pub struct GiveUpRecord {
    pub ts_unix_s: f64,
    #[serde(serialize_with = "id_of")]
    pub worker: WorkerName,
    pub session_id: Option<Name>,
    /// That it held, those of others too included.
    pub tokens: u64,
    /// That nobody holds any more.
    pub freed_tokens: u64,
    pub reason: GiveUp,
}

fn id_of<S: Serializer>(worker: &WorkerName, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&worker.id)
}

pub enum Event {
    Decision(Arc<DecisionRecord>),
    Finish(FinishRecord),
    Wait(WaitRecord),
    GiveUp(GiveUpRecord),
}

impl NamedRoute {
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        match self {
            Self::Local { worker } => {
                map.serialize_entry("kind", "local")?;
                map.serialize_entry("worker", &worker.id)
            }
            Self::PrefillDecode { prefill, decode } => {
                map.serialize_entry("kind", "prefill_decode")?;
                map.serialize_entry("prefill", &prefill.id)?;
                map.serialize_entry("decode", &decode.id)
            }
        }
    }
}

struct ByWorker<'a, T>(&'a [T], fn(&T) -> &WorkerName);

impl<T: Serialize> Serialize for ByWorker<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for item in self.0 {
            map.serialize_entry(&(self.1)(item).id, item)?;
        }
        map.end()
    }
}

impl Serialize for Reserved {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Reserved", 2)?;
        fields.serialize_field("prefill_tokens", &self.prefill_tokens)?;
        fields.serialize_field("decode_tokens", &self.decode_tokens)?;
        fields.end()
    }
}

struct Cached<'a>(&'a [(WorkerName, u64)]);

impl Serialize for Cached<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(worker, tokens)| (&worker.id, tokens)))
    }
}

struct Weighed<'a>(&'a (NamedRoute, f64));

impl Serialize for Weighed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.0.0.entries(&mut map)?;
        map.serialize_entry("predicted_s", &self.0.1)?;
        map.end()
    }
}

impl Serialize for DecisionRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let alternatives: Vec<_> = self.alternatives.iter().map(Weighed).collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("event", "decision")?;
        map.serialize_entry("decision_id", &self.decision_id)?;
        map.serialize_entry("ts_unix_s", &self.ts_unix_s)?;
        map.serialize_entry("request_id", &self.request_id)?;
        map.serialize_entry("session_id", &self.session_id)?;
        map.serialize_entry("policy", &self.policy)?;
        self.route.entries(&mut map)?;
        map.serialize_entry("reason", &self.reason)?;
        map.serialize_entry("input_tokens", &self.input_tokens)?;
        map.serialize_entry("new_tokens", &self.new_tokens)?;
        map.serialize_entry("cached_tokens", &Cached(&self.cached_tokens))?;
        map.serialize_entry("prefix_source", &self.prefix_source)?;
        map.serialize_entry("alternatives", &alternatives)?;
        map.serialize_entry("predicted_s", &self.predicted_s)?;
        map.serialize_entry("reserved", &ByWorker(&self.reserved, |r| &r.worker))?;
        map.serialize_entry("decision_us", &self.decision_us)?;
        map.serialize_entry("residency", &self.residency)?;
        map.end()
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Named<'a, T> {
            event: &'static str,
            #[serde(flatten)]
            record: &'a T,
        }
        fn named<S: Serializer, T: Serialize>(
            event: &'static str,
            record: &T,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            Named { event, record }.serialize(serializer)
        }
        match self {
            Self::Decision(record) => record.serialize(serializer),
            Self::Finish(record) => named("finish", record, serializer),
            Self::Wait(record) => named("wait", record, serializer),
            Self::GiveUp(record) => named("give_up", record, serializer),
        }
    }
}

thread_local! {
    static VIRTUAL_UNIX_S: Cell<Option<f64>> = const { Cell::new(None) };
}

/// From now on events that this thread logs are stamped with `now_s`, which a simulation's clock says,
/// in place of the machine's time; with none, with the machine's again.
pub fn set_virtual_unix_s(now_s: Option<f64>) {
    VIRTUAL_UNIX_S.set(now_s);
}

/// Seconds since the epoch.
pub fn unix_now_s() -> f64 {
    if let Some(now_s) = VIRTUAL_UNIX_S.get() {
        return now_s;
    }
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

type Observer = Box<dyn Fn(&Event) + Send + Sync>;

/// What the thread that writes is told.
enum Task {
    Write(Event),
    /// The file was moved away: what comes goes to a new one of its name.
    Reopen,
}

struct Writer {
    sender: mpsc::Sender<Task>,
    thread: std::thread::JoinHandle<()>,
}

/// Takes events: keeps the recent decisions, and writes all to a file if there is one.
pub struct EventSink {
    recent: Mutex<VecDeque<Arc<DecisionRecord>>>,
    writer: Option<Writer>,
    observer: Option<Observer>,
}

impl EventSink {
    /// A sink that only remembers.
    pub fn in_memory() -> Self {
        Self {
            recent: Mutex::new(VecDeque::with_capacity(RECENT)),
            writer: None,
            observer: None,
        }
    }

    /// A sink that also appends to `path`, one JSON object a line.
    ///
    /// # Errors
    /// The file cannot be opened; one line that names it.
    pub fn to_file(path: &Path) -> Result<Self, String> {
        let file =
            open(path).map_err(|error| format!("decision_log: {}: {error}", path.display()))?;
        let (sender, receiver) = mpsc::channel::<Task>();
        let path = path.to_owned();
        let thread = std::thread::Builder::new()
            .name("decision-log".to_owned())
            .spawn(move || {
                if let Err(error) = write_events(&receiver, BufWriter::new(file), &path) {
                    let shown = path.display();
                    ::log::error!("decision_log: {shown}: {error}; no more decisions are written");
                }
            })
            .map_err(|error| format!("decision_log: {error}"))?;
        let mut sink = Self::in_memory();
        sink.writer = Some(Writer { sender, thread });
        Ok(sink)
    }

    /// Calls `observe` on every event.
    #[must_use]
    pub fn observing(mut self, observe: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.observer = Some(Box::new(observe));
        self
    }

    pub fn send(&self, event: Event) {
        if let Event::Decision(record) = &event {
            let mut recent = self.recent.lock();
            if recent.len() == RECENT {
                recent.pop_front();
            }
            recent.push_back(Arc::clone(record));
        }
        if let Some(observe) = &self.observer {
            observe(&event);
        }
        if let Some(writer) = &self.writer {
            // The thread ends early only when the file cannot be written, which it has logged.
            let _ = writer.sender.send(Task::Write(event));
        }
    }

    /// Writes what comes from now on to a new file of the log's name, if that was moved away.
    pub fn reopen(&self) {
        if let Some(writer) = &self.writer {
            let _ = writer.sender.send(Task::Reopen);
        }
    }

    /// The last decisions, newest first.
    pub fn recent(&self, limit: usize) -> Vec<Arc<DecisionRecord>> {
        self.recent
            .lock()
            .iter()
            .rev()
            .take(limit)
            .cloned()
            .collect()
    }
}

impl Drop for EventSink {
    fn drop(&mut self) {
        if let Some(Writer { sender, thread }) = self.writer.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

fn open(path: &Path) -> std::io::Result<std::fs::File> {
    std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
}

fn write_events(
    receiver: &mpsc::Receiver<Task>,
    mut file: BufWriter<std::fs::File>,
    path: &Path,
) -> std::io::Result<()> {
    while let Ok(first) = receiver.recv() {
        let mut next = Some(first);
        while let Some(task) = next {
            match task {
                Task::Write(event) => {
                    serde_json::to_writer(&mut file, &event)?;
                    file.write_all(b"\n")?;
                }
                Task::Reopen => {
                    file.flush()?;
                    file = BufWriter::new(open(path)?);
                }
            }
            next = receiver.try_recv().ok();
        }
        file.flush()?;
    }
    Ok(())
}
