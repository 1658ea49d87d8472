//! `GET /sessions` and `GET /sessions/ID`: who has a place and who waits, and what a session's last turns came to.

use super::{Gateway, Reply, error, json};
use decision::fleet::log::{DecisionRecord, NamedRoute};
use hyper::{Response, StatusCode};
use serde_json::{Value, json as value};

/// Turns of a session that are shown, of the last decisions of all.
const TURNS: usize = 50;

pub(super) fn list(gateway: &Gateway) -> Response<Reply> {
    let sessions = gateway.fleet.sessions();
    let tenants = gateway.fleet.tenants();
    json(
        StatusCode::OK,
        &match tenants.is_empty() {
            true => value!({"sessions": sessions}),
            false => value!({"sessions": sessions, "tenants": tenants}),
        },
    )
}

pub(super) fn one(gateway: &Gateway, id: &str) -> Response<Reply> {
    let sessions = gateway.fleet.sessions().into_iter();
    let places = sessions.filter(|shown| shown.session_id.as_deref() == Some(id));
    let places: Vec<_> = places.collect();
    let recent = gateway.fleet.sink().recent(usize::MAX);
    let turns = recent
        .iter()
        .filter(|turn| turn.session_id.as_deref() == Some(id));
    let turns: Vec<_> = turns.take(TURNS).map(|turn| shown(gateway, turn)).collect();
    if places.is_empty() && turns.is_empty() {
        let message = format!(
            "session {id}: it has no place, waits for none, and is in none of the last decisions"
        );
        return error(StatusCode::NOT_FOUND, "not_found", &message);
    }
    json(
        StatusCode::OK,
        &value!({"session_id": id, "now": places, "turns": turns}),
    )
}

/// Whether whoever may ask may see what stands in prompts: the admin, or who alone is on this machine.
fn shows_text(gateway: &Gateway) -> bool {
    let is_alone = gateway.is_loopback && !gateway.keys.are_needed();
    gateway.config.admin_token.is_some() || is_alone
}

fn shown(gateway: &Gateway, turn: &DecisionRecord) -> Value {
    let finding = gateway.doctor.finding(&turn.decision_id);
    let finding = finding.map(|it| match shows_text(gateway) {
        true => it,
        false => it.without_text(),
    });
    let worker = match &turn.route {
        NamedRoute::Local { worker } => value!({"worker": worker.id}),
        NamedRoute::PrefillDecode { prefill, decode } => {
            value!({"prefill": prefill.id, "decode": decode.id})
        }
    };
    value!({
        "ts_unix_s": turn.ts_unix_s,
        "request_id": turn.request_id,
        "decision_id": turn.decision_id,
        "route": worker,
        "reason": turn.reason,
        "place": turn.admission.state,
        "waited_s": turn.admission.waited_s,
        "input_tokens": turn.input_tokens,
        "new_tokens": turn.new_tokens,
        "believed_cached_tokens": turn.input_tokens.saturating_sub(turn.new_tokens),
        "ended": turn.ended.get(),
        "difference": finding,
    })
}
