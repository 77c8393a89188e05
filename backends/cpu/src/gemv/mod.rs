//! Decode: products of a matrix with one row, or with few.
//!
//! Few rows share what is unpacked, where there is a kernel for it; otherwise they go one after the other over a part of the
//! matrix that stays in cache. Up to [`few_rows`] that beats the panels of [`crate::gemm`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bytes;
#[cfg(target_arch = "x86_64")]
pub(crate) mod few;
pub(crate) mod portable;

use crate::activations::{Activations, BLOCK, ByteBlock, Forms, Precision, SplitBlock, WideBlock};
use crate::memory::Shared;
use crate::packed::{GROUP_ROWS, PackedMatrix, decode};
use crate::pool::{JobPanicked, Pool};
use crate::table::{FewKernel, KernelTable};
use npuhal_models::WeightType;
use std::ops::Range;

/// Input rows up to which a matrix goes through GEMV rather than GEMM: where that is faster. The bits are the same either way.
#[must_use]
pub const fn few_rows(weight_type: WeightType) -> usize {
    if decode::is_quantized(weight_type) { 8 } else { 1 }
}

/// Input rows from which it pays to unpack a group once for all: fewer wait for the memory, which one stream of weights serves
/// best.
const SHARING_ROWS: usize = 6;
/// Bytes of weights that several input rows share before the next part.
const PART_BYTES: usize = 64 << 10;
/// Items of a thread in a product, where that makes them neither smaller nor larger than the bounds: a thread without a core
/// holds the others up for less than an item, and each costs some tens of nanoseconds.
const ITEMS_PER_THREAD: usize = 8;
const ITEM_BYTES: Range<usize> = 16 << 10..128 << 10;

/// What a GEMV kernel works on: `count` groups that follow each other, and one input row.
#[derive(Debug)]
pub struct GemvJob {
    pub(crate) weight_type: WeightType,
    pub(crate) groups: *const u8,
    pub(crate) count: usize,
    pub(crate) cols: usize,
    pub(crate) split: *const SplitBlock,
    pub(crate) wide: *const WideBlock,
    pub(crate) byte: *const ByteBlock,
    pub(crate) dense: *const f32,
    /// Eight results a group.
    pub(crate) out: *mut f32,
}

/// What a kernel for few rows works on: `count` groups that follow each other, and two to eight input rows.
#[derive(Debug)]
pub struct FewJob {
    pub(crate) weight_type: WeightType,
    pub(crate) groups: *const u8,
    pub(crate) group_bytes: usize,
    pub(crate) count: usize,
    /// Valid rows of the groups.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) tokens: usize,
    pub(crate) split: *const SplitBlock,
    pub(crate) wide: *const WideBlock,
    pub(crate) byte: *const ByteBlock,
    /// The first group's results for the first input row.
    pub(crate) out: *mut f32,
    /// Elements between the results of two input rows.
    pub(crate) stride: usize,
}

/// The forms of its input that the GEMV kernel of a type reads.
#[must_use]
pub fn forms(weight_type: WeightType, precision: Precision) -> Forms {
    if !decode::is_quantized(weight_type) {
        Forms { dense: true, ..Forms::default() }
    } else if precision == Precision::Bits8 && decode::takes_bytes(weight_type) {
        Forms { byte: true, ..Forms::default() }
    } else if weight_type == WeightType::Q8_0 {
        Forms { wide: true, ..Forms::default() }
    } else {
        Forms { split: true, ..Forms::default() }
    }
}

/// Several matrices times the rows of `input`; matrix `i` writes `outs[i]`, input row after input row. The groups of all are
/// cut by bytes into items; a thread's items follow each other, so that it reads one sequential stream.
///
/// # Errors
/// [`JobPanicked`].
///
/// # Panics
/// When `input` is not in the forms of every matrix, or an output is not rows of the input × rows of its matrix long.
#[allow(unsafe_code, reason = "threads write disjoint rows of the outputs")]
pub fn run<const N: usize>(
    pool: &Pool,
    table: &KernelTable,
    matrices: [&PackedMatrix; N],
    input: &Activations,
    outs: [&mut [f32]; N],
) -> Result<(), JobPanicked> {
    let precision = input.precision();
    let wanted = matrices.iter().fold(Forms::default(), |all, matrix| all.or(forms(matrix.weight_type(), precision)));
    assert!(input.forms().or(wanted) == input.forms(), "input forms {:?}", input.forms());
    for (matrix, out) in matrices.iter().zip(&outs) {
        assert!(matrix.cols() == input.cols() && matrix.rows() * input.rows() == out.len());
    }
    let outs = outs.map(Shared::new);
    let total: usize = matrices.iter().map(|matrix| matrix.bytes().len()).sum();
    let item_bytes = (total / (ITEMS_PER_THREAD * pool.threads())).clamp(ITEM_BYTES.start, ITEM_BYTES.end);
    pool.run_items(total.div_ceil(item_bytes), &|_, item| {
        let share = item * item_bytes..total.min((item + 1) * item_bytes);
        let mut before = 0;
        for (matrix, out) in matrices.iter().zip(&outs) {
            let groups = groups_within(matrix, before, &share);
            before += matrix.bytes().len();
            let few = if byte_form(matrix, input) { table.byte_few } else { table.few };
            if groups.is_empty() {
                continue;
            }
            if let (SHARING_ROWS.., Some(kernel)) = (input.rows(), few(matrix.weight_type())) {
                // SAFETY: lengths and forms were checked; shares are disjoint, so are the rows of their groups.
                unsafe { run_few(kernel, matrix, groups, input, *out) };
            } else {
                let part = if input.rows() == 1 { groups.len() } else { (PART_BYTES / matrix.group_bytes()).max(1) };
                for first in groups.clone().step_by(part) {
                    for row in 0..input.rows() {
                        let part = first..groups.end.min(first + part);
                        // SAFETY: lengths and forms were checked; items are disjoint, so are the rows of their groups.
                        unsafe { run_groups(table, matrix, part, input, row, *out) };
                    }
                }
            }
        }
    })
}

/// Groups of a matrix whose first byte lies in `share`, where the matrix starts at byte `before`.
fn groups_within(matrix: &PackedMatrix, before: usize, share: &Range<usize>) -> Range<usize> {
    let at = |byte: usize| byte.saturating_sub(before).div_ceil(matrix.group_bytes()).min(matrix.groups());
    at(share.start)..at(share.end)
}

/// Whether a matrix's kernel reads inputs of 8 bits.
fn byte_form(matrix: &PackedMatrix, input: &Activations) -> bool {
    forms(matrix.weight_type(), input.precision()).byte
}

/// All rows of an input of two rows or more.
///
/// # Safety
/// As [`run_groups`].
#[allow(unsafe_code, reason = "raw parts of the outputs")]
unsafe fn run_few(
    kernel: FewKernel,
    matrix: &PackedMatrix,
    groups: Range<usize>,
    input: &Activations,
    out: Shared<f32>,
) {
    let (blocks, first) = (input.cols() / BLOCK, groups.start * GROUP_ROWS);
    let mut row = 0;
    while row < input.rows() {
        // Never a single one, which the kernels do not take.
        let tokens = match input.rows() - row {
            9 => 5,
            left => left.min(8),
        };
        let job = FewJob {
            weight_type: matrix.weight_type(),
            groups: matrix.bytes()[groups.start * matrix.group_bytes()..].as_ptr(),
            group_bytes: matrix.group_bytes(),
            count: groups.len(),
            rows: (groups.end * GROUP_ROWS).min(matrix.rows()) - first,
            cols: matrix.cols(),
            tokens,
            // Empty where the kernel does not read the form.
            split: input.split().get(row * blocks..).unwrap_or_default().as_ptr(),
            wide: input.wide().get(row * blocks..).unwrap_or_default().as_ptr(),
            byte: input.byte().get(row * blocks..).unwrap_or_default().as_ptr(),
            // SAFETY: a row of the matrix, so inside the output.
            out: unsafe { out.ptr().add(row * matrix.rows() + first) },
            stride: matrix.rows(),
        };
        // SAFETY: the pointers cover these groups and input rows; the results are this thread's own.
        unsafe { kernel(&job) };
        row += tokens;
    }
}

/// # Safety
/// `out` has the matrix's rows for each input row, and no other thread works on these groups.
#[allow(unsafe_code, reason = "raw parts of the outputs")]
unsafe fn run_groups(
    table: &KernelTable,
    matrix: &PackedMatrix,
    groups: Range<usize>,
    input: &Activations,
    row: usize,
    out: Shared<f32>,
) {
    let blocks = input.cols() / BLOCK;
    let first_out = row * matrix.rows();
    let kernels = if byte_form(matrix, input) { table.byte_gemv } else { table.gemv };
    let kernel = kernels(matrix.weight_type());
    let job = |groups: Range<usize>, out: *mut f32| GemvJob {
        weight_type: matrix.weight_type(),
        groups: matrix.bytes()[groups.start * matrix.group_bytes()..].as_ptr(),
        count: groups.len(),
        cols: matrix.cols(),
        // Empty where the kernel does not read the form.
        split: input.split().get(row * blocks..).unwrap_or_default().as_ptr(),
        wide: input.wide().get(row * blocks..).unwrap_or_default().as_ptr(),
        byte: input.byte().get(row * blocks..).unwrap_or_default().as_ptr(),
        dense: input.dense().get(row * input.cols()..).unwrap_or_default().as_ptr(),
        out,
    };
    let whole = groups.start..groups.end.min(matrix.rows() / GROUP_ROWS);
    if !whole.is_empty() {
        // SAFETY: eight results for each whole group, which are this thread's own.
        unsafe { kernel(&job(whole.clone(), out.ptr().add(first_out + whole.start * GROUP_ROWS))) };
    }
    if whole.end < groups.end {
        let mut last = [0.0; GROUP_ROWS];
        let rows = matrix.rows() % GROUP_ROWS;
        // SAFETY: the kernel writes eight results to `last`.
        unsafe { kernel(&job(groups.end - 1..groups.end, last.as_mut_ptr())) };
        // SAFETY: the rows of the last group, which is this thread's own.
        unsafe { out.slice(first_out + matrix.rows() - rows, rows) }.copy_from_slice(&last[..rows]);
    }
}
