//! Panels of two groups times up to three input rows: twelve sums, two weight vectors and one broadcast. The panels are those
//! of [`crate::gemm`], unpacked by the AVX2 code.

use super::{Ops, both};
use crate::activations::{ByteBlock, WideBlock};
use crate::gemm::avx2::unpack_words;
use crate::gemm::bytes::{FIRST_ROW, SECOND_ROW, unpack_bytes};
use crate::gemm::tiles::run_tiles;
use crate::gemm::unpack::{MINIMA, SCALES};
use crate::gemm::{BYTE_PANEL_BLOCK_BYTES, PANEL_BLOCK_BYTES, PANEL_ROWS, PanelJob};
use crate::packed::GROUP_ROWS;
use crate::packed::decode::{has_minimum, sums_halves};
use npuhal_models::WeightType;

/// Inputs of 15 bits.
///
/// # Safety
/// The processor has AVX2 and the instructions of `O`; the job's pointers cover the groups of its rows, its input rows and its
/// results.
#[inline(always)]
pub(super) unsafe fn words<O: Ops>(job: &PanelJob<'_>, scratch: &mut [u8]) {
    let minimum = has_minimum(job.weight_type);
    run_tiles!(job, scratch, wide, unpack_words, [word_tile::<O, 3>, word_tile::<O, 2>, word_tile::<O, 1>], minimum);
}

/// # Safety
/// As [`words`]; `panel` has `blocks` blocks, `input` that many for each of `T` rows, which lie `stride` blocks apart; `sums` has
/// sixteen for each, which it goes on with.
#[inline(always)]
unsafe fn word_tile<O: Ops, const T: usize>(
    panel: *const u8,
    input: *const WideBlock,
    stride: usize,
    blocks: usize,
    sums_of_rows: *mut f32,
    minimum: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = load::<O, T>(sums_of_rows);
        for block in 0..blocks {
            let at = panel.add(block * PANEL_BLOCK_BYTES);
            let mut sums = [[O::splat(0); 2]; T];
            for step in 0..16 {
                let weights = [O::load(at.add(64 * step)), O::load(at.add(64 * step + 32))];
                for t in 0..T {
                    let v = &(*input.add(t * stride + block)).v;
                    let pair = O::splat(bytemuck::cast([v[2 * step], v[2 * step + 1]]));
                    for group in 0..2 {
                        sums[t][group] = O::dot_words(sums[t][group], weights[group], pair);
                    }
                }
            }
            for t in 0..T {
                let x = &*input.add(t * stride + block);
                for group in 0..2 {
                    let scale = O::mul(O::floats(at.add(SCALES + 32 * group)), O::splat_float(x.d));
                    acc[t][group] = O::mul_add(O::to_float(sums[t][group]), scale, acc[t][group]);
                    if minimum {
                        let minimum = O::floats(at.add(MINIMA + 32 * group));
                        acc[t][group] = O::mul_add(minimum, O::splat_float(x.s), acc[t][group]);
                    }
                }
            }
        }
        store::<O, T>(acc, sums_of_rows);
    }
}

/// Inputs of 8 bits.
///
/// # Safety
/// As [`words`].
#[inline(always)]
pub(super) unsafe fn bytes<O: Ops>(job: &PanelJob<'_>, scratch: &mut [u8]) {
    let weight_type = job.weight_type;
    run_tiles!(
        job,
        scratch,
        byte,
        unpack_bytes,
        [byte_tile::<O, 3>, byte_tile::<O, 2>, byte_tile::<O, 1>],
        weight_type
    );
}

/// # Safety
/// As [`word_tile`].
#[inline(always)]
unsafe fn byte_tile<O: Ops, const T: usize>(
    panel: *const u8,
    input: *const ByteBlock,
    stride: usize,
    blocks: usize,
    sums_of_rows: *mut f32,
    weight_type: WeightType,
) {
    let centre = match weight_type {
        WeightType::Q4_0 => 8,
        WeightType::Q5_0 => 16,
        WeightType::Q6K => 32,
        _ => 0,
    };
    let (minimum, halves) = (has_minimum(weight_type), sums_halves(weight_type));
    let second_scale = if minimum { FIRST_ROW } else { SECOND_ROW };
    let start = |x: &ByteBlock, half: usize| {
        if halves { both(x.centre32[half]) * centre / 32 } else { both(x.centre16) * centre / 16 }
    };
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = load::<O, T>(sums_of_rows);
        for block in 0..blocks {
            let at = panel.add(block * BYTE_PANEL_BLOCK_BYTES);
            let x = |t: usize| &*input.add(t * stride + block);
            let mut sums = [[O::splat(0); 2]; T];
            for t in 0..T {
                sums[t] = [O::splat(start(x(t), 0)); 2];
            }
            for half in 0..2 {
                for step in 4 * half..4 * half + 4 {
                    let weights = [O::load(at.add(64 * step)), O::load(at.add(64 * step + 32))];
                    for t in 0..T {
                        let words: &[i32; 8] = &bytemuck::cast(x(t).q);
                        let word = O::splat(words[step]);
                        for group in 0..2 {
                            sums[t][group] = O::dot_bytes(sums[t][group], weights[group], word);
                        }
                    }
                }
                if halves || half == 1 {
                    let row = if halves && half == 1 { second_scale } else { FIRST_ROW };
                    for t in 0..T {
                        for group in 0..2 {
                            let scale = O::mul(O::floats(at.add(row + 32 * group)), O::splat_float(x(t).d));
                            acc[t][group] = O::mul_add(O::to_float(sums[t][group]), scale, acc[t][group]);
                            sums[t][group] = O::splat(start(x(t), 1));
                        }
                    }
                }
            }
            if minimum {
                for t in 0..T {
                    for group in 0..2 {
                        let minimum = O::floats(at.add(SECOND_ROW + 32 * group));
                        acc[t][group] = O::mul_add(minimum, O::splat_float(x(t).s), acc[t][group]);
                    }
                }
            }
        }
        store::<O, T>(acc, sums_of_rows);
    }
}

/// # Safety
/// The processor has the instructions of `O`; `sums` has sixteen for each of `T` rows.
#[inline(always)]
unsafe fn load<O: Ops, const T: usize>(sums: *const f32) -> [[O::Float; 2]; T] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[O::splat_float(0.0); 2]; T];
        for t in 0..T {
            for group in 0..2 {
                acc[t][group] = O::floats(sums.add(t * PANEL_ROWS + group * GROUP_ROWS).cast());
            }
        }
        acc
    }
}

/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn store<O: Ops, const T: usize>(acc: [[O::Float; 2]; T], sums: *mut f32) {
    for t in 0..T {
        for group in 0..2 {
            // SAFETY: eight sums of a row.
            unsafe { O::store(acc[t][group], sums.add(t * PANEL_ROWS + group * GROUP_ROWS)) };
        }
    }
}
