//! Why an add-on is not loaded.

use crate::registry::RegistryError;
use std::path::PathBuf;
use thiserror::Error;

/// An add-on that is not loaded. Each names the file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddonError {
    /// The file cannot be found or read.
    #[error("add-on {}: cannot be read: {reason}", file.display())]
    Unreadable {
        /// File or folder.
        file: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Somebody else could have written the file.
    #[error("add-on {}: not loaded, since {what} {reason}; {remedy}", file.display())]
    Untrusted {
        /// The file.
        file: PathBuf,
        /// `it`, `its folder` or `a folder above it`.
        what: &'static str,
        /// What was found.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// The system's loader refused the file.
    #[error("add-on {}: cannot be opened as a library: {reason}", file.display())]
    NotALibrary {
        /// The file.
        file: PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// The library has no entry.
    #[error("add-on {}: exports no function {symbol}; it is not an add-on of npuhal", file.display())]
    NoEntry {
        /// The file.
        file: PathBuf,
        /// The function's name.
        symbol: &'static str,
    },
    /// The entry returned nothing.
    #[error(
        "add-on {}: its entry returned no table: it does not want to run with this host, or it panicked", file.display()
    )]
    NoTable {
        /// The file.
        file: PathBuf,
    },
    /// The add-on was built for another version of the interface.
    #[error("add-on {}: built for version {found} of the add-on interface; this npuhal has version {wanted}; build it again", file.display())]
    Version {
        /// The file.
        file: PathBuf,
        /// Version of the add-on.
        found: u32,
        /// Version of the host.
        wanted: u32,
    },
    /// Something in the table is wrong.
    #[error("add-on {}: {field}: {reason}", file.display())]
    BadTable {
        /// The file.
        file: PathBuf,
        /// Where, e.g. `route 2, name`.
        field: String,
        /// Wanted and found.
        reason: String,
    },
    /// What it offers cannot be registered.
    #[error("add-on {}: {source}", file.display())]
    Refused {
        /// The file.
        file: PathBuf,
        /// Why.
        source: RegistryError,
    },
}
