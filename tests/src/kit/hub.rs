//! Small models as Hugging Face directories, with the weights of the same model's GGUF file.
//!
//! Keys and names are those of the transformers library: query and key rows ordered for rotation by halves, Gemma's norms without
//! the 1 that its GGUF files have added.

use crate::kit::gguf::{GgufFile, GgufTensor, weight_type};
use crate::kit::model::{Architecture, ModelSpec, Scaling, byte_level_merges, token_texts};
use npuhal_models::WeightType;
use serde_json::{Map, Value, json};
use std::io;
use std::path::Path;

/// A tensor as safetensors files hold it.
#[derive(Debug, Clone)]
pub struct HubTensor {
    /// Name.
    pub name: String,
    /// `F32`, `F16`, `BF16`.
    pub dtype: &'static str,
    /// Dimensions, rows first.
    pub shape: Vec<u64>,
    /// Data.
    pub bytes: Vec<u8>,
}

/// The contents of a directory. Fields are public so that tests can damage them.
#[derive(Debug, Clone)]
pub struct HubDirectory {
    /// `config.json`.
    pub config: Value,
    /// `tokenizer.json`.
    pub tokenizer: Value,
    /// `generation_config.json`.
    pub generation: Value,
    /// Weights.
    pub tensors: Vec<HubTensor>,
}

impl HubDirectory {
    /// The model of `spec`, whose weights are all of one plain type.
    ///
    /// # Panics
    /// For quantized weights, which such directories do not hold.
    #[must_use]
    pub fn new(spec: &ModelSpec) -> Self {
        Self::of(spec, &spec.build())
    }

    /// The same with the weights of `file`.
    ///
    /// # Panics
    /// As [`HubDirectory::new`].
    #[must_use]
    pub fn of(spec: &ModelSpec, file: &GgufFile) -> Self {
        let tensors = file.tensors.iter().filter_map(|tensor| hub_tensor(spec, tensor)).collect();
        let ends = file.get("tokenizer.ggml.eos_token_id").and_then(crate::kit::gguf::Value::as_usize);
        Self {
            config: config(spec, file),
            tokenizer: tokenizer(),
            generation: json!({ "eos_token_id": ends, "do_sample": true, "temperature": 0.6, "top_p": 0.95 }),
            tensors,
        }
    }

    /// Writes the directory, the weights in `shards` files.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, directory: &Path, shards: usize) -> io::Result<()> {
        let text = |name: &str, value: &Value| std::fs::write(directory.join(name), value.to_string());
        text("config.json", &self.config)?;
        text("tokenizer.json", &self.tokenizer)?;
        text("generation_config.json", &self.generation)?;
        if shards == 1 {
            return std::fs::write(directory.join("model.safetensors"), safetensors(&self.tensors));
        }
        let mut weight_map = Map::new();
        for (index, part) in self.tensors.chunks(self.tensors.len().div_ceil(shards)).enumerate() {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
            weight_map.extend(part.iter().map(|tensor| (tensor.name.clone(), json!(name))));
            std::fs::write(directory.join(&name), safetensors(part))?;
        }
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": weight_map });
        text("model.safetensors.index.json", &index)
    }
}

/// A safetensors file of `tensors`.
#[must_use]
pub fn safetensors(tensors: &[HubTensor]) -> Vec<u8> {
    let mut header = Map::new();
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes.len();
        let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end] });
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let data = tensors.iter().flat_map(|tensor| tensor.bytes.iter().copied());
    (header.len() as u64).to_le_bytes().into_iter().chain(header.iter().copied()).chain(data).collect()
}

fn hub_tensor(spec: &ModelSpec, tensor: &GgufTensor) -> Option<HubTensor> {
    let name = hub_name(spec.architecture, &tensor.name)?;
    let kind = weight_type(tensor.type_id);
    let (dtype, element) = match kind {
        Some(WeightType::F32) => ("F32", 4),
        Some(WeightType::F16) => ("F16", 2),
        Some(WeightType::Bf16) => ("BF16", 2),
        other => panic!("{} is {other:?}", tensor.name),
    };
    let mut bytes = tensor.bytes.clone();
    let row = tensor.dims.first().map_or(0, |cols| *cols as usize) * element;
    if spec.architecture.is_interleaved() && (name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight")) {
        let half = spec.head_dim / 2;
        for (from, row_bytes) in tensor.bytes.chunks_exact(row).enumerate() {
            let (head, within) = (from / spec.head_dim, from % spec.head_dim);
            let to = head * spec.head_dim + within % 2 * half + within / 2;
            bytes[to * row..(to + 1) * row].copy_from_slice(row_bytes);
        }
    }
    if spec.architecture == Architecture::Gemma3 && name.ends_with("norm.weight") {
        for value in bytes.chunks_exact_mut(4) {
            let stored = f32::from_le_bytes([value[0], value[1], value[2], value[3]]);
            value.copy_from_slice(&(stored - 1.0).to_le_bytes());
        }
    }
    let shape = tensor.dims.iter().rev().copied().collect();
    Some(HubTensor { name, dtype, shape, bytes })
}

fn hub_name(architecture: Architecture, name: &str) -> Option<String> {
    let is_gemma = architecture == Architecture::Gemma3;
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return match name {
            "token_embd.weight" => Some("model.embed_tokens.weight".to_owned()),
            "output_norm.weight" => Some("model.norm.weight".to_owned()),
            "output.weight" => Some("lm_head.weight".to_owned()),
            // In the configuration.
            _ => None,
        };
    };
    let part = match part {
        "attn_norm.weight" => "input_layernorm.weight".to_owned(),
        "ffn_norm.weight" if is_gemma => "pre_feedforward_layernorm.weight".to_owned(),
        "ffn_norm.weight" | "post_attention_norm.weight" => "post_attention_layernorm.weight".to_owned(),
        "post_ffw_norm.weight" => "post_feedforward_layernorm.weight".to_owned(),
        "attn_output.weight" => "self_attn.o_proj.weight".to_owned(),
        "attn_q_norm.weight" => "self_attn.q_norm.weight".to_owned(),
        "attn_k_norm.weight" => "self_attn.k_norm.weight".to_owned(),
        other => {
            let (stem, kind) = other.split_once('.')?;
            match stem.split_once('_')? {
                ("attn", letter) => format!("self_attn.{letter}_proj.{kind}"),
                ("ffn", place) => format!("mlp.{place}_proj.{kind}"),
                _ => return None,
            }
        }
    };
    Some(format!("model.layers.{layer}.{part}"))
}

fn config(spec: &ModelSpec, file: &GgufFile) -> Value {
    let vocab = file.tensor("token_embd.weight").and_then(|tensor| tensor.dims.get(1).copied());
    let mut config = json!({
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": f64::from(spec.eps),
        "rope_theta": f64::from(spec.rope_theta),
        "vocab_size": vocab,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float32",
    });
    let scales = spec.scales();
    let own = match spec.architecture {
        Architecture::Llama => json!({ "model_type": "llama", "hidden_act": "silu" }),
        Architecture::Qwen2 | Architecture::Qwen3 => json!({
            "model_type": spec.architecture.name(),
            "attention_bias": false,
            // Files state a window that is not in use.
            "use_sliding_window": spec.windowed_from.is_some(),
            "sliding_window": spec.window,
            "max_window_layers": spec.windowed_from.unwrap_or(spec.layers),
        }),
        Architecture::Mistral => json!({ "model_type": "mistral", "sliding_window": spec.window }),
        Architecture::Gemma3 => json!({
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": spec.query_scalar.unwrap_or(spec.head_dim as f32),
            "sliding_window": spec.window,
            "sliding_window_pattern": spec.window_period.unwrap_or(6),
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": spec.softcap,
        }),
        Architecture::SmolLm3 => json!({ "model_type": "smollm3", "no_rope_layer_interval": 4 }),
        Architecture::Granite => json!({
            "model_type": "granite",
            "embedding_multiplier": scales.embedding,
            "residual_multiplier": scales.residual,
            "attention_multiplier": scales.attention,
            "logits_scaling": scales.logit_divisor,
        }),
        Architecture::MiniCpm => json!({
            "model_type": "minicpm",
            "scale_emb": scales.embedding,
            "scale_depth": 1.4,
            "dim_model_base": 16,
        }),
    };
    let scaling = match (&spec.scaling, spec.rope_factor) {
        (_, Some(factor)) => json!({ "rope_type": "linear", "factor": factor }),
        (Scaling::Yarn { factor, original }, _) => {
            json!({ "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original })
        }
        (Scaling::LongRope { original, attention_factor }, _) => {
            let [short, long] = Scaling::divisors(spec.head_dim / 2);
            json!({
                "type": "longrope",
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
                "short_factor": short,
                "long_factor": long,
            })
        }
        (Scaling::Llama3 { factor, original }, _) => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }),
        (Scaling::None, None) => Value::Null,
    };
    if let Value::Object(config) = &mut config {
        config.insert("rope_scaling".to_owned(), scaling);
        if let Value::Object(own) = own {
            config.extend(own);
        }
    }
    config
}

/// The vocabulary of [`token_texts`] as byte-level BPE.
fn tokenizer() -> Value {
    let texts = token_texts();
    let is_control = |text: &&String| text.starts_with("<|");
    let vocab: Map<String, Value> = texts
        .iter()
        .enumerate()
        .filter(|(_, text)| !is_control(text))
        .map(|(id, text)| (text.clone(), json!(id)))
        .collect();
    let added: Vec<Value> = texts
        .iter()
        .enumerate()
        .filter(|(_, text)| is_control(text))
        .map(|(id, text)| {
            json!({
                "id": id, "content": text, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": byte_level_merges() },
    })
}
