//! Word lists that are borrowed from a stream or owned.

use std::fmt;

/// A list of 32-bit words: borrowed little-endian bytes, or owned.
#[derive(Clone)]
pub struct Words<'a>(Repr<'a>);

#[derive(Clone)]
enum Repr<'a> {
    /// Length is a multiple of 4.
    Borrowed(&'a [u8]),
    Owned(Vec<u32>),
}

impl<'a> Words<'a> {
    /// Little-endian words in `bytes`; `None` when the length is not a multiple of 4.
    pub fn from_le_bytes(bytes: &'a [u8]) -> Option<Self> {
        bytes.len().is_multiple_of(4).then_some(Self(Repr::Borrowed(bytes)))
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        match &self.0 {
            Repr::Borrowed(bytes) => bytes.len() / 4,
            Repr::Owned(words) => words.len(),
        }
    }

    /// Whether there is no word.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Word `index`.
    pub fn get(&self, index: usize) -> Option<u32> {
        match &self.0 {
            Repr::Borrowed(bytes) => crate::format::bytes::u32_at(bytes, index.checked_mul(4)?),
            Repr::Owned(words) => words.get(index).copied(),
        }
    }

    /// The words in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }

    /// The first `N` words, if there are as many.
    pub fn first<const N: usize>(&self) -> Option<[u32; N]> {
        let mut out = [0; N];
        for (i, word) in out.iter_mut().enumerate() {
            *word = self.get(i)?;
        }
        Some(out)
    }

    /// The words from index `count` on; none when there are fewer.
    pub fn skip(self, count: usize) -> Self {
        match self.0 {
            Repr::Borrowed(bytes) => Self(Repr::Borrowed(bytes.get(count.saturating_mul(4)..).unwrap_or_default())),
            Repr::Owned(words) => Self(Repr::Owned(words.get(count..).unwrap_or_default().to_vec())),
        }
    }

    /// The words for changing; copies borrowed ones.
    pub fn to_mut(&mut self) -> &mut Vec<u32> {
        if let Repr::Borrowed(_) = self.0 {
            self.0 = Repr::Owned(self.iter().collect());
        }
        match &mut self.0 {
            Repr::Owned(words) => words,
            Repr::Borrowed(_) => unreachable!("replaced above"),
        }
    }

    /// A copy that borrows nothing.
    pub fn into_owned(self) -> Words<'static> {
        match self.0 {
            Repr::Borrowed(_) => Words(Repr::Owned(self.iter().collect())),
            Repr::Owned(words) => Words(Repr::Owned(words)),
        }
    }

    /// Appends the words as little-endian bytes.
    pub(crate) fn write_to(&self, out: &mut Vec<u8>) {
        match &self.0 {
            Repr::Borrowed(bytes) => out.extend_from_slice(bytes),
            Repr::Owned(words) => out.extend(words.iter().flat_map(|w| w.to_le_bytes())),
        }
    }
}

impl From<Vec<u32>> for Words<'static> {
    fn from(words: Vec<u32>) -> Self {
        Self(Repr::Owned(words))
    }
}

impl<const N: usize> From<[u32; N]> for Words<'static> {
    fn from(words: [u32; N]) -> Self {
        Self(Repr::Owned(words.to_vec()))
    }
}

impl PartialEq for Words<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Words<'_> {}

impl fmt::Debug for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|w| format!("{w:#010x}"))).finish()
    }
}
