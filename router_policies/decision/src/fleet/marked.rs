//! A list that knows which of its items may have changed, so that what follows from them is worked out
//! anew for those alone: there may be thousands, and few change between two decisions.

use std::ops::{Deref, Index, IndexMut};

/// Some numbers from 0 on, each once.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    is_marked: Vec<bool>,
    marked: Vec<usize>,
}

impl Marks {
    pub fn add(&mut self, at: usize) {
        if self.is_marked.len() <= at {
            self.is_marked.resize(at + 1, false);
        }
        if !std::mem::replace(&mut self.is_marked[at], true) {
            self.marked.push(at);
        }
    }

    pub fn has(&self, at: usize) -> bool {
        self.is_marked.get(at).copied().unwrap_or_default()
    }

    /// In the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.marked.iter().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.marked.is_empty()
    }

    pub fn clear(&mut self) {
        for at in self.marked.drain(..) {
            self.is_marked[at] = false;
        }
    }
}

/// A list whose items are marked when they are handed out to be changed.
#[derive(Debug, Default)]
pub(crate) struct Marked<T> {
    items: Vec<T>,
    pub marks: Marks,
}

impl<T> Marked<T> {
    pub fn push(&mut self, item: T) {
        self.marks.add(self.items.len());
        self.items.push(item);
    }

    pub fn get_mut(&mut self, at: usize) -> Option<&mut T> {
        let item = self.items.get_mut(at)?;
        self.marks.add(at);
        Some(item)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        (0..self.items.len()).for_each(|at| self.marks.add(at));
        self.items.iter_mut()
    }
}

impl<T> Deref for Marked<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items
    }
}

impl<T> Index<usize> for Marked<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        &self.items[at]
    }
}

impl<T> IndexMut<usize> for Marked<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        self.marks.add(at);
        &mut self.items[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_have_changed_is_marked_once_and_what_was_read_is_not() {
        let mut list: Marked<u32> = Marked::default();
        (0..4).for_each(|_| list.push(0));
        list.marks.clear();
        assert_eq!((list[1], list.get(2), list.len()), (0, Some(&0), 4));
        assert!(list.marks.is_empty() && list.get_mut(4).is_none());
        list[2] += 1;
        *list.get_mut(0).expect("there is one") += 1;
        list[2] += 1;
        assert_eq!(list.marks.iter().collect::<Vec<_>>(), [2, 0]);
        assert!(list.marks.has(2) && !list.marks.has(1) && !list.marks.has(9));
        list.marks.clear();
        list.iter_mut().for_each(|item| *item += 1);
        assert_eq!(list.marks.iter().count(), 4);
        assert_eq!(*list, [2, 1, 3, 1]);
    }
}
