//! Where a package is made, and what it may take the place of.

use super::error::{PackageError, io_error};
use super::metadata::METADATA_FILE;
use crate::staging::Staging;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A package that is being made beside its target, and takes the target's place at once: at any time the target is the former
/// package or the new one, whatever becomes of this process.
#[derive(Debug)]
pub(super) struct PackageStaging {
    staging: Staging,
    target: PathBuf,
}

impl PackageStaging {
    /// Makes the directory. The target may be absent, empty, or a package.
    pub(super) fn create(target: &Path) -> Result<Self, PackageError> {
        check_target(target)?;
        // `out/` and `out` are one directory.
        let target: PathBuf = target.components().collect();
        if let Some(parent) = target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(io_error(parent, "create"))?;
        }
        Ok(Self { staging: Staging::new(&target)?, target })
    }

    pub(super) fn path(&self) -> &Path {
        self.staging.directory()
    }

    /// Name of the target.
    pub(super) fn target_name(&self) -> String {
        self.target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Takes the target's place, with copies of those of the folders `keep` that the target has; returns their names. On failure
    /// the target is as it was.
    pub(super) fn publish(self, keep: &[&str]) -> Result<(PathBuf, Vec<String>), PackageError> {
        check_target(&self.target)?;
        let mut kept = Vec::new();
        for name in keep {
            if self.staging.keep(name)? {
                kept.push((*name).to_owned());
            }
        }
        self.staging.publish(true)?;
        Ok((self.target, kept))
    }
}

/// Flushes a file or directory to the disk.
pub(super) fn sync(path: &Path) -> Result<(), PackageError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(io_error(path, "flush"))
}

fn check_target(target: &Path) -> Result<(), PackageError> {
    let taken = |found| Err(PackageError::TargetTaken { path: target.to_owned(), found });
    if target.file_name().is_none() {
        return taken("not the name of a directory");
    }
    match fs::symlink_metadata(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error(target, "inspect")(error)),
        Ok(metadata) if metadata.is_dir() => {
            let mut entries = fs::read_dir(target).map_err(io_error(target, "list"))?;
            let is_package = target.join(METADATA_FILE).is_file();
            if is_package || entries.next().is_none() { Ok(()) } else { taken("a directory that is no package") }
        }
        Ok(metadata) if metadata.is_symlink() => taken("a link"),
        Ok(_) => taken("a file"),
    }
}
