//! Core programs: what lies behind the shim's streams.

use super::stream::{StreamSet, TileMemory};
use npuhal_amdxdna::format::registers::Direction;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Tile whose data memory holds the identification of the bound program: column, row.
pub const ID_TILE: (u8, u8) = (0, 2);
/// Offset of the identification in the tile's data memory.
pub const ID_OFFSET: u32 = 0xFF00;
/// First word of an identification: "NPUV".
pub const ID_MAGIC: u32 = u32::from_le_bytes(*b"NPUV");
/// Most dimensions of a program.
pub const MAX_DIMENSIONS: usize = 32;

/// One stream between a shim channel and the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey {
    /// Column of the shim tile, from the start of the partition.
    pub column: u8,
    /// Direction of the shim channel: memory to stream is the program's input.
    pub direction: Direction,
    /// Shim channel.
    pub channel: u8,
    /// Packet id, where the shim sends packets.
    pub packet: Option<u8>,
}

impl StreamKey {
    /// Input of the program: circuit-switched data of shim channel `channel` in `column`.
    #[must_use]
    pub const fn input(column: u8, channel: u8) -> Self {
        Self { column, direction: Direction::Mm2s, channel, packet: None }
    }

    /// Output of the program into shim channel `channel` of `column`.
    #[must_use]
    pub const fn output(column: u8, channel: u8) -> Self {
        Self { column, direction: Direction::S2mm, channel, packet: None }
    }
}

impl fmt::Display for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {} {}{}", self.column, self.direction, self.channel)?;
        self.packet.map_or(Ok(()), |packet| write!(f, " packet {packet}"))
    }
}

/// What one step of a program did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It moved data; there may be more to do.
    Progress,
    /// It needs data or room that is not there.
    Waiting,
}

/// The streams and memories that a program sees.
pub struct Streams<'a> {
    pub(super) streams: &'a mut dyn StreamSet,
    pub(super) memory: &'a TileMemory,
}

impl Streams<'_> {
    /// Takes exactly `dst.len()` bytes (a multiple of 4) from an input, or nothing and returns `false`.
    #[must_use]
    pub fn read(&mut self, input: StreamKey, dst: &mut [u8]) -> bool {
        self.streams.read(input, dst)
    }

    /// Puts all of `src` (a multiple of 4 bytes) into an output, or nothing and returns `false`.
    #[must_use]
    pub fn write(&mut self, output: StreamKey, src: &[u8]) -> bool {
        self.streams.write(output, src)
    }

    /// Whether [`Streams::write`] of `len_bytes` would succeed now.
    #[must_use]
    pub fn has_room(&self, output: StreamKey, len_bytes: usize) -> bool {
        self.streams.has_room(output, len_bytes)
    }

    /// Whether a task waits for data of an output whose stream is empty. Cores cannot know this; it is for stand-ins
    /// that give every task what it wants.
    #[must_use]
    pub fn is_wanted(&self, output: StreamKey) -> bool {
        self.streams.is_wanted(output)
    }

    /// A word of the data memory of a core or memory tile: what configuration and control code wrote there.
    #[must_use]
    pub fn data_word(&self, column: u8, row: u8, offset: u32) -> u32 {
        self.memory.load(column, row, offset)
    }
}

impl fmt::Debug for Streams<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Streams")
    }
}

/// The cores of a design, as far as the shim's streams show them.
///
/// A program is a state machine: [`CoreProgram::step`] moves one small portion of data (a tile, a row) and returns, so
/// that transfers advance no further than the control code waits for. It keeps what it has read but not used.
pub trait CoreProgram: Send + fmt::Debug {
    /// Does the next small portion of work.
    fn step(&mut self, streams: &mut Streams<'_>) -> Step;

    /// Why the program is in the middle of something: consumed input without the output it owes. `None` between two
    /// pieces of work, where a run may end.
    fn unfinished(&self) -> Option<String>;

    /// Bytes that the design's memories buffer behind an input while the cores are busy.
    fn input_buffer_bytes(&self, input: StreamKey) -> usize {
        let _ = input;
        64 << 10
    }
}

/// Makes a program from its dimensions; the error says what is impossible about them.
type Factory = dyn Fn(&[u32]) -> Result<Box<dyn CoreProgram>, String> + Send + Sync;

/// Core programs by id. A configuration image names one of them. Ids below 0x100 belong to this crate.
#[derive(Clone, Default)]
pub struct CoreProgramTable {
    entries: BTreeMap<u32, (&'static str, Arc<Factory>)>,
}

impl CoreProgramTable {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The programs of this crate: [`crate::kit::COPY`], [`crate::kit::VECTOR_SCALE`], [`crate::kit::QWEN3`] and
    /// those of [`crate::design::xdna1`].
    #[must_use]
    pub fn builtin() -> Self {
        let mut table = Self::new();
        super::builtin::register(&mut table);
        crate::design::qwen3::register(&mut table);
        crate::design::xdna1::register(&mut table);
        table
    }

    /// Adds a program.
    ///
    /// # Errors
    /// The name of the program that has the id already.
    pub fn register<F>(&mut self, id: u32, name: &'static str, make: F) -> Result<(), String>
    where
        F: Fn(&[u32]) -> Result<Box<dyn CoreProgram>, String> + Send + Sync + 'static,
    {
        if let Some((taken, _)) = self.entries.get(&id) {
            return Err(format!("core program id {id:#x} of {name} belongs to {taken}"));
        }
        self.entries.insert(id, (name, Arc::new(make)));
        Ok(())
    }

    /// Ids and names.
    pub fn entries(&self) -> impl Iterator<Item = (u32, &'static str)> + '_ {
        self.entries.iter().map(|(id, (name, _))| (*id, *name))
    }

    pub(super) fn make(&self, description: &ProgramDescription) -> Result<Box<dyn CoreProgram>, String> {
        let (name, make) = self.entries.get(&description.id).ok_or_else(|| {
            let known: Vec<_> = self.entries().map(|(id, name)| format!("{id:#x} {name}")).collect();
            format!("no core program {:#x}; there are {}", description.id, known.join(", "))
        })?;
        make(&description.dimensions).map_err(|reason| format!("core program {name}: {reason}"))
    }
}

impl fmt::Debug for CoreProgramTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.entries()).finish()
    }
}

/// Which program a configuration binds, and its dimensions: the identification words.
///
/// | Word at [`ID_OFFSET`] of [`ID_TILE`] | Content |
/// |---|---|
/// | 0 | [`ID_MAGIC`] |
/// | 1 | id of the program in the [`CoreProgramTable`] |
/// | 2 | number of dimensions, at most [`MAX_DIMENSIONS`] |
/// | 3… | dimensions; their meaning is the program's |
///
/// The program is bound when the core of [`ID_TILE`] is enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramDescription {
    /// Id.
    pub id: u32,
    /// Dimensions.
    pub dimensions: Vec<u32>,
}

impl ProgramDescription {
    /// The identification words.
    #[must_use]
    pub fn words(&self) -> Vec<u32> {
        let mut words = vec![ID_MAGIC, self.id, self.dimensions.len() as u32];
        words.extend(&self.dimensions);
        words
    }

    /// Reads the words from `load(word index)`; the error says what is wrong.
    pub(super) fn read(load: impl Fn(u32) -> u32) -> Result<Self, String> {
        if load(0) != ID_MAGIC {
            return Err(format!("no identification: the first word is {:#010x}, wanted {ID_MAGIC:#010x}", load(0)));
        }
        let count = load(2);
        if count as usize > MAX_DIMENSIONS {
            return Err(format!("{count} dimensions; at most {MAX_DIMENSIONS}"));
        }
        Ok(Self { id: load(1), dimensions: (0..count).map(|i| load(3 + i)).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::{CoreProgramTable, ProgramDescription};

    #[test]
    fn identifications_round_trip() {
        let description = ProgramDescription { id: 7, dimensions: vec![1, 2, 3] };
        let words = description.words();
        let load = |i: u32| words.get(i as usize).copied().unwrap_or(0);
        assert_eq!(ProgramDescription::read(load), Ok(description));
        assert!(ProgramDescription::read(|_| 0).unwrap_err().contains("no identification"));
        assert!(ProgramDescription::read(|i| if i == 0 { super::ID_MAGIC } else { 99 }).is_err());
    }

    #[test]
    fn ids_are_unique_and_unknown_ones_are_named() {
        let mut table = CoreProgramTable::builtin();
        let error = table.register(crate::kit::COPY, "mine", |_| Err(String::new())).unwrap_err();
        assert!(error.contains("belongs to copy"), "{error}");
        let error = table.make(&ProgramDescription { id: 0x999, dimensions: Vec::new() }).unwrap_err();
        assert!(error.starts_with("no core program 0x999; there are 0x1 copy"), "{error}");
    }
}
