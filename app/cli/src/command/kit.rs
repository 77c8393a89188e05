//! `npuhal kit`: what the NPU side of a model needs.

use super::kit_import::{ImportArgs, import_design};
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
    /// Check a compiled xdna1 design against its layout and put it into a kit
    Import(ImportArgs),
}

pub(crate) fn kit(host: &Host, args: &KitArgs) -> Result<(), CliError> {
    match &args.kit {
        Kit::Import(args) => import_design(host, args),
    }
}
