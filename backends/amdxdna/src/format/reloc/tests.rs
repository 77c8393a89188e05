//! Formulas on hand-made words, and the rules that refuse a table.

use super::*;
use crate::format::registers::{Direction, QueuePush, ShimBd};
use crate::format::txn::{Builder, DEV_GEN_AIE2, Header, Stream, Version};
use proptest::prelude::*;
use std::ops::Range;

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

fn patched(template: &[u32], schema: Schema, size: u32, addend: u32, value: u64) -> Vec<u32> {
    let template = bytes(template);
    let table = PatchTable::new(&template, [("x", schema, size, 0, addend)]).unwrap();
    words(&table.patched(&template, &[value]).unwrap())
}

#[test]
fn every_schema_follows_its_formula() {
    // Carry into the high word, template address and untouched upper half.
    assert_eq!(
        patched(&[9, 0x10, 0xABCD_0001], Schema::ShimDma48, 0, 0x8000_0004, 0x7E11_FFFF_F000),
        [9, 0xFFFF_F014, 0xABCD_7E13]
    );
    assert_eq!(
        patched(&[1, 2, 0xFFFF_FFF8, 0xABCD_5001], Schema::ControlPacket48, 0, 8, 0x7E12_0000_0000),
        [1, 2, 0x8000_0000, 0xABCD_7E14]
    );
    assert_eq!(patched(&[0xFFFE_1234], Schema::Scalar32, 0x1_FFFF, 77, 0x7E11_0003_5678), [0xFFFF_5678]);
    assert_eq!(patched(&[5], Schema::Scalar32, 0, 0, 9), [5]);
    assert_eq!(patched(&[7, 7], Schema::Address64, 0, 3, 0x7E11_0403_8000), [0x0403_8000, 0x7E11]);
    assert_eq!(
        patched(&[1, 4, 0x12_0000, 3, 4, 5, 6, 7, 0xF000_0001], Schema::ShimDma57, 0, 0x40, 0x7E11_0000_1000),
        [1, 0x1044, 0x12_7E11, 3, 4, 5, 6, 7, 0xF000_0001]
    );
}

#[test]
fn unused_schemas_are_refused_by_name() {
    for number in [0, 1, 6, 7, 9, 10, 11, 12, 255] {
        assert!(matches!(Schema::from_number(number), Err(RelocError::Schema { number: n, .. }) if n == number));
    }
    let error = Schema::from_number(6).unwrap_err().to_string();
    assert!(error.contains("shim_dma_57_aie4"), "{error}");
}

#[test]
fn a_table_is_refused_for_its_places() {
    let template = bytes(&[0; 8]);
    let one = |schema, size, at, addend| PatchTable::new(&template, [("x", schema, size, at, addend)]).unwrap_err();
    assert!(matches!(one(Schema::ShimDma48, 0, 24, 0), RelocError::OutOfSection { span_bytes: 12, .. }));
    assert!(matches!(one(Schema::ShimDma48, 0, 0xFFFF_FFFC, 0), RelocError::OutOfSection { .. }));
    assert!(matches!(one(Schema::ShimDma48, 0, 2, 0), RelocError::Unaligned { what: "its place", .. }));
    assert!(matches!(one(Schema::ShimDma48, 0, 0, 2), RelocError::Unaligned { what: "its addend", .. }));
    let two = |a: (Schema, u32, u32), b: (Schema, u32, u32), name| {
        PatchTable::new(&template, [("x", a.0, a.1, a.2, 0), (name, b.0, b.1, b.2, 0)])
    };
    let bd = |at| (Schema::ShimDma48, 0, at);
    let scalar = |mask, at| (Schema::Scalar32, mask, at);
    assert!(matches!(two(bd(0), bd(0), "y"), Err(RelocError::Overlap { at_bytes: 4, .. })));
    assert!(matches!(two(bd(0), bd(4), "x"), Err(RelocError::Overlap { at_bytes: 8, .. })));
    assert!(matches!(two(bd(0), scalar(1, 0), "x"), Err(RelocError::MixedSchemas { .. })));
    assert!(two(bd(0), scalar(u32::MAX, 0), "y").is_ok());
    assert!(matches!(two(scalar(3, 0), scalar(2, 0), "x"), Err(RelocError::Overlap { .. })));
    assert!(two(scalar(1, 0), scalar(2, 0), "x").is_ok());
}

#[test]
fn values_are_checked_before_anything_is_written() {
    let template = bytes(&[0; 8]);
    let table =
        PatchTable::new(&template, [("a", Schema::ShimDma48, 0, 0, 0), ("b", Schema::ShimDma48, 0, 16, 0)]).unwrap();
    let mut image = template.clone();
    let mut apply = |values: &[u64]| table.apply(values, &mut image, &mut Vec::new());
    assert!(matches!(apply(&[0x1000]), Err(RelocError::ValueCount { wanted: 2, found: 1 })));
    assert!(matches!(apply(&[0x1000, 0x1002]), Err(RelocError::Unaligned { what: "address", .. })));
    assert!(matches!(apply(&[0x1000, (1 << 48) - 0x8000_0000]), Err(RelocError::TooLarge { bits: 48, .. })));
    assert!(matches!(apply(&[0x1000, !3]), Err(RelocError::TooLarge { .. })));
    assert_eq!(image, template);
    assert!(table.apply(&[0x1000, (1 << 48) - 0x8000_0004], &mut image, &mut Vec::new()).is_ok());
    let short = table.apply(&[0, 0], &mut image[..28], &mut Vec::new());
    assert!(matches!(short, Err(RelocError::ImageSize { wanted_bytes: 32, found_bytes: 28 })));
}

/// Appends the byte ranges (whole words, neighbours joined) in which two images of the same size differ.
fn changed_words(old: &[u8], new: &[u8], changed: &mut Vec<Range<u32>>) {
    assert_eq!(old.len(), new.len());
    for (i, (a, b)) in old.chunks(4).zip(new.chunks(4)).enumerate() {
        let (at, end) = (4 * i as u32, 4 * i as u32 + a.len() as u32);
        match changed.last_mut().filter(|last| last.end == at && last.start != last.end) {
            _ if a == b => {}
            Some(last) => last.end = end,
            None => changed.push(at..end),
        }
    }
}

#[test]
fn only_changed_words_are_reported() {
    let template = bytes(&[0; 12]);
    let table =
        PatchTable::new(&template, [("a", Schema::ShimDma48, 0, 0, 0), ("b", Schema::Address64, 0, 12, 0)]).unwrap();
    let mut image = template.clone();
    let mut run = |values: &[u64]| {
        let mut changed = vec![];
        table.apply(values, &mut image, &mut changed).unwrap();
        changed
    };
    assert_eq!(run(&[0x1_0000_1000, 0x2_0000_0000]), [4..12, 16..20]);
    assert_eq!(run(&[0x1_0000_1000, 0x2_0000_0000]), []);
    assert_eq!(run(&[0x1_0000_2000, 0x2_0000_0004]), [4..8, 12..16]);
    assert_eq!(run(&[0x1_0000_2000, 0x3_0000_0004]), std::iter::once(16..20).collect::<Vec<_>>());
}

#[test]
fn rebinding_equals_patching_the_other_template() {
    let schema = Schema::ShimDma48;
    let old_template = bytes(&[1, 0, 0xAB_0000, 3, 4, 5, 6, 7]);
    let new_template = bytes(&[9, 0, 0xCD_0000, 3, 4, 5, 6, 8]);
    let old = PatchTable::new(&old_template, [("a", schema, 0, 0, 0), ("s", Schema::Scalar32, 0xFF, 16, 0)]).unwrap();
    let new = PatchTable::new(&new_template, [("a", schema, 0, 0, 0x40), ("s", Schema::Scalar32, 0xF, 16, 0)]).unwrap();
    let rebind = new.rebind_from(&old, &old_template, &new_template).unwrap();
    // Length, upper half of the descriptor word, the scalar's smaller mask, the last word.
    assert_eq!(rebind.word_count(), 4);
    let mut image = old.patched(&old_template, &[0x1000, 0xFF]).unwrap();
    let before = image.clone();
    let (mut changed, mut expected) = (Vec::new(), Vec::new());
    new.rebind(&rebind, &[0x1000, 5], &mut image, &mut changed).unwrap();
    assert_eq!(image, new.patched(&new_template, &[0x1000, 5]).unwrap());
    changed_words(&before, &image, &mut expected);
    assert_eq!(changed, expected);
    assert_eq!(changed, [0..12, 16..20, 28..32]);
    let same = new.rebind_from(&new, &new_template, &new_template).unwrap();
    assert_eq!(same.word_count(), 0);
    assert!(matches!(new.rebind_from(&old, &old_template, &new_template[..28]), Err(RelocError::ImageSize { .. })));
    let ragged = PatchTable::new(&[0; 5], []).unwrap();
    assert!(matches!(
        ragged.rebind_from(&ragged, &[0; 5], &[0; 5]),
        Err(RelocError::RaggedSection { section_bytes: 5 })
    ));
}

/// A program of one column that fills descriptors and patches them.
fn program(version: Version) -> Stream {
    let mut code = Builder::new(Header::new(version, DEV_GEN_AIE2, 1));
    let bd = ShimBd { length_words: 0x200, address: 0x1_0000_0040, valid: true, ..ShimBd::default() };
    let other = ShimBd { length_words: 0x400, ..bd };
    code.shim_bd(0, 0, &bd).unwrap().shim_bd(0, 1, &other).unwrap();
    code.patch_shim_bd(0, 0, 0, 0x100).unwrap();
    code.patch_shim_bd(0, 1, 5, 0x8000_0040).unwrap();
    let push = QueuePush { start_bd: 0, repeat: 1, issue_token: true };
    code.push_shim_task(0, Direction::S2mm, 0, push).unwrap();
    code.into_stream()
}

#[test]
fn descriptor_patches_become_relocations() {
    for (version, payloads) in [(Version::Wide, [32, 80]), (Version::Compact, [28, 72])] {
        let assembled = assemble(program(version)).unwrap();
        let patch = |argument, size, offset, addend| AssembledPatch {
            argument,
            schema: Schema::ShimDma48,
            size,
            offset,
            addend,
        };
        assert_eq!(assembled.patches, [patch(0, 0x800, payloads[0], 0x100), patch(5, 0x1000, payloads[1], 0x40)]);
        let stream = Stream::parse(&assembled.code).unwrap();
        let words = |op: usize| match &stream.ops[op].kind {
            crate::format::txn::OpKind::BlockWrite { data, .. } => data.first::<8>().unwrap(),
            other => panic!("{other}"),
        };
        assert_eq!((words(0)[1], words(0)[2]), (0, 0));
        let offsets: Vec<_> = stream
            .ops
            .iter()
            .filter_map(|op| match &op.kind {
                crate::format::txn::OpKind::DdrPatch(p) => Some(p.offset),
                _ => None,
            })
            .collect();
        assert_eq!(offsets, [0x100, 0x40]);
        let names = ["3", "8"];
        let table = assembled.patches.iter().zip(names).map(|(p, name)| (name, p.schema, p.size, p.offset, p.addend));
        let table = PatchTable::new(&assembled.code, table).unwrap();
        let image = table.patched(&assembled.code, &[0x7000_0000_0000, 0x4000]).unwrap();
        let at = payloads[0] as usize;
        assert_eq!(super::tests::words(&image[at..at + 12]), [0x200, 0x8000_0100, 0x7000]);
    }
}

#[test]
fn patches_that_no_relocation_expresses_are_refused() {
    let build = |bd: u8, argument: u32, offset: u64| {
        let mut code = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, 1));
        code.shim_bd(0, 0, &ShimBd::default()).unwrap();
        code.patch_shim_bd(0, bd, argument, offset).unwrap();
        assemble(code.into_stream())
    };
    assert!(build(0, 0, 0).is_ok());
    assert!(build(0, 32, 0).is_ok());
    for refused in [build(1, 0, 0), build(0, 33, 0), build(0, 4, 0x8000_0000), build(0, 5, 1 << 32)] {
        assert!(matches!(refused, Err(RelocError::Assemble { op_index: 1, .. })));
    }
    let mut twice = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, 1));
    twice.shim_bd(0, 0, &ShimBd::default()).unwrap();
    twice.patch_shim_bd(0, 0, 0, 0).unwrap().patch_shim_bd(0, 0, 1, 0).unwrap();
    assert!(matches!(assemble(twice.clone().into_stream()), Err(RelocError::Assemble { op_index: 2, .. })));
    let mut again = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, 1));
    for argument in 0..2 {
        again.shim_bd(0, 0, &ShimBd::default()).unwrap().patch_shim_bd(0, 0, argument, 0).unwrap();
    }
    assert_eq!(assemble(again.into_stream()).unwrap().patches.len(), 2);
}

proptest! {
    #[test]
    fn applying_twice_equals_applying_once(
        first: [u32; 3],
        second: [u32; 3],
        template: [u32; 24],
        addends: [u16; 3],
    ) {
        let template = bytes(&template.map(|w| w & 0x3FFF_FFFF));
        let sites = [
            ("a", Schema::ShimDma48, 0, 0, u32::from(addends[0]) * 4),
            ("a", Schema::ShimDma48, 0, 32, u32::from(addends[1]) * 4),
            ("b", Schema::ControlPacket48, 0, 44, u32::from(addends[2]) * 4),
            ("c", Schema::Scalar32, 0x7_FFFF, 92, 0),
        ];
        // A template high half near the top would leave no room for the value.
        let mut template = template;
        for at in [10, 42, 58] {
            template[at - 1] &= 0x0F;
        }
        let table = PatchTable::new(&template, sites).unwrap();
        let values = |v: [u32; 3]| v.map(|x| u64::from(x & !3));
        let direct = match table.patched(&template, &values(second)) {
            Ok(image) => image,
            Err(RelocError::TooLarge { .. }) => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        let mut image = template.clone();
        if table.apply(&values(first), &mut image, &mut Vec::new()).is_ok() {
            let before = image.clone();
            let mut changed = Vec::new();
            table.apply(&values(second), &mut image, &mut changed).unwrap();
            let mut expected = Vec::new();
            changed_words(&before, &image, &mut expected);
            prop_assert_eq!(changed, expected);
        }
        prop_assert_eq!(image.len(), direct.len());
        table.apply(&values(second), &mut image, &mut Vec::new()).unwrap();
        prop_assert_eq!(image, direct);
    }
}
