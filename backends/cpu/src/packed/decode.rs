//! Scalar reading of packed groups: the portable kernels and the embedding gather use it.

use super::{GROUP_ROWS, group_bytes};
use npuhal_core::dtype::{bf16_value, f16_value};
use npuhal_models::WeightType;

/// Input features that a decoded block spans.
pub const BLOCK: usize = 32;

/// 32 input features of a group of eight quantized rows: weight `(r, k)` is
/// `codes[r][k] × factor[k / 16][r] × scale[r] + minimum[r]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodedBlock {
    /// Centred codes.
    pub codes: [[i16; BLOCK]; GROUP_ROWS],
    /// Integer scales of K types' sub-blocks, for each half; 1 for other types.
    pub factor: [[i16; GROUP_ROWS]; 2],
    /// Scales.
    pub scale: [f32; GROUP_ROWS],
    /// Minima; zero for types without.
    pub minimum: [f32; GROUP_ROWS],
}

impl DecodedBlock {
    /// All zero.
    pub const ZERO: Self = Self {
        codes: [[0; BLOCK]; GROUP_ROWS],
        factor: [[1; GROUP_ROWS]; 2],
        scale: [0.0; GROUP_ROWS],
        minimum: [0.0; GROUP_ROWS],
    };
}

/// Whether weights of this type have a minimum term.
#[must_use]
pub const fn has_minimum(weight_type: WeightType) -> bool {
    matches!(weight_type, WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K)
}

/// Whether products of this type take inputs of 8 bits where these are asked for. Weights of 8 bits do not: input codes of
/// 16 bits cost them nothing.
#[must_use]
pub const fn takes_bytes(weight_type: WeightType) -> bool {
    is_quantized(weight_type) && !matches!(weight_type, WeightType::Q8_0)
}

/// Whether the sum over 32 codes times 8-bit inputs is kept in two halves: their scales differ, or the whole does not fit 16
/// bits.
#[must_use]
pub const fn sums_halves(weight_type: WeightType) -> bool {
    matches!(weight_type, WeightType::Q5_1 | WeightType::Q5K | WeightType::Q6K)
}

/// Whether the type stores codes with scales, as opposed to plain floats.
#[must_use]
pub const fn is_quantized(weight_type: WeightType) -> bool {
    !matches!(weight_type, WeightType::F32 | WeightType::F16 | WeightType::Bf16)
}

/// Decodes block `block` (32 input features) of a group of a quantized type.
pub fn block(weight_type: WeightType, group: &[u8], block: usize, out: &mut DecodedBlock) {
    /// The loop over lanes inside the choice of type.
    macro_rules! lanes {
        ($($of:ident)+) => {
            match weight_type {
                $(WeightType::$of => {
                    for lane in 0..GROUP_ROWS {
                        lane_of_block(WeightType::$of, group, block, lane, out);
                    }
                })+
                _ => *out = DecodedBlock::ZERO,
            }
        };
    }
    lanes!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K);
}

/// Row `lane` of a group as f32.
pub fn row(weight_type: WeightType, group: &[u8], lane: usize, out: &mut [f32]) {
    match weight_type {
        WeightType::F32 => {
            for (k, out) in out.iter_mut().enumerate() {
                *out = f32::from_bits(word(group, 32 * k, lane));
            }
        }
        WeightType::F16 => {
            for (k, out) in out.iter_mut().enumerate() {
                *out = f16_value(half_bits(group, 16 * k, lane));
            }
        }
        WeightType::Bf16 => {
            for (k, out) in out.iter_mut().enumerate() {
                *out = bf16_value(half_bits(group, 16 * k, lane));
            }
        }
        _ => {
            let mut decoded = DecodedBlock::ZERO;
            for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                lane_of_block(weight_type, group, index, lane, &mut decoded);
                for (half, out) in out.chunks_exact_mut(BLOCK / 2).enumerate() {
                    let codes = &decoded.codes[lane][BLOCK / 2 * half..];
                    for (out, code) in out.iter_mut().zip(codes) {
                        let code = f32::from(code * decoded.factor[half][lane]);
                        *out = code * decoded.scale[lane] + decoded.minimum[lane];
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn lane_of_block(weight_type: WeightType, group: &[u8], block: usize, lane: usize, out: &mut DecodedBlock) {
    let per_block = if weight_type.block_len() == 256 { 8 } else { 1 };
    let bytes = group_bytes(weight_type, weight_type.block_len());
    let src = &group[block / per_block * bytes..(block / per_block + 1) * bytes];
    let sub = block % per_block;
    out.scale[lane] = f16_value(half_bits(src, 0, lane));
    out.minimum[lane] = 0.0;
    let codes = &mut out.codes[lane];
    match weight_type {
        WeightType::Q4_0 => store(codes, &nibbles(src, 16, lane), 8),
        WeightType::Q4_1 => {
            out.minimum[lane] = f16_value(half_bits(src, 16, lane));
            store(codes, &nibbles(src, 32, lane), 0);
        }
        WeightType::Q5_0 => store(codes, &words5(src, 16, lane), 16),
        WeightType::Q5_1 => {
            out.minimum[lane] = f16_value(half_bits(src, 16, lane));
            store(codes, &words5(src, 32, lane), 0);
        }
        WeightType::Q8_0 => {
            for (k, code) in codes.iter_mut().enumerate() {
                *code = i16::from(src[16 + 32 * (k / 4) + 4 * lane + k % 4].cast_signed());
            }
        }
        WeightType::Q4K | WeightType::Q5K => {
            out.minimum[lane] = -f16_value(half_bits(src, 16, lane)) * f32::from(src[96 + 8 * sub + lane]);
            let scale = i16::from(src[32 + 8 * sub + lane]);
            out.factor.iter_mut().for_each(|factor| factor[lane] = scale);
            store(codes, &words_k(src, sub, lane, weight_type == WeightType::Q5K), 0);
        }
        WeightType::Q6K => {
            for part in 0..2 {
                let sub = 2 * sub + part;
                out.factor[part][lane] = i16::from(src[16 + 8 * sub + lane].cast_signed());
                let words = words6(src, 144 + 96 * sub, lane);
                for (k, code) in codes[16 * part..16 * part + 16].iter_mut().enumerate() {
                    *code = i16::from(words[k / 4].to_le_bytes()[k % 4]) - 32;
                }
            }
        }
        _ => *codes = [0; BLOCK],
    }
}

#[inline(always)]
fn store(codes: &mut [i16; BLOCK], words: &[u32; 8], centre: i16) {
    for (codes, word) in codes.chunks_exact_mut(4).zip(words) {
        for (code, byte) in codes.iter_mut().zip(word.to_le_bytes()) {
            *code = i16::from(byte) - centre;
        }
    }
}

#[inline(always)]
fn word(src: &[u8], plane: usize, lane: usize) -> u32 {
    let at = plane + 4 * lane;
    u32::from_le_bytes([src[at], src[at + 1], src[at + 2], src[at + 3]])
}

#[inline(always)]
fn half_bits(src: &[u8], at: usize, lane: usize) -> u16 {
    u16::from_le_bytes([src[at + 2 * lane], src[at + 2 * lane + 1]])
}

#[inline(always)]
fn nibbles(src: &[u8], at: usize, lane: usize) -> [u32; 8] {
    let mut words = [0; 8];
    for j in 0..4 {
        let codes = word(src, at + 32 * j, lane);
        words[j] = codes & 0x0F0F_0F0F;
        words[j + 4] = (codes >> 4) & 0x0F0F_0F0F;
    }
    words
}

#[inline(always)]
fn words5(src: &[u8], at: usize, lane: usize) -> [u32; 8] {
    const BIT: u32 = 0x0101_0101;
    let plane = |index: usize| word(src, at + 32 * index, lane);
    let p = [plane(0), plane(1), plane(2), plane(3), plane(4)];
    let low = |word: u32| word & 0x1F1F_1F1F;
    let top3 = |word: u32| (word >> 5) & (7 * BIT);
    [
        low(p[0]),
        low(p[1]),
        low(p[2]),
        low(p[3]),
        low(p[4]),
        top3(p[0]) | (p[1] >> 3) & (0x18 * BIT),
        top3(p[2]) | (p[3] >> 3) & (0x18 * BIT),
        top3(p[4]) | (p[1] >> 2) & (8 * BIT) | (p[3] >> 1) & (16 * BIT),
    ]
}

#[inline(always)]
fn words_k(src: &[u8], sub: usize, lane: usize, fifth_bits: bool) -> [u32; 8] {
    let (c, high) = (sub / 2, sub % 2);
    let bits = if fifth_bits { word(src, 1184 + 64 * c + 32 * high, lane) } else { 0 };
    let mut words = [0; 8];
    for (j, out) in words.iter_mut().enumerate() {
        let nibbles = (word(src, 160 + 256 * c + 32 * j, lane) >> (4 * high)) & 0x0F0F_0F0F;
        *out = nibbles | ((bits >> j) & 0x0101_0101) << 4;
    }
    words
}

#[inline(always)]
fn words6(src: &[u8], at: usize, lane: usize) -> [u32; 4] {
    let plane = |index: usize| word(src, at + 32 * index, lane);
    let p = [plane(0), plane(1), plane(2)];
    let low = |word: u32| word & 0x3F3F_3F3F;
    let last = (p[0] >> 2) & 0x3030_3030 | (p[1] >> 4) & 0x0C0C_0C0C | (p[2] >> 6) & 0x0303_0303;
    [low(p[0]), low(p[1]), low(p[2]), last]
}
