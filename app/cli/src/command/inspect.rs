//! `npuhal inspect`: what a model file or directory holds, without loading it.

use crate::Host;
use crate::args::{InspectArgs, ReportFormat};
use crate::command::inspect_package::inspect_package;
use crate::command::routes::outcome;
use crate::error::CliError;
use crate::kernels::KernelState;
use crate::output::write;
use crate::session::{locate, registry};
use crate::terminal::bytes_text;
use npuhal_cpu::kv::cache_bytes;
use npuhal_models::gguf::GgufFile;
use npuhal_models::hub_model;
use npuhal_models::package::is_package;
use npuhal_models::q4nx::Q4nxFile;
use npuhal_models::q4nx::directory::{KERNELS, MODEL_FILE};
use npuhal_models::q4nx::stamp::{Stamp, StampState};
use npuhal_models::store::{Presence, StoreError};
use npuhal_models::summary::{Amount, ModelSummary};
use npuhal_models::template::ChatTemplate;
use npuhal_models::vocabulary::{TokenKind, Vocabulary};
use npuhal_models::{Catalogue, ModelConfig, ModelSource, Store, Tensor};
use npuhal_registry::selection::RouteReport;
use npuhal_registry::{Request, select};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Context lengths whose KV cache is shown, as far as the model reaches.
const CONTEXTS: [usize; 5] = [512, 2048, 8192, 32_768, 131_072];

pub(crate) fn inspect(host: &Host, args: &InspectArgs) -> Result<(), CliError> {
    let path = locate(host, &args.model)?;
    if hub_model::is_model(&path) {
        return hub_directory(host, &path, args);
    }
    if path.is_dir() {
        return directory(host, &path, args);
    }
    let (integrity, is_wrong) = integrity(host, &path, args.verify_checksums)?;
    let file = GgufFile::open_whole(&path)?;
    // Where the header is sound, what is in it helps to see why the model cannot be run.
    let (mut report, problem) = match file.model() {
        Ok(model) => {
            let mut report = model_report(&file, &model);
            extend(&mut report, [("routes".to_owned(), routes(host, &model)?)]);
            (report, None)
        }
        Err(error) => (file_report(&file), Some(error)),
    };
    extend(&mut report, [("integrity".to_owned(), integrity)]);
    if args.all {
        extend(&mut report, contents(&file));
    }
    show(&report, args)?;
    match problem {
        Some(error) => Err(error.into()),
        None if is_wrong => Err(CliError::Verdict(2)),
        None => Ok(()),
    }
}

/// A Hugging Face directory.
fn hub_directory(host: &Host, path: &Path, args: &InspectArgs) -> Result<(), CliError> {
    let model = ModelSource::open(path)?;
    let mut report = json!({
        "directory": path.to_string_lossy(),
        "format": "Hugging Face directory",
        "tensors": model.tensors().count(),
    });
    extend(&mut report, model_parts(&model).map(|(name, part)| (name.to_owned(), part)));
    extend(&mut report, [("routes".to_owned(), routes(host, &model)?)]);
    let state =
        "every tensor lies within its file and has the shape that config.json states; there is no checksum to compare";
    extend(&mut report, [("integrity".to_owned(), json!({ "state": state }))]);
    if args.all {
        let shape = |tensor: &Tensor| format!("{} {} × {}", tensor.weight_type(), tensor.rows(), tensor.cols());
        let tensors = model.tensors().map(|(_, tensor)| (tensor.name().to_owned(), Value::String(shape(tensor))));
        extend(&mut report, [("tensor_list".to_owned(), Value::Object(tensors.collect()))]);
    }
    show(&report, args)
}

/// A Q4NX directory, or an xdna1 package.
fn directory(host: &Host, path: &Path, args: &InspectArgs) -> Result<(), CliError> {
    if is_package(path) {
        return inspect_package(host, path, args, show);
    }
    let file = Q4nxFile::open(&path.join(MODEL_FILE))?;
    let model = ModelSource::open(path);
    let mut report = directory_report(path, &file, model.as_ref().ok());
    if let Ok(model) = &model {
        extend(&mut report, model_parts(model).map(|(name, part)| (name.to_owned(), part)));
        extend(&mut report, [("routes".to_owned(), routes(host, model)?)]);
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
    show(&report, args)?;
    // What is in the file helps to see why the model cannot be run.
    model.map(drop).map_err(CliError::from)
}

fn directory_report(path: &Path, file: &Q4nxFile, model: Option<&ModelSource>) -> Value {
    let kernels = match model {
        Some(model) => KernelState::of(path, model).to_string(),
        None if path.join(KERNELS).is_dir() => "npu/".to_owned(),
        None => "none".to_owned(),
    };
    let metadata: Map<String, Value> =
        file.metadata().iter().map(|(key, value)| (key.clone(), Value::String(value.clone()))).collect();
    json!({
        "directory": path.to_string_lossy(),
        "size": bytes_text(file.map().len() as u64),
        "format": "Q4NX",
        "tensors": file.tensors().len(),
        "metadata": metadata,
        "provenance": provenance(path),
        "kernels": kernels,
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
    let len_bytes = file.part_maps().iter().map(|part| part.len() as u64).sum();
    let files = if file.part_count() > 1 { format!(" in {} files", file.part_count()) } else { String::new() };
    json!({
        "file": file.path().to_string_lossy(),
        "size": format!("{}{files}", bytes_text(len_bytes)),
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
fn model_parts(model: &ModelSource) -> [(&'static str, Value); 8] {
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
        ("suggested_sampling", suggested_sampling(model)),
    ]
}

/// What `run` and `chat` do where no flag says otherwise.
fn suggested_sampling(model: &ModelSource) -> Value {
    let Some(suggested) = model.suggested_sampling() else { return Value::Null };
    json!({ "followed": suggested.to_string(), "left_out": suggested.left_out })
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
        "attention_window": attention_window(config),
    })
}

/// The widest window, and how many layers have one.
fn attention_window(config: &ModelConfig) -> Option<String> {
    let windows: Vec<u32> = config.features.layers.iter().filter_map(|layer| layer.window).collect();
    let widest = windows.iter().max()?;
    Some(format!("{widest} positions in {} of {} layers", windows.len(), config.layers))
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
    let text = |length| bytes_text(cache_bytes(config, 0..config.layers, length));
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

/// Prints the report, or writes it to a file, in the form that was asked for.
fn show(report: &Value, args: &InspectArgs) -> Result<(), CliError> {
    let form = if args.json { ReportFormat::Json } else { args.format };
    let text = match form {
        ReportFormat::Json => format!("{report:#}\n"),
        ReportFormat::Text => text(report, 0),
        ReportFormat::Markdown => markdown(report),
    };
    write(&text, args.output.as_deref())
}

/// Which routes run the model here, and why the others do not.
fn routes(host: &Host, model: &ModelSource) -> Result<Value, CliError> {
    let registry = registry(host)?;
    let decision = match select(&registry, model, &Request::default()) {
        Ok(choice) => choice.decision,
        Err(error) => *error.decision,
    };
    let line = |report: &RouteReport| {
        let (state, reason, service) = outcome(&report.outcome);
        let mut line = state.to_owned();
        line.extend(reason.map(|reason| format!(": {reason}")));
        if let Some(service) = service {
            line.push_str(&format!(", on {}, {} positions", service.device, service.window));
            line.extend(service.memory_bytes.map(|bytes| format!(", {} with a full KV cache", bytes_text(bytes))));
        }
        (report.name.clone(), Value::String(line))
    };
    Ok(Value::Object(decision.routes.iter().map(line).collect()))
}

/// What is known of the file's bytes, and whether they are wrong. One of the catalogue has a stated size and checksum.
fn integrity(host: &Host, path: &Path, verify: bool) -> Result<(Value, bool), CliError> {
    let store = Store::locate(host.global.models_dir.as_deref())?;
    let entry = Catalogue::builtin().entries().iter().find(|entry| store.path_of(entry) == path);
    let Some(entry) = entry else {
        let state =
            "every tensor lies within the file; it is none of the catalogue, so there is no checksum to compare";
        return Ok((json!({ "state": state }), false));
    };
    let stated =
        json!({ "catalogue": entry.name, "size": bytes_text(entry.size_bytes), "sha256": entry.sha256.to_string() });
    let (state, is_wrong) = if verify {
        let bar = host.voice.bar(entry.size_bytes, &entry.name);
        let verified = store.verify(entry, &host.control, &mut |bytes| bar.set_position(bytes));
        bar.finish_and_clear();
        match verified {
            Ok(()) => ("the checksum is right".to_owned(), false),
            Err(error @ (StoreError::WrongSize { .. } | StoreError::WrongChecksum { .. })) => (error.to_string(), true),
            Err(error) => return Err(error.into()),
        }
    } else {
        match store.presence(entry) {
            Presence::Verified => ("the checksum was right when it was last read".to_owned(), false),
            Presence::WrongSize { found_bytes } => (format!("wrong: it has {found_bytes} bytes"), true),
            _ => ("the size is right; --verify-checksums reads it".to_owned(), false),
        }
    };
    let mut integrity = json!({ "state": state });
    extend(&mut integrity, stated.as_object().cloned().unwrap_or_default());
    Ok((integrity, is_wrong))
}

/// An object as a document: plain entries in a table, each object in one of its own.
fn markdown(report: &Value) -> String {
    let Some(object) = report.as_object() else { return String::new() };
    let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    let table = |entries: Vec<(&String, &Value)>| {
        let mut lines = String::from("| | |\n|---|---|\n");
        for (name, value) in entries {
            lines.push_str(&format!("| {} | {} |\n", cell(name), cell(&plain(value))));
        }
        lines
    };
    let (parts, plain_entries): (Vec<_>, Vec<_>) = object.iter().partition(|(_, value)| value.is_object());
    let mut text = format!("# Model\n\n{}", table(plain_entries));
    for (name, part) in parts {
        let entries = part.as_object().into_iter().flatten().collect();
        text.push_str(&format!("\n## {}\n\n{}", name.replace('_', " "), table(entries)));
    }
    text
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
