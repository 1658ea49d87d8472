//! How many requests run and how many wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Held for as long as a request runs.
pub(crate) type Permit = OwnedSemaphorePermit;

/// Why a request may not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAdmitted {
    QueueFull,
    WaitedTooLong,
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

    /// Waits for its turn, first come, first served.
    pub async fn enter(&self, patience: Duration) -> Result<Permit, NotAdmitted> {
        if let Ok(permit) = Arc::clone(&self.running).try_acquire_owned() {
            return Ok(permit);
        }
        let ahead = self.queued.fetch_add(1, Ordering::Relaxed);
        let _queued = Queued(&self.queued);
        if ahead >= self.max_queued {
            return Err(NotAdmitted::QueueFull);
        }
        let turn = Arc::clone(&self.running).acquire_owned();
        match tokio::time::timeout(patience, turn).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(NotAdmitted::WaitedTooLong),
        }
    }

    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }
}
