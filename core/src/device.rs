//! Level 1: devices, buffers, contexts, kernels, runlists.
//!
//! Ownership: a [`Device`] is shared; a [`Context`] has one owner thread; a [`BufferRef`] keeps its object alive and
//! outlives contexts. A [`Runlist`] is built once and submitted again and again: [`Runlist::rebind`] exchanges the kernel of
//! one run and keeps its arguments, so that only what differs is written to the device.

use crate::card::{Claim, DeviceCard};
use crate::error::{DeviceError, RunError};
use crate::oneshot;
use async_trait::async_trait;
use dyn_clone::DynClone;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How a buffer will be used; decides its backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferUse {
    /// Tensors: weights, activations, KV cache; host memory that the device reads and writes.
    Tensor,
    /// Code or configuration in device memory.
    DeviceLocal,
}

/// What to allocate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferSpec {
    /// Size in bytes; 0 is refused.
    pub len_bytes: u64,
    /// Use.
    pub usage: BufferUse,
    /// Name for error messages and `inspect` output, e.g. `layer 3 KV cache`.
    pub label: String,
}

impl BufferSpec {
    /// A tensor buffer of `len_bytes`.
    #[must_use]
    pub fn tensor(len_bytes: u64, label: impl Into<String>) -> Self {
        Self { len_bytes, usage: BufferUse::Tensor, label: label.into() }
    }
}

/// A device-visible memory object. Methods take bytes relative to the object's start.
pub trait BufferObject: Send + Sync {
    /// Size in bytes.
    fn len_bytes(&self) -> u64;

    /// Copies `src` to the object and makes it visible to the device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`]; [`DeviceError::Busy`] while a submission holds the object.
    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), DeviceError>;

    /// Makes the device's writes visible and copies to `dst`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`]; [`DeviceError::Busy`] while a submission holds the object.
    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), DeviceError>;

    /// Lets `fill` write `range` in place (for packing large weights without a copy), then makes it visible.
    ///
    /// # Errors
    /// As [`BufferObject::write`].
    fn fill_with(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError>;

    /// For the backend that made the object.
    fn as_any(&self) -> &dyn Any;
}

/// A slice of device-visible memory; cheap to clone, keeps its object alive, outlives contexts.
#[derive(Clone)]
pub struct BufferRef {
    object: Arc<dyn BufferObject>,
    offset_bytes: u64,
    len_bytes: u64,
}

impl BufferRef {
    /// The whole of `object`.
    #[must_use]
    pub fn whole(object: Arc<dyn BufferObject>) -> Self {
        let len_bytes = object.len_bytes();
        Self { object, offset_bytes: 0, len_bytes }
    }

    /// A part of this slice.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] where the part does not lie inside this slice.
    pub fn slice(&self, range: Range<u64>) -> Result<Self, DeviceError> {
        self.check(range.start, range.end.saturating_sub(range.start))?;
        if range.end < range.start {
            return Err(DeviceError::OutOfRange { at_bytes: range.start, len_bytes: 0, size_bytes: self.len_bytes });
        }
        Ok(Self {
            object: Arc::clone(&self.object),
            offset_bytes: self.offset_bytes + range.start,
            len_bytes: range.end - range.start,
        })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Start inside the object, in bytes.
    #[must_use]
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// The object behind the slice.
    #[must_use]
    pub fn object(&self) -> &Arc<dyn BufferObject> {
        &self.object
    }

    /// See [`BufferObject::write`]; `at_bytes` counts from the start of the slice.
    ///
    /// # Errors
    /// As [`BufferObject::write`].
    pub fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), DeviceError> {
        self.check(at_bytes, src.len() as u64)?;
        self.object.write(self.offset_bytes + at_bytes, src)
    }

    /// See [`BufferObject::read`]; `at_bytes` counts from the start of the slice.
    ///
    /// # Errors
    /// As [`BufferObject::read`].
    pub fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        self.check(at_bytes, dst.len() as u64)?;
        self.object.read(self.offset_bytes + at_bytes, dst)
    }

    /// See [`BufferObject::fill_with`]; fills the whole slice.
    ///
    /// # Errors
    /// As [`BufferObject::write`].
    pub fn fill(&self, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.object.fill_with(self.offset_bytes..self.offset_bytes + self.len_bytes, fill)
    }

    fn check(&self, at_bytes: u64, len_bytes: u64) -> Result<(), DeviceError> {
        match at_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Ok(()),
            _ => Err(DeviceError::OutOfRange { at_bytes, len_bytes, size_bytes: self.len_bytes }),
        }
    }
}

impl fmt::Debug for BufferRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferRef")
            .field("object_bytes", &self.object.len_bytes())
            .field("offset_bytes", &self.offset_bytes)
            .field("len_bytes", &self.len_bytes)
            .finish()
    }
}

/// A device that can hold buffers and open contexts.
pub trait Device: Send + Sync {
    /// What it is.
    fn card(&self) -> &DeviceCard;

    /// Allocates a buffer; contents are undefined until written.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Misuse`] for a size of 0, [`DeviceError::Driver`].
    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError>;

    /// Opens a hardware context configured by `boot`.
    ///
    /// # Errors
    /// [`DeviceError::BadProgram`], [`DeviceError::ContextLimit`], [`DeviceError::Unsupported`], [`DeviceError::Driver`].
    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError>;
}

/// Unit of the instruction-length argument of a kernel that takes its instruction stream as an argument. Public hosts
/// disagree (32-bit words or bytes), so a kit states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LengthUnit {
    /// 32-bit words.
    Words,
    /// Bytes.
    Bytes,
}

/// What a context boots from, or loads later.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Program<'a> {
    /// An xclbin container: partition, compute units, their configuration.
    Xclbin {
        /// The whole file.
        image: &'a [u8],
    },
    /// A compute unit of the context's xclbin, driven by an instruction stream (TXN).
    Instructions {
        /// Kernel or instance name inside the xclbin.
        unit: &'a str,
        /// The instruction stream, a whole number of 32-bit words.
        stream: &'a [u8],
        /// How the kernel counts the stream's length.
        length_unit: LengthUnit,
    },
    /// A compute unit of the context's xclbin, driven by the control code of a partial ELF.
    PartialElf {
        /// Kernel or instance name inside the xclbin.
        unit: &'a str,
        /// The whole file.
        image: &'a [u8],
    },
    /// A full ELF: partition width, configuration and control code in one image.
    FullElf {
        /// The whole file.
        image: &'a [u8],
        /// `kernel` or `kernel:instance`.
        kernel: &'a str,
    },
    /// A kernel that the backend carries itself, by name. A CPU context boots from any builtin name.
    Builtin {
        /// Name, e.g. `copy`.
        name: &'a str,
    },
}

/// Whether a context can still be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContextState {
    /// Usable.
    Ready,
    /// Gone for ever; the reason is for people.
    Lost(String),
}

/// A hardware context. One owner thread. Once lost it stays lost; weights and KV live on in buffers.
pub trait Context: Send {
    /// Loads a further kernel or configuration.
    ///
    /// # Errors
    /// [`DeviceError::BadProgram`], [`DeviceError::OutOfMemory`], [`DeviceError::ContextLost`], [`DeviceError::Driver`].
    fn load(&mut self, program: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError>;

    /// An empty runlist of this context.
    fn runlist(&mut self) -> Box<dyn Runlist>;

    /// Whether the context is still usable.
    fn state(&self) -> ContextState;
}

/// Direction in which a kernel moves a buffer argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The kernel reads it.
    In,
    /// The kernel writes it.
    Out,
    /// Both, or not stated.
    InOut,
}

/// What an argument is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArgKind {
    /// A buffer of at least `min_bytes` (0 where the kernel does not state it).
    Buffer {
        /// Direction of the transfer.
        direction: Direction,
        /// Smallest legal size.
        min_bytes: u64,
    },
    /// A 32-bit scalar.
    U32,
    /// A 64-bit scalar.
    U64,
}

/// One argument of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ArgSpec {
    /// Name in the container, or its position as a number.
    pub name: String,
    /// Kind.
    pub kind: ArgKind,
}

/// A value for an argument.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Arg {
    /// A buffer.
    Buffer(BufferRef),
    /// A 32-bit scalar.
    U32(u32),
    /// A 64-bit scalar.
    U64(u64),
}

/// A loaded kernel; cheap to clone, belongs to its context.
pub trait Kernel: DynClone + Send + Sync {
    /// Name, for messages.
    fn name(&self) -> &str;

    /// The arguments, in order. Instruction buffers are not among them: they belong to the kernel.
    fn signature(&self) -> &[ArgSpec];

    /// For the backend that made the kernel.
    fn as_any(&self) -> &dyn Any;
}

dyn_clone::clone_trait_object!(Kernel);

/// Position of a run in its runlist, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunIndex(pub u32);

/// An ordered list of kernel runs, submitted as one. May be submitted again; two lists of one context may be in flight.
pub trait Runlist: Send {
    /// Appends a run. Arguments are resolved and checked here, not at submission.
    ///
    /// # Errors
    /// [`DeviceError::BadArgument`]; [`DeviceError::Misuse`] for a kernel of another context or while in flight.
    fn push(&mut self, kernel: &dyn Kernel, args: &[Arg]) -> Result<RunIndex, DeviceError>;

    /// Exchanges the kernel of `run` for one of the same signature and keeps the arguments: the next context length.
    ///
    /// # Errors
    /// As [`Runlist::push`].
    fn rebind(&mut self, run: RunIndex, kernel: &dyn Kernel) -> Result<(), DeviceError>;

    /// Exchanges one argument of `run`.
    ///
    /// # Errors
    /// As [`Runlist::push`].
    fn set_arg(&mut self, run: RunIndex, index: usize, arg: &Arg) -> Result<(), DeviceError>;

    /// Number of runs.
    fn len(&self) -> usize;

    /// Whether there is no run.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Hands the list to the device; returns at once. The list is in flight until its submission was waited for.
    ///
    /// # Errors
    /// [`DeviceError::ContextLost`], [`DeviceError::Misuse`] when empty or already in flight, [`DeviceError::Driver`].
    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError>;
}

/// How long a wait may last, counted from the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Option<Duration>);

impl Deadline {
    /// At most `timeout` from the call.
    #[must_use]
    pub const fn within(timeout: Duration) -> Self {
        Self(Some(timeout))
    }

    /// For ever; the device's own watch-dog still applies.
    #[must_use]
    pub const fn never() -> Self {
        Self(None)
    }

    /// The time allowed; `None` is for ever.
    #[must_use]
    pub const fn timeout(self) -> Option<Duration> {
        self.0
    }
}

/// Time a device spent on a submission, and how it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTime {
    /// The time.
    pub elapsed: Duration,
    /// [`Claim::Modelled`] on a virtual NPU, [`Claim::Measured`] on hardware.
    pub claim: Claim,
}

/// A submission that ended well: every run completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Runs that completed.
    pub runs: u32,
    /// Time on the device, where known.
    pub device_time: Option<DeviceTime>,
}

/// A runlist in flight. Dropping it waits for the device as long as memory safety needs it.
#[async_trait]
pub trait Submission: Send + 'static {
    /// Blocks until every run completed, one failed, or the deadline passed.
    ///
    /// # Errors
    /// [`RunError::TimedOut`] and [`RunError::Failed`] name the run; both lose the context.
    fn wait(self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError>;

    /// The same for async hosts. The default waits on a thread of its own; backends with a pollable completion replace it.
    ///
    /// # Errors
    /// As [`Submission::wait`].
    async fn completed(self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        let (sender, receiver) = oneshot::channel();
        let waiter =
            std::thread::Builder::new().name("npuhal-wait".to_owned()).spawn(move || sender.send(self.wait(deadline)));
        match waiter {
            Ok(_) => receiver.await.unwrap_or_else(|| {
                Err(RunError::Failed {
                    run: None,
                    state: "unknown".to_owned(),
                    detail: "the waiting thread ended without an answer".to_owned(),
                })
            }),
            Err(error) => Err(RunError::Device(DeviceError::Driver {
                operation: "starting a waiting thread".to_owned(),
                code: error.kind().to_string(),
                meaning: error.to_string(),
                remedy: "raise the limit of threads".to_owned(),
            })),
        }
    }
}
