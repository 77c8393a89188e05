//! Subcommands and encoders of a library.

use super::read::{self, Fault, function, line, printable, text};
use super::sink::{Collector, Forwarder};
use super::{MAX_LINE_BYTES, MAX_NAME_BYTES, Owner, State};
use crate::extension::{Command, Encoder, ExtensionError};
use npuhal_addon_abi as abi;
use std::ffi::c_void;
use std::io::Write;
use std::mem::size_of;
use std::path::Path;
use std::sync::Arc;

/// Elements of a vector at most.
const MAX_DIMS: u32 = 1 << 20;

type RunFunction =
    unsafe extern "C" fn(*mut c_void, *const abi::Str, usize, abi::TextSink, abi::TextSink, *mut i32) -> i32;
type EncodeFunction = unsafe extern "C" fn(*mut c_void, abi::Str, *mut f32, usize, abi::TextSink) -> i32;

/// A subcommand of a library.
pub(in crate::addon) struct LoadedCommand {
    name: String,
    help: String,
    owner: Owner,
    state: State,
    run: RunFunction,
}

impl LoadedCommand {
    /// Checks and copies `table`.
    ///
    /// # Safety
    /// What the table points at is as the interface says, as long as the process lives.
    pub(super) unsafe fn read(table: &abi::CommandTable, file: &Arc<Path>) -> Result<Self, Fault> {
        read::size(table.size_bytes, size_of::<abi::CommandTable>(), "size")?;
        // SAFETY: the caller's promise.
        let (name, help) =
            unsafe { (text(table.name, MAX_NAME_BYTES, "name")?, text(table.help, MAX_LINE_BYTES, "help")?) };
        let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !name.starts_with(|first: char| first.is_ascii_lowercase()) || !name.bytes().all(is_word) {
            let reason = format!("{name:?} is no command; wanted a lower-case letter, then letters, digits and '-'");
            return Err(Fault::new("name", reason));
        }
        line(&help, "help")?;
        Ok(Self {
            owner: Owner::new(file, "command", &name),
            name,
            help,
            state: State(table.state),
            run: function(table.run, "run")?,
        })
    }
}

impl Command for LoadedCommand {
    fn name(&self) -> &str {
        &self.name
    }

    fn help(&self) -> &str {
        &self.help
    }

    fn run(&self, arguments: &[String], output: &mut dyn Write) -> Result<u8, ExtensionError> {
        let arguments: Vec<abi::Str> = arguments.iter().map(|argument| abi::Str::new(argument)).collect();
        let (mut forwarder, mut error, mut code) = (Forwarder::new(output), Collector::default(), 0);
        // SAFETY: the library's own function and state; all pointers are valid for the call.
        let status = unsafe {
            (self.run)(self.state.0, arguments.as_ptr(), arguments.len(), forwarder.sink(), error.sink(), &raw mut code)
        };
        forwarder.result?;
        if status != abi::status::OK {
            return Err(ExtensionError::Failed(self.owner.failure("the run", &error.reason())));
        }
        u8::try_from(code).map_err(|_| {
            ExtensionError::Failed(self.owner.failure("the run", &format!("exit code {code}; wanted 0 to 255")))
        })
    }
}

/// An encoder of a library.
pub(in crate::addon) struct LoadedEncoder {
    name: String,
    dims: usize,
    owner: Owner,
    state: State,
    encode: EncodeFunction,
}

impl LoadedEncoder {
    /// Checks and copies `table`.
    ///
    /// # Safety
    /// What the table points at is as the interface says, as long as the process lives.
    pub(super) unsafe fn read(table: &abi::EncoderTable, file: &Arc<Path>) -> Result<Self, Fault> {
        read::size(table.size_bytes, size_of::<abi::EncoderTable>(), "size")?;
        // SAFETY: the caller's promise.
        let name = unsafe { text(table.name, MAX_NAME_BYTES, "name")? };
        printable(&name, "name")?;
        if !(1..=MAX_DIMS).contains(&table.dims) {
            return Err(Fault::new("dims", format!("{}; wanted 1 to {MAX_DIMS}", table.dims)));
        }
        Ok(Self {
            owner: Owner::new(file, "encoder", &name),
            name,
            dims: table.dims as usize,
            state: State(table.state),
            encode: function(table.encode, "encode")?,
        })
    }
}

impl Encoder for LoadedEncoder {
    fn name(&self) -> &str {
        &self.name
    }

    fn dims(&self) -> usize {
        self.dims
    }

    fn encode(&self, text: &str) -> Result<Vec<f32>, ExtensionError> {
        // What the library leaves out stays no number, and is found.
        let mut vector = vec![f32::NAN; self.dims];
        let mut error = Collector::default();
        // SAFETY: the library's own function and state; all pointers are valid for the call.
        let status =
            unsafe { (self.encode)(self.state.0, abi::Str::new(text), vector.as_mut_ptr(), self.dims, error.sink()) };
        let failed = |reason: &str| ExtensionError::Failed(self.owner.failure("the encoding", reason));
        if status != abi::status::OK {
            return Err(failed(&error.reason()));
        }
        match vector.iter().position(|element| !element.is_finite()) {
            None => Ok(vector),
            Some(index) => {
                Err(failed(&format!("element {index} of {} is {}; wanted finite numbers", self.dims, vector[index])))
            }
        }
    }
}
