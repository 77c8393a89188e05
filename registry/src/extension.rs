//! What add-ons may offer beside routes: subcommands of the program, and encoders.

use std::error::Error;
use std::io::{self, Write};
use thiserror::Error;

/// A subcommand or an encoder failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExtensionError {
    /// Its own reason: wanted, found, what to do.
    #[error("{0}")]
    Failed(String),
    /// The output cannot be written.
    #[error("writing the output: {0}")]
    Output(#[from] io::Error),
    /// Another error.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

/// A subcommand of the program.
pub trait Command: Send + Sync {
    /// Name: lower-case letters, digits and `-`.
    fn name(&self) -> &str;

    /// One line for people; may be empty.
    fn help(&self) -> &str {
        ""
    }

    /// Runs with the arguments behind its name; the result is the program's exit code. `output` is stdout.
    ///
    /// # Errors
    /// Whatever keeps it from its work.
    fn run(&self, arguments: &[String], output: &mut dyn Write) -> Result<u8, ExtensionError>;
}

/// Turns text into a vector.
pub trait Encoder: Send + Sync {
    /// Name, unique among the encoders of one origin.
    fn name(&self) -> &str;

    /// Elements of a vector.
    fn dims(&self) -> usize;

    /// The vector of `text`: [`Encoder::dims`] finite numbers.
    ///
    /// # Errors
    /// Whatever keeps it from its work.
    fn encode(&self, text: &str) -> Result<Vec<f32>, ExtensionError>;
}

/// A subcommand submitted by a linked crate; see [`crate::register_command`].
pub struct CommandEntry {
    /// The command.
    pub command: &'static dyn Command,
    /// Name of the submitting package; the host derives the origin from it.
    pub package: &'static str,
}

inventory::collect!(CommandEntry);

/// An encoder submitted by a linked crate; see [`crate::register_encoder`].
pub struct EncoderEntry {
    /// The encoder.
    pub encoder: &'static dyn Encoder,
    /// Name of the submitting package; the host derives the origin from it.
    pub package: &'static str,
}

inventory::collect!(EncoderEntry);

/// Submits a subcommand (a constant expression); as [`crate::register_route`].
#[macro_export]
macro_rules! register_command {
    ($command:expr) => {
        $crate::inventory::submit! {
            $crate::CommandEntry { command: &$command, package: ::core::env!("CARGO_PKG_NAME") }
        }
    };
}

/// Submits an encoder (a constant expression); as [`crate::register_route`].
#[macro_export]
macro_rules! register_encoder {
    ($encoder:expr) => {
        $crate::inventory::submit! {
            $crate::EncoderEntry { encoder: &$encoder, package: ::core::env!("CARGO_PKG_NAME") }
        }
    };
}
