//! Register map of the AIE2 / AIE2P array: addresses, names and typed register words.
//!
//! Offsets and fields follow the published AIE2 register headers; AIE2P shares the maps for DMA, locks and switch.
//! Every typed word has `encode` and `decode`; they are inverses of each other. Bits without a name are refused, so
//! that nothing is lost in a round trip.

mod bd;
mod bd_fields;
mod bits;
mod channel;
mod core_state;
mod switch;

pub use bd::{CoreBd, Dimension, Iteration, LockUse, MemTileBd, PacketHeader, PaddedDimension, ShimBd};
pub use channel::{ChannelControl, ChannelStatus, QueuePush, TokenWait};
pub use core_state::{CoreControl, CoreStatus};
pub use switch::{Bundle, MasterConfig, MasterMode, Side, SlaveConfig, SlotConfig, StreamPort};
pub use switch::{ShimDemux, ShimMux, ShimRoute};

use std::fmt;
use thiserror::Error;

/// Rows of the array: shim, memory tile and four core rows.
pub const ARRAY_ROWS: u8 = 6;
/// Offset at which the array sees host memory.
pub const HOST_APERTURE: u64 = 0x8000_0000;
/// Largest value of a lock.
pub const LOCK_VALUE_MAX: u32 = 63;
/// Addresses the DMA can express are below this.
pub const ADDRESS_LIMIT: u64 = 1 << 48;

/// A register word that cannot be encoded or decoded.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterError {
    /// Bits that have no meaning are set.
    #[error("{register}, word {word}: reserved bits {bits:#010x} are set; they must be zero")]
    Reserved {
        /// Register or group.
        register: &'static str,
        /// Word within the group.
        word: usize,
        /// The offending bits.
        bits: u32,
    },
    /// A value does not fit its field.
    #[error("{field}: {value} does not fit; the largest value is {max}")]
    TooLarge {
        /// Field name.
        field: &'static str,
        /// The value.
        value: u64,
        /// Largest value of the field.
        max: u64,
    },
    /// A signed value does not fit its field.
    #[error("{field}: {value} does not fit; the range is {min} to {max}")]
    OutOfSignedRange {
        /// Field name.
        field: &'static str,
        /// The value.
        value: i8,
        /// Smallest value of the field.
        min: i32,
        /// Largest value of the field.
        max: i32,
    },
    /// A field that is stored minus one was given zero.
    #[error("{field}: 0 cannot be expressed; the smallest value is 1")]
    Zero {
        /// Field name.
        field: &'static str,
    },
    /// A DMA address that is not a multiple of the word size.
    #[error("{field}: address {address:#x} is not a multiple of {align}")]
    Unaligned {
        /// Field name.
        field: &'static str,
        /// The address.
        address: u64,
        /// Required alignment in bytes.
        align: u64,
    },
    /// A register, channel or port that the tile does not have.
    #[error("a {tile} tile has no {what}")]
    NoSuch {
        /// Kind of tile.
        tile: TileKind,
        /// What was asked for.
        what: String,
    },
}

/// Kind of a tile, which follows from its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TileKind {
    /// Row 0: interface to host memory.
    Shim,
    /// Row 1: memory tile.
    Memory,
    /// Rows 2 to 5: core with its data memory.
    Core,
}

impl TileKind {
    /// Kind of the tiles in `row`.
    pub fn of_row(row: u8) -> Option<Self> {
        match row {
            0 => Some(Self::Shim),
            1 => Some(Self::Memory),
            2..ARRAY_ROWS => Some(Self::Core),
            _ => None,
        }
    }

    /// Number of buffer descriptors.
    pub fn bd_count(self) -> u8 {
        match self {
            Self::Shim | Self::Core => 16,
            Self::Memory => 48,
        }
    }

    /// Words of one buffer descriptor that carry fields; the address stride is always 8 words.
    pub fn bd_words(self) -> usize {
        match self {
            Self::Shim | Self::Memory => 8,
            Self::Core => 6,
        }
    }

    /// Offset of buffer descriptor 0.
    pub fn bd_base(self) -> u32 {
        match self {
            Self::Shim | Self::Core => 0x1D000,
            Self::Memory => 0xA0000,
        }
    }

    /// DMA channels in each direction.
    pub fn channel_count(self) -> u8 {
        match self {
            Self::Shim | Self::Core => 2,
            Self::Memory => 6,
        }
    }

    /// Whether DMA channel `channel` can use buffer descriptor `bd`: on a memory tile even channels have the lower
    /// half, odd channels the upper half.
    pub fn channel_reaches_bd(self, channel: u8, bd: u8) -> bool {
        let in_range = channel < self.channel_count() && bd < self.bd_count();
        match self {
            Self::Shim | Self::Core => in_range,
            Self::Memory => in_range && (bd < 24) == channel.is_multiple_of(2),
        }
    }

    /// Number of locks.
    pub fn lock_count(self) -> u8 {
        match self {
            Self::Shim | Self::Core => 16,
            Self::Memory => 64,
        }
    }

    /// Bytes of data memory.
    pub fn data_bytes(self) -> u32 {
        match self {
            Self::Shim => 0,
            Self::Memory => 0x80000,
            Self::Core => 0x10000,
        }
    }

    /// Offset of lock 0's value register.
    fn lock_base(self) -> u32 {
        match self {
            Self::Shim => 0x14000,
            Self::Memory => 0xC0000,
            Self::Core => 0x1F000,
        }
    }

    /// Offset of the acquire/release request window; each lock has 0x400 bytes of it.
    fn lock_request_base(self) -> u32 {
        match self {
            Self::Shim | Self::Core => 0x40000,
            Self::Memory => 0xD0000,
        }
    }

    /// Offset of the stream switch.
    fn switch_base(self) -> u32 {
        match self {
            Self::Shim | Self::Core => 0x3F000,
            Self::Memory => 0xB0000,
        }
    }

    /// Offsets of control and of status of channel 0.
    fn channel_base(self, direction: Direction) -> (u32, u32) {
        match (self, direction) {
            (Self::Shim, Direction::S2mm) => (0x1D200, 0x1D220),
            (Self::Shim, Direction::Mm2s) => (0x1D210, 0x1D228),
            (Self::Memory, Direction::S2mm) => (0xA0600, 0xA0660),
            (Self::Memory, Direction::Mm2s) => (0xA0630, 0xA0680),
            (Self::Core, Direction::S2mm) => (0x1DE00, 0x1DF00),
            (Self::Core, Direction::Mm2s) => (0x1DE10, 0x1DF10),
        }
    }
}

impl fmt::Display for TileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shim => "shim",
            Self::Memory => "memory",
            Self::Core => "core",
        })
    }
}

/// Direction of a DMA channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Stream to memory.
    S2mm,
    /// Memory to stream.
    Mm2s,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::S2mm => "s2mm",
            Self::Mm2s => "mm2s",
        })
    }
}

/// Address of a register: tile and offset within it. Columns count from the first column of the partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    column: u8,
    row: u8,
    offset: u32,
}

impl Address {
    /// Address of `offset` (below 1 MiB) in the tile at `column` (below 128) and `row` (below 32).
    pub fn new(column: u8, row: u8, offset: u32) -> Result<Self, RegisterError> {
        for (field, value, max) in
            [("column", column.into(), 127), ("row", row.into(), 31), ("register offset", u64::from(offset), 0xF_FFFF)]
        {
            if value > max {
                return Err(RegisterError::TooLarge { field, value, max });
            }
        }
        Ok(Self { column, row, offset })
    }

    /// Decodes an address word; every word is one.
    pub fn from_word(word: u32) -> Self {
        Self { column: (word >> 25) as u8, row: (word >> 20 & 0x1F) as u8, offset: word & 0xF_FFFF }
    }

    /// The address word.
    pub fn to_word(self) -> u32 {
        u32::from(self.column) << 25 | u32::from(self.row) << 20 | self.offset
    }

    /// Column within the partition.
    pub fn column(self) -> u8 {
        self.column
    }

    /// Row; 0 is the shim.
    pub fn row(self) -> u8 {
        self.row
    }

    /// Byte offset within the tile.
    pub fn offset(self) -> u32 {
        self.offset
    }

    /// Kind of the tile; `None` above the last row.
    pub fn tile(self) -> Option<TileKind> {
        TileKind::of_row(self.row)
    }

    /// The register or memory at this address; `None` when the map has nothing here.
    pub fn register(self) -> Option<Register> {
        Register::decode(self.tile()?, self.offset)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tile() {
            Some(tile) => write!(f, "{tile}({},{})", self.column, self.row)?,
            None => write!(f, "tile({},{})", self.column, self.row)?,
        }
        match self.register() {
            Some(register) => write!(f, ".{register}"),
            None => write!(f, "+{:#07x}", self.offset),
        }
    }
}

/// A register or memory of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Register {
    /// Data memory at this byte offset (memory and core tiles).
    DataMemory(u32),
    /// Program memory at this byte offset (core tiles).
    ProgramMemory(u32),
    /// Program counter of the core.
    CorePc,
    /// Core control: enable bit 0, reset bit 1.
    CoreControl,
    /// Core status: enable 0, reset 1, debug halt 16, error halt 19, done 20.
    CoreStatus,
    /// Tile control (core tiles).
    TileControl,
    /// Word of a buffer descriptor.
    Bd {
        /// Buffer descriptor.
        bd: u8,
        /// Word within it.
        word: u8,
    },
    /// Control of a DMA channel.
    ChannelControl(Direction, u8),
    /// Task queue of a DMA channel (write only).
    TaskQueue(Direction, u8),
    /// Status of a DMA channel.
    ChannelStatus(Direction, u8),
    /// Value of a lock.
    Lock(u8),
    /// Acquire/release request at this byte offset of the window.
    LockRequest(u32),
    /// Master port configuration of the stream switch.
    SwitchMaster(u8),
    /// Slave port configuration of the stream switch.
    SwitchSlave(u8),
    /// Packet slot of a slave port.
    SwitchSlot {
        /// Slave port.
        port: u8,
        /// Slot, 0 to 3.
        slot: u8,
    },
    /// Selects what feeds the shim's south slaves.
    ShimMux,
    /// Selects what the shim's south masters feed.
    ShimDemux,
}

const PROGRAM_MEMORY: u32 = 0x20000;
const PROGRAM_BYTES: u32 = 0x4000;
const CORE_REGISTERS: [(u32, Register); 4] = [
    (0x31100, Register::CorePc),
    (0x32000, Register::CoreControl),
    (0x32004, Register::CoreStatus),
    (0x36030, Register::TileControl),
];
const SHIM_REGISTERS: [(u32, Register); 2] = [(0x1F000, Register::ShimMux), (0x1F004, Register::ShimDemux)];
const LOCK_REQUEST_BYTES: u32 = 0x400;

impl Register {
    /// The register at byte `offset` of a tile; `None` when the map has nothing there.
    pub fn decode(tile: TileKind, offset: u32) -> Option<Self> {
        if offset < tile.data_bytes() {
            return Some(Self::DataMemory(offset));
        }
        let lock_request = offset.wrapping_sub(tile.lock_request_base());
        if lock_request < u32::from(tile.lock_count()) * LOCK_REQUEST_BYTES {
            return Some(Self::LockRequest(lock_request));
        }
        if tile == TileKind::Core && (PROGRAM_MEMORY..PROGRAM_MEMORY + PROGRAM_BYTES).contains(&offset) {
            return Some(Self::ProgramMemory(offset - PROGRAM_MEMORY));
        }
        if !offset.is_multiple_of(4) {
            return None;
        }
        Self::decode_single(tile, offset)
            .or_else(|| Self::decode_bd(tile, offset))
            .or_else(|| Self::decode_channel(tile, offset))
            .or_else(|| Self::decode_lock(tile, offset))
            .or_else(|| Self::decode_switch(tile, offset))
    }

    fn decode_single(tile: TileKind, offset: u32) -> Option<Self> {
        let list: &[(u32, Self)] = match tile {
            TileKind::Shim => &SHIM_REGISTERS,
            TileKind::Memory => &[],
            TileKind::Core => &CORE_REGISTERS,
        };
        list.iter().find(|(at, _)| *at == offset).map(|(_, register)| *register)
    }

    fn decode_bd(tile: TileKind, offset: u32) -> Option<Self> {
        let relative = offset.wrapping_sub(tile.bd_base());
        let (bd, word) = (relative / 0x20, relative % 0x20 / 4);
        (bd < tile.bd_count().into() && (word as usize) < tile.bd_words())
            .then_some(Self::Bd { bd: bd as u8, word: word as u8 })
    }

    fn decode_channel(tile: TileKind, offset: u32) -> Option<Self> {
        let count = u32::from(tile.channel_count());
        for direction in [Direction::S2mm, Direction::Mm2s] {
            let (control, status) = tile.channel_base(direction);
            let relative = offset.wrapping_sub(control);
            if relative < 8 * count {
                let channel = (relative / 8) as u8;
                return Some(match relative % 8 {
                    0 => Self::ChannelControl(direction, channel),
                    _ => Self::TaskQueue(direction, channel),
                });
            }
            let relative = offset.wrapping_sub(status);
            if relative < 4 * count {
                return Some(Self::ChannelStatus(direction, (relative / 4) as u8));
            }
        }
        None
    }

    fn decode_lock(tile: TileKind, offset: u32) -> Option<Self> {
        let relative = offset.wrapping_sub(tile.lock_base());
        (relative < 0x10 * u32::from(tile.lock_count()) && relative.is_multiple_of(0x10))
            .then_some(Self::Lock((relative / 0x10) as u8))
    }

    fn decode_switch(tile: TileKind, offset: u32) -> Option<Self> {
        let relative = offset.wrapping_sub(tile.switch_base());
        let (masters, slaves) = (StreamPort::count(tile, Side::Master), StreamPort::count(tile, Side::Slave));
        match relative {
            0..0x100 if relative / 4 < masters.into() => Some(Self::SwitchMaster((relative / 4) as u8)),
            0x100..0x200 if (relative - 0x100) / 4 < slaves.into() => {
                Some(Self::SwitchSlave(((relative - 0x100) / 4) as u8))
            }
            0x200..0x400 if (relative - 0x200) / 0x10 < slaves.into() => {
                Some(Self::SwitchSlot { port: ((relative - 0x200) / 0x10) as u8, slot: (relative % 0x10 / 4) as u8 })
            }
            _ => None,
        }
    }

    /// Byte offset of this register in a tile of kind `tile`; an error when such a tile does not have it.
    pub fn offset(self, tile: TileKind) -> Result<u32, RegisterError> {
        let offset = match self {
            Self::DataMemory(at) => at,
            Self::ProgramMemory(at) => PROGRAM_MEMORY.saturating_add(at),
            Self::CorePc | Self::CoreControl | Self::CoreStatus | Self::TileControl => {
                single_offset(&CORE_REGISTERS, self)
            }
            Self::ShimMux | Self::ShimDemux => single_offset(&SHIM_REGISTERS, self),
            Self::Bd { bd, word } => tile.bd_base() + 0x20 * u32::from(bd) + 4 * u32::from(word),
            Self::ChannelControl(direction, channel) => tile.channel_base(direction).0 + 8 * u32::from(channel),
            Self::TaskQueue(direction, channel) => tile.channel_base(direction).0 + 8 * u32::from(channel) + 4,
            Self::ChannelStatus(direction, channel) => tile.channel_base(direction).1 + 4 * u32::from(channel),
            Self::Lock(lock) => tile.lock_base() + 0x10 * u32::from(lock),
            Self::LockRequest(at) => tile.lock_request_base().saturating_add(at),
            Self::SwitchMaster(port) => tile.switch_base() + 4 * u32::from(port),
            Self::SwitchSlave(port) => tile.switch_base() + 0x100 + 4 * u32::from(port),
            Self::SwitchSlot { port, slot } => {
                tile.switch_base() + 0x200 + 0x10 * u32::from(port) + 4 * u32::from(slot)
            }
        };
        // An index past the tile's last one lands on something else or on nothing.
        match Self::decode(tile, offset) == Some(self) {
            true => Ok(offset),
            false => Err(RegisterError::NoSuch { tile, what: self.to_string() }),
        }
    }

    /// Address of this register in the tile at `column`, `row`.
    pub fn at(self, column: u8, row: u8) -> Result<Address, RegisterError> {
        let tile = TileKind::of_row(row).ok_or(RegisterError::TooLarge {
            field: "row",
            value: row.into(),
            max: u64::from(ARRAY_ROWS) - 1,
        })?;
        Address::new(column, row, self.offset(tile)?)
    }
}

/// Offset of a register that exists once.
fn single_offset(list: &[(u32, Register)], register: Register) -> u32 {
    list.iter().find(|(_, r)| *r == register).map_or(u32::MAX, |(at, _)| *at)
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DataMemory(at) => write!(f, "data+{at:#x}"),
            Self::ProgramMemory(at) => write!(f, "program+{at:#x}"),
            Self::CorePc => f.write_str("core_pc"),
            Self::CoreControl => f.write_str("core_control"),
            Self::CoreStatus => f.write_str("core_status"),
            Self::TileControl => f.write_str("tile_control"),
            Self::Bd { bd, word } => write!(f, "bd{bd}.{word}"),
            Self::ChannelControl(direction, channel) => write!(f, "{direction}{channel}.control"),
            Self::TaskQueue(direction, channel) => write!(f, "{direction}{channel}.queue"),
            Self::ChannelStatus(direction, channel) => write!(f, "{direction}{channel}.status"),
            Self::Lock(lock) => write!(f, "lock{lock}"),
            Self::LockRequest(at) => write!(f, "lock_request+{at:#x}"),
            Self::SwitchMaster(port) => write!(f, "switch.master{port}"),
            Self::SwitchSlave(port) => write!(f, "switch.slave{port}"),
            Self::SwitchSlot { port, slot } => write!(f, "switch.slave{port}.slot{slot}"),
            Self::ShimMux => f.write_str("mux"),
            Self::ShimDemux => f.write_str("demux"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn published_offsets_have_their_names() {
        let cases = [
            (0x0001_D200, "shim(0,0).s2mm0.control"),
            (0x0001_D21C, "shim(0,0).mm2s1.queue"),
            (0x0601_D024, "shim(3,0).bd1.1"),
            (0x0001_D22C, "shim(0,0).mm2s1.status"),
            (0x0011_0000, "memory(0,1).data+0x10000"),
            (0x001A_05FC, "memory(0,1).bd47.7"),
            (0x001A_065C, "memory(0,1).mm2s5.queue"),
            (0x001C_03F0, "memory(0,1).lock63"),
            (0x0023_2000, "core(0,2).core_control"),
            (0x0022_0000, "core(0,2).program+0x0"),
            (0x0021_DE14, "core(0,2).mm2s0.queue"),
            (0x0003_F220, "shim(0,0).switch.slave2.slot0"),
            (0x0001_F000, "shim(0,0).mux"),
            (0x0031_D018, "core(0,3)+0x1d018"),
            (0x0060_0000, "tile(0,6)+0x00000"),
        ];
        for (word, name) in cases {
            assert_eq!(Address::from_word(word).to_string(), name);
        }
    }

    #[test]
    fn an_index_past_the_end_is_refused() {
        for (register, tile) in [
            (Register::Bd { bd: 16, word: 0 }, TileKind::Shim),
            (Register::Bd { bd: 0, word: 6 }, TileKind::Core),
            (Register::TaskQueue(Direction::S2mm, 2), TileKind::Shim),
            (Register::TaskQueue(Direction::Mm2s, 6), TileKind::Memory),
            (Register::Lock(16), TileKind::Core),
            (Register::ProgramMemory(0), TileKind::Memory),
            (Register::CoreControl, TileKind::Shim),
            (Register::DataMemory(0), TileKind::Shim),
            (Register::DataMemory(0x10000), TileKind::Core),
            (Register::SwitchSlot { port: 0, slot: 4 }, TileKind::Core),
        ] {
            assert!(matches!(register.offset(tile), Err(RegisterError::NoSuch { .. })), "{register} {tile}");
        }
        assert!(Register::CorePc.at(0, 6).is_err());
        assert!(Address::new(128, 0, 0).is_err());
    }

    #[test]
    fn every_offset_that_decodes_encodes_to_itself() {
        for tile in [TileKind::Shim, TileKind::Memory, TileKind::Core] {
            let mut named = 0;
            for offset in (0..0x10_0000).step_by(4) {
                if let Some(register) = Register::decode(tile, offset) {
                    assert_eq!(register.offset(tile), Ok(offset), "{register}");
                    named += 1;
                }
            }
            assert!(named > 4000, "{tile}: {named}");
        }
    }

    #[test]
    fn memory_tile_channels_reach_half_the_descriptors() {
        assert!(TileKind::Memory.channel_reaches_bd(0, 23) && !TileKind::Memory.channel_reaches_bd(0, 24));
        assert!(TileKind::Memory.channel_reaches_bd(5, 24) && !TileKind::Memory.channel_reaches_bd(5, 23));
        assert!(TileKind::Shim.channel_reaches_bd(1, 15) && !TileKind::Shim.channel_reaches_bd(2, 0));
    }

    proptest! {
        #[test]
        fn addresses_survive_a_round_trip(word: u32) {
            prop_assert_eq!(Address::from_word(word).to_word(), word);
        }
    }
}
