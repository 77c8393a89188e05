//! Errors of model files.

use crate::clip::Clipped;
use crate::package::PackageError;
use std::path::PathBuf;
use thiserror::Error;

/// A model file that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be opened, mapped or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is damaged, truncated or not of its format.
    #[error("{}: {}: {}", path.display(), Clipped(field), Clipped(reason))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Field or tensor.
        field: String,
        /// Wanted and found.
        reason: String,
    },
    /// The file is sound but declares something that is not implemented.
    #[error("{}: {} is not supported; supported: {supported}", path.display(), Clipped(feature))]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The declared feature, e.g. `architecture "mamba"`.
        feature: String,
        /// What there is instead.
        supported: String,
    },
    /// Something every model of this kind has is not in the file.
    #[error("{}: {} is missing{}", path.display(), Clipped(what), if remedy.is_empty() { String::new() } else { format!("; {remedy}") })]
    Missing {
        /// The file.
        path: PathBuf,
        /// Tensor or field.
        what: String,
        /// What to do; may be empty.
        remedy: String,
    },
    /// An xdna1 package that cannot be used.
    #[error(transparent)]
    Package(Box<PackageError>),
}

impl From<PackageError> for ModelError {
    fn from(error: PackageError) -> Self {
        match error {
            PackageError::Model(error) => error,
            other => Self::Package(Box::new(other)),
        }
    }
}
