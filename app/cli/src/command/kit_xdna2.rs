//! `npuhal kit xdna2`: kernels of the virtual NPU for a qwen3 model.

use crate::Host;
use crate::error::CliError;
use crate::packed;
use crate::session::locate;
use clap::{Args, ValueHint};
use npuhal_models::ModelSource;
use npuhal_models::q4nx::directory::KERNELS;
use npuhal_models::source::Format;
use npuhal_models::staging::Staging;
use npuhal_virtual::design::qwen3;
use npuhal_virtual::kit;
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::kernels::{KernelFiles, KernelTarget, Kernels, MARK_FILE};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Rows of the KV cache are read in blocks of so many.
const BLOCK_ROWS: u32 = 16;

#[derive(Debug, Args)]
pub(crate) struct Xdna2Args {
    /// A Q4NX directory, which gets them in npu/; or a GGUF file, which is packed into the cache and gets them there
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model: OsString,

    /// Write them into this folder instead, for --kernels
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: Option<PathBuf>,

    /// Positions of the KV cache, a multiple of 16 [default: the model's, at most 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(kit::QWEN3_POSITIONS_MAX)))]
    positions: Option<u32>,

    /// Replace kernels that were not written by this command
    #[arg(long)]
    force: bool,
}

pub(super) fn xdna2(host: &Host, args: &Xdna2Args) -> Result<(), CliError> {
    let path = locate(host, &args.model)?;
    let model = ModelSource::open(&path)?;
    let dimensions = Dimensions::of(model.config()).map_err(|decline| of_kit(&path, &decline))?;
    let trained = u32::try_from(model.config().context_length).unwrap_or(u32::MAX);
    let positions =
        args.positions.unwrap_or_else(|| trained.min(kit::QWEN3_POSITIONS_MAX).next_multiple_of(BLOCK_ROWS));
    let design = qwen3::Dimensions {
        hidden: dimensions.hidden,
        heads: dimensions.heads,
        kv_heads: dimensions.kv_heads,
        intermediate: dimensions.intermediate,
        vocab: dimensions.vocab,
        norm_epsilon: model.config().rms_norm_eps,
    };
    let written = kit::qwen3(&design, positions).map_err(|error| of_kit(&path, &error))?;
    let folder = match &args.out {
        Some(out) => out.clone(),
        None if model.format() == Format::Gguf => packed::obtain(host, &path)?.join(KERNELS),
        None => path.join(KERNELS),
    };
    check_place(&folder, args.force)?;
    let staging = Staging::new(&folder)?;
    for (name, contents) in written.files() {
        staging.write(name, contents)?;
    }
    staging.write(
        MARK_FILE,
        KernelTarget::mark(&written.image, concat!("npuhal ", env!("CARGO_PKG_VERSION"))).as_bytes(),
    )?;
    staging.publish(true)?;
    // What the lane will read is what the lane takes.
    let files = KernelFiles::read(&folder).map_err(|error| of_kit(&folder, &error))?;
    Kernels::new(&files, &dimensions).map_err(|error| of_kit(&folder, &error))?;
    host.voice.note(format_args!(
        "{}: kernels of the virtual NPU for {} layers of {} (hidden size {}, {} query and {} KV heads, feed-forward size {}, \
         vocabulary {}), {positions} positions; they do nothing on hardware",
        folder.display(),
        dimensions.layers,
        model.config().model_type,
        dimensions.hidden,
        dimensions.heads,
        dimensions.kv_heads,
        dimensions.intermediate,
        dimensions.vocab,
    ));
    Ok(())
}

/// Kernels that somebody else has put there are not written over unasked.
fn check_place(folder: &Path, force: bool) -> Result<(), CliError> {
    let Ok(metadata) = folder.symlink_metadata() else { return Ok(()) };
    let refused =
        |found: &str, remedy: &str| Err(CliError::Kernels(format!("{}: {found}; {remedy}", folder.display())));
    if !metadata.is_dir() {
        return refused("wanted a folder, found something else", "move it away, or name another place with --out DIR");
    }
    let mut entries = folder.read_dir().map_err(|source| CliError::File { path: folder.to_owned(), source })?;
    if force || entries.next().is_none() {
        return Ok(());
    }
    let is_ours =
        KernelFiles::read(folder).is_ok_and(|files| KernelTarget::of(folder, &files) == KernelTarget::Virtual);
    match is_ours {
        true => Ok(()),
        false => refused(
            "there are files that this command has not written",
            "name another place with --out DIR, or replace the folder with --force",
        ),
    }
}

fn of_kit(path: &Path, error: &dyn std::fmt::Display) -> CliError {
    CliError::Kernels(format!("{}: {error}", path.display()))
}
