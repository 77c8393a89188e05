//! `npuhal pull`: brings models of the catalogue into the models folder.

use crate::Host;
use crate::args::PullArgs;
use crate::error::CliError;
use crate::terminal::{Voice, bytes_text, complain};
use indicatif::ProgressBar;
use npuhal_models::catalogue::Entry;
use npuhal_models::pull::{Phase, Progress, ProgressSink, PullOptions, SourceFailure};
use npuhal_models::store::Presence;
use npuhal_models::{Catalogue, Store};
use std::io::{BufRead, IsTerminal, Read, stderr, stdin};
use std::path::PathBuf;

pub(crate) fn pull(host: &Host, args: &PullArgs) -> Result<(), CliError> {
    let catalogue = Catalogue::builtin();
    let store = Store::locate(host.global.models_dir.as_deref())?;
    let entries = args.models.iter().map(|name| known(catalogue, name)).collect::<Result<Vec<_>, _>>()?;
    for entry in entries {
        if args.verify && store.presence(entry) != Presence::Absent {
            let bar = host.voice.bar(entry.size_bytes, "verifying");
            let result = store.verify(entry, &host.control, &mut |done_bytes| bar.set_position(done_bytes));
            bar.finish_and_clear();
            result?;
        }
        let path = fetch(host, &store, entry)?;
        host.voice.note(format_args!("{}: {} (verified)", entry.name, path.display()));
    }
    Ok(())
}

fn known<'c>(catalogue: &'c Catalogue, name: &str) -> Result<&'c Entry, CliError> {
    catalogue.find(name).ok_or_else(|| {
        let nearest = catalogue.nearest(name).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        let known = catalogue.entries().iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>().join(", ");
        CliError::Usage(format!("no model `{name}` in the catalogue{nearest}; it holds: {known}"))
    })
}

/// The file of `entry`, downloaded if it is not here.
pub(crate) fn fetch(host: &Host, store: &Store, entry: &Entry) -> Result<PathBuf, CliError> {
    let mut options = PullOptions::from_env();
    options.offline = host.global.offline;
    options.accepted_terms.extend(host.global.accept_licence.iter().cloned());
    if !options.offline && store.presence(entry) == Presence::Absent {
        host.voice.note(format_args!(
            "fetching {} ({}, licence {}) into {}",
            entry.name,
            bytes_text(entry.size_bytes),
            entry.licence.id,
            store.folder().display()
        ));
        accept_terms(&mut options, entry)?;
    }
    let mut sink = Bar { voice: host.voice, bar: None };
    let result = npuhal_models::pull::pull(entry, store, &options, &mut sink, &host.control);
    if let Some(bar) = sink.bar {
        bar.finish_and_clear();
    }
    Ok(result?)
}

/// Shows the terms of `entry` that have not been accepted. On a terminal the user is asked; elsewhere the download refuses.
fn accept_terms(options: &mut PullOptions, entry: &Entry) -> Result<(), CliError> {
    let Some(terms) = options.unaccepted_terms(entry) else { return Ok(()) };
    if !(stdin().is_terminal() && stderr().is_terminal()) {
        return Ok(());
    }
    complain(format_args!("{}\nDo you accept them? Type yes or no:", terms.notice));
    let mut answer = String::new();
    stdin().lock().take(64).read_line(&mut answer).map_err(CliError::Input)?;
    if answer.trim().eq_ignore_ascii_case("yes") {
        options.accepted_terms.push(terms.accept.clone());
    }
    Ok(())
}

/// Shows a download. The bar appears with the first update, so that a file that is here shows none.
struct Bar {
    voice: Voice,
    bar: Option<ProgressBar>,
}

impl ProgressSink for Bar {
    fn update(&mut self, progress: &Progress<'_>) {
        let what = match progress.phase {
            Phase::Waiting => "waiting for another npuhal",
            Phase::Checking => "checking",
            Phase::Connecting => "connecting",
            Phase::Extracting => "extracting",
            _ => "downloading",
        };
        let bar = self.bar.get_or_insert_with(|| self.voice.bar(progress.size_bytes, what));
        bar.set_message(if progress.source.is_empty() {
            what.to_owned()
        } else {
            format!("{what} {}", progress.source)
        });
        bar.set_position(progress.done_bytes);
    }

    fn source_failed(&mut self, failure: &SourceFailure) {
        let note = || self.voice.note(format_args!("{}: {}", failure.source, failure.reason));
        match &self.bar {
            Some(bar) => bar.suspend(note),
            None => note(),
        }
    }
}
