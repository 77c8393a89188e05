//! The oracle: f64 arithmetic over weights dequantized to f32, KV cache in f64.
//!
//! Every other path of this backend, and every lane of an NPU, is compared with this one. Speed matters only as far as all
//! rows of a call share the dequantization of a weight row.

mod error;
mod math;
mod weights;

pub use error::ExactError;

use crate::config::check_config;
use math::{HeadAttention, Rotation, attend, for_each_chunk, gate_with, rms_norm};
use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_models::config::{LayerRope, Rope};
use npuhal_models::{ModelConfig, ModelSource};
use npuhal_registry::SegmentSpan;
use std::num::NonZeroUsize;
use std::ops::Range;
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

/// Keys and values of one sequence, by layer of the segment; `kv_width` elements a position.
struct SequenceCache {
    positions: usize,
    layers: Vec<LayerCache>,
}

#[derive(Default)]
struct LayerCache {
    keys: Vec<f64>,
    values: Vec<f64>,
}

/// A part of a model in exact arithmetic.
pub struct ExactSegment {
    config: ModelConfig,
    span: SegmentSpan,
    options: ExactOptions,
    weights: Weights,
    rotation: Rotation,
    local_rotation: Option<Rotation>,
    caches: Vec<SequenceCache>,
    taps: Vec<Tap>,
    sink: Option<Box<dyn TapSink>>,
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
        let positions = options.positions as usize;
        let rotation = Rotation::new(&config.rope, model.rope_inverse_frequencies(positions));
        let local = |rope: &Rope| Rotation::new(rope, rope.inverse_frequencies(&[], positions));
        let local_rotation = config.features.local_rope.as_ref().map(local);
        let layers = span.layers.len();
        let new_cache =
            |_| SequenceCache { positions: 0, layers: (0..layers).map(|_| LayerCache::default()).collect() };
        let caches = (0..options.sequences).map(new_cache).collect();
        let taps = taps_of(&span);
        Ok(Self { config, span, options, weights, rotation, local_rotation, caches, taps, sink: None })
    }

    /// Checks the rows against what the segment holds, and drops what a failed call left behind.
    fn admit(&mut self, rows: &[Row], hidden: &HiddenRows) -> Result<(), RunError> {
        if self.span.takes != Takes::Tokens && (hidden.rows(), hidden.width()) != (rows.len(), self.config.hidden_size)
        {
            let (found_rows, found_width, width) = (hidden.rows(), hidden.width(), self.config.hidden_size);
            let reason = format!("wanted {} x {width} hidden values, found {found_rows} x {found_width}", rows.len());
            return Err(RunError::BadRows { reason });
        }
        let mut ends: Vec<usize> = self.caches.iter().map(|cache| cache.positions).collect();
        for row in rows {
            self.admit_row(row, &mut ends)?;
        }
        let width = self.config.kv_width();
        for cache in &mut self.caches {
            for layer in &mut cache.layers {
                layer.keys.truncate(cache.positions * width);
                layer.values.truncate(cache.positions * width);
            }
        }
        Ok(())
    }

    fn admit_row(&self, row: &Row, ends: &mut [usize]) -> Result<(), RunError> {
        let (sequence, position) = (row.sequence.0, row.position);
        let Some(end) = ends.get_mut(sequence as usize) else {
            let (found, limit) = (u64::from(sequence), u64::from(self.options.sequences));
            return Err(RunError::Capacity { what: "sequence", found, limit });
        };
        if position >= self.options.positions {
            let (found, limit) = (u64::from(position) + 1, u64::from(self.options.positions));
            return Err(RunError::Capacity { what: "positions", found, limit });
        }
        // A segment without layers holds nothing that rows could continue.
        if !self.span.layers.is_empty() && position as usize != *end {
            let reason = format!("sequence {sequence}: wanted position {end}, found {position}");
            return Err(RunError::BadRows { reason });
        }
        if self.span.takes == Takes::Tokens && row.token as usize >= self.config.vocab_size {
            let reason = format!("token {} of a vocabulary of {}", row.token, self.config.vocab_size);
            return Err(RunError::BadRows { reason });
        }
        *end += 1;
        Ok(())
    }

    /// The residual stream the rows start from.
    fn start(&self, rows: &[Row], hidden: &HiddenRows) -> Vec<f64> {
        match &self.weights.embedding {
            None => hidden.as_slice().iter().copied().map(f64::from).collect(),
            Some(embedding) => {
                let scale = f64::from(self.config.features.embedding_scale);
                let mut values = vec![0.0f32; self.config.hidden_size];
                let mut residual = Vec::with_capacity(rows.len() * values.len());
                for row in rows {
                    embedding.row(row.token as usize, &mut values);
                    residual.extend(values.iter().map(|value| f64::from(*value) * scale));
                }
                residual
            }
        }
    }

    fn layer(&mut self, index: usize, rows: &[Row], residual: &mut [f64]) {
        let (config, threads) = (&self.config, self.options.threads.get());
        let weights = &self.weights.layers[index];
        let normed = norm_rows(residual, &weights.input_norm, config);
        let mut q = weights.q.multiply(threads, &normed, weights.q_bias.as_deref());
        let mut k = weights.k.multiply(threads, &normed, weights.k_bias.as_deref());
        let v = weights.v.multiply(threads, &normed, weights.v_bias.as_deref());
        let layer = config.features.layer(self.span.layers.start + index);
        let rotation = match layer.rope {
            LayerRope::Global => Some(&self.rotation),
            LayerRope::Local => self.local_rotation.as_ref(),
            _ => None,
        };
        shape_heads(&mut q, rows, config.q_width(), weights.q_norm.as_deref(), config, rotation);
        shape_heads(&mut k, rows, config.kv_width(), weights.k_norm.as_deref(), config, rotation);
        let number = (self.span.layers.start + index) as u32;
        observe_keys(&mut self.sink, Tap::K(number), rows, &k, config);
        observe(&mut self.sink, Tap::V(number), rows, &v);
        let width = config.kv_width();
        for ((row, k), v) in rows.iter().zip(k.chunks_exact(width)).zip(v.chunks_exact(width)) {
            let cache = &mut self.caches[row.sequence.0 as usize].layers[index];
            cache.keys.extend_from_slice(k);
            cache.values.extend_from_slice(v);
        }
        let attended = attend_rows(config, layer.window, &self.caches, index, rows, &q, threads);
        let attended = weights.o.multiply(threads, &attended, None);
        add(residual, attended, weights.attention_output_norm.as_deref(), config);
        let fed = feed_forward(weights, residual, config, threads);
        add(residual, fed, weights.feed_forward_output_norm.as_deref(), config);
        observe(&mut self.sink, Tap::LayerOut(number), rows, residual);
    }

    /// Final norm and head, as far as the span has them, of the wanted rows.
    fn finish(&mut self, rows: &[Row], residual: Vec<f64>) -> Vec<f64> {
        let normed = match &self.weights.final_norm {
            Some(weight) => {
                let normed = norm_rows(&residual, weight, &self.config);
                observe(&mut self.sink, Tap::Normed, rows, &normed);
                normed
            }
            None => residual,
        };
        match &self.weights.head {
            Some(head) => {
                let mut logits = head.multiply(self.options.threads.get(), &normed, None);
                finish_logits(&self.config, &mut logits);
                observe(&mut self.sink, Tap::Logits, rows, &logits);
                logits
            }
            None => normed,
        }
    }
}

impl Segment for ExactSegment {
    fn layers(&self) -> Range<usize> {
        self.span.layers.clone()
    }

    fn takes(&self) -> Takes {
        self.span.takes
    }

    fn yields(&self) -> Yields {
        self.span.yields
    }

    fn width(&self) -> usize {
        self.span.width(&self.config)
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity {
            positions: self.options.positions,
            rows_per_call: ROWS_PER_CALL,
            sequences: self.options.sequences,
        }
    }

    fn device(&self) -> &str {
        "cpu"
    }

    fn begin(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    fn end(&mut self) {}

    fn forward(
        &mut self,
        rows: &[Row],
        hidden: &mut HiddenRows,
        want: Want<'_>,
        control: &Control,
    ) -> Result<(), RunError> {
        if rows.len() > ROWS_PER_CALL as usize {
            let (found, limit) = (rows.len() as u64, u64::from(ROWS_PER_CALL));
            return Err(RunError::Capacity { what: "rows of a call", found, limit });
        }
        self.admit(rows, hidden)?;
        let mut residual = self.start(rows, hidden);
        for index in 0..self.span.layers.len() {
            control.check()?;
            self.layer(index, rows, &mut residual);
        }
        control.check()?;
        let hidden_size = self.config.hidden_size;
        let wanted: Vec<usize> = (0..rows.len()).filter(|&index| want.selects(index, rows.len())).collect();
        let wanted_rows: Vec<Row> = wanted.iter().map(|&index| rows[index]).collect();
        let kept = wanted.iter().flat_map(|&index| &residual[index * hidden_size..(index + 1) * hidden_size]);
        let result = self.finish(&wanted_rows, kept.copied().collect());
        let width = self.width();
        if let Some(bad) = result.iter().position(|value| !value.is_finite()) {
            let row = wanted_rows[bad / width];
            let what = format!("{:?} of sequence {} at position {}", self.span.yields, row.sequence.0, row.position);
            return Err(RunError::NotFinite { what });
        }
        hidden.reset(wanted.len(), width);
        hidden.as_mut_slice().iter_mut().zip(&result).for_each(|(narrow, wide)| *narrow = *wide as f32);
        for row in rows {
            self.caches[row.sequence.0 as usize].positions = row.position as usize + 1;
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        // Without layers nothing is held, and any length can be continued.
        if self.span.layers.is_empty() {
            return len;
        }
        match self.caches.get_mut(sequence.0 as usize) {
            Some(cache) => {
                cache.positions = cache.positions.min(len);
                cache.positions
            }
            None => 0,
        }
    }

    fn taps(&self) -> &[Tap] {
        &self.taps
    }

    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.sink = sink;
    }
}

/// Bounds the memory of a call: logits of this many rows are a few hundred megabytes in f64.
const ROWS_PER_CALL: u32 = 256;

fn taps_of(span: &SegmentSpan) -> Vec<Tap> {
    let layers = span.layers.clone().map(|layer| layer as u32);
    let mut taps: Vec<Tap> = layers.flat_map(|layer| [Tap::K(layer), Tap::V(layer), Tap::LayerOut(layer)]).collect();
    if span.has_final_norm() {
        taps.push(Tap::Normed);
    }
    if span.has_head() {
        taps.push(Tap::Logits);
    }
    taps
}

fn observe(sink: &mut Option<Box<dyn TapSink>>, tap: Tap, rows: &[Row], values: &[f64]) {
    observe_as(sink, tap, rows, values, |_| ());
}

/// Keys, in the order that taps have whatever the file's.
fn observe_keys(sink: &mut Option<Box<dyn TapSink>>, tap: Tap, rows: &[Row], values: &[f64], config: &ModelConfig) {
    observe_as(sink, tap, rows, values, |row| config.rope.unpair(row, config.head_dim));
}

fn observe_as(
    sink: &mut Option<Box<dyn TapSink>>,
    tap: Tap,
    rows: &[Row],
    values: &[f64],
    arrange: impl Fn(&mut [f32]),
) {
    let Some(sink) = sink.as_deref_mut().filter(|_| !rows.is_empty()) else { return };
    let mut narrow = Vec::new();
    for (row, values) in rows.iter().zip(values.chunks_exact(values.len() / rows.len())) {
        narrow.clear();
        narrow.extend(values.iter().map(|value| *value as f32));
        arrange(&mut narrow);
        sink.observe(tap, *row, &narrow);
    }
}

fn norm_rows(residual: &[f64], weight: &[f32], config: &ModelConfig) -> Vec<f64> {
    let mut normed = vec![0.0; residual.len()];
    let width = config.hidden_size;
    for (x, out) in residual.chunks_exact(width).zip(normed.chunks_exact_mut(width)) {
        rms_norm(x, weight, config.rms_norm_eps, out);
    }
    normed
}

/// Division and soft-cap of the logits, where the model has them.
fn finish_logits(config: &ModelConfig, logits: &mut [f64]) {
    let divisor = f64::from(config.features.logit_divisor);
    logits.iter_mut().for_each(|logit| *logit /= divisor);
    if let Some(cap) = config.features.logit_softcap.map(f64::from) {
        logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
    }
}

/// Norm of each head where the model has one, then the rotation where the layer has one.
fn shape_heads(
    values: &mut [f64],
    rows: &[Row],
    width: usize,
    norm: Option<&[f32]>,
    config: &ModelConfig,
    rotation: Option<&Rotation>,
) {
    let mut normed = vec![0.0; config.head_dim];
    for (row, values) in rows.iter().zip(values.chunks_exact_mut(width)) {
        for head in values.chunks_exact_mut(config.head_dim) {
            if let Some(weight) = norm {
                rms_norm(head, weight, config.rms_norm_eps, &mut normed);
                head.copy_from_slice(&normed);
            }
            if let Some(rotation) = rotation {
                rotation.rotate(head, row.position);
            }
        }
    }
}

/// Attention of every row over its own sequence up to its own position, as far back as the window reaches.
fn attend_rows(
    config: &ModelConfig,
    window: Option<u32>,
    caches: &[SequenceCache],
    index: usize,
    rows: &[Row],
    q: &[f64],
    threads: usize,
) -> Vec<f64> {
    let (width, dim) = (config.kv_width(), config.head_dim);
    let group = config.heads / config.kv_heads;
    let (pairing, pairs) = (config.rope.pairing, config.rope.dims / 2);
    let attention = HeadAttention { scale: config.attention_scale(), pairing, pairs };
    let mut attended = vec![0.0; q.len()];
    for_each_chunk(threads, &mut attended, config.q_width(), Vec::new, |row, out, scores| {
        let cache = &caches[rows[row].sequence.0 as usize].layers[index];
        let end = rows[row].position as usize + 1;
        let seen = window.map_or(0, |window| end.saturating_sub(window as usize))..end;
        let q = &q[row * config.q_width()..(row + 1) * config.q_width()];
        for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            let at = head / group * dim;
            attend(attention, q, &cache.keys, &cache.values, width, at, seen.clone(), scores, out);
        }
    });
    attended
}

fn feed_forward(weights: &LayerWeights, residual: &[f64], config: &ModelConfig, threads: usize) -> Vec<f64> {
    let normed = norm_rows(residual, &weights.post_attention_norm, config);
    let mut gate = weights.gate.multiply(threads, &normed, None);
    let up = weights.up.multiply(threads, &normed, None);
    gate_with(config.features.activation, &mut gate, &up);
    weights.down.multiply(threads, &gate, None)
}

/// Adds what a block gives to the residual stream: normed and scaled where the model has that.
fn add(residual: &mut [f64], change: Vec<f64>, norm: Option<&[f32]>, config: &ModelConfig) {
    let change = match norm {
        Some(norm) => norm_rows(&change, norm, config),
        None => change,
    };
    let scale = f64::from(config.features.residual_scale);
    residual.iter_mut().zip(&change).for_each(|(residual, change)| *residual += change * scale);
}

#[cfg(test)]
pub(crate) mod tests;
