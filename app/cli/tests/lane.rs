//! The xdna2 lane as a user meets it: pack, kit, run, routes, inspect, doctor, and what is said where something is missing.

mod common;

use common::{Home, Said};
use npuhal_tests::kit::gguf;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const NPU: [&str; 2] = ["--device", "virtual:npu5"];

fn spec() -> ModelSpec {
    ModelSpec {
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        spare_tokens: 320 - 266,
        ..ModelSpec::small(Architecture::Qwen3, Weights::LikeQ4KM)
    }
}

/// A user's home with a GGUF file, and the name of a directory for its packed form.
struct Scene {
    home: Home,
    gguf: PathBuf,
    packed: PathBuf,
}

impl Scene {
    fn new() -> Self {
        Self::of(&spec())
    }

    fn of(spec: &ModelSpec) -> Self {
        let home = Home::new();
        let (gguf, packed) = (home.path().join("small.gguf"), home.path().join("packed"));
        let mut file = spec.build();
        // A scale that changes nothing, to be carried over.
        file.set("qwen3.embedding_scale", gguf::Value::F32(1.0));
        file.write(&gguf).unwrap();
        Self { home, gguf, packed }
    }

    /// Packed, and with kernels.
    fn ready() -> Self {
        let scene = Self::new();
        scene.run(&["pack", scene.gguf(), scene.packed()]).with_code(0);
        scene.run(&["kit", "xdna2", "--model", scene.packed()]).with_code(0);
        scene
    }

    fn gguf(&self) -> &str {
        self.gguf.to_str().unwrap()
    }

    fn packed(&self) -> &str {
        self.packed.to_str().unwrap()
    }

    /// The program, with a cache of its own.
    fn run(&self, arguments: &[&str]) -> Said {
        let mut command = self.home.npuhal(arguments);
        command.env_remove("NPUHAL_Q4NX_CACHE").env("XDG_CACHE_HOME", self.cache());
        Said::from(command.output().unwrap())
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join("cache")
    }

    /// Directories of the cache of packed models.
    fn cached(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.cache().join("npuhal/q4nx")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.join("model.q4nx").exists()).collect()
    }

    /// An answer of few tokens on the virtual NPU.
    fn answer(&self, model: &str, more: &[&str]) -> Said {
        let arguments = ["run", "-m", model, "--raw", "-n", "4", "hello"];
        self.run(&[arguments.as_slice(), &NPU, more].concat())
    }
}

/// One line on stderr that starts with the program's name, nothing on stdout.
#[track_caller]
fn assert_refused(said: Said, phrases: &[&str]) {
    let said = said.with_code(1);
    assert_eq!((said.out.as_str(), said.err.lines().count()), ("", 1), "{}", said.err);
    assert!(said.err.starts_with("npuhal: "), "{}", said.err);
    for phrase in phrases {
        assert!(said.err.contains(phrase), "{phrase} in {}", said.err);
    }
}

#[test]
fn a_model_is_packed_gets_kernels_and_answers() {
    let scene = Scene::new();
    scene.run(&["pack", scene.gguf(), scene.packed()]).with_code(0);
    let said = scene.run(&["kit", "xdna2", "--model", scene.packed()]).with_code(0);
    assert_eq!((said.out.as_str(), said.err.lines().count()), ("", 1), "{}", said.err);
    for phrase in ["packed/npu: kernels of the virtual NPU", "256 positions", "they do nothing on hardware"] {
        assert!(said.err.contains(phrase), "{phrase} in {}", said.err);
    }
    let mut names: Vec<_> = fs::read_dir(scene.packed.join("npu"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let files = ["layer.pdi", "layer_ctx1.elf", "layer_ctx17.elf", "layer_ctx2.elf", "lmhead.elf", "virtual-npu.txt"];
    assert_eq!(names, files);

    let said = scene.answer(scene.packed(), &["--stats"]).with_code(0);
    assert!(said.err.contains("using virtual:npu5 (route xdna2-lane, kernels of the virtual NPU in"), "{}", said.err);
    assert!(said.err.contains("4 tokens at"), "{}", said.err);
    // The same again, and behind another driver.
    assert_eq!(scene.answer(scene.packed(), &[]).with_code(0).out, said.out);
    let other =
        ["run", "-m", scene.packed(), "--raw", "-n", "4", "hello", "--device", "virtual:npu5?profile=mainline-old"];
    assert_eq!(scene.run(&other).with_code(0).out, said.out);

    let said = scene.run(&[["routes", "-m", scene.packed(), "--json"].as_slice(), &NPU].concat()).with_code(0);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let route = report["routes"].as_array().unwrap().iter().find(|route| route["name"] == "xdna2-lane").unwrap();
    assert_eq!((&route["wins"], &route["window"]), (&Value::from(true), &Value::from(256)), "{route:#}");
    assert_eq!(route["placement"][0]["layers"], "0..2");
    let bytes = route["memory_bytes_by_context"]["256"].as_u64().unwrap();
    assert!(bytes > 64 << 20, "KV caches of two layers: {bytes}");
    let said = scene
        .run(&[["bench", "-m", scene.packed(), "--pp", "4", "--tg", "2", "--depths", "0"].as_slice(), &NPU].concat());
    said.with_code(0);

    let said = scene.run(&["inspect", scene.packed()]).with_code(0);
    assert!(said.out.contains("npu/, for the virtual NPU only, 256 positions"), "{}", said.out);
    let models = scene.home.path().to_str().unwrap();
    let said = scene.run(&["doctor", "--json", "--device", "virtual:npu5", "--models-dir", models]);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let kernels = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "kernels").unwrap();
    assert!(kernels["found"][0].as_str().unwrap().ends_with("packed: npu/, for the virtual NPU only, 256 positions"));

    // Packing again leaves the kernels where they are; writing them again replaces them.
    scene.run(&["pack", "--force", scene.gguf(), scene.packed()]).with_code(0);
    scene.answer(scene.packed(), &[]).with_code(0);
    let said = scene.run(&["kit", "xdna2", "--model", scene.packed(), "--positions", "32"]).with_code(0);
    assert!(said.err.contains("32 positions"), "{}", said.err);
    let said = scene.answer(scene.packed(), &["--context", "48"]).with_code(1);
    assert!(said.err.contains("a context of 48 positions was asked for; the kernels serve 32"), "{}", said.err);
}

#[test]
fn a_gguf_file_is_packed_into_the_cache_where_the_device_takes_it_only_so() {
    let scene = Scene::new();
    // Without kernels nothing is packed.
    assert_refused(
        scene.answer(scene.gguf(), &[]),
        &["device virtual:npu5 cannot run this model", "no kernels are known for it", "npuhal kit xdna2 --model"],
    );
    assert!(scene.cached().is_empty());
    let said = scene.run(&["kit", "xdna2", "--model", scene.gguf()]).with_code(0);
    let lines: Vec<&str> = said.err.lines().collect();
    assert!(lines[0].starts_with("packed ") && lines[1].contains("kernels of the virtual NPU"), "{}", said.err);
    let [cached] = scene.cached().try_into().unwrap();
    let said = scene.answer(scene.gguf(), &[]).with_code(0);
    assert!(said.err.lines().count() == 1 && said.err.contains("route xdna2-lane"), "{}", said.err);
    let answer = said.out;
    scene.run(&[["routes", "-m", scene.gguf()].as_slice(), &NPU].concat()).with_code(0);

    // Kernels from elsewhere, for a cache that has none: packed by the way.
    let kernels = scene.home.path().join("kernels");
    fs::rename(cached.join("npu"), &kernels).unwrap();
    fs::remove_dir_all(scene.cache()).unwrap();
    let said = scene.answer(scene.gguf(), &["--kernels", kernels.to_str().unwrap()]).with_code(0);
    assert!(said.err.lines().next().unwrap().starts_with("packed "), "{}", said.err);
    assert_eq!(said.out, answer);

    // The stamp is looked at, and the kernels stay.
    fs::rename(&kernels, cached.join("npu")).unwrap();
    fs::remove_file(cached.join("pack-stamp.txt")).unwrap();
    let said = scene.answer(scene.gguf(), &[]).with_code(0);
    assert!(said.err.contains("it failed the provenance check: it has no pack-stamp.txt"), "{}", said.err);
    assert!(said.err.contains("packed ") && said.err.contains("route xdna2-lane"), "{}", said.err);
    assert_eq!(said.out, answer);
    // So is the scale guard, on every use.
    let config = cached.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains("\"embedding_scale\": 1.0"), "{text}");
    fs::write(&config, text.replace("\"embedding_scale\": 1.0", "\"embedding_scale\": 12.0")).unwrap();
    let said = scene.answer(scene.gguf(), &[]).with_code(0);
    assert!(said.err.contains("it failed the declared-scale check"), "{}", said.err);
    assert_eq!(said.out, answer);

    // Where the machine decides, nothing is packed: the CPU runs the file.
    fs::remove_dir_all(scene.cache()).unwrap();
    let said = scene.run(&["run", "-m", scene.gguf(), "--raw", "-n", "4", "--device", "cpu", "hello"]).with_code(0);
    assert!(said.err.contains("the CPU") && scene.cached().is_empty(), "{}", said.err);
}

#[test]
fn a_stamp_that_cannot_be_read_is_one_framed_warning() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::new();
    scene.run(&["kit", "xdna2", "--model", scene.gguf()]).with_code(0);
    let [cached] = scene.cached().try_into().unwrap();
    let stamp = cached.join("pack-stamp.txt");
    fs::set_permissions(&stamp, fs::Permissions::from_mode(0o000)).unwrap();
    // The superuser reads everything.
    if fs::read(&stamp).is_ok() {
        fs::remove_file(&stamp).unwrap();
        fs::create_dir(&stamp).unwrap();
    }
    let said = scene.answer(scene.gguf(), &[]).with_code(0);
    assert_eq!(said.err.matches("it is used UNVERIFIED").count(), 1, "{}", said.err);
    assert!(said.err.contains("route xdna2-lane"), "{}", said.err);
}

/// Changes a file of the packed directory, and its answer must be a refusal.
fn assert_refused_with(scene: &Scene, file: &str, change: impl Fn(Vec<u8>) -> Option<Vec<u8>>, phrases: &[&str]) {
    let path = scene.packed.join(file);
    let whole = fs::read(&path).unwrap();
    match change(whole.clone()) {
        Some(changed) => fs::write(&path, changed).unwrap(),
        None => fs::remove_file(&path).unwrap(),
    }
    assert_refused(scene.answer(scene.packed(), &[]), phrases);
    fs::write(&path, whole).unwrap();
}

#[test]
fn what_cannot_be_run_is_said_in_one_line() {
    let scene = Scene::ready();
    let cut = |len: usize| move |bytes: Vec<u8>| Some(bytes[..len.min(bytes.len())].to_vec());
    assert_refused_with(&scene, "model.q4nx", cut(5), &["model.q4nx", "truncated"]);
    assert_refused_with(&scene, "model.q4nx", cut(100), &["header past the end of the file"]);
    assert_refused_with(&scene, "model.q4nx", cut(20_000), &["bad data_offsets for"]);
    let page = |_| Some(b"<!DOCTYPE html><html><body>not found</body></html>".to_vec());
    assert_refused_with(&scene, "model.q4nx", page, &["model.q4nx"]);
    let text = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| {
            // Of the same length, so that the tensors stay where they are.
            assert_eq!(from.len(), to.len());
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
            let mut bytes = bytes;
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
            Some(bytes)
        }
    };
    assert_refused_with(&scene, "model.q4nx", text("5120]", "5121]"), &["last dimension 5121"]);
    assert_refused_with(&scene, "model.q4nx", text("model.norm.weight", "model.nrom.weight"), &["model.nrom.weight"]);
    assert_refused_with(&scene, "model.q4nx", text("[16,5120]", "[17,5120]"), &["17"]);
    assert_refused_with(&scene, "config.json", |_| None, &["not an NPU model directory"]);
    assert_refused_with(&scene, "tokenizer.json", |_| None, &["not an NPU model directory"]);
    assert_refused_with(&scene, "config.json", text("\"qwen3\"", "\"llama\""), &["model_type 'llama'"]);
    for kernel in ["layer_ctx1.elf", "layer_ctx2.elf", "layer_ctx17.elf", "lmhead.elf", "layer.pdi"] {
        let file = format!("npu/{kernel}");
        assert_refused_with(&scene, &file, |_| None, &["xdna2-lane", &file, "is missing", "npuhal kit xdna2"]);
    }
    assert_refused_with(&scene, "npu/layer_ctx2.elf", cut(300), &["context ELFs differ in size"]);
    assert_refused_with(&scene, "npu/lmhead.elf", cut(300), &["npu/lmhead.elf"]);
    assert_refused_with(&scene, "npu/layer.pdi", cut(64), &["compiled for hardware"]);
    // The whole directory still answers.
    scene.answer(scene.packed(), &[]).with_code(0);

    // Kernels for other dimensions, from a folder and in a model's own.
    let other = Scene::of(&ModelSpec { intermediate: 1024, ..spec() });
    other.run(&["pack", other.gguf(), other.packed()]).with_code(0);
    let kernels = scene.packed.join("npu");
    assert_refused(
        other.answer(other.packed(), &["--kernels", kernels.to_str().unwrap()]),
        &["needs the route xdna2-lane", "the kernels are for another model"],
    );
    fs::rename(&kernels, other.packed.join("npu")).unwrap();
    assert_refused(other.answer(other.packed(), &[]), &["route xdna2-lane: the kernels are for another model"]);
    let said = other.run(&["inspect", other.packed()]).with_code(0);
    assert!(said.out.contains("npu/ cannot be used: the kernels are for another model"), "{}", said.out);
    let said = other.answer(other.packed(), &["--kernels", "/no/such/folder"]).with_code(2);
    assert!(said.err.contains("--kernels /no/such/folder: wanted a folder, found none"), "{}", said.err);

    // A model of another kind, packed and not.
    let qwen2 = Scene::of(&ModelSpec { architecture: Architecture::Qwen2, ..spec() });
    qwen2.run(&["pack", qwen2.gguf(), qwen2.packed()]).with_code(0);
    assert_refused(qwen2.answer(qwen2.packed(), &[]), &["model_type 'qwen2': the fast lane serves the Qwen3"]);
    assert_refused(qwen2.answer(qwen2.gguf(), &[]), &["device virtual:npu5 cannot run this model of type qwen2"]);
    assert_refused(
        qwen2.run(&["kit", "xdna2", "--model", qwen2.packed()]),
        &["model_type 'qwen2': the fast lane serves the Qwen3"],
    );
    assert!(!qwen2.packed.join("npu").exists());
    // A device of the other generation.
    let npu1 = ["run", "-m", qwen2.packed(), "--device", "virtual:npu1", "hello"];
    assert_refused(qwen2.run(&npu1), &["device virtual:npu1 cannot run this model"]);
}

/// `bench --ttft` used to begin no generation, which the CPU does not mind.
#[test]
fn the_time_to_the_first_token_is_measured_on_the_virtual_npu() {
    let scene = Scene::ready();
    for (flag, value, test) in [("--ttft", "4", "ttft4"), ("--ttft-text", "hello", "ttft-text")] {
        let arguments = ["bench", "-m", scene.packed(), flag, value];
        let said = scene.run(&[arguments.as_slice(), &NPU].concat()).with_code(0);
        let line: Value = serde_json::from_str(&said.out).unwrap();
        assert!(line["test"].as_str().unwrap().starts_with(test) && line["ms"].as_f64().unwrap() > 0.0, "{line}");
    }
    let (flag, long) = ("--ttft-text", "hello ".repeat(200));
    let said = scene.run(&[["bench", "-m", scene.packed(), flag, &long].as_slice(), &NPU].concat()).with_code(2);
    assert!(said.err.contains("--ttft-text: ") && said.err.contains("the context has 256 positions"), "{}", said.err);
}

#[test]
fn kernels_of_others_are_not_written_over() {
    let scene = Scene::new();
    scene.run(&["pack", scene.gguf(), scene.packed()]).with_code(0);
    let kit = ["kit", "xdna2", "--model", scene.packed()];
    let npu = scene.packed.join("npu");
    fs::create_dir(&npu).unwrap();
    fs::write(npu.join("layer.pdi"), "compiled").unwrap();
    assert_refused(scene.run(&kit), &["files that this command has not written", "--out DIR", "--force"]);
    assert_eq!(fs::read(npu.join("layer.pdi")).unwrap(), b"compiled");
    let out = scene.home.path().join("kernels");
    scene.run(&[kit.as_slice(), &["--out", out.to_str().unwrap()]].concat()).with_code(0);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 6);
    scene.answer(scene.packed(), &["--kernels", out.to_str().unwrap()]).with_code(0);
    scene.run(&[kit.as_slice(), &["--force"]].concat()).with_code(0);
    scene.answer(scene.packed(), &[]).with_code(0);
    for (arguments, phrase) in [
        (["--positions", "20"], "a multiple of 16"),
        (["--out", "/proc/kernels"], "/proc"),
        (["--out", scene.gguf()], "wanted a folder, found something else"),
    ] {
        assert_refused(scene.run(&[kit.as_slice(), &arguments].concat()), &[phrase]);
    }
    let left: Vec<_> = fs::read_dir(&scene.packed).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !Path::new(name).to_string_lossy().starts_with('.')), "{left:?}");
}
