//! Hugging Face model directories: `config.json`, safetensors in one file or in shards, the tokenizer's files,
//! `generation_config.json`.
//!
//! What `config.json` declares is computed or refused by name, after the definitions of the `transformers` library: a key that
//! changes the result and is not read is an error. Query and key rows are in the order of rotation by halves, as that library
//! keeps them; GGUF files of the same model may store them permuted.

mod config;
mod features;
mod generation;
mod names;
mod rope;

use crate::error::ModelError;
use crate::hub_text::HubTextFiles;
use crate::json_keys::{Keys, read_object};
use crate::roles::{has_part, required, shape_of};
use crate::safetensors::SafetensorsCheckpoint;
use crate::source::{Format, ModelSource, TensorRole};
use crate::tensor::Tensor;
use names::Named;
use std::collections::BTreeMap;
use std::path::Path;

/// File of the configuration in a directory.
pub const CONFIG_FILE: &str = "config.json";
/// Longest configuration that is read; the lists of LongRoPE make the longest known ones, of 10 KB.
const CONFIG_LIMIT_BYTES: u64 = 1 << 20;
/// What to do where a required key is missing.
const REMEDY: &str = "copy the file from the model's page";

/// Whether `path` is a directory with a configuration and weights as safetensors.
#[must_use]
pub fn is_model(path: &Path) -> bool {
    path.join(CONFIG_FILE).is_file() && SafetensorsCheckpoint::is_in(path)
}

/// Opens the model in `directory`.
///
/// # Errors
/// [`ModelError::Unsupported`] for a model type, an element type or a declared feature that is not implemented;
/// [`ModelError::Missing`] and [`ModelError::Malformed`] where the directory is incomplete or contradicts itself.
pub fn open(directory: &Path) -> Result<ModelSource, ModelError> {
    let checkpoint = SafetensorsCheckpoint::open(directory)?;
    let path = directory.join(CONFIG_FILE);
    let map = read_object(&path, CONFIG_LIMIT_BYTES)?;
    let keys = Keys { path: &path, map: &map, remedy: REMEDY };
    let mut weights = weights(&checkpoint, keys.text("model_type")?.as_deref())?;
    let embedding = weights.get(&TensorRole::TokenEmbedding).ok_or_else(|| ModelError::Missing {
        path: directory.to_owned(),
        what: "tensor \"model.embed_tokens.weight\"".to_owned(),
        remedy: "the directory is incomplete".to_owned(),
    })?;
    let is_biased = weights.keys().any(|role| names::is_bias(*role));
    let mut config = config::read(&keys, embedding.rows(), is_biased)?;
    if config.name.is_empty() {
        config.name = directory.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    }
    if config.tied_head {
        // A second copy of the embedding: the library takes the embedding for both.
        weights.remove(&TensorRole::Head);
    }
    for (role, tensor) in &weights {
        check(*role, tensor, &config)?;
    }
    if let Some(role) = required(&config).find(|role| !weights.contains_key(role)) {
        return Err(ModelError::Missing {
            path: directory.to_owned(),
            what: format!("tensor {:?}", names::name_of(role, &config.model_type)),
            remedy: format!("a {} model of {} layers has it; fetch it again", config.model_type, config.layers),
        });
    }
    let text = HubTextFiles::read(directory).and_then(|files| files.vocabulary(config.vocab_size));
    let vocabulary = text.map_err(|error| ModelError::Malformed {
        path: directory.to_owned(),
        field: "tokenizer".to_owned(),
        reason: error.to_string(),
    })?;
    let sampling = generation::read(directory)?;
    let source = ModelSource::new(directory.to_owned(), Format::HubDirectory, config, vocabulary, weights);
    Ok(source.with_suggested_sampling(sampling))
}

/// The checkpoint's tensors by role. What is unknown is an error.
fn weights(
    checkpoint: &SafetensorsCheckpoint,
    model_type: Option<&str>,
) -> Result<BTreeMap<TensorRole, Tensor>, ModelError> {
    let mut weights = BTreeMap::new();
    // In one order, so that of several faults the same is told every time.
    let mut all: Vec<&str> = checkpoint.names().collect();
    all.sort_unstable();
    for name in all {
        match names::role_of(name, model_type.unwrap_or_default()) {
            Named::Role(role) => {
                // Every name of the checkpoint has its tensor.
                let Some(tensor) = checkpoint.tensor(name)? else { continue };
                if let Some(other) = weights.insert(role, tensor) {
                    return Err(ModelError::Malformed {
                        path: checkpoint.path().to_owned(),
                        field: format!("tensor {name:?}"),
                        reason: format!("wanted one tensor for it, found {:?} too", other.name()),
                    });
                }
            }
            Named::WithoutInfluence => {}
            Named::Unknown => {
                return Err(ModelError::Unsupported {
                    path: checkpoint.path().to_owned(),
                    feature: format!("tensor {name:?} in a model of type {:?}", model_type.unwrap_or_default()),
                    supported: "the tensors of a dense decoder with biases on q, k and v only".to_owned(),
                });
            }
        }
    }
    Ok(weights)
}

fn check(role: TensorRole, tensor: &Tensor, config: &crate::ModelConfig) -> Result<(), ModelError> {
    let bad = |reason: String| ModelError::Malformed {
        path: tensor.path().to_owned(),
        field: format!("tensor {:?}", tensor.name()),
        reason,
    };
    if let TensorRole::Layer(layer, part) = role {
        if layer >= config.layers {
            return Err(bad(format!("wanted a layer below {} (num_hidden_layers), found {layer}", config.layers)));
        }
        if !has_part(config, part) {
            return Err(ModelError::Unsupported {
                path: tensor.path().to_owned(),
                feature: format!("tensor {:?} in a model of type {}", tensor.name(), config.model_type),
                supported: "the tensors that the library gives such a model".to_owned(),
            });
        }
    }
    let (rows, cols) = shape_of(role, config);
    if (tensor.rows(), tensor.cols()) == (rows, cols) {
        return Ok(());
    }
    Err(bad(format!("wanted {rows} × {cols} from {CONFIG_FILE}, found {} × {}", tensor.rows(), tensor.cols())))
}
