//! Tokenizers, built from what a model file says of its vocabulary.
//!
//! Text is cut at added tokens (earliest first, longest on ties); what lies between is normalised and cut into words as the
//! vocabulary's rules say, and each word becomes tokens by byte-pair encoding or by a unigram model.

mod added;
mod alphabet;
mod byte_tokens;
mod merge;
pub(crate) mod names;
mod normalize;
mod scored;
mod split;
mod texts;
mod unigram;

pub(crate) use byte_tokens::byte_of;
pub(crate) use names::{adds_bos, gpt2_cut, named_rules};

use crate::text_error::TextError;
use crate::text_rules::{Normalizer, Spelling, TextRules, TokenModel};
use crate::vocabulary::{Matching, RulesSource, TokenKind, Vocabulary};
use added::{AddedTokens, Literal};
use alphabet::Alphabet;
use merge::{MergeRules, Merger};
use normalize::normalize;
use npuhal_core::stage::TokenId;
use scored::ScoredMerger;
use split::Splitter;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use texts::Texts;
use unigram::Unigram;

/// Longest token of a SentencePiece vocabulary, in bytes; real ones have at most a hundred.
const MAX_PIECE_BYTES: usize = 2048;

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
    spelling: Spelling,
    /// Changes before added tokens that want normalised text are looked for.
    normalizers: Vec<Normalizer>,
    /// Changes of what lies between these.
    markers: Vec<Normalizer>,
    splitter: Splitter,
    encoder: WordEncoder,
    /// Control and user-defined tokens.
    added: AddedTokens,
    /// User-defined tokens only.
    user_defined: AddedTokens,
    /// User-defined tokens that are looked for in normalised text.
    normalized: AddedTokens,
    bos: Option<TokenId>,
    eos: Vec<TokenId>,
    add_bos: bool,
    note: Option<String>,
    usable_ids: usize,
}

/// From words to ids.
#[derive(Debug)]
enum WordEncoder {
    Merges(Merger),
    Scores(ScoredMerger),
    Unigram(Unigram),
}

impl WordEncoder {
    fn new(vocabulary: &Vocabulary, rules: &TextRules, usable: impl Fn(TokenId) -> bool) -> Result<Self, TextError> {
        let byte_level = rules.spelling == Spelling::ByteLevel;
        Ok(match rules.model {
            TokenModel::Bpe { whole_words, byte_fallback, fuse_unknown } => {
                let rules = MergeRules { byte_level, whole_words, byte_fallback, fuse_unknown };
                Self::Merges(Merger::new(vocabulary, rules, usable)?)
            }
            TokenModel::ScoredBpe => {
                check_scores(vocabulary)?;
                Self::Scores(ScoredMerger::new(vocabulary, usable)?)
            }
            TokenModel::Unigram { byte_fallback } => {
                check_scores(vocabulary)?;
                Self::Unigram(Unigram::new(vocabulary, byte_fallback, usable)?)
            }
        })
    }

    fn id(&self, token: &str) -> Option<TokenId> {
        match self {
            Self::Merges(model) => model.id(token),
            Self::Scores(model) => model.id(token),
            Self::Unigram(model) => model.id(token),
        }
    }

    fn encode_word(&self, word: &str, spelled: &mut String, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        match self {
            Self::Merges(model) => model.encode_word(word, spelled, ids),
            Self::Scores(model) => model.encode_word(word, ids),
            Self::Unigram(model) => model.encode_word(word, ids),
        }
    }
}

impl Tokenizer {
    /// Builds the tokenizer that `vocabulary` describes.
    ///
    /// # Errors
    /// A tokenizer model, pre-tokenizer or other part that is not supported, or a vocabulary that contradicts itself.
    pub fn from_vocabulary(vocabulary: &Vocabulary) -> Result<Self, TextError> {
        let rules = TextRules::of(vocabulary)?;
        check_ids(vocabulary)?;
        let kinds = effective_kinds(vocabulary);
        let usable = |id: TokenId| {
            let kind = kinds[id as usize];
            kind != TokenKind::Unused && !is_control(kind)
        };
        let (markers, normalizers): (Vec<_>, Vec<_>) =
            rules.normalizers.iter().cloned().partition(|step| matches!(step, Normalizer::Metaspace { .. }));
        let added = Literals { vocabulary, kinds: &kinds, normalizers: &normalizers };
        let shared = Shared {
            texts: Texts::new(&vocabulary.tokens)?,
            splitter: Splitter::new(&rules.cuts)?,
            encoder: WordEncoder::new(vocabulary, &rules, usable)?,
            added: AddedTokens::new(added.controls().chain(added.user_defined(false)))?,
            user_defined: AddedTokens::new(added.user_defined(false))?,
            normalized: AddedTokens::new(added.user_defined(true))?,
            bos: vocabulary.bos,
            eos: vocabulary.eos.clone(),
            add_bos: vocabulary.add_bos,
            note: match vocabulary.rules {
                RulesSource::Named if vocabulary.model == "gpt2" => names::note(&vocabulary.pre_tokenizer),
                _ => None,
            },
            alphabet: Alphabet::new(),
            spelling: rules.spelling,
            normalizers,
            markers,
            usable_ids: kinds.iter().rposition(|kind| *kind != TokenKind::Unused).map_or(kinds.len(), |last| last + 1),
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
    /// [`TextError::NoTokenForByte`], [`TextError::NoTokenForCharacter`], [`TextError::SlowPattern`].
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<TokenId>, TextError> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 1);
        self.encode_into(text, specials, &mut ids)?;
        Ok(ids)
    }

    /// As [`Tokenizer::encode`], appended to `ids`.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_into(&self, text: &str, specials: Specials, ids: &mut Vec<TokenId>) -> Result<(), TextError> {
        self.encode_part(text, specials, true, ids)
    }

    /// As [`Tokenizer::encode_into`], for a part of a text; `first` for the one at its start.
    pub(crate) fn encode_part(
        &self,
        text: &str,
        specials: Specials,
        first: bool,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let added = match specials {
            Specials::Parse => &self.shared.added,
            Specials::Plain => &self.shared.user_defined,
        };
        let mut spelled = String::new();
        let mut start = 0;
        for (id, range) in added.find_in(text) {
            self.encode_section(&text[start..range.start], first && start == 0, &mut spelled, ids)?;
            ids.push(id);
            start = range.end;
        }
        self.encode_section(&text[start..], first && start == 0, &mut spelled, ids)
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each maximal subpart; ids outside the vocabulary
    /// and unused ones leave nothing. Where the vocabulary puts a space in front of every text, the text loses one.
    #[must_use]
    pub fn decode(&self, ids: &[TokenId], controls: ControlTokens) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for id in ids {
            self.decode_into(*id, controls, &mut bytes);
        }
        if self.strips_first_space() && bytes.first() == Some(&b' ') {
            bytes.remove(0);
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
            TokenKind::Normal | TokenKind::Byte | TokenKind::UserDefined => self.spell(text, kind, bytes),
            TokenKind::Control | TokenKind::Unknown if controls == ControlTokens::Show => {
                bytes.extend_from_slice(text.as_bytes());
            }
            TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => {}
        }
    }

    /// Whether a decoded text loses one space at its start.
    pub(crate) fn strips_first_space(&self) -> bool {
        matches!(self.shared.spelling, Spelling::Pieces { strip_first_space: true, .. })
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
        let Shared { added, normalized, encoder, .. } = &*self.shared;
        added.id(text).or_else(|| normalized.id(text)).or_else(|| encoder.id(text))
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
        self.shared.user_defined.texts().chain(self.shared.normalized.texts())
    }

    fn text_and_kind(&self, id: TokenId) -> Option<(&str, TokenKind)> {
        Some((self.shared.texts.get(id)?, *self.shared.kinds.get(id as usize)?))
    }

    fn spell(&self, text: &str, kind: TokenKind, bytes: &mut Vec<u8>) {
        match &self.shared.spelling {
            Spelling::ByteLevel if kind == TokenKind::UserDefined => bytes.extend_from_slice(text.as_bytes()),
            Spelling::ByteLevel => self.shared.alphabet.decode_into(text, bytes),
            Spelling::Pieces { replace, .. } => {
                if let Some(byte) = byte_of(text).filter(|_| kind == TokenKind::Byte) {
                    return bytes.push(byte);
                }
                let mut text = Cow::Borrowed(text);
                for (from, to) in replace {
                    if text.contains(from.as_str()) {
                        text = Cow::Owned(text.replace(from.as_str(), to));
                    }
                }
                bytes.extend_from_slice(text.as_bytes());
            }
        }
    }

    /// What lies between added tokens.
    fn encode_section(
        &self,
        section: &str,
        first: bool,
        spelled: &mut String,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let text = normalize(&self.shared.normalizers, section, first);
        let mut start = 0;
        for (id, range) in self.shared.normalized.find_in(&text) {
            self.encode_words(&text[start..range.start], first && start == 0, spelled, ids)?;
            ids.push(id);
            start = range.end;
        }
        self.encode_words(&text[start..], first && start == 0, spelled, ids)
    }

    fn encode_words(
        &self,
        text: &str,
        first: bool,
        spelled: &mut String,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let Shared { markers, splitter, encoder, .. } = &*self.shared;
        let text = normalize(markers, text, first);
        splitter.split(&text, |word| encoder.encode_word(word, spelled, ids))
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

fn check_scores(vocabulary: &Vocabulary) -> Result<(), TextError> {
    let (tokens, scores) = (vocabulary.tokens.len(), vocabulary.scores.len());
    if tokens == scores && !vocabulary.scores.iter().any(|score| score.is_nan()) {
        return Ok(());
    }
    Err(TextError::Vocabulary {
        field: "token scores",
        wanted: format!("a number for each of {tokens} tokens"),
        found: if tokens == scores { "some that are no numbers".to_owned() } else { format!("{scores} scores") },
    })
}

/// The length of the longest piece.
fn check_lengths<'v>(pieces: impl Iterator<Item = &'v String>) -> Result<usize, TextError> {
    let longest = pieces.map(String::len).max().unwrap_or(0);
    if longest > MAX_PIECE_BYTES {
        return Err(TextError::Vocabulary {
            field: "tokens",
            wanted: format!("at most {MAX_PIECE_BYTES} bytes in each token of a SentencePiece vocabulary"),
            found: format!("one of {longest}"),
        });
    }
    Ok(longest)
}

/// The added tokens of a vocabulary.
struct Literals<'v> {
    vocabulary: &'v Vocabulary,
    kinds: &'v [TokenKind],
    normalizers: &'v [Normalizer],
}

impl<'v> Literals<'v> {
    /// Control tokens are looked for as they stand, whatever a file says: templates write them so.
    fn controls(&self) -> impl Iterator<Item = Literal> + use<'_, 'v> {
        self.all(is_control)
    }

    /// Tokens that are text, either those that are looked for in normalised text or the others.
    fn user_defined(&self, normalized: bool) -> impl Iterator<Item = Literal> + use<'_, 'v> {
        // What is put in front of a section is no part of a token in its midst.
        let steps: Vec<Normalizer> =
            self.normalizers.iter().filter(|step| !matches!(step, Normalizer::Prepend(_))).cloned().collect();
        let all = self.all(|kind| kind == TokenKind::UserDefined);
        all.filter(move |literal| literal.matching.normalized == normalized).map(move |literal| Literal {
            text: if normalized { normalize(&steps, &literal.text, false).into_owned() } else { literal.text },
            ..literal
        })
    }

    fn all(&self, wanted: impl Fn(TokenKind) -> bool) -> impl Iterator<Item = Literal> {
        let Vocabulary { tokens, matching, .. } = self.vocabulary;
        (0..).zip(tokens.iter().zip(self.kinds)).filter(move |(_, (_, kind))| wanted(**kind)).map(
            move |(id, (text, _))| Literal {
                id,
                text: text.clone(),
                matching: matching.get(&id).copied().unwrap_or(Matching::default()),
            },
        )
    }
}
