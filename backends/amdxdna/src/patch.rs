//! What binding another kernel or argument changes in device memory.

use crate::driver::CACHE_LINE_BYTES;
use std::ops::Range;

/// Ranges of `new` that differ from `old`, in whole words (the last may be shorter), neighbours joined. Everything that
/// `new` has beyond the end of `old` differs.
pub(crate) fn differences(old: &[u8], new: &[u8]) -> Vec<Range<usize>> {
    // Most of two images is equal: large steps skip that quickly.
    const STEP: usize = 1024;
    const LINE: usize = CACHE_LINE_BYTES as usize;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let common = old.len().min(new.len());
    for (start, end) in steps(0..common, STEP) {
        if old[start..end] == new[start..end] {
            continue;
        }
        for (start, end) in steps(start..end, LINE) {
            if old[start..end] == new[start..end] {
                continue;
            }
            for (start, end) in steps(start..end, 4) {
                if old[start..end] != new[start..end] {
                    join(&mut ranges, start..end);
                }
            }
        }
    }
    if new.len() > common {
        join(&mut ranges, common..new.len());
    }
    ranges
}

/// Starts and ends of the pieces of `range`, `step` long but for the last.
fn steps(range: Range<usize>, step: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = range.end;
    range.step_by(step).map(move |start| (start, (start + step).min(end)))
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
    let mut lines: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
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
    use super::{differences, lines};
    use proptest::prelude::*;

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
