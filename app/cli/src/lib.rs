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
mod client;
mod command;
mod doctor;
mod environment;
mod error;
mod graph;
mod kernels;
mod npu;
mod output;
mod packed;
mod planner;
mod session;
mod sse;
mod suggestion;
mod terminal;
mod thoughts;
mod window;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use error::CliError;
use npuhal_core::stage::Control;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use terminal::{Voice, complain};
use tracing_subscriber::EnvFilter;

/// What every command has at hand.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) global: args::GlobalArgs,
    pub(crate) voice: Voice,
    /// Cancelled by the first Ctrl-C.
    pub(crate) control: Control,
    /// What an interrupt cancels; nothing while only a person is waited for.
    at_hand: Arc<Mutex<Option<Control>>>,
}

impl Host {
    fn new(global: args::GlobalArgs) -> Self {
        let control = Control::new();
        let at_hand = Arc::new(Mutex::new(Some(control.clone())));
        Self { voice: Voice::new(global.quiet), global, control, at_hand }
    }

    /// The same host for the next piece of work: an earlier Ctrl-C is forgotten.
    pub(crate) fn with_fresh_control(&self) -> Self {
        let control = Control::new();
        *self.at_hand.lock().unwrap_or_else(PoisonError::into_inner) = Some(control.clone());
        Self { voice: self.voice, global: self.global.clone(), control, at_hand: Arc::clone(&self.at_hand) }
    }

    /// Nothing is at hand: an interrupt ends the program.
    pub(crate) fn rest(&self) {
        *self.at_hand.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// From now on Ctrl-C stops the work at hand instead of the program. To be called once, and where there is a line editor
    /// after it was made: that takes the signal for itself.
    pub(crate) fn heed_interrupts(&self) {
        if let Err(error) = ctrlc::set_handler(self.on_interrupt()) {
            tracing::warn!(%error, "Ctrl-C ends the program without tidying up");
        }
    }

    /// The first signal cancels the work at hand; the second, or one while nothing is at hand, ends the program at once.
    fn on_interrupt(&self) -> impl Fn() + Send + 'static {
        let at_hand = Arc::clone(&self.at_hand);
        move || match &*at_hand.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(control) if control.check().is_ok() => control.cancel(),
            _ => std::process::exit(1),
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
    let host = Host::new(cli.global);
    match start_log(&host.global).and_then(|()| dispatch(&host, cli.command)) {
        Ok(code) => ExitCode::from(code),
        Err(CliError::Verdict(code)) => ExitCode::from(code),
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
    // These wait for people first, or have an end of their own.
    if !matches!(command, Command::Run(_) | Command::Chat(_) | Command::Serve(_) | Command::Worker { .. }) {
        host.heed_interrupts();
    }
    let done = match command {
        Command::Run(args) => command::run::run(host, args),
        Command::Chat(args) => command::chat::chat(host, &args),
        Command::Pull(args) => command::pull::pull(host, &args),
        Command::List(args) => command::list::list(host, &args),
        Command::Rm(args) => command::rm::rm(host, &args),
        Command::Convert(args) => command::convert::convert_package(host, &args),
        Command::Inspect(args) => command::inspect::inspect(host, &args),
        Command::Pack(args) => command::pack::pack(host, &args),
        Command::Kit(args) => command::kit::kit(host, &args),
        Command::Verify(args) => command::verify::verify(host, &args),
        Command::Serve(args) => command::serve::serve(host, *args),
        Command::Worker { settings, check: None } => command::serve::work(host, &settings),
        Command::Worker { settings, check: Some(folders) } => command::serve::check(host, &settings, &folders),
        Command::Devices(args) => command::devices::devices(host, &args),
        Command::Doctor(args) => command::doctor::doctor(host, &args),
        Command::Routes(args) => command::routes::routes(host, &args),
        Command::Bench(args) => command::bench::bench(host, &args),
        Command::Eval(args) => command::eval::eval(host, &args),
        Command::Parity(args) => command::parity::parity(host, &args),
        Command::Agree(args) => command::agree::agree(host, &args),
        Command::Graph(args) => command::graph::graph(host, &args),
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
fn start_log(global: &args::GlobalArgs) -> Result<(), CliError> {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    let filter = match environment::variable("NPUHAL_LOG")? {
        Some(filter) => EnvFilter::try_new(&filter).map_err(|error| {
            CliError::Usage(format!("NPUHAL_LOG={filter}: {error}; wanted e.g. info, or npuhal_server=debug"))
        })?,
        None => EnvFilter::new(level),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    Ok(())
}
