//! GEMV with inputs of 8 bits, for AVX2, FMA and F16C.
//!
//! As [`super::avx2`], with one part of the input instead of two. What the 16-bit sums of `maddubs` reach: eight steps of
//! 4-bit codes 30480; 5-bit codes centred at 16, or four steps of 6-bit codes centred at 32, 32512 (sums may wrap on the way,
//! the final value fits); uncentred 5-bit codes take two sums of four steps, 31496 each.
#![allow(unsafe_code, reason = "vector loads through the pointers of a job")]

use super::GemvJob;
use super::avx2::{fives, fives_k, halves, load, minima, nibbles, pair, sixes};
use super::portable;
use crate::activations::ByteBlock;
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

/// A kernel over blocks of `$len` input features that take `$bytes` in a group; `$body` updates the eight sums.
macro_rules! kernel {
    ($name:ident, $len:expr, $bytes:expr, $at:ident, $x:ident, $acc:ident, $body:block) => {
        /// # Safety
        /// The processor has AVX2; the job's pointers cover its groups, its input row and eight results a group.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(job: &GemvJob) {
            let blocks = job.cols / $len;
            let mut $at = job.groups;
            for index in 0..job.count {
                let mut $acc = _mm256_setzero_ps();
                let mut input: *const [ByteBlock; $len / 32] = job.byte.cast();
                for _ in 0..blocks {
                    // SAFETY: block by block inside the group and the input row, as promised by the caller.
                    unsafe {
                        let $x = &*input;
                        $body
                        input = input.add(1);
                        $at = $at.add($bytes);
                    }
                }
                // SAFETY: eight results a group.
                unsafe { _mm256_storeu_ps(job.out.add(8 * index), $acc) };
            }
        }
    };
}

kernel!(q4_0, 32, 144, at, x, acc, {
    let x = &x[0];
    let w = nibbles(at.add(16));
    let s = chain!(pair(x.centre8), x.q, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, s, halves(at), _mm256_set1_ps(x.d));
});

kernel!(q4_1, 32, 160, at, x, acc, {
    let x = &x[0];
    let w = nibbles(at.add(32));
    let s = chain!(_mm256_setzero_si256(), x.q, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, s, halves(at), _mm256_set1_ps(x.d));
    acc = _mm256_fmadd_ps(halves(at.add(16)), _mm256_set1_ps(x.s), acc);
});

kernel!(q5_0, 32, 176, at, x, acc, {
    let x = &x[0];
    let w = fives(at.add(16));
    let s = chain!(pair(x.centre16), x.q, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, s, halves(at), _mm256_set1_ps(x.d));
});

kernel!(q5_1, 32, 192, at, x, acc, {
    let x = &x[0];
    let w = fives(at.add(32));
    let (d, d_input, zero) = (halves(at), _mm256_set1_ps(x.d), _mm256_setzero_si256());
    acc = accumulate(acc, chain!(zero, x.q, 0, w[0], w[1], w[2], w[3]), d, d_input);
    acc = accumulate(acc, chain!(zero, x.q, 4, w[4], w[5], w[6], w[7]), d, d_input);
    acc = _mm256_fmadd_ps(halves(at.add(16)), _mm256_set1_ps(x.s), acc);
});

kernel!(q4_k, 256, 1184, at, x, acc, {
    let d = halves(at);
    let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)));
    for c in 0..4 {
        let (a, b) = (&x[2 * c], &x[2 * c + 1]);
        let codes = at.add(160 + 256 * c);
        let mask = _mm256_set1_epi8(15);
        let (mut a_sum, mut b_sum) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        macro_rules! step {
            ($($j:literal)+) => {$(
                let planes = load(codes.add(32 * $j));
                let low = _mm256_and_si256(planes, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16(planes, 4), mask);
                a_sum = chain!(a_sum, a.q, $j, low);
                b_sum = chain!(b_sum, b.q, $j, high);
            )+};
        }
        step!(0 1 2 3 4 5 6 7);
        acc = accumulate(acc, a_sum, scales(d, at.add(32 + 16 * c)), _mm256_set1_ps(a.d));
        acc = _mm256_fmadd_ps(minima(negated_dmin, at.add(96 + 16 * c)), _mm256_set1_ps(a.s), acc);
        acc = accumulate(acc, b_sum, scales(d, at.add(40 + 16 * c)), _mm256_set1_ps(b.d));
        acc = _mm256_fmadd_ps(minima(negated_dmin, at.add(104 + 16 * c)), _mm256_set1_ps(b.s), acc);
    }
});

kernel!(q5_k, 256, 1440, at, x, acc, {
    let d = halves(at);
    let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)));
    let zero = _mm256_setzero_si256();
    for sub in 0..8 {
        let w = if sub % 2 == 0 { fives_k::<false>(at, sub / 2) } else { fives_k::<true>(at, sub / 2) };
        let x = &x[sub];
        let (d, d_input) = (scales(d, at.add(32 + 8 * sub)), _mm256_set1_ps(x.d));
        acc = accumulate(acc, chain!(zero, x.q, 0, w[0], w[1], w[2], w[3]), d, d_input);
        acc = accumulate(acc, chain!(zero, x.q, 4, w[4], w[5], w[6], w[7]), d, d_input);
        acc = _mm256_fmadd_ps(minima(negated_dmin, at.add(96 + 8 * sub)), _mm256_set1_ps(x.s), acc);
    }
});

kernel!(q6_k, 256, 1680, at, x, acc, {
    let d = halves(at);
    for (block, x) in x.iter().enumerate() {
        let d_input = _mm256_set1_ps(x.d);
        let w = sixes(at.add(144 + 192 * block));
        let s = chain!(pair(x.centre32[0]), x.q, 0, w[0], w[1], w[2], w[3]);
        acc = accumulate(acc, s, signed_scales(d, at.add(16 + 16 * block)), d_input);
        let w = sixes(at.add(240 + 192 * block));
        let s = chain!(pair(x.centre32[1]), x.q, 4, w[0], w[1], w[2], w[3]);
        acc = accumulate(acc, s, signed_scales(d, at.add(24 + 16 * block)), d_input);
    }
});
