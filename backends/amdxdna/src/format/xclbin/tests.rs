//! Every section by itself, and files that are refused.

use super::*;
use proptest::prelude::*;

pub(crate) fn argument(name: &str, id: u32, qualifier: AddressQualifier, offset: u32, size: u32) -> KernelArgument {
    KernelArgument {
        name: name.to_owned(),
        id,
        qualifier,
        port: String::new(),
        size_bytes: size,
        offset_bytes: offset,
        host_size_bytes: size,
        c_type: "void*".to_owned(),
    }
}

fn kernel(name: &str, id: u64, instances: &[&str]) -> Kernel {
    Kernel {
        name: name.to_owned(),
        kind: "dpu".to_owned(),
        functional: 0,
        subtype: 1,
        dpu_kernel_id: Some(id),
        arguments: vec![
            argument("opcode", 0, AddressQualifier::Scalar, 0, 8),
            argument("instr", 1, AddressQualifier::Global, 8, 8),
            argument("ninstr", 2, AddressQualifier::Scalar, 16, 4),
            argument("bo0", 3, AddressQualifier::Global, 20, 8),
        ],
        instances: instances.iter().map(|s| (*s).to_owned()).collect(),
    }
}

fn pdi(seed: u8, ids: &[u64]) -> AiePdi {
    let group = CdoGroup {
        name: "DPU".to_owned(),
        kind: CdoGroupKind::Primary,
        pdi_id: seed.into(),
        dpu_kernel_ids: ids.to_vec(),
        pre_cdo_groups: vec![0xC1],
    };
    AiePdi { uuid: [seed; 16], image: vec![seed; 33], cdo_groups: vec![group] }
}

fn spec() -> DesignSpec {
    DesignSpec {
        uuid: [9; 16],
        partition: Partition {
            name: "QoS".to_owned(),
            ops_per_cycle: 2048,
            column_width: 4,
            start_columns: vec![1, 0],
            pdis: vec![pdi(1, &[0x902]), pdi(2, &[0x901, 0x904])],
            ..Partition::default()
        },
        metadata: Metadata {
            kernels: vec![
                kernel("KA", 0x901, &["I", "J"]),
                kernel("without", 0x999, &["I"]),
                Kernel { kind: "hls".to_owned(), ..kernel("other", 0x902, &["I"]) },
                kernel("K<B> & \"c\"", 0x902, &["I"]),
            ],
        },
    }
}

#[test]
fn designs_read_back_with_units_in_kernel_order() {
    let spec = spec();
    let bytes = spec.build().unwrap().to_bytes();
    let design = Design::parse(&bytes).unwrap();
    assert_eq!((&design.partition, &design.metadata, design.uuid), (&spec.partition, &spec.metadata, spec.uuid));
    let units: Vec<_> =
        design.compute_units.iter().map(|u| (u.index, u.kernel, u.instance.as_str(), u.dpu_kernel_id, u.pdi)).collect();
    // Images are found by kernel id, not by position; kernels without an image have no unit.
    assert_eq!(units, [(0, 0, "I", 0x901, 1), (1, 0, "J", 0x901, 1), (2, 3, "I", 0x902, 0)]);
    assert_eq!(design.compute_unit("KA").unwrap().index, 0);
    assert_eq!(design.compute_unit("KA:J").unwrap().index, 1);
    assert_eq!(design.compute_unit("without"), None);
    assert_eq!(design.image(&design.compute_units[2]), Some([1; 33].as_slice()));
    assert_eq!(design.kernel(&design.compute_units[0]).unwrap().register_map_bytes(), 28);
    let xclbin = Xclbin::parse(&bytes).unwrap();
    assert_eq!(xclbin.to_bytes(), bytes);
    let section = |kind| xclbin.section(kind).unwrap().data.as_slice();
    assert_eq!(IpEntry::parse_section(section(kind::IP_LAYOUT)).unwrap()[0].properties, 0x0901_0001);
    assert_eq!(
        Connection::parse_section(section(kind::CONNECTIVITY)).unwrap()[..2],
        [Connection { argument: 1, ip: 0, bank: 1 }, Connection { argument: 3, ip: 0, bank: 0 }]
    );
    assert_eq!(MemoryBank::parse_section(section(kind::MEM_TOPOLOGY)).unwrap().len(), 2);
}

#[test]
fn containers_are_refused_for_their_bounds() {
    let bytes = spec().build().unwrap().to_bytes();
    assert!(matches!(Xclbin::parse(b"xclbin1\0"), Err(XclbinError::Magic { .. })));
    assert!(matches!(Xclbin::parse(&[]), Err(XclbinError::Magic { .. })));
    for cut in [8, 0x1C7, 0x1C8, 0x300, bytes.len() - 1] {
        assert!(matches!(Xclbin::parse(&bytes[..cut]), Err(XclbinError::OutOfRange { .. })), "{cut}");
    }
    let with = |at: usize, value: &[u8]| {
        let mut copy = bytes.clone();
        copy[at..at + value.len()].copy_from_slice(value);
        Xclbin::parse(&copy)
    };
    assert!(matches!(with(0x1C0, &[0xFF; 4]), Err(XclbinError::OutOfRange { .. })));
    assert!(matches!(with(0x130, &[0xFF; 8]), Err(XclbinError::OutOfRange { .. })));
    assert!(matches!(with(0x1C8 + 0x18, &[0xFF; 8]), Err(XclbinError::OutOfRange { .. })));
    let whole = (bytes.len() as u64).to_le_bytes();
    let start = [0; 8];
    let mut copy = bytes.clone();
    copy[0x1C8 + 0x18..][..8].copy_from_slice(&start);
    copy[0x1C8 + 0x20..][..8].copy_from_slice(&whole);
    assert!(matches!(Xclbin::parse(&copy), Err(XclbinError::Overlapping { .. })));
}

#[test]
fn partitions_are_refused_for_their_bounds() {
    let data = spec().partition.to_bytes().unwrap();
    let with = |at: usize, words: &[u32]| {
        let mut copy = data.clone();
        for (i, word) in words.iter().enumerate() {
            copy[at + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        Partition::parse(&copy)
    };
    assert!(with(0x80, &[0]).is_ok());
    assert!(matches!(Partition::parse(&data[..183]), Err(XclbinError::OutOfRange { .. })));
    assert!(matches!(with(4, &[data.len() as u32]), Err(XclbinError::BadText { .. })));
    assert!(matches!(with(0x28, &[u32::MAX, 0]), Err(XclbinError::OutOfRange { .. })));
    assert!(matches!(with(0x78, &[1, u32::MAX]), Err(XclbinError::OutOfRange { .. })));
    // A thousand images that all are the whole section.
    let mut shared = data.clone();
    let at = shared.len() as u32;
    for _ in 0..1000 {
        let entry_at = shared.len();
        shared.resize(entry_at + 96, 0);
        shared[entry_at + 0x10..][..4].copy_from_slice(&at.to_le_bytes());
    }
    shared[0x78..0x7C].copy_from_slice(&1000u32.to_le_bytes());
    shared[0x7C..0x80].copy_from_slice(&at.to_le_bytes());
    assert!(matches!(Partition::parse(&shared), Err(XclbinError::Overlapping { .. })));
}

#[test]
fn metadata_is_refused_by_attribute() {
    let document = |kernel: &str| {
        Metadata::parse(
            format!("<project><platform><device><core>{kernel}</core></device></platform></project>\0").as_bytes(),
        )
    };
    let good = document(
        "<kernel name='k' type='dpu'><extended-data dpu_kernel_id='0x10'/>\
         <arg name='a' id='0' addressQualifier='1' size='8' offset='0X14' port='p'/><instance name='i'/></kernel>",
    )
    .unwrap();
    assert_eq!(good.kernels[0].dpu_kernel_id, Some(16));
    assert_eq!(good.kernels[0].arguments[0].offset_bytes, 0x14);
    assert_eq!(good.kernels[0].arguments[0].port, "p");
    for bad in [
        "<kernel type='dpu'/>",
        "<kernel name='k'><arg id='0' addressQualifier='1' size='8' offset='0'/></kernel>",
        "<kernel name='k'><arg name='a' addressQualifier='1' size='8' offset='0'/></kernel>",
        "<kernel name='k'><arg name='a' id='x' addressQualifier='1' size='8' offset='0'/></kernel>",
        "<kernel name='k'><arg name='a' id='0' addressQualifier='1' size='0x100000000' offset='0'/></kernel>",
        "<kernel name='k'><instance/></kernel>",
        "<kernel name='k'><extended-data dpu_kernel_id=''/></kernel>",
        "<kernel name='&undefined;'/>",
        "<kernel name='k'>",
        "</core>",
        &"<x>".repeat(40),
    ] {
        assert!(matches!(document(bad), Err(XclbinError::Metadata { .. })), "{bad}");
    }
    assert!(matches!(Metadata::parse(b"<!DOCTYPE x><project/>"), Err(XclbinError::Metadata { .. })));
    assert!(matches!(Metadata::parse(&[b'<', 0xFF]), Err(XclbinError::Metadata { .. })));
    // Elsewhere in the document the same names mean nothing.
    assert_eq!(Metadata::parse(b"<project><kernel/><a><arg/></a></project>").unwrap(), Metadata::default());
}

#[test]
fn what_a_file_cannot_hold_is_refused() {
    let mut long = spec();
    long.metadata.kernels[0].name = "k".repeat(62);
    assert!(matches!(long.build(), Err(XclbinError::TextTooLong { .. })));
    let mut nul = spec();
    nul.partition.name = "a\0b".to_owned();
    assert!(matches!(nul.build(), Err(XclbinError::Invalid { .. })));
    let mut many = spec();
    many.metadata.kernels[0].instances = (0..33).map(|i| i.to_string()).collect();
    assert!(matches!(Design::parse(&many.build().unwrap().to_bytes()), Err(XclbinError::Invalid { .. })));
    let mut none = spec().build().unwrap();
    none.sections.pop();
    assert!(matches!(Design::new(&none), Err(XclbinError::MissingSection { name: "AIE_PARTITION" })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn mutated_files_are_handled(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        in_partition: bool,
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = spec().build().unwrap().to_bytes();
        let partition_len = spec().partition.to_bytes().unwrap().len().next_multiple_of(8);
        let start = if in_partition { bytes.len() - partition_len } else { 0 };
        for (at, value) in changes {
            let at = start + at.index(bytes.len() - start);
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(xclbin) = Xclbin::parse(&bytes) {
            prop_assert_eq!(&Xclbin::parse(&xclbin.to_bytes()).unwrap(), &xclbin);
            if let Ok(design) = Design::new(&xclbin) {
                let partition = design.partition.to_bytes().unwrap();
                prop_assert_eq!(Partition::parse(&partition).unwrap(), design.partition);
                let xml = design.metadata.to_xml();
                prop_assert_eq!(Metadata::parse(xml.as_bytes()).unwrap(), design.metadata);
            }
        }
    }
}
