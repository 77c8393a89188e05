//! `npuhal pack`: a Q4NX directory from a GGUF file.

use crate::Host;
use crate::args::PackArgs;
use crate::error::CliError;
use crate::session::locate;
use crate::terminal::{bytes_text, complain};
use npuhal_models::q4nx::{PackOptions, PackReport, pack as pack_model};
use std::num::NonZeroUsize;
use std::time::Instant;

pub(crate) fn pack(host: &Host, args: &PackArgs) -> Result<(), CliError> {
    let gguf = locate(host, &args.model)?;
    let options = PackOptions {
        tokenizer: args.tokenizer.clone(),
        replace: args.force,
        threads: args.threads.and_then(|threads| NonZeroUsize::new(threads as usize)),
    };
    let started = Instant::now();
    let mut bar = None;
    let result = pack_model(&gguf, &args.out, &options, &host.control, &mut |progress| {
        let bar = bar.get_or_insert_with(|| host.voice.bar(progress.total_bytes, "packing"));
        bar.set_position(progress.done_bytes);
        if progress.flushing {
            bar.set_message("writing to the disk");
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let report = result?;
    warn(&report);
    let seconds = started.elapsed().as_secs_f64();
    host.voice.note(format_args!(
        "{}: {} tensors ({} matrices with their codes kept, {} quantized anew), {} from {} in {seconds:.1} s",
        args.out.display(),
        report.tensors,
        report.exact,
        report.requantized,
        bytes_text(report.model_bytes),
        bytes_text(report.source_bytes),
    ));
    Ok(())
}

/// Scales of the GGUF file that nobody carries over.
pub(crate) fn warn(report: &PackReport) {
    for scale in &report.warnings {
        complain(format_args!(
            "warning: {} = {} of the GGUF file is not in config.json; it looks like a scale",
            scale.field, scale.value
        ));
    }
}
