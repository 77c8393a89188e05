//! What a family adds to the plain decoder, from `config.json` and the definitions of the `transformers` library.

use crate::config::{Activation, DecoderFeatures, LayerAttention, LayerRope, Rope, RopeScaling};
use crate::error::ModelError;
use crate::json_keys::{Keys, short};
use serde_json::Value;

const MAX_WINDOW: u64 = u32::MAX as u64;

/// What of the configuration is known before.
pub(super) struct Frame<'a> {
    pub(super) layers: usize,
    pub(super) hidden_size: usize,
    pub(super) head_dim: usize,
    pub(super) context_length: usize,
    pub(super) rope: &'a Rope,
    pub(super) local_theta: Option<f32>,
}

pub(super) type Read = fn(&Keys<'_>, &Frame<'_>) -> Result<DecoderFeatures, ModelError>;

pub(super) fn llama(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    let windows = windows(keys, frame, |_| false)?;
    plain(keys, layers(frame, &windows, LayerRope::Global))
}

/// Every layer has the window.
pub(super) fn mistral(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    let windows = windows(keys, frame, |_| true)?;
    plain(keys, layers(frame, &windows, LayerRope::Global))
}

/// Layers from `max_window_layers` on have the window, where it is in use at all.
pub(super) fn qwen(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    const DEFAULT_FIRST: usize = 28;
    if !keys.flag("use_sliding_window")? {
        return plain(keys, Vec::new());
    }
    // 0 is a layer here.
    let first = match keys.get("max_window_layers").and_then(Value::as_u64) {
        Some(0) => 0,
        _ => keys.size("max_window_layers", MAX_WINDOW)?.unwrap_or(DEFAULT_FIRST),
    };
    let windows = windows(keys, frame, |layer| layer >= first)?;
    plain(keys, layers(frame, &windows, LayerRope::Global))
}

/// All but every n-th layer have the window and a rotation of their own; norms are stored without their offset of 1.
pub(super) fn gemma3(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    const PERIOD: usize = 6;
    const QUERY_SCALAR: f32 = 256.0;
    const LOCAL_THETA: f32 = 10_000.0;
    if keys.flag("use_bidirectional_attention")? {
        return Err(keys.unsupported("use_bidirectional_attention = true", "attention to earlier positions"));
    }
    let period = match keys.size("sliding_window_pattern", MAX_WINDOW)? {
        Some(period) => period,
        None => keys.size("_sliding_window_pattern", MAX_WINDOW)?.unwrap_or(PERIOD),
    };
    let windows = windows(keys, frame, |layer| !(layer + 1).is_multiple_of(period))?;
    let scalar = keys.positive("query_pre_attn_scalar")?.unwrap_or(QUERY_SCALAR);
    let theta = frame.local_theta.unwrap_or(LOCAL_THETA);
    Ok(DecoderFeatures {
        activation: activation(keys, "hidden_activation", "gelu_pytorch_tanh")?,
        output_norms: true,
        norm_offset: 1.0,
        embedding_scale: (frame.hidden_size as f32).sqrt(),
        attention_scale: (scalar != frame.head_dim as f32).then(|| 1.0 / scalar.sqrt()),
        logit_softcap: keys.positive("final_logit_softcapping")?,
        local_rope: Some(Rope { theta, scaling: RopeScaling::None, ..frame.rope.clone() }),
        layers: layers(frame, &windows, LayerRope::Local),
        ..DecoderFeatures::default()
    })
}

/// Some layers have no rotation, and these a window where it is in use.
pub(super) fn smollm3(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    const INTERVAL: usize = 4;
    let flag = |value: &Value| value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1);
    let interval = keys.size("no_rope_layer_interval", MAX_WINDOW)?.unwrap_or(INTERVAL);
    let stated = keys.array("no_rope_layers", frame.layers, "0 or 1", flag)?;
    let is_rotated = |layer: usize| match &stated {
        Some(flags) => flags[layer],
        None => !(layer + 1).is_multiple_of(interval),
    };
    let is_windowed = keys.flag("use_sliding_window")?;
    let windows = windows(keys, frame, |layer| is_windowed && !is_rotated(layer))?;
    let layer = |layer: usize| LayerAttention {
        window: windows[layer],
        rope: if is_rotated(layer) { LayerRope::Global } else { LayerRope::None },
    };
    plain(keys, (0..frame.layers).map(layer).collect())
}

pub(super) fn granite(keys: &Keys<'_>, _: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    let scale = |key: &str| Ok::<_, ModelError>(keys.positive(key)?.unwrap_or(1.0));
    Ok(DecoderFeatures {
        embedding_scale: scale("embedding_multiplier")?,
        residual_scale: scale("residual_multiplier")?,
        attention_scale: Some(scale("attention_multiplier")?),
        logit_divisor: scale("logits_scaling")?,
        ..plain(keys, Vec::new())?
    })
}

pub(super) fn minicpm(keys: &Keys<'_>, frame: &Frame<'_>) -> Result<DecoderFeatures, ModelError> {
    if let Some(value) = keys.get("sparse_config") {
        return Err(keys.unsupported(format!("sparse_config = {}", short(value)), "attention to all positions"));
    }
    // Divided in f64, as the library does.
    let narrow = keys.require_positive("scale_depth")?;
    let depth = keys.get("scale_depth").and_then(Value::as_f64).unwrap_or(f64::from(narrow));
    Ok(DecoderFeatures {
        embedding_scale: keys.require_positive("scale_emb")?,
        residual_scale: (depth / (frame.layers as f64).sqrt()) as f32,
        logit_divisor: frame.hidden_size as f32 / keys.require_positive("dim_model_base")?,
        ..plain(keys, Vec::new())?
    })
}

fn plain(keys: &Keys<'_>, layers: Vec<LayerAttention>) -> Result<DecoderFeatures, ModelError> {
    let activation = activation(keys, "hidden_act", "silu")?;
    Ok(DecoderFeatures { activation, layers, ..DecoderFeatures::default() })
}

fn activation(keys: &Keys<'_>, key: &str, usual: &str) -> Result<Activation, ModelError> {
    match keys.text(key)?.as_deref().unwrap_or(usual) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        other => Err(keys.unsupported(format!("{key} = {other:?}"), "silu, gelu_pytorch_tanh")),
    }
}

/// The window of each layer: of those that `layer_types` calls sliding, or where it is absent of those that `is_windowed`.
fn windows(
    keys: &Keys<'_>,
    frame: &Frame<'_>,
    is_windowed: impl Fn(usize) -> bool,
) -> Result<Vec<Option<u32>>, ModelError> {
    const DEFAULT: usize = 4096;
    // Null is no window; absent is the library's default.
    let window = match keys.map.get("sliding_window") {
        Some(Value::Null) => None,
        _ => Some(keys.size("sliding_window", MAX_WINDOW)?.unwrap_or(DEFAULT)),
    };
    let kind = |value: &Value| match value.as_str()? {
        "full_attention" => Some(false),
        "sliding_attention" => Some(true),
        _ => None,
    };
    let wanted = "\"full_attention\" or \"sliding_attention\"";
    let stated = keys.array("layer_types", frame.layers, wanted, kind)?;
    let is_windowed = |layer: usize| stated.as_ref().map_or_else(|| is_windowed(layer), |kinds| kinds[layer]);
    (0..frame.layers)
        .map(|layer| match (is_windowed(layer), window) {
            (false, _) => Ok(None),
            (true, Some(window)) => Ok(u32::try_from(window).ok()),
            (true, None) if stated.is_some() => {
                Err(keys.malformed("sliding_window", format!("wanted a number for layer {layer}, found null")))
            }
            (true, None) => Ok(None),
        })
        .collect()
}

/// Layers with their windows, those with one rotated as `windowed`. None where they are all alike and see the whole context.
fn layers(frame: &Frame<'_>, windows: &[Option<u32>], windowed: LayerRope) -> Vec<LayerAttention> {
    let reaches = |window: &Option<u32>| window.is_none_or(|window| window as usize >= frame.context_length);
    if windowed == LayerRope::Global && windows.iter().all(reaches) {
        return Vec::new();
    }
    let layer = |window: &Option<u32>| match window {
        Some(_) => LayerAttention { window: *window, rope: windowed },
        None => LayerAttention::default(),
    };
    windows.iter().map(layer).collect()
}
