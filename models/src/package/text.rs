//! The text half of a package made from a GGUF file: its vocabulary and configuration as the files of a Hugging Face checkpoint.

use super::error::PackageError;
use crate::config::ModelConfig;
use crate::vocabulary::{TokenKind, Vocabulary};
use npuhal_core::stage::TokenId;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Pattern of Qwen2 and, with another run of digits, of Llama 3, as their `tokenizer.json` state it.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// `config.json`, and where the file has a vocabulary `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.
///
/// # Errors
/// [`PackageError::Feature`] for a tokenizer that these files are not written for.
pub(super) fn companions(
    path: &Path,
    config: &ModelConfig,
    vocabulary: &Vocabulary,
) -> Result<Vec<(String, Vec<u8>)>, PackageError> {
    let file = |name: &str, value: Value| (name.to_owned(), format!("{value:#}\n").into_bytes());
    let mut files = vec![file("config.json", config_json(config, vocabulary))];
    if vocabulary.model == "none" {
        return Ok(files);
    }
    let refuse = |feature: String, supported| Err(PackageError::Feature { path: path.to_owned(), feature, supported });
    if vocabulary.model != "gpt2" {
        return refuse(format!("tokenizer model {:?}", vocabulary.model), "gpt2 (byte-level BPE)");
    }
    let Some(pre_tokenizer) = pre_tokenizer(&vocabulary.pre_tokenizer) else {
        let feature = format!("pre-tokenizer {:?}", vocabulary.pre_tokenizer);
        return refuse(feature, "gpt-2, smollm, qwen2, llama-bpe");
    };
    // Long and read by machines: no indentation.
    let tokenizer = tokenizer_json(vocabulary, pre_tokenizer).to_string().into_bytes();
    files.push(("tokenizer.json".to_owned(), tokenizer));
    files.push(file("tokenizer_config.json", tokenizer_config_json(config, vocabulary)));
    files.push(file("generation_config.json", json!({ "eos_token_id": vocabulary.eos })));
    Ok(files)
}

fn config_json(config: &ModelConfig, vocabulary: &Vocabulary) -> Value {
    let decimal = |value: f32| value.to_string().parse().unwrap_or(f64::from(value));
    json!({
        "model_type": config.model_type,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "num_hidden_layers": config.layers,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": decimal(config.rms_norm_eps),
        "rope_theta": decimal(config.rope.theta),
        "tie_word_embeddings": config.tied_head,
        "eos_token_id": end_of_turn(vocabulary),
        "bos_token_id": vocabulary.bos,
    })
}

fn tokenizer_json(vocabulary: &Vocabulary, pre_tokenizer: Value) -> Value {
    let listed = || vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate();
    // Unused ids pad the embedding and have no text.
    let vocab: Map<String, Value> = listed()
        .filter(|(_, (_, kind))| **kind != TokenKind::Unused)
        .map(|(id, (token, _))| (token.clone(), json!(id)))
        .collect();
    let added: Vec<Value> = listed()
        .filter(|(id, (_, kind))| {
            let ends = vocabulary.eos.contains(&(*id as TokenId));
            ends || matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined)
        })
        .map(|(id, (token, kind))| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": *kind != TokenKind::UserDefined,
            })
        })
        .collect();
    let merges: Vec<Value> =
        vocabulary.merges.iter().filter_map(|merge| merge.split_once(' ')).map(|(a, b)| json!([a, b])).collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": matches!(vocabulary.pre_tokenizer.as_str(), "llama-bpe" | "llama3" | "llama-v3"),
            "vocab": vocab,
            "merges": merges,
        },
    })
}

/// The published pre-tokenizer of a GGUF name.
fn pre_tokenizer(name: &str) -> Option<Value> {
    let byte_level = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    let sequence =
        |first: Value, use_regex: bool| json!({ "type": "Sequence", "pretokenizers": [first, byte_level(use_regex)] });
    let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    Some(match name {
        "" | "default" | "gpt-2" => byte_level(true),
        "smollm" => sequence(json!({ "type": "Digits", "individual_digits": true }), true),
        "qwen2" | "deepseek-r1-qwen" => sequence(split(QWEN2), false),
        "llama-bpe" | "llama3" | "llama-v3" => sequence(split(LLAMA3), false),
        _ => return None,
    })
}

fn tokenizer_config_json(config: &ModelConfig, vocabulary: &Vocabulary) -> Value {
    let text = |id: Option<TokenId>| id.and_then(|id| vocabulary.tokens.get(id as usize)).cloned();
    let mut fields = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": false,
        "add_prefix_space": false,
        "add_bos_token": vocabulary.add_bos,
    });
    let optional = [
        ("eos_token", text(end_of_turn(vocabulary))),
        ("bos_token", text(vocabulary.bos)),
        ("unk_token", text(vocabulary.unknown)),
        ("pad_token", text(vocabulary.padding)),
        ("chat_template", vocabulary.chat_template.clone()),
    ];
    if let Value::Object(fields) = &mut fields {
        fields.extend(optional.into_iter().filter_map(|(key, text)| Some((key.to_owned(), Value::String(text?)))));
    }
    fields
}

/// The one id that ends a turn: `<|im_end|>` where it ends a generation, else the first that does.
fn end_of_turn(vocabulary: &Vocabulary) -> Option<TokenId> {
    let is_im_end = |id: &&TokenId| vocabulary.tokens.get(**id as usize).is_some_and(|token| token == "<|im_end|>");
    vocabulary.eos.iter().find(is_im_end).or(vocabulary.eos.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Specials, Tokenizer};

    fn vocabulary(pre_tokenizer: &str) -> Vocabulary {
        let file: Value =
            serde_json::from_str(include_str!("../../tests/data/text/tiny_tokenizer/tokenizer.json")).unwrap();
        let vocab = file["model"]["vocab"].as_object().unwrap();
        let mut tokens = vec![String::new(); vocab.len()];
        for (token, id) in vocab {
            tokens[id.as_u64().unwrap() as usize] = token.clone();
        }
        let mut kinds = vec![TokenKind::Normal; tokens.len()];
        kinds[..2].fill(TokenKind::Control);
        tokens.extend(["<tool>".to_owned(), "[PAD]".to_owned()]);
        kinds.extend([TokenKind::UserDefined, TokenKind::Unused]);
        let merges = file["model"]["merges"].as_array().unwrap().iter();
        Vocabulary {
            model: "gpt2".into(),
            pre_tokenizer: pre_tokenizer.into(),
            tokens,
            kinds,
            merges: merges.map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap())).collect(),
            eos: vec![1],
            ..Vocabulary::default()
        }
    }

    /// The published library reads the file and gives the ids that the GGUF file's vocabulary gives.
    #[test]
    fn the_published_tokenizer_library_gives_the_same_ids() {
        let texts = [
            "Hello, world! It's 1234 o'clock.\n\nBye",
            "<|im_start|>user\nhi<|im_end|>\n<tool> x",
            "Merhaba, bugün hava   çok güzel! 🚀 42",
            "tabs\tand\r\nlines  \n  end ",
        ];
        for name in ["gpt-2", "smollm", "qwen2", "llama-bpe", "default"] {
            let vocabulary = vocabulary(name);
            let own = Tokenizer::from_vocabulary(&vocabulary).unwrap();
            let file = tokenizer_json(&vocabulary, pre_tokenizer(name).unwrap()).to_string();
            let published: tokenizers::Tokenizer = file.parse().unwrap();
            for text in texts {
                let encoding = published.encode_fast(text, false).unwrap();
                assert_eq!(encoding.get_ids(), own.encode(text, Specials::Parse).unwrap(), "{name}: {text:?}");
            }
        }
        assert!(pre_tokenizer("unheard-of").is_none());
    }

    #[test]
    fn the_end_of_a_turn_is_named() {
        let mut vocabulary = vocabulary("smollm");
        vocabulary.eos = vec![0, 1];
        assert_eq!(end_of_turn(&vocabulary), Some(1));
        vocabulary.eos = vec![0];
        assert_eq!(end_of_turn(&vocabulary), Some(0));
        vocabulary.eos.clear();
        assert_eq!(end_of_turn(&vocabulary), None);
    }
}
