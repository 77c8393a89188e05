//! The kernels of the lane: their files, their agreement with a model, and the images that are loaded.

use crate::context_map::{ContextMap, ContextMapError};
use crate::context_rules::SAMPLE_CONTEXTS;
use crate::dimensions::{Dimensions, LaneDecline};
use crate::full_elf::{AssembleError, COLUMNS, FullElfRequest, PdiMode, assemble};
use crate::instruction_elf::{InstructionElf, InstructionElfError};
use crate::kv::{KV_ARGUMENT, KvError, KvGeometry};
use crate::layer_images::{LayerImageError, LayerImages};
use crate::md5::md5;
use crate::packing::{BufferSizes, LayerLayout, NORMS_BYTES};
use npuhal_models::hexadecimal;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Kernel that loads the partition image.
pub const INIT_KERNEL: &str = "flinit";
/// Kernel of the final norm and the head.
pub const HEAD_KERNEL: &str = "flhead";
/// Layer kernels for contexts of 1, 2 and 17.
pub const LAYER_FILES: [&str; 3] = ["layer_ctx1.elf", "layer_ctx2.elf", "layer_ctx17.elf"];
/// Kernel of the head.
pub const HEAD_FILE: &str = "lmhead.elf";
/// The same in a directory of captured files.
const CAPTURED_HEAD_FILE: &str = "elf_0002_lmhead.bin";
/// Partition image.
pub const PDI_FILE: &str = "layer.pdi";
/// File beside kernels that were written for the virtual NPU.
pub const MARK_FILE: &str = "virtual-npu.txt";
/// Longest mark that is read.
const MAX_MARK_BYTES: u64 = 4096;
/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Arguments of the layer kernel.
pub const LAYER_ARGUMENTS: [&str; 5] = ["act", "weights", "layer norms", "head norms", "KV cache"];
const WEIGHTS_ARGUMENT: u32 = 1;
const LOGITS_ARGUMENT: u32 = 0;
const WORD_BYTES: u64 = 4;
/// Arguments of the head's kernel.
pub const HEAD_ARGUMENTS: [&str; 4] = ["logits", "weights", "act", "final norm"];

/// Kernels that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A file is not there, or made for another model.
    #[error(transparent)]
    Declined(#[from] LaneDecline),
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that is no kernel.
    #[error("{} has more than {MAX_FILE_BYTES} bytes; no kernel file is that large", path.display())]
    TooLarge {
        /// File.
        path: PathBuf,
    },
    /// The layer kernels.
    #[error("npu/layer_ctx*.elf: {0}")]
    Layer(#[from] LayerImageError),
    /// The head's kernel.
    #[error("npu/{HEAD_FILE}: {0}")]
    Head(AssembleError),
    /// The initial configuration.
    #[error("npu/{PDI_FILE}: {0}")]
    Init(AssembleError),
    /// The KV cache of the layer kernel.
    #[error("npu/layer_ctx1.elf: {0}")]
    Kv(#[from] KvError),
    /// A kernel with more arguments than it is given.
    #[error("{file} uses argument {argument}; the lane passes {arguments}, from 0")]
    Arguments {
        /// Kernel file.
        file: &'static str,
        /// Argument.
        argument: u32,
        /// Arguments that are passed.
        arguments: usize,
    },
    /// A transfer that depends on the context length in another way than the lane checks.
    #[error(
        "npu/layer_ctx*.elf: the transfer at byte {at_bytes:#x} of argument {argument} depends on the context length; wanted only \
         rows of the KV cache that move by their length, and whole blocks of it that are read"
    )]
    Moves {
        /// Argument.
        argument: String,
        /// Where it starts for a context of 1.
        at_bytes: u32,
    },
    /// A kernel that would leave its buffers.
    #[error(
        "{file} reaches byte {end_bytes} of argument {argument}, whose buffer has {buffer_bytes} bytes: the kernels are for another \
         model, or damaged"
    )]
    OutOfBuffer {
        /// Kernel file.
        file: &'static str,
        /// Argument.
        argument: String,
        /// End of the farthest transfer.
        end_bytes: u64,
        /// Size of the buffer.
        buffer_bytes: u64,
    },
}

impl From<ContextMapError> for KernelError {
    fn from(error: ContextMapError) -> Self {
        Self::Layer(error.into())
    }
}

impl From<InstructionElfError> for KernelError {
    fn from(error: InstructionElfError) -> Self {
        Self::Layer(error.into())
    }
}

/// Contents of the kernel files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFiles {
    /// Instruction ELF files of the layer kernel for contexts of 1, 2 and 17.
    pub layer: [Vec<u8>; 3],
    /// Instruction ELF file of the head.
    pub head: Vec<u8>,
    /// Partition image.
    pub pdi: Vec<u8>,
}

impl KernelFiles {
    /// Where the files are in `folder`: the `npu` folder of a model, or one of captured files. Nothing is read.
    ///
    /// # Errors
    /// [`LaneDecline::MissingFile`] for the first file that is missing.
    pub fn find(folder: &Path) -> Result<KernelPaths, LaneDecline> {
        let captured = folder.join(CAPTURED_HEAD_FILE);
        let head = folder.join(HEAD_FILE);
        let head = if !head.exists() && captured.exists() { captured } else { head };
        let paths = KernelPaths { layer: LAYER_FILES.map(|name| folder.join(name)), head, pdi: folder.join(PDI_FILE) };
        let [one, two, seventeen] = &paths.layer;
        let missing = [one, two, seventeen, &paths.head, &paths.pdi].into_iter().find(|path| !path.is_file()).cloned();
        match missing {
            Some(path) => Err(LaneDecline::MissingFile { path }),
            None => Ok(paths),
        }
    }

    /// Reads the files of `folder`, found as [`KernelFiles::find`] says.
    ///
    /// # Errors
    /// [`LaneDecline::MissingFile`], [`KernelError::Io`], [`KernelError::TooLarge`].
    pub fn read(folder: &Path) -> Result<Self, KernelError> {
        let KernelPaths { layer: [one, two, seventeen], head, pdi } = Self::find(folder)?;
        Ok(Self { layer: [read(one)?, read(two)?, read(seventeen)?], head: read(head)?, pdi: read(pdi)? })
    }
}

/// What kernels run on. Their code looks the same; what it drives differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelTarget {
    /// The array of an NPU.
    Hardware,
    /// The virtual NPU.
    Virtual,
}

impl KernelTarget {
    /// What `files`, which lie in `folder`, run on. The mark of virtual kernels names the partition image it stands beside, so
    /// that it says nothing about files that have taken the place of these.
    #[must_use]
    pub fn of(folder: &Path, files: &KernelFiles) -> Self {
        let mut text = String::new();
        let read = File::open(folder.join(MARK_FILE))
            .and_then(|file| file.take(MAX_MARK_BYTES).read_to_string(&mut text))
            .is_ok();
        let line = image_line(&files.pdi);
        if read && text.lines().any(|found| found == line) { Self::Virtual } else { Self::Hardware }
    }

    /// Contents of [`MARK_FILE`] for virtual kernels with the partition image `pdi`; `made_by` is the program with its version.
    #[must_use]
    pub fn mark(pdi: &[u8], made_by: &str) -> String {
        format!(
            "Kernels of npuhal's virtual NPU. They do nothing on hardware.\nmade_by={made_by}\n{}\n",
            image_line(pdi)
        )
    }
}

fn image_line(pdi: &[u8]) -> String {
    format!("{PDI_FILE}_md5={}", hexadecimal(&md5(pdi)))
}

/// Paths of the kernel files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPaths {
    /// Instruction ELF files of the layer kernel for contexts of 1, 2 and 17.
    pub layer: [PathBuf; 3],
    /// Instruction ELF file of the head.
    pub head: PathBuf,
    /// Partition image.
    pub pdi: PathBuf,
}

fn read(path: PathBuf) -> Result<Vec<u8>, KernelError> {
    let mut bytes = Vec::new();
    // One byte more than is accepted, so that a file that grows is seen as well.
    let result = File::open(&path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
    match result {
        Ok(read) if read as u64 > MAX_FILE_BYTES => Err(KernelError::TooLarge { path }),
        Ok(_) => Ok(bytes),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Err(LaneDecline::MissingFile { path }.into()),
        Err(source) => Err(KernelError::Io { path, source }),
    }
}

/// Images of all kernels, checked against a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernels {
    init: Vec<u8>,
    head: Vec<u8>,
    layers: LayerImages,
    kv: KvGeometry,
    logits_ends: Vec<u64>,
}

impl Kernels {
    /// Assembles what `files` allow, for a model of `dimensions`.
    ///
    /// # Errors
    /// Files that are damaged, follow no rule, or are made for another model.
    pub fn new(files: &KernelFiles, dimensions: &Dimensions) -> Result<Self, KernelError> {
        let [one, two, seventeen] = &files.layer;
        let map = ContextMap::derive(one, two, seventeen)?;
        let layer = InstructionElf::parse(one)?;
        let longer = [InstructionElf::parse(two)?, InstructionElf::parse(seventeen)?];
        let kv = KvGeometry::of(&layer, &longer[0])?;
        check_moves(&layer, &longer)?;
        check_layer(&layer, &kv, dimensions)?;
        let longest = InstructionElf::parse(&map.file(kv.positions())?)?;
        let sizes = BufferSizes::new(dimensions);
        check_reach(LAYER_FILES[0], &longest, &layer_buffers(&sizes, &kv), &LAYER_ARGUMENTS)?;
        let head = InstructionElf::parse(&files.head).map_err(|error| KernelError::Head(error.into()))?;
        check_head(&head, &sizes, dimensions)?;
        let logits_ends = ends_of_logits(&head, dimensions.logits_bytes() as u64);
        let request =
            FullElfRequest { kernel: INIT_KERNEL, mode: PdiMode::InitOnly, pdi: &files.pdi, columns: COLUMNS };
        let init = assemble(&layer, &request).map_err(KernelError::Init)?;
        // What is configured once is not loaded again: later images carry no partition image.
        let request = FullElfRequest { kernel: HEAD_KERNEL, mode: PdiMode::None, pdi: &[], columns: COLUMNS };
        let head = assemble(&head, &request).map_err(KernelError::Head)?;
        let layers = LayerImages::new(map, kv.positions())?;
        Ok(Self { init, head, layers, kv, logits_ends })
    }

    /// Full ELF that configures the array; kernel [`INIT_KERNEL`].
    #[must_use]
    pub fn init(&self) -> &[u8] {
        &self.init
    }

    /// Full ELF of the head; kernel [`HEAD_KERNEL`].
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Full ELF files of the layer kernel.
    #[must_use]
    pub fn layers(&self) -> &LayerImages {
        &self.layers
    }

    /// The KV cache of a layer.
    #[must_use]
    pub fn kv(&self) -> &KvGeometry {
        &self.kv
    }

    /// Byte offsets of the first and the last word of each transfer of logits: where one that never arrived is seen.
    #[must_use]
    pub fn logits_ends(&self) -> &[u64] {
        &self.logits_ends
    }

    /// Positions of a sequence.
    #[must_use]
    pub fn positions(&self) -> u32 {
        self.layers.limit()
    }

    /// Bytes of the KV cache of a layer.
    #[must_use]
    pub fn kv_bytes(&self, sizes: &BufferSizes) -> u64 {
        sizes.kv.max(self.kv.len_bytes())
    }
}

fn layer_buffers(sizes: &BufferSizes, kv: &KvGeometry) -> [u64; LAYER_ARGUMENTS.len()] {
    [sizes.act, sizes.weights, sizes.layer_norms, sizes.norms, sizes.kv.max(kv.len_bytes())]
}

/// Ends of the farthest transfers of each argument below `arguments`, and the first argument beyond them.
fn reach<const N: usize>(code: &InstructionElf) -> ([u64; N], Option<u32>) {
    let mut ends = [0; N];
    let mut beyond = None;
    for (rela, symbol) in code.patches() {
        let end = u64::from(rela.addend) + u64::from(symbol.entry.size);
        match ends.get_mut(symbol.argument as usize) {
            Some(farthest) => *farthest = end.max(*farthest),
            None => beyond = beyond.or(Some(symbol.argument)),
        }
    }
    (ends, beyond)
}

/// No transfer may leave its buffer.
fn check_reach<const N: usize>(
    file: &'static str,
    code: &InstructionElf,
    buffers: &[u64; N],
    names: &[&str; N],
) -> Result<[u64; N], KernelError> {
    let (ends, beyond) = reach::<N>(code);
    if let Some(argument) = beyond {
        return Err(KernelError::Arguments { file, argument, arguments: N });
    }
    for (index, (end_bytes, buffer_bytes)) in ends.into_iter().zip(*buffers).enumerate() {
        if end_bytes > buffer_bytes {
            let argument = format!("{index} ({})", names[index]);
            return Err(KernelError::OutOfBuffer { file, argument, end_bytes, buffer_bytes });
        }
    }
    Ok(ends)
}

/// Byte offsets of the first and the last word of each transfer of the head's logits, of which the lane reads `len_bytes`.
fn ends_of_logits(head: &InstructionElf, len_bytes: u64) -> Vec<u64> {
    let drained = head.patches().filter(|(_, symbol)| symbol.argument == LOGITS_ARGUMENT);
    let drained = drained.map(|(rela, symbol)| (u64::from(rela.addend), u64::from(symbol.entry.size)));
    // The whole row as well: a kernel may state nothing.
    let mut ends: Vec<u64> = drained
        .chain([(0, len_bytes)])
        .filter(|(at_bytes, size_bytes)| *at_bytes < len_bytes && *size_bytes > 0)
        .flat_map(|(at_bytes, size_bytes)| {
            let end = at_bytes.saturating_add(size_bytes).min(len_bytes);
            [at_bytes, end.saturating_sub(WORD_BYTES).max(at_bytes)]
        })
        .map(|at_bytes| at_bytes - at_bytes % WORD_BYTES)
        .filter(|at_bytes| at_bytes + WORD_BYTES <= len_bytes)
        .collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Between context lengths only transfers of the KV cache may change: a row moves by its length with each position, or the
/// length of a read grows in blocks. All others stay where they are, so that what holds for one length holds for all.
fn check_moves(one: &InstructionElf, [two, seventeen]: &[InstructionElf; 2]) -> Result<(), KernelError> {
    for ((one, two), seventeen) in one.patches().zip(two.patches()).zip(seventeen.patches()) {
        let argument = one.1.argument;
        let [at_bytes, second, last] = [one, two, seventeen].map(|(rela, _)| rela.addend);
        let sizes = [one, two, seventeen].map(|(_, symbol)| symbol.entry.size);
        let moved = |rows: u32| sizes[0].checked_mul(rows).and_then(|bytes| at_bytes.checked_add(bytes));
        let (is_kv, is_sized) = (argument == KV_ARGUMENT, sizes == [sizes[0]; 3]);
        let stays = [second, last] == [at_bytes; 2] && (is_sized || is_kv);
        let is_row = is_kv && is_sized && moved(1) == Some(second) && moved(SAMPLE_CONTEXTS[2] - 1) == Some(last);
        if !stays && !is_row {
            let name = LAYER_ARGUMENTS.get(argument as usize).copied().unwrap_or("not one of the lane's");
            return Err(KernelError::Moves { argument: format!("{argument} ({name})"), at_bytes });
        }
    }
    Ok(())
}

/// The layer kernel moves exactly what a model of these dimensions has.
fn check_layer(layer: &InstructionElf, kv: &KvGeometry, dimensions: &Dimensions) -> Result<(), KernelError> {
    let (ends, beyond) = reach::<{ LAYER_ARGUMENTS.len() }>(layer);
    let weights = BufferSizes::new(dimensions).weights;
    let hidden = dimensions.hidden_bytes() as u64;
    let kv_row = dimensions.kv_width() as u64;
    agree(
        LAYER_FILES[0],
        &[
            (
                "the number of arguments",
                beyond.map_or(LAYER_ARGUMENTS.len() as u64, |last| u64::from(last) + 1),
                u64::from(KV_ARGUMENT) + 1,
            ),
            ("the residual stream in bytes", ends[0], hidden),
            ("half of the KV heads of a position in bytes", kv.row_bytes().into(), kv_row),
            ("a layer's weights in bytes", ends[1], weights),
            ("a layer's norms in bytes", ends[2], 2 * hidden),
            ("rotation and head norms in bytes", ends[3], NORMS_BYTES as u64),
        ],
    )?;
    check_weights(layer, &LayerLayout::new(dimensions))
}

/// The layer kernel reads all packed weights once, in whole groups of one projection: models of the same size may still differ
/// in what lies where.
fn check_weights(layer: &InstructionElf, layout: &LayerLayout) -> Result<(), KernelError> {
    let weights = layer.patches().filter(|(_, symbol)| symbol.argument == WEIGHTS_ARGUMENT);
    let mut transfers: Vec<_> =
        weights.map(|(rela, symbol)| (u64::from(rela.addend), u64::from(symbol.entry.size))).collect();
    transfers.sort_unstable();
    let mut next = 0;
    for (at_bytes, len_bytes) in transfers {
        let differs = |wanted| LaneDecline::KernelWeights { file: LAYER_FILES[0], at_bytes, len_bytes, wanted };
        if at_bytes != next {
            return Err(differs(format!("the next byte to be read is {next:#x}")).into());
        }
        let placed = layout.placed().into_iter().find(|(_, placed)| placed.bytes().contains(&at_bytes));
        let (name, placed) = placed.ok_or_else(|| differs("nothing lies there".to_owned()))?;
        let (bytes, group) = (placed.bytes(), placed.group_bytes());
        next = at_bytes + len_bytes;
        if len_bytes == 0
            || next > bytes.end
            || !(at_bytes - bytes.start).is_multiple_of(group)
            || !len_bytes.is_multiple_of(group)
        {
            let (start, end) = (bytes.start, bytes.end);
            let wanted = format!("the {name} projection lies at {start:#x} to {end:#x}, in groups of {group} bytes");
            return Err(differs(wanted).into());
        }
    }
    Ok(())
}

/// The head's kernel moves exactly what a model of these dimensions has. That its weights are covered by the lengths of its
/// descriptors, as the layer kernel's are, is inferred: no stream of it is published.
fn check_head(head: &InstructionElf, sizes: &BufferSizes, dimensions: &Dimensions) -> Result<(), KernelError> {
    let buffers = [sizes.logits, sizes.head, sizes.act, sizes.final_norm];
    let ends = check_reach(HEAD_FILE, head, &buffers, &HEAD_ARGUMENTS)?;
    let hidden = dimensions.hidden_bytes() as u64;
    agree(
        HEAD_FILE,
        &[
            ("the residual stream in bytes", ends[2], hidden),
            ("the final norm in bytes", ends[3], hidden),
            ("the head's weights in bytes", ends[1], sizes.head),
        ],
    )
}

fn agree(file: &'static str, properties: &[(&'static str, u64, u64)]) -> Result<(), KernelError> {
    match properties.iter().find(|(_, kernel, model)| kernel != model) {
        Some((what, kernel, model)) => {
            Err(LaneDecline::KernelShape { what, file, kernel: *kernel, model: *model }.into())
        }
        None => Ok(()),
    }
}
