//! Tiles: 32 output features × 256 input features of a weight matrix, coded, in the published Q4NX layouts.
//!
//! In a tile `r` is the row (0 to 31), `c` the column (0 to 255), `g = c / 32` the group and `i = 32·g + r` the index of the
//! group's constants. bf16 numbers and offsets are little-endian bytes.
//!
//! | tile | bytes | constants | code of `(r, c)` | element |
//! |---|---|---|---|---|
//! | q4_1 | 5120 | bf16 scale at `2i`, bf16 zero at `512 + 2i` | half byte at `1024 + (8·(r/16) + g)·256 + 8·(c mod 32) + (r mod 16)/2` | `code · scale + zero` |
//! | Q4_K | 4736 | u8 scale at `i`, u8 min at `256 + i`, bf16 S at `4608 + 2r`, bf16 M at `4672 + 2r` | half byte at `512 + 16·c + r/2` | `S · scale · code + M · min` |
//! | Q8, layout A | 8704 | bf16 d at `2i` | i8 at `512 + 32·c + r` | `d · code` |
//! | Q8, layout B | 8704 | bf16 d at `2i` | i8 at `512 + 4096·(r/16) + 512·g + 16·(c mod 32) + r mod 16` | `d · code` |
//!
//! Half bytes: even rows low, odd rows high. All products are exact in f32, so an element has one rounding, that of the sum,
//! and fused arithmetic gives the same bits.

use half::bf16;
use npuhal_core::dtype::bf16_bits;
use thiserror::Error;

/// Rows of a tile: output features.
pub const TILE_ROWS: usize = 32;
/// Columns of a tile: input features.
pub const TILE_COLS: usize = 256;
/// Elements of a tile.
pub const TILE_ELEMENTS: usize = TILE_ROWS * TILE_COLS;
/// Columns that share a scale.
pub const GROUP_COLS: usize = 32;
/// Groups in a tile's row.
pub const GROUPS: usize = TILE_COLS / GROUP_COLS;
/// Bytes of a q4_1 tile.
pub const Q4_1_BYTES: usize = 5120;
/// Bytes of a Q4_K tile.
pub const Q4K_BYTES: usize = 4736;
/// Bytes of a Q8 tile.
pub const Q8_BYTES: usize = 8704;

/// Kind of a tile, as the last dimension of a tensor's shape states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TileKind {
    /// 4-bit codes, bf16 scale and zero.
    Q4_1,
    /// 4-bit codes, 8-bit scales and minima under bf16 ones.
    Q4K,
    /// 8-bit codes, bf16 scale.
    Q8,
}

impl TileKind {
    /// The kind whose tiles have `bytes` bytes.
    #[must_use]
    pub const fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            Q4_1_BYTES => Some(Self::Q4_1),
            Q4K_BYTES => Some(Self::Q4K),
            Q8_BYTES => Some(Self::Q8),
            _ => None,
        }
    }

    /// Bytes of a tile.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_1 => Q4_1_BYTES,
            Self::Q4K => Q4K_BYTES,
            Self::Q8 => Q8_BYTES,
        }
    }

    /// Name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_1 => "q4_1 tiles",
            Self::Q4K => "Q4_K tiles",
            Self::Q8 => "Q8 tiles",
        }
    }

    /// How its tiles are decoded. Nothing in a file tells the two layouts of Q8 apart.
    ///
    /// # Errors
    /// [`TileError::LayoutUnknown`] for Q8 without a layout.
    pub fn decoder(self, q8: Option<Q8Layout>) -> Result<TileDecoder, TileError> {
        match (self, q8) {
            (Self::Q4_1, _) => Ok(TileDecoder::Q4_1),
            (Self::Q4K, _) => Ok(TileDecoder::Q4K),
            (Self::Q8, Some(layout)) => Ok(TileDecoder::Q8(layout)),
            (Self::Q8, None) => Err(TileError::LayoutUnknown),
        }
    }
}

/// Order of the codes in a Q8 tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Q8Layout {
    /// Column after column (Qwen3.5-4B head and embedding).
    A,
    /// Halves of 16 rows, column after column (Qwen3.6-35B-A3B).
    B,
}

/// A tile's full layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TileDecoder {
    /// q4_1.
    Q4_1,
    /// Q4_K.
    Q4K,
    /// Q8 in one of its layouts.
    Q8(Q8Layout),
}

/// A tile or a table that cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TileError {
    /// The bytes are not one tile.
    #[error("wanted {wanted} bytes for a tile, found {found}")]
    ByteCount {
        /// Bytes of a tile of this kind.
        wanted: usize,
        /// Bytes given.
        found: usize,
    },
    /// A Q8 tile without a word about its layout.
    #[error("Q8 tiles come in layouts A and B, which the file does not tell apart; say which")]
    LayoutUnknown,
    /// A scale or a zero of a tile.
    #[error("a scale or a zero of the tile is infinite or no number in bf16: the file is damaged")]
    NotFinite,
    /// 8-bit codes do not fit 4 bits.
    #[error("a Q8 tensor does not fit q4_1 (8-bit codes)")]
    DoesNotFit,
}

impl TileDecoder {
    /// Bytes of a tile.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_1 => Q4_1_BYTES,
            Self::Q4K => Q4K_BYTES,
            Self::Q8(_) => Q8_BYTES,
        }
    }

    /// Fills `out` with the tile's elements, row-major.
    ///
    /// # Errors
    /// [`TileError::ByteCount`].
    pub fn decode(self, tile: &[u8], out: &mut [f32; TILE_ELEMENTS]) -> Result<(), TileError> {
        if tile.len() != self.bytes() {
            return Err(TileError::ByteCount { wanted: self.bytes(), found: tile.len() });
        }
        for (r, row) in out.as_chunks_mut::<TILE_COLS>().0.iter_mut().enumerate() {
            match self {
                Self::Q4_1 => q4_1_row(tile, r, row),
                Self::Q4K => q4k_row(tile, r, row),
                Self::Q8(layout) => q8_row(tile, r, layout, row),
            }
        }
        Ok(())
    }
}

fn q4_1_row(tile: &[u8], r: usize, out: &mut [f32; TILE_COLS]) {
    for (g, out) in out.as_chunks_mut::<GROUP_COLS>().0.iter_mut().enumerate() {
        let i = GROUP_COLS * g + r;
        let (scale, zero) = (bf16_at(tile, 2 * i), bf16_at(tile, 512 + 2 * i));
        for (c, out) in out.iter_mut().enumerate() {
            *out = f32::from(half_byte(tile, q4_1_byte(r, g, c), r)) * scale + zero;
        }
    }
}

fn q4k_row(tile: &[u8], r: usize, out: &mut [f32; TILE_COLS]) {
    for (c, out) in out.iter_mut().enumerate() {
        let (scale, zero) = q4k_constants(tile, c / GROUP_COLS, r);
        *out = scale * f32::from(half_byte(tile, q4k_byte(r, c), r)) + zero;
    }
}

fn q8_row(tile: &[u8], r: usize, layout: Q8Layout, out: &mut [f32; TILE_COLS]) {
    for (c, out) in out.iter_mut().enumerate() {
        let g = c / GROUP_COLS;
        let at = match layout {
            Q8Layout::A => 512 + 32 * c + r,
            Q8Layout::B => 512 + 4096 * (r / 16) + 512 * g + 16 * (c % GROUP_COLS) + r % 16,
        };
        *out = bf16_at(tile, 2 * (GROUP_COLS * g + r)) * f32::from(tile[at] as i8);
    }
}

/// Byte of a q4_1 tile with the code of row `r`, column `c` of group `g`.
fn q4_1_byte(r: usize, g: usize, c: usize) -> usize {
    1024 + (8 * (r / 16) + g) * 256 + 8 * c + (r % 16) / 2
}

/// Byte of a Q4_K tile with the code of row `r`, column `c`.
fn q4k_byte(r: usize, c: usize) -> usize {
    512 + 16 * c + r / 2
}

fn half_byte(tile: &[u8], at: usize, r: usize) -> u8 {
    tile[at] >> (4 * (r % 2)) & 15
}

/// `S · scale` and `M · min` of a Q4_K tile's row `r` in group `g`. Both are exact.
fn q4k_constants(tile: &[u8], g: usize, r: usize) -> (f32, f32) {
    let i = GROUP_COLS * g + r;
    (bf16_at(tile, 4608 + 2 * r) * f32::from(tile[i]), bf16_at(tile, 4672 + 2 * r) * f32::from(tile[256 + i]))
}

fn bf16_at(tile: &[u8], at: usize) -> f32 {
    bf16::from_le_bytes([tile[at], tile[at + 1]]).to_f32()
}

/// Where [`bf16_excess`] begins for what is not finite.
pub(super) const BF16_EXCESS: u32 = 1 << 31;

/// At least [`BF16_EXCESS`] where the bf16 nearest to `x` is not finite; so is any number that is combined from such ones with
/// `|`. From 7f7f8000 on, f32 round to infinity, are infinite or no numbers.
#[inline(always)]
pub(super) const fn bf16_excess(x: f32) -> u32 {
    (x.to_bits() & 0x7FFF_FFFF) + (BF16_EXCESS - 0x7F7F_8000)
}

/// Codes and constants of 32 rows × 256 columns, before they become a q4_1 tile.
#[derive(Debug, Clone, PartialEq)]
pub struct TileCodes {
    /// Codes, 0 to 15, by row and column.
    pub codes: [[u8; TILE_COLS]; TILE_ROWS],
    /// Scales by row and group, rounded to bf16 when written.
    pub scales: [[f32; GROUPS]; TILE_ROWS],
    /// Zeros by row and group, rounded to bf16 when written.
    pub zeros: [[f32; GROUPS]; TILE_ROWS],
}

impl Default for TileCodes {
    fn default() -> Self {
        Self {
            codes: [[0; TILE_COLS]; TILE_ROWS],
            scales: [[0.0; GROUPS]; TILE_ROWS],
            zeros: [[0.0; GROUPS]; TILE_ROWS],
        }
    }
}

impl TileCodes {
    /// The parts of a q4_1 tile.
    #[must_use]
    pub fn from_q4_1(tile: &[u8; Q4_1_BYTES]) -> Self {
        let mut parts = Self::default();
        for r in 0..TILE_ROWS {
            for g in 0..GROUPS {
                let i = GROUP_COLS * g + r;
                (parts.scales[r][g], parts.zeros[r][g]) = (bf16_at(tile, 2 * i), bf16_at(tile, 512 + 2 * i));
                for c in 0..GROUP_COLS {
                    parts.codes[r][GROUP_COLS * g + c] = half_byte(tile, q4_1_byte(r, g, c), r);
                }
            }
        }
        parts
    }

    /// Fills `out` with the q4_1 tile. False where a scale or a zero is not finite as bf16: the tile is of no use then.
    pub fn write_q4_1(&self, out: &mut [u8; Q4_1_BYTES]) -> bool {
        let mut excess = 0;
        for g in 0..GROUPS {
            for (start, constants) in [(0, &self.scales), (512, &self.zeros)] {
                let at = start + 2 * GROUP_COLS * g;
                for (out, row) in out[at..at + 2 * TILE_ROWS].as_chunks_mut::<2>().0.iter_mut().zip(constants) {
                    let value = row[g];
                    excess |= bf16_excess(value);
                    *out = if value.is_nan() { 0x7FC0 } else { bf16_bits(value) }.to_le_bytes();
                }
            }
        }
        // The 16 codes of a column in half a tile are 8 bytes, two rows each.
        for (rows, out) in self.codes.as_chunks::<16>().0.iter().zip(out[1024..].as_chunks_mut::<2048>().0) {
            let mut pairs = [[0_u8; TILE_COLS]; 8];
            for (pair, [even, odd]) in pairs.iter_mut().zip(rows.as_chunks::<2>().0) {
                for ((pair, even), odd) in pair.iter_mut().zip(even).zip(odd) {
                    *pair = even & 15 | odd << 4;
                }
            }
            for (block, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
                let columns = transposed(pairs.each_ref().map(|pair| u64::from_le_bytes(pair.as_chunks().0[block])));
                for (out, column) in out.as_chunks_mut::<8>().0.iter_mut().zip(columns) {
                    *out = column.to_le_bytes();
                }
            }
        }
        excess < BF16_EXCESS
    }
}

/// The 8 × 8 bytes of `rows` (byte 0 the lowest), column after column: blocks of one, two, then four bytes change places across
/// the diagonal.
#[inline(always)]
const fn transposed(mut rows: [u64; 8]) -> [u64; 8] {
    const KEPT: [u64; 3] = [0x00FF_00FF_00FF_00FF, 0x0000_FFFF_0000_FFFF, 0x0000_0000_FFFF_FFFF];
    let mut step = 0;
    while step < 3 {
        let (distance, bits) = (1 << step, 8 << step);
        let mut row = 0;
        while row < 8 {
            if row & distance == 0 {
                let moved = (rows[row] >> bits ^ rows[row + distance]) & KEPT[step];
                rows[row] ^= moved << bits;
                rows[row + distance] ^= moved;
            }
            row += 1;
        }
        step += 1;
    }
    rows
}

/// The q4_1 tile of a Q4_K tile: scale `bf16(S · scale)`, zero `bf16(M · min)`, the same codes. An element moves by at most
/// [`repack_bound`].
///
/// # Errors
/// [`TileError::ByteCount`], [`TileError::NotFinite`].
pub fn repack_q4k(tile: &[u8]) -> Result<[u8; Q4_1_BYTES], TileError> {
    if tile.len() != Q4K_BYTES {
        return Err(TileError::ByteCount { wanted: Q4K_BYTES, found: tile.len() });
    }
    let mut parts = TileCodes::default();
    for r in 0..TILE_ROWS {
        for g in 0..GROUPS {
            (parts.scales[r][g], parts.zeros[r][g]) = q4k_constants(tile, g, r);
        }
        for c in 0..TILE_COLS {
            parts.codes[r][c] = half_byte(tile, q4k_byte(r, c), r);
        }
    }
    let mut out = [0; Q4_1_BYTES];
    if parts.write_q4_1(&mut out) { Ok(out) } else { Err(TileError::NotFinite) }
}

/// Largest error [`repack_q4k`] may make in row `r` of group `g`: `15 · h(S · scale) + h(M · min) + 1e-12`, where `h` is half a
/// bf16 unit in the last place.
///
/// # Panics
/// When `tile` is no Q4_K tile, `g` above 7 or `r` above 31.
#[must_use]
pub fn repack_bound(tile: &[u8], g: usize, r: usize) -> f64 {
    assert!(tile.len() == Q4K_BYTES && g < GROUPS && r < TILE_ROWS, "group {g} of row {r} in {} bytes", tile.len());
    let (scale, zero) = q4k_constants(tile, g, r);
    15.0 * half_ulp(scale) + half_ulp(zero) + 1e-12
}

/// Half a bf16 unit in the last place of `x`; 0 for 0.
fn half_ulp(x: f32) -> f64 {
    if x == 0.0 { 0.0 } else { (f64::from(x).abs().log2().floor() - 8.0).exp2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_excess_tells_what_is_not_finite_in_bf16() {
        for bits in (0..=u32::MAX).step_by(65_521).chain([0x7F7F_7FFF, 0x7F7F_8000, 0xFF7F_8000, u32::MAX]) {
            let x = f32::from_bits(bits);
            assert_eq!(bf16_excess(x) < BF16_EXCESS, bf16::from_f32(x).is_finite(), "{bits:x}");
        }
    }

    #[test]
    fn bytes_are_transposed() {
        let byte = |row: usize, column: usize| (16 * row + column) as u8;
        let rows = std::array::from_fn(|row| u64::from_le_bytes(std::array::from_fn(|column| byte(row, column))));
        for (column, bytes) in transposed(rows).into_iter().enumerate() {
            assert_eq!(bytes.to_le_bytes(), std::array::from_fn::<_, 8, _>(|row| byte(row, column)));
        }
    }

    #[test]
    fn codes_are_written_where_the_layout_has_them() {
        let mut parts = TileCodes::default();
        for (r, codes) in parts.codes.iter_mut().enumerate() {
            *codes = std::array::from_fn(|c| ((31 * r + 7 * c + r * c) % 16) as u8);
        }
        let mut tile = [0; Q4_1_BYTES];
        assert!(parts.write_q4_1(&mut tile));
        for (r, codes) in parts.codes.iter().enumerate() {
            for (c, code) in codes.iter().enumerate() {
                let at = q4_1_byte(r, c / GROUP_COLS, c % GROUP_COLS);
                assert_eq!(half_byte(&tile, at, r), *code, "row {r}, column {c}");
            }
        }
    }

    #[test]
    fn half_a_unit_in_the_last_place() {
        assert_eq!(
            [0.0, 1.0, -1.5, 2.0, 0.75].map(half_ulp),
            [0.0, 1.0 / 256.0, 1.0 / 256.0, 1.0 / 128.0, 1.0 / 512.0]
        );
    }
}
