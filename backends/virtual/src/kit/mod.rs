//! Kits: what a model package carries for the NPU, for the programs of this crate.

/// Core program `copy`: each input stream to the output stream of the same column and channel.
pub const COPY: u32 = 1;
/// Core program `vector-scale`: 32-bit integers times a factor.
pub const VECTOR_SCALE: u32 = 2;
