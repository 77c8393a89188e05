//! ELF32 little-endian container of control code.
//!
//! [`Elf`] is the file as such: identification, segments, sections with their place in the file. What [`Elf::parse`]
//! accepted, [`Elf::to_bytes`] gives back byte for byte as long as the gaps between its parts are zero;
//! [`Elf::place`] lays a new file out by a [`Plan`]. [`Program`] is the typed view of kernels, instances, their
//! sections and relocations.

mod build;
mod container;
mod program;
mod tables;

pub use build::{ArgumentSymbol, FullElfSpec, PartialElfSpec, PatchEntry};
pub use container::{Elf, ElfHeader, MAX_CONTENT_BYTES, Placement, Plan, Section, Segment};
pub use program::{DynamicSymbol, Instance, Kernel, KernelMatch, Program, RelocationEntry, SectionKind, SymbolRole};
pub use tables::{Note, NoteList, Rela, StringTable, Symbol, mangle_kernel, parse_kernel_symbol};

use thiserror::Error;

/// `EI_OSABI` of AIE2P control code.
pub const OSABI_AIE2P: u8 = 69;
/// `EI_OSABI` of AIE2PS control code.
pub const OSABI_AIE2PS: u8 = 64;
/// `EI_OSABI` of old tools.
pub const OSABI_LEGACY: u8 = 70;
/// `EI_ABIVERSION` of a partial ELF.
pub const ABI_PARTIAL: u8 = 0x02;
/// `EI_ABIVERSION` of the older configuration ELF, which AIE2P uses.
pub const ABI_CONFIG: u8 = 0x10;
/// `EI_ABIVERSION` of the current configuration ELF.
pub const ABI_CONFIG_CURRENT: u8 = 0x20;
/// `EI_ABIVERSION` whose relocations keep the schema in the low bits of the addend.
pub const ABI_SCHEMA_IN_ADDEND: u8 = 0x01;

/// Section types, flags and symbol codes of the ELF specification that occur here.
pub mod code {
    /// `SHT_PROGBITS`.
    pub const SHT_PROGBITS: u32 = 1;
    /// `SHT_SYMTAB`.
    pub const SHT_SYMTAB: u32 = 2;
    /// `SHT_STRTAB`.
    pub const SHT_STRTAB: u32 = 3;
    /// `SHT_RELA`.
    pub const SHT_RELA: u32 = 4;
    /// `SHT_DYNAMIC`.
    pub const SHT_DYNAMIC: u32 = 6;
    /// `SHT_NOTE`.
    pub const SHT_NOTE: u32 = 7;
    /// `SHT_NOBITS`.
    pub const SHT_NOBITS: u32 = 8;
    /// `SHT_DYNSYM`.
    pub const SHT_DYNSYM: u32 = 11;
    /// `SHT_GROUP`.
    pub const SHT_GROUP: u32 = 17;
    /// `SHF_ALLOC`.
    pub const SHF_ALLOC: u32 = 2;
    /// `SHF_EXECINSTR`.
    pub const SHF_EXECINSTR: u32 = 4;
    /// `SHF_GROUP`.
    pub const SHF_GROUP: u32 = 0x200;
    /// `SHF_COMPRESSED`.
    pub const SHF_COMPRESSED: u32 = 0x800;
    /// `STT_OBJECT`.
    pub const STT_OBJECT: u8 = 1;
    /// `STT_FUNC`.
    pub const STT_FUNC: u8 = 2;
    /// `STB_GLOBAL` in the high half of `st_info`.
    pub const STB_GLOBAL: u8 = 1;
    /// `STB_WEAK` in the high half of `st_info`.
    pub const STB_WEAK: u8 = 2;
    /// Note type of the column count.
    pub const NOTE_COLUMNS: u32 = 6;
    /// Note type of the UID.
    pub const NOTE_UID: u32 = 4;
}

/// An ELF file that cannot be read or written.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ElfError {
    /// Not this kind of file.
    #[error("not an ELF32 little-endian executable: {field} is {found}, wanted {wanted}")]
    NotElf {
        /// Header field.
        field: &'static str,
        /// Value found.
        found: u32,
        /// Value wanted.
        wanted: u32,
    },
    /// A part of the file lies outside it.
    #[error("{what}: bytes {at_bytes}..{} are outside the file of {file_bytes} bytes", at_bytes.saturating_add(*len_bytes))]
    OutOfFile {
        /// Part.
        what: String,
        /// First byte.
        at_bytes: u64,
        /// Length.
        len_bytes: u64,
        /// Size of the file.
        file_bytes: u64,
    },
    /// Two parts share bytes of the file.
    #[error("{first} and {second} overlap at byte {at_bytes}")]
    Overlap {
        /// Earlier part.
        first: String,
        /// Later part.
        second: String,
        /// First shared byte.
        at_bytes: u64,
    },
    /// A name that is not terminated, not UTF-8, or outside its table.
    #[error("{what}: no name at byte {at_bytes} of the string table")]
    BadName {
        /// What has the name.
        what: String,
        /// Offset in the string table.
        at_bytes: u32,
    },
    /// A section that is needed.
    #[error("no {name} section")]
    MissingSection {
        /// Section name.
        name: &'static str,
    },
    /// Several sections where one is expected.
    #[error("sections {first} and {second} of {owner} are both {kind}; one is expected")]
    DuplicateSection {
        /// Instance or file.
        owner: String,
        /// Kind of the sections.
        kind: &'static str,
        /// First section.
        first: String,
        /// Second section.
        second: String,
    },
    /// An index that points nowhere.
    #[error("{what}: index {index} is out of range ({count} entries)")]
    BadIndex {
        /// What holds the index.
        what: String,
        /// The index.
        index: u32,
        /// Entries there are.
        count: usize,
    },
    /// A table whose size is not a whole number of entries.
    #[error("{section}: {size_bytes} bytes are not a whole number of {entry_bytes}-byte entries")]
    RaggedTable {
        /// Section.
        section: String,
        /// Size found.
        size_bytes: usize,
        /// Size of an entry.
        entry_bytes: usize,
    },
    /// A note that is cut short or has an unexpected shape.
    #[error("{section}: unexpected note layout: {reason}")]
    BadNote {
        /// Section.
        section: String,
        /// What is wrong.
        reason: String,
    },
    /// Compressed contents that cannot be expanded.
    #[error("{section}: {reason}")]
    BadCompression {
        /// Section.
        section: String,
        /// What is wrong.
        reason: String,
    },
    /// A kernel symbol that does not name a kernel with pointer arguments.
    #[error("kernel symbol {symbol:?}: {reason}")]
    BadKernel {
        /// Symbol name.
        symbol: String,
        /// What is wrong.
        reason: String,
    },
    /// A kernel or instance that is not there.
    #[error("no kernel {wanted:?}; the file has {available}")]
    NoKernel {
        /// Name asked for, `kernel` or `kernel:instance`.
        wanted: String,
        /// What there is.
        available: String,
    },
    /// Two things with one name.
    #[error("{what} {name:?} appears twice")]
    DuplicateName {
        /// What has the name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// Something the file states that cannot be.
    #[error("{what}: {reason}")]
    Invalid {
        /// Part of the file.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// A file too large for 32-bit offsets or 16-bit counts.
    #[error("{what} is too large for an ELF32 file: {value}")]
    TooLarge {
        /// What.
        what: &'static str,
        /// Its size.
        value: u64,
    },
}

#[cfg(test)]
mod tests;
