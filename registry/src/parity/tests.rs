use super::*;
use npuhal_core::stage::{Placement, SegmentCapacity, Yields};

/// Layers that add one number each to a hidden row; `broken` adds another one.
struct Fake {
    layers: u32,
    broken: Option<(u32, u32, f32)>,
    has_values: bool,
    sink: Option<SharedTapSink>,
}

impl Fake {
    fn new(layers: u32) -> Self {
        Self { layers, broken: None, has_values: true, sink: None }
    }
}

impl Stepper for Fake {
    fn vocab_size(&self) -> usize {
        8
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: 64, rows_per_call: 1, sequences: 1 }
    }

    fn placement(&self) -> Vec<Placement> {
        vec![Placement { layers: 0..self.layers as usize, device: "fake".to_owned(), yields: Yields::Logits }]
    }

    fn begin(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    fn end(&mut self) {}

    fn step(&mut self, rows: &[Row], _: Want<'_>, logits: &mut HiddenRows, _: &Control) -> Result<(), RunError> {
        let row = rows[0];
        let mut hidden: Vec<f32> = (0..8).map(|element| (row.token * 7 + element * 3) as f32 % 5.0 + 1.0).collect();
        for layer in 0..self.layers {
            let mut observe = |tap, values: &[f32]| {
                if let Some(sink) = &mut self.sink {
                    sink.observe(tap, row, values);
                }
            };
            observe(Tap::K(layer), &hidden[..4]);
            if self.has_values {
                observe(Tap::V(layer), &hidden[4..]);
            }
            hidden.iter_mut().for_each(|value| *value += 0.25);
            if let Some((position, broken, change)) = self.broken
                && (row.position, layer) == (position, broken)
            {
                hidden[3] += change;
            }
            observe(Tap::LayerOut(layer), &hidden);
        }
        if hidden.iter().any(|value| value.is_infinite()) {
            return Err(RunError::NotFinite { what: "Logits".to_owned() });
        }
        logits.reset(1, 8);
        logits.row_mut(0).copy_from_slice(&hidden);
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        len
    }

    fn taps(&self) -> Vec<Tap> {
        let layer = |layer| {
            let value = self.has_values.then_some(Tap::V(layer));
            [Tap::K(layer)].into_iter().chain(value).chain([Tap::LayerOut(layer)])
        };
        (0..self.layers).flat_map(layer).collect()
    }

    fn observe(&mut self, sink: Option<SharedTapSink>) {
        self.sink = sink;
    }
}

fn compare_with(change: impl Fn(&mut Fake)) -> ParityReport {
    let (mut one, mut other) = (Fake::new(4), Fake::new(4));
    change(&mut other);
    let request = ParityRequest { ids: seeded_ids(5, 8, 1), top_k: 3, tolerance: Tolerance::EXACT };
    let side = |name: &str, stepper| Side { name: name.to_owned(), stepper };
    let report = hold(side("reference", &mut one), side("found", &mut other), &request, &Control::new()).unwrap();
    assert!(one.sink.is_none() && other.sink.is_none(), "the observers are taken away");
    report
}

#[test]
fn equal_sessions_pass_in_every_measure() {
    let report = compare_with(|_| ());
    assert!(report.passed && report.first_divergence.is_none(), "{report:?}");
    assert_eq!(report.taps.len(), 4 * 3 + 1);
    assert_eq!(report.taps[0].tap, "K(0)");
    assert_eq!(report.taps.last().unwrap().tap, "Logits");
    for tap in &report.taps {
        assert_eq!((tap.positions, tap.max_abs_error, tap.max_bf16_ulp), (5, 0.0, 0), "{}", tap.tap);
        assert_eq!((tap.within_one_bf16_ulp, tap.out_of_tolerance), (1.0, 0));
    }
    assert_eq!((report.tops.argmax_matches, report.tops.min_overlap, report.tops.mean_overlap), (5, 3, 3.0));
}

#[test]
fn an_error_is_located_by_position_and_layer() {
    let report = compare_with(|fake| fake.broken = Some((3, 2, -4.0)));
    let first = report.first_divergence.as_ref().unwrap();
    assert_eq!((first.position, first.tap.as_str(), first.layer, first.element), (3, "LayerOut(2)", Some(2), 3));
    let out: Vec<&str> =
        report.taps.iter().filter(|tap| tap.out_of_tolerance > 0).map(|tap| tap.tap.as_str()).collect();
    assert_eq!(out, ["LayerOut(2)", "K(3)", "LayerOut(3)", "Logits"]);
    let text = text(&report);
    assert!(text.contains("first divergence: position 3, LayerOut(2)"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("FAIL"), "{text}");
    assert!(markdown(&report).contains("| K(3) |"));
}

#[test]
fn a_number_that_is_none_is_out_of_tolerance_and_shown() {
    let report = compare_with(|fake| fake.broken = Some((0, 0, f32::NAN)));
    assert_eq!(report.first_divergence.as_ref().unwrap().tap, "LayerOut(0)");
    let tap = report.taps.iter().find(|tap| tap.tap == "LayerOut(0)").unwrap();
    assert!(tap.max_abs_error.is_nan() && tap.min_cosine.is_nan());
    assert_eq!(tap.max_bf16_ulp, u32::MAX);
}

#[test]
fn a_session_that_gives_up_is_located_all_the_same() {
    let report = compare_with(|fake| fake.broken = Some((2, 1, f32::INFINITY)));
    let first = report.first_divergence.as_ref().unwrap();
    assert_eq!((first.position, first.tap.as_str()), (2, "LayerOut(1)"));
    assert!(report.ended_early.as_ref().unwrap().starts_with("found: "), "{report:?}");
    assert_eq!((report.passed, report.tops.positions), (false, 3), "nothing is compared behind it");
}

#[test]
fn taps_of_one_side_only_are_named() {
    let report = compare_with(|fake| fake.has_values = false);
    assert_eq!(report.not_compared, ["V(0)", "V(1)", "V(2)", "V(3)"]);
    assert!(report.passed);
}

#[test]
fn sessions_of_different_shape_are_an_error() {
    let (mut one, mut other) = (Fake::new(2), Fake::new(3));
    let request = ParityRequest { ids: vec![1], top_k: 3, tolerance: Tolerance::EXACT };
    let report = hold(
        Side { name: "a".to_owned(), stepper: &mut one },
        Side { name: "b".to_owned(), stepper: &mut other },
        &request,
        &Control::new(),
    )
    .unwrap();
    assert_eq!(report.not_compared, ["K(2)", "V(2)", "LayerOut(2)"]);
    assert!(!report.passed, "the logits differ");
}

#[test]
fn drawn_ids_are_in_the_vocabulary_and_repeat() {
    let ids = seeded_ids(200, 93, 7);
    assert!(ids.iter().all(|&id| id < 93));
    assert_eq!(ids, seeded_ids(200, 93, 7));
    assert_ne!(ids, seeded_ids(200, 93, 8));
}
