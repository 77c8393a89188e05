//! Reports and drawings: on stdout, or in a file.

use crate::error::CliError;
use crate::terminal::say;
use npuhal_core::file::write_whole;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Writes `text` to stdout, or to the file `output` ([`write_whole`]). A path that leads to this program's own stdout or
/// stderr, such as `/dev/stdout`, is no file to be replaced: the text goes behind what was said there.
pub(crate) fn write(text: &str, output: Option<&Path>) -> Result<(), CliError> {
    let Some(path) = output else { return Ok(say(text)?) };
    if leads_to(path, io::stdout().as_fd()) {
        return Ok(say(text)?);
    }
    let written = match leads_to(path, io::stderr().as_fd()) {
        true => io::stderr().lock().write_all(text.as_bytes()),
        false => write_whole(path, text.as_bytes()),
    };
    written.map_err(|source| CliError::Report { path: path.to_owned(), source })
}

/// Whether `path` is what `stream` is open on.
fn leads_to(path: &Path, stream: BorrowedFd<'_>) -> bool {
    let open = stream.try_clone_to_owned().and_then(|stream| File::from(stream).metadata());
    let (Ok(named), Ok(open)) = (fs::metadata(path), open) else { return false };
    (named.dev(), named.ino()) == (open.dev(), open.ino())
}
