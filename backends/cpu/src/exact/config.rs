//! Which configurations this backend computes.

use super::error::ConfigError;
use npuhal_models::ModelConfig;
use npuhal_models::config::RopeScaling;

/// Checks that the CPU can run a model of `config`, whatever the numerics.
///
/// # Errors
/// The first field that cannot be served.
pub fn check_config(config: &ModelConfig) -> Result<(), ConfigError> {
    let refuse = |field, found: String, wanted: &str| Err(ConfigError { field, found, wanted: wanted.to_owned() });
    let sizes = [
        ("hidden_size", config.hidden_size),
        ("layers", config.layers),
        ("heads", config.heads),
        ("kv_heads", config.kv_heads),
        ("head_dim", config.head_dim),
        ("intermediate_size", config.intermediate_size),
        ("vocab_size", config.vocab_size),
        ("context_length", config.context_length),
    ];
    if let Some((field, size)) = sizes.into_iter().find(|(_, size)| *size == 0 || u32::try_from(*size).is_err()) {
        return refuse(field, size.to_string(), "wanted a number from 1 that fits 32 bits");
    }
    if !config.heads.is_multiple_of(config.kv_heads) {
        let found = format!("{} for {} query heads", config.kv_heads, config.heads);
        return refuse("kv_heads", found, "wanted a divisor of the number of query heads");
    }
    if !config.rope.dims.is_multiple_of(2) || config.rope.dims > config.head_dim {
        let found = format!("{} for heads of {}", config.rope.dims, config.head_dim);
        return refuse("rope.dims", found, "wanted an even number that is not above the head's size");
    }
    if !(config.rope.theta.is_finite() && config.rope.theta > 0.0) {
        return refuse("rope.theta", config.rope.theta.to_string(), "wanted a positive number");
    }
    if !(config.rms_norm_eps.is_finite() && config.rms_norm_eps >= 0.0) {
        return refuse("rms_norm_eps", config.rms_norm_eps.to_string(), "wanted a number from 0");
    }
    match config.rope.scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor } if factor.is_finite() && factor > 0.0 => Ok(()),
        RopeScaling::Linear { factor } => {
            refuse("rope.scaling", format!("linear by {factor}"), "wanted a positive factor")
        }
        ref other => refuse("rope.scaling", format!("{other:?}"), "supported: none, linear"),
    }
}
