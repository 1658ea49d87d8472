//! How many requests run and how many wait.

use hyper::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
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
        }
    }
}

/// A bounded number of running requests, and a bounded queue before them.
pub(crate) struct Admission {
    running: Arc<Semaphore>,
    queued: AtomicUsize,
    max_queued: usize,
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
        }
    }

    /// Waits for its turn, first come, first served: as long as `patience`, and not past `deadline`.
    pub async fn enter(
        &self,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Permit, NotAdmitted> {
        if let Ok(permit) = Arc::clone(&self.running).try_acquire_owned() {
            return Ok(permit);
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
}
