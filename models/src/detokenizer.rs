//! Text from ids as they come, cut at the borders of characters.

use crate::tokenizer::{ControlTokens, Tokenizer};
use npuhal_core::stage::TokenId;

/// Turns a stream of ids into text.
///
/// What [`StreamDetokenizer::push`] and a last [`StreamDetokenizer::flush`] return, put together, is
/// [`Tokenizer::decode`] of the same ids.
#[derive(Debug, Clone)]
pub struct StreamDetokenizer {
    tokenizer: Tokenizer,
    controls: ControlTokens,
    /// The beginning of a character whose end has not come: at most three bytes between calls.
    pending: Vec<u8>,
    /// Whether the next byte is the first of a text that loses one space at its start.
    strips_space: bool,
}

impl StreamDetokenizer {
    /// A detokenizer at the beginning of a text.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer, controls: ControlTokens) -> Self {
        let strips_space = tokenizer.strips_first_space();
        Self { tokenizer: tokenizer.clone(), controls, pending: Vec::new(), strips_space }
    }

    /// A detokenizer for what follows another text, such as an answer behind its prompt: no space is lost.
    #[must_use]
    pub fn continuing(tokenizer: &Tokenizer, controls: ControlTokens) -> Self {
        Self { strips_space: false, ..Self::new(tokenizer, controls) }
    }

    /// The text that `id` completes; empty where a character is not complete yet.
    pub fn push(&mut self, id: TokenId) -> String {
        self.tokenizer.decode_into(id, self.controls, &mut self.pending);
        if self.strips_space && !self.pending.is_empty() {
            self.strips_space = false;
            if self.pending[0] == b' ' {
                self.pending.remove(0);
            }
        }
        let text = decode_prefix(&self.pending);
        self.pending.drain(..text.1);
        text.0
    }

    /// Ends the text: an incomplete character becomes U+FFFD. Afterwards a new text begins.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        self.strips_space = self.tokenizer.strips_first_space();
        text
    }

    /// Whether a character is incomplete.
    #[must_use]
    pub fn is_mid_character(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// The text of `bytes` up to an incomplete character at their end, and how many bytes that is. Every maximal subpart of an
/// ill-formed sequence becomes one U+FFFD.
fn decode_prefix(bytes: &[u8]) -> (String, usize) {
    let mut text = String::with_capacity(bytes.len());
    let mut done = 0;
    loop {
        match std::str::from_utf8(&bytes[done..]) {
            Ok(valid) => {
                text.push_str(valid);
                return (text, bytes.len());
            }
            Err(error) => {
                let valid = done + error.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&bytes[done..valid]));
                let Some(bad) = error.error_len() else { return (text, valid) };
                text.push(char::REPLACEMENT_CHARACTER);
                done = valid + bad;
            }
        }
    }
}
