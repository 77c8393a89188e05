//! The file: header, segments, sections and their places.

use super::{ElfError, StringTable, code};
use crate::format::bytes::{align_up, array_at, slice_at, u16_at, u32_at};
use std::borrow::Cow;
use std::fmt;
use std::io::Read as _;

/// Bytes of the file header.
pub(super) const HEADER_BYTES: usize = 52;
const SEGMENT_BYTES: usize = 32;
const SECTION_BYTES: usize = 40;
const COMPRESSION_HEADER_BYTES: usize = 12;
const COMPRESS_ZLIB: u32 = 1;
const COMPRESS_ZSTD: u32 = 2;

/// Largest expanded size of a compressed section: the device heap cannot hold more.
pub const MAX_CONTENT_BYTES: usize = 512 << 20;

/// Identification and counts of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElfHeader {
    /// `EI_OSABI`.
    pub os_abi: u8,
    /// `EI_ABIVERSION`: major version in the high, minor in the low nibble.
    pub abi_version: u8,
    /// Bytes 9 to 15 of the identification.
    pub ident_pad: [u8; 7],
    /// `e_type`, 2 for an executable.
    pub file_type: u16,
    /// `e_machine`.
    pub machine: u16,
    /// `e_entry`.
    pub entry: u32,
    /// `e_flags`.
    pub flags: u32,
    /// File offset of the program headers; 0 without any.
    pub segments_at: u32,
    /// File offset of the section headers.
    pub sections_at: u32,
    /// Program header size as stated (0 and 32 both occur without segments).
    pub segment_entry_bytes: u16,
    /// Index of the section with the section names.
    pub names_section: u16,
}

impl ElfHeader {
    /// Header of an AIE2P file, to be completed by [`Elf::place`].
    pub fn new(abi_version: u8) -> Self {
        Self {
            os_abi: super::OSABI_AIE2P,
            abi_version,
            ident_pad: [0; 7],
            file_type: 2,
            machine: 1,
            entry: 0,
            flags: 0,
            segments_at: 0,
            sections_at: 0,
            segment_entry_bytes: 0,
            names_section: 0,
        }
    }

    /// Major ABI version.
    pub fn abi_major(&self) -> u8 {
        self.abi_version >> 4
    }
}

/// Program header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields of Elf32_Phdr in file order")]
pub struct Segment {
    pub kind: u32,
    pub offset: u32,
    pub vaddr: u32,
    pub paddr: u32,
    pub file_bytes: u32,
    pub mem_bytes: u32,
    pub flags: u32,
    pub align: u32,
}

/// Section header and contents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Section {
    /// Name.
    pub name: String,
    /// Offset of the name in the name table.
    pub name_at: u32,
    /// `sh_type`.
    pub kind: u32,
    /// `sh_flags`.
    pub flags: u32,
    /// `sh_addr`.
    pub addr: u32,
    /// File offset of the contents.
    pub offset: u32,
    /// `sh_size`; differs from the length of `data` only for sections without file contents.
    pub size: u32,
    /// `sh_link`.
    pub link: u32,
    /// `sh_info`.
    pub info: u32,
    /// `sh_addralign`.
    pub align: u32,
    /// `sh_entsize`.
    pub entry_bytes: u32,
    /// Contents as stored, compressed or not.
    pub data: Vec<u8>,
}

impl Section {
    /// A section with contents; names and places are filled in later.
    pub fn new(name: &str, kind: u32, flags: u32, align: u32, data: Vec<u8>) -> Self {
        Self { name: name.to_owned(), kind, flags, align, data, ..Self::default() }
    }

    /// Whether the section takes bytes of the file.
    fn has_file_contents(&self) -> bool {
        !matches!(self.kind, 0 | code::SHT_NOBITS)
    }

    /// Contents, expanded if they are compressed. At most `limit_bytes` (and [`MAX_CONTENT_BYTES`]) are expanded.
    pub fn content(&self, limit_bytes: usize) -> Result<Cow<'_, [u8]>, ElfError> {
        if self.flags & code::SHF_COMPRESSED == 0 {
            return Ok(Cow::Borrowed(&self.data));
        }
        let bad = |reason: String| ElfError::BadCompression { section: self.name.clone(), reason };
        let field = |at| u32_at(&self.data, at).ok_or_else(|| bad("the compression header is cut short".to_owned()));
        let (method, size) = (field(0)?, field(4)? as usize);
        field(8)?;
        let limit = limit_bytes.min(MAX_CONTENT_BYTES);
        if size > limit {
            return Err(bad(format!("expands to {size} bytes; at most {limit} are accepted")));
        }
        let packed = &self.data[COMPRESSION_HEADER_BYTES..];
        let expanded = match method {
            COMPRESS_ZLIB => read_exactly(flate2::read::ZlibDecoder::new(packed), size),
            COMPRESS_ZSTD => ruzstd::decoding::StreamingDecoder::new(packed)
                .map_err(|error| std::io::Error::other(error.to_string()))
                .and_then(|decoder| read_exactly(decoder, size)),
            other => return Err(bad(format!("compression method {other} is unknown; wanted 1 (zlib) or 2 (zstd)"))),
        };
        expanded.map(Cow::Owned).map_err(|error| bad(format!("cannot be expanded to {size} bytes: {error}")))
    }
}

/// Reads `size` bytes, no fewer and no more. Allocates as data arrives.
fn read_exactly(mut reader: impl std::io::Read, size: usize) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    reader.by_ref().take(size as u64 + 1).read_to_end(&mut out)?;
    match out.len() == size {
        true => Ok(out),
        false => Err(std::io::Error::other(format!(
            "the data has {} bytes",
            if out.len() < size { "fewer" } else { "more" }
        ))),
    }
}

/// A whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// Header.
    pub header: ElfHeader,
    /// Program headers.
    pub segments: Vec<Segment>,
    /// Sections in index order; index 0 is the null section.
    pub sections: Vec<Section>,
}

impl Elf {
    /// Parses a file. Sections must not share bytes, so the copy is never larger than the input.
    pub fn parse(bytes: &[u8]) -> Result<Self, ElfError> {
        check_identification(bytes)?;
        let half = |at| u16_at(bytes, at).unwrap_or_default();
        let word = |at| u32_at(bytes, at).unwrap_or_default();
        let header = ElfHeader {
            os_abi: bytes[7],
            abi_version: bytes[8],
            ident_pad: array_at(bytes, 9).unwrap_or_default(),
            file_type: half(16),
            machine: half(18),
            entry: word(24),
            flags: word(36),
            segments_at: word(28),
            sections_at: word(32),
            segment_entry_bytes: half(42),
            names_section: half(50),
        };
        let segments = parse_segments(bytes, &header, half(44))?;
        let section_count = half(48);
        let mut sections = parse_sections(bytes, header.sections_at, section_count)?;
        name_sections(&mut sections, header.names_section)?;
        let elf = Self { header, segments, sections };
        elf.check_overlap()?;
        Ok(elf)
    }

    /// The section with this index.
    pub fn section(&self, index: u32) -> Option<&Section> {
        self.sections.get(usize::try_from(index).ok()?)
    }

    /// The only section with this exact name, and its index.
    pub fn find(&self, name: &str) -> Option<(u32, &Section)> {
        self.sections.iter().enumerate().find(|(_, s)| s.name == name).map(|(i, s)| (i as u32, s))
    }

    /// The file's bytes, with every part at its place and zeros between.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ElfError> {
        let end = self.check_overlap()?;
        let mut out = vec![0; end];
        out[..HEADER_BYTES].copy_from_slice(&self.header_bytes()?);
        for (i, segment) in self.segments.iter().enumerate() {
            let at = self.header.segments_at as usize + i * SEGMENT_BYTES;
            out[at..at + SEGMENT_BYTES].copy_from_slice(&segment_bytes(segment));
        }
        for (i, section) in self.sections.iter().enumerate() {
            let at = self.header.sections_at as usize + i * SECTION_BYTES;
            out[at..at + SECTION_BYTES].copy_from_slice(&section_header_bytes(section));
            if section.has_file_contents() {
                let at = section.offset as usize;
                out[at..at + section.data.len()].copy_from_slice(&section.data);
            }
        }
        Ok(out)
    }

    /// Names the sections in `.shstrtab` (the section at `names_section`) and gives every part a place.
    pub fn place(&mut self, plan: &Plan) -> Result<(), ElfError> {
        self.write_names()?;
        self.header.segments_at = 0;
        let mut at = HEADER_BYTES;
        if !self.segments.is_empty() {
            self.header.segments_at = HEADER_BYTES as u32;
            self.header.segment_entry_bytes = SEGMENT_BYTES as u16;
            at += self.segments.len() * SEGMENT_BYTES;
        }
        let count = self.sections.len();
        for placement in &plan.order {
            let section = self.sections.get_mut(placement.section as usize).ok_or(ElfError::BadIndex {
                what: "layout plan".to_owned(),
                index: placement.section,
                count,
            })?;
            at = aligned(at, placement.align)?;
            section.offset = fit("file offset", at)?;
            section.size = fit("section size", section.data.len())?;
            at += section.data.len();
        }
        at = aligned(at, plan.section_headers_align)?;
        self.header.sections_at = fit("file offset", at)?;
        Ok(())
    }

    /// Rebuilds the name table in index order.
    fn write_names(&mut self) -> Result<(), ElfError> {
        let mut names = StringTable::default();
        for section in self.sections.iter_mut().skip(1) {
            section.name_at = fit("name table", names.push(&section.name))?;
        }
        let (index, count) = (self.header.names_section, self.sections.len());
        let table = self.sections.get_mut(usize::from(index)).ok_or(ElfError::BadIndex {
            what: "section of section names".to_owned(),
            index: index.into(),
            count,
        })?;
        table.data = names.into_bytes();
        Ok(())
    }

    fn header_bytes(&self) -> Result<[u8; HEADER_BYTES], ElfError> {
        let header = &self.header;
        let count = |what, len: usize| u16::try_from(len).map_err(|_| ElfError::TooLarge { what, value: len as u64 });
        let mut out = [0; HEADER_BYTES];
        out[..9].copy_from_slice(&[0x7F, b'E', b'L', b'F', 1, 1, 1, header.os_abi, header.abi_version]);
        out[9..16].copy_from_slice(&header.ident_pad);
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(16, &header.file_type.to_le_bytes());
        put(18, &header.machine.to_le_bytes());
        put(20, &1u32.to_le_bytes());
        put(24, &header.entry.to_le_bytes());
        put(28, &header.segments_at.to_le_bytes());
        put(32, &header.sections_at.to_le_bytes());
        put(36, &header.flags.to_le_bytes());
        put(40, &(HEADER_BYTES as u16).to_le_bytes());
        put(42, &header.segment_entry_bytes.to_le_bytes());
        put(44, &count("number of segments", self.segments.len())?.to_le_bytes());
        put(46, &(SECTION_BYTES as u16).to_le_bytes());
        put(48, &count("number of sections", self.sections.len())?.to_le_bytes());
        put(50, &header.names_section.to_le_bytes());
        Ok(out)
    }

    /// Refuses parts that share bytes; returns the end of the last one.
    fn check_overlap(&self) -> Result<usize, ElfError> {
        let mut parts: Vec<(u64, u64, &str)> = vec![(0, HEADER_BYTES as u64, "the file header")];
        parts.push((self.header.segments_at.into(), (self.segments.len() * SEGMENT_BYTES) as u64, "program headers"));
        parts.push((self.header.sections_at.into(), (self.sections.len() * SECTION_BYTES) as u64, "section headers"));
        for section in self.sections.iter().filter(|s| s.has_file_contents()) {
            if section.size as usize != section.data.len() {
                return Err(ElfError::Invalid {
                    what: section.name.clone(),
                    reason: format!("header states {} bytes, contents have {}", section.size, section.data.len()),
                });
            }
            parts.push((section.offset.into(), section.data.len() as u64, &section.name));
        }
        parts.retain(|(_, len, _)| *len > 0);
        parts.sort_unstable();
        for pair in parts.windows(2) {
            let [(at, len, first), (next, _, second)] = [pair[0], pair[1]];
            if at + len > next {
                return Err(ElfError::Overlap { first: first.to_owned(), second: second.to_owned(), at_bytes: next });
            }
        }
        let end = parts.last().map_or(0, |(at, len, _)| at + len);
        usize::try_from(end).map_err(|_| ElfError::TooLarge { what: "file", value: end })
    }
}

/// Order and alignment in which contents are placed after the headers; the section headers follow last.
///
/// Sections that are not named keep offset 0; so does the null section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Sections in file order.
    pub order: Vec<Placement>,
    /// Alignment of the section headers.
    pub section_headers_align: usize,
}

/// Place of one section in a [`Plan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Section index.
    pub section: u32,
    /// Alignment in the file, which may differ from `sh_addralign`.
    pub align: usize,
}

impl Plan {
    /// All sections in index order, each at `align`, or at its own alignment when that is 0.
    pub fn in_index_order(elf: &Elf, align: usize, section_headers_align: usize) -> Self {
        let order = elf.sections.iter().enumerate().skip(1).map(|(i, section)| Placement {
            section: i as u32,
            align: if align == 0 { section.align as usize } else { align },
        });
        Self { order: order.collect(), section_headers_align }
    }
}

fn aligned(at: usize, align: usize) -> Result<usize, ElfError> {
    align_up(at, align).ok_or(ElfError::TooLarge { what: "file offset", value: at as u64 })
}

fn fit(what: &'static str, value: usize) -> Result<u32, ElfError> {
    u32::try_from(value).map_err(|_| ElfError::TooLarge { what, value: value as u64 })
}

fn check_identification(bytes: &[u8]) -> Result<(), ElfError> {
    let out_of_file = || ElfError::OutOfFile {
        what: "ELF header".to_owned(),
        at_bytes: 0,
        len_bytes: HEADER_BYTES as u64,
        file_bytes: bytes.len() as u64,
    };
    let header: [u8; HEADER_BYTES] = array_at(bytes, 0).ok_or_else(out_of_file)?;
    let half = |at: usize| u32::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let word = |at: usize| u32_at(&header, at).unwrap_or_default();
    let segment_entry = if half(44) == 0 { half(42) } else { SEGMENT_BYTES as u32 };
    for (field, found, wanted) in [
        ("magic number", word(0), u32::from_le_bytes([0x7F, b'E', b'L', b'F'])),
        ("class", header[4].into(), 1),
        ("byte order", header[5].into(), 1),
        ("identification version", header[6].into(), 1),
        ("file type", half(16), 2),
        ("version", word(20), 1),
        ("header size", half(40), HEADER_BYTES as u32),
        ("section header size", half(46), SECTION_BYTES as u32),
        ("program header size", half(42), segment_entry),
    ] {
        if found != wanted {
            return Err(ElfError::NotElf { field, found, wanted });
        }
    }
    Ok(())
}

fn parse_segments(bytes: &[u8], header: &ElfHeader, count: u16) -> Result<Vec<Segment>, ElfError> {
    let table = part(bytes, "program headers", header.segments_at, usize::from(count) * SEGMENT_BYTES)?;
    Ok(table
        .chunks_exact(SEGMENT_BYTES)
        .map(|raw| {
            let word = |i: usize| u32_at(raw, 4 * i).unwrap_or_default();
            Segment {
                kind: word(0),
                offset: word(1),
                vaddr: word(2),
                paddr: word(3),
                file_bytes: word(4),
                mem_bytes: word(5),
                flags: word(6),
                align: word(7),
            }
        })
        .collect())
}

fn parse_sections(bytes: &[u8], at: u32, count: u16) -> Result<Vec<Section>, ElfError> {
    let table = part(bytes, "section headers", at, usize::from(count) * SECTION_BYTES)?;
    let mut sections = Vec::with_capacity(count.into());
    // Contents may not add up to more than the file; overlap is checked once names are known.
    let mut total = 0usize;
    for (i, raw) in table.chunks_exact(SECTION_BYTES).enumerate() {
        let word = |i: usize| u32_at(raw, 4 * i).unwrap_or_default();
        let mut section = Section {
            name_at: word(0),
            kind: word(1),
            flags: word(2),
            addr: word(3),
            offset: word(4),
            size: word(5),
            link: word(6),
            info: word(7),
            align: word(8),
            entry_bytes: word(9),
            ..Section::default()
        };
        if section.has_file_contents() {
            let data = part(bytes, format_args!("section {i}"), section.offset, section.size as usize)?;
            total = total.saturating_add(data.len());
            if total > bytes.len() {
                return Err(ElfError::Invalid {
                    what: format!("section {i}"),
                    reason: "the sections together are larger than the file, so they overlap".to_owned(),
                });
            }
            section.data = data.to_vec();
        }
        sections.push(section);
    }
    Ok(sections)
}

fn name_sections(sections: &mut [Section], names_section: u16) -> Result<(), ElfError> {
    let count = sections.len();
    let names = sections.get(usize::from(names_section)).ok_or(ElfError::BadIndex {
        what: "section of section names".to_owned(),
        index: names_section.into(),
        count,
    })?;
    let names = StringTable::from_bytes(names.data.clone());
    for (i, section) in sections.iter_mut().enumerate().skip(1) {
        let name = names
            .get_short(section.name_at)
            .ok_or(ElfError::BadName { what: format!("section {i}"), at_bytes: section.name_at })?;
        section.name = name.to_owned();
    }
    Ok(())
}

fn part(bytes: &[u8], what: impl fmt::Display, at: u32, len: usize) -> Result<&[u8], ElfError> {
    if len == 0 {
        return Ok(&[]);
    }
    slice_at(bytes, at.into(), len as u64).ok_or_else(|| ElfError::OutOfFile {
        what: what.to_string(),
        at_bytes: at.into(),
        len_bytes: len as u64,
        file_bytes: bytes.len() as u64,
    })
}

fn segment_bytes(segment: &Segment) -> [u8; SEGMENT_BYTES] {
    words_to_bytes([
        segment.kind,
        segment.offset,
        segment.vaddr,
        segment.paddr,
        segment.file_bytes,
        segment.mem_bytes,
        segment.flags,
        segment.align,
    ])
}

fn section_header_bytes(section: &Section) -> [u8; SECTION_BYTES] {
    words_to_bytes([
        section.name_at,
        section.kind,
        section.flags,
        section.addr,
        section.offset,
        section.size,
        section.link,
        section.info,
        section.align,
        section.entry_bytes,
    ])
}

fn words_to_bytes<const WORDS: usize, const BYTES: usize>(words: [u32; WORDS]) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    for (chunk, word) in out.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    out
}
