//! A weight matrix stored as tiles, inside a mapped file.

use super::container::{Q4nxFile, TensorEntry};
use super::tile::{Q8Layout, TILE_COLS, TILE_ELEMENTS, TILE_ROWS, TileError, TileKind, repack_q4k};
use crate::error::ModelError;
use crate::map::FileMap;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// A weight matrix of `rows` output features × `cols` input features, stored as tiles of 32 × 256 elements in row-major order
/// of the tiles. Cheap to clone; keeps the mapping alive.
#[derive(Debug, Clone)]
pub struct TiledTensor {
    entry: TensorEntry,
    kind: TileKind,
    tiles: usize,
    rows: usize,
    cols: usize,
    file: Arc<FileMap>,
}

impl TiledTensor {
    /// The matrix of `entry`, which is `rows × cols` as the model's configuration has it.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where the entry is no tensor of tiles, where the tiles run past the end of the file, and where
    /// `rows × cols` is a whole number of tiles and the entry has another number.
    pub fn new(file: &Q4nxFile, entry: &TensorEntry, rows: usize, cols: usize) -> Result<Self, ModelError> {
        let bad = |reason: String| ModelError::Malformed {
            path: file.path().to_owned(),
            field: format!("tensor {:?}", entry.name()),
            reason,
        };
        let (kind, tiles) = entry.tiles().map_err(bad)?;
        if tiles.checked_mul(kind.bytes()).is_none_or(|len| len > entry.avail()) {
            return Err(bad(format!(
                "{} runs past the end of the file: wanted {tiles} tiles of {} bytes, found {} bytes",
                entry.name(),
                kind.bytes(),
                entry.avail()
            )));
        }
        let tensor = Self { entry: entry.clone(), kind, tiles, rows, cols, file: Arc::clone(file.map()) };
        match tensor.grid() {
            Some((down, across)) if down.checked_mul(across) != Some(tiles) => {
                Err(bad(format!("wanted {down} × {across} tiles for {rows} × {cols} elements, found {tiles}")))
            }
            _ => Ok(tensor),
        }
    }

    /// Name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        self.entry.name()
    }

    /// Kind of its tiles.
    #[must_use]
    pub fn kind(&self) -> TileKind {
        self.kind
    }

    /// Number of tiles. All of them lie in the file.
    #[must_use]
    pub fn tiles(&self) -> usize {
        self.tiles
    }

    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Tiles down and across; `None` where the matrix is no whole number of tiles.
    #[must_use]
    pub fn grid(&self) -> Option<(usize, usize)> {
        let whole = self.rows.is_multiple_of(TILE_ROWS) && self.cols.is_multiple_of(TILE_COLS);
        whole.then_some((self.rows / TILE_ROWS, self.cols / TILE_COLS))
    }

    /// Declared length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.entry.bytes()
    }

    /// Its declared bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.file[self.entry.range()]
    }

    /// All bytes from its start to the end of the file. Whoever goes by the number of tiles is bounded by these.
    #[must_use]
    pub fn available(&self) -> &[u8] {
        &self.file[self.entry.range().start..]
    }

    /// Bytes of tile `index`, in row-major order of the grid.
    #[must_use]
    pub fn tile(&self, index: usize) -> Option<&[u8]> {
        let start = index.checked_mul(self.kind.bytes())?;
        (index < self.tiles).then(|| self.available().get(start..start + self.kind.bytes())).flatten()
    }

    /// Tile `index` as a q4_1 tile: its own bytes, or those that a Q4_K tile is repacked to.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] where there is no such tile, and for Q8, whose codes do not fit.
    pub fn q4_1_tile(&self, index: usize) -> Result<Cow<'_, [u8]>, ModelError> {
        let tile = self.tile(index);
        let tile = tile.ok_or_else(|| self.bad(format!("wanted tile {index}, found {} tiles", self.tiles)))?;
        match self.kind {
            TileKind::Q4_1 => Ok(Cow::Borrowed(tile)),
            TileKind::Q4K => {
                repack_q4k(tile).map(|tile| Cow::Owned(tile.to_vec())).map_err(|error| self.tile_error(&error))
            }
            TileKind::Q8 => Err(self.tile_error(&TileError::DoesNotFit)),
        }
    }

    /// The mapping behind it.
    #[must_use]
    pub fn file(&self) -> &Arc<FileMap> {
        &self.file
    }

    /// The file's path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Fills `out` with the 32 rows from `32 · strip`, row-major: `32 × cols` elements. Tiles of kind Q8 need their layout.
    ///
    /// # Errors
    /// [`ModelError::Malformed`]: no whole number of tiles, declared bytes shorter than the tiles, no such strip, another length
    /// of `out`, or a layout that is not known.
    pub fn decode_strip(&self, strip: usize, q8: Option<Q8Layout>, out: &mut [f32]) -> Result<(), ModelError> {
        let decoder = self.kind.decoder(q8).map_err(|error| self.tile_error(&error))?;
        let Some((down, across)) = self.grid() else {
            return Err(self.bad(format!(
                "Q4NX tensor size is not whole tiles: wanted rows a multiple of 32 and columns of 256, found {} × {}",
                self.rows, self.cols
            )));
        };
        if self.len_bytes() / self.kind.bytes() < self.tiles {
            return Err(self.bad(format!(
                "Q4NX tensor is shorter than its tiles: wanted {} tiles of {} bytes, found {} bytes",
                self.tiles,
                self.kind.bytes(),
                self.len_bytes()
            )));
        }
        if strip >= down || out.len() != TILE_ROWS * self.cols {
            return Err(self.bad(format!(
                "wanted strip {strip} as {} elements, found {down} strips of {}",
                out.len(),
                TILE_ROWS * self.cols
            )));
        }
        let mut elements = [0.0; TILE_ELEMENTS];
        for across_index in 0..across {
            // In range: strip < down, and down × across is the number of tiles.
            let tile = self.tile(strip * across + across_index).unwrap_or_default();
            decoder.decode(tile, &mut elements).map_err(|error| self.tile_error(&error))?;
            for (row, elements) in out.chunks_exact_mut(self.cols).zip(elements.as_chunks::<TILE_COLS>().0) {
                row[across_index * TILE_COLS..(across_index + 1) * TILE_COLS].copy_from_slice(elements);
            }
        }
        Ok(())
    }

    fn tile_error(&self, error: &TileError) -> ModelError {
        self.bad(error.to_string())
    }

    fn bad(&self, reason: String) -> ModelError {
        ModelError::Malformed { path: self.path().to_owned(), field: format!("tensor {:?}", self.name()), reason }
    }
}
