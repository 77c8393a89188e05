//! Errors of opening a twin.

use npuhal_models::ModelError;
use npuhal_registry::{Numerics, SpanError};
use thiserror::Error;

/// A twin that cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TwinError {
    /// The lane does not compute such a model.
    #[error("numerics {numerics} cannot run this model: {field} is {found}; {wanted}")]
    Config {
        /// The lane's numerics.
        numerics: Numerics,
        /// Field of the configuration.
        field: &'static str,
        /// Its value.
        found: String,
        /// What it would have to be.
        wanted: &'static str,
    },
    /// A matrix is stored in a form that the lane's kernels do not take.
    #[error("numerics {numerics} cannot run this model: tensor {tensor} is stored as {found}; wanted {wanted}")]
    Weights {
        /// The lane's numerics.
        numerics: Numerics,
        /// Name in the file.
        tensor: String,
        /// How it is stored.
        found: String,
        /// What it would have to be.
        wanted: &'static str,
    },
    /// A tensor is missing or damaged.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The span is no part of the model.
    #[error(transparent)]
    Span(#[from] SpanError),
    /// A tensor has another shape than the configuration says.
    #[error("tensor {tensor} is {found_rows} x {found_cols}; the configuration says {rows} x {cols}")]
    Shape {
        /// Name in the file.
        tensor: String,
        /// Rows it should have.
        rows: usize,
        /// Elements of a row it should have.
        cols: usize,
        /// Rows it has.
        found_rows: usize,
        /// Elements of a row it has.
        found_cols: usize,
    },
    /// A tensor's elements cannot be read.
    #[error("tensor {tensor}: {reason}")]
    Elements {
        /// Name in the file.
        tensor: String,
        /// Wanted and found.
        reason: String,
    },
}
