//! A driver that forgets one thing.
#![allow(unreachable_pub, reason = "a module of a test")]

use npuhal_amdxdna::driver::{
    ArrayShape, BoHandle, BoInfo, BoKind, ContextHandle, ContextSpec, CreateBo, CreatedContext, CuConfig, Driver,
    DriverVersion, ExecCommand, ImportedBo, MapRequest, Mapping, OutOfMapping, SyncDirection, SyncobjHandle,
};
use npuhal_amdxdna::errno::Errno;
use npuhal_core::device::DeviceTime;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What is forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forget {
    Nothing,
    /// Flush number `n`.
    Flush(usize),
    /// Invalidation number `n`.
    Invalidate(usize),
    /// Argument handle number `n`, counted over all submissions.
    Argument(usize),
}

/// What was seen: the kind of object of every flush, invalidation and argument handle.
#[derive(Debug, Default)]
pub struct Seen {
    pub flushes: Vec<BoKind>,
    pub invalidations: Vec<BoKind>,
    pub arguments: Vec<BoKind>,
}

#[derive(Debug)]
pub struct Forgetful {
    inner: Arc<dyn Driver>,
    forget: Forget,
    seen: Arc<Mutex<Seen>>,
    kinds: Mutex<HashMap<BoHandle, BoKind>>,
}

impl Forgetful {
    pub fn new(inner: Arc<dyn Driver>, forget: Forget, seen: &Arc<Mutex<Seen>>) -> Arc<Self> {
        Arc::new(Self { inner, forget, seen: Arc::clone(seen), kinds: Mutex::default() })
    }
}

#[derive(Debug)]
struct ForgetfulMapping {
    inner: Arc<dyn Mapping>,
    kind: BoKind,
    forget: Forget,
    seen: Arc<Mutex<Seen>>,
}

impl Mapping for ForgetfulMapping {
    fn address(&self) -> u64 {
        self.inner.address()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, at_bytes: u64, dst: &mut [u8]) -> Result<(), OutOfMapping> {
        self.inner.read(at_bytes, dst)
    }

    fn write(&self, at_bytes: u64, src: &[u8]) -> Result<(), OutOfMapping> {
        self.inner.write(at_bytes, src)
    }

    fn fill(&self, range: Range<u64>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), OutOfMapping> {
        self.inner.fill(range, fill)
    }

    fn load_u32(&self, at_bytes: u64) -> Result<u32, OutOfMapping> {
        self.inner.load_u32(at_bytes)
    }

    fn store_u32(&self, at_bytes: u64, value: u32) -> Result<(), OutOfMapping> {
        self.inner.store_u32(at_bytes, value)
    }

    fn flush(&self, ranges: &[Range<u64>]) -> Result<(), OutOfMapping> {
        let mut seen = self.seen.lock().unwrap();
        seen.flushes.push(self.kind);
        if self.forget == Forget::Flush(seen.flushes.len() - 1) {
            return Ok(());
        }
        drop(seen);
        self.inner.flush(ranges)
    }

    fn invalidate(&self, range: Range<u64>) -> Result<(), OutOfMapping> {
        let mut seen = self.seen.lock().unwrap();
        seen.invalidations.push(self.kind);
        if self.forget == Forget::Invalidate(seen.invalidations.len() - 1) {
            return Ok(());
        }
        drop(seen);
        self.inner.invalidate(range)
    }
}

impl Driver for Forgetful {
    fn version(&self) -> Result<DriverVersion, Errno> {
        self.inner.version()
    }

    fn get_info(&self, param: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.inner.get_info(param, buffer)
    }

    fn get_array(&self, param: u32, shape: ArrayShape, buffer: &mut [u8]) -> Result<ArrayShape, Errno> {
        self.inner.get_array(param, shape, buffer)
    }

    fn create_bo(&self, request: &CreateBo<'_>) -> Result<BoHandle, Errno> {
        let bo = self.inner.create_bo(request)?;
        self.kinds.lock().unwrap().insert(bo, request.kind);
        Ok(bo)
    }

    fn bo_info(&self, bo: BoHandle) -> Result<BoInfo, Errno> {
        self.inner.bo_info(bo)
    }

    fn map(&self, request: &MapRequest) -> Result<Arc<dyn Mapping>, Errno> {
        let inner = self.inner.map(request)?;
        let kind = self.kinds.lock().unwrap()[&request.bo];
        Ok(Arc::new(ForgetfulMapping { inner, kind, forget: self.forget, seen: Arc::clone(&self.seen) }))
    }

    fn sync_bo(&self, bo: BoHandle, direction: SyncDirection, range: Range<u64>) -> Result<(), Errno> {
        self.inner.sync_bo(bo, direction, range)
    }

    fn close_bo(&self, bo: BoHandle) -> Result<(), Errno> {
        self.inner.close_bo(bo)
    }

    fn export_dma_buf(&self, bo: BoHandle) -> Result<OwnedFd, Errno> {
        self.inner.export_dma_buf(bo)
    }

    fn import_dma_buf(&self, fd: BorrowedFd<'_>) -> Result<ImportedBo, Errno> {
        self.inner.import_dma_buf(fd)
    }

    fn create_context(&self, spec: &ContextSpec) -> Result<CreatedContext, Errno> {
        self.inner.create_context(spec)
    }

    fn config_cus(&self, context: ContextHandle, units: &[CuConfig]) -> Result<(), Errno> {
        self.inner.config_cus(context, units)
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), Errno> {
        self.inner.destroy_context(context)
    }

    fn exec(&self, command: &ExecCommand<'_>) -> Result<u64, Errno> {
        let kinds = self.kinds.lock().unwrap();
        let mut seen = self.seen.lock().unwrap();
        let mut args = Vec::new();
        for arg in command.args {
            seen.arguments.push(kinds[arg]);
            if self.forget != Forget::Argument(seen.arguments.len() - 1) {
                args.push(*arg);
            }
        }
        drop((kinds, seen));
        self.inner.exec(&ExecCommand { args: &args, ..*command })
    }

    fn wait_timeline(&self, syncobj: SyncobjHandle, point: u64, deadline: Option<Duration>) -> Result<(), Errno> {
        self.inner.wait_timeline(syncobj, point, deadline)
    }

    fn destroy_syncobj(&self, syncobj: SyncobjHandle) -> Result<(), Errno> {
        self.inner.destroy_syncobj(syncobj)
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn pause(&self) {
        self.inner.pause();
    }

    fn device_time(&self, context: ContextHandle, sequence: u64) -> Option<DeviceTime> {
        self.inner.device_time(context, sequence)
    }
}
