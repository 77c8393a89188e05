//! Weight matrices, repacked for the kernels.
//!
//! Rows come in groups of eight; the last group is padded with rows of zero scale. Groups follow each other; inside a group
//! the blocks lie in ascending order of the input features. A *step vector* is 32 bytes whose byte `4r + i` belongs to row
//! `r` of the group and input feature `k0 + 4j + i` (step `j`); all code planes are made of step vectors. For one block and
//! group:
//!
//! | type | bytes | contents |
//! |---|---|---|
//! | Q4_0 | 144 for 32 | d f16 × 8; 4 nibble planes (low: steps 0–3, high: steps 4–7) |
//! | Q4_1 | 160 for 32 | d, m f16 × 8; 4 nibble planes |
//! | Q5_0 | 176 for 32 | d f16 × 8; 5 planes: steps 0–4 in the low bits, steps 5–7 split over the high bits |
//! | Q5_1 | 192 for 32 | d, m f16 × 8; 5 planes |
//! | Q8_0 | 272 for 32 | d f16 × 8; 8 steps of i8 |
//! | Q4_K | 1184 for 256 | d, dmin f16 × 8; scales, minima u8 \[8 sub-blocks\]\[8 rows\]; 4 × 8 nibble planes |
//! | Q5_K | 1440 for 256 | as Q4_K; then 4 × 2 planes of fifth bits (bit `j`: step `j`; low, high sub-block) |
//! | Q6_K | 1680 for 256 | d f16 × 8; scales i8 \[16 sub-blocks\]\[8 rows\]; 16 × 3 planes |
//! | F32, F16, BF16 | 32, 16, 16 for 1 | the element of each of the 8 rows |
//!
//! Every type is stored exactly: codes and scales are those of the file. Rare types are stored as one of these ([`stored_as`]).

pub mod decode;
mod rare;
mod repack;

pub use rare::stored_as;

use crate::error::CpuError;
use crate::memory::{Arena, ArenaWriter};
use crate::pool::Pool;
use npuhal_models::{Tensor, WeightType};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a group.
pub const GROUP_ROWS: usize = 8;
/// Bytes of packed weights that one thread packs before it takes the next part.
const PART_BYTES: usize = 256 << 10;

/// Packed bytes of a group of `weight_type` with `cols` input features.
#[must_use]
pub const fn group_bytes(weight_type: WeightType, cols: usize) -> usize {
    let (len, bytes) = match weight_type {
        WeightType::F32 => (1, 32),
        WeightType::F16 | WeightType::Bf16 => (1, 16),
        WeightType::Q4_0 => (32, 144),
        WeightType::Q4_1 => (32, 160),
        WeightType::Q5_0 => (32, 176),
        WeightType::Q5_1 => (32, 192),
        WeightType::Q8_0 => (32, 272),
        WeightType::Q4K => (256, 1184),
        WeightType::Q5K => (256, 1440),
        WeightType::Q6K => (256, 1680),
        _ => (1, 0),
    };
    cols / len * bytes
}

/// A weight matrix in the kernels' layout. Cheap to clone; keeps its memory alive.
#[derive(Debug, Clone)]
pub struct PackedMatrix {
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    group_bytes: usize,
    arena: Arc<Arena>,
    offset: usize,
}

impl PackedMatrix {
    /// Packs one tensor on its own.
    ///
    /// # Errors
    /// As [`Packer::pack`].
    pub fn from_tensor(tensor: &Tensor, pool: &Pool) -> Result<Self, CpuError> {
        let mut packer = Packer::new();
        packer.add(tensor)?;
        Ok(packer.pack(pool)?.swap_remove(0))
    }

    /// Storage type in memory; see [`stored_as`].
    #[must_use]
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of eight rows, the padded last one included.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// Bytes of one group.
    #[must_use]
    pub fn group_bytes(&self) -> usize {
        self.group_bytes
    }

    /// All groups.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.arena.bytes()[self.offset..self.offset + self.groups() * self.group_bytes]
    }

    /// Group `index`.
    ///
    /// # Panics
    /// When there is no such group.
    #[must_use]
    pub fn group(&self, index: usize) -> &[u8] {
        &self.bytes()[index * self.group_bytes..(index + 1) * self.group_bytes]
    }

    /// Row `row` as f32, written to `out`.
    ///
    /// # Panics
    /// When there is no such row or `out` is not [`PackedMatrix::cols`] long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row} of {}, {} elements", self.rows, out.len());
        decode::row(self.weight_type, self.group(row / GROUP_ROWS), row % GROUP_ROWS, out);
    }
}

/// Packs many tensors into one piece of memory, in the order in which they were added.
#[derive(Debug, Default)]
pub struct Packer {
    entries: Vec<Entry>,
    len: usize,
}

#[derive(Debug)]
struct Entry {
    tensor: Tensor,
    group_bytes: usize,
    offset: usize,
    first_part: usize,
    part_groups: usize,
}

impl Packer {
    /// Nothing to pack yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor; returns its index in the result of [`Packer::pack`].
    ///
    /// # Errors
    /// [`CpuError::Shape`] for a tensor without elements.
    pub fn add(&mut self, tensor: &Tensor) -> Result<usize, CpuError> {
        let group_bytes = group_bytes(stored_as(tensor.weight_type()), tensor.cols());
        if group_bytes == 0 || tensor.rows() == 0 {
            return Err(CpuError::Shape {
                tensor: tensor.name().to_owned(),
                wanted: "a matrix with elements of a type the CPU backend has kernels for".to_owned(),
                found: format!("{} × {} of {}", tensor.rows(), tensor.cols(), tensor.weight_type()),
            });
        }
        let part_groups = (PART_BYTES / group_bytes).max(1);
        let groups = tensor.rows().div_ceil(GROUP_ROWS);
        let first_part = self.entries.last().map_or(0, Entry::end_part);
        let offset = self.len;
        // One group's size is a multiple of 16; matrices start at cache lines.
        let end = groups.checked_mul(group_bytes).and_then(|len| len.checked_add(offset)?.checked_next_multiple_of(64));
        self.len = end.ok_or_else(|| CpuError::Memory {
            what: "packed weights",
            wanted_bytes: u64::MAX,
            source: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        })?;
        self.entries.push(Entry { tensor: tensor.clone(), group_bytes, offset, first_part, part_groups });
        Ok(self.entries.len() - 1)
    }

    /// Packed bytes of everything added so far.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// Packs on all threads of `pool`, in order; the file's pages are dropped behind.
    ///
    /// # Errors
    /// [`CpuError::Memory`], [`CpuError::Panicked`].
    pub fn pack(self, pool: &Pool) -> Result<Vec<PackedMatrix>, CpuError> {
        let mut arena = Arena::new(self.len, "packed weights")?;
        for entry in &self.entries {
            entry.tensor.file().will_need(entry.tensor.range());
        }
        let writer = arena.writer();
        let parts = self.entries.last().map_or(0, Entry::end_part);
        let next = AtomicUsize::new(0);
        pool.run(&|_| {
            let mut entry = 0;
            loop {
                let part = next.fetch_add(1, Ordering::Relaxed);
                if part >= parts {
                    return;
                }
                while self.entries[entry].end_part() <= part {
                    entry += 1;
                }
                self.entries[entry].pack_part(part, &writer);
            }
        })
        .map_err(|_| CpuError::Panicked { during: "weights were packed" })?;
        let arena = Arc::new(arena);
        let matrix = |entry: &Entry| PackedMatrix {
            weight_type: stored_as(entry.tensor.weight_type()),
            rows: entry.tensor.rows(),
            cols: entry.tensor.cols(),
            group_bytes: entry.group_bytes,
            arena: Arc::clone(&arena),
            offset: entry.offset,
        };
        Ok(self.entries.iter().map(matrix).collect())
    }
}

impl Entry {
    fn groups(&self) -> usize {
        self.tensor.rows().div_ceil(GROUP_ROWS)
    }

    fn end_part(&self) -> usize {
        self.first_part + self.groups().div_ceil(self.part_groups)
    }

    fn pack_part(&self, part: usize, writer: &ArenaWriter<'_>) {
        let start = (part - self.first_part) * self.part_groups;
        let groups: Range<usize> = start..(start + self.part_groups).min(self.groups());
        let bytes = self.offset + groups.start * self.group_bytes..self.offset + groups.end * self.group_bytes;
        // SAFETY: parts are disjoint, and each part is taken by one thread once.
        #[allow(unsafe_code, reason = "disjoint parts of one mapping")]
        let out = unsafe { writer.part(bytes) };
        for (group, out) in groups.clone().zip(out.chunks_exact_mut(self.group_bytes)) {
            repack::group(&self.tensor, group, out);
        }
        let row_bytes = self.tensor.row_bytes();
        let from = self.tensor.range().start;
        let rows = groups.start * GROUP_ROWS..(groups.end * GROUP_ROWS).min(self.tensor.rows());
        self.tensor.file().release(from + rows.start * row_bytes..from + rows.end * row_bytes);
    }
}
