//! Designs of first-generation parts (AIE2, four columns): engines, chunked graphs, the projection with eight-bit weights.
//!
//! An independent reading of the published layouts and arithmetic: block order, FIFO sizes and depths, rounding points.
//! Everything about a token (position, RoPE, embedding, weights, cache) is learned from the streams; the number of layers
//! and the presence of the head are compiled in, as dimensions of the program's description.
//!
//! | Program | Dimensions |
//! |---|---|
//! | [`crate::kit::SMOLLM_ENGINE`] | layers |
//! | [`crate::kit::QWEN_ENGINE`] | layers, 1 with the head or 0 |
//! | [`crate::kit::SMOLLM_CHUNK`] | layers, 0 for bf16 or 1 for eight-bit weights |
//! | [`crate::kit::QWEN_CHUNK`] | layers |
//! | [`crate::kit::W8_PROJECTION`] | rows, columns |
//!
//! # Choices where nothing is published
//! * **Rounding mode**: convergent even (mode 12 of the core) in every f32 to bf16 conversion, `vector::narrow`. It is the
//!   only mode that the designs use, and agrees with all conversions observed on silicon in this mode, NaN included.
//! * **Reduction** of lanes: upper half onto lower half, `vector::reduce`.
//! * **Fixed point** of the exponential and the tangent: towards minus infinity, as the core's instruction was seen to do at
//!   denormals; an index that leaves the table's range wraps, `lookup`.
//! * **Sum of softmax weights**: 16 lanes in order of positions, then the reduction.
//! * **Exponential and reciprocal of the Qwen engine**: Newton and Horner steps with the emulated products, `float`.
//! * **RoPE of the Qwen engine**: the first product's parts, then the second's, in one accumulator.
//! * **Chunked graphs**: scalar attention in order, `chunk::attention`; everything else is the family's engine arithmetic.
//! * Buffers that nothing was written to hold NaN, `fifo`.

pub(crate) mod chunk;
pub(crate) mod engine;
mod fifo;
mod float;
mod lookup;
pub(crate) mod projection;
mod qwen;
pub(crate) mod shape;
mod smollm;
mod tables;
mod vector;

use crate::array::program::{CoreProgram, CoreProgramTable};
use crate::kit::{QWEN_CHUNK, QWEN_ENGINE, SMOLLM_CHUNK, SMOLLM_ENGINE, W8_PROJECTION};
use chunk::{Chunk, Plan};
use engine::Engine;
use projection::Projection;
use qwen::Qwen;
use smollm::SmolLm;

/// Most layers of a design: the cache of more would not be addressable by one descriptor's offsets anywhere near.
pub(crate) const LAYERS_MAX: u32 = 256;

/// Weights, norms and cache of the chunked graph of SmolLM.
pub(crate) fn smollm_plan(is_w8: bool) -> Plan {
    if is_w8 { Plan::smollm_w8::<SmolLm>() } else { Plan::smollm::<SmolLm>() }
}

/// The same for Qwen.
pub(crate) fn qwen_plan() -> Plan {
    Plan::qwen::<Qwen>()
}

type Made = Result<Box<dyn CoreProgram>, String>;

/// Adds the programs to a table.
pub(crate) fn register(table: &mut CoreProgramTable) {
    // The ids are this crate's own.
    let _ = table.register(SMOLLM_ENGINE, "smollm-engine", |words| -> Made {
        let [layers] = fixed(words)?;
        Ok(Box::new(Engine::<SmolLm>::new(checked_layers(layers)?, false)))
    });
    let _ = table.register(QWEN_ENGINE, "qwen-engine", |words| -> Made {
        let [layers, head] = fixed(words)?;
        Ok(Box::new(Engine::<Qwen>::new(checked_layers(layers)?, flag("head", head)?)))
    });
    let _ = table.register(SMOLLM_CHUNK, "smollm-chunk", |words| -> Made {
        let [layers, w8] = fixed(words)?;
        let plan = smollm_plan(flag("eight-bit weights", w8)?);
        Ok(Box::new(Chunk::<SmolLm>::new(plan, checked_layers(layers)?)))
    });
    let _ = table.register(QWEN_CHUNK, "qwen-chunk", |words| -> Made {
        let [layers] = fixed(words)?;
        Ok(Box::new(Chunk::<Qwen>::new(qwen_plan(), checked_layers(layers)?)))
    });
    let _ = table.register(W8_PROJECTION, "w8-projection", |words| -> Made {
        let [rows, columns] = fixed(words)?;
        Ok(Box::new(Projection::new(projection::blocks(rows as usize, columns as usize)?)))
    });
}

fn fixed<const N: usize>(words: &[u32]) -> Result<[u32; N], String> {
    words.try_into().map_err(|_| format!("{} dimensions; wanted {N}", words.len()))
}

fn flag(what: &str, word: u32) -> Result<bool, String> {
    match word {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(format!("{what}: {word}; wanted 0 or 1")),
    }
}

/// The number of layers, where a design can have it.
pub(crate) fn checked_layers(layers: u32) -> Result<usize, String> {
    match layers {
        1..=LAYERS_MAX => Ok(layers as usize),
        _ => Err(format!("{layers} layers; wanted 1 to {LAYERS_MAX}")),
    }
}
