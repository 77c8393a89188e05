//! Models spread over devices.

use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Session, Stepper, Want};
use npuhal_models::{ModelSource, WeightType};
use npuhal_registry::agreement::live::{LiveTrial, hold};
use npuhal_registry::{Options, Registry, Target};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::parity::{open, report, write};
use tempfile::TempDir;

use npuhal_cpu as _;

fn registry() -> Registry {
    Registry::collect(&["npuhal-cpu"]).unwrap()
}

fn model(folder: &TempDir) -> ModelSource {
    let spec = ModelSpec {
        hidden: 256,
        layers: 4,
        heads: 6,
        kv_heads: 2,
        head_dim: 64,
        intermediate: 512,
        ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::Q8_0))
    };
    write(&spec, folder.path(), "model")
}

fn logits(stepper: &mut dyn Stepper, tokens: &[u32]) -> Vec<u32> {
    let row = |(position, &token): (usize, &u32)| Row { sequence: SequenceId(0), token, position: position as u32 };
    let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
    let mut logits = HiddenRows::new();
    stepper.begin().unwrap();
    stepper.step(&rows, Want::All, &mut logits, &Control::new()).unwrap();
    stepper.end();
    logits.as_slice().iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_split_over_one_arithmetic_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, model) = (registry(), model(&folder));
    let tokens = [1, 65, 200, 30, 7, 99];
    for (whole, split) in [
        ("cpu:fast", "0..1@cpu?threads=1,1..3@cpu?threads=2,3..@cpu"),
        ("cpu:fast", "..4@cpu,4..@cpu"),
        ("cpu:xdna1-smollm", "..2@cpu:xdna1-smollm,2..@cpu:xdna1-smollm?threads=2"),
    ] {
        let mut one = open(&registry, &model, whole).unwrap();
        let mut parts = open(&registry, &model, split).unwrap();
        assert_eq!(parts.stepper.placement().len(), split.split(',').count());
        assert_eq!(logits(one.stepper.as_mut(), &tokens), logits(parts.stepper.as_mut(), &tokens), "{split}");
        // Forgetting positions reaches every part.
        assert_eq!(parts.stepper.truncate(SequenceId(0), 2), 2);
    }
}

#[test]
fn parts_of_different_arithmetic_agree_with_exact() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, model) = (registry(), model(&folder));
    for split in [
        "0..2@cpu:exact,2..@cpu:fast",
        "0..1@cpu:xdna1-smollm,1..@cpu:exact",
        "0..3@cpu:fast,3..@cpu:xdna1-cpu?threads=1",
    ] {
        let mut reference = open(&registry, &model, "cpu:exact").unwrap();
        let mut found = open(&registry, &model, split).unwrap();
        let tolerance = reference.tolerance.with(found.tolerance);
        let report = report(&mut reference, &mut found, tolerance).unwrap();
        assert!(report.passed, "{split}:\n{}", npuhal_registry::parity::text(&report));
        assert_eq!(report.taps.len(), 4 * 3 + 2, "every layer is seen, whoever runs it: {:?}", report.not_compared);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, model) = (registry(), model(&folder));
    let message = |target: &str| open(&registry, &model, target).err().unwrap_or_default();
    assert!(
        message("0..2@cpu,3..@cpu").contains("layers 3..4 on cpu after layer 2 of 4"),
        "{}",
        message("0..2@cpu,3..@cpu")
    );
    assert!(message("0..2@npu1,2..@cpu").contains("there is no device 'npu1'"), "{}", message("0..2@npu1,2..@cpu"));
    assert!(message("0..9@cpu").contains("layers 0..9 on cpu"));
}

#[test]
fn placements_of_this_machine_agree_and_prove_where_they_ran() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, model) = (registry(), model(&folder));
    let target = |text: &str| {
        let target = Target::parse(text, &Options::default(), &[]).unwrap();
        (text.to_owned(), target)
    };
    let targets = [target("cpu"), target("cpu:exact"), target("0..2@cpu:exact,2..@cpu")];
    let trial =
        LiveTrial { name: "small".to_owned(), prompt: vec![1, 70, 3], positions: 10, top_k: 5, margin_threshold: 1.0 };
    let report = hold(&registry, &model, &targets, &trial, &Control::new()).unwrap();
    assert!(report.agreement.passed, "{report:?}");
    assert_eq!((report.ids.len(), &report.ids[..3]), (10, &[1, 70, 3][..]));
    assert_eq!(report.agreement.by_name()["cpu"].top1_matches, 10);
    assert!(report.evidence.iter().all(|evidence| evidence.repeats));
    assert_eq!(report.evidence[2].stages, ["cpu: layers 0..2", "cpu: layers 2..4"]);
    assert_eq!(report.evidence[2].route, "split");
    let small = LiveTrial { positions: 300, ..trial };
    let error = hold(&registry, &model, &targets, &small, &Control::new()).unwrap_err();
    assert!(error.to_string().contains("has 256 positions; the trial needs 300"), "{error}");
}

#[test]
fn a_session_is_one_of_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, model) = (registry(), model(&folder));
    let target = Target::parse("0..2@cpu,2..@cpu", &Options::default(), &[]).unwrap();
    let choice = target.choose(&registry, &model).unwrap();
    assert_eq!(choice.service.window, 256);
    let line = choice.decision.line();
    assert!(line.contains("0..2 by cpu ("), "{line}");
    assert!(matches!(choice.open(&registry, &model, &target.options).unwrap(), Session::Stepper(_)));
}
