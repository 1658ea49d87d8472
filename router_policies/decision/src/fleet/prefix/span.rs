//! Finds how many pages of a prompt are held where it is known about how many: by looking there, then ever
//! further off, and by bisection once the end is between two pages that were looked at.

/// What is known so far: `low` pages are held, and page `high` is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    low: usize,
    high: usize,
    look: Look,
}

/// Which page is looked at next, unless the middle is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    At(usize),
    /// So many pages behind those that are held.
    Above(usize),
    /// So many before the one that is not.
    Below(usize),
}

impl Span {
    /// Of `pages` pages, `likely` of which are likely to be held.
    pub fn new(pages: usize, likely: usize) -> Self {
        Self {
            low: 0,
            high: pages + 1,
            look: Look::At(likely.clamp(1, pages.max(1))),
        }
    }

    /// The page to look at, counted from 1; none once it is known how many are held.
    pub fn next(self) -> Option<usize> {
        let half = (self.high - self.low) / 2;
        (half > 0).then_some(match self.look {
            Look::At(page) => page,
            Look::Above(step) => self.low + step.min(half),
            Look::Below(step) => self.high - step.min(half),
        })
    }

    /// Pages that are held, where there is no next one to look at.
    pub fn held(self) -> usize {
        self.low
    }

    /// What is known once it was looked whether `page` is held.
    pub fn after(self, page: usize, is_held: bool) -> Self {
        // Whoever was passed is near by: from there on it is bisected.
        const BISECTS: usize = usize::MAX;
        let look = match (self.look, is_held) {
            (Look::At(_), true) => Look::Above(1),
            (Look::At(_), false) => Look::Below(1),
            (Look::Above(step), true) => Look::Above(step.saturating_mul(2)),
            (Look::Below(step), false) => Look::Below(step.saturating_mul(2)),
            (Look::Below(_), true) => Look::Above(BISECTS),
            (Look::Above(_), false) => Look::Below(BISECTS),
        };
        let (low, high) = match is_held {
            true => (page, self.high),
            false => (self.low, page),
        };
        Self { low, high, look }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is found, and after how many looks.
    fn search(pages: usize, held: usize, likely: usize) -> (usize, usize) {
        let mut span = Span::new(pages, likely);
        let mut looks = 0;
        while let Some(page) = span.next() {
            span = span.after(page, page <= held);
            looks += 1;
        }
        (span.held(), looks)
    }

    #[test]
    fn what_was_expected_is_found_in_two_looks() {
        assert_eq!(search(1_100, 1_085, 1_085), (1_085, 2));
        assert_eq!(search(1_100, 0, 0), (0, 1));
        assert_eq!(search(1_100, 1_100, 1_100), (1_100, 1));
        assert_eq!(search(0, 0, 0), (0, 0));
    }

    proptest! {
        #[test]
        fn it_is_found_from_wherever_the_search_begins(
            pages in 0usize..2_000, held in 0usize..2_000, likely in 0usize..2_000,
        ) {
            let held = held.min(pages);
            let (found, looks) = search(pages, held, likely);
            prop_assert_eq!(found, held);
            // Twice what bisection takes, at most.
            prop_assert!(looks <= 24, "{}", looks);
        }
    }
}
