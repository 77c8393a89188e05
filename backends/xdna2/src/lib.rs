//! stub

pub mod argmax;
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
mod words;
