//! What one worker's GPU holds: of whom, their turns in flight, and what all of it takes of the KV, shared
//! prefixes counted once.

use super::footprint::{Blocks, Chain, Coarse};
use super::identity::Key;
use crate::fleet::prefix::estimate::StateMap;
use smallvec::SmallVec;
use std::collections::BTreeSet;

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

/// A session of which the GPU holds something.
#[derive(Debug, Default)]
pub struct Occupant {
    /// What it holds between its turns.
    pub held: Option<Chain>,
    pub turns: SmallVec<[Turn; 1]>,
    /// It said that no further turn comes.
    pub ended: bool,
    /// Its worker went away while a turn was in flight.
    lost: bool,
}

impl Occupant {
    pub fn is_idle(&self) -> bool {
        self.turns.is_empty()
    }

    /// Tokens that it holds, those of others too and what is booked for answers included.
    pub fn tokens(&self) -> u64 {
        let turns = self.turns.iter();
        let in_flight: u64 = turns
            .map(|turn| turn.chain.tokens() + turn.output_tokens)
            .sum();
        in_flight + self.held.as_ref().map_or(0, Chain::tokens)
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
    /// Those with turns in flight.
    running: BTreeSet<Key>,
    /// Tokens of tails and of answers in flight.
    loose_tokens: u64,
    in_flight: usize,
    /// Of turns in flight, shared ones counted for each.
    in_flight_tokens: u64,
    pub cold_in_flight: u32,
}

impl Hold {
    /// Booked for what is held and in flight.
    pub fn tokens(&self) -> u64 {
        self.blocks.tokens() + self.loose_tokens
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
        self.occupants.get_mut(&key)
    }

    pub fn turns_in_flight(&self) -> usize {
        self.in_flight
    }

    /// Booked for turns in flight and for what their sessions hold beside them, shared tokens counted for each.
    pub fn running_tokens(&self) -> u64 {
        let running = self
            .running
            .iter()
            .filter_map(|key| self.occupants.get(key));
        let held = running.filter_map(|occupant| occupant.held.as_ref());
        self.in_flight_tokens + held.map(Chain::tokens).sum::<u64>()
    }

    /// By how much [`Hold::tokens`] grows when `occupant`, or somebody of whom nothing is held, sends this prompt
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

    /// Books a turn.
    pub fn begin(&mut self, key: Key, id: u64, prompt: &Coarse<'_>, output_tokens: u64) {
        let occupant = self.occupants.entry(key).or_default();
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
        occupant.ended = false;
        self.running.insert(key);
        self.in_flight += 1;
        self.in_flight_tokens += chain.tokens() + output_tokens;
        occupant.turns.push(Turn {
            id,
            chain,
            before,
            output_tokens,
            cold: false,
        });
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
        let turns = &mut self.occupants.get_mut(&key)?.turns;
        turns.iter_mut().find(|turn| turn.id == id)
    }

    /// Ends a turn with an answer of `output_tokens`; false if it is not known here (any more).
    pub fn end(&mut self, key: Key, id: u64, served: Served, output_tokens: u64) -> bool {
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
            self.running.remove(&key);
            let is_gone = served == Served::Failed || occupant.lost;
            if occupant.held.is_none() || is_gone {
                self.remove(key);
            }
        }
        true
    }

    /// Takes out what is held of a session; its turns in flight go on unbooked. Returns what that frees, in
    /// tokens, or none where nothing was held.
    pub fn remove(&mut self, key: Key) -> Option<u64> {
        let occupant = self.occupants.remove(&key)?;
        self.running.remove(&key);
        self.in_flight -= occupant.turns.len();
        let before = self.tokens();
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
        Some(before - self.tokens())
    }

    /// The worker's cache is gone: of what is in flight something is held again only where a turn is served
    /// all the same.
    pub fn lose_all(&mut self) {
        for occupant in self.occupants.values_mut() {
            occupant.lost = true;
        }
    }

    /// Tokens of [`Hold::tokens`] that all of `keys` would free for `prompt` by going.
    pub fn freed_by(&self, keys: &[Key], prompt: &Coarse<'_>) -> u64 {
        let occupants = keys.iter().filter_map(|key| self.occupants.get(key));
        let chains = occupants.filter_map(|occupant| occupant.held.as_ref());
        self.blocks.freed_by(chains, prompt)
    }

    /// Whether nothing is in flight.
    pub fn is_quiet(&self) -> bool {
        self.cold_in_flight == 0 && self.in_flight == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::prefix::hash::PromptHashes;
    use proptest::prelude::*;
    use std::collections::HashSet;

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
                match step {
                    Step::Begin { key, shared, own } => {
                        let (common, first) = (shared * 256, 1_000_000 * key as u32);
                        let tokens: Vec<u32> = (0..common).chain(first..first + own).collect();
                        let prompt = PromptHashes::of_tokens(&tokens, 16);
                        let id = at as u64 + 1;
                        hold.begin(key, id, &Coarse::of(&prompt, 1.0), 100);
                        running.push((key, id));
                    }
                    Step::End(which, served) if !running.is_empty() => {
                        let (key, id) = running.swap_remove(which % running.len());
                        hold.end(key, id, served, 60);
                    }
                    Step::Lengthen(which) if !running.is_empty() => {
                        let (key, id) = running[which % running.len()];
                        hold.lengthen(key, id, 40);
                    }
                    Step::Remove(key) => {
                        hold.remove(key);
                    }
                    Step::LoseAll => hold.lose_all(),
                    _ => {}
                }
                let turns: usize = hold.occupants().map(|(_, o)| o.turns.len()).sum();
                prop_assert_eq!(hold.turns_in_flight(), turns);
                let running = hold.occupants().filter(|(_, o)| !o.is_idle());
                let running: u64 = running.map(|(_, o)| o.tokens()).sum();
                prop_assert_eq!(hold.running_tokens(), running);
                let held = hold.occupants().filter_map(|(_, o)| o.held.as_ref());
                let turns = hold.occupants().flat_map(|(_, o)| &o.turns);
                let chains = || held.clone().chain(turns.clone().map(|turn| &turn.chain));
                let blocks: HashSet<u64> = chains().flat_map(|c| c.states.clone()).collect();
                let answers: u64 = turns.clone().map(|turn| turn.output_tokens).sum();
                let tails: u64 = chains().map(|chain| chain.tail_tokens).sum();
                prop_assert_eq!(hold.tokens(), 256 * blocks.len() as u64 + tails + answers);
                let is_quiet = hold.occupants().all(|(_, o)| o.is_idle());
                prop_assert_eq!(hold.is_quiet(), is_quiet);
            }
        }
    }
}
