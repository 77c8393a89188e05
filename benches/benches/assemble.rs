//! Full ELF files of a layer kernel: all context lengths from one prepared image, and one the long way.

#[path = "../../backends/xdna2/tests/common/kernels.rs"]
#[allow(dead_code, reason = "the tests of the backend use the rest")]
mod kernels;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kernels::{instruction_elf, layer_stream, qwen3_0_6b_config};
use npuhal_xdna2::context_map::ContextMap;
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::full_elf::{COLUMNS, FullElfRequest, PdiMode, assemble};
use npuhal_xdna2::instruction_elf::InstructionElf;
use npuhal_xdna2::layer_images::{LayerImages, kernel_name};
use std::hint::black_box;

const CONTEXTS: u32 = 4096;

/// Qwen3-0.6B: 204 transfers, as in the published stream of 34,172 bytes.
fn dimensions() -> Dimensions {
    let config = qwen3_0_6b_config();
    Dimensions::of(&config).expect("dimensions of the lane")
}

fn assemble_all(criterion: &mut Criterion) {
    let dimensions = dimensions();
    let files = [1, 2, 17].map(|context| instruction_elf(&layer_stream(&dimensions, CONTEXTS, context)));
    let map = ContextMap::derive(&files[0], &files[1], &files[2]).expect("rules");
    let images = LayerImages::new(map.clone(), CONTEXTS).expect("images");
    let stream_bytes = layer_stream(&dimensions, CONTEXTS, 1).len();
    let mut group = criterion.benchmark_group(format!("assemble/{stream_bytes} B stream, twice in its file"));
    group.sample_size(10);
    group.throughput(Throughput::Elements(CONTEXTS.into()));
    group.bench_function("all contexts 1 to 4096", |bencher| {
        bencher.iter(|| {
            let mut sum = 0;
            images.for_each(1..=CONTEXTS, |_, image| sum += black_box(image).len()).expect("images");
            sum
        });
    });
    group.throughput(Throughput::Elements(1));
    let mut context = 0;
    let mut cursor = images.cursor();
    group.bench_function("next context, by exchanged words", |bencher| {
        bencher.iter(|| {
            context = context % CONTEXTS + 1;
            images.seek(&mut cursor, context).expect("an image").len()
        });
    });
    group.bench_function("one context, by exchanged words", |bencher| {
        bencher.iter(|| {
            context = context % CONTEXTS + 1;
            images.image(context).expect("an image")
        });
    });
    group.bench_function("words that differ between neighbours", |bencher| {
        bencher.iter(|| {
            context = context % (CONTEXTS - 1) + 1;
            images.changes(context, context + 1).expect("changes")
        });
    });
    group.bench_function("one context, the long way", |bencher| {
        bencher.iter(|| {
            context = context % CONTEXTS + 1;
            let input = InstructionElf::parse(&map.file(context).expect("a file")).expect("an instruction ELF");
            let kernel = kernel_name(context);
            let request = FullElfRequest { kernel: &kernel, mode: PdiMode::None, pdi: &[], columns: COLUMNS };
            assemble(&input, &request).expect("a full ELF")
        });
    });
    group.finish();
}

criterion_group!(benches, assemble_all);
criterion_main!(benches);
