//! DMA buffer descriptors of the three tile kinds.
//!
//! All lengths, steps and core or memory-tile addresses count 32-bit words. A transfer visits the innermost dimension
//! first (`wrap` words, `step` apart), then the next ones, and stops after `length_words`.

use super::bd_fields::{core_tile, mem, shim};
use super::bits::refuse_reserved;
use super::{ADDRESS_LIMIT, RegisterError};

/// One dimension of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dimension {
    /// Elements before the next dimension advances; 0 is unbounded.
    pub wrap: u32,
    /// Distance between elements in words, at least 1.
    pub step: u32,
}

impl Default for Dimension {
    fn default() -> Self {
        Self { wrap: 0, step: 1 }
    }
}

/// One dimension of a memory tile's transfer, with zero padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PaddedDimension {
    /// Elements before the next dimension advances; 0 is unbounded.
    pub wrap: u32,
    /// Distance between elements in words, at least 1.
    pub step: u32,
    /// Zeros inserted before the dimension.
    pub zeros_before: u32,
    /// Zeros inserted after the dimension.
    pub zeros_after: u32,
}

impl Default for PaddedDimension {
    fn default() -> Self {
        Self { wrap: 0, step: 1, zeros_before: 0, zeros_after: 0 }
    }
}

/// Address offset that advances with every start of the descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Iteration {
    /// Starts so far, modulo `wrap`.
    pub current: u32,
    /// Starts until the offset returns to zero, 1 to 64.
    pub wrap: u32,
    /// Offset added per start in words, at least 1.
    pub step: u32,
}

impl Default for Iteration {
    fn default() -> Self {
        Self { current: 0, wrap: 1, step: 1 }
    }
}

/// Packet header that a memory-to-stream transfer emits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketHeader {
    /// Whether a header is sent; the other fields are kept either way.
    pub enable: bool,
    /// Packet id, 5 bits.
    pub id: u32,
    /// Packet type, 3 bits.
    pub kind: u32,
}

/// Lock that a transfer acquires before and releases after.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LockUse {
    /// Whether the transfer waits for a lock.
    pub acquire_enable: bool,
    /// Value to wait for: negative waits for at least the magnitude and subtracts it.
    pub acquire_value: i8,
    /// Lock to acquire.
    pub acquire_id: u32,
    /// Amount added to the release lock afterwards; 0 releases nothing.
    pub release_value: i8,
    /// Lock to release.
    pub release_id: u32,
}

/// Buffer descriptor of a shim tile: a transfer of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShimBd {
    /// Words to transfer.
    pub length_words: u32,
    /// Byte address as the array sees it, below 2^48 and a multiple of 4.
    pub address: u64,
    /// Packet header.
    pub packet: PacketHeader,
    /// Out-of-order descriptor id, 6 bits.
    pub out_of_order_id: u32,
    /// Secure access.
    pub secure: bool,
    /// Innermost dimension.
    pub d0: Dimension,
    /// Second dimension.
    pub d1: Dimension,
    /// Step of the outermost dimension in words.
    pub d2_step: u32,
    /// Burst length code: 0 is 64 bytes, 1 is 128, 2 is 256.
    pub burst: u32,
    /// Stream id of the memory unit, 4 bits.
    pub smid: u32,
    /// Cache attributes, 4 bits.
    pub cache: u32,
    /// Quality of service, 4 bits.
    pub qos: u32,
    /// Iteration offset.
    pub iteration: Iteration,
    /// Suppresses the end-of-packet mark.
    pub tlast_suppress: bool,
    /// Descriptor that follows.
    pub next_bd: u32,
    /// Whether a descriptor follows.
    pub use_next: bool,
    /// Descriptor may be used.
    pub valid: bool,
    /// Locks.
    pub locks: LockUse,
}

/// Buffer descriptor of a memory tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemTileBd {
    /// Packet header.
    pub packet: PacketHeader,
    /// Out-of-order descriptor id, 6 bits.
    pub out_of_order_id: u32,
    /// Words to transfer, 17 bits.
    pub length_words: u32,
    /// Word address in the window of three tiles: west, own (from 0x20000), east.
    pub address_words: u32,
    /// Dimensions, innermost first. The fourth has a step only: no wrap, no padding.
    pub d: [PaddedDimension; 3],
    /// Step of the outermost dimension in words.
    pub d3_step: u32,
    /// Iteration offset.
    pub iteration: Iteration,
    /// Suppresses the end-of-packet mark.
    pub tlast_suppress: bool,
    /// Compression of the stream.
    pub compression: bool,
    /// Descriptor that follows.
    pub next_bd: u32,
    /// Whether a descriptor follows.
    pub use_next: bool,
    /// Descriptor may be used.
    pub valid: bool,
    /// Locks: ids 0 to 63 west, 64 to 127 own, 128 to 191 east.
    pub locks: LockUse,
}

/// Buffer descriptor of a core tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreBd {
    /// Word address in the tile's data memory, 14 bits.
    pub address_words: u32,
    /// Words to transfer, 14 bits.
    pub length_words: u32,
    /// Compression of the stream.
    pub compression: bool,
    /// Packet header.
    pub packet: PacketHeader,
    /// Out-of-order descriptor id, 6 bits.
    pub out_of_order_id: u32,
    /// Innermost dimension.
    pub d0: Dimension,
    /// Second dimension.
    pub d1: Dimension,
    /// Step of the outermost dimension in words.
    pub d2_step: u32,
    /// Iteration offset.
    pub iteration: Iteration,
    /// Suppresses the end-of-packet mark.
    pub tlast_suppress: bool,
    /// Descriptor that follows.
    pub next_bd: u32,
    /// Whether a descriptor follows.
    pub use_next: bool,
    /// Descriptor may be used.
    pub valid: bool,
    /// Locks.
    pub locks: LockUse,
}

impl Default for ShimBd {
    /// An invalid descriptor that moves nothing, with all steps at 1.
    fn default() -> Self {
        Self {
            length_words: 0,
            address: 0,
            packet: PacketHeader::default(),
            out_of_order_id: 0,
            secure: false,
            d0: Dimension::default(),
            d1: Dimension::default(),
            d2_step: 1,
            burst: 0,
            smid: 0,
            cache: 0,
            qos: 0,
            iteration: Iteration::default(),
            tlast_suppress: false,
            next_bd: 0,
            use_next: false,
            valid: false,
            locks: LockUse::default(),
        }
    }
}

impl ShimBd {
    /// The eight register words.
    pub fn encode(&self) -> Result<[u32; 8], RegisterError> {
        check_address(self.address)?;
        let mut w = [0; 8];
        shim::LENGTH.set(&mut w, self.length_words)?;
        shim::ADDRESS_LOW.set(&mut w, self.address as u32 >> 2)?;
        shim::ADDRESS_HIGH.set(&mut w, (self.address >> 32) as u32)?;
        shim::PACKET.set(&mut w, self.packet)?;
        shim::OOO.set(&mut w, self.out_of_order_id)?;
        shim::SECURE.set_flag(&mut w, self.secure);
        shim::D0.set(&mut w, self.d0)?;
        shim::D1.set(&mut w, self.d1)?;
        shim::D2_STEP.set_minus_one(&mut w, self.d2_step)?;
        shim::BURST.set(&mut w, self.burst)?;
        shim::SMID.set(&mut w, self.smid)?;
        shim::CACHE.set(&mut w, self.cache)?;
        shim::QOS.set(&mut w, self.qos)?;
        shim::ITERATION.set(&mut w, self.iteration)?;
        shim::TLAST.set_flag(&mut w, self.tlast_suppress);
        shim::NEXT.set(&mut w, self.next_bd)?;
        shim::USE_NEXT.set_flag(&mut w, self.use_next);
        shim::VALID.set_flag(&mut w, self.valid);
        shim::LOCKS.set(&mut w, self.locks)?;
        Ok(w)
    }

    /// Decodes register words; refuses reserved bits.
    pub fn decode(w: &[u32; 8]) -> Result<Self, RegisterError> {
        refuse_reserved("shim buffer descriptor", w, &shim::ALL)?;
        Ok(Self {
            length_words: shim::LENGTH.get(w),
            address: u64::from(shim::ADDRESS_HIGH.get(w)) << 32 | u64::from(shim::ADDRESS_LOW.get(w) << 2),
            packet: shim::PACKET.get(w),
            out_of_order_id: shim::OOO.get(w),
            secure: shim::SECURE.get_flag(w),
            d0: shim::D0.get(w),
            d1: shim::D1.get(w),
            d2_step: shim::D2_STEP.get(w) + 1,
            burst: shim::BURST.get(w),
            smid: shim::SMID.get(w),
            cache: shim::CACHE.get(w),
            qos: shim::QOS.get(w),
            iteration: shim::ITERATION.get(w),
            tlast_suppress: shim::TLAST.get_flag(w),
            next_bd: shim::NEXT.get(w),
            use_next: shim::USE_NEXT.get_flag(w),
            valid: shim::VALID.get_flag(w),
            locks: shim::LOCKS.get(w),
        })
    }
}

/// Refuses what a shim descriptor cannot express.
fn check_address(address: u64) -> Result<(), RegisterError> {
    if address >= ADDRESS_LIMIT {
        return Err(RegisterError::TooLarge { field: "base address", value: address, max: ADDRESS_LIMIT - 4 });
    }
    if !address.is_multiple_of(4) {
        return Err(RegisterError::Unaligned { field: "base address", address, align: 4 });
    }
    Ok(())
}

impl Default for MemTileBd {
    /// An invalid descriptor that moves nothing, with all steps at 1.
    fn default() -> Self {
        Self {
            packet: PacketHeader::default(),
            out_of_order_id: 0,
            length_words: 0,
            address_words: 0,
            d: [PaddedDimension::default(); 3],
            d3_step: 1,
            iteration: Iteration::default(),
            tlast_suppress: false,
            compression: false,
            next_bd: 0,
            use_next: false,
            valid: false,
            locks: LockUse::default(),
        }
    }
}

impl MemTileBd {
    /// Words of the window before the tile's own memory.
    pub const OWN_TILE_WORDS: u32 = 0x20000;

    /// The eight register words.
    pub fn encode(&self) -> Result<[u32; 8], RegisterError> {
        let mut w = [0; 8];
        mem::PACKET.set(&mut w, self.packet)?;
        mem::OOO.set(&mut w, self.out_of_order_id)?;
        mem::LENGTH.set(&mut w, self.length_words)?;
        mem::NEXT.set(&mut w, self.next_bd)?;
        mem::USE_NEXT.set_flag(&mut w, self.use_next);
        mem::ADDRESS.set(&mut w, self.address_words)?;
        mem::TLAST.set_flag(&mut w, self.tlast_suppress);
        mem::COMPRESSION.set_flag(&mut w, self.compression);
        for (i, d) in self.d.iter().enumerate() {
            mem::WRAP[i].set(&mut w, d.wrap)?;
            mem::STEP[i].set_minus_one(&mut w, d.step)?;
            mem::BEFORE[i].set(&mut w, d.zeros_before)?;
            mem::AFTER[i].set(&mut w, d.zeros_after)?;
        }
        mem::D3_STEP.set_minus_one(&mut w, self.d3_step)?;
        mem::ITERATION.set(&mut w, self.iteration)?;
        mem::VALID.set_flag(&mut w, self.valid);
        mem::LOCKS.set(&mut w, self.locks)?;
        Ok(w)
    }

    /// Decodes register words; refuses reserved bits.
    pub fn decode(w: &[u32; 8]) -> Result<Self, RegisterError> {
        refuse_reserved("memory tile buffer descriptor", w, &mem::ALL)?;
        let dimension = |i: usize| PaddedDimension {
            wrap: mem::WRAP[i].get(w),
            step: mem::STEP[i].get(w) + 1,
            zeros_before: mem::BEFORE[i].get(w),
            zeros_after: mem::AFTER[i].get(w),
        };
        Ok(Self {
            packet: mem::PACKET.get(w),
            out_of_order_id: mem::OOO.get(w),
            length_words: mem::LENGTH.get(w),
            address_words: mem::ADDRESS.get(w),
            d: [dimension(0), dimension(1), dimension(2)],
            d3_step: mem::D3_STEP.get(w) + 1,
            iteration: mem::ITERATION.get(w),
            tlast_suppress: mem::TLAST.get_flag(w),
            compression: mem::COMPRESSION.get_flag(w),
            next_bd: mem::NEXT.get(w),
            use_next: mem::USE_NEXT.get_flag(w),
            valid: mem::VALID.get_flag(w),
            locks: mem::LOCKS.get(w),
        })
    }
}

impl Default for CoreBd {
    /// An invalid descriptor that moves nothing, with all steps at 1.
    fn default() -> Self {
        Self {
            address_words: 0,
            length_words: 0,
            compression: false,
            packet: PacketHeader::default(),
            out_of_order_id: 0,
            d0: Dimension::default(),
            d1: Dimension::default(),
            d2_step: 1,
            iteration: Iteration::default(),
            tlast_suppress: false,
            next_bd: 0,
            use_next: false,
            valid: false,
            locks: LockUse::default(),
        }
    }
}

impl CoreBd {
    /// The six register words.
    pub fn encode(&self) -> Result<[u32; 6], RegisterError> {
        let mut w = [0; 6];
        core_tile::ADDRESS.set(&mut w, self.address_words)?;
        core_tile::LENGTH.set(&mut w, self.length_words)?;
        core_tile::COMPRESSION.set_flag(&mut w, self.compression);
        core_tile::PACKET.set(&mut w, self.packet)?;
        core_tile::OOO.set(&mut w, self.out_of_order_id)?;
        core_tile::D0.set(&mut w, self.d0)?;
        core_tile::D1.set(&mut w, self.d1)?;
        core_tile::D2_STEP.set_minus_one(&mut w, self.d2_step)?;
        core_tile::ITERATION.set(&mut w, self.iteration)?;
        core_tile::TLAST.set_flag(&mut w, self.tlast_suppress);
        core_tile::NEXT.set(&mut w, self.next_bd)?;
        core_tile::USE_NEXT.set_flag(&mut w, self.use_next);
        core_tile::VALID.set_flag(&mut w, self.valid);
        core_tile::LOCKS.set(&mut w, self.locks)?;
        Ok(w)
    }

    /// Decodes register words; refuses reserved bits.
    pub fn decode(w: &[u32; 6]) -> Result<Self, RegisterError> {
        refuse_reserved("core buffer descriptor", w, &core_tile::ALL)?;
        Ok(Self {
            address_words: core_tile::ADDRESS.get(w),
            length_words: core_tile::LENGTH.get(w),
            compression: core_tile::COMPRESSION.get_flag(w),
            packet: core_tile::PACKET.get(w),
            out_of_order_id: core_tile::OOO.get(w),
            d0: core_tile::D0.get(w),
            d1: core_tile::D1.get(w),
            d2_step: core_tile::D2_STEP.get(w) + 1,
            iteration: core_tile::ITERATION.get(w),
            tlast_suppress: core_tile::TLAST.get_flag(w),
            next_bd: core_tile::NEXT.get(w),
            use_next: core_tile::USE_NEXT.get_flag(w),
            valid: core_tile::VALID.get_flag(w),
            locks: core_tile::LOCKS.get(w),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::bits::Field;
    use super::*;
    use proptest::prelude::*;

    /// Clears what belongs to no field.
    fn only_named<const N: usize>(mut words: [u32; N], fields: &[Field]) -> [u32; N] {
        let mut kept = [0; N];
        for field in fields {
            let value = field.get(&words);
            field.set(&mut kept, value).unwrap();
        }
        words.copy_from_slice(&kept);
        words
    }

    #[test]
    fn a_plain_shim_transfer_has_the_expected_words() {
        let bd = ShimBd {
            length_words: 0x200,
            address: 0x1_2345_6780,
            packet: PacketHeader { enable: true, id: 3, kind: 1 },
            d0: Dimension { wrap: 4, step: 2 },
            d2_step: 1,
            iteration: Iteration { current: 0, wrap: 2, step: 16 },
            valid: true,
            locks: LockUse { acquire_enable: true, acquire_value: -1, acquire_id: 2, release_value: 1, release_id: 5 },
            ..ShimBd::default()
        };
        let words = [0x200, 0x2345_6780, 0x4019_0001, 0x0040_0001, 0, 0, 0x0010_000F, 0x0204_BFE2];
        assert_eq!(bd.encode(), Ok(words));
        assert_eq!(ShimBd::decode(&words), Ok(bd));
    }

    #[test]
    fn what_a_descriptor_cannot_express_is_refused() {
        let ok = ShimBd { d2_step: 1, ..ShimBd::default() };
        assert!(ok.encode().is_ok());
        assert!(matches!(ShimBd { address: 2, ..ok }.encode(), Err(RegisterError::Unaligned { .. })));
        assert!(matches!(ShimBd { address: 1 << 48, ..ok }.encode(), Err(RegisterError::TooLarge { .. })));
        assert!(matches!(ShimBd { next_bd: 16, ..ok }.encode(), Err(RegisterError::TooLarge { .. })));
        assert!(matches!(ShimBd { d2_step: 0, ..ok }.encode(), Err(RegisterError::Zero { .. })));
        let locks = LockUse { release_value: 64, ..LockUse::default() };
        assert!(matches!(ShimBd { locks, ..ok }.encode(), Err(RegisterError::OutOfSignedRange { .. })));
        assert_eq!(
            ShimBd::decode(&[0, 3, 0, 0, 0, 0, 0, 0]),
            Err(RegisterError::Reserved { register: "shim buffer descriptor", word: 1, bits: 3 })
        );
    }

    proptest! {
        #[test]
        fn shim_words_survive(words: [u32; 8]) {
            let words = only_named(words, &shim::ALL);
            prop_assert_eq!(ShimBd::decode(&words).unwrap().encode().unwrap(), words);
        }

        #[test]
        fn memory_words_survive(words: [u32; 8]) {
            let words = only_named(words, &mem::ALL);
            prop_assert_eq!(MemTileBd::decode(&words).unwrap().encode().unwrap(), words);
        }

        #[test]
        fn core_words_survive(words: [u32; 6]) {
            let words = only_named(words, &core_tile::ALL);
            prop_assert_eq!(CoreBd::decode(&words).unwrap().encode().unwrap(), words);
        }

        #[test]
        fn random_words_decode_to_themselves_or_are_refused(words: [u32; 8]) {
            if let Ok(bd) = ShimBd::decode(&words) {
                prop_assert_eq!(bd.encode().unwrap(), words);
            }
            if let Ok(bd) = MemTileBd::decode(&words) {
                prop_assert_eq!(bd.encode().unwrap(), words);
            }
        }
    }
}
