//! GEMV for AVX2, FMA and F16C.
//!
//! Unsigned codes times signed parts of the input go through `maddubs` into 16-bit sums. Limits: `31 × 127 × 2` and
//! `63 × 127 × 2` a pair do not saturate; eight steps of 4-bit codes reach 30480 with the high part; 5-bit codes centred at
//! 16 reach 32512 (sums may wrap on the way, the final value fits); uncentred 5-bit codes take two sums of four steps for
//! the high part; four steps of 6-bit codes centred at 32 reach 32512. The integer sum of 32 elements is exact.
#![allow(unsafe_code, reason = "vector loads through the pointers of a job")]

use super::GemvJob;
use super::portable;
use crate::activations::{BLOCK, SplitBlock, WideBlock};
use crate::table::GemvKernel;
use npuhal_models::WeightType;
use std::arch::x86_64::*;

pub(crate) fn kernel(weight_type: WeightType) -> GemvKernel {
    match weight_type {
        WeightType::F32 => f32_rows,
        WeightType::F16 => f16_rows,
        WeightType::Bf16 => bf16_rows,
        WeightType::Q4_0 => q4_0,
        WeightType::Q4_1 => q4_1,
        WeightType::Q5_0 => q5_0,
        WeightType::Q5_1 => q5_1,
        WeightType::Q8_0 => q8_0,
        WeightType::Q4K => q4_k,
        WeightType::Q5K => q5_k,
        WeightType::Q6K => q6_k,
        _ => portable::kernel(weight_type),
    }
}

/// Loads 32 bytes.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Eight f16 as f32.
///
/// # Safety
/// 16 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// Word `index` of four input codes, in all lanes.
///
/// # Safety
/// The word is readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn word(codes: *const i8, index: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_set1_epi32(codes.cast::<i32>().add(index).read_unaligned()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn pair(start: [i16; 2]) -> __m256i {
    _mm256_set1_epi32(bytemuck::cast(start))
}

/// `start + Σ w[j] · codes[first + j]` in 16 bits.
macro_rules! chain {
    ($start:expr, $codes:expr, $first:expr, $($w:expr),+) => {{
        let mut sum = $start;
        let mut index = $first;
        $(
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16($w, word($codes, index)));
            index += 1;
        )+
        let _ = index;
        sum
    }};
}

/// `Σ` of the high part `× 128` and the low part, in 32 bits, each times `by`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn join(hi: __m256i, lo: __m256i, by: __m256i) -> __m256i {
    _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(hi, by), 7), _mm256_madd_epi16(lo, by))
}

/// As [`join`], the high part in two sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn join2(hi: [__m256i; 2], lo: __m256i, by: __m256i) -> __m256i {
    let hi = _mm256_add_epi32(_mm256_madd_epi16(hi[0], by), _mm256_madd_epi16(hi[1], by));
    _mm256_add_epi32(_mm256_slli_epi32(hi, 7), _mm256_madd_epi16(lo, by))
}

/// `acc + dot × (d × d_input)`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate(acc: __m256, dot: __m256i, d: __m256, input: f32) -> __m256 {
    _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(d, _mm256_set1_ps(input)), acc)
}

/// Four planes of nibbles as eight step vectors.
///
/// # Safety
/// 128 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn nibbles(at: *const u8) -> [__m256i; 8] {
    let mask = _mm256_set1_epi8(15);
    // SAFETY: the caller's promise.
    let x: [__m256i; 4] = unsafe { [load(at), load(at.add(32)), load(at.add(64)), load(at.add(96))] };
    let low = |x| _mm256_and_si256(x, mask);
    let high = |x| _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
    [low(x[0]), low(x[1]), low(x[2]), low(x[3]), high(x[0]), high(x[1]), high(x[2]), high(x[3])]
}

/// Five planes of 5-bit codes as eight step vectors.
///
/// # Safety
/// 160 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn fives(at: *const u8) -> [__m256i; 8] {
    // SAFETY: the caller's promise.
    let p: [__m256i; 5] =
        unsafe { [load(at), load(at.add(32)), load(at.add(64)), load(at.add(96)), load(at.add(128))] };
    let (m5, m3) = (_mm256_set1_epi8(31), _mm256_set1_epi8(7));
    let (m_mid, m8, m16) = (_mm256_set1_epi8(0x18), _mm256_set1_epi8(8), _mm256_set1_epi8(16));
    let low = |x| _mm256_and_si256(x, m5);
    let top = |x| _mm256_and_si256(_mm256_srli_epi16(x, 5), m3);
    let mid = |x| _mm256_and_si256(_mm256_srli_epi16(x, 3), m_mid);
    let w7 = _mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi16(p[1], 2), m8),
        _mm256_and_si256(_mm256_srli_epi16(p[3], 1), m16),
    );
    [
        low(p[0]),
        low(p[1]),
        low(p[2]),
        low(p[3]),
        low(p[4]),
        _mm256_or_si256(top(p[0]), mid(p[1])),
        _mm256_or_si256(top(p[2]), mid(p[3])),
        _mm256_or_si256(top(p[4]), w7),
    ]
}

/// Three planes of 6-bit codes as four step vectors.
///
/// # Safety
/// 96 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn sixes(at: *const u8) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let p: [__m256i; 3] = unsafe { [load(at), load(at.add(32)), load(at.add(64))] };
    let m6 = _mm256_set1_epi8(0x3F);
    let low = |x| _mm256_and_si256(x, m6);
    let last = _mm256_or_si256(
        _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi16(p[0], 2), _mm256_set1_epi8(0x30)),
            _mm256_and_si256(_mm256_srli_epi16(p[1], 4), _mm256_set1_epi8(0x0C)),
        ),
        _mm256_and_si256(_mm256_srli_epi16(p[2], 6), _mm256_set1_epi8(0x03)),
    );
    [low(p[0]), low(p[1]), low(p[2]), last]
}

/// Eight unsigned bytes, one for each row, in both 16-bit halves of the row's lane.
///
/// # Safety
/// Eight bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn row_bytes(at: *const u8) -> __m256i {
    const Z: i8 = -1;
    let spread = _mm256_setr_epi8(
        0, Z, 0, Z, 1, Z, 1, Z, 2, Z, 2, Z, 3, Z, 3, Z, //
        4, Z, 4, Z, 5, Z, 5, Z, 6, Z, 6, Z, 7, Z, 7, Z,
    );
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm256_set1_epi64x(at.cast::<i64>().read_unaligned()) };
    _mm256_shuffle_epi8(bytes, spread)
}

/// As [`row_bytes`], signed.
///
/// # Safety
/// Eight bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn row_signed_bytes(at: *const u8) -> __m256i {
    const Z: i8 = -1;
    let spread = _mm256_setr_epi8(
        Z, 0, Z, 0, Z, 1, Z, 1, Z, 2, Z, 2, Z, 3, Z, 3, //
        Z, 4, Z, 4, Z, 5, Z, 5, Z, 6, Z, 6, Z, 7, Z, 7,
    );
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm256_set1_epi64x(at.cast::<i64>().read_unaligned()) };
    _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, spread), 8)
}

/// Minima of a sub-block: `-dmin × minimum`, exact.
///
/// # Safety
/// Eight bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn minima(negated_dmin: __m256, at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(at.cast()) };
    _mm256_mul_ps(negated_dmin, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)))
}

/// A kernel over blocks of `$len` input features that take `$bytes` in a group; `$body` updates the eight sums.
macro_rules! kernel {
    ($name:ident, $len:expr, $bytes:expr, $input:ident: $form:ty, $at:ident, $x:ident, $acc:ident, $body:block) => {
        /// # Safety
        /// The processor has AVX2; the job's pointers cover its groups, its input row and eight results a group.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(job: &GemvJob) {
            let blocks = job.cols / $len;
            let mut $at = job.groups;
            for index in 0..job.count {
                let mut $acc = _mm256_setzero_ps();
                let mut input: *const $form = job.$input;
                for _ in 0..blocks {
                    // SAFETY: block by block inside the group and the input row, as promised by the caller.
                    unsafe {
                        let $x = std::slice::from_raw_parts(input, $len / BLOCK);
                        $body
                        input = input.add($len / BLOCK);
                        $at = $at.add($bytes);
                    }
                }
                // SAFETY: eight results a group.
                unsafe { _mm256_storeu_ps(job.out.add(8 * index), $acc) };
            }
        }
    };
}

kernel!(q4_0, 32, 144, split: SplitBlock, at, x, acc, {
    let x = x.get_unchecked(0);
    let w = nibbles(at.add(16));
    // Centred at 8: half of what centres at 16.
    let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
    let start = |part: usize| _mm256_srai_epi16(pair(x.centre16[part]), 1);
    let s_hi = chain!(start(0), hi, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    let s_lo = chain!(start(1), lo, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, join(s_hi, s_lo, _mm256_set1_epi16(1)), halves(at), x.d);
});

kernel!(q4_1, 32, 160, split: SplitBlock, at, x, acc, {
    let x = x.get_unchecked(0);
    let w = nibbles(at.add(32));
    let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
    let zero = _mm256_setzero_si256();
    let s_hi = chain!(zero, hi, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    let s_lo = chain!(zero, lo, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, join(s_hi, s_lo, _mm256_set1_epi16(1)), halves(at), x.d);
    acc = _mm256_fmadd_ps(halves(at.add(16)), _mm256_set1_ps(x.s), acc);
});

kernel!(q5_0, 32, 176, split: SplitBlock, at, x, acc, {
    let x = x.get_unchecked(0);
    let w = fives(at.add(16));
    let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
    let s_hi = chain!(pair(x.centre16[0]), hi, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    let s_lo = chain!(pair(x.centre16[1]), lo, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, join(s_hi, s_lo, _mm256_set1_epi16(1)), halves(at), x.d);
});

kernel!(q5_1, 32, 192, split: SplitBlock, at, x, acc, {
    let x = x.get_unchecked(0);
    let w = fives(at.add(32));
    let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
    let zero = _mm256_setzero_si256();
    let s_hi = [chain!(zero, hi, 0, w[0], w[1], w[2], w[3]), chain!(zero, hi, 4, w[4], w[5], w[6], w[7])];
    let s_lo = chain!(zero, lo, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    acc = accumulate(acc, join2(s_hi, s_lo, _mm256_set1_epi16(1)), halves(at), x.d);
    acc = _mm256_fmadd_ps(halves(at.add(16)), _mm256_set1_ps(x.s), acc);
});

kernel!(q8_0, 32, 272, wide: WideBlock, at, x, acc, {
    let x = x.get_unchecked(0);
    let (mut first, mut second) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    macro_rules! step {
        ($($j:literal)+) => {$(
            let v = _mm256_set1_epi64x(x.v.as_ptr().add(4 * $j).cast::<i64>().read_unaligned());
            let rows = at.add(16 + 32 * $j).cast::<__m128i>();
            first = _mm256_add_epi32(first, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(rows)), v));
            second = _mm256_add_epi32(second, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(rows.add(1))), v));
        )+};
    }
    step!(0 1 2 3 4 5 6 7);
    let dot = _mm256_permute4x64_epi64(_mm256_hadd_epi32(first, second), 0b11_01_10_00);
    acc = accumulate(acc, dot, halves(at), x.d);
});

kernel!(q4_k, 256, 1184, split: SplitBlock, at, x, acc, {
    let d = halves(at);
    let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)));
    for c in 0..4 {
        let (a, b) = (x.get_unchecked(2 * c), x.get_unchecked(2 * c + 1));
        let codes = at.add(160 + 256 * c);
        let mask = _mm256_set1_epi8(15);
        let zero = _mm256_setzero_si256();
        let (mut a_hi, mut a_lo, mut b_hi, mut b_lo) = (zero, zero, zero, zero);
        macro_rules! step {
            ($($j:literal)+) => {$(
                let planes = load(codes.add(32 * $j));
                let low = _mm256_and_si256(planes, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16(planes, 4), mask);
                a_hi = _mm256_add_epi16(a_hi, _mm256_maddubs_epi16(low, word(a.hi.as_ptr(), $j)));
                a_lo = _mm256_add_epi16(a_lo, _mm256_maddubs_epi16(low, word(a.lo.as_ptr(), $j)));
                b_hi = _mm256_add_epi16(b_hi, _mm256_maddubs_epi16(high, word(b.hi.as_ptr(), $j)));
                b_lo = _mm256_add_epi16(b_lo, _mm256_maddubs_epi16(high, word(b.lo.as_ptr(), $j)));
            )+};
        }
        step!(0 1 2 3 4 5 6 7);
        acc = accumulate(acc, join(a_hi, a_lo, row_bytes(at.add(32 + 16 * c))), d, a.d);
        acc = _mm256_fmadd_ps(minima(negated_dmin, at.add(96 + 16 * c)), _mm256_set1_ps(a.s), acc);
        acc = accumulate(acc, join(b_hi, b_lo, row_bytes(at.add(40 + 16 * c))), d, b.d);
        acc = _mm256_fmadd_ps(minima(negated_dmin, at.add(104 + 16 * c)), _mm256_set1_ps(b.s), acc);
    }
});

/// Eight step vectors of a sub-block of Q5_K: nibbles of one half, and the fifth bits of `bits`.
macro_rules! fifth_bits {
    ($codes:expr, $shift:literal, $bits:expr) => {{
        let mask = _mm256_set1_epi8(15);
        let bit = _mm256_set1_epi8(16);
        let nibble = |j: usize| _mm256_and_si256(_mm256_srli_epi16(load($codes.add(32 * j)), $shift), mask);
        let b = $bits;
        let with = |nibbles, fifth| _mm256_or_si256(nibbles, _mm256_and_si256(fifth, bit));
        [
            with(nibble(0), _mm256_slli_epi16(b, 4)),
            with(nibble(1), _mm256_slli_epi16(b, 3)),
            with(nibble(2), _mm256_slli_epi16(b, 2)),
            with(nibble(3), _mm256_slli_epi16(b, 1)),
            with(nibble(4), b),
            with(nibble(5), _mm256_srli_epi16(b, 1)),
            with(nibble(6), _mm256_srli_epi16(b, 2)),
            with(nibble(7), _mm256_srli_epi16(b, 3)),
        ]
    }};
}

/// The step vectors of sub-block `2c + high` of a Q5_K block.
///
/// # Safety
/// The block at `at` is readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn fives_k<const HIGH: bool>(at: *const u8, c: usize) -> [__m256i; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = at.add(160 + 256 * c);
        if HIGH {
            fifth_bits!(codes, 4, load(at.add(1216 + 64 * c)))
        } else {
            fifth_bits!(codes, 0, load(at.add(1184 + 64 * c)))
        }
    }
}

kernel!(q5_k, 256, 1440, split: SplitBlock, at, x, acc, {
    let d = halves(at);
    let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)));
    let zero = _mm256_setzero_si256();
    for c in 0..4 {
        for high in 0..2 {
            let w = if high == 0 { fives_k::<false>(at, c) } else { fives_k::<true>(at, c) };
            let sub = 2 * c + high;
            let x = x.get_unchecked(sub);
            let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
            let s_hi = [chain!(zero, hi, 0, w[0], w[1], w[2], w[3]), chain!(zero, hi, 4, w[4], w[5], w[6], w[7])];
            let s_lo = chain!(zero, lo, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
            acc = accumulate(acc, join2(s_hi, s_lo, row_bytes(at.add(32 + 8 * sub))), d, x.d);
            acc = _mm256_fmadd_ps(minima(negated_dmin, at.add(96 + 8 * sub)), _mm256_set1_ps(x.s), acc);
        }
    }
});

kernel!(q6_k, 256, 1680, split: SplitBlock, at, x, acc, {
    let d = halves(at);
    for block in 0..8 {
        let x = x.get_unchecked(block);
        let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
        let w = sixes(at.add(144 + 192 * block));
        let s_hi = chain!(pair(x.centre32[0][0]), hi, 0, w[0], w[1], w[2], w[3]);
        let s_lo = chain!(pair(x.centre32[0][1]), lo, 0, w[0], w[1], w[2], w[3]);
        let first = join(s_hi, s_lo, row_signed_bytes(at.add(16 + 16 * block)));
        let w = sixes(at.add(240 + 192 * block));
        let s_hi = chain!(pair(x.centre32[1][0]), hi, 4, w[0], w[1], w[2], w[3]);
        let s_lo = chain!(pair(x.centre32[1][1]), lo, 4, w[0], w[1], w[2], w[3]);
        let second = join(s_hi, s_lo, row_signed_bytes(at.add(24 + 16 * block)));
        acc = accumulate(acc, _mm256_add_epi32(first, second), d, x.d);
    }
});

/// Eight rows of plain floats: four chains over k modulo 4, added pairwise at the end.
macro_rules! plain {
    ($name:ident, $bytes:expr, $value:expr) => {
        /// # Safety
        /// As the quantized kernels.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(job: &GemvJob) {
            let mut at = job.groups;
            for index in 0..job.count {
                let mut sums = [_mm256_setzero_ps(); 4];
                let whole = job.cols / 4 * 4;
                for k in (0..whole).step_by(4) {
                    for i in 0..4 {
                        // SAFETY: element k + i of the group and of the input row.
                        unsafe {
                            let x = _mm256_set1_ps(*job.dense.add(k + i));
                            sums[i] = _mm256_fmadd_ps($value(at.add(i * $bytes)), x, sums[i]);
                        }
                    }
                    // SAFETY: at most the end of the group.
                    at = unsafe { at.add(4 * $bytes) };
                }
                for k in whole..job.cols {
                    // SAFETY: element k of the group and of the input row.
                    unsafe {
                        let x = _mm256_set1_ps(*job.dense.add(k));
                        sums[k - whole] = _mm256_fmadd_ps($value(at), x, sums[k - whole]);
                        at = at.add($bytes);
                    }
                }
                let sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
                // SAFETY: eight results a group.
                unsafe { _mm256_storeu_ps(job.out.add(8 * index), sum) };
            }
        }
    };
}

plain!(f32_rows, 32, singles);
plain!(f16_rows, 16, halves);
plain!(bf16_rows, 16, brains);

/// Eight f32.
///
/// # Safety
/// 32 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn singles(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_ps(at.cast()) }
}

/// Eight bf16 as f32.
///
/// # Safety
/// 16 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn brains(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let bits = unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())) };
    _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))
}
