//! Kits whose files are sound and whose kernels do nothing.
#![allow(dead_code, unreachable_pub, reason = "each test uses its own part")]

use npuhal_amdxdna::format::registers::{Direction, QueuePush, ShimBd, TokenWait};
use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2, Header, Version};
use npuhal_amdxdna::format::xclbin::{
    AddressQualifier, AiePdi, CdoGroup, CdoGroupKind, DesignSpec, Kernel, KernelArgument, Metadata, Partition,
};
use npuhal_core::device::ArgKind;
use npuhal_core::stage::Control;
use npuhal_models::package::{OpenOptions, Package, Shape};
use npuhal_tests::kit::devices::RecordingDevice;
use npuhal_xdna1::kit::{
    Design, KIT_FILE, KIT_FORMAT, KitArgument, KitDigests, KitKernel, KitManifest, KitOrigin, LAYOUT_VERSION, SizeUnit,
};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const KERNEL_ID: u64 = 0x901;

/// Name of the kernel of a design: different ones, so that a recording tells them apart.
pub fn kernel_name(design: Design, layers: usize) -> String {
    format!("MLIR_AIE_{}_{layers}", design.name().replace('-', "_"))
}

/// A container with one kernel of `buffers` buffers.
pub fn xclbin(name: &str, buffers: u32) -> Vec<u8> {
    let argument = |id: u32, name: String, qualifier, size_bytes, offset_bytes| KernelArgument {
        name,
        id,
        qualifier,
        port: String::new(),
        size_bytes,
        offset_bytes,
        host_size_bytes: size_bytes,
        c_type: "void*".to_owned(),
    };
    let (scalar, global) = (AddressQualifier::Scalar, AddressQualifier::Global);
    let mut arguments = vec![
        argument(0, "opcode".to_owned(), scalar, 8, 0),
        argument(1, "instr".to_owned(), global, 8, 8),
        argument(2, "ninstr".to_owned(), scalar, 4, 0x10),
    ];
    arguments.extend((0..buffers).map(|i| argument(3 + i, format!("bo{i}"), global, 8, 0x14 + 8 * i)));
    let kernel = Kernel {
        name: name.to_owned(),
        kind: "dpu".to_owned(),
        functional: 0,
        subtype: 1,
        dpu_kernel_id: Some(KERNEL_ID),
        arguments,
        instances: vec!["main".to_owned()],
    };
    let group = CdoGroup {
        name: name.to_owned(),
        kind: CdoGroupKind::Primary,
        pdi_id: 1,
        dpu_kernel_ids: vec![KERNEL_ID],
        pre_cdo_groups: Vec::new(),
    };
    let partition = Partition {
        name: name.to_owned(),
        ops_per_cycle: 2048,
        column_width: 4,
        start_columns: vec![1],
        pdis: vec![AiePdi { uuid: [1; 16], image: vec![0; 64], cdo_groups: vec![group] }],
        ..Partition::default()
    };
    let spec = DesignSpec { uuid: [2; 16], partition, metadata: Metadata { kernels: vec![kernel] } };
    spec.build().unwrap().to_bytes()
}

/// Control code that moves `bytes[i]` bytes of argument `i`, and waits for `waits` outputs.
pub fn instructions(bytes: &[u64], waits: u8) -> Vec<u8> {
    let mut code = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, 4));
    for (index, len_bytes) in bytes.iter().enumerate() {
        let (column, bd) = ((index % 4) as u8, index as u8);
        let descriptor = ShimBd { length_words: (len_bytes / 4) as u32, burst: 2, valid: true, ..ShimBd::default() };
        code.shim_bd(column, bd, &descriptor).unwrap();
        code.patch_shim_bd(column, bd, index as u32, 0).unwrap();
        let push = QueuePush { start_bd: bd.into(), repeat: 1, issue_token: true };
        code.push_shim_task(column, Direction::S2mm, 0, push).unwrap();
    }
    for column in 0..waits {
        let direction = Direction::S2mm;
        code.wait(TokenWait { direction, row: 0, column, row_count: 1, column_count: 1, channel: 0 });
    }
    code.encode().unwrap()
}

/// Writes a kit of these designs, each for so many layers of a dispatch, for models of `shape`.
pub fn write_kit(folder: &Path, shape: Shape, designs: &[(Design, usize)]) -> KitManifest {
    fs::create_dir_all(folder).unwrap();
    let kernels = designs.iter().map(|&(design, layers)| kernel(folder, shape, design, layers)).collect();
    let (format, toolchain) = (KIT_FORMAT.to_owned(), BTreeMap::from([("test".to_owned(), "1".to_owned())]));
    let manifest = KitManifest { format, origin: KitOrigin::Imported, toolchain, kernels };
    write_manifest(folder, &manifest);
    manifest
}

pub fn write_manifest(folder: &Path, manifest: &KitManifest) {
    fs::write(folder.join(KIT_FILE), serde_json::to_string_pretty(manifest).unwrap()).unwrap();
}

fn kernel(folder: &Path, shape: Shape, design: Design, layers: usize) -> KitKernel {
    let arguments = design.arguments(shape, layers).unwrap();
    let bytes: Vec<u64> = arguments.iter().map(|argument| argument.bytes).collect();
    let (name, stem) = (kernel_name(design, layers), format!("{design}-{layers}"));
    let files = [xclbin(&name, 5), instructions(&bytes, 2)];
    let paths = [format!("{stem}.xclbin"), format!("{stem}.insts")];
    for (path, bytes) in paths.iter().zip(&files) {
        fs::write(folder.join(path), bytes).unwrap();
    }
    let [xclbin_sha256, instructions_sha256] = files.map(|bytes| digest(&bytes));
    let [xclbin, instructions] = paths;
    KitKernel {
        design: design.name().to_owned(),
        layers,
        layout_version: LAYOUT_VERSION,
        shape: shape.into(),
        kernel: name,
        xclbin,
        instructions,
        instruction_size_unit: SizeUnit::Bytes,
        arguments: arguments
            .iter()
            .map(|argument| KitArgument { name: argument.name.to_owned(), bytes: argument.bytes })
            .collect(),
        sha256: KitDigests { xclbin: xclbin_sha256, instructions: instructions_sha256 },
    }
}

pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A device that knows the kernels of these designs.
pub fn device(designs: &[(Design, usize)], shape: Shape) -> RecordingDevice {
    let device = RecordingDevice::new("npu1");
    for &(design, layers) in designs {
        let arguments = design.arguments(shape, layers).unwrap();
        let direction = npuhal_core::device::Direction::InOut;
        let kinds: Vec<ArgKind> =
            arguments.iter().map(|argument| ArgKind::Buffer { direction, min_bytes: argument.bytes }).collect();
        device.define(&kernel_name(design, layers), &kinds);
    }
    device
}

pub fn open(path: &Path) -> Package {
    let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
    Package::open(path, options).unwrap()
}
