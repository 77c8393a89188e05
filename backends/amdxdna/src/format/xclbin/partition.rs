//! AIE_PARTITION.

use super::XclbinError;
use crate::format::bytes::{array_at, pad_to, slice_at, u16_at, u32_at, u64_at};

const PARTITION_BYTES: usize = 184;
const PDI_BYTES: usize = 96;
const GROUP_BYTES: usize = 96;
/// Alignment of partition images in the section.
const IMAGE_ALIGN: usize = 16;

/// A partition: columns, and the images that configure them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Partition {
    /// Version of the section's layout.
    pub schema_version: u8,
    /// Name.
    pub name: String,
    /// Operations per cycle, a hint for the driver's resource solver.
    pub ops_per_cycle: u32,
    /// Fingerprint of the inference part.
    pub inference_fingerprint: u64,
    /// Fingerprint of the pre- and post-processing part.
    pub pre_post_fingerprint: u64,
    /// Columns.
    pub column_width: u16,
    /// First columns the partition may be placed at.
    pub start_columns: Vec<u16>,
    /// Images.
    pub pdis: Vec<AiePdi>,
    /// Commit of the kernel sources.
    pub kernel_commit_id: Option<String>,
}

/// A partition image and what it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AiePdi {
    /// UUID.
    pub uuid: [u8; 16],
    /// The image.
    pub image: Vec<u8>,
    /// Groups of configuration objects.
    pub cdo_groups: Vec<CdoGroup>,
}

/// Kind of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CdoGroupKind {
    /// Primary.
    Primary,
    /// Reduced form of a primary group.
    Lite,
    /// Pre- or post-processing.
    PrePost,
    /// A code that is not documented.
    Other(u8),
}

impl CdoGroupKind {
    fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Primary,
            2 => Self::Lite,
            3 => Self::PrePost,
            other => Self::Other(other),
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Primary => 1,
            Self::Lite => 2,
            Self::PrePost => 3,
            Self::Other(code) => code,
        }
    }
}

/// A group of configuration objects, and the kernels it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CdoGroup {
    /// Name.
    pub name: String,
    /// Kind.
    pub kind: CdoGroupKind,
    /// Image id.
    pub pdi_id: u64,
    /// Kernel ids.
    pub dpu_kernel_ids: Vec<u64>,
    /// Groups that come before.
    pub pre_cdo_groups: Vec<u32>,
}

impl Partition {
    /// Parses an AIE_PARTITION section.
    pub fn parse(data: &[u8]) -> Result<Self, XclbinError> {
        let mut reader = Reader { data, copied: 0 };
        let head = reader.bytes("partition", 0, PARTITION_BYTES as u64)?;
        let word = |at| u32_at(head, at).unwrap_or_default();
        let long = |at| u64_at(head, at).unwrap_or_default();
        let start_columns = reader.array("start columns", head, 0x28, 2)?;
        let pdis = reader.array("images", head, 0x78, PDI_BYTES)?;
        Ok(Self {
            schema_version: head[0],
            name: reader.text("partition name", word(4))?,
            ops_per_cycle: word(8),
            inference_fingerprint: long(0x10),
            pre_post_fingerprint: long(0x18),
            column_width: u16_at(head, 0x20).unwrap_or_default(),
            start_columns: start_columns.chunks_exact(2).filter_map(|raw| u16_at(raw, 0)).collect(),
            pdis: pdis.chunks_exact(PDI_BYTES).map(|raw| reader.pdi(raw)).collect::<Result<_, _>>()?,
            kernel_commit_id: match word(0x80) {
                0 => None,
                at => Some(reader.text("kernel commit id", at)?),
            },
        })
    }

    /// Contents of an AIE_PARTITION section.
    pub fn to_bytes(&self) -> Result<Vec<u8>, XclbinError> {
        let mut out = vec![0; PARTITION_BYTES];
        let name_at = put_text(&mut out, "partition name", &self.name)?;
        let columns: Vec<u8> = self.start_columns.iter().flat_map(|c| c.to_le_bytes()).collect();
        let columns_at = put(&mut out, 8, &columns);
        let mut pdis = Vec::with_capacity(self.pdis.len() * PDI_BYTES);
        for pdi in &self.pdis {
            pdis.extend_from_slice(&pdi.write(&mut out)?);
        }
        let pdis_at = put(&mut out, 8, &pdis);
        let commit_at = match &self.kernel_commit_id {
            Some(id) => put_text(&mut out, "kernel commit id", id)?,
            None => 0,
        };
        if u32::try_from(out.len()).is_err() {
            return Err(XclbinError::Invalid {
                what: "AIE_PARTITION".to_owned(),
                reason: format!("{} bytes do not fit its 32-bit offsets", out.len()),
            });
        }
        out[0] = self.schema_version;
        set_word(&mut out, 4, name_at);
        set_word(&mut out, 8, self.ops_per_cycle);
        out[0x10..0x18].copy_from_slice(&self.inference_fingerprint.to_le_bytes());
        out[0x18..0x20].copy_from_slice(&self.pre_post_fingerprint.to_le_bytes());
        out[0x20..0x22].copy_from_slice(&self.column_width.to_le_bytes());
        set_array(&mut out, 0x28, self.start_columns.len(), columns_at);
        set_array(&mut out, 0x78, self.pdis.len(), pdis_at);
        set_word(&mut out, 0x80, commit_at);
        Ok(out)
    }

    /// Index of the image that serves a kernel.
    pub fn pdi_of_kernel(&self, dpu_kernel_id: u64) -> Option<usize> {
        self.pdis.iter().position(|pdi| pdi.cdo_groups.iter().any(|g| g.dpu_kernel_ids.contains(&dpu_kernel_id)))
    }
}

impl AiePdi {
    /// Appends what the entry refers to and returns the entry.
    fn write(&self, out: &mut Vec<u8>) -> Result<Vec<u8>, XclbinError> {
        let image_at = put(out, IMAGE_ALIGN, &self.image);
        let mut groups = Vec::with_capacity(self.cdo_groups.len() * GROUP_BYTES);
        for group in &self.cdo_groups {
            groups.extend_from_slice(&group.write(out)?);
        }
        let groups_at = put(out, 8, &groups);
        let mut entry = vec![0; PDI_BYTES];
        entry[..16].copy_from_slice(&self.uuid);
        set_array(&mut entry, 0x10, self.image.len(), image_at);
        set_array(&mut entry, 0x18, self.cdo_groups.len(), groups_at);
        Ok(entry)
    }
}

impl CdoGroup {
    /// Appends what the entry refers to and returns the entry.
    fn write(&self, out: &mut Vec<u8>) -> Result<Vec<u8>, XclbinError> {
        let ids: Vec<u8> = self.dpu_kernel_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let ids_at = put(out, 8, &ids);
        let before: Vec<u8> = self.pre_cdo_groups.iter().flat_map(|id| id.to_le_bytes()).collect();
        let before_at = put(out, 8, &before);
        let name_at = put_text(out, "CDO group name", &self.name)?;
        let mut entry = vec![0; GROUP_BYTES];
        set_word(&mut entry, 0, name_at);
        entry[4] = self.kind.code();
        entry[8..16].copy_from_slice(&self.pdi_id.to_le_bytes());
        set_array(&mut entry, 0x10, self.dpu_kernel_ids.len(), ids_at);
        set_array(&mut entry, 0x18, self.pre_cdo_groups.len(), before_at);
        Ok(entry)
    }
}

/// Appends aligned bytes and returns their offset.
fn put(out: &mut Vec<u8>, align: usize, bytes: &[u8]) -> u32 {
    pad_to(out, align);
    // A section above 4 GiB is refused at the end, so a wrapped offset is never written.
    let at = out.len() as u32;
    out.extend_from_slice(bytes);
    at
}

fn put_text(out: &mut Vec<u8>, what: &'static str, text: &str) -> Result<u32, XclbinError> {
    if text.contains('\0') {
        return Err(XclbinError::Invalid { what: what.to_owned(), reason: "the text contains a NUL".to_owned() });
    }
    let at = put(out, 8, text.as_bytes());
    out.push(0);
    Ok(at)
}

fn set_word(out: &mut [u8], at: usize, value: u32) {
    out[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn set_array(out: &mut [u8], at: usize, count: usize, offset: u32) {
    set_word(out, at, count as u32);
    set_word(out, at + 4, offset);
}

/// Reads parts of the section and counts the bytes, so that shared parts cannot multiply the input.
struct Reader<'a> {
    data: &'a [u8],
    copied: usize,
}

impl<'a> Reader<'a> {
    /// Copies may add up to the section twice: texts and short arrays may be shared.
    fn spend(&mut self, bytes: usize) -> Result<(), XclbinError> {
        self.copied = self.copied.saturating_add(bytes);
        match self.copied > self.data.len().saturating_mul(2) {
            true => {
                Err(XclbinError::Overlapping { what: "AIE_PARTITION".to_owned(), container_bytes: self.data.len() })
            }
            false => Ok(()),
        }
    }

    fn bytes(&mut self, what: &str, at: u64, len: u64) -> Result<&'a [u8], XclbinError> {
        let bytes = slice_at(self.data, at, len).ok_or_else(|| XclbinError::OutOfRange {
            what: what.to_owned(),
            container: "AIE_PARTITION",
            at_bytes: at,
            len_bytes: len,
            container_bytes: self.data.len() as u64,
        })?;
        self.spend(bytes.len())?;
        Ok(bytes)
    }

    /// An array named by {count, offset} at `at` of `entry`.
    fn array(&mut self, what: &str, entry: &[u8], at: usize, entry_bytes: usize) -> Result<&'a [u8], XclbinError> {
        let count = u32_at(entry, at).unwrap_or_default();
        let offset = u32_at(entry, at + 4).unwrap_or_default();
        if count == 0 {
            return Ok(&[]);
        }
        self.bytes(what, offset.into(), u64::from(count) * entry_bytes as u64)
    }

    /// Terminated text; offset 0, where the section itself starts, is no text.
    fn text(&mut self, what: &str, at: u32) -> Result<String, XclbinError> {
        if at == 0 {
            return Ok(String::new());
        }
        let bad = || XclbinError::BadText { what: what.to_owned(), at_bytes: at.into() };
        let rest = self.data.get(at as usize..).ok_or_else(bad)?;
        let len = rest.iter().position(|byte| *byte == 0).ok_or_else(bad)?;
        self.spend(len + 1)?;
        std::str::from_utf8(&rest[..len]).map(str::to_owned).map_err(|_| bad())
    }

    fn pdi(&mut self, entry: &[u8]) -> Result<AiePdi, XclbinError> {
        let image = self.array("image", entry, 0x10, 1)?.to_vec();
        let groups = self.array("CDO groups", entry, 0x18, GROUP_BYTES)?;
        Ok(AiePdi {
            uuid: array_at(entry, 0).unwrap_or_default(),
            image,
            cdo_groups: groups.chunks_exact(GROUP_BYTES).map(|raw| self.group(raw)).collect::<Result<_, _>>()?,
        })
    }

    fn group(&mut self, entry: &[u8]) -> Result<CdoGroup, XclbinError> {
        let ids = self.array("kernel ids", entry, 0x10, 8)?;
        let before = self.array("preceding CDO groups", entry, 0x18, 4)?;
        Ok(CdoGroup {
            name: self.text("CDO group name", u32_at(entry, 0).unwrap_or_default())?,
            kind: CdoGroupKind::from_code(entry[4]),
            pdi_id: u64_at(entry, 8).unwrap_or_default(),
            dpu_kernel_ids: ids.chunks_exact(8).filter_map(|raw| u64_at(raw, 0)).collect(),
            pre_cdo_groups: before.chunks_exact(4).filter_map(|raw| u32_at(raw, 0)).collect(),
        })
    }
}
