//! Subcommands and encoders as tables.

use super::{borrow, guarded, write};
use npuhal_addon_abi as abi;
use npuhal_registry::{Command, Encoder};
use std::ffi::c_void;
use std::io::{self, Write};
use std::mem::size_of;

/// The table of `command`; it and its texts are leaked.
pub(super) fn command_table(command: &'static dyn Command) -> abi::CommandTable {
    abi::CommandTable {
        size_bytes: size_of::<abi::CommandTable>() as u32,
        reserved: 0,
        name: abi::Str::new(command.name().to_owned().leak()),
        help: abi::Str::new(command.help().to_owned().leak()),
        state: std::ptr::from_mut(Box::leak(Box::new(command))).cast::<c_void>(),
        run: Some(run),
    }
}

/// The table of `encoder`; it and its texts are leaked.
pub(super) fn encoder_table(encoder: &'static dyn Encoder) -> abi::EncoderTable {
    abi::EncoderTable {
        size_bytes: size_of::<abi::EncoderTable>() as u32,
        // An impossible width is refused by the host.
        dims: u32::try_from(encoder.dims()).unwrap_or(u32::MAX),
        name: abi::Str::new(encoder.name().to_owned().leak()),
        state: std::ptr::from_mut(Box::leak(Box::new(encoder))).cast::<c_void>(),
        encode: Some(encode),
    }
}

/// Output that goes to the host piece by piece.
struct Output(abi::TextSink);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(write) = self.0.write {
            // SAFETY: the host's own function and state, during the call it was passed to.
            unsafe { write(self.0.state, abi::Str { data: bytes.as_ptr(), len: bytes.len() }) };
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

unsafe extern "C" fn run(
    state: *mut c_void,
    arguments: *const abi::Str,
    arguments_len: usize,
    output: abi::TextSink,
    error: abi::TextSink,
    code: *mut i32,
) -> i32 {
    // SAFETY: the host passes the state of the table and lists that are valid during the call.
    let (command, arguments) =
        unsafe { (*state.cast::<&'static dyn Command>(), borrow::list(arguments, arguments_len)) };
    // SAFETY: as above.
    let arguments: Vec<String> = arguments.iter().map(|&argument| unsafe { borrow::text(argument) }).collect();
    match guarded(|| command.run(&arguments, &mut Output(output)).map_err(|error| error.to_string())) {
        Ok(Ok(exit)) => {
            // SAFETY: as above.
            unsafe { code.write(i32::from(exit)) };
            abi::status::OK
        }
        Ok(Err(reason)) => {
            write(error, &reason);
            abi::status::FAILED
        }
        Err(panic) => {
            write(error, &panic);
            abi::status::PANICKED
        }
    }
}

unsafe extern "C" fn encode(
    state: *mut c_void,
    text: abi::Str,
    vector: *mut f32,
    dims: usize,
    error: abi::TextSink,
) -> i32 {
    // SAFETY: the host passes the state of the table and text that is valid during the call.
    let (encoder, text) = unsafe { (*state.cast::<&'static dyn Encoder>(), borrow::text(text)) };
    match guarded(|| encoder.encode(&text).map_err(|error| error.to_string())) {
        Ok(Ok(made)) if made.len() == dims => {
            // SAFETY: the host's buffer has room for `dims` numbers.
            unsafe { std::ptr::copy_nonoverlapping(made.as_ptr(), vector, dims) };
            abi::status::OK
        }
        Ok(Ok(made)) => {
            write(error, &format!("a vector of {} elements; wanted {dims}", made.len()));
            abi::status::FAILED
        }
        Ok(Err(reason)) => {
            write(error, &reason);
            abi::status::FAILED
        }
        Err(panic) => {
            write(error, &panic);
            abi::status::PANICKED
        }
    }
}
