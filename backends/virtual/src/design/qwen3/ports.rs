//! Where control code meets the cores: streams, and words in their memories.

use crate::array::program::StreamKey;
use npuhal_amdxdna::format::registers::Direction;

/// Words of the attention cores that hold the context length: column, row, offset in data memory.
pub const CONTEXT_WORDS: [(u8, u8, u32); 8] = [
    (3, 2, 0x2400),
    (3, 3, 0x8400),
    (3, 4, 0x2400),
    (3, 5, 0x8400),
    (4, 2, 0x2400),
    (4, 3, 0x8400),
    (4, 4, 0x2400),
    (4, 5, 0x8400),
];
/// Columns of the cores that multiply; each holds the mode at [`MODE_OFFSET`].
pub const MODE_COLUMNS: [u8; 4] = [0, 1, 6, 7];
/// Rows of these cores.
pub const MODE_ROWS: std::ops::RangeInclusive<u8> = 2..=5;
/// Offset of the mode in their data memory.
pub const MODE_OFFSET: u32 = 0x8200;
/// The same for the core that norms, adds and distributes.
pub const HUB_MODE_WORD: (u8, u8, u32) = (2, 2, 0xC800);
/// Lock that control code sets to 1 when the mode stands.
pub const START_LOCK: u8 = 6;
/// Column and channel of the streams of weights, in the order of the groups.
pub const WEIGHT_STREAMS: [(u8, u8); 8] = [(0, 0), (0, 1), (1, 0), (1, 1), (6, 0), (6, 1), (7, 0), (7, 1)];

/// Residual stream, in.
pub(super) const ACTIVATIONS: StreamKey = packet(2, 0, 0);
/// Rotation and norms of heads.
pub(super) const ROTATION: StreamKey = packet(2, 0, 1);
/// Norms of the residual stream.
pub(super) const NORMS: StreamKey = packet(2, 1, 0);
/// Residual stream or logits, out.
pub(super) const RESULT: StreamKey = StreamKey::output(2, 1);

/// New rows of the cache, by half of the heads.
pub(super) const fn new_row(half: usize) -> StreamKey {
    StreamKey::output(3 + half as u8, 0)
}

/// Blocks of keys, by half of the heads.
pub(super) const fn keys(half: usize) -> StreamKey {
    StreamKey::input(3, half as u8)
}

/// Blocks of values, by half of the heads.
pub(super) const fn values(half: usize) -> StreamKey {
    StreamKey::input(4, half as u8)
}

/// Stream of weights.
pub(super) const fn weights(index: usize) -> StreamKey {
    let (column, channel) = WEIGHT_STREAMS[index];
    StreamKey::input(column, channel)
}

const fn packet(column: u8, channel: u8, id: u8) -> StreamKey {
    StreamKey { column, direction: Direction::Mm2s, channel, packet: Some(id) }
}
