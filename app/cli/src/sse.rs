//! Server-sent events, however the network cuts them.

use std::io::{self, BufRead};

/// Bytes of an event at most.
const EVENT_LIMIT_BYTES: usize = 16 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads the data of events, one after the other. Comments, names and numbers of events are passed over.
pub(crate) struct EventReader<R> {
    reader: R,
    is_first_line: bool,
    /// The last line ended in a carriage return; a line feed right after it belongs to it.
    after_return: bool,
}

impl<R: BufRead> EventReader<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { reader, is_first_line: true, after_return: false }
    }

    /// The data of the next event that has some; lines of data are joined by line feeds. `None` at the end of the stream; what
    /// came before the end without an empty line behind it is an event, too.
    ///
    /// # Errors
    /// Those of the reader; [`io::ErrorKind::InvalidData`] for one that is too long or no UTF-8.
    pub(crate) fn read(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<Vec<u8>> = None;
        loop {
            let length = data.as_ref().map_or(0, Vec::len);
            let line = match self.line(EVENT_LIMIT_BYTES.saturating_sub(length))? {
                Some(line) if line.is_empty() && data.is_none() => continue,
                Some(line) if !line.is_empty() => line,
                _ => break,
            };
            let Some(value) = data_of(&line) else { continue };
            let data = match &mut data {
                Some(data) => {
                    data.push(b'\n');
                    data
                }
                None => data.insert(Vec::new()),
            };
            data.extend_from_slice(value);
        }
        let text = data.map(String::from_utf8).transpose();
        text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
    }

    /// A line without its end; `None` at the end of the stream.
    fn line(&mut self, limit: usize) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        loop {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let Some(&first) = buffer.first() else { return Ok((!line.is_empty()).then(|| self.begun(line))) };
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                self.reader.consume(1);
                continue;
            }
            let end = buffer.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let length = end.unwrap_or(buffer.len());
            if line.len() + length > limit {
                let what = format!("an event of more than {EVENT_LIMIT_BYTES} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            line.extend_from_slice(&buffer[..length]);
            self.after_return = end.is_some_and(|end| buffer[end] == b'\r');
            self.reader.consume(length + usize::from(end.is_some()));
            if end.is_some() {
                return Ok(Some(self.begun(line)));
            }
        }
    }

    /// The stream may begin with a byte order mark.
    fn begun(&mut self, mut line: Vec<u8>) -> Vec<u8> {
        if std::mem::take(&mut self.is_first_line) && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        line
    }
}

/// The value of a line of data.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    match line.strip_prefix(b"data")? {
        [] => Some(&[]),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufReader, Read};

    /// Gives out `bytes` in pieces of the given lengths, over and over.
    struct Pieces<'a> {
        bytes: &'a [u8],
        lengths: std::iter::Cycle<std::slice::Iter<'a, usize>>,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let wanted = *self.lengths.next().unwrap();
            let length = wanted.min(self.bytes.len()).min(buffer.len());
            buffer[..length].copy_from_slice(&self.bytes[..length]);
            self.bytes = &self.bytes[length..];
            Ok(length)
        }
    }

    fn events(bytes: &[u8], lengths: &[usize]) -> Vec<String> {
        let mut reader = EventReader::new(BufReader::new(Pieces { bytes, lengths: lengths.iter().cycle() }));
        let mut events = Vec::new();
        while let Some(event) = reader.read().unwrap() {
            events.push(event);
        }
        events
    }

    const STREAM: &str = "\u{feff}: hello\n\ndata: one\r\n\r\nevent: x\rid: 7\rdata:two ü\rdata\rdata:  three\r\r\n\
                          : working\n\n\n\nretry: 5\n\ndatum: no\ndata: {\"a\":1}\n\ndata: [DONE]";

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let wanted = ["one", "two ü\n\n three", "{\"a\":1}", "[DONE]"];
        for lengths in [&[1][..], &[2], &[3, 1], &[7, 2, 5], &[1000]] {
            assert_eq!(events(STREAM.as_bytes(), lengths), wanted, "{lengths:?}");
        }
        assert!(events(b"", &[1]).is_empty());
        assert!(events(b": nothing but a comment\n\n", &[4]).is_empty());
    }

    #[test]
    fn what_is_too_long_or_no_text_is_an_error() {
        let mut reader = EventReader::new(BufReader::new(io::repeat(b'x')));
        assert_eq!(reader.read().unwrap_err().kind(), io::ErrorKind::InvalidData);
        let many_lines = b"data: 0123456789\n".repeat(EVENT_LIMIT_BYTES / 10);
        assert_eq!(EventReader::new(&many_lines[..]).read().unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(EventReader::new(&b"data: \xff\n\n"[..]).read().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
