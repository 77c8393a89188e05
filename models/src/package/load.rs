//! Packages, opened: every file checked, then mapped.

use super::error::{PackageError, io_error};
use super::metadata::{FileEntry, Metadata, QuantizedEntry, RawEntry, TensorEntry};
use super::plan::{self, Array, LayerArray, Storage, layer_array};
use crate::hexadecimal;
use crate::map::FileMap;
use crate::tensor::{Tensor, WeightType};
use npuhal_core::file::write_whole;
use npuhal_core::stage::Control;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes hashed at a time.
const STEP_BYTES: usize = 1 << 20;
/// Longest record of verified files; one of a package takes about 100 KiB.
const RECORD_LIMIT_BYTES: u64 = 4 << 20;

/// How a package is opened.
pub struct OpenOptions<'a> {
    /// Hash every file even if it was verified before and has not changed.
    pub verify: bool,
    /// May stop the work.
    pub control: &'a Control,
    /// Gets the bytes hashed since the last call, and the bytes of all files.
    pub progress: &'a mut dyn FnMut(u64, u64),
}

/// A quantized matrix of a package: output features × input features.
#[derive(Debug, Clone)]
pub struct Quantized {
    /// The weights as bf16.
    pub bf16: Tensor,
    /// The scales, one a row; a vector of f32.
    pub scales: Tensor,
    codes: Arc<FileMap>,
}

impl Quantized {
    /// The int8 codes, row after row, as two's-complement bytes.
    #[must_use]
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Bytes of the int8 codes of `rows` rows from `first`.
    ///
    /// # Panics
    /// When the rows are not all rows of the matrix.
    #[must_use]
    pub fn code_rows(&self, first: usize, rows: usize) -> &[u8] {
        let cols = self.bf16.cols();
        &self.codes[first * cols..(first + rows) * cols]
    }
}

#[derive(Debug, Clone)]
enum Opened {
    Raw(Tensor),
    Quantized(Quantized),
}

/// An opened package: verified and mapped.
#[derive(Debug, Clone)]
pub struct Package {
    path: PathBuf,
    metadata: Metadata,
    arrays: BTreeMap<String, Opened>,
}

impl Package {
    /// Opens the package in `directory`: reads its metadata, checks every file's size and SHA-256 (which is remembered beside
    /// the package by inode, size and time of change), then maps the arrays.
    ///
    /// # Errors
    /// [`PackageError`].
    pub fn open(directory: &Path, options: OpenOptions<'_>) -> Result<Self, PackageError> {
        let metadata = Metadata::read(directory)?;
        verify(directory, &metadata.files, options)?;
        let mut arrays = BTreeMap::new();
        for array in plan::arrays(&metadata.shape) {
            let opened = open_array(directory, &metadata, &array)?;
            arrays.insert(array.name, opened);
        }
        Ok(Self { path: directory.to_owned(), metadata, arrays })
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says about itself.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The array called `name` as float16: `token_embedding`, `final_norm`, and a layer's norms and biases.
    ///
    /// # Errors
    /// [`PackageError::Metadata`] where there is no such array.
    pub fn raw(&self, name: &str) -> Result<&Tensor, PackageError> {
        match self.arrays.get(name) {
            Some(Opened::Raw(tensor)) => Ok(tensor),
            _ => Err(self.no_array(name)),
        }
    }

    /// The quantized matrix called `name`: `lm_head`, and a layer's projections.
    ///
    /// # Errors
    /// [`PackageError::Metadata`] where there is no such matrix.
    pub fn quantized(&self, name: &str) -> Result<&Quantized, PackageError> {
        match self.arrays.get(name) {
            Some(Opened::Quantized(quantized)) => Ok(quantized),
            _ => Err(self.no_array(name)),
        }
    }

    /// A layer's norm or bias.
    ///
    /// # Errors
    /// As [`Package::raw`].
    pub fn layer_raw(&self, layer: usize, array: LayerArray) -> Result<&Tensor, PackageError> {
        self.raw(&layer_array(layer, array))
    }

    /// A layer's projection.
    ///
    /// # Errors
    /// As [`Package::quantized`].
    pub fn layer_quantized(&self, layer: usize, array: LayerArray) -> Result<&Quantized, PackageError> {
        self.quantized(&layer_array(layer, array))
    }

    fn no_array(&self, name: &str) -> PackageError {
        let reason = "wanted an array of this name and kind in a package of this shape, found none".to_owned();
        PackageError::Metadata { path: self.path.clone(), field: format!("tensors.{name}"), reason }
    }
}

fn open_array(directory: &Path, metadata: &Metadata, array: &Array) -> Result<Opened, PackageError> {
    let bad = |reason: String| PackageError::Metadata {
        path: directory.to_owned(),
        field: format!("tensors.{}", array.name),
        reason,
    };
    let Some(entry) = metadata.tensors.get(&array.name) else {
        return Err(bad(format!("wanted an array of shape {:?}, found none", array.shape())));
    };
    let shape = match entry {
        TensorEntry::Raw(RawEntry { shape, .. }) | TensorEntry::Quantized(QuantizedEntry { shape, .. }) => shape,
    };
    if *shape != array.shape() {
        return Err(bad(format!("wanted shape {:?}, found {shape:?}", array.shape())));
    }
    let map = |name: &str| {
        if !metadata.files.contains_key(name) {
            return Err(bad(format!("wanted a file of the manifest, found {name:?}")));
        }
        Ok(Arc::new(FileMap::open(&directory.join(name))?))
    };
    let tensor = |name: &str, weight_type: WeightType, rows, cols| {
        let file = map(name)?;
        let range = 0..file.len();
        let tensor = Tensor::new(array.name.as_str(), weight_type, rows, cols, file, range);
        tensor.ok_or_else(|| PackageError::Truncated { name: name.to_owned() })
    };
    match (array.storage, entry) {
        (Storage::Raw, TensorEntry::Raw(RawEntry { file, dtype, .. })) => {
            if dtype != "float16" {
                return Err(bad(format!("wanted float16, found {dtype:?}")));
            }
            Ok(Opened::Raw(tensor(file, WeightType::F16, array.rows, array.cols)?))
        }
        (Storage::Quantized, TensorEntry::Quantized(QuantizedEntry { weight, scale, bf16_file, .. })) => {
            let Some(bf16_file) = bf16_file else { return Err(PackageError::NoBf16 { tensor: array.name.clone() }) };
            let codes = map(weight)?;
            if codes.len() as u64 != array.elements() {
                return Err(PackageError::Truncated { name: weight.clone() });
            }
            Ok(Opened::Quantized(Quantized {
                bf16: tensor(bf16_file, WeightType::Bf16, array.rows, array.cols)?,
                scales: tensor(scale, WeightType::F32, 1, array.rows)?,
                codes,
            }))
        }
        (Storage::Raw, _) => Err(bad("wanted float16, found a quantized matrix".to_owned())),
        (Storage::Quantized, _) => Err(bad("wanted a quantized matrix, found float16".to_owned())),
    }
}

/// State of a file at the moment its checksum was right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    size_bytes: u64,
    modified_s: i64,
    modified_ns: i64,
    inode: u64,
    sha256: String,
}

impl Record {
    fn new(metadata: &fs::Metadata, sha256: &str) -> Self {
        Self {
            size_bytes: metadata.len(),
            modified_s: metadata.mtime(),
            modified_ns: metadata.mtime_nsec(),
            inode: metadata.ino(),
            sha256: sha256.to_owned(),
        }
    }
}

/// Compares every file with the manifest. Sizes first: a truncated package is told without reading gigabytes.
fn verify(directory: &Path, files: &BTreeMap<String, FileEntry>, options: OpenOptions<'_>) -> Result<(), PackageError> {
    let OpenOptions { verify, control, progress } = options;
    let mut found = BTreeMap::new();
    for (name, entry) in files {
        let metadata = match fs::metadata(directory.join(name)) {
            Ok(metadata) if metadata.is_file() && metadata.len() == entry.size => metadata,
            _ => return Err(PackageError::Truncated { name: name.clone() }),
        };
        found.insert(name.clone(), Record::new(&metadata, &entry.sha256));
    }
    let records = record_path(directory);
    let known = if verify { BTreeMap::new() } else { read_records(records.as_deref()) };
    if found.iter().all(|(name, record)| known.get(name) == Some(record)) {
        return Ok(());
    }
    let total_bytes = files.values().map(|entry| entry.size).sum();
    for (name, entry) in files {
        if known.get(name) == found.get(name) {
            progress(entry.size, total_bytes);
            continue;
        }
        let path = directory.join(name);
        let sha256 = hash_file(&path, &mut |bytes| {
            progress(bytes, total_bytes);
            Ok(control.check()?)
        })?;
        if sha256 != entry.sha256 {
            if let Some(records) = &records {
                let _ = fs::remove_file(records);
            }
            return Err(PackageError::Checksum { name: name.clone() });
        }
    }
    write_records(records.as_deref(), &found);
    Ok(())
}

/// Where the records of a package are: beside it, so that the package itself holds its manifest's files and nothing else.
fn record_path(directory: &Path) -> Option<PathBuf> {
    let directory = directory.canonicalize().ok()?;
    let name = directory.file_name()?.to_str()?;
    Some(directory.parent()?.join(".verified").join(format!("{name}.package.json")))
}

fn read_records(path: Option<&Path>) -> BTreeMap<String, Record> {
    let read = |path: &Path| {
        let mut json = Vec::new();
        File::open(path).ok()?.take(RECORD_LIMIT_BYTES).read_to_end(&mut json).ok()?;
        serde_json::from_slice(&json).ok()
    };
    path.and_then(read).unwrap_or_default()
}

/// A folder that cannot be written costs the next start the checksums, nothing else.
fn write_records(path: Option<&Path>, records: &BTreeMap<String, Record>) {
    let Some(path) = path else { return };
    let written = serde_json::to_vec(records).map_err(io::Error::from).and_then(|json| {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        write_whole(path, &json)
    });
    if let Err(error) = written {
        tracing::debug!("{}: not written: {error}", path.display());
    }
}

/// SHA-256 of a file in hexadecimal. `step` gets the bytes read since its last call and may stop the work.
pub(super) fn hash_file(
    path: &Path,
    step: &mut dyn FnMut(u64) -> Result<(), PackageError>,
) -> Result<String, PackageError> {
    let mut file = File::open(path).map_err(io_error(path, "open"))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; STEP_BYTES];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hexadecimal(&hash.finalize())),
            Ok(len) => {
                hash.update(&buffer[..len]);
                step(len as u64)?;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(io_error(path, "read")(error)),
        }
    }
}
