//! Named bit fields of register words.

use super::RegisterError;

/// A bit field of one word of a register group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Field {
    /// Name in errors.
    pub name: &'static str,
    /// Word of the group.
    pub word: usize,
    /// Highest bit.
    pub high: u32,
    /// Lowest bit.
    pub low: u32,
}

impl Field {
    /// Field `high:low` of word `word`.
    pub(super) const fn new(name: &'static str, word: usize, high: u32, low: u32) -> Self {
        Self { name, word, high, low }
    }

    /// Number of bits.
    const fn width(self) -> u32 {
        self.high - self.low + 1
    }

    /// The field's bits within its word.
    const fn mask(self) -> u32 {
        (u32::MAX >> (32 - self.width())) << self.low
    }

    /// The field's value.
    pub(super) fn get(self, words: &[u32]) -> u32 {
        (words[self.word] & self.mask()) >> self.low
    }

    /// The field's value as a two's complement number.
    pub(super) fn get_signed(self, words: &[u32]) -> i8 {
        let shift = 32 - self.width();
        ((self.get(words) << shift) as i32 >> shift) as i8
    }

    /// Whether a one-bit field is set.
    pub(super) fn get_flag(self, words: &[u32]) -> bool {
        self.get(words) != 0
    }

    /// Stores `value`, which must fit.
    pub(super) fn set(self, words: &mut [u32], value: u32) -> Result<(), RegisterError> {
        let max = self.mask() >> self.low;
        if value > max {
            return Err(RegisterError::TooLarge { field: self.name, value: value.into(), max: max.into() });
        }
        words[self.word] = (words[self.word] & !self.mask()) | (value << self.low);
        Ok(())
    }

    /// Stores `value − 1`; the field cannot express 0.
    pub(super) fn set_minus_one(self, words: &mut [u32], value: u32) -> Result<(), RegisterError> {
        let stored = value.checked_sub(1).ok_or(RegisterError::Zero { field: self.name })?;
        self.set(words, stored)
    }

    /// Stores a two's complement number.
    pub(super) fn set_signed(self, words: &mut [u32], value: i8) -> Result<(), RegisterError> {
        let limit = 1i32 << (self.width() - 1);
        if !(-limit..limit).contains(&i32::from(value)) {
            return Err(RegisterError::OutOfSignedRange { field: self.name, value, min: -limit, max: limit - 1 });
        }
        self.set(words, (i32::from(value) as u32) & (self.mask() >> self.low))
    }

    /// Stores a flag.
    pub(super) fn set_flag(self, words: &mut [u32], value: bool) {
        words[self.word] = (words[self.word] & !self.mask()) | (u32::from(value) << self.low);
    }
}

/// Refuses set bits that belong to none of `fields`.
pub(super) fn refuse_reserved(group: &'static str, words: &[u32], fields: &[Field]) -> Result<(), RegisterError> {
    for (word, &value) in words.iter().enumerate() {
        let known = fields.iter().filter(|f| f.word == word).fold(0, |mask, f| mask | f.mask());
        if value & !known != 0 {
            return Err(RegisterError::Reserved { register: group, word, bits: value & !known });
        }
    }
    Ok(())
}
