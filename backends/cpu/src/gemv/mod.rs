//! Decode: products of a matrix with one row, or with few.
//!
//! A thread reads its weights as one stream. Vector kernels unpack them once for all rows of a job; the portable ones, and those
//! of plain weights, go row by row over an item. Up to [`few_rows`] that beats the panels of [`crate::gemm`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bytes;
pub(crate) mod portable;

use crate::activations::{Activations, BLOCK, ByteBlock, Forms, Precision, SplitBlock, WideBlock};
use crate::memory::Shared;
use crate::packed::{GROUP_ROWS, PackedMatrix, decode};
use crate::pool::{JobPanicked, Pool};
use crate::table::{GemvKernel, KernelTable};
use npuhal_models::WeightType;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Range;

/// Input rows up to which a matrix goes through GEMV rather than GEMM: where that is faster. The bits are the same either way.
#[must_use]
pub const fn few_rows(weight_type: WeightType) -> usize {
    if decode::is_quantized(weight_type) { MOST_ROWS } else { 1 }
}

/// Input rows of a job at most.
pub(crate) const MOST_ROWS: usize = 8;
/// How far ahead of their use weights are asked for: a page of the smallest size.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 4 << 10;
/// Items of a thread in a product, where that makes them neither smaller nor larger than the bounds: a thread without a core
/// holds the others up for less than an item, and each costs some tens of nanoseconds.
const ITEMS_PER_THREAD: usize = 8;
const ITEM_BYTES: Range<usize> = 16 << 10..128 << 10;

/// Asks for `bytes` that lie [`AHEAD_BYTES`] behind `at`. Without, a core's own prefetching leaves a part of the memory's rate
/// unused: see `benches/peers/notes.md`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unsafe_code, reason = "an intrinsic that takes a pointer")]
pub(crate) fn ask_ahead(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a hint of the architecture's baseline, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD_BYTES + line).cast()) };
    }
}

/// What a GEMV kernel works on: `count` groups that follow each other, and one to eight input rows that do as well.
#[derive(Debug, Clone, Copy)]
pub struct GemvJob {
    pub(crate) weight_type: WeightType,
    pub(crate) groups: *const u8,
    pub(crate) count: usize,
    pub(crate) cols: usize,
    /// Input rows.
    pub(crate) rows: usize,
    pub(crate) split: *const SplitBlock,
    pub(crate) wide: *const WideBlock,
    pub(crate) byte: *const ByteBlock,
    pub(crate) dense: *const f32,
    /// Eight results a group, of the first input row.
    pub(crate) out: *mut f32,
    /// Elements between the results of two input rows.
    pub(crate) stride: usize,
}

impl GemvJob {
    /// Runs a kernel that takes one input row on all of them.
    ///
    /// # Safety
    /// That of the kernel, for each input row.
    #[allow(unsafe_code, reason = "raw parts of a job")]
    unsafe fn each_row(&self, kernel: GemvKernel) {
        let blocks = self.cols / BLOCK;
        for row in 0..self.rows {
            let job = Self {
                rows: 1,
                split: self.split.wrapping_add(row * blocks),
                wide: self.wide.wrapping_add(row * blocks),
                byte: self.byte.wrapping_add(row * blocks),
                dense: self.dense.wrapping_add(row * self.cols),
                out: self.out.wrapping_add(row * self.stride),
                ..*self
            };
            // SAFETY: the caller's promise.
            unsafe { kernel(&job) };
        }
    }
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
            if groups.is_empty() {
                continue;
            }
            for first in (0..input.rows()).step_by(MOST_ROWS) {
                let rows = first..input.rows().min(first + MOST_ROWS);
                // SAFETY: lengths and forms were checked; items are disjoint, so are the rows of their groups.
                unsafe { run_groups(table, matrix, groups.clone(), input, rows, *out) };
            }
        }
    })
}

/// Groups of a matrix whose first byte lies in `share`, where the matrix starts at byte `before`.
fn groups_within(matrix: &PackedMatrix, before: usize, share: &Range<usize>) -> Range<usize> {
    let at = |byte: usize| byte.saturating_sub(before).div_ceil(matrix.group_bytes()).min(matrix.groups());
    at(share.start)..at(share.end)
}

/// The whole ones of `groups` of a matrix with `rows` rows, and the last one where it is among them and not whole.
fn split_part(groups: Range<usize>, rows: usize) -> (Range<usize>, Option<usize>) {
    let whole = groups.start..groups.end.min(rows / GROUP_ROWS);
    let part = (whole.end < groups.end && !groups.is_empty()).then(|| groups.end - 1);
    (whole, part)
}

/// # Safety
/// `out` has the matrix's rows for each input row, and no other thread works on these groups.
#[allow(unsafe_code, reason = "raw parts of the outputs")]
unsafe fn run_groups(
    table: &KernelTable,
    matrix: &PackedMatrix,
    groups: Range<usize>,
    input: &Activations,
    rows: Range<usize>,
    out: Shared<f32>,
) {
    let blocks = input.cols() / BLOCK;
    let byte = forms(matrix.weight_type(), input.precision()).byte;
    let kernel = if byte { table.byte_gemv } else { table.gemv }(matrix.weight_type());
    let job = |groups: Range<usize>, out: *mut f32, stride: usize| GemvJob {
        weight_type: matrix.weight_type(),
        groups: matrix.bytes()[groups.start * matrix.group_bytes()..].as_ptr(),
        count: groups.len(),
        cols: matrix.cols(),
        rows: rows.len(),
        // Empty where the kernel does not read the form.
        split: input.split().get(rows.start * blocks..).unwrap_or_default().as_ptr(),
        wide: input.wide().get(rows.start * blocks..).unwrap_or_default().as_ptr(),
        byte: input.byte().get(rows.start * blocks..).unwrap_or_default().as_ptr(),
        dense: input.dense().get(rows.start * input.cols()..).unwrap_or_default().as_ptr(),
        out,
        stride,
    };
    debug_assert!((1..=MOST_ROWS).contains(&rows.len()));
    let (whole, part) = split_part(groups, matrix.rows());
    if !whole.is_empty() {
        let first = rows.start * matrix.rows() + whole.start * GROUP_ROWS;
        // SAFETY: eight results for each whole group and input row, which are this thread's own.
        unsafe { kernel(&job(whole.clone(), out.ptr().add(first), matrix.rows())) };
    }
    if let Some(part) = part {
        let mut last = [[0.0; GROUP_ROWS]; MOST_ROWS];
        let valid = matrix.rows() % GROUP_ROWS;
        // SAFETY: the kernel writes eight results for each input row to `last`.
        unsafe { kernel(&job(part..part + 1, last.as_mut_ptr().cast(), GROUP_ROWS)) };
        for (row, last) in rows.clone().zip(&last) {
            // SAFETY: the valid rows of the last group, which is this thread's own.
            unsafe { out.slice((row + 1) * matrix.rows() - valid, valid) }.copy_from_slice(&last[..valid]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_models::Tensor;
    use npuhal_models::map::FileMap;
    use std::io::Write;
    use std::sync::Arc;

    /// Items behind a matrix's end were given its last group once more, where it was not whole.
    #[test]
    fn every_group_belongs_to_one_item() {
        let pool = Pool::new(1).unwrap();
        let matrices = [803usize, 3, 800, 67].map(|rows| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&vec![0; rows * 34]).unwrap();
            let map = Arc::new(FileMap::open(file.path()).unwrap());
            let tensor = Tensor::new("w", WeightType::Q8_0, rows, 32, map, 0..rows * 34).unwrap();
            PackedMatrix::from_tensor(&tensor, &pool).unwrap()
        });
        let total: usize = matrices.iter().map(|matrix| matrix.bytes().len()).sum();
        for item_bytes in [100, 272, 1000, 5000, total] {
            let mut before = 0;
            for matrix in &matrices {
                let mut uses = vec![0; matrix.groups()];
                for item in 0..total.div_ceil(item_bytes) {
                    let share = item * item_bytes..total.min((item + 1) * item_bytes);
                    let (whole, part) = split_part(groups_within(matrix, before, &share), matrix.rows());
                    for group in whole.chain(part) {
                        uses[group] += 1;
                    }
                }
                assert_eq!(uses, vec![1; matrix.groups()], "{} rows, items of {item_bytes} bytes", matrix.rows());
                before += matrix.bytes().len();
            }
        }
    }
}
