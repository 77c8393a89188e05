//! `npuhal routes`: what is registered, and the record of a choice.

mod common;

use common::Home;
use npuhal_models::WeightType;
use npuhal_models::package::Family;
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
    }
    text
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

#[test]
fn the_choice_for_a_small_llama_is_as_stored() {
    let home = Home::new();
    // The shape of SmolLM2-135M, with few layers and a small vocabulary.
    let spec = ModelSpec {
        hidden: 576,
        layers: 4,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        intermediate: 1536,
        context_length: 8192,
        rope_theta: 100_000.0,
        ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::Q4_1))
    };
    let path = home.path().join("smollm2-like.gguf");
    spec.build().write(&path).unwrap();
    let run = |more: &[&str]| {
        let arguments = ["routes", "-m", path.to_str().unwrap(), "--threads", "2", "--device", "cpu"];
        home.run(&[arguments.as_slice(), more].concat())
    };
    let json = run(&["--json"]).with_code(0).out;
    let parsed: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(parsed["routes"][0]["wins"], true);
    compare_with_stored("llama.json", &without_machine(&without_npus(&parsed), &home, &parsed));
    let text = run(&[]).with_code(0).out;
    let text: String = text.split_inclusive('\n').filter(|line| !line.starts_with("  npu")).collect();
    compare_with_stored("llama.txt", &without_machine(&text, &home, &parsed));
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
fn the_choice_for_each_kind_of_model_is_as_stored() {
    const TOKENIZER: &[u8] = include_bytes!("../../../models/tests/data/text/tiny_tokenizer/tokenizer.json");
    let home = Home::new();
    let small = SmallPackage { family: Family::Llama, layers: 2, vocab_size: 448, seed: 3 };
    let package = small.write(home.path(), "small-xdna1", &[("tokenizer.json", TOKENIZER)]);
    let stored = |name: &str, model: &Path, more: &[&str]| {
        let arguments = ["routes", "-m", model.to_str().unwrap(), "--threads", "2", "--json"];
        let said = home.run(&[arguments.as_slice(), more].concat());
        let parsed: Value = serde_json::from_str(&said.out).unwrap();
        compare_with_stored(name, &without_machine(&without_npus(&parsed), &home, &parsed));
        said.code
    };
    assert_eq!(stored("package.json", &package, &["--device", "cpu"]), Some(0));
    assert_eq!(stored("package-virtual.json", &package, &["--device", "virtual:npu1"]), Some(1), "it has no kit");
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
