//! The `fast` and `int8` numerics: a part of a model over packed weights. They differ in [`Precision`] alone.

mod forward;
mod weights;

use crate::activations::Precision;
use crate::config::check_config;
use crate::elementwise::Rotation;
use crate::error::CpuError;
use crate::features::Features;
use crate::kv::{KvCache, KvShape};
use crate::layered::taps_of;
use crate::pool::{FlushDenormals, Pool};
use forward::Work;
use npuhal_core::error::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_models::config::LayerRope;
use npuhal_models::{ModelConfig, ModelSource};
use npuhal_registry::SegmentSpan;
use std::ops::Range;
use std::sync::Arc;
use weights::{Embedding, Weights};

/// Rows of one call: enough that unpacking a weight panel is cheap against its use, few enough that scratch stays small.
pub const ROWS_PER_CALL: u32 = 128;

/// How a fast segment is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, the caller's included.
    pub threads: usize,
    /// Positions of each sequence.
    pub positions: u32,
    /// Sequences held side by side.
    pub sequences: u32,
    /// Instruction set.
    pub features: Features,
    /// Of the inputs of products.
    pub precision: Precision,
}

impl CpuOptions {
    /// One sequence of `positions`, near-exact, on the best instruction set of this processor.
    #[must_use]
    pub fn new(positions: u32, threads: usize) -> Self {
        Self { threads, positions, sequences: 1, features: Features::detect(), precision: Precision::Bits15 }
    }
}

/// A part of a model in `fast` or `int8` numerics.
pub struct FastSegment {
    config: ModelConfig,
    span: SegmentSpan,
    options: CpuOptions,
    pool: Arc<Pool>,
    weights: Weights,
    plan: Plan,
    cache: KvCache,
    work: Work,
    taps: Vec<Tap>,
    sink: Option<Box<dyn TapSink>>,
}

/// What is the same for every call, and how each layer attends: resolved at load.
struct Plan {
    /// Of the layers by the model's rotation, and of those by its local one, if there are any.
    rotations: Vec<Rotation>,
    layers: Vec<LayerPlan>,
    /// Factor on queries.
    query_scale: f32,
}

/// How a layer attends.
#[derive(Clone, Copy)]
struct LayerPlan {
    /// Index into [`Plan::rotations`]; `None` is no rotation.
    rotation: Option<usize>,
    /// Positions seen, the row's own included.
    window: usize,
}

impl Plan {
    fn new(model: &ModelSource, layers: &Range<usize>, positions: usize) -> Self {
        let config = model.config();
        let mut rotations = vec![Rotation::new(&config.rope, model.rope_inverse_frequencies(positions))];
        let local = config.features.local_rope.as_ref();
        rotations.extend(local.map(|rope| Rotation::new(rope, rope.inverse_frequencies(&[], positions))));
        let layer = |layer| {
            let attention = config.features.layer(layer);
            let rotation = match attention.rope {
                LayerRope::Global => Some(0),
                LayerRope::Local => Some(1),
                _ => None,
            };
            LayerPlan { rotation, window: attention.window.map_or(usize::MAX, |window| window as usize) }
        };
        let query_scale = config.features.attention_scale.unwrap_or_else(|| 1.0 / (config.head_dim as f32).sqrt());
        Self { rotations, layers: layers.clone().map(layer).collect(), query_scale }
    }

    /// Elements of a row's cosines and sines for one rotation. All rotations turn the same elements.
    fn table_len(&self) -> usize {
        self.rotations[0].table_len()
    }
}

impl FastSegment {
    /// Packs the part `span` of `model`, on threads of its own.
    ///
    /// # Errors
    /// A span or configuration that cannot be served; a tensor that is missing or misshapen; no memory or threads.
    pub fn load(model: &ModelSource, span: SegmentSpan, options: CpuOptions) -> Result<Self, CpuError> {
        Self::load_on(Arc::new(Pool::new(options.threads)?), model, span, options)
    }

    /// As [`FastSegment::load`], on threads that several segments share. Segments of one pool take turns.
    ///
    /// # Errors
    /// As [`FastSegment::load`].
    pub fn load_on(
        pool: Arc<Pool>,
        model: &ModelSource,
        span: SegmentSpan,
        options: CpuOptions,
    ) -> Result<Self, CpuError> {
        let config = model.config().clone();
        check_config(&config)?;
        span.check(&config)?;
        let weights = Weights::load(model, &span, &pool)?;
        let shape = KvShape { kv_heads: config.kv_heads, head_dim: config.head_dim };
        let window = |layer| config.features.layer(layer).window.map(|window| window as usize);
        let windows = span.layers.clone().map(window).collect();
        let (positions, sequences) = (options.positions as usize, options.sequences as usize);
        Ok(Self {
            plan: Plan::new(model, &span.layers, positions),
            cache: KvCache::windowed(shape, windows, positions, sequences),
            taps: taps_of(&span),
            work: Work::default(),
            sink: None,
            config,
            span,
            options,
            pool,
            weights,
        })
    }

    /// Bytes of packed weights: what decoding a token reads, apart from the KV cache.
    #[must_use]
    pub fn packed_bytes(&self) -> usize {
        self.weights.packed_bytes
    }

    /// The KV cache.
    #[must_use]
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    fn admit(&mut self, rows: &[Row], hidden: &HiddenRows, want: Want<'_>) -> Result<(), RunError> {
        if rows.len() > ROWS_PER_CALL as usize {
            let (found, limit) = (rows.len() as u64, u64::from(ROWS_PER_CALL));
            return Err(RunError::Capacity { what: "rows of a call", found, limit });
        }
        if let Want::Each(flags) = want
            && flags.len() != rows.len()
        {
            return Err(RunError::BadRows { reason: format!("{} wishes for {} rows", flags.len(), rows.len()) });
        }
        let width = self.config.hidden_size;
        if self.span.takes == Takes::Tokens {
            if let Some(row) = rows.iter().find(|row| row.token as usize >= self.config.vocab_size) {
                let reason = format!("token {} of a vocabulary of {}", row.token, self.config.vocab_size);
                return Err(RunError::BadRows { reason });
            }
        } else if (hidden.rows(), hidden.width()) != (rows.len(), width) {
            let (found_rows, found_width) = (hidden.rows(), hidden.width());
            let reason = format!("wanted {} × {width} hidden values, found {found_rows} × {found_width}", rows.len());
            return Err(RunError::BadRows { reason });
        }
        self.cache.admit(rows)
    }

    /// Fills the residual stream.
    fn start(&mut self, rows: &[Row], hidden: &HiddenRows) -> Result<(), RunError> {
        let width = self.config.hidden_size;
        let x = self.work.begin(&self.config, rows, &self.plan);
        let scale = self.config.features.embedding_scale;
        let Some(embedding) = &self.weights.embedding else {
            x.copy_from_slice(hidden.as_slice());
            return Ok(());
        };
        for (row, x) in rows.iter().zip(x.chunks_exact_mut(width)) {
            match embedding {
                Embedding::Tied(head) => head.dequantize_row(row.token as usize, x),
                Embedding::Mapped(tensor) => tensor
                    .dequantize_row(row.token as usize, x)
                    .map_err(|error| RunError::BadRows { reason: error.to_string() })?,
            }
            if scale != 1.0 {
                x.iter_mut().for_each(|x| *x *= scale);
            }
        }
        Ok(())
    }
}

impl Segment for FastSegment {
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
        control.check()?;
        self.admit(rows, hidden, want)?;
        let _flush = FlushDenormals::new();
        self.start(rows, hidden)?;
        let wanted: Vec<usize> = (0..rows.len()).filter(|&index| want.selects(index, rows.len())).collect();
        let layers = self.span.layers.clone();
        for (index, number) in layers.clone().enumerate() {
            control.check()?;
            // The last layer computes only what is wanted of it, unless somebody looks at all of it.
            let last = number + 1 == layers.end && self.sink.is_none();
            self.layer(index, rows, if last { Some(&wanted) } else { None })?;
            self.observe_layer(index, number, rows);
        }
        if layers.is_empty() || self.sink.is_some() {
            self.work.keep(self.config.hidden_size, rows.len(), &wanted);
        }
        self.finish(rows, &wanted, hidden)?;
        self.cache.commit(rows);
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        if self.span.layers.is_empty() {
            return len;
        }
        self.cache.truncate(sequence, len)
    }

    fn taps(&self) -> &[Tap] {
        &self.taps
    }

    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.sink = sink;
    }
}

impl std::fmt::Debug for FastSegment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FastSegment")
            .field("span", &self.span)
            .field("options", &self.options)
            .field("packed_bytes", &self.weights.packed_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
