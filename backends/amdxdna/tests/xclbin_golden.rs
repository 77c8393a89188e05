//! Synthetic xclbins that a reference client was recorded with.

mod common;

use common::{data, json, unhex};
use npuhal_amdxdna::format::xclbin::{Connection, Design, IpEntry, MemoryBank, Metadata, Partition, Xclbin, kind};

fn input(name: &str) -> Vec<u8> {
    unhex(json(data("inputs.json"))[name]["hex"].as_str().unwrap())
}

#[test]
fn recorded_files_are_rewritten_byte_for_byte() {
    for name in ["npu1.xclbin", "npu1_2cu.xclbin", "npu1_col1.xclbin", "npu4.xclbin", "npu4_2cu.xclbin"] {
        let bytes = input(name);
        let xclbin = Xclbin::parse(&bytes).unwrap();
        assert_eq!(xclbin.to_bytes(), bytes, "{name}");
        for section in &xclbin.sections {
            let rewritten = match section.kind {
                kind::MEM_TOPOLOGY | kind::GROUP_TOPOLOGY => {
                    MemoryBank::write_section(&MemoryBank::parse_section(&section.data).unwrap())
                }
                kind::CONNECTIVITY | kind::GROUP_CONNECTIVITY => {
                    Connection::write_section(&Connection::parse_section(&section.data).unwrap())
                }
                kind::IP_LAYOUT => IpEntry::write_section(&IpEntry::parse_section(&section.data).unwrap()),
                kind::AIE_PARTITION => Partition::parse(&section.data).unwrap().to_bytes().unwrap(),
                kind::EMBEDDED_METADATA => {
                    let metadata = Metadata::parse(&section.data).unwrap();
                    assert_eq!(Metadata::parse(metadata.to_xml().as_bytes()).unwrap(), metadata);
                    continue;
                }
                other => panic!("section kind {other}"),
            };
            assert_eq!(rewritten, section.data, "{name}, section kind {}", section.kind);
        }
    }
}

#[test]
fn compute_units_follow_the_kernels() {
    for (name, columns) in [("npu1.xclbin", 4), ("npu4.xclbin", 8), ("npu1_col1.xclbin", 1)] {
        let design = Design::parse(&input(name)).unwrap();
        assert_eq!(design.partition.column_width, columns);
        let [unit] = design.compute_units.as_slice() else { panic!("one compute unit") };
        assert_eq!((unit.instance.as_str(), unit.dpu_kernel_id), ("MLIRAIE", 0x901));
        let kernel = design.kernel(unit).unwrap();
        assert_eq!((kernel.name.as_str(), kernel.register_map_bytes()), ("MLIR_AIE", 0x3C));
        let offsets: Vec<_> = kernel.arguments.iter().map(|a| (a.offset_bytes, a.size_bytes)).collect();
        assert_eq!(offsets, [(0, 8), (8, 8), (0x10, 4), (0x14, 8), (0x1C, 8), (0x24, 8), (0x2C, 8), (0x34, 8)]);
        assert_eq!(design.image(unit).unwrap().len(), 250);
    }
    let design = Design::parse(&input("npu4_2cu.xclbin")).unwrap();
    let units: Vec<_> = design
        .compute_units
        .iter()
        .map(|u| (design.kernel(u).unwrap().name.as_str(), u.dpu_kernel_id, design.image(u).unwrap().len()))
        .collect();
    assert_eq!(units, [("KA", 0x901, 96), ("KB", 0x902, 160)]);
    assert_eq!(design.partition.pdis[0].image.len(), 160);
}
