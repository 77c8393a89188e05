//! Errors of opening a segment on the CPU.

use npuhal_models::ModelError;
use npuhal_registry::span::SpanError;
use thiserror::Error;

/// A segment that cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
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
    /// The configuration asks for something that this backend does not compute.
    #[error("the CPU backend cannot run this model: {field} is {found}; {supported}")]
    Unsupported {
        /// Field of the configuration or kind of tensor.
        field: &'static str,
        /// Its value.
        found: String,
        /// What there is instead.
        supported: String,
    },
    /// More memory than may be taken.
    #[error("{what} takes {wanted_bytes} bytes; {remedy}")]
    TooLarge {
        /// What was to be allocated.
        what: &'static str,
        /// Its size.
        wanted_bytes: u64,
        /// What to do.
        remedy: String,
    },
}
