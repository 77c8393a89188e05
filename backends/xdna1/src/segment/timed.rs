//! A segment of another backend, timed.

use super::Phases;
use npuhal_core::error::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, PhaseTime, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use std::ops::Range;
use std::time::Instant;

/// Passes everything on and adds up the time of its calls under one name.
pub struct Timed {
    segment: Box<dyn Segment>,
    name: &'static str,
    phases: Phases,
}

impl Timed {
    /// `segment`, timed as `name`.
    #[must_use]
    pub fn new(segment: Box<dyn Segment>, name: &'static str) -> Self {
        Self { segment, name, phases: Phases::default() }
    }
}

impl Segment for Timed {
    fn layers(&self) -> Range<usize> {
        self.segment.layers()
    }

    fn takes(&self) -> Takes {
        self.segment.takes()
    }

    fn yields(&self) -> Yields {
        self.segment.yields()
    }

    fn width(&self) -> usize {
        self.segment.width()
    }

    fn capacity(&self) -> SegmentCapacity {
        self.segment.capacity()
    }

    fn device(&self) -> &str {
        self.segment.device()
    }

    fn begin(&mut self) -> Result<(), RunError> {
        self.phases.clear();
        self.segment.begin()
    }

    fn end(&mut self) {
        self.segment.end();
    }

    fn forward(
        &mut self,
        rows: &[Row],
        hidden: &mut HiddenRows,
        want: Want<'_>,
        control: &Control,
    ) -> Result<(), RunError> {
        let started = Instant::now();
        let result = self.segment.forward(rows, hidden, want, control);
        self.phases.add(self.name, started);
        result
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        self.segment.truncate(sequence, len)
    }

    fn taps(&self) -> &[Tap] {
        self.segment.taps()
    }

    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.segment.observe(sink);
    }

    fn phases(&self) -> Vec<PhaseTime> {
        self.phases.of(true)
    }
}
