//! SentencePiece's unigram model: the sequence of tokens whose scores have the highest sum.

use super::byte_tokens::ByteTokens;
use super::check_lengths;
use crate::text_error::TextError;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use std::collections::HashMap;

/// What an unknown character costs beyond the least likely token.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Tokens in a tree of bytes.
#[derive(Debug)]
pub(super) struct Unigram {
    /// From a node, by a byte, to a node; the root is 0.
    edges: HashMap<(u32, u8), u32>,
    /// By node.
    tokens: Vec<Option<(TokenId, f64)>>,
    unknown_score: f64,
    unknown: Option<TokenId>,
    bytes: Option<ByteTokens>,
}

/// The best way to a place in the word.
#[derive(Debug, Clone, Copy)]
struct Best {
    score: f64,
    start: usize,
    /// `None` for an unknown character.
    id: Option<TokenId>,
}

impl Unigram {
    /// Tokens for which `usable` does not hold, and those without a finite score, can never come out of a word.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        byte_fallback: bool,
        usable: impl Fn(TokenId) -> bool,
    ) -> Result<Self, TextError> {
        let mut tree = Self {
            edges: HashMap::new(),
            tokens: vec![None],
            unknown_score: 0.0,
            unknown: vocabulary.unknown,
            bytes: byte_fallback.then(|| ByteTokens::new(vocabulary)),
        };
        check_lengths(vocabulary.tokens.iter())?;
        let mut lowest = f64::INFINITY;
        for (id, token) in (0..).zip(&vocabulary.tokens) {
            let at = id as usize;
            let score = f64::from(vocabulary.scores[at]);
            if usable(id) && vocabulary.kinds[at] != TokenKind::Byte && score.is_finite() && !token.is_empty() {
                lowest = lowest.min(score);
                tree.insert(token, id, score);
            }
        }
        tree.unknown_score = if lowest.is_finite() { lowest } else { 0.0 } - UNKNOWN_PENALTY;
        Ok(tree)
    }

    fn insert(&mut self, text: &str, id: TokenId, score: f64) {
        let mut node = 0;
        for byte in text.bytes() {
            let next = self.tokens.len() as u32;
            node = *self.edges.entry((node, byte)).or_insert(next);
            if node == next {
                self.tokens.push(None);
            }
        }
        self.tokens[node as usize].get_or_insert((id, score));
    }

    /// The id of a token as the vocabulary spells it.
    pub(super) fn id(&self, token: &str) -> Option<TokenId> {
        let node = token.bytes().try_fold(0, |node, byte| self.edges.get(&(node, byte)).copied())?;
        self.tokens[node as usize].map(|(id, _)| id)
    }

    /// Appends the ids of `word`. Time grows with its length, times that of the longest token.
    pub(super) fn encode_word(&self, word: &str, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut best: Vec<Option<Best>> = vec![None; word.len() + 1];
        best[0] = Some(Best { score: 0.0, start: 0, id: None });
        for (at, char) in word.char_indices() {
            let Some(Best { score: so_far, .. }) = best[at] else { continue };
            let mut node = 0;
            let mut has_char = false;
            for (len, byte) in (1..).zip(word.as_bytes()[at..].iter()) {
                let Some(next) = self.edges.get(&(node, *byte)) else { break };
                node = *next;
                if let Some((id, score)) = self.tokens[node as usize] {
                    has_char |= len == char.len_utf8();
                    take_better(&mut best[at + len], Best { score: so_far + score, start: at, id: Some(id) });
                }
            }
            if !has_char {
                let unknown = Best { score: so_far + self.unknown_score, start: at, id: None };
                take_better(&mut best[at + char.len_utf8()], unknown);
            }
        }
        self.trace(word, &best, ids)
    }

    fn trace(&self, word: &str, best: &[Option<Best>], ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut way = Vec::new();
        let mut end = word.len();
        while end > 0 {
            // Every character's end is reached, by its token or as unknown.
            let Some(step) = best[end] else { break };
            way.push((step.start..end, step.id));
            end = step.start;
        }
        let mut after_unknown = false;
        for (range, id) in way.into_iter().rev() {
            match (id, &self.bytes) {
                (Some(id), _) => ids.push(id),
                (None, Some(bytes)) => {
                    word[range].chars().try_for_each(|char| bytes.spell(char, self.unknown, ids))?;
                }
                // Unknown characters next to each other are one token.
                (None, None) if after_unknown => {}
                (None, None) => {
                    let character = word[range].chars().next().unwrap_or_default();
                    ids.push(self.unknown.ok_or(TextError::NoTokenForCharacter { character })?);
                }
            }
            after_unknown = id.is_none();
        }
        Ok(())
    }
}

fn take_better(place: &mut Option<Best>, way: Best) {
    if place.is_none_or(|best| way.score > best.score) {
        *place = Some(way);
    }
}
