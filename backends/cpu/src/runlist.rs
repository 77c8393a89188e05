//! Runlists and submissions of the CPU device.

use crate::context::ContextShared;
use crate::device::{ArmedFault, CpuBuffer};
use crate::kernel::CpuKernel;
use async_trait::async_trait;
use npuhal_core::RunError;
use npuhal_core::device::{Arg, Completion, Deadline, Kernel, RunIndex, Runlist, Submission};
use npuhal_core::error::DeviceError;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// A kernel with checked arguments.
#[derive(Clone)]
pub(crate) struct ResolvedRun {
    pub(crate) kernel: CpuKernel,
    pub(crate) args: Vec<Arg>,
}

/// A submitted list. Holds its buffers until it is finished.
pub(crate) struct Job {
    runs: Arc<Vec<ResolvedRun>>,
    fault: Option<ArmedFault>,
    current: AtomicU32,
    result: Mutex<Option<Result<Completion, RunError>>>,
    finished: Condvar,
}

impl Job {
    fn new(runs: Arc<Vec<ResolvedRun>>, fault: Option<ArmedFault>) -> Self {
        let job = Self { runs, fault, current: AtomicU32::new(0), result: Mutex::new(None), finished: Condvar::new() };
        job.buffers().for_each(CpuBuffer::hold);
        job
    }

    pub(crate) fn runs(&self) -> &[ResolvedRun] {
        &self.runs
    }

    pub(crate) fn fault(&self) -> Option<ArmedFault> {
        self.fault
    }

    /// Notes the run that is executed now.
    pub(crate) fn enter(&self, run: RunIndex) {
        self.current.store(run.0, Ordering::Relaxed);
    }

    /// Lets go of the buffers and hands over the result.
    pub(crate) fn finish(&self, result: Result<Completion, RunError>) {
        self.buffers().for_each(CpuBuffer::let_go);
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.finished.notify_all();
    }

    fn buffers(&self) -> impl Iterator<Item = &CpuBuffer> {
        self.runs.iter().flat_map(|run| &run.args).filter_map(|arg| match arg {
            Arg::Buffer(buffer) => buffer.object().as_any().downcast_ref(),
            _ => None,
        })
    }

    /// The result, or `None` when the deadline passes.
    fn wait(&self, deadline: Deadline) -> Option<Result<Completion, RunError>> {
        let until = deadline.timeout().and_then(|timeout| Instant::now().checked_add(timeout));
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = result.take() {
                return Some(result);
            }
            result = match until {
                None => self.finished.wait(result).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
                    self.finished.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// A list of runs of one context.
pub(crate) struct CpuRunlist {
    context: Arc<ContextShared>,
    queue: Sender<Arc<Job>>,
    runs: Arc<Vec<ResolvedRun>>,
    in_flight: Arc<AtomicBool>,
}

impl CpuRunlist {
    pub(crate) fn new(context: Arc<ContextShared>, queue: Sender<Arc<Job>>) -> Self {
        Self { context, queue, runs: Arc::default(), in_flight: Arc::default() }
    }

    fn check_idle(&self, operation: &'static str) -> Result<(), DeviceError> {
        if self.in_flight.load(Ordering::Acquire) {
            let reason = "the list is in flight; wait for its submission first".to_owned();
            return Err(DeviceError::Misuse { operation, reason });
        }
        Ok(())
    }

    fn own_kernel(&self, operation: &'static str, kernel: &dyn Kernel) -> Result<CpuKernel, DeviceError> {
        match kernel.as_any().downcast_ref::<CpuKernel>() {
            Some(own) if own.context() == self.context.id => Ok(own.clone()),
            _ => {
                let reason = format!("the kernel {} belongs to another context; load it into this one", kernel.name());
                Err(DeviceError::Misuse { operation, reason })
            }
        }
    }

    fn run(&self, operation: &'static str, run: RunIndex) -> Result<&ResolvedRun, DeviceError> {
        self.runs.get(run.0 as usize).ok_or_else(|| {
            let reason = format!("there is no run {}; the list has {}", run.0, self.runs.len());
            DeviceError::Misuse { operation, reason }
        })
    }

    fn replace(&mut self, run: RunIndex, new: ResolvedRun) -> Result<(), DeviceError> {
        new.kernel.check(&new.args)?;
        Arc::make_mut(&mut self.runs)[run.0 as usize] = new;
        Ok(())
    }
}

impl Runlist for CpuRunlist {
    fn push(&mut self, kernel: &dyn Kernel, args: &[Arg]) -> Result<RunIndex, DeviceError> {
        self.check_idle("push")?;
        let kernel = self.own_kernel("push", kernel)?;
        kernel.check(args)?;
        let index = RunIndex(self.runs.len() as u32);
        Arc::make_mut(&mut self.runs).push(ResolvedRun { kernel, args: args.to_vec() });
        Ok(index)
    }

    fn rebind(&mut self, run: RunIndex, kernel: &dyn Kernel) -> Result<(), DeviceError> {
        self.check_idle("rebind")?;
        let kernel = self.own_kernel("rebind", kernel)?;
        let old = self.run("rebind", run)?;
        if old.kernel.signature() != kernel.signature() {
            let (old, new) = (old.kernel.name(), kernel.name());
            let reason = format!("{new} has another signature than {old}; push a new run");
            return Err(DeviceError::Misuse { operation: "rebind", reason });
        }
        let args = old.args.clone();
        self.replace(run, ResolvedRun { kernel, args })
    }

    fn set_arg(&mut self, run: RunIndex, index: usize, arg: &Arg) -> Result<(), DeviceError> {
        self.check_idle("set_arg")?;
        let mut new = self.run("set_arg", run)?.clone();
        let count = new.args.len();
        let Some(slot) = new.args.get_mut(index) else {
            return Err(DeviceError::BadArgument {
                kernel: new.kernel.name().to_owned(),
                index,
                wanted: format!("an index below {count}"),
                found: index.to_string(),
            });
        };
        *slot = arg.clone();
        self.replace(run, new)
    }

    fn len(&self) -> usize {
        self.runs.len()
    }

    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError> {
        self.check_idle("submit")?;
        self.context.check()?;
        if self.runs.is_empty() {
            let reason = "the list is empty; push a run first".to_owned();
            return Err(DeviceError::Misuse { operation: "submit", reason });
        }
        let job = Arc::new(Job::new(Arc::clone(&self.runs), self.context.faults.take()));
        if self.queue.send(Arc::clone(&job)).is_err() {
            let reason = "its worker thread has ended".to_owned();
            job.finish(Err(RunError::Device(DeviceError::ContextLost { reason: reason.clone() })));
            self.context.lose(&reason);
            return Err(DeviceError::ContextLost { reason });
        }
        self.in_flight.store(true, Ordering::Release);
        let (context, in_flight) = (Arc::clone(&self.context), Arc::clone(&self.in_flight));
        Ok(Box::new(CpuSubmission { job, context, in_flight }))
    }
}

/// A submitted list. Dropping it leaves the rest to the worker, which owns all it needs.
struct CpuSubmission {
    job: Arc<Job>,
    context: Arc<ContextShared>,
    in_flight: Arc<AtomicBool>,
}

#[async_trait]
impl Submission for CpuSubmission {
    fn wait(self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        let start = Instant::now();
        if let Some(result) = self.job.wait(deadline) {
            return result;
        }
        let run = RunIndex(self.job.current.load(Ordering::Relaxed));
        self.context.lose(&format!("no completion within {} ms at run {}", start.elapsed().as_millis(), run.0));
        Err(RunError::TimedOut { run: Some(run), waited: start.elapsed(), detail: String::new() })
    }
}

impl Drop for CpuSubmission {
    fn drop(&mut self) {
        self.in_flight.store(false, Ordering::Release);
    }
}
