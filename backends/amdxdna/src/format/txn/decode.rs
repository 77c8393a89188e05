//! Reading streams.

use super::{
    DEV_GEN_MAX, DdrPatch, DdrPatchForm, HEADER_BYTES, Header, Masked, Op, OpFault, OpKind, Stream, Tag, TxnError,
    Version, Words, opcode,
};
use crate::format::bytes::{array_at, u16_at, u32_at, u64_at};
use crate::format::registers::ARRAY_ROWS;

/// A stream in memory, read without allocation.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    header: Header,
    op_count: u32,
    /// Exactly the declared bytes.
    bytes: &'a [u8],
}

impl<'a> View<'a> {
    /// Reads the header at the start of `bytes`; more may follow the stream.
    pub fn new(bytes: &'a [u8]) -> Result<Self, TxnError> {
        let raw: [u8; HEADER_BYTES] = array_at(bytes, 0).ok_or(TxnError::NoHeader { found_bytes: bytes.len() })?;
        let word = |i: usize| u32::from_le_bytes([raw[i], raw[i + 1], raw[i + 2], raw[i + 3]]);
        let [major, minor, dev_gen, rows, columns, mem_tile_rows, ..] = raw;
        let version = Version::from_numbers(major, minor).ok_or(TxnError::Version {
            major,
            minor,
            first: word(0),
            second: word(4),
        })?;
        if rows != ARRAY_ROWS {
            return Err(TxnError::Header { field: "number of rows", found: rows.into(), wanted: "6" });
        }
        if dev_gen == 0 || dev_gen > DEV_GEN_MAX {
            return Err(TxnError::Header { field: "device generation", found: dev_gen.into(), wanted: "1 to 8" });
        }
        let (op_count, declared_bytes) = (word(8), word(12));
        let stream = usize::try_from(declared_bytes)
            .ok()
            .filter(|len| *len >= HEADER_BYTES)
            .and_then(|len| bytes.get(..len))
            .ok_or(TxnError::Size { declared_bytes, found_bytes: bytes.len() })?;
        let header = Header { version, dev_gen, columns, mem_tile_rows, pad: u16::from_le_bytes([raw[6], raw[7]]) };
        Ok(Self { header, op_count, bytes: stream })
    }

    /// Header.
    pub fn header(&self) -> Header {
        self.header
    }

    /// Operations that the header declares.
    pub fn op_count(&self) -> u32 {
        self.op_count
    }

    /// Bytes of the stream, including the header.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The operations in order. The iterator ends after the first error.
    pub fn ops(&self) -> Ops<'a> {
        Ops { view: *self, index: 0, at: HEADER_BYTES, done: false }
    }

    /// An owned copy of the whole stream.
    pub fn to_stream(&self) -> Result<Stream, TxnError> {
        // Every operation has at least one word, so a wrong count cannot make this large.
        let bound = (self.bytes.len() - HEADER_BYTES) / 4;
        let mut ops = Vec::with_capacity(bound.min(self.op_count as usize));
        for op in self.ops() {
            ops.push(op?.op.into_owned());
        }
        Ok(Stream { header: self.header, ops })
    }
}

/// An operation and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpAt<'a> {
    /// Index of the operation.
    pub index: u32,
    /// Byte offset from the start of the stream.
    pub at_bytes: usize,
    /// Bytes of the operation.
    pub len_bytes: usize,
    /// The operation.
    pub op: Op<'a>,
}

/// Iterator over a stream's operations.
#[derive(Debug, Clone)]
pub struct Ops<'a> {
    view: View<'a>,
    index: u32,
    at: usize,
    done: bool,
}

impl<'a> Iterator for Ops<'a> {
    type Item = Result<OpAt<'a>, TxnError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let rest = &self.view.bytes[self.at..];
        let (index, at_bytes) = (self.index, self.at);
        if rest.is_empty() || index == self.view.op_count {
            self.done = true;
            return (!rest.is_empty() || index != self.view.op_count).then(|| Err(self.count_mismatch(rest)));
        }
        match decode_op(rest, self.view.header.version) {
            Ok((op, len_bytes)) => {
                self.index += 1;
                self.at += len_bytes;
                Some(Ok(OpAt { index, at_bytes, len_bytes, op }))
            }
            Err(fault) => {
                self.done = true;
                Some(Err(TxnError::Op { index, at_bytes, fault }))
            }
        }
    }
}

impl Ops<'_> {
    /// Counts what is left, so that the message names the real number as far as the rest can be read.
    fn count_mismatch(&self, mut rest: &[u8]) -> TxnError {
        let mut found = self.index;
        while !rest.is_empty() {
            match decode_op(rest, self.view.header.version) {
                Ok((_, len)) => rest = &rest[len..],
                Err(_) => rest = &[],
            }
            found = found.saturating_add(1);
        }
        TxnError::OpCount { declared: self.view.op_count, found, size_bytes: self.view.bytes.len() }
    }
}

/// Bytes of one operation, once its length is known to be there.
struct Raw<'a> {
    name: &'static str,
    bytes: &'a [u8],
}

impl<'a> Raw<'a> {
    fn u16(&self, at: usize) -> u16 {
        u16_at(self.bytes, at).unwrap_or_default()
    }

    fn u32(&self, at: usize) -> u32 {
        u32_at(self.bytes, at).unwrap_or_default()
    }

    fn u64(&self, at: usize) -> u64 {
        u64_at(self.bytes, at).unwrap_or_default()
    }

    /// A 64-bit register address, which has to fit 32 bits.
    fn wide_register(&self, at: usize) -> Result<u32, OpFault> {
        let address = self.u64(at);
        u32::try_from(address).map_err(|_| OpFault::Register { name: self.name, address })
    }

    /// The words from byte `at`, whose distance to the end is a multiple of 4.
    fn words(&self, at: usize) -> Words<'a> {
        self.bytes.get(at..).and_then(Words::from_le_bytes).unwrap_or_else(|| Words::from(Vec::new()))
    }
}

/// Takes `needed` bytes from the front of `rest`.
fn take<'a>(name: &'static str, rest: &'a [u8], needed: usize) -> Result<Raw<'a>, OpFault> {
    match rest.get(..needed) {
        Some(bytes) => Ok(Raw { name, bytes }),
        None => Err(OpFault::Truncated { name, needed_bytes: needed, left_bytes: rest.len() }),
    }
}

/// Takes an operation whose size field at byte `at` must satisfy `accept`.
fn take_sized<'a>(
    name: &'static str,
    rest: &'a [u8],
    at: usize,
    wanted: &'static str,
    accept: impl Fn(u32) -> bool,
) -> Result<Raw<'a>, OpFault> {
    let found_bytes =
        u32_at(rest, at).ok_or(OpFault::Truncated { name, needed_bytes: at + 4, left_bytes: rest.len() })?;
    if !accept(found_bytes) {
        return Err(OpFault::Size { name, found_bytes, wanted });
    }
    take(name, rest, usize::try_from(found_bytes).unwrap_or(usize::MAX))
}

/// Decodes the operation at the front of `rest`, which is not empty; returns its length.
fn decode_op(rest: &[u8], version: Version) -> Result<(Op<'_>, usize), OpFault> {
    let code = rest[0];
    let name = match opcode::name(code) {
        Some(name) if opcode::is_host_only(code) => return Err(OpFault::HostOnly { name }),
        Some(name) => name,
        None => return Err(OpFault::Unknown { opcode: code }),
    };
    let (raw, kind) = match code {
        opcode::WRITE | opcode::MASKWRITE | opcode::MASKPOLL | opcode::MASKPOLL_BUSY | opcode::BLOCKWRITE => {
            decode_register_op(code, name, rest, version)?
        }
        opcode::TCT | opcode::DDR_PATCH | opcode::READ_REGS | opcode::RECORD_TIMER | opcode::MERGE_SYNC => {
            decode_custom(code, name, rest, version)?
        }
        _ => decode_control(code, name, rest)?,
    };
    Ok((Op { tag: decode_tag(&raw, &kind, version), kind }, raw.bytes.len()))
}

fn decode_register_op<'a>(
    code: u8,
    name: &'static str,
    rest: &'a [u8],
    version: Version,
) -> Result<(Raw<'a>, OpKind<'a>), OpFault> {
    match (code, version) {
        (opcode::WRITE, Version::Wide) => {
            let raw = take_sized(name, rest, 20, "24", |size| size == 24)?;
            let kind = OpKind::Write { register: raw.wide_register(8)?, value: raw.u32(16) };
            Ok((raw, kind))
        }
        (opcode::WRITE, Version::Compact) => {
            let raw = take(name, rest, 12)?;
            let kind = OpKind::Write { register: raw.u32(4), value: raw.u32(8) };
            Ok((raw, kind))
        }
        (opcode::BLOCKWRITE, _) => {
            let (register_at, data_at) = match version {
                Version::Wide => (8, 16),
                Version::Compact => (4, 12),
            };
            let minimum = data_at as u32 + 4;
            let wanted = "the header and at least one word, a multiple of 4";
            let raw = take_sized(name, rest, data_at - 4, wanted, |size| size >= minimum && size.is_multiple_of(4))?;
            let kind = OpKind::BlockWrite { register: raw.u32(register_at), data: raw.words(data_at) };
            Ok((raw, kind))
        }
        (_, Version::Wide) => {
            let raw = take_sized(name, rest, 24, "28 or 32", |size| size == 28 || size == 32)?;
            let tail = u32_at(raw.bytes, 28);
            let operand = Masked { register: raw.wide_register(8)?, value: raw.u32(16), mask: raw.u32(20), tail };
            Ok((raw, masked(code, operand)))
        }
        (_, Version::Compact) => {
            let raw = take(name, rest, 16)?;
            let operand = Masked { register: raw.u32(4), value: raw.u32(8), mask: raw.u32(12), tail: None };
            Ok((raw, masked(code, operand)))
        }
    }
}

fn masked(code: u8, operand: Masked) -> OpKind<'static> {
    match code {
        opcode::MASKWRITE => OpKind::MaskWrite(operand),
        opcode::MASKPOLL => OpKind::MaskPoll(operand),
        _ => OpKind::MaskPollBusy(operand),
    }
}

/// Operations that are the same in both encodings and carry no size field.
fn decode_control<'a>(code: u8, name: &'static str, rest: &'a [u8]) -> Result<(Raw<'a>, OpKind<'a>), OpFault> {
    let len = match code {
        opcode::LOADPDI | opcode::CREATE_SCRATCHPAD => 16,
        opcode::UPDATE_REG => 12,
        opcode::LOAD_PM_START | opcode::UPDATE_STATE_TABLE => 8,
        _ => 4,
    };
    let raw = take(name, rest, len)?;
    let byte = |at: usize| raw.bytes[at];
    let kind = match code {
        opcode::NOOP => OpKind::Noop,
        opcode::PREEMPT => OpKind::Preempt { level: byte(1) },
        opcode::LOADPDI => OpKind::LoadPdi { id: raw.u16(2), size_bytes: raw.u32(4), address: raw.u64(8) },
        opcode::LOAD_PM_START => OpKind::LoadPmStart { op_count: raw.u32(0) >> 8, load_id: raw.u32(4) },
        opcode::CREATE_SCRATCHPAD => {
            OpKind::CreateScratchpad { usage: byte(1), size_bytes: raw.u32(4), offset: raw.u64(8) }
        }
        opcode::UPDATE_STATE_TABLE => {
            OpKind::UpdateStateTable { index: byte(1), function: byte(2), operand: raw.u32(4) }
        }
        opcode::UPDATE_REG => {
            OpKind::UpdateReg { index: byte(1), function: byte(2), operand: raw.u32(4), register: raw.u32(8) }
        }
        opcode::UPDATE_SCRATCH => OpKind::UpdateScratch,
        other => return Err(OpFault::Unknown { opcode: other }),
    };
    Ok((raw, kind))
}

/// Custom operations: size field at byte 4, payload from byte 8.
fn decode_custom<'a>(
    code: u8,
    name: &'static str,
    rest: &'a [u8],
    version: Version,
) -> Result<(Raw<'a>, OpKind<'a>), OpFault> {
    let sized = |wanted, sizes: &[u32]| take_sized(name, rest, 4, wanted, |size| sizes.contains(&size));
    match code {
        opcode::TCT => {
            let raw = sized("16", &[16])?;
            let kind = OpKind::Tct { word: raw.u32(8), config: raw.u32(12) };
            Ok((raw, kind))
        }
        opcode::DDR_PATCH => {
            let raw = match version {
                Version::Wide => sized("48", &[48])?,
                Version::Compact => sized("24 or 48", &[24, 48])?,
            };
            let kind = OpKind::DdrPatch(decode_ddr_patch(&raw)?);
            Ok((raw, kind))
        }
        opcode::RECORD_TIMER => {
            let raw = sized("12 or 16", &[12, 16])?;
            let kind = OpKind::RecordTimer { id: raw.u32(8), tail: u32_at(raw.bytes, 12) };
            Ok((raw, kind))
        }
        opcode::MERGE_SYNC => {
            let raw = sized("12", &[12])?;
            let kind = OpKind::MergeSync { tokens: raw.bytes[8], columns: raw.bytes[9], pad: raw.u16(10) };
            Ok((raw, kind))
        }
        _ => {
            let wanted = "16 and 8 for each register";
            let raw = take_sized(name, rest, 4, wanted, |size| size >= 16 && size.is_multiple_of(8))?;
            let (count, size_bytes) = (raw.u32(8), raw.u32(4));
            if u64::from(count) * 8 + 16 != u64::from(size_bytes) {
                return Err(OpFault::Count { name, count, size_bytes });
            }
            let kind = OpKind::ReadRegs { pad: raw.u32(12), addresses: raw.words(16) };
            Ok((raw, kind))
        }
    }
}

fn decode_ddr_patch(raw: &Raw<'_>) -> Result<DdrPatch, OpFault> {
    if raw.bytes.len() == 24 {
        let [argument, pad @ ..] = raw.u32(12).to_le_bytes();
        return Ok(DdrPatch {
            register: raw.u32(8),
            argument: argument.into(),
            offset: raw.u64(16),
            form: DdrPatchForm::Short { pad },
        });
    }
    let argument = raw.u64(32);
    Ok(DdrPatch {
        register: raw.wide_register(24)?,
        argument: u32::try_from(argument).map_err(|_| OpFault::Inexpressible {
            name: raw.name,
            field: "argument index",
            value: argument,
            version: Version::Wide,
        })?,
        offset: raw.u64(40),
        form: DdrPatchForm::Long { base: raw.u64(8), action: raw.u32(16), pad: raw.u32(20) },
    })
}

/// Bytes that no field of `kind` covers.
fn decode_tag(raw: &Raw<'_>, kind: &OpKind<'_>, version: Version) -> Tag {
    let head: [u8; 3] = array_at(raw.bytes, 1).unwrap_or_default();
    let mut tag = Tag { bytes: head, word: 0 };
    for (byte, used) in tag.bytes.iter_mut().zip(used_tag_bytes(kind)) {
        if used {
            *byte = 0;
        }
    }
    if has_tag_word(kind, version) {
        tag.word = raw.u32(4);
    }
    tag
}

/// Which of bytes 1 to 3 carry fields of the operation.
pub(super) fn used_tag_bytes(kind: &OpKind<'_>) -> [bool; 3] {
    match kind {
        OpKind::Preempt { .. } | OpKind::CreateScratchpad { .. } => [true, false, false],
        OpKind::LoadPdi { .. } => [false, true, true],
        OpKind::LoadPmStart { .. } => [true, true, true],
        OpKind::UpdateStateTable { .. } | OpKind::UpdateReg { .. } => [true, true, false],
        _ => [false, false, false],
    }
}

/// Whether bytes 4 to 7 are informative.
pub(super) fn has_tag_word(kind: &OpKind<'_>, version: Version) -> bool {
    version == Version::Wide
        && matches!(
            kind,
            OpKind::Write { .. }
                | OpKind::BlockWrite { .. }
                | OpKind::MaskWrite(_)
                | OpKind::MaskPoll(_)
                | OpKind::MaskPollBusy(_)
        )
}
