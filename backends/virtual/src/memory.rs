//! Memory of buffer objects: a host copy, a device copy, and what has not been moved between them.
//!
//! The model is the least forgiving one that the cache rules of [`Mapping`] allow: a line keeps its host copy until it
//! is invalidated, host writes stay in the host copy until they are flushed, fresh lines count as written (the kernel
//! zeroed them), and invalidating a line with unflushed writes moves these to the device.

use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use npuhal_amdxdna::driver::{CACHE_LINE_BYTES, Mapping, OutOfMapping, PAGE_BYTES};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What device memory holds before anything was written to it. As a float it is a huge negative number.
pub(crate) const POISON: u8 = 0xFD;
const BLOCK_BYTES: usize = 16 << 10;
const LINE: usize = CACHE_LINE_BYTES as usize;

/// Memory of one buffer object or of one chunk of the device heap.
pub(crate) struct Memory {
    address: u64,
    len_bytes: u64,
    storage: Storage,
    /// Mappings and lent pages.
    mappings: AtomicU32,
    log: Arc<DiagnosisLog>,
}

enum Storage {
    Own(Mutex<Lines>),
    /// Pages of the client: it moves cache lines itself, unseen, so both sides share one copy.
    User(Arc<dyn Mapping>),
}

struct Lines {
    host: Vec<u8>,
    device: Vec<Option<Box<[u8]>>>,
    /// One bit a line: the host copy has writes that the device has not seen.
    dirty: Vec<u64>,
}

/// Outcome of a device access that the memory rules do not forbid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Clean,
    /// A line of the range had unflushed host writes; its offset.
    Dirty(u64),
}

impl Memory {
    pub(crate) fn new(address: u64, size_bytes: u64, log: &Arc<DiagnosisLog>) -> Option<Self> {
        let len_bytes = size_bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let len = usize::try_from(len_bytes).ok().filter(|len| isize::try_from(*len).is_ok())?;
        // A size that cannot be had is an error, not the end of the process.
        Vec::<u8>::new().try_reserve_exact(len).ok()?;
        let lines = Lines {
            host: vec![0; len],
            device: vec![None; len.div_ceil(BLOCK_BYTES)],
            dirty: vec![u64::MAX; (len / LINE).div_ceil(64)],
        };
        let storage = Storage::Own(Mutex::new(lines));
        Some(Self { address, len_bytes, storage, mappings: AtomicU32::new(0), log: Arc::clone(log) })
    }

    pub(crate) fn user(pages: &Arc<dyn Mapping>, log: &Arc<DiagnosisLog>) -> Self {
        Self {
            address: pages.address(),
            len_bytes: pages.len_bytes(),
            storage: Storage::User(Arc::clone(pages)),
            mappings: AtomicU32::new(1),
            log: Arc::clone(log),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.mappings.load(Ordering::Acquire) > 0
    }

    /// Reads as the device.
    pub(crate) fn device_read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<Access, OutOfMapping> {
        let range = self.check(at_bytes, dst.len() as u64)?;
        match &self.storage {
            Storage::User(pages) => pages.read(at_bytes, dst).map(|()| Access::Clean),
            Storage::Own(lines) => {
                let lines = lock(lines);
                lines.copy_from_device(range.start, dst);
                Ok(lines.access(range))
            }
        }
    }

    /// Writes as the device.
    pub(crate) fn device_write(&self, at_bytes: u64, src: &[u8]) -> Result<Access, OutOfMapping> {
        let range = self.check(at_bytes, src.len() as u64)?;
        match &self.storage {
            Storage::User(pages) => pages.write(at_bytes, src).map(|()| Access::Clean),
            Storage::Own(lines) => {
                let mut lines = lock(lines);
                lines.copy_to_device(range.start, src);
                Ok(lines.access(range))
            }
        }
    }

    /// Forgets what the device has written or been given.
    pub(crate) fn poison(&self, at_bytes: u64, len_bytes: u64) {
        if let (Ok(range), Storage::Own(lines)) = (self.check(at_bytes, len_bytes), &self.storage) {
            lock(lines).poison(range);
        }
    }

    /// Reads as the kernel, coherently with the host.
    pub(crate) fn kernel_read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        let range = self.check(at_bytes, dst.len() as u64)?;
        match &self.storage {
            Storage::User(pages) => pages.read(at_bytes, dst),
            Storage::Own(lines) => {
                dst.copy_from_slice(&lock(lines).host[range]);
                Ok(())
            }
        }
    }

    /// Writes as the kernel, coherently with the host.
    pub(crate) fn kernel_write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        let range = self.check(at_bytes, src.len() as u64)?;
        match &self.storage {
            Storage::User(pages) => pages.write(at_bytes, src),
            Storage::Own(lines) => {
                let mut lines = lock(lines);
                lines.host[range.clone()].copy_from_slice(src);
                lines.mark_dirty(range);
                Ok(())
            }
        }
    }

    /// Moves the unflushed lines of `range` to the device.
    pub(crate) fn flush(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        let range = self.check(range.start, range.end.saturating_sub(range.start))?;
        if let Storage::Own(lines) = &self.storage {
            lock(lines).clean(range);
        }
        Ok(())
    }

    /// Drops the host copies of the lines of `range`.
    pub(crate) fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        let range = self.check(range.start, range.end.saturating_sub(range.start))?;
        let Storage::Own(lines) = &self.storage else { return Ok(()) };
        let first_dirty = lock(lines).refetch(range);
        if let Some(at_bytes) = first_dirty {
            let address = self.address + at_bytes;
            let detail = format!("line at {address:#x} (byte {at_bytes} of {}) had host writes", self.len_bytes);
            self.log.push(Diagnosis::new(DiagnosisKind::DirtyInvalidate, detail));
        }
        Ok(())
    }

    fn check(&self, at_bytes: u64, len_bytes: u64) -> Result<Range<usize>, OutOfMapping> {
        match at_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Ok(at_bytes as usize..end as usize),
            _ => Err(OutOfMapping { at_bytes, len_bytes, size_bytes: self.len_bytes }),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {} bytes)", self.address, self.len_bytes)
    }
}

fn lock(lines: &Mutex<Lines>) -> MutexGuard<'_, Lines> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lines {
    fn copy_from_device(&self, start: usize, dst: &mut [u8]) {
        for_each_block(start, dst.len(), |block, at, part| match &self.device[block] {
            Some(bytes) => dst[part.clone()].copy_from_slice(&bytes[at..at + part.len()]),
            None => dst[part].fill(POISON),
        });
    }

    fn copy_to_device(&mut self, start: usize, src: &[u8]) {
        for_each_block(start, src.len(), |block, at, part| {
            let bytes = self.device[block].get_or_insert_with(|| vec![POISON; BLOCK_BYTES].into_boxed_slice());
            bytes[at..at + part.len()].copy_from_slice(&src[part]);
        });
    }

    fn poison(&mut self, range: Range<usize>) {
        for_each_block(range.start, range.len(), |block, at, part| {
            if let Some(bytes) = &mut self.device[block] {
                bytes[at..at + part.len()].fill(POISON);
            }
        });
    }

    fn access(&self, range: Range<usize>) -> Access {
        self.first_dirty(lines_of(&range)).map_or(Access::Clean, |line| Access::Dirty((line * LINE) as u64))
    }

    fn first_dirty(&self, lines: Range<usize>) -> Option<usize> {
        let mut line = lines.start;
        while line < lines.end {
            let bits = self.dirty[line / 64] >> (line % 64);
            if bits == 0 {
                line = (line / 64 + 1) * 64;
                continue;
            }
            line += bits.trailing_zeros() as usize;
            return (line < lines.end).then_some(line);
        }
        None
    }

    fn mark_dirty(&mut self, range: Range<usize>) {
        for line in lines_of(&range) {
            self.dirty[line / 64] |= 1 << (line % 64);
        }
    }

    /// Runs of dirty lines in `range` become clean; the device sees the host's bytes.
    fn clean(&mut self, range: Range<usize>) {
        let lines = lines_of(&range);
        let mut from = lines.start;
        while let Some(first) = self.first_dirty(from..lines.end) {
            let mut end = first;
            while end < lines.end && self.dirty[end / 64] >> (end % 64) & 1 != 0 {
                self.dirty[end / 64] &= !(1 << (end % 64));
                end += 1;
            }
            let host = std::mem::take(&mut self.host);
            self.copy_to_device(first * LINE, &host[first * LINE..end * LINE]);
            self.host = host;
            from = end;
        }
    }

    /// Takes the device's bytes, after writing back what was dirty; the offset of the first such line.
    fn refetch(&mut self, range: Range<usize>) -> Option<u64> {
        let lines = lines_of(&range);
        let first_dirty = self.first_dirty(lines.clone());
        self.clean(range);
        let (start, end) = (lines.start * LINE, lines.end * LINE);
        let mut host = std::mem::take(&mut self.host);
        self.copy_from_device(start, &mut host[start..end]);
        self.host = host;
        first_dirty.map(|line| (line * LINE) as u64)
    }
}

/// Lines that `range` touches.
fn lines_of(range: &Range<usize>) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start / LINE..range.end.div_ceil(LINE) }
}

/// Calls `visit` with block, offset inside it, and range of the caller's slice.
fn for_each_block(start: usize, len: usize, mut visit: impl FnMut(usize, usize, Range<usize>)) {
    let mut done = 0;
    while done < len {
        let (block, at) = ((start + done) / BLOCK_BYTES, (start + done) % BLOCK_BYTES);
        let part = (BLOCK_BYTES - at).min(len - done);
        visit(block, at, done..done + part);
        done += part;
    }
}

/// The host's view of a [`Memory`]. Dropping it unmaps.
#[derive(Debug)]
pub(crate) struct VirtualMapping {
    memory: Arc<Memory>,
    /// Flag of the buffer object.
    is_mapped: Arc<AtomicBool>,
}

impl VirtualMapping {
    pub(crate) fn new(memory: &Arc<Memory>, is_mapped: &Arc<AtomicBool>) -> Self {
        memory.mappings.fetch_add(1, Ordering::AcqRel);
        is_mapped.store(true, Ordering::Release);
        Self { memory: Arc::clone(memory), is_mapped: Arc::clone(is_mapped) }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        match &self.memory.storage {
            Storage::Own(lines) => lock(lines),
            Storage::User(_) => unreachable!("user memory is never mapped by the driver"),
        }
    }
}

impl Drop for VirtualMapping {
    fn drop(&mut self) {
        self.is_mapped.store(false, Ordering::Release);
        self.memory.mappings.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Mapping for VirtualMapping {
    fn address(&self) -> u64 {
        self.memory.address
    }

    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        let range = self.memory.check(at_bytes, dst.len() as u64)?;
        dst.copy_from_slice(&self.lines().host[range]);
        Ok(())
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        let range = self.memory.check(at_bytes, src.len() as u64)?;
        let mut lines = self.lines();
        lines.host[range.clone()].copy_from_slice(src);
        lines.mark_dirty(range);
        Ok(())
    }

    fn write_parts(&self, at_bytes: u64, image: &[u8], parts: &[Range<usize>]) -> Result<(), OutOfMapping> {
        let mut lines = self.lines();
        for part in parts {
            let (at_bytes, len_bytes) = (at_bytes.saturating_add(part.start as u64), part.len() as u64);
            let range = self.memory.check(at_bytes, len_bytes)?;
            let size_bytes = self.memory.len_bytes;
            let src = image.get(part.clone()).ok_or(OutOfMapping { at_bytes, len_bytes, size_bytes })?;
            lines.host[range.clone()].copy_from_slice(src);
            lines.mark_dirty(range);
        }
        Ok(())
    }

    fn fill(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), OutOfMapping> {
        let range = self.memory.check(range.start, range.end.saturating_sub(range.start))?;
        let mut lines = self.lines();
        fill(&mut lines.host[range.clone()]);
        lines.mark_dirty(range);
        Ok(())
    }

    fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping> {
        let mut word = [0; 4];
        self.check_word(at_bytes)?;
        self.read(at_bytes, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping> {
        self.check_word(at_bytes)?;
        self.write(at_bytes, &value.to_le_bytes())
    }

    fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        for range in ranges {
            self.memory.check(range.start, range.end.saturating_sub(range.start))?;
        }
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            let detail = format!("ranges of a flush overlap or are not ascending: {ranges:?}");
            self.memory.log.push(Diagnosis::new(DiagnosisKind::Misuse, detail));
        }
        let mut lines = self.lines();
        ranges.iter().for_each(|range| lines.clean(range.start as usize..range.end as usize));
        Ok(())
    }

    fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        self.memory.invalidate(range)
    }
}

impl VirtualMapping {
    fn check_word(&self, at_bytes: u64) -> Result<(), OutOfMapping> {
        if at_bytes.is_multiple_of(4) {
            return Ok(());
        }
        Err(OutOfMapping { at_bytes, len_bytes: 4, size_bytes: self.memory.len_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::{Access, Memory, POISON, VirtualMapping};
    use crate::diagnosis::{DiagnosisKind, DiagnosisLog};
    use npuhal_amdxdna::driver::Mapping;
    use std::sync::Arc;

    fn memory(size_bytes: u64) -> (Arc<DiagnosisLog>, Arc<Memory>, VirtualMapping) {
        let log = Arc::new(DiagnosisLog::default());
        let memory = Arc::new(Memory::new(0x1000, size_bytes, &log).unwrap());
        let mapping = VirtualMapping::new(&memory, &Arc::default());
        (log, memory, mapping)
    }

    fn device_bytes<const N: usize>(memory: &Memory, at_bytes: u64) -> ([u8; N], Access) {
        let mut bytes = [0; N];
        let access = memory.device_read(at_bytes, &mut bytes).unwrap();
        (bytes, access)
    }

    #[test]
    fn host_writes_reach_the_device_when_they_are_flushed() {
        let (_, memory, mapping) = memory(10_000);
        assert_eq!(mapping.len_bytes(), 12_288);
        mapping.write(100, b"abc").unwrap();
        assert_eq!(device_bytes(&memory, 100), ([POISON; 3], Access::Dirty(64)));
        mapping.flush(std::slice::from_ref(&(100..103))).unwrap();
        assert_eq!(device_bytes(&memory, 100), (*b"abc", Access::Clean));
        // Whole lines move, and no more.
        assert_eq!(device_bytes(&memory, 64), ([0; 4], Access::Clean));
        assert_eq!(device_bytes(&memory, 128), ([POISON; 4], Access::Dirty(128)));
    }

    #[test]
    fn device_writes_reach_the_host_when_it_invalidates() {
        let (log, memory, mapping) = memory(4096);
        mapping.flush(std::slice::from_ref(&(0..4096))).unwrap();
        assert_eq!(memory.device_write(60, &[7; 8]).unwrap(), Access::Clean);
        let mut back = [9; 8];
        mapping.read(60, &mut back).unwrap();
        assert_eq!(back, [0; 8]);
        mapping.invalidate(64..65).unwrap();
        mapping.read(60, &mut back).unwrap();
        assert_eq!(back, [0, 0, 0, 0, 7, 7, 7, 7]);
        mapping.invalidate(0..4096).unwrap();
        mapping.read(60, &mut back).unwrap();
        assert_eq!(back, [7; 8]);
        assert!(log.to_vec().is_empty());
    }

    #[test]
    fn dirty_lines_go_over_the_devices_data() {
        let (log, memory, mapping) = memory(4096);
        assert_eq!(memory.device_write(0, &[7; 4]).unwrap(), Access::Dirty(0));
        mapping.invalidate(0..4).unwrap();
        let mut back = [9; 4];
        mapping.read(0, &mut back).unwrap();
        assert_eq!(back, [0; 4]);
        assert_eq!(log.to_vec()[0].kind, DiagnosisKind::DirtyInvalidate);
    }

    #[test]
    fn flushing_a_clean_line_keeps_what_the_device_wrote() {
        let (_, memory, mapping) = memory(4096);
        mapping.flush(std::slice::from_ref(&(0..4096))).unwrap();
        memory.device_write(0, &[7; 4]).unwrap();
        mapping.flush(std::slice::from_ref(&(0..4096))).unwrap();
        assert_eq!(device_bytes(&memory, 0), ([7; 4], Access::Clean));
    }

    #[test]
    fn a_new_allocation_holds_nothing_of_the_old_one() {
        let (_, memory, mapping) = memory(64 << 10);
        mapping.write(0, &[7; 100]).unwrap();
        mapping.flush(std::slice::from_ref(&(0..65_536))).unwrap();
        memory.poison(32, 40_000);
        assert_eq!(device_bytes::<4>(&memory, 30), ([7, 7, POISON, POISON], Access::Clean));
        assert_eq!(device_bytes::<4>(&memory, 40_030).0, [POISON, POISON, 0, 0]);
    }

    #[test]
    fn the_kernel_is_coherent_with_the_host() {
        let (_, memory, mapping) = memory(4096);
        mapping.store_u32(8, 5).unwrap();
        let mut word = [0; 4];
        memory.kernel_read(8, &mut word).unwrap();
        assert_eq!(word, [5, 0, 0, 0]);
        memory.kernel_write(8, &[6, 0, 0, 0]).unwrap();
        assert_eq!(mapping.load_u32(8).unwrap(), 6);
        assert!(mapping.load_u32(6).is_err() && mapping.store_u32(4096, 0).is_err());
    }

    #[test]
    fn accesses_stay_inside_and_blocks_join() {
        let (_, memory, mapping) = memory(64 << 10);
        let pattern: Vec<u8> = (0..40_000_u32).map(|i| i as u8).collect();
        mapping.write(5_000, &pattern).unwrap();
        mapping.flush(std::slice::from_ref(&(5_000..45_000))).unwrap();
        let mut back = vec![0; 40_000];
        memory.device_read(5_000, &mut back).unwrap();
        assert_eq!(back, pattern);
        assert!(memory.device_read(65_536, &mut [0]).is_err());
        assert!(memory.device_write(u64::MAX, &[0; 2]).is_err());
        assert!(mapping.fill(60_000..70_000, &mut |_| panic!("outside")).is_err());
        assert!(mapping.flush(&[0..1, 65_535..65_537]).is_err());
        drop(mapping);
        assert!(!memory.is_mapped());
    }
}
