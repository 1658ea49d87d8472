//! Reads what an engine replays of its KV events. Knows nothing of what is in a batch.
//!
//! Engines send all of it at once, and their sockets drop what is more than they queue (a thousand
//! messages), the end of the replay among it. So what lacks is asked for again, as soon as something is seen to
//! lack or nothing comes any more, and as long as each answer brings some of it.

use super::{PATIENCE, resolve};
use bytes::Bytes;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// For each batch that follows, while none of them has been new.
const SILENCE: Duration = Duration::from_secs(1);
/// For each batch that follows a new one: the rest has been dropped on its way. Engines send many in a millisecond.
const LULL: Duration = Duration::from_millis(50);
/// An answer that brought fewer may have been left too early, by an engine that is slow: the next lull may last
/// twice as long.
const FEW: u64 = 500;
/// The batch number that ends a replay: −1.
const END: u64 = u64::MAX;

/// A part of a replay.
pub(super) enum Replayed {
    /// The batch after the last; the first is the one that was asked for.
    Batch(u64, Bytes),
    /// The engine no longer has what was before this batch.
    Lost { next: u64 },
}

/// Asks `endpoint` for all batches from `next` on, and tells them in their order.
///
/// # Errors
/// One line that says why they are not all of them.
pub(super) async fn read(
    endpoint: String,
    mut next: u64,
    told: Sender<Replayed>,
) -> Result<(), String> {
    let mut lull = LULL;
    loop {
        let asked = next;
        let is_whole = answer(&endpoint, &mut next, lull, &told).await;
        if is_whole == Ok(true) || told.is_closed() {
            return Ok(());
        }
        match next - asked {
            0 => {
                return is_whole.and(Err(format!(
                    "{endpoint}: batch {asked} is missing from its replay"
                )));
            }
            1..FEW => lull = SILENCE.min(2 * lull),
            _ => {}
        }
    }
}

/// One answer, up to the first batch that lacks. True if none does.
async fn answer(
    endpoint: &str,
    next: &mut u64,
    lull: Duration,
    told: &Sender<Replayed>,
) -> Result<bool, String> {
    let fail = |error: ZmqError| format!("{endpoint}: {error}");
    let silence = || format!("{endpoint}: no replay");
    let asked = *next;
    // Whatever is still to come of an earlier answer goes to the socket that asked for it.
    let mut socket = DealerSocket::new();
    let mut ask = ZmqMessage::from(Bytes::new());
    ask.push_back(Bytes::copy_from_slice(&asked.to_be_bytes()));
    let begin = async {
        let address = resolve::endpoint(endpoint).await?;
        socket.connect(&address).await.map_err(fail)?;
        socket.send(ask).await.map_err(fail)?;
        socket.recv().await.map_err(fail)
    };
    let mut message = tokio::time::timeout(PATIENCE, begin)
        .await
        .map_err(|_| silence())??;
    let mut is_first = true;
    loop {
        let Some((number, payload)) = parts(&message) else {
            return Err(format!("{endpoint}: a message of a wrong shape"));
        };
        if number == END {
            return Ok(true);
        }
        if number > *next {
            if !is_first {
                return Ok(false);
            }
            *next = number;
            if told.send(Replayed::Lost { next: number }).await.is_err() {
                return Ok(false);
            }
        }
        is_first = false;
        if number == *next {
            *next += 1;
            if told.send(Replayed::Batch(number, payload)).await.is_err() {
                return Ok(false);
            }
        }
        let patience = if *next > asked { lull } else { SILENCE };
        message = tokio::time::timeout(patience, socket.recv())
            .await
            .map_err(|_| silence())?
            .map_err(fail)?;
    }
}

/// The batch number and the payload: the last two frames, whatever delimiters or topics precede.
pub(super) fn parts(message: &ZmqMessage) -> Option<(u64, Bytes)> {
    let payload = message.get(message.len().checked_sub(1)?)?.clone();
    let number = message.get(message.len().checked_sub(2)?)?;
    Some((
        u64::from_be_bytes(number.as_ref().try_into().ok()?),
        payload,
    ))
}
