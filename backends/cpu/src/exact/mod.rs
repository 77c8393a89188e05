//! The oracle: f64 arithmetic over weights dequantized to f32, KV cache in f64.
//!
//! Every other path of this backend, and every lane of an NPU, is compared with this one. Speed matters only as far as all
//! rows of a call share the dequantization of a weight row.

mod error;
mod math;
mod weights;

pub use error::ExactError;

use crate::config::check_config;
use crate::layered::{Arithmetic, Caches, LayeredSegment, Observer};
use math::{attend, for_each_chunk, rms_norm, rope_frequencies, rotate, swiglu};
use npuhal_core::RunError;
use npuhal_core::stage::{HiddenRows, Row, SegmentCapacity, Tap};
use npuhal_models::{ModelConfig, ModelSource};
use npuhal_registry::SegmentSpan;
use std::num::NonZeroUsize;
use weights::{LayerWeights, Weights};

/// How an exact segment is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactOptions {
    /// Positions of each sequence.
    pub positions: u32,
    /// Sequences held side by side.
    pub sequences: u32,
    /// Threads.
    pub threads: NonZeroUsize,
    /// Matrices are dequantized once at load if all of them fit this many bytes, otherwise row by row at each call.
    pub dequantized_bytes: u64,
}

impl ExactOptions {
    /// Memory for dequantized matrices unless told otherwise.
    pub const DEQUANTIZED_BYTES: u64 = 1 << 30;

    /// One sequence of `positions`.
    #[must_use]
    pub fn new(positions: u32, threads: NonZeroUsize) -> Self {
        Self { positions, sequences: 1, threads, dequantized_bytes: Self::DEQUANTIZED_BYTES }
    }
}

/// A part of a model in exact arithmetic.
pub type ExactSegment = LayeredSegment<Exact>;

/// The arithmetic: f64 throughout.
pub struct Exact {
    config: ModelConfig,
    threads: usize,
    weights: Weights,
    first_layer: usize,
    frequencies: Vec<f64>,
}

impl ExactSegment {
    /// Loads the part `span` of `model`.
    ///
    /// # Errors
    /// A span or configuration that cannot be served; a tensor that is missing, misshapen or unreadable.
    pub fn open(model: &ModelSource, span: SegmentSpan, options: ExactOptions) -> Result<Self, ExactError> {
        let config = model.config().clone();
        check_config(&config)?;
        span.check(&config)?;
        let weights = Weights::load(model, &span, options.dequantized_bytes)?;
        let frequencies = rope_frequencies(&config.rope, weights.rope_factors.as_deref());
        let capacity = SegmentCapacity {
            positions: options.positions,
            rows_per_call: ROWS_PER_CALL,
            sequences: options.sequences,
        };
        let (threads, first_layer) = (options.threads.get(), span.layers.start);
        let arithmetic = Exact { config: config.clone(), threads, weights, first_layer, frequencies };
        Ok(Self::new(config, span, capacity, arithmetic))
    }
}

impl Arithmetic for Exact {
    type Element = f64;

    fn start(&self, rows: &[Row], hidden: &HiddenRows) -> Result<Vec<f64>, RunError> {
        Ok(match &self.weights.embedding {
            None => hidden.as_slice().iter().copied().map(f64::from).collect(),
            Some(embedding) => {
                let mut values = vec![0.0f32; self.config.hidden_size];
                let mut residual = Vec::with_capacity(rows.len() * values.len());
                for row in rows {
                    embedding.row(row.token as usize, &mut values);
                    residual.extend(values.iter().copied().map(f64::from));
                }
                residual
            }
        })
    }

    fn layer(
        &self,
        index: usize,
        rows: &[Row],
        residual: &mut [f64],
        caches: &mut Caches<f64>,
        observer: &mut Observer,
    ) {
        let (config, threads) = (&self.config, self.threads);
        let weights = &self.weights.layers[index];
        let normed = norm_rows(residual, &weights.input_norm, config);
        let mut q = weights.q.multiply(threads, &normed, weights.q_bias.as_deref());
        let mut k = weights.k.multiply(threads, &normed, weights.k_bias.as_deref());
        let v = weights.v.multiply(threads, &normed, weights.v_bias.as_deref());
        shape_heads(&mut q, rows, config.q_width(), weights.q_norm.as_deref(), config, &self.frequencies);
        shape_heads(&mut k, rows, config.kv_width(), weights.k_norm.as_deref(), config, &self.frequencies);
        let number = (self.first_layer + index) as u32;
        observer.show(Tap::K(number), rows, &k);
        observer.show(Tap::V(number), rows, &v);
        caches.append(rows, index, config.kv_width(), &k, &v);
        let attended = attend_rows(config, caches, index, rows, &q, threads);
        add(residual, &weights.o.multiply(threads, &attended, None));
        add(residual, &feed_forward(weights, residual, config, threads));
        observer.show(Tap::LayerOut(number), rows, residual);
    }

    fn finish(&self, rows: &[Row], residual: Vec<f64>, observer: &mut Observer) -> Vec<f64> {
        let normed = match &self.weights.final_norm {
            Some(weight) => {
                let normed = norm_rows(&residual, weight, &self.config);
                observer.show(Tap::Normed, rows, &normed);
                normed
            }
            None => residual,
        };
        match &self.weights.head {
            Some(head) => {
                let logits = head.multiply(self.threads, &normed, None);
                observer.show(Tap::Logits, rows, &logits);
                logits
            }
            None => normed,
        }
    }
}

/// Bounds the memory of a call: logits of this many rows are a few hundred megabytes in f64.
const ROWS_PER_CALL: u32 = 256;

fn norm_rows(residual: &[f64], weight: &[f32], config: &ModelConfig) -> Vec<f64> {
    let mut normed = vec![0.0; residual.len()];
    let width = config.hidden_size;
    for (x, out) in residual.chunks_exact(width).zip(normed.chunks_exact_mut(width)) {
        rms_norm(x, weight, config.rms_norm_eps, out);
    }
    normed
}

/// Norm of each head where the model has one, then the rotation.
fn shape_heads(
    values: &mut [f64],
    rows: &[Row],
    width: usize,
    norm: Option<&[f32]>,
    config: &ModelConfig,
    frequencies: &[f64],
) {
    let mut normed = vec![0.0; config.head_dim];
    for (row, values) in rows.iter().zip(values.chunks_exact_mut(width)) {
        for head in values.chunks_exact_mut(config.head_dim) {
            if let Some(weight) = norm {
                rms_norm(head, weight, config.rms_norm_eps, &mut normed);
                head.copy_from_slice(&normed);
            }
            rotate(head, frequencies, config.rope.pairing, row.position);
        }
    }
}

/// Attention of every row over its own sequence up to its own position.
fn attend_rows(
    config: &ModelConfig,
    caches: &Caches<f64>,
    index: usize,
    rows: &[Row],
    q: &[f64],
    threads: usize,
) -> Vec<f64> {
    let (width, dim) = (config.kv_width(), config.head_dim);
    let group = config.heads / config.kv_heads;
    let mut attended = vec![0.0; q.len()];
    for_each_chunk(threads, &mut attended, config.q_width(), Vec::new, |row, out, scores| {
        let cache = caches.of(&rows[row], index);
        let positions = rows[row].position as usize + 1;
        let q = &q[row * config.q_width()..(row + 1) * config.q_width()];
        for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            attend(q, &cache.keys, &cache.values, width, head / group * dim, positions, scores, out);
        }
    });
    attended
}

fn feed_forward(weights: &LayerWeights, residual: &[f64], config: &ModelConfig, threads: usize) -> Vec<f64> {
    let normed = norm_rows(residual, &weights.post_attention_norm, config);
    let mut gate = weights.gate.multiply(threads, &normed, None);
    let up = weights.up.multiply(threads, &normed, None);
    swiglu(&mut gate, &up);
    weights.down.multiply(threads, &gate, None)
}

fn add(residual: &mut [f64], change: &[f64]) {
    residual.iter_mut().zip(change).for_each(|(residual, change)| *residual += change);
}

#[cfg(test)]
pub(crate) mod tests;
