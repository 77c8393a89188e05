//! Buffer objects of one open file, and the allocator of its device heap.

use crate::memory::Memory;
use npuhal_amdxdna::driver::{BoKind, DEV_ALIGN_BYTES, HEAP_BASE};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A buffer object.
#[derive(Debug)]
pub(crate) struct Bo {
    pub(crate) handle: u32,
    pub(crate) kind: BoKind,
    /// As asked for, not rounded.
    pub(crate) size_bytes: u64,
    pub(crate) place: Place,
    /// Shared with the mapping.
    pub(crate) is_mapped: Arc<AtomicBool>,
}

/// Where an object's memory is.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// Pages of its own: host pages, or a chunk of the heap.
    Pages {
        memory: Arc<Memory>,
        /// Lent by the client.
        is_user: bool,
    },
    /// A part of the heap.
    Heap {
        /// From the start of the heap.
        offset_bytes: u64,
    },
}

impl Bo {
    pub(crate) fn new(handle: u32, kind: BoKind, size_bytes: u64, place: Place) -> Self {
        Self { handle, kind, size_bytes, place, is_mapped: Arc::default() }
    }

    pub(crate) fn memory(&self) -> Option<&Arc<Memory>> {
        match &self.place {
            Place::Pages { memory, .. } => Some(memory),
            Place::Heap { .. } => None,
        }
    }
}

/// The objects of one open file.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    by_handle: BTreeMap<u32, Arc<Bo>>,
    /// Closed by the client, and still used by a command in flight.
    closing: Vec<Arc<Bo>>,
    pub(crate) heap: Heap,
}

impl Objects {
    pub(crate) fn get(&self, handle: u32) -> Option<&Arc<Bo>> {
        self.by_handle.get(&handle)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Bo>> {
        self.by_handle.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_handle.len()
    }

    /// The lowest free handle, as the kernel gives them out.
    pub(crate) fn insert(&mut self, make: impl FnOnce(u32) -> Bo) -> Arc<Bo> {
        let mut handle = 1;
        for used in self.by_handle.keys() {
            if *used != handle {
                break;
            }
            handle += 1;
        }
        let bo = Arc::new(make(handle));
        self.by_handle.insert(handle, Arc::clone(&bo));
        bo
    }

    /// Closes an object. Its memory stays until no command uses it.
    pub(crate) fn close(&mut self, handle: u32) -> Option<Arc<Bo>> {
        let bo = self.by_handle.remove(&handle)?;
        self.closing.push(Arc::clone(&bo));
        Some(bo)
    }

    /// Gives back the device memory of closed objects that nothing uses any more.
    pub(crate) fn sweep(&mut self) {
        let heap = &mut self.heap;
        self.closing.retain(|bo| {
            let is_used = Arc::strong_count(bo) > 1;
            if let (false, Place::Heap { offset_bytes }) = (is_used, &bo.place) {
                heap.give_back(*offset_bytes);
            }
            is_used
        });
    }
}

/// The device heap of one open file: chunks side by side, and what is allocated in them.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    chunks: Vec<Arc<Memory>>,
    /// Offset and length of every allocation.
    used: BTreeMap<u64, u64>,
}

impl Heap {
    pub(crate) fn push_chunk(&mut self, memory: &Arc<Memory>) {
        self.chunks.push(Arc::clone(memory));
    }

    /// Takes the last chunk away: the client could not map it, or closes the heap from behind. Others stay, since what
    /// lies behind them keeps its place.
    pub(crate) fn remove_last_chunk(&mut self, memory: &Arc<Memory>) {
        self.chunks.pop_if(|chunk| Arc::ptr_eq(chunk, memory));
    }

    /// Overwrites what the device would find in a new allocation.
    pub(crate) fn poison(&self, offset_bytes: u64, len_bytes: u64) {
        for (memory, at, len) in self.parts(offset_bytes, len_bytes).into_iter().flatten() {
            memory.poison(at, len);
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len_bytes()).sum()
    }

    /// Host address of the first chunk.
    pub(crate) fn address(&self) -> Option<u64> {
        self.chunks.first().map(|chunk| chunk.address())
    }

    /// Bytes from the start that are mapped without a gap.
    fn mapped_bytes(&self) -> u64 {
        self.chunks.iter().take_while(|chunk| chunk.is_mapped()).map(|chunk| chunk.len_bytes()).sum()
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped_bytes() > 0
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used.values().sum()
    }

    /// Takes `len_bytes` from the first gap that is large enough.
    pub(crate) fn take(&mut self, len_bytes: u64) -> Option<u64> {
        let len_bytes = len_bytes.checked_next_multiple_of(DEV_ALIGN_BYTES)?;
        let mut at = 0;
        for (&start, &len) in &self.used {
            if start - at >= len_bytes {
                break;
            }
            at = start + len;
        }
        if at.checked_add(len_bytes)? > self.mapped_bytes() {
            return None;
        }
        self.used.insert(at, len_bytes);
        Some(at)
    }

    pub(crate) fn give_back(&mut self, offset_bytes: u64) {
        self.used.remove(&offset_bytes);
    }

    /// The chunk parts that hold `len_bytes` at `offset_bytes`: memory, offset inside it, length.
    pub(crate) fn parts(&self, offset_bytes: u64, len_bytes: u64) -> Option<Vec<(&Arc<Memory>, u64, u64)>> {
        let mut parts = Vec::with_capacity(1);
        let (mut at, mut left, mut base) = (offset_bytes, len_bytes, 0);
        for chunk in &self.chunks {
            let end = base + chunk.len_bytes();
            if left > 0 && at < end {
                let part = left.min(end - at);
                parts.push((chunk, at - base, part));
                (at, left) = (at + part, left - part);
            }
            base = end;
        }
        (left == 0).then_some(parts)
    }
}

/// Device address of `offset_bytes` in the heap.
pub(crate) const fn heap_address(offset_bytes: u64) -> u64 {
    HEAP_BASE + offset_bytes
}

#[cfg(test)]
mod tests {
    use super::{Bo, Heap, Objects, Place};
    use crate::diagnosis::DiagnosisLog;
    use crate::memory::{Memory, VirtualMapping};
    use npuhal_amdxdna::driver::{BoKind, HEAP_CHUNK_BYTES};
    use std::sync::Arc;

    #[test]
    fn handles_are_the_lowest_free_ones() {
        let mut objects = Objects::default();
        let make = |handle| Bo::new(handle, BoKind::Dev, 1, Place::Heap { offset_bytes: 0 });
        assert_eq!([objects.insert(make).handle, objects.insert(make).handle, objects.insert(make).handle], [1, 2, 3]);
        objects.close(2);
        assert_eq!([objects.insert(make).handle, objects.insert(make).handle], [2, 4]);
    }

    #[test]
    fn the_heap_fills_gaps_and_joins_chunks() {
        let log = Arc::new(DiagnosisLog::default());
        let chunk = |address| Arc::new(Memory::new(address, HEAP_CHUNK_BYTES, &log).unwrap());
        let mut heap = Heap::default();
        let first = chunk(0);
        heap.push_chunk(&first);
        assert_eq!(heap.take(1), None);
        let _mapping = VirtualMapping::new(&first, &Arc::default());
        assert_eq!(heap.take(1), Some(0));
        assert_eq!(heap.take(40_000), Some(32 << 10));
        assert_eq!(heap.take(1), Some(96 << 10));
        heap.give_back(32 << 10);
        assert_eq!(heap.take(65_537), Some(128 << 10));
        assert_eq!(heap.take(65_536), Some(32 << 10));
        assert_eq!(heap.take(HEAP_CHUNK_BYTES), None);
        let second = chunk(HEAP_CHUNK_BYTES);
        let _mapping = VirtualMapping::new(&second, &Arc::default());
        heap.push_chunk(&second);
        let at = heap.take(HEAP_CHUNK_BYTES).unwrap();
        let parts = heap.parts(at, HEAP_CHUNK_BYTES).unwrap();
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[0].1 + parts[0].2, HEAP_CHUNK_BYTES);
        assert_eq!(parts[1].1, 0);
        assert!(heap.parts(2 * HEAP_CHUNK_BYTES - 1, 2).is_none());
    }
}
