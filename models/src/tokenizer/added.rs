//! Added tokens: literals that are matched whole in text.

use crate::text_error::TextError;
use crate::vocabulary::Matching;
use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use npuhal_core::stage::TokenId;
use std::collections::HashMap;
use std::ops::Range;

/// One literal.
pub(super) struct Literal {
    pub(super) id: TokenId,
    pub(super) text: String,
    pub(super) matching: Matching,
}

/// Literals that are looked for together.
#[derive(Debug)]
pub(super) struct AddedTokens {
    /// `None` where there are no literals.
    matcher: Option<AhoCorasick>,
    /// By pattern number.
    patterns: Vec<(TokenId, Matching)>,
    by_text: HashMap<String, TokenId>,
}

impl AddedTokens {
    pub(super) fn new(literals: impl Iterator<Item = Literal>) -> Result<Self, TextError> {
        let literals: Vec<Literal> = literals.filter(|literal| !literal.text.is_empty()).collect();
        let matcher = (!literals.is_empty())
            .then(|| {
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .kind(Some(AhoCorasickKind::ContiguousNFA))
                    .build(literals.iter().map(|literal| &literal.text))
            })
            .transpose()
            .map_err(|e| TextError::Encode { reason: format!("added tokens: {e}") })?;
        let patterns = literals.iter().map(|literal| (literal.id, literal.matching)).collect();
        let by_text = literals.into_iter().map(|literal| (literal.text, literal.id)).collect();
        Ok(Self { matcher, patterns, by_text })
    }

    /// Ids and ranges, in order and without overlap; the earliest first, the longest on ties. A range holds the white space
    /// that its token takes.
    pub(super) fn find_in<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (TokenId, Range<usize>)> + 't {
        let matches = self.matcher.iter().flat_map(move |matcher| matcher.find_iter(text));
        let mut done = 0;
        matches.filter_map(move |found| {
            let (id, matching) = self.patterns[found.pattern().as_usize()];
            // White space that the token before has taken may hold a match.
            if found.start() < done || (matching.whole_word && !stands_alone(text, found.range())) {
                return None;
            }
            let (mut start, mut end) = (found.start(), found.end());
            if matching.strips_left {
                start = done + text[done..start].trim_end().len();
            }
            if matching.strips_right {
                end += text[end..].len() - text[end..].trim_start().len();
            }
            done = end;
            Some((id, start..end))
        })
    }

    pub(super) fn id(&self, text: &str) -> Option<TokenId> {
        self.by_text.get(text).copied()
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        self.by_text.keys().map(String::as_str)
    }
}

/// Whether no character of a word is next to `range`.
fn stands_alone(text: &str, range: Range<usize>) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..range.start].chars().next_back().is_some_and(is_word)
        && !text[range.end..].chars().next().is_some_and(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(matching: Matching, text: &str) -> Vec<(u32, Range<usize>)> {
        let literals = ["<a>", "<ab>"].into_iter().zip(0..);
        let literals = literals.map(|(text, id)| Literal { id, text: text.to_owned(), matching });
        AddedTokens::new(literals).unwrap().find_in(text).collect()
    }

    #[test]
    fn white_space_goes_to_the_token_that_takes_it() {
        let plain = Matching::default();
        assert_eq!(found(plain, " <a> <ab>"), [(0, 1..4), (1, 5..9)]);
        assert_eq!(found(Matching { strips_left: true, ..plain }, "x \n<a> <ab>"), [(0, 1..6), (1, 6..11)]);
        assert_eq!(found(Matching { strips_right: true, ..plain }, "<a>  <ab>\n"), [(0, 0..5), (1, 5..10)]);
    }

    #[test]
    fn whole_words_stand_alone() {
        let whole = Matching { whole_word: true, ..Matching::default() };
        assert_eq!(found(whole, "x<a> <a>, <ab>é <a>"), [(0, 5..8), (0, 17..20)]);
    }
}
