//! Decision and finish events: their shape, the recent ones kept for `/decisions`, and the file.
//!
//! Requests hand events over without waiting; a thread of its own serialises and writes them.

use super::Outcome;
use super::admission::identity::Name;
use super::admission::queue::{WaitEnd, WaitReason, WhyRefused};
use super::admission::record::AdmissionRecord;
use super::admission::record::GiveUp;
use crate::model::WorkerSpec;
use crate::policy::{Cost, Reason};
use parking_lot::Mutex;
use serde::ser::{SerializeMap, SerializeStruct};
use serde::{Serialize, Serializer};
use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
    /// With the first-token time predicted for each.
    pub alternatives: Vec<(NamedRoute, f64, Option<Cost>)>,
    pub predicted_s: Option<f64>,
    pub cost: Option<Cost>,
    pub reserved: Vec<Reserved>,
    pub decision_us: f64,
    pub admission: AdmissionRecord,
    /// What became of it, once it has ended.
    pub ended: OnceLock<Ended>,
}

/// What a session's turn came to.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ended {
    pub outcome: Outcome,
    pub first_token_s: Option<f64>,
    pub duration_s: f64,
    /// As the engine reported them, if it did.
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub recomputed_tokens: Option<u64>,
}

/// A finish event.
#[derive(Debug, Serialize)]
pub struct FinishRecord {
    pub decision_id: String,
    pub session_id: Option<Name>,
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
    pub output_tokens: Option<u64>,
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

/// A turn waits no longer for room.
#[derive(Debug)]
pub struct WaitEndRecord {
    pub ts_unix_s: f64,
    pub request_id: String,
    pub session_id: Option<Name>,
    pub end: WaitEnd,
    /// In all, where its client left and came again.
    pub waited_s: f64,
}

impl WaitEnd {
    /// Its word, and why it was refused, if it was.
    pub fn told(self) -> (&'static str, Option<WhyRefused>) {
        match self {
            Self::LetIn => ("let_in", None),
            Self::Left => ("left", None),
            Self::Refused(why) => ("refused", Some(why)),
            Self::ServedElsewhere => ("served_elsewhere", None),
        }
    }
}

impl Serialize for WaitEndRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (end, reason) = self.end.told();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("event", "wait_end")?;
        map.serialize_entry("ts_unix_s", &self.ts_unix_s)?;
        map.serialize_entry("request_id", &self.request_id)?;
        map.serialize_entry("session_id", &self.session_id)?;
        map.serialize_entry("end", end)?;
        map.serialize_entry("reason", &reason)?;
        map.serialize_entry("waited_s", &self.waited_s)?;
        map.end()
    }
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

/// A worker begins to be overloaded, or is so no longer.
#[derive(Debug, Serialize)]
pub struct OverloadRecord {
    pub ts_unix_s: f64,
    #[serde(serialize_with = "id_of")]
    pub worker: WorkerName,
    pub overloaded: bool,
    /// Sessions that wait to enter its rotation.
    pub outside: u64,
    /// How long the last of them is expected to wait.
    pub expected_wait_s: f64,
}

fn id_of<S: Serializer>(worker: &WorkerName, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&worker.id)
}

pub enum Event {
    Decision(Arc<DecisionRecord>),
    Finish(FinishRecord),
    Wait(WaitRecord),
    WaitEnd(WaitEndRecord),
    GiveUp(GiveUpRecord),
    Overload(OverloadRecord),
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

struct Weighed<'a>(&'a (NamedRoute, f64, Option<Cost>));

impl Serialize for Weighed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.0.0.entries(&mut map)?;
        map.serialize_entry("predicted_s", &self.0.1)?;
        map.serialize_entry("cost", &self.0.2)?;
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
        map.serialize_entry("cost", &self.cost)?;
        map.serialize_entry("reserved", &ByWorker(&self.reserved, |r| &r.worker))?;
        map.serialize_entry("decision_us", &self.decision_us)?;
        map.serialize_entry("admission", &self.admission)?;
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
            Self::WaitEnd(record) => record.serialize(serializer),
            Self::GiveUp(record) => named("give_up", record, serializer),
            Self::Overload(record) => named("overload", record, serializer),
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
#[expect(
    clippy::large_enum_variant,
    reason = "nearly every task is an event, and a box would be an allocation for each"
)]
enum Task {
    Write(Event),
    /// The file was moved away: what comes goes to a new one of its name.
    Reopen,
}

struct Writer {
    sender: mpsc::Sender<Task>,
    thread: std::thread::JoinHandle<()>,
    /// Events that it has been told of and has not taken yet, and how many these may be.
    pending: Arc<AtomicUsize>,
    most_pending: usize,
    lost: Lost,
}

/// Told of events, so many at a time, that could not be written.
type Lost = Arc<dyn Fn(u64) + Send + Sync>;

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

    /// A sink that also appends to `path`, one JSON object a line. `lost` is told of events, so many
    /// at a time, that could not be written.
    ///
    /// # Errors
    /// The file cannot be opened; one line that names it.
    pub fn to_file(
        path: &Path,
        lost: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Self, String> {
        Self::to_bounded_file(path, None, lost)
    }

    /// The same, of which so many bytes are kept at most: when half of them are written, the file becomes
    /// `NAME.1.jsonl`, in the place of the one before, and a new one begins. With none, all are kept.
    ///
    /// # Errors
    /// The file cannot be opened; one line that names it.
    pub fn to_bounded_file(
        path: &Path,
        kept_bytes: Option<u64>,
        lost: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let lost: Lost = Arc::new(lost);
        let of_file = Arc::clone(&lost);
        let mut log = LogFile::open(path, kept_bytes, Box::new(move |events| of_file(events)))
            .map_err(|error| format!("decision_log: {}: {error}", path.display()))?;
        let (sender, receiver) = mpsc::channel::<Task>();
        let pending = Arc::<AtomicUsize>::default();
        let taken = Arc::clone(&pending);
        let thread = std::thread::Builder::new()
            .name("decision-log".to_owned())
            .spawn(move || log.follow(&receiver, &taken))
            .map_err(|error| format!("decision_log: {error}"))?;
        let mut sink = Self::in_memory();
        sink.writer = Some(Writer {
            sender,
            thread,
            pending,
            most_pending: usize::MAX,
            lost,
        });
        Ok(sink)
    }

    /// Of events that wait to be written it holds so many at most: a write to a disk that hangs fails only
    /// when that disk says so, and memory would run out before. What comes meanwhile is lost.
    #[must_use]
    pub fn holding_at_most(mut self, events: usize) -> Self {
        if let Some(writer) = &mut self.writer {
            writer.most_pending = events;
        }
        self
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
            if writer.pending.fetch_add(1, Ordering::Relaxed) >= writer.most_pending {
                writer.pending.fetch_sub(1, Ordering::Relaxed);
                return (writer.lost)(1);
            }
            // The thread ends when this sender does, not before.
            let _ = writer.sender.send(Task::Write(event));
        }
    }

    /// Writes what comes from now on to a new file of the log's name, if that was moved away.
    pub fn reopen(&self) {
        if let Some(writer) = &self.writer {
            let _ = writer.sender.send(Task::Reopen);
            writer.thread.thread().unpark();
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
        if let Some(Writer { sender, thread, .. }) = self.writer.take() {
            drop(sender);
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// How often the writing thread looks for events while some come.
const LOOKS_EVERY: Duration = Duration::from_millis(20);
/// After so long without one it waits until one comes.
const WAITS_AFTER: Duration = Duration::from_secs(10);

/// How long after it could not be written the file is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(10);

/// Serialised events are written in pieces of about this size, or when no other waits.
const PIECE_BYTES: usize = 1 << 16;

/// The file of a decision log. Where it cannot be written, as on a full disk, events are lost and
/// counted until it can be again; every line of it is whole.
struct LogFile {
    path: PathBuf,
    /// What it and the file before it may hold together.
    kept_bytes: Option<u64>,
    /// None while it cannot be written.
    file: Option<File>,
    tried: Instant,
    /// Lines that are to be written next, and how many events they are.
    piece: Vec<u8>,
    events: u64,
    /// Whether writing failed and has not worked again, and how many events were lost meanwhile.
    is_failing: bool,
    missing: u64,
    lost: Box<dyn Fn(u64) + Send>,
}

impl LogFile {
    fn open(
        path: &Path,
        kept_bytes: Option<u64>,
        lost: Box<dyn Fn(u64) + Send>,
    ) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            kept_bytes,
            file: Some(append_to(path)?),
            tried: Instant::now(),
            piece: Vec::new(),
            events: 0,
            is_failing: false,
            missing: 0,
            lost,
        })
    }

    /// Does what it is told until nobody is left to tell it anything. Whoever tells a thread that waits has to
    /// wake it, by a call to the kernel that takes as long as a decision: so while events come it looks for them
    /// now and then, and waits for one only after a while without any.
    fn follow(&mut self, tasks: &mpsc::Receiver<Task>, pending: &AtomicUsize) {
        while let Ok(task) = tasks.recv() {
            self.carry_out(task, pending);
            let mut last = Instant::now();
            while last.elapsed() < WAITS_AFTER {
                match tasks.try_recv() {
                    Ok(task) => {
                        self.carry_out(task, pending);
                        last = Instant::now();
                    }
                    Err(TryRecvError::Empty) => {
                        self.write();
                        std::thread::park_timeout(LOOKS_EVERY);
                    }
                    Err(TryRecvError::Disconnected) => break,
                }
            }
            self.write();
        }
    }

    fn carry_out(&mut self, task: Task, pending: &AtomicUsize) {
        match task {
            Task::Write(event) => {
                pending.fetch_sub(1, Ordering::Relaxed);
                self.take(&event);
            }
            Task::Reopen => {
                self.write();
                self.reopen();
            }
        }
    }

    fn take(&mut self, event: &impl Serialize) {
        let whole = self.piece.len();
        self.events += 1;
        if let Err(error) = serde_json::to_writer(&mut self.piece, event) {
            self.piece.truncate(whole);
            self.lose(1, &error.into());
            return;
        }
        self.piece.push(b'\n');
        if self.piece.len() >= PIECE_BYTES {
            self.write();
        }
    }

    /// Writes what was taken, or loses it.
    fn write(&mut self) {
        if self.events == 0 {
            return;
        }
        if self.file.is_none() && self.tried.elapsed() >= TRY_AGAIN {
            self.reopen();
        }
        if self.is_half_full() {
            self.begin_anew();
        }
        let written = match &mut self.file {
            Some(file) => append(file, &self.piece),
            None => Err(io::ErrorKind::NotFound.into()), // which has been told
        };
        self.piece.clear();
        if let Err(error) = written {
            if self.file.take().is_some() {
                self.tried = Instant::now();
            }
            return self.lose(self.events, &error);
        }
        self.events = 0;
        if std::mem::take(&mut self.is_failing) {
            let (shown, missing) = (self.path.display(), std::mem::take(&mut self.missing));
            ::log::warn!("decision_log: {shown}: written again; {missing} events are missing");
        }
    }

    /// Whether half of what is kept would be in the file with what is to be written next.
    fn is_half_full(&self) -> bool {
        let (Some(kept_bytes), Some(file)) = (self.kept_bytes, &self.file) else {
            return false;
        };
        let next = self.piece.len() as u64;
        // What is no file, such as a pipe, has no length.
        file.metadata().is_ok_and(|found| {
            found.is_file() && found.len() > 0 && found.len() + next > kept_bytes / 2
        })
    }

    /// Goes on in a new file; the one so far takes the place of the one before it. Where it cannot be renamed
    /// it grows on, which loses nothing.
    fn begin_anew(&mut self) {
        let older = older(&self.path);
        if let Err(error) = std::fs::rename(&self.path, &older)
            && error.kind() != io::ErrorKind::NotFound
        {
            return;
        }
        self.reopen();
    }

    /// From now on writes to the file that has the path's name, which is made where there is none.
    fn reopen(&mut self) {
        self.tried = Instant::now();
        self.file = match append_to(&self.path) {
            Ok(file) => Some(file),
            Err(error) => {
                self.complain(&error);
                None
            }
        };
    }

    fn lose(&mut self, events: u64, error: &io::Error) {
        self.complain(error);
        self.missing += events;
        self.events -= events;
        (self.lost)(events);
    }

    /// Says what is wrong, once until the file is written again.
    fn complain(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_failing, true) {
            let shown = self.path.display();
            ::log::error!("decision_log: {shown}: {error}; what happens now is not logged");
        }
    }
}

/// Where the lines before those of the log at `path` are.
pub fn older(path: &Path) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(".1");
    if let Some(suffix) = path.extension() {
        name.push(".");
        name.push(suffix);
    }
    path.with_file_name(name)
}

fn append_to(path: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
}

/// Appends all of `lines`, or nothing where the file is one that can be cut.
fn append(file: &mut File, lines: &[u8]) -> io::Result<()> {
    let before = file.metadata()?.len();
    file.write_all(lines).inspect_err(|_| {
        let _ = file.set_len(before);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn events_are_written_at_once_though_nobody_wakes_the_thread() {
        let folder = std::env::temp_dir().join(format!("log-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("d.jsonl");
        let sink = EventSink::to_file(&path, |_| {}).expect("a file");
        let lines = || {
            std::fs::read_to_string(&path)
                .expect("text")
                .lines()
                .count()
        };
        for count in 1..=3 {
            sink.send(waits(&count.to_string()));
            let begun = Instant::now();
            while lines() < count {
                assert!(begun.elapsed() < Duration::from_secs(10), "event {count}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let begun = Instant::now();
        drop(sink);
        assert!(begun.elapsed() < WAITS_AFTER, "the end wakes it");
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    fn waits(request_id: &str) -> Event {
        Event::Wait(WaitRecord {
            ts_unix_s: unix_now_s(),
            request_id: request_id.to_owned(),
            session_id: None,
            reason: WaitReason::NoRoom,
            waiting: 1,
        })
    }

    #[test]
    fn events_do_not_pile_up_behind_a_file_whose_writes_hang() {
        let path = std::env::temp_dir().join(format!("log-{:x}", fastrand::u64(..)));
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.expect("mkfifo").success());
        // Somebody holds the pipe and does not read: it takes 64 KiB.
        let mut pipe = std::fs::OpenOptions::new();
        let pipe = pipe.read(true).write(true).open(&path);
        let mut pipe = pipe.expect("a pipe");
        let lost = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&lost);
        let sink = EventSink::to_file(&path, move |events| {
            counter.fetch_add(events, Ordering::Relaxed);
        });
        let sink = sink.expect("a file").holding_at_most(1_000);
        for _ in 0..10_000 {
            sink.send(waits("one of many"));
        }
        let lost = lost.load(Ordering::Relaxed);
        std::thread::spawn(move || std::io::copy(&mut pipe, &mut std::io::sink()));
        drop(sink);
        std::fs::remove_file(&path).expect("removed");
        assert!((5_000..10_000).contains(&lost), "{lost} lost");
    }

    #[test]
    fn a_log_that_could_not_be_written_goes_on_with_whole_lines_once_it_can_be() {
        let folder = std::env::temp_dir().join(format!("log-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("d.jsonl");
        std::os::unix::fs::symlink("/dev/full", &path).expect("linked");
        let lost = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&lost);
        let count = move |events| {
            counter.fetch_add(events, Ordering::Relaxed);
        };
        let mut log = LogFile::open(&path, None, Box::new(count)).expect("opened");
        let write = |log: &mut LogFile, events: u64| {
            for event in 0..events {
                log.take(&event);
            }
            log.write();
            lost.load(Ordering::Relaxed)
        };
        assert_eq!(write(&mut log, 3), 3);
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(write(&mut log, 1), 4, "it is not tried at every event");
        assert!(!path.exists());
        log.tried -= TRY_AGAIN;
        assert_eq!(write(&mut log, 2), 4);
        assert_eq!(std::fs::read_to_string(&path).expect("text"), "0\n1\n");
        assert!(!log.is_failing);
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_bounded_log_keeps_the_newest_lines_in_two_files() {
        let folder = std::env::temp_dir().join(format!("log-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("d.jsonl");
        let read = |path: &Path| std::fs::read_to_string(path).expect("text");
        let mut log = LogFile::open(&path, Some(1_000), Box::new(|_| ())).expect("opened");
        let mut write = |numbers: std::ops::Range<u64>| {
            for number in numbers {
                log.take(&number);
                log.write();
            }
        };
        // Ten bytes a line, so 50 fill the half.
        write(100_000_000..100_000_050);
        assert!(
            !older(&path).exists(),
            "nothing is lost before it has to be"
        );
        write(100_000_050..100_000_120);
        let kept = read(&older(&path)) + &read(&path);
        let expected: Vec<_> = (100_000_050..100_000_120_u64)
            .map(|n| n.to_string())
            .collect();
        assert_eq!(kept.lines().collect::<Vec<_>>(), expected);
        // One that cannot be moved grows on.
        std::fs::remove_file(older(&path)).expect("removed");
        std::fs::create_dir(older(&path)).expect("in the way");
        write(100_000_120..100_000_200);
        assert_eq!(read(&path).lines().count(), 100);
        // One that was moved away by others is left to them.
        std::fs::remove_file(&path).expect("removed");
        write(100_000_200..100_000_201);
        assert_eq!(read(&path), "100000200\n");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
