//! What pictures count for in a prompt: as many tokens as the model makes of them, learnt from what engines count.
//!
//! A picture counts the same in every turn that has it, else all that stands behind it would be another prompt: its
//! count is kept once an engine has counted it. Before, it counts as pictures of about its size did for its model.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use decision::fleet::log::FinishRecord;
use decision::fleet::prefix::hash::{BYTES_PER_TOKEN, PromptHashes};
use lru::LruCache;
use memchr::memmem;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;

/// What a picture is taken for before any was counted: engines' processors make some hundred to a few thousand
/// tokens of one.
const ASSUMED_TOKENS: f64 = 1_600.0;
/// No picture counts for more.
const MAX_TOKENS: f64 = 65_536.0;
/// What one more picture of a model and a size moves their mean by.
const GAIN: f64 = 0.25;
/// Pictures that are remembered.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(1 << 14).expect("not 0");
/// Means, of models and sizes.
const MEANS: NonZeroUsize = NonZeroUsize::new(1 << 10).expect("not 0");
/// Sessions whose last count is kept.
const SESSIONS: NonZeroUsize = NonZeroUsize::new(1 << 12).expect("not 0");
/// As much of a picture is looked at for its width and height.
const HEAD_CHARS: usize = 16 << 10;
/// Text between two blocks of hashes.
const BLOCK_TOKENS: usize = 16;

/// A session, of the tenant with that number.
type Whose = (u64, String);

/// A picture, a sound or a file in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Of its bytes.
    pub(super) name: u64,
    /// That it counts for.
    pub(super) tokens: u32,
    size: Size,
}

/// The half octave of its pixels; none where they are not known.
type Size = Option<u8>;

pub(crate) struct Pictures {
    hasher: RandomState,
    known: Mutex<Known>,
}

struct Known {
    /// By model and name.
    pictures: LruCache<(u64, u64), Picture>,
    /// By model and size; of a model alone that of all its pictures.
    means: LruCache<(u64, Option<Size>), f64>,
    /// By decision.
    running: HashMap<String, Asked>,
    last: LruCache<Whose, Counted>,
}

/// A prompt with pictures whose answer has begun.
struct Asked {
    model: u64,
    whose: Option<Whose>,
    text_tokens: f64,
    pictures: Vec<Picture>,
    before: Option<Counted>,
}

/// A prompt that an engine has counted.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counted {
    pub tokens: u64,
    /// What its text was taken for.
    pub text_tokens: f64,
    /// What engines count for one of those.
    pub scale: f64,
    /// Names of the pictures in it.
    pub pictures: Vec<u64>,
}

impl Counted {
    /// Of a prompt that is text alone.
    pub fn text(tokens: u64, bytes: usize) -> Self {
        let text_tokens = bytes as f64 / BYTES_PER_TOKEN as f64;
        Self {
            tokens,
            text_tokens,
            scale: tokens as f64 / text_tokens.max(1.0),
            pictures: Vec::new(),
        }
    }
}

impl Default for Pictures {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            known: Mutex::new(Known {
                pictures: LruCache::new(REMEMBERED),
                means: LruCache::new(MEANS),
                running: HashMap::new(),
                last: LruCache::new(SESSIONS),
            }),
        }
    }
}

impl Pictures {
    fn model(&self, model: Option<&str>) -> u64 {
        self.hasher.hash_one(model)
    }

    /// The picture that stands so in a body: base64, with or without what a data URL has before it, or a URL.
    pub(super) fn of(&self, model: Option<&str>, raw: &[u8]) -> Picture {
        let model = self.model(model);
        let whole = PromptHashes::of_text(raw, BLOCK_TOKENS);
        let rest = &raw[whole.states.len() * whole.block..];
        let name = self.hasher.hash_one((whole.states.last(), rest));
        let mut known = self.known.lock();
        if let Some(&picture) = known.pictures.get(&(model, name)) {
            return picture;
        }
        drop(known);
        let size = size_of(raw);
        let mut known = self.known.lock();
        let of_size = known.means.get(&(model, Some(size))).copied();
        let mean = of_size.or_else(|| known.means.get(&(model, None)).copied());
        let tokens = mean.unwrap_or(ASSUMED_TOKENS).round() as u32;
        let picture = Picture { name, tokens, size };
        known.pictures.put((model, name), picture);
        picture
    }

    /// An answer begins to a prompt of so many `bytes` with these pictures; `before` is what its session's last
    /// prompt without any came to.
    pub(super) fn began(
        &self,
        decision_id: &str,
        model: Option<&str>,
        whose: Option<Whose>,
        bytes: usize,
        pictures: &[Picture],
        before: Option<Counted>,
    ) {
        let all = bytes as f64 / BYTES_PER_TOKEN as f64;
        let of_pictures: f64 = pictures.iter().map(|it| f64::from(it.tokens)).sum();
        let mut known = self.known.lock();
        let last = whose.as_ref().and_then(|whose| known.last.pop(whose));
        let asked = Asked {
            model: self.model(model),
            text_tokens: (all - of_pictures).max(0.0),
            pictures: pictures.to_vec(),
            before: last.or(before),
            whose,
        };
        known.running.insert(decision_id.to_owned(), asked);
    }

    pub(super) fn ended(&self, finish: &FinishRecord) {
        let mut known = self.known.lock();
        if known.running.is_empty() {
            return;
        }
        let asked = known.running.remove(&finish.decision_id);
        if let (Some(asked), Some(tokens)) = (asked, finish.prompt_tokens) {
            known.learn(asked, tokens);
        }
    }
}

impl Known {
    /// An engine has counted so many tokens of a prompt.
    fn learn(&mut self, asked: Asked, tokens: u64) {
        let names: Vec<u64> = asked.pictures.iter().map(|it| it.name).collect();
        let goes_on = |before: &Counted| {
            before.tokens <= tokens
                && before.text_tokens <= asked.text_tokens
                && names.starts_with(&before.pictures)
        };
        let nothing = Counted {
            scale: 1.0,
            ..Counted::default()
        };
        let before = asked.before.filter(goes_on).unwrap_or(nothing);
        let new = &asked.pictures[before.pictures.len()..];
        let text = (asked.text_tokens - before.text_tokens) * before.scale;
        let found = (tokens - before.tokens) as f64 - text;
        let assumed: f64 = new.iter().map(|it| f64::from(it.tokens)).sum();
        // More text would say more of the text.
        if found > 0.0 && assumed > 0.0 && text <= found.max(assumed) {
            for picture in new {
                let is = f64::from(picture.tokens) * found / assumed;
                let is = is.clamp(1.0, MAX_TOKENS);
                let key = (asked.model, picture.name);
                let tokens = is.round() as u32;
                self.pictures.put(key, Picture { tokens, ..*picture });
                for key in [Some(picture.size), None] {
                    let mean = self.means.get_or_insert_mut((asked.model, key), || is);
                    *mean += GAIN * (is - *mean);
                }
            }
        }
        if let Some(whose) = asked.whose {
            let counted = Counted {
                tokens,
                text_tokens: asked.text_tokens,
                scale: before.scale,
                pictures: names,
            };
            self.last.put(whose, counted);
        }
    }
}

/// The size of a picture in base64, where its first bytes say it.
fn size_of(raw: &[u8]) -> Size {
    const MARK: &[u8] = b";base64,";
    let data = match memmem::find(&raw[..raw.len().min(128)], MARK) {
        Some(at) => &raw[at + MARK.len()..],
        None => raw,
    };
    let head = &data[..data.len().min(HEAD_CHARS) / 4 * 4];
    let head = STANDARD.decode(head).ok()?;
    let size = imagesize::blob_size(&head).ok()?;
    let pixels = (size.width as f64) * (size.height as f64);
    (pixels >= 1.0).then(|| (2.0 * pixels.log2()).round() as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The beginning of a PNG of that size, and what tells it from others.
    pub fn png(width: u32, height: u32, which: u8) -> Vec<u8> {
        let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        bytes.extend(width.to_be_bytes());
        bytes.extend(height.to_be_bytes());
        bytes.extend([which; 3_000]);
        let data = STANDARD.encode(bytes);
        format!("data:image/png;base64,{data}").into_bytes()
    }

    /// A model that makes a token of 28 × 28 pixels and counts 0.8 for each token that is assumed of text.
    struct Model<'a> {
        pictures: &'a Pictures,
        turns: usize,
    }

    impl Model<'_> {
        /// A turn of a session with so much text and these pictures; what the pictures were taken for.
        fn turn(&mut self, text_tokens: usize, shown: &[(u32, u32, u8)]) -> Vec<u32> {
            let seen = shown.iter().map(|&(width, height, which)| {
                self.pictures.of(Some("m"), &png(width, height, which))
            });
            let seen: Vec<Picture> = seen.collect();
            let assumed: u32 = seen.iter().map(|it| it.tokens).sum();
            let real: u32 = shown.iter().map(|(w, h, _)| w * h / 784).sum();
            let whose = Some((0, "s".to_owned()));
            let bytes = 4 * (text_tokens + assumed as usize);
            let id = self.turns.to_string();
            self.turns += 1;
            let before = Counted::text(8_000, 40_000);
            self.pictures
                .began(&id, Some("m"), whose, bytes, &seen, Some(before));
            let mut known = self.pictures.known.lock();
            let asked = known.running.remove(&id).expect("it runs");
            let tokens = text_tokens as f64 * 0.8 + f64::from(real);
            known.learn(asked, tokens.round() as u64);
            seen.iter().map(|it| it.tokens).collect()
        }
    }

    #[test]
    fn a_picture_counts_as_the_engine_counted_it_and_others_of_its_size_do_too() {
        let pictures = Pictures::default();
        let mut model = Model {
            pictures: &pictures,
            turns: 0,
        };
        let (small, large) = ((280, 280), (1400, 1120));
        let of = |(width, height), which| (width, height, which);
        let mut shown = vec![of(small, 1)];
        assert_eq!(model.turn(10_100, &shown), [1_600]);
        shown.push(of(large, 2));
        assert_eq!(model.turn(10_200, &shown)[0], 100, "as it was counted");
        shown.extend([of(small, 3), of(large, 4)]);
        assert_eq!(model.turn(10_300, &shown), [100, 2_000, 100, 2_000]);
        // In another session, and for another model.
        assert_eq!(pictures.of(Some("m"), &png(1400, 1120, 9)).tokens, 2_000);
        assert_eq!(pictures.of(Some("n"), &png(1400, 1120, 9)).tokens, 1_600);
        let url = pictures.of(Some("m"), b"https://example.org/a.png").tokens;
        assert!((100..=2_000).contains(&url), "{url}: as others do");
    }

    #[test]
    fn a_prompt_that_is_mostly_text_says_nothing_of_its_picture() {
        let pictures = Pictures::default();
        let mut model = Model {
            pictures: &pictures,
            turns: 0,
        };
        model.turn(90_000, &[(280, 280, 1)]);
        assert_eq!(pictures.of(Some("m"), &png(280, 280, 2)).tokens, 1_600);
    }

    #[test]
    fn what_has_no_size_has_none() {
        for raw in [&b""[..], b"data:", b"https://example.org", &[b'A'; 9_000]] {
            assert_eq!(size_of(raw), None);
        }
        assert!(size_of(&png(10, 10, 1)).is_some());
        assert_ne!(size_of(&png(10, 10, 1)), size_of(&png(20, 10, 1)));
    }
}
