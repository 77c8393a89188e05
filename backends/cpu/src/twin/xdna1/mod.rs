//! CPU twins of the xdna1 lane: the same model in the arithmetic of its engines and of its CPU stage.
//!
//! A twin rounds where the lane rounds, in the order of operations that the published designs state
//! (repository `c8dhjp4tyv-bit/hawkpoint-npu-llm`), so that a lane's result can be compared bit for bit without its hardware.
//! Weights are taken in the forms of a package whatever the file: matrices bf16, norms and biases float16.
//!
//! | lane | norms | attention | SwiGLU |
//! |---|---|---|---|
//! | [`Lane::SmolLm`] | three bf16 roundings; the final norm one | bf16 softmax by lookup tables | bf16 throughout, tanh table |
//! | [`Lane::SmolLmChunk`] | three bf16 roundings; the final norm as [`Lane::Cpu`] | f32 softmax, exponential by its bits, bf16 weights | bf16 throughout, tanh table |
//! | [`Lane::Qwen`] | f32 from bf16 parts, one rounding | f32 softmax, polynomial exponential, one rounding | f32, one rounding |
//! | [`Lane::Cpu`] | f32, one rounding | f32, one rounding | f32, one rounding |
//!
//! Common to all: projections in 32 lanes of f32, rounded once; bf16 residual stream, keys and values; logits f32, not rounded.
//! Where the designs leave an order to the core, it is fixed here: lanes are added in halves, 16 apart, then 8, 4, 2, 1.

#[cfg(test)]
mod ablation;
mod chunk;
mod qwen;
mod reference;
mod smollm;
mod tables;
mod weights;

use super::error::TwinError;
use super::lanes::multiply;
use super::rounding::bf16;
use crate::layered::{Arithmetic, Caches, LayerCache, LayeredSegment, Observer};
use npuhal_core::RunError;
use npuhal_core::stage::{HiddenRows, Row, SegmentCapacity, Tap};
use npuhal_models::config::RopeScaling;
use npuhal_models::package::{CONTEXT_POSITIONS, HEAD_DIM};
use npuhal_models::{ModelConfig, ModelSource};
use npuhal_registry::{Numerics, SegmentSpan};
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
    /// The chunked SmolLM graphs with bf16 weights: the leading layers of hybrid runs. They end with a layer, so a final norm
    /// is the CPU stage's.
    SmolLmChunk,
    /// The Qwen2.5 engine.
    Qwen,
    /// The CPU stage of hybrid runs, also the reference of both engines.
    Cpu,
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.numerics().fmt(f)
    }
}

impl Lane {
    /// The numerics of its twin.
    #[must_use]
    pub const fn numerics(self) -> Numerics {
        match self {
            Self::SmolLm => Numerics::Xdna1SmolLm,
            Self::SmolLmChunk => Numerics::Xdna1SmolLmChunk,
            Self::Qwen => Numerics::Xdna1Qwen,
            Self::Cpu => Numerics::Xdna1Cpu,
        }
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

/// A part of a model in a lane's arithmetic.
pub type TwinSegment = LayeredSegment<Xdna1>;

/// The arithmetic of a [`Lane`].
pub struct Xdna1 {
    config: ModelConfig,
    lane: Lane,
    threads: NonZeroUsize,
    weights: Weights,
    first_layer: usize,
    inverse_frequencies: [f32; PAIRS],
    /// Column ranges of the down projection, each of which starts at lane 0.
    down_chunks: Vec<Range<usize>>,
}

/// Checks that `lane` computes models of `config`.
///
/// # Errors
/// [`TwinError::Config`] with the first field that it cannot.
pub fn check_config(config: &ModelConfig, lane: Lane) -> Result<(), TwinError> {
    let refuse =
        |field, found: String, wanted| Err(TwinError::Config { numerics: lane.numerics(), field, found, wanted });
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
    if matches!(lane, Lane::SmolLm | Lane::SmolLmChunk) && config.qkv_bias {
        return refuse("qkv_bias", "on".to_owned(), "the SmolLM designs add no biases");
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
            let numerics = options.lane.numerics();
            return Err(TwinError::Config { numerics, field, found, wanted: "the lane has none" });
        }
        let arithmetic = Xdna1 {
            lane: options.lane,
            threads: options.threads,
            weights: Weights::load(model, &span, options.threads)?,
            first_layer: span.layers.start,
            inverse_frequencies: inverse_frequencies(config.rope.theta),
            down_chunks: down_chunks(options.lane, config.intermediate_size),
            config: config.clone(),
        };
        let positions = options.positions.min(CONTEXT_POSITIONS);
        let capacity = SegmentCapacity { positions, rows_per_call: CONTEXT_POSITIONS, sequences: options.sequences };
        Ok(Self::new(config, span, capacity, arithmetic))
    }
}

impl Arithmetic for Xdna1 {
    type Element = f32;

    /// In bf16.
    fn start(&self, rows: &[Row], hidden: &HiddenRows) -> Result<Vec<f32>, RunError> {
        if !self.weights.has_embedding() {
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
        let normed = self.norm_rows(residual, &weights.input_norm);
        let [mut q, mut k, v] = self.qkv(weights, &normed);
        self.rotate_rows(rows, &mut q, self.config.q_width());
        self.rotate_rows(rows, &mut k, self.config.kv_width());
        let number = (self.first_layer + index) as u32;
        observer.show(Tap::K(number), rows, &k);
        observer.show(Tap::V(number), rows, &v);
        caches.append(rows, index, self.config.kv_width(), &k, &v);
        let attended = self.attend_rows(index, rows, &q, caches);
        add(residual, &self.project(&weights.o, &attended, &[]));
        let normed = self.norm_rows(residual, &weights.post_attention_norm);
        let mut gate = self.project(&weights.gate, &normed, &[]);
        let up = self.project(&weights.up, &normed, &[]);
        let swiglu = match self.lane {
            Lane::SmolLm | Lane::SmolLmChunk => smollm::swiglu,
            Lane::Qwen => qwen::swiglu,
            Lane::Cpu => reference::swiglu,
        };
        gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = swiglu(*gate, *up));
        add(residual, &self.project(&weights.down, &gate, &self.down_chunks));
        observer.show(Tap::LayerOut(number), rows, residual);
    }

    fn finish(&self, rows: &[Row], residual: Vec<f32>, observer: &mut Observer) -> Vec<f32> {
        let normed = match &self.weights.final_norm {
            Some(gamma) => {
                let eps = self.config.rms_norm_eps;
                let normed = self.each_row(&residual, |x, out| match self.lane {
                    Lane::SmolLm => smollm::final_norm(x, gamma, out),
                    Lane::Qwen => qwen::norm(x, gamma, out),
                    Lane::SmolLmChunk | Lane::Cpu => reference::norm(x, gamma, eps, out),
                });
                observer.show(Tap::Normed, rows, &normed);
                normed
            }
            None => residual,
        };
        match &self.weights.head {
            Some(head) => {
                let logits = self.product(head, &normed, &[]);
                observer.show(Tap::Logits, rows, &logits);
                logits
            }
            None => normed,
        }
    }
}

impl Xdna1 {
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
        multiply(matrix, matrix.features, x, matrix.cols, chunks, self.threads)
    }

    /// The norm of a layer.
    fn norm_rows(&self, residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        self.each_row(residual, |x, out| match self.lane {
            Lane::SmolLm | Lane::SmolLmChunk => smollm::norm(x, gamma, out),
            Lane::Qwen => qwen::norm(x, gamma, out),
            Lane::Cpu => reference::norm(x, gamma, self.config.rms_norm_eps, out),
        })
    }

    fn each_row(&self, residual: &[f32], norm: impl Fn(&[f32], &mut [f32])) -> Vec<f32> {
        let mut normed = vec![0.0; residual.len()];
        let width = self.config.hidden_size;
        residual.chunks_exact(width).zip(normed.chunks_exact_mut(width)).for_each(|(x, out)| norm(x, out));
        normed
    }

    fn rotate_rows(&self, rows: &[Row], values: &mut [f32], width: usize) {
        let rotate = match self.lane {
            Lane::SmolLm | Lane::SmolLmChunk => smollm::rotate,
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
    fn attend_rows(&self, index: usize, rows: &[Row], q: &[f32], caches: &Caches<f32>) -> Vec<f32> {
        let (width, q_width) = (self.config.kv_width(), self.config.q_width());
        let group = self.config.heads / self.config.kv_heads;
        let mut attended = vec![0.0; q.len()];
        for ((row, q), out) in rows.iter().zip(q.chunks_exact(q_width)).zip(attended.chunks_exact_mut(q_width)) {
            let LayerCache { keys, values } = caches.of(row, index);
            let end = (row.position as usize + 1) * width;
            for (head, (q, out)) in q.chunks_exact(HEAD_DIM).zip(out.chunks_exact_mut(HEAD_DIM)).enumerate() {
                let at = head / group * HEAD_DIM;
                let keys = keys[..end].chunks_exact(width).map(|row| &row[at..at + HEAD_DIM]);
                let values = values[..end].chunks_exact(width).map(|row| &row[at..at + HEAD_DIM]);
                match self.lane {
                    Lane::SmolLm => smollm::attend(q, keys, values, out),
                    Lane::SmolLmChunk => chunk::attend(q, keys, values, out),
                    Lane::Qwen => qwen::attend(q, keys, values, out),
                    Lane::Cpu => reference::attend(q, keys, values, out),
                }
            }
        }
        attended
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
