//! Segments on the NPU: single-dispatch engines, chunked graphs, the int8 head.
//!
//! Weights are packed into device buffers once, when a segment is loaded; buffers outlive contexts, so a sequence goes on in the
//! next generation. [`Segment::begin`](npuhal_core::stage::Segment::begin) opens a context for each container and
//! [`Segment::end`](npuhal_core::stage::Segment::end) closes them all: on these NPUs contexts of a process go together. A context
//! that was lost (a time-out, a failed run) is dropped at once.
//!
//! Before a dispatch of an engine or of the head the outputs that will be read are overwritten with NaNs, so that an output that
//! never arrived is seen as an error and not taken for the result of the token before. Chunked graphs work in place: the hidden
//! row is input and output, and the caches are read as a whole, so nothing in them can be overwritten before. What they leave
//! behind, the hidden row and the new keys and values, has to be finite.

mod chunked;
mod engine;
mod generation;
mod head;
mod timed;

pub use chunked::{ChunkPlan, Chunked};
pub use engine::Engine;
pub use head::NpuHead;
pub use timed::Timed;

use crate::error::LaneError;
use crate::kit::KitError;
use crate::layout::BF16_BYTES;
use npuhal_core::device::{BufferRef, BufferSpec, Device};
use npuhal_core::dtype::bf16_value;
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::stage::{PhaseTime, Row, SegmentCapacity, SequenceId, Tap, TapSink, Want};
use npuhal_models::package::HEAD_DIM;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::{Duration, Instant};
use thiserror::Error;

/// What a dispatch may take on hardware: far above the published 50 ms, below nothing that a driver's watch-dog allows.
pub const DISPATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// What a dispatch may take on the virtual NPU, which computes every core's work one after the other.
pub const VIRTUAL_DISPATCH_TIMEOUT: Duration = Duration::from_secs(300);
/// Threads that pack weights at most.
const PACKING_THREADS_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);

/// How a segment runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentOptions {
    /// Positions of a sequence.
    pub positions: u32,
    /// Whether a sequence goes on in the next generation; otherwise each starts anew.
    pub keeps_prefix: bool,
    /// What a dispatch may take.
    pub timeout: Duration,
    /// Threads that pack weights.
    pub threads: NonZeroUsize,
    /// Whether [`Segment::phases`](npuhal_core::stage::Segment::phases) says where the time went.
    pub profiles: bool,
}

impl SegmentOptions {
    /// All positions, prefixes kept, as many threads as there are processors (but few: memory is the limit).
    #[must_use]
    pub fn new(positions: u32, timeout: Duration) -> Self {
        let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN).min(PACKING_THREADS_MAX);
        Self { positions, keeps_prefix: true, timeout, threads, profiles: false }
    }
}

/// A segment that cannot be loaded. Nothing stays allocated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The kit.
    #[error(transparent)]
    Kit(#[from] KitError),
    /// The weights.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The one sequence whose keys and values a segment holds, position after position.
struct Sequence {
    /// Positions that are held.
    len: u32,
    positions: u32,
    keeps_prefix: bool,
    vocab_size: usize,
}

impl Sequence {
    fn new(options: &SegmentOptions, vocab_size: usize) -> Self {
        Self { len: 0, positions: options.positions, keeps_prefix: options.keeps_prefix, vocab_size }
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: self.positions, rows_per_call: 1, sequences: 1 }
    }

    /// The next generation begins.
    fn begin(&mut self) {
        if !self.keeps_prefix {
            self.len = 0;
        }
    }

    /// The row of a call, where it has one: one row, of this sequence, that continues what is held.
    fn admit(&self, rows: &[Row], want: Want<'_>) -> Result<Option<Row>, RunError> {
        if rows.len() > 1 {
            return Err(RunError::Capacity { what: "rows of a call", found: rows.len() as u64, limit: 1 });
        }
        if let Want::Each(flags) = want
            && flags.len() != rows.len()
        {
            return Err(RunError::BadRows { reason: format!("{} wishes for {} rows", flags.len(), rows.len()) });
        }
        let Some(row) = rows.first() else { return Ok(None) };
        if row.sequence != SequenceId(0) {
            let found = u64::from(row.sequence.0) + 1;
            return Err(RunError::Capacity { what: "sequences", found, limit: 1 });
        }
        if row.token as usize >= self.vocab_size {
            let reason = format!("token {} of a vocabulary of {}", row.token, self.vocab_size);
            return Err(RunError::BadRows { reason });
        }
        if row.position >= self.positions {
            let (found, limit) = (u64::from(row.position) + 1, u64::from(self.positions));
            return Err(RunError::Capacity { what: "positions", found, limit });
        }
        if row.position != self.len {
            let reason = format!("position {} of a sequence that holds {}", row.position, self.len);
            return Err(RunError::BadRows { reason });
        }
        Ok(Some(*row))
    }

    /// `row` was computed.
    fn append(&mut self, row: Row) {
        self.len = row.position + 1;
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        if sequence != SequenceId(0) {
            return 0;
        }
        self.len = self.len.min(u32::try_from(len).unwrap_or(u32::MAX));
        self.len as usize
    }
}

/// Shows keys and values of `layers` at `row`. `read` fetches a vector of them: layer (from the first of `layers`), head, 0 for
/// the key and 1 for the value.
fn show_kv(
    sink: &mut dyn TapSink,
    row: Row,
    layers: Range<usize>,
    heads: usize,
    mut read: impl FnMut(usize, usize, usize, &mut [u8]) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let mut bytes = [0; HEAD_DIM * BF16_BYTES];
    let mut tensor = Vec::with_capacity(heads * HEAD_DIM);
    for (at, layer) in layers.enumerate() {
        for (part, tap) in [Tap::K(layer as u32), Tap::V(layer as u32)].into_iter().enumerate() {
            tensor.clear();
            for head in 0..heads {
                read(at, head, part, &mut bytes)?;
                tensor.extend(bytes.as_chunks::<2>().0.iter().map(|bits| bf16_value(u16::from_le_bytes(*bits))));
            }
            sink.observe(tap, row, &tensor);
        }
    }
    Ok(())
}

/// Allocates a buffer and packs into it in place.
fn packed(
    device: &dyn Device,
    len_bytes: usize,
    label: String,
    mut pack: impl FnMut(&mut [u8]) -> Result<(), LaneError>,
) -> Result<BufferRef, SegmentError> {
    let buffer = device.allocate(&BufferSpec::tensor(len_bytes as u64, label))?;
    let mut result = Ok(());
    buffer.fill(&mut |bytes| result = pack(bytes))?;
    result?;
    Ok(buffer)
}

fn zeroed(device: &dyn Device, len_bytes: usize, label: &str) -> Result<BufferRef, SegmentError> {
    packed(device, len_bytes, label.to_owned(), |bytes| {
        bytes.fill(0);
        Ok(())
    })
}

/// A NaN of bf16 and, twice, of f32.
const POISON: u8 = 0xff;

/// Widens little-endian bf16 into `values`; a value that is no finite number is an error about `what`.
fn widen(bytes: &[u8], values: &mut Vec<f32>, what: impl FnOnce() -> String) -> Result<(), RunError> {
    values.clear();
    values.extend(bytes.as_chunks::<2>().0.iter().map(|bits| bf16_value(u16::from_le_bytes(*bits))));
    check_finite(values, what)
}

/// Whether no value of little-endian bf16 is a NaN or an infinity, which have all bits of the exponent.
fn is_finite_bf16(bytes: &[u8]) -> bool {
    let mut is_finite = true;
    for bits in bytes.as_chunks::<2>().0 {
        is_finite &= u16::from_le_bytes(*bits) & 0x7f80 != 0x7f80;
    }
    is_finite
}

fn check_finite(values: &[f32], what: impl FnOnce() -> String) -> Result<(), RunError> {
    // Magnitudes above that of infinity are NaNs, so one comparison of bits finds both.
    let worst = values.iter().fold(0, |worst, value| worst.max(value.to_bits() & 0x7fff_ffff));
    if worst >= f32::INFINITY.to_bits() { Err(RunError::NotFinite { what: what() }) } else { Ok(()) }
}

/// Times of named parts.
#[derive(Debug, Default)]
struct Phases(Vec<PhaseTime>);

impl Phases {
    /// Adds the time since `started` to a part; returns the present time.
    fn add(&mut self, name: &'static str, started: Instant) -> Instant {
        let now = Instant::now();
        let elapsed = now - started;
        match self.0.iter_mut().find(|phase| phase.name == name) {
            Some(phase) => {
                phase.elapsed += elapsed;
                phase.count += 1;
            }
            None => self.0.push(PhaseTime { name, elapsed, count: 1 }),
        }
        now
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    fn of(&self, profiles: bool) -> Vec<PhaseTime> {
        if profiles { self.0.clone() } else { Vec::new() }
    }
}
