//! `config.json` of a Q4NX directory: written from a GGUF model, read into a [`ModelConfig`].

use super::guard::{CRITICAL, DeclaredScale};
use super::stamp::CONVERTER;
use crate::config::{DecoderFeatures, ModelConfig, Rope, RopePairing, RopeScaling};
use crate::error::ModelError;
use crate::json_keys::{Keys, read_object};
use crate::source::ModelSource;
use npuhal_core::stage::TokenId;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Its file in the directory.
pub const FILE: &str = "config.json";
/// Longest configuration that is read.
const LIMIT_BYTES: u64 = 1 << 20;
/// Layers at most.
const MAX_LAYERS: u64 = 4096;
/// Widths and heads at most.
const MAX_WIDTH: u64 = 1 << 24;
/// Positions of a model whose configuration does not say: the reach of the published layer kernel.
const DEFAULT_CONTEXT: usize = 8192;
/// Epsilon of a model whose configuration does not say: that of Qwen2 and Qwen3.
const DEFAULT_EPS: f32 = 1e-6;
const DEFAULT_THETA: f32 = 10_000.0;
/// What to do where a required key is missing.
const REMEDY: &str = "every Q4NX directory states it; pack the model again";

/// What a `config.json` says.
#[derive(Debug, Clone, PartialEq)]
pub struct DirectoryConfig {
    /// Shape and constants.
    pub model: ModelConfig,
    /// Beginning-of-sequence id.
    pub bos: Option<TokenId>,
    /// Ids that end a generation, ascending.
    pub eos: Vec<TokenId>,
}

/// The configuration of the directory that `model`, from the GGUF file called `gguf`, is packed into. `neutral` are declared
/// scales that change nothing; they are carried over.
#[must_use]
pub fn config_json(model: &ModelSource, gguf: &str, neutral: &[DeclaredScale]) -> Map<String, Value> {
    let config = model.config();
    let vocabulary = model.vocabulary();
    let architecture = if config.model_type == "qwen2" { "Qwen2ForCausalLM" } else { "Qwen3ForCausalLM" };
    let eos = match *vocabulary.eos.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        ref several => json!(several),
    };
    let entries = [
        ("architectures", json!([architecture])),
        ("model_type", json!(config.model_type)),
        ("hidden_size", json!(config.hidden_size)),
        ("intermediate_size", json!(config.intermediate_size)),
        ("num_hidden_layers", json!(config.layers)),
        ("num_attention_heads", json!(config.heads)),
        ("num_key_value_heads", json!(config.kv_heads)),
        ("head_dim", json!(config.head_dim)),
        ("max_position_embeddings", json!(config.context_length)),
        ("rms_norm_eps", json!(seven_digits(config.rms_norm_eps))),
        ("rope_theta", json!(shortest(config.rope.theta))),
        ("vocab_size", json!(config.vocab_size)),
        ("bos_token_id", json!(vocabulary.bos)),
        ("eos_token_id", eos),
        ("tie_word_embeddings", json!(config.tied_head)),
        ("torch_dtype", json!("bfloat16")),
        ("hidden_act", json!("silu")),
        ("attention_bias", if config.qkv_bias { json!(true) } else { Value::Null }),
        ("qk_norm", if config.qk_norm { Value::Null } else { json!(false) }),
        ("q4nx_source", json!({ "converter": CONVERTER, "gguf": gguf })),
    ];
    let entries = entries.into_iter().filter(|(_, value)| !value.is_null());
    let scales = neutral.iter().map(|scale| (scale.key.clone(), json!(scale.value)));
    entries.map(|(key, value)| (key.to_owned(), value)).chain(scales).collect()
}

/// Seven significant digits, as the published converter writes an epsilon.
fn seven_digits(value: f32) -> f64 {
    format!("{value:.6e}").parse().unwrap_or(f64::from(value))
}

/// The shortest number that is this f32.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// The configuration file of `directory` as it is.
///
/// # Errors
/// [`ModelError::Io`], [`ModelError::Malformed`].
pub fn read_json(directory: &Path) -> Result<Map<String, Value>, ModelError> {
    read_object(&directory.join(FILE), LIMIT_BYTES)
}

/// Reads the configuration of `directory`, whose embedding has `vocab_size` rows; `has_bias` tells whether its file has
/// biases of q, k and v.
///
/// # Errors
/// [`ModelError::Io`]; [`ModelError::Malformed`]; [`ModelError::Missing`] for a required key; [`ModelError::Unsupported`] for
/// another model type and for a declared feature that is not implemented.
pub fn read(directory: &Path, vocab_size: usize, has_bias: bool) -> Result<DirectoryConfig, ModelError> {
    let map = read_json(directory)?;
    let path = directory.join(FILE);
    let keys = Keys { path: &path, map: &map, remedy: REMEDY };
    let model_type = keys.text("model_type")?.unwrap_or_default();
    let qk_norm = match model_type.as_str() {
        "qwen3" => true,
        "qwen2" => false,
        other => return Err(keys.unsupported(format!("model_type '{other}'"), "qwen3, qwen2")),
    };
    check_features(&keys)?;
    let hidden_size = keys.require("hidden_size", MAX_WIDTH)?;
    let heads = keys.require("num_attention_heads", MAX_WIDTH)?;
    let kv_heads = keys.size("num_key_value_heads", MAX_WIDTH)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let reason = format!("wanted a divisor of the {heads} query heads, found {kv_heads}");
        return Err(keys.malformed("num_key_value_heads", reason));
    }
    let head_dim = match keys.size("head_dim", MAX_WIDTH)? {
        Some(stated) => stated,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let reason = format!("wanted a divisor of the hidden size {hidden_size}, found {heads}");
            return Err(keys.malformed("num_attention_heads", reason));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(keys.malformed("head_dim", format!("wanted an even number, found {head_dim}")));
    }
    let model = ModelConfig {
        name: directory.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        hidden_size,
        layers: keys.require("num_hidden_layers", MAX_LAYERS)?,
        heads,
        kv_heads,
        head_dim,
        intermediate_size: keys.require("intermediate_size", MAX_WIDTH)?,
        vocab_size,
        context_length: keys.size("max_position_embeddings", u64::from(u32::MAX))?.unwrap_or(DEFAULT_CONTEXT),
        rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(DEFAULT_EPS),
        rope: Rope {
            theta: keys.positive("rope_theta")?.unwrap_or(DEFAULT_THETA),
            dims: head_dim,
            pairing: RopePairing::Halves,
            scaling: RopeScaling::None,
        },
        qkv_bias: has_bias,
        qk_norm,
        // The file always has tiles of the head.
        tied_head: false,
        features: DecoderFeatures::default(),
        model_type,
    };
    Ok(DirectoryConfig { model, bos: keys.ids("bos_token_id")?.first().copied(), eos: keys.ids("eos_token_id")? })
}

/// Refuses what is declared and not computed.
fn check_features(keys: &Keys<'_>) -> Result<(), ModelError> {
    for key in CRITICAL {
        let Some(value) = keys.map.get(key).filter(|value| !value.is_null()) else { continue };
        let number = value.as_f64().ok_or_else(|| keys.malformed(key, format!("wanted a number, found {value}")))?;
        if !(DeclaredScale { field: key.to_owned(), key: key.to_owned(), value: number }).is_neutral() {
            return Err(keys.unsupported(format!("{key} = {number}"), "models without scales and caps"));
        }
    }
    if let Some(scaling) = keys.map.get("rope_scaling").filter(|value| !value.is_null()) {
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
        if !matches!(kind, Some("default")) {
            return Err(keys.unsupported("rope_scaling", "RoPE without scaling"));
        }
    }
    if keys.map.get("use_sliding_window").and_then(Value::as_bool) == Some(true) {
        return Err(keys.unsupported("use_sliding_window = true", "attention to the whole context"));
    }
    match keys.text("hidden_act")?.as_deref() {
        None | Some("silu") => Ok(()),
        Some(other) => Err(keys.unsupported(format!("hidden_act = {other:?}"), "silu")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<DirectoryConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), text).unwrap();
        read(folder.path(), 100, false)
            .map_err(|error| error.to_string().replace(&folder.path().join(FILE).display().to_string(), "config.json"))
    }

    const GOOD: &str = r#"{"model_type":"qwen3","hidden_size":128,"num_hidden_layers":1,"num_attention_heads":2,"intermediate_size":128,"eos_token_id":[7,3,7]}"#;

    #[test]
    fn optional_keys_have_their_defaults() {
        let config = read_text(GOOD).unwrap();
        assert_eq!(config.eos, [3, 7]);
        let model = config.model;
        assert_eq!((model.kv_heads, model.head_dim, model.rope.theta), (2, 64, 10_000.0));
        assert_eq!((model.vocab_size, model.qk_norm, model.tied_head), (100, true, false));
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        for (from, to, wanted) in [
            ("\"qwen3\"", "\"gemma3\"", "model_type 'gemma3' is not supported; supported: qwen3, qwen2"),
            ("\"hidden_size\":128,", "", "hidden_size is missing"),
            ("\"hidden_size\":128", "\"hidden_size\":0", "hidden_size: wanted a number from 1 to 16777216, found 0"),
            ("\"hidden_size\":128", "\"hidden_size\":1e99", "hidden_size: wanted a number"),
            ("\"hidden_size\":128", "\"hidden_size\":129", "num_attention_heads: wanted a divisor"),
            ("\"eos_token_id\":[7,3,7]", "\"eos_token_id\":\"x\"", "eos_token_id: wanted a token id"),
            ("\"eos_token_id\":[7,3,7]", "\"logit_scale\":16", "logit_scale = 16 is not supported"),
            ("\"eos_token_id\":[7,3,7]", "\"rope_scaling\":{\"type\":\"yarn\"}", "rope_scaling is not supported"),
            ("\"eos_token_id\":[7,3,7]", "\"hidden_act\":\"gelu\"", "hidden_act = \"gelu\" is not supported"),
            (GOOD, "[]", "wanted a JSON object"),
            (GOOD, "", "wanted a JSON object"),
        ] {
            let error = read_text(&GOOD.replace(from, to)).unwrap_err();
            assert!(error.contains(wanted) && error.starts_with("config.json: "), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert!(read_text(&GOOD.replace("[7,3,7]", "1,\"logit_scale\":1.0")).is_ok());
    }

    #[test]
    fn an_epsilon_has_seven_digits() {
        assert_eq!(json!(seven_digits(1e-6)).to_string(), "1e-6");
        assert_eq!(json!(seven_digits(0.123_456_79)).to_string(), "0.1234568");
        assert_eq!(json!(shortest(1e6)).to_string(), "1000000.0");
    }
}
