//! Arithmetic of SmolLM's cores.

use super::lookup::{exp, reciprocal, tanh};
use super::shape::{Model, SMOLLM, Shape, Tables};
use super::vector::{
    HEAD_DIM, Head, LANES, dot_heads, largest, narrow, reciprocal_root, reduce, rotate, rounded, sum_of_squares,
};

/// Scores of a softmax vector.
const SCORES: usize = 16;
const EPSILON: f32 = 1e-5;

/// The SmolLM family.
#[derive(Debug)]
pub(super) struct SmolLm;

impl Model for SmolLm {
    const SHAPE: Shape = SMOLLM;
    /// Cosines, sines, position.
    const TABLES: Tables = Tables { elements: 80, position: 64, embedding: 128 };

    fn norm(residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        let mean = sum_of_squares(residual) * 0.001_736_111_1;
        let factor = rounded(reciprocal_root(mean + EPSILON, 2));
        residual.iter().zip(gamma).map(|(x, gamma)| rounded(rounded(x * factor) * gamma)).collect()
    }

    fn final_norm(residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        let squares = residual.iter().fold(0.0, |sum, x| sum + x * x);
        let factor = reciprocal_root(squares / residual.len() as f32 + EPSILON, 2);
        residual.iter().zip(gamma).map(|(x, gamma)| rounded(x * factor * gamma)).collect()
    }

    fn rotate(head: &Head, table: &[u16]) -> Head {
        rotate(head, &table[..HEAD_DIM / 2], &table[HEAD_DIM / 2..HEAD_DIM])
    }

    fn attend(query: &Head, keys: &[Head], values: &[Head]) -> Head {
        let scores: Vec<f32> = keys.iter().map(|key| dot_heads(query, key)).collect();
        let peak = largest(&scores);
        // The lanes that pad the last vector get the weight 0 and change no sum.
        let mut weights: Vec<f32> =
            scores.iter().map(|score| rounded(exp(rounded(rounded(score - peak) * 0.125)))).collect();
        let mut sums = [0.0; SCORES];
        for weights in weights.chunks(SCORES) {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
        let inverse = reciprocal(reduce(sums));
        weights.iter_mut().for_each(|weight| *weight = rounded(*weight * inverse));
        let mut out = [0.0; HEAD_DIM];
        for (weight, row) in weights.iter().zip(values) {
            out.iter_mut().zip(row).for_each(|(sum, element)| *sum += weight * element);
        }
        out.map(rounded)
    }

    fn activation(gate: f32, up: f32) -> u16 {
        let tangent = tanh(rounded(0.5 * gate));
        let sigmoid = rounded((tangent + 1.0) * 0.5);
        narrow(rounded(gate * sigmoid) * up)
    }
}

const _: () = assert!(SMOLLM.hidden.is_multiple_of(LANES) && SMOLLM.intermediate.is_multiple_of(LANES));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_position_gives_its_value() {
        let value = std::array::from_fn(|i| rounded(i as f32 * 0.37 - 5.0));
        assert_eq!(SmolLm::attend(&[1.0; HEAD_DIM], &[[0.5; HEAD_DIM]], &[value]), value);
    }

    #[test]
    fn attention_is_within_the_error_of_its_tables() {
        let element =
            |row: usize, i: usize, seed: usize| rounded(((row * 131 + i * 31 + seed * 17) % 251) as f32 / 125.0 - 1.0);
        for count in [2, 15, 16, 17, 33, 64] {
            let rows =
                |seed| (0..count).map(|row| std::array::from_fn(|i| element(row, i, seed))).collect::<Vec<Head>>();
            let (keys, values, query) = (rows(1), rows(2), rows(3)[0]);
            let found = SmolLm::attend(&query, &keys, &values);
            let scores: Vec<f64> = keys
                .iter()
                .map(|key| key.iter().zip(&query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() / 8.0)
                .collect();
            let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - peak).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..HEAD_DIM {
                let wanted: f64 = weights.iter().zip(&values).map(|(w, v)| w * f64::from(v[i])).sum::<f64>() / total;
                // Weights are off by less than 2.5 % and values at most 1.
                assert!((f64::from(found[i]) - wanted).abs() < 0.03, "{count} positions: {} and {wanted}", found[i]);
            }
        }
    }

    #[test]
    fn norm_and_activation_round_where_the_design_does() {
        let residual: Vec<f32> = (0..576).map(|i| rounded((i as f32 * 0.7).sin() * 3.0)).collect();
        let gamma: Vec<f32> = (0..576).map(|i| rounded(1.0 + (i as f32).cos() * 0.2)).collect();
        let mean = residual.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / 576.0;
        for (found, parts) in SmolLm::norm(&residual, &gamma).iter().zip(residual.iter().zip(&gamma)) {
            let wanted = f64::from(*parts.0) / (mean + 1e-5).sqrt() * f64::from(*parts.1);
            // Three roundings of 2^-8 each.
            assert!((f64::from(*found) - wanted).abs() <= wanted.abs() * 0.0118 + 1e-9);
        }
        for (found, parts) in SmolLm::final_norm(&residual, &gamma).iter().zip(residual.iter().zip(&gamma)) {
            let wanted = f64::from(*parts.0) / (mean + 1e-5).sqrt() * f64::from(*parts.1);
            assert!((f64::from(*found) - wanted).abs() <= wanted.abs() * 0.004 + 1e-9);
        }
        for i in -80..80 {
            let gate = rounded(i as f32 / 10.0);
            let found = f64::from(crate::design::xdna1::vector::value(SmolLm::activation(gate, 1.5)));
            let wanted = f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * 1.5;
            assert!((found - wanted).abs() < 0.012 * (1.0 + f64::from(gate).abs()), "{gate}: {found} and {wanted}");
        }
    }
}
