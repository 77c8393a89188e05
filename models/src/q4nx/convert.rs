//! Rows of GGUF weights as codes and constants of q4_1 tiles.
//!
//! Types whose elements are a 4-bit code times a scale plus a constant of 32 columns keep their codes; only the constants are
//! rounded to bf16. All others are quantized anew, a group of 32 columns at a time: scale `bf16((max - min) / 15)`, zero
//! `bf16(min)`, code `(w - zero) / scale` rounded half to even and kept within 0 to 15, all in f32.

use super::tile::{BF16_EXCESS, GROUP_COLS, GROUPS, Q4_1_BYTES, TILE_COLS, TILE_ROWS, TileCodes, bf16_excess};
use crate::quant::blocks::{Q4_0Block, Q4_1Block, Q4KBlock};
use crate::quant::dequantize_row;
use crate::tensor::{Tensor, WeightType};
use npuhal_core::dtype::{bf16_bits, round_bf16};

/// How a GGUF type fares in q4_1 tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// Codes are kept; scales and zeros are rounded to bf16.
    Exact,
    /// Quantized anew.
    Requantized,
}

impl Conversion {
    /// The conversion of `weight_type`.
    #[must_use]
    pub const fn of(weight_type: WeightType) -> Self {
        match weight_type {
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K => Self::Exact,
            _ => Self::Requantized,
        }
    }
}

/// Bytes of the 256 columns from `256 · tile_col` in row `row`.
fn slice(tensor: &Tensor, row: usize, tile_col: usize) -> &[u8] {
    let weight_type = tensor.weight_type();
    // A tile's columns are whole blocks of every type.
    let len = TILE_COLS / weight_type.block_len() * weight_type.block_bytes();
    &tensor.row(row)[tile_col * len..(tile_col + 1) * len]
}

/// Fills `out` with tile (`tile_row`, `tile_col`) of `tensor`, whose rows are a multiple of 32 and columns of 256. False where a
/// scale or zero is not finite. `parts` is scratch.
pub(super) fn write_tile(
    tensor: &Tensor,
    tile_row: usize,
    tile_col: usize,
    parts: &mut TileCodes,
    out: &mut [u8; Q4_1_BYTES],
) -> bool {
    for r in 0..TILE_ROWS {
        let bytes = slice(tensor, TILE_ROWS * tile_row + r, tile_col);
        code_row(tensor.weight_type(), bytes, &mut parts.codes[r], &mut parts.scales[r], &mut parts.zeros[r]);
    }
    parts.write_q4_1(out)
}

/// Codes and constants of the 256 columns stored in `bytes`.
pub(super) fn code_row(
    weight_type: WeightType,
    bytes: &[u8],
    codes: &mut [u8; TILE_COLS],
    scales: &mut [f32; GROUPS],
    zeros: &mut [f32; GROUPS],
) {
    let groups = codes.as_chunks_mut::<GROUP_COLS>().0.iter_mut().zip(scales.iter_mut().zip(zeros.iter_mut()));
    match weight_type {
        WeightType::Q4_0 => {
            for ((codes, (scale, zero)), block) in groups.zip(bytes.as_chunks::<18>().0) {
                let block = Q4_0Block(block);
                *codes = block.codes();
                *scale = block.scale().to_f32();
                *zero = -8.0 * *scale;
            }
        }
        WeightType::Q4_1 => {
            for ((codes, (scale, zero)), block) in groups.zip(bytes.as_chunks::<20>().0) {
                let block = Q4_1Block(block);
                *codes = block.codes();
                (*scale, *zero) = (block.scale().to_f32(), block.min().to_f32());
            }
        }
        WeightType::Q4K => {
            let Some(block) = bytes.first_chunk::<144>().map(Q4KBlock) else { return };
            *codes = block.codes();
            let (d, dmin) = (block.scale().to_f32(), block.min_scale().to_f32());
            for (sub, (scale, zero)) in scales.iter_mut().zip(zeros).enumerate() {
                let (sc, mn) = block.scale_min(sub);
                (*scale, *zero) = (d * f32::from(sc), -dmin * f32::from(mn));
            }
        }
        _ => {
            let mut values = [0.0; TILE_COLS];
            // The length is right: `slice` makes it.
            if dequantize_row(weight_type, bytes, &mut values).is_err() {
                values.fill(f32::NAN);
            }
            for ((codes, (scale, zero)), values) in groups.zip(values.as_chunks::<GROUP_COLS>().0) {
                (*scale, *zero) = requantize(values, codes);
            }
        }
    }
}

/// Codes of a group, and its scale and zero as bf16. Not a number where an element is not.
///
/// Not inlined, so that it is the same vector code wherever it is called.
#[inline(never)]
fn requantize(values: &[f32; GROUP_COLS], codes: &mut [u8; GROUP_COLS]) -> (f32, f32) {
    let Some((min, max)) = range(values) else { return (f32::NAN, f32::NAN) };
    let (scale, zero) = (round_bf16((max - min) / 15.0), round_bf16(min));
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    // In two steps over the whole group, which the compiler turns into vector instructions.
    let mut rounded = [0_u32; GROUP_COLS];
    for (rounded, value) in rounded.iter_mut().zip(values) {
        *rounded = round_half_even((value - zero) / divisor);
    }
    for (code, rounded) in codes.iter_mut().zip(rounded) {
        *code = rounded as u8;
    }
    (scale, zero)
}

/// Smallest and largest of finite values. Eight lanes, so that the compiler can keep them side by side.
fn range(values: &[f32; GROUP_COLS]) -> Option<(f32, f32)> {
    let lanes = values.as_chunks::<8>().0;
    let (mut min, mut max, mut sum) = (lanes[0], lanes[0], [0.0; 8]);
    for values in lanes {
        for lane in 0..8 {
            min[lane] = lesser(values[lane], min[lane]);
            max[lane] = greater(values[lane], max[lane]);
            // Stays 0 as long as all are finite.
            sum[lane] += values[lane] * 0.0;
        }
    }
    for half in [4, 2, 1] {
        for lane in 0..half {
            min[lane] = lesser(min[lane + half], min[lane]);
            max[lane] = greater(max[lane + half], max[lane]);
            sum[lane] += sum[lane + half];
        }
    }
    (sum[0] == 0.0).then_some((min[0], max[0]))
}

/// As [`f32::min`] without its care for NaN, which costs a vector instruction.
#[inline(always)]
fn lesser(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

/// As [`f32::max`], likewise.
#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The whole number of 0 to 15 nearest to `x`, ties to even, in the low bits: adding 2^23 leaves no fraction.
#[inline(always)]
fn round_half_even(x: f32) -> u32 {
    let x = if x > 0.0 { x } else { 0.0 };
    let x = if x < 15.0 { x } else { 15.0 };
    (x + 8_388_608.0).to_bits() & 15
}

/// Fills `out` with the elements of `values` as bf16. False where one is not finite as bf16.
pub(super) fn write_bf16(values: &[f32], out: &mut [u8]) -> bool {
    let mut excess = 0;
    for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        excess |= bf16_excess(*value);
        *out = bf16_bits(*value).to_le_bytes();
    }
    excess < BF16_EXCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::q4nx::tile::{TILE_ELEMENTS, TileDecoder};
    use half::f16;

    #[test]
    fn rounding_is_half_to_even() {
        for (x, code) in [(0.0, 0), (0.5, 0), (1.5, 2), (2.5, 2), (3.5, 4), (14.5, 14), (14.500_001, 15), (15.0, 15)] {
            assert_eq!(round_half_even(x), code, "{x}");
        }
        let mut values = [0.0; GROUP_COLS];
        // Scale 1, zero 0: the values are the quotients.
        values[..7].copy_from_slice(&[15.0, 0.5, 1.5, 2.5, 7.5, 8.5, 14.5]);
        let mut codes = [0; GROUP_COLS];
        assert_eq!(requantize(&values, &mut codes), (1.0, 0.0));
        assert_eq!(codes[..7], [15, 0, 2, 2, 8, 8, 14]);
    }

    #[test]
    fn a_rounded_zero_keeps_codes_in_range() {
        // The minimum rounds up to bf16: what lies below the zero gets code 0; what is above 15 steps gets 15.
        let mut values = [1.003_906_4; GROUP_COLS];
        values[1] = 1.003_906_4 + 15.0 * 0.001;
        let mut codes = [0; GROUP_COLS];
        let (scale, zero) = requantize(&values, &mut codes);
        assert_eq!(zero, 1.007_812_5);
        assert_eq!(scale, round_bf16((values[1] - values[0]) / 15.0));
        assert_eq!((codes[0], codes[1]), (0, ((values[1] - zero) / scale).round_ties_even() as u8));
    }

    #[test]
    fn equal_values_have_scale_zero() {
        let mut codes = [9; GROUP_COLS];
        assert_eq!(requantize(&[0.25; GROUP_COLS], &mut codes), (0.0, 0.25));
        assert_eq!(codes, [0; GROUP_COLS]);
    }

    #[test]
    fn what_is_not_finite_is_seen() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 5, 31] {
                let mut values = [1.0; GROUP_COLS];
                values[at] = bad;
                assert!(requantize(&values, &mut [0; GROUP_COLS]).0.is_nan(), "{bad} at {at}");
            }
        }
        assert!(!write_bf16(&[f32::NAN], &mut [0; 2]) && !write_bf16(&[f32::MAX], &mut [0; 2]));
        assert!(write_bf16(&[3e38], &mut [0; 2]));
        let mut parts = TileCodes::default();
        assert!(parts.write_q4_1(&mut [0; Q4_1_BYTES]));
        parts.scales[31][7] = f32::INFINITY;
        assert!(!parts.write_q4_1(&mut [0; Q4_1_BYTES]));
    }

    #[test]
    fn four_bit_types_keep_their_codes() {
        let (d, m) = (f16::from_f32(0.031), f16::from_f32(-0.17));
        let mut q4_0 = Vec::new();
        let mut q4_1 = Vec::new();
        for group in 0..8_u8 {
            let codes: Vec<u8> = (0..16_u8).map(|i| i.wrapping_mul(29).wrapping_add(group.wrapping_mul(37))).collect();
            q4_0.extend(d.to_le_bytes());
            q4_0.extend(&codes);
            q4_1.extend(d.to_le_bytes());
            q4_1.extend(m.to_le_bytes());
            q4_1.extend(&codes);
        }
        for (weight_type, bytes, zero) in
            [(WeightType::Q4_0, q4_0, -8.0 * d.to_f32()), (WeightType::Q4_1, q4_1, m.to_f32())]
        {
            let mut parts = TileCodes::default();
            code_row(weight_type, &bytes, &mut parts.codes[3], &mut parts.scales[3], &mut parts.zeros[3]);
            assert_eq!((parts.scales[3], parts.zeros[3]), ([d.to_f32(); 8], [zero; 8]));
            let mut wanted = [0.0; TILE_COLS];
            dequantize_row(weight_type, &bytes, &mut wanted).unwrap();
            let mut tile = [0; Q4_1_BYTES];
            assert!(parts.write_q4_1(&mut tile));
            let mut decoded = [0.0; TILE_ELEMENTS];
            TileDecoder::Q4_1.decode(&tile, &mut decoded).unwrap();
            let (scale, zero_bf16) = (round_bf16(d.to_f32()), round_bf16(zero));
            for c in 0..TILE_COLS {
                let code = f32::from(parts.codes[3][c]);
                assert_eq!(code * d.to_f32() + zero, wanted[c], "{weight_type} {c}");
                assert_eq!(decoded[3 * TILE_COLS + c], code * scale + zero_bf16, "{weight_type} {c}");
            }
        }
    }
}
