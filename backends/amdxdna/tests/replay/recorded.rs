//! The recorded device: a driver that answers as the recording did and notes what it is sent.
//!
//! Host and device have their own copies of all memory, so that a missing flush shows. A new buffer takes handle and
//! addresses of the first recorded one of its kind and size that is still free; what was never recorded gets others.

use crate::trace::{Outcome, RecordedBo, Trace, handle_of};
use npuhal_amdxdna::driver::{
    ArrayShape, BoHandle, BoInfo, BoKind, CACHE_LINE_BYTES, ContextHandle, ContextSpec, CreateBo, CreatedContext,
    CuConfig, DEV_ALIGN_BYTES, DRIVER_NAME, Driver, DriverVersion, ExecCommand, HEAP_BASE, HEAP_CHUNK_BYTES,
    ImportedBo, MapRequest, Mapping, OutOfMapping, Placement, SyncDirection, SyncobjHandle,
};
use npuhal_amdxdna::errno::Errno;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const FIRST_UNRECORDED_HANDLE: u32 = 1000;
const UNRECORDED_DEV: u64 = HEAP_BASE + (48 << 20);
const UNRECORDED_VA: u64 = 0x7F00_0000_0000;
const HEAP_VA: u64 = 0x7E11_0000_0000;
const MAP_OFFSET: u64 = 0x1_0000_0000;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    CreateBo { bo: u32, kind: BoKind, size: u64, is_user: bool },
    Refused { kind: BoKind, errno: Errno },
    Map { bo: u32, placement: Placement, len: u64 },
    Unmap { bo: u32 },
    Flush { bo: u32, ranges: Vec<Range<u64>> },
    Invalidate { bo: u32, range: Range<u64> },
    CreateContext { context: u32, spec: ContextSpec },
    ConfigCus { units: Vec<u32>, contents: Vec<Vec<u8>> },
    Exec(Box<Executed>),
    Wait { point: u64, timeout: Option<Duration> },
    DestroySyncobj(u32),
    DestroyContext(u32),
    Close(u32),
    Export(u32),
    Import(u32),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Executed {
    /// Number of the recorded submission it answers to.
    pub(crate) index: usize,
    pub(crate) errno: Option<Errno>,
    pub(crate) packet: Vec<u32>,
    pub(crate) sub: Vec<Vec<u32>>,
    pub(crate) args: Vec<u32>,
    /// Device memory behind each code address in the packets, from the address to the end of the buffer.
    pub(crate) code: HashMap<u64, Vec<u8>>,
    /// What the device sees in the recorded buffers whose contents were recorded.
    pub(crate) held: HashMap<u32, Vec<u8>>,
}

#[derive(Debug)]
struct Bo {
    kind: BoKind,
    size: u64,
    va: u64,
    xdna: u64,
    memory: Arc<Memory>,
}

struct Memory {
    host: Mutex<Vec<u8>>,
    device: Mutex<Vec<u8>>,
}

#[derive(Debug)]
struct State {
    bos: BTreeMap<u32, Bo>,
    chunks: Vec<Arc<Memory>>,
    free: Vec<RecordedBo>,
    next_handle: u32,
    next_dev: u64,
    next_va: u64,
    /// Size and address of device memory that was given back.
    dev_free: Vec<(u64, u64)>,
    contexts: u32,
    sequence: HashMap<u32, u64>,
    cursor: usize,
    pending: Vec<Pending>,
    exports: HashMap<i32, u32>,
    now: Duration,
    /// Errors to give instead of an answer: call name, calls to let pass first, error.
    faults: Vec<(&'static str, usize, Errno)>,
    /// How often point 0 is reported as signalled before its command ends.
    early_signals: u32,
}

#[derive(Debug)]
struct Pending {
    syncobj: u32,
    point: u64,
    command: u32,
    subs: Vec<u32>,
    outcome: Option<Outcome>,
    times_out_first: bool,
}

pub(crate) struct Recorded {
    trace: Trace,
    state: Mutex<State>,
    log: Arc<Mutex<Vec<Event>>>,
}

impl Recorded {
    pub(crate) fn new(trace: Trace) -> Arc<Self> {
        let state = State {
            bos: BTreeMap::new(),
            chunks: Vec::new(),
            free: trace.bos.values().cloned().collect(),
            next_handle: FIRST_UNRECORDED_HANDLE,
            next_dev: UNRECORDED_DEV,
            next_va: UNRECORDED_VA,
            dev_free: Vec::new(),
            contexts: 0,
            sequence: HashMap::new(),
            cursor: 0,
            pending: Vec::new(),
            exports: HashMap::new(),
            now: Duration::from_secs(1),
            faults: Vec::new(),
            early_signals: 0,
        };
        Arc::new(Self { trace, state: Mutex::new(state), log: Arc::default() })
    }

    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    pub(crate) fn log(&self) -> Vec<Event> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn execs(&self) -> Vec<Executed> {
        let execs = self.log().into_iter().filter_map(|event| match event {
            Event::Exec(executed) => Some(*executed),
            _ => None,
        });
        execs.collect()
    }

    /// Recorded buffers that belong to other uses: they are not given out.
    pub(crate) fn withhold(&self, handles: &[u32]) {
        self.state.lock().unwrap().free.retain(|bo| !handles.contains(&bo.handle));
    }

    /// The next call named `call` fails.
    pub(crate) fn fail_next(&self, call: &'static str, errno: Errno) {
        self.fail_after(call, 0, errno);
    }

    /// The call named `call` after `calls` more of them fails.
    pub(crate) fn fail_after(&self, call: &'static str, calls: usize, errno: Errno) {
        self.state.lock().unwrap().faults.push((call, calls, errno));
    }

    /// Whether every fault has come.
    pub(crate) fn faults_are_spent(&self) -> bool {
        self.state.lock().unwrap().faults.is_empty()
    }

    /// Point 0 of a timeline is reported as signalled too early, this often.
    pub(crate) fn signal_early(&self, times: u32) {
        self.state.lock().unwrap().early_signals = times;
    }

    /// What the device sees in a buffer that is open.
    pub(crate) fn device_view(&self, handle: u32) -> Option<Vec<u8>> {
        self.state.lock().unwrap().device_view(handle)
    }

    /// Buffer objects that are not closed.
    pub(crate) fn open_bos(&self) -> Vec<u32> {
        self.state.lock().unwrap().bos.keys().copied().collect()
    }

    pub(crate) fn address_of(&self, handle: u32) -> u64 {
        let bo = &self.trace.bos[&handle];
        bo.xdna.or(bo.va).unwrap()
    }

    fn note(&self, event: Event) {
        self.log.lock().unwrap().push(event);
    }
}

impl State {
    fn fault(&mut self, call: &str) -> Result<(), Errno> {
        let Some(at) = self.faults.iter().position(|(name, _, _)| *name == call) else { return Ok(()) };
        if self.faults[at].1 == 0 {
            return Err(self.faults.remove(at).2);
        }
        self.faults[at].1 -= 1;
        Ok(())
    }

    fn take_recorded(&mut self, kind: BoKind, size: u64, is_user: bool) -> Option<RecordedBo> {
        let name = kind_name(kind);
        let is_free = |bo: &RecordedBo| bo.kind == name && !bo.is_imported && bo.is_user == is_user;
        let exact = self.free.iter().position(|bo| is_free(bo) && bo.size == Some(size));
        let rounded = |bo: &RecordedBo| match kind {
            BoKind::Dev => bo.size.map(|size| size.next_multiple_of(DEV_ALIGN_BYTES)) == Some(size),
            _ => false,
        };
        let at = exact.or_else(|| self.free.iter().position(|bo| is_free(bo) && rounded(bo)))?;
        Some(self.free.remove(at))
    }

    fn create(&mut self, recorded: Option<RecordedBo>, kind: BoKind, size: u64) -> u32 {
        let handle = recorded.as_ref().map_or(self.next_handle, |bo| bo.handle);
        let (va, xdna) = match &recorded {
            Some(bo) => (bo.va.unwrap_or(0), bo.xdna.unwrap_or(0)),
            None if kind == BoKind::Dev => (0, self.unrecorded_dev(size)),
            None => (self.next_va, 0),
        };
        if recorded.is_none() {
            self.next_handle += 1;
            self.next_va += size.next_multiple_of(4096) + 4096;
        }
        let own = if kind == BoKind::Dev { 0 } else { size.next_multiple_of(4096) };
        self.bos.insert(handle, Bo { kind, size, va, xdna, memory: Memory::new(own as usize) });
        handle
    }

    fn unrecorded_dev(&mut self, size: u64) -> u64 {
        if let Some(at) = self.dev_free.iter().position(|(free, _)| *free == size) {
            return self.dev_free.swap_remove(at).1;
        }
        let address = self.next_dev;
        self.next_dev += size.next_multiple_of(DEV_ALIGN_BYTES);
        address
    }

    fn device_bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let offset = address - HEAP_BASE;
        let chunk = &self.chunks[(offset / HEAP_CHUNK_BYTES) as usize];
        let at = (offset % HEAP_CHUNK_BYTES) as usize;
        let device = chunk.device.lock().unwrap();
        device[at..(at + len).min(device.len())].to_vec()
    }

    fn device_view(&self, handle: u32) -> Option<Vec<u8>> {
        let bo = self.bos.get(&handle)?;
        match bo.kind {
            BoKind::Dev => Some(self.device_bytes(bo.xdna, bo.size as usize)),
            _ => Some(bo.memory.device.lock().unwrap().clone()),
        }
    }

    /// The buffer that holds a device-heap address.
    fn code_at(&self, address: u64) -> Option<Vec<u8>> {
        let bo = self.bos.values().find(|bo| bo.kind == BoKind::Dev && bo.xdna == address)?;
        Some(self.device_bytes(bo.xdna, bo.size as usize))
    }

    fn words(&self, handle: u32) -> Vec<u32> {
        let host = self.bos[&handle].memory.host.lock().unwrap();
        let word = |at: usize| u32::from_le_bytes(host[at..at + 4].try_into().unwrap());
        let count = (word(0) >> 12 & 0x7FF) as usize;
        (0..=count).map(|i| word(4 * i)).collect()
    }

    fn complete(&mut self, pending: &Pending, is_out_of_tree: bool) {
        let Some(outcome) = &pending.outcome else { return };
        let body =
            if is_out_of_tree { self.out_of_tree_body(pending, outcome) } else { self.mainline_body(pending, outcome) };
        if let Some((handle, bytes)) = body {
            self.bos[&handle].memory.host.lock().unwrap()[4..4 + bytes.len()].copy_from_slice(&bytes);
        }
        let mut host = self.bos[&pending.command].memory.host.lock().unwrap();
        host[0] = (host[0] & 0xF0) | outcome.state as u8;
        if !pending.subs.is_empty() {
            host[12..16].copy_from_slice(&outcome.error_index.to_le_bytes());
        }
    }

    /// Recent mainline drivers overwrite the body of a failed command, of a chain that of the first run.
    fn mainline_body(&self, pending: &Pending, outcome: &Outcome) -> Option<(u32, Vec<u8>)> {
        let handle = *pending.subs.first().unwrap_or(&pending.command);
        let mut bytes = vec![0xFF; 4092];
        if outcome.has_record {
            bytes[..32].copy_from_slice(&record());
        }
        matches!(outcome.state, 5 | 6 | 8 | 9).then_some((handle, bytes))
    }

    /// The out-of-tree driver writes a record only, of a chain to the run that failed.
    fn out_of_tree_body(&self, pending: &Pending, outcome: &Outcome) -> Option<(u32, Vec<u8>)> {
        let handle = *pending.subs.get(outcome.error_index as usize).unwrap_or(&pending.command);
        outcome.has_record.then(|| (handle, record().to_vec()))
    }
}

fn record() -> [u8; 32] {
    let mut bytes = [0; 32];
    for (i, word) in [1_u32, 0, 0x11, 0x2233_4455, 6, 7, 0x88, 9].into_iter().enumerate() {
        bytes[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

impl Driver for Recorded {
    fn version(&self) -> Result<DriverVersion, Errno> {
        self.state.lock().unwrap().fault("version")?;
        let (major, minor) = if self.trace.is_out_of_tree { (1, 0) } else { (0, 16) };
        Ok(DriverVersion {
            name: DRIVER_NAME.to_owned(),
            description: "AMD XDNA DRM implementation".to_owned(),
            major,
            minor,
            patch: 0,
        })
    }

    fn get_info(&self, param: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.state.lock().unwrap().fault("get_info")?;
        // Traces of programs that open no context never ask for the shape of the array.
        let columns = if self.trace.name.starts_with("npu1") { 5 } else { 8 };
        let fallback = metadata(columns);
        let payload = match param {
            1 => self.trace.metadata.as_ref().unwrap_or(&fallback),
            _ => return Err(Errno::EOPNOTSUPP),
        };
        buffer[..payload.len()].copy_from_slice(payload);
        Ok(payload.len())
    }

    fn get_array(&self, _: u32, _: ArrayShape, _: &mut [u8]) -> Result<ArrayShape, Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn create_bo(&self, request: &CreateBo<'_>) -> Result<BoHandle, Errno> {
        let mut state = self.state.lock().unwrap();
        let CreateBo { kind, size_bytes: size, user_memory } = *request;
        let is_user = user_memory.is_some();
        if let Err(errno) = state.fault("create_bo") {
            drop(state);
            self.note(Event::Refused { kind, errno });
            return Err(errno);
        }
        if kind == BoKind::DevHeap {
            state.chunks.push(Memory::new(size as usize));
        }
        let recorded = state.take_recorded(kind, size, is_user);
        let handle = state.create(recorded, kind, size);
        if kind == BoKind::Dev {
            assert!(!state.chunks.is_empty(), "device memory before there is a heap");
        }
        if let Some(memory) = user_memory {
            let bo = state.bos.get_mut(&handle).unwrap();
            (bo.va, bo.size) = (memory.address(), memory.len_bytes());
        }
        drop(state);
        self.note(Event::CreateBo { bo: handle, kind, size, is_user });
        Ok(BoHandle(handle))
    }

    fn bo_info(&self, bo: BoHandle) -> Result<BoInfo, Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("bo_info")?;
        let bo = state.bos.get(&bo.0).ok_or(Errno::ENOENT)?;
        let is_dev = matches!(bo.kind, BoKind::Dev | BoKind::DevHeap);
        Ok(BoInfo {
            map_offset: (bo.kind != BoKind::Dev).then_some(MAP_OFFSET),
            host_address: None,
            device_address: is_dev.then_some(bo.xdna),
        })
    }

    fn map(&self, request: &MapRequest) -> Result<Arc<dyn Mapping>, Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("map")?;
        let bo = &state.bos[&request.bo.0];
        assert_eq!(request.map_offset, MAP_OFFSET);
        let (address, memory) = match request.placement {
            Placement::Anywhere => (bo.va, Arc::clone(&bo.memory)),
            Placement::HeapWindow { offset_bytes } => {
                let chunk = (offset_bytes / HEAP_CHUNK_BYTES) as usize;
                (HEAP_VA + offset_bytes, Arc::clone(&state.chunks[chunk]))
            }
        };
        self.note(Event::Map { bo: request.bo.0, placement: request.placement, len: request.len_bytes });
        Ok(Arc::new(View { bo: request.bo.0, address, memory, log: Arc::clone(&self.log) }))
    }

    fn sync_bo(&self, _: BoHandle, _: SyncDirection, _: Range<u64>) -> Result<(), Errno> {
        panic!("caches are flushed in user space")
    }

    fn close_bo(&self, bo: BoHandle) -> Result<(), Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("close_bo")?;
        let closed = state.bos.remove(&bo.0).unwrap_or_else(|| panic!("closed twice: {bo}"));
        if closed.kind == BoKind::Dev && bo.0 >= FIRST_UNRECORDED_HANDLE {
            state.dev_free.push((closed.size, closed.xdna));
        }
        drop(state);
        self.note(Event::Close(bo.0));
        Ok(())
    }

    fn export_dma_buf(&self, bo: BoHandle) -> Result<OwnedFd, Errno> {
        let mut state = self.state.lock().unwrap();
        if state.bos[&bo.0].kind == BoKind::Dev {
            return Err(Errno::EOPNOTSUPP);
        }
        let file = tempfile::tempfile().map_err(|_| Errno::EMFILE)?;
        let fd = OwnedFd::from(file);
        state.exports.insert(fd.as_raw_fd(), bo.0);
        self.note(Event::Export(bo.0));
        Ok(fd)
    }

    fn import_dma_buf(&self, fd: BorrowedFd<'_>) -> Result<ImportedBo, Errno> {
        let mut state = self.state.lock().unwrap();
        let own = state.exports.get(&fd.as_fd().as_raw_fd()).copied();
        let size = std::fs::File::from(fd.try_clone_to_owned().unwrap()).metadata().unwrap().len();
        let handle = match own {
            Some(handle) => handle,
            None => {
                let at = state.free.iter().position(|bo| bo.is_imported).ok_or(Errno::EINVAL)?;
                let recorded = state.free.remove(at);
                state.create(Some(recorded), BoKind::Share, size)
            }
        };
        let size_bytes = state.bos[&handle].size;
        self.note(Event::Import(handle));
        Ok(ImportedBo { bo: BoHandle(handle), size_bytes })
    }

    fn create_context(&self, spec: &ContextSpec) -> Result<CreatedContext, Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("create_context")?;
        assert!(!state.chunks.is_empty(), "a context before there is a heap");
        state.contexts += 1;
        let context = state.contexts;
        self.note(Event::CreateContext { context, spec: *spec });
        Ok(CreatedContext { context: ContextHandle(context), syncobj: SyncobjHandle(context) })
    }

    fn config_cus(&self, _: ContextHandle, units: &[CuConfig]) -> Result<(), Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("config_cus")?;
        assert!(units.iter().all(|unit| unit.function == 0));
        let handles: Vec<_> = units.iter().map(|unit| unit.bo.0).collect();
        let contents = handles.iter().map(|handle| {
            let bo = &state.bos[handle];
            state.device_bytes(bo.xdna, bo.size as usize)
        });
        let event = Event::ConfigCus { contents: contents.collect(), units: handles.clone() };
        self.note(event);
        Ok(())
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("destroy_context")?;
        state.pending.retain(|pending| pending.syncobj != context.0);
        self.note(Event::DestroyContext(context.0));
        Ok(())
    }

    fn exec(&self, command: &ExecCommand<'_>) -> Result<u64, Errno> {
        let mut state = self.state.lock().unwrap();
        state.fault("exec")?;
        let index = state.cursor;
        state.cursor += 1;
        let recorded = &self.trace.execs[index];
        let errno = recorded.errno.map(Errno::from_raw);
        let packet = state.words(command.command.0);
        assert_eq!(packet[0] & 0xF, 1, "a packet is submitted in state NEW");
        let is_chain = packet[0] >> 23 & 0x1F == 19;
        let subs: Vec<u32> =
            if is_chain { (0..packet[1] as usize).map(|i| packet[7 + 2 * i]).collect() } else { vec![] };
        let sub: Vec<_> = subs.iter().map(|handle| state.words(*handle)).collect();
        let packets: Vec<_> = if is_chain { sub.clone() } else { vec![packet.clone()] };
        let code = packets
            .iter()
            .flat_map(|packet| code_addresses(packet))
            .filter_map(|address| state.code_at(address).map(|code| (address, code)));
        let args = command.args.iter().map(|bo| bo.0).collect();
        let held = recorded.code.keys().map(|name| handle_of(name));
        let held = held.filter_map(|handle| Some((handle, state.device_view(handle)?))).collect();
        let executed = Executed { index, errno, packet, sub, args, code: code.collect(), held };
        self.note(Event::Exec(Box::new(executed)));
        if let Some(errno) = errno {
            return Err(errno);
        }
        let context = command.context.0;
        let next = state.sequence.entry(context).or_insert(0);
        let point = *next;
        *next += 1;
        let pending = Pending {
            syncobj: context,
            point,
            command: command.command.0,
            subs,
            outcome: recorded.outcome.clone(),
            times_out_first: recorded.first_wait_times_out,
        };
        if recorded.ends_at_once {
            state.complete(&pending, self.trace.is_out_of_tree);
        } else {
            state.pending.push(pending);
        }
        Ok(point)
    }

    fn wait_timeline(&self, syncobj: SyncobjHandle, point: u64, deadline: Option<Duration>) -> Result<(), Errno> {
        let mut state = self.state.lock().unwrap();
        let timeout = deadline.map(|deadline| deadline.saturating_sub(state.now));
        self.note(Event::Wait { point, timeout });
        state.fault("wait")?;
        let is_covered = |pending: &Pending| pending.syncobj == syncobj.0 && pending.point <= point;
        if let (Some(deadline), true) =
            (deadline, state.pending.iter().any(|pending| is_covered(pending) && pending.times_out_first))
        {
            state.now = deadline;
            return Err(Errno::ETIME);
        }
        if point == 0 && state.early_signals > 0 {
            state.early_signals -= 1;
            return Ok(());
        }
        let (done, rest) = std::mem::take(&mut state.pending).into_iter().partition(is_covered);
        state.pending = rest;
        let done: Vec<Pending> = done;
        for pending in &done {
            state.complete(pending, self.trace.is_out_of_tree);
        }
        Ok(())
    }

    fn destroy_syncobj(&self, syncobj: SyncobjHandle) -> Result<(), Errno> {
        self.state.lock().unwrap().fault("destroy_syncobj")?;
        self.note(Event::DestroySyncobj(syncobj.0));
        Ok(())
    }

    fn now(&self) -> Duration {
        self.state.lock().unwrap().now
    }

    fn pause(&self) {
        self.state.lock().unwrap().now += Duration::from_millis(1);
    }
}

/// Addresses in device memory that a packet names.
pub(crate) fn code_addresses(packet: &[u32]) -> Vec<u64> {
    let pair = |at: usize| u64::from(packet[at]) | u64::from(packet[at + 1]) << 32;
    match packet[0] >> 23 & 0x1F {
        0 => vec![pair(4)],
        20 => vec![pair(2)],
        _ => vec![pair(2), pair(4), pair(6)],
    }
}

fn kind_name(kind: BoKind) -> &'static str {
    match kind {
        BoKind::Share => "SHARE",
        BoKind::DevHeap => "DEV_HEAP",
        BoKind::Dev => "DEV",
        BoKind::Cmd => "CMD",
    }
}

fn metadata(columns: u16) -> Vec<u8> {
    use npuhal_amdxdna::uapi::query::{AieMetadata, TileMetadata};
    let core = TileMetadata { row_count: 4, row_start: 2, dma_channel_count: 2, lock_count: 16, ..Default::default() };
    AieMetadata { cols: columns, rows: 6, core, ..Default::default() }.encode().to_vec()
}

impl Memory {
    fn new(len: usize) -> Arc<Self> {
        Arc::new(Self { host: Mutex::new(vec![0; len]), device: Mutex::new(vec![0; len]) })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memory")
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorded({})", self.trace.name)
    }
}

#[derive(Debug)]
struct View {
    bo: u32,
    address: u64,
    memory: Arc<Memory>,
    log: Arc<Mutex<Vec<Event>>>,
}

impl View {
    fn range(&self, at: u64, len: u64) -> Result<Range<usize>, OutOfMapping> {
        let size_bytes = self.len_bytes();
        match at.checked_add(len) {
            Some(end) if end <= size_bytes => Ok(at as usize..end as usize),
            _ => Err(OutOfMapping { at_bytes: at, len_bytes: len, size_bytes }),
        }
    }

    fn lines(&self, range: &Range<u64>) -> Result<Range<usize>, OutOfMapping> {
        let range = self.range(range.start, range.end - range.start)?;
        let line = CACHE_LINE_BYTES as usize;
        Ok(range.start / line * line..range.end.next_multiple_of(line).min(self.len_bytes() as usize))
    }
}

impl Mapping for View {
    fn address(&self) -> u64 {
        self.address
    }

    fn len_bytes(&self) -> u64 {
        self.memory.host.lock().unwrap().len() as u64
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        let range = self.range(at_bytes, dst.len() as u64)?;
        dst.copy_from_slice(&self.memory.host.lock().unwrap()[range]);
        Ok(())
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        let range = self.range(at_bytes, src.len() as u64)?;
        self.memory.host.lock().unwrap()[range].copy_from_slice(src);
        Ok(())
    }

    fn fill(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), OutOfMapping> {
        let range = self.range(range.start, range.end - range.start)?;
        fill(&mut self.memory.host.lock().unwrap()[range]);
        Ok(())
    }

    fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping> {
        let mut word = [0; 4];
        self.read(at_bytes, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping> {
        self.write(at_bytes, &value.to_le_bytes())
    }

    fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        for range in ranges {
            let lines = self.lines(range)?;
            let host = self.memory.host.lock().unwrap();
            self.memory.device.lock().unwrap()[lines.clone()].copy_from_slice(&host[lines]);
        }
        self.log.lock().unwrap().push(Event::Flush { bo: self.bo, ranges: ranges.to_vec() });
        Ok(())
    }

    fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        let lines = self.lines(&range)?;
        let device = self.memory.device.lock().unwrap();
        self.memory.host.lock().unwrap()[lines.clone()].copy_from_slice(&device[lines]);
        self.log.lock().unwrap().push(Event::Invalidate { bo: self.bo, range });
        Ok(())
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.log.lock().unwrap().push(Event::Unmap { bo: self.bo });
    }
}
