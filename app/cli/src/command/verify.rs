//! `npuhal verify`: a Q4NX directory held against its GGUF file.

use crate::Host;
use crate::args::VerifyArgs;
use crate::error::CliError;
use crate::session::locate;
use crate::terminal::say;
use npuhal_models::q4nx::verify::{VerifyReport, verify as verify_model};
use std::num::NonZeroUsize;

pub(crate) fn verify(host: &Host, args: &VerifyArgs) -> Result<(), CliError> {
    let gguf = locate(host, &args.model)?;
    let threads = args.threads.and_then(|threads| NonZeroUsize::new(threads as usize));
    let mut bar = None;
    let result = verify_model(&gguf, &args.directory, threads, &host.control, &mut |done, total| {
        bar.get_or_insert_with(|| host.voice.bar(total, "verifying")).set_position(done);
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let report = result?;
    say(&text(&report, args.all))?;
    if report.is_good() {
        return Ok(());
    }
    Err(CliError::Different(format!("{}: not what {} holds", args.directory.display(), gguf.display())))
}

/// Layer 0, what is in no layer and what is bad, or everything; the count of good tensors last.
fn text(report: &VerifyReport, all: bool) -> String {
    let mut text = String::new();
    for tensor in report.tensors.iter().filter(|tensor| all || tensor.is_sample() || !tensor.is_good()) {
        text.push_str(&format!("{tensor}\n"));
    }
    for problem in &report.scales {
        text.push_str(&format!("BAD  {problem}\n"));
    }
    for problem in &report.config {
        text.push_str(&format!("BAD  {problem}\n"));
    }
    text.push_str(&format!("{}/{} tensors ok\n", report.good(), report.tensors.len()));
    text
}
