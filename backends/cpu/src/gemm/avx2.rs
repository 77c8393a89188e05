//! GEMM for AVX2, FMA and F16C.
//!
//! The inner tile is two groups × three input rows: six integer sums, six f32 sums, two weight vectors, one broadcast and
//! one temporary fill the sixteen registers, which compilers do not manage without spills; hence assembly.
#![allow(unsafe_code, reason = "assembly tile and raw pointers of a job")]

use super::tiles::{Part, run_tiles};
use super::unpack::{MINIMA, SCALES, unpack};
use super::{PANEL_BLOCK_BYTES, PanelJob, portable};
use crate::activations::WideBlock;
use crate::gemv::avx2::{brains, halves, singles};
use crate::packed::decode::has_minimum;
use crate::packed::{GROUP_ROWS, decode};
use crate::table::PanelKernel;
use npuhal_models::WeightType;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

pub(crate) fn kernel(weight_type: WeightType) -> PanelKernel {
    match weight_type {
        WeightType::F32 => f32_panel,
        WeightType::F16 => f16_panel,
        WeightType::Bf16 => bf16_panel,
        _ if has_minimum(weight_type) => quantized::<true>,
        _ if decode::is_quantized(weight_type) => quantized::<false>,
        _ => portable::kernel(weight_type),
    }
}

/// # Safety
/// The processor has AVX2; the job's pointers cover the groups of its rows, its input rows and its results.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantized<const MINIMUM: bool>(job: &PanelJob<'_>, scratch: &mut [u8]) {
    run_tiles!(job, scratch, wide, unpack_words, [tile3::<MINIMUM>, tile2::<MINIMUM>, tile1::<MINIMUM>]);
}

/// Unpacks a part of a job's panel.
///
/// # Safety
/// The processor has AVX2; the job's pointers cover the groups of its rows; `panel` has room for the part, aligned to 32 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn unpack_words(job: &PanelJob<'_>, part: Part, panel: *mut u8) {
    for lane in 0..job.rows.div_ceil(GROUP_ROWS) {
        // SAFETY: the panel's groups and scratch. A missing second group leaves old contents, whose results are not stored.
        unsafe { unpack(job, part, job.groups.add(lane * job.group_bytes), panel, lane) };
    }
}

// The numbers written out in the assembly.
const _: () = assert!(PANEL_BLOCK_BYTES == 1152 && size_of::<WideBlock>() == 80);
const _: () = assert!(offset_of!(WideBlock, d) == 64 && offset_of!(WideBlock, s) == 68);

/// Repeats `$step!(panel offset, token offset)` for steps 1 to 15.
macro_rules! steps {
    ($step:ident) => {
        concat!(
            $step!("64", "4"),
            $step!("128", "8"),
            $step!("192", "12"),
            $step!("256", "16"),
            $step!("320", "20"),
            $step!("384", "24"),
            $step!("448", "28"),
            $step!("512", "32"),
            $step!("576", "36"),
            $step!("640", "40"),
            $step!("704", "44"),
            $step!("768", "48"),
            $step!("832", "52"),
            $step!("896", "56"),
            $step!("960", "60"),
        )
    };
}

/// Loads a step's two weight vectors.
macro_rules! weights {
    ($at:literal) => {
        concat!("vmovdqa ymm12, [{p} + ", $at, "]\n", "vmovdqa ymm13, [{p} + ", $at, " + 32]\n")
    };
}

/// Step 0 of one input row: the products start the sums.
macro_rules! first {
    ($token:literal, $s0:literal, $s1:literal) => {
        concat!(
            "vpbroadcastd ymm14, [",
            $token,
            "]\n",
            "vpmaddwd ",
            $s0,
            ", ymm14, ymm12\n",
            "vpmaddwd ",
            $s1,
            ", ymm14, ymm13\n",
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
            "vpmaddwd ymm15, ymm14, ymm12\n",
            "vpaddd ",
            $s0,
            ", ",
            $s0,
            ", ymm15\n",
            "vpmaddwd ymm15, ymm14, ymm13\n",
            "vpaddd ",
            $s1,
            ", ",
            $s1,
            ", ymm15\n",
        )
    };
}

/// End of a block for one input row: `acc += sum × (d × d_input)`.
macro_rules! scale {
    ($token:literal, $s0:literal, $s1:literal, $a0:literal, $a1:literal) => {
        concat!(
            "vbroadcastss ymm14, [",
            $token,
            " + 64]\n",
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
            "vmulps ymm12, ymm14, [{p} + {scales}]\n",
            "vmulps ymm13, ymm14, [{p} + {scales} + 32]\n",
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
            " + 68]\n",
            "vfmadd231ps ",
            $a0,
            ", ymm14, [{p} + {minima}]\n",
            "vfmadd231ps ",
            $a1,
            ", ymm14, [{p} + {minima} + 32]\n",
        )
    };
}

macro_rules! advance {
    () => {
        "add {p}, 1152\nadd {t}, 80\ndec {n}\njnz 2b\n"
    };
}

macro_rules! step3 {
    ($at:literal, $k:literal) => {
        concat!(
            weights!($at),
            next!("{t}", $k, "ymm0", "ymm1"),
            next!("{t} + {s}", $k, "ymm2", "ymm3"),
            next!("{t} + 2*{s}", $k, "ymm4", "ymm5"),
        )
    };
}

macro_rules! block3 {
    () => {
        concat!(
            "2:\n",
            weights!("0"),
            first!("{t}", "ymm0", "ymm1"),
            first!("{t} + {s}", "ymm2", "ymm3"),
            first!("{t} + 2*{s}", "ymm4", "ymm5"),
            steps!(step3),
            scale!("{t}", "ymm0", "ymm1", "ymm6", "ymm7"),
            scale!("{t} + {s}", "ymm2", "ymm3", "ymm8", "ymm9"),
            scale!("{t} + 2*{s}", "ymm4", "ymm5", "ymm10", "ymm11"),
        )
    };
}

macro_rules! minima3 {
    () => {
        concat!(
            minimum!("{t}", "ymm6", "ymm7"),
            minimum!("{t} + {s}", "ymm8", "ymm9"),
            minimum!("{t} + 2*{s}", "ymm10", "ymm11"),
        )
    };
}

macro_rules! step2 {
    ($at:literal, $k:literal) => {
        concat!(weights!($at), next!("{t}", $k, "ymm0", "ymm1"), next!("{t} + {s}", $k, "ymm2", "ymm3"),)
    };
}

macro_rules! block2 {
    () => {
        concat!(
            "2:\n",
            weights!("0"),
            first!("{t}", "ymm0", "ymm1"),
            first!("{t} + {s}", "ymm2", "ymm3"),
            steps!(step2),
            scale!("{t}", "ymm0", "ymm1", "ymm6", "ymm7"),
            scale!("{t} + {s}", "ymm2", "ymm3", "ymm8", "ymm9"),
        )
    };
}

macro_rules! minima2 {
    () => {
        concat!(minimum!("{t}", "ymm6", "ymm7"), minimum!("{t} + {s}", "ymm8", "ymm9"),)
    };
}

macro_rules! step1 {
    ($at:literal, $k:literal) => {
        concat!(weights!($at), next!("{t}", $k, "ymm0", "ymm1"),)
    };
}

macro_rules! block1 {
    () => {
        concat!(
            "2:\n",
            weights!("0"),
            first!("{t}", "ymm0", "ymm1"),
            steps!(step1),
            scale!("{t}", "ymm0", "ymm1", "ymm6", "ymm7"),
        )
    };
}

macro_rules! minima1 {
    () => {
        concat!(minimum!("{t}", "ymm6", "ymm7"),)
    };
}

/// A tile over some blocks of a panel: goes on with the sums of some input rows, 16 each.
macro_rules! tile {
    ($name:ident, $block:ident, $minima:ident, $load:literal, $store:literal) => {
        /// # Safety
        /// The processor has AVX2; `panel` has `blocks` blocks; `input` is the first block of the first of the rows, which lie
        /// `stride` blocks apart; `sums` has sixteen for each; panel and sums are aligned to 32 bytes; `blocks` is not 0.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name<const MINIMUM: bool>(
            panel: *const u8,
            input: *const WideBlock,
            stride: usize,
            blocks: usize,
            sums: *mut f32,
        ) {
            // SAFETY: reads the panel and the rows block by block, writes `sums`; every register it uses is declared.
            unsafe {
                if MINIMUM {
                    asm!(
                        $load, $block!(), $minima!(), advance!(), $store,
                        p = inout(reg) panel => _,
                        t = inout(reg) input => _,
                        n = inout(reg) blocks => _,
                        s = in(reg) stride * size_of::<WideBlock>(),
                        o = in(reg) sums,
                        scales = const SCALES,
                        minima = const MINIMA,
                        out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                        out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                        out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                        out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                        options(nostack),
                    );
                } else {
                    asm!(
                        $load, $block!(), advance!(), $store,
                        p = inout(reg) panel => _,
                        t = inout(reg) input => _,
                        n = inout(reg) blocks => _,
                        s = in(reg) stride * size_of::<WideBlock>(),
                        o = in(reg) sums,
                        scales = const SCALES,
                        out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                        out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                        out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                        out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

tile!(
    tile3,
    block3,
    minima3,
    "vmovaps ymm6, [{o}]
     vmovaps ymm7, [{o} + 32]
     vmovaps ymm8, [{o} + 64]
     vmovaps ymm9, [{o} + 96]
     vmovaps ymm10, [{o} + 128]
     vmovaps ymm11, [{o} + 160]",
    "vmovaps [{o}], ymm6
     vmovaps [{o} + 32], ymm7
     vmovaps [{o} + 64], ymm8
     vmovaps [{o} + 96], ymm9
     vmovaps [{o} + 128], ymm10
     vmovaps [{o} + 160], ymm11"
);
tile!(
    tile2,
    block2,
    minima2,
    "vmovaps ymm6, [{o}]
     vmovaps ymm7, [{o} + 32]
     vmovaps ymm8, [{o} + 64]
     vmovaps ymm9, [{o} + 96]",
    "vmovaps [{o}], ymm6
     vmovaps [{o} + 32], ymm7
     vmovaps [{o} + 64], ymm8
     vmovaps [{o} + 96], ymm9
     // {s}"
);
tile!(
    tile1,
    block1,
    minima1,
    "vmovaps ymm6, [{o}]
     vmovaps ymm7, [{o} + 32]",
    "vmovaps [{o}], ymm6
     vmovaps [{o} + 32], ymm7
     // {s}"
);

/// Plain floats: one group × up to three input rows, four chains each as in GEMV.
macro_rules! plain {
    ($name:ident, $bytes:expr, $value:expr) => {
        /// # Safety
        /// As the quantized kernel; no scratch is used.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(job: &PanelJob<'_>, _: &mut [u8]) {
            for first in (0..job.rows).step_by(GROUP_ROWS) {
                let rows = GROUP_ROWS.min(job.rows - first);
                let mut token = 0;
                while token < job.tokens {
                    let count = (job.tokens - token).min(3);
                    // SAFETY: the group of row `first`, `count` input rows from `token` on, and their results.
                    unsafe {
                        let group = job.groups.add(first / GROUP_ROWS * job.group_bytes);
                        let input = job.dense.add(token * job.cols);
                        let sums = match count {
                            3 => plain_tile!(3, group, input, job.cols, $bytes, $value),
                            2 => plain_tile!(2, group, input, job.cols, $bytes, $value),
                            _ => plain_tile!(1, group, input, job.cols, $bytes, $value),
                        };
                        for (index, sums) in sums.iter().take(count).enumerate() {
                            let out = job.out.add((token + index) * job.stride + first);
                            std::ptr::copy_nonoverlapping(sums.as_ptr(), out, rows);
                        }
                    }
                    token += count;
                }
            }
        }
    };
}

macro_rules! plain_tile {
    ($count:literal, $group:expr, $input:expr, $cols:expr, $bytes:expr, $value:expr) => {{
        let mut chains = [[_mm256_setzero_ps(); 4]; $count];
        let whole = $cols / 4 * 4;
        for k in (0..whole).step_by(4) {
            for i in 0..4 {
                let weights = $value($group.add((k + i) * $bytes));
                for index in 0..$count {
                    let x = _mm256_set1_ps(*$input.add(index * $cols + k + i));
                    chains[index][i] = _mm256_fmadd_ps(weights, x, chains[index][i]);
                }
            }
        }
        for k in whole..$cols {
            let weights = $value($group.add(k * $bytes));
            for index in 0..$count {
                let x = _mm256_set1_ps(*$input.add(index * $cols + k));
                chains[index][k - whole] = _mm256_fmadd_ps(weights, x, chains[index][k - whole]);
            }
        }
        let mut sums = [[0.0f32; GROUP_ROWS]; 3];
        for index in 0..$count {
            let c = &chains[index];
            let sum = _mm256_add_ps(_mm256_add_ps(c[0], c[1]), _mm256_add_ps(c[2], c[3]));
            _mm256_storeu_ps(sums[index].as_mut_ptr(), sum);
        }
        sums
    }};
}

plain!(f32_panel, 32, singles);
plain!(f16_panel, 16, halves);
plain!(bf16_panel, 16, brains);
