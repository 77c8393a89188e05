//! Transaction control code: the operations that firmware executes for a run.
//!
//! Two encodings exist: 0.1 (wide) and 1.0 (compact). [`Stream::parse`] is strict: version, rows and device generation
//! must be known, and operation count and total size must agree with what follows. Fields that firmware ignores are
//! kept in [`Tag`] and in the `tail`/`pad` members, so that [`Stream::encode`] gives back the parsed bytes exactly.
//!
//! [`View`] walks a stream without allocation.

mod build;
mod decode;
mod display;
mod encode;

pub use crate::format::words::Words;
pub use build::Builder;
pub use decode::{OpAt, Ops, View};

use crate::format::registers::{RegisterError, TokenWait};
use std::fmt;
use thiserror::Error;

/// Bytes of a stream header.
pub const HEADER_BYTES: usize = 16;
/// Device generation of AIE2 parts.
pub const DEV_GEN_AIE2: u8 = 3;
/// Device generation of AIE2P parts.
pub const DEV_GEN_AIE2P: u8 = 4;
/// Highest device generation that is taken for control code.
pub const DEV_GEN_MAX: u8 = 8;
/// Largest argument index a compact `DDR_PATCH` can hold.
pub const COMPACT_ARGUMENT_MAX: u32 = 255;

/// Encoding of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// Version 0.1, the wide encoding.
    Wide,
    /// Version 1.0, the compact encoding.
    Compact,
}

impl Version {
    /// Major and minor number.
    pub fn numbers(self) -> (u8, u8) {
        match self {
            Self::Wide => (0, 1),
            Self::Compact => (1, 0),
        }
    }

    /// The version with these numbers.
    pub fn from_numbers(major: u8, minor: u8) -> Option<Self> {
        [Self::Wide, Self::Compact].into_iter().find(|v| v.numbers() == (major, minor))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.numbers();
        write!(f, "{major}.{minor}")
    }
}

/// Stream header. Operation count and total size are computed when a stream is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Encoding.
    pub version: Version,
    /// Device generation, e.g. [`DEV_GEN_AIE2P`].
    pub dev_gen: u8,
    /// Columns of the partition.
    pub columns: u8,
    /// Rows of memory tiles.
    pub mem_tile_rows: u8,
    /// Unused bytes 6 and 7.
    pub pad: u16,
}

impl Header {
    /// Header for a partition of `columns`.
    pub fn new(version: Version, dev_gen: u8, columns: u8) -> Self {
        Self { version, dev_gen, columns, mem_tile_rows: 1, pad: 0 }
    }
}

/// Informative bytes of an operation: kept for an exact round trip, without effect.
///
/// Byte positions that carry a field of the operation are zero here and ignored on encoding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tag {
    /// Bytes 1 to 3 (column, row and padding, as far as the operation has them).
    pub bytes: [u8; 3],
    /// Bytes 4 to 7 where the wide encoding leaves them unused.
    pub word: u32,
}

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op<'a> {
    /// Informative bytes.
    pub tag: Tag,
    /// What the operation does.
    pub kind: OpKind<'a>,
}

impl<'a> From<OpKind<'a>> for Op<'a> {
    fn from(kind: OpKind<'a>) -> Self {
        Self { tag: Tag::default(), kind }
    }
}

impl Op<'_> {
    /// A copy that borrows nothing.
    pub fn into_owned(self) -> Op<'static> {
        Op { tag: self.tag, kind: self.kind.into_owned() }
    }
}

/// Effect of an operation. Registers are absolute addresses (column, row and offset) within the partition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpKind<'a> {
    /// Stores a word.
    Write {
        /// Register.
        register: u32,
        /// Value.
        value: u32,
    },
    /// Stores consecutive words.
    BlockWrite {
        /// First register.
        register: u32,
        /// Words.
        data: Words<'a>,
    },
    /// Replaces the bits of `mask`.
    MaskWrite(Masked),
    /// Waits until `register & mask == value`.
    MaskPoll(Masked),
    /// The same, as a busy wait.
    MaskPollBusy(Masked),
    /// Nothing.
    Noop,
    /// Point at which the run may be preempted.
    Preempt {
        /// What must be saved: 0 nothing, 1 memory tiles, 2 all tiles, 3 registers.
        level: u8,
    },
    /// Loads a partition image.
    LoadPdi {
        /// Image id.
        id: u16,
        /// Bytes.
        size_bytes: u32,
        /// Device address; patched by the host.
        address: u64,
    },
    /// Starts loading program memory with the operations that follow.
    LoadPmStart {
        /// Number of operations in the sequence, 24 bits.
        op_count: u32,
        /// Id of the load.
        load_id: u32,
    },
    /// Reserves scratch memory.
    CreateScratchpad {
        /// Use of the memory.
        usage: u8,
        /// Bytes.
        size_bytes: u32,
        /// Offset or address.
        offset: u64,
    },
    /// Changes an entry of the state table.
    UpdateStateTable {
        /// Entry.
        index: u8,
        /// 0 multiply, 1 increment, 2 decrement.
        function: u8,
        /// Operand.
        operand: u32,
    },
    /// Stores a function of a state table entry in a register.
    UpdateReg {
        /// Entry.
        index: u8,
        /// 0 multiply, 1 increment, 2 decrement.
        function: u8,
        /// Operand.
        operand: u32,
        /// Register.
        register: u32,
    },
    /// Updates scratch memory.
    UpdateScratch,
    /// Waits for task-complete tokens.
    Tct {
        /// Direction, first row and first column; see [`TokenWait`].
        word: u32,
        /// Rows, columns and channel.
        config: u32,
    },
    /// Adds the address of a run argument to a buffer descriptor.
    DdrPatch(DdrPatch),
    /// Reads registers: addresses as pairs of words (low, high).
    ReadRegs {
        /// Unused bytes 12 to 15.
        pad: u32,
        /// Low and high word of each register address.
        addresses: Words<'a>,
    },
    /// Records a time stamp.
    RecordTimer {
        /// Id of the record.
        id: u32,
        /// Unused fourth word of the longer form.
        tail: Option<u32>,
    },
    /// Waits for tokens from several columns.
    MergeSync {
        /// Tokens.
        tokens: u8,
        /// Columns.
        columns: u8,
        /// Unused bytes 10 and 11.
        pad: u16,
    },
}

/// Operand of the masked operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Masked {
    /// Register.
    pub register: u32,
    /// Value.
    pub value: u32,
    /// Bits that count.
    pub mask: u32,
    /// Unused eighth word of the 32-byte wide form; `None` is the 28-byte form. Absent in the compact encoding.
    pub tail: Option<u32>,
}

/// Patch of a buffer descriptor's address by a run argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DdrPatch {
    /// Address of the descriptor's word that receives the low half of the address.
    pub register: u32,
    /// Index of the argument.
    pub argument: u32,
    /// Byte offset added to the argument's address.
    pub offset: u64,
    /// Form of the operation.
    pub form: DdrPatchForm,
}

/// The two forms of `DDR_PATCH`, told apart by size. The long one may also appear in compact streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DdrPatchForm {
    /// 48 bytes.
    Long {
        /// Unused bytes 8 to 15.
        base: u64,
        /// Action code.
        action: u32,
        /// Unused bytes 20 to 23.
        pad: u32,
    },
    /// 24 bytes; compact encoding only.
    Short {
        /// Unused bytes 13 to 15.
        pad: [u8; 3],
    },
}

impl DdrPatchForm {
    /// The form that `version` uses, with unused fields zero.
    pub fn of(version: Version) -> Self {
        match version {
            Version::Wide => Self::Long { base: 0, action: 0, pad: 0 },
            Version::Compact => Self::Short { pad: [0; 3] },
        }
    }
}

impl OpKind<'_> {
    /// Opcode byte.
    pub fn opcode(&self) -> u8 {
        match self {
            Self::Write { .. } => opcode::WRITE,
            Self::BlockWrite { .. } => opcode::BLOCKWRITE,
            Self::MaskWrite(_) => opcode::MASKWRITE,
            Self::MaskPoll(_) => opcode::MASKPOLL,
            Self::MaskPollBusy(_) => opcode::MASKPOLL_BUSY,
            Self::Noop => opcode::NOOP,
            Self::Preempt { .. } => opcode::PREEMPT,
            Self::LoadPdi { .. } => opcode::LOADPDI,
            Self::LoadPmStart { .. } => opcode::LOAD_PM_START,
            Self::CreateScratchpad { .. } => opcode::CREATE_SCRATCHPAD,
            Self::UpdateStateTable { .. } => opcode::UPDATE_STATE_TABLE,
            Self::UpdateReg { .. } => opcode::UPDATE_REG,
            Self::UpdateScratch => opcode::UPDATE_SCRATCH,
            Self::Tct { .. } => opcode::TCT,
            Self::DdrPatch(_) => opcode::DDR_PATCH,
            Self::ReadRegs { .. } => opcode::READ_REGS,
            Self::RecordTimer { .. } => opcode::RECORD_TIMER,
            Self::MergeSync { .. } => opcode::MERGE_SYNC,
        }
    }

    /// Name of the opcode.
    pub fn name(&self) -> &'static str {
        opcode::name(self.opcode()).unwrap_or("?")
    }

    /// The typed wait of a `TCT` operation; `None` for other operations.
    pub fn token_wait(&self) -> Option<Result<TokenWait, RegisterError>> {
        match self {
            Self::Tct { word, config } => Some(TokenWait::decode(*word, *config)),
            _ => None,
        }
    }

    /// A copy that borrows nothing.
    pub fn into_owned(self) -> OpKind<'static> {
        match self {
            Self::BlockWrite { register, data } => OpKind::BlockWrite { register, data: data.into_owned() },
            Self::ReadRegs { pad, addresses } => OpKind::ReadRegs { pad, addresses: addresses.into_owned() },
            Self::Write { register, value } => OpKind::Write { register, value },
            Self::MaskWrite(x) => OpKind::MaskWrite(x),
            Self::MaskPoll(x) => OpKind::MaskPoll(x),
            Self::MaskPollBusy(x) => OpKind::MaskPollBusy(x),
            Self::Noop => OpKind::Noop,
            Self::Preempt { level } => OpKind::Preempt { level },
            Self::LoadPdi { id, size_bytes, address } => OpKind::LoadPdi { id, size_bytes, address },
            Self::LoadPmStart { op_count, load_id } => OpKind::LoadPmStart { op_count, load_id },
            Self::CreateScratchpad { usage, size_bytes, offset } => {
                OpKind::CreateScratchpad { usage, size_bytes, offset }
            }
            Self::UpdateStateTable { index, function, operand } => {
                OpKind::UpdateStateTable { index, function, operand }
            }
            Self::UpdateReg { index, function, operand, register } => {
                OpKind::UpdateReg { index, function, operand, register }
            }
            Self::UpdateScratch => OpKind::UpdateScratch,
            Self::Tct { word, config } => OpKind::Tct { word, config },
            Self::DdrPatch(x) => OpKind::DdrPatch(x),
            Self::RecordTimer { id, tail } => OpKind::RecordTimer { id, tail },
            Self::MergeSync { tokens, columns, pad } => OpKind::MergeSync { tokens, columns, pad },
        }
    }
}

/// Opcode numbers.
pub mod opcode {
    /// Store a word.
    pub const WRITE: u8 = 0;
    /// Store consecutive words.
    pub const BLOCKWRITE: u8 = 1;
    /// Fill consecutive words; expanded to [`BLOCKWRITE`] before serialisation.
    pub const BLOCKSET: u8 = 2;
    /// Replace bits.
    pub const MASKWRITE: u8 = 3;
    /// Wait for bits.
    pub const MASKPOLL: u8 = 4;
    /// Nothing.
    pub const NOOP: u8 = 5;
    /// Preemption point.
    pub const PREEMPT: u8 = 6;
    /// Busy wait for bits.
    pub const MASKPOLL_BUSY: u8 = 7;
    /// Load a partition image.
    pub const LOADPDI: u8 = 8;
    /// Start loading program memory.
    pub const LOAD_PM_START: u8 = 9;
    /// Reserve scratch memory.
    pub const CREATE_SCRATCHPAD: u8 = 10;
    /// Change a state table entry.
    pub const UPDATE_STATE_TABLE: u8 = 11;
    /// Store a function of a state table entry.
    pub const UPDATE_REG: u8 = 12;
    /// Update scratch memory.
    pub const UPDATE_SCRATCH: u8 = 13;
    /// Configure a shim descriptor; never leaves the host.
    pub const CONFIG_SHIMDMA_BD: u8 = 14;
    /// Configure a shim descriptor from a DMA buffer; never leaves the host.
    pub const CONFIG_SHIMDMA_DMABUF_BD: u8 = 15;
    /// Wait for tokens.
    pub const TCT: u8 = 128;
    /// Patch a descriptor's address.
    pub const DDR_PATCH: u8 = 129;
    /// Read registers.
    pub const READ_REGS: u8 = 130;
    /// Record a time stamp.
    pub const RECORD_TIMER: u8 = 131;
    /// Wait for tokens of several columns.
    pub const MERGE_SYNC: u8 = 132;
    /// End of a program memory load; a marker inside the assembler.
    pub const LOAD_PM_END: u8 = 200;

    /// Name of an opcode, also of those that are never serialised.
    pub fn name(opcode: u8) -> Option<&'static str> {
        Some(match opcode {
            WRITE => "WRITE",
            BLOCKWRITE => "BLOCKWRITE",
            BLOCKSET => "BLOCKSET",
            MASKWRITE => "MASKWRITE",
            MASKPOLL => "MASKPOLL",
            NOOP => "NOOP",
            PREEMPT => "PREEMPT",
            MASKPOLL_BUSY => "MASKPOLL_BUSY",
            LOADPDI => "LOADPDI",
            LOAD_PM_START => "LOAD_PM_START",
            CREATE_SCRATCHPAD => "CREATE_SCRATCHPAD",
            UPDATE_STATE_TABLE => "UPDATE_STATE_TABLE",
            UPDATE_REG => "UPDATE_REG",
            UPDATE_SCRATCH => "UPDATE_SCRATCH",
            CONFIG_SHIMDMA_BD => "CONFIG_SHIMDMA_BD",
            CONFIG_SHIMDMA_DMABUF_BD => "CONFIG_SHIMDMA_DMABUF_BD",
            TCT => "TCT",
            DDR_PATCH => "DDR_PATCH",
            READ_REGS => "READ_REGS",
            RECORD_TIMER => "RECORD_TIMER",
            MERGE_SYNC => "MERGE_SYNC",
            LOAD_PM_END => "LOAD_PM_END",
            _ => return None,
        })
    }

    /// Whether the opcode exists in the assembler or on the host, but never in a stream.
    pub fn is_host_only(opcode: u8) -> bool {
        matches!(opcode, BLOCKSET | CONFIG_SHIMDMA_BD | CONFIG_SHIMDMA_DMABUF_BD | LOAD_PM_END)
    }
}

/// A whole stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    /// Header.
    pub header: Header,
    /// Operations in order.
    pub ops: Vec<Op<'static>>,
}

impl Stream {
    /// Parses a stream that fills `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, TxnError> {
        let view = View::new(bytes)?;
        if view.len_bytes() != bytes.len() {
            return Err(TxnError::Trailing { declared_bytes: view.len_bytes(), found_bytes: bytes.len() });
        }
        view.to_stream()
    }

    /// Parses the stream at the start of `bytes` and says how many bytes it has.
    pub fn parse_prefix(bytes: &[u8]) -> Result<(Self, usize), TxnError> {
        let view = View::new(bytes)?;
        Ok((view.to_stream()?, view.len_bytes()))
    }

    /// The stream's bytes, including the header.
    pub fn encode(&self) -> Result<Vec<u8>, TxnError> {
        encode::stream(self)
    }
}

/// A stream that cannot be read or written.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TxnError {
    /// Fewer bytes than a header.
    #[error("control code has {found_bytes} bytes; its header alone needs {HEADER_BYTES}")]
    NoHeader {
        /// Bytes found.
        found_bytes: usize,
    },
    /// Not a version this can read.
    #[error(
        "control code has version {major}.{minor} (first words {first:#010x} {second:#010x}); wanted 0.1 or 1.0: \
         the file is not transaction control code, or its header was not initialised"
    )]
    Version {
        /// Major number found.
        major: u8,
        /// Minor number found.
        minor: u8,
        /// First header word.
        first: u32,
        /// Second header word.
        second: u32,
    },
    /// A header field has a value no known device has.
    #[error("control code header: {field} is {found}, wanted {wanted}")]
    Header {
        /// Field name.
        field: &'static str,
        /// Value found.
        found: u32,
        /// Values accepted.
        wanted: &'static str,
    },
    /// The declared size is not what is there.
    #[error("control code declares {declared_bytes} bytes, but {found_bytes} are there")]
    Size {
        /// Size in the header.
        declared_bytes: u32,
        /// Bytes found.
        found_bytes: usize,
    },
    /// Bytes follow the stream where none are expected.
    #[error("control code declares {declared_bytes} bytes and is followed by more ({found_bytes} in all)")]
    Trailing {
        /// Size in the header.
        declared_bytes: usize,
        /// Bytes found.
        found_bytes: usize,
    },
    /// The declared number of operations is not what is there.
    #[error("control code declares {declared} operations, but {found} fill its {size_bytes} bytes")]
    OpCount {
        /// Count in the header.
        declared: u32,
        /// Operations found.
        found: u32,
        /// Declared size.
        size_bytes: usize,
    },
    /// An operation cannot be read or written.
    #[error("operation {index} at byte {at_bytes}: {fault}")]
    Op {
        /// Index of the operation.
        index: u32,
        /// Byte offset from the start of the stream.
        at_bytes: usize,
        /// What is wrong.
        fault: OpFault,
    },
    /// A stream too long for its header.
    #[error("control code of {ops} operations and {size_bytes} bytes does not fit its 32-bit header fields")]
    TooLong {
        /// Operations.
        ops: usize,
        /// Bytes.
        size_bytes: usize,
    },
}

/// What is wrong with an operation.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpFault {
    /// No such opcode.
    #[error("unknown opcode {opcode}")]
    Unknown {
        /// Opcode found.
        opcode: u8,
    },
    /// An opcode that is never serialised.
    #[error("{name} is never part of a stream")]
    HostOnly {
        /// Opcode name.
        name: &'static str,
    },
    /// The operation reaches past the end.
    #[error("{name} needs {needed_bytes} bytes, {left_bytes} are left")]
    Truncated {
        /// Opcode name.
        name: &'static str,
        /// Bytes of the operation.
        needed_bytes: usize,
        /// Bytes left in the stream.
        left_bytes: usize,
    },
    /// The size field has a value the operation cannot have.
    #[error("{name}: size field is {found_bytes}, wanted {wanted}")]
    Size {
        /// Opcode name.
        name: &'static str,
        /// Value found.
        found_bytes: u32,
        /// Values accepted.
        wanted: &'static str,
    },
    /// A register address above 32 bits.
    #[error("{name}: register address {address:#x} does not fit 32 bits")]
    Register {
        /// Opcode name.
        name: &'static str,
        /// Address found.
        address: u64,
    },
    /// A count that contradicts the size.
    #[error("{name}: {count} entries do not fill {size_bytes} bytes")]
    Count {
        /// Opcode name.
        name: &'static str,
        /// Entries declared.
        count: u32,
        /// Size of the operation.
        size_bytes: u32,
    },
    /// A value that the encoding has no room for.
    #[error("{name}: {field} {value:#x} cannot be expressed in version {version}")]
    Inexpressible {
        /// Opcode name.
        name: &'static str,
        /// Field.
        field: &'static str,
        /// Value.
        value: u64,
        /// Encoding.
        version: Version,
    },
}

#[cfg(test)]
mod tests;
