//! The published vectors of sampling and of stop strings, over HTTP. Logits come from a model whose head is a table
//! ([`npuhal_tests::kit::scripted`]); histories are prompts, drawn ids are letters.
//!
//! Where this server decides otherwise, or a vector cannot be carried by a request:
//!
//! * `penalties` 3: a prompt cannot hold the ids -4 and 99 of a vocabulary of 5; it is asked without them, as they are to be
//!   ignored.
//! * `greedy_flags`: `x_npuhal_stats.sampling.mode` says whether anything was drawn. Temperature 0 with a penalty draws nothing
//!   and is `greedy` here, where the reference has a word for its fast path only.
//! * `normalize` of stop strings: a request shows that the list is accepted, not that it lost its duplicate.

mod common;

use common::Home;
use common::server::{CHAT, Response, Server, TEXT, with};
use npuhal_tests::kit::scripted::Script;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

const SAMPLING: &str = include_str!("../../../models/tests/data/sampling_vectors.json");
const STOPS: &str = include_str!("../../../models/tests/data/stop_vectors.json");

/// Letters of the ids 0 to 4, of the vector's logits and of those with ties; in the order of their bytes, as ids are.
const LETTERS: [&str; 5] = ["v", "w", "x", "y", "z"];
const TIED: [&str; 5] = ["p", "q", "r", "s", "t"];
/// Tokens of the logits that the log probabilities are stated of.
const SCORED: [&str; 3] = ["k", "m", "n"];
/// Enough for the least probable id (0.011) not to be missed but once in 10^7 tries.
const DRAWS: usize = 1500;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

/// The token that a feed begins after.
fn start_of(feed: usize) -> String {
    feed.to_string()
}

struct Scene {
    server: Server,
    sampling: Value,
    stops: Value,
    _home: Home,
}

impl Scene {
    fn new() -> Self {
        let (sampling, stops): (Value, Value) =
            (serde_json::from_str(SAMPLING).unwrap(), serde_json::from_str(STOPS).unwrap());
        let mut script = Script::default();
        let mut add = |start: &str, letters: &[&str], logits: &Value| {
            let logits = numbers(logits);
            assert_eq!(letters.len(), logits.len());
            let next: Vec<(&str, f32)> = letters.iter().copied().zip(logits).collect();
            script.state(&[&[start][..], letters].concat(), &next);
        };
        add("A", &LETTERS, &sampling["logits"]);
        add("B", &TIED, &sampling["filters"]["top_k_ties"]["logits"]);
        add("C", &SCORED, &stops["log_softmax"]["in"]);
        for (index, feed) in stops["feeds"].as_array().unwrap().iter().enumerate() {
            script.chain(&start_of(index), &strings(&feed["pieces"]));
        }
        // The last token of a conversation's prompt.
        script.state(&["\n"], &[("Hello", 1.0)]);
        let home = Home::new();
        let path = home.path().join("table.gguf");
        script.build(2048).write(&path).unwrap();
        let server = Server::start(&home, &["-m", path.to_str().unwrap(), "--no-self-test", "--threads", "1"]);
        server.wait_until_ready();
        Self { server, sampling, stops, _home: home }
    }

    /// The answer to `prompt`, which is continued by `max_tokens` tokens.
    #[track_caller]
    fn answer(&self, prompt: &str, max_tokens: usize, extra: &Value) -> Value {
        let body = with(json!({"prompt": prompt, "max_tokens": max_tokens}), extra.clone());
        let answer = self.server.post(TEXT, &body);
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        answer.json()
    }

    #[track_caller]
    fn text(&self, prompt: &str, max_tokens: usize, extra: &Value) -> String {
        self.answer(prompt, max_tokens, extra)["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    /// Which of `letters` are ever drawn.
    #[track_caller]
    fn drawn(&self, start: &str, letters: &[&str], extra: Value) -> Vec<i64> {
        let extra = with(json!({"temperature": 1.0, "seed": 5}), extra);
        let text = self.text(start, DRAWS, &extra);
        assert_eq!(text.len(), DRAWS, "{extra}");
        let drawn: BTreeSet<i64> = text.chars().map(|letter| id_of(letter, letters)).collect();
        drawn.into_iter().collect()
    }

    #[track_caller]
    fn refused(&self, path: &str, body: &Value, param: &str) {
        let answer = self.server.post(path, body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        let error = &answer.json()["error"];
        assert_eq!((&error["type"], &error["param"]), (&json!("invalid_request_error"), &json!(param)), "{body}");
    }
}

#[track_caller]
fn id_of(letter: char, letters: &[&str]) -> i64 {
    let text = letter.to_string();
    letters.iter().position(|held| *held == text).unwrap_or_else(|| panic!("'{letter}' is none of {letters:?}")) as i64
}

/// The fields of a vector that are parameters of a request.
fn parameters(case: &Value) -> Value {
    let fields =
        ["temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"];
    let held = case.as_object().unwrap().iter().filter(|(key, _)| fields.contains(&key.as_str()));
    Value::Object(held.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>())
}

/// The first id whose cumulative probability exceeds `u`.
fn index_of(logits: &[f32], u: f64) -> i64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|logit| f64::from(logit - best).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut cumulative = 0.0;
    let exceeds = |weight: &f64| {
        cumulative += weight / total;
        cumulative > u
    };
    weights.iter().position(exceeds).unwrap() as i64
}

fn check_penalties(scene: &Scene) {
    let doubles = scene.sampling["reference_rng"]["first_doubles"].as_object().unwrap();
    for case in scene.sampling["penalties"].as_array().unwrap() {
        let history = ids(&case["history"]).into_iter().filter_map(|id| LETTERS.get(usize::try_from(id).ok()?));
        let history: String = history.copied().collect();
        let penalties = parameters(case);
        let best = scene.text(&history, 1, &with(penalties.clone(), json!({"temperature": 0})));
        assert_eq!(best, LETTERS[case["argmax"].as_u64().unwrap() as usize], "{case}");
        // What is drawn for a known number shows the logits after penalties.
        for (seed, known) in doubles {
            let seed: u64 = seed.parse().unwrap();
            let wanted = index_of(&numbers(&case["logits"]), known["doubles"][0].as_f64().unwrap());
            let drawn = scene.text(&history, 1, &with(penalties.clone(), json!({"temperature": 1, "seed": seed})));
            assert_eq!(drawn, LETTERS[wanted as usize], "seed {seed}: {case}");
        }
    }
}

fn check_filters(scene: &Scene) {
    let filters = &scene.sampling["filters"];
    for case in filters["top_k"].as_array().unwrap() {
        assert_eq!(scene.drawn("A", &LETTERS, json!({"top_k": case["k"]})), ids(&case["kept"]), "{case}");
    }
    for case in filters["top_p"].as_array().unwrap() {
        assert_eq!(scene.drawn("A", &LETTERS, json!({"top_p": case["p"]})), ids(&case["kept"]), "{case}");
    }
    let ties = &filters["top_k_ties"];
    assert_eq!(scene.drawn("B", &TIED, json!({"top_k": ties["k"]})), ids(&ties["kept"]), "{ties}");
}

fn check_draws(scene: &Scene) {
    for case in scene.sampling["seeded_draws_reference_rng"].as_array().unwrap() {
        let wanted = ids(&case["draws"]);
        let text = scene.text("A", wanted.len(), &parameters(case));
        let drawn: Vec<i64> = text.chars().map(|letter| id_of(letter, &LETTERS)).collect();
        assert_eq!(drawn, wanted, "{case}");
    }
}

fn check_modes(scene: &Scene) {
    for case in scene.sampling["greedy_flags"].as_array().unwrap() {
        let params = &case["params"];
        let sampling = |answer: &Value| answer["x_npuhal_stats"]["sampling"].clone();
        let (one, two) = (scene.answer("A", 24, params), scene.answer("A", 24, params));
        let is_drawn = one["x_npuhal_stats"]["sampling"]["mode"] == "sampled";
        let has_penalty_only = params["temperature"] == 0.0 && params.get("repetition_penalty").is_some();
        let wanted = case["greedy"].as_bool().unwrap() || has_penalty_only;
        assert_eq!(is_drawn, !wanted, "{case}: {}", sampling(&one));
        // What is not the same each time has a seed of its own, which is told.
        let is_the_same = sampling(&one)["seed"] == sampling(&two)["seed"];
        assert_eq!(is_the_same, case["deterministic"].as_bool().unwrap(), "{case}: {}", sampling(&one));
        if is_the_same {
            assert_eq!(one["choices"], two["choices"], "{case}");
        }
    }
}

fn check_ranges(scene: &Scene) {
    let ask = json!({"prompt": "A", "max_tokens": 2});
    for params in scene.sampling["rejected"].as_array().unwrap() {
        let field = params.as_object().unwrap().keys().next().unwrap();
        scene.refused(TEXT, &with(ask.clone(), params.clone()), field);
        let chat = json!({"messages": [{"role": "user", "content": "A"}], "max_tokens": 2});
        scene.refused(CHAT, &with(chat, params.clone()), field);
    }
    for params in scene.sampling["accepted"].as_array().unwrap() {
        scene.answer("A", 2, params);
    }
}

#[test]
fn sampling_is_as_published() {
    let scene = Scene::new();
    check_penalties(&scene);
    check_filters(&scene);
    check_draws(&scene);
    check_modes(&scene);
    check_ranges(&scene);
    scene.server.end();
}

/// Texts of a stream, its reason to end, and the stop string that was found.
fn feed(response: &mut Response) -> (Vec<String>, Value, Value) {
    let (mut texts, mut finish, mut stop) = (Vec::new(), Value::Null, Value::Null);
    let mut events = response.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    for event in events {
        let chunk: Value = serde_json::from_str(&event).unwrap();
        let choice = &chunk["choices"][0];
        let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        if !text.is_empty() {
            texts.push(text.to_owned());
        }
        if choice["finish_reason"].is_string() {
            finish = choice["finish_reason"].clone();
            stop = chunk["x_npuhal_stats"]["stop_sequence"].clone();
        }
    }
    (texts, finish, stop)
}

fn check_feeds(scene: &Scene) {
    for (index, case) in scene.stops["feeds"].as_array().unwrap().iter().enumerate() {
        let mut wanted: Vec<&str> = strings(&case["emitted"]);
        wanted.push(case["flush"].as_str().unwrap());
        wanted.retain(|text| !text.is_empty());
        let extra = json!({"stop": case["stops"], "max_tokens": 20, "stream": true});
        let body = with(json!({"prompt": start_of(index)}), extra.clone());
        let (texts, finish, stop) = feed(&mut scene.server.open(TEXT, &body));
        assert_eq!((texts, &finish, &stop), (own(&wanted), &json!("stop"), &case["matched"]), "{case}");
        if case["pieces"][0] == "Hello" {
            // The same in a conversation.
            let body = with(json!({"messages": [{"role": "user", "content": "hello"}]}), extra);
            let (texts, _, stop) = feed(&mut scene.server.open(CHAT, &body));
            assert_eq!((texts, &stop), (own(&wanted), &case["matched"]), "{case}");
        }
        // Not streamed it is the same text in one piece.
        let answer = scene.answer(&start_of(index), 20, &json!({"stop": case["stops"]}));
        assert_eq!(answer["choices"][0]["text"], wanted.concat(), "{case}");
        assert_eq!(answer["x_npuhal_stats"]["stop_sequence"], case["matched"]);
    }
}

fn own(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn check_stop_lists(scene: &Scene) {
    for case in scene.stops["normalize"].as_array().unwrap() {
        scene.answer("A", 1, &json!({"stop": case["in"]}));
    }
    let ask = json!({"prompt": "A", "max_tokens": 1});
    for stop in scene.stops["normalize_rejected"].as_array().unwrap() {
        scene.refused(TEXT, &with(ask.clone(), json!({"stop": stop})), "stop");
    }
    let limits = &scene.stops["limits"];
    let (count, chars) =
        (limits["sequences"].as_u64().unwrap() as usize, limits["characters"].as_u64().unwrap() as usize);
    let list = |count: usize, chars: usize| -> Vec<String> {
        (0..count).map(|index| format!("{index}{}", "ü".repeat(chars - 1))).collect()
    };
    scene.answer("A", 1, &json!({"stop": list(count, chars)}));
    scene.refused(TEXT, &with(ask.clone(), json!({"stop": list(count + 1, chars)})), "stop");
    scene.refused(TEXT, &with(ask.clone(), json!({"stop": list(count, chars + 1)})), "stop");
    let most = limits["top_logprobs"].as_u64().unwrap();
    let answer = scene.answer("A", 1, &json!({"logprobs": true, "top_logprobs": most}));
    let listed = answer["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap().len();
    assert_eq!(listed as u64, most);
    scene.refused(TEXT, &with(ask, json!({"logprobs": true, "top_logprobs": most + 1})), "top_logprobs");
}

fn check_log_probabilities(scene: &Scene) {
    let wanted = &scene.stops["log_softmax"]["out"];
    let answer = scene.answer("C", 1, &json!({"logprobs": SCORED.len()}));
    let logprobs = &answer["choices"][0]["logprobs"];
    for (letter, wanted) in SCORED.iter().zip(wanted.as_array().unwrap()) {
        let found = logprobs["top_logprobs"][0][letter].as_f64().unwrap_or(f64::NAN);
        assert!((found - wanted.as_f64().unwrap()).abs() < 1e-12, "{letter}: {wanted}: {logprobs}");
    }
    assert_eq!(logprobs["tokens"][0], SCORED[2]);
}

#[test]
fn stop_strings_and_log_probabilities_are_as_published() {
    let scene = Scene::new();
    check_feeds(&scene);
    check_stop_lists(&scene);
    check_log_probabilities(&scene);
    scene.server.end();
}
