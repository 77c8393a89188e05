//! Loaded add-ons in the shipped binary: the examples in Rust and in C.

mod common;

use common::Home;
use npuhal_core::stage::Control;
use npuhal_models::generate::TextGenerator;
use npuhal_models::sequence::{GenerationRequest, Piece};
use npuhal_models::{ModelSource, Specials, TensorRole, Tokenizer};
use npuhal_registry::{Registry, Request, select};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;

use npuhal_cpu as _;

/// The most probable token behind `token` of a model without layers: head · norm(embedding), in f64.
fn zero_layers_next(model: &ModelSource, token: u32) -> u32 {
    let hidden = model.config().hidden_size;
    let row = |role: TensorRole, row: usize| {
        let mut values = vec![0.0f32; hidden];
        model.require(role).unwrap().dequantize_row(row, &mut values).unwrap();
        values.into_iter().map(f64::from).collect::<Vec<f64>>()
    };
    let embedding = row(TensorRole::TokenEmbedding, token as usize);
    let norm = row(TensorRole::FinalNorm, 0);
    let mean = embedding.iter().map(|value| value * value).sum::<f64>() / hidden as f64;
    let factor = 1.0 / (mean + f64::from(model.config().rms_norm_eps)).sqrt();
    let normed: Vec<f64> = embedding.iter().zip(&norm).map(|(value, norm)| value * factor * norm).collect();
    let logit = |token: u32| -> f64 {
        row(TensorRole::TokenEmbedding, token as usize).iter().zip(&normed).map(|(a, b)| a * b).sum()
    };
    (0..model.config().vocab_size as u32).max_by(|&a, &b| logit(a).total_cmp(&logit(b))).unwrap()
}

#[test]
fn the_rust_example_answers_through_run_what_it_computes() {
    let home = Home::new();
    let (addon, path) = (home.rust_addon(), home.model());
    let model = ModelSource::open(&path).unwrap();
    let mut registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    assert_eq!(registry.load_addons(std::slice::from_ref(&addon)), []);
    let choice = select(&registry, &model, &Request::default()).unwrap();
    assert_eq!(choice.route.name(), "zero-layers");
    let mut generator = TextGenerator::new(choice.open(&registry, &model, &Request::default().options).unwrap());
    let tokenizer = Tokenizer::from_vocabulary(model.vocabulary()).unwrap();
    let mut prompt = Vec::new();
    tokenizer.encode_into("the hello", Specials::Parse, &mut prompt).unwrap();
    let request = GenerationRequest::greedy(prompt.clone(), 12);
    let mut receiver = |_: &Piece| ControlFlow::Continue(());
    let answer = generator.generate(&request, &tokenizer, &mut receiver, &Control::new()).unwrap();
    let mut wanted = Vec::new();
    let mut last = *prompt.last().unwrap();
    for _ in 0..answer.tokens.len() {
        last = zero_layers_next(&model, last);
        wanted.push(last);
    }
    assert!(!answer.tokens.is_empty());
    assert_eq!(answer.tokens, wanted);

    let arguments =
        ["run", "--addon", addon.to_str().unwrap(), "-m", path.to_str().unwrap(), "--raw", "-n", "12", "the hello"];
    let said = home.run(&arguments).with_code(0);
    assert_eq!(said.out.trim_end_matches('\n'), answer.text.trim_end_matches('\n'));
    assert!(said.err.contains("using the CPU (route zero-layers, embedding and head only)"), "{}", said.err);

    let option = |value: &str| home.run(&[&arguments[..], &["--npu-opt", value]].concat());
    assert_eq!(option("zero-layers-scale=3").with_code(0).out, said.out, "the norm takes a factor away");
    let refused = option("zero-layers-scale=-1").with_code(0);
    assert!(
        refused.err.contains("route zero-layers is not available: zero-layers-scale cannot be '-1'"),
        "{}",
        refused.err
    );
    let unknown = option("scale=1").with_code(2);
    let known = unknown.err.split_once("unknown option 'scale'; known options: ").map(|(_, known)| known);
    assert!(known.is_some_and(|known| known.trim_end().ends_with("zero-layers-scale")), "{}", unknown.err);
}

#[test]
fn the_c_example_answers_through_run() {
    let home = Home::new();
    let Some(addon) = home.c_addon("the_c_example_answers_through_run") else { return };
    let model = home.model();
    let arguments = ["run", "--addon", addon.to_str().unwrap(), "-m", model.to_str().unwrap()];
    let run = |more: &[&str]| home.run(&[&arguments[..], more].concat()).with_code(0);
    let said = run(&["--raw", "abc hello"]);
    assert_eq!(said.out, "abc hello\n");
    assert!(said.err.contains("using the CPU (route parrot, says what it hears)"), "{}", said.err);
    assert_eq!(run(&["--raw", "--npu-opt", "parrot-order=backwards", "abc"]).out, "cba\n");
    assert_eq!(run(&["--raw", "-n", "2", "abc"]).out, "ab\n");
    assert_eq!(run(&["Polly"]).out, "user\nPolly\n", "up to the end of the turn");
    let refused = run(&["--raw", "--npu-opt", "parrot-order=sideways", "-n", "1", "abc"]);
    assert!(refused.err.contains("parrot-order takes forwards or backwards; using the CPU ("), "{}", refused.err);
    let sampled = home.run(&[&arguments[..], &["--temperature", "1", "abc"]].concat()).with_code(1);
    assert!(sampled.err.contains("sampling at a temperature"), "{}", sampled.err);
}

#[test]
fn subcommands_of_add_ons_run_and_unknown_ones_are_usage_errors() {
    let home = Home::new();
    let rust = home.rust_addon();
    let rust = rust.to_str().unwrap();
    assert_eq!(home.run(&["--addon", rust, "shout", "it's", "me"]).with_code(0).out, "IT'S ME\n");
    let said = home.run(&["--addon", rust, "shout"]).with_code(1);
    assert!(said.err.contains("there is nothing to shout") && said.err.contains(rust), "{}", said.err);
    let said = home.run(&["--addon", rust, "shuot"]).with_code(2);
    assert!(said.err.contains("unrecognized subcommand 'shuot'; known: run, chat,"), "{}", said.err);
    assert!(said.err.contains(", shout") && !said.err.contains("worker"), "{}", said.err);
    if let Some(c) = home.c_addon("subcommands_of_add_ons_run_and_unknown_ones_are_usage_errors") {
        let c = c.to_str().unwrap();
        assert_eq!(home.run(&["--addon", c, "squawk", "a", "--b"]).with_code(0).out, "a --b\n");
        assert_eq!(home.run(&["--addon", c, "--addon", rust, "squawk"]).with_code(3).out, "");
    }
}

#[test]
fn routes_show_the_file_its_digest_and_what_it_offers() {
    let home = Home::new();
    let addon = home.rust_addon();
    let found: Value =
        serde_json::from_str(&home.run(&["routes", "--json", "--addon", addon.to_str().unwrap()]).with_code(0).out)
            .unwrap();
    let report = &found["addons"][0];
    let digest = std::process::Command::new("sha256sum").arg(&addon).output().unwrap().stdout;
    let digest = String::from_utf8(digest).unwrap();
    assert_eq!(report["sha256"].as_str().unwrap(), digest.split_whitespace().next().unwrap());
    assert_eq!(report["file"].as_str().unwrap(), addon.canonicalize().unwrap().to_str().unwrap());
    assert_eq!(report["routes"][0], "zero-layers");
    assert_eq!((&found["commands"][0]["name"], &found["encoders"][0]["dims"]), (&"shout".into(), &256.into()));
    assert_eq!(found["routes"][0]["options"][0], "zero-layers-scale");

    let model = home.model();
    let text =
        home.run(&["routes", "-m", model.to_str().unwrap(), "--addon", addon.to_str().unwrap()]).with_code(0).out;
    assert!(text.contains("* zero-layers (loaded add-on "), "{text}");
    assert!(text.contains("    sha256 "), "{text}");
}

#[test]
fn the_folder_and_the_environment_are_searched_and_a_bad_file_stops_nothing() {
    let home = Home::new();
    let model = home.model();
    let folder = home.path().join("npuhal/addons");
    fs::create_dir_all(&folder).unwrap();
    fs::copy(home.rust_addon(), folder.join("b.so")).unwrap();
    fs::set_permissions(folder.join("b.so"), Permissions::from_mode(0o644)).unwrap();
    let shout = home.run(&["shout", "found"]).with_code(0);
    assert_eq!((shout.out.as_str(), shout.err.as_str()), ("FOUND\n", ""));

    fs::write(folder.join("a.so"), "not a library").unwrap();
    fs::set_permissions(folder.join("a.so"), Permissions::from_mode(0o644)).unwrap();
    let said = home.run(&["run", "-m", model.to_str().unwrap(), "--raw", "-n", "2", "x"]).with_code(0);
    assert!(said.err.contains("a.so: cannot be opened as a library"), "{}", said.err);
    assert!(said.err.contains("route zero-layers"), "{}", said.err);
    fs::set_permissions(folder.join("b.so"), Permissions::from_mode(0o666)).unwrap();
    let said = home.run(&["run", "-m", model.to_str().unwrap(), "--raw", "-n", "2", "x"]).with_code(0);
    assert!(said.err.contains("b.so: not loaded, since it can be written by others (mode 0666)"), "{}", said.err);
    assert!(!said.err.contains("zero-layers"), "{}", said.err);

    fs::remove_dir_all(&folder).unwrap();
    let addon = home.rust_addon();
    let list = format!("/no/such.so:{}", addon.display());
    let output = home.npuhal(&["shout", "env"]).env("NPUHAL_ADDONS", list).output().unwrap();
    assert_eq!(output.stdout, b"ENV\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("add-on /no/such.so: cannot be read"));
}

#[test]
fn a_prompt_that_does_not_fit_a_window_goes_elsewhere_unless_it_fits_nowhere() {
    let home = Home::new();
    let Some(addon) = home.c_addon("a_prompt_that_does_not_fit_a_window_goes_elsewhere") else { return };
    let (model, long) = (home.model(), "a".repeat(300));
    let arguments = ["run", "--addon", addon.to_str().unwrap(), "-m", model.to_str().unwrap(), "--raw", "-n", "4"];
    // The model was trained for 256 positions; the parrot has 512.
    let said = home.run(&[&arguments[..], &[long.as_str()]].concat()).with_code(0);
    assert_eq!(said.out, "aaaa\n");
    assert!(said.err.contains("route parrot"), "{}", said.err);
    let longer = "a".repeat(600);
    let said = home.run(&[&arguments[..], &[longer.as_str()]].concat()).with_code(0);
    assert!(said.err.contains("keeps 508 of 600 tokens in a context of 512"), "{}", said.err);
    let whole = ["--context-overflow", "error", longer.as_str()];
    let said = home.run(&[&arguments[..], &whole].concat()).with_code(1);
    assert!(
        said.err.contains("the request needs 601 positions; the largest window is 512 (route parrot)"),
        "{}",
        said.err
    );
    // Nothing has room for 900 tokens of an answer, but there is room for one.
    let said = home.run(&[&arguments[..6], &["-n", "900", "ab"]].concat()).with_code(0);
    assert_eq!(said.out, "ab\n");
}

#[test]
fn a_private_model_that_npuhal_cannot_open_reaches_its_addon() {
    let home = Home::new();
    let Some(addon) = home.c_addon("a_private_model_that_npuhal_cannot_open_reaches_its_addon") else { return };
    let folder = home.path().join("Qwen3.6-35B-A3B");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "qwen3_5_moe", "vocab_size": 300}"#).unwrap();
    let small = ModelSource::open(&home.model()).unwrap();
    let tokenizer = npuhal_models::q4nx::tokenizer::tokenizer_json(small.vocabulary()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    let arguments = ["-m", folder.to_str().unwrap(), "--addon", addon.to_str().unwrap()];
    let said = home.run(&[&["run"][..], &arguments[..], &["--raw", "-n", "3", "abc"][..]].concat()).with_code(0);
    assert_eq!(said.out, "abc\n");
    assert!(said.err.contains("using the CPU (route parrot, says what it hears)"), "{}", said.err);
    let text = home.run(&[&["routes"][..], &arguments[..]].concat()).with_code(0).out;
    assert!(text.contains("(type qwen3_5_moe, as its files state; left to an add-on)"), "{text}");
    assert!(text.contains("  cpu (built-in): other model types\n"), "a route of the program is not asked: {text}");
    assert!(text.contains("* parrot (loaded add-on "), "{text}");
    // A GGUF file of an architecture that npuhal does not know goes the same way by its own name only.
    let file = home.model_of("qwen3_5_moe");
    let arguments = ["routes", "-m", file.to_str().unwrap(), "--addon", addon.to_str().unwrap()];
    assert!(home.run(&arguments).with_code(0).out.contains("* parrot (loaded add-on "));
    let said = home.run(&["routes", "-m", folder.to_str().unwrap()]).with_code(1);
    assert!(said.err.contains("the Qwen3.6-35B-A3B NPU route is not part of this build"), "{}", said.err);
}
