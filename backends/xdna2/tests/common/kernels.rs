//! Kernel files of the published form for any dimensions, as far as a host sees it: which bytes of which argument are moved, and
//! what depends on the context length. The code computes nothing.

use npuhal_amdxdna::format::elf::{ArgumentSymbol, PartialElfSpec, PatchEntry};
use npuhal_amdxdna::format::registers::{Direction, QueuePush, Register, ShimBd, TokenWait};
use npuhal_amdxdna::format::reloc::{PARTIAL_ARGUMENT_BASE, assemble};
use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2P, Header, Stream, Version};
use npuhal_models::ModelConfig;
use npuhal_models::config::{DecoderFeatures, Rope, RopePairing, RopeScaling};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::kernels::KernelFiles;
use npuhal_xdna2::md5::md5;
use npuhal_xdna2::packing::{BufferSizes, LayerLayout, Placed, TILE_BYTES};

/// A small model of the form the lane takes.
pub(crate) fn small_config() -> ModelConfig {
    ModelConfig {
        model_type: "qwen3".to_owned(),
        name: "small".to_owned(),
        hidden_size: 256,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        intermediate_size: 512,
        vocab_size: 192,
        context_length: 4096,
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 1e6, dims: 128, pairing: RopePairing::Halves, scaling: RopeScaling::None },
        qkv_bias: false,
        qk_norm: true,
        tied_head: true,
        features: DecoderFeatures::default(),
    }
}

/// The sizes of Qwen3-0.6B.
pub(crate) fn qwen3_0_6b_config() -> ModelConfig {
    ModelConfig {
        hidden_size: 1024,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        intermediate_size: 3072,
        vocab_size: 151_936,
        ..small_config()
    }
}

pub(crate) struct Code {
    builder: Builder,
    transfers: u32,
}

impl Code {
    fn new() -> Self {
        Self { builder: Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2P, 8)), transfers: 0 }
    }

    pub(crate) fn transfer(&mut self, argument: u32, at_bytes: u64, len_bytes: u64) {
        let (column, bd) = ((self.transfers % 8) as u8, (self.transfers / 8 % 16) as u8);
        self.transfers += 1;
        let descriptor = ShimBd { length_words: (len_bytes / 4) as u32, valid: true, ..ShimBd::default() };
        self.builder.shim_bd(column, bd, &descriptor).unwrap();
        self.builder.patch_shim_bd(column, bd, argument, at_bytes).unwrap();
        let control = Register::ChannelControl(Direction::Mm2s, 0).at(column, 0).unwrap();
        self.builder.mask_write(control, 0, 0x1F00);
        let task = QueuePush { start_bd: bd.into(), repeat: 1, issue_token: true };
        self.builder.push_shim_task(column, Direction::Mm2s, 0, task).unwrap();
        let (direction, row, row_count, column_count, channel) = (Direction::Mm2s, 0, 1, 1, 0);
        self.builder.wait(TokenWait { direction, row, column, row_count, column_count, channel });
    }

    fn groups(&mut self, argument: u32, placed: &Placed) {
        for tile in placed.tiles.clone().step_by(placed.group) {
            self.transfer(argument, (tile * TILE_BYTES) as u64, (placed.group * TILE_BYTES) as u64);
        }
    }

    fn encode(&self) -> Vec<u8> {
        self.builder.encode().unwrap()
    }
}

/// Stream of the layer kernel, with KV regions for `positions`.
pub(crate) fn layer_stream(dimensions: &Dimensions, positions: u32, context: u32) -> Vec<u8> {
    layer_stream_with(dimensions, positions, context, |_| ())
}

/// The same with what `more` adds.
pub(crate) fn layer_stream_with(
    dimensions: &Dimensions,
    positions: u32,
    context: u32,
    more: impl FnOnce(&mut Code),
) -> Vec<u8> {
    let mut code = Code::new();
    for row in 2..6 {
        for column in [3, 4] {
            code.builder.write(Register::DataMemory(0x400).at(column, row).unwrap(), context);
        }
    }
    let hidden = dimensions.hidden_bytes() as u64;
    let row = dimensions.kv_width() as u64;
    let region = u64::from(positions) * row;
    code.transfer(0, 0, hidden);
    code.transfer(2, 0, 2 * hidden);
    code.transfer(3, 0, 768);
    let layout = LayerLayout::new(dimensions);
    for placed in [&layout.q, &layout.k, &layout.v] {
        code.groups(1, placed);
    }
    for at in [0, 2, 1, 3] {
        code.transfer(4, at * region + u64::from(context - 1) * row, row);
    }
    for at in 0..4 {
        code.transfer(4, at * region, 16 * row * u64::from(context.div_ceil(16)));
    }
    for placed in [&layout.o, &layout.up_gate, &layout.down] {
        code.groups(1, placed);
    }
    code.transfer(0, 0, hidden);
    more(&mut code);
    code.encode()
}

/// Stream of the head's kernel.
pub(crate) fn head_stream(dimensions: &Dimensions) -> Vec<u8> {
    let mut code = Code::new();
    code.transfer(2, 0, dimensions.hidden_bytes() as u64);
    code.transfer(3, 0, dimensions.hidden_bytes() as u64);
    code.transfer(1, 0, BufferSizes::new(dimensions).head);
    code.transfer(0, 0, dimensions.logits_bytes() as u64);
    code.encode()
}

/// Instruction ELF of a stream, with the code twice, as captured files have it.
pub(crate) fn instruction_elf(stream: &[u8]) -> Vec<u8> {
    let relocated = assemble(Stream::parse(stream).unwrap()).unwrap();
    let mut symbols: Vec<ArgumentSymbol> = Vec::new();
    let mut patches = Vec::new();
    for patch in &relocated.patches {
        let name = (patch.argument + PARTIAL_ARGUMENT_BASE).to_string();
        let symbol = ArgumentSymbol { name, size: patch.size };
        let index = symbols.iter().position(|known| *known == symbol).unwrap_or_else(|| {
            symbols.push(symbol);
            symbols.len() - 1
        });
        let schema = patch.schema.number();
        patches.push(PatchEntry { symbol: index, offset: patch.offset, schema, addend: patch.addend });
    }
    let code = [relocated.code.as_slice(), stream].concat();
    let uid = md5(&code);
    PartialElfSpec { code, symbols, patches, uid }.build().unwrap().to_bytes().unwrap()
}

/// All kernel files of a model.
pub(crate) fn kernel_files(dimensions: &Dimensions, positions: u32) -> KernelFiles {
    KernelFiles {
        layer: [1, 2, 17].map(|context| instruction_elf(&layer_stream(dimensions, positions, context))),
        head: instruction_elf(&head_stream(dimensions)),
        pdi: (0..250u32).map(|i| (7 * i + 3) as u8).collect(),
    }
}
