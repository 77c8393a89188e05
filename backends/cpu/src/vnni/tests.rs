//! The kernels over the scalar model of the operations, against the portable ones; and on the processor where it has them.

use super::ops::Scalar;
use super::{ByteBlock, SplitBlock, blocked, panels, product};
use crate::activations::{BLOCK, WideBlock, quantize_block, quantize_byte_block, split_block};
use crate::features::Features;
use crate::gemm::{PANEL_ROWS, PanelJob, scratch_bytes};
use crate::gemv::{GemvJob, portable};
use crate::memory::Scratch;
use crate::packed::stored_as;
use crate::packed::{GROUP_ROWS, decode, group_bytes};
use crate::table::{GemvKernel, PanelKernel};
use npuhal_models::WeightType;
use proptest::prelude::*;

/// Two groups of a type, random but for scales that are finite, and input rows.
struct Case {
    weight_type: WeightType,
    cols: usize,
    groups: Vec<u8>,
    split: Vec<SplitBlock>,
    wide: Vec<WideBlock>,
    byte: Vec<ByteBlock>,
}

const TOKENS: usize = 8;

impl Case {
    fn new(weight_type: WeightType, blocks: usize, extreme: bool, seed: u64) -> Self {
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        let cols = blocks * weight_type.block_len();
        let bytes = group_bytes(weight_type, weight_type.block_len());
        let mut groups: Vec<u8> = (0..2 * blocks * bytes)
            .map(|_| if extreme { [0xFF, 0, 0x80][random() as usize % 3] } else { random() as u8 })
            .collect();
        let halves = if decode::has_minimum(weight_type) { 16 } else { 8 };
        for block in groups.chunks_exact_mut(bytes) {
            for scale in block[..2 * halves].as_chunks_mut::<2>().0 {
                // From 2^-14 to about 2, either sign.
                *scale = ((random() as u16 & 0x8000) | (0x0400 + random() as u16 % 0x3C00)).to_le_bytes();
            }
        }
        let x: Vec<[f32; BLOCK]> = (0..TOKENS * cols / BLOCK)
            .map(|_| {
                std::array::from_fn(|_| match (extreme, random() % 3) {
                    (true, 0) => 1.0,
                    (true, _) => -1.0,
                    _ => random() as f32 / (1u64 << 30) as f32 - 1.0,
                })
            })
            .collect();
        let wide: Vec<WideBlock> = x.iter().map(quantize_block).collect();
        let split = wide.iter().map(split_block).collect();
        Self { weight_type, cols, groups, split, wide, byte: x.iter().map(quantize_byte_block).collect() }
    }

    /// Results of `rows` input rows from `first` on.
    fn gemv(&self, first: usize, rows: usize, kernel: GemvKernel) -> Vec<u32> {
        let (width, gap) = (2 * GROUP_ROWS, 3);
        let mut out = vec![f32::NAN; rows * (width + gap)];
        let first = first * self.cols / BLOCK;
        let job = GemvJob {
            weight_type: self.weight_type,
            groups: self.groups.as_ptr(),
            count: 2,
            cols: self.cols,
            rows,
            split: self.split[first..].as_ptr(),
            wide: self.wide[first..].as_ptr(),
            byte: self.byte[first..].as_ptr(),
            dense: std::ptr::null(),
            out: out.as_mut_ptr(),
            stride: width + gap,
        };
        // SAFETY: two groups, the input rows and sixteen results for each; the kernels are of this processor's instruction sets.
        unsafe { kernel(&job) };
        for row in out.chunks_exact(width + gap) {
            assert!(row[width..].iter().all(|x| x.is_nan()), "{}: written beside a row's results", self.weight_type);
        }
        out.chunks_exact(width + gap).flat_map(|row| row[..width].iter().map(|x| x.to_bits())).collect()
    }

    fn gemm(&self, kernel: PanelKernel) -> Vec<Vec<u32>> {
        let mut out = [f32::NAN; TOKENS * PANEL_ROWS];
        let mut scratch = Scratch::new();
        let scratch_bytes = scratch_bytes(self.cols, TOKENS);
        scratch.reserve::<u8>(scratch_bytes);
        let job = PanelJob {
            weight_type: self.weight_type,
            groups: self.groups.as_ptr(),
            group_bytes: self.groups.len() / 2,
            rows: PANEL_ROWS,
            cols: self.cols,
            tokens: TOKENS,
            wide: self.wide.as_ptr(),
            byte: self.byte.as_ptr(),
            dense: std::ptr::null(),
            out: out.as_mut_ptr(),
            stride: PANEL_ROWS,
            following: &[],
        };
        // SAFETY: two groups, six input rows and sixteen results for each; the kernels are of this processor's sets.
        unsafe { kernel(&job, scratch.get_mut(scratch_bytes)) };
        out.chunks_exact(PANEL_ROWS).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
    }

    /// The portable kernels' bits, by row, for inputs of 15 and of 8 bits.
    fn wanted(&self) -> [Vec<Vec<u32>>; 2] {
        let rows = |kernel| (0..TOKENS).map(|token| self.gemv(token, 1, kernel)).collect();
        [rows(portable::kernel(self.weight_type)), rows(portable::byte_kernel(self.weight_type))]
    }
}

fn types() -> impl Iterator<Item = WeightType> {
    WeightType::ALL.into_iter().filter(|&weight_type| blocked(weight_type) && stored_as(weight_type) == weight_type)
}

/// # Safety
/// That of the job.
unsafe fn split(job: &GemvJob) {
    // SAFETY: the caller's promise.
    unsafe { product::<Scalar, SplitBlock>(job, job.split) };
}

/// # Safety
/// That of the job.
unsafe fn bytes(job: &GemvJob) {
    // SAFETY: the caller's promise.
    unsafe { product::<Scalar, ByteBlock>(job, job.byte) };
}

/// # Safety
/// That of the job; the processor has AVX2.
unsafe fn word_panel(job: &PanelJob<'_>, scratch: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { panels::words::<Scalar>(job, scratch) };
}

/// # Safety
/// That of the job; the processor has AVX2.
unsafe fn byte_panel(job: &PanelJob<'_>, scratch: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { panels::bytes::<Scalar>(job, scratch) };
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 4 } else { 32 }))]

    #[test]
    fn the_scalar_model_gives_the_portable_bits(blocks in prop::sample::select(vec![1usize, 2, 3, 17]), extreme: bool, seed: u64) {
        for weight_type in types() {
            let case = Case::new(weight_type, blocks, extreme, seed);
            let [wanted, wanted_bytes] = case.wanted();
            for token in 0..TOKENS {
                prop_assert_eq!(&case.gemv(token, 1, split), &wanted[token], "{}", weight_type);
                prop_assert_eq!(&case.gemv(token, 1, bytes), &wanted_bytes[token], "{}, 8 bits", weight_type);
            }
            prop_assert_eq!(case.gemv(0, TOKENS, split), wanted.concat(), "{}: rows together", weight_type);
            prop_assert_eq!(case.gemv(0, TOKENS, bytes), wanted_bytes.concat(), "{}: rows together, 8 bits", weight_type);
            if Features::avx2().is_some() {
                prop_assert_eq!(case.gemm(word_panel), wanted, "{}: panels", weight_type);
                prop_assert_eq!(case.gemm(byte_panel), wanted_bytes, "{}: panels, 8 bits", weight_type);
            }
        }
    }

    #[test]
    fn the_processors_instructions_give_the_portable_bits(blocks in prop::sample::select(vec![1usize, 2, 3, 17]), extreme: bool, seed: u64) {
        for features in Features::available() {
            let table = features.table();
            for weight_type in types() {
                let case = Case::new(weight_type, blocks, extreme, seed);
                let [wanted, wanted_bytes] = case.wanted();
                for token in 0..TOKENS {
                    prop_assert_eq!(&case.gemv(token, 1, (table.gemv)(weight_type)), &wanted[token]);
                    prop_assert_eq!(&case.gemv(token, 1, (table.byte_gemv)(weight_type)), &wanted_bytes[token]);
                }
                prop_assert_eq!(case.gemv(0, TOKENS, (table.gemv)(weight_type)), wanted.concat());
                prop_assert_eq!(case.gemv(0, TOKENS, (table.byte_gemv)(weight_type)), wanted_bytes.concat());
                prop_assert_eq!(case.gemm((table.panel)(weight_type)), wanted);
                prop_assert_eq!(case.gemm((table.byte_panel)(weight_type)), wanted_bytes);
            }
        }
    }
}
