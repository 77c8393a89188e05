//! Added tokens, from every place that a model directory keeps them.

use super::json::{AddedJson, TokenizerConfigJson};
use crate::text_error::TextError;
use crate::vocabulary::{Matching, TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Added tokens at most; Gemma 3 has 6,415.
const MAX_ADDED: usize = 1 << 17;

#[derive(Debug)]
struct Added {
    id: TokenId,
    matching: Matching,
    special: bool,
}

/// Added tokens by text.
#[derive(Debug)]
pub(super) struct AddedTable {
    tokens: HashMap<String, Added>,
    by_id: BTreeMap<TokenId, String>,
    /// Named as special, whether added or of the model's own vocabulary.
    specials: BTreeSet<String>,
}

impl AddedTable {
    /// Those of `tokenizer.json`, and over them those of `tokenizer_config.json`.
    pub(super) fn new(tokens: &[AddedJson], config: &TokenizerConfigJson) -> Result<Self, TextError> {
        let mut table = Self { tokens: HashMap::new(), by_id: BTreeMap::new(), specials: BTreeSet::new() };
        for token in tokens {
            let id = token.id.ok_or_else(|| malformed("tokenizer.json", format!("{:?} has no id", token.content)))?;
            table.add("tokenizer.json", id, token.clone())?;
        }
        for (key, value) in config.added_tokens_decoder.iter().flatten() {
            let file = "tokenizer_config.json";
            let id = key.parse().map_err(|_| malformed(file, format!("{key:?} is no id")))?;
            let token: AddedJson =
                serde_json::from_value(value.clone()).map_err(|e| malformed(file, format!("token {key}: {e}")))?;
            table.add(file, id, token)?;
        }
        table.name_specials(config);
        Ok(table)
    }

    /// Tokens that a file names as special are control tokens.
    pub(super) fn name_specials(&mut self, config: &TokenizerConfigJson) {
        self.specials.extend(config.specials().filter(|text| !text.is_empty()));
    }

    /// Those of `added_tokens.json`, of which only ids are known: plain text unless another file knows more.
    pub(super) fn add_plain(&mut self, tokens: &BTreeMap<String, u64>) -> Result<(), TextError> {
        for (content, id) in tokens {
            if !self.tokens.contains_key(content) {
                let token = AddedJson {
                    id: None,
                    content: content.clone(),
                    single_word: false,
                    lstrip: false,
                    rstrip: false,
                    normalized: Some(false),
                    special: false,
                };
                self.add("added_tokens.json", *id, token)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, file: &str, id: u64, token: AddedJson) -> Result<(), TextError> {
        if token.content.is_empty() {
            return Err(malformed(file, format!("added token {id} is empty")));
        }
        let Some(id) = TokenId::try_from(id).ok() else {
            return Err(malformed(file, format!("{id} is no id of a token")));
        };
        let other = self.by_id.insert(id, token.content.clone());
        if let Some(other) = other.filter(|other| *other != token.content) {
            return Err(malformed(file, format!("id {id} is {:?} and also {other:?}", token.content)));
        }
        let matching = Matching {
            strips_left: token.lstrip,
            strips_right: token.rstrip,
            whole_word: token.single_word,
            normalized: token.normalized.unwrap_or(!token.special),
        };
        let added = Added { id, matching, special: token.special };
        if let Some(before) = self.tokens.insert(token.content.clone(), added)
            && before.id != id
        {
            return Err(malformed(file, format!("{:?} has the ids {} and {id}", token.content, before.id)));
        }
        if self.tokens.len() > MAX_ADDED {
            return Err(malformed(file, format!("wanted at most {MAX_ADDED} added tokens, found more")));
        }
        Ok(())
    }

    /// The id of an added token.
    pub(super) fn id(&self, text: &str) -> Option<TokenId> {
        self.tokens.get(text).map(|added| added.id)
    }

    /// Puts the tokens into `vocabulary`; those at `rows` and beyond are left out.
    pub(super) fn apply(&mut self, vocabulary: &mut Vocabulary, rows: usize) -> Result<(), TextError> {
        self.tokens.retain(|_, added| (added.id as usize) < rows);
        for (text, added) in &self.tokens {
            let at = added.id as usize;
            if at >= vocabulary.tokens.len() {
                vocabulary.tokens.resize(at + 1, String::new());
                vocabulary.kinds.resize(at + 1, TokenKind::Unused);
            }
            let known = &vocabulary.tokens[at];
            if !known.is_empty() && known != text {
                let found = format!("{known:?} and the added token {text:?} for id {at}");
                return Err(TextError::Vocabulary {
                    field: "added tokens",
                    wanted: "one token for each id".into(),
                    found,
                });
            }
            vocabulary.tokens[at].clone_from(text);
            vocabulary.kinds[at] = if added.special { TokenKind::Control } else { TokenKind::UserDefined };
            if added.matching != Matching::default() {
                vocabulary.matching.insert(added.id, added.matching);
            }
        }
        if !vocabulary.scores.is_empty() {
            // Added tokens are no words of the model: they never come out of its search.
            vocabulary.scores.resize(vocabulary.tokens.len(), f32::NEG_INFINITY);
        }
        for (text, kind) in vocabulary.tokens.iter().zip(&mut vocabulary.kinds) {
            if self.specials.contains(text) {
                *kind = TokenKind::Control;
            }
        }
        Ok(())
    }
}

fn malformed(file: &str, reason: String) -> TextError {
    TextError::TokenizerFile { file: file.to_owned(), reason }
}
