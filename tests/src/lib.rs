//! Suites over backends: what each must show, written once, and what they run on.

pub mod conformance;
pub mod golden;
pub mod models;
//! Suites over backends, and the kit they are made of.
//!
//! The kit is a second reading of every published format and formula it touches: it shares no numeric code with the crates
//! that it tests. Nothing here is part of the program.
pub mod kit;
