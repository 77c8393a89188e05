//! The CPU backend: an exact oracle, a fast path, and a level-1 device.
//!
//! Design choices, first:
//!
//! * **Three numerics, and twins.** `exact` ([`exact`]) computes in f64 over weights dequantized to f32 and is the oracle of every
//!   other path; `fast` ([`fast`]) is what people run, `int8` the same with coarser inputs of products; the twins ([`twin`]) round where an NPU lane rounds.
//! * **A segment is any part of a model** ([`npuhal_registry::SegmentSpan`]): the CPU can lend a head or trailing layers to
//!   another device.
//! * **Batch invariance.** A row's result does not depend on the other rows of the call, nor on the number of threads.
//! * **A device like any other** ([`device`]): the host processor implements the level-1 traits with a few builtin kernels, so
//!   that the suite of these traits runs everywhere.
//!
//! Of the `fast` and `int8` numerics:
//!
//! * Weights are repacked once, at load, into groups of eight rows whose codes lie in the order in which the kernels read
//!   them; no weight is requantized. See [`packed`].
//! * Activations are quantized to 15 bits (`int8`: 8 bits) per 32 elements ([`activations`]). The sum over 32 elements is an exact integer;
//!   an output element is then one chain of f32 multiply-adds over the blocks in ascending order. GEMV and GEMM do the same
//!   operations in the same order for an element, so its bits do not depend on batch size, chunk border or thread count.
//! * Kernels are chosen once, by [`features::Features`], as a table of function pointers; nothing is dispatched inside a
//!   row loop. The portable kernels give the same bits for every quantized weight type.
//! * The KV cache is f16 and grows in pages of 256 positions; attention works on these pages, whatever the thread count.

pub mod activations;
pub mod attention;
pub mod config;
mod context;
pub mod device;
pub mod elementwise;
pub mod error;
pub mod exact;
pub mod fast;
pub mod features;
pub mod gemm;
pub mod gemv;
mod kernel;
pub mod kv;
pub mod layered;
pub mod limits;
pub mod memory;
pub mod packed;
pub mod pool;
pub mod route;
mod runlist;
mod shares;
pub mod span;
pub mod table;
pub mod twin;
#[cfg(target_arch = "x86_64")]
mod vnni;

pub use config::ConfigError;
pub use device::{CpuDevice, Fault};
pub use error::CpuError;

npuhal_registry::register_route!(route::CpuRoute);
npuhal_registry::register_factory!(route::CpuFactory);
