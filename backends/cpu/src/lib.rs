//! The CPU backend: an exact oracle, a fast path, and a level-1 device.
//!
//! Design choices, first:
//!
//! * **Two numerics.** `exact` ([`exact`]) computes in f64 over weights dequantized to f32 and is the oracle of every other
//!   path; `fast` is what people run.
//! * **A segment is any part of a model** ([`span::SegmentSpan`]): the CPU can lend a head or trailing layers to another
//!   device.
//! * **Batch invariance.** A row's result does not depend on the other rows of the call, nor on the number of threads.
//! * **A device like any other** ([`device`]): the host processor implements the level-1 traits with a few builtin kernels, so
//!   that the suite of these traits runs everywhere.

mod context;
pub mod device;
pub mod exact;
mod kernel;
pub mod route;
mod runlist;
pub mod span;

pub use device::{CpuDevice, Fault};

npuhal_registry::register_route!(route::CpuRoute);
npuhal_registry::register_factory!(route::CpuFactory);
