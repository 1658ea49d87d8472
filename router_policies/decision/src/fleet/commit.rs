//! Reserves what was chosen, books its place, and logs the decision.

use super::admission::footprint::Coarse;
use super::admission::identity::Identity;
use super::admission::queue::Admitted;
use super::admission::{AdmissionRecord, Asked, Go, Residence, Seat, Site, Sites, site_of};
use super::choosing::Choice;
use super::log::{self, DecisionRecord, Event, PrefixSource, Reserved};
use super::prefix::hash::Unit;
use super::reservation::{Noted, Reservation};
use super::share::Share;
use super::{Fleet, Request, SGLANG_GROUP, State, random_id};
use crate::policy::{Refusal, Route, View};
use parking_lot::MutexGuard;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How a request comes to its worker.
pub(super) enum Way {
    /// Past the gate.
    Past,
    /// The same, without a place.
    Aside,
    Gate(Go),
    /// It has waited, and its room is booked.
    Booked(Admitted),
}

pub(super) struct Entry {
    pub way: Way,
    pub identity: Identity,
    /// The workers that may answer, where they have been looked at.
    pub sites: Option<Arc<Sites>>,
    /// To be booked for its answer.
    pub output_tokens: u64,
    /// Since when it has waited for room, if it has.
    pub waits_since_s: Option<f64>,
}

/// When a placement began: by the wall, for how long it takes, and by the fleet's clock.
#[derive(Clone, Copy)]
pub(super) struct Begun {
    pub at: Instant,
    pub now_s: f64,
}

impl Fleet {
    /// Reserves what was chosen, and logs it.
    pub(super) fn commit(
        self: &Arc<Self>,
        mut guard: MutexGuard<'_, State>,
        begun: Begun,
        request: &Request,
        choice: Choice,
        entry: Entry,
    ) -> Result<Reservation, Refusal> {
        let now_s = begun.now_s;
        let state = &mut *guard;
        let Choice { decision, facts } = choice;
        let view = View {
            workers: &state.facts,
            request: &facts,
            sequence: state.sequence,
            random: 0,
            separated_inflight: state.separated_inflight,
        };
        state.sequence += 1;
        let answering = decision.route.answering();
        let prefilling = decision.route.prefilling();
        let new_tokens = view.new_tokens(&state.facts[prefilling]);
        let prefix_source = match (request.prompt.unit, &state.workers[prefilling]) {
            (Unit::Tokens, Some(worker)) => worker.prefix_source,
            _ => PrefixSource::Estimate,
        };
        let cached_tokens: Vec<(usize, u64)> = state
            .facts
            .iter()
            .filter(|worker| worker.routable && worker.cached_tokens > 0)
            .map(|worker| (worker.slot, worker.cached_tokens))
            .collect();
        let until_token_s = match decision.route {
            Route::Local { worker } => view.local_prefill_s(&state.facts[worker]),
            Route::PrefillDecode { prefill, decode } => {
                view.separated_s(&state.facts[prefill], &state.facts[decode])
            }
        };
        let delta_tokens = view.new_tokens(&state.facts[answering]);
        // SGLang's prefill workers answer once the KV is sent, vLLM's once it is there to be sent.
        let is_sent_by_end = state.facts[prefilling].transfer_group == SGLANG_GROUP;
        let mut share = Share {
            id: state.sequence,
            route: decision.route,
            input_tokens: facts.input_tokens,
            new_tokens,
            prompts: facts.prompts,
            answers: request.answers,
            new_pairs: view.pairs(state.facts[prefilling].cached_tokens, new_tokens),
            delta_tokens,
            delta_after_prefill: (!is_sent_by_end).then_some(delta_tokens),
            lacks_room: state.facts[answering].lacking_tokens(facts.input_tokens) > 0,
            found_no_queue: false,
            found_decodes: false,
            until_token_s,
            untold_until_us: (!request.stream).then_some(((now_s + until_token_s) * 1e6) as u64),
            key: entry.identity.key,
            turn: 0,
        };
        let session_name = entry.identity.name.clone();
        let (seat, admission) = state.sit_down(request, entry, decision.route, now_s)?;
        share.turn = seat.turn;
        state.reserve(&mut share, now_s);
        for slot in [prefilling, answering] {
            if let Some(worker) = state.worker_mut(slot) {
                worker.circuit.placed(now_s);
            }
        }
        let keys = state.admission.session_keys;
        let session = request.session_id.as_deref();
        let session = session.map(|id| keys.of_tenant(request.tenant, id));
        let session = session.map(|key| (key, state.note_session(key, answering, now_s)));
        let prompt = state.note_prompt(&request.prompt, decision.route);

        let name = |slot: usize| {
            let spec = state.workers[slot].as_ref().map(|w| Arc::clone(&w.spec));
            spec.ok_or(Refusal::OutsideCandidates)
        };
        let answering_spec = name(answering)?;
        let prefill_spec = match decision.route {
            Route::Local { .. } => None,
            Route::PrefillDecode { prefill, .. } => Some(name(prefill)?),
        };
        let named = |route: Route| -> Result<log::NamedRoute, Refusal> {
            Ok(match route {
                Route::Local { worker } => log::NamedRoute::Local {
                    worker: name(worker)?,
                },
                Route::PrefillDecode { prefill, decode } => log::NamedRoute::PrefillDecode {
                    prefill: name(prefill)?,
                    decode: name(decode)?,
                },
            })
        };
        let alternatives = decision
            .alternatives
            .iter()
            .map(|a| Ok((named(a.route)?, a.predicted_s, a.cost)))
            .collect::<Result<_, Refusal>>()?;
        let cached_tokens = cached_tokens
            .into_iter()
            .map(|(slot, tokens)| Ok((name(slot)?, tokens)))
            .collect::<Result<_, Refusal>>()?;
        let route = named(decision.route)?;
        let reserved = match &prefill_spec {
            None => vec![Reserved {
                worker: Arc::clone(&answering_spec),
                prefill_tokens: new_tokens,
                decode_tokens: facts.input_tokens,
            }],
            Some(prefill) => vec![
                Reserved {
                    worker: Arc::clone(prefill),
                    prefill_tokens: new_tokens,
                    decode_tokens: 0,
                },
                Reserved {
                    worker: Arc::clone(&answering_spec),
                    prefill_tokens: 0,
                    decode_tokens: facts.input_tokens,
                },
            ],
        };
        let decision_id = random_id(state.random.u64(..));
        let signs = state.signs([prefilling, answering]);
        let of_answering = state.worker_mut(answering);
        let begun_at = of_answering.map_or_else(Default::default, |worker| worker.batch_time);
        self.settle(guard);

        let record = Arc::new(DecisionRecord {
            decision_id,
            ts_unix_s: log::unix_now_s(),
            request_id: request.request_id.clone(),
            session_id: request.session_id.clone(),
            policy: self.policy_name.clone(),
            route,
            reason: decision.reason,
            input_tokens: facts.input_tokens,
            new_tokens,
            cached_tokens,
            prefix_source,
            alternatives,
            predicted_s: decision.predicted_s,
            cost: decision.cost,
            reserved,
            decision_us: begun.at.elapsed().as_secs_f64() * 1e6,
            admission,
            ended: OnceLock::new(),
        });
        self.sink.send(Event::Decision(Arc::clone(&record)));
        let noted = Noted {
            prompt,
            session,
            begun: begun_at,
        };
        let reservation = Reservation::new(
            Arc::clone(self),
            record,
            share,
            seat,
            answering_spec,
            prefill_spec,
            signs,
            now_s,
        );
        Ok(reservation.having(noted, session_name, request.received_s))
    }
}

impl State {
    /// Books a request's place on the worker that answers.
    fn sit_down(
        &mut self,
        request: &Request,
        entry: Entry,
        route: Route,
        now_s: f64,
    ) -> Result<(Seat, AdmissionRecord), Refusal> {
        let slot = route.answering();
        let cached = self.cached_by_facts();
        let Entry {
            way,
            identity,
            sites,
            output_tokens,
            waits_since_s,
        } = entry;
        let sites = match self.admission.gates() {
            true => Some(sites.unwrap_or_else(|| self.sites(&[], now_s))),
            false => None,
        };
        // Without a gate no other is of interest.
        let alone = match sites {
            Some(_) => None,
            None => self.site(slot, now_s),
        };
        let sites: &[Site] = match &sites {
            Some(sites) => sites,
            None => alone.as_slice(),
        };
        let site = site_of(sites, slot).ok_or(Refusal::OutsideCandidates)?;
        let prompt = Coarse::of(&request.prompt, self.admission.text_scale());
        let asked = Asked {
            key: identity.key,
            has_session: identity.name.is_some(),
            prompt,
            output_tokens,
            cached: &cached,
            exclude: &[],
        };
        let (turn, state, gave_up) = match way {
            Way::Aside => (0, Residence::Ungated, Vec::new()),
            Way::Past => {
                let taken = self.admission.take_place(
                    &asked,
                    &identity,
                    site,
                    sites,
                    Residence::Ungated,
                    now_s,
                );
                (taken.0, Residence::Ungated, taken.1)
            }
            Way::Gate(go) => {
                let state = go.state(slot);
                let taken = self
                    .admission
                    .take_place(&asked, &identity, site, sites, state, now_s);
                (taken.0, state, taken.1)
            }
            Way::Booked(admitted) => (admitted.turn, admitted.state, admitted.gave_up),
        };
        if matches!(route, Route::PrefillDecode { .. }) {
            // The worker has no prefill to do.
            self.admission.prefill_over(slot, identity.key, turn);
        }
        // What a picture is taken for says nothing of text.
        let is_text = request.prompt.unit == Unit::Bytes && request.prompt.pictures == 0;
        let text_tokens = is_text.then(|| request.prompt.tokens());
        let seat = self.admission.seat(
            site,
            &identity,
            &prompt,
            turn,
            output_tokens,
            request.hints.clone(),
            text_tokens,
        );
        let state = if turn == 0 { Residence::Ungated } else { state };
        let record = AdmissionRecord {
            state,
            waited_s: waits_since_s.map_or(0.0, |since_s| now_s - since_s),
            gave_up,
        };
        Ok((seat, record))
    }
}
