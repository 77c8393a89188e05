//! `npuhal routes`: what is registered, and the record of a choice.

mod common;

use common::Home;
use npuhal_models::WeightType;
use npuhal_models::package::Family;
use npuhal_tests::kit::hub::HubDirectory;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::package::SmallPackage;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Compares `found` with the stored file; `NPUHAL_STORE=1` writes it anew.
fn compare_with_stored(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/routes").join(name);
    if std::env::var_os("NPUHAL_STORE").is_some() {
        fs::write(&path, found).unwrap();
    }
    assert_eq!(found, fs::read_to_string(&path).unwrap(), "{name}");
}

/// What differs from machine to machine, replaced.
fn without_machine(text: &str, home: &Home, devices: &Value) -> String {
    let mut text = text.replace(home.path().to_str().unwrap(), "HOME");
    for device in devices["devices"].as_array().unwrap() {
        text = text.replace(device["name"].as_str().unwrap(), "NAME");
    }
    for instructions in ["avx512", "avx2", "portable"] {
        text = text.replace(&format!("{instructions}, 2 threads"), "ISA, 2 threads");
        text = text.replace(&format!("({instructions})"), "(ISA)");
    }
    text.replace(concat!("npuhal ", env!("CARGO_PKG_VERSION")), "npuhal VERSION")
}

/// Runs `npuhal routes` for `model` as JSON and as text, and compares both with what is stored; the exit code.
fn stored(home: &Home, name: &str, model: &Path, more: &[&str]) -> Option<i32> {
    let arguments = ["routes", "-m", model.to_str().unwrap(), "--threads", "2"];
    let run = |format: &[&str]| home.run(&[arguments.as_slice(), more, format].concat());
    let said = run(&["--json"]);
    let parsed: Value = serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {}", said.err));
    compare_with_stored(&format!("{name}.json"), &without_machine(&without_npus(&parsed), home, &parsed));
    let text = run(&[]);
    assert_eq!(text.code, said.code);
    let lines: String = text.out.split_inclusive('\n').filter(|line| !line.starts_with("  npu")).collect();
    compare_with_stored(&format!("{name}.txt"), &without_machine(&lines, home, &parsed));
    said.code
}

/// The same without the NPUs of this machine, and without what was found in looking for them.
fn without_npus(report: &Value) -> String {
    let mut report = report.clone();
    report.as_object_mut().unwrap().remove("factories");
    let devices = report["devices"].as_array_mut().unwrap();
    devices.retain(|device| !device["id"].as_str().unwrap().starts_with("npu"));
    format!("{report:#}\n")
}

#[test]
fn every_name_of_the_program_is_registered() {
    let home = Home::new();
    let found: Value = serde_json::from_str(&home.run(&["routes", "--json"]).with_code(0).out).unwrap();
    let names = |key: &str| -> Vec<(String, String)> {
        let text = |entry: &Value, key: &str| entry[key].as_str().unwrap().to_owned();
        found[key].as_array().unwrap().iter().map(|entry| (text(entry, "name"), text(entry, "origin"))).collect()
    };
    let built_in = |names: &[&str]| -> Vec<(String, String)> {
        names.iter().map(|name| ((*name).to_owned(), "built-in".to_owned())).collect()
    };
    assert_eq!(names("routes"), built_in(&["cpu", "xdna1", "xdna2-lane"]));
    assert_eq!(names("factories"), built_in(&["amdxdna", "cpu", "virtual"]));
    assert_eq!((names("commands"), names("encoders")), (Vec::new(), Vec::new()));
    assert_eq!(found["addons"], Value::Array(Vec::new()));
    let text = home.run(&["routes"]).with_code(0).out;
    assert!(text.starts_with("routes, highest precedence first:\n  cpu (built-in): models *\n"), "{text}");
}

/// The shape of SmolLM2-135M, with few layers and a small vocabulary.
fn smollm2_like(weights: WeightType) -> ModelSpec {
    ModelSpec {
        hidden: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        intermediate: 1536,
        context_length: 8192,
        rope_theta: 100_000.0,
        ..ModelSpec::small(Architecture::Llama, Weights::Uniform(weights))
    }
}

#[test]
fn the_choice_for_a_small_llama_is_as_stored() {
    let home = Home::new();
    let spec = ModelSpec { layers: 4, ..smollm2_like(WeightType::Q4_1) };
    let path = home.path().join("smollm2-like.gguf");
    spec.build().write(&path).unwrap();
    let run = |more: &[&str]| {
        let arguments = ["routes", "-m", path.to_str().unwrap(), "--threads", "2", "--device", "cpu"];
        home.run(&[arguments.as_slice(), more].concat())
    };
    assert_eq!(stored(&home, "llama", &path, &["--device", "cpu"]), Some(0));
    assert_eq!(stored(&home, "llama-spread", &path, &["--device", "0..1@cpu:exact,1..@cpu"]), Some(0));
    let pinned = run(&["--needs", "9000"]).with_code(0);
    assert!(pinned.out.contains("note: the window of 8192 positions is smaller than the 9000"), "{}", pinned.out);
    let short = home.run(&["routes", "-m", path.to_str().unwrap(), "--needs", "9000"]).with_code(1);
    assert!(short.out.contains("  cpu (built-in): window too small for the request, window 8192"), "{}", short.out);
    assert!(
        short.err.contains("the request needs 9000 positions; the largest window is 8192 (route cpu)"),
        "{}",
        short.err
    );
}

#[test]
fn the_choice_for_a_package_is_as_stored() {
    const TOKENIZER: &[u8] = include_bytes!("../../../models/tests/data/text/tiny_tokenizer/tokenizer.json");
    let home = Home::new();
    let npu = ["--device", "virtual:npu1"];
    let small = SmallPackage { family: Family::Llama, layers: 4, vocab_size: 448, seed: 3 };
    let package = small.write(home.path(), "small-xdna1", &[("tokenizer.json", TOKENIZER)]);
    assert_eq!(stored(&home, "package", &package, &["--device", "cpu"]), Some(0));
    assert_eq!(stored(&home, "package-without-kit", &package, &npu), Some(1));
    home.run(&["kit", "xdna1", "-m", package.to_str().unwrap()]).with_code(0);
    assert_eq!(stored(&home, "package-engine", &package, &npu), Some(0));
    let hybrid = [npu[0], npu[1], "--npu-percent", "50"];
    assert_eq!(stored(&home, "package-hybrid", &package, &hybrid), Some(0));
    let spread = "0..1@cpu,1..3@virtual:npu1,3..@cpu:exact";
    assert_eq!(stored(&home, "package-spread", &package, &["--device", spread]), Some(0));
    for more in [["--prefer", "npu"], ["--npu-layers", "2"]] {
        let arguments = ["routes", "-m", package.to_str().unwrap(), "--device", spread];
        let said = home.run(&[&arguments[..], &more].concat()).with_code(2);
        assert!(said.err.contains("the device of every layer is named; leave out --prefer"), "{}", said.err);
    }
}

#[test]
fn the_choice_for_a_packed_directory_is_as_stored() {
    let home = Home::new();
    let npu = ["--device", "virtual:npu5"];
    // The shape of Qwen3-0.6B, with few layers and a small vocabulary.
    let spec = ModelSpec {
        hidden: 1024,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 3072,
        context_length: 40_960,
        rope_theta: 1e6,
        spare_tokens: 320 - 266,
        ..ModelSpec::small(Architecture::Qwen3, Weights::LikeQ4KM)
    };
    let (gguf, packed) = (home.path().join("qwen3-like.gguf"), home.path().join("qwen3-like"));
    spec.build().write(&gguf).unwrap();
    home.run(&["pack", gguf.to_str().unwrap(), packed.to_str().unwrap()]).with_code(0);
    assert_eq!(stored(&home, "q4nx-without-npu", &packed, &npu), Some(1));
    assert_eq!(stored(&home, "q4nx-cpu", &packed, &["--device", "cpu"]), Some(1), "in its usual arithmetic");
    assert_eq!(stored(&home, "q4nx-exact", &packed, &["--device", "cpu:exact"]), Some(0));
    home.run(&["kit", "xdna2", "--model", packed.to_str().unwrap()]).with_code(0);
    assert_eq!(stored(&home, "q4nx", &packed, &npu), Some(0));
}

#[test]
fn the_choice_for_a_hugging_face_directory_is_as_stored() {
    let home = Home::new();
    let spec = smollm2_like(WeightType::Bf16);
    let folder = home.path().join("SmolLM2-like");
    fs::create_dir(&folder).unwrap();
    HubDirectory::new(&spec).write(&folder, 2).unwrap();
    assert_eq!(stored(&home, "hub", &folder, &["--device", "cpu"]), Some(0));
    assert_eq!(stored(&home, "hub-npu", &folder, &["--device", "virtual:npu1"]), Some(1));
    // Of a type that nobody knows.
    let config = fs::read_to_string(folder.join("config.json")).unwrap().replace("\"llama\"", "\"mamba\"");
    fs::write(folder.join("config.json"), config).unwrap();
    let said = home.run(&["routes", "-m", folder.to_str().unwrap()]).with_code(1);
    compare_with_stored("unknown-hub.txt", &said.err.replace(home.path().to_str().unwrap(), "HOME"));
}

#[test]
fn a_model_of_an_unknown_type_is_an_error_that_names_what_there_is() {
    let home = Home::new();
    let model = home.model_of("mamba");
    let said = home.run(&["routes", "-m", model.to_str().unwrap()]).with_code(1);
    compare_with_stored("unknown.txt", &said.err.replace(home.path().to_str().unwrap(), "HOME"));
    let said = home.run(&["run", "-m", model.to_str().unwrap(), "hello"]).with_code(1);
    assert!(said.err.contains("mamba") && said.err.contains("llama, qwen2, qwen3"), "{}", said.err);
}

#[test]
fn a_private_model_says_which_route_is_missing_and_how_to_get_one() {
    let home = Home::new();
    let folder = home.path().join("Qwen3.6-35B-A3B");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "qwen3_5_moe"}"#).unwrap();
    let file = home.model_of("qwen35moe");
    for model in [&folder, &file] {
        for arguments in
            [vec!["routes", "-m", model.to_str().unwrap()], vec!["run", "-m", model.to_str().unwrap(), "hi"]]
        {
            let said = home.run(&arguments).with_code(1);
            let wanted = format!(
                "npuhal: {}: the Qwen3.6-35B-A3B NPU route is not part of this build; it comes as an add-on",
                model.display()
            );
            assert!(said.err.starts_with(&wanted) && said.err.contains("--addon FILE"), "{arguments:?}: {}", said.err);
        }
    }
    fs::write(folder.join("config.json"), r#"{"model_type": "mamba"}"#).unwrap();
    let said = home.run(&["routes", "-m", folder.to_str().unwrap()]).with_code(1);
    assert!(!said.err.contains("add-on"), "{}", said.err);
}

#[test]
fn wrong_preferences_and_options_are_usage_errors() {
    let home = Home::new();
    let model = home.model();
    for (arguments, wanted) in [
        (["--prefer", "cheap"], "--prefer: prefer cannot be 'cheap'; allowed: npu, speed, context"),
        (["--npu-opt", "colour=red"], "--npu-opt: unknown option 'colour'; known options: chunk, "),
        (["--npu-opt", "colour"], "--npu-opt: an option is given as KEY=VALUE, not 'colour'"),
        (["--npu-opt", "threads=3"], "--npu-opt: unknown option 'threads'; known options: chunk, "),
    ] {
        for command in [vec!["routes"], vec!["run", "hello"], vec!["bench"]] {
            let model = ["-m", model.to_str().unwrap()];
            let said = home.run(&[command.as_slice(), &model, &arguments].concat()).with_code(2);
            assert!(said.err.contains(wanted), "{command:?}: {}", said.err);
        }
    }
    let said = home.run(&["routes", "-m", model.to_str().unwrap(), "--prefer", "context"]).with_code(0);
    assert!(said.out.contains("asked for: device auto, preferring context\n"), "{}", said.out);
}
