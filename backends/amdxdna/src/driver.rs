//! The driver trait: one method for each operation of the kernel interface.
//!
//! Two implementations exist: [`crate::kernel_driver::KernelDriver`] talks to `/dev/accel/accelN`, and the virtual NPU
//! answers in the same process. Everything above the trait is the same code for both.
//!
//! Design choices, first:
//!
//! * **One method, one driver call.** No policy: a method neither retries nor falls back. [`Errno::EINTR`], `EAGAIN`, heap
//!   growth and reference counts are the client's business, so that a driver that injects faults tests the client.
//! * **Bare error numbers.** A method returns [`Errno`]; the client adds operation, meaning and remedy
//!   ([`crate::error::explain`]).
//! * **Typed structs, handles and slices; no raw pointers.** An implementation needs no `unsafe`.
//! * **Memory is not coherent.** The host reaches a buffer object through a [`Mapping`]. What the host wrote becomes
//!   visible to the device when its cache lines are flushed, and what the device wrote becomes visible to the host when the
//!   lines are invalidated; both are explicit calls. See [`Mapping`] for the one exception, command packets.

use crate::errno::Errno;
use npuhal_core::device::DeviceTime;
use std::fmt;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Size of a cache line; flushes and invalidations act on whole lines.
pub const CACHE_LINE_BYTES: u64 = 64;
/// Size of a page; mappings are whole pages.
pub const PAGE_BYTES: u64 = 4096;
/// Device address of the first byte of the device heap.
pub const HEAP_BASE: u64 = 0x0400_0000;
/// Size and alignment of one chunk of the device heap.
pub const HEAP_CHUNK_BYTES: u64 = 64 << 20;
/// Largest device heap: eight chunks, where driver and firmware can grow it.
pub const HEAP_MAX_BYTES: u64 = 512 << 20;
/// Granularity of buffers inside the device heap.
pub const DEV_ALIGN_BYTES: u64 = 32 << 10;
/// Name that `DRM_IOCTL_VERSION` must report.
pub const DRIVER_NAME: &str = "amdxdna_accel_driver";

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

handle!(
    /// A buffer object of one open file; never 0. A handle may be given out again after it was closed.
    BoHandle
);
handle!(
    /// A hardware context. Neither small nor dense nor private to the process.
    ContextHandle
);
handle!(
    /// A timeline synchronisation object, owned by the client that created the context.
    SyncobjHandle
);

/// Answer of `DRM_IOCTL_VERSION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverVersion {
    /// Name; [`DRIVER_NAME`] for this driver.
    pub name: String,
    /// Description in words.
    pub description: String,
    /// 0 for the mainline driver, 1 for the out-of-tree one.
    pub major: i32,
    /// Minor version: a hint at features in the mainline driver.
    pub minor: i32,
    /// Patch level.
    pub patch: i32,
}

impl DriverVersion {
    /// Time without progress after which the driver ends a command, unless its parameters say otherwise: 60 s in the first
    /// mainline releases, 2 s since (`tdr_timeout_ms`, `timeout_in_sec`). Where the change was between two versions that are
    /// known, the longer time is assumed.
    #[must_use]
    pub const fn watchdog(&self) -> Duration {
        const FIRST_WITH_SHORT_WATCHDOG: i32 = 16;
        match self.major == 0 && self.minor < FIRST_WITH_SHORT_WATCHDOG {
            true => Duration::from_secs(60),
            false => Duration::from_secs(2),
        }
    }
}

/// Type of a buffer object; the numbers are those of `amdxdna_create_bo.type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum BoKind {
    /// Host pages that the device reads and writes: tensors.
    Share = 1,
    /// A chunk of the device heap: parent of [`BoKind::Dev`] objects.
    DevHeap = 2,
    /// A part of the device heap: code and configuration.
    Dev = 3,
    /// A command packet.
    Cmd = 4,
}

impl BoKind {
    /// The kind with number `raw`.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Option<Self> {
        match raw {
            1 => Some(Self::Share),
            2 => Some(Self::DevHeap),
            3 => Some(Self::Dev),
            4 => Some(Self::Cmd),
            _ => None,
        }
    }
}

/// What to create ([`Driver::create_bo`]).
#[derive(Debug, Clone, Copy)]
pub struct CreateBo<'a> {
    /// Type.
    pub kind: BoKind,
    /// Size in bytes as asked for, not rounded; must be 0 together with `user_memory`.
    pub size_bytes: u64,
    /// Existing host pages that become the object's memory ("user pointer"). Both [`Mapping::address`] and
    /// [`Mapping::len_bytes`] are multiples of [`PAGE_BYTES`], otherwise `EINVAL`. The client keeps the mapping alive
    /// until the object is closed and never calls [`Driver::map`] for such an object; the device address is the mapping's
    /// address. The virtual driver keeps a clone of the `Arc` and moves bytes through it.
    pub user_memory: Option<&'a Arc<dyn Mapping>>,
}

/// Answer of [`Driver::bo_info`]. A value of all ones in the kernel's struct is `None` here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoInfo {
    /// Offset to map the object at; opaque. `None`: not mappable ([`BoKind::Dev`]).
    pub map_offset: Option<u64>,
    /// Host address of the object; `None` until it is mapped.
    pub host_address: Option<u64>,
    /// Device address of the object. For host pages it is `None` where the device shares the process's address space and
    /// the object is not mapped yet; after mapping, the device address is the address of the first mapping.
    pub device_address: Option<u64>,
}

/// Where to map an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Anywhere.
    Anywhere,
    /// At this offset from the start of the heap window: one range of host addresses, aligned to [`HEAP_CHUNK_BYTES`] and
    /// [`HEAP_MAX_BYTES`] long, that the driver reserves at the first such request and keeps until it is dropped. Chunk
    /// `n` of the heap is mapped at `n * HEAP_CHUNK_BYTES`.
    HeapWindow {
        /// Offset in bytes, a multiple of [`HEAP_CHUNK_BYTES`].
        offset_bytes: u64,
    },
}

/// What to map ([`Driver::map`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRequest {
    /// The object.
    pub bo: BoHandle,
    /// [`BoInfo::map_offset`] of the object.
    pub map_offset: u64,
    /// Length in bytes, a multiple of [`PAGE_BYTES`]: the object's size, rounded up.
    pub len_bytes: u64,
    /// Where.
    pub placement: Placement,
}

/// An access outside a [`Mapping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("access to bytes {at_bytes}..+{len_bytes} of a mapping of {size_bytes} bytes")]
pub struct OutOfMapping {
    /// First byte.
    pub at_bytes: u64,
    /// Length of the access.
    pub len_bytes: u64,
    /// Size of the mapping.
    pub size_bytes: u64,
}

/// The host's view of an object's memory. Dropping it unmaps.
///
/// Offsets are bytes from the start of the mapping. Every method checks its range and does nothing when it does not fit.
/// Any thread may call any method; calls on one mapping exclude each other, except that the closure of [`Mapping::fill`]
/// must not touch the same mapping.
///
/// # Coherency
///
/// Host and device each see their own copy of a line until the line is moved:
///
/// * [`Mapping::write`], [`Mapping::fill`] and [`Mapping::store_u32`] change the host's copy only;
/// * [`Mapping::flush`] moves whole lines from host to device;
/// * [`Mapping::invalidate`] drops the host's copy of whole lines, so that the next read sees the device's. It is never
///   called for a line with unflushed host writes (on the processor these would be written *back*, over the device's data);
/// * a fresh mapping's lines are dirty (the kernel zeroed them): flush an object whole once before the device writes it,
///   and treat its contents as undefined.
///
/// **Command packets are the exception.** The kernel reads an object of kind [`BoKind::Cmd`] passed as a command (or listed in
/// a chain) with the processor, and writes its header and body back the same way: these accesses are coherent with
/// [`Mapping::write`], [`Mapping::load_u32`] and friends and need neither flush nor invalidate. An object of that kind
/// used as control-packet or scratch memory is ordinary device-visible memory and does need them.
pub trait Mapping: Send + Sync + fmt::Debug {
    /// Host address of the first byte: a real address for the kernel driver, a stable fictitious one otherwise. Where the
    /// device shares the process's address space this is also the device address.
    fn address(&self) -> u64;

    /// Length in bytes.
    fn len_bytes(&self) -> u64;

    /// Copies from the host's view.
    ///
    /// # Errors
    /// [`OutOfMapping`].
    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping>;

    /// Copies into the host's view.
    ///
    /// # Errors
    /// [`OutOfMapping`].
    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping>;

    /// Copies `parts` of `image` into the host's view, where `image` lies at `at_bytes`; the rest of it is not touched.
    ///
    /// # Errors
    /// [`OutOfMapping`]; parts before the one that does not fit are written.
    fn write_parts(&self, at_bytes: u64, image: &[u8], parts: &[Range<usize>]) -> Result<(), OutOfMapping> {
        parts.iter().try_for_each(|part| {
            let at_bytes = at_bytes.saturating_add(part.start as u64);
            let (len_bytes, size_bytes) = (part.len() as u64, self.len_bytes());
            let src = image.get(part.clone()).ok_or(OutOfMapping { at_bytes, len_bytes, size_bytes })?;
            self.write(at_bytes, src)
        })
    }

    /// Lets `fill` read and write `range` of the host's view in place. The whole range counts as written.
    ///
    /// # Errors
    /// [`OutOfMapping`].
    fn fill(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), OutOfMapping>;

    /// Loads one little-endian word with acquire ordering, for words that the kernel changes while a command is in flight.
    /// `at_bytes` is a multiple of 4.
    ///
    /// # Errors
    /// [`OutOfMapping`], also for a misaligned offset.
    fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping>;

    /// Stores one little-endian word with release ordering. `at_bytes` is a multiple of 4.
    ///
    /// # Errors
    /// [`OutOfMapping`], also for a misaligned offset.
    fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping>;

    /// Makes the host's writes in `ranges` visible to the device: every line that a range touches, each once, between two
    /// full fences for the whole call. Ranges are ascending and do not overlap; two may touch the same line.
    ///
    /// # Errors
    /// [`OutOfMapping`], before anything is flushed.
    fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping>;

    /// Makes the device's writes to every line that `range` touches visible to the host.
    ///
    /// # Errors
    /// [`OutOfMapping`].
    fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping>;
}

/// Wishes of a context about scheduling; zero means no wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Qos {
    /// Giga-operations a second.
    pub gops: u32,
    /// Frames a second.
    pub fps: u32,
    /// DMA bandwidth.
    pub dma_bandwidth: u32,
    /// Latency in milliseconds.
    pub latency_ms: u32,
    /// Execution time of a frame in milliseconds.
    pub frame_exec_time_ms: u32,
    /// 0x100 real-time, 0x180 high, 0x200 normal, 0x280 low; 0 is normal.
    pub priority: u32,
}

/// What context to create ([`Driver::create_context`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextSpec {
    /// Columns times core rows.
    pub num_tiles: u32,
    /// Operations a cycle from the partition; 0 for a full ELF.
    pub max_opc: u32,
    /// Wishes.
    pub qos: Qos,
}

/// A created context. Both must be given back: [`Driver::destroy_syncobj`], then [`Driver::destroy_context`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreatedContext {
    /// The context.
    pub context: ContextHandle,
    /// Timeline whose point *n* is signalled when the command with sequence number *n* has ended.
    pub syncobj: SyncobjHandle,
}

/// One compute unit of a context ([`Driver::config_cus`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CuConfig {
    /// A [`BoKind::Dev`] object that holds the unit's PDI.
    pub bo: BoHandle,
    /// Function; normally 0.
    pub function: u8,
}

/// One submission ([`Driver::exec`]).
#[derive(Debug, Clone, Copy)]
pub struct ExecCommand<'a> {
    /// Context that runs it.
    pub context: ContextHandle,
    /// The [`BoKind::Cmd`] object with the packet or chain.
    pub command: BoHandle,
    /// Every object that the device may touch on behalf of the command; unique, ascending. Sub-commands of a chain are not
    /// in the list.
    pub args: &'a [BoHandle],
}

/// Direction of [`Driver::sync_bo`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SyncDirection {
    /// Host to device.
    ToDevice = 0,
    /// Device to host.
    FromDevice = 1,
}

/// Sizes that [`Driver::get_array`] reports back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArrayShape {
    /// Size of one element as the driver knows it.
    pub element_bytes: u32,
    /// Number of elements.
    pub elements: u32,
}

/// An imported dma-buf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImportedBo {
    /// The handle. Importing an export of the same open file gives the *same* handle again, without a reference of its
    /// own: one [`Driver::close_bo`] ends it for all.
    pub bo: BoHandle,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// Operations of the kernel interface, for one open file. Dropping the driver closes the file, which ends whatever is left.
///
/// Every method may also fail with [`Errno::ENODEV`] (the device is gone) and, where it can block or allocate,
/// [`Errno::EINTR`] and [`Errno::ENOMEM`]. Errors named below are those with a meaning of their own.
pub trait Driver: Send + Sync + fmt::Debug {
    /// `DRM_IOCTL_VERSION`.
    ///
    /// # Errors
    /// [`Errno`].
    fn version(&self) -> Result<DriverVersion, Errno>;

    /// `GET_INFO`: fills `buffer` with the payload of parameter `param` (`DRM_AMDXDNA_QUERY_*`; see
    /// [`crate::uapi::query`]) and returns how many bytes the driver reports as the payload's size: the natural size, or the
    /// bytes written for arrays. No more than `buffer.len()` bytes are written.
    ///
    /// # Errors
    /// `EOPNOTSUPP` unknown parameter; `EINVAL`, `ENOSPC` buffer too small where a count matters.
    fn get_info(&self, param: u32, buffer: &mut [u8]) -> Result<usize, Errno>;

    /// `GET_ARRAY`: fills `buffer` with up to `shape.elements` elements at a stride of `shape.element_bytes` and returns the
    /// driver's own element size and the number of elements. `buffer` holds `element_bytes * elements` bytes.
    ///
    /// # Errors
    /// `EINVAL` bad shape or a driver without this call; `EOPNOTSUPP`, `ENOENT`, `ENOSPC`.
    fn get_array(&self, param: u32, shape: ArrayShape, buffer: &mut [u8]) -> Result<ArrayShape, Errno>;

    /// `CREATE_BO`.
    ///
    /// # Errors
    /// `EAGAIN` ([`BoKind::Dev`]: no heap yet, or the heap must grow by another chunk), `EINVAL`, `EBUSY` (second heap where
    /// it cannot grow), `EOPNOTSUPP` (the firmware cannot grow the heap), `ENOSPC` (heap full), `EPERM` and `ENOMEM` (user
    /// memory over the limit of locked memory).
    fn create_bo(&self, request: &CreateBo<'_>) -> Result<BoHandle, Errno>;

    /// `GET_BO_INFO`.
    ///
    /// # Errors
    /// `ENOENT` unknown handle.
    fn bo_info(&self, bo: BoHandle) -> Result<BoInfo, Errno>;

    /// Maps an object, readable and writable, shared, not locked. Each object is mapped at most once.
    ///
    /// # Errors
    /// `EINVAL` not mappable or bad placement; `ENOMEM`, `EAGAIN` no memory.
    fn map(&self, request: &MapRequest) -> Result<Arc<dyn Mapping>, Errno>;

    /// `SYNC_BO`: cache maintenance by the driver. The client flushes in user space; this exists for comparison.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL` (range; also [`SyncDirection::FromDevice`] in recent mainline drivers).
    fn sync_bo(&self, bo: BoHandle, direction: SyncDirection, range: Range<u64>) -> Result<(), Errno>;

    /// `DRM_IOCTL_GEM_CLOSE`. Memory that a running command uses stays alive until the command has ended.
    ///
    /// # Errors
    /// `EINVAL` unknown handle.
    fn close_bo(&self, bo: BoHandle) -> Result<(), Errno>;

    /// `DRM_IOCTL_PRIME_HANDLE_TO_FD`: exports as dma-buf, readable, writable, close-on-exec.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for [`BoKind::Dev`]; `ENOENT`.
    fn export_dma_buf(&self, bo: BoHandle) -> Result<OwnedFd, Errno>;

    /// `DRM_IOCTL_PRIME_FD_TO_HANDLE`.
    ///
    /// # Errors
    /// `EINVAL` not a dma-buf.
    fn import_dma_buf(&self, fd: BorrowedFd<'_>) -> Result<ImportedBo, Errno>;

    /// `CREATE_HWCTX`.
    ///
    /// # Errors
    /// `ENOENT` no heap yet; `ENODEV`, `ENOSPC` no columns; `EINVAL` shape or refused by firmware; `EEXIST`, `ENOMEM`.
    fn create_context(&self, spec: &ContextSpec) -> Result<CreatedContext, Errno>;

    /// `CONFIG_HWCTX` with `CONFIG_CU`: all compute units at once, in the order of their index.
    ///
    /// # Errors
    /// `EINVAL` (unknown context, already configured, count, object of the wrong kind), `E2BIG`.
    fn config_cus(&self, context: ContextHandle, units: &[CuConfig]) -> Result<(), Errno>;

    /// `DESTROY_HWCTX`: cancels what is pending and ends the context.
    ///
    /// # Errors
    /// `EINVAL` unknown context.
    fn destroy_context(&self, context: ContextHandle) -> Result<(), Errno>;

    /// `EXEC_CMD`: queues one command and returns its sequence number. Sequence numbers of a context start at 0. Blocks while
    /// the queue of the context is full.
    ///
    /// # Errors
    /// `EINVAL` (command object, context, inconsistent chain), `ENOENT` (an argument handle).
    fn exec(&self, command: &ExecCommand<'_>) -> Result<u64, Errno>;

    /// `DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT` with "wait for submit" on one point. `deadline` is a point of [`Driver::now`];
    /// `None` waits for ever. Success says that the fence has signalled, *not* that the command completed: the header of
    /// the packet says that. Point 0 may be reported as signalled too early.
    ///
    /// # Errors
    /// `ETIME` deadline passed; `ENOENT` unknown object; `EINTR`.
    fn wait_timeline(&self, syncobj: SyncobjHandle, point: u64, deadline: Option<Duration>) -> Result<(), Errno>;

    /// `DRM_IOCTL_SYNCOBJ_DESTROY`.
    ///
    /// # Errors
    /// `EINVAL`, `ENOENT` unknown object.
    fn destroy_syncobj(&self, syncobj: SyncobjHandle) -> Result<(), Errno>;

    /// Monotonic clock in which deadlines are expressed.
    fn now(&self) -> Duration;

    /// Called by the client between two polls of a packet whose fence has signalled while its header still shows no final
    /// state (sequence number 0). A driver with a clock of its own advances it to the next event; the kernel driver sleeps
    /// for a moment.
    fn pause(&self) {
        std::thread::yield_now();
    }

    /// Time the device spent on a command that has ended, where the driver knows it.
    fn device_time(&self, context: ContextHandle, sequence: u64) -> Option<DeviceTime> {
        let _ = (context, sequence);
        None
    }
}
