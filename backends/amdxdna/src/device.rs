//! Level 1 of npuhal on the driver trait, once for both generations.

use crate::budget::ContextBudget;
use crate::cache_of_programs::{MAX_BYTES, ProgramCache};
use crate::context::NpuContext;
use crate::discovery::FoundNpu;
use crate::driver::{BoKind, Driver, HEAP_CHUNK_BYTES, Mapping, Qos};
use crate::error::{Operation, driver_error, retry};
use crate::kernel_driver::KernelDriver;
use crate::load::Boot;
use crate::memory_object::MemoryObject;
use crate::session::Session;
use crate::silicon::Silicon;
use crate::uapi::query::{self, AieMetadata};
use crate::units::xclbin_boot;
use npuhal_core::DeviceError;
use npuhal_core::card::{DeviceCard, DriverCard};
use npuhal_core::device::{BufferObject, BufferRef, BufferSpec, BufferUse, Context, Device, Program};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Which device a driver speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpuIdentity {
    /// Id of the card: `npu1`, `virtual:npu5`, …
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Part.
    pub silicon: Silicon,
    /// True for the virtual NPU.
    pub is_virtual: bool,
    /// What the contexts of this process are counted by: the same for every open file of one device, e.g. its PCI address,
    /// and different for every virtual device.
    pub address: String,
}

/// An open NPU.
#[derive(Debug)]
pub struct NpuDevice {
    session: Arc<Session>,
    silicon: Silicon,
    card: DeviceCard,
    core_rows: u32,
    budget: Arc<ContextBudget>,
    programs: Arc<ProgramCache>,
}

/// What an open device takes at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NpuUsage {
    /// Buffer objects, the device heap not counted.
    pub buffer_objects: usize,
    /// Size of the device heap in bytes.
    pub heap_bytes: u64,
    /// Host memory of the cache of parsed programs, in bytes.
    pub program_cache_bytes: u64,
    /// Most that the cache may take.
    pub program_cache_limit_bytes: u64,
    /// Bytes of code written to device memory since the device was opened.
    pub patched_bytes: u64,
    /// Cache lines flushed for that.
    pub flushed_code_lines: u64,
}

impl NpuDevice {
    /// Opens the device behind `driver`: checks the driver, makes the device heap, asks for the shape of the array.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] for a foreign driver, [`DeviceError::Driver`], [`DeviceError::OutOfMemory`].
    pub fn open(driver: Arc<dyn Driver>, identity: &NpuIdentity) -> Result<Self, DeviceError> {
        let session = Session::open(driver, &identity.id)?;
        let metadata = metadata(&session)?;
        let facts = identity.silicon.facts();
        let columns = u32::from(metadata.cols).saturating_sub(facts.unusable_columns);
        let core_rows = u32::from(metadata.core.row_count);
        if columns == 0 || core_rows == 0 {
            return Err(DeviceError::Unavailable {
                device: identity.id.clone(),
                reason: format!("the driver reports {} columns and {core_rows} core rows", metadata.cols),
                remedy: "update the amdxdna driver and the NPU firmware".to_owned(),
            });
        }
        let budget = ContextBudget::of_device(&identity.address, facts.context_limit);
        let version = session.version();
        let card = DeviceCard {
            id: identity.id.clone(),
            name: identity.name.clone(),
            generation: identity.silicon.generation(),
            is_virtual: identity.is_virtual,
            columns,
            core_rows,
            memory_bytes: None,
            driver: Some(DriverCard {
                name: version.name.clone(),
                version: format!("{}.{}", version.major, version.minor),
                firmware: firmware(&session),
            }),
            context_limit: Some(facts.context_limit),
            features: Vec::new(),
        };
        let programs = Arc::new(ProgramCache::new(MAX_BYTES));
        Ok(Self { session, silicon: identity.silicon, card, core_rows, budget, programs })
    }

    /// Opens a device that was found on this machine. [`crate::discovery::check`] says more about why it may fail.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] for a part that is not served or has no node; as [`NpuDevice::open`].
    pub fn open_found(npu: &FoundNpu) -> Result<Self, DeviceError> {
        let (Some(silicon), Some(node), Some(card)) = (npu.silicon, &npu.node, npu.card()) else {
            return Err(DeviceError::Unavailable {
                device: npu.id.clone(),
                reason: "no part that is served, or no device node".to_owned(),
                remedy: "run `npuhal doctor`".to_owned(),
            });
        };
        let driver = KernelDriver::open(node).map_err(|errno| driver_error(Operation::Open, errno))?;
        let identity =
            NpuIdentity { id: card.id, name: card.name, silicon, is_virtual: false, address: npu.pci_address.clone() };
        Self::open(Arc::new(driver), &identity)
    }

    /// Part.
    #[must_use]
    pub fn silicon(&self) -> Silicon {
        self.silicon
    }

    /// What the device takes at the moment.
    #[must_use]
    pub fn usage(&self) -> NpuUsage {
        let (patched_bytes, flushed_code_lines) = self.session.patch_counts();
        NpuUsage {
            patched_bytes,
            flushed_code_lines,
            buffer_objects: self.session.live_objects(),
            heap_bytes: self.session.heap().len() as u64 * HEAP_CHUNK_BYTES,
            program_cache_bytes: self.programs.len_bytes(),
            program_cache_limit_bytes: MAX_BYTES,
        }
    }

    /// Lends host pages ([`crate::host_pages`]) to the device as a buffer of `len_bytes`, without a copy.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] where the pages are fewer; [`DeviceError::Driver`], e.g. over the limit of locked memory.
    pub fn adopt(&self, pages: Arc<dyn Mapping>, len_bytes: u64) -> Result<BufferRef, DeviceError> {
        Ok(BufferRef::whole(self.session.adopt(pages, len_bytes)?))
    }

    /// Exports the whole object behind `buffer` as dma-buf.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for a buffer of another device; [`DeviceError::Driver`], e.g. for device memory.
    pub fn export(&self, buffer: &BufferRef) -> Result<OwnedFd, DeviceError> {
        let object = MemoryObject::of(&**buffer.object());
        let object = object.filter(|object| Arc::ptr_eq(object.session(), &self.session));
        let object = object.ok_or_else(|| DeviceError::Misuse {
            operation: "export",
            reason: "the buffer belongs to another device".to_owned(),
        })?;
        self.session.export(&object)
    }

    /// Imports a dma-buf. An export of this device comes back as the object it was.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<BufferRef, DeviceError> {
        Ok(BufferRef::whole(self.session.import(dma_buf)?))
    }

    /// Device address of the first byte of `buffer`, for tools and tests.
    #[must_use]
    pub fn device_address(&self, buffer: &BufferRef) -> Option<u64> {
        let object = MemoryObject::of(&**buffer.object())?;
        Some(object.device_address() + buffer.offset_bytes())
    }
}

impl Device for NpuDevice {
    fn card(&self) -> &DeviceCard {
        &self.card
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        let kind = match spec.usage {
            BufferUse::Tensor => BoKind::Share,
            BufferUse::DeviceLocal => BoKind::Dev,
            other => {
                return Err(DeviceError::Unsupported {
                    device: self.card.id.clone(),
                    feature: format!("buffers for {other:?} ({})", spec.label),
                    remedy: String::new(),
                });
            }
        };
        let object: Arc<dyn BufferObject> = self.session.allocate(kind, spec.len_bytes)?;
        Ok(BufferRef::whole(object))
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        Ok(Box::new(self.open_context_with(boot, Qos::default())?))
    }
}

impl NpuDevice {
    /// [`Device::open_context`] with wishes about scheduling.
    ///
    /// # Errors
    /// As [`Device::open_context`].
    pub fn open_context_with(&self, boot: &Program<'_>, qos: Qos) -> Result<NpuContext, DeviceError> {
        let boot = match *boot {
            Program::Xclbin { image } => xclbin_boot(image, &self.programs)?,
            Program::FullElf { image, kernel } => Boot::full_elf(image, kernel, &self.programs)?,
            _ => {
                return Err(DeviceError::Unsupported {
                    device: self.card.id.clone(),
                    feature: "a context that boots from anything but an xclbin or a full ELF".to_owned(),
                    remedy: "open the context with the container first, then load the kernel into it".to_owned(),
                });
            }
        };
        if boot.columns == 0 || boot.columns > self.card.columns {
            return Err(DeviceError::BadProgram {
                program: "context".to_owned(),
                reason: format!("wanted 1 to {} columns, found {}", self.card.columns, boot.columns),
            });
        }
        NpuContext::open(&self.session, self.silicon, self.core_rows, &self.budget, Boot { qos, ..boot })
    }
}

fn metadata(session: &Session) -> Result<AieMetadata, DeviceError> {
    let mut payload = [0; AieMetadata::LEN_BYTES];
    retry(|| session.driver().get_info(query::AIE_METADATA, &mut payload))
        .map_err(|errno| driver_error(Operation::Query, errno))?;
    AieMetadata::decode(&payload).ok_or_else(|| driver_error(Operation::Query, crate::errno::Errno::EINVAL))
}

/// Firmware version where the driver tells it; drivers may not.
fn firmware(session: &Session) -> Option<String> {
    let mut payload = [0; 16];
    retry(|| session.driver().get_info(query::FIRMWARE_VERSION, &mut payload)).ok()?;
    let [major, minor, patch, build] = query::decode_firmware_version(&payload)?;
    Some(format!("{major}.{minor}.{patch}.{build}"))
}
