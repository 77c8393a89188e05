//! Names, notes, compression, and files that are refused.

use super::*;
use std::io::Write as _;

#[test]
fn kernel_symbols_are_taken_apart() {
    assert_eq!(mangle_kernel("rt", 4), "_Z2rtPcPcPcPc");
    for (symbol, name, args) in [
        ("_Z2rtPcPcPcPc", "rt", 4),
        ("_Z3dpuPvS_S_", "dpu", 3),
        ("_Z3dpuPKcPiPv", "dpu", 3),
        ("_Z3dpuPKcS0_PS_", "dpu", 3),
        ("_Z7fl00017v", "fl00017", 0),
        ("_Z4copy", "copy", 0),
    ] {
        assert_eq!(parse_kernel_symbol(symbol), Ok((name.to_owned(), args)));
    }
    for symbol in [
        "rt",
        "_Z",
        "_Zrt",
        "_Z9rt",
        "_Z2rti",
        "_Z2rtPci",
        "_Z2rtP",
        "_Z0",
        "_Z2rtPcS",
        "_Z2rtPcS0_",
        "_Z2rtPKcS_",
        "_Z99999999999999999999x",
        "_Z1éPc",
    ] {
        assert!(matches!(parse_kernel_symbol(symbol), Err(ElfError::BadKernel { .. })), "{symbol}");
    }
}

#[test]
fn sections_are_known_by_a_part_of_their_name() {
    for (name, kind) in [
        (".ctrltext", SectionKind::ControlText),
        (".ctrltext.12", SectionKind::ControlText),
        (".ctrldata.0", SectionKind::ControlData),
        (".ctrlpkt.pm.3", SectionKind::ControlPacketPm),
        (".pdi.1", SectionKind::Pdi),
        (".preempt_restore.0", SectionKind::PreemptRestore),
        (".symtab", SectionKind::Other),
    ] {
        assert_eq!(SectionKind::of_name(name), kind);
    }
}

#[test]
fn notes_round_trip_and_odd_ones_are_refused() {
    let notes = NoteList(vec![
        Note { owner: "XRT".to_owned(), kind: code::NOTE_COLUMNS, desc: vec![8, 0, 0, 0] },
        Note { owner: "other".to_owned(), kind: 1, desc: vec![1] },
    ]);
    let section = |data| Section::new(".note", code::SHT_NOTE, 0, 1, data);
    let bytes = notes.to_bytes();
    assert_eq!(NoteList::parse(&section(bytes.clone())), Ok(notes));
    for cut in [4, 11, 13, 19] {
        assert!(matches!(NoteList::parse(&section(bytes[..cut].to_vec())), Err(ElfError::BadNote { .. })), "{cut}");
    }
    let mut huge = bytes.clone();
    huge[0..8].fill(0xFF);
    assert!(NoteList::parse(&section(huge)).is_err());
    let mut unterminated = bytes;
    unterminated[15] = b'!';
    assert!(NoteList::parse(&section(unterminated)).is_err());
}

/// A compressed section that states `size` bytes.
fn compressed(method: u32, size: u32, packed: &[u8]) -> Section {
    let mut data: Vec<u8> = [method, size, 16].iter().flat_map(|w| w.to_le_bytes()).collect();
    data.extend_from_slice(packed);
    Section::new(".ctrltext", code::SHT_PROGBITS, code::SHF_COMPRESSED, 4, data)
}

#[test]
fn compressed_sections_expand_within_their_limit() {
    let plain: Vec<u8> = (0..40_000u32).map(|i| (i / 97) as u8).collect();
    let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    zlib.write_all(&plain).unwrap();
    let zlib = zlib.finish().unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(plain.as_slice(), ruzstd::encoding::CompressionLevel::Fastest);
    for (method, packed) in [(1, zlib.as_slice()), (2, &zstd)] {
        let size = plain.len() as u32;
        assert_eq!(compressed(method, size, packed).content(plain.len()).unwrap(), plain);
        let refused = [
            compressed(method, size, packed).content(plain.len() - 1),
            compressed(method, size - 1, packed).content(1 << 20).map(|c| c.into_owned().into()),
            compressed(method, size + 1, packed).content(1 << 20).map(|c| c.into_owned().into()),
            compressed(method, u32::MAX, packed).content(usize::MAX).map(|c| c.into_owned().into()),
            compressed(method, size, &packed[..packed.len() / 2]).content(1 << 20).map(|c| c.into_owned().into()),
            compressed(method, size, &plain).content(1 << 20).map(|c| c.into_owned().into()),
            compressed(3, size, packed).content(1 << 20).map(|c| c.into_owned().into()),
        ]
        .map(|result: Result<std::borrow::Cow<'_, [u8]>, _>| result.map(|c| c.len()));
        for (i, result) in refused.into_iter().enumerate() {
            assert!(matches!(result, Err(ElfError::BadCompression { .. })), "method {method}, case {i}: {result:?}");
        }
    }
    let cut = Section { data: vec![1, 0, 0, 0], ..compressed(1, 0, &[]) };
    assert!(matches!(cut.content(100), Err(ElfError::BadCompression { .. })));
}

/// A file of two instances, whose parts tests then spoil.
fn sample() -> Elf {
    FullElfSpec {
        kernel: "k".to_owned(),
        instance: "i".to_owned(),
        arguments: 1,
        columns: 4,
        pdi: vec![1; 16],
        code: vec![2; 64],
        symbols: vec![ArgumentSymbol { name: "0".to_owned(), size: 64 }],
        patches: vec![PatchEntry { symbol: 0, offset: 0, schema: 5, addend: 0 }],
        uid: (4, [3; 16]),
    }
    .build()
    .unwrap()
}

#[test]
fn identification_is_checked_by_field() {
    let bytes = sample().to_bytes().unwrap();
    for (at, field) in
        [(0, "magic number"), (4, "class"), (5, "byte order"), (16, "file type"), (46, "section header size")]
    {
        let mut bad = bytes.clone();
        bad[at] ^= 0x40;
        assert!(matches!(Elf::parse(&bad), Err(ElfError::NotElf { field: f, .. }) if f == field), "{field}");
    }
    assert!(matches!(Elf::parse(&bytes[..51]), Err(ElfError::OutOfFile { .. })));
    let mut other = bytes;
    other[7] = OSABI_AIE2PS;
    assert!(matches!(Program::parse(&other), Err(ElfError::NotElf { field: "EI_OSABI", found: 64, .. })));
}

#[test]
fn contradictions_are_refused() {
    assert!(Program::new(sample()).is_ok());
    let refused = |spoil: &dyn Fn(&mut Elf)| {
        let mut elf = sample();
        spoil(&mut elf);
        Program::new(elf).unwrap_err()
    };
    let index = |elf: &Elf, name: &str| elf.find(name).unwrap().0 as usize;
    // Group of an instance that does not exist, members that do not exist, a member of two groups.
    assert!(matches!(refused(&|e| e.sections[10].info = 9), ElfError::BadIndex { index: 9, .. }));
    assert!(matches!(refused(&|e| e.sections[10].info = 1), ElfError::BadIndex { .. }));
    assert!(matches!(refused(&|e| e.sections[10].data[4] = 13), ElfError::BadIndex { index: 13, count: 13, .. }));
    assert!(matches!(refused(&|e| e.sections[10].data.extend([5, 0, 0, 0])), ElfError::DuplicateName { .. }));
    assert!(matches!(refused(&|e| e.sections[10].data.push(0)), ElfError::RaggedTable { .. }));
    assert!(matches!(
        refused(&|e| {
            let group = e.sections[10].clone();
            e.sections.push(group);
        }),
        ElfError::DuplicateName { what: "instance", .. }
    ));
    assert!(matches!(
        refused(&|e| {
            let mut second = e.sections[5].clone();
            second.name = ".ctrltext.1".to_owned();
            e.sections.push(second);
            e.sections[10].data.extend([13, 0, 0, 0]);
        }),
        ElfError::DuplicateSection { kind: ".ctrltext", .. }
    ));
    // Symbols and relocations.
    assert!(matches!(refused(&|e| e.sections[8].data[5] = 7), ElfError::BadIndex { index: 7, .. }));
    assert!(matches!(refused(&|e| e.sections[8].data[5] = 0), ElfError::BadIndex { index: 0, .. }));
    assert!(matches!(refused(&|e| e.sections[7].data[16 + 14] = 99), ElfError::BadIndex { index: 99, .. }));
    assert!(matches!(refused(&|e| e.sections[7].data[16] = 200), ElfError::BadName { at_bytes: 200, .. }));
    assert!(matches!(
        refused(&|e| {
            let at = index(e, ".dynsym");
            e.sections.remove(at);
        }),
        ElfError::MissingSection { name: ".dynsym" } | ElfError::BadIndex { .. }
    ));
    // Column count.
    assert!(matches!(refused(&|e| e.sections[11].data[16] = 0), ElfError::Invalid { .. }));
    assert!(matches!(refused(&|e| e.sections[11].data[8] = 5), ElfError::BadNote { .. }));
}

#[test]
fn overlapping_parts_are_refused_both_ways() {
    let mut elf = sample();
    elf.sections[5].offset = elf.sections[4].offset + 4;
    assert!(matches!(elf.to_bytes(), Err(ElfError::Overlap { .. })));
    let mut bytes = sample().to_bytes().unwrap();
    let header = sample().header.sections_at as usize + 5 * 40 + 16;
    bytes[header] = bytes[header].wrapping_sub(4);
    assert!(matches!(Elf::parse(&bytes), Err(ElfError::Overlap { .. })));
}

#[test]
fn schema_in_the_addend_is_taken_apart() {
    let mut elf = sample();
    elf.header.abi_version = ABI_SCHEMA_IN_ADDEND;
    elf.sections[8].data[8..12].copy_from_slice(&0xF000_0035u32.to_le_bytes());
    let program = Program::new(elf).unwrap();
    let [entry] = program.relocations() else { panic!("one relocation") };
    assert_eq!((entry.schema, entry.addend), (5, 0x0F00_0003));
    // A major version of 0 has no groups: one instance owns everything.
    assert_eq!((program.kernels()[0].name.as_str(), program.kernels()[0].instances[0].name.as_str()), ("k", "i"));
    assert_eq!(program.kernels()[0].instances[0].control_code_id, None);
}
