//! Recorded dialogues, replayed scenario by scenario through level 1 against a device that answers from the recording.

mod compare;
mod recorded;
mod trace;

#[path = "../common/mod.rs"]
mod common;

use compare::{ALLOWED, Difference, Differences};
use npuhal_amdxdna::silicon::Silicon;
use npuhal_amdxdna::{NpuDevice, NpuIdentity};
use npuhal_core::device::{Arg, BufferRef, BufferSpec, BufferUse, Context, Deadline, Device, Kernel, Program, RunIndex, Runlist};
use npuhal_core::{DeviceError, RunError};
use recorded::{Event, Recorded};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use trace::Trace;

/// A device that answers from a recording.
struct Replay {
    recorded: Arc<Recorded>,
    device: NpuDevice,
    differences: Differences,
}

impl Replay {
    fn of(name: &str) -> Self {
        Self::open(&common::data(&format!("driver/{name}.json")))
    }

    fn open(path: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let recorded = Recorded::new(Trace::load(path));
        let name = &recorded.trace().name;
        let silicon = Silicon::ALL.into_iter().find(|part| name.starts_with(part.name())).unwrap();
        let identity = NpuIdentity {
            id: silicon.to_string(),
            name: silicon.to_string(),
            silicon,
            is_virtual: true,
            address: format!("replay {}", NUMBER.fetch_add(1, Ordering::Relaxed)),
        };
        let driver: Arc<dyn npuhal_amdxdna::driver::Driver> = recorded.clone();
        let device = NpuDevice::open(driver, &identity).unwrap();
        Self { recorded, device, differences: Differences::default() }
    }

    fn tensor(&self, len_bytes: u64) -> BufferRef {
        self.device.allocate(&BufferSpec::tensor(len_bytes, "tensor")).unwrap()
    }

    /// Closes the device; then everything but the listed submissions must be as recorded.
    fn finish(self, rebuilt: &[usize]) -> Differences {
        let Self { recorded, device, mut differences } = self;
        drop(device);
        let execs = recorded.execs();
        assert_eq!(execs.len(), recorded.trace().execs.len(), "{}: submissions", recorded.trace().name);
        for executed in &execs {
            compare::exec(&recorded, executed, rebuilt.contains(&executed.index), &mut differences);
        }
        compare::allocations(&recorded, &mut differences);
        compare::order(&recorded, &mut differences);
        assert!(recorded.open_bos().is_empty(), "{}: leaked {:?}", recorded.trace().name, recorded.open_bos());
        differences
    }
}

fn input(name: &str) -> Vec<u8> {
    common::unhex(common::json(common::data("inputs.json"))[name]["hex"].as_str().unwrap())
}

fn buffers(buffers: &[&BufferRef]) -> Vec<Arg> {
    buffers.iter().map(|buffer| Arg::Buffer((*buffer).clone())).collect()
}

fn run_once(list: &mut Box<dyn Runlist>) -> Result<(), RunError> {
    list.submit()?.wait(Deadline::never()).map(|_| ())
}

/// Full ELFs with every kind of relocation: arguments, then the same rotated by one.
fn relocations(name: &str, elf: &str) -> Differences {
    let mut replay = Replay::of(name);
    let image = input(elf);
    // The recorded client keeps a pool of eight control-packet buffers and uses the last.
    if elf != "reloc_plain.elf" {
        replay.recorded.withhold(&[2, 3, 4, 5, 6, 7, 8]);
        replay.differences.note(Difference::ControlPacketPool);
    }
    let boot = Program::FullElf { image: &image, kernel: "rt:a" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let kernel = context.load(&boot).unwrap();
    let args: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let mut list = context.runlist();
    let run = list.push(&*kernel, &buffers(&args.iter().collect::<Vec<_>>())).unwrap();
    run_once(&mut list).unwrap();
    for i in 0..4 {
        list.set_arg(run, i, &Arg::Buffer(args[(i + 1) % 4].clone())).unwrap();
    }
    run_once(&mut list).unwrap();
    drop((list, kernel, context, args));
    replay.finish(&[])
}

#[test]
fn relocations_of_full_elfs() {
    relocations("npu4-reloc-all", "reloc_all.elf");
    relocations("npu5-reloc-all.oot-sync", "reloc_all.elf");
    relocations("npu4-reloc-nopdi", "reloc_nopdi.elf");
}

/// The instruction stream of the recordings: 56 bytes.
fn stream() -> Vec<u8> {
    common::unhex(
        "00010306040100000200000038000000000000000000000004d20100000000000000008018000000800000001000000000000000\
         00010100",
    )
}

fn instructions<'a>(unit: &'a str, stream: &'a [u8]) -> Program<'a> {
    Program::Instructions { unit, stream, length_unit: npuhal_core::device::LengthUnit::Words }
}

/// An open context of an xclbin with one kernel.
fn open_units(replay: &Replay, xclbin: &str) -> Box<dyn Context> {
    replay.device.open_context(&Program::Xclbin { image: &input(xclbin) }).unwrap()
}

/// One kernel: run, restart, another argument, a second run object with a time limit.
fn runs(name: &str, xclbin: &str) -> Differences {
    let replay = Replay::of(name);
    let mut context = open_units(&replay, xclbin);
    let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
    let tensors: Vec<_> = (1..=4).map(|i| replay.tensor(4096 * i)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut list = context.runlist();
    let run = list.push(&*kernel, &args).unwrap();
    run_once(&mut list).unwrap();
    run_once(&mut list).unwrap();
    list.set_arg(run, 0, &args[3]).unwrap();
    run_once(&mut list).unwrap();
    let mut second = context.runlist();
    second.push(&*kernel, &args).unwrap();
    second.submit().unwrap().wait(Deadline::within(Duration::from_millis(2000))).unwrap();
    assert_waits(&replay);
    drop((list, second, kernel, context, tensors));
    replay.finish(&[])
}

/// One wait for each recorded one, on the same point, with the same limit.
fn assert_waits(replay: &Replay) {
    let ours = replay.recorded.log().into_iter().filter_map(|event| match event {
        Event::Wait { point, timeout } => Some((point, timeout.map(|timeout| timeout.as_millis() as u64))),
        _ => None,
    });
    let ours: Vec<_> = ours.collect();
    let trace = replay.recorded.trace();
    let theirs = trace.calls("SYNCOBJ_TIMELINE_WAIT").map(|call| {
        let dec = &call["dec"];
        (dec["point"].as_u64().unwrap(), dec.get("relative_ms").map(|limit| limit.as_u64().unwrap()))
    });
    assert_eq!(ours, theirs.collect::<Vec<_>>(), "{}: waits", trace.name);
}

#[test]
fn single_runs_of_a_compute_unit() {
    runs("npu1-run", "npu1.xclbin");
    runs("npu1-run-col1", "npu1_col1.xclbin");
    runs("npu4-run", "npu4.xclbin");
    runs("npu5-run.oot-sync", "npu4.xclbin");
}

#[test]
fn two_compute_units_with_a_configuration_each() {
    let replay = Replay::of("npu1-two-kernels");
    let mut context = open_units(&replay, "npu1_2cu.xclbin");
    for unit in ["KB", "KA"] {
        let kernel = context.load(&instructions(unit, &stream())).unwrap();
        assert_eq!(kernel.signature().len(), 1);
        let tensor = replay.tensor(4096);
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&tensor])).unwrap();
        run_once(&mut list).unwrap();
    }
    drop(context);
    let trace = replay.recorded.trace();
    let configured = replay.recorded.log().into_iter().find_map(|event| match event {
        Event::ConfigCus { units, contents } => Some((units, contents)),
        _ => None,
    });
    let (units, contents) = configured.unwrap();
    let recorded = trace.calls("CONFIG_HWCTX").next().unwrap()["dec"]["cus"].as_array().unwrap().clone();
    assert_eq!(recorded.len(), 2);
    for (i, cu) in recorded.iter().enumerate() {
        assert_eq!(units[i], trace::handle_of(cu["bo"].as_str().unwrap()));
        let content = trace.sha256_of(cu["pdi"].as_str().unwrap());
        assert_eq!(compare::sha256(&contents[i][..content.size]), content.sha256);
    }
    replay.finish(&[]);
}

/// Three runs of one chain, executed twice.
fn runlist(name: &str, xclbin: &str) -> Differences {
    let replay = Replay::of(name);
    let mut context = open_units(&replay, xclbin);
    let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(4096)).collect();
    let mut list = context.runlist();
    for run in 0..3 {
        let rotated: Vec<_> = (0..4).map(|i| &tensors[(i + run) % 4]).collect();
        assert_eq!(list.push(&*kernel, &buffers(&rotated)).unwrap(), RunIndex(run as u32));
    }
    run_once(&mut list).unwrap();
    list.submit().unwrap().wait(Deadline::within(Duration::from_millis(2000))).unwrap();
    assert_waits(&replay);
    drop((list, kernel, context, tensors));
    replay.finish(&[])
}

#[test]
fn chains_of_runs() {
    runlist("npu1-runlist", "npu1.xclbin");
    runlist("npu5-runlist", "npu4.xclbin");
}
