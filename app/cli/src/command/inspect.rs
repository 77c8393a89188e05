//! `npuhal inspect`: what a model file or directory holds, without loading it.

use crate::Host;
use crate::args::InspectArgs;
use crate::command::inspect_package::inspect_package;
use crate::error::CliError;
use crate::session::locate;
use crate::terminal::{bytes_text, say};
use npuhal_models::gguf::GgufFile;
use npuhal_models::package::is_package;
use npuhal_models::q4nx::Q4nxFile;
use npuhal_models::q4nx::directory::MODEL_FILE;
use npuhal_models::q4nx::stamp::{Stamp, StampState};
use npuhal_models::summary::{Amount, ModelSummary};
use npuhal_models::template::ChatTemplate;
use npuhal_models::vocabulary::{TokenKind, Vocabulary};
use npuhal_models::{ModelConfig, ModelSource};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Context lengths whose KV cache is shown, as far as the model reaches.
const CONTEXTS: [usize; 5] = [512, 2048, 8192, 32_768, 131_072];
/// The CPU keeps keys and values as f16.
const KV_ELEMENT_BYTES: usize = 2;

pub(crate) fn inspect(host: &Host, args: &InspectArgs) -> Result<(), CliError> {
    let path = locate(host, &args.model)?;
    if path.is_dir() {
        return directory(host, &path, args);
    }
    let file = GgufFile::open(&path)?;
    // Where the header is sound, what is in it helps to see why the model cannot be run.
    let (mut report, problem) = match file.model() {
        Ok(model) => (model_report(&file, &model), None),
        Err(error) => (file_report(&file), Some(error)),
    };
    if args.all {
        extend(&mut report, contents(&file));
    }
    say(&render(&report, args.json))?;
    problem.map_or(Ok(()), |error| Err(error.into()))
}

/// A Q4NX directory, or an xdna1 package.
fn directory(host: &Host, path: &Path, args: &InspectArgs) -> Result<(), CliError> {
    if is_package(path) {
        return inspect_package(host, path, args, render);
    }
    let file = Q4nxFile::open(&path.join(MODEL_FILE))?;
    let mut report = directory_report(path, &file);
    let model = ModelSource::open(path);
    if let Ok(model) = &model {
        extend(&mut report, model_parts(model).map(|(name, part)| (name.to_owned(), part)));
    }
    if args.all {
        let tensors: Map<String, Value> = file
            .tensors()
            .iter()
            .map(|entry| {
                let kind = entry.tiles().map_or_else(|_| String::new(), |(kind, _)| format!(", {}", kind.name()));
                (entry.name().to_owned(), Value::String(format!("{} {:?}{kind}", entry.dtype(), entry.shape())))
            })
            .collect();
        extend(&mut report, [("tensor_list".to_owned(), Value::Object(tensors))]);
    }
    say(&render(&report, args.json))?;
    // What is in the file helps to see why the model cannot be run.
    model.map(drop).map_err(CliError::from)
}

fn directory_report(path: &Path, file: &Q4nxFile) -> Value {
    let metadata: Map<String, Value> =
        file.metadata().iter().map(|(key, value)| (key.clone(), Value::String(value.clone()))).collect();
    json!({
        "directory": path.to_string_lossy(),
        "size": bytes_text(file.map().len() as u64),
        "format": "Q4NX",
        "tensors": file.tensors().len(),
        "metadata": metadata,
        "provenance": provenance(path),
        "kernels": if path.join("npu").is_dir() { "npu/" } else { "none" },
    })
}

/// Who made the directory. One that this program did not make is used as it is, unchecked.
fn provenance(path: &Path) -> Value {
    match Stamp::look(path) {
        StampState::Found(stamp) => json!({
            "made_by": format!("{} {}, layout {}", stamp.converter, stamp.converter_version, stamp.layout),
            "source": stamp.source,
            "source_size": bytes_text(stamp.source_state.size_bytes),
            "source_sha256": stamp.source_sha256.to_string(),
            "note": stamp.foreign().unwrap_or_else(|| "of this version".to_owned()),
        }),
        StampState::Missing => json!("no stamp: a foreign directory, trusted as published"),
        StampState::Damaged { reason } => json!(format!("damaged stamp ({reason}): trusted as published")),
        StampState::Unreadable { reason } => json!(format!("unreadable stamp ({reason}): trusted as published")),
        _ => json!("unknown: trusted as published"),
    }
}

fn file_report(file: &GgufFile) -> Value {
    json!({
        "file": file.path().to_string_lossy(),
        "size": bytes_text(file.len_bytes()),
        "format": format!("GGUF version {}", file.version()),
        "tensors": file.tensors().len(),
        "metadata_keys": file.metadata().count(),
    })
}

fn model_report(file: &GgufFile, model: &ModelSource) -> Value {
    let mut report = file_report(file);
    extend(&mut report, model_parts(model).map(|(name, part)| (name.to_owned(), part)));
    report
}

/// What is known of a model whatever its file.
fn model_parts(model: &ModelSource) -> [(&'static str, Value); 7] {
    let config = model.config();
    let summary = model.summary();
    let rows = summary.types.iter().map(|(kind, amount)| (kind.to_string(), amount));
    let tiles = summary.tiles.iter().map(|(kind, amount)| (kind.name().to_owned(), amount));
    [
        ("architecture", architecture(config)),
        ("parameters", parameters(&summary)),
        ("types", amounts(rows.chain(tiles))),
        ("decode", json!({ "weights_read_for_a_token": bytes_text(summary.decode_bytes) })),
        ("kv_cache_f16", kv_cache(config)),
        ("tokenizer", tokenizer(model.vocabulary())),
        ("template", template(model.vocabulary())),
    ]
}

/// Puts further entries behind those of an object.
fn extend(report: &mut Value, parts: impl IntoIterator<Item = (String, Value)>) {
    if let Some(object) = report.as_object_mut() {
        object.extend(parts);
    }
}

fn architecture(config: &ModelConfig) -> Value {
    json!({
        "model_type": config.model_type,
        "name": config.name,
        "hidden_size": config.hidden_size,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "rms_norm_eps": short(config.rms_norm_eps),
        "rope_theta": short(config.rope.theta),
        "rope_dims": config.rope.dims,
        "rope_scaling": format!("{:?}", config.rope.scaling).to_lowercase(),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "tied_head": config.tied_head,
    })
}

/// The shortest number that is this f32.
fn short(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn parameters(summary: &ModelSummary) -> Value {
    let total = [("total".to_owned(), &summary.total)];
    amounts(total.into_iter().chain(summary.groups.iter().map(|(group, amount)| (group.to_string(), amount))))
}

fn amounts<'a>(named: impl Iterator<Item = (String, &'a Amount)>) -> Value {
    let text = |amount: &Amount| {
        let millions = amount.parameters as f64 / 1e6;
        let bits = amount.bytes as f64 * 8.0 / amount.parameters.max(1) as f64;
        format!("{millions:.2} M in {} tensors, {} ({bits:.2} bits each)", amount.tensors, bytes_text(amount.bytes))
    };
    Value::Object(named.map(|(name, amount)| (name, Value::String(text(amount)))).collect())
}

fn kv_cache(config: &ModelConfig) -> Value {
    let lengths = CONTEXTS.into_iter().filter(|&length| length < config.context_length);
    let lengths = lengths.chain([config.context_length]);
    let text = |length| bytes_text(config.kv_bytes(length, KV_ELEMENT_BYTES));
    Value::Object(lengths.map(|length| (format!("at_{length}"), Value::String(text(length)))).collect())
}

fn tokenizer(vocabulary: &Vocabulary) -> Value {
    let count = |kind| vocabulary.kinds.iter().filter(|&&other| other == kind).count();
    let named = |id: u32| {
        let text = vocabulary.tokens.get(id as usize).map_or("?", String::as_str);
        format!("{text} ({id})")
    };
    json!({
        "model": vocabulary.model,
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "tokens": vocabulary.tokens.len(),
        "merges": vocabulary.merges.len(),
        "control_tokens": count(TokenKind::Control),
        "user_defined_tokens": count(TokenKind::UserDefined),
        "bos": vocabulary.bos.map(named),
        "add_bos": vocabulary.add_bos,
        "end_of_generation": vocabulary.eos.iter().map(|&id| named(id)).collect::<Vec<_>>(),
    })
}

fn template(vocabulary: &Vocabulary) -> Value {
    match ChatTemplate::from_vocabulary(vocabulary) {
        Ok(template) => json!({
            "source": template.source().to_string(),
            "characters": vocabulary.chat_template.as_ref().map_or(0, |text| text.chars().count()),
        }),
        Err(error) => json!({ "problem": error.to_string() }),
    }
}

/// Every metadata key and every tensor.
fn contents(file: &GgufFile) -> [(String, Value); 2] {
    let metadata: Map<String, Value> =
        file.metadata().map(|(key, value)| (key.to_owned(), Value::String(value.describe()))).collect();
    let tensors: Map<String, Value> = file
        .tensors()
        .iter()
        .map(|info| {
            let dims = info.dims().iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
            (info.name().to_owned(), Value::String(format!("{} {dims}", info.ggml_type())))
        })
        .collect();
    [("metadata".to_owned(), metadata.into()), ("tensor_list".to_owned(), tensors.into())]
}

fn render(report: &Value, as_json: bool) -> String {
    if as_json { format!("{report:#}\n") } else { text(report, 0) }
}

/// An object as indented lines, names in front.
fn text(value: &Value, indent: usize) -> String {
    let Some(object) = value.as_object() else { return String::new() };
    let width = object.iter().filter(|(_, value)| !value.is_object()).map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut lines = String::new();
    for (name, value) in object {
        match value {
            Value::Object(_) => lines.push_str(&format!("{:indent$}{name}\n{}", "", text(value, indent + 2))),
            _ => lines.push_str(&format!("{:indent$}{name:width$}  {}\n", "", plain(value))),
        }
    }
    lines
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}
