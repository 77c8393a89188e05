//! The level-1 suite on the virtual NPU, through the driver client: both generations behind every driver.

use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::format::txn::Version;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::RunError;
use npuhal_core::device::{Arg, BufferSpec, Deadline, Device, LengthUnit, Program, RunIndex};
use npuhal_tests::conformance::{Element, Exceptions, Subject, TestFault, TestProgram, assert_conforms};
use npuhal_virtual::kit::{self, Kit};
use npuhal_virtual::{
    CoreProgram, CoreProgramTable, DiagnosisKind, Profile, ProgramDescription, RunFault, Step, StreamKey, Streams,
    VirtualDevice, VirtualSpec,
};
use std::sync::Arc;
use std::time::Duration;

const ELEMENTS: u32 = 1024;
const PORTION: u32 = 256;
/// Id of [`Negate`], outside those of the virtual array.
const NEGATE: u32 = 0x7E57_0001;

/// What the devices cannot do, whatever the client did.
const UNSUPPORTED: Exceptions = &[(
    "small_buffers_are_refused",
    "neither an xclbin nor an ELF says how long a buffer has to be; code that reaches outside is seen by the array",
)];

/// What the client does otherwise than the suite wants.
const EXPECTED_FAILURES: Exceptions = &[CHAIN_OF_TWO];
const EXPECTED_FAILURES_OF_XCLBINS: Exceptions = &[
    CHAIN_OF_TWO,
    (
        "missing_arguments_are_refused",
        "kernels of xclbins declare more arguments than runs pass: what is left out is 0, as published clients have it",
    ),
];
const CHAIN_OF_TWO: (&str, &str) = (
    "a_timeout_names_its_run",
    "two runs are one chain, and a chain's header names the run that hangs only when the driver's watch-dog has ended it, \
     which is later than the caller's deadline in this case",
);

/// `out = -in` for 32-bit integers, portion by portion.
#[derive(Debug)]
struct Negate;

impl CoreProgram for Negate {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        let mut portion = [0; 4 * PORTION as usize];
        let output = StreamKey::output(0, 0);
        if !streams.has_room(output, portion.len()) || !streams.read(StreamKey::input(0, 0), &mut portion) {
            return Step::Waiting;
        }
        for word in portion.as_chunks_mut::<4>().0 {
            *word = i32::from_le_bytes(*word).wrapping_neg().to_le_bytes();
        }
        match streams.write(output, &portion) {
            true => Step::Progress,
            false => Step::Waiting,
        }
    }

    fn unfinished(&self) -> Option<String> {
        None
    }
}

/// A program of the suite in the forms of both flows.
struct Forms {
    kit: Kit,
    stream: Vec<u8>,
    elf: Vec<u8>,
}

struct VirtualNpu {
    name: String,
    hardware: Arc<VirtualDevice>,
    npu: NpuDevice,
    copy: Forms,
    negate: Forms,
    scale: Forms,
    xclbin: Vec<u8>,
    has_elf_flow: bool,
}

impl VirtualNpu {
    fn new(silicon: Silicon, profile: Profile) -> Self {
        let spec = VirtualSpec::new(silicon).with_profile(profile);
        let mut programs = CoreProgramTable::builtin();
        programs.register(NEGATE, "negate", |_| Ok(Box::new(Negate))).unwrap();
        let hardware = VirtualDevice::with_programs(&spec, programs);
        let npu = NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap();
        let version = if silicon == Silicon::Npu1 { Version::Wide } else { Version::Compact };
        let copy = kit::copy(silicon, version, ELEMENTS, 1, PORTION).unwrap();
        let description = ProgramDescription { id: NEGATE, dimensions: vec![PORTION] };
        let image = kit::image(copy.columns, &description).unwrap();
        let negate = Kit { name: "negate".to_owned(), image, image_id: 3, ..copy.clone() };
        let scale = kit::vector_scale(silicon, version, ELEMENTS, PORTION).unwrap();
        let xclbin = kit::xclbin(&[&copy, &negate, &scale]).unwrap();
        let forms = |kit: Kit| Forms { stream: kit.instructions().unwrap(), elf: kit.full_elf(true).unwrap(), kit };
        Self {
            name: spec.to_string(),
            has_elf_flow: silicon != Silicon::Npu1,
            hardware,
            npu,
            copy: forms(copy),
            negate: forms(negate),
            scale: forms(scale),
            xclbin,
        }
    }
}

impl Subject for VirtualNpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> &dyn Device {
        &self.npu
    }

    fn boot(&self) -> Program<'_> {
        if self.has_elf_flow { self.program(TestProgram::Copy) } else { Program::Xclbin { image: &self.xclbin } }
    }

    fn program(&self, program: TestProgram) -> Program<'_> {
        let Forms { kit, stream, elf } = match program {
            TestProgram::Copy => &self.copy,
            TestProgram::Negate => &self.negate,
            TestProgram::Scale => &self.scale,
        };
        if self.has_elf_flow {
            Program::FullElf { image: elf, kernel: &kit.name }
        } else {
            Program::Instructions { unit: &kit.name, stream, length_unit: LengthUnit::Words }
        }
    }

    fn element(&self) -> Element {
        Element::I32
    }

    fn vector_bytes(&self) -> u64 {
        4 * u64::from(ELEMENTS)
    }

    fn inject(&self, fault: TestFault) {
        match fault {
            TestFault::Stall(run) => self.hardware.inject(run.into(), RunFault::Timeout),
            TestFault::Fail(run) => self.hardware.inject(run.into(), RunFault::Error),
        }
    }

    fn release(&self) {
        self.hardware.forget_faults_of_runs();
    }

    fn unsupported(&self) -> Exceptions {
        UNSUPPORTED
    }

    fn expected_failures(&self) -> Exceptions {
        if self.has_elf_flow { EXPECTED_FAILURES } else { EXPECTED_FAILURES_OF_XCLBINS }
    }
}

/// Conforms, leaves nothing on the device, and the array complains of nothing that was not asked for.
fn conforms(silicon: Silicon) {
    for profile in Profile::ALL {
        let subject = VirtualNpu::new(silicon, profile);
        assert_conforms(&subject);
        let statistics = subject.hardware.statistics();
        assert_eq!((statistics.contexts, statistics.syncobjs), (0, 0), "{}", subject.name);
        assert_eq!(subject.npu.usage().buffer_objects, 0, "{}", subject.name);
        let diagnoses = subject.hardware.take_diagnoses();
        let unwanted: Vec<_> = diagnoses.iter().filter(|diagnosis| diagnosis.kind != DiagnosisKind::Injected).collect();
        assert!(unwanted.is_empty(), "{}: {unwanted:#?}", subject.name);
    }
}

#[test]
fn the_virtual_npu1_conforms_with_an_xclbin() {
    conforms(Silicon::Npu1);
}

#[test]
fn the_virtual_npu5_conforms_with_full_elfs() {
    conforms(Silicon::Npu5);
}

/// The other half of the expected failure: once the watch-dog has ended it, the hanging run of a chain is named.
#[test]
fn a_run_that_the_watchdog_ends_is_named() {
    for (silicon, profile) in
        [Silicon::Npu1, Silicon::Npu5].into_iter().flat_map(|silicon| Profile::ALL.map(|profile| (silicon, profile)))
    {
        let subject = VirtualNpu::new(silicon, profile);
        let mut context = subject.npu.open_context(&subject.boot()).unwrap();
        let copy = context.load(&subject.program(TestProgram::Copy)).unwrap();
        let buffers =
            [0; 3].map(|_| subject.npu.allocate(&BufferSpec::tensor(subject.vector_bytes(), "chain")).unwrap());
        buffers.iter().for_each(|buffer| buffer.fill(&mut |bytes| bytes.fill(1)).unwrap());
        let mut list = context.runlist();
        for pair in buffers.windows(2) {
            list.push(&*copy, &[Arg::Buffer(pair[0].clone()), Arg::Buffer(pair[1].clone())]).unwrap();
        }
        subject.inject(TestFault::Stall(1));
        let error = list.submit().unwrap().wait(Deadline::within(Duration::from_secs(100))).unwrap_err();
        assert!(matches!(error, RunError::TimedOut { run: Some(RunIndex(1)), .. }), "{}: {error:?}", subject.name);
    }
}
