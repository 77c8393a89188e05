//! npuhal with an add-on linked in: every command of npuhal, and the add-on's route, subcommand and encoder.

use std::process::ExitCode;

// A crate that nobody names submits nothing.
use npuhal_example_addon as _;

fn main() -> ExitCode {
    npuhal::main()
}
