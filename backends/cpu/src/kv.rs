//! The KV cache: f16, in pages of 256 positions.
//!
//! A page holds one layer's keys and values of one sequence. For each KV head: keys as `[8 blocks][head dim][32 positions]`,
//! so that scores need no horizontal sums; then values as `[planes of 32 elements][256 positions][32]`, so that each plane
//! is one sequential stream. Pages are allocated when the first position in them is written.

use crate::memory::{Scratch, Shared};
use half::slice::HalfFloatSliceExt;
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::stage::{Row, SequenceId};

/// Positions of a page.
pub const PAGE_POSITIONS: usize = 256;
/// Positions of a key block.
pub const KEY_BLOCK: usize = 32;
/// Elements of a value plane.
pub const PLANE: usize = 32;

/// Where things lie in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Key (and value) heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Value planes of a head.
    #[must_use]
    pub const fn planes(self) -> usize {
        self.head_dim.div_ceil(PLANE)
    }

    /// Elements of a head's values, padded to whole planes.
    #[must_use]
    pub const fn padded_dim(self) -> usize {
        self.planes() * PLANE
    }

    /// Elements of a page.
    #[must_use]
    pub const fn page_len(self) -> usize {
        self.kv_heads * self.head_len()
    }

    /// Where the keys of KV head `head` start in a page.
    #[must_use]
    pub const fn keys_at(self, head: usize) -> usize {
        head * self.head_len()
    }

    /// Where the values of KV head `head` start in a page.
    #[must_use]
    pub const fn values_at(self, head: usize) -> usize {
        head * self.head_len() + PAGE_POSITIONS * self.head_dim
    }

    const fn head_len(self) -> usize {
        PAGE_POSITIONS * (self.head_dim + self.padded_dim())
    }
}

/// Keys and values of 256 positions of one layer and sequence, as f16 bits.
#[derive(Debug, Default)]
pub struct Page {
    data: Scratch,
}

impl Page {
    /// All elements; see [`KvShape`].
    #[must_use]
    pub fn elements(&self, shape: KvShape) -> &[u16] {
        self.data.get(shape.page_len())
    }
}

/// The cache of a segment's layers.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    positions: usize,
    layers: usize,
    sequences: Vec<Sequence>,
}

#[derive(Debug, Default)]
struct Sequence {
    len: usize,
    /// Pages of layer `l`: `pages[l]`.
    pages: Vec<Vec<Page>>,
}

impl KvCache {
    /// An empty cache for `sequences` sequences of up to `positions` positions.
    #[must_use]
    pub fn new(shape: KvShape, layers: usize, positions: usize, sequences: usize) -> Self {
        let sequence = || Sequence { len: 0, pages: (0..layers).map(|_| Vec::new()).collect() };
        Self { shape, positions, layers, sequences: (0..sequences).map(|_| sequence()).collect() }
    }

    /// Where things lie in a page.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Positions that `sequence` holds; 0 for an unknown one.
    #[must_use]
    pub fn len(&self, sequence: SequenceId) -> usize {
        self.sequences.get(sequence.0 as usize).map_or(0, |sequence| sequence.len)
    }

    /// Whether no sequence holds a position.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.len == 0)
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        let pages: usize = self.sequences.iter().flat_map(|sequence| &sequence.pages).map(Vec::len).sum();
        pages * self.shape.page_len() * 2
    }

    /// Forgets positions from `len` on; returns how many remain. Pages are kept for the next tokens.
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        let Some(sequence) = self.sequences.get_mut(sequence.0 as usize) else { return 0 };
        sequence.len = sequence.len.min(len);
        sequence.len
    }

    /// Checks that `rows` continue their sequences, and makes room for them.
    ///
    /// # Errors
    /// [`RunError::Capacity`], [`RunError::BadRows`]; [`RunError::Device`] when memory is used up. The cache then holds what
    /// it held before.
    pub fn admit(&mut self, rows: &[Row]) -> Result<(), RunError> {
        self.check(rows)?;
        for row in rows {
            let pages = row.position as usize / PAGE_POSITIONS + 1;
            for layer in &mut self.sequences[row.sequence.0 as usize].pages {
                while layer.len() < pages {
                    let mut page = Page::default();
                    page.data.try_reserve::<u16>(self.shape.page_len()).map_err(|_| {
                        RunError::Device(DeviceError::OutOfMemory {
                            device: "cpu".to_owned(),
                            memory: "KV cache memory",
                            wanted_bytes: (self.shape.page_len() * 2) as u64,
                            available_bytes: None,
                            remedy: "shorten the conversation or close other programs".to_owned(),
                        })
                    })?;
                    layer.push(page);
                }
            }
        }
        Ok(())
    }

    fn check(&self, rows: &[Row]) -> Result<(), RunError> {
        for (index, row) in rows.iter().enumerate() {
            let Some(sequence) = self.sequences.get(row.sequence.0 as usize) else {
                return Err(RunError::Capacity {
                    what: "sequences",
                    found: u64::from(row.sequence.0) + 1,
                    limit: self.sequences.len() as u64,
                });
            };
            if row.position as usize >= self.positions {
                return Err(RunError::Capacity {
                    what: "positions",
                    found: u64::from(row.position) + 1,
                    limit: self.positions as u64,
                });
            }
            let before = rows[..index].iter().rev().find(|earlier| earlier.sequence == row.sequence);
            let wanted = before.map_or(sequence.len, |earlier| earlier.position as usize + 1);
            // Without layers there is nothing that rows could continue.
            if self.layers > 0 && row.position as usize != wanted {
                return Err(RunError::BadRows {
                    reason: format!(
                        "sequence {} continues at position {wanted}, but row {index} is position {}",
                        row.sequence.0, row.position
                    ),
                });
            }
        }
        Ok(())
    }

    /// Makes the positions of `rows` part of their sequences, after all layers have written them.
    pub fn commit(&mut self, rows: &[Row]) {
        for row in rows {
            self.sequences[row.sequence.0 as usize].len = row.position as usize + 1;
        }
    }

    /// Pages of a layer (counted from the segment's first) and sequence.
    ///
    /// # Panics
    /// When there is no such layer or sequence.
    #[must_use]
    pub fn pages(&self, layer: usize, sequence: SequenceId) -> &[Page] {
        assert!(layer < self.layers);
        &self.sequences[sequence.0 as usize].pages[layer]
    }

    /// The page that holds `row` in `layer`, for [`write`]. Pages taken before stay valid, also the same one.
    pub(crate) fn page_mut(&mut self, layer: usize, row: Row) -> Shared<u16> {
        let page = row.position as usize / PAGE_POSITIONS;
        let len = self.shape.page_len();
        self.sequences[row.sequence.0 as usize].pages[layer][page].data.shared(len)
    }
}

/// Writes keys and values (KV heads × head dim) of one position to its page, rounded to f16.
///
/// # Safety
/// `page` is the page that holds `position`, and no other thread writes or reads this position.
#[allow(unsafe_code, reason = "several threads write different positions of one page")]
pub(crate) unsafe fn write(page: Shared<u16>, shape: KvShape, position: usize, keys: &[f32], values: &[f32]) {
    let mut rounded = [half::f16::ZERO; PLANE];
    let slot = position % PAGE_POSITIONS;
    for head in 0..shape.kv_heads {
        let range = head * shape.head_dim..(head + 1) * shape.head_dim;
        let keys_at = shape.keys_at(head) + slot / KEY_BLOCK * shape.head_dim * KEY_BLOCK + slot % KEY_BLOCK;
        for (part, keys) in keys[range.clone()].chunks(PLANE).enumerate() {
            rounded[..keys.len()].convert_from_f32_slice(keys);
            for (d, key) in rounded[..keys.len()].iter().enumerate() {
                // SAFETY: element (head, d, slot) of the page, which is this thread's own.
                unsafe { *page.ptr().add(keys_at + (part * PLANE + d) * KEY_BLOCK) = key.to_bits() };
            }
        }
        for (plane, values) in values[range].chunks(PLANE).enumerate() {
            rounded[..values.len()].convert_from_f32_slice(values);
            rounded[values.len()..].fill(half::f16::ZERO);
            let at = shape.values_at(head) + (plane * PAGE_POSITIONS + slot) * PLANE;
            // SAFETY: 32 elements of this position in a plane.
            let out = unsafe { page.slice(at, PLANE) };
            for (out, value) in out.iter_mut().zip(&rounded) {
                *out = value.to_bits();
            }
        }
    }
}
