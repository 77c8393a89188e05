//! A driver that counts the time inside the calls to another: what is left is the client's.
#![allow(unreachable_pub, reason = "a module of benchmarks")]

use npuhal_amdxdna::driver::{
    ArrayShape, BoHandle, BoInfo, ContextHandle, ContextSpec, CreateBo, CreatedContext, CuConfig, Driver,
    DriverVersion, ExecCommand, ImportedBo, MapRequest, Mapping, OutOfMapping, SyncDirection, SyncobjHandle,
};
use npuhal_amdxdna::errno::Errno;
use npuhal_core::device::DeviceTime;
use std::hint::black_box;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Calls, and the time inside them.
#[derive(Debug, Default)]
pub struct Spent {
    calls: AtomicU64,
    inside_ns: AtomicU64,
}

/// What counting costs, a call, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct CountingCost {
    /// As counted inside the call.
    pub inside_ns: f64,
    /// As the client sees it.
    pub whole_ns: f64,
}

impl Spent {
    fn count<T>(&self, call: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = call();
        self.inside_ns.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        self.calls.fetch_add(1, Relaxed);
        result
    }

    /// Number of calls and nanoseconds inside them since the last time.
    pub fn take(&self) -> (u64, u64) {
        (self.calls.swap(0, Relaxed), self.inside_ns.swap(0, Relaxed))
    }

    /// Measures calls that do nothing.
    pub fn cost() -> CountingCost {
        const CALLS: u32 = 1_000_000;
        let spent = Self::default();
        let started = Instant::now();
        for call in 0..CALLS {
            spent.count(|| black_box(call));
        }
        let whole_ns = started.elapsed().as_nanos() as f64 / f64::from(CALLS);
        CountingCost { inside_ns: spent.take().1 as f64 / f64::from(CALLS), whole_ns }
    }
}

#[derive(Debug)]
pub struct Counted {
    inner: Arc<dyn Driver>,
    spent: Arc<Spent>,
}

impl Counted {
    pub fn new(inner: Arc<dyn Driver>, spent: &Arc<Spent>) -> Arc<Self> {
        Arc::new(Self { inner, spent: Arc::clone(spent) })
    }
}

#[derive(Debug)]
struct CountedMapping {
    inner: Arc<dyn Mapping>,
    spent: Arc<Spent>,
}

impl Mapping for CountedMapping {
    fn address(&self) -> u64 {
        self.inner.address()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        self.spent.count(|| self.inner.read(at_bytes, dst))
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        // Where the array is left out nothing overwrites the mark of results that never came, so it is not set.
        let is_mark = src == [0xff; 4];
        self.spent.count(|| if is_mark { Ok(()) } else { self.inner.write(at_bytes, src) })
    }

    fn write_parts(&self, at_bytes: u64, image: &[u8], parts: &[Range<usize>]) -> Result<(), OutOfMapping> {
        self.spent.count(|| self.inner.write_parts(at_bytes, image, parts))
    }

    /// What fills is the client: not counted.
    fn fill(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), OutOfMapping> {
        self.inner.fill(range, fill)
    }

    fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping> {
        self.spent.count(|| self.inner.load_u32(at_bytes))
    }

    fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping> {
        self.spent.count(|| self.inner.store_u32(at_bytes, value))
    }

    fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        self.spent.count(|| self.inner.flush(ranges))
    }

    fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        self.spent.count(|| self.inner.invalidate(range))
    }
}

impl Driver for Counted {
    fn version(&self) -> Result<DriverVersion, Errno> {
        self.spent.count(|| self.inner.version())
    }

    fn get_info(&self, param: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.spent.count(|| self.inner.get_info(param, buffer))
    }

    fn get_array(&self, param: u32, shape: ArrayShape, buffer: &mut [u8]) -> Result<ArrayShape, Errno> {
        self.spent.count(|| self.inner.get_array(param, shape, buffer))
    }

    fn create_bo(&self, request: &CreateBo<'_>) -> Result<BoHandle, Errno> {
        self.spent.count(|| self.inner.create_bo(request))
    }

    fn bo_info(&self, bo: BoHandle) -> Result<BoInfo, Errno> {
        self.spent.count(|| self.inner.bo_info(bo))
    }

    fn map(&self, request: &MapRequest) -> Result<Arc<dyn Mapping>, Errno> {
        let inner = self.spent.count(|| self.inner.map(request))?;
        Ok(Arc::new(CountedMapping { inner, spent: Arc::clone(&self.spent) }))
    }

    fn sync_bo(&self, bo: BoHandle, direction: SyncDirection, range: Range<u64>) -> Result<(), Errno> {
        self.spent.count(|| self.inner.sync_bo(bo, direction, range))
    }

    fn close_bo(&self, bo: BoHandle) -> Result<(), Errno> {
        self.spent.count(|| self.inner.close_bo(bo))
    }

    fn export_dma_buf(&self, bo: BoHandle) -> Result<OwnedFd, Errno> {
        self.spent.count(|| self.inner.export_dma_buf(bo))
    }

    fn import_dma_buf(&self, fd: BorrowedFd<'_>) -> Result<ImportedBo, Errno> {
        self.spent.count(|| self.inner.import_dma_buf(fd))
    }

    fn create_context(&self, spec: &ContextSpec) -> Result<CreatedContext, Errno> {
        self.spent.count(|| self.inner.create_context(spec))
    }

    fn config_cus(&self, context: ContextHandle, units: &[CuConfig]) -> Result<(), Errno> {
        self.spent.count(|| self.inner.config_cus(context, units))
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), Errno> {
        self.spent.count(|| self.inner.destroy_context(context))
    }

    fn exec(&self, command: &ExecCommand<'_>) -> Result<u64, Errno> {
        self.spent.count(|| self.inner.exec(command))
    }

    fn wait_timeline(&self, syncobj: SyncobjHandle, point: u64, deadline: Option<Duration>) -> Result<(), Errno> {
        self.spent.count(|| self.inner.wait_timeline(syncobj, point, deadline))
    }

    fn destroy_syncobj(&self, syncobj: SyncobjHandle) -> Result<(), Errno> {
        self.spent.count(|| self.inner.destroy_syncobj(syncobj))
    }

    fn now(&self) -> Duration {
        self.spent.count(|| self.inner.now())
    }

    fn pause(&self) {
        self.spent.count(|| self.inner.pause());
    }

    fn device_time(&self, context: ContextHandle, sequence: u64) -> Option<DeviceTime> {
        self.spent.count(|| self.inner.device_time(context, sequence))
    }
}
