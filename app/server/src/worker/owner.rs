//! The thread that owns the device: jobs become generations, generations become events.

use super::{Accepted, Loaded, Queue, Reports, Running};
use crate::job::{Job, JobEvent, JobFailure, JobId, JobInput, Report};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, TokenId};
use npuhal_models::generate::{GenerateError, Receiver};
use npuhal_models::sequence::{GenerationRequest, Piece, RequestError};
use npuhal_models::stop::StopStrings;
use npuhal_models::template::encode_chat;
use npuhal_models::thinking::{ThoughtParser, opens_thoughts};
use npuhal_models::{ControlTokens, Specials, Tokenizer};
use std::io;
use std::ops::ControlFlow;

/// Ids at the end of a prompt among which a template may open a block of thoughts.
const TAIL_IDS: usize = 16;

/// Runs jobs in the order they came until the parent has gone.
pub(super) fn run(mut loaded: Loaded, queue: &Queue, running: &Running, reports: &Reports) -> io::Result<()> {
    while let Ok(Accepted { id, job, control }) = queue.recv() {
        running.stepped();
        let mut events = Events { id, running, reports, failed: None };
        let end = match answer(&mut loaded, &job, &control, &mut events) {
            Ok(()) => JobEvent::Finished,
            Err(failure) => JobEvent::Failed(failure),
        };
        running.remove(id);
        running.rested();
        events.send(end);
        if let Some(error) = events.failed {
            return Err(error);
        }
    }
    Ok(())
}

/// The way of one job's events to the parent.
struct Events<'a> {
    id: JobId,
    running: &'a Running,
    reports: &'a Reports,
    failed: Option<io::Error>,
}

impl Events<'_> {
    /// A parent that is gone is seen at the next piece.
    fn send(&mut self, event: JobEvent) {
        if let Err(error) = self.reports.send(&Report::Event { id: self.id, event }) {
            self.failed.get_or_insert(error);
        }
    }
}

fn answer(loaded: &mut Loaded, job: &Job, control: &Control, events: &mut Events<'_>) -> Result<(), JobFailure> {
    control.check().map_err(of_run)?;
    let context = loaded.generator.positions();
    let prompt = prompt_ids(loaded, &job.input)?;
    if prompt.len() >= context {
        return Err(JobFailure::ContextLengthExceeded { prompt_tokens: prompt.len(), context });
    }
    events.send(JobEvent::Started { prompt_tokens: prompt.len() });
    let max_tokens = job.max_tokens.map_or(context, |tokens| tokens as usize).min(context);
    let stop = StopStrings::new(job.stop.iter().cloned()).map_err(|error| invalid(&error))?;
    for choice in 0..job.choices {
        let mut sampling = job.sampling.clone();
        sampling.seed = sampling.seed.map(|seed| seed_of_choice(seed, choice));
        let request = GenerationRequest {
            sampling,
            stop: stop.clone(),
            logprobs: job.logprobs.map(|top| top as usize),
            ..GenerationRequest::greedy(prompt.clone(), max_tokens)
        };
        let mut pieces = Pieces { choice, events, thoughts: thoughts_of(job, &loaded.tokenizer, &prompt) };
        let generation = loaded
            .generator
            .generate(&request, &loaded.tokenizer, &mut pieces, control)
            .map_err(|error| failure(error, context))?;
        pieces.finish();
        if events.failed.is_some() {
            return Err(JobFailure::Cancelled);
        }
        let finish_reason = generation.stats.finish_reason;
        events.send(JobEvent::ChoiceEnded { choice, finish_reason, stats: Box::new(generation.stats) });
    }
    Ok(())
}

/// Seed of answer `choice`: that of answer 0 is `seed` itself; the others step by the golden ratio of 2⁶³, so that all differ.
fn seed_of_choice(seed: u64, choice: u32) -> u64 {
    const STEP: u64 = 0x4f1b_bcdc_bfa5_3e0b;
    seed.wrapping_add(u64::from(choice).wrapping_mul(STEP)) & i64::MAX as u64
}

fn prompt_ids(loaded: &Loaded, input: &JobInput) -> Result<Vec<TokenId>, JobFailure> {
    let tokenizer = &loaded.tokenizer;
    let ids = match input {
        JobInput::Chat(input) => {
            let template = loaded.template.as_ref().map_err(invalid)?;
            encode_chat(tokenizer, template, input).map_err(|error| invalid(&error))?
        }
        JobInput::Text(text) => {
            let mut ids: Vec<TokenId> = tokenizer.bos().filter(|_| tokenizer.add_bos()).into_iter().collect();
            tokenizer.encode_into(text, Specials::Plain, &mut ids).map_err(|error| invalid(&error))?;
            ids
        }
    };
    if ids.is_empty() {
        return Err(JobFailure::Invalid { message: "the prompt has no tokens".to_owned() });
    }
    Ok(ids)
}

/// A plain text is given out as it is; in a chat thoughts are told apart.
fn thoughts_of(job: &Job, tokenizer: &Tokenizer, prompt: &[TokenId]) -> Option<ThoughtParser> {
    let JobInput::Chat(_) = job.input else { return None };
    let tail = &prompt[prompt.len().saturating_sub(TAIL_IDS)..];
    Some(ThoughtParser::new(opens_thoughts(&tokenizer.decode(tail, ControlTokens::Show))))
}

struct Pieces<'e, 'a> {
    choice: u32,
    events: &'e mut Events<'a>,
    thoughts: Option<ThoughtParser>,
}

impl Pieces<'_, '_> {
    fn send(&mut self, text: String, reasoning: String, logprobs: Vec<npuhal_models::logprobs::TokenLogprob>) {
        if !text.is_empty() || !reasoning.is_empty() || !logprobs.is_empty() {
            self.events.send(JobEvent::Piece { choice: self.choice, text, reasoning, logprobs });
        }
    }

    fn finish(mut self) {
        if let Some(rest) = self.thoughts.as_mut().map(ThoughtParser::flush) {
            self.send(rest.answer, rest.reasoning, Vec::new());
        }
    }
}

impl Receiver for Pieces<'_, '_> {
    fn on_prefill(&mut self, done: usize, total: usize) {
        self.events.running.stepped();
        self.events.send(JobEvent::Prefill { done, total });
    }

    fn on_piece(&mut self, piece: &Piece) -> ControlFlow<()> {
        self.events.running.stepped();
        let (text, reasoning) = match &mut self.thoughts {
            None => (piece.text.clone(), String::new()),
            Some(parser) => {
                let part = parser.push(&piece.text);
                (part.answer, part.reasoning)
            }
        };
        self.send(text, reasoning, piece.logprobs.clone());
        if self.events.failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn invalid(error: &impl ToString) -> JobFailure {
    JobFailure::Invalid { message: error.to_string() }
}

fn failure(error: GenerateError, context: usize) -> JobFailure {
    match error {
        GenerateError::Request(RequestError::PromptTooLong { prompt_tokens, .. }) => {
            JobFailure::ContextLengthExceeded { prompt_tokens, context }
        }
        GenerateError::Request(error) => invalid(&error),
        GenerateError::Run(error) => of_run(error),
        other => {
            tracing::error!(error = %other, "a generation failed");
            JobFailure::Device
        }
    }
}

fn of_run(error: RunError) -> JobFailure {
    match error {
        RunError::Cancelled => JobFailure::Cancelled,
        RunError::DeadlinePassed => JobFailure::TimedOut,
        other => {
            tracing::error!(error = %other, "the device failed");
            if matches!(other, RunError::TimedOut { .. }) { JobFailure::DeviceTimedOut } else { JobFailure::Device }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::seed_of_choice;
    use std::collections::HashSet;

    #[test]
    fn seeds_of_choices_begin_with_the_given_one_and_differ() {
        for seed in [0, 1, 42, i64::MAX as u64] {
            assert_eq!(seed_of_choice(seed, 0), seed);
            let seeds: HashSet<u64> = (0..8).map(|choice| seed_of_choice(seed, choice)).collect();
            assert_eq!(seeds.len(), 8);
            assert!(seeds.iter().all(|&seed| seed <= i64::MAX as u64));
        }
    }
}
