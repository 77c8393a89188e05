//! The virtual device: open files, contexts, queues, and virtual time.

use crate::array::program::CoreProgramTable;
use crate::array::{Loads, Partition};
use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use crate::driver::VirtualDriver;
use crate::execute::Outcome;
use crate::fault::{Call, FaultState, RunFault};
use crate::objects::{Bo, Objects};
use crate::spec::VirtualSpec;
use npuhal_amdxdna::NpuIdentity;
use npuhal_amdxdna::driver::{Driver, HEAP_CHUNK_BYTES, Qos};
use npuhal_amdxdna::errno::Errno;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Commands that a context's queue holds.
pub(crate) const QUEUE_DEPTH: usize = 4;
/// Commands of a context whose time is remembered.
const MAX_TIMES: usize = 256;
/// Idle time after which the driver lets the device sleep. Contexts survive, what was loaded into the array does not: published
/// for Strix Halo (`autosuspend_delay_ms` 5000), where the next runlist of such a context timed out. That it is so on every
/// part is the less friendly reading.
const AUTOSUSPEND_DELAY: Duration = Duration::from_secs(5);
/// First address of the virtual process's mappings. Chosen so that the device's view of the first addresses carries
/// into the upper half.
const FIRST_ADDRESS: u64 = 0x2A00_7FC0_0000;
const GUARD_BYTES: u64 = 4096;

/// The device: what all open files share.
#[derive(Debug)]
pub struct VirtualDevice {
    pub(crate) spec: VirtualSpec,
    pub(crate) programs: CoreProgramTable,
    pub(crate) log: Arc<DiagnosisLog>,
    /// Tells the virtual devices of a process apart.
    number: u64,
    state: Mutex<State>,
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

/// What the device holds and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Open files.
    pub files: usize,
    /// Buffer objects of all files, the device heap included.
    pub buffer_objects: usize,
    /// Bytes of the device heap in use, command slots of contexts included.
    pub heap_used_bytes: u64,
    /// Hardware contexts.
    pub contexts: usize,
    /// Synchronisation objects.
    pub syncobjs: usize,
    /// Runs started.
    pub runs: u64,
    /// Configuration images executed.
    pub pdi_loads: u64,
    /// `LOADPDI` operations. That one whose image is resident is not executed again is inferred: published times of code
    /// that loads its image in every run say that hardware spends milliseconds on it.
    pub pdi_requests: u64,
    /// Commands that ended, well or not.
    pub commands: u64,
    /// Times the device fell asleep because nothing had run for [`VirtualDevice::autosuspend_delay`].
    pub suspensions: u64,
}

impl VirtualDevice {
    /// A device with the core programs of this crate.
    #[must_use]
    pub fn new(spec: &VirtualSpec) -> Arc<Self> {
        Self::with_programs(spec, CoreProgramTable::builtin())
    }

    /// A device with these core programs.
    #[must_use]
    pub fn with_programs(spec: &VirtualSpec, programs: CoreProgramTable) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::new(spec)),
            spec: spec.clone(),
            programs,
            log: Arc::new(DiagnosisLog::default()),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// A new device, opened once.
    #[must_use]
    pub fn open(spec: &VirtualSpec) -> Arc<dyn Driver> {
        Self::new(spec).connect()
    }

    /// Opens the device: one more file.
    #[must_use]
    pub fn connect(self: &Arc<Self>) -> Arc<VirtualDriver> {
        let mut state = self.lock();
        let file = state.next_file;
        state.next_file += 1;
        state.files.insert(file, File::default());
        drop(state);
        Arc::new(VirtualDriver::new(Arc::clone(self), file))
    }

    /// What a client that opens the device says about it: id and options as in the URI, and an address of its own, so
    /// that the contexts of two virtual devices are not counted together.
    #[must_use]
    pub fn identity(&self) -> NpuIdentity {
        NpuIdentity {
            id: self.spec.to_string(),
            name: format!("virtual NPU ({})", self.spec.silicon.facts().product),
            silicon: self.spec.silicon,
            is_virtual: true,
            address: format!("virtual-{}", self.number),
        }
    }

    /// What it is.
    #[must_use]
    pub fn spec(&self) -> &VirtualSpec {
        &self.spec
    }

    /// Everything that went wrong so far, in order; the first thousand or so.
    #[must_use]
    pub fn diagnoses(&self) -> Vec<Diagnosis> {
        self.log.to_vec()
    }

    /// The same, and forgets it.
    #[must_use]
    pub fn take_diagnoses(&self) -> Vec<Diagnosis> {
        self.log.take()
    }

    /// What the device holds and has done.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let state = self.lock();
        let files = state.files.values();
        Statistics {
            files: state.files.len(),
            buffer_objects: files.clone().map(|file| file.objects.len()).sum(),
            heap_used_bytes: files.clone().map(|file| file.objects.heap.used_bytes()).sum(),
            contexts: state.contexts.len(),
            syncobjs: files.map(|file| file.syncobjs.len()).sum(),
            runs: state.faults.runs(),
            pdi_loads: state.loads.executed,
            pdi_requests: state.loads.requested,
            commands: state.commands,
            suspensions: state.suspensions,
        }
    }

    /// Idle time after which the device falls asleep.
    #[must_use]
    pub fn autosuspend_delay() -> Duration {
        AUTOSUSPEND_DELAY
    }

    /// Lets virtual time go by while nobody waits: a user who reads, a server without requests. What was submitted runs.
    pub fn idle(&self, time: Duration) {
        let mut state = self.lock();
        let until = state.now.saturating_add(time);
        while state.advance(self, Some(until)) {}
        state.now = until;
    }

    /// Lets a run of the next submission meet `fault`: 0 is its first run. Adds to the plan of the device's URI.
    pub fn inject(&self, run: u64, fault: RunFault) {
        let mut state = self.lock();
        let waiting = state.contexts.values().flat_map(|context| &context.queue).filter(|job| job.running.is_none());
        let waiting: u64 = waiting.map(|job| job.entries.as_ref().map_or(1, Vec::len) as u64).sum();
        let run = state.faults.runs() + waiting + run;
        state.faults.add(run, fault);
    }

    /// Takes back the faults of runs that have not started, those of the URI included. Commands start as late as they can:
    /// what nobody has waited for has not started.
    pub fn forget_faults_of_runs(&self) {
        self.lock().faults.forget_runs_to_come();
    }

    /// The device disappears, as if unplugged: commands in flight are aborted and every call fails with `ENODEV`.
    pub fn remove(&self) {
        let mut state = self.lock();
        state.remove(self);
    }

    /// The machine sleeps and wakes up: commands in flight are aborted, contexts survive without their configuration.
    pub fn suspend_and_resume(&self) {
        let mut state = self.lock();
        state.suspend(self);
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, where the device is there and the plan lets the call through.
    pub(crate) fn call(&self, call: Call) -> Result<MutexGuard<'_, State>, Errno> {
        let mut state = self.lock();
        if state.is_removed {
            return Err(Errno::ENODEV);
        }
        state.faults.call(call)?;
        Ok(state)
    }

    pub(crate) fn diagnose(&self, kind: DiagnosisKind, detail: impl Into<String>) {
        self.log.push(Diagnosis::new(kind, detail));
    }
}

/// Everything that changes.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) now: Duration,
    pub(crate) files: BTreeMap<u32, File>,
    next_file: u32,
    /// By a number that is never used again.
    pub(crate) contexts: BTreeMap<u64, Context>,
    next_context: u64,
    /// Last context id given out to anybody: ids are cyclic.
    pub(crate) last_context_id: u32,
    pub(crate) faults: FaultState,
    pub(crate) is_removed: bool,
    pub(crate) loads: Loads,
    pub(crate) commands: u64,
    suspensions: u64,
    /// End of what ran last, or when the last context was made.
    busy_until: Duration,
    next_address: u64,
    /// Second-generation parts run one context at a time.
    is_shared_in_time: bool,
    free_at: Duration,
}

/// One open file.
#[derive(Debug, Default)]
pub(crate) struct File {
    pub(crate) objects: Objects,
    pub(crate) syncobjs: BTreeMap<u32, Timeline>,
    /// Last context id given out to this file.
    pub(crate) last_context_id: u32,
    /// Start of the heap window.
    pub(crate) window: Option<u64>,
    /// Exports by inode; the file keeps the inode from being used again.
    pub(crate) exports: HashMap<(u64, u64), (OwnedFd, Arc<Bo>)>,
}

/// A timeline synchronisation object.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Timeline {
    pub(crate) submitted: u64,
    /// Points below are signalled.
    pub(crate) signalled: u64,
}

/// A hardware context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) file: u32,
    pub(crate) id: u32,
    pub(crate) syncobj: u32,
    pub(crate) columns: u32,
    pub(crate) start_column: u32,
    pub(crate) qos: Qos,
    pub(crate) units: Option<Vec<Arc<Bo>>>,
    /// Command slots in the heap.
    pub(crate) slots: Vec<u64>,
    pub(crate) queue: VecDeque<Job>,
    pub(crate) next_sequence: u64,
    pub(crate) completed: u64,
    pub(crate) errors: u64,
    pub(crate) partition: Partition,
    /// The firmware refuses submissions, because another context of the process went away.
    pub(crate) is_evicted: bool,
    free_at: Duration,
    times: VecDeque<(u64, Duration)>,
}

impl Context {
    pub(crate) fn new(file: u32, id: u32, syncobj: u32, columns: u32, start_column: u32, qos: Qos) -> Self {
        Self {
            file,
            id,
            syncobj,
            columns,
            start_column,
            qos,
            units: None,
            slots: Vec::new(),
            queue: VecDeque::new(),
            next_sequence: 0,
            completed: 0,
            errors: 0,
            // The array has at most eight columns.
            partition: Partition::new(columns as u8),
            is_evicted: false,
            free_at: Duration::ZERO,
            times: VecDeque::new(),
        }
    }

    pub(crate) fn time(&self, sequence: u64) -> Option<Duration> {
        self.times.iter().find(|(number, _)| *number == sequence).map(|(_, time)| *time)
    }
}

/// A command in a queue.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) sequence: u64,
    pub(crate) command: Arc<Bo>,
    /// Commands of a chain.
    pub(crate) entries: Option<Vec<Arc<Bo>>>,
    pub(crate) args: Vec<Arc<Bo>>,
    pub(crate) submitted_at: Duration,
    pub(crate) running: Option<Running>,
}

/// A command that has started.
#[derive(Debug)]
pub(crate) struct Running {
    started_at: Duration,
    ends_at: Duration,
    outcome: Outcome,
}

impl State {
    fn new(spec: &VirtualSpec) -> Self {
        Self {
            now: Duration::from_secs(1),
            files: BTreeMap::new(),
            next_file: 1,
            contexts: BTreeMap::new(),
            next_context: 1,
            last_context_id: 0,
            faults: FaultState::new(spec.faults.clone()),
            is_removed: false,
            loads: Loads::default(),
            commands: 0,
            suspensions: 0,
            busy_until: Duration::ZERO,
            next_address: FIRST_ADDRESS,
            is_shared_in_time: spec.silicon.facts().is_preemptible,
            free_at: Duration::ZERO,
        }
    }

    pub(crate) fn file(&mut self, file: u32) -> Result<&mut File, Errno> {
        self.files.get_mut(&file).ok_or(Errno::EBADF)
    }

    /// Addresses for a mapping of `len_bytes`. They are never given out again.
    pub(crate) fn reserve_addresses(&mut self, len_bytes: u64, align: u64) -> Result<u64, Errno> {
        let start = self.next_address.checked_next_multiple_of(align).ok_or(Errno::ENOMEM)?;
        let end = start.checked_add(len_bytes).and_then(|end| end.checked_add(GUARD_BYTES)).ok_or(Errno::ENOMEM)?;
        if end >= 1 << 47 {
            return Err(Errno::ENOMEM);
        }
        self.next_address = end;
        Ok(start)
    }

    /// The heap window of a file, reserved at first use.
    pub(crate) fn window(&mut self, file: u32, len_bytes: u64) -> Result<u64, Errno> {
        if let Some(window) = self.file(file)?.window {
            return Ok(window);
        }
        let window = self.reserve_addresses(len_bytes, HEAP_CHUNK_BYTES)?;
        self.file(file)?.window = Some(window);
        Ok(window)
    }

    pub(crate) fn insert_context(&mut self, context: Context) {
        self.wake(self.now);
        self.contexts.insert(self.next_context, context);
        self.next_context += 1;
    }

    /// Something is to run at `at`. Where nothing has for too long, the device was asleep.
    fn wake(&mut self, at: Duration) {
        if at > self.busy_until.saturating_add(AUTOSUSPEND_DELAY) && !self.contexts.is_empty() {
            self.suspensions += 1;
            self.contexts.values_mut().for_each(|context| context.partition.reset());
        }
        self.busy_until = self.busy_until.max(at);
    }

    /// The key of the context with handle `id` in `file`.
    pub(crate) fn context_key(&self, file: u32, id: u32) -> Option<u64> {
        self.contexts.iter().find(|(_, context)| (context.file, context.id) == (file, id)).map(|(key, _)| *key)
    }

    /// When and in which context the next thing happens.
    fn next_event(&self) -> Option<(Duration, u64)> {
        let events = self.contexts.iter().filter_map(|(key, context)| {
            let job = context.queue.front()?;
            let at = match &job.running {
                Some(running) => running.ends_at,
                None => job.submitted_at.max(if self.is_shared_in_time { self.free_at } else { context.free_at }),
            };
            Some((at, *key))
        });
        events.min()
    }

    /// Lets the next thing happen, unless it is later than `until`. Time goes on to it.
    pub(crate) fn advance(&mut self, device: &VirtualDevice, until: Option<Duration>) -> bool {
        let Some((at, key)) = self.next_event().filter(|(at, _)| until.is_none_or(|until| *at <= until)) else {
            return false;
        };
        self.now = self.now.max(at);
        let Some(context) = self.contexts.get_mut(&key) else { return false };
        match context.queue.front_mut().and_then(|job| job.running.take()) {
            Some(running) => self.complete(device, key, running),
            None => self.start(device, key, at),
        }
        true
    }

    fn start(&mut self, device: &VirtualDevice, key: u64, at: Duration) {
        self.wake(at);
        // The context leaves the table while it runs, so that state and context can be changed side by side.
        let Some(mut context) = self.contexts.remove(&key) else { return };
        let Some(mut job) = context.queue.pop_front() else {
            self.contexts.insert(key, context);
            return;
        };
        let outcome = self.execute(device, &mut context, &job);
        let ends_at = at + outcome.time;
        let (does_remove, does_suspend) = (outcome.removes, outcome.suspends);
        job.running = Some(Running { started_at: at, ends_at, outcome });
        context.queue.push_front(job);
        context.free_at = ends_at;
        self.free_at = ends_at;
        self.busy_until = self.busy_until.max(ends_at);
        self.contexts.insert(key, context);
        if does_remove {
            self.remove(device);
        } else if does_suspend {
            self.suspend(device);
        }
    }

    fn complete(&mut self, device: &VirtualDevice, key: u64, running: Running) {
        let Some(context) = self.contexts.get_mut(&key) else { return };
        let Some(job) = context.queue.pop_front() else { return };
        running.outcome.write_back(&device.spec, &job);
        context.times.push_back((job.sequence, running.ends_at - running.started_at));
        if context.times.len() > MAX_TIMES {
            context.times.pop_front();
        }
        context.completed += 1;
        context.errors += u64::from(!running.outcome.is_good());
        let (file, syncobj, sequence) = (context.file, context.syncobj, job.sequence);
        let rest: Vec<_> = if running.outcome.is_timeout() { context.queue.drain(..).collect() } else { Vec::new() };
        if !running.outcome.is_good() {
            context.partition.reset();
        }
        context.completed += rest.len() as u64;
        self.signal(file, syncobj, sequence);
        for job in rest {
            // The watch-dog resets the context; what was queued behind the command does not run.
            Outcome::aborted().write_back(&device.spec, &job);
            self.signal(file, syncobj, job.sequence);
        }
    }

    /// The command's header was written before; now its fence signals.
    fn signal(&mut self, file: u32, syncobj: u32, sequence: u64) {
        self.commands += 1;
        let Some(file) = self.files.get_mut(&file) else { return };
        if let Some(timeline) = file.syncobjs.get_mut(&syncobj) {
            timeline.signalled = timeline.signalled.max(sequence + 1);
        }
    }

    /// Aborts everything in the queue of a context.
    pub(crate) fn abort_queue(&mut self, device: &VirtualDevice, key: u64) {
        let Some(context) = self.contexts.get_mut(&key) else { return };
        let (file, syncobj) = (context.file, context.syncobj);
        let jobs: Vec<_> = context.queue.drain(..).collect();
        if jobs.first().is_some_and(|job| job.running.is_some()) {
            // The array is free at once.
            self.free_at = self.now;
        }
        context.completed += jobs.len() as u64;
        context.errors += jobs.len() as u64;
        context.partition.reset();
        for job in jobs {
            Outcome::aborted().write_back(&device.spec, &job);
            self.signal(file, syncobj, job.sequence);
        }
    }

    fn remove(&mut self, device: &VirtualDevice) {
        self.is_removed = true;
        self.abort_all(device);
    }

    fn suspend(&mut self, device: &VirtualDevice) {
        self.abort_all(device);
    }

    fn abort_all(&mut self, device: &VirtualDevice) {
        let keys: Vec<_> = self.contexts.keys().copied().collect();
        for key in keys {
            self.abort_queue(device, key);
        }
        self.free_at = self.now;
        let now = self.now;
        self.contexts.values_mut().for_each(|context| context.free_at = now);
    }

    /// Ends a context: its commands, its slots in the heap. Its synchronisation object belongs to the client.
    pub(crate) fn end_context(&mut self, device: &VirtualDevice, key: u64) {
        self.abort_queue(device, key);
        let Some(context) = self.contexts.remove(&key) else { return };
        if let Some(file) = self.files.get_mut(&context.file) {
            context.slots.iter().for_each(|slot| file.objects.heap.give_back(*slot));
        }
    }

    /// Closes a file with everything in it.
    pub(crate) fn close_file(&mut self, device: &VirtualDevice, file: u32) {
        let keys: Vec<_> =
            self.contexts.iter().filter(|(_, context)| context.file == file).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.end_context(device, key));
        self.files.remove(&file);
    }
}
