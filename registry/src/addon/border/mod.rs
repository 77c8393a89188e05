//! The border to loaded libraries: the only unsafe code of this crate.
//!
//! Every function here that reads what a library handed over checks it first: null, size, alignment, count, UTF-8, range. What
//! cannot be checked is the library's word: that a pointer that is not null points at what it says.

#![allow(unsafe_code, reason = "calls into libraries and reads their tables")]

mod extension;
mod lent;
mod read;
mod route;
mod session;
mod sink;

use super::AddonError;
use extension::{LoadedCommand, LoadedEncoder};
use libloading::Library;
use npuhal_addon_abi as abi;
use read::{Fault, array, text};
use route::LoadedRoute;
use std::ffi::c_void;
use std::mem::{ManuallyDrop, size_of};
use std::path::Path;
use std::sync::Arc;

/// Entries of a list at most.
const MAX_ENTRIES: usize = 256;
/// Bytes of a name at most.
const MAX_NAME_BYTES: usize = 64;
/// Bytes of a line for people at most.
const MAX_LINE_BYTES: usize = 1024;

/// What a library offers.
pub(super) struct Contents {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) routes: Vec<LoadedRoute>,
    pub(super) commands: Vec<LoadedCommand>,
    pub(super) encoders: Vec<LoadedEncoder>,
    /// Option keys of all routes, each with its line for people.
    pub(super) options: Vec<(String, String)>,
}

/// Opens the library at `file`, which is trusted, and reads its table.
pub(super) fn open(file: &Path) -> Result<Contents, AddonError> {
    let named = || file.to_owned();
    // SAFETY: initializers of the library run here. The file has passed the check of its owner and permissions: it may do
    // whatever the user may.
    let library = unsafe { Library::new(file) }
        .map_err(|error| AddonError::NotALibrary { file: named(), reason: innermost(&error) })?;
    // Never unloaded: its functions and statics are used until the process ends.
    let library = ManuallyDrop::new(library);
    // SAFETY: the name of the symbol stands for this type in every version of the interface.
    let entry = unsafe { library.get::<abi::Entry>(abi::ENTRY_SYMBOL.as_bytes()) };
    let entry = entry.map_err(|_| AddonError::NoEntry { file: named(), symbol: abi::ENTRY_SYMBOL })?;
    // SAFETY: the interface's own call; the host's table lives as long as the process.
    let table = unsafe { entry(&raw const HOST_TABLE) };
    if table.is_null() {
        return Err(AddonError::NoTable { file: named() });
    }
    let bad = |fault: Fault| AddonError::BadTable { file: named(), field: fault.field, reason: fault.reason };
    if !table.is_aligned() {
        return Err(bad(Fault::new("table", "its address is not aligned")));
    }
    // SAFETY: not null and aligned; the first field is this in every version.
    let found = unsafe { (&raw const (*table).abi_version).read() };
    if found != abi::ABI_VERSION {
        return Err(AddonError::Version { file: named(), found, wanted: abi::ABI_VERSION });
    }
    // SAFETY: the second field is this in every version.
    let size_bytes = unsafe { (&raw const (*table).size_bytes).read() };
    read::size(size_bytes, size_of::<abi::AddonTable>(), "table").map_err(bad)?;
    // SAFETY: of this version and size; it lives as long as the process.
    read_table(unsafe { &*table }, &Arc::from(file)).map_err(bad)
}

fn read_table(table: &'static abi::AddonTable, file: &Arc<Path>) -> Result<Contents, Fault> {
    // SAFETY: for this and the reads below, the interface says that what the table points at lives as long as the process and is not
    // changed; null, alignment, counts and UTF-8 are checked by the readers.
    let (name, version) =
        unsafe { (text(table.name, MAX_NAME_BYTES, "name")?, text(table.version, MAX_NAME_BYTES, "version")?) };
    // SAFETY: as above.
    let routes = unsafe { array(table.routes, table.routes_len, MAX_ENTRIES, "routes")? };
    // SAFETY: as above.
    let commands = unsafe { array(table.commands, table.commands_len, MAX_ENTRIES, "commands")? };
    // SAFETY: as above.
    let encoders = unsafe { array(table.encoders, table.encoders_len, MAX_ENTRIES, "encoders")? };
    read::printable(&name, "name")?;
    if version.chars().any(char::is_control) {
        return Err(Fault::new("version", "it has control characters"));
    }
    let mut contents =
        Contents { name, version, routes: Vec::new(), commands: Vec::new(), encoders: Vec::new(), options: Vec::new() };
    for (index, route) in routes.iter().enumerate() {
        // SAFETY: as above.
        let (route, options) =
            unsafe { LoadedRoute::read(route, file) }.map_err(|fault| fault.within("route", index))?;
        contents.routes.push(route);
        contents.options.extend(options);
    }
    for (index, command) in commands.iter().enumerate() {
        // SAFETY: as above.
        let command = unsafe { LoadedCommand::read(command, file) }.map_err(|fault| fault.within("command", index))?;
        contents.commands.push(command);
    }
    for (index, encoder) in encoders.iter().enumerate() {
        // SAFETY: as above.
        let encoder = unsafe { LoadedEncoder::read(encoder, file) }.map_err(|fault| fault.within("encoder", index))?;
        contents.encoders.push(encoder);
    }
    Ok(contents)
}

static HOST_TABLE: abi::HostTable = abi::HostTable {
    abi_version: abi::ABI_VERSION,
    size_bytes: size_of::<abi::HostTable>() as u32,
    version: abi::Str::new(env!("CARGO_PKG_VERSION")),
    tensor: Some(lent::tensor),
};

/// The last of a chain of errors: what the system said.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// A state of the library's own and the file it belongs to, for messages.
#[derive(Clone)]
struct Owner {
    file: Arc<Path>,
    /// E.g. `route 'echo'`.
    what: String,
}

impl Owner {
    fn new(file: &Arc<Path>, kind: &str, name: &str) -> Self {
        Self { file: Arc::clone(file), what: format!("{kind} '{name}'") }
    }

    /// A sentence about a failure, with the file in it.
    fn failure(&self, call: &str, reason: &str) -> String {
        format!("{call} of {} of the add-on {} failed: {reason}", self.what, self.file.display())
    }
}

/// The library's own state: passed back to it and never read here.
#[derive(Clone, Copy)]
struct State(*mut c_void);

// SAFETY: the pointer is only handed back to the library, which says by the interface that it can be on any thread.
unsafe impl Send for State {}
// SAFETY: as for Send; where the interface allows one thread at a time, the owner is borrowed mutably.
unsafe impl Sync for State {}
