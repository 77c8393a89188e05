//! The shape of a decoder model and the constants of its arithmetic.

/// Pairing of elements under rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Elements `2i` and `2i+1` (GGUF `llama`, whose query and key rows are stored permuted for it).
    Interleaved,
    /// Elements `i` and `i + dims/2` (GGUF `qwen2`, `qwen3`; all Hugging Face files).
    Halves,
}

/// Stretching of rotary angles for longer contexts than the model was trained on.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// None.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Divisor of the position.
        factor: f32,
    },
    /// Llama 3: long waves are divided, short ones kept, those between blended (`rope_type: llama3`).
    Llama3 {
        /// Divisor of the frequency of long waves.
        factor: f32,
        /// Waves longer than `original_positions / low_freq_factor` are long.
        low_freq_factor: f32,
        /// Waves shorter than `original_positions / high_freq_factor` are short.
        high_freq_factor: f32,
        /// Positions of the first training.
        original_positions: f32,
    },
    /// YaRN (Peng et al. 2023): pairs that turn often over the first training's positions are kept, slow ones divided.
    Yarn {
        /// Divisor of the frequency of slow pairs.
        factor: f32,
        /// Positions of the first training.
        original_positions: f32,
        /// Turns from which a pair is kept.
        beta_fast: f32,
        /// Turns up to which a pair is divided.
        beta_slow: f32,
        /// Whether the ends of the ramp between are whole pairs.
        truncate: bool,
        /// Factor on rotated queries and keys.
        attention_factor: f32,
    },
    /// LongRoPE (Ding et al. 2024): a divisor for each pair, of two lists.
    LongRope {
        /// Positions of the first training: contexts up to it take `short`, longer ones `long`.
        original_positions: f32,
        /// Divisors of short contexts, one for each pair.
        short: Vec<f32>,
        /// Divisors of long contexts, one for each pair.
        long: Vec<f32>,
        /// Factor on rotated queries and keys.
        attention_factor: f32,
    },
}

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the inverse frequencies: `theta^(-2i/dims)`.
    pub theta: f32,
    /// Rotated elements of a head, from its start; even.
    pub dims: usize,
    /// Pairing.
    pub pairing: RopePairing,
    /// Scaling.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Angle a position adds to each rotated pair, in radians: `theta^(-2i/dims)` after scaling, divided by the pair's factor
    /// where `factors` has one. `factors` is empty or has `dims / 2` elements. `positions` is the context that is made room
    /// for, by which LongRoPE chooses: a choice by the length so far would change the keys of earlier positions.
    #[must_use]
    pub fn inverse_frequencies(&self, factors: &[f32], positions: usize) -> Vec<f64> {
        let theta = f64::from(self.theta);
        let dims = self.dims as f64;
        (0..self.dims / 2)
            .map(|pair| {
                let inverse = theta.powf(-2.0 * pair as f64 / dims);
                let scaled = match &self.scaling {
                    RopeScaling::None => inverse,
                    RopeScaling::Linear { factor } => inverse / f64::from(*factor),
                    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                        let turns = f64::from(*original_positions) * inverse / std::f64::consts::TAU;
                        let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                        let kept = if turns > high {
                            1.0
                        } else if turns < low {
                            0.0
                        } else {
                            (turns - low) / (high - low)
                        };
                        blend(inverse, f64::from(*factor), kept)
                    }
                    RopeScaling::Yarn { factor, original_positions, beta_fast, beta_slow, truncate, .. } => {
                        let end = |turns: f32| {
                            let waves = f64::from(*original_positions) / (f64::from(turns) * std::f64::consts::TAU);
                            dims * waves.ln() / (2.0 * theta.ln())
                        };
                        let (mut first, mut last) = (end(*beta_fast), end(*beta_slow));
                        if *truncate {
                            (first, last) = (first.floor(), last.ceil());
                        }
                        let (first, last) = (first.max(0.0), last.min(dims - 1.0));
                        let width = if first == last { 0.001 } else { last - first };
                        blend(inverse, f64::from(*factor), 1.0 - ((pair as f64 - first) / width).clamp(0.0, 1.0))
                    }
                    RopeScaling::LongRope { original_positions, short, long, .. } => {
                        let list = if positions as f64 > f64::from(*original_positions) { long } else { short };
                        inverse / f64::from(list.get(pair).copied().unwrap_or(1.0))
                    }
                };
                scaled / f64::from(factors.get(pair).copied().unwrap_or(1.0))
            })
            .collect()
    }

    /// Factor on rotated elements of queries and keys, which YaRN and LongRoPE have.
    #[must_use]
    pub fn magnitude(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        }
    }
}

impl Rope {
    /// Puts the rotated pairs of every head of `row` half the rotated width apart, as [`RopePairing::Halves`] has them. Heads have
    /// `head_dim` elements.
    pub fn unpair(&self, row: &mut [f32], head_dim: usize) {
        if self.pairing == RopePairing::Halves {
            return;
        }
        let mut rotated = vec![0.0; self.dims];
        for head in row.chunks_exact_mut(head_dim) {
            let head = &mut head[..self.dims];
            let (first, second) = rotated.split_at_mut(self.dims / 2);
            for ((pair, first), second) in head.as_chunks::<2>().0.iter().zip(first).zip(second) {
                [*first, *second] = *pair;
            }
            head.copy_from_slice(&rotated);
        }
    }
}

/// `inverse` where `kept` is 1, a `factor`-th of it where `kept` is 0.
fn blend(inverse: f64, factor: f64, kept: f64) -> f64 {
    (1.0 - kept) * (inverse / factor) + kept * inverse
}

/// Function on the gate of the feed-forward block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    #[default]
    Silu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
    GeluTanh,
}

/// Rotation of a layer's queries and keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerRope {
    /// [`ModelConfig::rope`].
    #[default]
    Global,
    /// [`DecoderFeatures::local_rope`].
    Local,
    /// None: the layer knows no positions.
    None,
}

/// What sets the attention of a layer apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerAttention {
    /// Positions a query sees, its own and those right before it; `None` is all before it.
    pub window: Option<u32>,
    /// Rotation.
    pub rope: LayerRope,
}

/// What a family adds to the plain decoder. The default is the plain decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderFeatures {
    /// Function on the gate.
    pub activation: Activation,
    /// RMSNorm over what attention and the feed-forward block give, before it is added to the residual stream.
    pub output_norms: bool,
    /// Added to every RMSNorm weight that the file stores.
    pub norm_offset: f32,
    /// Factor on token embeddings.
    pub embedding_scale: f32,
    /// Factor on what attention and the feed-forward block add to the residual stream.
    pub residual_scale: f32,
    /// Factor on products of queries and keys; `None` is `1 / √head_dim`.
    pub attention_scale: Option<f32>,
    /// Divisor of the logits.
    pub logit_divisor: f32,
    /// Logits become `cap · tanh(logit / cap)`, after division.
    pub logit_softcap: Option<f32>,
    /// Rotation of the layers that have [`LayerRope::Local`].
    pub local_rope: Option<Rope>,
    /// Attention by layer; empty where every layer has the default.
    pub layers: Vec<LayerAttention>,
}

impl Default for DecoderFeatures {
    fn default() -> Self {
        Self {
            activation: Activation::Silu,
            output_norms: false,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            attention_scale: None,
            logit_divisor: 1.0,
            logit_softcap: None,
            local_rope: None,
            layers: Vec::new(),
        }
    }
}

impl DecoderFeatures {
    /// Attention of layer `layer`.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerAttention {
        self.layers.get(layer).copied().unwrap_or_default()
    }

    /// The first feature that the plain decoder lacks, for devices and files that know only that: its name and value.
    #[must_use]
    pub fn first_extra(&self) -> Option<String> {
        let plain = Self::default();
        let float = |name: &str, found: f32, neutral: f32| (found != neutral).then(|| format!("{name} {found}"));
        (self.activation != plain.activation)
            .then(|| format!("activation {:?}", self.activation))
            .or_else(|| self.output_norms.then(|| "norms over the outputs of a layer's blocks".to_owned()))
            .or_else(|| float("norm offset", self.norm_offset, 0.0))
            .or_else(|| float("embedding scale", self.embedding_scale, 1.0))
            .or_else(|| float("residual scale", self.residual_scale, 1.0))
            .or_else(|| self.attention_scale.map(|scale| format!("attention scale {scale}")))
            .or_else(|| float("logit divisor", self.logit_divisor, 1.0))
            .or_else(|| self.logit_softcap.map(|cap| format!("logit soft-cap {cap}")))
            .or_else(|| {
                let apart = |layer: &LayerAttention| *layer != LayerAttention::default();
                self.layers.iter().position(apart).map(|layer| match self.layers[layer].window {
                    Some(window) => format!("attention window of {window} positions in layer {layer}"),
                    None => format!("rotation {:?} in layer {layer}", self.layers[layer].rope),
                })
            })
    }
}

/// A dense pre-norm decoder: RMSNorm, grouped-query attention with RoPE, RMSNorm, gated feed-forward block; and what its
/// family adds to that.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Key of route selection: `llama`, `qwen2`, `qwen3`, …
    pub model_type: String,
    /// Name for people; may be empty.
    pub name: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions the model was trained for.
    pub context_length: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Biases on query, key and value projections.
    pub qkv_bias: bool,
    /// RMSNorm over each query and key head before RoPE.
    pub qk_norm: bool,
    /// The head is the embedding.
    pub tied_head: bool,
    /// What the family adds to the plain decoder.
    pub features: DecoderFeatures,
}

impl ModelConfig {
    /// The configuration of a model of which only the type is known: every size is 0.
    #[must_use]
    pub fn unread(model_type: &str) -> Self {
        Self {
            model_type: model_type.to_owned(),
            name: String::new(),
            hidden_size: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            intermediate_size: 0,
            vocab_size: 0,
            context_length: 0,
            rms_norm_eps: 0.0,
            rope: Rope { theta: 0.0, dims: 0, pairing: RopePairing::Halves, scaling: RopeScaling::None },
            qkv_bias: false,
            qk_norm: false,
            tied_head: false,
            features: DecoderFeatures::default(),
        }
    }

    /// Factor on products of queries and keys.
    #[must_use]
    pub fn attention_scale(&self) -> f64 {
        self.features.attention_scale.map_or_else(|| 1.0 / (self.head_dim as f64).sqrt(), f64::from)
    }

    /// The first thing that is not of the plain decoder without scaling of rotary angles; `None` where there is nothing.
    #[must_use]
    pub fn first_extra(&self) -> Option<String> {
        let scaling = (self.rope.scaling != RopeScaling::None).then(|| format!("RoPE scaling {:?}", self.rope.scaling));
        self.features.first_extra().or(scaling)
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    /// Bytes of a KV cache that keeps all of `positions` in every layer, with `element_bytes` an element. Saturates.
    #[must_use]
    pub fn kv_bytes(&self, positions: usize, element_bytes: usize) -> u64 {
        [self.kv_width(), positions, element_bytes]
            .into_iter()
            .fold(2_u64.saturating_mul(self.layers as u64), |bytes, factor| bytes.saturating_mul(factor as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { theta: 100.0, dims: 4, pairing: RopePairing::Halves, scaling }
    }

    #[test]
    fn interleaved_pairs_are_put_half_the_width_apart() {
        let rope = |pairing| Rope { theta: 1.0, dims: 4, pairing, scaling: RopeScaling::None };
        let mut row = [0.0, 10.0, 1.0, 11.0, 99.0, 2.0, 12.0, 3.0, 13.0, 98.0];
        let stored = row;
        rope(RopePairing::Halves).unpair(&mut row, 5);
        assert_eq!(row, stored);
        rope(RopePairing::Interleaved).unpair(&mut row, 5);
        assert_eq!(row, [0.0, 1.0, 10.0, 11.0, 99.0, 2.0, 3.0, 12.0, 13.0, 98.0]);
    }

    #[test]
    fn inverse_frequencies_take_factors_and_linear_scaling() {
        assert_eq!(rope(RopeScaling::None).inverse_frequencies(&[], 1), [1.0, 0.1]);
        let scaled = rope(RopeScaling::Linear { factor: 2.0 }).inverse_frequencies(&[1.0, 4.0], 1);
        approx::assert_relative_eq!(scaled[0], 0.5);
        approx::assert_relative_eq!(scaled[1], 0.0125, max_relative = 1e-12);
    }

    #[test]
    fn longrope_chooses_by_the_room_and_not_by_the_length() {
        let scaling = RopeScaling::LongRope {
            original_positions: 64.0,
            short: vec![1.0, 2.0],
            long: vec![4.0, 5.0],
            attention_factor: 1.5,
        };
        let rope = rope(scaling);
        assert_eq!(rope.inverse_frequencies(&[], 64), [1.0, 0.05]);
        assert_eq!(rope.inverse_frequencies(&[], 65), [0.25, 0.02]);
        assert_eq!(rope.magnitude(), 1.5);
    }

    #[test]
    fn llama3_keeps_short_waves_and_divides_long_ones() {
        let llama = |original_positions| {
            let scaling =
                RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions };
            rope(scaling).inverse_frequencies(&[], 1)
        };
        // Waves of 6.28 and 62.8 positions.
        assert_eq!(llama(1000.0), [1.0, 0.1]);
        approx::assert_relative_eq!(llama(10.0)[1], 0.0125, max_relative = 1e-12);
        let turns = 157.0 * 0.1 / std::f64::consts::TAU;
        let kept = (turns - 1.0) / 3.0;
        approx::assert_relative_eq!(llama(157.0)[1], (1.0 - kept) * 0.0125 + kept * 0.1, max_relative = 1e-12);
    }

    #[test]
    fn only_the_plain_decoder_has_nothing_extra() {
        assert_eq!(DecoderFeatures::default().first_extra(), None);
        let layers = vec![LayerAttention::default(), LayerAttention { window: Some(512), rope: LayerRope::Local }];
        let windowed = DecoderFeatures { layers, ..DecoderFeatures::default() };
        assert_eq!(windowed.first_extra().unwrap(), "attention window of 512 positions in layer 1");
        let capped = DecoderFeatures { logit_softcap: Some(30.0), ..DecoderFeatures::default() };
        assert_eq!(capped.first_extra().unwrap(), "logit soft-cap 30");
    }
}
