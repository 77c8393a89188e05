//! Contents of the lane's buffers.
//!
//! A weight matrix (output features × input features) is a grid of tiles of 32 rows × 256 columns, row after row of tiles. The
//! kernels read tiles in another order, in groups that span two rows of tiles, and the projections of a layer one behind the
//! other.

mod buffers;
mod layer;
mod order;
mod rope;

pub use buffers::{
    AUXILIARY_BYTES, BufferSizes, INIT_BYTES, NORMS_BYTES, POSITIONS_MAX, ROPE_BYTES, fill_layer_norms, fill_norms,
};
pub use layer::{CHUNK_ROWS, LayerLayout, LayerWeights, Placed, pack_head, pack_layer};
pub use order::{
    GROUP_COLUMNS, SliceTiles, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, TileSource, group_of, source_of, tiles_of,
};
pub use rope::RopeTable;

use thiserror::Error;

/// Elements of a head.
pub const HEAD_DIM: usize = 128;

/// Buffers that cannot be filled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A tensor reaches past the end of its file.
    #[error("model.q4nx: {what} runs past the end of the file: {wanted} tiles from its start, {available} are there")]
    PastEnd {
        /// Tensor.
        what: String,
        /// Tiles that are read.
        wanted: usize,
        /// Whole tiles from its start to the end of the file.
        available: usize,
    },
    /// A tensor of another shape.
    #[error("{what} has {found} tiles; a matrix of this model has {wanted}")]
    TileCount {
        /// Tensor.
        what: String,
        /// Tiles wanted.
        wanted: usize,
        /// Tiles found.
        found: usize,
    },
    /// A norm of another length.
    #[error("{what} has {found_bytes} bytes; wanted {wanted_bytes} (bf16)")]
    NormBytes {
        /// Tensor.
        what: String,
        /// Bytes wanted.
        wanted_bytes: usize,
        /// Bytes found.
        found_bytes: usize,
    },
    /// A destination of another size.
    #[error("a buffer of {found_bytes} bytes for {wanted_bytes} bytes of {what}")]
    Destination {
        /// What is packed.
        what: &'static str,
        /// Bytes wanted.
        wanted_bytes: usize,
        /// Bytes found.
        found_bytes: usize,
    },
    /// The source of the tiles failed.
    #[error("{what}, tile {index}: {reason}")]
    Source {
        /// Tensor.
        what: String,
        /// Tile.
        index: usize,
        /// What went wrong.
        reason: String,
    },
}
