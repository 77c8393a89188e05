//! The device heap: chunks of 64 MiB, mapped side by side, from which the driver cuts device memory.

use crate::driver::{
    BoHandle, BoKind, CreateBo, Driver, HEAP_BASE, HEAP_CHUNK_BYTES, HEAP_MAX_BYTES, MapRequest, Mapping, OutOfMapping,
    Placement,
};
use crate::errno::Errno;
use crate::error::{Operation, driver_error, retry, retry_interrupted};
use npuhal_core::DeviceError;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Called with each piece of an access: its mapping, the start inside it, and the piece's range inside the access.
pub(crate) type VisitPart<'a> = dyn FnMut(&dyn Mapping, u64, Range<usize>) -> Result<(), OutOfMapping> + 'a;

/// Chunks of the device heap of one open file. It lives as long as the file.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    chunks: RwLock<Vec<Chunk>>,
    /// Held while a chunk is added.
    growing: Mutex<()>,
}

#[derive(Debug)]
struct Chunk {
    bo: BoHandle,
    mapping: Arc<dyn Mapping>,
}

impl Heap {
    /// Creates and maps the first chunk.
    pub(crate) fn create(driver: &dyn Driver) -> Result<Self, DeviceError> {
        let heap = Self::default();
        heap.add_chunk(driver, Operation::CreateHeap)?;
        Ok(heap)
    }

    /// Adds a chunk, unless somebody else did since there were `seen` chunks.
    pub(crate) fn grow(&self, driver: &dyn Driver, seen: usize) -> Result<(), DeviceError> {
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.len() > seen {
            return Ok(());
        }
        self.add_chunk(driver, Operation::GrowHeap)
    }

    fn add_chunk(&self, driver: &dyn Driver, operation: Operation) -> Result<(), DeviceError> {
        let offset_bytes = self.len() as u64 * HEAP_CHUNK_BYTES;
        if offset_bytes >= HEAP_MAX_BYTES {
            return Err(driver_error(operation, Errno::ENOSPC));
        }
        let request = CreateBo { kind: BoKind::DevHeap, size_bytes: HEAP_CHUNK_BYTES, user_memory: None };
        let bo = retry_interrupted(|| driver.create_bo(&request)).map_err(|errno| driver_error(operation, errno))?;
        match map_chunk(driver, bo, offset_bytes) {
            Ok(mapping) => {
                self.chunks.write().unwrap_or_else(PoisonError::into_inner).push(Chunk { bo, mapping });
                Ok(())
            }
            Err(error) => {
                close(driver, bo);
                Err(error)
            }
        }
    }

    /// Number of chunks.
    pub(crate) fn len(&self) -> usize {
        self.chunks.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Calls `visit` with each chunk's part of `len_bytes` at `offset_bytes` from the heap's start.
    pub(crate) fn each_part(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        visit: &mut VisitPart<'_>,
    ) -> Result<(), OutOfMapping> {
        let chunks = self.chunks.read().unwrap_or_else(PoisonError::into_inner);
        let size_bytes = chunks.len() as u64 * HEAP_CHUNK_BYTES;
        let end = offset_bytes.checked_add(len_bytes).filter(|end| *end <= size_bytes);
        let end = end.ok_or(OutOfMapping { at_bytes: offset_bytes, len_bytes, size_bytes })?;
        let mut at = offset_bytes;
        while at < end {
            let index = at / HEAP_CHUNK_BYTES;
            let stop = end.min((index + 1) * HEAP_CHUNK_BYTES);
            let part = (at - offset_bytes) as usize..(stop - offset_bytes) as usize;
            visit(&*chunks[index as usize].mapping, at % HEAP_CHUNK_BYTES, part)?;
            at = stop;
        }
        Ok(())
    }

    /// Unmaps and closes the chunks. Nothing may use the heap any more.
    pub(crate) fn close(&mut self, driver: &dyn Driver) {
        for Chunk { bo, mapping } in self.chunks.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            drop(mapping);
            close(driver, bo);
        }
    }
}

fn map_chunk(driver: &dyn Driver, bo: BoHandle, offset_bytes: u64) -> Result<Arc<dyn Mapping>, DeviceError> {
    let info = retry(|| driver.bo_info(bo)).map_err(|errno| driver_error(Operation::BufferInfo, errno))?;
    let map_offset = info.map_offset.ok_or_else(|| driver_error(Operation::Map, Errno::EINVAL))?;
    let placement = Placement::HeapWindow { offset_bytes };
    let request = MapRequest { bo, map_offset, len_bytes: HEAP_CHUNK_BYTES, placement };
    retry_interrupted(|| driver.map(&request)).map_err(|errno| driver_error(Operation::Map, errno))
}

/// Closes a buffer object; a failure is worth a warning, but there is nothing to do about it.
pub(crate) fn close(driver: &dyn Driver, bo: BoHandle) {
    if let Err(errno) = retry(|| driver.close_bo(bo)) {
        tracing::warn!(bo = bo.0, %errno, "closing a buffer object failed");
    }
}

/// Offset inside the heap of a device address.
pub(crate) fn offset_in_heap(device_address: u64) -> Option<u64> {
    device_address.checked_sub(HEAP_BASE).filter(|offset| *offset < HEAP_MAX_BYTES)
}
