//! What the program says: answers on stdout, everything else on stderr.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// How talkative the program is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Voice {
    quiet: bool,
}

impl Voice {
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// One line on stderr, unless quiet.
    pub(crate) fn note(self, line: impl Display) {
        if !self.quiet {
            complain(line);
        }
    }

    /// A progress bar over things that are counted, on stderr: hidden when quiet or piped.
    pub(crate) fn counter(self, len: u64, what: &str) -> ProgressBar {
        let bar = self.bar(len, what);
        if let Ok(style) = ProgressStyle::with_template("[{bar:24.cyan/blue}] {pos}/{len} {eta} {wide_msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar
    }

    /// A progress bar on stderr: hidden when quiet or piped.
    pub(crate) fn bar(self, len_bytes: u64, what: &str) -> ProgressBar {
        if self.quiet || !io::stderr().is_terminal() {
            return ProgressBar::with_draw_target(Some(len_bytes), ProgressDrawTarget::hidden());
        }
        let bar = ProgressBar::new(len_bytes);
        const TEMPLATE: &str =
            "[{bar:24.cyan/blue}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}

/// One line on stderr, also when quiet: errors and warnings.
pub(crate) fn complain(line: impl Display) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Writes `text` to stdout at once.
///
/// # Errors
/// What the system says; a closed pipe is [`io::ErrorKind::BrokenPipe`].
pub(crate) fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Bytes for people: `98.4 MB`.
pub(crate) fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_one_decimal_above_a_kilobyte() {
        assert_eq!(bytes_text(999), "999 B");
        assert_eq!(bytes_text(98_362_432), "98.4 MB");
        assert_eq!(bytes_text(1_011_017_728), "1.0 GB");
    }
}
