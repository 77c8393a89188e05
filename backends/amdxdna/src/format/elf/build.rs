//! Writing control code files in the layouts that the assembler and the configuration flow use.

use super::{ABI_CONFIG, ABI_PARTIAL, code, mangle_kernel};
use super::{Elf, ElfError, ElfHeader, NoteList, Placement, Plan, Rela, Section, Segment, StringTable, Symbol};

/// A symbol that patches refer to. Several may share a name: one for each buffer size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgumentSymbol {
    /// Argument index or name, or a special name such as `.pdi.1`.
    pub name: String,
    /// Mask (scalar schema) or buffer size in bytes.
    pub size: u32,
}

/// One place that is patched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatchEntry {
    /// Index into the list of symbols.
    pub symbol: usize,
    /// Byte offset in the control code.
    pub offset: u32,
    /// Schema number.
    pub schema: u8,
    /// Unsigned addend.
    pub addend: u32,
}

/// Content of a partial ELF: control code for a kernel that an xclbin defines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartialElfSpec {
    /// Control code.
    pub code: Vec<u8>,
    /// Symbols; names are decimal argument numbers, buffers from 3.
    pub symbols: Vec<ArgumentSymbol>,
    /// Patches.
    pub patches: Vec<PatchEntry>,
    /// Unique id.
    pub uid: [u8; 16],
}

/// Content of a full ELF with one kernel, one instance and one partition image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullElfSpec {
    /// Kernel name.
    pub kernel: String,
    /// Instance name.
    pub instance: String,
    /// Number of pointer arguments.
    pub arguments: usize,
    /// Columns of the partition.
    pub columns: u32,
    /// Partition image, section `.pdi.1`; may be empty when nothing loads it.
    pub pdi: Vec<u8>,
    /// Control code.
    pub code: Vec<u8>,
    /// Symbols, usually `.pdi.1` and the arguments by decimal number.
    pub symbols: Vec<ArgumentSymbol>,
    /// Patches.
    pub patches: Vec<PatchEntry>,
    /// Unique id: note type and id.
    pub uid: (u32, [u8; 16]),
}

const SEGMENT_LOAD: u32 = 1;
const SEGMENT_HEADERS: u32 = 6;
const READ: u32 = 4;
const READ_EXECUTE: u32 = 5;
const DT_RELA: u32 = 7;
const DT_RELASZ: u32 = 8;
const CODE_ALIGN: usize = 16;

impl PartialElfSpec {
    /// The file.
    pub fn build(&self) -> Result<Elf, ElfError> {
        const CODE: u32 = 2;
        const DYNSTR: u32 = 3;
        const DYNSYM: u32 = 4;
        const RELA: u32 = 5;
        let tables = PatchTables::new(&self.symbols, &self.patches, CODE as u16, Names::Shared)?;
        let executable = code::SHF_ALLOC | code::SHF_EXECINSTR;
        let uid = NoteList::single_xrt(code::NOTE_UID, self.uid.to_vec()).to_bytes();
        let sections = vec![
            Section::default(),
            Section::new(".shstrtab", code::SHT_STRTAB, 0, 1, Vec::new()),
            Section::new(".ctrltext", code::SHT_PROGBITS, executable, CODE_ALIGN as u32, self.code.clone()),
            Section::new(".dynstr", code::SHT_STRTAB, 0, 1, tables.names),
            linked(".dynsym", code::SHT_DYNSYM, code::SHF_ALLOC, 8, tables.symbols, 16, DYNSTR, 1),
            linked(".rela.dyn", code::SHT_RELA, code::SHF_ALLOC, 8, tables.relas.clone(), 12, DYNSYM, 0),
            linked(".dynamic", code::SHT_DYNAMIC, code::SHF_ALLOC, 8, dynamic(RELA, &tables.relas), 8, DYNSTR, 0),
            Section::new(".note.xrt.UID", code::SHT_NOTE, 0, 1, uid),
        ];
        let header = ElfHeader { names_section: 1, ..ElfHeader::new(ABI_PARTIAL) };
        let mut elf = Elf { header, segments: Vec::new(), sections };
        let plan = Plan::in_index_order(&elf, 0, 4);
        elf.place(&plan)?;
        Ok(elf)
    }
}

impl FullElfSpec {
    /// The file.
    pub fn build(&self) -> Result<Elf, ElfError> {
        let mut elf = Elf {
            header: ElfHeader { names_section: 1, ..ElfHeader::new(ABI_CONFIG) },
            segments: vec![Segment::default(); 3],
            sections: self.sections()?,
        };
        elf.place(&Self::plan())?;
        Self::fill_segments(&mut elf);
        Ok(elf)
    }

    const STRTAB: u32 = 2;
    const SYMTAB: u32 = 3;
    const PDI: u32 = 4;
    const CODE: u32 = 5;
    const DYNSTR: u32 = 6;
    const DYNSYM: u32 = 7;
    const RELA: u32 = 8;

    fn sections(&self) -> Result<Vec<Section>, ElfError> {
        let tables = PatchTables::new(&self.symbols, &self.patches, Self::CODE as u16, Names::Repeated)?;
        let executable = code::SHF_ALLOC | code::SHF_EXECINSTR;
        let align = CODE_ALIGN as u32;
        let (names, kernel_symbols) = self.kernel_tables()?;
        let group = [1, Self::CODE].iter().flat_map(|w| w.to_le_bytes()).collect();
        let columns = NoteList::single_xrt(code::NOTE_COLUMNS, self.columns.to_le_bytes().to_vec()).to_bytes();
        let uid = NoteList::single_xrt(self.uid.0, self.uid.1.to_vec()).to_bytes();
        let pdi_bytes = too_large("partition image", self.pdi.len())?;
        Ok(vec![
            Section::default(),
            Section::new(".shstrtab", code::SHT_STRTAB, 0, 1, Vec::new()),
            Section::new(".strtab", code::SHT_STRTAB, 0, 1, names),
            linked(".symtab", code::SHT_SYMTAB, 0, 4, kernel_symbols, 16, Self::STRTAB, 1),
            Section::new(".pdi.1", code::SHT_PROGBITS, executable, align, self.pdi.clone()),
            Section {
                addr: pdi_bytes,
                ..Section::new(
                    ".ctrltext.0",
                    code::SHT_PROGBITS,
                    executable | code::SHF_GROUP,
                    align,
                    self.code.clone(),
                )
            },
            Section::new(".dynstr", code::SHT_STRTAB, 0, 1, tables.names),
            linked(".dynsym", code::SHT_DYNSYM, 0, 8, tables.symbols, 16, Self::DYNSTR, 1),
            linked(".rela.dyn", code::SHT_RELA, 0, 8, tables.relas.clone(), 12, Self::DYNSYM, 0),
            linked(".dynamic", code::SHT_DYNAMIC, 0, 8, dynamic(Self::RELA, &tables.relas), 8, Self::DYNSTR, 0),
            linked(".group.0", code::SHT_GROUP, 0, 4, group, 4, Self::SYMTAB, 2),
            Section::new(".note.xrt.configuration", code::SHT_NOTE, 0, 1, columns),
            Section::new(".note.xrt.UID", code::SHT_NOTE, 0, 1, uid),
        ])
    }

    /// `.strtab` and `.symtab`: the kernel, and its instance, whose section field is the kernel's symbol index.
    fn kernel_tables(&self) -> Result<(Vec<u8>, Vec<u8>), ElfError> {
        let mut names = StringTable::default();
        let weak = |kind| code::STB_WEAK << 4 | kind;
        let kernel_at = too_large("name table", names.push(&mangle_kernel(&self.kernel, self.arguments)))?;
        let instance_at = too_large("name table", names.push(&self.instance))?;
        let symbols = [
            Symbol::default(),
            Symbol { name_at: kernel_at, info: weak(code::STT_FUNC), ..Symbol::default() },
            Symbol { name_at: instance_at, info: weak(code::STT_OBJECT), section: 1, ..Symbol::default() },
        ];
        Ok((names.into_bytes(), Symbol::write_table(&symbols)))
    }

    /// Image and code come first, at 16-byte places.
    fn plan() -> Plan {
        let order =
            [(4, 16), (5, 16), (1, 1), (2, 1), (3, 4), (6, 1), (7, 8), (8, 8), (9, 8), (10, 4), (11, 1), (12, 1)];
        let order = order.into_iter().map(|(section, align)| Placement { section, align }).collect();
        Plan { order, section_headers_align: 4 }
    }

    fn fill_segments(elf: &mut Elf) {
        let table_bytes = 32 * elf.segments.len() as u32;
        let load = |section: u32, vaddr: u32| {
            let section = &elf.sections[section as usize];
            Segment {
                kind: SEGMENT_LOAD,
                offset: section.offset,
                vaddr,
                file_bytes: section.size,
                mem_bytes: section.size,
                flags: READ_EXECUTE,
                align: CODE_ALIGN as u32,
                ..Segment::default()
            }
        };
        let headers = Segment {
            kind: SEGMENT_HEADERS,
            offset: elf.header.segments_at,
            file_bytes: table_bytes,
            mem_bytes: table_bytes,
            flags: READ,
            ..Segment::default()
        };
        elf.segments = vec![headers, load(Self::PDI, 0), load(Self::CODE, elf.sections[Self::PDI as usize].size)];
    }
}

/// Whether equal symbol names share one entry of the string table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    Shared,
    Repeated,
}

/// Contents of `.dynstr`, `.dynsym` and `.rela.dyn`.
struct PatchTables {
    names: Vec<u8>,
    symbols: Vec<u8>,
    relas: Vec<u8>,
}

impl PatchTables {
    fn new(symbols: &[ArgumentSymbol], patches: &[PatchEntry], section: u16, sharing: Names) -> Result<Self, ElfError> {
        let mut names = StringTable::default();
        let mut entries = vec![Symbol::default()];
        for (i, symbol) in symbols.iter().enumerate() {
            let earlier = symbols[..i].iter().position(|s| s.name == symbol.name);
            let name_at = match earlier.filter(|_| sharing == Names::Shared) {
                Some(first) => entries[first + 1].name_at,
                None => too_large("name table", names.push(&symbol.name))?,
            };
            let info = code::STB_GLOBAL << 4 | code::STT_OBJECT;
            entries.push(Symbol { name_at, value: 0, size: symbol.size, info, other: 0, section });
        }
        let relas = patches.iter().map(|patch| {
            let known = symbols.get(patch.symbol).is_some();
            let symbol = too_large("symbol index", patch.symbol)?;
            match known {
                true => Ok(Rela { offset: patch.offset, symbol: symbol + 1, kind: patch.schema, addend: patch.addend }),
                false => Err(ElfError::BadIndex {
                    what: "symbol of a patch".to_owned(),
                    index: symbol,
                    count: symbols.len(),
                }),
            }
        });
        let relas = Rela::write_table(&relas.collect::<Result<Vec<_>, _>>()?)?;
        Ok(Self { names: names.into_bytes(), symbols: Symbol::write_table(&entries), relas })
    }
}

/// `.dynamic`: the section index of the relocations, and their size.
fn dynamic(rela: u32, relas: &[u8]) -> Vec<u8> {
    [DT_RELA, rela, DT_RELASZ, relas.len() as u32].iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn linked(
    name: &str,
    kind: u32,
    flags: u32,
    align: u32,
    data: Vec<u8>,
    entry_bytes: u32,
    link: u32,
    info: u32,
) -> Section {
    Section { entry_bytes, link, info, ..Section::new(name, kind, flags, align, data) }
}

fn too_large(what: &'static str, value: usize) -> Result<u32, ElfError> {
    u32::try_from(value).map_err(|_| ElfError::TooLarge { what, value: value as u64 })
}
