//! The shipped binary, as a user calls it. Tests of answers run on the default model, fetched by the program itself into the
//! user's models folder.

use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn npuhal() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal"));
    command.stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> Output {
    command.output().expect("the binary starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("stderr is UTF-8")
}

/// Runs with `prompt` piped in.
fn piped(command: &mut Command, input: &[u8]) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    // A program that ends before it has read everything closes the pipe.
    let _ = child.stdin.take().expect("stdin is piped").write_all(input);
    child.wait_with_output().expect("the binary ends")
}

fn assert_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "stdout: {}\nstderr: {}", stdout(output), stderr(output));
}

/// Whether the default model can be used; printed where it may be left out.
fn has_model() -> bool {
    npuhal_tests::models::path("smollm2-135m").is_some()
}

#[test]
fn the_first_command_of_the_readme_answers_paris() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["run", "What is the capital of France?"]));
    assert_code(&output, 0);
    assert!(stdout(&output).contains("Paris"), "{}", stdout(&output));
    let said = stderr(&output);
    assert_eq!(said.lines().count(), 1, "one line about the device: {said}");
    assert!(said.contains("NPU") && said.contains("CPU"), "{said}");
}

#[test]
fn a_piped_prompt_is_answered_and_quiet_is_quiet() {
    if !has_model() {
        return;
    }
    let output = piped(npuhal().args(["run", "--quiet"]), b"What is the capital of France?\n");
    assert_code(&output, 0);
    assert!(stdout(&output).contains("Paris"), "{}", stdout(&output));
    assert_eq!(stderr(&output), "");
}

#[test]
fn the_same_seed_gives_the_same_answer_and_stats_name_it() {
    if !has_model() {
        return;
    }
    let run = || {
        let sampled = ["--temperature", "0.9", "--seed", "7", "-n", "24", "--stats"];
        let output = output(npuhal().args(["run", "Tell me a story."]).args(sampled));
        assert_code(&output, 0);
        output
    };
    let (first, second) = (run(), run());
    assert_eq!(stdout(&first), stdout(&second));
    assert!(stderr(&first).contains("seed 7"), "{}", stderr(&first));
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["run", "--stop", "Paris", "What is the capital of France?"]));
    assert_code(&output, 0);
    assert!(!stdout(&output).contains("Paris"), "{}", stdout(&output));
    assert!(!stdout(&output).trim().is_empty(), "the text before the stop string stays");
}

#[test]
fn raw_continues_text_without_a_template() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["run", "--raw", "-n", "4", "The capital of France is"]));
    assert_code(&output, 0);
    assert!(stdout(&output).contains("Paris"), "{}", stdout(&output));
}

#[test]
fn a_prompt_longer_than_the_context_is_an_error_with_both_numbers() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["run", "--context", "16", "What is the capital of France?"]));
    assert_code(&output, 1);
    // 37 of the prompt, and one of an answer.
    assert!(stderr(&output).contains("38 positions") && stderr(&output).contains("16"), "{}", stderr(&output));
}

#[test]
fn bench_prints_one_json_object_a_line() {
    if !has_model() {
        return;
    }
    let output =
        output(npuhal().args(["bench", "--threads", "1", "--pp", "4", "--tg", "2", "--depths", "0,4", "--jsonl"]));
    assert_code(&output, 0);
    let lines: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tests: Vec<&str> = lines.iter().map(|line| line["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp4", "tg2@d0", "tg2@d4"]);
    assert!(lines.iter().all(|line| line["tps"].as_f64().unwrap() > 0.0));
    for ttft in [["--ttft", "4"], ["--ttft-text", "Hi"]] {
        let output = self::output(npuhal().arg("bench").args(ttft));
        assert_code(&output, 0);
        let line: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert!(line["ms"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn inspect_shows_shapes_tokenizer_template_and_memory() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["inspect", "smollm2-135m", "--json"]));
    assert_code(&output, 0);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["architecture"]["layers"], 30);
    assert_eq!(report["architecture"]["tied_head"], true);
    assert_eq!(report["tokenizer"]["tokens"], 49152);
    assert_eq!(report["template"]["source"], "the model's own");
    assert!(report["kv_cache_f16"]["at_8192"].is_string(), "{report:#}");
    let output = self::output(npuhal().args(["inspect", "smollm2-135m", "--all"]));
    assert_code(&output, 0);
    assert!(stdout(&output).contains("blk.29.ffn_down.weight"));
}

#[test]
fn a_chat_from_a_pipe_keeps_the_conversation() {
    if !has_model() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let store = npuhal_tests::models::path("smollm2-135m").unwrap();
    let mut command = npuhal();
    command.args(["chat", "-n", "24"]).env("HOME", home.path()).env("NPUHAL_MODELS", store.parent().unwrap());
    let output = piped(
        &mut command,
        b"What is the capital of France?\n/stats\n/nonsense\n/reset\n/models\nWhat is the capital of France?\n/exit\n",
    );
    assert_code(&output, 0);
    assert_eq!(stdout(&output).matches("Paris").count(), 2, "{}", stdout(&output));
    let said = stderr(&output);
    for wanted in ["prompt 37 tokens (0 cached)", "/nonsense: no such command", "Conversation reset."] {
        assert!(said.contains(wanted), "{wanted} in {said}");
    }
}

#[test]
fn usage_errors_have_code_2_and_say_what_is_allowed() {
    let empty = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["run", "--max-tokens", "0", "x"], &["--max-tokens", "0"]),
        (&["run", "--nonsense"], &["--nonsense"]),
        (&["run", "-m", "smollm", "x"], &["smollm2-135m"]),
        (&["run", "--device", "gpu", "x"], &["gpu", "npu1"]),
        (&["run", "--numerics", "quick", "x"], &["quick", "exact", "fast"]),
        (&["pull", "no-such-model"], &["no-such-model", "smollm2-135m"]),
        (&["run", ""], &["prompt is empty"]),
        (&["bench", "--pp", "0"], &["--pp", "0"]),
    ];
    for (args, wanted) in cases {
        let output = output(npuhal().args(args).env("NPUHAL_MODELS", empty.path()).arg("--offline"));
        assert_code(&output, 2);
        for word in wanted {
            assert!(stderr(&output).contains(word), "{args:?}: {word} in {}", stderr(&output));
        }
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    assert_code(&output(&mut npuhal()), 2);
}

#[test]
fn offline_without_the_model_names_the_file_and_the_command() {
    let empty = tempfile::tempdir().unwrap();
    let output = output(npuhal().args(["run", "--offline", "hello"]).env("NPUHAL_MODELS", empty.path()));
    assert_code(&output, 1);
    let said = stderr(&output);
    assert!(said.contains("SmolLM2-135M-Instruct.Q4_1.gguf") && said.contains("npuhal pull smollm2-135m"), "{said}");
}

#[test]
fn a_pinned_device_that_is_not_there_is_an_error_never_the_cpu() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["run", "--device", "npu1", "hello"]));
    assert_code(&output, 1);
    assert!(stderr(&output).contains("npu1"), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");
}

#[test]
fn files_that_are_no_models_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, contents).unwrap();
        path
    };
    let page = file("page.gguf", b"<!DOCTYPE html><html></html>");
    let empty = file("empty.gguf", b"");
    let cut = file("cut.gguf", b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\x7f");
    for path in [page.as_path(), &empty, &cut, folder.path(), Path::new("/no/such/file.gguf")] {
        for command in ["run", "inspect"] {
            let mut npuhal = npuhal();
            match command {
                "run" => npuhal.args(["run", "-m"]).arg(path).arg("hello"),
                _ => npuhal.arg("inspect").arg(path),
            };
            let output = output(npuhal.env("NPUHAL_MODELS", folder.path()));
            assert_code(&output, 1);
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(stderr(&output).contains(name), "{command} {}: {}", path.display(), stderr(&output));
        }
    }
}

#[test]
fn a_file_of_the_user_is_listed_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mine.gguf"), b"GGUF").unwrap();
    let listed = output(npuhal().args(["list", "--json"]).env("NPUHAL_MODELS", folder.path()));
    assert_code(&listed, 0);
    let list: Value = serde_json::from_str(&stdout(&listed)).unwrap();
    assert_eq!(list["stored"][0]["name"], "mine.gguf");
    assert_eq!(list["catalogue"].as_array().unwrap().len(), 2);
    let removed = output(npuhal().args(["rm", "mine.gguf"]).env("NPUHAL_MODELS", folder.path()));
    assert_code(&removed, 0);
    assert!(!folder.path().join("mine.gguf").exists());
    let again = output(npuhal().args(["rm", "smollm2-135m"]).env("NPUHAL_MODELS", folder.path()));
    assert_code(&again, 1);
    assert!(stderr(&again).contains("smollm2-135m is not in"), "{}", stderr(&again));
}

#[test]
fn devices_list_the_cpu_and_say_whether_there_is_an_npu() {
    let text = output(npuhal().arg("devices"));
    assert_code(&text, 0);
    assert!(stdout(&text).contains("cpu") && stdout(&text).contains("usable"), "{}", stdout(&text));
    let json = output(npuhal().args(["devices", "--json"]));
    let report: Value = serde_json::from_str(&stdout(&json)).unwrap();
    assert_eq!(report["devices"][0]["id"], "cpu");
    assert!(report["npu"].as_str().unwrap().contains("NPU"));
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = output(npuhal().args(["completions", shell]));
        assert_code(&output, 0);
        assert!(stdout(&output).contains("inspect"), "{shell}");
    }
}

#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    let mut child = npuhal()
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the binary ends");
    assert_code(&output, 0);
    assert_eq!(stderr(&output), "");
}
