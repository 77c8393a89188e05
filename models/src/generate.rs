//! The generation loop: from prompt ids to pieces of text, on the thread that owns the device. Several requests at once:
//! [`crate::batch`].
//!
//! Prefill starts behind the reused prefix and runs in bounded chunks, so that cancellation and progress are seen; logits
//! are asked for at the last prompt position only. [`Control`] is checked between steps. After a failure the positions of
//! the failed step are forgotten, so that the next generation starts from sound state.

use crate::cached::CachedStepper;
use crate::prefix::PrefixCache;
use crate::sampling::random_seed;
use crate::sequence::{GenerationRequest, Piece, RequestError, Sequence, SequenceLimits, TokenText};
use crate::stats::{FinishReason, GenerationStats};
use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, Generator, GeneratorRequest, PhaseTime, Placement, SegmentCapacity, SequenceId, Session, Stepper, TokenId,
};
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::time::Duration;
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

/// Receives what several choices to one request produce, one choice after the other.
pub trait ChoiceReceiver {
    /// `done` of `total` prompt positions are computed for a choice.
    fn on_prefill(&mut self, choice: usize, done: usize, total: usize) {
        let _ = (choice, done, total);
    }

    /// A piece of a choice; [`ControlFlow::Break`] ends the generation, further choices included.
    fn on_piece(&mut self, choice: usize, piece: &Piece) -> ControlFlow<()>;

    /// A choice is complete.
    fn on_end(&mut self, choice: usize, generation: &Generation) {
        let _ = (choice, generation);
    }
}

impl<F: FnMut(usize, &Piece) -> ControlFlow<()>> ChoiceReceiver for F {
    fn on_piece(&mut self, choice: usize, piece: &Piece) -> ControlFlow<()> {
        self(choice, piece)
    }
}

/// The whole answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// All text that was given out: the prompt where it is echoed, and the answer.
    pub text: String,
    /// All thoughts that were given out.
    pub reasoning: String,
    /// All emitted tokens, those of a stop string and those that closed the thoughts included.
    pub tokens: Vec<TokenId>,
    /// Counts and times.
    pub stats: GenerationStats,
}

impl Generation {
    pub(crate) fn of(sequence: &Sequence<'_>) -> Self {
        Self {
            text: sequence.text().to_owned(),
            reasoning: sequence.reasoning().to_owned(),
            tokens: sequence.generated().to_vec(),
            stats: sequence.stats(),
        }
    }
}

/// Choices to one request at most.
pub const MAX_CHOICES: usize = 8;

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
            Self::Stepper(stepper) => stepper.steps.stepper().capacity().positions as usize,
            Self::Generator(generator) => generator.max_context() as usize,
        }
    }

    /// Where the time of the last generation went; empty where nobody measures.
    #[must_use]
    pub fn phases(&self) -> Vec<PhaseTime> {
        match self {
            Self::Stepper(stepper) => stepper.steps.stepper().phases(),
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

    /// Generates `choices` answers to `request`, one after the other; the prompt is computed once. Draws of choice `i` come
    /// from the seed [`crate::sampling::choice_seed`]`(seed, i)`; without a seed one is drawn. The statistics of each choice
    /// name its own, with which a single request gives the same text.
    ///
    /// # Errors
    /// As [`TextGenerator::generate`]; [`RequestError::Choices`] outside 1 to [`MAX_CHOICES`].
    pub fn generate_choices(
        &mut self,
        request: &GenerationRequest,
        choices: usize,
        tokenizer: &dyn TokenText,
        receiver: &mut dyn ChoiceReceiver,
        control: &Control,
    ) -> Result<Vec<Generation>, GenerateError> {
        if !(1..=MAX_CHOICES).contains(&choices) {
            return Err(RequestError::Choices { found: choices, limit: MAX_CHOICES }.into());
        }
        let mut request = request.clone();
        if request.sampling.draws() {
            request.sampling.seed.get_or_insert_with(random_seed);
        }
        let sampling = request.sampling.clone();
        let mut generations = Vec::with_capacity(choices);
        for choice in 0..choices {
            request.sampling = sampling.for_choice(choice as u32);
            let mut one = OneChoice { choice, receiver, has_enough: false };
            let generation = self.generate(&request, tokenizer, &mut one, control)?;
            let has_enough = one.has_enough;
            receiver.on_end(choice, &generation);
            generations.push(generation);
            if has_enough {
                break;
            }
        }
        Ok(generations)
    }
}

/// Tells the pieces of one choice from others.
struct OneChoice<'r> {
    choice: usize,
    receiver: &'r mut dyn ChoiceReceiver,
    has_enough: bool,
}

impl Receiver for OneChoice<'_> {
    fn on_prefill(&mut self, done: usize, total: usize) {
        self.receiver.on_prefill(self.choice, done, total);
    }

    fn on_piece(&mut self, piece: &Piece) -> ControlFlow<()> {
        let flow = self.receiver.on_piece(self.choice, piece);
        self.has_enough |= flow.is_break();
        flow
    }
}

/// Drives one sequence of a stepper, and remembers what its KV cache holds.
pub struct StepperLoop {
    steps: CachedStepper,
    chunk_rows: usize,
}

impl StepperLoop {
    /// A loop over sequence 0 of `stepper`, with nothing cached.
    #[must_use]
    pub fn new(stepper: Box<dyn Stepper>) -> Self {
        let chunk_rows = chunk_rows(stepper.capacity());
        Self { steps: CachedStepper::new(stepper), chunk_rows }
    }

    /// Rows of a prefill step at most; at least 1. Results do not depend on it.
    #[must_use]
    pub fn with_chunk_rows(self, chunk_rows: usize) -> Self {
        Self { chunk_rows: chunk_rows.max(1), ..self }
    }

    /// Where the layers run.
    #[must_use]
    pub fn placement(&self) -> Vec<Placement> {
        self.steps.stepper().placement()
    }

    /// What the KV cache holds.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        self.steps.cache(SEQUENCE)
    }

    /// The stepper, for other uses (warm-up, measurements). Forgets what the KV cache holds.
    pub fn stepper_mut(&mut self) -> &mut dyn Stepper {
        self.steps.stepper_mut()
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
        let limits = limits_of(self.steps.stepper());
        let mut sequence = Sequence::new(SEQUENCE, request, tokenizer, limits)?;
        control.check()?;
        self.steps.begin()?;
        let open = Begun(self);
        open.0.steps.resume(&mut sequence);
        let chunk_rows = if request.scores_prompt() { SCORED_ROWS.min(open.0.chunk_rows) } else { open.0.chunk_rows };
        open.0.drive(&mut sequence, chunk_rows, receiver, control)?;
        drop(open);
        Ok(Generation::of(&sequence))
    }

    fn drive(
        &mut self,
        sequence: &mut Sequence<'_>,
        chunk_rows: usize,
        receiver: &mut dyn Receiver,
        control: &Control,
    ) -> Result<(), RunError> {
        let drafts = if self.steps.stepper().capacity().rows_per_call > 1 { usize::MAX } else { 0 };
        let prompt_tokens = sequence.prompt_tokens();
        if tell_echo(sequence, receiver).is_break() {
            return Ok(());
        }
        while sequence.finish_reason().is_none() {
            control.check()?;
            let prefill = sequence.in_prefill();
            self.steps.clear();
            let planned = self.steps.plan(sequence, chunk_rows, drafts);
            let took = match self.steps.run(control) {
                Ok(took) => took,
                Err(error) => {
                    self.steps.abandon(&planned, sequence);
                    return Err(error);
                }
            };
            sequence.rows_computed(took);
            if prefill {
                receiver.on_prefill(sequence.computed(), prompt_tokens);
            }
            let mut flow = ControlFlow::Continue(());
            for index in planned.logits.clone() {
                if flow.is_break() || !sequence.wants_logits() {
                    break;
                }
                let piece = match sequence.take_logits(self.steps.logits(index)) {
                    Ok(piece) => piece,
                    Err(error) => {
                        self.steps.abandon(&planned, sequence);
                        return Err(error);
                    }
                };
                if prefill {
                    flow = tell_echo(sequence, receiver);
                }
                if let Some(piece) = piece
                    && flow.is_continue()
                {
                    flow = receiver.on_piece(&piece);
                }
            }
            self.steps.settle(&planned, sequence);
            if flow.is_break() {
                break;
            }
        }
        Ok(())
    }
}

fn tell_echo(sequence: &mut Sequence<'_>, receiver: &mut dyn Receiver) -> ControlFlow<()> {
    sequence.take_echo().map_or(ControlFlow::Continue(()), |piece| receiver.on_piece(&piece))
}

/// A stepper between `begin` and `end`.
struct Begun<'a>(&'a mut StepperLoop);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.steps.end();
    }
}

pub(crate) fn limits_of(stepper: &dyn Stepper) -> SequenceLimits {
    SequenceLimits { positions: stepper.capacity().positions as usize, vocab_size: stepper.vocab_size() }
}

/// Rows of a prefill step.
pub(crate) fn chunk_rows(capacity: SegmentCapacity) -> usize {
    (capacity.rows_per_call as usize).clamp(MIN_CHUNK_ROWS, MAX_CHUNK_ROWS)
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
        () if !request.sampling.logit_bias.is_empty() => Some("logit bias"),
        () if request.speculation.is_some() => Some("speculation"),
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
    let (mut reused, mut ttft, mut decode_time) = (None, Duration::ZERO, Duration::ZERO);
    let mut wants_more = tell_echo(&mut sequence, receiver).is_continue();
    while wants_more && sequence.finish_reason().is_none() {
        // Where the thoughts were closed for the model it goes on behind that.
        let prompt = sequence.tokens().to_vec();
        let wanted = request.max_tokens - sequence.generated().len();
        let max_tokens = wanted.min(context - prompt.len());
        let asked = GeneratorRequest {
            prompt: &prompt,
            max_tokens: u32::try_from(max_tokens).unwrap_or(u32::MAX),
            repetition_penalty: request.sampling.repetition_penalty as f32,
            penalty_window: request.sampling.penalty_window.unwrap_or(GENERATOR_PENALTY_WINDOW),
        };
        let mut was_led_on = false;
        let mut on_token = |token| {
            let before = sequence.tokens().len();
            if let Some(piece) = sequence.take(token) {
                wants_more &= receiver.on_piece(&piece).is_continue();
            }
            was_led_on = sequence.tokens().len() > before + 1;
            wants_more && !was_led_on && sequence.finish_reason().is_none()
        };
        let part = generator.generate(&asked, &mut on_token, control)?;
        if reused.is_none() {
            (reused, ttft) = (Some(part.reused as usize), milliseconds(part.prefill_ms));
        } else {
            decode_time += milliseconds(part.prefill_ms);
        }
        decode_time += milliseconds(part.decode_ms);
        if was_led_on || !wants_more || sequence.finish_reason().is_some() {
            continue;
        }
        let reason = match () {
            () if part.stopped_at_eos => FinishReason::EndOfText,
            () if max_tokens < wanted => FinishReason::ContextFull,
            () => FinishReason::MaxTokens,
        };
        if let Some(piece) = sequence.end(reason) {
            wants_more = receiver.on_piece(&piece).is_continue();
        }
    }
    sequence.set_times(reused.unwrap_or(0), ttft, decode_time);
    Ok(Generation::of(&sequence))
}

/// What a route reported; nonsense counts as no time.
fn milliseconds(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default()
}

const SEQUENCE: SequenceId = SequenceId(0);
/// Rows of a step where logits of all of them are wanted: bounds the memory of these.
pub(crate) const SCORED_ROWS: usize = 16;
/// Lanes that take one row a call still run several between two looks at the receiver.
const MIN_CHUNK_ROWS: usize = 16;
const MAX_CHUNK_ROWS: usize = 256;
const GENERATOR_PENALTY_WINDOW: u32 = 64;
