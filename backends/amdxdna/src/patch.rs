//! Inserting addresses into code, and finding out what that changed.

use crate::driver::CACHE_LINE_BYTES;
use crate::program::{Patch, Schema};
use std::ops::Range;

/// Offset at which the array sees host memory.
const HOST_WINDOW: u64 = 0x8000_0000;

/// A value that a place in the code cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PatchError {
    /// The place lies outside its section.
    #[error("a patch of {len} bytes at {offset:#x} of a section of {section} bytes")]
    OutOfSection { offset: u32, len: usize, section: usize },
    /// The array addresses 48 bits.
    #[error("address {address:#x} at {offset:#x} does not fit 48 bits")]
    AddressTooWide { offset: u32, address: u64 },
    /// The array addresses whole words.
    #[error("address {address:#x} at {offset:#x} is not a multiple of 4")]
    Misaligned { offset: u32, address: u64 },
}

/// Writes `value` into `image` at `patch`. The image holds the template's words at that place: patching reads them.
pub(crate) fn apply(image: &mut [u8], patch: &Patch, value: u64) -> Result<(), PatchError> {
    let (offset, section) = (patch.offset, image.len());
    let len = schema_bytes(patch.schema);
    let end = (offset as usize).checked_add(len).filter(|end| *end <= section);
    let end = end.ok_or(PatchError::OutOfSection { offset, len, section })?;
    let place = &mut image[offset as usize..end];
    match patch.schema {
        Schema::Scalar32 { mask } => {
            if mask != 0 {
                let word = (word_at(place, 0) & !mask) | (value as u32 & mask);
                put_word(place, 0, word);
            }
        }
        Schema::Address64 => place.copy_from_slice(&value.to_le_bytes()),
        Schema::ShimDma48 => insert_48(place, 1, 0xFFFF, patch, value)?,
        Schema::ControlPacket48 => insert_48(place, 2, 0x0FFF, patch, value)?,
    }
    Ok(())
}

/// Bytes that a schema touches, from the place's start.
pub(crate) const fn schema_bytes(schema: Schema) -> usize {
    match schema {
        Schema::Scalar32 { .. } => 4,
        Schema::Address64 => 8,
        Schema::ShimDma48 => 12,
        Schema::ControlPacket48 => 16,
    }
}

/// Low word at index `low`, high half-word in the word behind it, of which `high_mask` counts.
fn insert_48(place: &mut [u8], low: usize, high_mask: u32, patch: &Patch, value: u64) -> Result<(), PatchError> {
    let offset = patch.offset;
    let (low_word, high_word) = (word_at(place, low), word_at(place, low + 1));
    let base = (u64::from(high_word & high_mask) << 32) | u64::from(low_word);
    let sum = [u64::from(patch.addend), HOST_WINDOW, value].into_iter().try_fold(base, u64::checked_add);
    let address = sum.filter(|address| *address < 1 << 48);
    let address = address.ok_or(PatchError::AddressTooWide { offset, address: value })?;
    if !value.is_multiple_of(4) {
        return Err(PatchError::Misaligned { offset, address: value });
    }
    put_word(place, low, address as u32 & !3);
    put_word(place, low + 1, (high_word & 0xFFFF_0000) | (address >> 32) as u32);
    Ok(())
}

fn word_at(bytes: &[u8], index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn put_word(bytes: &mut [u8], index: usize, word: u32) {
    bytes[4 * index..4 * index + 4].copy_from_slice(&word.to_le_bytes());
}

/// Ranges of `new` that differ from `old`, in whole words (the last may be shorter), neighbours joined. Everything that
/// `new` has beyond the end of `old` differs.
pub(crate) fn differences(old: &[u8], new: &[u8]) -> Vec<Range<usize>> {
    const STEP: usize = 64;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let common = old.len().min(new.len());
    for start in (0..common).step_by(STEP) {
        let end = (start + STEP).min(common);
        if old[start..end] == new[start..end] {
            continue;
        }
        for at in (start..end).step_by(4) {
            let stop = (at + 4).min(end);
            if old[at..stop] != new[at..stop] {
                join(&mut ranges, at..stop);
            }
        }
    }
    if new.len() > common {
        join(&mut ranges, common..new.len());
    }
    ranges
}

fn join(ranges: &mut Vec<Range<usize>>, next: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => ranges.push(next),
    }
}

/// The cache lines that ascending `ranges` touch, clipped to `len`, neighbours joined.
pub(crate) fn lines(ranges: &[Range<usize>], len: usize) -> Vec<Range<u64>> {
    let line = CACHE_LINE_BYTES;
    let mut lines: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let start = range.start as u64 / line * line;
        let end = (range.end as u64).next_multiple_of(line).min(len as u64);
        match lines.last_mut() {
            Some(last) if last.end >= start => last.end = last.end.max(end),
            _ => lines.push(start..end),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{PatchError, apply, differences, lines};
    use crate::program::{Patch, Schema, Source};
    use proptest::prelude::*;

    fn patch(schema: Schema, addend: u32) -> Patch {
        Patch { offset: 4, schema, addend, source: Source::Argument(0) }
    }

    fn image(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn shim_addresses_add_template_addend_and_window() {
        let mut code = image(&[9, 1, 0x10, 0x1234_0001, 5]);
        apply(&mut code, &patch(Schema::ShimDma48, 0x8000_0004), 0x7E11_4745_7000).unwrap();
        // 0x1_0000_0010 + 0x7E11_4745_7000 + 0x8000_0004 + 0x8000_0000
        assert_eq!(code, image(&[9, 1, 0x4745_7014, 0x1234_7E13, 5]));
    }

    #[test]
    fn control_packet_addresses_ignore_the_top_of_the_template() {
        let mut code = image(&[9, 1, 2, 0xFFFF_FFF8, 0xABCD_5001, 5]);
        apply(&mut code, &patch(Schema::ControlPacket48, 0), 0x7E13_27FC_5010).unwrap();
        // 0x1_FFFF_FFF8 + 0x7E13_27FC_5010 + 0x8000_0000
        assert_eq!(code, image(&[9, 1, 2, 0xA7FC_5008, 0xABCD_7E15, 5]));
    }

    #[test]
    fn scalars_and_plain_addresses() {
        let mut code = image(&[9, 0xFFFF_0000, 7]);
        apply(&mut code, &patch(Schema::Scalar32 { mask: 0x0001_FFFF }, 99), 0x0000_1234).unwrap();
        assert_eq!(code, image(&[9, 0xFFFE_1234, 7]));
        apply(&mut code, &patch(Schema::Scalar32 { mask: 0 }, 0), u64::MAX).unwrap();
        assert_eq!(code, image(&[9, 0xFFFE_1234, 7]));
        apply(&mut code, &patch(Schema::Address64, 0), 0x0403_8000).unwrap();
        assert_eq!(code, image(&[9, 0x0403_8000, 0]));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let mut code = image(&[0; 4]);
        let wide = apply(&mut code, &patch(Schema::ShimDma48, 0), 0xFFFF_FFFF_0000);
        assert!(matches!(wide, Err(PatchError::AddressTooWide { .. })));
        let odd = apply(&mut code, &patch(Schema::ShimDma48, 0), 0x1002);
        assert!(matches!(odd, Err(PatchError::Misaligned { .. })));
        let outside = apply(&mut code, &patch(Schema::ControlPacket48, 0), 0x1000);
        assert!(matches!(outside, Err(PatchError::OutOfSection { .. })));
    }

    #[test]
    fn differences_are_words_and_lines_are_whole() {
        let old = vec![0_u8; 200];
        let mut new = vec![0_u8; 210];
        (new[5], new[8], new[70]) = (1, 1, 1);
        assert_eq!(differences(&old, &new), [4..12, 68..72, 200..210]);
        assert_eq!(lines(&differences(&old, &new), 210), vec![0..128, 192..210]);
        assert!(differences(&old, &old).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn writing_the_differences_makes_the_images_equal(
            old in proptest::collection::vec(0_u8..2, 0..300),
            new in proptest::collection::vec(0_u8..2, 0..300),
        ) {
            let mut image = old.clone();
            image.resize(new.len().max(old.len()), 0xEE);
            for range in differences(&old, &new) {
                image[range.clone()].copy_from_slice(&new[range]);
            }
            prop_assert_eq!(&image[..new.len()], &new[..]);
        }
    }
}
