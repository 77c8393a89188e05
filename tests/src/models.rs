//! The real model files that some suites run on.

use std::io::Write;
use std::path::PathBuf;

struct ModelFile {
    name: &'static str,
    /// Names under which the file may be found.
    files: &'static [&'static str],
    len_bytes: u64,
}

const FILES: [ModelFile; 2] = [
    ModelFile { name: "smollm2-135m", files: &["SmolLM2-135M-Instruct.Q4_1.gguf"], len_bytes: 98_362_432 },
    ModelFile {
        name: "qwen2.5-coder-0.5b",
        files: &["qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen.gguf"],
        len_bytes: 491_400_064,
    },
];

/// The file of the catalogue model `name`. `None` only where `NPUHAL_TEST_OFFLINE=1` allows tests to be left out; that is
/// printed.
///
/// # Panics
/// Where the model cannot be had and `NPUHAL_TEST_OFFLINE` is not set: a suite that needs it fails.
#[must_use]
pub fn path(name: &str) -> Option<PathBuf> {
    match find(name) {
        Ok(path) => Some(path),
        Err(reason) if std::env::var_os("NPUHAL_TEST_OFFLINE").is_some_and(|value| value == "1") => {
            skipped(name, &reason);
            None
        }
        Err(reason) => panic!("the model {name} cannot be had: {reason}; NPUHAL_TEST_OFFLINE=1 leaves its tests out"),
    }
}

fn find(name: &str) -> Result<PathBuf, String> {
    let Some(model) = FILES.iter().find(|model| model.name == name) else {
        let known = FILES.map(|model| model.name).join(", ");
        return Err(format!("there is no such model; known: {known}"));
    };
    let Some(directory) = std::env::var_os("NPUHAL_TEST_MODEL_DIR").map(PathBuf::from) else {
        return Err("NPUHAL_TEST_MODEL_DIR is not set to the directory of model files".to_owned());
    };
    let candidates = model.files.iter().map(|file| directory.join(file));
    let Some(path) = candidates.into_iter().find(|path| path.is_file()) else {
        return Err(format!("{} has none of {}", directory.display(), model.files.join(", ")));
    };
    match path.metadata() {
        Ok(metadata) if metadata.len() == model.len_bytes => Ok(path),
        Ok(metadata) => Err(format!("{} has {} bytes, wanted {}", path.display(), metadata.len(), model.len_bytes)),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// Written past the test harness, which swallows what passing tests print.
fn skipped(name: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: tests on the model {name}: {reason}");
}
