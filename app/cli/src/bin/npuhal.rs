//! The npuhal program.

use std::process::ExitCode;

fn main() -> ExitCode {
    npuhal::main()
}
