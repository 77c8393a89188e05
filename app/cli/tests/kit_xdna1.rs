//! `npuhal kit xdna1`, as a user calls it.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A package as far as the command looks at it.
fn package(folder: &Path, hidden: u32, format: &str) -> PathBuf {
    let path = folder.join("package");
    fs::create_dir_all(&path).unwrap();
    let metadata = json!({
        "format": format, "hidden_size": hidden, "intermediate_size": 1536, "attention_heads": hidden / 64, "kv_heads": 3,
        "head_dim": 64, "layers": 30, "vocab_size": 49152, "context_length": 64, "tensors": {},
        "files": { "a.bin": { "sha256": "0".repeat(64), "size": 0 } },
    });
    fs::write(path.join("metadata.json"), metadata.to_string()).unwrap();
    path
}

fn kit(package: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal"));
    command.args(["kit", "xdna1", "--model"]).arg(package).args(more).output().unwrap()
}

fn said(output: &Output, code: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

fn manifest(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("kit.json")).unwrap()).unwrap()
}

#[test]
fn a_package_gets_its_kit() {
    let folder = TempDir::new().unwrap();
    let package = package(folder.path(), 576, "xdna1-smollm2-w8a16-v1");
    let text = said(&kit(&package, &[]), 0);
    assert!(text.contains("smollm-engine, smollm-chunk-2, smollm-chunk-1, "), "{text}");
    assert!(text.contains("of the virtual NPU for 30 layers of llama"), "{text}");
    let npu = package.join("npu");
    let manifest = self::manifest(&npu);
    for kernel in manifest["kernels"].as_array().unwrap() {
        for (file, digest) in [(&kernel["xclbin"], "xclbin"), (&kernel["instructions"], "instructions")] {
            let bytes = fs::read(npu.join(file.as_str().unwrap())).unwrap();
            let found: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(kernel["sha256"][digest], found);
        }
    }
    // Nothing but the kit is left, and it can be written again.
    assert_eq!(fs::read_dir(&npu).unwrap().count(), 2 * 6 + 1);
    said(&kit(&package, &[]), 0);

    let out = folder.path().join("other");
    said(&kit(&package, &["--design", "smollm-engine", "--out", out.to_str().unwrap()]), 0);
    let kernels = self::manifest(&out)["kernels"].clone();
    assert_eq!((kernels.as_array().unwrap().len(), &kernels[0]["layers"]), (1, &json!(30)));
}

#[test]
fn what_cannot_be_is_told() {
    let folder = TempDir::new().unwrap();
    let package = self::package(folder.path(), 576, "xdna1-smollm2-w8a16-v1");
    let text = said(&kit(&package, &["--design", "qwen-engine"]), 2);
    assert!(text.contains("qwen-engine: the model has hidden size 576"), "{text}");
    let text = said(&kit(&package, &["--design", "engine"]), 2);
    assert!(text.contains("no design 'engine'"), "{text}");
    assert!(!package.join("npu").exists());
    // A compiled kit stays.
    fs::create_dir(package.join("npu")).unwrap();
    fs::write(package.join("npu/kit.json"), r#"{"origin": "imported"}"#).unwrap();
    let text = said(&kit(&package, &[]), 2);
    assert!(text.contains("not one of the virtual NPU") && text.contains("--force"), "{text}");
    assert_eq!(manifest(&package.join("npu")), json!({ "origin": "imported" }));
    said(&kit(&package, &["--force"]), 0);
    let other = self::package(&folder.path().join("wide"), 960, "xdna1-smollm2-w8a16-v1");
    let text = said(&kit(&other, &[]), 2);
    assert!(text.contains("no design computes a model of hidden size 960"), "{text}");
    said(&kit(folder.path(), &[]), 1);
    // What cannot be written was told as "reading the input".
    let text = said(&kit(&package, &["--out", "/proc/kernels"]), 1);
    assert!(text.starts_with("npuhal: /proc/kernels: "), "{text}");
}
