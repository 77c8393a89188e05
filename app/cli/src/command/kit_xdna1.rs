//! `npuhal kit xdna1`: designs of the virtual NPU for an xdna1 package.

use crate::Host;
use crate::error::CliError;
use clap::{Args, ValueHint};
use npuhal_core::file::write_whole;
use npuhal_models::package::Metadata;
use npuhal_virtual::kit::{XDNA1_KIT_FILE, Xdna1Design, Xdna1Kit, Xdna1Model};
use npuhal_xdna1::kit::KIT_FOLDER;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct Xdna1Args {
    /// An xdna1 package
    #[arg(short, long, value_name = "PACKAGE", value_hint = ValueHint::DirPath)]
    model: PathBuf,

    /// Write this design alone (may be given several times) [default: all that compute the model]
    #[arg(long, value_name = "NAME")]
    design: Vec<Xdna1Design>,

    /// Write into this folder instead of the package's npu/
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: Option<PathBuf>,

    /// Replace a kit that was not written by this command
    #[arg(long)]
    force: bool,
}

pub(crate) fn xdna1(host: &Host, args: &Xdna1Args) -> Result<(), CliError> {
    let metadata = Metadata::read(&args.model)?;
    let shape = metadata.shape;
    let model = Xdna1Model {
        hidden: shape.hidden_size,
        intermediate: shape.intermediate_size,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        layers: shape.layers,
        vocab: shape.vocab_size,
    };
    let kit = match args.design.is_empty() {
        true => Xdna1Kit::complete(&model),
        false => Xdna1Kit::of(&model, &args.design),
    };
    let kit = kit.map_err(|error| CliError::Usage(format!("{}: {error}", args.model.display())))?;
    let folder = args.out.clone().unwrap_or_else(|| args.model.join(KIT_FOLDER));
    check_place(&folder, args.force)?;
    fs::create_dir_all(&folder).map_err(failed(&folder))?;
    // The manifest is the last: until it is there, the files of the old one have other checksums and are refused.
    for (name, contents) in &kit.files {
        let path = folder.join(name);
        write_whole(&path, contents).map_err(failed(&path))?;
    }
    let names: Vec<&str> = kit.files.iter().filter_map(|(name, _)| name.strip_suffix(".xclbin")).collect();
    host.voice.note(format_args!(
        "{}: {} of the virtual NPU for {} layers of {} (hidden size {}); they do nothing on hardware",
        folder.display(),
        names.join(", "),
        model.layers,
        metadata.family.name(),
        model.hidden,
    ));
    Ok(())
}

/// A kit with compiled designs is not written over unasked.
fn check_place(folder: &Path, force: bool) -> Result<(), CliError> {
    let path = folder.join(XDNA1_KIT_FILE);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(&path)(error)),
        Ok(text) => text,
    };
    let origin = serde_json::from_slice::<serde_json::Value>(&text).ok();
    let is_virtual = origin.is_some_and(|manifest| manifest["origin"] == "virtual");
    match force || is_virtual {
        true => Ok(()),
        false => Err(CliError::Usage(format!(
            "{}: a kit that is not one of the virtual NPU; name another place with --out DIR, or replace it with --force",
            path.display()
        ))),
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> CliError {
    let path = path.to_owned();
    |source| CliError::File { path, source }
}
