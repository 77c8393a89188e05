//! Attention of the chunked graphs: scalar code.

use crate::design::xdna1::vector::{HEAD_DIM, Head, largest, rounded};

/// `e^x` by the bits of a f32: a line through the exponents. Below -12 it is 0.
fn exp(x: f32) -> f32 {
    if x < -12.0 {
        return 0.0;
    }
    f32::from_bits((12_102_203.0 * x + 1_064_866_805.0) as u32)
}

/// One query head over the positions so far, the new one last. Sums go in the order of elements and of positions; the sum
/// of the values is divided by that of the weights and rounded once. The published text says no more than *scalar* and
/// the exponential.
pub(super) fn attend(query: &Head, keys: &[Head], values: &[Head]) -> Head {
    let scores: Vec<f32> =
        keys.iter().map(|key| query.iter().zip(key).fold(0.0, |sum, (query, key)| sum + query * key) * 0.125).collect();
    let peak = largest(&scores);
    let mut total = 0.0;
    let mut out = [0.0; HEAD_DIM];
    for (score, row) in scores.iter().zip(values) {
        let weight = exp(score - peak);
        total += weight;
        out.iter_mut().zip(row).for_each(|(sum, element)| *sum += weight * element);
    }
    out.map(|sum| rounded(sum / total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_within_its_error() {
        for i in 0..=1200 {
            let x = -i as f32 / 100.0;
            let error = (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs();
            assert!(error < 0.041, "exp({x}): {error}");
        }
        assert_eq!(exp(-12.01), 0.0);
    }

    #[test]
    fn one_position_gives_its_value() {
        let value: Head = std::array::from_fn(|i| rounded(i as f32 * 0.37 - 5.0));
        assert_eq!(attend(&[1.0; HEAD_DIM], &[[0.5; HEAD_DIM]], &[value]), value);
    }
}
