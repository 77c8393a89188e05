//! Continuous batching: several requests as rows of one forward pass, on the thread that owns the device.
//!
//! Requests join and leave between steps. A step holds one row of every sequence that decodes and, behind them, a part of the
//! prompts that are not computed yet, so that a long prompt does not hold up the others. A row's bits do not depend on the
//! batch it is in, so each stream is bit-identical to the request running alone. Sampling, stop strings, detokenizer, thoughts
//! and statistics belong to the sequence ([`crate::sequence`]).
//!
//! A sequence of the stepper is taken by one request at a time and keeps its KV cache for the next one: a request takes the
//! free sequence that holds most of its prompt. The memory of the caches is bounded by the sequences the session was opened
//! with times its positions; requests beyond that number wait, in the order they came.
//!
//! Where a step of several sequences fails, each of them is computed alone, so that an error ends only the request it belongs
//! to.

use crate::cached::{CachedStepper, Planned};
use crate::generate::{GenerateError, Generation, SCORED_ROWS, chunk_rows, limits_of};
use crate::sequence::{GenerationRequest, Piece, RequestError, Sequence, SequenceLimits, TokenText, check_request};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, Placement, SequenceId, Stepper};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::Duration;

/// Number of a request in its batch, in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What happens to a request. [`BatchEvent::Ended`] and [`BatchEvent::Failed`] are the last of it.
#[derive(Debug)]
#[non_exhaustive]
pub enum BatchEvent {
    /// `done` of `total` prompt positions are computed.
    Prefill {
        /// Positions computed or taken from the cache.
        done: usize,
        /// Positions of the prompt.
        total: usize,
    },
    /// A piece of the answer.
    Piece(Piece),
    /// The answer is complete.
    Ended(Box<Generation>),
    /// The request was cancelled, its deadline passed, or it could not be computed. Pieces given out before stand.
    Failed(GenerateError),
}

/// How steps are put together. Results do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchOptions {
    /// Prompt rows of a step at most while nothing decodes.
    pub prefill_rows: usize,
    /// Prompt rows of a step at most beside sequences that decode: what these wait for.
    pub interleaved_rows: usize,
}

impl BatchOptions {
    /// For a stepper of that capacity.
    #[must_use]
    pub fn for_stepper(stepper: &dyn Stepper) -> Self {
        let prefill_rows = chunk_rows(stepper.capacity());
        Self { prefill_rows, interleaved_rows: prefill_rows.min(INTERLEAVED_ROWS) }
    }
}

/// Requests that are computed together.
pub struct Batch<'t> {
    steps: CachedStepper,
    tokenizer: &'t dyn TokenText,
    options: BatchOptions,
    limits: SequenceLimits,
    waiting: VecDeque<Waiting>,
    active: Vec<Active<'t>>,
    /// By sequence, when it was last in use.
    last_use: Vec<u64>,
    next_id: u64,
    is_begun: bool,
}

struct Waiting {
    id: RequestId,
    request: GenerationRequest,
    control: Control,
}

struct Active<'t> {
    id: RequestId,
    sequence: Sequence<'t>,
    control: Control,
    scores_prompt: bool,
    state: State,
}

/// What becomes of a request after a step.
enum State {
    Running,
    /// The receiver has enough.
    Stopped,
    Failed(RunError),
}

/// What a receiver of events is.
type OnEvent<'r> = dyn FnMut(RequestId, BatchEvent) -> ControlFlow<()> + 'r;

impl<'t> Batch<'t> {
    /// An empty batch over all sequences of `stepper`, with nothing cached.
    #[must_use]
    pub fn new(stepper: Box<dyn Stepper>, tokenizer: &'t dyn TokenText) -> Self {
        let (options, limits) = (BatchOptions::for_stepper(stepper.as_ref()), limits_of(stepper.as_ref()));
        let steps = CachedStepper::new(stepper);
        Self {
            last_use: vec![0; steps.sequences()],
            steps,
            tokenizer,
            options,
            limits,
            waiting: VecDeque::new(),
            active: Vec::new(),
            next_id: 1,
            is_begun: false,
        }
    }

    /// The same with other options; no number in them counts as less than 1.
    #[must_use]
    pub fn with_options(self, options: BatchOptions) -> Self {
        Self { options, ..self }
    }

    /// Requests that can be computed at a time.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.steps.sequences()
    }

    /// Positions of a sequence.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.limits.positions
    }

    /// Where the layers run.
    #[must_use]
    pub fn placement(&self) -> Vec<Placement> {
        self.steps.stepper().placement()
    }

    /// Requests under way.
    #[must_use]
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Requests that wait for a sequence.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active.is_empty() && self.waiting.is_empty()
    }

    /// Puts `request` in line. `control` is its own: cancelling it, or its deadline, ends this request only.
    ///
    /// # Errors
    /// Whatever is wrong with the request; it is not in line then.
    pub fn submit(&mut self, request: GenerationRequest, control: Control) -> Result<RequestId, RequestError> {
        check_request(&request, self.limits)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Waiting { id, request, control });
        Ok(id)
    }

    /// One step of all that is under way, after requests that wait have joined as there is room. `on_event` receives what
    /// comes of it; [`ControlFlow::Break`] ends the request that the event belongs to. False where nothing is left to do.
    ///
    /// Call it in a loop: between two calls requests may be submitted.
    pub fn step(&mut self, on_event: &mut OnEvent<'_>) -> bool {
        self.drop_cancelled(on_event);
        if self.is_idle() {
            self.rest();
            return false;
        }
        // Before the cache is asked what it holds: a stepper may forget it when it begins.
        if !self.is_begun {
            if let Err(error) = self.steps.begin() {
                self.fail_first(error, on_event);
                return !self.is_idle();
            }
            self.is_begun = true;
        }
        self.admit(on_event);
        self.retire(on_event);
        if self.active.is_empty() {
            self.rest();
            return !self.waiting.is_empty();
        }
        self.compute(on_event);
        self.retire(on_event);
        if self.active.is_empty() {
            self.rest();
        }
        !self.is_idle()
    }

    /// Ends all requests as cancelled and hands back the stepper.
    pub fn close(mut self, on_event: &mut OnEvent<'_>) -> Box<dyn Stepper> {
        let waiting = self.waiting.drain(..).map(|waiting| waiting.id);
        for id in self.active.drain(..).map(|active| active.id).chain(waiting) {
            let _ = on_event(id, BatchEvent::Failed(RunError::Cancelled.into()));
        }
        self.rest();
        self.steps.into_stepper()
    }

    /// The device may rest.
    fn rest(&mut self) {
        if std::mem::take(&mut self.is_begun) {
            self.steps.end();
        }
    }

    fn drop_cancelled(&mut self, on_event: &mut OnEvent<'_>) {
        self.waiting.retain(|waiting| match waiting.control.check() {
            Ok(()) => true,
            Err(error) => {
                let _ = on_event(waiting.id, BatchEvent::Failed(error.into()));
                false
            }
        });
        for active in &mut self.active {
            if let Err(error) = active.control.check() {
                active.state = State::Failed(error);
            }
        }
        self.retire(on_event);
    }

    /// Gives free sequences to requests that wait.
    fn admit(&mut self, on_event: &mut OnEvent<'_>) {
        while self.active.len() < self.steps.sequences() {
            let Some(Waiting { id, request, control }) = self.waiting.pop_front() else { return };
            let Some(slot) = self.free_sequence(&request) else { return };
            let mut sequence = match Sequence::new(slot, &request, self.tokenizer, self.limits) {
                Ok(sequence) => sequence,
                Err(error) => {
                    let _ = on_event(id, BatchEvent::Failed(error.into()));
                    continue;
                }
            };
            self.steps.resume(&mut sequence);
            let echo = sequence.take_echo();
            let mut active =
                Active { id, sequence, control, scores_prompt: request.scores_prompt(), state: State::Running };
            if let Some(piece) = echo {
                active.tell(piece, on_event);
            }
            self.active.push(active);
        }
    }

    /// The free sequence that holds most of the prompt, where that is at least half of what it holds; else, so that the tokens of
    /// a system prompt do not cost another conversation its cache, the one that was not in use for longest.
    fn free_sequence(&self, request: &GenerationRequest) -> Option<SequenceId> {
        let ids = (0..self.steps.sequences()).map(|id| SequenceId(id as u32));
        let free = ids.filter(|id| self.active.iter().all(|active| active.sequence.id() != *id));
        free.min_by_key(|id| {
            let cache = self.steps.cache(*id);
            let reusable = cache.reusable(&request.prompt);
            let pays = 2 * reusable >= cache.tokens().len();
            (std::cmp::Reverse(if pays { reusable } else { 0 }), self.last_use[id.0 as usize])
        })
    }

    fn compute(&mut self, on_event: &mut OnEvent<'_>) {
        let Self { steps, active, options, .. } = self;
        let planned = plan(steps, active, *options);
        match steps.run(&control_of(active)) {
            Ok(took) => {
                for (active, planned) in active.iter_mut().zip(&planned) {
                    take(steps, active, planned, took, on_event);
                }
            }
            Err(error) if active.len() == 1 => {
                active[0].fail(steps, &planned[0], error);
            }
            Err(error) => {
                tracing::debug!(%error, sequences = active.len(), "a step failed; each of its sequences is tried alone");
                for (active, planned) in active.iter_mut().zip(&planned) {
                    steps.abandon(planned, &mut active.sequence);
                }
                for active in active {
                    compute_alone(steps, active, *options, on_event);
                }
            }
        }
    }

    /// Tells the end of requests that have one.
    fn retire(&mut self, on_event: &mut OnEvent<'_>) {
        let clock = self.next_id;
        let mut index = 0;
        while let Some(active) = self.active.get(index) {
            if matches!(active.state, State::Running) && active.sequence.finish_reason().is_none() {
                index += 1;
                continue;
            }
            // The order of the others stays: it is that of their arrival.
            let Active { id, sequence, state, .. } = self.active.remove(index);
            self.last_use[sequence.id().0 as usize] = clock;
            let event = match state {
                State::Failed(error) => BatchEvent::Failed(error.into()),
                State::Running | State::Stopped => BatchEvent::Ended(Box::new(Generation::of(&sequence))),
            };
            let _ = on_event(id, event);
        }
    }

    /// The device is not ready: the request that came first ends with the reason, so that the next one may have better luck.
    fn fail_first(&mut self, error: RunError, on_event: &mut OnEvent<'_>) {
        // Between generations nothing is active.
        if let Some(first) = self.waiting.pop_front() {
            let _ = on_event(first.id, BatchEvent::Failed(error.into()));
        }
    }
}

impl Active<'_> {
    fn tell(&mut self, piece: Piece, on_event: &mut OnEvent<'_>) {
        if on_event(self.id, BatchEvent::Piece(piece)).is_break() {
            self.state = State::Stopped;
        }
    }

    fn fail(&mut self, steps: &mut CachedStepper, planned: &Planned, error: RunError) {
        steps.abandon(planned, &mut self.sequence);
        self.state = State::Failed(error);
    }
}

/// Sequences that decode first, then prompts in the order of arrival as far as the rows reach.
fn plan(steps: &mut CachedStepper, active: &mut [Active<'_>], options: BatchOptions) -> Vec<Planned> {
    steps.clear();
    let alone = active.len() == 1;
    let rows_per_call = steps.stepper().capacity().rows_per_call as usize;
    let decoding = active.iter().filter(|active| !active.sequence.in_prefill()).count();
    let mut prompt_rows = if decoding == 0 { options.prefill_rows } else { options.interleaved_rows }.max(1);
    if rows_per_call > decoding {
        // A pass more for a few rows would read all weights again.
        prompt_rows = prompt_rows.min(rows_per_call - decoding);
    }
    let mut planned: Vec<Option<Planned>> = active.iter().map(|_| None).collect();
    for prefill in [false, true] {
        for (active, planned) in active.iter_mut().zip(&mut planned) {
            if active.sequence.in_prefill() != prefill || planned.is_some() {
                continue;
            }
            let limit = match (prefill, active.scores_prompt) {
                (false, _) => options.prefill_rows.max(1),
                (true, false) => prompt_rows,
                (true, true) => prompt_rows.min(SCORED_ROWS),
            };
            if limit == 0 {
                continue;
            }
            // A pass that several share is full enough without guesses.
            let drafts = if alone && rows_per_call > 1 { usize::MAX } else { 0 };
            let before = steps.rows();
            *planned = Some(steps.plan(&mut active.sequence, limit, drafts));
            if prefill {
                prompt_rows -= (steps.rows() - before).min(prompt_rows);
            }
        }
    }
    planned.into_iter().map(Option::unwrap_or_default).collect()
}

/// A step of one sequence, after a step of several has failed.
fn compute_alone(
    steps: &mut CachedStepper,
    active: &mut Active<'_>,
    options: BatchOptions,
    on_event: &mut OnEvent<'_>,
) {
    let planned = plan(steps, std::slice::from_mut(active), options);
    match steps.run(&active.control) {
        Ok(took) => take(steps, active, &planned[0], took, on_event),
        Err(error) => active.fail(steps, &planned[0], error),
    }
}

/// Takes a sequence's part of a step that was computed.
fn take(
    steps: &mut CachedStepper,
    active: &mut Active<'_>,
    planned: &Planned,
    took: Duration,
    on_event: &mut OnEvent<'_>,
) {
    if planned.is_empty() {
        return;
    }
    let prefill = active.sequence.in_prefill();
    active.sequence.rows_computed(took);
    if prefill {
        let (done, total) = (active.sequence.computed(), active.sequence.prompt_tokens());
        if on_event(active.id, BatchEvent::Prefill { done, total }).is_break() {
            active.state = State::Stopped;
        }
    }
    for index in planned.logits.clone() {
        if !matches!(active.state, State::Running) || !active.sequence.wants_logits() {
            break;
        }
        let piece = match active.sequence.take_logits(steps.logits(index)) {
            Ok(piece) => piece,
            Err(error) => return active.fail(steps, planned, error),
        };
        let echo = if prefill { active.sequence.take_echo() } else { None };
        for piece in echo.into_iter().chain(piece) {
            if matches!(active.state, State::Running) {
                active.tell(piece, on_event);
            }
        }
    }
    steps.settle(planned, &mut active.sequence);
}

/// The hold on a step: it goes on as long as one of its requests does.
fn control_of(active: &[Active<'_>]) -> Control {
    if let [only] = active {
        return only.control.clone();
    }
    let controls: Vec<Control> = active.iter().map(|active| active.control.clone()).collect();
    Control::asking(move || {
        let mut stopped = Ok(());
        for control in &controls {
            stopped = Err(match control.check() {
                Ok(()) => return Ok(()),
                Err(error) => error,
            });
        }
        stopped
    })
}

const INTERLEAVED_ROWS: usize = 64;
