//! Which route runs what: machines × kinds of models × pins × preferences × lengths, through the real routes, factories and
//! selection. The machines are folders like those of the system; their NPUs are found and checked, never opened.
//!
//! The tables are written by hand from the rules of the choice: a private add-on, then the lane, the engine, the hybrid, the CPU;
//! no window that cannot hold the request, unless a pin or `--prefer npu` accepts it; no virtual device but a named one; a
//! device that fails its check serves nobody; a pin that cannot be served is an error.

use super::hardware::tests::{NPU1, NPU5, machine};
use super::twin::VirtualFactory;
use npuhal_core::stage::Control;
use npuhal_cpu::route::{CpuFactory, CpuRoute};
use npuhal_models::package::{Family, OpenOptions, Package};
use npuhal_models::q4nx::{PackOptions, pack};
use npuhal_models::source::Format;
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{ModelSource, WeightType};
use npuhal_registry::{Origin, Prefer, Registry, Request, SelectionProblem, select};
use npuhal_tests::kit::hub::HubDirectory;
use npuhal_tests::kit::kernels::{lane_kernels, write_kernels, xdna1_kernels};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_xdna1::route::Xdna1Route;
use npuhal_xdna2::route::LaneRoute;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// What `auto` chooses. A word has a letter for each preference (none, npu, speed, context):
///
/// | letter | meaning |
/// |---|---|
/// | c | the CPU |
/// | E, e | the xdna1 engine on hardware, on the virtual NPU |
/// | L, l | the xdna2 lane on hardware, on a virtual NPU |
/// | w | an error: no window holds the request |
/// | o | an error: no route |
/// | x | an error: the pinned device cannot serve |
const AUTO: &str = "
kind             | positions | none | npu1 | npu5 | both | npu1! | npu5! | both, npu5!
llama gguf       |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
llama gguf       |      1000 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
smollm2 gguf     |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
smollm2 gguf     |      1000 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
qwen2 gguf       |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
qwen2 gguf       |      1000 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
qwen3 gguf       |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
qwen3 gguf       |      1000 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
package          |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
package          |      1000 | wwww | wwww | wwww | wwww | wwww  | wwww  | wwww
package compiled |        32 | cccc | EEEE | cccc | EEEE | cccc  | cccc  | EEEE
package compiled |      1000 | wwww | wEww | wwww | wEww | wwww  | wwww  | wEww
package no kit   |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
package no kit   |      1000 | wwww | wwww | wwww | wwww | wwww  | wwww  | wwww
q4nx             |        32 | oooo | oooo | oooo | oooo | oooo  | oooo  | oooo
q4nx             |      1000 | oooo | oooo | oooo | oooo | oooo  | oooo  | oooo
q4nx compiled    |        32 | oooo | oooo | LLLL | LLLL | oooo  | oooo  | oooo
q4nx compiled    |      1000 | oooo | oooo | wLww | wLww | oooo  | oooo  | oooo
q4nx no npu      |        32 | oooo | oooo | oooo | oooo | oooo  | oooo  | oooo
q4nx no npu      |      1000 | oooo | oooo | oooo | oooo | oooo  | oooo  | oooo
llama hub        |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
llama hub        |      1000 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
qwen3 hub        |        32 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
qwen3 hub        |      1000 | cccc | cccc | cccc | cccc | cccc  | cccc  | cccc
unknown          |        32 | oooo | oooo | oooo | oooo | oooo  | oooo  | oooo
unknown          |      1000 | oooo | oooo | oooo | oooo | oooo  | oooo  | oooo
";

/// What a pin of a device that is there and usable chooses, whatever the preference and the length.
const PINNED: &str = "
kind             | cpu | npu1 | npu5 | virtual:npu1 | virtual:npu4 | virtual:npu5
llama gguf       |  c  |  x   |  x   |      x       |      x       |      x
smollm2 gguf     |  c  |  x   |  x   |      x       |      x       |      x
qwen2 gguf       |  c  |  x   |  x   |      x       |      x       |      x
qwen3 gguf       |  c  |  x   |  x   |      x       |      x       |      x
package          |  c  |  x   |  x   |      e       |      x       |      x
package compiled |  c  |  E   |  x   |      x       |      x       |      x
package no kit   |  c  |  x   |  x   |      x       |      x       |      x
q4nx             |  x  |  x   |  x   |      x       |      l       |      l
q4nx compiled    |  x  |  x   |  L   |      x       |      x       |      x
q4nx no npu      |  x  |  x   |  x   |      x       |      x       |      x
llama hub        |  c  |  x   |  x   |      x       |      x       |      x
qwen3 hub        |  c  |  x   |  x   |      x       |      x       |      x
unknown          |  x  |  x   |  x   |      x       |      x       |      x
";

/// NPUs of the machines, an exclamation mark behind those that fail their check.
const MACHINES: [(&str, &[&str]); 7] = [
    ("none", &[]),
    ("npu1", &["npu1"]),
    ("npu5", &["npu5"]),
    ("both", &["npu1", "npu5"]),
    ("npu1!", &["npu1!"]),
    ("npu5!", &["npu5!"]),
    ("both, npu5!", &["npu1", "npu5!"]),
];
const PREFERENCES: [Option<Prefer>; 4] = [None, Some(Prefer::Npu), Some(Prefer::Speed), Some(Prefer::Context)];
const LENGTHS: [u32; 2] = [32, 1000];
/// Positions of the lane's kernels.
const LANE_POSITIONS: u32 = 256;

/// Rows of a table by their first cells, each a map from column to cell.
fn rows(table: &str) -> Vec<BTreeMap<&str, &str>> {
    let mut lines = table.trim().lines().map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    let head = lines.next().unwrap();
    lines
        .map(|cells| {
            assert_eq!(cells.len(), head.len(), "{cells:?}");
            head.iter().copied().zip(cells).collect()
        })
        .collect()
}

fn registry(npus: &[&str]) -> (TempDir, Registry) {
    let found: Vec<_> = npus.iter().map(|npu| if npu.starts_with("npu1") { NPU1 } else { NPU5 }).collect();
    let (root, factory) = machine(&found);
    for (part, _) in found.iter().zip(npus).filter(|(_, npu)| npu.ends_with('!')) {
        fs::remove_file(root.path().join("sys/bus/pci/devices").join(part.0).join("driver")).unwrap();
    }
    let mut registry = Registry::new();
    let mut add = |factory| registry.add_factory(factory, Origin::BuiltIn, "npuhal").unwrap();
    add(Arc::new(factory) as Arc<dyn npuhal_registry::DeviceFactory>);
    add(Arc::new(CpuFactory));
    add(Arc::new(VirtualFactory));
    let mut add = |route| registry.add_route(route, Origin::BuiltIn, "npuhal").unwrap();
    add(Arc::new(CpuRoute) as Arc<dyn npuhal_registry::Route>);
    add(Arc::new(Xdna1Route));
    add(Arc::new(LaneRoute));
    (root, registry)
}

fn letter(registry: &Registry, model: &ModelSource, device: &str, prefer: Option<Prefer>, needed: u32) -> char {
    let request = Request { device: device.parse().unwrap(), prefer, needed_positions: needed, ..Request::default() };
    match select(registry, model, &request) {
        Ok(choice) => {
            let service = &choice.service;
            assert!(device == "auto" || service.device == device, "{device}: {}", service.device);
            let is_small = service.window < needed;
            assert!(!is_small || !choice.decision.trade_offs.is_empty(), "{device}: the price is not told");
            match (choice.route.name(), service.device.starts_with("virtual:")) {
                ("cpu", false) => 'c',
                ("xdna1", false) => 'E',
                ("xdna1", true) => 'e',
                ("xdna2-lane", false) => 'L',
                ("xdna2-lane", true) => 'l',
                other => panic!("{other:?}"),
            }
        }
        Err(error) => match error.problem {
            SelectionProblem::NoSuchDevice { .. } => '-',
            SelectionProblem::DeviceUnavailable { .. } => '!',
            SelectionProblem::DeviceCannotServe { .. } => 'x',
            SelectionProblem::WindowTooSmall { .. } => 'w',
            SelectionProblem::NoRoute { .. } => 'o',
            other => panic!("{other}"),
        },
    }
}

#[test]
fn every_choice_is_as_the_rules_have_it() {
    let folder = tempfile::tempdir().unwrap();
    let models = models(folder.path());
    let (auto, pinned) = (rows(AUTO), rows(PINNED));
    let kinds: BTreeSet<&str> = models.iter().map(|(kind, _)| *kind).collect();
    for table in [&auto, &pinned] {
        assert_eq!(table.iter().map(|row| row["kind"]).collect::<BTreeSet<_>>(), kinds, "every kind has its rows");
    }
    let mut wrong = Vec::new();
    for (name, npus) in MACHINES {
        let (_root, registry) = registry(npus);
        for (kind, model) in &models {
            for needed in LENGTHS {
                let is_it =
                    |row: &&BTreeMap<&str, &str>| row["kind"] == *kind && row["positions"] == needed.to_string();
                let wanted = auto.iter().find(is_it).unwrap()[name];
                let found: String =
                    PREFERENCES.iter().map(|prefer| letter(&registry, model, "auto", *prefer, needed)).collect();
                if found != wanted {
                    wrong.push(format!("{kind}, {needed} positions, machine {name}: wanted {wanted}, found {found}"));
                }
                let row = pinned.iter().find(|row| row["kind"] == *kind).unwrap();
                for (pin, wanted) in row.iter().filter(|(pin, _)| **pin != "kind") {
                    let is_hardware = pin.starts_with("npu");
                    let wanted = match () {
                        () if npus.contains(&format!("{pin}!").as_str()) => "!",
                        () if is_hardware && !npus.contains(pin) => "-",
                        () => *wanted,
                    };
                    for prefer in PREFERENCES {
                        let found = letter(&registry, model, pin, prefer, needed).to_string();
                        if found != wanted {
                            let cell = format!("{kind}, {needed} positions, machine {name}, pin {pin}, {prefer:?}");
                            wrong.push(format!("{cell}: wanted {wanted}, found {found}"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_device_named_by_its_pci_address_is_the_same_device() {
    let folder = tempfile::tempdir().unwrap();
    let models = models(folder.path());
    let (_root, registry) = registry(&["npu1", "npu5"]);
    let model = |kind: &str| &models.iter().find(|(name, _)| *name == kind).unwrap().1;
    for (kind, (pci, ..), wanted) in [("package compiled", NPU1, 'E'), ("q4nx compiled", NPU5, 'L')] {
        assert_eq!(letter(&registry, model(kind), &format!("amdxdna:{pci}"), None, 32), wanted, "{kind}");
        assert_eq!(letter(&registry, model("llama gguf"), &format!("amdxdna:{pci}"), None, 32), 'x');
    }
    assert_eq!(letter(&registry, model("package compiled"), "amdxdna:0000:ff:00.0", None, 32), '-');
}

/// A model of each kind.
fn models(folder: &Path) -> Vec<(&'static str, ModelSource)> {
    let spec = |architecture, weights| ModelSpec { context_length: 2048, ..ModelSpec::small(architecture, weights) };
    // As the lane takes it.
    let qwen3 = |weights| ModelSpec {
        hidden: 256,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        intermediate: 512,
        spare_tokens: 320 - 266,
        ..spec(Architecture::Qwen3, weights)
    };
    let gguf = |name: &str, spec: ModelSpec| {
        let path = folder.join(name);
        spec.build().write(&path).unwrap();
        ModelSource::open(&path).unwrap()
    };
    let hub = |name: &str, spec: ModelSpec| {
        let path = folder.join(name);
        fs::create_dir(&path).unwrap();
        HubDirectory::new(&spec).write(&path, 1).unwrap();
        ModelSource::open(&path).unwrap()
    };
    let plain = Weights::Uniform(WeightType::F32);
    let packages = packages(folder);
    // Of the shape whose packages the designs are made for. A choice reads no weights.
    let mut config = packages[0].config().clone();
    let full = Family::Llama.shape();
    (config.layers, config.vocab_size, config.context_length) = (full.layers, full.vocab_size, 8192);
    let smollm2 =
        ModelSource::new(folder.join("smollm2.gguf"), Format::Gguf, config, Vocabulary::default(), BTreeMap::new());
    let [package, compiled, no_kit] = packages;
    let qwen3_gguf = gguf("qwen3.gguf", qwen3(Weights::LikeQ4KM));
    let [q4nx, q4nx_compiled, q4nx_no_npu] = packed(folder, qwen3_gguf.path());
    vec![
        ("llama gguf", gguf("llama.gguf", spec(Architecture::Llama, plain))),
        ("smollm2 gguf", smollm2),
        ("qwen2 gguf", gguf("qwen2.gguf", spec(Architecture::Qwen2, plain))),
        ("qwen3 gguf", qwen3_gguf),
        ("package", package),
        ("package compiled", compiled),
        ("package no kit", no_kit),
        ("q4nx", q4nx),
        ("q4nx compiled", q4nx_compiled),
        ("q4nx no npu", q4nx_no_npu),
        ("llama hub", hub("llama", spec(Architecture::Llama, plain))),
        ("qwen3 hub", hub("qwen3", qwen3(plain))),
        ("unknown", ModelSource::unread(folder.join("mamba"), "mamba")),
    ]
}

/// A package with a kit of the virtual NPU, with one that states to be compiled, and with none.
fn packages(folder: &Path) -> [ModelSource; 3] {
    let small = SmallPackage { family: Family::Llama, layers: 2, vocab_size: 64, seed: 3 };
    let path = small.write(folder, "package", &[]);
    let files = xdna1_kernels(small.shape());
    let compiled: Vec<_> = files
        .iter()
        .map(|(name, contents)| match std::str::from_utf8(contents) {
            Ok(text) if name == "kit.json" => {
                let imported = text.replace("\"origin\": \"virtual\"", "\"origin\": \"imported\"");
                assert_ne!(imported, text);
                (name.clone(), imported.into_bytes())
            }
            _ => (name.clone(), contents.clone()),
        })
        .collect();
    let (with_compiled, without) = (twin_of(&path, "package-compiled"), twin_of(&path, "package-no-kit"));
    write_kernels(&path.join("npu"), &files);
    write_kernels(&with_compiled.join("npu"), &compiled);
    [path, with_compiled, without].map(|path| {
        let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
        Package::open(&path, options).unwrap().model(Vocabulary::default()).unwrap()
    })
}

/// A packed directory with kernels of the virtual NPU, with kernels that have no mark, and with none.
fn packed(folder: &Path, gguf: &Path) -> [ModelSource; 3] {
    let path = folder.join("q4nx");
    pack(gguf, &path, &PackOptions::default(), &Control::new(), &mut |_| {}).unwrap();
    let files = lane_kernels(ModelSource::open(&path).unwrap().config(), LANE_POSITIONS);
    let (compiled, without) = (twin_of(&path, "q4nx-compiled"), twin_of(&path, "q4nx-no-npu"));
    write_kernels(&path.join("npu"), &files);
    // The mark is the last file.
    write_kernels(&compiled.join("npu"), &files[..files.len() - 1]);
    [path, compiled, without].map(|path| ModelSource::open(&path).unwrap())
}

/// The same files in a folder beside it.
fn twin_of(path: &Path, name: &str) -> PathBuf {
    let twin = path.with_file_name(name);
    fs::create_dir(&twin).unwrap();
    for file in fs::read_dir(path).unwrap().map(Result::unwrap) {
        fs::hard_link(file.path(), twin.join(file.file_name())).unwrap();
    }
    twin
}
