//! Bytes as text.

/// Two lower-case digits for each byte, as checksums are written.
#[must_use]
pub fn hexadecimal(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

#[cfg(test)]
mod tests {
    use super::hexadecimal;

    #[test]
    fn each_byte_has_two_digits() {
        assert_eq!(hexadecimal(&[0, 0x0a, 0xf0, 0xff]), "000af0ff");
        assert_eq!(hexadecimal(&[]), "");
    }
}
