//! Add-ons that are libraries opened at run time.
//!
//! An add-on is named by its file. The file is trusted by its owner and its permissions, hashed, opened, asked for its table
//! ([`npuhal_addon_abi`]), and what the table offers is checked and registered: all of it or nothing. A library is never
//! unloaded, so that a function of it can be called as long as the process lives.
//!
//! An add-on runs in this process: a crash inside it ends the process. What can be checked is checked: pointers that must not
//! be null, lengths, UTF-8, indices, token ids, numbers that are not finite.

mod border;
mod error;
mod sources;
mod trust;

pub use error::AddonError;
pub use sources::AddonSources;

use crate::extension::{Command, Encoder};
use crate::registry::{Origin, Registry, RegistryError};
use crate::route::Route;
use border::Contents;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An add-on that was to be loaded, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddonReport {
    /// The library; without symbolic links where it was found.
    pub file: PathBuf,
    /// SHA-256 of the file in hexadecimal digits, where it could be read.
    pub sha256: Option<String>,
    /// The add-on's own name; empty where it was not loaded.
    pub name: String,
    /// The add-on's own version; empty where it was not loaded.
    pub version: String,
    /// Routes it registered.
    pub routes: Vec<String>,
    /// Subcommands it registered, each with its line for people.
    pub commands: Vec<(String, String)>,
    /// Encoders it registered, each with the elements of its vectors.
    pub encoders: Vec<(String, usize)>,
    /// Options of its routes, each with its line for people.
    pub options: Vec<(String, String)>,
    /// Why it is not loaded.
    pub error: Option<AddonError>,
}

/// Loads `file` as add-on number `order`; returns a registry with it, or none.
pub(crate) fn load(registry: &Registry, file: &Path, order: usize) -> (AddonReport, Option<Registry>) {
    let mut report = AddonReport {
        file: file.to_owned(),
        sha256: None,
        name: String::new(),
        version: String::new(),
        routes: Vec::new(),
        commands: Vec::new(),
        encoders: Vec::new(),
        options: Vec::new(),
        error: None,
    };
    match open(&mut report).and_then(|contents| register(registry, contents, order, &mut report)) {
        Ok(registry) => (report, Some(registry)),
        Err(error) => {
            report.error = Some(error);
            (report, None)
        }
    }
}

fn open(report: &mut AddonReport) -> Result<Contents, AddonError> {
    report.file = trust::canonical(&report.file)?;
    trust::check(&report.file)?;
    report.sha256 = Some(trust::sha256(&report.file)?);
    border::open(&report.file)
}

fn register(
    registry: &Registry,
    contents: Contents,
    order: usize,
    report: &mut AddonReport,
) -> Result<Registry, AddonError> {
    let mut registry = registry.clone();
    let file = report.file.clone();
    let origin = Origin::LoadedAddOn { order, file: file.clone() };
    let refused = |source: RegistryError| AddonError::Refused { file: file.clone(), source };
    let Contents { name, version, routes, commands, encoders, options } = contents;
    let routes_names = routes.iter().map(|route| route.name().to_owned()).collect();
    let command_names = commands.iter().map(|command| (command.name().to_owned(), command.help().to_owned())).collect();
    let encoder_names = encoders.iter().map(|encoder| (encoder.name().to_owned(), encoder.dims())).collect();
    for route in routes {
        registry.add_route(Arc::new(route), origin.clone(), &name).map_err(refused)?;
    }
    for command in commands {
        registry.add_command(Arc::new(command), origin.clone(), &name).map_err(refused)?;
    }
    for encoder in encoders {
        registry.add_encoder(Arc::new(encoder), origin.clone(), &name).map_err(refused)?;
    }
    report.name = name;
    report.version = version;
    report.routes = routes_names;
    report.commands = command_names;
    report.encoders = encoder_names;
    report.options = options;
    Ok(registry)
}
