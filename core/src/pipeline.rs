//! A chain of segments as one stepper.

use crate::error::RunError;
use crate::stage::{
    Control, HiddenRows, PhaseTime, Placement, Row, Segment, SegmentCapacity, SequenceId, SharedTapSink, Stepper,
    Takes, Tap, TapSink, Want, Yields,
};
use thiserror::Error;

/// Segments that do not form a whole model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// No segment at all.
    #[error("a model needs at least one segment")]
    Empty,
    /// The first segment does not start from tokens at layer 0.
    #[error("the first segment starts at layer {layer} from {takes:?}; wanted layer 0 from Tokens")]
    BadStart {
        /// First layer found.
        layer: usize,
        /// What it takes.
        takes: Takes,
    },
    /// Two neighbours that do not fit.
    #[error("segment {index} ends at layer {end} with {yields:?}, but the next starts at layer {start} from {takes:?}")]
    BadJoint {
        /// The earlier of the two.
        index: usize,
        /// Its end.
        end: usize,
        /// What it yields.
        yields: Yields,
        /// The next one's start.
        start: usize,
        /// What the next one takes.
        takes: Takes,
    },
    /// The last segment does not end the model.
    #[error("the last segment ends at layer {end} of {layers} with {yields:?}; wanted Logits after the last layer")]
    BadEnd {
        /// Its end.
        end: usize,
        /// Layers of the model.
        layers: usize,
        /// What it yields.
        yields: Yields,
    },
}

/// A whole model as a chain of segments: one segment for a single device, several for a hybrid.
pub struct Pipeline {
    segments: Vec<Box<dyn Segment>>,
    capacity: SegmentCapacity,
    hidden: HiddenRows,
    flags: Vec<bool>,
}

impl Pipeline {
    /// Checks that `segments` cover layers `0..layers` without gap and end in logits.
    ///
    /// # Errors
    /// The first joint that does not fit.
    pub fn new(segments: Vec<Box<dyn Segment>>, layers: usize) -> Result<Self, PipelineError> {
        let first = segments.first().ok_or(PipelineError::Empty)?;
        if first.takes() != Takes::Tokens || first.layers().start != 0 {
            return Err(PipelineError::BadStart { layer: first.layers().start, takes: first.takes() });
        }
        for (index, pair) in segments.windows(2).enumerate() {
            let (from, to) = (&pair[0], &pair[1]);
            let fits = matches!(
                (from.yields(), to.takes()),
                (Yields::Hidden, Takes::Hidden) | (Yields::Normed, Takes::Normed)
            );
            if !fits || from.layers().end != to.layers().start {
                return Err(PipelineError::BadJoint {
                    index,
                    end: from.layers().end,
                    yields: from.yields(),
                    start: to.layers().start,
                    takes: to.takes(),
                });
            }
        }
        let last = &segments[segments.len() - 1];
        if last.yields() != Yields::Logits || last.layers().end != layers {
            return Err(PipelineError::BadEnd { end: last.layers().end, layers, yields: last.yields() });
        }
        let capacity = segments.iter().map(|segment| segment.capacity()).reduce(SegmentCapacity::meet);
        let capacity = capacity.ok_or(PipelineError::Empty)?;
        Ok(Self { segments, capacity, hidden: HiddenRows::new(), flags: Vec::new() })
    }

    /// The segments, for observers.
    pub fn segments_mut(&mut self) -> &mut [Box<dyn Segment>] {
        &mut self.segments
    }

    /// One chunk of rows through all segments; appends the wanted logits rows at `at`.
    fn run(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        at: &mut usize,
        control: &Control,
    ) -> Result<(), RunError> {
        // Segments from `tail` on have no layers, hence no cache: they see the wanted rows only.
        let tail = self.segments.iter().rposition(|segment| !segment.layers().is_empty()).map_or(0, |last| last + 1);
        let wanted: Vec<Row> = rows
            .iter()
            .enumerate()
            .filter(|(index, _)| want.selects(*index, rows.len()))
            .map(|(_, row)| *row)
            .collect();
        for (index, segment) in self.segments.iter_mut().enumerate() {
            control.check()?;
            if index < tail {
                let ask = if index + 1 == tail { want } else { Want::All };
                segment.forward(rows, &mut self.hidden, ask, control)?;
                check_shape(&self.hidden, ask.count(rows.len()), segment.as_ref())?;
            } else if !wanted.is_empty() {
                segment.forward(&wanted, &mut self.hidden, Want::All, control)?;
                check_shape(&self.hidden, wanted.len(), segment.as_ref())?;
            }
        }
        for index in 0..wanted.len() {
            logits.row_mut(*at).copy_from_slice(self.hidden.row(index));
            *at += 1;
        }
        Ok(())
    }
}

impl Stepper for Pipeline {
    fn vocab_size(&self) -> usize {
        self.segments.last().map_or(0, |segment| segment.width())
    }

    fn capacity(&self) -> SegmentCapacity {
        self.capacity
    }

    fn placement(&self) -> Vec<Placement> {
        self.segments
            .iter()
            .map(|segment| Placement {
                layers: segment.layers(),
                device: segment.device().to_owned(),
                yields: segment.yields(),
            })
            .collect()
    }

    fn begin(&mut self) -> Result<(), RunError> {
        for index in 0..self.segments.len() {
            if let Err(error) = self.segments[index].begin() {
                self.segments[..index].iter_mut().for_each(|segment| segment.end());
                return Err(error);
            }
        }
        Ok(())
    }

    fn end(&mut self) {
        self.segments.iter_mut().rev().for_each(|segment| segment.end());
    }

    fn step(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        control: &Control,
    ) -> Result<(), RunError> {
        if let Want::Each(flags) = want
            && flags.len() != rows.len()
        {
            let reason = format!("wanted a flag for each of {} rows, found {}", rows.len(), flags.len());
            return Err(RunError::BadRows { reason });
        }
        logits.reset(want.count(rows.len()), self.vocab_size());
        let chunk_rows = self.capacity.rows_per_call.max(1) as usize;
        let mut at = 0;
        let mut done = 0;
        while done < rows.len() {
            let chunk = &rows[done..rows.len().min(done + chunk_rows)];
            self.flags.clear();
            self.flags.extend((done..done + chunk.len()).map(|index| want.selects(index, rows.len())));
            let flags = std::mem::take(&mut self.flags);
            let result = self.run(chunk, Want::Each(&flags), logits, &mut at, control);
            self.flags = flags;
            result?;
            done += chunk.len();
        }
        Ok(())
    }

    fn phases(&self) -> Vec<PhaseTime> {
        self.segments.iter().flat_map(|segment| segment.phases()).collect()
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        let mut remaining = len;
        // Segments without layers hold nothing and are not asked. A segment that could keep fewer positions than asked makes
        // the others follow.
        loop {
            let cached = self.segments.iter_mut().filter(|segment| !segment.layers().is_empty());
            let kept = cached.map(|segment| segment.truncate(sequence, remaining)).min();
            match kept {
                Some(kept) if kept < remaining => remaining = kept,
                _ => return remaining,
            }
        }
    }

    fn taps(&self) -> Vec<Tap> {
        self.segments.iter().flat_map(|segment| segment.taps().iter().copied()).collect()
    }

    fn observe(&mut self, sink: Option<SharedTapSink>) {
        for segment in &mut self.segments {
            segment.observe(sink.clone().map(|sink| Box::new(sink) as Box<dyn TapSink>));
        }
    }
}

/// A segment that hands on another number of rows, or rows of another width, would corrupt its successors.
fn check_shape(hidden: &HiddenRows, rows: usize, segment: &dyn Segment) -> Result<(), RunError> {
    if rows == 0 || (hidden.rows() == rows && hidden.width() == segment.width()) {
        return Ok(());
    }
    let (layers, width) = (segment.layers(), segment.width());
    let (found_rows, found_width) = (hidden.rows(), hidden.width());
    Err(RunError::BadRows {
        reason: format!(
            "layers {layers:?} on {} were to hand on {rows} rows of {width}, found {found_rows} rows of {found_width}",
            segment.device()
        ),
    })
}
