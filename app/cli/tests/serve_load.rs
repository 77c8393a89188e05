//! `npuhal serve` under load: 64 clients of mixed requests on SmolLM2, each of which knows its own answer.
//!
//! Every request is first asked alone. Greedy and seeded answers do not depend on what runs beside them, so a lost, cut or
//! mixed-up stream shows in the text. A minute in every run; `NPUHAL_SOAK=1` makes it 10 minutes. Times and memory are
//! printed.

mod common;

use common::Home;
use common::server::{CHAT, Server, TEXT, post_head, with};
use npuhal_tests::kit::random::Random;
use npuhal_tests::models::left_to_soak;
use npuhal_tests::process::resident_bytes;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::io::{Write as _, stderr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const CLIENTS: u64 = 64;

const PROMPTS: [&str; 6] = [
    "Name three colours.",
    "Write a sentence about the sea, in which the word salt occurs, and another one about the mountains behind it.",
    "What is the capital of France? Answer in one word.",
    "Count from one to ten.",
    "Tell me about a lighthouse keeper and her cat. The cat is old. The keeper is older. The lighthouse is the oldest of the \
     three, and it is said that it was there before the sea. Begin with the weather.",
    "def fibonacci(n):",
];

/// A request, and what it says when it is asked alone.
struct Kind {
    path: &'static str,
    body: Value,
    texts: Vec<String>,
    finish: Vec<Value>,
}

/// Requests that differ in surface, prompt, length, sampling, choices and ends.
fn bodies() -> Vec<(&'static str, Value)> {
    let ways = [
        json!({"max_tokens": 12}),
        json!({"max_tokens": 24, "temperature": 0.8, "top_p": 0.95, "seed": 11}),
        json!({"max_tokens": 6, "temperature": 1.2, "top_k": 40, "seed": 12, "logprobs": true, "top_logprobs": 3}),
        json!({"max_tokens": 10, "temperature": 1.0, "seed": 13, "n": 3}),
        json!({"max_tokens": 32, "stop": [".", "\n"]}),
        json!({"max_tokens": 16, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
        json!({"max_tokens": 1}),
        json!({"max_tokens": 40, "temperature": 0.7, "min_p": 0.05, "seed": 14}),
    ];
    let asks = PROMPTS.iter().zip(0..).flat_map(|(prompt, row): (_, usize)| {
        let way = |column: usize| ways[(row * 3 + column) % ways.len()].clone();
        let chat = json!({"messages": [{"role": "user", "content": prompt}]});
        [
            (CHAT, with(chat.clone(), way(0))),
            (CHAT, with(chat, way(1))),
            (TEXT, with(json!({"prompt": prompt}), way(2))),
        ]
    });
    asks.collect()
}

fn kinds(server: &Server) -> Vec<Kind> {
    let learn = |(path, body): (&'static str, Value)| {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        let text =
            |choice: &Value| choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned();
        let texts: Vec<String> = choices.iter().map(text).collect();
        let finish = choices.iter().map(|choice| choice["finish_reason"].clone()).collect();
        Kind { path, body, texts, finish }
    };
    let kinds: Vec<Kind> = bodies().into_iter().map(learn).collect();
    let different: HashSet<&String> = kinds.iter().flat_map(|kind| &kind.texts).collect();
    assert!(different.len() > kinds.len() * 2 / 3, "answers that are all the same show nothing");
    kinds
}

/// What the clients have seen.
#[derive(Default)]
struct Seen {
    first_token: Vec<Duration>,
    inter_token: Vec<Duration>,
    total: Vec<Duration>,
    whole: usize,
    streamed: usize,
    cancelled: usize,
    ids: HashSet<String>,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.first_token.extend(other.first_token);
        self.inter_token.extend(other.inter_token);
        self.total.extend(other.total);
        self.whole += other.whole;
        self.streamed += other.streamed;
        self.cancelled += other.cancelled;
        for id in other.ids {
            self.note_id(&id);
        }
    }

    fn note_id(&mut self, id: &str) {
        assert!(id.len() > 30 && self.ids.insert(id.to_owned()), "the answer {id} was given twice");
    }
}

/// How a client asks.
enum Manner {
    Whole,
    Streamed,
    /// Goes away after so many events.
    CancelledAfter(u64),
    /// Goes away before there can be an answer.
    CancelledAtOnce,
}

impl Manner {
    fn draw(random: &mut Random) -> Self {
        match random.below(20) {
            0..=6 => Self::Whole,
            7..=16 => Self::Streamed,
            17..=18 => Self::CancelledAfter(random.below(8)),
            _ => Self::CancelledAtOnce,
        }
    }
}

fn ask(server: &Server, kind: &Kind, manner: &Manner, seen: &mut Seen) {
    let started = Instant::now();
    match manner {
        Manner::Whole => {
            let answer = server.post(kind.path, &kind.body);
            assert_eq!(answer.status, 200, "{}: {answer:?}", kind.body);
            let answer = answer.json();
            seen.note_id(answer["id"].as_str().unwrap());
            for (choice, (text, finish)) in
                answer["choices"].as_array().unwrap().iter().zip(kind.texts.iter().zip(&kind.finish))
            {
                let found = choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap();
                assert_eq!((found, &choice["finish_reason"]), (text.as_str(), finish), "{}", kind.body);
            }
            seen.total.push(started.elapsed());
            seen.whole += 1;
        }
        Manner::Streamed => {
            let mut response = server.open(kind.path, &with(kind.body.clone(), json!({"stream": true})));
            let mut stream = Stream::new(kind);
            while let Some(event) = response.event() {
                stream.take(&event, started, seen);
            }
            stream.end(kind, seen);
            seen.total.push(started.elapsed());
            seen.streamed += 1;
        }
        Manner::CancelledAfter(events) => {
            let mut response = server.open(kind.path, &with(kind.body.clone(), json!({"stream": true})));
            let mut stream = Stream::new(kind);
            let mut unused = Seen::default();
            for _ in 0..*events {
                let Some(event) = response.event() else { break };
                stream.take(&event, started, &mut unused);
            }
            for (text, wanted) in stream.texts.iter().zip(&kind.texts) {
                assert!(wanted.starts_with(text), "'{text}' does not begin '{wanted}'");
            }
            seen.cancelled += 1;
        }
        Manner::CancelledAtOnce => {
            let body = kind.body.to_string();
            let mut socket = server.connect();
            socket.write_all(format!("{}{body}", post_head(kind.path, body.len())).as_bytes()).unwrap();
            seen.cancelled += 1;
        }
    }
}

/// What a stream has said so far.
struct Stream {
    id: Option<String>,
    texts: Vec<String>,
    finish: Vec<Value>,
    last: Option<Instant>,
    is_done: bool,
}

impl Stream {
    fn new(kind: &Kind) -> Self {
        let count = kind.texts.len();
        Self {
            id: None,
            texts: vec![String::new(); count],
            finish: vec![Value::Null; count],
            last: None,
            is_done: false,
        }
    }

    fn take(&mut self, event: &str, started: Instant, seen: &mut Seen) {
        assert!(!self.is_done, "{event} after the end");
        if event == "[DONE]" {
            self.is_done = true;
            return;
        }
        let chunk: Value = serde_json::from_str(event).unwrap();
        assert!(chunk["error"].is_null(), "{chunk}");
        let id = chunk["id"].as_str().unwrap();
        assert_eq!(self.id.get_or_insert_with(|| id.to_owned()), id, "a part of another answer: {chunk}");
        for choice in chunk["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
            self.texts[index].push_str(text);
            if !choice["finish_reason"].is_null() {
                assert!(self.finish[index].is_null(), "it ended twice: {chunk}");
                self.finish[index] = choice["finish_reason"].clone();
            }
            if !text.is_empty() {
                let now = Instant::now();
                match self.last.replace(now) {
                    None => seen.first_token.push(now - started),
                    Some(last) => seen.inter_token.push(now - last),
                }
            }
        }
    }

    fn end(self, kind: &Kind, seen: &mut Seen) {
        assert!(self.is_done, "the stream was lost: {:?} of {:?}", self.texts, kind.texts);
        assert_eq!((&self.texts, &self.finish), (&kind.texts, &kind.finish), "{}", kind.body);
        seen.note_id(&self.id.unwrap_or_default());
    }
}

/// Resident bytes of the server and its worker, over the time.
fn watch_memory(server: &Server, is_over: &AtomicBool) -> Vec<[u64; 2]> {
    let (server, worker) = (server.pid(), server.worker());
    let mut samples = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        samples.push([server, worker].map(|process| resident_bytes(process).expect("it lives")));
        thread::sleep(Duration::from_millis(200));
    }
    samples
}

fn report_memory(samples: &[[u64; 2]]) {
    const SLACK_BYTES: u64 = 16 << 20;
    let third = samples.len() / 3;
    for (index, name) in ["HTTP process", "worker"].into_iter().enumerate() {
        let most = |part: &[[u64; 2]]| part.iter().map(|sample| sample[index]).max().unwrap_or(0);
        let (first, middle, last) =
            (most(&samples[..third]), most(&samples[third..2 * third]), most(&samples[2 * third..]));
        let mib = |bytes: u64| bytes >> 20;
        figure(&format!(
            "resident memory of the {name}, most in each third of the time: {}, {}, {} MiB",
            mib(first),
            mib(middle),
            mib(last)
        ));
        assert!(last <= middle + middle / 20 + SLACK_BYTES, "the {name} grows: {first}, {middle}, {last} bytes");
    }
}

fn figure(text: &str) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(stderr().lock(), "figure: {text}");
}

fn report_times(name: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    figure(&format!(
        "{name}, ms: median {:.1}, 90 % {:.1}, 99 % {:.1}, longest {:.1} (of {})",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0),
        times.len()
    ));
}

#[test]
fn every_client_gets_its_own_answer() {
    let Some(path) = npuhal_tests::models::path("smollm2-135m") else { return };
    let is_soak = std::env::var_os("NPUHAL_SOAK").is_some();
    let duration = Duration::from_secs(if is_soak { 600 } else { 60 });
    if !is_soak {
        left_to_soak("load of 64 clients for 10 minutes instead of 1");
    }
    let home = Home::new();
    let more = ["--context", "512", "--parallel", "8", "--queue-capacity", "96", "--request-timeout", "1200"];
    let server = Server::start(&home, &[&["-m", path.to_str().unwrap()][..], &more].concat());
    server.wait_until_ready();
    let worker = server.worker();
    let kinds = kinds(&server);
    let (is_over, seen) = (AtomicBool::new(false), Mutex::new(Seen::default()));
    let completed_before =
        server.metric("npuhal_generations_total{model=\"SmolLM2-135M-Instruct.Q4_1\",outcome=\"completed\"}");
    let started = Instant::now();
    let samples = thread::scope(|scope| {
        let watch = scope.spawn(|| watch_memory(&server, &is_over));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (server, kinds, seen) = (&server, &kinds, &seen);
                scope.spawn(move || {
                    let mut random = Random::new(client);
                    let mut own = Seen::default();
                    while started.elapsed() < duration {
                        let kind = &kinds[random.below(kinds.len() as u64) as usize];
                        ask(server, kind, &Manner::draw(&mut random), &mut own);
                    }
                    seen.lock().unwrap().add(own);
                })
            })
            .collect();
        let ends: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
        is_over.store(true, Ordering::Relaxed);
        let samples = watch.join().unwrap();
        for end in ends {
            end.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        samples
    });
    let took = started.elapsed();
    let Seen { mut first_token, mut inter_token, mut total, whole, streamed, cancelled, .. } =
        seen.into_inner().unwrap();
    figure(&format!(
        "{CLIENTS} clients for {:.0} s on SmolLM2 (CPU, 8 side by side): {streamed} streams and {whole} whole answers, each as \
         when asked alone; {cancelled} cancelled; {:.1} answers a second",
        took.as_secs_f64(),
        (streamed + whole) as f64 / took.as_secs_f64()
    ));
    report_times("time to the first token of a stream", &mut first_token);
    report_times("between pieces of a stream", &mut inter_token);
    report_times("whole time of a request", &mut total);
    report_memory(&samples);
    // Nothing is left over, and nothing was counted that was not.
    let ready = server.wait_for(|ready| ready["active_requests"] == 0);
    assert_eq!((&ready["status"], &ready["worker_restarts"], server.worker()), (&json!("ready"), &json!(0), worker));
    let completed =
        server.metric("npuhal_generations_total{model=\"SmolLM2-135M-Instruct.Q4_1\",outcome=\"completed\"}");
    let (completed, answered) = ((completed - completed_before) as usize, whole + streamed);
    assert!((answered..=answered + cancelled).contains(&completed), "{completed} of {answered} and {cancelled}");
    for kind in &kinds {
        ask(&server, kind, &Manner::Whole, &mut Seen::default());
    }
    server.end();
}
