//! Weights as the lane's buffers hold them: matrices q4_1, everything else bf16.
//!
//! A tile is 32 output features × 256 input features. Row `r`, column `c` of it belongs to the constants `32·(c / 32) + r`; its
//! code is half of byte `1024 + (8·(r / 16) + c / 32)·256 + 8·(c mod 32) + (r mod 16) / 2`, the lower half in even rows: the
//! 16 codes of a column in half a tile lie side by side.

use super::HEAD_DIM;
use crate::twin::error::TwinError;
use crate::twin::rounding::{bf16, value};
use crate::twin::tensors::{check_shape, checked, read_row};
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

/// A q4_1 matrix, output features × input features, in strips of 32 features.
pub(super) struct Matrix {
    features: usize,
    cols: usize,
    /// Codes of a column in a strip, two features a byte, the even one low: strip after strip, column after column.
    codes: Vec<[u8; TILE_ROWS / 2]>,
    /// Constants of the features in a strip: strip after strip, group after group.
    constants: Vec<Constants>,
}

/// Scale and zero of 32 columns, for the features of a strip.
#[derive(Clone)]
struct Constants {
    scales: [f32; TILE_ROWS],
    zeros: [f32; TILE_ROWS],
}

impl Matrix {
    /// Products of every row of `x` with the matrix: rows × features, not rounded to bf16.
    ///
    /// The sums of a group of 32 columns, of `code · x` and of `x`, are taken in the order of the columns; `scale` times the one
    /// plus `zero` times the other is then added to the result, group after group. All of it is f32, each operation rounded.
    pub(super) fn multiply(&self, x: &[f32], threads: NonZeroUsize) -> Vec<f32> {
        let rows = x.len() / self.cols;
        let sum = |group: &[f32; GROUP]| group.iter().fold(0.0, |sum, x| sum + x);
        let group_sums: Vec<f32> = x.as_chunks().0.iter().map(sum).collect();
        let mut strips = vec![[0.0; TILE_ROWS]; rows * (self.features / TILE_ROWS)];
        let work = Mutex::new(strips.chunks_mut(rows.max(1)).enumerate());
        let run = || {
            loop {
                let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((strip, out)) = next else { break };
                self.multiply_strip(strip, x, &group_sums, out);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.get() {
                scope.spawn(run);
            }
            run();
        });
        let mut result = vec![0.0; rows * self.features];
        for (strip, products) in strips.chunks(rows.max(1)).enumerate() {
            for (row, products) in products.iter().enumerate() {
                let start = row * self.features + strip * TILE_ROWS;
                result[start..start + TILE_ROWS].copy_from_slice(products);
            }
        }
        result
    }

    fn multiply_strip(&self, strip: usize, x: &[f32], group_sums: &[f32], out: &mut [[f32; TILE_ROWS]]) {
        let groups = self.cols / GROUP;
        let codes = &self.codes[strip * self.cols..(strip + 1) * self.cols];
        let constants = &self.constants[strip * groups..(strip + 1) * groups];
        for (group, (codes, Constants { scales, zeros })) in codes.chunks_exact(GROUP).zip(constants).enumerate() {
            let mut factors = [[0.0; TILE_ROWS]; GROUP];
            for (factors, codes) in factors.iter_mut().zip(codes) {
                for (factors, code) in factors.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *factors = [code & 15, code >> 4].map(f32::from);
                }
            }
            let rows = x.chunks_exact(self.cols).zip(group_sums.chunks_exact(groups)).zip(out.iter_mut());
            for ((x, group_sums), out) in rows {
                let mut sums = [0.0; TILE_ROWS];
                for (factors, x) in factors.iter().zip(&x[group * GROUP..(group + 1) * GROUP]) {
                    for (sum, factor) in sums.iter_mut().zip(factors) {
                        *sum += factor * x;
                    }
                }
                let group_sum = group_sums[group];
                for (out, ((sum, scale), zero)) in out.iter_mut().zip(sums.iter().zip(scales).zip(zeros)) {
                    *out += scale * sum + zero * group_sum;
                }
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

    /// A matrix made by `read`, which is given the strip it shall fill.
    fn strips(
        &self,
        features: usize,
        cols: usize,
        read: impl Fn(usize, &mut [[u8; TILE_ROWS / 2]], &mut [Constants]) -> Result<(), TwinError> + Sync,
    ) -> Result<Matrix, TwinError> {
        let (strips, groups) = (features / TILE_ROWS, cols / GROUP);
        let mut codes = vec![[0; TILE_ROWS / 2]; strips * cols];
        let mut constants = vec![Constants { scales: [0.0; TILE_ROWS], zeros: [0.0; TILE_ROWS] }; strips * groups];
        let parts = codes.chunks_mut(cols.max(1)).zip(constants.chunks_mut(groups.max(1)));
        let work = Mutex::new(parts.enumerate());
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

/// A strip, from tiles.
fn read_tiles(
    tiled: &TiledTensor,
    strip: usize,
    codes: &mut [[u8; TILE_ROWS / 2]],
    constants: &mut [Constants],
) -> Result<(), TwinError> {
    let across = tiled.cols() / TILE_COLS;
    let places = codes.chunks_exact_mut(TILE_COLS).zip(constants.chunks_exact_mut(TILE_COLS / GROUP));
    for (at, (codes, constants)) in places.enumerate() {
        // Q4_K tiles are repacked here, as the lane's host does at load.
        let tile = tiled.q4_1_tile(strip * across + at)?;
        let bf16_at = |at: usize| value(u16::from_le_bytes([tile[at], tile[at + 1]]));
        for (group, constants) in constants.iter_mut().enumerate() {
            constants.scales = std::array::from_fn(|row| bf16_at(2 * (GROUP * group + row)));
            constants.zeros = std::array::from_fn(|row| bf16_at(512 + 2 * (GROUP * group + row)));
        }
        for (col, codes) in codes.iter_mut().enumerate() {
            for (half, codes) in codes.chunks_exact_mut(TILE_ROWS / 4).enumerate() {
                let start = 1024 + (8 * half + col / GROUP) * 256 + 8 * (col % GROUP);
                codes.copy_from_slice(&tile[start..start + TILE_ROWS / 4]);
            }
        }
    }
    Ok(())
}

/// A strip, from GGUF blocks whose codes q4_1 keeps.
fn read_blocks(
    tensor: &Tensor,
    strip: usize,
    codes: &mut [[u8; TILE_ROWS / 2]],
    constants: &mut [Constants],
) -> Result<(), TwinError> {
    for row in 0..TILE_ROWS {
        let bytes = tensor.row(strip * TILE_ROWS + row);
        let mut put = |group: usize, scale: f32, zero: f32, group_codes: &[u8; GROUP]| {
            (constants[group].scales[row], constants[group].zeros[row]) = (bf16(scale), bf16(zero));
            for (codes, code) in codes[group * GROUP..(group + 1) * GROUP].iter_mut().zip(group_codes) {
                codes[row / 2] |= code << (4 * (row % 2));
            }
        };
        match tensor.weight_type() {
            WeightType::Q4_0 => {
                for (group, block) in bytes.as_chunks::<18>().0.iter().map(Q4_0Block).enumerate() {
                    let scale = block.scale().to_f32();
                    put(group, scale, -8.0 * scale, &block.codes());
                }
            }
            WeightType::Q4_1 => {
                for (group, block) in bytes.as_chunks::<20>().0.iter().map(Q4_1Block).enumerate() {
                    put(group, block.scale().to_f32(), block.min().to_f32(), &block.codes());
                }
            }
            WeightType::Q4K => {
                for (index, block) in bytes.as_chunks::<144>().0.iter().map(Q4KBlock).enumerate() {
                    let (d, dmin) = (block.scale().to_f32(), block.min_scale().to_f32());
                    for (sub, codes) in block.codes().as_chunks().0.iter().enumerate() {
                        let (scale, min) = block.scale_min(sub);
                        put(8 * index + sub, d * f32::from(scale), -dmin * f32::from(min), codes);
                    }
                }
            }
            other => return Err(refused_matrix(tensor.name(), other.name())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 64 features × 64 columns.
    fn matrix() -> Matrix {
        let codes = |index: usize| std::array::from_fn(|pair| (index * 37 + pair * 11 + index / 7) as u8);
        let constant = |seed: usize| std::array::from_fn(|row| bf16((seed as f32 * 0.7 + row as f32 * 1.3).sin()));
        let constants = |index| Constants { scales: constant(index), zeros: constant(index + 100) };
        Matrix {
            features: 64,
            cols: 64,
            codes: (0..2 * 64).map(codes).collect(),
            constants: (0..2 * 2).map(constants).collect(),
        }
    }

    /// The stated order of operations, one feature at a time.
    #[test]
    fn groups_are_summed_in_the_stated_order() {
        let matrix = matrix();
        let x: Vec<f32> = (0..3 * 64).map(|at| bf16((at as f32 * 0.37).sin())).collect();
        let found = matrix.multiply(&x, NonZeroUsize::new(2).unwrap());
        assert_eq!(found, matrix.multiply(&x, NonZeroUsize::MIN));
        for (row, x) in x.chunks(64).enumerate() {
            assert_eq!(matrix.multiply(x, NonZeroUsize::MIN), found[row * 64..(row + 1) * 64], "row {row} alone");
            for feature in 0..64 {
                let (strip, within) = (feature / 32, feature % 32);
                let mut wanted = 0.0f32;
                for group in 0..2 {
                    let (mut products, mut sum) = (0.0f32, 0.0f32);
                    for (col, x) in x.iter().enumerate().skip(32 * group).take(32) {
                        let code = matrix.codes[64 * strip + col][within / 2] >> (4 * (within % 2)) & 15;
                        products += f32::from(code) * x;
                        sum += x;
                    }
                    let Constants { scales, zeros } = &matrix.constants[2 * strip + group];
                    wanted += scales[within] * products + zeros[within] * sum;
                }
                assert_eq!(found[64 * row + feature], wanted, "row {row}, feature {feature}");
            }
        }
    }
}
