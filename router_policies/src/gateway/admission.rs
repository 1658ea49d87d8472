//! How many requests run and how many wait.

use decision::room::{Lack, Room};
use hyper::StatusCode;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};
use tokio::time::Instant;

/// Held for as long as a request runs.
pub(crate) type Permit = OwnedSemaphorePermit;

/// Why a request may not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAdmitted {
    QueueFull,
    /// Its client has as many waiting as one may.
    NoShare,
    WaitedTooLong,
    /// Its deadline came before its turn.
    TimeIsOver,
    /// The router ends, and the request had not begun.
    ShuttingDown,
}

impl NotAdmitted {
    /// What the client is told: status, kind and message.
    pub fn told(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::QueueFull => (
                StatusCode::TOO_MANY_REQUESTS,
                "overloaded",
                "the queue is full",
            ),
            Self::NoShare => (
                StatusCode::TOO_MANY_REQUESTS,
                "overloaded",
                "as many requests of this client wait as one client may have waiting (max_queued)",
            ),
            Self::WaitedTooLong => (
                StatusCode::SERVICE_UNAVAILABLE,
                "overloaded",
                "the request waited too long in the queue",
            ),
            Self::TimeIsOver => (
                StatusCode::GATEWAY_TIMEOUT,
                "timeout",
                "the request's time was over before its turn in the queue",
            ),
            Self::ShuttingDown => (
                StatusCode::SERVICE_UNAVAILABLE,
                "shutting_down",
                "the router is shutting down and had not sent the request to a worker yet",
            ),
        }
    }

    /// After how long another try may succeed, where that is known.
    pub fn retry_after_s(self) -> Option<f64> {
        match self {
            // All are told at once, and are not to come again at once.
            Self::ShuttingDown => Some(1.0 + 4.0 * fastrand::f64()),
            Self::QueueFull | Self::NoShare | Self::WaitedTooLong | Self::TimeIsOver => None,
        }
    }
}

/// A bounded number of running requests, and a bounded queue before them.
pub(crate) struct Admission {
    running: Arc<Semaphore>,
    queued: Mutex<Room>,
    max_queued: usize,
    is_closed: watch::Sender<bool>,
}

/// Leaves the queue on every path, a client's disconnect included.
struct Queued<'a>(&'a Mutex<Room>, Option<u64>);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.lock().give_back(self.1, 1);
    }
}

impl Admission {
    pub fn new(max_inflight: usize, max_queued: usize) -> Self {
        Self {
            running: Arc::new(Semaphore::new(max_inflight.min(Semaphore::MAX_PERMITS))),
            queued: Mutex::default(),
            max_queued,
            is_closed: watch::Sender::new(false),
        }
    }

    /// Lets nobody in any more. Those that run go on.
    pub fn close(&self) {
        self.running.close();
        self.is_closed.send_replace(true);
    }

    /// Resolves once this is closed.
    pub async fn closed(&self) {
        // The sender lives as long as this does.
        let _ = self.is_closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Waits for its turn, first come, first served: as long as `patience`, and not past `deadline`. `client` is who
    /// has a share of the queue, if it is known.
    pub async fn enter(
        &self,
        client: Option<u64>,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Permit, NotAdmitted> {
        match Arc::clone(&self.running).try_acquire_owned() {
            Ok(permit) => return Ok(permit),
            Err(TryAcquireError::Closed) => return Err(NotAdmitted::ShuttingDown),
            Err(TryAcquireError::NoPermits) => {}
        }
        let _queued = self.queue(client)?;
        let turn = Arc::clone(&self.running).acquire_owned();
        let until = Instant::now() + patience;
        match tokio::time::timeout_at(until.min(deadline), turn).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(NotAdmitted::ShuttingDown),
            _ if deadline <= until => Err(NotAdmitted::TimeIsOver),
            _ => Err(NotAdmitted::WaitedTooLong),
        }
    }

    fn queue(&self, client: Option<u64>) -> Result<Queued<'_>, NotAdmitted> {
        let mut queued = self.queued.lock();
        match queued.lack(client, 1, self.max_queued) {
            Some(Lack::OfRoom) => return Err(NotAdmitted::QueueFull),
            Some(Lack::OfShare) => return Err(NotAdmitted::NoShare),
            None => queued.take(client, 1),
        }
        Ok(Queued(&self.queued, client))
    }

    pub fn queued(&self) -> usize {
        self.queued.lock().held()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_waits_no_longer_than_its_patience_and_not_past_its_deadline() {
        let admission = Admission::new(1, 1);
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(600));
        let soon = || Instant::now() + short;
        let late = || Instant::now() + long;
        let first = admission.enter(None, long, late()).await.expect("its turn");
        let refusal = admission
            .enter(None, long, soon())
            .await
            .expect_err("no turn");
        assert_eq!(refusal, NotAdmitted::TimeIsOver);
        let refusal = admission
            .enter(None, short, late())
            .await
            .expect_err("no turn");
        assert_eq!(refusal, NotAdmitted::WaitedTooLong);
        drop(first);
        assert!(admission.enter(None, long, late()).await.is_ok());
    }

    #[tokio::test]
    async fn once_closed_it_lets_nobody_in_and_tells_those_in_the_queue() {
        let admission = Admission::new(1, 1);
        let long = Duration::from_secs(600);
        let late = || Instant::now() + long;
        let _running = admission.enter(None, long, late()).await.expect("its turn");
        let (queued, ()) = tokio::join!(admission.enter(None, long, late()), async {
            while admission.queued() == 0 {
                tokio::task::yield_now().await;
            }
            admission.close();
            admission.closed().await;
        });
        assert_eq!(
            queued.expect_err("no turn"),
            NotAdmitted::ShuttingDown,
            "it was in the queue"
        );
        let late_comer = admission.enter(None, long, late()).await;
        assert_eq!(late_comer.expect_err("no turn"), NotAdmitted::ShuttingDown);
    }
}
