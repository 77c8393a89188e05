//! SentencePiece's byte-pair encoding: of all neighbours that together are a token, those of the highest score are merged first.

use super::byte_tokens::ByteTokens;
use super::check_lengths;
use crate::text_error::TextError;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// Tokens with their scores.
#[derive(Debug)]
pub(super) struct ScoredMerger {
    tokens: HashMap<String, (TokenId, f32)>,
    longest: usize,
    bytes: ByteTokens,
    unknown: Option<TokenId>,
}

impl ScoredMerger {
    /// Tokens for which `usable` does not hold can never come out of a word.
    pub(super) fn new(vocabulary: &Vocabulary, usable: impl Fn(TokenId) -> bool) -> Result<Self, TextError> {
        let texts = (0..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds)).zip(&vocabulary.scores);
        let texts =
            texts.filter(|((id, (text, kind)), _)| usable(*id) && **kind != TokenKind::Byte && !text.is_empty());
        let mut tokens = HashMap::with_capacity(vocabulary.tokens.len());
        for ((id, (text, _)), score) in texts {
            tokens.entry(text.clone()).or_insert((id, *score));
        }
        let longest = check_lengths(tokens.keys())?;
        Ok(Self { tokens, longest, bytes: ByteTokens::new(vocabulary), unknown: vocabulary.unknown })
    }

    /// The id of a token as the vocabulary spells it.
    pub(super) fn id(&self, token: &str) -> Option<TokenId> {
        self.tokens.get(token).map(|(id, _)| *id)
    }

    /// Appends the ids of `word`. Time grows with its length, times the logarithm.
    pub(super) fn encode_word(&self, word: &str, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut pieces: Vec<Piece> = word
            .char_indices()
            .enumerate()
            .map(|(n, (at, char))| Piece {
                start: at,
                end: at + char.len_utf8(),
                before: n.wrapping_sub(1),
                next: n + 1,
            })
            .collect();
        let mut pairs = BinaryHeap::with_capacity(pieces.len());
        for left in 1..pieces.len() {
            pairs.extend(self.pair(word, &pieces, left - 1));
        }
        while let Some(pair) = pairs.pop() {
            let (left, right) = (pieces[pair.left], pieces[pair.left].next);
            // One of the two has been merged with another since.
            if left.is_gone() || right >= pieces.len() || pieces[right].end - left.start != pair.len {
                continue;
            }
            let Piece { end, next, .. } = pieces[right];
            pieces[right].end = pieces[right].start;
            pieces[pair.left].end = end;
            pieces[pair.left].next = next;
            if let Some(after) = pieces.get_mut(next) {
                after.before = pair.left;
            }
            pairs.extend(self.pair(word, &pieces, pair.left));
            if left.before < pieces.len() {
                pairs.extend(self.pair(word, &pieces, left.before));
            }
        }
        for piece in pieces.iter().filter(|piece| !piece.is_gone()) {
            let text = &word[piece.start..piece.end];
            match self.tokens.get(text) {
                Some((id, _)) => ids.push(*id),
                // Only single characters are no tokens.
                None => text.chars().try_for_each(|char| self.bytes.spell(char, self.unknown, ids))?,
            }
        }
        Ok(())
    }

    /// The piece `left` with its neighbour, if they make a token.
    fn pair(&self, word: &str, pieces: &[Piece], left: usize) -> Option<Pair> {
        let start = pieces[left].start;
        let end = pieces.get(pieces[left].next)?.end;
        if end - start > self.longest {
            return None;
        }
        let (_, score) = self.tokens.get(&word[start..end])?;
        Some(Pair { score: *score, left, len: end - start })
    }
}

/// A part of the word; empty once it is merged into the one before.
#[derive(Debug, Clone, Copy)]
struct Piece {
    start: usize,
    end: usize,
    /// `usize::MAX` at the start.
    before: usize,
    next: usize,
}

impl Piece {
    fn is_gone(&self) -> bool {
        self.start == self.end
    }
}

/// Two neighbours that make a token.
#[derive(Debug, PartialEq)]
struct Pair {
    score: f32,
    left: usize,
    len: usize,
}

impl Eq for Pair {}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score
            .total_cmp(&other.score)
            .then_with(|| other.left.cmp(&self.left))
            .then_with(|| self.len.cmp(&other.len))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
