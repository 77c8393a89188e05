//! Where everything goes in a file that is to be written.
//!
//! The table is JSON without spaces, padded with spaces to a multiple of 64 bytes; tensors start at multiples of 64 bytes of
//! the data, in the table's order, with zeros between them.

use serde_json::{Map, Value, json};

/// Alignment of the table's length and of tensors within the data.
const ALIGNMENT: u64 = 64;

/// A tensor that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTensor {
    /// Name.
    pub name: String,
    /// Element type as the table spells it: `BF16`, `I8`.
    pub dtype: &'static str,
    /// Dimensions, the slowest first.
    pub shape: Vec<u64>,
    /// Length in bytes.
    pub bytes: u64,
}

/// The table of a file, and the place of each tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    head: Vec<u8>,
    starts: Vec<u64>,
    len_bytes: u64,
}

impl Layout {
    /// Places `tensors` in their order. `source` is the name of the file they come from, `converter` that of the program.
    /// `None` where the lengths do not fit a file.
    #[must_use]
    pub fn new(tensors: &[PlannedTensor], source: &str, converter: &str) -> Option<Self> {
        let mut table = Map::new();
        let metadata = json!({ "format": "q4nx", "source": source, "converter": converter });
        table.insert("__metadata__".to_owned(), metadata);
        let mut starts = Vec::with_capacity(tensors.len());
        let mut end = 0_u64;
        for tensor in tensors {
            let start = end.checked_next_multiple_of(ALIGNMENT)?;
            end = start.checked_add(tensor.bytes)?;
            starts.push(start);
            let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end] });
            table.insert(tensor.name.clone(), entry);
        }
        let mut text = Value::Object(table).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(ALIGNMENT as usize), b' ');
        let mut head = (text.len() as u64).to_le_bytes().to_vec();
        head.extend(text);
        let base = head.len() as u64;
        starts.iter_mut().for_each(|start| *start += base);
        let len_bytes = base.checked_add(end).filter(|len| i64::try_from(*len).is_ok())?;
        Some(Self { head, starts, len_bytes })
    }

    /// The file's first bytes, up to the data.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Place of tensor `index` in the file.
    ///
    /// # Panics
    /// When there is no such tensor.
    #[must_use]
    pub fn start(&self, index: usize) -> u64 {
        self.starts[index]
    }

    /// Length of the file.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_aligned_and_in_order() {
        let tensor =
            |name: &str, bytes| PlannedTensor { name: name.to_owned(), dtype: "BF16", shape: vec![bytes / 2], bytes };
        let layout = Layout::new(&[tensor("z", 2), tensor("a", 128), tensor("m", 2)], "x.gguf", "npuhal 1").unwrap();
        let table = std::str::from_utf8(&layout.head()[8..]).unwrap();
        assert_eq!(table.len() % 64, 0);
        assert!(table.starts_with(
            r#"{"__metadata__":{"format":"q4nx","source":"x.gguf","converter":"npuhal 1"},"z":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"a":{"#
        ));
        let base = layout.head().len() as u64;
        assert_eq!([0, 1, 2].map(|index| layout.start(index) - base), [0, 64, 192]);
        assert_eq!(layout.len_bytes(), base + 194);
        assert!(Layout::new(&[tensor("a", u64::MAX), tensor("b", 1)], "", "").is_none());
    }
}
