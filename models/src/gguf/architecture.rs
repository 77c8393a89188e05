//! Hyper-parameters of the architectures that are implemented: [`ARCHITECTURES`].
//!
//! Every key under the architecture's prefix is either read, known to be without influence, or required to be neutral; any
//! other is refused by name, so that a model is never computed with a declared feature left out.

use super::features::{self, Frame};
use super::rope;
use super::value::Value;
use super::{Array, GgufFile};
use crate::config::{DecoderFeatures, ModelConfig, RopePairing};
use crate::error::ModelError;

/// Layers at most; more than any dense decoder has, and few enough for every product of shapes.
const MAX_LAYERS: u64 = 4096;
/// Elements of a width, heads, vocabulary rows at most.
const MAX_WIDTH: u64 = 1 << 24;

/// What sets an architecture apart.
struct Architecture {
    name: &'static str,
    pairing: RopePairing,
    qkv_bias: Presence,
    qk_norm: bool,
    /// What it adds to the plain decoder, from the keys `reads`.
    features: fn(&Keys<'_>, &Frame<'_>) -> Result<DecoderFeatures, ModelError>,
    reads: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Required,
    Optional,
}

const PLAIN: Architecture = Architecture {
    name: "",
    pairing: RopePairing::Halves,
    qkv_bias: Presence::Optional,
    qk_norm: false,
    features: features::plain,
    reads: &[],
};

const ARCHITECTURES: [Architecture; 7] = [
    Architecture {
        name: "llama",
        pairing: RopePairing::Interleaved,
        features: features::llama,
        reads: features::LLAMA_READS,
        ..PLAIN
    },
    Architecture {
        name: "qwen2",
        qkv_bias: Presence::Required,
        features: features::qwen,
        reads: features::QWEN_READS,
        ..PLAIN
    },
    Architecture { name: "qwen3", qk_norm: true, features: features::qwen, reads: features::QWEN_READS, ..PLAIN },
    Architecture { name: "gemma3", qk_norm: true, features: features::gemma3, reads: features::GEMMA3_READS, ..PLAIN },
    Architecture { name: "smollm3", pairing: RopePairing::Interleaved, features: features::smollm3, ..PLAIN },
    Architecture {
        name: "granite",
        pairing: RopePairing::Interleaved,
        features: features::granite,
        reads: features::GRANITE_READS,
        ..PLAIN
    },
    Architecture {
        name: "minicpm",
        pairing: RopePairing::Interleaved,
        features: features::minicpm,
        reads: features::MINICPM_READS,
        ..PLAIN
    },
];

/// Keys (after the prefix) that are read here or in [`rope`].
const READ: &[&str] = &[
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "context_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.alpha",
];

/// Keys without influence on the result, each with the reason.
const WITHOUT_INFLUENCE: &[(&str, &str)] = &[
    ("tensor_data_layout", "describes the conversion; the row order of q and k is that of the architecture"),
    ("attention.layer_norm_epsilon", "belongs to LayerNorm, which these architectures do not have"),
    ("attention.group_norm_epsilon", "belongs to GroupNorm, which these architectures do not have"),
    ("attention.group_norm_groups", "belongs to GroupNorm, which these architectures do not have"),
    ("attention.sliding_window_pattern", "only with attention.sliding_window, which is read or refused"),
    ("rope.freq_base_swa", "only with attention.sliding_window, which is read or refused"),
    ("expert_used_count", "only with experts, which are refused"),
    ("expert_feed_forward_length", "only with experts, which are refused"),
    ("expert_shared_feed_forward_length", "only with experts, which are refused"),
    ("expert_weights_scale", "only with experts, which are refused"),
    ("expert_weights_norm", "only with experts, which are refused"),
    ("expert_gating_func", "only with experts, which are refused"),
    ("leading_dense_block_count", "only with experts, which are refused"),
    ("interleave_moe_layer_step", "only with experts, which are refused"),
];

/// Value with which a feature that is not implemented changes nothing.
#[derive(Clone, Copy)]
enum Neutral {
    Zero,
    /// GGUF tools write 0 for "not set".
    ZeroOrOne,
    Bool(bool),
    Zeros,
    WholeContext,
    HiddenSize,
    HeadDim,
    RopeDims,
    AttentionScale,
}

const MUST_BE_NEUTRAL: &[(&str, Neutral)] = &[
    ("expert_count", Neutral::Zero),
    ("expert_shared_count", Neutral::Zero),
    ("expert_group_count", Neutral::Zero),
    ("expert_group_used_count", Neutral::Zero),
    ("nextn_predict_layers", Neutral::Zero),
    ("rescale_every_n_layers", Neutral::Zero),
    ("use_parallel_residual", Neutral::Bool(false)),
    ("swin_norm", Neutral::Bool(false)),
    ("pooling_type", Neutral::Zero),
    ("logit_scale", Neutral::ZeroOrOne),
    ("embedding_scale", Neutral::ZeroOrOne),
    ("residual_scale", Neutral::ZeroOrOne),
    ("attn_logit_softcapping", Neutral::Zero),
    ("router_logit_softcapping", Neutral::Zero),
    ("final_logit_softcapping", Neutral::Zero),
    ("embedding_length_out", Neutral::HiddenSize),
    ("attention.scale", Neutral::AttentionScale),
    ("attention.output_scale", Neutral::ZeroOrOne),
    ("attention.temperature_length", Neutral::Zero),
    ("attention.temperature_scale", Neutral::Zero),
    ("attention.clamp_kqv", Neutral::Zero),
    ("attention.max_alibi_bias", Neutral::Zero),
    ("attention.causal", Neutral::Bool(true)),
    ("attention.sliding_window", Neutral::WholeContext),
    ("attention.key_length_swa", Neutral::HeadDim),
    ("attention.value_length_swa", Neutral::HeadDim),
    ("rope.dimension_count_swa", Neutral::RopeDims),
    ("attention.shared_kv_layers", Neutral::Zero),
    ("attention.q_lora_rank", Neutral::Zero),
    ("attention.kv_lora_rank", Neutral::Zero),
    ("rope.dimension_sections", Neutral::Zeros),
];

/// Reads the configuration and checks it against itself and the vocabulary-sized tensors.
pub(super) fn read(file: &GgufFile) -> Result<ModelConfig, ModelError> {
    check_file_kind(file)?;
    let architecture = find_architecture(file)?;
    let keys = Keys { file, arch: architecture.name };
    let layers = keys.require_size("block_count", MAX_LAYERS)?;
    let hidden_size = keys.require_size("embedding_length", MAX_WIDTH)?;
    let context_length = keys.require_size("context_length", u64::from(u32::MAX))?;
    let heads = keys.require_uniform("attention.head_count", layers)?;
    let kv_heads = keys.uniform("attention.head_count_kv", layers)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let reason = format!("wanted a divisor of the {heads} query heads, found {kv_heads}");
        return Err(file.malformed(keys.full("attention.head_count_kv"), reason));
    }
    let head_dim = head_dim(&keys, hidden_size, heads)?;
    let intermediate_size = keys.require_uniform("feed_forward_length", layers)?;
    let rope = rope::read(&keys, architecture.pairing, head_dim, context_length)?;
    let features = (architecture.features)(&keys, &Frame { layers, hidden_size, heads, context_length, rope: &rope })?;
    let config = ModelConfig {
        model_type: architecture.name.to_owned(),
        name: file.string("general.name")?.unwrap_or_default().to_owned(),
        hidden_size,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate_size,
        vocab_size: vocab_size(&keys)?,
        context_length,
        rms_norm_eps: rms_norm_eps(&keys)?,
        rope,
        qkv_bias: architecture.qkv_bias == Presence::Required || has_qkv_bias(file),
        qk_norm: architecture.qk_norm,
        tied_head: file.tensor_info("output.weight").is_none(),
        features,
    };
    check_features(&keys, architecture.reads, &config)?;
    Ok(config)
}

/// Typed access to the keys under the architecture's prefix.
pub(super) struct Keys<'a> {
    pub(super) file: &'a GgufFile,
    arch: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub(super) fn get(&self, key: &str) -> Option<Value<'a>> {
        self.file.get(&self.full(key))
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.file.float(&self.full(key))
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.file.string(&self.full(key))
    }

    pub(super) fn malformed(&self, key: &str, reason: String) -> ModelError {
        self.file.malformed(self.full(key), reason)
    }

    /// `feature` is `key = value`.
    pub(super) fn unsupported(&self, key: &str, supported: impl Into<String>) -> ModelError {
        let value = self.get(key).map_or_else(|| "absent".to_owned(), |value| value.to_string());
        self.file.unsupported(format!("{} = {value}", self.full(key)), supported)
    }

    /// A size from 1 to `limit`.
    pub(super) fn size(&self, key: &str, limit: u64) -> Result<Option<usize>, ModelError> {
        self.file.unsigned(&self.full(key))?.map(|value| self.bounded(key, value, limit)).transpose()
    }

    fn require_size(&self, key: &str, limit: u64) -> Result<usize, ModelError> {
        self.size(key, limit)?.ok_or_else(|| self.missing(key))
    }

    /// A size that may also be stated as an array with one value a layer, as long as all are equal.
    fn uniform(&self, key: &str, layers: usize) -> Result<Option<usize>, ModelError> {
        match self.get(key) {
            Some(Value::Array(array)) => self.uniform_array(key, &array, layers).map(Some),
            _ => self.size(key, MAX_WIDTH),
        }
    }

    fn require_uniform(&self, key: &str, layers: usize) -> Result<usize, ModelError> {
        self.uniform(key, layers)?.ok_or_else(|| self.missing(key))
    }

    fn uniform_array(&self, key: &str, array: &Array<'_>, layers: usize) -> Result<usize, ModelError> {
        if array.len() != layers {
            return Err(
                self.malformed(key, format!("wanted one value for each of {layers} layers, found {}", array.len()))
            );
        }
        let mut common = None;
        for value in array.iter() {
            let Some(found) = value.as_unsigned() else {
                let reason = format!("wanted integers, not negative, found {}", value.describe());
                return Err(self.malformed(key, reason));
            };
            if *common.get_or_insert(found) != found {
                return Err(self.unsupported(key, "the same value in every layer"));
            }
        }
        // `layers` is at least 1, so there is a value.
        self.bounded(key, common.unwrap_or(0), MAX_WIDTH)
    }

    fn bounded(&self, key: &str, value: u64, limit: u64) -> Result<usize, ModelError> {
        usize::try_from(value)
            .ok()
            .filter(|_| (1..=limit).contains(&value))
            .ok_or_else(|| self.malformed(key, format!("wanted a number from 1 to {limit}, found {value}")))
    }

    pub(super) fn missing(&self, key: &str) -> ModelError {
        self.file.missing(format!("metadata key {}", self.full(key)), "convert the model again with a current tool")
    }
}

fn check_file_kind(file: &GgufFile) -> Result<(), ModelError> {
    if let Some(kind) = file.string("general.type")?
        && kind != "model"
    {
        return Err(file.unsupported(format!("general.type = {}", Value::String(kind)), "\"model\""));
    }
    if let Some(parts @ 2..) = file.unsigned("split.count")?
        && file.part_count() as u64 != parts
    {
        let feature = format!("one of the {parts} files of a split model alone (split.count)");
        let supported = "all of them in one folder where the model runs; to pack or to convert it, join them first \
                         (llama-gguf-split --merge)";
        return Err(file.unsupported(feature, supported));
    }
    match file.unsigned("general.quantization_version")? {
        None | Some(2) => Ok(()),
        Some(version) => Err(file.unsupported(format!("general.quantization_version = {version}"), "2")),
    }
}

fn find_architecture(file: &GgufFile) -> Result<&'static Architecture, ModelError> {
    let Some(name) = file.string("general.architecture")? else {
        return Err(file.missing("metadata key general.architecture", ""));
    };
    ARCHITECTURES.iter().find(|architecture| architecture.name == name).ok_or_else(|| {
        file.unsupported(
            format!("architecture {}", Value::String(name)),
            ARCHITECTURES.map(|architecture| architecture.name).join(", "),
        )
    })
}

fn head_dim(keys: &Keys<'_>, hidden_size: usize, heads: usize) -> Result<usize, ModelError> {
    let head_dim = match keys.size("attention.key_length", MAX_WIDTH)? {
        Some(stated) => stated,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let reason = format!("wanted a divisor of the hidden size {hidden_size}, found {heads}");
            return Err(keys.malformed("attention.head_count", reason));
        }
    };
    match keys.size("attention.value_length", MAX_WIDTH)? {
        Some(values) if values != head_dim => {
            Err(keys.unsupported("attention.value_length", format!("the key length, {head_dim}")))
        }
        _ => Ok(head_dim),
    }
}

/// Rows of the embedding; a stated `vocab_size` must be that or the number of tokens.
fn vocab_size(keys: &Keys<'_>) -> Result<usize, ModelError> {
    let file = keys.file;
    let Some(info) = file.tensor_info("token_embd.weight") else {
        return Err(file.missing("tensor \"token_embd.weight\"", "the file is incomplete"));
    };
    let rows = info.dims().get(1).copied().unwrap_or(1);
    let rows = usize::try_from(rows).ok().filter(|_| rows <= MAX_WIDTH).ok_or_else(|| {
        file.malformed("tensor \"token_embd.weight\"", format!("wanted at most {MAX_WIDTH} rows, found {rows}"))
    })?;
    let tokens = file.array("tokenizer.ggml.tokens")?.map_or(rows, |tokens| tokens.len());
    match keys.size("vocab_size", MAX_WIDTH)? {
        Some(stated) if stated != rows && stated != tokens => {
            let reason = format!("wanted the {rows} rows of token_embd.weight or the {tokens} tokens, found {stated}");
            Err(keys.malformed("vocab_size", reason))
        }
        _ => Ok(rows),
    }
}

fn rms_norm_eps(keys: &Keys<'_>) -> Result<f32, ModelError> {
    let key = "attention.layer_norm_rms_epsilon";
    match keys.float(key)? {
        Some(eps) if eps > 0.0 && eps < 1.0 => Ok(eps),
        Some(eps) => Err(keys.malformed(key, format!("wanted a number between 0 and 1, found {eps}"))),
        None => Err(keys.missing(key)),
    }
}

fn has_qkv_bias(file: &GgufFile) -> bool {
    let suffixes = [".attn_q.bias", ".attn_k.bias", ".attn_v.bias"];
    file.tensors().iter().any(|info| suffixes.iter().any(|suffix| info.name().ends_with(suffix)))
}

fn check_features(keys: &Keys<'_>, reads: &[&str], config: &ModelConfig) -> Result<(), ModelError> {
    for (full, value) in keys.file.metadata() {
        let Some(key) = full.strip_prefix(keys.arch).and_then(|rest| rest.strip_prefix('.')) else { continue };
        if READ.contains(&key) || reads.contains(&key) || WITHOUT_INFLUENCE.iter().any(|(known, _)| *known == key) {
            continue;
        }
        match MUST_BE_NEUTRAL.iter().find(|(known, _)| *known == key) {
            Some((_, neutral)) => check_neutral(keys, key, &value, *neutral, config)?,
            None => {
                let feature = format!("the metadata key {} = {value}", Value::String(full));
                let supported = "the keys of the GGUF specification for a dense decoder".to_owned();
                return Err(keys.file.unsupported(feature, supported));
            }
        }
    }
    Ok(())
}

fn check_neutral(
    keys: &Keys<'_>,
    key: &str,
    value: &Value<'_>,
    neutral: Neutral,
    config: &ModelConfig,
) -> Result<(), ModelError> {
    let number = value.as_unsigned().map(|value| value as f64).or(value.as_float().map(f64::from));
    let (accepted, supported) = match neutral {
        Neutral::Zero => (number == Some(0.0), "0".to_owned()),
        Neutral::ZeroOrOne => (matches!(number, Some(0.0 | 1.0)), "1".to_owned()),
        Neutral::Bool(wanted) => (value.as_bool() == Some(wanted), wanted.to_string()),
        Neutral::Zeros => {
            let zeros = value.as_array().is_some_and(|array| array.iter().all(|value| value.as_unsigned() == Some(0)));
            (zeros, "zeros".to_owned())
        }
        Neutral::WholeContext => (
            number.is_some_and(|window| window == 0.0 || window >= config.context_length as f64),
            format!("0, or a window of at least the context length {}", config.context_length),
        ),
        Neutral::HeadDim => (number == Some(config.head_dim as f64), config.head_dim.to_string()),
        Neutral::RopeDims => (number == Some(config.rope.dims as f64), config.rope.dims.to_string()),
        Neutral::HiddenSize => (number == Some(config.hidden_size as f64), config.hidden_size.to_string()),
        Neutral::AttentionScale => {
            let usual = 1.0 / (config.head_dim as f64).sqrt();
            let close = |scale: f64| scale == 0.0 || (scale / usual - 1.0).abs() < 1e-6;
            (number.is_some_and(close), format!("{usual}, the inverse root of the head dimension"))
        }
    };
    if accepted { Ok(()) } else { Err(keys.unsupported(key, supported)) }
}
