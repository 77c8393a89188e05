//! A Q4NX model directory as a [`ModelSource`].

use super::config;
use super::container::{Q4nxFile, TensorEntry};
use super::names::{is_plain, q4nx_name, role_of_q4nx};
use super::tiled::TiledTensor;
use super::tokenizer;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{Format, LayerTensor, ModelSource, TensorRole};
use crate::tensor::{Tensor, WeightType};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// File of the weights in a directory.
pub const MODEL_FILE: &str = "model.q4nx";
/// Folder with the kernels of an NPU, where a directory has one.
pub const KERNELS: &str = "npu";
/// Files every directory has.
pub const FILES: [&str; 3] = [MODEL_FILE, config::FILE, tokenizer::FILE];

/// Whether `path` is a directory with the three files of a model.
#[must_use]
pub fn is_model(path: &Path) -> bool {
    FILES.iter().all(|file| path.join(file).is_file())
}

/// Opens the model in `directory`: plain tensors as [`ModelSource::tensor`], tiles as [`ModelSource::tiled`].
///
/// # Errors
/// [`ModelError::Unsupported`] where it is no model directory, and for another model type; as [`Q4nxFile::open`] and
/// [`config::read`]; [`ModelError::Missing`] and [`ModelError::Malformed`] where tensors are missing or do not fit the
/// configuration.
pub fn open(directory: &Path) -> Result<ModelSource, ModelError> {
    if !is_model(directory) {
        return Err(ModelError::Missing {
            path: directory.to_owned(),
            what: format!("not an NPU model directory ({}): a file", FILES.join(", ")),
            remedy: "make one with `npuhal pack`".to_owned(),
        });
    }
    let file = Q4nxFile::open(&directory.join(MODEL_FILE))?;
    let embedding = require(&file, TensorRole::TokenEmbedding)?;
    let [vocab_size, _] = *embedding.shape() else {
        return Err(bad(&file, embedding, format!("wanted two dimensions, found {:?}", embedding.shape())));
    };
    let vocab_size = usize::try_from(vocab_size)
        .map_err(|_| bad(&file, embedding, format!("wanted a positive number of rows, found {vocab_size}")))?;
    let biased = file.tensors().iter().any(|entry| is_bias(role_of_q4nx(entry.name())));
    let config = config::read(directory, vocab_size, biased)?;
    let vocabulary = tokenizer::vocabulary(directory, &config)?;
    let mut tensors = BTreeMap::new();
    let mut tiled = BTreeMap::new();
    for entry in file.tensors() {
        let role = role_of_q4nx(entry.name()).filter(|role| config.model.qk_norm || !is_head_norm(*role));
        let Some(role) = role else {
            return Err(ModelError::Unsupported {
                path: file.path().to_owned(),
                feature: format!("tensor {:?} in a {} model", entry.name(), config.model.model_type),
                supported: "the tensors of a dense decoder with biases on q, k and v only".to_owned(),
            });
        };
        let (rows, cols) = shape_of(&file, entry, role, &config.model)?;
        if is_plain(role) {
            tensors.insert(role, plain(&file, entry, rows, cols)?);
        } else {
            tiled.insert(role, TiledTensor::new(&file, entry, rows, cols)?);
        }
    }
    for role in wanted(&config.model) {
        if !tensors.contains_key(&role) && !tiled.contains_key(&role) {
            require(&file, role)?;
        }
    }
    let source = ModelSource::new(directory.to_owned(), Format::Q4nx, config.model, vocabulary, tensors);
    Ok(source.with_tiled(tiled))
}

fn is_bias(role: Option<TensorRole>) -> bool {
    use LayerTensor::{KBias, QBias, VBias};
    matches!(role, Some(TensorRole::Layer(_, QBias | KBias | VBias)))
}

fn is_head_norm(role: TensorRole) -> bool {
    matches!(role, TensorRole::Layer(_, LayerTensor::QNorm | LayerTensor::KNorm))
}

fn require(file: &Q4nxFile, role: TensorRole) -> Result<&TensorEntry, ModelError> {
    let name = q4nx_name(role).unwrap_or_default();
    file.tensor(&name).ok_or_else(|| ModelError::Missing {
        path: file.path().to_owned(),
        what: format!("tensor {name:?}"),
        remedy: "the directory is incomplete or of another architecture".to_owned(),
    })
}

/// A vector or matrix of bf16 rows; its shape must be exactly this.
fn plain(file: &Q4nxFile, entry: &TensorEntry, rows: usize, cols: usize) -> Result<Tensor, ModelError> {
    let wanted = if rows == 1 { vec![cols as i64] } else { vec![rows as i64, cols as i64] };
    // A matrix of one row may be stated as a vector and the other way round.
    let same = entry.shape() == wanted || (rows == 1 && entry.shape() == [1, cols as i64]);
    if entry.dtype() != "BF16" || !same {
        let reason = format!("wanted BF16 {wanted:?}, found {} {:?}", entry.dtype(), entry.shape());
        return Err(bad(file, entry, reason));
    }
    let name: Arc<str> = entry.name().into();
    let tensor = Tensor::new(name, WeightType::Bf16, rows, cols, Arc::clone(file.map()), entry.range());
    tensor.ok_or_else(|| {
        let reason = format!("wanted 2 bytes for each of {rows} × {cols} elements, found {} bytes", entry.bytes());
        bad(file, entry, reason)
    })
}

fn shape_of(
    file: &Q4nxFile,
    entry: &TensorEntry,
    role: TensorRole,
    config: &ModelConfig,
) -> Result<(usize, usize), ModelError> {
    let (hidden, q, kv, wide) = (config.hidden_size, config.q_width(), config.kv_width(), config.intermediate_size);
    let TensorRole::Layer(layer, part) = role else {
        let rows = if role == TensorRole::FinalNorm { 1 } else { config.vocab_size };
        return Ok((rows, hidden));
    };
    if layer >= config.layers {
        let reason = format!("wanted a layer below {} (num_hidden_layers), found {layer}", config.layers);
        return Err(bad(file, entry, reason));
    }
    Ok(match part {
        LayerTensor::InputNorm
        | LayerTensor::AttentionOutputNorm
        | LayerTensor::PostAttentionNorm
        | LayerTensor::FeedForwardOutputNorm => (1, hidden),
        LayerTensor::Q => (q, hidden),
        LayerTensor::QBias => (1, q),
        LayerTensor::K | LayerTensor::V => (kv, hidden),
        LayerTensor::KBias | LayerTensor::VBias => (1, kv),
        LayerTensor::QNorm | LayerTensor::KNorm => (1, config.head_dim),
        LayerTensor::O => (hidden, q),
        LayerTensor::Gate | LayerTensor::Up => (wide, hidden),
        LayerTensor::Down => (hidden, wide),
    })
}

/// What a model of this configuration has.
fn wanted(config: &ModelConfig) -> impl Iterator<Item = TensorRole> {
    use LayerTensor::{Down, Gate, InputNorm, K, KBias, KNorm, O, PostAttentionNorm, Q, QBias, QNorm, Up, V, VBias};
    let whole = [TensorRole::TokenEmbedding, TensorRole::FinalNorm, TensorRole::Head];
    let always = [InputNorm, Q, K, V, O, PostAttentionNorm, Gate, Up, Down].as_slice();
    let norms: &[LayerTensor] = if config.qk_norm { &[QNorm, KNorm] } else { &[] };
    let biases: &[LayerTensor] = if config.qkv_bias { &[QBias, KBias, VBias] } else { &[] };
    let layers = (0..config.layers).flat_map(move |layer| {
        [always, norms, biases].into_iter().flatten().map(move |part| TensorRole::Layer(layer, *part))
    });
    whole.into_iter().chain(layers)
}

fn bad(file: &Q4nxFile, entry: &TensorEntry, reason: String) -> ModelError {
    ModelError::Malformed { path: file.path().to_owned(), field: format!("tensor {:?}", entry.name()), reason }
}
