//! Full ELF files of a layer kernel: all context lengths from one prepared image, and one the long way.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use npuhal_amdxdna::format::elf::{ArgumentSymbol, PartialElfSpec, PatchEntry};
use npuhal_amdxdna::format::registers::{Register, ShimBd};
use npuhal_amdxdna::format::reloc::{PARTIAL_ARGUMENT_BASE, assemble as relocate};
use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2P, Header, Version};
use npuhal_xdna2::context_map::ContextMap;
use npuhal_xdna2::full_elf::{COLUMNS, FullElfRequest, PdiMode, assemble};
use npuhal_xdna2::instruction_elf::InstructionElf;
use npuhal_xdna2::layer_images::{LayerImages, kernel_name};
use npuhal_xdna2::md5::md5;
use std::hint::black_box;

const CONTEXTS: u32 = 4096;
/// Weight transfers, so many that the stream has about the 34 KB of the published layer kernel.
const WEIGHT_TRANSFERS: u32 = 345;

/// Control code of the shape of a layer kernel: eight words with the context length, four rows written to the KV cache, four
/// reads of it in blocks, and many reads of weights.
fn stream(context: u32) -> Vec<u8> {
    let mut code = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2P, 8));
    for row in 2..6 {
        for column in [3, 4] {
            let address = Register::DataMemory(0x400).at(column, row).expect("a core's memory");
            code.write(address, context);
        }
    }
    let mut transfer = |column: u8, bd: u8, words: u32, argument: u32, offset: u64| {
        let descriptor = ShimBd { length_words: words, valid: true, ..ShimBd::default() };
        code.shim_bd(column, bd, &descriptor).expect("a descriptor");
        code.patch_shim_bd(column, bd, argument, offset).expect("a patch");
    };
    for region in 0..4u8 {
        let start = u64::from(region) << 22;
        transfer(3, region, 0x100, 4, start + u64::from(context - 1) * 0x400);
        transfer(4, region, 0x1000 * context.div_ceil(16), 4, start);
    }
    for i in 0..WEIGHT_TRANSFERS {
        transfer((i % 8) as u8, 8 + (i / 8 % 8) as u8, 0x2800, 1, u64::from(i) * 0xA000);
    }
    code.encode().expect("a stream")
}

/// Instruction ELF with the code once, or twice as captured files have it.
fn instruction_elf(context: u32, copies: usize) -> Vec<u8> {
    let captured = stream(context);
    let parsed = npuhal_amdxdna::format::txn::Stream::parse(&captured).expect("a stream");
    let relocated = relocate(parsed).expect("relocations");
    let mut symbols: Vec<ArgumentSymbol> = Vec::new();
    let patches = relocated.patches.iter().map(|patch| {
        let name = (patch.argument + PARTIAL_ARGUMENT_BASE).to_string();
        let symbol = ArgumentSymbol { name, size: patch.size };
        let index = symbols.iter().position(|known| *known == symbol).unwrap_or_else(|| {
            symbols.push(symbol);
            symbols.len() - 1
        });
        PatchEntry { symbol: index, offset: patch.offset, schema: patch.schema.number(), addend: patch.addend }
    });
    let patches = patches.collect();
    let mut code = relocated.code;
    (1..copies).for_each(|_| code.extend_from_slice(&captured));
    let uid = md5(&code);
    PartialElfSpec { code, symbols, patches, uid }.build().and_then(|elf| elf.to_bytes()).expect("a file")
}

fn assemble_all(criterion: &mut Criterion) {
    for (name, copies) in [("one copy", 1), ("two copies", 2)] {
        let [one, two, seventeen] = [1, 2, 17].map(|context| instruction_elf(context, copies));
        let map = ContextMap::derive(&one, &two, &seventeen).expect("rules");
        let images = LayerImages::new(map.clone(), CONTEXTS).expect("images");
        let mut group = criterion.benchmark_group(format!("assemble/{} B stream/{name}", stream(1).len()));
        group.sample_size(10);
        group.throughput(Throughput::Elements(u64::from(CONTEXTS)));
        group.bench_function("all contexts 1 to 4096", |bencher| {
            bencher.iter(|| {
                let mut sum = 0usize;
                images.for_each(1..=CONTEXTS, |_, image| sum += black_box(image).len()).expect("images");
                sum
            });
        });
        group.throughput(Throughput::Elements(1));
        let mut cursor = images.cursor();
        let mut context = 0;
        group.bench_function("one context, exchanged words", |bencher| {
            bencher.iter(|| {
                context = context % CONTEXTS + 1;
                images.seek(&mut cursor, context).expect("an image").len()
            });
        });
        group.bench_function("one context, words that differ", |bencher| {
            bencher.iter(|| {
                context = context % (CONTEXTS - 1) + 1;
                images.changes(context, context + 1).expect("changes")
            });
        });
        group.bench_function("one context, the long way", |bencher| {
            bencher.iter(|| {
                context = context % CONTEXTS + 1;
                let file = map.file(context).expect("a file");
                let input = InstructionElf::parse(&file).expect("an instruction ELF");
                let kernel = kernel_name(context);
                let request = FullElfRequest { kernel: &kernel, mode: PdiMode::None, pdi: &[], columns: COLUMNS };
                assemble(&input, &request).expect("a full ELF")
            });
        });
        group.finish();
    }
}

criterion_group!(benches, assemble_all);
criterion_main!(benches);
