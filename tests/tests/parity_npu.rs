//! Every form of the NPU routes on the virtual NPU, held against the CPU's twin of the lane, and a damaged weight located.

#![allow(clippy::print_stdout, reason = "measured figures are a part of what the tests show")]

use npuhal_amdxdna::{NpuDevice, NpuIdentity};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use npuhal_core::stage::Control;
use npuhal_models::package::{Family, OpenOptions, Package};
use npuhal_models::q4nx::{PackOptions, Q4nxFile, pack};
use npuhal_models::{ModelSource, WeightType, vocabulary::Vocabulary};
use npuhal_registry::parity::Divergence;
use npuhal_registry::{DeviceFactory, DeviceUri, Origin, Registry, Tolerance, Unavailable};
use npuhal_tests::kit::kernels::{lane_kernels, write_kernels, xdna1_kernels};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_tests::models::left_to_soak;
use npuhal_tests::parity::{ParitySubject, open, report, run, write};
use npuhal_virtual::{SpecError, VirtualDevice, VirtualSpec};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use tempfile::TempDir;

use npuhal_cpu as _;
use npuhal_xdna1 as _;
use npuhal_xdna2 as _;

/// Layers of the small models.
const LAYERS: usize = 4;
/// Virtual NPUs that were opened: at the end none may have seen anything wrong.
static OPENED: Mutex<Vec<Arc<VirtualDevice>>> = Mutex::new(Vec::new());

/// Makes `virtual:npu1` and `virtual:npu5`.
struct VirtualNpus;

impl DeviceFactory for VirtualNpus {
    fn name(&self) -> &str {
        "virtual"
    }

    fn generations(&self) -> &[Generation] {
        &[Generation::Xdna1, Generation::Xdna2]
    }

    fn looks_for_hardware(&self) -> bool {
        false
    }

    fn enumerate(&self) -> Vec<DeviceCard> {
        ["virtual:npu1", "virtual:npu5"].map(|id| connect(id).unwrap().1.card().clone()).to_vec()
    }

    fn check(&self, _: &DeviceCard) -> Result<(), Unavailable> {
        Ok(())
    }

    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError> {
        let (hardware, device) = connect(&uri.to_string())?;
        OPENED.lock().unwrap().push(hardware);
        Ok(Box::new(device))
    }
}

fn connect(text: &str) -> Result<(Arc<VirtualDevice>, NpuDevice), DeviceError> {
    let id = text.split('?').next().unwrap_or(text).to_owned();
    let spec: VirtualSpec = text.parse().map_err(|error: SpecError| DeviceError::Unsupported {
        device: id.clone(),
        feature: error.to_string(),
        remedy: String::new(),
    })?;
    let hardware = VirtualDevice::new(&spec);
    let identity = NpuIdentity { id, ..hardware.identity() };
    let device = NpuDevice::open(hardware.connect(), &identity)?;
    Ok((hardware, device))
}

fn registry() -> Registry {
    let mut registry = Registry::collect(&["npuhal-cpu", "npuhal-xdna1", "npuhal-xdna2"]).unwrap();
    registry.add_factory(Arc::new(VirtualNpus), Origin::BuiltIn, "npuhal-tests").unwrap();
    registry
}

/// A package as the routes see it; its files are not hashed, so that damaged ones can be opened.
fn package(path: &Path) -> ModelSource {
    let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
    Package::open(path, options).unwrap().model(Vocabulary::default()).unwrap()
}

fn small_package(folder: &Path, name: &str, small: SmallPackage) -> PathBuf {
    let path = small.write(folder, name, &[]);
    write_kernels(&path.join("npu"), &xdna1_kernels(small.shape()));
    path
}

/// A small Qwen3 that the lane takes, packed, with kernels.
fn packed(folder: &Path) -> PathBuf {
    let spec = ModelSpec {
        layers: LAYERS,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        spare_tokens: 320 - 266,
        ..ModelSpec::small(Architecture::Qwen3, Weights::LikeQ4KM)
    };
    let (gguf, path) = (folder.join("small.gguf"), folder.join("packed"));
    spec.build().write(&gguf).unwrap();
    pack(&gguf, &path, &PackOptions::default(), &Control::new(), &mut |_| {}).unwrap();
    let model = ModelSource::open(&path).unwrap();
    write_kernels(&path.join("npu"), &lane_kernels(model.config(), 64));
    path
}

struct Models {
    _folder: TempDir,
    package: PathBuf,
    packed: PathBuf,
    all: Vec<(&'static str, ModelSource)>,
}

/// One model of each kind of file.
static MODELS: LazyLock<Models> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let small = SmallPackage { family: Family::Llama, layers: LAYERS, vocab_size: 64, seed: 11 };
    let llama = small_package(folder.path(), "llama", small);
    let qwen3 = packed(folder.path());
    let spec = ModelSpec {
        hidden: 256,
        layers: LAYERS,
        heads: 6,
        kv_heads: 2,
        head_dim: 64,
        intermediate: 512,
        ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::Bf16))
    };
    let all = vec![
        ("llama-package", package(&llama)),
        ("qwen3-packed", ModelSource::open(&qwen3).unwrap()),
        ("llama-gguf", write(&spec, folder.path(), "llama")),
    ];
    Models { _folder: folder, package: llama, packed: qwen3, all }
});

const NOT_A_PACKAGE: &[(&str, &str)] = &[
    ("qwen3-packed", "the lane of the first generation takes xdna1 packages"),
    ("llama-gguf", "the lane of the first generation takes xdna1 packages"),
];
const NOT_PACKED: &[(&str, &str)] = &[
    ("llama-package", "the lane of the second generation takes packed Qwen3 models"),
    ("llama-gguf", "the lane of the second generation takes packed Qwen3 models"),
];

/// The array computes exponentials by a table that its twin reads otherwise, and sums in another order: bits differ behind the
/// first position. Bounds that the models here keep; the tests print the figures.
const TWIN: Tolerance = Tolerance { cosine: 0.999, relative_error: 0.15, near_tie: 0.25 };
/// The chunked graphs have the bits of their twin. What is left is the head, which a route computes in the default numerics.
const CHUNK_TWIN: Tolerance = Tolerance { cosine: 0.999_99, relative_error: 0.01, near_tie: 0.02 };
/// The same as `TWIN` with weights of eight bits where the twin has sixteen.
const EIGHT_BITS: Tolerance = Tolerance { cosine: 0.995, relative_error: 0.35, near_tie: 0.5 };

#[track_caller]
fn assert_parity(subject: &ParitySubject) {
    let outcome = run(&registry(), subject, &MODELS.all);
    assert!(outcome.wrong.is_empty(), "{}:\n{}", subject.target, outcome.wrong.join("\n"));
    assert_eq!((outcome.passed.len(), outcome.unsupported.len()), (1, 2), "{}: {outcome:?}", subject.target);
    println!("{} against {}: {}", subject.target, subject.against, outcome.passed[0]);
    for hardware in OPENED.lock().unwrap().iter() {
        let diagnoses: Vec<_> = hardware.diagnoses().iter().map(ToString::to_string).collect();
        assert!(diagnoses.is_empty(), "{}: {diagnoses:#?}", subject.target);
    }
}

/// Subjects of the first generation.
const fn of_xdna1(target: &'static str, against: &'static str) -> ParitySubject {
    ParitySubject {
        against,
        tolerance: Some(TWIN),
        unseen: &["LayerOut"],
        unsupported: NOT_A_PACKAGE,
        ..ParitySubject::new(target)
    }
}

/// Those whose layers on the NPU are chunked graphs, against a twin of these.
const fn of_chunks(target: &'static str, against: &'static str) -> ParitySubject {
    ParitySubject { tolerance: Some(CHUNK_TWIN), ..of_xdna1(target, against) }
}

#[test]
fn the_engine_agrees_with_its_twin() {
    assert_parity(&of_xdna1("virtual:npu1", "cpu:xdna1-smollm"));
}

#[test]
fn the_chunked_graphs_agree_with_the_twins_of_engine_and_graphs() {
    for target in ["virtual:npu1?engine=off", "virtual:npu1?engine=off&chunk=1"] {
        assert_parity(&of_xdna1(target, "cpu:xdna1-smollm"));
        assert_parity(&of_chunks(target, "0..4@cpu:xdna1-smollm-chunk,4..@cpu:xdna1-cpu"));
    }
    assert_parity(&ParitySubject { tolerance: Some(EIGHT_BITS), ..of_xdna1("virtual:npu1?w8=on", "cpu:xdna1-smollm") });
}

#[test]
fn the_head_on_the_npu_agrees_with_the_twin() {
    assert_parity(&ParitySubject {
        tolerance: Some(EIGHT_BITS),
        ..of_xdna1("virtual:npu1?npu_head=on", "cpu:xdna1-smollm")
    });
}

#[test]
fn hybrids_agree_with_the_twins_of_their_parts() {
    let twins = "0..2@cpu:xdna1-smollm-chunk,2..@cpu:xdna1-cpu";
    for target in ["virtual:npu1?npu-layers=2", "virtual:npu1?npu-layers=50%", "0..2@virtual:npu1,2..@cpu:xdna1-cpu"] {
        assert_parity(&of_chunks(target, twins));
    }
    // The CPU in front, on both sides, and another arithmetic behind.
    assert_parity(&of_chunks(
        "0..1@cpu:xdna1-cpu,1..4@virtual:npu1,4..@cpu:exact",
        "0..1@cpu:xdna1-cpu,1..4@cpu:xdna1-smollm-chunk,4..@cpu:exact",
    ));
    assert_parity(&of_chunks(
        "0..1@cpu:exact,1..3@virtual:npu1,3..@cpu:fast",
        "0..1@cpu:exact,1..3@cpu:xdna1-smollm-chunk,3..@cpu:fast",
    ));
    assert_parity(&of_chunks(
        "0..1@virtual:npu1,1..2@cpu:xdna1-cpu,2..4@virtual:npu1,4..@cpu:exact",
        "0..1@cpu:xdna1-smollm-chunk,1..2@cpu:xdna1-cpu,2..4@cpu:xdna1-smollm-chunk,4..@cpu:exact",
    ));
}

#[test]
fn the_lane_agrees_with_its_twin() {
    assert_parity(&ParitySubject {
        against: "cpu:xdna2",
        tolerance: Some(TWIN),
        unseen: &["Normed"],
        unsupported: NOT_PACKED,
        ..ParitySubject::new("virtual:npu5")
    });
}

#[test]
fn every_form_agrees_with_exact_arithmetic_within_what_its_route_states() {
    for target in ["virtual:npu1", "virtual:npu1?engine=off", "virtual:npu1?w8=on", "virtual:npu1?npu-layers=2"] {
        assert_parity(&ParitySubject {
            unseen: &["LayerOut", "Normed"],
            unsupported: NOT_A_PACKAGE,
            ..ParitySubject::new(target)
        });
    }
    assert_parity(&ParitySubject {
        unseen: &["Normed"],
        unsupported: NOT_PACKED,
        ..ParitySubject::new("virtual:npu5")
    });
}

#[test]
fn the_qwen_routes_agree_with_their_twin() {
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        return left_to_soak("the_qwen_routes_agree_with_their_twin (the head of Qwen2.5 has one size)");
    }
    let folder = tempfile::tempdir().unwrap();
    let vocab_size = Family::Qwen2.shape().vocab_size;
    let small = SmallPackage { family: Family::Qwen2, layers: 2, vocab_size, seed: 3 };
    let models = [("qwen2-package", package(&small_package(folder.path(), "qwen2", small)))];
    for (target, against) in [
        ("virtual:npu1", "cpu:xdna1-qwen"),
        ("virtual:npu1?engine=off", "0..2@cpu:xdna1-qwen,2..@cpu:xdna1-cpu"),
        ("virtual:npu1?npu-layers=1", "0..1@cpu:xdna1-qwen,1..@cpu:xdna1-cpu"),
    ] {
        let subject = ParitySubject { unsupported: &[], ..of_xdna1(target, against) };
        let outcome = run(&registry(), &subject, &models);
        assert!(outcome.wrong.is_empty(), "{target}:\n{}", outcome.wrong.join("\n"));
        assert_eq!(outcome.passed.len(), 1, "{target}");
    }
}

/// Sets bit `bit` of the exponent in the largest of `weights`, bf16, that has it clear.
fn flip(weights: &mut [u8], bit: u32) {
    let value = |bytes: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    let mask = 1u16 << (7 + bit);
    let clear = weights.as_chunks_mut::<2>().0.iter_mut().filter(|bytes| u16::from_le_bytes(**bytes) & mask == 0);
    let weight = clear.max_by(|a, b| value(a).abs().total_cmp(&value(b).abs())).unwrap();
    *weight = (u16::from_le_bytes(*weight) | mask).to_le_bytes();
}

/// A copy of `from` with the file `name` changed.
fn damaged(from: &Path, to: &Path, name: &str, change: impl Fn(&mut Vec<u8>)) {
    fs::create_dir_all(to.join("npu")).unwrap();
    for folder in ["", "npu"] {
        for file in fs::read_dir(from.join(folder)).unwrap().map(Result::unwrap).filter(|file| file.path().is_file()) {
            // Sound files need no copy.
            fs::hard_link(file.path(), to.join(folder).join(file.file_name())).unwrap();
        }
    }
    let sound = fs::read(from.join(name)).unwrap();
    let mut bytes = sound.clone();
    change(&mut bytes);
    let replace = |name: &str, contents: &[u8]| {
        fs::remove_file(to.join(name)).unwrap();
        fs::write(to.join(name), contents).unwrap();
    };
    replace(name, &bytes);
    // A package states the checksums of its files.
    if let Ok(metadata) = fs::read_to_string(from.join("metadata.json")) {
        let digest =
            |bytes: &[u8]| -> String { Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect() };
        let restated = metadata.replace(&digest(&sound), &digest(&bytes));
        assert_ne!(restated, metadata, "{name} has a checksum");
        replace("metadata.json", restated.as_bytes());
    }
}

/// Where `broken` on `target` first differs from `sound` on `against`.
fn located(sound: &ModelSource, against: &str, broken: &ModelSource, target: &str) -> Option<Divergence> {
    let registry = registry();
    let mut reference = open(&registry, sound, against).unwrap();
    let mut found = open(&registry, broken, target).unwrap();
    report(&mut reference, &mut found, TWIN).unwrap().first_divergence
}

/// Whether it is in `layer` or the next; what follows the last layer is the norm and the head.
fn is_at(found: Option<&Divergence>, layer: usize) -> bool {
    found.is_some_and(|found| match found.layer {
        Some(found) => (layer..=layer + 1).contains(&(found as usize)),
        None => layer + 1 == LAYERS,
    })
}

#[test]
fn a_flipped_exponent_bit_is_located_on_the_virtual_npu() {
    const ROW: usize = 5;
    let folder = tempfile::tempdir().unwrap();
    let sound = package(&MODELS.package);
    // The top bit of an exponent. What a lower one adds to a single weight is within the tolerance of a lane of bf16.
    const BIT: u32 = 7;
    // Rows of a layer's matrices by the elements of a row; all have inputs that are not 0.
    let matrices = [("qkv", 576), ("o_proj", 576), ("gate_up", 576), ("down_proj", 1536)];
    let mut missed = Vec::new();
    for layer in [0, LAYERS / 2, LAYERS - 1] {
        for (matrix, columns) in matrices {
            let file = format!("layer{layer:02}.{matrix}.bf16.bin");
            let path = folder.path().join(&file);
            damaged(&MODELS.package, &path, &file, |bytes| {
                flip(&mut bytes[2 * columns * ROW..2 * columns * (ROW + 1)], BIT);
            });
            for target in ["virtual:npu1", "virtual:npu1?engine=off&chunk=1"] {
                let found = located(&sound, "cpu:xdna1-smollm", &package(&path), target);
                if !is_at(found.as_ref(), layer) {
                    missed.push(format!("{target}, {file}: located at {found:?}"));
                }
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn a_flipped_exponent_bit_is_located_in_the_lane() {
    let folder = tempfile::tempdir().unwrap();
    let sound = ModelSource::open(&MODELS.packed).unwrap();
    let file = Q4nxFile::open(&MODELS.packed.join("model.q4nx")).unwrap();

    for layer in 0..LAYERS {
        for part in ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"] {
            let name = format!("model.layers.{layer}.{part}.weight");
            let range = file.tensor(&name).unwrap().range();
            let path = folder.path().join(&name);
            damaged(&MODELS.packed, &path, "model.q4nx", |bytes| {
                // The scales of the first tile: the first 512 bytes, those of rows 0 to 31 for each group of columns.
                let scales = &mut bytes[range.clone()][..512];
                flip(scales, 7);
            });
            let broken = ModelSource::open(&path).unwrap();
            let found = located(&sound, "cpu:xdna2", &broken, "virtual:npu5");
            assert!(is_at(found.as_ref(), layer), "{name}: located at {found:?}");
        }
    }
}
