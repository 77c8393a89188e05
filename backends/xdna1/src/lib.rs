//! The lane of first-generation XDNA NPUs (Phoenix, Hawk Point): the host's side of its designs.
//!
//! Design choices, first:
//!
//! * **Layouts are data** ([`layout`]): who owns which rows, how large a block is, where a stream starts. Everything else is
//!   computed from them, and the tests compare the results with published sizes and digests.
//! * **A stream is a function of its block number** ([`stream`]): any run of blocks can be packed by itself, straight from the
//!   mapped package into memory the caller owns, on any number of threads.
//! * **Weights come through one trait** ([`weights::EngineWeights`]), so that streams do not know packages.
//!
//! * **Kits state what they are** ([`kit`]): a compiled design says for which layout, shape and arguments it was made, and is
//!   compared with all of it, and with its checksums, before anything is loaded.
//! * **Segments know level 1 only** ([`segment`]): they run on the NPU, on the virtual NPU, and on any device that keeps the
//!   rules. What the CPU does comes from the host ([`route`]).
//!
//! Layouts, streams and headers are those of the public repository `c8dhjp4tyv-bit/hawkpoint-npu-llm`. All data is
//! little-endian; bf16 is the upper half of binary32.

pub mod chunk;
pub mod dataflow;
pub mod error;
pub mod header;
pub mod kit;
pub mod layout;
pub mod placement;
pub mod route;
pub mod segment;
pub mod settings;
pub mod stream;
pub mod weights;

pub use error::LaneError;
pub use layout::EngineLayout;
pub use placement::{LayerPlacement, PlacementError};
pub use weights::{EngineWeights, Matrix, PackageWeights, Vector};

npuhal_registry::register_route!(route::Xdna1Route);
