//! What the host writes for every token: the header object, rotary rows, and the cache rows of the token before.
//!
//! The cache buffer is a header object and then one object for each layer and KV head, keys before values. Keys are stored after
//! rotation. Only positions below the present one are read, so a stale cache needs no clearing.

use crate::error::LaneError;
use crate::layout::{BF16_BYTES, CACHE_OBJECT_ELEMENTS, EngineLayout, POSITIONS};
use crate::stream::check_length;
use npuhal_core::dtype::{bf16_bits, bf16_value};
use npuhal_models::package::{Family, HEAD_DIM};

/// Rotated pairs of a head.
pub const PAIRS: usize = HEAD_DIM / 2;
/// Elements of a row of the chunked graphs' rotary table: cosines, sines, position, zero.
pub const ROPE_ROW_ELEMENTS: usize = 2 * PAIRS + 2;

/// Rotary angles in f32: `position · (1 / theta^(2i/64))`, power, reciprocal and product each rounded.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryTable {
    inverse: [f32; PAIRS],
}

impl RotaryTable {
    /// The table for a base.
    #[must_use]
    pub fn new(theta: f32) -> Self {
        // As published: the power is rounded to f32 before its reciprocal is taken, which is not the same in the last bit.
        let frequency = |pair: usize| 1.0 / (f64::from(theta).powf(2.0 * pair as f64 / HEAD_DIM as f64) as f32);
        Self { inverse: std::array::from_fn(frequency) }
    }

    /// Cosines and sines of a position.
    #[must_use]
    pub fn at(&self, position: u32) -> ([f32; PAIRS], [f32; PAIRS]) {
        let angle = |pair: usize| f64::from(position as f32 * self.inverse[pair]);
        (std::array::from_fn(|pair| angle(pair).cos() as f32), std::array::from_fn(|pair| angle(pair).sin() as f32))
    }

    /// Row of the chunked graphs' rotary table: cosines, sines, position, zero, as bf16.
    #[must_use]
    pub fn chunk_row(&self, position: u32) -> [u16; ROPE_ROW_ELEMENTS] {
        let (cos, sin) = self.at(position);
        let mut row = [0; ROPE_ROW_ELEMENTS];
        for pair in 0..PAIRS {
            row[pair] = bf16_bits(cos[pair]);
            row[PAIRS + pair] = bf16_bits(sin[pair]);
        }
        row[2 * PAIRS] = bf16_bits(position as f32);
        row
    }
}

/// `x` as three bf16 parts, each the rounding of what is left: their sum has the precision of `x`.
#[must_use]
pub fn split(x: f32) -> [u16; 3] {
    let high = bf16_bits(x);
    let rest = x - bf16_value(high);
    let middle = bf16_bits(rest);
    [high, middle, bf16_bits(rest - bf16_value(middle))]
}

/// Writes the header of `position` into the first object of the cache buffer; `embedding` is the token's row as little-endian
/// bf16. Elements the hub does not read keep what they were.
///
/// # Errors
/// [`LaneError::OutOfRange`] for a position, [`LaneError::BufferLength`] for a row or an object of another length.
pub fn write_header(
    layout: &EngineLayout,
    table: &RotaryTable,
    position: u32,
    embedding: &[u8],
    object: &mut [u8],
) -> Result<(), LaneError> {
    check_position(position)?;
    check_length("embedding row", layout.shape().hidden_size * BF16_BYTES, embedding)?;
    check_length("header object", CACHE_OBJECT_ELEMENTS * BF16_BYTES, object)?;
    let elements = object.as_chunks_mut::<2>().0;
    let (cos, sin) = table.at(position);
    match layout.family {
        Family::Llama => {
            for pair in 0..PAIRS {
                elements[pair] = bf16_bits(cos[pair]).to_le_bytes();
                elements[PAIRS + pair] = bf16_bits(sin[pair]).to_le_bytes();
            }
        }
        // Three parts of the cosines, then three of the sines.
        Family::Qwen2 => {
            for pair in 0..PAIRS {
                for (part, (cos, sin)) in split(cos[pair]).into_iter().zip(split(sin[pair])).enumerate() {
                    elements[part * PAIRS + pair] = cos.to_le_bytes();
                    elements[(3 + part) * PAIRS + pair] = sin.to_le_bytes();
                }
            }
        }
    }
    elements[layout.position_at] = bf16_bits(position as f32).to_le_bytes();
    elements[layout.position_at + 1] = [0; 2];
    object[layout.embedding_at * BF16_BYTES..][..embedding.len()].copy_from_slice(embedding);
    Ok(())
}

/// Elements of the header that a dispatch reads: up to the end of the embedding.
#[must_use]
pub fn header_elements(layout: &EngineLayout) -> usize {
    layout.embedding_at + layout.shape().hidden_size
}

/// Where the keys and values that a dispatch at `position` returned belong: byte offsets in the cache buffer, each with a key
/// or a value of one head.
pub fn kv_rows(position: u32, kv_new: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let (vector, object) = (HEAD_DIM * BF16_BYTES, CACHE_OBJECT_ELEMENTS * BF16_BYTES);
    kv_new.chunks_exact(vector).enumerate().map(move |(index, row)| {
        // Keys and values alternate; the first object is the header's.
        let (head, is_value) = (index / 2, index % 2);
        let at = (1 + head) * object + is_value * POSITIONS * vector + position as usize * vector;
        (at as u64, row)
    })
}

/// Puts the keys and values that a dispatch at `position` returned into the cache buffer.
///
/// # Errors
/// [`LaneError::OutOfRange`] for a position, [`LaneError::BufferLength`] for buffers of other lengths than `layers` layers take.
pub fn store_kv(
    layout: &EngineLayout,
    layers: usize,
    position: u32,
    kv_new: &[u8],
    cache: &mut [u8],
) -> Result<(), LaneError> {
    check_position(position)?;
    check_length("new keys and values", layout.kv_new_bytes(layers), kv_new)?;
    check_length("cache buffer", layout.cache_bytes(layers), cache)?;
    for (at, row) in kv_rows(position, kv_new) {
        cache[at as usize..][..row.len()].copy_from_slice(row);
    }
    Ok(())
}

fn check_position(position: u32) -> Result<(), LaneError> {
    if position as usize >= POSITIONS {
        let (found, limit) = (u64::from(position), POSITIONS as u64);
        return Err(LaneError::OutOfRange { what: "position", found, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{QWEN, SMOLLM};
    use serde_json::Value;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../tests/data/kv_header_rope.json")).unwrap()
    }

    /// The header's elements; everything that is not written is 0xFFFF.
    fn header(layout: &EngineLayout, theta: f32, position: u32) -> Vec<u16> {
        let embedding: Vec<u8> = (0..layout.shape().hidden_size as u16).flat_map(u16::to_le_bytes).collect();
        let mut object = vec![0xff; 2 * CACHE_OBJECT_ELEMENTS];
        write_header(layout, &RotaryTable::new(theta), position, &embedding, &mut object).unwrap();
        object.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    }

    fn bits(value: &Value) -> Vec<u16> {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn smollm_headers_are_the_published_ones() {
        for key in ["smollm2", "smollm1"] {
            let model = &golden()[key];
            let theta = model["rope_theta"].as_f64().unwrap() as f32;
            let positions = model["positions"].as_object().unwrap();
            assert_eq!(positions.len(), 4);
            for (position, wanted) in positions {
                let position: u32 = position.parse().unwrap();
                let found = header(&SMOLLM, theta, position);
                assert_eq!(found[..32], bits(&wanted["cos_bf16_bits"]), "{key} {position}");
                assert_eq!(found[32..64], bits(&wanted["sin_bf16_bits"]), "{key} {position}");
                assert_eq!(u64::from(found[64]), wanted["position_bf16_bits"].as_u64().unwrap());
                assert_eq!(
                    (found[65], found[66], found[127], found[128], found[703], found[704]),
                    (0, 0xffff, 0xffff, 0, 575, 0xffff)
                );
                let row = RotaryTable::new(theta).chunk_row(position);
                assert_eq!((&row[..65], row[65]), (&found[..65], 0));
            }
        }
    }

    #[test]
    fn qwen_headers_carry_full_precision() {
        let model = &golden()["qwen2.5"];
        let theta = model["rope_theta"].as_f64().unwrap() as f32;
        let positions = model["positions"].as_object().unwrap();
        assert_eq!(positions.len(), 4);
        for (position, wanted) in positions {
            let position: u32 = position.parse().unwrap();
            let found = header(&QWEN, theta, position);
            let value = |bits: &[u16], at: usize| f64::from(bf16_value(bits[at]));
            for (start, name) in [(0, "cos"), (96, "sin")] {
                let parts = ["hi", "mid", "lo"].map(|part| bits(&wanted[format!("{name}_{part}")]));
                assert_eq!(found[start..start + 32], parts[0], "{name} {position}");
                for pair in 0..PAIRS {
                    let sum = |part: &dyn Fn(usize) -> f64| part(0) + part(1) + part(2);
                    let wanted = sum(&|part| value(&parts[part], pair));
                    let found = sum(&|part| value(&found, start + 32 * part + pair));
                    assert!((wanted - found).abs() <= 1e-7, "{name} {position} {pair}: {wanted} {found}");
                }
            }
            assert_eq!(found[192], bf16_bits(position as f32));
            assert_eq!((found[193], found[255], found[256], found[1151], found[1152]), (0, 0xffff, 0, 895, 0xffff));
        }
    }

    #[test]
    fn three_parts_hold_every_bit() {
        for x in [1.0f32, -0.1, std::f32::consts::PI, 1e-20, f32::MAX / 2.0, 0.0, -1.000_000_1] {
            let [high, middle, low] = split(x).map(|bits| f64::from(bf16_value(bits)));
            assert_eq!((high + middle + low) as f32, x);
        }
    }

    #[test]
    fn new_keys_and_values_land_in_their_objects() {
        let layers = 2;
        let kv_new: Vec<u8> =
            (0..SMOLLM.kv_new_elements(layers) as u16).flat_map(|element| (element + 1).to_le_bytes()).collect();
        let mut cache = vec![0; SMOLLM.cache_bytes(layers)];
        store_kv(&SMOLLM, layers, 5, &kv_new, &mut cache).unwrap();
        let element = |object: usize, values: usize, position: usize, dim: usize| {
            let at = 2 * (object * 8192 + values * 4096 + position * 64 + dim);
            u16::from_le_bytes([cache[at], cache[at + 1]])
        };
        // Layer 1, head 2: keys, then values.
        assert_eq!(element(1 + 3 + 2, 0, 5, 7), 384 + 2 * 128 + 7 + 1);
        assert_eq!(element(1 + 3 + 2, 1, 5, 7), 384 + 2 * 128 + 64 + 7 + 1);
        let written = cache.as_chunks::<2>().0.iter().filter(|bytes| **bytes != [0; 2]).count();
        assert_eq!(written, SMOLLM.kv_new_elements(layers), "nothing else is touched");
    }

    #[test]
    fn wrong_positions_and_lengths_are_refused() {
        let table = RotaryTable::new(1e4);
        let (row, mut object) = (vec![0; 1152], vec![0; 16384]);
        let error = write_header(&SMOLLM, &table, 64, &row, &mut object).unwrap_err();
        assert_eq!(error.to_string(), "position 64 of 64; the last is 63");
        let error = write_header(&QWEN, &table, 0, &row, &mut object).unwrap_err();
        assert_eq!(error.to_string(), "embedding row: wanted a buffer of 1792 bytes, found 1152");
        assert!(write_header(&SMOLLM, &table, 0, &row, &mut object[1..]).is_err());
        assert!(store_kv(&SMOLLM, 30, 0, &row, &mut object).is_err());
    }
}
