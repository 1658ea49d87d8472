//! Prompts as they stand in a body: token ids, texts, or a conversation, hashed as they are read.

use super::cursor::{Cursor, Malformed, TokenRun};
use decision::fleet::prefix::hash::{BYTES_PER_TOKEN, PromptHashes, TokenHasher};
use memchr::memmem;
use smallvec::SmallVec;
use std::ops::Range;

/// Places of so many texts are noted. A body of empty ones would otherwise take five times its size.
pub(super) const MAX_TEXTS: usize = 1024;

/// Where in a body the parts of a conversation stand: what comes before the turns, in the prompt's order, and the
/// turns without their brackets or quotes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub before: SmallVec<[Range<usize>; 2]>,
    pub turns: Range<usize>,
}

/// The parts of a conversation, in whatever order its keys come.
#[derive(Default)]
pub(super) struct Conversation<'a> {
    pub places: Places,
    before: SmallVec<[&'a [u8]; 2]>,
    turns: Option<&'a [u8]>,
    /// Where in the turns pictures, sounds and files stand.
    pictures: Vec<Range<usize>>,
}

/// What a picture is taken for: engines' processors make some hundred to a few thousand tokens of one, whatever
/// its bytes.
const PICTURE_TOKENS: usize = 1_600;
/// Under these keys engines read data that is no text.
const DATA_KEYS: [&[u8]; 6] = [
    b"url",
    b"image_url",
    b"data",
    b"file_data",
    b"image",
    b"audio",
];

/// Whether the string that stands at `at` is data, in base64.
fn is_data(body: &[u8], at: &Range<usize>) -> bool {
    const LOOKED_AT: usize = 128;
    let value = &body[at.clone()];
    let begin = &value[..value.len().min(LOOKED_AT)];
    let is_base64 = |bytes: &[u8]| {
        let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/=-_\\".contains(byte);
        bytes.iter().all(is_letter)
    };
    let is_url = begin.starts_with(b"data:") && memmem::find(begin, b";base64,").is_some();
    let is_bare = is_base64(begin) && is_base64(&value[value.len() - begin.len()..]);
    if !is_url && !is_bare {
        return false;
    }
    let before = body[..at.start - 1].trim_ascii_end();
    let Some(before) = before.strip_suffix(b":") else {
        return false;
    };
    let before = before.trim_ascii_end();
    DATA_KEYS.iter().any(|key| {
        let name = before
            .strip_suffix(b"\"")
            .and_then(|rest| rest.strip_suffix(*key));
        name.is_some_and(|rest| rest.ends_with(b"\""))
    })
}

impl<'a> Conversation<'a> {
    /// Takes the value if the key is one of a conversation's. The last of equal keys counts.
    pub fn take(
        &mut self,
        cursor: &mut Cursor<'a>,
        key: &[u8],
        before: &[&str],
        turns: &str,
    ) -> Result<bool, Malformed> {
        if let Some(at) = before.iter().position(|name| key == name.as_bytes()) {
            self.before.resize(before.len(), &[]);
            self.places.before.resize(before.len(), 0..0);
            self.before[at] = cursor.value()?;
            self.places.before[at] = cursor.at - self.before[at].len()..cursor.at;
            return Ok(true);
        }
        if key != turns.as_bytes() {
            return Ok(false);
        }
        self.pictures.clear();
        self.turns = Some(match cursor.peek() {
            Some(b'"') => {
                let text = cursor.string()?;
                let end = cursor.at - 1;
                self.places.turns = end - text.len()..end;
                text
            }
            Some(b'[') => {
                cursor.long.clear();
                // Without the brackets, so that a longer conversation extends a shorter one.
                let raw = cursor.value()?;
                let begin = cursor.at - raw.len() + 1;
                self.places.turns = begin..cursor.at - 1;
                let long = cursor.long.drain(..);
                let data = long.filter(|at| is_data(cursor.bytes, at));
                self.pictures = data.map(|at| at.start - begin..at.end - begin).collect();
                &raw[1..raw.len() - 1]
            }
            _ => return cursor.fail("a list of messages"),
        });
        Ok(true)
    }

    /// Of what stands before the turns under `key`, this alone counts.
    pub fn shorten(&mut self, key: &[u8], before: &[&str], rest: &'a [u8]) {
        if let Some(at) = before.iter().position(|name| key == name.as_bytes()) {
            let place = &mut self.places.before[at];
            place.start = place.end - rest.len();
            self.before[at] = rest;
        }
    }

    pub fn finish(self, text_block: usize) -> Option<PromptHashes> {
        let turns = self.turns?;
        if self.before.iter().all(|part| part.is_empty()) && self.pictures.is_empty() {
            return Some(PromptHashes::of_text(turns, text_block));
        }
        let mut whole = self.before.concat();
        let mut at = 0;
        for picture in &self.pictures {
            whole.extend_from_slice(&turns[at..picture.start]);
            // Which one it is counts, and not how long.
            let name = PromptHashes::of_text(&turns[picture.clone()], text_block);
            let name = name.states.last().copied().unwrap_or_default();
            let room = PICTURE_TOKENS * BYTES_PER_TOKEN as usize / size_of::<u64>();
            whole.extend(std::iter::repeat_n(name.to_le_bytes(), room).flatten());
            at = picture.end;
        }
        whole.extend_from_slice(&turns[at..]);
        let mut prompt = PromptHashes::of_text(&whole, text_block);
        prompt.pictures = self.pictures.len() as u64;
        Some(prompt)
    }
}

#[derive(Default)]
pub(super) struct Prompts {
    pub first: Option<PromptHashes>,
    pub count: usize,
    pub more: usize,
    pub largest_token: Option<u32>,
    pub texts: SmallVec<[Range<usize>; 1]>,
}

impl Prompts {
    fn add_tokens(&mut self, hasher: TokenHasher) {
        self.largest_token = self.largest_token.max(hasher.largest());
        self.add(hasher.finish());
    }

    fn add(&mut self, prompt: PromptHashes) {
        self.count += 1;
        if self.first.is_some() {
            self.more += prompt.length;
        } else {
            self.first = Some(prompt);
        }
    }

    pub fn one(prompt: PromptHashes) -> Self {
        let mut prompts = Self::default();
        prompts.add(prompt);
        prompts
    }

    fn add_text(&mut self, cursor: &mut Cursor<'_>, text_block: usize) -> Result<(), Malformed> {
        let text = cursor.string()?;
        if self.texts.len() < MAX_TEXTS {
            self.texts.push(cursor.at - text.len() - 2..cursor.at);
        }
        self.add(PromptHashes::of_text(text, text_block));
        Ok(())
    }

    /// A prompt, or a list of prompts, each a string or a list of token ids.
    pub fn read(
        cursor: &mut Cursor<'_>,
        block: usize,
        text_block: usize,
        bytes: usize,
    ) -> Result<Self, Malformed> {
        match cursor.peek() {
            Some(b'"') => {
                let mut prompts = Self::default();
                prompts.add_text(cursor, text_block)?;
                Ok(prompts)
            }
            Some(b'[') => {
                let start = cursor.at;
                cursor.at += 1;
                let inner = cursor.peek();
                cursor.at = start;
                if !matches!(inner, Some(b'[' | b'"')) {
                    let begun = cursor.run.take_if(|run| run.start == start);
                    let mut run = begun.unwrap_or_else(|| {
                        // Few prompts have fewer than six bytes a token.
                        let room = bytes.saturating_sub(start) / 6;
                        TokenRun::new(start, TokenHasher::with_capacity(block, room))
                    });
                    if let Err(malformed) = cursor.tokens(&mut run) {
                        cursor.run = Some(run);
                        return Err(malformed);
                    }
                    let mut prompts = Self::default();
                    prompts.add_tokens(run.hasher);
                    return Ok(prompts);
                }
                let mut prompts = Self::default();
                cursor.array(|cursor| {
                    if cursor.peek() == Some(b'"') {
                        return prompts.add_text(cursor, text_block);
                    }
                    let mut run = TokenRun::new(cursor.at, TokenHasher::new(block));
                    cursor.tokens(&mut run)?;
                    prompts.add_tokens(run.hasher);
                    Ok(())
                })?;
                Ok(prompts)
            }
            _ => cursor.fail("a string or a list of token ids"),
        }
    }
}
