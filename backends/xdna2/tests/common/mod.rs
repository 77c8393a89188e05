//! Golden data shared by the integration tests.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod kernels;

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Folder `sub` of the golden data that is not part of this repository, or `None` (said in one line) without it.
pub(crate) fn shared_golden(test: &str, sub: &str) -> Option<PathBuf> {
    let shared = std::env::var_os("NPUHAL_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"), PathBuf::from);
    let folder = shared.join("golden").join(sub);
    if folder.exists() {
        return Some(folder);
    }
    // The test harness hides what a passing test prints; this line is meant to be seen.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {} is not here", folder.display());
    None
}

/// Bytes of a file.
pub(crate) fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = path.as_ref();
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// SHA-256 as hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
