//! A kernel's files against its layout.

use super::design::{Design, DesignArgument};
use super::error::KitError;
use npuhal_amdxdna::format::registers::Direction;
use npuhal_amdxdna::format::reloc::FOLD_FLAG;
use npuhal_amdxdna::format::txn::{OpKind, Stream};
use npuhal_amdxdna::format::xclbin::{AddressQualifier, Design as XclbinDesign};
use npuhal_core::device::LengthUnit;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Arguments of a kernel before its buffers: opcode, instructions, their length.
const LEADING_ARGUMENTS: usize = 3;
/// Bytes of a shim buffer descriptor's registers; the patched word is the second.
const DESCRIPTOR_BYTES: u32 = 0x20;

/// A kernel as it is loaded: its files were compared with their checksums and its layout.
#[derive(Debug, Clone)]
pub struct KernelImage {
    /// Its design.
    pub design: Design,
    /// Layers of a dispatch.
    pub layers: usize,
    /// Name of the kernel inside the xclbin.
    pub unit: String,
    /// The container.
    pub xclbin: Arc<[u8]>,
    /// SHA-256 of the container: kernels of one container share a context.
    pub xclbin_sha256: String,
    /// The instruction stream.
    pub instructions: Arc<[u8]>,
    /// Unit of the instruction-length argument.
    pub length_unit: LengthUnit,
}

/// Whether the container has the kernel `unit` with as many buffers as the design takes, or more.
pub(super) fn check_xclbin(
    path: &Path,
    image: &[u8],
    unit: &str,
    design: Design,
    buffers: usize,
) -> Result<(), KitError> {
    let bad = |reason: String| KitError::Xclbin { path: path.to_owned(), reason };
    let container = XclbinDesign::parse(image).map_err(|error| bad(error.to_string()))?;
    let kernel = container.compute_unit(unit).and_then(|found| container.kernel(found)).ok_or_else(|| {
        let names: Vec<&str> = container.metadata.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        bad(format!("wanted a kernel {unit}, found {}", names.join(", ")))
    })?;
    let declared = kernel.arguments.iter().skip(LEADING_ARGUMENTS);
    let declared = declared.filter(|argument| argument.qualifier == AddressQualifier::Global).count();
    if declared < buffers {
        let (design, place) = (design.name(), "declared by the xclbin");
        return Err(KitError::ArgumentCount { design, wanted: buffers, found: declared, place });
    }
    Ok(())
}

/// The only kernel of a container, or the first whose name starts with `MLIR_AIE`.
pub(super) fn kernel_name(path: &Path, image: &[u8]) -> Result<String, KitError> {
    let bad = |reason: String| KitError::Xclbin { path: path.to_owned(), reason };
    let container = XclbinDesign::parse(image).map_err(|error| bad(error.to_string()))?;
    let names: Vec<&str> = container.metadata.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    let found = names.iter().find(|name| name.starts_with("MLIR_AIE")).or(names.first().filter(|_| names.len() == 1));
    let found = found.map(|name| (*name).to_owned());
    found.ok_or_else(|| bad(format!("wanted a kernel whose name starts with MLIR_AIE, found {}", names.join(", "))))
}

/// Whether the stream moves what the layout has: every argument and no other, nothing beyond a buffer's end, and a wait for
/// each output.
pub(super) fn check_instructions(
    path: &Path,
    stream: &[u8],
    design: Design,
    arguments: &[DesignArgument],
) -> Result<(), KitError> {
    let bad = |reason: String| KitError::Instructions { path: path.to_owned(), reason };
    if stream.first().is_some_and(u8::is_ascii_hexdigit) && stream.iter().all(u8::is_ascii) {
        return Err(bad("wanted 32-bit words, found text; compile the design with binary instructions".to_owned()));
    }
    let stream = Stream::parse(stream).map_err(|error| bad(error.to_string()))?;
    let mut lengths: BTreeMap<u32, u64> = BTreeMap::new();
    let mut used = vec![false; arguments.len()];
    let mut tokens = 0;
    for op in &stream.ops {
        match &op.kind {
            OpKind::BlockWrite { register, data } => {
                if let Some(words) = data.iter().next() {
                    lengths.insert(*register, 4 * u64::from(words));
                }
            }
            OpKind::DdrPatch(patch) => {
                let index = patch.argument as usize;
                let Some(argument) = arguments.get(index) else {
                    let (design, wanted, place) = (design.name(), arguments.len(), "used by the instruction stream");
                    return Err(KitError::ArgumentCount { design, wanted, found: index + 1, place });
                };
                used[index] = true;
                let descriptor = patch.register & !(DESCRIPTOR_BYTES - 1);
                let moved = lengths.get(&descriptor).copied().unwrap_or(4);
                let end = (patch.offset & !FOLD_FLAG).saturating_add(moved);
                if end > argument.bytes {
                    return Err(KitError::Argument {
                        design: design.name(),
                        index,
                        wanted: format!("{} of {} bytes", argument.name, argument.bytes),
                        found: format!("an instruction stream that reaches byte {end}"),
                    });
                }
            }
            kind => {
                if let Some(wait) = kind.token_wait() {
                    let wait = wait.map_err(|error| bad(error.to_string()))?;
                    if wait.direction == Direction::S2mm {
                        tokens += usize::from(wait.row_count) * usize::from(wait.column_count);
                    }
                } else if let OpKind::MergeSync { tokens: merged, .. } = kind {
                    tokens += usize::from(*merged);
                }
            }
        }
    }
    if let Some(index) = used.iter().position(|used| !used) {
        return Err(KitError::Argument {
            design: design.name(),
            index,
            wanted: format!("{} of {} bytes", arguments[index].name, arguments[index].bytes),
            found: "an instruction stream that never moves it".to_owned(),
        });
    }
    if tokens < design.outputs() {
        return Err(bad(format!(
            "wanted a wait for each of the {} outputs of {design}, found {tokens}; a host that does not wait for all of \
             them starts the next dispatch too early",
            design.outputs()
        )));
    }
    Ok(())
}
