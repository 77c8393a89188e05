//! The host processor as a level-1 device: host memory as buffers, builtin kernels.
//!
//! It is the smallest complete implementation of the device traits and runs the conformance suite of all backends; models run
//! on the CPU through segments, which need no device.

use crate::context::CpuContext;
use crate::kernel::{BUILTINS, builtin_names};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::{BufferObject, BufferRef, BufferSpec, Context, Device, Program};
use npuhal_core::error::DeviceError;
use std::any::Any;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Id of the CPU's card.
pub const DEVICE_ID: &str = "cpu";

/// The host processor's card.
#[must_use]
pub fn cpu_card() -> DeviceCard {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    DeviceCard {
        id: DEVICE_ID.to_owned(),
        name: format!("host processor ({})", std::env::consts::ARCH),
        generation: Generation::Cpu,
        is_virtual: false,
        columns: u32::try_from(threads).unwrap_or(u32::MAX),
        core_rows: 1,
        memory_bytes: total_memory_bytes(),
        driver: None,
        context_limit: None,
        features: instruction_sets(),
    }
}

/// Memory of this machine, where the system says it (`/proc/meminfo`, in KiB).
fn total_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Vector instruction sets of this processor that matter here.
fn instruction_sets() -> Vec<String> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        let sets = [
            ("AVX2", std::arch::is_x86_feature_detected!("avx2")),
            ("FMA", std::arch::is_x86_feature_detected!("fma")),
            ("F16C", std::arch::is_x86_feature_detected!("f16c")),
            ("AVX-512F", std::arch::is_x86_feature_detected!("avx512f")),
            ("AVX-512-VNNI", std::arch::is_x86_feature_detected!("avx512vnni")),
        ];
        found.extend(sets.into_iter().filter(|(_, there)| *there).map(|(name, _)| name.to_owned()));
    }
    #[cfg(target_arch = "aarch64")]
    found.push("NEON".to_owned());
    found
}

/// A deliberate failure of one run, for tests of what stands on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The run does not end until [`CpuDevice::release`] or until its context is lost.
    Stall {
        /// Position of the run in its list.
        run: u32,
    },
    /// The run ends in an error.
    Fail {
        /// Position of the run in its list.
        run: u32,
    },
}

/// A fault of one submission. A release after the submission counts, also before its run is reached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArmedFault {
    pub(crate) fault: Fault,
    pub(crate) releases: u64,
}

/// Faults that are waiting for a submission, and the gate of stalled runs.
#[derive(Default)]
pub(crate) struct Faults {
    state: Mutex<FaultState>,
    released: Condvar,
}

#[derive(Default)]
struct FaultState {
    next: Option<Fault>,
    releases: u64,
}

impl Faults {
    /// The fault of the submission that is made now.
    pub(crate) fn take(&self) -> Option<ArmedFault> {
        let mut state = self.lock();
        let releases = state.releases;
        state.next.take().map(|fault| ArmedFault { fault, releases })
    }

    /// Blocks until a release after `releases`, or until `give_up` says so.
    pub(crate) fn stall(&self, releases: u64, give_up: impl Fn() -> bool) {
        const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(5);
        let mut state = self.lock();
        while state.releases == releases && !give_up() {
            state = self.released.wait_timeout(state, LOOK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that buffers of a device may take together.
struct Budget {
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl Budget {
    fn take(&self, len_bytes: u64) -> Result<(), u64> {
        let room = |used: u64| used.checked_add(len_bytes).filter(|sum| *sum <= self.limit_bytes);
        let taken = self.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, room);
        taken.map(|_| ()).map_err(|used| self.limit_bytes.saturating_sub(used))
    }

    fn give_back(&self, len_bytes: u64) {
        self.used_bytes.fetch_sub(len_bytes, Ordering::AcqRel);
    }
}

/// The host processor.
pub struct CpuDevice {
    card: DeviceCard,
    budget: Arc<Budget>,
    faults: Arc<Faults>,
}

impl CpuDevice {
    /// A device whose buffers may take `memory_bytes` together; `None` is the machine's memory.
    #[must_use]
    pub fn new(memory_bytes: Option<u64>) -> Self {
        let mut card = cpu_card();
        card.memory_bytes = memory_bytes.or(card.memory_bytes);
        let budget = Budget { limit_bytes: card.memory_bytes.unwrap_or(u64::MAX), used_bytes: AtomicU64::new(0) };
        Self { card, budget: Arc::new(budget), faults: Arc::default() }
    }

    /// Lets the next submission of any context meet `fault`.
    pub fn inject(&self, fault: Fault) {
        self.faults.lock().next = Some(fault);
    }

    /// Lets stalled runs go on.
    pub fn release(&self) {
        self.faults.lock().releases += 1;
        self.faults.released.notify_all();
    }
}

impl Device for CpuDevice {
    fn card(&self) -> &DeviceCard {
        &self.card
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        if spec.len_bytes == 0 {
            let reason = format!("the buffer '{}' has no bytes; wanted at least 1", spec.label);
            return Err(DeviceError::Misuse { operation: "allocate", reason });
        }
        let full = |available_bytes| DeviceError::OutOfMemory {
            device: self.card.id.clone(),
            memory: "host memory",
            wanted_bytes: spec.len_bytes,
            available_bytes,
            remedy: format!("'{}' was to be allocated; free other buffers or take a smaller model", spec.label),
        };
        self.budget.take(spec.len_bytes).map_err(|left| full(Some(left)))?;
        let mut bytes = Vec::new();
        let len = usize::try_from(spec.len_bytes).unwrap_or(usize::MAX);
        if bytes.try_reserve_exact(len).is_err() {
            self.budget.give_back(spec.len_bytes);
            return Err(full(None));
        }
        bytes.resize(len, 0);
        let (bytes, holds) = (Mutex::new(bytes), AtomicU32::new(0));
        let budget = Arc::clone(&self.budget);
        Ok(BufferRef::whole(Arc::new(CpuBuffer { len_bytes: spec.len_bytes, bytes, holds, budget })))
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        check_builtin(boot)?;
        Ok(Box::new(CpuContext::open(Arc::clone(&self.faults))?))
    }
}

/// The name of a builtin kernel that exists.
pub(crate) fn check_builtin<'a>(program: &Program<'a>) -> Result<&'a str, DeviceError> {
    let Program::Builtin { name } = *program else {
        return Err(DeviceError::Unsupported {
            device: DEVICE_ID.to_owned(),
            feature: "programs of an NPU".to_owned(),
            remedy: format!("take a builtin kernel: {}", builtin_names()),
        });
    };
    if BUILTINS.iter().any(|builtin| builtin.name == name) {
        return Ok(name);
    }
    let reason = format!("there is no such builtin kernel; wanted one of {}", builtin_names());
    Err(DeviceError::BadProgram { program: name.to_owned(), reason })
}

/// Host memory. While submissions hold it, only kernels reach it.
pub(crate) struct CpuBuffer {
    len_bytes: u64,
    bytes: Mutex<Vec<u8>>,
    holds: AtomicU32,
    budget: Arc<Budget>,
}

impl CpuBuffer {
    /// A submission takes hold.
    pub(crate) fn hold(&self) {
        self.holds.fetch_add(1, Ordering::AcqRel);
    }

    /// A submission lets go.
    pub(crate) fn let_go(&self) {
        self.holds.fetch_sub(1, Ordering::AcqRel);
    }

    /// A kernel's read.
    pub(crate) fn device_read(&self, at_bytes: u64, len_bytes: u64) -> Result<Vec<u8>, DeviceError> {
        let range = self.range(at_bytes, len_bytes)?;
        Ok(self.bytes.lock().unwrap_or_else(PoisonError::into_inner)[range].to_vec())
    }

    /// A kernel's write.
    pub(crate) fn device_write(&self, at_bytes: u64, src: &[u8]) -> Result<(), DeviceError> {
        let range = self.range(at_bytes, src.len() as u64)?;
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)[range].copy_from_slice(src);
        Ok(())
    }

    fn range(&self, at_bytes: u64, len_bytes: u64) -> Result<Range<usize>, DeviceError> {
        match at_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Ok(at_bytes as usize..end as usize),
            _ => Err(DeviceError::OutOfRange { at_bytes, len_bytes, size_bytes: self.len_bytes }),
        }
    }

    /// The host's access to `range`. The first look keeps a busy buffer from blocking the caller, the second one sees a
    /// submission made meanwhile.
    fn access<T>(&self, range: Range<usize>, job: impl FnOnce(&mut [u8]) -> T) -> Result<T, DeviceError> {
        let check = || if self.holds.load(Ordering::Acquire) > 0 { Err(DeviceError::Busy) } else { Ok(()) };
        check()?;
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        check()?;
        Ok(job(&mut bytes[range]))
    }
}

impl BufferObject for CpuBuffer {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), DeviceError> {
        self.access(self.range(at_bytes, src.len() as u64)?, |bytes| bytes.copy_from_slice(src))
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        self.access(self.range(at_bytes, dst.len() as u64)?, |bytes| dst.copy_from_slice(bytes))
    }

    fn fill_with(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        let Some(len) = range.end.checked_sub(range.start) else {
            return Err(DeviceError::OutOfRange { at_bytes: range.start, len_bytes: 0, size_bytes: self.len_bytes });
        };
        self.access(self.range(range.start, len)?, fill)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        self.budget.give_back(self.len_bytes);
    }
}
