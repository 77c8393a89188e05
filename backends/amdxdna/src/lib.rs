//! AMD XDNA NPUs through the Linux `amdxdna` driver, without any vendor runtime.
//!
//! [`format`](mod@format) reads and writes what such a device executes: control code, its containers, and partition
//! images. It needs no device and does no I/O: bytes in, bytes out.

pub mod format;
