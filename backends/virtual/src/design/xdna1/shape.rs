//! Shapes of the two model families, and how their rows are dealt to the six GEMV tiles.

use super::vector::{HEAD_DIM, Head};
use std::fmt;

/// Tiles that multiply.
pub(crate) const TILES: usize = 6;
/// Positions of the context window.
pub(crate) const POSITIONS: usize = 64;
/// Rows of a gate or up group.
pub(crate) const GROUP_ROWS: usize = 16;
/// Logits of an object that leaves a tile.
pub(crate) const LOGITS: usize = 64;
/// Elements of a cache object: keys, then values, of one KV head.
pub(crate) const CACHE_ELEMENTS: usize = 2 * POSITIONS * HEAD_DIM;

/// A family's sizes. Rows that tiles share are in the order of the tiles, each tile's rows consecutive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// Width of the feed-forward block.
    pub(crate) intermediate: usize,
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// Entries of the vocabulary.
    pub(crate) vocab: usize,
    /// Elements of a slice object; the joined object has six.
    pub(crate) slice: usize,
    /// Elements of a block of weights.
    pub(crate) block: usize,
    /// Width of a row of the down projection in a block.
    pub(crate) down_width: usize,
    /// Rows of query, key and value on each tile.
    pub(crate) qkv_rows: usize,
    /// Rows of the output projection, and of the down projection, on each tile.
    pub(crate) out_rows: [usize; TILES],
    /// Gate rows, and up rows, on each tile.
    pub(crate) mlp_rows: [usize; TILES],
    /// Rows of the head on each tile; zeros where the design has none.
    pub(crate) head_rows: [usize; TILES],
    /// Whether query, key and value have biases.
    pub(crate) has_bias: bool,
    /// Objects of the cache FIFO.
    pub(crate) cache_depth: usize,
    /// Objects of the joined FIFO on the hub's side.
    pub(crate) joined_depth: usize,
}

/// SmolLM 135M: section 2 of the published layout.
pub(crate) const SMOLLM: Shape = Shape {
    hidden: 576,
    intermediate: 1536,
    heads: 9,
    kv_heads: 3,
    vocab: 49_152,
    slice: 256,
    block: 4608,
    down_width: 1536,
    qkv_rows: 160,
    out_rows: [96; TILES],
    mlp_rows: [256; TILES],
    head_rows: [0; TILES],
    has_bias: false,
    cache_depth: 2,
    joined_depth: 2,
};

/// Qwen2.5 0.5B: section 3.
pub(crate) const QWEN: Shape = Shape {
    hidden: 896,
    intermediate: 4864,
    heads: 14,
    kv_heads: 2,
    vocab: 151_936,
    slice: 896,
    block: 3584,
    down_width: 896,
    qkv_rows: 192,
    out_rows: [152, 152, 148, 148, 148, 148],
    mlp_rows: [816, 816, 816, 816, 800, 800],
    head_rows: [25_344, 25_344, 25_344, 25_344, 25_280, 25_280],
    has_bias: true,
    cache_depth: 1,
    joined_depth: 1,
};

impl Shape {
    /// Rows of query, key and value.
    pub(crate) const fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * HEAD_DIM
    }

    /// Rows of width `hidden` in a block.
    pub(crate) const fn block_rows(&self) -> usize {
        self.block / self.hidden
    }

    /// Rows of the down projection in a block, and blocks of such rows.
    pub(crate) const fn down_rows(&self) -> usize {
        self.block / self.down_width
    }

    /// Pieces of a row of the down projection.
    pub(crate) const fn down_chunks(&self) -> usize {
        self.slice * TILES / self.down_width
    }

    pub(crate) fn qkv_blocks(&self) -> usize {
        self.qkv_rows / self.block_rows()
    }

    pub(crate) fn out_blocks(&self, tile: usize) -> usize {
        self.out_rows[tile] / self.block_rows()
    }

    pub(crate) fn mlp_blocks(&self, tile: usize) -> usize {
        2 * self.mlp_rows[tile] / self.block_rows()
    }

    pub(crate) fn down_blocks(&self, tile: usize) -> usize {
        self.out_rows[tile] / self.down_rows() * self.down_chunks()
    }

    /// Blocks of one layer in the stream of a tile.
    pub(crate) fn layer_blocks(&self, tile: usize) -> usize {
        1 + self.qkv_blocks() + self.out_blocks(tile) + self.mlp_blocks(tile) + self.down_blocks(tile)
    }

    /// Blocks after the last layer: final norm and head.
    pub(crate) fn tail_blocks(&self, tile: usize) -> usize {
        1 + self.head_rows[tile] / self.block_rows()
    }

    /// First of a tile's rows of the output projection.
    pub(crate) fn out_start(&self, tile: usize) -> usize {
        self.out_rows[..tile].iter().sum()
    }

    /// Elements of a layer's new keys and values.
    pub(crate) const fn kv_elements(&self) -> usize {
        2 * self.kv_heads * HEAD_DIM
    }

    /// Whether the head is computed by the cores.
    pub(crate) fn has_head(&self) -> bool {
        self.head_rows[0] > 0
    }
}

/// What the hub takes from the header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables {
    /// Elements from the start that the hub keeps.
    pub(crate) elements: usize,
    /// Element that holds the position.
    pub(crate) position: usize,
    /// First element of the token's embedding.
    pub(crate) embedding: usize,
}

/// A family: sizes and the arithmetic of its cores. Vectors hold values that bf16 holds.
pub(crate) trait Model: fmt::Debug + Send + 'static {
    /// Sizes.
    const SHAPE: Shape;
    /// Header.
    const TABLES: Tables;

    /// RMSNorm before a projection.
    fn norm(residual: &[f32], gamma: &[f32]) -> Vec<f32>;
    /// RMSNorm after the last layer.
    fn final_norm(residual: &[f32], gamma: &[f32]) -> Vec<f32>;
    /// RoPE of one head with the engine's header.
    fn rotate(head: &Head, table: &[u16]) -> Head;
    /// Attention of one query head over the positions so far, the new one last.
    fn attend(query: &Head, keys: &[Head], values: &[Head]) -> Head;
    /// `SiLU(gate) · up`, bf16 bits.
    fn activation(gate: f32, up: f32) -> u16;
}

/// The position that a bf16 number names, where it is one of the window.
pub(crate) fn position(number: f32) -> Result<usize, String> {
    let position = number as usize;
    if position < POSITIONS && position as f32 == number {
        return Ok(position);
    }
    Err(format!("{number} is no position; wanted a whole number from 0 to {}", POSITIONS - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_published_ones() {
        for tile in 0..TILES {
            assert_eq!((SMOLLM.layer_blocks(tile), SMOLLM.tail_blocks(tile)), (129, 1));
        }
        let layer = [723, 723, 716, 716, 708, 708];
        let tail = [6337, 6337, 6337, 6337, 6321, 6321];
        for tile in 0..TILES {
            assert_eq!((QWEN.layer_blocks(tile), QWEN.tail_blocks(tile)), (layer[tile], tail[tile]));
            assert_eq!(QWEN.out_start(tile), [0, 152, 304, 452, 600, 748][tile]);
        }
        for shape in [SMOLLM, QWEN] {
            assert_eq!(shape.out_rows.iter().sum::<usize>(), shape.hidden);
            assert_eq!(shape.mlp_rows.iter().sum::<usize>(), shape.intermediate);
            assert_eq!(shape.qkv_rows * TILES, shape.qkv());
        }
        assert_eq!(QWEN.head_rows.iter().sum::<usize>(), QWEN.vocab);
    }

    #[test]
    fn positions_are_whole_and_inside() {
        assert_eq!((position(0.0), position(63.0)), (Ok(0), Ok(63)));
        for number in [64.0, -1.0, 0.5, f32::NAN, f32::INFINITY] {
            assert!(position(number).is_err(), "{number}");
        }
    }
}
