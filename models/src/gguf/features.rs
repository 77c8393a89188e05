//! What an architecture adds to the plain decoder: from its metadata, and from its definition where no key states it.

use super::architecture::Keys;
use super::value::Value;
use crate::config::{Activation, DecoderFeatures, LayerAttention, LayerRope, Rope, RopeScaling};
use crate::error::ModelError;

/// What of the configuration is known before.
pub(super) struct Frame<'a> {
    pub(super) layers: usize,
    pub(super) hidden_size: usize,
    pub(super) heads: usize,
    pub(super) context_length: usize,
    pub(super) rope: &'a Rope,
}

const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";

pub(super) const LLAMA_READS: &[&str] = &[WINDOW, PATTERN];
pub(super) const QWEN_READS: &[&str] = &[WINDOW, PATTERN];
pub(super) const GEMMA3_READS: &[&str] =
    &[WINDOW, PATTERN, "rope.freq_base_swa", "attention.scale", "final_logit_softcapping"];
pub(super) const GRANITE_READS: &[&str] = &["embedding_scale", "residual_scale", "logit_scale", "attention.scale"];
pub(super) const MINICPM_READS: &[&str] = GRANITE_READS;

pub(super) fn plain(_: &Keys<'_>, _: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    Ok(DecoderFeatures::default())
}

/// Files of Mistral models may state a window of every layer.
pub(super) fn llama(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    let layers = windows(keys, frame, None, LayerRope::Global)?;
    Ok(DecoderFeatures { layers, ..DecoderFeatures::default() })
}

/// A window is of some layers, which only a pattern tells.
pub(super) fn qwen(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    let layers = windows(keys, frame, None, LayerRope::Global)?;
    if !layers.is_empty() && !matches!(keys.get(PATTERN), Some(Value::Array(_))) {
        let supported = format!(
            "0, a window of at least the context length {}, or one with {}, a bool for each layer",
            frame.context_length,
            keys.full(PATTERN)
        );
        return Err(keys.unsupported(WINDOW, supported));
    }
    Ok(DecoderFeatures { layers, ..DecoderFeatures::default() })
}

/// Norms are stored with their offset added. Every sixth layer sees everything.
pub(super) fn gemma3(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    const PERIOD: u64 = 6;
    const LOCAL_THETA: f32 = 10_000.0;
    /// Of the one model whose queries are scaled by another number than its heads' size: layers.
    const LAYERS_27B: usize = 62;
    let theta = keys.float("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA);
    if theta <= 0.0 {
        return Err(keys.malformed("rope.freq_base_swa", format!("wanted a positive number, found {theta}")));
    }
    let layers = windows(keys, frame, Some(PERIOD), LayerRope::Local)?;
    let of_27b = || (frame.layers == LAYERS_27B).then(|| 1.0 / (frame.hidden_size as f32 / frame.heads as f32).sqrt());
    Ok(DecoderFeatures {
        activation: Activation::GeluTanh,
        output_norms: true,
        embedding_scale: (frame.hidden_size as f32).sqrt(),
        attention_scale: scale(keys, "attention.scale")?.or_else(of_27b),
        logit_softcap: scale(keys, "final_logit_softcapping")?,
        local_rope: Some(Rope { theta, scaling: RopeScaling::None, ..frame.rope.clone() }),
        layers,
        ..DecoderFeatures::default()
    })
}

/// Every fourth layer has no rotation.
pub(super) fn smollm3(_: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    const PERIOD: usize = 4;
    let rope = |layer: usize| if (layer + 1).is_multiple_of(PERIOD) { LayerRope::None } else { LayerRope::Global };
    let layers = (0..frame.layers).map(|layer| LayerAttention { window: None, rope: rope(layer) }).collect();
    Ok(DecoderFeatures { layers, ..DecoderFeatures::default() })
}

pub(super) fn granite(keys: &Keys<'_>, _: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    // These models use the key to say that they have no positions at all.
    if let Some(value @ Value::Bool(false)) = keys.get("rope.scaling.finetuned") {
        let feature = format!("{} = {value}, a granite model without rotation", keys.full("rope.scaling.finetuned"));
        return Err(keys.file.unsupported(feature, "true"));
    }
    scales(keys)
}

/// The scales must be stated: files of before the keys leave them to the program.
pub(super) fn minicpm(keys: &Keys<'_>, _: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    for key in ["embedding_scale", "residual_scale"] {
        if keys.get(key).is_none() {
            return Err(keys.missing(key));
        }
    }
    scales(keys)
}

fn scales(keys: &Keys<'_>) -> Result<DecoderFeatures, ModelError> {
    Ok(DecoderFeatures {
        embedding_scale: scale(keys, "embedding_scale")?.unwrap_or(1.0),
        residual_scale: scale(keys, "residual_scale")?.unwrap_or(1.0),
        attention_scale: scale(keys, "attention.scale")?,
        logit_divisor: scale(keys, "logit_scale")?.ok_or_else(|| keys.missing("logit_scale"))?,
        ..DecoderFeatures::default()
    })
}

/// A positive number; GGUF tools write 0 for "not set".
fn scale(keys: &Keys<'_>, key: &str) -> Result<Option<f32>, ModelError> {
    match keys.float(key)? {
        Some(scale) if scale < 0.0 => Err(keys.malformed(key, format!("wanted a positive number, found {scale}"))),
        found => Ok(found.filter(|scale| *scale != 0.0)),
    }
}

/// Windows by layer: every layer's, but with a period (stated or `usual`) not each period's last one's. Layers with a window
/// have the rotation `windowed`. Nothing where no window is shorter than the context.
fn windows(
    keys: &Keys<'_>,
    frame: &Frame<'_>,
    usual: Option<u64>,
    windowed: LayerRope,
) -> Result<Vec<LayerAttention>, ModelError> {
    let stated = keys.file.unsigned(&keys.full(WINDOW))?.filter(|window| *window != 0);
    let window = match stated.map(u32::try_from) {
        // A window of the whole context still tells which layers have the other rotation.
        Some(Ok(window)) if windowed != LayerRope::Global || (window as usize) < frame.context_length => window,
        _ => return Ok(Vec::new()),
    };
    let is_windowed: Vec<bool> = match keys.get(PATTERN) {
        Some(Value::Array(array)) => {
            let wanted = format!("wanted a bool for each of {} layers, found {array}", frame.layers);
            let flags: Option<Vec<bool>> = array.iter().map(|value| value.as_bool()).collect();
            flags.filter(|flags| flags.len() == frame.layers).ok_or_else(|| keys.malformed(PATTERN, wanted))?
        }
        _ => {
            let period = keys.file.unsigned(&keys.full(PATTERN))?.or(usual);
            let is_windowed =
                |layer: usize| period.is_none_or(|period| period == 0 || !(layer as u64 + 1).is_multiple_of(period));
            (0..frame.layers).map(is_windowed).collect()
        }
    };
    let layer = |is_windowed: bool| match is_windowed {
        true => LayerAttention { window: Some(window), rope: windowed },
        false => LayerAttention::default(),
    };
    Ok(is_windowed.into_iter().map(layer).collect())
}
