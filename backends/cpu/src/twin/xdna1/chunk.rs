//! Attention of the chunked SmolLM graphs, whose other operations are the engine's ([`super::smollm`]).
//!
//! It is scalar, so all of it is f32, one operation after the other: products of a score in the order of the head's elements, times
//! an eighth; exponentials as the bits of a straight line, added position by position; each times the inverse of their sum, times
//! the values, added position by position; one rounding. A core has no scalar arithmetic of f32, so the compiler's routines
//! round after every operation and join none.

use crate::twin::rounding::bf16;

/// Below it the exponential is zero.
const EXP_LEAST: f32 = -12.0;
/// `2^23 / ln 2`.
const EXP_SLOPE: f32 = 12_102_203.0;
/// Bits of 1, lowered so that the line runs through the curve. As f32 it is 1,064,866,816.
const EXP_OFFSET: f32 = 1_064_866_805.0;

/// Attention of one head over all positions, the new one last.
pub(super) fn attend<'c>(
    query: &[f32],
    keys: impl Iterator<Item = &'c [f32]>,
    values: impl Iterator<Item = &'c [f32]>,
    out: &mut [f32],
) {
    let score = |key: &[f32]| query.iter().zip(key).fold(0.0, |sum, (query, key)| sum + query * key) * 0.125;
    let mut weights: Vec<f32> = keys.map(score).collect();
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f32;
    for weight in &mut weights {
        *weight = exp(*weight - largest);
        sum += *weight;
    }
    let inverse = 1.0 / sum;
    out.fill(0.0);
    for (weight, row) in weights.iter().zip(values) {
        let weight = weight * inverse;
        out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
    }
    out.iter_mut().for_each(|out| *out = bf16(*out));
}

/// `e^x` of what is not above zero: a straight line between powers of two. Product and sum are rounded to f32, the bits cut.
fn exp(x: f32) -> f32 {
    if x < EXP_LEAST { 0.0 } else { f32::from_bits((EXP_SLOPE * x.min(0.0) + EXP_OFFSET) as u32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_a_line_between_powers_of_two() {
        assert_eq!([exp(0.0), exp(3.0)].map(f32::to_bits), [1_064_866_816; 2]);
        assert_eq!((exp(-12.000_001), exp(f32::NEG_INFINITY)), (0.0, 0.0));
        // The difference, 1,052,764,613, at the precision of f32 there: multiples of 64.
        assert_eq!(exp(-1.0).to_bits(), 1_052_764_608);
        for step in 0..=12_000 {
            let x = step as f32 / -1000.0;
            let relative = f64::from(exp(x)) / f64::from(x).exp() - 1.0;
            assert!((-0.0395..=0.0198).contains(&relative), "exp({x}): {relative}");
        }
        assert!(exp(f32::NAN).is_finite(), "a damaged score");
    }

    /// Against an exact softmax; the errors of the line do not cancel, so they bound the result.
    #[test]
    fn attention_is_a_softmax_within_the_error_of_its_exponential() {
        let wave = |seed: f32| move |index: usize| bf16((index as f32 * seed).sin() * 2.0);
        let query: Vec<f32> = (0..64).map(wave(0.7)).collect();
        for positions in [1, 2, 16, 33, 64] {
            let keys: Vec<f32> = (0..positions * 64).map(wave(0.31)).collect();
            let values: Vec<f32> = (0..positions * 64).map(|at| wave(0.17)(at) + 4.0).map(bf16).collect();
            let mut found = [0.0; 64];
            attend(&query, keys.chunks(64), values.chunks(64), &mut found);
            let score = |key: &[f32]| key.iter().zip(&query).map(|(k, q)| f64::from(k * q)).sum::<f64>() * 0.125;
            let scores: Vec<f64> = keys.chunks(64).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            for (index, found) in found.iter().enumerate() {
                let sum: f64 = (0..positions).map(|at| shares[at] * f64::from(values[at * 64 + index])).sum();
                let wanted = sum / shares.iter().sum::<f64>();
                // Values are above zero, so the errors of the weights (from -3.9 to 2.0 %, and a rounding) bound the sum's.
                assert!((f64::from(*found) - wanted).abs() < 0.07 * wanted, "{positions} positions: {found} {wanted}");
            }
        }
    }

    /// One position has all the weight, but for the rounding of the inverse: its values come out.
    #[test]
    fn a_single_position_is_its_values() {
        let values: Vec<f32> = (0..64).map(|at| bf16((at as f32).cos())).collect();
        let mut found = [0.0; 64];
        attend(&[1.5; 64], std::iter::once(&[0.25; 64][..]), std::iter::once(&values[..]), &mut found);
        assert_eq!(found[..], values[..]);
    }
}
