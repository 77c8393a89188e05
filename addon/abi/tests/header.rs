//! The C header and the Rust types describe the same memory: a C program prints its sizes, offsets and constants.

#![allow(clippy::print_stdout, reason = "a test that is left out says so")]

use npuhal_addon_abi::*;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

/// A C expression of an integer, and what it must be.
struct Fact {
    expression: String,
    wanted: u64,
}

fn facts() -> Vec<Fact> {
    let mut facts = Vec::new();
    let mut fact = |expression: String, wanted: u64| facts.push(Fact { expression, wanted });
    macro_rules! layout {
        ($rust:ident, $c:ident: $($field:ident),*) => {{
            fact(format!("sizeof(npuhal_{})", stringify!($c)), size_of::<$rust>() as u64);
            $(fact(
                format!("offsetof(npuhal_{}, {})", stringify!($c), stringify!($field)),
                offset_of!($rust, $field) as u64,
            );)*
        }};
    }
    macro_rules! constant {
        ($module:ident::$name:ident) => {
            fact(
                format!("NPUHAL_{}_{}", stringify!($module).to_uppercase(), stringify!($name)),
                u64::from($module::$name.unsigned_abs()),
            )
        };
    }
    trait UnsignedAbs {
        fn unsigned_abs(self) -> u32;
    }
    impl UnsignedAbs for u32 {
        fn unsigned_abs(self) -> u32 {
            self
        }
    }
    fact("NPUHAL_ABI_VERSION".to_owned(), u64::from(ABI_VERSION));
    fact("NPUHAL_MAX_PLACEMENT".to_owned(), MAX_PLACEMENT as u64);
    {
        layout!(Str, str: data, len);
        layout!(TextSink, text_sink: state, write);
        layout!(Tensor, tensor: name, storage, data, len_bytes, rows, cols);
        layout!(Model, model: size_bytes, rope_pairing, path, model_type, name, hidden_size, layers, heads, kv_heads, head_dim, intermediate_size, vocab_size, context_length, rope_dims, rms_norm_eps, rope_theta, qkv_bias, qk_norm, tied_head, bos, eos, eos_len, handle);
        layout!(Device, device: id, name, generation, is_virtual, columns, core_rows, memory_bytes, features, features_len);
        layout!(KeyValue, key_value: key, value);
        layout!(Options, options: numerics, threads, context_positions, sequences, reserved, pairs, pairs_len);
        layout!(FitnessRequest, fitness_request: size_bytes, reserved, model, devices, devices_len, options, reason, detail);
        layout!(Placement, placement: start, end, device, yields);
        layout!(Service, service: device, window, speed, claim, tokens_per_second, memory_bytes, placement_len, reserved, placement);
        layout!(OpenRequest, open_request: size_bytes, reserved, model, devices, devices_len, service, options, error, describe);
        layout!(Control, control: state, check);
        layout!(Row, row: sequence, token, position);
        layout!(StepperTable, stepper_table: size_bytes, reserved, begin, end, step, truncate);
        layout!(GenerateRequest, generate_request: size_bytes, max_tokens, prompt, prompt_len, repetition_penalty, penalty_window, on_token_state, on_token, control, error);
        layout!(GenerateOutcome, generate_outcome: prefill_ms, decode_ms, stopped_at_eos, reused);
        layout!(GeneratorTable, generator_table: size_bytes, reserved, generate);
        layout!(Session, session: kind, vocab_size, positions, rows_per_call, sequences, default_repetition_penalty, opens_think, reserved, state, stepper, generator, close);
        layout!(OptionSpec, option_spec: key, help);
        layout!(RouteTable, route_table: size_bytes, flags, name, model_types, model_types_len, options, options_len, state, fitness, open);
        layout!(CommandTable, command_table: size_bytes, reserved, name, help, state, run);
        layout!(EncoderTable, encoder_table: size_bytes, dims, name, state, encode);
        layout!(HostTable, host_table: abi_version, size_bytes, version, tensor);
        layout!(AddonTable, addon_table: abi_version, size_bytes, name, version, routes, routes_len, commands, commands_len, encoders, encoders_len);
        constant!(fitness::SERVES);
        constant!(fitness::NOT_MINE);
        constant!(fitness::UNAVAILABLE);
        constant!(fitness::OPTIONAL);
        constant!(fitness::REQUIRED);
        constant!(fitness::FAILED);
        constant!(status::OK);
        constant!(status::FAILED);
        constant!(status::CANCELLED);
        constant!(status::DEADLINE_PASSED);
        constant!(status::LOST);
        constant!(status::PANICKED);
        constant!(route_flags::OPTIONAL);
        constant!(session_kind::STEPPER);
        constant!(session_kind::GENERATOR);
        constant!(generation::CPU);
        constant!(generation::XDNA1);
        constant!(generation::XDNA2);
        constant!(speed::REFERENCE);
        constant!(speed::CPU);
        constant!(speed::HYBRID);
        constant!(speed::ENGINE);
        constant!(speed::LANE);
        constant!(claim::PUBLISHED);
        constant!(claim::VIRTUAL);
        constant!(claim::MODELLED);
        constant!(claim::MEASURED);
        constant!(yields::HIDDEN);
        constant!(yields::NORMED);
        constant!(yields::LOGITS);
        constant!(role::TOKEN_EMBEDDING);
        constant!(role::FINAL_NORM);
        constant!(role::HEAD);
        constant!(role::ROPE_FACTORS);
        constant!(role::INPUT_NORM);
        constant!(role::Q);
        constant!(role::Q_BIAS);
        constant!(role::Q_NORM);
        constant!(role::K);
        constant!(role::K_BIAS);
        constant!(role::K_NORM);
        constant!(role::V);
        constant!(role::V_BIAS);
        constant!(role::O);
        constant!(role::POST_ATTENTION_NORM);
        constant!(role::GATE);
        constant!(role::UP);
        constant!(role::DOWN);
    }
    facts
}

#[test]
fn the_header_has_the_layout_of_the_types() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("skipped: the_header_has_the_layout_of_the_types: cc is not here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let facts = facts();
    let mut program = String::from("#include \"npuhal_addon.h\"\n#include <stdio.h>\nint main(void) {\n");
    for fact in &facts {
        writeln!(program, "    printf(\"%llu\\n\", (unsigned long long)({}));", fact.expression).unwrap();
    }
    program.push_str("    return 0;\n}\n");
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let compiled = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(include)
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    assert_eq!(printed.lines().count(), facts.len());
    for (line, fact) in printed.lines().zip(&facts) {
        assert_eq!(line.parse::<u64>().unwrap(), fact.wanted, "{}", fact.expression);
    }
}

#[test]
fn every_field_of_the_header_is_compared() {
    let header = include_str!("../include/npuhal_addon.h");
    let compared: Vec<String> = facts().into_iter().map(|fact| fact.expression).collect();
    let mut within = None;
    for line in header.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("typedef struct ").and_then(|rest| rest.strip_suffix(" {")) {
            within = Some(name);
        } else if line.starts_with('}') {
            within = None;
        } else if let Some(name) = within.filter(|_| line.ends_with(';')) {
            let field = match line.split_once("(*") {
                Some((_, rest)) => rest.split(')').next().unwrap(),
                None => line.trim_end_matches(';').split('[').next().unwrap().rsplit([' ', '*']).next().unwrap(),
            };
            let wanted = format!("offsetof({name}, {field})");
            assert!(compared.contains(&wanted), "{wanted}");
        } else if let Some(rest) = line.strip_prefix("#define NPUHAL_") {
            let name = rest.split([' ', '(']).next().unwrap();
            if !matches!(name, "ADDON_H" | "TEXT") {
                assert!(compared.contains(&format!("NPUHAL_{name}")), "NPUHAL_{name}");
            }
        }
    }
}
