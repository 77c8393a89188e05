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
    /// Angle a position adds to each rotated pair, in radians: `theta^(-2i/dims)`, divided by the pair's factor where `factors`
    /// has one, and by the factor of linear scaling. `factors` is empty or has `dims / 2` elements.
    #[must_use]
    pub fn inverse_frequencies(&self, factors: &[f32]) -> Vec<f64> {
        let stretch = match self.scaling {
            RopeScaling::None => 1.0,
            RopeScaling::Linear { factor } => f64::from(factor),
        };
        (0..self.dims / 2)
            .map(|pair| {
                let inverse = f64::from(self.theta).powf(-2.0 * pair as f64 / self.dims as f64);
                inverse / f64::from(factors.get(pair).copied().unwrap_or(1.0)) / stretch
            })
            .collect()
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

/// A dense pre-norm decoder: RMSNorm, grouped-query attention with RoPE, RMSNorm, SwiGLU.
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
        }
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

    /// Bytes of a KV cache of `positions` with `element_bytes` an element; also what decoding a token after `positions` reads
    /// of it. Saturates.
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
        let rope = |scaling| Rope { theta: 100.0, dims: 4, pairing: RopePairing::Halves, scaling };
        assert_eq!(rope(RopeScaling::None).inverse_frequencies(&[]), [1.0, 0.1]);
        let scaled = rope(RopeScaling::Linear { factor: 2.0 }).inverse_frequencies(&[1.0, 4.0]);
        approx::assert_relative_eq!(scaled[0], 0.5);
        approx::assert_relative_eq!(scaled[1], 0.0125, max_relative = 1e-12);
    }
}
