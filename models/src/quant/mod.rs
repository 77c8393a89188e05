//! Weight types as f32, exactly as the GGUF format defines them.
//!
//! Every block type states integers `q` and scales; an element is their product in f32 arithmetic, one rounding for each
//! operation, no fused multiply-add. Binary16 values are exact in f32. The formulas (after the ggml project's definitions of
//! its block formats) stand at each block type in [`blocks`]:
//!
//! | type | element |
//! |---|---|
//! | F32, F16, BF16 | itself |
//! | Q4_0, Q5_0 | `(q - 8) · d`, `(q - 16) · d` |
//! | Q4_1, Q5_1 | `q · d + m` |
//! | Q8_0 | `q · d` |
//! | Q4_K, Q5_K | `(d · sc) · q - (dmin · mn)` |
//! | Q6_K | `(d · sc) · (q - 32)` |
//! | Q2_K | `(d · sc) · q - (dmin · mn)` |
//! | Q3_K | `(d · (sc - 32)) · (q - 4)` |
//! | IQ4_NL | `d · table[q]` |
//! | IQ4_XS | `(d · (sc - 32)) · table[q]` |
//! | MXFP4 | `2^(e - 128) · table[q]` |

pub mod blocks;

use crate::tensor::{Tensor, WeightType};
use blocks::{
    Block, Iq4NlBlock, Iq4XsBlock, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_0Block, Q4_1Block, Q4KBlock, Q5_0Block,
    Q5_1Block, Q5KBlock, Q6KBlock, Q8_0Block,
};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use thiserror::Error;

/// A row that cannot be dequantized.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The number of elements is no whole number of blocks.
    #[error("wanted a multiple of {block_len} elements for {weight_type}, found {elements}")]
    PartialBlock {
        /// The type.
        weight_type: WeightType,
        /// Elements of its blocks.
        block_len: usize,
        /// Elements asked for.
        elements: usize,
    },
    /// The bytes are not as many as the elements take.
    #[error("wanted {wanted} bytes for {elements} elements of {weight_type}, found {found}")]
    ByteCount {
        /// The type.
        weight_type: WeightType,
        /// Elements asked for.
        elements: usize,
        /// Bytes they take.
        wanted: usize,
        /// Bytes given.
        found: usize,
    },
    /// The tensor has no such row, or its rows are of another length.
    #[error("wanted row {row} with {elements} elements of tensor {name:?}, found {rows} rows of {cols}")]
    NoSuchRow {
        /// The tensor.
        name: String,
        /// Row asked for.
        row: usize,
        /// Elements asked for.
        elements: usize,
        /// Rows there are.
        rows: usize,
        /// Elements of a row.
        cols: usize,
    },
}

/// Bytes of `elements` consecutive elements.
///
/// # Errors
/// [`QuantError::PartialBlock`].
pub fn row_bytes(weight_type: WeightType, elements: usize) -> Result<usize, QuantError> {
    let block_len = weight_type.block_len();
    let blocks = elements / block_len;
    match blocks.checked_mul(weight_type.block_bytes()) {
        Some(len) if elements.is_multiple_of(block_len) => Ok(len),
        _ => Err(QuantError::PartialBlock { weight_type, block_len, elements }),
    }
}

/// Fills `out` with the elements stored in `bytes`: consecutive blocks of one row, or of several rows one after the other.
///
/// # Errors
/// [`QuantError::PartialBlock`] where `out` is no whole number of blocks, [`QuantError::ByteCount`] where `bytes` are not exactly
/// those of `out`.
pub fn dequantize_row(weight_type: WeightType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let wanted = row_bytes(weight_type, out.len())?;
    if bytes.len() != wanted {
        return Err(QuantError::ByteCount { weight_type, elements: out.len(), wanted, found: bytes.len() });
    }
    match weight_type {
        WeightType::F32 => plain(bytes, out, f32::from_le_bytes),
        WeightType::F16 => halves(bytes, out),
        WeightType::Bf16 => plain(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        WeightType::Q4_0 => blockwise::<Q4_0Block<'_>, 18, 32>(bytes, out),
        WeightType::Q4_1 => blockwise::<Q4_1Block<'_>, 20, 32>(bytes, out),
        WeightType::Q5_0 => blockwise::<Q5_0Block<'_>, 22, 32>(bytes, out),
        WeightType::Q5_1 => blockwise::<Q5_1Block<'_>, 24, 32>(bytes, out),
        WeightType::Q8_0 => blockwise::<Q8_0Block<'_>, 34, 32>(bytes, out),
        WeightType::Q2K => blockwise::<Q2KBlock<'_>, 84, 256>(bytes, out),
        WeightType::Q3K => blockwise::<Q3KBlock<'_>, 110, 256>(bytes, out),
        WeightType::Q4K => blockwise::<Q4KBlock<'_>, 144, 256>(bytes, out),
        WeightType::Q5K => blockwise::<Q5KBlock<'_>, 176, 256>(bytes, out),
        WeightType::Q6K => blockwise::<Q6KBlock<'_>, 210, 256>(bytes, out),
        WeightType::Iq4Nl => blockwise::<Iq4NlBlock<'_>, 18, 32>(bytes, out),
        WeightType::Iq4Xs => blockwise::<Iq4XsBlock<'_>, 136, 256>(bytes, out),
        WeightType::Mxfp4 => blockwise::<Mxfp4Block<'_>, 17, 32>(bytes, out),
    }
    Ok(())
}

fn plain<const SIZE: usize>(bytes: &[u8], out: &mut [f32], element: impl Fn([u8; SIZE]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<SIZE>().0) {
        *out = element(*bytes);
    }
}

/// Some at a time: the processor's instruction for it is looked up once for each slice.
fn halves(bytes: &[u8], out: &mut [f32]) {
    const STEP: usize = 64;
    for (bytes, out) in bytes.chunks(2 * STEP).zip(out.chunks_mut(STEP)) {
        let mut halves = [f16::ZERO; STEP];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves[..out.len()].convert_to_f32_slice(out);
    }
}

fn blockwise<'a, B: Block<'a, BYTES, LEN>, const BYTES: usize, const LEN: usize>(bytes: &'a [u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<LEN>().0) {
        B::new(bytes).dequantize(out);
    }
}

impl Tensor {
    /// Fills `out` with row `row`; `out` has [`Tensor::cols`] elements.
    ///
    /// # Errors
    /// [`QuantError::NoSuchRow`].
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<(), QuantError> {
        if row >= self.rows() || out.len() != self.cols() {
            return Err(QuantError::NoSuchRow {
                name: self.name().to_owned(),
                row,
                elements: out.len(),
                rows: self.rows(),
                cols: self.cols(),
            });
        }
        dequantize_row(self.weight_type(), self.row(row), out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        let mut out = [0.0; 40];
        let partial = dequantize_row(WeightType::Q8_0, &[0; 34], &mut out).unwrap_err();
        assert_eq!(partial.to_string(), "wanted a multiple of 32 elements for Q8_0, found 40");
        let short = dequantize_row(WeightType::Q8_0, &[0; 33], &mut out[..32]).unwrap_err();
        assert_eq!(short.to_string(), "wanted 34 bytes for 32 elements of Q8_0, found 33");
        assert_eq!(dequantize_row(WeightType::Q6K, &[], &mut []), Ok(()));
        assert!(row_bytes(WeightType::F32, usize::MAX).is_err());
    }

    #[test]
    fn plain_types_keep_their_bits() {
        let mut out = [0.0_f32; 2];
        dequantize_row(WeightType::F32, &[0, 0, 0xc0, 0x3f, 1, 0, 0, 0x80], &mut out).unwrap();
        assert_eq!(out.map(f32::to_bits), [0x3fc0_0000, 0x8000_0001]);
        dequantize_row(WeightType::F16, &[0x00, 0x3e, 0x01, 0x80], &mut out).unwrap();
        assert_eq!(out, [1.5, -(2.0_f32.powi(-24))]);
        dequantize_row(WeightType::Bf16, &[0xc0, 0x3f, 0x80, 0xff], &mut out).unwrap();
        assert_eq!(out, [1.5, f32::NEG_INFINITY]);
    }
}
