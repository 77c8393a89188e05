//! Hardware contexts: creation, the life and loss of one, loading kernels into it.

use crate::budget::{ContextBudget, ContextLease};
use crate::driver::{BoKind, ContextHandle, ContextSpec, CreatedContext, CuConfig, SyncobjHandle};
use crate::error::{Operation, driver_error, retry};
use crate::format::reloc::Rebind;
use crate::load::{Boot, Loader};
use crate::memory_object::MemoryObject;
use crate::program::{KernelProgram, Section};
use crate::runlist::NpuRunlist;
use crate::session::Session;
use crate::silicon::Silicon;
use npuhal_core::DeviceError;
use npuhal_core::device::{ArgSpec, Context, ContextState, Kernel, Program, Runlist};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of scratch memory a column, for saving the array when a context is preempted.
const SCRATCH_BYTES_PER_COLUMN: u64 = 512 << 10;

/// The hardware context as everybody who uses it shares it.
#[derive(Debug)]
pub(crate) struct ContextCore {
    session: Arc<Session>,
    silicon: Silicon,
    columns: u32,
    life: Mutex<Life>,
    memory: Mutex<ContextMemory>,
    rebinds: Mutex<Vec<KnownRebind>>,
}

/// Most pairs of sections whose differences are kept.
const REBINDS_KEPT: usize = 8;

/// What turns one section into another: found out once, used for every run of a list.
#[derive(Debug)]
struct KnownRebind {
    from: Arc<[u8]>,
    to: Arc<[u8]>,
    rebind: Arc<Rebind>,
}

#[derive(Debug)]
struct Life {
    /// `None` once destroyed.
    created: Option<CreatedContext>,
    lost: Option<String>,
    lease: Option<ContextLease>,
}

/// Device memory that belongs to the context as a whole.
#[derive(Debug, Default)]
struct ContextMemory {
    /// Configurations by content: those of the compute units first.
    pdis: Vec<(Arc<[u8]>, Arc<MemoryObject>)>,
    scratch: Option<Arc<MemoryObject>>,
}

impl ContextMemory {
    /// Device memory with `pdi`; the same contents are uploaded once.
    fn pdi(&mut self, session: &Arc<Session>, pdi: &Arc<[u8]>) -> Result<Arc<MemoryObject>, DeviceError> {
        if let Some((_, object)) = self.pdis.iter().find(|(known, _)| Arc::ptr_eq(known, pdi) || known == pdi) {
            return Ok(Arc::clone(object));
        }
        let object = session.allocate(BoKind::Dev, pdi.len() as u64)?;
        object.store(0, pdi).and_then(|()| object.flush_all()).map_err(|error| object.out_of_range(error))?;
        self.pdis.push((Arc::clone(pdi), Arc::clone(&object)));
        Ok(object)
    }
}

impl ContextCore {
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(crate) fn silicon(&self) -> Silicon {
        self.silicon
    }

    /// The handles, while the context is usable.
    pub(crate) fn handles(&self) -> Result<(ContextHandle, SyncobjHandle), DeviceError> {
        let life = self.life();
        match (&life.lost, &life.created) {
            (Some(reason), _) => Err(DeviceError::ContextLost { reason: reason.clone() }),
            (None, Some(created)) => Ok((created.context, created.syncobj)),
            (None, None) => Err(DeviceError::ContextLost { reason: "it was closed".to_owned() }),
        }
    }

    /// Why the context is lost.
    pub(crate) fn lost(&self) -> Option<String> {
        self.life().lost.clone()
    }

    /// Ends the context for ever. Where the part needs it, the other contexts of the process go with it.
    pub(crate) fn lose(&self, reason: &str) {
        let others = {
            let mut life = self.life();
            life.lost.get_or_insert_with(|| reason.to_owned());
            self.destroy(&mut life)
        };
        for other in others {
            let mut life = other.life();
            life.lost.get_or_insert_with(|| {
                format!(
                    "another context of this process was closed ({reason}), and on {} all go together",
                    self.silicon
                )
            });
            // The others' others are the same set: each is visited by this loop.
            let _ = other.destroy(&mut life);
        }
    }

    /// Device memory with `pdi`, shared by all runs of the context.
    pub(crate) fn pdi(&self, pdi: &Arc<[u8]>) -> Result<Arc<MemoryObject>, DeviceError> {
        self.memory().pdi(&self.session, pdi)
    }

    /// Memory for saving the array, made when it is first needed.
    pub(crate) fn scratch(&self) -> Result<Arc<MemoryObject>, DeviceError> {
        let mut memory = self.memory();
        if let Some(object) = &memory.scratch {
            return Ok(Arc::clone(object));
        }
        let object = self.session.allocate(BoKind::Cmd, SCRATCH_BYTES_PER_COLUMN * u64::from(self.columns))?;
        object.flush_all().map_err(|error| object.out_of_range(error))?;
        memory.scratch = Some(Arc::clone(&object));
        Ok(object)
    }

    /// What has to be rewritten to turn code of section `from` into code of section `to`; `None` where they cannot be
    /// compared word by word.
    pub(crate) fn rebind(&self, from: &Section, to: &Section) -> Option<Arc<Rebind>> {
        let mut rebinds = self.rebinds.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it =
            |known: &&KnownRebind| Arc::ptr_eq(&known.from, &from.template) && Arc::ptr_eq(&known.to, &to.template);
        if let Some(known) = rebinds.iter().find(is_it) {
            return Some(Arc::clone(&known.rebind));
        }
        let rebind = Arc::new(to.table.rebind_from(&from.table, &from.template, &to.template).ok()?);
        if rebinds.len() == REBINDS_KEPT {
            rebinds.remove(0);
        }
        let (from, to) = (Arc::clone(&from.template), Arc::clone(&to.template));
        rebinds.push(KnownRebind { from, to, rebind: Arc::clone(&rebind) });
        Some(rebind)
    }

    /// Gives synchronisation object and context back, once. Returns the contexts that must go as well.
    fn destroy(&self, life: &mut Life) -> Vec<Arc<Self>> {
        let Some(created) = life.created.take() else { return Vec::new() };
        let driver = self.session.driver();
        if let Err(errno) = retry(|| driver.destroy_syncobj(created.syncobj)) {
            tracing::warn!(%errno, "destroying a synchronisation object failed");
        }
        if let Err(errno) = retry(|| driver.destroy_context(created.context)) {
            tracing::warn!(%errno, "destroying a hardware context failed");
        }
        *self.memory() = ContextMemory::default();
        match life.lease.take() {
            Some(lease) if self.silicon.facts().evicts_together => lease.others(),
            _ => Vec::new(),
        }
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, ContextMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the hardware context open: shared by the [`NpuContext`] and the submissions in flight.
#[derive(Debug)]
pub(crate) struct ContextOwner {
    core: Arc<ContextCore>,
}

impl ContextOwner {
    pub(crate) fn core(&self) -> &Arc<ContextCore> {
        &self.core
    }
}

impl Drop for ContextOwner {
    fn drop(&mut self) {
        self.core.lose("it was closed");
    }
}

/// A hardware context of the NPU.
#[derive(Debug)]
pub struct NpuContext {
    owner: Arc<ContextOwner>,
    loader: Loader,
}

impl NpuContext {
    /// Creates the context that `boot` describes and configures its compute units.
    pub(crate) fn open(
        session: &Arc<Session>,
        silicon: Silicon,
        core_rows: u32,
        budget: &Arc<ContextBudget>,
        boot: Boot,
    ) -> Result<Self, DeviceError> {
        let lease = budget.lease()?;
        let mut memory = ContextMemory::default();
        let mut units = Vec::with_capacity(boot.unit_pdis.len());
        for pdi in &boot.unit_pdis {
            units.push(CuConfig { bo: memory.pdi(session, pdi)?.handle(), function: 0 });
        }
        let spec = ContextSpec { num_tiles: boot.columns * core_rows, max_opc: boot.max_opc, qos: boot.qos };
        let driver = session.driver();
        let created =
            retry(|| driver.create_context(&spec)).map_err(|errno| driver_error(Operation::CreateContext, errno))?;
        let core = Arc::new(ContextCore {
            session: Arc::clone(session),
            silicon,
            columns: boot.columns,
            life: Mutex::new(Life { created: Some(created), lost: None, lease: None }),
            memory: Mutex::new(memory),
            rebinds: Mutex::default(),
        });
        lease.attach(&core);
        core.life().lease = Some(lease);
        // From here on dropping the owner destroys the context.
        let owner = Arc::new(ContextOwner { core });
        if !units.is_empty() {
            // Where it fails, dropping the owner takes the other contexts along on parts where they go together: destroying one
            // makes the firmware refuse the next submission of the others (published; that it does so for one that was never
            // configured is inferred), and they had better be told now than by that.
            retry(|| driver.config_cus(created.context, &units))
                .map_err(|errno| driver_error(Operation::ConfigureUnits, errno))?;
        }
        Ok(Self { owner, loader: boot.loader })
    }
}

impl Context for NpuContext {
    fn load(&mut self, program: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError> {
        self.owner.core().handles()?;
        let program = self.loader.load(program, self.owner.core().silicon())?;
        Ok(Box::new(NpuKernel { core: Arc::clone(self.owner.core()), program }))
    }

    fn runlist(&mut self) -> Box<dyn Runlist> {
        Box::new(NpuRunlist::new(&self.owner))
    }

    fn state(&self) -> ContextState {
        self.owner.core().lost().map_or(ContextState::Ready, ContextState::Lost)
    }
}

/// A kernel that was loaded into a context. It holds no device memory.
#[derive(Debug, Clone)]
pub struct NpuKernel {
    core: Arc<ContextCore>,
    program: Arc<KernelProgram>,
}

impl NpuKernel {
    pub(crate) fn program(&self) -> &Arc<KernelProgram> {
        &self.program
    }

    /// Whether the kernel was loaded into the context of `core`.
    pub(crate) fn belongs_to(&self, core: &Arc<ContextCore>) -> bool {
        Arc::ptr_eq(&self.core, core)
    }
}

impl Kernel for NpuKernel {
    fn name(&self) -> &str {
        &self.program.name
    }

    fn signature(&self) -> &[ArgSpec] {
        &self.program.signature
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
