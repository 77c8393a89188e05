//! The byte-level alphabet of GPT-2: every byte has a printable character.

/// Characters of the alphabet lie below this code point.
const CHARS: usize = 0x144;

/// Both directions of the alphabet.
#[derive(Debug)]
pub(super) struct Alphabet {
    chars: [char; 256],
    bytes: [Option<u8>; CHARS],
}

impl Alphabet {
    /// Printable Latin-1 stands for itself; the other 68 bytes follow each other from U+0100.
    pub(super) fn new() -> Self {
        let mut chars = ['\0'; 256];
        let mut bytes = [None; CHARS];
        let mut next = 0x100u32;
        for byte in 0..=255u8 {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let char = if printable {
                char::from(byte)
            } else {
                let char = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
                next += 1;
                char
            };
            chars[usize::from(byte)] = char;
            if let Some(slot) = bytes.get_mut(char as usize) {
                *slot = Some(byte);
            }
        }
        Self { chars, bytes }
    }

    /// The character of `byte`.
    pub(super) fn char(&self, byte: u8) -> char {
        self.chars[usize::from(byte)]
    }

    /// The byte of `char`, if it is of the alphabet.
    pub(super) fn byte(&self, char: char) -> Option<u8> {
        self.bytes.get(char as usize).copied().flatten()
    }

    /// Appends the bytes that `text` stands for; characters outside the alphabet stand for themselves.
    pub(super) fn decode_into(&self, text: &str, out: &mut Vec<u8>) {
        for char in text.chars() {
            match self.byte(char) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let alphabet = Alphabet::new();
        for byte in 0..=255u8 {
            assert_eq!(alphabet.byte(alphabet.char(byte)), Some(byte));
        }
        assert_eq!((alphabet.char(b' '), alphabet.char(b'\n'), alphabet.char(0)), ('Ġ', 'Ċ', 'Ā'));
        assert_eq!(alphabet.char(0xAD) as u32, 0x143);
        assert_eq!(alphabet.byte(' '), None);
    }
}
