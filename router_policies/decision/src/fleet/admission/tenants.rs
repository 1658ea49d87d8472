//! Tenants: who shares the workers, by weight, where the configuration names some.
//!
//! Waiting turns go in the order of what their tenants have used of the KV, in tokens x seconds by weight, so
//! that many that one tenant sends are one tenant's; within a tenant the rule's order holds. Each has a share
//! of what the tiers keep by its weight, among those that hold or want some; what it does not want is lent:
//! sessions of those that hold more leave first. Of background tenants the share is nothing while an
//! interactive one waits.

use super::identity::Key;
use crate::fleet::prefix::estimate::StateMap;
use serde::{Deserialize, Serialize};

/// A session counts towards its tenant's limit until it has sent nothing for so long.
const SESSION_S: f64 = 300.0;
/// What tenants hold is counted so often.
const WEIGH_S: f64 = 0.1;
/// Assumed of a turn until some was seen.
const ASSUMED_RUN_S: f64 = 5.0;

/// When a tenant's turns go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    #[default]
    Interactive,
    /// After those of all interactive tenants.
    Background,
}

#[derive(Clone, Debug)]
pub struct Tenant {
    pub name: String,
    pub weight: f64,
    pub priority: Priority,
    pub max_sessions: Option<usize>,
    /// Of prompts and answers.
    pub tokens_per_min: Option<f64>,
}

/// Which limit a tenant has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quota {
    Sessions,
    Tokens,
}

/// A tenant, as people are shown it.
#[derive(Clone, Debug, Serialize)]
pub struct TenantShown {
    pub tenant: String,
    pub weight: f64,
    pub priority: Priority,
    pub waiting: usize,
    pub running: u32,
    /// Sessions that sent something of late, where they are limited.
    pub sessions: Option<usize>,
    /// What its sessions hold of the KV, and what it may hold while others want theirs.
    pub held_tokens: u64,
    pub share_tokens: u64,
    pub kv_token_seconds: f64,
    pub refused_sessions: u64,
    pub refused_tokens: u64,
}

struct Account {
    of: Tenant,
    /// KV tokens x seconds over weight, what runs as far as is to be expected.
    used: f64,
    running: u32,
    waiting: usize,
    held: f64,
    share: f64,
    /// Sessions, and when they sent something last.
    sessions: StateMap<f64>,
    /// What is left of its tokens a minute, and when.
    left: (f64, f64),
    token_s: f64,
    refused: [u64; 2],
}

impl Account {
    fn new(of: Tenant) -> Self {
        Self {
            left: (of.tokens_per_min.unwrap_or(0.0), 0.0),
            of,
            used: 0.0,
            running: 0,
            waiting: 0,
            held: 0.0,
            share: 0.0,
            sessions: StateMap::default(),
            token_s: 0.0,
            refused: [0; 2],
        }
    }

    fn is_background(&self) -> bool {
        self.of.priority == Priority::Background
    }
}

/// A turn that runs.
struct Running {
    payer: usize,
    tokens: f64,
    since_s: f64,
    charged: f64,
}

#[derive(Default)]
pub struct Tenants {
    /// None where the configuration names none; the first is of those that belong to no other.
    accounts: Vec<Account>,
    turns: StateMap<Running>,
    run_s: Option<f64>,
    weighed_s: Option<f64>,
}

impl Tenants {
    pub fn new(tenants: Vec<Tenant>) -> Self {
        Self {
            accounts: tenants.into_iter().map(Account::new).collect(),
            ..Self::default()
        }
    }

    /// Whether there are any.
    pub fn are_some(&self) -> bool {
        !self.accounts.is_empty()
    }

    fn charge(&self, tokens: u64) -> f64 {
        tokens as f64 * self.run_s.unwrap_or(ASSUMED_RUN_S)
    }

    /// A turn of the tenant waits from now on. Who has wanted nothing for a while has saved up nothing.
    pub fn enqueue(&mut self, payer: usize) {
        let is_active = |account: &Account| account.running > 0 || account.waiting > 0;
        let least = self.accounts.iter().filter(|account| is_active(account));
        let least = least.map(|account| account.used).min_by(f64::total_cmp);
        let Some(account) = self.accounts.get_mut(payer) else {
            return;
        };
        if !is_active(account) {
            account.used = account.used.max(least.unwrap_or(0.0));
        }
        account.waiting += 1;
    }

    pub fn dequeue(&mut self, payer: usize) {
        if let Some(account) = self.accounts.get_mut(payer) {
            account.waiting -= 1;
        }
    }

    /// A turn was let in.
    pub fn begin(&mut self, payer: usize, turn: u64, tokens: u64, now_s: f64) {
        let charged = self.charge(tokens);
        let Some(account) = self.accounts.get_mut(payer) else {
            return;
        };
        account.running += 1;
        account.used += charged / account.of.weight;
        account.held += tokens as f64;
        let running = Running {
            payer,
            tokens: tokens as f64,
            since_s: now_s,
            charged,
        };
        self.turns.insert(turn, running);
    }

    /// It has ended.
    pub fn end(&mut self, turn: u64, now_s: f64) {
        const GAIN: f64 = 0.02;
        let Some(ended) = self.turns.remove(&turn) else {
            return;
        };
        let ran_s = now_s - ended.since_s;
        let mean_s = self.run_s.get_or_insert(ran_s);
        *mean_s += GAIN * (ran_s - *mean_s);
        let account = &mut self.accounts[ended.payer];
        account.running -= 1;
        account.token_s += ended.tokens * ran_s;
        account.used += (ended.tokens * ran_s - ended.charged) / account.of.weight;
    }

    /// The order in which waiting turns go, from those of each tenant in its own order. `tokens` says what a
    /// turn holds.
    pub fn merged<T>(
        &self,
        mut of_each: Vec<impl Iterator<Item = T>>,
        tokens: impl Fn(&T) -> u64,
    ) -> impl Iterator<Item = T> {
        let mut heads: Vec<Option<T>> = of_each.iter_mut().map(Iterator::next).collect();
        let mut used: Vec<f64> = self.accounts.iter().map(|account| account.used).collect();
        std::iter::from_fn(move || {
            let account = |at: usize| (self.accounts[at].is_background(), used[at]);
            let first = (0..heads.len()).filter(|&at| heads[at].is_some());
            let first = first.min_by(|&one, &other| {
                let (one, other) = (account(one), account(other));
                one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
            })?;
            let next = std::mem::replace(&mut heads[first], of_each[first].next())?;
            used[first] += self.charge(tokens(&next)) / self.accounts[first].of.weight;
            Some(next)
        })
    }

    /// How many there are, where it is time to work out what everybody may hold.
    pub fn are_to_be_weighed(&mut self, now_s: f64) -> Option<usize> {
        let is_due = self
            .weighed_s
            .is_none_or(|then_s| now_s >= then_s + WEIGH_S);
        (is_due && self.are_some()).then(|| {
            self.weighed_s = Some(now_s);
            self.accounts.len()
        })
    }

    /// Works out everybody's share of so many tokens, from what each holds.
    pub fn weigh(&mut self, held: &[f64], budget_tokens: u64) {
        let mut waiting = self.accounts.iter().filter(|account| account.waiting > 0);
        let has_interactive = waiting.any(|account| !account.is_background());
        let weight = |account: &Account, held: f64| {
            let is_active = held > 0.0 || account.waiting > 0;
            let counts = is_active && !(has_interactive && account.is_background());
            f64::from(u8::from(counts)) * account.of.weight
        };
        let weights = self.accounts.iter().zip(held);
        let weights: Vec<f64> = weights
            .map(|(account, &held)| weight(account, held))
            .collect();
        let all: f64 = weights.iter().sum();
        for ((account, held), weight) in self.accounts.iter_mut().zip(held).zip(weights) {
            account.held = *held;
            account.share = budget_tokens as f64 * weight / all.max(f64::MIN_POSITIVE);
        }
    }

    /// Whether a tenant holds more than its share, while others want theirs.
    pub fn holds_more(&self, payer: usize) -> bool {
        let account = self.accounts.get(payer);
        account.is_some_and(|of| of.held > of.share)
    }

    /// Takes so many tokens, and the session, from what a tenant may use.
    ///
    /// # Errors
    /// The limit that is reached, and after how many seconds another try may succeed.
    pub fn take(
        &mut self,
        payer: usize,
        session: Option<Key>,
        tokens: u64,
        is_busy: impl Fn(Key) -> bool,
        now_s: f64,
    ) -> Result<(), (Quota, f64)> {
        let Some(account) = self.accounts.get_mut(payer) else {
            return Ok(());
        };
        if let Some(per_min) = account.of.tokens_per_min {
            let (left, then_s) = account.left;
            let left = (left + per_min * (now_s - then_s) / 60.0).min(per_min);
            account.left = (left, now_s);
            if left <= 0.0 {
                account.refused[1] += 1;
                return Err((Quota::Tokens, (60.0 * -left / per_min).max(1.0)));
            }
        }
        if let (Some(most), Some(session)) = (account.of.max_sessions, session) {
            let sessions = &mut account.sessions;
            if !sessions.contains_key(&session) && sessions.len() >= most {
                sessions.retain(|&key, &mut last_s| now_s - last_s < SESSION_S || is_busy(key));
            }
            if !sessions.contains_key(&session) && sessions.len() >= most {
                let first_s = sessions.values().copied().fold(now_s, f64::min);
                account.refused[0] += 1;
                return Err((Quota::Sessions, (first_s + SESSION_S - now_s).max(1.0)));
            }
            sessions.insert(session, now_s);
        }
        self.spend(payer, tokens);
        Ok(())
    }

    /// Takes tokens of an answer from what a tenant may use.
    pub fn spend(&mut self, payer: usize, tokens: u64) {
        if let Some(account) = self.accounts.get_mut(payer) {
            account.left.0 -= tokens as f64;
        }
    }

    /// The session has ended.
    pub fn leave(&mut self, payer: usize, session: Key) {
        if let Some(account) = self.accounts.get_mut(payer) {
            account.sessions.remove(&session);
        }
    }

    pub fn name(&self, payer: usize) -> Option<&str> {
        Some(self.accounts.get(payer)?.of.name.as_str())
    }

    pub fn shown(&self) -> Vec<TenantShown> {
        let shown = |account: &Account| TenantShown {
            tenant: account.of.name.clone(),
            weight: account.of.weight,
            priority: account.of.priority,
            waiting: account.waiting,
            running: account.running,
            sessions: account.of.max_sessions.map(|_| account.sessions.len()),
            held_tokens: account.held as u64,
            share_tokens: account.share as u64,
            kv_token_seconds: account.token_s,
            refused_sessions: account.refused[0],
            refused_tokens: account.refused[1],
        };
        self.accounts.iter().map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenants(weights: &[(f64, Priority)]) -> Tenants {
        let tenant = |(at, &(weight, priority)): (usize, &(f64, Priority))| Tenant {
            name: format!("t{at}"),
            weight,
            priority,
            max_sessions: (at == 1).then_some(2),
            tokens_per_min: (at == 1).then_some(600.0),
        };
        Tenants::new(weights.iter().enumerate().map(tenant).collect())
    }

    const EVEN: (f64, Priority) = (1.0, Priority::Interactive);

    fn order(tenants: &Tenants, turns: [&[char]; 2]) -> String {
        let of_each = turns.map(|turns| turns.iter().copied());
        tenants.merged(of_each.into(), |_| 100).collect()
    }

    #[test]
    fn turns_go_by_what_their_tenants_have_used_by_weight() {
        let mut even = tenants(&[EVEN, EVEN]);
        assert_eq!(order(&even, [&['a', 'b', 'c'], &['x', 'y']]), "axbyc");
        even.begin(0, 9, 1, 0.0);
        even.end(9, 5.0);
        even.begin(0, 1, 150, 0.0);
        assert_eq!(order(&even, [&['a', 'b', 'c'], &['x', 'y']]), "xyabc");
        // It ran for much less long than was expected.
        even.end(1, 0.1);
        assert_eq!(order(&even, [&['a', 'b', 'c'], &['x', 'y']]), "xaybc");
        let uneven = tenants(&[EVEN, (3.0, Priority::Interactive)]);
        let turns: [&[char]; 2] = [&['a', 'b'], &['x', 'y', 'z', 'w']];
        assert_eq!(order(&uneven, turns), "axyzbw");
        let background = tenants(&[(9.0, Priority::Background), EVEN]);
        assert_eq!(order(&background, turns), "xyzwab");
    }

    #[test]
    fn nobody_saves_up_what_he_did_not_want() {
        let mut tenants = tenants(&[EVEN, EVEN]);
        for turn in 0..10 {
            tenants.begin(0, turn, 100, 0.0);
        }
        tenants.enqueue(1);
        // The first goes on from where the other is, and not ten turns later.
        assert_eq!(order(&tenants, [&['a', 'b'], &['x', 'y']]), "axby");
    }

    #[test]
    fn who_holds_more_than_its_share_does_so_only_while_others_want_theirs() {
        let mut both = tenants(&[EVEN, EVEN]);
        both.weigh(&[900.0, 0.0], 1_000);
        assert!(!both.holds_more(0), "nobody wants it");
        both.enqueue(1);
        both.weigh(&[900.0, 0.0], 1_000);
        assert!(both.holds_more(0) && !both.holds_more(1));
        both.weigh(&[500.0, 100.0], 1_000);
        assert!(!both.holds_more(0));
        let mut background = tenants(&[(9.0, Priority::Background), EVEN]);
        background.weigh(&[900.0, 50.0], 1_000);
        assert!(!background.holds_more(0), "nobody wants it");
        background.enqueue(1);
        background.weigh(&[900.0, 50.0], 1_000);
        assert!(background.holds_more(0));
    }

    #[test]
    fn limits_are_told_with_the_time_after_which_they_hold_no_more() {
        let mut tenants = tenants(&[EVEN, EVEN]);
        let mut take =
            |session, tokens, now_s| tenants.take(1, Some(session), tokens, |key| key == 1, now_s);
        assert_eq!(take(1, 500, 0.0), Ok(()));
        assert_eq!(take(2, 400, 1.0), Ok(()));
        assert_eq!(take(2, 1, 2.0), Err((Quota::Tokens, 28.0)));
        assert_eq!(take(2, 1, 31.0), Ok(()));
        assert_eq!(take(3, 1, 60.0), Err((Quota::Sessions, 240.0)));
        // The first still runs.
        assert_eq!(take(3, 1, 332.0), Ok(()));
        assert!(take(2, 1, 332.0).is_err());
        tenants.leave(1, 3);
        assert_eq!(tenants.take(1, Some(2), 1, |_| true, 333.0), Ok(()));
        assert_eq!(tenants.shown()[1].refused_sessions, 2);
    }
}
