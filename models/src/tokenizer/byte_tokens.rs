//! Tokens for single bytes, `<0x00>` to `<0xFF>`, which stand for characters without a token.

use crate::text_error::TextError;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;

/// Ids by byte.
#[derive(Debug)]
pub(super) struct ByteTokens([Option<TokenId>; 256]);

impl ByteTokens {
    /// Those of `vocabulary` that are of the kind.
    pub(super) fn new(vocabulary: &Vocabulary) -> Self {
        let mut ids = [None; 256];
        for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(&vocabulary.kinds) {
            if let Some(byte) = byte_of(text).filter(|_| *kind == TokenKind::Byte) {
                ids[usize::from(byte)].get_or_insert(id);
            }
        }
        Self(ids)
    }

    /// Whether `has` holds for the tokens of all bytes.
    pub(super) fn is_complete(has: impl Fn(&str) -> bool) -> bool {
        (0..=255u8).all(|byte| has(&format!("<0x{byte:02X}>")))
    }

    /// Appends the tokens of `character`'s bytes, or `unknown` where one is missing.
    pub(super) fn spell(
        &self,
        character: char,
        unknown: Option<TokenId>,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let mut buffer = [0; 4];
        let bytes = character.encode_utf8(&mut buffer).as_bytes();
        let start = ids.len();
        ids.extend(bytes.iter().map_while(|byte| self.0[usize::from(*byte)]));
        if ids.len() - start == bytes.len() {
            return Ok(());
        }
        ids.truncate(start);
        ids.push(unknown.ok_or(TextError::NoTokenForCharacter { character })?);
        Ok(())
    }
}

/// The byte that a token such as `<0x0A>` stands for.
pub(crate) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_pair = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_pair { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_two_digits() {
        assert_eq!((byte_of("<0x0A>"), byte_of("<0xff>")), (Some(10), Some(255)));
        for text in ["<0x0>", "<0x+1>", "<0x0A", "0x0A>", "<0x00A>", "a"] {
            assert_eq!(byte_of(text), None);
        }
    }
}
