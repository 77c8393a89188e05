//! The real model files that some suites run on, fetched as the program fetches them.

use npuhal_core::stage::Control;
use npuhal_models::pull::{PullError, PullOptions, pull};
use npuhal_models::{Catalogue, Store};
use std::io::{Write, stderr};
use std::path::PathBuf;

/// The verified file of the catalogue model `name`, fetched into the user's models folder if it is not there. `None` only
/// where `NPUHAL_TEST_OFFLINE=1` forbids the network and the file is not there, and where its terms are to be accepted first
/// (`NPUHAL_ACCEPT_LICENCE`); that is printed.
///
/// # Panics
/// Where the model cannot be had: a suite that needs it fails.
#[must_use]
pub fn path(name: &str) -> Option<PathBuf> {
    let is_offline = std::env::var_os("NPUHAL_TEST_OFFLINE").is_some_and(|value| value == "1");
    match fetch(name, is_offline) {
        Ok(path) => Some(path),
        Err(PullFailure::Terms(reason)) => {
            // Whoever runs the tests need not accept them; that is no lack of data.
            let _ = writeln!(stderr().lock(), "terms: tests on the model {name} are left out: {reason}");
            None
        }
        Err(PullFailure::Other(reason)) if is_offline => {
            skipped(&format!("tests on the model {name}"), &reason);
            None
        }
        Err(PullFailure::Other(reason)) => {
            panic!("the model {name} cannot be had: {reason}; NPUHAL_TEST_OFFLINE=1 leaves its tests out")
        }
    }
}

/// Prints that a test was left out. Written past the test harness, which would keep it from sight.
pub fn skipped(test: &str, reason: &str) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(stderr().lock(), "skipped: {test}: {reason}");
}

/// Prints that a long test was left out; `NPUHAL_SOAK=1` runs it, which a nightly job sets.
pub fn left_to_soak(test: &str) {
    let _ = writeln!(stderr().lock(), "soak: {test} runs with NPUHAL_SOAK=1");
}

/// Why a model is not there.
enum PullFailure {
    Terms(String),
    Other(String),
}

fn fetch(name: &str, is_offline: bool) -> Result<PathBuf, PullFailure> {
    let other = |error: &dyn std::fmt::Display| PullFailure::Other(error.to_string());
    let entry = Catalogue::builtin().find(name).ok_or_else(|| other(&"the catalogue does not hold it"))?;
    let store = Store::locate(None).map_err(|error| other(&error))?;
    let options = PullOptions { offline: is_offline, ..PullOptions::from_env() };
    pull(entry, &store, &options, &mut (), &Control::new()).map_err(|error| match error {
        PullError::TermsNotAccepted { word, .. } => {
            PullFailure::Terms(format!("its terms are not accepted; NPUHAL_ACCEPT_LICENCE={word} accepts them"))
        }
        error => other(&error),
    })
}
