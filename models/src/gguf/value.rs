//! Metadata values as views into the mapped file.

use super::cursor::Cursor;
use std::fmt;

/// Type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// Unsigned 16 bits.
    U16,
    /// Signed 16 bits.
    I16,
    /// Unsigned 32 bits.
    U32,
    /// Signed 32 bits.
    I32,
    /// IEEE binary32.
    F32,
    /// A byte, 0 or 1.
    Bool,
    /// Length-prefixed UTF-8.
    String,
    /// Values of one type.
    Array,
    /// Unsigned 64 bits.
    U64,
    /// Signed 64 bits.
    I64,
    /// IEEE binary64.
    F64,
}

impl ValueType {
    /// By the order of their numbers in the file.
    const BY_ID: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(super) fn from_id(id: u32) -> Option<Self> {
        Self::BY_ID.get(id as usize).copied()
    }

    /// Bytes of a value; of strings and arrays the least they can take.
    pub(super) const fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }

    pub(super) const fn is_fixed(self) -> bool {
        !matches!(self, Self::String | Self::Array)
    }

    /// Name as GGUF tools print it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A metadata value. Strings and arrays are views into the file. `Display` is short: long strings are clipped, arrays show
/// their first elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Unsigned byte.
    U8(u8),
    /// Signed byte.
    I8(i8),
    /// Unsigned 16 bits.
    U16(u16),
    /// Signed 16 bits.
    I16(i16),
    /// Unsigned 32 bits.
    U32(u32),
    /// Signed 32 bits.
    I32(i32),
    /// IEEE binary32.
    F32(f32),
    /// Bool.
    Bool(bool),
    /// Text.
    String(&'a str),
    /// Values of one type.
    Array(Array<'a>),
    /// Unsigned 64 bits.
    U64(u64),
    /// Signed 64 bits.
    I64(i64),
    /// IEEE binary64.
    F64(f64),
}

impl<'a> Value<'a> {
    /// Its type.
    #[must_use]
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// An integer of any width that is not negative.
    #[must_use]
    pub fn as_unsigned(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// A finite floating-point number; binary64 is rounded to binary32.
    #[must_use]
    pub fn as_float(&self) -> Option<f32> {
        let value = match *self {
            Self::F32(value) => value,
            Self::F64(value) => value as f32,
            _ => return None,
        };
        value.is_finite().then_some(value)
    }

    /// A bool.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = *self { Some(value) } else { None }
    }

    /// A text.
    #[must_use]
    pub fn as_str(&self) -> Option<&'a str> {
        if let Self::String(value) = *self { Some(value) } else { None }
    }

    /// An array.
    #[must_use]
    pub fn as_array(&self) -> Option<Array<'a>> {
        if let Self::Array(value) = *self { Some(value) } else { None }
    }

    /// Type and value for messages: `u32 7`, `array of 3 f32 [1, 2, 3]`.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Array(array) => format!("array of {} {} {self}", array.len(), array.element_type()),
            _ => format!("{} {self}", self.value_type()),
        }
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const CLIP: usize = 60;
        match self {
            Self::U8(value) => value.fmt(f),
            Self::I8(value) => value.fmt(f),
            Self::U16(value) => value.fmt(f),
            Self::I16(value) => value.fmt(f),
            Self::U32(value) => value.fmt(f),
            Self::I32(value) => value.fmt(f),
            Self::F32(value) => value.fmt(f),
            Self::U64(value) => value.fmt(f),
            Self::I64(value) => value.fmt(f),
            Self::F64(value) => value.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::String(text) => match text.char_indices().nth(CLIP) {
                Some((at, _)) => write!(f, "{:?}…", &text[..at]),
                None => write!(f, "{text:?}"),
            },
            Self::Array(array) => array.fmt(f),
        }
    }
}

/// An array of values of one type, as a view into the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    pub(super) fn new(element: ValueType, len: usize, bytes: &'a [u8]) -> Self {
        Self { element, len, bytes }
    }

    /// Type of the elements.
    #[must_use]
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order. They were checked when the file was opened, so there are [`Array::len`] of them unless the file
    /// was changed under its mapping, where the iteration ends early.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let element = self.element;
        let mut cursor = Cursor::new(self.bytes, 0);
        (0..self.len).map_while(move |_| cursor.value(element, 0).ok())
    }
}

impl fmt::Display for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        f.write_str("[")?;
        for (index, value) in self.iter().take(SHOWN).enumerate() {
            write!(f, "{}{value}", if index == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.len > SHOWN { ", …]" } else { "]" })
    }
}
