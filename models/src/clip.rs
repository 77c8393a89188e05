//! Words of a file in messages: of bounded length, on one line.

use std::fmt::{self, Write};

/// Characters of a message that come from a file.
const LIMIT: usize = 800;

/// Text that may hold what a file says: line breaks and other control characters are spelled, and it is cut behind 800
/// characters.
pub(crate) struct Clipped<'a>(pub(crate) &'a str);

impl fmt::Display for Clipped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.0, |f, c| if c.is_control() { write!(f, "{}", c.escape_debug()) } else { f.write_char(c) })
    }
}

/// The same in quotation marks.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        write(f, self.0, |f, c| if c == '\'' { f.write_char(c) } else { write!(f, "{}", c.escape_debug()) })?;
        f.write_char('"')
    }
}

fn write(
    f: &mut fmt::Formatter<'_>,
    text: &str,
    mut one: impl FnMut(&mut fmt::Formatter<'_>, char) -> fmt::Result,
) -> fmt::Result {
    let mut chars = text.chars();
    chars.by_ref().take(LIMIT).try_for_each(|c| one(f, c))?;
    if chars.next().is_some() { f.write_char('…') } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_of_bounded_length() {
        assert_eq!(Clipped("a \"b\"\n'c'\u{7}é").to_string(), "a \"b\"\\n'c'\\u{7}é");
        assert_eq!(Quoted("a \"b\"\n'c'").to_string(), "\"a \\\"b\\\"\\n'c'\"");
        let long = Clipped(&"é".repeat(100_000)).to_string();
        assert_eq!((long.chars().count(), long.ends_with("é…")), (801, true));
        assert!(!Clipped(&"x".repeat(800)).to_string().ends_with('…'));
    }
}
