//! Types without kernels of their own, rewritten as a type that has them.
//!
//! | type | as | why it is exact |
//! |---|---|---|
//! | Q3_K | Q6_K | both are `(d · scale) · code`: signed scales of 6 bits fit 8, codes of 3 bits fit 6 |
//! | IQ4_NL | Q8_0 | both are `d · value`: the table's values are signed bytes |
//! | MXFP4 | BF16 | a value has two significant bits, and its exponent is one of bf16 |
//! | Q2_K, IQ4_XS | F32 | the elements as the format defines them in f32; four bytes a weight |

use npuhal_models::WeightType;
use npuhal_models::quant::blocks::{Iq4NlBlock, Mxfp4Block, Q3KBlock};
use npuhal_models::quant::dequantize_row;

/// The type in which weights of `weight_type` are packed: itself where there are kernels for it.
#[must_use]
pub const fn stored_as(weight_type: WeightType) -> WeightType {
    match weight_type {
        WeightType::Q3K => WeightType::Q6K,
        WeightType::Iq4Nl => WeightType::Q8_0,
        WeightType::Mxfp4 => WeightType::Bf16,
        WeightType::Q2K | WeightType::Iq4Xs => WeightType::F32,
        own => own,
    }
}

/// Appends a row of `weight_type` as a row of [`stored_as`] that type.
pub(super) fn convert(weight_type: WeightType, row: &[u8], out: &mut Vec<u8>) {
    match weight_type {
        WeightType::Q3K => row.as_chunks().0.iter().for_each(|block| q3_k(Q3KBlock(block), out)),
        WeightType::Iq4Nl => {
            for block in row.as_chunks().0 {
                let block = Iq4NlBlock(block);
                out.extend(block.scale().to_le_bytes());
                out.extend(block.values().map(i8::cast_unsigned));
            }
        }
        WeightType::Mxfp4 => {
            for block in row.as_chunks().0 {
                let block = Mxfp4Block(block);
                let scale = block.half_scale();
                // The lower half of the bits is zero.
                out.extend(block.values().iter().flat_map(|value| {
                    let [_, _, low, high] = (scale * f32::from(*value)).to_le_bytes();
                    [low, high]
                }));
            }
        }
        _ => {
            let mut values = vec![0.0; row.len() / weight_type.block_bytes() * weight_type.block_len()];
            // A row is a whole number of blocks.
            if dequantize_row(weight_type, row, &mut values).is_err() {
                values.fill(f32::NAN);
            }
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }
}

/// One block as a Q6_K block: low halves, upper pairs, scales, `d`.
fn q3_k(block: Q3KBlock<'_>, out: &mut Vec<u8>) {
    // q - 4 is (q + 28) - 32.
    let codes = block.codes().map(|code| code + 28);
    let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
    for (at, code) in codes.into_iter().enumerate() {
        let (half, group, index) = (at / 128, at % 128 / 32, at % 32);
        low[64 * half + index + 32 * (group % 2)] |= (code & 15) << (4 * (group / 2));
        high[32 * half + index] |= (code >> 4) << (2 * group);
    }
    out.extend(low);
    out.extend(high);
    out.extend(block.sub_scales().map(i8::cast_unsigned));
    out.extend(block.scale().to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the bytes, as long as scales are numbers.
        #[test]
        fn rewritten_rows_have_the_same_elements(
            weight_type in prop::sample::select(vec![
                WeightType::Q2K, WeightType::Q3K, WeightType::Iq4Nl, WeightType::Iq4Xs, WeightType::Mxfp4,
            ]),
            row in prop::collection::vec(any::<u8>(), 136 * 6),
        ) {
            let blocks = row.len() / weight_type.block_bytes();
            let row = &row[..blocks * weight_type.block_bytes()];
            let stored = stored_as(weight_type);
            let mut rewritten = Vec::new();
            convert(weight_type, row, &mut rewritten);
            let (mut wanted, mut found) = (vec![0.0; blocks * weight_type.block_len()], Vec::new());
            found.resize(wanted.len(), 1.0);
            dequantize_row(weight_type, row, &mut wanted).unwrap();
            dequantize_row(stored, &rewritten, &mut found).unwrap();
            for (found, wanted) in found.iter().zip(&wanted) {
                prop_assert!(found == wanted || (found.is_nan() && wanted.is_nan()), "{weight_type}: {found} {wanted}");
            }
        }
    }
}
