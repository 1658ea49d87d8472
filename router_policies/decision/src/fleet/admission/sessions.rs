//! What is known of every session, whether it is in or not: how it thinks, what it
//! was served before, and, where requests name no session, which family of prompts they belong to.

use super::footprint::Coarse;
use super::gaps::Gaps;
use super::identity::Key;
use crate::fleet::prefix::hash::step;
use lru::LruCache;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::num::NonZeroUsize;

/// Sessions, and families' prompts, that are remembered; the least recently seen are forgotten.
const KNOWN: NonZeroUsize = NonZeroUsize::new(1 << 17).unwrap();
/// Share of the difference that one turn moves a mean by.
const GAIN: f64 = 0.3;
/// That one session's first answer moves the share by of those that come back.
const FIRST_GAIN: f64 = 0.05;
/// How far before the end of a served prompt, in blocks, its states are remembered: where the next
/// prompt differs near the end, what it has in common is still known within these steps.
const MARKS_BEFORE: [usize; 5] = [0, 1, 4, 16, 64];
const FAMILY: u64 = 0x6661_6d69_6c79_2121;

/// The last prompt that a session was served.
#[derive(Clone, Debug, Default)]
pub struct ServedPrompt {
    /// States of the prompt, with the blocks up to there, longest first.
    marks: SmallVec<[(u32, u64); MARKS_BEFORE.len()]>,
    /// As the engine reported it, or as it was counted here.
    tokens: u64,
}

impl ServedPrompt {
    pub fn new(prompt: &Coarse<'_>) -> Self {
        let length = prompt.blocks();
        let marks = MARKS_BEFORE.iter().filter(|&&before| before < length);
        let marks = marks.map(|before| {
            let blocks = length - before;
            (blocks as u32, prompt.state(blocks - 1))
        });
        Self {
            marks: marks.collect(),
            tokens: prompt.tokens,
        }
    }

    /// Tokens of this prompt that the next one begins with.
    pub fn begins(&self, prompt: &Coarse<'_>) -> u64 {
        let in_common = self.marks.iter().position(|&(blocks, state)| {
            let blocks = blocks as usize;
            blocks <= prompt.blocks() && prompt.state(blocks - 1) == state
        });
        match in_common {
            // It goes on where this one ended; the rest of the last block is taken to be the same.
            Some(0) => self.tokens.min(prompt.tokens),
            Some(at) => prompt.tokens_of(self.marks[at].0 as usize),
            None => 0,
        }
    }

    pub fn set_tokens(&mut self, reported_tokens: u64) {
        self.tokens = reported_tokens;
    }
}

/// One session.
#[derive(Debug, Default)]
pub struct Known {
    /// Its tenant.
    pub payer: usize,
    /// How long it thinks, once it has come back.
    pub think_s: Option<f64>,
    /// When its last turn ended, while none is in flight.
    pub ended_s: Option<f64>,
    pub in_flight: u32,
    /// Turns of it that are in the queue.
    pub waiting: u32,
    /// Since when booked turns of it run without a break, while they do.
    pub began_s: Option<f64>,
    /// How long its turns run.
    pub run_s: Option<f64>,
    /// When it said that it would be back.
    pub returns_s: Option<f64>,
    pub served: Option<ServedPrompt>,
    /// Where it was let in last, by slot and by the worker's serial number.
    pub home: Option<(usize, u64)>,
    /// The worker on which its KV is gone, as KV events say, by its serial number.
    pub lost_on: Option<u64>,
    /// Of a family: the state that its newest prompt ends with.
    tip: Option<u64>,
}

impl Known {
    pub fn note_think(&mut self, seconds: f64) {
        move_towards(&mut self.think_s, seconds);
    }

    pub fn note_run(&mut self, seconds: f64) {
        move_towards(&mut self.run_s, seconds);
    }

    /// Whether a session that is idle is not expected back: it has sent nothing for longer than nearly all think. Who says
    /// when it comes is until then.
    pub fn has_gone(&self, gaps: &Gaps, now_s: f64) -> bool {
        let Some(ended_s) = self.ended_s else {
            // It left before its first turn, or runs one.
            return self.in_flight == 0 && self.waiting == 0;
        };
        let is_expected = self.waiting > 0 || self.returns_s.is_some_and(|at_s| at_s > now_s);
        !is_expected && now_s - ended_s > gaps.nearly_all_s()
    }
}

fn move_towards(mean_s: &mut Option<f64>, seconds: f64) {
    let mean_s = mean_s.get_or_insert(seconds);
    *mean_s += GAIN * (seconds - *mean_s);
}

/// All sessions and families.
pub struct Sessions {
    known: LruCache<Key, Known>,
    tips: LruCache<u64, Key>,
    families: u64,
    /// Sessions that got their first answers, in this order, until it shows whether they come back.
    answered: VecDeque<(f64, Key)>,
    /// The share of those that do: without a name, and with one.
    come_back: [f64; 2],
}

impl Default for Sessions {
    fn default() -> Self {
        Self {
            known: LruCache::new(KNOWN),
            tips: LruCache::new(KNOWN),
            families: 0,
            answered: VecDeque::new(),
            come_back: [1.0; 2],
        }
    }
}

impl Sessions {
    pub fn get(&self, key: Key) -> Option<&Known> {
        self.known.peek(&key)
    }

    /// The session, seen now.
    pub fn of(&mut self, key: Key) -> &mut Known {
        self.known.get_or_insert_mut(key, Known::default)
    }

    pub fn note_first_answer(&mut self, key: Key, now_s: f64) {
        if self.answered.len() == KNOWN.get() {
            self.answered.pop_front();
        }
        self.answered.push_back((now_s, key));
    }

    /// Counts which sessions came back, of those whose first answer is older than nearly all think times.
    pub fn count_singles(&mut self, gaps: &Gaps, now_s: f64) {
        while let Some(&(since_s, key)) = self.answered.front()
            && now_s - since_s > gaps.nearly_all_s()
        {
            self.answered.pop_front();
            if let Some(known) = self.known.peek(&key) {
                let share = &mut self.come_back[usize::from(known.tip.is_none())];
                let came = f64::from(u8::from(known.think_s.is_some()));
                *share += FIRST_GAIN * (came - *share);
            }
        }
    }

    /// How likely a session comes back: as most do that did before, of others the share that did.
    pub fn return_share(&self, known: &Known) -> f64 {
        match known.think_s {
            Some(_) => 1.0,
            None => self.come_back[usize::from(known.tip.is_none())],
        }
    }

    /// The family whose newest prompt this one goes on from, longest first; else a new one.
    pub fn family_of(&mut self, prompt: &Coarse<'_>) -> Key {
        let found = (0..prompt.blocks())
            .rev()
            .find_map(|at| self.tips.peek(&prompt.state(at)));
        if let Some(&key) = found {
            return key;
        }
        self.families += 1;
        step(FAMILY, self.families)
    }

    /// Notes the newest prompt of a family.
    pub fn extend_family(&mut self, key: Key, prompt: &Coarse<'_>) {
        let Some(last) = prompt.blocks().checked_sub(1) else {
            return;
        };
        let tip = prompt.state(last);
        let old = self.of(key).tip.replace(tip);
        if let Some(old) = old
            && old != tip
            && self.tips.peek(&old) == Some(&key)
        {
            self.tips.pop(&old);
        }
        self.tips.put(tip, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::prefix::hash::PromptHashes;

    fn prompt(tokens: impl IntoIterator<Item = u32>) -> PromptHashes {
        PromptHashes::of_tokens(&tokens.into_iter().collect::<Vec<_>>(), 16)
    }

    #[test]
    fn a_prompt_that_goes_on_from_anothers_is_of_its_family() {
        let mut sessions = Sessions::default();
        let first = prompt(0..1_000);
        let first = Coarse::of(&first, 1.0);
        let family = sessions.family_of(&first);
        sessions.extend_family(family, &first);
        let second = prompt(0..2_000);
        let second = Coarse::of(&second, 1.0);
        assert_eq!(sessions.family_of(&second), family);
        sessions.extend_family(family, &second);
        // A sibling that shares only what both begin with is another family, and so is what goes on
        // from a prompt that the family has left behind.
        let other = prompt((0..900).chain(50_000..60_000));
        assert_ne!(sessions.family_of(&Coarse::of(&other, 1.0)), family);
    }

    #[test]
    fn what_was_served_before_is_known_also_where_the_end_was_changed() {
        let first = prompt(0..2_570);
        let served = ServedPrompt::new(&Coarse::of(&first, 1.0));
        let next = prompt(0..9_000);
        assert_eq!(served.begins(&Coarse::of(&next, 1.0)), 2_570);
        let changed = prompt((0..2_300).chain(70_000..79_000));
        assert_eq!(served.begins(&Coarse::of(&changed, 1.0)), 6 * 256);
        let other = prompt(100_000..109_000);
        assert_eq!(served.begins(&Coarse::of(&other, 1.0)), 0);
    }
}
