//! Ids of blocks: how they are mixed, and maps by them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A well-mixed number for two others.
pub fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x9e37_79b9_7f4a_7c15) * u128::from(b ^ 0xd1b5_4a32_d192_ed03 | 1);
    let folded = (product as u64) ^ ((product >> 64) as u64);
    folded.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ (folded >> 29)
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
