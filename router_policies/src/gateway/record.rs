//! `record`: a trace of what goes by, which `deltaserve replay` reads. It has times, lengths, who goes on from whom,
//! and prompts as hashes of their blocks; no text and no id. Each file has a random key of its own and stands alone.
//!
//! A trace is sorted by arrival, and a turn's length is known at its end: turns that came later are held until then.

use decision::fleet::log::{FinishRecord, older, unix_now_s};
use decision::fleet::prefix::hash::{PromptHashes, step};
use decision::fleet::{Outcome, Request};
use lru::LruCache;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Tokens a block, as in the traces that others publish.
const BLOCK_TOKENS: usize = 512;
/// Turns that are held for one that came earlier and runs; it is then left out.
const MAX_HELD: usize = 1 << 14;
/// Sessions whose turns are counted; one that is forgotten begins anew.
const SESSIONS: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not 0");
/// How often what has ended is written.
const WRITES_EVERY: Duration = Duration::from_millis(100);
/// Ids of blocks have so many bits: numbers that every reader of JSON keeps.
const ID_BITS: u32 = 53;

/// A session, of the tenant with that number.
type Whose = (u64, String);

pub(crate) struct Recorder {
    path: PathBuf,
    kept_bytes: u64,
    is_on: AtomicBool,
    turns: Mutex<Turns>,
    page: Mutex<Page>,
}

/// Turns that are not written yet.
#[derive(Default)]
struct Turns {
    came: u64,
    /// In the order in which they came; those that have ended, with what they came to.
    open: BTreeMap<u64, Option<Ended>>,
    /// By decision.
    running: HashMap<String, Asked>,
    ready: Vec<Ended>,
}

struct Asked {
    number: u64,
    at_s: f64,
    whose: Option<Whose>,
    parent: Option<Whose>,
    prompt: PromptHashes,
}

struct Ended {
    asked: Asked,
    at_s: f64,
    output_tokens: u64,
}

/// A request that is recorded if it is answered.
pub(super) struct Ticket {
    recorder: Arc<Recorder>,
    number: u64,
    asked: Option<Asked>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.asked.is_some() {
            self.recorder.turns.lock().settle(self.number, None);
        }
    }
}

impl Ticket {
    /// A worker answers.
    pub fn began(mut self, decision_id: &str) {
        if let Some(asked) = self.asked.take() {
            let mut turns = self.recorder.turns.lock();
            turns.running.insert(decision_id.to_owned(), asked);
        }
    }
}

impl Turns {
    /// A turn has ended, or comes to nothing.
    fn settle(&mut self, number: u64, ended: Option<Ended>) {
        match ended {
            None => drop(self.open.remove(&number)),
            // One that was left out is not there any more.
            Some(ended) => {
                if let Some(open) = self.open.get_mut(&number) {
                    *open = Some(ended);
                }
            }
        }
        while let Some(first) = self.open.first_entry()
            && (first.get().is_some() || self.open.len() > MAX_HELD)
            && let Some((_, ended)) = self.open.pop_first()
        {
            self.ready.extend(ended);
        }
    }
}

impl Recorder {
    /// Records to `path`, of whose file and the one before it so many bytes are kept.
    ///
    /// # Errors
    /// The file cannot be made; one line that names it.
    pub fn start(path: &Path, kept_bytes: u64) -> Result<Arc<Self>, String> {
        let page = Page::open(path).map_err(|error| format!("record: {}: {error}", path.display()));
        let recorder = Arc::new(Self {
            path: path.to_owned(),
            kept_bytes,
            is_on: AtomicBool::new(true),
            turns: Mutex::default(),
            page: Mutex::new(page?),
        });
        let watched = Arc::downgrade(&recorder);
        let writes = move || {
            while let Some(recorder) = watched.upgrade() {
                recorder.write();
                drop(recorder);
                std::thread::sleep(WRITES_EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("record".to_owned());
        thread
            .spawn(writes)
            .map_err(|error| format!("record: {error}"))?;
        Ok(recorder)
    }

    pub fn switch(&self, on: bool) {
        self.is_on.store(on, Ordering::Relaxed);
    }

    /// What there is to say of it.
    pub fn shown(&self) -> Value {
        let held = self.turns.lock().open.len();
        let page = self.page.lock();
        json!({
            "file": self.path, "on": self.is_on.load(Ordering::Relaxed), "requests": page.requests,
            "held": held, "error": page.error,
        })
    }

    /// A request has come, whole. Of several prompts or answers at once a trace has no word.
    pub(super) fn came(self: &Arc<Self>, request: &Request) -> Option<Ticket> {
        if !self.is_on.load(Ordering::Relaxed) || request.prompts != 1 || request.answers != 1 {
            return None;
        }
        let of = |name: &String| (request.tenant, name.clone());
        let prompt = request.prompt.thinned(BLOCK_TOKENS);
        let mut turns = self.turns.lock();
        turns.came += 1;
        let number = turns.came;
        turns.open.insert(number, None);
        let asked = Asked {
            number,
            at_s: unix_now_s(),
            whose: request.session_id.as_ref().map(of),
            parent: request.hints.parent_session.as_ref().map(of),
            prompt,
        };
        Some(Ticket {
            recorder: Arc::clone(self),
            number,
            asked: Some(asked),
        })
    }

    pub fn ended(&self, finish: &FinishRecord) {
        let mut turns = self.turns.lock();
        let Some(asked) = turns.running.remove(&finish.decision_id) else {
            return;
        };
        let output_tokens = finish.output_tokens.unwrap_or(finish.output_chunks).max(1);
        let (number, is_whole) = (asked.number, finish.outcome == Outcome::Ok);
        let ended = is_whole.then_some(Ended {
            asked,
            at_s: finish.ts_unix_s,
            output_tokens,
        });
        turns.settle(number, ended);
    }

    /// Writes what can be.
    pub fn write(&self) {
        let ready = std::mem::take(&mut self.turns.lock().ready);
        if ready.is_empty() {
            return;
        }
        let mut page = self.page.lock();
        if page.error.is_some() {
            return;
        }
        if let Err(error) = page.add(ready, &self.path, self.kept_bytes / 2) {
            log::error!(
                "record: {}: {error}; nothing more is recorded",
                self.path.display()
            );
            page.error = Some(error.to_string());
            self.switch(false);
        }
    }
}

/// A file, and what its lines have in common.
struct Page {
    file: File,
    bytes: u64,
    key: u64,
    began_s: Option<f64>,
    /// Of its last line, from there.
    last_s: f64,
    requests: u64,
    came: u64,
    sessions: LruCache<Whose, Known>,
    error: Option<String>,
}

/// A session of a file.
struct Known {
    number: u64,
    turns: u64,
    /// The number of its last request, and when that had ended.
    last: u64,
    ended_s: f64,
    /// The same of the sub-agent's turn that ended last, since then.
    of_agent: Option<(u64, f64)>,
}

#[derive(Serialize)]
struct Line {
    request_id: String,
    session_id: String,
    turn: u64,
    timestamp_s: f64,
    input_length: u64,
    output_length: u64,
    block_size: u64,
    hash_ids: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    think_time_s: Option<f64>,
}

impl Page {
    /// A new file; one that is there becomes the one before it.
    fn open(path: &Path) -> io::Result<Self> {
        if path.metadata().is_ok_and(|found| found.len() > 0) {
            std::fs::rename(path, older(path))?;
        }
        Ok(Self {
            file: OpenOptions::new().create(true).append(true).open(path)?,
            bytes: 0,
            key: random(),
            began_s: None,
            last_s: 0.0,
            requests: 0,
            came: 0,
            sessions: LruCache::new(SESSIONS),
            error: None,
        })
    }

    fn add(&mut self, ready: Vec<Ended>, path: &Path, most_bytes: u64) -> io::Result<()> {
        let mut lines = Vec::new();
        for ended in ready {
            let begin = lines.len();
            self.write_line(&mut lines, &ended)?;
            if self.bytes + lines.len() as u64 > most_bytes && self.bytes + begin as u64 > 0 {
                self.file.write_all(&lines[..begin])?;
                lines.clear();
                *self = Self::open(path)?;
                self.write_line(&mut lines, &ended)?;
            }
        }
        self.bytes += lines.len() as u64;
        self.file.write_all(&lines)
    }

    fn write_line(&mut self, lines: &mut Vec<u8>, ended: &Ended) -> io::Result<()> {
        serde_json::to_writer(&mut *lines, &self.line(ended))?;
        lines.push(b'\n');
        Ok(())
    }

    fn line(&mut self, ended: &Ended) -> Line {
        let asked = &ended.asked;
        self.requests += 1;
        let request = self.requests;
        let name = |number: u64| format!("r{number}");
        let parent = asked.parent.as_ref();
        let launcher = parent.and_then(|it| self.sessions.get_mut(it));
        let mut waits_for = launcher.map(|launcher| {
            let before_s = launcher.of_agent.map_or(0.0, |(_, ended_s)| ended_s);
            if ended.at_s > before_s {
                launcher.of_agent = Some((request, ended.at_s));
            }
            launcher.last
        });
        let mut known = Known {
            number: self.came,
            turns: 0,
            last: request,
            ended_s: ended.at_s,
            of_agent: None,
        };
        let mut think_time_s = None;
        match asked.whose.as_ref().and_then(|it| self.sessions.get(it)) {
            Some(before) => {
                // It goes on from its sub-agents' answers, if these came before it.
                let agent = before.of_agent;
                let agent =
                    agent.filter(|(_, ended_s)| (before.ended_s..asked.at_s).contains(ended_s));
                waits_for = agent.map(|(request, _)| request);
                let pause_s = asked.at_s - agent.map_or(before.ended_s, |(_, ended_s)| ended_s);
                think_time_s = (pause_s >= 0.0).then_some(round(pause_s));
                (known.number, known.turns) = (before.number, before.turns + 1);
                known.ended_s = ended.at_s.max(before.ended_s);
            }
            None => self.came += 1,
        }
        let turn = known.turns;
        let session_id = format!("s{}", known.number);
        if let Some(whose) = &asked.whose {
            self.sessions.put(whose.clone(), known);
        }
        let began_s = *self.began_s.get_or_insert(asked.at_s);
        // The machine's clock may have been set back.
        self.last_s = self.last_s.max(round(asked.at_s - began_s));
        let prompt = &asked.prompt;
        let input_length = prompt.tokens().max(1);
        let id = |state: u64| step(self.key, state) >> (u64::BITS - ID_BITS);
        let mut hash_ids: Vec<u64> = prompt.states.iter().map(|&state| id(state)).collect();
        // The last block has only begun, and is nobody else's.
        let block_size = prompt.to_tokens(prompt.block).max(1);
        let blocks = input_length.div_ceil(block_size) as usize;
        hash_ids.resize_with(blocks, || random() >> (u64::BITS - ID_BITS));
        Line {
            request_id: name(request),
            session_id,
            turn,
            timestamp_s: self.last_s,
            input_length,
            output_length: ended.output_tokens,
            block_size,
            hash_ids,
            parent_request_id: waits_for.map(name),
            think_time_s,
        }
    }
}

fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// To the microsecond.
fn round(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}
