//! The queue's side of admission: turns that wait, are let in when there is room, or leave.

use super::asking::{Asked, Go, Look};
use super::cached::Cached;
use super::footprint::Coarse;
use super::identity::{Identity, Key};
use super::queue::{Admitted, Progress, WaitEnd, Waiter, WaitingTurn, WhyRefused};
use super::rules::{Observed, Seated, WorkerView};
use super::{Admission, GiveUp, Residence, Since, Site, Sites, site_of};
use crate::fleet::log::{Event, WaitEndRecord, WaitRecord, unix_now_s};
use crate::fleet::prefix::hash::PromptHashes;
use crate::room::Lack;
use std::sync::Arc;

/// While something waits, looks at the queue are no further apart.
const LOOK_INTERVAL_S: f64 = 0.1;
/// Looked up again where it is older.
const CACHED_AGE_S: f64 = 1.0;

/// Why a turn may not even wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueFull {
    pub lack: Lack,
    pub retry_after_s: f64,
}

impl Admission {
    /// Seconds after which a client that is refused now should try again.
    pub fn retry_after_s(&self, now_s: f64) -> f64 {
        let expected_s = self.queue.predicted_wait_s(self.queue.len(), now_s);
        expected_s.min(self.settings.max_wait_s)
    }

    /// Whether a turn has to queue behind others.
    pub fn must_queue(&self, is_in: bool) -> bool {
        let may_pass = is_in && self.manner.rotates.is_none();
        !self.queue.is_empty() && !may_pass
    }

    /// Puts a turn into the queue. `prompt` is kept as long as it waits, so it should be no finer
    /// than is needed.
    ///
    /// # Errors
    /// As many wait as may, or as many of its client.
    pub fn wait(&mut self, new: WaitingTurn, now_s: f64) -> Result<u64, QueueFull> {
        if let Some(lack) = self.queue.lack(new.client, self.settings.max_waiting) {
            let retry_after_s = self.retry_after_s(now_s);
            self.note_end(&new, WaitEnd::Refused(WhyRefused::QueueFull), now_s);
            return Err(QueueFull {
                lack,
                retry_after_s,
            });
        }
        self.outbox.events.push(Event::Wait(WaitRecord {
            ts_unix_s: unix_now_s(),
            request_id: new.request_id.clone(),
            session_id: new.identity.name.clone(),
            reason: new.reason,
            waiting: self.queue.len() + 1,
        }));
        self.sessions.of(new.identity.key).waiting += 1;
        Ok(self.queue.push(new, self.manner.smallest_first))
    }

    /// How far a waiting turn has come.
    pub fn progress(&self, id: u64) -> Option<&Progress> {
        self.queue.get(id).map(|waiter| &waiter.progress)
    }

    /// Notes how a turn's wait ended.
    fn note_end(&mut self, turn: &WaitingTurn, end: WaitEnd, now_s: f64) {
        self.outbox.events.push(Event::WaitEnd(WaitEndRecord {
            ts_unix_s: unix_now_s(),
            request_id: turn.request_id.clone(),
            session_id: turn.identity.name.clone(),
            end,
            waited_s: now_s - turn.since_s,
        }));
        if end == WaitEnd::Left {
            self.departed.note(turn, now_s);
        }
    }

    /// Since when a turn waits that comes now, where its client left while it waited and comes again.
    pub fn comes_again(&mut self, whose: u64, prompt: &PromptHashes, now_s: f64) -> Option<Since> {
        self.departed.again(whose, prompt, now_s)
    }

    /// Takes a turn out of the queue, and gives its room back if it was let in and not placed.
    pub fn leave(&mut self, id: u64, end: WaitEnd, now_s: f64) -> Option<Waiter> {
        let waiter = self.queue.remove(id)?;
        let known = self.sessions.of(waiter.turn.identity.key);
        known.waiting = known.waiting.saturating_sub(1);
        self.note_end(&waiter.turn, end, now_s);
        if let (Progress::Admitted(admitted), true) = (&waiter.progress, end != WaitEnd::LetIn) {
            self.unbook(admitted, waiter.turn.identity.key, now_s);
        }
        Some(waiter)
    }

    /// A turn that was let in could not be placed on its worker: it waits again, for another.
    pub fn requeue(&mut self, id: u64, not_on: Option<&Site>, now_s: f64) {
        let Some(waiter) = self.queue.get_mut(id) else {
            return;
        };
        let admitted = match &waiter.progress {
            Progress::Admitted(admitted) => Some(admitted.clone()),
            _ => None,
        };
        waiter
            .turn
            .exclude
            .extend(not_on.map(|site| site.spec.id.clone()));
        let key = waiter.turn.identity.key;
        self.queue.enlist(id, self.manner.smallest_first);
        if let Some(admitted) = admitted {
            self.unbook(&admitted, key, now_s);
        }
    }

    /// Whether a worker is up that a waiting turn has not been refused for.
    pub fn may_wait_for(&self, id: u64, sites: &[Site]) -> bool {
        self.queue.get(id).is_some_and(|waiter| {
            let mut sites = sites.iter();
            sites.any(|site| site.routable && !waiter.turn.exclude.contains(&site.spec.id))
        })
    }

    /// Ends the wait of turns that have failed on a worker where none is left that could take them, by what
    /// `is_left` says of the workers that they must not go to. Others wait for one to come back.
    pub fn desert(&mut self, is_left: impl Fn(&[String]) -> bool) {
        let repeated = self.queue.repeated();
        let deserted = repeated.filter(|(_, turn)| !is_left(&turn.exclude));
        let ids: Vec<u64> = deserted.map(|(id, _)| id).collect();
        for id in ids {
            let wake = self.queue.settle(id, Progress::Deserted);
            self.outbox.wakes.extend(wake);
        }
    }

    /// The first waiting turns whose knowledge of caches is old, and their prompts.
    pub fn stale_waiters(&self, now_s: f64) -> Vec<(u64, Arc<PromptHashes>)> {
        let first = self.queue.first_of_each();
        first
            .filter(|(_, waiter)| now_s - waiter.turn.cached_at_s > CACHED_AGE_S)
            .map(|(id, waiter)| (id, Arc::clone(&waiter.turn.prompt)))
            .collect()
    }

    pub fn set_cached(&mut self, id: u64, cached: Cached, now_s: f64) {
        if let Some(waiter) = self.queue.get_mut(id) {
            waiter.turn.cached = Arc::new(cached);
            waiter.turn.cached_at_s = now_s;
        }
    }

    /// When time alone could change something next; none where nothing waits.
    pub fn next_pump_s(&self, now_s: f64) -> Option<f64> {
        (!self.queue.is_empty()).then_some(now_s + LOOK_INTERVAL_S)
    }

    /// Lets in whom there is room for; then the rule takes away what is too much, so that nothing is let
    /// in and taken away again at once.
    pub fn pump(&mut self, sites: &Sites, now_s: f64) {
        self.expire(now_s);
        if !self.queue.is_empty() {
            self.let_all_in(sites, now_s);
        }
        self.tell_rule(sites, now_s);
    }

    fn let_all_in(&mut self, sites: &Sites, now_s: f64) {
        self.weigh_tenants(sites, now_s);
        let every_s = self.manner.interval_s.filter(|_| self.manner.in_rounds);
        let is_round = every_s.is_none_or(|every_s| now_s >= self.round_s + every_s);
        if is_round {
            self.round_s = now_s;
        }
        let ids = match self.manner.rotates {
            Some(rule) => {
                self.rotate(&rule, sites, now_s);
                self.by_deadline(&rule, sites)
            }
            None => self.queue.first_of_each().map(|(id, _)| id).collect(),
        };
        let mut look = Look::at(now_s);
        for id in self.queue.shared_out(ids) {
            self.try_let_in(id, sites, &mut look, is_round);
        }
    }

    fn try_let_in(&mut self, id: u64, sites: &Sites, look: &mut Look, is_round: bool) {
        let now_s = look.now_s;
        let Some(waiter) = self.queue.get(id) else {
            return;
        };
        let turn = &waiter.turn;
        let identity = turn.identity.clone();
        let (prompt, cached) = (Arc::clone(&turn.prompt), Arc::clone(&turn.cached));
        let exclude = turn.exclude.clone();
        let asked = Asked {
            key: identity.key,
            has_session: identity.name.is_some(),
            prompt: Coarse::of(&prompt, self.text_scale()),
            output_tokens: turn.output_tokens,
            cached: &cached,
            exclude: &exclude,
        };
        if self.manner.rotates.is_none() && self.home_of(&asked, sites).is_none() {
            if !is_round {
                return;
            }
            self.make_room(&asked, identity.payer, sites, now_s);
        }
        if let Ok(go) = self.ask(&asked, sites, look) {
            self.admit(id, &asked, &identity, &go, sites, now_s);
        }
    }

    /// Under a rule that does not rotate: those leave for a session that waits who have gone or been idle for
    /// too long, longest idle first, until it may come in somewhere; else one whose tenant holds more than its
    /// share, after its turn.
    fn make_room(&mut self, asked: &Asked<'_>, payer: usize, sites: &Sites, now_s: f64) {
        let is_owed = !self.queue.tenants.holds_more(payer);
        for site in sites.gated().filter(|site| asked.may_go(site)) {
            loop {
                let fits = self.may_enter(asked, site, now_s).is_ok()
                    && self.room_for(asked, site, Residence::Admitted).is_ok();
                let leaves = match fits {
                    true => return,
                    false => self.longest_idle(site, now_s),
                };
                let Some(key) = leaves else {
                    if is_owed && let Some(key) = self.over_share(site) {
                        self.ledgers[site.slot].rotation.let_leave(key);
                        self.see_off(site);
                    }
                    break;
                };
                self.give_up(site.slot, &site.spec, key, GiveUp::IdleTooLong);
            }
        }
    }

    /// Who has been idle for longest, if that is too long.
    fn longest_idle(&self, site: &Site, now_s: f64) -> Option<Key> {
        let idle = self.seated(site, now_s).into_iter();
        let idle = idle.filter_map(|seated| Some((seated.idle_s?, seated.key)));
        let has_gone = |key: Key| {
            let known = self.sessions.get(key);
            known.is_none_or(|known| known.has_gone(&self.gaps, now_s))
        };
        idle.filter(|(idle_s, key)| *idle_s >= self.manner.idle_s || has_gone(*key))
            .max_by(|one, other| one.0.total_cmp(&other.0).then(other.1.cmp(&one.1)))
            .map(|(_, key)| key)
    }

    /// Who has been in for longest of those whose tenants hold more than their shares, if nobody leaves yet.
    fn over_share(&self, site: &Site) -> Option<Key> {
        let rotation = &self.ledger(site.slot)?.rotation;
        let over = rotation.members.keys().copied();
        let over = over.filter(|&key| self.queue.tenants.holds_more(self.payer_of(key)));
        let first = rotation.by_tenure(over, |_| false).next();
        first.filter(|_| rotation.leaving == 0)
    }

    /// Those who are in, as rules see them.
    pub(super) fn seated(&self, site: &Site, now_s: f64) -> Vec<Seated> {
        let members = self
            .ledger(site.slot)
            .map(|ledger| &ledger.rotation.members);
        let members = members.into_iter().flatten();
        let seated = members.map(|(&key, member)| Seated {
            key,
            tokens: member.chain.tokens(),
            idle_s: self.is_idle(key).then(|| {
                let ended_s = self.sessions.get(key).and_then(|known| known.ended_s);
                ended_s.map_or(f64::INFINITY, |ended_s| now_s - ended_s)
            }),
        });
        seated.collect()
    }

    pub(super) fn view<'a>(&self, site: &Site, seated: &'a [Seated]) -> WorkerView<'a> {
        let ledger = self.ledger(site.slot);
        WorkerView {
            slot: site.slot,
            kv_capacity_tokens: site.kv_capacity_tokens.unwrap_or(u64::MAX),
            tokens: ledger.map_or(0, |ledger| ledger.rotation.kept.tokens()),
            seated,
        }
    }

    /// Books the room of a turn that may go, on the worker that suits it best.
    fn admit(
        &mut self,
        id: u64,
        asked: &Asked<'_>,
        identity: &Identity,
        go: &Go,
        sites: &[Site],
        now_s: f64,
    ) {
        let chosen = go.slots.iter().filter_map(|&slot| site_of(sites, slot));
        let Some(site) =
            chosen.max_by_key(|site| (asked.spared_tokens(site), self.room_tokens(site)))
        else {
            return;
        };
        let state = go.state(site.slot);
        let (turn, gave_up) = self.take_place(asked, identity, site, sites, state, now_s);
        let admitted = Admitted {
            slot: site.slot,
            serial: site.serial,
            turn,
            state,
            gave_up,
            at_s: now_s,
        };
        let wake = self.queue.settle(id, Progress::Admitted(admitted));
        self.outbox.wakes.extend(wake);
    }

    /// Refuses those that have waited too long.
    fn expire(&mut self, now_s: f64) {
        while let Some((id, since_s)) = self.queue.longest_here() {
            if now_s - since_s < self.settings.max_wait_s {
                return;
            }
            let wake = self.queue.settle(id, Progress::Expired);
            self.outbox.wakes.extend(wake);
        }
    }

    /// What every tenant may hold now.
    fn weigh_tenants(&mut self, sites: &Sites, now_s: f64) {
        let Some(count) = self.queue.tenants.are_to_be_weighed(now_s) else {
            return;
        };
        let kept = sites.gated().map(|site| self.most_kept_tokens(site));
        let kept: u64 = kept.sum();
        let members = self
            .ledgers
            .iter()
            .map(|ledger| ledger.rotation.members.len());
        // Where a rule counts sessions, each is worth as much.
        let each = kept as f64 / members.sum::<usize>().max(1) as f64;
        let mut held = vec![0.0; count];
        for ledger in &self.ledgers {
            for (&key, member) in &ledger.rotation.members {
                held[self.payer_of(key)] += match self.manner.by_tokens {
                    true => ledger.rotation.own_tokens(member) as f64,
                    false => each,
                };
            }
        }
        self.queue.tenants.weigh(&held, kept);
    }

    /// Tells the rule what was seen, as often as it wants, and takes out whom it wants to leave.
    fn tell_rule(&mut self, sites: &Sites, now_s: f64) {
        let Some(interval_s) = self.manner.interval_s else {
            return;
        };
        if now_s < self.told_s + interval_s {
            return;
        }
        self.told_s = now_s;
        for site in sites
            .iter()
            .filter(|site| site.kv_capacity_tokens.is_some())
        {
            let ledger = self.ledger_mut(site.slot);
            let booked = ledger.hold.tokens() as f64;
            let capacity = site.kv_capacity_tokens.unwrap_or(1).max(1) as f64;
            let observed = Observed {
                used_share: site.used_share.unwrap_or(booked / capacity),
                prompt_tokens: std::mem::take(&mut ledger.prompt_tokens),
                cached_tokens: std::mem::take(&mut ledger.cached_tokens),
            };
            self.rule.observe(site.slot, observed);
            let seated = self.seated(site, now_s);
            for key in self.rule.over_limit(&self.view(site, &seated)) {
                if self.is_idle(key) {
                    self.give_up(site.slot, &site.spec, key, GiveUp::OverLimit);
                } else {
                    self.ledgers[site.slot].rotation.let_leave(key);
                }
            }
        }
    }
}
