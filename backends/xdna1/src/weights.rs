//! Weights as the packers read them.

use crate::error::LaneError;
use crate::layout::{BF16_BYTES, check_widths};
use npuhal_core::dtype::{bf16_bits, f16_value};
use npuhal_models::Tensor;
use npuhal_models::package::{Family, LayerArray, Package, Quantized, Shape};

/// A matrix of a model, bf16, output features × input features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Matrix {
    /// Query, key and value projections of a layer, stacked on rows.
    Qkv(usize),
    /// Output projection of a layer.
    OProj(usize),
    /// Gate, then up projection of a layer, stacked on rows.
    GateUp(usize),
    /// Down projection of a layer.
    Down(usize),
    /// LM head.
    Head,
}

/// A vector of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Vector {
    /// RMSNorm before attention of a layer.
    InputNorm(usize),
    /// RMSNorm before the feed-forward block of a layer.
    PostAttnNorm(usize),
    /// RMSNorm after the last layer.
    FinalNorm,
}

/// Where the packers get weights from. Rows and columns asked for lie inside the shape's matrices; destinations have exactly
/// the bytes asked for.
pub trait EngineWeights: Sync {
    /// Copies whole rows `first..first + rows` of `matrix`, little-endian bf16, one after the other.
    fn copy_rows(&self, matrix: Matrix, first: usize, rows: usize, out: &mut [u8]);

    /// Copies columns `first..first + columns` of one row of `matrix`, little-endian bf16.
    fn copy_columns(&self, matrix: Matrix, row: usize, first: usize, columns: usize, out: &mut [u8]);

    /// Copies a gamma vector, little-endian bf16.
    fn copy_gamma(&self, vector: Vector, out: &mut [u8]);

    /// The query, key and value biases of `layer` from channel `first` on.
    fn copy_bias(&self, layer: usize, first: usize, out: &mut [f32]);
}

/// The weights of an opened package: resolved once, copied straight from the mapping.
#[derive(Debug, Clone)]
pub struct PackageWeights {
    family: Family,
    shape: Shape,
    layers: Vec<Layer>,
    final_norm: Tensor,
    embedding: Tensor,
    head: Quantized,
}

#[derive(Debug, Clone)]
struct Layer {
    qkv: Quantized,
    o_proj: Quantized,
    gate_up: Quantized,
    down: Quantized,
    input_norm: Tensor,
    post_attn_norm: Tensor,
    qkv_bias: Tensor,
}

impl PackageWeights {
    /// The weights of `package`.
    ///
    /// # Errors
    /// [`LaneError::Package`].
    pub fn new(package: &Package) -> Result<Self, LaneError> {
        let matrix = |layer, array| package.layer_quantized(layer, array).cloned();
        let vector = |layer, array| package.layer_raw(layer, array).cloned();
        let layer = |layer| {
            Ok::<_, LaneError>(Layer {
                qkv: matrix(layer, LayerArray::Qkv)?,
                o_proj: matrix(layer, LayerArray::OProj)?,
                gate_up: matrix(layer, LayerArray::GateUp)?,
                down: matrix(layer, LayerArray::DownProj)?,
                input_norm: vector(layer, LayerArray::InputNorm)?,
                post_attn_norm: vector(layer, LayerArray::PostAttnNorm)?,
                qkv_bias: vector(layer, LayerArray::QkvBias)?,
            })
        };
        let shape = package.metadata().shape;
        Ok(Self {
            family: package.metadata().family,
            shape,
            layers: (0..shape.layers).map(layer).collect::<Result<_, _>>()?,
            final_norm: package.raw("final_norm")?.clone(),
            embedding: package.raw("token_embedding")?.clone(),
            head: package.quantized("lm_head")?.clone(),
        })
    }

    /// Family of the package.
    #[must_use]
    pub fn family(&self) -> Family {
        self.family
    }

    /// Shape of the package.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Checks that the package is of `family` with the widths its designs compute; `design` names the design.
    ///
    /// # Errors
    /// [`LaneError::WrongModel`].
    pub fn require(&self, design: &'static str, family: Family) -> Result<(), LaneError> {
        check_widths(design, family, self.family, self.shape)
    }

    /// The embedding of `token` as little-endian bf16: float16, widened, rounded.
    ///
    /// # Errors
    /// [`LaneError::OutOfRange`], [`LaneError::BufferLength`].
    pub fn copy_embedding(&self, token: u32, out: &mut [u8]) -> Result<(), LaneError> {
        if token as usize >= self.shape.vocab_size {
            let (found, limit) = (u64::from(token), self.shape.vocab_size as u64);
            return Err(LaneError::OutOfRange { what: "token", found, limit });
        }
        if out.len() != self.shape.hidden_size * BF16_BYTES {
            let wanted = (self.shape.hidden_size * BF16_BYTES) as u64;
            return Err(LaneError::BufferLength { what: "embedding row", wanted, found: out.len() as u64 });
        }
        f16_to_bf16(self.embedding.row(token as usize), out);
        Ok(())
    }

    /// The int8 form of `matrix`.
    #[must_use]
    pub fn quantized(&self, matrix: Matrix) -> &Quantized {
        match matrix {
            Matrix::Qkv(layer) => &self.layers[layer].qkv,
            Matrix::OProj(layer) => &self.layers[layer].o_proj,
            Matrix::GateUp(layer) => &self.layers[layer].gate_up,
            Matrix::Down(layer) => &self.layers[layer].down,
            Matrix::Head => &self.head,
        }
    }

    fn vector(&self, vector: Vector) -> &Tensor {
        match vector {
            Vector::InputNorm(layer) => &self.layers[layer].input_norm,
            Vector::PostAttnNorm(layer) => &self.layers[layer].post_attn_norm,
            Vector::FinalNorm => &self.final_norm,
        }
    }
}

impl EngineWeights for PackageWeights {
    fn copy_rows(&self, matrix: Matrix, first: usize, rows: usize, out: &mut [u8]) {
        let tensor = &self.quantized(matrix).bf16;
        let len = tensor.row_bytes();
        copy_side_by_side(&tensor.bytes()[first * len..(first + rows) * len], out);
    }

    fn copy_columns(&self, matrix: Matrix, row: usize, first: usize, columns: usize, out: &mut [u8]) {
        let row = self.quantized(matrix).bf16.row(row);
        out.copy_from_slice(&row[first * BF16_BYTES..(first + columns) * BF16_BYTES]);
    }

    fn copy_gamma(&self, vector: Vector, out: &mut [u8]) {
        f16_to_bf16(self.vector(vector).row(0), out);
    }

    fn copy_bias(&self, layer: usize, first: usize, out: &mut [f32]) {
        let values = self.layers[layer].qkv_bias.row(0).as_chunks::<2>().0;
        for (out, bits) in out.iter_mut().zip(&values[first..]) {
            *out = f16_value(u16::from_le_bytes(*bits));
        }
    }
}

fn f16_to_bf16(from: &[u8], out: &mut [u8]) {
    for (out, bits) in out.as_chunks_mut::<2>().0.iter_mut().zip(from.as_chunks::<2>().0) {
        *out = bf16_bits(f16_value(u16::from_le_bytes(*bits))).to_le_bytes();
    }
}

/// Copies `from` to `to` in two halves side by side: twice the streams keep more of the memory busy than one does.
///
/// # Panics
/// Where the lengths differ.
pub fn copy_side_by_side(from: &[u8], to: &mut [u8]) {
    const LINE_BYTES: usize = 64;
    assert_eq!(from.len(), to.len(), "bytes of a copy");
    let half = to.len() / 2 / LINE_BYTES * LINE_BYTES;
    let ((from_front, from_back), (to_front, to_back)) = (from.split_at(half), to.split_at_mut(half));
    let from = from_front.as_chunks::<LINE_BYTES>().0.iter().zip(from_back.as_chunks::<LINE_BYTES>().0);
    let to = to_front.as_chunks_mut::<LINE_BYTES>().0.iter_mut().zip(to_back.as_chunks_mut::<LINE_BYTES>().0);
    for ((to_front, to_back), (from_front, from_back)) in to.zip(from) {
        (*to_front, *to_back) = (*from_front, *from_back);
    }
    // The second half is longer by what does not fill two lines.
    to_back[half..].copy_from_slice(&from_back[half..]);
}

#[cfg(test)]
mod tests {
    use super::copy_side_by_side;

    #[test]
    fn every_length_is_copied_whole() {
        for len in [0, 1, 63, 64, 127, 128, 129, 191, 192, 255, 256, 9216, 9217] {
            let from: Vec<u8> = (0..len).map(|at| (at * 7 + 1) as u8).collect();
            let mut to = vec![0; len];
            copy_side_by_side(&from, &mut to);
            assert_eq!(to, from, "{len} bytes");
        }
    }
}
