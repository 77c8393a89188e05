//! Arithmetic of the Qwen2.5 cores.

use super::float::{add_product, exp, parts, reciprocal, times, times_bf16};
use super::shape::{Model, QWEN, Shape, Tables};
use super::vector::{
    HEAD_DIM, Head, dot_heads, largest, narrow, reciprocal_root, reduce, rounded, sum_of_squares, value,
};

/// Scores of a softmax vector.
const SCORES: usize = 16;
const EPSILON: f32 = 1e-6;
/// Elements of one part of the cosines or sines.
const PART: usize = HEAD_DIM / 2;

/// Qwen2.5 0.5B.
#[derive(Debug)]
pub(super) struct Qwen;

impl Model for Qwen {
    const SHAPE: Shape = QWEN;
    /// Cosines in three parts, sines in three parts, position.
    const TABLES: Tables = Tables { elements: 208, position: 192, embedding: 256 };

    fn norm(residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        let mean = sum_of_squares(residual) / residual.len() as f32;
        let factor = parts(reciprocal_root(mean + EPSILON, 3));
        let scaled = residual.iter().map(|x| add_product(0.0, factor, *x));
        scaled.zip(gamma).map(|(scaled, gamma)| rounded(times_bf16(scaled, *gamma))).collect()
    }

    fn final_norm(residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        Self::norm(residual, gamma)
    }

    fn rotate(head: &Head, table: &[u16]) -> Head {
        // The parts lie high, middle, low.
        let angle = |first: usize, i: usize| [0, 1, 2].map(|part| value(table[first + part * PART + i]));
        let mut out = *head;
        for i in 0..PART {
            let (a, b, cosine, sine) = (head[i], head[i + PART], angle(0, i), angle(3 * PART, i));
            out[i] = rounded(add_product(add_product(0.0, cosine, a), sine, -b));
            out[i + PART] = rounded(add_product(add_product(0.0, sine, a), cosine, b));
        }
        out
    }

    fn attend(query: &Head, keys: &[Head], values: &[Head]) -> Head {
        let scores: Vec<f32> = keys.iter().map(|key| dot_heads(query, key) * 0.125).collect();
        let peak = largest(&scores);
        let weights: Vec<f32> = scores.iter().map(|score| exp(score - peak)).collect();
        let mut sums = [0.0; SCORES];
        for weights in weights.chunks(SCORES) {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
        let inverse = reciprocal(reduce(sums));
        let mut out = [0.0; HEAD_DIM];
        for (weight, row) in weights.iter().zip(values) {
            let probability = parts(times(*weight, inverse));
            out.iter_mut().zip(row).for_each(|(sum, element)| *sum = add_product(*sum, probability, *element));
        }
        out.map(rounded)
    }

    fn activation(gate: f32, up: f32) -> u16 {
        let sigmoid = reciprocal(1.0 + exp(-gate));
        narrow(times_bf16(times_bf16(sigmoid, gate), up))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_is_f32() {
        let element =
            |row: usize, i: usize, seed: usize| rounded(((row * 131 + i * 31 + seed * 17) % 251) as f32 / 60.0 - 2.0);
        for count in [1, 2, 17, 64] {
            let rows =
                |seed| (0..count).map(|row| std::array::from_fn(|i| element(row, i, seed))).collect::<Vec<Head>>();
            let (keys, values, query) = (rows(1), rows(2), rows(3)[0]);
            let found = Qwen::attend(&query, &keys, &values);
            let score =
                |key: &Head| key.iter().zip(&query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() / 8.0;
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - peak).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..HEAD_DIM {
                let wanted = weights.iter().zip(&values).map(|(w, v)| w * f64::from(v[i])).sum::<f64>() / total;
                let error = (f64::from(found[i]) - wanted).abs();
                assert!(error <= wanted.abs() / 250.0 + 1e-5, "{count} positions: {} and {wanted}", found[i]);
            }
        }
    }

    #[test]
    fn the_rest_equals_f32_on_tested_input() {
        let residual: Vec<f32> = (0..896).map(|i| rounded((i as f32 * 0.7).sin() * 3.0)).collect();
        let gamma: Vec<f32> = (0..896).map(|i| rounded(1.0 + (i as f32).cos() * 0.2)).collect();
        let mean = residual.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / 896.0;
        let mut differing = 0;
        for (found, parts) in Qwen::norm(&residual, &gamma).iter().zip(residual.iter().zip(&gamma)) {
            let wanted = f64::from(*parts.0) / (mean + 1e-6).sqrt() * f64::from(*parts.1);
            differing += usize::from(*found != rounded(wanted as f32));
        }
        assert!(differing <= 1, "{differing} of 896 differ");
        for i in -200..200 {
            let gate = rounded(i as f32 / 10.0);
            let wanted = f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * 1.5;
            let found = value(Qwen::activation(gate, 1.5));
            assert!((f64::from(found) - wanted).abs() <= wanted.abs() / 255.0, "{gate}: {found} and {wanted}");
        }
        let angle: [f32; 32] = std::array::from_fn(|i| 0.11 * i as f32);
        let mut table = vec![0; 208];
        for i in 0..32 {
            for (part, (cosine, sine)) in parts(angle[i].cos()).iter().zip(parts(angle[i].sin())).enumerate() {
                (table[32 * part + i], table[96 + 32 * part + i]) = (narrow(*cosine), narrow(sine));
            }
        }
        let head: Head = std::array::from_fn(|i| rounded((i as f32).sin()));
        let turned = Qwen::rotate(&head, &table);
        for i in 0..32 {
            let (sine, cosine) = angle[i].sin_cos();
            let wanted = [head[i] * cosine - head[i + 32] * sine, head[i] * sine + head[i + 32] * cosine];
            for (found, wanted) in [turned[i], turned[i + 32]].iter().zip(wanted) {
                assert!((found - wanted).abs() <= wanted.abs() / 256.0 + 1e-6, "{i}: {found} and {wanted}");
            }
        }
    }
}
