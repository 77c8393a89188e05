//! Converted model packages of the xdna1 lane: a directory of plain little-endian arrays with `metadata.json`, as the published
//! runtime for first-generation XDNA NPUs defines it (`xdna1-smollm2-w8a16-v1`, `xdna1-qwen2-w8a16-v1`).
//!
//! * [`convert()`] makes one from a Hugging Face directory or a GGUF file: row by row, on several threads, with bounded memory.
//!   It works in a directory beside the target, hashes everything again from the disk, and only then takes the target's place.
//! * [`Package::open`] checks size and SHA-256 of every file before it maps one.
//! * [`scan()`] lists the packages of a folder; a damaged one is skipped with a warning.
//!
//! Matrices are output features × input features in the row order of Hugging Face checkpoints: a head's rotated pairs are
//! elements `i` and `i + 32`. A GGUF file of architecture `llama` stores query and key rows permuted for interleaved pairs; they
//! are put back.

mod convert;
mod error;
mod identity;
mod load;
mod metadata;
mod model;
mod plan;
mod publish;
mod scan;
mod shape;
mod source;
mod text;
mod write;

pub use convert::{ConvertPhase, ConvertProgress, ConvertRequest, Converted, convert};
pub use error::PackageError;
pub use identity::Identity;
pub use load::{OpenOptions, Package, Quantized};
pub use metadata::{METADATA_FILE, Metadata, QuantizedEntry, RawEntry, TensorEntry};
pub use plan::{LayerArray, layer_array};
pub use scan::{Scan, Scanned, Skipped, look, scan};
pub use shape::{CONTEXT_POSITIONS, Family, HEAD_DIM, PUBLISHED, Published, Shape};
pub use write::quantize_row;

use std::path::Path;

/// Whether `path` is a directory with a package's `metadata.json`.
#[must_use]
pub fn is_package(path: &Path) -> bool {
    path.join(METADATA_FILE).is_file()
}
