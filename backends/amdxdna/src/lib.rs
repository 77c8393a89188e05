//! AMD XDNA NPUs through the Linux `amdxdna` driver, spoken to directly: no XRT.
//!
//! Design choices, first:
//!
//! * **One trait below everything.** [`driver::Driver`] has one method for each operation of the kernel interface;
//!   [`kernel_driver::KernelDriver`] is the kernel. The virtual NPU implements the same trait, so the code above it is the
//!   same on a machine without the hardware.
//! * **Flush in user space, by line, only what changed.** Host caches are not coherent with the NPU.
//! * **Nothing trusts the past.** A packet is rebuilt before every submission; a context that timed out is lost for ever.
//! * **Code in device memory belongs to runs**, not to kernels: a list that goes on to the next context length rewrites the
//!   words that differ, and needs no more device memory than before.

mod budget;
mod cache;
mod cache_of_programs;
mod context;
mod device;
pub mod discovery;
pub mod driver;
pub mod errno;
pub mod error;
pub mod firmware;
pub mod format;
mod heap;
pub mod kernel_driver;
mod load;
mod memory;
mod memory_object;
pub mod packet;
mod patch;
mod program;
mod run;
mod runlist;
mod session;
pub mod silicon;
mod submission;
pub mod uapi;
mod units;

pub use context::{NpuContext, NpuKernel};
pub use device::{NpuDevice, NpuIdentity, NpuUsage};
pub use memory::host_pages;
pub use runlist::NpuRunlist;
pub use submission::NpuSubmission;
