//! Full ELF files from instruction ELF files: partition image, first transaction and relocations in one file, which needs no
//! xclbin.

use crate::instruction_elf::{InstructionElf, InstructionElfError, TRANSACTION_HEADER_BYTES};
use crate::words::put_word;
use npuhal_amdxdna::format::elf::{ArgumentSymbol, Elf, ElfError, FullElfSpec, PatchEntry, Symbol, code};
use npuhal_amdxdna::format::reloc::{FOLD_FLAG, FOLD_FROM_ARGUMENT, Schema};
use npuhal_amdxdna::format::u32_at;
use thiserror::Error;

/// Columns of the published kernels.
pub const COLUMNS: u32 = 8;
/// Name of the only instance of each kernel.
pub const INSTANCE: &str = "sequence";
/// Section and symbol of the partition image.
const PDI: &str = ".pdi.1";
/// Note type of the UID where the input has none.
const NOTE_UID_ABSENT: u32 = 3;
/// Longest kernel name; readers bound symbol names.
const MAX_NAME_BYTES: usize = 64;

/// Opcode 8 with image 1; the host patches the address.
const LOAD_PDI: [u32; 4] = [0x0001_0008, 0, 0, 0];
const LOAD_PDI_BYTES: u32 = 16;
/// Byte offset of the address in a [`LOAD_PDI`] that follows the header.
const PDI_ADDRESS_AT: u32 = TRANSACTION_HEADER_BYTES as u32 + 8;

/// What the control code does with the partition image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PdiMode {
    /// Loads it, then runs the transaction.
    Load,
    /// Runs the transaction on what is loaded.
    None,
    /// Loads it and does nothing else.
    InitOnly,
}

/// What to assemble.
#[derive(Debug, Clone, Copy)]
pub struct FullElfRequest<'a> {
    /// Kernel name, e.g. `fl00017`.
    pub kernel: &'a str,
    /// What happens to `pdi`.
    pub mode: PdiMode,
    /// Partition image; may be empty with [`PdiMode::None`].
    pub pdi: &'a [u8],
    /// Columns of the partition; see [`COLUMNS`].
    pub columns: u32,
}

/// Nothing was assembled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AssembleError {
    /// The input.
    #[error(transparent)]
    Input(#[from] InstructionElfError),
    /// The output.
    #[error("full ELF: {0}")]
    Elf(#[from] ElfError),
    /// A kernel without buffer arguments has no signature to call.
    #[error("full ELF: the input has no argument symbol; wanted at least one")]
    NoArguments,
    /// The run that configures the array gets one buffer.
    #[error("full ELF: the first symbol is of argument {argument}; wanted 0, the one buffer that {kernel:?} gets")]
    InitArgument {
        /// Kernel.
        kernel: String,
        /// Argument of the first symbol.
        argument: u32,
    },
    /// A name that cannot be mangled.
    #[error(
        "full ELF: {name:?} cannot name a kernel: wanted 1 to {MAX_NAME_BYTES} letters, digits and underscores, no digit first"
    )]
    KernelName {
        /// What was asked for.
        name: String,
    },
    /// An image that is loaded must be there.
    #[error("full ELF: the partition image is empty, and kernel {kernel:?} is to load it")]
    EmptyPdi {
        /// Kernel.
        kernel: String,
    },
    /// A partition without columns.
    #[error("full ELF: a partition of {columns} columns; wanted at least 1")]
    Columns {
        /// What was asked for.
        columns: u32,
    },
    /// The code grows past its 32-bit header fields.
    #[error("full ELF: the transaction of {size_bytes} bytes and {ops} operations has no room for one more")]
    TooLong {
        /// Size in its header.
        size_bytes: u32,
        /// Operations in its header.
        ops: u32,
    },
    /// A flag that compilers add to later arguments only.
    #[error(
        "full ELF: the DDR_PATCH at byte {at_bytes:#x} has bit 31 of its offset set for argument {argument}; it is legal from \
         argument {FOLD_FROM_ARGUMENT}"
    )]
    FoldFlag {
        /// Offset of the operation in the transaction.
        at_bytes: usize,
        /// Its argument.
        argument: u32,
    },
}

/// Assembles the full ELF of `input`.
///
/// # Errors
/// [`AssembleError`].
pub fn assemble(input: &InstructionElf, request: &FullElfRequest<'_>) -> Result<Vec<u8>, AssembleError> {
    check(request)?;
    let symbols = match request.mode {
        PdiMode::InitOnly => input.symbols().get(..1).unwrap_or_default(),
        PdiMode::Load | PdiMode::None => input.symbols(),
    };
    let highest = symbols.iter().map(|symbol| symbol.argument).max().ok_or(AssembleError::NoArguments)?;
    if request.mode == PdiMode::InitOnly && highest != 0 {
        return Err(AssembleError::InitArgument { kernel: request.kernel.to_owned(), argument: highest });
    }
    let pdi_symbol = ArgumentSymbol { name: PDI.to_owned(), size: 0 };
    let named = symbols.iter().map(|s| ArgumentSymbol { name: s.argument.to_string(), size: s.entry.size });
    let spec = FullElfSpec {
        kernel: request.kernel.to_owned(),
        instance: INSTANCE.to_owned(),
        arguments: highest as usize + 1,
        columns: request.columns,
        pdi: request.pdi.to_vec(),
        code: code_of(input, request.mode)?,
        symbols: std::iter::once(pdi_symbol).chain(named).collect(),
        patches: patches_of(input, request.mode),
        uid: (NOTE_UID_ABSENT, [0; 16]),
    };
    let mut elf = spec.build()?;
    keep_symbol_fields(&mut elf, input, symbols.len())?;
    copy_uid(&mut elf, input);
    Ok(elf.to_bytes()?)
}

fn check(request: &FullElfRequest<'_>) -> Result<(), AssembleError> {
    let name = request.kernel;
    let is_word = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if !is_word || name.is_empty() || name.len() > MAX_NAME_BYTES || name.as_bytes()[0].is_ascii_digit() {
        return Err(AssembleError::KernelName { name: name.chars().take(MAX_NAME_BYTES).collect() });
    }
    if request.pdi.is_empty() && request.mode != PdiMode::None {
        return Err(AssembleError::EmptyPdi { kernel: name.to_owned() });
    }
    if request.columns == 0 {
        return Err(AssembleError::Columns { columns: 0 });
    }
    Ok(())
}

/// The first transaction, alone: whatever follows it in the section was captured, not called for.
fn code_of(input: &InstructionElf, mode: PdiMode) -> Result<Vec<u8>, AssembleError> {
    let (header, ops) = input.transaction().split_at(TRANSACTION_HEADER_BYTES);
    let mut code = header.to_vec();
    if mode != PdiMode::None {
        code.extend(LOAD_PDI.iter().flat_map(|word| word.to_le_bytes()));
        count_load_pdi(&mut code, mode)?;
    }
    if mode != PdiMode::InitOnly {
        let start = code.len();
        code.extend_from_slice(ops);
        clear_fold_flags(&mut code, start)?;
    }
    Ok(code)
}

/// Operation count and size in the header, with the loading operation.
fn count_load_pdi(code: &mut [u8], mode: PdiMode) -> Result<(), AssembleError> {
    let (ops, size_bytes) = match mode {
        PdiMode::InitOnly => (0, TRANSACTION_HEADER_BYTES as u32),
        PdiMode::Load | PdiMode::None => (u32_at(code, 8).unwrap_or_default(), u32_at(code, 12).unwrap_or_default()),
    };
    let grown = ops.checked_add(1).zip(size_bytes.checked_add(LOAD_PDI_BYTES));
    let (more_ops, more_bytes) = grown.ok_or(AssembleError::TooLong { size_bytes, ops })?;
    put_word(code, 8, more_ops);
    put_word(code, 12, more_bytes);
    Ok(())
}

/// Clears bit 31 of the offsets of `DDR_PATCH` operations: compilers set it for firmware that does not add the host aperture
/// itself, and whoever patches a full ELF does. The walk ends at an operation whose length is not known here, as the
/// published generator's does: what follows is passed on as it is.
fn clear_fold_flags(code: &mut [u8], start: usize) -> Result<(), AssembleError> {
    const OFFSET_AT: usize = 40;
    const ARGUMENT_AT: usize = 32;
    let mut at = start;
    while let Some(word) = u32_at(code, at) {
        let words = match word & 0xFF {
            0x00 => 6,
            0x01 | 0x81 => 12,
            0x03 => 7,
            0x80 => 4,
            _ => break,
        };
        let offset = u32_at(code, at + OFFSET_AT).filter(|_| word & 0xFF == 0x81);
        if let Some(offset) = offset.filter(|offset| u64::from(*offset) & FOLD_FLAG != 0) {
            let argument = u32_at(code, at + ARGUMENT_AT).unwrap_or_default();
            if argument < FOLD_FROM_ARGUMENT {
                return Err(AssembleError::FoldFlag { at_bytes: at - start + TRANSACTION_HEADER_BYTES, argument });
            }
            put_word(code, at + OFFSET_AT, without_fold_flag(offset));
        }
        at += 4 * words;
    }
    Ok(())
}

fn without_fold_flag(offset: u32) -> u32 {
    offset & !(FOLD_FLAG as u32)
}

/// Relocations: symbol indices are counted without the null symbol, and `.pdi.1` is symbol 0.
fn patches_of(input: &InstructionElf, mode: PdiMode) -> Vec<PatchEntry> {
    let load_pdi = PatchEntry { symbol: 0, offset: PDI_ADDRESS_AT, schema: Schema::Address64.number(), addend: 0 };
    let shift = if mode == PdiMode::Load { LOAD_PDI_BYTES } else { 0 };
    let of_input = input.relocations().iter().map(|rela| PatchEntry {
        symbol: rela.symbol as usize,
        // The code is at least as long as the section it comes from, which has at most 4 GiB.
        offset: rela.offset.saturating_add(shift),
        schema: rela.kind,
        addend: without_fold_flag(rela.addend),
    });
    match mode {
        PdiMode::None => of_input.collect(),
        PdiMode::Load => std::iter::once(load_pdi).chain(of_input).collect(),
        PdiMode::InitOnly => vec![load_pdi],
    }
}

/// Symbols keep value, type and visibility of the input; the null symbol is copied.
fn keep_symbol_fields(elf: &mut Elf, input: &InstructionElf, kept: usize) -> Result<(), AssembleError> {
    let Some(table) = elf.sections.iter_mut().find(|section| section.kind == code::SHT_DYNSYM) else { return Ok(()) };
    let mut symbols = Symbol::parse_table(table)?;
    let (null, others) = symbols.split_at_mut(1);
    // Its name, if it had one, would point into the input's name table.
    null[0] = Symbol { name_at: 0, ..input.null_symbol() };
    for (symbol, of_input) in others.iter_mut().skip(1).zip(&input.symbols()[..kept]) {
        let Symbol { value, size, info, other, .. } = of_input.entry;
        *symbol = Symbol { value, size, info, other, ..*symbol };
    }
    table.data = Symbol::write_table(&symbols);
    Ok(())
}

/// The identifier is that of the input, which covers its whole code: it is copied, not computed anew.
fn copy_uid(elf: &mut Elf, input: &InstructionElf) {
    let note = elf.sections.iter_mut().find(|section| section.name == ".note.xrt.UID");
    if let (Some(note), Some(uid)) = (note, input.uid()) {
        note.data = uid.bytes.to_vec();
    }
}
