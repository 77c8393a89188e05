//! AMD XDNA NPUs through the Linux `amdxdna` driver.
pub mod format;
