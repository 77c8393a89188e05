//! Vocabulary and traits of npuhal.
//!
//! Design choices, first:
//!
//! * **Two levels.** Level 1 ([`device`]) is the hardware: buffers, contexts, kernels, runlists, submissions. Level 2
//!   ([`stage`]) is the model: consecutive layers on one device ([`stage::Segment`]), chained into a
//!   [`stage::Stepper`]. A lane is level 2 written on top of level 1.
//! * **Everything is rows.** Prefill, decode, batching and speculation are all [`stage::Row`]s of one `forward` call.
//!   For fixed numerics and processor a row's result does not depend on the other rows of the call.
//! * **Blocking below, async above.** Contexts, segments and steppers are plain blocking code on one owner thread. The only
//!   async method here is [`device::Submission::completed`], for hosts that wait on many devices.
//! * **Errors are data.** Every error names what was wanted, what was found and what to do. A context that was lost stays
//!   lost; weights and KV caches live in buffers, which outlive contexts.
//! * **No opinion on backends.** This crate links nothing: no driver, no file format, no kernel.

pub mod card;
pub mod device;
pub mod dtype;
pub mod error;
pub mod file;
mod oneshot;
pub mod pipeline;
pub mod stage;

pub use card::{Claim, DeviceCard, Generation};
pub use error::{DeviceError, RunError};
