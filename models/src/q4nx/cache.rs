//! Packed models that the program keeps for itself, each under the name and place of its GGUF file.
//!
//! Before a directory is used again its stamp is checked, and the declared scales of the GGUF file against its `config.json`.
//! A directory that someone names on the command line is not checked: it is trusted as published.

use super::config::read_json;
use super::directory::{KERNELS, MODEL_FILE, is_model};
use super::error::{PackError, io_error};
use super::guard;
use super::pack::{PackOptions, PackProgress, PackReport, pack};
use super::stamp::{self, FileState, Stamp, StampState};
use crate::gguf::GgufFile;
use crate::pull::lock::Lock;
use crate::store::StoreError;
use npuhal_core::stage::Control;
use sha2::{Digest as _, Sha256};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time between two tries for a lock that another process holds.
const WAIT: Duration = Duration::from_millis(100);

/// A folder of packed models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackCache {
    folder: PathBuf,
}

/// What a cached directory is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheState {
    /// There is none.
    Absent,
    /// Made by this program from this file, with its scales.
    Sound,
    /// It cannot be told who made it from what; its scales are right.
    Unverified {
        /// Why.
        reason: String,
    },
    /// It must not be used.
    Stale {
        /// The check that failed, and why.
        reason: String,
    },
}

/// A directory that can be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Cached {
    /// The directory.
    pub directory: PathBuf,
    /// How it was packed; `None` where it was there.
    pub packed: Option<PackReport>,
    /// Why the one that was there was discarded.
    pub discarded: Option<String>,
    /// A warning in a frame, for stderr; at most one in a process.
    pub warning: Option<String>,
}

impl PackCache {
    /// The cache in `folder`, which need not exist.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The cache to use: `NPUHAL_Q4NX_CACHE`, else `$XDG_CACHE_HOME/npuhal/q4nx`, else `$HOME/.cache/npuhal/q4nx`. Empty
    /// variables count as unset, as does a relative `XDG_CACHE_HOME`.
    ///
    /// # Errors
    /// [`PackError::NoCache`].
    pub fn locate() -> Result<Self, PackError> {
        Self::locate_with(&|name| std::env::var_os(name))
    }

    fn locate_with(env: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, PackError> {
        let variable = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(folder) = variable("NPUHAL_Q4NX_CACHE") {
            return Ok(Self::new(folder));
        }
        let cache = variable("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let cache = cache.or_else(|| variable("HOME").map(|home| home.join(".cache"))).ok_or(PackError::NoCache)?;
        Ok(Self::new(cache.join("npuhal/q4nx")))
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the file at `gguf` is or will be packed: its name without extension, and a few digits for its place.
    ///
    /// # Errors
    /// [`PackError::Io`] where there is no such file.
    pub fn directory_of(&self, gguf: &Path) -> Result<PathBuf, PackError> {
        let place = gguf.canonicalize().map_err(io_error(gguf, "find"))?;
        let stem = place.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let digits = Sha256::digest(place.as_os_str().as_bytes());
        Ok(self.folder.join(format!("{stem}-{:02x}{:02x}{:02x}{:02x}", digits[0], digits[1], digits[2], digits[3])))
    }

    /// What `directory` is worth as the packed form of the file at `gguf`. Reads that file only where its size is right and its
    /// time of change is not.
    ///
    /// # Errors
    /// [`PackError`] where the GGUF file cannot be read, and when `control` stops the work.
    pub fn state(&self, gguf: &Path, directory: &Path, control: &Control) -> Result<CacheState, PackError> {
        if !directory.exists() {
            return Ok(CacheState::Absent);
        }
        if !is_model(directory) {
            return Ok(CacheState::Stale { reason: "it is incomplete".to_owned() });
        }
        let found = provenance(gguf, directory, control)?;
        if let CacheState::Stale { reason } = found {
            return Ok(CacheState::Stale { reason: format!("it failed the provenance check: {reason}") });
        }
        let scales = guard::declared(&GgufFile::open(gguf)?);
        // A configuration that cannot be read states no scales.
        let config = read_json(directory).unwrap_or_default();
        match guard::problems(&scales, &config).first() {
            Some(problem) => Ok(CacheState::Stale { reason: format!("it failed the declared-scale check: {problem}") }),
            None => Ok(found),
        }
    }

    /// The packed form of the file at `gguf`: the one that is there where it may be used, otherwise packed now. Waits while
    /// another process works on it.
    ///
    /// # Errors
    /// [`PackError`].
    pub fn obtain(
        &self,
        gguf: &Path,
        options: &PackOptions,
        control: &Control,
        progress: &mut dyn FnMut(PackProgress),
    ) -> Result<Cached, PackError> {
        let directory = self.directory_of(gguf)?;
        fs::create_dir_all(&self.folder).map_err(io_error(&self.folder, "make"))?;
        let _lock = self.lock(&directory, control)?;
        let discarded = match self.state(gguf, &directory, control)? {
            CacheState::Sound => return Ok(Cached { directory, packed: None, discarded: None, warning: None }),
            CacheState::Unverified { reason } => {
                let warning = first_in_process().then(|| framed(&directory, &reason));
                return Ok(Cached { directory, packed: None, discarded: None, warning });
            }
            CacheState::Stale { reason } => {
                self.set_kernels_aside(&directory)?;
                fs::remove_dir_all(&directory).map_err(io_error(&directory, "discard"))?;
                Some(format!("{}: the cached directory is discarded and packed again: {reason}", directory.display()))
            }
            CacheState::Absent => None,
        };
        let packed = pack(gguf, &directory, options, control, progress)?;
        self.put_kernels_back(&directory)?;
        Ok(Cached { directory, packed: Some(packed), discarded, warning: None })
    }

    /// Kernels are nobody's to discard: they were put there for this model, which is packed again.
    fn set_kernels_aside(&self, directory: &Path) -> Result<(), PackError> {
        let (kernels, aside) = (directory.join(KERNELS), self.aside(directory));
        if fs::symlink_metadata(&kernels).is_err() {
            return Ok(());
        }
        if fs::symlink_metadata(&aside).is_ok_and(|metadata| metadata.is_dir()) {
            fs::remove_dir_all(&aside).map_err(io_error(&aside, "remove"))?;
        }
        fs::rename(&kernels, &aside).map_err(io_error(&kernels, "set aside"))
    }

    /// What was set aside, now or before an earlier try to pack that failed.
    fn put_kernels_back(&self, directory: &Path) -> Result<(), PackError> {
        let aside = self.aside(directory);
        if fs::symlink_metadata(&aside).is_err() {
            return Ok(());
        }
        fs::rename(&aside, directory.join(KERNELS)).map_err(io_error(&aside, "put back"))
    }

    fn aside(&self, directory: &Path) -> PathBuf {
        let name = directory.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.folder.join(format!(".{name}.{KERNELS}"))
    }

    fn lock(&self, directory: &Path, control: &Control) -> Result<Lock, PackError> {
        let name = directory.file_name().map(|name| format!(".{}", name.to_string_lossy())).unwrap_or_default();
        loop {
            match Lock::try_acquire(&self.folder, &name) {
                Ok(Some(lock)) => return Ok(lock),
                Ok(None) => {
                    control.check()?;
                    std::thread::sleep(WAIT);
                }
                Err(StoreError::Io { path, action, source }) => return Err(PackError::Io { path, action, source }),
                Err(other) => {
                    return Err(io_error(&self.folder, "lock")(std::io::Error::other(other.to_string())));
                }
            }
        }
    }
}

/// Who made the directory from what.
fn provenance(gguf: &Path, directory: &Path, control: &Control) -> Result<CacheState, PackError> {
    let stale = |reason: String| Ok(CacheState::Stale { reason });
    let stamp = match Stamp::look(directory) {
        StampState::Found(stamp) => stamp,
        StampState::Missing => return stale(format!("it has no {}", stamp::FILE)),
        StampState::Damaged { reason } => return stale(format!("{}: {reason}", stamp::FILE)),
        StampState::Unreadable { reason } => {
            return Ok(CacheState::Unverified { reason: format!("{} cannot be read: {reason}", stamp::FILE) });
        }
    };
    if let Some(reason) = stamp.foreign() {
        return stale(reason);
    }
    let found = fs::metadata(directory.join(MODEL_FILE)).map(|metadata| metadata.len()).unwrap_or_default();
    if found != stamp.model_bytes {
        return stale(format!("wanted a {MODEL_FILE} of {} bytes, found {found}", stamp.model_bytes));
    }
    let state = FileState::new(&fs::metadata(gguf).map_err(io_error(gguf, "inspect"))?);
    if state.size_bytes != stamp.source_state.size_bytes {
        let (made, found) = (stamp.source_state.size_bytes, state.size_bytes);
        return stale(format!("it was made from a file of {made} bytes, which has {found} now"));
    }
    if state != stamp.source_state {
        let sha256 = stamp::sha256(gguf, &|| Ok(control.check()?))?;
        if sha256 != stamp.source_sha256 {
            return stale(format!("it was made from a file with SHA-256 {}, found {sha256}", stamp.source_sha256));
        }
    }
    Ok(CacheState::Sound)
}

/// True once.
fn first_in_process() -> bool {
    static WARNED: AtomicBool = AtomicBool::new(false);
    !WARNED.swap(true, Ordering::Relaxed)
}

fn framed(directory: &Path, reason: &str) -> String {
    let frame = "=".repeat(78);
    format!(
        "{frame}\nthe provenance of {} could not be checked ({reason});\nit is used UNVERIFIED. Remove it to have the model packed \
         again.\n{frame}",
        directory.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_found_in_the_stated_order() {
        let locate = |variables: &[(&str, &str)]| {
            let variables: Vec<(String, OsString)> =
                variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).into())).collect();
            let env = move |name: &str| variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
            PackCache::locate_with(&env).map(|cache| cache.folder)
        };
        let all = [("NPUHAL_Q4NX_CACHE", "/q"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(locate(&all).unwrap(), Path::new("/q"));
        assert_eq!(locate(&all[1..]).unwrap(), Path::new("/x/npuhal/q4nx"));
        assert_eq!(locate(&all[2..]).unwrap(), Path::new("/h/.cache/npuhal/q4nx"));
        assert!(matches!(locate(&[("XDG_CACHE_HOME", "relative")]), Err(PackError::NoCache)));
    }
}
