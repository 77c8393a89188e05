//! Prefill: products of a matrix with many rows.
//!
//! A panel is two groups (16 rows). Part by part along the input features it is unpacked to where the nearest cache holds it,
//! and all input rows run against the part; their sums go on in the next part, in the order of one pass. The results have the
//! bits of [`crate::gemv`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bytes;
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) mod unpack;

use crate::activations::{Activations, BLOCK, ByteBlock, Forms, Precision, WideBlock};
use crate::memory::{Scratch, Shared};
use crate::packed::{GROUP_ROWS, PackedMatrix, decode};
use crate::pool::{JobPanicked, Pool};
use crate::table::KernelTable;
use npuhal_models::WeightType;

/// Rows of a panel.
pub const PANEL_ROWS: usize = 2 * GROUP_ROWS;
/// Scratch bytes that a panel takes for 32 input features.
pub const PANEL_BLOCK_BYTES: usize = 1152;
/// Blocks of 32 input features that are unpacked at a time: whole blocks of every type. More parts cost more than the nearer cache
/// gains: with 16, 128 rows of 8-bit inputs were a tenth slower over 576 features.
pub const PART_BLOCKS: usize = 48;
/// As [`PANEL_BLOCK_BYTES`], for inputs of 8 bits.
pub const BYTE_PANEL_BLOCK_BYTES: usize = 640;

/// One panel, all input rows.
#[derive(Debug)]
pub struct PanelJob<'a> {
    pub(crate) weight_type: WeightType,
    pub(crate) groups: *const u8,
    pub(crate) group_bytes: usize,
    /// Valid rows of the panel, 1 to 16.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) tokens: usize,
    pub(crate) wide: *const WideBlock,
    pub(crate) byte: *const ByteBlock,
    pub(crate) dense: *const f32,
    /// The panel's first row of the first input row's result.
    pub(crate) out: *mut f32,
    /// Elements between the results of two input rows.
    pub(crate) stride: usize,
    /// Where this thread's next panel probably lies; empty for the last one. A hint.
    pub(crate) following: &'a [u8],
}

/// The forms of its input that the GEMM kernel of a type reads.
#[must_use]
pub fn forms(weight_type: WeightType, precision: Precision) -> Forms {
    if precision == Precision::Bits8 && decode::takes_bytes(weight_type) {
        Forms { byte: true, ..Forms::default() }
    } else if decode::is_quantized(weight_type) {
        Forms { wide: true, ..Forms::default() }
    } else {
        Forms { dense: true, ..Forms::default() }
    }
}

/// Scratch bytes of a panel job: an unpacked part, and sixteen sums for each input row.
#[must_use]
pub const fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    let blocks = cols.div_ceil(BLOCK);
    let part = if blocks < PART_BLOCKS { blocks } else { PART_BLOCKS };
    part * PANEL_BLOCK_BYTES + tokens * PANEL_ROWS * size_of::<f32>()
}

/// Unpacked panels, one for each thread.
#[derive(Debug, Default)]
pub struct Panels {
    scratch: Vec<Scratch>,
}

impl Panels {
    /// For no thread yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn reserve(&mut self, threads: usize, bytes: usize) {
        self.scratch.resize_with(threads.max(self.scratch.len()), Scratch::new);
        self.scratch.iter_mut().for_each(|scratch| scratch.reserve::<u8>(bytes));
    }
}

/// Several matrices times all rows of `input`; matrix `i` writes `outs[i]`, input row after input row.
///
/// # Errors
/// [`JobPanicked`].
///
/// # Panics
/// When `input` is not in the forms of every matrix, or an output is not rows of the input × rows of its matrix long.
#[allow(unsafe_code, reason = "threads write disjoint columns of the outputs")]
pub fn run<const N: usize>(
    pool: &Pool,
    table: &KernelTable,
    matrices: [&PackedMatrix; N],
    input: &Activations,
    outs: [&mut [f32]; N],
    panels: &mut Panels,
) -> Result<(), JobPanicked> {
    let precision = input.precision();
    let wanted = matrices.iter().fold(Forms::default(), |all, matrix| all.or(forms(matrix.weight_type(), precision)));
    assert!(input.forms().or(wanted) == input.forms(), "input forms {:?}", input.forms());
    for (matrix, out) in matrices.iter().zip(&outs) {
        assert!(matrix.cols() == input.cols() && matrix.rows() * input.rows() == out.len());
    }
    let outs = outs.map(Shared::new);
    let scratch_bytes = scratch_bytes(input.cols(), input.rows());
    panels.reserve(pool.threads(), scratch_bytes);
    let scratch = Shared::new(&mut panels.scratch);
    let total: usize = matrices.iter().map(|matrix| matrix.rows().div_ceil(PANEL_ROWS)).sum();
    // A matrix has at most 2^24 rows (`crate::config`).
    pool.run_items(total, &|thread, panel| {
        // SAFETY: one scratch a thread.
        let scratch = unsafe { &mut scratch.slice(thread, 1)[0] }.get_mut::<u8>(scratch_bytes);
        let (matrix, out, index) = place(&matrices, &outs, panel);
        let row = index * PANEL_ROWS;
        let job = PanelJob {
            weight_type: matrix.weight_type(),
            groups: matrix.group(2 * index).as_ptr(),
            group_bytes: matrix.group_bytes(),
            rows: PANEL_ROWS.min(matrix.rows() - row),
            cols: matrix.cols(),
            tokens: input.rows(),
            wide: input.wide().as_ptr(),
            byte: input.byte().as_ptr(),
            dense: input.dense().as_ptr(),
            // SAFETY: `row` is a row of the matrix, so inside the output.
            out: unsafe { out.ptr().add(row) },
            stride: matrix.rows(),
            following: if panel + 1 < total { panel_bytes(&matrices, &outs, panel + 1) } else { &[] },
        };
        let byte = forms(matrix.weight_type(), precision).byte;
        let kernels = if byte { table.byte_panel } else { table.panel };
        // SAFETY: lengths and forms were checked; each panel, so each set of rows, is taken once.
        unsafe { kernels(matrix.weight_type())(&job, scratch) };
    })
}

/// The matrix and output that panel `panel` of all belongs to, and its number there.
fn place<'a, const N: usize>(
    matrices: &[&'a PackedMatrix; N],
    outs: &[Shared<f32>; N],
    mut panel: usize,
) -> (&'a PackedMatrix, Shared<f32>, usize) {
    let mut index = 0;
    while index + 1 < N && panel >= matrices[index].rows().div_ceil(PANEL_ROWS) {
        panel -= matrices[index].rows().div_ceil(PANEL_ROWS);
        index += 1;
    }
    (matrices[index], outs[index], panel)
}

fn panel_bytes<'a, const N: usize>(
    matrices: &[&'a PackedMatrix; N],
    outs: &[Shared<f32>; N],
    panel: usize,
) -> &'a [u8] {
    let (matrix, _, index) = place(matrices, outs, panel);
    let start = 2 * index * matrix.group_bytes();
    &matrix.bytes()[start..matrix.bytes().len().min(start + 2 * matrix.group_bytes())]
}
