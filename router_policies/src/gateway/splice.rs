//! Bodies with more in them: fields are put in front of the closing brace, and the pieces are sent one
//! after the other, so that a long prompt is not copied for it.

use super::body::Scanned;
use bytes::Bytes;
use std::pin::Pin;
use std::task::{Context, Poll};

/// `body` with `fields` (`"key":value` pairs joined by commas) at the end of the outer object, and without what is
/// left out of it. The pieces share the body's memory. Keys that the client sent too are overridden: every engine's
/// parser takes the last of equal keys.
pub fn splice(body: &Bytes, scanned: &Scanned, fields: String) -> Pieces {
    let mut tail = fields;
    if !scanned.is_empty && !tail.is_empty() {
        tail.insert(0, ',');
    }
    let (end, begin) = match &scanned.cut {
        Some(cut) => (body.slice(..cut.start), cut.end),
        None => (Bytes::new(), 0),
    };
    Pieces([
        end,
        body.slice(begin..scanned.close),
        Bytes::from(tail),
        body.slice(scanned.close..),
    ])
}

/// A request body of up to four pieces that are sent one after the other.
#[derive(Clone, Debug, Default)]
pub struct Pieces([Bytes; 4]);

impl From<Bytes> for Pieces {
    fn from(body: Bytes) -> Self {
        Self([body, Bytes::new(), Bytes::new(), Bytes::new()])
    }
}

impl Pieces {
    pub fn joined([begin, middle, end]: [Bytes; 3]) -> Self {
        Self([begin, middle, end, Bytes::new()])
    }

    pub fn into_parts(self) -> [Bytes; 4] {
        self.0
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// All bytes, joined.
    pub fn concat(&self) -> Vec<u8> {
        self.0.concat()
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        let piece = self.0.iter_mut().find(|piece| !piece.is_empty());
        Poll::Ready(piece.map(|piece| Ok(http_body::Frame::data(std::mem::take(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.bytes() as u64)
    }
}

/// The fields by which SGLang's prefill and decode workers find each other.
pub fn bootstrap_fields(host: &str, port: Option<u16>, room: u64) -> String {
    let host = serde_json::Value::from(host);
    let port = port.map_or_else(|| "null".to_owned(), |port| port.to_string());
    format!("\"bootstrap_host\":{host},\"bootstrap_port\":{port},\"bootstrap_room\":{room}")
}

#[cfg(test)]
mod tests {
    use super::super::body::{Api, scan};
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn scan16(body: &[u8]) -> Scanned {
        scan(Api::Generate, body, 16, 16).expect("valid")
    }

    #[test]
    fn our_fields_override_the_clients() {
        let body = Bytes::from_static(b"{\"text\":\"a\",\"bootstrap_room\":1 }\n");
        let scanned = scan16(&body);
        let spliced = splice(&body, &scanned, bootstrap_fields("h", Some(8998), 5)).concat();
        let value: Value = serde_json::from_slice(&spliced).expect("JSON");
        assert_eq!(
            value,
            json!({"text": "a", "bootstrap_room": 5, "bootstrap_host": "h", "bootstrap_port": 8998})
        );
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            Just(Value::from(-1.5e-3)),
            ".{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::vec((".{0,6}", inner), 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn splicing_any_object_adds_exactly_our_fields(
            extra in proptest::collection::vec(("[a-z\"\\\\]{0,6}", any_json()), 0..5),
            pretty in any::<bool>(),
        ) {
            let mut object: serde_json::Map<String, Value> = extra.into_iter().collect();
            for key in ["input_ids", "sampling_params", "stream", "rid", "user"] {
                object.remove(key);
            }
            object.insert("text".to_owned(), "hello".into());
            let value = Value::Object(object.clone());
            let body = Bytes::from(if pretty {
                serde_json::to_vec_pretty(&value).expect("JSON")
            } else {
                serde_json::to_vec(&value).expect("JSON")
            });
            let scanned = scan16(&body);
            let spliced = splice(&body, &scanned, bootstrap_fields("h", None, u64::MAX >> 1));
            object.insert("bootstrap_host".to_owned(), "h".into());
            object.insert("bootstrap_port".to_owned(), Value::Null);
            object.insert("bootstrap_room".to_owned(), (u64::MAX >> 1).into());
            let read: Value = serde_json::from_slice(&spliced.concat()).expect("JSON");
            prop_assert_eq!(read, Value::Object(object));
        }
    }
}
