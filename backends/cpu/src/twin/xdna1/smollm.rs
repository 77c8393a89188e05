//! The SmolLM engine's vector arithmetic: f32 accumulators over bf16 products, lookup tables for exponential, reciprocal and
//! tanh.
//!
//! Three things the published design leaves to the core are fixed here: conversions to bf16 round half to even, the fixed-point
//! argument of the exponential is rounded down (as silicon was observed to do) and held within its 16 bits, and the sum of the weights runs in 16 lanes.

use super::tables::{EXP_FRACTION, EXP_WHOLE, RECIPROCAL_MANTISSA, TANH_SEGMENTS};
use crate::twin::lanes::{dot, reduce};
use crate::twin::rounding::{bf16, value};

/// Epsilon of every norm, compiled into the design.
const EPS: f32 = 1e-5;
/// Lanes of the weights' sum.
pub(super) const WEIGHT_LANES: usize = 16;

/// RMSNorm of a layer: three roundings, of the inverse, the scaled element, and the product with gamma.
pub(super) fn norm(x: &[f32], gamma: &[f32], out: &mut [f32]) {
    let mean = dot(x, x) * (1.0 / x.len() as f64) as f32;
    let inverse = bf16(rsqrt(mean + EPS, 2));
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = bf16(bf16(x * inverse) * bf16(*gamma));
    }
}

/// The final RMSNorm: a sequential sum and one rounding.
pub(super) fn final_norm(x: &[f32], gamma: &[f32], out: &mut [f32]) {
    let sum = x.iter().fold(0.0f32, |sum, x| sum + x * x);
    let inverse = rsqrt(sum / x.len() as f32 + EPS, 2);
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = bf16(x * inverse * bf16(*gamma));
    }
}

/// `1 / sqrt(v)`: the shifted bits as a start, then Newton's steps.
pub(super) fn rsqrt(v: f32, steps: usize) -> f32 {
    let start = f32::from_bits(0x5f37_59df_u32.wrapping_sub(v.to_bits() >> 1));
    (0..steps).fold(start, |y, _| y * (1.5 - 0.5 * v * y * y))
}

/// Rotation with bf16 cosines and sines.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
        let (cos, sin, a, b) = (bf16(*cos), bf16(*sin), *low, *high);
        *low = bf16(a * cos - b * sin);
        *high = bf16(a * sin + b * cos);
    }
}

/// Attention of one head over all positions, the new one last.
pub(super) fn attend<'c>(
    query: &[f32],
    keys: impl Iterator<Item = &'c [f32]>,
    values: impl Iterator<Item = &'c [f32]>,
    out: &mut [f32],
) {
    let scores: Vec<f32> = keys.map(|key| dot(query, key)).collect();
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights: Vec<f32> = scores.iter().map(|score| bf16(exp(bf16(bf16(score - largest) * 0.125)))).collect();
    let mut lanes = [0.0f32; WEIGHT_LANES];
    for run in weights.chunks(WEIGHT_LANES) {
        run.iter().zip(&mut lanes).for_each(|(weight, lane)| *lane += weight);
    }
    let inverse = reciprocal(reduce(lanes));
    weights.iter_mut().for_each(|weight| *weight = bf16(*weight * inverse));
    out.fill(0.0);
    for (weight, row) in weights.iter().zip(values) {
        out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
    }
    out.iter_mut().for_each(|out| *out = bf16(*out));
}

/// SiLU by half a tanh, times up: `a(g) = g · (tanh(g/2) + 1) / 2`.
pub(super) fn swiglu(gate: f32, up: f32) -> f32 {
    let sigmoid = bf16((tanh(bf16(0.5 * gate)) + 1.0) * 0.5);
    bf16(bf16(gate * sigmoid) * up)
}

/// `e^x` by a table of whole parts and one of fractions of 1/256: the f32 product of their entries.
fn exp(x: f32) -> f32 {
    exp_of_fixed(fixed_point(x, 256.0))
}

/// The same of a fixed-point argument with eight fraction bits.
pub(super) fn exp_of_fixed(fixed: i16) -> f32 {
    let (whole, fraction) = ((fixed >> 8) as u8, (fixed & 0xff) as usize);
    value(EXP_WHOLE[usize::from(whole)]) * value(EXP_FRACTION[fraction])
}

/// `x` in units of `1 / scale`, rounded down as the core's conversion does. Saturates; a NaN (a damaged score) becomes 0.
pub(super) fn fixed_point(x: f32, scale: f32) -> i16 {
    (x * scale).floor() as i16
}

/// `1 / x` as bf16, by the mantissa of `x` rounded half up.
pub(super) fn reciprocal(x: f32) -> f32 {
    let rounded = x.to_bits().wrapping_add(0x8000);
    let (exponent, mantissa) = ((rounded >> 23) & 0xff, (rounded >> 16) & 0x7f);
    let raised = 253u32.wrapping_sub(exponent).wrapping_add(u32::from(mantissa == 0));
    value(((raised << 7) as u16).wrapping_add(RECIPROCAL_MANTISSA[mantissa as usize]))
}

/// tanh, rounded.
fn tanh(x: f32) -> f32 {
    bf16(tanh_line(x))
}

/// tanh on 32 straight segments; the outermost hold beyond ±4.
pub(super) fn tanh_line(x: f32) -> f32 {
    let segment = ((x * 4.0).floor() as i32).saturating_add(16).clamp(0, 31);
    let (slope, offset) = TANH_SEGMENTS[segment as usize];
    x * value(slope) + value(offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::twin::rounding::bits;

    /// The tables follow their rules, and the functions what they stand for.
    #[test]
    fn the_tables_are_what_they_claim() {
        for n in -128i32..128 {
            let wanted = if n > 88 { 0x7ef9 } else { bits(f64::from(n).exp() as f32) };
            assert_eq!(EXP_WHOLE[n as u8 as usize], wanted, "e^{n}");
        }
        for (k, entry) in EXP_FRACTION.iter().enumerate() {
            assert_eq!(*entry, bits((k as f64 / 256.0).exp() as f32), "e^({k}/256)");
        }
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/data/xdna1/aie2_luts.json")).unwrap();
        let mantissa: Vec<u16> = serde_json::from_value(golden["inv_mantissa"].clone()).unwrap();
        assert_eq!(mantissa, RECIPROCAL_MANTISSA);
        for (segment, (slope, offset)) in golden["tanh_segments"].as_array().unwrap().iter().zip(TANH_SEGMENTS) {
            let number = |key: &str| segment[key].as_f64().unwrap() as f32;
            assert_eq!((value(slope), value(offset)), (number("slope"), number("offset")));
        }
    }

    /// Below one, where the published design does not say how the core rounds.
    #[test]
    fn fixed_point_rounds_as_silicon_does() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/data/xdna1/vec_vfloor_bf16_denorm.json")).unwrap();
        let input: Vec<u16> = serde_json::from_value(golden["input"].clone()).unwrap();
        let silicon: Vec<i16> = serde_json::from_value(golden["silicon"].clone()).unwrap();
        assert_eq!((input.len(), silicon.len()), (256, 256));
        for (input, silicon) in input.into_iter().zip(silicon) {
            assert_eq!(fixed_point(value(input), 1.0), silicon, "{input:#x}");
        }
        assert_eq!([-0.004, 0.004, -300.0, 300.0].map(|x| fixed_point(x, 256.0)), [-2, 1, i16::MIN, i16::MAX]);
    }

    #[test]
    fn functions_are_near_what_they_stand_for() {
        for step in -2000..=2000 {
            let x = step as f32 / 100.0;
            if x <= 0.0 {
                let (found, wanted) = (exp(bf16(x)), f64::from(bf16(x)).exp() as f32);
                assert!((found - wanted).abs() <= 0.012 * wanted, "exp({x}): {found} {wanted}");
            }
            assert!((tanh(bf16(x)) - bf16(x).tanh()).abs() < 0.02, "tanh({x})");
            let silu = x / (1.0 + (-x).exp());
            assert!((swiglu(bf16(x), 1.0) - silu).abs() < 0.03 + 0.02 * silu.abs(), "silu({x})");
        }
        for step in 1..6400 {
            let x = step as f32 / 100.0;
            assert!((reciprocal(x) * x - 1.0).abs() < 0.012, "1/{x}: {}", reciprocal(x));
            assert!((rsqrt(x, 2) * x.sqrt() - 1.0).abs() < 1e-5, "rsqrt({x})");
        }
        assert_eq!((reciprocal(1.0), reciprocal(64.0), reciprocal(0.5)), (1.0, 1.0 / 64.0, 2.0));
        assert_eq!(exp(-1e30), 0.0, "held within the table");
        assert!(exp(f32::NAN).is_finite(), "no index beyond the tables");
    }
}
