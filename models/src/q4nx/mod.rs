//! Q4NX model directories: read, made from GGUF files, and held against them.
//!
//! A directory has `model.q4nx` ([`container`]), `config.json` ([`config`]) and `tokenizer.json` ([`tokenizer`]); kernels of an
//! NPU lie in `npu/`, if at all. Embedding, norms and biases are bf16 rows; all other matrices are tiles ([`tile`]) that an NPU
//! takes as they are. A directory that this program has packed carries a stamp ([`stamp`]); any other is trusted as published.

pub mod cache;
pub mod config;
pub mod container;
pub mod convert;
pub mod directory;
pub mod error;
pub mod guard;
pub mod layout;
pub mod names;
pub mod pack;
pub mod stamp;
pub mod tile;
pub mod tiled;
pub mod tokenizer;
pub mod verify;

pub use container::Q4nxFile;
pub use error::PackError;
pub use pack::{PackOptions, PackProgress, PackReport, pack};
pub use tile::{Q8Layout, TileKind};
pub use tiled::TiledTensor;
