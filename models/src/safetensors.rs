//! Safetensors files and the directories of shards that Hugging Face checkpoints are made of (format: the safetensors
//! specification).
//!
//! A file is a length (u64, little-endian), a JSON header of that length, and the data. Every tensor states its element type,
//! shape and byte range of the data; the ranges cover the data without gap or overlap. All of it is checked against the file's
//! length before a tensor is handed out; nothing is allocated that the file's length does not bound.

use crate::error::ModelError;
use crate::map::FileMap;
use crate::tensor::{Tensor, WeightType};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Longest header, as the specification bounds it.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Longest index of a checkpoint in several files.
pub const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Files of a checkpoint at most.
pub const MAX_SHARDS: usize = 4096;

/// Name of a checkpoint in one file.
const SINGLE: &str = "model.safetensors";
/// Name of the index of a checkpoint in several files.
const INDEX: &str = "model.safetensors.index.json";

/// An entry of a file's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: Arc<str>,
    dtype: String,
    shape: Vec<u64>,
    range: Range<usize>,
}

impl TensorInfo {
    /// Name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type as the file names it: `F32`, `BF16`, `I64`, …
    #[must_use]
    pub fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Dimensions, the one that is contiguous in memory last; none for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Place in the file.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

/// An opened safetensors file: its header, checked, and its mapping.
#[derive(Debug, Clone)]
pub struct SafetensorsFile {
    map: Arc<FileMap>,
    tensors: Vec<TensorInfo>,
    names: HashMap<Arc<str>, usize>,
}

impl SafetensorsFile {
    /// Maps the file at `path` and checks its header.
    ///
    /// # Errors
    /// [`ModelError::Io`]; [`ModelError::Malformed`] for what is not safetensors or is damaged.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::read(Arc::new(FileMap::open(path)?))
    }

    /// Checks the header of a mapped file.
    ///
    /// # Errors
    /// As [`SafetensorsFile::open`].
    pub fn read(map: Arc<FileMap>) -> Result<Self, ModelError> {
        let (header, data_start) = split_header(&map)?;
        let header: Header = serde_json::from_slice(header)
            .map_err(|error| malformed(map.path(), "header", format!("wanted a JSON object of tensors: {error}")))?;
        let mut file = Self { map, tensors: Vec::new(), names: HashMap::new() };
        for (name, entry) in header.0 {
            let info = file.check(&name, entry, data_start)?;
            if file.names.insert(Arc::clone(&info.name), file.tensors.len()).is_some() {
                let reason = "wanted one tensor of this name, found a second".to_owned();
                return Err(malformed(file.map.path(), &format!("tensor {name:?}"), reason));
            }
            file.tensors.push(info);
        }
        file.check_cover(data_start)?;
        Ok(file)
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// All tensors, in the file's order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`, as a matrix or (with one dimension) a vector; `None` where there is none.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for an element type other than F32, F16 and BF16 or other than one or two dimensions.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let Some(&index) = self.names.get(name) else { return Ok(None) };
        let info = &self.tensors[index];
        let unsupported = |feature: String, supported: &str| ModelError::Unsupported {
            path: self.path().to_owned(),
            feature,
            supported: supported.to_owned(),
        };
        let weight_type = match info.dtype.as_str() {
            "F32" => WeightType::F32,
            "F16" => WeightType::F16,
            "BF16" => WeightType::Bf16,
            other => return Err(unsupported(format!("element type {other} of tensor {name:?}"), "F32, F16, BF16")),
        };
        // Cannot truncate: the elements lie in the mapping (an empty tensor with one huge dimension is refused by the type).
        let (rows, cols) = match info.shape.as_slice() {
            [cols] => (1, *cols as usize),
            [rows, cols] => (*rows as usize, *cols as usize),
            other => return Err(unsupported(format!("shape {other:?} of tensor {name:?}"), "one or two dimensions")),
        };
        let tensor =
            Tensor::new(Arc::clone(&info.name), weight_type, rows, cols, Arc::clone(&self.map), info.range.clone());
        let reason = || "its range does not match its shape".to_owned();
        tensor.ok_or_else(|| malformed(self.path(), &format!("tensor {name:?}"), reason())).map(Some)
    }

    fn check(&self, name: &str, entry: Entry, data_start: usize) -> Result<TensorInfo, ModelError> {
        let bad = |reason: String| malformed(self.path(), &format!("tensor {name:?}"), reason);
        let Entry { dtype, shape, data_offsets: [start, end] } = entry;
        let data_len = (self.map.len() - data_start) as u64;
        if start > end || end > data_len {
            let reason = format!(
                "wanted offsets inside the {data_len} bytes of data, found {start}..{end}: the file is damaged or cut short, \
                 fetch it again"
            );
            return Err(bad(reason));
        }
        let bits = element_bits(&dtype).ok_or_else(|| bad(format!("unknown element type {dtype:?}")))?;
        let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let wanted = elements.and_then(|elements| elements.checked_mul(bits));
        if wanted != (end - start).checked_mul(8) {
            let found = end - start;
            return Err(bad(format!("wanted the bytes of {shape:?} elements of {dtype}, found {found} bytes")));
        }
        // Cannot truncate: both are below the length of a mapping.
        let range = data_start + start as usize..data_start + end as usize;
        Ok(TensorInfo { name: name.into(), dtype, shape, range })
    }

    /// The ranges cover the data without gap or overlap.
    fn check_cover(&self, data_start: usize) -> Result<(), ModelError> {
        let mut placed: Vec<&TensorInfo> = self.tensors.iter().collect();
        placed.sort_by_key(|info| (info.range.start, info.range.end));
        let mut covered = data_start;
        for info in placed {
            if info.range.start != covered {
                let what = if info.range.start < covered { "overlaps the tensor before it" } else { "leaves a gap" };
                let reason =
                    format!("wanted data at byte {covered} of the file, found {}: it {what}", info.range.start);
                return Err(malformed(self.path(), &format!("tensor {:?}", info.name), reason));
            }
            covered = info.range.end;
        }
        if covered != self.map.len() {
            let reason =
                format!("wanted tensors up to the end of the file at {}, found the last at {covered}", self.map.len());
            return Err(malformed(self.path(), "data", reason));
        }
        Ok(())
    }
}

/// A checkpoint in a directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names.
#[derive(Debug, Clone)]
pub struct SafetensorsCheckpoint {
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    /// File of each tensor.
    places: HashMap<String, usize>,
}

impl SafetensorsCheckpoint {
    /// Opens the checkpoint in `directory`; a single file is preferred to an index.
    ///
    /// # Errors
    /// [`ModelError`]: neither file, a damaged one, an index that contradicts its shards.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let (single, index) = (directory.join(SINGLE), directory.join(INDEX));
        if single.exists() {
            let file = SafetensorsFile::open(&single)?;
            let places = file.tensors.iter().map(|info| (info.name().to_owned(), 0)).collect();
            return Ok(Self { path: directory.to_owned(), files: vec![file], places });
        }
        if index.exists() {
            return Self::open_shards(directory, &index);
        }
        Err(ModelError::Missing {
            path: directory.to_owned(),
            what: format!("{SINGLE} or {INDEX}"),
            remedy: "give a directory with a Hugging Face checkpoint".to_owned(),
        })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in the order of their names.
    #[must_use]
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Whether `directory` has the files of a checkpoint.
    #[must_use]
    pub fn is_in(directory: &Path) -> bool {
        directory.join(SINGLE).is_file() || directory.join(INDEX).is_file()
    }

    /// The tensor called `name`; `None` where there is none.
    ///
    /// # Errors
    /// As [`SafetensorsFile::tensor`].
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        match self.places.get(name) {
            Some(&file) => self.files[file].tensor(name),
            None => Ok(None),
        }
    }

    fn open_shards(directory: &Path, index: &Path) -> Result<Self, ModelError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text = read_bounded(index, MAX_INDEX_BYTES)?;
        let Index { weight_map } = serde_json::from_slice(&text)
            .map_err(|error| malformed(index, "weight_map", format!("wanted an object of file names: {error}")))?;
        let mut names: Vec<&String> = weight_map.values().collect();
        names.sort();
        names.dedup();
        if names.len() > MAX_SHARDS {
            let reason = format!("wanted at most {MAX_SHARDS} files, found {}", names.len());
            return Err(malformed(index, "weight_map", reason));
        }
        let mut files = Vec::with_capacity(names.len());
        for name in &names {
            if !is_plain_name(name) {
                return Err(malformed(index, "weight_map", format!("wanted plain file names, found {name:?}")));
            }
            files.push(SafetensorsFile::open(&directory.join(name))?);
        }
        let mut places = HashMap::with_capacity(weight_map.len());
        for (tensor, name) in &weight_map {
            // Found: `names` holds every value of the map.
            let file = names.binary_search(&name).unwrap_or(0);
            if !files.get(file).is_some_and(|file| file.names.contains_key(tensor.as_str())) {
                return Err(malformed(index, tensor, format!("wanted it in {name}, found no such tensor there")));
            }
            places.insert(tensor.clone(), file);
        }
        Ok(Self { path: directory.to_owned(), files, places })
    }
}

/// Whether `name` is the name of a file in the same directory, as systems and messages take them.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let is_separator = |c: char| matches!(c, '/' | '\\') || c.is_control();
    !name.is_empty() && name.len() <= MAX_NAME_BYTES && name != "." && name != ".." && !name.contains(is_separator)
}

/// Longest name of a file on the usual systems.
const MAX_NAME_BYTES: usize = 255;

/// The contents of a small file.
pub(crate) fn read_bounded(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    // Asked before opening: opening a pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(malformed(path, "the file", "wanted a regular file, found something else".to_owned()));
    }
    let mut text = Vec::new();
    File::open(path).map_err(io)?.take(limit_bytes + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > limit_bytes {
        return Err(malformed(path, "size", format!("wanted at most {limit_bytes} bytes, found more")));
    }
    Ok(text)
}

struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            dtype: String,
            shape: Vec<u64>,
            data_offsets: [u64; 2],
        }
        let Fields { dtype, shape, data_offsets } = Fields::deserialize(deserializer)?;
        Ok(Self { dtype, shape, data_offsets })
    }
}

/// The header's tensors in order, names that occur twice included.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// The header's bytes and the start of the data.
fn split_header(map: &FileMap) -> Result<(&[u8], usize), ModelError> {
    let len = map.len() as u64;
    let Some((length, rest)) = map.split_first_chunk::<8>() else {
        return Err(malformed(map.path(), "header length", format!("wanted 8 bytes, found a file of {len}")));
    };
    let header_len = u64::from_le_bytes(*length);
    if header_len > MAX_HEADER_BYTES || header_len > rest.len() as u64 {
        let limit = MAX_HEADER_BYTES.min(rest.len() as u64);
        let reason = format!("wanted at most {limit} bytes, found {header_len}: not a safetensors file, or cut short");
        return Err(malformed(map.path(), "header length", reason));
    }
    // Cannot truncate: it lies in the mapping.
    Ok((&rest[..header_len as usize], 8 + header_len as usize))
}

fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" | "C64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "BOOL" | "I8" | "U8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

fn malformed(path: &Path, field: &str, reason: String) -> ModelError {
    ModelError::Malformed { path: path.to_owned(), field: field.to_owned(), reason }
}
