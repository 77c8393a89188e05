//! Choices, log probabilities, echo, speculation, evaluation and inspection, as a user calls them.

use npuhal_models::WeightType;
use npuhal_tests::kit::hub::HubDirectory;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

fn npuhal(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal"));
    command.stdin(Stdio::null()).env_remove("NPUHAL_API_URL").env_remove("NPUHAL_API_KEY");
    command.args(args).output().expect("the binary starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("stderr is UTF-8")
}

#[track_caller]
fn run(args: &[&str], code: i32) -> (String, String) {
    let output = npuhal(args);
    let (out, err) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    (out, err)
}

fn has_model() -> bool {
    npuhal_tests::models::path("smollm2-135m").is_some()
}

#[test]
fn choices_are_told_apart_and_repeat_from_their_seeds() {
    if !has_model() {
        return;
    }
    let ask = ["run", "Name a colour.", "--temperature", "0.9", "-n", "8", "--stats"];
    let (out, err) = run(&[&ask[..], &["--n", "3", "--seed", "5"]].concat(), 0);
    let parts: Vec<&str> = out.split('[').filter(|part| !part.is_empty()).collect();
    assert_eq!(parts.len(), 3, "{out}");
    assert!(parts[1].starts_with("2/3]\n"), "{out}");
    let seed = err.lines().filter_map(|line| line.split("; seed ").nth(1)).nth(1).unwrap();
    let seed = seed.split(';').next().unwrap();
    let (again, _) = run(&[&ask[..], &["--seed", seed]].concat(), 0);
    assert_eq!(parts[1], format!("2/3]\n{again}"));
    let (_, err) = run(&["run", "x", "--n", "9"], 2);
    assert!(err.contains("--n must be between 1 and 8; found 9"), "{err}");
}

#[test]
fn log_probabilities_and_echo_are_printed() {
    if !has_model() {
        return;
    }
    let raw = ["run", "--raw", "The capital of France is", "-n", "2"];
    let (out, _) = run(&[&raw[..], &["--logprobs", "2", "--echo"]].concat(), 0);
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("The capital of France is Paris"), "{out}");
    // Four tokens of the prompt have one before them.
    let listed: Vec<&&str> = lines.iter().filter(|line| line.trim_start().starts_with('-')).collect();
    assert_eq!(listed.len(), 6, "{out}");
    assert!(listed[4].contains("\" Paris\""), "{out}");
    let (_, err) = run(&["run", "x", "--logprobs", "21"], 2);
    assert!(err.contains("--logprobs must be between 0 and 20; found 21"), "{err}");
    let (_, err) = run(&["run", "x", "--echo"], 2);
    assert!(err.contains("--raw"), "{err}");
}

#[test]
fn biases_change_the_answer_and_are_checked() {
    if !has_model() {
        return;
    }
    let raw = ["run", "--raw", "The capital of France is", "-n", "1"];
    // ` Paris` is token 7042.
    let (out, _) = run(&[&raw[..], &["--logit-bias", "7042=-100"]].concat(), 0);
    assert!(!out.contains("Paris"), "{out}");
    let (_, err) = run(&[&raw[..], &["--logit-bias", "99999=1"]].concat(), 1);
    assert!(err.contains("token 99999, which is outside the vocabulary of 49152"), "{err}");
    for bad in ["7042", "7042=x", "-1=2"] {
        let flag = format!("--logit-bias={bad}");
        let (_, err) = run(&[&raw[..], &[flag.as_str()]].concat(), 2);
        assert!(err.contains("such as 198=-100"), "{err}");
    }
    let (_, err) = run(&[&raw[..], &["--logit-bias", "1=101"]].concat(), 2);
    assert!(err.contains("logit_bias must be between -100"), "{err}");
}

#[test]
fn guessing_ahead_gives_the_same_answer_and_tells_what_it_came_to() {
    if !has_model() {
        return;
    }
    let ask =
        ["run", "Repeat this list: apple, pear, plum, cherry, apple, pear, plum, cherry, apple, pear.", "-n", "48"];
    let (plain, _) = run(&ask, 0);
    let (guessed, err) = run(&[&ask[..], &["--speculate", "prompt-lookup:6", "--stats"]].concat(), 0);
    assert_eq!(guessed, plain);
    assert!(err.contains("drafted"), "{err}");
    let (_, err) = run(&["run", "x", "--speculate", "magic"], 2);
    assert!(err.contains("prompt-lookup:N"), "{err}");
}

#[test]
fn bench_prints_the_ratio_of_sequences_to_one() {
    if !has_model() {
        return;
    }
    let args = ["bench", "--parallel", "1,3", "--tg", "2", "--depths", "0,4", "--threads", "1", "--jsonl"];
    let (out, err) = run(&args, 0);
    let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = lines.iter().map(|line| line["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["tg2x1@d0", "tg2x3@d0", "tg2x1@d4", "tg2x3@d4"]);
    assert!(lines.iter().all(|line| line["ratio"].as_f64().unwrap() > 0.0));
    assert!(err.contains("KV caches of 3 sequences"), "{err}");
}

#[test]
fn the_evaluation_tests_itself() {
    let (out, _) = run(&["eval", "--self-test", "--format", "json"], 0);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["total"]["matches"], 6);
    assert!(report["total"]["perplexity"].as_f64().unwrap() < 1.5);
}

#[test]
fn a_model_is_evaluated_here_and_limits_decide_the_exit_code() {
    if !has_model() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let path = file.to_str().unwrap();
    let (out, _) = run(&["eval", "--format", "json", "-o", path, "--min-accuracy", "0.3"], 0);
    assert_eq!(out, "");
    let report: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!((&report["total"]["items"], &report["passed"]), (&Value::from(6), &Value::from(true)));
    assert!(report["results"][0]["text"].as_str().unwrap().contains("Paris"), "{report:#}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside the report");
    let (out, err) = run(&["eval", "--max-perplexity", "1.0001", "--format", "markdown"], 1);
    assert!(out.contains("| fact-capital | yes |") && err.contains("wanted at most 1.0001"), "{out}{err}");
    let (_, err) = run(&["eval", "--dataset", "/nowhere.json"], 1);
    assert!(err.contains("/nowhere.json: "), "{err}");
    for bad in [&["eval", "--min-accuracy", "2"][..], &["eval", "-m", "a,b"], &["eval", "--numerics", "fast,exact"]] {
        run(bad, 2);
    }
}

#[test]
fn a_text_is_scored_by_several_numerics() {
    if !has_model() {
        return;
    }
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/quality.txt");
    let args = ["eval", "--perplexity", text, "--tokens", "40", "--window", "24", "--reference", "exact"];
    let (out, _) = run(&[&args[..], &["--numerics", "exact,fast", "--format", "json"]].concat(), 0);
    let report: Value = serde_json::from_str(&out).unwrap();
    let lines = report["results"].as_array().unwrap();
    assert_eq!(lines.len(), 2);
    assert_eq!((&lines[0]["numerics"], &lines[0]["scored_tokens"]), (&Value::from("exact"), &Value::from(38)));
    assert!(lines[0]["difference"].is_null());
    let kl = lines[1]["difference"]["kl_mean"].as_f64().unwrap();
    assert!((0.0..1e-4).contains(&kl), "{kl}");
    let (exact, fast) = (lines[0]["perplexity"].as_f64().unwrap(), lines[1]["perplexity"].as_f64().unwrap());
    assert!((exact - fast).abs() < 0.01 * exact && exact > 1.0, "{exact} {fast}");
    let (_, err) = run(&[&args[..], &["--max-perplexity", "1.5"]].concat(), 1);
    assert!(err.contains("wanted at most 1.5"), "{err}");
}

#[test]
fn a_report_of_a_text_says_what_it_was_made_of() {
    if !has_model() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (text, report) = (folder.path().join("a text.txt"), folder.path().join("report.md"));
    fs::write(&text, "The quick brown fox jumps over the lazy dog.").unwrap();
    let args = ["eval", "--perplexity", text.to_str().unwrap(), "--note", "commit 12ab", "--format", "markdown", "-o"];
    run(&[&args[..], &[report.to_str().unwrap()]].concat(), 0);
    let report = fs::read_to_string(report).unwrap();
    let command = format!("npuhal eval --perplexity '{}' -m smollm2-135m --numerics fast", text.display());
    for part in [
        command.as_str(),
        "--note 'commit 12ab'",
        "* commit 12ab\n",
        "44 characters, SHA-256 `ef537f25c895bfa782526529a9b63d97aa631564d5d789c2b765448c8635fb6c`",
        "SHA-256 `b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53`, licence Apache-2.0",
        "| smollm2-135m | fast ",
    ] {
        assert!(report.contains(part), "{part} in\n{report}");
    }
}

/// A small random model as users bring them.
fn small(architecture: Architecture) -> ModelSpec {
    ModelSpec::small(architecture, Weights::Uniform(WeightType::F32))
}

#[test]
fn a_directory_answers_as_its_authors_suggest_unless_flags_say_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    HubDirectory::new(&small(Architecture::Gemma3)).write(folder.path(), 2).unwrap();
    let path = folder.path().to_str().unwrap();
    let (out, _) = run(&["inspect", path, "--format", "json"], 0);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["suggested_sampling"]["followed"], "temperature 0.6, top-p 0.95, top-k 50");
    assert_eq!(report["architecture"]["attention_window"], "5 positions in 1 of 2 layers");
    assert!(report["integrity"]["state"].as_str().unwrap().starts_with("every tensor lies within its file"));
    assert_eq!(report["template"]["source"], "built-in ChatML (the model has none)");

    let ask = ["run", "hello", "-m", path, "-n", "12", "--stats"];
    let (_, err) = run(&ask, 0);
    let line = "sampling with what the model's authors suggest: temperature 0.6, top-p 0.95, top-k 50; --temperature 0";
    assert!(err.contains(line) && err.contains("; seed "), "{err}");
    let seeded = || run(&[&ask[..], &["--seed", "7"]].concat(), 0).0;
    assert_eq!(seeded(), seeded());
    let (greedy, err) = run(&[&ask[..], &["--temperature", "0"]].concat(), 0);
    assert!(!err.contains("suggest") && !err.contains("; seed "), "{err}");
    assert_eq!(run(&[&ask[..], &["--temperature", "0", "--top-p", "0.5"]].concat(), 0).0, greedy);
    let (_, err) = run(&["run", "hello", "-m", path, "-n", "2", "-q"], 0);
    assert_eq!(err, "");

    // A file that suggests nothing is greedy.
    fs::remove_file(folder.path().join("generation_config.json")).unwrap();
    let (out, err) = run(&ask, 0);
    assert!(out == greedy && !err.contains("suggest"), "{err}");
    let (out, _) = run(&["inspect", path], 0);
    assert!(out.contains("suggested_sampling  none"), "{out}");
}

#[test]
fn any_part_of_a_split_file_is_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.gguf");
    let spec = small(Architecture::Qwen3);
    spec.build().write(&whole).unwrap();
    let part = |number: usize| folder.path().join(format!("m-{number:05}-of-00003.gguf"));
    for (index, file) in spec.build().split(3).iter().enumerate() {
        file.write(&part(index + 1)).unwrap();
    }
    let answer = |path: &std::path::Path| run(&["run", "hello", "-m", path.to_str().unwrap(), "-n", "6"], 0).0;
    assert_eq!(answer(&part(2)), answer(&whole));
    let (out, _) = run(&["inspect", part(3).to_str().unwrap(), "--format", "json"], 0);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["tensors"], spec.build().tensors.len());
    assert!(report["size"].as_str().unwrap().ends_with("kB in 3 files"), "{report:#}");
    let packed = folder.path().join("packed");
    let (_, err) = run(&["pack", part(1).to_str().unwrap(), packed.to_str().unwrap()], 1);
    assert!(err.contains("join them first"), "{err}");
    fs::remove_file(part(2)).unwrap();
    for command in [&["inspect"][..], &["run", "hello", "-m"]] {
        let (_, err) = run(&[command, &[part(1).to_str().unwrap()]].concat(), 1);
        assert!(err.contains("file 2 of 3 of the model is missing"), "{err}");
    }
}

/// A server that answers once with `answer`, whatever is asked; returns its address and what it was asked.
fn server(answer: String) -> (String, std::thread::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let serve = move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = vec![0; 4096];
        let len = stream.read(&mut asked).unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8_lossy(&asked[..len]).into_owned()
    };
    (address, std::thread::spawn(serve))
}

fn http(status: &str, extra: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{extra}Connection: close\r\n\r\n{body}", body.len())
}

#[test]
fn a_server_that_cannot_be_asked_is_told() {
    let dead = { TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap() };
    let (_, err) = run(&["eval", "--api-url", &format!("http://{dead}"), "-m", "x"], 1);
    assert!(err.contains("is the server running?"), "{err}");
    for (answer, part) in [
        (
            http("401 Unauthorized", "", r#"{"error":{"message":"missing or invalid bearer token"}}"#),
            "status 401: missing or",
        ),
        (http("302 Found", "Location: http://127.0.0.1:1/\r\n", ""), "answers with a redirect (302)"),
        (http("200 OK", "", "<html>"), "it is no JSON"),
        (http("200 OK", "", r#"{"choices":[]}"#), "it has no choices[0].text"),
    ] {
        let (url, asked) = server(answer);
        let (_, err) = run(&["eval", "--api-url", &url, "--api-key", "key-1", "-m", "x"], 1);
        assert!(err.contains(part), "{err}");
        assert!(asked.join().unwrap().to_lowercase().contains("authorization: bearer key-1"));
    }
    let (url, _asked) = server(http("200 OK", "", r#"{"data":[]}"#));
    let (_, err) = run(&["eval", "--api-url", &url], 1);
    assert!(err.contains("the server has no models"), "{err}");
    let (_, err) = run(&["eval", "--api-url", "http://host.test", "--api-key", "secret"], 2);
    assert!(err.contains("is not encrypted") && !err.contains("secret"), "{err}");
}

#[test]
fn inspect_tells_routes_and_integrity_in_three_forms() {
    if !has_model() {
        return;
    }
    let (out, _) = run(&["inspect", "smollm2-135m", "--verify-checksums", "--format", "json"], 0);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert!(report["routes"]["cpu"].as_str().unwrap().starts_with("serves, on cpu, 8192 positions"), "{report:#}");
    assert_eq!(report["integrity"]["state"], "the checksum is right");
    let (text, _) = run(&["inspect", "smollm2-135m"], 0);
    assert!(text.contains("integrity\n") && text.contains("routes\n"), "{text}");
    let (markdown, _) = run(&["inspect", "smollm2-135m", "--format", "markdown"], 0);
    assert!(markdown.contains("## kv cache f16") && markdown.contains("| layers | 30 |"), "{markdown}");
}
