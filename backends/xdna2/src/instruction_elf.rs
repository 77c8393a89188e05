//! Instruction ELF files: what the assembler makes of a kernel's control code.
//!
//! Sections are found by name; their order and padding do not matter.

use npuhal_amdxdna::format::elf::{
    ABI_SCHEMA_IN_ADDEND, Elf, ElfError, OSABI_AIE2P, Rela, Section, StringTable, Symbol, code,
};
use npuhal_amdxdna::format::reloc::{ARGUMENT_MAX, PARTIAL_ARGUMENT_BASE};
use npuhal_amdxdna::format::u32_at;
use std::ops::Range;
use thiserror::Error;

/// Bytes of a UID note: sizes, type, owner, 16 bytes of digest.
pub const UID_NOTE_BYTES: usize = 32;
/// Bytes of the UID in its note.
pub(crate) const UID_IN_NOTE: Range<usize> = 16..32;
/// Bytes of its owner.
const UID_OWNER: Range<usize> = 12..16;
const TEXT: &str = ".ctrltext";
const UID_NOTE: &str = ".note.xrt.UID";
/// First word of a transaction: version 0.1, AIE2P, six rows.
pub const TRANSACTION_MAGIC: u32 = 0x0604_0100;
/// Bytes of a transaction header.
pub const TRANSACTION_HEADER_BYTES: usize = 16;

/// A file that is not a usable instruction ELF.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InstructionElfError {
    /// The container cannot be read.
    #[error("full ELF: {0}")]
    Elf(#[from] ElfError),
    /// A section that is needed.
    #[error("full ELF: no {name} section")]
    MissingSection {
        /// Section name.
        name: &'static str,
    },
    /// The file is of another kind.
    #[error(
        "full ELF: {field} is {found:#x}, wanted {wanted:#x}: an instruction ELF for AIE2P, as the assembler writes it"
    )]
    Kind {
        /// Header field.
        field: &'static str,
        /// Value found.
        found: u8,
        /// Value wanted.
        wanted: u8,
    },
    /// The UID note has another shape.
    #[error(
        "full ELF: unexpected UID note layout: {len_bytes} bytes with sizes {sizes:?}; wanted {UID_NOTE_BYTES} with [4, 16]"
    )]
    UidNote {
        /// Bytes of the note.
        len_bytes: usize,
        /// Name and description size, where the note has them.
        sizes: Option<[u32; 2]>,
    },
    /// The UID note is somebody else's.
    #[error("full ELF: the owner of the UID note is \"{found}\", wanted \"XRT\"")]
    UidOwner {
        /// Its owner.
        found: String,
    },
    /// The control code does not start with a transaction.
    #[error(
        "full ELF: {TEXT} starts with {found:#010x}, wanted {TRANSACTION_MAGIC:#010x} (a version 0.1 transaction for AIE2P)"
    )]
    Magic {
        /// First word.
        found: u32,
    },
    /// The transaction is longer than its section, or shorter than its header.
    #[error("full ELF: the first transaction declares {declared_bytes} bytes; {TEXT} has {section_bytes}")]
    TransactionSize {
        /// Size in its header.
        declared_bytes: u32,
        /// Size of the section.
        section_bytes: usize,
    },
    /// A symbol that does not name an argument.
    #[error(
        "full ELF: symbol {index} is named {name:?}; wanted the number of a buffer argument, {PARTIAL_ARGUMENT_BASE} to {}",
        PARTIAL_ARGUMENT_BASE + ARGUMENT_MAX
    )]
    SymbolName {
        /// Symbol index.
        index: usize,
        /// Its name.
        name: String,
    },
    /// A relocation that the first transaction does not contain.
    #[error(
        "full ELF: relocation {index} patches byte {at_bytes:#x}; the first transaction has {transaction_bytes:#x} bytes"
    )]
    RelocationOutside {
        /// Relocation index.
        index: usize,
        /// What it patches.
        at_bytes: u32,
        /// Size of the transaction.
        transaction_bytes: u32,
    },
    /// A relocation with a symbol that is not there, or not of the control code.
    #[error("full ELF: relocation {index} names symbol {symbol}, which is not one of the {symbols} symbols of {TEXT}")]
    RelocationSymbol {
        /// Relocation index.
        index: usize,
        /// Symbol index.
        symbol: u32,
        /// Symbols of the file, the null symbol included.
        symbols: usize,
    },
    /// Code that is not where words can be patched.
    #[error("full ELF: {TEXT} lies at byte {at_bytes} and has {len_bytes} bytes; both must be multiples of 4")]
    Ragged {
        /// Offset in the file.
        at_bytes: usize,
        /// Size.
        len_bytes: usize,
    },
    /// Compressed code has no words at fixed places.
    #[error("full ELF: {TEXT} is compressed; wanted plain contents")]
    Compressed,
}

/// A buffer argument of the code. Several symbols may share an argument: one for each length of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeSymbol {
    /// Argument of the kernel, from 0: the number in the file without the leading arguments of an xclbin kernel.
    pub argument: u32,
    /// The entry. Its size is the length of the transfer in bytes.
    pub entry: Symbol,
}

/// The note that identifies the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UidNote {
    /// Offset in the file.
    pub at_bytes: usize,
    /// Contents.
    pub bytes: [u8; UID_NOTE_BYTES],
}

/// An instruction ELF. Indices of [`InstructionElf::symbols`] are those of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstructionElf {
    null_symbol: Symbol,
    symbols: Vec<CodeSymbol>,
    relocations: Vec<Rela>,
    text: Vec<u8>,
    text_at: usize,
    uid: Option<UidNote>,
    transaction_bytes: u32,
}

impl InstructionElf {
    /// Reads a file.
    ///
    /// # Errors
    /// [`InstructionElfError`].
    pub fn parse(file: &[u8]) -> Result<Self, InstructionElfError> {
        let elf = Elf::parse(file)?;
        check_kind(&elf)?;
        let (text_index, text) = section(&elf, TEXT)?;
        if text.flags & code::SHF_COMPRESSED != 0 {
            return Err(InstructionElfError::Compressed);
        }
        let transaction_bytes = transaction_bytes(&text.data)?;
        let (null_symbol, symbols) = symbols_of(&elf)?;
        let relocations = Rela::parse_table(section(&elf, ".rela.dyn")?.1)?;
        for (index, rela) in relocations.iter().enumerate() {
            let symbol = (rela.symbol as usize).checked_sub(1).and_then(|symbol| symbols.get(symbol));
            if symbol.is_none_or(|symbol| u32::from(symbol.entry.section) != text_index) {
                let (symbol, symbols) = (rela.symbol, symbols.len() + 1);
                return Err(InstructionElfError::RelocationSymbol { index, symbol, symbols });
            }
            if rela.offset >= transaction_bytes {
                return Err(InstructionElfError::RelocationOutside { index, at_bytes: rela.offset, transaction_bytes });
            }
        }
        let (text_at, text) = (text.offset as usize, text.data.clone());
        Ok(Self { null_symbol, symbols, relocations, text, text_at, uid: uid_of(&elf)?, transaction_bytes })
    }

    /// The null symbol.
    #[must_use]
    pub fn null_symbol(&self) -> Symbol {
        self.null_symbol
    }

    /// Symbols behind the null symbol: symbol index `i` is entry `i - 1`.
    #[must_use]
    pub fn symbols(&self) -> &[CodeSymbol] {
        &self.symbols
    }

    /// Relocations in file order.
    #[must_use]
    pub fn relocations(&self) -> &[Rela] {
        &self.relocations
    }

    /// Relocations with their symbols.
    pub fn patches(&self) -> impl Iterator<Item = (&Rela, &CodeSymbol)> {
        self.relocations.iter().filter_map(|rela| Some((rela, self.symbols.get(rela.symbol as usize - 1)?)))
    }

    /// All control code. Captured files hold the transaction twice.
    #[must_use]
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Bytes of the file that are control code.
    ///
    /// # Errors
    /// [`InstructionElfError::Ragged`]: the code is not made of words of the file.
    pub fn text_range(&self) -> Result<Range<usize>, InstructionElfError> {
        let (at_bytes, len_bytes) = (self.text_at, self.text.len());
        match at_bytes.is_multiple_of(4) && len_bytes.is_multiple_of(4) {
            true => Ok(at_bytes..at_bytes + len_bytes),
            false => Err(InstructionElfError::Ragged { at_bytes, len_bytes }),
        }
    }

    /// The first transaction: header and operations.
    #[must_use]
    pub fn transaction(&self) -> &[u8] {
        &self.text[..self.transaction_bytes as usize]
    }

    /// The note with the MD5 of the control code.
    #[must_use]
    pub fn uid(&self) -> Option<&UidNote> {
        self.uid.as_ref()
    }

    /// The note, for those who cannot do without.
    ///
    /// # Errors
    /// [`InstructionElfError::MissingSection`].
    pub fn require_uid(&self) -> Result<&UidNote, InstructionElfError> {
        self.uid().ok_or(InstructionElfError::MissingSection { name: UID_NOTE })
    }
}

fn check_kind(elf: &Elf) -> Result<(), InstructionElfError> {
    let header = &elf.header;
    if header.os_abi != OSABI_AIE2P {
        return Err(InstructionElfError::Kind { field: "EI_OSABI", found: header.os_abi, wanted: OSABI_AIE2P });
    }
    // Later versions have groups; this one of the same major version keeps the patch schema in the addend.
    if header.abi_major() != 0 || header.abi_version == ABI_SCHEMA_IN_ADDEND {
        return Err(InstructionElfError::Kind { field: "EI_ABIVERSION", found: header.abi_version, wanted: 2 });
    }
    Ok(())
}

fn section<'a>(elf: &'a Elf, name: &'static str) -> Result<(u32, &'a Section), InstructionElfError> {
    elf.find(name).ok_or(InstructionElfError::MissingSection { name })
}

/// Bytes of the transaction at the start of `text`, header included.
fn transaction_bytes(text: &[u8]) -> Result<u32, InstructionElfError> {
    let too_short = |declared_bytes| InstructionElfError::TransactionSize { declared_bytes, section_bytes: text.len() };
    let found = u32_at(text, 0).ok_or_else(|| too_short(TRANSACTION_HEADER_BYTES as u32))?;
    if found != TRANSACTION_MAGIC {
        return Err(InstructionElfError::Magic { found });
    }
    let declared = u32_at(text, 12).ok_or_else(|| too_short(TRANSACTION_HEADER_BYTES as u32))?;
    match (declared as usize) < TRANSACTION_HEADER_BYTES || declared as usize > text.len() {
        true => Err(too_short(declared)),
        false => Ok(declared),
    }
}

/// The null symbol, and the others.
fn symbols_of(elf: &Elf) -> Result<(Symbol, Vec<CodeSymbol>), InstructionElfError> {
    let names = StringTable::from_bytes(section(elf, ".dynstr")?.1.data.clone());
    let mut entries = Symbol::parse_table(section(elf, ".dynsym")?.1)?.into_iter();
    let null_symbol = entries.next().unwrap_or_default();
    let symbols = entries.enumerate().map(|(i, entry)| {
        let missing = || ElfError::BadName { what: format!("symbol {} of .dynsym", i + 1), at_bytes: entry.name_at };
        let name = names.get(entry.name_at).ok_or_else(missing)?;
        let argument = argument_of(name)
            .ok_or_else(|| InstructionElfError::SymbolName { index: i + 1, name: name.chars().take(32).collect() })?;
        Ok(CodeSymbol { argument, entry })
    });
    Ok((null_symbol, symbols.collect::<Result<_, InstructionElfError>>()?))
}

/// Argument of a full ELF's kernel: an instruction ELF counts opcode, instruction buffer and its length as the first three.
fn argument_of(name: &str) -> Option<u32> {
    let digits_only = !name.is_empty() && name.len() <= 3 && name.bytes().all(|byte| byte.is_ascii_digit());
    let number: u32 = name.parse().ok().filter(|_| digits_only)?;
    number.checked_sub(PARTIAL_ARGUMENT_BASE).filter(|argument| *argument <= ARGUMENT_MAX)
}

fn uid_of(elf: &Elf) -> Result<Option<UidNote>, InstructionElfError> {
    let Some((_, note)) = elf.find(UID_NOTE) else { return Ok(None) };
    let sizes = u32_at(&note.data, 0).zip(u32_at(&note.data, 4)).map(|(name, description)| [name, description]);
    let fault = InstructionElfError::UidNote { len_bytes: note.data.len(), sizes };
    let bytes = <[u8; UID_NOTE_BYTES]>::try_from(note.data.as_slice()).map_err(|_| fault.clone())?;
    if sizes != Some([4, 16]) {
        return Err(fault);
    }
    let owner = &bytes[UID_OWNER];
    if owner != b"XRT\0" {
        return Err(InstructionElfError::UidOwner { found: owner.escape_ascii().to_string() });
    }
    Ok(Some(UidNote { at_bytes: note.offset as usize, bytes }))
}
