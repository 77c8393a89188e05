//! The KV cache of a layer, as the kernel's transfers show it.

use crate::context_rules::ROWS_PER_BLOCK;
use crate::instruction_elf::InstructionElf;
use crate::packing::POSITIONS_MAX;
use thiserror::Error;

/// Argument of the layer kernel that is the KV cache.
pub const KV_ARGUMENT: u32 = 4;
/// Regions of a cache: keys and values of each half of the heads.
pub const REGIONS: usize = 4;

/// A kernel whose KV cache is not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KvError {
    /// Another number of rows is written.
    #[error("the layer kernel writes {found} rows of the KV cache that move with the context; wanted {REGIONS}")]
    Regions {
        /// Rows found.
        found: usize,
    },
    /// Rows of different sizes.
    #[error(
        "KV region at {at_bytes:#x}: a row of {len_bytes} bytes moves by {step_bytes} bytes a position; wanted the same"
    )]
    Step {
        /// Start of the region.
        at_bytes: u32,
        /// Bytes of the transfer.
        len_bytes: u32,
        /// Bytes between positions.
        step_bytes: u32,
    },
    /// Reads that do not start at the regions, or not in blocks.
    #[error(
        "the layer kernel reads {len_bytes} bytes at {at_bytes:#x} of the KV cache; wanted {wanted_bytes} at the start of each region"
    )]
    Read {
        /// Start of the transfer.
        at_bytes: u32,
        /// Bytes of the transfer.
        len_bytes: u32,
        /// Bytes wanted.
        wanted_bytes: u64,
    },
    /// Regions without room for a block.
    #[error(
        "the regions of the KV cache are {region_bytes} bytes apart; a block of {ROWS_PER_BLOCK} rows has {block_bytes}"
    )]
    TooClose {
        /// Distance.
        region_bytes: u32,
        /// Bytes of a block.
        block_bytes: u64,
    },
}

/// What a row of a region holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvPart {
    /// Keys, after the rotation.
    Keys,
    /// Values.
    Values,
}

/// Regions of the KV cache, and how many positions they hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGeometry {
    starts: [u32; REGIONS],
    row_bytes: u32,
    region_bytes: u32,
}

impl KvGeometry {
    /// Geometry from the instruction ELF files for contexts of 1 and 2.
    ///
    /// # Errors
    /// [`KvError`].
    pub fn of(one: &InstructionElf, two: &InstructionElf) -> Result<Self, KvError> {
        let mut writes = Vec::new();
        let mut reads = Vec::new();
        for ((first, symbol), (second, _)) in one.patches().zip(two.patches()) {
            if symbol.argument != KV_ARGUMENT {
                continue;
            }
            let (at, len_bytes) = (first.addend, symbol.entry.size);
            match second.addend.wrapping_sub(at) {
                0 => reads.push((at, len_bytes)),
                step_bytes if step_bytes == len_bytes => writes.push((at, len_bytes)),
                step_bytes => return Err(KvError::Step { at_bytes: at, len_bytes, step_bytes }),
            }
        }
        writes.sort_unstable();
        let starts = <[(u32, u32); REGIONS]>::try_from(writes.as_slice())
            .map_err(|_| KvError::Regions { found: writes.len() })?;
        let row_bytes = starts[0].1;
        if let Some((at_bytes, len_bytes)) = starts.into_iter().find(|(_, len_bytes)| *len_bytes != row_bytes) {
            return Err(KvError::Step { at_bytes, len_bytes, step_bytes: row_bytes });
        }
        let starts = starts.map(|(at, _)| at);
        let block_bytes = u64::from(row_bytes) * u64::from(ROWS_PER_BLOCK);
        for (at_bytes, len_bytes) in reads {
            if u64::from(len_bytes) != block_bytes || !starts.contains(&at_bytes) {
                return Err(KvError::Read { at_bytes, len_bytes, wanted_bytes: block_bytes });
            }
        }
        let region_bytes = starts.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or_default();
        match u64::from(region_bytes) < block_bytes {
            true => Err(KvError::TooClose { region_bytes, block_bytes }),
            false => Ok(Self { starts, row_bytes, region_bytes }),
        }
    }

    /// Bytes of a row: half of the heads at one position, bf16.
    #[must_use]
    pub fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// Positions of a sequence. Reads are whole blocks of 16 rows and stay inside their region.
    #[must_use]
    pub fn positions(&self) -> u32 {
        let blocks = self.region_bytes / self.row_bytes.max(1) / ROWS_PER_BLOCK;
        POSITIONS_MAX.min(blocks * ROWS_PER_BLOCK)
    }

    /// Bytes that the cache takes: the last region is as large as the smallest of the others.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        u64::from(self.starts[REGIONS - 1]) + u64::from(self.region_bytes)
    }

    /// Byte offsets of the two halves of the heads at `position`.
    #[must_use]
    pub fn rows(&self, part: KvPart, position: u32) -> [u64; 2] {
        regions_of(part).map(|region| u64::from(self.starts[region]) + u64::from(position) * u64::from(self.row_bytes))
    }
}

/// Regions of the first and second half of the heads. Inferred from the order of the published kernel's transfers: regions 0
/// and 2 are read on one column and written first, 1 and 3 on its neighbour and written later.
fn regions_of(part: KvPart) -> [usize; 2] {
    match part {
        KvPart::Keys => [0, 2],
        KvPart::Values => [1, 3],
    }
}
