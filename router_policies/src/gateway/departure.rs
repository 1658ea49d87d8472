//! Clients that leave while their request is queued in an engine that does not survive that.
//!
//! A request whose client leaves is dropped, and with it the connection to its worker, which aborts it
//! there. vLLM (0.26.0) with its KV offloading takes a request that was aborted before it was ever
//! scheduled to have all blocks of its prompt, and an assertion ends the engine, with everybody's
//! requests in it (its issue 49118; 49146 mended it later). So requests in a fleet with such a worker
//! run in a task of their own. It ends with its client at any time but while it waits for a first token
//! there: by then the request has been scheduled, and may be aborted.

use std::sync::Arc;
use tokio::sync::watch;

/// Whether a request's client has left, and whether the request must stay all the same.
#[derive(Clone, Debug)]
pub(super) struct Stay(Arc<watch::Sender<Standing>>);

#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    has_left: bool,
    is_held: bool,
}

/// It stays as long as this lives.
pub(super) struct Staying<'a>(&'a Stay);

/// The client is there as long as this lives.
struct Here(Stay);

impl Stay {
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Standing::default())))
    }

    pub fn hold(&self) -> Staying<'_> {
        self.0.send_modify(|standing| standing.is_held = true);
        Staying(self)
    }

    /// Whether the client has left: what is begun for it now, nobody gets.
    pub fn has_left(&self) -> bool {
        self.0.borrow().has_left
    }

    /// Waits until the client has left and nothing keeps the request.
    async fn is_over(&self) {
        let is_over = |standing: &Standing| standing.has_left && !standing.is_held;
        // The sender lives as long as this does.
        let _ = self.0.subscribe().wait_for(is_over).await;
    }
}

impl Drop for Staying<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|standing| standing.is_held = false);
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.0.0.send_modify(|standing| standing.has_left = true);
    }
}

/// Runs `serving` in a task of its own. Where this is dropped it goes on for as long as `stay` is held.
pub(super) async fn outlive<T: Send + 'static>(
    stay: Stay,
    serving: impl Future<Output = T> + Send + 'static,
) -> T {
    let _here = Here(stay.clone());
    // Boxed here: a task is copied several times on its way to the runtime.
    let serving = Box::pin(serving);
    let task = tokio::spawn(async move {
        tokio::select! {
            biased;
            answer = serving => Some(answer),
            () = stay.is_over() => None,
        }
    });
    match task.await {
        Ok(Some(answer)) => answer,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The router ends. (It is not told that the client left while this waits for it.)
        Ok(None) | Err(_) => std::future::pending().await,
    }
}
