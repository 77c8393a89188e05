//! CPU twin of the xdna2 lane's kernels, `qwen3-layer` and `qwen3-lmhead`.
//!
//! Written from the description of the lane alone, not from the programs of the virtual array. What crosses a buffer of the
//! lane is bf16, as described: the residual stream between layers (`act`), norm weights (`i5`), cosines, sines and head norms
//! (`i6`), rows of keys and values, logits.
//!
//! The description is silent about what the kernels keep inside. This is the reading taken here: what becomes an operand of a
//! matrix product is bf16, for that is what the array multiplies: normed rows, rotated queries, attention outputs, the SwiGLU
//! product, and on the other side the codes of the weights. A weight `code · scale + zero` in f32 is none, so the constants of
//! a group of 32 columns are applied to its sums: `scale · Σ code·x + zero · Σ x` ([`Matrix::multiply`]). In f32 stay query and
//! key projections, normed heads before their rotation, softmax shares (they weigh rows of values one by one), the output
//! projection, the residual stream between attention and feed-forward block, gate and up projections and the down projection.
//! All sums are f32, one element after the other in the order in which the buffers bring them: columns within a group, groups
//! along a row, the squares of a norm, the products of a score, shares and values of a position. Blocks of 16 positions only
//! decide when sums are scaled down. Exponentials, roots, sines and cosines are those of the f32 library.
//!
//! Where several readings of this were possible, outputs of the lane on the virtual NPU decided; nothing was taken from its
//! programs. Sums in another order put an operand on the neighbouring bf16 now and then, and with it every element of the
//! product a little off. So another program with these rounding points need not agree to the bit; what each order changes, and
//! how far the lane on the virtual NPU is from the twin, is in `docs/numerics.md`.

mod weights;

use crate::layered::{Arithmetic, Caches, LayeredSegment, Observer};
use crate::twin::error::TwinError;
use crate::twin::rounding::bf16;
use npuhal_core::RunError;
use npuhal_core::stage::{HiddenRows, Row, SegmentCapacity, Tap};
use npuhal_models::config::{RopePairing, RopeScaling};
use npuhal_models::{ModelConfig, ModelSource, TensorRole};
use npuhal_registry::{Numerics, SegmentSpan};
use std::num::NonZeroUsize;
use weights::{LayerWeights, Matrix, Weights};

/// Elements of a head.
const HEAD_DIM: usize = 128;
/// Rotated pairs of a head.
const PAIRS: usize = HEAD_DIM / 2;
/// Rows of the cache that are read at a time.
const BLOCK_ROWS: usize = 16;
/// Positions that the lane's cache has.
pub const CONTEXT_POSITIONS: u32 = 8192;
/// Bounds the memory of a call.
const ROWS_PER_CALL: u32 = 256;

/// How the twin is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xdna2Options {
    /// Positions of each sequence, at most [`CONTEXT_POSITIONS`].
    pub positions: u32,
    /// Sequences held side by side.
    pub sequences: u32,
    /// Threads.
    pub threads: NonZeroUsize,
}

/// A part of a qwen3 model in the xdna2 lane's arithmetic.
pub type Xdna2Segment = LayeredSegment<Xdna2>;

/// Checks that the lane's kernels compute `model` and that its weights are what they take.
///
/// # Errors
/// [`TwinError::Config`] with the first field that does not fit, [`TwinError::Weights`] with the first tensor.
pub fn check_model(model: &ModelSource) -> Result<(), TwinError> {
    let config = model.config();
    let refuse =
        |field, found: String, wanted| Err(TwinError::Config { numerics: Numerics::Xdna2, field, found, wanted });
    if config.model_type != "qwen3" {
        return refuse("model_type", config.model_type.clone(), "the lane's kernels compute qwen3");
    }
    if config.head_dim != HEAD_DIM || config.rope.dims != HEAD_DIM {
        let found = format!("{} with {} rotated elements", config.head_dim, config.rope.dims);
        return refuse("head_dim", found, "the lane's heads have 128 elements, all rotated");
    }
    if config.rope.scaling != RopeScaling::None || model.tensor(TensorRole::RopeFactors).is_some() {
        return refuse("rope.scaling", "on".to_owned(), "the lane has none");
    }
    if config.rope.pairing != RopePairing::Halves {
        return refuse("rope.pairing", format!("{:?}", config.rope.pairing), "the lane rotates halves of a head");
    }
    if let Some(extra) = config.features.first_extra() {
        return refuse("features", extra, "the lane computes the plain decoder");
    }
    if config.qkv_bias {
        return refuse("qkv_bias", "on".to_owned(), "the lane adds no biases");
    }
    if !config.qk_norm {
        return refuse("qk_norm", "off".to_owned(), "the lane norms query and key heads");
    }
    weights::check_matrices(model)
}

impl Xdna2Segment {
    /// Loads the part `span` of `model`.
    ///
    /// # Errors
    /// As [`check_model`]; a span that is no part of the model; a tensor that is missing, misshapen or unreadable.
    pub fn open(model: &ModelSource, span: SegmentSpan, options: Xdna2Options) -> Result<Self, TwinError> {
        check_model(model)?;
        let config = model.config().clone();
        span.check(&config)?;
        let arithmetic = Xdna2 {
            weights: Weights::load(model, &span, options.threads)?,
            frequencies: inverse_frequencies(config.rope.theta),
            first_layer: span.layers.start,
            threads: options.threads,
            config: config.clone(),
        };
        let positions = options.positions.min(CONTEXT_POSITIONS);
        let capacity = SegmentCapacity { positions, rows_per_call: ROWS_PER_CALL, sequences: options.sequences };
        Ok(Self::new(config, span, capacity, arithmetic))
    }
}

/// The lane's arithmetic.
pub struct Xdna2 {
    config: ModelConfig,
    weights: Weights,
    frequencies: [f32; PAIRS],
    first_layer: usize,
    threads: NonZeroUsize,
}

impl Xdna2 {
    /// A projection, not rounded.
    fn project(&self, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
        matrix.multiply(x, self.threads)
    }

    fn norm_rows(&self, rows: &[f32], gamma: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; rows.len()];
        for (x, out) in rows.chunks_exact(gamma.len()).zip(normed.chunks_exact_mut(gamma.len())) {
            norm(x, gamma, self.config.rms_norm_eps, out);
        }
        normed
    }

    /// Norm and rotation of the heads in `values`.
    fn shape_heads(&self, rows: &[Row], values: &[f32], width: usize, gamma: &[f32]) -> Vec<f32> {
        let mut heads = self.norm_rows(values, gamma);
        for (row, heads) in rows.iter().zip(heads.chunks_exact_mut(width)) {
            let (cos, sin) = rotation(&self.frequencies, row.position);
            heads.chunks_exact_mut(HEAD_DIM).for_each(|head| rotate(head, &cos, &sin));
        }
        heads
    }

    fn attention(
        &self,
        index: usize,
        rows: &[Row],
        normed: &[f32],
        caches: &mut Caches<f32>,
        observer: &mut Observer,
    ) -> Vec<f32> {
        let weights = &self.weights.layers[index];
        let [q, k, mut v] = [&weights.q, &weights.k, &weights.v].map(|matrix| self.project(matrix, normed));
        let (width, q_width) = (self.config.kv_width(), self.config.q_width());
        let mut q = self.shape_heads(rows, &q, q_width, &weights.q_norm);
        let mut k = self.shape_heads(rows, &k, width, &weights.k_norm);
        round(&mut q);
        round(&mut k);
        round(&mut v);
        let number = (self.first_layer + index) as u32;
        observer.show(Tap::K(number), rows, &k);
        observer.show(Tap::V(number), rows, &v);
        caches.append(rows, index, width, &k, &v);
        let group = self.config.heads / self.config.kv_heads;
        let mut attended = vec![0.0; q.len()];
        for ((row, q), out) in rows.iter().zip(q.chunks_exact(q_width)).zip(attended.chunks_exact_mut(q_width)) {
            let cache = caches.of(row, index);
            let held = (row.position as usize + 1) * width;
            for (head, (q, out)) in q.chunks_exact(HEAD_DIM).zip(out.chunks_exact_mut(HEAD_DIM)).enumerate() {
                let at = head / group * HEAD_DIM;
                attend(q, &cache.keys[at..held], &cache.values[at..held], width, out);
            }
        }
        round(&mut attended);
        self.project(&weights.o, &attended)
    }

    fn feed_forward(&self, weights: &LayerWeights, residual: &[f32]) -> Vec<f32> {
        let mut normed = self.norm_rows(residual, &weights.post_attention_norm);
        round(&mut normed);
        let mut gate = self.project(&weights.gate, &normed);
        let up = self.project(&weights.up, &normed);
        gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
        round(&mut gate);
        self.project(&weights.down, &gate)
    }
}

impl Arithmetic for Xdna2 {
    type Element = f32;

    fn start(&self, rows: &[Row], hidden: &HiddenRows) -> Result<Vec<f32>, RunError> {
        if self.weights.embedding.is_none() {
            return Ok(hidden.as_slice().iter().map(|value| bf16(*value)).collect());
        }
        let width = self.config.hidden_size;
        let mut residual = vec![0.0; rows.len() * width];
        for (row, out) in rows.iter().zip(residual.chunks_exact_mut(width)) {
            self.weights.embed(row.token, out).map_err(|error| RunError::BadRows { reason: error.to_string() })?;
        }
        Ok(residual)
    }

    fn layer(
        &self,
        index: usize,
        rows: &[Row],
        residual: &mut [f32],
        caches: &mut Caches<f32>,
        observer: &mut Observer,
    ) {
        let weights = &self.weights.layers[index];
        let mut normed = self.norm_rows(residual, &weights.input_norm);
        round(&mut normed);
        let change = self.attention(index, rows, &normed, caches, observer);
        add(residual, &change);
        let change = self.feed_forward(weights, residual);
        add(residual, &change);
        round(residual);
        observer.show(Tap::LayerOut((self.first_layer + index) as u32), rows, residual);
    }

    fn finish(&self, rows: &[Row], residual: Vec<f32>, observer: &mut Observer) -> Vec<f32> {
        let normed = match &self.weights.final_norm {
            Some(gamma) => {
                let mut normed = self.norm_rows(&residual, gamma);
                round(&mut normed);
                observer.show(Tap::Normed, rows, &normed);
                normed
            }
            None => residual,
        };
        match &self.weights.head {
            Some(head) => {
                let mut logits = self.project(head, &normed);
                round(&mut logits);
                observer.show(Tap::Logits, rows, &logits);
                logits
            }
            None => normed,
        }
    }
}

fn round(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = bf16(*value));
}

fn add(residual: &mut [f32], change: &[f32]) {
    residual.iter_mut().zip(change).for_each(|(residual, change)| *residual += change);
}

/// `x / sqrt(mean(x²) + eps) · gamma` in f32, the squares summed in order.
fn norm(x: &[f32], gamma: &[f32], eps: f32, out: &mut [f32]) {
    let squares = x.iter().fold(0.0, |sum, x| sum + x * x);
    let inverse = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = x * inverse * gamma;
    }
}

/// Inverse frequencies. For a base of a million the lane has a table of powers with five significant decimal digits; for any
/// other base f32 powers.
fn inverse_frequencies(theta: f32) -> [f32; PAIRS] {
    std::array::from_fn(|pair| {
        if theta == 1e6 {
            let power = 10f64.powf(-6.0 * pair as f64 / PAIRS as f64);
            // Always a number.
            format!("{power:.4e}").parse().unwrap_or(f32::NAN)
        } else {
            theta.powf(-2.0 * pair as f32 / HEAD_DIM as f32)
        }
    })
}

/// Cosines and sines of a position, bf16.
fn rotation(frequencies: &[f32; PAIRS], position: u32) -> ([f32; PAIRS], [f32; PAIRS]) {
    let angles = frequencies.map(|frequency| frequency * position as f32);
    (angles.map(|angle| bf16(angle.cos())), angles.map(|angle| bf16(angle.sin())))
}

/// Rotates a head: element `j` with element `j + 64`.
fn rotate(head: &mut [f32], cos: &[f32; PAIRS], sin: &[f32; PAIRS]) {
    let (low, high) = head.split_at_mut(PAIRS);
    for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
        let (a, b) = (*low, *high);
        *low = a * cos - b * sin;
        *high = b * cos + a * sin;
    }
}

/// Attention of one head. `keys` and `values` begin at the head's first element of position 0, `width` elements a position, and
/// end with the last position. A block of 16 positions is taken at a time; whenever it has a score above all before, the sums
/// so far are scaled down to it.
fn attend(query: &[f32], keys: &[f32], values: &[f32], width: usize, out: &mut [f32]) {
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();
    let (mut largest, mut total) = (f32::NEG_INFINITY, 0.0f32);
    out.fill(0.0);
    for (keys, values) in keys.chunks(BLOCK_ROWS * width).zip(values.chunks(BLOCK_ROWS * width)) {
        let product = |key: &[f32]| query.iter().zip(key).fold(0.0, |sum, (q, k)| sum + q * k);
        let scores: Vec<f32> = keys.chunks(width).map(|key| product(key) * scale).collect();
        let before = largest;
        largest = scores.iter().copied().fold(largest, f32::max);
        let kept = (before - largest).exp();
        total *= kept;
        out.iter_mut().for_each(|out| *out *= kept);
        for (score, value) in scores.iter().zip(values.chunks(width)) {
            let share = (score - largest).exp();
            total += share;
            out.iter_mut().zip(value).for_each(|(out, value)| *out += share * value);
        }
    }
    out.iter_mut().for_each(|out| *out /= total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_of_a_million_has_the_published_table() {
        let table = inverse_frequencies(1e6);
        assert_eq!([table[0], table[1], table[3], table[32], table[63]], [1.0, 0.80584, 0.52330, 1.0e-3, 1.2409e-6]);
        let powers = inverse_frequencies(1e4);
        assert_eq!([powers[0], powers[32]], [1.0, 1e4f32.powf(-0.5)]);
    }

    #[test]
    fn the_first_position_is_not_rotated() {
        let (cos, sin) = rotation(&inverse_frequencies(1e6), 0);
        assert_eq!((cos, sin), ([1.0; PAIRS], [0.0; PAIRS]));
        let mut head: [f32; HEAD_DIM] = std::array::from_fn(|index| index as f32 - 60.5);
        let before = head;
        rotate(&mut head, &cos, &sin);
        assert_eq!(head, before);
    }

    #[test]
    fn halves_of_a_head_turn_together() {
        let mut head = [0.0; HEAD_DIM];
        (head[5], head[5 + PAIRS]) = (3.0, 2.0);
        let (mut cos, mut sin) = ([1.0; PAIRS], [0.0; PAIRS]);
        (cos[5], sin[5]) = (0.0, 1.0);
        rotate(&mut head, &cos, &sin);
        assert_eq!((head[5], head[5 + PAIRS]), (-2.0, 3.0));
    }

    /// Against a softmax over all positions at once, in f64; the largest score moves from block to block.
    #[test]
    fn blocks_of_the_cache_are_one_softmax() {
        const WIDTH: usize = 2 * HEAD_DIM;
        let wave = |seed: f32| move |index: usize| (index as f32 * seed).sin() * 2.0;
        let query: Vec<f32> = (0..HEAD_DIM).map(wave(0.7)).collect();
        for positions in [1, 2, 15, 16, 17, 32, 50] {
            let keys: Vec<f32> = (0..positions * WIDTH).map(wave(0.31)).collect();
            let values: Vec<f32> = (0..positions * WIDTH).map(wave(0.17)).collect();
            let mut found = [0.0; HEAD_DIM];
            attend(&query, &keys[HEAD_DIM..], &values[HEAD_DIM..], WIDTH, &mut found);
            let row = |from: &[f32], position: usize| -> Vec<f64> {
                from[position * WIDTH + HEAD_DIM..(position + 1) * WIDTH].iter().map(|x| f64::from(*x)).collect()
            };
            let shares: Vec<f64> = (0..positions)
                .map(|position| {
                    let products = row(&keys, position).into_iter().zip(&query).map(|(k, q)| k * f64::from(*q));
                    (products.sum::<f64>() / 128f64.sqrt()).exp()
                })
                .collect();
            for (index, found) in found.iter().enumerate() {
                let sum: f64 = (0..positions).map(|position| shares[position] * row(&values, position)[index]).sum();
                let wanted = sum / shares.iter().sum::<f64>();
                assert!((f64::from(*found) - wanted).abs() < 2e-5, "{positions} positions: {found} {wanted}");
            }
        }
    }
}
