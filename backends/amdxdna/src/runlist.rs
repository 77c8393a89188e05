//! Runlists: runs, packed into chains, submitted again and again.

use crate::context::{ContextCore, ContextOwner, NpuKernel};
use crate::driver::{BoHandle, BoKind, ContextHandle, ExecCommand};
use crate::errno::Errno;
use crate::error::{Operation, driver_error, retry};
use crate::memory_object::MemoryObject;
use crate::packet::{CHAIN_MAX_RUNS, COMMAND_BYTES, Opcode, Packet, START_CU_MAX_WORDS};
use crate::run::{Run, handles, write_packet};
use crate::submission::{InFlight, NpuSubmission};
use npuhal_core::DeviceError;
use npuhal_core::device::{Arg, Kernel, RunIndex, Runlist, Submission};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// An ordered list of runs of one context.
#[derive(Debug)]
pub struct NpuRunlist {
    owner: Weak<ContextOwner>,
    core: Arc<ContextCore>,
    runs: Vec<Run>,
    /// How the runs are packed; `None` after a change.
    plan: Option<Arc<Plan>>,
    /// Command buffers for chains, kept over changes.
    chain_commands: Vec<Arc<MemoryObject>>,
    in_flight: Arc<AtomicBool>,
}

/// The commands of a runlist, ready to be submitted.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) commands: Vec<Command>,
    /// Every object that the device may touch, once each: held while in flight.
    pub(crate) objects: Vec<Arc<MemoryObject>>,
}

/// One command: a single run, or a chain of runs of one opcode.
#[derive(Debug)]
pub(crate) struct Command {
    /// Positions of its runs in the list.
    pub(crate) runs: Range<u32>,
    pub(crate) object: Arc<MemoryObject>,
    /// Set for a chain; a single run's packet belongs to the run.
    pub(crate) chain: Option<Packet>,
    /// Command buffers of the runs, in order.
    pub(crate) run_objects: Vec<Arc<MemoryObject>>,
    args: Vec<BoHandle>,
}

impl NpuRunlist {
    pub(crate) fn new(owner: &Arc<ContextOwner>) -> Self {
        Self {
            owner: Arc::downgrade(owner),
            core: Arc::clone(owner.core()),
            runs: Vec::new(),
            plan: None,
            chain_commands: Vec::new(),
            in_flight: Arc::default(),
        }
    }

    fn idle(&self, operation: &'static str) -> Result<(), DeviceError> {
        if self.in_flight.load(Ordering::Acquire) {
            let reason = "the list is in flight; wait for its submission first".to_owned();
            return Err(DeviceError::Misuse { operation, reason });
        }
        Ok(())
    }

    fn own<'a>(&self, operation: &'static str, kernel: &'a dyn Kernel) -> Result<&'a NpuKernel, DeviceError> {
        let kernel = kernel.as_any().downcast_ref::<NpuKernel>();
        kernel.filter(|kernel| kernel.belongs_to(&self.core)).ok_or_else(|| DeviceError::Misuse {
            operation,
            reason: "the kernel was loaded into another context".to_owned(),
        })
    }

    fn run_mut(&mut self, operation: &'static str, run: RunIndex) -> Result<&mut Run, DeviceError> {
        let len = self.runs.len();
        self.runs
            .get_mut(run.0 as usize)
            .ok_or_else(|| DeviceError::Misuse { operation, reason: format!("run {} of a list of {len}", run.0) })
    }

    fn ready_plan(&mut self) -> Result<Arc<Plan>, DeviceError> {
        if let Some(plan) = &self.plan {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(self.pack()?);
        self.plan = Some(Arc::clone(&plan));
        Ok(plan)
    }

    /// Splits the runs into commands: as many as a chain holds, all of one opcode.
    fn pack(&mut self) -> Result<Plan, DeviceError> {
        let mut commands = Vec::new();
        let opcodes: Vec<_> = self.runs.iter().map(Run::opcode).collect();
        for (number, range) in split(&opcodes).into_iter().enumerate() {
            let is_single = self.runs.len() == 1 && fits_alone(self.runs[0].packet());
            let object = if is_single { None } else { Some(self.chain_command(number)?) };
            let runs = &self.runs[range.clone()];
            let run_objects: Vec<_> = runs.iter().map(|run| Arc::clone(run.command())).collect();
            let chain = if is_single { None } else { Some(chain_packet(&run_objects)?) };
            commands.push(Command {
                runs: range.start as u32..range.end as u32,
                object: object.unwrap_or_else(|| Arc::clone(&run_objects[0])),
                chain,
                run_objects,
                args: handles(runs.iter().flat_map(Run::objects)),
            });
        }
        let mut objects: Vec<_> = self.runs.iter().flat_map(Run::objects).map(Arc::clone).collect();
        objects.sort_by_key(|object| object.handle());
        objects.dedup_by_key(|object| object.handle());
        Ok(Plan { commands, objects })
    }

    fn chain_command(&mut self, index: usize) -> Result<Arc<MemoryObject>, DeviceError> {
        if self.chain_commands.len() <= index {
            self.chain_commands.push(self.core.session().allocate(BoKind::Cmd, COMMAND_BYTES)?);
        }
        Ok(Arc::clone(&self.chain_commands[index]))
    }

    fn write_packets(&self, plan: &Plan) -> Result<(), DeviceError> {
        for run in &self.runs {
            run.write_packet()?;
        }
        for command in &plan.commands {
            if let Some(chain) = &command.chain {
                write_packet(&command.object, chain)?;
            }
        }
        Ok(())
    }

    fn exec(&self, context: ContextHandle, command: &Command) -> Result<u64, DeviceError> {
        let driver = self.core.session().driver();
        let exec = ExecCommand { context, command: command.object.handle(), args: &command.args };
        retry(|| driver.exec(&exec)).map_err(|errno| {
            let error = driver_error(Operation::Submit, errno);
            if matches!(errno, Errno::ENOENT | Errno::ENODEV) {
                self.core.lose(&error.to_string());
                return DeviceError::ContextLost { reason: error.to_string() };
            }
            error
        })
    }
}

impl Runlist for NpuRunlist {
    fn push(&mut self, kernel: &dyn Kernel, args: &[Arg]) -> Result<RunIndex, DeviceError> {
        self.idle("push")?;
        let kernel = self.own("push", kernel)?;
        let index = u32::try_from(self.runs.len())
            .map_err(|_| DeviceError::Misuse { operation: "push", reason: "too many runs in one list".to_owned() })?;
        self.runs.push(Run::new(&self.core, kernel, args)?);
        self.plan = None;
        Ok(RunIndex(index))
    }

    fn rebind(&mut self, run: RunIndex, kernel: &dyn Kernel) -> Result<(), DeviceError> {
        self.idle("rebind")?;
        let kernel = self.own("rebind", kernel)?;
        let core = Arc::clone(&self.core);
        let run = self.run_mut("rebind", run)?;
        // The same objects in another order count as others: that only costs a new plan.
        let objects = |run: &Run| run.objects().map(|object| object.handle()).collect::<Vec<_>>();
        let shape = |run: &Run| (run.opcode(), run.packet().words().len(), objects(run));
        let before = shape(run);
        run.rebind(&core, kernel)?;
        if before != shape(run) {
            self.plan = None;
        }
        Ok(())
    }

    fn set_arg(&mut self, run: RunIndex, index: usize, arg: &Arg) -> Result<(), DeviceError> {
        self.idle("set_arg")?;
        let core = Arc::clone(&self.core);
        self.run_mut("set_arg", run)?.set_arg(&core, index, arg)?;
        self.plan = None;
        Ok(())
    }

    fn len(&self) -> usize {
        self.runs.len()
    }

    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError> {
        let Some(owner) = self.owner.upgrade() else {
            let reason = self.core.lost().unwrap_or_else(|| "it was closed".to_owned());
            return Err(DeviceError::ContextLost { reason });
        };
        let (context, syncobj) = self.core.handles()?;
        self.idle("submit")?;
        if self.runs.is_empty() {
            return Err(DeviceError::Misuse { operation: "submit", reason: "the list is empty".to_owned() });
        }
        let plan = self.ready_plan()?;
        self.write_packets(&plan)?;
        let started = self.core.session().driver().now();
        // From here on dropping `submission` waits for what was handed over and releases the buffers.
        let in_flight = InFlight { owner, context, syncobj, plan: Arc::clone(&plan), started };
        let mut submission = NpuSubmission::hold(in_flight, &self.in_flight);
        for command in &plan.commands {
            submission.submitted(self.exec(context, command)?);
        }
        Ok(Box::new(submission))
    }
}

/// Ranges of consecutive runs of one opcode, at most [`CHAIN_MAX_RUNS`] long.
fn split(opcodes: &[Opcode]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (i, opcode) in opcodes.iter().enumerate() {
        match ranges.last_mut() {
            Some(last) if last.len() < CHAIN_MAX_RUNS && opcodes[last.start] == *opcode => last.end = i + 1,
            _ => ranges.push(i..i + 1),
        }
    }
    ranges
}

/// A compute unit's register map outside a chain goes through a slot of a fixed size.
fn fits_alone(packet: &Packet) -> bool {
    packet.opcode() != Opcode::StartCu || packet.words().len() <= 2 + START_CU_MAX_WORDS
}

fn chain_packet(commands: &[Arc<MemoryObject>]) -> Result<Packet, DeviceError> {
    let handles: Vec<_> = commands.iter().map(|command| command.handle()).collect();
    Packet::chain(&handles).map_err(|error| DeviceError::Misuse { operation: "submit", reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::split;
    use crate::packet::Opcode;

    #[test]
    fn chains_are_full_and_of_one_opcode() {
        assert_eq!(split(&[Opcode::StartCu; 29]), [0..24, 24..29]);
        assert_eq!(split(&[Opcode::StartCu; 48]), [0..24, 24..48]);
        let mixed =
            [Opcode::StartNpuPreemptElf, Opcode::StartNpuPreemptElf, Opcode::StartNpu, Opcode::StartNpuPreemptElf];
        assert_eq!(split(&mixed), [0..2, 2..3, 3..4]);
        assert!(split(&[]).is_empty());
    }
}
