//! `npuhal chat --api-url` and `npuhal bench --url`, against npuhal's own server and against servers that answer badly.

mod common;

use common::server::{Server, serve};
use common::{Home, Said};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::thread::JoinHandle;

/// npuhal in `home` with `arguments` and what is typed.
fn typed(home: &Home, arguments: &[&str], input: &str) -> Said {
    let mut command = home.npuhal(arguments);
    command.env_remove("NPUHAL_API_KEY").env_remove("NPUHAL_API_URL");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    Said::from(child.wait_with_output().unwrap())
}

fn url(server: &Server) -> String {
    format!("http://{}/v1", server.address)
}

#[test]
fn a_chat_with_a_server_has_its_commands() {
    let home = Home::new();
    let server = serve(&home, &["--api-key", "a-secret-key"]);
    let arguments = ["chat", "--api-url", &url(&server), "--api-key", "a-secret-key", "-n", "6", "--stats"];
    let input = "/stats\nhello\n/stats\n/models\nagain\n/reset\nhello\n/nonsense\n/exit\n";
    let said = typed(&home, &arguments, input).with_code(0);
    let figures: Vec<&str> = said.err.lines().filter(|line| line.starts_with("prompt ")).collect();
    // Three answers, and one command after the first.
    assert_eq!(figures.len(), 4, "{}", said.err);
    assert!(
        figures.iter().all(|line| line.contains("6 tokens at") && line.contains("ended by token limit")),
        "{figures:?}"
    );
    let prompt_tokens = |line: &str| line.split(' ').nth(1).unwrap().parse::<u32>().unwrap();
    let counts: Vec<u32> = figures.iter().map(|line| prompt_tokens(line)).collect();
    assert!(counts[0] == counts[1] && counts[2] > counts[0] && counts[3] == counts[0], "{counts:?}");
    for wanted in [
        "model at http://127.0.0.1:",
        "No generation statistics yet.",
        "Available models: model",
        "Conversation reset.",
        "/nonsense: no such command",
    ] {
        assert!(said.err.contains(wanted), "{wanted} in {}", said.err);
    }
    // The same tokens as here, and the same answer to the same question.
    let model = home.path().join("model.gguf");
    let here = typed(&home, &["chat", "-m", model.to_str().unwrap(), "-n", "6", "--prompt", "hello"], "").with_code(0);
    assert!(said.out.starts_with(&here.out), "{:?}: {:?}", said.out, here.out);
    server.end();
}

#[test]
fn one_answer_ends_with_its_figures() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let url = url(&server);
    let arguments = ["chat", "--api-url", &url, "-m", "model", "-n", "5", "--prompt", "hello", "--temperature", "0.8"];
    let said = typed(&home, &arguments, "").with_code(0);
    let last = said.err.lines().last().unwrap();
    assert!(
        last.starts_with("tokens=") && last.contains(" tok/s=") && last.contains(" TTFT=") && last.ends_with('s'),
        "{last}"
    );
    // The address may come from the environment; who says where the model runs means this machine.
    let mut command = home.npuhal(&["chat", "-n", "2", "--prompt", "hello"]);
    let said = Said::from(command.env("NPUHAL_API_URL", &url).output().unwrap()).with_code(0);
    assert!(said.err.contains("model at http://"), "{}", said.err);
    let model = home.path().join("model.gguf");
    let mut command =
        home.npuhal(&["chat", "-n", "2", "--prompt", "hello", "--device", "cpu", "-m", model.to_str().unwrap()]);
    let said = Said::from(command.env("NPUHAL_API_URL", &url).output().unwrap()).with_code(0);
    assert!(said.err.contains("using the CPU") && said.err.contains("peak_RAM="), "{}", said.err);
    for (more, part) in [
        (&["--device", "cpu"][..], "the model runs on the server"),
        (&["--think-budget", "5"], "--think-budget are for a model that runs here"),
        (&["--temperature", "9"], "temperature"),
    ] {
        let said = typed(&home, &[&arguments[..5], more, &["--prompt", "x"]].concat(), "").with_code(2);
        assert!(said.err.contains(part), "{}", said.err);
    }
    server.end();
}

/// `eval` used to ask the server of the environment and to drop the device that was named.
#[test]
fn an_evaluation_runs_here_where_it_is_said_how() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let url = url(&server);
    // What looks like a control token is text, here as on a server.
    let items = home.path().join("items.jsonl");
    let item = r#"{"id":"a","category":"c","prompt":"one<|im_end|> two","expected":"x","max_tokens":6}"#;
    std::fs::write(&items, item).unwrap();
    let eval = |more: &[&str]| {
        let arguments = ["eval", "--dataset", items.to_str().unwrap(), "--format", "json"];
        let mut command = home.npuhal(&[&arguments[..], more].concat());
        let said = Said::from(command.env("NPUHAL_API_URL", &url).output().unwrap()).with_code(0);
        serde_json::from_str::<Value>(&said.out).unwrap()
    };
    let there = eval(&["-m", "model"]);
    assert!(there["source"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{there:#}");
    let model = home.path().join("model.gguf");
    let here = eval(&["-m", model.to_str().unwrap(), "--device", "cpu", "--threads", "1"]);
    assert!(here["source"].as_str().unwrap().contains("using the CPU"), "{here:#}");
    let (there, here) = (&there["results"][0], &here["results"][0]);
    assert_eq!((&there["text"], &there["generated_tokens"]), (&here["text"], &here["generated_tokens"]));
    let loss = |result: &Value| result["loss"].as_f64().unwrap();
    assert!((loss(there) - loss(here)).abs() < 1e-6, "{there:#} {here:#}");
    for (more, part) in [
        (["--api-url", &url], "the model runs on the server"),
        (["--self-test", "--verbose"], "--self-test runs no model"),
    ] {
        let arguments = ["eval", "--numerics", "exact"];
        let said = typed(&home, &[&arguments[..], &more].concat(), "").with_code(2);
        assert!(said.err.contains(part), "{}", said.err);
    }
    // Hashing a package again is a matter of this machine, too.
    let mut command = home.npuhal(&["chat", "--verify", "-n", "2", "--prompt", "hello", "-m", model.to_str().unwrap()]);
    let said = Said::from(command.env("NPUHAL_API_URL", &url).output().unwrap()).with_code(0);
    assert!(said.err.contains("using the CPU"), "{}", said.err);
    server.end();
}

#[test]
fn refusals_are_told_with_what_to_do() {
    let home = Home::new();
    let server = serve(&home, &["--api-key", "a-secret-key"]);
    let url = url(&server);
    let ask = |more: &[&str]| {
        typed(&home, &[&["chat", "--api-url", &url, "--prompt", "hello"][..], more].concat(), "").with_code(1).err
    };
    for wrong in [&[][..], &["--api-key", "another-key"]] {
        let err = ask(wrong);
        assert!(err.contains("status 401") && err.contains("give the server's key with --api-key"), "{err}");
    }
    let err = ask(&["--api-key", "a-secret-key", "-m", "none"]);
    assert!(err.contains("status 404: model 'none' is not installed; the server has: model"), "{err}");
    let said =
        typed(&home, &["bench", "--url", &url, "-m", "none", "-n", "2", "--api-key", "a-secret-key"], "").with_code(1);
    assert!(
        said.out.contains("failed, 2 times: ") && said.err.contains("2 of 2 requests failed"),
        "{}{}",
        said.out,
        said.err
    );
    server.end();
    let err = ask(&[]);
    assert!(err.contains("the connection was refused; is the server running?"), "{err}");
    let said = typed(&home, &["chat", "--api-url", "127.0.0.1:8000", "--prompt", "x"], "").with_code(2);
    assert!(said.err.contains("is not the address of a server"), "{}", said.err);
}

/// Answers each request with the next of `answers`, in pieces of a few bytes.
fn bad_server(answers: Vec<String>) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        for answer in answers {
            let (socket, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(socket);
            read_request(&mut reader);
            let mut socket = reader.into_inner();
            for piece in answer.as_bytes().chunks(3) {
                // The client may have seen enough.
                if socket.write_all(piece).and_then(|()| socket.flush()).is_err() {
                    break;
                }
            }
        }
    });
    (url, server)
}

fn read_request(reader: &mut BufReader<TcpStream>) {
    let (mut line, mut length) = (String::new(), 0);
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    reader.read_exact(&mut vec![0; length]).unwrap();
}

fn http(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}")
}

/// A stream, whose end is that of the connection.
fn events(body: &str) -> String {
    let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream; charset=utf-8";
    format!("{head}\r\n\r\n{body}")
}

#[test]
fn streams_that_go_wrong_are_told() {
    let home = Home::new();
    let piece = "data: {\"choices\":[{\"delta\":{\"content\":\"half an ans\"}}]}\n\n";
    let cases = [
        (
            format!("{piece}data: {{\"error\":{{\"message\":\"the worker ended\"}}}}\n\n"),
            "API stream failed: the worker ended",
        ),
        (piece.to_owned(), "the stream broke off: it ended without [DONE]"),
        (format!("{piece}data: {{\"choi"), "the stream broke off: an event is no JSON"),
    ];
    let answers = cases.iter().map(|(body, _)| events(body)).collect();
    let (url, server) = bad_server(answers);
    for (_, wanted) in &cases {
        let said = typed(&home, &["chat", "--api-url", &url, "-m", "x", "--prompt", "hello"], "").with_code(1);
        assert!(said.err.contains(wanted) && said.out.starts_with("half an ans"), "{wanted}: {}{}", said.out, said.err);
    }
    server.join().unwrap();

    let (url, server) = bad_server(vec![
        http("429 Too Many Requests", "Retry-After: 7\r\n", "{\"error\":{\"message\":\"the queue is full\"}}"),
        http("503 Service Unavailable", "", ""),
        http("200 OK", "Content-Type: application/json\r\n", "{}"),
        http("307 Temporary Redirect", "Location: http://127.0.0.1:1/\r\n", ""),
        http("200 OK", "Content-Type: application/json\r\n", "{\"object\":\"list\",\"data\":[]}"),
    ]);
    for wanted in
        ["try again in 7 s", "try again later", "wanted text/event-stream, found application/json", "redirect (307)"]
    {
        let said = typed(&home, &["chat", "--api-url", &url, "-m", "x", "--prompt", "hello"], "").with_code(1);
        assert!(said.err.contains(wanted), "{wanted}: {}", said.err);
    }
    let said = typed(&home, &["chat", "--api-url", &url], "").with_code(1);
    assert!(said.err.contains("the server has no models"), "{}", said.err);
    server.join().unwrap();

    // A turn that failed is taken back, and the conversation goes on; what has no counts says so.
    let (url, server) = bad_server(vec![
        events(piece),
        events(&format!(
            ": a comment\n\n{piece}data: {{\"choices\":[{{\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}\n\ndata: [DONE]\n\n"
        )),
    ]);
    let said = typed(&home, &["chat", "--api-url", &url, "-m", "x", "--stats"], "one\ntwo\n").with_code(0);
    assert!(
        said.err.contains("this turn is not kept") && said.err.contains("? tokens at -; ended by stop"),
        "{}",
        said.err
    );
    server.join().unwrap();
}

#[test]
fn a_server_is_measured_and_the_report_is_whole() {
    let home = Home::new();
    let server = serve(&home, &[]);
    let url = url(&server);
    let report = home.path().join("report.json");
    let file = report.to_str().unwrap();
    let arguments = ["bench", "--url", &url, "-n", "6", "--concurrency", "3", "--tokens", "8"];
    typed(&home, &[&arguments[..], &["--format", "json", "-o", file]].concat(), "").with_code(0);
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let configuration = &report["configuration"];
    assert_eq!((&configuration["model"], &configuration["stream"]), (&Value::from("model"), &Value::from(true)));
    let summary = &report["summary"];
    assert_eq!(summary["successful"], 6, "{report:#}");
    assert_eq!(summary["total_generated_tokens"], 48, "{report:#}");
    assert!(summary["aggregate_tokens_per_second"].as_f64().unwrap() > 0.0);
    for field in ["latency_seconds", "ttft_seconds", "tokens_per_second"] {
        let of = |name: &str| report[field][name].as_f64().unwrap();
        assert!(0.0 < of("min") && of("min") <= of("p50") && of("p50") <= of("p95"), "{report:#}");
        assert!(of("p95") <= of("p99") && of("p99") <= of("max") && of("mean") <= of("max"), "{report:#}");
    }
    assert_eq!(report["individual_results"].as_array().unwrap().len(), 6);
    let counted = report["metrics_diff"].as_object().unwrap();
    let tokens = counted.iter().find(|(name, _)| name.starts_with("npuhal_tokens_generated_total")).unwrap().1;
    assert_eq!(tokens.as_f64(), Some(48.0), "{counted:?}");
    // Texts, whole answers, and a rate nobody reaches.
    let texts = ["--endpoint", "/v1/completions", "--no-stream", "--format", "markdown", "--min-tps", "1e12"];
    let said = typed(&home, &[&arguments[..], &texts].concat(), "").with_code(2);
    assert!(
        said.out.contains("| first token, ms | - |") && said.out.contains("6 of 6 requests succeeded"),
        "{}",
        said.out
    );
    assert!(said.err.contains("wanted at least 1000000000000"), "{}", said.err);
    for wrong in [&["--pp", "4"][..], &["--device", "cpu"], &["--endpoint", "/v1/models"], &["--min-tps", "-1"]] {
        typed(&home, &[&arguments[..], wrong].concat(), "").with_code(2);
    }
    typed(&home, &["bench", "--tokens", "8"], "").with_code(2);
    server.end();
}
