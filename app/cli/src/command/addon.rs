//! Subcommands of add-ons.

use crate::Host;
use crate::args::Cli;
use crate::error::CliError;
use crate::session::registry;
use clap::CommandFactory;
use std::ffi::OsString;
use std::io;

/// Runs the subcommand that `arguments` name first; the result is the exit code.
pub(crate) fn run(host: &Host, arguments: &[OsString]) -> Result<u8, CliError> {
    let registry = registry(host)?;
    let texts = arguments.iter().map(|argument| {
        let text = argument.to_str().map(str::to_owned);
        text.ok_or_else(|| CliError::Usage(format!("the argument {argument:?} is not UTF-8 text")))
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let Some((name, rest)) = texts.split_first() else { return Err(CliError::Usage("no command".to_owned())) };
    match registry.command(name) {
        Some(known) => Ok(known.command.run(rest, &mut io::stdout().lock())?),
        None => {
            let own = Cli::command();
            let mut known: Vec<String> =
                own.get_subcommands().filter(|own| !own.is_hide_set()).map(|own| own.get_name().to_owned()).collect();
            known.extend(registry.commands().iter().map(|known| known.command.name().to_owned()));
            Err(CliError::Usage(format!("unrecognized subcommand '{name}'; known: {}", known.join(", "))))
        }
    }
}
