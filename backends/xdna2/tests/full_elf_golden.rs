//! Files derived from a vendor's captured code: rules, instruction ELF files and full ELF files.

mod common;

use common::{read, sha256, shared_golden};
use npuhal_amdxdna::format::elf::Program;
use npuhal_amdxdna::format::txn::{OpKind, Stream};
use npuhal_xdna2::context_map::{ContextMap, ContextMapError};
use npuhal_xdna2::context_rules::{ContextRule, ContextRuleError, ContextRules};
use npuhal_xdna2::full_elf::{COLUMNS, FullElfRequest, PdiMode, assemble};
use npuhal_xdna2::instruction_elf::InstructionElf;
use npuhal_xdna2::layer_images::LayerImages;
use std::path::Path;

const KV_ARGUMENT: u32 = 4;

fn layer_files(folder: &Path) -> [Vec<u8>; 3] {
    [1, 2, 17].map(|context| read(folder.join(format!("layer_ctx{context}.elf"))))
}

fn map(folder: &Path) -> ContextMap {
    let [one, two, seventeen] = layer_files(folder);
    ContextMap::derive(&one, &two, &seventeen).unwrap()
}

#[test]
fn the_derived_files_have_the_published_number_of_context_words() {
    let Some(folder) = shared_golden("published_number_of_context_words", "xdna2/derived") else { return };
    let map = map(&folder);
    let rules = map.rules();
    assert_eq!((rules.words().len(), rules.linear_count(), rules.block_count()), (37, 28, 9));
    let steps = rules.words().iter().filter_map(|word| match word.rule {
        ContextRule::Linear { step } => Some(step),
        ContextRule::Block => None,
    });
    let mut steps: Vec<u32> = steps.collect();
    steps.sort_unstable();
    // Two copies of eight lengths and four row offsets, and four addends.
    assert_eq!(steps, [vec![1; 16], vec![0x400; 12]].concat());
    for (file, context) in layer_files(&folder).iter().zip([1, 2, 17]) {
        assert!(map.file(context).unwrap() == *file, "context {context}");
        let uid = Program::parse(file).unwrap().uid().unwrap();
        assert_eq!(map.uids([context, 5, 9]), [uid, map.uids([5])[0], map.uids([9])[0]]);
    }
    assert!(matches!(map.file(0), Err(ContextMapError::Context { context: 0 })));
}

/// Stream of the published set with its uninitialised header words set.
fn published(folder: &Path, name: &str) -> Vec<u8> {
    let mut stream = read(folder.join(name));
    stream[..8].copy_from_slice(&[0, 1, 4, 6, 8, 1, 0, 0]);
    stream
}

/// The stream for a context of 17 from those for 1 and 2: what changes between these goes on by the same step; a descriptor
/// that reads 16 rows of the KV cache reads 32.
fn predict_seventeen(one: &[u8], two: &[u8]) -> Vec<u8> {
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut made = one.to_vec();
    let mut steps = Vec::new();
    for at in (0..one.len()).step_by(4) {
        let step = word(two, at).wrapping_sub(word(one, at));
        if step != 0 {
            steps.push(step);
            made[at..at + 4].copy_from_slice(&word(one, at).wrapping_add(16 * step).to_le_bytes());
        }
    }
    let row_bytes = *steps.iter().max().unwrap();
    let mut stream = Stream::parse(&made).unwrap();
    for i in 1..stream.ops.len() {
        let is_kv = matches!(&stream.ops[i].kind, OpKind::DdrPatch(patch) if patch.argument == KV_ARGUMENT);
        if let OpKind::BlockWrite { data, .. } = &mut stream.ops[i - 1].kind
            && is_kv
            && data.get(0) == Some(16 * row_bytes / 4)
        {
            data.to_mut()[0] *= 2;
        }
    }
    stream.encode().unwrap()
}

#[test]
fn all_other_published_lengths_follow_from_one_and_two() {
    let Some(folder) = shared_golden("all_other_published_lengths", "xdna2") else { return };
    let streams = folder.join("fused_insts");
    let (one, two) = (published(&streams, "layer_L1.bin"), published(&streams, "layer_L2.bin"));
    let seventeen = predict_seventeen(&one, &two);
    let derived = InstructionElf::parse(&read(folder.join("derived/layer_ctx17.elf"))).unwrap();
    // The second copy in the file still has its addresses.
    assert!(derived.text()[derived.transaction().len()..] == seventeen);
    let rules = ContextRules::derive([&one, &two, &seventeen], &[]).unwrap();
    assert_eq!((rules.linear_count(), rules.block_count()), (12, 4));
    let map = map(&folder.join("derived"));
    for context in [4, 8, 16, 32, 64, 256, 1024, 4096] {
        let file = map.file(context).unwrap();
        let made = InstructionElf::parse(&file).unwrap();
        let published = published(&streams, &format!("layer_L{context}.bin"));
        assert!(made.text()[made.transaction().len()..] == published, "context {context}");
        // The file is consistent with itself: relocating the published stream gives its tables.
        let relocated = npuhal_amdxdna::format::reloc::assemble(Stream::parse(&published).unwrap()).unwrap();
        assert!(made.transaction() == relocated.code, "context {context}");
        for ((rela, symbol), patch) in made.patches().zip(&relocated.patches) {
            let found = (rela.offset, rela.addend, symbol.argument, symbol.entry.size);
            assert_eq!(found, (patch.offset, patch.addend, patch.argument, patch.size), "context {context}");
        }
    }
}

#[test]
fn streams_whose_size_changes_are_refused() {
    let Some(folder) = shared_golden("streams_whose_size_changes", "xdna2/fused_insts") else { return };
    let [one, two, sixteen] = ["mha_L1.bin", "mha_L2.bin", "mha_L16.bin"].map(|name| read(folder.join(name)));
    let error = ContextRules::derive([&one, &two, &sixteen], &[]).unwrap_err();
    assert_eq!(error, ContextRuleError::SizesDiffer { len_bytes: [1684, 1684, 4308] });
    assert!(error.to_string().starts_with("context ELFs differ in size: 1684, 1684, 4308 bytes"), "{error}");
    // Of one size, and still not by rule: attention over more rows is other code.
    let error = ContextRules::derive([&one, &two, &one], &[]).unwrap_err();
    assert!(matches!(error, ContextRuleError::NotLinear { values: [a, b, c], .. } if a == c && a != b), "{error}");
}

#[test]
fn a_word_that_follows_no_rule_is_named() {
    let Some(folder) = shared_golden("a_word_that_follows_no_rule", "xdna2/derived") else { return };
    let [one, two, mut seventeen] = layer_files(&folder);
    let map = ContextMap::derive(&one, &two, &seventeen).unwrap();
    for word in map.rules().words() {
        let original = seventeen[word.at_bytes];
        seventeen[word.at_bytes] ^= 0x40;
        let error = ContextMap::derive(&one, &two, &seventeen).unwrap_err().to_string();
        let wanted = match word.rule {
            ContextRule::Linear { .. } => "is not linear in the context length",
            ContextRule::Block => "is not a 16-row block count",
        };
        assert!(error.starts_with(&format!("word at {:#x} {wanted}", word.at_bytes)), "{error}");
        seventeen[word.at_bytes] = original;
    }
}

#[test]
fn full_files_are_identical_to_the_recorded_ones() {
    let Some(folder) = shared_golden("full_files_are_identical", "xdna2/derived") else { return };
    let pdi = read(folder.join("pdi_pattern_250.bin"));
    for (context, mode, kernel, name, digest) in [
        (
            1,
            PdiMode::InitOnly,
            "flinit",
            "full_init_ctx1.elf",
            "7c15243b9ebf7479812cc1bc41e9c9ce8d93ffd407c5d67ae8e8a7292a074b0d",
        ),
        (
            1,
            PdiMode::None,
            "fl00001",
            "full_none_ctx1.elf",
            "b31ffd1ad7e916651ce9fb29adc2f296096ff04c8dee484662d5da513c0854ff",
        ),
        (
            1,
            PdiMode::Load,
            "fl00001",
            "full_load_ctx1.elf",
            "2c1fb4e82737c4c9d773e19e8d8a8ff88b3aff006378463c4d6e29dc0d62a10f",
        ),
        (
            17,
            PdiMode::None,
            "fl00017",
            "full_none_ctx17.elf",
            "0f60da160e1dc2dc5f8f16005e0b14b55ec020038dc8ebcf5533b4c38f538830",
        ),
    ] {
        let input = InstructionElf::parse(&read(folder.join(format!("layer_ctx{context}.elf")))).unwrap();
        let made = assemble(&input, &FullElfRequest { kernel, mode, pdi: &pdi, columns: COLUMNS }).unwrap();
        assert_eq!(sha256(&made), digest, "{name}");
        assert!(made == read(folder.join(name)), "{name}");
    }
}

#[test]
fn exchanged_words_give_the_assembled_file() {
    let Some(folder) = shared_golden("exchanged_words_give_the_assembled_file", "xdna2/derived") else { return };
    let map = map(&folder);
    let images = LayerImages::new(map.clone(), 4096).unwrap();
    let mut cursor = images.cursor();
    for context in [1, 2, 15, 16, 17, 31, 32, 33, 999, 4096] {
        let input = InstructionElf::parse(&map.file(context).unwrap()).unwrap();
        let kernel = npuhal_xdna2::layer_images::kernel_name(context);
        let request = FullElfRequest { kernel: &kernel, mode: PdiMode::None, pdi: &[], columns: COLUMNS };
        let image = images.seek(&mut cursor, context).unwrap();
        assert!(image == assemble(&input, &request).unwrap(), "context {context}");
        Program::parse(image).unwrap().find(&kernel).unwrap();
    }
    let mut seen = Vec::new();
    images
        .for_each(10..=31, |context, made| {
            assert!(made == images.image(context).unwrap(), "context {context}");
            seen.push(context);
        })
        .unwrap();
    assert_eq!(seen, (10..=31).collect::<Vec<_>>());
    // Eight lengths, four rows; at the border of a block also four reads.
    let within = images.changes(20, 21).unwrap();
    assert_eq!((within.code.len(), within.addends.len()), (12, 4));
    let across = images.changes(16, 17).unwrap();
    assert_eq!((across.code.len(), across.addends.len()), (16, 4));
    assert_eq!(images.changes(5, 5).unwrap(), Default::default());
    assert!(images.changes(5, 4097).is_err() && images.image(0).is_err());
}
