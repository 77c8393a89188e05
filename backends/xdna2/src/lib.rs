//! The full-ELF lane for AIE2P NPUs: one kernel for a whole decoder layer, one for the head, one runlist a token.
//!
//! Design choices, first:
//!
//! * **Kernels are data.** The layer kernel is known by its instruction ELF files for contexts of 1, 2 and 17; every other
//!   length follows by two rules ([`context_rules`], [`context_map`]). A file that follows neither is refused with its word.
//! * **No xclbin.** [`full_elf`] puts partition image, code and relocations into one file, which a context boots from. The image
//!   is loaded once a context: the files of the kernels carry an empty one and do not name it.
//! * **A context length costs words, not files.** [`layer_images`] assembles once and exchanges the words that differ;
//!   [`layer_images::LayerImages::changes`] names them, for whoever patches device memory.
//! * **Nothing is trusted because it parses.** [`kernels`] compares what the code moves with what the model has, argument by
//!   argument, and no transfer may leave its buffer.
//! * **Level 1 only.** The [`lane`] is written on [`npuhal_core::device`]: it runs on the NPU, and on any device that keeps these
//!   rules.
//!
//! | Module | Job |
//! |---|---|
//! | [`instruction_elf`] | reading what the assembler wrote |
//! | [`context_rules`], [`context_map`] | how words follow the context length; files for any length |
//! | [`full_elf`], [`layer_images`] | assembling full ELF files, once and by exchanged words |
//! | [`dimensions`] | shapes the lane takes, and why it declines others |
//! | [`packing`] | contents and sizes of the buffers: tile order, norms, rotations |
//! | [`kv`] | regions of the KV cache |
//! | [`kernels`] | kernel files against a model |
//! | [`lane`] | the model as a segment |
//! | [`source`] | a Q4NX directory as the lane reads it |
//! | [`route`] | where the lane serves, and why it declines |
//!
//! What is inferred and not stated by anything published stands in a function of its own that says so: the regions of the KV
//! cache ([`kv`]; the kernels of the virtual NPU, `npuhal-virtual`'s `kit/qwen3.rs`, follow the same inference and so cannot confirm
//! it), the coverage of the head's weights ([`kernels`]).

pub mod context_map;
pub mod context_rules;
pub mod dimensions;
pub mod full_elf;
pub mod instruction_elf;
pub mod kernels;
pub mod kv;
pub mod lane;
pub mod layer_images;
pub mod md5;
pub mod packing;
pub mod route;
pub mod source;
mod words;

npuhal_registry::register_route!(route::LaneRoute);
