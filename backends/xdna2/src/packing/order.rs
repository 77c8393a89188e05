//! Tiles and their order.

use super::PackError;

/// Rows (output features) of a tile.
pub const TILE_ROWS: usize = 32;
/// Columns (input features) of a tile.
pub const TILE_COLUMNS: usize = 256;
/// Bytes of a tile: 256 scales and 256 zeros in bf16, 8192 codes of four bits.
pub const TILE_BYTES: usize = 5120;
/// Input features to which one tile of a group belongs.
pub const GROUP_COLUMNS: usize = 128;

/// Tiles of a matrix; both sizes are multiples of the tile's.
#[must_use]
pub fn tiles_of(rows: usize, columns: usize) -> usize {
    (rows / TILE_ROWS) * (columns / TILE_COLUMNS)
}

/// Tiles of a group of a matrix with `columns` input features.
#[must_use]
pub fn group_of(columns: usize) -> usize {
    columns.div_ceil(GROUP_COLUMNS)
}

/// Which tile of the file stands at `index` of the packed order, in groups of `group`: within a group the halves alternate.
/// A permutation of whole groups, of even and odd size. A `group` of 0 counts as 1.
#[must_use]
pub fn source_of(index: usize, group: usize) -> usize {
    let group = group.max(1);
    let half = group.div_ceil(2);
    let within = index % group;
    index - within + within / 2 % half + half * (within % 2)
}

/// Tiles of one tensor in file order.
pub trait TileSource: Sync {
    /// Name, for messages.
    fn name(&self) -> &str;

    /// Tiles that the tensor's shape declares.
    fn count(&self) -> usize;

    /// Whole tiles from the tensor's start to the end of its file.
    fn available(&self) -> usize;

    /// Copies tile `index`, converted where the file holds another kind.
    ///
    /// # Errors
    /// [`PackError::PastEnd`], [`PackError::Source`].
    fn read(&self, index: usize, into: &mut [u8; TILE_BYTES]) -> Result<(), PackError>;
}

/// Tiles that lie in a file as the kernels take them.
#[derive(Debug, Clone, Copy)]
pub struct SliceTiles<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Tiles that its shape declares.
    pub count: usize,
    /// All bytes from its start to the end of the file.
    pub available: &'a [u8],
}

impl TileSource for SliceTiles<'_> {
    fn name(&self) -> &str {
        self.name
    }

    fn count(&self) -> usize {
        self.count
    }

    fn available(&self) -> usize {
        self.available.len() / TILE_BYTES
    }

    fn read(&self, index: usize, into: &mut [u8; TILE_BYTES]) -> Result<(), PackError> {
        let tile = self.available.as_chunks::<TILE_BYTES>().0.get(index).ok_or_else(|| PackError::PastEnd {
            what: self.name.to_owned(),
            wanted: index.saturating_add(1),
            available: self.available(),
        })?;
        into.copy_from_slice(tile);
        Ok(())
    }
}

/// Copies tiles `first..first + count` of `source` to `into`, reordered in groups that start at `first`. Both are whole groups.
pub(super) fn reorder(source: &dyn TileSource, first: usize, group: usize, into: &mut [u8]) -> Result<(), PackError> {
    let tiles = into.as_chunks_mut::<TILE_BYTES>().0;
    for (index, tile) in tiles.iter_mut().enumerate() {
        source.read(first + source_of(index, group), tile)?;
    }
    Ok(())
}

/// The same, on up to `threads` threads.
pub(super) fn reorder_on(
    threads: usize,
    source: &dyn TileSource,
    group: usize,
    into: &mut [u8],
) -> Result<(), PackError> {
    let groups = into.len() / TILE_BYTES / group.max(1);
    let tiles = groups.div_ceil(threads.max(1)).max(1) * group.max(1);
    std::thread::scope(|scope| {
        let parts = into.chunks_mut(tiles * TILE_BYTES).enumerate();
        let workers: Vec<_> =
            parts.map(|(i, part)| scope.spawn(move || reorder(source, i * tiles, group, part))).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_group_takes_turns_between_its_halves() {
        let order = |group: usize, tiles: usize| (0..tiles).map(|i| source_of(i, group)).collect::<Vec<_>>();
        // Input of 1024: two rows of four tiles.
        assert_eq!(order(8, 8), [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!(order(8, 16)[8..], [8, 12, 9, 13, 10, 14, 11, 15]);
        assert_eq!(order(9, 9), [0, 5, 1, 6, 2, 7, 3, 8, 4]);
        assert_eq!(order(2, 4), [0, 1, 2, 3]);
        assert_eq!(order(1, 3), [0, 1, 2]);
        assert_eq!(order(0, 3), [0, 1, 2]);
    }

    #[test]
    fn groups_and_tiles_of_the_published_shapes() {
        assert_eq!([1024, 2048, 3072, 1025].map(group_of), [8, 16, 24, 9]);
        assert_eq!((tiles_of(2048, 1024), tiles_of(3072, 1024), tiles_of(151_936, 1024)), (256, 384, 18_992));
    }

    proptest! {
        #[test]
        fn the_order_is_a_permutation_of_whole_groups(group in 1usize..70, groups in 1usize..5) {
            let mut seen: Vec<usize> = (0..group * groups).map(|i| source_of(i, group)).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..group * groups).collect::<Vec<_>>());
        }
    }

    #[test]
    fn tiles_past_the_end_are_refused() {
        let bytes = vec![1; 2 * TILE_BYTES - 1];
        let tiles = SliceTiles { name: "q", count: 2, available: &bytes };
        let mut tile = [0; TILE_BYTES];
        tiles.read(0, &mut tile).unwrap();
        let wanted = PackError::PastEnd { what: "q".to_owned(), wanted: 2, available: 1 };
        assert_eq!(tiles.read(1, &mut tile), Err(wanted));
        assert!(tiles.read(usize::MAX, &mut tile).is_err());
    }
}
