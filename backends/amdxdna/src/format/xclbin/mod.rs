//! xclbin container with an AIE partition.
//!
//! [`Xclbin`] is the container: header and sections. Typed sections: [`Partition`], [`Metadata`] (kernels and their
//! arguments), [`MemoryBank`], [`Connection`], [`IpEntry`]. [`Design`] puts them together: compute units in the order
//! the driver numbers them, each with its partition image.

mod container;
mod design;
mod layout;
mod metadata;
mod partition;

pub use container::{Xclbin, XclbinHeader, XclbinSection, kind};
pub use design::{ComputeUnit, Design, DesignSpec};
pub use layout::{Connection, IpEntry, MemoryBank};
pub use metadata::{AddressQualifier, Kernel, KernelArgument, Metadata};
pub use partition::{AiePdi, CdoGroup, CdoGroupKind, Partition};

use thiserror::Error;

/// An xclbin that cannot be read or written.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum XclbinError {
    /// Not this kind of file.
    #[error("not an xclbin: the file starts with {found:02x?}, wanted \"xclbin2\"")]
    Magic {
        /// First bytes.
        found: Vec<u8>,
    },
    /// A part that lies outside its container.
    #[error("{what}: bytes {at_bytes}..{} are outside {container} of {container_bytes} bytes", at_bytes.saturating_add(*len_bytes))]
    OutOfRange {
        /// Part.
        what: String,
        /// Container.
        container: &'static str,
        /// First byte.
        at_bytes: u64,
        /// Length.
        len_bytes: u64,
        /// Size of the container.
        container_bytes: u64,
    },
    /// Parts that share bytes so often that copies would be far larger than the file.
    #[error("{what}: its parts add up to more than the {container_bytes} bytes that hold them")]
    Overlapping {
        /// Container.
        what: String,
        /// Size of the container.
        container_bytes: usize,
    },
    /// A section that is needed.
    #[error("the xclbin has no {name} section")]
    MissingSection {
        /// Section name.
        name: &'static str,
    },
    /// Text that is not terminated or not UTF-8.
    #[error("{what}: no terminated UTF-8 text at byte {at_bytes}")]
    BadText {
        /// What the text is.
        what: String,
        /// Offset in its container.
        at_bytes: u64,
    },
    /// Text that is too long for its field.
    #[error("{what} {text:?} is longer than its field of {max_bytes} bytes")]
    TextTooLong {
        /// What the text is.
        what: &'static str,
        /// The text.
        text: String,
        /// Size of the field.
        max_bytes: usize,
    },
    /// Metadata that is not what it should be.
    #[error("EMBEDDED_METADATA, byte {at_bytes}: {reason}")]
    Metadata {
        /// Offset in the section.
        at_bytes: u64,
        /// What is wrong.
        reason: String,
    },
    /// A value that cannot be.
    #[error("{what}: {reason}")]
    Invalid {
        /// Part of the file.
        what: String,
        /// What is wrong.
        reason: String,
    },
}

#[cfg(test)]
mod tests;
