//! Which configurations this backend computes.

use npuhal_models::ModelConfig;
use npuhal_models::config::LayerRope;
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
    let features = &config.features;
    let local = features.local_rope.as_ref();
    let ropes = std::iter::once(&config.rope).chain(local);
    for rope in ropes {
        let turns = rope.inverse_frequencies(&[], config.context_length);
        if !(turns.iter().all(|turn| turn.is_finite()) && rope.magnitude().is_finite() && rope.magnitude() > 0.0) {
            return refuse("rope.scaling", format!("{:?}", rope.scaling), "wanted frequencies that are finite numbers");
        }
        if (rope.dims, rope.pairing) != (config.rope.dims, config.rope.pairing) {
            return refuse(
                "local_rope",
                format!("{rope:?}"),
                "wanted the dimensions and the pairing of the other layers",
            );
        }
    }
    let scales = [
        ("embedding_scale", Some(features.embedding_scale)),
        ("residual_scale", Some(features.residual_scale)),
        ("attention_scale", features.attention_scale),
        ("logit_divisor", Some(features.logit_divisor)),
        ("logit_softcap", features.logit_softcap),
    ];
    for (field, scale) in scales {
        if let Some(scale) = scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
            return refuse(field, scale.to_string(), "wanted a positive number");
        }
    }
    if !features.layers.is_empty() && features.layers.len() != config.layers {
        let found = format!("{} for {} layers", features.layers.len(), config.layers);
        return refuse("features.layers", found, "wanted none or one for each layer");
    }
    if features.layers.iter().any(|layer| layer.window == Some(0)) {
        return refuse("window", "0".to_owned(), "wanted at least the position itself");
    }
    if features.layers.iter().any(|layer| layer.rope == LayerRope::Local) && local.is_none() {
        return refuse("local_rope", "none".to_owned(), "wanted one for the layers that rotate by it");
    }
    Ok(())
}
