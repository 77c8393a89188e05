//! Full ELF files of crafted instruction files: each rule by itself, and files that mean harm.

mod common;

use common::kernels::{instruction_elf, kernel_files, layer_stream, small_config};
use npuhal_amdxdna::format::elf::{
    ArgumentSymbol, Elf, PartialElfSpec, PatchEntry, Placement, Plan, Program, Rela, Symbol,
};
use npuhal_xdna2::context_map::ContextMap;
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::full_elf::{AssembleError, COLUMNS, FullElfRequest, PdiMode, assemble};
use npuhal_xdna2::instruction_elf::{InstructionElf, InstructionElfError};
use npuhal_xdna2::kernels::Kernels;
use npuhal_xdna2::layer_images::LayerImages;
use proptest::prelude::*;

const WRITE: [u32; 6] = [0, 0, 0x0301_0400, 0, 7, 0x18];

/// `DDR_PATCH` of `argument` with `offset`.
fn ddr_patch(argument: u32, offset: u32) -> Vec<u32> {
    let mut words = vec![0; 12];
    (words[0], words[1], words[6], words[8], words[10]) = (0x81, 0x30, 0x0601_D004, argument, offset);
    words
}

/// A transaction of these operations.
fn transaction(ops: &[Vec<u32>]) -> Vec<u8> {
    let body = ops.concat();
    let header = [0x0604_0100, 0x0108, ops.len() as u32, 16 + 4 * body.len() as u32];
    header.iter().chain(&body).flat_map(|word| word.to_le_bytes()).collect()
}

fn spec(code: Vec<u8>, addend: u32) -> PartialElfSpec {
    PartialElfSpec {
        code,
        symbols: [("3", 64), ("8", 128)].map(|(name, size)| ArgumentSymbol { name: name.to_owned(), size }).into(),
        patches: vec![PatchEntry { symbol: 1, offset: 16, schema: 5, addend }],
        uid: [0xAB; 16],
    }
}

fn parse(elf: &Elf) -> Result<InstructionElf, InstructionElfError> {
    InstructionElf::parse(&elf.to_bytes().unwrap())
}

fn request(mode: PdiMode) -> FullElfRequest<'static> {
    FullElfRequest { kernel: "k", mode, pdi: &[1, 2, 3], columns: COLUMNS }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn section(elf: &Elf, name: &str) -> Vec<u8> {
    elf.find(name).unwrap().1.data.clone()
}

/// Lays a changed file out again.
fn placed(mut elf: Elf) -> Elf {
    let order = (1..elf.sections.len() as u32).map(|section| Placement { section, align: 16 }).collect();
    elf.place(&Plan { order, section_headers_align: 4 }).unwrap();
    elf
}

#[test]
fn bit_31_is_cleared_in_code_and_addend_from_argument_five_on() {
    let code = transaction(&[WRITE.into(), ddr_patch(5, 0x8000_0040), ddr_patch(0, 0x40)]);
    let input = parse(&spec(code.clone(), 0x8000_0040).build().unwrap()).unwrap();
    for (mode, first_op, relas) in [(PdiMode::None, 4, 0), (PdiMode::Load, 8, 1)] {
        let made = Elf::parse(&assemble(&input, &request(mode)).unwrap()).unwrap();
        let found = words(&section(&made, ".ctrltext.0"));
        let wanted = [WRITE.to_vec(), ddr_patch(5, 0x40), ddr_patch(0, 0x40)].concat();
        assert_eq!(found[first_op..], wanted, "{mode:?}");
        let rela = Rela::parse_table(made.find(".rela.dyn").unwrap().1).unwrap()[relas];
        assert_eq!((rela.addend, rela.symbol), (0x40, 3), "{mode:?}");
    }
    let code = transaction(&[ddr_patch(4, 0x8000_0000)]);
    let error = assemble(&parse(&spec(code, 0).build().unwrap()).unwrap(), &request(PdiMode::None)).unwrap_err();
    assert_eq!(error, AssembleError::FoldFlag { at_bytes: 16, argument: 4 });
}

#[test]
fn what_follows_an_unknown_operation_is_passed_on_as_it_is() {
    // A preemption point: the published walk does not know it.
    let code = transaction(&[vec![6], ddr_patch(5, 0x8000_0000)]);
    let input = parse(&spec(code.clone(), 0).build().unwrap()).unwrap();
    let made = Elf::parse(&assemble(&input, &request(PdiMode::None)).unwrap()).unwrap();
    assert_eq!(section(&made, ".ctrltext.0"), code);
}

#[test]
fn loading_comes_first_and_moves_what_is_patched() {
    let code = transaction(&[WRITE.into(), ddr_patch(0, 0)]);
    let input = parse(&spec([code.clone(), code.clone()].concat(), 0x30).build().unwrap()).unwrap();
    assert_eq!((input.text().len(), input.transaction()), (2 * code.len(), code.as_slice()));
    let made = |mode| Elf::parse(&assemble(&input, &request(mode)).unwrap()).unwrap();
    let load = made(PdiMode::Load);
    let size = code.len() as u32;
    assert_eq!(words(&section(&load, ".ctrltext.0"))[..8], [0x0604_0100, 0x108, 3, size + 16, 0x0001_0008, 0, 0, 0]);
    let relas = Rela::parse_table(load.find(".rela.dyn").unwrap().1).unwrap();
    assert_eq!(relas[0], Rela { offset: 0x18, symbol: 1, kind: 8, addend: 0 });
    assert_eq!(relas[1], Rela { offset: 32, symbol: 3, kind: 5, addend: 0x30 });
    let init = made(PdiMode::InitOnly);
    assert_eq!(words(&section(&init, ".ctrltext.0")), [0x0604_0100, 0x108, 1, 32, 0x0001_0008, 0, 0, 0]);
    assert_eq!(section(&init, ".dynstr"), b"\0.pdi.1\x000\0");
    assert_eq!(section(&init, ".strtab"), b"\0_Z1kPc\0sequence\0");
    let none = made(PdiMode::None);
    assert_eq!(section(&none, ".ctrltext.0"), code);
    assert_eq!(section(&none, ".dynstr"), b"\0.pdi.1\x000\x005\0");
    // The highest argument decides, not the number of symbols.
    assert_eq!(section(&none, ".strtab"), b"\0_Z1kPcPcPcPcPcPc\0sequence\0");
    assert_eq!(words(&section(&none, ".dynamic")), [7, 8, 8, 12]);
    assert_eq!(words(&section(&none, ".group.0")), [1, 5]);
}

#[test]
fn symbols_keep_their_fields_and_the_uid_is_copied() {
    let mut elf = spec(transaction(&[WRITE.into()]), 0).build().unwrap();
    let (index, table) = elf.find(".dynsym").unwrap();
    let mut symbols = Symbol::parse_table(table).unwrap();
    (symbols[0].size, symbols[0].name_at) = (99, 7777);
    (symbols[2].value, symbols[2].info, symbols[2].other) = (5, 0x21, 3);
    elf.sections[index as usize].data = Symbol::write_table(&symbols);
    let made = Elf::parse(&assemble(&parse(&elf).unwrap(), &request(PdiMode::None)).unwrap()).unwrap();
    let kept = Symbol::parse_table(made.find(".dynsym").unwrap().1).unwrap();
    // A name of the null symbol would point into another table.
    assert_eq!(kept[0], Symbol { name_at: 0, ..symbols[0] });
    assert_eq!((kept[1].name_at, kept[1].section, kept[1].info, kept[1].size), (1, 5, 0x11, 0));
    assert_eq!((kept[3].value, kept[3].size, kept[3].info, kept[3].other, kept[3].section), (5, 128, 0x21, 3, 5));
    assert_eq!(section(&made, ".note.xrt.UID"), section(&elf, ".note.xrt.UID"));

    let without = elf.find(".note.xrt.UID").unwrap().0 as usize;
    elf.sections.remove(without);
    let made = Elf::parse(&assemble(&parse(&placed(elf)).unwrap(), &request(PdiMode::None)).unwrap()).unwrap();
    assert_eq!(words(&section(&made, ".note.xrt.UID")), [4, 16, 3, u32::from_le_bytes(*b"XRT\0"), 0, 0, 0, 0]);
}

#[test]
fn inputs_that_cannot_be_assembled_are_refused_by_what_is_wrong() {
    let good = spec(transaction(&[WRITE.into(), ddr_patch(0, 0)]), 0);
    let refuse = |change: &dyn Fn(&mut PartialElfSpec)| {
        let mut changed = good.clone();
        change(&mut changed);
        parse(&changed.build().unwrap()).unwrap_err().to_string()
    };
    assert!(refuse(&|s| s.code[0] = 1).contains(".ctrltext starts with 0x06040101, wanted 0x06040100"));
    assert!(refuse(&|s| s.code[12] = 0xFF).contains("the first transaction declares 255 bytes; .ctrltext has 88"));
    assert!(refuse(&|s| s.code[12] = 15).contains("declares 15 bytes"));
    assert!(refuse(&|s| s.code.truncate(8)).contains("declares 16 bytes; .ctrltext has 8"));
    assert!(
        refuse(&|s| s.patches[0].offset = 88)
            .contains("relocation 0 patches byte 0x58; the first transaction has 0x58 bytes")
    );
    for name in ["2", "36", "x", "", "+3", "99999999999", "3 "] {
        let found = refuse(&|s| s.symbols[0].name = name.to_owned());
        assert!(
            found.contains(&format!("symbol 1 is named {name:?}; wanted the number of a buffer argument, 3 to 35")),
            "{found}"
        );
    }
    let refuse = |change: &dyn Fn(&mut Elf)| {
        let mut elf = good.build().unwrap();
        change(&mut elf);
        parse(&placed(elf)).unwrap_err().to_string()
    };
    for name in [".ctrltext", ".dynstr", ".dynsym", ".rela.dyn"] {
        let renamed = |elf: &mut Elf| {
            let (index, _) = elf.find(name).unwrap();
            elf.sections[index as usize].name = ".other".to_owned();
        };
        assert_eq!(refuse(&renamed), format!("full ELF: no {name} section"));
    }
    let set = |name: &'static str, at: usize, value: u8| {
        move |elf: &mut Elf| {
            let (index, _) = elf.find(name).unwrap();
            elf.sections[index as usize].data[at] = value;
        }
    };
    assert!(
        refuse(&set(".note.xrt.UID", 0, 5)).contains("unexpected UID note layout: 32 bytes with sizes Some([5, 16])")
    );
    assert!(refuse(&set(".rela.dyn", 5, 0)).contains("relocation 0 names symbol 0"));
    assert!(refuse(&set(".rela.dyn", 5, 9)).contains("relocation 0 names symbol 9"));
    assert!(refuse(&set(".dynsym", 46, 3)).contains("which is not one of the 3 symbols of .ctrltext"));
    assert!(refuse(&|elf| elf.header.os_abi = 64).contains("EI_OSABI is 0x40, wanted 0x45"));
    assert!(refuse(&|elf| elf.header.abi_version = 1).contains("EI_ABIVERSION is 0x1, wanted 0x2"));
    let compressed = |elf: &mut Elf| elf.sections[2].flags |= 0x800;
    assert!(refuse(&compressed).contains(".ctrltext is compressed"));
    let longer_note = |elf: &mut Elf| elf.sections[7].data.extend([0; 4]);
    assert!(refuse(&longer_note).contains("unexpected UID note layout: 36 bytes"));
    // It was taken here and refused in the assembled file.
    assert!(refuse(&set(".note.xrt.UID", 12, 0)).contains("the owner of the UID note is"));
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let input = parse(&spec(transaction(&[WRITE.into()]), 0).build().unwrap()).unwrap();
    let refuse = |request: FullElfRequest<'_>| assemble(&input, &request).unwrap_err();
    let long = "k".repeat(65);
    for kernel in ["", "0k", "a b", "é", "k\0", long.as_str()] {
        let error = refuse(FullElfRequest { kernel, ..request(PdiMode::None) });
        assert!(matches!(error, AssembleError::KernelName { .. }), "{kernel:?}: {error}");
    }
    for mode in [PdiMode::Load, PdiMode::InitOnly] {
        let error = refuse(FullElfRequest { pdi: &[], ..request(mode) });
        assert_eq!(error, AssembleError::EmptyPdi { kernel: "k".to_owned() });
    }
    assert_eq!(refuse(FullElfRequest { columns: 0, ..request(PdiMode::None) }), AssembleError::Columns { columns: 0 });
    let mut full = transaction(&[]);
    full[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let input = parse(&PartialElfSpec { patches: Vec::new(), ..spec(full, 0) }.build().unwrap()).unwrap();
    let error = assemble(&input, &request(PdiMode::Load)).unwrap_err();
    assert_eq!(error, AssembleError::TooLong { size_bytes: 16, ops: u32::MAX });
    let none = PartialElfSpec { symbols: Vec::new(), patches: Vec::new(), ..spec(transaction(&[]), 0) };
    let error = assemble(&parse(&none.build().unwrap()).unwrap(), &request(PdiMode::None)).unwrap_err();
    assert_eq!(error, AssembleError::NoArguments);
}

/// What may be done with a file that was accepted.
fn use_everywhere(file: &[u8]) -> Result<(), TestCaseError> {
    let Ok(input) = InstructionElf::parse(file) else { return Ok(()) };
    for mode in [PdiMode::None, PdiMode::Load, PdiMode::InitOnly] {
        if let Ok(made) = assemble(&input, &request(mode)) {
            // Headers, names and notes of fixed size, and as many names as symbols.
            prop_assert!(made.len() <= file.len() + 4096 + 16 * input.symbols().len());
            let program = Program::parse(&made).map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert!(program.is_full() && program.find("k:sequence").is_ok());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 300 } else { 2000 }))]
    #[test]
    fn hostile_files_are_refused_or_assembled(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        which in 0usize..4,
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let dimensions = Dimensions::of(&small_config()).unwrap();
        let mut files = kernel_files(&dimensions, 32);
        // One of the four files, or all three layer files alike, so that comparison does not end it.
        let targets = if which == 0 { 0..3 } else { which - 1..which };
        for index in targets {
            let file = &mut files.layer[index];
            let tables = file.len() - 8 * 40;
            for (i, (at, value)) in changes.iter().enumerate() {
                // The code is most of the file; what describes it is small.
                let at = match i % 3 {
                    0 => at.index(file.len()),
                    1 => tables + at.index(8 * 40),
                    _ => at.index(52),
                };
                file[at] = *value;
            }
            if let Some(cut) = &cut {
                file.truncate(cut.index(file.len()));
            }
        }
        use_everywhere(&files.layer[0])?;
        let [one, two, seventeen] = &files.layer;
        if let Ok(map) = ContextMap::derive(one, two, seventeen) {
            prop_assert!(map.rules().words().len() <= one.len() / 4);
            use_everywhere(&map.file(5).unwrap())?;
            if let Ok(images) = LayerImages::new(map, 40) {
                let mut cursor = images.cursor();
                prop_assert_eq!(images.seek(&mut cursor, 40).unwrap(), images.image(40).unwrap());
            }
        }
        let _ = Kernels::new(&files, &dimensions);
    }

    #[test]
    fn hostile_streams_are_refused_or_assembled(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>()), 1..20),
    ) {
        let dimensions = Dimensions::of(&small_config()).unwrap();
        let file = instruction_elf(&layer_stream(&dimensions, 32, 1));
        let mut elf = Elf::parse(&file).unwrap();
        for section in [".ctrltext", ".rela.dyn", ".dynsym"] {
            let (index, _) = elf.find(section).unwrap();
            let data = &mut elf.sections[index as usize].data;
            for (at, value) in &changes {
                let at = 4 * at.index(data.len() / 4);
                // Whole words, or a bit of one.
                let old = u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
                let new = if value % 2 == 0 { *value } else { old ^ 1 << (value >> 27) };
                data[at..at + 4].copy_from_slice(&new.to_le_bytes());
            }
        }
        use_everywhere(&elf.to_bytes().unwrap())?;
    }

    #[test]
    fn exchanged_words_are_those_of_any_stream_by_rule(
        rules in prop::collection::vec((any::<u32>(), prop::option::of(any::<u32>())), 1..20),
        contexts in prop::collection::vec(1u32..=2000, 4),
    ) {
        // Writes whose values follow a rule; steps of any size, so that they wrap.
        let code = |context: u32| {
            let value = |(first, step): &(u32, Option<u32>)| match step {
                Some(step) => first.wrapping_add((context - 1).wrapping_mul(*step)),
                None => first.wrapping_mul(context.div_ceil(16)),
            };
            let ops: Vec<Vec<u32>> = rules.iter().map(|rule| [0, 0, 0x0301_0400, 0, value(rule), 0x18].into()).collect();
            let one = transaction(&ops);
            [one.clone(), one].concat()
        };
        let file = |context| {
            let code = code(context);
            let uid = npuhal_xdna2::md5::md5(&code);
            PartialElfSpec { uid, ..spec(code, 0x40) }.build().unwrap().to_bytes().unwrap()
        };
        let map = ContextMap::derive(&file(1), &file(2), &file(17)).unwrap();
        let images = LayerImages::new(map.clone(), 2000).unwrap();
        let mut cursor = images.cursor();
        for context in contexts {
            prop_assert_eq!(map.file(context).unwrap(), file(context));
            let kernel = npuhal_xdna2::layer_images::kernel_name(context);
            let request = FullElfRequest { kernel: &kernel, pdi: &[], ..request(PdiMode::None) };
            let wanted = assemble(&InstructionElf::parse(&file(context)).unwrap(), &request).unwrap();
            prop_assert_eq!(images.seek(&mut cursor, context).unwrap(), wanted.as_slice());
        }
    }
}
