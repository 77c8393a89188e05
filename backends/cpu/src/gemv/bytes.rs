//! GEMV with inputs of 8 bits, for AVX2, FMA and F16C.
//!
//! As [`super::avx2`], with one part of the input instead of two. What the 16-bit sums of `maddubs` reach: eight steps of
//! 4-bit codes 30480; 5-bit codes centred at 16, or four steps of 6-bit codes centred at 32, 32512 (sums may wrap on the way,
//! the final value fits); uncentred 5-bit codes take two sums of four steps, 31496 each.
#![allow(unsafe_code, reason = "vector loads through the pointers of a job")]

use super::avx2::{fives, fives_k, half_nibbles, halves, k_scales, minima, nibbles, pair, product, sixes};
use super::{GemvJob, MOST_ROWS, ask_ahead, portable};
use crate::activations::{BLOCK, ByteBlock};
use crate::packed::GROUP_ROWS;
use crate::table::GemvKernel;
use npuhal_models::WeightType;
use std::arch::x86_64::*;

pub(crate) fn byte_kernel(weight_type: WeightType) -> GemvKernel {
    match weight_type {
        WeightType::Q4_0 => q4_0,
        WeightType::Q4_1 => q4_1,
        WeightType::Q5_0 => q5_0,
        WeightType::Q5_1 => q5_1,
        WeightType::Q4K => q4_k,
        WeightType::Q5K => q5_k,
        WeightType::Q6K => q6_k,
        _ => portable::byte_kernel(weight_type),
    }
}

/// `start + Σ w[j] · q[first + j]` in 16 bits.
macro_rules! chain {
    ($start:expr, $q:expr, $first:literal, $($w:expr),+) => {{
        let mut sum = $start;
        let words = $q.as_ptr().cast::<i32>();
        let mut index = $first;
        $(
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16($w, _mm256_set1_epi32(words.add(index).read_unaligned())));
            index += 1;
        )+
        let _ = index;
        sum
    }};
}

/// `acc + sum × (d × d_input)`, of sums in 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate(acc: __m256, sum: __m256i, d: __m256, d_input: __m256) -> __m256 {
    let sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    _mm256_fmadd_ps(sum, _mm256_mul_ps(d, d_input), acc)
}

/// Unsigned scales of a sub-block times `d`, exact.
///
/// # Safety
/// Eight bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn scales(d: __m256, at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(at.cast()) };
    _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)))
}

/// As [`scales`], signed.
///
/// # Safety
/// Eight bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn signed_scales(d: __m256, at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(at.cast()) };
    _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)))
}

/// `Σ` of all steps in 16 bits.
macro_rules! whole {
    ($start:expr, $x:ident, $w:ident) => {
        chain!($start, $x.q, 0, $w[0], $w[1], $w[2], $w[3], $w[4], $w[5], $w[6], $w[7])
    };
}

product!(q4_0, byte: ByteBlock, 1 in 144, |at| (), |(), sub| (nibbles(at.add(16)), halves(at)), |(w, d), x, acc| {
    acc = accumulate(acc, whole!(pair(x.centre8), x, w), d, _mm256_set1_ps(x.d));
});

product!(
    q4_1, byte: ByteBlock, 1 in 160,
    |at| (), |(), sub| (nibbles(at.add(32)), halves(at), halves(at.add(16))), |(w, d, m), x, acc| {
        acc = accumulate(acc, whole!(_mm256_setzero_si256(), x, w), d, _mm256_set1_ps(x.d));
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(q5_0, byte: ByteBlock, 1 in 176, |at| (), |(), sub| (fives(at.add(16)), halves(at)), |(w, d), x, acc| {
    acc = accumulate(acc, whole!(pair(x.centre16), x, w), d, _mm256_set1_ps(x.d));
});

product!(
    q5_1, byte: ByteBlock, 1 in 192,
    |at| (), |(), sub| (fives(at.add(32)), halves(at), halves(at.add(16))), |(w, d, m), x, acc| {
        let (d_input, zero) = (_mm256_set1_ps(x.d), _mm256_setzero_si256());
        acc = accumulate(acc, chain!(zero, x.q, 0, w[0], w[1], w[2], w[3]), d, d_input);
        acc = accumulate(acc, chain!(zero, x.q, 4, w[4], w[5], w[6], w[7]), d, d_input);
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(
    q4_k, byte: ByteBlock, 8 in 1184, |at| k_scales(at),
    |(d, negated_dmin), sub| (
        half_nibbles(at.add(160 + 256 * (sub / 2)), sub % 2),
        scales(d, at.add(32 + 8 * sub)),
        minima(negated_dmin, at.add(96 + 8 * sub))
    ),
    |(w, d, m), x, acc| {
        acc = accumulate(acc, whole!(_mm256_setzero_si256(), x, w), d, _mm256_set1_ps(x.d));
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(
    q5_k, byte: ByteBlock, 8 in 1440, |at| k_scales(at),
    |(d, negated_dmin), sub| (
        fives_k(at, sub), scales(d, at.add(32 + 8 * sub)), minima(negated_dmin, at.add(96 + 8 * sub))
    ),
    |(w, d, m), x, acc| {
        let (d_input, zero) = (_mm256_set1_ps(x.d), _mm256_setzero_si256());
        acc = accumulate(acc, chain!(zero, x.q, 0, w[0], w[1], w[2], w[3]), d, d_input);
        acc = accumulate(acc, chain!(zero, x.q, 4, w[4], w[5], w[6], w[7]), d, d_input);
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(
    q6_k, byte: ByteBlock, 8 in 1680, |at| halves(at),
    |d, sub| (
        [sixes(at.add(144 + 192 * sub)), sixes(at.add(240 + 192 * sub))],
        [signed_scales(d, at.add(16 + 16 * sub)), signed_scales(d, at.add(24 + 16 * sub))]
    ),
    |([v, w], d), x, acc| {
        let d_input = _mm256_set1_ps(x.d);
        acc = accumulate(acc, chain!(pair(x.centre32[0]), x.q, 0, v[0], v[1], v[2], v[3]), d[0], d_input);
        acc = accumulate(acc, chain!(pair(x.centre32[1]), x.q, 4, w[0], w[1], w[2], w[3]), d[1], d_input);
    }
);
