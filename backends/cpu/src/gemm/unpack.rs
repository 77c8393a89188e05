//! Unpacking of groups into 16-bit panels, for AVX2.
//!
//! A panel block (32 input features, two groups) is `[16 steps][2 groups]` of eight rows × two 16-bit codes, then scales and
//! minima f32 `[2][8]` each. Codes are centred, and for K types multiplied by the sub-block's scale: at most
//! `32 × 128 = 4096`, so that 32 products with codes of the input stay below 2^31.
#![allow(unsafe_code, reason = "vector loads and stores through raw pointers")]

use super::tiles::Part;
use super::{PANEL_BLOCK_BYTES, PanelJob};
use crate::gemv::avx2::{fives, fives_k, halves, load, minima, nibbles, row_bytes, row_signed_bytes, sixes};
use npuhal_models::WeightType;
use std::arch::x86_64::*;

/// Offset of the scales in a panel block.
pub(crate) const SCALES: usize = 1024;
/// Offset of the minima in a panel block.
pub(crate) const MINIMA: usize = 1088;

/// Unpacks a part of the group at `group` into lane `lane` of the panel.
///
/// # Safety
/// The processor has AVX2; the group is readable; the panel has room for the part.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack(job: &PanelJob<'_>, part: Part, group: *const u8, panel: *mut u8, lane: usize) {
    // SAFETY: all of the caller's promise.
    unsafe {
        let (group, panel) = (group.add(part.offset_bytes(job)), panel.add(32 * lane));
        match job.weight_type {
            WeightType::Q4_0 => q4_0(group, part.count, panel),
            WeightType::Q4_1 => q4_1(group, part.count, panel),
            WeightType::Q5_0 => q5_0(group, part.count, panel),
            WeightType::Q5_1 => q5_1(group, part.count, panel),
            WeightType::Q8_0 => q8_0(group, part.count, panel),
            WeightType::Q4K => q4_k(group, part.blocks_of(256), panel),
            WeightType::Q5K => q5_k(group, part.blocks_of(256), panel),
            _ => q6_k(group, part.blocks_of(256), panel),
        }
    }
}

/// Stores step vector `j` as two steps of 16-bit codes, each minus `centre`, times `scale`.
///
/// # Safety
/// `block` is a panel block's lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(block: *mut u8, j: usize, codes: __m256i, change: impl Fn(__m256i) -> __m256i) {
    const Z: i8 = -1;
    let first = _mm256_setr_epi8(
        0, Z, 1, Z, 4, Z, 5, Z, 8, Z, 9, Z, 12, Z, 13, Z, //
        0, Z, 1, Z, 4, Z, 5, Z, 8, Z, 9, Z, 12, Z, 13, Z,
    );
    let second = _mm256_setr_epi8(
        2, Z, 3, Z, 6, Z, 7, Z, 10, Z, 11, Z, 14, Z, 15, Z, //
        2, Z, 3, Z, 6, Z, 7, Z, 10, Z, 11, Z, 14, Z, 15, Z,
    );
    // SAFETY: two steps of this lane.
    unsafe {
        let at = block.add(128 * j);
        _mm256_storeu_si256(at.cast(), change(_mm256_shuffle_epi8(codes, first)));
        _mm256_storeu_si256(at.add(64).cast(), change(_mm256_shuffle_epi8(codes, second)));
    }
}

/// # Safety
/// As [`put`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put_row(block: *mut u8, at: usize, values: __m256) {
    // SAFETY: eight f32 of this lane.
    unsafe { _mm256_storeu_ps(block.add(at).cast(), values) };
}

macro_rules! unpack32 {
    ($name:ident, $bytes:expr, $codes:expr, $from:expr, $centre:expr, $minimum:expr) => {
        /// # Safety
        /// As [`unpack`].
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(group: *const u8, blocks: usize, panel: *mut u8) {
            let centre = _mm256_set1_epi16($centre);
            for index in 0..blocks {
                // SAFETY: block `index` of the group and of the panel.
                unsafe {
                    let at = group.add(index * $bytes);
                    let block = panel.add(index * PANEL_BLOCK_BYTES);
                    let codes = $codes(at.add($from));
                    for (j, &codes) in codes.iter().enumerate() {
                        put(block, j, codes, |v| _mm256_sub_epi16(v, centre));
                    }
                    put_row(block, SCALES, halves(at));
                    put_row(block, MINIMA, if $minimum { halves(at.add(16)) } else { _mm256_setzero_ps() });
                }
            }
        }
    };
}

unpack32!(q4_0, 144, nibbles, 16, 8, false);
unpack32!(q4_1, 160, nibbles, 32, 0, true);
unpack32!(q5_0, 176, fives, 16, 16, false);
unpack32!(q5_1, 192, fives, 32, 0, true);

/// # Safety
/// As [`unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q8_0(group: *const u8, blocks: usize, panel: *mut u8) {
    const Z: i8 = -1;
    let first = _mm256_setr_epi8(
        Z, 0, Z, 1, Z, 4, Z, 5, Z, 8, Z, 9, Z, 12, Z, 13, //
        Z, 0, Z, 1, Z, 4, Z, 5, Z, 8, Z, 9, Z, 12, Z, 13,
    );
    let second = _mm256_setr_epi8(
        Z, 2, Z, 3, Z, 6, Z, 7, Z, 10, Z, 11, Z, 14, Z, 15, //
        Z, 2, Z, 3, Z, 6, Z, 7, Z, 10, Z, 11, Z, 14, Z, 15,
    );
    for index in 0..blocks {
        // SAFETY: block `index` of the group and of the panel.
        unsafe {
            let at = group.add(index * 272);
            let block = panel.add(index * PANEL_BLOCK_BYTES);
            for j in 0..8 {
                let codes = load(at.add(16 + 32 * j));
                let to = block.add(128 * j);
                _mm256_storeu_si256(to.cast(), _mm256_srai_epi16(_mm256_shuffle_epi8(codes, first), 8));
                _mm256_storeu_si256(to.add(64).cast(), _mm256_srai_epi16(_mm256_shuffle_epi8(codes, second), 8));
            }
            put_row(block, SCALES, halves(at));
            put_row(block, MINIMA, _mm256_setzero_ps());
        }
    }
}

/// # Safety
/// As [`unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4_k(group: *const u8, blocks: usize, panel: *mut u8) {
    let mask = _mm256_set1_epi8(15);
    for index in 0..blocks {
        // SAFETY: block `index` of the group, and its eight blocks of the panel.
        unsafe {
            let at = group.add(index * 1184);
            for c in 0..4 {
                let block = panel.add((8 * index + 2 * c) * PANEL_BLOCK_BYTES);
                let next = block.add(PANEL_BLOCK_BYTES);
                let (low_scale, high_scale) = (row_bytes(at.add(32 + 16 * c)), row_bytes(at.add(40 + 16 * c)));
                for j in 0..8 {
                    let codes = load(at.add(160 + 256 * c + 32 * j));
                    let high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask);
                    put(block, j, _mm256_and_si256(codes, mask), |v| _mm256_mullo_epi16(v, low_scale));
                    put(next, j, high, |v| _mm256_mullo_epi16(v, high_scale));
                }
                put_k_rows(at, 2 * c, block);
                put_k_rows(at, 2 * c + 1, next);
            }
        }
    }
}

/// # Safety
/// As [`unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q5_k(group: *const u8, blocks: usize, panel: *mut u8) {
    for index in 0..blocks {
        // SAFETY: block `index` of the group, and its eight blocks of the panel.
        unsafe {
            let at = group.add(index * 1440);
            for sub in 0..8 {
                let block = panel.add((8 * index + sub) * PANEL_BLOCK_BYTES);
                let codes = fives_k(at, sub);
                let scale = row_bytes(at.add(32 + 8 * sub));
                for (j, &codes) in codes.iter().enumerate() {
                    put(block, j, codes, |v| _mm256_mullo_epi16(v, scale));
                }
                put_k_rows(at, sub, block);
            }
        }
    }
}

/// Scales and minima of sub-block `sub` of a Q4_K or Q5_K block.
///
/// # Safety
/// As [`unpack`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put_k_rows(at: *const u8, sub: usize, block: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        let negated_dmin = _mm256_xor_ps(_mm256_set1_ps(-0.0), halves(at.add(16)));
        put_row(block, SCALES, halves(at));
        put_row(block, MINIMA, minima(negated_dmin, at.add(96 + 8 * sub)));
    }
}

/// # Safety
/// As [`unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q6_k(group: *const u8, blocks: usize, panel: *mut u8) {
    let centre = _mm256_set1_epi16(32);
    for index in 0..blocks {
        // SAFETY: block `index` of the group, and its eight blocks of the panel.
        unsafe {
            let at = group.add(index * 1680);
            for sub in 0..16 {
                let block = panel.add((8 * index + sub / 2) * PANEL_BLOCK_BYTES);
                let scale = row_signed_bytes(at.add(16 + 8 * sub));
                for (j, &codes) in sixes(at.add(144 + 96 * sub)).iter().enumerate() {
                    let step = 4 * (sub % 2) + j;
                    put(block, step, codes, |v| _mm256_mullo_epi16(_mm256_sub_epi16(v, centre), scale));
                }
                put_row(block, SCALES, halves(at));
                put_row(block, MINIMA, _mm256_setzero_ps());
            }
        }
    }
}
