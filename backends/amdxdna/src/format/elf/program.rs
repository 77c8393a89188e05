//! Kernels, instances, their sections, and relocations.

use super::tables::{columns_of, entries};
use super::{ABI_SCHEMA_IN_ADDEND, OSABI_AIE2P, OSABI_LEGACY, code};
use super::{Elf, ElfError, NoteList, Rela, Section, StringTable, Symbol, parse_kernel_symbol};
use crate::format::bytes::{array_at, u32_at};
use std::borrow::Cow;

/// What a section holds, found by a part of its name; a suffix `.N` numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SectionKind {
    /// `.ctrltext`: transaction control code.
    ControlText,
    /// `.ctrldata`: control packets.
    ControlData,
    /// `.preempt_save`: control code that saves state.
    PreemptSave,
    /// `.preempt_restore`: control code that restores state.
    PreemptRestore,
    /// `.ctrlpkt.pm`: control packets for program memory.
    ControlPacketPm,
    /// `.pdi`: partition image.
    Pdi,
    /// `.pad`: description of scratch memory.
    Pad,
    /// `.dump`: debug map.
    Dump,
    /// Anything else.
    Other,
}

impl SectionKind {
    const PARTS: [(&'static str, Self); 8] = [
        (".ctrltext", Self::ControlText),
        (".ctrldata", Self::ControlData),
        (".preempt_save", Self::PreemptSave),
        (".preempt_restore", Self::PreemptRestore),
        (".ctrlpkt.pm", Self::ControlPacketPm),
        (".pdi", Self::Pdi),
        (".pad", Self::Pad),
        (".dump", Self::Dump),
    ];

    /// Kind of the section with this name.
    pub fn of_name(name: &str) -> Self {
        Self::PARTS.iter().find(|(part, _)| name.contains(part)).map_or(Self::Other, |(_, kind)| *kind)
    }

    /// The part of a section name that makes this kind.
    pub fn name(self) -> &'static str {
        Self::PARTS.iter().find(|(_, kind)| *kind == self).map_or("other", |(part, _)| part)
    }
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Name; empty in a file without kernel symbols.
    pub name: String,
    /// Number of pointer arguments of 8 bytes each; `None` in a file without kernel symbols.
    pub arguments: Option<usize>,
    /// Instances in file order; a file without groups has one.
    pub instances: Vec<Instance>,
}

/// Control code of a kernel: the sections that a run uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Instance {
    /// Name; empty in a file without instance symbols.
    pub name: String,
    /// Section index of the group; `None` in a file without groups.
    pub control_code_id: Option<u32>,
    /// Index of `.ctrltext`.
    pub control_text: Option<u32>,
    /// Index of `.ctrldata`.
    pub control_data: Option<u32>,
    /// Index of `.preempt_save`.
    pub preempt_save: Option<u32>,
    /// Index of `.preempt_restore`.
    pub preempt_restore: Option<u32>,
    /// Indices of `.ctrlpkt.pm` sections in file order.
    pub control_packets_pm: Vec<u32>,
    /// Other members in file order.
    pub other: Vec<u32>,
}

/// A relocation: what to insert where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelocationEntry {
    /// Section that is patched.
    pub section: u32,
    /// Byte offset in it.
    pub offset: u32,
    /// Patch schema number.
    pub schema: u32,
    /// Unsigned addend.
    pub addend: u32,
    /// Index in [`Program::symbols`].
    pub symbol: u32,
}

/// A symbol that relocations name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamicSymbol {
    /// Argument name or index, or a special name.
    pub name: String,
    /// Mask (scalar schema) or buffer size in bytes.
    pub size: u32,
    /// Section that its relocations patch.
    pub section: u32,
}

/// What a relocation symbol asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SymbolRole<'a> {
    /// Address of a run argument, by decimal index or name. In a partial ELF indices count the arguments of the
    /// xclbin's kernel, in a full ELF the kernel's own.
    Argument(&'a str),
    /// Address of the context's scratch buffer for preemption.
    ScratchPadMemory,
    /// Address of a device buffer of the symbol's size.
    ScratchPadControl,
    /// Address of the buffer with the instance's `.ctrldata`.
    ControlPacket,
    /// Address of the buffer with this `.ctrlpkt.pm` section.
    ControlPacketPm(u32),
    /// Address of the buffer with this partition image section.
    Pdi(u32),
}

/// Control code file with its meaning resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    elf: Elf,
    columns: Option<u32>,
    uid: Option<[u8; 16]>,
    kernels: Vec<Kernel>,
    symbols: Vec<DynamicSymbol>,
    relocations: Vec<RelocationEntry>,
}

/// A kernel and one of its instances.
#[derive(Debug, Clone, Copy)]
pub struct KernelMatch<'a> {
    /// Kernel.
    pub kernel: &'a Kernel,
    /// Instance.
    pub instance: &'a Instance,
}

impl Program {
    /// Parses a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, ElfError> {
        Self::new(Elf::parse(bytes)?)
    }

    /// Resolves a file.
    pub fn new(elf: Elf) -> Result<Self, ElfError> {
        let os_abi = elf.header.os_abi;
        if os_abi != OSABI_AIE2P && os_abi != OSABI_LEGACY {
            return Err(ElfError::NotElf { field: "EI_OSABI", found: os_abi.into(), wanted: OSABI_AIE2P.into() });
        }
        let columns = elf.find(".note.xrt.configuration").map(|(_, section)| columns_of(section)).transpose()?;
        if columns == Some(0) {
            return Err(ElfError::Invalid {
                what: ".note.xrt.configuration".to_owned(),
                reason: "0 columns".to_owned(),
            });
        }
        let uid = elf.find(".note.xrt.UID").map(|(_, section)| uid_of(section)).transpose()?;
        let kernels = find_kernels(&elf)?;
        let (symbols, relocations) = find_relocations(&elf)?;
        Ok(Self { elf, columns, uid, kernels, symbols, relocations })
    }

    /// The file.
    pub fn elf(&self) -> &Elf {
        &self.elf
    }

    /// Whether this is a full ELF, which configures the partition by itself.
    pub fn is_full(&self) -> bool {
        self.columns.is_some()
    }

    /// Columns of a full ELF.
    pub fn columns(&self) -> Option<u32> {
        self.columns
    }

    /// Unique id, if there is one.
    pub fn uid(&self) -> Option<[u8; 16]> {
        self.uid
    }

    /// Kernels in symbol order.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Symbols that relocations name.
    pub fn symbols(&self) -> &[DynamicSymbol] {
        &self.symbols
    }

    /// All relocations in file order.
    pub fn relocations(&self) -> &[RelocationEntry] {
        &self.relocations
    }

    /// Relocations of one section with their symbols, in file order.
    pub fn relocations_of(&self, section: u32) -> impl Iterator<Item = (&RelocationEntry, &DynamicSymbol)> {
        let of_section = self.relocations.iter().filter(move |entry| entry.section == section);
        of_section.filter_map(|entry| Some((entry, self.symbols.get(entry.symbol as usize)?)))
    }

    /// What the symbol of this name asks for; an error when it names a section that is not there.
    pub fn role<'a>(&self, symbol: &'a str) -> Result<SymbolRole<'a>, ElfError> {
        if let Some(number) = symbol.strip_prefix("ctrlpkt-pm-") {
            let section = self.elf.find(&format!(".ctrlpkt.pm.{number}"));
            return section.map(|(index, _)| SymbolRole::ControlPacketPm(index)).ok_or_else(|| ElfError::Invalid {
                what: format!("symbol {symbol:?}"),
                reason: format!("no .ctrlpkt.pm.{number} section"),
            });
        }
        Ok(match symbol {
            "scratch-pad-mem" => SymbolRole::ScratchPadMemory,
            "scratch-pad-ctrl" => SymbolRole::ScratchPadControl,
            "control-packet" => SymbolRole::ControlPacket,
            _ => match self.pdi_sections().find(|(_, section)| section.name == symbol) {
                Some((index, _)) => SymbolRole::Pdi(index),
                None if symbol.starts_with('.') => {
                    return Err(ElfError::Invalid {
                        what: format!("symbol {symbol:?}"),
                        reason: "no section of this name".to_owned(),
                    });
                }
                None => SymbolRole::Argument(symbol),
            },
        })
    }

    /// Partition image sections in file order.
    pub fn pdi_sections(&self) -> impl Iterator<Item = (u32, &Section)> {
        let sections = self.elf.sections.iter().enumerate();
        sections.filter(|(_, s)| SectionKind::of_name(&s.name) == SectionKind::Pdi).map(|(i, s)| (i as u32, s))
    }

    /// Whether a run of this file loads partition images, which decides the packet that starts it.
    pub fn has_pdi(&self) -> bool {
        self.pdi_sections().next().is_some()
    }

    /// Contents of a section, expanded if compressed, at most `limit_bytes`.
    pub fn content(&self, section: u32, limit_bytes: usize) -> Result<Cow<'_, [u8]>, ElfError> {
        let count = self.elf.sections.len();
        let missing = ElfError::BadIndex { what: "section".to_owned(), index: section, count };
        self.elf.section(section).ok_or(missing)?.content(limit_bytes)
    }

    /// Finds `kernel:instance`, or `kernel` when it has a single instance.
    pub fn find(&self, name: &str) -> Result<KernelMatch<'_>, ElfError> {
        let missing = || ElfError::NoKernel { wanted: name.to_owned(), available: self.kernel_list() };
        let (kernel_name, instance_name) = match name.split_once(':') {
            Some((kernel, instance)) => (kernel, Some(instance)),
            None => (name, None),
        };
        let kernel = self.kernels.iter().find(|k| k.name == kernel_name).ok_or_else(missing)?;
        let instance = match (instance_name, kernel.instances.as_slice()) {
            (Some(wanted), instances) => instances.iter().find(|i| i.name == wanted),
            (None, [only]) => Some(only),
            (None, _) => None,
        };
        instance.map(|instance| KernelMatch { kernel, instance }).ok_or_else(missing)
    }

    /// Names for messages.
    fn kernel_list(&self) -> String {
        const SHOWN: usize = 16;
        let names = self.kernels.iter().flat_map(|k| k.instances.iter().map(move |i| format!("{}:{}", k.name, i.name)));
        let list: Vec<_> = names.take(SHOWN).collect();
        if list.is_empty() { "no kernels".to_owned() } else { list.join(", ") }
    }
}

fn uid_of(section: &Section) -> Result<[u8; 16], ElfError> {
    let notes = NoteList::parse(section)?;
    let uid = notes.0.iter().filter(|note| note.owner == "XRT" && note.desc.len() == 16);
    uid.filter_map(|note| array_at(&note.desc, 0)).next().ok_or_else(|| ElfError::BadNote {
        section: section.name.clone(),
        reason: "no XRT note of 16 bytes".to_owned(),
    })
}

fn find_kernels(elf: &Elf) -> Result<Vec<Kernel>, ElfError> {
    let has_groups = elf.sections.iter().any(|section| section.kind == code::SHT_GROUP);
    if elf.header.abi_major() == 0 || !has_groups {
        return implicit_kernel(elf).map(|kernel| vec![kernel]);
    }
    let symbols = kernel_symbols(elf)?;
    let mut kernels = Vec::new();
    let mut index_of_symbol = vec![None; symbols.len()];
    for (i, (name, symbol)) in symbols.iter().enumerate() {
        if symbol.kind() == code::STT_FUNC {
            let (name, arguments) = parse_kernel_symbol(name)?;
            if kernels.iter().any(|k: &Kernel| k.name == name) {
                return Err(ElfError::DuplicateName { what: "kernel", name });
            }
            index_of_symbol[i] = Some(kernels.len());
            kernels.push(Kernel { name, arguments: Some(arguments), instances: Vec::new() });
        }
    }
    let mut owner = vec![false; elf.sections.len()];
    for (index, group) in elf.sections.iter().enumerate().filter(|(_, s)| s.kind == code::SHT_GROUP) {
        let bad_index = |what: &str, index| ElfError::BadIndex {
            what: format!("{what} of group {}", group.name),
            index,
            count: symbols.len(),
        };
        let (name, symbol) = symbols
            .get(group.info as usize)
            .filter(|(_, symbol)| symbol.kind() == code::STT_OBJECT)
            .ok_or_else(|| bad_index("instance symbol", group.info))?;
        let kernel_symbol = u32::from(symbol.section);
        let kernel = index_of_symbol
            .get(kernel_symbol as usize)
            .copied()
            .flatten()
            .and_then(|k| kernels.get_mut(k))
            .ok_or_else(|| bad_index("kernel symbol", kernel_symbol))?;
        if kernel.instances.iter().any(|i| i.name == *name) {
            return Err(ElfError::DuplicateName { what: "instance", name: format!("{}:{name}", kernel.name) });
        }
        let mut instance = Instance { name: name.clone(), control_code_id: Some(index as u32), ..Instance::default() };
        for member in group_members(elf, group)? {
            if std::mem::replace(&mut owner[member as usize], true) {
                return Err(ElfError::DuplicateName {
                    what: "section in groups",
                    name: elf.sections[member as usize].name.clone(),
                });
            }
            instance.add(elf, member)?;
        }
        kernel.instances.push(instance);
    }
    Ok(kernels)
}

impl Instance {
    /// Sorts a member section into its place.
    fn add(&mut self, elf: &Elf, member: u32) -> Result<(), ElfError> {
        let section = &elf.sections[member as usize];
        let kind = SectionKind::of_name(&section.name);
        let slot = match kind {
            SectionKind::ControlText => &mut self.control_text,
            SectionKind::ControlData => &mut self.control_data,
            SectionKind::PreemptSave => &mut self.preempt_save,
            SectionKind::PreemptRestore => &mut self.preempt_restore,
            SectionKind::ControlPacketPm => {
                self.control_packets_pm.push(member);
                return Ok(());
            }
            _ => {
                self.other.push(member);
                return Ok(());
            }
        };
        match slot.replace(member) {
            None => Ok(()),
            Some(first) => Err(ElfError::DuplicateSection {
                owner: if self.name.is_empty() { "the file".to_owned() } else { self.name.clone() },
                kind: kind.name(),
                first: elf.sections[first as usize].name.clone(),
                second: section.name.clone(),
            }),
        }
    }
}

/// Member sections of a group; the first word is a flag.
fn group_members(elf: &Elf, group: &Section) -> Result<Vec<u32>, ElfError> {
    let words = entries(group, 4)?.filter_map(|raw| u32_at(raw, 0)).skip(1);
    words
        .map(|member| {
            let count = elf.sections.len();
            let known = member != 0 && (member as usize) < count;
            known.then_some(member).ok_or_else(|| ElfError::BadIndex {
                what: format!("member of group {}", group.name),
                index: member,
                count,
            })
        })
        .collect()
}

/// The single kernel of a file without groups: all sections are its own.
fn implicit_kernel(elf: &Elf) -> Result<Kernel, ElfError> {
    let mut instance = Instance::default();
    for index in 1..elf.sections.len() {
        if !matches!(SectionKind::of_name(&elf.sections[index].name), SectionKind::Other | SectionKind::Pdi) {
            instance.add(elf, index as u32)?;
        }
    }
    let mut kernel = Kernel { name: String::new(), arguments: None, instances: Vec::new() };
    if elf.find(".symtab").is_some() {
        let symbols = kernel_symbols(elf)?;
        let of_kind = |kind| symbols.iter().filter(move |(_, s)| s.kind() == kind).map(|(name, _)| name);
        if let Some(symbol) = of_kind(code::STT_FUNC).next() {
            let (name, arguments) = parse_kernel_symbol(symbol)?;
            kernel.name = name;
            kernel.arguments = Some(arguments);
        }
        if let Some(name) = of_kind(code::STT_OBJECT).next() {
            instance.name.clone_from(name);
        }
    }
    kernel.instances.push(instance);
    Ok(kernel)
}

/// Names and entries of `.symtab`.
fn kernel_symbols(elf: &Elf) -> Result<Vec<(String, Symbol)>, ElfError> {
    named_symbols(elf, ".symtab", ".strtab")
}

fn named_symbols(elf: &Elf, table: &'static str, names: &'static str) -> Result<Vec<(String, Symbol)>, ElfError> {
    let section = |name| elf.find(name).map(|(_, s)| s).ok_or(ElfError::MissingSection { name });
    let strings = StringTable::from_bytes(section(names)?.data.clone());
    let symbols = Symbol::parse_table(section(table)?)?;
    let named = symbols.into_iter().enumerate().map(|(i, symbol)| {
        // The null symbol has no name to look up; its table may be empty.
        let name = if i == 0 && symbol.name_at == 0 { Some("") } else { strings.get_short(symbol.name_at) };
        let what = format!("symbol {i} of {table}");
        name.map(|name| (name.to_owned(), symbol)).ok_or(ElfError::BadName { what, at_bytes: symbol.name_at })
    });
    named.collect()
}

fn find_relocations(elf: &Elf) -> Result<(Vec<DynamicSymbol>, Vec<RelocationEntry>), ElfError> {
    let Some((_, rela)) = elf.find(".rela.dyn") else { return Ok((Vec::new(), Vec::new())) };
    let relas = Rela::parse_table(rela)?;
    if relas.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let symbols: Vec<_> = named_symbols(elf, ".dynsym", ".dynstr")?
        .into_iter()
        .map(|(name, symbol)| DynamicSymbol { name, size: symbol.size, section: symbol.section.into() })
        .collect();
    let in_addend = elf.header.abi_version == ABI_SCHEMA_IN_ADDEND;
    let relocations = relas.iter().enumerate().map(|(i, rela)| {
        let bad =
            |what: &str, index, count| ElfError::BadIndex { what: format!("{what} of relocation {i}"), index, count };
        let symbol = symbols
            .get(rela.symbol as usize)
            .filter(|_| rela.symbol != 0)
            .ok_or_else(|| bad("symbol", rela.symbol, symbols.len()))?;
        if symbol.section == 0 || symbol.section as usize >= elf.sections.len() {
            return Err(bad("section", symbol.section, elf.sections.len()));
        }
        let (schema, addend) = match in_addend {
            true => (rela.addend & 15, rela.addend >> 4),
            false => (rela.kind.into(), rela.addend),
        };
        Ok(RelocationEntry { section: symbol.section, offset: rela.offset, schema, addend, symbol: rela.symbol })
    });
    let relocations = relocations.collect::<Result<_, _>>()?;
    Ok((symbols, relocations))
}
