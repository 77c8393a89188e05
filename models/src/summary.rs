//! Sizes of a model, for `inspect` and for choosing where to run.

use crate::q4nx::TileKind;
use crate::source::{LayerTensor, ModelSource, TensorRole};
use crate::tensor::{Tensor, WeightType};
use std::collections::BTreeMap;
use std::fmt;

/// What a tensor's parameters count towards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParameterGroup {
    /// Token embedding; also the head where they are tied.
    Embedding,
    /// Projections of attention and their biases.
    Attention,
    /// Gate, up and down projections.
    FeedForward,
    /// RMSNorm weights and RoPE factors.
    Norms,
    /// A head of its own.
    Head,
}

impl ParameterGroup {
    /// The group of a role.
    #[must_use]
    pub fn of(role: TensorRole) -> Self {
        match role {
            TensorRole::TokenEmbedding => Self::Embedding,
            TensorRole::Head => Self::Head,
            TensorRole::FinalNorm | TensorRole::RopeFactors => Self::Norms,
            TensorRole::Layer(_, tensor) => match tensor {
                LayerTensor::InputNorm
                | LayerTensor::PostAttentionNorm
                | LayerTensor::QNorm
                | LayerTensor::KNorm
                | LayerTensor::AttentionOutputNorm
                | LayerTensor::FeedForwardOutputNorm => Self::Norms,
                LayerTensor::Gate | LayerTensor::Up | LayerTensor::Down => Self::FeedForward,
                LayerTensor::Q
                | LayerTensor::QBias
                | LayerTensor::K
                | LayerTensor::KBias
                | LayerTensor::V
                | LayerTensor::VBias
                | LayerTensor::O => Self::Attention,
            },
        }
    }

    /// Name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::FeedForward => "feed-forward",
            Self::Norms => "norms",
            Self::Head => "head",
        }
    }
}

impl fmt::Display for ParameterGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Tensors, parameters and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Tensors.
    pub tensors: usize,
    /// Elements.
    pub parameters: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, tensor: &Tensor) {
        self.count(tensor.rows(), tensor.cols(), tensor.bytes().len());
    }

    fn count(&mut self, rows: usize, cols: usize, bytes: usize) {
        self.tensors += 1;
        self.parameters += rows as u64 * cols as u64;
        self.bytes += bytes as u64;
    }
}

/// Sizes of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelSummary {
    /// All tensors.
    pub total: Amount,
    /// By what they are for.
    pub groups: BTreeMap<ParameterGroup, Amount>,
    /// Tensors stored as rows, by storage type.
    pub types: BTreeMap<WeightType, Amount>,
    /// Matrices stored as tiles, by kind.
    pub tiles: BTreeMap<TileKind, Amount>,
    /// Weight bytes that decoding one token reads, as stored: every layer, the final norm, the whole head, and one row of
    /// the embedding. The KV cache comes on top: [`crate::ModelConfig::kv_bytes`].
    pub decode_bytes: u64,
}

impl ModelSource {
    /// Its sizes.
    #[must_use]
    pub fn summary(&self) -> ModelSummary {
        let mut summary = ModelSummary::default();
        for (role, tensor) in self.tensors() {
            summary.total.add(tensor);
            summary.groups.entry(ParameterGroup::of(role)).or_default().add(tensor);
            summary.types.entry(tensor.weight_type()).or_default().add(tensor);
            summary.decode_bytes += match role {
                TensorRole::TokenEmbedding if self.config().tied_head => tensor.bytes().len() + tensor.row_bytes(),
                TensorRole::TokenEmbedding => tensor.row_bytes(),
                _ => tensor.bytes().len(),
            } as u64;
        }
        for (role, tensor) in self.tiled_tensors() {
            let (rows, cols, bytes) = (tensor.rows(), tensor.cols(), tensor.len_bytes());
            summary.total.count(rows, cols, bytes);
            summary.groups.entry(ParameterGroup::of(role)).or_default().count(rows, cols, bytes);
            summary.tiles.entry(tensor.kind()).or_default().count(rows, cols, bytes);
            summary.decode_bytes += bytes as u64;
        }
        summary
    }
}
