//! What a device really did, seen where a session meets it: the proof that a backend was used.
//!
//! A route says where it runs a model. A [`Witness`] stands between the route and the devices its host opens, passes
//! everything on unchanged and counts the runs that completed.

use npuhal_core::card::DeviceCard;
use npuhal_core::device::{
    Arg, BufferRef, BufferSpec, Completion, Context, ContextState, Deadline, Device, Kernel, Program, RunIndex,
    Runlist, Submission,
};
use npuhal_core::error::{DeviceError, RunError};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What was seen of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Testimony {
    /// Id of the device.
    pub device: String,
    /// Whether it is the in-process twin of the hardware.
    pub is_virtual: bool,
    /// Contexts that were opened.
    pub contexts: u64,
    /// Runlists that were handed over.
    pub submissions: u64,
    /// Runs that completed.
    pub completed_runs: u64,
}

/// Sees devices at work.
#[derive(Default)]
pub struct Witness {
    seen: Mutex<Vec<Arc<Seen>>>,
}

struct Seen {
    device: String,
    is_virtual: bool,
    contexts: AtomicU64,
    submissions: AtomicU64,
    completed_runs: AtomicU64,
}

impl Witness {
    /// One that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What was seen of each device, in the order they were opened.
    #[must_use]
    pub fn testimonies(&self) -> Vec<Testimony> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let testimony = |seen: &Arc<Seen>| Testimony {
            device: seen.device.clone(),
            is_virtual: seen.is_virtual,
            contexts: seen.contexts.load(Ordering::Relaxed),
            submissions: seen.submissions.load(Ordering::Relaxed),
            completed_runs: seen.completed_runs.load(Ordering::Relaxed),
        };
        seen.iter().map(testimony).collect()
    }

    /// Starts counting anew.
    pub fn reset(&self) {
        for seen in self.seen.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            for count in [&seen.contexts, &seen.submissions, &seen.completed_runs] {
                count.store(0, Ordering::Relaxed);
            }
        }
    }

    /// `device`, seen.
    #[must_use]
    pub fn watch(&self, device: Box<dyn Device>) -> Box<dyn Device> {
        let card = device.card();
        let seen = Arc::new(Seen {
            device: card.id.clone(),
            is_virtual: card.is_virtual,
            contexts: AtomicU64::new(0),
            submissions: AtomicU64::new(0),
            completed_runs: AtomicU64::new(0),
        });
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&seen));
        Box::new(WatchedDevice { device, seen })
    }
}

struct WatchedDevice {
    device: Box<dyn Device>,
    seen: Arc<Seen>,
}

impl Device for WatchedDevice {
    fn card(&self) -> &DeviceCard {
        self.device.card()
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        self.device.allocate(spec)
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        let context = self.device.open_context(boot)?;
        self.seen.contexts.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(WatchedContext { context, seen: Arc::clone(&self.seen) }))
    }
}

struct WatchedContext {
    context: Box<dyn Context>,
    seen: Arc<Seen>,
}

impl Context for WatchedContext {
    fn load(&mut self, program: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError> {
        self.context.load(program)
    }

    fn runlist(&mut self) -> Box<dyn Runlist> {
        Box::new(WatchedRunlist { runlist: self.context.runlist(), seen: Arc::clone(&self.seen) })
    }

    fn state(&self) -> ContextState {
        self.context.state()
    }
}

struct WatchedRunlist {
    runlist: Box<dyn Runlist>,
    seen: Arc<Seen>,
}

impl Runlist for WatchedRunlist {
    fn push(&mut self, kernel: &dyn Kernel, args: &[Arg]) -> Result<RunIndex, DeviceError> {
        self.runlist.push(kernel, args)
    }

    fn rebind(&mut self, run: RunIndex, kernel: &dyn Kernel) -> Result<(), DeviceError> {
        self.runlist.rebind(run, kernel)
    }

    fn set_arg(&mut self, run: RunIndex, index: usize, arg: &Arg) -> Result<(), DeviceError> {
        self.runlist.set_arg(run, index, arg)
    }

    fn len(&self) -> usize {
        self.runlist.len()
    }

    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError> {
        let submission = self.runlist.submit()?;
        self.seen.submissions.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(WatchedSubmission { submission, seen: Arc::clone(&self.seen) }))
    }
}

struct WatchedSubmission {
    submission: Box<dyn Submission>,
    seen: Arc<Seen>,
}

#[async_trait::async_trait]
impl Submission for WatchedSubmission {
    fn wait(self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        let Self { submission, seen } = *self;
        let completion = submission.wait(deadline)?;
        seen.completed_runs.fetch_add(u64::from(completion.runs), Ordering::Relaxed);
        Ok(completion)
    }

    async fn completed(self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        let Self { submission, seen } = *self;
        let completion = submission.completed(deadline).await?;
        seen.completed_runs.fetch_add(u64::from(completion.runs), Ordering::Relaxed);
        Ok(completion)
    }
}
