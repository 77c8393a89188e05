//! Projection with weights of eight bits: a matrix times one vector.
//!
//! Column 0: blocks of weights on MM2S 0, the vector on MM2S 1, the result on S2MM 0. The placement is this model's.

use super::chunk::{Blocks, Format};
use super::fifo::{ObjectFifo, STALE_BYTE};
use super::vector::{elements, narrow, value};
use crate::array::program::{CoreProgram, Step, StreamKey, Streams};

/// Weights, in.
pub(crate) const WEIGHTS: (u8, u8) = (0, 0);
/// Vector, in.
pub(crate) const VECTOR: (u8, u8) = (0, 1);
/// Result, out.
pub(crate) const RESULT: (u8, u8) = (0, 0);
/// Width above which blocks have fewer rows, so that one fits a core's memory.
const WIDE_COLUMNS: usize = 2048;
const LANES: usize = 32;
const ROWS_MAX: usize = 1 << 20;
const COLUMNS_MAX: usize = 6144;

/// The blocks of a matrix of `rows` by `columns`.
///
/// # Errors
/// What is impossible about the sizes.
pub(crate) fn blocks(rows: usize, columns: usize) -> Result<Blocks, String> {
    let block_rows = if columns > WIDE_COLUMNS { 8 } else { 32 };
    for (what, found, multiple, limit) in
        [("rows", rows, block_rows, ROWS_MAX), ("columns", columns, LANES, COLUMNS_MAX)]
    {
        if found == 0 || found > limit || !found.is_multiple_of(multiple) {
            return Err(format!("{found} {what}; wanted a multiple of {multiple}, at most {limit}"));
        }
    }
    Ok(Blocks { columns, rows: block_rows, count: rows / block_rows, format: Format::Int8, is_dealt: false })
}

/// The program of a matrix.
#[derive(Debug)]
pub(super) struct Projection {
    blocks: Blocks,
    weights: ObjectFifo<u8>,
    vector: ObjectFifo<u8>,
    result: ObjectFifo<u8>,
    /// The vector, while blocks are multiplied with it, and how many were.
    operand: Option<(Vec<f32>, usize)>,
}

impl Projection {
    pub(super) fn new(blocks: Blocks) -> Self {
        Self {
            blocks,
            weights: ObjectFifo::new(2, blocks.block_bytes(), STALE_BYTE),
            vector: ObjectFifo::new(1, 2 * blocks.columns, STALE_BYTE),
            result: ObjectFifo::new(2, 2 * blocks.rows, STALE_BYTE),
            operand: None,
        }
    }

    fn work(&mut self) -> bool {
        let Some((operand, done)) = &mut self.operand else {
            let Some(vector) = self.vector.front() else { return false };
            self.operand = Some((elements(vector).map(value).collect(), 0));
            self.vector.pop();
            return true;
        };
        let (Some(block), Some(result)) = (self.weights.front(), self.result.free()) else { return false };
        let products = self.blocks.products(block, operand);
        for (bytes, product) in result.as_chunks_mut::<2>().0.iter_mut().zip(products) {
            *bytes = narrow(product).to_le_bytes();
        }
        self.weights.pop();
        self.result.release();
        *done += 1;
        if *done == self.blocks.count {
            self.operand = None;
        }
        true
    }

    fn fill(&mut self, streams: &mut Streams<'_>) -> bool {
        for ((column, channel), fifo) in [(VECTOR, &mut self.vector), (WEIGHTS, &mut self.weights)] {
            if fifo.free().is_some_and(|object| streams.read(StreamKey::input(column, channel), object)) {
                fifo.release();
                return true;
            }
        }
        false
    }

    fn drain(&mut self, streams: &mut Streams<'_>) -> bool {
        let (column, channel) = RESULT;
        let has_left =
            self.result.front().is_some_and(|object| streams.write(StreamKey::output(column, channel), object));
        if has_left {
            self.result.pop();
        }
        has_left
    }
}

impl CoreProgram for Projection {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        if self.drain(streams) || self.work() || self.fill(streams) { Step::Progress } else { Step::Waiting }
    }

    fn unfinished(&self) -> Option<String> {
        let doing = self.operand.as_ref().map(|(_, done)| format!("{done} of {} blocks", self.blocks.count));
        let held = self.weights.len() + self.vector.len();
        let held = (held > 0).then(|| format!("{held} objects that the core has not taken"));
        let all: Vec<String> = [doing, held].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// The FIFOs of the design are the program's own.
    fn input_buffer_bytes(&self, _input: StreamKey) -> usize {
        0
    }
}
