//! The [`Driver`] that is the kernel: `/dev/accel/accelN`.
#![allow(unsafe_code, reason = "issues ioctls")]

use crate::cache;
use crate::driver::{
    ArrayShape, BoHandle, BoInfo, BoKind, ContextHandle, ContextSpec, CreateBo, CreatedContext, CuConfig, Driver,
    DriverVersion, ExecCommand, ImportedBo, MapRequest, Mapping, PAGE_BYTES, Placement, Qos, SyncDirection,
    SyncobjHandle,
};
use crate::errno::Errno;
use crate::memory::{HeapWindow, MappedPages};
use crate::uapi;
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One open file of the kernel driver.
#[derive(Debug)]
pub struct KernelDriver {
    node: PathBuf,
    file: OwnedFd,
    /// Reserved at the first heap mapping.
    window: Mutex<Option<Arc<HeapWindow>>>,
}

impl KernelDriver {
    /// Opens a node such as `/dev/accel/accel0`. Opening binds the process's address space to the device.
    ///
    /// # Errors
    /// `EACCES` no permission; `ENOENT` no such node; `EINVAL`, `ENODEV` no shared virtual memory (IOMMU off, a virtual
    /// machine, firmware settings); `EOPNOTSUPP` on a processor without user-space cache flushes.
    pub fn open(node: &Path) -> Result<Self, Errno> {
        if !cache::SUPPORTED {
            return Err(Errno::EOPNOTSUPP);
        }
        let file = rustix::fs::open(node, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { node: node.to_owned(), file, window: Mutex::new(None) })
    }

    /// The node that was opened.
    #[must_use]
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// Issues `request` with `argument`, which the kernel reads and overwrites.
    ///
    /// # Safety
    /// `T` is the struct of `request`, and every address in it is good for what the kernel does with it: readable or
    /// writable for its length until the call returns.
    unsafe fn call<T>(&self, request: u32, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: as promised by the caller.
        Ok(unsafe { rustix::ioctl::ioctl(&self.file, Call { request, argument }) }?)
    }

    fn heap_window(&self) -> Result<Arc<HeapWindow>, Errno> {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        match &*window {
            Some(window) => Ok(Arc::clone(window)),
            None => Ok(Arc::clone(window.insert(Arc::new(HeapWindow::reserve()?)))),
        }
    }
}

impl Driver for KernelDriver {
    fn version(&self) -> Result<DriverVersion, Errno> {
        let (mut name, mut description) = ([0_u8; 128], [0_u8; 128]);
        let mut version = uapi::DrmVersion {
            name_len: name.len() as u64,
            name: address_of(&mut name),
            desc_len: description.len() as u64,
            desc: address_of(&mut description),
            ..Default::default()
        };
        // SAFETY: both arrays are writable for the lengths given.
        unsafe { self.call(uapi::VERSION, &mut version)? };
        Ok(DriverVersion {
            name: text(&name, version.name_len),
            description: text(&description, version.desc_len),
            major: version.version_major,
            minor: version.version_minor,
            patch: version.patch,
        })
    }

    fn get_info(&self, param: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
        let buffer_size = u32::try_from(buffer.len()).map_err(|_| Errno::EINVAL)?;
        let mut info = uapi::GetInfo { param, buffer_size, buffer: address_of(buffer) };
        // SAFETY: `buffer` is writable for its length.
        unsafe { self.call(uapi::GET_INFO, &mut info)? };
        Ok(info.buffer_size as usize)
    }

    fn get_array(&self, param: u32, shape: ArrayShape, buffer: &mut [u8]) -> Result<ArrayShape, Errno> {
        if shape.element_bytes as usize * shape.elements as usize > buffer.len() {
            return Err(Errno::EINVAL);
        }
        let mut array = uapi::GetArray {
            param,
            element_size: shape.element_bytes,
            num_element: shape.elements,
            pad: 0,
            buffer: address_of(buffer),
        };
        // SAFETY: `buffer` is writable for `element_size * num_element` bytes (just checked).
        unsafe { self.call(uapi::GET_ARRAY, &mut array)? };
        Ok(ArrayShape { element_bytes: array.element_size, elements: array.num_element })
    }

    fn create_bo(&self, request: &CreateBo<'_>) -> Result<BoHandle, Errno> {
        let table;
        let mut create = bo_request(request.kind, request.size_bytes);
        if let Some(memory) = request.user_memory {
            let is_whole = |value: u64| value.is_multiple_of(PAGE_BYTES);
            if request.size_bytes != 0 || !is_whole(memory.address()) || !is_whole(memory.len_bytes()) {
                return Err(Errno::EINVAL);
            }
            table = user_memory_table(memory.address(), memory.len_bytes());
            create.vaddr = std::ptr::from_ref(&table) as u64;
        }
        // SAFETY: `vaddr` is 0 or a table that lives until the call returns. Pages named by the table stay valid as long as
        // the object, because the client keeps the mapping (contract of `CreateBo`); the kernel pins them besides.
        unsafe { self.call(uapi::CREATE_BO, &mut create)? };
        Ok(BoHandle(create.handle))
    }

    fn bo_info(&self, bo: BoHandle) -> Result<BoInfo, Errno> {
        let mut info = uapi::GetBoInfo { handle: bo.0, ..Default::default() };
        // SAFETY: the struct holds no address that the kernel reads.
        unsafe { self.call(uapi::GET_BO_INFO, &mut info)? };
        let known = |value: u64| (value != uapi::INVALID_ADDRESS).then_some(value);
        Ok(BoInfo {
            map_offset: known(info.map_offset),
            host_address: known(info.vaddr),
            device_address: known(info.xdna_addr),
        })
    }

    fn map(&self, request: &MapRequest) -> Result<Arc<dyn Mapping>, Errno> {
        let (file, offset, len) = (self.file.as_fd(), request.map_offset, request.len_bytes);
        let pages = match request.placement {
            Placement::Anywhere => MappedPages::file(file, offset, len)?,
            Placement::HeapWindow { offset_bytes } => {
                MappedPages::chunk(&self.heap_window()?, offset_bytes, file, offset, len)?
            }
        };
        Ok(Arc::new(pages))
    }

    fn sync_bo(&self, bo: BoHandle, direction: SyncDirection, range: Range<u64>) -> Result<(), Errno> {
        let size = range.end.saturating_sub(range.start);
        let mut sync = uapi::SyncBo { handle: bo.0, direction: direction as u32, offset: range.start, size };
        // SAFETY: the struct holds no address.
        unsafe { self.call(uapi::SYNC_BO, &mut sync) }
    }

    fn close_bo(&self, bo: BoHandle) -> Result<(), Errno> {
        // SAFETY: the struct holds no address.
        unsafe { self.call(uapi::GEM_CLOSE, &mut uapi::GemClose { handle: bo.0, pad: 0 }) }
    }

    fn export_dma_buf(&self, bo: BoHandle) -> Result<OwnedFd, Errno> {
        let mut prime = export_request(bo);
        // SAFETY: the struct holds no address.
        unsafe { self.call(uapi::PRIME_HANDLE_TO_FD, &mut prime)? };
        if prime.fd < 0 {
            return Err(Errno::EBADF);
        }
        // SAFETY: the kernel just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(prime.fd) })
    }

    fn import_dma_buf(&self, fd: BorrowedFd<'_>) -> Result<ImportedBo, Errno> {
        let size_bytes = rustix::fs::seek(fd, SeekFrom::End(0))?;
        let mut prime = uapi::PrimeHandle { handle: 0, flags: 0, fd: fd.as_raw_fd() };
        // SAFETY: the struct holds no address.
        unsafe { self.call(uapi::PRIME_FD_TO_HANDLE, &mut prime)? };
        Ok(ImportedBo { bo: BoHandle(prime.handle), size_bytes })
    }

    fn create_context(&self, spec: &ContextSpec) -> Result<CreatedContext, Errno> {
        let qos = qos_info(&spec.qos);
        let mut create = context_request(spec);
        create.qos_p = std::ptr::from_ref(&qos) as u64;
        // SAFETY: `qos` is readable until the call returns.
        unsafe { self.call(uapi::CREATE_HWCTX, &mut create)? };
        Ok(CreatedContext { context: ContextHandle(create.handle), syncobj: SyncobjHandle(create.syncobj_handle) })
    }

    fn config_cus(&self, context: ContextHandle, units: &[CuConfig]) -> Result<(), Errno> {
        let value = encode_units(units)?;
        let mut config = units_request(context, value.len() as u32);
        config.param_val = value.as_ptr() as u64;
        // SAFETY: `value` is readable until the call returns.
        unsafe { self.call(uapi::CONFIG_HWCTX, &mut config) }
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), Errno> {
        // SAFETY: the struct holds no address.
        unsafe { self.call(uapi::DESTROY_HWCTX, &mut uapi::DestroyHwctx { handle: context.0, pad: 0 }) }
    }

    fn exec(&self, command: &ExecCommand<'_>) -> Result<u64, Errno> {
        if command.args.len() > uapi::EXEC_MAX_ARGS {
            return Err(Errno::EINVAL);
        }
        let mut exec = exec_request(command);
        exec.args = command.args.as_ptr() as u64;
        // SAFETY: `args` is readable for `arg_count` words (`BoHandle` is a transparent `u32`) until the call returns.
        unsafe { self.call(uapi::EXEC_CMD, &mut exec)? };
        Ok(exec.seq)
    }

    fn wait_timeline(&self, syncobj: SyncobjHandle, point: u64, deadline: Option<Duration>) -> Result<(), Errno> {
        let (handles, points) = ([syncobj.0], [point]);
        let mut wait = wait_request(deadline);
        (wait.handles, wait.points) = (handles.as_ptr() as u64, points.as_ptr() as u64);
        // SAFETY: both arrays are readable for one element until the call returns.
        unsafe { self.call(uapi::SYNCOBJ_TIMELINE_WAIT, &mut wait) }
    }

    fn destroy_syncobj(&self, syncobj: SyncobjHandle) -> Result<(), Errno> {
        // SAFETY: the struct holds no address.
        unsafe { self.call(uapi::SYNCOBJ_DESTROY, &mut uapi::SyncobjDestroy { handle: syncobj.0, pad: 0 }) }
    }

    fn now(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
    }

    fn pause(&self) {
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn bo_request(kind: BoKind, size: u64) -> uapi::CreateBo {
    uapi::CreateBo { size, kind: kind as u32, ..Default::default() }
}

/// One range of the process's own memory.
fn user_memory_table(vaddr: u64, len: u64) -> uapi::VaTable {
    uapi::VaTable { dmabuf_fd: -1, num_entries: 1, vaddr, len }
}

fn qos_info(qos: &Qos) -> uapi::QosInfo {
    uapi::QosInfo {
        gops: qos.gops,
        fps: qos.fps,
        dma_bandwidth: qos.dma_bandwidth,
        latency: qos.latency_ms,
        frame_exec_time: qos.frame_exec_time_ms,
        priority: qos.priority,
        ..Default::default()
    }
}

/// Without its pointer.
fn context_request(spec: &ContextSpec) -> uapi::CreateHwctx {
    uapi::CreateHwctx { max_opc: spec.max_opc, num_tiles: spec.num_tiles, ..Default::default() }
}

/// Without its pointer.
fn units_request(context: ContextHandle, param_val_size: u32) -> uapi::ConfigHwctx {
    uapi::ConfigHwctx { handle: context.0, param_type: uapi::CONFIG_CU, param_val_size, ..Default::default() }
}

/// Without its pointer.
fn exec_request(command: &ExecCommand<'_>) -> uapi::ExecCmd {
    uapi::ExecCmd {
        hwctx: command.context.0,
        kind: uapi::SUBMIT_EXEC_BUF,
        cmd_handles: u64::from(command.command.0),
        cmd_count: 1,
        arg_count: command.args.len() as u32,
        ..Default::default()
    }
}

/// Without its pointers.
fn wait_request(deadline: Option<Duration>) -> uapi::TimelineWait {
    uapi::TimelineWait {
        timeout_nsec: deadline.map_or(i64::MAX, |at| i64::try_from(at.as_nanos()).unwrap_or(i64::MAX)),
        count_handles: 1,
        flags: uapi::WAIT_FOR_SUBMIT,
        ..Default::default()
    }
}

fn export_request(bo: BoHandle) -> uapi::PrimeHandle {
    uapi::PrimeHandle { handle: bo.0, flags: (OFlags::RDWR | OFlags::CLOEXEC).bits(), fd: -1 }
}

/// The value of `CONFIG_CU`: a count, then one entry a unit.
///
/// # Errors
/// `EINVAL` no or too many units, `E2BIG` too long a value: what the kernel itself would answer.
pub fn encode_units(units: &[CuConfig]) -> Result<Vec<u8>, Errno> {
    let len = 8 + 8 * units.len();
    if len > uapi::CONFIG_CU_MAX_BYTES {
        return Err(Errno::E2BIG);
    }
    if units.is_empty() || units.len() > uapi::CONFIG_CU_MAX_UNITS {
        return Err(Errno::EINVAL);
    }
    let mut value = Vec::with_capacity(len);
    value.extend_from_slice(&(units.len() as u64).to_le_bytes());
    for unit in units {
        value.extend_from_slice(&unit.bo.0.to_le_bytes());
        value.extend_from_slice(&[unit.function, 0, 0, 0]);
    }
    Ok(value)
}

struct Call<'a, T> {
    request: u32,
    argument: &'a mut T,
}

// SAFETY: the kernel reads and writes the struct behind `as_ptr`, which `argument` lends for the length of the call; the
// output is nothing but success.
unsafe impl<T> Ioctl for Call<'_, T> {
    type Output = ();

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.request as Opcode
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(self.argument).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

fn address_of(buffer: &mut [u8]) -> u64 {
    buffer.as_mut_ptr() as u64
}

fn text(bytes: &[u8], len: u64) -> String {
    let len = usize::try_from(len).unwrap_or(usize::MAX).min(bytes.len());
    String::from_utf8_lossy(&bytes[..len]).trim_end_matches('\0').to_owned()
}

#[cfg(test)]
mod tests;
