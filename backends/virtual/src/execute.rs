//! One command on the device, from its packet to what the driver writes back.

use crate::array::{DeviceMemory, ImageId, Surroundings, Trouble};
use crate::clock::DISPATCH;
use crate::device::{Context, File, Job, State, VirtualDevice};
use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use crate::fault::RunFault;
use crate::memory::{Access, Memory};
use crate::objects::{Bo, Objects, Place, heap_address};
use crate::packet::{self, Header, Launch, opcode, state};
use crate::spec::{Profile, VirtualSpec};
use npuhal_amdxdna::driver::{BoKind, HEAP_BASE, HEAP_MAX_BYTES};
use std::sync::Arc;
use std::time::Duration;

/// Where the index of the failing command stands in a chain.
const ERROR_INDEX_AT: u64 = 12;
const HEADER_BYTES: u64 = 4;
/// Larger than any chain: what faulty firmware reports.
const BAD_INDEX: u32 = 0xFFFF;
/// What the firmware says about a fatal time-out, as the recorded clients saw it.
const RECORD_TAIL: [u32; 5] = [0x2233_4455, 6, 7, 0x88, 9];

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    end: End,
    pub(crate) time: Duration,
    pub(crate) removes: bool,
    pub(crate) suspends: bool,
}

#[derive(Debug)]
enum End {
    /// Every run completed.
    Completed,
    /// Refused when it was to run: the fence signals, the header stays as it is.
    Rejected,
    /// A run ended in another state.
    Failed {
        state: u32,
        /// The failing entry.
        entry: u32,
        /// What the firmware reports as the failing entry.
        reported: u32,
        record: Option<[u32; 8]>,
    },
}

impl Outcome {
    fn new(end: End, time: Duration) -> Self {
        Self { end, time, removes: false, suspends: false }
    }

    /// A command that was ended from outside.
    pub(crate) fn aborted() -> Self {
        Self::new(End::Failed { state: state::ABORT, entry: 0, reported: 0, record: None }, Duration::ZERO)
    }

    pub(crate) fn is_good(&self) -> bool {
        matches!(self.end, End::Completed)
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self.end, End::Failed { state: state::TIMEOUT, .. })
    }

    /// What the driver does to the command's memory, header last.
    pub(crate) fn write_back(&self, spec: &VirtualSpec, job: &Job) {
        let Some(command) = job.command.memory() else { return };
        let new_state = match &self.end {
            End::Rejected => return,
            End::Completed => state::COMPLETED,
            End::Failed { state, entry, reported, record } => {
                let entries = job.entries.as_deref();
                write_bodies(spec.profile, *state, *entry, record.as_ref(), command, entries);
                if let Some(entries) = entries {
                    // The driver does not trust an index out of range.
                    let index = if (*reported as usize) < entries.len() { *reported } else { 0 };
                    store(command, ERROR_INDEX_AT, &index.to_le_bytes());
                }
                *state
            }
        };
        let header = Header(load_word(command, 0));
        store(command, 0, &header.with_state(new_state).to_le_bytes());
    }
}

/// What happens to the words behind the headers after a failure.
///
/// The recent mainline driver fills the body with ones, to the end of the buffer (for a chain, that of the *first*
/// entry), and puts a health record over them. The out-of-tree driver writes only the record, into the entry that
/// failed. The first mainline driver writes nothing.
fn write_bodies(
    profile: Profile,
    new_state: u32,
    entry: u32,
    record: Option<&[u32; 8]>,
    command: &Memory,
    entries: Option<&[Arc<Bo>]>,
) {
    let target = |index: usize| match entries {
        Some(entries) => entries.get(index).and_then(|entry| entry.memory()).map(|memory| &**memory),
        None => Some(command),
    };
    match profile {
        Profile::MainlineOld => {}
        Profile::MainlineNew => {
            let is_filled = matches!(new_state, state::ERROR | state::ABORT | state::TIMEOUT);
            let Some(body) = target(0).filter(|_| is_filled) else { return };
            store(body, HEADER_BYTES, &vec![0xFF; (body.len_bytes() - HEADER_BYTES) as usize]);
            if let Some(record) = record {
                store_words(body, record);
            }
        }
        Profile::OutOfTree => {
            let (Some(body), Some(record)) = (target(entry as usize), record) else { return };
            store_words(body, record);
            if entries.is_some() {
                let header = Header(load_word(body, 0));
                store(body, 0, &header.with_state(state::TIMEOUT).to_le_bytes());
            }
        }
    }
}

fn store_words(memory: &Memory, words: &[u32]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    store(memory, HEADER_BYTES, &bytes);
}

/// Command buffers are at least a page, and everything written fits that.
fn store(memory: &Memory, at_bytes: u64, bytes: &[u8]) {
    let _ = memory.kernel_write(at_bytes, bytes);
}

fn load_word(memory: &Memory, at_bytes: u64) -> u32 {
    let mut word = [0; 4];
    let _ = memory.kernel_read(at_bytes, &mut word);
    u32::from_le_bytes(word)
}

/// Header and body of a command buffer.
pub(crate) fn packet_words(bo: &Bo) -> Vec<u32> {
    let Some(memory) = bo.memory() else { return Vec::new() };
    let count = 1 + Header(load_word(memory, 0)).count();
    let mut bytes = vec![0; (4 * count).min(memory.len_bytes() as usize)];
    let _ = memory.kernel_read(0, &mut bytes);
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

impl State {
    /// Runs a command. All memory effects of the array take place here; the header is written when the command
    /// completes.
    pub(crate) fn execute(&mut self, device: &VirtualDevice, context: &mut Context, job: &Job) -> Outcome {
        let Job { command, args, .. } = job;
        let entries = job.entries.as_deref();
        let runs = entries.unwrap_or(std::slice::from_ref(command));
        let first_run = self.faults.runs();
        let faults: Vec<_> = runs.iter().map(|_| self.faults.run()).collect();
        let launches = match launches(device, runs, entries.is_some(), &faults) {
            Ok(launches) => launches,
            Err(reason) => {
                device.diagnose(DiagnosisKind::BadPacket, reason);
                return Outcome::new(End::Rejected, DISPATCH);
            }
        };
        let mut time = DISPATCH;
        for (entry, launch) in launches.iter().enumerate() {
            device.log.set_run(Some(first_run + entry as u64));
            let planned = faults[entry];
            if let Some(fault) = planned {
                device.diagnose(DiagnosisKind::Injected, format!("{fault:?}"));
            }
            let end = match planned {
                Some(fault) if !matches!(fault, RunFault::Late(_)) => injected(&device.spec, fault, entry as u32),
                _ => self.run(device, context, launch, args, entry as u32),
            };
            time += context.partition.take_traffic().time();
            if let Some(RunFault::Late(delay)) = planned {
                time += delay;
            }
            device.log.set_run(None);
            if matches!(end, End::Failed { state: state::TIMEOUT, .. }) {
                time += device.spec.profile.watchdog();
            }
            if !matches!(end, End::Completed) {
                let mut outcome = Outcome::new(end, time);
                outcome.removes = planned == Some(RunFault::Remove);
                outcome.suspends = planned == Some(RunFault::Suspend);
                return outcome;
            }
        }
        Outcome::new(End::Completed, time)
    }

    fn run(
        &mut self,
        device: &VirtualDevice,
        context: &mut Context,
        launch: &Launch,
        args: &[Arc<Bo>],
        entry: u32,
    ) -> End {
        if !device.spec.runs_array {
            return End::Completed;
        }
        let Some(file) = self.files.get(&context.file) else { return End::Completed };
        let memory = JobMemory { file, args, log: &device.log };
        let mut surroundings =
            Surroundings { memory: &memory, programs: &device.programs, log: &device.log, loads: &mut self.loads };
        let units = context.units.as_deref();
        let result = load_unit(launch, units, &memory).and_then(|image| {
            if let Some(reason) = &launch.map_error {
                return Err(Trouble::Fault(Diagnosis::new(DiagnosisKind::BadPacket, reason.clone())));
            }
            if let Some((unit, image)) = image.filter(|(unit, _)| !context.partition.has_unit(*unit)) {
                context.partition.load_image(ImageId::Unit(unit), image, None, &mut surroundings)?;
            }
            let code = memory.read_code(launch.code_address, launch.code_bytes).map_err(Trouble::Fault)?;
            let is_second_generation = device.spec.silicon.facts().is_preemptible;
            context.partition.run(&code, &launch.arguments, is_second_generation, &mut surroundings)
        });
        match result {
            Ok(()) => End::Completed,
            Err(Trouble::Fault(diagnosis)) => {
                device.log.push(diagnosis);
                End::Failed { state: state::ERROR, entry, reported: entry, record: None }
            }
            Err(Trouble::Hang(diagnosis)) => {
                let record = record(&device.spec, diagnosis.op.unwrap_or(0), false);
                device.log.push(diagnosis);
                End::Failed { state: state::TIMEOUT, entry, reported: entry, record }
            }
        }
    }
}

/// The packets of all runs, where the driver accepts them.
fn launches(
    device: &VirtualDevice,
    runs: &[Arc<Bo>],
    is_chain: bool,
    faults: &[Option<RunFault>],
) -> Result<Vec<Launch>, String> {
    let is_preemptible = device.spec.silicon.facts().is_preemptible;
    let launches = runs.iter().map(|bo| packet::launch(&packet_words(bo), is_preemptible, is_chain));
    let launches = launches.collect::<Result<Vec<_>, _>>()?;
    if let Some(entry) = faults.iter().position(|fault| *fault == Some(RunFault::Reject)) {
        return Err(format!("opcode of entry {entry} is refused by the plan"));
    }
    if is_chain {
        packet::check_chain(&launches, device.spec.profile == Profile::OutOfTree)?;
    }
    Ok(launches)
}

/// The configuration of the compute unit that a run names. Runs of full ELFs name none.
fn load_unit(
    launch: &Launch,
    units: Option<&[Arc<Bo>]>,
    memory: &JobMemory<'_>,
) -> Result<Option<(u32, Vec<u8>)>, Trouble> {
    let bad = |detail| Trouble::Fault(Diagnosis::new(DiagnosisKind::BadPacket, detail));
    match (launch.unit, units) {
        (None, None) if launch.opcode != opcode::START_CU => Ok(None),
        (Some(unit), Some(units)) => {
            let bo = units.get(unit as usize).ok_or_else(|| bad(format!("unit {unit} of {}", units.len())))?;
            let Place::Heap { offset_bytes } = bo.place else { return Ok(None) };
            let image = memory.read_code(heap_address(offset_bytes), bo.size_bytes).map_err(Trouble::Fault)?;
            Ok(Some((unit, image)))
        }
        (unit, _) => Err(bad(format!("unit {unit:?} of a context with {} units", units.map_or(0, <[_]>::len)))),
    }
}

fn injected(spec: &VirtualSpec, fault: RunFault, entry: u32) -> End {
    let failed = |state| End::Failed { state, entry, reported: entry, record: None };
    match fault {
        RunFault::Timeout | RunFault::CorruptHealth => End::Failed {
            state: state::TIMEOUT,
            entry,
            reported: entry,
            record: record(spec, 0x11, fault == RunFault::CorruptHealth),
        },
        RunFault::Error => failed(state::ERROR),
        RunFault::BadIndex => End::Failed { state: state::ERROR, entry, reported: BAD_INDEX, record: None },
        RunFault::NoResponse => failed(state::NORESPONSE),
        RunFault::Reject => End::Rejected,
        RunFault::Abort | RunFault::Remove | RunFault::Suspend | RunFault::Late(_) => failed(state::ABORT),
    }
}

fn record(spec: &VirtualSpec, op: u32, is_corrupt: bool) -> Option<[u32; 8]> {
    let [pc, error, exception, exception_pc, module] = RECORD_TAIL;
    let version = if is_corrupt { 0xDEAD_BEEF } else { 1 };
    spec.has_health_record().then_some([version, 0, op, pc, error, exception, exception_pc, module])
}

/// Memory that the device may touch on behalf of one command.
struct JobMemory<'a> {
    file: &'a File,
    args: &'a [Arc<Bo>],
    log: &'a DiagnosisLog,
}

/// A place in memory, ready for access: memory, offset, length.
type Part<'a> = (&'a Arc<Memory>, u64, u64);

/// The parts of an access: one, or two across the border of two heap chunks.
enum Parts<'a> {
    One(Part<'a>),
    Several(Vec<Part<'a>>),
}

impl<'a> Parts<'a> {
    fn as_slice(&self) -> &[Part<'a>] {
        match self {
            Self::One(part) => std::slice::from_ref(part),
            Self::Several(parts) => parts,
        }
    }
}

impl<'a> JobMemory<'a> {
    fn objects(&self) -> &'a Objects {
        &self.file.objects
    }

    /// Where the bytes are, and whether the device may touch them: device memory and command buffers may be left out of
    /// the argument list, as the reference client does.
    fn locate(&self, address: u64, len_bytes: u64) -> Result<Parts<'a>, Diagnosis> {
        let what = || format!("{len_bytes} bytes at {address:#x}");
        if (HEAP_BASE..HEAP_BASE + HEAP_MAX_BYTES).contains(&address) {
            return self.locate_in_heap(address - HEAP_BASE, len_bytes).ok_or_else(|| {
                Diagnosis::new(DiagnosisKind::BadAddress, format!("{} are in no buffer of the device heap", what()))
            });
        }
        let holder = |bo: &&Arc<Bo>| holds(bo, address);
        let listed = self.args.iter().find(holder);
        let command = || self.objects().iter().filter(|bo| bo.kind == BoKind::Cmd).find(holder);
        let Some((bo, memory)) = listed.or_else(command).and_then(|bo| Some((bo, bo.memory()?))) else {
            let kind = match self.objects().iter().find(holder) {
                Some(_) => DiagnosisKind::OutsideArguments,
                None => DiagnosisKind::BadAddress,
            };
            return Err(Diagnosis::new(kind, format!("{} are in no buffer that the command lists", what())));
        };
        let at = address - memory.address();
        let size_bytes = bo.size_bytes.next_multiple_of(4);
        if at.checked_add(len_bytes).is_none_or(|end| end > size_bytes) {
            let detail = format!("{} leave buffer {} of {} bytes at byte {at}", what(), bo.handle, bo.size_bytes);
            return Err(Diagnosis::new(DiagnosisKind::OutsideArguments, detail));
        }
        if !memory.is_mapped() {
            let detail = format!("{}: buffer {} is not mapped", what(), bo.handle);
            return Err(Diagnosis::new(DiagnosisKind::UnmappedBuffer, detail));
        }
        Ok(Parts::One((memory, at, len_bytes)))
    }

    fn locate_in_heap(&self, offset_bytes: u64, len_bytes: u64) -> Option<Parts<'a>> {
        let end = offset_bytes.checked_add(len_bytes)?;
        (end <= self.end_in_heap(offset_bytes)?).then_some(())?;
        let parts = self.objects().heap.parts(offset_bytes, len_bytes)?;
        parts.iter().all(|(memory, ..)| memory.is_mapped()).then_some(Parts::Several(parts))
    }

    /// End of the buffer in the device heap that holds `offset_bytes`.
    fn end_in_heap(&self, offset_bytes: u64) -> Option<u64> {
        self.objects().iter().chain(self.args).find_map(|bo| match bo.place {
            Place::Heap { offset_bytes: start } => {
                let end = start + bo.size_bytes.next_multiple_of(4);
                (start..end).contains(&offset_bytes).then_some(end)
            }
            Place::Pages { .. } => None,
        })
    }

    fn note(&self, access: Access, kind: DiagnosisKind, memory: &Memory) {
        if let Access::Dirty(at_bytes) = access {
            let detail = format!("line at {:#x}", memory.address() + at_bytes);
            self.log.push(Diagnosis::new(kind, detail));
        }
    }
}

/// Whether `address` lies in the object's pages.
fn holds(bo: &Bo, address: u64) -> bool {
    bo.kind != BoKind::DevHeap
        && bo
            .memory()
            .is_some_and(|memory| address.checked_sub(memory.address()).is_some_and(|at| at < memory.len_bytes()))
}

impl DeviceMemory for JobMemory<'_> {
    fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), Diagnosis> {
        let mut done = 0;
        for &(memory, at, len) in self.locate(address, dst.len() as u64)?.as_slice() {
            let part = &mut dst[done..done + len as usize];
            let access = memory.device_read(at, part).map_err(|error| outside(&error))?;
            self.note(access, DiagnosisKind::UnflushedRead, memory);
            done += len as usize;
        }
        Ok(())
    }

    fn write(&self, address: u64, src: &[u8]) -> Result<(), Diagnosis> {
        let mut done = 0;
        for &(memory, at, len) in self.locate(address, src.len() as u64)?.as_slice() {
            let access = memory.device_write(at, &src[done..done + len as usize]).map_err(|error| outside(&error))?;
            self.note(access, DiagnosisKind::UnflushedOverwrite, memory);
            done += len as usize;
        }
        Ok(())
    }

    fn read_code(&self, address: u64, len_bytes: u64) -> Result<Vec<u8>, Diagnosis> {
        let what = || format!("{len_bytes} bytes at {address:#x}");
        let offset = address.checked_sub(HEAP_BASE).filter(|offset| *offset < HEAP_MAX_BYTES);
        let parts = offset.and_then(|offset| self.locate_in_heap(offset, len_bytes)).ok_or_else(|| {
            Diagnosis::new(DiagnosisKind::BadControlCode, format!("{} are in no buffer of the device heap", what()))
        })?;
        let mut bytes = Vec::with_capacity(len_bytes as usize);
        for &(memory, at, len) in parts.as_slice() {
            let start = bytes.len();
            bytes.resize(start + len as usize, 0);
            let access = memory.device_read(at, &mut bytes[start..]).map_err(|error| outside(&error))?;
            self.note(access, DiagnosisKind::UnflushedRead, memory);
        }
        Ok(bytes)
    }

    fn code_bytes_at(&self, address: u64) -> u64 {
        let offset = address.checked_sub(HEAP_BASE);
        offset.and_then(|offset| Some(self.end_in_heap(offset)? - offset)).unwrap_or(0)
    }
}

fn outside(error: &dyn std::fmt::Display) -> Diagnosis {
    Diagnosis::new(DiagnosisKind::BadAddress, error.to_string())
}
