//! How often an answer is its session's last. Most sessions end without a word, so it is learnt: of
//! coding agents' answers few are, of single prompts (a script's, a classifier's) nearly all.

use super::identity::Key;
use super::sessions::Sessions;
use std::collections::VecDeque;

/// Assumed before any answer was seen to be the last or not: coding agents' sessions have a few dozen
/// turns.
const ASSUMED_LAST: f64 = 0.05;
/// So many answers the assumption is worth.
const ASSUMED_ANSWERS: f64 = 4.0;
/// What one more answer takes off the weight of all before it: half is gone after 140.
const DECAY: f64 = 0.995;
/// Answers whose sessions have not come back yet, that are remembered.
const AWAITED: usize = 1 << 17;

/// Answers that are likely to be their session's last alike: whether requests name the session, and
/// whether it has had more than this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(usize);

impl Kind {
    const ALL: usize = 4;

    pub fn new(is_named: bool, answers: u32) -> Self {
        Self(2 * usize::from(is_named) + usize::from(answers > 1))
    }
}

/// A session's last answer so far, after which nothing has come.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    kind: Kind,
    since_s: f64,
    /// It counts as the session's last.
    given_up: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    last: f64,
    others: f64,
}

impl Seen {
    fn note(&mut self, is_last: bool) {
        self.last *= DECAY;
        self.others *= DECAY;
        *if is_last {
            &mut self.last
        } else {
            &mut self.others
        } += 1.0;
    }
}

/// What was seen of all sessions' answers, by kind.
#[derive(Debug, Default)]
pub struct Endings {
    seen: [Seen; Kind::ALL],
    /// In the order in which they came.
    awaited: VecDeque<(f64, Key)>,
}

impl Endings {
    /// The share of such answers that are their session's last.
    pub fn last_share(&self, kind: Kind) -> f64 {
        let seen = self.seen[kind.0];
        (ASSUMED_ANSWERS * ASSUMED_LAST + seen.last) / (ASSUMED_ANSWERS + seen.last + seen.others)
    }

    /// A session that did not say when it comes back got an answer, and nothing of it is in flight.
    pub fn answered(&mut self, key: Key, kind: Kind, now_s: f64) -> Awaited {
        if self.awaited.len() == AWAITED {
            self.awaited.pop_front();
        }
        self.awaited.push_back((now_s, key));
        Awaited {
            kind,
            since_s: now_s,
            given_up: false,
        }
    }

    /// It came back after that answer.
    pub fn returned(&mut self, awaited: Awaited) {
        let seen = &mut self.seen[awaited.kind.0];
        if awaited.given_up {
            seen.last = (seen.last - 1.0).max(0.0);
        }
        seen.note(false);
    }

    /// Counts answers after which nothing has come for `most_s` as their session's last. It is asked for
    /// only where one is awaited: to work it out takes longer than the rest.
    pub fn settle(&mut self, sessions: &mut Sessions, now_s: f64, most_s: impl FnOnce() -> f64) {
        if self.awaited.is_empty() {
            return;
        }
        let most_s = most_s();
        while let Some(&(since_s, key)) = self.awaited.front()
            && now_s - since_s > most_s
        {
            self.awaited.pop_front();
            if let Some(awaited) = sessions.awaited_mut(key)
                && awaited.since_s == since_s
                && !awaited.given_up
            {
                awaited.given_up = true;
                self.seen[awaited.kind.0].note(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SINGLE: usize = 0;

    fn answer(endings: &mut Endings, sessions: &mut Sessions, key: Key, now_s: f64) {
        let awaited = endings.answered(key, Kind(SINGLE), now_s);
        sessions.of(key).awaited = Some(awaited);
    }

    #[test]
    fn answers_after_which_nothing_comes_are_the_last() {
        let (mut endings, mut sessions) = (Endings::default(), Sessions::default());
        let share = |endings: &Endings| endings.last_share(Kind(SINGLE));
        assert_eq!(share(&endings), 0.05);
        for key in 0..60 {
            answer(&mut endings, &mut sessions, key, key as f64);
        }
        endings.settle(&mut sessions, 59.0, || 100.0);
        assert_eq!(share(&endings), 0.05, "they may come back yet");
        endings.settle(&mut sessions, 200.0, || 100.0);
        assert!(share(&endings) > 0.9, "{}", share(&endings));
        assert_eq!(
            endings.last_share(Kind::new(true, 1)),
            0.05,
            "of others nothing is known by it"
        );
    }

    #[test]
    fn who_comes_back_after_all_is_counted_again() {
        let (mut endings, mut sessions) = (Endings::default(), Sessions::default());
        for turn in 0..200 {
            let now_s = f64::from(turn) * 60.0;
            answer(&mut endings, &mut sessions, 1, now_s);
            endings.settle(&mut sessions, now_s + 30.0, || 10.0);
            let awaited = sessions.of(1).awaited.take().expect("an answer");
            assert!(awaited.given_up);
            endings.returned(awaited);
        }
        let share = endings.last_share(Kind(SINGLE));
        assert!(share < 0.02, "{share}");
    }

    #[test]
    fn an_answer_counts_once_however_often_it_is_looked_at() {
        let (mut endings, mut sessions) = (Endings::default(), Sessions::default());
        answer(&mut endings, &mut sessions, 1, 0.0);
        endings.settle(&mut sessions, 20.0, || 10.0);
        let share = endings.last_share(Kind(SINGLE));
        endings.settle(&mut sessions, 900.0, || 10.0);
        assert_eq!(endings.last_share(Kind(SINGLE)), share);
        // A later answer of the same session stands for itself.
        answer(&mut endings, &mut sessions, 1, 900.0);
        let awaited = sessions.of(1).awaited.take().expect("an answer");
        assert!(!awaited.given_up);
        endings.returned(awaited);
        endings.settle(&mut sessions, 2_000.0, || 10.0);
        assert!(endings.last_share(Kind(SINGLE)) < share);
    }
}
