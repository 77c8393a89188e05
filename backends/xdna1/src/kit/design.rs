//! The designs a kit may hold, and the buffers each takes.

use crate::chunk::{ChunkFormat, QWEN_PARAM_ELEMENTS, SMOLLM_GAMMA_ELEMENTS, projection_bytes};
use crate::error::LaneError;
use crate::header::ROPE_ROW_ELEMENTS;
use crate::layout::{BF16_BYTES, CACHE_OBJECT_ELEMENTS, EngineLayout, LOGITS_GROUP_ROWS, check_widths};
use npuhal_models::package::{Family, Shape};
use std::fmt;
use std::str::FromStr;

/// A compiled program of the lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Design {
    /// All layers of a SmolLM model and the final norm in one dispatch.
    SmolLmEngine,
    /// All layers of Qwen2.5 0.5B, the final norm and the head in one dispatch.
    QwenEngine,
    /// The same without norm and head, for prompt positions whose logits nobody wants.
    QwenEnginePrefill,
    /// A few layers of a SmolLM model, bf16 weights.
    SmolLmChunk,
    /// A few layers of a SmolLM model, int8 weights.
    SmolLmChunkW8,
    /// A few layers of Qwen2.5 0.5B.
    QwenChunk,
    /// A matrix of int8 weights times a vector: the LM head of a SmolLM model.
    W8Projection,
}

/// A buffer argument of a design.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DesignArgument {
    /// What is in it.
    pub name: &'static str,
    /// Its length.
    pub bytes: u64,
    /// A shorter length that serves as well: what the program really moves.
    pub least_bytes: u64,
    /// What the tasks of a dispatch move of it, at least.
    pub moved_bytes: u64,
}

impl Design {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::SmolLmEngine,
        Self::QwenEngine,
        Self::QwenEnginePrefill,
        Self::SmolLmChunk,
        Self::SmolLmChunkW8,
        Self::QwenChunk,
        Self::W8Projection,
    ];
    /// All names, for messages.
    pub const ALLOWED: &'static str =
        "smollm-engine, qwen-engine, qwen-engine-prefill, smollm-chunk, smollm-chunk-w8, qwen-chunk, w8-projection";

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

    /// Family of its models.
    #[must_use]
    pub const fn family(self) -> Family {
        match self {
            Self::SmolLmEngine | Self::SmolLmChunk | Self::SmolLmChunkW8 | Self::W8Projection => Family::Llama,
            Self::QwenEngine | Self::QwenEnginePrefill | Self::QwenChunk => Family::Qwen2,
        }
    }

    /// The engine of a family.
    #[must_use]
    pub const fn engine(family: Family) -> Self {
        match family {
            Family::Llama => Self::SmolLmEngine,
            Family::Qwen2 => Self::QwenEngine,
        }
    }

    /// The design of a chunked graph.
    #[must_use]
    pub const fn of_chunk(format: ChunkFormat) -> Self {
        match format {
            ChunkFormat::SmolLmBf16 => Self::SmolLmChunk,
            ChunkFormat::SmolLmW8 => Self::SmolLmChunkW8,
            ChunkFormat::QwenBf16 => Self::QwenChunk,
        }
    }

    /// How the design reads its weights, where it is a chunked graph.
    #[must_use]
    pub const fn chunk_format(self) -> Option<ChunkFormat> {
        match self {
            Self::SmolLmChunk => Some(ChunkFormat::SmolLmBf16),
            Self::SmolLmChunkW8 => Some(ChunkFormat::SmolLmW8),
            Self::QwenChunk => Some(ChunkFormat::QwenBf16),
            _ => None,
        }
    }

    /// Whether it runs all layers of a model.
    #[must_use]
    pub const fn is_engine(self) -> bool {
        matches!(self, Self::SmolLmEngine | Self::QwenEngine | Self::QwenEnginePrefill)
    }

    /// Streams that leave the array and whose end the control code has to wait for, at least: an engine without the head
    /// still gives an end signal, without which the next dispatch overlaps its last rounds.
    #[must_use]
    pub const fn outputs(self) -> usize {
        match self {
            Self::W8Projection => 1,
            _ => 2,
        }
    }

    /// The buffers in the order of the arguments, for `layers` layers of a model of `shape`.
    ///
    /// # Errors
    /// [`LaneError::WrongModel`] where the design computes other widths.
    pub fn arguments(self, shape: Shape, layers: usize) -> Result<Vec<DesignArgument>, LaneError> {
        check_widths(self.name(), self.family(), self.family(), shape)?;
        let exact = |name, bytes: usize| {
            let bytes = bytes as u64;
            DesignArgument { name, bytes, least_bytes: bytes, moved_bytes: bytes }
        };
        if self.is_engine() {
            let layout = EngineLayout::for_shape(self.family(), shape)?;
            let [weights, cache, kv_new, result] = layout.argument_bytes(layers);
            let mut weights = exact("weights", weights);
            let mut result = exact(if layout.has_head { "logits" } else { "hidden" }, result);
            if self == Self::QwenEnginePrefill {
                // The layers of each stream enter the array, and only the end signal leaves it: one object of logits.
                weights.moved_bytes = layout.layers_bytes(layers) as u64;
                result.least_bytes = 4 * LOGITS_GROUP_ROWS as u64;
                result.moved_bytes = result.least_bytes;
            }
            return Ok(vec![weights, exact("cache", cache), exact("kv_new", kv_new), result]);
        }
        let hidden = shape.hidden_size * BF16_BYTES;
        let Some(format) = self.chunk_format() else {
            // The order is inferred: the projection's own host is not published.
            return Ok(vec![
                exact("weights", projection_bytes(shape.vocab_size, shape.hidden_size)),
                exact("input", hidden),
                exact("output", shape.vocab_size * BF16_BYTES),
            ]);
        };
        let (params, elements) = match format {
            ChunkFormat::QwenBf16 => ("params", QWEN_PARAM_ELEMENTS),
            _ => ("gammas", SMOLLM_GAMMA_ELEMENTS),
        };
        Ok(vec![
            exact("weights", layers * format.layer_bytes()),
            exact(params, layers * elements * BF16_BYTES),
            exact("rope", ROPE_ROW_ELEMENTS * BF16_BYTES),
            exact("hidden", hidden),
            // A graph may move the part of the cache that is in use.
            DesignArgument { moved_bytes: 4, ..exact("cache", chunk_cache_bytes(shape, layers)) },
        ])
    }
}

/// Bytes of the cache of a chunk of `layers` layers: an object for each layer and KV head, without a header.
#[must_use]
pub const fn chunk_cache_bytes(shape: Shape, layers: usize) -> usize {
    layers * shape.kv_heads * CACHE_OBJECT_ELEMENTS * BF16_BYTES
}

impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Design {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|design| design.name() == text);
        found.ok_or_else(|| format!("unknown design '{text}'; known designs: {}", Self::ALLOWED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(design: Design, layers: usize) -> Vec<u64> {
        let arguments = design.arguments(design.family().shape(), layers).unwrap();
        arguments.iter().map(|argument| argument.bytes).collect()
    }

    #[test]
    fn arguments_have_the_published_sizes() {
        assert_eq!(bytes(Design::SmolLmEngine, 30), [214_050_816, 1_490_944, 23_040, 1152]);
        assert_eq!(bytes(Design::QwenEngine, 24), [1_011_017_728, 802_816, 12_288, 607_744]);
        assert_eq!(bytes(Design::QwenEnginePrefill, 24), bytes(Design::QwenEngine, 24));
        let smollm = [4 * 3_538_944, 2 * 1152 * 2, 132, 1152, 2 * 3 * 16_384];
        assert_eq!(bytes(Design::SmolLmChunk, 2), smollm);
        assert_eq!(bytes(Design::SmolLmChunkW8, 2)[0], 2 * 3_559_680);
        assert_eq!(bytes(Design::QwenChunk, 1)[1..], [8192, 132, 1792, 2 * 16_384]);
        assert_eq!(bytes(Design::W8Projection, 30), [49_152 * 580, 1152, 98_304]);
        let least = Design::QwenEnginePrefill.arguments(Family::Qwen2.shape(), 24).unwrap()[3].least_bytes;
        assert_eq!(least, 256, "the end signal");
        let moved = Design::QwenEnginePrefill.arguments(Family::Qwen2.shape(), 24).unwrap()[0].moved_bytes;
        assert_eq!(moved, 738_705_408, "the layers without the head");
    }

    #[test]
    fn names_lead_back_to_their_designs() {
        for design in Design::ALL {
            assert_eq!(design.name().parse::<Design>(), Ok(design));
        }
        assert_eq!(Design::ALL.map(Design::name).join(", "), Design::ALLOWED);
        assert!("decoder".parse::<Design>().unwrap_err().contains("smollm-engine"));
    }

    #[test]
    fn other_widths_have_no_arguments() {
        let shape = Shape { hidden_size: 640, ..Family::Llama.shape() };
        assert!(Design::SmolLmEngine.arguments(shape, 2).is_err());
        let odd = Shape { vocab_size: 100, ..Family::Qwen2.shape() };
        assert!(Design::QwenEngine.arguments(odd, 2).is_err(), "the head goes in groups of 64 rows");
    }
}
