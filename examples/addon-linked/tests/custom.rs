//! The custom program: the linked add-on answers, and a loaded one of the same name stands in its place.

use npuhal_addon::models::WeightType;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::served::Served;
use serde_json::json;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

#[test]
fn the_linked_add_on_answers_as_the_loaded_one_does() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model.gguf");
    let spec = ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32));
    spec.build().write(&model).unwrap();
    let custom = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_npuhal-custom"))
            .env_remove("NPUHAL_ADDONS")
            .env("XDG_DATA_HOME", home.path())
            .stdin(Stdio::null())
            .args(arguments)
            .output()
            .unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(output.status.success(), "{arguments:?}: {err}");
        (out, err)
    };
    let run = ["run", "-m", model.to_str().unwrap(), "--raw", "-n", "12", "the hello"];
    let (linked, said) = custom(&run);
    assert!(said.contains("using the CPU (route zero-layers, embedding and head only)"), "{said}");
    assert!(!linked.trim().is_empty());
    assert_eq!(custom(&["shout", "hello"]).0, "HELLO\n");
    let list = custom(&["routes"]).0;
    assert!(list.contains("  zero-layers (linked add-on npuhal-example-addon): models llama, qwen2, qwen3"), "{list}");
    assert!(list.contains("  cpu (built-in)"), "{list}");

    let library = home.path().join("example.so");
    let built = std::env::current_exe().unwrap().parent().unwrap().join("libnpuhal_example_addon.so");
    fs::copy(built, &library).unwrap();
    fs::set_permissions(&library, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(home.path(), Permissions::from_mode(0o700)).unwrap();
    let (loaded, said) = custom(&[&run[..], &["--addon", library.to_str().unwrap()]].concat());
    assert_eq!((loaded, said.contains("route zero-layers")), (linked, true));
    let table = custom(&["routes", "-m", model.to_str().unwrap(), "--addon", library.to_str().unwrap()]).0;
    assert!(
        table.contains("zero-layers (linked add-on npuhal-example-addon): shadowed: by the loaded add-on"),
        "{table}"
    );
}

#[test]
fn the_linked_add_on_answers_through_the_server_of_the_program() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model.gguf");
    ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32)).build().write(&model).unwrap();
    let program = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal-custom"));
        command.env_remove("NPUHAL_ADDONS").env("XDG_DATA_HOME", home.path()).stdin(Stdio::null()).args(arguments);
        command
    };
    let path = model.to_str().unwrap();
    let run = program(&["run", "-m", path, "--raw", "-n", "12", "the hello"]).output().unwrap();
    // Its workers are the same program.
    let server = Served::start(&mut program(&["serve", "-m", path, "--threads", "1", "--no-self-test"]));
    assert_eq!(server.get("/ready").json()["resident"][0]["route"], "zero-layers");
    let answer = server.post("/v1/completions", &json!({ "prompt": "the hello", "max_tokens": 12 }));
    let text = answer.json()["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(text.trim_end_matches('\n'), String::from_utf8(run.stdout).unwrap().trim_end_matches('\n'));
    assert!(!text.trim().is_empty());
}
