//! A writer and a plain reader of GGUF v3 files (GGUF specification), independent of the program's own reader.

use npuhal_models::WeightType;
use std::io;
use std::path::Path;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the variants are the types of the specification")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// An array of strings.
    pub fn strings<S: Into<String>>(items: impl IntoIterator<Item = S>) -> Self {
        Self::Array(items.into_iter().map(|item| Self::String(item.into())).collect())
    }

    /// Number of the type in the file.
    #[must_use]
    pub fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// The value as a count, where it is a whole number that is not negative.
    #[must_use]
    pub fn as_usize(&self) -> Option<usize> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value as usize),
            Self::U64(value) => usize::try_from(value).ok(),
            Self::I32(value) => usize::try_from(value).ok(),
            Self::I64(value) => usize::try_from(value).ok(),
            _ => None,
        }
    }

    /// The value as a number with a fraction.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(value) => Some(value.into()),
            Self::F64(value) => Some(value),
            _ => None,
        }
    }

    /// The value as text.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(value) => out.push(*value),
            Self::I8(value) => out.extend(value.to_le_bytes()),
            Self::U16(value) => out.extend(value.to_le_bytes()),
            Self::I16(value) => out.extend(value.to_le_bytes()),
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::I32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::String(value) => write_string(value, out),
            Self::Array(items) => {
                out.extend(items.first().map_or(4, Self::type_id).to_le_bytes());
                out.extend((items.len() as u64).to_le_bytes());
                items.iter().for_each(|item| item.write(out));
            }
            Self::U64(value) => out.extend(value.to_le_bytes()),
            Self::I64(value) => out.extend(value.to_le_bytes()),
            Self::F64(value) => out.extend(value.to_le_bytes()),
        }
    }
}

/// A tensor and its bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTensor {
    /// Name.
    pub name: String,
    /// Dimensions, the fastest (elements of a row) first.
    pub dims: Vec<u64>,
    /// Number of the type in the file.
    pub type_id: u32,
    /// Data.
    pub bytes: Vec<u8>,
}

/// The contents of a file. Fields are public so that tests can damage them.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufFile {
    /// Version; 3.
    pub version: u32,
    /// Metadata, in order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors, in order.
    pub tensors: Vec<GgufTensor>,
}

impl GgufFile {
    /// The value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Sets `key`, in place if it is there.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.metadata.iter_mut().find(|(name, _)| name == key) {
            Some((_, held)) => *held = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The same in `count` files, as `gguf-split` makes them: metadata in the first, tensors in all.
    #[must_use]
    pub fn split(&self, count: usize) -> Vec<Self> {
        let of_each = self.tensors.len().div_ceil(count).max(1);
        let mut parts: Vec<Self> = self
            .tensors
            .chunks(of_each)
            .map(|tensors| Self { version: self.version, metadata: Vec::new(), tensors: tensors.to_vec() })
            .collect();
        parts[0].metadata.clone_from(&self.metadata);
        for (number, part) in parts.iter_mut().enumerate() {
            part.set("split.no", Value::U16(number as u16));
            part.set("split.count", Value::U16(count as u16));
            part.set("split.tensors.count", Value::I32(self.tensors.len() as i32));
        }
        parts
    }

    /// The file as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let alignment = self.alignment();
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_string(key, &mut out);
            out.extend(value.type_id().to_le_bytes());
            value.write(&mut out);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            write_string(&tensor.name, &mut out);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(alignment), 0);
            out.extend_from_slice(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(alignment), 0);
        out
    }

    /// Writes the file.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, self.to_bytes())
    }

    /// Reads a well-formed file. Made for files of the tests, not for hostile ones.
    ///
    /// # Errors
    /// A sentence about the first thing that is not as the specification says.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(4)? != b"GGUF" {
            return Err("the file does not start with GGUF".to_owned());
        }
        let version = cursor.u32()?;
        let (tensors, pairs) = (cursor.u64()?, cursor.u64()?);
        let mut file = Self { version, metadata: Vec::new(), tensors: Vec::new() };
        for _ in 0..pairs {
            let key = cursor.string()?;
            let type_id = cursor.u32()?;
            file.metadata.push((key, cursor.value(type_id)?));
        }
        let mut offsets = Vec::new();
        for _ in 0..tensors {
            let name = cursor.string()?;
            let rank = cursor.u32()?;
            let dims = (0..rank).map(|_| cursor.u64()).collect::<Result<Vec<_>, _>>()?;
            let type_id = cursor.u32()?;
            offsets.push(cursor.u64()? as usize);
            file.tensors.push(GgufTensor { name, dims, type_id, bytes: Vec::new() });
        }
        let data = cursor.at.next_multiple_of(file.alignment());
        for (tensor, offset) in file.tensors.iter_mut().zip(offsets) {
            let weight_type =
                weight_type(tensor.type_id).ok_or_else(|| format!("type {} of {}", tensor.type_id, tensor.name))?;
            let (block_len, block_bytes) = block(weight_type);
            let len = tensor.dims.iter().product::<u64>() as usize / block_len * block_bytes;
            let range = data + offset..data + offset + len;
            tensor.bytes = bytes.get(range).ok_or_else(|| format!("{} runs past the end", tensor.name))?.to_vec();
        }
        Ok(file)
    }

    fn alignment(&self) -> usize {
        self.get("general.alignment").and_then(Value::as_usize).filter(|alignment| *alignment > 0).unwrap_or(32)
    }
}

/// Number of `weight_type` in the file.
#[must_use]
pub fn type_id(weight_type: WeightType) -> u32 {
    TYPES.iter().find(|(held, ..)| *held == weight_type).map_or(u32::MAX, |(_, id, ..)| *id)
}

/// The type of number `type_id`, if it is one of those the program computes with.
#[must_use]
pub fn weight_type(type_id: u32) -> Option<WeightType> {
    TYPES.iter().find(|(_, id, ..)| *id == type_id).map(|(weight_type, ..)| *weight_type)
}

/// Elements and bytes of a block of `weight_type`.
#[must_use]
pub fn block(weight_type: WeightType) -> (usize, usize) {
    TYPES.iter().find(|(held, ..)| *held == weight_type).map_or((1, 0), |(_, _, len, bytes)| (*len, *bytes))
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| format!("{len} bytes at {} run past the end", self.at))?;
        self.at += len;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut fixed = [0; N];
        fixed.copy_from_slice(self.take(N)?);
        Ok(fixed)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.fixed()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.fixed()?))
    }

    fn string(&mut self) -> Result<String, String> {
        let len = self.u64()? as usize;
        String::from_utf8(self.take(len)?.to_vec()).map_err(|error| error.to_string())
    }

    fn value(&mut self, type_id: u32) -> Result<Value, String> {
        Ok(match type_id {
            0 => Value::U8(u8::from_le_bytes(self.fixed()?)),
            1 => Value::I8(i8::from_le_bytes(self.fixed()?)),
            2 => Value::U16(u16::from_le_bytes(self.fixed()?)),
            3 => Value::I16(i16::from_le_bytes(self.fixed()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.fixed()?)),
            6 => Value::F32(f32::from_le_bytes(self.fixed()?)),
            7 => Value::Bool(self.take(1)? != [0]),
            8 => Value::String(self.string()?),
            9 => {
                let element = self.u32()?;
                let len = self.u64()?;
                Value::Array((0..len).map(|_| self.value(element)).collect::<Result<_, _>>()?)
            }
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.fixed()?)),
            12 => Value::F64(f64::from_le_bytes(self.fixed()?)),
            other => return Err(format!("value type {other}")),
        })
    }
}

/// Type, number in the file, elements of a block, bytes of a block.
const TYPES: [(WeightType, u32, usize, usize); 16] = [
    (WeightType::F32, 0, 1, 4),
    (WeightType::F16, 1, 1, 2),
    (WeightType::Q4_0, 2, 32, 18),
    (WeightType::Q4_1, 3, 32, 20),
    (WeightType::Q5_0, 6, 32, 22),
    (WeightType::Q5_1, 7, 32, 24),
    (WeightType::Q8_0, 8, 32, 34),
    (WeightType::Q2K, 10, 256, 84),
    (WeightType::Q3K, 11, 256, 110),
    (WeightType::Iq4Nl, 20, 32, 18),
    (WeightType::Iq4Xs, 23, 256, 136),
    (WeightType::Mxfp4, 39, 32, 17),
    (WeightType::Q4K, 12, 256, 144),
    (WeightType::Q5K, 13, 256, 176),
    (WeightType::Q6K, 14, 256, 210),
    (WeightType::Bf16, 30, 1, 2),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut file = GgufFile {
            version: 3,
            metadata: vec![
                ("general.alignment".to_owned(), Value::U32(64)),
                ("a".to_owned(), Value::strings(["x", "yy"])),
                ("b".to_owned(), Value::Array(vec![Value::Array(vec![Value::I8(-3)])])),
                ("c".to_owned(), Value::F64(0.1)),
            ],
            tensors: vec![
                GgufTensor { name: "one".to_owned(), dims: vec![3], type_id: 0, bytes: vec![7; 12] },
                GgufTensor { name: "two".to_owned(), dims: vec![32, 2], type_id: 8, bytes: vec![9; 68] },
            ],
        };
        assert_eq!(GgufFile::parse(&file.to_bytes()).unwrap(), file);
        file.set("c", Value::Bool(true));
        assert_eq!(file.get("c"), Some(&Value::Bool(true)));
        let bytes = file.to_bytes();
        assert_eq!(bytes.len() % 64, 0);
        assert!(GgufFile::parse(&bytes[..bytes.len() - 70]).is_err());
    }
}
