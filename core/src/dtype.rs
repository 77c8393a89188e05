//! Scalar types that cross a device border, and their rounding.
//!
//! All narrowing is round to nearest, ties to even, which is what the published AIE reference code does in integer
//! arithmetic: `(u + 0x7FFF + ((u >> 16) & 1)) >> 16`.

use std::fmt;

/// Element type of a device buffer or hidden vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// Upper half of binary32.
    Bf16,
    /// Signed byte.
    I8,
    /// Unsigned byte.
    U8,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 | Self::U8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
        })
    }
}

/// Bits of `x` as bf16, round to nearest even. A NaN stays a NaN (its quiet bit is set), infinities stay.
#[inline]
#[must_use]
pub const fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        return ((bits >> 16) as u16) | 0x0040;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Value of bf16 `bits`; exact.
#[inline]
#[must_use]
pub const fn bf16_value(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `x` rounded to the nearest bf16 value, ties to even.
#[inline]
#[must_use]
pub const fn round_bf16(x: f32) -> f32 {
    bf16_value(bf16_bits(x))
}

/// Bits of `x` as f16, round to nearest even.
#[inline]
#[must_use]
pub fn f16_bits(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

/// Value of f16 `bits`; exact.
#[inline]
#[must_use]
pub fn f16_value(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_keeps_special_values() {
        assert!(bf16_value(bf16_bits(f32::NAN)).is_nan());
        assert!(bf16_value(bf16_bits(f32::from_bits(0x7F80_0001))).is_nan());
        assert_eq!(bf16_bits(f32::INFINITY), 0x7F80);
        assert_eq!(bf16_bits(f32::NEG_INFINITY), 0xFF80);
        assert_eq!(bf16_bits(-0.0), 0x8000);
        assert_eq!(bf16_bits(f32::MAX), 0x7F80, "rounds up to infinity");
    }

    #[test]
    fn bf16_agrees_with_the_half_crate_on_every_upper_half() {
        for upper in 0..=u16::MAX {
            for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits((u32::from(upper) << 16) | low);
                if x.is_nan() {
                    assert!(bf16_value(bf16_bits(x)).is_nan());
                } else {
                    assert_eq!(bf16_bits(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
                }
            }
        }
    }
}
