//! The unfinished file: bytes from its start on, checked section by section as they arrive.

use super::error::PullError;
use crate::catalogue::{Digest, Section};
use npuhal_core::stage::Control;
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Bytes that were hashed or written between two looks at the caller's [`Control`].
const STEP_BYTES: usize = 1 << 20;

/// An unfinished file. It never grows beyond its catalogue size, and a section with the wrong checksum is cut off at once.
#[derive(Debug)]
pub(super) struct Partial {
    path: PathBuf,
    file: File,
    sections: Vec<Section>,
    /// Sections that are complete and right.
    verified: usize,
    len: u64,
    /// Hash of the bytes since the last verified section.
    section_hash: Sha256,
    whole_hash: Sha256,
    /// `whole_hash` at the end of the last verified section.
    whole_hash_verified: Sha256,
}

/// Why bytes were not taken.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A section is complete and wrong; the file was cut back to the section's start.
    WrongSection { start: u64, end: u64, wanted: Digest, found: Digest },
    /// More bytes than the file has; the surplus was not written.
    TooLong,
    /// The disk failed or is full.
    Disk(PullError),
}

impl Partial {
    /// Opens or creates the file and checks what it already holds; wrong sections and what follows them are cut off.
    /// `progress` gets the number of bytes checked so far.
    pub(super) fn open(
        path: &Path,
        sections: Vec<Section>,
        control: &Control,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, PullError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(PullError::io(path, "open"))?;
        let mut partial = Self {
            path: path.to_owned(),
            file,
            sections,
            verified: 0,
            len: 0,
            section_hash: Sha256::new(),
            whole_hash: Sha256::new(),
            whole_hash_verified: Sha256::new(),
        };
        partial.adopt(control, progress)?;
        Ok(partial)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of the finished file.
    pub(super) fn size_bytes(&self) -> u64 {
        self.sections.last().map_or(0, |section| section.end)
    }

    /// Bytes up to the end of the last verified section.
    pub(super) fn verified_len(&self) -> u64 {
        self.start_of(self.verified)
    }

    /// Whether all sections are there and right.
    pub(super) fn is_complete(&self) -> bool {
        self.verified == self.sections.len()
    }

    /// SHA-256 of all bytes so far.
    pub(super) fn digest(&self) -> Digest {
        Digest(self.whole_hash.clone().finalize().into())
    }

    /// Appends `bytes`.
    pub(super) fn append(&mut self, mut bytes: &[u8]) -> Result<(), Refusal> {
        while !bytes.is_empty() {
            let Some(section) = self.sections.get(self.verified) else { return Err(Refusal::TooLong) };
            let room = usize::try_from(section.end - self.len).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(bytes.len().min(room));
            if let Err(error) = self.file.write_all(now) {
                return Err(Refusal::Disk(self.write_failed(error)));
            }
            self.count(now)?;
            bytes = later;
        }
        Ok(())
    }

    /// Cuts back to the last verified section.
    pub(super) fn roll_back(&mut self) -> Result<(), PullError> {
        let len = self.verified_len();
        self.file.set_len(len).map_err(PullError::io(&self.path, "shorten"))?;
        self.file.seek(SeekFrom::Start(len)).map_err(PullError::io(&self.path, "position"))?;
        self.len = len;
        self.section_hash = Sha256::new();
        self.whole_hash = self.whole_hash_verified.clone();
        Ok(())
    }

    /// Cuts back to nothing.
    pub(super) fn start_over(&mut self) -> Result<(), PullError> {
        self.verified = 0;
        self.whole_hash_verified = Sha256::new();
        self.roll_back()
    }

    /// Brings the bytes to the disk.
    pub(super) fn sync(&self) -> Result<(), PullError> {
        self.file.sync_all().map_err(PullError::io(&self.path, "write to the disk"))
    }

    fn adopt(&mut self, control: &Control, progress: &mut dyn FnMut(u64)) -> Result<(), PullError> {
        let found = self.file.metadata().map_err(PullError::io(&self.path, "inspect"))?;
        if !found.is_file() {
            let source = std::io::Error::new(ErrorKind::InvalidInput, "not a regular file");
            return Err(PullError::Io { path: self.path.clone(), action: "write", source });
        }
        let mut rest = found.len().min(self.size_bytes());
        let mut buffer = vec![0; STEP_BYTES];
        while rest > 0 && !self.is_complete() {
            super::check(control, self)?;
            let room = rest.min(self.sections[self.verified].end - self.len).min(STEP_BYTES as u64);
            let step = &mut buffer[..usize::try_from(room).unwrap_or(STEP_BYTES)];
            self.file.read_exact(step).map_err(PullError::io(&self.path, "read"))?;
            rest -= step.len() as u64;
            match self.count(step) {
                Ok(()) => progress(self.len),
                Err(Refusal::Disk(error)) => return Err(error),
                Err(_) => return Ok(()),
            }
        }
        self.file.set_len(self.len).map_err(PullError::io(&self.path, "shorten"))
    }

    /// Takes bytes into account that are in the file and do not cross the end of the current section.
    fn count(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        self.section_hash.update(bytes);
        self.whole_hash.update(bytes);
        self.len += bytes.len() as u64;
        let Section { end, sha256: wanted } = self.sections[self.verified];
        if self.len < end {
            return Ok(());
        }
        let found = Digest(std::mem::take(&mut self.section_hash).finalize().into());
        if found == wanted {
            self.verified += 1;
            self.whole_hash_verified = self.whole_hash.clone();
            return Ok(());
        }
        let start = self.verified_len();
        self.roll_back().map_err(Refusal::Disk)?;
        Err(Refusal::WrongSection { start, end, wanted, found })
    }

    fn start_of(&self, section: usize) -> u64 {
        section.checked_sub(1).map_or(0, |before| self.sections[before].end)
    }

    fn write_failed(&self, error: std::io::Error) -> PullError {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        match (error.kind(), super::free_bytes(folder)) {
            (ErrorKind::StorageFull, Ok(free_bytes)) => PullError::NoSpace {
                folder: folder.to_owned(),
                wanted_bytes: self.size_bytes().saturating_sub(self.len),
                free_bytes,
            },
            _ => PullError::Io { path: self.path.clone(), action: "write", source: error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const CONTENT: &[u8] = b"0123456789abcdef";

    fn sections() -> Vec<Section> {
        let section = |start: usize, end: usize| Section {
            end: end as u64,
            sha256: Digest(Sha256::digest(&CONTENT[start..end]).into()),
        };
        vec![section(0, 6), section(6, 10), section(10, 16)]
    }

    fn open(path: &Path) -> Partial {
        Partial::open(path, sections(), &Control::new(), &mut |_| {}).unwrap()
    }

    #[test]
    fn bytes_are_taken_up_to_the_size_and_no_further() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.part");
        let mut partial = open(&path);
        for chunk in CONTENT.chunks(5) {
            assert!(!partial.is_complete());
            partial.append(chunk).unwrap();
        }
        assert!(partial.is_complete());
        assert_eq!(partial.digest(), Digest(Sha256::digest(CONTENT).into()));
        assert!(matches!(partial.append(b"x"), Err(Refusal::TooLong)));
        assert_eq!(fs::read(&path).unwrap(), CONTENT);
        partial.start_over().unwrap();
        assert!(matches!(partial.append(&[CONTENT, b"surplus"].concat()), Err(Refusal::TooLong)));
        assert_eq!(fs::read(&path).unwrap(), CONTENT);
    }

    #[test]
    fn a_wrong_section_is_cut_off_and_can_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.part");
        let mut partial = open(&path);
        match partial.append(b"012345678Xabcdef") {
            Err(Refusal::WrongSection { start: 6, end: 10, wanted, found }) => assert_ne!(wanted, found),
            other => panic!("{other:?}"),
        }
        assert_eq!((partial.len(), fs::read(&path).unwrap()), (6, b"012345".to_vec()));
        partial.append(&CONTENT[6..]).unwrap();
        assert!(partial.is_complete());
        assert_eq!(partial.digest(), Digest(Sha256::digest(CONTENT).into()));
        assert_eq!(fs::read(&path).unwrap(), CONTENT);
    }

    #[test]
    fn what_is_there_is_checked_and_kept_as_far_as_it_is_right() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.part");
        for (present, kept) in [(&CONTENT[..8], 8), (b"01234567xx", 6), (b"x1234567", 0), (b"0123456789abcdefgh", 16)] {
            fs::write(&path, present).unwrap();
            let mut partial = open(&path);
            assert_eq!((partial.len(), fs::metadata(&path).unwrap().len()), (kept, kept));
            partial.append(&CONTENT[usize::try_from(kept).unwrap()..]).unwrap();
            assert_eq!(partial.digest(), Digest(Sha256::digest(CONTENT).into()));
        }
    }

    #[test]
    fn a_folder_in_its_place_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Partial::open(folder.path(), sections(), &Control::new(), &mut |_| {}).is_err());
    }
}
