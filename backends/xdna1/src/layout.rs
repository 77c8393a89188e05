//! Where everything lies: tiles, rows, blocks, cache objects.
//!
//! Both engines use six GEMV tiles, one hub tile and a memory tile that joins the GEMV tiles' slices. Each GEMV tile owns rows of
//! every matrix and reads its own stream of equal blocks.

use crate::error::LaneError;
use npuhal_models::package::{CONTEXT_POSITIONS, Family, HEAD_DIM, Shape};
use std::ops::Range;

/// GEMV tiles of an engine.
pub const GEMV_TILES: usize = 6;
/// Bytes of a bf16 element.
pub const BF16_BYTES: usize = 2;
/// Positions of a sequence.
pub const POSITIONS: usize = CONTEXT_POSITIONS as usize;
/// Elements of a cache object: keys, then values, of [`POSITIONS`] × [`HEAD_DIM`].
pub const CACHE_OBJECT_ELEMENTS: usize = 2 * POSITIONS * HEAD_DIM;
/// Rows of gate and up projections that travel together.
pub const MLP_GROUP_ROWS: usize = 16;
/// Rows of the LM head whose logits leave a tile as one object.
pub const LOGITS_GROUP_ROWS: usize = 64;

/// (column, row) of the GEMV tiles, in the order of their streams; stream `i` enters through the shim of column `i / 2`.
pub const GEMV_PLACES: [(u8, u8); GEMV_TILES] = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3)];
/// (column, row) of the hub, which reads the cache and writes new keys and values through the shim of column 3.
pub const HUB_PLACE: (u8, u8) = (3, 2);
/// (column, row) of the memory tile that joins the slices.
pub const JOIN_PLACE: (u8, u8) = (1, 1);

/// Consecutive rows of a matrix, or positions in a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The first.
    pub start: usize,
    /// How many.
    pub rows: usize,
}

impl Share {
    /// From the first to the end.
    #[must_use]
    pub fn range(self) -> Range<usize> {
        self.start..self.start + self.rows
    }
}

/// Splits `total` rows into groups of `unit` and the groups over the GEMV tiles, the first tiles taking one group more where
/// they do not go evenly. The share of tile `tile`; tiles beyond the last have nothing.
#[must_use]
pub const fn share(total: usize, unit: usize, tile: usize) -> Share {
    let groups = total / unit;
    let (even, extra) = (groups / GEMV_TILES, groups % GEMV_TILES);
    if tile >= GEMV_TILES {
        return Share { start: total, rows: 0 };
    }
    let (before, own) = if tile < extra { (tile, even + 1) } else { (extra, even) };
    Share { start: (tile * even + before) * unit, rows: own * unit }
}

/// The parts of a layer in the order of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Gammas and biases.
    Params,
    /// Query, key and value rows.
    Qkv,
    /// Output projection rows.
    OProj,
    /// Gate and up rows, by groups.
    Mlp,
    /// Down projection rows.
    Down,
}

/// The layout of a single-dispatch engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLayout {
    /// Name of the design.
    pub name: &'static str,
    /// Family of its models.
    pub family: Family,
    /// Shape of its models. Widths are those of the family; layers and vocabulary are not part of the tiles' programs.
    pub shape: Shape,
    /// Elements of a block.
    pub block_elements: usize,
    /// Rows of hidden-size columns in a block.
    pub block_rows: usize,
    /// Elements of the slot each tile has in the joined vector.
    pub slice_elements: usize,
    /// Whether the LM head runs on the NPU.
    pub has_head: bool,
    /// Elements of the header before the embedding; the embedding follows.
    pub embedding_at: usize,
    /// Element of the header that holds the position.
    pub position_at: usize,
}

/// The SmolLM engine: 30 layers and the final norm in one dispatch.
pub const SMOLLM: EngineLayout = EngineLayout {
    name: "smollm_engine",
    family: Family::Llama,
    shape: Family::Llama.shape(),
    block_elements: 4608,
    block_rows: 8,
    slice_elements: 256,
    has_head: false,
    embedding_at: 128,
    position_at: 64,
};

/// The Qwen2.5 0.5B engine: 24 layers, final norm and LM head in one dispatch.
pub const QWEN: EngineLayout = EngineLayout {
    name: "qwen_engine",
    family: Family::Qwen2,
    shape: Family::Qwen2.shape(),
    block_elements: 3584,
    block_rows: 4,
    slice_elements: 896,
    has_head: true,
    embedding_at: 256,
    position_at: 192,
};

/// Rows of the down projection in a block of the SmolLM engine, over the whole intermediate size.
pub const SMOLLM_DOWN_ROWS: usize = 3;
/// Columns of a chunk of the down projection in the Qwen engine, zeros at the end included.
pub const QWEN_DOWN_CHUNK: usize = 896;

impl EngineLayout {
    /// The engine of a family.
    #[must_use]
    pub const fn of(family: Family) -> &'static Self {
        match family {
            Family::Llama => &SMOLLM,
            Family::Qwen2 => &QWEN,
        }
    }

    /// The engine of a family over another number of layers, and another vocabulary: such a kit can be made for the virtual
    /// NPU; the published ones are those of [`EngineLayout::of`].
    ///
    /// # Errors
    /// [`LaneError::WrongModel`] where widths differ from the family's, or the head's rows do not go into whole groups.
    pub fn for_shape(family: Family, shape: Shape) -> Result<Self, LaneError> {
        let layout = Self::of(family);
        check_widths(layout.name, family, family, shape)?;
        if layout.has_head && !shape.vocab_size.is_multiple_of(LOGITS_GROUP_ROWS) {
            let vocab_size = shape.vocab_size.next_multiple_of(LOGITS_GROUP_ROWS);
            let wanted = Shape { vocab_size, ..shape };
            return Err(LaneError::WrongModel {
                design: layout.name,
                family,
                found_family: family,
                wanted,
                found: shape,
            });
        }
        Ok(Self { shape, ..*layout })
    }

    /// Shape of its models.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        self.block_elements * BF16_BYTES
    }

    /// Elements of the joined vector.
    #[must_use]
    pub const fn joined_elements(&self) -> usize {
        GEMV_TILES * self.slice_elements
    }

    /// Rows of the stacked query, key and value projections of `tile`.
    #[must_use]
    pub fn qkv_share(&self, tile: usize) -> Share {
        // 960 and 1152 rows, 160 and 192 a tile.
        share(self.shape().qkv_rows(), self.block_rows, tile)
    }

    /// Rows of the output and down projections of `tile`.
    #[must_use]
    pub fn out_share(&self, tile: usize) -> Share {
        share(self.shape().hidden_size, self.block_rows, tile)
    }

    /// Rows of the gate and of the up projection of `tile`.
    #[must_use]
    pub fn mlp_share(&self, tile: usize) -> Share {
        share(self.shape().intermediate_size, MLP_GROUP_ROWS, tile)
    }

    /// Rows of the LM head of `tile`.
    #[must_use]
    pub fn head_share(&self, tile: usize) -> Share {
        share(self.shape().vocab_size, LOGITS_GROUP_ROWS, tile)
    }

    /// Element of the joined vector that row `row` of the stacked query, key and value projections lands on.
    #[must_use]
    pub fn qkv_slot(&self, row: usize) -> usize {
        let rows = self.qkv_share(0).rows;
        row / rows * self.slice_elements + row % rows
    }

    /// Blocks of `part` in a layer of `tile`'s stream.
    #[must_use]
    pub fn part_blocks(&self, part: Part, tile: usize) -> usize {
        let (rows, out) = (self.block_rows, self.out_share(tile).rows);
        match part {
            Part::Params => 1,
            Part::Qkv => self.qkv_share(tile).rows / rows,
            Part::OProj => out / rows,
            Part::Mlp => 2 * self.mlp_share(tile).rows / rows,
            Part::Down => match self.family {
                Family::Llama => out / SMOLLM_DOWN_ROWS,
                Family::Qwen2 => out / rows * GEMV_TILES,
            },
        }
    }

    /// Blocks of a layer in `tile`'s stream.
    #[must_use]
    pub fn layer_blocks(&self, tile: usize) -> usize {
        [Part::Params, Part::Qkv, Part::OProj, Part::Mlp, Part::Down]
            .into_iter()
            .map(|part| self.part_blocks(part, tile))
            .sum()
    }

    /// Blocks after the last layer in `tile`'s stream: the final norm's, and the LM head's rows where the engine has it.
    #[must_use]
    pub fn tail_blocks(&self, tile: usize) -> usize {
        1 + if self.has_head { self.head_share(tile).rows / self.block_rows } else { 0 }
    }

    /// Blocks of `tile`'s stream over `layers` layers.
    #[must_use]
    pub fn tile_blocks(&self, layers: usize, tile: usize) -> usize {
        layers * self.layer_blocks(tile) + self.tail_blocks(tile)
    }

    /// Bytes of the layers in all streams, without what follows the last layer.
    #[must_use]
    pub fn layers_bytes(&self, layers: usize) -> usize {
        (0..GEMV_TILES).map(|tile| layers * self.layer_blocks(tile) * self.block_bytes()).sum()
    }

    /// Bytes of `tile`'s stream over `layers` layers.
    #[must_use]
    pub fn tile_bytes(&self, layers: usize, tile: usize) -> usize {
        self.tile_blocks(layers, tile) * self.block_bytes()
    }

    /// Where `tile`'s stream starts in the weight buffer, in bytes. A dispatch without the head reads a prefix of each.
    #[must_use]
    pub fn tile_offset_bytes(&self, layers: usize, tile: usize) -> usize {
        (0..tile).map(|tile| self.tile_bytes(layers, tile)).sum()
    }

    /// Bytes of the weight buffer: six streams one after the other.
    #[must_use]
    pub fn weight_bytes(&self, layers: usize) -> usize {
        self.tile_offset_bytes(layers, GEMV_TILES)
    }

    /// Elements of the cache buffer: the header object, then one for each layer and KV head.
    #[must_use]
    pub fn cache_elements(&self, layers: usize) -> usize {
        (1 + self.shape().kv_heads * layers) * CACHE_OBJECT_ELEMENTS
    }

    /// Bytes of the cache buffer.
    #[must_use]
    pub fn cache_bytes(&self, layers: usize) -> usize {
        self.cache_elements(layers) * BF16_BYTES
    }

    /// Elements of the new keys and values of a token: for each layer and KV head a key, then a value.
    #[must_use]
    pub fn kv_new_elements(&self, layers: usize) -> usize {
        layers * self.shape().kv_heads * 2 * HEAD_DIM
    }

    /// Bytes of the new keys and values of a token.
    #[must_use]
    pub fn kv_new_bytes(&self, layers: usize) -> usize {
        self.kv_new_elements(layers) * BF16_BYTES
    }

    /// Bytes of the result: the normed hidden vector as bf16, or the logits as f32.
    #[must_use]
    pub fn result_bytes(&self) -> usize {
        if self.has_head { self.shape().vocab_size * 4 } else { self.shape().hidden_size * BF16_BYTES }
    }

    /// Lengths of the data buffers in the order of the dispatch's arguments: weights, cache, new keys and values, result.
    #[must_use]
    pub fn argument_bytes(&self, layers: usize) -> [usize; 4] {
        [self.weight_bytes(layers), self.cache_bytes(layers), self.kv_new_bytes(layers), self.result_bytes()]
    }
}

/// Checks that a model of `found_family` and shape `found` has the widths of `family`'s designs, of which `design` is one.
///
/// # Errors
/// [`LaneError::WrongModel`].
pub fn check_widths(design: &'static str, family: Family, found_family: Family, found: Shape) -> Result<(), LaneError> {
    let wanted = Shape { layers: found.layers, vocab_size: found.vocab_size, ..family.shape() };
    if family == found_family && found == wanted {
        return Ok(());
    }
    Err(LaneError::WrongModel { design, family, found_family, wanted, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden() -> serde_json::Value {
        serde_json::from_str(include_str!("../tests/data/engine_layout_sizes.json")).unwrap()
    }

    fn shares(share: impl Fn(usize) -> Share) -> (Vec<usize>, Vec<usize>) {
        (0..GEMV_TILES).map(|tile| (share(tile).start, share(tile).rows)).unzip()
    }

    #[test]
    fn the_engines_have_the_published_sizes() {
        for (layout, key, layers) in [(&SMOLLM, "smollm_30_layers", 30), (&QWEN, "qwen_24_layers", 24)] {
            let wanted = &golden()[key];
            let number = |name: &str| wanted[name].as_u64().unwrap() as usize;
            let offsets: Vec<usize> = (0..6).map(|tile| layout.tile_offset_bytes(layers, tile)).collect();
            assert_eq!(serde_json::json!(offsets), wanted["tile_offsets_bytes"]);
            assert_eq!(layout.block_elements, number("block_elements"));
            assert_eq!(layout.weight_bytes(layers), number("weight_bytes"));
            assert_eq!(layout.cache_elements(layers), number("cache_elements"));
            assert_eq!(layout.cache_bytes(layers), number("cache_bytes"));
            assert_eq!(layout.kv_new_elements(layers), number("kv_new_elements"));
            assert_eq!(layout.kv_new_bytes(layers), number("kv_new_bytes"));
            assert_eq!(layout.argument_bytes(layers)[0], layout.weight_bytes(layers));
            let result = if layout.has_head { "logits_bytes" } else { "hidden_bytes" };
            assert_eq!(layout.result_bytes(), number(result));
        }
        let wanted = &golden()["smollm_30_layers"];
        assert_eq!(serde_json::json!(SMOLLM.layer_blocks(5)), wanted["blocks_per_layer"]);
        assert_eq!(serde_json::json!(SMOLLM.tile_blocks(30, 5)), wanted["blocks_per_tile"]);
        assert_eq!(serde_json::json!(SMOLLM.tile_bytes(30, 5)), wanted["bytes_per_tile"]);
    }

    #[test]
    fn qwen_rows_are_shared_as_published() {
        let wanted = &golden()["qwen_24_layers"];
        let list = |blocks: &dyn Fn(usize) -> usize| serde_json::json!((0..6).map(blocks).collect::<Vec<_>>());
        assert_eq!(list(&|tile| QWEN.layer_blocks(tile)), wanted["blocks_per_layer"]);
        assert_eq!(list(&|tile| QWEN.tail_blocks(tile)), wanted["head_blocks"]);
        assert_eq!(list(&|tile| QWEN.tile_blocks(24, tile)), wanted["blocks_per_tile"]);
        let check = |(starts, rows), name: &str| {
            assert_eq!(
                serde_json::json!((starts, rows)),
                serde_json::json!((&wanted[format!("{name}_start")], &wanted[format!("{name}_rows")],))
            );
        };
        check(shares(|tile| QWEN.head_share(tile)), "lm");
        check(shares(|tile| QWEN.out_share(tile)), "out");
        check(shares(|tile| QWEN.mlp_share(tile)), "mlp");
        let bytes = |part: &dyn Fn(usize) -> usize| (0..6).map(part).sum::<usize>() * QWEN.block_bytes();
        assert_eq!(
            bytes(&|tile| 24 * QWEN.layer_blocks(tile)),
            wanted["layer_weight_bytes"].as_u64().unwrap() as usize
        );
        assert_eq!(bytes(&|tile| QWEN.tail_blocks(tile)), wanted["head_weight_bytes"].as_u64().unwrap() as usize);
    }

    #[test]
    fn rows_go_evenly_over_the_smollm_tiles() {
        for tile in 0..GEMV_TILES {
            assert_eq!(SMOLLM.qkv_share(tile), Share { start: 160 * tile, rows: 160 });
            assert_eq!(SMOLLM.out_share(tile), Share { start: 96 * tile, rows: 96 });
            assert_eq!(SMOLLM.mlp_share(tile), Share { start: 256 * tile, rows: 256 });
            assert_eq!(QWEN.qkv_share(tile), Share { start: 192 * tile, rows: 192 });
        }
        assert_eq!((SMOLLM.qkv_slot(161), QWEN.qkv_slot(193)), (257, 897));
        assert_eq!((SMOLLM.joined_elements(), QWEN.joined_elements()), (1536, 5376));
        assert_eq!(share(960, 8, 6), Share { start: 960, rows: 0 });
    }
}
