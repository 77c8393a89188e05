//! Control and status of a core.

use super::RegisterError;
use super::bits::{Field, refuse_reserved};

/// Core control word. After power-up the core is held in reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CoreControl {
    /// The core runs.
    pub enable: bool,
    /// The core is held in reset.
    pub reset: bool,
}

const ENABLE: Field = Field::new("core enable", 0, 0, 0);
const RESET: Field = Field::new("core reset", 0, 1, 1);
const DEBUG_HALT: Field = Field::new("core debug halt", 0, 16, 16);
const ERROR_HALT: Field = Field::new("core error halt", 0, 19, 19);
const DONE: Field = Field::new("core done", 0, 20, 20);

impl CoreControl {
    /// Register word after power-up.
    pub const RESET_WORD: u32 = 2;

    /// The register word.
    pub fn encode(&self) -> u32 {
        let mut w = [0];
        ENABLE.set_flag(&mut w, self.enable);
        RESET.set_flag(&mut w, self.reset);
        w[0]
    }

    /// Decodes a register word; refuses reserved bits.
    pub fn decode(word: u32) -> Result<Self, RegisterError> {
        let w = [word];
        refuse_reserved("core control", &w, &[ENABLE, RESET])?;
        Ok(Self { enable: ENABLE.get_flag(&w), reset: RESET.get_flag(&w) })
    }
}

/// Core status word, as far as its bits are known here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CoreStatus {
    /// The core is enabled.
    pub enable: bool,
    /// The core is in reset.
    pub reset: bool,
    /// The core was halted for debugging.
    pub debug_halt: bool,
    /// The core was halted by an error.
    pub error_halt: bool,
    /// The program has ended.
    pub done: bool,
    /// Other bits (stall reasons), kept as they are.
    pub other: u32,
}

impl CoreStatus {
    const FIELDS: [Field; 5] = [ENABLE, RESET, DEBUG_HALT, ERROR_HALT, DONE];

    /// The register word; `other` must not contain bits that have a field.
    pub fn encode(&self) -> Result<u32, RegisterError> {
        let mut w = [self.other];
        let values = [self.enable, self.reset, self.debug_halt, self.error_halt, self.done];
        for (field, value) in Self::FIELDS.into_iter().zip(values) {
            if field.get_flag(&w) {
                return Err(RegisterError::TooLarge { field: field.name, value: self.other.into(), max: 0 });
            }
            field.set_flag(&mut w, value);
        }
        Ok(w[0])
    }

    /// Decodes a register word.
    pub fn decode(word: u32) -> Self {
        let w = [word];
        let mut other = w;
        Self::FIELDS.into_iter().for_each(|field| field.set_flag(&mut other, false));
        Self {
            enable: ENABLE.get_flag(&w),
            reset: RESET.get_flag(&w),
            debug_halt: DEBUG_HALT.get_flag(&w),
            error_halt: ERROR_HALT.get_flag(&w),
            done: DONE.get_flag(&w),
            other: other[0],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bits_are_as_documented() {
        assert_eq!(CoreControl::decode(1), Ok(CoreControl { enable: true, reset: false }));
        assert_eq!(CoreControl { enable: false, reset: true }.encode(), CoreControl::RESET_WORD);
        assert!(CoreControl::decode(4).is_err());
        let done = CoreStatus { enable: true, done: true, ..CoreStatus::default() };
        assert_eq!(done.encode(), Ok(0x0010_0001));
        assert!(CoreStatus { other: 1 << 20, ..CoreStatus::default() }.encode().is_err());
    }

    proptest! {
        #[test]
        fn status_words_survive(word: u32) {
            prop_assert_eq!(CoreStatus::decode(word).encode(), Ok(word));
        }
    }
}
