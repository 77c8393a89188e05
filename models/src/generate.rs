//! The generation loop: from prompt ids to pieces of text, on the thread that owns the device.
//!
//! Prefill starts behind the reused prefix and runs in bounded chunks, so that cancellation and progress are seen; logits
//! are asked for at the last prompt position only. [`Control`] is checked between steps. After a failure the positions of
//! the failed step are forgotten, so that the next generation starts from sound state.

use crate::prefix::PrefixCache;
use crate::sequence::{GenerationRequest, Piece, RequestError, Sequence, SequenceLimits, TokenText};
use crate::stats::{FinishReason, GenerationStats};
use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, Generator, GeneratorRequest, HiddenRows, PhaseTime, Placement, Row, SequenceId, Session, Stepper, TokenId,
    Want,
};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};
use thiserror::Error;

/// A generation that did not come to its end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The request cannot be run; nothing was done.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The device failed, the caller cancelled, or the deadline passed.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Receives what a generation produces. Any `FnMut(&Piece) -> ControlFlow<()>` is one.
pub trait Receiver {
    /// `done` of `total` prompt positions are computed.
    fn on_prefill(&mut self, done: usize, total: usize) {
        let _ = (done, total);
    }

    /// A piece; [`ControlFlow::Break`] ends the generation.
    fn on_piece(&mut self, piece: &Piece) -> ControlFlow<()>;
}

impl<F: FnMut(&Piece) -> ControlFlow<()>> Receiver for F {
    fn on_piece(&mut self, piece: &Piece) -> ControlFlow<()> {
        self(piece)
    }
}

/// The whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// All text that was given out.
    pub text: String,
    /// All emitted tokens, those of a stop string included.
    pub tokens: Vec<TokenId>,
    /// Counts and times.
    pub stats: GenerationStats,
}

/// Generates text with whatever a route opened.
pub enum TextGenerator {
    /// Sampling is done here.
    Stepper(StepperLoop),
    /// The route samples.
    Generator(Box<dyn Generator>),
}

impl TextGenerator {
    /// A generator over `session`, with nothing cached.
    #[must_use]
    pub fn new(session: Session) -> Self {
        match session {
            Session::Stepper(stepper) => Self::Stepper(StepperLoop::new(stepper)),
            Session::Generator(generator) => Self::Generator(generator),
        }
    }

    /// Positions of a sequence.
    #[must_use]
    pub fn positions(&self) -> usize {
        match self {
            Self::Stepper(stepper) => stepper.stepper.capacity().positions as usize,
            Self::Generator(generator) => generator.max_context() as usize,
        }
    }

    /// Where the time of the last generation went; empty where nobody measures.
    #[must_use]
    pub fn phases(&self) -> Vec<PhaseTime> {
        match self {
            Self::Stepper(stepper) => stepper.stepper.phases(),
            Self::Generator(_) => Vec::new(),
        }
    }

    /// Generates the answer to `request`.
    ///
    /// # Errors
    /// [`GenerateError::Request`] before any work; otherwise what stopped it. Pieces given out before an error stand.
    pub fn generate(
        &mut self,
        request: &GenerationRequest,
        tokenizer: &dyn TokenText,
        receiver: &mut dyn Receiver,
        control: &Control,
    ) -> Result<Generation, GenerateError> {
        match self {
            Self::Stepper(stepper) => stepper.generate(request, tokenizer, receiver, control),
            Self::Generator(generator) => run_generator(generator.as_mut(), request, tokenizer, receiver, control),
        }
    }
}

/// Drives one sequence of a stepper, and remembers what its KV cache holds.
pub struct StepperLoop {
    stepper: Box<dyn Stepper>,
    sequence: SequenceId,
    cache: PrefixCache,
    chunk_rows: usize,
    rows: Vec<Row>,
    logits: HiddenRows,
}

impl StepperLoop {
    /// A loop over sequence 0 of `stepper`, with nothing cached.
    #[must_use]
    pub fn new(stepper: Box<dyn Stepper>) -> Self {
        let rows_per_call = stepper.capacity().rows_per_call as usize;
        Self {
            stepper,
            sequence: SequenceId(0),
            cache: PrefixCache::new(),
            chunk_rows: rows_per_call.clamp(MIN_CHUNK_ROWS, MAX_CHUNK_ROWS),
            rows: Vec::new(),
            logits: HiddenRows::new(),
        }
    }

    /// Rows of a prefill step at most; at least 1. Results do not depend on it.
    #[must_use]
    pub fn with_chunk_rows(self, chunk_rows: usize) -> Self {
        Self { chunk_rows: chunk_rows.max(1), ..self }
    }

    /// Where the layers run.
    #[must_use]
    pub fn placement(&self) -> Vec<Placement> {
        self.stepper.placement()
    }

    /// What the KV cache holds.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// The stepper, for other uses (warm-up, measurements). Forgets what the KV cache holds.
    pub fn stepper_mut(&mut self) -> &mut dyn Stepper {
        self.cache.clear();
        self.stepper.as_mut()
    }

    /// See [`TextGenerator::generate`].
    ///
    /// # Errors
    /// As [`TextGenerator::generate`].
    pub fn generate(
        &mut self,
        request: &GenerationRequest,
        tokenizer: &dyn TokenText,
        receiver: &mut dyn Receiver,
        control: &Control,
    ) -> Result<Generation, GenerateError> {
        let capacity = self.stepper.capacity();
        if self.sequence.0 >= capacity.sequences {
            let (found, sequences) = (self.sequence.0, capacity.sequences);
            return Err(RequestError::UnknownSequence { found, sequences }.into());
        }
        let limits = SequenceLimits { positions: capacity.positions as usize, vocab_size: self.stepper.vocab_size() };
        let mut sequence = Sequence::new(self.sequence, request, tokenizer, limits)?;
        control.check()?;
        self.stepper.begin()?;
        let open = Begun(self);
        let reused = open.0.cut(open.0.cache.reusable(&request.prompt));
        sequence.resume_from(reused);
        open.0.drive(&mut sequence, receiver, control)?;
        drop(open);
        Ok(outcome(&sequence))
    }

    fn drive(
        &mut self,
        sequence: &mut Sequence<'_>,
        receiver: &mut dyn Receiver,
        control: &Control,
    ) -> Result<(), RunError> {
        let prompt_tokens = sequence.prompt_tokens();
        while sequence.finish_reason().is_none() {
            control.check()?;
            let from = sequence.computed();
            let prefill = sequence.in_prefill();
            let piece = match self.step(sequence, control) {
                Ok(piece) => piece,
                Err(error) => {
                    self.cut(from);
                    return Err(error);
                }
            };
            if prefill {
                receiver.on_prefill(sequence.computed(), prompt_tokens);
            }
            if let Some(piece) = piece
                && receiver.on_piece(&piece).is_break()
            {
                break;
            }
        }
        Ok(())
    }

    /// One forward pass and, where it ends at the last known token, the choice of the next.
    fn step(&mut self, sequence: &mut Sequence<'_>, control: &Control) -> Result<Option<Piece>, RunError> {
        let from = sequence.computed();
        self.rows.clear();
        let wanted = sequence.push_rows(self.chunk_rows, &mut self.rows);
        let want = if wanted { Want::Last } else { Want::Nothing };
        self.cache.cut(from);
        let started = Instant::now();
        self.stepper.step(&self.rows, want, &mut self.logits, control)?;
        if self.logits.rows() != usize::from(wanted) {
            let reason = format!("wanted {} rows of logits, found {}", usize::from(wanted), self.logits.rows());
            return Err(RunError::BadRows { reason });
        }
        let logits = wanted.then(|| self.logits.row(0));
        let piece = sequence.step(self.rows.len(), logits, started)?;
        self.cache.extend(from, self.rows.iter().map(|row| row.token));
        Ok(piece)
    }

    /// Forgets positions from `len` on, here and in the stepper; returns how many remain.
    fn cut(&mut self, len: usize) -> usize {
        let remaining = self.stepper.truncate(self.sequence, len).min(len);
        self.cache.cut(remaining);
        remaining
    }
}

/// A stepper between `begin` and `end`.
struct Begun<'a>(&'a mut StepperLoop);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.stepper.end();
    }
}

fn run_generator(
    generator: &mut dyn Generator,
    request: &GenerationRequest,
    tokenizer: &dyn TokenText,
    receiver: &mut dyn Receiver,
    control: &Control,
) -> Result<Generation, GenerateError> {
    let feature = match () {
        () if request.logprobs.is_some() => Some("log probabilities"),
        () if request.ignore_eos => Some("generation past the end of the text"),
        () if request.sampling.draws() => Some("sampling at a temperature"),
        () if request.sampling.presence_penalty != 0.0 => Some("a presence penalty"),
        () if request.sampling.frequency_penalty != 0.0 => Some("a frequency penalty"),
        () => None,
    };
    if let Some(feature) = feature {
        return Err(RequestError::NotOnThisRoute { feature }.into());
    }
    // The route states no vocabulary; ids are its own to check. A token needs a position of its own behind the prompt.
    let context = generator.max_context() as usize;
    let limits = SequenceLimits { positions: context.saturating_sub(1), vocab_size: usize::MAX };
    let mut sequence = Sequence::new(SequenceId(0), request, tokenizer, limits)?;
    control.check()?;
    let max_tokens = request.max_tokens.min(context - request.prompt.len());
    let asked = GeneratorRequest {
        prompt: &request.prompt,
        max_tokens: u32::try_from(max_tokens).unwrap_or(u32::MAX),
        repetition_penalty: request.sampling.repetition_penalty as f32,
        penalty_window: request.sampling.penalty_window.unwrap_or(GENERATOR_PENALTY_WINDOW),
    };
    let mut wants_more = true;
    let mut on_token = |token| {
        if let Some(piece) = sequence.take(token) {
            wants_more &= receiver.on_piece(&piece).is_continue();
        }
        wants_more && sequence.finish_reason().is_none()
    };
    let outcome_of_route = generator.generate(&asked, &mut on_token, control)?;
    if wants_more && sequence.finish_reason().is_none() {
        let reason = match () {
            () if outcome_of_route.stopped_at_eos => FinishReason::EndOfText,
            () if max_tokens < request.max_tokens => FinishReason::ContextFull,
            () => FinishReason::MaxTokens,
        };
        if let Some(piece) = sequence.end(reason) {
            let _ = receiver.on_piece(&piece);
        }
    }
    let (ttft, decode_time) = (milliseconds(outcome_of_route.prefill_ms), milliseconds(outcome_of_route.decode_ms));
    sequence.set_times(outcome_of_route.reused as usize, ttft, decode_time);
    Ok(outcome(&sequence))
}

fn outcome(sequence: &Sequence<'_>) -> Generation {
    Generation { text: sequence.text().to_owned(), tokens: sequence.generated().to_vec(), stats: sequence.stats() }
}

/// What a route reported; nonsense counts as no time.
fn milliseconds(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default()
}

/// Lanes that take one row a call still run several between two looks at the receiver.
const MIN_CHUNK_ROWS: usize = 16;
const MAX_CHUNK_ROWS: usize = 256;
const GENERATOR_PENALTY_WINDOW: u32 = 64;
