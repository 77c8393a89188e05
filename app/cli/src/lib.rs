//! The npuhal program as a library, for programs of your own with add-ons linked in: flags and glue. What it does lives in
//! the other crates.
//!
//! ```no_run
//! use std::process::ExitCode;
//! // use my_addon as _; // A crate that nobody names submits nothing.
//!
//! fn main() -> ExitCode {
//!     npuhal::main()
//! }
//! ```

mod args;
mod command;
mod error;
mod presence;
mod session;
mod terminal;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use error::CliError;
use npuhal_core::stage::Control;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use terminal::{Voice, complain};
use tracing_subscriber::EnvFilter;

/// What every command has at hand.
pub(crate) struct Host {
    pub(crate) global: args::GlobalArgs,
    pub(crate) voice: Voice,
    /// Cancelled by the first Ctrl-C.
    pub(crate) control: Control,
    interrupted: Arc<Mutex<Control>>,
}

impl Host {
    fn new(global: args::GlobalArgs) -> Self {
        let control = Control::new();
        let interrupted = Arc::new(Mutex::new(control.clone()));
        Self { voice: Voice::new(global.quiet), global, control, interrupted }
    }

    /// The same host for the next piece of work: an earlier Ctrl-C is forgotten.
    pub(crate) fn with_fresh_control(&self) -> Self {
        let control = Control::new();
        *self.interrupted.lock().unwrap_or_else(PoisonError::into_inner) = control.clone();
        Self { voice: self.voice, global: self.global.clone(), control, interrupted: Arc::clone(&self.interrupted) }
    }

    /// The first Ctrl-C cancels the work at hand; the second ends the program at once.
    fn on_interrupt(&self) -> impl Fn() + Send + 'static {
        let interrupted = Arc::clone(&self.interrupted);
        move || {
            let control = interrupted.lock().unwrap_or_else(PoisonError::into_inner);
            if control.check().is_err() {
                std::process::exit(1);
            }
            control.cancel();
        }
    }
}

/// Runs the program with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version go to stdout with code 0, usage errors to stderr with code 2.
        Err(error) => {
            let code = u8::try_from(error.exit_code()).unwrap_or(1);
            return if error.print().is_ok() { ExitCode::from(code) } else { ExitCode::FAILURE };
        }
    };
    start_log(&cli.global);
    let host = Host::new(cli.global);
    let handler = ctrlc::set_handler(host.on_interrupt());
    if let Err(error) = handler {
        tracing::warn!(%error, "Ctrl-C ends the program without tidying up");
    }
    match dispatch(&host, cli.command) {
        Ok(code) => ExitCode::from(code),
        // The reader of stdout has seen enough.
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            complain(format_args!("npuhal: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

/// Runs `command`; the result is the exit code.
fn dispatch(host: &Host, command: Command) -> Result<u8, CliError> {
    let done = match command {
        Command::Run(args) => command::run::run(host, args),
        Command::Chat(args) => command::chat::chat(host, &args.model, &args.generation),
        Command::Pull(args) => command::pull::pull(host, &args),
        Command::List(args) => command::list::list(host, &args),
        Command::Rm(args) => command::rm::rm(host, &args),
        Command::Inspect(args) => command::inspect::inspect(host, &args),
        Command::Devices(args) => command::devices::devices(host, &args),
        Command::Routes(args) => command::routes::routes(host, &args),
        Command::Bench(args) => command::bench::bench(host, &args),
        Command::OfAddon(arguments) => return command::addon::run(host, &arguments),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "npuhal", &mut script);
            Ok(terminal::say(&String::from_utf8_lossy(&script))?)
        }
    };
    done.map(|()| 0)
}

/// Diagnostics of the libraries, on stderr: warnings, or more with `-v`; `NPUHAL_LOG` takes a filter.
fn start_log(global: &args::GlobalArgs) {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    let filter = EnvFilter::try_from_env("NPUHAL_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .init();
}
