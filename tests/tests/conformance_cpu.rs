//! The level-1 suite on the CPU device.

use npuhal_core::device::{Device, Program};
use npuhal_cpu::{CpuDevice, Fault};
use npuhal_tests::conformance::{Element, Subject, TestFault, TestProgram, assert_conforms};

struct Cpu(CpuDevice);

impl Subject for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn device(&self) -> &dyn Device {
        &self.0
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
        self.0.inject(match fault {
            TestFault::Stall(run) => Fault::Stall { run },
            TestFault::Fail(run) => Fault::Fail { run },
        });
    }

    fn release(&self) {
        self.0.release();
    }
}

#[test]
fn the_cpu_device_conforms() {
    assert_conforms(&Cpu(CpuDevice::new(Some(1 << 30))));
}

#[test]
fn the_cpu_device_conforms_without_a_memory_limit() {
    assert_conforms(&Cpu(CpuDevice::new(None)));
}
