//! The lane: a whole model as a segment, one runlist a token.
//!
//! [`Lane::load`] fills the buffers, once. [`Segment::begin`] opens a hardware context and configures the array with one run;
//! [`Segment::end`] closes it: a context that idles beyond the driver's suspend delay does not come back. Each token is one list
//! of as many runs of the layer kernel as there are layers, and one of the head where its logits are wanted. There are two slots
//! of lists: while one runs, the other is bound to the next context length.
//!
//! Buffers outlive contexts, so a sequence goes on in the next generation. A context that was lost (a time-out, a failed run) is
//! dropped at once; what follows fails until the next [`Segment::begin`].

mod buffers;
mod generation;
mod source;

pub use source::{LaneSource, LayerTensors};

use crate::dimensions::{Dimensions, LaneDecline};
use crate::kernels::{KernelError, KernelFiles, Kernels};
use crate::kv::KvPart;
use crate::packing::{BufferSizes, INIT_BYTES, PackError, RopeTable};
use buffers::{Buffers, Filling};
use generation::{Generation, Parts, Runs};
use npuhal_core::device::{Deadline, Device};
use npuhal_core::dtype::bf16_value;
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::Duration;
use thiserror::Error;

/// How long a run may take.
const RUN_TIMEOUT: Duration = Duration::from_millis(5000);

/// Two NaNs of bf16.
const POISON: [u8; 4] = [0xff; 4];

/// Logits that are read at once: so many stay in the first cache until they are widened. Whole cache lines.
const LOGITS_AT_ONCE: usize = 4096;

/// More threads than this only wait for memory.
const PACKING_THREADS_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);

/// How a lane is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneOptions {
    /// Positions of the sequence, at most those of the kernels; all of them where `None`.
    pub positions: Option<u32>,
    /// How long configuring the array, or a token, may take.
    pub timeout: Duration,
    /// Threads that pack weights at load.
    pub threads: NonZeroUsize,
}

impl Default for LaneOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN).min(PACKING_THREADS_MAX);
        Self { positions: None, timeout: RUN_TIMEOUT, threads }
    }
}

/// A lane that could not be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaneError {
    /// A model that the lane does not take.
    #[error(transparent)]
    Declined(#[from] LaneDecline),
    /// The kernels.
    #[error(transparent)]
    Kernels(#[from] KernelError),
    /// A tensor.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// More positions than the kernels serve.
    #[error("a context of {asked} positions was asked for; these kernels serve 1 to {limit}")]
    Positions {
        /// What was asked for.
        asked: u32,
        /// Positions of the kernels.
        limit: u32,
    },
}

/// A whole model on the NPU: tokens in, logits out, one row a call.
pub struct Lane {
    /// Dropped first: what it holds lives in the device's context.
    generation: Option<Generation>,
    /// Why there is no generation although one was begun.
    lost: Option<String>,
    buffers: Buffers,
    kernels: Kernels,
    dimensions: Dimensions,
    rope: RopeTable,
    source: Box<dyn LaneSource>,
    device: Box<dyn Device>,
    positions: u32,
    timeout: Duration,
    /// Positions that the KV cache holds.
    len: u32,
    taps: Vec<Tap>,
    sink: Option<Box<dyn TapSink>>,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl Lane {
    /// Checks kernels and model against each other, then allocates and packs the buffers. No context is opened.
    ///
    /// # Errors
    /// [`LaneError`]; nothing stays allocated.
    pub fn load(
        device: Box<dyn Device>,
        source: Box<dyn LaneSource>,
        files: &KernelFiles,
        options: LaneOptions,
    ) -> Result<Self, LaneError> {
        let dimensions = Dimensions::of(source.config())?;
        let kernels = Kernels::new(files, &dimensions)?;
        let limit = kernels.positions();
        let positions = options.positions.unwrap_or(limit);
        if !(1..=limit).contains(&positions) {
            return Err(LaneError::Positions { asked: positions, limit });
        }
        check_rows(&*source, &dimensions)?;
        let rope = RopeTable::new(dimensions.rope_theta);
        let buffers = Buffers::load(Filling {
            device: &*device,
            source: &*source,
            kernels: &kernels,
            dimensions: &dimensions,
            rope: &rope,
            threads: options.threads.get(),
        })?;
        Ok(Self {
            generation: None,
            lost: None,
            buffers,
            kernels,
            rope,
            source,
            device,
            positions,
            timeout: options.timeout,
            len: 0,
            taps: taps_of(dimensions.layers),
            dimensions,
            sink: None,
            bytes: Vec::new(),
            values: Vec::new(),
        })
    }

    /// Bytes of device-visible memory that a model takes with these kernels.
    #[must_use]
    pub fn memory_bytes(dimensions: &Dimensions, kernels: &Kernels) -> u64 {
        let sizes = BufferSizes::new(dimensions);
        let layer = sizes.weights + sizes.layer_norms + buffers::SLOTS as u64 * sizes.norms + kernels.kv_bytes(&sizes);
        let others = [sizes.act, sizes.logits, sizes.head, sizes.final_norm, INIT_BYTES];
        dimensions.layers as u64 * layer + others.iter().sum::<u64>()
    }

    /// Dimensions of the model.
    #[must_use]
    pub fn dimensions(&self) -> &Dimensions {
        &self.dimensions
    }

    fn admit(&self, rows: &[Row], want: Want<'_>) -> Result<(), RunError> {
        let bad = |reason: String| Err(RunError::BadRows { reason });
        if rows.len() > 1 {
            return Err(RunError::Capacity { what: "rows of a call", found: rows.len() as u64, limit: 1 });
        }
        if let Want::Each(flags) = want
            && flags.len() != rows.len()
        {
            return bad(format!("{} wishes for {} rows", flags.len(), rows.len()));
        }
        for row in rows {
            if row.sequence != SequenceId(0) {
                let found = u64::from(row.sequence.0) + 1;
                return Err(RunError::Capacity { what: "sequences", found, limit: 1 });
            }
            if row.token as usize >= self.dimensions.vocab {
                return bad(format!("token {} of a vocabulary of {}", row.token, self.dimensions.vocab));
            }
            if row.position >= self.positions {
                let (found, limit) = (u64::from(row.position) + 1, u64::from(self.positions));
                return Err(RunError::Capacity { what: "positions", found, limit });
            }
            if row.position != self.len {
                return bad(format!("position {} of a sequence that holds {}", row.position, self.len));
            }
        }
        Ok(())
    }

    /// Runs a row that was admitted; leaves its logits in the buffer where the head runs.
    fn run(&mut self, row: Row, runs: Runs) -> Result<(), RunError> {
        let mut generation = match (self.generation.take(), &self.lost) {
            (Some(generation), _) => generation,
            (None, Some(reason)) => return Err(DeviceError::ContextLost { reason: reason.clone() }.into()),
            (None, None) => {
                let reason = "no generation was begun".to_owned();
                return Err(DeviceError::Misuse { operation: "forward", reason }.into());
            }
        };
        let result = match self.sink.is_some() {
            true => self.run_observed(&mut generation, row),
            false => self.run_whole(&mut generation, row, runs),
        };
        match &result {
            Err(error) if error.loses_context() => self.lost = Some(error.to_string()),
            _ => self.generation = Some(generation),
        }
        result
    }

    /// One list for the token; the other slot is prepared meanwhile.
    fn run_whole(&mut self, generation: &mut Generation, row: Row, runs: Runs) -> Result<(), RunError> {
        let (parts, context_len) = (self.parts(), row.position + 1);
        generation.prepare_next(parts, context_len, runs)?;
        if runs == Runs::LayersAndHead {
            self.poison_logits()?;
        }
        self.embed(row)?;
        let submission = generation.launch(runs)?;
        if context_len < self.positions {
            // The next token is taken to need the same. A failure here is not this token's: the next call prepares what is
            // missing, and reports it.
            let _ = generation.prepare_other(parts, context_len + 1, runs);
        }
        submission.wait(Deadline::within(self.timeout))?;
        generation.flip();
        Ok(())
    }

    /// Each layer by itself, so that the residual stream can be seen between them.
    fn run_observed(&mut self, generation: &mut Generation, row: Row) -> Result<(), RunError> {
        let context_len = row.position + 1;
        generation.rotate_next(self.parts(), context_len)?;
        self.embed(row)?;
        let deadline = Deadline::within(self.timeout);
        for layer in 0..self.dimensions.layers {
            generation.single_layer(self.parts(), layer, context_len)?.submit()?.wait(deadline)?;
            self.observe_layer(layer, row)?;
        }
        self.poison_logits()?;
        generation.single_head(self.parts())?.submit()?.wait(deadline)?;
        generation.flip();
        Ok(())
    }

    /// Overwrites the ends of what the head will write: logits that never arrive are not taken for those of the token before.
    fn poison_logits(&self) -> Result<(), DeviceError> {
        self.kernels.logits_ends().iter().try_for_each(|at_bytes| self.buffers.logits.write(*at_bytes, &POISON))
    }

    fn parts(&self) -> Parts<'_> {
        let Self { kernels, buffers, rope, dimensions, .. } = self;
        Parts { kernels, buffers, rope, layers: dimensions.layers }
    }

    /// Starts the residual stream.
    fn embed(&self, row: Row) -> Result<(), RunError> {
        let len_bytes = self.dimensions.hidden_bytes();
        let start = row.token as usize * len_bytes;
        let embedding = self.source.embedding().map_err(|error| bad_source(&error))?;
        let values = embedding.get(start..start + len_bytes).ok_or_else(|| RunError::BadRows {
            reason: format!("token {} is past the end of the embedding", row.token),
        })?;
        Ok(self.buffers.act.write(0, values)?)
    }

    fn observe_layer(&mut self, layer: usize, row: Row) -> Result<(), RunError> {
        let number = layer as u32;
        for (tap, part) in [(Tap::K(number), KvPart::Keys), (Tap::V(number), KvPart::Values)] {
            let row_bytes = self.kernels.kv().row_bytes() as usize;
            self.bytes.resize(2 * row_bytes, 0);
            let halves = self.bytes.chunks_exact_mut(row_bytes);
            for (half, at_bytes) in halves.zip(self.kernels.kv().rows(part, row.position)) {
                self.buffers.kv(layer).read(at_bytes, half)?;
            }
            self.show(tap, row);
        }
        self.bytes.resize(self.dimensions.hidden_bytes(), 0);
        self.buffers.act.read(0, &mut self.bytes)?;
        self.show(Tap::LayerOut(number), row);
        Ok(())
    }

    /// Reads the logits into `logits`, where a caller wants them, and shows them to the observer.
    fn read_logits(&mut self, row: Row, logits: Option<&mut [f32]>) -> Result<(), RunError> {
        let Some(logits) = logits else {
            self.bytes.resize(self.dimensions.logits_bytes(), 0);
            self.buffers.logits.read(0, &mut self.bytes)?;
            self.check_arrived(0, row)?;
            self.show(Tap::Logits, row);
            return Ok(());
        };
        // Of a whole vocabulary: widened once, where they are wanted.
        let mut at_bytes = 0;
        for values in logits.chunks_mut(LOGITS_AT_ONCE) {
            self.bytes.resize(2 * values.len(), 0);
            self.buffers.logits.read(at_bytes, &mut self.bytes)?;
            self.check_arrived(at_bytes, row)?;
            widen(&self.bytes, values);
            at_bytes += self.bytes.len() as u64;
        }
        if let Some(sink) = &mut self.sink {
            sink.observe(Tap::Logits, row, logits);
        }
        Ok(())
    }

    /// Refuses logits in `self.bytes`, read from `at_bytes` on, that are what [`Self::poison_logits`] wrote.
    fn check_arrived(&mut self, at_bytes: u64, row: Row) -> Result<(), RunError> {
        let is_missing = |end: &&u64| {
            let at = end.checked_sub(at_bytes).and_then(|offset| self.bytes.get(offset as usize..));
            at.is_some_and(|at| at.starts_with(&POISON))
        };
        let Some(missing) = self.kernels.logits_ends().iter().find(is_missing) else { return Ok(()) };
        let detail = format!("the logits of position {} never arrived at byte {missing:#x}", row.position);
        let error = RunError::Failed { run: None, state: "COMPLETED".to_owned(), detail };
        (self.generation, self.lost) = (None, Some(error.to_string()));
        Err(error)
    }

    /// Widens `self.bytes` into `self.values`, and hands them to the observer.
    fn show(&mut self, tap: Tap, row: Row) {
        self.values.resize(self.bytes.len() / 2, 0.0);
        widen(&self.bytes, &mut self.values);
        if let Some(sink) = &mut self.sink {
            sink.observe(tap, row, &self.values);
        }
    }
}

impl Segment for Lane {
    fn layers(&self) -> Range<usize> {
        0..self.dimensions.layers
    }

    fn takes(&self) -> Takes {
        Takes::Tokens
    }

    fn yields(&self) -> Yields {
        Yields::Logits
    }

    fn width(&self) -> usize {
        self.dimensions.vocab
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: self.positions, rows_per_call: 1, sequences: 1 }
    }

    fn device(&self) -> &str {
        &self.device.card().id
    }

    fn begin(&mut self) -> Result<(), RunError> {
        self.end();
        self.generation = Some(Generation::open(&*self.device, self.parts(), self.timeout)?);
        Ok(())
    }

    fn end(&mut self) {
        self.generation = None;
        self.lost = None;
    }

    fn forward(
        &mut self,
        rows: &[Row],
        hidden: &mut HiddenRows,
        want: Want<'_>,
        control: &Control,
    ) -> Result<(), RunError> {
        control.check()?;
        self.admit(rows, want)?;
        // Every row there is gets its logits below.
        hidden.reshape(want.count(rows.len()), self.dimensions.vocab);
        for (index, row) in rows.iter().enumerate() {
            let is_wanted = want.selects(index, rows.len());
            self.run(*row, if is_wanted { Runs::LayersAndHead } else { Runs::Layers })?;
            if is_wanted || self.sink.is_some() {
                let logits = is_wanted.then(|| hidden.row_mut(0));
                self.read_logits(*row, logits)?;
            }
            self.len = row.position + 1;
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        if sequence != SequenceId(0) {
            return 0;
        }
        self.len = self.len.min(u32::try_from(len).unwrap_or(u32::MAX));
        self.len as usize
    }

    fn taps(&self) -> &[Tap] {
        &self.taps
    }

    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.sink = sink;
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane")
            .field("device", &self.device())
            .field("dimensions", &self.dimensions)
            .field("positions", &self.positions)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Embedding and final norm have their lengths; the other tensors are checked as they are packed.
fn check_rows(source: &dyn LaneSource, dimensions: &Dimensions) -> Result<(), PackError> {
    let hidden = dimensions.hidden_bytes();
    for (what, wanted_bytes, found) in [
        ("model.norm.weight", hidden, source.final_norm()?),
        ("model.embed_tokens.weight", dimensions.vocab * hidden, source.embedding()?),
    ] {
        if found.len() != wanted_bytes {
            return Err(PackError::NormBytes { what: what.to_owned(), wanted_bytes, found_bytes: found.len() });
        }
    }
    Ok(())
}

/// Values of little-endian bf16.
fn widen(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = bf16_value(u16::from_le_bytes(*bytes));
    }
}

fn bad_source(error: &PackError) -> RunError {
    RunError::BadRows { reason: error.to_string() }
}

fn taps_of(layers: usize) -> Vec<Tap> {
    let of_layer = |layer: usize| [Tap::K(layer as u32), Tap::V(layer as u32), Tap::LayerOut(layer as u32)];
    (0..layers).flat_map(of_layer).chain([Tap::Logits]).collect()
}
