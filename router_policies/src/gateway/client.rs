//! A client's connection, and its end where a request's time is over, or the router's, and the client does
//! not read.
//!
//! hyper asks an answer's body for more only while the socket takes what there is. So what is to happen
//! at the deadline whatever the client does is done here, where the connection itself is driven: the
//! timer is one a connection, set again only when it fires, and costs a request next to nothing. A router
//! that has waited for its requests for long enough has the deadline come at once.
//!
//! The same timer says, once a request, that its client has heard nothing for a while: see [`super::patience`].
//!
//! A client that is answered before its body was read, or whose body nobody reads, is still sending it. To
//! close its connection at once would reset it, and most clients would never see the answer: so what it
//! sends is thrown away for a while. What is short is read before the answer: a connection that is kept
//! afterwards would else be taken for one on which something is still coming, and hold a router that stops.

use super::fault::{SHUTTING_DOWN, TIME_IS_OVER};
use super::patience::{self, Opening};
use decision::fleet::Outcome;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{EXPECT, HeaderMap};
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use std::io::{IoSlice, Result};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

/// How long a client has to take the end of an answer whose time is over.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a client that has its answer may go on sending what nobody reads.
const LINGER: Duration = Duration::from_secs(5);

/// How much of a body that nobody wants is read before its answer, and for how long.
const MAX_UNWANTED_BYTES: u64 = 64 << 10;
const UNWANTED_PATIENCE: Duration = Duration::from_millis(100);

/// Why an answer ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutOff {
    TimeIsOver,
    ShuttingDown,
}

impl CutOff {
    /// What the log and the client are told.
    pub fn told(self) -> (Outcome, &'static str) {
        match self {
            Self::TimeIsOver => (Outcome::Timeout, TIME_IS_OVER),
            Self::ShuttingDown => (Outcome::RouterError, SHUTTING_DOWN),
        }
    }
}

/// What a connection, its requests and their answers tell each other.
#[derive(Debug, Default)]
pub(crate) struct Client {
    pub address: Option<IpAddr>,
    /// Of the last request that came.
    times: Mutex<Times>,
    is_over: AtomicBool,
    /// Its client has heard nothing for [`patience::INTERVAL`].
    is_silent: AtomicBool,
    /// How its answer may begin before there is one.
    opening: Mutex<Option<Opening>>,
    /// The router waits no longer for what runs.
    is_shutting_down: AtomicBool,
    /// The socket took nothing more when it was last written to.
    is_full: AtomicBool,
    /// The last request has a body that is not read to its end.
    is_unread: AtomicBool,
}

/// When something is to be done about a request.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    deadline: Option<Instant>,
    /// When its client has heard nothing for long; none once that was told.
    silent: Option<Instant>,
}

impl Times {
    fn next(self) -> Option<Instant> {
        let deadline = self.deadline?;
        Some(self.silent.map_or(deadline, |silent| silent.min(deadline)))
    }
}

impl Client {
    pub fn at(address: IpAddr) -> Self {
        Self {
            address: Some(address),
            ..Self::default()
        }
    }

    /// A request comes at `now`; its answer must have left by `deadline`.
    pub fn begin(&self, now: Instant, deadline: Instant) {
        *self.times.lock() = Times {
            deadline: Some(deadline),
            silent: Some(now + patience::INTERVAL),
        };
        self.is_over.store(false, Ordering::Relaxed);
        self.is_silent.store(false, Ordering::Relaxed);
        *self.opening.lock() = None;
        self.has_sent_body();
    }

    /// The request that has come is one whose answer may begin like this before there is one.
    pub fn may_wait(&self, opening: Opening) {
        *self.opening.lock() = Some(opening);
    }

    /// How its answer begins now, if its client has heard nothing for long and may hear this; said once.
    pub fn begins_to_wait(&self) -> Option<Opening> {
        let is_silent = self.is_silent.load(Ordering::Relaxed);
        is_silent.then(|| self.opening.lock().take()).flatten()
    }

    /// The request that has come has a body.
    pub fn sends_body(&self) {
        self.is_unread.store(true, Ordering::Relaxed);
    }

    /// Its body is there, all of it.
    pub fn has_sent_body(&self) {
        self.is_unread.store(false, Ordering::Relaxed);
    }

    /// Reads the rest of a body that nobody wants, unless it is long or does not come at once. Then nothing is
    /// left to wait for when the connection ends, and the next request can come on it.
    pub async fn pass_over(&self, headers: &HeaderMap, mut body: Incoming) {
        let announced = body.size_hint();
        let is_long = announced.lower() > MAX_UNWANTED_BYTES;
        // To read it tells a client that waits for `100 Continue` to send all of it.
        let may_be_long = announced.exact().is_none() && headers.contains_key(EXPECT);
        if body.is_end_stream() {
            return self.has_sent_body();
        }
        if is_long || may_be_long {
            return;
        }
        let rest = async {
            let mut bytes = 0;
            loop {
                match body.frame().await {
                    Some(Ok(frame)) => bytes += frame.data_ref().map_or(0, |it| it.len() as u64),
                    Some(Err(_)) => return false,
                    None => return true,
                }
                if bytes > MAX_UNWANTED_BYTES {
                    return false;
                }
            }
        };
        if tokio::time::timeout(UNWANTED_PATIENCE, rest).await == Ok(true) {
            self.has_sent_body();
        }
    }

    /// Whether, and why, the answer to the last request has to end now.
    pub fn cut_off(&self) -> Option<CutOff> {
        let is_over = self.is_over.load(Ordering::Relaxed);
        is_over.then(|| match self.is_shutting_down.load(Ordering::Relaxed) {
            true => CutOff::ShuttingDown,
            false => CutOff::TimeIsOver,
        })
    }

    /// Drives the connection to its end. It is dropped, and all that its answer holds with it, if a
    /// request's time is over while the client does not take what it is sent. Once `cutting_off` becomes
    /// true, every request's time is over.
    pub async fn drive(&self, connection: impl Future, mut cutting_off: watch::Receiver<bool>) {
        let mut connection = pin!(connection);
        let is_cutting_off = cutting_off.clone();
        let mut shutting_down = pin!(cutting_off.wait_for(|is| *is));
        // Who is woken by that. To ask again at every turn of the connection costs more than the rest of this.
        let mut woken: Option<Waker> = None;
        let mut timer = pin!(tokio::time::sleep(Duration::ZERO));
        let (mut is_set, mut is_shutting_down) = (false, false);
        std::future::poll_fn(|cx| {
            loop {
                let is_known = woken.as_ref().is_some_and(|it| it.will_wake(cx.waker()));
                let may_be_over = !is_known || is_cutting_off.has_changed().unwrap_or(false);
                if !is_shutting_down && may_be_over {
                    woken = Some(cx.waker().clone());
                    is_shutting_down = shutting_down.as_mut().poll(cx).is_ready();
                }
                if is_shutting_down && !self.is_shutting_down.load(Ordering::Relaxed) {
                    let has_begun = self.times.lock().deadline.is_some();
                    if has_begun && !self.is_over.load(Ordering::Relaxed) {
                        self.is_shutting_down.store(true, Ordering::Relaxed);
                        self.times.lock().deadline = Some(Instant::now());
                        is_set = false;
                    }
                }
                if connection.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                let times = *self.times.lock();
                let (Some(deadline), Some(next)) = (times.deadline, times.next()) else {
                    return Poll::Pending;
                };
                if !is_set || next < timer.deadline() {
                    timer.as_mut().reset(next);
                    is_set = true;
                }
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                let now = Instant::now();
                if now < deadline {
                    if times.silent.is_some_and(|silent| silent <= now) {
                        self.times.lock().silent = None;
                        // The connection, asked once more, lets the request's answer begin.
                        self.is_silent.store(true, Ordering::Relaxed);
                    }
                    // Else set for an earlier request.
                    is_set = false;
                    continue;
                }
                let had_last_words = self.is_over.swap(true, Ordering::Relaxed);
                if self.is_full.load(Ordering::Relaxed) {
                    return Poll::Ready(());
                }
                if had_last_words {
                    // Whatever there was to say has been taken.
                    self.times.lock().deadline = None;
                    is_set = false;
                } else {
                    // The answer, asked once more, says to the client that its time is over.
                    *self.times.lock() = Times {
                        deadline: Some(now + LAST_WORDS),
                        silent: None,
                    };
                    is_set = false;
                }
            }
        })
        .await;
    }
}

/// The client's socket, which notes when it is full, and reads what is still coming when it is closed.
pub(super) struct Socket<S> {
    io: TokioIo<S>,
    client: Arc<Client>,
    /// Nothing more is written.
    is_shut: bool,
    /// How long it goes on reading then.
    lingers: Option<Pin<Box<Sleep>>>,
}

impl<S> Socket<S> {
    pub fn new(socket: S, client: Arc<Client>) -> Self {
        Self {
            io: TokioIo::new(socket),
            client,
            is_shut: false,
            lingers: None,
        }
    }

    fn note<T>(&self, written: Poll<T>) -> Poll<T> {
        let is_full = &self.client.is_full;
        is_full.store(written.is_pending(), Ordering::Relaxed);
        written
    }
}

impl<S: AsyncRead + Unpin> Socket<S> {
    /// Throws away the rest of a body that nobody reads, until the client ends its side, for [`LINGER`] at most.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.client.is_unread.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let timer = self
            .lingers
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        let mut thrown_away = [0; 8 << 10];
        while Instant::now() < timer.deadline() {
            let mut buffer = ReadBuf::new(&mut thrown_away);
            let read = Pin::new(&mut self.io).poll_read(cx, buffer.unfilled());
            if read.is_pending() {
                return timer.as_mut().poll(cx).map(Ok);
            }
            if buffer.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> Read for Socket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Write for Socket<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.is_shut {
            ready!(Pin::new(&mut self.io).poll_shutdown(cx))?;
            self.is_shut = true;
        }
        self.poll_linger(cx)
    }
}
