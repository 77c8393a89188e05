//! One run of a runlist: its arguments, its code in device memory, its packet.
//!
//! Code in device memory belongs to the run, not to the kernel. Binding another kernel rewrites the words that differ and
//! flushes their cache lines; so the amount of device memory depends on the number of runs and not on the number of kernels.

use crate::context::{ContextCore, NpuKernel};
use crate::driver::{BoHandle, BoKind, CACHE_LINE_BYTES, DEV_ALIGN_BYTES};
use crate::format::reloc::RelocError;
use crate::memory_object::MemoryObject;
use crate::packet::{COMMAND_BYTES, CodeRef, HealthRecord, MODE_TRANSACTION, Opcode, Packet, PacketTooLong};
use crate::patch;
use crate::program::{KernelProgram, Launch, Role, Section, Source};
use npuhal_core::DeviceError;
use npuhal_core::device::{Arg, ArgKind, ArgSpec};
use std::ops::Range;
use std::sync::Arc;

/// Room for the places that change from one context length to the next.
const TYPICAL_CHANGES: usize = 32;

/// One run.
#[derive(Debug)]
pub(crate) struct Run {
    program: Arc<KernelProgram>,
    args: Vec<BoundArg>,
    sections: Vec<BoundSection>,
    scratch_control: Option<Arc<MemoryObject>>,
    /// Context-wide memory that the code points to.
    shared: Vec<Arc<MemoryObject>>,
    packet: Packet,
    command: Arc<MemoryObject>,
}

/// An argument, resolved to what goes to the device.
#[derive(Debug, Clone)]
struct BoundArg {
    value: u64,
    object: Option<Arc<MemoryObject>>,
}

/// A section in device memory.
#[derive(Debug)]
struct BoundSection {
    role: Role,
    object: Arc<MemoryObject>,
    /// What the device memory holds; empty where that is not known.
    image: Vec<u8>,
    /// Values that were inserted into the image.
    values: Vec<u64>,
}

impl Run {
    /// Binds `kernel` to `args`: allocates, patches, flushes.
    pub(crate) fn new(core: &Arc<ContextCore>, kernel: &NpuKernel, args: &[Arg]) -> Result<Self, DeviceError> {
        let program = Arc::clone(kernel.program());
        check_count(&program, args.len())?;
        let args = args.iter().enumerate().map(|(i, arg)| bind_arg(core, &program, i, arg));
        let args = args.collect::<Result<Vec<_>, _>>()?;
        let command = core.session().allocate(BoKind::Cmd, COMMAND_BYTES)?;
        let mut run = Self {
            packet: Packet::chain(&[]).map_err(|error| too_long(&program, &error))?,
            program: Arc::clone(&program),
            args: Vec::new(),
            sections: Vec::new(),
            scratch_control: None,
            shared: Vec::new(),
            command,
        };
        run.bind(core, program, args)?;
        Ok(run)
    }

    /// Exchanges the kernel and keeps the arguments.
    pub(crate) fn rebind(&mut self, core: &Arc<ContextCore>, kernel: &NpuKernel) -> Result<(), DeviceError> {
        let program = kernel.program();
        if Arc::ptr_eq(program, &self.program) {
            return Ok(());
        }
        if !program.same_signature(&self.program) {
            return Err(DeviceError::Misuse {
                operation: "rebind",
                reason: format!(
                    "kernel {} takes {} arguments of other kinds than the {} of {}",
                    program.name,
                    program.signature.len(),
                    self.program.signature.len(),
                    self.program.name
                ),
            });
        }
        self.bind(core, Arc::clone(program), self.args.clone())
    }

    /// Exchanges one argument.
    pub(crate) fn set_arg(&mut self, core: &Arc<ContextCore>, index: usize, arg: &Arg) -> Result<(), DeviceError> {
        if index >= self.args.len() {
            return Err(bad_arg(&self.program, index, "an argument that was set when the run was added", "none"));
        }
        let mut args = self.args.clone();
        args[index] = bind_arg(core, &self.program, index, arg)?;
        self.bind(core, Arc::clone(&self.program), args)
    }

    pub(crate) fn opcode(&self) -> Opcode {
        self.packet.opcode()
    }

    pub(crate) fn packet(&self) -> &Packet {
        &self.packet
    }

    pub(crate) fn command(&self) -> &Arc<MemoryObject> {
        &self.command
    }

    /// Writes the whole packet again, the header last.
    pub(crate) fn write_packet(&self) -> Result<(), DeviceError> {
        write_packet(&self.command, &self.packet)
    }

    /// Every object that the device may touch on behalf of the run; some may occur twice.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &Arc<MemoryObject>> {
        let args = self.args.iter().filter_map(|arg| arg.object.as_ref());
        let sections = self.sections.iter().map(|section| &section.object);
        args.chain(sections).chain(&self.scratch_control).chain(&self.shared)
    }

    /// Prepares everything that may fail, then writes what differs.
    fn bind(
        &mut self,
        core: &Arc<ContextCore>,
        program: Arc<KernelProgram>,
        args: Vec<BoundArg>,
    ) -> Result<(), DeviceError> {
        let mut next = Binding { core, program: &program, args: &args, shared: Vec::new(), scratch_control: None };
        next.scratch_control = self.scratch_control_for(core, &program)?;
        let objects = self.section_objects(core, &program)?;
        let mut contents = Vec::with_capacity(objects.len());
        for (section, (_, object)) in program.sections.iter().zip(&objects) {
            let held = self.sections.iter_mut().find(|held| Arc::ptr_eq(&held.object, object));
            // The image goes over to the new binding: copying it would be the larger part of the work. Where something fails, the
            // memory stays as it is and its image is not known any more: the next binding writes all of it.
            let held = held.map(|held| Held {
                section: self.program.section(held.role),
                image: std::mem::take(&mut held.image),
                values: std::mem::take(&mut held.values),
            });
            contents.push(next.contents(section, &objects, held.unwrap_or_default())?);
        }
        let packet = next.packet(&objects)?;
        let Binding { shared, scratch_control, .. } = next;

        let mut sections = Vec::with_capacity(objects.len());
        for ((role, object), Contents { image, values, changed }) in objects.into_iter().zip(contents) {
            update(&object, &image, &changed)?;
            sections.push(BoundSection { role, object, image, values });
        }
        (self.program, self.args, self.sections) = (program, args, sections);
        (self.shared, self.scratch_control, self.packet) = (shared, scratch_control, packet);
        Ok(())
    }

    /// Device memory for each section: what the run has already, where it is large enough.
    fn section_objects(
        &self,
        core: &ContextCore,
        program: &KernelProgram,
    ) -> Result<Vec<(Role, Arc<MemoryObject>)>, DeviceError> {
        let mut objects = Vec::with_capacity(program.sections.len());
        for section in &program.sections {
            let len_bytes = section.template.len() as u64;
            let held = self.sections.iter().find(|held| held.role == section.role);
            let object = match held.filter(|held| held.object.size_bytes() >= len_bytes) {
                Some(held) => Arc::clone(&held.object),
                None => allocate_section(core, section.role, len_bytes)?,
            };
            objects.push((section.role, object));
        }
        Ok(objects)
    }

    fn scratch_control_for(
        &self,
        core: &ContextCore,
        program: &KernelProgram,
    ) -> Result<Option<Arc<MemoryObject>>, DeviceError> {
        let sources = program.sections.iter().flat_map(|section| &section.sources);
        let wanted = sources.filter_map(|source| match source {
            Source::ScratchControl(len_bytes) => Some(u64::from(*len_bytes)),
            _ => None,
        });
        let Some(len_bytes) = wanted.max() else { return Ok(None) };
        if let Some(held) = self.scratch_control.as_ref().filter(|held| held.size_bytes() >= len_bytes) {
            return Ok(Some(Arc::clone(held)));
        }
        let object = core.session().allocate(BoKind::Dev, len_bytes)?;
        object
            .store(0, &vec![0; len_bytes as usize])
            .and_then(|()| object.flush_all())
            .map_err(|error| object.out_of_range(error))?;
        Ok(Some(object))
    }
}

/// A binding that is being prepared.
struct Binding<'a> {
    core: &'a Arc<ContextCore>,
    program: &'a KernelProgram,
    args: &'a [BoundArg],
    shared: Vec<Arc<MemoryObject>>,
    scratch_control: Option<Arc<MemoryObject>>,
}

/// What a section's device memory holds at present: nothing that is known, by default.
#[derive(Default)]
struct Held<'a> {
    section: Option<&'a Section>,
    image: Vec<u8>,
    values: Vec<u64>,
}

/// What a section's device memory is to hold, and where that differs from what it holds.
struct Contents {
    image: Vec<u8>,
    values: Vec<u64>,
    changed: Vec<Range<usize>>,
}

type SectionObjects = [(Role, Arc<MemoryObject>)];

impl Binding<'_> {
    /// The section with the run's addresses. Where the memory holds the same code with other addresses, or code of the same
    /// length, only what changes is visited.
    fn contents(
        &mut self,
        section: &Section,
        objects: &SectionObjects,
        Held { section: old, mut image, values: before }: Held<'_>,
    ) -> Result<Contents, DeviceError> {
        let values = section.sources.iter().map(|source| self.value(*source, objects));
        let values = values.collect::<Result<Vec<_>, _>>()?;
        let bad = |error: RelocError| self.bad_program(&error.to_string());
        if let Some(old) = old.filter(|_| image.len() == section.template.len()) {
            let mut ranges = Vec::with_capacity(TYPICAL_CHANGES);
            if Arc::ptr_eq(&old.template, &section.template) {
                section.table.apply(&values, &mut image, &mut ranges).map_err(bad)?;
                return Ok(Contents::new(image, values, &ranges));
            }
            if let Some(rebind) = self.core.rebind(old, section) {
                match before == values {
                    true => section.table.rebind_same_values(&rebind, &values, &mut image, &mut ranges),
                    false => section.table.rebind(&rebind, &values, &mut image, &mut ranges),
                }
                .map_err(bad)?;
                return Ok(Contents::new(image, values, &ranges));
            }
        }
        let patched = section.table.patched(&section.template, &values).map_err(bad)?;
        Ok(Contents { changed: patch::differences(&image, &patched), image: patched, values })
    }

    fn value(&mut self, source: Source, objects: &SectionObjects) -> Result<u64, DeviceError> {
        match source {
            Source::Argument(index) => match self.args.get(index as usize) {
                Some(arg) => Ok(arg.value),
                None => Err(bad_arg(self.program, index as usize, "a buffer (the code uses it)", "nothing")),
            },
            Source::ScratchMemory => {
                let object = self.core.scratch()?;
                Ok(self.share(object))
            }
            Source::ScratchControl(_) => match &self.scratch_control {
                Some(object) => Ok(object.device_address()),
                None => Err(self.bad_program("no scratch memory for the control code")),
            },
            Source::ControlPacket => self.section_address(objects, Role::ControlPacket),
            Source::PmPacket(number) => self.section_address(objects, Role::PmPacket(number)),
            Source::Pdi(index) => {
                let pdi = self.program.pdis.get(index as usize);
                let pdi = pdi.ok_or_else(|| self.bad_program("a configuration that is not in the container"))?;
                let object = self.core.pdi(pdi)?;
                Ok(self.share(object))
            }
        }
    }

    fn share(&mut self, object: Arc<MemoryObject>) -> u64 {
        let address = object.device_address();
        if !self.shared.iter().any(|known| Arc::ptr_eq(known, &object)) {
            self.shared.push(object);
        }
        address
    }

    fn section_address(&self, objects: &SectionObjects, role: Role) -> Result<u64, DeviceError> {
        let object = objects.iter().find(|(held, _)| *held == role);
        let missing = || self.bad_program(&format!("a reference to a section that is not there: {role:?}"));
        object.map(|(_, object)| object.device_address()).ok_or_else(missing)
    }

    fn code(&self, objects: &SectionObjects, role: Role) -> CodeRef {
        let address = objects.iter().find(|(held, _)| *held == role).map(|(_, object)| object.device_address());
        let len = self.program.section(role).map_or(0, |section| section.template.len());
        // Sections come from a file with 32-bit sizes.
        CodeRef { address: address.unwrap_or(0), len_bytes: u32::try_from(len).unwrap_or(u32::MAX) }
    }

    fn packet(&self, objects: &SectionObjects) -> Result<Packet, DeviceError> {
        let code = self.code(objects, Role::Instructions);
        let save_restore = || (self.code(objects, Role::Save), self.code(objects, Role::Restore));
        let packet = match &self.program.launch {
            Launch::Registers { unit, map } => {
                let args: Vec<u64> = self.args.iter().map(|arg| arg.value).collect();
                let registers = map.fill(MODE_TRANSACTION, code.address, u64::from(code.len_bytes), &args);
                Packet::start_cu(*unit, &registers)
            }
            Launch::Unit { unit, is_preemptible: false } => Packet::start_npu(Some(*unit), code, MODE_TRANSACTION),
            Launch::Unit { unit, is_preemptible: true } => {
                let (save, restore) = save_restore();
                Packet::start_preemptible(false, Some(*unit), code, save, restore, MODE_TRANSACTION)
            }
            Launch::FullElf { opcode } => {
                let first = self.args.first().map_or(0, |arg| arg.value);
                let (save, restore) = save_restore();
                match opcode {
                    Opcode::StartNpuPreemptElf => Packet::start_preemptible(true, None, code, save, restore, first),
                    Opcode::StartNpuPreempt => Packet::start_preemptible(false, None, code, save, restore, first),
                    _ => Packet::start_npu(None, code, first),
                }
            }
        };
        packet.map_err(|error| too_long(self.program, &error))
    }

    fn bad_program(&self, reason: &str) -> DeviceError {
        DeviceError::BadProgram { program: self.program.name.clone(), reason: reason.to_owned() }
    }
}

/// Writes a packet to its command buffer, the header last. The driver reads it with the processor: no flush.
pub(crate) fn write_packet(command: &MemoryObject, packet: &Packet) -> Result<(), DeviceError> {
    command
        .store(4, packet.body_bytes())
        .and_then(|()| command.store_u32(0, packet.header()))
        .map_err(|error| command.out_of_range(error))
}

/// The health record in a command buffer, where there is one.
pub(crate) fn health(command: &MemoryObject) -> Option<HealthRecord> {
    let mut body = [0; HealthRecord::LEN_BYTES];
    command.load(4, &mut body).ok()?;
    HealthRecord::decode(&body)
}

/// Handles of objects, unique and ascending.
pub(crate) fn handles<'a>(objects: impl Iterator<Item = &'a Arc<MemoryObject>>) -> Vec<BoHandle> {
    let mut handles: Vec<BoHandle> = objects.map(|object| object.handle()).collect();
    handles.sort_unstable();
    handles.dedup();
    handles
}

/// Device memory is handed out in large units anyway: taking the whole unit lets the next kernel be longer.
fn allocate_section(core: &ContextCore, role: Role, len_bytes: u64) -> Result<Arc<MemoryObject>, DeviceError> {
    match role {
        Role::Instructions | Role::Save | Role::Restore => {
            let len_bytes = len_bytes.max(1).next_multiple_of(DEV_ALIGN_BYTES);
            core.session().allocate(BoKind::Dev, len_bytes)
        }
        Role::ControlPacket | Role::PmPacket(_) => core.session().allocate(BoKind::Cmd, len_bytes.max(1)),
    }
}

impl Contents {
    fn new(image: Vec<u8>, values: Vec<u64>, ranges: &[Range<u32>]) -> Self {
        let changed = ranges.iter().map(|range| range.start as usize..range.end as usize).collect();
        Self { image, values, changed }
    }
}

/// Writes the `ranges` of `image` to the memory of `object` and flushes their lines.
fn update(object: &MemoryObject, image: &[u8], ranges: &[Range<usize>]) -> Result<(), DeviceError> {
    if ranges.is_empty() {
        return Ok(());
    }
    object.store_parts(image, ranges).map_err(|error| object.out_of_range(error))?;
    let lines = patch::lines(ranges, image.len());
    object.flush(&lines).map_err(|error| object.out_of_range(error))?;
    let written_bytes = ranges.iter().map(|range| range.len() as u64).sum();
    let flushed_lines = lines.iter().map(|line| (line.end - line.start).div_ceil(CACHE_LINE_BYTES)).sum();
    object.session().count_patch(written_bytes, flushed_lines);
    Ok(())
}

fn bind_arg(core: &ContextCore, program: &KernelProgram, index: usize, arg: &Arg) -> Result<BoundArg, DeviceError> {
    let Some(spec) = program.signature.get(index) else {
        return Err(bad_arg(program, index, &format!("{} arguments", program.signature.len()), "one more"));
    };
    let buffer = match (&spec.kind, arg) {
        (ArgKind::U32, Arg::U32(value)) => return Ok(BoundArg { value: u64::from(*value), object: None }),
        (ArgKind::U64, Arg::U64(value)) => return Ok(BoundArg { value: *value, object: None }),
        (ArgKind::Buffer { min_bytes, .. }, Arg::Buffer(buffer)) if buffer.len_bytes() >= *min_bytes => buffer,
        _ => return Err(bad_arg(program, index, &wanted(spec), &found(arg))),
    };
    let object = MemoryObject::of(&**buffer.object()).filter(|object| Arc::ptr_eq(object.session(), core.session()));
    let object = object.ok_or_else(|| bad_arg(program, index, "a buffer of the same device", "a buffer of another"))?;
    let value = object.device_address() + buffer.offset_bytes();
    if !value.is_multiple_of(4) {
        return Err(bad_arg(program, index, "a start that is a multiple of 4 bytes", &format!("address {value:#x}")));
    }
    Ok(BoundArg { value, object: Some(object) })
}

fn check_count(program: &KernelProgram, found: usize) -> Result<(), DeviceError> {
    let declared = program.signature.len();
    if found == declared || (found < declared && program.allows_fewer_args) {
        return Ok(());
    }
    Err(bad_arg(program, found.min(declared), &format!("{declared} arguments"), &format!("{found}")))
}

fn wanted(spec: &ArgSpec) -> String {
    match &spec.kind {
        ArgKind::Buffer { min_bytes: 0, .. } => "a buffer".to_owned(),
        ArgKind::Buffer { min_bytes, .. } => format!("a buffer of at least {min_bytes} bytes"),
        ArgKind::U32 => "a 32-bit number".to_owned(),
        ArgKind::U64 => "a 64-bit number".to_owned(),
        other => format!("{other:?}"),
    }
}

fn found(arg: &Arg) -> String {
    match arg {
        Arg::Buffer(buffer) => format!("a buffer of {} bytes", buffer.len_bytes()),
        Arg::U32(_) => "a 32-bit number".to_owned(),
        Arg::U64(_) => "a 64-bit number".to_owned(),
        other => format!("{other:?}"),
    }
}

fn bad_arg(program: &KernelProgram, index: usize, wanted: &str, found: &str) -> DeviceError {
    DeviceError::BadArgument { kernel: program.name.clone(), index, wanted: wanted.to_owned(), found: found.to_owned() }
}

fn too_long(program: &KernelProgram, error: &PacketTooLong) -> DeviceError {
    DeviceError::BadProgram { program: program.name.clone(), reason: error.to_string() }
}
