//! Control code files: recorded synthetic ones, and ones derived from a vendor's captured code.

mod common;

use common::{data, json, read, sha256, shared_golden, unhex};
use npuhal_amdxdna::format::elf::{
    ArgumentSymbol, Elf, FullElfSpec, PartialElfSpec, PatchEntry, Plan, Program, SymbolRole,
};
use npuhal_amdxdna::format::reloc::{PARTIAL_ARGUMENT_BASE, Schema, assemble};
use npuhal_amdxdna::format::txn::{OpKind, Stream};
use proptest::prelude::*;
use std::path::Path;

fn synthetic(name: &str) -> Vec<u8> {
    unhex(json(data("inputs.json"))[name]["hex"].as_str().unwrap())
}

#[test]
fn synthetic_files_are_laid_out_again_byte_for_byte() {
    for name in ["reloc_all.elf", "reloc_nopdi.elf", "reloc_plain.elf"] {
        let bytes = synthetic(name);
        let mut elf = Elf::parse(&bytes).unwrap();
        assert_eq!(elf.to_bytes().unwrap(), bytes, "{name}");
        for section in &mut elf.sections {
            (section.offset, section.name_at) = (0, 0);
        }
        let plan = Plan::in_index_order(&elf, 16, 16);
        elf.place(&plan).unwrap();
        assert_eq!(elf.to_bytes().unwrap(), bytes, "{name}");
    }
}

#[test]
fn kernels_and_instances_of_a_synthetic_file_are_found() {
    let program = Program::parse(&synthetic("reloc_all.elf")).unwrap();
    assert!(program.is_full() && program.has_pdi());
    assert_eq!(program.columns(), Some(8));
    assert_eq!(program.uid(), Some(std::array::from_fn(|i| i as u8)));
    let found = program.find("rt").unwrap();
    assert_eq!((found.kernel.arguments, found.instance.name.as_str()), (Some(4), "a"));
    assert_eq!(found.instance.control_code_id, Some(14));
    let name = |index: Option<u32>| program.elf().sections[index.unwrap() as usize].name.clone();
    assert_eq!(name(found.instance.control_text), ".ctrltext.0");
    assert_eq!(name(found.instance.control_data), ".ctrldata.0");
    assert_eq!(name(found.instance.preempt_save), ".preempt_save.0");
    assert_eq!(name(found.instance.preempt_restore), ".preempt_restore.0");
    assert_eq!(found.instance.control_packets_pm, [9]);
    assert!(program.find("rt:a").is_ok());
    let error = program.find("rt:b").unwrap_err().to_string();
    assert!(error.contains("rt:b") && error.contains("rt:a"), "{error}");
    for (symbol, role) in [
        ("3", SymbolRole::Argument("3")),
        ("argv1", SymbolRole::Argument("argv1")),
        ("scratch-pad-mem", SymbolRole::ScratchPadMemory),
        ("scratch-pad-ctrl", SymbolRole::ScratchPadControl),
        ("control-packet", SymbolRole::ControlPacket),
        ("ctrlpkt-pm-0", SymbolRole::ControlPacketPm(9)),
        (".pdi.1", SymbolRole::Pdi(4)),
    ] {
        assert_eq!(program.role(symbol), Ok(role));
    }
    assert!(program.role("ctrlpkt-pm-1").is_err() && program.role(".pdi.2").is_err());
    let without = Program::parse(&synthetic("reloc_nopdi.elf")).unwrap();
    assert!(without.is_full() && !without.has_pdi());
}

/// The symbols of an instruction file as a spec lists them, and its patches.
fn symbols_and_patches(program: &Program) -> (Vec<ArgumentSymbol>, Vec<PatchEntry>) {
    let symbols = program.symbols().iter().skip(1).map(|s| ArgumentSymbol { name: s.name.clone(), size: s.size });
    let patches = program.relocations().iter().map(|r| PatchEntry {
        symbol: r.symbol as usize - 1,
        offset: r.offset,
        schema: r.schema as u8,
        addend: r.addend,
    });
    (symbols.collect(), patches.collect())
}

#[test]
fn captured_code_assembles_into_the_derived_instruction_files() {
    let Some(folder) = shared_golden("captured_code_assembles", "xdna2") else { return };
    for length in [1, 2] {
        let expected = read(folder.join(format!("derived/layer_ctx{length}.elf")));
        let mut captured = read(folder.join(format!("fused_insts/layer_L{length}.bin")));
        captured[..8].copy_from_slice(&[0, 1, 4, 6, 8, 1, 0, 0]);
        let assembled = assemble(Stream::parse(&captured).unwrap()).unwrap();
        let mut symbols: Vec<ArgumentSymbol> = Vec::new();
        let mut patches = Vec::new();
        for patch in &assembled.patches {
            let symbol =
                ArgumentSymbol { name: (patch.argument + PARTIAL_ARGUMENT_BASE).to_string(), size: patch.size };
            let index = symbols.iter().position(|s| *s == symbol).unwrap_or_else(|| {
                symbols.push(symbol);
                symbols.len() - 1
            });
            let (offset, addend) = (patch.offset, patch.addend);
            patches.push(PatchEntry { symbol: index, offset, schema: patch.schema.number(), addend });
        }
        assert_eq!((symbols.len(), patches.len()), (8, 204));
        let program = Program::parse(&expected).unwrap();
        assert_eq!((symbols_and_patches(&program)), (symbols.clone(), patches.clone()));
        // Captures hold the transaction twice; only the first copy is patched.
        let code = [assembled.code, captured].concat();
        let spec = PartialElfSpec { code, symbols, patches, uid: program.uid().unwrap() };
        assert!(spec.build().unwrap().to_bytes().unwrap() == expected, "layer_ctx{length}.elf");
    }
}

/// The full file for a layer kernel, as the derived set makes it.
fn full_spec(folder: &Path, layer: &str, kernel: &str) -> (FullElfSpec, Stream) {
    let program = Program::parse(&read(folder.join(layer))).unwrap();
    assert!(!program.is_full());
    let (index, _) = program.elf().find(".ctrltext").unwrap();
    let (stream, used) = Stream::parse_prefix(&program.content(index, 1 << 20).unwrap()).unwrap();
    assert_eq!(used, 34_172);
    let (mut symbols, mut patches) = symbols_and_patches(&program);
    for symbol in &mut symbols {
        symbol.name = (symbol.name.parse::<u32>().unwrap() - PARTIAL_ARGUMENT_BASE).to_string();
    }
    symbols.insert(0, ArgumentSymbol { name: ".pdi.1".to_owned(), size: 0 });
    patches.iter_mut().for_each(|patch| patch.symbol += 1);
    let spec = FullElfSpec {
        kernel: kernel.to_owned(),
        instance: "sequence".to_owned(),
        arguments: 5,
        columns: 8,
        pdi: read(folder.join("pdi_pattern_250.bin")),
        code: stream.encode().unwrap(),
        symbols,
        patches,
        uid: (4, program.uid().unwrap()),
    };
    (spec, stream)
}

const LOAD_PDI: OpKind<'static> = OpKind::LoadPdi { id: 1, size_bytes: 0, address: 0 };
const PDI_PATCH: PatchEntry = PatchEntry { symbol: 0, offset: 0x18, schema: 8, addend: 0 };

#[test]
fn full_files_are_reproduced_from_instruction_files() {
    let Some(folder) = shared_golden("full_files_are_reproduced", "xdna2/derived") else { return };
    let check = |spec: &FullElfSpec, name: &str, digest: &str| {
        let bytes = spec.build().unwrap().to_bytes().unwrap();
        assert_eq!(sha256(&bytes), digest, "{name}");
        assert!(bytes == read(folder.join(name)), "{name}");
    };
    let (spec, mut stream) = full_spec(&folder, "layer_ctx1.elf", "fl00001");
    check(&spec, "full_none_ctx1.elf", "b31ffd1ad7e916651ce9fb29adc2f296096ff04c8dee484662d5da513c0854ff");

    stream.ops.insert(0, LOAD_PDI.into());
    let mut load = FullElfSpec { code: stream.encode().unwrap(), ..spec.clone() };
    load.patches.iter_mut().for_each(|patch| patch.offset += 16);
    load.patches.insert(0, PDI_PATCH);
    check(&load, "full_load_ctx1.elf", "2c1fb4e82737c4c9d773e19e8d8a8ff88b3aff006378463c4d6e29dc0d62a10f");

    stream.ops.truncate(1);
    let init = FullElfSpec {
        kernel: "flinit".to_owned(),
        arguments: 1,
        code: stream.encode().unwrap(),
        symbols: spec.symbols[..2].to_vec(),
        patches: vec![PDI_PATCH],
        ..spec
    };
    check(&init, "full_init_ctx1.elf", "7c15243b9ebf7479812cc1bc41e9c9ce8d93ffd407c5d67ae8e8a7292a074b0d");

    let (spec, _) = full_spec(&folder, "layer_ctx17.elf", "fl00017");
    check(&spec, "full_none_ctx17.elf", "0f60da160e1dc2dc5f8f16005e0b14b55ec020038dc8ebcf5533b4c38f538830");
}

#[test]
fn derived_files_are_rewritten_byte_for_byte() {
    let Some(folder) = shared_golden("derived_files_are_rewritten", "xdna2/derived") else { return };
    for name in [
        "full_init_ctx1.elf",
        "full_load_ctx1.elf",
        "full_none_ctx1.elf",
        "full_none_ctx17.elf",
        "layer_ctx1.elf",
        "layer_ctx2.elf",
        "layer_ctx17.elf",
    ] {
        let bytes = read(folder.join(name));
        assert!(Elf::parse(&bytes).unwrap().to_bytes().unwrap() == bytes, "{name}");
        Program::parse(&bytes).unwrap();
    }
}

#[test]
fn built_files_read_back() {
    let symbols = vec![
        ArgumentSymbol { name: ".pdi.1".to_owned(), size: 0 },
        ArgumentSymbol { name: "0".to_owned(), size: 64 },
        ArgumentSymbol { name: "0".to_owned(), size: 128 },
    ];
    let bd = Schema::ShimDma48.number();
    let patches = vec![PDI_PATCH, PatchEntry { symbol: 2, offset: 48, schema: bd, addend: 0x8000_0004 }];
    let full = FullElfSpec {
        kernel: "copy".to_owned(),
        instance: "run".to_owned(),
        arguments: 2,
        columns: 4,
        pdi: vec![7; 33],
        code: vec![9; 64],
        symbols: symbols.clone(),
        patches: patches.clone(),
        uid: (3, [0; 16]),
    };
    let bytes = full.build().unwrap().to_bytes().unwrap();
    let program = Program::parse(&bytes).unwrap();
    let found = program.find("copy:run").unwrap();
    assert_eq!((program.columns(), found.kernel.arguments), (Some(4), Some(2)));
    assert_eq!(program.content(found.instance.control_text.unwrap(), 64).unwrap(), vec![9; 64]);
    assert_eq!(program.pdi_sections().next().unwrap().1.data, vec![7; 33]);
    assert_eq!(symbols_and_patches(&program), (symbols.clone(), patches.clone()));

    let partial = PartialElfSpec { code: vec![9; 64], symbols, patches, uid: [5; 16] };
    let program = Program::parse(&partial.build().unwrap().to_bytes().unwrap()).unwrap();
    assert!(!program.is_full());
    assert_eq!(program.uid(), Some([5; 16]));
    let [kernel] = program.kernels() else { panic!("one implicit kernel") };
    assert_eq!((kernel.name.as_str(), kernel.arguments, kernel.instances.len()), ("", None, 1));
    assert!(kernel.instances[0].control_text.is_some());

    let wrong = PartialElfSpec { patches: vec![PatchEntry { symbol: 3, ..PDI_PATCH }], ..partial };
    assert!(wrong.build().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn mutated_files_are_refused_or_rewritten(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        table_change in any::<prop::sample::Index>(),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = synthetic("reloc_all.elf");
        // The header and the section headers decide most; hit them half of the time.
        let tables = bytes.len() - 17 * 40;
        for (i, (at, value)) in changes.into_iter().enumerate() {
            let at = match i % 3 {
                0 => at.index(bytes.len()),
                1 => tables + at.index(17 * 40),
                _ => at.index(52),
            };
            bytes[at] = value;
        }
        let at = table_change.index(16);
        bytes[tables + 40 * (at + 1) - 8] ^= 4;
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(elf) = Elf::parse(&bytes) {
            let again = Elf::parse(&elf.to_bytes().unwrap()).unwrap();
            prop_assert_eq!(&again, &elf);
        }
        if let Ok(program) = Program::parse(&bytes) {
            for index in 0..program.elf().sections.len() as u32 {
                if let Ok(content) = program.content(index, 1 << 16) {
                    let _ = npuhal_amdxdna::format::reloc::PatchTable::of_section(&program, index, &content);
                }
            }
        }
    }
}
