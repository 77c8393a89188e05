//! `npuhal convert`: makes an xdna1 package from a checkpoint.

use crate::Host;
use crate::args::ConvertArgs;
use crate::command::pull::fetch;
use crate::error::CliError;
use crate::terminal::bytes_text;
use npuhal_models::package::{ConvertPhase, ConvertRequest, Identity, Metadata, convert};
use npuhal_models::store::Located;
use npuhal_models::{Catalogue, Store};
use npuhal_xdna1::kit::{KIT_FOLDER, Kit, KitError};
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
        keep: &[KIT_FOLDER],
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
    for name in &converted.kept {
        host.voice.note(kept_text(&converted.path, name)?);
    }
    Ok(())
}

/// What is told of the kit that the former package had: it is the user's work, and stays also where it does not fit.
fn kept_text(package: &Path, name: &str) -> Result<String, CliError> {
    let folder = package.join(name);
    let shape = Metadata::read(package)?.shape;
    Ok(match Kit::read(&folder).and_then(|kit| kit.check(shape)) {
        Ok(()) | Err(KitError::Missing { .. }) => format!("{}: kept from the package that was here", folder.display()),
        Err(error) => format!("{}: kept, but this model cannot use it: {error}", folder.display()),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_models::package::Family;
    use npuhal_tests::kit::package::SmallPackage;
    use npuhal_virtual::kit::{Xdna1Design, Xdna1Kit, Xdna1Model};
    use std::fs;

    #[test]
    fn a_kit_that_stays_is_told_and_whether_it_fits() {
        let folder = tempfile::tempdir().unwrap();
        let small = SmallPackage { family: Family::Llama, layers: 2, vocab_size: 64, seed: 1 };
        let package = small.write(folder.path(), "small", &[]);
        let text = || kept_text(&package, KIT_FOLDER).unwrap();
        let npu = package.join(KIT_FOLDER);
        fs::create_dir(&npu).unwrap();
        assert!(text().ends_with("npu: kept from the package that was here"), "a folder without a kit: {}", text());
        for (layers, end) in [
            (2, "npu: kept from the package that was here"),
            (
                3,
                "is compiled for a model of Shape { hidden_size: 576, intermediate_size: 1536, heads: 9, kv_heads: 3, ",
            ),
        ] {
            let model = Xdna1Model { hidden: 576, intermediate: 1536, heads: 9, kv_heads: 3, layers, vocab: 64 };
            for (name, contents) in Xdna1Kit::of(&model, &[Xdna1Design::SmolLmEngine]).unwrap().files {
                fs::write(npu.join(name), contents).unwrap();
            }
            assert!(text().contains(end), "{}", text());
        }
        assert!(text().contains("npu: kept, but this model cannot use it: smollm-engine: "), "{}", text());
        let kit = fs::read_to_string(npu.join("kit.json")).unwrap();
        fs::write(npu.join("kit.json"), kit.replace("\"smollm-engine\"", "\"other\"")).unwrap();
        assert!(text().contains("unknown design 'other'"), "{}", text());
    }
}
