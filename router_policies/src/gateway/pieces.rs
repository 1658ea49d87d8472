//! Encodes texts that grow: what was encoded before is looked up, not encoded again.
//!
//! Chat templates put special tokens between turns, and a tokenizer encodes what stands between two of
//! them by itself. So a text is cut in front of every such token, and the ids of each piece are kept:
//! of a conversation's next turn only what is new is encoded, whichever conversation had the rest.

use aho_corasick::{AhoCorasick, MatchKind};
use lru::LruCache;
use parking_lot::Mutex;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use tokenizers::Tokenizer;

/// Token ids that are kept, at four bytes each.
const MAX_KEPT_TOKENS: usize = 8 << 20;

/// The ids of pieces, the longest unused ones forgotten first.
pub(super) struct Pieces {
    /// Finds the tokens at which texts may be cut; `None` where there is no such token.
    cuts: Option<AhoCorasick>,
    /// Keyed, so that nobody can choose pieces that are taken for each other.
    hasher: RandomState,
    kept: Mutex<Kept>,
}

struct Kept {
    ids: LruCache<(u64, usize), Arc<[u32]>>,
    tokens: usize,
}

impl Pieces {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let all: Vec<&str> = added.values().map(|token| token.content.as_str()).collect();
        let safe = added.values().filter(|token| {
            let content = token.content.as_str();
            let plain = !token.lstrip && !token.rstrip && !token.single_word && !token.normalized;
            // In a longer one it is no token.
            let is_part = |other: &&str| *other != content && other.contains(content);
            plain
                && !content.is_empty()
                && !all.iter().any(is_part)
                && cuts_cleanly(tokenizer, content)
        });
        let safe: Vec<&str> = safe.map(|token| token.content.as_str()).collect();
        let cuts = (!safe.is_empty())
            .then(|| {
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(safe)
            })
            .and_then(Result::ok);
        Self {
            cuts,
            hasher: RandomState::new(),
            kept: Mutex::new(Kept {
                ids: LruCache::unbounded(),
                tokens: 0,
            }),
        }
    }

    /// Gives `take` the token ids of `text`, piece by piece, without the special tokens that the
    /// tokenizer would put around it.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        mut take: impl FnMut(&[u32]),
    ) -> Result<(), String> {
        let mut begin = 0;
        let cuts = self
            .cuts
            .iter()
            .flat_map(|cuts| cuts.find_iter(text))
            .map(|found| found.start());
        for end in cuts.chain([text.len()]) {
            if end > begin {
                take(&self.piece(tokenizer, &text[begin..end])?);
                begin = end;
            }
        }
        Ok(())
    }

    fn piece(&self, tokenizer: &Tokenizer, text: &str) -> Result<Arc<[u32]>, String> {
        let key = (self.hasher.hash_one(text), text.len());
        if let Some(ids) = self.kept.lock().ids.get(&key) {
            return Ok(Arc::clone(ids));
        }
        let encoding = tokenizer
            .encode_fast(text, false)
            .map_err(|error| error.to_string())?;
        let ids: Arc<[u32]> = encoding.get_ids().into();
        let mut kept = self.kept.lock();
        kept.tokens += ids.len();
        if let Some(same) = kept.ids.put(key, Arc::clone(&ids)) {
            kept.tokens -= same.len();
        }
        while kept.tokens > MAX_KEPT_TOKENS
            && let Some((_, oldest)) = kept.ids.pop_lru()
        {
            kept.tokens -= oldest.len();
        }
        Ok(ids)
    }
}

/// Whether a text that is cut in front of `token` has the same ids as in one piece.
fn cuts_cleanly(tokenizer: &Tokenizer, token: &str) -> bool {
    let ids = |text: &str| {
        tokenizer
            .encode_fast(text, false)
            .map(|found| found.get_ids().to_vec())
    };
    let (before, after) = ("a b\n c ", format!("{token}d\n e {token}"));
    match (ids(before), ids(&after), ids(&format!("{before}{after}"))) {
        (Ok(before), Ok(after), Ok(whole)) => whole == [before, after].concat(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoder::tests::tokenizer_json;
    use super::*;

    fn tokenizer() -> Tokenizer {
        let mut json = tokenizer_json();
        json["truncation"] = serde_json::Value::Null;
        Tokenizer::from_bytes(json.to_string()).expect("valid")
    }

    fn ids(pieces: &Pieces, tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let mut found = Vec::new();
        let all = pieces.encode(tokenizer, text, |ids| found.extend_from_slice(ids));
        all.expect("text");
        found
    }

    #[test]
    fn pieces_together_are_what_the_whole_text_is() {
        let tokenizer = tokenizer();
        let pieces = Pieces::new(&tokenizer);
        assert!(pieces.cuts.is_some());
        for text in [
            "",
            "the",
            "<s>",
            "<s>the<s> the th<s>",
            "the <s",
            "\u{e9}<s>\u{1f600}",
        ] {
            let whole = tokenizer.encode_fast(text, false).expect("text");
            assert_eq!(ids(&pieces, &tokenizer, text), whole.get_ids(), "{text}");
        }
    }

    #[test]
    fn of_a_text_that_grows_only_what_is_new_is_encoded() {
        let tokenizer = tokenizer();
        let pieces = Pieces::new(&tokenizer);
        let first = "<s>the first<s>the second";
        ids(&pieces, &tokenizer, first);
        let before = pieces.kept.lock().ids.len();
        let grown = ids(&pieces, &tokenizer, &format!("{first}<s>new"));
        assert_eq!(before, 2);
        assert_eq!(pieces.kept.lock().ids.len(), before + 1);
        // What is kept is what is given back: a wrong entry would show.
        let key = (pieces.hasher.hash_one("<s>new"), "<s>new".len());
        pieces.kept.lock().ids.put(key, Arc::from([7].as_slice()));
        let kept = ids(&pieces, &tokenizer, &format!("{first}<s>new"));
        assert_ne!(kept, grown);
        assert_eq!(kept.last(), Some(&7));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let tokenizer = tokenizer();
        let pieces = Pieces::new(&tokenizer);
        pieces.kept.lock().tokens = MAX_KEPT_TOKENS;
        ids(&pieces, &tokenizer, "the the");
        let kept = pieces.kept.lock();
        assert!(
            kept.ids.is_empty() && kept.tokens <= MAX_KEPT_TOKENS,
            "{}",
            kept.tokens
        );
    }
}
