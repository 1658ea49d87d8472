//! Where two pieces of a stream meet: what is looked for may have been cut there.

/// The last bytes, at most `KEPT`, of all pieces so far.
#[derive(Debug)]
pub(super) struct Seam<const KEPT: usize> {
    /// They stand at the beginning; behind them is room for as many of the next piece.
    bytes: [[u8; KEPT]; 2],
    length: usize,
}

impl<const KEPT: usize> Default for Seam<KEPT> {
    fn default() -> Self {
        Self {
            bytes: [[0; KEPT]; 2],
            length: 0,
        }
    }
}

impl<const KEPT: usize> Seam<KEPT> {
    /// Takes the next piece. `look` gets the last bytes before it together with its first `KEPT`.
    pub fn feed<T>(&mut self, piece: &[u8], look: impl FnOnce(&[u8]) -> T) -> T {
        let bytes = self.bytes.as_flattened_mut();
        let taken = piece.len().min(KEPT);
        let end = self.length + taken;
        bytes[self.length..end].copy_from_slice(&piece[..taken]);
        let found = look(&bytes[..end]);
        if piece.len() > KEPT {
            bytes[..KEPT].copy_from_slice(&piece[piece.len() - KEPT..]);
            self.length = KEPT;
        } else {
            self.length = end.min(KEPT);
            bytes.copy_within(end - self.length..end, 0);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_at_is_the_end_of_all_before_and_the_pieces_beginning() {
        let text: Vec<u8> = (0..=255).collect();
        for size in 1..20 {
            let mut seam = Seam::<5>::default();
            for (i, piece) in text.chunks(size).enumerate() {
                let at = i * size;
                let around = &text[at.saturating_sub(5)..at + piece.len().min(5)];
                assert!(seam.feed(piece, |bytes| bytes == around), "{size}: {at}");
            }
        }
    }
}
