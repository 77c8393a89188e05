//! The KV cache: f16, in pages of 256 positions.
//!
//! A page holds one layer's keys and values of one sequence. For each KV head: keys as `[8 blocks][head dim][32 positions]`,
//! so that scores need no horizontal sums; then values as `[planes of 32 elements][256 positions][32]`, so that each plane
//! is one sequential stream. Pages are allocated when the first position in them is written.
//!
//! A layer with a window forgets: pages that lie before its window and before [`rollback`] positions more take up later
//! positions. A sequence can be cut back that far; cut back further it keeps nothing, for what the window would show is gone.

use crate::memory::{Scratch, Shared};
use half::slice::HalfFloatSliceExt;
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::stage::{Row, SequenceId};
use npuhal_models::ModelConfig;
use std::ops::Range;

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
    /// Whether it holds no memory: its positions are not yet reached, or forgotten.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// All elements; see [`KvShape`].
    ///
    /// # Panics
    /// When it is empty.
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
    /// By layer: positions that a query sees, its own included; `None` is all before it.
    windows: Vec<Option<usize>>,
    sequences: Vec<Sequence>,
}

#[derive(Debug, Default)]
struct Sequence {
    len: usize,
    /// Pages of layer `l`: `pages[l]`.
    pages: Vec<Vec<Page>>,
}

impl KvCache {
    /// An empty cache for `sequences` sequences of up to `positions` positions, all of which every layer keeps.
    #[must_use]
    pub fn new(shape: KvShape, layers: usize, positions: usize, sequences: usize) -> Self {
        Self::windowed(shape, vec![None; layers], positions, sequences)
    }

    /// The same with a window for each layer: the positions that a query of the layer sees, its own included, at least 1; `None`
    /// is all before it. Layers with a window forget.
    #[must_use]
    pub fn windowed(shape: KvShape, windows: Vec<Option<usize>>, positions: usize, sequences: usize) -> Self {
        let sequence = || Sequence { len: 0, pages: windows.iter().map(|_| Vec::new()).collect() };
        let sequences = (0..sequences).map(|_| sequence()).collect();
        Self { shape, positions, windows, sequences }
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
        let pages = self.sequences.iter().flat_map(|sequence| &sequence.pages).flatten();
        pages.filter(|page| !page.is_empty()).count() * self.shape.page_len() * 2
    }

    /// Forgets positions from `len` on; returns how many remain: none where a layer has forgotten something that its window
    /// would show. Pages are kept for the next tokens.
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        let Some(sequence) = self.sequences.get_mut(sequence.0 as usize) else { return 0 };
        let len = sequence.len.min(len);
        let mut layers = self.windows.iter().zip(&sequence.pages);
        let is_whole = layers.all(|(window, pages)| holds_window(*window, pages, len));
        sequence.len = if is_whole { len } else { 0 };
        sequence.len
    }

    /// Checks that `rows` continue their sequences, and makes room for them.
    ///
    /// # Errors
    /// [`RunError::Capacity`], [`RunError::BadRows`]; [`RunError::Device`] when memory is used up. The cache then holds what
    /// it held before.
    pub fn admit(&mut self, rows: &[Row]) -> Result<(), RunError> {
        self.check(rows)?;
        let page_len = self.shape.page_len();
        for row in rows {
            let sequence = &mut self.sequences[row.sequence.0 as usize];
            for (window, pages) in self.windows.iter().zip(&mut sequence.pages) {
                let kept_from = window.map_or(0, |window| first_kept(window, sequence.len));
                make_room(pages, row.position as usize / PAGE_POSITIONS, kept_from, page_len)?;
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
            if !self.windows.is_empty() && row.position as usize != wanted {
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

    /// Pages of a layer (counted from the segment's first) and sequence, by position; forgotten ones are empty.
    ///
    /// # Panics
    /// When there is no such layer or sequence.
    #[must_use]
    pub fn pages(&self, layer: usize, sequence: SequenceId) -> &[Page] {
        &self.sequences[sequence.0 as usize].pages[layer]
    }

    /// The page that holds `row` in `layer`, for [`write`]. Pages taken before stay valid, also the same one.
    pub(crate) fn page_mut(&mut self, layer: usize, row: Row) -> Shared<u16> {
        let page = row.position as usize / PAGE_POSITIONS;
        let len = self.shape.page_len();
        self.sequences[row.sequence.0 as usize].pages[layer][page].data.shared(len)
    }
}

/// Positions before those of its window that a layer keeps, so that a sequence can be cut back.
#[must_use]
pub const fn rollback(window: usize) -> usize {
    if window > PAGE_POSITIONS { window } else { PAGE_POSITIONS }
}

/// Bytes that `positions` positions of one sequence take at most in the cache of `layers` of a model. Saturates.
#[must_use]
pub fn cache_bytes(config: &ModelConfig, layers: Range<usize>, positions: usize) -> u64 {
    let shape = KvShape { kv_heads: config.kv_heads, head_dim: config.head_dim };
    let all = positions.div_ceil(PAGE_POSITIONS);
    let pages = |layer: usize| {
        let window = config.features.layer(layer).window.map(|window| window as usize);
        // One page more that is left at its start, and one that is begun by the rows of a call.
        window.map_or(all, |window| all.min(window.saturating_add(rollback(window)).div_ceil(PAGE_POSITIONS) + 2))
    };
    let pages = layers.map(|layer| pages(layer) as u64).fold(0, u64::saturating_add);
    pages.saturating_mul(2 * shape.page_len() as u64)
}

/// The first page that a layer with `window` keeps of a sequence of `len` positions.
fn first_kept(window: usize, len: usize) -> usize {
    (len + 1).saturating_sub(window.saturating_add(rollback(window))) / PAGE_POSITIONS
}

/// Whether a layer's `pages` hold all that a query at position `len` sees before it.
fn holds_window(window: Option<usize>, pages: &[Page], len: usize) -> bool {
    let first = window.map_or(0, |window| (len + 1).saturating_sub(window));
    first >= len || pages[first / PAGE_POSITIONS..=(len - 1) / PAGE_POSITIONS].iter().all(|page| !page.is_empty())
}

/// Gives page `number` memory: that of a page before `kept_from` or behind it, if there is one, or new memory.
fn make_room(pages: &mut Vec<Page>, number: usize, kept_from: usize, page_len: usize) -> Result<(), RunError> {
    if pages.get(number).is_some_and(|page| !page.is_empty()) {
        return Ok(());
    }
    if pages.len() <= number {
        pages.resize_with(number + 1, Page::default);
    }
    let is_spare = |(at, page): (usize, &Page)| !page.is_empty() && (at < kept_from || at > number);
    if let Some(spare) = pages.iter().enumerate().position(is_spare) {
        pages.swap(spare, number);
        return Ok(());
    }
    pages[number].data.try_reserve::<u16>(page_len).map_err(|_| {
        RunError::Device(DeviceError::OutOfMemory {
            device: "cpu".to_owned(),
            memory: "KV cache memory",
            wanted_bytes: (page_len * 2) as u64,
            available_bytes: None,
            remedy: "shorten the conversation or close other programs".to_owned(),
        })
    })
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
