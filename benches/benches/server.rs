//! What the server costs, on SmolLM2 over HTTP on this machine.
//!
//! *Overhead*: the time from piece to piece of a stream, against the same batch, threads and request in this process, in
//! alternating pairs; goal 0.2 ms a token. *Gain*: tokens a second of 4 and 8 streams at a time, against one; goals 2.5 and 4.
//! Both include the client, which runs on the same cores.
//!
//! `NPUHAL_BENCH_ROUNDS` rounds of each (7), `NPUHAL_BENCH_THREADS` threads of the model (those of the machine). An argument
//! `overhead` or `gain` measures that alone.

mod common;

use common::median;
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Control, Stepper};
use npuhal_cpu::fast::{CpuOptions, FastSegment};
use npuhal_models::batch::{Batch, BatchEvent};
use npuhal_models::sequence::GenerationRequest;
use npuhal_models::template::{ChatInput, ChatMessage, ChatTemplate, encode_chat};
use npuhal_models::{ModelSource, Tokenizer};
use npuhal_registry::SegmentSpan;
use std::error::Error;
use std::io::{BufRead, BufReader, Write, stdout};
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const POSITIONS: u32 = 512;
const SEQUENCES: u32 = 8;
const GOAL_MS: f64 = 0.2;
/// Prompts whose greedy answers are long.
const PROMPTS: [&str; SEQUENCES as usize] = [
    "Tell me a long story about a lighthouse keeper and her cat.",
    "Explain in detail how a bicycle stays upright.",
    "Write a long letter to a friend about a journey to Lisbon.",
    "Describe the history of the printing press in detail.",
    "Tell me a long story about a dragon who is afraid of fire.",
    "Explain in detail why the sky is blue.",
    "Write a long speech about the sea in autumn.",
    "Describe in detail how bread is baked.",
];

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    // The server and its workers are this program, too.
    if std::env::args().nth(1).is_some_and(|argument| argument == "serve" || argument == "worker") {
        return npuhal::main();
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    // `cargo test --benches` only wants to know that it runs.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let wants = |name: &str| std::env::args().skip(1).all(|argument| argument.starts_with('-') || argument == name);
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<usize>().ok());
    let rounds = if is_test { 1 } else { number("NPUHAL_BENCH_ROUNDS").unwrap_or(7) };
    let tokens = if is_test { 4 } else { 128 };
    let threads = number("NPUHAL_BENCH_THREADS").unwrap_or(std::thread::available_parallelism()?.get());
    let Some(path) = npuhal_tests::models::path("smollm2-135m") else { return Ok(()) };
    let server = Server::start(&path, threads)?;
    writeln!(stdout(), "SmolLM2 on the CPU, {threads} threads, answers of {tokens} tokens, {rounds} rounds")?;
    if wants("overhead") {
        overhead(&server, &path, threads, tokens, rounds)?;
    }
    if wants("gain") {
        gain(&server, tokens, rounds)?;
    }
    Ok(())
}

fn overhead(server: &Server, path: &Path, threads: usize, tokens: usize, rounds: usize) -> Result<()> {
    let mut bare = Bare::new(path, threads)?;
    let (mut here, mut there, mut differences, mut own) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // A pair more, which warms both up.
    for round in 0..=rounds {
        let prompt = PROMPTS[round % PROMPTS.len()];
        let (bare, text) = bare.answer(prompt, tokens)?;
        let stream = server.stream(prompt, tokens)?;
        if text != stream.text {
            return Err(format!("two answers to one request: '{text}' and '{}'", stream.text).into());
        }
        if round > 0 {
            here.push(ms(bare));
            there.push(ms(stream.between));
            differences.push(ms(stream.between) - ms(bare));
            own.push(stream.loop_ms);
        }
    }
    writeln!(
        stdout(),
        "overhead a token: {:.3} ms median of pairs (goal {GOAL_MS} ms); between pieces {:.3} ms over HTTP, {:.3} ms in this \
         process; the worker's own loop {:.3} ms",
        median(&mut differences),
        median(&mut there),
        median(&mut here),
        median(&mut own),
    )?;
    Ok(())
}

fn gain(server: &Server, tokens: usize, rounds: usize) -> Result<()> {
    let mut rates: [Vec<f64>; 3] = Default::default();
    let counts = [1, 4, 8];
    for round in 0..rounds {
        for (rates, count) in rates.iter_mut().zip(counts) {
            rates.push(server.rate(round, count, tokens)?);
        }
    }
    let ratios = |with: &[f64]| -> Vec<f64> { with.iter().zip(&rates[0]).map(|(all, one)| all / one).collect() };
    let (mut four, mut eight) = (ratios(&rates[1]), ratios(&rates[2]));
    let [one, with_four, with_eight] = &mut rates;
    writeln!(
        stdout(),
        "tokens a second: {:.1} of one stream; {:.1} of 4 ({:.2} times, goal 2.5); {:.1} of 8 ({:.2} times, goal 4)",
        median(one),
        median(with_four),
        median(&mut four),
        median(with_eight),
        median(&mut eight),
    )?;
    Ok(())
}

/// The loop of a worker, without what is around it.
struct Bare {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stepper: Option<Box<dyn Stepper>>,
}

impl Bare {
    fn new(path: &Path, threads: usize) -> Result<Self> {
        let model = ModelSource::open(path)?;
        let options = CpuOptions { sequences: SEQUENCES, ..CpuOptions::new(POSITIONS, threads) };
        let segment = FastSegment::load(&model, SegmentSpan::whole(model.config()), options)?;
        Ok(Self {
            stepper: Some(Box::new(Pipeline::new(vec![Box::new(segment)], model.config().layers)?)),
            tokenizer: Tokenizer::from_vocabulary(model.vocabulary())?,
            template: ChatTemplate::from_vocabulary(model.vocabulary())?,
        })
    }

    /// Mean time from piece to piece, and the text.
    fn answer(&mut self, prompt: &str, tokens: usize) -> Result<(Duration, String)> {
        let input = ChatInput::new(vec![ChatMessage::new("user", prompt)]);
        let ids = encode_chat(&self.tokenizer, &self.template, &input)?;
        let stepper = self.stepper.take().ok_or("an earlier answer failed")?;
        let mut batch = Batch::new(stepper, &self.tokenizer);
        batch.submit(GenerationRequest::greedy(ids, tokens), Control::new())?;
        let (mut text, mut first, mut last, mut failure) = (String::new(), None, Instant::now(), None);
        let mut generated = 0;
        let mut on_event = |_, event: BatchEvent| {
            match event {
                BatchEvent::Piece(piece) if !piece.text.is_empty() => {
                    text.push_str(&piece.text);
                    last = Instant::now();
                    first.get_or_insert(last);
                }
                BatchEvent::Ended(generation) => generated = generation.stats.generated_tokens,
                BatchEvent::Failed(error) => failure = Some(error),
                _ => {}
            }
            ControlFlow::Continue(())
        };
        while batch.step(&mut on_event) {}
        let stepper = batch.close(&mut |_, _| ControlFlow::Continue(()));
        if let Some(error) = failure {
            return Err(error.into());
        }
        self.stepper = Some(stepper);
        let first = first.ok_or("an answer without text")?;
        Ok(((last - first) / u32::try_from(generated.max(2) - 1)?, text))
    }
}

/// What a client saw of one stream.
struct Stream {
    text: String,
    tokens: usize,
    first: Instant,
    last: Instant,
    /// Mean time from piece to piece.
    between: Duration,
    /// The same in the worker's loop, as it states.
    loop_ms: f64,
}

/// A server of its own, ended with this.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(model: &Path, threads: usize) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            "serve",
            "--port",
            "0",
            "--context",
            &POSITIONS.to_string(),
            "--parallel",
            &SEQUENCES.to_string(),
        ]);
        command.args(["--threads", &threads.to_string(), "-m"]).arg(model);
        command.env_remove("NPUHAL_API_KEY").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut log = BufReader::new(child.stderr.take().ok_or("no stderr")?);
        let mut line = String::new();
        let address = loop {
            line.clear();
            if log.read_line(&mut line)? == 0 {
                return Err("the server did not start".into());
            }
            if let Some((_, rest)) = line.split_once("API: http://") {
                break rest.trim().trim_end_matches("/v1").to_owned();
            }
        };
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        let server = Self { child, address };
        // The first answer waits for the model.
        server.stream(PROMPTS[0], 2)?;
        Ok(server)
    }

    fn stream(&self, prompt: &str, tokens: usize) -> Result<Stream> {
        let body = serde_json::json!({
            "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": true,
        });
        let body = body.to_string();
        let mut socket = TcpStream::connect(&self.address)?;
        socket.set_nodelay(true)?;
        write!(
            socket,
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        // Every event is a chunk of its own: its lines are whole. They are looked into when all are there, because this client
        // takes its time from the cores of the model.
        let mut lines = Vec::with_capacity(4 * tokens + 16);
        for line in BufReader::new(socket).lines() {
            lines.push((line?, Instant::now()));
        }
        let (mut text, mut first, mut last) = (String::new(), None, Instant::now());
        let mut stats = serde_json::Value::Null;
        for (line, now) in lines {
            let Some(data) = line.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
            let event: serde_json::Value = serde_json::from_str(data)?;
            if let Some(message) = event["error"]["message"].as_str() {
                return Err(message.into());
            }
            let piece = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            if !piece.is_empty() {
                text.push_str(piece);
                last = now;
                first.get_or_insert(now);
            }
            if !event["x_npuhal_stats"].is_null() {
                stats = event["x_npuhal_stats"].clone();
            }
        }
        let tokens = stats["generated_tokens"].as_u64().ok_or("a stream without an end")? as usize;
        let first = first.ok_or("an answer without text")?;
        let between = (last - first) / u32::try_from(tokens.max(2) - 1)?;
        let steps = stats["decode_steps"].as_f64().unwrap_or(1.0).max(1.0);
        let loop_ms = stats["decode_seconds"].as_f64().unwrap_or(0.0) / steps * 1e3;
        Ok(Stream { text, tokens, first, last, between, loop_ms })
    }

    /// Tokens a second of `count` streams that begin together, from the first piece of any to the last of all.
    fn rate(&self, round: usize, count: usize, tokens: usize) -> Result<f64> {
        let barrier = Barrier::new(count);
        let streams: Vec<std::result::Result<Stream, String>> = std::thread::scope(|scope| {
            let begin = |index: usize| {
                let (barrier, prompt) = (&barrier, PROMPTS[(round + index) % PROMPTS.len()]);
                scope.spawn(move || {
                    barrier.wait();
                    self.stream(prompt, tokens).map_err(|error| error.to_string())
                })
            };
            let streams: Vec<_> = (0..count).map(begin).collect();
            streams
                .into_iter()
                .map(|stream| stream.join().unwrap_or_else(|_| Err("a client broke off".to_owned())))
                .collect()
        });
        let streams = streams.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
        let all: usize = streams.iter().map(|stream| stream.tokens).sum();
        let first = streams.iter().map(|stream| stream.first).min().ok_or("no stream")?;
        let last = streams.iter().map(|stream| stream.last).max().ok_or("no stream")?;
        Ok((all - count) as f64 / (last - first).as_secs_f64())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only if it is gone already; its worker ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
