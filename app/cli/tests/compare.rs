//! Commands that compare and draw: `parity`, `agree`, `graph`, and `bench --calibrate`.

mod common;

use common::Home;
use npuhal_models::package::{Family, Shape};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_virtual::kit::{Xdna1Kit, Xdna1Model};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn the_offline_harness_has_the_published_reports_and_exit_codes() {
    let home = Home::new();
    let golden: Value = json(include_str!("../../../registry/tests/data/agreement_harness_seed42.json"));
    let all = json(&home.run(&["agree", "--format", "json"]).with_code(0).out);
    assert_eq!(all["passed"], true);
    for scenario in ["pass", "fail_confident", "exact"] {
        assert_eq!(all["scenarios"][scenario], golden["scenarios"][scenario]["report"], "{scenario}");
        let one = json(&home.run(&["agree", "--format", "json", "--scenario", scenario]).with_code(0).out);
        assert_eq!(one["scenarios"][scenario], golden["scenarios"][scenario]["report"], "{scenario}");
    }
    let table = home.run(&["agree", "--format", "markdown"]).with_code(0).out;
    assert!(table.contains("| fail_confident | xdna_only | 7/16 (43.8%) | 8 | 1 | 5.00 | FAIL |"), "{table}");
    let file = home.path().join("report.txt");
    assert_eq!(home.run(&["agree", "-o", file.to_str().unwrap()]).with_code(0).out, "");
    assert!(fs::read_to_string(&file).unwrap().contains("the gate does what it is there for"));
    for (arguments, wanted) in [
        (["--scenario", "other"], "there is no scenario 'other'; known: pass, fail_confident, exact, all"),
        (["--positions", "0"], "positions is 0; wanted 1 to 1000000"),
        (["--top-k", "1"], "top-k is 1; wanted 2 to 1000"),
        (["--margin-threshold", "-1"], "margin-threshold is -1; wanted a finite number above 0"),
        (["--margin-threshold", "nan"], "margin-threshold is NaN"),
    ] {
        let said = home.run(&["agree", arguments[0], arguments[1]]).with_code(2);
        assert!(said.err.contains(wanted), "{arguments:?}: {}", said.err);
    }
}

#[test]
fn placements_of_a_model_are_compared_with_their_proof() {
    let home = Home::new();
    let model = home.model();
    let model = model.to_str().unwrap();
    let said = home.run(&["agree", "-m", model, "--positions", "8", "--threads", "2"]).with_code(0);
    assert!(said.out.contains("cpu:exact: top-1 "), "{}", said.out);
    assert!(said.out.contains("cpu: route cpu, cpu: layers 0..2; the second run gave the same bits"), "{}", said.out);
    let report = json(
        &home
            .run(&[
                "agree",
                "-m",
                model,
                "--placement",
                "0..1@cpu:exact,1..@cpu",
                "--prompt",
                "the",
                "--positions",
                "24",
                "--format",
                "json",
            ])
            .with_code(0)
            .out,
    );
    assert_eq!(report["evidence"][1]["route"], "split");
    assert_eq!(report["placements"]["cpu"]["top1_matches"], report["placements"]["cpu"]["top1_total"]);
    let named = home.run(&["agree", "-m", model, "--device", "cpu:exact", "--positions", "4"]).with_code(0).out;
    assert_eq!(named.matches("the second run gave the same bits").count(), 2, "{named}");
    let said = home.run(&["agree", "-m", model, "--prefer", "npu"]).with_code(2);
    assert!(said.err.contains("--prefer is for one choice"), "{}", said.err);
    let said = home.run(&["agree", "-m", model, "--placement", "npu1"]).with_code(1);
    assert!(said.err.contains("placement npu1: there is no device 'npu1'"), "{}", said.err);
}

/// A prompt used to be cut to 16 positions, and nothing was generated behind it.
#[test]
fn agreement_is_tried_on_the_whole_prompt_and_behind_it() {
    let home = Home::new();
    let model = home.model();
    let model = model.to_str().unwrap();
    let prompt = "the quick brown fox jumps over the lazy dog, again and again";
    let agree =
        |more: &[&str]| home.run(&[&["agree", "-m", model, "--prompt", prompt, "--format", "json"], more].concat());
    let said = agree(&["--positions", "16"]).with_code(2);
    let needed = said.err.split("the prompt alone has ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
    let needed: usize = needed.parse().unwrap();
    assert!(needed > 16 && said.err.contains("--positions 16: "), "{}", said.err);
    let positions = |said: common::Said| json(&said.with_code(0).out)["ids"].as_array().unwrap().len();
    assert_eq!(positions(agree(&[])), needed + 16);
    assert_eq!(positions(agree(&["--positions", &needed.to_string()])), needed);
    let many = home.run(&["agree", "-m", model, "--positions", "1000000000000"]).with_code(2);
    assert!(many.err.contains("wanted 1 to 1000000"), "{}", many.err);
    for (flag, device) in [("--reference", "gpu"), ("--placement", "gpu"), ("--device", "gpu")] {
        let said = home.run(&["agree", "-m", model, flag, device]).with_code(2);
        assert!(said.err.contains(&format!("{flag}: unknown device 'gpu'")), "{}", said.err);
    }
}

/// A link or a device that was named with -o used to be replaced by a file.
#[test]
fn reports_go_where_their_name_leads() {
    let home = Home::new();
    let (link, file) = (home.path().join("link"), home.path().join("file"));
    symlink("file", &link).unwrap();
    let plain = home.run(&["agree"]).with_code(0).out;
    for output in [&link, &file] {
        home.run(&["agree", "-o", output.to_str().unwrap()]).with_code(0);
        assert_eq!(fs::read_to_string(&file).unwrap(), plain);
    }
    assert!(link.symlink_metadata().unwrap().is_symlink());
    // Stdout is a file that others have written to.
    for name in ["/dev/stdout", file.to_str().unwrap()] {
        fs::write(&file, "before\n").unwrap();
        let stdout = File::options().append(true).open(&file).unwrap();
        let mut command = home.npuhal(&["agree", "-o", name]);
        assert!(command.stdout(stdout).status().unwrap().success());
        assert_eq!(fs::read_to_string(&file).unwrap(), format!("before\n{plain}"), "{name}");
    }
    assert!(Path::new("/dev/stdout").symlink_metadata().unwrap().is_symlink());
    assert_eq!(home.run(&["agree", "-o", "/dev/stdout"]).with_code(0).out, plain);
    assert_eq!(home.run(&["agree", "-o", "/dev/stderr"]).with_code(0).err, plain);
    let full = home.path().join("full");
    symlink("/dev/full", &full).unwrap();
    for command in ["agree", "graph"] {
        let said = home.run(&[command, "-o", full.to_str().unwrap()]).with_code(1);
        assert!(said.err.contains("full: the report cannot be written: No space left"), "{}", said.err);
        assert!(full.symlink_metadata().unwrap().is_symlink());
    }
    let mut names: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["file", "full", "link"]);
}

#[test]
fn parity_passes_within_and_fails_beyond_the_tolerance() {
    let home = Home::new();
    let model = home.model();
    let model = model.to_str().unwrap();
    let run = |more: &[&str]| home.run(&[&["parity", "-m", model, "--tokens", "6"][..], more].concat());
    let text = run(&["--device", "cpu"]).with_code(0).out;
    for part in ["LayerOut(1)", "likeliest token: ", "first divergence: none", "PASS: tolerance cosine"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let report = json(&run(&["--device", "cpu", "--max-error", "1e-9", "--format", "json"]).with_code(1).out);
    assert_eq!((&report["passed"], &report["first_divergence"]["position"]), (&false.into(), &0.into()));
    assert_eq!(report["taps"].as_array().unwrap().len(), 2 * 3 + 2);
    let table = run(&["--device", "cpu:exact", "--against", "0..1@cpu:exact,1..@cpu:exact", "--format", "markdown"]);
    assert!(table.with_code(0).out.contains("| LayerOut(1) | "));
    let said = run(&["--device", "cpu:xdna1-smollm"]).with_code(1);
    assert!(said.err.contains("head_dim is 10"), "{}", said.err);
    let said = run(&["--against", "cpu:fp8"]).with_code(2);
    assert!(said.err.contains("--against: numerics cannot be 'fp8'"), "{}", said.err);
    let said = home.run(&["parity", "-m", model, "--device", "cpu", "--tokens", "300"]).with_code(2);
    assert!(said.err.contains("both sides have 256"), "{}", said.err);
}

#[test]
fn designs_are_drawn_in_every_form() {
    let home = Home::new();
    for design in ["smollm", "qwen", "decoder", "lane"] {
        let svg = home.run(&["graph", "--design", design]).with_code(0).out;
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{design}");
        let parsed = json(&home.run(&["graph", "--design", design, "--format", "json"]).with_code(0).out);
        let keys: Vec<&str> = parsed.as_object().unwrap().keys().map(String::as_str).collect();
        let wanted = match design {
            "lane" => ["name", "title", "description", "buffers", "runs"].as_slice(),
            _ => ["name", "title", "description", "grid", "tiles", "channels"].as_slice(),
        };
        assert_eq!(keys, wanted, "{design}");
        assert!(home.run(&["graph", "--design", design, "--format", "dot"]).with_code(0).out.starts_with("digraph "));
        assert!(home.run(&["graph", "--design", design, "--format", "text"]).with_code(0).out.starts_with("=== "));
    }
    let base = home.path().join("drawing");
    let said = home.run(&["graph", "--format", "all", "-o", base.to_str().unwrap()]).with_code(0);
    assert!(said.out.starts_with("Exported smollm (dot) to "), "{}", said.out);
    for extension in ["dot", "svg", "json", "txt"] {
        assert!(base.with_extension(extension).is_file(), "{extension}");
    }
    let said = home.run(&["graph", "--design", "mamba"]).with_code(2);
    assert!(said.err.contains("smollm, qwen, decoder, lane"), "{}", said.err);
    let said = home.run(&["graph", "-o", "/no/such/folder/x.svg"]).with_code(1);
    assert!(said.err.contains("/no/such/folder/x.svg"), "{}", said.err);
    let model = home.model();
    let said = home.run(&["graph", "--design", "lane", "-m", model.to_str().unwrap()]).with_code(2);
    assert!(said.err.contains("model_type 'llama'"), "{}", said.err);
}

#[test]
fn a_calibration_is_measured_and_kept() {
    let home = Home::new();
    let model = home.model();
    let cache = home.path().join("cache");
    let run = |arguments: &[&str]| {
        let mut command =
            home.npuhal(&[&["bench", "--calibrate", "-m", model.to_str().unwrap()][..], arguments].concat());
        common::Said::from(command.env("XDG_CACHE_HOME", &cache).output().unwrap())
    };
    let said = run(&["--device", "cpu", "--threads", "1"]).with_code(0);
    assert!(said.out.contains("cpu by cpu with small llama (2 layers of "), "{}", said.out);
    let file = cache.join("npuhal/calibration.json");
    let kept = json(&fs::read_to_string(&file).unwrap());
    assert_eq!((&kept["version"], &kept["entries"][0]["threads"]), (&1.into(), &1.into()));
    assert!(kept["entries"][0]["whole_seconds"].as_f64().unwrap() > 0.0);
    run(&["--device", "cpu", "--threads", "1"]).with_code(0);
    let again = json(&fs::read_to_string(&file).unwrap());
    assert_eq!(again["entries"].as_array().unwrap().len(), 1, "in place of the earlier one");
    fs::write(&file, "no JSON").unwrap();
    let said = run(&["--device", "cpu"]).with_code(1);
    assert!(said.err.contains("no calibrations"), "{}", said.err);
    assert_eq!(fs::read_to_string(&file).unwrap(), "no JSON", "a file that is not understood is not replaced");
}

/// A package of four layers with the virtual NPU's kernels beside it.
fn package_with_kit(home: &Home) -> std::path::PathBuf {
    const TOKENIZER: &[u8] = include_bytes!("../../../models/tests/data/text/tiny_tokenizer/tokenizer.json");
    let small = SmallPackage { family: Family::Llama, layers: 4, vocab_size: 448, seed: 11 };
    let path = small.write(home.path(), "small-xdna1", &[("tokenizer.json", TOKENIZER)]);
    let Shape { hidden_size: hidden, intermediate_size: intermediate, heads, kv_heads, layers, vocab_size: vocab } =
        small.shape();
    let model = Xdna1Model { hidden, intermediate, heads, kv_heads, layers, vocab };
    let npu = path.join("npu");
    fs::create_dir(&npu).unwrap();
    for (name, contents) in Xdna1Kit::complete(&model).unwrap().files {
        fs::write(npu.join(name), contents).unwrap();
    }
    path
}

#[test]
fn layers_on_the_virtual_npu_and_the_cpu_agree_with_their_twins() {
    let home = Home::new();
    let path = package_with_kit(&home);
    let model = path.to_str().unwrap();
    let parity = |arguments: &[&str]| {
        let fixed = ["parity", "-m", model, "--tokens", "5", "--format", "json"];
        json(&home.run(&[&fixed[..], arguments].concat()).with_code(0).out)
    };
    // NPU then CPU, each in the arithmetic of its twin.
    let split = "0..2@virtual:npu1,2..@cpu:xdna1-cpu";
    let report = parity(&["--device", split, "--against", "0..2@cpu:xdna1-smollm,2..@cpu:xdna1-cpu"]);
    assert_eq!(report["passed"], true, "{report:#}");
    let taps: Vec<&str> = report["taps"].as_array().unwrap().iter().map(|tap| tap["tap"].as_str().unwrap()).collect();
    for tap in ["K(0)", "V(1)", "LayerOut(1)", "K(2)", "LayerOut(3)", "Logits"] {
        assert!(taps.contains(&tap), "{tap}: {taps:?}");
    }
    // The same split as the lane's own hybrid, and all layers on the NPU but the head.
    assert_eq!(parity(&["--device", "virtual:npu1?npu-layers=2", "--against", split])["passed"], true);
    assert_eq!(parity(&["--device", "0..4@virtual:npu1,4..@cpu:exact"])["passed"], true);
    // The engine against its twin.
    let engine = parity(&["--device", "virtual:npu1", "--against", "cpu:xdna1-smollm"]);
    assert_eq!(engine["passed"], true, "{engine:#}");
    // CPU, then NPU, then the head; the graphs are the same wherever in the model they are.
    let split = "0..1@cpu:xdna1-cpu,1..4@virtual:npu1,4..@cpu:exact";
    let report = parity(&["--device", split, "--against", "0..1@cpu:xdna1-cpu,1..4@cpu:xdna1-smollm,4..@cpu:exact"]);
    assert_eq!(report["passed"], true, "{report:#}");
    let said = home.run(&["parity", "-m", model, "--device", "0..2@cpu,2..@virtual:npu1"]).with_code(1);
    assert!(said.err.contains("its graphs have no norm and no head; end the parts with 4..@cpu"), "{}", said.err);
}

#[test]
fn placements_on_the_virtual_npu_prove_where_they_ran() {
    let home = Home::new();
    let path = package_with_kit(&home);
    let arguments = [
        "agree",
        "-m",
        path.to_str().unwrap(),
        "--placement",
        "virtual:npu1",
        "--placement",
        "0..2@virtual:npu1,2..@cpu",
        "--positions",
        "6",
        "--format",
        "json",
    ];
    let report = json(&home.run(&arguments).with_code(0).out);
    assert_eq!(report["passed"], true, "{report:#}");
    for (placement, runs) in [(1usize, 6), (2, 6)] {
        let seen = &report["evidence"][placement]["devices"][0];
        assert_eq!((&seen["device"], &seen["is_virtual"]), (&"virtual:npu1".into(), &true.into()), "{report:#}");
        assert!(seen["completed_runs"].as_u64().unwrap() >= runs, "{seen}");
    }
}

#[test]
fn the_planner_says_what_it_is_based_on() {
    let home = Home::new();
    let path = package_with_kit(&home);
    let model = path.to_str().unwrap();
    let routes = |more: &[&str]| home.run(&[&["routes", "-m", model, "--npu-layers", "auto"][..], more].concat());
    let said = routes(&["--device", "virtual:npu1"]).with_code(0);
    for part in [
        "virtual:npu1: 7.08 MB a layer at 4.79 GB/s, 0.380 ms a dispatch (published by c8dhjp4tyv-bit/hawkpoint-npu-llm)",
        "(published by c8dhjp4tyv-bit/hawkpoint-npu-llm, CPU head of SmolLM2-135M)",
        "  2 layers on virtual:npu1: ",
        "tok/s modelled",
        "--npu-layers auto: ",
    ] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
    let cpu = home.model();
    let said = home.run(&["routes", "-m", cpu.to_str().unwrap(), "--npu-layers", "auto"]).with_code(0);
    assert!(said.err.contains("no NPU here whose cost is known for this model"), "{}", said.err);
    let said = home.run(&["routes", "-m", model, "--npu-layers", "many"]).with_code(2);
    assert!(said.err.contains("--npu-layers many: give a number of layers, or auto"), "{}", said.err);
    let said = home.run(&["bench", "--calibrate", "-m", model, "--device", "virtual:npu1"]).with_code(1);
    assert!(said.err.contains("virtual:npu1 is virtual: its speed is that of this program"), "{}", said.err);
}
