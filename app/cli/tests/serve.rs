//! `npuhal serve` over its socket: validation, answers, streams, models, workers that die, and the end in good order.

mod common;

use common::Home;
use serde_json::{Map, Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStderr, Stdio};
use std::time::{Duration, Instant};

/// Ten times what anything here takes.
const HANG_GUARD: Duration = Duration::from_secs(60);

struct Server {
    child: Child,
    address: SocketAddr,
    // Read to the end by a thread, so that the server never waits for its own messages.
    _log: std::thread::JoinHandle<()>,
}

impl Server {
    fn start(home: &Home, arguments: &[&str]) -> Self {
        let mut command = home.npuhal(&["serve", "--port", "0"]);
        command.env_remove("NPUHAL_API_KEY").args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let address = address(&mut log);
        let log = std::thread::spawn(move || drop(std::io::copy(&mut log, &mut std::io::sink())));
        Self { child, address, _log: log }
    }

    fn wait_until_ready(&self) {
        let started = Instant::now();
        while self.get("/ready").status != 200 {
            assert!(started.elapsed() < HANG_GUARD, "{:?}", self.get("/ready"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(HANG_GUARD)).unwrap();
        socket
    }

    fn send(&self, head: &str, body: &[u8]) -> Answer {
        let mut socket = self.connect();
        socket.write_all(head.as_bytes()).unwrap();
        // A server that has refused the head does not wait for the body.
        let _ = socket.write_all(body);
        Answer::read(socket)
    }

    fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), b"")
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        self.send(&post_head(path, body.len()), body.as_bytes())
    }

    fn worker(&self) -> u32 {
        // A process is the child of the thread that started it.
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let children = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("children")).ok());
        let children: String = children.collect();
        children.split_whitespace().next().expect("there is a worker").parse().unwrap()
    }

    /// Asks it to end and waits for it.
    fn end(mut self) {
        signal(self.child.id(), rustix::process::Signal::TERM);
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            assert!(started.elapsed() < HANG_GUARD, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended; a test that failed leaves none behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(process: u32, signal: rustix::process::Signal) {
    let process = rustix::process::Pid::from_raw(process.try_into().unwrap()).unwrap();
    rustix::process::kill_process(process, signal).unwrap();
}

fn address(log: &mut BufReader<ChildStderr>) -> SocketAddr {
    let mut said = String::new();
    loop {
        let start = said.len();
        assert!(log.read_line(&mut said).unwrap() > 0, "the server ended: {said}");
        if let Some((_, rest)) = said[start..].split_once("API: http://") {
            return rest.trim_end().trim_end_matches("/v1").parse().unwrap();
        }
    }
}

fn post_head(path: &str, len: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len}\r\n\r\n"
    )
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn read(mut socket: TcpStream) -> Self {
        let mut bytes = Vec::new();
        // A reset after the answer is how a connection with an unread body ends.
        let _ = socket.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = bytes[end + 4..].to_vec();
        if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            body = unchunked(&body);
        }
        Self { status, head, body }
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    fn events(&self) -> Vec<String> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        text.split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        let rest = &bytes[end + 2..];
        // A stream that was broken off ends where it was.
        let Some(chunk) = rest.get(..length).filter(|_| length > 0) else { break };
        body.extend_from_slice(chunk);
        bytes = rest.get(length + 2..).unwrap_or_default();
    }
    body
}

fn serve(home: &Home, arguments: &[&str]) -> Server {
    let model = home.model();
    let mut all = vec!["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1"];
    all.extend(arguments);
    let server = Server::start(home, &all);
    server.wait_until_ready();
    server
}

fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

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
    let without = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
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
    let options = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://localhost:3000\r\nConnection: close\r\n\r\n";
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
        let head = format!("GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nConnection: close\r\n\r\n");
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
    }
    assert_ne!(whole["choices"][0]["message"], whole["choices"][1]["message"]);
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

/// Begins a long stream and reads until its first piece.
fn begin_stream(server: &Server) -> BufReader<TcpStream> {
    let body = chat(json!({"max_tokens": 100_000, "stream": true})).to_string();
    let mut socket = server.connect();
    socket.write_all(post_head("/v1/chat/completions", body.len()).as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    let mut reader = BufReader::new(socket);
    let mut line = String::new();
    while !line.contains("\"content\":") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended");
    }
    reader
}

#[test]
fn a_worker_that_is_killed_ends_its_streams_with_an_error_and_is_replaced() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let is_soak = std::env::var_os("NPUHAL_SOAK").is_some();
    if !is_soak {
        npuhal_tests::models::left_to_soak("100 workers killed in the middle of a stream; 5 are");
    }
    for round in 1..=if is_soak { 100 } else { 5 } {
        let mut stream = begin_stream(&server);
        signal(server.worker(), rustix::process::Signal::KILL);
        let mut rest = String::new();
        let _ = stream.read_to_string(&mut rest);
        let is_over = rest.contains("\"code\":\"worker_lost\"") || rest.contains("[DONE]");
        assert!(is_over, "round {round}: {rest}");
        server.wait_until_ready();
        assert_eq!(server.post("/v1/chat/completions", &chat(json!({}))).status, 200);
    }
    server.end();
}

#[test]
fn a_client_that_goes_away_keeps_the_worker() {
    let home = Home::new();
    let server = serve(&home, &["--parallel", "1"]);
    let worker = server.worker();
    for _ in 0..5 {
        drop(begin_stream(&server));
        assert_eq!(server.post("/v1/chat/completions", &chat(json!({}))).status, 200);
    }
    assert_eq!(server.worker(), worker);
    assert_eq!(server.get("/ready").json()["worker_restarts"], 0);
    server.end();
}

#[test]
fn what_was_admitted_is_finished_when_the_server_is_told_to_end() {
    let home = Home::new();
    let mut server = serve(&home, &[]);
    let mut streams: Vec<_> = (0..3).map(|_| begin_stream(&server)).collect();
    signal(server.child.id(), rustix::process::Signal::TERM);
    let started = Instant::now();
    // Readiness goes at once; new requests are told so.
    while started.elapsed() < HANG_GUARD {
        let Ok(mut socket) = TcpStream::connect(server.address) else { break };
        socket.write_all(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        let _ = socket.read_to_string(&mut text);
        if text.contains("draining") || text.is_empty() {
            break;
        }
    }
    for stream in &mut streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("[DONE]"), "{rest}");
    }
    assert!(server.child.wait().unwrap().success());
}
