//! Weight types and tensors as ranges of a mapped file.

use crate::map::FileMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Storage type of a weight tensor. Block types store `block_len` consecutive elements of a row in `block_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum WeightType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// Upper half of binary32.
    Bf16,
    /// 32 elements: f16 scale, 4-bit codes centred at 8.
    Q4_0,
    /// 32 elements: f16 scale and minimum, 4-bit codes.
    Q4_1,
    /// 32 elements: f16 scale, 5-bit codes centred at 16.
    Q5_0,
    /// 32 elements: f16 scale and minimum, 5-bit codes.
    Q5_1,
    /// 32 elements: f16 scale, signed bytes.
    Q8_0,
    /// 256 elements: 16 sub-blocks with 4-bit scales and minima, 2-bit codes.
    Q2K,
    /// 256 elements: 16 sub-blocks with 6-bit scales, 3-bit codes centred at 4.
    Q3K,
    /// 256 elements: 8 sub-blocks with 6-bit scales and minima, 4-bit codes.
    Q4K,
    /// 256 elements: 8 sub-blocks with 6-bit scales and minima, 5-bit codes.
    Q5K,
    /// 256 elements: 16 sub-blocks with 8-bit scales, 6-bit codes centred at 32.
    Q6K,
    /// 32 elements: f16 scale, 4-bit codes into a table of signed bytes.
    Iq4Nl,
    /// 256 elements: 8 sub-blocks with 6-bit scales, 4-bit codes into the same table.
    Iq4Xs,
    /// 32 elements: a power of two, 4-bit floating-point codes (OCP microscaling format).
    Mxfp4,
}

impl WeightType {
    /// All types, for tests and messages.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
    ];

    /// Name as GGUF tools print it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Elements of a block; 1 for plain types.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Nl => 18,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A weight matrix or vector inside a mapped file: `rows` output features of `cols` input features, row-major. A vector has
/// one row. Cheap to clone; keeps the mapping alive.
#[derive(Debug, Clone)]
pub struct Tensor {
    name: Arc<str>,
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    file: Arc<FileMap>,
    range: Range<usize>,
}

impl Tensor {
    /// A tensor at `range` of `file`. `None` where the range does not lie in the file, `cols` is no whole number of blocks,
    /// or the range is not exactly `rows × cols` elements long.
    #[must_use]
    pub fn new(
        name: impl Into<Arc<str>>,
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        file: Arc<FileMap>,
        range: Range<usize>,
    ) -> Option<Self> {
        let row_bytes = (cols / weight_type.block_len()).checked_mul(weight_type.block_bytes())?;
        let len = row_bytes.checked_mul(rows)?;
        let fits = cols.is_multiple_of(weight_type.block_len())
            && range.end <= file.len()
            && range.end.checked_sub(range.start) == Some(len);
        fits.then(|| Self { name: name.into(), weight_type, rows, cols, file, range })
    }

    /// Name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Storage type.
    #[must_use]
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Output features; 1 for a vector.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features: elements of a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.cols / self.weight_type.block_len() * self.weight_type.block_bytes()
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.file[self.range.clone()]
    }

    /// Bytes of row `row`.
    ///
    /// # Panics
    /// When `row` is not below [`Tensor::rows`].
    #[must_use]
    pub fn row(&self, row: usize) -> &[u8] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let len = self.row_bytes();
        &self.bytes()[row * len..(row + 1) * len]
    }

    /// The mapping behind it.
    #[must_use]
    pub fn file(&self) -> &Arc<FileMap> {
        &self.file
    }

    /// Its place in the mapping, in bytes.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The file's path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}
