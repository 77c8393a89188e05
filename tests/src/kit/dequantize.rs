//! Weight blocks as f64, straight from the published block definitions of GGUF.

use crate::kit::gguf::block;
use npuhal_models::WeightType;

/// The elements of a row stored as `bytes`.
///
/// # Panics
/// When `bytes` is no whole number of blocks.
#[must_use]
pub fn row(weight_type: WeightType, bytes: &[u8]) -> Vec<f64> {
    let (block_len, block_bytes) = block(weight_type);
    assert!(bytes.len().is_multiple_of(block_bytes), "{} bytes of {weight_type}", bytes.len());
    let mut out = vec![0.0; bytes.len() / block_bytes * block_len];
    for (block, values) in bytes.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block_len)) {
        one(weight_type, block, values);
    }
    out
}

/// Value of IEEE binary16 `bits`.
#[must_use]
pub fn f16(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits >> 10) & 31);
    let fraction = f64::from(bits & 1023);
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    }
}

/// Bits of the binary16 nearest to `x`, ties to even. `x` is below the largest binary16.
#[must_use]
pub fn f16_bits(x: f64) -> u16 {
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let x = x.abs();
    let exponent = if x < 2f64.powi(-14) { -14 } else { x.log2().floor() as i32 };
    // In units of the last place; a carry moves into the exponent by itself.
    let units = (x * 2f64.powi(10 - exponent)).round_ties_even() as i32;
    sign | (units + ((exponent + 14) << 10)) as u16
}

fn one(weight_type: WeightType, b: &[u8], y: &mut [f64]) {
    match weight_type {
        WeightType::F32 => y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into(),
        WeightType::F16 => y[0] = half(b, 0),
        WeightType::Bf16 => y[0] = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16).into(),
        WeightType::Q4_0 => (0..32).for_each(|i| y[i] = half(b, 0) * (nibble(&b[2..], i) - 8.0)),
        WeightType::Q4_1 => (0..32).for_each(|i| y[i] = half(b, 0) * nibble(&b[4..], i) + half(b, 2)),
        WeightType::Q5_0 => (0..32).for_each(|i| y[i] = half(b, 0) * (nibble(&b[6..], i) + fifth(&b[2..], i) - 16.0)),
        WeightType::Q5_1 => {
            (0..32).for_each(|i| y[i] = half(b, 0) * (nibble(&b[8..], i) + fifth(&b[4..], i)) + half(b, 2))
        }
        WeightType::Q8_0 => (0..32).for_each(|i| y[i] = half(b, 0) * f64::from(b[2 + i] as i8)),
        WeightType::Q4K => (0..256).for_each(|i| {
            let (scale, minimum) = scale_and_minimum(&b[4..16], i / 32);
            y[i] = half(b, 0) * scale * long_nibble(&b[16..], i) - half(b, 2) * minimum;
        }),
        WeightType::Q5K => (0..256).for_each(|i| {
            let (scale, minimum) = scale_and_minimum(&b[4..16], i / 32);
            let high = f64::from((b[16 + i % 32] >> (i / 32)) & 1) * 16.0;
            y[i] = half(b, 0) * scale * (long_nibble(&b[48..], i) + high) - half(b, 2) * minimum;
        }),
        WeightType::Q6K => (0..256).for_each(|i| {
            // Each half of 128 has 64 bytes of low nibbles and 32 bytes of upper pairs.
            let (part, at) = (i / 128, i % 128);
            let low = (b[64 * part + at % 64] >> (4 * (at / 64))) & 15;
            let high = (b[128 + 32 * part + at % 32] >> (2 * (at / 32))) & 3;
            let scale = f64::from(b[192 + i / 16] as i8);
            y[i] = half(b, 208) * scale * (f64::from(low | (high << 4)) - 32.0);
        }),
        WeightType::Q2K => (0..256).for_each(|i| {
            let code = (b[16 + 32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32))) & 3;
            let both = b[i / 16];
            y[i] = half(b, 80) * f64::from(both & 15) * f64::from(code) - half(b, 82) * f64::from(both >> 4);
        }),
        WeightType::Q3K => (0..256).for_each(|i| {
            let low = (b[32 + 32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32))) & 3;
            let is_high = (b[i % 32] >> (i / 32)) & 1 == 1;
            let sub = i / 16;
            let bits = (b[96 + sub % 8] >> (4 * (sub / 8))) & 15 | ((b[104 + sub % 4] >> (2 * (sub / 4))) & 3) << 4;
            let code = f64::from(low) - if is_high { 0.0 } else { 4.0 };
            y[i] = half(b, 108) * (f64::from(bits) - 32.0) * code;
        }),
        WeightType::Iq4Nl => (0..32).for_each(|i| y[i] = half(b, 0) * IQ4[nibble(&b[2..], i) as usize]),
        WeightType::Iq4Xs => (0..256).for_each(|i| {
            let sub = i / 32;
            let high = (u16::from_le_bytes([b[2], b[3]]) >> (2 * sub)) & 3;
            let low = (b[4 + sub / 2] >> (4 * (sub % 2))) & 15;
            let scale = f64::from(u16::from(low) | high << 4) - 32.0;
            y[i] = half(b, 0) * scale * IQ4[nibble(&b[8 + 16 * sub..], i % 32) as usize];
        }),
        WeightType::Mxfp4 => (0..32).for_each(|i| {
            // OCP E2M1: a sign, two bits of exponent, one of mantissa.
            let code = nibble(&b[1..], i) as u8;
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f64::from(code & 1));
            let size = if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f64.powi(exponent - 1) };
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            y[i] = sign * size * 2f64.powi(i32::from(b[0]) - 127);
        }),
        other => panic!("{other} is not known to the reference"),
    }
}

/// The values of IQ4_NL's codes.
const IQ4: [f64; 16] = [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

fn half(bytes: &[u8], at: usize) -> f64 {
    f16(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// Code `i` of a block of 32: the lower halves of the bytes first, then the upper ones.
fn nibble(codes: &[u8], i: usize) -> f64 {
    f64::from((codes[i % 16] >> (4 * (i / 16))) & 15)
}

fn fifth(bits: &[u8], i: usize) -> f64 {
    f64::from((bits[i / 8] >> (i % 8)) & 1) * 16.0
}

/// Code `i` of a block of 256: 32 bytes hold two sub-blocks, the lower halves of the bytes the first.
fn long_nibble(codes: &[u8], i: usize) -> f64 {
    f64::from((codes[32 * (i / 64) + i % 32] >> (4 * (i / 32 % 2))) & 15)
}

/// The 6-bit scale and minimum of sub-block `sub`, packed in 12 bytes.
fn scale_and_minimum(packed: &[u8], sub: usize) -> (f64, f64) {
    let (scale, minimum) = if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let shared = packed[sub + 4];
        ((shared & 15) | (packed[sub - 4] >> 6 << 4), (shared >> 4) | (packed[sub] >> 6 << 4))
    };
    (scale.into(), minimum.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_exact() {
        for bits in 0..0x7C00u16 {
            assert_eq!(f16_bits(f16(bits)), bits);
            assert_eq!(f16_bits(-f16(bits)), bits | 0x8000);
        }
        assert_eq!((f16(0x3C00), f16(0x0001), f16(0xC000)), (1.0, 2f64.powi(-24), -2.0));
        assert_eq!(f16_bits(1.0 + 2f64.powi(-11)), 0x3C00, "ties to even");
        assert!(f16(0x7C00).is_infinite() && f16(0x7E00).is_nan());
    }

    #[test]
    fn six_bit_scales_are_unpacked() {
        let mut packed = [0u8; 12];
        packed[1] = 0b1100_0101;
        packed[5] = 0b0100_0111;
        packed[9] = 0b1010_0011;
        assert_eq!(scale_and_minimum(&packed, 1), (5.0, 7.0));
        assert_eq!(scale_and_minimum(&packed, 5), (f64::from(0b11_0011), f64::from(0b01_1010)));
    }
}
