//! Devices that do no work: [`NullDevice`] accepts everything, [`RecordingDevice`] keeps the rules of level 1, remembers every
//! call and can be told to lose a context.

use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::{
    Arg, ArgKind, ArgSpec, BufferObject, BufferRef, BufferSpec, Completion, Context, ContextState, Deadline, Device,
    Kernel, Program, RunIndex, Runlist, Submission,
};
use npuhal_core::error::{DeviceError, RunError};
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Accepts everything, does nothing; buffers read as zeros.
pub struct NullDevice {
    card: DeviceCard,
}

impl Default for NullDevice {
    fn default() -> Self {
        Self { card: card("null") }
    }
}

impl Device for NullDevice {
    fn card(&self) -> &DeviceCard {
        &self.card
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        Ok(BufferRef::whole(Arc::new(NullBuffer(spec.len_bytes))))
    }

    fn open_context(&self, _: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        Ok(Box::new(NullContext))
    }
}

struct NullBuffer(u64);

impl BufferObject for NullBuffer {
    fn len_bytes(&self) -> u64 {
        self.0
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn read(&self, _: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        dst.fill(0);
        Ok(())
    }

    fn fill_with(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        fill(&mut vec![0; (range.end - range.start) as usize]);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct NullContext;

impl Context for NullContext {
    fn load(&mut self, _: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError> {
        Ok(Box::new(NullKernel))
    }

    fn runlist(&mut self) -> Box<dyn Runlist> {
        Box::new(NullRunlist(0))
    }

    fn state(&self) -> ContextState {
        ContextState::Ready
    }
}

#[derive(Clone)]
struct NullKernel;

impl Kernel for NullKernel {
    fn name(&self) -> &str {
        "null"
    }

    fn signature(&self) -> &[ArgSpec] {
        &[]
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct NullRunlist(u32);

impl Runlist for NullRunlist {
    fn push(&mut self, _: &dyn Kernel, _: &[Arg]) -> Result<RunIndex, DeviceError> {
        self.0 += 1;
        Ok(RunIndex(self.0 - 1))
    }

    fn rebind(&mut self, _: RunIndex, _: &dyn Kernel) -> Result<(), DeviceError> {
        Ok(())
    }

    fn set_arg(&mut self, _: RunIndex, _: usize, _: &Arg) -> Result<(), DeviceError> {
        Ok(())
    }

    fn len(&self) -> usize {
        self.0 as usize
    }

    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError> {
        Ok(Box::new(NullSubmission(self.0)))
    }
}

struct NullSubmission(u32);

impl Submission for NullSubmission {
    fn wait(self: Box<Self>, _: Deadline) -> Result<Completion, RunError> {
        Ok(Completion { runs: self.0, device_time: None })
    }
}

/// A call that reached a [`RecordingDevice`]. Contexts, lists and submissions are numbered in order of creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A buffer was allocated.
    Allocate(String),
    /// Bytes were written to the buffer of this label.
    Write(String, Range<u64>),
    /// Bytes were read from the buffer of this label.
    Read(String, Range<u64>),
    /// Bytes of the buffer of this label were filled in place.
    Fill(String, Range<u64>),
    /// A context was opened with this program.
    Open(u32, String),
    /// A kernel was loaded into a context.
    Load(u32, String),
    /// A run was appended to a list: kernel and labels of its buffers.
    Push(u32, String, Vec<String>),
    /// A run of a list got another kernel.
    Rebind(u32, RunIndex, String),
    /// An argument of a run of a list was exchanged.
    SetArg(u32, RunIndex, usize),
    /// A list was submitted: list, submission, kernels in order.
    Submit(u32, u32, Vec<String>),
    /// A submission was waited for.
    Wait(u32),
    /// A submission was dropped without waiting.
    Abandon(u32),
    /// A context was dropped.
    Close(u32),
}

/// Keeps the rules of level 1 and remembers every call. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct RecordingDevice(Arc<Shared>);

type Work = Arc<dyn Fn(&mut [Vec<u8>]) + Send + Sync>;

struct Shared {
    card: DeviceCard,
    kernels: Mutex<BTreeMap<String, Vec<ArgSpec>>>,
    work: Mutex<BTreeMap<String, Work>>,
    calls: Mutex<Vec<Call>>,
    fault: Mutex<Option<RunIndex>>,
    contexts: AtomicU32,
    lists: AtomicU32,
    submissions: AtomicU32,
}

impl RecordingDevice {
    /// A device of address `id` that knows no kernel.
    #[must_use]
    pub fn new(id: &str) -> Self {
        Self(Arc::new(Shared {
            card: card(id),
            kernels: Mutex::default(),
            work: Mutex::default(),
            calls: Mutex::default(),
            fault: Mutex::default(),
            contexts: AtomicU32::new(0),
            lists: AtomicU32::new(0),
            submissions: AtomicU32::new(0),
        }))
    }

    /// Makes a kernel known.
    pub fn define(&self, kernel: &str, signature: &[ArgKind]) {
        let name_of = |(index, kind): (usize, &ArgKind)| ArgSpec { name: index.to_string(), kind: *kind };
        lock(&self.0.kernels).insert(kernel.to_owned(), signature.iter().enumerate().map(name_of).collect());
    }

    /// What a run of a kernel does to its buffers, in the order of its arguments. Its accesses are not recorded.
    pub fn script(&self, kernel: &str, work: impl Fn(&mut [Vec<u8>]) + Send + Sync + 'static) {
        lock(&self.0.work).insert(kernel.to_owned(), Arc::new(work));
    }

    /// The next submission that is waited for times out at `run`, and its context is lost.
    pub fn lose_next_at(&self, run: RunIndex) {
        *lock(&self.0.fault) = Some(run);
    }

    /// All calls so far.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.0.calls).clone()
    }

    /// All calls since the last time.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut *lock(&self.0.calls))
    }
}

impl Shared {
    fn record(&self, call: Call) {
        lock(&self.calls).push(call);
    }
}

impl Device for RecordingDevice {
    fn card(&self) -> &DeviceCard {
        &self.0.card
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        if spec.len_bytes == 0 {
            return Err(misuse("allocate", "a buffer of 0 bytes"));
        }
        self.0.record(Call::Allocate(spec.label.clone()));
        Ok(BufferRef::whole(Arc::new(RecordedBuffer {
            device: Arc::clone(&self.0),
            label: spec.label.clone(),
            len_bytes: spec.len_bytes,
            bytes: Mutex::new(vec![0; spec.len_bytes as usize]),
            holds: AtomicU32::new(0),
        })))
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        let id = self.0.contexts.fetch_add(1, Ordering::Relaxed);
        self.0.record(Call::Open(id, program_name(boot)));
        let state = Arc::new(Mutex::new(ContextState::Ready));
        Ok(Box::new(RecordedContext { device: Arc::clone(&self.0), id, state }))
    }
}

struct RecordedBuffer {
    device: Arc<Shared>,
    label: String,
    len_bytes: u64,
    bytes: Mutex<Vec<u8>>,
    holds: AtomicU32,
}

impl RecordedBuffer {
    fn access(&self, range: &Range<u64>) -> Result<MutexGuard<'_, Vec<u8>>, DeviceError> {
        if range.start > range.end || range.end > self.len_bytes {
            let len_bytes = range.end.saturating_sub(range.start);
            return Err(DeviceError::OutOfRange { at_bytes: range.start, len_bytes, size_bytes: self.len_bytes });
        }
        if self.holds.load(Ordering::Relaxed) > 0 {
            return Err(DeviceError::Busy);
        }
        Ok(lock(&self.bytes))
    }
}

impl BufferObject for RecordedBuffer {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), DeviceError> {
        let range = at_bytes..at_bytes + src.len() as u64;
        self.access(&range)?[range.start as usize..range.end as usize].copy_from_slice(src);
        self.device.record(Call::Write(self.label.clone(), range));
        Ok(())
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        let range = at_bytes..at_bytes + dst.len() as u64;
        dst.copy_from_slice(&self.access(&range)?[range.start as usize..range.end as usize]);
        self.device.record(Call::Read(self.label.clone(), range));
        Ok(())
    }

    fn fill_with(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        fill(&mut self.access(&range)?[range.start as usize..range.end as usize]);
        self.device.record(Call::Fill(self.label.clone(), range));
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct RecordedContext {
    device: Arc<Shared>,
    id: u32,
    state: Arc<Mutex<ContextState>>,
}

impl Context for RecordedContext {
    fn load(&mut self, program: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError> {
        check_ready(&self.state)?;
        let name = program_name(program);
        let signature = lock(&self.device.kernels).get(&name).cloned();
        let signature = signature
            .ok_or_else(|| DeviceError::BadProgram { program: name.clone(), reason: "no such kernel".to_owned() })?;
        self.device.record(Call::Load(self.id, name.clone()));
        Ok(Box::new(RecordedKernel { context: self.id, name, signature }))
    }

    fn runlist(&mut self) -> Box<dyn Runlist> {
        Box::new(RecordedRunlist {
            device: Arc::clone(&self.device),
            context: self.id,
            state: Arc::clone(&self.state),
            id: self.device.lists.fetch_add(1, Ordering::Relaxed),
            runs: Vec::new(),
            in_flight: Arc::default(),
        })
    }

    fn state(&self) -> ContextState {
        lock(&self.state).clone()
    }
}

impl Drop for RecordedContext {
    fn drop(&mut self) {
        self.device.record(Call::Close(self.id));
    }
}

#[derive(Clone)]
struct RecordedKernel {
    context: u32,
    name: String,
    signature: Vec<ArgSpec>,
}

impl Kernel for RecordedKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn signature(&self) -> &[ArgSpec] {
        &self.signature
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct RecordedRunlist {
    device: Arc<Shared>,
    context: u32,
    state: Arc<Mutex<ContextState>>,
    id: u32,
    runs: Vec<(RecordedKernel, Vec<Arg>)>,
    in_flight: Arc<AtomicBool>,
}

impl RecordedRunlist {
    fn own(&self, operation: &'static str, kernel: &dyn Kernel) -> Result<RecordedKernel, DeviceError> {
        self.check_idle(operation)?;
        match kernel.as_any().downcast_ref::<RecordedKernel>() {
            Some(kernel) if kernel.context == self.context => Ok(kernel.clone()),
            _ => Err(misuse(operation, "the kernel belongs to another context")),
        }
    }

    fn check_idle(&self, operation: &'static str) -> Result<(), DeviceError> {
        if self.in_flight.load(Ordering::Acquire) { Err(misuse(operation, "the list is in flight")) } else { Ok(()) }
    }

    fn scripts(&self) -> Vec<(Work, Vec<BufferRef>)> {
        let known = lock(&self.device.work);
        let script = |(kernel, args): &(RecordedKernel, Vec<Arg>)| {
            Some((Arc::clone(known.get(&kernel.name)?), args.iter().filter_map(buffer_of).collect()))
        };
        self.runs.iter().filter_map(script).collect()
    }

    fn check_run(&self, operation: &'static str, run: RunIndex) -> Result<usize, DeviceError> {
        let index = run.0 as usize;
        if index < self.runs.len() { Ok(index) } else { Err(misuse(operation, "no such run")) }
    }
}

impl Runlist for RecordedRunlist {
    fn push(&mut self, kernel: &dyn Kernel, args: &[Arg]) -> Result<RunIndex, DeviceError> {
        let kernel = self.own("push", kernel)?;
        if args.len() != kernel.signature.len() {
            let (wanted, found) = (kernel.signature.len(), args.len());
            return Err(bad_argument(&kernel, found.min(wanted), format!("{wanted} arguments"), found.to_string()));
        }
        for (index, arg) in args.iter().enumerate() {
            check_argument(&kernel, index, arg)?;
        }
        let labels = args.iter().filter_map(label_of).collect();
        self.device.record(Call::Push(self.id, kernel.name.clone(), labels));
        self.runs.push((kernel, args.to_vec()));
        Ok(RunIndex(self.runs.len() as u32 - 1))
    }

    fn rebind(&mut self, run: RunIndex, kernel: &dyn Kernel) -> Result<(), DeviceError> {
        let kernel = self.own("rebind", kernel)?;
        let index = self.check_run("rebind", run)?;
        if kernel.signature != self.runs[index].0.signature {
            return Err(bad_argument(&kernel, 0, "the signature of the run".to_owned(), "another".to_owned()));
        }
        self.device.record(Call::Rebind(self.id, run, kernel.name.clone()));
        self.runs[index].0 = kernel;
        Ok(())
    }

    fn set_arg(&mut self, run: RunIndex, index: usize, arg: &Arg) -> Result<(), DeviceError> {
        self.check_idle("set_arg")?;
        let at = self.check_run("set_arg", run)?;
        check_argument(&self.runs[at].0, index, arg)?;
        self.device.record(Call::SetArg(self.id, run, index));
        self.runs[at].1[index] = arg.clone();
        Ok(())
    }

    fn len(&self) -> usize {
        self.runs.len()
    }

    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError> {
        check_ready(&self.state)?;
        self.check_idle("submit")?;
        if self.runs.is_empty() {
            return Err(misuse("submit", "the list is empty"));
        }
        self.in_flight.store(true, Ordering::Release);
        let held: Vec<BufferRef> = self.runs.iter().flat_map(|(_, args)| args).filter_map(buffer_of).collect();
        held.iter().filter_map(recorded).for_each(|buffer| _ = buffer.holds.fetch_add(1, Ordering::Relaxed));
        let id = self.device.submissions.fetch_add(1, Ordering::Relaxed);
        let kernels = self.runs.iter().map(|(kernel, _)| kernel.name.clone()).collect();
        self.device.record(Call::Submit(self.id, id, kernels));
        Ok(Box::new(RecordedSubmission {
            device: Arc::clone(&self.device),
            state: Arc::clone(&self.state),
            id,
            runs: self.runs.len() as u32,
            work: self.scripts(),
            held,
            in_flight: Arc::clone(&self.in_flight),
            waited: false,
        }))
    }
}

struct RecordedSubmission {
    device: Arc<Shared>,
    state: Arc<Mutex<ContextState>>,
    id: u32,
    runs: u32,
    /// Scripted runs in order.
    work: Vec<(Work, Vec<BufferRef>)>,
    held: Vec<BufferRef>,
    in_flight: Arc<AtomicBool>,
    waited: bool,
}

impl Submission for RecordedSubmission {
    fn wait(mut self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        self.waited = true;
        self.device.record(Call::Wait(self.id));
        check_ready(&self.state)?;
        match lock(&self.device.fault).take() {
            Some(run) => {
                *lock(&self.state) = ContextState::Lost(format!("run {} timed out", run.0));
                let waited = deadline.timeout().unwrap_or(Duration::from_secs(2));
                Err(RunError::TimedOut { run: Some(run), waited, detail: String::new() })
            }
            None => {
                self.work.iter().for_each(|(work, args)| run_script(work, args));
                Ok(Completion { runs: self.runs, device_time: None })
            }
        }
    }
}

/// Lets a script work on the contents of its buffers, which are different ones.
fn run_script(work: &Work, args: &[BufferRef]) {
    let recorded: Vec<&RecordedBuffer> = args.iter().filter_map(recorded).collect();
    let mut contents: Vec<Vec<u8>> = recorded.iter().map(|buffer| std::mem::take(&mut *lock(&buffer.bytes))).collect();
    work(&mut contents);
    for (buffer, contents) in recorded.into_iter().zip(contents) {
        *lock(&buffer.bytes) = contents;
    }
}

impl Drop for RecordedSubmission {
    fn drop(&mut self) {
        if !self.waited {
            self.device.record(Call::Abandon(self.id));
        }
        self.held.iter().filter_map(recorded).for_each(|buffer| _ = buffer.holds.fetch_sub(1, Ordering::Relaxed));
        self.in_flight.store(false, Ordering::Release);
    }
}

fn card(id: &str) -> DeviceCard {
    DeviceCard {
        id: id.to_owned(),
        name: format!("device without hardware ({id})"),
        generation: Generation::Cpu,
        is_virtual: true,
        columns: 1,
        core_rows: 1,
        memory_bytes: None,
        driver: None,
        context_limit: None,
        features: Vec::new(),
    }
}

fn program_name(program: &Program<'_>) -> String {
    match program {
        Program::Xclbin { image } => format!("xclbin of {} bytes", image.len()),
        Program::Instructions { unit, .. } | Program::PartialElf { unit, .. } => (*unit).to_owned(),
        Program::FullElf { kernel, .. } => (*kernel).to_owned(),
        Program::Builtin { name } => (*name).to_owned(),
        _ => "unknown".to_owned(),
    }
}

fn check_ready(state: &Mutex<ContextState>) -> Result<(), DeviceError> {
    match &*lock(state) {
        ContextState::Ready => Ok(()),
        ContextState::Lost(reason) => Err(DeviceError::ContextLost { reason: reason.clone() }),
    }
}

fn check_argument(kernel: &RecordedKernel, index: usize, arg: &Arg) -> Result<(), DeviceError> {
    let spec = kernel.signature.get(index);
    let fits = match (spec.map(|spec| spec.kind), arg) {
        (Some(ArgKind::Buffer { min_bytes, .. }), Arg::Buffer(buffer)) => buffer.len_bytes() >= min_bytes,
        (Some(ArgKind::U32), Arg::U32(_)) | (Some(ArgKind::U64), Arg::U64(_)) => true,
        _ => false,
    };
    if fits { Ok(()) } else { Err(bad_argument(kernel, index, format!("{spec:?}"), format!("{arg:?}"))) }
}

fn bad_argument(kernel: &RecordedKernel, index: usize, wanted: String, found: String) -> DeviceError {
    DeviceError::BadArgument { kernel: kernel.name.clone(), index, wanted, found }
}

fn misuse(operation: &'static str, reason: &str) -> DeviceError {
    DeviceError::Misuse { operation, reason: reason.to_owned() }
}

fn buffer_of(arg: &Arg) -> Option<BufferRef> {
    if let Arg::Buffer(buffer) = arg { Some(buffer.clone()) } else { None }
}

fn recorded(buffer: &BufferRef) -> Option<&RecordedBuffer> {
    buffer.object().as_any().downcast_ref()
}

fn label_of(arg: &Arg) -> Option<String> {
    buffer_of(arg).as_ref().and_then(recorded).map(|buffer| buffer.label.clone())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
