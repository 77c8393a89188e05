//! The text half of a package made from a GGUF file: its vocabulary and configuration as the files of a Hugging Face checkpoint.

use super::error::PackageError;
use crate::config::ModelConfig;
use crate::q4nx::tokenizer::tokenizer_json;
use crate::vocabulary::Vocabulary;
use npuhal_core::stage::TokenId;
use serde_json::{Value, json};
use std::path::Path;

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
    let tokenizer = tokenizer_json(vocabulary).map_err(|reason| PackageError::Feature {
        path: path.to_owned(),
        feature: format!("the tokenizer ({reason})"),
        supported: "byte-level BPE with a known pre-tokenizer",
    })?;
    files.push(("tokenizer.json".to_owned(), tokenizer.into_bytes()));
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
    use crate::vocabulary::TokenKind;

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
            let file = tokenizer_json(&vocabulary).unwrap();
            let published: tokenizers::Tokenizer = file.parse().unwrap();
            for text in texts {
                let encoding = published.encode_fast(text, false).unwrap();
                assert_eq!(encoding.get_ids(), own.encode(text, Specials::Parse).unwrap(), "{name}: {text:?}");
            }
        }
        assert!(tokenizer_json(&vocabulary("unheard-of")).unwrap_err().contains("pre-tokenizer"));
    }

    #[test]
    fn a_merge_that_is_no_pair_is_not_left_out() {
        let mut damaged = vocabulary("smollm");
        damaged.merges.push("alone".to_owned());
        assert_eq!(tokenizer_json(&damaged).unwrap_err(), "the merge \"alone\" is no pair");
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
