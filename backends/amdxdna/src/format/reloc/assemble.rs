//! From `DDR_PATCH` operations to relocations.

use super::{RelocError, Schema};
use crate::format::registers::{Address, Register, TileKind};
use crate::format::txn::{OpKind, Stream, Version};
use std::collections::{HashMap, HashSet};

/// Buffers of a partial ELF are numbered from here: opcode, instruction buffer and its length precede them.
pub const PARTIAL_ARGUMENT_BASE: u32 = 3;
/// Largest argument index that has a relocation.
pub const ARGUMENT_MAX: u32 = 32;
/// Bit that compilers add to the offset of later arguments for firmware that does not add the host aperture itself.
pub const FOLD_FLAG: u64 = 0x8000_0000;
/// First argument for which [`FOLD_FLAG`] is legal.
pub const FOLD_FROM_ARGUMENT: u32 = 5;

/// Control code ready for host patching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssembledCode {
    /// Encoded stream; address bits of patched descriptors are zero.
    pub code: Vec<u8>,
    /// Patches in operation order.
    pub patches: Vec<AssembledPatch>,
}

/// One patch of assembled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AssembledPatch {
    /// Argument index as in the operation, from 0.
    pub argument: u32,
    /// How the value is inserted.
    pub schema: Schema,
    /// Mask of a scalar, or length in bytes of the descriptor's buffer.
    pub size: u32,
    /// Byte offset in the code.
    pub offset: u32,
    /// Addend.
    pub addend: u32,
}

/// What a `DDR_PATCH` register means.
struct Target {
    schema: Schema,
    mask: u32,
    /// Bytes from the start of the descriptor to the patched place.
    offset: u32,
    /// Whether address bits of the descriptor are cleared.
    clear_address: bool,
}

/// The latest write of a descriptor.
#[derive(Clone, Copy)]
struct Block {
    op: usize,
    payload_at: u32,
}

/// Encodes `stream` with its descriptor patches turned into relocations. The `DDR_PATCH` operations stay in the code,
/// without [`FOLD_FLAG`].
pub fn assemble(mut stream: Stream) -> Result<AssembledCode, RelocError> {
    let offsets = stream.op_offsets();
    let payload_in_op = match stream.header.version {
        Version::Wide => 16,
        Version::Compact => 12,
    };
    let mut blocks: HashMap<u32, Block> = HashMap::new();
    let mut patches = Vec::new();
    // A place is patched once, before the run; two patches of one write cannot both hold.
    let mut places = HashSet::new();
    for index in 0..stream.ops.len() {
        match &stream.ops[index].kind {
            OpKind::BlockWrite { register, .. } => {
                let payload_at = u32::try_from(offsets[index] + payload_in_op).map_err(|_| RelocError::Assemble {
                    op_index: index,
                    register: Address::from_word(*register).to_string(),
                    reason: "the code is longer than 4 GiB".to_owned(),
                })?;
                blocks.insert(*register, Block { op: index, payload_at });
            }
            OpKind::DdrPatch(patch) => {
                let register = patch.register;
                let assembled = assemble_patch(&mut stream, index, &blocks)?;
                if !places.insert((assembled.offset, assembled.schema)) {
                    return Err(RelocError::Assemble {
                        op_index: index,
                        register: Address::from_word(register).to_string(),
                        reason: "its descriptor was patched already and not written again since".to_owned(),
                    });
                }
                patches.push(assembled);
            }
            _ => {}
        }
    }
    let code = stream.encode().map_err(|error| RelocError::Assemble {
        op_index: 0,
        register: "nothing".to_owned(),
        reason: error.to_string(),
    })?;
    Ok(AssembledCode { code, patches })
}

fn assemble_patch(
    stream: &mut Stream,
    index: usize,
    blocks: &HashMap<u32, Block>,
) -> Result<AssembledPatch, RelocError> {
    let OpKind::DdrPatch(patch) = &mut stream.ops[index].kind else {
        unreachable!("called for DDR_PATCH operations");
    };
    let (register, argument) = (patch.register, patch.argument);
    let fail = |reason: String| RelocError::Assemble {
        op_index: index,
        register: Address::from_word(register).to_string(),
        reason,
    };
    if argument > ARGUMENT_MAX {
        return Err(fail(format!("argument {argument} is above the largest index {ARGUMENT_MAX}")));
    }
    if patch.offset & FOLD_FLAG != 0 {
        if argument < FOLD_FROM_ARGUMENT {
            return Err(fail(format!(
                "bit 31 of the offset is set on argument {argument}, below {FOLD_FROM_ARGUMENT}"
            )));
        }
        patch.offset &= !FOLD_FLAG;
    }
    let addend =
        u32::try_from(patch.offset).map_err(|_| fail(format!("offset {:#x} does not fit 32 bits", patch.offset)))?;
    let target = target_of(register).ok_or_else(|| fail("not an address or length of a descriptor".to_owned()))?;
    let block =
        *blocks.get(&(register & !0xF)).ok_or_else(|| fail("no earlier BLOCKWRITE of that descriptor".to_owned()))?;
    let OpKind::BlockWrite { data, .. } = &mut stream.ops[block.op].kind else {
        unreachable!("blocks holds BLOCKWRITE operations");
    };
    let needed = target.schema.span_bytes() as u32 + target.offset;
    if data.len() < needed.div_ceil(4) as usize {
        return Err(fail(format!("the BLOCKWRITE has {} words, the patch needs {needed} bytes", data.len())));
    }
    let words = data.to_mut();
    let size = if target.schema == Schema::Scalar32 { target.mask } else { words[0].saturating_mul(4) };
    if target.clear_address {
        words[1] = 0;
        words[2] &= 0xFFFF_0000;
    }
    Ok(AssembledPatch { argument, schema: target.schema, size, offset: block.payload_at + target.offset, addend })
}

fn target_of(register: u32) -> Option<Target> {
    let address = Address::from_word(register);
    let Register::Bd { word, .. } = address.register()? else { return None };
    let scalar = |mask, offset| Target { schema: Schema::Scalar32, mask, offset, clear_address: false };
    match (address.tile()?, word) {
        (TileKind::Shim, 1) => Some(Target { schema: Schema::ShimDma48, mask: 0, offset: 0, clear_address: true }),
        (TileKind::Shim, 0) => Some(scalar(u32::MAX, 0)),
        (TileKind::Memory, 0) => Some(scalar(0x0001_FFFF, 0)),
        (TileKind::Memory, 1) => Some(scalar(0x0007_FFFF, 4)),
        _ => None,
    }
}
