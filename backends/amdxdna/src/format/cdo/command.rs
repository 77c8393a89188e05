//! Commands of the generic set.

use crate::format::Words;
use crate::format::registers::Address;
use std::fmt;

const GENERIC: u32 = 1 << 8;
const END: u32 = GENERIC;
const MASK_POLL: u32 = GENERIC | 0x01;
const MASK_WRITE: u32 = GENERIC | 0x02;
const WRITE: u32 = GENERIC | 0x03;
const DELAY: u32 = GENERIC | 0x04;
const DMA_WRITE: u32 = GENERIC | 0x05;
const MASK_POLL_64: u32 = GENERIC | 0x06;
const MASK_WRITE_64: u32 = GENERIC | 0x07;
const WRITE_64: u32 = GENERIC | 0x08;
const DMA_XFER: u32 = GENERIC | 0x09;
const NOP: u32 = GENERIC | 0x11;
const MARKER: u32 = GENERIC | 0x19;

/// Value of the short length field that announces a length word.
const LONG_FORM: u32 = 0xFF;

/// Where a command's payload length stands.
pub(super) enum PayloadLength {
    /// In the command word.
    Short(u32),
    /// In the word that follows.
    Long,
}

/// Payload length of a command word: bits 23:16, with 0xFF announcing a length word.
///
/// This is a hypothesis: bits 31:24 are taken as command specific. Other descriptions give bits 31:16 as the length.
/// Both agree while bits 31:24 are zero, as they are in all images seen; no other place depends on the choice.
pub(super) fn payload_length(word: u32) -> PayloadLength {
    match word >> 16 & 0xFF {
        LONG_FORM => PayloadLength::Long,
        words => PayloadLength::Short(words),
    }
}

/// A command and the parts of its head that carry no meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command<'a> {
    /// Bits 31:24 of the command word.
    pub specific: u8,
    /// Whether a length word is used although the length would fit the short field.
    pub long_form: bool,
    /// What the command does.
    pub kind: CommandKind<'a>,
}

/// What a command does. Addresses in the array have column, row and offset in their low 32 bits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandKind<'a> {
    /// End of the list.
    End,
    /// Waits until `word & mask == expected`.
    MaskPoll {
        /// Address.
        address: u64,
        /// Bits that count.
        mask: u32,
        /// Value of those bits.
        expected: u32,
        /// Time-out and what follows it.
        rest: Words<'a>,
        /// Whether the form with a 64-bit address is used.
        long_address: bool,
    },
    /// Replaces the bits of `mask`.
    MaskWrite {
        /// Address.
        address: u64,
        /// Bits that are replaced.
        mask: u32,
        /// Value.
        value: u32,
        /// Whether the form with a 64-bit address is used.
        long_address: bool,
    },
    /// Stores a word.
    Write {
        /// Address.
        address: u64,
        /// Value.
        value: u32,
        /// Whether the form with a 64-bit address is used.
        long_address: bool,
    },
    /// Waits.
    Delay {
        /// Duration.
        count: u32,
    },
    /// Stores consecutive words.
    DmaWrite {
        /// Address of the first word.
        address: u64,
        /// Words.
        data: Words<'a>,
    },
    /// Copies memory.
    DmaXfer {
        /// Source address.
        source: u64,
        /// Destination address.
        destination: u64,
        /// Length.
        length: u32,
        /// What follows.
        rest: Words<'a>,
    },
    /// Words without effect.
    Nop {
        /// The words.
        skipped: Words<'a>,
    },
    /// Mark for debugging.
    Marker {
        /// Id.
        id: u32,
        /// Text, four bytes a word.
        text: Words<'a>,
    },
    /// A command outside the generic set.
    Other {
        /// Module and command: bits 15:0 of the command word.
        code: u16,
        /// Payload.
        payload: Words<'a>,
    },
}

impl<'a> From<CommandKind<'a>> for Command<'a> {
    fn from(kind: CommandKind<'a>) -> Self {
        Self { specific: 0, long_form: false, kind }
    }
}

impl<'a> Command<'a> {
    /// Takes a command apart.
    pub(super) fn decode(word: u32, long: bool, payload: Words<'a>) -> Result<Self, String> {
        let kind = CommandKind::decode(word & 0xFFFF, &payload)?;
        // The long form says nothing where only it fits.
        let long_form = long && payload.len() < LONG_FORM as usize;
        Ok(Self { specific: (word >> 24) as u8, long_form, kind })
    }
}

impl Command<'_> {
    /// Name in messages.
    pub(super) fn name(&self) -> String {
        name_of_word(self.kind.code())
    }

    /// Appends the words.
    pub(super) fn encode(&self, out: &mut Vec<u32>) -> Result<(), String> {
        self.kind.check()?;
        let start = out.len();
        let head = self.kind.code() | u32::from(self.specific) << 24;
        out.push(head);
        self.kind.encode_payload(out);
        let length = u32::try_from(out.len() - start - 1).map_err(|_| "it does not fit a 32-bit length".to_owned())?;
        if length < LONG_FORM && !self.long_form {
            out[start] |= length << 16;
        } else {
            out[start] |= LONG_FORM << 16;
            out.insert(start + 1, length);
        }
        Ok(())
    }

    /// A copy that borrows nothing.
    pub fn into_owned(self) -> Command<'static> {
        Command { specific: self.specific, long_form: self.long_form, kind: self.kind.into_owned() }
    }
}

impl<'a> CommandKind<'a> {
    fn decode(code: u32, payload: &Words<'a>) -> Result<Self, String> {
        let words = payload.len();
        let exactly = |wanted: usize| match words == wanted {
            true => Ok(()),
            false => Err(format!("{words} payload words, wanted {wanted}")),
        };
        let at_least = |wanted: usize| match words >= wanted {
            true => Ok(()),
            false => Err(format!("{words} payload words, wanted at least {wanted}")),
        };
        let word = |i: usize| payload.get(i).unwrap_or_default();
        let long = |i: usize| u64::from(word(i)) << 32 | u64::from(word(i + 1));
        let from = |i: usize| payload.clone().skip(i);
        Ok(match code {
            END => {
                exactly(0)?;
                Self::End
            }
            MASK_POLL => {
                at_least(3)?;
                Self::MaskPoll {
                    address: word(0).into(),
                    mask: word(1),
                    expected: word(2),
                    rest: from(3),
                    long_address: false,
                }
            }
            MASK_POLL_64 => {
                at_least(4)?;
                Self::MaskPoll { address: long(0), mask: word(2), expected: word(3), rest: from(4), long_address: true }
            }
            MASK_WRITE => {
                exactly(3)?;
                Self::MaskWrite { address: word(0).into(), mask: word(1), value: word(2), long_address: false }
            }
            MASK_WRITE_64 => {
                exactly(4)?;
                Self::MaskWrite { address: long(0), mask: word(2), value: word(3), long_address: true }
            }
            WRITE => {
                exactly(2)?;
                Self::Write { address: word(0).into(), value: word(1), long_address: false }
            }
            WRITE_64 => {
                exactly(3)?;
                Self::Write { address: long(0), value: word(2), long_address: true }
            }
            DELAY => {
                exactly(1)?;
                Self::Delay { count: word(0) }
            }
            DMA_WRITE => {
                at_least(2)?;
                Self::DmaWrite { address: long(0), data: from(2) }
            }
            DMA_XFER => {
                at_least(5)?;
                Self::DmaXfer { source: long(0), destination: long(2), length: word(4), rest: from(5) }
            }
            NOP => Self::Nop { skipped: payload.clone() },
            MARKER => {
                at_least(1)?;
                Self::Marker { id: word(0), text: from(1) }
            }
            other => Self::Other { code: other as u16, payload: payload.clone() },
        })
    }

    /// Bits 15:0 of the command word.
    fn code(&self) -> u32 {
        match self {
            Self::End => END,
            Self::MaskPoll { long_address: false, .. } => MASK_POLL,
            Self::MaskPoll { .. } => MASK_POLL_64,
            Self::MaskWrite { long_address: false, .. } => MASK_WRITE,
            Self::MaskWrite { .. } => MASK_WRITE_64,
            Self::Write { long_address: false, .. } => WRITE,
            Self::Write { .. } => WRITE_64,
            Self::Delay { .. } => DELAY,
            Self::DmaWrite { .. } => DMA_WRITE,
            Self::DmaXfer { .. } => DMA_XFER,
            Self::Nop { .. } => NOP,
            Self::Marker { .. } => MARKER,
            Self::Other { code, .. } => (*code).into(),
        }
    }

    /// Refuses what would read back as something else.
    fn check(&self) -> Result<(), String> {
        match self {
            Self::MaskPoll { address, long_address: false, .. }
            | Self::MaskWrite { address, long_address: false, .. }
            | Self::Write { address, long_address: false, .. }
                if *address > u32::MAX.into() =>
            {
                Err(format!("address {address:#x} needs the form with a 64-bit address"))
            }
            Self::Other { code, .. } if name(u32::from(*code)).is_some() => {
                Err("a command of the generic set is not an other command".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn encode_payload(&self, out: &mut Vec<u32>) {
        let long = |address: u64| [(address >> 32) as u32, address as u32];
        let mut put_address = |address: u64, is_long: bool| match is_long {
            true => out.extend(long(address)),
            false => out.push(address as u32),
        };
        match self {
            Self::End => {}
            Self::MaskPoll { address, mask, expected, rest, long_address } => {
                put_address(*address, *long_address);
                out.extend([*mask, *expected]);
                out.extend(rest.iter());
            }
            Self::MaskWrite { address, mask, value, long_address } => {
                put_address(*address, *long_address);
                out.extend([*mask, *value]);
            }
            Self::Write { address, value, long_address } => {
                put_address(*address, *long_address);
                out.push(*value);
            }
            Self::Delay { count } => out.push(*count),
            Self::DmaWrite { address, data } => {
                put_address(*address, true);
                out.extend(data.iter());
            }
            Self::DmaXfer { source, destination, length, rest } => {
                put_address(*source, true);
                put_address(*destination, true);
                out.push(*length);
                out.extend(rest.iter());
            }
            Self::Nop { skipped } => out.extend(skipped.iter()),
            Self::Marker { id, text } => {
                out.push(*id);
                out.extend(text.iter());
            }
            Self::Other { payload, .. } => out.extend(payload.iter()),
        }
    }

    /// A copy that borrows nothing.
    pub fn into_owned(self) -> CommandKind<'static> {
        match self {
            Self::MaskPoll { address, mask, expected, rest, long_address } => {
                CommandKind::MaskPoll { address, mask, expected, rest: rest.into_owned(), long_address }
            }
            Self::DmaWrite { address, data } => CommandKind::DmaWrite { address, data: data.into_owned() },
            Self::DmaXfer { source, destination, length, rest } => {
                CommandKind::DmaXfer { source, destination, length, rest: rest.into_owned() }
            }
            Self::Nop { skipped } => CommandKind::Nop { skipped: skipped.into_owned() },
            Self::Marker { id, text } => CommandKind::Marker { id, text: text.into_owned() },
            Self::Other { code, payload } => CommandKind::Other { code, payload: payload.into_owned() },
            Self::End => CommandKind::End,
            Self::MaskWrite { address, mask, value, long_address } => {
                CommandKind::MaskWrite { address, mask, value, long_address }
            }
            Self::Write { address, value, long_address } => CommandKind::Write { address, value, long_address },
            Self::Delay { count } => CommandKind::Delay { count },
        }
    }
}

/// Name of a command of the generic set.
fn name(code: u32) -> Option<&'static str> {
    Some(match code {
        END => "END",
        MASK_POLL => "MASK_POLL",
        MASK_WRITE => "MASK_WRITE",
        WRITE => "WRITE",
        DELAY => "DELAY",
        DMA_WRITE => "DMA_WRITE",
        MASK_POLL_64 => "MASK_POLL64",
        MASK_WRITE_64 => "MASK_WRITE64",
        WRITE_64 => "WRITE64",
        DMA_XFER => "DMA_XFER",
        NOP => "NOP",
        MARKER => "MARKER",
        _ => return None,
    })
}

/// Name or number of a command word.
pub(super) fn name_of_word(word: u32) -> String {
    let code = word & 0xFFFF;
    name(code).map_or_else(|| format!("command {code:#06x}"), str::to_owned)
}

impl fmt::Display for Command<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        let place = |address: u64| Address::from_word(address as u32);
        match &self.kind {
            CommandKind::End => Ok(()),
            CommandKind::MaskPoll { address, mask, expected, .. } => {
                write!(f, " {} = {expected:#x}, mask {mask:#x}", place(*address))
            }
            CommandKind::MaskWrite { address, mask, value, .. } => {
                write!(f, " {} = {value:#x}, mask {mask:#x}", place(*address))
            }
            CommandKind::Write { address, value, .. } => write!(f, " {} = {value:#x}", place(*address)),
            CommandKind::Delay { count } => write!(f, " {count}"),
            CommandKind::DmaWrite { address, data } => write!(f, " {}, {} words", place(*address), data.len()),
            CommandKind::DmaXfer { source, destination, length, .. } => {
                write!(f, " {destination:#x} = {source:#x}, length {length}")
            }
            CommandKind::Nop { skipped } => write!(f, " {} words", skipped.len()),
            CommandKind::Marker { id, .. } => write!(f, " {id}"),
            CommandKind::Other { payload, .. } => write!(f, ", {} words", payload.len()),
        }
    }
}
