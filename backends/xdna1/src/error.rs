//! Errors of packing.

use npuhal_models::package::{Family, PackageError, Shape};
use thiserror::Error;

/// Weights, buffers or positions that a design cannot take.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The package is of another family or shape than the design.
    #[error("the {design} design wants a {} model of {wanted:?}, found a {} model of {found:?}", family.name(), found_family.name())]
    WrongModel {
        /// Name of the design.
        design: &'static str,
        /// Family of the design.
        family: Family,
        /// Family of the package.
        found_family: Family,
        /// Shape of the design.
        wanted: Shape,
        /// Shape of the package.
        found: Shape,
    },
    /// The package is damaged or incomplete.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A buffer of another length than what goes into it.
    #[error("{what}: wanted a buffer of {wanted} bytes, found {found}")]
    BufferLength {
        /// What was to be packed.
        what: &'static str,
        /// Bytes it takes.
        wanted: u64,
        /// Bytes there are.
        found: u64,
    },
    /// Something that is numbered, beyond its end.
    #[error("{what} {found} of {limit}; the last is {}", limit.saturating_sub(1))]
    OutOfRange {
        /// What is numbered, e.g. `position`.
        what: &'static str,
        /// What was asked for.
        found: u64,
        /// How many there are.
        limit: u64,
    },
}
