//! Errors of building CPU segments.

use crate::config::ConfigError;
use npuhal_models::ModelError;
use npuhal_models::quant::QuantError;
use npuhal_registry::SpanError;
use thiserror::Error;

/// A CPU segment that cannot be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The model file lacks a tensor or holds an unusable one.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The span asked for is no part of the model.
    #[error(transparent)]
    Span(#[from] SpanError),
    /// A configuration that is not computed here.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A small tensor that could not be read.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// A tensor whose shape the kernels cannot take.
    #[error("tensor {tensor}: wanted {wanted}, found {found}")]
    Shape {
        /// Name in the file.
        tensor: String,
        /// What the model's configuration says.
        wanted: String,
        /// What the file holds.
        found: String,
    },
    /// No memory for packed weights.
    #[error("no room for {wanted_bytes} bytes of {what}: {source}; close other programs or take a smaller model")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// Size.
        wanted_bytes: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// A worker thread could not be started.
    #[error("cannot start worker thread {index} of {wanted}: {source}; ask for fewer threads")]
    Thread {
        /// Number of the thread.
        index: usize,
        /// Threads that were asked for.
        wanted: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A worker thread panicked while weights were packed.
    #[error("a worker thread panicked while {during}; this is a defect of npuhal")]
    Panicked {
        /// What was being done.
        during: &'static str,
    },
}
