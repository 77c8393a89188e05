//! The `amdxdna` kernel driver, spoken to directly: no XRT.
//!
//! Design choices, first:
//!
//! * **One trait below everything.** [`driver::Driver`] has one method for each operation of the kernel interface;
//!   [`kernel_driver::KernelDriver`] is the kernel. The virtual NPU implements the same trait, so the code above it is the
//!   same on a machine without the hardware.
//! * **Flush in user space, by line, only what changed.** Host caches are not coherent with the NPU.
//! * **Nothing trusts the past.** A packet is rebuilt before every submission; a context that timed out is lost for ever.

mod cache;
pub mod driver;
pub mod errno;
pub mod error;
pub mod format;
pub mod kernel_driver;
mod memory;
pub mod uapi;

pub use memory::host_pages;
