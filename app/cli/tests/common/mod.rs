//! The shipped binary, away from the user's own models and add-ons.

#![allow(clippy::print_stdout, reason = "a test that is left out says so")]
#![allow(dead_code, reason = "each test uses its part")]

pub(crate) mod server;

use npuhal_models::WeightType;
use npuhal_models::package::Family;
use npuhal_tests::kit::gguf::{GgufFile, Value};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::package::SmallPackage;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const TOKENIZER: &[u8] = include_bytes!("../../../../models/tests/data/text/tiny_tokenizer/tokenizer.json");

/// A home of a user who has nothing yet.
pub(crate) struct Home(TempDir);

impl Home {
    pub(crate) fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        fs::set_permissions(home.path(), Permissions::from_mode(0o700)).unwrap();
        home
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// npuhal in this home, with `arguments`.
    pub(crate) fn npuhal(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal"));
        for name in ["NPUHAL_ADDONS", "NPUHAL_MODELS", "NPUHAL_LOG"] {
            command.env_remove(name);
        }
        command.env("XDG_DATA_HOME", self.path()).env("HOME", self.path()).stdin(Stdio::null()).args(arguments);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        Said::from(self.npuhal(arguments).output().expect("the binary starts"))
    }

    /// A small llama as SmolLM2 is: tied head, grouped queries.
    pub(crate) fn model(&self) -> PathBuf {
        self.write(&ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32)).build(), "model.gguf")
    }

    /// An xdna1 package of two layers in its models folder; its vocabulary is the small tokenizer's, and some rows.
    pub(crate) fn package(&self) -> PathBuf {
        let models = self.path().join("npuhal/models");
        fs::create_dir_all(&models).unwrap();
        let small = SmallPackage { family: Family::Llama, layers: 2, vocab_size: 448, seed: 3 };
        small.write(&models, "small-xdna1", &[("tokenizer.json", TOKENIZER)])
    }

    /// A model that takes a while to compute a prompt.
    pub(crate) fn long_model(&self) -> PathBuf {
        let small = ModelSpec::small(Architecture::Llama, Weights::LikeQ4KM);
        self.write(&ModelSpec { context_length: 4096, ..small }.build(), "long.gguf")
    }

    /// A model that takes some milliseconds a token where it is computed in the exact arithmetic: what happens in the middle of
    /// an answer can be seen with it. Most of the time goes with `intermediate`.
    pub(crate) fn slow_model(&self, intermediate: usize) -> PathBuf {
        let spec = ModelSpec {
            hidden: 512,
            layers: 4,
            heads: 8,
            head_dim: 64,
            intermediate,
            context_length: 1024,
            ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::Q8_0))
        };
        self.write(&spec.build(), "slow.gguf")
    }

    /// The same file with another architecture stated.
    pub(crate) fn model_of(&self, architecture: &str) -> PathBuf {
        let mut file = ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32)).build();
        file.set("general.architecture", Value::String(architecture.to_owned()));
        self.write(&file, "other.gguf")
    }

    pub(crate) fn write(&self, file: &GgufFile, name: &str) -> PathBuf {
        let path = self.path().join(name);
        file.write(&path).unwrap();
        path
    }

    /// The Rust example, which cargo has built beside this test, where only its owner can write.
    pub(crate) fn rust_addon(&self) -> PathBuf {
        let built = std::env::current_exe().unwrap().parent().unwrap().join("libnpuhal_example_addon.so");
        let own = self.path().join("example.so");
        fs::copy(&built, &own).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        own
    }

    /// The C example, or `None` and a line that says so where there is no C compiler.
    pub(crate) fn c_addon(&self, test: &str) -> Option<PathBuf> {
        self.compiled(test, "parrot.so", "examples/addon-c/parrot.c", &["-pedantic"])
    }

    /// The add-on of the tests that is well but for what `defines` make faulty.
    pub(crate) fn faulty_addon(&self, test: &str, name: &str, defines: &[&str]) -> Option<PathBuf> {
        let defines: Vec<String> = defines.iter().map(|define| format!("-D{define}")).collect();
        let flags: Vec<&str> = defines.iter().map(String::as_str).chain(["-Wno-unused"]).collect();
        self.compiled(test, name, "tests/data/addons/faulty.c", &flags)
    }

    fn compiled(&self, test: &str, name: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
        if Command::new("cc").arg("--version").output().is_err() {
            println!("skipped: {test}: cc is not here");
            return None;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let own = self.path().join(name);
        let compiled = Command::new("cc")
            .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-I"])
            .arg(root.join("addon/abi/include"))
            .args(flags)
            .arg("-o")
            .arg(&own)
            .arg(root.join(source))
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        Some(own)
    }
}

/// What a program said.
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
            err: String::from_utf8(output.stderr).expect("stderr is UTF-8"),
        }
    }
}

impl Said {
    /// Checks the exit code.
    #[track_caller]
    pub(crate) fn with_code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.out, self.err);
        self
    }
}
