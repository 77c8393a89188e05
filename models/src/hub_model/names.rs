//! Names of tensors as the `transformers` library gives them.

use crate::q4nx::names::{q4nx_name, role_of_q4nx};
use crate::source::{LayerTensor, TensorRole};

/// What a name stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Named {
    Role(TensorRole),
    WithoutInfluence,
    Unknown,
}

/// Names of Gemma 3's norms, where `post_attention_layernorm` is not the norm before the feed-forward block.
const GEMMA_NORMS: [(&str, LayerTensor); 3] = [
    ("post_attention_layernorm.weight", LayerTensor::AttentionOutputNorm),
    ("pre_feedforward_layernorm.weight", LayerTensor::PostAttentionNorm),
    ("post_feedforward_layernorm.weight", LayerTensor::FeedForwardOutputNorm),
];

/// Prefixes of a language model inside one that also takes images.
const LANGUAGE_PREFIXES: [(&str, &str); 3] =
    [("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.lm_head.", "lm_head.")];
/// Prefixes of the parts that take images.
const IMAGE_PREFIXES: [&str; 4] =
    ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

/// What `name` stands for in a model of `model_type`.
pub(super) fn role_of(name: &str, model_type: &str) -> Named {
    let is_gemma = is_gemma(model_type);
    // Frequencies follow from the configuration.
    if name.ends_with(".rotary_emb.inv_freq") || (is_gemma && IMAGE_PREFIXES.iter().any(|part| name.starts_with(part)))
    {
        return Named::WithoutInfluence;
    }
    let stripped = LANGUAGE_PREFIXES.iter().filter(|_| is_gemma);
    let stripped = stripped.clone().find_map(|(long, short)| Some(format!("{short}{}", name.strip_prefix(long)?)));
    let name = stripped.as_deref().unwrap_or(name);
    let gemma_norm = GEMMA_NORMS.iter().find(|(suffix, _)| is_gemma && name.ends_with(suffix));
    if let Some((suffix, part)) = gemma_norm {
        // Under the name of a norm that every model has, the layer is read as for all others.
        let usual = name.replace(suffix, "input_layernorm.weight");
        return match role_of_q4nx(&usual) {
            Some(TensorRole::Layer(layer, LayerTensor::InputNorm)) => Named::Role(TensorRole::Layer(layer, *part)),
            _ => Named::Unknown,
        };
    }
    role_of_q4nx(name).map_or(Named::Unknown, Named::Role)
}

/// The name of the tensor of `role` in a model of `model_type`, for messages.
pub(super) fn name_of(role: TensorRole, model_type: &str) -> String {
    if let TensorRole::Layer(layer, part) = role
        && is_gemma(model_type)
        && let Some((suffix, _)) = GEMMA_NORMS.iter().find(|(_, named)| *named == part)
    {
        return format!("model.layers.{layer}.{suffix}");
    }
    q4nx_name(role).unwrap_or_else(|| format!("{role:?}"))
}

pub(super) fn is_bias(role: TensorRole) -> bool {
    use LayerTensor::{KBias, QBias, VBias};
    matches!(role, TensorRole::Layer(_, QBias | KBias | VBias))
}

/// Both the model of text alone and the one that also takes images.
pub(super) fn is_gemma(model_type: &str) -> bool {
    matches!(model_type, "gemma3" | "gemma3_text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_of_gemma_are_told_from_those_of_others() {
        let role = |name: &str, model_type| role_of(name, model_type);
        let layer = |part| Named::Role(TensorRole::Layer(3, part));
        let name = "model.layers.3.post_attention_layernorm.weight";
        assert_eq!(role(name, "llama"), layer(LayerTensor::PostAttentionNorm));
        assert_eq!(role(name, "gemma3_text"), layer(LayerTensor::AttentionOutputNorm));
        let name = "model.layers.3.pre_feedforward_layernorm.weight";
        assert_eq!(
            (role(name, "llama"), role(name, "gemma3")),
            (Named::Unknown, layer(LayerTensor::PostAttentionNorm))
        );
        assert_eq!(role("language_model.model.layers.3.mlp.up_proj.weight", "gemma3"), layer(LayerTensor::Up));
        assert_eq!(role("language_model.model.layers.3.mlp.up_proj.weight", "llama"), Named::Unknown);
        assert_eq!(role("vision_tower.vision_model.embeddings.weight", "gemma3"), Named::WithoutInfluence);
        assert_eq!(role("model.layers.0.self_attn.rotary_emb.inv_freq", "llama"), Named::WithoutInfluence);
        assert_eq!(role("lm_head.weight", "llama"), Named::Role(TensorRole::Head));
        for unknown in ["model.layers.03.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias", "x", ""] {
            assert_eq!(role(unknown, "llama"), Named::Unknown, "{unknown}");
        }
        let part = TensorRole::Layer(3, LayerTensor::AttentionOutputNorm);
        assert_eq!(name_of(part, "gemma3_text"), "model.layers.3.post_attention_layernorm.weight");
    }
}
