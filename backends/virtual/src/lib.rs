//! The virtual NPU: an in-process twin of the `amdxdna` kernel driver and of the array at control-code level.
//!
//! Behind [`npuhal_amdxdna::driver::Driver`] it lets everything above the driver run unchanged on a machine without the
//! hardware. Design choices, first:
//!
//! * **It fails, it does not forgive.** Host and device memory are separate; an unflushed write is invisible to the
//!   other side. Whatever hardware would not do well ends in a [`Diagnosis`] with the operation's index, which tests
//!   read; the client sees only what hardware shows it.
//! * **Deterministic.** Time is virtual and advances only when a client waits. Commands run as late as they can: a
//!   buffer that the client touches too early is caught.
//! * **The array ends at the shim.** Control code is executed operation by operation, shim descriptors move real bytes,
//!   and what lies behind the shim's streams is a [`CoreProgram`]: a Rust type that consumes input streams and produces
//!   output streams with the design's arithmetic. Configuration images are executed; their writes name the program.
//! * **Nothing here is a measurement.** Times are modelled, and say so.
//!
//! ```
//! use npuhal_amdxdna::NpuDevice;
//! use npuhal_amdxdna::format::txn::Version;
//! use npuhal_core::device::{Arg, BufferSpec, Deadline, Device, Program};
//! use npuhal_virtual::{VirtualDevice, VirtualSpec, kit};
//!
//! let spec: VirtualSpec = "virtual:npu5".parse()?;
//! let hardware = VirtualDevice::new(&spec);
//! let npu = NpuDevice::open(hardware.connect(), &hardware.identity())?;
//!
//! let elf = kit::copy(spec.silicon, Version::Compact, 256, 2, 32)?.full_elf(true)?;
//! let program = Program::FullElf { image: &elf, kernel: "copy" };
//! let mut context = npu.open_context(&program)?;
//! let kernel = context.load(&program)?;
//!
//! let from = npu.allocate(&BufferSpec::tensor(1024, "from"))?;
//! let to = npu.allocate(&BufferSpec::tensor(1024, "to"))?;
//! from.write(0, &[7; 1024])?;
//! let mut list = context.runlist();
//! list.push(&*kernel, &[Arg::Buffer(from), Arg::Buffer(to.clone())])?;
//! list.submit()?.wait(Deadline::never())?;
//!
//! let mut back = [0; 1024];
//! to.read(0, &mut back)?;
//! assert_eq!(back, [7; 1024]);
//! assert!(hardware.diagnoses().is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod array;
mod clock;
pub mod design;
mod device;
mod diagnosis;
mod driver;
mod execute;
mod fault;
#[cfg(test)]
mod golden;
pub mod kit;
mod memory;
mod objects;
mod packet;
mod query;
mod spec;

pub use array::program::{CoreProgram, CoreProgramTable, ProgramDescription, Step, StreamKey, Streams};
pub use device::{Statistics, VirtualDevice};
pub use diagnosis::{Diagnosis, DiagnosisKind};
pub use driver::VirtualDriver;
pub use fault::{Call, Fault, FaultPlan, FaultSyntaxError, RunFault};
pub use spec::{Firmware, Profile, SpecError, VirtualSpec};
