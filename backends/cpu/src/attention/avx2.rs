//! One page of attention for AVX2, FMA and F16C.
//!
//! Both passes work on three heads × 32 lanes at once: twelve sums, three broadcasts, one converted vector. A sum is one
//! chain, over the head's elements for scores and over positions for values, whatever heads it shares the pass with.
#![allow(unsafe_code, reason = "vector loads through the pointers of a job")]

use super::{ChunkJob, soften};
use crate::gemv::avx2::halves;
use crate::kv::{KEY_BLOCK, PAGE_POSITIONS, PLANE};
use std::arch::asm;
use std::arch::x86_64::*;

/// # Safety
/// The processor has AVX2; the job's pointers cover what their documentation says.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn chunk(job: &ChunkJob) {
    let dim = job.shape.head_dim;
    for block in 0..job.len.div_ceil(KEY_BLOCK) {
        let mut head = 0;
        while head < job.heads {
            // SAFETY: block `block` of the keys; heads from `head` on of queries and scores.
            unsafe {
                let keys = job.keys.add(block * dim * KEY_BLOCK);
                let q = job.q.add(head * dim);
                let scores = job.scores.add(head * PAGE_POSITIONS + block * KEY_BLOCK);
                head += match job.heads - head {
                    1 => pass::<1>(keys, dim, q, dim, scores, PAGE_POSITIONS),
                    2 | 4 => pass::<2>(keys, dim, q, dim, scores, PAGE_POSITIONS),
                    _ => pass3(keys, dim, q, dim, scores, PAGE_POSITIONS),
                };
            }
        }
    }
    for head in 0..job.heads {
        // SAFETY: the head's scores, one maximum, one sum.
        unsafe {
            let scores = std::slice::from_raw_parts_mut(job.scores.add(head * PAGE_POSITIONS), job.len);
            (*job.max.add(head), *job.sum.add(head)) = soften(scores, job.first);
        }
    }
    let padded = job.shape.padded_dim();
    for plane in 0..job.shape.planes() {
        let mut head = 0;
        while head < job.heads {
            // SAFETY: plane `plane` of the values; heads from `head` on of weights and sums.
            unsafe {
                let values = job.values.add(plane * PAGE_POSITIONS * PLANE);
                let weights = job.scores.add(head * PAGE_POSITIONS);
                let acc = job.acc.add(head * padded + plane * PLANE);
                head += match job.heads - head {
                    1 => pass::<1>(values, job.len, weights, PAGE_POSITIONS, acc, padded),
                    2 | 4 => pass::<2>(values, job.len, weights, PAGE_POSITIONS, acc, padded),
                    _ => pass3(values, job.len, weights, PAGE_POSITIONS, acc, padded),
                };
            }
        }
    }
}

/// `out[h][0..32] = Σ_i factors[h][i] · rows[i][0..32]` for `H` heads, in ascending `i`; returns `H`.
///
/// # Safety
/// The processor has AVX2; `rows` has `count` rows of 32 f16; `factors` and `out` have `H` rows at their strides.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pass<const H: usize>(
    rows: *const u16,
    count: usize,
    factors: *const f32,
    factor_stride: usize,
    out: *mut f32,
    out_stride: usize,
) -> usize {
    let mut sums = [[_mm256_setzero_ps(); 4]; H];
    for i in 0..count {
        // SAFETY: row `i` and its factors.
        unsafe {
            let row = rows.add(32 * i).cast::<u8>();
            let factor: [__m256; H] = std::array::from_fn(|h| _mm256_set1_ps(*factors.add(h * factor_stride + i)));
            macro_rules! lane {
                ($($v:literal)+) => {$(
                    let value = halves(row.add(16 * $v));
                    for h in 0..H {
                        sums[h][$v] = _mm256_fmadd_ps(value, factor[h], sums[h][$v]);
                    }
                )+};
            }
            lane!(0 1 2 3);
        }
    }
    for h in 0..H {
        for v in 0..4 {
            // SAFETY: 32 results of head `h`.
            unsafe { _mm256_storeu_ps(out.add(h * out_stride + 8 * v), sums[h][v]) };
        }
    }
    H
}

/// As [`pass`] for three heads: twelve sums, three factors and a value are all sixteen registers.
///
/// # Safety
/// As [`pass`]; `count` is not 0.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pass3(
    rows: *const u16,
    count: usize,
    factors: *const f32,
    factor_stride: usize,
    out: *mut f32,
    out_stride: usize,
) -> usize {
    /// One vector of eight lanes into the sums of three heads.
    macro_rules! lane {
        ($at:literal, $a:literal, $b:literal, $c:literal) => {
            concat!(
                "vcvtph2ps ymm15, [{rows} + ",
                $at,
                "]\n",
                "vfmadd231ps ",
                $a,
                ", ymm15, ymm12\n",
                "vfmadd231ps ",
                $b,
                ", ymm15, ymm13\n",
                "vfmadd231ps ",
                $c,
                ", ymm15, ymm14\n",
            )
        };
    }
    // SAFETY: reads `count` rows and factors, writes 32 results for each of three heads; every register is declared.
    unsafe {
        asm!(
            "vxorps ymm0, ymm0, ymm0",
            "vxorps ymm1, ymm1, ymm1",
            "vxorps ymm2, ymm2, ymm2",
            "vxorps ymm3, ymm3, ymm3",
            "vxorps ymm4, ymm4, ymm4",
            "vxorps ymm5, ymm5, ymm5",
            "vxorps ymm6, ymm6, ymm6",
            "vxorps ymm7, ymm7, ymm7",
            "vxorps ymm8, ymm8, ymm8",
            "vxorps ymm9, ymm9, ymm9",
            "vxorps ymm10, ymm10, ymm10",
            "vxorps ymm11, ymm11, ymm11",
            ".p2align 5",
            "2:",
            "vbroadcastss ymm12, [{factors}]",
            "vbroadcastss ymm13, [{factors} + {stride}]",
            "vbroadcastss ymm14, [{factors} + 2*{stride}]",
            lane!("0", "ymm0", "ymm4", "ymm8"),
            lane!("16", "ymm1", "ymm5", "ymm9"),
            lane!("32", "ymm2", "ymm6", "ymm10"),
            lane!("48", "ymm3", "ymm7", "ymm11"),
            "add {rows}, 64",
            "add {factors}, 4",
            "dec {count}",
            "jnz 2b",
            "vmovups [{out}], ymm0",
            "vmovups [{out} + 32], ymm1",
            "vmovups [{out} + 64], ymm2",
            "vmovups [{out} + 96], ymm3",
            "vmovups [{out} + {out_stride}], ymm4",
            "vmovups [{out} + {out_stride} + 32], ymm5",
            "vmovups [{out} + {out_stride} + 64], ymm6",
            "vmovups [{out} + {out_stride} + 96], ymm7",
            "vmovups [{out} + 2*{out_stride}], ymm8",
            "vmovups [{out} + 2*{out_stride} + 32], ymm9",
            "vmovups [{out} + 2*{out_stride} + 64], ymm10",
            "vmovups [{out} + 2*{out_stride} + 96], ymm11",
            rows = inout(reg) rows => _,
            factors = inout(reg) factors => _,
            count = inout(reg) count => _,
            stride = in(reg) 4 * factor_stride,
            out = in(reg) out,
            out_stride = in(reg) 4 * out_stride,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack),
        );
    }
    3
}
