//! The level-1 suite on the CPU device.

use npuhal_core::device::{BufferRef, BufferSpec, Context, Device, Program};
use npuhal_core::{DeviceCard, DeviceError};
use npuhal_cpu::{CpuDevice, Fault};
use npuhal_registry::witness::Witness;
use npuhal_tests::conformance::{Element, Subject, TestFault, TestProgram, assert_conforms};
use std::sync::Arc;

/// The device under test, and the same one to inject faults into.
struct Cpu {
    device: Box<dyn Device>,
    cpu: Arc<CpuDevice>,
}

/// A device that several hold.
struct Shared(Arc<CpuDevice>);

impl Device for Shared {
    fn card(&self) -> &DeviceCard {
        self.0.card()
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        self.0.allocate(spec)
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        self.0.open_context(boot)
    }
}

impl Cpu {
    fn new(memory_bytes: Option<u64>, watch: impl FnOnce(Box<dyn Device>) -> Box<dyn Device>) -> Self {
        let cpu = Arc::new(CpuDevice::new(memory_bytes));
        Self { device: watch(Box::new(Shared(Arc::clone(&cpu)))), cpu }
    }
}

impl Subject for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    fn boot(&self) -> Program<'_> {
        Program::Builtin { name: "copy" }
    }

    fn program(&self, program: TestProgram) -> Program<'_> {
        let name = match program {
            TestProgram::Copy => "copy",
            TestProgram::Negate => "negate-f32",
            TestProgram::Scale => "vector-scale",
        };
        Program::Builtin { name }
    }

    fn element(&self) -> Element {
        Element::F32
    }

    fn vector_bytes(&self) -> u64 {
        4096
    }

    fn inject(&self, fault: TestFault) {
        self.cpu.inject(match fault {
            TestFault::Stall(run) => Fault::Stall { run },
            TestFault::Fail(run) => Fault::Fail { run },
        });
    }

    fn release(&self) {
        self.cpu.release();
    }
}

#[test]
fn the_cpu_device_conforms() {
    assert_conforms(&Cpu::new(Some(1 << 30), |device| device));
}

#[test]
fn the_cpu_device_conforms_without_a_memory_limit() {
    assert_conforms(&Cpu::new(None, |device| device));
}

#[test]
fn a_watched_device_conforms_and_its_runs_are_counted() {
    let witness = Witness::new();
    assert_conforms(&Cpu::new(Some(1 << 30), |device| witness.watch(device)));
    let seen = witness.testimonies();
    let [seen] = seen.as_slice() else { panic!("{seen:?}") };
    assert_eq!((seen.device.as_str(), seen.is_virtual), ("cpu", false));
    assert!(seen.contexts > 10 && seen.submissions > 10 && seen.completed_runs > 29, "{seen:?}");
    witness.reset();
    assert_eq!(witness.testimonies()[0].completed_runs, 0);
}
