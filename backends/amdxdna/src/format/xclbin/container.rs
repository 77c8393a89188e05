//! Header and sections.

use super::XclbinError;
use crate::format::bytes::{array_at, pad_to, slice_at, u16_at, u32_at, u64_at};

/// Section kinds.
pub mod kind {
    /// XML description of the kernels.
    pub const EMBEDDED_METADATA: u32 = 2;
    /// Memory banks.
    pub const MEM_TOPOLOGY: u32 = 6;
    /// Which argument may live in which bank.
    pub const CONNECTIVITY: u32 = 7;
    /// Kernel instances.
    pub const IP_LAYOUT: u32 = 8;
    /// A partition image by itself.
    pub const PDI: u32 = 18;
    /// JSON description of the array.
    pub const AIE_METADATA: u32 = 25;
    /// Memory banks, grouped.
    pub const GROUP_TOPOLOGY: u32 = 26;
    /// Connections of grouped banks.
    pub const GROUP_CONNECTIVITY: u32 = 27;
    /// Partition and its images.
    pub const AIE_PARTITION: u32 = 32;

    /// Name of a known kind.
    pub fn name(kind: u32) -> Option<&'static str> {
        Some(match kind {
            EMBEDDED_METADATA => "EMBEDDED_METADATA",
            MEM_TOPOLOGY => "MEM_TOPOLOGY",
            CONNECTIVITY => "CONNECTIVITY",
            IP_LAYOUT => "IP_LAYOUT",
            PDI => "PDI",
            AIE_METADATA => "AIE_METADATA",
            GROUP_TOPOLOGY => "GROUP_TOPOLOGY",
            GROUP_CONNECTIVITY => "GROUP_CONNECTIVITY",
            AIE_PARTITION => "AIE_PARTITION",
            _ => return None,
        })
    }
}

const MAGIC: [u8; 8] = *b"xclbin2\0";
const HEADER_BYTES: usize = 0x1C8;
const SECTION_HEADER_BYTES: usize = 40;
const NAME_BYTES: usize = 16;
const DATA_ALIGN: usize = 8;
const UNSIGNED: i32 = -1;

/// Container header. Length and section count are computed when a file is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XclbinHeader {
    /// Length of a signature; −1 without one.
    pub signature_len: i32,
    /// Reserved bytes at 0x0C, usually 0xFF.
    pub reserved: [u8; 28],
    /// Key block.
    pub key_block: [u8; 256],
    /// Unique id.
    pub unique_id: u64,
    /// Time stamp.
    pub time_stamp: u64,
    /// Time stamp of the feature ROM.
    pub feature_rom_time_stamp: u64,
    /// Patch, major and minor version.
    pub version: (u16, u8, u8),
    /// Mode.
    pub mode: u16,
    /// Action mask.
    pub action_mask: u16,
    /// Interface UUID.
    pub interface_uuid: [u8; 16],
    /// Platform name, 64 bytes with padding.
    pub platform: [u8; 64],
    /// UUID of this file.
    pub uuid: [u8; 16],
    /// Debug file name, 16 bytes with padding.
    pub debug_name: [u8; 16],
    /// Padding after the section count.
    pub pad: [u8; 4],
}

impl XclbinHeader {
    /// Header of an unsigned file.
    pub fn new(uuid: [u8; 16]) -> Self {
        Self {
            signature_len: UNSIGNED,
            reserved: [0xFF; 28],
            key_block: [0xFF; 256],
            unique_id: 0,
            time_stamp: 0,
            feature_rom_time_stamp: 0,
            version: (0, 2, 0),
            mode: 0,
            action_mask: 0,
            interface_uuid: [0; 16],
            platform: [0; 64],
            uuid,
            debug_name: [0; 16],
            pad: [0; 4],
        }
    }
}

/// One section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XclbinSection {
    /// Kind, see [`kind`].
    pub kind: u32,
    /// Name, 16 bytes with padding.
    pub name: [u8; NAME_BYTES],
    /// Padding after the name.
    pub pad: [u8; 4],
    /// Contents.
    pub data: Vec<u8>,
}

impl XclbinSection {
    /// A section of a known kind under its usual name, cut to the field.
    pub fn new(kind: u32, data: Vec<u8>) -> Self {
        let mut name = [0; NAME_BYTES];
        let text = kind::name(kind).unwrap_or_default().as_bytes();
        // The field keeps its terminating NUL.
        let len = text.len().min(NAME_BYTES - 1);
        name[..len].copy_from_slice(&text[..len]);
        Self { kind, name, pad: [0; 4], data }
    }
}

/// A whole container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xclbin {
    /// Header.
    pub header: XclbinHeader,
    /// Sections in header order.
    pub sections: Vec<XclbinSection>,
}

impl Xclbin {
    /// Parses a container.
    pub fn parse(bytes: &[u8]) -> Result<Self, XclbinError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(XclbinError::Magic { found: bytes.iter().take(MAGIC.len()).copied().collect() });
        }
        let out_of_file = |what: &str, at_bytes, len_bytes, container_bytes| XclbinError::OutOfRange {
            what: what.to_owned(),
            container: "the file",
            at_bytes,
            len_bytes,
            container_bytes,
        };
        let file_bytes = bytes.len() as u64;
        if bytes.len() < HEADER_BYTES {
            return Err(out_of_file("header", 0, HEADER_BYTES as u64, file_bytes));
        }
        let length = u64_at(bytes, 0x130).unwrap_or_default();
        let file = slice_at(bytes, 0, length).ok_or_else(|| out_of_file("declared length", 0, length, file_bytes))?;
        let count = u32_at(bytes, 0x1C0).unwrap_or_default();
        let table_bytes = u64::from(count) * SECTION_HEADER_BYTES as u64;
        let table = slice_at(file, HEADER_BYTES as u64, table_bytes)
            .ok_or_else(|| out_of_file("section headers", HEADER_BYTES as u64, table_bytes, length))?;
        let mut sections = Vec::with_capacity(count as usize);
        let mut total = 0usize;
        for (i, raw) in table.chunks_exact(SECTION_HEADER_BYTES).enumerate() {
            let (at, len) = (u64_at(raw, 0x18).unwrap_or_default(), u64_at(raw, 0x20).unwrap_or_default());
            let data = slice_at(file, at, len).ok_or_else(|| out_of_file(&format!("section {i}"), at, len, length))?;
            total = total.saturating_add(data.len());
            if total > file.len() {
                return Err(XclbinError::Overlapping { what: "the xclbin".to_owned(), container_bytes: file.len() });
            }
            sections.push(XclbinSection {
                kind: u32_at(raw, 0).unwrap_or_default(),
                name: array_at(raw, 4).unwrap_or_default(),
                pad: array_at(raw, 0x14).unwrap_or_default(),
                data: data.to_vec(),
            });
        }
        Ok(Self { header: parse_header(bytes), sections })
    }

    /// The first section of a kind.
    pub fn section(&self, kind: u32) -> Option<&XclbinSection> {
        self.sections.iter().find(|section| section.kind == kind)
    }

    /// Contents of a section that must be there.
    pub(super) fn required(&self, kind: u32) -> Result<&[u8], XclbinError> {
        let name = kind::name(kind).unwrap_or("unknown");
        self.section(kind).map(|section| section.data.as_slice()).ok_or(XclbinError::MissingSection { name })
    }

    /// The file: sections in order, each at a multiple of 8 bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = &self.header;
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&header.signature_len.to_le_bytes());
        out.extend_from_slice(&header.reserved);
        out.extend_from_slice(&header.key_block);
        out.extend_from_slice(&header.unique_id.to_le_bytes());
        let length_at = out.len();
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(&header.time_stamp.to_le_bytes());
        out.extend_from_slice(&header.feature_rom_time_stamp.to_le_bytes());
        out.extend_from_slice(&header.version.0.to_le_bytes());
        out.extend_from_slice(&[header.version.1, header.version.2]);
        out.extend_from_slice(&header.mode.to_le_bytes());
        out.extend_from_slice(&header.action_mask.to_le_bytes());
        out.extend_from_slice(&header.interface_uuid);
        out.extend_from_slice(&header.platform);
        out.extend_from_slice(&header.uuid);
        out.extend_from_slice(&header.debug_name);
        out.extend_from_slice(&(self.sections.len() as u32).to_le_bytes());
        out.extend_from_slice(&header.pad);
        let mut at = (HEADER_BYTES + self.sections.len() * SECTION_HEADER_BYTES).next_multiple_of(DATA_ALIGN);
        for section in &self.sections {
            out.extend_from_slice(&section.kind.to_le_bytes());
            out.extend_from_slice(&section.name);
            out.extend_from_slice(&section.pad);
            out.extend_from_slice(&(at as u64).to_le_bytes());
            out.extend_from_slice(&(section.data.len() as u64).to_le_bytes());
            at = (at + section.data.len()).next_multiple_of(DATA_ALIGN);
        }
        for section in &self.sections {
            pad_to(&mut out, DATA_ALIGN);
            out.extend_from_slice(&section.data);
        }
        pad_to(&mut out, DATA_ALIGN);
        let length = out.len() as u64;
        out[length_at..length_at + 8].copy_from_slice(&length.to_le_bytes());
        out
    }
}

/// Reads the header of a file that is long enough.
fn parse_header(bytes: &[u8]) -> XclbinHeader {
    let half = |at| u16_at(bytes, at).unwrap_or_default();
    let long = |at| u64_at(bytes, at).unwrap_or_default();
    XclbinHeader {
        signature_len: u32_at(bytes, 8).unwrap_or_default() as i32,
        reserved: array_at(bytes, 0x0C).unwrap_or([0; 28]),
        key_block: array_at(bytes, 0x28).unwrap_or([0; 256]),
        unique_id: long(0x128),
        time_stamp: long(0x138),
        feature_rom_time_stamp: long(0x140),
        version: (half(0x148), bytes[0x14A], bytes[0x14B]),
        mode: half(0x14C),
        action_mask: half(0x14E),
        interface_uuid: array_at(bytes, 0x150).unwrap_or_default(),
        platform: array_at(bytes, 0x160).unwrap_or([0; 64]),
        uuid: array_at(bytes, 0x1A0).unwrap_or_default(),
        debug_name: array_at(bytes, 0x1B0).unwrap_or_default(),
        pad: array_at(bytes, 0x1C4).unwrap_or_default(),
    }
}
