//! Token ids as requests mostly write them: of at most seven digits, each followed by a comma and
//! preceded by at most one space. They are read a window of bytes at once, which makes prompts of
//! 100,000 tokens cheap; whatever else stands in a list is left to the caller.
//!
//! A window is classified first, every byte of it: what is a digit, what a comma. Each id is then taken
//! from the eight bytes before its comma, so that none waits for the one before it. Where the processor
//! has AVX-512, eight ids are taken at once.

use decision::fleet::prefix::hash::{GROUP_TOKENS, TokenHasher};
use wide::u8x16;

/// Bytes before a window's ids that are classified with them: an id that ends behind them may begin
/// there.
const LEAD_BYTES: usize = 8;
/// Bytes in which ids end.
const STRIDE_BYTES: usize = 56;
/// What is looked at: bits of a mask.
const CLASSIFIED_BYTES: usize = LEAD_BYTES + STRIDE_BYTES;
/// With as many bytes after it that every mask's end can be taken for an id's.
type Window = [u8; CLASSIFIED_BYTES + 8];

/// More ids than end in a window: a digit and a comma each.
const MOST_IDS: usize = 32;
/// Ids that wait to be hashed, in whole groups. Aligned, so that eight are in one cache line.
#[repr(align(64))]
struct Waiting([u64; 4 * MOST_IDS]);

/// Digits of ids, as chains take them.
type Room = [u64; MOST_IDS];

/// What a window holds, by bits that stand for bytes behind the lead.
struct Found {
    /// The commas that end ids.
    ends: u64,
    /// Something else comes after them.
    is_last: bool,
}

/// Takes ids from `text[at..]`, which begins with one, until something else comes or few bytes are
/// left. Returns where the next one begins.
pub fn take(text: &[u8], at: usize, hasher: &mut TokenHasher) -> usize {
    #[cfg(target_arch = "x86_64")]
    if let Some(end) = x86::take(text, at, hasher) {
        return end;
    }
    take_with(text, at, hasher, ids_in)
}

/// [`take`], with what reads a window.
#[inline(always)]
fn take_with(
    text: &[u8],
    begin: usize,
    hasher: &mut TokenHasher,
    ids_in: impl Fn(&Window, &mut Room) -> Found,
) -> usize {
    let Waiting(ids) = &mut Waiting([0; 4 * MOST_IDS]);
    let mut count = 0;
    let mut end = begin;
    // Windows follow each other by their own width, so that none waits for where an id ended.
    let windows = match begin.checked_sub(LEAD_BYTES) {
        Some(lead) if text.get(begin - 1) == Some(&b',') => &text[lead..],
        _ => return begin,
    };
    let mut at = 0;
    while let Some(window) = windows.get(at..).and_then(<[u8]>::first_chunk) {
        let Some(room) = ids[count..].first_chunk_mut() else {
            let whole = count - (hasher.since_group() + count) % GROUP_TOKENS;
            hasher.extend_digits(&ids[..whole]);
            ids.copy_within(whole..count, 0);
            count -= whole;
            continue;
        };
        let found = ids_in(window, room);
        count += found.ends.count_ones() as usize;
        if found.ends != 0 {
            end = begin + at + 64 - found.ends.leading_zeros() as usize;
        }
        if found.is_last {
            break;
        }
        at += STRIDE_BYTES;
    }
    hasher.extend_digits(&ids[..count]);
    end
}

/// What the masks of a window's digits, commas and, where there is anything else, spaces say.
#[inline(always)]
fn found(digits: u64, commas: u64, spaces: impl FnOnce() -> u64) -> Found {
    // Ends of two, four and eight digits in a row.
    let two = digits & digits << 1;
    let four = two & two << 2;
    let mut wrong = four & four << 4 | commas & !(digits << 1);
    let others = !(digits | commas);
    if others >> LEAD_BYTES != 0 {
        wrong |= others & !(commas << 1 & spaces());
    }
    let wrong = wrong >> LEAD_BYTES;
    let before_wrong = (wrong & wrong.wrapping_neg()).wrapping_sub(1);
    Found {
        ends: commas >> LEAD_BYTES & before_wrong,
        is_last: wrong != 0,
    }
}

/// A bit for each byte of the window.
#[inline(always)]
fn mask(window: &Window, is: impl Fn(u8x16) -> u8x16) -> u64 {
    let (lanes, _) = window[..CLASSIFIED_BYTES].as_chunks();
    let bits = lanes
        .iter()
        .map(|&lanes| is(u8x16::new(lanes)).to_bitmask());
    bits.rev()
        .fold(0, |mask, bits| mask << 16 | u64::from(bits as u16))
}

/// Reads the ids that end in the window.
#[inline(always)]
fn ids_in(window: &Window, ids: &mut Room) -> Found {
    const AT_ONCE: usize = 4;
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    // The bit by which commas and spaces, less a zero digit, differ from digits.
    const NO_DIGIT: u64 = 0x1010_1010_1010_1010;
    let digits = mask(window, |bytes| {
        let values = bytes ^ u8x16::splat(b'0');
        values.min(u8x16::splat(9)).simd_eq(values)
    });
    let equal = |byte| mask(window, |bytes| bytes.simd_eq(u8x16::splat(byte)));
    let found = found(digits, equal(b','), || equal(b' '));
    let mut ends = found.ends;
    for ids in ids.as_chunks_mut::<AT_ONCE>().0 {
        if ends == 0 {
            break;
        }
        // Beyond the last one, what is written is not looked at.
        for id in ids {
            // An id ends eight bytes later, behind the lead.
            let from = ends.trailing_zeros() as usize;
            ends &= ends.wrapping_sub(1);
            let mut word = [0; 8];
            word.copy_from_slice(&window[from..from + 8]);
            let word = u64::from_le_bytes(word) ^ ZEROS;
            // Bytes up to the last that is no digit become zeros in front of the id.
            let before = u64::MAX.wrapping_shr((word & NO_DIGIT).leading_zeros());
            *id = word & !before;
        }
    }
    found
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CLASSIFIED_BYTES, Found, Room, TokenHasher, Window, found, ids_in, take_with};
    use bytemuck::cast;
    use std::arch::x86_64::*;

    /// [`super::take`] in the instructions that this processor has; none if it has no more than all.
    pub fn take(text: &[u8], at: usize, hasher: &mut TokenHasher) -> Option<usize> {
        let has_avx512 = is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512cd")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2");
        if !(has_avx512 && has_avx2()) {
            return take_with_avx2(text, at, hasher);
        }
        #[expect(
            unsafe_code,
            reason = "the processor has what the function is compiled for"
        )]
        Some(unsafe { take_avx512(text, at, hasher) })
    }

    /// [`super::take`] in AVX2, if this processor has it.
    pub fn take_with_avx2(text: &[u8], at: usize, hasher: &mut TokenHasher) -> Option<usize> {
        #[expect(
            unsafe_code,
            reason = "the processor has what the function is compiled for"
        )]
        has_avx2().then(|| unsafe { take_avx2(text, at, hasher) })
    }

    fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt")
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn take_avx2(text: &[u8], at: usize, hasher: &mut TokenHasher) -> usize {
        take_with(text, at, hasher, ids_in)
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[target_feature(enable = "avx512bw,avx512cd,avx512f,avx512vbmi,avx512vbmi2")]
    fn take_avx512(text: &[u8], at: usize, hasher: &mut TokenHasher) -> usize {
        take_with(text, at, hasher, |window, ids| ids_in_avx512(window, ids))
    }

    /// The places of bytes in a vector.
    const PLACES: [u8; CLASSIFIED_BYTES] = {
        let mut places = [0; CLASSIFIED_BYTES];
        let mut at = 0;
        while at < CLASSIFIED_BYTES {
            places[at] = at as u8;
            at += 1;
        }
        places
    };

    /// [`ids_in`], eight ids at once.
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[target_feature(enable = "avx512bw,avx512cd,avx512f,avx512vbmi,avx512vbmi2")]
    fn ids_in_avx512(window: &Window, ids: &mut Room) -> Found {
        let splat = |byte: u8| _mm512_set1_epi8(byte as i8);
        let mut classified = [0; CLASSIFIED_BYTES];
        classified.copy_from_slice(&window[..CLASSIFIED_BYTES]);
        let bytes: __m512i = cast(classified);
        let values = _mm512_xor_si512(bytes, splat(b'0'));
        let digits = _mm512_cmple_epu8_mask(values, splat(9));
        let commas = _mm512_cmpeq_epi8_mask(bytes, splat(b','));
        let found = found(digits, commas, || {
            _mm512_cmpeq_epi8_mask(bytes, splat(b' '))
        });

        // Of every id, where its eight bytes begin; of every byte of eight ids, which it is in.
        let places = cast(PLACES);
        let begins = _mm512_maskz_compress_epi8(found.ends, places);
        let mut id_of_byte = _mm512_and_si512(_mm512_srli_epi16::<3>(places), splat(7));
        let byte_of_id = _mm512_and_si512(places, splat(7));
        let mut left = found.ends.count_ones();
        for ids in ids.as_chunks_mut::<8>().0 {
            if left == 0 {
                break;
            }
            let from = _mm512_add_epi8(_mm512_permutexvar_epi8(id_of_byte, begins), byte_of_id);
            let words = _mm512_permutexvar_epi8(from, values);
            let no_digits = _mm512_lzcnt_epi64(_mm512_and_si512(words, splat(0x10)));
            let before = _mm512_srlv_epi64(_mm512_set1_epi64(-1), no_digits);
            *ids = cast(_mm512_andnot_si512(before, words));
            id_of_byte = _mm512_add_epi8(id_of_byte, splat(8));
            left = left.saturating_sub(8);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Takes ids one by one, as far as `take` may go in all.
    fn taken_one_by_one(text: &[u8], begin: usize) -> Vec<(usize, u32)> {
        let mut taken = Vec::new();
        let mut at = begin;
        while let Some(length) = text[at..].iter().position(|&byte| byte == b',') {
            let id = &text[at..at + length];
            let id = id.strip_prefix(b" ").unwrap_or(id);
            if !(1..=7).contains(&id.len()) || !id.iter().all(u8::is_ascii_digit) {
                break;
            }
            let id = std::str::from_utf8(id).expect("digits");
            at += length + 1;
            taken.push((at, id.parse().expect("a number")));
        }
        taken
    }

    type Take = fn(&[u8], usize, &mut TokenHasher) -> usize;

    /// Every way in which this processor can.
    fn ways() -> Vec<Take> {
        vec![
            take,
            #[cfg(target_arch = "x86_64")]
            |text, at, hasher| {
                x86::take_with_avx2(text, at, hasher).unwrap_or_else(|| take(text, at, hasher))
            },
            |text, at, hasher| take_with(text, at, hasher, ids_in),
        ]
    }

    #[test]
    fn nearly_all_of_a_plain_list_is_taken() {
        for separator in [",", ", "] {
            let ids: Vec<String> = (0..5_000u32).map(|i| (i * 7 % 3_001).to_string()).collect();
            let text = format!("{{\"input_ids\": [7,{}]}}", ids.join(separator));
            for take in ways() {
                let mut hasher = TokenHasher::new(4);
                let end = take(text.as_bytes(), 17, &mut hasher);
                assert!(text.len() - end < 80, "{end} of {}", text.len());
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_taken_is_what_is_written(
            ids in proptest::collection::vec(
                (prop_oneof![9 => "[0-9]{1,7}", 1 => "[0-9]{8,9}|-1| 1||x|1 |1.5|\\[1|é"], any::<bool>()),
                0..120,
            ),
            often in 1usize..50,
            block in 1usize..20,
            before in 0u32..10,
        ) {
            // What is rarely there, so that most lists go on for long.
            let ids: Vec<String> = ids
                .into_iter()
                .enumerate()
                .map(|(i, (id, space))| {
                    let is_plain = id.len() < 8 && id.bytes().all(|byte| byte.is_ascii_digit());
                    let id = if is_plain || i % often == often - 1 { id } else { "5".to_owned() };
                    format!("{}{id},", if space { " " } else { "" })
                })
                .collect();
            let text = format!("{{\"prompt\":[1,{}12345678901234567890]}}", ids.concat());
            let text = text.as_bytes();
            let begin = 13;
            let possible = taken_one_by_one(text, begin);
            for take in ways() {
                let mut hasher = TokenHasher::new(block);
                (0..before).for_each(|token| hasher.push(token));
                let end = take(text, begin, &mut hasher);
                let count = possible.partition_point(|&(at, _)| at <= end);
                prop_assert_eq!(end, if count == 0 { begin } else { possible[count - 1].0 });
                // It stops early only for want of bytes.
                let behind = possible.get(count).map_or(end, |next| next.0);
                prop_assert!(count == possible.len() || behind + 80 > text.len());
                let mut expected = TokenHasher::new(block);
                (0..before).for_each(|token| expected.push(token));
                possible[..count].iter().for_each(|&(_, token)| expected.push(token));
                prop_assert_eq!(hasher.finish(), expected.finish());
            }
        }
    }
}
