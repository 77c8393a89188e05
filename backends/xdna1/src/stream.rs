//! Weight streams of the single-dispatch engines.
//!
//! The weight buffer is six streams, one a GEMV tile, of equal blocks: for each layer gammas (and biases), query/key/value rows,
//! output rows, gate and up rows by groups, down rows; then the final norm and, where the engine has it, the LM head. Each block
//! is a function of its number, so packing is split by blocks over threads or over pieces of a device buffer.

use crate::error::LaneError;
use crate::layout::{
    BF16_BYTES, EngineLayout, GEMV_TILES, MLP_GROUP_ROWS, Part, QWEN_DOWN_CHUNK, SMOLLM_DOWN_ROWS, Share,
};
use crate::weights::{EngineWeights, Matrix, PackageWeights, Vector};
use npuhal_models::package::Family;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The weight streams of an engine over some number of layers.
#[derive(Debug, Clone, Copy)]
pub struct EngineStream<'w, W> {
    layout: EngineLayout,
    weights: &'w W,
    layers: usize,
}

impl<'w> EngineStream<'w, PackageWeights> {
    /// The streams of a package: all its layers.
    ///
    /// # Errors
    /// [`LaneError::WrongModel`] where the package has not the widths of its family's engine.
    pub fn of_package(weights: &'w PackageWeights) -> Result<Self, LaneError> {
        let layout = EngineLayout::for_shape(weights.family(), weights.shape())?;
        Ok(Self { layout, weights, layers: weights.shape().layers })
    }
}

impl<'w, W: EngineWeights> EngineStream<'w, W> {
    /// Streams of `layers` layers from `weights`, whose matrices have the layout's shape.
    #[must_use]
    pub fn new(layout: &EngineLayout, weights: &'w W, layers: usize) -> Self {
        Self { layout: *layout, weights, layers }
    }

    /// Bytes of the whole weight buffer.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.layout.weight_bytes(self.layers)
    }

    /// Packs all six streams into `out`, the weight buffer, on `threads` threads.
    ///
    /// # Errors
    /// [`LaneError::BufferLength`].
    pub fn pack(&self, out: &mut [u8], threads: NonZeroUsize) -> Result<(), LaneError> {
        check_length("weight buffer", self.len_bytes(), out)?;
        let mut rest = out;
        let mut runs = Vec::new();
        for tile in 0..GEMV_TILES {
            let (stream, later) = rest.split_at_mut(self.layout.tile_bytes(self.layers, tile));
            rest = later;
            // As many blocks as a layer has: what lies together in a matrix stays together.
            let blocks = self.layout.layer_blocks(tile);
            let pieces = stream.chunks_mut(blocks * self.layout.block_bytes()).enumerate();
            runs.extend(pieces.map(|(index, piece)| (tile, index * blocks, piece)));
        }
        for_each(runs, threads, |(tile, first, piece)| self.fill(tile, first, piece));
        Ok(())
    }

    /// Packs blocks `blocks` of `tile`'s stream into `out`.
    ///
    /// # Errors
    /// [`LaneError::OutOfRange`], [`LaneError::BufferLength`].
    pub fn pack_blocks(&self, tile: usize, blocks: Range<usize>, out: &mut [u8]) -> Result<(), LaneError> {
        if tile >= GEMV_TILES {
            return Err(LaneError::OutOfRange { what: "GEMV tile", found: tile as u64, limit: GEMV_TILES as u64 });
        }
        let limit = self.layout.tile_blocks(self.layers, tile);
        if blocks.end > limit || blocks.start > blocks.end {
            let found = blocks.end.max(blocks.start) as u64;
            return Err(LaneError::OutOfRange { what: "end of blocks", found, limit: limit as u64 + 1 });
        }
        check_length("blocks", blocks.len() * self.layout.block_bytes(), out)?;
        self.fill(tile, blocks.start, out);
        Ok(())
    }

    fn fill(&self, tile: usize, first: usize, mut out: &mut [u8]) {
        let mut number = first;
        while !out.is_empty() {
            let blocks = self.next_blocks(tile, number, out);
            out = &mut out[blocks * self.layout.block_bytes()..];
            number += blocks;
        }
    }

    /// Packs block `number`, and with it those behind it that go on in the same rows, as far as `out` reaches: long copies are
    /// faster than short ones. How many blocks that were.
    fn next_blocks(&self, tile: usize, number: usize, out: &mut [u8]) -> usize {
        let layout = &self.layout;
        let (layer, mut at) = (number / layout.layer_blocks(tile), number % layout.layer_blocks(tile));
        if layer >= self.layers {
            return self.tail(tile, number - self.layers * layout.layer_blocks(tile), out);
        }
        for part in [Part::Params, Part::Qkv, Part::OProj, Part::Mlp] {
            let blocks = layout.part_blocks(part, tile);
            if at < blocks {
                return self.part(part, tile, layer, at, out);
            }
            at -= blocks;
        }
        self.part(Part::Down, tile, layer, at, out)
    }

    fn part(&self, part: Part, tile: usize, layer: usize, at: usize, out: &mut [u8]) -> usize {
        let rows = self.layout.block_rows;
        let left = self.layout.part_blocks(part, tile) - at;
        match part {
            Part::Params => self.single(out, |out| self.params(tile, layer, out)),
            Part::Qkv => {
                let first = self.layout.qkv_share(tile).start + at * rows;
                self.rows(Matrix::Qkv(layer), first, rows, left, out)
            }
            Part::OProj => {
                let first = self.layout.out_share(tile).start + at * rows;
                self.rows(Matrix::OProj(layer), first, rows, left, out)
            }
            Part::Mlp => {
                // A group is its gate rows, then its up rows.
                let half = MLP_GROUP_ROWS / rows;
                let (group, block) = (at / (2 * half), at % (2 * half));
                let up = if block < half { 0 } else { self.layout.shape().intermediate_size };
                let start = self.layout.mlp_share(tile).start + group * MLP_GROUP_ROWS;
                let first = up + start + block % half * rows;
                self.rows(Matrix::GateUp(layer), first, rows, half - block % half, out)
            }
            Part::Down => self.down(tile, layer, at, left, out),
        }
    }

    /// Copies rows from `first` on: `rows` a block, at most `blocks` blocks, as many as `out` has room for. How many blocks.
    fn rows(&self, matrix: Matrix, first: usize, rows: usize, blocks: usize, out: &mut [u8]) -> usize {
        let block_bytes = self.layout.block_bytes();
        let blocks = blocks.min(out.len() / block_bytes);
        self.weights.copy_rows(matrix, first, blocks * rows, &mut out[..blocks * block_bytes]);
        blocks
    }

    /// Packs one block.
    fn single(&self, out: &mut [u8], pack: impl FnOnce(&mut [u8])) -> usize {
        pack(&mut out[..self.layout.block_bytes()]);
        1
    }

    /// Gammas; in the Qwen engine also this tile's biases as f32.
    fn params(&self, tile: usize, layer: usize, out: &mut [u8]) {
        let len = self.layout.shape().hidden_size * BF16_BYTES;
        out.fill(0);
        let (input, rest) = out.split_at_mut(len);
        let (post, rest) = rest.split_at_mut(len);
        self.weights.copy_gamma(Vector::InputNorm(layer), input);
        self.weights.copy_gamma(Vector::PostAttnNorm(layer), post);
        if self.layout.family == Family::Qwen2 {
            let Share { start, rows } = self.layout.qkv_share(tile);
            let mut bias = vec![0.0f32; rows];
            self.weights.copy_bias(layer, start, &mut bias);
            for (out, bias) in rest.as_chunks_mut::<4>().0.iter_mut().zip(&bias) {
                *out = bias.to_le_bytes();
            }
        }
    }

    fn down(&self, tile: usize, layer: usize, at: usize, left: usize, out: &mut [u8]) -> usize {
        let start = self.layout.out_share(tile).start;
        match self.layout.family {
            Family::Llama => {
                let first = start + at * SMOLLM_DOWN_ROWS;
                self.rows(Matrix::Down(layer), first, SMOLLM_DOWN_ROWS, left, out)
            }
            // For each group of rows one block a tile: the columns of that tile's part of the feed-forward vector.
            Family::Qwen2 => self.single(out, |out| {
                let (group, chunk) = (at / GEMV_TILES, at % GEMV_TILES);
                let columns = self.layout.mlp_share(chunk);
                let first = start + group * self.layout.block_rows;
                for (index, row) in out.chunks_exact_mut(QWEN_DOWN_CHUNK * BF16_BYTES).enumerate() {
                    let (filled, zeros) = row.split_at_mut(columns.rows * BF16_BYTES);
                    self.weights.copy_columns(Matrix::Down(layer), first + index, columns.start, columns.rows, filled);
                    zeros.fill(0);
                }
            }),
        }
    }

    /// The final norm (in every stream, used by tile 0), then rows of the LM head.
    fn tail(&self, tile: usize, at: usize, out: &mut [u8]) -> usize {
        if at == 0 {
            return self.single(out, |out| {
                let (gamma, zeros) = out.split_at_mut(self.layout.shape().hidden_size * BF16_BYTES);
                self.weights.copy_gamma(Vector::FinalNorm, gamma);
                zeros.fill(0);
            });
        }
        let rows = self.layout.block_rows;
        let first = self.layout.head_share(tile).start + (at - 1) * rows;
        self.rows(Matrix::Head, first, rows, self.layout.tail_blocks(tile) - at, out)
    }
}

/// Runs `job` on every piece of work, on `threads` threads.
pub(crate) fn for_each<T: Send>(work: Vec<T>, threads: NonZeroUsize, job: impl Fn(T) + Sync) {
    let threads = threads.get().min(work.len().max(1));
    let work = Mutex::new(work.into_iter());
    let run = || {
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(piece) = next else { break };
            job(piece);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(run);
        }
        run();
    });
}

pub(crate) fn check_length(what: &'static str, wanted: usize, out: &[u8]) -> Result<(), LaneError> {
    if out.len() == wanted {
        return Ok(());
    }
    Err(LaneError::BufferLength { what, wanted: wanted as u64, found: out.len() as u64 })
}
