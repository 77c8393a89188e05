//! Address patching of control code.
//!
//! A [`PatchTable`] is resolved once per section: places, schemas and the original words of the template are read and
//! checked. [`PatchTable::apply`] then inserts values into an image of that section; it depends on the template only,
//! never on what an earlier application left in the image, and reports which bytes changed.

mod assemble;
mod table;

pub use assemble::{
    ARGUMENT_MAX, AssembledCode, AssembledPatch, FOLD_FLAG, FOLD_FROM_ARGUMENT, PARTIAL_ARGUMENT_BASE, assemble,
};
pub use table::{PatchSymbol, PatchTable, Rebind};

use super::elf::ElfError;
use thiserror::Error;

/// How a value is merged into the words at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schema {
    /// 2: buffer descriptor of later parts with 57-bit addresses; no aperture is added.
    ShimDma57,
    /// 3: bits of one word.
    Scalar32,
    /// 4: address in a control packet.
    ControlPacket48,
    /// 5: shim buffer descriptor.
    ShimDma48,
    /// 8: plain 64-bit address.
    Address64,
}

/// Names of all schema numbers, also of those that no AIE2 or AIE2P device uses.
const NAMES: [&str; 12] = [
    "none",
    "uc_dma_remote_ptr_symbol",
    "shim_dma_57",
    "scalar_32bit",
    "control_packet_48",
    "shim_dma_48",
    "shim_dma_57_aie4",
    "control_packet_57",
    "address_64",
    "control_packet_57_aie4",
    "unknown",
    "pl_ddr_64",
];

impl Schema {
    /// The schema with this number.
    pub fn from_number(number: u32) -> Result<Self, RelocError> {
        let all = [Self::ShimDma57, Self::Scalar32, Self::ControlPacket48, Self::ShimDma48, Self::Address64];
        let name = NAMES.get(number as usize).copied().unwrap_or("unknown");
        all.into_iter().find(|s| u32::from(s.number()) == number).ok_or(RelocError::Schema { number, name })
    }

    /// Number in a relocation entry.
    pub fn number(self) -> u8 {
        match self {
            Self::ShimDma57 => 2,
            Self::Scalar32 => 3,
            Self::ControlPacket48 => 4,
            Self::ShimDma48 => 5,
            Self::Address64 => 8,
        }
    }

    /// Name.
    pub fn name(self) -> &'static str {
        NAMES[usize::from(self.number())]
    }

    /// Bytes from the place that must exist.
    pub fn span_bytes(self) -> usize {
        match self {
            Self::ShimDma57 => 36,
            Self::Scalar32 => 4,
            Self::ControlPacket48 => 16,
            Self::ShimDma48 => 12,
            Self::Address64 => 8,
        }
    }

    /// Words from the place that are changed, with the bits that are. A scalar's bits are its mask.
    fn written_words(self) -> &'static [(u32, u32)] {
        const ALL: u32 = u32::MAX;
        match self {
            Self::ShimDma57 => &[(1, ALL), (2, 0xFFFF), (8, 0x1FF)],
            Self::Scalar32 => &[(0, ALL)],
            Self::ControlPacket48 => &[(2, ALL), (3, 0xFFFF)],
            Self::ShimDma48 => &[(1, ALL), (2, 0xFFFF)],
            Self::Address64 => &[(0, ALL), (1, ALL)],
        }
    }

    /// Addresses must stay below this power of two; `None` without a limit.
    fn address_bits(self) -> Option<u32> {
        match self {
            Self::ShimDma57 => Some(57),
            Self::ControlPacket48 | Self::ShimDma48 => Some(48),
            Self::Scalar32 | Self::Address64 => None,
        }
    }
}

/// Patches that cannot be resolved or applied.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RelocError {
    /// A schema no AIE2 or AIE2P device uses.
    #[error("patch schema {number} ({name}) is not one that AIE2 and AIE2P use: 2, 3, 4, 5 or 8")]
    Schema {
        /// Number found.
        number: u32,
        /// Its name.
        name: &'static str,
    },
    /// A place outside the section.
    #[error("patch of {symbol:?} at byte {at_bytes} needs {span_bytes} bytes; the section has {section_bytes}")]
    OutOfSection {
        /// Symbol name.
        symbol: String,
        /// Offset of the place.
        at_bytes: u32,
        /// Bytes needed.
        span_bytes: usize,
        /// Bytes of the section.
        section_bytes: usize,
    },
    /// A place or an address that is not a multiple of 4.
    #[error("patch of {symbol:?} at byte {at_bytes}: {what} {value:#x} is not a multiple of 4")]
    Unaligned {
        /// Symbol name.
        symbol: String,
        /// Offset of the place.
        at_bytes: u32,
        /// What is not aligned.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Two places that write the same bits.
    #[error("patches of {first:?} and {second:?} both write the word at byte {at_bytes}")]
    Overlap {
        /// Symbol of the earlier entry.
        first: String,
        /// Symbol of the later entry.
        second: String,
        /// Offset of the word.
        at_bytes: u32,
    },
    /// One name with two schemas in a section.
    #[error("patches of {symbol:?} mix {first} and {second} in one section; the runtime applies only one of them")]
    MixedSchemas {
        /// Symbol name.
        symbol: String,
        /// Schema of the first patch.
        first: &'static str,
        /// The other schema.
        second: &'static str,
    },
    /// An address the descriptor cannot hold.
    #[error("patch of {symbol:?} at byte {at_bytes}: address {address:#x} does not fit {bits} bits")]
    TooLarge {
        /// Symbol name.
        symbol: String,
        /// Offset of the place.
        at_bytes: u32,
        /// Sum of value, addend, template and aperture.
        address: u128,
        /// Bits there are.
        bits: u32,
    },
    /// The wrong number of values.
    #[error("{found} values for {wanted} symbols")]
    ValueCount {
        /// Symbols of the table.
        wanted: usize,
        /// Values passed.
        found: usize,
    },
    /// An image of another size than the template.
    #[error("image of {found_bytes} bytes for a section of {wanted_bytes}")]
    ImageSize {
        /// Size of the template.
        wanted_bytes: usize,
        /// Size of the image.
        found_bytes: usize,
    },
    /// A section that is not made of whole words.
    #[error("section of {section_bytes} bytes is not made of whole words")]
    RaggedSection {
        /// Size of the section.
        section_bytes: usize,
    },
    /// Control code whose patches cannot be expressed as relocations.
    #[error("operation {op_index} patches {register}: {reason}")]
    Assemble {
        /// Index of the operation.
        op_index: usize,
        /// Register that is patched.
        register: String,
        /// What is wrong.
        reason: String,
    },
    /// The section cannot be read.
    #[error(transparent)]
    Elf(#[from] ElfError),
}

#[cfg(test)]
mod tests;
