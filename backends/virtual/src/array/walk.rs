//! Addresses of a shim descriptor, in order.

use npuhal_amdxdna::format::registers::ShimBd;

const WORD: u64 = 4;

/// The words of a transfer, as runs of consecutive bytes.
#[derive(Debug, Clone)]
pub(super) struct Walk {
    base: u64,
    left_words: u64,
    /// Position in the three dimensions.
    at: [u64; 3],
    /// Words or rows before the next dimension advances; 0 is unbounded.
    wrap: [u64; 2],
    step: [u64; 3],
}

impl Walk {
    /// The transfer that `descriptor` starts now.
    pub(super) fn new(descriptor: &ShimBd) -> Self {
        let iteration = descriptor.iteration;
        let offset_words = u64::from(iteration.step) * u64::from(iteration.current);
        Self {
            base: descriptor.address + WORD * offset_words,
            left_words: descriptor.length_words.into(),
            at: [0; 3],
            wrap: [descriptor.d0.wrap.into(), descriptor.d1.wrap.into()],
            step: [descriptor.d0.step.into(), descriptor.d1.step.into(), descriptor.d2_step.into()],
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.left_words == 0
    }

    /// The next consecutive bytes, at most `limit_bytes`: address and length. `None` at the end, or for less than a
    /// word.
    pub(super) fn next_run(&mut self, limit_bytes: usize) -> Option<(u64, usize)> {
        let limit_words = (limit_bytes as u64 / WORD).min(self.left_words);
        if limit_words == 0 {
            return None;
        }
        let position: u64 = self.at.iter().zip(self.step).map(|(at, step)| at * step).sum();
        let row_left = if self.wrap[0] == 0 { u64::MAX } else { self.wrap[0] - self.at[0] };
        let words = if self.step[0] == 1 { row_left.min(limit_words) } else { 1 };
        self.left_words -= words;
        self.at[0] += words;
        if self.at[0] == self.wrap[0] {
            self.at[0] = 0;
            self.at[1] += 1;
            if self.at[1] == self.wrap[1] {
                self.at[1] = 0;
                self.at[2] += 1;
            }
        }
        // Addresses have 48 bits and a step 20: the sum stays below 2^64 for every length of 32 bits.
        Some((self.base.wrapping_add(position.wrapping_mul(WORD)), (words * WORD) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::Walk;
    use npuhal_amdxdna::format::registers::{Dimension, Iteration, ShimBd};
    use proptest::prelude::*;

    /// Word offsets by the published formula, one word at a time.
    fn reference(bd: &ShimBd) -> Vec<u64> {
        let (w0, w1) = (u64::from(bd.d0.wrap), u64::from(bd.d1.wrap));
        (0..u64::from(bd.length_words))
            .map(|n| {
                let (i0, rows) = if w0 == 0 { (n, 0) } else { (n % w0, n / w0) };
                let (i1, i2) = if w1 == 0 { (rows, 0) } else { (rows % w1, rows / w1) };
                let inner = i0 * u64::from(bd.d0.step) + i1 * u64::from(bd.d1.step) + i2 * u64::from(bd.d2_step);
                inner + u64::from(bd.iteration.current) * u64::from(bd.iteration.step)
            })
            .collect()
    }

    fn walked(bd: &ShimBd, limit: usize) -> Vec<u64> {
        let mut walk = Walk::new(bd);
        let mut words = Vec::new();
        while let Some((address, len)) = walk.next_run(limit) {
            assert!(len <= limit);
            words.extend((0..len as u64 / 4).map(|i| (address - bd.address) / 4 + i));
        }
        assert!(walk.is_done());
        words
    }

    #[test]
    fn a_linear_transfer_is_one_run() {
        let bd = ShimBd { length_words: 1024, address: 0x8000_1000, ..ShimBd::default() };
        let mut walk = Walk::new(&bd);
        assert_eq!(walk.next_run(1 << 20), Some((0x8000_1000, 4096)));
        assert_eq!(walk.next_run(1 << 20), None);
    }

    proptest! {
        #[test]
        fn runs_are_the_published_addresses(
            length_words in 0_u32..300, w0 in 0_u32..20, w1 in 0_u32..6,
            s0 in 1_u32..4, s1 in 1_u32..40, s2 in 1_u32..100, current in 0_u32..4, limit in 4_usize..200,
        ) {
            let bd = ShimBd {
                length_words,
                address: 0x8000_0000,
                d0: Dimension { wrap: w0, step: s0 },
                d1: Dimension { wrap: w1, step: s1 },
                d2_step: s2,
                iteration: Iteration { current, wrap: 4, step: 7 },
                ..ShimBd::default()
            };
            prop_assert_eq!(walked(&bd, limit), reference(&bd));
        }
    }
}
