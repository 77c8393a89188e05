//! CPU twins of the xdna1 lane: the same model in the arithmetic of its engines and of its CPU stage.
//!
//! A twin rounds where the lane rounds, in the order of operations that the published designs state
//! (repository `c8dhjp4tyv-bit/hawkpoint-npu-llm`), so that a lane's result can be compared bit for bit without its hardware.
//! Weights are taken in the forms of a package whatever the file: matrices bf16, norms and biases float16.
//!
//! | lane | norms | attention | SwiGLU |
//! |---|---|---|---|
//! | [`Lane::SmolLm`] | three bf16 roundings; the final norm one | bf16 softmax by lookup tables | bf16 throughout, tanh table |
//! | [`Lane::Qwen`] | f32 from bf16 parts, one rounding | f32 softmax, polynomial exponential, one rounding | f32, one rounding |
//! | [`Lane::Cpu`] | f32, one rounding | f32, one rounding | f32, one rounding |
//!
//! Common to all: projections in 32 lanes of f32, rounded once; bf16 residual stream, keys and values; logits f32, not rounded.
//! Where the designs leave an order to the core, it is fixed here: lanes are added in halves, 16 apart, then 8, 4, 2, 1.

mod error;
mod lanes;
mod qwen;
mod reference;
mod rounding;
mod smollm;
mod tables;
mod weights;

pub use error::TwinError;

use lanes::multiply;
use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_models::config::RopeScaling;
use npuhal_models::package::{CONTEXT_POSITIONS, HEAD_DIM};
use npuhal_models::{ModelConfig, ModelSource};
use npuhal_registry::SegmentSpan;
use rounding::bf16;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use weights::{LayerWeights, Matrix, Weights};

/// Rotated pairs of a head.
const PAIRS: usize = HEAD_DIM / 2;
/// Tiles over which the Qwen engine spreads the feed-forward vector, and rows of a group.
const QWEN_TILES: usize = 6;
const QWEN_GROUP: usize = 16;

/// Which part of the xdna1 lane is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The SmolLM engine.
    SmolLm,
    /// The Qwen2.5 engine.
    Qwen,
    /// The CPU stage of hybrid runs, also the reference of both engines.
    Cpu,
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SmolLm => "xdna1-smollm",
            Self::Qwen => "xdna1-qwen",
            Self::Cpu => "xdna1-cpu",
        })
    }
}

/// How a twin is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TwinOptions {
    /// The arithmetic.
    pub lane: Lane,
    /// Positions of each sequence, at most [`CONTEXT_POSITIONS`].
    pub positions: u32,
    /// Sequences held side by side.
    pub sequences: u32,
    /// Threads.
    pub threads: NonZeroUsize,
}

/// Keys and values of one sequence by layer of the segment; KV width elements a position, all bf16 values.
struct SequenceCache {
    positions: usize,
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

/// A part of a model in a lane's arithmetic.
pub struct TwinSegment {
    config: ModelConfig,
    span: SegmentSpan,
    options: TwinOptions,
    weights: Weights,
    inverse_frequencies: [f32; PAIRS],
    /// Column ranges of the down projection, each of which starts at lane 0.
    down_chunks: Vec<Range<usize>>,
    caches: Vec<SequenceCache>,
    taps: Vec<Tap>,
    sink: Option<Box<dyn TapSink>>,
}

/// Checks that `lane` computes models of `config`.
///
/// # Errors
/// [`TwinError::Config`] with the first field that it cannot.
pub fn check_config(config: &ModelConfig, lane: Lane) -> Result<(), TwinError> {
    let refuse = |field, found: String, wanted| Err(TwinError::Config { lane, field, found, wanted });
    if config.head_dim != HEAD_DIM || config.rope.dims != HEAD_DIM {
        let found = format!("{} with {} rotated elements", config.head_dim, config.rope.dims);
        return refuse("head_dim", found, "the lane's heads have 64 elements, all rotated");
    }
    if config.rope.scaling != RopeScaling::None {
        return refuse("rope.scaling", format!("{:?}", config.rope.scaling), "the lane has none");
    }
    if let Some(extra) = config.features.first_extra() {
        return refuse("features", extra, "the lane computes the plain decoder");
    }
    if config.qk_norm {
        return refuse("qk_norm", "on".to_owned(), "the lane does not norm query and key heads");
    }
    if lane == Lane::SmolLm && config.qkv_bias {
        return refuse("qkv_bias", "on".to_owned(), "the SmolLM engine adds no biases");
    }
    if lane == Lane::Qwen && !config.intermediate_size.is_multiple_of(QWEN_GROUP) {
        let found = config.intermediate_size.to_string();
        return refuse("intermediate_size", found, "the Qwen engine takes groups of 16");
    }
    Ok(())
}

impl TwinSegment {
    /// Loads the part `span` of `model`.
    ///
    /// # Errors
    /// A span or configuration that cannot be served; a tensor that is missing, misshapen or unreadable.
    pub fn open(model: &ModelSource, span: SegmentSpan, options: TwinOptions) -> Result<Self, TwinError> {
        let config = model.config().clone();
        check_config(&config, options.lane)?;
        span.check(&config)?;
        if model.tensor(npuhal_models::TensorRole::RopeFactors).is_some() {
            let (field, found) = ("rope factors", "on".to_owned());
            return Err(TwinError::Config { lane: options.lane, field, found, wanted: "the lane has none" });
        }
        let options = TwinOptions { positions: options.positions.min(CONTEXT_POSITIONS), ..options };
        let weights = Weights::load(model, &span, options.threads)?;
        let layers = span.layers.len();
        let cache = |_| SequenceCache { positions: 0, layers: vec![Default::default(); layers] };
        Ok(Self {
            caches: (0..options.sequences).map(cache).collect(),
            inverse_frequencies: inverse_frequencies(config.rope.theta),
            down_chunks: down_chunks(options.lane, config.intermediate_size),
            taps: taps_of(&span),
            sink: None,
            config,
            span,
            options,
            weights,
        })
    }

    /// Checks the rows against what the segment holds, and drops what a failed call left behind.
    fn admit(&mut self, rows: &[Row], hidden: &HiddenRows) -> Result<(), RunError> {
        if rows.len() > CONTEXT_POSITIONS as usize {
            let (found, limit) = (rows.len() as u64, u64::from(CONTEXT_POSITIONS));
            return Err(RunError::Capacity { what: "rows of a call", found, limit });
        }
        let width = self.config.hidden_size;
        if self.span.takes != Takes::Tokens && (hidden.rows(), hidden.width()) != (rows.len(), width) {
            let (found_rows, found_width) = (hidden.rows(), hidden.width());
            let reason = format!("wanted {} x {width} hidden values, found {found_rows} x {found_width}", rows.len());
            return Err(RunError::BadRows { reason });
        }
        let mut ends: Vec<usize> = self.caches.iter().map(|cache| cache.positions).collect();
        for row in rows {
            self.admit_row(row, &mut ends)?;
        }
        let width = self.config.kv_width();
        for cache in &mut self.caches {
            for (keys, values) in &mut cache.layers {
                keys.truncate(cache.positions * width);
                values.truncate(cache.positions * width);
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

    /// The residual stream the rows start from, bf16.
    fn start(&self, rows: &[Row], hidden: &HiddenRows) -> Result<Vec<f32>, RunError> {
        if self.span.takes != Takes::Tokens {
            return Ok(hidden.as_slice().iter().map(|value| bf16(*value)).collect());
        }
        let width = self.config.hidden_size;
        let mut residual = vec![0.0; rows.len() * width];
        for (row, out) in rows.iter().zip(residual.chunks_exact_mut(width)) {
            self.weights.embed(row.token, out).map_err(|error| RunError::BadRows { reason: error.to_string() })?;
        }
        Ok(residual)
    }

    fn layer(&mut self, index: usize, rows: &[Row], residual: &mut [f32]) {
        let weights = &self.weights.layers[index];
        let normed = self.norm_rows(residual, &weights.input_norm);
        let [mut q, mut k, v] = self.qkv(weights, &normed);
        self.rotate_rows(rows, &mut q, self.config.q_width());
        self.rotate_rows(rows, &mut k, self.config.kv_width());
        let number = (self.span.layers.start + index) as u32;
        observe(&mut self.sink, Tap::K(number), rows, &k);
        observe(&mut self.sink, Tap::V(number), rows, &v);
        let width = self.config.kv_width();
        for ((row, k), v) in rows.iter().zip(k.chunks_exact(width)).zip(v.chunks_exact(width)) {
            let (keys, values) = &mut self.caches[row.sequence.0 as usize].layers[index];
            keys.extend_from_slice(k);
            values.extend_from_slice(v);
        }
        let attended = self.attend_rows(index, rows, &q);
        let weights = &self.weights.layers[index];
        add(residual, &self.project(&weights.o, &attended, &[]));
        let normed = self.norm_rows(residual, &weights.post_attention_norm);
        let mut gate = self.project(&weights.gate, &normed, &[]);
        let up = self.project(&weights.up, &normed, &[]);
        let swiglu = match self.options.lane {
            Lane::SmolLm => smollm::swiglu,
            Lane::Qwen => qwen::swiglu,
            Lane::Cpu => reference::swiglu,
        };
        gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = swiglu(*gate, *up));
        add(residual, &self.project(&weights.down, &gate, &self.down_chunks));
        observe(&mut self.sink, Tap::LayerOut(number), rows, residual);
    }

    /// Query, key and value rows, each projection rounded, then the biased sum rounded.
    fn qkv(&self, weights: &LayerWeights, normed: &[f32]) -> [Vec<f32>; 3] {
        let mut start = 0;
        [&weights.q, &weights.k, &weights.v].map(|matrix| {
            let mut out = self.project(matrix, normed, &[]);
            if let Some(bias) = &weights.bias {
                let bias = &bias[start..start + matrix.features];
                for row in out.chunks_exact_mut(matrix.features) {
                    row.iter_mut().zip(bias).for_each(|(out, bias)| *out = bf16(*out + bias));
                }
            }
            start += matrix.features;
            out
        })
    }

    /// A projection, rounded once. Without chunks all columns are one.
    fn project(&self, matrix: &Matrix, x: &[f32], chunks: &[Range<usize>]) -> Vec<f32> {
        let mut out = self.product(matrix, x, chunks);
        out.iter_mut().for_each(|value| *value = bf16(*value));
        out
    }

    fn product(&self, matrix: &Matrix, x: &[f32], chunks: &[Range<usize>]) -> Vec<f32> {
        let whole = 0..matrix.cols;
        let chunks = if chunks.is_empty() { std::slice::from_ref(&whole) } else { chunks };
        multiply(matrix, matrix.features, x, matrix.cols, chunks, self.options.threads)
    }

    fn norm_rows(&self, residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; residual.len()];
        let width = self.config.hidden_size;
        for (x, out) in residual.chunks_exact(width).zip(normed.chunks_exact_mut(width)) {
            match self.options.lane {
                Lane::SmolLm => smollm::norm(x, gamma, out),
                Lane::Qwen => qwen::norm(x, gamma, out),
                Lane::Cpu => reference::norm(x, gamma, self.config.rms_norm_eps, out),
            }
        }
        normed
    }

    fn rotate_rows(&self, rows: &[Row], values: &mut [f32], width: usize) {
        let rotate = match self.options.lane {
            Lane::SmolLm => smollm::rotate,
            Lane::Qwen => qwen::rotate,
            Lane::Cpu => reference::rotate,
        };
        for (row, values) in rows.iter().zip(values.chunks_exact_mut(width)) {
            let angle = |pair: usize| f64::from(row.position as f32 * self.inverse_frequencies[pair]);
            let cos: [f32; PAIRS] = std::array::from_fn(|pair| angle(pair).cos() as f32);
            let sin: [f32; PAIRS] = std::array::from_fn(|pair| angle(pair).sin() as f32);
            values.chunks_exact_mut(HEAD_DIM).for_each(|head| rotate(head, &cos, &sin));
        }
    }

    /// Attention of every row over its own sequence up to its own position.
    fn attend_rows(&self, index: usize, rows: &[Row], q: &[f32]) -> Vec<f32> {
        let (width, q_width) = (self.config.kv_width(), self.config.q_width());
        let group = self.config.heads / self.config.kv_heads;
        let mut attended = vec![0.0; q.len()];
        for ((row, q), out) in rows.iter().zip(q.chunks_exact(q_width)).zip(attended.chunks_exact_mut(q_width)) {
            let (keys, values) = &self.caches[row.sequence.0 as usize].layers[index];
            let end = (row.position as usize + 1) * width;
            for (head, (q, out)) in q.chunks_exact(HEAD_DIM).zip(out.chunks_exact_mut(HEAD_DIM)).enumerate() {
                let at = head / group * HEAD_DIM;
                let keys = keys[..end].chunks_exact(width).map(|row| &row[at..at + HEAD_DIM]);
                let values = values[..end].chunks_exact(width).map(|row| &row[at..at + HEAD_DIM]);
                match self.options.lane {
                    Lane::SmolLm => smollm::attend(q, keys, values, out),
                    Lane::Qwen => qwen::attend(q, keys, values, out),
                    Lane::Cpu => reference::attend(q, keys, values, out),
                }
            }
        }
        attended
    }

    /// Final norm and head, as far as the span has them, of the wanted rows.
    fn finish(&mut self, rows: &[Row], residual: Vec<f32>) -> Vec<f32> {
        let normed = match &self.weights.final_norm {
            Some(gamma) => {
                let mut normed = self.norm_rows(&residual, gamma);
                if self.options.lane == Lane::SmolLm {
                    let width = self.config.hidden_size;
                    for (x, out) in residual.chunks_exact(width).zip(normed.chunks_exact_mut(width)) {
                        smollm::final_norm(x, gamma, out);
                    }
                }
                observe(&mut self.sink, Tap::Normed, rows, &normed);
                normed
            }
            None => residual,
        };
        match &self.weights.head {
            Some(head) => {
                let logits = self.product(head, &normed, &[]);
                observe(&mut self.sink, Tap::Logits, rows, &logits);
                logits
            }
            None => normed,
        }
    }
}

impl Segment for TwinSegment {
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
        let TwinOptions { positions, sequences, .. } = self.options;
        SegmentCapacity { positions, rows_per_call: CONTEXT_POSITIONS, sequences }
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
        if let Want::Each(flags) = want
            && flags.len() != rows.len()
        {
            return Err(RunError::BadRows { reason: format!("{} wishes for {} rows", flags.len(), rows.len()) });
        }
        self.admit(rows, hidden)?;
        let mut residual = self.start(rows, hidden)?;
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
        hidden.as_mut_slice().copy_from_slice(&result);
        for row in rows {
            self.caches[row.sequence.0 as usize].positions = row.position as usize + 1;
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
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

/// `1 / theta^(2i/64)`, the power rounded to f32 before its reciprocal is taken, as the lane's host does.
fn inverse_frequencies(theta: f32) -> [f32; PAIRS] {
    std::array::from_fn(|pair| 1.0 / (f64::from(theta).powf(2.0 * pair as f64 / HEAD_DIM as f64) as f32))
}

/// The Qwen engine's tiles own 16-row groups of the feed-forward vector, the first tiles one more where they do not go evenly,
/// and the down projection takes the tiles' parts one after the other.
fn down_chunks(lane: Lane, columns: usize) -> Vec<Range<usize>> {
    if lane != Lane::Qwen {
        return Vec::new();
    }
    let groups = columns / QWEN_GROUP;
    let mut end = 0;
    let mut chunk = |tile| {
        let start = end;
        end += (groups / QWEN_TILES + usize::from(tile < groups % QWEN_TILES)) * QWEN_GROUP;
        start..end
    };
    (0..QWEN_TILES).map(&mut chunk).collect()
}

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

fn observe(sink: &mut Option<Box<dyn TapSink>>, tap: Tap, rows: &[Row], values: &[f32]) {
    let Some(sink) = sink.as_deref_mut().filter(|_| !rows.is_empty()) else { return };
    for (row, values) in rows.iter().zip(values.chunks_exact(values.len() / rows.len())) {
        sink.observe(tap, *row, values);
    }
}

fn add(residual: &mut [f32], change: &[f32]) {
    residual.iter_mut().zip(change).for_each(|(residual, change)| *residual = bf16(*residual + change));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_feed_forward_vector_is_spread_as_published() {
        let chunks = down_chunks(Lane::Qwen, 4864);
        assert_eq!(chunks, [0..816, 816..1632, 1632..2448, 2448..3264, 3264..4064, 4064..4864]);
        assert!(down_chunks(Lane::SmolLm, 1536).is_empty());
    }
}
