//! Full ELF files of the layer kernel for every context length, made by exchanging words of one prepared file.

use crate::context_map::{ContextMap, ContextMapError};
use crate::context_rules::{ContextRuleError, ContextRules, SAMPLE_CONTEXTS};
use crate::full_elf::{AssembleError, COLUMNS, FullElfRequest, PdiMode, assemble};
use crate::instruction_elf::{InstructionElf, InstructionElfError, UID_IN_NOTE, UID_NOTE_BYTES};
use crate::md5::DIGEST_BYTES;
use npuhal_amdxdna::format::elf::{Elf, ElfError};
use std::ops::{Range, RangeInclusive};
use thiserror::Error;

/// Contexts that are hashed side by side: enough for the compiler to work on vectors, few enough to stay in the first cache.
const LANES: usize = 32;
/// Digits of a context length in a kernel name.
const NAME_DIGITS: usize = 5;
/// Largest context length that a kernel name can hold.
pub const NAMED_CONTEXT_MAX: u32 = 99_999;
const RELA_BYTES: usize = 12;
const ADDEND_IN_RELA: usize = 8;
const SYMBOL_BYTES: usize = 16;
const SIZE_IN_SYMBOL: usize = 8;

/// Name of the layer kernel for a context of `context` positions: `fl00017`.
#[must_use]
pub fn kernel_name(context: u32) -> String {
    format!("fl{context:0NAME_DIGITS$}")
}

/// No images, or no image for a context length.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayerImageError {
    /// The instruction ELF files.
    #[error(transparent)]
    Map(#[from] ContextMapError),
    /// Assembling one of them.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// The assembled files do not follow the rules that their inputs follow.
    #[error("assembled files: {0}")]
    Rules(#[from] ContextRuleError),
    /// Exchanging words does not give what assembling gives.
    #[error(
        "the full ELF for a context of {context} is not that for 1 with words exchanged; these kernels cannot be used"
    )]
    NotIncremental {
        /// Context length.
        context: u32,
    },
    /// A word of an assembled file that may not depend on the context length does.
    #[error(
        "the word at {at_bytes:#x} of the full ELF depends on the context length, and is neither code nor the addend of a \
         relocation nor the size of a symbol"
    )]
    Structure {
        /// Byte offset in the file.
        at_bytes: usize,
    },
    /// No such context length.
    #[error("context length {context} out of range: wanted 1 to {limit}")]
    Context {
        /// What was asked for.
        context: u32,
        /// Largest there is.
        limit: u32,
    },
    /// An image that is not one of this set.
    #[error("an image of {found_bytes} bytes; those of this set have {wanted_bytes}")]
    ImageSize {
        /// Bytes wanted.
        wanted_bytes: usize,
        /// Bytes found.
        found_bytes: usize,
    },
}

impl From<InstructionElfError> for LayerImageError {
    fn from(error: InstructionElfError) -> Self {
        Self::Assemble(error.into())
    }
}

impl From<ElfError> for LayerImageError {
    fn from(error: ElfError) -> Self {
        Self::Assemble(error.into())
    }
}

/// A word of the code that is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeChange {
    /// Byte offset in the control code.
    pub at_bytes: u32,
    /// New value, before relocation.
    pub value: u32,
}

/// A relocation whose addend is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddendChange {
    /// Index of the relocation, in file order.
    pub relocation: u32,
    /// New addend.
    pub addend: u32,
}

/// What turns a patched image of one context length into that of another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageChanges {
    /// Words of the code, ascending.
    pub code: Vec<CodeChange>,
    /// Relocations, ascending.
    pub addends: Vec<AddendChange>,
}

/// A file of a set, that is rewritten for one context length after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageCursor {
    image: Vec<u8>,
    /// First of the contexts whose UIDs are known: neighbours are hashed together.
    first: u32,
    uids: [[u8; DIGEST_BYTES]; LANES],
}

/// Full ELF files ([`PdiMode::None`]) for contexts from 1 to a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerImages {
    map: ContextMap,
    /// The file for a context of 1.
    image: Vec<u8>,
    rules: ContextRules,
    places: Places,
    limit: u32,
}

/// Bytes of the full ELF files.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Places {
    code: Range<usize>,
    relocations: Range<usize>,
    symbols: Range<usize>,
    uid: Range<usize>,
    name: Range<usize>,
}

impl LayerImages {
    /// Prepares the files for contexts of 1 to `limit`, with an empty partition image.
    ///
    /// # Errors
    /// Kernels that cannot be assembled, or whose assembled files do not differ by the rules of their instruction files.
    pub fn new(map: ContextMap, limit: u32) -> Result<Self, LayerImageError> {
        if !(1..=NAMED_CONTEXT_MAX).contains(&limit) {
            return Err(LayerImageError::Context { context: limit, limit: NAMED_CONTEXT_MAX });
        }
        let mut samples = Vec::with_capacity(SAMPLE_CONTEXTS.len());
        for context in SAMPLE_CONTEXTS {
            samples.push(assemble_layer(&map, context)?);
        }
        let image = samples.remove(0);
        let places = Places::of(&image)?;
        let ignored = [places.uid.clone(), places.name.clone()];
        let rules = ContextRules::derive([&image, &samples[0], &samples[1]], &ignored)?;
        places.check(&rules)?;
        let images = Self { map, image, rules, places, limit };
        // The longest context is farthest from what the rules were derived from.
        for context in [SAMPLE_CONTEXTS[2].min(limit), limit] {
            if images.image(context)? != assemble_layer(&images.map, context)? {
                return Err(LayerImageError::NotIncremental { context });
            }
        }
        Ok(images)
    }

    /// Largest context length.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The instruction files behind the images.
    #[must_use]
    pub fn map(&self) -> &ContextMap {
        &self.map
    }

    /// Bytes of each file.
    #[must_use]
    pub fn image_bytes(&self) -> usize {
        self.image.len()
    }

    /// The file for a context of `context` positions; its kernel is [`kernel_name`].
    ///
    /// # Errors
    /// [`LayerImageError::Context`].
    pub fn image(&self, context: u32) -> Result<Vec<u8>, LayerImageError> {
        self.check(context)?;
        let mut image = self.image.clone();
        let [uid] = self.map.uids([context]);
        self.write(context, &uid, &mut image);
        Ok(image)
    }

    /// A cursor at a context of 1.
    #[must_use]
    pub fn cursor(&self) -> ImageCursor {
        ImageCursor { image: self.image.clone(), first: 1, uids: self.map.uids(std::array::from_fn(|i| 1 + i as u32)) }
    }

    /// Moves a cursor of this set to `context`, and returns the file. Ascending context lengths are cheapest.
    ///
    /// # Errors
    /// [`LayerImageError::Context`], [`LayerImageError::ImageSize`] for the cursor of another set.
    pub fn seek<'c>(&self, cursor: &'c mut ImageCursor, context: u32) -> Result<&'c [u8], LayerImageError> {
        self.check(context)?;
        if cursor.image.len() != self.image.len() {
            let (wanted_bytes, found_bytes) = (self.image.len(), cursor.image.len());
            return Err(LayerImageError::ImageSize { wanted_bytes, found_bytes });
        }
        let known = |first: u32| context.checked_sub(first).map(|lane| lane as usize).filter(|lane| *lane < LANES);
        let lane = known(cursor.first).unwrap_or_else(|| {
            cursor.first = context;
            cursor.uids = self.map.uids(std::array::from_fn(|lane| context + lane as u32));
            0
        });
        self.write(context, &cursor.uids[lane], &mut cursor.image);
        Ok(&cursor.image)
    }

    /// Hands the files for `contexts` to `take`, in order.
    ///
    /// # Errors
    /// [`LayerImageError::Context`], before anything was handed out.
    pub fn for_each(
        &self,
        contexts: RangeInclusive<u32>,
        mut take: impl FnMut(u32, &[u8]),
    ) -> Result<(), LayerImageError> {
        if contexts.is_empty() {
            return Ok(());
        }
        self.check(*contexts.start())?;
        self.check(*contexts.end())?;
        let mut cursor = self.cursor();
        for context in contexts {
            take(context, self.seek(&mut cursor, context)?);
        }
        Ok(())
    }

    /// What is exchanged in code and relocations between two context lengths.
    ///
    /// # Errors
    /// [`LayerImageError::Context`].
    pub fn changes(&self, from: u32, to: u32) -> Result<ImageChanges, LayerImageError> {
        self.check(from)?;
        self.check(to)?;
        let changed = |range: &Range<usize>| {
            let start = range.start;
            let words = self.rules.words_in(range).iter().filter(|word| word.value(from) != word.value(to));
            words.map(move |word| (word.at_bytes - start, word.value(to))).collect::<Vec<_>>()
        };
        let code = changed(&self.places.code).into_iter();
        let addends = changed(&self.places.relocations).into_iter();
        Ok(ImageChanges {
            code: code.map(|(at, value)| CodeChange { at_bytes: at as u32, value }).collect(),
            addends: addends
                .map(|(at, addend)| AddendChange { relocation: (at / RELA_BYTES) as u32, addend })
                .collect(),
        })
    }

    fn check(&self, context: u32) -> Result<(), LayerImageError> {
        match (1..=self.limit).contains(&context) {
            true => Ok(()),
            false => Err(LayerImageError::Context { context, limit: self.limit }),
        }
    }

    /// Writes a checked context length into an image of the right size.
    fn write(&self, context: u32, uid: &[u8; DIGEST_BYTES], image: &mut [u8]) {
        self.rules.apply(context, image);
        image[self.places.uid.clone()].copy_from_slice(uid);
        let mut rest = context;
        for digit in image[self.places.name.clone()].iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
    }
}

impl Places {
    fn of(image: &[u8]) -> Result<Self, LayerImageError> {
        let elf = Elf::parse(image)?;
        let range = |name: &'static str| {
            let (_, section) = elf.find(name).ok_or(ElfError::MissingSection { name })?;
            let start = section.offset as usize;
            Ok::<_, ElfError>(start..start + section.data.len())
        };
        let note = range(".note.xrt.UID")?;
        if note.len() != UID_NOTE_BYTES {
            return Err(InstructionElfError::UidNote { len_bytes: note.len(), sizes: None }.into());
        }
        // `.strtab` starts with NUL, `_Z`, the length of the name in one digit, `fl`.
        let digits_at = range(".strtab")?.start + 1 + "_Z7fl".len();
        Ok(Self {
            code: range(".ctrltext.0")?,
            relocations: range(".rela.dyn")?,
            symbols: range(".dynsym")?,
            uid: note.start + UID_IN_NOTE.start..note.start + UID_IN_NOTE.end,
            name: digits_at..digits_at + NAME_DIGITS,
        })
    }
}

impl Places {
    /// Only code, addends and symbol sizes may depend on the context length.
    fn check(&self, rules: &ContextRules) -> Result<(), LayerImageError> {
        let is_field = |range: &Range<usize>, at: usize, entry_bytes: usize, field_at: usize| {
            range.contains(&at) && (at - range.start) % entry_bytes == field_at
        };
        let is_known = |at: usize| {
            self.code.contains(&at)
                || is_field(&self.relocations, at, RELA_BYTES, ADDEND_IN_RELA)
                || is_field(&self.symbols, at, SYMBOL_BYTES, SIZE_IN_SYMBOL)
        };
        match rules.words().iter().find(|word| !is_known(word.at_bytes)) {
            Some(word) => Err(LayerImageError::Structure { at_bytes: word.at_bytes }),
            None => Ok(()),
        }
    }
}

/// The file for one context length, by the long way.
fn assemble_layer(map: &ContextMap, context: u32) -> Result<Vec<u8>, LayerImageError> {
    let input = InstructionElf::parse(&map.file(context)?)?;
    let kernel = kernel_name(context);
    Ok(assemble(&input, &FullElfRequest { kernel: &kernel, mode: PdiMode::None, pdi: &[], columns: COLUMNS })?)
}
