//! CDO: the list of configuration commands in a partition image.
//!
//! Runtimes hand partition images to firmware without looking inside. This reader is for inspection and for devices
//! that execute an image themselves. The commands are those of the generic set (module 1); others are kept as they are.

mod command;

pub use command::{Command, CommandKind};

use super::Words;
use super::bytes::u32_at;
use command::{PayloadLength, payload_length};
use thiserror::Error;

/// Words of a header.
pub const HEADER_WORDS: usize = 5;
/// Identification in current images; reads "XNLX" as bytes.
pub const IDENT_XLNX: u32 = 0x584C_4E58;
/// Identification in older images; reads "CDO" as bytes.
pub const IDENT_CDO: u32 = 0x004F_4443;
/// Current version.
pub const VERSION_2_0: u32 = 0x0200;
/// Older version.
pub const VERSION_1_50: u32 = 0x0132;
/// Header words after the first.
const REMAINING_HEADER_WORDS: u32 = 4;

/// A CDO that cannot be read or written.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CdoError {
    /// Not a CDO header.
    #[error("CDO at byte {at_bytes}: {field} is {found:#010x}, wanted {wanted}")]
    Header {
        /// Offset in the image.
        at_bytes: usize,
        /// Header field.
        field: &'static str,
        /// Value found.
        found: u32,
        /// Values accepted.
        wanted: String,
    },
    /// The body reaches past the end.
    #[error("CDO at byte {at_bytes}: {needed_words} words are stated, {left_words} are there")]
    Truncated {
        /// Offset in the image.
        at_bytes: usize,
        /// Words of header and body.
        needed_words: u64,
        /// Words there are.
        left_words: usize,
    },
    /// A command that cannot be read.
    #[error("CDO command {index} at word {at_words} of the body, {name}: {reason}")]
    Command {
        /// Index of the command.
        index: usize,
        /// Offset in the body.
        at_words: usize,
        /// Command name or number.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A list too long for its length field.
    #[error("CDO of {words} words does not fit its 32-bit length")]
    TooLong {
        /// Words.
        words: usize,
    },
}

/// A list of commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cdo {
    /// Identification word.
    pub ident: u32,
    /// Version word.
    pub version: u32,
    /// Commands.
    pub commands: Vec<Command<'static>>,
}

impl Default for Cdo {
    /// An empty list in the current version.
    fn default() -> Self {
        Self { ident: IDENT_XLNX, version: VERSION_2_0, commands: Vec::new() }
    }
}

impl Cdo {
    /// A list of these commands, closed by `END`.
    pub fn new(commands: impl IntoIterator<Item = CommandKind<'static>>) -> Self {
        let commands = commands.into_iter().chain([CommandKind::End]).map(Command::from).collect();
        Self { commands, ..Self::default() }
    }

    /// Header and body.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CdoError> {
        let mut body = Vec::new();
        for (index, command) in self.commands.iter().enumerate() {
            let at_words = body.len();
            command.encode(&mut body).map_err(|reason| CdoError::Command {
                index,
                at_words,
                name: command.name(),
                reason,
            })?;
        }
        let length = u32::try_from(body.len()).map_err(|_| CdoError::TooLong { words: body.len() })?;
        let head = [REMAINING_HEADER_WORDS, self.ident, self.version, length];
        let words = head.into_iter().chain([checksum(&head)]).chain(body);
        Ok(words.flat_map(u32::to_le_bytes).collect())
    }
}

/// A CDO in memory.
#[derive(Debug, Clone)]
pub struct CdoView<'a> {
    /// Offset in the image.
    pub at_bytes: usize,
    /// Identification word.
    pub ident: u32,
    /// Version word.
    pub version: u32,
    /// Commands as words.
    body: &'a [u8],
}

impl<'a> CdoView<'a> {
    /// Whether a header may start at byte `at` of `image`.
    pub(super) fn starts_at(image: &[u8], at: usize) -> bool {
        let ident = u32_at(image, at.saturating_add(4));
        u32_at(image, at) == Some(REMAINING_HEADER_WORDS) && (ident == Some(IDENT_XLNX) || ident == Some(IDENT_CDO))
    }

    /// Reads the header at byte `at_bytes` of `image` and checks it against what follows.
    pub fn new(image: &'a [u8], at_bytes: usize) -> Result<Self, CdoError> {
        let rest = image.get(at_bytes..).unwrap_or_default();
        let left_words = rest.len() / 4;
        let truncated = |needed_words| CdoError::Truncated { at_bytes, needed_words, left_words };
        if left_words < HEADER_WORDS {
            return Err(truncated(HEADER_WORDS as u64));
        }
        let header: [u32; HEADER_WORDS] = std::array::from_fn(|i| u32_at(rest, 4 * i).unwrap_or_default());
        let [remaining, ident, version, length, sum] = header;
        let refuse =
            |field, found, wanted: &str| CdoError::Header { at_bytes, field, found, wanted: wanted.to_owned() };
        if remaining != REMAINING_HEADER_WORDS {
            return Err(refuse("number of header words", remaining, "4"));
        }
        if ident != IDENT_XLNX && ident != IDENT_CDO {
            return Err(refuse("identification", ident, "0x584c4e58 or 0x004f4443"));
        }
        if version != VERSION_2_0 && version != VERSION_1_50 {
            return Err(refuse("version", version, "0x00000200 or 0x00000132"));
        }
        let expected = checksum(&header[..4]);
        if sum != expected {
            return Err(refuse("checksum", sum, &format!("{expected:#010x}")));
        }
        let needed_words = HEADER_WORDS as u64 + u64::from(length);
        if needed_words > left_words as u64 {
            return Err(truncated(needed_words));
        }
        Ok(Self { at_bytes, ident, version, body: &rest[4 * HEADER_WORDS..4 * needed_words as usize] })
    }

    /// Bytes of header and body.
    pub fn len_bytes(&self) -> usize {
        4 * HEADER_WORDS + self.body.len()
    }

    /// Commands in order, read without allocation. The iterator ends after the first error.
    pub fn commands(&self) -> Commands<'a> {
        Commands { body: self.body, index: 0, at_words: 0, done: false }
    }

    /// An owned copy.
    pub fn to_cdo(&self) -> Result<Cdo, CdoError> {
        let commands = self.commands().map(|command| command.map(Command::into_owned)).collect::<Result<_, _>>()?;
        Ok(Cdo { ident: self.ident, version: self.version, commands })
    }
}

/// Iterator over the commands of a CDO.
#[derive(Debug, Clone)]
pub struct Commands<'a> {
    body: &'a [u8],
    index: usize,
    at_words: usize,
    done: bool,
}

impl<'a> Iterator for Commands<'a> {
    type Item = Result<Command<'a>, CdoError>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.body.get(4 * self.at_words..)?;
        if self.done || rest.is_empty() {
            return None;
        }
        let word = u32_at(rest, 0)?;
        let (index, at_words) = (self.index, self.at_words);
        match decode(rest, word) {
            Ok((command, words)) => {
                self.index += 1;
                self.at_words += words;
                Some(Ok(command))
            }
            Err(reason) => {
                self.done = true;
                Some(Err(CdoError::Command { index, at_words, name: command::name_of_word(word), reason }))
            }
        }
    }
}

/// Reads the command at the front of `rest`; returns its words.
fn decode(rest: &[u8], word: u32) -> Result<(Command<'_>, usize), String> {
    let (head_words, payload_words, long) = match payload_length(word) {
        PayloadLength::Short(words) => (1, words, false),
        PayloadLength::Long => (2, u32_at(rest, 4).ok_or("its length word is missing")?, true),
    };
    let left_words = rest.len() / 4 - head_words;
    if u64::from(payload_words) > left_words as u64 {
        return Err(format!("{payload_words} payload words are stated, {left_words} are left"));
    }
    let end = head_words + payload_words as usize;
    let payload = Words::from_le_bytes(&rest[4 * head_words..4 * end]).ok_or("it is not made of whole words")?;
    Ok((Command::decode(word, long, payload)?, end))
}

/// One's complement of the sum of the words.
fn checksum(words: &[u32]) -> u32 {
    !words.iter().fold(0, |sum: u32, word| sum.wrapping_add(*word))
}

#[cfg(test)]
mod tests;
