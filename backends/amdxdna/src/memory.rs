//! Mapped pages of this process, as [`Mapping`]s.
#![allow(unsafe_code, reason = "maps memory and hands out views of it")]

use crate::cache;
use crate::driver::{HEAP_CHUNK_BYTES, HEAP_MAX_BYTES, Mapping, OutOfMapping, PAGE_BYTES};
use crate::errno::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A readable and writable mapping of whole pages; unmapped when dropped.
pub(crate) struct MappedPages {
    base: *mut u8,
    len_bytes: usize,
    /// Serialises host accesses, so that the slice of [`Mapping::fill`] is exclusive.
    access: Mutex<()>,
    /// Set for a chunk of the heap window, which owns the address range.
    window: Option<Arc<HeapWindow>>,
}

// SAFETY: the pages belong to this value alone, and every host access goes through `access`.
unsafe impl Send for MappedPages {}
// SAFETY: as above.
unsafe impl Sync for MappedPages {}

impl MappedPages {
    /// Maps `len_bytes` of `file` at `offset`.
    pub(crate) fn file(file: BorrowedFd<'_>, offset: u64, len_bytes: u64) -> Result<Self, Errno> {
        let len = page_multiple(len_bytes)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { mm::mmap(std::ptr::null_mut(), len, READ_WRITE, MapFlags::SHARED, file, offset)? };
        Ok(Self::new(base.cast(), len, None))
    }

    /// Maps `len_bytes` of `file` into the heap window at `at_bytes`.
    pub(crate) fn chunk(
        window: &Arc<HeapWindow>,
        at_bytes: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
    ) -> Result<Self, Errno> {
        let len = page_multiple(len_bytes)?;
        let at = usize::try_from(at_bytes).map_err(|_| Errno::EINVAL)?;
        if !at_bytes.is_multiple_of(HEAP_CHUNK_BYTES)
            || at.checked_add(len).is_none_or(|end| end as u64 > HEAP_MAX_BYTES)
        {
            return Err(Errno::EINVAL);
        }
        let base = window.base.wrapping_add(at);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range lies inside the reserved window (just checked), which nothing else uses.
        let base = unsafe { mm::mmap(base.cast(), len, READ_WRITE, flags, file, offset)? };
        Ok(Self::new(base.cast(), len, Some(Arc::clone(window))))
    }

    fn anonymous(len_bytes: u64) -> Result<Self, Errno> {
        let len = page_multiple(len_bytes)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, READ_WRITE, MapFlags::PRIVATE)? };
        Ok(Self::new(base.cast(), len, None))
    }

    fn new(base: *mut u8, len_bytes: usize, window: Option<Arc<HeapWindow>>) -> Self {
        Self { base, len_bytes, access: Mutex::new(()), window }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pointer to `at_bytes` after checking that `len_bytes` fit.
    fn at(&self, at_bytes: u64, len_bytes: u64) -> Result<*mut u8, OutOfMapping> {
        let size_bytes = self.len_bytes as u64;
        match at_bytes.checked_add(len_bytes) {
            Some(end) if end <= size_bytes => Ok(self.base.wrapping_add(at_bytes as usize)),
            _ => Err(OutOfMapping { at_bytes, len_bytes, size_bytes }),
        }
    }

    fn word(&self, at_bytes: u64) -> Result<&AtomicU32, OutOfMapping> {
        if !at_bytes.is_multiple_of(4) {
            return Err(OutOfMapping { at_bytes, len_bytes: 4, size_bytes: self.len_bytes as u64 });
        }
        let word = self.at(at_bytes, 4)?;
        // SAFETY: inside the mapping (just checked), aligned (the base is a page), and live as long as `self`; the kernel
        // is the only other writer.
        Ok(unsafe { AtomicU32::from_ptr(word.cast()) })
    }
}

impl Mapping for MappedPages {
    fn address(&self) -> u64 {
        self.base as u64
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes as u64
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        let from = self.at(at_bytes, dst.len() as u64)?;
        let _access = self.lock();
        // SAFETY: `from` is good for `dst.len()` bytes; a `&mut` slice never overlaps the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        let to = self.at(at_bytes, src.len() as u64)?;
        let _access = self.lock();
        // SAFETY: `to` is good for `src.len()` bytes; no safe slice of the mapping exists outside `fill`, which holds the
        // lock.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
        Ok(())
    }

    fn write_parts(&self, at_bytes: u64, image: &[u8], parts: &[Range<usize>]) -> Result<(), OutOfMapping> {
        let _access = self.lock();
        for part in parts {
            let (at_bytes, len_bytes) = (at_bytes.saturating_add(part.start as u64), part.len() as u64);
            let to = self.at(at_bytes, len_bytes)?;
            let size_bytes = self.len_bytes as u64;
            let src = image.get(part.clone()).ok_or(OutOfMapping { at_bytes, len_bytes, size_bytes })?;
            // SAFETY: `to` is good for `src.len()` bytes; no safe slice of the mapping exists outside `fill`, which holds the
            // lock.
            unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
        }
        Ok(())
    }

    fn fill(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), OutOfMapping> {
        let len = range.end.saturating_sub(range.start);
        let start = self.at(range.start, len)?;
        let _access = self.lock();
        // SAFETY: good for `len` initialised bytes; exclusive among host accesses while the lock is held.
        fill(unsafe { std::slice::from_raw_parts_mut(start, len as usize) });
        Ok(())
    }

    fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping> {
        let word = self.word(at_bytes)?;
        let _access = self.lock();
        Ok(word.load(Ordering::Acquire))
    }

    fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping> {
        let word = self.word(at_bytes)?;
        let _access = self.lock();
        word.store(value, Ordering::Release);
        Ok(())
    }

    fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        for range in ranges {
            self.at(range.start, range.end.saturating_sub(range.start))?;
        }
        let base = self.base as usize;
        let lines = ranges.iter().map(|range| (base + range.start as usize, base + range.end as usize));
        // SAFETY: all ranges lie inside the mapping.
        unsafe { cache::flush(lines) };
        Ok(())
    }

    fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        self.flush(std::slice::from_ref(&range))
    }
}

impl fmt::Debug for MappedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedPages({:#x}, {} bytes)", self.base as usize, self.len_bytes)
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // A chunk goes back to the window as an unusable page range, so that nobody else's mapping can land there before the
        // window itself is unmapped.
        // SAFETY: the range is this value's own mapping, and no reference to it is left.
        let result = unsafe {
            if self.window.is_some() {
                let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
                mm::mmap_anonymous(self.base.cast(), self.len_bytes, ProtFlags::empty(), flags).map(|_| ())
            } else {
                mm::munmap(self.base.cast(), self.len_bytes)
            }
        };
        if let Err(error) = result {
            tracing::warn!(%error, address = self.base as usize, "unmapping failed");
        }
    }
}

/// A reserved range of addresses for the device heap, aligned to [`HEAP_CHUNK_BYTES`].
#[derive(Debug)]
pub(crate) struct HeapWindow {
    base: *mut u8,
}

// SAFETY: the value is only an address range.
unsafe impl Send for HeapWindow {}
// SAFETY: as above.
unsafe impl Sync for HeapWindow {}

impl HeapWindow {
    /// Reserves [`HEAP_MAX_BYTES`] of addresses, without memory behind them.
    pub(crate) fn reserve() -> Result<Self, Errno> {
        let (chunk, len) = (HEAP_CHUNK_BYTES as usize, HEAP_MAX_BYTES as usize);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len + chunk, ProtFlags::empty(), flags)? };
        let start: *mut u8 = start.cast();
        let head = start.align_offset(chunk);
        let window = Self { base: start.wrapping_add(head) };
        // SAFETY: both ends belong to the mapping just made and lie outside the window.
        unsafe {
            if head > 0 {
                mm::munmap(start.cast(), head)?;
            }
            mm::munmap(window.base.wrapping_add(len).cast(), chunk - head)?;
        }
        Ok(window)
    }
}

impl Drop for HeapWindow {
    fn drop(&mut self) {
        // SAFETY: the window is this value's own mapping; every chunk holds the window alive, so none is left.
        if let Err(error) = unsafe { mm::munmap(self.base.cast(), HEAP_MAX_BYTES as usize) } {
            tracing::warn!(%error, "unmapping the heap window failed");
        }
    }
}

/// Page-aligned host memory that can become a buffer object ("user pointer").
///
/// # Errors
/// [`Errno::EINVAL`] for a length that is 0 or not a multiple of [`PAGE_BYTES`]; [`Errno::ENOMEM`].
pub fn host_pages(len_bytes: u64) -> Result<Arc<dyn Mapping>, Errno> {
    Ok(Arc::new(MappedPages::anonymous(len_bytes)?))
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn page_multiple(len_bytes: u64) -> Result<usize, Errno> {
    if len_bytes == 0 || !len_bytes.is_multiple_of(PAGE_BYTES) {
        return Err(Errno::EINVAL);
    }
    usize::try_from(len_bytes).ok().filter(|len| isize::try_from(*len).is_ok()).ok_or(Errno::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::{HeapWindow, MappedPages, host_pages};
    use crate::driver::{HEAP_CHUNK_BYTES, Mapping, OutOfMapping};
    use crate::errno::Errno;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    #[test]
    fn host_pages_read_back_and_check_their_ranges() {
        let pages = host_pages(8192).unwrap();
        assert_eq!(pages.address() % 4096, 0);
        pages.write(4090, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        pages.flush(std::slice::from_ref(&(4090..4098))).unwrap();
        pages.invalidate(4090..4098).unwrap();
        let mut back = [0; 8];
        pages.read(4090, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(pages.load_u32(4092).unwrap(), 0x0605_0403);
        let image: Vec<u8> = (0..20).collect();
        pages.write_parts(100, &image, &[2..4, 10..11]).unwrap();
        let mut back = [9; 10];
        pages.read(101, &mut back).unwrap();
        assert_eq!(back, [0, 2, 3, 0, 0, 0, 0, 0, 0, 10]);
        for (at_bytes, parts) in [(8190, 0..4), (0, 18..22), (u64::MAX, 0..1)] {
            assert!(pages.write_parts(at_bytes, &image, &[parts]).is_err(), "{at_bytes}");
        }
        pages.store_u32(4092, 9).unwrap();
        pages.fill(4088..4096, &mut |bytes| assert_eq!(bytes, [0, 0, 1, 2, 9, 0, 0, 0])).unwrap();

        let out = OutOfMapping { at_bytes: 8190, len_bytes: 4, size_bytes: 8192 };
        assert_eq!(pages.write(8190, &[0; 4]), Err(out));
        assert!(pages.read(u64::MAX, &mut [0; 2]).is_err());
        assert!(pages.load_u32(2).is_err());
        assert!(pages.flush(&[0..1, 8191..8193]).is_err());
        assert_eq!(host_pages(100).unwrap_err(), Errno::EINVAL);
        assert_eq!(host_pages(0).unwrap_err(), Errno::EINVAL);
    }

    #[test]
    fn heap_chunks_are_aligned_contiguous_and_given_back() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * HEAP_CHUNK_BYTES).unwrap();
        let window = Arc::new(HeapWindow::reserve().unwrap());
        let first = MappedPages::chunk(&window, 0, file.as_fd(), 0, HEAP_CHUNK_BYTES).unwrap();
        let second =
            MappedPages::chunk(&window, HEAP_CHUNK_BYTES, file.as_fd(), HEAP_CHUNK_BYTES, HEAP_CHUNK_BYTES).unwrap();
        assert_eq!(first.address() % HEAP_CHUNK_BYTES, 0);
        assert_eq!(second.address(), first.address() + HEAP_CHUNK_BYTES);
        second.write(0, b"chunk").unwrap();
        drop(second);
        let again =
            MappedPages::chunk(&window, HEAP_CHUNK_BYTES, file.as_fd(), HEAP_CHUNK_BYTES, HEAP_CHUNK_BYTES).unwrap();
        let mut back = [0; 5];
        again.read(0, &mut back).unwrap();
        assert_eq!(&back, b"chunk");
        assert!(MappedPages::chunk(&window, 4096, file.as_fd(), 0, HEAP_CHUNK_BYTES).is_err());
        assert!(MappedPages::chunk(&window, 8 * HEAP_CHUNK_BYTES, file.as_fd(), 0, HEAP_CHUNK_BYTES).is_err());
    }
}
