//! Panels of two groups times up to three input rows: twelve sums, two weight vectors and one broadcast. The panels are those
//! of [`crate::gemm`], unpacked by the AVX2 code.

use super::{Ops, both};
use crate::activations::{BLOCK, ByteBlock, WideBlock};
use crate::gemm::avx2::{Sums, Tiles, unpack_words};
use crate::gemm::bytes::{FIRST_ROW, SECOND_ROW, unpack_bytes};
use crate::gemm::unpack::{MINIMA, SCALES};
use crate::gemm::{BYTE_PANEL_BLOCK_BYTES, PANEL_BLOCK_BYTES, PANEL_ROWS, PanelJob};
use crate::packed::decode::{has_minimum, sums_halves};
use npuhal_models::WeightType;

/// Inputs of 15 bits.
///
/// # Safety
/// The processor has AVX2 and the instructions of `O`; the job's pointers cover the groups of its rows, its input rows and its
/// results; `scratch` holds a panel block for every 32 input features.
#[inline(always)]
pub(super) unsafe fn words<O: Ops>(job: &PanelJob<'_>, scratch: &mut [u8]) {
    // SAFETY: the caller's promise.
    let panel = unsafe { unpack_words(job, scratch) };
    let blocks = job.cols / BLOCK;
    let minimum = has_minimum(job.weight_type);
    let mut tiles = Tiles::new();
    while let Some((token, count)) = tiles.next(job) {
        // SAFETY: `count` input rows from `token` on; the panel is unpacked.
        unsafe {
            let input = job.wide.add(token * blocks);
            match count {
                3 => word_tile::<O, 3>(panel, input, blocks, minimum, &mut tiles.sums),
                2 => word_tile::<O, 2>(panel, input, blocks, minimum, &mut tiles.sums),
                _ => word_tile::<O, 1>(panel, input, blocks, minimum, &mut tiles.sums),
            }
        }
        tiles.store(job);
    }
}

/// # Safety
/// As [`words`]; `panel` has `blocks` blocks, `input` that many for each of `T` rows.
#[inline(always)]
unsafe fn word_tile<O: Ops, const T: usize>(
    panel: *const u8,
    input: *const WideBlock,
    blocks: usize,
    minimum: bool,
    out: &mut Sums,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[O::splat_float(0.0); 2]; T];
        for block in 0..blocks {
            let at = panel.add(block * PANEL_BLOCK_BYTES);
            let mut sums = [[O::splat(0); 2]; T];
            for step in 0..16 {
                let weights = [O::load(at.add(64 * step)), O::load(at.add(64 * step + 32))];
                for t in 0..T {
                    let v = &(*input.add(t * blocks + block)).v;
                    let pair = O::splat(bytemuck::cast([v[2 * step], v[2 * step + 1]]));
                    for group in 0..2 {
                        sums[t][group] = O::dot_words(sums[t][group], weights[group], pair);
                    }
                }
            }
            for t in 0..T {
                let x = &*input.add(t * blocks + block);
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
        store::<O, T>(acc, out);
    }
}

/// Inputs of 8 bits.
///
/// # Safety
/// As [`words`].
#[inline(always)]
pub(super) unsafe fn bytes<O: Ops>(job: &PanelJob<'_>, scratch: &mut [u8]) {
    // SAFETY: the caller's promise.
    let panel = unsafe { unpack_bytes(job, scratch) };
    let blocks = job.cols / BLOCK;
    let mut tiles = Tiles::new();
    while let Some((token, count)) = tiles.next(job) {
        // SAFETY: `count` input rows from `token` on; the panel is unpacked.
        unsafe {
            let input = job.byte.add(token * blocks);
            match count {
                3 => byte_tile::<O, 3>(job.weight_type, panel, input, blocks, &mut tiles.sums),
                2 => byte_tile::<O, 2>(job.weight_type, panel, input, blocks, &mut tiles.sums),
                _ => byte_tile::<O, 1>(job.weight_type, panel, input, blocks, &mut tiles.sums),
            }
        }
        tiles.store(job);
    }
}

/// # Safety
/// As [`bytes`]; `panel` has `blocks` blocks, `input` that many for each of `T` rows.
#[inline(always)]
unsafe fn byte_tile<O: Ops, const T: usize>(
    weight_type: WeightType,
    panel: *const u8,
    input: *const ByteBlock,
    blocks: usize,
    out: &mut Sums,
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
        let mut acc = [[O::splat_float(0.0); 2]; T];
        for block in 0..blocks {
            let at = panel.add(block * BYTE_PANEL_BLOCK_BYTES);
            let x = |t: usize| &*input.add(t * blocks + block);
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
        store::<O, T>(acc, out);
    }
}

/// # Safety
/// The processor has the instructions of `O`.
#[inline(always)]
unsafe fn store<O: Ops, const T: usize>(acc: [[O::Float; 2]; T], out: &mut Sums) {
    for (acc, out) in acc.into_iter().zip(out.0.chunks_exact_mut(PANEL_ROWS)) {
        for (acc, out) in acc.into_iter().zip(out.chunks_exact_mut(8)) {
            // SAFETY: eight results.
            unsafe { O::store(acc, out.as_mut_ptr()) };
        }
    }
}
