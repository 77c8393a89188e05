//! Fetches a catalogue model: `cargo run -p npuhal-models --example pull -- NAME [FOLDER]`.

use npuhal_core::stage::Control;
use npuhal_models::pull::{Phase, Progress, ProgressSink, PullOptions, SourceFailure, pull};
use npuhal_models::{Catalogue, Store};
use std::error::Error;
use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Writes a line for each change of phase, source and tenth of the file.
struct Lines {
    start: Instant,
    last: Option<(Phase, String, u64)>,
}

impl ProgressSink for Lines {
    fn update(&mut self, progress: &Progress<'_>) {
        let tenths = progress.done_bytes * 10 / progress.size_bytes.max(1);
        let now = Some((progress.phase, progress.source.to_owned(), tenths));
        if self.last != now {
            self.last = now;
            let (seconds, phase) = (self.start.elapsed().as_secs_f32(), progress.phase);
            let (done, size) = (progress.done_bytes, progress.size_bytes);
            let _ = writeln!(stderr(), "{seconds:7.2} s {phase:?} {done} of {size} bytes, {}", progress.source);
        }
    }

    fn source_failed(&mut self, failure: &SourceFailure) {
        let _ = writeln!(stderr(), "{}: {}", failure.source, failure.reason);
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let catalogue = Catalogue::builtin();
    let entry = match arguments.next() {
        Some(name) => catalogue.find(&name).ok_or_else(|| format!("no model `{name}`"))?,
        None => catalogue.default_entry(),
    };
    let store = Store::locate(arguments.next().as_deref().map(Path::new))?;
    let mut lines = Lines { start: Instant::now(), last: None };
    let path = pull(entry, &store, &PullOptions::from_env(), &mut lines, &Control::new())?;
    writeln!(stdout(), "{} ({:.2} s)", path.display(), lines.start.elapsed().as_secs_f32())?;
    Ok(())
}
