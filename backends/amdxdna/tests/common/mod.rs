//! Golden data shared by the integration tests.
#![allow(dead_code, reason = "each test file uses its part")]

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

/// File of this crate's test data.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// JSON file.
pub(crate) fn json(path: impl AsRef<Path>) -> serde_json::Value {
    let path = path.as_ref();
    serde_json::from_slice(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Bytes written as hexadecimal digits.
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "odd number of digits");
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

/// SHA-256 as hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
