//! Commands that compare and draw: `parity`, `agree`, `graph`, and `bench --calibrate`.

mod common;

use common::Home;
use serde_json::Value;
use std::fs;

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
    let said = home.run(&["agree", "-m", model, "--device", "cpu", "--positions", "8", "--threads", "2"]).with_code(0);
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
                "16",
                "--format",
                "json",
            ])
            .with_code(0)
            .out,
    );
    assert_eq!(report["evidence"][1]["route"], "split");
    assert_eq!(report["placements"]["cpu"]["top1_matches"], report["placements"]["cpu"]["top1_total"]);
    let said = home.run(&["agree", "-m", model, "--placement", "npu1"]).with_code(1);
    assert!(said.err.contains("placement npu1: there is no device 'npu1'"), "{}", said.err);
}

#[test]
fn parity_passes_within_and_fails_beyond_the_tolerance() {
    let home = Home::new();
    let model = home.model();
    let model = model.to_str().unwrap();
    let run = |more: &[&str]| home.run(&[&["parity", "-m", model, "--tokens", "6"], more].concat());
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
        let mut command = home.npuhal(&[&["bench", "--calibrate", "-m", model.to_str().unwrap()], arguments].concat());
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
