//! The packages of a folder.

use super::error::{PackageError, io_error};
use super::metadata::METADATA_FILE;
use super::shape::{CONTEXT_POSITIONS, Published};
use crate::safetensors::read_bounded;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Longest `metadata.json` that is looked at.
const MAX_METADATA_BYTES: u64 = 16 << 20;

/// A package that was found; its files are not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scanned {
    /// Id under which it is served.
    pub model_id: String,
    /// Name for people: its own, that of the published checkpoint, or the id.
    pub display_name: String,
    /// `model_family`, where stated.
    pub family: Option<String>,
    /// Its directory.
    pub path: PathBuf,
    /// Positions of its context.
    pub context_length: u32,
}

/// A directory that was passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The directory.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// What a folder holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// Usable packages, by directory name.
    pub packages: Vec<Scanned>,
    /// Directories with a `metadata.json` that is none.
    pub skipped: Vec<Skipped>,
}

impl Scan {
    /// Ids that more than one package has, each with its directories: such a model cannot be told from its namesake.
    #[must_use]
    pub fn duplicates(&self) -> BTreeMap<&str, Vec<&Path>> {
        let mut by_id: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
        for package in &self.packages {
            by_id.entry(&package.model_id).or_default().push(&package.path);
        }
        by_id.retain(|_, paths| paths.len() > 1);
        by_id
    }
}

/// Looks at `FOLDER/*/metadata.json`, in the order of the directories' names. What is unusable is skipped with a warning. A
/// folder that does not exist holds nothing.
///
/// # Errors
/// [`PackageError::Io`] where the folder cannot be listed.
pub fn scan(folder: &Path) -> Result<Scan, PackageError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Scan::default()),
        entries => entries.map_err(io_error(folder, "list"))?,
    };
    let mut directories = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error(folder, "list"))?;
        // Hidden directories are staging and backups.
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && entry.path().join(METADATA_FILE).is_file() {
            directories.push(entry.path());
        }
    }
    directories.sort();
    let mut scan = Scan::default();
    for path in directories {
        match look(&path) {
            Ok(package) => scan.packages.push(package),
            Err(reason) => {
                tracing::warn!("{}: skipped: {reason}", path.display());
                scan.skipped.push(Skipped { path, reason });
            }
        }
    }
    Ok(scan)
}

/// Looks at one package. Nothing is verified.
///
/// # Errors
/// Why it is unusable.
pub fn look(path: &Path) -> Result<Scanned, String> {
    let text = read_bounded(&path.join(METADATA_FILE), MAX_METADATA_BYTES).map_err(|error| error.to_string())?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|error| format!("{METADATA_FILE} is no readable JSON: {error}"))?;
    let Value::Object(metadata) = value else { return Err(format!("{METADATA_FILE} is not a JSON object")) };
    let directory = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let by_directory = Published::find_directory(&directory);
    let text = |key: &str| metadata.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    let Some(model_id) = text("model_id").or(by_directory.map(|known| known.model_id)) else {
        return Err("no model_id, and the directory's name is not that of a published package".to_owned());
    };
    if let Some(found) = metadata.get("context_length")
        && found.as_u64() != Some(u64::from(CONTEXT_POSITIONS))
    {
        return Err(format!("context_length is {found}; wanted {CONTEXT_POSITIONS}"));
    }
    let published = Published::find(model_id);
    let display_name = text("display_name").or(published.map(|known| known.display_name)).unwrap_or(model_id);
    Ok(Scanned {
        model_id: model_id.to_owned(),
        display_name: display_name.to_owned(),
        family: text("model_family").map(str::to_owned),
        path: path.to_owned(),
        context_length: CONTEXT_POSITIONS,
    })
}
