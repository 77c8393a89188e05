//! `npuhal kit import`: a compiled design into a kit.

use crate::Host;
use crate::error::CliError;
use clap::{Args, ValueHint};
use npuhal_models::package::{Metadata, Shape, is_package};
use npuhal_xdna1::chunk::LAYERS_PER_DISPATCH;
use npuhal_xdna1::kit::{Design, ImportRequest, KIT_FOLDER, SizeUnit, import};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Which design it is: smollm-engine, qwen-engine, qwen-engine-prefill, smollm-chunk, smollm-chunk-w8, qwen-chunk or
    /// w8-projection
    #[arg(long, value_name = "NAME")]
    design: String,

    /// The compiled container
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    xclbin: PathBuf,

    /// Its instruction stream, as plain 32-bit words
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    instructions: PathBuf,

    /// An xdna1 package (its npu/ folder is filled), or the folder of a kit
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    target: PathBuf,

    /// Layers of a dispatch [default: all of an engine, 2 of a chunk]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    layers: Option<u32>,

    /// Unit in which the kernel takes the length of its instructions: bytes, as hosts of the current tool chain pass it, or words
    #[arg(long, value_name = "UNIT", default_value = "bytes")]
    size_unit: String,

    /// What it was compiled with, e.g. mlir-aie=57d7494e99c (may be given several times)
    #[arg(long, value_name = "NAME=VERSION")]
    toolchain: Vec<String>,
}

/// Puts a compiled design into a kit.
pub(crate) fn import_design(host: &Host, args: &ImportArgs) -> Result<(), CliError> {
    let design: Design = args.design.parse().map_err(CliError::Usage)?;
    let size_unit = match args.size_unit.as_str() {
        "bytes" => SizeUnit::Bytes,
        "words" => SizeUnit::Words,
        other => return Err(CliError::Usage(format!("--size-unit {other}: give bytes or words"))),
    };
    let mut toolchain = BTreeMap::new();
    for pair in &args.toolchain {
        let (name, version) = pair
            .split_once('=')
            .filter(|(name, _)| !name.is_empty())
            .ok_or_else(|| CliError::Usage(format!("--toolchain {pair}: give NAME=VERSION")))?;
        toolchain.insert(name.to_owned(), version.to_owned());
    }
    // The kernels of the public designs are compiled for the published shapes; a package says what it has.
    let mut folder = args.target.clone();
    let mut shape: Shape = design.family().shape();
    if is_package(&folder) {
        let metadata = Metadata::read(&folder)?;
        if metadata.family != design.family() {
            let (package, wanted) = (metadata.family.name(), design.family().name());
            let message = format!("{}: a package of the family {package}; {design} is for {wanted}", folder.display());
            return Err(CliError::Usage(message));
        }
        shape = metadata.shape;
        folder.push(KIT_FOLDER);
    }
    let layers = match args.layers {
        Some(layers) => layers as usize,
        None if design.chunk_format().is_some() => LAYERS_PER_DISPATCH,
        None => shape.layers,
    };
    let request = ImportRequest {
        folder: &folder,
        design,
        shape,
        layers,
        xclbin: &args.xclbin,
        instructions: &args.instructions,
        size_unit,
        toolchain,
    };
    let kernel = import(&request)?;
    let buffers: Vec<String> =
        kernel.arguments.iter().map(|argument| format!("{} {}", argument.name, argument.bytes)).collect();
    host.voice.note(format_args!(
        "{}: {design} for {layers} layers, kernel {}, buffers in bytes: {}",
        folder.join(&kernel.xclbin).display(),
        kernel.kernel,
        buffers.join(", ")
    ));
    Ok(())
}
