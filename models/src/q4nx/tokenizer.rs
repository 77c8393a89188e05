//! `tokenizer.json` of a Q4NX directory: written from a GGUF file's byte-level vocabulary, read into a [`Vocabulary`].
//!
//! The format is that of the `tokenizers` library. Nothing is normalised: GGUF files state no normalisation. Reading is that
//! of every directory with such files ([`crate::hub_text`]); of a tokenizer that is not supported the vocabulary says why
//! there is no text.

use super::config::DirectoryConfig;
use crate::error::ModelError;
use crate::hub_text::HubTextFiles;
use crate::tokenizer::names;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::Path;

/// Its file in the directory.
pub const FILE: &str = "tokenizer.json";
/// Beside it: chat template and names of special tokens.
pub const CONFIG_FILE: &str = "tokenizer_config.json";
/// Ids that end a generation of every Qwen3 model, whatever its configuration says.
const QWEN3_ENDS: [(TokenId, &str); 2] = [(151_643, "<|endoftext|>"), (151_645, "<|im_end|>")];

/// The text of `tokenizer.json` for `vocabulary`.
///
/// # Errors
/// Why it cannot be written: no byte-level BPE, an unknown pre-tokenizer, a text that two tokens have.
pub fn tokenizer_json(vocabulary: &Vocabulary) -> Result<String, String> {
    if vocabulary.model != "gpt2" {
        return Err(format!("the GGUF file has no byte-level BPE vocabulary (its model is {:?})", vocabulary.model));
    }
    let name = vocabulary.pre_tokenizer.as_str();
    let patterns = names::patterns(name).ok_or_else(|| format!("the pre-tokenizer {name:?} is not known"))?;
    let ends: HashSet<TokenId> = vocabulary.eos.iter().chain(&vocabulary.bos).copied().collect();
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(&vocabulary.kinds) {
        if vocab.insert(text.clone(), json!(id)).is_some() {
            return Err(format!("two tokens of the GGUF file have the text {text:?}"));
        }
        let special = matches!(kind, TokenKind::Control | TokenKind::Unknown) || ends.contains(&id);
        if special || *kind == TokenKind::UserDefined {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": special,
            }));
        }
    }
    let merges = vocabulary.merges.iter().map(|merge| {
        // A token may start with a space in files of old converters; the two parts are never empty.
        let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        at.map(|at| json!([merge[..at], merge[at + 1..]])).ok_or_else(|| format!("the merge {merge:?} is no pair"))
    });
    let merges = merges.collect::<Result<Vec<_>, _>>()?;
    let document = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer_json(patterns),
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": names::takes_whole_words(name),
            "vocab": vocab,
            "merges": merges,
        },
    });
    Ok(document.to_string())
}

/// The text of `tokenizer_config.json` for `vocabulary`.
#[must_use]
pub fn tokenizer_config_json(vocabulary: &Vocabulary) -> String {
    let text = |id: Option<&TokenId>| id.and_then(|id| vocabulary.tokens.get(*id as usize));
    let mut document = json!({
        "add_bos_token": vocabulary.add_bos,
        "bos_token": text(vocabulary.bos.as_ref()),
        "eos_token": text(vocabulary.eos_token.as_ref().or(vocabulary.eos.last())),
        "pad_token": text(vocabulary.padding.as_ref()),
        "chat_template": vocabulary.chat_template,
    });
    if let Some(object) = document.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
    format!("{document:#}\n")
}

/// The published patterns one after the other, then the byte-level alphabet.
fn pre_tokenizer_json(patterns: &[&str]) -> Value {
    let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let steps: Vec<Value> = patterns.iter().map(split).chain([byte_level]).collect();
    json!({ "type": "Sequence", "pretokenizers": steps })
}

/// The vocabulary of `directory`, whose configuration is `config`.
///
/// # Errors
/// [`ModelError::Malformed`] for files that cannot be read or contradict each other, and for ids beyond the embedding.
pub fn vocabulary(directory: &Path, config: &DirectoryConfig) -> Result<Vocabulary, ModelError> {
    let malformed = |error: crate::text_error::TextError| ModelError::Malformed {
        path: directory.join(FILE),
        field: "the tokenizer".to_owned(),
        reason: error.to_string(),
    };
    let files = HubTextFiles::read(directory).map_err(malformed)?;
    let mut vocabulary = files.vocabulary(config.model.vocab_size).map_err(malformed)?;
    let is_token = |id: &TokenId| (*id as usize) < vocabulary.tokens.len();
    let is_end = |(id, text): &(TokenId, &str)| vocabulary.tokens.get(*id as usize).is_some_and(|held| held == text);
    let mut eos: Vec<TokenId> = vocabulary.eos.iter().chain(&config.eos).copied().filter(is_token).collect();
    if config.model.model_type == "qwen3" {
        eos.extend(QWEN3_ENDS.iter().filter(|end| is_end(end)).map(|end| end.0));
    }
    eos.sort_unstable();
    eos.dedup();
    vocabulary.eos = eos;
    Ok(vocabulary)
}
