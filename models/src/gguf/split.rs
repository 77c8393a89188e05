//! Models in several GGUF files, as `gguf-split` of the ggml project writes them: `NAME-00001-of-0000N.gguf` and so on. The first
//! has the metadata, each has some of the tensors; `split.no`, `split.count` and `split.tensors.count` hold them together.

use super::GgufFile;
use crate::error::ModelError;
use crate::map::FileMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files of a model at most.
const MAX_PARTS: u64 = 4096;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

impl GgufFile {
    /// Maps the file at `path`; where it is one of several, whichever, the whole model with all of them, which lie in the same
    /// folder. The result has the metadata of the first.
    ///
    /// # Errors
    /// As [`GgufFile::open`]; [`ModelError::Missing`] for a part that is not there, [`ModelError::Malformed`] for one that is of
    /// another model or contradicts the others.
    pub fn open_whole(path: &Path) -> Result<Self, ModelError> {
        let opened = Self::open(path)?;
        let Some(count @ 2..) = opened.unsigned(COUNT)? else { return Ok(opened) };
        if count > MAX_PARTS {
            return Err(opened.malformed(COUNT, format!("wanted at most {MAX_PARTS} files, found {count}")));
        }
        let number = opened.unsigned(NUMBER)?.ok_or_else(|| opened.missing(format!("metadata key {NUMBER}"), ""))?;
        let name = PartName::of(path, number, count).map_err(|reason| opened.malformed("file name", reason))?;
        let tensors = opened.unsigned(TENSORS)?;
        let mut whole: Option<Self> = None;
        for index in 0..count {
            let place = name.path(index);
            let part = if index == number { opened.clone() } else { open_part(&place, index, count)? };
            part.check_part(index, count, tensors)?;
            match &mut whole {
                None => whole = Some(part),
                Some(whole) => whole.take_part(part)?,
            }
        }
        let whole = whole.unwrap_or(opened);
        match tensors {
            Some(wanted) if wanted != whole.tensors.len() as u64 => {
                let reason = format!("wanted {wanted} tensors in all {count} files, found {}", whole.tensors.len());
                Err(whole.malformed(TENSORS, reason))
            }
            _ => Ok(whole),
        }
    }

    /// Files that the model is read from.
    #[must_use]
    pub fn part_count(&self) -> usize {
        self.parts.len()
    }

    /// The mappings of all files that the model is read from.
    #[must_use]
    pub fn part_maps(&self) -> &[Arc<FileMap>] {
        &self.parts
    }

    fn check_part(&self, index: u64, count: u64, tensors: Option<u64>) -> Result<(), ModelError> {
        for (key, wanted) in [(NUMBER, Some(index)), (COUNT, Some(count)), (TENSORS, tensors)] {
            let found = self.unsigned(key)?;
            if found != wanted {
                let text = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
                let (wanted, found) = (text(wanted), text(found));
                let reason = format!("wanted {wanted}, found {found}: the file is a part of another model, or renamed");
                return Err(self.malformed(key, reason));
            }
        }
        Ok(())
    }

    /// Adds the tensors of `part`.
    fn take_part(&mut self, part: Self) -> Result<(), ModelError> {
        let index = self.parts.len();
        for mut info in part.tensors {
            info.part = index;
            if self.names.insert(Arc::clone(&info.name), self.tensors.len()).is_some() {
                let field = format!("tensor {:?}", info.name());
                return Err(super::malformed(&part.map, field, "wanted it in one file, found it in two".to_owned()));
            }
            self.tensors.push(info);
        }
        self.parts.push(part.map);
        Ok(())
    }
}

fn open_part(path: &Path, index: u64, count: u64) -> Result<GgufFile, ModelError> {
    if !path.exists() {
        return Err(ModelError::Missing {
            path: path.to_owned(),
            what: format!("file {} of {count} of the model", index + 1),
            remedy: "fetch it into the same folder".to_owned(),
        });
    }
    GgufFile::open(path)
}

/// The names of all parts of a model and the number of this one (from 1), if `name` is one of a part: `…-00001-of-00003.gguf`.
pub(crate) fn part_names(name: &str) -> Option<(u64, Vec<String>)> {
    let (before, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (_, number) = before.rsplit_once('-')?;
    let five_digits = |text: &str| (text.len() == 5).then(|| text.parse::<u64>().ok()).flatten();
    let (number, count) = (five_digits(number)?, five_digits(count)?);
    // A name alone must not cost much.
    if !(1..=count).contains(&number) || count > 1000 {
        return None;
    }
    let parts = PartName::of(Path::new(name), number - 1, count).ok()?;
    let names = (0..count).filter_map(|index| parts.path(index).to_str().map(str::to_owned));
    Some((number, names.collect()))
}

/// What the names of a model's files have in common.
struct PartName {
    folder: PathBuf,
    prefix: String,
    suffix: String,
}

impl PartName {
    /// From the name of part `number` (from 0).
    fn of(path: &Path, number: u64, count: u64) -> Result<Self, String> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let place = format!("-{:05}-of-{count:05}", number.saturating_add(1));
        let Some((prefix, suffix)) = name.rsplit_once(&place) else {
            return Err(format!("wanted {place:?} in it for file {number} (from 0) of {count}, found {name:?}"));
        };
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let suffix = format!("-of-{count:05}{suffix}");
        Ok(Self { folder, prefix: prefix.to_owned(), suffix })
    }

    fn path(&self, index: u64) -> PathBuf {
        self.folder.join(format!("{}-{:05}{}", self.prefix, index + 1, self.suffix))
    }
}
