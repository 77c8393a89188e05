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
