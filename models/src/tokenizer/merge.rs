//! Byte-pair encoding by a list of merges, on the model of the `tokenizers` library.

use super::alphabet::Alphabet;
use super::byte_tokens::ByteTokens;
use crate::text_error::TextError;
use crate::vocabulary::Vocabulary;
use npuhal_core::stage::TokenId;
use std::collections::HashSet;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};

/// Vocabulary and merges.
#[derive(Debug)]
pub(super) struct Merger {
    bpe: BPE,
    /// Where words are spelled in the byte-level alphabet.
    alphabet: Option<Alphabet>,
    /// The characters that have tokens; `None` where all have, one by one or by their bytes.
    known: Option<HashSet<char>>,
    unknown: Option<TokenId>,
    fuse_unknown: bool,
}

/// What a file says of its merges.
#[derive(Debug, Clone, Copy)]
pub(super) struct MergeRules {
    pub(super) byte_level: bool,
    pub(super) whole_words: bool,
    pub(super) byte_fallback: bool,
    pub(super) fuse_unknown: bool,
}

impl Merger {
    /// Tokens for which `usable` does not hold can never come out of a word: they are left out with the merges that make them.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        rules: MergeRules,
        usable: impl Fn(TokenId) -> bool,
    ) -> Result<Self, TextError> {
        let vocab = usable_tokens(vocabulary, &usable);
        let alphabet = rules.byte_level.then(Alphabet::new);
        let known = known_characters(&vocab, alphabet.as_ref(), rules.byte_fallback);
        let longest = vocab.keys().map(String::len).max().unwrap_or(0);
        let all = merges(vocabulary, &HashSet::new(), longest);
        let bpe = match all.and_then(|merges| build(vocab, merges, rules)) {
            Ok(bpe) => bpe,
            Err(error) => {
                // Rare, so that the search is made only now: merges that make what must not come out.
                let left_out: HashSet<&str> =
                    (0..).zip(&vocabulary.tokens).filter(|(id, _)| !usable(*id)).map(|(_, t)| t.as_str()).collect();
                let fewer = merges(vocabulary, &left_out, longest)?;
                if fewer.len() == vocabulary.merges.len() {
                    return Err(error);
                }
                build(usable_tokens(vocabulary, &usable), fewer, rules)?
            }
        };
        Ok(Self { bpe, alphabet, known, unknown: vocabulary.unknown, fuse_unknown: rules.fuse_unknown })
    }

    /// The id of a token as the vocabulary spells it.
    pub(super) fn id(&self, token: &str) -> Option<TokenId> {
        self.bpe.token_to_id(token)
    }

    /// Appends the ids of `word`; `spelled` is room to work in.
    pub(super) fn encode_word(
        &self,
        word: &str,
        spelled: &mut String,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let word = match &self.alphabet {
            Some(alphabet) => {
                spelled.clear();
                spelled.extend(word.bytes().map(|byte| alphabet.char(byte)));
                spelled.as_str()
            }
            None => word,
        };
        let Some(known) = &self.known else { return self.merge(word, ids) };
        let (mut start, mut after_unknown) = (0, false);
        for (at, char) in word.char_indices() {
            if known.contains(&char) {
                after_unknown = false;
                continue;
            }
            self.merge(&word[start..at], ids)?;
            start = at + char.len_utf8();
            let unknown = self.unknown.ok_or_else(|| self.no_token(char))?;
            if !(after_unknown && self.fuse_unknown) {
                ids.push(unknown);
            }
            after_unknown = true;
        }
        self.merge(&word[start..], ids)
    }

    fn merge(&self, word: &str, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        if word.is_empty() {
            return Ok(());
        }
        let tokens = self.bpe.tokenize(word).map_err(|e| TextError::Encode { reason: e.to_string() })?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }

    fn no_token(&self, character: char) -> TextError {
        match self.alphabet.as_ref().and_then(|alphabet| alphabet.byte(character)) {
            Some(byte) => TextError::NoTokenForByte { byte },
            None => TextError::NoTokenForCharacter { character },
        }
    }
}

fn known_characters(vocab: &Vocab, alphabet: Option<&Alphabet>, byte_fallback: bool) -> Option<HashSet<char>> {
    let single = |text: &str| {
        let mut chars = text.chars();
        chars.next().filter(|_| chars.next().is_none())
    };
    let known: HashSet<char> = vocab.keys().filter_map(|text| single(text)).collect();
    let all = match alphabet {
        Some(alphabet) => (0..=255).all(|byte| known.contains(&alphabet.char(byte))),
        None => byte_fallback && ByteTokens::is_complete(|text| vocab.contains_key(text)),
    };
    (!all).then_some(known)
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

fn build(vocab: Vocab, merges: Merges, rules: MergeRules) -> Result<BPE, TextError> {
    let builder = BpeBuilder::new()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(rules.whole_words)
        .byte_fallback(rules.byte_fallback)
        .cache_capacity(0);
    builder.build().map_err(|e| TextError::Vocabulary {
        field: "merges",
        wanted: "merges of tokens that the vocabulary has".to_owned(),
        found: e.to_string(),
    })
}
