//! What suites are made of: small models, an independent reference, devices that do nothing.

pub mod dequantize;
pub mod devices;
pub mod gguf;
pub mod hub;
pub mod kernels;
pub mod model;
pub mod package;
pub mod random;
pub mod reference;
pub mod scripted;
