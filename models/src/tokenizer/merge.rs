//! Byte-pair merging of one word, on the BPE model of the `tokenizers` library.

use super::alphabet::Alphabet;
use crate::text_error::TextError;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};

/// Vocabulary and merges of byte-level BPE.
#[derive(Debug)]
pub(super) struct Merger {
    bpe: BPE,
    /// Bytes without a token.
    missing: [bool; 256],
}

impl Merger {
    /// Tokens for which `is_control` holds, and unused ones, can never come out of a word: they are left out with the merges
    /// that make them.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        alphabet: &Alphabet,
        whole_words: bool,
        is_control: impl Fn(TokenId) -> bool,
    ) -> Result<Self, TextError> {
        let mut vocab = Vocab::with_capacity(vocabulary.tokens.len());
        for ((id, token), kind) in (0..).zip(&vocabulary.tokens).zip(&vocabulary.kinds) {
            if *kind != TokenKind::Unused && !is_control(id) && !token.is_empty() {
                vocab.insert(token.clone(), id);
            }
        }
        let mut merges = Vec::with_capacity(vocabulary.merges.len());
        for (rank, merge) in vocabulary.merges.iter().enumerate() {
            let parts = merge.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.contains(' '));
            let Some((left, right)) = parts.filter(|(_, right)| !right.is_empty()) else {
                return Err(TextError::Vocabulary {
                    field: "merges",
                    wanted: format!("two tokens with a space between as merge {rank}"),
                    found: format!("{merge:?}"),
                });
            };
            merges.push((left.to_owned(), right.to_owned()));
        }
        let mut missing = [false; 256];
        let mut buffer = [0; 4];
        for byte in 0..=255u8 {
            missing[usize::from(byte)] = !vocab.contains_key(&*alphabet.char(byte).encode_utf8(&mut buffer));
        }
        let bpe = BpeBuilder::new()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(whole_words)
            .cache_capacity(0)
            .build()
            .map_err(|e| TextError::Vocabulary {
                field: "merges",
                wanted: "merges of tokens that the vocabulary has".to_owned(),
                found: e.to_string(),
            })?;
        Ok(Self { bpe, missing })
    }

    /// The id of a token as the vocabulary spells it.
    pub(super) fn id(&self, token: &str) -> Option<TokenId> {
        self.bpe.token_to_id(token)
    }

    /// Appends the ids of `word`; `spelled` is room to work in.
    pub(super) fn merge_word(
        &self,
        word: &str,
        alphabet: &Alphabet,
        spelled: &mut String,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        spelled.clear();
        for byte in word.bytes() {
            if self.missing[usize::from(byte)] {
                return Err(TextError::NoTokenForByte { byte });
            }
            spelled.push(alphabet.char(byte));
        }
        let tokens = self.bpe.tokenize(spelled).map_err(|e| TextError::Encode { reason: e.to_string() })?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}
