//! Who holds what on one worker: its occupants, their turns in flight, and what all of it takes of
//! the KV, shared prefixes counted once.

use super::footprint::{Blocks, Chain, Coarse};
use super::give_up::GiveUp;
use super::identity::{Key, Name};
use crate::fleet::prefix::estimate::StateMap;
use smallvec::SmallVec;
use std::cell::Cell;

/// A turn in flight.
#[derive(Debug)]
pub struct Turn {
    pub id: u64,
    pub chain: Chain,
    /// Blocks that the session held when the turn came, and the tokens after them.
    before: Option<(usize, u64)>,
    /// Booked for its answer.
    pub output_tokens: u64,
    /// Takes one of the worker's turns for a cold prefill.
    pub cold: bool,
}

/// A session that has a place on the worker.
#[derive(Debug, Default)]
pub struct Occupant {
    pub name: Option<Name>,
    /// What it holds between its turns.
    pub held: Option<Chain>,
    pub turns: SmallVec<[Turn; 1]>,
    /// Booked for its next turns.
    pub growth_tokens: u64,
    pub admitted_s: f64,
    pub idle_since_s: f64,
    /// When it said that it would be back.
    pub returns_s: Option<f64>,
    /// It said that no further turn comes.
    pub ended: bool,
    /// Turns of it that wait for room to grow.
    waiting: u32,
    /// Why it gives up its place when its turn ends, if it does.
    pub marked: Option<GiveUp>,
    /// It passed one that had waited for longer, and keeps its place only until that one can go.
    pub backfilled: bool,
    /// Its worker went away while a turn was in flight.
    lost: bool,
    /// Tokens that it alone held after so many of the worker's changes.
    unshared: Cell<Option<(u64, u64)>>,
}

impl Occupant {
    pub fn is_idle(&self) -> bool {
        self.turns.is_empty() && !self.waits()
    }

    /// Whether any turn of it waits for room to grow.
    pub fn waits(&self) -> bool {
        self.waiting > 0
    }

    /// Tokens of its turns in flight, what is booked for their answers included.
    pub fn in_flight_tokens(&self) -> u64 {
        let turns = self.turns.iter();
        turns
            .map(|turn| turn.chain.tokens() + turn.output_tokens)
            .sum()
    }

    /// Tokens that it holds, those of others too included.
    pub fn tokens(&self) -> u64 {
        self.in_flight_tokens() + self.held.as_ref().map_or(0, Chain::tokens)
    }

    /// What it adds to [`Hold::idle_tokens`].
    fn idle_tokens(&self) -> u64 {
        match self.is_idle() {
            true => self.tokens() + self.growth_tokens,
            false => 0,
        }
    }
}

/// How a turn ended, as far as the worker's cache is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// Its prompt was prefilled there.
    Yes,
    /// It ended before that; what the session held before, it still holds.
    No,
    /// The worker failed.
    Failed,
}

/// What a worker's KV is booked for.
#[derive(Default)]
pub struct Hold {
    blocks: Blocks,
    /// In an order that depends on nothing but the keys, so that simulations repeat.
    occupants: StateMap<Occupant>,
    /// Tokens of tails and of answers in flight.
    loose_tokens: u64,
    growth_tokens: u64,
    /// Turns of all occupants, what is booked for them, and what idle occupants hold. The gate asks for
    /// these on every worker: they are counted as turns come and go.
    in_flight: usize,
    in_flight_tokens: u64,
    idle_tokens: u64,
    /// Turns of occupants that wait for room to grow.
    growing: u32,
    pub cold_in_flight: u32,
    pub given_up: u64,
    changes: u64,
}

impl Hold {
    /// How often it has changed. As long as that is the same, no turn that had no room has any now, but
    /// for what time and other workers do.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Who may go here, or what is held, may be other than before.
    pub fn note_change(&mut self) {
        self.changes += 1;
    }

    /// Booked for what is held and in flight.
    pub fn firm_tokens(&self) -> u64 {
        self.blocks.tokens() + self.loose_tokens
    }

    /// Booked in all: also for the next turns of those that have a place.
    pub fn booked_tokens(&self) -> u64 {
        self.firm_tokens() + self.growth_tokens
    }

    pub fn occupants(&self) -> impl Iterator<Item = (Key, &Occupant)> + Clone {
        self.occupants
            .iter()
            .map(|(&key, occupant)| (key, occupant))
    }

    pub fn occupant(&self, key: Key) -> Option<&Occupant> {
        self.occupants.get(&key)
    }

    pub fn occupant_mut(&mut self, key: Key) -> Option<&mut Occupant> {
        self.note_change();
        self.occupants.get_mut(&key)
    }

    pub fn len(&self) -> usize {
        self.occupants.len()
    }

    /// A turn of `key` waits for room to grow, if that has a place.
    pub fn begin_wait(&mut self, key: Key) {
        self.note_change();
        if let Some(occupant) = self.occupants.get_mut(&key) {
            self.idle_tokens -= occupant.idle_tokens();
            occupant.waiting += 1;
            self.growing += 1;
        }
    }

    /// A turn of `key` waits no longer for that: it may go, or has left.
    pub fn end_wait(&mut self, key: Key) {
        self.note_change();
        let Some(occupant) = self.occupants.get_mut(&key).filter(|o| o.waits()) else {
            return;
        };
        occupant.waiting -= 1;
        self.growing -= 1;
        self.idle_tokens += occupant.idle_tokens();
        if occupant.is_idle() && occupant.held.is_none() {
            self.remove(key);
        }
    }

    /// Whether the next turn of anybody waits for room to grow.
    pub fn has_growing(&self) -> bool {
        self.growing > 0
    }

    /// Tokens that idle occupants hold, shared ones counted for each, and what is booked for their growth.
    pub fn idle_tokens(&self) -> u64 {
        self.idle_tokens
    }

    pub fn turns_in_flight(&self) -> usize {
        self.in_flight
    }

    /// Tokens booked for turns in flight, shared ones counted for each.
    pub fn in_flight_tokens(&self) -> u64 {
        self.in_flight_tokens
    }

    /// By how much the firm booking grows when `occupant`, or somebody without a place, sends this prompt
    /// and gets `output_tokens`. Negative where it shrinks (a compacted session).
    pub fn need_tokens(
        &self,
        occupant: Option<&Occupant>,
        prompt: &Coarse<'_>,
        output_tokens: u64,
    ) -> i64 {
        let held = occupant.and_then(|occupant| occupant.held.as_ref());
        let mut released = 0;
        let mut known = 0;
        if let Some(held) = held {
            if held.begins(prompt) {
                known = held.states.len();
                released = held.tail_tokens;
            } else if occupant.is_some_and(|occupant| occupant.turns.is_empty()) {
                // Compacted: what is no longer in the prompt goes.
                let kept = held.common(prompt).max(self.blocks.shared(held));
                let gone = (held.states.len() - kept) as u64 * u64::from(held.block_tokens);
                released = gone + held.tail_tokens;
            }
        }
        let new = self.blocks.new_blocks(prompt, known);
        let added = prompt.tokens_of(new) + prompt.tail_tokens() + output_tokens;
        added as i64 - released as i64
    }

    /// Books a turn. The session has a place from now on.
    pub fn begin(
        &mut self,
        key: Key,
        id: u64,
        prompt: &Coarse<'_>,
        output_tokens: u64,
        now_s: f64,
    ) -> &mut Occupant {
        self.note_change();
        let occupant = self.occupants.entry(key).or_insert_with(|| Occupant {
            admitted_s: now_s,
            ..Occupant::default()
        });
        self.idle_tokens -= occupant.idle_tokens();
        let extends = occupant
            .held
            .as_ref()
            .is_some_and(|held| held.begins(prompt));
        let mut before = None;
        let mut chain = Chain::default();
        if (extends || occupant.turns.is_empty())
            && let Some(held) = occupant.held.take()
        {
            self.loose_tokens -= held.tail_tokens;
            chain = held;
            match extends {
                true => before = Some((chain.states.len(), chain.tail_tokens)),
                false => self.blocks.keep_common(&mut chain, prompt),
            }
        }
        chain.tail_tokens = prompt.tail_tokens();
        self.blocks.extend(&mut chain, prompt);
        self.loose_tokens += chain.tail_tokens + output_tokens;
        self.growth_tokens -= std::mem::take(&mut occupant.growth_tokens);
        occupant.returns_s = None;
        occupant.ended = false;
        self.in_flight += 1;
        self.in_flight_tokens += chain.tokens() + output_tokens;
        occupant.turns.push(Turn {
            id,
            chain,
            before,
            output_tokens,
            cold: false,
        });
        occupant
    }

    /// Marks the turn as a cold prefill.
    pub fn begin_cold(&mut self, key: Key, id: u64) {
        if let Some(turn) = self.turn_mut(key, id)
            && !std::mem::replace(&mut turn.cold, true)
        {
            self.cold_in_flight += 1;
        }
    }

    /// The turn's prefill is over, or happens elsewhere.
    pub fn end_cold(&mut self, key: Key, id: u64) -> bool {
        let was = self
            .turn_mut(key, id)
            .is_some_and(|turn| std::mem::take(&mut turn.cold));
        self.cold_in_flight -= u32::from(was);
        was
    }

    /// Books `more_tokens` for an answer that is longer than was expected.
    pub fn lengthen(&mut self, key: Key, id: u64, more_tokens: u64) {
        if let Some(turn) = self.turn_mut(key, id) {
            turn.output_tokens += more_tokens;
            self.loose_tokens += more_tokens;
            self.in_flight_tokens += more_tokens;
        }
    }

    fn turn_mut(&mut self, key: Key, id: u64) -> Option<&mut Turn> {
        self.note_change();
        let turns = &mut self.occupants.get_mut(&key)?.turns;
        turns.iter_mut().find(|turn| turn.id == id)
    }

    /// Ends a turn with an answer of `output_tokens`; false if it is not known here (any more).
    pub fn end(
        &mut self,
        key: Key,
        id: u64,
        served: Served,
        output_tokens: u64,
        now_s: f64,
    ) -> bool {
        self.note_change();
        self.end_cold(key, id);
        let Some(occupant) = self.occupants.get_mut(&key) else {
            return false;
        };
        let Some(at) = occupant.turns.iter().position(|turn| turn.id == id) else {
            return false;
        };
        let Turn {
            mut chain,
            before,
            output_tokens: booked,
            ..
        } = occupant.turns.swap_remove(at);
        self.in_flight -= 1;
        self.in_flight_tokens -= chain.tokens() + booked;
        let most_tail_tokens = self.blocks.tokens() + chain.tail_tokens + booked;
        self.loose_tokens -= chain.tail_tokens + booked;
        match (served, before) {
            (Served::Yes, _) => {
                occupant.lost = false;
                chain.tail_tokens += output_tokens;
            }
            (Served::No, Some((blocks, tail_tokens))) if !occupant.lost => {
                let gone = chain.states.drain(blocks..);
                gone.for_each(|state| self.blocks.remove(state));
                // What the tail held is in the blocks of turns that go on, if these outlast it: it is
                // not booked twice, so that a turn's end never needs room.
                chain.tail_tokens = tail_tokens.min(most_tail_tokens - self.blocks.tokens());
            }
            _ => {
                self.blocks.release(&chain);
                chain = Chain::default();
            }
        }
        let held = occupant.held.as_ref();
        if served != Served::Yes && held.is_some_and(|held| held.tokens() >= chain.tokens()) {
            // Another turn has left more meanwhile.
            self.blocks.release(&chain);
        } else if !chain.states.is_empty() {
            // A chain without a block is nothing that a later prompt could be found to begin with.
            self.loose_tokens += chain.tail_tokens;
            if let Some(old) = occupant.held.replace(chain) {
                self.loose_tokens -= old.tail_tokens;
                self.blocks.release(&old);
            }
        }
        if occupant.turns.is_empty() {
            occupant.idle_since_s = now_s;
            self.idle_tokens += occupant.idle_tokens();
            let is_gone = served == Served::Failed || occupant.lost;
            if (occupant.held.is_none() || is_gone) && !occupant.waits() {
                self.remove(key);
            }
        }
        true
    }

    /// Takes away a session's place; its turns in flight go on unbooked. What it held is returned
    /// in tokens, or none where it had no place.
    pub fn remove(&mut self, key: Key) -> Option<u64> {
        let occupant = self.occupants.remove(&key)?;
        self.note_change();
        self.growing -= occupant.waiting;
        self.in_flight -= occupant.turns.len();
        self.idle_tokens -= occupant.idle_tokens();
        let before = self.firm_tokens();
        self.growth_tokens -= occupant.growth_tokens;
        if let Some(chain) = &occupant.held {
            self.blocks.release(chain);
            self.loose_tokens -= chain.tail_tokens;
        }
        for turn in &occupant.turns {
            self.blocks.release(&turn.chain);
            self.loose_tokens -= turn.chain.tail_tokens + turn.output_tokens;
            self.in_flight_tokens -= turn.chain.tokens() + turn.output_tokens;
            self.cold_in_flight -= u32::from(turn.cold);
        }
        Some(before - self.firm_tokens())
    }

    /// The worker's cache is gone: idle sessions lose their places; the others keep one if the turn
    /// that is in flight is served all the same. Returns who loses theirs; [`Hold::remove`] takes it.
    pub fn lose_all(&mut self) -> Vec<Key> {
        self.note_change();
        let mut idle = Vec::new();
        for (&key, occupant) in &mut self.occupants {
            occupant.lost = true;
            if occupant.turns.is_empty() {
                idle.push(key);
            }
        }
        idle
    }

    /// Books `wanted_tokens` for the next turns of `key`, or as much of that as there is room for.
    pub fn reserve_growth(&mut self, key: Key, wanted_tokens: u64, budget_tokens: u64) {
        self.note_change();
        let room = budget_tokens.saturating_sub(self.booked_tokens());
        if let Some(occupant) = self.occupants.get_mut(&key) {
            self.growth_tokens -= occupant.growth_tokens;
            self.idle_tokens -= occupant.idle_tokens();
            occupant.growth_tokens = wanted_tokens.min(room + occupant.growth_tokens);
            self.growth_tokens += occupant.growth_tokens;
            self.idle_tokens += occupant.idle_tokens();
        }
    }

    /// Takes what is booked for next turns back until all of it is within the budget, if it can be.
    pub fn trim_growth(&mut self, budget_tokens: u64) {
        let mut excess = self
            .booked_tokens()
            .saturating_sub(budget_tokens)
            .min(self.growth_tokens);
        for occupant in self.occupants.values_mut() {
            if excess == 0 {
                return;
            }
            let taken = occupant.growth_tokens.min(excess);
            self.idle_tokens -= occupant.idle_tokens();
            occupant.growth_tokens -= taken;
            self.idle_tokens += occupant.idle_tokens();
            self.growth_tokens -= taken;
            excess -= taken;
        }
    }

    /// Tokens of [`Hold::firm_tokens`] that all of `keys` would free for `prompt` by going.
    pub fn freed_by(&self, keys: &[Key], prompt: &Coarse<'_>) -> u64 {
        let occupants = keys.iter().filter_map(|key| self.occupants.get(key));
        let chains = occupants.filter_map(|occupant| occupant.held.as_ref());
        self.blocks.freed_by(chains, prompt)
    }

    /// The same of [`Hold::booked_tokens`].
    pub fn freed_with_growth(&self, keys: &[Key], prompt: &Coarse<'_>) -> u64 {
        let occupants = keys.iter().filter_map(|key| self.occupants.get(key));
        let growth: u64 = occupants.map(|occupant| occupant.growth_tokens).sum();
        self.freed_by(keys, prompt) + growth
    }

    /// Tokens that nobody but this occupant holds. They are counted once for each state of the book: the
    /// gate asks for them far more often than they change.
    pub fn unshared_tokens(&self, occupant: &Occupant) -> u64 {
        if let Some((changes, tokens)) = occupant.unshared.get()
            && changes == self.changes
        {
            return tokens;
        }
        let tokens = self.count_unshared_tokens(occupant);
        occupant.unshared.set(Some((self.changes, tokens)));
        tokens
    }

    fn count_unshared_tokens(&self, occupant: &Occupant) -> u64 {
        let own = |chain: &Chain| {
            let own = chain.states.len() - self.blocks.shared(chain);
            own as u64 * u64::from(chain.block_tokens) + chain.tail_tokens
        };
        let turns = occupant.turns.iter();
        let in_flight = turns.map(|turn| own(&turn.chain) + turn.output_tokens);
        occupant.held.as_ref().map_or(0, own) + in_flight.sum::<u64>()
    }

    /// Who was backfilled keeps its place as any other.
    pub fn keep_backfilled(&mut self) {
        for occupant in self.occupants.values_mut() {
            occupant.backfilled = false;
            if occupant.marked == Some(GiveUp::Backfilled) {
                occupant.marked = None;
            }
        }
    }

    /// Whether nothing is booked and nobody has a place.
    pub fn is_empty(&self) -> bool {
        self.occupants.is_empty()
            && self.blocks.is_empty()
            && self.booked_tokens() == 0
            && self.is_quiet()
    }

    /// Whether nothing is in flight, nor about to be: no occupant's next turn waits for room to grow.
    pub fn is_quiet(&self) -> bool {
        self.cold_in_flight == 0 && self.in_flight == 0 && !self.has_growing()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::prefix::hash::PromptHashes;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const BUDGET_TOKENS: u64 = 20_000;

    #[derive(Clone, Debug)]
    enum Step {
        /// Its first `shared` blocks of 256 tokens are those of all sessions.
        Begin {
            key: Key,
            shared: u32,
            own: u32,
        },
        End(usize, Served),
        Lengthen(usize),
        Remove(Key),
        Reserve(Key),
        BeginWait(Key),
        EndWait(Key),
        Trim,
        LoseAll,
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = || 1u64..6;
        let served = prop_oneof![
            4 => Just(Served::Yes), 1 => Just(Served::No), 1 => Just(Served::Failed)
        ];
        prop_oneof![
            6 => (key(), 0u32..4, 0u32..1_500)
                .prop_map(|(key, shared, own)| Step::Begin { key, shared, own }),
            5 => (any::<usize>(), served).prop_map(|(at, served)| Step::End(at, served)),
            1 => any::<usize>().prop_map(Step::Lengthen),
            1 => key().prop_map(Step::Remove),
            1 => key().prop_map(Step::Reserve),
            1 => key().prop_map(Step::BeginWait),
            1 => key().prop_map(Step::EndWait),
            1 => Just(Step::Trim),
            1 => Just(Step::LoseAll),
        ]
    }

    proptest! {
        #[test]
        fn what_is_kept_is_as_if_it_were_counted_each_time(
            steps in proptest::collection::vec(step(), 1..80),
        ) {
            let mut hold = Hold::default();
            let mut running: Vec<(Key, u64)> = Vec::new();
            for (at, step) in steps.into_iter().enumerate() {
                let now_s = at as f64;
                match step {
                    Step::Begin { key, shared, own } => {
                        let (common, first) = (shared * 256, 1_000_000 * key as u32);
                        let tokens: Vec<u32> = (0..common).chain(first..first + own).collect();
                        let prompt = PromptHashes::of_tokens(&tokens, 16);
                        let id = at as u64 + 1;
                        hold.begin(key, id, &Coarse::of(&prompt, 1.0), 100, now_s);
                        running.push((key, id));
                    }
                    Step::End(which, served) if !running.is_empty() => {
                        let (key, id) = running.swap_remove(which % running.len());
                        hold.end(key, id, served, 60, now_s);
                    }
                    Step::Lengthen(which) if !running.is_empty() => {
                        let (key, id) = running[which % running.len()];
                        hold.lengthen(key, id, 40);
                    }
                    Step::Remove(key) => {
                        hold.remove(key);
                    }
                    Step::Reserve(key) => hold.reserve_growth(key, 500, BUDGET_TOKENS),
                    Step::BeginWait(key) => hold.begin_wait(key),
                    Step::EndWait(key) => hold.end_wait(key),
                    Step::Trim => hold.trim_growth(BUDGET_TOKENS / 2),
                    Step::LoseAll => {
                        for key in hold.lose_all() {
                            hold.remove(key);
                        }
                    }
                    _ => {}
                }
                let turns: usize = hold.occupants().map(|(_, o)| o.turns.len()).sum();
                prop_assert_eq!(hold.turns_in_flight(), turns);
                let in_flight = hold.occupants().flat_map(|(_, o)| &o.turns);
                let in_flight = in_flight.map(|turn| turn.chain.tokens() + turn.output_tokens);
                prop_assert_eq!(hold.in_flight_tokens(), in_flight.sum::<u64>());
                let held = hold.occupants().filter_map(|(_, o)| o.held.as_ref());
                let turns = hold.occupants().flat_map(|(_, o)| &o.turns);
                let chains = || held.clone().chain(turns.clone().map(|turn| &turn.chain));
                let blocks: HashSet<u64> = chains().flat_map(|c| c.states.clone()).collect();
                let answers: u64 = turns.clone().map(|turn| turn.output_tokens).sum();
                let tails: u64 = chains().map(|chain| chain.tail_tokens).sum();
                prop_assert_eq!(hold.firm_tokens(), 256 * blocks.len() as u64 + tails + answers);
                let idle = hold.occupants().filter(|(_, o)| o.is_idle());
                let idle: u64 = idle.map(|(_, o)| o.tokens() + o.growth_tokens).sum();
                prop_assert_eq!(hold.idle_tokens(), idle);
                let is_quiet = hold.occupants().all(|(_, o)| o.turns.is_empty() && !o.waits());
                prop_assert_eq!(hold.is_quiet(), is_quiet);
                for (key, occupant) in hold.occupants() {
                    let tokens = hold.unshared_tokens(occupant);
                    prop_assert_eq!(tokens, hold.count_unshared_tokens(occupant), "of {}", key);
                    prop_assert_eq!(tokens, hold.unshared_tokens(occupant), "again, of {}", key);
                }
            }
        }
    }
}
