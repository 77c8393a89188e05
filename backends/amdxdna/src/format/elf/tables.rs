//! Entries of symbol, relocation, string and note sections.

use super::{ElfError, Section, code};
use crate::format::bytes::{array_at, pad_to, u16_at, u32_at};

/// Longest section or symbol name that is accepted.
const MAX_NAME_BYTES: usize = 255;

/// NUL-terminated names, found by byte offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StringTable(Vec<u8>);

impl Default for StringTable {
    /// The empty name only.
    fn default() -> Self {
        Self(vec![0])
    }
}

impl StringTable {
    /// Table with these bytes.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The same, for names of at most [`MAX_NAME_BYTES`]: many entries may share one long name.
    pub(super) fn get_short(&self, at: u32) -> Option<&str> {
        self.get(at).filter(|name| name.len() <= MAX_NAME_BYTES)
    }

    /// Name at byte `at`: terminated and valid UTF-8.
    pub fn get(&self, at: u32) -> Option<&str> {
        let rest = self.0.get(usize::try_from(at).ok()?..)?;
        let end = rest.iter().position(|b| *b == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }

    /// Appends a name and returns its offset; the empty name is at 0.
    pub fn push(&mut self, name: &str) -> usize {
        if name.is_empty() {
            return 0;
        }
        let at = self.0.len();
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(0);
        at
    }

    /// The table's bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Symbol table entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Symbol {
    /// Offset of the name in the linked string table.
    pub name_at: u32,
    /// `st_value`.
    pub value: u32,
    /// `st_size`.
    pub size: u32,
    /// `st_info`: binding in the high, type in the low nibble.
    pub info: u8,
    /// `st_other`.
    pub other: u8,
    /// `st_shndx`.
    pub section: u16,
}

impl Symbol {
    const BYTES: usize = 16;

    /// Type: low nibble of `info`.
    pub fn kind(&self) -> u8 {
        self.info & 15
    }

    /// Entries of a symbol section.
    pub fn parse_table(section: &Section) -> Result<Vec<Self>, ElfError> {
        Ok(entries(section, Self::BYTES)?
            .map(|raw| Self {
                name_at: u32_at(raw, 0).unwrap_or_default(),
                value: u32_at(raw, 4).unwrap_or_default(),
                size: u32_at(raw, 8).unwrap_or_default(),
                info: raw[12],
                other: raw[13],
                section: u16_at(raw, 14).unwrap_or_default(),
            })
            .collect())
    }

    /// Contents of a symbol section.
    pub fn write_table(symbols: &[Self]) -> Vec<u8> {
        let mut out = Vec::with_capacity(symbols.len() * Self::BYTES);
        for symbol in symbols {
            out.extend([symbol.name_at, symbol.value, symbol.size].iter().flat_map(|w| w.to_le_bytes()));
            out.extend([symbol.info, symbol.other]);
            out.extend(symbol.section.to_le_bytes());
        }
        out
    }
}

/// Relocation entry with addend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rela {
    /// Byte offset in the section that the symbol is defined in.
    pub offset: u32,
    /// Symbol index.
    pub symbol: u32,
    /// Relocation type.
    pub kind: u8,
    /// Addend; an unsigned number here.
    pub addend: u32,
}

impl Rela {
    const BYTES: usize = 12;

    /// Entries of a relocation section.
    pub fn parse_table(section: &Section) -> Result<Vec<Self>, ElfError> {
        Ok(entries(section, Self::BYTES)?
            .map(|raw| {
                let info = u32_at(raw, 4).unwrap_or_default();
                Self {
                    offset: u32_at(raw, 0).unwrap_or_default(),
                    symbol: info >> 8,
                    kind: info as u8,
                    addend: u32_at(raw, 8).unwrap_or_default(),
                }
            })
            .collect())
    }

    /// Contents of a relocation section. Symbol indices have 24 bits.
    pub fn write_table(relas: &[Self]) -> Result<Vec<u8>, ElfError> {
        let mut out = Vec::with_capacity(relas.len() * Self::BYTES);
        for rela in relas {
            if rela.symbol >> 24 != 0 {
                return Err(ElfError::TooLarge { what: "symbol index of a relocation", value: rela.symbol.into() });
            }
            let info = rela.symbol << 8 | u32::from(rela.kind);
            out.extend([rela.offset, info, rela.addend].iter().flat_map(|w| w.to_le_bytes()));
        }
        Ok(out)
    }
}

/// Whole entries of a table section.
pub(super) fn entries(section: &Section, entry_bytes: usize) -> Result<std::slice::ChunksExact<'_, u8>, ElfError> {
    match section.data.len().is_multiple_of(entry_bytes) {
        true => Ok(section.data.chunks_exact(entry_bytes)),
        false => {
            Err(ElfError::RaggedTable { section: section.name.clone(), size_bytes: section.data.len(), entry_bytes })
        }
    }
}

/// One note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Owner without its terminating NUL.
    pub owner: String,
    /// Type.
    pub kind: u32,
    /// Contents.
    pub desc: Vec<u8>,
}

/// Notes of a section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NoteList(pub Vec<Note>);

impl NoteList {
    /// Reads the notes of a section.
    pub fn parse(section: &Section) -> Result<Self, ElfError> {
        let bad = |reason: &str| ElfError::BadNote { section: section.name.clone(), reason: reason.to_owned() };
        let mut rest = section.data.as_slice();
        let mut notes = Vec::new();
        while !rest.is_empty() {
            let [name_len, desc_len, kind] =
                [0, 4, 8].map(|at| u32_at(rest, at).ok_or_else(|| bad("the header is cut short")));
            let (name_len, desc_len, kind) = (name_len? as usize, desc_len? as usize, kind?);
            let padded = |len: usize| len.checked_next_multiple_of(4);
            let desc_at = padded(name_len).and_then(|len| len.checked_add(12));
            let end = desc_at.zip(padded(desc_len)).and_then(|(at, len)| at.checked_add(len));
            let (Some(desc_at), Some(end)) = (desc_at, end) else { return Err(bad("sizes overflow")) };
            // The last note may lack its padding.
            let body = rest.get(desc_at..desc_at.saturating_add(desc_len)).ok_or_else(|| bad("it is cut short"))?;
            let name = rest.get(12..12 + name_len).and_then(|n| n.strip_suffix(&[0]));
            let owner = name.and_then(|n| std::str::from_utf8(n).ok());
            let owner = owner.ok_or_else(|| bad("the owner is not a terminated name"))?;
            notes.push(Note { owner: owner.to_owned(), kind, desc: body.to_vec() });
            rest = rest.get(end..).unwrap_or_default();
        }
        Ok(Self(notes))
    }

    /// Contents of a note section.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for note in &self.0 {
            let header = [note.owner.len() as u32 + 1, note.desc.len() as u32, note.kind];
            out.extend(header.iter().flat_map(|w| w.to_le_bytes()));
            out.extend_from_slice(note.owner.as_bytes());
            out.push(0);
            pad_to(&mut out, 4);
            out.extend_from_slice(&note.desc);
            pad_to(&mut out, 4);
        }
        out
    }

    /// The note of owner `XRT` with this type.
    pub fn xrt(&self, kind: u32) -> Option<&Note> {
        self.0.iter().find(|note| note.owner == "XRT" && note.kind == kind)
    }

    /// A single note of owner `XRT`.
    pub fn single_xrt(kind: u32, desc: Vec<u8>) -> Self {
        Self(vec![Note { owner: "XRT".to_owned(), kind, desc }])
    }
}

/// Columns in a configuration note.
pub(super) fn columns_of(section: &Section) -> Result<u32, ElfError> {
    let notes = NoteList::parse(section)?;
    let bad = |reason: String| ElfError::BadNote { section: section.name.clone(), reason };
    let note = notes.xrt(code::NOTE_COLUMNS).ok_or_else(|| bad("no XRT note of type 6".to_owned()))?;
    let desc: [u8; 4] = array_at(&note.desc, 0)
        .filter(|_| note.desc.len() == 4)
        .ok_or_else(|| bad(format!("column count of {} bytes, wanted 4", note.desc.len())))?;
    Ok(u32::from_le_bytes(desc))
}

/// Mangled symbol name of a kernel with `args` pointer arguments.
pub fn mangle_kernel(name: &str, args: usize) -> String {
    format!("_Z{}{}{}", name.len(), name, "Pc".repeat(args))
}

/// Name and number of pointer arguments of a mangled kernel symbol.
///
/// Only what control code has is understood: `_Z`, length, name, then pointers to builtin types (qualifiers allowed)
/// or `v` for no arguments.
pub fn parse_kernel_symbol(symbol: &str) -> Result<(String, usize), ElfError> {
    let bad = |reason: String| ElfError::BadKernel { symbol: symbol.to_owned(), reason };
    let rest = symbol.strip_prefix("_Z").ok_or_else(|| bad("not a mangled name (_Z…)".to_owned()))?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let len: usize = rest[..digits].parse().map_err(|_| bad("no name length after _Z".to_owned()))?;
    let body = &rest[digits..];
    let (Some(name), Some(params)) = (body.get(..len), body.get(len..)) else {
        return Err(bad(format!("the name is shorter than its length {len}")));
    };
    if name.is_empty() {
        return Err(bad("the name is empty".to_owned()));
    }
    let args = count_pointers(params)
        .map_err(|code| bad(format!("argument {code:?} is not a pointer; scalar arguments are not supported")))?;
    Ok((name.to_owned(), args))
}

/// Counts pointer parameters; fails with the offending rest.
fn count_pointers(mut params: &str) -> Result<usize, &str> {
    if params == "v" {
        return Ok(0);
    }
    let mut earlier = Vec::new();
    let mut count = 0;
    while !params.is_empty() {
        let (is_pointer, rest) = parse_type(params, &mut earlier).ok_or(params)?;
        if !is_pointer {
            return Err(params);
        }
        params = rest;
        count += 1;
    }
    Ok(count)
}

/// Reads one mangled type: whether it is a pointer, and what follows. `earlier` holds the types that `S_`, `S0_`, …
/// refer to.
fn parse_type<'a>(text: &'a str, earlier: &mut Vec<bool>) -> Option<(bool, &'a str)> {
    let mut chars = text.chars();
    match chars.next()? {
        'P' => {
            let (_, rest) = parse_type(chars.as_str(), earlier)?;
            earlier.push(true);
            Some((true, rest))
        }
        'K' | 'V' => {
            let unqualified = chars.as_str().trim_start_matches(['K', 'V']);
            let (is_pointer, rest) = parse_type(unqualified, earlier)?;
            earlier.push(is_pointer);
            Some((is_pointer, rest))
        }
        'S' => {
            let (number, rest) = chars.as_str().split_once('_')?;
            let index = match number {
                "" => 0,
                _ => usize::from_str_radix(number, 36).ok()?.checked_add(1)?,
            };
            Some((*earlier.get(index)?, rest))
        }
        builtin if builtin.is_ascii_lowercase() => Some((false, chars.as_str())),
        _ => None,
    }
}
