//! Functions that the cores look up in tables.

use super::tables::{EXP_FRACTION, EXP_INTEGER, RECIPROCAL_MANTISSA, TANH};
use super::vector::{rounded, value};

/// bf16 to fixed point with `fraction_bits`, towards minus infinity as the core's instruction does (denormals included:
/// the negative ones become -1), saturated at 32 bits. A NaN becomes 0, which is this model's choice.
fn fixed_point(x: f32, fraction_bits: i32) -> i32 {
    // A power of two changes no mantissa; denormals of bf16 are normal in f64.
    (f64::from(x) * f64::from(fraction_bits).exp2()).floor() as i32
}

/// `e^x` as the product of two table entries, f32. The index is the lower half of the fixed-point number, as the lookup
/// truncates it: beyond ±128 it wraps.
pub(super) fn exp(x: f32) -> f32 {
    let [fraction, integer] = (fixed_point(x, 8) as u16).to_le_bytes();
    value(EXP_INTEGER[usize::from(integer)]) * value(EXP_FRACTION[usize::from(fraction)])
}

/// `1/x` for positive normal `x`, bf16.
pub(super) fn reciprocal(x: f32) -> f32 {
    let bits = x.to_bits().wrapping_add(0x8000);
    let (exponent, mantissa) = (bits >> 23 & 0xFF, bits >> 16 & 0x7F);
    let entry = u32::from(RECIPROCAL_MANTISSA[mantissa as usize]);
    let exponent = 253_u32.wrapping_sub(exponent).wrapping_add(u32::from(mantissa == 0));
    value((exponent << 7).wrapping_add(entry) as u16)
}

/// `tanh x` by segments, one rounding to bf16.
pub(super) fn tanh(x: f32) -> f32 {
    let segment = fixed_point(x, 2).saturating_add(16).clamp(0, TANH.len() as i32 - 1);
    let (slope, offset) = TANH[segment as usize];
    rounded(value(slope) * x + value(offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::design::xdna1::vector::narrow;

    #[test]
    fn exponential_tables_follow_their_rule() {
        for n in -128..=88 {
            // The nearest bf16 of e^n, subnormals kept; f64 first, since f32 may round twice.
            let wanted = narrow((f64::from(n)).exp() as f32);
            assert_eq!(EXP_INTEGER[(n as i8) as u8 as usize], wanted, "e^{n}");
        }
        assert!(EXP_INTEGER[89..128].iter().all(|entry| *entry == 0x7EF9));
        for k in 0..256u16 {
            assert_eq!(EXP_FRACTION[usize::from(k)], narrow((f64::from(k) / 256.0).exp() as f32), "e^({k}/256)");
        }
    }

    #[test]
    fn fixed_point_goes_down() {
        for (x, bits, wanted) in [(0.999, 0, 0), (-0.001, 0, -1), (-1.0, 8, -256), (-0.3, 8, -77), (3.99, 2, 15)] {
            assert_eq!(fixed_point(x, bits), wanted, "{x}");
        }
        // Observed on a Phoenix core: negative denormals of bf16 are floored to -1, positive ones to 0.
        for bits in 1..128u16 {
            assert_eq!((fixed_point(value(bits), 0), fixed_point(value(bits | 0x8000), 0)), (0, -1));
        }
        assert_eq!(fixed_point(f32::NAN, 8), 0);
        assert_eq!(fixed_point(f32::NEG_INFINITY, 8), i32::MIN);
    }

    #[test]
    fn lookups_are_as_good_as_their_tables() {
        assert_eq!((exp(0.0), reciprocal(1.0), reciprocal(2.0), tanh(0.0)), (1.0, 1.0, 0.5, 0.0));
        for i in 0..4000 {
            let x = -f64::from(i) / 400.0;
            let of = rounded(x as f32);
            // Two roundings of entries and the fraction that is cut off: 2^-8 each.
            let error = (f64::from(exp(of)) / f64::from(of).exp() - 1.0).abs();
            assert!(error < 0.0118, "exp({of}): {error}");
            let v = 1.0 + i as f32 / 60.0;
            let error = (f64::from(reciprocal(v)) * f64::from(v) - 1.0).abs();
            assert!(error < 0.0079, "1/{v}: {error}");
            let error = (f64::from(tanh(of)) - f64::from(of).tanh()).abs();
            assert!(error < 0.011, "tanh({of}): {error}");
        }
        assert_eq!((tanh(9.0), tanh(-9.0), tanh(-4.1)), (1.0, -1.0, -1.0));
    }
}
