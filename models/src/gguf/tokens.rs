//! The vocabulary in a file's metadata.

use super::value::{Value, ValueType};
use super::{Array, GgufFile};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::hub_text::END_TEXTS;
use crate::tokenizer;
use crate::vocabulary::{RulesSource, TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use std::collections::{BTreeMap, BTreeSet};

/// Tokens at most; the largest known vocabularies have a quarter of it.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// Merges at most.
pub(super) const MAX_MERGES: usize = 1 << 22;

const TOKENS: &str = "tokenizer.ggml.tokens";

/// Keys that state ids which end a generation, as one id or as an array of them.
const END_KEYS: [&str; 6] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eos_token_ids",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eot_token_ids",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.eom_token_ids",
];

/// Reads the vocabulary. The model `none` states that there is none.
pub(super) fn read(file: &GgufFile, config: &ModelConfig) -> Result<Vocabulary, ModelError> {
    let remedy = "convert the model again with its tokenizer files at hand";
    let Some(model) = file.string("tokenizer.ggml.model")? else {
        return Err(file.missing("metadata key tokenizer.ggml.model", remedy));
    };
    let chat_template = file.string("tokenizer.chat_template")?.map(str::to_owned);
    if model == "none" {
        return Ok(Vocabulary { model: model.to_owned(), chat_template, ..Vocabulary::default() });
    }
    let Some(tokens) = file.array(TOKENS)? else {
        return Err(file.missing(format!("metadata key {TOKENS}"), remedy));
    };
    check_count(file, &tokens, config)?;
    let tokens = strings(file, TOKENS, MAX_TOKENS)?;
    let kinds = kinds(file, tokens.len())?;
    let pre_tokenizer = file.string("tokenizer.ggml.pre")?.unwrap_or_default().to_owned();
    let id = |key: &str| id(file, key, tokens.len());
    let unknown = id("tokenizer.ggml.unknown_token_id")?;
    let first_unknown = || kinds.iter().position(|&kind| kind == TokenKind::Unknown).map(|id| id as TokenId);
    Ok(Vocabulary {
        scores: scores(file, tokens.len())?,
        merges: strings(file, "tokenizer.ggml.merges", MAX_MERGES)?,
        bos: id("tokenizer.ggml.bos_token_id")?,
        eos: ends(file, &tokens, &kinds)?,
        // `tokenizer.ggml.eos_token_id`, the first where there are several.
        eos_token: ids(file, END_KEYS[0], tokens.len())?.first().copied(),
        unknown: unknown.or_else(first_unknown),
        padding: id("tokenizer.ggml.padding_token_id")?,
        // Where the file is silent: SentencePiece models start with bos and a space, and so does Llama 3 with bos.
        add_bos: file
            .boolean("tokenizer.ggml.add_bos_token")?
            .unwrap_or(model == "llama" || (model == "gpt2" && tokenizer::adds_bos(&pre_tokenizer))),
        add_space_prefix: file.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(matches!(model, "llama" | "t5")),
        rules: rules(file, model)?,
        named_templates: named_templates(file)?,
        model: model.to_owned(),
        pre_tokenizer,
        tokens,
        kinds,
        chat_template,
        ..Vocabulary::default()
    })
}

/// What no name stands for: SentencePiece's normalisation of unigram models.
fn rules(file: &GgufFile, model: &str) -> Result<RulesSource, ModelError> {
    let charsmap = file.array("tokenizer.ggml.precompiled_charsmap")?.is_some_and(|map| !map.is_empty());
    let squeezes = file.boolean("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false);
    Ok(match model {
        "t5" if charsmap => RulesSource::Refused("a normalisation by a precompiled map of characters".to_owned()),
        "t5" if squeezes => RulesSource::Refused("the removal of extra white space".to_owned()),
        _ => RulesSource::Named,
    })
}

/// Templates beside the default one: `tokenizer.chat_template.<name>`.
fn named_templates(file: &GgufFile) -> Result<BTreeMap<String, String>, ModelError> {
    const PREFIX: &str = "tokenizer.chat_template.";
    const MAX_TEMPLATES: usize = 64;
    let mut templates = BTreeMap::new();
    for (key, _) in file.metadata() {
        let Some(name) = key.strip_prefix(PREFIX).filter(|_| templates.len() < MAX_TEMPLATES) else { continue };
        if let Some(text) = file.string(key)? {
            templates.insert(name.to_owned(), text.to_owned());
        }
    }
    Ok(templates)
}

fn check_count(file: &GgufFile, tokens: &Array<'_>, config: &ModelConfig) -> Result<(), ModelError> {
    let rows = config.vocab_size;
    if tokens.is_empty() || tokens.len() > rows {
        let reason = format!("wanted from 1 to {rows} tokens, the rows of token_embd.weight, found {}", tokens.len());
        return Err(file.malformed(TOKENS, reason));
    }
    Ok(())
}

fn strings(file: &GgufFile, key: &str, limit: usize) -> Result<Vec<String>, ModelError> {
    check_limit(file, key, limit)?;
    Ok(file.elements(key, "a string", |value| value.as_str().map(str::to_owned))?.unwrap_or_default())
}

fn check_limit(file: &GgufFile, key: &str, limit: usize) -> Result<(), ModelError> {
    match file.array(key)? {
        Some(array) if array.len() > limit => {
            Err(file.malformed(key, format!("wanted at most {limit} elements, found {}", array.len())))
        }
        _ => Ok(()),
    }
}

/// One kind a token; all normal where the file states none.
fn kinds(file: &GgufFile, tokens: usize) -> Result<Vec<TokenKind>, ModelError> {
    let key = "tokenizer.ggml.token_type";
    check_same_count(file, key, tokens)?;
    let kind = |value: &Value<'_>| {
        Some(match value.as_unsigned()? {
            // 0 is "undefined", which old converters wrote for ordinary tokens.
            0 | 1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => return None,
        })
    };
    let kinds = file.elements(key, "a token type from 0 to 6", kind)?;
    Ok(kinds.unwrap_or_else(|| vec![TokenKind::Normal; tokens]))
}

fn scores(file: &GgufFile, tokens: usize) -> Result<Vec<f32>, ModelError> {
    let key = "tokenizer.ggml.scores";
    check_same_count(file, key, tokens)?;
    Ok(file.elements(key, "a finite floating-point number", Value::as_float)?.unwrap_or_default())
}

fn check_same_count(file: &GgufFile, key: &str, tokens: usize) -> Result<(), ModelError> {
    match file.array(key)? {
        Some(array) if array.len() != tokens => {
            Err(file.malformed(key, format!("wanted one element for each of {tokens} tokens, found {}", array.len())))
        }
        _ => Ok(()),
    }
}

fn id(file: &GgufFile, key: &str, tokens: usize) -> Result<Option<TokenId>, ModelError> {
    // -1, in either signedness, is how converters write "no such token".
    if matches!(file.get(key), Some(Value::U32(u32::MAX) | Value::I32(-1) | Value::I64(-1))) {
        return Ok(None);
    }
    file.unsigned(key)?.map(|value| checked_id(file, key, value, tokens)).transpose()
}

fn checked_id(file: &GgufFile, key: &str, value: u64, tokens: usize) -> Result<TokenId, ModelError> {
    TokenId::try_from(value)
        .ok()
        .filter(|&id| (id as usize) < tokens)
        .ok_or_else(|| file.malformed(key, format!("wanted an id below {tokens}, the number of tokens, found {value}")))
}

/// The ids of a key that states one or an array of them.
fn ids(file: &GgufFile, key: &str, tokens: usize) -> Result<Vec<TokenId>, ModelError> {
    if file.get(key).is_none_or(|value| value.value_type() != ValueType::Array) {
        return Ok(id(file, key, tokens)?.into_iter().collect());
    }
    check_limit(file, key, tokens)?;
    let stated = file.elements(key, "a token id", Value::as_unsigned)?.unwrap_or_default();
    stated.into_iter().map(|value| checked_id(file, key, value, tokens)).collect()
}

/// Every id that ends a generation, ascending.
fn ends(file: &GgufFile, tokens: &[String], kinds: &[TokenKind]) -> Result<Vec<TokenId>, ModelError> {
    let mut ends = BTreeSet::new();
    for key in END_KEYS {
        ends.extend(ids(file, key, tokens.len())?);
    }
    let well_known = tokens
        .iter()
        .zip(kinds)
        .enumerate()
        .filter(|(_, (text, kind))| **kind == TokenKind::Control && END_TEXTS.contains(&text.as_str()))
        .map(|(id, _)| id as TokenId);
    ends.extend(well_known);
    Ok(ends.into_iter().collect())
}
