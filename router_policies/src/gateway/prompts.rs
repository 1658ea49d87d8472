//! Prompts as they stand in a body: token ids, texts, or a conversation, hashed as they are read.

use super::cursor::{Cursor, Malformed, TokenRun};
use super::pictures::Picture;
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

/// Under these keys engines read data that is no text, or where it is.
const DATA_KEYS: [&[u8]; 7] = [
    b"url",
    b"image_url",
    b"data",
    b"file_data",
    b"file_url",
    b"image",
    b"audio",
];
/// The objects with a `url` that is the address of something to look at.
const SOURCES: [&[u8]; 5] = [
    b"image_url",
    b"source",
    b"audio_url",
    b"video_url",
    b"file_url",
];

/// What stands before the value of `key`, if that is what ends here.
fn before_key<'a>(before: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let before = before.trim_ascii_end().strip_suffix(b":")?;
    let name = before.trim_ascii_end().strip_suffix(b"\"")?;
    name.strip_suffix(key)?.strip_suffix(b"\"")
}

/// Whether the string that stands at `at` is a picture, a sound or a file: data in base64, or where it is.
fn is_picture(body: &[u8], at: &Range<usize>) -> bool {
    const LOOKED_AT: usize = 128;
    let value = &body[at.clone()];
    let begin = &value[..value.len().min(LOOKED_AT)];
    let is_base64 = |bytes: &[u8]| {
        let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/=-_\\".contains(byte);
        bytes.iter().all(is_letter)
    };
    let is_address = begin.starts_with(b"http");
    let is_url = || begin.starts_with(b"data:") && memmem::find(begin, b";base64,").is_some();
    let is_bare = || is_base64(begin) && is_base64(&value[value.len() - begin.len()..]);
    if !is_address && !is_url() && !is_bare() {
        return false;
    }
    let before = &body[..at.start - 1];
    let key = DATA_KEYS
        .iter()
        .find_map(|key| Some((*key, before_key(before, key)?)));
    match key {
        None => false,
        // Tools are called with addresses too.
        Some((b"url", before)) if is_address => {
            let near = &before[before.len().saturating_sub(LOOKED_AT)..];
            let object = near.iter().rposition(|byte| *byte == b'{');
            object.is_some_and(|at| {
                let is_source = |key: &&[u8]| before_key(&near[..at], key).is_some();
                SOURCES.iter().any(is_source)
            })
        }
        Some((key, _)) => !is_address || matches!(key, b"image_url" | b"file_url"),
    }
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
                let data = long.filter(|at| is_picture(cursor.bytes, at));
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

    /// The prompt, and the pictures in it, each as `picture` has what stands there.
    pub fn finish(
        self,
        text_block: usize,
        picture: impl Fn(&[u8]) -> Picture,
    ) -> Option<(PromptHashes, Vec<Picture>)> {
        let turns = self.turns?;
        if self.before.iter().all(|part| part.is_empty()) && self.pictures.is_empty() {
            return Some((PromptHashes::of_text(turns, text_block), Vec::new()));
        }
        let mut whole = self.before.concat();
        let mut at = 0;
        let mut pictures = Vec::new();
        for place in &self.pictures {
            whole.extend_from_slice(&turns[at..place.start]);
            // Which one it is counts, and what the model makes of it, and not how long it is.
            let found = picture(&turns[place.clone()]);
            let room = found.tokens as usize * BYTES_PER_TOKEN as usize / size_of::<u64>();
            whole.extend(std::iter::repeat_n(found.name.to_le_bytes(), room).flatten());
            pictures.push(found);
            at = place.end;
        }
        whole.extend_from_slice(&turns[at..]);
        let mut prompt = PromptHashes::of_text(&whole, text_block);
        prompt.pictures = pictures.len() as u64;
        Some((prompt, pictures))
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
