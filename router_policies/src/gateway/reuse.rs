//! Connections to workers that know whether they have carried a request before.
//!
//! A worker may close a connection that is kept for the next request just as that request is sent. It
//! then breaks without an answer, which says nothing of the worker or the request: it is sent once more.
//! On a new connection the same thing is a failure.

use super::resolve::Connector;
use super::splice::Pieces;
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::{Request, Response, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::client::legacy::{Client, Error};
use std::io::{ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;
use tower_service::Service;

/// A connection that was being closed breaks within the time that a packet takes to come back. One that
/// breaks later had its request at work.
const STALE_WITHIN: Duration = Duration::from_millis(250);

pub(crate) type WorkerClient = Client<NotingConnector<HttpsConnector<Connector>>, Pieces>;

/// Whether a connection has carried a request to its answer.
#[derive(Clone, Debug, Default)]
struct Used(Arc<AtomicBool>);

/// Makes connections that note their use.
#[derive(Clone)]
pub(crate) struct NotingConnector<C>(pub C);

impl<C> Service<Uri> for NotingConnector<C>
where
    C: Service<Uri>,
    C::Future: Send + 'static,
{
    type Response = Noting<C::Response>;
    type Error = C::Error;
    type Future =
        Pin<Box<dyn Future<Output = std::result::Result<Self::Response, C::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let stream = connecting.await?;
            Ok(Noting {
                stream,
                used: Used::default(),
            })
        })
    }
}

/// A connection and whether it was used.
pub(crate) struct Noting<S> {
    stream: S,
    used: Used,
}

impl<S: Connection> Connection for Noting<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.used.clone())
    }
}

impl<S: Read + Unpin> Read for Noting<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: Write + Unpin> Write for Noting<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Sends a request, and the one that `again` makes where a connection that was kept turns out to have
/// been closed by the worker.
pub(super) async fn send(
    client: &WorkerClient,
    request: Request<Pieces>,
    again: impl FnOnce() -> Option<Request<Pieces>>,
) -> std::result::Result<Response<Incoming>, Error> {
    let sent = Instant::now();
    let mut answered = client.request(request).await;
    if let Err(failure) = &answered
        && sent.elapsed() <= STALE_WITHIN
        && was_closed_while_kept(failure)
        && let Some(request) = again()
    {
        answered = client.request(request).await;
    }
    if let Ok(response) = &answered
        && let Some(used) = response.extensions().get::<Used>()
    {
        used.0.store(true, Ordering::Relaxed);
    }
    answered
}

fn was_closed_while_kept(failure: &Error) -> bool {
    let mut extras = hyper::http::Extensions::new();
    if let Some(connection) = failure.connect_info() {
        connection.get_extras(&mut extras);
    }
    let was_used = extras
        .get::<Used>()
        .is_some_and(|used| used.0.load(Ordering::Relaxed));
    was_used && is_closed(failure)
}

/// Whether the connection ended before anything of an answer came.
fn is_closed(failure: &Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(failure);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<hyper::Error>()
            && error.is_incomplete_message()
        {
            return true;
        }
        if let Some(error) = error.downcast_ref::<std::io::Error>()
            && matches!(
                error.kind(),
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
            )
        {
            return true;
        }
        cause = error.source();
    }
    false
}
