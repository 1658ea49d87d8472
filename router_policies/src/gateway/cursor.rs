//! Reads JSON forwards, without building anything of it: structure is followed, values are taken as they
//! stand or skipped. Lists of token ids are hashed as they are read, and reading one may go on where the
//! bytes had ended.

use super::short_ids;
use decision::fleet::prefix::hash::TokenHasher;
use memchr::{memchr, memchr2};
use std::borrow::Cow;
use std::ops::Range;

/// Why a body cannot be routed: the byte offset and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    pub offset: usize,
    pub expected: &'static str,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "body, byte {}: expected {}", self.offset, self.expected)
    }
}

const MAX_DEPTH: usize = 512;

/// A string's bytes without its escapes; as they stand where they stand for no text.
fn meant(raw: &[u8]) -> Cow<'_, [u8]> {
    if memchr(b'\\', raw).is_none() {
        return Cow::Borrowed(raw);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    serde_json::from_slice::<String>(&quoted)
        .map_or(Cow::Borrowed(raw), |text| text.into_bytes().into())
}

pub(super) struct Cursor<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
    /// Of a body's beginning: the token ids that it ends in.
    pub run: Option<TokenRun>,
    /// Where strings stand that may be pictures and were skipped inside of others, without their quotes.
    pub long: Vec<Range<usize>>,
}

/// Strings of so many bytes may be pictures.
const LONG_BYTES: usize = 512;
/// Shorter than the address of one.
const SHORT_BYTES: usize = 8;

/// A list of token ids, as far as it has been read.
pub(super) struct TokenRun {
    pub start: usize,
    /// Where the next id begins; `start` before the first.
    pub at: usize,
    pub hasher: TokenHasher,
}

impl TokenRun {
    pub fn new(start: usize, hasher: TokenHasher) -> Self {
        Self {
            start,
            at: start,
            hasher,
        }
    }

    pub fn take_short_ids(&mut self, body: &[u8]) {
        self.at = short_ids::take(body, self.at, &mut self.hasher);
    }
}

impl<'a> Cursor<'a> {
    pub fn fail<T>(&self, expected: &'static str) -> Result<T, Malformed> {
        Err(Malformed {
            offset: self.at,
            expected,
        })
    }

    /// The next byte that is not white space, without taking it.
    #[inline]
    pub fn peek(&mut self) -> Option<u8> {
        while let Some(&byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    #[inline]
    pub fn take(&mut self, byte: u8, expected: &'static str) -> Result<(), Malformed> {
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            self.fail(expected)
        }
    }

    /// The raw bytes between a string's quotes.
    #[inline]
    pub fn string(&mut self) -> Result<&'a [u8], Malformed> {
        self.take(b'"', "a string")?;
        let start = self.at;
        loop {
            match memchr2(b'"', b'\\', &self.bytes[self.at..]) {
                Some(found) if self.bytes[self.at + found] == b'"' => {
                    let end = self.at + found;
                    self.at = end + 1;
                    return Ok(&self.bytes[start..end]);
                }
                Some(found) if self.at + found + 2 <= self.bytes.len() => self.at += found + 2,
                _ => {
                    self.at = self.bytes.len();
                    return self.fail("the end of a string");
                }
            }
        }
    }

    /// Skips any value and returns its raw bytes.
    pub fn value(&mut self) -> Result<&'a [u8], Malformed> {
        match self.peek() {
            Some(b'"') => {
                let start = self.at;
                self.string()?;
                Ok(&self.bytes[start..self.at])
            }
            Some(b'{' | b'[') => self.container(),
            Some(_) => {
                let start = self.at;
                while self.bytes.get(self.at).is_some_and(
                    |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'E' | b'+' | b'-' | b'.'),
                ) {
                    self.at += 1;
                }
                if self.at == start {
                    return self.fail("a value");
                }
                Ok(&self.bytes[start..self.at])
            }
            None => self.fail("a value"),
        }
    }

    pub fn container(&mut self) -> Result<&'a [u8], Malformed> {
        let start = self.at;
        let mut open = Vec::new();
        loop {
            let Some(&byte) = self.bytes.get(self.at) else {
                return self.fail("a closing bracket");
            };
            match byte {
                b'"' => {
                    let text = self.string()?;
                    // Most are told by their length and first byte.
                    let may_be_address = text.len() > SHORT_BYTES && text.first() == Some(&b'h');
                    if text.len() >= LONG_BYTES || may_be_address && text.starts_with(b"http") {
                        self.long.push(self.at - 1 - text.len()..self.at - 1);
                    }
                    continue;
                }
                b'{' | b'[' if open.len() == MAX_DEPTH => {
                    return self.fail("less deeply nested JSON");
                }
                b'{' => open.push(b'}'),
                b'[' => open.push(b']'),
                b'}' | b']' => {
                    if open.pop() != Some(byte) {
                        return self.fail("the bracket that closes the last open one");
                    }
                    if open.is_empty() {
                        self.at += 1;
                        return Ok(&self.bytes[start..self.at]);
                    }
                }
                _ => {}
            }
            self.at += 1;
        }
    }

    /// Calls `each` at every key of an object, which it gets as it is meant: escapes may stand for any letter
    /// of it. `each` must take the value.
    pub fn object(
        &mut self,
        mut each: impl FnMut(&mut Self, &[u8]) -> Result<(), Malformed>,
    ) -> Result<Object, Malformed> {
        self.take(b'{', "an object")?;
        let mut is_empty = true;
        if self.peek() == Some(b'}') {
            let close = self.at;
            self.at += 1;
            return Ok(Object { close, is_empty });
        }
        loop {
            let key = meant(self.string()?);
            self.take(b':', "':'")?;
            each(self, &key)?;
            is_empty = false;
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    let close = self.at;
                    self.at += 1;
                    return Ok(Object { close, is_empty });
                }
                _ => return self.fail("',' or '}'"),
            }
        }
    }

    /// Calls `each` at every element of an array; `each` must take the element.
    pub fn array(
        &mut self,
        mut each: impl FnMut(&mut Self) -> Result<(), Malformed>,
    ) -> Result<(), Malformed> {
        self.take(b'[', "an array")?;
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            each(self)?;
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return self.fail("',' or ']'"),
            }
        }
    }

    /// A token id.
    #[inline]
    pub fn token(&mut self) -> Result<u32, Malformed> {
        self.peek();
        let start = self.at;
        let mut value = 0u64;
        while let Some(digit) = self.bytes.get(self.at).map(|byte| byte.wrapping_sub(b'0')) {
            if digit > 9 {
                break;
            }
            value = value * 10 + u64::from(digit);
            if value > u64::from(u32::MAX) {
                return self.fail("a token id below 2^32");
            }
            self.at += 1;
        }
        if self.at == start {
            return self.fail("a token id");
        }
        Ok(value as u32)
    }

    /// The rest of a list of token ids.
    pub fn tokens(&mut self, run: &mut TokenRun) -> Result<(), Malformed> {
        self.at = run.at;
        if run.at == run.start {
            self.take(b'[', "an array")?;
            if self.peek() == Some(b']') {
                self.at += 1;
                return Ok(());
            }
        }
        loop {
            let token = self.token()?;
            match self.peek() {
                Some(end @ (b',' | b']')) => {
                    run.hasher.push(token);
                    self.at += 1;
                    if end == b']' {
                        return Ok(());
                    }
                    run.at = self.at;
                    run.take_short_ids(self.bytes);
                    self.at = run.at;
                }
                Some(b'.' | b'e' | b'E') => return self.fail("a token id that is a whole number"),
                _ => return self.fail("',' or ']'"),
            }
        }
    }
}

pub(super) struct Object {
    pub close: usize,
    pub is_empty: bool,
}
