//! Products of a matrix with two to eight rows, for AVX2, FMA and F16C.
//!
//! What counts here is instructions: a row's sixteen words of a block are spread over a vector each before the groups are gone
//! through, so that a multiplication takes its input from memory and needs no broadcast, and a group's codes are unpacked once
//! for all rows. Both stay in the nearest cache, because the input features are gone through in chunks; sums go on from chunk to
//! chunk, in the order of one pass, so that results have the bits of [`super::avx2`] and [`super::bytes`].
#![allow(unsafe_code, reason = "assembly tiles and raw pointers of a job")]

use super::FewJob;
use super::avx2::{fives, fives_k, halves, load, minima, nibbles, row_bytes, row_signed_bytes, sixes};
use super::bytes::{scales, signed_scales};
use crate::activations::{BLOCK, ByteBlock, SplitBlock, WideBlock};
use crate::packed::decode::has_minimum;
use crate::packed::{GROUP_ROWS, group_bytes};
use crate::table::FewKernel;
use npuhal_models::WeightType;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Input rows of a job at most.
pub(crate) const MOST_ROWS: usize = 8;
/// Groups that share the spreading of a chunk of the input.
const PART_GROUPS: usize = 64;
/// Blocks of 32 input features of a chunk, times input rows: spread, they take 22 KiB.
const SPREAD_BLOCKS: usize = 32;
/// Blocks of a chunk at most.
const MOST_BLOCKS: usize = 8;
/// Bytes of weights that are asked for before they are needed, counted in the order in which they are.
const AHEAD_BYTES: usize = 4 << 10;
/// Bytes of a spread block of one input row.
const SPREAD_BYTES: usize = 704;
/// Bytes of an unpacked block of a group.
const CODES_BYTES: usize = 576;

/// What a part works in. Not initialized: it is written before it is read.
#[repr(C, align(64))]
struct Room {
    /// Eight for each group and row.
    sums: [MaybeUninit<f32>; PART_GROUPS * MOST_ROWS * GROUP_ROWS],
    /// Tile after tile of rows, in it block after block; see [`spread_split`] and [`spread_wide`].
    input: [MaybeUninit<u8>; SPREAD_BLOCKS * SPREAD_BYTES],
    /// Step vectors; behind them scales, minima, and factors of the sums of each half: of the high parts, of the low ones.
    codes: [MaybeUninit<u8>; MOST_BLOCKS * CODES_BYTES],
}

/// Factors of weights without sub-blocks.
static ONES: Factors = Factors([[128; 16], [1; 16], [128; 16], [1; 16]]);

#[repr(C, align(32))]
struct Factors([[i16; 16]; 4]);

pub(crate) fn kernel(weight_type: WeightType) -> Option<FewKernel> {
    match weight_type {
        WeightType::Q8_0 => Some(wide),
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q6K => Some(split::<false>),
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => Some(split::<true>),
        _ => None,
    }
}

pub(crate) fn byte_kernel(weight_type: WeightType) -> Option<FewKernel> {
    match weight_type {
        WeightType::Q4_0 | WeightType::Q5_0 => Some(bytes::<CENTRED>),
        WeightType::Q4_1 | WeightType::Q4K => Some(bytes::<WHOLE>),
        WeightType::Q5_1 | WeightType::Q5K => Some(bytes::<HALVED>),
        WeightType::Q6K => Some(bytes::<CENTRED_HALVES>),
        _ => None,
    }
}

/// How a block of 8-bit inputs is summed: as a whole and with a minimum; as a whole and centred; in halves and with a minimum; in
/// halves, each centred and with a scale of its own.
const WHOLE: u8 = 0;
const CENTRED: u8 = 1;
const HALVED: u8 = 2;
const CENTRED_HALVES: u8 = 3;

/// Sizes of the tiles of rows: fours, threes and twos, never a one.
fn tile_rows(left: usize) -> usize {
    match left {
        5 | 6 | 9 => 3,
        _ => left.min(4),
    }
}

/// A kernel: parts of groups, chunks of input features, groups, tiles of rows.
macro_rules! kernel {
    (
        $(#[$attribute:meta])*
        $name:ident $(<const $flag:ident: $kind:ty>)?, $form:ident, $spread:expr, $unpack:expr,
        $factors:expr, [$tile2:expr, $tile3:expr, $tile4:expr]
    ) => {
        /// # Safety
        /// The processor has AVX2; the job has two to eight input rows, and its pointers cover its groups, its input rows and
        /// its results.
        $(#[$attribute])*
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name$(<const $flag: $kind>)?(job: &FewJob) {
            assert!((2..=MOST_ROWS).contains(&job.tokens));
            let blocks = job.cols / BLOCK;
            let chunk = if job.tokens > SPREAD_BLOCKS / MOST_BLOCKS { MOST_BLOCKS / 2 } else { MOST_BLOCKS };
            // Of a block of 32, also as a share of a block of 256.
            let block_bytes = group_bytes(job.weight_type, 256) / 8;
            let ahead = AHEAD_BYTES.div_ceil(chunk * block_bytes) * job.group_bytes;
            let mut room = MaybeUninit::<Room>::uninit();
            let room = room.as_mut_ptr();
            // SAFETY: the address of a field of the room.
            let sums: *mut f32 = unsafe { (&raw mut (*room).sums).cast() };
            // SAFETY: the same.
            let input: *mut u8 = unsafe { (&raw mut (*room).input).cast() };
            // SAFETY: the same.
            let codes: *mut u8 = unsafe { (&raw mut (*room).codes).cast() };
            let (factors, factors_step) = $factors(job.weight_type, codes.cast_const());
            for part in (0..job.count).step_by(PART_GROUPS) {
                let groups = PART_GROUPS.min(job.count - part);
                // SAFETY: eight sums for each row of each group of a part.
                unsafe { sums.write_bytes(0, groups * job.tokens * GROUP_ROWS) };
                for first in (0..blocks).step_by(chunk) {
                    let count = chunk.min(blocks - first);
                    let mut row = 0;
                    while row < job.tokens {
                        let rows = tile_rows(job.tokens - row);
                        // SAFETY: blocks `first..first + count` of the tile's rows; room for as many.
                        unsafe {
                            let from = job.$form.add(row * blocks + first);
                            $spread(job.weight_type, from, blocks, rows, count, input.add(row * chunk * SPREAD_BYTES));
                        }
                        row += rows;
                    }
                    for index in 0..groups {
                        // SAFETY: a group of the job, the chunk's blocks of it, the sums of its rows. The bytes asked for in
                        // advance are only a hint.
                        unsafe {
                            let group = job.groups.add((part + index) * job.group_bytes);
                            ask(group.wrapping_add(ahead + first * block_bytes), count * block_bytes);
                            $unpack(job.weight_type, group, first, count, codes);
                            let mut row = 0;
                            while row < job.tokens {
                                let rows = tile_rows(job.tokens - row);
                                let x = input.add(row * chunk * SPREAD_BYTES);
                                let out = sums.add((index * job.tokens + row) * GROUP_ROWS);
                                match rows {
                                    4 => $tile4(codes, x, factors, factors_step, count, out),
                                    3 => $tile3(codes, x, factors, factors_step, count, out),
                                    _ => $tile2(codes, x, factors, factors_step, count, out),
                                }
                                row += rows;
                            }
                        }
                    }
                }
                for token in 0..job.tokens {
                    for index in 0..groups {
                        let first = (part + index) * GROUP_ROWS;
                        let rows = GROUP_ROWS.min(job.rows - first);
                        // SAFETY: the results of the group's rows for this input row.
                        unsafe {
                            let from = sums.add((index * job.tokens + token) * GROUP_ROWS);
                            std::ptr::copy_nonoverlapping(from, job.out.add(token * job.stride + first), rows);
                        }
                    }
                }
            }
        }
    };
}

kernel!(
    split<const MINIMUM: bool>, split, spread_split, unpack, split_factors,
    [split2::<MINIMUM>, split3::<MINIMUM>, split4::<MINIMUM>]
);
kernel!(
    bytes<const KIND: u8>, byte, spread_bytes, unpack_bytes, no_factors,
    [bytes2::<KIND>, bytes3::<KIND>, bytes4::<KIND>]
);
kernel!(wide, wide, spread_wide, unpack_words, no_factors, [wide2, wide3, wide4]);

/// Where factors of the chunk's first block are, and how far on those of the next.
fn split_factors(weight_type: WeightType, codes: *const u8) -> (*const u8, usize) {
    if weight_type.block_len() == 256 {
        (codes.wrapping_add(FACTORS), CODES_BYTES)
    } else {
        ((&raw const ONES).cast(), 0)
    }
}

fn no_factors(_: WeightType, codes: *const u8) -> (*const u8, usize) {
    (codes, 0)
}

/// Asks for bytes that are needed later.
#[inline(always)]
fn ask(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a hint of the architecture's baseline, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line).cast()) };
    }
}

/// Scales of an unpacked block of 8-bit step vectors.
const SCALES: usize = 256;
/// Its minima.
const MINIMA: usize = 288;
/// Its factors.
const FACTORS: usize = 320;

/// `rows` input rows, `stride` blocks apart: for each of `count` blocks `[8 steps][hi, lo][rows]`, what centres codes
/// `[2 halves][hi, lo][rows]`, scales `[rows]`, scaled sums `[rows]`, of vectors with one value in all lanes.
///
/// # Safety
/// The processor has AVX2; the blocks are readable; there is room for them, aligned to 32 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spread_split(
    weight_type: WeightType,
    from: *const SplitBlock,
    stride: usize,
    rows: usize,
    count: usize,
    to: *mut u8,
) {
    // Start values for centres at 8, 16 or 32, from those at 32.
    let shift = _mm_cvtsi32_si128(match weight_type {
        WeightType::Q4_0 => 2,
        WeightType::Q5_0 => 1,
        _ => 0,
    });
    for block in 0..count {
        for row in 0..rows {
            // SAFETY: a block of a row, and its vectors.
            unsafe {
                let x = &*from.add(row * stride + block);
                let to = to.add(block * rows * SPREAD_BYTES).cast::<__m256i>().add(row);
                let (hi, lo): (&[i32; 8], &[i32; 8]) = (bytemuck::cast_ref(&x.hi), bytemuck::cast_ref(&x.lo));
                for j in 0..8 {
                    to.add(2 * rows * j).write(_mm256_set1_epi32(hi[j]));
                    to.add(2 * rows * j + rows).write(_mm256_set1_epi32(lo[j]));
                }
                for half in 0..2 {
                    for part in 0..2 {
                        let start = _mm256_set1_epi32(bytemuck::cast(x.centre32[half][part]));
                        to.add(rows * (16 + 2 * half + part)).write(_mm256_sra_epi16(start, shift));
                    }
                }
                to.add(20 * rows).cast::<__m256>().write(_mm256_set1_ps(x.d));
                to.add(21 * rows).cast::<__m256>().write(_mm256_set1_ps(x.s));
            }
        }
    }
}

/// As [`spread_split`], of 16-bit codes: `[16 steps][rows]`, and scales at the same place.
///
/// # Safety
/// As [`spread_split`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spread_wide(_: WeightType, from: *const WideBlock, stride: usize, rows: usize, count: usize, to: *mut u8) {
    for block in 0..count {
        for row in 0..rows {
            // SAFETY: a block of a row, and its vectors.
            unsafe {
                let x = &*from.add(row * stride + block);
                let to = to.add(block * rows * SPREAD_BYTES).cast::<__m256i>().add(row);
                let pairs: &[i32; 16] = bytemuck::cast_ref(&x.v);
                for j in 0..16 {
                    to.add(rows * j).write(_mm256_set1_epi32(pairs[j]));
                }
                to.add(20 * rows).cast::<__m256>().write(_mm256_set1_ps(x.d));
            }
        }
    }
}

/// As [`spread_split`], of 8-bit codes: `[8 steps][rows]`, and centres of the whole or of each half, scales and sums at the same
/// places.
///
/// # Safety
/// As [`spread_split`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spread_bytes(
    weight_type: WeightType,
    from: *const ByteBlock,
    stride: usize,
    rows: usize,
    count: usize,
    to: *mut u8,
) {
    for block in 0..count {
        for row in 0..rows {
            // SAFETY: a block of a row, and its vectors.
            unsafe {
                let x = &*from.add(row * stride + block);
                let to = to.add(block * rows * SPREAD_BYTES).cast::<__m256i>().add(row);
                let words: &[i32; 8] = bytemuck::cast_ref(&x.q);
                for j in 0..8 {
                    to.add(rows * j).write(_mm256_set1_epi32(words[j]));
                }
                let centres = match weight_type {
                    WeightType::Q4_0 => [x.centre8; 2],
                    WeightType::Q5_0 => [x.centre16; 2],
                    _ => x.centre32,
                };
                for half in 0..2 {
                    to.add(rows * (16 + half)).write(_mm256_set1_epi32(bytemuck::cast(centres[half])));
                }
                to.add(20 * rows).cast::<__m256>().write(_mm256_set1_ps(x.d));
                to.add(21 * rows).cast::<__m256>().write(_mm256_set1_ps(x.s));
            }
        }
    }
}

/// Unpacks blocks `first..first + count` of a group.
///
/// # Safety
/// The processor has AVX2; the group has these blocks; there is room for them, aligned to 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack(weight_type: WeightType, group: *const u8, first: usize, count: usize, to: *mut u8) {
    /// Blocks of 32 that take `$bytes`.
    macro_rules! blocks32 {
        ($bytes:literal, $codes:ident, $from:literal, $minimum:literal) => {
            for block in 0..count {
                let at = group.add((first + block) * $bytes);
                let to = to.add(block * CODES_BYTES);
                put(to, $codes(at.add($from)), halves(at));
                if $minimum {
                    to.add(MINIMA).cast::<__m256>().write(halves(at.add(16)));
                }
            }
        };
    }
    /// Sub-blocks of blocks of 256 that take `$bytes`; `$codes` of sub-block `$sub` at `$at`.
    macro_rules! blocks_k {
        ($bytes:literal, $at:ident, $sub:ident => $codes:expr) => {
            for block in 0..count {
                let ($at, $sub) = (group.add((first + block) / 8 * $bytes), (first + block) % 8);
                let to = to.add(block * CODES_BYTES);
                put(to, $codes, halves($at));
                let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves($at.add(16)));
                to.add(MINIMA).cast::<__m256>().write(minima(negated_dmin, $at.add(96 + 8 * $sub)));
                let factors = row_bytes($at.add(32 + 8 * $sub));
                put_factors(to, [factors, factors]);
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match weight_type {
            WeightType::Q4_0 => blocks32!(144, nibbles, 16, false),
            WeightType::Q4_1 => blocks32!(160, nibbles, 32, true),
            WeightType::Q5_0 => blocks32!(176, fives, 16, false),
            WeightType::Q5_1 => blocks32!(192, fives, 32, true),
            WeightType::Q4K => blocks_k!(1184, at, sub => half_nibbles(at.add(160 + 256 * (sub / 2)), sub % 2)),
            WeightType::Q5K => blocks_k!(1440, at, sub => {
                if sub % 2 == 0 { fives_k::<false>(at, sub / 2) } else { fives_k::<true>(at, sub / 2) }
            }),
            _ => {
                for block in 0..count {
                    let (at, sub) = (group.add((first + block) / 8 * 1680), (first + block) % 8);
                    let to = to.add(block * CODES_BYTES);
                    let (a, b) = (sixes(at.add(144 + 192 * sub)), sixes(at.add(240 + 192 * sub)));
                    put(to, [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]], halves(at));
                    let factors = [0, 1].map(|half| at.add(16 + 16 * sub + 8 * half));
                    put_factors(to, [row_signed_bytes(factors[0]), row_signed_bytes(factors[1])]);
                }
            }
        }
    }
}

/// As [`unpack`], with scales that hold the factors, and where halves have scales of their own the second's for minima.
///
/// # Safety
/// As [`unpack`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_bytes(weight_type: WeightType, group: *const u8, first: usize, count: usize, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        if weight_type.block_len() != 256 {
            unpack(weight_type, group, first, count, to);
            return;
        }
        for block in 0..count {
            let sub = (first + block) % 8;
            let at = group.add(group_bytes(weight_type, (first + block) / 8 * 256));
            let to = to.add(block * CODES_BYTES);
            let second = to.add(MINIMA).cast::<__m256>();
            let d = halves(at);
            if weight_type == WeightType::Q6K {
                let (a, b) = (sixes(at.add(144 + 192 * sub)), sixes(at.add(240 + 192 * sub)));
                let steps = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
                put(to, steps, signed_scales(d, at.add(16 + 16 * sub)));
                second.write(signed_scales(d, at.add(24 + 16 * sub)));
            } else {
                let steps = match (weight_type, sub % 2) {
                    (WeightType::Q4K, high) => half_nibbles(at.add(160 + 256 * (sub / 2)), high),
                    (_, 0) => fives_k::<false>(at, sub / 2),
                    _ => fives_k::<true>(at, sub / 2),
                };
                put(to, steps, scales(d, at.add(32 + 8 * sub)));
                let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)));
                second.write(minima(negated_dmin, at.add(96 + 8 * sub)));
            }
        }
    }
}

/// Eight planes of nibbles: the low ones, or the high ones.
///
/// # Safety
/// The processor has AVX2; 256 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_nibbles(at: *const u8, high: usize) -> [__m256i; 8] {
    let (mask, shift) = (_mm256_set1_epi8(15), _mm_cvtsi32_si128(4 * high as i32));
    let mut steps = [mask; 8];
    for j in 0..8 {
        // SAFETY: the caller's promise.
        steps[j] = _mm256_and_si256(_mm256_srl_epi16(unsafe { load(at.add(32 * j)) }, shift), mask);
    }
    steps
}

/// Stores step vectors and scales of a block.
///
/// # Safety
/// The processor has AVX2; `to` is a block of the room.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(to: *mut u8, steps: [__m256i; 8], scales: __m256) {
    // SAFETY: the caller's promise.
    unsafe {
        for (j, step) in steps.into_iter().enumerate() {
            to.add(32 * j).cast::<__m256i>().write(step);
        }
        to.add(SCALES).cast::<__m256>().write(scales);
    }
}

/// Stores factors of each half. Those of the high parts are at most `128 × 128`, and sums stay below 2^31.
///
/// # Safety
/// As [`put`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put_factors(to: *mut u8, factors: [__m256i; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        for (half, factors) in factors.into_iter().enumerate() {
            to.add(FACTORS + 64 * half).cast::<__m256i>().write(_mm256_slli_epi16(factors, 7));
            to.add(FACTORS + 64 * half + 32).cast::<__m256i>().write(factors);
        }
    }
}

/// As [`unpack`], Q8_0 as sixteen steps of 16-bit codes with the scales behind them.
///
/// # Safety
/// As [`unpack`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_words(_: WeightType, group: *const u8, first: usize, count: usize, to: *mut u8) {
    const Z: i8 = -1;
    let even = _mm256_setr_epi8(
        Z, 0, Z, 1, Z, 4, Z, 5, Z, 8, Z, 9, Z, 12, Z, 13, //
        Z, 0, Z, 1, Z, 4, Z, 5, Z, 8, Z, 9, Z, 12, Z, 13,
    );
    let odd = _mm256_setr_epi8(
        Z, 2, Z, 3, Z, 6, Z, 7, Z, 10, Z, 11, Z, 14, Z, 15, //
        Z, 2, Z, 3, Z, 6, Z, 7, Z, 10, Z, 11, Z, 14, Z, 15,
    );
    for block in 0..count {
        // SAFETY: block `first + block` of the group; its place in the room.
        unsafe {
            let at = group.add((first + block) * 272);
            let to = to.add(block * CODES_BYTES);
            for j in 0..8 {
                let codes = load(at.add(16 + 32 * j));
                let steps = to.add(64 * j).cast::<__m256i>();
                steps.write(_mm256_srai_epi16(_mm256_shuffle_epi8(codes, even), 8));
                steps.add(1).write(_mm256_srai_epi16(_mm256_shuffle_epi8(codes, odd), 8));
            }
            to.add(512).cast::<__m256>().write(halves(at));
        }
    }
}

/// `$part!` for each row: its number, then the numbers of its three registers.
macro_rules! each {
    (4 $part:ident $($rest:tt)*) => {
        concat!(
            $part!(0 0 4 8 $($rest)*), $part!(1 1 5 9 $($rest)*), $part!(2 2 6 10 $($rest)*), $part!(3 3 7 11 $($rest)*),
        )
    };
    (3 $part:ident $($rest:tt)*) => {
        concat!($part!(0 0 4 8 $($rest)*), $part!(1 1 5 9 $($rest)*), $part!(2 2 6 10 $($rest)*))
    };
    (2 $part:ident $($rest:tt)*) => {
        concat!($part!(0 0 4 8 $($rest)*), $part!(1 1 5 9 $($rest)*))
    };
}

/// The vector of row `$row` in place `$place` of a spread block of `$rows` rows.
macro_rules! vector {
    ($rows:literal $place:literal $row:literal) => {
        concat!("[{x} + 32*(", $rows, "*", $place, "+", $row, ")]")
    };
}

/// A step that starts the sums of a half.
macro_rules! start {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $of_hi:literal $of_lo:literal) => {
        concat!(
            "vpmaddubsw ymm", $hi, ", ymm15, ", vector!($rows $of_hi $row), "\n",
            "vpmaddubsw ymm", $lo, ", ymm15, ", vector!($rows $of_lo $row), "\n",
        )
    };
}

/// Another step.
macro_rules! step {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $of_hi:literal $of_lo:literal) => {
        concat!(
            "vpmaddubsw ymm14, ymm15, ", vector!($rows $of_hi $row), "\n",
            "vpmaddubsw ymm13, ymm15, ", vector!($rows $of_lo $row), "\n",
            "vpaddw ymm", $hi, ", ymm", $hi, ", ymm14\n",
            "vpaddw ymm", $lo, ", ymm", $lo, ", ymm13\n",
        )
    };
}

/// What centres the codes of a half.
macro_rules! centre {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $of_hi:literal $of_lo:literal) => {
        concat!(
            "vpaddw ymm", $hi, ", ymm", $hi, ", ", vector!($rows $of_hi $row), "\n",
            "vpaddw ymm", $lo, ", ymm", $lo, ", ", vector!($rows $of_lo $row), "\n",
        )
    };
}

/// The first half's sum, of the high parts.
macro_rules! first {
    ($row:literal $hi:literal $lo:literal $sum:literal) => {
        concat!("vpmaddwd ymm", $sum, ", ymm", $hi, ", ymm15\n")
    };
}

macro_rules! add_hi {
    ($row:literal $hi:literal $lo:literal $sum:literal) => {
        concat!("vpmaddwd ymm14, ymm", $hi, ", ymm15\nvpaddd ymm", $sum, ", ymm", $sum, ", ymm14\n")
    };
}

macro_rules! add_lo {
    ($row:literal $hi:literal $lo:literal $sum:literal) => {
        concat!("vpmaddwd ymm14, ymm", $lo, ", ymm15\nvpaddd ymm", $sum, ", ymm", $sum, ", ymm14\n")
    };
}

/// `sum = sum × (d × d_input) + what there was`; ymm15 holds `d`.
macro_rules! scale {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal) => {
        concat!(
            "vcvtdq2ps ymm", $sum, ", ymm", $sum, "\n",
            "vmulps ymm14, ymm15, ", vector!($rows 20 $row), "\n",
            "vfmadd213ps ymm", $sum, ", ymm14, [{o} + 32*", $row, "]\n",
        )
    };
}

macro_rules! minimum {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal) => {
        concat!("vfmadd231ps ymm", $sum, ", ymm15, ", vector!($rows 21 $row), "\n")
    };
}

macro_rules! store {
    ($row:literal $hi:literal $lo:literal $sum:literal) => {
        concat!("vmovaps [{o} + 32*", $row, "], ymm", $sum, "\n")
    };
}

/// Half a block: four steps from the byte `$at` of the codes and the places `$a` to `$d` of the input; `$centre` is empty, or the
/// places of what centres.
macro_rules! half {
    ($rows:tt [$at0:literal $a:literal $a1:literal] $([$at:literal $hi:literal $lo:literal])+, $($centre:literal)*) => {
        concat!(
            "vmovdqa ymm15, [{p} + ", $at0, "]\n", each!($rows start $rows $a $a1),
            $("vmovdqa ymm15, [{p} + ", $at, "]\n", each!($rows step $rows $hi $lo),)+
            half!(@centre $rows $($centre)*),
        )
    };
    (@centre $rows:tt) => { "" };
    (@centre $rows:tt $hi:literal $lo:literal) => { each!($rows centre $rows $hi $lo) };
}

macro_rules! split_block {
    ($rows:tt [$($first_centre:literal)*] [$($second_centre:literal)*]) => {
        concat!(
            half!($rows [0 0 1] [32 2 3] [64 4 5] [96 6 7], $($first_centre)*),
            "vmovdqa ymm15, [{f}]\n", each!($rows first),
            "vmovdqa ymm15, [{f} + 32]\n", each!($rows add_lo),
            half!($rows [128 8 9] [160 10 11] [192 12 13] [224 14 15], $($second_centre)*),
            "vmovdqa ymm15, [{f} + 64]\n", each!($rows add_hi),
            "vmovdqa ymm15, [{f} + 96]\n", each!($rows add_lo),
            "vmovaps ymm15, [{p} + 256]\n", each!($rows scale $rows),
        )
    };
}

macro_rules! end {
    ($rows:literal) => {
        concat!("add {p}, 576\nadd {f}, {fs}\nadd {x}, 704*", $rows, "\ndec {n}\njnz 2b\n")
    };
}

// The numbers written out in the assembly.
const _: () = assert!(SPREAD_BYTES == 704 && CODES_BYTES == 576 && SCALES == 256 && MINIMA == 288);

/// `$rows` input rows times one group over `count` blocks.
macro_rules! split_tile {
    ($name:ident, $rows:tt) => {
        /// # Safety
        /// The processor has AVX2; `codes`, `input`, and `factors` with its step, have `count` blocks; `sums` has eight for each
        /// row, which it goes on with; all are aligned to 32 bytes; `count` is not 0.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name<const MINIMUM: bool>(
            codes: *const u8,
            input: *const u8,
            factors: *const u8,
            factors_step: usize,
            count: usize,
            sums: *mut f32,
        ) {
            // SAFETY: reads codes, input and factors block by block, updates the sums; every register it uses is declared.
            unsafe {
                if MINIMUM {
                    tile_asm!(
                        codes, input, factors, factors_step, count, sums,
                        concat!(
                            "2:\n",
                            split_block!($rows [] []),
                            "vmovaps ymm15, [{p} + 288]\n",
                            each!($rows minimum $rows),
                            each!($rows store),
                            end!($rows)
                        )
                    );
                } else {
                    tile_asm!(
                        codes, input, factors, factors_step, count, sums,
                        concat!("2:\n", split_block!($rows [16 17] [18 19]), each!($rows store), end!($rows))
                    );
                }
            }
        }
    };
}

macro_rules! tile_asm {
    ($codes:ident, $input:ident, $factors:ident, $step:ident, $count:ident, $sums:ident, $body:expr) => {
        asm!(
            $body,
            p = inout(reg) $codes => _,
            x = inout(reg) $input => _,
            f = inout(reg) $factors => _,
            fs = in(reg) $step,
            n = inout(reg) $count => _,
            o = in(reg) $sums,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack),
        )
    };
}

split_tile!(split2, 2);
split_tile!(split3, 3);
split_tile!(split4, 4);

/// A step of 16-bit codes that starts the sums.
macro_rules! start_words {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $place:literal) => {
        concat!("vpmaddwd ymm", $sum, ", ymm15, ", vector!($rows $place $row), "\n")
    };
}

macro_rules! step_words {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $place:literal) => {
        concat!(
            "vpmaddwd ymm14, ymm15, ", vector!($rows $place $row), "\n",
            "vpaddd ymm", $sum, ", ymm", $sum, ", ymm14\n",
        )
    };
}

macro_rules! words_block {
    ($rows:tt $($j:literal)+) => {
        concat!(
            "vmovdqa ymm15, [{p}]\n", each!($rows start_words $rows 0),
            $("vmovdqa ymm15, [{p} + 32*", $j, "]\n", each!($rows step_words $rows $j),)+
            "vmovaps ymm15, [{p} + 512]\n", each!($rows scale $rows),
        )
    };
}

macro_rules! wide_tile {
    ($name:ident, $rows:tt) => {
        /// # Safety
        /// As [`split4`]; factors are not read.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(
            codes: *const u8,
            input: *const u8,
            factors: *const u8,
            factors_step: usize,
            count: usize,
            sums: *mut f32,
        ) {
            // SAFETY: reads codes and input block by block, updates the sums; every register it uses is declared.
            unsafe {
                tile_asm!(
                    codes, input, factors, factors_step, count, sums,
                    concat!(
                        "2:\n",
                        words_block!($rows 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
                        each!($rows store),
                        end!($rows)
                    )
                );
            }
        }
    };
}

wide_tile!(wide2, 2);
wide_tile!(wide3, 3);
wide_tile!(wide4, 4);

/// A step of 8-bit codes that starts the sums.
macro_rules! start_bytes {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $place:literal) => {
        concat!("vpmaddubsw ymm", $hi, ", ymm15, ", vector!($rows $place $row), "\n")
    };
}

macro_rules! step_bytes {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $place:literal) => {
        concat!(
            "vpmaddubsw ymm14, ymm15, ", vector!($rows $place $row), "\n",
            "vpaddw ymm", $hi, ", ymm", $hi, ", ymm14\n",
        )
    };
}

macro_rules! centre_bytes {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal $place:literal) => {
        concat!("vpaddw ymm", $hi, ", ymm", $hi, ", ", vector!($rows $place $row), "\n")
    };
}

/// `sum = dot × (scale × d_input) + what there was`; ymm15 holds the scales, ymm12 ones.
macro_rules! scale_bytes {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal) => {
        concat!(
            "vpmaddwd ymm", $hi, ", ymm", $hi, ", ymm12\n",
            "vcvtdq2ps ymm", $sum, ", ymm", $hi, "\n",
            "vmulps ymm14, ymm15, ", vector!($rows 20 $row), "\n",
            "vfmadd213ps ymm", $sum, ", ymm14, [{o} + 32*", $row, "]\n",
        )
    };
}

/// `sum += dot × (scale × d_input)`.
macro_rules! scale_second {
    ($row:literal $hi:literal $lo:literal $sum:literal $rows:literal) => {
        concat!(
            "vpmaddwd ymm", $hi, ", ymm", $hi, ", ymm12\n",
            "vcvtdq2ps ymm", $hi, ", ymm", $hi, "\n",
            "vmulps ymm14, ymm15, ", vector!($rows 20 $row), "\n",
            "vfmadd231ps ymm", $sum, ", ymm", $hi, ", ymm14\n",
        )
    };
}

/// Steps `$first`, then `$j`.
macro_rules! byte_steps {
    ($rows:tt $first:literal $($j:literal)+) => {
        concat!(
            "vmovdqa ymm15, [{p} + 32*", $first, "]\n", each!($rows start_bytes $rows $first),
            $("vmovdqa ymm15, [{p} + 32*", $j, "]\n", each!($rows step_bytes $rows $j),)+
        )
    };
}

macro_rules! byte_block {
    ($rows:tt WHOLE) => {
        concat!(
            byte_steps!($rows 0 1 2 3 4 5 6 7),
            "vmovaps ymm15, [{p} + 256]\n", each!($rows scale_bytes $rows),
            "vmovaps ymm15, [{p} + 288]\n", each!($rows minimum $rows),
        )
    };
    ($rows:tt CENTRED) => {
        concat!(
            byte_steps!($rows 0 1 2 3 4 5 6 7), each!($rows centre_bytes $rows 16),
            "vmovaps ymm15, [{p} + 256]\n", each!($rows scale_bytes $rows),
        )
    };
    ($rows:tt HALVED) => {
        concat!(
            byte_steps!($rows 0 1 2 3),
            "vmovaps ymm15, [{p} + 256]\n", each!($rows scale_bytes $rows),
            byte_steps!($rows 4 5 6 7),
            "vmovaps ymm15, [{p} + 256]\n", each!($rows scale_second $rows),
            "vmovaps ymm15, [{p} + 288]\n", each!($rows minimum $rows),
        )
    };
    ($rows:tt CENTRED_HALVES) => {
        concat!(
            byte_steps!($rows 0 1 2 3), each!($rows centre_bytes $rows 16),
            "vmovaps ymm15, [{p} + 256]\n", each!($rows scale_bytes $rows),
            byte_steps!($rows 4 5 6 7), each!($rows centre_bytes $rows 17),
            "vmovaps ymm15, [{p} + 288]\n", each!($rows scale_second $rows),
        )
    };
}

macro_rules! byte_asm {
    ($rows:tt $kind:tt $codes:ident $input:ident $factors:ident $step:ident $count:ident $sums:ident) => {
        tile_asm!(
            $codes, $input, $factors, $step, $count, $sums,
            concat!(
                "vpcmpeqw ymm12, ymm12, ymm12\nvpabsw ymm12, ymm12\n2:\n",
                byte_block!($rows $kind),
                each!($rows store),
                end!($rows)
            )
        )
    };
}

macro_rules! byte_tile {
    ($name:ident, $rows:tt) => {
        /// # Safety
        /// As [`split4`]; factors are not read.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name<const KIND: u8>(
            codes: *const u8,
            input: *const u8,
            factors: *const u8,
            factors_step: usize,
            count: usize,
            sums: *mut f32,
        ) {
            // SAFETY: reads codes and input block by block, updates the sums; every register it uses is declared.
            unsafe {
                match KIND {
                    WHOLE => byte_asm!($rows WHOLE codes input factors factors_step count sums),
                    CENTRED => byte_asm!($rows CENTRED codes input factors factors_step count sums),
                    HALVED => byte_asm!($rows HALVED codes input factors factors_step count sums),
                    _ => byte_asm!($rows CENTRED_HALVES codes input factors factors_step count sums),
                }
            }
        }
    };
}

byte_tile!(bytes2, 2);
byte_tile!(bytes3, 3);
byte_tile!(bytes4, 4);

// Types with a minimum have codes that are not centred, and the other way round.
const _: () = assert!(has_minimum(WeightType::Q4_1) && has_minimum(WeightType::Q5K) && !has_minimum(WeightType::Q6K));
