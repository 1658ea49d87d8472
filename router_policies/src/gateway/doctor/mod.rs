//! The cache doctor: where a session's prompt first differs from its last one, or a new session's from its nearest,
//! and how many tokens an engine computed again for it.
//!
//! Of a prompt that was answered the hashes of its blocks and parts are kept, and no text; of a difference at most
//! [`EXCERPT_BYTES`] of the new prompt. All of it is in memory alone. A turn that goes on from its session's last
//! one costs a look at what is new in it.

mod outline;

use super::apis::{Api, PromptKeys};
use super::body::Scanned;
use super::pictures::Counted;
use decision::fleet::log::FinishRecord;
use decision::fleet::prefix::hash::{PromptHashes, Unit};
use lru::LruCache;
use outline::{Part, Text, first_difference};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashMap;
use std::num::NonZeroUsize;

/// Of the text from where a difference may begin: more than a block, so that what differs is in it.
const EXCERPT_BYTES: usize = 80;
/// What is kept of prompts, in all: some 16 prompts of a million tokens, or thousands of usual ones.
const MAX_HELD_BYTES: usize = 64 << 20;
/// As many of the sessions that were served last may be a new one's nearest.
const NEAR: usize = 256;
/// Turns whose difference is kept, as many as decisions.
const FINDINGS: NonZeroUsize = NonZeroUsize::new(1024).expect("not 0");
/// Engines keep whole pages, and templates end a prompt otherwise than they go on behind it.
const SLACK_TOKENS: u64 = 64;

/// A session, of the tenant with that number.
type Whose = (u64, String);

#[derive(Default)]
pub(crate) struct Doctor(Mutex<Files>);

struct Files {
    last: LruCache<Whose, Served>,
    held_bytes: usize,
    /// By decision.
    running: HashMap<String, Running>,
    findings: LruCache<String, Finding>,
}

impl Default for Files {
    fn default() -> Self {
        Self {
            last: LruCache::unbounded(),
            held_bytes: 0,
            running: HashMap::new(),
            findings: LruCache::new(FINDINGS),
        }
    }
}

/// A prompt that an engine has answered.
struct Served {
    prompt: PromptHashes,
    parts: Vec<Part>,
    /// Of it, once they are known.
    tokens: Option<u64>,
    worker: String,
}

impl Served {
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.prompt.states.len() * size_of::<u64>()
            + self.parts.len() * size_of::<Part>()
    }

    /// Blocks that another prompt begins with too.
    fn common_blocks(&self, other: &PromptHashes) -> usize {
        let (own, others) = (&self.prompt.states, &other.states);
        if (self.prompt.unit, self.prompt.block) != (other.unit, other.block) {
            return 0;
        }
        if others.len() >= own.len() && own.last() == own.len().checked_sub(1).map(|at| &others[at])
        {
            return own.len();
        }
        let least = own.len().min(others.len());
        // Equal at a boundary means equal up to it.
        let (mut equal, mut beyond) = (0, least + 1);
        while beyond - equal > 1 {
            let middle = usize::midpoint(equal, beyond);
            match own[middle - 1] == others[middle - 1] {
                true => equal = middle,
                false => beyond = middle,
            }
        }
        equal
    }
}

/// The session beside which another's first turn is seen.
struct Nearest {
    session: String,
    /// Blocks with which both prompts begin.
    common: usize,
    parts: Vec<Part>,
}

/// A turn whose answer has begun.
struct Running {
    whose: Whose,
    expected: Expected,
    finding: Finding,
}

/// What of a prompt could have been cached.
enum Expected {
    Tokens(u64),
    /// Of its own length.
    Share(f64),
}

/// Why a prompt's tokens were computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Why {
    Changed,
    /// It has fewer messages: the conversation was made shorter.
    Compaction,
    /// It goes on from the last turn, whose KV the engine has no more.
    Evicted,
    /// The same, and the last turn was on another worker.
    Moved,
}

impl Why {
    pub fn word(self) -> &'static str {
        match self {
            Self::Changed => "changed",
            Self::Compaction => "compaction",
            Self::Evicted => "evicted",
            Self::Moved => "moved",
        }
    }
}

/// Why a turn's prompt was not cached as far as it could have been, and where it first differs, if it does.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    why: Why,
    /// The session beside which this is seen; none where that is its own last turn.
    beside: Option<String>,
    /// A key of the body, and which of the things under it.
    part: Option<&'static str>,
    index: Option<usize>,
    /// The role of a message, or a tool's name.
    name: Option<String>,
    /// In bytes of that part, or in tokens of a prompt of token ids: no difference stands before.
    offset: Option<usize>,
    /// The new prompt's, from there.
    text: Option<String>,
    /// Tokens of the prompt that the engine found in its cache.
    token: u64,
    /// That it computed and could have found there.
    lost_tokens: u64,
}

impl Finding {
    /// One without a difference.
    fn of(why: Why) -> Self {
        Self {
            why,
            beside: None,
            part: None,
            index: None,
            name: None,
            offset: None,
            text: None,
            token: 0,
            lost_tokens: 0,
        }
    }

    pub fn without_text(self) -> Self {
        Self { text: None, ..self }
    }
}

/// A turn whose answer begins.
pub(super) struct Turn<'a> {
    pub tenant: u64,
    pub session: &'a str,
    pub decision_id: &'a str,
    pub worker: &'a str,
    pub api: Api,
    pub body: &'a [u8],
    pub scanned: &'a Scanned,
    /// Of its token ids, or of its text as it stands in the body.
    pub prompt: PromptHashes,
    /// Of it, if that is known before the engine counts them.
    pub tokens: Option<u64>,
}

impl Doctor {
    /// Notes a turn's prompt and where it differs. What that cost is known when it [has ended](Self::ended).
    pub(super) fn began(&self, turn: Turn<'_>) {
        if turn.prompt.pictures > 0 || turn.scanned.previous_response.is_some() {
            return;
        }
        let whose = (turn.tenant, turn.session.to_owned());
        let text = Text {
            body: turn.body,
            places: &turn.scanned.places,
        };
        let (mut last, nearest) = {
            let mut files = self.0.lock();
            let last = files.pop(&whose);
            let nearest = last.is_none().then(|| files.nearest(&turn.prompt));
            (last, nearest.flatten())
        };
        let common = match (&last, &nearest) {
            (Some(last), _) => last.common_blocks(&turn.prompt),
            (None, Some(nearest)) => nearest.common,
            (None, None) => 0,
        };
        let same = common * turn.prompt.block;
        let goes_on = |it: &Served| common == it.prompt.states.len();
        let known = match (&mut last, &nearest) {
            // Nothing is compared.
            (Some(last), _) if goes_on(last) => std::mem::take(&mut last.parts),
            (Some(last), _) => last.parts.clone(),
            (None, Some(nearest)) => nearest.parts.clone(),
            (None, None) => Vec::new(),
        };
        let parts = match turn.scanned.is_conversation {
            true => text.outline(known, same),
            false => Vec::new(),
        };
        let beside_last = last.map(|last| {
            let difference =
                (!goes_on(&last)).then(|| turn.difference(text, &last.parts, &parts, same));
            let why = match last.worker == turn.worker {
                true => Why::Evicted,
                false => Why::Moved,
            };
            Running {
                whose: whose.clone(),
                expected: Expected::Tokens(last.tokens.unwrap_or(0)),
                finding: difference.flatten().unwrap_or_else(|| Finding::of(why)),
            }
        });
        let beside_nearest = || turn.beside_nearest(nearest?, text, &parts, &whose);
        let running = beside_last.or_else(beside_nearest);
        let mut files = self.0.lock();
        let running = running.unwrap_or_else(|| Running {
            whose: whose.clone(),
            expected: Expected::Tokens(0),
            finding: Finding::of(Why::Changed),
        });
        files.running.insert(turn.decision_id.to_owned(), running);
        files.keep(
            whose,
            Served {
                prompt: turn.prompt,
                parts,
                tokens: turn.tokens,
                worker: turn.worker.to_owned(),
            },
        );
    }

    /// What a turn's end says of its prompt: why tokens were lost and how many, if they were.
    pub(super) fn ended(&self, finish: &FinishRecord) -> Option<(Why, u64)> {
        let mut files = self.0.lock();
        let mut running = files.running.remove(&finish.decision_id)?;
        if let (Some(tokens), Some(served)) =
            (finish.prompt_tokens, files.last.peek_mut(&running.whose))
        {
            served.tokens = Some(tokens);
        }
        // Where the engine does not say, a difference that is known costs what the router believes.
        let believed = (running.finding.part.is_some()).then_some(finish.believed_cached_tokens);
        let cached = finish.cached_tokens.or(believed)?;
        let expected = match (running.expected, finish.prompt_tokens) {
            (Expected::Tokens(tokens), prompt) => tokens.min(prompt.unwrap_or(tokens)),
            (Expected::Share(share), prompt) => (prompt? as f64 * share) as u64,
        };
        let lost = expected.saturating_sub(cached);
        if lost <= SLACK_TOKENS.max(finish.worker.page_size as u64) {
            return None;
        }
        running.finding.token = cached;
        running.finding.lost_tokens = lost;
        let why = running.finding.why;
        let id = finish.decision_id.clone();
        files.findings.put(id, running.finding);
        Some((why, lost))
    }

    /// What the engine counted of a session's last prompt.
    pub(super) fn counted(&self, whose: &Whose) -> Option<Counted> {
        let files = self.0.lock();
        let last = files.last.peek(whose)?;
        Some(Counted::text(last.tokens?, last.prompt.length))
    }

    pub(super) fn finding(&self, decision_id: &str) -> Option<Finding> {
        self.0.lock().findings.peek(decision_id).cloned()
    }
}

impl Files {
    fn pop(&mut self, whose: &Whose) -> Option<Served> {
        let last = self.last.pop(whose)?;
        self.held_bytes -= last.bytes();
        Some(last)
    }

    fn keep(&mut self, whose: Whose, served: Served) {
        // Of two turns at once, the later one's.
        self.pop(&whose);
        self.held_bytes += served.bytes();
        self.last.push(whose, served);
        while self.held_bytes > MAX_HELD_BYTES
            && let Some((_, oldest)) = self.last.pop_lru()
        {
            self.held_bytes -= oldest.bytes();
        }
    }

    /// Of the sessions that were served last the one whose prompt has most in common with this one.
    fn nearest(&self, prompt: &PromptHashes) -> Option<Nearest> {
        let near = self.last.iter().take(NEAR);
        let near = near.map(|(whose, it)| (it.common_blocks(prompt), whose, it));
        let (common, whose, it) = near.max_by_key(|(common, ..)| *common)?;
        (common > 0).then(|| Nearest {
            session: whose.1.clone(),
            common,
            parts: it.parts.clone(),
        })
    }
}

impl Turn<'_> {
    /// A session's first turn beside its nearest. They may differ from the first message on, and not before.
    fn beside_nearest(
        &self,
        nearest: Nearest,
        text: Text<'_>,
        parts: &[Part],
        whose: &Whose,
    ) -> Option<Running> {
        let is_common = |part: &&Part| text.is_common(part);
        let shared_to = parts.iter().take_while(is_common).last()?.end;
        let whole = parts.last()?.end;
        let same = nearest.common * self.prompt.block;
        let (stands, _) = first_difference(&nearest.parts, parts)?;
        if stands.start >= shared_to {
            return None;
        }
        let mut finding = self.difference(text, &nearest.parts, parts, same)?;
        finding.why = Why::Changed;
        finding.beside = Some(nearest.session);
        Some(Running {
            whose: whose.clone(),
            expected: Expected::Share(shared_to as f64 / whole as f64),
            finding,
        })
    }

    /// Where the turn's prompt first differs from an earlier one, of whose text `same` units are the same.
    fn difference(
        &self,
        text: Text<'_>,
        before: &[Part],
        now: &[Part],
        same: usize,
    ) -> Option<Finding> {
        let PromptKeys::Conversation {
            before: keys,
            turns,
        } = self.api.shape().prompt
        else {
            let body = self.scanned.texts.first();
            let raw = body.and_then(|at| self.body.get(at.start + 1..at.end - 1));
            let raw = raw.filter(|_| self.prompt.unit == Unit::Bytes);
            return Some(Finding {
                part: Some("prompt"),
                offset: Some(same),
                text: raw.map(|raw| excerpt(raw, same)),
                ..Finding::of(Why::Changed)
            });
        };
        let (stands, gone) = first_difference(before, now)?;
        let part = gone.unwrap_or(stands);
        let is_turn = part.key == keys.len();
        let of_turns = |parts: &[Part]| parts.iter().filter(|it| it.key == keys.len()).count();
        let why = match is_turn && of_turns(now) < of_turns(before) {
            true => Why::Compaction,
            false => Why::Changed,
        };
        let mut finding = Finding {
            part: Some(keys.get(part.key).copied().unwrap_or(turns)),
            index: Some(part.index),
            ..Finding::of(why)
        };
        if gone.is_none() {
            let at = same.clamp(stands.start, stands.end) - stands.start;
            finding.name = text.name(&stands);
            finding.offset = Some(at);
            finding.text = Some(excerpt(text.raw(stands.start, stands.end), at));
        }
        Some(finding)
    }
}

/// What stands from `at` on.
fn excerpt(raw: &[u8], at: usize) -> String {
    let raw = String::from_utf8_lossy(raw);
    let mut begin = at.min(raw.len());
    while !raw.is_char_boundary(begin) {
        begin -= 1;
    }
    let mut end = (begin + EXCERPT_BYTES).min(raw.len());
    while !raw.is_char_boundary(end) {
        end -= 1;
    }
    raw[begin..end].to_owned()
}
