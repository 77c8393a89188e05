//! The CPU backend: an exact oracle, a fast path, and a level-1 device.
//!
//! Design choices, first:
//!
//! * **Two numerics.** `exact` ([`exact`]) computes in f64 over weights dequantized to f32 and is the oracle of every other
//!   path; `fast` is what people run.
//! * **A segment is any part of a model** ([`span::SegmentSpan`]): the CPU can lend a head or trailing layers to another
//!   device.
//! * **Batch invariance.** A row's result does not depend on the other rows of the call, nor on the number of threads.

pub mod exact;
pub mod span;
