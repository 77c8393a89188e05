//! The driver trait for one open file of a virtual device.

use crate::device::{Context, Job, QUEUE_DEPTH, State, VirtualDevice};
use crate::diagnosis::DiagnosisKind;
use crate::execute::packet_words;
use crate::fault::Call;
use crate::memory::{Memory, VirtualMapping};
use crate::objects::{Bo, Place, heap_address};
use crate::packet::{self, Header, opcode};
use crate::query;
use crate::spec::Profile;
use npuhal_amdxdna::driver::{
    ArrayShape, BoHandle, BoInfo, BoKind, ContextHandle, ContextSpec, CreateBo, CreatedContext, CuConfig, DRIVER_NAME,
    Driver, DriverVersion, ExecCommand, HEAP_CHUNK_BYTES, HEAP_MAX_BYTES, ImportedBo, MapRequest, Mapping, PAGE_BYTES,
    Placement, SyncDirection, SyncobjHandle,
};
use npuhal_amdxdna::errno::Errno;
use npuhal_core::card::Claim;
use npuhal_core::device::DeviceTime;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// Opaque offsets that objects are mapped at start here.
const MAP_OFFSETS: u64 = 0x1_0000_0000;
/// Command slots that a context takes from the heap.
const CONTEXT_SLOTS: usize = 4;
const SLOT_BYTES: u64 = 4096;
/// Largest command buffer of the first mainline driver.
const COMMAND_MAX_BYTES: u64 = 32 << 10;
const EXEC_MAX_ARGS: usize = 4095;
const MAX_UNITS: usize = 32;
/// Contexts that the out-of-tree driver multiplexes.
const OUT_OF_TREE_CONTEXTS: usize = 32;
/// Context ids are cyclic up to here: for each client, or for the device (recent mainline driver).
const CLIENT_IDS: u32 = 255;
const DEVICE_IDS: u32 = 1024;
/// Most time that passes between two polls of a header.
const POLL: Duration = Duration::from_millis(1);

/// One open file of a [`VirtualDevice`]. Dropping it closes the file and ends whatever is left in it.
pub struct VirtualDriver {
    device: Arc<VirtualDevice>,
    file: u32,
}

impl VirtualDriver {
    pub(crate) fn new(device: Arc<VirtualDevice>, file: u32) -> Self {
        Self { device, file }
    }

    /// The device behind the file.
    #[must_use]
    pub fn device(&self) -> &Arc<VirtualDevice> {
        &self.device
    }

    fn profile(&self) -> Profile {
        self.device.spec.profile
    }

    fn call(&self, call: Call) -> Result<MutexGuard<'_, State>, Errno> {
        self.device.call(call)
    }

    fn insert_pages(&self, state: &mut State, kind: BoKind, size_bytes: u64) -> Result<Arc<Bo>, Errno> {
        let len_bytes = size_bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Errno::EINVAL)?;
        let address = if kind == BoKind::DevHeap {
            let offset_bytes = state.file(self.file)?.objects.heap.size_bytes();
            state.window(self.file, HEAP_MAX_BYTES)? + offset_bytes
        } else {
            state.reserve_addresses(len_bytes, PAGE_BYTES)?
        };
        let memory = Arc::new(Memory::new(address, size_bytes, &self.device.log).ok_or(Errno::ENOMEM)?);
        let objects = &mut state.file(self.file)?.objects;
        if kind == BoKind::DevHeap {
            objects.heap.push_chunk(&memory);
        }
        let place = Place::Pages { memory, is_user: false };
        Ok(objects.insert(|handle| Bo::new(handle, kind, size_bytes, place)))
    }

    fn create_heap(&self, state: &mut State, size_bytes: u64) -> Result<Arc<Bo>, Errno> {
        let spec = &self.device.spec;
        let max_bytes = if spec.heap_grows() { HEAP_MAX_BYTES } else { HEAP_CHUNK_BYTES };
        let present = state.file(self.file)?.objects.heap.size_bytes();
        if present > 0 {
            match self.profile() {
                Profile::MainlineOld | Profile::OutOfTree => return Err(Errno::EBUSY),
                Profile::MainlineNew if !spec.heap_grows() => return Err(Errno::EOPNOTSUPP),
                Profile::MainlineNew => {}
            }
        }
        if size_bytes == 0 || !size_bytes.is_multiple_of(HEAP_CHUNK_BYTES) || size_bytes > max_bytes {
            return Err(Errno::EINVAL);
        }
        if present + size_bytes > max_bytes {
            return Err(Errno::ENOSPC);
        }
        self.insert_pages(state, BoKind::DevHeap, size_bytes)
    }

    fn create_dev(&self, state: &mut State, size_bytes: u64) -> Result<Arc<Bo>, Errno> {
        let grows = self.device.spec.heap_grows();
        let is_new = self.profile() == Profile::MainlineNew;
        let objects = &mut state.file(self.file)?.objects;
        if size_bytes == 0 {
            return Err(Errno::EINVAL);
        }
        if !objects.heap.is_mapped() {
            return Err(if is_new { Errno::EAGAIN } else { Errno::EINVAL });
        }
        objects.sweep();
        let Some(offset_bytes) = objects.heap.take(size_bytes) else {
            let can_grow = grows && objects.heap.size_bytes() < HEAP_MAX_BYTES;
            return Err(if can_grow { Errno::EAGAIN } else { Errno::ENOSPC });
        };
        objects.heap.poison(offset_bytes, size_bytes);
        Ok(objects.insert(|handle| Bo::new(handle, BoKind::Dev, size_bytes, Place::Heap { offset_bytes })))
    }

    fn adopt(&self, state: &mut State, pages: &Arc<dyn Mapping>) -> Result<Arc<Bo>, Errno> {
        let (address, len_bytes) = (pages.address(), pages.len_bytes());
        if len_bytes == 0 || !address.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Errno::EINVAL);
        }
        let memory = Arc::new(Memory::user(pages, &self.device.log));
        let place = Place::Pages { memory, is_user: true };
        let objects = &mut state.file(self.file)?.objects;
        Ok(objects.insert(|handle| Bo::new(handle, BoKind::Share, len_bytes, place)))
    }

    fn bo(&self, state: &mut State, handle: BoHandle, missing: Errno) -> Result<Arc<Bo>, Errno> {
        let bo = state.file(self.file)?.objects.get(handle.0).map(Arc::clone);
        bo.ok_or(missing)
    }

    /// A context id in the way of the profile.
    fn context_id(&self, state: &mut State) -> Result<u32, Errno> {
        let is_device_wide = self.profile() == Profile::MainlineNew;
        let max = if is_device_wide { DEVICE_IDS } else { CLIENT_IDS };
        let is_taken = |state: &State, id| {
            state.contexts.values().any(|context| context.id == id && (is_device_wide || context.file == self.file))
        };
        let last = if is_device_wide { state.last_context_id } else { state.file(self.file)?.last_context_id };
        let id = (0..max).map(|i| (last + i) % max + 1).find(|id| !is_taken(state, *id)).ok_or(Errno::ENOSPC)?;
        state.last_context_id = id;
        state.file(self.file)?.last_context_id = id;
        Ok(id)
    }

    /// The context's key in the device, where the client may still use it.
    fn context(&self, state: &State, context: ContextHandle) -> Result<u64, Errno> {
        state.context_key(self.file, context.0).ok_or_else(|| {
            self.device.diagnose(DiagnosisKind::StaleContext, format!("context {context} does not exist"));
            Errno::EINVAL
        })
    }

    /// The command buffer of a submission or of a chain's entry.
    fn command(&self, state: &mut State, handle: u32) -> Result<Arc<Bo>, Errno> {
        let bo = self.bo(state, BoHandle(handle), Errno::EINVAL)?;
        let is_allowed = match self.profile() {
            Profile::MainlineOld => bo.kind == BoKind::Cmd && bo.size_bytes <= COMMAND_MAX_BYTES,
            Profile::MainlineNew | Profile::OutOfTree => matches!(bo.kind, BoKind::Cmd | BoKind::Share),
        };
        if is_allowed { Ok(bo) } else { Err(Errno::EINVAL) }
    }

    fn entries(&self, state: &mut State, command: &Bo) -> Result<Option<Vec<Arc<Bo>>>, Errno> {
        let words = packet_words(command);
        if words.first().is_none_or(|header| Header(*header).opcode() != opcode::CMD_CHAIN) {
            return Ok(None);
        }
        let handles = packet::chain_handles(&words).map_err(|reason| {
            self.device.diagnose(DiagnosisKind::BadPacket, reason);
            Errno::EINVAL
        })?;
        handles.into_iter().map(|handle| self.command(state, handle)).collect::<Result<Vec<_>, _>>().map(Some)
    }
}

impl fmt::Debug for VirtualDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualDriver({}, file {})", self.device.spec, self.file)
    }
}

impl Drop for VirtualDriver {
    fn drop(&mut self) {
        self.device.lock().close_file(&self.device, self.file);
    }
}

impl Driver for VirtualDriver {
    fn version(&self) -> Result<DriverVersion, Errno> {
        drop(self.call(Call::Version)?);
        let (major, minor) = self.profile().version();
        Ok(DriverVersion {
            name: DRIVER_NAME.to_owned(),
            description: "AMD XDNA DRM implementation".to_owned(),
            major,
            minor,
            patch: 0,
        })
    }

    fn get_info(&self, param: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
        let state = self.call(Call::GetInfo)?;
        query::get_info(&state, &self.device.spec, param, buffer)
    }

    fn get_array(&self, param: u32, shape: ArrayShape, buffer: &mut [u8]) -> Result<ArrayShape, Errno> {
        let state = self.call(Call::GetArray)?;
        query::get_array(&state, &self.device.spec, param, shape, buffer)
    }

    fn create_bo(&self, request: &CreateBo<'_>) -> Result<BoHandle, Errno> {
        let call = match request.kind {
            BoKind::DevHeap => Call::CreateHeap,
            BoKind::Dev => Call::CreateDev,
            BoKind::Share | BoKind::Cmd => Call::CreateShare,
        };
        let mut state = self.call(call)?;
        let bo = match (request.kind, request.user_memory) {
            (BoKind::Share, Some(pages)) if request.size_bytes == 0 => self.adopt(&mut state, pages)?,
            (_, Some(_)) => return Err(Errno::EINVAL),
            (BoKind::DevHeap, None) => self.create_heap(&mut state, request.size_bytes)?,
            (BoKind::Dev, None) => self.create_dev(&mut state, request.size_bytes)?,
            (BoKind::Share | BoKind::Cmd, None) if request.size_bytes == 0 => return Err(Errno::EINVAL),
            (kind, None) => self.insert_pages(&mut state, kind, request.size_bytes)?,
        };
        Ok(BoHandle(bo.handle))
    }

    fn bo_info(&self, bo: BoHandle) -> Result<BoInfo, Errno> {
        let mut state = self.call(Call::BoInfo)?;
        let bo = self.bo(&mut state, bo, Errno::ENOENT)?;
        Ok(match &bo.place {
            Place::Heap { offset_bytes } => {
                let heap = state.file(self.file)?.objects.heap.address();
                BoInfo {
                    map_offset: None,
                    host_address: heap.map(|address| address + offset_bytes),
                    device_address: Some(heap_address(*offset_bytes)),
                }
            }
            Place::Pages { memory, is_user } => {
                let host_address = (*is_user || memory.is_mapped()).then_some(memory.address());
                let window = state.file(self.file)?.window.unwrap_or(0);
                let device_address = match bo.kind {
                    BoKind::DevHeap => Some(heap_address(memory.address() - window)),
                    _ => host_address,
                };
                let map_offset = Some(MAP_OFFSETS + (u64::from(bo.handle) << 32));
                BoInfo { map_offset, host_address, device_address }
            }
        })
    }

    fn map(&self, request: &MapRequest) -> Result<Arc<dyn Mapping>, Errno> {
        let mut state = self.call(Call::Map)?;
        let bo = self.bo(&mut state, request.bo, Errno::EINVAL)?;
        let Place::Pages { memory, is_user: false } = &bo.place else { return Err(Errno::EINVAL) };
        let is_right_offset = request.map_offset == MAP_OFFSETS + (u64::from(bo.handle) << 32);
        if !is_right_offset || request.len_bytes != memory.len_bytes() {
            return Err(Errno::EINVAL);
        }
        let window = state.file(self.file)?.window.unwrap_or(0);
        let is_right_place = match (bo.kind, request.placement) {
            (BoKind::DevHeap, Placement::HeapWindow { offset_bytes }) => {
                offset_bytes.is_multiple_of(HEAP_CHUNK_BYTES) && window + offset_bytes == memory.address()
            }
            (BoKind::DevHeap, Placement::Anywhere) => false,
            (_, placement) => placement == Placement::Anywhere,
        };
        if !is_right_place {
            return Err(Errno::EINVAL);
        }
        if bo.is_mapped.load(Ordering::Acquire) {
            self.device.diagnose(DiagnosisKind::Misuse, format!("buffer {} is mapped a second time", bo.handle));
            return Err(Errno::EINVAL);
        }
        Ok(Arc::new(VirtualMapping::new(memory, &bo.is_mapped)))
    }

    fn sync_bo(&self, bo: BoHandle, direction: SyncDirection, range: Range<u64>) -> Result<(), Errno> {
        let mut state = self.call(Call::SyncBo)?;
        let bo = self.bo(&mut state, bo, Errno::ENOENT)?;
        let len_bytes = range.end.checked_sub(range.start).ok_or(Errno::EINVAL)?;
        let end = if self.profile().is_mainline() {
            if range.start >= bo.size_bytes {
                return Err(Errno::EINVAL);
            }
            range.end.min(bo.size_bytes)
        } else {
            if range.end > bo.size_bytes {
                return Err(Errno::EINVAL);
            }
            range.start + len_bytes
        };
        let parts = match &bo.place {
            Place::Pages { memory, .. } => vec![(memory, range.start, end - range.start)],
            Place::Heap { offset_bytes } => {
                let heap = &state.file(self.file)?.objects.heap;
                heap.parts(offset_bytes + range.start, end - range.start).ok_or(Errno::EINVAL)?
            }
        };
        for (memory, at, len) in parts {
            let moved = match direction {
                SyncDirection::ToDevice => memory.flush(at..at + len),
                SyncDirection::FromDevice => memory.invalidate(at..at + len),
            };
            moved.map_err(|_| Errno::EINVAL)?;
        }
        // The recent mainline driver flushes, and then finds that the object is no debug buffer.
        match (self.profile(), direction) {
            (Profile::MainlineNew, SyncDirection::FromDevice) => Err(Errno::EINVAL),
            _ => Ok(()),
        }
    }

    fn close_bo(&self, bo: BoHandle) -> Result<(), Errno> {
        let mut state = self.call(Call::CloseBo)?;
        let file = state.file(self.file)?;
        let bo = file.objects.close(bo.0).ok_or(Errno::EINVAL)?;
        file.exports.retain(|_, (_, exported)| !Arc::ptr_eq(exported, &bo));
        if let (BoKind::DevHeap, Some(memory)) = (bo.kind, bo.memory()) {
            if file.objects.heap.used_bytes() > 0 {
                self.device.diagnose(DiagnosisKind::Misuse, "a heap chunk is closed before what lies in the heap");
            }
            file.objects.heap.remove_last_chunk(memory);
        }
        drop(bo);
        file.objects.sweep();
        Ok(())
    }

    /// The file holds no data, only the identity of the object: the virtual NPU shares memory with nobody.
    fn export_dma_buf(&self, bo: BoHandle) -> Result<OwnedFd, Errno> {
        let mut state = self.call(Call::Export)?;
        let bo = self.bo(&mut state, bo, Errno::ENOENT)?;
        if !matches!(bo.kind, BoKind::Share | BoKind::Cmd) {
            return Err(Errno::EOPNOTSUPP);
        }
        let fd = memfd_create("virtual-npu", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, bo.size_bytes)?;
        let stat = fstat(&fd)?;
        let kept = fd.as_fd().try_clone_to_owned().map_err(|_| Errno::EMFILE)?;
        state.file(self.file)?.exports.insert((stat.st_dev, stat.st_ino), (kept, bo));
        Ok(fd)
    }

    fn import_dma_buf(&self, fd: BorrowedFd<'_>) -> Result<ImportedBo, Errno> {
        let mut state = self.call(Call::Import)?;
        let stat = fstat(fd)?;
        let key = (stat.st_dev, stat.st_ino);
        let file = state.file(self.file)?;
        if let Some((_, bo)) = file.exports.get(&key) {
            return Ok(ImportedBo { bo: BoHandle(bo.handle), size_bytes: bo.size_bytes });
        }
        // Another file's export: the same memory under a handle of its own.
        let foreign = state.files.values().find_map(|file| file.exports.get(&key)).map(|(_, bo)| Arc::clone(bo));
        let foreign = foreign.ok_or(Errno::EINVAL)?;
        let (kind, size_bytes, place) = (foreign.kind, foreign.size_bytes, foreign.place.clone());
        let bo = state.file(self.file)?.objects.insert(|handle| Bo::new(handle, kind, size_bytes, place));
        Ok(ImportedBo { bo: BoHandle(bo.handle), size_bytes })
    }

    fn create_context(&self, spec: &ContextSpec) -> Result<CreatedContext, Errno> {
        let mut state = self.call(Call::CreateContext)?;
        let facts = self.device.spec.silicon.facts();
        let usable = facts.columns - facts.unusable_columns;
        if spec.num_tiles == 0 {
            return Err(Errno::EINVAL);
        }
        let wanted = spec.num_tiles / facts.core_rows;
        if wanted == 0 || wanted > usable {
            return Err(Errno::EINVAL);
        }
        if state.file(self.file)?.objects.heap.size_bytes() == 0 {
            return Err(Errno::ENOENT);
        }
        let limit = match self.profile() {
            Profile::OutOfTree => OUT_OF_TREE_CONTEXTS,
            _ => facts.context_limit as usize,
        };
        if state.contexts.len() >= limit {
            // An exhausted pool was seen on npu1 as a time-out of the firmware's message.
            return Err(Errno::ETIMEDOUT);
        }
        let file = state.file(self.file)?;
        file.objects.sweep();
        let mut slots = Vec::with_capacity(CONTEXT_SLOTS);
        while slots.len() < CONTEXT_SLOTS {
            match file.objects.heap.take(SLOT_BYTES) {
                Some(slot) => slots.push(slot),
                None => {
                    slots.iter().for_each(|slot| file.objects.heap.give_back(*slot));
                    return Err(Errno::ENOSPC);
                }
            }
        }
        let syncobj = (1..).find(|handle| !file.syncobjs.contains_key(handle)).ok_or(Errno::ENOMEM)?;
        let id = match self.context_id(&mut state) {
            Ok(id) => id,
            Err(errno) => {
                let heap = &mut state.file(self.file)?.objects.heap;
                slots.iter().for_each(|slot| heap.give_back(*slot));
                return Err(errno);
            }
        };
        state.file(self.file)?.syncobjs.insert(syncobj, crate::device::Timeline::default());
        // Second-generation firmware gives every context the whole array, one after the other.
        let (columns, start) = if facts.is_preemptible { (usable, 0) } else { (wanted, facts.unusable_columns) };
        let mut context = Context::new(self.file, id, syncobj, columns, start, spec.qos);
        context.slots = slots;
        state.insert_context(context);
        Ok(CreatedContext { context: ContextHandle(id), syncobj: SyncobjHandle(syncobj) })
    }

    fn config_cus(&self, context: ContextHandle, units: &[CuConfig]) -> Result<(), Errno> {
        let mut state = self.call(Call::ConfigCus)?;
        let key = self.context(&state, context)?;
        if 8 + 8 * units.len() > 4096 {
            return Err(Errno::E2BIG);
        }
        if units.is_empty() || units.len() > MAX_UNITS {
            return Err(Errno::EINVAL);
        }
        let bos = units.iter().map(|unit| self.bo(&mut state, unit.bo, Errno::EINVAL));
        let bos = bos.collect::<Result<Vec<_>, _>>()?;
        if bos.iter().any(|bo| bo.kind != BoKind::Dev) {
            return Err(Errno::EINVAL);
        }
        let Some(context) = state.contexts.get_mut(&key) else { return Err(Errno::EINVAL) };
        if context.units.is_some() {
            if !context.queue.is_empty() {
                let detail = "compute units are configured while a command is in flight";
                self.device.diagnose(DiagnosisKind::ConfigurationInFlight, detail);
            }
            return Err(Errno::EINVAL);
        }
        context.units = Some(bos);
        Ok(())
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), Errno> {
        let mut state = self.call(Call::DestroyContext)?;
        let key = self.context(&state, context)?;
        state.end_context(&self.device, key);
        if self.device.spec.silicon.facts().evicts_together {
            // Published for npu1: after one context of a process went away, the firmware refuses the others'
            // submissions.
            let others = state.contexts.values_mut().filter(|context| context.file == self.file);
            others.for_each(|context| context.is_evicted = true);
        }
        Ok(())
    }

    fn exec(&self, command: &ExecCommand<'_>) -> Result<u64, Errno> {
        let mut state = self.call(Call::Exec)?;
        let key = self.context(&state, command.context)?;
        if command.args.len() > EXEC_MAX_ARGS {
            return Err(Errno::EINVAL);
        }
        if command.args.windows(2).any(|pair| pair[0] >= pair[1]) {
            let detail = format!("argument handles are not unique and ascending: {:?}", command.args);
            self.device.diagnose(DiagnosisKind::Misuse, detail);
        }
        let bo = self.command(&mut state, command.command.0)?;
        let args = command.args.iter().map(|arg| self.bo(&mut state, *arg, Errno::ENOENT));
        let args = args.collect::<Result<Vec<_>, _>>()?;
        let entries = self.entries(&mut state, &bo)?;
        if state.contexts.get(&key).is_some_and(|context| context.is_evicted) {
            return Err(Errno::ENOENT);
        }
        // Submission blocks while the queue is full.
        while state.contexts.get(&key).is_some_and(|context| context.queue.len() >= QUEUE_DEPTH) {
            if !state.advance(&self.device, None) {
                break;
            }
        }
        if state.is_removed {
            return Err(Errno::ENODEV);
        }
        let now = state.now;
        let Some(context) = state.contexts.get_mut(&key) else { return Err(Errno::ENODEV) };
        let sequence = context.next_sequence;
        context.next_sequence += 1;
        let syncobj = context.syncobj;
        context.queue.push_back(Job { sequence, command: bo, entries, args, submitted_at: now, running: None });
        if let Some(timeline) = state.file(self.file)?.syncobjs.get_mut(&syncobj) {
            timeline.submitted = sequence + 1;
        }
        Ok(sequence)
    }

    fn wait_timeline(&self, syncobj: SyncobjHandle, point: u64, deadline: Option<Duration>) -> Result<(), Errno> {
        let mut state = self.call(Call::Wait)?;
        loop {
            if state.is_removed {
                return Err(Errno::ENODEV);
            }
            let timeline = *state.file(self.file)?.syncobjs.get(&syncobj.0).ok_or(Errno::ENOENT)?;
            // Point 0 means the newest fence to the timeline's code: this model reports it as early as it may.
            let is_early = point == 0 && timeline.submitted > 0;
            if is_early || timeline.signalled > point {
                return Ok(());
            }
            if !state.advance(&self.device, deadline) {
                break;
            }
        }
        match deadline {
            Some(deadline) => state.now = state.now.max(deadline),
            None => self.device.diagnose(
                DiagnosisKind::Misuse,
                format!("a wait for ever on point {point}, which nobody has submitted"),
            ),
        }
        Err(Errno::ETIME)
    }

    fn destroy_syncobj(&self, syncobj: SyncobjHandle) -> Result<(), Errno> {
        let mut state = self.call(Call::DestroySyncobj)?;
        state.file(self.file)?.syncobjs.remove(&syncobj.0).map(|_| ()).ok_or(Errno::ENOENT)
    }

    /// Virtual time: it passes while somebody waits.
    fn now(&self) -> Duration {
        self.device.lock().now
    }

    fn pause(&self) {
        let mut state = self.device.lock();
        let until = state.now + POLL;
        if !state.advance(&self.device, Some(until)) {
            state.now = until;
        }
    }

    fn device_time(&self, context: ContextHandle, sequence: u64) -> Option<DeviceTime> {
        let state = self.device.lock();
        let key = state.context_key(self.file, context.0)?;
        let elapsed = state.contexts.get(&key)?.time(sequence)?;
        Some(DeviceTime { elapsed, claim: Claim::Modelled })
    }
}
