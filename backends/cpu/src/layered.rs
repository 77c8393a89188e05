//! The segment of every numerics that computes all rows of a call layer by layer in f32: the twins of the lanes.
//!
//! What a segment has to keep in order whatever its arithmetic (positions, refused rows, what a failed call left behind,
//! observers) is here once; an [`Arithmetic`] adds the numbers.

use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_models::ModelConfig;
use npuhal_registry::SegmentSpan;
use std::ops::Range;

/// An element of the residual stream.
pub trait Element: Copy + Default + Send {
    /// The nearest f32.
    fn narrow(self) -> f32;
}

impl Element for f32 {
    fn narrow(self) -> f32 {
        self
    }
}

/// The numbers of a segment. Rows are row-major; layers are counted from the segment's first.
pub trait Arithmetic: Send {
    /// What it computes in.
    type Element: Element;

    /// The residual stream that `rows` start from: their embeddings, or `hidden`.
    fn start(&self, rows: &[Row], hidden: &HiddenRows) -> Result<Vec<Self::Element>, RunError>;

    /// Carries `residual` through a layer and appends the rows' keys and values to their caches.
    fn layer(
        &self,
        index: usize,
        rows: &[Row],
        residual: &mut [Self::Element],
        caches: &mut Caches<Self::Element>,
        observer: &mut Observer,
    );

    /// Final norm and head, as far as the span has them.
    fn finish(&self, rows: &[Row], residual: Vec<Self::Element>, observer: &mut Observer) -> Vec<Self::Element>;
}

/// Who looks at intermediate values, if anybody.
#[derive(Default)]
pub struct Observer(Option<Box<dyn TapSink>>);

impl Observer {
    /// Shows the rows of `values`.
    pub fn show(&mut self, tap: Tap, rows: &[Row], values: &[impl Element]) {
        let Some(sink) = self.0.as_deref_mut().filter(|_| !rows.is_empty()) else { return };
        for (row, values) in rows.iter().zip(values.chunks_exact(values.len() / rows.len())) {
            let narrow: Vec<f32> = values.iter().map(|value| value.narrow()).collect();
            sink.observe(tap, *row, &narrow);
        }
    }
}

/// Keys and values of one sequence in one layer, KV width elements a position.
#[derive(Default, Clone)]
pub struct LayerCache<E> {
    /// Keys.
    pub keys: Vec<E>,
    /// Values.
    pub values: Vec<E>,
}

struct SequenceCache<E> {
    /// Positions that calls have completed.
    positions: usize,
    layers: Vec<LayerCache<E>>,
}

/// Keys and values of all sequences.
pub struct Caches<E>(Vec<SequenceCache<E>>);

impl<E: Element> Caches<E> {
    /// What layer `index` holds of `row`'s sequence.
    pub fn of(&self, row: &Row, index: usize) -> &LayerCache<E> {
        &self.0[row.sequence.0 as usize].layers[index]
    }

    /// Appends `keys` and `values` of `rows`, `width` elements each.
    pub fn append(&mut self, rows: &[Row], index: usize, width: usize, keys: &[E], values: &[E]) {
        for ((row, keys), values) in rows.iter().zip(keys.chunks_exact(width)).zip(values.chunks_exact(width)) {
            let cache = &mut self.0[row.sequence.0 as usize].layers[index];
            cache.keys.extend_from_slice(keys);
            cache.values.extend_from_slice(values);
        }
    }

    /// Drops what a failed call left behind.
    fn drop_unfinished(&mut self, width: usize) {
        for SequenceCache { positions, layers } in &mut self.0 {
            for layer in layers {
                layer.keys.truncate(*positions * width);
                layer.values.truncate(*positions * width);
            }
        }
    }
}

/// A part of a model in the arithmetic `A`.
pub struct LayeredSegment<A: Arithmetic> {
    config: ModelConfig,
    span: SegmentSpan,
    capacity: SegmentCapacity,
    arithmetic: A,
    caches: Caches<A::Element>,
    taps: Vec<Tap>,
    observer: Observer,
}

impl<A: Arithmetic> LayeredSegment<A> {
    pub(crate) fn new(config: ModelConfig, span: SegmentSpan, capacity: SegmentCapacity, arithmetic: A) -> Self {
        let cache = |_| SequenceCache { positions: 0, layers: vec![LayerCache::default(); span.layers.len()] };
        let caches = Caches((0..capacity.sequences).map(cache).collect());
        let taps = taps_of(&span);
        Self { config, span, capacity, arithmetic, caches, taps, observer: Observer::default() }
    }

    /// Checks the rows against what the segment holds.
    fn admit(&self, rows: &[Row], hidden: &HiddenRows, want: Want<'_>) -> Result<(), RunError> {
        if rows.len() > self.capacity.rows_per_call as usize {
            let (found, limit) = (rows.len() as u64, u64::from(self.capacity.rows_per_call));
            return Err(RunError::Capacity { what: "rows of a call", found, limit });
        }
        if let Want::Each(flags) = want
            && flags.len() != rows.len()
        {
            return Err(RunError::BadRows { reason: format!("{} wishes for {} rows", flags.len(), rows.len()) });
        }
        let width = self.config.hidden_size;
        if self.span.takes != Takes::Tokens && (hidden.rows(), hidden.width()) != (rows.len(), width) {
            let (found_rows, found_width) = (hidden.rows(), hidden.width());
            let reason = format!("wanted {} x {width} hidden values, found {found_rows} x {found_width}", rows.len());
            return Err(RunError::BadRows { reason });
        }
        let mut ends: Vec<usize> = self.caches.0.iter().map(|cache| cache.positions).collect();
        rows.iter().try_for_each(|row| self.admit_row(row, &mut ends))
    }

    fn admit_row(&self, row: &Row, ends: &mut [usize]) -> Result<(), RunError> {
        let (sequence, position) = (row.sequence.0, row.position);
        let Some(end) = ends.get_mut(sequence as usize) else {
            let (found, limit) = (u64::from(sequence), u64::from(self.capacity.sequences));
            return Err(RunError::Capacity { what: "sequence", found, limit });
        };
        if position >= self.capacity.positions {
            let (found, limit) = (u64::from(position) + 1, u64::from(self.capacity.positions));
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
}

impl<A: Arithmetic> Segment for LayeredSegment<A> {
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
        self.capacity
    }

    fn device(&self) -> &str {
        crate::device::DEVICE_ID
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
        self.admit(rows, hidden, want)?;
        self.caches.drop_unfinished(self.config.kv_width());
        let Self { arithmetic, caches, observer, .. } = self;
        let mut residual = arithmetic.start(rows, hidden)?;
        for index in 0..self.span.layers.len() {
            control.check()?;
            arithmetic.layer(index, rows, &mut residual, caches, observer);
        }
        control.check()?;
        let hidden_size = self.config.hidden_size;
        let wanted: Vec<usize> = (0..rows.len()).filter(|&index| want.selects(index, rows.len())).collect();
        let wanted_rows: Vec<Row> = wanted.iter().map(|&index| rows[index]).collect();
        let kept = wanted.iter().flat_map(|&index| &residual[index * hidden_size..(index + 1) * hidden_size]);
        let result = arithmetic.finish(&wanted_rows, kept.copied().collect(), observer);
        let width = self.width();
        if let Some(bad) = result.iter().position(|value| !value.narrow().is_finite()) {
            let row = wanted_rows[bad / width];
            let what = format!("{:?} of sequence {} at position {}", self.span.yields, row.sequence.0, row.position);
            return Err(RunError::NotFinite { what });
        }
        hidden.reset(wanted.len(), width);
        hidden.as_mut_slice().iter_mut().zip(&result).for_each(|(narrow, value)| *narrow = value.narrow());
        for row in rows {
            self.caches.0[row.sequence.0 as usize].positions = row.position as usize + 1;
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        // Without layers nothing is held, and any length can be continued.
        if self.span.layers.is_empty() {
            return len;
        }
        match self.caches.0.get_mut(sequence.0 as usize) {
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
        self.observer = Observer(sink);
    }
}

impl<A: Arithmetic> std::fmt::Debug for LayeredSegment<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayeredSegment")
            .field("span", &self.span)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

/// What segments of this backend show of `span`.
pub(crate) fn taps_of(span: &SegmentSpan) -> Vec<Tap> {
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
