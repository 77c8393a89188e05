//! A model as a backend sees it: configuration and tensors by role.

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hub_model;
use crate::hub_text::HubTextFiles;
use crate::package::{self, OpenOptions, Package};
use crate::q4nx::{TiledTensor, directory};
use crate::sampling::SuggestedSampling;
use crate::tensor::Tensor;
use crate::vocabulary::Vocabulary;
use npuhal_core::stage::Control;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A weight of one decoder layer. Matrices are output features × input features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LayerTensor {
    /// RMSNorm before attention.
    InputNorm,
    /// Query projection.
    Q,
    /// Query bias.
    QBias,
    /// RMSNorm of each query head.
    QNorm,
    /// Key projection.
    K,
    /// Key bias.
    KBias,
    /// RMSNorm of each key head.
    KNorm,
    /// Value projection.
    V,
    /// Value bias.
    VBias,
    /// Output projection of attention.
    O,
    /// RMSNorm over what attention gives, before it is added to the residual stream.
    AttentionOutputNorm,
    /// RMSNorm before the feed-forward block.
    PostAttentionNorm,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
    /// RMSNorm over what the feed-forward block gives, before it is added to the residual stream.
    FeedForwardOutputNorm,
}

impl LayerTensor {
    /// Whether it is the weight of an RMSNorm.
    #[must_use]
    pub const fn is_norm(self) -> bool {
        matches!(
            self,
            Self::InputNorm
                | Self::QNorm
                | Self::KNorm
                | Self::AttentionOutputNorm
                | Self::PostAttentionNorm
                | Self::FeedForwardOutputNorm
        )
    }
}

/// What a tensor is for, whatever the file calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TensorRole {
    /// Token embedding, vocabulary × hidden size.
    TokenEmbedding,
    /// RMSNorm after the last layer.
    FinalNorm,
    /// Head, vocabulary × hidden size; absent when tied.
    Head,
    /// Factors of the RoPE frequencies.
    RopeFactors,
    /// A layer's tensor.
    Layer(usize, LayerTensor),
}

impl TensorRole {
    /// Whether it is the weight of an RMSNorm.
    #[must_use]
    pub const fn is_norm(self) -> bool {
        match self {
            Self::FinalNorm => true,
            Self::Layer(_, tensor) => tensor.is_norm(),
            _ => false,
        }
    }
}

/// Kind of model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// A GGUF file.
    Gguf,
    /// A directory with an xdna1 package ([`crate::package`]).
    Xdna1Package,
    /// A Q4NX directory.
    Q4nx,
    /// A file or directory that npuhal does not read: only its path, its stated type and its vocabulary are known.
    Unread,
    /// A Hugging Face directory: `config.json` with safetensors ([`crate::hub_model`]).
    HubDirectory,
}

/// An opened model: configuration, vocabulary, tensors. Holds mappings, no copies.
#[derive(Debug, Clone)]
pub struct ModelSource {
    path: PathBuf,
    format: Format,
    config: ModelConfig,
    vocabulary: Vocabulary,
    tensors: BTreeMap<TensorRole, Tensor>,
    tiled: BTreeMap<TensorRole, TiledTensor>,
    suggested_sampling: Option<SuggestedSampling>,
}

impl ModelSource {
    /// Opens the model at `path`: a GGUF file (any part of one in several), a Q4NX directory, a Hugging Face directory or an xdna1
    /// package. A package's files are hashed where they have changed since they were verified; [`ModelSource::open_with`] shows
    /// how far that is.
    ///
    /// # Errors
    /// [`ModelError`]: what cannot be read, is damaged, incomplete, or declares something that is not implemented.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::open_with(path, OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () })
    }

    /// As [`ModelSource::open`]; `options` are for packages.
    ///
    /// # Errors
    /// As [`ModelSource::open`].
    pub fn open_with(path: &Path, options: OpenOptions<'_>) -> Result<Self, ModelError> {
        if path.join(directory::MODEL_FILE).is_file() {
            return directory::open(path);
        }
        if package::is_package(path) {
            return Package::open(path, options)?.text_model();
        }
        if hub_model::is_model(path) {
            return hub_model::open(path);
        }
        if path.is_dir() {
            return Err(ModelError::Unsupported {
                path: path.to_owned(),
                feature: "a directory as a model".to_owned(),
                supported: format!(
                    "a GGUF file, a Q4NX directory, an xdna1 package, a directory with config.json and safetensors{}",
                    gguf_files_in(path)
                ),
            });
        }
        GgufFile::open_whole(path)?.model()
    }

    /// Puts a source together; readers have checked every tensor's shape against `config`.
    #[must_use]
    pub fn new(
        path: PathBuf,
        format: Format,
        config: ModelConfig,
        vocabulary: Vocabulary,
        tensors: BTreeMap<TensorRole, Tensor>,
    ) -> Self {
        Self { path, format, config, vocabulary, tensors, tiled: BTreeMap::new(), suggested_sampling: None }
    }

    /// The same with the sampling that its authors suggest.
    #[must_use]
    pub fn with_suggested_sampling(mut self, sampling: Option<SuggestedSampling>) -> Self {
        self.suggested_sampling = sampling;
        self
    }

    /// A model that npuhal does not read, for whoever can: the path, the type that it states, and its vocabulary as far as
    /// there are files npuhal knows ([`crate::hub_text`]); an empty one where there are none.
    #[must_use]
    pub fn unread(path: PathBuf, model_type: &str) -> Self {
        let files = HubTextFiles::read(&path).and_then(|files| files.vocabulary(usize::MAX));
        let vocabulary = files.unwrap_or_else(|error| {
            tracing::debug!(%error, path = %path.display(), "no vocabulary");
            Vocabulary::default()
        });
        Self::new(path, Format::Unread, ModelConfig::unread(model_type), vocabulary, BTreeMap::new())
    }

    /// The same with matrices that are stored as tiles.
    #[must_use]
    pub fn with_tiled(mut self, tiled: BTreeMap<TensorRole, TiledTensor>) -> Self {
        self.tiled = tiled;
        self
    }

    /// File or directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Kind of file.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Shape and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Tokens and template.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The sampling that the model's authors suggest; `None` where they suggest none.
    #[must_use]
    pub fn suggested_sampling(&self) -> Option<&SuggestedSampling> {
        self.suggested_sampling.as_ref()
    }

    /// The tensor of `role`, if the file has it as rows.
    #[must_use]
    pub fn tensor(&self, role: TensorRole) -> Option<&Tensor> {
        self.tensors.get(&role)
    }

    /// The tensor of `role`.
    ///
    /// # Errors
    /// [`ModelError::Missing`]; [`ModelError::Unsupported`] where it is stored as tiles.
    pub fn require(&self, role: TensorRole) -> Result<&Tensor, ModelError> {
        self.tensor(role).ok_or_else(|| match self.tiled(role) {
            Some(tiled) => ModelError::Unsupported {
                path: self.path.clone(),
                feature: format!("reading {:?}, which is stored as {}, row by row", tiled.name(), tiled.kind().name()),
                supported: "devices that take tiles; elsewhere use the GGUF file the directory was made from"
                    .to_owned(),
            },
            None => ModelError::Missing {
                path: self.path.clone(),
                what: format!("the tensor for {role:?}"),
                remedy: "the file is incomplete or of another architecture".to_owned(),
            },
        })
    }

    /// The tensor of `role`, if the file has it as tiles.
    #[must_use]
    pub fn tiled(&self, role: TensorRole) -> Option<&TiledTensor> {
        self.tiled.get(&role)
    }

    /// All tensors that are stored as tiles, by role.
    pub fn tiled_tensors(&self) -> impl Iterator<Item = (TensorRole, &TiledTensor)> {
        self.tiled.iter().map(|(role, tensor)| (*role, tensor))
    }

    /// The head's matrix: [`TensorRole::Head`], or the embedding when tied.
    ///
    /// # Errors
    /// As [`ModelSource::require`].
    pub fn head(&self) -> Result<&Tensor, ModelError> {
        if self.config.tied_head { self.require(TensorRole::TokenEmbedding) } else { self.require(TensorRole::Head) }
    }

    /// The vector of `role` with `len` elements: a bias as it is stored, an RMSNorm weight with the offset of the
    /// configuration added.
    ///
    /// # Errors
    /// As [`ModelSource::require`]; [`ModelError::Malformed`] where it has another shape.
    pub fn vector(&self, role: TensorRole, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.require(role)?;
        let mut values = vec![0.0; len];
        let read = if tensor.rows() == 1 { tensor.dequantize_row(0, &mut values).ok() } else { None };
        if read.is_none() {
            return Err(ModelError::Malformed {
                path: self.path.clone(),
                field: format!("tensor {:?}", tensor.name()),
                reason: format!("wanted a vector of {len}, found {} × {}", tensor.rows(), tensor.cols()),
            });
        }
        if role.is_norm() && self.config.features.norm_offset != 0.0 {
            values.iter_mut().for_each(|value| *value += self.config.features.norm_offset);
        }
        Ok(values)
    }

    /// Angle a position adds to each rotated pair of a head, in radians, with scaling and the file's factors applied, where
    /// room is made for `positions`.
    #[must_use]
    pub fn rope_inverse_frequencies(&self, positions: usize) -> Vec<f64> {
        let mut factors = Vec::new();
        if let Some(tensor) = self.tensor(TensorRole::RopeFactors) {
            factors.resize(tensor.cols(), 1.0);
            // The row exists and has this length; readers have checked it against the configuration.
            let _ = tensor.dequantize_row(0, &mut factors);
        }
        self.config.rope.inverse_frequencies(&factors, positions)
    }

    /// All tensors that are stored as rows, by role.
    pub fn tensors(&self) -> impl Iterator<Item = (TensorRole, &Tensor)> {
        self.tensors.iter().map(|(role, tensor)| (*role, tensor))
    }
}

/// The first GGUF files of a directory, for a message.
fn gguf_files_in(directory: &Path) -> String {
    const SHOWN: usize = 3;
    const LOOKED_AT: usize = 1000;
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().take(LOOKED_AT);
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.to_ascii_lowercase().ends_with(".gguf"))
        .collect();
    names.sort();
    match names.len() {
        0 => String::new(),
        count => {
            let more = if count > SHOWN { ", …" } else { "" };
            names.truncate(SHOWN);
            format!("; in the directory: {}{more}", names.join(", "))
        }
    }
}
