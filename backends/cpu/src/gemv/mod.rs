//! Decode: products of a matrix with one row.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
pub(crate) mod portable;

use crate::activations::{Activations, Forms, SplitBlock, WideBlock};
use crate::memory::Shared;
use crate::packed::{GROUP_ROWS, PackedMatrix, decode};
use crate::pool::{JobPanicked, Pool};
use crate::table::KernelTable;
use npuhal_models::WeightType;
use std::ops::Range;

/// What a GEMV kernel works on: `count` groups that follow each other, and one input row.
#[derive(Debug)]
pub struct GemvJob {
    pub(crate) weight_type: WeightType,
    pub(crate) groups: *const u8,
    pub(crate) count: usize,
    pub(crate) cols: usize,
    pub(crate) split: *const SplitBlock,
    pub(crate) wide: *const WideBlock,
    pub(crate) dense: *const f32,
    /// Eight results a group.
    pub(crate) out: *mut f32,
}

/// The forms of its input that the GEMV kernel of a type reads.
#[must_use]
pub fn forms(weight_type: WeightType) -> Forms {
    if !decode::is_quantized(weight_type) {
        Forms { dense: true, ..Forms::default() }
    } else if weight_type == WeightType::Q8_0 {
        Forms { wide: true, ..Forms::default() }
    } else {
        Forms { split: true, ..Forms::default() }
    }
}

/// Several matrices times the one row of `input`; matrix `i` writes `outs[i]`. Each thread takes one contiguous part of all
/// groups, by bytes, so that it reads one sequential stream.
///
/// # Errors
/// [`JobPanicked`].
///
/// # Panics
/// When `input` has not one row of fitting length in the forms of every matrix, or an output is not as long as its matrix
/// has rows.
#[allow(unsafe_code, reason = "threads write disjoint rows of the outputs")]
pub fn run<const N: usize>(
    pool: &Pool,
    table: &KernelTable,
    matrices: [&PackedMatrix; N],
    input: &Activations,
    outs: [&mut [f32]; N],
) -> Result<(), JobPanicked> {
    let wanted = matrices.iter().fold(Forms::default(), |all, matrix| all.or(forms(matrix.weight_type())));
    assert!(input.rows() == 1 && input.forms().or(wanted) == input.forms(), "input forms {:?}", input.forms());
    for (matrix, out) in matrices.iter().zip(&outs) {
        assert!(matrix.cols() == input.cols() && matrix.rows() == out.len());
    }
    let outs = outs.map(Shared::new);
    let total: usize = matrices.iter().map(|matrix| matrix.bytes().len()).sum();
    let threads = pool.threads();
    pool.run(&|thread| {
        let share = total * thread / threads..total * (thread + 1) / threads;
        let mut before = 0;
        for (matrix, out) in matrices.iter().zip(&outs) {
            let groups = groups_within(matrix, before, &share);
            before += matrix.bytes().len();
            if !groups.is_empty() {
                // SAFETY: lengths and forms were checked; shares are disjoint, so are the rows of their groups.
                unsafe { run_groups(table, matrix, groups, input, *out) };
            }
        }
    })
}

/// Groups of a matrix whose first byte lies in `share`, where the matrix starts at byte `before`.
fn groups_within(matrix: &PackedMatrix, before: usize, share: &Range<usize>) -> Range<usize> {
    let at = |byte: usize| byte.saturating_sub(before).div_ceil(matrix.group_bytes()).min(matrix.groups());
    at(share.start)..at(share.end)
}

/// # Safety
/// `out` has the matrix's rows, `input` has the forms its kernel reads, and no other thread works on these groups.
#[allow(unsafe_code, reason = "raw parts of the outputs")]
unsafe fn run_groups(
    table: &KernelTable,
    matrix: &PackedMatrix,
    groups: Range<usize>,
    input: &Activations,
    out: Shared<f32>,
) {
    let kernel = (table.gemv)(matrix.weight_type());
    let job = |groups: Range<usize>, out: *mut f32| GemvJob {
        weight_type: matrix.weight_type(),
        groups: matrix.bytes()[groups.start * matrix.group_bytes()..].as_ptr(),
        count: groups.len(),
        cols: matrix.cols(),
        split: input.split().as_ptr(),
        wide: input.wide().as_ptr(),
        dense: input.dense().as_ptr(),
        out,
    };
    let whole = groups.start..groups.end.min(matrix.rows() / GROUP_ROWS);
    if !whole.is_empty() {
        // SAFETY: eight rows for each whole group lie in the output.
        unsafe { kernel(&job(whole.clone(), out.ptr().add(whole.start * GROUP_ROWS))) };
    }
    if whole.end < groups.end {
        let mut last = [0.0; GROUP_ROWS];
        let rows = matrix.rows() % GROUP_ROWS;
        // SAFETY: the kernel writes eight results to `last`; the remaining rows lie at the end of the output.
        unsafe {
            kernel(&job(groups.end - 1..groups.end, last.as_mut_ptr()));
            out.slice(matrix.rows() - rows, rows).copy_from_slice(&last[..rows]);
        }
    }
}
