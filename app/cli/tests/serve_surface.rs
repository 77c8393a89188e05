//! The surface of `npuhal serve` that clients rely on: paths, forms of a request, errors, headers, heartbeats.

mod common;

use common::Home;
use common::server::{Answer, CHAT, Server, TEXT, chat, post_head, serve, with};
use serde_json::{Value, json};

fn messages(list: Value) -> Value {
    json!({"messages": list, "max_tokens": 4})
}

#[test]
fn all_paths_are_there_under_all_their_names() {
    let home = Home::new();
    let server = serve(&home, &["--api-key", "a-secret-key"]);
    let root = server.get("/").json();
    assert_eq!((&root["service"], &root["status"]), (&json!("npuhal"), &json!("ready")));
    for path in
        ["/", "/openapi.json", "/v1/openapi.json", "/health", "/health/live", "/ready", "/health/ready", "/v1/health"]
    {
        let answer = server.get(path);
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.header("content-type"), Some("application/json"), "{path}");
        assert_eq!(server.get(&format!("{path}/?x=y")).status, 200, "{path}/?x=y");
        let is_listed = path == "/" || root["endpoints"].as_array().unwrap().contains(&json!(path));
        assert!(is_listed, "{path} in {root}");
    }
    for path in ["/metrics", "/v1/models", "/v1/models/model", "/v1/models/none"] {
        assert_eq!((server.get(path).status, server.get(path).code().as_str()), (401, "invalid_api_key"), "{path}");
    }
    // What there is not is told before who asks is.
    assert_eq!((server.get("/v2/models").status, server.get("/v2/models").code().as_str()), (404, "not_found"));
    assert_eq!(server.post("/v1/embeddings", &json!({})).status, 404);
    server.end();
}

#[test]
fn loading_is_told_until_the_model_is_ready() {
    let home = Home::new();
    let model = home.model();
    let server = Server::start(&home, &["-m", model.to_str().unwrap(), "--no-self-test", "--no-prewarm"]);
    for path in ["/ready", "/health/ready", "/v1/health"] {
        let answer = server.get(path);
        let body = answer.json();
        assert_eq!((answer.status, &body["reason"], &body["draining"]), (503, &json!("not_loaded"), &json!(false)));
    }
    assert_eq!((server.get("/health").status, server.get("/").json()["status"].as_str()), (200, Some("not_ready")));
    assert_eq!(server.post(CHAT, &chat(json!({}))).status, 200);
    assert_eq!(server.get("/v1/health").status, 200);
    server.end();
}

#[test]
fn contents_come_in_several_forms() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let answer = |list: Value| server.post(CHAT, &messages(list));
    let text = |list: Value| {
        let answer = answer(list);
        assert_eq!(answer.status, 200, "{answer:?}");
        let answer = answer.json();
        (answer["choices"][0]["message"]["content"].clone(), answer["usage"]["prompt_tokens"].clone())
    };
    let user = |content: Value| json!({"role": "user", "content": content});
    let whole = text(json!([user(json!("one\ntwo"))]));
    let parts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    assert_eq!(text(json!([user(parts)])), whole);
    assert_eq!(text(json!([user(json!([{"type": "text", "text": "one\ntwo"}]))])), whole);
    assert_eq!(
        text(json!([{"role": "developer", "content": "x"}, user(json!("y"))])),
        text(json!([{"role": "system", "content": "x"}, user(json!("y"))]))
    );
    // A turn of the assistant may be without a text, as clients send it after a call of a tool; others may not.
    let silent = json!([user(json!("a")), {"role": "assistant", "content": null}, user(json!("b"))]);
    let empty = json!([user(json!("a")), {"role": "assistant", "content": ""}, user(json!("b"))]);
    let absent = json!([user(json!("a")), {"role": "assistant"}, user(json!("b"))]);
    assert_eq!(text(silent), text(empty.clone()));
    assert_eq!(text(absent), text(empty));
    text(json!([user(json!(""))]));
    text(
        json!([user(json!("a")), {"role": "assistant", "content": "b", "reasoning_content": "c", "name": "d"}, user(json!("e"))]),
    );
    for (list, param) in [
        (json!([user(json!(null))]), "messages[0].content"),
        (json!([user(json!("a")), {"role": "system", "content": null}]), "messages[1].content"),
        (json!([user(json!(7))]), "messages[0].content"),
        (json!([user(json!([{"type": "image_url", "image_url": {"url": "data:,"}}]))]), "messages[0].content"),
        (json!([user(json!([{"type": "text"}]))]), "messages[0].content"),
        (json!([user(json!(["a"]))]), "messages[0].content"),
        (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!(["x"]), "messages[0]"),
        (json!([{"role": "user", "content": "x", "name": 7}]), "messages[0].name"),
        (json!([{"role": "user", "content": "x", "name": "n".repeat(65)}]), "messages[0].name"),
        (json!([{"role": "assistant", "content": "x", "reasoning_content": []}]), "messages[0].reasoning_content"),
        (json!([]), "messages"),
        (json!("x"), "messages"),
    ] {
        let answer = answer(list.clone());
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["param"], &error["code"]),
            (400, &json!(param), &json!("invalid_value")),
            "{list}"
        );
    }
    server.end();
}

#[test]
fn unknown_fields_are_ignored_and_known_ones_checked() {
    let home = Home::new();
    let server = serve(&home, &[]);
    // What SDKs and user interfaces send besides.
    let extra = json!({
        "user": "someone", "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "parallel_tool_calls": null,
        "response_format": null, "tools": null, "tool_choice": null, "logit_bias": null, "stop": null, "seed": null,
        "options": {"num_ctx": 4096}, "x": [[[]]], "stream_options": null, "reasoning_effort": "low", "n": null,
    });
    for (path, body) in [(CHAT, chat(json!({}))), (TEXT, json!({"prompt": "x", "max_tokens": 2}))] {
        let answer = server.post(path, &with(body, extra.clone()));
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
    }
    // The name that llama.cpp and Open WebUI use.
    for (fields, wanted) in
        [(json!({"repeat_penalty": 1.25}), 1.25), (json!({"repeat_penalty": 1.25, "repetition_penalty": 1.5}), 1.5)]
    {
        let answer = server.post(CHAT, &chat(fields));
        assert_eq!(answer.json()["x_npuhal_stats"]["sampling"]["repetition_penalty"], wanted);
    }
    let wrong = [
        (CHAT, json!({"temperature": "hot"}), "temperature"),
        (CHAT, json!({"top_p": 0}), "top_p"),
        (CHAT, json!({"top_k": -1}), "top_k"),
        (CHAT, json!({"min_p": 2}), "min_p"),
        (CHAT, json!({"seed": -1}), "seed"),
        (CHAT, json!({"frequency_penalty": 3}), "frequency_penalty"),
        (CHAT, json!({"presence_penalty": true}), "presence_penalty"),
        (CHAT, json!({"repetition_penalty": 0}), "repetition_penalty"),
        (CHAT, json!({"repeat_penalty": 3}), "repeat_penalty"),
        (CHAT, json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (CHAT, json!({"logit_bias": {"1": 1000}}), "logit_bias"),
        (CHAT, json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
        (CHAT, json!({"stop": [""]}), "stop"),
        (CHAT, json!({"n": 9}), "n"),
        (CHAT, json!({"stream": 1}), "stream"),
        (CHAT, json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (CHAT, json!({"stream": true, "stream_options": {"x": 1}}), "stream_options"),
        (CHAT, json!({"stream": true, "stream_options": {"include_obfuscation": 1}}), "stream_options"),
        (CHAT, json!({"top_logprobs": 2}), "top_logprobs"),
        (CHAT, json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (CHAT, json!({"logprobs": 2}), "logprobs"),
        (CHAT, json!({"max_tokens": 0}), "max_tokens"),
        (CHAT, json!({"max_completion_tokens": 5}), "max_completion_tokens"),
        (CHAT, json!({"model": ""}), "model"),
        (CHAT, json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
        (TEXT, json!({"logprobs": 6}), "logprobs"),
        (TEXT, json!({"suffix": "x"}), "suffix"),
        (TEXT, json!({"best_of": 2}), "best_of"),
        (TEXT, json!({"echo": "yes"}), "echo"),
        (TEXT, json!({"prompt": ""}), "prompt"),
        (TEXT, json!({"prompt": ["a", "b"]}), "prompt"),
        (TEXT, json!({"prompt": [1, 2]}), "prompt"),
    ];
    for (path, field, param) in wrong {
        let base = if path == CHAT { chat(json!({})) } else { json!({"prompt": "x", "max_tokens": 2}) };
        let answer = server.post(path, &with(base, field.clone()));
        let body = answer.json();
        let error = &body["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!(param)), "{field}: {error}");
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("invalid_request_error"), &json!("invalid_value")),
            "{field}"
        );
        assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
        assert_eq!(error.as_object().unwrap().keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
    }
    let answer = server.post(CHAT, &chat(json!({"model": "none"})));
    let error = &answer.json()["error"];
    assert_eq!((answer.status, &error["code"], &error["param"]), (404, &json!("model_not_found"), &json!("model")));
    server.end();
}

/// A preflight that names a header that is not on a fixed list failed, although the header is harmless.
#[test]
fn browsers_of_the_allowed_origins_may_ask() {
    let home = Home::new();
    let server = serve(&home, &["--cors-origin", "http://ui.test:8080"]);
    let preflight = |path: &str, origin: &str| {
        let head = format!(
            "OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: authorization,content-type,x-stainless-helper-method\r\nConnection: close\r\n\r\n"
        );
        server.send(&head, b"")
    };
    for path in [CHAT, "/v1/models", "/anything"] {
        let answer = preflight(path, "http://ui.test:8080");
        assert_eq!((answer.status, answer.body.len()), (204, 0));
        assert_eq!(answer.header("access-control-allow-origin"), Some("http://ui.test:8080"));
        assert_eq!(answer.header("access-control-allow-methods"), Some("GET, POST, OPTIONS"));
        let allowed = answer.header("access-control-allow-headers").unwrap().to_ascii_lowercase();
        for name in ["authorization", "content-type", "x-stainless-helper-method"] {
            assert!(allowed.split(',').any(|held| held.trim() == name), "{name} in {allowed}");
        }
        assert!(answer.head.to_ascii_lowercase().contains("\r\nvary: origin"), "{}", answer.head);
    }
    for origin in ["http://ui.test", "http://localhost:3000", "null", "http://ui.test:8080.evil.test"] {
        let answer = preflight(CHAT, origin);
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, None), "{origin}");
    }
    // The origin is told with every answer, errors and streams too, and never with the metrics.
    let get = |path: &str| {
        server.send(
            &format!(
                "GET {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://ui.test:8080\r\nConnection: close\r\n\r\n"
            ),
            b"",
        )
    };
    for path in ["/v1/models", "/nothing", "/ready"] {
        assert_eq!(get(path).header("access-control-allow-origin"), Some("http://ui.test:8080"), "{path}");
    }
    assert_eq!(get("/metrics").header("access-control-allow-origin"), None);
    let body = chat(json!({"stream": true})).to_string();
    let head = post_head(CHAT, body.len())
        .replace("Host: localhost\r\n", "Host: localhost\r\nOrigin: http://ui.test:8080\r\n");
    let stream = server.send(&head, body.as_bytes());
    assert_eq!(stream.header("access-control-allow-origin"), Some("http://ui.test:8080"));
    server.end();
}

/// They were taken, and then the pages that they were given for were refused.
#[test]
fn origins_that_no_browser_sends_are_refused() {
    let home = Home::new();
    let model = home.model();
    for origin in ["*", "localhost:5173", "http://ui.test/page", "://ui.test", "http://", "http://*.ui.test", ""] {
        let said = home.run(&["serve", "--port", "0", "-m", model.to_str().unwrap(), "--cors-origin", origin]);
        let err = said.with_code(2).err;
        assert!(err.contains("--cors-origin") && err.contains("http://localhost:5173"), "{origin}: {err}");
    }
    let server = serve(&home, &["--cors-origin", "HTTP://UI.test/", "--cors-origin", "vscode-webview://1a2b"]);
    for origin in ["http://ui.test", "vscode-webview://1a2b"] {
        let head =
            format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n");
        let answer = server.send(&head, b"");
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some(origin)));
    }
    server.end();
}

/// A server without a key did what a page of any site asked of it, and a name that leads here let the page read the answer.
#[test]
fn pages_of_other_sites_need_a_key() {
    let home = Home::new();
    let body = chat(json!({"max_tokens": 1})).to_string();
    let ask = |server: &Server, host: &str, more: &str| {
        let head = post_head(CHAT, body.len()).replace("Host: localhost\r\n", &format!("Host: {host}\r\n{more}"));
        server.send(&head, body.as_bytes())
    };
    let (evil, key) = ("Origin: https://evil.test\r\n", "Authorization: Bearer a-secret-key\r\n");
    let server = serve(&home, &[]);
    for (host, more) in [("localhost", evil), ("evil.test", ""), ("localhost", "Origin: null\r\n")] {
        let answer = ask(&server, host, more);
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (403, &json!("origin_not_allowed")),
            "{host} {more}"
        );
    }
    assert_eq!(
        ask(&server, "127.0.0.1:8000", "Origin: http://127.0.0.1:8000\r\n").status,
        200,
        "the server's own pages"
    );
    assert_eq!(ask(&server, "localhost", "Origin: http://localhost:3000\r\n").status, 200);
    let ready = |server: &Server, host: &str| {
        server.send(&format!("GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"), b"").json()
    };
    assert_eq!(ready(&server, "localhost")["models"], json!(["model"]));
    assert_eq!(ready(&server, "evil.test").get("models"), None);
    server.end();
    let server = serve(&home, &["--api-key", "a-secret-key"]);
    assert_eq!(ask(&server, "evil.test", &format!("{evil}{key}")).status, 200, "the key is what counts");
    assert_eq!(ready(&server, "localhost").get("models"), None, "without the key");
    server.end();
}

#[test]
fn every_answer_has_the_security_headers_and_a_number() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let mut numbers = std::collections::BTreeSet::new();
    let answers = [
        server.get("/"),
        server.get("/nothing"),
        server.get("/metrics"),
        server.get(CHAT),
        server.post(CHAT, &json!({})),
        server.post(CHAT, &chat(json!({}))),
        server.post(CHAT, &chat(json!({"stream": true}))),
    ];
    for answer in &answers {
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
            ("access-control-expose-headers", "X-Request-ID, Retry-After"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{}", answer.head);
        }
        assert!(answer.header("content-security-policy").unwrap().contains("default-src 'none'"));
        let number = answer.header("x-request-id").unwrap();
        assert!(number.starts_with("req-") && number.len() == 36, "{number}");
        assert!(numbers.insert(number.to_owned()), "{number} came twice");
    }
    let [.., stream] = &answers;
    assert_eq!(stream.header("content-type"), Some("text/event-stream"));
    assert_eq!(stream.header("x-accel-buffering"), Some("no"));
    assert_eq!(stream.header("transfer-encoding"), Some("chunked"));
    // A path that knows other methods says which.
    let [_, _, _, wrong_method, ..] = &answers;
    assert_eq!((wrong_method.status, wrong_method.header("allow")), (405, Some("POST")));
    server.end();
}

/// A connection serves one request after the other, streams among them.
#[test]
fn connections_are_kept() {
    use std::io::Write;
    let home = Home::new();
    let server = serve(&home, &[]);
    let mut socket = server.connect();
    let body = chat(json!({"stream": true})).to_string();
    let stream = format!("{}{body}", post_head(CHAT, body.len()).replace("Connection: close\r\n", ""));
    let get = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let last = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    socket.write_all(format!("{get}{stream}{get}{last}").as_bytes()).unwrap();
    let answer = Answer::read(socket);
    assert_eq!(answer.status, 200);
    let text = format!("{}\r\n{}", answer.head, String::from_utf8_lossy(&answer.body));
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 4, "{text}");
    assert!(text.contains("data: [DONE]") && text.trim_end().ends_with('}'), "{text}");
    server.end();
}

/// Comments keep proxies and clients from giving up while a long prompt is computed. They did not come as long as the worker told
/// of its progress, which no client sees.
#[test]
fn a_silent_stream_is_kept_alive() {
    let home = Home::new();
    let model = home.long_model();
    let arguments = ["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1", "--heartbeat-ms", "20"];
    let server = Server::start(&home, &[&arguments[..], &["--numerics", "exact"]].concat());
    server.wait_until_ready();
    let prompt = "a b c d e f g h ".repeat(50);
    let answer = server.post(TEXT, &json!({"prompt": prompt, "max_tokens": 1, "stream": true}));
    let text = String::from_utf8(answer.body).unwrap();
    let (silence, answer) = text.split_once("data: ").unwrap();
    assert!(silence.contains(": working\n\n"), "{text}");
    assert!(answer.ends_with("data: [DONE]\n\n"), "{text}");
    server.end();
}
