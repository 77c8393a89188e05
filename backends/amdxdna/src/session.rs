//! One open device file and everything that is counted for it: heap, buffer objects, retries.

use crate::driver::{
    BoHandle, BoInfo, BoKind, CreateBo, DRIVER_NAME, Driver, DriverVersion, ImportedBo, MapRequest, Mapping,
    PAGE_BYTES, Placement,
};
use crate::errno::Errno;
use crate::error::{Operation, driver_error, retry, retry_interrupted};
use crate::heap::{self, Heap};
use crate::memory_object::{Backing, MemoryObject};
use npuhal_core::DeviceError;
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One open device file.
#[derive(Debug)]
pub(crate) struct Session {
    driver: Arc<dyn Driver>,
    /// Device id, for messages.
    id: String,
    version: DriverVersion,
    heap: Heap,
    /// Live objects that have a handle of their own; importing may give out a handle that is in use already.
    objects: Mutex<HashMap<BoHandle, Weak<MemoryObject>>>,
    patched_bytes: AtomicU64,
    flushed_lines: AtomicU64,
}

impl Session {
    /// Checks the driver's name, creates the device heap.
    pub(crate) fn open(driver: Arc<dyn Driver>, id: &str) -> Result<Arc<Self>, DeviceError> {
        let version = retry(|| driver.version()).map_err(|errno| driver_error(Operation::Version, errno))?;
        if version.name != DRIVER_NAME {
            return Err(DeviceError::Unavailable {
                device: id.to_owned(),
                reason: format!("wanted the driver `{DRIVER_NAME}`, found `{}`", version.name),
                remedy: "load the driver: `sudo modprobe amdxdna`".to_owned(),
            });
        }
        let heap = Heap::create(&*driver)?;
        Ok(Arc::new(Self {
            driver,
            id: id.to_owned(),
            version,
            heap,
            objects: Mutex::default(),
            patched_bytes: AtomicU64::new(0),
            flushed_lines: AtomicU64::new(0),
        }))
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    pub(crate) fn version(&self) -> &DriverVersion {
        &self.version
    }

    pub(crate) fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Number of live buffer objects, without the heap.
    pub(crate) fn live_objects(&self) -> usize {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Notes what binding a kernel or argument wrote to code in device memory.
    pub(crate) fn count_patch(&self, written_bytes: u64, flushed_lines: u64) {
        self.patched_bytes.fetch_add(written_bytes, Ordering::Relaxed);
        self.flushed_lines.fetch_add(flushed_lines, Ordering::Relaxed);
    }

    /// Bytes of code written, and cache lines flushed for it, since the file was opened.
    pub(crate) fn patch_counts(&self) -> (u64, u64) {
        (self.patched_bytes.load(Ordering::Relaxed), self.flushed_lines.load(Ordering::Relaxed))
    }

    /// Allocates `size_bytes` of `kind`: [`BoKind::Dev`], [`BoKind::Share`] or [`BoKind::Cmd`].
    pub(crate) fn allocate(self: &Arc<Self>, kind: BoKind, size_bytes: u64) -> Result<Arc<MemoryObject>, DeviceError> {
        if size_bytes == 0 {
            return Err(DeviceError::Misuse { operation: "allocate", reason: "a buffer of 0 bytes".to_owned() });
        }
        let bo = match kind {
            BoKind::Dev => self.create_in_heap(size_bytes)?,
            _ => {
                let request = CreateBo { kind, size_bytes, user_memory: None };
                retry_interrupted(|| self.driver.create_bo(&request))
                    .map_err(|errno| self.host_memory_error(errno, size_bytes))?
            }
        };
        let object = self.guarded(bo, || self.finish(bo, kind, size_bytes))?;
        if kind == BoKind::Share {
            // The kernel zeroed the pages through the cache: lines that are still dirty would overwrite the device's data.
            object.flush_all().map_err(|error| object.out_of_range(error))?;
        }
        Ok(object)
    }

    /// Lends `memory` to the device; the object is `size_bytes` long and keeps the mapping alive.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        memory: Arc<dyn Mapping>,
        size_bytes: u64,
    ) -> Result<Arc<MemoryObject>, DeviceError> {
        if size_bytes == 0 || size_bytes > memory.len_bytes() {
            return Err(DeviceError::OutOfRange { at_bytes: 0, len_bytes: size_bytes, size_bytes: memory.len_bytes() });
        }
        let request = CreateBo { kind: BoKind::Share, size_bytes: 0, user_memory: Some(&memory) };
        let bo = retry_interrupted(|| self.driver.create_bo(&request))
            .map_err(|errno| driver_error(Operation::AdoptMemory, errno))?;
        let address = memory.address();
        let object = self.register(bo, BoKind::Share, size_bytes, address, Backing::Mapped(memory));
        object.flush_all().map_err(|error| object.out_of_range(error))?;
        Ok(object)
    }

    /// Imports a dma-buf; an export of this session comes back as the object it was.
    pub(crate) fn import(self: &Arc<Self>, fd: BorrowedFd<'_>) -> Result<Arc<MemoryObject>, DeviceError> {
        // The table stays locked from the import to the entry, so that nobody closes the handle in between.
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let ImportedBo { bo, size_bytes } =
            retry(|| self.driver.import_dma_buf(fd)).map_err(|errno| driver_error(Operation::Import, errno))?;
        if let Some(object) = objects.get(&bo).and_then(Weak::upgrade) {
            return Ok(object);
        }
        let result = self.backing(bo, BoKind::Share, size_bytes);
        let (device_address, backing) = result.inspect_err(|_| heap::close(&*self.driver, bo))?;
        let object = MemoryObject::new(self, bo, BoKind::Share, size_bytes, device_address, backing);
        objects.insert(bo, Arc::downgrade(&object));
        Ok(object)
    }

    /// Exports an object as dma-buf.
    pub(crate) fn export(&self, object: &MemoryObject) -> Result<OwnedFd, DeviceError> {
        retry(|| self.driver.export_dma_buf(object.handle())).map_err(|errno| driver_error(Operation::Export, errno))
    }

    /// Called by the last owner of an object, after its memory was unmapped.
    pub(crate) fn close(&self, bo: BoHandle) {
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        // An import that ran since the last owner let go has taken over the handle.
        if objects.get(&bo).is_none_or(|object| object.strong_count() == 0) {
            objects.remove(&bo);
            heap::close(&*self.driver, bo);
        }
    }

    /// Device memory. `EAGAIN` asks for a larger heap: that is tried once, never in a loop.
    fn create_in_heap(&self, size_bytes: u64) -> Result<BoHandle, DeviceError> {
        let request = CreateBo { kind: BoKind::Dev, size_bytes, user_memory: None };
        let chunks = self.heap.len();
        let first = retry_interrupted(|| self.driver.create_bo(&request));
        let result = match first {
            Err(Errno::EAGAIN) => {
                self.heap.grow(self.driver(), chunks).map_err(|error| self.heap_full(size_bytes, &why_not(&error)))?;
                retry_interrupted(|| self.driver.create_bo(&request))
            }
            result => result,
        };
        result.map_err(|errno| match errno {
            Errno::ENOSPC | Errno::EAGAIN | Errno::ENOMEM => self.heap_full(size_bytes, &errno.name()),
            errno => driver_error(Operation::AllocateDevice, errno),
        })
    }

    fn heap_full(&self, wanted_bytes: u64, why: &str) -> DeviceError {
        DeviceError::OutOfMemory {
            device: self.id.clone(),
            memory: "device heap",
            wanted_bytes,
            available_bytes: None,
            remedy: format!("close a model or another context of this process first ({why})"),
        }
    }

    fn host_memory_error(&self, errno: Errno, wanted_bytes: u64) -> DeviceError {
        match errno {
            Errno::ENOMEM | Errno::ENOSPC | Errno::EAGAIN => DeviceError::OutOfMemory {
                device: self.id.clone(),
                memory: "host memory for the device",
                wanted_bytes,
                available_bytes: None,
                remedy: format!("close other programs ({})", errno.name()),
            },
            errno => driver_error(Operation::AllocateHost, errno),
        }
    }

    /// Addresses and mapping of a new object.
    fn finish(self: &Arc<Self>, bo: BoHandle, kind: BoKind, size_bytes: u64) -> Result<Arc<MemoryObject>, DeviceError> {
        let (device_address, backing) = self.backing(bo, kind, size_bytes)?;
        Ok(self.register(bo, kind, size_bytes, device_address, backing))
    }

    fn backing(&self, bo: BoHandle, kind: BoKind, size_bytes: u64) -> Result<(u64, Backing), DeviceError> {
        let info = retry(|| self.driver.bo_info(bo)).map_err(|errno| driver_error(Operation::BufferInfo, errno))?;
        if kind == BoKind::Dev {
            return self.heap_backing(&info, size_bytes);
        }
        let map_offset = info.map_offset.ok_or_else(|| driver_error(Operation::Map, Errno::EINVAL))?;
        let len_bytes = size_bytes.checked_next_multiple_of(PAGE_BYTES);
        let len_bytes = len_bytes.ok_or_else(|| driver_error(Operation::Map, Errno::ENOMEM))?;
        let request = MapRequest { bo, map_offset, len_bytes, placement: Placement::Anywhere };
        let mapping =
            retry_interrupted(|| self.driver.map(&request)).map_err(|errno| driver_error(Operation::Map, errno))?;
        // Where the device shares the process's address space, the address of the first mapping is the device address.
        let device_address = info.device_address.unwrap_or_else(|| mapping.address());
        Ok((device_address, Backing::Mapped(mapping)))
    }

    fn heap_backing(&self, info: &BoInfo, size_bytes: u64) -> Result<(u64, Backing), DeviceError> {
        let device_address = info.device_address.ok_or_else(|| driver_error(Operation::BufferInfo, Errno::EINVAL))?;
        let offset = heap::offset_in_heap(device_address);
        let capacity = self.heap.len() as u64 * crate::driver::HEAP_CHUNK_BYTES;
        let fits = |offset: &u64| offset.checked_add(size_bytes).is_some_and(|end| end <= capacity);
        let offset = offset.filter(fits).ok_or_else(|| DeviceError::Driver {
            operation: Operation::AllocateDevice.words().to_owned(),
            code: "address".to_owned(),
            meaning: format!("the driver placed {size_bytes} bytes at {device_address:#x}, outside the device heap"),
            remedy: "this is a defect of npuhal or of the driver; please report it with this message".to_owned(),
        })?;
        Ok((device_address, Backing::Heap { offset_bytes: offset }))
    }

    fn register(
        self: &Arc<Self>,
        bo: BoHandle,
        kind: BoKind,
        size_bytes: u64,
        device_address: u64,
        backing: Backing,
    ) -> Arc<MemoryObject> {
        let object = MemoryObject::new(self, bo, kind, size_bytes, device_address, backing);
        self.objects.lock().unwrap_or_else(PoisonError::into_inner).insert(bo, Arc::downgrade(&object));
        object
    }

    /// Runs `finish`; closes `bo` when it fails.
    fn guarded<T>(&self, bo: BoHandle, finish: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        finish().inspect_err(|_| heap::close(&*self.driver, bo))
    }
}

/// Why the heap could not grow, in a few words.
fn why_not(error: &DeviceError) -> String {
    match error {
        DeviceError::Driver { code, meaning, .. } => format!("{meaning}, {code}"),
        error => error.to_string(),
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Self { driver, heap, .. } = self;
        heap.close(&**driver);
    }
}
