//! `npuhal serve` over its socket: validation, answers, streams, models, workers that die, and the end in good order.

mod common;

use common::server::{Response, Server, begin_stream, chat, post_head, serve, serve_slowly, signal};
use common::{Home, Said};
use serde_json::{Map, Value, json};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Where the reference refuses `null`, it counts as absent here, as in OpenAI's interface; and the number of alternatives of a
/// text completion is OpenAI's.
const DEVIATIONS: [(&str, &str); 6] = [
    ("chat", r#"{"max_tokens":null}"#),
    ("chat", r#"{"max_completion_tokens":null}"#),
    ("chat", r#"{"stream":null}"#),
    ("chat", r#"{"n":null}"#),
    ("text", r#"{"echo":null}"#),
    ("text", r#"{"logprobs":3}"#),
];

#[test]
fn fields_are_checked_as_published() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/server/api_validation_cases.json");
    let cases: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let mut deviating = 0;
    for (kind, path) in [("chat", "/v1/chat/completions"), ("text", "/v1/completions")] {
        for case in cases[kind].as_array().unwrap() {
            let mut body: Map<String, Value> = cases[format!("{kind}_base")].as_object().unwrap().clone();
            body.remove("model");
            for field in case["unset"].as_array().into_iter().flatten() {
                body.remove(field.as_str().unwrap());
            }
            body.extend(case["set"].as_object().unwrap().clone());
            let answer = server.post(path, &Value::Object(body));
            let wanted = case["status"].as_u64().unwrap();
            let set = case["set"].to_string();
            if u64::from(answer.status) != wanted {
                assert!(DEVIATIONS.contains(&(kind, set.as_str())), "{kind} {set}: wanted {wanted}: {answer:?}");
                assert_eq!(answer.status, 200, "{kind} {set}");
                deviating += 1;
            } else if wanted == 400 {
                let error = &answer.json()["error"];
                assert_eq!(error["type"], cases["error_type_for_400"], "{kind} {set}");
                assert!(error["code"].is_string() && error["message"].as_str().unwrap().len() > 10, "{error}");
            }
        }
    }
    assert_eq!(deviating, DEVIATIONS.len(), "a list that is not true any more");
    server.end();
}

#[test]
fn bodies_heads_and_paths_are_checked() {
    let home = Home::new();
    let server = serve(&home, &["--max-body-bytes", "2048"]);
    let raw = |body: &[u8]| server.send(&post_head("/v1/chat/completions", body.len()), body);
    for (body, status) in [(&b"{broken"[..], 400), (b"[]", 400), (b"\"x\"", 400), (b"", 400), (&[b' '; 2049], 413)] {
        assert_eq!(raw(body).status, status);
    }
    let deep = "[".repeat(2000);
    assert_eq!(raw(deep.as_bytes()).status, 400);
    let without = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(server.send(without, b"").status, 411);
    assert_eq!(server.get("/nothing").json()["error"]["code"], "not_found");
    assert_eq!(server.get("/v1/chat/completions").status, 405);
    assert_eq!(server.get("/v1/models/none").json()["error"]["code"], "model_not_found");
    assert_eq!(server.get("/v1/models/model?source=x").json()["id"], "model");
    assert_eq!(server.get("/v1/models/").json()["data"][0]["id"], "model");
    let metrics = String::from_utf8(server.get("/metrics").body).unwrap();
    assert!(
        metrics.contains("npuhal_api_requests_total{endpoint=\"/v1/chat/completions\",status=\"400\"}"),
        "{metrics}"
    );
    assert!(metrics.ends_with("# EOF\n"));
    let options = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost:3000\r\nConnection: close\r\n\r\n";
    let answer = server.send(options, b"");
    assert_eq!(answer.status, 204);
    assert!(answer.head.contains("access-control-allow-origin: http://localhost:3000"), "{}", answer.head);
    server.end();
}

#[test]
fn the_key_is_asked_for() {
    let home = Home::new();
    let server = serve(&home, &["--api-key", "a-secret-key"]);
    let with = |key: &str| {
        let head =
            format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\nConnection: close\r\n\r\n");
        server.send(&head, b"")
    };
    assert_eq!(with("Bearer a-secret-key").status, 200);
    for key in ["Bearer a-secret-kez", "Bearer ", "Basic a-secret-key", "Bearer invalid-\u{e9}"] {
        let answer = with(key);
        assert_eq!((answer.status, &answer.json()["error"]["type"]), (401, &json!("authentication_error")));
    }
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health/live").status, 200);
    server.end();
}

/// An empty `NPUHAL_API_KEY` used to be refused as a wrong `--api-key`.
#[test]
fn variables_that_are_empty_count_as_unset_and_wrong_ones_are_named() {
    let home = Home::new();
    let model = home.model();
    let model = model.to_str().unwrap();
    let mut command = home.npuhal(&["serve", "--port", "0", "-m", model, "--no-self-test", "--threads", "1"]);
    for name in ["NPUHAL_API_KEY", "NPUHAL_CPU_FEATURES", "NPUHAL_LOG"] {
        command.env(name, "");
    }
    let server = Server::of(command);
    server.wait_until_ready();
    assert_eq!(server.get("/v1/models").status, 200);
    server.end();
    let with = |name: &str, value: &[u8], arguments: &[&str]| {
        let mut command = home.npuhal(arguments);
        for name in ["NPUHAL_API_KEY", "NPUHAL_API_URL", "NPUHAL_CPU_FEATURES"] {
            command.env_remove(name);
        }
        Said::from(command.env(name, OsStr::from_bytes(value)).output().unwrap()).with_code(2).err
    };
    let chat = ["chat", "--prompt", "x", "--api-url", "http://127.0.0.1:1"];
    for (name, value, arguments, wanted) in [
        ("NPUHAL_API_KEY", &b"short"[..], &["serve", "-m", model][..], "NPUHAL_API_KEY: an API key has 8 to 512"),
        ("NPUHAL_API_KEY", b"no-text-\xff", &["serve", "-m", model], "NPUHAL_API_KEY: the variable is not UTF-8"),
        ("NPUHAL_API_KEY", b"a b", &chat, "NPUHAL_API_KEY: the API key has characters"),
        ("NPUHAL_API_URL", b"host", &chat[..3], "NPUHAL_API_URL: 'host' is not the address of a server"),
        ("NPUHAL_CPU_FEATURES", b"sse9", &["run", "-m", model, "x"], "NPUHAL_CPU_FEATURES: the instruction set 'sse9'"),
        ("NPUHAL_LOG", b"a=b=c", &["list"], "NPUHAL_LOG=a=b=c: "),
    ] {
        let err = with(name, value, arguments);
        assert!(err.contains(wanted), "{wanted} in {err}");
    }
    let err = with("NPUHAL_API_KEY", b"long-enough", &["serve", "-m", model, "--api-key", ""]);
    assert!(err.contains("--api-key: an API key has"), "{err}");
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let options = json!({"max_tokens": 12, "temperature": 0.8, "seed": 7, "logprobs": true, "top_logprobs": 2, "n": 2});
    let whole = server.post("/v1/chat/completions", &chat(options.clone())).json();
    let mut streamed = chat(options);
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let answer = server.post("/v1/chat/completions", &streamed);
    assert!(answer.head.contains("text/event-stream"), "{}", answer.head);
    let mut events = answer.events();
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let chunks: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    for index in 0..2_usize {
        let of_choice = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
        let of_choice: Vec<&Value> = of_choice.filter(|choice| choice["index"] == index).collect();
        let text: String = of_choice.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        let wanted = &whole["choices"][index];
        assert_eq!(wanted["message"]["content"], text);
        assert_eq!(of_choice[0]["delta"]["role"], "assistant");
        let entries: Vec<&Value> =
            of_choice.iter().filter_map(|choice| choice["logprobs"]["content"].as_array()).flatten().collect();
        assert_eq!(wanted["logprobs"]["content"].as_array().unwrap().iter().collect::<Vec<_>>(), entries);
        assert_eq!(of_choice.last().unwrap()["finish_reason"], wanted["finish_reason"]);
        // Which of them ended last used to be the only one with a seed.
        let last_chunk = chunks.iter().find(|chunk| !chunk["choices"][0]["finish_reason"].is_null());
        assert!(last_chunk.is_some_and(|chunk| chunk["x_npuhal_stats"]["sampling"]["seed"].is_u64()));
        let seed = &wanted["x_npuhal_stats"]["sampling"]["seed"];
        let again = chat(json!({"max_tokens": 12, "temperature": 0.8, "seed": seed}));
        let again = server.post("/v1/chat/completions", &again).json();
        assert_eq!(again["choices"][0]["message"], wanted["message"], "answer {index} can be had again alone");
        assert_eq!(again["choices"][0].get("x_npuhal_stats"), None, "one answer's figures stand beside it");
    }
    assert_eq!(whole["choices"][0]["x_npuhal_stats"]["sampling"]["seed"], 7);
    assert_eq!(whole["x_npuhal_stats"], whole["choices"][1]["x_npuhal_stats"]);
    assert_ne!(whole["choices"][0]["message"], whole["choices"][1]["message"]);
    server.end();
}

/// What the worker finds wrong had no `param`, and another `code` than what is found before.
#[test]
fn a_field_that_the_worker_refuses_is_named() {
    let home = Home::new();
    let server = serve(&home, &[]);
    for (extra, param) in [
        (json!({"logit_bias": {"4000000": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 1000}}), "logit_bias"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs"),
    ] {
        let answer = server.post("/v1/chat/completions", &chat(extra.clone()));
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["param"], &error["code"]),
            (400, &json!(param), &json!("invalid_value")),
            "{extra}"
        );
    }
    // An error does not repeat what was sent.
    for extra in [json!({"temperature": "a".repeat(9000)}), json!({"logit_bias": {"x".repeat(9000): 1}})] {
        let answer = server.post("/v1/chat/completions", &chat(extra));
        assert!(answer.status == 400 && answer.body.len() < 500, "{} bytes", answer.body.len());
    }
    server.end();
}

#[test]
fn a_prompt_over_the_context_is_told_with_both_numbers() {
    let home = Home::new();
    let server = serve(&home, &["--context", "48"]);
    let answer = server.post("/v1/completions", &json!({"prompt": "a b c d ".repeat(60)}));
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("prompt")));
    assert!(error["message"].as_str().unwrap().contains("48 tokens"), "{error}");
    server.end();
}

/// A stream as long as the context, which has begun.
fn begin_long(server: &Server) -> Response {
    begin_stream(server, &chat(json!({"max_tokens": 100_000})))
}

#[test]
fn a_worker_that_is_killed_ends_its_streams_with_an_error_and_is_replaced() {
    let home = Home::new();
    let server = serve_slowly(&home, &[]);
    // With a real model, more often and timed: see serve_faults.
    for round in 1..=3 {
        let mut stream = begin_long(&server);
        signal(server.worker(), rustix::process::Signal::KILL);
        let rest = String::from_utf8(stream.rest()).unwrap();
        assert!(rest.contains("\"code\":\"worker_lost\""), "round {round}: {rest}");
        server.wait_until_ready();
        assert_eq!(server.post("/v1/chat/completions", &chat(json!({}))).status, 200);
    }
    server.end();
}

/// The cores that each thread of a process may run on, as Linux lists them; the first thread's first.
fn cores(process: u32) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    // Threads end at any time.
    let statuses = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("status")).ok());
    let allowed = |status: String| {
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    statuses.map(allowed).collect()
}

#[test]
fn the_server_leaves_a_core_to_its_worker_and_workers_have_all() {
    let home = Home::new();
    let all = cores(std::process::id()).remove(0);
    let server = serve(&home, &[]);
    for round in 1..=2 {
        let worker = server.worker();
        assert_eq!(server.post("/v1/chat/completions", &chat(json!({}))).status, 200);
        let is_only_one = all.parse::<u32>().is_ok();
        assert_eq!(cores(server.pid())[0] == all, is_only_one, "of {all}");
        assert!(cores(worker).iter().all(|cores| *cores == all), "of {all}: {:?}", cores(worker));
        // The next one is started by a thread that had left a core.
        signal(worker, rustix::process::Signal::KILL);
        server.wait_for(|ready| ready["worker_restarts"] == round && ready["status"] == "ready");
    }
    server.end();
}

#[test]
fn a_client_that_goes_away_keeps_the_worker() {
    let home = Home::new();
    let server = serve(&home, &["--parallel", "1"]);
    let worker = server.worker();
    for _ in 0..5 {
        drop(begin_long(&server));
        assert_eq!(server.post("/v1/chat/completions", &chat(json!({}))).status, 200);
    }
    assert_eq!(server.worker(), worker);
    assert_eq!(server.get("/ready").json()["worker_restarts"], 0);
    server.end();
}
