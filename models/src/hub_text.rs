//! The text half of a Hugging Face model directory: `tokenizer.json` and the small files beside it, as a [`Vocabulary`].
//!
//! What the files declare is either kept to or refused by name: a tokenizer that nearly fits gives ids that nearly fit. Sizes
//! and counts are bounded before anything is built. Truncation and padding of `tokenizer.json` are about training batches and
//! are passed over, as `transformers` does when it encodes one text.

mod added;
mod declared;
mod json;
mod templates;

pub use templates::ChatTemplates;

use crate::text_error::TextError;
use crate::text_rules::TextRules;
use crate::vocabulary::{RulesSource, TokenKind, Vocabulary};
use added::AddedTable;
use json::{IdOrIds, ModelJson, TokenizerConfigJson, TokenizerJson, VocabJson};
use npuhal_core::stage::TokenId;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Tokens at most; the largest known vocabularies have a quarter of it.
pub(crate) const MAX_TOKENS: usize = 1 << 20;
/// Merges at most.
pub(crate) const MAX_MERGES: usize = 1 << 22;
/// Largest `tokenizer.json`; the largest known one has 34 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Largest of the other files; `tokenizer_config.json` of Gemma 3 has 1.2 MB.
const MAX_SMALL_BYTES: u64 = 16 << 20;

/// Control tokens that end a turn in every model that has them, whether or not a file names them as such.
pub(crate) const END_TEXTS: [&str; 9] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "</s>",
];

/// The files, as bytes; all but the first may be missing.
#[derive(Debug, Clone, Default)]
pub struct HubTextFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Option<Vec<u8>>,
    /// `added_tokens.json`.
    pub added_tokens: Option<Vec<u8>>,
    /// `generation_config.json`, for the ids that end a text.
    pub generation_config: Option<Vec<u8>>,
    /// `config.json`, for the ids that end a text.
    pub config: Option<Vec<u8>>,
    /// `chat_template.jinja`, `chat_template.json` and `additional_chat_templates/*.jinja`.
    pub templates: ChatTemplates,
}

impl HubTextFiles {
    /// Reads the files of `directory`.
    ///
    /// # Errors
    /// [`TextError::TokenizerFile`]: no `tokenizer.json`, or a file that is too large or cannot be read.
    pub fn read(directory: &Path) -> Result<Self, TextError> {
        let Some(tokenizer) = read_file(directory, "tokenizer.json", MAX_TOKENIZER_BYTES)? else {
            return Err(TextError::TokenizerFile {
                file: directory.join("tokenizer.json").display().to_string(),
                reason: "it is not there; copy it from the model's page (a tokenizer.model alone is not enough)".into(),
            });
        };
        let small = |name| read_file(directory, name, MAX_SMALL_BYTES);
        Ok(Self {
            tokenizer,
            tokenizer_config: small("tokenizer_config.json")?,
            special_tokens_map: small("special_tokens_map.json")?,
            added_tokens: small("added_tokens.json")?,
            generation_config: small("generation_config.json")?,
            config: small("config.json")?,
            templates: ChatTemplates::read(directory)?,
        })
    }

    /// The vocabulary that the files describe. `rows` are the rows of the embedding: added tokens beyond it, which the model
    /// cannot know, are left out.
    ///
    /// # Errors
    /// A damaged or contradictory file ([`TextError::TokenizerFile`], [`TextError::Vocabulary`]). What is declared and not
    /// supported is an error when a tokenizer is built from the vocabulary, so that the rest can be looked at.
    pub fn vocabulary(&self, rows: usize) -> Result<Vocabulary, TextError> {
        let file: TokenizerJson = json::parse("tokenizer.json", &self.tokenizer)?;
        let config: TokenizerConfigJson = optional("tokenizer_config.json", self.tokenizer_config.as_deref())?;
        let mut added = AddedTable::new(&file.added_tokens, &config)?;
        let special_tokens_map = optional("special_tokens_map.json", self.special_tokens_map.as_deref())?;
        added.name_specials(&special_tokens_map);
        added.add_plain(&optional("added_tokens.json", self.added_tokens.as_deref())?)?;

        let mut vocabulary = tokens(&file.model, rows)?;
        added.apply(&mut vocabulary, rows)?;
        vocabulary.model = declared::model_name(&file.model).to_owned();
        let rules = declared::rules(&file);
        let byte_tokens = rules.as_ref().is_ok_and(declared::has_byte_tokens);
        vocabulary.add_bos = rules.as_ref().is_ok_and(|declared| declared.adds.is_some());
        let declared_bos = rules.as_ref().ok().and_then(|declared| declared.adds.clone());
        vocabulary.rules = match rules {
            Ok(declared) => RulesSource::Declared(Box::<TextRules>::new(declared.rules)),
            Err(feature) => RulesSource::Refused(feature),
        };
        if byte_tokens {
            mark_bytes(&mut vocabulary);
        }
        vocabulary.unknown = unknown(&file.model, &vocabulary)?;
        if let Some(id) = vocabulary.unknown {
            vocabulary.kinds[id as usize] = TokenKind::Unknown;
        }
        let named = |text: Option<String>| text.and_then(|text| added.id(&text).or_else(|| id_of(&vocabulary, &text)));
        let bos = named(config.bos_token()).or_else(|| named(special_tokens_map.bos_token()));
        let bos = named(declared_bos).or(bos);
        let eos_token = named(config.eos_token()).or_else(|| named(special_tokens_map.eos_token()));
        let padding = named(config.pad_token());
        vocabulary.padding = padding;
        vocabulary.bos = bos;
        vocabulary.eos_token = eos_token;
        vocabulary.add_bos = config.add_bos_token.unwrap_or(vocabulary.add_bos) && vocabulary.bos.is_some();
        vocabulary.eos = self.ends(&vocabulary)?;
        if vocabulary.eos_token.is_none() {
            vocabulary.eos_token = vocabulary.eos.first().copied();
        }
        self.templates.apply(config.chat_template, &mut vocabulary)?;
        Ok(vocabulary)
    }

    /// Ids that end a text, from every place that states them, ascending.
    fn ends(&self, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, TextError> {
        #[derive(Default, serde::Deserialize)]
        struct Ends {
            #[serde(default)]
            eos_token_id: Option<IdOrIds>,
        }
        let mut ends: BTreeSet<TokenId> = vocabulary.eos_token.into_iter().collect();
        for (name, bytes) in [("generation_config.json", &self.generation_config), ("config.json", &self.config)] {
            let stated: Ends = optional(name, bytes.as_deref())?;
            for id in stated.eos_token_id.map(IdOrIds::into_vec).unwrap_or_default() {
                let known = TokenId::try_from(id).ok().filter(|id| (*id as usize) < vocabulary.tokens.len());
                let id = known.ok_or_else(|| TextError::TokenizerFile {
                    file: name.to_owned(),
                    reason: format!("eos_token_id {id} is not among the {} tokens", vocabulary.tokens.len()),
                })?;
                ends.insert(id);
            }
        }
        let kinds = (0..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds));
        ends.extend(
            kinds
                .filter(|(_, (text, kind))| **kind == TokenKind::Control && END_TEXTS.contains(&text.as_str()))
                .map(|(id, _)| id),
        );
        Ok(ends.into_iter().collect())
    }
}

/// Tokens, scores and merges of the model; holes between ids are unused tokens.
fn tokens(model: &ModelJson, rows: usize) -> Result<Vocabulary, TextError> {
    let mut vocabulary = Vocabulary { merges: model.merges.clone().unwrap_or_default().0, ..Vocabulary::default() };
    let limit = rows.min(MAX_TOKENS);
    match &model.vocab {
        VocabJson::Ids(ids) => {
            for (text, id) in ids {
                let at = *id as usize;
                if at >= limit {
                    return Err(beyond(text, at, limit));
                }
                if vocabulary.tokens.len() <= at {
                    vocabulary.tokens.resize(at + 1, String::new());
                    vocabulary.kinds.resize(at + 1, TokenKind::Unused);
                }
                if vocabulary.kinds[at] == TokenKind::Normal {
                    return Err(TextError::Vocabulary {
                        field: "tokens",
                        wanted: "one token for each id".to_owned(),
                        found: format!("{:?} and {text:?} for id {id}", vocabulary.tokens[at]),
                    });
                }
                vocabulary.tokens[at].clone_from(text);
                vocabulary.kinds[at] = TokenKind::Normal;
            }
        }
        VocabJson::Scores(scores) => {
            if let Some((text, _)) = scores.get(limit) {
                return Err(beyond(text, limit, limit));
            }
            for (text, score) in scores {
                vocabulary.tokens.push(text.clone());
                vocabulary.scores.push(*score as f32);
                vocabulary.kinds.push(TokenKind::Normal);
            }
        }
    }
    Ok(vocabulary)
}

fn beyond(text: &str, id: usize, limit: usize) -> TextError {
    TextError::Vocabulary {
        field: "tokens",
        wanted: format!("ids below {limit}, the rows of the embedding"),
        found: format!("id {id} for {:?}", text.chars().take(40).collect::<String>()),
    }
}

/// Gives the tokens of single bytes their kind.
fn mark_bytes(vocabulary: &mut Vocabulary) {
    for (text, kind) in vocabulary.tokens.iter().zip(&mut vocabulary.kinds) {
        if *kind == TokenKind::Normal && crate::tokenizer::byte_of(text).is_some() {
            *kind = TokenKind::Byte;
        }
    }
}

fn id_of(vocabulary: &Vocabulary, text: &str) -> Option<TokenId> {
    vocabulary.tokens.iter().position(|token| token == text).and_then(|at| TokenId::try_from(at).ok())
}

/// The token for unknown text, which the model names by its text or by its id.
fn unknown(model: &ModelJson, vocabulary: &Vocabulary) -> Result<Option<TokenId>, TextError> {
    let missing = |found: String| TextError::Vocabulary {
        field: "unknown token",
        wanted: "a token of the vocabulary".to_owned(),
        found,
    };
    if let Some(id) = model.unk_id {
        let known = TokenId::try_from(id).ok().filter(|id| (*id as usize) < vocabulary.tokens.len());
        return known.map(Some).ok_or_else(|| missing(format!("id {id}")));
    }
    match model.unk_token.as_deref().filter(|text| !text.is_empty()) {
        None => Ok(None),
        Some(text) => id_of(vocabulary, text).map(Some).ok_or_else(|| missing(format!("{text:?}"))),
    }
}

fn optional<T: Default + serde::de::DeserializeOwned>(name: &str, bytes: Option<&[u8]>) -> Result<T, TextError> {
    bytes.map_or_else(|| Ok(T::default()), |bytes| json::parse(name, bytes))
}

/// A file of `directory`, `None` where it is not there.
fn read_file(directory: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, TextError> {
    let path = directory.join(name);
    let refused = |reason: String| TextError::TokenizerFile { file: path.display().to_string(), reason };
    // Asked before opening: opening a pipe would wait for its writer.
    match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(refused("wanted a regular file, found something else".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refused(error.to_string())),
    }
    let mut bytes = Vec::new();
    let file = File::open(&path).map_err(|error| refused(error.to_string()))?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| refused(error.to_string()))?;
    if bytes.len() as u64 > limit {
        return Err(refused(format!("wanted at most {limit} bytes, found more")));
    }
    Ok(Some(bytes))
}
