//! Kits of first-generation parts: a xclbin and an instruction stream for each design, and `kit.json`.

use super::{
    Kit, KitError, QWEN_CHUNK, QWEN_ENGINE, SMOLLM_CHUNK, SMOLLM_ENGINE, W8_PROJECTION, await_token, image, linear_task,
};
use crate::array::program::ProgramDescription;
use crate::design::xdna1::chunk::{self, Blocks, Plan};
use crate::design::xdna1::engine::{HUB_CHANNEL, tile_channel};
use crate::design::xdna1::shape::{CACHE_ELEMENTS, LOGITS, QWEN, SMOLLM, Shape, TILES};
use crate::design::xdna1::{checked_layers, projection, qwen_plan, smollm_plan};
use npuhal_amdxdna::format::registers::{Dimension, Direction, QueuePush, ShimBd};
use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2, Header, Version};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// Name of the manifest.
pub const XDNA1_KIT_FILE: &str = "kit.json";
/// Name of the kernel in every xclbin.
const KERNEL: &str = "MLIR_AIE";
const FORMAT: &str = "npuhal-xdna1-kit-v1";
/// Version of streams, headers and arguments.
const LAYOUT_VERSION: u32 = 1;
const COLUMNS: u8 = 4;
/// Words that the innermost two dimensions of a descriptor can count.
const WRAP_MAX: u32 = 1023;
/// Tasks that a channel holds: four in its queue and the one that runs.
const TASKS_MAX: usize = 5;
/// Blocks of a task of the projection.
const PROJECTION_TASK_BLOCKS: usize = 64;
/// Tasks of the projection that are queued before the first is waited for.
const PROJECTION_TASKS_AHEAD: usize = 4;

/// A design for first-generation parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Xdna1Design {
    /// All layers of SmolLM 135M and the final norm.
    SmolLmEngine,
    /// All layers of Qwen2.5 0.5B, final norm and head.
    QwenEngine,
    /// All layers of Qwen2.5 0.5B, for positions whose logits nobody wants.
    QwenEnginePrefill,
    /// A few layers of SmolLM 135M.
    SmolLmChunk,
    /// The same with weights of eight bits.
    SmolLmChunkW8,
    /// A few layers of Qwen2.5 0.5B.
    QwenChunk,
    /// SmolLM's head with weights of eight bits.
    W8Projection,
}

impl Xdna1Design {
    /// All designs.
    pub const ALL: [Self; 7] = [
        Self::SmolLmEngine,
        Self::QwenEngine,
        Self::QwenEnginePrefill,
        Self::SmolLmChunk,
        Self::SmolLmChunkW8,
        Self::QwenChunk,
        Self::W8Projection,
    ];

    /// Name in a kit.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SmolLmEngine => "smollm-engine",
            Self::QwenEngine => "qwen-engine",
            Self::QwenEnginePrefill => "qwen-engine-prefill",
            Self::SmolLmChunk => "smollm-chunk",
            Self::SmolLmChunkW8 => "smollm-chunk-w8",
            Self::QwenChunk => "qwen-chunk",
            Self::W8Projection => "w8-projection",
        }
    }

    /// Whether a run computes a few layers; the others are made for a whole model.
    const fn is_chunk(self) -> bool {
        matches!(self, Self::SmolLmChunk | Self::SmolLmChunkW8 | Self::QwenChunk)
    }

    const fn shape(self) -> Shape {
        match self {
            Self::QwenEngine | Self::QwenEnginePrefill | Self::QwenChunk => QWEN,
            Self::SmolLmEngine | Self::SmolLmChunk | Self::SmolLmChunkW8 | Self::W8Projection => SMOLLM,
        }
    }

    /// Whether the design computes models of these sizes. The vocabulary of SmolLM is the head's alone, which is free.
    #[must_use]
    pub fn fits(self, model: &Xdna1Model) -> bool {
        let shape = self.shape();
        let has_vocab = !shape.has_head() || model.vocab == shape.vocab;
        [model.hidden, model.intermediate, model.heads, model.kv_heads]
            == [shape.hidden, shape.intermediate, shape.heads, shape.kv_heads]
            && has_vocab
    }
}

impl fmt::Display for Xdna1Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Xdna1Design {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|design| design.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("no design '{text}'; there are {names}")
        })
    }
}

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xdna1Model {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Layers.
    pub layers: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
}

/// A buffer argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xdna1Argument {
    /// What is in it.
    pub name: &'static str,
    /// Bytes.
    pub bytes: usize,
}

/// A design for a number of layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xdna1Kernel {
    /// The design.
    pub design: Xdna1Design,
    /// Layers of a run; of the projection, those of its model.
    pub layers: usize,
    /// Image and control code.
    pub kit: Kit,
    /// Buffers, in order.
    pub arguments: Vec<Xdna1Argument>,
}

impl Xdna1Kernel {
    /// The design for `layers` layers of a model.
    ///
    /// # Errors
    /// [`KitError::Shape`] where the design computes other sizes or cannot have the layers.
    pub fn new(design: Xdna1Design, model: &Xdna1Model, layers: usize) -> Result<Self, KitError> {
        let shape = |reason| KitError::Shape { design: design.name(), reason };
        if !design.fits(model) {
            let Shape { hidden, intermediate, heads, kv_heads, vocab, .. } = design.shape();
            return Err(shape(format!(
                "the model has hidden size {}, feed-forward size {}, {} heads, {} KV heads, vocabulary {}; the design \
                 computes {hidden}, {intermediate}, {heads}, {kv_heads}, {vocab}",
                model.hidden, model.intermediate, model.heads, model.kv_heads, model.vocab
            )));
        }
        let (least, most) =
            if design.is_chunk() { (1, model.layers.min(TASKS_MAX)) } else { (model.layers, model.layers) };
        if !(least..=most).contains(&layers) {
            let reason = format!("{layers} layers of a model of {}; wanted {least} to {most}", model.layers);
            return Err(shape(reason));
        }
        let layer_word = u32::try_from(layers).unwrap_or(u32::MAX);
        checked_layers(layer_word).map_err(shape)?;
        let mut code = Code::new();
        let (id, dimensions) = match design {
            Xdna1Design::SmolLmEngine => (SMOLLM_ENGINE, vec![layer_word]),
            Xdna1Design::QwenEngine => (QWEN_ENGINE, vec![layer_word, 1]),
            Xdna1Design::QwenEnginePrefill => (QWEN_ENGINE, vec![layer_word, 0]),
            Xdna1Design::SmolLmChunk => (SMOLLM_CHUNK, vec![layer_word, 0]),
            Xdna1Design::SmolLmChunkW8 => (SMOLLM_CHUNK, vec![layer_word, 1]),
            Xdna1Design::QwenChunk => (QWEN_CHUNK, vec![layer_word]),
            Xdna1Design::W8Projection => (W8_PROJECTION, vec![model.vocab as u32, model.hidden as u32]),
        };
        let arguments = match design {
            Xdna1Design::SmolLmEngine | Xdna1Design::QwenEngine => code.engine(&design.shape(), layers, true)?,
            Xdna1Design::QwenEnginePrefill => code.engine(&design.shape(), layers, false)?,
            Xdna1Design::SmolLmChunk => code.chunk(&SMOLLM, &smollm_plan(false), layers)?,
            Xdna1Design::SmolLmChunkW8 => code.chunk(&SMOLLM, &smollm_plan(true), layers)?,
            Xdna1Design::QwenChunk => code.chunk(&QWEN, &qwen_plan(), layers)?,
            Xdna1Design::W8Projection => {
                code.projection(&projection::blocks(model.vocab, model.hidden).map_err(shape)?)?
            }
        };
        let kit = Kit {
            name: KERNEL.to_owned(),
            columns: COLUMNS,
            image: image(COLUMNS, &ProgramDescription { id, dimensions })?,
            image_id: id as u16,
            code: code.builder.into_stream(),
            buffers: arguments.len() as u32,
        };
        Ok(Self { design, layers, kit, arguments })
    }

    /// Name of its files, without ending.
    #[must_use]
    pub fn stem(&self) -> String {
        match self.design.is_chunk() {
            true => format!("{}-{}", self.design, self.layers),
            false => self.design.to_string(),
        }
    }
}

/// The files of a model's `npu` folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xdna1Kit {
    /// Names and contents, [`XDNA1_KIT_FILE`] last: it names all others.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Xdna1Kit {
    /// All kernels that the routes of a model may want: engines, and chunked graphs of two layers and of one.
    ///
    /// # Errors
    /// [`KitError::Shape`] where no design computes the model.
    pub fn complete(model: &Xdna1Model) -> Result<Self, KitError> {
        let designs: Vec<_> = Xdna1Design::ALL.into_iter().filter(|design| design.fits(model)).collect();
        Self::of(model, &designs)
    }

    /// The kernels of some designs.
    ///
    /// # Errors
    /// [`KitError::Shape`] where a design does not compute the model, or none is named.
    pub fn of(model: &Xdna1Model, designs: &[Xdna1Design]) -> Result<Self, KitError> {
        let mut kernels = Vec::new();
        for design in designs {
            let layers: &[usize] = if design.is_chunk() { &[2, 1] } else { &[model.layers] };
            for layers in layers.iter().filter(|layers| **layers <= model.layers) {
                kernels.push(Xdna1Kernel::new(*design, model, *layers)?);
            }
        }
        Self::with(model, &kernels)
    }

    /// Files and manifest of `kernels`.
    ///
    /// # Errors
    /// [`KitError`]; [`KitError::Shape`] without a kernel.
    pub fn with(model: &Xdna1Model, kernels: &[Xdna1Kernel]) -> Result<Self, KitError> {
        if kernels.is_empty() {
            let reason = format!("no design computes a model of hidden size {}", model.hidden);
            return Err(KitError::Shape { design: "xdna1", reason });
        }
        let mut files = Vec::new();
        let mut entries = Vec::new();
        for kernel in kernels {
            let (xclbin, instructions) = (kernel.kit.xclbin()?, kernel.kit.instructions()?);
            let names = [format!("{}.xclbin", kernel.stem()), format!("{}.insts", kernel.stem())];
            entries.push(entry(model, kernel, &names, [&xclbin, &instructions]));
            let [xclbin_name, instructions_name] = names;
            files.extend([(xclbin_name, xclbin), (instructions_name, instructions)]);
        }
        let manifest = json!({
            "format": FORMAT,
            "origin": "virtual",
            "toolchain": { "npuhal": env!("CARGO_PKG_VERSION") },
            "kernels": entries,
        });
        files.push((XDNA1_KIT_FILE.to_owned(), format!("{manifest:#}\n").into_bytes()));
        Ok(Self { files })
    }
}

fn entry(model: &Xdna1Model, kernel: &Xdna1Kernel, names: &[String; 2], contents: [&[u8]; 2]) -> Value {
    let arguments = kernel.arguments.iter().map(|argument| json!({ "name": argument.name, "bytes": argument.bytes }));
    let digest = |bytes: &[u8]| -> String { Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect() };
    json!({
        "design": kernel.design.name(),
        "layers": kernel.layers,
        "layout_version": LAYOUT_VERSION,
        "shape": {
            "hidden": model.hidden,
            "intermediate": model.intermediate,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "layers": model.layers,
            "vocab": model.vocab,
        },
        "kernel": KERNEL,
        "xclbin": names[0],
        "instructions": names[1],
        "instruction_size_unit": "words",
        "arguments": arguments.collect::<Vec<_>>(),
        "sha256": { "xclbin": digest(contents[0]), "instructions": digest(contents[1]) },
    })
}

/// Control code in the making.
struct Code {
    builder: Builder,
    /// Descriptors taken on each column.
    bds: [u8; COLUMNS as usize],
}

/// Bytes of an argument.
struct Part {
    argument: u32,
    at: usize,
    bytes: usize,
}

impl Code {
    fn new() -> Self {
        Self { builder: Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, COLUMNS)), bds: [0; COLUMNS as usize] }
    }

    fn take_bd(&mut self, column: u8) -> u8 {
        let bd = &mut self.bds[usize::from(column)];
        *bd += 1;
        *bd - 1
    }

    /// Consecutive bytes, in one task.
    fn task(&mut self, direction: Direction, (column, channel): (u8, u8), part: &Part) -> Result<(), KitError> {
        let bd = self.take_bd(column);
        let words = (part.bytes / 4) as u32;
        linear_task(&mut self.builder, column, direction, channel, bd, words, part.argument, part.at as u64)
    }

    fn await_output(&mut self, (column, channel): (u8, u8)) {
        self.builder.wait(await_token(Direction::S2mm, column, channel));
    }

    /// Arguments: weights, cache, new keys and values, result.
    fn engine(&mut self, shape: &Shape, layers: usize, has_tail: bool) -> Result<Vec<Xdna1Argument>, KitError> {
        let [weights, cache, kv_new, result] = [0, 1, 2, 3];
        let kv_bytes = 2 * layers * shape.kv_elements();
        let cache_bytes = 2 * CACHE_ELEMENTS * (1 + layers * shape.kv_heads);
        self.task(Direction::S2mm, HUB_CHANNEL, &Part { argument: kv_new, at: 0, bytes: kv_bytes })?;
        let mut outputs = vec![HUB_CHANNEL];
        let mut at = 0;
        let (name, result_bytes) =
            if shape.has_head() { ("logits", 4 * shape.vocab) } else { ("hidden", 2 * shape.hidden) };
        for tile in 0..TILES {
            let bytes = match (shape.has_head(), has_tail) {
                (true, true) => 4 * shape.head_rows[tile],
                (true, false) if tile == 0 => 4 * LOGITS,
                (false, _) if tile == 0 => result_bytes,
                _ => continue,
            };
            self.task(Direction::S2mm, tile_channel(tile), &Part { argument: result, at, bytes })?;
            outputs.push(tile_channel(tile));
            at += bytes;
        }
        self.task(Direction::Mm2s, HUB_CHANNEL, &Part { argument: cache, at: 0, bytes: cache_bytes })?;
        let mut at = 0;
        for tile in 0..TILES {
            let [layer_bytes, tail_bytes] =
                [layers * shape.layer_blocks(tile), shape.tail_blocks(tile)].map(|blocks| 2 * shape.block * blocks);
            let bytes = layer_bytes + if has_tail { tail_bytes } else { 0 };
            self.task(Direction::Mm2s, tile_channel(tile), &Part { argument: weights, at, bytes })?;
            at += layer_bytes + tail_bytes;
        }
        outputs.into_iter().for_each(|output| self.await_output(output));
        Ok(arguments([("weights", at), ("cache", cache_bytes), ("kv_new", kv_bytes), (name, result_bytes)]))
    }

    /// Arguments: weights, parameters, RoPE, residual stream in and out, cache in and out.
    fn chunk(&mut self, shape: &Shape, plan: &Plan, layers: usize) -> Result<Vec<Xdna1Argument>, KitError> {
        let [weights, parameters, rope, hidden, cache] = [0, 1, 2, 3, 4];
        let parameter_bytes = 2 * plan.parameters * layers;
        let (rope_bytes, hidden_bytes) = (2 * chunk::ROPE_ELEMENTS, 2 * shape.hidden);
        let cache_bytes = 2 * CACHE_ELEMENTS * shape.kv_heads * layers;
        let whole = |argument, bytes| Part { argument, at: 0, bytes };
        self.task(Direction::S2mm, chunk::HIDDEN_OUT, &whole(hidden, hidden_bytes))?;
        self.task(Direction::S2mm, chunk::CACHE_OUT, &whole(cache, cache_bytes))?;
        self.task(Direction::Mm2s, chunk::ROPE, &whole(rope, rope_bytes))?;
        self.task(Direction::Mm2s, chunk::HIDDEN_IN, &whole(hidden, hidden_bytes))?;
        self.task(Direction::Mm2s, chunk::PARAMETERS, &whole(parameters, parameter_bytes))?;
        self.task(Direction::Mm2s, chunk::CACHE_IN, &whole(cache, cache_bytes))?;
        let mut at = 0;
        for (stream, blocks) in plan.streams.iter().enumerate() {
            let bytes = layers * blocks.count * blocks.block_bytes();
            if plan.is_interleaved {
                for layer in 0..layers {
                    self.strided(chunk::weights_channel(stream), weights, at, blocks, layer, layers)?;
                }
            } else {
                let part = Part { argument: weights, at, bytes };
                self.task(Direction::Mm2s, chunk::weights_channel(stream), &part)?;
            }
            at += bytes;
        }
        self.await_output(chunk::CACHE_OUT);
        self.await_output(chunk::HIDDEN_OUT);
        let name = if shape.has_bias { "params" } else { "gammas" };
        Ok(arguments([
            ("weights", at),
            (name, parameter_bytes),
            ("rope", rope_bytes),
            ("hidden", hidden_bytes),
            ("cache", cache_bytes),
        ]))
    }

    /// The blocks of one layer out of those of `layers`.
    fn strided(
        &mut self,
        (column, channel): (u8, u8),
        argument: u32,
        at: usize,
        blocks: &Blocks,
        layer: usize,
        layers: usize,
    ) -> Result<(), KitError> {
        let block_words = (blocks.block_bytes() / 4) as u32;
        // Two dimensions walk one block, the third goes from block to block.
        let inner = (1..=WRAP_MAX).rev().find(|inner| block_words.is_multiple_of(*inner)).unwrap_or(1);
        let descriptor = ShimBd {
            length_words: block_words * blocks.count as u32,
            d0: Dimension { wrap: inner, step: 1 },
            d1: Dimension { wrap: block_words / inner, step: inner },
            d2_step: block_words * layers as u32,
            burst: 2,
            valid: true,
            ..ShimBd::default()
        };
        let bd = self.take_bd(column);
        self.builder.shim_bd(column, bd, &descriptor)?;
        self.builder.patch_shim_bd(column, bd, argument, (at + layer * blocks.block_bytes()) as u64)?;
        let push = QueuePush { start_bd: bd.into(), repeat: 1, issue_token: false };
        self.builder.push_shim_task(column, Direction::Mm2s, channel, push)?;
        Ok(())
    }

    /// Arguments: weights, vector, result. The blocks go in tasks that are waited for in turns.
    fn projection(&mut self, blocks: &Blocks) -> Result<Vec<Xdna1Argument>, KitError> {
        let [weights, vector, result] = [0, 1, 2];
        let (vector_bytes, result_bytes) = (2 * blocks.columns, 2 * blocks.rows * blocks.count);
        let weight_bytes = blocks.block_bytes() * blocks.count;
        self.task(Direction::S2mm, projection::RESULT, &Part { argument: result, at: 0, bytes: result_bytes })?;
        self.task(Direction::Mm2s, projection::VECTOR, &Part { argument: vector, at: 0, bytes: vector_bytes })?;
        let (column, channel) = projection::WEIGHTS;
        let task_bytes = PROJECTION_TASK_BLOCKS * blocks.block_bytes();
        let first_bd = self.bds[usize::from(column)];
        for (task, at) in (0..weight_bytes).step_by(task_bytes).enumerate() {
            if task >= PROJECTION_TASKS_AHEAD {
                self.builder.wait(await_token(Direction::Mm2s, column, channel));
            }
            let length_words = (task_bytes.min(weight_bytes - at) / 4) as u32;
            let bd = first_bd + (task % PROJECTION_TASKS_AHEAD) as u8;
            let descriptor = ShimBd { length_words, burst: 2, valid: true, ..ShimBd::default() };
            self.builder.shim_bd(column, bd, &descriptor)?;
            self.builder.patch_shim_bd(column, bd, weights, at as u64)?;
            let push = QueuePush { start_bd: bd.into(), repeat: 1, issue_token: true };
            self.builder.push_shim_task(column, Direction::Mm2s, channel, push)?;
        }
        self.await_output(projection::RESULT);
        Ok(arguments([("weights", weight_bytes), ("input", vector_bytes), ("output", result_bytes)]))
    }
}

fn arguments<const N: usize>(arguments: [(&'static str, usize); N]) -> Vec<Xdna1Argument> {
    arguments.into_iter().map(|(name, bytes)| Xdna1Argument { name, bytes }).collect()
}
