//! Rotary position embedding as metadata declare it.

use super::architecture::Keys;
use crate::config::{Rope, RopePairing, RopeScaling};
use crate::error::ModelError;

const DEFAULT_THETA: f32 = 10_000.0;

pub(super) fn read(keys: &Keys<'_>, pairing: RopePairing, head_dim: usize) -> Result<Rope, ModelError> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    if theta <= 0.0 {
        return Err(keys.malformed("rope.freq_base", format!("wanted a positive number, found {theta}")));
    }
    let dims = keys.size("rope.dimension_count", head_dim as u64)?.unwrap_or(head_dim);
    if !dims.is_multiple_of(2) {
        let reason = format!("wanted an even number of rotated elements of a head of {head_dim}, found {dims}");
        return Err(keys.malformed("rope.dimension_count", reason));
    }
    Ok(Rope { theta, dims, pairing, scaling: scaling(keys)? })
}

/// A file without `rope.scaling.type` and with a factor means `linear`, as before the key existed.
fn scaling(keys: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
        if !matches!(keys.float(key)?, None | Some(1.0)) {
            return Err(keys.unsupported(key, "1"));
        }
    }
    if !matches!(keys.float("rope.scaling.alpha")?, None | Some(0.0 | 1.0)) {
        return Err(keys.unsupported("rope.scaling.alpha", "1"));
    }
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) if factor != 0.0 => Some(("rope.scaling.factor", factor)),
        _ => {
            keys.float("rope.scale_linear")?.filter(|&factor| factor != 0.0).map(|factor| ("rope.scale_linear", factor))
        }
    };
    match (keys.string("rope.scaling.type")?, factor) {
        (Some("none"), _) | (None | Some("linear"), None) => Ok(RopeScaling::None),
        (None | Some("linear"), Some((key, factor))) => {
            if factor <= 0.0 {
                return Err(keys.malformed(key, format!("wanted a positive number, found {factor}")));
            }
            Ok(if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } })
        }
        (Some(_), _) => Err(keys.unsupported("rope.scaling.type", "none, linear, and the tensor rope_freqs.weight")),
    }
}
