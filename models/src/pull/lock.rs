//! One process at a time for a file: advisory locks that the system drops with the process.

use crate::store::StoreError;
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Exclusive right to download, remove or replace a file of the models folder; given back when dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock of `name` in `folder`, or nothing where another process has it.
    pub(crate) fn try_acquire(folder: &Path, name: &str) -> Result<Option<Self>, StoreError> {
        let path = folder.join(format!("{name}.lock"));
        let io = |action| {
            let path = path.clone();
            move |source| StoreError::Io { path, action, source }
        };
        // The holder removes the lock file with the lock, so the locked file may be one that has just lost its name.
        loop {
            let mut options = fs::OpenOptions::new();
            let file = options.write(true).create(true).truncate(false).open(&path).map_err(io("create"))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(io("lock")(error)),
            }
            let locked = file.metadata().map_err(io("inspect"))?;
            if fs::metadata(&path).is_ok_and(|named| (named.dev(), named.ino()) == (locked.dev(), locked.ino())) {
                return Ok(Some(Self { path, _file: file }));
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
