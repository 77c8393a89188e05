//! Weights in the forms of a package: matrices bf16, norms, biases and embedding float16, rows in the order of Hugging Face
//! checkpoints.

use crate::twin::error::TwinError;
use crate::twin::lanes::{Rows, read_bf16};
use crate::twin::rounding::{bf16, bits, f16};
use crate::twin::tensors::{checked, read_row};
use npuhal_models::config::RopePairing;
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelConfig, ModelSource, Tensor, TensorRole, WeightType};
use npuhal_registry::SegmentSpan;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// Rows a thread converts at a time.
const RUN_ROWS: usize = 128;

/// A bf16 matrix, in the mapped file where it is stored so, else rounded at load.
pub(super) struct Matrix {
    storage: Storage,
    row_bytes: usize,
    pub(super) features: usize,
    pub(super) cols: usize,
}

enum Storage {
    Mapped(Tensor),
    Owned(Vec<u8>),
}

impl Rows for Matrix {
    #[inline(always)]
    fn read(&self, feature: usize, out: &mut [f32]) {
        let bytes = match &self.storage {
            Storage::Mapped(tensor) => tensor.bytes(),
            Storage::Owned(bytes) => bytes,
        };
        read_bf16(&bytes[feature * self.row_bytes..(feature + 1) * self.row_bytes], out);
    }
}

pub(super) struct LayerWeights {
    pub(super) input_norm: Vec<f32>,
    pub(super) q: Matrix,
    pub(super) k: Matrix,
    pub(super) v: Matrix,
    /// Of query, key and value together.
    pub(super) bias: Option<Vec<f32>>,
    pub(super) o: Matrix,
    pub(super) post_attention_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

pub(super) struct Weights {
    embedding: Option<Tensor>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Option<Vec<f32>>,
    pub(super) head: Option<Matrix>,
}

impl Weights {
    pub(super) fn load(model: &ModelSource, span: &SegmentSpan, threads: NonZeroUsize) -> Result<Self, TwinError> {
        let loader = Loader { model, config: model.config(), threads };
        let ModelConfig { hidden_size, vocab_size, .. } = *model.config();
        let embedding = match span.has_embedding() {
            true => Some(checked(model.require(TensorRole::TokenEmbedding)?, vocab_size, hidden_size)?.clone()),
            false => None,
        };
        let final_norm = match span.has_final_norm() {
            true => Some(loader.vector(TensorRole::FinalNorm, hidden_size, false)?),
            false => None,
        };
        let head = match span.has_head() {
            true => Some(loader.matrix(model.head()?, vocab_size, hidden_size, false)?),
            false => None,
        };
        let layers = span.layers.clone().map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?;
        Ok(Self { embedding, layers, final_norm, head })
    }

    pub(super) fn has_embedding(&self) -> bool {
        self.embedding.is_some()
    }

    /// The embedding of `token`: float16, then bf16. Nothing without an embedding.
    pub(super) fn embed(&self, token: u32, out: &mut [f32]) -> Result<(), TwinError> {
        if let Some(embedding) = &self.embedding {
            read_row(embedding, token as usize, out)?;
            out.iter_mut().for_each(|value| *value = bf16(f16(*value)));
        }
        Ok(())
    }
}

struct Loader<'m> {
    model: &'m ModelSource,
    config: &'m ModelConfig,
    threads: NonZeroUsize,
}

impl Loader<'_> {
    fn layer(&self, layer: usize) -> Result<LayerWeights, TwinError> {
        let config = self.config;
        let (hidden, q, kv, wide) = (config.hidden_size, config.q_width(), config.kv_width(), config.intermediate_size);
        let interleaved = config.rope.pairing == RopePairing::Interleaved;
        let role = |part| TensorRole::Layer(layer, part);
        let matrix = |part, rows, cols, permuted| self.matrix(self.model.require(role(part))?, rows, cols, permuted);
        let bias = match config.qkv_bias {
            true => {
                let mut bias = self.vector(role(LayerTensor::QBias), q, interleaved)?;
                bias.extend(self.vector(role(LayerTensor::KBias), kv, interleaved)?);
                bias.extend(self.vector(role(LayerTensor::VBias), kv, false)?);
                Some(bias)
            }
            false => None,
        };
        Ok(LayerWeights {
            input_norm: self.vector(role(LayerTensor::InputNorm), hidden, false)?,
            q: matrix(LayerTensor::Q, q, hidden, interleaved)?,
            k: matrix(LayerTensor::K, kv, hidden, interleaved)?,
            v: matrix(LayerTensor::V, kv, hidden, false)?,
            bias,
            o: matrix(LayerTensor::O, hidden, q, false)?,
            post_attention_norm: self.vector(role(LayerTensor::PostAttentionNorm), hidden, false)?,
            gate: matrix(LayerTensor::Gate, wide, hidden, false)?,
            up: matrix(LayerTensor::Up, wide, hidden, false)?,
            down: matrix(LayerTensor::Down, hidden, wide, false)?,
        })
    }

    /// A vector as float16 holds it.
    fn vector(&self, role: TensorRole, len: usize, permuted: bool) -> Result<Vec<f32>, TwinError> {
        let mut stored = vec![0.0; len];
        read_row(checked(self.model.require(role)?, 1, len)?, 0, &mut stored)?;
        Ok((0..len).map(|at| f16(stored[self.stored(at, permuted)])).collect())
    }

    fn matrix(&self, tensor: &Tensor, features: usize, cols: usize, permuted: bool) -> Result<Matrix, TwinError> {
        checked(tensor, features, cols)?;
        let row_bytes = 2 * cols;
        if tensor.weight_type() == WeightType::Bf16 && !permuted {
            return Ok(Matrix { storage: Storage::Mapped(tensor.clone()), row_bytes, features, cols });
        }
        let mut bytes = vec![0; row_bytes * features];
        let work = Mutex::new(bytes.chunks_mut(RUN_ROWS * row_bytes).enumerate());
        let failure = Mutex::new(None);
        let run = || {
            let mut values = vec![0.0; cols];
            loop {
                let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((index, out)) = next else { break };
                for (offset, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                    match read_row(tensor, self.stored(index * RUN_ROWS + offset, permuted), &mut values) {
                        Ok(()) => {}
                        Err(error) => *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
                    }
                    for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(&values) {
                        *out = bits(*value).to_le_bytes();
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.threads.get() {
                scope.spawn(run);
            }
            run();
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Matrix { storage: Storage::Owned(bytes), row_bytes, features, cols }),
        }
    }

    /// Where row (or element) `row` is stored: with interleaved pairs a head's halves alternate.
    fn stored(&self, row: usize, permuted: bool) -> usize {
        if !permuted {
            return row;
        }
        let dim = self.config.head_dim;
        let (head, at) = (row / dim, row % dim);
        head * dim + 2 * (at % (dim / 2)) + at / (dim / 2)
    }
}
