//! Every arithmetic of the CPU, held against the exact one, and a damaged weight located.

use npuhal_models::{ModelSource, WeightType};
use npuhal_registry::{Registry, Tolerance};
use npuhal_tests::kit::gguf::GgufFile;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::parity::{ParitySubject, open, report, run, written};
use std::path::Path;

use npuhal_cpu as _;

fn registry() -> Registry {
    Registry::collect(&["npuhal-cpu"]).unwrap()
}

#[track_caller]
fn assert_parity(subject: &ParitySubject) {
    let folder = tempfile::tempdir().unwrap();
    let outcome = run(&registry(), subject, &written(folder.path()));
    assert!(outcome.wrong.is_empty(), "{}:\n{}", subject.target, outcome.wrong.join("\n"));
    assert!(!outcome.passed.is_empty(), "{}: no model was compared", subject.target);
}

const HEAD_NORMS: (&str, &str) = ("qwen3-q4_k_m", "the lane does not norm query and key heads");

#[test]
fn fast_agrees_with_exact() {
    assert_parity(&ParitySubject::new("cpu:fast"));
}

#[test]
fn int8_agrees_with_exact() {
    assert_parity(&ParitySubject::new("cpu:int8"));
}

#[test]
fn exact_agrees_with_itself_whatever_the_threads() {
    assert_parity(&ParitySubject::new("cpu:exact?threads=3"));
}

#[test]
fn the_smollm_twins_agree_with_exact() {
    for target in ["cpu:xdna1-smollm", "cpu:xdna1-smollm-chunk"] {
        assert_parity(&ParitySubject {
            unsupported: &[
                HEAD_NORMS,
                ("qwen2-bf16", "the SmolLM designs add no biases"),
                ("qwen2-q8_0", "the SmolLM designs add no biases"),
            ],
            ..ParitySubject::new(target)
        });
    }
}

#[test]
fn the_qwen_twin_agrees_with_exact() {
    assert_parity(&ParitySubject { unsupported: &[HEAD_NORMS], ..ParitySubject::new("cpu:xdna1-qwen") });
}

#[test]
fn the_twin_of_the_cpu_stage_agrees_with_exact() {
    assert_parity(&ParitySubject { unsupported: &[HEAD_NORMS], ..ParitySubject::new("cpu:xdna1-cpu") });
}

#[test]
fn lists_that_are_wrong_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let subject = ParitySubject {
        unsupported: &[("llama-f32", "it is supported"), ("gone", "why")],
        expected_failures: &[("llama-bf16", "it passes")],
        ..ParitySubject::new("cpu:fast")
    };
    let wrong = run(&registry(), &subject, &written(folder.path())).wrong;
    for text in ["gone is listed as unsupported", "llama-f32 is taken", "llama-bf16 passed, but a failure is expected"]
    {
        assert!(wrong.iter().any(|line| line.contains(text)), "{text}: {wrong:?}");
    }
}

/// The largest weight of the row `row` of `tensor` whose exponent has bit `bit` clear gets it set.
fn flip(file: &mut GgufFile, tensor: &str, row: usize, bit: u32) {
    let tensor = file.tensors.iter_mut().find(|held| held.name == tensor).unwrap();
    let cols = tensor.dims[0] as usize;
    let row = &mut tensor.bytes.as_chunks_mut::<4>().0[row * cols..(row + 1) * cols];
    let mask = 1u32 << (23 + bit);
    let clear = row.iter_mut().filter(|bytes| u32::from_le_bytes(**bytes) & mask == 0);
    let weight = clear.max_by(|a, b| f32::from_le_bytes(**a).abs().total_cmp(&f32::from_le_bytes(**b).abs())).unwrap();
    *weight = (u32::from_le_bytes(*weight) | mask).to_le_bytes();
}

fn damaged(file: &GgufFile, folder: &Path, tensor: &str, bit: u32) -> ModelSource {
    let mut file = file.clone();
    flip(&mut file, tensor, 5, bit);
    let path = folder.join(format!("{tensor}.gguf"));
    file.write(&path).unwrap();
    ModelSource::open(&path).unwrap()
}

const LAYERS: usize = 3;
const MATRICES: [&str; 7] = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

fn spec() -> ModelSpec {
    ModelSpec {
        hidden: 128,
        layers: LAYERS,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        intermediate: 256,
        ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32))
    }
}

/// Compares a sound model on one target with a damaged one on another; the layer of the first divergence.
fn located(sound: &ModelSource, broken: &ModelSource, targets: [&str; 2], tolerance: Option<Tolerance>) -> Option<u32> {
    let registry = registry();
    let mut reference = open(&registry, sound, targets[0]).unwrap();
    let mut found = open(&registry, broken, targets[1]).unwrap();
    let tolerance = tolerance.unwrap_or(reference.tolerance.with(found.tolerance));
    report(&mut reference, &mut found, tolerance).unwrap().first_divergence?.layer
}

#[test]
fn a_flipped_exponent_bit_is_located_in_every_arithmetic() {
    let folder = tempfile::tempdir().unwrap();
    let file = spec().build();
    let path = folder.path().join("sound.gguf");
    file.write(&path).unwrap();
    let sound = ModelSource::open(&path).unwrap();
    // Bits 2 and 7 of the exponent: times 16, and times 2^128.
    for bit in [2, 7] {
        for layer in 0..LAYERS {
            for matrix in MATRICES {
                let tensor = format!("blk.{layer}.{matrix}.weight");
                let broken = damaged(&file, folder.path(), &tensor, bit);
                for target in ["cpu:exact", "cpu:fast", "cpu:xdna1-smollm", "cpu:xdna1-qwen", "cpu:xdna1-cpu"] {
                    let found = located(&sound, &broken, [target; 2], Some(Tolerance::EXACT));
                    let layer = layer as u32;
                    assert!(
                        found.is_some_and(|found| (layer..=layer + 1).contains(&found)),
                        "{target}, {tensor}, bit {bit}: located in {found:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_flipped_exponent_bit_is_located_by_another_arithmetic() {
    let folder = tempfile::tempdir().unwrap();
    let file = spec().build();
    let path = folder.path().join("sound.gguf");
    file.write(&path).unwrap();
    let sound = ModelSource::open(&path).unwrap();
    for layer in 0..LAYERS {
        for matrix in MATRICES {
            let tensor = format!("blk.{layer}.{matrix}.weight");
            let broken = damaged(&file, folder.path(), &tensor, 7);
            for target in ["cpu:fast", "cpu:xdna1-smollm", "cpu:xdna1-qwen", "cpu:xdna1-cpu"] {
                // What the lanes are held to on real models, with their large activations, is too wide for these.
                let lane = Tolerance { cosine: 0.99, relative_error: 1.0, near_tie: 0.5 };
                let tolerance = (target != "cpu:fast").then_some(lane);
                let found = located(&sound, &broken, ["cpu:exact", target], tolerance);
                let layer = layer as u32;
                assert!(
                    found.is_some_and(|found| (layer..=layer + 1).contains(&found)),
                    "{target}, {tensor}: located in {found:?}"
                );
            }
        }
    }
}
