//! gRPC's messages on a stream of HTTP/2: each with five bytes before it that say how long it is, and a status
//! behind the last.

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use prost::Message;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;

const HEAD_BYTES: usize = 5;
/// Messages that are written before the gateway takes one.
const UNSENT: usize = 4;
/// What is larger is accounted for before it comes.
const UNCOUNTED_BYTES: usize = 64 << 10;

static STATUS: HeaderName = HeaderName::from_static("grpc-status");
static MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// gRPC's codes that are told here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Ok = 0,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

/// How a stream ends.
#[derive(Clone, Debug)]
pub struct Status {
    code: Code,
    message: String,
}

impl Status {
    pub const OK: Self = Self {
        code: Code::Ok,
        message: String::new(),
    };

    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message }
    }

    /// As trailers, or as the headers of a stream that has nothing else.
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(STATUS.clone(), HeaderValue::from(self.code as u16));
        if let Ok(message) = HeaderValue::from_str(&self.message)
            && !self.message.is_empty()
        {
            headers.insert(MESSAGE.clone(), message);
        }
        headers
    }
}

/// Why no message was read.
#[derive(Debug)]
pub enum Unread<E> {
    /// The connection or the stream is gone.
    Gone,
    /// It is larger than messages may be.
    TooLarge,
    /// It is compressed or no message.
    Malformed(String),
    /// There is no room for it.
    NoRoom(E),
}

/// Messages that come.
pub struct Messages<B, H> {
    body: B,
    /// What has come of the next one.
    read: BytesMut,
    /// What a large one holds until it is there.
    held: Option<H>,
    max_bytes: usize,
}

impl<B: Body<Data = Bytes> + Unpin, H> Messages<B, H> {
    pub fn new(body: B, max_bytes: usize) -> Self {
        Self {
            body,
            read: BytesMut::new(),
            held: None,
            max_bytes,
        }
    }

    /// The next message; none at the stream's end. `hold` finds room for a large one.
    ///
    /// # Errors
    /// The stream is gone, or what comes is no message that is taken.
    pub fn poll_next<M: Message + Default, E>(
        &mut self,
        cx: &mut Context<'_>,
        hold: impl Fn(usize) -> Result<H, E>,
    ) -> Poll<Result<Option<M>, Unread<E>>> {
        loop {
            if let Some(message) = self.whole(&hold)? {
                let message = M::decode(message).map(Some);
                return Poll::Ready(message.map_err(|error| Unread::Malformed(error.to_string())));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.read.extend_from_slice(data);
                    }
                }
                None if self.read.is_empty() => return Poll::Ready(Ok(None)),
                Some(Err(_)) | None => return Poll::Ready(Err(Unread::Gone)),
            }
        }
    }

    /// The next message, if all of it is there.
    fn whole<E>(
        &mut self,
        hold: impl Fn(usize) -> Result<H, E>,
    ) -> Result<Option<Bytes>, Unread<E>> {
        let Some(head) = self.read.first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let [is_compressed, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if is_compressed != 0 {
            return Err(Unread::Malformed("it is compressed".to_owned()));
        }
        if length > self.max_bytes {
            return Err(Unread::TooLarge);
        }
        if length > UNCOUNTED_BYTES && self.held.is_none() {
            self.held = Some(hold(length).map_err(Unread::NoRoom)?);
        }
        if self.read.len() < HEAD_BYTES + length {
            return Ok(None);
        }
        let mut message = self.read.split_to(HEAD_BYTES + length).freeze();
        self.held = None;
        Ok(Some(message.split_off(HEAD_BYTES)))
    }
}

/// A message as it is sent.
pub fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(HEAD_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    // A vector grows.
    let _ = message.encode(&mut bytes);
    bytes.freeze()
}

/// Where the messages of one stream are written to.
pub struct Sender(mpsc::Sender<Result<Bytes, Status>>);

/// The receiver has left.
#[derive(Debug)]
pub struct Left;

impl Sender {
    /// Waits until there is room.
    pub async fn send(&self, message: &impl Message) -> Result<(), Left> {
        self.0.send(Ok(framed(message))).await.map_err(|_| Left)
    }

    /// Ends the stream.
    pub async fn end(self, status: Status) {
        // Where nobody is left, nobody hears it.
        let _ = self.0.send(Err(status)).await;
    }

    /// Resolves once the receiver has left.
    pub async fn left(&self) {
        self.0.closed().await;
    }
}

/// A stream of messages as a body, and what is sent in it.
pub fn stream() -> (Sender, Sent) {
    let (sender, receiver) = mpsc::channel(UNSENT);
    (Sender(sender), Sent(Some(receiver)))
}

/// See [`stream`]. None once it has ended.
pub struct Sent(Option<mpsc::Receiver<Result<Bytes, Status>>>);

impl Sent {
    /// Of a stream that has nothing in it.
    pub fn nothing() -> Self {
        Self(None)
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Some(receiver) = &mut self.0 else {
            return Poll::Ready(None);
        };
        let status = match ready!(receiver.poll_recv(cx)) {
            Some(Ok(message)) => return Poll::Ready(Some(Ok(Frame::data(message)))),
            Some(Err(status)) => status,
            None => Status::new(Code::Internal, "the picker failed"),
        };
        self.0 = None;
        Poll::Ready(Some(Ok(Frame::trailers(status.headers()))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::HttpBody;
    use super::*;
    use http_body_util::StreamBody;

    fn body(bytes: usize) -> HttpBody {
        HttpBody {
            body: vec![b'a'; bytes].into(),
            end_of_stream: true,
        }
    }

    /// What a stream that is cut into pieces of `size` bytes says.
    async fn read(sent: &[u8], size: usize) -> Vec<Result<Option<HttpBody>, Unread<()>>> {
        let pieces = sent.chunks(size).map(|piece| {
            let piece = Bytes::copy_from_slice(piece);
            Ok::<_, Infallible>(Frame::data(piece))
        });
        let mut pieces: Vec<_> = pieces.rev().collect();
        let stream = std::iter::from_fn(move || pieces.pop());
        let body = StreamBody::new(Pieces(stream));
        let mut messages = Messages::<_, usize>::new(body, 100_000);
        let mut all = Vec::new();
        loop {
            let hold = |bytes| match bytes > 90_000 {
                true => Err(()),
                false => Ok(bytes),
            };
            let next = std::future::poll_fn(|cx| messages.poll_next(cx, hold)).await;
            let is_last = !matches!(next, Ok(Some(_)));
            all.push(next);
            if is_last {
                return all;
            }
        }
    }

    struct Pieces<I>(I);

    impl<I: Iterator + Unpin> futures_core::Stream for Pieces<I> {
        type Item = I::Item;

        fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<I::Item>> {
            Poll::Ready(self.0.next())
        }
    }

    #[tokio::test]
    async fn messages_are_read_however_they_are_cut() {
        let all = [body(0), body(3), body(80_000), body(1)];
        let sent = all.each_ref().map(framed).concat();
        for size in [1, 4, 5, 6, 1000, 80_000, sent.len()] {
            let read = read(&sent, size).await;
            let (end, read) = read.split_last().expect("an end");
            assert!(matches!(end, Ok(None)), "{end:?}");
            let read: Vec<_> = read
                .iter()
                .map(|it| it.as_ref().expect("read").as_ref().expect("a message"))
                .collect();
            assert_eq!(read, all.each_ref(), "pieces of {size} bytes");
        }
    }

    #[tokio::test]
    async fn what_is_no_message_is_named() {
        let last = async |sent: &[u8]| read(sent, 7).await.pop().expect("an end");
        assert!(matches!(
            last(&framed(&body(100_000))).await,
            Err(Unread::TooLarge)
        ));
        assert!(matches!(
            last(&framed(&body(95_000))).await,
            Err(Unread::NoRoom(()))
        ));
        assert!(matches!(
            last(&[1, 0, 0, 0, 0]).await,
            Err(Unread::Malformed(_))
        ));
        assert!(matches!(
            last(&[0, 0, 0, 0, 1, 0xff]).await,
            Err(Unread::Malformed(_))
        ));
        let whole = framed(&body(9));
        assert!(matches!(
            last(&whole[..whole.len() - 1]).await,
            Err(Unread::Gone)
        ));
    }
}
