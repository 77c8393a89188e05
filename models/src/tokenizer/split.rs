//! Pre-tokenizers: how text is cut into words before merging, as GGUF's pre-tokenizer names define it.
//!
//! All published patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that follows.
//! Here the pattern is `\s+` alone and the last character is given back afterwards, so that matching needs no lookahead and
//! is linear in the text.

use crate::text_error::TextError;
use regex::Regex;

/// Names that [`PreTokenizer::from_name`] knows, for messages.
pub(super) const SUPPORTED: &str = "gpt-2, smollm, qwen2 (deepseek-r1-qwen), llama-bpe (llama3, llama-v3), default";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const LLAMA_BPE: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// A way of cutting text into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreTokenizer {
    /// The pattern of GPT-2.
    Gpt2,
    /// Each digit alone, then the pattern of GPT-2.
    SmolLm,
    /// Single digits, line breaks kept with what precedes them.
    Qwen2,
    /// As [`PreTokenizer::Qwen2`] with up to three digits in a word; whole words of the vocabulary are not merged anew.
    LlamaBpe,
}

impl PreTokenizer {
    /// The pre-tokenizer a GGUF file names.
    ///
    /// # Errors
    /// [`TextError::UnsupportedPreTokenizer`].
    pub fn from_name(name: &str) -> Result<Self, TextError> {
        Ok(match name {
            "gpt-2" | "default" | "" => Self::Gpt2,
            "smollm" => Self::SmolLm,
            "qwen2" | "deepseek-r1-qwen" => Self::Qwen2,
            "llama-bpe" | "llama3" | "llama-v3" => Self::LlamaBpe,
            _ => {
                return Err(TextError::UnsupportedPreTokenizer { name: name.to_owned(), supported: SUPPORTED });
            }
        })
    }

    /// The published pattern, for tools with lookahead. That of [`PreTokenizer::SmolLm`] applies between the digits.
    #[must_use]
    pub fn published_pattern(self) -> String {
        let pattern = self.pattern();
        format!(r"{}\s+(?!\S)|\s+", pattern.strip_suffix(r"\s+").unwrap_or(pattern))
    }

    fn pattern(self) -> &'static str {
        match self {
            Self::Gpt2 | Self::SmolLm => GPT2,
            Self::Qwen2 => QWEN2,
            Self::LlamaBpe => LLAMA_BPE,
        }
    }

    /// Whether a word that is in the vocabulary is taken whole, whatever the merges say.
    pub(super) fn takes_whole_words(self) -> bool {
        self == Self::LlamaBpe
    }
}

/// A pre-tokenizer, ready to cut.
#[derive(Debug)]
pub(super) struct Splitter {
    kind: PreTokenizer,
    regex: Regex,
}

impl Splitter {
    pub(super) fn new(kind: PreTokenizer) -> Result<Self, TextError> {
        let regex = Regex::new(kind.pattern()).map_err(|e| TextError::Encode { reason: e.to_string() })?;
        Ok(Self { kind, regex })
    }

    /// Hands every word of `text`, in order, to `word`. The words' concatenation is `text`.
    pub(super) fn split<'t, E>(&self, text: &'t str, mut word: impl FnMut(&'t str) -> Result<(), E>) -> Result<(), E> {
        if self.kind != PreTokenizer::SmolLm {
            return self.match_words(text, &mut word);
        }
        let mut start = 0;
        for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
            let end = at + digit.len_utf8();
            self.match_words(&text[start..at], &mut word)?;
            word(&text[at..end])?;
            start = end;
        }
        self.match_words(&text[start..], &mut word)
    }

    fn match_words<'t, E>(&self, text: &'t str, word: &mut impl FnMut(&'t str) -> Result<(), E>) -> Result<(), E> {
        let mut at = 0;
        while let Some(found) = self.regex.find_at(text, at) {
            // The patterns leave no gap; a gap would be a word of its own.
            if found.start() > at {
                word(&text[at..found.start()])?;
            }
            let end = found.start() + self.kept_len(found.as_str(), found.end() == text.len());
            word(&text[found.start()..end])?;
            at = end;
        }
        if at < text.len() { word(&text[at..]) } else { Ok(()) }
    }

    /// Bytes of a match that belong to its word: `\s+(?!\S)` leaves one character of white space to the next word.
    fn kept_len(&self, matched: &str, at_end: bool) -> usize {
        let mut chars = matched.chars();
        let Some(last) = chars.next_back() else { return 0 };
        let rest = chars.as_str();
        // Only white space ends in white space, but for the patterns that keep line breaks.
        let keeps_breaks = !matches!(self.kind, PreTokenizer::Gpt2 | PreTokenizer::SmolLm);
        let kept = at_end || rest.is_empty() || !last.is_whitespace() || (keeps_breaks && matches!(last, '\r' | '\n'));
        if kept { matched.len() } else { rest.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(kind: PreTokenizer, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        Splitter::new(kind)
            .unwrap()
            .split(text, |w| {
                words.push(w.to_owned());
                Ok::<_, ()>(())
            })
            .unwrap();
        words
    }

    #[test]
    fn white_space_leaves_its_last_character_to_the_next_word() {
        assert_eq!(
            words(PreTokenizer::Gpt2, "  two  \n x"),
            ["  two"[..1].to_owned(), " two".into(), "  \n".into(), " x".into()]
        );
        assert_eq!(words(PreTokenizer::Gpt2, "a  "), ["a", "  "]);
        assert_eq!(words(PreTokenizer::Qwen2, "a \n  b\n"), ["a", " \n", " ", " b", "\n"]);
        assert_eq!(words(PreTokenizer::Qwen2, "\t\tx y"), ["\t", "\tx", " y"]);
    }

    #[test]
    fn digits_are_cut_as_each_name_says() {
        assert_eq!(words(PreTokenizer::Gpt2, "a 1234"), ["a", " 1234"]);
        assert_eq!(words(PreTokenizer::SmolLm, "a  12"), ["a", "  ", "1", "2"]);
        assert_eq!(words(PreTokenizer::Qwen2, "a 1234"), ["a", " ", "1", "2", "3", "4"]);
        assert_eq!(words(PreTokenizer::LlamaBpe, "a 1234"), ["a", " ", "123", "4"]);
    }

    #[test]
    fn contractions() {
        assert_eq!(words(PreTokenizer::Gpt2, "we'll I'M"), ["we", "'ll", " I", "'", "M"]);
        assert_eq!(words(PreTokenizer::Qwen2, "we'll I'M"), ["we", "'ll", " I", "'M"]);
    }

    #[test]
    fn unknown_names_are_refused() {
        let message = PreTokenizer::from_name("tekken").unwrap_err().to_string();
        assert!(message.contains("tekken") && message.contains("qwen2"), "{message}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
        /// Against the published patterns, lookahead and all, in a backtracking engine.
        #[test]
        fn equals_the_published_patterns(text in r"([ \t\n\r\u{a0}]{1,3}|[a-c']{1,3}|[0-9]{1,4}|[!<é你🙂]|'(ll|S|re)){0,24}") {
            for kind in [PreTokenizer::Gpt2, PreTokenizer::Qwen2, PreTokenizer::LlamaBpe] {
                let published = kind.published_pattern();
                prop_assert!(published.ends_with(r"|\s+(?!\S)|\s+"));
                let regex = tokenizers::utils::SysRegex::new(&published).unwrap();
                let wanted: Vec<_> = regex.find_iter(&text).map(|(a, b)| text[a..b].to_owned()).collect();
                prop_assert_eq!(words(kind, &text), wanted);
            }
        }
    }
}
