//! The compute units of an xclbin.

use crate::cache_of_programs::ProgramCache;
use crate::format::xclbin::{AddressQualifier, Design, KernelArgument};
use crate::load::Boot;
use crate::packet::COMMAND_BYTES;
use crate::program::Register;
use crate::uapi::CONFIG_CU_MAX_UNITS;
use npuhal_core::DeviceError;
use std::sync::Arc;

/// Most bytes of a register map: what a packet holds behind its header and one mask word.
const MAX_REGISTER_MAP_BYTES: usize = COMMAND_BYTES as usize - 8;

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
pub(crate) fn xclbin_boot(image: &[u8], cache: &Arc<ProgramCache>) -> Result<Boot, DeviceError> {
    let design = Design::parse(image).map_err(|error| bad_xclbin(error.to_string()))?;
    let units = design.compute_units.iter().map(|unit| {
        let kernel = design.kernel(unit).ok_or_else(|| bad_xclbin("a compute unit without a kernel".to_owned()))?;
        let pdi = design.image(unit).ok_or_else(|| bad_xclbin(format!("kernel {} has no PDI", kernel.name)))?;
        Ok(Unit {
            kernel: kernel.name.clone(),
            name: format!("{}:{}", kernel.name, unit.instance),
            index: unit.index,
            args: unit_args(&kernel.arguments)?,
            pdi: pdi.into(),
        })
    });
    let units = units.collect::<Result<Vec<_>, DeviceError>>()?;
    if units.is_empty() || units.len() > CONFIG_CU_MAX_UNITS {
        return Err(bad_xclbin(format!("wanted 1 to {CONFIG_CU_MAX_UNITS} compute units, found {}", units.len())));
    }
    let partition = &design.partition;
    Ok(Boot::units(u32::from(partition.column_width), partition.ops_per_cycle, units, cache))
}

/// The declared arguments by id: those of a kernel that runs control code follow each other without a gap.
fn unit_args(declared: &[KernelArgument]) -> Result<Vec<UnitArg>, DeviceError> {
    let mut declared: Vec<&KernelArgument> = declared.iter().collect();
    declared.sort_by_key(|argument| argument.id);
    let arg = |(position, argument): (usize, &KernelArgument)| {
        if argument.id as usize != position {
            return Err(bad_xclbin(format!("argument {} has id {}, wanted {position}", argument.name, argument.id)));
        }
        let register = Register { at_bytes: argument.offset_bytes as usize, len_bytes: argument.size_bytes as usize };
        if !matches!(register.len_bytes, 4 | 8) || register.at_bytes + register.len_bytes > MAX_REGISTER_MAP_BYTES {
            return Err(bad_xclbin(format!(
                "argument {} takes {} bytes at {}; wanted 4 or 8 bytes within {MAX_REGISTER_MAP_BYTES}",
                argument.name, register.len_bytes, register.at_bytes
            )));
        }
        let is_pointer = argument.qualifier == AddressQualifier::Global;
        Ok(UnitArg { name: argument.name.clone(), is_pointer, register })
    };
    declared.into_iter().enumerate().map(arg).collect()
}

fn bad_xclbin(reason: String) -> DeviceError {
    DeviceError::BadProgram { program: "xclbin".to_owned(), reason }
}
