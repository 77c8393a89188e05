//! Errors of packages.

use crate::error::ModelError;
use crate::staging::StagingError;
use npuhal_core::RunError;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A checkpoint that cannot be converted, or a package that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackageError {
    /// The source is of a family that no graph computes.
    #[error("unsupported model_type '{found}'; expected one of llama, qwen2")]
    UnknownFamily {
        /// What `config.json` states.
        found: String,
    },
    /// The source has another shape than the family's graph.
    #[error("model is incompatible with the selected XDNA1 graph: {differences}")]
    Incompatible {
        /// Each field as `name=found (expected wanted)`.
        differences: String,
    },
    /// The heads have another size than the kernels.
    #[error("head_dim={found} is unsupported; expected 64")]
    HeadDim {
        /// What the source has.
        found: u64,
    },
    /// The source declares something that a package cannot express.
    #[error("{}: {feature} cannot be expressed in a package; supported: {supported}", path.display())]
    Feature {
        /// The source.
        path: PathBuf,
        /// What it declares.
        feature: String,
        /// What there is instead.
        supported: &'static str,
    },
    /// A value that is not finite, or is too large for the package's element type.
    #[error(
        "tensor {tensor:?}: row {row} has a value of {value}; wanted finite numbers{}",
        if *limit > 0.0 { format!(" up to {limit}, the largest float16") } else { String::new() }
    )]
    Value {
        /// Name in the source.
        tensor: String,
        /// Row of the value.
        row: usize,
        /// The value.
        value: f32,
        /// Largest magnitude allowed; 0 where any finite number is.
        limit: f32,
    },
    /// An id that belongs to another checkpoint.
    #[error("the id {model_id} is that of {repository}; {found}: give another --model-id")]
    ReservedId {
        /// The id.
        model_id: String,
        /// The checkpoint it is published for.
        repository: &'static str,
        /// What the source is.
        found: String,
    },
    /// An id that cannot be one.
    #[error(
        "a model id has letters, digits and `.`, `_`, `-`, and starts with a letter or digit, at most 100 in all; found {found:?}"
    )]
    BadId {
        /// What was given.
        found: String,
    },
    /// The target exists and is no package.
    #[error("{}: exists and is {found}, so it is not replaced; choose another target or remove it", path.display())]
    TargetTaken {
        /// The target.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// Not enough room for the package.
    #[error("{}: the package needs {wanted_bytes} bytes of disk space, {free_bytes} are free", path.display())]
    NoSpace {
        /// Where the package was to go.
        path: PathBuf,
        /// What it takes.
        wanted_bytes: u64,
        /// What is free.
        free_bytes: u64,
    },
    /// `metadata.json` is unusable.
    #[error("{}: {field}: {reason}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// Field of it.
        field: String,
        /// Wanted and found.
        reason: String,
    },
    /// The package lists no files.
    #[error("model package has no integrity manifest; reconvert the model")]
    NoManifest,
    /// A file is not there or has another size.
    #[error("model package file is missing or truncated: {name}")]
    Truncated {
        /// The file's name.
        name: String,
    },
    /// A file has other contents than when it was written.
    #[error("model package checksum mismatch: {name}")]
    Checksum {
        /// The file's name.
        name: String,
    },
    /// A package from before there were BF16 weights.
    #[error("{tensor} has no BF16 weights; rerun convert_smollm2.py (`npuhal convert` does the same)")]
    NoBf16 {
        /// The package's name of the tensor.
        tensor: String,
    },
    /// The source's file cannot be used.
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
    /// A thread of the conversion panicked.
    #[error("a thread of the conversion panicked; this is a defect of npuhal")]
    Panicked,
    /// The caller stopped the work.
    #[error(transparent)]
    Stopped(#[from] RunError),
}

impl From<StagingError> for PackageError {
    fn from(StagingError { path, action, source }: StagingError) -> Self {
        Self::Io { path, action, source }
    }
}

pub(super) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> PackageError {
    let path = path.to_owned();
    move |source| PackageError::Io { path, action, source }
}
