//! Whole segments over small random models: against a scalar f64 pass, and batch invariance.

mod common;

use common::Random;
use common::model::{config, exact_logits, model};
use npuhal_core::error::RunError;
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SequenceId, Stepper, Takes, Tap, TapSink, TokenId, Want, Yields,
};
use npuhal_cpu::CpuError;
use npuhal_cpu::activations::Precision;
use npuhal_cpu::fast::{CpuOptions, FastSegment, ROWS_PER_CALL};
use npuhal_cpu::features::Features;
use npuhal_models::{ModelSource, WeightType};
use npuhal_registry::SegmentSpan;
use proptest::prelude::*;
use std::sync::{Arc, Mutex};

const MODEL_TYPES: [&str; 3] = ["llama", "qwen2", "qwen3"];

fn options(threads: usize, features: Features) -> CpuOptions {
    CpuOptions { threads, positions: 600, sequences: 3, features, precision: Precision::Bits15 }
}

fn whole(source: &ModelSource, threads: usize, features: Features) -> FastSegment {
    in_precision(source, Precision::Bits15, threads, features)
}

fn in_precision(source: &ModelSource, precision: Precision, threads: usize, features: Features) -> FastSegment {
    let options = CpuOptions { precision, ..options(threads, features) };
    FastSegment::load(source, SegmentSpan::whole(source.config()), options).unwrap()
}

fn rows(sequence: u32, from: usize, tokens: &[TokenId]) -> Vec<Row> {
    let row = |(index, &token)| Row { sequence: SequenceId(sequence), token, position: (from + index) as u32 };
    tokens.iter().enumerate().map(row).collect()
}

fn tokens(random: &mut Random, count: usize) -> Vec<TokenId> {
    (0..count).map(|_| random.below(93) as TokenId).collect()
}

fn forward(segment: &mut dyn Segment, rows: &[Row], want: Want<'_>) -> Vec<Vec<u32>> {
    let mut hidden = HiddenRows::new();
    segment.forward(rows, &mut hidden, want, &Control::new()).unwrap();
    (0..hidden.rows()).map(|row| hidden.row(row).iter().map(|x| x.to_bits()).collect()).collect()
}

/// Every position in calls of the given sizes, over and over.
fn in_parts(segment: &mut dyn Segment, sequence: u32, tokens: &[TokenId], parts: &[usize]) -> Vec<Vec<u32>> {
    let mut out = Vec::new();
    let mut parts = parts.iter().cycle();
    let mut at = 0;
    while at < tokens.len() {
        let count = (*parts.next().unwrap()).min(tokens.len() - at).min(ROWS_PER_CALL as usize);
        out.extend(forward(segment, &rows(sequence, at, &tokens[at..at + count]), Want::All));
        at += count;
    }
    out
}

#[test]
fn every_architecture_and_type_matches_the_scalar_pass() {
    for model_type in MODEL_TYPES {
        for weight_type in WeightType::ALL {
            let mut random = Random(weight_type.block_bytes() as u64);
            let source = model(&config(model_type), weight_type, 7);
            let tokens = tokens(&mut random, 5);
            let exact = exact_logits(&source, &tokens);
            for features in std::iter::once(Features::portable()).chain(Features::avx2()) {
                // 15-bit inputs, or 8-bit ones, and f16 keys and values through three layers.
                for (precision, limit) in [(Precision::Bits15, 2e-3), (Precision::Bits8, 6e-2)] {
                    let mut segment = in_precision(&source, precision, 2, features);
                    let found = forward(&mut segment, &rows(0, 0, &tokens), Want::All);
                    for (found, exact) in found.iter().zip(&exact) {
                        let distance = relative_distance(found, exact);
                        assert!(distance < limit, "{model_type} {weight_type} {precision:?}: {distance}");
                    }
                }
            }
        }
    }
}

/// Root-mean-square distance, as a share of the exact row's own size.
fn relative_distance(found: &[u32], exact: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let size: f64 = exact.iter().copied().map(square).sum();
    let pairs = found.iter().zip(exact);
    let distance: f64 = pairs.map(|(&found, exact)| square(f64::from(f32::from_bits(found)) - exact)).sum();
    (distance / size).sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 2 } else { 12 }))]

    #[test]
    fn a_rows_bits_depend_on_its_sequence_alone(
        model_type in 0..MODEL_TYPES.len(),
        weight_type in 0..WeightType::ALL.len(),
        len in prop::sample::select(vec![3usize, 20, 140, 290]),
        parts in prop::collection::vec(prop::sample::select(vec![1usize, 2, 3, 4, 5, 17, 64, 128]), 1..4),
        threads in 1..4usize,
        precision in prop::sample::select(vec![Precision::Bits15, Precision::Bits8]),
        seed: u64,
    ) {
        let mut random = Random(seed);
        let source = model(&config(MODEL_TYPES[model_type]), WeightType::ALL[weight_type], seed);
        let tokens = tokens(&mut random, len);
        let features = Features::detect();
        let one_by_one = in_parts(&mut in_precision(&source, precision, 1, features), 0, &tokens, &[1]);
        let mut segment = in_precision(&source, precision, threads, features);
        prop_assert!(in_parts(&mut segment, 1, &tokens, &parts) == one_by_one, "parts {parts:?}");

        // A prefix kept from another run.
        let kept = random.below(len);
        prop_assert_eq!(segment.truncate(SequenceId(1), kept), kept);
        let rest: Vec<TokenId> = tokens[kept..].iter().copied().take(64).collect();
        let again = forward(&mut segment, &rows(1, kept, &rest), Want::Last);
        prop_assert!(again[0] == one_by_one[kept + rest.len() - 1], "prefix of {kept}");

        // Rows of two sequences mixed in one call.
        let half = tokens.len().min(20) / 2 + 1;
        let mut mixed = rows(0, 0, &tokens[..half]);
        mixed.extend(rows(2, 0, &tokens[..half]));
        mixed.sort_by_key(|row| row.position);
        let found = forward(&mut segment, &mixed, Want::All);
        for (row, found) in mixed.iter().zip(found) {
            prop_assert!(found == one_by_one[row.position as usize], "mixed sequences");
        }
    }
}

#[test]
fn wishes_select_rows() {
    let source = model(&config("qwen2"), WeightType::Q4K, 3);
    let mut random = Random(1);
    let tokens = tokens(&mut random, 6);
    let mut segment = whole(&source, 2, Features::detect());
    let all = forward(&mut segment, &rows(0, 0, &tokens), Want::All);
    let mut ask = |want| {
        segment.truncate(SequenceId(0), 0);
        forward(&mut segment, &rows(0, 0, &tokens), want)
    };
    assert!(ask(Want::Nothing).is_empty());
    assert_eq!(ask(Want::Last), all[5..]);
    let flags = [true, false, false, true, true, false];
    assert_eq!(ask(Want::Each(&flags)), [all[0].clone(), all[3].clone(), all[4].clone()]);
    // After a call that wanted nothing, the cache is whole.
    ask(Want::Nothing);
    assert_eq!(segment.truncate(SequenceId(0), 5), 5);
    assert_eq!(forward(&mut segment, &rows(0, 5, &tokens[5..]), Want::All), all[5..]);
}

#[test]
fn segments_chain_to_the_bits_of_the_whole() {
    for model_type in MODEL_TYPES {
        let source = model(&config(model_type), WeightType::Q5_0, 11);
        let mut random = Random(2);
        let tokens = tokens(&mut random, 9);
        let features = Features::detect();
        let wanted = forward(&mut whole(&source, 1, features), &rows(0, 0, &tokens), Want::All);
        let part = |layers: std::ops::Range<usize>, takes, yields| -> Box<dyn Segment> {
            let span = SegmentSpan { layers, takes, yields };
            Box::new(FastSegment::load(&source, span, options(2, features)).unwrap())
        };
        let chains = [
            vec![part(0..2, Takes::Tokens, Yields::Hidden), part(2..3, Takes::Hidden, Yields::Logits)],
            vec![
                part(0..0, Takes::Tokens, Yields::Hidden),
                part(0..1, Takes::Hidden, Yields::Hidden),
                part(1..3, Takes::Hidden, Yields::Normed),
                part(3..3, Takes::Normed, Yields::Logits),
            ],
            vec![part(0..3, Takes::Tokens, Yields::Hidden), part(3..3, Takes::Hidden, Yields::Logits)],
        ];
        for chain in chains {
            let mut pipeline = Pipeline::new(chain, 3).unwrap();
            let mut logits = HiddenRows::new();
            pipeline.step(&rows(0, 0, &tokens[..7]), Want::All, &mut logits, &Control::new()).unwrap();
            for (row, wanted) in wanted[..7].iter().enumerate() {
                assert!(logits.row(row).iter().map(|x| x.to_bits()).eq(wanted.iter().copied()));
            }
            pipeline.step(&rows(0, 7, &tokens[7..]), Want::Last, &mut logits, &Control::new()).unwrap();
            assert!(logits.row(0).iter().map(|x| x.to_bits()).eq(wanted[8].iter().copied()));
        }
    }
}

type Observed = Arc<Mutex<Vec<(Tap, Row, Vec<f32>)>>>;

struct Keeper(Observed);

impl TapSink for Keeper {
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]) {
        self.0.lock().unwrap().push((tap, row, values.to_vec()));
    }
}

#[test]
fn taps_show_every_row_and_change_nothing() {
    let config = config("qwen3");
    let source = model(&config, WeightType::Q6K, 4);
    let mut random = Random(3);
    let tokens = tokens(&mut random, 4);
    let mut segment = whole(&source, 2, Features::detect());
    let wanted = forward(&mut segment, &rows(0, 0, &tokens), Want::Last);
    segment.truncate(SequenceId(0), 0);
    let seen = Observed::default();
    segment.observe(Some(Box::new(Keeper(Arc::clone(&seen)))));
    assert_eq!(forward(&mut segment, &rows(0, 0, &tokens), Want::Last), wanted);
    let seen = seen.lock().unwrap();
    for &tap in segment.taps() {
        let of_tap: Vec<_> = seen.iter().filter(|(seen, ..)| *seen == tap).collect();
        let (count, width) = match tap {
            Tap::LayerOut(_) => (4, config.hidden_size),
            Tap::K(_) | Tap::V(_) => (4, config.kv_width()),
            Tap::Normed => (1, config.hidden_size),
            _ => (1, config.vocab_size),
        };
        assert_eq!(of_tap.len(), count, "{tap:?}");
        assert!(of_tap.iter().all(|(_, _, values)| values.len() == width), "{tap:?}");
    }
    let logits = seen.iter().find(|(tap, ..)| *tap == Tap::Logits).unwrap();
    assert!(logits.2.iter().map(|x| x.to_bits()).eq(wanted[0].iter().copied()));
    assert_eq!(logits.1.position, 3);
}

#[test]
fn what_cannot_be_run_is_an_error_and_leaves_the_segment_usable() {
    let source = model(&config("llama"), WeightType::Q8_0, 5);
    let mut segment = whole(&source, 1, Features::detect());
    let mut hidden = HiddenRows::new();
    let control = Control::new();
    let mut run = |rows: &[Row], want| segment.forward(rows, &mut hidden, want, &control);
    assert!(matches!(run(&rows(0, 0, &[93]), Want::Last), Err(RunError::BadRows { .. })));
    assert!(matches!(run(&rows(0, 1, &[1]), Want::Last), Err(RunError::BadRows { .. })));
    assert!(matches!(run(&rows(3, 0, &[1]), Want::Last), Err(RunError::Capacity { .. })));
    assert!(matches!(run(&rows(0, 0, &[1; 129]), Want::Last), Err(RunError::Capacity { limit: 128, .. })));
    assert!(matches!(run(&rows(0, 0, &[1]), Want::Each(&[])), Err(RunError::BadRows { .. })));
    let cancelled = Control::new();
    cancelled.cancel();
    let result = segment.forward(&rows(0, 0, &[1]), &mut hidden, Want::Last, &cancelled);
    assert!(matches!(result, Err(RunError::Cancelled)));
    assert!(segment.forward(&rows(0, 0, &[1, 2]), &mut hidden, Want::Last, &control).is_ok());
    assert!(segment.forward(&[], &mut hidden, Want::Last, &control).is_ok());
    assert_eq!(hidden.rows(), 0);

    let span = SegmentSpan { layers: 1..3, takes: Takes::Hidden, yields: Yields::Hidden };
    let mut middle = FastSegment::load(&source, span, options(1, Features::detect())).unwrap();
    hidden.reset(1, 255);
    let result = middle.forward(&rows(0, 0, &[1]), &mut hidden, Want::All, &control);
    assert!(matches!(result, Err(RunError::BadRows { .. })));
    let bad = SegmentSpan { layers: 1..3, takes: Takes::Tokens, yields: Yields::Hidden };
    assert!(matches!(FastSegment::load(&source, bad, options(1, Features::detect())), Err(CpuError::Span(_))));
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    let source = model(&config("qwen2"), WeightType::Q4_1, 6);
    let span = SegmentSpan { layers: 3..3, takes: Takes::Hidden, yields: Yields::Logits };
    let mut head = FastSegment::load(&source, span, options(1, Features::detect())).unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        let mut hidden = HiddenRows::new();
        hidden.reset(1, 256);
        hidden.row_mut(0)[17] = bad;
        let result = head.forward(&rows(0, 0, &[0]), &mut hidden, Want::All, &Control::new());
        assert!(matches!(result, Err(RunError::NotFinite { .. })));
    }
}
