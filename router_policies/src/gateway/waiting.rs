//! Requests that wait for room: what admission does not let in yet waits here, beside the fleet, and
//! holds no place among the requests that run.

use super::admission::{NotAdmitted, Permit};
use super::apis::Api;
use super::{Gateway, Reply, error_of};
use decision::fleet::admission::Quota;
use decision::fleet::admission::queue::{WaitEnd, WhyRefused};
use decision::fleet::{Admit, Refused, Request, Reservation, Ticket};
use decision::policy::Refusal;
use hyper::header::{HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How often time alone may let somebody in, while somebody waits.
const PUMP_INTERVAL: Duration = Duration::from_millis(100);

/// Why a request was not placed.
#[derive(Debug)]
pub(super) enum NotPlaced {
    Refused(Refused),
    /// It was let in, and then found no place among the requests that run.
    NotAdmitted(NotAdmitted),
    /// Its deadline came.
    TimeIsOver,
}

impl NotPlaced {
    pub fn by_policy(refusal: Refusal) -> Self {
        Self::Refused(Refused::ByPolicy(refusal))
    }

    pub fn is_by_policy(&self) -> bool {
        matches!(self, Self::Refused(Refused::ByPolicy(_)))
    }
}

/// Places a request, now or when there is room for it. While it waits it gives up its `permit`: what
/// bounds the waiting is `max_waiting`, and what bounds those that run should not be used up by them.
/// Without one, whoever asks goes on running elsewhere meanwhile.
pub(super) async fn place(
    gateway: &Arc<Gateway>,
    request: &Request,
    exclude: &[String],
    permit: Option<&mut Option<Permit>>,
    deadline: Instant,
) -> Result<Reservation, NotPlaced> {
    let room = Arc::new(Notify::new());
    let wake = Arc::clone(&room);
    let admit = gateway
        .fleet
        .admit(request, exclude, move || wake.notify_one());
    match admit {
        Admit::Placed(reservation) => Ok(reservation),
        Admit::Refused(refused) => Err(NotPlaced::Refused(refused)),
        Admit::Waiting(ticket) => {
            // Boxed, so that requests that need not wait do not carry the room for it.
            Box::pin(wait(
                gateway, request, exclude, permit, deadline, &room, ticket,
            ))
            .await
        }
    }
}

/// Waits until the turn of `ticket` is let in; `room` is notified when that is worth a look.
async fn wait(
    gateway: &Arc<Gateway>,
    request: &Request,
    exclude: &[String],
    mut permit: Option<&mut Option<Permit>>,
    deadline: Instant,
    room: &Notify,
    mut ticket: Ticket,
) -> Result<Reservation, NotPlaced> {
    let refused = WaitEnd::Refused;
    loop {
        if let Some(permit) = &mut permit {
            **permit = None;
        }
        keep_pumping(gateway);
        let may_be_ended = permit.is_some();
        if !may_be_ended {
            ticket.ends_as(WaitEnd::ServedElsewhere);
        }
        tokio::select! {
            // One that runs elsewhere meanwhile may end there.
            () = gateway.admission.closed(), if may_be_ended => {
                ticket.ends_as(refused(WhyRefused::ShuttingDown));
                return Err(NotPlaced::NotAdmitted(NotAdmitted::ShuttingDown));
            }
            woken = tokio::time::timeout_at(deadline, room.notified()) => {
                if woken.is_err() {
                    ticket.ends_as(refused(WhyRefused::TimeIsOver));
                    return Err(NotPlaced::TimeIsOver);
                }
            }
        }
        if let Some(permit) = &mut permit {
            let patience = Duration::from_secs_f64(gateway.config.queue_timeout_s);
            let turn = gateway.admission.enter(request.client, patience, deadline);
            let turn = turn.await;
            **permit = Some(turn.map_err(|refusal| {
                ticket.ends_as(refused(match refusal {
                    NotAdmitted::ShuttingDown => WhyRefused::ShuttingDown,
                    NotAdmitted::TimeIsOver => WhyRefused::TimeIsOver,
                    NotAdmitted::QueueFull | NotAdmitted::NoShare | NotAdmitted::WaitedTooLong => {
                        WhyRefused::NoPermit
                    }
                }));
                NotPlaced::NotAdmitted(refusal)
            })?);
        }
        ticket = match gateway.fleet.place_ticket(ticket, request, exclude) {
            Admit::Placed(reservation) => return Ok(reservation),
            Admit::Refused(refused) => return Err(NotPlaced::Refused(refused)),
            Admit::Waiting(ticket) => ticket,
        };
    }
}

/// Lets the fleet look again and again, for as long as something waits.
fn keep_pumping(gateway: &Arc<Gateway>) {
    if gateway.is_pumping.swap(true, Ordering::AcqRel) {
        return;
    }
    let gateway = Arc::downgrade(gateway);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(PUMP_INTERVAL).await;
            let Some(gateway) = gateway.upgrade() else {
                return;
            };
            gateway.fleet.pump();
            if gateway.fleet.next_pump_s().is_none() {
                gateway.is_pumping.store(false, Ordering::Release);
                // One that began to wait meanwhile may have found the flag still set.
                if gateway.fleet.next_pump_s().is_none()
                    || gateway.is_pumping.swap(true, Ordering::AcqRel)
                {
                    return;
                }
            }
        }
    });
}

pub(super) type IsPumping = AtomicBool;

/// What a client of `api` is told whose request was not placed for want of room or time; none where the
/// policy refused it.
pub(super) fn answer(
    gateway: &Gateway,
    api: Api,
    not_placed: &NotPlaced,
) -> Option<Response<Reply>> {
    let (status, kind, message, retry_after_s) = match not_placed {
        NotPlaced::Refused(Refused::ByPolicy(_)) => return None,
        NotPlaced::Refused(Refused::QueueFull { retry_after_s }) => (
            StatusCode::TOO_MANY_REQUESTS,
            "overloaded",
            "as many requests wait for room in the workers' KV caches as may (admission.max_waiting)",
            Some(*retry_after_s),
        ),
        NotPlaced::Refused(Refused::NoShare { retry_after_s }) => (
            StatusCode::TOO_MANY_REQUESTS,
            "overloaded",
            "as many requests of this client wait as one client may have waiting (admission.max_waiting)",
            Some(*retry_after_s),
        ),
        NotPlaced::Refused(Refused::Quota {
            reached,
            retry_after_s,
        }) => (
            StatusCode::TOO_MANY_REQUESTS,
            "rate_limit_error",
            match reached {
                Quota::Sessions => {
                    "as many sessions of this tenant are active as may be (max_sessions)"
                }
                Quota::Tokens => "this tenant has used its tokens of this minute (tokens_per_min)",
            },
            Some(*retry_after_s),
        ),
        NotPlaced::Refused(Refused::WaitedTooLong { retry_after_s }) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "overloaded",
            "the request waited too long for room in a worker's KV cache (admission.max_wait_s)",
            Some(*retry_after_s),
        ),
        NotPlaced::NotAdmitted(refusal) => {
            let (status, kind, message) = refusal.told();
            (status, kind, message, refusal.retry_after_s())
        }
        NotPlaced::TimeIsOver => (
            StatusCode::GATEWAY_TIMEOUT,
            "timeout",
            "the request's time was over before there was room for it",
            None,
        ),
    };
    gateway.metrics.refused(status);
    let response = error_of(api, status, kind, message);
    Some(retried_after(response, retry_after_s))
}

/// The response, saying when another try may succeed.
pub(super) fn retried_after<B>(mut response: Response<B>, seconds: Option<f64>) -> Response<B> {
    if let Some(seconds) = seconds {
        let seconds = HeaderValue::from(seconds.ceil().max(1.0) as u64);
        response.headers_mut().insert(RETRY_AFTER, seconds);
    }
    response
}
