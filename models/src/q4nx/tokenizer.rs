//! `tokenizer.json` of a Q4NX directory: written from a GGUF file's byte-level vocabulary, read into a [`Vocabulary`].
//!
//! The format is that of the `tokenizers` library. Nothing is normalised: GGUF files state no normalisation. Read are
//! byte-level BPE files with the pre-tokenizers this program has; of another tokenizer the directory can be opened and its
//! vocabulary says why there is no text.

use super::config::{DirectoryConfig, read_object};
use crate::error::ModelError;
use crate::tokenizer::PreTokenizer;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Its file in the directory.
pub const FILE: &str = "tokenizer.json";
/// Beside it: chat template and names of special tokens.
pub const CONFIG_FILE: &str = "tokenizer_config.json";
/// Longest file that is read; the largest known ones have 35 MB.
const LIMIT_BYTES: u64 = 128 << 20;
const CONFIG_LIMIT_BYTES: u64 = 16 << 20;
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
    let kind = PreTokenizer::from_name(&vocabulary.pre_tokenizer).map_err(|error| error.to_string())?;
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
        "pre_tokenizer": pre_tokenizer_json(kind),
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
            "ignore_merges": kind == PreTokenizer::LlamaBpe,
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
        "eos_token": text(vocabulary.eos.last()),
        "pad_token": text(vocabulary.padding.as_ref()),
        "chat_template": vocabulary.chat_template,
    });
    if let Some(object) = document.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
    format!("{document:#}\n")
}

fn pre_tokenizer_json(kind: PreTokenizer) -> Value {
    let byte_level = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex });
    match kind {
        PreTokenizer::Gpt2 => byte_level(true),
        PreTokenizer::SmolLm => {
            json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Digits", "individual_digits": true }, byte_level(true),
            ] })
        }
        PreTokenizer::Qwen2 | PreTokenizer::LlamaBpe => {
            json!({ "type": "Sequence", "pretokenizers": [
                {
                    "type": "Split", "pattern": { "Regex": kind.published_pattern() }, "behavior": "Isolated",
                    "invert": false,
                },
                byte_level(false),
            ] })
        }
    }
}

/// The parts of `tokenizer.json` that are read.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Bpe,
}

#[derive(Deserialize)]
struct Added {
    id: u64,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Bpe {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    vocab: HashMap<String, u64>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Text(String),
}

/// The vocabulary of `directory`, whose configuration is `config`. Where its tokenizer is none that this program has, the
/// vocabulary is empty and its `model` says what was found.
///
/// # Errors
/// [`ModelError::Io`]; [`ModelError::Malformed`] for files that are no JSON and for ids beyond the embedding.
pub fn vocabulary(directory: &Path, config: &DirectoryConfig) -> Result<Vocabulary, ModelError> {
    let path = directory.join(FILE);
    let document = match read_document(&path)? {
        Ok(document) => document,
        Err(reason) => return Ok(unsupported(&reason)),
    };
    let pre_tokenizer = match pre_tokenizer_of(&document) {
        Ok(name) => name,
        Err(reason) => return Ok(unsupported(&reason)),
    };
    let malformed =
        |field: &str, reason: String| ModelError::Malformed { path: path.clone(), field: field.to_owned(), reason };
    let vocab_size = config.model.vocab_size;
    let mut by_id: BTreeMap<TokenId, (String, TokenKind)> = BTreeMap::new();
    let plain = document.model.vocab.into_iter().map(|(text, id)| (id, text, TokenKind::Normal));
    let added = document.added_tokens.into_iter().map(|added| {
        let kind = if added.special { TokenKind::Control } else { TokenKind::UserDefined };
        (added.id, added.content, kind)
    });
    for (id, text, kind) in plain.chain(added) {
        let place = TokenId::try_from(id).ok().filter(|&id| (id as usize) < vocab_size);
        let place = place.ok_or_else(|| {
            malformed("vocabulary", format!("wanted ids below {vocab_size}, the rows of the embedding, found {id}"))
        })?;
        by_id.insert(place, (text, kind));
    }
    let count = by_id.last_key_value().map_or(0, |(id, _)| *id as usize + 1);
    let mut tokens: Vec<String> = (0..count).map(|id| format!("[UNUSED{id}]")).collect();
    let mut kinds = vec![TokenKind::Unused; count];
    for (id, (text, kind)) in by_id {
        (tokens[id as usize], kinds[id as usize]) = (text, kind);
    }
    let extra = read_extra(directory)?;
    let known = |id: &TokenId| (*id as usize) < count;
    let mut eos: Vec<TokenId> = config.eos.iter().copied().filter(known).collect();
    if config.model.model_type == "qwen3" {
        eos.extend(
            QWEN3_ENDS.iter().filter(|(id, text)| tokens.get(*id as usize).is_some_and(|t| t == text)).map(|e| e.0),
        );
        eos.sort_unstable();
        eos.dedup();
    }
    let merges = document.model.merges.into_iter().map(|merge| match merge {
        Merge::Pair(left, right) => format!("{left} {right}"),
        Merge::Text(text) => text,
    });
    Ok(Vocabulary {
        model: "gpt2".to_owned(),
        pre_tokenizer: pre_tokenizer.to_owned(),
        merges: merges.collect(),
        bos: config.bos.filter(known),
        padding: extra.pad_token.and_then(|text| tokens.iter().position(|held| *held == text)).map(|id| id as TokenId),
        eos,
        add_bos: extra.add_bos,
        chat_template: extra.chat_template,
        tokens,
        kinds,
        ..Vocabulary::default()
    })
}

fn unsupported(reason: &str) -> Vocabulary {
    Vocabulary { model: format!("{FILE} with {reason}"), ..Vocabulary::default() }
}

/// The document, or why it is none that can be used.
fn read_document(path: &Path) -> Result<Result<Document, String>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let malformed = |reason| ModelError::Malformed { path: path.to_owned(), field: "the text".to_owned(), reason };
    let mut text = Vec::new();
    File::open(path).map_err(io)?.take(LIMIT_BYTES + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > LIMIT_BYTES {
        return Err(malformed(format!("wanted at most {LIMIT_BYTES} bytes, found more")));
    }
    match serde_json::from_slice(&text) {
        Ok(document) => Ok(Ok(document)),
        Err(error) if error.is_data() => Ok(Err(format!("no byte-level BPE ({error})"))),
        Err(error) => Err(malformed(format!("wanted JSON: {error}"))),
    }
}

/// GGUF's name for the pre-tokenizer: that of a Split pattern that is known; `smollm` and `gpt-2` for ByteLevel with its own
/// pattern, with and without Digits before it; without any pattern Qwen's.
fn pre_tokenizer_of(document: &Document) -> Result<&'static str, String> {
    if let Some(kind) = document.model.kind.as_deref().filter(|kind| *kind != "BPE") {
        return Err(format!("a model of type {kind:?}"));
    }
    match document.normalizer.get("type").and_then(Value::as_str) {
        None | Some("NFC") => {}
        Some(other) => return Err(format!("the normalizer {other:?}")),
    }
    let one = std::slice::from_ref(&document.pre_tokenizer);
    let steps = document.pre_tokenizer.get("pretokenizers").and_then(Value::as_array).map_or(one, Vec::as_slice);
    let of_type = |name: &str| steps.iter().find(|step| step.get("type").and_then(Value::as_str) == Some(name));
    let Some(byte_level) = of_type("ByteLevel") else { return Err("no byte-level pre-tokenizer".to_owned()) };
    if byte_level.get("add_prefix_space").and_then(Value::as_bool) == Some(true) {
        return Err("a space put before the text".to_owned());
    }
    if let Some(split) = of_type("Split") {
        let pattern = split.pointer("/pattern/Regex").and_then(Value::as_str).unwrap_or_default();
        let known = [(PreTokenizer::Qwen2, "qwen2"), (PreTokenizer::LlamaBpe, "llama-bpe")];
        let found = known.iter().find(|(kind, _)| kind.published_pattern() == pattern);
        return found.map(|(_, name)| *name).ok_or_else(|| "a pre-tokenizer pattern that is not known".to_owned());
    }
    let own_pattern = byte_level.get("use_regex").and_then(Value::as_bool).unwrap_or(true);
    Ok(match (own_pattern, of_type("Digits").is_some()) {
        (true, true) => "smollm",
        (true, false) => "gpt-2",
        (false, _) => "qwen2",
    })
}

#[derive(Default)]
struct Extra {
    chat_template: Option<String>,
    add_bos: bool,
    pad_token: Option<String>,
}

fn read_extra(directory: &Path) -> Result<Extra, ModelError> {
    let path = directory.join(CONFIG_FILE);
    if !path.exists() {
        return Ok(Extra::default());
    }
    let map = read_object(&path, CONFIG_LIMIT_BYTES)?;
    let text = |key: &str| {
        let value = map.get(key)?;
        // Names of tokens may be objects with the text inside.
        value.as_str().or_else(|| value.get("content").and_then(Value::as_str)).map(str::to_owned)
    };
    Ok(Extra {
        chat_template: text("chat_template"),
        add_bos: map.get("add_bos_token").and_then(Value::as_bool).unwrap_or(false),
        pad_token: text("pad_token"),
    })
}
