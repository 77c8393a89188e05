//! What the lane takes from a model file.

use crate::packing::{PackError, TileSource};
use npuhal_models::ModelConfig;

/// Tensors of a layer. Norms are bf16.
pub struct LayerTensors<'a> {
    /// Query projection.
    pub q: Box<dyn TileSource + 'a>,
    /// Key projection.
    pub k: Box<dyn TileSource + 'a>,
    /// Value projection.
    pub v: Box<dyn TileSource + 'a>,
    /// Output projection.
    pub o: Box<dyn TileSource + 'a>,
    /// Gate projection.
    pub gate: Box<dyn TileSource + 'a>,
    /// Up projection.
    pub up: Box<dyn TileSource + 'a>,
    /// Down projection.
    pub down: Box<dyn TileSource + 'a>,
    /// Norm before attention, hidden size.
    pub input_norm: &'a [u8],
    /// Norm before the feed-forward block, hidden size.
    pub post_attention_norm: &'a [u8],
    /// Norm of query heads, head size.
    pub q_norm: Option<&'a [u8]>,
    /// Norm of key heads, head size.
    pub k_norm: Option<&'a [u8]>,
}

/// A model whose projections are tiles. The lane reads all but the embedding once, at load.
pub trait LaneSource: Send + Sync {
    /// Shape and constants.
    fn config(&self) -> &ModelConfig;

    /// Tensors of a layer.
    ///
    /// # Errors
    /// Whatever keeps them from being read.
    fn layer(&self, layer: usize) -> Result<LayerTensors<'_>, PackError>;

    /// The head's matrix, vocabulary × hidden size.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn head(&self) -> Result<Box<dyn TileSource + '_>, PackError>;

    /// Norm after the last layer, hidden size, bf16.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn final_norm(&self) -> Result<&[u8], PackError>;

    /// Token embedding, vocabulary × hidden size, bf16.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn embedding(&self) -> Result<&[u8], PackError>;
}
