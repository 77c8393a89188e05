//! xdna1 packages and their kits, as a user calls them.

mod common;

use common::Home;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::process::Stdio;

#[test]
fn a_package_is_listed_inspected_and_run_on_the_cpu() {
    let home = Home::new();
    let path = home.package();
    let broken = path.parent().unwrap().join("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("metadata.json"), "{}").unwrap();

    let listed = home.run(&["list"]).with_code(0).out;
    assert!(listed.contains("xdna1 packages:\nsmall-xdna1  small-xdna1, 64 positions, "), "{listed}");
    assert!(listed.contains("broken: passed over: no model_id"), "{listed}");
    let listed: Value = serde_json::from_str(&home.run(&["list", "--json"]).with_code(0).out).unwrap();
    assert_eq!(listed["packages"][0]["model_id"], "small-xdna1");
    assert_eq!(listed["packages_passed_over"].as_array().unwrap().len(), 1);

    let said = home.run(&["run", "-m", "small-xdna1", "-n", "3", "--stats", "hello"]).with_code(0);
    assert!(said.err.contains("using the CPU"), "{}", said.err);
    // Twice the same, hashed again or not.
    let again = home.run(&["run", "-m", path.to_str().unwrap(), "--verify", "-n", "3", "hello"]).with_code(0);
    assert_eq!(again.out, said.out);

    let report = home.run(&["inspect", "--json", "--verify-checksums", "small-xdna1"]).with_code(0).out;
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["integrity"]["valid"], &report["kit"]), (&Value::Bool(true), &Value::from("none")));
    assert_eq!(report["hardware_demands"]["kv_cache_kib"], 96.0);
    let victim = path.join("layer01.o_proj.w8.bin");
    let mut bytes = fs::read(&victim).unwrap();
    bytes[100] ^= 1;
    fs::write(&victim, bytes).unwrap();
    let report = home.run(&["inspect", "--verify-checksums", "small-xdna1"]).with_code(2).out;
    assert!(report.contains("checksum_failures") && report.contains("layer01.o_proj.w8.bin"), "{report}");
    let said = home.run(&["run", "-m", "small-xdna1", "hello"]).with_code(1);
    assert!(said.err.contains("model package checksum mismatch: layer01.o_proj.w8.bin"), "{}", said.err);
    fs::remove_file(victim).unwrap();
    home.run(&["inspect", "small-xdna1"]).with_code(2);
    fs::write(path.join("metadata.json"), "[]").unwrap();
    home.run(&["inspect", path.to_str().unwrap()]).with_code(1);
}

#[test]
fn a_prompt_that_is_too_long_is_cut_or_refused() {
    let home = Home::new();
    home.package();
    let long = "one two three four five six seven eight nine ten ".repeat(4);
    let said = home.run(&["run", "-m", "small-xdna1", "--device", "cpu", "-n", "8", &long]).with_code(0);
    assert!(
        said.err.contains("tokens in a context of 64: {\"dropped_messages\":1,\"truncated_system\":false,"),
        "{}",
        said.err
    );
    assert!(said.err.contains("\"truncated_content\":true"), "{}", said.err);
    let refused = ["run", "-m", "small-xdna1", "--device", "cpu", "-n", "8", "--context-overflow", "error", &long];
    let said = home.run(&refused).with_code(1);
    assert!(said.err.contains("56 fit beside the tokens to generate"), "{}", said.err);
    let said = home.run(&["run", "-m", "small-xdna1", "--device", "cpu", "-n", "8", "--raw", &long]).with_code(0);
    assert!(said.err.contains("{\"truncated_prompt\":true}"), "{}", said.err);
    home.run(&["run", "-m", "small-xdna1", "--context-overflow", "guess", "hello"]).with_code(2);
}

/// A device that fails in the middle of an answer: the message has a line of its own, also where both streams are one.
#[test]
fn an_error_in_the_middle_of_an_answer_starts_a_line() {
    let home = Home::new();
    let path = home.package();
    home.run(&["kit", "xdna1", "-m", path.to_str().unwrap()]).with_code(0);
    let run = |device: &str| {
        let arguments = ["run", "-m", "small-xdna1", "--device", device, "-n", "12", "--seed", "5", "--stats"];
        home.run(&[&arguments[..], &["--temperature", "1", "hello"]].concat())
    };
    let said = run("virtual:npu1").with_code(0);
    let whole = said.out;
    let mut after = said.err.split("prompt ").filter_map(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    let prompt_tokens = after.next().expect("the statistics");
    // A dispatch for each position of the prompt, then one for each token that is fed.
    let prompt_and_some = prompt_tokens + 9;
    let said = run(&format!("virtual:npu1?fault=timeout@{prompt_and_some}")).with_code(1);
    let told: Vec<&str> = said.err.lines().filter(|line| line.contains("npuhal: ")).collect();
    assert!(told.len() == 1 && told[0].starts_with("npuhal: ") && told[0].contains("timed out"), "{}", said.err);
    let part = said.out.strip_suffix('\n').unwrap_or_else(|| panic!("{:?} of {whole:?}", said.out));
    assert!(!part.is_empty() && whole.starts_with(part) && part.len() < whole.len(), "{part:?} of {whole:?}");
    // In a chat the turn is taken back, and the next message is asked for.
    let device = format!("virtual:npu1?fault=timeout@{prompt_and_some}");
    let chat = ["chat", "-m", "small-xdna1", "--device", &device, "-n", "12", "--seed", "5", "--temperature", "1"];
    let mut chat =
        home.npuhal(&chat).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"hello\n/exit\n").unwrap();
    let ended = chat.wait_with_output().unwrap();
    let (out, err) = (String::from_utf8(ended.stdout).unwrap(), String::from_utf8(ended.stderr).unwrap());
    assert_eq!(ended.status.code(), Some(0), "{err}");
    assert!(out.ends_with(&said.out), "{out:?}");
    let told = err.lines().find(|line| line.contains("this turn is not kept")).unwrap();
    assert!(told.starts_with("npuhal: ") && told.contains("timed out"), "{err}");
}

/// `bench --ttft` used to begin no generation; a text is put into the lane's own template, as `run` does.
#[test]
fn the_time_to_the_first_token_is_measured_on_the_virtual_npu() {
    let home = Home::new();
    let path = home.package();
    home.run(&["kit", "xdna1", "-m", path.to_str().unwrap()]).with_code(0);
    let bench = |more: &[&str]| {
        let arguments = ["bench", "-m", "small-xdna1", "--device", "virtual:npu1"];
        let said = home.run(&[&arguments[..], more].concat()).with_code(0);
        serde_json::from_str::<Value>(&said.out).unwrap()
    };
    assert_eq!(bench(&["--ttft", "4"])["test"], "ttft4");
    let said = home.run(&["run", "-m", "small-xdna1", "-n", "1", "--stats", "hello"]).with_code(0);
    let tokens = said.err.split("prompt ").find_map(|rest| rest.split(' ').next()?.parse::<u32>().ok()).unwrap();
    assert_eq!(bench(&["--ttft-text", "hello"])["test"], format!("ttft-text{tokens}"));
}

/// A checkpoint over a package: the kit that the user put there stays.
#[test]
fn a_kit_outlives_the_conversion_that_replaces_its_package() {
    let Some(source) = npuhal_tests::models::path("smollm2-135m") else { return };
    let home = Home::new();
    let target = home.path().join("package");
    fs::create_dir(&target).unwrap();
    let metadata = serde_json::json!({
        "format": "xdna1-smollm2-w8a16-v1", "hidden_size": 576, "intermediate_size": 1536, "attention_heads": 9, "kv_heads": 3,
        "head_dim": 64, "layers": 30, "vocab_size": 49152, "context_length": 64, "tensors": {},
        "files": { "a.bin": { "sha256": "0".repeat(64), "size": 0 } },
    });
    fs::write(target.join("metadata.json"), metadata.to_string()).unwrap();
    let target = target.to_str().unwrap();
    home.run(&["kit", "xdna1", "--design", "smollm-engine", "-m", target]).with_code(0);
    let said = home.run(&["convert", source.to_str().unwrap(), target]).with_code(0);
    assert!(said.err.contains("package/npu: kept from the package that was here"), "{}", said.err);
    let routes = home.run(&["routes", "-m", target, "--device", "virtual:npu1"]).with_code(0).out;
    assert!(routes.contains("one dispatch a token, final norm in it, head on the CPU"), "{routes}");
}

#[test]
fn a_pinned_npu_without_a_kit_is_an_error_with_its_reason() {
    let home = Home::new();
    let path = home.package();
    let said = home.run(&["run", "-m", "small-xdna1", "--device", "virtual:npu1", "hello"]).with_code(1);
    assert!(said.err.contains("route xdna1") && said.err.contains("no kit is there"), "{}", said.err);
    let said = home.run(&["run", "-m", "small-xdna1", "--npu-layers", "1", "--npu-percent", "5", "hello"]).with_code(2);
    assert!(said.err.contains("cannot be used with"), "{}", said.err);
    home.run(&["run", "-m", "small-xdna1", "--npu-layers", "most", "hello"]).with_code(2);
    for percent in ["200", "-1", "nan"] {
        let said = home.run(&["run", "-m", "small-xdna1", "--npu-percent", percent, "hello"]).with_code(2);
        assert!(said.err.contains("wanted a number from 0 to 100"), "{}", said.err);
    }
    // No layer on the NPU needs no kit.
    let on_cpu = ["run", "-m", "small-xdna1", "--device", "virtual:npu1", "--npu-layers", "0", "-n", "2", "hello"];
    let said = home.run(&on_cpu).with_code(0);
    assert!(said.err.contains("no layer on the NPU"), "{}", said.err);
    let text = home.path().join("insts.txt");
    fs::write(&text, "00000011\n06030100\n").unwrap();
    let (file, target) = (text.to_str().unwrap(), path.to_str().unwrap());
    let import = ["kit", "import", "--design", "smollm-engine", "--xclbin", file, "--instructions", file, target];
    let said = home.run(&import).with_code(1);
    assert!(said.err.contains("insts.txt"), "{}", said.err);
    let wrong = ["kit", "import", "--design", "qwen-engine", "--xclbin", file, "--instructions", file, target];
    assert!(home.run(&wrong).with_code(2).err.contains("a package of the family llama"));
    let routes = home.run(&["routes"]).with_code(0).out;
    assert!(routes.contains("xdna1 (built-in): models llama, qwen2; options engine, w8, npu_head"), "{routes}");
}
