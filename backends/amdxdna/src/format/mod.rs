//! File and code formats of the device: bounded parsers and writers.
//!
//! | Module | Format |
//! |---|---|
//! | [`txn`] | transaction control code, encodings 0.1 and 1.0 |
//! | [`elf`] | ELF32 container of control code: partial and full ELF |
//! | [`reloc`] | address patching of control code, and relocations from `DDR_PATCH` operations |
//! | [`xclbin`] | xclbin container with an AIE partition |
//! | [`pdi`], [`cdo`] | partition image and the configuration commands inside it |
//! | [`registers`] | register map of the array: addresses, buffer descriptors, channels, locks, stream switch |
//!
//! Every parser takes untrusted bytes: it does not panic, its allocations are bounded by the size of its input (or by
//! a named limit where data is compressed), and an error says where and what was found.

mod bytes;
pub mod cdo;
pub mod elf;
pub mod pdi;
pub mod registers;
pub mod reloc;
pub mod txn;
mod words;
pub mod xclbin;

pub use bytes::u32_at;
pub use words::Words;
