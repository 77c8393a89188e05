//! Core programs of whole designs.

pub mod qwen3;
