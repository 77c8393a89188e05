//! Configuration images.

use super::KitError;
use crate::array::program::{ID_OFFSET, ID_TILE, ProgramDescription};
use npuhal_amdxdna::format::cdo::{Cdo, CommandKind};
use npuhal_amdxdna::format::pdi::minimal_image;
use npuhal_amdxdna::format::registers::{
    Bundle, MasterConfig, MasterMode, Register, RegisterError, ShimDemux, ShimMux, ShimRoute, Side, SlaveConfig,
    StreamPort, TileKind,
};

const CORE_ENABLE: u32 = 1;
const CORE_RESET: u32 = 2;
/// What stands for the core's program: the virtual array does not execute it.
const PROGRAM_WORDS: [u32; 4] = [0x0001_0001; 4];

/// The configuration commands that bind `program` to a partition of `columns` columns: core reset, program memory,
/// identification, routes of all shim channels, core enable.
///
/// # Errors
/// [`KitError::Register`].
pub fn configuration(columns: u8, program: &ProgramDescription) -> Result<Vec<CommandKind<'static>>, KitError> {
    let (column, row) = ID_TILE;
    let core = |register: Register| register.at(column, row).map(|address| u64::from(address.to_word()));
    let mut commands = vec![write(core(Register::CoreControl)?, CORE_RESET)];
    for column in 0..columns {
        commands.extend(shim_routes(column)?);
    }
    commands.push(CommandKind::DmaWrite {
        address: core(Register::ProgramMemory(0))?,
        data: PROGRAM_WORDS.to_vec().into(),
    });
    commands
        .push(CommandKind::DmaWrite { address: core(Register::DataMemory(ID_OFFSET))?, data: program.words().into() });
    commands.push(write(core(Register::Lock(0))?, 0));
    commands.push(CommandKind::MaskWrite {
        address: core(Register::CoreControl)?,
        mask: CORE_ENABLE | CORE_RESET,
        value: CORE_ENABLE,
        long_address: false,
    });
    Ok(commands)
}

/// An image with [`configuration`].
///
/// # Errors
/// [`KitError::Register`], [`KitError::Image`].
pub fn image(columns: u8, program: &ProgramDescription) -> Result<Vec<u8>, KitError> {
    Ok(minimal_image(&[Cdo::new(configuration(columns, program)?)])?)
}

/// Connects both channels of both directions with the stream switch, and the switch straight up and down.
fn shim_routes(column: u8) -> Result<Vec<CommandKind<'static>>, RegisterError> {
    let at = |register: Register| register.at(column, 0).map(|address| u64::from(address.to_word()));
    let (dma, none) = (ShimRoute::Dma, ShimRoute::Pl);
    let mux = ShimMux { south: [none, dma, none, dma] };
    let demux = ShimDemux { south: [dma, dma, none, none] };
    let mut commands =
        vec![write(at(Register::ShimMux)?, mux.encode()), write(at(Register::ShimDemux)?, demux.encode())];
    let port = |bundle, index, side| StreamPort { bundle, index }.port_index(TileKind::Shim, side);
    // Memory to stream: South3 and South7 to the north; stream to memory: from the north to South2 and South3.
    let routes = [
        (port(Bundle::South, 3, Side::Slave)?, port(Bundle::North, 0, Side::Master)?),
        (port(Bundle::South, 7, Side::Slave)?, port(Bundle::North, 1, Side::Master)?),
        (port(Bundle::North, 0, Side::Slave)?, port(Bundle::South, 2, Side::Master)?),
        (port(Bundle::North, 1, Side::Slave)?, port(Bundle::South, 3, Side::Master)?),
    ];
    for (slave, master) in routes {
        let config = SlaveConfig { enable: true, packet: false };
        commands.push(write(at(Register::SwitchSlave(slave))?, config.encode()));
        let config =
            MasterConfig { enable: true, drop_header: false, mode: MasterMode::Circuit { slave: slave.into() } };
        commands.push(write(at(Register::SwitchMaster(master))?, config.encode()?));
    }
    Ok(commands)
}

fn write(address: u64, value: u32) -> CommandKind<'static> {
    CommandKind::Write { address, value, long_address: false }
}
