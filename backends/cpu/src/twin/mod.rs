//! CPU twins of the NPU lanes: the same models in the arithmetic of a lane's kernels.
//!
//! A twin rounds where its lane rounds, so that a lane's results can be compared without its hardware. What a CPU computes in a
//! lane's numerics is never counted as the NPU's work.

mod error;
mod lanes;
mod rounding;
mod tensors;
mod xdna1;
mod xdna2;

pub use error::TwinError;
pub use xdna1::{Lane, TwinOptions, TwinSegment, Xdna1, check_config};
pub use xdna2::{CONTEXT_POSITIONS as XDNA2_POSITIONS, Xdna2, Xdna2Options, Xdna2Segment, check_model as check_xdna2};
