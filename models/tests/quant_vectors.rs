//! Dequantization of every weight type against an independent implementation, bit for bit.

use npuhal_models::WeightType;
use npuhal_models::quant::{self, blocks};
use proptest::prelude::*;
use serde_json::Value;

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn vectors() -> Vec<(WeightType, Vec<u8>, Vec<u32>)> {
    let entries: Vec<Value> = serde_json::from_str(include_str!("data/quant_vectors.json")).unwrap();
    entries
        .iter()
        .map(|entry| {
            let text = |key: &str| entry[key].as_str().unwrap();
            let weight_type = WeightType::ALL.into_iter().find(|known| known.name() == text("type")).unwrap();
            let bits =
                from_hex(text("f32")).as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            (weight_type, from_hex(text("bytes")), bits)
        })
        .collect()
}

#[test]
fn every_type_dequantizes_to_the_stored_bits() {
    let vectors = vectors();
    assert_eq!(vectors.len(), WeightType::ALL.len());
    for (weight_type, bytes, expected) in vectors {
        let mut out = vec![f32::NAN; expected.len()];
        quant::dequantize_row(weight_type, &bytes, &mut out).unwrap();
        let found: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
        assert_eq!(found, expected, "{weight_type}");
    }
}

/// The accessors that repacking uses state the same elements as dequantization.
#[test]
fn accessors_state_the_same_elements() {
    let mut checked = 0;
    for (weight_type, bytes, expected) in vectors() {
        let elements: Vec<f32> = match weight_type {
            WeightType::Q4_0 => flat(&bytes, |block| {
                let block = blocks::Q4_0Block(block);
                block.codes().map(|q| (f32::from(q) - 8.0) * block.scale().to_f32()).to_vec()
            }),
            WeightType::Q4_1 => flat(&bytes, |block| {
                let block = blocks::Q4_1Block(block);
                block.codes().map(|q| f32::from(q) * block.scale().to_f32() + block.min().to_f32()).to_vec()
            }),
            WeightType::Q5_0 => flat(&bytes, |block| {
                let block = blocks::Q5_0Block(block);
                block.codes().map(|q| (f32::from(q) - 16.0) * block.scale().to_f32()).to_vec()
            }),
            WeightType::Q5_1 => flat(&bytes, |block| {
                let block = blocks::Q5_1Block(block);
                block.codes().map(|q| f32::from(q) * block.scale().to_f32() + block.min().to_f32()).to_vec()
            }),
            WeightType::Q8_0 => flat(&bytes, |block| {
                let block = blocks::Q8_0Block(block);
                block.codes().map(|q| f32::from(q) * block.scale().to_f32()).to_vec()
            }),
            WeightType::Q4K => flat(&bytes, |block| {
                let block = blocks::Q4KBlock(block);
                k_elements(block.scale().to_f32(), block.min_scale().to_f32(), &block.codes(), |sub| {
                    block.scale_min(sub)
                })
            }),
            WeightType::Q5K => flat(&bytes, |block| {
                let block = blocks::Q5KBlock(block);
                k_elements(block.scale().to_f32(), block.min_scale().to_f32(), &block.codes(), |sub| {
                    block.scale_min(sub)
                })
            }),
            WeightType::Q6K => flat(&bytes, |block| {
                let block = blocks::Q6KBlock(block);
                let (d, scales, codes) = (block.scale().to_f32(), block.sub_scales(), block.codes());
                (0..256).map(|at| d * f32::from(scales[at / 16]) * (f32::from(codes[at]) - 32.0)).collect()
            }),
            WeightType::Q3K => flat(&bytes, |block| {
                let block = blocks::Q3KBlock(block);
                let (d, scales, codes) = (block.scale().to_f32(), block.sub_scales(), block.codes());
                (0..256).map(|at| d * f32::from(scales[at / 16]) * (f32::from(codes[at]) - 4.0)).collect()
            }),
            WeightType::Iq4Nl => flat(&bytes, |block| {
                let block = blocks::Iq4NlBlock(block);
                block.values().map(|value| block.scale().to_f32() * f32::from(value)).to_vec()
            }),
            WeightType::Mxfp4 => flat(&bytes, |block| {
                let block = blocks::Mxfp4Block(block);
                block.values().map(|value| block.half_scale() * f32::from(value)).to_vec()
            }),
            _ => continue,
        };
        checked += 1;
        let found: Vec<u32> = elements.iter().map(|value| value.to_bits()).collect();
        assert_eq!(found, expected, "{weight_type}");
    }
    assert_eq!(checked, 11);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the bytes (scales that are infinite or no numbers among them), and however a row is cut into blocks.
    #[test]
    fn any_bytes_dequantize_block_by_block_as_in_one_piece(
        weight_type in prop::sample::select(WeightType::ALL.to_vec()),
        bytes in prop::collection::vec(any::<u8>(), 210 * 4),
    ) {
        let (len, size) = (weight_type.block_len(), weight_type.block_bytes());
        let blocks = bytes.len() / size;
        let mut whole = vec![0.0_f32; blocks * len];
        quant::dequantize_row(weight_type, &bytes[..blocks * size], &mut whole).unwrap();
        for (bytes, expected) in bytes.chunks_exact(size).zip(whole.chunks_exact(len)) {
            let mut out = vec![0.0_f32; len];
            quant::dequantize_row(weight_type, bytes, &mut out).unwrap();
            prop_assert!(out.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())));
        }
    }
}

fn flat<const BYTES: usize>(bytes: &[u8], elements: impl Fn(&[u8; BYTES]) -> Vec<f32>) -> Vec<f32> {
    bytes.as_chunks::<BYTES>().0.iter().flat_map(elements).collect()
}

fn k_elements(d: f32, dmin: f32, codes: &[u8; 256], scale_min: impl Fn(usize) -> (u8, u8)) -> Vec<f32> {
    (0..256)
        .map(|at| {
            let (scale, min) = scale_min(at / 32);
            d * f32::from(scale) * f32::from(codes[at]) - dmin * f32::from(min)
        })
        .collect()
}
