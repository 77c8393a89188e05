//! What a model is, independent of where it runs: files as mapped tensors, configuration, tokenizer, chat template,
//! sampling, stop strings, the generation loop, the catalogue and its downloads.
//!
//! Design choices, first:
//!
//! * A model file is mapped, never read whole; a [`tensor::Tensor`] is a typed range of the mapping and keeps it alive.
//! * Readers check before they trust: counts, offsets and sizes are bounded by the file's length before anything is
//!   allocated, and an error names file, field, wanted and found.
//! * Tensors have canonical roles ([`source::TensorRole`]), so that a backend does not know file formats.
//! * There is one generation loop ([`generate`]); CLI, server, bench and parity all use it.
//! * Control tokens come from the chat template only; message text is encoded as plain text.

pub mod config;
pub mod error;
pub mod gguf;
pub mod map;
pub mod quant;
pub mod source;
pub mod summary;
pub mod tensor;
pub mod vocabulary;

pub use config::ModelConfig;
pub use error::ModelError;
pub use source::{ModelSource, TensorRole};
pub use tensor::{Tensor, WeightType};
