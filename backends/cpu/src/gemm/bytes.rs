//! GEMM with inputs of 8 bits, for AVX2, FMA and F16C.
//!
//! A panel block (32 input features, two groups) is `[8 steps][2 groups]` of step vectors, then two rows of f32
//! `[2 groups][8]`: scales, and minima or the scales of the second half. The inner tile is that of [`super::avx2`], with
//! `maddubs` into 16-bit sums, whose limits are those of [`crate::gemv::bytes`].
#![allow(unsafe_code, reason = "assembly tile and raw pointers of a job")]

use super::tiles::{Part, run_tiles};
use super::{BYTE_PANEL_BLOCK_BYTES, PanelJob, portable};
use crate::activations::ByteBlock;
use crate::gemv::avx2::{fives, fives_k, halves, load, minima, nibbles, sixes};
use crate::gemv::bytes::{scales, signed_scales};
use crate::packed::GROUP_ROWS;
use crate::table::PanelKernel;
use npuhal_models::WeightType;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

pub(crate) fn byte_kernel(weight_type: WeightType) -> PanelKernel {
    match weight_type {
        WeightType::Q4_0 => centred8,
        WeightType::Q4_1 | WeightType::Q4K => whole,
        WeightType::Q5_0 => centred16,
        WeightType::Q5_1 | WeightType::Q5K => halved,
        WeightType::Q6K => centred32,
        _ => portable::byte_kernel(weight_type),
    }
}

// The numbers written out in the assembly.
const _: () = assert!(BYTE_PANEL_BLOCK_BYTES == 640 && size_of::<ByteBlock>() == 64);
const _: () = assert!(offset_of!(ByteBlock, d) == 32 && offset_of!(ByteBlock, s) == 36);
const _: () = assert!(offset_of!(ByteBlock, centre8) == 40 && offset_of!(ByteBlock, centre16) == 44);
const _: () = assert!(offset_of!(ByteBlock, centre32) == 48);

/// Offset of the scales in a panel block.
pub(crate) const FIRST_ROW: usize = 512;
/// Offset of the minima, or of the scales of the second half.
pub(crate) const SECOND_ROW: usize = 576;

/// Factors of the sum of neighbours.
static ONES: Ones = Ones([1; 16]);

#[repr(C, align(32))]
struct Ones([i16; 16]);

/// A panel kernel: unpacks each part, then runs its tiles.
macro_rules! panel {
    ($name:ident, $tile3:ident, $tile2:ident, $tile1:ident) => {
        /// # Safety
        /// The processor has AVX2; the job's pointers cover the groups of its rows, its input rows and its results.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(job: &PanelJob<'_>, scratch: &mut [u8]) {
            run_tiles!(job, scratch, byte, unpack_bytes, [$tile3, $tile2, $tile1]);
        }
    };
}

panel!(whole, whole3, whole2, whole1);
panel!(centred8, centred8_3, centred8_2, centred8_1);
panel!(centred16, centred16_3, centred16_2, centred16_1);
panel!(halved, halved3, halved2, halved1);
panel!(centred32, centred32_3, centred32_2, centred32_1);

/// Loads a step's two weight vectors.
macro_rules! weights {
    ($at:literal) => {
        concat!("vmovdqa ymm12, [{p} + ", $at, "]\n", "vmovdqa ymm13, [{p} + ", $at, " + 32]\n")
    };
}

/// A step of one input row whose products start the sums.
macro_rules! first {
    ($token:literal, $k:literal, $s0:literal, $s1:literal) => {
        concat!(
            "vpbroadcastd ymm14, [",
            $token,
            " + ",
            $k,
            "]\n",
            "vpmaddubsw ",
            $s0,
            ", ymm12, ymm14\n",
            "vpmaddubsw ",
            $s1,
            ", ymm13, ymm14\n",
        )
    };
}

/// Start values of one input row.
macro_rules! start {
    ($token:literal, $at:literal, $s0:literal, $s1:literal) => {
        concat!(
            "vpbroadcastd ",
            $s0,
            ", [",
            $token,
            " + ",
            $at,
            "]\n",
            "vpbroadcastd ",
            $s1,
            ", [",
            $token,
            " + ",
            $at,
            "]\n",
        )
    };
}

/// Another step of one input row.
macro_rules! next {
    ($token:literal, $k:literal, $s0:literal, $s1:literal) => {
        concat!(
            "vpbroadcastd ymm14, [",
            $token,
            " + ",
            $k,
            "]\n",
            "vpmaddubsw ymm15, ymm12, ymm14\n",
            "vpaddw ",
            $s0,
            ", ",
            $s0,
            ", ymm15\n",
            "vpmaddubsw ymm15, ymm13, ymm14\n",
            "vpaddw ",
            $s1,
            ", ",
            $s1,
            ", ymm15\n",
        )
    };
}

/// `acc += sum × (d × d_input)` for one input row; the scales lie at `$scales`, ymm15 holds ones.
macro_rules! scale {
    ($token:literal, $scales:literal, $s0:literal, $s1:literal, $a0:literal, $a1:literal) => {
        concat!(
            "vbroadcastss ymm14, [",
            $token,
            " + 32]\n",
            "vpmaddwd ",
            $s0,
            ", ",
            $s0,
            ", ymm15\n",
            "vpmaddwd ",
            $s1,
            ", ",
            $s1,
            ", ymm15\n",
            "vcvtdq2ps ",
            $s0,
            ", ",
            $s0,
            "\n",
            "vcvtdq2ps ",
            $s1,
            ", ",
            $s1,
            "\n",
            "vmulps ymm12, ymm14, [{p} + ",
            $scales,
            "]\n",
            "vmulps ymm13, ymm14, [{p} + ",
            $scales,
            " + 32]\n",
            "vfmadd231ps ",
            $a0,
            ", ",
            $s0,
            ", ymm12\n",
            "vfmadd231ps ",
            $a1,
            ", ",
            $s1,
            ", ymm13\n",
        )
    };
}

/// Then `acc += minimum × s_input`.
macro_rules! minimum {
    ($token:literal, $a0:literal, $a1:literal) => {
        concat!(
            "vbroadcastss ymm14, [",
            $token,
            " + 36]\n",
            "vfmadd231ps ",
            $a0,
            ", ymm14, [{p} + 576]\n",
            "vfmadd231ps ",
            $a1,
            ", ymm14, [{p} + 576 + 32]\n",
        )
    };
}

/// A part for each of some input rows, by their number: `rows!(number part arguments)`.
macro_rules! rows {
    (3 start $at:literal) => {
        concat!(
            start!("{t}", $at, "ymm0", "ymm1"),
            start!("{t} + {s}", $at, "ymm2", "ymm3"),
            start!("{t} + 2*{s}", $at, "ymm4", "ymm5"),
        )
    };
    (2 start $at:literal) => {
        concat!(start!("{t}", $at, "ymm0", "ymm1"), start!("{t} + {s}", $at, "ymm2", "ymm3"))
    };
    (1 start $at:literal) => {
        start!("{t}", $at, "ymm0", "ymm1")
    };
    (3 $step:ident $at:literal $k:literal) => {
        concat!(
            weights!($at),
            $step!("{t}", $k, "ymm0", "ymm1"),
            $step!("{t} + {s}", $k, "ymm2", "ymm3"),
            $step!("{t} + 2*{s}", $k, "ymm4", "ymm5"),
        )
    };
    (2 $step:ident $at:literal $k:literal) => {
        concat!(weights!($at), $step!("{t}", $k, "ymm0", "ymm1"), $step!("{t} + {s}", $k, "ymm2", "ymm3"))
    };
    (1 $step:ident $at:literal $k:literal) => {
        concat!(weights!($at), $step!("{t}", $k, "ymm0", "ymm1"))
    };
    (3 scale $scales:literal) => {
        concat!(
            "vmovdqa ymm15, [{ones}]\n",
            scale!("{t}", $scales, "ymm0", "ymm1", "ymm6", "ymm7"),
            scale!("{t} + {s}", $scales, "ymm2", "ymm3", "ymm8", "ymm9"),
            scale!("{t} + 2*{s}", $scales, "ymm4", "ymm5", "ymm10", "ymm11"),
        )
    };
    (2 scale $scales:literal) => {
        concat!(
            "vmovdqa ymm15, [{ones}]\n",
            scale!("{t}", $scales, "ymm0", "ymm1", "ymm6", "ymm7"),
            scale!("{t} + {s}", $scales, "ymm2", "ymm3", "ymm8", "ymm9"),
        )
    };
    (1 scale $scales:literal) => {
        concat!("vmovdqa ymm15, [{ones}]\n", scale!("{t}", $scales, "ymm0", "ymm1", "ymm6", "ymm7"))
    };
    (3 minimum) => {
        concat!(
            minimum!("{t}", "ymm6", "ymm7"),
            minimum!("{t} + {s}", "ymm8", "ymm9"),
            minimum!("{t} + 2*{s}", "ymm10", "ymm11"),
        )
    };
    (2 minimum) => {
        concat!(minimum!("{t}", "ymm6", "ymm7"), minimum!("{t} + {s}", "ymm8", "ymm9"))
    };
    (1 minimum) => {
        minimum!("{t}", "ymm6", "ymm7")
    };
}

/// Steps 1 to 3, and 5 to 7.
macro_rules! later_steps {
    ($rows:tt first half) => {
        concat!(rows!($rows next "64" "4"), rows!($rows next "128" "8"), rows!($rows next "192" "12"))
    };
    ($rows:tt second half) => {
        concat!(rows!($rows next "320" "20"), rows!($rows next "384" "24"), rows!($rows next "448" "28"))
    };
}

/// A panel block for some input rows.
macro_rules! block {
    ($rows:tt whole) => {
        concat!(
            rows!($rows first "0" "0"),
            later_steps!($rows first half),
            rows!($rows next "256" "16"),
            later_steps!($rows second half),
            rows!($rows scale "512"),
            rows!($rows minimum),
        )
    };
    ($rows:tt centred $at:literal) => {
        concat!(
            rows!($rows start $at),
            rows!($rows next "0" "0"),
            later_steps!($rows first half),
            rows!($rows next "256" "16"),
            later_steps!($rows second half),
            rows!($rows scale "512"),
        )
    };
    ($rows:tt halved) => {
        concat!(
            rows!($rows first "0" "0"),
            later_steps!($rows first half),
            rows!($rows scale "512"),
            rows!($rows first "256" "16"),
            later_steps!($rows second half),
            rows!($rows scale "512"),
            rows!($rows minimum),
        )
    };
    ($rows:tt centred halves) => {
        concat!(
            rows!($rows start "48"),
            rows!($rows next "0" "0"),
            later_steps!($rows first half),
            rows!($rows scale "512"),
            rows!($rows start "52"),
            rows!($rows next "256" "16"),
            later_steps!($rows second half),
            rows!($rows scale "576"),
        )
    };
}

macro_rules! load {
    (3) => {
        "vmovaps ymm6, [{o}]
         vmovaps ymm7, [{o} + 32]
         vmovaps ymm8, [{o} + 64]
         vmovaps ymm9, [{o} + 96]
         vmovaps ymm10, [{o} + 128]
         vmovaps ymm11, [{o} + 160]"
    };
    (2) => {
        "vmovaps ymm6, [{o}]
         vmovaps ymm7, [{o} + 32]
         vmovaps ymm8, [{o} + 64]
         vmovaps ymm9, [{o} + 96]"
    };
    (1) => {
        "vmovaps ymm6, [{o}]
         vmovaps ymm7, [{o} + 32]"
    };
}

macro_rules! store {
    (3) => {
        "vmovaps [{o}], ymm6
         vmovaps [{o} + 32], ymm7
         vmovaps [{o} + 64], ymm8
         vmovaps [{o} + 96], ymm9
         vmovaps [{o} + 128], ymm10
         vmovaps [{o} + 160], ymm11"
    };
    (2) => {
        "vmovaps [{o}], ymm6
         vmovaps [{o} + 32], ymm7
         vmovaps [{o} + 64], ymm8
         vmovaps [{o} + 96], ymm9"
    };
    (1) => {
        "vmovaps [{o}], ymm6
         vmovaps [{o} + 32], ymm7
         // {s}"
    };
}

/// A tile over some blocks of a panel: goes on with the sums of some input rows, 16 each.
macro_rules! tile {
    ($name:ident, $rows:tt, $($kind:tt)+) => {
        /// # Safety
        /// The processor has AVX2; `panel` has `blocks` blocks; `input` is the first block of the first of the rows, which lie
        /// `stride` blocks apart; `sums` has sixteen for each; panel and sums are aligned to 32 bytes; `blocks` is not 0.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(panel: *const u8, input: *const ByteBlock, stride: usize, blocks: usize, sums: *mut f32) {
            // SAFETY: reads the panel and the rows block by block, writes `sums`; every register it uses is declared.
            unsafe {
                asm!(
                    load!($rows),
                    "2:",
                    block!($rows $($kind)+),
                    "add {p}, 640",
                    "add {t}, 64",
                    "dec {n}",
                    "jnz 2b",
                    store!($rows),
                    p = inout(reg) panel => _,
                    t = inout(reg) input => _,
                    n = inout(reg) blocks => _,
                    s = in(reg) stride * size_of::<ByteBlock>(),
                    o = in(reg) sums,
                    ones = in(reg) &raw const ONES,
                    out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                    out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                    out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                    out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                    options(nostack),
                );
            }
        }
    };
}

tile!(whole3, 3, whole);
tile!(whole2, 2, whole);
tile!(whole1, 1, whole);
tile!(centred8_3, 3, centred "40");
tile!(centred8_2, 2, centred "40");
tile!(centred8_1, 1, centred "40");
tile!(centred16_3, 3, centred "44");
tile!(centred16_2, 2, centred "44");
tile!(centred16_1, 1, centred "44");
tile!(halved3, 3, halved);
tile!(halved2, 2, halved);
tile!(halved1, 1, halved);
tile!(centred32_3, 3, centred halves);
tile!(centred32_2, 2, centred halves);
tile!(centred32_1, 1, centred halves);

/// Unpacks a part of a job's panel.
///
/// # Safety
/// The processor has AVX2; the job's pointers cover the groups of its rows; `panel` has room for the part, aligned to 32 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn unpack_bytes(job: &PanelJob<'_>, part: Part, panel: *mut u8) {
    for lane in 0..job.rows.div_ceil(GROUP_ROWS) {
        // SAFETY: the panel's groups and scratch. A missing second group leaves old contents, whose results are not stored.
        unsafe { unpack(job, part, job.groups.add(lane * job.group_bytes), panel, lane) };
    }
}

/// Unpacks a part of the group at `group` into lane `lane` of the panel.
///
/// # Safety
/// The processor has AVX2; the group is readable; the panel has room for the part.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack(job: &PanelJob<'_>, part: Part, group: *const u8, panel: *mut u8, lane: usize) {
    // SAFETY: all of the caller's promise.
    unsafe {
        let (group, panel) = (group.add(part.offset_bytes(job)), panel.add(32 * lane));
        match job.weight_type {
            WeightType::Q4_0 => q4_0(group, part.count, panel),
            WeightType::Q4_1 => q4_1(group, part.count, panel),
            WeightType::Q5_0 => q5_0(group, part.count, panel),
            WeightType::Q5_1 => q5_1(group, part.count, panel),
            WeightType::Q4K => q4_k(group, part.blocks_of(256), panel),
            WeightType::Q5K => q5_k(group, part.blocks_of(256), panel),
            _ => q6_k(group, part.blocks_of(256), panel),
        }
    }
}

/// Stores step vectors from step `first` on.
///
/// # Safety
/// `block` is a panel block's lane that has these steps.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put<const STEPS: usize>(block: *mut u8, first: usize, steps: [__m256i; STEPS]) {
    for (j, step) in steps.into_iter().enumerate() {
        // SAFETY: a step of this lane.
        unsafe { _mm256_store_si256(block.add(64 * (first + j)).cast(), step) };
    }
}

/// # Safety
/// As [`put`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put_row(block: *mut u8, at: usize, values: __m256) {
    // SAFETY: eight f32 of this lane.
    unsafe { _mm256_store_ps(block.add(at).cast(), values) };
}

macro_rules! unpack32 {
    ($name:ident, $bytes:expr, $codes:expr, $from:expr, $minimum:expr) => {
        /// # Safety
        /// As [`unpack`].
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(group: *const u8, blocks: usize, panel: *mut u8) {
            for index in 0..blocks {
                // SAFETY: block `index` of the group and of the panel.
                unsafe {
                    let at = group.add(index * $bytes);
                    let block = panel.add(index * BYTE_PANEL_BLOCK_BYTES);
                    put(block, 0, $codes(at.add($from)));
                    put_row(block, FIRST_ROW, halves(at));
                    if $minimum {
                        put_row(block, SECOND_ROW, halves(at.add(16)));
                    }
                }
            }
        }
    };
}

unpack32!(q4_0, 144, nibbles, 16, false);
unpack32!(q4_1, 160, nibbles, 32, true);
unpack32!(q5_0, 176, fives, 16, false);
unpack32!(q5_1, 192, fives, 32, true);

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
        put_row(block, FIRST_ROW, scales(halves(at), at.add(32 + 8 * sub)));
        put_row(block, SECOND_ROW, minima(negated_dmin, at.add(96 + 8 * sub)));
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
                let block = panel.add((8 * index + 2 * c) * BYTE_PANEL_BLOCK_BYTES);
                let next = block.add(BYTE_PANEL_BLOCK_BYTES);
                for j in 0..8 {
                    let codes = load(at.add(160 + 256 * c + 32 * j));
                    put(block, j, [_mm256_and_si256(codes, mask)]);
                    put(next, j, [_mm256_and_si256(_mm256_srli_epi16(codes, 4), mask)]);
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
                let block = panel.add((8 * index + sub) * BYTE_PANEL_BLOCK_BYTES);
                let codes = fives_k(at, sub);
                put(block, 0, codes);
                put_k_rows(at, sub, block);
            }
        }
    }
}

/// # Safety
/// As [`unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q6_k(group: *const u8, blocks: usize, panel: *mut u8) {
    for index in 0..blocks {
        // SAFETY: block `index` of the group, and its eight blocks of the panel.
        unsafe {
            let at = group.add(index * 1680);
            let d = halves(at);
            for sub in 0..16 {
                let block = panel.add((8 * index + sub / 2) * BYTE_PANEL_BLOCK_BYTES);
                put(block, 4 * (sub % 2), sixes(at.add(144 + 96 * sub)));
                let row = [FIRST_ROW, SECOND_ROW][sub % 2];
                put_row(block, row, signed_scales(d, at.add(16 + 8 * sub)));
            }
        }
    }
}
