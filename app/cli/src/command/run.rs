//! `npuhal run`: one answer to a prompt; without a prompt at a terminal, a chat.

use crate::Host;
use crate::args::{GenerationArgs, RunArgs};
use crate::command::chat;
use crate::error::CliError;
use crate::session::prepare;
use crate::suggestion;
use crate::terminal::say;
use crate::thoughts::{self, Speaker};
use crate::window::{fitted_chat, fitted_text, whole_chat};
use npuhal_core::RunError;
use npuhal_core::stage::PhaseTime;
use npuhal_models::generate::{ChoiceReceiver, GenerateError, Generation, MAX_CHOICES, TextGenerator};
use npuhal_models::logprobs::{Alternative, MAX_TOP_LOGPROBS, TokenLogprob};
use npuhal_models::prompter::{Prompter, text_ids};
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::{Echo, GenerationRequest, Piece};
use npuhal_models::stats::GenerationStats;
use npuhal_models::template::ChatMessage;
use npuhal_models::{Specials, Tokenizer};
use std::io::{self, IsTerminal, Read};
use std::ops::ControlFlow;

/// Piped prompts are read up to this size: more than any context holds.
const STDIN_LIMIT_BYTES: u64 = 16 << 20;
/// Where no limit is given, a route should have room for an answer of this length.
const USUAL_ANSWER_TOKENS: u32 = 128;

pub(crate) fn run(host: &Host, args: RunArgs) -> Result<(), CliError> {
    args.generation.check()?;
    check(&args)?;
    let Some(prompt) = prompt(&args.prompt)? else {
        check_chat(&args)?;
        return chat::chat_here(host, &args.model, &args.generation);
    };
    host.heed_interrupts();
    let prepared = prepare(host, &args.model)?;
    let tokenizer = prepared.tokenizer(host)?;
    let suggested = prepared.model.suggested_sampling().cloned();
    let answer_tokens = args.generation.max_tokens.unwrap_or(USUAL_ANSWER_TOKENS);
    let (mut generator, ids) = if args.raw {
        let ids = text_ids(&tokenizer, &prompt, Specials::Parse)?;
        let plan = prepared.choose_for(host, ids.len(), answer_tokens, args.generation.context_overflow)?;
        let generator = TextGenerator::new(plan.open()?);
        let ids = fitted_text(host, &args.generation, &ids, generator.positions())?;
        (generator, ids)
    } else {
        let mut messages = Vec::new();
        messages.extend(args.generation.system.as_deref().map(|system| ChatMessage::new("system", system)));
        messages.push(ChatMessage::new("user", &prompt));
        let prompter = Prompter::new(&prepared.model, &tokenizer)?;
        let whole = whole_chat(&prompter, &args.generation, &messages)?.len();
        let plan = prepared.choose_for(host, whole, answer_tokens, args.generation.context_overflow)?;
        let generator = TextGenerator::new(plan.open()?);
        let ids = fitted_chat(host, &prompter, &args.generation, &messages, generator.positions())?;
        (generator, ids)
    };
    let suggested = suggestion::follow(host, suggested.as_ref(), &args.generation, &generator);
    let mut request = args.generation.request(ids, generator.positions(), &suggested)?;
    request.logprobs = args.logprobs;
    request.echo = args.echo.then_some(Echo { text: prompt, is_scored: true });
    if !args.raw {
        request.thinking = Some(thoughts::thinking(&args.generation, &tokenizer, &request.prompt)?);
    }
    let mut printer = Printer::new(host, &args);
    let done = generator.generate_choices(&request, args.choices, &tokenizer, &mut printer, &host.control);
    printer.finish(done.as_ref().map(|_| ()))?;
    done.map(drop).map_err(of_generation)?;
    tell_phases(host, &generator);
    Ok(())
}

/// Finds out usage errors before a model is fetched or loaded.
fn check(args: &RunArgs) -> Result<(), CliError> {
    if args.raw && args.generation.system.is_some() {
        return Err(CliError::Usage("--system needs the chat template, which --raw leaves out".to_owned()));
    }
    if !(1..=MAX_CHOICES).contains(&args.choices) {
        return Err(CliError::Usage(format!("--n must be between 1 and {MAX_CHOICES}; found {}", args.choices)));
    }
    match args.logprobs {
        Some(found) if found > MAX_TOP_LOGPROBS => {
            Err(CliError::Usage(format!("--logprobs must be between 0 and {MAX_TOP_LOGPROBS}; found {found}")))
        }
        _ => Ok(()),
    }
}

/// What is said of one answer alone is no matter of a chat.
fn check_chat(args: &RunArgs) -> Result<(), CliError> {
    let what = match args {
        RunArgs { raw: true, .. } => "--raw continues a prompt",
        RunArgs { choices, .. } if *choices != 1 => "--n gives several answers to a prompt",
        RunArgs { logprobs: Some(_), .. } => "--logprobs tells of the answer to a prompt",
        _ => return Ok(()),
    };
    Err(CliError::Usage(format!("{what}; give one, or pipe it")))
}

/// Prints answers as they come.
struct Printer<'h> {
    host: &'h Host,
    args: &'h RunArgs,
    speaker: Speaker,
    choice: Option<usize>,
    entries: Vec<TokenLogprob>,
    written: io::Result<()>,
}

impl<'h> Printer<'h> {
    fn new(host: &'h Host, args: &'h RunArgs) -> Self {
        let speaker = Speaker::new(&args.generation);
        Self { host, args, speaker, choice: None, entries: Vec::new(), written: Ok(()) }
    }

    fn say(&mut self, choice: usize, piece: &Piece) -> io::Result<()> {
        self.head(choice)?;
        self.entries.extend_from_slice(&piece.logprobs);
        self.speaker.say(piece)
    }

    /// Tells which answer begins, where there are several.
    fn head(&mut self, choice: usize) -> io::Result<()> {
        if self.choice == Some(choice) {
            return Ok(());
        }
        self.choice = Some(choice);
        let choices = self.args.choices;
        if choices == 1 { Ok(()) } else { say(&format!("[{}/{choices}]\n", choice + 1)) }
    }

    fn tail(&mut self, choice: usize, generation: &Generation) -> io::Result<()> {
        self.head(choice)?;
        // Where nothing was said, an empty line is the answer.
        if !self.speaker.end_line()? && generation.text.is_empty() {
            say("\n")?;
        }
        if self.args.logprobs.is_some() {
            say(&logprobs_text(&std::mem::take(&mut self.entries)))?;
        }
        if self.args.generation.stats {
            self.host.voice.note(stats_line(&generation.stats));
        }
        Ok(())
    }

    /// What writing came to.
    fn finish(mut self, done: Result<(), &GenerateError>) -> io::Result<()> {
        let left = done.or_else(|error| self.speaker.break_off(is_interrupt(error)));
        std::mem::replace(&mut self.written, Ok(())).and(left)
    }
}

impl ChoiceReceiver for Printer<'_> {
    fn on_piece(&mut self, choice: usize, piece: &Piece) -> ControlFlow<()> {
        self.written = self.say(choice, piece);
        if self.written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    fn on_end(&mut self, choice: usize, generation: &Generation) {
        if self.written.is_ok() {
            self.written = self.tail(choice, generation);
        }
    }
}

/// A line for each token: its log probability, its text, and the likeliest tokens in its place.
fn logprobs_text(entries: &[TokenLogprob]) -> String {
    let text = |token: &Alternative| format!("{:?}", token.token);
    let width = entries.iter().map(|entry| text(&entry.chosen).chars().count()).max().unwrap_or(0);
    let mut lines = String::new();
    for entry in entries {
        let others: Vec<String> =
            entry.top.iter().map(|other| format!("{} {:.3}", text(other), other.logprob)).collect();
        let line = format!("{:9.4}  {:width$}  {}", entry.chosen.logprob, text(&entry.chosen), others.join("  "));
        lines.push_str(line.trim_end());
        lines.push('\n');
    }
    lines
}

/// Where the time went, where the session measures it (`--npu-opt profile=on`).
pub(crate) fn tell_phases(host: &Host, generator: &TextGenerator) {
    let phases = generator.phases();
    if phases.is_empty() {
        return;
    }
    let phase =
        |phase: &PhaseTime| format!("{} {:.3} in {}", phase.name, phase.elapsed.as_secs_f64() * 1e3, phase.count);
    let phases: Vec<String> = phases.iter().map(phase).collect();
    host.voice.note(format_args!("phase_ms: {}", phases.join(", ")));
}

/// Generates and prints the answer to `prompt` as it comes, its thoughts apart; `suggested` is what flags leave open.
pub(crate) fn answer(
    host: &Host,
    args: &GenerationArgs,
    generator: &mut TextGenerator,
    tokenizer: &Tokenizer,
    suggested: &SamplingParams,
    prompt: Vec<u32>,
) -> Result<Generation, CliError> {
    let thinking = Some(thoughts::thinking(args, tokenizer, &prompt)?);
    let request = GenerationRequest { thinking, ..args.request(prompt, generator.positions(), suggested)? };
    let mut speaker = Speaker::new(args);
    let mut written = Ok(());
    let mut receiver = |piece: &Piece| {
        written = speaker.say(piece);
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let result = generator.generate(&request, tokenizer, &mut receiver, &host.control);
    let left = match &result {
        Ok(_) => speaker.end_line().map(drop),
        Err(error) => speaker.break_off(is_interrupt(error)),
    };
    written.and(left)?;
    result.map_err(of_generation)
}

fn is_interrupt(error: &GenerateError) -> bool {
    matches!(error, GenerateError::Run(RunError::Cancelled))
}

fn of_generation(error: GenerateError) -> CliError {
    match error {
        error if is_interrupt(&error) => CliError::Interrupted,
        other => other.into(),
    }
}

/// `prompt tokens … tok/s`, for people.
pub(crate) fn stats_line(stats: &GenerationStats) -> String {
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1} tok/s"));
    let mut line = format!(
        "prompt {} tokens ({} cached), first token after {:.0} ms ({}); {} tokens at {}; ended by {}",
        stats.prompt_tokens,
        stats.cached_prompt_tokens,
        stats.ttft.as_secs_f64() * 1e3,
        rate(stats.prefill_tokens_per_second()),
        stats.generated_tokens,
        rate(stats.decode_tokens_per_second()),
        stats.finish_reason,
    );
    if let Some(speculation) = &stats.speculation {
        line.push_str(&format!("; {speculation}"));
    }
    if let Some(seed) = stats.sampling.seed {
        line.push_str(&format!("; seed {seed}"));
    }
    if let Some(peak_bytes) = peak_memory_bytes() {
        line.push_str(&format!("; peak memory {:.0} MiB", peak_bytes as f64 / (1 << 20) as f64));
    }
    line
}

/// High-water mark of this process's resident memory, where the system tells it.
pub(crate) fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The words and what is piped, or `None` at a bare terminal.
fn prompt(words: &[String]) -> Result<Option<String>, CliError> {
    let mut prompt = words.join(" ");
    if !io::stdin().is_terminal() {
        let mut piped = Vec::new();
        io::stdin().lock().take(STDIN_LIMIT_BYTES + 1).read_to_end(&mut piped).map_err(CliError::Input)?;
        if piped.len() as u64 > STDIN_LIMIT_BYTES {
            return Err(CliError::Usage(format!("the piped prompt is longer than {STDIN_LIMIT_BYTES} bytes")));
        }
        let piped = String::from_utf8(piped)
            .map_err(|error| CliError::Usage(format!("the piped prompt is not UTF-8 text: {}", error.utf8_error())))?;
        let piped = piped.trim_end_matches(['\n', '\r']);
        if !piped.is_empty() {
            if !prompt.is_empty() {
                prompt.push_str("\n\n");
            }
            prompt.push_str(piped);
        }
        if prompt.is_empty() {
            return Err(CliError::Usage("the prompt is empty; give one, or pipe it".to_owned()));
        }
    } else if prompt.is_empty() {
        return if words.is_empty() { Ok(None) } else { Err(CliError::Usage("the prompt is empty".to_owned())) };
    }
    Ok(Some(prompt))
}
