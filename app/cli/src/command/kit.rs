//! `npuhal kit`: what the NPU side of a model needs.

use super::kit_import::{ImportArgs, import_design};
use super::kit_xdna1::{Xdna1Args, xdna1};
use crate::Host;
use crate::error::CliError;
use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub(crate) struct KitArgs {
    #[command(subcommand)]
    kit: Kit,
}

#[derive(Debug, Subcommand)]
enum Kit {
    /// Write the designs of the virtual NPU (npu1) for an xdna1 package: xclbin and instruction files, kit.json. They do
    /// nothing on hardware
    Xdna1(Xdna1Args),
    /// Check a compiled xdna1 design against its layout and put it into a kit
    Import(ImportArgs),
}

pub(crate) fn kit(host: &Host, args: &KitArgs) -> Result<(), CliError> {
    match &args.kit {
        Kit::Xdna1(args) => xdna1(host, args),
        Kit::Import(args) => import_design(host, args),
    }
}
