//! Rotary position embedding as `config.json` declares it: `rope_theta` and `rope_scaling`, or `rope_parameters`.

use crate::config::{Rope, RopePairing, RopeScaling};
use crate::error::ModelError;
use crate::json_keys::Keys;

const MAX_POSITIONS: u64 = 1 << 32;

/// Rotation of the layers that see everything, and what is declared of the others.
pub(super) struct Ropes {
    pub(super) global: Rope,
    pub(super) local_theta: Option<f32>,
}

pub(super) fn read(
    keys: &Keys<'_>,
    head_dim: usize,
    context_length: usize,
    default_theta: f32,
) -> Result<Ropes, ModelError> {
    let mut declared = keys.object("rope_parameters")?;
    let mut local_theta = keys.positive("rope_local_base_freq")?;
    if let Some(parameters) = declared
        && let Some(global) = parameters.object("full_attention")?
    {
        if let Some(local) = parameters.object("sliding_attention")? {
            let kind = kind(&local)?;
            if kind != "default" {
                return Err(local.unsupported(format!("rope_type {kind:?} of sliding layers"), "default"));
            }
            local_theta = local.positive("rope_theta")?.or(local_theta);
        }
        declared = Some(global);
    }
    let scaling = match declared {
        Some(parameters) => Some(parameters),
        None => keys.object("rope_scaling")?,
    };
    let theta = match scaling.map(|scaling| scaling.positive("rope_theta")).transpose()?.flatten() {
        Some(theta) => theta,
        None => keys.positive("rope_theta")?.unwrap_or(default_theta),
    };
    let part = match scaling.map(|scaling| scaling.positive("partial_rotary_factor")).transpose()?.flatten() {
        Some(part) => part,
        None => keys.positive("partial_rotary_factor")?.unwrap_or(1.0),
    };
    let dims = (head_dim as f64 * f64::from(part)) as usize;
    if dims > head_dim || !dims.is_multiple_of(2) || dims == 0 {
        let reason = format!("wanted an even number of rotated elements of a head of {head_dim}, found {dims}");
        return Err(keys.malformed("partial_rotary_factor", reason));
    }
    let scaling = match scaling {
        Some(scaling) => self::scaling(keys, &scaling, dims, theta, context_length)?,
        None => RopeScaling::None,
    };
    let global = Rope { theta, dims, pairing: RopePairing::Halves, scaling };
    Ok(Ropes { global, local_theta })
}

fn kind(scaling: &Keys<'_>) -> Result<String, ModelError> {
    let kind = match scaling.text("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.text("type")?,
    };
    Ok(kind.unwrap_or_else(|| "default".to_owned()))
}

fn scaling(
    keys: &Keys<'_>,
    scaling: &Keys<'_>,
    dims: usize,
    theta: f32,
    context_length: usize,
) -> Result<RopeScaling, ModelError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let original = match scaling.size(ORIGINAL, MAX_POSITIONS)? {
        Some(original) => Some(original),
        None => keys.size(ORIGINAL, MAX_POSITIONS)?,
    };
    let original_positions = original.unwrap_or(context_length) as f32;
    let stretch = context_length as f32 / original_positions;
    match kind(scaling)?.as_str() {
        "default" => Ok(RopeScaling::None),
        "linear" => {
            let factor = scaling.require_positive("factor")?;
            Ok(if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } })
        }
        "llama3" => {
            let (low, high) =
                (scaling.require_positive("low_freq_factor")?, scaling.require_positive("high_freq_factor")?);
            if low >= high {
                return Err(scaling.malformed("high_freq_factor", format!("wanted more than {low}, found {high}")));
            }
            if original.is_none() {
                return Err(scaling.missing(ORIGINAL));
            }
            Ok(RopeScaling::Llama3 {
                factor: scaling.require_positive("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_positions,
            })
        }
        "yarn" => {
            let factor = scaling.positive("factor")?.unwrap_or(stretch);
            if theta <= 1.0 {
                return Err(scaling.malformed("rope_theta", format!("wanted a number above 1 for yarn, found {theta}")));
            }
            Ok(RopeScaling::Yarn {
                factor,
                original_positions,
                beta_fast: scaling.positive("beta_fast")?.unwrap_or(32.0),
                beta_slow: scaling.positive("beta_slow")?.unwrap_or(1.0),
                truncate: scaling.get("truncate").is_none() || scaling.flag("truncate")?,
                attention_factor: yarn_attention(scaling, factor)?,
            })
        }
        // The older name of the same.
        "longrope" | "su" => {
            let positive = |value: &serde_json::Value| {
                value.as_f64().map(|value| value as f32).filter(|value| value.is_finite() && *value > 0.0)
            };
            let list = |key: &str| {
                let found = scaling.array(key, dims / 2, "a positive number", positive)?;
                found.ok_or_else(|| scaling.missing(key))
            };
            let factor = scaling.positive("factor")?.unwrap_or(stretch);
            let usual = match factor > 1.0 {
                true => (1.0 + factor.ln() / original_positions.ln()).sqrt(),
                false => 1.0,
            };
            Ok(RopeScaling::LongRope {
                original_positions,
                short: list("short_factor")?,
                long: list("long_factor")?,
                attention_factor: scaling.positive("attention_factor")?.unwrap_or(usual),
            })
        }
        other => {
            let supported = "default, linear, llama3, yarn, longrope";
            Err(scaling.unsupported(format!("rope_type {other:?}"), supported))
        }
    }
}

fn yarn_attention(scaling: &Keys<'_>, factor: f32) -> Result<f32, ModelError> {
    let magnitude = |scale: f32| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
    if let Some(stated) = scaling.positive("attention_factor")? {
        return Ok(stated);
    }
    // 0 counts as absent.
    let stated = |key: &str| match scaling.get(key).and_then(serde_json::Value::as_f64) {
        Some(0.0) => Ok(None),
        _ => scaling.positive(key),
    };
    Ok(match (stated("mscale")?, stated("mscale_all_dim")?) {
        (Some(above), Some(below)) => magnitude(above) / magnitude(below),
        _ => magnitude(1.0),
    })
}
