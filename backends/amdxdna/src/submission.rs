//! A runlist in flight: waiting, reading final states, giving buffers back.

use crate::context::{ContextCore, ContextOwner};
use crate::driver::{ContextHandle, SyncobjHandle};
use crate::errno::Errno;
use crate::error::{MAX_RETRIES, Operation, driver_error};
use crate::packet::{CHAIN_ERROR_INDEX_AT, CommandState, is_final};
use crate::run::health;
use crate::runlist::{Command, Plan};
use async_trait::async_trait;
use npuhal_core::device::{Completion, Deadline, DeviceTime, RunIndex, Submission};
use npuhal_core::{DeviceError, RunError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a dropped submission is waited for: the longest watch-dog of a driver is 60 s.
const DROP_PATIENCE: Duration = Duration::from_secs(65);
/// Added to the driver's watch-dog: how long the header of the first command of a context may lag behind its fence. Point 0
/// of a timeline has a meaning of its own, so that its fence may be reported long before the command ends: there the header
/// alone says how it ended, and the watch-dog is what ends a command that hangs.
const FIRST_COMMAND_GRACE: Duration = Duration::from_millis(2500);

/// What a submission keeps alive.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) owner: Arc<ContextOwner>,
    pub(crate) context: ContextHandle,
    pub(crate) syncobj: SyncobjHandle,
    pub(crate) plan: Arc<Plan>,
    /// By the driver's clock.
    pub(crate) started: Duration,
}

/// A runlist in flight.
#[derive(Debug)]
pub struct NpuSubmission {
    in_flight: InFlight,
    /// Sequence numbers of the commands that were handed over.
    sequences: Vec<u64>,
    flag: Arc<AtomicBool>,
    is_done: bool,
}

/// How waiting for the last command ended.
enum Waited {
    Final,
    /// The fence has signalled and the header has no final state: the command was refused when it was to run.
    Refused,
    DeadlinePassed,
    Failed(DeviceError),
}

impl NpuSubmission {
    /// Takes the buffers; nothing has been handed over yet.
    pub(crate) fn hold(in_flight: InFlight, flag: &Arc<AtomicBool>) -> Self {
        flag.store(true, Ordering::Release);
        for object in &in_flight.plan.objects {
            object.hold();
        }
        let sequences = Vec::with_capacity(in_flight.plan.commands.len());
        Self { in_flight, sequences, flag: Arc::clone(flag), is_done: false }
    }

    pub(crate) fn submitted(&mut self, sequence: u64) {
        self.sequences.push(sequence);
    }

    fn core(&self) -> &Arc<ContextCore> {
        self.in_flight.owner.core()
    }

    /// The commands that were handed over.
    fn commands(&self) -> &[Command] {
        &self.in_flight.plan.commands[..self.sequences.len()]
    }

    /// Waits for the last command, then looks at all of them. Any end but a good one loses the context.
    fn finish(&mut self, timeout: Option<Duration>) -> Result<Completion, RunError> {
        let driver = self.core().session().driver();
        let now = driver.now();
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        let waited = self.wait_for_last(deadline);
        let result = self.outcome(waited);
        if let Err(error) = &result {
            // Destroying the context ends whatever the device still does with the buffers.
            self.core().lose(&error.to_string());
        }
        self.give_back();
        result
    }

    fn wait_for_last(&self, deadline: Option<Duration>) -> Waited {
        let (Some(command), Some(sequence)) = (self.commands().last(), self.sequences.last()) else {
            return Waited::Final;
        };
        let driver = self.core().session().driver();
        let mut interrupted = 0;
        let grace = self.core().session().version().watchdog() + FIRST_COMMAND_GRACE;
        let mut grace_ends = None;
        loop {
            if is_final(header(command)) {
                return Waited::Final;
            }
            if let Some(reason) = self.core().lost() {
                return Waited::Failed(DeviceError::ContextLost { reason });
            }
            match driver.wait_timeline(self.in_flight.syncobj, *sequence, deadline) {
                Ok(()) if is_final(header(command)) => return Waited::Final,
                Ok(()) if *sequence == 0 => {
                    let now = driver.now();
                    let ends = *grace_ends.get_or_insert(now.saturating_add(grace));
                    if deadline.is_some_and(|deadline| now >= deadline) {
                        return Waited::DeadlinePassed;
                    }
                    if now >= ends {
                        return Waited::Refused;
                    }
                    driver.pause();
                }
                Ok(()) => return Waited::Refused,
                Err(Errno::ETIME) if is_final(header(command)) => return Waited::Final,
                Err(Errno::ETIME) => return Waited::DeadlinePassed,
                Err(errno) if errno.is_retry() && interrupted < MAX_RETRIES => interrupted += 1,
                Err(errno) => return Waited::Failed(driver_error(Operation::Wait, errno)),
            }
        }
    }

    /// Looks at the commands oldest first.
    fn outcome(&self, waited: Waited) -> Result<Completion, RunError> {
        let failed = self.commands().iter().find(|command| {
            let state = CommandState::of_header(header(command));
            is_final(header(command)) && state != Some(CommandState::Completed)
        });
        if let Some(command) = failed {
            return Err(self.failure(command));
        }
        let unfinished = self.commands().iter().find(|command| !is_final(header(command)));
        match (waited, unfinished) {
            (Waited::Failed(error), Some(_)) => Err(RunError::Device(error)),
            (_, None) => Ok(self.completion()),
            (Waited::DeadlinePassed, Some(command)) => Err(RunError::TimedOut {
                run: only_run(command),
                waited: self.elapsed(),
                detail: format!("{} did not end within the deadline", runs_of(command)),
            }),
            (Waited::Refused | Waited::Final, Some(command)) => Err(RunError::Failed {
                run: only_run(command),
                state: CommandState::New.to_string(),
                detail: format!(
                    "{} was refused by the driver when it was to run: the driver or firmware does not know opcode {}, or \
                     refuses its payload",
                    runs_of(command),
                    self.opcode_of(command)
                ),
            }),
        }
    }

    /// A command with a final state other than completed.
    fn failure(&self, command: &Command) -> RunError {
        let header = header(command);
        let index = if command.chain.is_some() {
            command
                .object
                .load_u32(CHAIN_ERROR_INDEX_AT)
                .ok()
                .filter(|index| (*index as usize) < command.run_objects.len())
        } else {
            Some(0)
        };
        let run = index.map(|index| RunIndex(command.runs.start + index));
        // The drivers differ in where the record of a chain goes: to the run that failed, or to the first.
        let places = index.into_iter().chain([0]).filter_map(|index| command.run_objects.get(index as usize));
        let record = places.map(|object| health(object)).find_map(|record| record);
        let detail = record.map_or_else(String::new, |record| record.to_string());
        match CommandState::of_header(header) {
            Some(CommandState::Timeout) => RunError::TimedOut { run, waited: self.elapsed(), detail },
            Some(state) => RunError::Failed { run, state: state.to_string(), detail },
            None => RunError::Failed { run, state: format!("{} (unknown)", header & 0xF), detail },
        }
    }

    fn completion(&self) -> Completion {
        let driver = self.core().session().driver();
        let times = self.sequences.iter().map(|sequence| driver.device_time(self.in_flight.context, *sequence));
        let device_time = times.reduce(|sum, time| match (sum, time) {
            (Some(sum), Some(time)) => Some(DeviceTime { elapsed: sum.elapsed + time.elapsed, claim: sum.claim }),
            _ => None,
        });
        let runs = self.commands().iter().map(|command| command.runs.end - command.runs.start).sum();
        Completion { runs, device_time: device_time.flatten() }
    }

    fn elapsed(&self) -> Duration {
        self.core().session().driver().now().saturating_sub(self.in_flight.started)
    }

    fn opcode_of(&self, command: &Command) -> String {
        let object = command.run_objects.first().unwrap_or(&command.object);
        let opcode = object.load_u32(0).map_or(0, |header| (header >> 23) & 0x1F);
        opcode.to_string()
    }

    fn give_back(&mut self) {
        if !std::mem::replace(&mut self.is_done, true) {
            for object in &self.in_flight.plan.objects {
                object.release();
            }
            self.flag.store(false, Ordering::Release);
        }
    }
}

#[async_trait]
impl Submission for NpuSubmission {
    fn wait(mut self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        self.finish(deadline.timeout())
    }
}

impl Drop for NpuSubmission {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let is_partial = self.sequences.len() < self.in_flight.plan.commands.len();
        if let Err(error) = self.finish(Some(DROP_PATIENCE)) {
            tracing::warn!(%error, "a submission that nobody waited for failed");
        } else if is_partial && !self.sequences.is_empty() {
            self.core().lose("a part of a runlist was refused after another part had run");
        }
    }
}

fn header(command: &Command) -> u32 {
    command.object.load_u32(0).unwrap_or(0)
}

fn only_run(command: &Command) -> Option<RunIndex> {
    (command.run_objects.len() == 1).then_some(RunIndex(command.runs.start))
}

fn runs_of(command: &Command) -> String {
    let (first, last) = (command.runs.start, command.runs.end.saturating_sub(1));
    if first == last { format!("run {first}") } else { format!("the chain of runs {first} to {last}") }
}
