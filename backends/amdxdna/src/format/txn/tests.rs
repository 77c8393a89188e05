//! Hand-made cases for every operation and both encodings, and mutations of them.

use super::*;
use crate::format::registers::{Direction, TokenWait};
use proptest::prelude::*;

/// Words of an encoded operation.
type Encoded = &'static [u32];

/// Every operation with its words in both encodings; `None` where an encoding cannot hold it.
fn cases() -> Vec<(OpKind<'static>, Option<Encoded>, Option<Encoded>)> {
    let masked = Masked { register: 0x0601_D200, value: 0x0200, mask: 0xFF00, tail: None };
    let long = Masked { tail: Some(0), ..masked };
    let wide_patch = DdrPatch {
        register: 0x0601_D004,
        argument: 4,
        offset: 0x1_0000_0400,
        form: DdrPatchForm::Long { base: 0, action: 7, pad: 0 },
    };
    let short_patch = DdrPatch { form: DdrPatchForm::Short { pad: [0; 3] }, ..wide_patch };
    let control = |words: Encoded| (Some(words), Some(words));
    let with = |kind, (wide, compact)| (kind, wide, compact);
    vec![
        (
            OpKind::Write { register: 0x0601_D21C, value: 0x8000_0005 },
            Some(&[0, 0, 0x0601_D21C, 0, 0x8000_0005, 24]),
            Some(&[0, 0x0601_D21C, 0x8000_0005]),
        ),
        (
            OpKind::BlockWrite { register: 0x0001_D000, data: vec![1, 2, 3].into() },
            Some(&[1, 0, 0x0001_D000, 28, 1, 2, 3]),
            Some(&[1, 0x0001_D000, 24, 1, 2, 3]),
        ),
        (
            OpKind::MaskWrite(masked),
            Some(&[3, 0, 0x0601_D200, 0, 0x200, 0xFF00, 28]),
            Some(&[3, 0x0601_D200, 0x200, 0xFF00]),
        ),
        (OpKind::MaskWrite(long), Some(&[3, 0, 0x0601_D200, 0, 0x200, 0xFF00, 32, 0]), None),
        (
            OpKind::MaskPoll(masked),
            Some(&[4, 0, 0x0601_D200, 0, 0x200, 0xFF00, 28]),
            Some(&[4, 0x0601_D200, 0x200, 0xFF00]),
        ),
        (OpKind::MaskPoll(long), Some(&[4, 0, 0x0601_D200, 0, 0x200, 0xFF00, 32, 0]), None),
        (
            OpKind::MaskPollBusy(masked),
            Some(&[7, 0, 0x0601_D200, 0, 0x200, 0xFF00, 28]),
            Some(&[7, 0x0601_D200, 0x200, 0xFF00]),
        ),
        with(OpKind::Noop, control(&[5])),
        with(OpKind::Preempt { level: 2 }, control(&[0x0206])),
        with(
            OpKind::LoadPdi { id: 1, size_bytes: 0x100, address: 0x8403_8000 },
            control(&[0x0001_0008, 0x100, 0x8403_8000, 0]),
        ),
        with(OpKind::LoadPmStart { op_count: 0x01_0203, load_id: 9 }, control(&[0x0102_0309, 9])),
        with(OpKind::CreateScratchpad { usage: 1, size_bytes: 64, offset: 1 << 32 }, control(&[0x010A, 64, 0, 1])),
        with(OpKind::UpdateStateTable { index: 3, function: 1, operand: 5 }, control(&[0x0001_030B, 5])),
        with(
            OpKind::UpdateReg { index: 3, function: 2, operand: 5, register: 0x0001_D000 },
            control(&[0x0002_030C, 5, 0x0001_D000]),
        ),
        with(OpKind::UpdateScratch, control(&[13])),
        with(OpKind::Tct { word: 0x0003_0001, config: 0x0101_0100 }, control(&[128, 16, 0x0003_0001, 0x0101_0100])),
        with(OpKind::DdrPatch(wide_patch), control(&[129, 48, 0, 0, 7, 0, 0x0601_D004, 0, 4, 0, 0x400, 1])),
        (OpKind::DdrPatch(short_patch), None, Some(&[129, 24, 0x0601_D004, 4, 0x400, 1])),
        with(
            OpKind::ReadRegs { pad: 0, addresses: vec![0x0001_D220, 0, 0x0001_D224, 0].into() },
            control(&[130, 32, 2, 0, 0x0001_D220, 0, 0x0001_D224, 0]),
        ),
        with(OpKind::RecordTimer { id: 6, tail: None }, control(&[131, 12, 6])),
        with(OpKind::RecordTimer { id: 6, tail: Some(0) }, control(&[131, 16, 6, 0])),
        with(OpKind::MergeSync { tokens: 8, columns: 4, pad: 0 }, control(&[132, 12, 0x0408])),
    ]
}

fn header(version: Version) -> Header {
    Header::new(version, DEV_GEN_AIE2P, 8)
}

/// Bytes of a stream with these operation words.
fn raw_stream(version: Version, op_count: u32, words: &[u32]) -> Vec<u8> {
    let first = match version {
        Version::Wide => 0x0604_0100,
        Version::Compact => 0x0604_0001,
    };
    let size = (HEADER_BYTES + 4 * words.len()) as u32;
    [first, 0x108, op_count, size].iter().chain(words).flat_map(|w| w.to_le_bytes()).collect()
}

/// All cases of one encoding in one stream.
fn whole(version: Version) -> (Stream, Vec<u8>) {
    let mut stream = Stream { header: header(version), ops: Vec::new() };
    let mut words = Vec::new();
    for (kind, wide, compact) in cases() {
        let encoded = match version {
            Version::Wide => wide,
            Version::Compact => compact,
        };
        if let Some(encoded) = encoded {
            stream.ops.push(kind.into());
            words.extend_from_slice(encoded);
        }
    }
    let bytes = raw_stream(version, stream.ops.len() as u32, &words);
    (stream, bytes)
}

#[test]
fn every_operation_has_its_words_in_both_encodings() {
    for (kind, wide, compact) in cases() {
        for (version, words) in [(Version::Wide, wide), (Version::Compact, compact)] {
            let stream = Stream { header: header(version), ops: vec![kind.clone().into()] };
            let Some(words) = words else {
                assert!(
                    matches!(stream.encode(), Err(TxnError::Op { fault: OpFault::Inexpressible { .. }, .. })),
                    "{kind} {version}"
                );
                continue;
            };
            let bytes = raw_stream(version, 1, words);
            assert_eq!(stream.encode().unwrap(), bytes, "{kind} {version}");
            assert_eq!(Stream::parse(&bytes).unwrap(), stream, "{kind} {version}");
            assert_eq!(stream.op_offsets(), [HEADER_BYTES, bytes.len()], "{kind} {version}");
        }
    }
}

#[test]
fn whole_streams_round_trip_and_disassemble() {
    for version in [Version::Wide, Version::Compact] {
        let (stream, bytes) = whole(version);
        assert_eq!(Stream::parse(&bytes).unwrap(), stream);
        assert_eq!(stream.encode().unwrap(), bytes);
        for op in View::new(&bytes).unwrap().ops() {
            let op = op.unwrap();
            assert!(op.op.to_string().starts_with(op.op.kind.name()));
        }
    }
}

#[test]
fn informative_bytes_survive() {
    let (_, mut bytes) = whole(Version::Wide);
    // Column, row and the unused word of the first WRITE; column of the BLOCKWRITE; header padding.
    bytes[6] = 0xAB;
    bytes[17..24].copy_from_slice(&[3, 0, 9, 1, 2, 3, 4]);
    bytes[HEADER_BYTES + 24 + 3] = 5;
    let stream = Stream::parse(&bytes).unwrap();
    assert_eq!(stream.ops[0].tag, Tag { bytes: [3, 0, 9], word: 0x0403_0201 });
    assert_eq!(stream.encode().unwrap(), bytes);
    let compact = Stream { header: header(Version::Compact), ..stream };
    assert!(matches!(compact.encode(), Err(TxnError::Op { index: 0, fault: OpFault::Inexpressible { .. }, .. })));
}

#[test]
fn lines_name_registers() {
    let show = |kind: OpKind<'static>| kind.to_string();
    assert_eq!(
        show(OpKind::Write { register: 0x0601_D21C, value: 0x8002_0005 }),
        "WRITE shim(3,0).mm2s1.queue = 0x80020005 (bd5, 3 times, token)"
    );
    assert_eq!(show(OpKind::Tct { word: 0x0003_0001, config: 0x0101_0100 }), "TCT mm2s1 of columns 3+1, rows 0+1");
    let patch =
        DdrPatch { register: 0x0601_D004, argument: 4, offset: 0x400, form: DdrPatchForm::of(Version::Compact) };
    assert_eq!(show(OpKind::DdrPatch(patch)), "DDR_PATCH shim(3,0).bd0.1 = argument 4 + 0x400");
    assert_eq!(
        show(OpKind::BlockWrite { register: 0x0001_D000, data: vec![64, 0x1000, 0, 0, 0, 0, 0, 0x0200_0000].into() }),
        "BLOCKWRITE shim(0,0).bd0.0, 8 words = 0x40 0x1000 0x0 0x0 0x0 0x0 0x0 0x2000000 (64 words at 0x1000)"
    );
    let wait = TokenWait { direction: Direction::Mm2s, row: 0, column: 3, row_count: 1, column_count: 1, channel: 1 };
    assert_eq!(OpKind::Tct { word: 0x0003_0001, config: 0x0101_0100 }.token_wait(), Some(Ok(wait)));
}

/// The error of a wide stream with these operation words.
fn fault(version: Version, words: &[u32]) -> OpFault {
    match Stream::parse(&raw_stream(version, 1, words)) {
        Err(TxnError::Op { index: 0, at_bytes: HEADER_BYTES, fault }) => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn malformed_operations_are_refused_by_name() {
    let wide = |words: &[u32]| fault(Version::Wide, words);
    assert_eq!(wide(&[77]), OpFault::Unknown { opcode: 77 });
    for (code, name) in
        [(2, "BLOCKSET"), (14, "CONFIG_SHIMDMA_BD"), (15, "CONFIG_SHIMDMA_DMABUF_BD"), (200, "LOAD_PM_END")]
    {
        assert_eq!(wide(&[code]), OpFault::HostOnly { name });
    }
    assert!(matches!(wide(&[0, 0, 0, 0, 0, 28, 0]), OpFault::Size { name: "WRITE", found_bytes: 28, .. }));
    assert!(matches!(wide(&[0, 0, 0, 1, 0, 24]), OpFault::Register { name: "WRITE", address: 0x1_0000_0000 }));
    assert!(matches!(wide(&[0, 0]), OpFault::Truncated { name: "WRITE", .. }));
    assert!(matches!(wide(&[1, 0, 0, 0]), OpFault::Size { name: "BLOCKWRITE", found_bytes: 0, .. }));
    assert!(matches!(wide(&[1, 0, 0, 16]), OpFault::Size { name: "BLOCKWRITE", .. }));
    assert!(matches!(wide(&[1, 0, 0, 22, 0, 0]), OpFault::Size { name: "BLOCKWRITE", found_bytes: 22, .. }));
    assert!(matches!(
        wide(&[1, 0, 0, 0xFFFF_FFFC]),
        OpFault::Truncated { name: "BLOCKWRITE", needed_bytes: 0xFFFF_FFFC, left_bytes: 16 }
    ));
    assert!(matches!(wide(&[3, 0, 0, 0, 0, 0, 24]), OpFault::Size { name: "MASKWRITE", .. }));
    assert!(matches!(wide(&[128, 0, 0, 0]), OpFault::Size { name: "TCT", found_bytes: 0, .. }));
    assert!(matches!(wide(&[129, 24, 0, 0, 0, 0]), OpFault::Size { name: "DDR_PATCH", found_bytes: 24, .. }));
    assert!(matches!(wide(&[130, 24, 2, 0, 0, 0]), OpFault::Count { name: "READ_REGS", count: 2, .. }));
    assert!(matches!(wide(&[131, 20, 0, 0, 0]), OpFault::Size { name: "RECORD_TIMER", .. }));
    assert!(matches!(wide(&[8, 0]), OpFault::Truncated { name: "LOADPDI", needed_bytes: 16, left_bytes: 8 }));
    let compact = fault(Version::Compact, &[129, 32, 0, 0, 0, 0, 0, 0]);
    assert!(matches!(compact, OpFault::Size { name: "DDR_PATCH", wanted: "24 or 48", .. }));
}

#[test]
fn malformed_headers_are_refused_by_name() {
    let (_, bytes) = whole(Version::Wide);
    let with = |at: usize, value: u8| {
        let mut copy = bytes.clone();
        copy[at] = value;
        Stream::parse(&copy).unwrap_err()
    };
    assert!(matches!(with(0, 0x1D), TxnError::Version { major: 0x1D, minor: 1, .. }));
    assert!(matches!(with(1, 0), TxnError::Version { .. }));
    assert!(matches!(with(2, 9), TxnError::Header { field: "device generation", found: 9, .. }));
    assert!(matches!(with(2, 0), TxnError::Header { .. }));
    assert!(matches!(with(3, 5), TxnError::Header { field: "number of rows", found: 5, .. }));
    let declared = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    assert!(matches!(
        with(8, bytes[8] + 1),
        TxnError::OpCount { declared: d, found: f, .. } if d == declared + 1 && f == declared
    ));
    assert!(matches!(
        with(8, bytes[8] - 1),
        TxnError::OpCount { declared: d, found: f, .. } if d == declared - 1 && f == declared
    ));
    assert!(matches!(with(15, 1), TxnError::Size { .. }));
    assert!(matches!(Stream::parse(&bytes[..bytes.len() - 4]), Err(TxnError::Size { .. })));
    assert!(matches!(Stream::parse(&[bytes.as_slice(), &[0]].concat()), Err(TxnError::Trailing { .. })));
    assert!(matches!(Stream::parse(&bytes[..15]), Err(TxnError::NoHeader { found_bytes: 15 })));
    let (stream, used) = Stream::parse_prefix(&[bytes.as_slice(), &bytes].concat()).unwrap();
    assert_eq!((stream, used), (whole(Version::Wide).0, bytes.len()));
}

#[test]
fn a_size_that_cuts_the_last_operation_is_an_error_at_that_operation() {
    let mut bytes = raw_stream(Version::Wide, 2, &[5, 0, 0, 0, 0, 0, 24]);
    bytes.truncate(bytes.len() - 4);
    bytes[12] -= 4;
    assert_eq!(
        Stream::parse(&bytes),
        Err(TxnError::Op {
            index: 1,
            at_bytes: 20,
            fault: OpFault::Truncated { name: "WRITE", needed_bytes: 24, left_bytes: 20 }
        })
    );
}

/// Any operation that both encodings can hold, except for the forms that only one of them has.
fn any_kind() -> impl Strategy<Value = OpKind<'static>> {
    let w = any::<u32>;
    let list = |len: std::ops::Range<usize>| prop::collection::vec(any::<u32>(), len);
    let masked = (w(), w(), w()).prop_map(|(register, value, mask)| Masked { register, value, mask, tail: None });
    prop_oneof![
        (w(), w()).prop_map(|(register, value)| OpKind::Write { register, value }),
        (w(), list(1..20)).prop_map(|(register, data)| OpKind::BlockWrite { register, data: data.into() }),
        masked.clone().prop_map(OpKind::MaskWrite),
        masked.clone().prop_map(OpKind::MaskPoll),
        masked.prop_map(OpKind::MaskPollBusy),
        any::<u8>().prop_map(|level| OpKind::Preempt { level }),
        any::<(u16, u32, u64)>().prop_map(|(id, size_bytes, address)| OpKind::LoadPdi { id, size_bytes, address }),
        (0u32..1 << 24, w()).prop_map(|(op_count, load_id)| OpKind::LoadPmStart { op_count, load_id }),
        any::<(u8, u8, u32, u32)>().prop_map(|(index, function, operand, register)| OpKind::UpdateReg {
            index,
            function,
            operand,
            register
        }),
        any::<(u32, u32, u64, u64, u32)>().prop_map(|(register, argument, offset, base, action)| {
            let form = DdrPatchForm::Long { base, action, pad: argument };
            OpKind::DdrPatch(DdrPatch { register, argument, offset, form })
        }),
        (w(), list(0..5)).prop_map(|(pad, mut half)| {
            half.extend(half.clone());
            OpKind::ReadRegs { pad, addresses: half.into() }
        }),
        (w(), any::<Option<u32>>()).prop_map(|(id, tail)| OpKind::RecordTimer { id, tail }),
        any::<(u8, u8, u16)>().prop_map(|(tokens, columns, pad)| OpKind::MergeSync { tokens, columns, pad }),
    ]
}

proptest! {
    #[test]
    fn any_operations_survive_either_encoding(kinds in prop::collection::vec(any_kind(), 0..12), wide: bool) {
        let version = if wide { Version::Wide } else { Version::Compact };
        let stream = Stream { header: header(version), ops: kinds.into_iter().map(Op::from).collect() };
        let bytes = stream.encode().unwrap();
        prop_assert_eq!(stream.op_offsets().pop(), Some(bytes.len()));
        prop_assert_eq!(Stream::parse(&bytes).unwrap(), stream);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn mutated_streams_are_refused_or_round_trip(
        wide: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        do_cut: bool,
    ) {
        let (_, mut bytes) = whole(if wide { Version::Wide } else { Version::Compact });
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if do_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(stream) = Stream::parse(&bytes) {
            prop_assert_eq!(stream.encode().unwrap(), bytes);
        }
    }

    #[test]
    fn any_bytes_are_handled(version: bool, body in prop::collection::vec(any::<u32>(), 0..40), count in 0u32..50) {
        let small: Vec<u32> = body.iter().map(|w| w % 0x40).collect();
        for words in [body, small] {
            let bytes = raw_stream(if version { Version::Wide } else { Version::Compact }, count, &words);
            if let Ok(stream) = Stream::parse(&bytes) {
                prop_assert_eq!(stream.encode().unwrap(), bytes);
            }
        }
    }
}
