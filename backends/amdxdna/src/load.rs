//! From containers to what a context and its runs need.

use crate::cache_of_programs::ProgramCache;
use crate::driver::Qos;
use crate::format::elf::{ElfError, Instance, KernelMatch, Program as ElfProgram, SymbolRole};
use crate::format::reloc::{PatchSymbol, PatchTable};
use crate::format::txn::View as TxnView;
use crate::packet::Opcode;
use crate::program::{KernelProgram, Launch, Register, RegisterMap, Role, Section, Source};
use crate::silicon::Silicon;
use crate::units::Unit;
use npuhal_core::DeviceError;
use npuhal_core::device::{ArgKind, ArgSpec, Direction, LengthUnit, Program};
use std::sync::Arc;

/// Largest section that is loaded, and all configurations of a kernel together: what a chunk of the device heap holds.
const MAX_SECTION_BYTES: usize = 64 << 20;
/// Arguments of a compute unit before its buffers: mode, instructions, length of the instructions.
const LEADING_ARGS: usize = 3;

/// What a context is created from.
#[derive(Debug)]
pub(crate) struct Boot {
    pub(crate) columns: u32,
    pub(crate) max_opc: u32,
    pub(crate) qos: Qos,
    /// Configuration of each compute unit, by index; none for a full ELF.
    pub(crate) unit_pdis: Vec<Arc<[u8]>>,
    pub(crate) loader: Loader,
}

/// Loads kernels for one context.
#[derive(Debug)]
pub(crate) struct Loader {
    base: Base,
    cache: Arc<ProgramCache>,
}

#[derive(Debug)]
enum Base {
    /// A context with compute units.
    Units(Vec<Unit>),
    /// A context of a full ELF, this many columns wide.
    FullElf { columns: u32 },
}

impl Boot {
    /// A context with compute units.
    pub(crate) fn units(columns: u32, max_opc: u32, units: Vec<Unit>, cache: &Arc<ProgramCache>) -> Self {
        let unit_pdis = units.iter().map(|unit| Arc::clone(&unit.pdi)).collect();
        let loader = Loader { base: Base::Units(units), cache: Arc::clone(cache) };
        Self { columns, max_opc, qos: Qos::default(), unit_pdis, loader }
    }

    /// A context of a full ELF.
    pub(crate) fn full_elf(image: &[u8], kernel: &str, cache: &Arc<ProgramCache>) -> Result<Self, DeviceError> {
        let elf = ElfProgram::parse(image).map_err(|error| bad_elf(kernel, &error))?;
        let columns = elf.columns().ok_or_else(|| not_full(kernel))?;
        elf.find(kernel).map_err(|error| bad_elf(kernel, &error))?;
        let loader = Loader { base: Base::FullElf { columns }, cache: Arc::clone(cache) };
        Ok(Self { columns, max_opc: 0, qos: Qos::default(), unit_pdis: Vec::new(), loader })
    }
}

impl Loader {
    /// Loads `program`; what was loaded before from the same bytes is found in the cache.
    pub(crate) fn load(&self, program: &Program<'_>, silicon: Silicon) -> Result<Arc<KernelProgram>, DeviceError> {
        let loaded = match (&self.base, *program) {
            (Base::Units(units), Program::Instructions { unit, stream, length_unit }) => {
                instructions(find_unit(units, unit)?, stream, length_unit).map(Arc::new)
            }
            (Base::Units(units), Program::PartialElf { unit, image }) => {
                let found = find_unit(units, unit)?;
                // The same file means something else on a unit with other arguments.
                let key = format!("{} {} {:?}", found.name, found.index, found.args);
                self.cache.get_or_insert(image, &key, || partial_elf(found, image))
            }
            (Base::FullElf { columns }, Program::FullElf { image, kernel }) => {
                let key = format!("{kernel} on {columns} columns");
                self.cache.get_or_insert(image, &key, || full_elf(image, kernel, *columns))
            }
            (_, Program::Builtin { name }) => {
                Err(bad_program(name, "built-in programs are the CPU's; an NPU takes compiled code".to_owned()))
            }
            (Base::Units(_), _) => {
                Err(wrong_kind("an instruction stream or a partial ELF for one of its compute units"))
            }
            (Base::FullElf { .. }, _) => Err(wrong_kind("a kernel of a full ELF")),
        }?;
        check_opcode(&loaded, silicon)?;
        Ok(loaded)
    }
}

/// A compute unit driven by an instruction stream that it gets as an argument.
fn instructions(unit: &Unit, stream: &[u8], length_unit: LengthUnit) -> Result<KernelProgram, DeviceError> {
    if stream.is_empty() || !stream.len().is_multiple_of(4) || stream.len() > MAX_SECTION_BYTES {
        let reason = format!("wanted a whole number of 32-bit words, found {} bytes", stream.len());
        return Err(bad_program(&unit.name, reason));
    }
    TxnView::new(stream).map_err(|error| bad_program(&unit.name, error.to_string()))?;
    let map = register_map(unit, length_unit)?;
    let table = PatchTable::new(stream, []).map_err(|error| bad_program(&unit.name, error.to_string()))?;
    let section = Section { role: Role::Instructions, template: stream.into(), table, sources: Vec::new() };
    Ok(KernelProgram {
        name: unit.name.clone(),
        signature: unit_signature(unit),
        allows_fewer_args: true,
        launch: Launch::Registers { unit: unit.index, map },
        sections: vec![section],
        pdis: Vec::new(),
    })
}

/// A compute unit driven by the control code of a partial ELF.
fn partial_elf(unit: &Unit, image: &[u8]) -> Result<KernelProgram, DeviceError> {
    let elf = ElfProgram::parse(image).map_err(|error| bad_elf(&unit.name, &error))?;
    if elf.is_full() {
        return Err(bad_program(&unit.name, "wanted a partial ELF, found a full one".to_owned()));
    }
    let kernel = elf.kernels().first().and_then(|kernel| kernel.instances.first());
    let instance = kernel.ok_or_else(|| bad_program(&unit.name, "no control code".to_owned()))?;
    let names = ArgNames::OfUnit(unit);
    let mut sections = sections(&elf, instance, &unit.name, &names)?;
    let pdis = pdis(&elf, &unit.name, &mut sections)?;
    let is_preemptible = instance.preempt_save.is_some() && instance.preempt_restore.is_some();
    Ok(KernelProgram {
        name: unit.name.clone(),
        signature: unit_signature(unit),
        allows_fewer_args: true,
        launch: Launch::Unit { unit: unit.index, is_preemptible },
        sections,
        pdis,
    })
}

/// A kernel of a full ELF.
fn full_elf(image: &[u8], kernel: &str, columns: u32) -> Result<KernelProgram, DeviceError> {
    let elf = ElfProgram::parse(image).map_err(|error| bad_elf(kernel, &error))?;
    match elf.columns() {
        Some(found) if found == columns => {}
        Some(found) => {
            let reason = format!("wanted {columns} columns, as the context has, found {found}");
            return Err(bad_program(kernel, reason));
        }
        None => return Err(not_full(kernel)),
    }
    let KernelMatch { kernel: declared, instance } = elf.find(kernel).map_err(|error| bad_elf(kernel, &error))?;
    let arguments = declared.arguments.unwrap_or(0);
    let mut sections = sections(&elf, instance, kernel, &ArgNames::Count(arguments))?;
    let pdis = pdis(&elf, kernel, &mut sections)?;
    let is_preemptible = instance.preempt_save.is_some() && instance.preempt_restore.is_some();
    let opcode = match (elf.has_pdi(), is_preemptible) {
        (true, _) => Opcode::StartNpuPreemptElf,
        (false, true) => Opcode::StartNpuPreempt,
        (false, false) => Opcode::StartNpu,
    };
    Ok(KernelProgram {
        name: kernel.to_owned(),
        signature: (0..arguments).map(|i| buffer_arg(i.to_string())).collect(),
        allows_fewer_args: false,
        launch: Launch::FullElf { opcode },
        sections,
        pdis,
    })
}

/// How relocations name arguments.
enum ArgNames<'a> {
    /// By name or number of an argument of a compute unit; the first three are not buffers.
    OfUnit(&'a Unit),
    /// By number, this many.
    Count(usize),
}

impl ArgNames<'_> {
    /// Position in the signature.
    fn position(&self, name: &str) -> Option<u32> {
        let number = name.strip_prefix("argv").or_else(|| name.strip_prefix("arg")).unwrap_or(name);
        let number: Option<usize> = number.parse().ok();
        let position = match self {
            Self::Count(count) => number.filter(|number| number < count)?,
            Self::OfUnit(unit) => {
                let named = unit.args.iter().position(|arg| arg.name == name).or(number)?;
                named.checked_sub(LEADING_ARGS).filter(|_| named < unit.args.len())?
            }
        };
        u32::try_from(position).ok()
    }
}

/// The sections of an instance, in the order in which they are patched.
fn sections(
    elf: &ElfProgram,
    instance: &Instance,
    kernel: &str,
    names: &ArgNames<'_>,
) -> Result<Vec<Section>, DeviceError> {
    let mut wanted = Vec::new();
    wanted.extend(instance.control_data.map(|index| (Role::ControlPacket, index)));
    for index in &instance.control_packets_pm {
        wanted.push((Role::PmPacket(pm_number(elf, *index)), *index));
    }
    let text = instance.control_text.ok_or_else(|| bad_program(kernel, "no .ctrltext section".to_owned()))?;
    wanted.push((Role::Instructions, text));
    wanted.extend(instance.preempt_save.map(|index| (Role::Save, index)));
    wanted.extend(instance.preempt_restore.map(|index| (Role::Restore, index)));
    for (i, (role, index)) in wanted.iter().enumerate() {
        if wanted[..i].iter().any(|(other, _)| other == role) {
            let name = elf.elf().section(*index).map_or("", |section| section.name.as_str());
            return Err(bad_program(kernel, format!("section {name} has the number of another one of its kind")));
        }
    }
    wanted.into_iter().map(|(role, index)| section(elf, role, index, kernel, names)).collect()
}

fn section(
    elf: &ElfProgram,
    role: Role,
    index: u32,
    kernel: &str,
    names: &ArgNames<'_>,
) -> Result<Section, DeviceError> {
    let template: Arc<[u8]> =
        elf.content(index, MAX_SECTION_BYTES).map_err(|error| bad_elf(kernel, &error))?.as_ref().into();
    let table = PatchTable::of_section(elf, index, &template);
    let table = table.map_err(|error| bad_program(kernel, error.to_string()))?;
    let sources = table.symbols().iter().map(|symbol| {
        source(elf, names, symbol).ok_or_else(|| {
            let PatchSymbol { name, size, .. } = symbol;
            let reason = format!("the code refers to `{name}` of {size} bytes: no argument, section or possible size");
            bad_program(kernel, reason)
        })
    });
    let sources = sources.collect::<Result<_, _>>()?;
    Ok(Section { role, template, table, sources })
}

fn source(elf: &ElfProgram, names: &ArgNames<'_>, symbol: &PatchSymbol) -> Option<Source> {
    match elf.role(&symbol.name).ok()? {
        SymbolRole::ScratchPadMemory => Some(Source::ScratchMemory),
        SymbolRole::ScratchPadControl => {
            Some(Source::ScratchControl(symbol.size)).filter(|_| is_scratch_size(symbol.size))
        }
        SymbolRole::ControlPacket => Some(Source::ControlPacket),
        SymbolRole::ControlPacketPm(section) => Some(Source::PmPacket(pm_number(elf, section))),
        // Its section, until all are known.
        SymbolRole::Pdi(section) => Some(Source::Pdi(section)),
        SymbolRole::Argument(name) => names.position(name).map(Source::Argument),
    }
}

fn is_scratch_size(size: u32) -> bool {
    (1..=MAX_SECTION_BYTES).contains(&(size as usize))
}

/// Number of a `.ctrlpkt.pm.N` section.
fn pm_number(elf: &ElfProgram, index: u32) -> u32 {
    let section = elf.elf().section(index);
    section.and_then(|section| section.name.rsplit('.').next()?.parse().ok()).unwrap_or(0)
}

/// The configurations that `sections` name by their section, which becomes the index among these. A file may have many others, and
/// compressed ones that expand a thousandfold.
fn pdis(elf: &ElfProgram, kernel: &str, sections: &mut [Section]) -> Result<Vec<Arc<[u8]>>, DeviceError> {
    let (mut used, mut pdis): (Vec<u32>, Vec<Arc<[u8]>>) = Default::default();
    let mut rest = MAX_SECTION_BYTES;
    for source in sections.iter_mut().flat_map(|section| &mut section.sources) {
        let Source::Pdi(index) = source else { continue };
        let place = match used.iter().position(|known| *known == *index) {
            Some(place) => place,
            None => {
                let content = elf.content(*index, rest).map_err(|error| bad_elf(kernel, &error))?;
                rest = rest.saturating_sub(content.len());
                pdis.push(content.as_ref().into());
                used.push(*index);
                used.len() - 1
            }
        };
        *index = place as u32;
    }
    Ok(pdis)
}

/// The unit with this kernel name, instance name, or `kernel:instance`.
fn find_unit<'a>(units: &'a [Unit], name: &str) -> Result<&'a Unit, DeviceError> {
    let matches = |unit: &&Unit| {
        let instance = unit.name.split_once(':').map_or("", |(_, instance)| instance);
        unit.name == name || unit.kernel == name || instance == name
    };
    units.iter().find(matches).ok_or_else(|| {
        let names: Vec<_> = units.iter().map(|unit| unit.name.as_str()).collect();
        bad_program(name, format!("wanted a compute unit of the xclbin, which has {}", names.join(", ")))
    })
}

fn unit_signature(unit: &Unit) -> Vec<ArgSpec> {
    let args = unit.args.get(LEADING_ARGS..).unwrap_or(&[]);
    args.iter()
        .map(|arg| match (arg.is_pointer, arg.register.len_bytes) {
            (true, _) => buffer_arg(arg.name.clone()),
            (false, 4) => ArgSpec { name: arg.name.clone(), kind: ArgKind::U32 },
            (false, _) => ArgSpec { name: arg.name.clone(), kind: ArgKind::U64 },
        })
        .collect()
}

fn register_map(unit: &Unit, length_unit: LengthUnit) -> Result<RegisterMap, DeviceError> {
    let shape: Vec<bool> = unit.args.iter().take(LEADING_ARGS).map(|arg| arg.is_pointer).collect();
    if shape != [false, true, false] {
        let reason = "wanted the arguments mode, instructions, instruction length, and then buffers".to_owned();
        return Err(bad_program(&unit.name, reason));
    }
    let register = |i: usize| unit.args[i].register;
    let ends = unit.args.iter().map(|arg| arg.register.at_bytes + arg.register.len_bytes);
    Ok(RegisterMap {
        mode: register(0),
        code: register(1),
        code_length: register(2),
        length_unit,
        args: unit.args[LEADING_ARGS..].iter().map(|arg| arg.register).collect::<Vec<Register>>(),
        words: ends.max().unwrap_or(0).div_ceil(4),
    })
}

fn check_opcode(program: &KernelProgram, silicon: Silicon) -> Result<(), DeviceError> {
    let opcode = program.launch.opcode();
    let is_preemptible = matches!(opcode, Opcode::StartNpuPreempt | Opcode::StartNpuPreemptElf);
    if is_preemptible && !silicon.facts().is_preemptible {
        return Err(DeviceError::Unsupported {
            device: silicon.to_string(),
            feature: format!("{} (kernel {})", opcode.name(), program.name),
            remedy: "use an xclbin with an instruction stream or a partial ELF".to_owned(),
        });
    }
    Ok(())
}

fn buffer_arg(name: String) -> ArgSpec {
    ArgSpec { name, kind: ArgKind::Buffer { direction: Direction::InOut, min_bytes: 0 } }
}

fn wrong_kind(wanted: &str) -> DeviceError {
    DeviceError::Misuse { operation: "load", reason: format!("the context takes {wanted}") }
}

fn not_full(kernel: &str) -> DeviceError {
    bad_program(kernel, "wanted a full ELF, which states its columns, found a partial one".to_owned())
}

fn bad_elf(program: &str, error: &ElfError) -> DeviceError {
    bad_program(program, error.to_string())
}

fn bad_program(program: &str, reason: String) -> DeviceError {
    DeviceError::BadProgram { program: program.to_owned(), reason }
}
