//! Command packets, word by word.
//!
//! A packet is a header word and a body. The driver changes the state in the header when the command ends, and may
//! overwrite the body of a command that failed: a packet is written whole before every submission.

use crate::driver::BoHandle;
use std::fmt;

/// Most runs of one chain: what fits every driver's slot for chained commands.
pub const CHAIN_MAX_RUNS: usize = 24;
/// Size of every command buffer.
pub const COMMAND_BYTES: u64 = 4096;
/// Value of a kernel's mode argument: run a transaction and apply its address patches.
pub const MODE_TRANSACTION: u64 = 3;
/// Most register words of a single [`Opcode::StartCu`].
pub const START_CU_MAX_WORDS: usize = 19;

const STATE_MASK: u32 = 0xF;
const EXTRA_MASKS_SHIFT: u32 = 10;
const COUNT_SHIFT: u32 = 12;
const COUNT_MAX: usize = 0x7FF;
/// Room for the words of most packets.
const TYPICAL_WORDS: usize = 32;
const OPCODE_SHIFT: u32 = 23;
const TYPE_CU: u32 = 3 << 28;
const CHAIN_FIXED_WORDS: usize = 6;

/// State in the header of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum CommandState {
    /// Written by the client, or refused when it was to run.
    New = 1,
    /// Queued.
    Queued = 2,
    /// Running.
    Running = 3,
    /// Ended well.
    Completed = 4,
    /// The device reported an error.
    Error = 5,
    /// Did not run, or was ended before its time.
    Abort = 6,
    /// Handed to the device.
    Submitted = 7,
    /// The driver's watch-dog fired.
    Timeout = 8,
    /// The firmware did not answer.
    NoResponse = 9,
}

impl CommandState {
    /// State in a header word; `None` for a number without meaning.
    #[must_use]
    pub const fn of_header(header: u32) -> Option<Self> {
        Some(match header & STATE_MASK {
            1 => Self::New,
            2 => Self::Queued,
            3 => Self::Running,
            4 => Self::Completed,
            5 => Self::Error,
            6 => Self::Abort,
            7 => Self::Submitted,
            8 => Self::Timeout,
            9 => Self::NoResponse,
            _ => return None,
        })
    }
}

impl fmt::Display for CommandState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "NEW",
            Self::Queued => "QUEUED",
            Self::Running => "RUNNING",
            Self::Completed => "COMPLETED",
            Self::Error => "ERROR",
            Self::Abort => "ABORT",
            Self::Submitted => "SUBMITTED",
            Self::Timeout => "TIMEOUT",
            Self::NoResponse => "NORESPONSE",
        })
    }
}

/// Whether the state in `header` is final: numbers from 4 on, as the reference client has it.
#[must_use]
pub const fn is_final(header: u32) -> bool {
    header & STATE_MASK >= CommandState::Completed as u32 && header & STATE_MASK != CommandState::Submitted as u32
}

/// What a packet asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Opcode {
    /// Run a compute unit with a register map.
    StartCu = 0,
    /// Run the packets of a list.
    Chain = 19,
    /// Run control code.
    StartNpu = 20,
    /// Run control code with code to save and restore the array.
    StartNpuPreempt = 21,
    /// Run control code of a full ELF.
    StartNpuPreemptElf = 22,
}

impl Opcode {
    /// Name in the driver's header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::StartCu => "START_CU",
            Self::Chain => "CMD_CHAIN",
            Self::StartNpu => "START_NPU",
            Self::StartNpuPreempt => "START_NPU_PREEMPT",
            Self::StartNpuPreemptElf => "START_NPU_PREEMPT_ELF",
        }
    }
}

/// A piece of code in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CodeRef {
    /// Device address; 0 for no code.
    pub address: u64,
    /// Length in bytes.
    pub len_bytes: u32,
}

/// A packet as it is written to a command buffer, header first, in state NEW.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    opcode: Opcode,
    words: Vec<u32>,
    /// The words behind the header, as they are copied to the command buffer at every submission.
    body: Vec<u8>,
}

/// A packet that its header cannot describe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a {} packet of {words} words; the most is {limit}", opcode.name())]
pub struct PacketTooLong {
    /// What it was to ask for.
    pub opcode: Opcode,
    /// Words behind the header.
    pub words: usize,
    /// Most words.
    pub limit: usize,
}

impl Packet {
    /// Runs compute unit `unit` with `registers`.
    ///
    /// # Errors
    /// [`PacketTooLong`].
    pub fn start_cu(unit: u32, registers: &[u32]) -> Result<Self, PacketTooLong> {
        let mut packet = Self::masked(Opcode::StartCu, Some(unit));
        packet.words.extend_from_slice(registers);
        packet.sealed(TYPE_CU)
    }

    /// Runs control code, on compute unit `unit` where the context has any; `first_argument` is the 8-byte value of the
    /// kernel's first argument (the mode for a partial ELF).
    ///
    /// # Errors
    /// [`PacketTooLong`].
    pub fn start_npu(unit: Option<u32>, code: CodeRef, first_argument: u64) -> Result<Self, PacketTooLong> {
        let mut packet = Self::masked(Opcode::StartNpu, unit);
        packet.push_u64(code.address);
        packet.words.extend([code.len_bytes, 0]);
        packet.push_u64(first_argument);
        packet.sealed(TYPE_CU)
    }

    /// Runs control code with code to save and restore the array: [`Opcode::StartNpuPreemptElf`] for a full ELF
    /// (`is_full_elf`), otherwise [`Opcode::StartNpuPreempt`].
    ///
    /// # Errors
    /// [`PacketTooLong`].
    pub fn start_preemptible(
        is_full_elf: bool,
        unit: Option<u32>,
        code: CodeRef,
        save: CodeRef,
        restore: CodeRef,
        first_argument: u64,
    ) -> Result<Self, PacketTooLong> {
        let opcode = if is_full_elf { Opcode::StartNpuPreemptElf } else { Opcode::StartNpuPreempt };
        let mut packet = Self::masked(opcode, unit);
        for part in [code, save, restore] {
            packet.push_u64(part.address);
        }
        packet.words.extend([code.len_bytes, save.len_bytes, restore.len_bytes, 0]);
        packet.push_u64(first_argument);
        packet.sealed(TYPE_CU)
    }

    /// Runs the packets in `commands`, in order.
    ///
    /// # Errors
    /// [`PacketTooLong`] for more than [`CHAIN_MAX_RUNS`].
    pub fn chain(commands: &[BoHandle]) -> Result<Self, PacketTooLong> {
        let words = CHAIN_FIXED_WORDS + 2 * commands.len();
        if commands.len() > CHAIN_MAX_RUNS {
            let limit = CHAIN_FIXED_WORDS + 2 * CHAIN_MAX_RUNS;
            return Err(PacketTooLong { opcode: Opcode::Chain, words, limit });
        }
        let mut packet = Self { opcode: Opcode::Chain, words: Vec::with_capacity(1 + words), body: Vec::new() };
        packet.words.extend([0, commands.len() as u32, 0, 0, 0, 0, 0]);
        for command in commands {
            packet.push_u64(u64::from(command.0));
        }
        packet.sealed(0)
    }

    /// What it asks for.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// Header and body.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The header word, in state NEW.
    #[must_use]
    pub fn header(&self) -> u32 {
        self.words[0]
    }

    /// The words behind the header, as bytes.
    #[must_use]
    pub fn body_bytes(&self) -> &[u8] {
        &self.body
    }

    /// Room for the header, then the mask words that name the compute unit (one empty word for none).
    fn masked(opcode: Opcode, unit: Option<u32>) -> Self {
        let mut words = Vec::with_capacity(TYPICAL_WORDS);
        words.resize(2 + unit.map_or(0, |unit| unit as usize / 32), 0);
        if let (Some(unit), Some(mask)) = (unit, words.last_mut()) {
            *mask = 1 << (unit % 32);
        }
        words[0] = (words.len() as u32 - 2) << EXTRA_MASKS_SHIFT;
        Self { opcode, words, body: Vec::new() }
    }

    fn push_u64(&mut self, value: u64) {
        self.words.extend([value as u32, (value >> 32) as u32]);
    }

    fn sealed(mut self, kind: u32) -> Result<Self, PacketTooLong> {
        let count = self.words.len() - 1;
        let limit = COUNT_MAX.min(COMMAND_BYTES as usize / 4 - 1);
        if count > limit {
            return Err(PacketTooLong { opcode: self.opcode, words: count, limit });
        }
        self.words[0] |=
            kind | ((self.opcode as u32) << OPCODE_SHIFT) | ((count as u32) << COUNT_SHIFT) | CommandState::New as u32;
        self.body = self.words[1..].iter().map(|word| word.to_le_bytes()).collect::<Vec<_>>().into_flattened();
        Ok(self)
    }
}

/// Byte offset of the index of the failing run in a chain's buffer.
pub const CHAIN_ERROR_INDEX_AT: u64 = 12;

/// What newer firmware says about a command that timed out. It stands where the body of the command was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthRecord {
    /// Index of the operation that was being executed.
    pub txn_op_index: u32,
    /// Program counter of the context.
    pub context_pc: u32,
    /// Type of the fatal error.
    pub fatal_error_type: u32,
    /// Type of the exception.
    pub exception_type: u32,
    /// Program counter of the exception.
    pub exception_pc: u32,
    /// Module of the firmware.
    pub app_module: u32,
}

impl HealthRecord {
    /// Size of the record, which starts behind the header.
    pub const LEN_BYTES: usize = 32;

    /// Reads the record from the bytes behind the header. `None` where there is no record: any version word other than 1,
    /// e.g. the packet's own body or the fill of a failed command.
    #[must_use]
    pub fn decode(body: &[u8; Self::LEN_BYTES]) -> Option<Self> {
        let word = |i: usize| u32::from_le_bytes([body[4 * i], body[4 * i + 1], body[4 * i + 2], body[4 * i + 3]]);
        (word(0) == 1 && word(1) == 0).then(|| Self {
            txn_op_index: word(2),
            context_pc: word(3),
            fatal_error_type: word(4),
            exception_type: word(5),
            exception_pc: word(6),
            app_module: word(7),
        })
    }
}

impl fmt::Display for HealthRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "health record: operation {}, context pc {:#x}, fatal error {:#x}, exception {:#x} at {:#x}, module {:#x}",
            self.txn_op_index,
            self.context_pc,
            self.fatal_error_type,
            self.exception_type,
            self.exception_pc,
            self.app_module
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{CodeRef, CommandState, HealthRecord, Packet, is_final};
    use crate::driver::BoHandle;

    const CODE: CodeRef = CodeRef { address: 0x0402_8000, len_bytes: 0x10AF8 };

    #[test]
    fn header_words_are_those_of_the_reference_client() {
        let registers = [0; 15];
        assert_eq!(Packet::start_cu(0, &registers).unwrap().header(), 0x3001_0001);
        assert_eq!(Packet::start_npu(Some(0), CODE, 3).unwrap().header(), 0x3A00_7001);
        let preempt = |full| Packet::start_preemptible(full, None, CODE, CodeRef::default(), CodeRef::default(), 7);
        assert_eq!(preempt(false).unwrap().header(), 0x3A80_D001);
        assert_eq!(preempt(true).unwrap().header(), 0x3B00_D001);
        let chain = Packet::chain(&[BoHandle(10), BoHandle(11), BoHandle(12)]).unwrap();
        assert_eq!(chain.header(), 0x0980_C001);
        assert_eq!(chain.words(), [0x0980_C001, 3, 0, 0, 0, 0, 0, 10, 0, 11, 0, 12, 0]);
    }

    #[test]
    fn bodies_are_those_of_the_reference_client() {
        let npu = Packet::start_npu(Some(0), CODE, 3).unwrap();
        assert_eq!(npu.words(), [0x3A00_7001, 1, 0x0402_8000, 0, 0x10AF8, 0, 3, 0]);
        let code = CodeRef { address: 0x0402_0000, len_bytes: 0x200 };
        let save = CodeRef { address: 0x0402_8000, len_bytes: 0x60 };
        let restore = CodeRef { address: 0x0403_0000, len_bytes: 0x60 };
        let elf = Packet::start_preemptible(true, None, code, save, restore, 0x7E12_6161_7000).unwrap();
        assert_eq!(
            elf.words(),
            [0x3B00_D001, 0, 0x0402_0000, 0, 0x0402_8000, 0, 0x0403_0000, 0, 0x200, 0x60, 0x60, 0, 0x6161_7000, 0x7E12]
        );
    }

    #[test]
    fn units_beyond_the_first_word_take_extra_masks() {
        let packet = Packet::start_cu(1, &[9]).unwrap();
        assert_eq!(packet.words(), [0x3000_2001, 2, 9]);
        let packet = Packet::start_cu(33, &[9]).unwrap();
        assert_eq!(packet.words(), [0x3000_3401, 0, 2, 9]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Packet::chain(&[BoHandle(1); 24]).is_ok());
        assert!(Packet::chain(&[BoHandle(1); 25]).is_err());
        assert!(Packet::start_cu(0, &[0; 1022]).is_ok());
        let error = Packet::start_cu(0, &[0; 1023]).unwrap_err();
        assert_eq!(error.to_string(), "a START_CU packet of 1024 words; the most is 1023");
    }

    #[test]
    fn states_and_finality() {
        for (number, is_done) in [(1, false), (2, false), (3, false), (4, true), (5, true), (6, true), (7, false)] {
            assert_eq!(is_final(0x3001_0000 | number), is_done, "{number}");
        }
        assert!(is_final(8) && is_final(9) && is_final(10) && is_final(11));
        assert_eq!(CommandState::of_header(0x3001_0008), Some(CommandState::Timeout));
        assert_eq!(CommandState::of_header(0xF), None);
    }

    #[test]
    fn health_records_are_told_from_bodies_and_fills() {
        let mut body = [0; 32];
        for (i, word) in [1_u32, 0, 0x11, 0x2233_4455, 6, 7, 0x88, 9].into_iter().enumerate() {
            body[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
        }
        let record = HealthRecord::decode(&body).unwrap();
        assert_eq!((record.txn_op_index, record.context_pc, record.app_module), (0x11, 0x2233_4455, 9));
        assert_eq!(HealthRecord::decode(&[0xFF; 32]), None);
        body[0] = 2;
        assert_eq!(HealthRecord::decode(&body), None);
        assert_eq!(HealthRecord::decode(&[0; 32]), None);
    }
}
