//! Prompt lookup against plain decoding on real models, in alternating pairs: prompts whose answers repeat parts of them
//! (edits, extracts, summaries), and free text. The answers are compared; the decode times are told as a ratio.
//!
//! `NPUHAL_BENCH_ROUNDS` pairs a prompt (3), `NPUHAL_BENCH_THREADS` threads (those of the machine), `NPUHAL_BENCH_MODEL` one
//! model of the catalogue (two).

use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Control, Session};
use npuhal_cpu::fast::{CpuOptions, FastSegment};
use npuhal_models::generate::{Generation, TextGenerator};
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::{GenerationRequest, Piece};
use npuhal_models::speculate::Speculation;
use npuhal_models::template::{ChatInput, ChatMessage, ChatTemplate, encode_chat};
use npuhal_models::{ModelSource, Tokenizer};
use npuhal_registry::SegmentSpan;
use std::error::Error;
use std::io::{Write, stdout};
use std::ops::ControlFlow;

const MODELS: [&str; 2] = ["smollm2-135m", "qwen2.5-coder-0.5b"];
const POSITIONS: u32 = 2048;
const MAX_TOKENS: usize = 192;

const LETTER: &str = "Dear Mr. Haddad,\n\nThank you for your letter of 4 March. I am sorry that the parcel reached you in the state \
    you describe. I have looked at the photographs, and I agree that no packing of ours should have allowed a teapot to arrive in \
    nineteen pieces. You ask whether we can repair it. I have asked the woman who does such work for us. She says that she can, and \
    that it will take about six weeks.\n\nWith kind regards,\nInes Rocha";
const CODE: &str = "def total(table):\n    result = 0\n    for row in table:\n        for value in row:\n            if value is None:\n                \
    continue\n            result = result + value\n    return result\n\n\ndef mean(table):\n    count = 0\n    for row in table:\n        \
    count = count + len(row)\n    return total(table) / count\n";
const RULES: &str = "1. The room is open from nine in the morning until six in the evening, except on Mondays.\n2. Coats, umbrellas and \
    bags are left at the desk. The attendant will give you a number.\n3. Books are asked for in writing, one slip for each book, and are \
    brought within half an hour.\n4. Pencils are permitted. Pens are not.\n5. It is forbidden to eat, to drink, and to speak above a whisper.";

fn edits() -> Vec<String> {
    vec![
        format!("Repeat the following letter word for word:\n\n{LETTER}"),
        format!("Write the following letter again, with the name Haddad replaced by Okafor:\n\n{LETTER}"),
        format!("Add a docstring to each function of this code and print all of it:\n\n```python\n{CODE}```"),
        format!("Rename the variable `result` to `total_sum` and print the whole code:\n\n```python\n{CODE}```"),
        format!("Correct any spelling mistakes in these rules and print all of them:\n\n{RULES}"),
        format!("Quote the sentences of these rules that say what is forbidden or permitted:\n\n{RULES}"),
        format!("Summarise this letter in three sentences, in its own words:\n\n{LETTER}"),
    ]
}

const FREE: [&str; 5] = [
    "Tell me a story about a lighthouse keeper and a cat.",
    "Why is the sky blue?",
    "Write a poem about the sea in autumn.",
    "What should I see in Lisbon in three days?",
    "Explain how a bicycle stays upright.",
];

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo test --benches` only wants to know that it runs.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<usize>().ok());
    let rounds = if is_test { 1 } else { number("NPUHAL_BENCH_ROUNDS").unwrap_or(3) };
    let cores = std::thread::available_parallelism()?.get();
    let threads = number("NPUHAL_BENCH_THREADS").unwrap_or(cores);
    let mut out = stdout();
    writeln!(out, "plain and prompt-lookup in turn, {rounds} pairs, {threads} threads, at most {MAX_TOKENS} tokens")?;
    let asked = std::env::var("NPUHAL_BENCH_MODEL").ok();
    let models: Vec<&str> = asked.as_deref().map_or_else(|| MODELS.to_vec(), |name| vec![name]);
    for name in models.into_iter().take(if is_test { 1 } else { MODELS.len() }) {
        let Some(path) = npuhal_tests::models::path(name) else { continue };
        let model = ModelSource::open(&path)?;
        let mut bed = Bed::new(&model, threads)?;
        for (set, prompts) in [("edit", edits()), ("free", FREE.map(str::to_owned).to_vec())] {
            let mut ratios = Vec::new();
            for (index, prompt) in prompts.iter().enumerate().take(if is_test { 1 } else { usize::MAX }) {
                for (choice, temperature) in [("greedy", 0.0), ("drawn", 0.7)] {
                    let (ratio, plain, guessed) = bed.pairs(prompt, temperature, rounds)?;
                    let told = guessed.stats.speculation.map_or_else(String::new, |stats| stats.to_string());
                    let rate = plain.stats.decode_tokens_per_second().unwrap_or(0.0);
                    let tokens = plain.tokens.len();
                    writeln!(
                        out,
                        "{name} {set}{index} {choice}: {ratio:.2}x of {rate:.1} tok/s; {tokens} tokens; {told}"
                    )?;
                    ratios.push(ratio);
                }
            }
            let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
            let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
            writeln!(out, "{name} {set}: geometric mean {mean:.2}x, least {least:.2}x")?;
        }
    }
    Ok(())
}

struct Bed {
    generator: TextGenerator,
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Bed {
    fn new(model: &ModelSource, threads: usize) -> Result<Self, Box<dyn Error>> {
        let span = SegmentSpan::whole(model.config());
        let segment = FastSegment::load(model, span, CpuOptions::new(POSITIONS, threads))?;
        let pipeline = Pipeline::new(vec![Box::new(segment)], model.config().layers)?;
        Ok(Self {
            generator: TextGenerator::new(Session::Stepper(Box::new(pipeline))),
            tokenizer: Tokenizer::from_vocabulary(model.vocabulary())?,
            template: ChatTemplate::from_vocabulary(model.vocabulary())?,
        })
    }

    /// The median ratio of decode times, plain to guessed, and one answer of each.
    fn pairs(
        &mut self,
        prompt: &str,
        temperature: f64,
        rounds: usize,
    ) -> Result<(f64, Generation, Generation), Box<dyn Error>> {
        let input = ChatInput::new(vec![ChatMessage::new("user", prompt)]);
        let ids = encode_chat(&self.tokenizer, &self.template, &input)?;
        let sampling = SamplingParams { temperature, seed: Some(7), ..SamplingParams::default() };
        let plain = GenerationRequest { sampling, ..GenerationRequest::greedy(ids, MAX_TOKENS) };
        let guessed = GenerationRequest { speculation: Some(Speculation::default()), ..plain.clone() };
        // The prompt is computed once; all the rest is decoding.
        self.run(&plain)?;
        let mut ratios = Vec::new();
        let mut last = None;
        for _ in 0..rounds {
            let (plain, guessed) = (self.run(&plain)?, self.run(&guessed)?);
            assert_eq!(plain.tokens, guessed.tokens, "guessing ahead changes nothing");
            ratios.push(plain.stats.decode_time.as_secs_f64() / guessed.stats.decode_time.as_secs_f64().max(1e-9));
            last = Some((plain, guessed));
        }
        ratios.sort_by(f64::total_cmp);
        let (plain, guessed) = last.ok_or("at least one round is wanted")?;
        Ok((ratios[ratios.len() / 2], plain, guessed))
    }

    fn run(&mut self, request: &GenerationRequest) -> Result<Generation, Box<dyn Error>> {
        let mut receiver = |_: &Piece| ControlFlow::Continue(());
        Ok(self.generator.generate(request, &self.tokenizer, &mut receiver, &Control::new())?)
    }
}
