//! Tensors by role, each with its shape checked against the configuration.

use super::rope::LONGROPE_TENSORS;
use super::{GgufFile, TensorInfo};
use crate::config::{ModelConfig, RopeScaling};
use crate::error::ModelError;
use crate::roles::{has_part, required, shape_of};
use crate::source::{LayerTensor, TensorRole};
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// Names of a layer's tensors, after `blk.N.`.
const LAYER_TENSORS: [(LayerTensor, &str); 16] = [
    (LayerTensor::InputNorm, "attn_norm.weight"),
    (LayerTensor::Q, "attn_q.weight"),
    (LayerTensor::QBias, "attn_q.bias"),
    (LayerTensor::QNorm, "attn_q_norm.weight"),
    (LayerTensor::K, "attn_k.weight"),
    (LayerTensor::KBias, "attn_k.bias"),
    (LayerTensor::KNorm, "attn_k_norm.weight"),
    (LayerTensor::V, "attn_v.weight"),
    (LayerTensor::VBias, "attn_v.bias"),
    (LayerTensor::O, "attn_output.weight"),
    (LayerTensor::AttentionOutputNorm, "post_attention_norm.weight"),
    (LayerTensor::PostAttentionNorm, "ffn_norm.weight"),
    (LayerTensor::Gate, "ffn_gate.weight"),
    (LayerTensor::Up, "ffn_up.weight"),
    (LayerTensor::Down, "ffn_down.weight"),
    (LayerTensor::FeedForwardOutputNorm, "post_ffw_norm.weight"),
];

/// Tensors without influence on the result, with the reason.
const WITHOUT_INFLUENCE: [(&str, &str); 1] = [(
    "attn_rot_embd.weight",
    "inverse RoPE frequencies as old converters stored them; they follow from rope.freq_base",
)];

/// Takes every tensor of the file into its role. What is unknown, of another shape, or missing is an error.
pub(super) fn assign(file: &GgufFile, config: &ModelConfig) -> Result<BTreeMap<TensorRole, Tensor>, ModelError> {
    let mut tensors = BTreeMap::new();
    for info in file.tensors() {
        if let Some(role) = role_of(file, info, config)? {
            let tensor = file.tensor(info)?;
            check_shape(file, info, &tensor, role, config)?;
            tensors.insert(role, tensor);
        }
    }
    for role in required(config) {
        if !tensors.contains_key(&role) {
            let remedy =
                format!("a {} model of {} layers has it; the file is incomplete", config.model_type, config.layers);
            return Err(file.missing(format!("tensor {:?}", name_of(role)), remedy));
        }
    }
    if let Some(factors) = tensors.get(&TensorRole::RopeFactors) {
        check_rope_factors(file, factors)?;
    }
    Ok(tensors)
}

/// Name of a role's tensor in a GGUF file.
pub(super) fn name_of(role: TensorRole) -> String {
    match role {
        TensorRole::TokenEmbedding => "token_embd.weight".to_owned(),
        TensorRole::FinalNorm => "output_norm.weight".to_owned(),
        TensorRole::Head => "output.weight".to_owned(),
        TensorRole::RopeFactors => "rope_freqs.weight".to_owned(),
        TensorRole::Layer(layer, wanted) => {
            let suffix = LAYER_TENSORS.iter().find(|(tensor, _)| *tensor == wanted).map_or("", |(_, suffix)| suffix);
            format!("blk.{layer}.{suffix}")
        }
    }
}

/// The tensor's role; `None` where it has no influence.
fn role_of(file: &GgufFile, info: &TensorInfo, config: &ModelConfig) -> Result<Option<TensorRole>, ModelError> {
    let unknown = || {
        let feature = format!("tensor {:?} in a model of architecture {}", info.name(), config.model_type);
        Err(file.unsupported(feature, "the tensors of a dense decoder with biases on q, k and v only"))
    };
    match info.name() {
        "token_embd.weight" => return Ok(Some(TensorRole::TokenEmbedding)),
        "output_norm.weight" => return Ok(Some(TensorRole::FinalNorm)),
        "output.weight" => return Ok(Some(TensorRole::Head)),
        "rope_freqs.weight" if matches!(config.model_type.as_str(), "llama" | "granite") => {
            return Ok(Some(TensorRole::RopeFactors));
        }
        // Read into the configuration.
        name if LONGROPE_TENSORS.contains(&name) && matches!(config.rope.scaling, RopeScaling::LongRope { .. }) => {
            return Ok(None);
        }
        _ => {}
    }
    let Some((layer, suffix)) = split_layer_name(info.name()) else { return unknown() };
    if layer >= config.layers {
        let reason =
            format!("wanted a layer below {} ({}.block_count), found {layer}", config.layers, config.model_type);
        return Err(file.malformed(format!("tensor {:?}", info.name()), reason));
    }
    if WITHOUT_INFLUENCE.iter().any(|(known, _)| *known == suffix) {
        return Ok(None);
    }
    match LAYER_TENSORS.iter().find(|(_, known)| *known == suffix) {
        Some((tensor, _)) if !has_part(config, *tensor) => unknown(),
        Some((tensor, _)) => Ok(Some(TensorRole::Layer(layer, *tensor))),
        None => unknown(),
    }
}

/// `blk.7.attn_q.weight` is layer 7 and `attn_q.weight`. One spelling a number: no sign, no leading zeros.
fn split_layer_name(name: &str) -> Option<(usize, &str)> {
    let (number, suffix) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, suffix))
}

fn check_shape(
    file: &GgufFile,
    info: &TensorInfo,
    tensor: &Tensor,
    role: TensorRole,
    config: &ModelConfig,
) -> Result<(), ModelError> {
    let (rows, cols) = shape_of(role, config);
    if (tensor.rows(), tensor.cols()) == (rows, cols) {
        return Ok(());
    }
    let wanted = if rows == 1 { format!("[{cols}]") } else { format!("[{cols}, {rows}]") };
    let reason = format!("wanted dimensions {wanted} from the hyper-parameters, found {:?}", info.dims());
    Err(file.malformed(format!("tensor {:?}", info.name()), reason))
}

fn check_rope_factors(file: &GgufFile, factors: &Tensor) -> Result<(), ModelError> {
    let mut values = vec![0.0; factors.cols()];
    let field = format!("tensor {:?}", factors.name());
    factors.dequantize_row(0, &mut values).map_err(|error| file.malformed(field.clone(), error.to_string()))?;
    match values.iter().position(|value| !value.is_finite() || *value <= 0.0) {
        Some(bad) => {
            Err(file.malformed(field, format!("wanted positive factors, found {} in element {bad}", values[bad])))
        }
        None => Ok(()),
    }
}
