//! Weights of the chunked graphs: a few whole layers in each dispatch.
//!
//! Every chunk is all its layers' query/key/value blocks, then all output blocks, then all gate/up blocks, then all down blocks;
//! the SmolLM graph reads them layer after layer, the Qwen graph block after block with the layers side by side. The SmolLM graph
//! also has an int8 form, each block followed by the scales of its rows.

use crate::error::LaneError;
use crate::layout::BF16_BYTES;
use crate::stream::{check_length, for_each};
use crate::weights::{EngineWeights, Matrix, PackageWeights, Vector};
use npuhal_core::dtype::{bf16_bits, bf16_value};
use npuhal_models::package::{Family, HEAD_DIM, Shape};
use std::num::NonZeroUsize;
use std::ops::Range;

/// Layers of a dispatch on validated firmware; more time out.
pub const LAYERS_PER_DISPATCH: usize = 2;
/// Elements of the SmolLM graph's gammas for a layer: input, then post-attention.
pub const SMOLLM_GAMMA_ELEMENTS: usize = 2 * Family::Llama.shape().hidden_size;
/// Elements of the Qwen graph's parameters for a layer: input gamma, post-attention gamma, high and low parts of the biases.
pub const QWEN_PARAM_ELEMENTS: usize = 2 * Family::Qwen2.shape().hidden_size + 2 * 1152;

/// How a graph reads its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkFormat {
    /// SmolLM, bf16: 32 rows of 576 or 16 rows of 1536 a block; gate/up blocks in the order of the three workers.
    SmolLmBf16,
    /// SmolLM, int8 with f32 scales: 64 rows of 576 or 32 rows of 1536 a block.
    SmolLmW8,
    /// Qwen, bf16: 16 rows of 896 a block, single rows of 4864 for the down projection.
    QwenBf16,
}

/// Order in which the gate/up blocks of three workers, two each, are read: a worker's blocks lie side by side in the matrix.
const WORKER_ORDER: [usize; 6] = [0, 2, 4, 1, 3, 5];

/// One matrix of a layer, cut into blocks of whole rows.
#[derive(Debug, Clone, Copy)]
struct Blocks {
    matrix: fn(usize) -> Matrix,
    rows: usize,
    cols: usize,
    block_rows: usize,
    /// Whether blocks go in [`WORKER_ORDER`].
    by_workers: bool,
}

impl ChunkFormat {
    /// Name of the design.
    #[must_use]
    pub const fn design(self) -> &'static str {
        match self {
            Self::SmolLmBf16 | Self::SmolLmW8 => "decoder_layer",
            Self::QwenBf16 => "qwen_decoder",
        }
    }

    /// Family of the graph's models.
    #[must_use]
    pub const fn family(self) -> Family {
        match self {
            Self::SmolLmBf16 | Self::SmolLmW8 => Family::Llama,
            Self::QwenBf16 => Family::Qwen2,
        }
    }

    /// Rows and columns of a block of query/key/value, output, gate/up and down projections.
    #[must_use]
    pub fn block_shapes(self) -> [(usize, usize); 4] {
        self.regions().map(|blocks| (blocks.block_rows, blocks.cols))
    }

    /// Bytes of a layer's weights.
    #[must_use]
    pub fn layer_bytes(self) -> usize {
        self.regions().iter().map(|blocks| blocks.rows / blocks.block_rows * self.block_bytes(blocks)).sum()
    }

    fn regions(self) -> [Blocks; 4] {
        let shape: Shape = self.family().shape();
        let (hidden, wide, qkv) = (shape.hidden_size, shape.intermediate_size, shape.qkv_rows());
        let (block_rows, down_rows) = match self {
            Self::SmolLmBf16 => (32, 16),
            Self::SmolLmW8 => (64, 32),
            Self::QwenBf16 => (16, 1),
        };
        let blocks = |matrix, rows, cols, block_rows| Blocks { matrix, rows, cols, block_rows, by_workers: false };
        [
            blocks(Matrix::Qkv, qkv, hidden, block_rows),
            blocks(Matrix::OProj, hidden, hidden, block_rows),
            // A worker has 64 rows: two blocks of bf16, or one of int8.
            Blocks { by_workers: self == Self::SmolLmBf16, ..blocks(Matrix::GateUp, 2 * wide, hidden, block_rows) },
            blocks(Matrix::Down, hidden, wide, down_rows),
        ]
    }

    fn block_bytes(self, blocks: &Blocks) -> usize {
        match self {
            Self::SmolLmBf16 | Self::QwenBf16 => blocks.block_rows * blocks.cols * BF16_BYTES,
            Self::SmolLmW8 => blocks.block_rows * (blocks.cols + 4),
        }
    }

    /// Packs the weights of `layers` into `out` on `threads` threads.
    ///
    /// # Errors
    /// [`LaneError::WrongModel`], [`LaneError::OutOfRange`], [`LaneError::BufferLength`].
    pub fn pack(
        self,
        weights: &PackageWeights,
        layers: Range<usize>,
        out: &mut [u8],
        threads: NonZeroUsize,
    ) -> Result<(), LaneError> {
        weights.require(self.design(), self.family())?;
        check_layers(&layers, weights.shape().layers)?;
        check_length("chunk of weights", layers.len() * self.layer_bytes(), out)?;
        let mut work = Vec::new();
        let mut rest = out;
        for region in self.regions() {
            let count = region.rows / region.block_rows;
            let order: Vec<(usize, usize)> = match self {
                Self::QwenBf16 => (0..count).flat_map(|at| layers.clone().map(move |layer| (layer, at))).collect(),
                _ => layers.clone().flat_map(|layer| (0..count).map(move |at| (layer, at))).collect(),
            };
            for (layer, at) in order {
                let (block, later) = rest.split_at_mut(self.block_bytes(&region));
                rest = later;
                work.push((region, layer, at, block));
            }
        }
        for_each(work, threads, |(region, layer, at, block)| self.block(weights, &region, layer, at, block));
        Ok(())
    }

    fn block(self, weights: &PackageWeights, region: &Blocks, layer: usize, at: usize, out: &mut [u8]) {
        let at = if region.by_workers { at / 6 * 6 + WORKER_ORDER[at % 6] } else { at };
        let (matrix, first) = ((region.matrix)(layer), at * region.block_rows);
        if self != Self::SmolLmW8 {
            return weights.copy_rows(matrix, first, region.block_rows, out);
        }
        let quantized = weights.quantized(matrix);
        let (codes, scales) = out.split_at_mut(region.block_rows * region.cols);
        codes.copy_from_slice(quantized.code_rows(first, region.block_rows));
        scales.copy_from_slice(&quantized.scales.bytes()[4 * first..4 * (first + region.block_rows)]);
    }
}

/// Rows in a block of the stand-alone int8 projection over `columns` columns.
#[must_use]
pub const fn projection_block_rows(columns: usize) -> usize {
    if columns > 2048 { 8 } else { 32 }
}

/// Bytes of the stand-alone int8 projection's weights.
#[must_use]
pub const fn projection_bytes(rows: usize, columns: usize) -> usize {
    rows * (columns + 4)
}

/// Packs the LM head for the stand-alone int8 projection: blocks of whole rows, each block followed by the scales of its rows.
/// That the scales lie behind their block, as in the SmolLM graph's int8 form, is inferred: the projection's own packing is not
/// published.
///
/// # Errors
/// [`LaneError::BufferLength`], [`LaneError::OutOfRange`] where the rows do not go into whole blocks.
pub fn pack_w8_head(weights: &PackageWeights, out: &mut [u8], threads: NonZeroUsize) -> Result<(), LaneError> {
    let (rows, columns) = (weights.shape().vocab_size, weights.shape().hidden_size);
    let block_rows = projection_block_rows(columns);
    if !rows.is_multiple_of(block_rows) {
        let limit = (rows / block_rows * block_rows) as u64;
        return Err(LaneError::OutOfRange { what: "row of the int8 head", found: rows as u64, limit });
    }
    check_length("int8 head", projection_bytes(rows, columns), out)?;
    let quantized = weights.quantized(Matrix::Head);
    let blocks = out.chunks_exact_mut(projection_bytes(block_rows, columns)).enumerate().collect();
    for_each(blocks, threads, |(block, out): (usize, &mut [u8])| {
        let first = block * block_rows;
        let (codes, scales) = out.split_at_mut(block_rows * columns);
        codes.copy_from_slice(quantized.code_rows(first, block_rows));
        scales.copy_from_slice(&quantized.scales.bytes()[4 * first..4 * (first + block_rows)]);
    });
    Ok(())
}

/// Packs the SmolLM graph's gammas of `layers`.
///
/// # Errors
/// As [`ChunkFormat::pack`].
pub fn pack_smollm_gammas(weights: &PackageWeights, layers: Range<usize>, out: &mut [u8]) -> Result<(), LaneError> {
    weights.require(ChunkFormat::SmolLmBf16.design(), Family::Llama)?;
    check_layers(&layers, weights.shape().layers)?;
    check_length("gammas", layers.len() * SMOLLM_GAMMA_ELEMENTS * BF16_BYTES, out)?;
    for (layer, out) in layers.zip(out.chunks_exact_mut(SMOLLM_GAMMA_ELEMENTS * BF16_BYTES)) {
        copy_gammas(weights, layer, out);
    }
    Ok(())
}

/// Packs the Qwen graph's parameters of `layers`: gammas, and the biases as two bf16 parts.
///
/// # Errors
/// As [`ChunkFormat::pack`].
pub fn pack_qwen_params(weights: &PackageWeights, layers: Range<usize>, out: &mut [u8]) -> Result<(), LaneError> {
    weights.require(ChunkFormat::QwenBf16.design(), Family::Qwen2)?;
    check_layers(&layers, weights.shape().layers)?;
    check_length("parameters", layers.len() * QWEN_PARAM_ELEMENTS * BF16_BYTES, out)?;
    let gammas = 2 * weights.shape().hidden_size * BF16_BYTES;
    let mut bias = vec![0.0; weights.shape().qkv_rows()];
    for (layer, out) in layers.zip(out.chunks_exact_mut(QWEN_PARAM_ELEMENTS * BF16_BYTES)) {
        let (gammas, biases) = out.split_at_mut(gammas);
        copy_gammas(weights, layer, gammas);
        weights.copy_bias(layer, 0, &mut bias);
        let (high, low) = biases.as_chunks_mut::<2>().0.split_at_mut(bias.len());
        for ((bias, high), low) in bias.iter().zip(high).zip(low) {
            let bits = bf16_bits(*bias);
            *high = bits.to_le_bytes();
            *low = bf16_bits(bias - bf16_value(bits)).to_le_bytes();
        }
    }
    Ok(())
}

fn copy_gammas(weights: &PackageWeights, layer: usize, out: &mut [u8]) {
    let (input, post) = out.split_at_mut(out.len() / 2);
    weights.copy_gamma(Vector::InputNorm(layer), input);
    weights.copy_gamma(Vector::PostAttnNorm(layer), post);
}

fn check_layers(layers: &Range<usize>, limit: usize) -> Result<(), LaneError> {
    if layers.start <= layers.end && layers.end <= limit {
        return Ok(());
    }
    let found = layers.end.max(layers.start) as u64;
    Err(LaneError::OutOfRange { what: "end of layers", found, limit: limit as u64 + 1 })
}

const _: () = assert!(QWEN_PARAM_ELEMENTS == 4096 && HEAD_DIM * (14 + 4) == 1152);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_have_the_published_sizes() {
        assert_eq!(ChunkFormat::SmolLmBf16.layer_bytes(), 2 * 3_538_944);
        assert_eq!(ChunkFormat::SmolLmW8.layer_bytes(), 3_559_680);
        let blocks = |format: ChunkFormat| {
            format.regions().map(|region| (region.rows / region.block_rows, format.block_bytes(&region)))
        };
        assert_eq!(blocks(ChunkFormat::SmolLmBf16).map(|(count, _)| count), [30, 18, 96, 36]);
        assert_eq!(blocks(ChunkFormat::SmolLmW8), [(15, 37_120), (9, 37_120), (48, 37_120), (18, 49_280)]);
        let qwen = 2 * 896 * (1152 + 896 + 2 * 4864 + 4864);
        assert_eq!(ChunkFormat::QwenBf16.layer_bytes(), qwen);
    }
}
