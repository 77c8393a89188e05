//! `metadata.json`.

use super::error::PackageError;
use super::shape::{CONTEXT_POSITIONS, Family, HEAD_DIM, Shape};
use crate::safetensors::{is_plain_name, read_bounded};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the file.
pub const METADATA_FILE: &str = "metadata.json";
/// Longest file; a package of 30 layers takes about 200 KiB.
const MAX_METADATA_BYTES: u64 = 16 << 20;

/// An array as one file of float16.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RawEntry {
    /// The file.
    pub file: String,
    /// Its dimensions, the contiguous one last.
    pub shape: Vec<u64>,
    /// `float16`.
    pub dtype: String,
}

/// A matrix as int8 with one scale a row, and the same as bf16.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct QuantizedEntry {
    /// File of the int8 codes.
    pub weight: String,
    /// File of the f32 scales, one a row.
    pub scale: String,
    /// Rows and columns.
    pub shape: Vec<u64>,
    /// File of the bf16 weights; old packages have none.
    #[serde(default)]
    pub bf16_file: Option<String>,
}

/// An array of a package.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum TensorEntry {
    /// float16.
    Raw(RawEntry),
    /// int8 with scales, and bf16.
    Quantized(QuantizedEntry),
}

/// A file of the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct FileEntry {
    pub(super) sha256: String,
    pub(super) size: u64,
}

#[derive(Deserialize)]
struct Text {
    format: String,
    #[serde(default)]
    model_family: Option<String>,
    hidden_size: usize,
    intermediate_size: usize,
    attention_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: usize,
    vocab_size: usize,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    rms_norm_eps: Option<f64>,
    #[serde(default)]
    context_length: Option<Value>,
    #[serde(default)]
    model_id: Option<String>,
    #[serde(default)]
    source_model: Option<String>,
    #[serde(default)]
    source_revision: Option<String>,
    #[serde(default)]
    display_name: Option<String>,
    tensors: BTreeMap<String, TensorEntry>,
    #[serde(default)]
    files: Option<BTreeMap<String, FileEntry>>,
}

/// What a package says about itself, checked for sense.
#[derive(Debug, Clone, PartialEq)]
pub struct Metadata {
    /// Its family.
    pub family: Family,
    /// Its sizes.
    pub shape: Shape,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Epsilon of the RMSNorms.
    pub rms_norm_eps: f32,
    /// Id under which it is served.
    pub model_id: Option<String>,
    /// Repository or name of the source.
    pub source_model: Option<String>,
    /// Commit of the source.
    pub source_revision: Option<String>,
    /// Name for people.
    pub display_name: Option<String>,
    /// Arrays by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    pub(super) files: BTreeMap<String, FileEntry>,
}

/// Base of the rotary frequencies where the source states none.
pub(super) const DEFAULT_ROPE_THETA: f64 = 10_000.0;

impl Metadata {
    /// Reads `metadata.json` of the package in `directory`.
    ///
    /// # Errors
    /// [`PackageError::Model`], [`PackageError::Metadata`], [`PackageError::NoManifest`].
    pub fn read(directory: &Path) -> Result<Self, PackageError> {
        let path = directory.join(METADATA_FILE);
        let text = read_bounded(&path, MAX_METADATA_BYTES)?;
        let bad = |field: &str, reason: String| PackageError::Metadata {
            path: path.clone(),
            field: field.to_owned(),
            reason,
        };
        let text: Text = serde_json::from_slice(&text).map_err(|error| bad("contents", error.to_string()))?;
        let family = Family::ALL.into_iter().find(|family| family.format() == text.format);
        let Some(family) = family else {
            let known = Family::ALL.map(Family::format).join(", ");
            return Err(bad("format", format!("wanted one of {known}, found {:?}", text.format)));
        };
        if let Some(other) = text.model_family.as_deref().filter(|&name| name != family.name()) {
            return Err(bad("model_family", format!("wanted {} for this format, found {other:?}", family.name())));
        }
        let shape = Shape {
            hidden_size: text.hidden_size,
            intermediate_size: text.intermediate_size,
            heads: text.attention_heads,
            kv_heads: text.kv_heads,
            layers: text.layers,
            vocab_size: text.vocab_size,
        };
        if text.head_dim != HEAD_DIM || !shape.is_sound() {
            let reason =
                format!("heads of {} and sizes {shape:?} are no decoder of heads of {HEAD_DIM}", text.head_dim);
            return Err(bad("sizes", reason));
        }
        if let Some(found) = text.context_length.filter(|found| found.as_u64() != Some(u64::from(CONTEXT_POSITIONS))) {
            return Err(bad("context_length", format!("wanted {CONTEXT_POSITIONS}, found {found}")));
        }
        let number = |field: &str, value: Option<f64>, default: f64| match value.unwrap_or(default) as f32 {
            value if value.is_finite() && value > 0.0 => Ok(value),
            value => Err(bad(field, format!("wanted a positive number, found {value}"))),
        };
        let files = text.files.filter(|files| !files.is_empty()).ok_or(PackageError::NoManifest)?;
        for (name, entry) in &files {
            let hexadecimal = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
            if !is_plain_name(name) || name == METADATA_FILE {
                return Err(bad("files", format!("wanted plain names of files in the package, found {name:?}")));
            }
            if entry.sha256.len() != 64 || !entry.sha256.bytes().all(hexadecimal) {
                let found = &entry.sha256;
                return Err(bad("files", format!("{name}: wanted a SHA-256 of 64 lower-case digits, found {found:?}")));
            }
        }
        Ok(Self {
            family,
            shape,
            rope_theta: number("rope_theta", text.rope_theta, DEFAULT_ROPE_THETA)?,
            rms_norm_eps: number("rms_norm_eps", text.rms_norm_eps, f64::from(family.norm_epsilon()))?,
            model_id: text.model_id,
            source_model: text.source_model,
            source_revision: text.source_revision,
            display_name: text.display_name,
            tensors: text.tensors,
            files,
        })
    }
}
