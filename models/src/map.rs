//! Read-only file mappings: the only module of this crate with `unsafe`.
#![allow(unsafe_code, reason = "mapping a file is unsafe by nature; see the SAFETY comment")]

use crate::error::ModelError;
use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A file, mapped read-only.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl FileMap {
    /// Maps the regular file at `path`. An empty file maps to no bytes.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        // Asked before opening: opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the mapping is private and read-only. Model files are replaced by rename, never written in place, by this
        // program; a foreign process that truncates a mapped file can make this process fault, as with any mapped file.
        let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file) }.map_err(io)?;
        Ok(Self { path: path.to_owned(), map })
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells the system that `range` will be read soon. A hint: failures are ignored.
    pub fn will_need(&self, range: std::ops::Range<usize>) {
        if let Some(len) = range.end.checked_sub(range.start).filter(|_| range.end <= self.map.len()) {
            let _ = self.map.advise_range(memmap2::Advice::WillNeed, range.start, len);
        }
    }

    /// Tells the system that `range` is not needed in memory now; it is read from the file again when touched.
    pub fn release(&self, range: std::ops::Range<usize>) {
        const PAGE: usize = 4096;
        let start = range.start.next_multiple_of(PAGE);
        let end = range.end.min(self.map.len()) / PAGE * PAGE;
        if start < end {
            // SAFETY: the mapping is read-only and file-backed, so dropped pages come back with the same contents.
            let _ = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
        }
    }
}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
