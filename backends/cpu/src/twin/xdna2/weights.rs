//! Weights as the lane's buffers hold them: matrices q4_1, everything else bf16.
//!
//! A tile is 32 output features × 256 input features. Row `r`, column `c` of it belongs to the constants `32·(c / 32) + r`; its
//! code is half of byte `1024 + (8·(r / 16) + c / 32)·256 + 8·(c mod 32) + (r mod 16) / 2`, the lower half in even rows.

use super::HEAD_DIM;
use crate::twin::error::TwinError;
use crate::twin::lanes::Rows;
use crate::twin::rounding::{bf16, value};
use npuhal_models::q4nx::{TileKind, TiledTensor};
use npuhal_models::quant::blocks::{Q4_0Block, Q4_1Block, Q4KBlock};
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelSource, Tensor, TensorRole, WeightType};
use npuhal_registry::{Numerics, SegmentSpan};
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// Columns that share constants.
const GROUP: usize = 32;
const TILE_ROWS: usize = 32;
const TILE_COLS: usize = 256;

/// A q4_1 matrix, output features × input features, row after row.
pub(super) struct Matrix {
    pub(super) features: usize,
    pub(super) cols: usize,
    /// Two columns a byte, the even one low.
    codes: Vec<u8>,
    /// Scale and zero of each 32 columns.
    constants: Vec<(f32, f32)>,
}

impl Rows for Matrix {
    /// `code · scale + zero`, the product exact, the sum rounded to f32.
    #[inline(always)]
    fn read(&self, feature: usize, out: &mut [f32]) {
        let codes = &self.codes[feature * self.cols / 2..(feature + 1) * self.cols / 2];
        let constants = &self.constants[feature * self.cols / GROUP..(feature + 1) * self.cols / GROUP];
        let groups = codes.as_chunks::<{ GROUP / 2 }>().0.iter().zip(constants);
        for ((codes, (scale, zero)), out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
            for (code, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
                *out = [code & 15, code >> 4].map(|code| f32::from(code) * scale + zero);
            }
        }
    }
}

pub(super) struct LayerWeights {
    pub(super) input_norm: Vec<f32>,
    pub(super) q: Matrix,
    pub(super) k: Matrix,
    pub(super) v: Matrix,
    pub(super) q_norm: Vec<f32>,
    pub(super) k_norm: Vec<f32>,
    pub(super) o: Matrix,
    pub(super) post_attention_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

pub(super) struct Weights {
    pub(super) embedding: Option<Tensor>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Option<Vec<f32>>,
    pub(super) head: Option<Matrix>,
}

impl Weights {
    pub(super) fn load(model: &ModelSource, span: &SegmentSpan, threads: NonZeroUsize) -> Result<Self, TwinError> {
        let config = model.config();
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let loader = Loader { model, threads };
        let layer = |layer| -> Result<LayerWeights, TwinError> {
            let role = |part| TensorRole::Layer(layer, part);
            let (q, kv, wide) = (config.q_width(), config.kv_width(), config.intermediate_size);
            Ok(LayerWeights {
                input_norm: loader.vector(role(LayerTensor::InputNorm), hidden)?,
                q: loader.matrix(role(LayerTensor::Q), q, hidden)?,
                k: loader.matrix(role(LayerTensor::K), kv, hidden)?,
                v: loader.matrix(role(LayerTensor::V), kv, hidden)?,
                q_norm: loader.vector(role(LayerTensor::QNorm), HEAD_DIM)?,
                k_norm: loader.vector(role(LayerTensor::KNorm), HEAD_DIM)?,
                o: loader.matrix(role(LayerTensor::O), hidden, q)?,
                post_attention_norm: loader.vector(role(LayerTensor::PostAttentionNorm), hidden)?,
                gate: loader.matrix(role(LayerTensor::Gate), wide, hidden)?,
                up: loader.matrix(role(LayerTensor::Up), wide, hidden)?,
                down: loader.matrix(role(LayerTensor::Down), hidden, wide)?,
            })
        };
        let embedding = || -> Result<Tensor, TwinError> {
            checked(model.require(TensorRole::TokenEmbedding)?, vocab, hidden).cloned()
        };
        let head = if config.tied_head { TensorRole::TokenEmbedding } else { TensorRole::Head };
        Ok(Self {
            embedding: span.has_embedding().then(embedding).transpose()?,
            layers: span.layers.clone().map(layer).collect::<Result<_, _>>()?,
            final_norm: span.has_final_norm().then(|| loader.vector(TensorRole::FinalNorm, hidden)).transpose()?,
            head: span.has_head().then(|| loader.matrix(head, vocab, hidden)).transpose()?,
        })
    }

    /// The embedding of `token` as bf16. Nothing without an embedding.
    pub(super) fn embed(&self, token: u32, out: &mut [f32]) -> Result<(), TwinError> {
        if let Some(embedding) = &self.embedding {
            read_row(embedding, token as usize, out)?;
            out.iter_mut().for_each(|element| *element = bf16(*element));
        }
        Ok(())
    }
}

/// Checks that every matrix of `model` is one that q4_1 tiles hold as it is.
pub(super) fn check_matrices(model: &ModelSource) -> Result<(), TwinError> {
    let refuse = |name: &str, found: &str| Err(refused_matrix(name, found));
    for (_, tensor) in model.tiled_tensors() {
        if tensor.kind() == TileKind::Q8 {
            return refuse(tensor.name(), tensor.kind().name());
        }
        if tensor.grid().is_none() {
            let found = format!("{} x {} elements, no whole tiles", tensor.rows(), tensor.cols());
            return refuse(tensor.name(), &found);
        }
    }
    for (role, tensor) in model.tensors() {
        let is_matrix = match role {
            TensorRole::TokenEmbedding => model.config().tied_head,
            _ => tensor.rows() > 1,
        };
        if is_matrix && !is_exact(tensor.weight_type()) {
            return refuse(tensor.name(), tensor.weight_type().name());
        }
        if is_matrix && !(tensor.rows().is_multiple_of(TILE_ROWS) && tensor.cols().is_multiple_of(TILE_COLS)) {
            let found = format!("{} x {} elements, no whole tiles", tensor.rows(), tensor.cols());
            return refuse(tensor.name(), &found);
        }
    }
    Ok(())
}

fn refused_matrix(name: &str, found: &str) -> TwinError {
    TwinError::Weights {
        numerics: Numerics::Xdna2,
        tensor: name.to_owned(),
        found: found.to_owned(),
        wanted: "q4_1 or Q4_K tiles, or rows of Q4_0, Q4_1 or Q4_K; `npuhal pack` makes tiles of any GGUF file",
    }
}

fn is_exact(weight_type: WeightType) -> bool {
    matches!(weight_type, WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K)
}

struct Loader<'m> {
    model: &'m ModelSource,
    threads: NonZeroUsize,
}

impl Loader<'_> {
    /// A vector as bf16 holds it.
    fn vector(&self, role: TensorRole, len: usize) -> Result<Vec<f32>, TwinError> {
        let mut vector = vec![0.0; len];
        read_row(checked(self.model.require(role)?, 1, len)?, 0, &mut vector)?;
        vector.iter_mut().for_each(|element| *element = bf16(*element));
        Ok(vector)
    }

    fn matrix(&self, role: TensorRole, features: usize, cols: usize) -> Result<Matrix, TwinError> {
        match self.model.tiled(role) {
            Some(tiled) => {
                check_shape(tiled.name(), (tiled.rows(), tiled.cols()), (features, cols))?;
                self.strips(features, cols, |strip, codes, constants| read_tiles(tiled, strip, codes, constants))
            }
            None => {
                let tensor = checked(self.model.require(role)?, features, cols)?;
                self.strips(features, cols, |strip, codes, constants| read_blocks(tensor, strip, codes, constants))
            }
        }
    }

    /// A matrix made by `read`, which is given the strip of 32 rows it shall fill.
    fn strips(
        &self,
        features: usize,
        cols: usize,
        read: impl Fn(usize, &mut [u8], &mut [(f32, f32)]) -> Result<(), TwinError> + Sync,
    ) -> Result<Matrix, TwinError> {
        let mut codes = vec![0; features * cols / 2];
        let mut constants = vec![(0.0, 0.0); features * cols / GROUP];
        let strips = codes.chunks_mut(TILE_ROWS * cols / 2).zip(constants.chunks_mut(TILE_ROWS * cols / GROUP));
        let work = Mutex::new(strips.enumerate());
        let failure = Mutex::new(None);
        let run = || {
            loop {
                let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((strip, (codes, constants))) = next else { break };
                if let Err(error) = read(strip, codes, constants) {
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    break;
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
            None => Ok(Matrix { features, cols, codes, constants }),
        }
    }
}

/// The 32 rows of `strip`, from tiles.
fn read_tiles(
    tiled: &TiledTensor,
    strip: usize,
    codes: &mut [u8],
    constants: &mut [(f32, f32)],
) -> Result<(), TwinError> {
    let (cols, across) = (tiled.cols(), tiled.cols() / TILE_COLS);
    for at in 0..across {
        // Q4_K tiles are repacked here, as the lane's host does at load.
        let tile = tiled.q4_1_tile(strip * across + at)?;
        let bf16_at = |at: usize| value(u16::from_le_bytes([tile[at], tile[at + 1]]));
        for row in 0..TILE_ROWS {
            for group in 0..TILE_COLS / GROUP {
                let pair = 2 * (GROUP * group + row);
                constants[row * cols / GROUP + at * TILE_COLS / GROUP + group] = (bf16_at(pair), bf16_at(512 + pair));
                let first = 1024 + (8 * (row / 16) + group) * 256 + row % 16 / 2;
                let code = |column: usize| tile[first + 8 * column] >> (4 * (row % 2)) & 15;
                let out = row * cols / 2 + at * TILE_COLS / 2 + group * GROUP / 2;
                for (pair, out) in codes[out..out + GROUP / 2].iter_mut().enumerate() {
                    *out = code(2 * pair) | code(2 * pair + 1) << 4;
                }
            }
        }
    }
    Ok(())
}

/// The 32 rows of `strip`, from GGUF blocks whose codes q4_1 keeps.
fn read_blocks(tensor: &Tensor, strip: usize, codes: &mut [u8], constants: &mut [(f32, f32)]) -> Result<(), TwinError> {
    let cols = tensor.cols();
    let rows = codes.chunks_exact_mut(cols / 2).zip(constants.chunks_exact_mut(cols / GROUP));
    for (row, (codes, constants)) in rows.enumerate() {
        let bytes = tensor.row(strip * TILE_ROWS + row);
        let groups = codes.as_chunks_mut::<{ GROUP / 2 }>().0.iter_mut().zip(constants);
        match tensor.weight_type() {
            WeightType::Q4_0 => {
                for ((codes, constants), block) in groups.zip(bytes.as_chunks::<18>().0) {
                    let block = Q4_0Block(block);
                    let scale = block.scale().to_f32();
                    *codes = pairs(&block.codes());
                    *constants = (bf16(scale), bf16(-8.0 * scale));
                }
            }
            WeightType::Q4_1 => {
                for ((codes, constants), block) in groups.zip(bytes.as_chunks::<20>().0) {
                    let block = Q4_1Block(block);
                    *codes = pairs(&block.codes());
                    *constants = (bf16(block.scale().to_f32()), bf16(block.min().to_f32()));
                }
            }
            WeightType::Q4K => {
                let subs = bytes.as_chunks::<144>().0.iter().map(Q4KBlock).flat_map(|block| {
                    let (d, dmin, codes) = (block.scale().to_f32(), block.min_scale().to_f32(), block.codes());
                    (0..8).map(move |sub| {
                        let (scale, min) = block.scale_min(sub);
                        let constants = (bf16(d * f32::from(scale)), bf16(-dmin * f32::from(min)));
                        (pairs(&codes.as_chunks().0[sub]), constants)
                    })
                });
                groups.zip(subs).for_each(|((codes, constants), sub)| (*codes, *constants) = sub);
            }
            other => return Err(refused_matrix(tensor.name(), other.name())),
        }
    }
    Ok(())
}

fn pairs(codes: &[u8; GROUP]) -> [u8; GROUP / 2] {
    std::array::from_fn(|pair| codes[2 * pair] | codes[2 * pair + 1] << 4)
}

fn checked(tensor: &Tensor, rows: usize, cols: usize) -> Result<&Tensor, TwinError> {
    check_shape(tensor.name(), (tensor.rows(), tensor.cols()), (rows, cols)).map(|()| tensor)
}

fn check_shape(name: &str, found: (usize, usize), wanted: (usize, usize)) -> Result<(), TwinError> {
    if found == wanted {
        return Ok(());
    }
    let ((found_rows, found_cols), (rows, cols)) = (found, wanted);
    Err(TwinError::Shape { tensor: name.to_owned(), rows, cols, found_rows, found_cols })
}

fn read_row(tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), TwinError> {
    tensor
        .dequantize_row(row, out)
        .map_err(|error| TwinError::Elements { tensor: tensor.name().to_owned(), reason: error.to_string() })
}
