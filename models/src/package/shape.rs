//! The two decoder shapes of the lane and the four published checkpoints.

use super::error::PackageError;

/// Positions of every package.
pub const CONTEXT_POSITIONS: u32 = 64;
/// Elements of a head, fixed by the kernels.
pub const HEAD_DIM: usize = 64;

/// Which decoder a package is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// The three SmolLM checkpoints of 135 M parameters.
    Llama,
    /// Qwen2.5 0.5B.
    Qwen2,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Llama, Self::Qwen2];

    /// The family of a checkpoint's `model_type`.
    ///
    /// # Errors
    /// [`PackageError::UnknownFamily`].
    pub fn from_model_type(model_type: &str) -> Result<Self, PackageError> {
        let found = Self::ALL.into_iter().find(|family| family.name() == model_type);
        found.ok_or_else(|| PackageError::UnknownFamily { found: model_type.to_owned() })
    }

    /// `model_type` of its checkpoints, `model_family` of its packages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        }
    }

    /// `format` of its packages.
    #[must_use]
    pub const fn format(self) -> &'static str {
        match self {
            Self::Llama => "xdna1-smollm2-w8a16-v1",
            Self::Qwen2 => "xdna1-qwen2-w8a16-v1",
        }
    }

    /// What RMSNorm adds to the mean of squares in its graphs, where it is compiled in; of a checkpoint that states none too.
    #[must_use]
    pub const fn norm_epsilon(self) -> f32 {
        match self {
            Self::Llama => 1e-5,
            Self::Qwen2 => 1e-6,
        }
    }

    /// System message of a conversation that has none.
    #[must_use]
    pub const fn default_system(self) -> &'static str {
        match self {
            Self::Llama => "You are a helpful AI assistant named SmolLM.",
            Self::Qwen2 => "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        }
    }

    /// The only shape its graphs compute.
    #[must_use]
    pub const fn shape(self) -> Shape {
        match self {
            Self::Llama => Shape {
                hidden_size: 576,
                intermediate_size: 1536,
                heads: 9,
                kv_heads: 3,
                layers: 30,
                vocab_size: 49152,
            },
            Self::Qwen2 => Shape {
                hidden_size: 896,
                intermediate_size: 4864,
                heads: 14,
                kv_heads: 2,
                layers: 24,
                vocab_size: 151_936,
            },
        }
    }
}

/// Sizes of a decoder with heads of [`HEAD_DIM`] elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
}

impl Shape {
    /// Rows of the stacked query, key and value projections.
    #[must_use]
    pub fn qkv_rows(&self) -> usize {
        self.heads.saturating_add(self.kv_heads.saturating_mul(2)).saturating_mul(HEAD_DIM)
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads.saturating_mul(HEAD_DIM)
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads.saturating_mul(HEAD_DIM)
    }

    /// Whether every size is from 1 and small enough that no product of two of them and an element size overflows.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let Self { hidden_size, intermediate_size, heads, kv_heads, layers, vocab_size } = *self;
        let sizes = [hidden_size, intermediate_size, heads, kv_heads, layers, vocab_size];
        sizes.iter().all(|&size| (1..=1 << 24).contains(&size))
            && layers <= 100
            && heads.is_multiple_of(kv_heads)
            && self.q_width() == hidden_size
    }

    /// Compares a checkpoint's fields with this shape.
    ///
    /// # Errors
    /// [`PackageError::Incompatible`] with every field that differs; [`PackageError::HeadDim`].
    pub(super) fn accept(&self, found: &Fields) -> Result<(), PackageError> {
        let wanted =
            [self.hidden_size, self.intermediate_size, self.heads, self.kv_heads, self.layers, self.vocab_size];
        let mut differences = Vec::new();
        for ((name, found), wanted) in FIELD_NAMES.into_iter().zip(&found.sizes).zip(wanted) {
            if *found != Some(wanted as u64) {
                let found = found.map_or_else(|| "none".to_owned(), |found| found.to_string());
                differences.push(format!("{name}={found} (expected {wanted})"));
            }
        }
        if !differences.is_empty() {
            return Err(PackageError::Incompatible { differences: differences.join(", ") });
        }
        let head_dim = found.head_dim.unwrap_or((self.hidden_size / self.heads.max(1)) as u64);
        if head_dim != HEAD_DIM as u64 {
            return Err(PackageError::HeadDim { found: head_dim });
        }
        Ok(())
    }
}

/// Names of the compared fields, as `config.json` has them.
pub(super) const FIELD_NAMES: [&str; 6] = [
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
];

/// What a checkpoint states of its shape.
#[derive(Debug, Clone)]
pub(super) struct Fields {
    /// In the order of [`FIELD_NAMES`].
    pub(super) sizes: [Option<u64>; 6],
    pub(super) head_dim: Option<u64>,
}

/// A checkpoint the lane is published for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Id of its package.
    pub model_id: &'static str,
    /// Repository on the Hugging Face hub.
    pub repository: &'static str,
    /// Pinned commit of the repository.
    pub revision: &'static str,
    /// Name of its package's directory.
    pub directory: &'static str,
    /// Name for people.
    pub display_name: &'static str,
    /// Its family.
    pub family: Family,
}

impl Published {
    /// The checkpoint with this package id.
    #[must_use]
    pub fn find(model_id: &str) -> Option<&'static Self> {
        PUBLISHED.iter().find(|known| known.model_id == model_id)
    }

    /// The checkpoint whose package directory has this name.
    #[must_use]
    pub fn find_directory(name: &str) -> Option<&'static Self> {
        PUBLISHED.iter().find(|known| known.directory == name)
    }
}

/// The checkpoints the lane is published for, the default first.
pub const PUBLISHED: [Published; 4] = [
    Published {
        model_id: "smollm2-135m-xdna1",
        repository: "HuggingFaceTB/SmolLM2-135M-Instruct",
        revision: "12fd25f77366fa6b3b4b768ec3050bf629380bac",
        directory: "SmolLM2-135M-Instruct-xdna1-w8a16",
        display_name: "SmolLM2 135M Instruct (XDNA1)",
        family: Family::Llama,
    },
    Published {
        model_id: "smollm-135m-xdna1",
        repository: "HuggingFaceTB/SmolLM-135M-Instruct",
        revision: "fcc320f490e08fdb4b99d935b2c58d40bf35b0d0",
        directory: "SmolLM-135M-Instruct-xdna1-w8a16",
        display_name: "SmolLM 135M Instruct (XDNA1)",
        family: Family::Llama,
    },
    Published {
        model_id: "smollm2-135m-sft-xdna1",
        repository: "HuggingFaceTB/smollm2-135M-SFT-Only",
        revision: "79528469cd11749bac3e8e9200fd9c192fbd8979",
        directory: "SmolLM2-135M-SFT-Only-xdna1-w8a16",
        display_name: "SmolLM2 135M SFT-Only (XDNA1)",
        family: Family::Llama,
    },
    Published {
        model_id: "qwen2.5-0.5b-xdna1",
        repository: "Qwen/Qwen2.5-0.5B-Instruct",
        revision: "7ae557604adf67be50417f59c2c2f167def9a775",
        directory: "Qwen2.5-0.5B-Instruct-xdna1-w8a16",
        display_name: "Qwen2.5 0.5B Instruct (XDNA1 experimental)",
        family: Family::Qwen2,
    },
];
