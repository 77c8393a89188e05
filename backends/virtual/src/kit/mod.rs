//! Kits: what a model package carries for the NPU, written for the core programs of the virtual array.
//!
//! A [`Kit`] is a design: columns, a configuration image, control code, a number of buffer arguments. It writes itself
//! in both flows: as xclbin with an instruction stream or a partial ELF, and as full ELF. The images are well-formed
//! configuration command lists; what is special about them is only the identification that they leave in a core's data
//! memory, which hardware has no use for.

mod designs;
mod image;
mod md5;
mod qwen3;
mod xdna1;

pub use designs::{copy, vector_scale};
pub use image::{configuration, image};
pub use qwen3::{QWEN3_CONTEXTS, QWEN3_POSITIONS_MAX, Qwen3Kit, qwen3, qwen3_head_code, qwen3_layer_code};
pub use xdna1::{XDNA1_KIT_FILE, Xdna1Argument, Xdna1Design, Xdna1Kernel, Xdna1Kit, Xdna1Model};

use npuhal_amdxdna::format::cdo::CdoError;
use npuhal_amdxdna::format::elf::{ArgumentSymbol, ElfError, FullElfSpec, PartialElfSpec, PatchEntry};
use npuhal_amdxdna::format::registers::{Direction, QueuePush, RegisterError, ShimBd, TokenWait};
use npuhal_amdxdna::format::reloc::{AssembledCode, PARTIAL_ARGUMENT_BASE, RelocError, Schema, assemble};
use npuhal_amdxdna::format::txn::{Builder, OpKind, Stream, TxnError};
use npuhal_amdxdna::format::xclbin::{
    AddressQualifier, AiePdi, CdoGroup, CdoGroupKind, DesignSpec, Kernel, KernelArgument, Metadata, Partition,
    XclbinError,
};
use npuhal_amdxdna::silicon::Silicon;

/// Core program `copy`: each input stream to the output stream of the same column and channel.
pub const COPY: u32 = 1;
/// Core program `vector-scale`: 32-bit integers times a factor.
pub const VECTOR_SCALE: u32 = 2;
/// Core programs `qwen3-layer` and `qwen3-lmhead`, which share a configuration: [`crate::design::qwen3`].
pub const QWEN3: u32 = 0x10;
/// Core program `smollm-engine`: [`crate::design::xdna1`].
pub const SMOLLM_ENGINE: u32 = 0x20;
/// Core program `qwen-engine`.
pub const QWEN_ENGINE: u32 = 0x21;
/// Core program `smollm-chunk`.
pub const SMOLLM_CHUNK: u32 = 0x22;
/// Core program `qwen-chunk`.
pub const QWEN_CHUNK: u32 = 0x23;
/// Core program `w8-projection`.
pub const W8_PROJECTION: u32 = 0x24;

/// Id that the xclbin gives its kernel.
const KERNEL_ID: u64 = 0x901;
/// Section of the image in a full ELF.
const PDI_SECTION: &str = ".pdi.1";
/// Offset of the address in a LOADPDI operation.
const LOADPDI_ADDRESS_AT: usize = 8;
/// First buffer in the argument map of open-toolchain kernels; mode, code address and code length come first.
const FIRST_BUFFER_AT: u32 = 0x14;

/// A design that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KitError {
    /// A register field.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// Control code.
    #[error(transparent)]
    Code(#[from] TxnError),
    /// Relocations.
    #[error(transparent)]
    Relocation(#[from] RelocError),
    /// The ELF file.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// The xclbin.
    #[error(transparent)]
    Xclbin(#[from] XclbinError),
    /// The image.
    #[error(transparent)]
    Image(#[from] CdoError),
    /// Dimensions that the design cannot have.
    #[error("{design}: {reason}")]
    Shape {
        /// Design.
        design: &'static str,
        /// What is wrong.
        reason: String,
    },
}

/// A design for one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kit {
    /// Kernel name.
    pub name: String,
    /// Columns.
    pub columns: u8,
    /// Configuration image.
    pub image: Vec<u8>,
    /// Id under which a full ELF loads the image. Kernels of one context that need different images need different ids.
    pub image_id: u16,
    /// Control code of a run, with `DDR_PATCH` operations for the buffers and without `LOADPDI`.
    pub code: Stream,
    /// Buffer arguments.
    pub buffers: u32,
}

/// Name of the only instance of a kit's kernel.
pub const INSTANCE: &str = "main";

impl Kit {
    /// The xclbin: one partition with this kernel alone. See [`xclbin`].
    ///
    /// # Errors
    /// [`KitError::Xclbin`].
    pub fn xclbin(&self) -> Result<Vec<u8>, KitError> {
        xclbin(&[self])
    }

    /// The kernel with the argument map of open-toolchain kernels.
    fn kernel(&self, id: u64) -> Kernel {
        let argument = |id, name: &str, qualifier, size_bytes, offset_bytes, c_type: &str| KernelArgument {
            name: name.to_owned(),
            id,
            qualifier,
            port: String::new(),
            size_bytes,
            offset_bytes,
            host_size_bytes: size_bytes,
            c_type: c_type.to_owned(),
        };
        let mut arguments = vec![
            argument(0, "opcode", AddressQualifier::Scalar, 8, 0x00, "uint64_t"),
            argument(1, "instr", AddressQualifier::Global, 8, 0x08, "char *"),
            argument(2, "ninstr", AddressQualifier::Scalar, 4, 0x10, "uint32_t"),
        ];
        arguments.extend((0..self.buffers).map(|i| {
            argument(3 + i, &format!("bo{i}"), AddressQualifier::Global, 8, FIRST_BUFFER_AT + 8 * i, "void*")
        }));
        Kernel {
            name: self.name.clone(),
            kind: "dpu".to_owned(),
            functional: 0,
            subtype: 1,
            dpu_kernel_id: Some(id),
            arguments,
            instances: vec![INSTANCE.to_owned()],
        }
    }

    /// The instruction stream for [`npuhal_core::device::Program::Instructions`].
    ///
    /// # Errors
    /// [`KitError::Code`].
    pub fn instructions(&self) -> Result<Vec<u8>, KitError> {
        Ok(self.code.encode()?)
    }

    /// A partial ELF with the control code, for a context of the kit's xclbin.
    ///
    /// # Errors
    /// [`KitError::Relocation`], [`KitError::Elf`].
    pub fn partial_elf(&self) -> Result<Vec<u8>, KitError> {
        let AssembledCode { code, patches } = assemble(self.code.clone())?;
        let (mut symbols, mut entries) = (Vec::new(), Vec::new());
        for patch in patches {
            let name = (patch.argument + PARTIAL_ARGUMENT_BASE).to_string();
            let symbol = symbol_of(&mut symbols, name, patch.size);
            entries.push(PatchEntry {
                symbol,
                offset: patch.offset,
                schema: patch.schema.number(),
                addend: patch.addend,
            });
        }
        let elf = PartialElfSpec { code, symbols, patches: entries, uid: [3; 16] }.build()?;
        Ok(elf.to_bytes()?)
    }

    /// A full ELF. Its code starts with `LOADPDI` where `loads_image` says so; otherwise it counts on the configuration
    /// that another kernel of the context has loaded, and its `.pdi` section is empty.
    ///
    /// # Errors
    /// [`KitError::Relocation`], [`KitError::Elf`].
    pub fn full_elf(&self, loads_image: bool) -> Result<Vec<u8>, KitError> {
        let mut stream = self.code.clone();
        let image = if loads_image { self.image.clone() } else { Vec::new() };
        let size_bytes = u32::try_from(image.len()).map_err(|_| KitError::Shape {
            design: "full ELF",
            reason: format!("an image of {} bytes", image.len()),
        })?;
        if loads_image {
            stream.ops.insert(0, OpKind::LoadPdi { id: self.image_id, size_bytes, address: 0 }.into());
        }
        let load_at = stream.op_offsets().first().map_or(0, |at| at + LOADPDI_ADDRESS_AT);
        let AssembledCode { code, patches } = assemble(stream)?;
        let (mut symbols, mut entries) = (Vec::new(), Vec::new());
        if loads_image {
            let symbol = symbol_of(&mut symbols, PDI_SECTION.to_owned(), size_bytes);
            entries.push(PatchEntry { symbol, offset: load_at as u32, schema: Schema::Address64.number(), addend: 0 });
        }
        for patch in patches {
            let symbol = symbol_of(&mut symbols, patch.argument.to_string(), patch.size);
            entries.push(PatchEntry {
                symbol,
                offset: patch.offset,
                schema: patch.schema.number(),
                addend: patch.addend,
            });
        }
        let spec = FullElfSpec {
            kernel: self.name.clone(),
            instance: INSTANCE.to_owned(),
            arguments: self.buffers as usize,
            columns: self.columns.into(),
            pdi: image,
            code,
            symbols,
            patches: entries,
            uid: (4, [5; 16]),
        };
        Ok(spec.build()?.to_bytes()?)
    }
}

/// An xclbin with one partition and a kernel for each kit, in their order; the partition is as wide as the widest.
///
/// # Errors
/// [`KitError::Xclbin`]; [`KitError::Shape`] without a kit.
pub fn xclbin(kits: &[&Kit]) -> Result<Vec<u8>, KitError> {
    let widest = kits.iter().max_by_key(|kit| kit.columns);
    let widest = widest.ok_or(KitError::Shape { design: "xclbin", reason: "no kernel".to_owned() })?;
    let ids = || KERNEL_ID..;
    let pdis = kits.iter().zip(ids()).map(|(kit, id)| {
        let group = CdoGroup {
            name: kit.name.clone(),
            kind: CdoGroupKind::Primary,
            pdi_id: id - KERNEL_ID + 1,
            dpu_kernel_ids: vec![id],
            pre_cdo_groups: Vec::new(),
        };
        let mut uuid = [1; 16];
        uuid[0] = (id - KERNEL_ID) as u8;
        AiePdi { uuid, image: kit.image.clone(), cdo_groups: vec![group] }
    });
    let partition = Partition {
        name: widest.name.clone(),
        ops_per_cycle: 2048,
        column_width: widest.columns.into(),
        start_columns: vec![1],
        pdis: pdis.collect(),
        ..Partition::default()
    };
    let kernels = kits.iter().zip(ids()).map(|(kit, id)| kit.kernel(id)).collect();
    let spec = DesignSpec { uuid: [2; 16], partition, metadata: Metadata { kernels } };
    Ok(spec.build()?.to_bytes())
}

/// Index of the symbol with this name and size.
fn symbol_of(symbols: &mut Vec<ArgumentSymbol>, name: String, size: u32) -> usize {
    let wanted = ArgumentSymbol { name, size };
    symbols.iter().position(|symbol| *symbol == wanted).unwrap_or_else(|| {
        symbols.push(wanted);
        symbols.len() - 1
    })
}

/// Device generation byte of control code for a part.
pub(crate) fn dev_gen(silicon: Silicon) -> u8 {
    match silicon.facts().is_preemptible {
        true => npuhal_amdxdna::format::txn::DEV_GEN_AIE2P,
        false => npuhal_amdxdna::format::txn::DEV_GEN_AIE2,
    }
}

/// One linear task: descriptor, address of a buffer, queue entry. Outputs issue a token.
fn linear_task(
    code: &mut Builder,
    column: u8,
    direction: Direction,
    channel: u8,
    bd: u8,
    length_words: u32,
    buffer: u32,
    offset_bytes: u64,
) -> Result<(), KitError> {
    let descriptor = ShimBd { length_words, burst: 2, valid: true, ..ShimBd::default() };
    code.shim_bd(column, bd, &descriptor)?;
    code.patch_shim_bd(column, bd, buffer, offset_bytes)?;
    let push = QueuePush { start_bd: bd.into(), repeat: 1, issue_token: direction == Direction::S2mm };
    code.push_shim_task(column, direction, channel, push)?;
    Ok(())
}

/// Waits for one token of a shim channel.
fn await_token(direction: Direction, column: u8, channel: u8) -> TokenWait {
    TokenWait { direction, row: 0, column, row_count: 1, column_count: 1, channel }
}
