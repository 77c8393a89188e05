//! GGUF files on devices that take packed models only: they are packed into the cache, once.

use crate::Host;
use crate::command::pack::warn;
use crate::error::CliError;
use crate::terminal::{bytes_text, complain};
use npuhal_core::card::Generation;
use npuhal_models::ModelSource;
use npuhal_models::q4nx::PackOptions;
use npuhal_models::q4nx::cache::PackCache;
use npuhal_models::q4nx::directory::KERNELS;
use npuhal_models::source::Format;
use npuhal_registry::{DeviceChoice, Fitness, Registry, Request, Route, select};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::route::LaneRoute;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// `model`, or its packed form where the request names a device on which it runs only so. Nothing is packed in vain: the lane
/// must take the model, and its kernels must be at hand.
pub(crate) fn for_device(
    host: &Host,
    registry: &Registry,
    model: ModelSource,
    request: &mut Request,
) -> Result<ModelSource, CliError> {
    let DeviceChoice::Pinned(uri) = &request.device else { return Ok(model) };
    let Some((known, card)) = registry.resolve(uri) else { return Ok(model) };
    if model.format() != Format::Gguf || card.generation != Generation::Xdna2 || known.factory.check(&card).is_err() {
        return Ok(model);
    }
    if Dimensions::of(model.config()).is_err() {
        return Ok(model);
    }
    let kernels = PackCache::locate()?.directory_of(model.path())?.join(KERNELS);
    if kernels.is_dir() {
        request.options.kernels.get_or_insert(kernels);
    }
    let options = request.options.limited_to(LaneRoute.option_keys());
    if select(registry, &model, request).is_ok()
        || !matches!(LaneRoute.fitness_once_packed(&model, &[card], &options), Fitness::Serves(_))
    {
        return Ok(model);
    }
    let packed = ModelSource::open(&obtain(host, model.path())?)?;
    Ok(packed.with_suggested_sampling(model.suggested_sampling().cloned()))
}

/// The packed form of the GGUF file at `gguf`, from the cache where it is there and sound.
pub(crate) fn obtain(host: &Host, gguf: &Path) -> Result<PathBuf, CliError> {
    let started = Instant::now();
    let mut bar = None;
    let result = PackCache::locate()?.obtain(gguf, &PackOptions::default(), &host.control, &mut |progress| {
        let bar = bar.get_or_insert_with(|| host.voice.bar(progress.total_bytes, "packing"));
        bar.set_position(progress.done_bytes);
        if progress.flushing {
            bar.set_message("writing to the disk");
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let cached = result?;
    for line in cached.discarded.iter().chain(&cached.warning) {
        complain(line);
    }
    if let Some(report) = &cached.packed {
        warn(report);
        host.voice.note(format_args!(
            "packed {} into {} ({}) in {:.1} s",
            gguf.display(),
            cached.directory.display(),
            bytes_text(report.model_bytes),
            started.elapsed().as_secs_f64()
        ));
    }
    Ok(cached.directory)
}
