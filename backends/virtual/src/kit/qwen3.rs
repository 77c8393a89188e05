//! The Qwen3 kernels of whole layers, in the form in which they are published: instruction files for contexts of 1, 2 and
//! 17, an instruction file of the head, a configuration image.

use super::{KitError, QWEN3, image, md5, symbol_of};
use crate::array::program::ProgramDescription;
use crate::design::qwen3::{
    BLOCK_ROWS, COLUMNS_OF_TILE, CONTEXT_WORDS, Dimensions, GROUP_ROWS, HEAD_DIM, HUB_MODE_WORD, MODE_COLUMNS,
    MODE_OFFSET, MODE_ROWS, Mode, START_LOCK, TILE_BYTES, WEIGHT_STREAMS,
};
use npuhal_amdxdna::format::elf::{PartialElfSpec, PatchEntry};
use npuhal_amdxdna::format::registers::{
    Direction, PacketHeader, QueuePush, Register, RegisterError, ShimBd, TokenWait,
};
use npuhal_amdxdna::format::reloc::{PARTIAL_ARGUMENT_BASE, assemble};
use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2P, Header, Stream, Version};
use std::ops::Range;

/// Context lengths of the layer files.
pub const QWEN3_CONTEXTS: [u32; 3] = [1, 2, 17];
/// Most positions of a KV cache.
pub const QWEN3_POSITIONS_MAX: u32 = 8192;

const COLUMNS: u8 = 8;
/// Column of the hub's streams.
const HUB: u8 = 2;
/// Columns of the attention cores: keys are read on the first, values on the second.
const ATTENTION: [u8; 2] = [3, 4];
/// Descriptors of the streams of weights, by channel; two sets take turns.
const WEIGHT_BDS: [[u8; 2]; 2] = [[1, 2], [9, 10]];
const RESULT_BD: u8 = 10;
/// Controller to which a channel reports, and its field.
const CONTROLLER: (u32, u32) = (0xF00, 0x1F00);
/// What the published descriptors ask of the memory.
const BURST: u32 = 3;
const READ_CACHE: u32 = 0xE;
const WRITE_CACHE: u32 = 0x2;
/// Offsets from here on collide with the fold flag of patches.
const OFFSET_LIMIT: u64 = 1 << 31;

/// Arguments of the layer kernel.
mod layer_argument {
    pub(super) const ACT: u32 = 0;
    pub(super) const WEIGHTS: u32 = 1;
    pub(super) const NORMS: u32 = 2;
    pub(super) const ROTATION: u32 = 3;
    pub(super) const CACHE: u32 = 4;
}

/// Arguments of the head's kernel.
mod head_argument {
    pub(super) const LOGITS: u32 = 0;
    pub(super) const WEIGHTS: u32 = 1;
    pub(super) const ACT: u32 = 2;
    pub(super) const NORM: u32 = 3;
}

/// The files of a model's `npu` folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qwen3Kit {
    /// Instruction files of the layer for [`QWEN3_CONTEXTS`].
    pub layer: [Vec<u8>; 3],
    /// Instruction file of the head.
    pub head: Vec<u8>,
    /// Configuration image.
    pub image: Vec<u8>,
}

impl Qwen3Kit {
    /// File names and contents.
    #[must_use]
    pub fn files(&self) -> [(&'static str, &[u8]); 5] {
        let [one, two, seventeen] = &self.layer;
        [
            ("layer_ctx1.elf", one),
            ("layer_ctx2.elf", two),
            ("layer_ctx17.elf", seventeen),
            ("lmhead.elf", &self.head),
            ("layer.pdi", &self.image),
        ]
    }
}

/// The kit of a model, with a KV cache for `positions` (a multiple of 16, at most [`QWEN3_POSITIONS_MAX`]).
///
/// # Errors
/// [`KitError::Shape`] for what the design cannot have.
pub fn qwen3(dimensions: &Dimensions, positions: u32) -> Result<Qwen3Kit, KitError> {
    let [one, two, seventeen] = QWEN3_CONTEXTS.map(|context| qwen3_layer_code(dimensions, positions, context));
    let program = ProgramDescription { id: QWEN3, dimensions: dimensions.to_words().map_err(shape)? };
    Ok(Qwen3Kit {
        layer: [instruction_file(one?)?, instruction_file(two?)?, instruction_file(seventeen?)?],
        head: instruction_file(qwen3_head_code(dimensions)?)?,
        image: image(COLUMNS, &program)?,
    })
}

/// Control code of a layer for a context of `context` tokens.
///
/// Order of operations: context length and mode into the cores; small inputs, the result and the first rows of the cache
/// queued; query, key and value groups; rows of values; reads of the cache; the other groups.
///
/// # Errors
/// As [`qwen3`]; a context that the cache does not hold.
pub fn qwen3_layer_code(dimensions: &Dimensions, positions: u32, context: u32) -> Result<Stream, KitError> {
    dimensions.check().map_err(shape)?;
    let is_whole = positions != 0 && (positions as usize).is_multiple_of(BLOCK_ROWS);
    if !is_whole || positions > QWEN3_POSITIONS_MAX {
        let wanted = format!("a multiple of {BLOCK_ROWS}, at most {QWEN3_POSITIONS_MAX}");
        return Err(shape(format!("a KV cache of {positions} positions; wanted {wanted}")));
    }
    if !(1..=positions).contains(&context) {
        return Err(shape(format!("a context of {context} with a KV cache of {positions} positions")));
    }
    let mut code = Code::new();
    for (column, row, offset) in CONTEXT_WORDS {
        code.builder.write(Register::DataMemory(offset).at(column, row)?, context);
    }
    code.start(Mode::Layer)?;
    let (hidden_bytes, row_bytes) = (2 * dimensions.hidden as u64, dimensions.cache_row_bytes() as u64);
    let region_bytes = u64::from(positions) * row_bytes;
    code.input(Input { bd: 0, channel: 0, packet: Some(0) }, HUB, layer_argument::ACT, 0, hidden_bytes)?;
    code.input(Input { bd: 1, channel: 1, packet: Some(0) }, HUB, layer_argument::NORMS, 0, 2 * hidden_bytes)?;
    let rotation_bytes = 2 * 3 * HEAD_DIM as u64;
    code.input(Input { bd: 2, channel: 0, packet: Some(1) }, HUB, layer_argument::ROTATION, 0, rotation_bytes)?;
    code.output(HUB, 1, RESULT_BD, layer_argument::ACT, 0, hidden_bytes)?;
    let new_at = u64::from(context - 1) * row_bytes;
    let new_rows = |code: &mut Code, regions: [u64; 2]| {
        ATTENTION.into_iter().zip(regions).try_for_each(|(column, region)| {
            code.output(column, 0, 0, layer_argument::CACHE, region * region_bytes + new_at, row_bytes)
        })
    };
    // Keys of both halves of the heads; the rows of values wait until these are written.
    new_rows(&mut code, [0, 2])?;
    let mut weights = Weights { next: 0, argument: layer_argument::WEIGHTS };
    let features = dimensions.query_width() + 2 * dimensions.kv_width();
    code.groups(weights.take(features, dimensions.hidden))?;
    ATTENTION.into_iter().for_each(|column| code.wait(Direction::S2mm, column, 0));
    new_rows(&mut code, [1, 3])?;
    ATTENTION.into_iter().for_each(|column| code.wait(Direction::S2mm, column, 0));
    let read_bytes = u64::from(context).div_ceil(BLOCK_ROWS as u64) * BLOCK_ROWS as u64 * row_bytes;
    for half in 0..2 {
        for (column, region) in ATTENTION.into_iter().zip([2 * u64::from(half), 2 * u64::from(half) + 1]) {
            let input = Input { bd: half, channel: half, packet: None };
            code.input(input, column, layer_argument::CACHE, region * region_bytes, read_bytes)?;
        }
    }
    code.groups(weights.take(dimensions.hidden, dimensions.query_width()))?;
    code.groups(weights.take(2 * dimensions.intermediate, dimensions.hidden))?;
    code.groups(weights.take(dimensions.hidden, dimensions.intermediate))?;
    code.wait(Direction::S2mm, HUB, 1);
    Ok(code.builder.into_stream())
}

/// Control code of final norm and head.
///
/// # Errors
/// As [`qwen3`].
pub fn qwen3_head_code(dimensions: &Dimensions) -> Result<Stream, KitError> {
    dimensions.check().map_err(shape)?;
    let mut code = Code::new();
    code.start(Mode::Head)?;
    let hidden_bytes = 2 * dimensions.hidden as u64;
    code.input(Input { bd: 0, channel: 0, packet: Some(0) }, HUB, head_argument::ACT, 0, hidden_bytes)?;
    code.input(Input { bd: 1, channel: 1, packet: Some(0) }, HUB, head_argument::NORM, 0, hidden_bytes)?;
    code.output(HUB, 1, RESULT_BD, head_argument::LOGITS, 0, 2 * dimensions.vocab as u64)?;
    let mut weights = Weights { next: 0, argument: head_argument::WEIGHTS };
    code.groups(weights.take(dimensions.vocab, dimensions.hidden))?;
    code.wait(Direction::S2mm, HUB, 1);
    Ok(code.builder.into_stream())
}

/// An instruction file with the code twice, as captured files have it: patches touch the first.
fn instruction_file(stream: Stream) -> Result<Vec<u8>, KitError> {
    let plain = stream.encode()?;
    let assembled = assemble(stream)?;
    let (mut symbols, mut patches) = (Vec::new(), Vec::new());
    for patch in assembled.patches {
        let name = (patch.argument + PARTIAL_ARGUMENT_BASE).to_string();
        let symbol = symbol_of(&mut symbols, name, patch.size);
        patches.push(PatchEntry { symbol, offset: patch.offset, schema: patch.schema.number(), addend: patch.addend });
    }
    let code = [assembled.code, plain].concat();
    let uid = md5::digest(&code);
    Ok(PartialElfSpec { code, symbols, patches, uid }.build()?.to_bytes()?)
}

/// Groups of a block of projections in the buffer of weights.
struct Groups {
    argument: u32,
    bytes: Range<u64>,
    group_bytes: u64,
}

/// The buffer of weights, from front to back.
struct Weights {
    next: u64,
    argument: u32,
}

impl Weights {
    fn take(&mut self, rows: usize, columns: usize) -> Groups {
        let group_bytes = (2 * (columns / COLUMNS_OF_TILE) * TILE_BYTES) as u64;
        let end = self.next + (rows / GROUP_ROWS) as u64 * group_bytes;
        let bytes = std::mem::replace(&mut self.next, end)..end;
        Groups { argument: self.argument, bytes, group_bytes }
    }
}

/// Where an input goes.
struct Input {
    bd: u8,
    channel: u8,
    packet: Option<u32>,
}

/// Control code in the making.
struct Code {
    builder: Builder,
}

impl Code {
    fn new() -> Self {
        Self { builder: Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2P, COLUMNS)) }
    }

    /// Mode and start signal of every core.
    fn start(&mut self, mode: Mode) -> Result<(), RegisterError> {
        let cores = MODE_COLUMNS.into_iter().flat_map(|column| MODE_ROWS.map(move |row| (column, row, MODE_OFFSET)));
        for (column, row, offset) in cores.chain([HUB_MODE_WORD]) {
            self.builder.write(Register::DataMemory(offset).at(column, row)?, mode.word());
            self.builder.write(Register::Lock(START_LOCK).at(column, row)?, 1);
        }
        Ok(())
    }

    /// A transfer into the cores that nobody waits for.
    fn input(&mut self, to: Input, column: u8, argument: u32, at_bytes: u64, len_bytes: u64) -> Result<(), KitError> {
        let packet = PacketHeader { enable: to.packet.is_some(), id: to.packet.unwrap_or_default(), kind: 0 };
        let descriptor = ShimBd { packet, cache: READ_CACHE, ..linear(len_bytes)? };
        self.descriptor(column, to.bd, &descriptor, argument, at_bytes)?;
        let push = QueuePush { start_bd: to.bd.into(), repeat: 1, issue_token: false };
        self.builder.push_shim_task(column, Direction::Mm2s, to.channel, push)?;
        Ok(())
    }

    /// A transfer out of the cores, with a token.
    fn output(
        &mut self,
        column: u8,
        channel: u8,
        bd: u8,
        argument: u32,
        at_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), KitError> {
        let descriptor = ShimBd { cache: WRITE_CACHE, ..linear(len_bytes)? };
        self.descriptor(column, bd, &descriptor, argument, at_bytes)?;
        self.push_with_token(Direction::S2mm, column, channel, bd)
    }

    fn push_with_token(&mut self, direction: Direction, column: u8, channel: u8, bd: u8) -> Result<(), KitError> {
        let control = Register::ChannelControl(direction, channel).at(column, 0)?;
        self.builder.mask_write(control, CONTROLLER.0, CONTROLLER.1);
        let push = QueuePush { start_bd: bd.into(), repeat: 1, issue_token: true };
        self.builder.push_shim_task(column, direction, channel, push)?;
        Ok(())
    }

    fn descriptor(
        &mut self,
        column: u8,
        bd: u8,
        descriptor: &ShimBd,
        argument: u32,
        at_bytes: u64,
    ) -> Result<(), KitError> {
        if at_bytes >= OFFSET_LIMIT {
            return Err(shape(format!("a transfer at {at_bytes:#x} of argument {argument}; wanted below 2 GiB")));
        }
        self.builder.shim_bd(column, bd, descriptor)?;
        self.builder.patch_shim_bd(column, bd, argument, at_bytes)?;
        Ok(())
    }

    /// Queues groups on the eight streams in turns, two rounds ahead of those that are waited for.
    fn groups(&mut self, groups: Groups) -> Result<(), KitError> {
        let starts: Vec<u64> = groups.bytes.step_by(groups.group_bytes as usize).collect();
        let rounds: Vec<&[u64]> = starts.chunks(WEIGHT_STREAMS.len()).collect();
        let descriptor = ShimBd { cache: READ_CACHE, ..linear(groups.group_bytes)? };
        for (round, starts) in rounds.iter().enumerate() {
            if let Some(before) = round.checked_sub(2) {
                self.wait_round(rounds[before].len());
            }
            for ((column, channel), at_bytes) in WEIGHT_STREAMS.into_iter().zip(*starts) {
                let bd = WEIGHT_BDS[round % 2][usize::from(channel)];
                self.descriptor(column, bd, &descriptor, groups.argument, *at_bytes)?;
                self.push_with_token(Direction::Mm2s, column, channel, bd)?;
            }
        }
        rounds.iter().rev().take(2).rev().for_each(|round| self.wait_round(round.len()));
        Ok(())
    }

    fn wait_round(&mut self, streams: usize) {
        let streams = WEIGHT_STREAMS.into_iter().take(streams);
        streams.for_each(|(column, channel)| self.wait(Direction::Mm2s, column, channel));
    }

    fn wait(&mut self, direction: Direction, column: u8, channel: u8) {
        self.builder.wait(TokenWait { direction, row: 0, column, row_count: 1, column_count: 1, channel });
    }
}

fn linear(len_bytes: u64) -> Result<ShimBd, KitError> {
    let length_words = u32::try_from(len_bytes / 4).map_err(|_| shape(format!("a transfer of {len_bytes} bytes")))?;
    Ok(ShimBd { length_words, burst: BURST, valid: true, ..ShimBd::default() })
}

fn shape(reason: String) -> KitError {
    KitError::Shape { design: "qwen3", reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::{CAPTURED_LAYERS, shared_golden};

    fn qwen3_0_6b() -> Dimensions {
        Dimensions { hidden: 1024, heads: 16, kv_heads: 8, intermediate: 3072, vocab: 151_936, norm_epsilon: 1e-6 }
    }

    #[test]
    fn layers_are_the_published_streams() {
        let Some(folder) = shared_golden("layers_are_the_published_streams", CAPTURED_LAYERS) else { return };
        for context in [1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096] {
            let wanted = std::fs::read(folder.join(format!("layer_L{context}.bin"))).unwrap();
            let found = qwen3_layer_code(&qwen3_0_6b(), 4096, context).unwrap().encode().unwrap();
            // The capture left the first two words of the header out.
            assert_eq!(found[..8], [0, 1, 4, 6, 8, 1, 0, 0]);
            assert!(found[8..] == wanted[8..], "context {context}");
        }
    }

    #[test]
    fn sizes_are_the_published_ones() {
        let kit = qwen3(&qwen3_0_6b(), 8192).unwrap();
        // Published: about 37 KB with the code once, and 421 KB for the head.
        let [layer, _, _] = kit.layer.each_ref().map(Vec::len);
        assert_eq!(layer, kit.layer[2].len());
        assert!((70_000..72_500).contains(&layer), "{layer}");
        let code = qwen3_head_code(&qwen3_0_6b()).unwrap().encode().unwrap();
        assert!((380_000..421_000).contains(&code.len()), "{}", code.len());
        assert_eq!(kit.files().map(|(name, _)| name)[3..], ["lmhead.elf", "layer.pdi"]);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let reason = |change: &dyn Fn(&mut Dimensions), positions| {
            let mut dimensions = qwen3_0_6b();
            change(&mut dimensions);
            qwen3(&dimensions, positions).unwrap_err().to_string()
        };
        assert_eq!(
            reason(&|d| d.hidden = 1000, 64),
            "qwen3: a hidden size of 1000; wanted a multiple of 256, at most 1048576"
        );
        assert!(reason(&|d| d.heads = 12, 64).contains("12 query heads over 8 KV heads"));
        assert!(reason(&|d| d.kv_heads = 1, 64).contains("KV heads of 1"));
        assert!(reason(&|d| d.intermediate = 768, 64).contains("feed-forward size of 768"));
        assert!(reason(&|d| d.vocab = 0, 64).contains("vocabulary of 0"));
        assert!(reason(&|d| d.norm_epsilon = f32::NAN, 64).contains("NaN"));
        assert!(reason(&|_| (), 0).contains("a KV cache of 0 positions"));
        assert!(reason(&|_| (), 8208).contains("a KV cache of 8208 positions"));
        assert!(reason(&|_| (), 16).contains("a context of 17"));
        assert!(reason(&|d| (d.hidden, d.intermediate) = (1 << 20, 1 << 20), 64).contains("wanted below 2 GiB"));
    }
}
