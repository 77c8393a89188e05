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

pub mod batch;
mod cached;
pub mod catalogue;
mod clip;
pub mod config;
pub mod detokenizer;
pub mod error;
pub mod generate;
pub mod gguf;
mod hexadecimal;
pub mod hub_model;
pub mod hub_text;
mod json_keys;
pub mod logprobs;
pub mod map;
pub mod package;
pub mod pcg;
pub mod perplexity;
pub mod prefix;
pub mod prompter;
pub mod pull;
pub mod q4nx;
pub mod quant;
mod roles;
pub mod safetensors;
pub mod sampling;
pub mod sequence;
pub mod source;
pub mod speculate;
pub mod staging;
pub mod stats;
pub mod stop;
pub mod store;
pub mod summary;
pub mod template;
pub mod tensor;
pub mod text_error;
pub mod text_rules;
pub mod thinking;
pub mod tokenizer;
pub mod vocabulary;
pub mod window;

pub use catalogue::Catalogue;
pub use config::ModelConfig;
pub use detokenizer::StreamDetokenizer;
pub use error::ModelError;
pub use hexadecimal::hexadecimal;
pub use source::{ModelSource, TensorRole};
pub use store::Store;
pub use template::{ChatInput, ChatMessage, ChatTemplate, encode_chat};
pub use tensor::{Tensor, WeightType};
pub use text_error::TextError;
pub use tokenizer::{ControlTokens, Specials, Tokenizer};
pub use vocabulary::Vocabulary;
