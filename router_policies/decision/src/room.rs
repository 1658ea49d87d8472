//! A room of a fixed size that clients share, such as memory or the places of a queue: who comes finds room,
//! whoever came first.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// A client may hold so many times what it leaves for others.
const SHARE_OF_CLIENT: usize = 3;

/// What there is too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Room for anybody.
    OfRoom,
    /// What one client may hold of it.
    OfShare,
}

/// What clients hold.
#[derive(Debug, Default)]
pub struct Room {
    held: usize,
    of: HashMap<u64, usize>,
}

impl Room {
    pub fn held(&self) -> usize {
        self.held
    }

    /// Why there is no room for `more`, of `size` in all. Who holds nothing is refused only where nothing is left;
    /// `None` is nobody in particular, and has no share.
    pub fn lack(&self, client: Option<u64>, more: usize, size: usize) -> Option<Lack> {
        let Some(left) = size.checked_sub(self.held.saturating_add(more)) else {
            return Some(Lack::OfRoom);
        };
        let holds = *self.of.get(&client?)?;
        (holds.saturating_add(more) > SHARE_OF_CLIENT.saturating_mul(left)).then_some(Lack::OfShare)
    }

    pub fn take(&mut self, client: Option<u64>, more: usize) {
        self.held += more;
        if let Some(client) = client.filter(|_| more > 0) {
            *self.of.entry(client).or_default() += more;
        }
    }

    /// Gives back what was taken.
    pub fn give_back(&mut self, client: Option<u64>, less: usize) {
        self.held -= less;
        if let Some(client) = client
            && let Entry::Occupied(mut of) = self.of.entry(client)
        {
            *of.get_mut() -= less;
            if *of.get() == 0 {
                of.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `size` places a client gets while others hold what they do.
    fn fill(room: &mut Room, client: Option<u64>, size: usize) -> usize {
        let before = room.held();
        while room.lack(client, 1, size).is_none() {
            room.take(client, 1);
        }
        room.held() - before
    }

    #[test]
    fn each_of_many_that_take_all_they_get_leaves_room_for_the_next() {
        let mut room = Room::default();
        let got: Vec<usize> = (1..=4)
            .map(|client| fill(&mut room, Some(client), 100))
            .collect();
        assert_eq!(got[0], 75);
        assert!(got.iter().all(|&got| got > 0), "{got:?}");
        assert_eq!(room.lack(Some(1), 1, 100), Some(Lack::OfShare));
    }

    #[test]
    fn the_last_place_is_for_one_that_holds_none_and_all_are_for_nobody_in_particular() {
        let mut room = Room::default();
        assert_eq!(fill(&mut room, Some(1), 1), 1);
        assert_eq!(room.lack(Some(2), 1, 1), Some(Lack::OfRoom));
        room.give_back(Some(1), 1);
        assert_eq!(fill(&mut room, None, 7), 7);
        room.give_back(None, 7);
        assert_eq!((room.held(), room.of.len()), (0, 0));
    }
}
