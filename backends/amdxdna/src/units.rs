//! The compute units of an xclbin.

use crate::program::Register;
use std::sync::Arc;

/// A compute unit.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    /// Kernel name.
    pub(crate) kernel: String,
    /// `kernel:instance`.
    pub(crate) name: String,
    /// Position in the context.
    pub(crate) index: u32,
    /// Declared arguments, in the order of their ids.
    pub(crate) args: Vec<UnitArg>,
    /// Its configuration.
    pub(crate) pdi: Arc<[u8]>,
}

/// A declared argument of a unit.
#[derive(Debug, Clone)]
pub(crate) struct UnitArg {
    pub(crate) name: String,
    pub(crate) is_pointer: bool,
    pub(crate) register: Register,
}

/// What a context of an xclbin is created from.
pub(crate) fn xclbin_boot(_image: &[u8], _cache: &Arc<crate::cache_of_programs::ProgramCache>) -> Result<crate::load::Boot, npuhal_core::DeviceError> {
    unimplemented!()
}
