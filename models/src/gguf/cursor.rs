//! Bounded reading of the little-endian GGUF encoding.

use super::value::{Array, Value, ValueType};

/// Bytes of the longest key (GGUF specification: 2^16 - 1).
pub(super) const MAX_KEY_BYTES: u64 = 65_535;
/// Bytes of the longest tensor name (GGUF specification).
pub(super) const MAX_TENSOR_NAME_BYTES: u64 = 64;
/// Levels of arrays in arrays.
pub(super) const MAX_ARRAY_DEPTH: u32 = 4;

/// A position in a byte range. Every read says what it wanted where, and nothing is read past the end.
#[derive(Debug, Clone)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len().saturating_sub(self.at)
    }

    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = usize::try_from(len)
            .ok()
            .and_then(|len| rest.get(..len))
            .ok_or_else(|| format!("wanted {len} bytes at offset {}, found the end after {}", self.at, rest.len()))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.fixed().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        self.fixed().map(u64::from_le_bytes)
    }

    /// A string of at most `limit` bytes.
    pub(super) fn string(&mut self, limit: u64) -> Result<&'a str, String> {
        let at = self.at;
        let len = self.u64()?;
        if len > limit {
            return Err(format!("wanted a string of at most {limit} bytes at offset {at}, found length {len}"));
        }
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|error| format!("wanted UTF-8 text at offset {at}, found {error}"))
    }

    /// The type number of a value.
    pub(super) fn value_type(&mut self) -> Result<ValueType, String> {
        let at = self.at;
        let id = self.u32()?;
        ValueType::from_id(id).ok_or_else(|| format!("wanted a value type from 0 to 12 at offset {at}, found {id}"))
    }

    /// A value of type `kind`, with everything inside it checked. `depth` counts the arrays around it.
    pub(super) fn value(&mut self, kind: ValueType, depth: u32) -> Result<Value<'a>, String> {
        Ok(match kind {
            ValueType::U8 => Value::U8(self.fixed().map(u8::from_le_bytes)?),
            ValueType::I8 => Value::I8(self.fixed().map(i8::from_le_bytes)?),
            ValueType::U16 => Value::U16(self.fixed().map(u16::from_le_bytes)?),
            ValueType::I16 => Value::I16(self.fixed().map(i16::from_le_bytes)?),
            ValueType::U32 => Value::U32(self.u32()?),
            ValueType::I32 => Value::I32(self.fixed().map(i32::from_le_bytes)?),
            ValueType::F32 => Value::F32(self.fixed().map(f32::from_le_bytes)?),
            ValueType::U64 => Value::U64(self.u64()?),
            ValueType::I64 => Value::I64(self.fixed().map(i64::from_le_bytes)?),
            ValueType::F64 => Value::F64(self.fixed().map(f64::from_le_bytes)?),
            ValueType::Bool => Value::Bool(self.boolean()?),
            ValueType::String => Value::String(self.string(u64::MAX)?),
            ValueType::Array => Value::Array(self.array(depth)?),
        })
    }

    fn boolean(&mut self) -> Result<bool, String> {
        let at = self.at;
        match self.fixed::<1>()?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("wanted a bool (0 or 1) at offset {at}, found {other}")),
        }
    }

    fn array(&mut self, depth: u32) -> Result<Array<'a>, String> {
        let at = self.at;
        if depth >= MAX_ARRAY_DEPTH {
            return Err(format!("wanted arrays at most {MAX_ARRAY_DEPTH} deep, found a deeper one at offset {at}"));
        }
        let element = self.value_type()?;
        let count = self.u64()?;
        let room = self.remaining() as u64 / element.min_bytes();
        if count > room {
            return Err(format!(
                "wanted an array that ends in the file, found {count} elements of {element} at offset {at} where at most \
                 {room} fit"
            ));
        }
        let start = self.at;
        if element.is_fixed() {
            // Cannot overflow: `count` elements fit in the file.
            self.take(count * element.min_bytes())?;
            if element == ValueType::Bool
                && let Some(bad) = self.bytes[start..self.at].iter().position(|&byte| byte > 1)
            {
                return Err(format!("wanted bools (0 or 1), found {} in element {bad}", self.bytes[start + bad]));
            }
        } else {
            for index in 0..count {
                self.value(element, depth + 1).map_err(|reason| format!("element {index}: {reason}"))?;
            }
        }
        // Cannot truncate: `count` elements fit in memory.
        Ok(Array::new(element, count as usize, &self.bytes[start..self.at]))
    }
}
