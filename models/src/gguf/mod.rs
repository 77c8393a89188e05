//! GGUF files, versions 2 and 3, little-endian (format: the GGUF specification of the ggml project).
//!
//! Two steps. [`GgufFile::open`] reads the header alone: metadata as views into the mapping and the tensor table, with every
//! count, length, dimension and offset checked against the file's length before it is used; nothing is allocated that the
//! file's own length does not bound. [`GgufFile::model`] gives the model meaning: architecture, hyper-parameters, vocabulary,
//! tensors by role. A file of an architecture that is not implemented can still be looked at with the first.

mod architecture;
mod cursor;
mod features;
mod ggml_type;
mod kind;
mod roles;
mod rope;
mod sampling;
mod split;
pub(crate) use split::part_names;
mod tokens;
mod value;

pub use ggml_type::GgmlType;
pub use value::{Array, Value, ValueType};

use crate::error::ModelError;
use crate::map::FileMap;
use crate::source::{Format, ModelSource};
use crate::tensor::{Tensor, WeightType};
use cursor::{Cursor, MAX_KEY_BYTES, MAX_TENSOR_NAME_BYTES};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Metadata entries of a file at most. The largest known files have about a hundred.
pub const MAX_METADATA_ENTRIES: u64 = 1 << 16;
/// Tensors of a file at most. The largest known files have a few thousand.
pub const MAX_TENSORS: u64 = 1 << 17;
/// Largest accepted `general.alignment`.
pub const MAX_ALIGNMENT: u64 = 1 << 20;

const DEFAULT_ALIGNMENT: u64 = 32;
/// Key and value type and an empty key, before the value.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_INFO_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// An entry of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: Arc<str>,
    dims: [u64; 4],
    dim_count: usize,
    ggml_type: GgmlType,
    offset_bytes: u64,
    range: Option<Range<usize>>,
    /// Index into the file's mappings.
    part: usize,
}

impl TensorInfo {
    /// Name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Dimensions, the one that is contiguous in memory first; 1 to 4 of them, none of them 0.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.dims[..self.dim_count]
    }

    /// Type number.
    #[must_use]
    pub fn ggml_type(&self) -> GgmlType {
        self.ggml_type
    }

    /// Offset from the start of the tensor data.
    #[must_use]
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Place in the file, or in the part of it that holds the tensor; `None` where the type is not supported and its size therefore unknown.
    #[must_use]
    pub fn range(&self) -> Option<Range<usize>> {
        self.range.clone()
    }

    /// Number of elements. Cannot overflow: checked when the file was opened.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }
}

#[derive(Debug, Clone)]
struct Entry {
    key: String,
    value_type: ValueType,
    at: usize,
}

/// The header of an opened GGUF file, and its mapping.
#[derive(Debug, Clone)]
pub struct GgufFile {
    map: Arc<FileMap>,
    /// The mappings of all parts, where the file is one of several; else `map` alone.
    parts: Vec<Arc<FileMap>>,
    version: u32,
    alignment: u64,
    data_start: usize,
    entries: Vec<Entry>,
    keys: HashMap<String, usize>,
    tensors: Vec<TensorInfo>,
    names: HashMap<Arc<str>, usize>,
}

impl GgufFile {
    /// Maps the file at `path` and reads its header.
    ///
    /// # Errors
    /// [`ModelError::Io`]; [`ModelError::Malformed`] for what is not GGUF or is damaged; [`ModelError::Unsupported`] for version
    /// 1 and big-endian files.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::read(Arc::new(FileMap::open(path)?))
    }

    /// Reads the header of a mapped file.
    ///
    /// # Errors
    /// As [`GgufFile::open`].
    pub fn read(map: Arc<FileMap>) -> Result<Self, ModelError> {
        let version = read_version(&map)?;
        let mut cursor = Cursor::new(&map, 8);
        let tensor_count = read_count(&map, &mut cursor, "tensor count", MAX_TENSORS, MIN_TENSOR_INFO_BYTES)?;
        let entry_count = read_count(&map, &mut cursor, "metadata count", MAX_METADATA_ENTRIES, MIN_ENTRY_BYTES)?;
        let (entries, keys) = read_entries(&map, &mut cursor, entry_count)?;
        let mut file = Self {
            parts: vec![Arc::clone(&map)],
            map: Arc::clone(&map),
            version,
            alignment: DEFAULT_ALIGNMENT,
            data_start: 0,
            entries,
            keys,
            tensors: Vec::new(),
            names: HashMap::new(),
        };
        file.alignment = file.read_alignment()?;
        file.read_tensors(&mut cursor, tensor_count)?;
        Ok(file)
    }

    /// The model in it.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for an architecture, a tensor type or a declared feature that is not implemented;
    /// [`ModelError::Missing`] and [`ModelError::Malformed`] where the file is incomplete or contradicts itself.
    pub fn model(&self) -> Result<ModelSource, ModelError> {
        let config = architecture::read(self)?;
        let tensors = roles::assign(self, &config)?;
        let vocabulary = tokens::read(self, &config)?;
        let source = ModelSource::new(self.path().to_owned(), Format::Gguf, config, vocabulary, tensors);
        Ok(source.with_suggested_sampling(sampling::read(self)))
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// Length of the file.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Version of the format: 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of the tensor data, a power of two.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Where the tensor data starts in the file.
    #[must_use]
    pub fn data_start(&self) -> usize {
        self.data_start
    }

    /// The metadata, in the file's order.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|entry| Some((entry.key.as_str(), self.value_of(entry)?)))
    }

    /// The value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.keys.get(key).and_then(|&index| self.value_of(&self.entries[index]))
    }

    /// A value that is an integer of any width, not negative.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where it is something else.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.typed(key, "an integer, not negative", Value::as_unsigned)
    }

    /// A value that is a finite floating-point number.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where it is something else.
    pub fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.typed(key, "a finite floating-point number", Value::as_float)
    }

    /// A value that is a bool.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where it is something else.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "a bool", Value::as_bool)
    }

    /// A value that is a text.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where it is something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A value that is an array.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where it is something else.
    pub fn array(&self, key: &str) -> Result<Option<Array<'_>>, ModelError> {
        self.typed(key, "an array", Value::as_array)
    }

    /// The elements of an array, each turned by `element`; `wanted` names the element type for the message.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where the value is no array or an element is something else.
    pub fn elements<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        mut element: impl FnMut(&Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        // Grows with what is found to be of the type, not with what the file announces.
        let mut out = Vec::new();
        for (index, value) in array.iter().enumerate() {
            let turned = element(&value).ok_or_else(|| {
                self.malformed(key, format!("element {index}: wanted {wanted}, found {}", value.describe()))
            })?;
            out.push(turned);
        }
        if out.len() != array.len() {
            return Err(
                self.malformed(key, format!("wanted {} elements, found {}: the file changed", array.len(), out.len()))
            );
        }
        Ok(Some(out))
    }

    /// The tensor table, in the file's order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The table entry of the tensor called `name`.
    #[must_use]
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.names.get(name).map(|&index| &self.tensors[index])
    }

    /// The tensor of a table entry, as a matrix; trailing dimensions of 1 do not count.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for a type that is not implemented, [`ModelError::Malformed`] for more than two dimensions.
    pub fn tensor(&self, info: &TensorInfo) -> Result<Tensor, ModelError> {
        let (Some(weight_type), Some(range)) = (info.ggml_type.weight_type(), info.range()) else {
            let supported: Vec<_> = WeightType::ALL.iter().map(|weight_type| weight_type.name()).collect();
            return Err(
                self.unsupported(format!("tensor type {} of {:?}", info.ggml_type, info.name()), supported.join(", "))
            );
        };
        if info.dims().iter().skip(2).any(|&dim| dim != 1) {
            return Err(self.malformed(
                format!("tensor {:?}", info.name()),
                format!("wanted one or two dimensions, found {:?}", info.dims()),
            ));
        }
        // Cannot truncate: the elements fit in the file.
        let (cols, rows) = (info.dims[0] as usize, info.dims().get(1).copied().unwrap_or(1) as usize);
        let part = Arc::clone(&self.parts[info.part]);
        Tensor::new(Arc::clone(&info.name), weight_type, rows, cols, part, range).ok_or_else(|| {
            self.malformed(format!("tensor {:?}", info.name()), "its range does not match its shape".into())
        })
    }

    fn value_of(&self, entry: &Entry) -> Option<Value<'_>> {
        Cursor::new(&self.map, entry.at).value(entry.value_type, 0).ok()
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        turn: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match turn(&value) {
            Some(turned) => Ok(Some(turned)),
            None => Err(self.malformed(key, format!("wanted {wanted}, found {}", value.describe()))),
        }
    }

    fn read_alignment(&self) -> Result<u64, ModelError> {
        let key = "general.alignment";
        let alignment = self.unsigned(key)?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || !(8..=MAX_ALIGNMENT).contains(&alignment) {
            let reason = format!("wanted a power of two from 8 to {MAX_ALIGNMENT}, found {alignment}");
            return Err(self.malformed(key, reason));
        }
        Ok(alignment)
    }

    fn read_tensors(&mut self, cursor: &mut Cursor<'_>, count: u64) -> Result<(), ModelError> {
        for index in 0..count {
            let info = read_tensor_info(cursor).map_err(|(name, reason)| {
                let field = name.map_or_else(|| format!("tensor {index}"), |name| format!("tensor {name:?}"));
                self.malformed(field, reason)
            })?;
            if self.names.insert(Arc::clone(&info.name), self.tensors.len()).is_some() {
                let reason = "wanted one tensor of this name, found a second".to_owned();
                return Err(self.malformed(format!("tensor {:?}", info.name()), reason));
            }
            self.tensors.push(info);
        }
        // Cannot overflow: the header lies in the file and the alignment is small.
        self.data_start = cursor.at().next_multiple_of(self.alignment as usize);
        let ranges: Result<Vec<_>, _> = self.tensors.iter().map(|info| self.locate(info)).collect();
        for (info, range) in self.tensors.iter_mut().zip(ranges?) {
            info.range = range;
        }
        self.check_overlap()
    }

    /// Where the tensor lies in the file.
    fn locate(&self, info: &TensorInfo) -> Result<Option<Range<usize>>, ModelError> {
        let bad = |reason: String| self.malformed(format!("tensor {:?}", info.name()), reason);
        if !info.offset_bytes.is_multiple_of(self.alignment) {
            return Err(bad(format!(
                "wanted an offset of a multiple of {}, found {}",
                self.alignment, info.offset_bytes
            )));
        }
        let Some(weight_type) = info.ggml_type.weight_type() else { return Ok(None) };
        let block_len = weight_type.block_len() as u64;
        if !info.dims[0].is_multiple_of(block_len) {
            let reason =
                format!("wanted rows of a multiple of {block_len} elements for {weight_type}, found {}", info.dims[0]);
            return Err(bad(reason));
        }
        let len = (info.elements() / block_len).checked_mul(weight_type.block_bytes() as u64);
        let start = info.offset_bytes.checked_add(self.data_start as u64);
        let end = start.zip(len).and_then(|(start, len)| start.checked_add(len));
        match (start, end) {
            // Cannot truncate: both are below the length of a mapping.
            (Some(start), Some(end)) if end <= self.len_bytes() => Ok(Some(start as usize..end as usize)),
            _ => Err(bad(format!(
                "wanted {} elements of {weight_type} at offset {} of the data, which starts at {}, found the end of the file at \
                 {}: the file is damaged or cut short, fetch it again",
                info.elements(),
                info.offset_bytes,
                self.data_start,
                self.map.len()
            ))),
        }
    }

    fn check_overlap(&self) -> Result<(), ModelError> {
        let mut placed: Vec<_> =
            self.tensors.iter().filter_map(|info| info.range().map(|range| (range, info))).collect();
        placed.sort_by_key(|(range, _)| (range.start, range.end));
        for pair in placed.windows(2) {
            let ((before, first), (after, second)) = (&pair[0], &pair[1]);
            if after.start < before.end {
                return Err(self.malformed(
                    format!("tensor {:?}", second.name()),
                    format!(
                        "wanted data of its own, found it at {}..{}, which overlaps {:?} at {}..{}",
                        after.start,
                        after.end,
                        first.name(),
                        before.start,
                        before.end
                    ),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn malformed(&self, field: impl Into<String>, reason: String) -> ModelError {
        malformed(&self.map, field, reason)
    }

    fn unsupported(&self, feature: impl Into<String>, supported: impl Into<String>) -> ModelError {
        ModelError::Unsupported { path: self.path().to_owned(), feature: feature.into(), supported: supported.into() }
    }

    fn missing(&self, what: impl Into<String>, remedy: impl Into<String>) -> ModelError {
        ModelError::Missing { path: self.path().to_owned(), what: what.into(), remedy: remedy.into() }
    }
}

fn malformed(map: &FileMap, field: impl Into<String>, reason: String) -> ModelError {
    ModelError::Malformed { path: map.path().to_owned(), field: field.into(), reason }
}

fn read_version(map: &FileMap) -> Result<u32, ModelError> {
    if map.is_empty() {
        return Err(malformed(map, "magic", "wanted a GGUF file, found an empty file".to_owned()));
    }
    if !map.starts_with(&kind::MAGIC) {
        let found = kind::describe(&map[..map.len().min(512)]);
        return Err(malformed(map, "magic", format!("wanted \"GGUF\", found {found}")));
    }
    let version = Cursor::new(map, 4).u32().map_err(|reason| malformed(map, "version", reason))?;
    let unsupported = |feature: String| {
        let supported = "versions 2 and 3, little-endian; convert the file with a current tool".to_owned();
        Err(ModelError::Unsupported { path: map.path().to_owned(), feature, supported })
    };
    match version {
        2 | 3 => Ok(version),
        1 => unsupported("GGUF version 1".to_owned()),
        _ if matches!(version.swap_bytes(), 1..=0xffff) => {
            unsupported(format!("big-endian GGUF (version {} byte-swapped)", version.swap_bytes()))
        }
        _ => unsupported(format!("GGUF version {version}")),
    }
}

/// A count of things that take at least `min_bytes` each in the rest of the file.
fn read_count(
    map: &FileMap,
    cursor: &mut Cursor<'_>,
    field: &str,
    limit: u64,
    min_bytes: u64,
) -> Result<u64, ModelError> {
    let count = cursor.u64().map_err(|reason| malformed(map, field, reason))?;
    let room = cursor.remaining() as u64 / min_bytes;
    if count > limit.min(room) {
        let reason =
            format!("wanted at most {} (limit {limit}, room in the file for {room}), found {count}", limit.min(room));
        return Err(malformed(map, field, reason));
    }
    Ok(count)
}

type Entries = (Vec<Entry>, HashMap<String, usize>);

fn read_entries(map: &FileMap, cursor: &mut Cursor<'_>, count: u64) -> Result<Entries, ModelError> {
    let mut entries = Vec::new();
    let mut keys = HashMap::new();
    for index in 0..count {
        let key = cursor
            .string(MAX_KEY_BYTES)
            .map_err(|reason| malformed(map, format!("key of metadata entry {index}"), reason))?;
        let bad = |reason| malformed(map, Value::String(key).to_string(), reason);
        if key.is_empty() {
            return Err(malformed(
                map,
                format!("key of metadata entry {index}"),
                "wanted a name, found none".to_owned(),
            ));
        }
        let value_type = cursor.value_type().map_err(bad)?;
        let at = cursor.at();
        cursor.value(value_type, 0).map_err(bad)?;
        if keys.insert(key.to_owned(), entries.len()).is_some() {
            return Err(bad("wanted the key once, found it a second time".to_owned()));
        }
        entries.push(Entry { key: key.to_owned(), value_type, at });
    }
    Ok((entries, keys))
}

/// A tensor info without its place; errors come with the name where it could be read.
fn read_tensor_info<'a>(cursor: &mut Cursor<'a>) -> Result<TensorInfo, (Option<&'a str>, String)> {
    let name = cursor.string(MAX_TENSOR_NAME_BYTES).map_err(|reason| (None, format!("name: {reason}")))?;
    read_shape(cursor, name).map_err(|reason| (Some(name), reason))
}

fn read_shape(cursor: &mut Cursor<'_>, name: &str) -> Result<TensorInfo, String> {
    let dim_count = cursor.u32()?;
    if !(1..=4).contains(&dim_count) {
        return Err(format!("wanted 1 to 4 dimensions, found {dim_count}"));
    }
    let mut dims = [1_u64; 4];
    let mut elements = 1_u64;
    for dim in &mut dims[..dim_count as usize] {
        *dim = cursor.u64()?;
        elements = elements
            .checked_mul(*dim)
            .filter(|&product| product > 0 && i64::try_from(product).is_ok())
            .ok_or_else(|| format!("wanted dimensions from 1 whose product is below 2^63, found {dim}"))?;
    }
    let ggml_type = GgmlType(cursor.u32()?);
    let offset_bytes = cursor.u64()?;
    Ok(TensorInfo {
        name: name.into(),
        dims,
        dim_count: dim_count as usize,
        ggml_type,
        offset_bytes,
        range: None,
        part: 0,
    })
}
