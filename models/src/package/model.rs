//! A package as a model that any route can run.

use super::PackageError;
use super::load::Package;
use super::metadata::Metadata;
use super::plan::LayerArray;
use super::shape::{CONTEXT_POSITIONS, Family, HEAD_DIM, Shape};
use crate::config::{ModelConfig, Rope, RopePairing, RopeScaling};
use crate::error::ModelError;
use crate::hub_text::HubTextFiles;
use crate::source::{Format, LayerTensor, ModelSource, TensorRole};
use crate::tensor::Tensor;
use crate::text_error::TextError;
use crate::vocabulary::Vocabulary;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

impl Package {
    /// The package as a model: matrices bf16, norms and biases float16, all in the mapping. Biases are those of the family; a
    /// `llama` package holds zeros. The head is always a matrix of its own.
    ///
    /// # Errors
    /// [`PackageError::Metadata`] where an array is missing.
    pub fn model(&self, vocabulary: Vocabulary) -> Result<ModelSource, PackageError> {
        let Shape { hidden_size, intermediate_size: wide, layers, .. } = self.metadata().shape;
        let config = config(self.metadata());
        let (q, kv) = (config.q_width(), config.kv_width());
        let mut tensors = BTreeMap::new();
        tensors.insert(TensorRole::TokenEmbedding, self.raw("token_embedding")?.clone());
        tensors.insert(TensorRole::FinalNorm, self.raw("final_norm")?.clone());
        tensors.insert(TensorRole::Head, self.quantized("lm_head")?.bf16.clone());
        for layer in 0..layers {
            let matrix = |array| self.layer_quantized(layer, array).map(|quantized| quantized.bf16.clone());
            let mut add = |part, tensor| drop(tensors.insert(TensorRole::Layer(layer, part), tensor));
            add(LayerTensor::InputNorm, self.layer_raw(layer, LayerArray::InputNorm)?.clone());
            add(LayerTensor::PostAttentionNorm, self.layer_raw(layer, LayerArray::PostAttnNorm)?.clone());
            add(LayerTensor::O, matrix(LayerArray::OProj)?);
            add(LayerTensor::Down, matrix(LayerArray::DownProj)?);
            let (qkv, gate_up) = (matrix(LayerArray::Qkv)?, matrix(LayerArray::GateUp)?);
            add(LayerTensor::Q, self.rows(&qkv, 0..q)?);
            add(LayerTensor::K, self.rows(&qkv, q..q + kv)?);
            add(LayerTensor::V, self.rows(&qkv, q + kv..q + 2 * kv)?);
            add(LayerTensor::Gate, self.rows(&gate_up, 0..wide)?);
            add(LayerTensor::Up, self.rows(&gate_up, wide..2 * wide)?);
            if config.qkv_bias {
                let bias = self.layer_raw(layer, LayerArray::QkvBias)?;
                add(LayerTensor::QBias, self.elements(bias, 0..q)?);
                add(LayerTensor::KBias, self.elements(bias, q..q + kv)?);
                add(LayerTensor::VBias, self.elements(bias, q + kv..q + 2 * kv)?);
            }
        }
        debug_assert_eq!(config.hidden_size, hidden_size);
        Ok(ModelSource::new(self.path().to_owned(), Format::Xdna1Package, config, vocabulary, tensors))
    }

    /// The package as a model with the tokenizer of its directory.
    ///
    /// # Errors
    /// As [`Package::model`]; [`ModelError::Malformed`] where the tokenizer is missing or damaged.
    pub fn text_model(&self) -> Result<ModelSource, ModelError> {
        let malformed = |error: TextError| ModelError::Malformed {
            path: self.path().to_owned(),
            field: "the tokenizer".to_owned(),
            reason: error.to_string(),
        };
        let files = HubTextFiles::read(self.path()).map_err(malformed)?;
        let vocabulary = files.vocabulary(self.metadata().shape.vocab_size).map_err(malformed)?;
        Ok(self.model(vocabulary)?)
    }

    fn rows(&self, tensor: &Tensor, rows: Range<usize>) -> Result<Tensor, PackageError> {
        let len = tensor.row_bytes();
        self.piece(tensor, rows.len(), tensor.cols(), rows.start * len..rows.end * len)
    }

    fn elements(&self, vector: &Tensor, elements: Range<usize>) -> Result<Tensor, PackageError> {
        let size = vector.weight_type().block_bytes();
        self.piece(vector, 1, elements.len(), elements.start * size..elements.end * size)
    }

    fn piece(&self, tensor: &Tensor, rows: usize, cols: usize, bytes: Range<usize>) -> Result<Tensor, PackageError> {
        let start = tensor.range().start;
        let range = start + bytes.start..start + bytes.end;
        let piece = Tensor::new(tensor.name(), tensor.weight_type(), rows, cols, Arc::clone(tensor.file()), range);
        piece.ok_or_else(|| PackageError::Truncated { name: tensor.path().display().to_string() })
    }
}

fn config(metadata: &Metadata) -> ModelConfig {
    let Shape { hidden_size, intermediate_size, heads, kv_heads, layers, vocab_size } = metadata.shape;
    ModelConfig {
        model_type: metadata.family.name().to_owned(),
        name: metadata.display_name.clone().or(metadata.model_id.clone()).unwrap_or_default(),
        hidden_size,
        layers,
        heads,
        kv_heads,
        head_dim: HEAD_DIM,
        intermediate_size,
        vocab_size,
        context_length: CONTEXT_POSITIONS as usize,
        rms_norm_eps: metadata.rms_norm_eps,
        rope: Rope {
            theta: metadata.rope_theta,
            dims: HEAD_DIM,
            pairing: RopePairing::Halves,
            scaling: RopeScaling::None,
        },
        qkv_bias: metadata.family == Family::Qwen2,
        qk_norm: false,
        tied_head: false,
    }
}
