//! The models folder: what is in it, where a name leads, and what has been verified.
//!
//! Next to the files the folder holds two hidden folders: `.verified` with one small record for each file whose checksum was
//! computed (so that a start does not read hundreds of megabytes to learn what it knew), and `.partial` with the locks and
//! temporary files of running downloads. An unfinished download is `<file>.part`.

use crate::catalogue::{Catalogue, Digest, Entry};
use crate::gguf::part_names;
use crate::hub_model;
use crate::package;
use crate::pull::lock::Lock;
use crate::q4nx;
use npuhal_core::error::RunError;
use npuhal_core::file::write_whole;
use npuhal_core::stage::Control;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Bytes hashed between two looks at the caller's [`Control`].
const STEP_BYTES: usize = 1 << 20;
/// No record is longer than this.
const RECORD_LIMIT_BYTES: u64 = 4096;

/// A folder with model files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    folder: PathBuf,
}

/// What is known about a catalogue entry's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// Not there.
    Absent,
    /// There, and its checksum was right when it was last changed.
    Verified,
    /// There with the right size, checksum not computed since its last change.
    Unverified,
    /// There with another size.
    WrongSize {
        /// Its size in bytes.
        found_bytes: u64,
    },
}

/// Kind of a stored file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredKind {
    /// The file of a catalogue entry.
    Catalogued(Presence),
    /// An unfinished download of a catalogue entry.
    Unfinished {
        /// Bytes of the whole.
        size_bytes: u64,
    },
    /// A GGUF file that is in no catalogue.
    Foreign,
}

/// A file in the models folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Catalogue name, or the file's name.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub len_bytes: u64,
    /// What it is.
    pub kind: StoredKind,
}

/// Where a name leads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Located<'c> {
    /// To the catalogue; the file may have to be fetched first ([`crate::pull::pull`]).
    Catalogued(&'c Entry),
    /// To a file.
    File(PathBuf),
    /// To a Q4NX directory, an xdna1 package or a Hugging Face directory.
    Directory(PathBuf),
}

/// A models folder that cannot be used, or a name that leads nowhere.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no folder to use.
    #[error("no models folder: HOME is not set; give one with --models-dir or NPUHAL_MODELS")]
    NoHome,
    /// The system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was to be done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// No model of this name.
    #[error(
        "no model `{spec}`{}; known: {}; or give the path of a file or directory",
        nearest.as_ref().map(|name| format!("; did you mean `{name}`?")).unwrap_or_default(), known.join(", ")
    )]
    UnknownModel {
        /// What was asked for.
        spec: String,
        /// Names of the catalogue and of other files in the models folder.
        known: Vec<String>,
        /// The name that is nearest.
        nearest: Option<String>,
    },
    /// Several packages have this id.
    #[error(
        "several packages have the id `{spec}`: {}; give the path of one, or remove the others",
        paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Ambiguous {
        /// The id.
        spec: String,
        /// The packages.
        paths: Vec<PathBuf>,
    },
    /// No file at this path.
    #[error("{}: no such file; give the path of a model or the name of one: {}", path.display(), known.join(", "))]
    NoSuchFile {
        /// The path.
        path: PathBuf,
        /// Names of the catalogue and of other files in the models folder.
        known: Vec<String>,
    },
    /// The path is not a file.
    #[error("{}: wanted a GGUF file, found {found}", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// Nothing of this model is stored.
    #[error("{name} is not in {}", folder.display())]
    NotStored {
        /// The model's name.
        name: String,
        /// The models folder.
        folder: PathBuf,
    },
    /// The file has the wrong size.
    #[error("{}: wanted {wanted_bytes} bytes, found {found_bytes}; fetch it again with `npuhal pull {name}`", path.display())]
    WrongSize {
        /// The model's name.
        name: String,
        /// The file.
        path: PathBuf,
        /// Bytes of the catalogue.
        wanted_bytes: u64,
        /// Bytes of the file.
        found_bytes: u64,
    },
    /// The file has the wrong checksum.
    #[error("{}: wanted SHA-256 {wanted}, found {found}; fetch it again with `npuhal pull {name}`", path.display())]
    WrongChecksum {
        /// The model's name.
        name: String,
        /// The file.
        path: PathBuf,
        /// Checksum of the catalogue.
        wanted: Digest,
        /// Checksum of the file.
        found: Digest,
    },
    /// Another process works on this model.
    #[error("{name} is being fetched by another process; wait for it or stop it first")]
    Busy {
        /// The model's name.
        name: String,
    },
    /// The caller stopped the work.
    #[error(transparent)]
    Stopped(#[from] RunError),
}

/// State of a file at the moment its checksum was right.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    size_bytes: u64,
    modified_s: i64,
    modified_ns: i64,
    inode: u64,
    sha256: String,
}

impl Store {
    /// The store in `folder`, which need not exist.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The store to use: `argument`, else `NPUHAL_MODELS`, else `$XDG_DATA_HOME/npuhal/models`, else
    /// `$HOME/.local/share/npuhal/models`. Empty variables count as unset, as does a relative `XDG_DATA_HOME` (XDG Base
    /// Directory specification).
    ///
    /// # Errors
    /// [`StoreError::NoHome`].
    pub fn locate(argument: Option<&Path>) -> Result<Self, StoreError> {
        Self::locate_with(argument, &|name| std::env::var_os(name))
    }

    fn locate_with(argument: Option<&Path>, env: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, StoreError> {
        let variable = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(folder) = argument.map(Path::to_owned).or_else(|| variable("NPUHAL_MODELS")) {
            return Ok(Self::new(folder));
        }
        let data = variable("XDG_DATA_HOME").filter(|path| path.is_absolute());
        let data = data.or_else(|| variable("HOME").map(|home| home.join(".local/share"))).ok_or(StoreError::NoHome)?;
        Ok(Self::new(data.join("npuhal/models")))
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the file of `entry` is or will be.
    #[must_use]
    pub fn path_of(&self, entry: &Entry) -> PathBuf {
        self.folder.join(&entry.file)
    }

    /// Where the unfinished file of `entry` is or will be.
    #[must_use]
    pub fn part_path_of(&self, entry: &Entry) -> PathBuf {
        self.folder.join(format!("{}.part", entry.file))
    }

    /// What is known about the file of `entry`, without reading it.
    #[must_use]
    pub fn presence(&self, entry: &Entry) -> Presence {
        match fs::metadata(self.path_of(entry)) {
            Ok(metadata) if metadata.is_file() && metadata.len() == entry.size_bytes => {
                let verified = self.read_record(&entry.file) == Some(Record::new(&metadata, entry.sha256));
                if verified { Presence::Verified } else { Presence::Unverified }
            }
            Ok(metadata) if metadata.is_file() => Presence::WrongSize { found_bytes: metadata.len() },
            _ => Presence::Absent,
        }
    }

    /// Reads the file of `entry`, compares size and checksum, and keeps the result for the next start. `progress` gets the
    /// number of bytes read so far.
    ///
    /// # Errors
    /// [`StoreError::NotStored`], [`StoreError::WrongSize`], [`StoreError::WrongChecksum`], [`StoreError::Io`],
    /// [`StoreError::Stopped`].
    pub fn verify(&self, entry: &Entry, control: &Control, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let path = self.path_of(entry);
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(StoreError::NotStored { name: entry.name.clone(), folder: self.folder.clone() });
            }
            opened => opened.map_err(io_error(&path, "open"))?,
        };
        let metadata = file.metadata().map_err(io_error(&path, "inspect"))?;
        let name = entry.name.clone();
        let (wanted_bytes, found_bytes) = (entry.size_bytes, metadata.len());
        if wanted_bytes != found_bytes {
            self.forget(&entry.file);
            return Err(StoreError::WrongSize { name, path, wanted_bytes, found_bytes });
        }
        let found = hash(&file, control, progress).map_err(|error| match error {
            Ok(stopped) => StoreError::Stopped(stopped),
            Err(source) => StoreError::Io { path: path.clone(), action: "read", source },
        })?;
        if found != entry.sha256 {
            self.forget(&entry.file);
            return Err(StoreError::WrongChecksum { name, path, wanted: entry.sha256, found });
        }
        self.remember(entry, &metadata);
        Ok(())
    }

    /// Model files in the folder, by name: catalogue files, unfinished downloads, other GGUF files. A folder that does not
    /// exist is empty.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn list(&self, catalogue: &Catalogue) -> Result<Vec<Stored>, StoreError> {
        let files = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened.map_err(io_error(&self.folder, "list"))?,
        };
        let mut found = Vec::new();
        for file in files {
            let file = file.map_err(io_error(&self.folder, "list"))?;
            // A file that vanishes meanwhile, or a dangling link, is not listed.
            let Ok(metadata) = fs::metadata(file.path()) else { continue };
            if let Some(name) = file.file_name().to_str().filter(|name| metadata.is_file() && !name.starts_with('.')) {
                found.extend(self.describe(catalogue, name, metadata.len()));
            }
        }
        found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        Ok(found)
    }

    /// Removes a model's file, or all its parts, its unfinished download and its records. `name` is a catalogue name, an alias, or the name of
    /// a GGUF file in the folder. Returns the bytes that were freed.
    ///
    /// # Errors
    /// [`StoreError::UnknownModel`], [`StoreError::NotStored`], [`StoreError::Busy`], [`StoreError::Io`].
    pub fn remove(&self, catalogue: &Catalogue, name: &str) -> Result<u64, StoreError> {
        let (name, file) = match catalogue.find(name).or_else(|| catalogue.find_file(name)) {
            Some(entry) => (entry.name.clone(), entry.file.clone()),
            None => match self.foreign(name) {
                Some(file) => (name.to_owned(), file),
                None => return Err(self.unknown(catalogue, name)),
            },
        };
        let _lock = match self.work_folder().is_dir() {
            true => {
                Some(Lock::try_acquire(&self.work_folder(), &file)?.ok_or(StoreError::Busy { name: name.clone() })?)
            }
            false => None,
        };
        let mut freed = None;
        let parts = part_names(&file).map_or_else(Vec::new, |(_, parts)| parts);
        for file in [file.clone(), format!("{file}.part")].iter().chain(&parts) {
            if let Some(len_bytes) = remove_file(&self.folder.join(file))? {
                freed = Some(freed.unwrap_or(0) + len_bytes);
            }
        }
        self.forget(&file);
        freed.ok_or(StoreError::NotStored { name, folder: self.folder.clone() })
    }

    /// Where `spec` leads: a catalogue name or alias, the path of a file or of a model directory, the name of
    /// a GGUF file in the folder (with or without its extension), or the id or directory name of an xdna1 package in the
    /// folder, in this order. `./name` is always a path, as is a name that is no UTF-8.
    ///
    /// # Errors
    /// [`StoreError::UnknownModel`], [`StoreError::NoSuchFile`], [`StoreError::NotAFile`], [`StoreError::Ambiguous`].
    pub fn resolve<'c>(&self, catalogue: &'c Catalogue, spec: impl AsRef<OsStr>) -> Result<Located<'c>, StoreError> {
        let path = Path::new(spec.as_ref());
        let Some(spec) = path.to_str() else {
            return match fs::metadata(path) {
                Ok(metadata) if metadata.is_file() => Ok(Located::File(path.to_owned())),
                Ok(_) => Err(StoreError::NotAFile { path: path.to_owned(), found: "something else" }),
                Err(_) => Err(StoreError::NoSuchFile { path: path.to_owned(), known: self.known(catalogue) }),
            };
        };
        if let Some(entry) = catalogue.find(spec) {
            return Ok(Located::Catalogued(entry));
        }
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => return Ok(Located::File(path.to_owned())),
            Ok(metadata)
                if metadata.is_dir()
                    && (path.join(q4nx::directory::MODEL_FILE).is_file()
                        || package::is_package(path)
                        || hub_model::is_model(path)) =>
            {
                return Ok(Located::Directory(path.to_owned()));
            }
            Ok(metadata) if spec.contains('/') => {
                let found = if metadata.is_dir() { "a folder" } else { "something else" };
                return Err(StoreError::NotAFile { path: path.to_owned(), found });
            }
            _ => {}
        }
        if let Some(entry) = catalogue.find_file(spec) {
            return Ok(Located::Catalogued(entry));
        }
        if let Some(file) = self.foreign(spec) {
            return Ok(Located::File(self.folder.join(file)));
        }
        if let Some(package) = self.package(spec)? {
            return Ok(Located::Directory(package));
        }
        if spec.contains('/') || spec.to_ascii_lowercase().ends_with(".gguf") {
            return Err(StoreError::NoSuchFile { path: path.to_owned(), known: self.known(catalogue) });
        }
        Err(self.unknown(catalogue, spec))
    }

    /// The xdna1 package in the folder that `spec` names, by the name of its directory or by its id.
    fn package(&self, spec: &str) -> Result<Option<PathBuf>, StoreError> {
        let packages = self.packages();
        let by_name = packages.iter().find(|package| package.path.file_name() == Some(OsStr::new(spec)));
        if let Some(package) = by_name {
            return Ok(Some(package.path.clone()));
        }
        let mut paths = packages.into_iter().filter(|package| package.model_id == spec).map(|package| package.path);
        let (first, others) = (paths.next(), paths.collect::<Vec<_>>());
        match first {
            Some(first) if !others.is_empty() => {
                let paths = [first].into_iter().chain(others).collect();
                Err(StoreError::Ambiguous { spec: spec.to_owned(), paths })
            }
            first => Ok(first),
        }
    }

    /// The xdna1 packages in the folder; one that cannot be used is left out.
    fn packages(&self) -> Vec<package::Scanned> {
        package::scan(&self.folder).unwrap_or_default().packages
    }

    /// The folder of locks and temporary files.
    pub(crate) fn work_folder(&self) -> PathBuf {
        self.folder.join(".partial")
    }

    /// Notes that the file of `entry`, which has `metadata`, has the right checksum. A folder that cannot be written costs
    /// the next start a checksum, nothing else.
    pub(crate) fn remember(&self, entry: &Entry, metadata: &Metadata) {
        let path = self.record_path(&entry.file);
        let written =
            serde_json::to_vec(&Record::new(metadata, entry.sha256)).map_err(io::Error::from).and_then(|json| {
                fs::create_dir_all(self.folder.join(".verified"))?;
                write_whole(&path, &json)
            });
        if let Err(error) = written {
            tracing::debug!("{}: not written: {error}", path.display());
        }
    }

    fn describe(&self, catalogue: &Catalogue, file: &str, len_bytes: u64) -> Option<Stored> {
        let path = self.folder.join(file);
        let whole = file.strip_suffix(".part").unwrap_or(file);
        let (name, kind) = match catalogue.find_file(whole) {
            Some(entry) if whole != file => {
                (entry.name.clone(), StoredKind::Unfinished { size_bytes: entry.size_bytes })
            }
            Some(entry) => (entry.name.clone(), StoredKind::Catalogued(self.presence(entry))),
            None if is_gguf(file) => match part_names(file) {
                // The first part stands for the model.
                Some((number, _)) if number > 1 => return None,
                Some((_, parts)) => {
                    let len = |part| fs::metadata(self.folder.join(part)).map_or(0, |found| found.len());
                    let len_bytes = parts.iter().map(len).sum();
                    return Some(Stored { name: file.to_owned(), path, len_bytes, kind: StoredKind::Foreign });
                }
                None => (file.to_owned(), StoredKind::Foreign),
            },
            None => return None,
        };
        Some(Stored { name, path, len_bytes, kind })
    }

    /// Name of the GGUF file in the folder that `spec` names, with or without its extension.
    fn foreign(&self, spec: &str) -> Option<String> {
        if spec.is_empty() || spec.starts_with('.') || spec.contains('/') {
            return None;
        }
        let candidates = [spec.to_owned(), format!("{spec}.gguf")];
        candidates.into_iter().find(|file| is_gguf(file) && self.folder.join(file).is_file())
    }

    fn known(&self, catalogue: &Catalogue) -> Vec<String> {
        let names = catalogue.entries().iter().map(|entry| entry.name.clone());
        let foreign = self.list(catalogue).unwrap_or_default().into_iter();
        let foreign = foreign.filter(|stored| stored.kind == StoredKind::Foreign).map(|stored| stored.name);
        names.chain(foreign).chain(self.packages().into_iter().map(|package| package.model_id)).collect()
    }

    fn unknown(&self, catalogue: &Catalogue, spec: &str) -> StoreError {
        let nearest = catalogue.nearest(spec).map(str::to_owned);
        StoreError::UnknownModel { spec: spec.to_owned(), known: self.known(catalogue), nearest }
    }

    fn record_path(&self, file: &str) -> PathBuf {
        self.folder.join(".verified").join(format!("{file}.json"))
    }

    fn read_record(&self, file: &str) -> Option<Record> {
        let mut json = Vec::new();
        File::open(self.record_path(file)).ok()?.take(RECORD_LIMIT_BYTES).read_to_end(&mut json).ok()?;
        serde_json::from_slice(&json).ok()
    }

    fn forget(&self, file: &str) {
        let _ = fs::remove_file(self.record_path(file));
    }
}

impl Record {
    fn new(metadata: &Metadata, sha256: Digest) -> Self {
        Self {
            size_bytes: metadata.len(),
            modified_s: metadata.mtime(),
            modified_ns: metadata.mtime_nsec(),
            inode: metadata.ino(),
            sha256: sha256.to_string(),
        }
    }
}

fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { path, action, source }
}

fn is_gguf(file: &str) -> bool {
    Path::new(file).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Removes a file, or the link to one; its size, or nothing where there is none.
fn remove_file(path: &Path) -> Result<Option<u64>, StoreError> {
    let len_bytes = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found.map_err(io_error(path, "inspect"))?.len(),
    };
    fs::remove_file(path).map_err(io_error(path, "remove"))?;
    Ok(Some(len_bytes))
}

/// SHA-256 of a file; the error is the caller's stop or the system's.
fn hash(
    mut file: &File,
    control: &Control,
    progress: &mut dyn FnMut(u64),
) -> Result<Digest, Result<RunError, io::Error>> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; STEP_BYTES];
    let mut done = 0;
    loop {
        control.check().map_err(Ok)?;
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Digest(hash.finalize().into())),
            Ok(len) => {
                hash.update(&buffer[..len]);
                done += len as u64;
                progress(done);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_found_in_the_stated_order() {
        let locate = |argument: Option<&str>, variables: &[(&str, &str)]| {
            let variables: Vec<(String, OsString)> =
                variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).into())).collect();
            let env = move |name: &str| variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
            Store::locate_with(argument.map(Path::new), &env).map(|store| store.folder)
        };
        let all = [("NPUHAL_MODELS", "/m"), ("XDG_DATA_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(locate(Some("a"), &all).unwrap(), Path::new("a"));
        assert_eq!(locate(None, &all).unwrap(), Path::new("/m"));
        assert_eq!(locate(None, &all[1..]).unwrap(), Path::new("/x/npuhal/models"));
        assert_eq!(locate(None, &all[2..]).unwrap(), Path::new("/h/.local/share/npuhal/models"));
        let odd = [("NPUHAL_MODELS", ""), ("XDG_DATA_HOME", "relative"), ("HOME", "/h")];
        assert_eq!(locate(None, &odd).unwrap(), Path::new("/h/.local/share/npuhal/models"));
        assert!(matches!(locate(None, &[("HOME", "")]), Err(StoreError::NoHome)));
    }

    /// Each part was a model of its own, and removing one broke the others.
    #[test]
    fn the_parts_of_a_file_are_one_model() {
        let folder = tempfile::tempdir().unwrap();
        let part = |number: u32| format!("big-{number:05}-of-00003.gguf");
        for number in 1..=3 {
            fs::write(folder.path().join(part(number)), vec![0; number as usize]).unwrap();
        }
        for odd in ["odd-00004-of-00003.gguf", "odd-1-of-2.gguf"] {
            fs::write(folder.path().join(odd), "1").unwrap();
        }
        let store = Store { folder: folder.path().to_owned() };
        let list = store.list(Catalogue::builtin()).unwrap();
        let found: Vec<(&str, u64)> = list.iter().map(|stored| (stored.name.as_str(), stored.len_bytes)).collect();
        assert_eq!(found, [(part(1).as_str(), 6), ("odd-00004-of-00003.gguf", 1), ("odd-1-of-2.gguf", 1)]);
        assert_eq!(store.remove(Catalogue::builtin(), &part(1)).unwrap(), 6);
        assert_eq!(store.list(Catalogue::builtin()).unwrap().len(), 2);
    }
}
