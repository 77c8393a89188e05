//! Prompts that a 64-position package cannot hold, over HTTP: cut by turns with the record in the answer, or refused.

mod common;

use common::Home;
use common::server::{CHAT, Server, TEXT, with};
use npuhal_models::prompter::Prompter;
use npuhal_models::window::{Overflow, Truncation};
use npuhal_models::{ChatInput, ModelSource, Tokenizer};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const WORDS: &str = "one two three four five six seven eight nine ten ";

/// A server of the package in the models folder.
fn serve(home: &Home, arguments: &[&str]) -> Server {
    let mut all = vec!["--no-self-test", "--threads", "1"];
    all.extend(arguments);
    let server = Server::start(home, &all);
    server.wait_until_ready();
    server
}

fn turns(count: usize) -> Value {
    let turn = |index: usize| match index % 2 {
        0 => json!({"role": "user", "content": WORDS}),
        _ => json!({"role": "assistant", "content": "well"}),
    };
    Value::Array((0..count).map(turn).collect())
}

/// What the window itself makes of `messages` beside `max_tokens`: the tokens that are left, and the record.
fn fitted(package: &Path, messages: &Value, max_tokens: usize) -> (usize, Truncation) {
    let model = ModelSource::open(package).unwrap();
    let tokenizer = Tokenizer::from_vocabulary(model.vocabulary()).unwrap();
    let input = ChatInput::new(serde_json::from_value(messages.clone()).unwrap());
    let prompter = Prompter::new(&model, &tokenizer).unwrap();
    let prompt = prompter.fitted(&input, Some(max_tokens), 64, Overflow::Truncate).unwrap();
    (prompt.ids.len(), prompt.truncation)
}

#[test]
fn a_conversation_that_is_too_long_is_cut_by_turns_and_the_answer_says_so() {
    let home = Home::new();
    let package = home.package();
    let server = serve(&home, &[]);
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "small-xdna1");
    let short = json!([{"role": "user", "content": "one"}]);
    let cases = [(short, 8, false), (turns(5), 8, true), (turns(9), 20, true), (turns(1), 40, true)];
    for (messages, max_tokens, is_cut) in cases {
        let (prompt_tokens, truncation) = fitted(&package, &messages, max_tokens);
        assert_eq!(truncation.is_lossy(), is_cut, "{truncation:?}");
        let wanted = serde_json::to_value(truncation).unwrap();
        let body = json!({"messages": messages, "max_tokens": max_tokens});
        let answer = server.post(CHAT, &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        let answer = answer.json();
        let stats = &answer["x_npuhal_stats"];
        assert_eq!(stats["prompt_truncation"], wanted, "{messages}, {max_tokens} tokens");
        assert_eq!(stats["prompt_tokens"], prompt_tokens);
        assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens);
        // A stream has the same record in the chunk that ends the choice.
        let events = server.post(CHAT, &with(body, json!({"stream": true}))).events();
        let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let records: Vec<Value> =
            chunks.map(|chunk| chunk["x_npuhal_stats"]["prompt_truncation"].clone()).filter(Value::is_object).collect();
        assert_eq!(records, [wanted]);
    }
    // More tokens than the context has are no limit, and leave room for a prompt.
    let answer = server.post(CHAT, &json!({"messages": turns(1), "max_tokens": 4096})).json();
    assert!((30..64).contains(&answer["usage"]["prompt_tokens"].as_u64().unwrap()), "{answer}");
    server.end();
}

#[test]
fn a_text_that_is_too_long_keeps_its_end() {
    let home = Home::new();
    home.package();
    let server = serve(&home, &[]);
    let body = json!({"prompt": WORDS.repeat(6), "max_tokens": 8});
    let answer = server.post(TEXT, &body).json();
    let stats = &answer["x_npuhal_stats"];
    assert_eq!(
        (&stats["prompt_tokens"], &stats["prompt_truncation"]),
        (&json!(56), &json!({"truncated_prompt": true}))
    );
    let answer = server.post(TEXT, &json!({"prompt": "one two", "max_tokens": 8})).json();
    assert_eq!(answer["x_npuhal_stats"]["prompt_truncation"], json!({"truncated_prompt": false}));
    server.end();
}

#[test]
fn truncation_can_be_forbidden_and_asked_for() {
    let home = Home::new();
    home.package();
    let server = serve(&home, &["--context-overflow", "error"]);
    for (path, body, param) in [
        (CHAT, json!({"messages": turns(9), "max_tokens": 8}), "messages"),
        (TEXT, json!({"prompt": WORDS.repeat(6), "max_tokens": 8}), "prompt"),
        (CHAT, json!({"messages": turns(9), "stream": true}), "messages"),
    ] {
        let answer = server.post(path, &body);
        let error = &answer.json()["error"];
        assert_eq!((answer.status, error["code"].as_str()), (400, Some("context_length_exceeded")), "{error}");
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains("context is 64 tokens"), "{error}");
    }
    server.end();

    // A model that is refused by default, with its own template.
    let model = home.model();
    let model = model.to_str().unwrap();
    let arguments =
        ["-m", model, "--no-self-test", "--threads", "1", "--context", "48", "--context-overflow", "truncate"];
    let server = Server::start(&home, &arguments);
    server.wait_until_ready();
    let answer = server.post(CHAT, &json!({"messages": turns(9), "max_tokens": 8}));
    assert_eq!(answer.status, 200, "{answer:?}");
    let stats = &answer.json()["x_npuhal_stats"];
    assert!(stats["prompt_tokens"].as_u64().unwrap() <= 40, "{stats}");
    assert!(stats["prompt_truncation"]["dropped_messages"].as_u64().unwrap() > 0, "{stats}");
    server.end();
}

/// A conversation of thousands of turns was rendered once for each of them.
#[test]
fn thousands_of_turns_do_not_hold_up_the_worker() {
    let home = Home::new();
    home.package();
    let server = serve(&home, &["--stall-timeout", "20"]);
    let messages: Vec<Value> = (0..4096).map(|_| json!({"role": "user", "content": WORDS})).collect();
    let answer = server.post(CHAT, &json!({"messages": messages, "max_tokens": 4}));
    assert_eq!(answer.status, 200, "{answer:?}");
    let truncation = &answer.json()["x_npuhal_stats"]["prompt_truncation"];
    assert!(truncation["dropped_messages"].as_u64().unwrap() >= 4095, "{truncation}");
    assert_eq!(server.get("/ready").json()["worker_restarts"], 0);
    server.end();
}

/// Packages of the models folder were listed and run, and not served; a directory's name lost what came after a dot.
#[test]
fn packages_are_served_under_their_ids() {
    let home = Home::new();
    let path = home.package();
    let named = path.with_file_name("SmolLM2-1.7B");
    fs::rename(&path, &named).unwrap();
    let metadata = named.join("metadata.json");
    let mut fields: Value = serde_json::from_slice(&fs::read(&metadata).unwrap()).unwrap();
    fields.as_object_mut().unwrap().remove("model_id");
    let arguments = ["-m", named.to_str().unwrap(), "--no-prewarm"];
    let ids = |server: &Server| {
        let models = server.get("/v1/models").json()["data"].clone();
        models.as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let server = Server::start(&home, &arguments);
    assert_eq!(ids(&server), ["small-xdna1"]);
    server.end();
    fs::write(&metadata, fields.to_string()).unwrap();
    let server = Server::start(&home, &arguments);
    assert_eq!(ids(&server), ["SmolLM2-1.7B"]);
    server.end();
}
