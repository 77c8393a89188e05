//! The evaluation tried on a server that knows the answers: client, reading, scoring and limits without a model.

use super::dataset::{Item, built_in};
use super::report::Totals;
use super::{EvalArgs, PATIENCE, ask, conclude};
use crate::Host;
use crate::client::Client;
use crate::error::CliError;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

const MODEL: &str = "self-test";
const KEY: &str = "self-test-key";
/// Loss of every token the server makes up.
const LOSS: f64 = 0.1;
const BODY_LIMIT_BYTES: usize = 1 << 20;

pub(super) fn run(host: &Host, args: &EvalArgs) -> Result<(), CliError> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(CliError::Listen)?;
    let address = listener.local_addr().map_err(CliError::Listen)?;
    let items = built_in();
    let requests = items.len() + 1;
    let known = items.clone();
    let server = std::thread::spawn(move || serve(&listener, requests, &known));
    let client = Client::new(&format!("http://{address}"), Some(KEY.to_owned()), PATIENCE)?;
    let model = client.first_model()?;
    let outcomes = ask(host, &client, &model, items)?;
    // It ends with the last request it waits for.
    let _ = server.join();
    conclude(args, "a server inside this program", &model, &outcomes)?;
    let totals = Totals::of(&outcomes);
    let is_right = totals.matches == totals.items
        && totals.loss().is_some_and(|loss| (loss - LOSS).abs() < 1e-9)
        && totals.perplexity().is_some_and(|perplexity| perplexity < 1.5);
    super::verdict(&if is_right {
        Vec::new()
    } else {
        let found = (totals.matches, totals.loss(), totals.perplexity());
        vec![format!("the self-test wanted 6 matches, a loss of {LOSS} and a perplexity below 1.5; found {found:?}")]
    })
}

/// Answers `requests` requests.
fn serve(listener: &TcpListener, requests: usize, items: &[Item]) {
    for stream in listener.incoming().take(requests).flatten() {
        // A client that goes away misses its answer and tells so.
        let _ = answer(stream, items);
    }
}

fn answer(stream: TcpStream, items: &[Item]) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while reader.read_line(&mut head)? > 2 && head.len() < BODY_LIMIT_BYTES {}
    let header = |name: &str| {
        let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
    };
    let len = header("content-length:").and_then(|len| len.parse().ok()).unwrap_or(0usize);
    let mut body = vec![0; len.min(BODY_LIMIT_BYTES)];
    reader.read_exact(&mut body)?;
    let is_known = header("authorization:").as_deref() == Some(&format!("Bearer {KEY}"));
    let (status, json) = match (is_known, head.split_whitespace().nth(1)) {
        (false, _) => ("401 Unauthorized", json!({"error": {"message": "missing or invalid bearer token"}})),
        (true, Some("/v1/models")) => ("200 OK", json!({"object": "list", "data": [{"id": MODEL}]})),
        (true, Some("/v1/completions")) => complete(&body, items),
        _ => ("404 Not Found", json!({"error": {"message": "not found"}})),
    };
    let json = json.to_string();
    let mut stream = reader.into_inner();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{json}",
        json.len()
    )?;
    stream.flush()
}

fn complete(body: &[u8], items: &[Item]) -> (&'static str, Value) {
    let request: Value = serde_json::from_slice(body).unwrap_or_default();
    let asked = items.iter().find(|item| request["prompt"] == item.prompt.as_str());
    let is_sound = request["temperature"] == 0 && request["logprobs"] == true && request["model"] == MODEL;
    let Some(item) = asked.filter(|item| is_sound && request["max_tokens"] == item.max_tokens) else {
        return ("400 Bad Request", json!({"error": {"message": "not what the evaluation asks"}}));
    };
    let tokens: Vec<&str> = item.expected.split_inclusive(' ').collect();
    let logprobs = vec![-LOSS; tokens.len()];
    let json = json!({
        "choices": [{
            "text": format!(" {}.", item.expected),
            "logprobs": {"tokens": tokens, "token_logprobs": logprobs},
            "finish_reason": "stop",
        }],
        "usage": {"completion_tokens": tokens.len()},
    });
    ("200 OK", json)
}
