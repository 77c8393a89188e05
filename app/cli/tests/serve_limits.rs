//! Limits of `npuhal serve`, each seen to act over HTTP: rates, queue, sizes, times, keys, certificates, clients that do not read.

mod common;

use common::Home;
use common::server::{
    Answer, CHAT, Frozen, HANG_GUARD, Response, Server, TEXT, begin_stream, chat, post_head, serve, serve_slowly,
};
use npuhal_tests::kit::scripted::Script;
use npuhal_tests::process::resident_bytes;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/server").join(name)
}

#[track_caller]
fn assert_refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status, answer.code().as_str()), (status, code), "{answer:?}");
}

/// Seconds after which a client is to come back.
#[track_caller]
fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

#[test]
fn a_client_that_asks_too_often_is_told_when_to_come_back() {
    let home = Home::new();
    let server = serve(&home, &["--rate-limit-per-minute", "3", "--rate-limit-local"]);
    for _ in 0..5 {
        assert_eq!(server.get("/v1/models").status, 200, "questions are free");
    }
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    // What is refused later counts as well.
    assert_refused(&server.post(CHAT, &json!({"messages": []})), 400, "invalid_value");
    assert_refused(&server.post(TEXT, &json!({"prompt": "x", "model": "none"})), 404, "model_not_found");
    let answer = server.post(CHAT, &chat(json!({})));
    assert_refused(&answer, 429, "rate_limit_exceeded");
    assert!((1..=60).contains(&retry_after(&answer)), "{answer:?}");
    assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    server.end();

    // Without being asked, this machine is not limited.
    let server = serve(&home, &["--rate-limit-per-minute", "1"]);
    for _ in 0..4 {
        assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    }
    server.end();
    let said = home.run(&["serve", "--rate-limit-local"]).with_code(2);
    assert!(said.err.contains("--rate-limit-per-minute"), "{}", said.err);
}

#[test]
fn the_queue_is_bounded_and_in_order() {
    let home = Home::new();
    let server = serve(&home, &["--parallel", "1", "--queue-capacity", "2"]);
    let frozen = Frozen::new(server.worker());
    let ask = chat(json!({}));
    let answers: Vec<_> = thread::scope(|scope| {
        let mut waiting = Vec::new();
        for count in 1..=3 {
            waiting.push(scope.spawn(|| server.post(CHAT, &ask)));
            server.wait_for(|ready| ready["active_requests"] == count);
        }
        let answer = server.post(CHAT, &ask);
        assert_refused(&answer, 429, "queue_full");
        assert_eq!(retry_after(&answer), 1);
        assert_eq!(server.metric("npuhal_api_active_requests"), 3.0);
        assert_eq!(server.metric("npuhal_api_queue_depth"), 2.0);
        drop(frozen);
        waiting.into_iter().map(|waiting| waiting.join().unwrap()).collect()
    });
    for answer in answers {
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert_eq!(server.metric("npuhal_api_queue_depth"), 0.0);
    server.end();
}

#[test]
fn a_body_or_head_that_does_not_come_ends_the_wait() {
    let home = Home::new();
    let server = serve(&home, &["--body-timeout", "1"]);
    let mut stalled = server.connect();
    stalled.write_all(format!("{}{{\"messages\":", post_head(CHAT, 100)).as_bytes()).unwrap();
    let mut half = server.connect();
    half.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ").unwrap();
    // Meanwhile others are answered.
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    assert_refused(&Answer::read(stalled), 408, "request_timeout");
    let mut said = String::new();
    let _ = half.read_to_string(&mut said);
    assert_eq!(said, "", "a head that does not come is not answered");
    // A chunked body that never ends, too.
    let mut chunked = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"pro\r\n";
    chunked.write_all(head.as_bytes()).unwrap();
    assert_refused(&Answer::read(chunked), 408, "request_timeout");
    server.end();
}

#[test]
fn time_that_is_over_is_told() {
    let home = Home::new();
    let server = serve_slowly(&home, &["--parallel", "1", "--request-timeout", "1"]);
    let long = chat(json!({"max_tokens": 1000}));
    assert_refused(&server.post(CHAT, &long), 504, "inference_timeout");
    let mut stream = begin_stream(&server, &long);
    let events = stream.events();
    assert_eq!(stream.status, 200);
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(
        (&error["error"]["code"], &error["error"]["type"]),
        (&json!("inference_timeout"), &json!("timeout_error"))
    );
    // Waiting for a place counts, too.
    thread::scope(|scope| {
        let running = scope.spawn(|| server.post(CHAT, &long));
        server.wait_for(|ready| ready["active_requests"] == 1);
        assert_refused(&server.post(CHAT, &long), 504, "inference_timeout");
        assert_eq!(running.join().unwrap().status, 504);
    });
    // The worker was not to blame.
    assert_eq!(server.post(CHAT, &chat(json!({"max_tokens": 2}))).status, 200);
    assert_eq!(server.get("/ready").json()["worker_restarts"], 0);
    assert!(server.metric("npuhal_generations_total{model=\"slow\",outcome=\"timed_out\"}") >= 3.0);
    server.end();
}

#[test]
fn lengths_are_limited() {
    let home = Home::new();
    let server = serve(&home, &["--max-chars", "40", "--context", "64", "--max-body-bytes", "4096"]);
    let message = |text: &str| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
    for (fits, text) in [(true, "ü".repeat(40)), (false, "ü".repeat(41)), (false, "u".repeat(41))] {
        // The template's own text takes its part of the context.
        let answers =
            [server.post(CHAT, &message(&text)), server.post(TEXT, &json!({"prompt": text, "max_tokens": 1}))];
        for (answer, param) in answers.iter().zip(["messages[0].content", "prompt"]) {
            if fits {
                assert!(answer.status == 200 || answer.code() == "context_length_exceeded", "{answer:?}");
            } else {
                assert_refused(answer, 400, "invalid_value");
                assert_eq!(answer.json()["error"]["param"], param);
            }
        }
    }
    let kwargs = json!({"chat_template_kwargs": {"a": vec![0; 30]}});
    let answer = server.post(CHAT, &chat(kwargs));
    assert_eq!(answer.json()["error"]["param"], "chat_template_kwargs", "{answer:?}");
    // More tokens than the context holds are not an error.
    let answer =
        server.post(TEXT, &json!({"prompt": "ab", "max_tokens": 4_000_000_000_000_u64, "seed": 1, "temperature": 1}));
    let usage = &answer.json()["usage"];
    assert!(usage["total_tokens"].as_u64().unwrap() <= 65, "{usage}");
    assert_refused(&server.post(TEXT, &json!({"prompt": "ab", "x": "y".repeat(4096)})), 413, "request_too_large");
    server.end();
}

/// The key that was shown.
fn shown_key(said: &str) -> String {
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("API key")).collect();
    assert_eq!(lines.len(), 1, "it is shown once: {said}");
    let key = lines[0].rsplit(' ').next().unwrap().to_owned();
    assert_eq!(said.matches(&key).count(), 1, "it is shown once: {said}");
    key
}

#[test]
fn others_need_the_random_key_that_is_shown_once() {
    let home = Home::new();
    let model = home.model();
    let start = || {
        let arguments =
            ["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1", "--host", "0.0.0.0", "--verbose"];
        let server = Server::start(&home, &arguments);
        server.wait_until_ready();
        server
    };
    let keys: Vec<String> = (0..2)
        .map(|_| {
            let server = start();
            let key = shown_key(&server.said());
            assert!(key.starts_with("sk-") && key.len() == 67, "{key}");
            assert_refused(&server.post(CHAT, &chat(json!({}))), 401, "invalid_api_key");
            let ask = |key: &str| {
                let head = format!(
                    "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
                );
                server.send(&head, b"").status
            };
            assert_eq!(ask(&key), 200);
            // Any other, also one that differs in its last or first character alone, or is a part of it.
            let last = format!("{}{}", &key[..66], if key.ends_with('0') { '1' } else { '0' });
            let first = format!("S{}", &key[1..]);
            for wrong in [&last, &first, &key[..66], &format!("{key}0"), "", "sk-"] {
                assert_eq!(ask(wrong), 401, "{wrong}");
            }
            assert_eq!(shown_key(&server.end()), key, "nor is it shown later, not in a log of all requests either");
            key
        })
        .collect();
    assert_ne!(keys[0], keys[1]);
    // This machine alone needs none.
    assert!(!serve(&home, &[]).end().contains("API key"));
}

#[test]
fn tls_serves_and_wrong_files_are_told() {
    let home = Home::new();
    let path = |name: &str| data(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("server.pem"), path("server.key"));
    let model = home.model();
    let tls = [
        "-m",
        model.to_str().unwrap(),
        "--no-self-test",
        "--threads",
        "1",
        "--tls-cert",
        &certificate,
        "--tls-key",
        &key,
    ];
    let server = Server::start(&home, &tls);
    let authority = Certificate::from_pem(&fs::read(data("ca.pem")).unwrap()).unwrap();
    let agent = |roots: &[Certificate<'static>]| {
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(roots)).build();
        let config = ureq::Agent::config_builder().tls_config(tls).proxy(None).http_status_as_error(false);
        config.timeout_global(Some(HANG_GUARD)).build().new_agent()
    };
    let trusting = agent(&[authority]);
    let url = |path: &str| format!("https://127.0.0.1:{}{path}", server.address.port());
    let started = Instant::now();
    while trusting.get(url("/ready")).call().unwrap().status() != 200 {
        assert!(started.elapsed() < HANG_GUARD);
        thread::sleep(Duration::from_millis(20));
    }
    let body = chat(json!({"stream": true})).to_string();
    let mut answer = trusting.post(url(CHAT)).content_type("application/json").send(&body).unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.body_mut().read_to_string().unwrap().ends_with("data: [DONE]\n\n"));
    assert!(agent(&[]).get(url("/health")).call().is_err(), "nobody vouches for it");
    // Plain HTTP gets no answer, and disturbs nobody.
    let mut plain = server.connect();
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut said = Vec::new();
    let _ = plain.read_to_end(&mut said);
    assert!(!String::from_utf8_lossy(&said).contains("HTTP/1.1 2"));
    assert_eq!(trusting.get(url("/health")).call().unwrap().status(), 200);
    server.end();

    let (missing, other) = (home.path().join("none.pem").to_str().unwrap().to_owned(), path("other.key"));
    for (certificate, key, phrase) in [
        (&missing, &key, "none.pem: wanted certificates in PEM form"),
        (&key, &key, "server.key: wanted certificates in PEM form, found none"),
        (&certificate, &certificate, "server.pem: wanted a private key in PEM form"),
        (&certificate, &other, "wanted a certificate chain and its key"),
    ] {
        let arguments =
            ["serve", "-m", model.to_str().unwrap(), "--port", "0", "--tls-cert", certificate, "--tls-key", key];
        let said = home.run(&arguments).with_code(1);
        assert!(said.err.contains(phrase), "{phrase}: {}", said.err);
        assert!(!said.err.contains("API: "), "no port was opened: {}", said.err);
    }
    home.run(&["serve", "--tls-cert", &certificate]).with_code(2);
}

/// A model that goes on and on, with many characters a token.
fn talkative(home: &Home) -> Server {
    let mut script = Script::default();
    let word = "blah ".repeat(200);
    let other = "bleh ".repeat(200);
    script.state(&["\n", &other], &[(&word, 1.0)]);
    script.state(&[&word], &[(&other, 1.0)]);
    let path = home.path().join("talkative.gguf");
    script.build(8192).write(&path).unwrap();
    let arguments = ["-m", path.to_str().unwrap(), "--threads", "1", "--parallel", "8", "--body-timeout", "2"];
    let server = Server::start(home, &arguments);
    server.wait_until_ready();
    server
}

#[test]
fn a_client_that_does_not_read_costs_little_and_is_given_up() {
    let home = Home::new();
    let server = talkative(&home);
    let before = resident_bytes(server.pid()).unwrap();
    // 8000 tokens of 1000 characters each, and as much in 8 choices: 64 MB.
    let body = chat(json!({"max_tokens": 8000, "n": 8, "stream": true})).to_string();
    let mut socket = server.connect();
    socket.write_all(format!("{}{body}", post_head(CHAT, body.len())).as_bytes()).unwrap();
    let slow = "npuhal_generations_total{model=\"talkative\",outcome=\"slow_reader\"}";
    let started = Instant::now();
    let mut most = before;
    while server.metric(slow) + server.metric("npuhal_generations_total{model=\"talkative\",outcome=\"disconnected\"}")
        < 1.0
    {
        assert!(started.elapsed() < HANG_GUARD, "{}", server.said());
        most = most.max(resident_bytes(server.pid()).unwrap());
        thread::sleep(Duration::from_millis(20));
    }
    assert!(most < before + (48 << 20), "{before} bytes became {most}");
    // Others are answered meanwhile, and the worker is free again.
    let answer = server.post(CHAT, &chat(json!({"max_tokens": 3})));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
    // The connection is closed although nothing was read; what was sent is no whole stream.
    thread::sleep(Duration::from_secs(3));
    let mut response = Response::read(socket).unwrap();
    let rest = response.rest();
    assert!(!rest.ends_with(b"data: [DONE]\n\n"), "{} bytes", rest.len());
    let said = String::from_utf8_lossy(&rest[rest.len().saturating_sub(300)..]).into_owned();
    assert!(rest.len() < (24 << 20), "{} bytes were kept for it: {said}", rest.len());
    server.end();
}

#[test]
fn a_long_silence_is_filled_with_comments() {
    // One silence of ten seconds.
    if std::env::var_os("NPUHAL_SOAK").is_none() {
        return npuhal_tests::models::left_to_soak("a silence of ten seconds in a stream");
    }
    let home = Home::new();
    let server = serve_slowly(&home, &[]);
    let mut stream = begin_stream(&server, &chat(json!({"max_tokens": 900})));
    let frozen = Frozen::new(server.worker());
    thread::sleep(Duration::from_millis(10_500));
    drop(frozen);
    let rest = String::from_utf8(stream.rest()).unwrap();
    // The line before was taken in.
    assert!(rest.contains("\n: working\n\n") || rest.starts_with(": working\n\n"), "{rest}");
    assert!(rest.ends_with("data: [DONE]\n\n"));
    server.end();
}

#[test]
fn odd_paths_and_methods_are_answered_in_the_same_form() {
    let home = Home::new();
    let server = serve(&home, &[]);
    for path in ["/v1/models/%ff", "/v1/models/%2e%2e%2fetc%2fpasswd", "/%00", "/v1//models", "//", "/v1/models/a/b/c"]
    {
        let answer = server.get(path);
        if path == "//" {
            assert_eq!(answer.status, 200, "slashes at the end go");
            continue;
        }
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
        assert!(["not_found", "model_not_found"].contains(&answer.code().as_str()), "{path}: {answer:?}");
    }
    for method in ["DELETE", "PUT", "PATCH", "TRACE", "BREW"] {
        let answer =
            server.send(&format!("{method} {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"), b"");
        assert_refused(&answer, 405, "method_not_allowed");
    }
    server.end();
}
