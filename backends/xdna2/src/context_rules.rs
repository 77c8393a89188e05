//! How the words of an image follow the context length.

use crate::words::put_word;
use npuhal_amdxdna::format::u32_at;
use std::ops::Range;
use thiserror::Error;

/// Context lengths that rules are derived from, in the order in which their images are given.
pub const SAMPLE_CONTEXTS: [u32; 3] = [1, 2, 17];
/// Positions that a kernel reads from the KV cache at once.
pub const ROWS_PER_BLOCK: u32 = 16;

/// How a word follows the context length N. Arithmetic wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextRule {
    /// `first + (N - 1) · step`.
    Linear {
        /// Difference between neighbouring lengths; never 0.
        step: u32,
    },
    /// `first · ceil(N / 16)`.
    Block,
}

/// A word that depends on the context length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextWord {
    /// Byte offset in the image, a multiple of 4.
    pub at_bytes: usize,
    /// Value for a context of 1.
    pub first: u32,
    /// Rule.
    pub rule: ContextRule,
}

impl ContextWord {
    /// Value for a context of `context` positions; 0 counts as 1.
    #[must_use]
    pub fn value(&self, context: u32) -> u32 {
        let context = context.max(1);
        match self.rule {
            ContextRule::Linear { step } => self.first.wrapping_add((context - 1).wrapping_mul(step)),
            ContextRule::Block => self.first.wrapping_mul(context.div_ceil(ROWS_PER_BLOCK)),
        }
    }
}

/// Images that do not follow the rules.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ContextRuleError {
    /// The images have different sizes.
    #[error(
        "context ELFs differ in size: {} bytes for contexts {SAMPLE_CONTEXTS:?}; one file serves all lengths only if every \
         length has the same operations",
        joined(len_bytes)
    )]
    SizesDiffer {
        /// Size of each image.
        len_bytes: [usize; 3],
    },
    /// A word that changes between 1 and 2, but not by the same step up to 17.
    #[error(
        "word at {at_bytes:#x} is not linear in the context length: {:#x}, {:#x} and {:#x} for contexts {SAMPLE_CONTEXTS:?}; \
         wanted {wanted:#x} for the last",
        values[0], values[1], values[2]
    )]
    NotLinear {
        /// Byte offset.
        at_bytes: usize,
        /// Its values.
        values: [u32; 3],
        /// What the last would have to be.
        wanted: u32,
    },
    /// A word that is the same for 1 and 2, and not doubled for 17.
    #[error(
        "word at {at_bytes:#x} is not a {ROWS_PER_BLOCK}-row block count: {:#x}, {:#x} and {:#x} for contexts \
         {SAMPLE_CONTEXTS:?}; wanted {wanted:#x} for the last",
        values[0], values[1], values[2]
    )]
    NotBlock {
        /// Byte offset.
        at_bytes: usize,
        /// Its values.
        values: [u32; 3],
        /// What the last would have to be.
        wanted: u32,
    },
    /// The bytes behind the last whole word differ.
    #[error("the images differ in the {len_bytes} bytes at {at_bytes:#x}, which are no whole word")]
    TailDiffers {
        /// First byte.
        at_bytes: usize,
        /// Bytes there are.
        len_bytes: usize,
    },
}

/// The words of an image that depend on the context length, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContextRules {
    image_bytes: usize,
    words: Vec<ContextWord>,
}

impl ContextRules {
    /// Derives the rules from the images for [`SAMPLE_CONTEXTS`]. Bytes in `ignored` are taken for equal.
    ///
    /// # Errors
    /// Images of different sizes; a word that follows neither rule.
    pub fn derive(images: [&[u8]; 3], ignored: &[Range<usize>]) -> Result<Self, ContextRuleError> {
        let len_bytes = images.map(<[u8]>::len);
        let image_bytes = len_bytes[0];
        if len_bytes != [image_bytes; 3] {
            return Err(ContextRuleError::SizesDiffer { len_bytes });
        }
        let whole_bytes = image_bytes - image_bytes % 4;
        let mut words = Vec::new();
        for at_bytes in (0..whole_bytes).step_by(4) {
            let raw = images.map(|image| u32_at(image, at_bytes).unwrap_or_default());
            if raw != [raw[0]; 3] {
                let mask = counted_bits(at_bytes, ignored);
                words.extend(rule_of(at_bytes, raw.map(|word| word & mask))?);
            }
        }
        let tails = images.map(|image| &image[whole_bytes..]);
        if tails[1..] != [tails[0]; 2] {
            return Err(ContextRuleError::TailDiffers { at_bytes: whole_bytes, len_bytes: image_bytes - whole_bytes });
        }
        Ok(Self { image_bytes, words })
    }

    /// Size of the images.
    #[must_use]
    pub fn image_bytes(&self) -> usize {
        self.image_bytes
    }

    /// The words, by ascending offset.
    #[must_use]
    pub fn words(&self) -> &[ContextWord] {
        &self.words
    }

    /// Number of words under the linear rule.
    #[must_use]
    pub fn linear_count(&self) -> usize {
        self.words.iter().filter(|word| matches!(word.rule, ContextRule::Linear { .. })).count()
    }

    /// Number of words under the block rule.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.words.len() - self.linear_count()
    }

    /// The words in `bytes` of the image.
    #[must_use]
    pub fn words_in(&self, bytes: &Range<usize>) -> &[ContextWord] {
        let from = self.words.partition_point(|word| word.at_bytes < bytes.start);
        let to = self.words.partition_point(|word| word.at_bytes < bytes.end);
        self.words.get(from..to).unwrap_or_default()
    }

    /// Makes `image`, an image for any context length, the one for `context`.
    pub(crate) fn apply(&self, context: u32, image: &mut [u8]) {
        for word in &self.words {
            put_word(image, word.at_bytes, word.value(context));
        }
    }
}

/// Bits of the word at `at_bytes` that lie outside `ignored`.
fn counted_bits(at_bytes: usize, ignored: &[Range<usize>]) -> u32 {
    let counts = |byte: usize| !ignored.iter().any(|range| range.contains(&(at_bytes + byte)));
    (0..4).filter(|byte| counts(*byte)).fold(0, |mask, byte| mask | 0xFF << (8 * byte))
}

fn rule_of(at_bytes: usize, values: [u32; 3]) -> Result<Option<ContextWord>, ContextRuleError> {
    let [first, second, last] = values;
    if values == [first; 3] {
        return Ok(None);
    }
    let step = second.wrapping_sub(first);
    let word = |rule| ContextWord { at_bytes, first, rule };
    let word = word(if step == 0 { ContextRule::Block } else { ContextRule::Linear { step } });
    let wanted = word.value(SAMPLE_CONTEXTS[2]);
    match (last == wanted, word.rule) {
        (true, _) => Ok(Some(word)),
        (false, ContextRule::Linear { .. }) => Err(ContextRuleError::NotLinear { at_bytes, values, wanted }),
        (false, ContextRule::Block) => Err(ContextRuleError::NotBlock { at_bytes, values, wanted }),
    }
}

fn joined(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn words_follow_one_of_two_rules() {
        let one = image(&[7, 1, 0x800, 0x4000, 0xFFFF_FFFF]);
        let two = image(&[7, 2, 0xC00, 0x4000, 0x0000_0001]);
        let seventeen = image(&[7, 17, 0x800 + 16 * 0x400, 0x8000, 31]);
        let rules = ContextRules::derive([&one, &two, &seventeen], &[]).unwrap();
        assert_eq!((rules.linear_count(), rules.block_count()), (3, 1));
        let mut made = seventeen.clone();
        for (context, wanted) in [(1, &one), (2, &two), (17, &seventeen)] {
            rules.apply(context, &mut made);
            assert_eq!(&made, wanted);
        }
        let at = |context| rules.words().iter().map(|word| word.value(context)).collect::<Vec<_>>();
        assert_eq!(at(16), [16, 0x800 + 15 * 0x400, 0x4000, 29]);
        assert_eq!(at(33), [33, 0x800 + 32 * 0x400, 3 * 0x4000, 63]);
        assert_eq!(rules.words_in(&(4..9)).len(), 2);
        assert_eq!(rules.words_in(&(100..200)), []);
    }

    #[test]
    fn a_word_that_follows_no_rule_is_named() {
        let derive = |a: &[u32], b: &[u32], c: &[u32]| {
            let (a, b, c) = (image(a), image(b), image(c));
            ContextRules::derive([&a, &b, &c], &[]).unwrap_err()
        };
        let error = derive(&[0, 1], &[0, 2], &[0, 18]);
        assert_eq!(error, ContextRuleError::NotLinear { at_bytes: 4, values: [1, 2, 18], wanted: 17 });
        assert!(error.to_string().contains("word at 0x4 is not linear in the context length: 0x1, 0x2 and 0x12"));
        let error = derive(&[3, 1], &[3, 1], &[7, 1]);
        assert_eq!(error, ContextRuleError::NotBlock { at_bytes: 0, values: [3, 3, 7], wanted: 6 });
        assert!(error.to_string().contains("word at 0x0 is not a 16-row block count"));
        let error = derive(&[1], &[1], &[1, 2]);
        assert!(error.to_string().contains("context ELFs differ in size: 4, 4, 8 bytes"), "{error}");
        let error = ContextRules::derive([b"12345", b"12345", b"12346"], &[]).unwrap_err();
        assert_eq!(error, ContextRuleError::TailDiffers { at_bytes: 4, len_bytes: 1 });
    }

    #[test]
    fn ignored_bytes_are_equal_also_inside_a_word() {
        let (one, two) = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 9, 9, 9, 9, 6, 7, 8]);
        let rules = ContextRules::derive([&one, &two, &one], &[1..5, 8..8]).unwrap();
        assert_eq!(rules.words(), []);
        assert!(ContextRules::derive([&one, &two, &one], &[1..4, 8..8]).is_err());
    }
}
