//! How many requests run and how many wait.

use hyper::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};
use tokio::time::Instant;

/// Held for as long as a request runs.
pub(crate) type Permit = OwnedSemaphorePermit;

/// Why a request may not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAdmitted {
    QueueFull,
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
            Self::ShuttingDown => Some(1.0),
            Self::QueueFull | Self::WaitedTooLong | Self::TimeIsOver => None,
        }
    }
}

/// A bounded number of running requests, and a bounded queue before them.
pub(crate) struct Admission {
    running: Arc<Semaphore>,
    queued: AtomicUsize,
    max_queued: usize,
    is_closed: watch::Sender<bool>,
}

/// Leaves the queue on every path, a client's disconnect included.
struct Queued<'a>(&'a AtomicUsize);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Admission {
    pub fn new(max_inflight: usize, max_queued: usize) -> Self {
        Self {
            running: Arc::new(Semaphore::new(max_inflight.min(Semaphore::MAX_PERMITS))),
            queued: AtomicUsize::new(0),
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

    /// Waits for its turn, first come, first served: as long as `patience`, and not past `deadline`.
    pub async fn enter(
        &self,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Permit, NotAdmitted> {
        match Arc::clone(&self.running).try_acquire_owned() {
            Ok(permit) => return Ok(permit),
            Err(TryAcquireError::Closed) => return Err(NotAdmitted::ShuttingDown),
            Err(TryAcquireError::NoPermits) => {}
        }
        let ahead = self.queued.fetch_add(1, Ordering::Relaxed);
        let _queued = Queued(&self.queued);
        if ahead >= self.max_queued {
            return Err(NotAdmitted::QueueFull);
        }
        let turn = Arc::clone(&self.running).acquire_owned();
        let until = Instant::now() + patience;
        match tokio::time::timeout_at(until.min(deadline), turn).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(NotAdmitted::ShuttingDown),
            _ if deadline <= until => Err(NotAdmitted::TimeIsOver),
            _ => Err(NotAdmitted::WaitedTooLong),
        }
    }

    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
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
        let first = admission.enter(long, late()).await.expect("its turn");
        let refusal = admission.enter(long, soon()).await.expect_err("no turn");
        assert_eq!(refusal, NotAdmitted::TimeIsOver);
        let refusal = admission.enter(short, late()).await.expect_err("no turn");
        assert_eq!(refusal, NotAdmitted::WaitedTooLong);
        drop(first);
        assert!(admission.enter(long, late()).await.is_ok());
    }

    #[tokio::test]
    async fn once_closed_it_lets_nobody_in_and_tells_those_in_the_queue() {
        let admission = Admission::new(1, 1);
        let long = Duration::from_secs(600);
        let late = || Instant::now() + long;
        let _running = admission.enter(long, late()).await.expect("its turn");
        let (queued, ()) = tokio::join!(admission.enter(long, late()), async {
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
        let late_comer = admission.enter(long, late()).await;
        assert_eq!(late_comer.expect_err("no turn"), NotAdmitted::ShuttingDown);
    }
}
