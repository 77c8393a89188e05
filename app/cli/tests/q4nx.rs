//! `pack`, `verify` and `inspect` of Q4NX directories, as a user calls them.

use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

struct Scene {
    folder: TempDir,
    gguf: PathBuf,
    out: PathBuf,
}

impl Scene {
    fn new(architecture: Architecture) -> Self {
        let mut spec = ModelSpec::small(architecture, Weights::LikeQ4KM);
        (spec.heads, spec.kv_heads, spec.head_dim, spec.spare_tokens) = (2, 1, 128, 512 - 266);
        let folder = tempfile::tempdir().unwrap();
        let (gguf, out) = (folder.path().join("model.gguf"), folder.path().join("packed"));
        spec.build().write(&gguf).unwrap();
        Self { folder, gguf, out }
    }

    /// Runs the program; code, stdout, stderr.
    fn run(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal"));
        let Output { status, stdout, stderr } =
            command.args(args).env("NPUHAL_MODELS", self.folder.path()).stdin(Stdio::null()).output().unwrap();
        (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    }

    fn gguf(&self) -> &str {
        self.gguf.to_str().unwrap()
    }

    fn out(&self) -> &str {
        self.out.to_str().unwrap()
    }
}

fn flip_a_code(directory: &Path) {
    let path = directory.join("model.q4nx");
    let mut bytes = fs::read(&path).unwrap();
    // The head's tiles come last; the last byte is two codes.
    *bytes.last_mut().unwrap() ^= 0x88;
    fs::write(&path, bytes).unwrap();
}

#[test]
fn a_model_is_packed_verified_and_looked_at() {
    let scene = Scene::new(Architecture::Qwen3);
    let (code, stdout, stderr) = scene.run(&["pack", scene.gguf(), scene.out()]);
    assert_eq!((code, stdout.as_str()), (Some(0), ""), "{stderr}");
    assert!(stderr.contains("25 tensors") && stderr.lines().count() == 1, "{stderr}");

    let (code, stdout, stderr) = scene.run(&["verify", scene.gguf(), scene.out()]);
    assert_eq!((code, stdout.lines().last()), (Some(0), Some("25/25 tensors ok")), "{stdout}{stderr}");
    // Layer 0 and what is in no layer.
    assert_eq!(stdout.lines().count(), 11 + 3 + 1, "{stdout}");
    assert!(stdout.contains("model.layers.0.mlp.up_proj.weight  Q4_K  exact, 0 over"), "{stdout}");
    assert!(stdout.contains("Q6_K  requantized, cosine 0.99"), "{stdout}");
    let (code, stdout, _) = scene.run(&["verify", "--all", scene.gguf(), scene.out()]);
    assert_eq!((code, stdout.lines().count()), (Some(0), 25 + 1), "{stdout}");

    let (code, stdout, stderr) = scene.run(&["inspect", scene.out()]);
    assert_eq!(code, Some(0), "{stderr}");
    for wanted in ["Q4NX", "q4_1 tiles", "made_by", "source_sha256", "qwen3", "BF16"] {
        assert!(stdout.contains(wanted), "{wanted}: {stdout}");
    }
    let (code, stdout, _) = scene.run(&["inspect", "--json", scene.out()]);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &report["architecture"]["hidden_size"]), (Some(0), &Value::from(256)));
    assert_eq!(report["tokenizer"]["tokens"], 512);
    let (_, stdout, _) = scene.run(&["inspect", "--all", scene.out()]);
    assert!(stdout.contains("I8 [16, 5120], q4_1 tiles"), "{stdout}");

    flip_a_code(&scene.out);
    let (code, stdout, stderr) = scene.run(&["verify", scene.gguf(), scene.out()]);
    assert_eq!((code, stdout.lines().last()), (Some(1), Some("24/25 tensors ok")));
    assert!(stdout.lines().any(|line| line.starts_with("BAD  lm_head.weight")), "{stdout}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");

    let (code, _, stderr) = scene.run(&["pack", scene.gguf(), scene.out()]);
    assert!(code == Some(1) && stderr.contains("--force"), "{stderr}");
    let (code, _, stderr) = scene.run(&["pack", "--force", scene.gguf(), scene.out()]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(scene.run(&["verify", "-q", scene.gguf(), scene.out()]).0, Some(0));
}

#[test]
fn a_foreign_directory_is_trusted_as_published_and_inspect_says_so() {
    let scene = Scene::new(Architecture::Qwen3);
    assert_eq!(scene.run(&["pack", scene.gguf(), scene.out()]).0, Some(0));
    fs::remove_file(scene.out.join("pack-stamp.txt")).unwrap();
    let (code, stdout, _) = scene.run(&["inspect", scene.out()]);
    assert!(code == Some(0) && stdout.contains("trusted as published"), "{stdout}");
    // A directory of another model: what is in the file, then one line.
    let config = scene.out.join("config.json");
    let text = fs::read_to_string(&config).unwrap().replace("\"qwen3\"", "\"gemma3\"");
    fs::write(&config, text).unwrap();
    let (code, stdout, stderr) = scene.run(&["inspect", scene.out()]);
    assert!(code == Some(1) && stdout.contains("Q4NX"), "{stdout}");
    assert!(stderr.contains("model_type 'gemma3'") && stderr.lines().count() == 1, "{stderr}");
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let scene = Scene::new(Architecture::Llama);
    let (code, _, stderr) = scene.run(&["pack", scene.gguf(), scene.out()]);
    assert!(code == Some(1) && stderr.contains("architecture 'llama'"), "{stderr}");
    assert!(!scene.out.exists());
    let (code, _, stderr) = scene.run(&["verify", scene.gguf(), scene.out()]);
    assert_eq!((code, stderr.lines().count()), (Some(1), 1), "{stderr}");

    let scene = Scene::new(Architecture::Qwen2);
    assert_eq!(scene.run(&["pack", "-q", "-t", "1", scene.gguf(), scene.out()]).0, Some(0));
    let (code, _, stderr) = scene.run(&["run", "--device", "cpu", "-m", scene.out(), "hello"]);
    assert!(code == Some(1) && stderr.contains("q4_1 tiles"), "{stderr}");
    fs::write(scene.out.join("model.q4nx"), b"short").unwrap();
    for args in [["inspect", scene.out()].as_slice(), &["run", "-m", scene.out(), "hello"]] {
        let (code, _, stderr) = scene.run(args);
        assert!(code == Some(1) && stderr.contains("truncated") && stderr.lines().count() == 1, "{stderr}");
    }
}
