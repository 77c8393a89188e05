//! `npuhal inspect` of an xdna1 package: sizes, what it asks of the hardware, whether its files are whole, its kit.
//!
//! The formulas are those of the public repository's inspect tool. Its bandwidth counts one byte a layer weight, as its int8
//! graphs stream; the engines stream bf16.

use crate::Host;
use crate::args::InspectArgs;
use crate::error::CliError;
use npuhal_models::package::{CONTEXT_POSITIONS, HEAD_DIM, METADATA_FILE};
use npuhal_xdna1::kit::{KIT_FOLDER, Kit, KitError};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Largest `metadata.json` that is read.
const MAX_METADATA_BYTES: u64 = 16 << 20;
/// Tokens a second that the bandwidth is stated for.
const TOKENS_PER_SECOND: f64 = 75.0;
const MIB: f64 = (1 << 20) as f64;

/// Prints the report. Exit code 2 where the package is not whole; unusable input is an error, exit code 1.
pub(crate) fn inspect_package(
    host: &Host,
    path: &Path,
    args: &InspectArgs,
    show: impl Fn(&Value, &InspectArgs) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let report = report(host, path, args.verify_checksums)?;
    show(&report, args)?;
    if report["integrity"]["valid"] == json!(true) { Ok(()) } else { Err(CliError::Verdict(2)) }
}

fn report(host: &Host, path: &Path, verify: bool) -> Result<Value, CliError> {
    let metadata = read_metadata(path)?;
    let unusable = |field: &str| {
        CliError::Unusable(format!("{}: {field} is no positive number", path.join(METADATA_FILE).display()))
    };
    let size = |field: &str| {
        let size = metadata.get(field).and_then(Value::as_u64).filter(|size| (1..=1 << 24).contains(size));
        size.ok_or_else(|| unusable(field))
    };
    let sizes = Sizes {
        hidden: size("hidden_size")?,
        intermediate: size("intermediate_size")?,
        heads: size("attention_heads")?,
        kv_heads: size("kv_heads")?,
        layers: size("layers")?,
        vocab: size("vocab_size")?,
        context: metadata.get("context_length").and_then(Value::as_u64).unwrap_or(u64::from(CONTEXT_POSITIONS)),
    };
    let text = |field: &str| metadata.get(field).and_then(Value::as_str).unwrap_or_default();
    Ok(json!({
        "model_id": text("model_id"),
        "model_dir": path.to_string_lossy(),
        "model_family": text("model_family"),
        "format": text("format"),
        "source_model": text("source_model"),
        "context_length": sizes.context,
        "architecture": {
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "attention_heads": sizes.heads,
            "kv_heads": sizes.kv_heads,
            "head_dim": HEAD_DIM,
            "layers": sizes.layers,
            "vocab_size": sizes.vocab,
        },
        "parameter_metrics": sizes.parameters(text("format").contains("w8")),
        "hardware_demands": sizes.demands(text("format").contains("w8")),
        "integrity": integrity(host, path, &metadata, verify)?,
        "kit": kit(path),
    }))
}

fn read_metadata(path: &Path) -> Result<Map<String, Value>, CliError> {
    let file = path.join(METADATA_FILE);
    let mut bytes = Vec::new();
    File::open(&file)
        .and_then(|open| open.take(MAX_METADATA_BYTES).read_to_end(&mut bytes))
        .map_err(|source| CliError::File { path: file.clone(), source })?;
    let unusable = |reason: String| CliError::Unusable(format!("{}: {reason}", file.display()));
    match serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))? {
        Value::Object(metadata) => Ok(metadata),
        _ => Err(unusable("wanted a JSON object".to_owned())),
    }
}

/// Sizes of the decoder.
struct Sizes {
    hidden: u64,
    intermediate: u64,
    heads: u64,
    kv_heads: u64,
    layers: u64,
    vocab: u64,
    context: u64,
}

impl Sizes {
    fn embedding(&self) -> u64 {
        self.vocab * self.hidden
    }

    fn attention(&self) -> u64 {
        2 * self.hidden * (self.heads + self.kv_heads) * HEAD_DIM as u64
    }

    fn mlp(&self) -> u64 {
        3 * self.hidden * self.intermediate
    }

    fn all_layers(&self) -> u64 {
        self.layers * (self.attention() + self.mlp() + 2 * self.hidden)
    }

    /// Embedding and head as two bytes a weight, layers as one where the format says so.
    fn weight_bytes(&self, is_w8: bool) -> u64 {
        4 * self.embedding() + self.all_layers() * if is_w8 { 1 } else { 2 } + 2 * self.hidden
    }

    fn parameters(&self, is_w8: bool) -> Value {
        let total = 2 * self.embedding() + self.all_layers() + self.hidden;
        let bytes = self.weight_bytes(is_w8);
        json!({
            "embedding_parameters": self.embedding(),
            "per_layer_attention_parameters": self.attention(),
            "per_layer_mlp_parameters": self.mlp(),
            "all_layers_parameters": self.all_layers(),
            "lm_head_parameters": self.embedding(),
            "total_parameters": total,
            "total_parameters_millions": hundredths(total as f64 / 1e6),
            "estimated_weights_bytes": bytes,
            "estimated_weights_mib": hundredths(bytes as f64 / MIB),
        })
    }

    fn demands(&self, is_w8: bool) -> Value {
        let bytes = self.weight_bytes(is_w8) as f64;
        let kv_bytes = 2 * self.layers * self.kv_heads * HEAD_DIM as u64 * self.context * 2;
        let is_supported = self.context <= u64::from(CONTEXT_POSITIONS) && self.hidden.is_multiple_of(HEAD_DIM as u64);
        json!({
            "kv_cache_kib": kv_bytes as f64 / 1024.0,
            "weights_size_mib": hundredths(bytes / MIB),
            "streaming_bandwidth_gbps_at_75_tps": hundredths(bytes * TOKENS_PER_SECOND / f64::from(1 << 30)),
            "xdna1_supported": is_supported,
        })
    }
}

/// Rounded for people.
fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// The manifest against the directory.
fn integrity(host: &Host, path: &Path, metadata: &Map<String, Value>, verify: bool) -> Result<Value, CliError> {
    let mut errors = Vec::new();
    let empty = Map::new();
    let files = match metadata.get("files") {
        Some(Value::Object(files)) if !files.is_empty() => files,
        Some(Value::Object(_)) => {
            errors.push("the manifest is empty".to_owned());
            &empty
        }
        Some(_) => {
            errors.push("the manifest is not an object".to_owned());
            &empty
        }
        None => {
            errors.push("there is no manifest".to_owned());
            &empty
        }
    };
    if !files.is_empty() && !files.keys().any(|name| name.ends_with(".bin")) {
        errors.push("the manifest lists no .bin file".to_owned());
    }
    let (mut missing, mut sizes, mut checksums, mut verified) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let total: u64 = files.values().filter_map(|entry| entry.get("size")?.as_u64()).fold(0, u64::saturating_add);
    let bar = verify.then(|| host.voice.bar(total, "verifying"));
    for (name, entry) in files {
        let (size, sha256) = match entry_of(name, entry) {
            Ok(entry) => entry,
            Err(reason) => {
                errors.push(format!("{name}: {reason}"));
                continue;
            }
        };
        match std::fs::metadata(path.join(name)) {
            Ok(found) if found.is_file() && found.len() == size => {
                if verify
                    && hash(host, &path.join(name), &mut |bytes| bar.iter().for_each(|bar| bar.inc(bytes)))? != sha256
                {
                    checksums.push(name.clone());
                } else {
                    verified += 1;
                }
            }
            Ok(found) if found.is_file() => sizes.push(name.clone()),
            _ => missing.push(name.clone()),
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let valid = errors.is_empty() && missing.is_empty() && sizes.is_empty() && checksums.is_empty();
    Ok(json!({
        "valid": valid,
        "inventory_errors": errors,
        "total_manifest_files": files.len(),
        "verified_files_count": verified,
        "checksums_verified": verify,
        "missing_files": missing,
        "size_mismatches": sizes,
        "checksum_failures": checksums,
        "tokenizer_present": path.join("tokenizer.json").is_file(),
    }))
}

fn entry_of<'v>(name: &str, entry: &'v Value) -> Result<(u64, &'v str), &'static str> {
    let entry = entry.as_object().ok_or("the entry is not an object")?;
    if name.is_empty() || Path::new(name).components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        return Err("the path leaves the directory");
    }
    let size = entry.get("size").and_then(Value::as_u64).ok_or("the size is not a non-negative whole number")?;
    let is_digest = |text: &&str| {
        text.len() == 64 && text.bytes().all(|digit| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit))
    };
    let sha256 = entry.get("sha256").and_then(Value::as_str).filter(is_digest);
    Ok((size, sha256.ok_or("the hash is not 64 lower-case hexadecimal digits")?))
}

/// SHA-256 of a file; an interrupt stops it.
fn hash(host: &Host, path: &Path, step: &mut dyn FnMut(u64)) -> Result<String, CliError> {
    let failed = |source| CliError::File { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(failed)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        host.control.check()?;
        let len = file.read(&mut buffer).map_err(failed)?;
        if len == 0 {
            return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        hash.update(&buffer[..len]);
        step(len as u64);
    }
}

/// What the package's own kit holds.
fn kit(path: &Path) -> Value {
    match Kit::read(&path.join(KIT_FOLDER)) {
        Ok(kit) => {
            let kernels = kit.manifest().kernels.iter();
            let kernels: Vec<String> =
                kernels.map(|kernel| format!("{} ({} layers)", kernel.design, kernel.layers)).collect();
            let origin = serde_json::to_value(kit.manifest().origin).unwrap_or_default();
            json!({ "origin": origin, "kernels": kernels, "toolchain": kit.manifest().toolchain })
        }
        Err(KitError::Missing { .. }) => json!("none"),
        Err(error) => json!(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(hidden: u64, intermediate: u64, heads: u64, kv_heads: u64, layers: u64, vocab: u64) -> Sizes {
        Sizes { hidden, intermediate, heads, kv_heads, layers, vocab, context: 64 }
    }

    #[test]
    fn the_published_models_have_the_published_figures() {
        for (sizes, millions, mib, kib, bandwidth) in [
            (sizes(576, 1536, 9, 3, 30, 49_152), 162.83, 209.28, 1440.0, 15.33),
            (sizes(896, 4864, 14, 2, 24, 151_936), 630.14, 860.61, 768.0, 63.03),
        ] {
            let (parameters, demands) = (sizes.parameters(true), sizes.demands(true));
            assert_eq!(parameters["total_parameters_millions"], json!(millions));
            assert_eq!(parameters["estimated_weights_mib"], json!(mib));
            assert_eq!(demands["kv_cache_kib"], json!(kib));
            assert_eq!(demands["streaming_bandwidth_gbps_at_75_tps"], json!(bandwidth));
            assert_eq!(demands["xdna1_supported"], json!(true));
        }
    }

    #[test]
    fn entries_of_the_manifest_are_checked() {
        let good = json!({ "size": 3, "sha256": "a".repeat(64) });
        assert!(entry_of("a.bin", &good).is_ok());
        assert!(entry_of("../a.bin", &good).is_err() && entry_of("/a.bin", &good).is_err());
        assert!(entry_of("a", &json!(3)).is_err());
        assert!(entry_of("a", &json!({ "size": -1, "sha256": "a".repeat(64) })).is_err());
        assert!(entry_of("a", &json!({ "size": 1, "sha256": "A".repeat(64) })).is_err());
    }
}
