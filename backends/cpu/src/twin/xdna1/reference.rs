//! The lane's CPU stage: f32, rounded to bf16 after every operation of a layer.

use crate::twin::lanes::dot;
use crate::twin::rounding::bf16;

/// RMSNorm, also the final one. Gammas are not rounded to bf16.
pub(super) fn norm(x: &[f32], gamma: &[f32], eps: f32, out: &mut [f32]) {
    let inverse = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = bf16(x * inverse * gamma);
    }
}

/// Rotation with f32 cosines and sines.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
        let (a, b) = (*low, *high);
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
    let mut weights: Vec<f32> = keys.map(|key| dot(query, key) * 0.125).collect();
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f32;
    for weight in &mut weights {
        *weight = (*weight - largest).exp();
        sum += *weight;
    }
    out.fill(0.0);
    for (weight, row) in weights.iter().zip(values) {
        let weight = weight / sum;
        out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
    }
    out.iter_mut().for_each(|out| *out = bf16(*out));
}

/// SiLU times up, one rounding.
pub(super) fn swiglu(gate: f32, up: f32) -> f32 {
    bf16(gate / (1.0 + (-gate.clamp(-80.0, 80.0)).exp()) * up)
}
