//! Writing streams.

use super::decode::{has_tag_word, used_tag_bytes};
use super::{COMPACT_ARGUMENT_MAX, opcode};
use super::{DdrPatch, DdrPatchForm, HEADER_BYTES, Header, Masked, Op, OpFault, OpKind, Stream, TxnError, Version};
use crate::format::registers::ARRAY_ROWS;

/// Encodes header and operations.
pub(super) fn stream(stream: &Stream) -> Result<Vec<u8>, TxnError> {
    let mut out = vec![0; HEADER_BYTES];
    for (index, op) in stream.ops.iter().enumerate() {
        let at_bytes = out.len();
        encode_op(op, stream.header.version, &mut out).map_err(|fault| TxnError::Op {
            index: u32::try_from(index).unwrap_or(u32::MAX),
            at_bytes,
            fault,
        })?;
    }
    let too_long = || TxnError::TooLong { ops: stream.ops.len(), size_bytes: out.len() };
    let op_count = u32::try_from(stream.ops.len()).map_err(|_| too_long())?;
    let size_bytes = u32::try_from(out.len()).map_err(|_| too_long())?;
    out[..HEADER_BYTES].copy_from_slice(&header(&stream.header, op_count, size_bytes));
    Ok(out)
}

fn header(header: &Header, op_count: u32, size_bytes: u32) -> [u8; HEADER_BYTES] {
    let (major, minor) = header.version.numbers();
    let [pad_low, pad_high] = header.pad.to_le_bytes();
    let mut out = [0; HEADER_BYTES];
    out[..8].copy_from_slice(&[
        major,
        minor,
        header.dev_gen,
        ARRAY_ROWS,
        header.columns,
        header.mem_tile_rows,
        pad_low,
        pad_high,
    ]);
    out[8..12].copy_from_slice(&op_count.to_le_bytes());
    out[12..].copy_from_slice(&size_bytes.to_le_bytes());
    out
}

/// Appends fields in order.
struct Fields<'a>(&'a mut Vec<u8>);

impl Fields<'_> {
    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
}

/// Bytes of the operation when encoded in `version`.
pub(super) fn encode_op(op: &Op<'_>, version: Version, out: &mut Vec<u8>) -> Result<(), OpFault> {
    check_expressible(op, version)?;
    let start = out.len();
    let wide = version == Version::Wide;
    let mut f = Fields(out);
    f.u32(first_word(op));
    if has_tag_word(&op.kind, version) {
        f.u32(op.tag.word);
    }
    match &op.kind {
        OpKind::Write { register, value } if wide => {
            f.u64((*register).into()).u32(*value).u32(24);
        }
        OpKind::Write { register, value } => {
            f.u32(*register).u32(*value);
        }
        OpKind::BlockWrite { register, data } => {
            let head = if wide { 16 } else { 12 };
            f.u32(*register).u32(sized("BLOCKWRITE", head, data.len(), 4, version)?);
            data.write_to(f.0);
        }
        OpKind::MaskWrite(x) | OpKind::MaskPoll(x) | OpKind::MaskPollBusy(x) => encode_masked(x, wide, &mut f),
        OpKind::Noop | OpKind::Preempt { .. } | OpKind::UpdateScratch => {}
        OpKind::LoadPdi { size_bytes, address, .. } => {
            f.u32(*size_bytes).u64(*address);
        }
        OpKind::LoadPmStart { load_id, .. } => {
            f.u32(*load_id);
        }
        OpKind::CreateScratchpad { size_bytes, offset, .. } => {
            f.u32(*size_bytes).u64(*offset);
        }
        OpKind::UpdateStateTable { operand, .. } => {
            f.u32(*operand);
        }
        OpKind::UpdateReg { operand, register, .. } => {
            f.u32(*operand).u32(*register);
        }
        OpKind::Tct { word, config } => {
            f.u32(16).u32(*word).u32(*config);
        }
        OpKind::DdrPatch(patch) => encode_ddr_patch(patch, &mut f),
        OpKind::ReadRegs { pad, addresses } => {
            let count = addresses.len() / 2;
            f.u32(sized("READ_REGS", 16, count, 8, version)?).u32(count as u32).u32(*pad);
            addresses.write_to(f.0);
        }
        OpKind::RecordTimer { id, tail } => {
            f.u32(if tail.is_some() { 16 } else { 12 }).u32(*id);
            tail.map(|word| f.u32(word));
        }
        OpKind::MergeSync { tokens, columns, pad } => {
            f.u32(12).u32(u32::from(*tokens) | u32::from(*columns) << 8 | u32::from(*pad) << 16);
        }
    }
    debug_assert!((out.len() - start).is_multiple_of(4));
    Ok(())
}

/// Opcode, fields in bytes 1 to 3, and the informative rest of them.
fn first_word(op: &Op<'_>) -> u32 {
    let mut bytes = op.tag.bytes;
    for (byte, used) in bytes.iter_mut().zip(used_tag_bytes(&op.kind)) {
        if used {
            *byte = 0;
        }
    }
    let fields = match op.kind {
        OpKind::Preempt { level } => u32::from(level) << 8,
        OpKind::LoadPdi { id, .. } => u32::from(id) << 16,
        OpKind::LoadPmStart { op_count, .. } => op_count << 8,
        OpKind::CreateScratchpad { usage, .. } => u32::from(usage) << 8,
        OpKind::UpdateStateTable { index, function, .. } | OpKind::UpdateReg { index, function, .. } => {
            u32::from(index) << 8 | u32::from(function) << 16
        }
        _ => 0,
    };
    u32::from_le_bytes([op.kind.opcode(), bytes[0], bytes[1], bytes[2]]) | fields
}

fn encode_masked(operand: &Masked, wide: bool, f: &mut Fields<'_>) {
    if !wide {
        f.u32(operand.register).u32(operand.value).u32(operand.mask);
        return;
    }
    f.u64(operand.register.into()).u32(operand.value).u32(operand.mask);
    f.u32(if operand.tail.is_some() { 32 } else { 28 });
    operand.tail.map(|word| f.u32(word));
}

fn encode_ddr_patch(patch: &DdrPatch, f: &mut Fields<'_>) {
    match patch.form {
        DdrPatchForm::Long { base, action, pad } => {
            f.u32(48).u64(base).u32(action).u32(pad);
            f.u64(patch.register.into()).u64(patch.argument.into()).u64(patch.offset);
        }
        DdrPatchForm::Short { pad: [a, b, c] } => {
            let argument = patch.argument as u8;
            f.u32(24).u32(patch.register).u32(u32::from_le_bytes([argument, a, b, c])).u64(patch.offset);
        }
    }
}

/// Size field of an operation with `count` entries of `entry` bytes after `head` bytes.
fn sized(name: &'static str, head: usize, count: usize, entry: usize, version: Version) -> Result<u32, OpFault> {
    count
        .checked_mul(entry)
        .and_then(|len| len.checked_add(head))
        .and_then(|size| u32::try_from(size).ok())
        .ok_or(OpFault::Inexpressible { name, field: "length", value: count as u64, version })
}

/// Refuses what would be lost or misread.
fn check_expressible(op: &Op<'_>, version: Version) -> Result<(), OpFault> {
    let name = op.kind.name();
    let refuse = |field, value| Err(OpFault::Inexpressible { name, field, value, version });
    if op.tag.word != 0 && !has_tag_word(&op.kind, version) {
        return refuse("informative word", op.tag.word.into());
    }
    match &op.kind {
        OpKind::BlockWrite { data, .. } if data.is_empty() => refuse("block length", 0),
        OpKind::ReadRegs { addresses, .. } if !addresses.len().is_multiple_of(2) => {
            refuse("odd number of address words", addresses.len() as u64)
        }
        OpKind::LoadPmStart { op_count, .. } if *op_count >> 24 != 0 => refuse("operation count", (*op_count).into()),
        OpKind::MaskWrite(Masked { tail: Some(tail), .. })
        | OpKind::MaskPoll(Masked { tail: Some(tail), .. })
        | OpKind::MaskPollBusy(Masked { tail: Some(tail), .. })
            if version == Version::Compact =>
        {
            refuse("eighth word", (*tail).into())
        }
        OpKind::DdrPatch(DdrPatch { form: DdrPatchForm::Short { .. }, argument, .. })
            if version == Version::Wide || *argument > COMPACT_ARGUMENT_MAX =>
        {
            refuse("short form of argument", (*argument).into())
        }
        _ => Ok(()),
    }
}

/// Bytes that an operation takes in `version`.
pub(super) fn op_len_bytes(op: &OpKind<'_>, version: Version) -> usize {
    let wide = version == Version::Wide;
    match op.opcode() {
        opcode::NOOP | opcode::PREEMPT | opcode::UPDATE_SCRATCH => 4,
        opcode::LOAD_PM_START | opcode::UPDATE_STATE_TABLE => 8,
        opcode::UPDATE_REG | opcode::MERGE_SYNC => 12,
        opcode::LOADPDI | opcode::CREATE_SCRATCHPAD | opcode::TCT => 16,
        _ => match op {
            OpKind::Write { .. } => {
                if wide {
                    24
                } else {
                    12
                }
            }
            OpKind::BlockWrite { data, .. } => (if wide { 16 } else { 12 }) + 4 * data.len(),
            OpKind::MaskWrite(x) | OpKind::MaskPoll(x) | OpKind::MaskPollBusy(x) => match (wide, x.tail) {
                (true, Some(_)) => 32,
                (true, None) => 28,
                (false, _) => 16,
            },
            OpKind::DdrPatch(DdrPatch { form: DdrPatchForm::Long { .. }, .. }) => 48,
            OpKind::DdrPatch(_) => 24,
            OpKind::ReadRegs { addresses, .. } => 16 + 4 * addresses.len(),
            OpKind::RecordTimer { tail, .. } => 12 + 4 * usize::from(tail.is_some()),
            _ => 0,
        },
    }
}
