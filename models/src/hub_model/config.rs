//! `config.json` as a [`ModelConfig`].

use super::features::{self, Frame};
use super::rope;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::json_keys::{Keys, short};
use serde_json::Value;

/// Layers at most; more than any dense decoder has.
const MAX_LAYERS: u64 = 4096;
/// Widths, heads and vocabulary rows at most.
const MAX_WIDTH: u64 = 1 << 24;

/// A family, and the library's defaults for what a file may leave out.
struct Family {
    model_type: &'static str,
    /// Type of a configuration that holds this one under `text_config`.
    outer: Option<&'static str>,
    qkv_bias: bool,
    qk_norm: bool,
    is_tied: bool,
    theta: f32,
    kv_heads: Option<usize>,
    /// Of a family whose files leave most out.
    sizes: Option<Sizes>,
    features: features::Read,
    /// Keys with scales that `features` reads.
    reads: &'static [&'static str],
}

#[derive(Clone, Copy)]
struct Sizes {
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    head_dim: usize,
    context_length: usize,
}

const PLAIN: Family = Family {
    model_type: "llama",
    outer: None,
    qkv_bias: false,
    qk_norm: false,
    is_tied: false,
    theta: 10_000.0,
    kv_heads: None,
    sizes: None,
    features: features::llama,
    reads: &[],
};

const FAMILIES: [Family; 8] = [
    PLAIN,
    Family { model_type: "mistral", kv_heads: Some(8), features: features::mistral, ..PLAIN },
    Family { model_type: "qwen2", qkv_bias: true, kv_heads: Some(32), features: features::qwen, ..PLAIN },
    Family { model_type: "qwen3", qk_norm: true, kv_heads: Some(32), features: features::qwen, ..PLAIN },
    Family {
        model_type: "gemma3_text",
        outer: Some("gemma3"),
        qk_norm: true,
        is_tied: true,
        theta: 1e6,
        kv_heads: Some(4),
        sizes: Some(Sizes {
            hidden_size: 2304,
            intermediate_size: 9216,
            layers: 26,
            heads: 8,
            head_dim: 256,
            context_length: 131_072,
        }),
        features: features::gemma3,
        reads: &["query_pre_attn_scalar", "final_logit_softcapping"],
        ..PLAIN
    },
    Family {
        model_type: "smollm3",
        is_tied: true,
        theta: 2e6,
        kv_heads: Some(4),
        features: features::smollm3,
        ..PLAIN
    },
    Family {
        model_type: "granite",
        features: features::granite,
        reads: &["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
        ..PLAIN
    },
    Family {
        model_type: "minicpm",
        is_tied: true,
        features: features::minicpm,
        reads: &["scale_emb", "scale_depth", "dim_model_base"],
        ..PLAIN
    },
];

/// Parts of names of numbers that change every result.
const SUSPECT: [&str; 6] = ["scale", "scaling", "softcap", "multiplier", "dim_model_base", "query_pre_attn_scalar"];
/// Numbers with such names that do not.
const WITHOUT_INFLUENCE: [&str; 1] = ["routed_scaling_factor"];
/// Keys of features that are not implemented, and the value with which they change nothing beside null, false and 0.
const REFUSED: [(&str, u64); 8] = [
    ("num_local_experts", 1),
    ("num_experts", 1),
    ("n_routed_experts", 1),
    ("num_experts_per_tok", 1),
    ("quantization_config", 0),
    ("attn_logit_softcapping", 0),
    ("cla_share_factor", 1),
    ("num_nextn_predict_layers", 0),
];

/// Reads the configuration of a model whose embedding has `vocab_size` rows; `is_biased` tells whether its weights have biases
/// of q, k and v.
pub(super) fn read(keys: &Keys<'_>, vocab_size: usize, is_biased: bool) -> Result<ModelConfig, ModelError> {
    let stated = keys.text("model_type")?.ok_or_else(|| keys.missing("model_type"))?;
    let family = FAMILIES.iter().find(|family| family.model_type == stated || family.outer == Some(stated.as_str()));
    let Some(family) = family else {
        let supported: Vec<&str> =
            FAMILIES.iter().flat_map(|family| [Some(family.model_type), family.outer]).flatten().collect();
        let clipped: String = stated.chars().take(60).collect();
        return Err(keys.unsupported(format!("model_type {clipped:?}"), &supported.join(", ")));
    };
    check_refused(keys)?;
    let outer = keys;
    let inner = match family.outer == Some(stated.as_str()) {
        true => keys.object("text_config")?.ok_or_else(|| keys.missing("text_config"))?,
        false => *keys,
    };
    let keys = &inner;
    check_refused(keys)?;
    check_scales(keys, family)?;
    let size = |key: &str, limit: u64, usual: fn(Sizes) -> usize| match (keys.size(key, limit)?, family.sizes) {
        (Some(size), _) => Ok(size),
        (None, Some(sizes)) => Ok(usual(sizes)),
        (None, None) => Err(keys.missing(key)),
    };
    let hidden_size = size("hidden_size", MAX_WIDTH, |sizes| sizes.hidden_size)?;
    let layers = size("num_hidden_layers", MAX_LAYERS, |sizes| sizes.layers)?;
    let heads = size("num_attention_heads", MAX_WIDTH, |sizes| sizes.heads)?;
    let intermediate_size = size("intermediate_size", MAX_WIDTH, |sizes| sizes.intermediate_size)?;
    let context_length = size("max_position_embeddings", u64::from(u32::MAX), |sizes| sizes.context_length)?;
    let kv_heads = match keys.map.get("num_key_value_heads") {
        Some(Value::Null) => heads,
        _ => keys.size("num_key_value_heads", MAX_WIDTH)?.or(family.kv_heads).unwrap_or(heads),
    };
    if !heads.is_multiple_of(kv_heads) {
        let reason = format!("wanted a divisor of the {heads} query heads, found {kv_heads}");
        return Err(keys.malformed("num_key_value_heads", reason));
    }
    let head_dim = match keys.size("head_dim", MAX_WIDTH)?.or(family.sizes.map(|sizes| sizes.head_dim)) {
        Some(stated) => stated,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let reason = format!("wanted a divisor of the hidden size {hidden_size}, found {heads}");
            return Err(keys.malformed("num_attention_heads", reason));
        }
    };
    if let Some(stated) = keys.size("vocab_size", MAX_WIDTH)?.filter(|stated| *stated != vocab_size) {
        return Err(
            keys.malformed("vocab_size", format!("wanted the {vocab_size} rows of the embedding, found {stated}"))
        );
    }
    let ropes = rope::read(keys, head_dim, context_length, family.theta)?;
    let frame =
        Frame { layers, hidden_size, head_dim, context_length, rope: &ropes.global, local_theta: ropes.local_theta };
    let features = (family.features)(keys, &frame)?;
    let is_tied = match keys.get("tie_word_embeddings").or(outer.get("tie_word_embeddings")) {
        None => family.is_tied,
        Some(value) => value
            .as_bool()
            .ok_or_else(|| keys.malformed("tie_word_embeddings", format!("wanted a bool, found {}", short(value))))?,
    };
    let name = outer.text("_name_or_path")?.unwrap_or_default();
    Ok(ModelConfig {
        model_type: if family.outer.is_some() { "gemma3".to_owned() } else { family.model_type.to_owned() },
        name: name.rsplit('/').next().unwrap_or_default().chars().take(200).collect(),
        hidden_size,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate_size,
        vocab_size,
        context_length,
        rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope: ropes.global,
        qkv_bias: family.qkv_bias || is_biased,
        qk_norm: family.qk_norm,
        tied_head: is_tied,
        features,
    })
}

fn check_refused(keys: &Keys<'_>) -> Result<(), ModelError> {
    for (key, neutral) in REFUSED {
        let Some(value) = keys.get(key) else { continue };
        let is_neutral =
            value == &Value::Bool(false) || value.as_f64().is_some_and(|value| value == 0.0 || value == neutral as f64);
        if !is_neutral {
            return Err(
                keys.unsupported(format!("{key} = {}", short(value)), "dense models in F32, F16 or BF16 without it")
            );
        }
    }
    Ok(())
}

/// Refuses every number by whose name it changes the result, unless the family reads it or it changes nothing.
fn check_scales(keys: &Keys<'_>, family: &Family) -> Result<(), ModelError> {
    for (key, value) in keys.map {
        let is_suspect = SUSPECT.iter().any(|part| key.contains(part));
        let number = value.as_f64().filter(|number| *number != 0.0 && *number != 1.0);
        let is_known = family.reads.contains(&key.as_str()) || WITHOUT_INFLUENCE.contains(&key.as_str());
        if let (true, Some(number), false) = (is_suspect, number, is_known) {
            let key: String = key.chars().take(60).collect();
            return Err(
                keys.unsupported(format!("{key} = {number} in a {} model", family.model_type), "models without it")
            );
        }
    }
    Ok(())
}
