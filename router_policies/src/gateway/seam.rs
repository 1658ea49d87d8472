//! Where two pieces of a stream meet: what is looked for may have been cut there. It lies within one line,
//! so that nothing is to be looked for where the pieces meet at a line's end, as they mostly do.

/// The last bytes, at most `KEPT`, of all pieces so far; none where they end with a line.
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
    /// Takes the next piece. `look` gets the last bytes before it together with its first `KEPT`, unless
    /// a line has ended there.
    pub fn feed<T: Default>(&mut self, piece: &[u8], look: impl FnOnce(&[u8]) -> T) -> T {
        let ends_line = matches!(piece.last(), Some(b'\n' | b'\r'));
        let is_cut = self.length > 0;
        if ends_line && !is_cut {
            return T::default();
        }
        let bytes = self.bytes.as_flattened_mut();
        let taken = piece.len().min(KEPT);
        let end = self.length + taken;
        bytes[self.length..end].copy_from_slice(&piece[..taken]);
        let found = match is_cut {
            true => look(&bytes[..end]),
            false => T::default(),
        };
        if ends_line {
            self.length = 0;
        } else if piece.len() > KEPT {
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
    fn what_is_looked_at_is_the_lines_end_before_and_the_pieces_beginning() {
        let text: Vec<u8> = (0..=255).collect();
        for size in 1..20 {
            let mut seam = Seam::<5>::default();
            let mut kept = Vec::new();
            for (i, piece) in text.chunks(size).enumerate() {
                let around = [&kept, &piece[..piece.len().min(5)]].concat();
                let looked = seam.feed(piece, |bytes| Some(bytes == around));
                let expected = (!kept.is_empty()).then_some(true);
                assert_eq!(looked, expected, "pieces of {size}, number {i}");
                kept.extend_from_slice(piece);
                kept.drain(..kept.len().saturating_sub(5));
                if matches!(piece.last(), Some(b'\n' | b'\r')) {
                    kept.clear();
                }
            }
        }
    }
}
