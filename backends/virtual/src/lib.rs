//! The virtual NPU: an in-process twin of the `amdxdna` kernel driver and of the array at control-code level.
//!
//! Behind [`npuhal_amdxdna::driver::Driver`] it lets everything above the driver run unchanged on a machine without the
//! hardware. Design choices, first:
//!
//! * **It fails, it does not forgive.** Host and device memory are separate; an unflushed write is invisible to the other
//!   side. Whatever hardware would not do well ends in a [`Diagnosis`] with the operation's index, which tests read; the
//!   client sees only what hardware shows it.
//! * **Deterministic.** Time is virtual and advances only when a client waits. Commands run as late as they can: a buffer
//!   that the client touches too early is caught.
//! * **The array ends at the shim.** Control code is executed operation by operation, shim descriptors move real bytes,
//!   and what lies behind the shim's streams is a [`CoreProgram`]: a Rust type that consumes input streams and produces
//!   output streams with the design's arithmetic. Configuration images are executed; their writes name the program.
//! * **Nothing here is a measurement.** Times are modelled, and say so.

pub mod array;
mod clock;
mod device;
mod diagnosis;
mod driver;
mod execute;
mod fault;
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
