//! What the client tests share: devices, kits, and runs through level 1.
#![allow(dead_code, unreachable_pub, reason = "every test file uses a part")]

use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::driver::Driver;
use npuhal_amdxdna::format::txn::Version;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::device::{
    Arg, BufferRef, BufferSpec, Completion, Context, Deadline, Device, Kernel, LengthUnit, Program, Runlist,
};
use npuhal_core::{DeviceError, RunError};
use npuhal_virtual::kit::{self, Kit};
use npuhal_virtual::{Profile, VirtualDevice, VirtualSpec};
use std::sync::Arc;
use std::time::Duration;

/// How a kit comes to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    Xclbin,
    PartialElf,
    FullElf,
}

/// Every combination that the order of things allows: both generations, all profiles, all flows.
pub fn combinations() -> Vec<(VirtualSpec, Flow)> {
    let mut all = Vec::new();
    for profile in Profile::ALL {
        for (silicon, flows) in [
            (Silicon::Npu1, &[Flow::Xclbin, Flow::PartialElf][..]),
            (Silicon::Npu4, &[Flow::Xclbin, Flow::FullElf][..]),
            (Silicon::Npu5, &[Flow::PartialElf, Flow::FullElf][..]),
        ] {
            all.extend(flows.iter().map(|flow| (VirtualSpec::new(silicon).with_profile(profile), *flow)));
        }
    }
    all
}

/// The encodings take turns, so that both are run.
pub fn version_of(flow: Flow) -> Version {
    if flow == Flow::Xclbin { Version::Wide } else { Version::Compact }
}

/// A context and a kernel in it.
pub type Loaded = (Box<dyn Context>, Box<dyn Kernel>);

/// A device and the client on it.
pub struct Bench {
    pub hardware: Arc<VirtualDevice>,
    pub npu: NpuDevice,
}

impl Bench {
    pub fn new(spec: &VirtualSpec) -> Self {
        let hardware = VirtualDevice::new(spec);
        let npu = NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap();
        Self { hardware, npu }
    }

    /// The client on a wrapped driver.
    pub fn wrapped(
        spec: &VirtualSpec,
        wrap: impl FnOnce(Arc<dyn Driver>) -> Arc<dyn Driver>,
    ) -> Result<Self, DeviceError> {
        let hardware = VirtualDevice::new(spec);
        let npu = NpuDevice::open(wrap(hardware.connect()), &hardware.identity())?;
        Ok(Self { hardware, npu })
    }

    pub fn buffer(&self, words: &[u32]) -> Result<BufferRef, DeviceError> {
        let buffer = self.npu.allocate(&BufferSpec::tensor(4 * words.len() as u64, "test"))?;
        buffer.write(0, &to_bytes(words))?;
        Ok(buffer)
    }

    pub fn empty(&self, words: usize) -> Result<BufferRef, DeviceError> {
        self.npu.allocate(&BufferSpec::tensor(4 * words as u64, "test"))
    }

    /// A context with the kit's kernel.
    pub fn load(&self, kit: &Kit, flow: Flow) -> Result<Loaded, DeviceError> {
        let (container, code) = match flow {
            Flow::Xclbin => (kit.xclbin().unwrap(), kit.instructions().unwrap()),
            Flow::PartialElf => (kit.xclbin().unwrap(), kit.partial_elf().unwrap()),
            Flow::FullElf => (kit.full_elf(true).unwrap(), Vec::new()),
        };
        let (unit, full) = (&kit.name, Program::FullElf { image: &container, kernel: &kit.name });
        let length_unit = LengthUnit::Words;
        let (boot, program) = match flow {
            Flow::Xclbin => {
                (Program::Xclbin { image: &container }, Program::Instructions { unit, stream: &code, length_unit })
            }
            Flow::PartialElf => (Program::Xclbin { image: &container }, Program::PartialElf { unit, image: &code }),
            Flow::FullElf => (full, full),
        };
        let mut context = self.npu.open_context(&boot)?;
        let kernel = context.load(&program)?;
        Ok((context, kernel))
    }

    /// No diagnosis may be left.
    pub fn assert_clean(&self, what: &str) {
        let diagnoses: Vec<_> = self.hardware.diagnoses().iter().map(ToString::to_string).collect();
        assert!(diagnoses.is_empty(), "{what}: {diagnoses:#?}");
    }
}

pub fn to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub fn read_words(buffer: &BufferRef) -> Result<Vec<u32>, DeviceError> {
    let mut bytes = vec![0; buffer.len_bytes() as usize];
    buffer.read(0, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

pub fn pattern(words: usize, seed: u32) -> Vec<u32> {
    (0..words as u32).map(|i| (i ^ seed).wrapping_mul(0x9E37_79B1).rotate_left(seed % 32)).collect()
}

pub fn buffers(buffers: &[&BufferRef]) -> Vec<Arg> {
    buffers.iter().map(|buffer| Arg::Buffer((*buffer).clone())).collect()
}

/// Longer than every watch-dog.
pub fn patience() -> Deadline {
    Deadline::within(Duration::from_secs(100))
}

pub fn submit(list: &mut dyn Runlist) -> Result<Completion, RunError> {
    list.submit()?.wait(patience())
}

/// A copy kit of two streams, as big as the tests like it.
pub const COPY_WORDS: usize = 2048;

pub fn copy_kit(silicon: Silicon, flow: Flow) -> Kit {
    kit::copy(silicon, version_of(flow), COPY_WORDS as u32, 2, 256).unwrap()
}

pub const SCALE_ELEMENTS: usize = 4096;

pub fn scale_kit(silicon: Silicon, flow: Flow) -> Kit {
    kit::vector_scale(silicon, version_of(flow), SCALE_ELEMENTS as u32, 1024).unwrap()
}
