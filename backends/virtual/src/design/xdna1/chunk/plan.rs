//! What the chunked graphs differ in: blocks of weights, parameters, biases.

use crate::design::xdna1::shape::{Model, Shape};
use crate::design::xdna1::vector::{LANES, add_integer_products, dot, reduce};

/// How the values of a block are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Rows of bf16.
    Bf16,
    /// Rows of signed bytes, then a f32 scale for each row.
    Int8,
}

/// A stream of weights: blocks of whole rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Values of a row.
    pub(crate) columns: usize,
    /// Rows of a block.
    pub(crate) rows: usize,
    /// Blocks of a layer.
    pub(crate) count: usize,
    /// Storage.
    pub(crate) format: Format,
    /// Whether groups of six blocks take turns between three workers with two blocks each.
    pub(crate) is_dealt: bool,
}

impl Blocks {
    const fn new(total_rows: usize, columns: usize, rows: usize, format: Format) -> Self {
        Self { columns, rows, count: total_rows / rows, format, is_dealt: false }
    }

    /// Bytes of a block.
    pub(crate) const fn block_bytes(&self) -> usize {
        match self.format {
            Format::Bf16 => 2 * self.rows * self.columns,
            Format::Int8 => self.rows * self.columns + 4 * self.rows,
        }
    }

    /// First row of the block that arrives as number `block`: worker after worker, so that each gets two blocks of
    /// consecutive rows.
    pub(super) fn first_row(&self, block: usize) -> usize {
        let block = if self.is_dealt { block / 6 * 6 + [0, 2, 4, 1, 3, 5][block % 6] } else { block };
        block * self.rows
    }

    /// Products of a block's rows with `operand`, f32.
    pub(crate) fn products(&self, block: &[u8], operand: &[f32]) -> Vec<f32> {
        match self.format {
            Format::Bf16 => block.chunks_exact(2 * self.columns).map(|row| dot(row, operand)).collect(),
            Format::Int8 => {
                let (rows, scales) = block.split_at(self.rows * self.columns);
                let product = |row: &[u8]| {
                    let mut lanes = [0.0; LANES];
                    add_integer_products(&mut lanes, row, operand);
                    reduce(lanes)
                };
                let scales = scales.as_chunks::<4>().0.iter().map(|scale| f32::from_le_bytes(*scale));
                rows.chunks_exact(self.columns).zip(scales).map(|(row, scale)| product(row) * scale).collect()
            }
        }
    }
}

/// A chunked graph.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// Query, key and value; output; gate and up; down.
    pub(crate) streams: [Blocks; 4],
    /// Elements of a layer's parameters: norms, and biases in a high and a low part where the model has them.
    pub(crate) parameters: usize,
    /// Whether a layer's blocks lie apart, those of the chunk's layers in between.
    pub(crate) is_interleaved: bool,
}

impl Plan {
    const fn of(shape: &Shape, format: Format, rows: usize, down_rows: usize) -> Self {
        let Shape { hidden, intermediate, .. } = *shape;
        let biases = if shape.has_bias { 2 * shape.qkv() } else { 0 };
        Self {
            streams: [
                Blocks::new(shape.qkv(), hidden, rows, format),
                Blocks::new(hidden, hidden, rows, format),
                Blocks::new(2 * intermediate, hidden, rows, format),
                Blocks::new(hidden, intermediate, down_rows, format),
            ],
            parameters: 2 * hidden + biases,
            is_interleaved: false,
        }
    }

    /// SmolLM in bf16.
    pub(crate) const fn smollm<M: Model>() -> Self {
        let mut plan = Self::of(&M::SHAPE, Format::Bf16, 32, 16);
        plan.streams[2].is_dealt = true;
        plan
    }

    /// SmolLM with eight bits. Its blocks have the 64 rows of a worker's object already, so that none has to be dealt.
    pub(crate) const fn smollm_w8<M: Model>() -> Self {
        Self::of(&M::SHAPE, Format::Int8, 64, 32)
    }

    /// Qwen2.5: the down projection comes row by row.
    pub(crate) const fn qwen<M: Model>() -> Self {
        let mut plan = Self::of(&M::SHAPE, Format::Bf16, 16, 1);
        plan.is_interleaved = true;
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::design::xdna1::qwen::Qwen;
    use crate::design::xdna1::smollm::SmolLm;

    #[test]
    fn blocks_are_the_published_ones() {
        let facts = |plan: &Plan| plan.streams.map(|blocks| (blocks.count, blocks.block_bytes()));
        let layer_bytes = |plan: &Plan| facts(plan).iter().map(|(count, bytes)| count * bytes).sum::<usize>();
        let plan = Plan::smollm::<SmolLm>();
        assert_eq!(facts(&plan), [(30, 36_864), (18, 36_864), (96, 36_864), (36, 49_152)]);
        assert_eq!((layer_bytes(&plan), plan.parameters), (2 * 3_538_944, 1152));
        let plan = Plan::smollm_w8::<SmolLm>();
        assert_eq!(facts(&plan), [(15, 37_120), (9, 37_120), (48, 37_120), (18, 49_280)]);
        assert_eq!(layer_bytes(&plan), 3_559_680);
        let plan = Plan::qwen::<Qwen>();
        assert_eq!(facts(&plan), [(72, 28_672), (56, 28_672), (608, 28_672), (896, 9728)]);
        assert_eq!(plan.parameters, 4096);
    }

    #[test]
    fn dealt_blocks_return_to_their_rows() {
        let blocks = Plan::smollm::<SmolLm>().streams[2];
        let rows: Vec<usize> = (0..7).map(|block| blocks.first_row(block)).collect();
        assert_eq!(rows, [0, 64, 128, 32, 96, 160, 192]);
        let mut all: Vec<usize> = (0..96).map(|block| blocks.first_row(block)).collect();
        all.sort_unstable();
        assert!(all.iter().enumerate().all(|(i, row)| *row == 32 * i));
    }
}
