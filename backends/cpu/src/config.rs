//! Which configurations this backend computes.

use npuhal_models::ModelConfig;
use npuhal_models::config::RopeScaling;
use thiserror::Error;

/// Largest size of a dimension: products of two fit 64 bits with room, and no known model comes near.
const MAX_SIZE: usize = 1 << 24;

/// A configuration that the CPU cannot run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the CPU backend cannot run this model: {field} is {found}; {wanted}")]
pub struct ConfigError {
    /// Field of the configuration.
    pub field: &'static str,
    /// Its value.
    pub found: String,
    /// What it would have to be.
    pub wanted: String,
}

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
    if let Some((field, size)) = sizes.into_iter().find(|(_, size)| !(1..=MAX_SIZE).contains(size)) {
        return refuse(field, size.to_string(), "wanted a number from 1 to 16777216");
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
