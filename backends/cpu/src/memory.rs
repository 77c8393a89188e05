//! Memory for packed weights and kernel scratch.
#![allow(unsafe_code, reason = "hands out disjoint parts of one mapping to the packing threads")]

use crate::error::CpuError;
use std::ops::Range;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// One anonymous mapping, aligned to and (where the system can) backed by 2 MiB pages. Zero until written.
#[derive(Debug)]
pub struct Arena {
    map: memmap2::MmapMut,
    start: usize,
    len: usize,
}

impl Arena {
    /// Maps `len` bytes.
    ///
    /// # Errors
    /// [`CpuError::Memory`].
    pub fn new(len: usize, what: &'static str) -> Result<Self, CpuError> {
        let failed = |source| CpuError::Memory { what, wanted_bytes: len as u64, source };
        let padded = len
            .checked_add(HUGE_PAGE_BYTES)
            .ok_or_else(|| failed(std::io::Error::from(std::io::ErrorKind::OutOfMemory)))?;
        let map = memmap2::MmapMut::map_anon(padded).map_err(failed)?;
        let start = (map.as_ptr() as usize).wrapping_neg() % HUGE_PAGE_BYTES;
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE_BYTES {
            // A hint: without it the kernels run, on small pages.
            let _ = map.advise_range(memmap2::Advice::HugePage, start, len);
        }
        Ok(Self { map, start, len })
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.start..self.start + self.len]
    }

    /// A writer that several threads may share.
    pub fn writer(&mut self) -> ArenaWriter<'_> {
        let len = self.len;
        let start = self.start;
        ArenaWriter { base: self.map[start..start + len].as_mut_ptr(), len, _arena: std::marker::PhantomData }
    }
}

/// Write access to an [`Arena`] by disjoint ranges.
#[derive(Debug)]
pub struct ArenaWriter<'a> {
    base: *mut u8,
    len: usize,
    _arena: std::marker::PhantomData<&'a mut Arena>,
}

// SAFETY: the pointer stands for an exclusive borrow of the arena; ranges are kept disjoint by the callers of `part`.
unsafe impl Sync for ArenaWriter<'_> {}

impl ArenaWriter<'_> {
    /// Bytes `range`, for writing.
    ///
    /// # Panics
    /// When `range` does not lie in the arena.
    ///
    /// # Safety
    /// No other part that is alive may overlap `range`.
    #[must_use]
    #[allow(clippy::mut_from_ref, reason = "parts are disjoint by the contract")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} bytes", self.len);
        // SAFETY: inside the mapping (checked above); exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.end - range.start) }
    }
}

/// A 64-byte piece; vectors of it are aligned to cache lines.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A growable, zero-initialised, cache-line-aligned scratch of plain numbers.
#[derive(Debug, Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// An empty scratch.
    #[must_use]
    pub const fn new() -> Self {
        Self { lines: Vec::new() }
    }

    /// Whether it has no room at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Makes room for `len` elements of `T`; keeps contents.
    pub fn reserve<T: bytemuck::Pod>(&mut self, len: usize) {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; 64]));
        }
    }

    /// As [`Scratch::reserve`], for sizes that may not fit.
    ///
    /// # Errors
    /// When memory is used up.
    pub fn try_reserve<T: bytemuck::Pod>(&mut self, len: usize) -> Result<(), std::collections::TryReserveError> {
        let lines = len.saturating_mul(size_of::<T>()).div_ceil(64);
        self.lines.try_reserve_exact(lines.saturating_sub(self.lines.len()))?;
        self.reserve::<T>(len);
        Ok(())
    }

    /// The first `len` elements.
    ///
    /// # Panics
    /// When [`Scratch::reserve`] was not called for as many.
    #[must_use]
    pub fn get<T: bytemuck::Pod>(&self, len: usize) -> &[T] {
        assert!(len * size_of::<T>() <= self.lines.len() * 64 && align_of::<T>() <= 64);
        // SAFETY: in bounds and aligned (checked above); any bytes are a valid `T: Pod`, and all are initialised.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), len) }
    }

    /// The first `len` elements, for writing.
    ///
    /// # Panics
    /// As [`Scratch::get`].
    #[must_use]
    pub fn get_mut<T: bytemuck::Pod>(&mut self, len: usize) -> &mut [T] {
        assert!(len * size_of::<T>() <= self.lines.len() * 64 && align_of::<T>() <= 64);
        // SAFETY: as in `get`; exclusive through `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }

    /// A pointer to the first `len` elements. Unlike [`Scratch::get_mut`] it makes no reference to them, so that it leaves
    /// pointers taken before valid.
    ///
    /// # Panics
    /// As [`Scratch::get`].
    pub(crate) fn shared<T: bytemuck::Pod>(&mut self, len: usize) -> Shared<T> {
        assert!(len * size_of::<T>() <= self.lines.len() * 64 && align_of::<T>() <= 64);
        Shared(self.lines.as_mut_ptr().cast())
    }
}

/// A raw pointer that threads of one parallel region share; each writes its own elements.
#[derive(Debug)]
pub(crate) struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: used only inside one parallel region whose threads write disjoint elements (see each use).
unsafe impl<T> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// # Safety
    /// `at..at + len` lies in the slice it was made from, which outlives the result, and nobody else holds these elements.
    pub(crate) unsafe fn slice<'a>(self, at: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }

    pub(crate) fn ptr(self) -> *mut T {
        self.0
    }
}
