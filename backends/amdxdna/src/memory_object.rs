//! A buffer object with its memory: raw access, cache maintenance, and the count of submissions that hold it.

use crate::driver::{BoHandle, BoKind, CACHE_LINE_BYTES, Mapping, OutOfMapping};
use crate::heap::VisitPart;
use crate::session::Session;
use npuhal_core::DeviceError;
use npuhal_core::device::BufferObject;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Where the host reaches the memory of an object.
#[derive(Debug)]
pub(crate) enum Backing {
    /// A mapping of its own.
    Mapped(Arc<dyn Mapping>),
    /// A part of the device heap.
    Heap {
        /// From the start of the heap.
        offset_bytes: u64,
    },
}

/// A buffer object. Closed when the last owner lets go.
pub(crate) struct MemoryObject {
    /// Dropped before `owned`: closing an object that is still mapped would keep its memory.
    backing: Backing,
    owned: OwnedHandle,
    kind: BoKind,
    size_bytes: u64,
    device_address: u64,
    /// Number of submissions that hold the object; locked during host access through [`BufferObject`].
    holds: Mutex<u32>,
    /// The object itself: a [`BufferObject`] is turned back into its owner with it.
    this: Weak<Self>,
}

impl MemoryObject {
    pub(crate) fn new(
        session: &Arc<Session>,
        handle: BoHandle,
        kind: BoKind,
        size_bytes: u64,
        device_address: u64,
        backing: Backing,
    ) -> Arc<Self> {
        let owned = OwnedHandle { session: Arc::clone(session), handle };
        Arc::new_cyclic(|this| {
            let (holds, this) = (Mutex::new(0), Weak::clone(this));
            Self { backing, owned, kind, size_bytes, device_address, holds, this }
        })
    }

    /// The owner of `object`, where this backend made it.
    pub(crate) fn of(object: &dyn BufferObject) -> Option<Arc<Self>> {
        object.as_any().downcast_ref::<Self>()?.this.upgrade()
    }

    pub(crate) fn handle(&self) -> BoHandle {
        self.owned.handle
    }

    pub(crate) fn device_address(&self) -> u64 {
        self.device_address
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.owned.session
    }

    /// A submission takes the object.
    pub(crate) fn hold(&self) {
        *self.lock() += 1;
    }

    /// A submission gives the object back.
    pub(crate) fn release(&self) {
        let mut holds = self.lock();
        *holds = holds.saturating_sub(1);
    }

    /// Copies into the host's view; the caller flushes.
    pub(crate) fn store(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        self.each_part(at_bytes, src.len() as u64, &mut |mapping, at, part| mapping.write(at, &src[part]))
    }

    /// Copies `parts` of `image` to their places, the image being that of the whole object; the caller flushes.
    pub(crate) fn store_parts(&self, image: &[u8], parts: &[Range<usize>]) -> Result<(), OutOfMapping> {
        self.each_part(0, image.len() as u64, &mut |mapping, at, piece| {
            if piece.len() == image.len() {
                return mapping.write_parts(at, image, parts);
            }
            let inside = parts.iter().map(|part| part.start.max(piece.start)..part.end.min(piece.end));
            inside.filter(|part| !part.is_empty()).try_for_each(|part| {
                let at = at + (part.start - piece.start) as u64;
                mapping.write(at, &image[part])
            })
        })
    }

    /// Copies from the host's view; the caller has invalidated.
    pub(crate) fn load(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        self.each_part(at_bytes, dst.len() as u64, &mut |mapping, at, part| mapping.read(at, &mut dst[part]))
    }

    /// Makes host writes visible to the device. Ranges are ascending and do not overlap.
    pub(crate) fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        match &self.backing {
            Backing::Mapped(mapping) => {
                for range in ranges {
                    self.check(range.start, range.end.saturating_sub(range.start))?;
                }
                mapping.flush(ranges)
            }
            Backing::Heap { .. } => self.flush_in_heap(ranges),
        }
    }

    pub(crate) fn flush_all(&self) -> Result<(), OutOfMapping> {
        self.flush(std::slice::from_ref(&(0..self.size_bytes)))
    }

    /// Makes device writes visible to the host.
    pub(crate) fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        let len_bytes = range.end.saturating_sub(range.start);
        self.each_part(range.start, len_bytes, &mut |mapping, at, part| mapping.invalidate(at..at + part.len() as u64))
    }

    /// A word that the kernel may be changing.
    pub(crate) fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping> {
        let mut word = 0;
        self.each_part(at_bytes, 4, &mut |mapping, at, _| {
            word = mapping.load_u32(at)?;
            Ok(())
        })?;
        Ok(word)
    }

    /// Stores a word after everything before it.
    pub(crate) fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping> {
        self.each_part(at_bytes, 4, &mut |mapping, at, _| mapping.store_u32(at, value))
    }

    pub(crate) fn out_of_range(&self, error: OutOfMapping) -> DeviceError {
        let OutOfMapping { at_bytes, len_bytes, size_bytes } = error;
        DeviceError::OutOfRange { at_bytes, len_bytes, size_bytes }
    }

    fn flush_in_heap(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        let mut parts: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return Ok(()) };
        // One call a chunk: nearly every object lies in one.
        self.each_part(first.start, last.end.saturating_sub(first.start), &mut |mapping, at, part| {
            let (start, end) = (first.start + part.start as u64, first.start + part.end as u64);
            parts.clear();
            let inside = ranges.iter().map(|range| range.start.max(start)..range.end.min(end));
            parts.extend(
                inside.filter(|range| range.start < range.end).map(|r| r.start - start + at..r.end - start + at),
            );
            mapping.flush(&parts)
        })
    }

    fn each_part(&self, at_bytes: u64, len_bytes: u64, visit: &mut VisitPart<'_>) -> Result<(), OutOfMapping> {
        self.check(at_bytes, len_bytes)?;
        match &self.backing {
            Backing::Mapped(mapping) => visit(&**mapping, at_bytes, 0..len_bytes as usize),
            Backing::Heap { offset_bytes } => {
                self.session().heap().each_part(offset_bytes + at_bytes, len_bytes, visit)
            }
        }
    }

    fn check(&self, at_bytes: u64, len_bytes: u64) -> Result<(), OutOfMapping> {
        match at_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.size_bytes => Ok(()),
            _ => Err(OutOfMapping { at_bytes, len_bytes, size_bytes: self.size_bytes }),
        }
    }

    /// The first and last line of a range hold bytes of others, which the device may have written.
    fn invalidate_edges(&self, at_bytes: u64, len_bytes: u64) -> Result<(), OutOfMapping> {
        let (start, end) = (at_bytes, at_bytes + len_bytes);
        let is_split = |at: u64| !at.is_multiple_of(CACHE_LINE_BYTES);
        if len_bytes > 0 && is_split(start) {
            self.invalidate(start..start + 1)?;
        }
        if len_bytes > 0 && is_split(end) && end < self.size_bytes {
            self.invalidate(end - 1..end)?;
        }
        Ok(())
    }

    fn access(&self) -> Result<MutexGuard<'_, u32>, DeviceError> {
        let holds = self.lock();
        if *holds == 0 { Ok(holds) } else { Err(DeviceError::Busy) }
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BufferObject for MemoryObject {
    fn len_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), DeviceError> {
        let _access = self.access()?;
        let len_bytes = src.len() as u64;
        self.check(at_bytes, len_bytes)
            .and_then(|()| self.invalidate_edges(at_bytes, len_bytes))
            .and_then(|()| self.store(at_bytes, src))
            .and_then(|()| self.flush(std::slice::from_ref(&(at_bytes..at_bytes + len_bytes))))
            .map_err(|error| self.out_of_range(error))
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        let _access = self.access()?;
        self.check(at_bytes, dst.len() as u64)
            .and_then(|()| self.invalidate(at_bytes..at_bytes + dst.len() as u64))
            .and_then(|()| self.load(at_bytes, dst))
            .map_err(|error| self.out_of_range(error))
    }

    fn fill_with(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        let _access = self.access()?;
        // A range that ends before it starts is as wrong as one that ends too late.
        let len_bytes = range.end.checked_sub(range.start).unwrap_or(u64::MAX);
        self.check(range.start, len_bytes)
            .and_then(|()| self.invalidate_edges(range.start, len_bytes))
            .and_then(|()| self.fill_in_place(range.start, len_bytes, fill))
            .and_then(|()| self.flush(std::slice::from_ref(&(range.start..range.start + len_bytes))))
            .map_err(|error| self.out_of_range(error))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl MemoryObject {
    /// In place where the memory is one piece; through a copy where it crosses a border of heap chunks.
    fn fill_in_place(
        &self,
        at_bytes: u64,
        len_bytes: u64,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), OutOfMapping> {
        let mut parts = 0;
        self.each_part(at_bytes, len_bytes, &mut |_, _, _| {
            parts += 1;
            Ok(())
        })?;
        if parts <= 1 {
            return self.each_part(at_bytes, len_bytes, &mut |mapping, at, part| {
                mapping.fill(at..at + part.len() as u64, fill)
            });
        }
        let mut copy = vec![0; len_bytes as usize];
        self.load(at_bytes, &mut copy)?;
        fill(&mut copy);
        self.store(at_bytes, &copy)
    }
}

impl fmt::Debug for MemoryObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryObject")
            .field("handle", &self.owned.handle)
            .field("kind", &self.kind)
            .field("size_bytes", &self.size_bytes)
            .field("device_address", &self.device_address)
            .finish_non_exhaustive()
    }
}

/// A handle that is closed when it is dropped.
struct OwnedHandle {
    session: Arc<Session>,
    handle: BoHandle,
}

impl Drop for OwnedHandle {
    fn drop(&mut self) {
        self.session.close(self.handle);
    }
}
