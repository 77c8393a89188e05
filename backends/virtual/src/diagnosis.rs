//! What went wrong, in words that hardware never says.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most diagnoses that are kept; later ones are only counted.
const MAX_KEPT: usize = 1024;

/// Kind of a diagnosis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DiagnosisKind {
    /// The device read a cache line with host writes that were not flushed. It saw what was there before.
    UnflushedRead,
    /// The device wrote a cache line with host writes that were not flushed: these will be written back over it.
    UnflushedOverwrite,
    /// The host invalidated a cache line with host writes that were not flushed: they went over the device's data.
    DirtyInvalidate,
    /// The device touched a buffer that is not mapped, so that its address means nothing.
    UnmappedBuffer,
    /// A transfer left the buffers that the command lists.
    OutsideArguments,
    /// An address that belongs to no buffer.
    BadAddress,
    /// A register that the array does not have.
    UnknownRegister,
    /// A register value with bits that mean nothing, or with a mode that the virtual array does not have.
    BadRegisterValue,
    /// A task was started with a descriptor that is not valid.
    InvalidDescriptor,
    /// A descriptor was rewritten while a task that uses it had not ended.
    DescriptorInUse,
    /// A task was pushed into a full queue.
    QueueOverflow,
    /// A wait that nothing satisfies.
    WaitNeverSatisfied,
    /// A run ended while a stream-to-memory task still wanted data.
    Starved,
    /// A run ended while data of a memory-to-stream task was not consumed.
    Undrained,
    /// A run ended with a stream-to-memory task that nothing waited for.
    Unawaited,
    /// A configuration names a core program that the table does not have, or gives it impossible dimensions.
    UnknownProgram,
    /// A configuration image that cannot be executed.
    BadConfiguration,
    /// The array was configured while transfers were in flight.
    ConfigurationInFlight,
    /// A configuration was skipped because one with its id is resident, but their contents differ.
    StaleConfiguration,
    /// A call with a context that does not exist any more.
    StaleContext,
    /// Control code that cannot be read, or lies outside device memory.
    BadControlCode,
    /// An operation that the virtual array does not have.
    Unsupported,
    /// An argument that the control code uses and the packet does not have.
    MissingArgument,
    /// A command packet that makes no sense.
    BadPacket,
    /// A driver call that the real driver would not forgive for long.
    Misuse,
    /// A fault of the plan took place.
    Injected,
}

/// One thing that went wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnosis {
    /// Kind.
    pub kind: DiagnosisKind,
    /// Number of the run, counted from 0 over the life of the device.
    pub run: Option<u64>,
    /// Index of the operation in the run's control code.
    pub op: Option<u32>,
    /// What was found.
    pub detail: String,
}

impl Diagnosis {
    /// A diagnosis outside of any run.
    pub(crate) fn new(kind: DiagnosisKind, detail: impl Into<String>) -> Self {
        Self { kind, run: None, op: None, detail: detail.into() }
    }

    /// The same, at operation `op`.
    pub(crate) fn at_op(mut self, op: u32) -> Self {
        self.op.get_or_insert(op);
        self
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(run) = self.run {
            write!(f, "run {run}, ")?;
        }
        if let Some(op) = self.op {
            write!(f, "operation {op}, ")?;
        }
        write!(f, "{:?}: {}", self.kind, self.detail)
    }
}

/// Everything that went wrong on a device, in order.
#[derive(Debug, Default)]
pub(crate) struct DiagnosisLog {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    list: Vec<Diagnosis>,
    /// The run that is being executed, for diagnoses that do not know it.
    run: Option<u64>,
}

impl DiagnosisLog {
    pub(crate) fn push(&self, mut diagnosis: Diagnosis) {
        let mut kept = self.lock();
        diagnosis.run = diagnosis.run.or(kept.run);
        if kept.list.len() < MAX_KEPT {
            kept.list.push(diagnosis);
        }
    }

    /// Diagnoses from here on belong to `run`.
    pub(crate) fn set_run(&self, run: Option<u64>) {
        self.lock().run = run;
    }

    pub(crate) fn to_vec(&self) -> Vec<Diagnosis> {
        self.lock().list.clone()
    }

    pub(crate) fn take(&self) -> Vec<Diagnosis> {
        std::mem::take(&mut self.lock().list)
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
