//! What a file announces reserves no memory. A test binary of its own, so that nothing else moves the process's peak.
#![cfg(target_os = "linux")]

mod common;

use common::{Meta, Scratch, tiny_model};

const LIMIT_KIB: u64 = 192 * 1024;

/// Largest size of the address space so far, which counts reservations that were never touched.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn announced_sizes_reserve_nothing() {
    tiny_model("llama").open().unwrap();
    let before = peak_kib();
    let mut refused = 0;
    for exponent in 16..64 {
        let count = 1_u64 << exponent;
        let mut writers = vec![tiny_model("llama"), tiny_model("llama")];
        writers[0].tensor_count = Some(count);
        writers[1].entry_count = Some(count);
        let text = count.to_le_bytes().to_vec();
        writers.push(tiny_model("llama").set("tokenizer.chat_template", Meta::Raw(8, text)));
        for element in 0..13_u32 {
            let array = [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
            writers.push(tiny_model("llama").set("tokenizer.ggml.tokens", Meta::Raw(9, array)));
        }
        for key in ["block_count", "embedding_length", "attention.head_count", "context_length", "feed_forward_length"]
        {
            writers.push(tiny_model("llama").set(&format!("llama.{key}"), Meta::U64(count)));
        }
        writers.push(tiny_model("llama").edit("token_embd.weight", |tensor| tensor.dims[1] = count));
        writers.push(tiny_model("llama").edit("output_norm.weight", |tensor| tensor.dims[0] = count));
        for writer in writers {
            refused += u64::from(Scratch::new(&writer.build()).open().is_err());
        }
    }
    // A long context is no contradiction: up to 32 bits it is accepted.
    assert_eq!(refused, 48 * 23 - 16);
    let grown = peak_kib() - before;
    assert!(grown < LIMIT_KIB, "opening small hostile files grew the address space by {grown} KiB");
}
