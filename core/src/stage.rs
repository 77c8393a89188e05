//! Level 2: the stages of a model.
//!
//! A [`Segment`] is a run of consecutive layers on one device, with its packed weights and its KV cache. Segments are
//! chained into a [`crate::pipeline::Pipeline`], which is a [`Stepper`]: token rows in, logits out. The final norm and the
//! head are part of the last segment, or a segment of their own with an empty layer range.

use crate::error::RunError;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Id of a token in the model's vocabulary.
pub type TokenId = u32;

/// Number of a sequence inside a session, from 0 and below [`SegmentCapacity::sequences`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u32);

/// One position of one sequence. Prefill, decode, batching and speculation are all rows.
///
/// Rows of one sequence appear in ascending, gapless order and continue what the segment already holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// The sequence.
    pub sequence: SequenceId,
    /// The token at this position.
    pub token: TokenId,
    /// Position in the sequence, from 0.
    pub position: u32,
}

/// What a segment hands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Yields {
    /// The residual stream after its last layer.
    Hidden,
    /// The residual stream after the final norm.
    Normed,
    /// Logits over the vocabulary.
    Logits,
}

/// What a segment starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Takes {
    /// Token ids: it embeds them itself.
    Tokens,
    /// The residual stream of the layer before.
    Hidden,
    /// The normed residual stream (a head alone).
    Normed,
}

/// How much a segment holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SegmentCapacity {
    /// Positions of each sequence.
    pub positions: u32,
    /// Rows of one `forward` call; 1 on NPU lanes.
    pub rows_per_call: u32,
    /// Sequences held side by side.
    pub sequences: u32,
}

impl SegmentCapacity {
    /// What both can do.
    #[must_use]
    pub fn meet(self, other: Self) -> Self {
        Self {
            positions: self.positions.min(other.positions),
            rows_per_call: self.rows_per_call.min(other.rows_per_call),
            sequences: self.sequences.min(other.sequences),
        }
    }
}

/// For which rows of a call a result is wanted. Only the last segment of a chain may leave rows out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want<'a> {
    /// None: fill the KV cache only.
    Nothing,
    /// The last row of the call.
    Last,
    /// Every row.
    All,
    /// Row `i` where `flags[i]`; as many flags as rows.
    Each(&'a [bool]),
}

impl Want<'_> {
    /// Whether row `index` of `rows` is wanted.
    #[must_use]
    pub fn selects(&self, index: usize, rows: usize) -> bool {
        match self {
            Self::Nothing => false,
            Self::Last => index + 1 == rows,
            Self::All => true,
            Self::Each(flags) => flags.get(index).copied().unwrap_or(false),
        }
    }

    /// How many of `rows` are wanted.
    #[must_use]
    pub fn count(&self, rows: usize) -> usize {
        (0..rows).filter(|&index| self.selects(index, rows)).count()
    }
}

/// A dense block of f32 rows: the residual stream, or logits. Reused from call to call; keeps its allocation.
#[derive(Debug, Clone, Default)]
pub struct HiddenRows {
    rows: usize,
    width: usize,
    data: Vec<f32>,
}

impl HiddenRows {
    /// An empty block.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes it `rows` × `width`; contents are zero.
    pub fn reset(&mut self, rows: usize, width: usize) {
        self.data.clear();
        self.reshape(rows, width);
    }

    /// Makes it `rows` × `width`; contents are whatever was there before, or zero. For a caller that writes every element.
    pub fn reshape(&mut self, rows: usize, width: usize) {
        self.rows = rows;
        self.width = width;
        self.data.resize(rows * width, 0.0);
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Row `index`.
    ///
    /// # Panics
    /// When `index` is not below [`HiddenRows::rows`].
    #[must_use]
    pub fn row(&self, index: usize) -> &[f32] {
        assert!(index < self.rows, "row {index} of {}", self.rows);
        &self.data[index * self.width..(index + 1) * self.width]
    }

    /// Row `index`, for writing.
    ///
    /// # Panics
    /// When `index` is not below [`HiddenRows::rows`].
    pub fn row_mut(&mut self, index: usize) -> &mut [f32] {
        assert!(index < self.rows, "row {index} of {}", self.rows);
        &mut self.data[index * self.width..(index + 1) * self.width]
    }

    /// All elements, row after row.
    #[must_use]
    pub fn as_slice(&self) -> &[f32] {
        &self.data
    }

    /// All elements, row after row, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

/// The caller's hold on a running call: cancellation and a deadline, seen between steps.
#[derive(Debug, Clone, Default)]
pub struct Control {
    cancelled: Arc<AtomicBool>,
    deadline: Option<Instant>,
    upstream: Option<Upstream>,
}

/// A hold of another kind, which a [`Control`] asks too.
#[derive(Clone)]
struct Upstream(Arc<dyn Fn() -> Result<(), RunError> + Send + Sync>);

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Upstream")
    }
}

impl Control {
    /// Never cancelled, no deadline.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With a deadline.
    #[must_use]
    pub fn until(deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..Self::default() }
    }

    /// With `check` to be asked too, each time: for holds that live elsewhere, e.g. on the other side of an interface.
    #[must_use]
    pub fn asking(check: impl Fn() -> Result<(), RunError> + Send + Sync + 'static) -> Self {
        Self { upstream: Some(Upstream(Arc::new(check))), ..Self::default() }
    }

    /// Asks the call to stop at the next step. Safe from a signal handler.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// The flag itself, for signal handlers.
    #[must_use]
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancelled)
    }

    /// Whether the call may go on.
    ///
    /// # Errors
    /// [`RunError::Cancelled`] or [`RunError::DeadlinePassed`].
    pub fn check(&self) -> Result<(), RunError> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(RunError::Cancelled);
        }
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(RunError::DeadlinePassed),
            _ => self.upstream.as_ref().map_or(Ok(()), |upstream| (upstream.0)()),
        }
    }
}

/// What can be observed inside a segment. Layers are numbered in the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Tap {
    /// Residual stream after a layer.
    LayerOut(u32),
    /// Keys written by a layer, after RoPE: KV heads × head dim. Whatever order a file keeps them in, the two elements of a
    /// rotated pair stand half the rotated width apart, as in Hugging Face checkpoints.
    K(u32),
    /// Values written by a layer: KV heads × head dim.
    V(u32),
    /// After the final norm.
    Normed,
    /// Logits.
    Logits,
}

/// Receives canonical f32 rows of a forward pass, for parity.
pub trait TapSink: Send {
    /// `values` of `tap` for `row`.
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]);
}

/// A sink that several segments of one session write to.
pub type SharedTapSink = Arc<Mutex<dyn TapSink>>;

impl<S: TapSink + ?Sized> TapSink for Arc<Mutex<S>> {
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]) {
        self.lock().unwrap_or_else(PoisonError::into_inner).observe(tap, row, values);
    }
}

/// Time spent in a named part of the work since the generation began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseTime {
    /// Name, e.g. `npu_engine`.
    pub name: &'static str,
    /// Time in all.
    pub elapsed: Duration,
    /// How often.
    pub count: u32,
}

/// Consecutive layers on one device. Owns its packed weights and its KV cache.
///
/// For fixed numerics and instruction set the result of a row is bit-identical whatever the batch size, chunk border,
/// thread count or prefix split.
pub trait Segment: Send {
    /// Its layers, numbered in the whole model; empty for a head alone.
    fn layers(&self) -> Range<usize>;

    /// What it starts from.
    fn takes(&self) -> Takes;

    /// What it hands on.
    fn yields(&self) -> Yields;

    /// Elements of a row it hands on: hidden size, or vocabulary.
    fn width(&self) -> usize;

    /// How much it holds.
    fn capacity(&self) -> SegmentCapacity;

    /// Device it runs on, for `inspect` and messages.
    fn device(&self) -> &str;

    /// Called before a generation; a lane opens its context here.
    ///
    /// # Errors
    /// Whatever keeps the device from being ready.
    fn begin(&mut self) -> Result<(), RunError>;

    /// Called after a generation, also after a failed one.
    fn end(&mut self);

    /// Runs `rows`. With [`Takes::Tokens`] the incoming `hidden` is ignored; otherwise it has one row for each of `rows`.
    /// On return `hidden` has one row for each wanted row, in order ([`Yields::Hidden`] segments in the middle of a chain
    /// are asked for [`Want::All`]).
    ///
    /// # Errors
    /// [`RunError::Capacity`], [`RunError::BadRows`], device failures. After an error the positions of `rows` are invalid:
    /// call [`Segment::truncate`].
    fn forward(
        &mut self,
        rows: &[Row],
        hidden: &mut HiddenRows,
        want: Want<'_>,
        control: &Control,
    ) -> Result<(), RunError>;

    /// Forgets positions from `len` on; returns how many really remain. A segment without layers holds none and is not asked.
    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize;

    /// What can be observed here.
    fn taps(&self) -> &[Tap];

    /// Sets or removes the observer.
    fn observe(&mut self, sink: Option<Box<dyn TapSink>>);

    /// Where the time went since [`Segment::begin`]; empty where nobody measures.
    fn phases(&self) -> Vec<PhaseTime> {
        Vec::new()
    }
}

/// Where a range of layers runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Layers.
    pub layers: Range<usize>,
    /// Device id.
    pub device: String,
    /// What the stage hands on.
    pub yields: Yields,
}

/// Token rows in, logits out.
pub trait Stepper: Send {
    /// Entries of a logits row.
    fn vocab_size(&self) -> usize;

    /// How much it holds.
    fn capacity(&self) -> SegmentCapacity;

    /// Stages in order.
    fn placement(&self) -> Vec<Placement>;

    /// Called before a generation.
    ///
    /// # Errors
    /// Whatever keeps a device from being ready.
    fn begin(&mut self) -> Result<(), RunError>;

    /// Called after a generation, also after a failed one.
    fn end(&mut self);

    /// Runs `rows` (any number; the implementation splits them by [`SegmentCapacity::rows_per_call`]) and leaves one logits
    /// row in `logits` for each wanted row.
    ///
    /// # Errors
    /// As [`Segment::forward`].
    fn step(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        control: &Control,
    ) -> Result<(), RunError>;

    /// Forgets positions from `len` on; returns how many really remain.
    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize;

    /// What can be observed in it, in the order of the computation. Nothing by default.
    fn taps(&self) -> Vec<Tap> {
        Vec::new()
    }

    /// Sets or removes the observer. Does nothing where there are no taps.
    fn observe(&mut self, sink: Option<SharedTapSink>) {
        drop(sink);
    }

    /// Where the time went since [`Stepper::begin`], stage by stage; empty where nobody measures.
    fn phases(&self) -> Vec<PhaseTime> {
        Vec::new()
    }
}

/// What a private route is asked to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratorRequest<'a> {
    /// Prompt ids.
    pub prompt: &'a [TokenId],
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// Repetition penalty; 1.0 is off.
    pub repetition_penalty: f32,
    /// Tokens the penalty looks back over.
    pub penalty_window: u32,
}

/// What a private route reports at the end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GeneratorOutcome {
    /// Generated ids.
    pub tokens: Vec<TokenId>,
    /// Time spent on the prompt.
    pub prefill_ms: f64,
    /// Time spent on the rest.
    pub decode_ms: f64,
    /// Whether an end-of-sequence id ended it.
    pub stopped_at_eos: bool,
    /// Prompt positions taken from the route's own cache.
    pub reused: u32,
}

/// Tokens in, tokens out: the form of private routes that sample on the device.
pub trait Generator: Send {
    /// Positions of a sequence.
    fn max_context(&self) -> u32;

    /// The route's own default; 1.0 is off.
    fn default_repetition_penalty(&self) -> f32 {
        1.0
    }

    /// Whether the template leaves the model inside a thought.
    fn opens_think(&self) -> bool {
        false
    }

    /// One line for people; may be empty.
    fn describe(&self) -> String {
        String::new()
    }

    /// Generates; `on_token` returning false stops.
    ///
    /// # Errors
    /// As [`Segment::forward`].
    fn generate(
        &mut self,
        request: &GeneratorRequest<'_>,
        on_token: &mut dyn FnMut(TokenId) -> bool,
        control: &Control,
    ) -> Result<GeneratorOutcome, RunError>;
}

/// What a route opens: logits out, or (private routes) tokens out.
pub enum Session {
    /// Logits out; sampling is the host's.
    Stepper(Box<dyn Stepper>),
    /// Tokens out.
    Generator(Box<dyn Generator>),
}
