//! A request between its arrival and its answer, over all of its attempts.

use super::Gateway;
use super::apis::Api;
use super::body::Scanned;
use super::client::Client;
use super::departure::Stay;
use super::record::Ticket;
use super::splice::{Pieces, splice};
use super::traces::RequestTrace;
use bytes::Bytes;
use decision::fleet::Request as Placement;
use decision::fleet::prefix::hash::PromptHashes;
use hyper::header::{HeaderMap, HeaderValue};
use hyper::http::uri::PathAndQuery;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::time::Instant;

/// What goes with a request from its headers to its answer, whatever its body says: who asks for what
/// and until when, and what of it outlives one attempt. All that serve it share this one.
pub(super) struct RequestContext {
    pub client: Arc<Client>,
    pub api: Api,
    /// Its answer must have left by then.
    pub deadline: Instant,
    /// Where the fleet has workers that a queued request must not be aborted on.
    pub stay: Option<Stay>,
    /// Where it is recorded, until a stream takes it along.
    pub trace: Option<Box<RequestTrace>>,
}

impl RequestContext {
    pub fn new(client: Arc<Client>, api: Api, deadline: Instant) -> Self {
        Self {
            client,
            api,
            deadline,
            stay: None,
            trace: None,
        }
    }
}

/// A request while it has no answer.
pub(super) struct Exchange<'a> {
    pub gateway: &'a Arc<Gateway>,
    pub context: &'a mut RequestContext,
    /// Path and query at the worker.
    pub target: PathAndQuery,
    pub headers: HeaderMap,
    pub bytes: Bytes,
    pub scanned: Scanned,
    pub placement: Placement,
    /// Of a prompt that was encoded: its text, as it stands in the body.
    pub text: Option<PromptHashes>,
    /// Where it is recorded, until its answer begins.
    pub recording: Option<Ticket>,
    /// A worker has had it already, and may get it again.
    pub is_repeated: AtomicBool,
    /// What the worker calls otherwise than the client does: fields of the body, joined by commas.
    pub own_fields: String,
    /// Of its last attempt.
    pub decision_id: Option<HeaderValue>,
}

impl Exchange<'_> {
    pub(super) fn is_repeated(&self) -> bool {
        self.is_repeated.load(Ordering::Relaxed)
    }

    /// The client's body with these fields, and with workers' own names in place of the client's.
    pub(super) fn spliced(&self, fields: String) -> Pieces {
        spliced(&self.bytes, &self.scanned, &self.own_fields, fields)
    }
}

/// A body with these fields and, behind them, `own_fields`: what the worker calls otherwise than the client does.
pub(super) fn spliced(
    bytes: &Bytes,
    scanned: &Scanned,
    own_fields: &str,
    mut fields: String,
) -> Pieces {
    if !own_fields.is_empty() {
        let separator = if fields.is_empty() { "" } else { "," };
        fields = format!("{fields}{separator}{own_fields}");
    }
    match fields.is_empty() && scanned.cut.is_none() {
        true => Pieces::from(bytes.clone()),
        false => splice(bytes, scanned, fields),
    }
}
