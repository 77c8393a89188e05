//! Names of tensors: GGUF's, Q4NX's (those of Hugging Face files), and their roles.

use crate::source::{LayerTensor, TensorRole};

/// A layer's tensors: role, GGUF name after `blk.N.`, Q4NX name after `model.layers.N.`.
const LAYER: [(LayerTensor, &str, &str); 14] = [
    (LayerTensor::InputNorm, "attn_norm.weight", "input_layernorm.weight"),
    (LayerTensor::Q, "attn_q.weight", "self_attn.q_proj.weight"),
    (LayerTensor::QBias, "attn_q.bias", "self_attn.q_proj.bias"),
    (LayerTensor::QNorm, "attn_q_norm.weight", "self_attn.q_norm.weight"),
    (LayerTensor::K, "attn_k.weight", "self_attn.k_proj.weight"),
    (LayerTensor::KBias, "attn_k.bias", "self_attn.k_proj.bias"),
    (LayerTensor::KNorm, "attn_k_norm.weight", "self_attn.k_norm.weight"),
    (LayerTensor::V, "attn_v.weight", "self_attn.v_proj.weight"),
    (LayerTensor::VBias, "attn_v.bias", "self_attn.v_proj.bias"),
    (LayerTensor::O, "attn_output.weight", "self_attn.o_proj.weight"),
    (LayerTensor::PostAttentionNorm, "ffn_norm.weight", "post_attention_layernorm.weight"),
    (LayerTensor::Gate, "ffn_gate.weight", "mlp.gate_proj.weight"),
    (LayerTensor::Up, "ffn_up.weight", "mlp.up_proj.weight"),
    (LayerTensor::Down, "ffn_down.weight", "mlp.down_proj.weight"),
];

/// The others: role, GGUF name, Q4NX name.
const WHOLE: [(TensorRole, &str, &str); 3] = [
    (TensorRole::TokenEmbedding, "token_embd.weight", "model.embed_tokens.weight"),
    (TensorRole::FinalNorm, "output_norm.weight", "model.norm.weight"),
    (TensorRole::Head, "output.weight", "lm_head.weight"),
];

/// Role of the tensor that a GGUF file calls `name`; `None` for names a Q4NX directory has no place for.
#[must_use]
pub fn role_of_gguf(name: &str) -> Option<TensorRole> {
    let whole = WHOLE.iter().find(|(_, gguf, _)| *gguf == name).map(|(role, ..)| *role);
    whole.or_else(|| {
        let (layer, suffix) = split(name.strip_prefix("blk.")?)?;
        LAYER.iter().find(|(_, gguf, _)| *gguf == suffix).map(|(role, ..)| TensorRole::Layer(layer, *role))
    })
}

/// Role of the tensor that a Q4NX file calls `name`.
#[must_use]
pub fn role_of_q4nx(name: &str) -> Option<TensorRole> {
    let whole = WHOLE.iter().find(|(.., q4nx)| *q4nx == name).map(|(role, ..)| *role);
    whole.or_else(|| {
        let (layer, suffix) = split(name.strip_prefix("model.layers.")?)?;
        LAYER.iter().find(|(.., q4nx)| *q4nx == suffix).map(|(role, ..)| TensorRole::Layer(layer, *role))
    })
}

/// What a Q4NX file calls the tensor of `role`; `None` for roles it has no name for.
#[must_use]
pub fn q4nx_name(role: TensorRole) -> Option<String> {
    if let TensorRole::Layer(layer, part) = role {
        let suffix = LAYER.iter().find(|(role, ..)| *role == part).map(|(.., q4nx)| *q4nx)?;
        return Some(format!("model.layers.{layer}.{suffix}"));
    }
    WHOLE.iter().find(|(held, ..)| *held == role).map(|(.., q4nx)| (*q4nx).to_owned())
}

/// Whether a Q4NX file stores the tensor as bf16 rows; the others are tiles.
#[must_use]
pub fn is_plain(role: TensorRole) -> bool {
    use LayerTensor::{InputNorm, KBias, KNorm, PostAttentionNorm, QBias, QNorm, VBias};
    matches!(
        role,
        TensorRole::TokenEmbedding
            | TensorRole::FinalNorm
            | TensorRole::RopeFactors
            | TensorRole::Layer(_, InputNorm | PostAttentionNorm | QNorm | KNorm | QBias | KBias | VBias)
    )
}

/// `7.attn_q.weight` is layer 7 and `attn_q.weight`. One spelling a number: no sign, no leading zeros.
fn split(name: &str) -> Option<(usize, &str)> {
    let (number, suffix) = name.split_once('.')?;
    let layer: usize = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_roles_agree() {
        let q = TensorRole::Layer(7, LayerTensor::Q);
        assert_eq!(role_of_gguf("blk.7.attn_q.weight"), Some(q));
        assert_eq!(q4nx_name(q).as_deref(), Some("model.layers.7.self_attn.q_proj.weight"));
        for (role, gguf, q4nx) in LAYER {
            let whole = TensorRole::Layer(12, role);
            assert_eq!(role_of_gguf(&format!("blk.12.{gguf}")), Some(whole));
            assert_eq!(role_of_q4nx(&format!("model.layers.12.{q4nx}")), Some(whole));
            assert_eq!(q4nx_name(whole), Some(format!("model.layers.12.{q4nx}")));
        }
        for (role, gguf, q4nx) in WHOLE {
            assert_eq!((role_of_gguf(gguf), role_of_q4nx(q4nx)), (Some(role), Some(role)));
            assert_eq!(q4nx_name(role).as_deref(), Some(q4nx));
        }
        for name in ["blk.07.attn_q.weight", "blk.attn_q.weight", "blk.1.attn_q", "rope_freqs.weight", "", "blk.1."] {
            assert_eq!(role_of_gguf(name), None, "{name}");
        }
        assert_eq!(q4nx_name(TensorRole::RopeFactors), None);
    }
}
