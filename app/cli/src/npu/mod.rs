//! The NPUs of the program: device factories over the kernel driver and over the virtual NPU.
//!
//! They live here because the two backend crates know nothing of the registry: the arrows of the house run the other way.

mod hardware;
#[cfg(test)]
mod matrix;
mod twin;

pub(crate) use hardware::{blocking_findings, enumerate_unserved};
pub(crate) use twin::virtual_device;

use hardware::AmdxdnaFactory;
use twin::VirtualFactory;

npuhal_registry::register_factory!(AmdxdnaFactory { root: None });
npuhal_registry::register_factory!(VirtualFactory);
