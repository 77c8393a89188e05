//! The thread that owns the device: jobs become requests of a batch, their events become reports.
//!
//! Each choice of a job is a request of its own, so that several run side by side where the device holds several sequences.

use super::{Accepted, Loaded, Queue, Reports, Running, frame};
use crate::job::{Job, JobEvent, JobFailure, JobId, JobInput, PromptLoss, Report};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, Session, TokenId};
use npuhal_models::batch::{Batch, BatchEvent, RequestId};
use npuhal_models::generate::{ChoiceReceiver, GenerateError, Generation, TextGenerator};
use npuhal_models::prompter::{PromptError, Prompter, fitted_text, text_ids};
use npuhal_models::sequence::{GenerationRequest, Piece, RequestError};
use npuhal_models::stop::StopStrings;
use npuhal_models::thinking::{Thinking, prompt_opens_thoughts};
use npuhal_models::window::{Overflow, PromptTruncation, Truncation};
use npuhal_models::{Specials, Tokenizer};
use rustix::thread::sched_getcpu;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;

/// Runs jobs until the parent has gone.
pub(super) fn run(loaded: Loaded, queue: &Queue, running: &Running, reports: &Reports) -> io::Result<()> {
    let Loaded { session, tokenizer, prompter, overflow, .. } = loaded;
    let context_lost = Cell::new(false);
    let (frames, core) = (RefCell::new(Vec::new()), Cell::new(None));
    let desk =
        Desk { tokenizer: &tokenizer, prompter: &prompter, overflow, running, reports, frames, core, context_lost };
    match session {
        Session::Stepper(stepper) => desk.run_batch(Batch::new(stepper, &tokenizer), queue),
        generator => desk.run_generator(TextGenerator::new(generator), queue),
    }
}

/// What turns jobs into requests, and the way of their events to the parent.
struct Desk<'a> {
    tokenizer: &'a Tokenizer,
    prompter: &'a Result<Prompter, PromptError>,
    overflow: Overflow,
    running: &'a Running,
    reports: &'a Reports,
    /// Reports on their way out: those of a step go together, so that the parent is woken once.
    frames: RefCell<Vec<u8>>,
    /// The core that was last reported.
    core: Cell<Option<usize>>,
    /// Whether a job has cost the device its context, and no later one has run.
    context_lost: Cell<bool>,
}

/// A job of which some choices are not complete.
struct Open {
    control: Control,
    choices: u32,
}

impl Desk<'_> {
    /// Puts a report among those that the next flush sends.
    fn put(&self, id: JobId, event: JobEvent) -> io::Result<()> {
        frame::append(&mut self.frames.borrow_mut(), &Report::Event { id, event })
    }

    /// Sends what was put.
    fn flush(&self) -> io::Result<()> {
        let mut frames = self.frames.borrow_mut();
        if frames.is_empty() {
            return Ok(());
        }
        let number = sched_getcpu();
        if self.core.replace(Some(number)) != Some(number) {
            frame::append(&mut frames, &Report::Core { number })?;
        }
        let sent = self.reports.send_frames(&frames);
        frames.clear();
        sent
    }

    fn end(&self, id: JobId, event: JobEvent) -> io::Result<()> {
        self.running.remove(id);
        self.put(id, event)
    }

    /// The device has computed something for the job: it has a context.
    fn device_answers(&self, id: JobId) -> io::Result<()> {
        if self.context_lost.replace(false) { self.put(id, JobEvent::ContextRebuilt) } else { Ok(()) }
    }

    /// What the parent is told of `error`.
    fn failure(&self, error: GenerateError, context: usize) -> JobFailure {
        if let GenerateError::Run(error) = &error
            && error.loses_context()
        {
            self.context_lost.set(true);
        }
        failure(error, context)
    }

    fn run_batch(&self, mut batch: Batch<'_>, queue: &Queue) -> io::Result<()> {
        let mut choices: HashMap<RequestId, (JobId, u32)> = HashMap::new();
        let mut open: HashMap<JobId, Open> = HashMap::new();
        loop {
            if batch.is_idle() {
                self.running.rested();
                let Ok(accepted) = queue.recv() else { return Ok(()) };
                self.submit(&mut batch, accepted, &mut choices, &mut open)?;
            }
            while let Ok(accepted) = queue.try_recv() {
                self.submit(&mut batch, accepted, &mut choices, &mut open)?;
            }
            self.flush()?;
            self.running.stepped();
            let positions = batch.positions();
            let mut sent = Ok(());
            batch.step(&mut |request, event| {
                if let Some(&(id, choice)) = choices.get(&request)
                    && sent.is_ok()
                {
                    sent = self.tell(id, choice, event, positions, &mut open);
                    if !open.contains_key(&id) {
                        choices.retain(|_, (job, _)| *job != id);
                    }
                }
                if sent.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            sent?;
            self.flush()?;
        }
    }

    /// Puts the choices of a job in line, or tells why they cannot be.
    fn submit(
        &self,
        batch: &mut Batch<'_>,
        accepted: Accepted,
        choices: &mut HashMap<RequestId, (JobId, u32)>,
        open: &mut HashMap<JobId, Open>,
    ) -> io::Result<()> {
        let Accepted { id, job, control } = accepted;
        // The parent may have taken the core again since: it is told anew with each job.
        self.core.set(None);
        let (request, truncation) = match self.request(&job, batch.positions()) {
            Ok(request) => request,
            Err(failure) => return self.end(id, JobEvent::Failed(failure)),
        };
        let prompt_tokens = request.prompt.len();
        let sampling = request.sampling.clone();
        for choice in 0..job.choices {
            let request = GenerationRequest { sampling: sampling.for_choice(choice), ..request.clone() };
            match batch.submit(request, control.clone()) {
                Ok(request) => {
                    choices.insert(request, (id, choice));
                }
                Err(error) => {
                    // They differ in their seed alone: the first is refused or none.
                    control.cancel();
                    return self.end(id, JobEvent::Failed(of_request(error, batch.positions())));
                }
            }
        }
        open.insert(id, Open { control, choices: job.choices });
        self.put(id, JobEvent::Started { prompt_tokens, truncation })
    }

    fn tell(
        &self,
        id: JobId,
        choice: u32,
        event: BatchEvent,
        positions: usize,
        open: &mut HashMap<JobId, Open>,
    ) -> io::Result<()> {
        match event {
            BatchEvent::Prefill { done, total } => {
                self.device_answers(id)?;
                self.put(id, JobEvent::Prefill { done, total })
            }
            BatchEvent::Piece(piece) => {
                self.device_answers(id)?;
                self.put(id, piece_event(choice, piece))
            }
            BatchEvent::Ended(generation) => {
                self.put(id, ended_event(choice, *generation))?;
                match open.get_mut(&id) {
                    Some(job) if job.choices > 1 => {
                        job.choices -= 1;
                        Ok(())
                    }
                    _ => {
                        open.remove(&id);
                        self.end(id, JobEvent::Finished)
                    }
                }
            }
            BatchEvent::Failed(error) => {
                // The other choices of the job are of no use any more.
                if let Some(job) = open.remove(&id) {
                    job.control.cancel();
                }
                self.end(id, JobEvent::Failed(self.failure(error, positions)))
            }
            _ => Ok(()),
        }
    }

    /// Routes that choose tokens themselves run one job after the other.
    fn run_generator(&self, mut generator: TextGenerator, queue: &Queue) -> io::Result<()> {
        while let Ok(Accepted { id, job, control }) = queue.recv() {
            self.running.stepped();
            let end = self.answer(&mut generator, id, &job, &control)?;
            self.running.rested();
            self.end(id, end)?;
            self.flush()?;
        }
        Ok(())
    }

    fn answer(&self, generator: &mut TextGenerator, id: JobId, job: &Job, control: &Control) -> io::Result<JobEvent> {
        let positions = generator.positions();
        let (request, truncation) = match self.request(job, positions) {
            Ok(request) => request,
            Err(failure) => return Ok(JobEvent::Failed(failure)),
        };
        self.put(id, JobEvent::Started { prompt_tokens: request.prompt.len(), truncation })?;
        self.flush()?;
        let mut choices = Choices { desk: self, id, sent: Ok(()) };
        let done = generator.generate_choices(&request, job.choices as usize, self.tokenizer, &mut choices, control);
        choices.sent?;
        Ok(match done {
            Ok(_) => JobEvent::Finished,
            Err(error) => JobEvent::Failed(self.failure(error, positions)),
        })
    }

    fn request(&self, job: &Job, positions: usize) -> Result<(GenerationRequest, PromptLoss), JobFailure> {
        let (prompt, truncation) = self.prompt(job, positions)?;
        let max_tokens = job.max_tokens.map_or(positions, |tokens| tokens as usize).min(positions);
        let mut sampling = job.sampling.clone();
        if sampling.draws() {
            // One for all choices, so that each has its own.
            sampling.seed.get_or_insert_with(npuhal_models::sampling::random_seed);
        }
        let request = GenerationRequest {
            sampling,
            stop: StopStrings::new(job.stop.iter().cloned()).map_err(|error| invalid(Some("stop"), &error))?,
            logprobs: job.logprobs.map(|top| top as usize),
            thinking: self.thinking(&job.input, &prompt),
            ..GenerationRequest::greedy(prompt, max_tokens)
        };
        Ok((request, truncation))
    }

    /// The ids of the prompt: cut to the context where that is wanted, else refused where there is no room for a token.
    fn prompt(&self, job: &Job, positions: usize) -> Result<(Vec<TokenId>, PromptLoss), JobFailure> {
        let max_tokens = job.max_tokens.map(|tokens| tokens as usize);
        let field = match &job.input {
            JobInput::Chat(_) => "messages",
            JobInput::Text(_) => "prompt",
        };
        let cuts = self.overflow == Overflow::Truncate;
        let (ids, truncation) = match &job.input {
            JobInput::Chat(input) => {
                let prompter = self.prompter.as_ref().map_err(|error| invalid(None, error))?;
                if cuts {
                    let fitted = prompter.fitted(input, max_tokens, positions, self.overflow);
                    let fitted = fitted.map_err(|error| invalid(Some(field), &error))?;
                    (fitted.ids, PromptLoss::Chat(fitted.truncation))
                } else {
                    let ids = prompter.whole(input).map_err(|error| invalid(Some(field), &error))?;
                    (ids, PromptLoss::Chat(Truncation::default()))
                }
            }
            JobInput::Text(text) => {
                let ids =
                    text_ids(self.tokenizer, text, Specials::Plain).map_err(|error| invalid(Some(field), &error))?;
                if cuts {
                    let fitted = fitted_text(&ids, max_tokens, positions, self.overflow);
                    let fitted = fitted.map_err(|error| invalid(Some(field), &error))?;
                    (fitted.ids, PromptLoss::Text(fitted.truncation))
                } else {
                    (ids, PromptLoss::Text(PromptTruncation::default()))
                }
            }
        };
        match ids.len() {
            0 => Err(invalid(Some(field), &"the prompt has no tokens")),
            found if found >= positions => {
                Err(JobFailure::ContextLengthExceeded { prompt_tokens: found, context: positions })
            }
            _ => Ok((ids, truncation)),
        }
    }

    /// A plain text is given out as it is; in a chat thoughts are told apart.
    fn thinking(&self, input: &JobInput, prompt: &[TokenId]) -> Option<Thinking> {
        let JobInput::Chat(_) = input else { return None };
        Some(Thinking { opened: prompt_opens_thoughts(self.tokenizer, prompt), ..Thinking::default() })
    }
}

/// Receives the choices of a route that chooses tokens itself.
struct Choices<'d, 'a> {
    desk: &'d Desk<'a>,
    id: JobId,
    sent: io::Result<()>,
}

impl Choices<'_, '_> {
    fn send(&mut self, event: JobEvent) {
        self.desk.running.stepped();
        if self.sent.is_ok() {
            let desk = self.desk;
            self.sent =
                desk.device_answers(self.id).and_then(|()| desk.put(self.id, event)).and_then(|()| desk.flush());
        }
    }
}

impl ChoiceReceiver for Choices<'_, '_> {
    fn on_prefill(&mut self, _: usize, done: usize, total: usize) {
        self.send(JobEvent::Prefill { done, total });
    }

    fn on_piece(&mut self, choice: usize, piece: &Piece) -> ControlFlow<()> {
        self.send(piece_event(choice as u32, piece.clone()));
        if self.sent.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    fn on_end(&mut self, choice: usize, generation: &Generation) {
        self.send(ended_event(choice as u32, generation.clone()));
    }
}

fn piece_event(choice: u32, piece: Piece) -> JobEvent {
    let Piece { text, reasoning, logprobs, .. } = piece;
    JobEvent::Piece { choice, text, reasoning, logprobs }
}

fn ended_event(choice: u32, generation: Generation) -> JobEvent {
    let stats = Box::new(generation.stats);
    JobEvent::ChoiceEnded { choice, finish_reason: stats.finish_reason, stats }
}

fn invalid(param: Option<&str>, error: &impl ToString) -> JobFailure {
    JobFailure::Invalid { message: error.to_string(), param: param.map(str::to_owned) }
}

fn of_request(error: RequestError, context: usize) -> JobFailure {
    match error {
        RequestError::PromptTooLong { prompt_tokens, .. } => {
            JobFailure::ContextLengthExceeded { prompt_tokens, context }
        }
        RequestError::UnknownBias { .. } => invalid(Some("logit_bias"), &error),
        error => invalid(None, &error),
    }
}

fn failure(error: GenerateError, context: usize) -> JobFailure {
    match error {
        GenerateError::Request(error) => of_request(error, context),
        GenerateError::Run(RunError::Cancelled) => JobFailure::Cancelled,
        GenerateError::Run(RunError::DeadlinePassed) => JobFailure::TimedOut,
        other => {
            tracing::error!(error = %other, "the device failed");
            let is_timeout = matches!(other, GenerateError::Run(RunError::TimedOut { .. }));
            if is_timeout { JobFailure::DeviceTimedOut } else { JobFailure::Device }
        }
    }
}
