//! The outline of a conversation: what its tools, system blocks and messages say, as a hash each, and where two
//! conversations first differ.
//!
//! Clients move marks (`cache_control`) and write a text now as a string and now as a block: neither reaches the
//! prompt, and neither counts.

use crate::gateway::prompts::Places;
use decision::fleet::prefix::hash::step;
use serde::Deserialize;
use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

/// As much of a role's or a tool's name as is kept.
const MAX_NAME_CHARS: usize = 64;

/// A tool, a block of the system prompt or a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Which of the conversation's keys it stands under, in the order of the prompt.
    pub key: usize,
    pub index: usize,
    /// Where it stands in the text of the whole conversation.
    pub start: usize,
    pub end: usize,
    hash: u64,
}

impl Part {
    fn is_same(&self, other: &Self) -> bool {
        (self.key, self.index, self.hash) == (other.key, other.index, other.hash)
    }
}

/// Whose texts these are: a body, and where it has the parts of its conversation.
#[derive(Clone, Copy)]
pub(super) struct Text<'a> {
    pub body: &'a [u8],
    pub places: &'a Places,
}

impl<'a> Text<'a> {
    /// The raw values under the keys in their order, each with where it begins in the text of the whole.
    fn values(self) -> impl Iterator<Item = (usize, &'a [u8])> {
        let all = self.places.before.iter().chain([&self.places.turns]);
        all.scan(0, move |begin, place| {
            let value = self.body.get(place.clone()).unwrap_or_default();
            let at = *begin;
            *begin += value.len();
            Some((at, value))
        })
    }

    /// Whether the turns are one text in place of a list.
    fn is_one_turn(self) -> bool {
        let before = self.places.turns.start.checked_sub(1);
        before.and_then(|at| self.body.get(at)) == Some(&b'"')
    }

    /// Its parts; those of `known` that end within the first `same` bytes are taken over.
    pub fn outline(self, known: Vec<Part>, same: usize) -> Vec<Part> {
        let mut parts = known;
        parts.truncate(parts.partition_point(|part| part.end <= same));
        let turns = self.places.before.len();
        for (key, (begin, value)) in self.values().enumerate() {
            let done = parts.last().map_or(0, |part| part.end);
            if begin + value.len() <= done {
                continue;
            }
            let mut index = parts.iter().rev().take_while(|it| it.key == key).count();
            let mut add = |from: usize, (hash, to): (u64, usize)| {
                parts.push(Part {
                    key,
                    index,
                    start: begin + from,
                    end: begin + to,
                    hash,
                });
                index += 1;
                to
            };
            let (list, mut at) = match key == turns {
                true if self.is_one_turn() => {
                    add(0, (hash_of(value), value.len()));
                    continue;
                }
                true => (value, 0),
                false => match value {
                    [b'[', .., b']'] => (&value[..value.len() - 1], 1),
                    _ => (value, 0),
                },
            };
            at = at.max(done.saturating_sub(begin));
            while let Some(found) = list
                .get(at..)
                .and_then(|rest| rest.iter().position(is_begin))
            {
                at = add(at + found, meaning(list, at + found));
            }
        }
        parts
    }

    /// Text of the whole conversation from `from` to `to`, within one part.
    pub fn raw(self, from: usize, to: usize) -> &'a [u8] {
        let mut values = self.values();
        let found = values.find(|(begin, value)| (*begin..begin + value.len()).contains(&from));
        found
            .and_then(|(begin, value)| value.get(from - begin..(to - begin).min(value.len())))
            .unwrap_or_default()
    }

    /// Who speaks in a message, or what a tool is called.
    pub fn name(self, part: &Part) -> Option<String> {
        #[derive(Deserialize)]
        struct Named<'a> {
            #[serde(borrow)]
            name: Option<Cow<'a, str>>,
        }
        #[derive(Deserialize)]
        struct Item<'a> {
            #[serde(borrow)]
            role: Option<Cow<'a, str>>,
            #[serde(borrow)]
            name: Option<Cow<'a, str>>,
            #[serde(borrow)]
            function: Option<Named<'a>>,
            #[serde(borrow)]
            r#type: Option<Cow<'a, str>>,
        }
        let item: Item<'_> = serde_json::from_slice(self.raw(part.start, part.end)).ok()?;
        let of_function = item.function.and_then(|it| it.name);
        let name = item.role.or(item.name).or(of_function).or(item.r#type)?;
        Some(name.chars().take(MAX_NAME_CHARS).collect())
    }

    /// Whether a part is of what sessions of one agent have in common: all that stands before the first message that
    /// is not the system's.
    pub fn is_common(self, part: &Part) -> bool {
        part.key < self.places.before.len()
            || matches!(self.name(part).as_deref(), Some("system" | "developer"))
    }
}

/// Where two outlines first differ: the part of the new one that stands there, and where the old one had more of a
/// kind, the part that is gone. None where one goes on from the other.
pub(super) fn first_difference(old: &[Part], new: &[Part]) -> Option<(Part, Option<Part>)> {
    let mut pairs = old.iter().zip(new);
    let (old, new) = pairs.find(|(old, new)| !old.is_same(new))?;
    Some((*new, (old.key < new.key).then_some(*old)))
}

/// Whether a value may begin with this, behind a bracket or a comma.
fn is_begin(byte: &u8) -> bool {
    !b", \t\r\n".contains(byte)
}

/// What the value of JSON that begins at `at` says, as a hash, and where it ends: its texts, numbers and words,
/// without marks and without what tells a block of text from a string.
fn meaning(raw: &[u8], at: usize) -> (u64, usize) {
    let (mut at, mut depth) = (at, 0_usize);
    let mut hash = 0;
    while let Some(&byte) = raw.get(at) {
        let begin = at;
        match byte {
            b'"' => {
                at = end_of_string(raw, at);
                match raw.get(begin + 1..at - 1).unwrap_or_default() {
                    b"cache_control" if is_key(raw, at) => at = end_of_mark(raw, at),
                    b"type" | b"text" => {}
                    text => hash = step(hash, hash_of(text)),
                }
            }
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                at += 1;
            }
            b',' | b':' => at += 1,
            _ if byte.is_ascii_whitespace() => at += 1,
            _ => {
                let ends = |byte: &u8| b"{}[],:\" \t\r\n".contains(byte);
                at += raw[at..].iter().position(ends).unwrap_or(raw.len() - at);
                hash = step(hash, !hash_of(&raw[begin..at]));
            }
        }
        if depth == 0 {
            break;
        }
    }
    (hash, at)
}

/// Of bytes, with a key that each process draws.
fn hash_of(bytes: &[u8]) -> u64 {
    static KEY: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    let key = *KEY;
    // A multiplication for two words.
    let pair = |hash, (first, second): (u64, u64)| step(hash ^ first, second ^ key);
    let (pairs, rest) = bytes.as_chunks::<16>();
    let hash = pairs
        .iter()
        .fold(key, |hash, it| pair(hash, (word(it), word(&it[8..]))));
    let last = match rest.len() {
        0 => (0, 0),
        _ if !pairs.is_empty() => {
            let last = &bytes[bytes.len() - 16..];
            (word(last), word(&last[8..]))
        }
        8.. => (word(rest), word(&rest[rest.len() - 8..])),
        _ => {
            let fold = |word: u64, &byte| word << 8 | u64::from(byte);
            (rest.iter().fold(0, fold), 0)
        }
    };
    step(pair(hash, last), bytes.len() as u64)
}

/// Of the first eight bytes.
fn word(bytes: &[u8]) -> u64 {
    bytes
        .first_chunk()
        .map_or(0, |word| u64::from_le_bytes(*word))
}

/// Whether the string that ends at `at` is a key.
fn is_key(raw: &[u8], at: usize) -> bool {
    raw[at..].trim_ascii_start().starts_with(b":")
}

/// Behind the closing quote of the string that begins at `at`.
fn end_of_string(raw: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while let Some(found) = memchr::memchr2(b'"', b'\\', raw.get(at..).unwrap_or_default()) {
        at += found + 1;
        if raw[at - 1] == b'"' {
            return at;
        }
        at += 1;
    }
    raw.len()
}

/// Behind the value of a mark, whose key ends at `at`: an object of words, or null.
fn end_of_mark(raw: &[u8], at: usize) -> usize {
    let rest = &raw[at..];
    let end = match rest.iter().find(|byte| !b": \t\r\n".contains(byte)) {
        Some(b'{') => memchr::memchr(b'}', rest).map(|found| found + 1),
        _ => memchr::memchr2(b',', b'}', rest),
    };
    end.map_or(raw.len(), |end| at + end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::cursor::Cursor;
    use serde_json::{Value, json};

    fn means(value: &Value) -> u64 {
        let text = value.to_string();
        let (hash, end) = meaning(text.as_bytes(), 0);
        assert_eq!(end, text.len());
        hash
    }

    #[test]
    fn marks_and_the_shape_of_a_text_do_not_count_and_all_else_does() {
        let text = json!({"role": "user", "content": "say \"cache_control\": 1"});
        let block = json!({"role": "user", "content": [
            {"type": "text", "text": "say \"cache_control\": 1", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]});
        assert_eq!(means(&text), means(&block));
        let unmarked = json!({"role": "user", "content": [
            {"cache_control": null, "type": "text", "text": "say \"cache_control\": 1"},
        ]});
        assert_eq!(means(&text), means(&unmarked));
        for other in [
            json!({"role": "user", "content": "say \"cache_control\": 2"}),
            json!({"role": "assistant", "content": "say \"cache_control\": 1"}),
            json!({"role": "user", "content": "say \"cache_control\": 1", "n": 1}),
        ] {
            assert_ne!(means(&text), means(&other), "{other}");
        }
        assert_ne!(means(&json!(["ab", "c"])), means(&json!(["a", "bc"])));
        assert_ne!(means(&json!([1, 23])), means(&json!([12, 3])));
        for cut in 0..block.to_string().len() {
            meaning(&block.to_string().as_bytes()[..cut], 0);
        }
    }

    fn text_of<'a>(body: &'a str, places: &'a Places) -> Text<'a> {
        Text {
            body: body.as_bytes(),
            places,
        }
    }

    fn places(body: &str, keys: &[&str], turns: &str) -> Places {
        let value = |key: &str| {
            let begin = body.find(&format!("\"{key}\":")).expect("a key") + key.len() + 3;
            let mut cursor = Cursor {
                bytes: body.as_bytes(),
                at: begin,
                run: None,
                long: Vec::new(),
            };
            cursor.value().expect("JSON");
            begin..cursor.at
        };
        let turns = value(turns);
        Places {
            before: keys.iter().map(|key| value(key)).collect(),
            turns: turns.start + 1..turns.end - 1,
        }
    }

    #[test]
    fn an_outline_that_takes_over_what_is_the_same_is_that_of_the_whole() {
        let turn = |at: usize| json!({"role": "user", "content": format!("turn {at} , [ {{")});
        let body = |turns: usize| {
            let turns: Vec<_> = (0..turns).map(turn).collect();
            json!({"tools": [{"name": "a"}, {"name": "b"}], "system": "s", "messages": turns})
                .to_string()
        };
        let (short, long) = (body(3), body(7));
        let keys = ["tools", "system"];
        let before = places(&short, &keys, "messages");
        let after = places(&long, &keys, "messages");
        let known = text_of(&short, &before).outline(Vec::new(), 0);
        let whole = text_of(&long, &after).outline(Vec::new(), 0);
        assert_eq!(whole.len(), 10);
        assert_eq!(first_difference(&known, &whole), None);
        for same in 0..=known.last().expect("parts").end {
            let grown = text_of(&long, &after).outline(known.clone(), same);
            assert_eq!(grown, whole, "{same}");
        }
        let text = text_of(&long, &after);
        let names: Vec<_> = whole.iter().map(|part| text.name(part)).collect();
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(
            names[..4],
            [named("a"), named("b"), None, named("user")],
            "{names:?}"
        );
        let last = turn(6).to_string();
        assert_eq!(text.raw(whole[9].start, whole[9].end), last.as_bytes());
        let gone = first_difference(&whole, &whole[1..]);
        assert!(gone.is_some());
        let fewer = [whole[0], whole[2]];
        let (stands, gone) = first_difference(&whole, &fewer).expect("they differ");
        assert_eq!((stands, gone), (whole[2], Some(whole[1])));
    }
}
