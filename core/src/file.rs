//! Files that are there whole, or as they were before.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Names that are tried for the file beside; one is left over where a process was killed.
const NAMES: usize = 64;

/// Makes `contents` the contents of the file at `path`. A regular file is the old one or the new one at any time, also after a
/// crash: the new one is written beside it, synced, and renamed; then their folder is synced. It keeps the permissions of the
/// old one. Links are followed and stay. What is no regular file, such as a device or a pipe, is written to as it is.
///
/// # Errors
/// What the system says; then a regular file is as it was, unless it is the sync of the folder that failed. A file that may not
/// be written is not replaced either.
pub fn write_whole(path: &Path, contents: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() => {
            let path = path.canonicalize()?;
            drop(OpenOptions::new().write(true).open(&path)?);
            replace(&path, contents, Some(found.permissions()))
        }
        Ok(_) => OpenOptions::new().write(true).open(path)?.write_all(contents),
        // Links in a circle are another error, so that this ends.
        Err(error) if error.kind() == ErrorKind::NotFound => match fs::read_link(path) {
            Ok(target) => write_whole(&folder_of(path).join(target), contents),
            Err(_) => replace(path, contents, None),
        },
        Err(error) => Err(error),
    }
}

fn replace(path: &Path, contents: &[u8], permissions: Option<Permissions>) -> io::Result<()> {
    // Opened first: where the folder cannot be synced, nothing is begun.
    let folder = File::open(folder_of(path))?;
    let (beside, mut file) = create_beside(path)?;
    let written = (|| {
        if let Some(permissions) = permissions {
            file.set_permissions(permissions)?;
        }
        file.write_all(contents)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    if let Err(error) = written {
        // What is left beside has no further use, and the first error is the one to tell.
        let _ = fs::remove_file(&beside);
        return Err(error);
    }
    folder.sync_all()
}

/// A new file in the folder of `path`, with a name of its own.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut last = io::Error::from(ErrorKind::AlreadyExists);
    for _ in 0..NAMES {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let beside = folder_of(path).join(format!(".npuhal-{}-{number}.new", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&beside) {
            Ok(file) => return Ok((beside, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_made_or_replaced_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report");
        write_whole(&path, b"old and longer").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        write_whole(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(names(folder.path()), ["report"]);
        // A name as long as names can be.
        write_whole(&folder.path().join("n".repeat(255)), b"").unwrap();
        for nowhere in [folder.path().join("no/file"), folder.path().to_owned(), path.join("file"), PathBuf::new()] {
            assert!(write_whole(&nowhere, b"new").is_err(), "{}", nowhere.display());
        }
        assert_eq!(names(folder.path()).len(), 2);
    }

    #[test]
    fn a_link_stays_and_leads_to_the_new_contents() {
        let folder = tempfile::tempdir().unwrap();
        let (link, other) = (folder.path().join("link"), folder.path().join("other"));
        fs::create_dir(&other).unwrap();
        symlink("other/file", &link).unwrap();
        // At first there is nothing where it leads to.
        for contents in ["first", "second"] {
            write_whole(&link, contents.as_bytes()).unwrap();
            assert!(link.symlink_metadata().unwrap().is_symlink());
            assert_eq!(fs::read_to_string(other.join("file")).unwrap(), contents);
        }
        assert_eq!((names(folder.path()), names(&other)), (vec!["link".into(), "other".into()], vec!["file".into()]));
        let circle = folder.path().join("circle");
        symlink("circle", &circle).unwrap();
        assert!(write_whole(&circle, b"").is_err());
    }

    /// A device node used to be replaced by a file, where the user may do that.
    #[test]
    fn what_is_no_regular_file_stays_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, link) = (folder.path().join("socket"), folder.path().join("null"));
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(write_whole(&socket, b"text").is_err(), "a socket cannot be opened");
        assert!(socket.symlink_metadata().unwrap().file_type().is_socket());
        symlink("/dev/full", &link).unwrap();
        assert_eq!(write_whole(&link, b"text").unwrap_err().kind(), ErrorKind::StorageFull);
        assert!(Path::new("/dev/full").metadata().unwrap().file_type().is_char_device());
        assert_eq!(names(folder.path()), ["null", "socket"]);
    }
}
