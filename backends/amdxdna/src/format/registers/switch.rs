//! Stream switch: ports, their configuration words, and the shim's multiplexers.

use super::bits::{Field, refuse_reserved};
use super::{RegisterError, TileKind};
use std::fmt;

/// Side of the switch a port is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Output of the switch.
    Master,
    /// Input of the switch.
    Slave,
}

/// What a port connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bundle {
    /// The core's stream.
    Core,
    /// A DMA channel.
    Dma,
    /// Tile control.
    TileControl,
    /// Stream FIFO.
    Fifo,
    /// The tile below.
    South,
    /// The tile to the west.
    West,
    /// The tile above.
    North,
    /// The tile to the east.
    East,
    /// Trace unit.
    Trace,
}

/// A port of a tile's stream switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamPort {
    /// What it connects to.
    pub bundle: Bundle,
    /// Number within the bundle.
    pub index: u8,
}

/// Bundles of one side in port order: (bundle, ports).
type PortMap = &'static [(Bundle, u8)];

const CORE_MASTER: PortMap = &[
    (Bundle::Core, 1),
    (Bundle::Dma, 2),
    (Bundle::TileControl, 1),
    (Bundle::Fifo, 1),
    (Bundle::South, 4),
    (Bundle::West, 4),
    (Bundle::North, 6),
    (Bundle::East, 4),
];
const CORE_SLAVE: PortMap = &[
    (Bundle::Core, 1),
    (Bundle::Dma, 2),
    (Bundle::TileControl, 1),
    (Bundle::Fifo, 1),
    (Bundle::South, 6),
    (Bundle::West, 4),
    (Bundle::North, 4),
    (Bundle::East, 4),
    (Bundle::Trace, 2),
];
const SHIM_MASTER: PortMap = &[
    (Bundle::TileControl, 1),
    (Bundle::Fifo, 1),
    (Bundle::South, 6),
    (Bundle::West, 4),
    (Bundle::North, 6),
    (Bundle::East, 4),
];
const SHIM_SLAVE: PortMap = &[
    (Bundle::TileControl, 1),
    (Bundle::Fifo, 1),
    (Bundle::South, 8),
    (Bundle::West, 4),
    (Bundle::North, 4),
    (Bundle::East, 4),
    (Bundle::Trace, 1),
];
const MEMORY_MASTER: PortMap = &[(Bundle::Dma, 6), (Bundle::TileControl, 1), (Bundle::South, 4), (Bundle::North, 6)];
const MEMORY_SLAVE: PortMap =
    &[(Bundle::Dma, 6), (Bundle::TileControl, 1), (Bundle::South, 6), (Bundle::North, 4), (Bundle::Trace, 1)];

fn port_map(tile: TileKind, side: Side) -> PortMap {
    match (tile, side) {
        (TileKind::Core, Side::Master) => CORE_MASTER,
        (TileKind::Core, Side::Slave) => CORE_SLAVE,
        (TileKind::Shim, Side::Master) => SHIM_MASTER,
        (TileKind::Shim, Side::Slave) => SHIM_SLAVE,
        (TileKind::Memory, Side::Master) => MEMORY_MASTER,
        (TileKind::Memory, Side::Slave) => MEMORY_SLAVE,
    }
}

impl StreamPort {
    /// Ports on one side of a tile's switch.
    pub fn count(tile: TileKind, side: Side) -> u8 {
        port_map(tile, side).iter().map(|(_, ports)| ports).sum()
    }

    /// The port with this register index.
    pub fn from_port_index(tile: TileKind, side: Side, mut port: u8) -> Option<Self> {
        for &(bundle, ports) in port_map(tile, side) {
            match port.checked_sub(ports) {
                None => return Some(Self { bundle, index: port }),
                Some(rest) => port = rest,
            }
        }
        None
    }

    /// Register index of this port; an error when the tile does not have it.
    pub fn port_index(self, tile: TileKind, side: Side) -> Result<u8, RegisterError> {
        let mut first = 0;
        for &(bundle, ports) in port_map(tile, side) {
            if bundle == self.bundle && self.index < ports {
                return Ok(first + self.index);
            }
            first += ports;
        }
        Err(RegisterError::NoSuch { tile, what: format!("{self} {side:?} port") })
    }
}

impl fmt::Display for StreamPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{}", self.bundle, self.index)
    }
}

/// How a master port takes its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MasterMode {
    /// Everything from one slave port.
    Circuit {
        /// Index of the slave port, 7 bits.
        slave: u32,
    },
    /// Packets from an arbiter.
    Packet {
        /// Arbiter, 3 bits.
        arbiter: u32,
        /// Selected outputs of the arbiter, a mask of 4 bits.
        msel_mask: u32,
    },
}

/// Configuration word of a master port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MasterConfig {
    /// Port in use.
    pub enable: bool,
    /// Whether the packet header is removed.
    pub drop_header: bool,
    /// Source of the data.
    pub mode: MasterMode,
}

const ENABLE: Field = Field::new("enable", 0, 31, 31);
const PACKET: Field = Field::new("packet mode", 0, 30, 30);
const DROP_HEADER: Field = Field::new("drop header", 0, 7, 7);
const SLAVE: Field = Field::new("slave port", 0, 6, 0);
const MASTER_ARBITER: Field = Field::new("arbiter", 0, 2, 0);
const MSEL_MASK: Field = Field::new("msel mask", 0, 6, 3);

impl MasterConfig {
    /// The register word.
    pub fn encode(&self) -> Result<u32, RegisterError> {
        let mut w = [0];
        ENABLE.set_flag(&mut w, self.enable);
        DROP_HEADER.set_flag(&mut w, self.drop_header);
        match self.mode {
            MasterMode::Circuit { slave } => SLAVE.set(&mut w, slave)?,
            MasterMode::Packet { arbiter, msel_mask } => {
                PACKET.set_flag(&mut w, true);
                MASTER_ARBITER.set(&mut w, arbiter)?;
                MSEL_MASK.set(&mut w, msel_mask)?;
            }
        }
        Ok(w[0])
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32) -> Result<Self, RegisterError> {
        let w = [word];
        refuse_reserved("switch master", &w, &[ENABLE, PACKET, DROP_HEADER, SLAVE])?;
        let mode = match PACKET.get_flag(&w) {
            true => MasterMode::Packet { arbiter: MASTER_ARBITER.get(&w), msel_mask: MSEL_MASK.get(&w) },
            false => MasterMode::Circuit { slave: SLAVE.get(&w) },
        };
        Ok(Self { enable: ENABLE.get_flag(&w), drop_header: DROP_HEADER.get_flag(&w), mode })
    }
}

/// Configuration word of a slave port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlaveConfig {
    /// Port in use.
    pub enable: bool,
    /// Packets are routed by the port's slots.
    pub packet: bool,
}

impl SlaveConfig {
    /// The register word.
    pub fn encode(&self) -> u32 {
        let mut w = [0];
        ENABLE.set_flag(&mut w, self.enable);
        PACKET.set_flag(&mut w, self.packet);
        w[0]
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32) -> Result<Self, RegisterError> {
        let w = [word];
        refuse_reserved("switch slave", &w, &[ENABLE, PACKET])?;
        Ok(Self { enable: ENABLE.get_flag(&w), packet: PACKET.get_flag(&w) })
    }
}

/// Packet slot of a slave port: packets with `(id & mask) == self.id` go to an arbiter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotConfig {
    /// Packet id to match, 5 bits.
    pub id: u32,
    /// Bits of the id that count, 5 bits.
    pub mask: u32,
    /// Slot in use.
    pub enable: bool,
    /// Output of the arbiter, 2 bits.
    pub msel: u32,
    /// Arbiter, 3 bits.
    pub arbiter: u32,
}

const SLOT_ID: Field = Field::new("packet id", 0, 28, 24);
const SLOT_MASK: Field = Field::new("packet id mask", 0, 20, 16);
const SLOT_ENABLE: Field = Field::new("slot enable", 0, 8, 8);
const SLOT_MSEL: Field = Field::new("msel", 0, 5, 4);
const SLOT_ARBITER: Field = Field::new("arbiter", 0, 2, 0);

impl SlotConfig {
    /// Whether this slot routes packets of `id`.
    pub fn matches(&self, id: u32) -> bool {
        self.enable && id & self.mask == self.id
    }

    /// The register word.
    pub fn encode(&self) -> Result<u32, RegisterError> {
        let mut w = [0];
        SLOT_ID.set(&mut w, self.id)?;
        SLOT_MASK.set(&mut w, self.mask)?;
        SLOT_ENABLE.set_flag(&mut w, self.enable);
        SLOT_MSEL.set(&mut w, self.msel)?;
        SLOT_ARBITER.set(&mut w, self.arbiter)?;
        Ok(w[0])
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32) -> Result<Self, RegisterError> {
        let w = [word];
        refuse_reserved("switch slot", &w, &[SLOT_ID, SLOT_MASK, SLOT_ENABLE, SLOT_MSEL, SLOT_ARBITER])?;
        Ok(Self {
            id: SLOT_ID.get(&w),
            mask: SLOT_MASK.get(&w),
            enable: SLOT_ENABLE.get_flag(&w),
            msel: SLOT_MSEL.get(&w),
            arbiter: SLOT_ARBITER.get(&w),
        })
    }
}

/// What a multiplexed south port of the shim connects to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ShimRoute {
    /// Programmable logic.
    #[default]
    Pl = 0,
    /// The shim's DMA.
    Dma = 1,
    /// Network on chip.
    Noc = 2,
}

impl ShimRoute {
    fn from_code(field: &'static str, code: u32) -> Result<Self, RegisterError> {
        match code {
            0 => Ok(Self::Pl),
            1 => Ok(Self::Dma),
            2 => Ok(Self::Noc),
            other => Err(RegisterError::TooLarge { field, value: other.into(), max: 2 }),
        }
    }
}

/// Multiplexer in front of the shim's south slaves. MM2S channels 0 and 1 enter through South3 and South7.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShimMux {
    /// Sources of South2, South3, South6, South7.
    pub south: [ShimRoute; 4],
}

/// Demultiplexer behind the shim's south masters. S2MM channels 0 and 1 leave through South2 and South3.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShimDemux {
    /// Destinations of South2, South3, South4, South5.
    pub south: [ShimRoute; 4],
}

const MUX: [Field; 4] = [
    Field::new("South2 source", 0, 9, 8),
    Field::new("South3 source", 0, 11, 10),
    Field::new("South6 source", 0, 13, 12),
    Field::new("South7 source", 0, 15, 14),
];
const DEMUX: [Field; 4] = [
    Field::new("South2 destination", 0, 5, 4),
    Field::new("South3 destination", 0, 7, 6),
    Field::new("South4 destination", 0, 9, 8),
    Field::new("South5 destination", 0, 11, 10),
];

impl ShimMux {
    /// The register word.
    pub fn encode(&self) -> u32 {
        encode_routes(&MUX, self.south)
    }

    /// Decodes a register word; refuses reserved bits and codes.
    pub fn decode(word: u32) -> Result<Self, RegisterError> {
        Ok(Self { south: decode_routes("shim mux", &MUX, word)? })
    }
}

impl ShimDemux {
    /// The register word.
    pub fn encode(&self) -> u32 {
        encode_routes(&DEMUX, self.south)
    }

    /// Decodes a register word; refuses reserved bits and codes.
    pub fn decode(word: u32) -> Result<Self, RegisterError> {
        Ok(Self { south: decode_routes("shim demux", &DEMUX, word)? })
    }
}

fn encode_routes(fields: &[Field; 4], routes: [ShimRoute; 4]) -> u32 {
    fields.iter().zip(routes).fold(0, |word, (field, route)| word | (route as u32) << field.low)
}

fn decode_routes(register: &'static str, fields: &[Field; 4], word: u32) -> Result<[ShimRoute; 4], RegisterError> {
    refuse_reserved(register, &[word], fields)?;
    let mut routes = [ShimRoute::Pl; 4];
    for (route, field) in routes.iter_mut().zip(fields) {
        *route = ShimRoute::from_code(field.name, field.get(&[word]))?;
    }
    Ok(routes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn port_indices_match_the_register_map() {
        let cases = [
            (TileKind::Core, Side::Master, Bundle::South, 0, 5),
            (TileKind::Core, Side::Master, Bundle::East, 3, 22),
            (TileKind::Core, Side::Slave, Bundle::South, 5, 10),
            (TileKind::Core, Side::Slave, Bundle::Trace, 1, 24),
            (TileKind::Shim, Side::Master, Bundle::South, 0, 2),
            (TileKind::Shim, Side::Master, Bundle::North, 5, 17),
            (TileKind::Shim, Side::Slave, Bundle::South, 7, 9),
            (TileKind::Shim, Side::Slave, Bundle::Trace, 0, 22),
            (TileKind::Memory, Side::Master, Bundle::North, 0, 11),
            (TileKind::Memory, Side::Slave, Bundle::Trace, 0, 17),
        ];
        for (tile, side, bundle, index, port) in cases {
            let stream = StreamPort { bundle, index };
            assert_eq!(stream.port_index(tile, side), Ok(port));
            assert_eq!(StreamPort::from_port_index(tile, side, port), Some(stream));
        }
        let missing = StreamPort { bundle: Bundle::West, index: 0 };
        assert!(missing.port_index(TileKind::Memory, Side::Master).is_err());
        assert_eq!(StreamPort::from_port_index(TileKind::Memory, Side::Master, 17), None);
    }

    #[test]
    fn configuration_words_are_as_documented() {
        let circuit = MasterConfig { enable: true, drop_header: false, mode: MasterMode::Circuit { slave: 5 } };
        assert_eq!(circuit.encode(), Ok(0x8000_0005));
        let packet =
            MasterConfig { enable: true, drop_header: true, mode: MasterMode::Packet { arbiter: 2, msel_mask: 1 } };
        assert_eq!(packet.encode(), Ok(0xC000_008A));
        let slot = SlotConfig { id: 4, mask: 0x1F, enable: true, msel: 1, arbiter: 3 };
        assert_eq!(slot.encode(), Ok(0x041F_0113));
        assert!(slot.matches(4) && !slot.matches(5));
        let mux = ShimMux { south: [ShimRoute::Pl, ShimRoute::Dma, ShimRoute::Pl, ShimRoute::Dma] };
        assert_eq!(mux.encode(), 0x4400);
        let demux = ShimDemux { south: [ShimRoute::Dma, ShimRoute::Dma, ShimRoute::Pl, ShimRoute::Noc] };
        assert_eq!(demux.encode(), 0x850);
        assert!(ShimDemux::decode(0x30).is_err());
    }

    proptest! {
        #[test]
        fn words_decode_to_themselves_or_are_refused(word: u32) {
            for word in [word, word & 0xC000_00FF, word & 0xC000_0000, word & 0x1F1F_0137, word & 0xAA00, word & 0xAA0] {
                if let Ok(x) = MasterConfig::decode(word) {
                    prop_assert_eq!(x.encode(), Ok(word));
                }
                if let Ok(x) = SlaveConfig::decode(word) {
                    prop_assert_eq!(x.encode(), word);
                }
                if let Ok(x) = SlotConfig::decode(word) {
                    prop_assert_eq!(x.encode(), Ok(word));
                }
                if let Ok(x) = ShimMux::decode(word) {
                    prop_assert_eq!(x.encode(), word);
                }
                if let Ok(x) = ShimDemux::decode(word) {
                    prop_assert_eq!(x.encode(), word);
                }
            }
        }
    }
}
