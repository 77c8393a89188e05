//! A kernel's files against its layout.

use super::design::{Design, DesignArgument};
use super::error::KitError;
use super::moves::{Moved, Moves};
use npuhal_amdxdna::format::txn::Stream;
use npuhal_amdxdna::format::xclbin::{AddressQualifier, Design as XclbinDesign};
use npuhal_core::device::LengthUnit;
use std::path::Path;
use std::sync::Arc;

/// Arguments of a kernel before its buffers: opcode, instructions, their length.
const LEADING_ARGUMENTS: usize = 3;

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

/// Whether the stream moves what the layout has: every argument and no other, as much of it as the layers need, nothing beyond
/// a buffer's end, and a wait for each output.
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
    let moves = Moves::of(&stream).map_err(|error| bad(error.to_string()))?;
    if let Some((&last, _)) = moves.arguments.last_key_value()
        && last as usize >= arguments.len()
    {
        let (design, wanted, place) = (design.name(), arguments.len(), "used by the instruction stream");
        return Err(KitError::ArgumentCount { design, wanted, found: last as usize + 1, place });
    }
    for (index, argument) in arguments.iter().enumerate() {
        let refuse = |found: String| {
            let wanted = format!("{} of {} bytes", argument.name, argument.bytes);
            Err(KitError::Argument { design: design.name(), index, wanted, found })
        };
        match moves.arguments.get(&(index as u32)) {
            None | Some(Moved { total_bytes: Some(0), .. }) => {
                return refuse("an instruction stream that never moves it".to_owned());
            }
            Some(Moved { end_bytes, .. }) if *end_bytes > argument.bytes => {
                return refuse(format!("an instruction stream that reaches byte {end_bytes}"));
            }
            Some(Moved { total_bytes: Some(total), .. }) if *total < argument.moved_bytes => {
                return refuse(format!(
                    "an instruction stream that moves {total} bytes of it, not {}; is it compiled for fewer layers?",
                    argument.moved_bytes
                ));
            }
            Some(_) => {}
        }
    }
    if moves.waits < design.outputs() {
        return Err(bad(format!(
            "wanted a wait for each of the {} outputs of {design}, found {}; a host that does not wait for all of them starts \
             the next dispatch too early",
            design.outputs(),
            moves.waits
        )));
    }
    Ok(())
}
