//! Which tensors a model of a configuration has, and their shapes.

use crate::config::ModelConfig;
use crate::source::{LayerTensor, TensorRole};

/// Parts of a layer.
pub(crate) const LAYER_PARTS: [LayerTensor; 16] = [
    LayerTensor::InputNorm,
    LayerTensor::Q,
    LayerTensor::QBias,
    LayerTensor::QNorm,
    LayerTensor::K,
    LayerTensor::KBias,
    LayerTensor::KNorm,
    LayerTensor::V,
    LayerTensor::VBias,
    LayerTensor::O,
    LayerTensor::AttentionOutputNorm,
    LayerTensor::PostAttentionNorm,
    LayerTensor::Gate,
    LayerTensor::Up,
    LayerTensor::Down,
    LayerTensor::FeedForwardOutputNorm,
];

/// Whether the layers of a model of `config` have `part`.
pub(crate) fn has_part(config: &ModelConfig, part: LayerTensor) -> bool {
    match part {
        LayerTensor::QBias | LayerTensor::KBias | LayerTensor::VBias => config.qkv_bias,
        LayerTensor::QNorm | LayerTensor::KNorm => config.qk_norm,
        LayerTensor::AttentionOutputNorm | LayerTensor::FeedForwardOutputNorm => config.features.output_norms,
        _ => true,
    }
}

/// All tensors that a model of `config` needs.
pub(crate) fn required(config: &ModelConfig) -> impl Iterator<Item = TensorRole> {
    let whole = [TensorRole::TokenEmbedding, TensorRole::FinalNorm].into_iter();
    let head = (!config.tied_head).then_some(TensorRole::Head);
    let layers = (0..config.layers).flat_map(move |layer| {
        let parts = LAYER_PARTS.into_iter().filter(move |part| has_part(config, *part));
        parts.map(move |part| TensorRole::Layer(layer, part))
    });
    whole.chain(head).chain(layers)
}

/// Rows and columns of the tensor of `role` in a model of `config`.
pub(crate) fn shape_of(role: TensorRole, config: &ModelConfig) -> (usize, usize) {
    let (hidden, q, kv, wide) = (config.hidden_size, config.q_width(), config.kv_width(), config.intermediate_size);
    match role {
        TensorRole::TokenEmbedding | TensorRole::Head => (config.vocab_size, hidden),
        TensorRole::FinalNorm => (1, hidden),
        TensorRole::RopeFactors => (1, config.rope.dims / 2),
        TensorRole::Layer(_, tensor) => match tensor {
            LayerTensor::InputNorm
            | LayerTensor::AttentionOutputNorm
            | LayerTensor::PostAttentionNorm
            | LayerTensor::FeedForwardOutputNorm => (1, hidden),
            LayerTensor::Q => (q, hidden),
            LayerTensor::QBias => (1, q),
            LayerTensor::K | LayerTensor::V => (kv, hidden),
            LayerTensor::KBias | LayerTensor::VBias => (1, kv),
            LayerTensor::QNorm | LayerTensor::KNorm => (1, config.head_dim),
            LayerTensor::O => (hidden, q),
            LayerTensor::Gate | LayerTensor::Up => (wide, hidden),
            LayerTensor::Down => (hidden, wide),
        },
    }
}
