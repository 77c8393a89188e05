//! Weights of a layer and of the head.

use super::order::{reorder, reorder_on};
use super::{PackError, TILE_BYTES, TileSource, group_of, tiles_of};
use crate::dimensions::Dimensions;
use std::ops::Range;

/// Output features in a chunk of the up (or gate) projection: chunks of the two take turns.
pub const CHUNK_ROWS: usize = 512;

/// Projections of a layer.
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "the projections by their names")]
pub struct LayerWeights<'a> {
    pub q: &'a dyn TileSource,
    pub k: &'a dyn TileSource,
    pub v: &'a dyn TileSource,
    pub o: &'a dyn TileSource,
    pub gate: &'a dyn TileSource,
    pub up: &'a dyn TileSource,
    pub down: &'a dyn TileSource,
}

/// Where a projection is in the packed weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Its tiles, counted from the start of the buffer.
    pub tiles: Range<usize>,
    /// Tiles of a group.
    pub group: usize,
}

impl Placed {
    /// Its bytes in the buffer.
    #[must_use]
    pub fn bytes(&self) -> Range<u64> {
        (self.tiles.start * TILE_BYTES) as u64..(self.tiles.end * TILE_BYTES) as u64
    }

    /// Bytes of a group.
    #[must_use]
    pub fn group_bytes(&self) -> u64 {
        (self.group * TILE_BYTES) as u64
    }
}

/// Packed weights of a layer: query, key, value, output, up and gate in turns, down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerLayout {
    /// Query projection.
    pub q: Placed,
    /// Key projection.
    pub k: Placed,
    /// Value projection.
    pub v: Placed,
    /// Output projection.
    pub o: Placed,
    /// Up and gate projection: a chunk of up, a chunk of gate, and so on.
    pub up_gate: Placed,
    /// Tiles of a chunk of up (or gate).
    pub chunk: usize,
    /// Down projection.
    pub down: Placed,
}

impl LayerLayout {
    /// Layout for a model.
    #[must_use]
    pub fn new(dimensions: &Dimensions) -> Self {
        let (hidden, q, kv, wide) =
            (dimensions.hidden, dimensions.q_width(), dimensions.kv_width(), dimensions.intermediate);
        let mut end = 0;
        let mut place = |rows: usize, columns: usize| {
            let tiles = end..end + tiles_of(rows, columns);
            end = tiles.end;
            Placed { tiles, group: group_of(columns) }
        };
        Self {
            q: place(q, hidden),
            k: place(kv, hidden),
            v: place(kv, hidden),
            o: place(hidden, q),
            up_gate: place(2 * wide, hidden),
            chunk: tiles_of(CHUNK_ROWS, hidden),
            down: place(hidden, wide),
        }
    }

    /// The projections in the order of the buffer; up and gate as one.
    #[must_use]
    pub fn placed(&self) -> [(&'static str, &Placed); 6] {
        [
            ("query", &self.q),
            ("key", &self.k),
            ("value", &self.v),
            ("output", &self.o),
            ("up and gate", &self.up_gate),
            ("down", &self.down),
        ]
    }

    /// Tiles of a layer.
    #[must_use]
    pub fn tiles(&self) -> usize {
        self.down.tiles.end
    }

    /// Bytes of a layer.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.tiles() * TILE_BYTES
    }
}

/// Packs the weights of a layer into all of `into`.
///
/// # Errors
/// A tensor of another shape or past the end of its file; a destination of another size. Sizes are checked before anything is
/// written.
pub fn pack_layer(layout: &LayerLayout, weights: &LayerWeights<'_>, into: &mut [u8]) -> Result<(), PackError> {
    let plain = [
        (weights.q, &layout.q),
        (weights.k, &layout.k),
        (weights.v, &layout.v),
        (weights.o, &layout.o),
        (weights.down, &layout.down),
    ];
    for (source, placed) in plain {
        check(source, placed.tiles.len())?;
    }
    check(weights.gate, layout.up_gate.tiles.len() / 2)?;
    check(weights.up, layout.up_gate.tiles.len() / 2)?;
    check_destination("layer weights", layout.len_bytes(), into)?;
    for (source, placed) in plain {
        reorder(source, 0, placed.group, bytes_of(into, &placed.tiles))?;
    }
    let Placed { tiles, group } = &layout.up_gate;
    // A layer has at least one row of tiles, so a chunk is never empty.
    let chunk_bytes = layout.chunk.max(1) * TILE_BYTES;
    for (i, chunk) in bytes_of(into, tiles).chunks_mut(chunk_bytes).enumerate() {
        let source = if i % 2 == 0 { weights.up } else { weights.gate };
        reorder(source, i / 2 * layout.chunk, *group, chunk)?;
    }
    Ok(())
}

/// Packs the head into all of `into`, on up to `threads` threads.
///
/// # Errors
/// As [`pack_layer`].
pub fn pack_head(
    dimensions: &Dimensions,
    head: &dyn TileSource,
    into: &mut [u8],
    threads: usize,
) -> Result<(), PackError> {
    let tiles = tiles_of(dimensions.vocab, dimensions.hidden);
    check(head, tiles)?;
    check_destination("head weights", tiles * TILE_BYTES, into)?;
    reorder_on(threads, head, group_of(dimensions.hidden), into)
}

fn check(source: &dyn TileSource, wanted: usize) -> Result<(), PackError> {
    let (found, available) = (source.count(), source.available());
    if found != wanted {
        return Err(PackError::TileCount { what: source.name().to_owned(), wanted, found });
    }
    // Whole groups: no tile beyond the tensor's own is read.
    if wanted > available {
        return Err(PackError::PastEnd { what: source.name().to_owned(), wanted, available });
    }
    Ok(())
}

pub(super) fn check_destination(what: &'static str, wanted_bytes: usize, into: &[u8]) -> Result<(), PackError> {
    match into.len() == wanted_bytes {
        true => Ok(()),
        false => Err(PackError::Destination { what, wanted_bytes, found_bytes: into.len() }),
    }
}

fn bytes_of<'a>(into: &'a mut [u8], tiles: &Range<usize>) -> &'a mut [u8] {
    &mut into[tiles.start * TILE_BYTES..tiles.end * TILE_BYTES]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dimensions::tests::qwen3_0_6b;

    fn qwen3() -> Dimensions {
        Dimensions::of(&qwen3_0_6b()).unwrap()
    }

    /// Tiles that hold their index and the number of their tensor.
    struct Numbered(u8, usize);

    impl TileSource for Numbered {
        fn name(&self) -> &str {
            "numbered"
        }

        fn count(&self) -> usize {
            self.1
        }

        fn available(&self) -> usize {
            self.1
        }

        fn read(&self, index: usize, into: &mut [u8; TILE_BYTES]) -> Result<(), PackError> {
            assert!(index < self.1);
            into.fill(self.0);
            into[..4].copy_from_slice(&(index as u32).to_le_bytes());
            Ok(())
        }
    }

    fn read(packed: &[u8], tile: usize) -> (u8, u32) {
        let tile = &packed[tile * TILE_BYTES..(tile + 1) * TILE_BYTES];
        (tile[TILE_BYTES - 1], u32::from_le_bytes(tile[..4].try_into().unwrap()))
    }

    #[test]
    fn offsets_are_the_published_ones() {
        let layout = LayerLayout::new(&qwen3());
        let at = |placed: &Placed| (placed.tiles.start * TILE_BYTES, placed.tiles.len(), placed.group);
        assert_eq!(at(&layout.q), (0, 256, 8));
        assert_eq!(at(&layout.k), (0x14_0000, 128, 8));
        assert_eq!(at(&layout.v), (0x1E_0000, 128, 8));
        assert_eq!(at(&layout.o), (0x28_0000, 256, 16));
        assert_eq!(at(&layout.up_gate), (0x3C_0000, 768, 8));
        assert_eq!(at(&layout.down), (0x78_0000, 384, 24));
        assert_eq!((layout.tiles(), layout.len_bytes(), layout.chunk), (1920, 9_830_400, 64));
    }

    #[test]
    fn a_layer_is_packed_in_the_order_of_the_kernels_reads() {
        let layout = LayerLayout::new(&qwen3());
        let [q, k, v, o] = [Numbered(1, 256), Numbered(2, 128), Numbered(3, 128), Numbered(4, 256)];
        let [gate, up, down] = [Numbered(5, 384), Numbered(6, 384), Numbered(7, 384)];
        let weights = LayerWeights { q: &q, k: &k, v: &v, o: &o, gate: &gate, up: &up, down: &down };
        let mut packed = vec![0xEE; layout.len_bytes()];
        pack_layer(&layout, &weights, &mut packed).unwrap();
        for (tile, wanted) in [
            (0, (1, 0)),
            (1, (1, 4)),
            (7, (1, 7)),
            (255, (1, 255)),
            (256, (2, 0)),
            (384 + 3, (3, 5)),
            // Output: groups of 16, halves of 8.
            (512 + 1, (4, 8)),
            (512 + 17, (4, 24)),
            // Up first, then gate, in chunks of 64.
            (768, (6, 0)),
            (768 + 1, (6, 4)),
            (768 + 63, (6, 63)),
            (768 + 64, (5, 0)),
            (768 + 65, (5, 4)),
            (768 + 128, (6, 64)),
            (768 + 192 + 9, (5, 64 + 12)),
            (1535, (5, 383)),
            // Down: groups of 24, halves of 12.
            (1536 + 1, (7, 12)),
            (1919, (7, 383)),
        ] {
            assert_eq!(read(&packed, tile), wanted, "tile {tile}");
        }
    }

    #[test]
    fn the_head_has_the_published_size() {
        let dimensions = qwen3();
        let head = Numbered(9, 18_992);
        let mut packed = vec![0; 97_239_040];
        pack_head(&dimensions, &head, &mut packed, 1).unwrap();
        assert_eq!((read(&packed, 1), read(&packed, 18_991)), ((9, 4), (9, 18_991)));
        for threads in [0, 3, 5000] {
            let mut again = vec![0; packed.len()];
            pack_head(&dimensions, &head, &mut again, threads).unwrap();
            assert!(again == packed, "{threads} threads");
        }
    }

    #[test]
    fn other_shapes_and_short_files_are_refused_before_anything_is_written() {
        let layout = LayerLayout::new(&qwen3());
        let whole = Numbered(1, 256);
        let (kv, wide) = (Numbered(2, 128), Numbered(3, 384));
        let bytes = vec![0; 383 * TILE_BYTES];
        let short = super::super::SliceTiles { name: "mlp.up_proj", count: 384, available: &bytes };
        let weights = LayerWeights { q: &whole, k: &kv, v: &kv, o: &whole, gate: &wide, up: &short, down: &wide };
        let mut packed = vec![0xEE; layout.len_bytes()];
        let error = pack_layer(&layout, &weights, &mut packed).unwrap_err();
        assert!(error.to_string().starts_with("model.q4nx: mlp.up_proj runs past the end of the file"), "{error}");
        let odd = Numbered(4, 257);
        let error = pack_layer(&layout, &LayerWeights { up: &wide, o: &odd, ..weights }, &mut packed).unwrap_err();
        assert_eq!(error, PackError::TileCount { what: "numbered".to_owned(), wanted: 256, found: 257 });
        let error = pack_layer(&layout, &LayerWeights { up: &wide, ..weights }, &mut packed[1..]).unwrap_err();
        assert!(matches!(error, PackError::Destination { wanted_bytes: 9_830_400, .. }), "{error}");
        assert!(packed.iter().all(|byte| *byte == 0xEE));
    }
}
