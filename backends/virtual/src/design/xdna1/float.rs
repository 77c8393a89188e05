//! f32 arithmetic of cores whose multiplier takes bf16 alone: a number is the sum of three bf16 parts, products are summed
//! in an f32 accumulator.

use super::vector::rounded;

/// High, middle and low part: each the nearest bf16 of what the ones before leave.
pub(super) fn parts(x: f32) -> [f32; 3] {
    let high = rounded(x);
    let middle = rounded(x - high);
    [high, middle, rounded(x - high - middle)]
}

/// Adds the product of parts with a bf16 number to `sum`: low, middle, high.
pub(super) fn add_product(sum: f32, [high, middle, low]: [f32; 3], b: f32) -> f32 {
    sum + low * b + middle * b + high * b
}

/// Product of a number with a bf16 number.
pub(super) fn times_bf16(a: f32, b: f32) -> f32 {
    add_product(0.0, parts(a), b)
}

/// Product of two numbers.
pub(super) fn times(a: f32, b: f32) -> f32 {
    let ([a_high, a_middle, a_low], [b_high, b_middle, b_low]) = (parts(a), parts(b));
    let small = a_middle * b_middle + a_high * b_low + a_low * b_high;
    small + a_high * b_middle + a_middle * b_high + a_high * b_high
}

/// Largest magnitude of the exponential's argument.
const EXP_MAX: f32 = 80.0;
/// ln 2 in two steps; products of the first with the exponents that occur are exact.
const LN_2: [f32; 2] = [0.693_145_75, 1.428_606_8e-6];
/// 1/n! for n from 7 down to 0.
const TAYLOR: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0];

/// `e^x`, with the argument held within ±80. Which way the exponent's halves are rounded is not published: ties to even.
pub(super) fn exp(x: f32) -> f32 {
    let x = x.clamp(-EXP_MAX, EXP_MAX);
    let exponent = times(x, std::f32::consts::LOG2_E).round_ties_even();
    let rest = x - times_bf16(LN_2[0], exponent) - times_bf16(LN_2[1], exponent);
    let sum = TAYLOR[1..].iter().fold(TAYLOR[0], |sum, term| times(sum, rest) + term);
    // At most 2^±116 on a number near 1: the exponent's bits do not overflow.
    f32::from_bits(sum.to_bits().wrapping_add_signed((exponent as i32) << 23))
}

/// `1/v` for positive `v`: three Newton steps `y·(2 − v·y)`.
pub(super) fn reciprocal(v: f32) -> f32 {
    let start = f32::from_bits(0x7EF3_11C7_u32.wrapping_sub(v.to_bits()));
    (0..3).fold(start, |y, _| times(y, 2.0 - times(v, y)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance from `exact` in units of the last place of the nearest f32.
    fn ulps(found: f32, exact: f64) -> f64 {
        let near = exact as f32;
        let unit = f64::from(near.abs().next_up()) - f64::from(near.abs());
        (f64::from(found) - exact).abs() / unit
    }

    fn samples() -> impl Iterator<Item = f32> {
        (1..4000_u32).map(|i| f32::from_bits(0x3E80_0000 + i.wrapping_mul(0x9E37_79B1) % 0x0300_0000))
    }

    #[test]
    fn constants_are_the_published_ones() {
        assert_eq!(f64::from(LN_2[0]), 0.693_145_751_953_125);
        assert_eq!(LN_2[1], 1.428_606_820_309_417_2e-6_f64 as f32);
        let x = 1.234_567_9_f32;
        assert_eq!(parts(x).iter().sum::<f32>(), x);
    }

    #[test]
    fn errors_are_the_published_ones() {
        let mut numbers = samples().zip(samples().skip(7));
        let worst = numbers.by_ref().map(|(a, b)| ulps(times(a, b), f64::from(a) * f64::from(b))).fold(0.0, f64::max);
        assert!(worst <= 1.0, "product: {worst}");
        let worst = samples().map(|v| ulps(reciprocal(v), 1.0 / f64::from(v))).fold(0.0, f64::max);
        assert!(worst <= 3.0, "reciprocal: {worst}");
        let arguments = (-8000..=8000).map(|i| i as f32 / 100.0);
        let worst = arguments.map(|x| ulps(exp(x), f64::from(x).exp())).fold(0.0, f64::max);
        assert!(worst <= 4.0, "exp: {worst}");
        assert_eq!((exp(0.0), exp(-200.0), exp(200.0)), (1.0, exp(-80.0), exp(80.0)));
    }
}
