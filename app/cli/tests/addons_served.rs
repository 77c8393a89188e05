//! Add-ons behind the server: they answer through the interface, and what crashes in one costs its worker only.

mod common;

use common::Home;
use npuhal_models::ModelSource;
use npuhal_tests::served::Served;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// `npuhal serve` with a model and an add-on.
fn serve(home: &Home, model: &Path, addon: &Path, more: &[&str]) -> Served {
    let arguments = ["serve", "-m", model.to_str().unwrap(), "--addon", addon.to_str().unwrap(), "--threads", "1"];
    Served::start(home.npuhal(&arguments).args(more))
}

fn text_of(server: &Served, prompt: &str, max_tokens: u32) -> String {
    let body = json!({ "prompt": prompt, "max_tokens": max_tokens });
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{answer:?}\n{}", server.log());
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[test]
fn the_rust_example_answers_through_the_server_what_it_answers_through_run() {
    let home = Home::new();
    let (addon, model) = (home.rust_addon(), home.model());
    let run = ["run", "--addon", addon.to_str().unwrap(), "-m", model.to_str().unwrap(), "--raw", "-n", "12"];
    let wanted = home.run(&[&run[..], &["the hello"]].concat()).with_code(0).out;
    // The greedy continuation of a model without layers is one token for ever, which the self-test refuses.
    let server = serve(&home, &model, &addon, &["--no-self-test"]);
    let resident = server.get("/ready").json()["resident"][0].clone();
    assert_eq!((&resident["route"], &resident["device"]), (&json!("zero-layers"), &json!("cpu")), "{resident}");
    assert_eq!(text_of(&server, "the hello", 12).trim_end_matches('\n'), wanted.trim_end_matches('\n'));
    let chat = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 6 });
    let whole = server.post("/v1/chat/completions", &chat).json();
    assert_eq!(whole["usage"]["completion_tokens"], 6, "{whole}");
    let mut streamed = chat.clone();
    streamed["stream"] = true.into();
    let answer = server.post("/v1/chat/completions", &streamed);
    let events = answer.events();
    assert_eq!(events.last(), Some(&"[DONE]"), "{answer:?}");
    let pieces = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let text: String =
        pieces.filter_map(|piece| Some(piece["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
    // The options of the route come from the command line of the server.
    let server = serve(&home, &model, &addon, &["--no-self-test", "--npu-opt", "zero-layers-scale=-1"]);
    assert_eq!(server.get("/ready").json()["resident"][0]["route"], "cpu", "it declines");
}

#[test]
fn the_c_example_answers_through_the_server() {
    let home = Home::new();
    let Some(addon) = home.c_addon("the_c_example_answers_through_the_server") else { return };
    let server = serve(&home, &home.model(), &addon, &["--npu-opt", "parrot-order=backwards"]);
    assert_eq!(server.get("/ready").json()["resident"][0]["route"], "parrot");
    assert_eq!(text_of(&server, "abc", 16), "cba");
    assert_eq!(text_of(&server, "abcdef", 2), "fe");
    // What a generator cannot do is the request's fault, not the server's.
    let sampled = server.post("/v1/completions", &json!({ "prompt": "abc", "temperature": 1 }));
    assert_eq!(sampled.status, 400, "{sampled:?}");
    assert_eq!(text_of(&server, "xy", 16), "yx");
}

/// The add-on dies at position 20 of a sequence.
fn crashing(home: &Home, test: &str) -> Option<PathBuf> {
    home.faulty_addon(test, "crashing.so", &["IN_STEP=if (self->held > 20) abort()"])
}

#[test]
fn a_crash_in_an_add_on_costs_its_worker_only() {
    let home = Home::new();
    let Some(addon) = crashing(&home, "a_crash_in_an_add_on_costs_its_worker_only") else { return };
    let server = serve(&home, &home.model(), &addon, &["--no-self-test"]);
    // Each token is the byte behind the one before.
    assert_eq!(text_of(&server, "ab", 4), "cdef");
    for round in 1..=2 {
        let long = json!({ "prompt": "ab", "max_tokens": 25, "stream": true });
        let answer = server.post("/v1/completions", &long);
        let events = answer.events();
        let (last, pieces) = events.split_last().unwrap();
        let error: Value = serde_json::from_str(last).unwrap();
        assert_eq!(error["error"]["code"], "worker_lost", "round {round}: {answer:?}");
        assert!(pieces.iter().any(|piece| piece.contains("\"c\"")), "what came before the crash is there: {answer:?}");
        assert!(!answer.body.contains("[DONE]"), "{answer:?}");
        // Without waiting.
        assert_eq!(text_of(&server, "ab", 4), "cdef", "round {round}");
        let restarts = server.get("/ready").json()["worker_restarts"].clone();
        assert_eq!(restarts, round, "{}", server.log());
    }
    let whole = server.post("/v1/completions", &json!({ "prompt": "ab", "max_tokens": 25 }));
    assert_eq!((whole.status, &whole.json()["error"]["code"]), (500, &json!("worker_lost")));
    assert_eq!(text_of(&server, "bc", 3), "def");
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("npuhal_"), "{metrics}");
}

#[test]
fn an_add_on_that_cannot_be_loaded_without_a_crash_is_told_before_the_server_starts() {
    let home = Home::new();
    let test = "an_add_on_that_cannot_be_loaded_without_a_crash_is_told_before_the_server_starts";
    let Some(addon) = home.faulty_addon(test, "deadly.so", &["IN_ENTRY=abort()"]) else { return };
    let model = home.model();
    let arguments = ["serve", "-m", model.to_str().unwrap(), "--port", "0", "--addon", addon.to_str().unwrap()];
    let said = home.run(&arguments).with_code(1);
    assert!(said.err.contains("npuhal: loading the add-ons crashed (signal: 6"), "{}", said.err);
    assert!(said.err.contains("deadly.so; start again without the faulty one"), "{}", said.err);
    // A usage error is found by the same process, and told once.
    let Some(addon) = home.c_addon(test) else { return };
    let arguments = ["serve", "-m", model.to_str().unwrap(), "--port", "0", "--addon", addon.to_str().unwrap()];
    let said = home.run(&[&arguments[..], &["--npu-opt", "colour=red"]].concat()).with_code(2);
    assert_eq!(said.err.matches("unknown option 'colour'; known options: ").count(), 1, "{}", said.err);
    assert!(said.err.contains("parrot-order"), "{}", said.err);
}

#[test]
fn a_private_model_is_served_by_its_add_on_and_missed_without_it() {
    let home = Home::new();
    let Some(addon) = home.c_addon("a_private_model_is_served_by_its_add_on_and_missed_without_it") else { return };
    let folder = home.path().join("Qwen3.6-35B-A3B");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "qwen3_5_moe", "vocab_size": 300}"#).unwrap();
    let small = ModelSource::open(&home.model()).unwrap();
    let tokenizer = npuhal_models::q4nx::tokenizer::tokenizer_json(small.vocabulary()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    let said = home.run(&["serve", "-m", folder.to_str().unwrap(), "--port", "0"]).with_code(1);
    assert!(said.err.contains("the Qwen3.6-35B-A3B NPU route is not part of this build"), "{}", said.err);
    let server = serve(&home, &folder, &addon, &["--no-self-test"]);
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "Qwen3.6-35B-A3B");
    assert_eq!(text_of(&server, "abc", 3), "abc");
    // Another add-on does not take it.
    let rust = home.rust_addon();
    let arguments = ["serve", "-m", folder.to_str().unwrap(), "--port", "0", "--addon", rust.to_str().unwrap()];
    let said = home.run(&arguments).with_code(1);
    assert!(said.err.contains("the Qwen3.6-35B-A3B NPU route is not part of this build"), "{}", said.err);
}
