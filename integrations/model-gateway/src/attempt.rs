//! One request from its arrival to the head of its answer: asks the decision for a place, waits for it where it must,
//! sends the request where it says, and asks again where a worker has failed.

use crate::answer::{self, Turn};
use crate::asked::{Asked, Call};
use crate::dispatch::Dispatch;
use crate::workers::KnownWorkers;
use axum::response::Response;
use decision::fleet::{Admit, Fleet, Outcome, Refused, Request, Reservation};
use decision::model::WorkerSpec;
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use smg::routers::error;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Asks the decision, for every request.
pub struct Decisions {
    pub fleet: Arc<Fleet>,
    pub known: KnownWorkers,
    pub patience: Duration,
    pub retries: usize,
}

/// A worker that answered with an error, and when it was chosen.
struct Failed {
    worker: Arc<WorkerSpec>,
    begun_s: f64,
}

impl Decisions {
    /// The answer to a request, or an error in the gateway's shape.
    pub async fn answer(
        &self,
        dispatch: &Dispatch,
        asked: Asked,
        mut request: Request,
        call: Call<'_>,
    ) -> Response {
        let until = Instant::now() + self.patience;
        let mut exclude = Vec::new();
        let mut failed: Vec<Failed> = Vec::new();
        let mut last = None;
        for attempt in 0..=self.retries {
            let turn = match self.place(&request, &exclude, until).await {
                Ok(turn) => turn,
                // What the workers said is the better reason.
                Err(refusal) => return last.unwrap_or(*refusal),
            };
            request.arrived_s = request.arrived_s.or(Some(turn.begun_s()));
            let prefill = turn.prefill().map(|spec| &*spec.id);
            let way = match dispatch.way(&turn.answering().id, prefill).await {
                Ok(Some(way)) => way,
                Ok(None) => {
                    exclude.extend(ids(&turn));
                    let reason = "it was removed".to_owned();
                    turn.finish(Outcome::RouterError, None, Some(reason));
                    continue;
                }
                Err(reason) => {
                    turn.finish(Outcome::RouterError, None, Some(reason.clone()));
                    return error::internal_error("no_router", reason);
                }
            };
            let response = asked.clone().send(way.router.as_ref(), call).await;
            let status = response.status();
            if !status.is_server_error() {
                for Failed { worker, begun_s } in failed {
                    self.fleet.blame(&worker, begun_s);
                }
                let turn = Turn {
                    reservation: turn,
                    is_stream: asked.is_stream(),
                    counted: way.counted,
                };
                return answer::watched(turn, response);
            }
            let reason = format!("the gateway: {status}");
            if turn.prefill().is_none() {
                failed.push(Failed {
                    worker: Arc::clone(turn.answering()),
                    begun_s: turn.begun_s(),
                });
            }
            exclude.extend(ids(&turn));
            turn.finish(outcome_of(status), Some(status.as_u16()), Some(reason));
            tracing::warn!("attempt {attempt} failed: {status}");
            last = Some(response);
        }
        last.unwrap_or_else(nobody)
    }

    /// Places a request, or says why it is not placed.
    async fn place(
        &self,
        request: &Request,
        exclude: &[String],
        until: Instant,
    ) -> Result<Reservation, Box<Response>> {
        let may_go = Arc::new(Notify::new());
        let waker = Arc::clone(&may_go);
        let mut admit = self
            .fleet
            .admit(request, exclude, move || waker.notify_one());
        loop {
            let ticket = match admit {
                Admit::Placed(turn) => return Ok(turn),
                Admit::Refused(why) => return Err(Box::new(refused(&why))),
                Admit::Waiting(ticket) => ticket,
            };
            // Dropped when the client leaves, and the place in the queue with it.
            if tokio::time::timeout_at(until, may_go.notified())
                .await
                .is_err()
            {
                return Err(Box::new(full(self.patience.as_secs_f64())));
            }
            admit = self.fleet.place_ticket(ticket, request, exclude);
        }
    }
}

fn ids(turn: &Reservation) -> Vec<String> {
    let workers = [Some(turn.answering()), turn.prefill()];
    let workers = workers.into_iter().flatten();
    workers.map(|spec| spec.id.clone()).collect()
}

fn outcome_of(status: StatusCode) -> Outcome {
    match status {
        StatusCode::GATEWAY_TIMEOUT => Outcome::Timeout,
        _ => Outcome::WorkerError,
    }
}

fn refused(why: &Refused) -> Response {
    match why {
        Refused::ByPolicy(_) => nobody(),
        Refused::QueueFull { retry_after_s }
        | Refused::NoShare { retry_after_s }
        | Refused::Quota { retry_after_s, .. }
        | Refused::WaitedTooLong { retry_after_s } => full(*retry_after_s),
    }
}

fn nobody() -> Response {
    error::service_unavailable("no_candidates", "no worker can take the request now")
}

fn full(retry_after_s: f64) -> Response {
    let mut response = error::too_many_requests("no_room", "no KV is free for the request");
    let seconds = retry_after_s.ceil().clamp(1.0, 3_600.0) as u64;
    let headers = response.headers_mut();
    headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    response
}
