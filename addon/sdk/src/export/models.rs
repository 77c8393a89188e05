//! Models, opened here by their path.
//!
//! A host asks for the fitness before it opens, so the model that was asked about is kept for the opening; then only whoever uses
//! it keeps it. It is opened anew where one of its files has changed.

use npuhal_models::ModelSource;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

/// Entries of a model's folder that are looked at.
const ENTRIES_MAX: usize = 4096;

/// What a model is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To be asked about; it is opened next.
    Fitness,
    /// To be run.
    Opening,
}

/// What tells one state of a file from another: number, size, time of the last change.
type Stamp = Option<(u64, u64, Option<SystemTime>)>;

struct Known {
    path: PathBuf,
    files: Vec<(PathBuf, Stamp)>,
    model: Weak<ModelSource>,
    /// Until it is opened.
    _held: Option<Arc<ModelSource>>,
}

pub(super) fn open(path: &Path, purpose: Purpose) -> Result<Arc<ModelSource>, String> {
    static LAST: Mutex<Option<Known>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let known = last.take().filter(|known| known.path == path && known.is_fresh());
    let (model, files) = match known.and_then(|known| Some((known.model.upgrade()?, known.files))) {
        Some(known) => known,
        None => {
            // Before it is opened: what changes meanwhile is seen the next time.
            let mut files = stamped(folder_files(path));
            let model = Arc::new(ModelSource::open(path).map_err(|error| error.to_string())?);
            for (_, tensor) in model.tensors() {
                if files.iter().all(|(file, _)| file != tensor.path()) {
                    files.extend(stamped(vec![tensor.path().to_owned()]));
                }
            }
            (model, files)
        }
    };
    let held = (purpose == Purpose::Fitness).then(|| Arc::clone(&model));
    *last = Some(Known { path: path.to_owned(), files, model: Arc::downgrade(&model), _held: held });
    Ok(model)
}

impl Known {
    fn is_fresh(&self) -> bool {
        self.files.iter().all(|(file, stamp)| *stamp == stamp_of(file))
    }
}

/// The path itself, and what lies in it where it is a folder.
fn folder_files(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten().take(ENTRIES_MAX);
    std::iter::once(path.to_owned()).chain(entries.map(|entry| entry.path())).collect()
}

fn stamped(files: Vec<PathBuf>) -> Vec<(PathBuf, Stamp)> {
    files.into_iter().map(|file| (file.clone(), stamp_of(&file))).collect()
}

fn stamp_of(file: &Path) -> Stamp {
    let stamp = |metadata: Metadata| (metadata.ino(), metadata.len(), metadata.modified().ok());
    std::fs::metadata(file).ok().map(stamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_whose_files_changed_is_stale() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        std::fs::write(&file, "{}").unwrap();
        let known = || Known {
            path: folder.path().to_owned(),
            files: stamped(folder_files(folder.path())),
            model: Weak::new(),
            _held: None,
        };
        let before = known();
        assert!(before.is_fresh());
        // The folder itself does not change with what is in its files.
        std::fs::write(&file, "{ }").unwrap();
        assert!(!before.is_fresh());
        let before = known();
        std::fs::write(folder.path().join("another"), "").unwrap();
        assert!(!before.is_fresh());
    }
}
