//! Which part of a model a segment of this backend covers; shared with every other backend.

pub use npuhal_registry::span::{SegmentSpan, SpanError};
