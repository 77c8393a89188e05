//! Errors of devices and of running work on them.

use crate::device::RunIndex;
use std::time::Duration;
use thiserror::Error;

/// A device, buffer, context or kernel could not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device or its driver has no such feature.
    #[error("{device} does not support {feature}{}", hint(remedy))]
    Unsupported {
        /// Device id.
        device: String,
        /// What was asked for.
        feature: String,
        /// What to do instead; may be empty.
        remedy: String,
    },
    /// The device cannot be used on this machine as it is.
    #[error("{device} cannot be used: {reason}{}", hint(remedy))]
    Unavailable {
        /// Device id or node.
        device: String,
        /// What was found.
        reason: String,
        /// The command or setting that mends it; may be empty.
        remedy: String,
    },
    /// Memory of the named kind is used up.
    #[error("{device}: no room for {wanted_bytes} bytes of {memory}{}{}", free(available_bytes), hint(remedy))]
    OutOfMemory {
        /// Device id.
        device: String,
        /// Kind of memory, e.g. `device heap`.
        memory: &'static str,
        /// Bytes that were asked for.
        wanted_bytes: u64,
        /// Bytes that are left, where known.
        available_bytes: Option<u64>,
        /// What to do; may be empty.
        remedy: String,
    },
    /// All hardware contexts of the device are taken.
    #[error("{device}: {open} of {limit} hardware contexts are in use; close a model or another NPU program first")]
    ContextLimit {
        /// Device id.
        device: String,
        /// Contexts known to be open.
        open: u32,
        /// Contexts the device has.
        limit: u32,
    },
    /// The context is gone; open a new one. Buffers keep their contents.
    #[error("the hardware context was lost ({reason}); a new one is needed")]
    ContextLost {
        /// What ended it.
        reason: String,
    },
    /// An access outside a buffer.
    #[error("access to bytes {at_bytes}..{} of a buffer of {size_bytes} bytes", at_bytes.saturating_add(*len_bytes))]
    OutOfRange {
        /// First byte.
        at_bytes: u64,
        /// Length of the access.
        len_bytes: u64,
        /// Size of the buffer.
        size_bytes: u64,
    },
    /// The buffer belongs to a submission that has not completed.
    #[error("the buffer is in use by a submission that has not completed; wait for it first")]
    Busy,
    /// A kernel argument of the wrong kind, size or number.
    #[error("kernel {kernel}, argument {index}: wanted {wanted}, found {found}")]
    BadArgument {
        /// Kernel name.
        kernel: String,
        /// Position of the argument.
        index: usize,
        /// What the kernel's signature says.
        wanted: String,
        /// What was passed.
        found: String,
    },
    /// A program that the device cannot load.
    #[error("program {program}: {reason}")]
    BadProgram {
        /// Name of the program or container.
        program: String,
        /// What is wrong with it: field, wanted, found.
        reason: String,
    },
    /// A request that makes no sense in the present state, e.g. an unknown run index.
    #[error("{operation}: {reason}")]
    Misuse {
        /// What was called.
        operation: &'static str,
        /// Why it cannot be done.
        reason: String,
    },
    /// The driver refused an operation.
    #[error("{operation} failed: {meaning} ({code}){}", hint(remedy))]
    Driver {
        /// Operation, in words.
        operation: String,
        /// Name of the error number, e.g. `ENOSPC`.
        code: String,
        /// What this number means for this operation.
        meaning: String,
        /// What to do; may be empty.
        remedy: String,
    },
}

/// Work that was started did not end well.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// No completion within the deadline, or the device's own watch-dog fired. The context is lost.
    #[error("timed out after {} ms{}{}", waited.as_millis(), at_run(run), detail_of(detail))]
    TimedOut {
        /// The run that did not end, where known.
        run: Option<RunIndex>,
        /// How long was waited.
        waited: Duration,
        /// Health record or other evidence; may be empty.
        detail: String,
    },
    /// A run ended in a final state other than completed.
    #[error("{}ended in state {state}{}", of_run(run), detail_of(detail))]
    Failed {
        /// The run that failed, where known.
        run: Option<RunIndex>,
        /// Name of the final state, e.g. `ERROR`.
        state: String,
        /// Evidence; may be empty.
        detail: String,
    },
    /// The caller's cancellation was seen.
    #[error("cancelled")]
    Cancelled,
    /// The caller's deadline passed between two steps; the device is well.
    #[error("the request's deadline passed")]
    DeadlinePassed,
    /// More positions, rows or sequences than the segment holds.
    #[error("{what}: {found} exceeds the limit of {limit}")]
    Capacity {
        /// What was counted, e.g. `position`.
        what: &'static str,
        /// What was asked for.
        found: u64,
        /// What there is.
        limit: u64,
    },
    /// Rows that do not fit the state of their sequence, or buffers of the wrong width.
    #[error("bad rows: {reason}")]
    BadRows {
        /// Wanted and found.
        reason: String,
    },
    /// A result that is not a finite number where it must be one.
    #[error("{what} is not finite; the weights or the device are damaged")]
    NotFinite {
        /// What was checked, e.g. `logits at position 3`.
        what: String,
    },
    /// The device failed outside a run.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl RunError {
    /// Whether the device's context must be thrown away after this error.
    #[must_use]
    pub fn loses_context(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Failed { .. } | Self::Device(DeviceError::ContextLost { .. }))
    }
}

fn hint(remedy: &str) -> String {
    if remedy.is_empty() { String::new() } else { format!("; {remedy}") }
}

fn free(available_bytes: &Option<u64>) -> String {
    available_bytes.map_or_else(String::new, |bytes| format!(" ({bytes} bytes are left)"))
}

fn at_run(run: &Option<RunIndex>) -> String {
    run.map_or_else(String::new, |run| format!(" at run {}", run.0))
}

fn of_run(run: &Option<RunIndex>) -> String {
    run.map_or_else(|| "the submission ".to_owned(), |run| format!("run {} ", run.0))
}

fn detail_of(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" ({detail})") }
}
