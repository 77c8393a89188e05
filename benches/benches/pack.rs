//! Packing a model of Qwen3-0.6B's shape, beside a plain copy: one that reads the source and writes as many bytes as the packed
//! file has. Both end on the disk (fsync of the file and of its directory). Alternating rounds, medians. The goal: 60 % of the
//! copy's speed.
//!
//! `NPUHAL_BENCH_FOLDER` keeps the random models, 1 GB, for the next time; its disk is the one that is measured.

mod common;

use common::median;
use npuhal_core::stage::Control;
use npuhal_models::q4nx::verify::verify;
use npuhal_models::q4nx::{PackOptions, pack};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

const ROUNDS: usize = 7;
const PIECE_BYTES: usize = 1 << 20;

fn main() -> io::Result<()> {
    let temporary = tempfile::tempdir()?;
    let kept = std::env::var_os("NPUHAL_BENCH_FOLDER").map(PathBuf::from);
    let folder = kept.as_deref().unwrap_or(temporary.path());
    for (name, weights) in [("Q4_K_M", Weights::LikeQ4KM), ("mixed", Weights::Mixed)] {
        let gguf = folder.join(format!("qwen3-0.6b-shaped-{name}.gguf"));
        if !gguf.exists() {
            model(weights).build().write(&gguf)?;
        }
        measure(name, &gguf, folder)?;
    }
    Ok(())
}

/// Random weights in Qwen3-0.6B's shape.
fn model(weights: Weights) -> ModelSpec {
    let mut spec = ModelSpec::small(Architecture::Qwen3, weights);
    (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) = (1024, 16, 8, 128, 3072);
    (spec.layers, spec.spare_tokens) = (28, 151_936 - 266);
    spec
}

fn measure(name: &str, gguf: &Path, folder: &Path) -> io::Result<()> {
    let (packed, copy) = (folder.join("packed"), folder.join("copy"));
    let options = PackOptions::default();
    let (mut model_bytes, mut source_bytes) = (0, 0);
    let (mut packs, mut copies) = (Vec::new(), Vec::new());
    // The first round brings the source into memory.
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let report = pack(gguf, &packed, &options, &Control::new(), &mut |_| {}).expect("a packed model");
        let pack_s = started.elapsed().as_secs_f64();
        (model_bytes, source_bytes) = (report.model_bytes, report.source_bytes);
        fs::remove_dir_all(&packed)?;
        settle(folder)?;
        let started = Instant::now();
        plain_copy(gguf, &copy, model_bytes)?;
        File::open(folder)?.sync_all()?;
        let copy_s = started.elapsed().as_secs_f64();
        fs::remove_file(&copy)?;
        settle(folder)?;
        if round > 0 {
            packs.push(pack_s);
            copies.push(copy_s);
        }
    }
    let (pack_s, copy_s) = (median(&mut packs), median(&mut copies));
    pack(gguf, &packed, &options, &Control::new(), &mut |_| {}).expect("a packed model");
    let started = Instant::now();
    let report = verify(gguf, &packed, None, &Control::new(), &mut |_, _| {}).expect("a report");
    let verify_s = started.elapsed().as_secs_f64();
    fs::remove_dir_all(&packed)?;
    let rate = |seconds: f64| model_bytes as f64 / seconds / 1e9;
    writeln!(
        io::stdout(),
        "{name}: {:.0} MB from {:.0} MB; pack {pack_s:.3} s ({:.2} GB/s), plain copy {copy_s:.3} s ({:.2} GB/s): {:.0} % of the \
         copy; verify {verify_s:.3} s, {}/{} tensors ok",
        model_bytes as f64 / 1e6,
        source_bytes as f64 / 1e6,
        rate(pack_s),
        rate(copy_s),
        100.0 * copy_s / pack_s,
        report.good(),
        report.tensors.len(),
    )
}

/// Reads all of `source` and writes `len_bytes`: its bytes, and where they do not suffice, the last of them again.
fn plain_copy(source: &Path, target: &Path, len_bytes: u64) -> io::Result<()> {
    let (mut from, mut to) = (File::open(source)?, File::create_new(target)?);
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = len_bytes as usize;
    loop {
        let read = from.read(&mut piece)?;
        if read == 0 {
            break;
        }
        let len = read.min(left);
        to.write_all(&piece[..len])?;
        left -= len;
    }
    while left > 0 {
        let len = PIECE_BYTES.min(left);
        to.write_all(&piece[..len])?;
        left -= len;
    }
    to.sync_all()
}

/// What removing a file leaves to be done is not the next one's work.
fn settle(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
