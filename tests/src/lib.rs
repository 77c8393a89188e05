//! Suites over backends, the kit they are made of, and the real models some of them run on.
//!
//! The kit is a second reading of every published format and formula it touches: it shares no numeric code with the crates
//! that it tests. Nothing here is part of the program.

pub mod conformance;
pub mod golden;
pub mod kit;
pub mod models;
pub mod parity;
pub mod process;
pub mod served;
