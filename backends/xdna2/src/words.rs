//! Little-endian words of a byte image.

/// Stores a word at byte `at`; whether it lies inside.
pub(crate) fn put_word(bytes: &mut [u8], at: usize, value: u32) -> bool {
    let word = at.checked_add(4).and_then(|end| bytes.get_mut(at..end));
    word.map(|word| word.copy_from_slice(&value.to_le_bytes())).is_some()
}
