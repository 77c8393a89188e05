//! Small random models on the CPU route, against the independent reference; and batch invariance.

use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Session, Stepper, TokenId, Want};
use npuhal_models::ModelSource;
use npuhal_registry::{DeviceAddress, DeviceChoice, Numerics, Options, Registry, Request, select};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::reference::{LogitsOf, Reference};
use proptest::prelude::*;
use std::num::NonZeroUsize;

/// Positions of each test sequence.
const LENGTH: usize = 9;
/// Ids of the kit's vocabulary that are plain bytes.
const BYTE_TOKENS: u32 = 256;

fn open(model: &ModelSource, numerics: Numerics, threads: usize, sequences: u32) -> Box<dyn Stepper> {
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let options =
        Options { numerics, threads: NonZeroUsize::new(threads), sequences: Some(sequences), ..Options::default() };
    let device = DeviceChoice::Pinned(DeviceAddress::Cpu.into());
    let request = Request { device, options, ..Request::default() };
    let choice = select(&registry, model, &request).unwrap();
    match choice.open(&registry, model, &request.options).unwrap() {
        Session::Stepper(stepper) => stepper,
        Session::Generator(_) => panic!("the CPU route opens steppers"),
    }
}

// The route is registered by a crate that must be named to be linked.
use npuhal_cpu as _;

/// The model as a file of the program's own reader.
fn source(spec: &ModelSpec, folder: &tempfile::TempDir) -> ModelSource {
    let path = folder.path().join("model.gguf");
    spec.build().write(&path).unwrap();
    ModelSource::open(&path).unwrap()
}

fn rows(sequence: u32, from: usize, tokens: &[TokenId]) -> Vec<Row> {
    let row = |(index, &token)| Row { sequence: SequenceId(sequence), token, position: (from + index) as u32 };
    tokens.iter().enumerate().map(row).collect()
}

fn step(stepper: &mut dyn Stepper, rows: &[Row], want: Want<'_>) -> Vec<Vec<f32>> {
    let mut logits = HiddenRows::new();
    stepper.step(rows, want, &mut logits, &Control::new()).unwrap();
    (0..logits.rows()).map(|row| logits.row(row).to_vec()).collect()
}

fn tokens() -> Vec<TokenId> {
    (0..LENGTH as u32).map(|index| (index * 37 + 11) % BYTE_TOKENS).collect()
}

/// Root-mean-square distance, relative to the reference's own size.
fn relative_distance(found: &[f32], wanted: &[f64]) -> f64 {
    let rms = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let distance = rms(&mut found.iter().zip(wanted).map(|(&found, wanted)| f64::from(found) - wanted));
    distance / rms(&mut wanted.iter().copied())
}

fn assert_matches(spec: &ModelSpec, numerics: Numerics, tolerance: f64) {
    let folder = tempfile::tempdir().unwrap();
    let model = source(spec, &folder);
    let file = spec.build();
    let wanted = Reference::new(&file).unwrap().forward(&tokens(), LogitsOf::All).unwrap().logits;
    let found = step(open(&model, numerics, 2, 1).as_mut(), &rows(0, 0, &tokens()), Want::All);
    assert_eq!(found.len(), wanted.len());
    for (position, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        let distance = relative_distance(found, wanted);
        assert!(distance < tolerance, "{spec:?}, {numerics}, position {position}: {distance:e}");
    }
}

#[test]
fn exact_equals_the_reference_on_every_architecture_and_type() {
    for architecture in Architecture::ALL {
        for weights in Weights::all() {
            // Residual streams and logits cross as f32; the reference keeps f64 throughout.
            assert_matches(&ModelSpec::small(architecture, weights), Numerics::Exact, 1e-5);
        }
    }
}

#[test]
fn fast_is_near_the_reference_on_every_architecture_and_type() {
    for architecture in Architecture::ALL {
        for weights in Weights::all() {
            // 15-bit activations, f16 keys and values.
            assert_matches(&ModelSpec::small(architecture, weights), Numerics::Fast, 2e-3);
        }
    }
}

#[test]
fn rope_variants_and_heads_of_their_own_equal_the_reference() {
    let small = |architecture| ModelSpec::small(architecture, Weights::LikeQ4KM);
    let variants = [
        ModelSpec { rope_factor: Some(4.0), ..small(Architecture::Llama) },
        ModelSpec { rope_factors: true, ..small(Architecture::Llama) },
        ModelSpec { tied: false, ..small(Architecture::Llama) },
        ModelSpec { tied: true, ..small(Architecture::Qwen2) },
        ModelSpec { tied: false, rope_theta: 1e6, ..small(Architecture::Qwen3) },
        ModelSpec { kv_heads: 8, ..small(Architecture::Qwen3) },
        ModelSpec { kv_heads: 1, ..small(Architecture::Llama) },
    ];
    for spec in variants {
        assert_matches(&spec, Numerics::Exact, 1e-5);
        assert_matches(&spec, Numerics::Fast, 2e-3);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A row's bits do not depend on batch size, chunk border, thread count, prefix split or the sequence beside it.
    #[test]
    fn a_row_is_bit_identical_however_it_is_batched(
        architecture in proptest::sample::select(Architecture::ALL.to_vec()),
        weights in proptest::sample::select(Weights::all()),
        numerics in proptest::sample::select(vec![Numerics::Exact, Numerics::Fast, Numerics::Int8]),
        tokens in proptest::collection::vec(0..BYTE_TOKENS, 2..40),
        parts in proptest::collection::vec(1..13usize, 1..6),
        threads in 1..4usize,
        kept in 0..40usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let model = source(&ModelSpec::small(architecture, weights), &folder);
        let bits = |rows: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
            rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
        };
        let wanted = bits(step(open(&model, numerics, 1, 1).as_mut(), &rows(0, 0, &tokens), Want::All));

        // In parts, on other threads, with a second sequence in every call.
        let mut stepper = open(&model, numerics, threads, 2);
        let mut found = Vec::new();
        let mut parts = parts.iter().cycle();
        while found.len() < tokens.len() {
            let from = found.len();
            let part = &tokens[from..tokens.len().min(from + parts.next().unwrap())];
            let mut batch = rows(1, from, part);
            batch.extend(rows(0, from, part));
            let flags: Vec<bool> = (0..batch.len()).map(|index| index >= part.len()).collect();
            found.extend(bits(step(stepper.as_mut(), &batch, Want::Each(&flags))));
        }
        prop_assert_eq!(&found, &wanted);

        // From a kept prefix.
        let kept = stepper.truncate(SequenceId(0), kept.min(tokens.len() - 1));
        let found = bits(step(stepper.as_mut(), &rows(0, kept, &tokens[kept..]), Want::All));
        prop_assert_eq!(&found[..], &wanted[kept..]);
    }
}
