//! The Qwen engine's vector arithmetic: f32 built from bf16 products, rounded to bf16 at named points only.
//!
//! A core multiplies bf16 alone, so an f32 factor is split into three bf16 parts and the parts' products are accumulated in f32
//! in a fixed order. Sums, comparisons and the scalar square root are plain f32. What the description leaves open (lanes in which
//! exponentials are summed, products that share an accumulator) is as in the public kernels `qwen_engine_hub_bf16.cc` and
//! `fp32_emulation.h`.

use super::smollm::{WEIGHT_LANES, rsqrt};
use crate::twin::lanes::{dot, reduce};
use crate::twin::rounding::{bf16, split};

/// Epsilon of every norm, compiled into the design.
const EPS: f32 = 1e-6;
/// Largest magnitude of the exponential's argument.
const EXP_LIMIT: f32 = 80.0;
/// `ln 2` as a short number and what is left of it.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;
/// `1 / n!` for n = 7 to 0.
const TAYLOR: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// f32 times bf16.
#[inline]
fn scale(a: f32, b: f32) -> f32 {
    let [high, middle, low] = split(a);
    low * b + middle * b + high * b
}

/// f32 times f32.
#[inline]
fn multiply(a: f32, b: f32) -> f32 {
    let ([a_high, a_middle, a_low], [b_high, b_middle, b_low]) = (split(a), split(b));
    a_middle * b_middle + a_high * b_low + a_low * b_high + a_high * b_middle + a_middle * b_high + a_high * b_high
}

/// RMSNorm, also the final one: one rounding.
pub(super) fn norm(x: &[f32], gamma: &[f32], out: &mut [f32]) {
    let inverse = rsqrt(dot(x, x) / x.len() as f32 + EPS, 3);
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = bf16(scale(scale(inverse, *x), bf16(*gamma)));
    }
}

/// Rotation with cosines and sines in full precision.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
        let (a, b) = (*low, *high);
        *low = bf16(turn(*cos, a, *sin, -b));
        *high = bf16(turn(*sin, a, *cos, b));
    }
}

/// `x·a + y·b`, each product in an accumulator of its own.
fn turn(x: f32, a: f32, y: f32, b: f32) -> f32 {
    scale(x, a) + scale(y, b)
}

/// Attention of one head over all positions, the new one last.
pub(super) fn attend<'c>(
    query: &[f32],
    keys: impl Iterator<Item = &'c [f32]>,
    values: impl Iterator<Item = &'c [f32]>,
    out: &mut [f32],
) {
    let mut weights: Vec<f32> = keys.map(|key| dot(query, key) * 0.125).collect();
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut lanes = [0.0f32; WEIGHT_LANES];
    for run in weights.chunks_mut(WEIGHT_LANES) {
        for (weight, lane) in run.iter_mut().zip(&mut lanes) {
            *weight = exp(*weight - largest);
            *lane += *weight;
        }
    }
    let inverse = reciprocal(reduce(lanes));
    out.fill(0.0);
    for (weight, row) in weights.iter().zip(values) {
        let [high, middle, low] = split(multiply(*weight, inverse));
        for (out, value) in out.iter_mut().zip(row) {
            *out = *out + low * value + middle * value + high * value;
        }
    }
    out.iter_mut().for_each(|out| *out = bf16(*out));
}

/// SiLU times up, one rounding.
pub(super) fn swiglu(gate: f32, up: f32) -> f32 {
    let sigmoid = reciprocal(1.0 + exp(-gate));
    bf16(scale(scale(sigmoid, gate), up))
}

/// `e^x`, the argument held within ±80.
fn exp(x: f32) -> f32 {
    let x = x.clamp(-EXP_LIMIT, EXP_LIMIT);
    let k = multiply(x, std::f32::consts::LOG2_E).round_ties_even();
    let rest = x - scale(LN_2_HIGH, k) - scale(LN_2_LOW, k);
    let series = TAYLOR[1..].iter().fold(TAYLOR[0], |sum, term| multiply(sum, rest) + term);
    // A NaN (a damaged score) has no exponent to raise and stays one.
    f32::from_bits(series.to_bits().wrapping_add(((k as i32) << 23).cast_unsigned()))
}

/// `1 / v` for a positive number: the subtracted bits as a start, then three Newton steps.
fn reciprocal(v: f32) -> f32 {
    let start = f32::from_bits(0x7ef3_11c7_u32.wrapping_sub(v.to_bits()));
    (0..3).fold(start, |y, _| multiply(y, 2.0 - multiply(v, y)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(found: f32, wanted: f64) -> f64 {
        let wanted32 = wanted as f32;
        let step = f64::from(f32::from_bits(wanted32.abs().to_bits() + 1)) - f64::from(wanted32.abs());
        (f64::from(found) - wanted).abs() / step
    }

    /// The errors published for the design: products 1 ulp, exponential 4, reciprocal 3.
    #[test]
    fn f32_arithmetic_is_as_good_as_published() {
        let mut worst = [0.0f64; 4];
        for step in 0..40_000 {
            let x = (step as f32 * 0.618_034).fract() * 2.0 + 0.5;
            let y = (step as f32 * 0.414_214).fract() * 3.0 - 1.5;
            worst[0] = worst[0].max(ulps(multiply(x, y), f64::from(x) * f64::from(y)));
            worst[1] = worst[1].max(ulps(scale(x, bf16(y)), f64::from(x) * f64::from(bf16(y))));
            let argument = (y - 0.5) * 30.0;
            worst[2] = worst[2].max(ulps(exp(argument), f64::from(argument).exp()));
            let divisor = x * 32.0;
            worst[3] = worst[3].max(ulps(reciprocal(divisor), 1.0 / f64::from(divisor)));
        }
        assert!(worst[0] <= 1.5 && worst[1] <= 1.5 && worst[2] <= 4.0 && worst[3] <= 3.0, "{worst:?}");
    }

    #[test]
    fn extremes_stay_finite() {
        assert!(exp(-1e30) > 0.0 && exp(-1e30) < 1e-34);
        assert_eq!(exp(0.0), 1.0);
        for gate in [-300.0f32, -80.0, 0.0, 80.0, 300.0] {
            let wanted = gate / (1.0 + (-gate.clamp(-80.0, 80.0)).exp());
            assert!((swiglu(gate, 1.0) - wanted).abs() <= 0.004 * wanted.abs(), "{gate}: {}", swiglu(gate, 1.0));
        }
        assert!(exp(f32::NAN).is_nan());
    }
}
