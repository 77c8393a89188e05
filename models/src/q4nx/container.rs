//! The file `model.q4nx`: a length, a JSON table of tensors, their bytes.
//!
//! The table's length `n` is the 64-bit number at the start; the JSON object of `n` bytes follows, and tensor offsets count
//! from its end. A member with `data_offsets` is a tensor, `{"dtype", "shape", "data_offsets": [begin, end]}`; the others
//! (`__metadata__`) are text about the file.

use super::tile::{Q4_1_BYTES, TileKind};
use crate::error::ModelError;
use crate::json_keys::short;
use crate::map::FileMap;
use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The table at most. Published files have 35 kB.
pub const MAX_TABLE_BYTES: u64 = 4 << 20;
/// Dimensions of a tensor at most.
const MAX_RANK: usize = 8;
const LENGTH_BYTES: usize = 8;

/// An entry of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    name: Arc<str>,
    dtype: String,
    shape: Vec<i64>,
    range: Range<usize>,
    file_len: usize,
}

impl TensorEntry {
    /// Name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type, as the file spells it: `BF16`, `I8`, …
    #[must_use]
    pub fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Dimensions as stated, the slowest first. Nothing is checked about them.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Declared place in the file.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Declared length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.range.len()
    }

    /// Bytes from the tensor's start to the end of the file: the bound for whoever goes by the shape.
    #[must_use]
    pub fn avail(&self) -> usize {
        self.file_len - self.range.start
    }

    /// Number of tiles by the published rule: `a·b` for `[a, b, chunk]`, `a` for `[a, 5120]`, `⌈a·b / 5120⌉` for another
    /// `[a, b]`, 0 for anything else, for dimensions that are not positive, and where the number does not fit 63 bits.
    #[must_use]
    pub fn tile_count(&self) -> u64 {
        let count = match *self.shape {
            [a, b, _] if a > 0 && b > 0 => a.checked_mul(b),
            [a, b] if a > 0 && b == Q4_1_BYTES as i64 => Some(a),
            [a, b] if a > 0 && b > 0 => a.checked_mul(b).map(|bytes| (bytes as u64).div_ceil(Q4_1_BYTES as u64) as i64),
            _ => None,
        };
        count.map_or(0, |count| count as u64)
    }

    /// Kind of its tiles and their number as its own shape `[…, chunk]` states them.
    ///
    /// # Errors
    /// Why it is no tensor of tiles.
    pub fn tiles(&self) -> Result<(TileKind, usize), String> {
        let (&last, others) = match &*self.shape {
            [a, last] => (last, [*a, 1]),
            [a, b, last] => (last, [*a, *b]),
            other => return Err(format!("not a Q4NX chunked tensor (shape {other:?})")),
        };
        let kind = usize::try_from(last).ok().and_then(TileKind::from_bytes);
        let kind = kind.ok_or_else(|| {
            format!("not a Q4NX chunked tensor (last dimension {last}); wanted 5120 (q4_1), 4736 (Q4_K) or 8704 (Q8)")
        })?;
        let count = others.iter().try_fold(1_usize, |count, dim| count.checked_mul(usize::try_from(*dim).ok()?));
        match count {
            Some(count) if count > 0 => Ok((kind, count)),
            _ => Err(format!("wanted a positive number of tiles, found shape {:?}", self.shape)),
        }
    }
}

/// The table of an opened file, and its mapping.
#[derive(Debug, Clone)]
pub struct Q4nxFile {
    map: Arc<FileMap>,
    table_bytes: usize,
    tensors: Vec<TensorEntry>,
    names: HashMap<Arc<str>, usize>,
    metadata: Vec<(String, String)>,
}

impl Q4nxFile {
    /// Maps the file at `path` and reads its table.
    ///
    /// # Errors
    /// [`ModelError::Io`]; [`ModelError::Malformed`] for a file that is cut short or contradicts itself.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::read(Arc::new(FileMap::open(path)?))
    }

    /// Reads the table of a mapped file.
    ///
    /// # Errors
    /// As [`Q4nxFile::open`].
    pub fn read(map: Arc<FileMap>) -> Result<Self, ModelError> {
        let bad = |field: &str, reason: String| malformed(map.path(), field, reason);
        let Some((length, rest)) = map.split_first_chunk::<LENGTH_BYTES>() else {
            let reason = format!("truncated: wanted at least {LENGTH_BYTES} bytes, found {}", map.len());
            return Err(bad("length of the table", reason));
        };
        let length = u64::from_le_bytes(*length);
        let Some(text) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            let reason =
                format!("header past the end of the file: wanted at most {} bytes, found {length}", rest.len());
            return Err(bad("length of the table", reason));
        };
        if length > MAX_TABLE_BYTES {
            let reason = format!("wanted at most {MAX_TABLE_BYTES} bytes, found {length}");
            return Err(bad("length of the table", reason));
        }
        let members = members(text).map_err(|error| bad("table", format!("wanted a JSON object: {error}")))?;
        let table_bytes = text.len();
        let mut file = Self {
            map: Arc::clone(&map),
            table_bytes,
            tensors: Vec::new(),
            names: HashMap::new(),
            metadata: Vec::new(),
        };
        for (name, member) in members {
            file.take(name, &member)?;
        }
        Ok(file)
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// The mapping.
    #[must_use]
    pub fn map(&self) -> &Arc<FileMap> {
        &self.map
    }

    /// Where tensor data starts.
    #[must_use]
    pub fn data_start(&self) -> usize {
        LENGTH_BYTES + self.table_bytes
    }

    /// The tensors, in the table's order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.names.get(name).map(|&index| &self.tensors[index])
    }

    /// Texts of `__metadata__`, in the table's order.
    #[must_use]
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    fn take(&mut self, name: String, member: &Value) -> Result<(), ModelError> {
        let Some(offsets) = member.get("data_offsets") else {
            if name == "__metadata__" {
                let texts = member.as_object().into_iter().flatten();
                self.metadata =
                    texts.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect();
            }
            return Ok(());
        };
        let entry = self
            .entry(&name, member, offsets)
            .map_err(|reason| malformed(self.path(), &format!("tensor {name:?}"), reason))?;
        if self.names.insert(Arc::clone(&entry.name), self.tensors.len()).is_some() {
            let reason = "wanted one tensor of this name, found a second".to_owned();
            return Err(malformed(self.path(), &format!("tensor {name:?}"), reason));
        }
        self.tensors.push(entry);
        Ok(())
    }

    fn entry(&self, name: &str, member: &Value, offsets: &Value) -> Result<TensorEntry, String> {
        let range = self.range(offsets).ok_or_else(|| {
            format!(
                "bad data_offsets for {name}: wanted [begin, end] in the {} bytes of data, found {}",
                self.map.len() - self.data_start(),
                short(offsets)
            )
        })?;
        let field = |key: &str| member.get(key).ok_or_else(|| format!("{key} is missing"));
        let dtype = field("dtype")?;
        let dtype = dtype.as_str().ok_or_else(|| format!("dtype: wanted a text, found {}", short(dtype)))?;
        let shape = field("shape")?;
        let bad_shape = || format!("shape: wanted up to {MAX_RANK} whole numbers below 2^63, found {}", short(shape));
        let dims = shape.as_array().filter(|dims| dims.len() <= MAX_RANK).ok_or_else(bad_shape)?;
        let dims = dims.iter().map(Value::as_i64).collect::<Option<Vec<_>>>().ok_or_else(bad_shape)?;
        let file_len = self.map.len();
        Ok(TensorEntry { name: name.into(), dtype: dtype.to_owned(), shape: dims, range, file_len })
    }

    fn range(&self, offsets: &Value) -> Option<Range<usize>> {
        let [begin, end] = offsets.as_array()?.as_slice() else { return None };
        let place = |offset: &Value| usize::try_from(offset.as_u64()?).ok()?.checked_add(self.data_start());
        let (begin, end) = (place(begin)?, place(end)?);
        (begin <= end && end <= self.map.len()).then_some(begin..end)
    }
}

fn malformed(path: &Path, field: &str, reason: String) -> ModelError {
    ModelError::Malformed { path: path.to_owned(), field: field.to_owned(), reason }
}

/// Members of a JSON object in their order, repeated names included.
fn members(text: &[u8]) -> Result<Vec<(String, Value)>, serde_json::Error> {
    struct Members;

    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, Value)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }

    let mut reader = serde_json::Deserializer::from_slice(text);
    let members = reader.deserialize_map(Members)?;
    reader.end()?;
    Ok(members)
}
