//! Text that a library writes during a call.

use npuhal_addon_abi::{Str, TextSink};
use std::ffi::c_void;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes of a reason or a line at most; the rest is dropped.
const MAX_TEXT_BYTES: usize = 16 << 10;

/// Collects the text of one call.
#[derive(Default)]
pub(super) struct Collector {
    bytes: Vec<u8>,
    is_bad: bool,
}

impl Collector {
    /// For one call, during which nothing else uses the collector.
    pub(super) fn sink(&mut self) -> TextSink {
        TextSink { state: (&raw mut *self).cast::<c_void>(), write: Some(collect) }
    }

    /// What was written, as one line: UTF-8 with a mark for every byte that is none, control characters as spaces.
    pub(super) fn line(&self) -> String {
        if self.is_bad {
            return "(it gave text at a null pointer)".to_owned();
        }
        let text = String::from_utf8_lossy(&self.bytes);
        text.trim().chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
    }

    /// The reason of a failure: what was written, or that nothing was.
    pub(super) fn reason(&self) -> String {
        let line = self.line();
        if line.is_empty() { "it gave no reason".to_owned() } else { line }
    }
}

unsafe extern "C" fn collect(state: *mut c_void, text: Str) {
    // SAFETY: the state is the collector that made this sink, and the call that it was made for has not ended.
    let Some(collector) = (unsafe { state.cast::<Collector>().as_mut() }) else { return };
    let room = MAX_TEXT_BYTES - collector.bytes.len();
    // SAFETY: the interface says that these bytes lie there during the call.
    match unsafe { bytes(text) } {
        Some(bytes) => collector.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]),
        None => collector.is_bad = true,
    }
}

/// The bytes of `text`, or `None` for a null pointer to some.
///
/// # Safety
/// Where its pointer is not null, `text.len` bytes lie there, unchanged during `'a`.
unsafe fn bytes<'a>(text: Str) -> Option<&'a [u8]> {
    if text.len == 0 {
        return Some(&[]);
    }
    if text.data.is_null() || text.len > isize::MAX as usize {
        return None;
    }
    // SAFETY: not null, a possible length; the rest is the caller's promise.
    Some(unsafe { std::slice::from_raw_parts(text.data, text.len) })
}

/// Hands the text of one call on to a writer.
pub(super) struct Forwarder<'a> {
    output: &'a mut dyn Write,
    /// What the writer or the library did wrong first.
    pub(super) result: io::Result<()>,
}

impl<'a> Forwarder<'a> {
    pub(super) fn new(output: &'a mut dyn Write) -> Self {
        Self { output, result: Ok(()) }
    }

    /// For one call, during which nothing else uses the forwarder.
    pub(super) fn sink(&mut self) -> TextSink {
        TextSink { state: (&raw mut *self).cast::<c_void>(), write: Some(forward) }
    }
}

unsafe extern "C" fn forward(state: *mut c_void, text: Str) {
    // SAFETY: the state is the forwarder that made this sink, and the call that it was made for has not ended.
    let Some(forwarder) = (unsafe { state.cast::<Forwarder<'_>>().as_mut() }) else { return };
    if forwarder.result.is_err() {
        return;
    }
    // SAFETY: the interface says that these bytes lie there during the call.
    let bytes = unsafe { bytes(text) };
    let bytes = bytes.ok_or_else(|| io::Error::other("the add-on gave text at a null pointer"));
    let write = AssertUnwindSafe(|| bytes.and_then(|bytes| forwarder.output.write_all(bytes)));
    // Nothing may unwind into the library.
    forwarder.result = catch_unwind(write).unwrap_or_else(|_| Err(io::Error::other("the writer panicked")));
}
