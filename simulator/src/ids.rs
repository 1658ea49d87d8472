//! Ids of blocks: how they are mixed, and maps by them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A well-mixed number for two others; different for each `b` with one `a`, and the other way round.
pub fn mix(a: u64, b: u64) -> u64 {
    let mut mixed = (a.rotate_left(32) ^ b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Keys are already uniformly distributed, for [`mix`] made them.
#[derive(Default)]
pub struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0, u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

pub type IdMap<V> = HashMap<u64, V, BuildHasherDefault<Identity>>;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn small_numbers_that_differ_anywhere_are_mixed_differently() {
        let mixed: HashSet<u64> = (0..300)
            .flat_map(|a| (0..300).map(move |b| mix(mix(a, 0), b)))
            .collect();
        assert_eq!(mixed.len(), 300 * 300);
    }
}
