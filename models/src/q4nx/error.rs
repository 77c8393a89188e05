//! Errors of packing and verifying.

use super::guard::ScaleProblem;
use crate::error::ModelError;
use crate::staging::StagingError;
use crate::tensor::WeightType;
use npuhal_core::error::RunError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// A model that cannot be packed or verified.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A model file that cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was to be done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Another architecture.
    #[error("{}: architecture '{found}': only qwen3 and qwen2 can be packed", path.display())]
    Architecture {
        /// The GGUF file.
        path: PathBuf,
        /// What it declares.
        found: String,
    },
    /// A tensor that a Q4NX directory has no place for.
    #[error("{}: tensor {name:?}: a Q4NX directory of a dense Qwen model has no such tensor", path.display())]
    UnknownTensor {
        /// The GGUF file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A matrix that is no whole number of tiles.
    #[error("{}: tensor {name:?}: wanted rows a multiple of 32 and columns a multiple of 256, the size of a tile, found {rows} × {cols}", path.display())]
    NotWholeTiles {
        /// The GGUF file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
    },
    /// A weight that is infinite or not a number, or too large for bf16.
    #[error("{}: tensor {name:?} ({weight_type}), near row {row}: wanted finite numbers of bf16's range; the file is damaged", path.display())]
    NotFinite {
        /// The GGUF file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        weight_type: WeightType,
        /// First row of the tile.
        row: usize,
    },
    /// The file declares scales that the packed directory would not carry.
    #[error("{}: {}; a model computed without them gives wrong text", path.display(), problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    DeclaredScale {
        /// The GGUF file.
        path: PathBuf,
        /// What is declared.
        problems: Vec<ScaleProblem>,
    },
    /// No tokenizer for the directory.
    #[error("{}: {reason}; give a directory with tokenizer.json (--tokenizer DIR)", path.display())]
    Tokenizer {
        /// GGUF file or directory.
        path: PathBuf,
        /// Why there is none.
        reason: String,
    },
    /// Something is in the way.
    #[error("{}: {found} is there already; {remedy}", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
        /// What is there.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// No directory for packed models.
    #[error("no cache directory: neither XDG_CACHE_HOME nor HOME is set; name one with NPUHAL_Q4NX_CACHE")]
    NoCache,
    /// The caller stopped the work.
    #[error(transparent)]
    Stopped(#[from] RunError),
}

/// Turns what the system said into an error about `path`.
impl From<StagingError> for PackError {
    fn from(StagingError { path, action, source }: StagingError) -> Self {
        Self::Io { path, action, source }
    }
}

pub(super) fn io_error(path: &std::path::Path, action: &'static str) -> impl FnOnce(io::Error) -> PackError {
    let path = path.to_owned();
    move |source| PackError::Io { path, action, source }
}
