//! GEMV without special instructions; for quantized types the scalar model of the vector kernels.
#![allow(unsafe_code, reason = "jobs carry raw pointers to parts of larger buffers")]

use super::GemvJob;
use crate::activations::{BLOCK, ByteBlock, WideBlock};
use crate::packed::decode::{DecodedBlock, block, has_minimum, is_quantized, sums_halves};
use crate::packed::{GROUP_ROWS, group_bytes};
use crate::table::GemvKernel;
use npuhal_core::dtype::{bf16_value, f16_value};
use npuhal_models::WeightType;

pub(crate) fn kernel(weight_type: WeightType) -> GemvKernel {
    if is_quantized(weight_type) {
        // SAFETY: that of the kernel.
        |job| unsafe { job.each_row(quantized) }
    } else {
        // SAFETY: that of the kernel.
        |job| unsafe { job.each_row(plain) }
    }
}

pub(crate) fn byte_kernel(_: WeightType) -> GemvKernel {
    // SAFETY: that of the kernel.
    |job| unsafe { job.each_row(bytes) }
}

/// # Safety
/// The job's pointers cover its groups, its input row and eight results a group.
unsafe fn quantized(job: &GemvJob) {
    let blocks = job.cols / BLOCK;
    let bytes = group_bytes(job.weight_type, job.cols);
    // SAFETY: the caller's promise; one of the two forms is there.
    let input: Vec<WideBlock> = unsafe {
        if job.weight_type == WeightType::Q8_0 {
            std::slice::from_raw_parts(job.wide, blocks).to_vec()
        } else {
            std::slice::from_raw_parts(job.split, blocks).iter().map(join).collect()
        }
    };
    let mut decoded = DecodedBlock::ZERO;
    for index in 0..job.count {
        // SAFETY: group `index` and its eight results.
        let (group, out) = unsafe {
            let group = std::slice::from_raw_parts(job.groups.add(index * bytes), bytes);
            (group, &mut *job.out.add(index * GROUP_ROWS).cast::<[f32; GROUP_ROWS]>())
        };
        *out = [0.0; GROUP_ROWS];
        for (at, input) in input.iter().enumerate() {
            block(job.weight_type, group, at, &mut decoded);
            accumulate(job.weight_type, &decoded, input, out);
        }
    }
}

/// The codes of a split block, as 16-bit codes.
fn join(split: &crate::activations::SplitBlock) -> WideBlock {
    let v = std::array::from_fn(|k| 128 * i16::from(split.hi[k]) + i16::from(split.lo[k]));
    WideBlock { v, d: split.d, s: split.s, reserved: [0.0; 2] }
}

/// Adds one block of a group to its eight sums: the order and rounding that every kernel keeps.
#[inline]
pub(crate) fn accumulate(
    weight_type: WeightType,
    weights: &DecodedBlock,
    input: &WideBlock,
    sums: &mut [f32; GROUP_ROWS],
) {
    let has_minimum = has_minimum(weight_type);
    for lane in 0..GROUP_ROWS {
        let (first, second) = weights.codes[lane].split_at(BLOCK / 2);
        let (x, y) = input.v.split_at(BLOCK / 2);
        // Exact: at most 32 × 4096 × 16256.
        let dot =
            dot(first, x) * i32::from(weights.factor[0][lane]) + dot(second, y) * i32::from(weights.factor[1][lane]);
        sums[lane] = (dot as f32).mul_add(weights.scale[lane] * input.d, sums[lane]);
        if has_minimum {
            sums[lane] = weights.minimum[lane].mul_add(input.s, sums[lane]);
        }
    }
}

/// As [`accumulate`], of 8-bit inputs. A sub-block's integer scale times the block's scale is exact in f32.
#[inline]
pub(crate) fn accumulate_bytes(
    weight_type: WeightType,
    weights: &DecodedBlock,
    input: &ByteBlock,
    sums: &mut [f32; GROUP_ROWS],
) {
    let q = input.q.map(i16::from);
    let (x, y) = q.split_at(BLOCK / 2);
    for lane in 0..GROUP_ROWS {
        let (first, second) = weights.codes[lane].split_at(BLOCK / 2);
        let dots = [dot(first, x), dot(second, y)];
        let scale = |half: usize| weights.scale[lane] * f32::from(weights.factor[half][lane]) * input.d;
        if sums_halves(weight_type) {
            for (half, dot) in dots.into_iter().enumerate() {
                sums[lane] = (dot as f32).mul_add(scale(half), sums[lane]);
            }
        } else {
            sums[lane] = ((dots[0] + dots[1]) as f32).mul_add(scale(0), sums[lane]);
        }
        if has_minimum(weight_type) {
            sums[lane] = weights.minimum[lane].mul_add(input.s, sums[lane]);
        }
    }
}

/// Of 16 codes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn dot(codes: &[i16], input: &[i16]) -> i32 {
    use std::arch::x86_64::*;
    assert!(codes.len() == BLOCK / 2 && input.len() == BLOCK / 2);
    // SAFETY: SSE2 is part of the architecture's baseline; each load is eight of the 16 elements.
    unsafe {
        let product = |at: usize| {
            let codes = _mm_loadu_si128(codes.as_ptr().add(at).cast());
            _mm_madd_epi16(codes, _mm_loadu_si128(input.as_ptr().add(at).cast()))
        };
        let sum = _mm_add_epi32(product(0), product(8));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01_00_11_10));
        _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10_11_00_01)))
    }
}

/// Of 16 codes.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn dot(codes: &[i16], input: &[i16]) -> i32 {
    codes.iter().zip(input).map(|(&code, &x)| i32::from(code) * i32::from(x)).sum()
}

/// # Safety
/// As [`quantized`], with byte blocks.
unsafe fn bytes(job: &GemvJob) {
    let blocks = job.cols / BLOCK;
    let bytes = group_bytes(job.weight_type, job.cols);
    // SAFETY: the caller's promise.
    let input = unsafe { std::slice::from_raw_parts(job.byte, blocks) };
    let mut decoded = DecodedBlock::ZERO;
    for index in 0..job.count {
        // SAFETY: group `index` and its eight results.
        let (group, out) = unsafe {
            let group = std::slice::from_raw_parts(job.groups.add(index * bytes), bytes);
            (group, &mut *job.out.add(index * GROUP_ROWS).cast::<[f32; GROUP_ROWS]>())
        };
        *out = [0.0; GROUP_ROWS];
        for (at, input) in input.iter().enumerate() {
            block(job.weight_type, group, at, &mut decoded);
            accumulate_bytes(job.weight_type, &decoded, input, out);
        }
    }
}

/// # Safety
/// As [`quantized`].
unsafe fn plain(job: &GemvJob) {
    let bytes = group_bytes(job.weight_type, job.cols);
    // SAFETY: the caller's promise.
    let input = unsafe { std::slice::from_raw_parts(job.dense, job.cols) };
    for index in 0..job.count {
        // SAFETY: group `index` and its eight results.
        let (group, out) = unsafe {
            let group = std::slice::from_raw_parts(job.groups.add(index * bytes), bytes);
            (group, &mut *job.out.add(index * GROUP_ROWS).cast::<[f32; GROUP_ROWS]>())
        };
        *out = plain_group(job.weight_type, group, input);
    }
}

/// Eight rows of plain floats times `input`: four chains over k modulo 4, added pairwise at the end.
pub(crate) fn plain_group(weight_type: WeightType, group: &[u8], input: &[f32]) -> [f32; GROUP_ROWS] {
    match weight_type {
        WeightType::F16 => plain_sums(group, input, |at: &[u8; 2]| f16_value(u16::from_le_bytes(*at))),
        WeightType::Bf16 => plain_sums(group, input, |at: &[u8; 2]| bf16_value(u16::from_le_bytes(*at))),
        _ => plain_sums(group, input, |at: &[u8; 4]| f32::from_le_bytes(*at)),
    }
}

#[inline(always)]
fn plain_sums<const BYTES: usize>(
    group: &[u8],
    input: &[f32],
    value: impl Fn(&[u8; BYTES]) -> f32,
) -> [f32; GROUP_ROWS] {
    let mut chains = [[0.0f32; GROUP_ROWS]; 4];
    let elements = group.as_chunks::<BYTES>().0;
    for (k, (weights, x)) in elements.chunks_exact(GROUP_ROWS).zip(input).enumerate() {
        for (sum, weight) in chains[k % 4].iter_mut().zip(weights) {
            *sum += value(weight) * x;
        }
    }
    std::array::from_fn(|lane| (chains[0][lane] + chains[1][lane]) + (chains[2][lane] + chains[3][lane]))
}
