//! Disassembly.

use super::{DdrPatch, DdrPatchForm, Header, Masked, Op, OpKind, Words};
use crate::format::registers::{Address, QueuePush, Register, ShimBd, TileKind};
use std::fmt;

/// Words of a block write shown in a line.
const SHOWN_WORDS: usize = 8;

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {}, device generation {}, {} columns", self.version, self.dev_gen, self.columns)
    }
}

impl fmt::Display for Op<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl fmt::Display for OpKind<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Write { register, value } => {
                let address = Address::from_word(*register);
                write!(f, " {address} = {value:#x}")?;
                fmt_value(f, address, *value)
            }
            Self::BlockWrite { register, data } => {
                let address = Address::from_word(*register);
                write!(f, " {address}, {} words =", data.len())?;
                fmt_words(f, data)?;
                fmt_block(f, address, data)
            }
            Self::MaskWrite(x) | Self::MaskPoll(x) | Self::MaskPollBusy(x) => fmt_masked(f, x),
            Self::Noop | Self::UpdateScratch => Ok(()),
            Self::Preempt { level } => write!(f, " level {level}"),
            Self::LoadPdi { id, size_bytes, address } => write!(f, " id {id}, {size_bytes} bytes at {address:#x}"),
            Self::LoadPmStart { op_count, load_id } => write!(f, " id {load_id}, {op_count} operations"),
            Self::CreateScratchpad { usage, size_bytes, offset } => {
                write!(f, " usage {usage}, {size_bytes} bytes at {offset:#x}")
            }
            Self::UpdateStateTable { index, function, operand } => {
                write!(f, " state[{index}] {} {operand:#x}", function_name(*function))
            }
            Self::UpdateReg { index, function, operand, register } => {
                let address = Address::from_word(*register);
                write!(f, " {address} = state[{index}] {} {operand:#x}", function_name(*function))
            }
            Self::Tct { word, config } => fmt_wait(f, self, *word, *config),
            Self::DdrPatch(patch) => fmt_ddr_patch(f, patch),
            Self::ReadRegs { addresses, .. } => {
                for pair in 0..addresses.len() / 2 {
                    let separator = if pair == 0 { "" } else { "," };
                    write!(f, "{separator} {}", Address::from_word(addresses.get(2 * pair).unwrap_or_default()))?;
                }
                Ok(())
            }
            Self::RecordTimer { id, .. } => write!(f, " id {id}"),
            Self::MergeSync { tokens, columns, .. } => write!(f, " {tokens} tokens from {columns} columns"),
        }
    }
}

/// What a written word means, where that is known.
fn fmt_value(f: &mut fmt::Formatter<'_>, address: Address, value: u32) -> fmt::Result {
    if let (Some(tile), Some(Register::TaskQueue(..))) = (address.tile(), address.register())
        && let Ok(push) = QueuePush::decode(value, tile)
    {
        let token = if push.issue_token { ", token" } else { "" };
        return write!(f, " (bd{}, {} times{token})", push.start_bd, push.repeat);
    }
    Ok(())
}

/// Summary of a whole shim descriptor.
fn fmt_block(f: &mut fmt::Formatter<'_>, address: Address, data: &Words<'_>) -> fmt::Result {
    let is_bd = matches!(address.register(), Some(Register::Bd { word: 0, .. }));
    if is_bd
        && address.tile() == Some(TileKind::Shim)
        && data.len() == 8
        && let Some(Ok(bd)) = data.first::<8>().map(|words| ShimBd::decode(&words))
    {
        return write!(f, " ({} words at {:#x})", bd.length_words, bd.address);
    }
    Ok(())
}

fn fmt_words(f: &mut fmt::Formatter<'_>, data: &Words<'_>) -> fmt::Result {
    for word in data.iter().take(SHOWN_WORDS) {
        write!(f, " {word:#x}")?;
    }
    match data.len() > SHOWN_WORDS {
        true => f.write_str(" …"),
        false => Ok(()),
    }
}

fn fmt_masked(f: &mut fmt::Formatter<'_>, operand: &Masked) -> fmt::Result {
    let address = Address::from_word(operand.register);
    write!(f, " {address} = {:#x}, mask {:#x}", operand.value, operand.mask)
}

fn fmt_wait(f: &mut fmt::Formatter<'_>, op: &OpKind<'_>, word: u32, config: u32) -> fmt::Result {
    match op.token_wait() {
        Some(Ok(wait)) => write!(
            f,
            " {}{} of columns {}+{}, rows {}+{}",
            wait.direction, wait.channel, wait.column, wait.column_count, wait.row, wait.row_count
        ),
        _ => write!(f, " {word:#x} {config:#x}"),
    }
}

fn fmt_ddr_patch(f: &mut fmt::Formatter<'_>, patch: &DdrPatch) -> fmt::Result {
    let address = Address::from_word(patch.register);
    write!(f, " {address} = argument {} + {:#x}", patch.argument, patch.offset)?;
    match patch.form {
        DdrPatchForm::Long { action, .. } if action != 0 => write!(f, ", action {action}"),
        _ => Ok(()),
    }
}

fn function_name(function: u8) -> &'static str {
    match function {
        0 => "multiply",
        1 => "increment",
        2 => "decrement",
        _ => "unknown function of",
    }
}
