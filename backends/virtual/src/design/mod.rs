//! Core programs of whole designs.

pub mod qwen3;
pub mod xdna1;
