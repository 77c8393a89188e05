//! Whether a file may be run as a part of this program: it and all folders above it belong to the user or to root, and nobody
//! else can write to them. Then nobody else can put another file, or another folder, in its place between the check and the
//! loading either. Above its own folder a sticky one (`/tmp`) will do: what is in there only its owner can rename.

use super::AddonError;
use npuhal_models::hexadecimal;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Write permission of the group and of others.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Permission bit of a folder in which each entry is its owner's.
const STICKY: u32 = 0o1000;

/// The file behind symbolic links.
pub(super) fn canonical(file: &Path) -> Result<PathBuf, AddonError> {
    file.canonicalize().map_err(|error| unreadable(file, &error))
}

/// Checks `file` (absolute, without symbolic links) and the folders above it.
pub(super) fn check(file: &Path) -> Result<(), AddonError> {
    let user = rustix::process::geteuid().as_raw();
    for (depth, path) in file.ancestors().enumerate() {
        let metadata = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
        if depth == 0 && !metadata.is_file() {
            return Err(AddonError::Unreadable { file: file.to_owned(), reason: "it is not a file".to_owned() });
        }
        let what = match depth {
            0 => "it",
            1 => "its folder",
            _ => "a folder above it",
        };
        let shared = if depth > 1 && metadata.mode() & STICKY != 0 { WRITABLE_BY_OTHERS } else { 0 };
        if let Some((reason, remedy)) = objection(path, metadata.uid(), metadata.mode() & !shared, user) {
            return Err(AddonError::Untrusted { file: file.to_owned(), what, reason, remedy });
        }
    }
    Ok(())
}

/// What is wrong with the owner `uid` or the permissions `mode` of `path` for the user `user`, and what to do.
fn objection(path: &Path, uid: u32, mode: u32, user: u32) -> Option<(String, String)> {
    let path = path.display();
    if uid != user && uid != 0 {
        let reason = format!("belongs to user {uid}, neither to you (user {user}) nor to root");
        return Some((reason, format!("if you trust it, make it yours: chown {user} {path}")));
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        let reason = format!("can be written by others (mode {:04o})", mode & 0o7777);
        return Some((reason, format!("if you trust it: chmod go-w {path}")));
    }
    None
}

/// SHA-256 of `file` in hexadecimal digits.
pub(super) fn sha256(file: &Path) -> Result<String, AddonError> {
    let hash = || -> io::Result<String> {
        let mut reader = File::open(file)?;
        let mut hasher = Sha256::new();
        let mut block = vec![0; 1 << 16];
        loop {
            match reader.read(&mut block)? {
                0 => return Ok(hexadecimal(&hasher.finalize())),
                len => hasher.update(&block[..len]),
            }
        }
    };
    hash().map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, error: &io::Error) -> AddonError {
    AddonError::Unreadable { file: file.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn owner_and_permissions_decide() {
        let about = |uid, mode, user| objection(Path::new("/a.so"), uid, mode, user).map(|(reason, _)| reason);
        assert_eq!(about(1000, 0o100_644, 1000), None);
        assert_eq!(about(0, 0o100_755, 1000), None);
        assert_eq!(
            about(1001, 0o100_644, 1000).as_deref(),
            Some("belongs to user 1001, neither to you (user 1000) nor to root")
        );
        assert_eq!(about(1000, 0o100_664, 1000).as_deref(), Some("can be written by others (mode 0664)"));
        assert_eq!(about(0, 0o100_646, 1000).as_deref(), Some("can be written by others (mode 0646)"));
        assert_eq!(
            about(0, 0o041_777, 1000).as_deref(),
            Some("can be written by others (mode 1777)"),
            "a sticky folder"
        );
    }

    #[test]
    fn a_file_and_its_folder_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().canonicalize().unwrap().join("a.so");
        fs::write(&file, "abc").unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        mode(&file, 0o644);
        assert_eq!(check(&file), Ok(()));
        assert_eq!(sha256(&file).unwrap(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        mode(&file, 0o666);
        let message = check(&file).unwrap_err().to_string();
        assert!(
            message.contains("since it can be written by others (mode 0666); if you trust it: chmod go-w"),
            "{message}"
        );
        mode(&file, 0o644);
        mode(folder.path(), 0o777);
        let message = check(&file).unwrap_err().to_string();
        assert!(message.contains("since its folder can be written by others (mode 0777)"), "{message}");
        let inner = folder.path().canonicalize().unwrap().join("inner");
        fs::create_dir(&inner).unwrap();
        mode(&inner, 0o700);
        let moved = inner.join("a.so");
        fs::copy(&file, &moved).unwrap();
        mode(&moved, 0o644);
        let message = check(&moved).unwrap_err().to_string();
        assert!(message.contains("since a folder above it can be written by others (mode 0777)"), "{message}");
        mode(folder.path(), 0o1777);
        assert_eq!(check(&moved), Ok(()), "in a sticky folder each entry is its owner's");
        mode(folder.path(), 0o700);
        assert!(check(&file.join("b")).is_err());
        assert!(check(folder.path()).is_err(), "a folder");
    }
}
