//! xdna1 packages and their kits, as a user calls them.

mod common;

use common::Home;
use serde_json::Value;
use std::fs;

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

#[test]
fn a_pinned_npu_without_a_kit_is_an_error_with_its_reason() {
    let home = Home::new();
    let path = home.package();
    let said = home.run(&["run", "-m", "small-xdna1", "--device", "virtual:npu1", "hello"]).with_code(1);
    assert!(said.err.contains("route xdna1") && said.err.contains("no kit is there"), "{}", said.err);
    let said = home.run(&["run", "-m", "small-xdna1", "--npu-layers", "1", "--npu-percent", "5", "hello"]).with_code(2);
    assert!(said.err.contains("cannot be used with"), "{}", said.err);
    home.run(&["run", "-m", "small-xdna1", "--npu-layers", "most", "hello"]).with_code(2);
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
