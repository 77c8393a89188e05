//! Compiled designs into a kit.

use super::design::Design;
use super::error::KitError;
use super::image::{check_instructions, check_xclbin, kernel_name};
use super::manifest::{
    KIT_FILE, KIT_FORMAT, KitArgument, KitDigests, KitKernel, KitManifest, KitOrigin, LAYOUT_VERSION, SizeUnit,
};
use super::{Kit, MAX_FILE_BYTES, read_file};
use npuhal_core::file::write_whole;
use npuhal_models::hexadecimal;
use npuhal_models::package::Shape;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A compiled design that becomes part of a kit.
#[derive(Debug, Clone)]
pub struct ImportRequest<'a> {
    /// Folder of the kit; made where it is not there. A kernel of the same design and number of layers is replaced.
    pub folder: &'a Path,
    /// Which design it is.
    pub design: Design,
    /// Shape of the models it was compiled for.
    pub shape: Shape,
    /// Layers of a dispatch.
    pub layers: usize,
    /// The container.
    pub xclbin: &'a Path,
    /// The instruction stream: plain 32-bit words.
    pub instructions: &'a Path,
    /// Unit of the instruction-length argument; hosts of the open tool chain differ.
    pub size_unit: SizeUnit,
    /// What it was made with: names and versions.
    pub toolchain: BTreeMap<String, String>,
}

/// Checks a compiled design against the layout and puts it into a kit: both files are written beside their places and renamed,
/// `kit.json` last. Returns what the kit now says of it.
///
/// # Errors
/// [`KitError`]: a container without the kernel or with too few buffers, an instruction stream that moves other arguments than
/// the layout's or leaves them, files that cannot be read or written, a kit of another origin or format in the folder.
pub fn import(request: &ImportRequest<'_>) -> Result<KitKernel, KitError> {
    let ImportRequest { folder, design, shape, layers, .. } = *request;
    let arguments = design.arguments(shape, layers)?;
    let xclbin = read_file(request.xclbin, MAX_FILE_BYTES)?;
    let instructions = read_file(request.instructions, MAX_FILE_BYTES)?;
    let unit = kernel_name(request.xclbin, &xclbin)?;
    check_xclbin(request.xclbin, &xclbin, &unit, design, arguments.len())?;
    check_instructions(request.instructions, &instructions, design, &arguments)?;
    let mut manifest = match Kit::read(folder) {
        Ok(kit) if kit.manifest.origin == KitOrigin::Imported => kit.manifest,
        Ok(_) => {
            return Err(KitError::Manifest {
                path: folder.join(KIT_FILE),
                field: "origin".to_owned(),
                reason: "wanted a kit of imported designs, found one of the virtual NPU; choose another folder"
                    .to_owned(),
            });
        }
        Err(KitError::Missing { .. }) => KitManifest {
            format: KIT_FORMAT.to_owned(),
            origin: KitOrigin::Imported,
            toolchain: BTreeMap::new(),
            kernels: Vec::new(),
        },
        Err(error) => return Err(error),
    };
    let stem = if design.is_engine() { design.name().to_owned() } else { format!("{}-{layers}", design.name()) };
    let kernel = KitKernel {
        design: design.name().to_owned(),
        layers,
        layout_version: LAYOUT_VERSION,
        shape: shape.into(),
        kernel: unit,
        xclbin: format!("{stem}.xclbin"),
        instructions: format!("{stem}.insts"),
        instruction_size_unit: request.size_unit,
        arguments: arguments
            .iter()
            .map(|argument| KitArgument { name: argument.name.to_owned(), bytes: argument.bytes })
            .collect(),
        sha256: KitDigests {
            xclbin: hexadecimal(&Sha256::digest(&xclbin)),
            instructions: hexadecimal(&Sha256::digest(&instructions)),
        },
    };
    manifest.kernels.retain(|other| other.xclbin != kernel.xclbin);
    manifest.kernels.push(kernel.clone());
    manifest.toolchain.extend(request.toolchain.clone());
    fs::create_dir_all(folder).map_err(|source| KitError::Io {
        path: folder.to_owned(),
        action: "make the folder",
        source,
    })?;
    publish(&folder.join(&kernel.xclbin), &xclbin)?;
    publish(&folder.join(&kernel.instructions), &instructions)?;
    let text = serde_json::to_string_pretty(&manifest).map_err(|error| KitError::Manifest {
        path: folder.join(KIT_FILE),
        field: "contents".to_owned(),
        reason: error.to_string(),
    })?;
    publish(&folder.join(KIT_FILE), format!("{text}\n").as_bytes())?;
    Ok(kernel)
}

fn publish(path: &Path, bytes: &[u8]) -> Result<(), KitError> {
    write_whole(path, bytes).map_err(|source| KitError::Io { path: path.to_owned(), action: "write", source })
}
