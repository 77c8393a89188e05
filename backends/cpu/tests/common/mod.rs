//! Random weights in the file's block formats, as tensors of a temporary file.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

pub mod model;

use npuhal_models::map::FileMap;
use npuhal_models::{Tensor, WeightType};
use std::io::Write;
use std::sync::Arc;

/// A small generator of reproducible numbers (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// About normal, unit variance.
    pub fn gauss(&mut self) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() * 0.707
    }
}

/// What the codes and scales of a test matrix look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// Like a model's: random codes, small scales.
    Random,
    /// Every bit of the codes and sub-block scales set, largest f16 scales.
    AllOnes,
    /// Every bit of the codes and sub-block scales clear, largest f16 scales.
    AllZeros,
    /// Extreme codes at random: each byte all ones, all zeros, or the sign bit alone.
    Extreme,
    /// Smallest (denormal) f16 scales.
    Denormal,
    /// All scales zero.
    ZeroScales,
}

pub const WEIGHTS: [Weights; 6] =
    [Weights::Random, Weights::AllOnes, Weights::AllZeros, Weights::Extreme, Weights::Denormal, Weights::ZeroScales];

/// Where f16 scales lie in a block of the type.
fn scale_offsets(weight_type: WeightType) -> &'static [usize] {
    match weight_type {
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q6K => &[208],
        WeightType::Q2K => &[80, 82],
        WeightType::Q3K => &[108],
        WeightType::Iq4Nl | WeightType::Iq4Xs => &[0],
        _ => &[],
    }
}

/// Bytes of a `rows` × `cols` matrix.
pub fn matrix_bytes(weight_type: WeightType, rows: usize, cols: usize, kind: Weights, random: &mut Random) -> Vec<u8> {
    let block_bytes = weight_type.block_bytes();
    let mut bytes = Vec::new();
    for _ in 0..rows * (cols / weight_type.block_len()) {
        let mut block: Vec<u8> = (0..block_bytes)
            .map(|_| match kind {
                Weights::AllOnes => 0xFF,
                Weights::AllZeros => 0,
                Weights::Extreme => [0xFF, 0, 0x80][random.below(3)],
                _ => random.next() as u8,
            })
            .collect();
        match weight_type {
            WeightType::F32 => block.copy_from_slice(&plain(kind, random).to_le_bytes()),
            WeightType::F16 => block.copy_from_slice(&half::f16::from_f32(plain(kind, random)).to_le_bytes()),
            WeightType::Bf16 => block.copy_from_slice(&half::bf16::from_f32(plain(kind, random)).to_le_bytes()),
            WeightType::Mxfp4 => {
                block[0] = match kind {
                    Weights::Random => 120 + random.below(3) as u8,
                    Weights::Denormal => 1,
                    Weights::ZeroScales => 0,
                    _ => 140,
                }
            }
            _ => {
                let d = random.unit() * largest_scale(weight_type);
                for (index, &at) in scale_offsets(weight_type).iter().enumerate() {
                    let scale = match kind {
                        Weights::Random if index == 0 => half::f16::from_f32(d),
                        Weights::Random => half::f16::from_f32(d * middle(weight_type) * (1.0 + 0.2 * random.unit())),
                        Weights::AllOnes | Weights::AllZeros | Weights::Extreme => {
                            half::f16::from_f32(if random.below(2) == 0 { 65504.0 } else { -65504.0 })
                        }
                        Weights::Denormal => half::f16::from_bits(1 + random.below(1000) as u16),
                        Weights::ZeroScales => half::f16::ZERO,
                    };
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
        bytes.extend(block);
    }
    bytes
}

/// Scale that makes weights of about 0.15 at most.
fn largest_scale(weight_type: WeightType) -> f32 {
    0.15 / match weight_type {
        WeightType::Q4_0 | WeightType::Q4_1 => 8.0,
        WeightType::Q5_0 | WeightType::Q5_1 => 16.0,
        WeightType::Q8_0 | WeightType::Iq4Nl => 127.0,
        WeightType::Q2K => 15.0 * 3.0,
        WeightType::Q3K => 32.0 * 4.0,
        WeightType::Q4K => 63.0 * 8.0,
        WeightType::Q5K => 63.0 * 16.0,
        _ => 127.0 * 32.0,
    }
}

/// Factor from scale to minimum that centres the weights.
fn middle(weight_type: WeightType) -> f32 {
    match weight_type {
        WeightType::Q4_1 => -7.5,
        WeightType::Q2K => 1.5,
        WeightType::Q5_1 => -15.5,
        WeightType::Q4K => 7.5,
        _ => 15.5,
    }
}

fn plain(kind: Weights, random: &mut Random) -> f32 {
    match kind {
        Weights::ZeroScales => 0.0,
        Weights::Denormal => random.unit() * 6e-8,
        Weights::Random => random.unit() * 0.15,
        _ => random.unit() * 60_000.0,
    }
}

/// A tensor over bytes in a temporary file.
pub fn tensor(weight_type: WeightType, rows: usize, cols: usize, bytes: &[u8]) -> Tensor {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let map = Arc::new(FileMap::open(file.path()).unwrap());
    Tensor::new("test", weight_type, rows, cols, map, 0..bytes.len()).unwrap()
}

/// All rows of a tensor as f32.
pub fn dequantized(tensor: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; tensor.rows() * tensor.cols()];
    for (row, out) in out.chunks_exact_mut(tensor.cols()).enumerate() {
        tensor.dequantize_row(row, out).unwrap();
    }
    out
}
