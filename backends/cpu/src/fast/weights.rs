//! Weights of a fast segment: packed matrices, f32 vectors.

use crate::error::CpuError;
use crate::packed::{PackedMatrix, Packer};
use crate::pool::Pool;
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelConfig, ModelSource, Tensor, TensorRole};
use npuhal_registry::SegmentSpan;

/// One decoder layer.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) input_norm: Vec<f32>,
    pub(super) q: PackedMatrix,
    pub(super) k: PackedMatrix,
    pub(super) v: PackedMatrix,
    pub(super) biases: Option<Biases>,
    pub(super) head_norms: Option<HeadNorms>,
    pub(super) o: PackedMatrix,
    pub(super) attention_output_norm: Option<Vec<f32>>,
    pub(super) post_attention_norm: Vec<f32>,
    pub(super) gate: PackedMatrix,
    pub(super) up: PackedMatrix,
    pub(super) down: PackedMatrix,
    pub(super) feed_forward_output_norm: Option<Vec<f32>>,
}

/// Biases of the query, key and value projections.
#[derive(Debug)]
pub(super) struct Biases {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

/// Norms of each query and key head.
#[derive(Debug)]
pub(super) struct HeadNorms {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
}

/// Where token rows come from.
#[derive(Debug)]
pub(super) enum Embedding {
    /// The packed head, which is the embedding.
    Tied(PackedMatrix),
    /// The file.
    Mapped(Tensor),
}

/// Everything of a span.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Option<Embedding>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Option<Vec<f32>>,
    pub(super) head: Option<PackedMatrix>,
    pub(super) packed_bytes: usize,
}

const MATRICES: [LayerTensor; 7] = [
    LayerTensor::Q,
    LayerTensor::K,
    LayerTensor::V,
    LayerTensor::O,
    LayerTensor::Gate,
    LayerTensor::Up,
    LayerTensor::Down,
];

impl Weights {
    /// Packs the weights of `span`, which has been checked.
    pub(super) fn load(model: &ModelSource, span: &SegmentSpan, pool: &Pool) -> Result<Self, CpuError> {
        let config = model.config();
        let mut packer = Packer::new();
        for layer in span.layers.clone() {
            for kind in MATRICES {
                let (rows, cols) = shape(config, kind);
                packer.add(matrix(model, TensorRole::Layer(layer, kind), rows, cols)?)?;
            }
        }
        let head = if span.has_head() {
            let tensor = checked(model.head()?, config.vocab_size, config.hidden_size)?;
            packer.add(tensor)?;
            Some(tensor)
        } else {
            None
        };
        // Vectors first: packing drops the file's pages behind it.
        let norms: Vec<Norms> =
            span.layers.clone().map(|layer| Norms::read(model, layer)).collect::<Result<_, CpuError>>()?;
        let final_norm =
            if span.has_final_norm() { Some(vector(model, TensorRole::FinalNorm, config.hidden_size)?) } else { None };
        let mapped = if span.has_embedding() && !(config.tied_head && head.is_some()) {
            Some(matrix(model, TensorRole::TokenEmbedding, config.vocab_size, config.hidden_size)?.clone())
        } else {
            None
        };
        let packed_bytes = packer.len_bytes();
        let packed = packer.pack(pool)?;
        // Seven matrices a layer, then the head, if it is here.
        let (of_layers, rest) = packed.as_chunks::<{ MATRICES.len() }>();
        let layers = norms.into_iter().zip(of_layers).map(|(norms, matrices)| norms.with(matrices.clone())).collect();
        let head = rest.first().cloned();
        let embedding = match (mapped, &head) {
            (Some(tensor), _) => Some(Embedding::Mapped(tensor)),
            (None, Some(head)) if span.has_embedding() => Some(Embedding::Tied(head.clone())),
            _ => None,
        };
        Ok(Self { embedding, layers, final_norm, head, packed_bytes })
    }
}

/// A layer's vectors, before its matrices are packed.
struct Norms {
    input: Vec<f32>,
    post_attention: Vec<f32>,
    attention_output: Option<Vec<f32>>,
    feed_forward_output: Option<Vec<f32>>,
    biases: Option<Biases>,
    heads: Option<HeadNorms>,
}

impl Norms {
    fn read(model: &ModelSource, layer: usize) -> Result<Self, CpuError> {
        let config = model.config();
        let read = |kind, len| vector(model, TensorRole::Layer(layer, kind), len);
        let biases = if config.qkv_bias {
            Some(Biases {
                q: read(LayerTensor::QBias, config.q_width())?,
                k: read(LayerTensor::KBias, config.kv_width())?,
                v: read(LayerTensor::VBias, config.kv_width())?,
            })
        } else {
            None
        };
        let heads = if config.qk_norm {
            Some(HeadNorms {
                q: read(LayerTensor::QNorm, config.head_dim)?,
                k: read(LayerTensor::KNorm, config.head_dim)?,
            })
        } else {
            None
        };
        let output = |kind| config.features.output_norms.then(|| read(kind, config.hidden_size)).transpose();
        Ok(Self {
            attention_output: output(LayerTensor::AttentionOutputNorm)?,
            feed_forward_output: output(LayerTensor::FeedForwardOutputNorm)?,
            input: read(LayerTensor::InputNorm, config.hidden_size)?,
            post_attention: read(LayerTensor::PostAttentionNorm, config.hidden_size)?,
            biases,
            heads,
        })
    }

    /// With the layer's matrices, in the order of [`MATRICES`].
    fn with(self, matrices: [PackedMatrix; MATRICES.len()]) -> LayerWeights {
        let [q, k, v, o, gate, up, down] = matrices;
        LayerWeights {
            input_norm: self.input,
            q,
            k,
            v,
            biases: self.biases,
            head_norms: self.heads,
            o,
            attention_output_norm: self.attention_output,
            feed_forward_output_norm: self.feed_forward_output,
            post_attention_norm: self.post_attention,
            gate,
            up,
            down,
        }
    }
}

/// Output and input features of a layer's matrix.
fn shape(config: &ModelConfig, kind: LayerTensor) -> (usize, usize) {
    match kind {
        LayerTensor::Q => (config.q_width(), config.hidden_size),
        LayerTensor::K | LayerTensor::V => (config.kv_width(), config.hidden_size),
        LayerTensor::O => (config.hidden_size, config.q_width()),
        LayerTensor::Down => (config.hidden_size, config.intermediate_size),
        _ => (config.intermediate_size, config.hidden_size),
    }
}

fn matrix(model: &ModelSource, role: TensorRole, rows: usize, cols: usize) -> Result<&Tensor, CpuError> {
    checked(model.require(role)?, rows, cols)
}

fn vector(model: &ModelSource, role: TensorRole, len: usize) -> Result<Vec<f32>, CpuError> {
    checked(model.require(role)?, 1, len)?;
    Ok(model.vector(role, len)?)
}

fn checked(tensor: &Tensor, rows: usize, cols: usize) -> Result<&Tensor, CpuError> {
    if (tensor.rows(), tensor.cols()) == (rows, cols) {
        return Ok(tensor);
    }
    Err(CpuError::Shape {
        tensor: tensor.name().to_owned(),
        wanted: format!("{rows} × {cols}"),
        found: format!("{} × {}", tensor.rows(), tensor.cols()),
    })
}
