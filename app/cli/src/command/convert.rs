//! `npuhal convert`: makes an xdna1 package from a checkpoint.

use crate::Host;
use crate::args::ConvertArgs;
use crate::command::pull::fetch;
use crate::error::CliError;
use crate::terminal::bytes_text;
use npuhal_models::package::{ConvertPhase, ConvertRequest, Identity, convert};
use npuhal_models::store::Located;
use npuhal_models::{Catalogue, Store};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

pub(crate) fn convert_package(host: &Host, args: &ConvertArgs) -> Result<(), CliError> {
    let source = locate(host, &args.source)?;
    let threads = args.threads.and_then(|threads| NonZeroUsize::new(threads as usize));
    let request = ConvertRequest {
        source: &source,
        target: &args.target,
        identity: Identity {
            model_id: args.model_id.clone(),
            source_model: args.source_model.clone(),
            source_revision: args.source_revision.clone(),
            display_name: args.display_name.clone(),
        },
        shape: None,
        threads: threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN),
    };
    let bar = host.voice.bar(0, "converting");
    let result = convert(
        &request,
        &mut |progress| {
            bar.set_message(match progress.phase {
                ConvertPhase::Verifying => "verifying",
                _ => "converting",
            });
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.done_bytes);
        },
        &host.control,
    );
    bar.finish_and_clear();
    let converted = result?;
    let id = converted.model_id.as_deref().unwrap_or("no model id");
    let (files, size) = (converted.files, bytes_text(converted.size_bytes));
    host.voice.note(format_args!("{}: {id}, {files} files, {size}", converted.path.display()));
    Ok(())
}

/// A directory as it is; else a name of the catalogue or a GGUF file.
fn locate(host: &Host, source: &Path) -> Result<PathBuf, CliError> {
    if source.is_dir() {
        return Ok(source.to_owned());
    }
    let Some(spec) = source.to_str() else { return Ok(source.to_owned()) };
    let store = Store::locate(host.global.models_dir.as_deref())?;
    match store.resolve(Catalogue::builtin(), spec)? {
        Located::File(path) => Ok(path),
        Located::Catalogued(entry) => fetch(host, &store, entry),
        _ => Err(CliError::Usage(format!("{spec}: give a directory, a GGUF file or a name of the catalogue"))),
    }
}
