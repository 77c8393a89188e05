//! DMA channels: control, status, task queue and the wait for task-complete tokens.

use super::bits::{Field, refuse_reserved};
use super::{Direction, RegisterError, TileKind};

/// Control word of a DMA channel.
///
/// | Tile, direction | Fields |
/// |---|---|
/// | shim S2MM | FoT mode, controller id, out of order, pause stream, pause memory |
/// | shim MM2S | controller id, pause stream, pause memory |
/// | memory, core | S2MM: FoT mode, out of order; both: controller id, compression, reset |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelControl {
    /// Finish-on-TLAST mode, 2 bits.
    pub fot_mode: u32,
    /// Controller id carried by the channel's tokens, 8 bits.
    pub controller_id: u32,
    /// Out-of-order mode.
    pub out_of_order: bool,
    /// Pauses the stream side.
    pub pause_stream: bool,
    /// Pauses the memory side.
    pub pause_memory: bool,
    /// Decompression (S2MM) or compression (MM2S).
    pub compression: bool,
    /// Holds the channel in reset.
    pub reset: bool,
}

const FOT: Field = Field::new("finish-on-TLAST mode", 0, 17, 16);
const CONTROLLER: Field = Field::new("controller id", 0, 15, 8);
const COMPRESSION: Field = Field::new("compression", 0, 4, 4);
const OOO: Field = Field::new("out-of-order enable", 0, 3, 3);
const PAUSE_STREAM: Field = Field::new("pause stream", 0, 2, 2);
const PAUSE_MEMORY: Field = Field::new("pause memory", 0, 1, 1);
const RESET: Field = Field::new("reset", 0, 1, 1);

impl ChannelControl {
    /// The register word for a channel of this kind; a field the channel does not have must be zero.
    pub fn encode(&self, tile: TileKind, direction: Direction) -> Result<u32, RegisterError> {
        let mut w = [0];
        CONTROLLER.set(&mut w, self.controller_id)?;
        let s2mm = direction == Direction::S2mm;
        let shim = tile == TileKind::Shim;
        if s2mm {
            FOT.set(&mut w, self.fot_mode)?;
            OOO.set_flag(&mut w, self.out_of_order);
        }
        if shim {
            PAUSE_STREAM.set_flag(&mut w, self.pause_stream);
            PAUSE_MEMORY.set_flag(&mut w, self.pause_memory);
        } else {
            COMPRESSION.set_flag(&mut w, self.compression);
            RESET.set_flag(&mut w, self.reset);
        }
        let foreign = [
            (
                !s2mm && (self.fot_mode != 0 || self.out_of_order),
                "finish-on-TLAST or out-of-order mode on this channel",
            ),
            (shim && (self.compression || self.reset), "compression or reset bit in its channel control"),
            (!shim && (self.pause_stream || self.pause_memory), "pause bits in its channel control"),
        ];
        match foreign.into_iter().find(|(set, _)| *set) {
            Some((_, what)) => Err(RegisterError::NoSuch { tile, what: what.to_owned() }),
            None => Ok(w[0]),
        }
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32, tile: TileKind, direction: Direction) -> Result<Self, RegisterError> {
        let w = [word];
        let fields: &[Field] = match (tile, direction) {
            (TileKind::Shim, Direction::S2mm) => &[FOT, CONTROLLER, OOO, PAUSE_STREAM, PAUSE_MEMORY],
            (TileKind::Shim, Direction::Mm2s) => &[CONTROLLER, PAUSE_STREAM, PAUSE_MEMORY],
            (_, Direction::S2mm) => &[FOT, CONTROLLER, COMPRESSION, OOO, RESET],
            (_, Direction::Mm2s) => &[CONTROLLER, COMPRESSION, RESET],
        };
        refuse_reserved("channel control", &w, fields)?;
        let shim = tile == TileKind::Shim;
        Ok(Self {
            fot_mode: FOT.get(&w),
            controller_id: CONTROLLER.get(&w),
            out_of_order: OOO.get_flag(&w),
            pause_stream: PAUSE_STREAM.get_flag(&w),
            pause_memory: shim && PAUSE_MEMORY.get_flag(&w),
            compression: COMPRESSION.get_flag(&w),
            reset: !shim && RESET.get_flag(&w),
        })
    }
}

/// Word pushed into a channel's task queue. The queue holds 4 tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePush {
    /// First buffer descriptor of the task.
    pub start_bd: u32,
    /// Times the task runs, 1 to 256.
    pub repeat: u32,
    /// Whether the channel sends a task-complete token at the end.
    pub issue_token: bool,
}

const ISSUE_TOKEN: Field = Field::new("token issue enable", 0, 31, 31);
const REPEAT: Field = Field::new("repeat count", 0, 23, 16);

impl QueuePush {
    /// Tasks a channel's queue can hold.
    pub const QUEUE_DEPTH: usize = 4;

    /// The register word.
    pub fn encode(&self, tile: TileKind) -> Result<u32, RegisterError> {
        let mut w = [0];
        ISSUE_TOKEN.set_flag(&mut w, self.issue_token);
        REPEAT.set_minus_one(&mut w, self.repeat)?;
        start_bd(tile).set(&mut w, self.start_bd)?;
        Ok(w[0])
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32, tile: TileKind) -> Result<Self, RegisterError> {
        let w = [word];
        let bd = start_bd(tile);
        refuse_reserved("task queue", &w, &[ISSUE_TOKEN, REPEAT, bd])?;
        Ok(Self { start_bd: bd.get(&w), repeat: REPEAT.get(&w) + 1, issue_token: ISSUE_TOKEN.get_flag(&w) })
    }
}

/// Field of the first descriptor, which is wider on a memory tile.
const fn start_bd(tile: TileKind) -> Field {
    let high = match tile {
        TileKind::Memory => 5,
        TileKind::Shim | TileKind::Core => 3,
    };
    Field::new("start BD id", 0, high, 0)
}

/// Status word of a DMA channel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelStatus {
    /// Descriptor in progress.
    pub current_bd: u32,
    /// Tasks waiting in the queue, 3 bits.
    pub queue_size: u32,
    /// A task is running.
    pub running: bool,
    /// A push found the queue full.
    pub queue_overflow: bool,
    /// Error bits 17:16.
    pub errors: u32,
    /// A task started with an invalid descriptor.
    pub bd_invalid: bool,
    /// Reasons for a stall, bits 5:2.
    pub stalls: u32,
    /// State machine, 0 is idle.
    pub state: u32,
}

const QUEUE_SIZE: Field = Field::new("queue size", 0, 22, 20);
const RUNNING: Field = Field::new("running", 0, 19, 19);
const OVERFLOW: Field = Field::new("queue overflow", 0, 18, 18);
const ERRORS: Field = Field::new("errors", 0, 17, 16);
const BD_INVALID: Field = Field::new("BD invalid", 0, 11, 11);
const STALLS: Field = Field::new("stall reasons", 0, 5, 2);
const STATE: Field = Field::new("state", 0, 1, 0);

impl ChannelStatus {
    /// The register word.
    pub fn encode(&self, tile: TileKind) -> Result<u32, RegisterError> {
        let mut w = [0];
        current_bd(tile).set(&mut w, self.current_bd)?;
        QUEUE_SIZE.set(&mut w, self.queue_size)?;
        RUNNING.set_flag(&mut w, self.running);
        OVERFLOW.set_flag(&mut w, self.queue_overflow);
        ERRORS.set(&mut w, self.errors)?;
        BD_INVALID.set_flag(&mut w, self.bd_invalid);
        STALLS.set(&mut w, self.stalls)?;
        STATE.set(&mut w, self.state)?;
        Ok(w[0])
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32, tile: TileKind) -> Result<Self, RegisterError> {
        let w = [word];
        let bd = current_bd(tile);
        let fields = [bd, QUEUE_SIZE, RUNNING, OVERFLOW, ERRORS, BD_INVALID, STALLS, STATE];
        refuse_reserved("channel status", &w, &fields)?;
        Ok(Self {
            current_bd: bd.get(&w),
            queue_size: QUEUE_SIZE.get(&w),
            running: RUNNING.get_flag(&w),
            queue_overflow: OVERFLOW.get_flag(&w),
            errors: ERRORS.get(&w),
            bd_invalid: BD_INVALID.get_flag(&w),
            stalls: STALLS.get(&w),
            state: STATE.get(&w),
        })
    }
}

/// Field of the current descriptor, which is wider on a memory tile.
const fn current_bd(tile: TileKind) -> Field {
    let high = match tile {
        TileKind::Memory => 29,
        TileKind::Shim | TileKind::Core => 27,
    };
    Field::new("current BD", 0, high, 24)
}

/// A wait for one task-complete token from one channel in each tile of a rectangle: the two words of a `TCT` operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenWait {
    /// Direction of the channel.
    pub direction: Direction,
    /// First row.
    pub row: u8,
    /// First column.
    pub column: u8,
    /// Rows.
    pub row_count: u8,
    /// Columns.
    pub column_count: u8,
    /// Channel.
    pub channel: u8,
}

impl TokenWait {
    /// The words `(word, config)`.
    pub fn encode(&self) -> (u32, u32) {
        let direction = match self.direction {
            Direction::S2mm => 0,
            Direction::Mm2s => 1,
        };
        (
            u32::from_le_bytes([direction, self.row, self.column, 0]),
            u32::from_le_bytes([0, self.row_count, self.column_count, self.channel]),
        )
    }

    /// Decodes the words; refuses an unknown direction and reserved bits.
    pub fn decode(word: u32, config: u32) -> Result<Self, RegisterError> {
        let [direction, row, column, reserved] = word.to_le_bytes();
        let [low, row_count, column_count, channel] = config.to_le_bytes();
        for (index, bits) in [u32::from(reserved) << 24, u32::from(low)].into_iter().enumerate() {
            if bits != 0 {
                return Err(RegisterError::Reserved { register: "token wait", word: index, bits });
            }
        }
        let direction = match direction {
            0 => Direction::S2mm,
            1 => Direction::Mm2s,
            other => {
                return Err(RegisterError::TooLarge { field: "token wait direction", value: other.into(), max: 1 });
            }
        };
        Ok(Self { direction, row, column, row_count, column_count, channel })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TILES: [TileKind; 3] = [TileKind::Shim, TileKind::Memory, TileKind::Core];

    #[test]
    fn a_push_has_the_expected_word() {
        let push = QueuePush { start_bd: 7, repeat: 3, issue_token: true };
        assert_eq!(push.encode(TileKind::Shim), Ok(0x8002_0007));
        assert_eq!(QueuePush::decode(0x8002_0007, TileKind::Shim), Ok(push));
        assert!(QueuePush { start_bd: 16, ..push }.encode(TileKind::Shim).is_err());
        assert!(QueuePush { start_bd: 47, ..push }.encode(TileKind::Memory).is_ok());
        assert!(QueuePush { repeat: 0, ..push }.encode(TileKind::Shim).is_err());
        assert!(QueuePush { repeat: 257, ..push }.encode(TileKind::Shim).is_err());
        assert!(QueuePush::decode(0x10, TileKind::Core).is_err());
    }

    #[test]
    fn a_wait_has_the_expected_words() {
        let wait =
            TokenWait { direction: Direction::Mm2s, row: 0, column: 3, row_count: 1, column_count: 1, channel: 1 };
        assert_eq!(wait.encode(), (0x0003_0001, 0x0101_0100));
        assert!(TokenWait::decode(2, 0).is_err());
        assert!(TokenWait::decode(0x0100_0000, 0).is_err());
        assert!(TokenWait::decode(0, 1).is_err());
    }

    #[test]
    fn fields_of_other_channels_are_refused() {
        let reset = ChannelControl { reset: true, ..ChannelControl::default() };
        assert_eq!(reset.encode(TileKind::Core, Direction::Mm2s), Ok(2));
        assert!(reset.encode(TileKind::Shim, Direction::Mm2s).is_err());
        let fot = ChannelControl { fot_mode: 1, ..ChannelControl::default() };
        assert!(fot.encode(TileKind::Core, Direction::Mm2s).is_err());
        assert!(ChannelControl::decode(1, TileKind::Core, Direction::S2mm).is_err());
    }

    proptest! {
        #[test]
        fn words_decode_to_themselves_or_are_refused(word: u32, config: u32, tile in 0usize..3) {
            let tile = TILES[tile];
            // Mostly named bits, so that the accepted half of the space is covered too.
            for word in [word, word & 0x80FF_003F, word & 0x0003_FF1E, word & 0x3F7F_083F, word & 0x00FF_FFFF & !0xFE] {
                for direction in [Direction::S2mm, Direction::Mm2s] {
                    if let Ok(x) = ChannelControl::decode(word, tile, direction) {
                        prop_assert_eq!(x.encode(tile, direction), Ok(word));
                    }
                }
                if let Ok(x) = QueuePush::decode(word, tile) {
                    prop_assert_eq!(x.encode(tile), Ok(word));
                }
                if let Ok(x) = ChannelStatus::decode(word, tile) {
                    prop_assert_eq!(x.encode(tile), Ok(word));
                }
                if let Ok(x) = TokenWait::decode(word, config & !0xFF) {
                    prop_assert_eq!(x.encode(), (word, config & !0xFF));
                }
            }
        }
    }
}
