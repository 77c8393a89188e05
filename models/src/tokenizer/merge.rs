//! Byte-pair merging of one word, on the BPE model of the `tokenizers` library.

use super::alphabet::Alphabet;
use crate::text_error::TextError;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use std::collections::HashSet;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};

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
        let usable = |id: TokenId| vocabulary.kinds[id as usize] != TokenKind::Unused && !is_control(id);
        let vocab = usable_tokens(vocabulary, usable);
        let mut missing = [false; 256];
        let mut buffer = [0; 4];
        for byte in 0..=255u8 {
            missing[usize::from(byte)] = !vocab.contains_key(&*alphabet.char(byte).encode_utf8(&mut buffer));
        }
        let longest = vocab.keys().map(String::len).max().unwrap_or(0);
        let all = merges(vocabulary, &HashSet::new(), longest);
        let bpe = match all.and_then(|merges| build(vocab, merges, whole_words)) {
            Ok(bpe) => bpe,
            Err(error) => {
                // Rare, so that the search is made only now: merges that make what must not come out.
                let left_out: HashSet<&str> =
                    (0..).zip(&vocabulary.tokens).filter(|(id, _)| !usable(*id)).map(|(_, t)| t.as_str()).collect();
                let fewer = merges(vocabulary, &left_out, longest)?;
                if fewer.len() == vocabulary.merges.len() {
                    return Err(error);
                }
                build(usable_tokens(vocabulary, usable), fewer, whole_words)?
            }
        };
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

fn usable_tokens(vocabulary: &Vocabulary, usable: impl Fn(TokenId) -> bool) -> Vocab {
    let mut vocab = Vocab::with_capacity(vocabulary.tokens.len());
    for (id, token) in (0..).zip(&vocabulary.tokens) {
        if usable(id) && !token.is_empty() {
            vocab.insert(token.clone(), id);
        }
    }
    vocab
}

/// The merges in which no token of `left_out` takes part. `longest` is the length of the longest token in use.
fn merges(vocabulary: &Vocabulary, left_out: &HashSet<&str>, longest: usize) -> Result<Merges, TextError> {
    let mut merges = Vec::with_capacity(vocabulary.merges.len());
    for (rank, merge) in vocabulary.merges.iter().enumerate() {
        let malformed = |wanted: &str| TextError::Vocabulary {
            field: "merges",
            wanted: format!("{wanted} as merge {rank}"),
            found: format!("{merge:?}"),
        };
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(malformed("two tokens with a space between"));
        };
        if left.is_empty() || right.is_empty() || right.contains(' ') {
            return Err(malformed("two tokens with a space between"));
        }
        let touched = !left_out.is_empty()
            && [left, right, &[left, right].concat()].iter().any(|token| left_out.contains(*token));
        if touched {
            continue;
        }
        // The library relies on it.
        if left.len() + right.len() > longest {
            return Err(malformed("two tokens that make a third one of the vocabulary"));
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

fn build(vocab: Vocab, merges: Merges, whole_words: bool) -> Result<BPE, TextError> {
    let builder = BpeBuilder::new().vocab_and_merges(vocab, merges).ignore_merges(whole_words).cache_capacity(0);
    builder.build().map_err(|e| TextError::Vocabulary {
        field: "merges",
        wanted: "merges of tokens that the vocabulary has".to_owned(),
        found: e.to_string(),
    })
}
