//! The provenance stamp of a packed directory: which program made it from which file.

use super::error::{PackError, io_error};
use crate::catalogue::Digest;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Its file in the directory.
pub const FILE: &str = "pack-stamp.txt";
/// Name of this program in stamps and tables.
pub const CONVERTER: &str = "npuhal";
/// Version of what is written: raised when the same source would give other bytes.
pub const LAYOUT_VERSION: u32 = 1;
/// What matrices become.
const TENSOR_TYPE: &str = "Q4_1";
/// No stamp is longer than this.
const LIMIT_BYTES: u64 = 4096;

/// A file's size and time of change, for recognising it without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    /// Length.
    pub size_bytes: u64,
    /// Time of the last change: seconds of the epoch.
    pub modified_s: i64,
    /// Nanoseconds on top.
    pub modified_ns: i64,
}

impl FileState {
    /// The state in `metadata`.
    #[must_use]
    pub fn new(metadata: &Metadata) -> Self {
        Self { size_bytes: metadata.len(), modified_s: metadata.mtime(), modified_ns: metadata.mtime_nsec() }
    }
}

/// What makes a packed directory ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    /// Program that made it.
    pub converter: String,
    /// Its version.
    pub converter_version: String,
    /// Version of the layout.
    pub layout: u32,
    /// What matrices became.
    pub tensor_type: String,
    /// Architecture of the source.
    pub arch: String,
    /// Name of the source file.
    pub source: String,
    /// State of the source when it was packed.
    pub source_state: FileState,
    /// SHA-256 of the source.
    pub source_sha256: Digest,
    /// Length of `model.q4nx`.
    pub model_bytes: u64,
}

/// What a directory's stamp says to one who did not write it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StampState {
    /// There is one and it can be read.
    Found(Stamp),
    /// There is none.
    Missing,
    /// There is something else in its place.
    Damaged {
        /// What is wrong.
        reason: String,
    },
    /// The system does not let it be read.
    Unreadable {
        /// What the system said.
        reason: String,
    },
}

impl Stamp {
    /// A stamp of this program and version.
    #[must_use]
    pub fn new(arch: &str, source: &str, state: FileState, sha256: Digest, model_bytes: u64) -> Self {
        Self {
            converter: CONVERTER.to_owned(),
            converter_version: env!("CARGO_PKG_VERSION").to_owned(),
            layout: LAYOUT_VERSION,
            tensor_type: TENSOR_TYPE.to_owned(),
            arch: arch.to_owned(),
            source: one_line(source),
            source_state: state,
            source_sha256: sha256,
            model_bytes,
        }
    }

    /// Why this program in this version would not have written it; `None` where it would.
    #[must_use]
    pub fn foreign(&self) -> Option<String> {
        let wanted = Self::new(&self.arch, &self.source, self.source_state, self.source_sha256, self.model_bytes);
        let of = |stamp: &Self| {
            format!("{} {}, layout {}, {}", stamp.converter, stamp.converter_version, stamp.layout, stamp.tensor_type)
        };
        (*self != wanted).then(|| format!("wanted a directory made by {}, found one by {}", of(&wanted), of(self)))
    }

    /// Reads the stamp of `directory`.
    #[must_use]
    pub fn look(directory: &Path) -> StampState {
        let mut text = String::new();
        let read = File::open(directory.join(FILE)).and_then(|file| file.take(LIMIT_BYTES).read_to_string(&mut text));
        match read {
            Ok(_) => match Self::parse(&text) {
                Ok(stamp) => StampState::Found(stamp),
                Err(reason) => StampState::Damaged { reason },
            },
            Err(error) if error.kind() == ErrorKind::NotFound => StampState::Missing,
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                StampState::Damaged { reason: "it is not UTF-8 text".to_owned() }
            }
            Err(error) => StampState::Unreadable { reason: error.to_string() },
        }
    }

    /// The stamp as text, `key=value` lines.
    #[must_use]
    pub fn text(&self) -> String {
        let FileState { size_bytes, modified_s, modified_ns } = self.source_state;
        let mut text = String::new();
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{key}={value}");
        };
        line("converter", &self.converter);
        line("converter_version", &self.converter_version);
        line("layout", &self.layout);
        line("q4nx_default_tensor_type", &self.tensor_type);
        line("arch", &self.arch);
        line("source", &self.source);
        line("source_size", &size_bytes);
        line("source_modified", &format_args!("{modified_s}.{modified_ns:09}"));
        line("source_sha256", &self.source_sha256);
        line("model_size", &self.model_bytes);
        text
    }

    fn parse(text: &str) -> Result<Self, String> {
        let lines: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
        let field = |key: &str| lines.get(key).copied().ok_or_else(|| format!("wanted a line {key}=…, found none"));
        let number = |key: &str| -> Result<u64, String> {
            let found = field(key)?;
            found.parse().map_err(|_| format!("{key}: wanted a number, found {found:?}"))
        };
        let modified = || -> Result<(i64, i64), String> {
            let found = field("source_modified")?;
            let parts = found.split_once('.').and_then(|(s, ns)| Some((s.parse().ok()?, ns.parse().ok()?)));
            parts.ok_or_else(|| format!("source_modified: wanted seconds.nanoseconds, found {found:?}"))
        };
        let (modified_s, modified_ns) = modified()?;
        let sha256 = field("source_sha256")?;
        Ok(Self {
            converter: field("converter")?.to_owned(),
            converter_version: field("converter_version")?.to_owned(),
            layout: u32::try_from(number("layout")?).map_err(|error| format!("layout: {error}"))?,
            tensor_type: field("q4nx_default_tensor_type")?.to_owned(),
            arch: field("arch")?.to_owned(),
            source: field("source")?.to_owned(),
            source_state: FileState { size_bytes: number("source_size")?, modified_s, modified_ns },
            source_sha256: sha256
                .parse()
                .map_err(|_| format!("source_sha256: wanted 64 hex digits, found {sha256:?}"))?,
            model_bytes: number("model_size")?,
        })
    }
}

/// Line breaks would make two lines of one value.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// SHA-256 of `file`, read in pieces of 1 MiB; `go_on` is asked before each and ends the work with its error.
pub(super) fn sha256(path: &Path, go_on: &dyn Fn() -> Result<(), PackError>) -> Result<Digest, PackError> {
    let mut file = File::open(path).map_err(io_error(path, "open"))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        go_on()?;
        match read_some(&mut file, &mut buffer).map_err(io_error(path, "read"))? {
            0 => return Ok(Digest(hash.finalize().into())),
            len => hash.update(&buffer[..len]),
        }
    }
}

fn read_some(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp() -> Stamp {
        let state = FileState { size_bytes: 7, modified_s: -3, modified_ns: 42 };
        Stamp::new("qwen3", "a\nb.gguf", state, Digest([0xab; 32]), 99)
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Stamp::look(folder.path()), StampState::Missing);
        std::fs::write(folder.path().join(FILE), stamp().text()).unwrap();
        assert_eq!(Stamp::look(folder.path()), StampState::Found(stamp()));
        assert_eq!(stamp().source, "a?b.gguf");
        assert_eq!(stamp().foreign(), None);
        for bad in ["", "converter=npuhal\n", "\u{0}", &stamp().text().replace("source_size=7", "source_size=x")] {
            std::fs::write(folder.path().join(FILE), bad).unwrap();
            assert!(matches!(Stamp::look(folder.path()), StampState::Damaged { .. }), "{bad:?}");
        }
    }

    #[test]
    fn another_converter_version_or_layout_is_foreign() {
        for change in [
            |stamp: &mut Stamp| stamp.converter = "other".to_owned(),
            |stamp: &mut Stamp| stamp.converter_version = "0.0.0".to_owned(),
            |stamp: &mut Stamp| stamp.layout += 1,
            |stamp: &mut Stamp| stamp.tensor_type = "Q8".to_owned(),
        ] {
            let mut changed = stamp();
            change(&mut changed);
            assert!(changed.foreign().is_some());
        }
    }
}
