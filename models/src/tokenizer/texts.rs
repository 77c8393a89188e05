//! All token texts in one allocation.

use crate::text_error::TextError;
use npuhal_core::stage::TokenId;

/// Token texts by id.
#[derive(Debug)]
pub(super) struct Texts {
    all: String,
    ends: Vec<u32>,
}

impl Texts {
    pub(super) fn new(tokens: &[String]) -> Result<Self, TextError> {
        let len: usize = tokens.iter().map(String::len).sum();
        if u32::try_from(len).is_err() {
            return Err(TextError::Vocabulary {
                field: "tokens",
                wanted: "less than 4 GiB of text".to_owned(),
                found: format!("{len} bytes"),
            });
        }
        let mut texts = Self { all: String::with_capacity(len), ends: Vec::with_capacity(tokens.len()) };
        for token in tokens {
            texts.all.push_str(token);
            texts.ends.push(texts.all.len() as u32);
        }
        Ok(texts)
    }

    pub(super) fn get(&self, id: TokenId) -> Option<&str> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] as usize };
        self.all.get(start..end)
    }
}
