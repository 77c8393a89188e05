//! A context of the CPU device: a worker thread that takes runlists in the order of their submission.

use crate::device::{ArmedFault, Fault, Faults, check_builtin};
use crate::kernel::CpuKernel;
use crate::runlist::{CpuRunlist, Job};
use npuhal_core::RunError;
use npuhal_core::card::Claim;
use npuhal_core::device::{Completion, Context, ContextState, DeviceTime, Kernel, Program, RunIndex, Runlist};
use npuhal_core::error::DeviceError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A run that takes longer loses its context, whatever deadline the host gave.
const WATCHDOG: Duration = Duration::from_secs(60);

/// What a context shares with its runlists, submissions and worker.
pub(crate) struct ContextShared {
    pub(crate) id: u64,
    pub(crate) faults: Arc<Faults>,
    state: Mutex<ContextState>,
}

impl ContextShared {
    pub(crate) fn state(&self) -> ContextState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The first reason stays.
    pub(crate) fn lose(&self, reason: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state == ContextState::Ready {
            *state = ContextState::Lost(reason.to_owned());
        }
    }

    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        match self.state() {
            ContextState::Ready => Ok(()),
            ContextState::Lost(reason) => Err(DeviceError::ContextLost { reason }),
        }
    }

    fn is_lost(&self) -> bool {
        self.state() != ContextState::Ready
    }
}

/// A context of the CPU device.
pub(crate) struct CpuContext {
    shared: Arc<ContextShared>,
    queue: Sender<Arc<Job>>,
}

impl CpuContext {
    pub(crate) fn open(faults: Arc<Faults>) -> Result<Self, DeviceError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(ContextShared { id, faults, state: Mutex::new(ContextState::Ready) });
        let (queue, jobs) = channel();
        let worker_shared = Arc::clone(&shared);
        let worker = std::thread::Builder::new().name("npuhal-cpu-ctx".to_owned());
        worker.spawn(move || work(&worker_shared, &jobs)).map_err(|error| DeviceError::Driver {
            operation: "starting a context's worker thread".to_owned(),
            code: error.raw_os_error().map_or_else(|| format!("{:?}", error.kind()), |code| code.to_string()),
            meaning: error.to_string(),
            remedy: "close other contexts or raise the limit of threads (ulimit -u)".to_owned(),
        })?;
        Ok(Self { shared, queue })
    }
}

impl Context for CpuContext {
    fn load(&mut self, program: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError> {
        self.shared.check()?;
        let name = check_builtin(program)?;
        let kernel = CpuKernel::load(name, self.shared.id).ok_or_else(|| DeviceError::BadProgram {
            program: name.to_owned(),
            reason: "the builtin kernel cannot be loaded".to_owned(),
        })?;
        Ok(Box::new(kernel))
    }

    fn runlist(&mut self) -> Box<dyn Runlist> {
        Box::new(CpuRunlist::new(Arc::clone(&self.shared), self.queue.clone()))
    }

    fn state(&self) -> ContextState {
        self.shared.state()
    }
}

/// Runs until the context and all its runlists are gone.
fn work(shared: &ContextShared, jobs: &Receiver<Arc<Job>>) {
    while let Ok(job) = jobs.recv() {
        let result = run(shared, &job);
        if let Err(error) = &result
            && error.loses_context()
        {
            shared.lose(&error.to_string());
        }
        job.finish(result);
    }
}

fn run(shared: &ContextShared, job: &Job) -> Result<Completion, RunError> {
    let start = Instant::now();
    for (index, run) in job.runs().iter().enumerate() {
        shared.check()?;
        let index = RunIndex(index as u32);
        job.enter(index);
        match job.fault() {
            Some(ArmedFault { fault: Fault::Fail { run }, .. }) if run == index.0 => {
                let (state, detail) = ("ERROR".to_owned(), "an injected fault".to_owned());
                return Err(RunError::Failed { run: Some(index), state, detail });
            }
            Some(ArmedFault { fault: Fault::Stall { run }, releases }) if run == index.0 => {
                let begin = Instant::now();
                shared.faults.stall(releases, || shared.is_lost() || begin.elapsed() >= WATCHDOG);
                if begin.elapsed() >= WATCHDOG {
                    let detail = "the watch-dog ended it".to_owned();
                    return Err(RunError::TimedOut { run: Some(index), waited: begin.elapsed(), detail });
                }
                shared.check()?;
            }
            _ => {}
        }
        run.kernel.run(&run.args)?;
    }
    let device_time = DeviceTime { elapsed: start.elapsed(), claim: Claim::Measured };
    Ok(Completion { runs: job.runs().len() as u32, device_time: Some(device_time) })
}
