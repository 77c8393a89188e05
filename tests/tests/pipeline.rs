//! The chain of segments: joints, chunks, wanted rows, heads, failures.

use npuhal_core::RunError;
use npuhal_core::pipeline::{Pipeline, PipelineError};
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Stepper, Takes, Tap, TapSink, Want, Yields,
};
use std::ops::Range;
use std::sync::{Arc, Mutex};

#[test]
fn joints_that_do_not_fit_are_named() {
    use Takes as T;
    use Yields as Y;
    let build = |parts: &[(Range<usize>, T, Y)]| {
        let log = Log::default();
        let segments = parts.iter().map(|(layers, takes, yields)| fake(&log, layers.clone(), *takes, *yields).boxed());
        Pipeline::new(segments.collect(), 4).map(|_| ())
    };
    assert!(build(&[(0..4, T::Tokens, Y::Logits)]).is_ok());
    assert!(build(&[(0..2, T::Tokens, Y::Hidden), (2..4, T::Hidden, Y::Normed), (4..4, T::Normed, Y::Logits)]).is_ok());
    assert!(build(&[(0..0, T::Tokens, Y::Hidden), (0..4, T::Hidden, Y::Logits)]).is_ok(), "an embedding alone");
    assert!(matches!(build(&[]), Err(PipelineError::Empty)));
    assert!(matches!(build(&[(1..4, T::Tokens, Y::Logits)]), Err(PipelineError::BadStart { layer: 1, .. })));
    assert!(matches!(build(&[(0..4, T::Hidden, Y::Logits)]), Err(PipelineError::BadStart { takes: T::Hidden, .. })));
    for second in [
        (1..4, T::Hidden, Y::Logits),
        (3..4, T::Hidden, Y::Logits),
        (2..4, T::Normed, Y::Logits),
        (2..4, T::Tokens, Y::Logits),
    ] {
        let error = build(&[(0..2, T::Tokens, Y::Hidden), second]);
        assert!(matches!(error, Err(PipelineError::BadJoint { index: 0, end: 2, .. })), "{error:?}");
    }
    let logits_in_the_middle = build(&[(0..2, T::Tokens, Y::Logits), (2..4, T::Hidden, Y::Logits)]);
    assert!(matches!(logits_in_the_middle, Err(PipelineError::BadJoint { index: 0, .. })));
    assert!(matches!(build(&[(0..3, T::Tokens, Y::Logits)]), Err(PipelineError::BadEnd { end: 3, layers: 4, .. })));
    assert!(matches!(build(&[(0..4, T::Tokens, Y::Hidden)]), Err(PipelineError::BadEnd { yields: Y::Hidden, .. })));
}

#[test]
fn chunks_are_as_large_as_the_smallest_segment_takes() {
    let (mut pipeline, log) = three_stages();
    assert_eq!(pipeline.capacity(), SegmentCapacity { positions: 12, rows_per_call: 3, sequences: 2 });
    let mut logits = HiddenRows::new();
    pipeline.step(&rows(0..7), Want::All, &mut logits, &Control::new()).unwrap();
    assert_eq!(logits.rows(), 7);
    (0..7).for_each(|index| assert_eq!(logits.row(index), expected(index)));
    let calls = log.calls("body");
    assert_eq!(calls.iter().map(|call| (call.rows.start, call.rows.end)).collect::<Vec<_>>(), [(0, 3), (3, 6), (6, 7)]);
    pipeline.step(&rows(7..7), Want::All, &mut logits, &Control::new()).unwrap();
    assert_eq!((logits.rows(), log.calls("body").len()), (0, 3), "no rows, no call");
}

#[test]
fn only_wanted_rows_reach_the_head() {
    for (want, wanted) in [
        (Want::Nothing, vec![]),
        (Want::Last, vec![4]),
        (Want::All, vec![0, 1, 2, 3, 4]),
        (Want::Each(&[false, true, false, true, false]), vec![1, 3]),
    ] {
        let (mut pipeline, log) = three_stages();
        let mut logits = HiddenRows::new();
        pipeline.step(&rows(0..5), want, &mut logits, &Control::new()).unwrap();
        assert_eq!((logits.rows(), logits.width()), (wanted.len(), WIDTH));
        for (at, &index) in wanted.iter().enumerate() {
            assert_eq!(logits.row(at), expected(index), "{want:?}");
        }
        assert_eq!(log.calls("head").iter().map(|call| call.rows.len()).sum::<usize>(), wanted.len());
        assert_eq!(log.calls("body").iter().map(|call| call.rows.len()).sum::<usize>(), 5, "the cache sees every row");
        assert_eq!(log.calls("body").iter().map(|call| call.wanted).sum::<usize>(), wanted.len());
        assert_eq!(log.calls("first").iter().map(|call| call.wanted).sum::<usize>(), 5);
    }
}

#[test]
fn flags_are_as_many_as_rows() {
    let (mut pipeline, log) = three_stages();
    for flags in [&[true][..], &[true; 3]] {
        let error = pipeline.step(&rows(0..2), Want::Each(flags), &mut HiddenRows::new(), &Control::new());
        assert!(matches!(error, Err(RunError::BadRows { .. })));
    }
    assert!(log.calls("first").is_empty());
}

#[test]
fn a_head_alone_has_no_say_in_truncation() {
    let (mut pipeline, _) = three_stages();
    pipeline.step(&rows(0..5), Want::Nothing, &mut HiddenRows::new(), &Control::new()).unwrap();
    assert_eq!(pipeline.truncate(SequenceId(0), 3), 3);
}

#[test]
fn a_segment_that_keeps_less_makes_the_others_follow() {
    let log = Log::default();
    let first = fake(&log, 0..2, Takes::Tokens, Yields::Hidden);
    let coarse = Fake { granule: 4, ..fake(&log, 2..4, Takes::Hidden, Yields::Logits) };
    let mut pipeline = Pipeline::new(vec![first.boxed(), coarse.boxed()], 4).unwrap();
    let mut logits = HiddenRows::new();
    pipeline.step(&rows(0..7), Want::Nothing, &mut logits, &Control::new()).unwrap();
    assert_eq!(pipeline.truncate(SequenceId(0), 20), 4, "7 positions are not a whole number of granules");
    assert_eq!(pipeline.truncate(SequenceId(0), 3), 0);
    pipeline.step(&rows(0..5), Want::Last, &mut logits, &Control::new()).unwrap();
    assert_eq!(logits.row(0), expected(4), "both continue from the same position");
}

#[test]
fn a_failure_in_a_later_segment_can_be_truncated_away() {
    let log = Log::default();
    let first = fake(&log, 0..2, Takes::Tokens, Yields::Hidden);
    let failing = Fake { fail_at: Some(4), ..fake(&log, 2..4, Takes::Hidden, Yields::Logits) };
    let mut pipeline = Pipeline::new(vec![first.boxed(), failing.boxed()], 4).unwrap();
    let mut logits = HiddenRows::new();
    pipeline.step(&rows(0..4), Want::Nothing, &mut logits, &Control::new()).unwrap();
    let error = pipeline.step(&rows(4..6), Want::Last, &mut logits, &Control::new()).unwrap_err();
    assert!(matches!(error, RunError::Failed { .. }));
    assert_eq!(pipeline.truncate(SequenceId(0), 4), 4);
    pipeline.step(&rows(4..6), Want::Last, &mut logits, &Control::new()).unwrap();
    assert_eq!(logits.row(0), expected(5));
}

#[test]
fn rows_of_another_shape_are_an_error_not_a_panic() {
    for (extra_rows, width) in [(1, WIDTH), (0, WIDTH + 1), (0, WIDTH - 1)] {
        for broken in 0..2 {
            let log = Log::default();
            let mut parts =
                [fake(&log, 0..2, Takes::Tokens, Yields::Hidden), fake(&log, 2..4, Takes::Hidden, Yields::Logits)];
            (parts[broken].extra_rows, parts[broken].real_width) = (extra_rows, width);
            let mut pipeline = Pipeline::new(parts.map(Fake::boxed).into(), 4).unwrap();
            let error = pipeline.step(&rows(0..2), Want::All, &mut HiddenRows::new(), &Control::new()).unwrap_err();
            assert!(matches!(error, RunError::BadRows { .. }), "{error}");
        }
    }
}

#[test]
fn begin_and_end_are_paired() {
    let log = Log::default();
    let broken = Fake { fail_begin: true, ..fake(&log, 2..3, Takes::Hidden, Yields::Hidden) };
    let parts =
        [fake(&log, 0..2, Takes::Tokens, Yields::Hidden), broken, fake(&log, 3..4, Takes::Hidden, Yields::Logits)];
    let mut pipeline = Pipeline::new(parts.map(Fake::boxed).into(), 4).unwrap();
    pipeline.begin().unwrap_err();
    assert_eq!(*log.0.lock().unwrap().lifecycle, ["begin 0..2", "end 0..2"]);
    let (mut pipeline, log) = three_stages();
    pipeline.begin().unwrap();
    pipeline.end();
    let wanted = ["begin 0..2", "begin 2..4", "begin 4..4", "end 4..4", "end 2..4", "end 0..2"];
    assert_eq!(*log.0.lock().unwrap().lifecycle, wanted);
}

#[test]
fn cancellation_is_seen_between_segments() {
    let (mut pipeline, log) = three_stages();
    let control = Control::new();
    log.0.lock().unwrap().cancel_in_first = Some(control.clone());
    let error = pipeline.step(&rows(0..7), Want::All, &mut HiddenRows::new(), &control).unwrap_err();
    assert!(matches!(error, RunError::Cancelled));
    assert_eq!((log.calls("first").len(), log.calls("body").len()), (1, 0));
    assert_eq!(pipeline.truncate(SequenceId(0), 0), 0);
}

const WIDTH: usize = 3;

fn three_stages() -> (Pipeline, Log) {
    let log = Log::default();
    let capacity = |positions, rows_per_call, sequences| SegmentCapacity { positions, rows_per_call, sequences };
    let first = Fake { capacity: capacity(12, 8, 2), ..fake(&log, 0..2, Takes::Tokens, Yields::Hidden) };
    let body = Fake { capacity: capacity(64, 3, 9), ..fake(&log, 2..4, Takes::Hidden, Yields::Normed) };
    let head = fake(&log, 4..4, Takes::Normed, Yields::Logits);
    (Pipeline::new(vec![first.boxed(), body.boxed(), head.boxed()], 4).unwrap(), log)
}

fn rows(positions: Range<u32>) -> Vec<Row> {
    positions.map(|position| Row { sequence: SequenceId(0), token: 100 + position, position }).collect()
}

/// The token, one for each of the four layers.
fn expected(index: usize) -> [f32; WIDTH] {
    [104.0 + index as f32; WIDTH]
}

#[derive(Clone)]
struct ForwardCall {
    segment: &'static str,
    rows: Range<u32>,
    wanted: usize,
}

#[derive(Default)]
struct Seen {
    calls: Vec<ForwardCall>,
    lifecycle: Vec<String>,
    cancel_in_first: Option<Control>,
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Seen>>);

impl Log {
    fn calls(&self, segment: &str) -> Vec<ForwardCall> {
        self.0.lock().unwrap().calls.iter().filter(|call| call.segment == segment).cloned().collect()
    }
}

/// Adds one for each of its layers.
struct Fake {
    log: Log,
    layers: Range<usize>,
    takes: Takes,
    yields: Yields,
    capacity: SegmentCapacity,
    held: usize,
    granule: usize,
    fail_at: Option<u32>,
    fail_begin: bool,
    extra_rows: usize,
    real_width: usize,
}

fn fake(log: &Log, layers: Range<usize>, takes: Takes, yields: Yields) -> Fake {
    let capacity = SegmentCapacity { positions: 64, rows_per_call: 64, sequences: 64 };
    let (granule, real_width) = (1, WIDTH);
    let (fail_at, fail_begin, extra_rows, held) = (None, false, 0, 0);
    let log = log.clone();
    Fake { log, layers, takes, yields, capacity, held, granule, fail_at, fail_begin, extra_rows, real_width }
}

impl Fake {
    fn boxed(self) -> Box<dyn Segment> {
        Box::new(self)
    }

    fn name(&self) -> &'static str {
        match self.takes {
            Takes::Tokens => "first",
            Takes::Hidden => "body",
            Takes::Normed => "head",
        }
    }
}

impl Segment for Fake {
    fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    fn takes(&self) -> Takes {
        self.takes
    }

    fn yields(&self) -> Yields {
        self.yields
    }

    fn width(&self) -> usize {
        WIDTH
    }

    fn capacity(&self) -> SegmentCapacity {
        self.capacity
    }

    fn device(&self) -> &str {
        "fake"
    }

    fn begin(&mut self) -> Result<(), RunError> {
        if self.fail_begin {
            return Err(RunError::Failed { run: None, state: "ERROR".to_owned(), detail: String::new() });
        }
        self.log.0.lock().unwrap().lifecycle.push(format!("begin {:?}", self.layers));
        Ok(())
    }

    fn end(&mut self) {
        self.log.0.lock().unwrap().lifecycle.push(format!("end {:?}", self.layers));
    }

    fn forward(&mut self, rows: &[Row], hidden: &mut HiddenRows, want: Want<'_>, _: &Control) -> Result<(), RunError> {
        let mut seen = self.log.0.lock().unwrap();
        assert!(rows.len() <= self.capacity.rows_per_call as usize);
        let span = rows[0].position..rows[rows.len() - 1].position + 1;
        let wanted = want.count(rows.len());
        // A head's rows may have gaps.
        let span = if self.layers.is_empty() { 0..rows.len() as u32 } else { span };
        seen.calls.push(ForwardCall { segment: self.name(), rows: span, wanted });
        if let (Takes::Tokens, Some(control)) = (self.takes, &seen.cancel_in_first) {
            control.cancel();
        }
        let mut inputs = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            if !self.layers.is_empty() {
                assert_eq!(row.position as usize, self.held, "rows continue what is held");
                self.held += 1;
            }
            if self.fail_at == Some(row.position) {
                self.fail_at = None;
                return Err(RunError::Failed { run: None, state: "ERROR".to_owned(), detail: String::new() });
            }
            inputs.push(if self.takes == Takes::Tokens { row.token as f32 } else { hidden.row(index)[0] });
        }
        hidden.reset(wanted + self.extra_rows, self.real_width);
        let selected = inputs.iter().enumerate().filter(|(index, _)| want.selects(*index, rows.len()));
        for (at, (_, input)) in selected.enumerate() {
            hidden.row_mut(at).fill(input + self.layers.len() as f32);
        }
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        self.held = self.held.min(len) / self.granule * self.granule;
        self.held
    }

    fn taps(&self) -> &[Tap] {
        &[]
    }

    fn observe(&mut self, _: Option<Box<dyn TapSink>>) {}
}
