//! From a checkpoint to a package.

use super::error::{PackageError, io_error};
use super::identity::Identity;
use super::load::hash_file;
use super::metadata::METADATA_FILE;
use super::plan::{self, Array};
use super::publish::{PackageStaging, sync};
use super::shape::{CONTEXT_POSITIONS, Family, HEAD_DIM, Shape};
use super::source::Checkpoint;
use super::write::{Listed, Written, write_array, write_companion};
use npuhal_core::stage::Control;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

/// How often the caller's control is looked at while no thread reports.
const PATIENCE: Duration = Duration::from_millis(200);

/// What is to be converted into what.
#[derive(Debug, Clone)]
pub struct ConvertRequest<'a> {
    /// A directory with a Hugging Face checkpoint, or a GGUF file.
    pub source: &'a Path,
    /// Directory of the package; a package that is there is replaced, all but what `keep` names.
    pub target: &'a Path,
    /// What the caller says the package is.
    pub identity: Identity,
    /// Shape to accept instead of the one the family's graphs compute; only such a package can run on an NPU.
    pub shape: Option<Shape>,
    /// Threads.
    pub threads: NonZeroUsize,
    /// Folders of a package that is replaced which go over to the new one, by name: what users put there, not conversions.
    pub keep: &'a [&'a str],
}

/// What a conversion is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvertPhase {
    /// Arrays are written.
    Writing,
    /// Everything is read again from the disk and compared.
    Verifying,
}

/// How far a conversion is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvertProgress {
    /// What it is doing.
    pub phase: ConvertPhase,
    /// Bytes of this phase that are done.
    pub done_bytes: u64,
    /// Bytes of this phase in all.
    pub total_bytes: u64,
}

/// A package that was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// Its directory.
    pub path: PathBuf,
    /// Its family.
    pub family: Family,
    /// Its id, where one is recorded.
    pub model_id: Option<String>,
    /// Files, `metadata.json` included.
    pub files: usize,
    /// Bytes of all files.
    pub size_bytes: u64,
    /// Folders that were taken over from the package that was here.
    pub kept: Vec<String>,
}

/// Converts a checkpoint. Nothing is written before the source is accepted; the target changes only at the very end, and a
/// failed conversion leaves no files behind.
///
/// # Errors
/// [`PackageError`].
pub fn convert(
    request: &ConvertRequest<'_>,
    progress: &mut dyn FnMut(ConvertProgress),
    control: &Control,
) -> Result<Converted, PackageError> {
    let mut checkpoint = Checkpoint::open(request.source, request.shape)?;
    let target_name = request.target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let identity = request.identity.clone().settle(&checkpoint.names, &target_name)?;
    let mut arrays = plan::arrays(&checkpoint.shape);
    // All parts are there and have their shapes before anything is written.
    for array in &arrays {
        for (part, count) in &array.parts {
            let (rows, cols) = if array.is_vector() { (1, *count) } else { (*count, array.cols) };
            checkpoint.part(*part, rows, cols)?;
        }
    }
    // The longest first, so that no thread is left with it at the end.
    arrays.sort_by_key(|array| std::cmp::Reverse(array.len_bytes()));
    let companions = std::mem::take(&mut checkpoint.companions);
    let array_bytes: u64 = arrays.iter().map(Array::len_bytes).sum();
    let companion_bytes: u64 = companions.iter().map(|(_, contents)| contents.len() as u64).sum();
    let staging = PackageStaging::create(request.target)?;
    check_space(staging.path(), array_bytes + companion_bytes)?;
    if let Some(file) = &checkpoint.file {
        let sha256 = hash_file(file, &mut |_| Ok(control.check()?))?;
        checkpoint.provenance.insert("source_sha256".to_owned(), json!(sha256));
    }

    let directory = staging.path();
    let mut report = Report { phase: ConvertPhase::Writing, total_bytes: array_bytes, progress, control };
    let written = report
        .run(request.threads, arrays.len(), |index, tick| write_array(&arrays[index], &checkpoint, directory, tick))?;
    let mut tensors = Map::new();
    let mut files = Vec::new();
    for (array, Written { entry, files: listed }) in arrays.iter().zip(written) {
        tensors.insert(array.name.clone(), entry);
        files.extend(listed);
    }
    for (name, contents) in &companions {
        files.push(write_companion(name, contents, directory)?);
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let metadata = metadata(&checkpoint, &identity, tensors, &files);
    write_metadata(directory, &metadata)?;

    report.phase = ConvertPhase::Verifying;
    report.total_bytes = files.iter().map(|file| file.size_bytes).sum();
    report.run(request.threads, files.len(), |index, tick| {
        let Listed { name, sha256, .. } = &files[index];
        let path = directory.join(name);
        if hash_file(&path, tick)? != *sha256 {
            return Err(PackageError::Checksum { name: name.clone() });
        }
        sync(&path)
    })?;
    let metadata_bytes = fs::metadata(directory.join(METADATA_FILE)).map_or(0, |metadata| metadata.len());
    let size_bytes = files.iter().map(|file| file.size_bytes).sum::<u64>() + metadata_bytes;
    debug_assert_eq!(staging.target_name(), target_name);
    control.check()?;
    let (path, kept) = staging.publish(request.keep)?;
    let (family, model_id) = (checkpoint.family, identity.model_id);
    Ok(Converted { path, family, model_id, files: files.len() + 1, size_bytes, kept })
}

fn metadata(checkpoint: &Checkpoint, identity: &Identity, tensors: Map<String, Value>, files: &[Listed]) -> Value {
    let Shape { hidden_size, intermediate_size, heads, kv_heads, layers, vocab_size } = checkpoint.shape;
    let files: Map<String, Value> = files
        .iter()
        .map(|file| (file.name.clone(), json!({ "sha256": file.sha256, "size": file.size_bytes })))
        .collect();
    let mut metadata = checkpoint.provenance.clone();
    identity.record(&mut metadata);
    let fields = json!({
        "format": checkpoint.family.format(),
        "model_family": checkpoint.family.name(),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "attention_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "layers": layers,
        "vocab_size": vocab_size,
        "rope_theta": checkpoint.rope_theta,
        "rms_norm_eps": checkpoint.rms_norm_eps,
        "context_length": CONTEXT_POSITIONS,
        "activation_dtype": "bfloat16",
        "accumulator_dtype": "float32",
        "tensors": tensors,
        "files": files,
    });
    if let Value::Object(fields) = fields {
        metadata.extend(fields);
    }
    let mut metadata = Value::Object(metadata);
    metadata.sort_all_objects();
    metadata
}

fn write_metadata(directory: &Path, metadata: &Value) -> Result<(), PackageError> {
    let path = directory.join(METADATA_FILE);
    let mut file = File::create_new(&path).map_err(io_error(&path, "create"))?;
    file.write_all(format!("{metadata:#}\n").as_bytes()).map_err(io_error(&path, "write"))?;
    file.sync_all().map_err(io_error(&path, "flush"))
}

fn check_space(directory: &Path, wanted_bytes: u64) -> Result<(), PackageError> {
    let found = rustix::fs::statvfs(directory).map_err(|error| io_error(directory, "inspect")(error.into()))?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    if free_bytes < wanted_bytes {
        return Err(PackageError::NoSpace { path: directory.to_owned(), wanted_bytes, free_bytes });
    }
    Ok(())
}

/// Work on several threads with progress and cancellation on the caller's.
struct Report<'a> {
    phase: ConvertPhase,
    total_bytes: u64,
    progress: &'a mut dyn FnMut(ConvertProgress),
    control: &'a Control,
}

impl Report<'_> {
    /// Runs `job` for 0 to `count`; the results in order. The first error stops all threads.
    fn run<T: Send>(
        &mut self,
        threads: NonZeroUsize,
        count: usize,
        job: impl Fn(usize, &mut dyn FnMut(u64) -> Result<(), PackageError>) -> Result<T, PackageError> + Sync,
    ) -> Result<Vec<T>, PackageError> {
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = |ticks: Sender<u64>| {
            let mut results = Vec::new();
            let mut tick = |bytes| {
                // Fails only when the caller's side is gone, which is when it stopped listening.
                let heard = ticks.send(bytes).is_ok() && !stop.load(Ordering::Relaxed);
                if heard { Ok(()) } else { Err(PackageError::Stopped(npuhal_core::RunError::Cancelled)) }
            };
            while !stop.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                let result = job(index, &mut tick);
                let failed = result.is_err();
                results.push((index, result));
                if failed {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            results
        };
        let (sender, ticks) = channel();
        let (mut results, stopped) = thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.get().min(count.max(1)))
                .map(|_| {
                    let sender = sender.clone();
                    scope.spawn(|| work(sender))
                })
                .collect();
            drop(sender);
            let mut stopped = None;
            let mut done_bytes = 0;
            loop {
                match ticks.recv_timeout(PATIENCE) {
                    Ok(bytes) => done_bytes += bytes,
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                    Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                }
                (self.progress)(ConvertProgress { phase: self.phase, done_bytes, total_bytes: self.total_bytes });
                if let (Err(error), None) = (self.control.check(), &stopped) {
                    stop.store(true, Ordering::Relaxed);
                    stopped = Some(error);
                }
            }
            let mut results = Vec::with_capacity(count);
            let mut panicked = false;
            for worker in workers {
                match worker.join() {
                    Ok(some) => results.extend(some),
                    Err(_) => panicked = true,
                }
            }
            (if panicked { Err(PackageError::Panicked) } else { Ok(results) }, stopped)
        });
        if let Some(error) = stopped {
            return Err(error.into());
        }
        let results = results.as_mut().map(std::mem::take).map_err(|_| PackageError::Panicked)?;
        in_order(results, count)
    }
}

/// The results by number; the first failure that is not just the echo of another.
fn in_order<T>(results: Vec<(usize, Result<T, PackageError>)>, count: usize) -> Result<Vec<T>, PackageError> {
    let mut sorted: Vec<(usize, T)> = Vec::with_capacity(count);
    let mut failure: Option<PackageError> = None;
    for (index, result) in results {
        match result {
            Ok(value) => sorted.push((index, value)),
            Err(error) if failure.is_none() || matches!(failure, Some(PackageError::Stopped(_))) => {
                failure = Some(error);
            }
            Err(_) => {}
        }
    }
    if let Some(error) = failure {
        return Err(error);
    }
    sorted.sort_by_key(|(index, _)| *index);
    Ok(sorted.into_iter().map(|(_, value)| value).collect())
}
