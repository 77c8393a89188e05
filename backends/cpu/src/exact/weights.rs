//! Weights of an exact segment: norms and biases in memory, matrices dequantized at load or row by row.

use super::error::ExactError;
use super::math::{BLOCK, dot_block, for_each_chunk, pad_rows};
use npuhal_models::q4nx::TiledTensor;
use npuhal_models::q4nx::tile::TILE_ROWS;
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelConfig, ModelSource, Tensor, TensorRole};
use npuhal_registry::SegmentSpan;

/// A matrix, output features × input features.
pub(super) struct Matrix {
    stored: Stored,
    rows: usize,
    cols: usize,
    dequantized: Option<Vec<f32>>,
}

/// How the file holds it.
enum Stored {
    Rows(Tensor),
    /// Tiles of [`CHUNK_FEATURES`] rows.
    Tiles(TiledTensor),
}

/// Output features that are dequantized together: the rows of a tile.
const CHUNK_FEATURES: usize = TILE_ROWS;

impl Matrix {
    /// The matrix of `role`, which is `rows × cols` as the configuration has it.
    fn of(model: &ModelSource, role: TensorRole, rows: usize, cols: usize) -> Result<Self, ExactError> {
        let stored = match model.tiled(role) {
            Some(tiled) => {
                // A strip tells whether the tiles can be read at all.
                tiled.decode_strip(0, None, &mut vec![0.0; CHUNK_FEATURES * cols])?;
                Stored::Tiles(tiled.clone())
            }
            None => return Self::of_rows(model.require(role)?, rows, cols),
        };
        Ok(Self { stored, rows, cols, dequantized: None })
    }

    fn of_rows(tensor: &Tensor, rows: usize, cols: usize) -> Result<Self, ExactError> {
        check_shape(tensor, rows, cols)?;
        // One row tells whether the type can be read at all; row lengths are equal.
        read_row(tensor, 0, &mut vec![0.0; cols])?;
        Ok(Self { stored: Stored::Rows(tensor.clone()), rows, cols, dequantized: None })
    }

    /// Bytes of its dequantized form.
    fn dequantized_bytes(&self) -> u64 {
        self.rows as u64 * self.cols as u64 * size_of::<f32>() as u64
    }

    fn dequantize(&mut self) {
        let mut values = vec![0.0; self.rows * self.cols];
        for (chunk, values) in values.chunks_mut((CHUNK_FEATURES * self.cols).max(1)).enumerate() {
            self.read(chunk, values);
        }
        self.dequantized = Some(values);
    }

    /// Chunk `chunk` of [`CHUNK_FEATURES`] rows, or what there is of the last one, as f32.
    fn read(&self, chunk: usize, out: &mut [f32]) {
        let first = chunk * CHUNK_FEATURES;
        // Shape and type were checked at load, when a row or strip was read.
        let is_read = match (&self.dequantized, &self.stored) {
            (Some(values), _) => {
                out.copy_from_slice(&values[first * self.cols..][..out.len()]);
                true
            }
            (None, Stored::Rows(tensor)) => {
                let mut rows = out.chunks_exact_mut(self.cols.max(1)).enumerate();
                rows.all(|(row, out)| read_row(tensor, first + row, out).is_ok())
            }
            (None, Stored::Tiles(tiled)) => tiled.decode_strip(chunk, None, out).is_ok(),
        };
        if !is_read {
            out.fill(f32::NAN);
        }
    }

    /// Row `row` as f32.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        match &self.stored {
            Stored::Rows(tensor) if read_row(tensor, row, out).is_ok() => {}
            // Embeddings are stored as rows.
            _ => out.fill(f32::NAN),
        }
    }

    /// `out[row][feature] = x[row] · weight[feature]` for rows of the input width, plus `bias`.
    pub(super) fn multiply(&self, threads: usize, x: &[f64], bias: Option<&[f32]>) -> Vec<f64> {
        let (features, width) = (self.rows, self.cols);
        let rows = x.len() / width;
        let (x, stride) = pad_rows(x, width);
        let mut transposed = vec![0.0; features.next_multiple_of(BLOCK) * rows];
        let scratch = || (vec![0.0f32; CHUNK_FEATURES * width], vec![0.0f64; BLOCK * stride]);
        for_each_chunk(threads, &mut transposed, CHUNK_FEATURES * rows, scratch, |index, out, (chunk, block)| {
            let first = index * CHUNK_FEATURES;
            let here = CHUNK_FEATURES.min(features - first);
            self.read(index, &mut chunk[..here * width]);
            for (at, out) in out.chunks_exact_mut(BLOCK * rows).enumerate() {
                for (offset, weights) in block.chunks_exact_mut(stride).enumerate() {
                    let feature = at * BLOCK + offset;
                    if feature < here {
                        let row = &chunk[feature * width..(feature + 1) * width];
                        weights.iter_mut().zip(row).for_each(|(wide, narrow)| *wide = f64::from(*narrow));
                    }
                }
                dot_block(block, &x, stride, out);
            }
        });
        let mut result = vec![0.0; rows * features];
        for feature in 0..features {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[feature]));
            for row in 0..rows {
                result[row * features + feature] = transposed[feature * rows + row] + bias;
            }
        }
        result
    }
}

/// Weights of one layer.
pub(super) struct LayerWeights {
    pub(super) input_norm: Vec<f32>,
    pub(super) q: Matrix,
    pub(super) q_bias: Option<Vec<f32>>,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k: Matrix,
    pub(super) k_bias: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    pub(super) v: Matrix,
    pub(super) v_bias: Option<Vec<f32>>,
    pub(super) o: Matrix,
    pub(super) attention_output_norm: Option<Vec<f32>>,
    pub(super) post_attention_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
    pub(super) feed_forward_output_norm: Option<Vec<f32>>,
}

impl LayerWeights {
    fn load(model: &ModelSource, layer: usize) -> Result<Self, ExactError> {
        let config = model.config();
        let (hidden, q_width, kv_width) = (config.hidden_size, config.q_width(), config.kv_width());
        let matrix = |part, rows, cols| Matrix::of(model, TensorRole::Layer(layer, part), rows, cols);
        let norm = |part, len| vector(model, TensorRole::Layer(layer, part), len);
        let output_norms = config.features.output_norms;
        let maybe = |wanted: bool, part, len| if wanted { norm(part, len).map(Some) } else { Ok(None) };
        Ok(Self {
            input_norm: norm(LayerTensor::InputNorm, hidden)?,
            q: matrix(LayerTensor::Q, q_width, hidden)?,
            q_bias: maybe(config.qkv_bias, LayerTensor::QBias, q_width)?,
            q_norm: maybe(config.qk_norm, LayerTensor::QNorm, config.head_dim)?,
            k: matrix(LayerTensor::K, kv_width, hidden)?,
            k_bias: maybe(config.qkv_bias, LayerTensor::KBias, kv_width)?,
            k_norm: maybe(config.qk_norm, LayerTensor::KNorm, config.head_dim)?,
            v: matrix(LayerTensor::V, kv_width, hidden)?,
            v_bias: maybe(config.qkv_bias, LayerTensor::VBias, kv_width)?,
            o: matrix(LayerTensor::O, hidden, q_width)?,
            attention_output_norm: maybe(output_norms, LayerTensor::AttentionOutputNorm, hidden)?,
            post_attention_norm: norm(LayerTensor::PostAttentionNorm, hidden)?,
            gate: matrix(LayerTensor::Gate, config.intermediate_size, hidden)?,
            up: matrix(LayerTensor::Up, config.intermediate_size, hidden)?,
            down: matrix(LayerTensor::Down, hidden, config.intermediate_size)?,
            feed_forward_output_norm: maybe(output_norms, LayerTensor::FeedForwardOutputNorm, hidden)?,
        })
    }

    fn matrices_mut(&mut self) -> [&mut Matrix; 7] {
        [&mut self.q, &mut self.k, &mut self.v, &mut self.o, &mut self.gate, &mut self.up, &mut self.down]
    }
}

/// Everything a segment multiplies with.
pub(super) struct Weights {
    pub(super) embedding: Option<Matrix>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Option<Vec<f32>>,
    pub(super) head: Option<Matrix>,
}

impl Weights {
    /// Loads what `span` needs; dequantizes the matrices if all of them fit `dequantized_bytes`.
    pub(super) fn load(model: &ModelSource, span: &SegmentSpan, dequantized_bytes: u64) -> Result<Self, ExactError> {
        let ModelConfig { hidden_size, vocab_size, .. } = *model.config();
        let layers = span.layers.clone().map(|layer| LayerWeights::load(model, layer)).collect::<Result<_, _>>()?;
        let embedding = match span.has_embedding() {
            true => Some(Matrix::of_rows(model.require(TensorRole::TokenEmbedding)?, vocab_size, hidden_size)?),
            false => None,
        };
        let final_norm = match span.has_final_norm() {
            true => Some(vector(model, TensorRole::FinalNorm, hidden_size)?),
            false => None,
        };
        let head = match span.has_head() {
            true if model.config().tied_head => Some(Matrix::of_rows(model.head()?, vocab_size, hidden_size)?),
            true => Some(Matrix::of(model, TensorRole::Head, vocab_size, hidden_size)?),
            false => None,
        };
        if let Some(factors) = model.tensor(TensorRole::RopeFactors) {
            check_shape(factors, 1, model.config().rope.dims / 2)?;
        }
        let mut weights = Self { embedding, layers, final_norm, head };
        weights.dequantize_within(dequantized_bytes);
        Ok(weights)
    }

    /// The embedding stays in the file: only single rows of it are read.
    fn dequantize_within(&mut self, limit_bytes: u64) {
        let layers = self.layers.iter_mut().flat_map(LayerWeights::matrices_mut);
        let mut matrices: Vec<&mut Matrix> = layers.chain(self.head.as_mut()).collect();
        if matrices.iter().map(|matrix| matrix.dequantized_bytes()).sum::<u64>() <= limit_bytes {
            matrices.iter_mut().for_each(|matrix| matrix.dequantize());
        }
    }
}

fn check_shape(tensor: &Tensor, rows: usize, cols: usize) -> Result<(), ExactError> {
    if (tensor.rows(), tensor.cols()) == (rows, cols) {
        return Ok(());
    }
    let (found_rows, found_cols) = (tensor.rows(), tensor.cols());
    Err(ExactError::Shape { tensor: tensor.name().to_owned(), rows, cols, found_rows, found_cols })
}

fn vector(model: &ModelSource, role: TensorRole, len: usize) -> Result<Vec<f32>, ExactError> {
    check_shape(model.require(role)?, 1, len)?;
    Ok(model.vector(role, len)?)
}

fn read_row(tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), ExactError> {
    tensor
        .dequantize_row(row, out)
        .map_err(|error| ExactError::Elements { tensor: tensor.name().to_owned(), reason: error.to_string() })
}
