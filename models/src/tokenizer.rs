//! Byte-level BPE tokenizer, built from a model file's metadata alone.
//!
//! Text is cut at added tokens (earliest first, longest on ties), the rest into words by the file's pre-tokenizer, and each
//! word's bytes are merged. Nothing is normalised: model files state no normalisation.

mod alphabet;
mod merge;
mod split;

pub use split::PreTokenizer;

use crate::text_error::TextError;
use crate::vocabulary::{TokenKind, Vocabulary};
use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use alphabet::Alphabet;
use merge::Merger;
use npuhal_core::stage::TokenId;
use split::Splitter;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What becomes of control tokens' literals in a text that is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// They become the control tokens: for text that a template or a trusted caller made.
    Parse,
    /// They are ordinary text: for text that a user wrote.
    Plain,
}

/// What becomes of control tokens in ids that are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlTokens {
    /// Their literals are part of the text.
    Show,
    /// They leave no text.
    Hide,
}

/// A tokenizer; cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    texts: Texts,
    kinds: Vec<TokenKind>,
    alphabet: Alphabet,
    splitter: Splitter,
    merger: Merger,
    /// Control and user-defined tokens.
    added: AddedTokens,
    /// User-defined tokens only.
    user_defined: AddedTokens,
    bos: Option<TokenId>,
    eos: Vec<TokenId>,
    add_bos: bool,
    note: Option<String>,
    usable_ids: usize,
}

impl Tokenizer {
    /// Builds the tokenizer that `vocabulary` describes.
    ///
    /// # Errors
    /// A tokenizer model or pre-tokenizer that is not supported, or a vocabulary that contradicts itself.
    pub fn from_vocabulary(vocabulary: &Vocabulary) -> Result<Self, TextError> {
        if vocabulary.model != "gpt2" {
            return Err(TextError::UnsupportedModel {
                model: vocabulary.model.clone(),
                supported: "gpt2 (byte-level BPE)",
            });
        }
        check_ids(vocabulary)?;
        let kind = PreTokenizer::from_name(&vocabulary.pre_tokenizer)?;
        let kinds = effective_kinds(vocabulary);
        let alphabet = Alphabet::new();
        let is_control = |id: TokenId| is_control(kinds[id as usize]);
        let merger = Merger::new(vocabulary, &alphabet, kind.takes_whole_words(), is_control)?;
        let user_defined = |id: TokenId| kinds[id as usize] == TokenKind::UserDefined;
        let shared = Shared {
            texts: Texts::new(&vocabulary.tokens)?,
            splitter: Splitter::new(kind)?,
            merger,
            added: AddedTokens::new(&vocabulary.tokens, |id| is_control(id) || user_defined(id))?,
            user_defined: AddedTokens::new(&vocabulary.tokens, user_defined)?,
            bos: vocabulary.bos,
            eos: vocabulary.eos.clone(),
            add_bos: vocabulary.add_bos,
            note: pre_tokenizer_note(&vocabulary.pre_tokenizer),
            usable_ids: kinds.iter().rposition(|kind| *kind != TokenKind::Unused).map_or(kinds.len(), |last| last + 1),
            alphabet,
            kinds,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Something a user should know about this vocabulary: an assumption that was made where the file states nothing.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        self.shared.note.as_deref()
    }

    /// The ids of `text`. No bos is added.
    ///
    /// # Errors
    /// [`TextError::NoTokenForByte`].
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<TokenId>, TextError> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 1);
        self.encode_into(text, specials, &mut ids)?;
        Ok(ids)
    }

    /// As [`Tokenizer::encode`], appended to `ids`.
    ///
    /// # Errors
    /// [`TextError::NoTokenForByte`].
    pub fn encode_into(&self, text: &str, specials: Specials, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        let added = match specials {
            Specials::Parse => &self.shared.added,
            Specials::Plain => &self.shared.user_defined,
        };
        let mut spelled = String::new();
        let mut start = 0;
        for (id, range) in added.find_in(text) {
            self.encode_words(&text[start..range.start], &mut spelled, ids)?;
            ids.push(id);
            start = range.end;
        }
        self.encode_words(&text[start..], &mut spelled, ids)
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each maximal subpart; ids outside the vocabulary
    /// and unused ones leave nothing.
    #[must_use]
    pub fn decode(&self, ids: &[TokenId], controls: ControlTokens) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for id in ids {
            self.decode_into(*id, controls, &mut bytes);
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// Appends the bytes that `id` leaves in decoded text; they need not end at a character's border.
    pub fn decode_into(&self, id: TokenId, controls: ControlTokens, bytes: &mut Vec<u8>) {
        let Some((text, kind)) = self.text_and_kind(id) else { return };
        match kind {
            TokenKind::Normal | TokenKind::Byte => self.shared.alphabet.decode_into(text, bytes),
            TokenKind::UserDefined => bytes.extend_from_slice(text.as_bytes()),
            TokenKind::Control | TokenKind::Unknown if controls == ControlTokens::Show => {
                bytes.extend_from_slice(text.as_bytes());
            }
            TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => {}
        }
    }

    /// The bytes that `id` stands for, control tokens' literals included.
    #[must_use]
    pub fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.text_and_kind(id)?;
        let mut bytes = Vec::new();
        self.decode_into(id, ControlTokens::Show, &mut bytes);
        Some(bytes)
    }

    /// The token as the vocabulary spells it: in the byte-level alphabet, or plain for added tokens.
    #[must_use]
    pub fn token_text(&self, id: TokenId) -> Option<&str> {
        self.shared.texts.get(id)
    }

    /// The id of an added token's literal, or of a token as the vocabulary spells it.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.shared.added.id(text).or_else(|| self.shared.merger.id(text))
    }

    /// Number of ids.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.shared.kinds.len()
    }

    /// Number of ids up to the last that stands for anything. Those behind it, unused or without a token, are padding.
    #[must_use]
    pub fn usable_ids(&self) -> usize {
        self.shared.usable_ids
    }

    /// Ids that end a generation, ascending.
    #[must_use]
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.shared.eos
    }

    /// Whether `id` ends a generation.
    #[must_use]
    pub fn is_eos(&self, id: TokenId) -> bool {
        self.shared.eos.contains(&id)
    }

    /// Whether `id` is a control token: made by templates only, hidden from output.
    #[must_use]
    pub fn is_control(&self, id: TokenId) -> bool {
        self.shared.kinds.get(id as usize).is_some_and(|kind| is_control(*kind))
    }

    /// Id of the beginning of a sequence.
    #[must_use]
    pub fn bos(&self) -> Option<TokenId> {
        self.shared.bos
    }

    /// Whether a sequence is to start with [`Tokenizer::bos`].
    #[must_use]
    pub fn add_bos(&self) -> bool {
        self.shared.add_bos
    }

    /// Added tokens in `text`, earliest first and longest on ties: id and byte range.
    pub(crate) fn find_added<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (TokenId, Range<usize>)> + 't {
        self.shared.added.find_in(text)
    }

    /// Ids of the control tokens, ascending.
    pub(crate) fn control_ids(&self) -> impl Iterator<Item = TokenId> + '_ {
        (0..).zip(&self.shared.kinds).filter(|(_, kind)| is_control(**kind)).map(|(id, _)| id)
    }

    /// Literals of the added tokens that are text.
    pub(crate) fn user_defined(&self) -> impl Iterator<Item = &str> {
        self.shared.user_defined.by_text.keys().map(String::as_str)
    }

    fn text_and_kind(&self, id: TokenId) -> Option<(&str, TokenKind)> {
        Some((self.shared.texts.get(id)?, *self.shared.kinds.get(id as usize)?))
    }

    fn encode_words(&self, text: &str, spelled: &mut String, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        let Shared { splitter, merger, alphabet, .. } = &*self.shared;
        splitter.split(text, |word| merger.merge_word(word, alphabet, spelled, ids))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

/// Unknown-text tokens are treated as control tokens: they are no text and are hidden.
fn is_control(kind: TokenKind) -> bool {
    matches!(kind, TokenKind::Control | TokenKind::Unknown)
}

/// Kinds by id. Ids that begin or end sequences are control tokens, even where a file calls them ordinary.
fn effective_kinds(vocabulary: &Vocabulary) -> Vec<TokenKind> {
    let mut kinds = vocabulary.kinds.clone();
    for id in vocabulary.eos.iter().chain(&vocabulary.bos) {
        kinds[*id as usize] = TokenKind::Control;
    }
    kinds
}

fn check_ids(vocabulary: &Vocabulary) -> Result<(), TextError> {
    let count = vocabulary.tokens.len();
    if count == 0 || vocabulary.kinds.len() != count || u32::try_from(count).is_err() {
        return Err(TextError::Vocabulary {
            field: "token kinds",
            wanted: "as many as tokens, and at least one".to_owned(),
            found: format!("{count} tokens and {} kinds", vocabulary.kinds.len()),
        });
    }
    let beyond = |id: &&TokenId| **id as usize >= count;
    let stated = vocabulary.eos.iter().chain(&vocabulary.bos).chain(&vocabulary.unknown).chain(&vocabulary.padding);
    match stated.into_iter().find(beyond) {
        Some(id) => Err(TextError::UnknownId { id: *id, vocab_size: count }),
        None => Ok(()),
    }
}

fn pre_tokenizer_note(name: &str) -> Option<String> {
    let found = match name {
        "" => "the model file names no pre-tokenizer",
        "default" => "the model file names the pre-tokenizer \"default\"",
        _ => return None,
    };
    Some(format!("{found}; gpt-2's is used, which may not be the one the model was trained with"))
}

/// All token texts in one allocation.
#[derive(Debug)]
struct Texts {
    all: String,
    ends: Vec<u32>,
}

impl Texts {
    fn new(tokens: &[String]) -> Result<Self, TextError> {
        let len: usize = tokens.iter().map(String::len).sum();
        if u32::try_from(len).is_err() {
            return Err(TextError::Vocabulary {
                field: "tokens",
                wanted: "less than 4 GiB of text".to_owned(),
                found: format!("{len} bytes"),
            });
        }
        let mut texts = Self { all: String::with_capacity(len), ends: Vec::with_capacity(tokens.len()) };
        for token in tokens {
            texts.all.push_str(token);
            texts.ends.push(texts.all.len() as u32);
        }
        Ok(texts)
    }

    fn get(&self, id: TokenId) -> Option<&str> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] as usize };
        self.all.get(start..end)
    }
}

/// Literals that are matched whole in text.
#[derive(Debug)]
struct AddedTokens {
    /// `None` where there are no literals.
    matcher: Option<AhoCorasick>,
    /// Ids by pattern number.
    ids: Vec<TokenId>,
    by_text: HashMap<String, TokenId>,
}

impl AddedTokens {
    fn new(tokens: &[String], wanted: impl Fn(TokenId) -> bool) -> Result<Self, TextError> {
        let mut ids = Vec::new();
        let mut literals: Vec<&str> = Vec::new();
        for (id, token) in (0..).zip(tokens) {
            if wanted(id) && !token.is_empty() {
                ids.push(id);
                literals.push(token);
            }
        }
        let by_text = literals.iter().zip(&ids).map(|(text, id)| ((*text).to_owned(), *id)).collect();
        let matcher = (!literals.is_empty())
            .then(|| {
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .kind(Some(AhoCorasickKind::ContiguousNFA))
                    .build(&literals)
            })
            .transpose()
            .map_err(|e| TextError::Encode { reason: format!("added tokens: {e}") })?;
        Ok(Self { matcher, ids, by_text })
    }

    fn find_in<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (TokenId, Range<usize>)> + 't {
        let matches = self.matcher.iter().flat_map(move |matcher| matcher.find_iter(text));
        matches.map(|found| (self.ids[found.pattern().as_usize()], found.range()))
    }

    fn id(&self, text: &str) -> Option<TokenId> {
        self.by_text.get(text).copied()
    }
}
