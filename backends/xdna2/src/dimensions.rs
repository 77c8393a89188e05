//! Shapes that the lane takes.

use crate::packing::{CHUNK_ROWS, HEAD_DIM, TILE_COLUMNS, TILE_ROWS};
use npuhal_models::ModelConfig;
use npuhal_models::config::{RopePairing, RopeScaling};
use std::path::PathBuf;
use thiserror::Error;

/// Largest value of any one dimension: products of three stay far below 2^64.
const MAX_SIZE: usize = 1 << 20;
/// Largest number of layers.
const MAX_LAYERS: usize = 1 << 10;
/// Rows of a projection come in pairs of tile rows: a group of the packed order spans two.
const ROW_PAIR: usize = 2 * TILE_ROWS;

/// Why the lane does not run a model.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum LaneDecline {
    /// A file of the lane is not there.
    #[error("{} is missing; the fast lane needs npu/layer_ctx1.elf, layer_ctx2.elf, layer_ctx17.elf, lmhead.elf and layer.pdi", path.display())]
    MissingFile {
        /// Where it should be.
        path: PathBuf,
    },
    /// Another architecture.
    #[error("model_type '{found}': the fast lane serves the Qwen3 layer kernel only")]
    ModelType {
        /// Architecture of the model.
        found: String,
    },
    /// Heads of another size.
    #[error("heads of {found} elements; the layer kernel has heads of {HEAD_DIM}")]
    HeadDim {
        /// Elements of a head.
        found: usize,
    },
    /// Numbers of heads that the kernel cannot have.
    #[error(
        "{heads} query heads over {kv_heads} KV heads; the layer kernel keeps its KV heads in two halves, so their number is even \
         and divides that of the query heads"
    )]
    HeadCount {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// Biases have no place in the kernel's arguments.
    #[error("the model has biases on query, key and value; the layer kernel has none")]
    QkvBias,
    /// The kernel always norms query and key heads.
    #[error("the model has no norms of query and key heads; the layer kernel applies them")]
    NoQkNorm,
    /// Something that the kernel does not compute.
    #[error("the model has {feature}; the layer kernel computes the plain decoder")]
    Feature {
        /// The feature.
        feature: String,
    },
    /// Rotation that the kernel does not do.
    #[error("rotary embedding: {what} is {found}, and the layer kernel takes {wanted}")]
    Rope {
        /// Property.
        what: &'static str,
        /// What the kernel does.
        wanted: String,
        /// What the model has.
        found: String,
    },
    /// A size that does not fill whole groups of tiles.
    #[error("{what} is {found}; the packed weights need a multiple of {multiple}, at most {limit}")]
    Size {
        /// Dimension.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What it must be a multiple of.
        multiple: usize,
        /// Largest value.
        limit: usize,
    },
    /// Weights that the kernels do not read.
    #[error(
        "{tensor} is stored as {found}; the layer kernel reads q4_1 tiles, and those that can be repacked to them (Q4_K)"
    )]
    TileKind {
        /// Tensor.
        tensor: String,
        /// Kind of its tiles.
        found: &'static str,
    },
    /// A tensor that is not stored as tiles.
    #[error("{tensor} is not stored as tiles; the lane takes Q4NX directories (`npuhal pack`)")]
    NotTiled {
        /// Tensor.
        tensor: String,
    },
    /// A tensor that is not there.
    #[error("the tensor for {tensor} is missing; the lane needs it")]
    MissingTensor {
        /// Tensor.
        tensor: String,
    },
    /// Kernels that do nothing on hardware.
    #[error(
        "the kernels in {} were written for the virtual NPU and do nothing on hardware; name those that were compiled for it \
         (--kernels DIR)", folder.display()
    )]
    VirtualKernels {
        /// Where they are.
        folder: PathBuf,
    },
    /// Kernels that the virtual NPU cannot run.
    #[error(
        "the kernels in {} were compiled for hardware, and the virtual NPU executes no compiled code; write its own with \
         `npuhal kit xdna2`", folder.display()
    )]
    CompiledKernels {
        /// Where they are.
        folder: PathBuf,
    },
    /// More positions than there are.
    #[error(
        "a context of {asked} positions was asked for; the kernels serve {kernels}, and the model was trained for {trained}"
    )]
    Positions {
        /// What was asked for.
        asked: u32,
        /// Positions of the kernels.
        kernels: u32,
        /// Positions of the model.
        trained: u32,
    },
    /// The kernels are made for another shape.
    #[error(
        "the kernels are for another model: {what} is {kernel} in {file} and {model} in the model; use the kernels made for it"
    )]
    KernelShape {
        /// Property.
        what: &'static str,
        /// Kernel file.
        file: &'static str,
        /// Value in the kernel.
        kernel: u64,
        /// Value in the model.
        model: u64,
    },
    /// The kernels read weights in another order.
    #[error(
        "the kernels are for another model: {file} moves {len_bytes} bytes of weights at {at_bytes:#x}; for this model \
         {wanted}"
    )]
    KernelWeights {
        /// Kernel file.
        file: &'static str,
        /// Start of the transfer.
        at_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// What the packed weights have there.
        wanted: String,
    },
}

/// Dimensions of a model that the lane takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dimensions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; even.
    pub kv_heads: usize,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f32,
}

impl Dimensions {
    /// The dimensions of `config`, or why the lane does not take it.
    ///
    /// # Errors
    /// [`LaneDecline`].
    pub fn of(config: &ModelConfig) -> Result<Self, LaneDecline> {
        if config.model_type != "qwen3" {
            return Err(LaneDecline::ModelType { found: config.model_type.clone() });
        }
        if config.head_dim != HEAD_DIM {
            return Err(LaneDecline::HeadDim { found: config.head_dim });
        }
        let (heads, kv_heads) = (config.heads, config.kv_heads);
        let is_whole = kv_heads != 0 && heads != 0 && heads.is_multiple_of(kv_heads);
        if !is_whole || !kv_heads.is_multiple_of(2) || heads > MAX_SIZE / HEAD_DIM {
            return Err(LaneDecline::HeadCount { heads, kv_heads });
        }
        if config.qkv_bias {
            return Err(LaneDecline::QkvBias);
        }
        if !config.qk_norm {
            return Err(LaneDecline::NoQkNorm);
        }
        if let Some(feature) = config.features.first_extra() {
            return Err(LaneDecline::Feature { feature });
        }
        check_rope(config)?;
        for (what, found, multiple, limit) in [
            ("the hidden size", config.hidden_size, TILE_COLUMNS, MAX_SIZE),
            ("the width of all query heads", config.q_width(), TILE_COLUMNS, MAX_SIZE),
            ("the feed-forward size", config.intermediate_size, CHUNK_ROWS, MAX_SIZE),
            ("the vocabulary", config.vocab_size, ROW_PAIR, MAX_SIZE),
            ("the number of layers", config.layers, 1, MAX_LAYERS),
        ] {
            if found == 0 || found > limit || !found.is_multiple_of(multiple) {
                return Err(LaneDecline::Size { what, found, multiple, limit });
            }
        }
        Ok(Self {
            hidden: config.hidden_size,
            layers: config.layers,
            heads,
            kv_heads,
            intermediate: config.intermediate_size,
            vocab: config.vocab_size,
            rope_theta: config.rope.theta,
        })
    }

    /// Width of all query heads.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads * HEAD_DIM
    }

    /// Width of all key (or value) heads.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * HEAD_DIM
    }

    /// Bytes of a row of the residual stream, bf16.
    #[must_use]
    pub fn hidden_bytes(&self) -> usize {
        2 * self.hidden
    }

    /// Bytes of a row of logits, bf16.
    #[must_use]
    pub fn logits_bytes(&self) -> usize {
        2 * self.vocab
    }
}

fn check_rope(config: &ModelConfig) -> Result<(), LaneDecline> {
    let rope = &config.rope;
    let refuse = |what, wanted: &str, found: String| Err(LaneDecline::Rope { what, wanted: wanted.to_owned(), found });
    if rope.dims != HEAD_DIM {
        return refuse("the number of rotated elements", &HEAD_DIM.to_string(), rope.dims.to_string());
    }
    if rope.pairing != RopePairing::Halves {
        return refuse("the pairing", "halves", format!("{:?}", rope.pairing));
    }
    if rope.scaling != RopeScaling::None {
        return refuse("the scaling", "none", format!("{:?}", rope.scaling));
    }
    if !(rope.theta.is_finite() && rope.theta > 0.0) {
        return refuse("the base", "a positive number", rope.theta.to_string());
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use npuhal_models::config::{DecoderFeatures, Rope};

    /// Qwen3-0.6B.
    pub(crate) fn qwen3_0_6b() -> ModelConfig {
        ModelConfig {
            model_type: "qwen3".to_owned(),
            name: String::new(),
            hidden_size: 1024,
            layers: 28,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            intermediate_size: 3072,
            vocab_size: 151_936,
            context_length: 40_960,
            rms_norm_eps: 1e-6,
            rope: Rope { theta: 1e6, dims: 128, pairing: RopePairing::Halves, scaling: RopeScaling::None },
            qkv_bias: false,
            qk_norm: true,
            tied_head: true,
            features: DecoderFeatures::default(),
        }
    }

    fn reason(change: impl FnOnce(&mut ModelConfig)) -> String {
        let mut config = qwen3_0_6b();
        change(&mut config);
        Dimensions::of(&config).unwrap_err().to_string()
    }

    #[test]
    fn qwen3_is_taken() {
        let dimensions = Dimensions::of(&qwen3_0_6b()).unwrap();
        assert_eq!((dimensions.q_width(), dimensions.kv_width()), (2048, 1024));
        assert_eq!((dimensions.hidden_bytes(), dimensions.logits_bytes()), (2048, 303_872));
    }

    #[test]
    fn every_other_shape_is_declined_with_its_reason() {
        let qwen2 = reason(|c| c.model_type = "qwen2".to_owned());
        assert_eq!(qwen2, "model_type 'qwen2': the fast lane serves the Qwen3 layer kernel only");
        assert!(reason(|c| c.head_dim = 64).contains("heads of 64 elements"));
        for (heads, kv_heads) in [(16, 3), (16, 0), (0, 2), (15, 5), (16, 1), (1 << 20, 2)] {
            let found = reason(|c| (c.heads, c.kv_heads) = (heads, kv_heads));
            assert!(found.contains(&format!("{heads} query heads over {kv_heads} KV heads")), "{found}");
        }
        assert!(reason(|c| c.qkv_bias = true).contains("biases"));
        assert!(reason(|c| c.qk_norm = false).contains("no norms of query and key heads"));
        assert!(reason(|c| c.rope.dims = 64).contains("rotated elements is 64, and the layer kernel takes 128"));
        assert!(reason(|c| c.rope.pairing = RopePairing::Interleaved).contains("the pairing is Interleaved"));
        assert!(reason(|c| c.rope.scaling = RopeScaling::Linear { factor: 2.0 }).contains("the scaling"));
        assert!(reason(|c| c.rope.theta = f32::NAN).contains("the base is NaN"));
        assert!(
            reason(|c| c.hidden_size = 1152)
                .contains("the hidden size is 1152; the packed weights need a multiple of 256")
        );
        assert!(
            reason(|c| c.intermediate_size = 768)
                .contains("the feed-forward size is 768; the packed weights need a multiple of 512")
        );
        assert!(reason(|c| c.intermediate_size = 0).contains("the feed-forward size is 0"));
        assert!(reason(|c| c.vocab_size = 151_936 + 32).contains("the vocabulary is 151968"));
        assert!(reason(|c| c.layers = usize::MAX).contains("the number of layers"));
        assert!(reason(|c| c.hidden_size = usize::MAX - 255).contains("the hidden size"));
    }
}
