//! Rotary position embedding as metadata declare it.

use super::architecture::Keys;
use crate::config::{Rope, RopePairing, RopeScaling};
use crate::error::ModelError;

const DEFAULT_THETA: f32 = 10_000.0;
/// Tensors of LongRoPE's divisors, for short and for long contexts.
pub(super) const LONGROPE_TENSORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

pub(super) fn read(
    keys: &Keys<'_>,
    pairing: RopePairing,
    head_dim: usize,
    context_length: usize,
) -> Result<Rope, ModelError> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    if theta <= 0.0 {
        return Err(keys.malformed("rope.freq_base", format!("wanted a positive number, found {theta}")));
    }
    let dims = keys.size("rope.dimension_count", head_dim as u64)?.unwrap_or(head_dim);
    if !dims.is_multiple_of(2) {
        let reason = format!("wanted an even number of rotated elements of a head of {head_dim}, found {dims}");
        return Err(keys.malformed("rope.dimension_count", reason));
    }
    let scaling = scaling(keys, dims, theta, context_length)?;
    Ok(Rope { theta, dims, pairing, scaling })
}

/// A file without `rope.scaling.type` and with a factor means `linear`, as before the key existed.
fn scaling(keys: &Keys<'_>, dims: usize, theta: f32, context_length: usize) -> Result<RopeScaling, ModelError> {
    if !matches!(keys.float("rope.scaling.alpha")?, None | Some(0.0 | 1.0)) {
        return Err(keys.unsupported("rope.scaling.alpha", "1"));
    }
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) if factor != 0.0 => Some(("rope.scaling.factor", factor)),
        _ => {
            keys.float("rope.scale_linear")?.filter(|&factor| factor != 0.0).map(|factor| ("rope.scale_linear", factor))
        }
    };
    if let Some((key, factor)) = factor
        && factor <= 0.0
    {
        return Err(keys.malformed(key, format!("wanted a positive number, found {factor}")));
    }
    let kind = keys.string("rope.scaling.type")?;
    let attention_factor = attention_factor(keys)?;
    if attention_factor.is_some_and(|(_, factor)| factor != 1.0) && !matches!(kind, Some("yarn" | "longrope")) {
        let key = attention_factor.map_or("", |(key, _)| key);
        return Err(keys.unsupported(key, "1 without yarn or longrope"));
    }
    let attention_factor = attention_factor.map_or(1.0, |(_, factor)| factor);
    let original_positions = keys.size("rope.scaling.original_context_length", u64::from(u32::MAX))?;
    let original_positions = original_positions.unwrap_or(context_length) as f32;
    match (kind, factor) {
        (Some("none"), _) | (None | Some("linear"), None) => Ok(RopeScaling::None),
        (None | Some("linear"), Some((_, factor))) => {
            Ok(if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } })
        }
        (Some("yarn"), Some((_, factor))) => {
            if !matches!(keys.float("rope.scaling.yarn_log_multiplier")?, None | Some(0.0)) {
                return Err(keys.unsupported("rope.scaling.yarn_log_multiplier", "0"));
            }
            if !matches!(keys.float("rope.scaling.yarn_ext_factor")?, None | Some(1.0 | -1.0)) {
                return Err(keys.unsupported("rope.scaling.yarn_ext_factor", "1"));
            }
            let turns = |key: &str, usual: f32| match keys.float(key)? {
                Some(turns) if turns <= 0.0 => {
                    Err(keys.malformed(key, format!("wanted a positive number, found {turns}")))
                }
                found => Ok(found.unwrap_or(usual)),
            };
            if theta <= 1.0 {
                return Err(
                    keys.malformed("rope.freq_base", format!("wanted a number above 1 for yarn, found {theta}"))
                );
            }
            // What is stated multiplies what follows from the factor.
            let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
            Ok(RopeScaling::Yarn {
                factor,
                original_positions,
                beta_fast: turns("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: turns("rope.scaling.yarn_beta_slow", 1.0)?,
                truncate: true,
                attention_factor: usual * attention_factor,
            })
        }
        (Some("yarn"), None) => Err(keys.missing("rope.scaling.factor")),
        (Some("longrope"), _) => {
            let [short, long] = LONGROPE_TENSORS;
            Ok(RopeScaling::LongRope {
                original_positions,
                short: divisors(keys, short, dims)?,
                long: divisors(keys, long, dims)?,
                attention_factor,
            })
        }
        (Some(_), _) => {
            Err(keys.unsupported("rope.scaling.type", "none, linear, yarn, longrope, and the tensor rope_freqs.weight"))
        }
    }
}

/// The key and its positive number.
fn attention_factor<'k>(keys: &Keys<'_>) -> Result<Option<(&'k str, f32)>, ModelError> {
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
        match keys.float(key)? {
            Some(factor) if factor <= 0.0 => {
                return Err(keys.malformed(key, format!("wanted a positive number, found {factor}")));
            }
            Some(factor) => return Ok(Some((key, factor))),
            None => {}
        }
    }
    Ok(None)
}

/// The positive numbers of a vector with one element for each rotated pair.
fn divisors(keys: &Keys<'_>, name: &str, dims: usize) -> Result<Vec<f32>, ModelError> {
    let file = keys.file;
    let field = || format!("tensor {name:?}");
    let Some(info) = file.tensor_info(name) else {
        return Err(file.missing(field(), "a model with rope.scaling.type = longrope has it"));
    };
    let tensor = file.tensor(info)?;
    let mut values = vec![0.0; dims / 2];
    if tensor.rows() != 1 || tensor.dequantize_row(0, &mut values).is_err() {
        return Err(file.malformed(field(), format!("wanted dimensions [{}], found {:?}", dims / 2, info.dims())));
    }
    match values.iter().find(|value| !value.is_finite() || **value <= 0.0) {
        Some(bad) => Err(file.malformed(field(), format!("wanted positive divisors, found {bad}"))),
        None => Ok(values),
    }
}
