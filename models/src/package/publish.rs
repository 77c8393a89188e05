//! A directory that takes another's place as a whole.

use super::error::{PackageError, io_error};
use super::metadata::METADATA_FILE;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A directory beside the target, removed unless it was published.
#[derive(Debug)]
pub(super) struct Staging {
    path: PathBuf,
    target: PathBuf,
    parent: PathBuf,
    published: bool,
}

impl Staging {
    /// Makes the directory. The target may be absent, empty, or a package.
    pub(super) fn create(target: &Path) -> Result<Self, PackageError> {
        check_target(target)?;
        // `out/` and `out` are one directory; a relative name of one component has the current directory as its parent.
        let target: PathBuf = target.components().collect();
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        fs::create_dir_all(&parent).map_err(io_error(&parent, "create"))?;
        let path = beside(&target, "staging", 8)?;
        fs::create_dir(&path).map_err(io_error(&path, "create"))?;
        Ok(Self { path, target, parent, published: false })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Name of the target.
    pub(super) fn target_name(&self) -> String {
        self.target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Takes the target's place, and takes over those of the folders `keep` that the target has; returns their names. On failure
    /// the target is as it was.
    pub(super) fn publish(mut self, keep: &[&str]) -> Result<(PathBuf, Vec<String>), PackageError> {
        sync(&self.path)?;
        check_target(&self.target)?;
        let backup = match fs::symlink_metadata(&self.target) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(io_error(&self.target, "inspect")(error)),
            Ok(_) => {
                let backup = beside(&self.target, "backup", 16)?;
                fs::rename(&self.target, &backup).map_err(io_error(&self.target, "rename"))?;
                Some(backup)
            }
        };
        let mut kept = Vec::new();
        let moved = self
            .take_over(backup.as_deref(), keep, &mut kept)
            .and_then(|()| fs::rename(&self.path, &self.target).map_err(io_error(&self.target, "put in place")))
            .and_then(|()| sync(&self.parent));
        if let Err(error) = moved {
            if let Some(backup) = &backup {
                // The new directory goes back first where it was moved already; the old one takes its place again.
                let _ = fs::rename(&self.target, &self.path);
                for name in &kept {
                    if let Err(lost) = fs::rename(self.path.join(name), backup.join(name)) {
                        tracing::error!("{}: the former package's {name} is here: {lost}", self.path.display());
                        // What cannot go back is not removed with the rest.
                        self.published = true;
                    }
                }
                if let Err(lost) = fs::rename(backup, &self.target) {
                    tracing::error!("{}: the former package is at {}: {lost}", self.target.display(), backup.display());
                }
            }
            return Err(error);
        }
        self.published = true;
        if let Some(backup) = backup
            && let Err(error) = fs::remove_dir_all(&backup)
        {
            tracing::warn!("{}: the former package cannot be removed: {error}", backup.display());
        }
        Ok((self.target.clone(), kept))
    }

    /// Moves the folders `keep` out of the former package, as far as it has them.
    fn take_over(&self, former: Option<&Path>, keep: &[&str], kept: &mut Vec<String>) -> Result<(), PackageError> {
        let Some(former) = former else { return Ok(()) };
        for name in keep {
            match fs::rename(former.join(name), self.path.join(name)) {
                Ok(()) => kept.push((*name).to_owned()),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(io_error(&former.join(name), "move")(error)),
            }
        }
        sync(&self.path)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!("{}: cannot be removed: {error}", self.path.display());
        }
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

/// `.NAME.KIND-RANDOM` in the target's directory.
fn beside(target: &Path, kind: &str, random_bytes: usize) -> Result<PathBuf, PackageError> {
    let mut random = String::new();
    while random.len() < 2 * random_bytes {
        // Keys of the standard library's hash maps are drawn from the system's randomness.
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_usize(random.len());
        random.push_str(&format!("{:016x}", hasher.finish()));
    }
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(format!(".{kind}-{}", &random[..2 * random_bytes]));
    Ok(target.with_file_name(name))
}
