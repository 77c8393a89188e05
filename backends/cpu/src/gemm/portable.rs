//! GEMM without special instructions.
#![allow(unsafe_code, reason = "jobs carry raw pointers to parts of larger buffers")]

use super::PanelJob;
use crate::activations::BLOCK;
use crate::gemv::portable::{accumulate, accumulate_bytes, plain_group};
use crate::packed::GROUP_ROWS;
use crate::packed::decode::{DecodedBlock, block, is_quantized};
use crate::table::PanelKernel;
use npuhal_models::WeightType;

pub(crate) fn kernel(weight_type: WeightType) -> PanelKernel {
    if is_quantized(weight_type) { quantized } else { plain }
}

pub(crate) fn byte_kernel(_: WeightType) -> PanelKernel {
    bytes
}

/// # Safety
/// The job's pointers cover the groups of its rows, its input rows and its results.
unsafe fn quantized(job: &PanelJob<'_>, _: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { panel(job, job.wide, accumulate) };
}

/// # Safety
/// As [`quantized`], with byte blocks.
unsafe fn bytes(job: &PanelJob<'_>, _: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { panel(job, job.byte, accumulate_bytes) };
}

/// # Safety
/// As [`quantized`]; `input` are the input rows' blocks.
unsafe fn panel<Block>(
    job: &PanelJob<'_>,
    input: *const Block,
    accumulate: impl Fn(WeightType, &DecodedBlock, &Block, &mut [f32; GROUP_ROWS]),
) {
    let blocks = job.cols / BLOCK;
    let mut decoded = vec![DecodedBlock::ZERO; blocks];
    for first in (0..job.rows).step_by(GROUP_ROWS) {
        // SAFETY: the group of row `first`.
        let group = unsafe { group_of(job, first) };
        for (at, decoded) in decoded.iter_mut().enumerate() {
            block(job.weight_type, group, at, decoded);
        }
        for token in 0..job.tokens {
            // SAFETY: input row `token`.
            let input = unsafe { std::slice::from_raw_parts(input.add(token * blocks), blocks) };
            let mut sums = [0.0; GROUP_ROWS];
            for (weights, input) in decoded.iter().zip(input) {
                accumulate(job.weight_type, weights, input, &mut sums);
            }
            // SAFETY: this token's results of the group.
            unsafe { store(job, first, token, &sums) };
        }
    }
}

/// # Safety
/// As [`quantized`].
unsafe fn plain(job: &PanelJob<'_>, _: &mut [u8]) {
    for first in (0..job.rows).step_by(GROUP_ROWS) {
        // SAFETY: the group of row `first`.
        let group = unsafe { group_of(job, first) };
        for token in 0..job.tokens {
            // SAFETY: input row `token`, then this token's results of the group.
            unsafe {
                let input = std::slice::from_raw_parts(job.dense.add(token * job.cols), job.cols);
                store(job, first, token, &plain_group(job.weight_type, group, input));
            }
        }
    }
}

/// # Safety
/// As [`quantized`]; `first` is a row of the panel.
unsafe fn group_of<'a>(job: &PanelJob<'_>, first: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(job.groups.add(first / GROUP_ROWS * job.group_bytes), job.group_bytes) }
}

/// # Safety
/// As [`quantized`]; `first` is a row of the panel.
unsafe fn store(job: &PanelJob<'_>, first: usize, token: usize, sums: &[f32; GROUP_ROWS]) {
    let rows = GROUP_ROWS.min(job.rows - first);
    // SAFETY: `rows` results from `first` on lie in this token's row.
    unsafe { std::slice::from_raw_parts_mut(job.out.add(token * job.stride + first), rows) }
        .copy_from_slice(&sums[..rows]);
}
