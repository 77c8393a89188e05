//! Checkpoints as a source of packages: a Hugging Face directory or a GGUF file.

use super::error::PackageError;
use super::identity::SourceNames;
use super::metadata::DEFAULT_ROPE_THETA;
use super::plan::Part;
use super::shape::{FIELD_NAMES, Family, Fields, HEAD_DIM, Shape};
use crate::config::{RopePairing, RopeScaling};
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::q4nx::names::q4nx_name;
use crate::safetensors::{SafetensorsCheckpoint, read_bounded};
use crate::source::{LayerTensor, ModelSource, TensorRole};
use crate::tensor::Tensor;
use serde_json::{Map, Number, Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Files of a checkpoint that go into the package unchanged.
const COMPANIONS: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", CONFIG];
/// Longest of them; vocabularies of 150,000 tokens take about 11 MB.
const MAX_COMPANION_BYTES: u64 = 256 << 20;

/// Rows of a source tensor, in the order of Hugging Face checkpoints.
#[derive(Debug, Clone)]
pub(super) struct SourceRows {
    pub(super) tensor: Tensor,
    /// Rows of a head are stored permuted for interleaved pairs.
    interleaved: bool,
}

impl SourceRows {
    /// The stored row (or, of a vector, element) that holds row `row`: row `i` of a head's first half is stored at `2i`, of
    /// its second half at `2i + 1`.
    pub(super) fn stored(&self, row: usize) -> usize {
        if !self.interleaved {
            return row;
        }
        let (head, at) = (row / HEAD_DIM, row % HEAD_DIM);
        head * HEAD_DIM + 2 * (at % (HEAD_DIM / 2)) + at / (HEAD_DIM / 2)
    }
}

enum Tensors {
    Checkpoint(SafetensorsCheckpoint),
    Gguf(Box<ModelSource>),
}

/// An opened checkpoint that fits a package.
pub(super) struct Checkpoint {
    pub(super) family: Family,
    pub(super) shape: Shape,
    pub(super) rope_theta: Number,
    pub(super) rms_norm_eps: Number,
    pub(super) names: SourceNames,
    /// What `metadata.json` says about the source beyond the caller's words.
    pub(super) provenance: Map<String, Value>,
    /// Files that go into the package: name and contents.
    pub(super) companions: Vec<(String, Vec<u8>)>,
    /// The GGUF file itself, for its checksum.
    pub(super) file: Option<PathBuf>,
    tensors: Tensors,
}

impl Checkpoint {
    /// Opens the source at `path` and checks it against its family's shape, or against `shape`.
    pub(super) fn open(path: &Path, shape: Option<Shape>) -> Result<Self, PackageError> {
        let checkpoint = if path.is_dir() { open_directory(path, shape)? } else { open_gguf(path, shape)? };
        checkpoint.check_unused()?;
        Ok(checkpoint)
    }

    /// The tensor behind a part of `rows` × `cols`; `None` for zeros.
    pub(super) fn part(&self, part: Part, rows: usize, cols: usize) -> Result<Option<SourceRows>, PackageError> {
        let found = match part {
            Part::Tensor(role) | Part::TensorOrZeros(role) => self.tensor(role)?,
            Part::Head => match self.tensor(TensorRole::Head)? {
                Some(head) => Some(head),
                None => self.tensor(TensorRole::TokenEmbedding)?,
            },
        };
        let role = match part {
            Part::Tensor(role) | Part::TensorOrZeros(role) => role,
            Part::Head => TensorRole::Head,
        };
        match found {
            Some(found) if (found.tensor.rows(), found.tensor.cols()) == (rows, cols) => Ok(Some(found)),
            Some(found) => Err(PackageError::Model(ModelError::Malformed {
                path: found.tensor.path().to_owned(),
                field: format!("tensor {:?}", found.tensor.name()),
                reason: format!("wanted {rows} x {cols}, found {} x {}", found.tensor.rows(), found.tensor.cols()),
            })),
            None if matches!(part, Part::TensorOrZeros(_)) => Ok(None),
            None => Err(PackageError::Model(ModelError::Missing {
                path: self.path().to_owned(),
                what: q4nx_name(role).map_or_else(|| format!("{role:?}"), |name| format!("tensor {name:?}")),
                remedy: "the checkpoint is incomplete; fetch it again".to_owned(),
            })),
        }
    }

    fn path(&self) -> &Path {
        match &self.tensors {
            Tensors::Checkpoint(checkpoint) => checkpoint.path(),
            Tensors::Gguf(model) => model.path(),
        }
    }

    fn tensor(&self, role: TensorRole) -> Result<Option<SourceRows>, PackageError> {
        match &self.tensors {
            Tensors::Checkpoint(checkpoint) => {
                let Some(name) = q4nx_name(role) else { return Ok(None) };
                Ok(checkpoint.tensor(&name)?.map(|tensor| SourceRows { tensor, interleaved: false }))
            }
            Tensors::Gguf(model) => {
                use LayerTensor::{K, KBias, Q, QBias};
                let permuted = matches!(role, TensorRole::Layer(_, Q | K | QBias | KBias));
                let interleaved = permuted && model.config().rope.pairing == RopePairing::Interleaved;
                Ok(model.tensor(role).map(|tensor| SourceRows { tensor: tensor.clone(), interleaved }))
            }
        }
    }

    /// Refuses tensors that a package would silently leave out.
    fn check_unused(&self) -> Result<(), PackageError> {
        let Tensors::Checkpoint(checkpoint) = &self.tensors else { return Ok(()) };
        let layers = (0..self.shape.layers).flat_map(|layer| LAYER_TENSORS.map(|part| TensorRole::Layer(layer, part)));
        let whole = [TensorRole::TokenEmbedding, TensorRole::FinalNorm, TensorRole::Head];
        let known: HashSet<String> = whole.into_iter().chain(layers).filter_map(q4nx_name).collect();
        let names = checkpoint.files().iter().flat_map(|file| file.tensors().iter().map(|info| info.name()));
        // Frequencies follow from the configuration; old checkpoints store them.
        let mut unused = names.filter(|name| !known.contains(*name) && !name.ends_with(".rotary_emb.inv_freq"));
        match unused.next() {
            None => Ok(()),
            Some(name) => Err(PackageError::Feature {
                path: checkpoint.path().to_owned(),
                feature: format!("tensor {name:?}"),
                supported: "the tensors of a dense decoder with biases on q, k and v only",
            }),
        }
    }
}

/// Tensors of a layer that a package has room for.
const LAYER_TENSORS: [LayerTensor; 12] = [
    LayerTensor::InputNorm,
    LayerTensor::Q,
    LayerTensor::QBias,
    LayerTensor::K,
    LayerTensor::KBias,
    LayerTensor::V,
    LayerTensor::VBias,
    LayerTensor::O,
    LayerTensor::PostAttentionNorm,
    LayerTensor::Gate,
    LayerTensor::Up,
    LayerTensor::Down,
];

fn open_directory(path: &Path, shape: Option<Shape>) -> Result<Checkpoint, PackageError> {
    let config_path = path.join(CONFIG);
    let text = read_bounded(&config_path, MAX_CONFIG_BYTES)?;
    let config: Map<String, Value> = serde_json::from_slice(&text).map_err(|error| {
        let (path, field) = (config_path.clone(), "contents".to_owned());
        ModelError::Malformed { path, field, reason: format!("wanted a JSON object: {error}") }
    })?;
    let model_type = match config.get("model_type") {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => "none".to_owned(),
    };
    let family = Family::from_model_type(&model_type)?;
    let shape = shape.unwrap_or(family.shape());
    let field = |name: &str| config.get(name).and_then(Value::as_u64);
    // A checkpoint without grouped queries states no KV heads.
    let sizes = FIELD_NAMES.map(|name| match name {
        "num_key_value_heads" => field(name).or_else(|| field("num_attention_heads")),
        _ => field(name),
    });
    shape.accept(&Fields { sizes, head_dim: field("head_dim") })?;
    check_features(&config_path, &config)?;
    let nested = config.get("rope_parameters").and_then(|parameters| parameters.get("rope_theta"));
    let rope_theta = positive(&config_path, "rope_theta", config.get("rope_theta").or(nested), DEFAULT_ROPE_THETA)?;
    let default_eps = decimal(family.norm_epsilon());
    let rms_norm_eps = positive(&config_path, "rms_norm_eps", config.get("rms_norm_eps"), default_eps)?;
    let checkpoint = SafetensorsCheckpoint::open(path)?;
    let mut companions = Vec::new();
    for name in COMPANIONS {
        let file = path.join(name);
        if file.is_file() {
            companions.push((name.to_owned(), read_bounded(&file, MAX_COMPANION_BYTES)?));
        }
    }
    let names = [config.get("_name_or_path").and_then(Value::as_str).map(str::to_owned), directory_name(path)];
    Ok(Checkpoint {
        family,
        shape,
        rope_theta,
        rms_norm_eps,
        names: SourceNames {
            names: names.into_iter().flatten().filter(|name| !name.is_empty()).collect(),
            is_gguf: false,
            family,
        },
        provenance: Map::new(),
        companions,
        file: None,
        tensors: Tensors::Checkpoint(checkpoint),
    })
}

/// The directory's name; of a snapshot in a hub's cache (`models--OWNER--NAME/snapshots/COMMIT`) the repository's.
fn directory_name(path: &Path) -> Option<String> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let above = path.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
    let named = above.and_then(Path::parent).unwrap_or(&path);
    named.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Refuses what the configuration declares and a package cannot carry.
fn check_features(path: &Path, config: &Map<String, Value>) -> Result<(), PackageError> {
    let refuse = |key: &str, value: &Value, supported| {
        Err(PackageError::Feature { path: path.to_owned(), feature: format!("{key} = {value}"), supported })
    };
    if let Some(value) = config.get("rope_scaling").filter(|value| !value.is_null()) {
        return refuse("rope_scaling", value, "null");
    }
    if let Some(value) = config.get("rope_parameters").and_then(|parameters| parameters.get("rope_type"))
        && value.as_str() != Some("default")
    {
        return refuse("rope_parameters.rope_type", value, "default");
    }
    match config.get("hidden_act") {
        None => {}
        Some(Value::String(text)) if text == "silu" => {}
        Some(value) => return refuse("hidden_act", value, "silu"),
    }
    match config.get("use_sliding_window") {
        Some(value @ Value::Bool(true)) => refuse("use_sliding_window", value, "false"),
        _ => Ok(()),
    }
}

/// The shortest decimal that is this f32.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// The number as the configuration writes it.
fn positive(path: &Path, field: &str, value: Option<&Value>, default: f64) -> Result<Number, PackageError> {
    let found = match value {
        None | Some(Value::Null) => Number::from_f64(default),
        Some(Value::Number(number)) => Some(number.clone()),
        Some(_) => None,
    };
    let sound = |number: &Number| number.as_f64().is_some_and(|value| value > 0.0 && (value as f32).is_finite());
    found.filter(sound).ok_or_else(|| {
        let reason = format!("wanted a positive number, found {}", value.unwrap_or(&Value::Null));
        PackageError::Model(ModelError::Malformed { path: path.to_owned(), field: field.to_owned(), reason })
    })
}

fn open_gguf(path: &Path, shape: Option<Shape>) -> Result<Checkpoint, PackageError> {
    let file = GgufFile::open(path)?;
    let model = file.model()?;
    let config = model.config();
    let family = Family::from_model_type(&config.model_type)?;
    let shape = shape.unwrap_or(family.shape());
    let sizes =
        [config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.layers, config.vocab_size];
    shape.accept(&Fields { sizes: sizes.map(|size| Some(size as u64)), head_dim: Some(config.head_dim as u64) })?;
    let refuse = |feature: &str, supported| {
        Err(PackageError::Feature { path: path.to_owned(), feature: feature.to_owned(), supported })
    };
    if let Some(extra) = config.features.first_extra() {
        return refuse(&extra, "a plain decoder");
    }
    if config.rope.scaling != RopeScaling::None || model.tensor(TensorRole::RopeFactors).is_some() {
        return refuse("scaling of the rotary frequencies", "none");
    }
    if config.rope.dims != HEAD_DIM {
        return refuse(&format!("rotation of {} elements of a head", config.rope.dims), "all 64");
    }
    let number = |value: f32| Number::from_f64(decimal(value)).unwrap_or_else(|| Number::from(0));
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let stated =
        ["general.name", "general.basename"].map(|key| file.get(key).and_then(|v| v.as_str().map(str::to_owned)));
    let names: Vec<String> = [stem].into_iter().chain(stated).flatten().filter(|name| !name.is_empty()).collect();
    let mut types: Vec<&str> = model.tensors().map(|(_, tensor)| tensor.weight_type().name()).collect();
    types.sort_unstable();
    types.dedup();
    let mut provenance = Map::new();
    provenance.insert("source_format".to_owned(), json!("gguf"));
    provenance.insert("source_weight_types".to_owned(), json!(types));
    if let Some(name) = path.file_name() {
        provenance.insert("source_file".to_owned(), json!(name.to_string_lossy()));
    }
    Ok(Checkpoint {
        family,
        shape,
        rope_theta: number(config.rope.theta),
        rms_norm_eps: number(config.rms_norm_eps),
        names: SourceNames { names, is_gguf: true, family },
        provenance,
        companions: super::text::companions(path, config, model.vocabulary())?,
        file: Some(path.to_owned()),
        tensors: Tensors::Gguf(Box::new(model)),
    })
}
