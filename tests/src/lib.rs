//! Suites over backends: what each must show, written once, and what they run on.

pub mod conformance;
pub mod golden;
pub mod models;
