//! What goes wrong under `npuhal serve`, and how it goes on: workers that die, hang or cannot start, models that fail their
//! self-test, devices that do not answer, models that take each other's place, and the end of the service under load.

mod common;

use common::Home;
use common::server::{
    Answer, CHAT, Frozen, HANG_GUARD, Response, Server, TEXT, begin_stream, chat, serve, serve_slowly, signal, with,
};
use npuhal_models::WeightType;
use npuhal_models::package::{Family, Shape};
use npuhal_tests::kit::gguf::GgufFile;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_tests::kit::scripted::Script;
use npuhal_tests::models::left_to_soak;
use npuhal_virtual::kit::{Xdna1Kit, Xdna1Model};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::{Write as _, stderr};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

fn is_soak() -> bool {
    std::env::var_os("NPUHAL_SOAK").is_some()
}

#[track_caller]
fn assert_refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status, answer.code().as_str()), (status, code), "{answer:?}");
}

/// The error that a stream ended with.
#[track_caller]
fn error_of(response: &mut Response) -> Value {
    let events = response.events();
    let last = events.last().unwrap_or_else(|| panic!("nothing more came"));
    assert_ne!(last, "[DONE]");
    let event: Value = serde_json::from_str(last).unwrap();
    assert!(event["error"]["message"].is_string(), "{event}");
    event["error"].clone()
}

fn text_of(events: &[String]) -> String {
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    chunks.filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
}

#[test]
fn killed_workers_of_a_real_model_are_replaced_in_time() {
    const GOAL: Duration = Duration::from_secs(2);
    let Some(path) = npuhal_tests::models::path("smollm2-135m") else { return };
    let rounds = if is_soak() { 100 } else { 5 };
    if !is_soak() {
        left_to_soak("100 workers of SmolLM2 killed in the middle of a stream; 5 are");
    }
    let home = Home::new();
    let server = Server::start(&home, &["-m", path.to_str().unwrap(), "--context", "512", "--parallel", "4"]);
    server.wait_until_ready();
    let ask = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 400});
    let short = with(ask.clone(), json!({"max_tokens": 4}));
    let wanted = server.post(CHAT, &short).json()["choices"][0]["message"]["content"].clone();
    let mut recoveries: Vec<Duration> = Vec::new();
    for round in 1..=rounds {
        let mut streams = [begin_stream(&server, &ask), begin_stream(&server, &ask)];
        let killed = Instant::now();
        signal(server.worker(), Signal::KILL);
        for stream in &mut streams {
            let error = error_of(stream);
            assert_eq!(
                (&error["code"], &error["type"]),
                (&json!("worker_lost"), &json!("server_error")),
                "round {round}"
            );
        }
        // The next request is answered by the next worker, whatever `/ready` says meanwhile.
        let answer = server.post(CHAT, &short);
        recoveries.push(killed.elapsed());
        assert_eq!(answer.status, 200, "round {round}: {answer:?}");
        assert_eq!(answer.json()["choices"][0]["message"]["content"], wanted, "round {round}");
        assert_eq!(server.get("/ready").status, 200, "round {round}: a worker that answers is ready");
    }
    server.wait_for(|ready| ready["worker_restarts"] == rounds);
    recoveries.sort();
    let (median, most) = (recoveries[recoveries.len() / 2], recoveries[recoveries.len() - 1]);
    let within = recoveries.iter().filter(|time| **time <= GOAL).count();
    let _ = writeln!(
        stderr().lock(),
        "figure: from the kill of a worker (SmolLM2, CPU) to the end of the next answer of 4 tokens: median {median:.2?}, \
         longest {most:.2?}, {within} of {rounds} within {GOAL:?}"
    );
    assert!(most < HANG_GUARD);
    server.end();
}

/// One answer, streamed or not, of the request alone.
fn answer(server: &Server, body: &Value, is_streamed: bool) -> (u16, String, bool) {
    if is_streamed {
        let mut response = server.open(CHAT, &with(body.clone(), json!({"stream": true})));
        let events = response.events();
        return (response.status, text_of(&events), events.last().is_some_and(|event| event == "[DONE]"));
    }
    let answer = server.post(CHAT, body);
    let text = answer.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
    (answer.status, text, answer.status == 200)
}

#[test]
fn the_end_under_load_loses_nothing_that_was_admitted() {
    const CLIENTS: u64 = 10;
    let home = Home::new();
    let server = serve_slowly(&home, &["--parallel", "2"]);
    let body = |client: u64| chat(json!({"max_tokens": 12 + 3 * client, "temperature": 1, "seed": client}));
    let alone: Vec<_> = (0..CLIENTS).map(|client| answer(&server, &body(client), false).1).collect();
    // Clients that hold a connection: one has asked nothing yet, one is in the middle of its head.
    let silent = server.connect();
    let mut halfway = server.connect();
    halfway.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHo").unwrap();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let server = &server;
                scope.spawn(move || answer(server, &body(client), client % 2 == 0))
            })
            .collect();
        // Two run, eight wait.
        server.wait_for(|ready| ready["active_requests"] == CLIENTS);
        signal(server.pid(), Signal::TERM);
        let ready = server.wait_for(|ready| ready["draining"] == true);
        assert_eq!((&ready["status"], &ready["reason"]), (&json!("not_ready"), &json!("draining")));
        assert!(ready["active_requests"].as_u64().unwrap() > 0, "told at once, not at the end: {ready}");
        assert_eq!(server.get("/ready").status, 503);
        assert_eq!(server.get("/health/live").status, 200, "it lives");
        for path in [CHAT, TEXT] {
            let refused = server.post(path, &with(chat(json!({})), json!({"prompt": "x"})));
            assert_refused(&refused, 503, "shutting_down");
            assert_eq!(refused.header("retry-after"), Some("1"));
        }
        for (client, (handle, alone)) in clients.into_iter().zip(&alone).enumerate() {
            let (status, text, is_whole) = handle.join().unwrap();
            assert_eq!((status, &text, is_whole), (200, alone, true), "client {client}");
        }
    });
    let address = server.address;
    let ended = Instant::now();
    server.wait();
    assert!(ended.elapsed() < Duration::from_secs(20), "silent connections do not hold it up: {:?}", ended.elapsed());
    assert!(TcpStream::connect(address).is_err());
    drop((silent, halfway));
}

#[test]
fn an_answer_that_is_read_slowly_is_finished_at_the_end() {
    let home = Home::new();
    let mut script = Script::default();
    let word = "blah ".repeat(400);
    script.state(&["\n", &word], &[(&word, 1.0)]);
    let path = home.path().join("words.gguf");
    script.build(4096).write(&path).unwrap();
    let server = Server::start(&home, &["-m", path.to_str().unwrap(), "--no-self-test", "--threads", "1"]);
    server.wait_until_ready();
    // More than the buffers of a connection hold.
    let mut response = server.open(CHAT, &chat(json!({"max_tokens": 4000})));
    assert_eq!(response.status, 200);
    signal(server.pid(), Signal::TERM);
    // The answer is complete and given to the socket; nothing is active any more, but its client is still busy.
    thread::sleep(Duration::from_millis(2500));
    let answer: Value = serde_json::from_slice(&response.rest()).expect("a whole answer");
    assert_eq!(answer["choices"][0]["message"]["content"].as_str().unwrap().len(), 4000 * word.len());
    server.wait();
}

#[test]
fn a_worker_without_a_sign_of_life_is_replaced() {
    let home = Home::new();
    let server = serve_slowly(&home, &["--stall-timeout", "1"]);
    let long = chat(json!({"max_tokens": 1000}));
    let mut stream = begin_stream(&server, &long);
    let old = server.worker();
    let frozen = Frozen::new(old);
    let error = error_of(&mut stream);
    assert_eq!(error["code"], "worker_lost");
    drop(frozen);
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    let ready = server.wait_for(|ready| ready["worker_restarts"] == 1);
    assert_eq!(ready["status"], "ready");
    assert_ne!(server.worker(), old);
    assert_eq!(server.metric("npuhal_worker_restarts_total"), 1.0);
    assert!(server.metric("npuhal_generations_total{model=\"slow\",outcome=\"worker_lost\"}") >= 1.0);
    // One that hangs while nothing is asked of it, too.
    let idle = Frozen::new(server.worker());
    server.wait_for(|ready| ready["worker_restarts"] == 2);
    drop(idle);
    server.wait_until_ready();
    server.end();
}

#[test]
fn a_worker_that_lives_but_does_not_step_is_replaced() {
    let home = Home::new();
    let model = home.slow_model(6144);
    let arguments = ["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1", "--numerics", "exact"];
    let server = Server::start(&home, &[&arguments[..], &["--stall-timeout", "1", "--verbose"]].concat());
    server.wait_until_ready();
    // A part of the prompt of 256 rows takes far longer than a second: a step that does not end, to the watch.
    let prompt = "a b c d e f g h ".repeat(60);
    assert_refused(&server.post(TEXT, &json!({"prompt": prompt, "max_tokens": 2})), 500, "worker_lost");
    server.wait_for(|ready| ready["worker_restarts"] == 1 && ready["status"] == "ready");
    assert!(server.said().contains("no step for"), "{}", server.said());
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
    server.end();
}

#[test]
fn a_worker_that_dies_idle_is_replaced_each_time() {
    let home = Home::new();
    let server = serve(&home, &[]);
    for round in 1..=3 {
        let old = server.worker();
        signal(old, Signal::KILL);
        server.wait_for(|ready| ready["worker_restarts"] == round && ready["status"] == "ready");
        assert_ne!(server.worker(), old);
    }
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    server.end();
}

#[test]
fn a_model_that_cannot_be_loaded_is_told_and_tried_again() {
    let home = Home::new();
    let path = home.path().join("late.gguf");
    fs::write(&path, b"GGUF, but not really").unwrap();
    let server = Server::start(&home, &["-m", path.to_str().unwrap(), "--no-self-test", "--threads", "1"]);
    let ready = server.wait_for(|ready| ready["reason"] == "load_failed");
    assert_eq!((&ready["status"], &ready["resident"]), (&json!("not_ready"), &json!([])));
    assert_eq!(server.get("/v1/health").status, 503);
    assert_eq!(server.get("/health").status, 200);
    let answer = server.post(CHAT, &chat(json!({})));
    assert_refused(&answer, 503, "model_unavailable");
    assert_eq!(answer.header("retry-after"), Some("5"));
    let said = server.said();
    assert!(said.contains("late.gguf"), "the operator is told: {said}");
    assert!(!String::from_utf8_lossy(&answer.body).contains("gguf"), "the client is not: {answer:?}");
    // Once it is mended it is taken without a restart.
    fs::copy(home.model(), &path).unwrap();
    server.wait_until_ready();
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    server.end();
}

#[test]
fn a_worker_that_cannot_be_started_is_told() {
    let home = Home::new();
    let model = home.model();
    // A device that cannot run the model.
    let server = Server::start(&home, &["-m", model.to_str().unwrap(), "--device", "virtual:npu5", "--no-self-test"]);
    server.wait_for(|ready| ready["reason"] == "load_failed");
    assert_refused(&server.post(CHAT, &chat(json!({}))), 503, "model_unavailable");
    // It is tried again after half a second and after one more, with the same outcome.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(server.said().matches("virtual:npu5 cannot run").count(), 1, "told once: {}", server.said());
    server.end();
}

/// A model that says the same token for ever, or alternates.
fn repeating(home: &Home, name: &str, is_stuck: bool) -> PathBuf {
    let mut script = Script::default();
    if is_stuck {
        script.state(&[], &[("v", 1.0)]);
    } else {
        script.state(&["w"], &[("v", 1.0)]);
        script.state(&["v"], &[("w", 1.0)]);
    }
    write(home, name, &script.build(64))
}

fn write(home: &Home, name: &str, file: &GgufFile) -> PathBuf {
    let path = home.path().join(name);
    file.write(&path).unwrap();
    path
}

/// A model whose numbers are none.
fn not_finite(home: &Home, name: &str) -> PathBuf {
    let mut file = Script::default().build(64);
    let norm = file.tensors.iter_mut().find(|tensor| tensor.name == "output_norm.weight").unwrap();
    norm.bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(home, name, &file)
}

#[test]
fn a_model_that_fails_its_self_test_is_not_ready_and_says_why() {
    let home = Home::new();
    for (path, phrase) in
        [(repeating(&home, "stuck.gguf", true), "without end"), (not_finite(&home, "nan.gguf"), "self-test")]
    {
        let arguments = ["-m", path.to_str().unwrap(), "--threads", "1"];
        let server = Server::start(&home, &arguments);
        let ready = server.wait_for(|ready| ready["reason"] == "self_test_failed");
        assert_eq!(ready["status"], "not_ready");
        assert_eq!(server.get("/ready").status, 503);
        assert_refused(&server.post(CHAT, &chat(json!({}))), 503, "model_unavailable");
        assert!(server.said().contains(phrase), "{phrase}: {}", server.said());
        server.end();
        // Untried, it is called ready.
        let server = Server::start(&home, &[&arguments[..], &["--no-self-test"]].concat());
        server.wait_until_ready();
        server.end();
    }
    let path = repeating(&home, "sound.gguf", false);
    let server = Server::start(&home, &["-m", path.to_str().unwrap(), "--threads", "1"]);
    server.wait_until_ready();
    server.end();
}

/// Small models that differ in what they say.
fn models(home: &Home, names: &[&str]) -> Vec<PathBuf> {
    let write = |(seed, name): (u64, &&str)| {
        let spec = ModelSpec { seed, ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32)) };
        write(home, &format!("{name}.gguf"), &spec.build())
    };
    (1..).zip(names).map(write).collect()
}

fn serve_all(home: &Home, paths: &[PathBuf], more: &[&str]) -> Server {
    let mut arguments = vec!["--threads", "1"];
    for path in paths {
        arguments.extend(["-m", path.to_str().unwrap()]);
    }
    arguments.extend(more);
    Server::start(home, &arguments)
}

fn residents(ready: &Value) -> Vec<&str> {
    let mut names: Vec<&str> =
        ready["resident"].as_array().unwrap().iter().map(|resident| resident["model"].as_str().unwrap()).collect();
    names.sort_unstable();
    names
}

fn ask(server: &Server, model: &str) -> Answer {
    server.post(CHAT, &chat(json!({"model": model, "temperature": 1, "seed": 3})))
}

#[test]
fn models_take_the_place_of_the_least_recently_used() {
    let home = Home::new();
    let paths = models(&home, &["one", "two", "three"]);
    let server = serve_all(&home, &paths, &["--no-self-test", "--max-resident", "2"]);
    server.wait_until_ready();
    assert_eq!(residents(&server.get("/ready").json()), ["one"], "the first is prewarmed");
    let texts: Vec<Value> =
        ["one", "two", "one"].iter().map(|model| ask(&server, model).json()["choices"].clone()).collect();
    assert_eq!(texts[0], texts[2]);
    assert_ne!(texts[0], texts[1], "each answers for itself");
    assert_eq!((residents(&server.get("/ready").json()), server.workers().len()), (vec!["one", "two"], 2));
    assert_eq!(ask(&server, "three").status, 200);
    assert_eq!((residents(&server.get("/ready").json()), server.workers().len()), (vec!["one", "three"], 2));
    assert_eq!(ask(&server, "two").json()["choices"], texts[1]);
    assert_eq!(residents(&server.get("/ready").json()), ["three", "two"]);
    let ready = server.get("/ready").json();
    assert_eq!((&ready["worker_restarts"], &ready["status"]), (&json!(0), &json!("ready")));
    server.end();
}

#[test]
fn a_model_is_not_taken_away_from_a_running_answer() {
    let home = Home::new();
    let (slow, other) = (home.slow_model(1536), models(&home, &["other"]).remove(0));
    let more = ["--no-self-test", "--numerics", "exact", "--parallel", "2"];
    let server = serve_all(&home, &[slow, other], &more);
    server.wait_until_ready();
    let mut stream = begin_stream(&server, &chat(json!({"max_tokens": 60})));
    thread::scope(|scope| {
        // Both wait for their turn; neither breaks the other's.
        let waiting = scope.spawn(|| ask(&server, "other").status);
        let events = stream.events();
        assert_eq!(events.last().unwrap(), "[DONE]");
        assert_eq!(waiting.join().unwrap(), 200);
    });
    assert_eq!(residents(&server.get("/ready").json()), ["other"]);
    server.end();
}

#[test]
fn a_broken_model_does_not_cost_a_good_one_its_place() {
    let home = Home::new();
    let (good, broken) = (repeating(&home, "good.gguf", false), repeating(&home, "broken.gguf", true));
    let server = serve_all(&home, &[good.clone(), broken.clone()], &[]);
    server.wait_until_ready();
    assert_refused(&ask(&server, "broken"), 503, "model_unavailable");
    // It was tried in the place of the good one, which comes back unasked.
    server.wait_for(|ready| ready["status"] == "ready" && residents(ready) == ["good"]);
    let worker = server.worker();
    for _ in 0..3 {
        assert_refused(&ask(&server, "broken"), 503, "model_unavailable");
    }
    assert_eq!(server.worker(), worker, "it is not tried again at once");
    assert_eq!(server.get("/ready").status, 200);
    server.end();

    // The other way round: the default model is broken and tried again and again, unless its place is taken.
    let server = serve_all(&home, &[broken, good], &[]);
    server.wait_for(|ready| ready["reason"] == "self_test_failed");
    assert_eq!(ask(&server, "good").status, 200);
    let worker = server.worker();
    thread::sleep(Duration::from_millis(2500));
    assert_eq!((server.worker(), server.get("/ready").status), (worker, 200));
    server.end();
}

#[test]
fn a_model_is_loaded_before_it_is_asked_for_or_not() {
    let home = Home::new();
    let server = serve(&home, &[]);
    assert_eq!(server.workers().len(), 1);
    server.end();
    let model = home.model();
    let arguments = ["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1", "--no-prewarm"];
    let server = Server::start(&home, &arguments);
    thread::sleep(Duration::from_millis(500));
    let ready = server.get("/ready");
    assert_eq!((ready.status, &ready.json()["reason"], server.workers().len()), (503, &json!("not_loaded"), 0));
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    assert_eq!((server.get("/ready").status, server.workers().len()), (200, 1));
    server.end();
}

/// A package of two layers with the virtual NPU's kernels beside it.
fn package_with_kit(folder: &Path) -> PathBuf {
    const TOKENIZER: &[u8] = include_bytes!("../../../models/tests/data/text/tiny_tokenizer/tokenizer.json");
    let small = SmallPackage { family: Family::Llama, layers: 2, vocab_size: 448, seed: 11 };
    let path = small.write(folder, "small-xdna1", &[("tokenizer.json", TOKENIZER)]);
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
fn a_device_that_does_not_answer_is_a_typed_error_and_the_next_request_works() {
    let home = Home::new();
    let path = package_with_kit(home.path());
    let start = |device: &str| {
        let arguments = ["-m", path.to_str().unwrap(), "--device", device, "--no-self-test"];
        let server = Server::start(&home, &arguments);
        server.wait_until_ready();
        server
    };
    let text = json!({"prompt": "the quick brown fox", "max_tokens": 24});
    let stream = with(text.clone(), json!({"stream": true}));
    let server = start("virtual:npu1");
    let sound = server.post(TEXT, &text).json()["choices"][0]["text"].clone();
    let stats = server.post(TEXT, &text).json()["x_npuhal_stats"].clone();
    assert_eq!((&stats["device"], &stats["npu_layers"]), (&json!("virtual:npu1"), &json!(2)));
    assert_eq!(server.metric("npuhal_context_rebuilds_total"), 0.0);
    server.end();

    // In the middle of the first answer, of the third, and another failure later.
    let server = start("virtual:npu1?fault=timeout@12,timeout@60,error@110");
    let worker = server.worker();
    let labels = "{model=\"small-xdna1\",";
    let counted = |name: &str| server.metric(&format!("npuhal_{name}_total{labels}")) as u64;
    let mut codes = Vec::new();
    for round in 0..8 {
        if round % 2 == 0 {
            let mut response = server.open(TEXT, &stream);
            let events = response.events();
            match events.last().unwrap().as_str() {
                "[DONE]" => codes.push("ok".to_owned()),
                last => {
                    let error: Value = serde_json::from_str(last).unwrap();
                    codes.push(error["error"]["code"].as_str().unwrap().to_owned());
                }
            }
        } else {
            let answer = server.post(TEXT, &text);
            if answer.status == 200 {
                assert_eq!(answer.json()["choices"][0]["text"], sound, "after an error it is as sound as before");
                codes.push("ok".to_owned());
            } else {
                assert_eq!(answer.status, 500, "{answer:?}");
                let body = String::from_utf8_lossy(&answer.body).into_owned();
                assert!(!body.contains("run ") && !body.contains("virtual"), "nothing internal is told: {body}");
                codes.push(answer.code());
            }
        }
    }
    let count = |code: &str| codes.iter().filter(|held| *held == code).count();
    assert_eq!((count("device_timeout"), count("internal_error"), count("ok")), (2, 1, 5), "{codes:?}");
    assert_eq!(codes[0], "device_timeout", "{codes:?}");
    assert_eq!(codes[7], "ok", "{codes:?}");
    assert_eq!((counted("device_timeouts"), counted("device_failures"), counted("context_rebuilds")), (2, 1, 3));
    assert_eq!(server.worker(), worker, "the worker stays");
    assert_eq!(server.get("/ready").json()["worker_restarts"], 0);
    server.end();
}
