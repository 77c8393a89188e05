//! Whole-layer Qwen3 kernels on eight columns: the cores behind the published control code.
//!
//! One configuration serves two kernels, which control code selects by a word in every core that starts a run: a decoder
//! layer for one token ([`Mode::Layer`]), and the final norm with the output head ([`Mode::Head`]). Dimensions come from the
//! configuration, the context length from the words that control code writes into the attention cores.
//!
//! | Stream | Layer | Head |
//! |---|---|---|
//! | column 2, MM2S 0, packet 0 | residual stream, bf16 | the same |
//! | column 2, MM2S 0, packet 1 | cosines, sines, norm of query heads, norm of key heads | |
//! | column 2, MM2S 1, packet 0 | input norm, post-attention norm | final norm |
//! | columns 0, 1, 6, 7, MM2S 0 and 1 | groups of tiles in turns, anew with each block of projections | groups of tiles in turns |
//! | columns 3 and 4, S2MM 0 | new row of keys, then of values: first half of the heads on 3, second on 4 | |
//! | column 3, MM2S 0 and 1 | keys of the first and second half of the heads, blocks of 16 rows | |
//! | column 4, MM2S 0 and 1 | values, the same | |
//! | column 2, S2MM 1 | residual stream, bf16 | logits, bf16 |
//!
//! A group is the tiles of 64 output features: two rows of tiles taking turns. Blocks of projections: query, key and value;
//! output; up and gate in chunks of 512 features; down.
//!
//! # Where values are rounded
//! Sums, norms, rotation, softmax and the activation are f32. A value is rounded to bf16, to nearest even, where it becomes
//! an operand of a matrix product or leaves the array: normed residual stream, rotated query, rotated key and value (the
//! rows of the cache), output of attention, activation times up, the residual stream at the end of a layer, logits. Weights
//! are `code · scale + zero`, whose products with an operand are summed a group of 32 at a time. The residual stream between
//! attention and feed-forward block stays f32. The rounding points inside a layer are this design's: only the buffers'
//! formats are published.

mod attention;
mod groups;
mod head;
mod layer;
mod math;
mod ports;
#[cfg(test)]
mod tests;

use crate::array::program::{CoreProgram, CoreProgramTable, Step, Streams};
use crate::kit::QWEN3;
use head::Head;
use layer::Layer;

pub use groups::{COLUMNS_OF_TILE, GROUP_ROWS, ROWS_OF_TILE, TILE_BYTES};
pub use ports::{CONTEXT_WORDS, HUB_MODE_WORD, MODE_COLUMNS, MODE_OFFSET, MODE_ROWS, START_LOCK, WEIGHT_STREAMS};

/// Elements of a head.
pub const HEAD_DIM: usize = 128;
/// Positions of the KV cache that are read at once.
pub const BLOCK_ROWS: usize = 16;
/// Features in a chunk of the up (or gate) projection.
pub const CHUNK_FEATURES: usize = 512;
/// Largest size in any one dimension.
const SIZE_MAX: usize = 1 << 20;

/// What a run computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A decoder layer.
    Layer,
    /// Final norm and output head.
    Head,
}

impl Mode {
    /// The word that selects the mode.
    #[must_use]
    pub const fn word(self) -> u32 {
        match self {
            Self::Layer => 1,
            Self::Head => 2,
        }
    }
}

/// Dimensions of a model, as its configuration image holds them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dimensions {
    /// Width of the residual stream; a multiple of 256.
    pub hidden: usize,
    /// Query heads; even.
    pub heads: usize,
    /// Key and value heads; even, a divisor of the query heads.
    pub kv_heads: usize,
    /// Width of the feed-forward block; a multiple of 512.
    pub intermediate: usize,
    /// Entries of the vocabulary; a multiple of 64.
    pub vocab: usize,
    /// Added to the mean of squares in norms.
    pub norm_epsilon: f32,
}

impl Dimensions {
    /// The words of the program's description.
    ///
    /// # Errors
    /// What is impossible about the dimensions.
    pub fn to_words(&self) -> Result<Vec<u32>, String> {
        self.check()?;
        let sizes = [self.hidden, self.heads, self.kv_heads, self.intermediate, self.vocab];
        let mut words: Vec<u32> = sizes.iter().map(|size| *size as u32).collect();
        words.push(self.norm_epsilon.to_bits());
        Ok(words)
    }

    /// Reads the words of a program's description.
    ///
    /// # Errors
    /// What is impossible about them.
    pub fn from_words(words: &[u32]) -> Result<Self, String> {
        let [hidden, heads, kv_heads, intermediate, vocab, epsilon] =
            <[u32; 6]>::try_from(words).map_err(|_| format!("{} dimensions; wanted 6", words.len()))?;
        let [hidden, heads, kv_heads, intermediate, vocab] =
            [hidden, heads, kv_heads, intermediate, vocab].map(|word| word as usize);
        let dimensions = Self { hidden, heads, kv_heads, intermediate, vocab, norm_epsilon: f32::from_bits(epsilon) };
        dimensions.check()?;
        Ok(dimensions)
    }

    /// Says what the design cannot have.
    ///
    /// # Errors
    /// The first dimension that does not fit, and what would.
    pub fn check(&self) -> Result<(), String> {
        for (what, found, multiple, limit) in [
            ("hidden size", self.hidden, COLUMNS_OF_TILE, SIZE_MAX),
            ("number of query heads", self.heads, COLUMNS_OF_TILE / HEAD_DIM, SIZE_MAX / HEAD_DIM),
            ("number of KV heads", self.kv_heads, 2, SIZE_MAX / HEAD_DIM),
            ("feed-forward size", self.intermediate, CHUNK_FEATURES, SIZE_MAX),
            ("vocabulary", self.vocab, GROUP_ROWS, SIZE_MAX),
        ] {
            if found == 0 || found > limit || !found.is_multiple_of(multiple) {
                return Err(format!("a {what} of {found}; wanted a multiple of {multiple}, at most {limit}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} query heads over {} KV heads; wanted a multiple", self.heads, self.kv_heads));
        }
        if !(self.norm_epsilon.is_finite() && self.norm_epsilon >= 0.0) {
            return Err(format!("{} added to the mean of squares; wanted a number from 0", self.norm_epsilon));
        }
        Ok(())
    }

    /// Width of all query heads.
    #[must_use]
    pub const fn query_width(&self) -> usize {
        self.heads * HEAD_DIM
    }

    /// Width of all key (or value) heads.
    #[must_use]
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * HEAD_DIM
    }

    /// Bytes of a row of a region of the KV cache: half of the heads, bf16.
    #[must_use]
    pub const fn cache_row_bytes(&self) -> usize {
        self.kv_width()
    }
}

/// Adds the program to a table.
pub(crate) fn register(table: &mut CoreProgramTable) {
    // The id is this crate's own.
    let _ = table
        .register(QWEN3, "qwen3-layer, qwen3-lmhead", |words| Ok(Box::new(Qwen3::new(Dimensions::from_words(words)?))));
}

/// Both kernels of the design; one of them runs at a time.
#[derive(Debug)]
struct Qwen3 {
    layer: Layer,
    head: Head,
    /// Why no run starts although control code has asked for one.
    refusal: Option<String>,
}

impl Qwen3 {
    fn new(dimensions: Dimensions) -> Self {
        Self { layer: Layer::new(dimensions), head: Head::new(dimensions), refusal: None }
    }

    /// The mode that all cores agree on; `None` before the first run.
    fn mode(streams: &Streams<'_>) -> Result<Option<Mode>, String> {
        let (column, row, offset) = HUB_MODE_WORD;
        let word = streams.data_word(column, row, offset);
        let mode = match word {
            0 => return Ok(None),
            1 => Mode::Layer,
            2 => Mode::Head,
            _ => return Err(format!("mode {word} in the hub; wanted 1 (layer) or 2 (head)")),
        };
        for column in MODE_COLUMNS {
            for row in MODE_ROWS {
                let found = streams.data_word(column, row, MODE_OFFSET);
                if found != word {
                    return Err(format!("mode {found} in core ({column}, {row}) and {word} in the hub"));
                }
            }
        }
        Ok(Some(mode))
    }

    fn start(&mut self, streams: &mut Streams<'_>) -> Step {
        self.refusal = None;
        match Self::mode(streams) {
            Ok(None) => Step::Waiting,
            Ok(Some(Mode::Layer)) => self.layer.step(streams),
            Ok(Some(Mode::Head)) => self.head.step(streams),
            Err(reason) => {
                self.refusal = Some(reason);
                Step::Waiting
            }
        }
    }
}

impl CoreProgram for Qwen3 {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        match (self.layer.unfinished(), self.head.unfinished()) {
            (Some(_), _) => self.layer.step(streams),
            (None, Some(_)) => self.head.step(streams),
            (None, None) => self.start(streams),
        }
    }

    fn unfinished(&self) -> Option<String> {
        self.layer.unfinished().or_else(|| self.head.unfinished()).or_else(|| self.refusal.clone())
    }
}
