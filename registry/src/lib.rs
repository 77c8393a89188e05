//! Routes, device factories and the choice between them.

pub mod span;

pub use span::{SegmentSpan, SpanError};
