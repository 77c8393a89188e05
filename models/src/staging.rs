//! A directory that appears whole or not at all: it is filled beside its place under another name, written to the disk, and
//! renamed. What a killed process leaves behind is swept away by the next one.

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use thiserror::Error;

/// The system refused something.
#[derive(Debug, Error)]
#[error("{}: cannot {action}: {source}", path.display())]
pub struct StagingError {
    /// File or directory.
    pub path: PathBuf,
    /// What was to be done.
    pub action: &'static str,
    /// What the system said.
    pub source: io::Error,
}

fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> StagingError {
    let path = path.to_owned();
    move |source| StagingError { path, action, source }
}

/// A directory being filled. Removed when dropped before it is published.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    parent: PathBuf,
    target: PathBuf,
    published: bool,
    /// Locked as long as this process works on it.
    _lock: File,
}

impl Staging {
    /// Makes the directory that will become `target`, whose parent exists.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn new(target: &Path) -> Result<Self, StagingError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let Some(name) = target.file_name() else {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "the path does not end in a name");
            return Err(io_error(target, "make")(source));
        };
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let prefix = format!(".{}.packing-", name.to_string_lossy());
        sweep(parent, &prefix);
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("{prefix}{}-{count}", std::process::id()));
            fs::create_dir(&path).map_err(io_error(&path, "make"))?;
            let locked = File::open(&path).and_then(|lock| lock.lock().map(|()| lock));
            // Another process may have taken it for a leftover before it was locked.
            if !path.exists() {
                continue;
            }
            let lock = locked.map_err(|error| {
                let _ = fs::remove_dir(&path);
                io_error(&path, "lock")(error)
            })?;
            let (parent, target) = (parent.to_owned(), target.to_owned());
            return Ok(Self { path, parent, target, published: false, _lock: lock });
        }
    }

    /// The directory while it is being filled.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.path
    }

    /// Where a file of the directory is while it is being filled.
    #[must_use]
    pub fn path(&self, file: &str) -> PathBuf {
        self.path.join(file)
    }

    /// Writes a whole file, to the disk.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn write(&self, file: &str, contents: &[u8]) -> Result<(), StagingError> {
        let path = self.path(file);
        fs::write(&path, contents).map_err(io_error(&path, "write"))?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(io_error(&path, "write"))
    }

    /// Takes over what is called `name` in the directory that is there: a link, or a folder, which is copied. Returns whether
    /// there is such a thing.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn keep(&self, name: &str) -> Result<bool, StagingError> {
        let from = self.target.join(name);
        match fs::symlink_metadata(&from) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error(&from, "inspect")(error)),
            Ok(metadata) => copy(&from, &metadata, &self.path.join(name)).map(|()| true),
        }
    }

    /// Gives the directory its name. With `replace` it takes the place of the one that is there.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn publish(mut self, replace: bool) -> Result<(), StagingError> {
        sync_directory(&self.path)?;
        let renamed = if replace && self.target.exists() {
            let exchanged = rustix::fs::renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::EXCHANGE);
            if let Err(errno @ (Errno::INVAL | Errno::NOSYS)) = exchanged {
                let action = "be replaced at once, which this file system does not do; remove it first";
                return Err(io_error(&self.target, action)(errno.into()));
            }
            exchanged.map_err(io::Error::from)
        } else {
            // Takes the place of an empty directory, of nothing else.
            let renamed = fs::rename(&self.path, &self.target);
            self.published = renamed.is_ok();
            renamed
        };
        renamed.map_err(io_error(&self.target, "make"))?;
        // What stands at the staging path after an exchange is the old directory, which goes with `self`.
        sync_directory(&self.parent)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Copies a link, a file or a folder, to the disk.
fn copy(from: &Path, metadata: &fs::Metadata, to: &Path) -> Result<(), StagingError> {
    if metadata.is_symlink() {
        let link = fs::read_link(from).map_err(io_error(from, "read"))?;
        return std::os::unix::fs::symlink(link, to).map_err(io_error(to, "make"));
    }
    if metadata.is_file() {
        fs::copy(from, to).map_err(io_error(from, "copy"))?;
        return File::open(to).and_then(|file| file.sync_all()).map_err(io_error(to, "write"));
    }
    if !metadata.is_dir() {
        let source = io::Error::new(io::ErrorKind::Unsupported, "it is no file, folder or link");
        return Err(io_error(from, "copy")(source));
    }
    fs::create_dir(to).map_err(io_error(to, "make"))?;
    for entry in fs::read_dir(from).map_err(io_error(from, "list"))? {
        let entry = entry.map_err(io_error(from, "list"))?;
        let metadata = entry.metadata().map_err(io_error(&entry.path(), "inspect"))?;
        copy(&entry.path(), &metadata, &to.join(entry.file_name()))?;
    }
    sync_directory(to)
}

fn sync_directory(path: &Path) -> Result<(), StagingError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(io_error(path, "write"))
}

/// Removes directories in `parent` that nobody works on any more.
fn sweep(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        // A directory only: opening something else may wait for another process.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if let Ok(directory) = rustix::fs::open(entry.path(), flags, Mode::empty())
            && File::from(directory).try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn nothing_is_seen_before_it_is_published_and_nothing_is_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let staging = Staging::new(&target).unwrap();
        staging.write("a", b"1").unwrap();
        assert!(!target.exists());
        drop(staging);
        assert_eq!(names(folder.path()), [""; 0]);
        let staging = Staging::new(&target).unwrap();
        staging.write("a", b"1").unwrap();
        staging.publish(false).unwrap();
        assert_eq!(names(folder.path()), ["out"]);
        let staging = Staging::new(&target).unwrap();
        staging.write("b", b"2").unwrap();
        assert!(staging.publish(false).is_err(), "a directory with files is not written over");
        assert_eq!(names(&target), ["a"]);
        let staging = Staging::new(&target).unwrap();
        staging.write("b", b"2").unwrap();
        staging.publish(true).unwrap();
        assert_eq!((names(folder.path()), names(&target)), (vec!["out".to_owned()], vec!["b".to_owned()]));
    }

    #[test]
    fn what_is_kept_outlives_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        fs::create_dir_all(target.join("npu")).unwrap();
        fs::create_dir_all(target.join("npu/deeper")).unwrap();
        fs::write(target.join("npu/layer.pdi"), "image").unwrap();
        fs::write(target.join("npu/deeper/notes"), "mine").unwrap();
        for _ in 0..2 {
            let staging = Staging::new(&target).unwrap();
            staging.write("new", b"1").unwrap();
            assert!(staging.keep("npu").unwrap());
            assert!(!staging.keep("nothing").unwrap());
            staging.publish(true).unwrap();
            assert_eq!(names(&target), ["new", "npu"]);
            assert_eq!(fs::read(target.join("npu/layer.pdi")).unwrap(), b"image");
            assert_eq!(fs::read(target.join("npu/deeper/notes")).unwrap(), b"mine");
        }
        fs::rename(target.join("npu"), folder.path().join("kernels")).unwrap();
        std::os::unix::fs::symlink("../kernels", target.join("npu")).unwrap();
        let staging = Staging::new(&target).unwrap();
        staging.keep("npu").unwrap();
        staging.publish(true).unwrap();
        assert_eq!(fs::read_link(target.join("npu")).unwrap(), Path::new("../kernels"));
    }

    #[test]
    fn a_pipe_beside_the_directory_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["pipe", ".out.packing-1-8"] {
            let mode = Mode::RUSR | Mode::WUSR;
            rustix::fs::mknodat(CWD, folder.path().join(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        let target = folder.path().join("out");
        std::thread::spawn(move || sender.send(Staging::new(&target).is_ok()));
        assert_eq!(receiver.recv_timeout(std::time::Duration::from_secs(20)), Ok(true));
    }

    #[test]
    fn leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".out.packing-1-7")).unwrap();
        fs::write(folder.path().join(".out.packing-1-7/model.q4nx"), "x").unwrap();
        let target = folder.path().join("out");
        let first = Staging::new(&target).unwrap();
        let second = Staging::new(&target).unwrap();
        assert_eq!(names(folder.path()).len(), 2, "{:?}", names(folder.path()));
        drop((first, second));
        assert!(Staging::new(Path::new("/")).is_err());
    }
}
