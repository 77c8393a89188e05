//! GEMV for AVX2, FMA and F16C.
//!
//! Unsigned codes times signed parts of the input go through `maddubs` into 16-bit sums. Limits: `31 × 127 × 2` and
//! `63 × 127 × 2` a pair do not saturate; eight steps of 4-bit codes reach 30480 with the high part; 5-bit codes centred at
//! 16 reach 32512 (sums may wrap on the way, the final value fits); uncentred 5-bit codes take two sums of four steps for
//! the high part; four steps of 6-bit codes centred at 32 reach 32512. The integer sum of 32 elements is exact.
#![allow(unsafe_code, reason = "vector loads through the pointers of a job")]

use super::{GemvJob, MOST_ROWS, ask_ahead, portable};
use crate::activations::{BLOCK, SplitBlock, WideBlock};
use crate::packed::GROUP_ROWS;
use crate::table::GemvKernel;
use npuhal_models::WeightType;
use std::arch::x86_64::*;

/// For processors on which asking ahead costs more than it gains.
pub(crate) fn kernel_without_asking(weight_type: WeightType) -> GemvKernel {
    if weight_type == WeightType::Q8_0 { q8_0::<false> } else { kernel(weight_type) }
}

pub(crate) fn kernel(weight_type: WeightType) -> GemvKernel {
    match weight_type {
        WeightType::F32 => f32_rows,
        WeightType::F16 => f16_rows,
        WeightType::Bf16 => bf16_rows,
        WeightType::Q4_0 => q4_0,
        WeightType::Q4_1 => q4_1,
        WeightType::Q5_0 => q5_0,
        WeightType::Q5_1 => q5_1,
        WeightType::Q8_0 => q8_0::<true>,
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

/// A kernel over blocks of `$subs` × 32 input features that take `$bytes` in a group. `$head` is read once a block,
/// `$weights` once for each 32 features and all input rows; `$row` updates the eight sums of one.
macro_rules! product {
    (
        $name:ident, $input:ident: $form:ty, $subs:literal in $bytes:literal,
        |$at:ident| $head:expr, |$parts:pat_param, $sub:ident| $weights:expr,
        |$w:pat_param, $x:ident, $acc:ident| $row:block
    ) => {
        /// # Safety
        /// The processor has AVX2; the job's pointers cover its groups, its input rows and eight results a group and row.
        unsafe fn $name(job: &GemvJob) {
            /// # Safety
            /// As the function around it.
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn rows<const MOST: usize>(job: &GemvJob) {
                let rows = if MOST == 1 { 1 } else { job.rows.min(MOST) };
                let blocks = job.cols / BLOCK;
                let mut $at = job.groups;
                for index in 0..job.count {
                    let mut sums = [_mm256_setzero_ps(); MOST];
                    let mut input: *const $form = job.$input;
                    for _ in 0..blocks / $subs {
                        // SAFETY: block by block inside the group and the input rows, as promised by the caller; `rows` is at most the
                        // length of `sums`.
                        unsafe {
                            let $parts = $head;
                            for $sub in 0..$subs {
                                ask_ahead($at.wrapping_add($bytes / $subs * $sub), $bytes / $subs);
                                let $w = $weights;
                                for row in 0..rows {
                                    let $x = &*input.add(row * blocks);
                                    let mut $acc = *sums.get_unchecked(row);
                                    $row * sums.get_unchecked_mut(row) = $acc;
                                }
                                input = input.add(1);
                            }
                            $at = $at.add($bytes);
                        }
                    }
                    for (row, sums) in sums.iter().enumerate().take(rows) {
                        // SAFETY: eight results a group and row.
                        unsafe { _mm256_storeu_ps(job.out.add(row * job.stride + GROUP_ROWS * index), *sums) };
                    }
                }
            }
            // SAFETY: the caller's promise.
            unsafe { if job.rows == 1 { rows::<1>(job) } else { rows::<MOST_ROWS>(job) } }
        }
    };
}
pub(super) use product;

/// `Σ` of all steps in 16 bits, of the high parts and of the low ones.
macro_rules! chains {
    ($x:ident, $w:ident, $hi:expr, $lo:expr) => {{
        let (hi, lo) = ($x.hi.as_ptr(), $x.lo.as_ptr());
        let s_hi = chain!($hi, hi, 0, $w[0], $w[1], $w[2], $w[3], $w[4], $w[5], $w[6], $w[7]);
        let s_lo = chain!($lo, lo, 0, $w[0], $w[1], $w[2], $w[3], $w[4], $w[5], $w[6], $w[7]);
        (s_hi, s_lo)
    }};
}

/// As [`chains`], the high parts in two sums.
macro_rules! chains2 {
    ($x:ident, $w:ident) => {{
        let (hi, lo, zero) = ($x.hi.as_ptr(), $x.lo.as_ptr(), _mm256_setzero_si256());
        let first = chain!(zero, hi, 0, $w[0], $w[1], $w[2], $w[3]);
        let second = chain!(zero, hi, 4, $w[4], $w[5], $w[6], $w[7]);
        ([first, second], chain!(zero, lo, 0, $w[0], $w[1], $w[2], $w[3], $w[4], $w[5], $w[6], $w[7]))
    }};
}

product!(q4_0, split: SplitBlock, 1 in 144, |at| (), |(), sub| (nibbles(at.add(16)), halves(at)), |(w, d), x, acc| {
    // Centred at 8: half of what centres at 16.
    let start = |part: usize| _mm256_srai_epi16(pair(x.centre16[part]), 1);
    let (hi, lo) = chains!(x, w, start(0), start(1));
    acc = accumulate(acc, join(hi, lo, _mm256_set1_epi16(1)), d, x.d);
});

product!(
    q4_1, split: SplitBlock, 1 in 160,
    |at| (), |(), sub| (nibbles(at.add(32)), halves(at), halves(at.add(16))), |(w, d, m), x, acc| {
        let (hi, lo) = chains!(x, w, _mm256_setzero_si256(), _mm256_setzero_si256());
        acc = accumulate(acc, join(hi, lo, _mm256_set1_epi16(1)), d, x.d);
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(q5_0, split: SplitBlock, 1 in 176, |at| (), |(), sub| (fives(at.add(16)), halves(at)), |(w, d), x, acc| {
    let (hi, lo) = chains!(x, w, pair(x.centre16[0]), pair(x.centre16[1]));
    acc = accumulate(acc, join(hi, lo, _mm256_set1_epi16(1)), d, x.d);
});

product!(
    q5_1, split: SplitBlock, 1 in 192,
    |at| (), |(), sub| (fives(at.add(32)), halves(at), halves(at.add(16))), |(w, d, m), x, acc| {
        let (hi, lo) = chains2!(x, w);
        acc = accumulate(acc, join2(hi, lo, _mm256_set1_epi16(1)), d, x.d);
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(
    q4_k, split: SplitBlock, 8 in 1184, |at| k_scales(at),
    |(d, negated_dmin), sub| (
        half_nibbles(at.add(160 + 256 * (sub / 2)), sub % 2),
        row_bytes(at.add(32 + 8 * sub)),
        minima(negated_dmin, at.add(96 + 8 * sub))
    ),
    |(w, by, m), x, acc| {
        let (hi, lo) = chains!(x, w, _mm256_setzero_si256(), _mm256_setzero_si256());
        acc = accumulate(acc, join(hi, lo, by), d, x.d);
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(
    q5_k, split: SplitBlock, 8 in 1440, |at| k_scales(at),
    |(d, negated_dmin), sub| (
        fives_k(at, sub), row_bytes(at.add(32 + 8 * sub)), minima(negated_dmin, at.add(96 + 8 * sub))
    ),
    |(w, by, m), x, acc| {
        let (hi, lo) = chains2!(x, w);
        acc = accumulate(acc, join2(hi, lo, by), d, x.d);
        acc = _mm256_fmadd_ps(m, _mm256_set1_ps(x.s), acc);
    }
);

product!(
    q6_k, split: SplitBlock, 8 in 1680, |at| halves(at),
    |d, sub| (
        [sixes(at.add(144 + 192 * sub)), sixes(at.add(240 + 192 * sub))],
        [row_signed_bytes(at.add(16 + 16 * sub)), row_signed_bytes(at.add(24 + 16 * sub))]
    ),
    |([v, w], by), x, acc| {
        let (hi, lo) = (x.hi.as_ptr(), x.lo.as_ptr());
        let s_hi = chain!(pair(x.centre32[0][0]), hi, 0, v[0], v[1], v[2], v[3]);
        let s_lo = chain!(pair(x.centre32[0][1]), lo, 0, v[0], v[1], v[2], v[3]);
        let first = join(s_hi, s_lo, by[0]);
        let s_hi = chain!(pair(x.centre32[1][0]), hi, 4, w[0], w[1], w[2], w[3]);
        let s_lo = chain!(pair(x.centre32[1][1]), lo, 4, w[0], w[1], w[2], w[3]);
        acc = accumulate(acc, _mm256_add_epi32(first, join(s_hi, s_lo, by[1])), d, x.d);
    }
);

/// # Safety
/// The processor has AVX2; the job's pointers cover its groups, its input rows and eight results a group and row.
unsafe fn q8_0<const ASKS: bool>(job: &GemvJob) {
    /// # Safety
    /// As the function around it.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rows<const MOST: usize, const ASKS: bool>(job: &GemvJob) {
        let rows = if MOST == 1 { 1 } else { job.rows.min(MOST) };
        let blocks = job.cols / BLOCK;
        let mut at = job.groups;
        for index in 0..job.count {
            let mut sums = [_mm256_setzero_ps(); MOST];
            for block in 0..blocks {
                // SAFETY: block by block inside the group and the input rows, as promised by the caller; `rows` sums.
                unsafe {
                    if ASKS {
                        ask_ahead(at, 272);
                    }
                    let mut row = 0;
                    while row < rows {
                        let (x, sums) = (job.wide.add(row * blocks + block), sums.as_mut_ptr().add(row));
                        let taken = if MOST == 1 { 1 } else { (rows - row).min(4) };
                        match taken {
                            1 => words::<1>(at, x, blocks, sums),
                            2 => words::<2>(at, x, blocks, sums),
                            3 => words::<3>(at, x, blocks, sums),
                            _ => words::<4>(at, x, blocks, sums),
                        }
                        row += taken;
                    }
                    at = at.add(272);
                }
            }
            for (row, sums) in sums.iter().enumerate().take(rows) {
                // SAFETY: eight results a group and row.
                unsafe { _mm256_storeu_ps(job.out.add(row * job.stride + GROUP_ROWS * index), *sums) };
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { if job.rows == 1 { rows::<1, ASKS>(job) } else { rows::<MOST_ROWS, ASKS>(job) } }
}

/// Adds a block of Q8_0 to the sums of `ROWS` input rows, `stride` blocks apart.
///
/// # Safety
/// The processor has AVX2; the block and the rows' blocks are readable; there are `ROWS` sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn words<const ROWS: usize>(at: *const u8, x: *const WideBlock, stride: usize, sums: *mut __m256) {
    let (mut first, mut second) = ([_mm256_setzero_si256(); ROWS], [_mm256_setzero_si256(); ROWS]);
    // SAFETY: the caller's promise.
    unsafe {
        macro_rules! step {
            ($($j:literal)+) => {$(
                let rows = at.add(16 + 32 * $j).cast::<__m128i>();
                let (low, high) = (_mm_loadu_si128(rows), _mm_loadu_si128(rows.add(1)));
                let (low, high) = (_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high));
                for row in 0..ROWS {
                    let v = (*x.add(row * stride)).v.as_ptr().add(4 * $j).cast::<i64>().read_unaligned();
                    let v = _mm256_set1_epi64x(v);
                    first[row] = _mm256_add_epi32(first[row], _mm256_madd_epi16(low, v));
                    second[row] = _mm256_add_epi32(second[row], _mm256_madd_epi16(high, v));
                }
            )+};
        }
        step!(0 1 2 3 4 5 6 7);
        let d = halves(at);
        for row in 0..ROWS {
            let dot = _mm256_permute4x64_epi64(_mm256_hadd_epi32(first[row], second[row]), 0b11_01_10_00);
            let sums = sums.add(row);
            *sums = accumulate(*sums, dot, d, (*x.add(row * stride)).d);
        }
    }
}

/// Scales of a block of 256, and its minima's scales negated.
///
/// # Safety
/// 32 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn k_scales(at: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller's promise.
    unsafe { (halves(at), _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)))) }
}

/// Eight planes of nibbles: the low ones (`high` is 0), or the high ones (1).
///
/// # Safety
/// 256 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn half_nibbles(at: *const u8, high: usize) -> [__m256i; 8] {
    let (mask, shift) = (_mm256_set1_epi8(15), _mm_cvtsi32_si128(4 * high as i32));
    // SAFETY: the caller's promise.
    let half = |j: usize| _mm256_and_si256(_mm256_srl_epi16(unsafe { load(at.add(32 * j)) }, shift), mask);
    [half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7)]
}

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

/// The step vectors of sub-block `sub`, 0 to 7, of a Q5_K block.
///
/// # Safety
/// The block at `at` is readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn fives_k(at: *const u8, sub: usize) -> [__m256i; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let (codes, bits) = (at.add(160 + 256 * (sub / 2)), load(at.add(1184 + 32 * sub)));
        if sub % 2 == 1 { fifth_bits!(codes, 4, bits) } else { fifth_bits!(codes, 0, bits) }
    }
}

/// Eight rows of plain floats: four chains over k modulo 4, added pairwise at the end.
macro_rules! plain {
    ($name:ident, $bytes:expr, $value:expr) => {
        /// # Safety
        /// As the quantized kernels.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(job: &GemvJob) {
            for (index, row) in (0..job.count).flat_map(|index| (0..job.rows).map(move |row| (index, row))) {
                let mut sums = [_mm256_setzero_ps(); 4];
                // SAFETY: the first byte of a group, and an input row.
                let (group, x) = unsafe { (job.groups.add(index * job.cols * $bytes), job.dense.add(row * job.cols)) };
                let whole = job.cols / 4 * 4;
                for k in (0..whole).step_by(4) {
                    for i in 0..4 {
                        // SAFETY: element k + i of the group and of the input row.
                        unsafe {
                            let x = _mm256_set1_ps(*x.add(k + i));
                            sums[i] = _mm256_fmadd_ps($value(group.add((k + i) * $bytes)), x, sums[i]);
                        }
                    }
                }
                for k in whole..job.cols {
                    // SAFETY: element k of the group and of the input row.
                    unsafe {
                        let x = _mm256_set1_ps(*x.add(k));
                        sums[k - whole] = _mm256_fmadd_ps($value(group.add(k * $bytes)), x, sums[k - whole]);
                    }
                }
                let sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
                // SAFETY: eight results a group and row.
                unsafe { _mm256_storeu_ps(job.out.add(row * job.stride + GROUP_ROWS * index), sum) };
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
