//! Errors of kits.

use crate::error::LaneError;
use npuhal_models::package::Shape;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// A kit that cannot be used, and why. Nothing is loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KitError {
    /// There is no kit.
    #[error(
        "{}: no kit is there; put the compiled designs into the package's npu/ folder with `npuhal kit import`, or name \
         their folder with --kernels",
        path.display()
    )]
    Missing {
        /// Its `kit.json`.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was to be done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A file that is too large for what it should be.
    #[error("{}: wanted at most {limit_bytes} bytes, found more", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit_bytes: u64,
    },
    /// `kit.json` makes no sense.
    #[error("{}: {field}: {reason}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Field of it.
        field: String,
        /// Wanted and found.
        reason: String,
    },
    /// The kit has no kernel of this design for so many layers.
    #[error("{}: wanted a kernel of {design} for {layers} layers, found {found}", path.display())]
    NoKernel {
        /// The kit's folder.
        path: PathBuf,
        /// Name of the design.
        design: &'static str,
        /// Layers of a dispatch.
        layers: usize,
        /// What it has.
        found: String,
    },
    /// The kernel reads another layout.
    #[error("{design}: wanted layout version {wanted}, found {found}; compile the design again for this version")]
    Layout {
        /// Name of the design.
        design: &'static str,
        /// Version of this program.
        wanted: u32,
        /// Version of the kernel.
        found: u32,
    },
    /// The kernel was compiled for another model.
    #[error("{design}: the kernel is compiled for a model of {found:?}, the package holds one of {wanted:?}")]
    OtherModel {
        /// Name of the design.
        design: &'static str,
        /// Shape of the package.
        wanted: Shape,
        /// Shape of the kernel.
        found: Shape,
    },
    /// The kernel takes another number of buffers.
    #[error("{design}: wanted {wanted} buffer arguments, found {found} {place}")]
    ArgumentCount {
        /// Name of the design.
        design: &'static str,
        /// Arguments of the layout.
        wanted: usize,
        /// Arguments of the kernel.
        found: usize,
        /// Where they are stated.
        place: &'static str,
    },
    /// A buffer has another name or length.
    #[error("{design}: argument {index}: wanted {wanted}, found {found}")]
    Argument {
        /// Name of the design.
        design: &'static str,
        /// Its position.
        index: usize,
        /// Name and bytes of the layout.
        wanted: String,
        /// What the kernel has.
        found: String,
    },
    /// A file has other contents than when the kit was made.
    #[error("{}: wanted SHA-256 {wanted}, found {found}; make or import the kit again", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// What the kit states.
        wanted: String,
        /// What it is.
        found: String,
    },
    /// The xclbin cannot hold the kernel.
    #[error("{}: {reason}", path.display())]
    Xclbin {
        /// The file.
        path: PathBuf,
        /// Wanted and found.
        reason: String,
    },
    /// The instruction stream cannot drive the kernel.
    #[error("{}: {reason}", path.display())]
    Instructions {
        /// The file.
        path: PathBuf,
        /// Wanted and found.
        reason: String,
    },
    /// The design does not compute such models at all.
    #[error(transparent)]
    Lane(#[from] LaneError),
}
