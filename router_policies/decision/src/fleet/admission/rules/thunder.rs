//! `thunder`: ThunderAgent as published: every few seconds, pause what is too much, resume what fits.

use super::{Info, Manner, Placement, Prompt, Rule, Seated, WorkerView, parse_none};
use crate::fleet::admission::identity::Key;

pub const INFO: Info = Info {
    name: "thunder",
    summary: "every 5 s: pause the smallest sessions where the KV is exceeded, resume the smallest that fit",
    rule: "every 5 s: waiting sessions come in, those served before first, the smallest first, to the \
           worker with most room; then, where prompts (shared prefixes counted for each session, plus \
           100 tokens a session) exceed the KV, sessions leave, idle ones first, then, at \
           the end of their turns, others, the smallest first. A turn of a session that is in always goes at once",
    params: &[],
    source: "ThunderAgent (arXiv 2602.13692), its scheduler as published: 5 s, watermark 1.0, acting weight \
             1.0; a session that has sent nothing for 600 s leaves for one that waits, as in Dynamo's port",
    build: |params| {
        parse_none(params)?;
        Ok(Box::new(Thunder))
    },
};

const INTERVAL_S: f64 = 5.0;
/// Counted for each session beside its tokens.
const BUFFER_TOKENS: f64 = 100.0;

fn taken(seated: &Seated) -> f64 {
    seated.tokens as f64 + BUFFER_TOKENS
}

struct Thunder;

impl Rule for Thunder {
    fn manner(&self) -> Manner {
        Manner {
            placement: Placement::MostRoom,
            interval_s: Some(INTERVAL_S),
            in_rounds: true,
            smallest_first: true,
            ..Manner::default()
        }
    }

    fn lets_in(&self, view: &WorkerView<'_>, prompt: Prompt) -> bool {
        let all: f64 = view.seated.iter().map(taken).sum();
        all + prompt.tokens as f64 <= view.kv_capacity_tokens as f64 || view.seated.is_empty()
    }

    fn over_limit(&self, view: &WorkerView<'_>) -> Vec<Key> {
        let used: f64 = view.seated.iter().map(taken).sum();
        let mut excess = used - view.kv_capacity_tokens as f64;
        let mut seated: Vec<_> = view.seated.iter().collect();
        seated.sort_by_key(|seated| (seated.idle_s.is_none(), seated.tokens, seated.key));
        // Who is the last one has nobody to leave for.
        seated.truncate(view.seated.len().saturating_sub(1));
        let mut chosen = Vec::new();
        for seated in seated {
            if excess <= 0.0 {
                break;
            }
            excess -= taken(seated);
            chosen.push(seated.key);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{idle, prompt, view};
    use super::*;
    use serde_json::json;

    #[test]
    fn the_smallest_idle_sessions_are_paused_until_the_rest_fits() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let mut seated = [
            idle(1, 40_000, 1.0),
            idle(2, 30_000, 1.0),
            idle(3, 20_000, 1.0),
            idle(4, 15_000, 1.0),
        ];
        seated[3].idle_s = None;
        assert_eq!(rule.over_limit(&view(&seated)), [3]);
        assert!(!rule.lets_in(&view(&seated[..3]), prompt(9_800)));
        assert!(rule.lets_in(&view(&seated[..3]), prompt(9_700)));
    }
}
