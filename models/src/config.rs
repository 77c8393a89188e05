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
    /// Width of all query heads together.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of a KV cache of `positions` with `element_bytes` an element.
    #[must_use]
    pub fn kv_bytes(&self, positions: usize, element_bytes: usize) -> u64 {
        2 * self.layers as u64 * self.kv_width() as u64 * positions as u64 * element_bytes as u64
    }
}
