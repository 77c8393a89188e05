//! Matrices that arrive as groups of tiles over eight streams.

use super::{math, ports};
use crate::array::program::Streams;

/// Output features of a tile.
pub const ROWS_OF_TILE: usize = 32;
/// Input features of a tile.
pub const COLUMNS_OF_TILE: usize = 256;
/// Bytes of a tile: a scale and a zero in bf16 for each row and 32 columns, then codes of four bits.
pub const TILE_BYTES: usize = 5120;
/// Output features of a group.
pub const GROUP_ROWS: usize = 2 * ROWS_OF_TILE;

const QUANT_COLUMNS: usize = 32;
const CONSTANT_BYTES: usize = 2 * ROWS_OF_TILE * COLUMNS_OF_TILE / QUANT_COLUMNS;
const STREAMS: usize = ports::WEIGHT_STREAMS.len();

/// A matrix that is being multiplied with an operand.
#[derive(Debug)]
pub(super) struct Groups {
    groups: usize,
    tiles_of_group: usize,
    operand: Vec<f32>,
    /// What has arrived on each stream.
    lanes: [Lane; STREAMS],
    /// Stream that is looked at first.
    turn: usize,
    tile: Box<[u8; TILE_BYTES]>,
}

/// Place of the next tile of a stream.
#[derive(Debug, Clone, Copy)]
struct Lane {
    group: usize,
    tile: usize,
}

impl Groups {
    /// `rows` output features times `operand`, whose values are bf16's.
    pub(super) fn new(rows: usize, operand: Vec<f32>) -> Self {
        Self {
            groups: rows / GROUP_ROWS,
            tiles_of_group: 2 * (operand.len() / COLUMNS_OF_TILE),
            operand,
            lanes: std::array::from_fn(|group| Lane { group, tile: 0 }),
            turn: 0,
            tile: Box::new([0; TILE_BYTES]),
        }
    }

    /// Takes one tile from a stream that has one, and adds its product to `results`; `row_of` says where a group's rows
    /// are. `false`: no stream has a tile that is wanted.
    pub(super) fn step(
        &mut self,
        streams: &mut Streams<'_>,
        row_of: impl Fn(usize) -> usize,
        results: &mut [f32],
    ) -> bool {
        for stream in (self.turn..self.turn + STREAMS).map(|stream| stream % STREAMS) {
            let lane = self.lanes[stream];
            if lane.group >= self.groups || !streams.read(ports::weights(stream), &mut self.tile[..]) {
                continue;
            }
            // The two rows of tiles take turns.
            let row = row_of(lane.group) + lane.tile % 2 * ROWS_OF_TILE;
            let column = lane.tile / 2 * COLUMNS_OF_TILE;
            let operand = &self.operand[column..column + COLUMNS_OF_TILE];
            add_product(&self.tile, operand, &mut results[row..row + ROWS_OF_TILE]);
            self.lanes[stream] = match lane.tile + 1 == self.tiles_of_group {
                true => Lane { group: lane.group + STREAMS, tile: 0 },
                false => Lane { tile: lane.tile + 1, ..lane },
            };
            self.turn = stream + 1;
            return true;
        }
        false
    }

    pub(super) fn is_done(&self) -> bool {
        self.lanes.iter().all(|lane| lane.group >= self.groups)
    }

    /// How far the matrix is, for people.
    pub(super) fn progress(&self) -> String {
        let done: usize = self.lanes.iter().map(|lane| lane.group.min(self.groups + STREAMS) / STREAMS).sum();
        format!("{} of {} groups of tiles", done.min(self.groups), self.groups)
    }
}

/// Adds the product of a tile with 256 elements to 32 results.
fn add_product(tile: &[u8; TILE_BYTES], operand: &[f32], results: &mut [f32]) {
    let (constants, codes) = tile.split_at(2 * CONSTANT_BYTES);
    let (scales, zeros) = constants.split_at(CONSTANT_BYTES);
    let constant = |of: &[u8], index: usize| math::from_bf16([of[2 * index], of[2 * index + 1]]);
    for (quant, operand) in operand.chunks_exact(QUANT_COLUMNS).enumerate() {
        let total: f32 = operand.iter().sum();
        for (half, results) in results.chunks_exact_mut(ROWS_OF_TILE / 2).enumerate() {
            let at = (half * 8 + quant) * 256;
            let mut sums = [0f32; ROWS_OF_TILE / 2];
            for (column, element) in codes[at..at + 256].as_chunks::<8>().0.iter().zip(operand) {
                for (pair, code) in sums.as_chunks_mut::<2>().0.iter_mut().zip(column) {
                    pair[0] += f32::from(code & 15) * element;
                    pair[1] += f32::from(code >> 4) * element;
                }
            }
            for (row, (result, sum)) in results.iter_mut().zip(sums).enumerate() {
                let index = ROWS_OF_TILE * quant + ROWS_OF_TILE / 2 * half + row;
                *result += constant(scales, index) * sum + constant(zeros, index) * total;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_read_as_its_layout_says() {
        // One code, one scale and one zero at a time are not zero; the result says which row and column they belong to.
        for (row, column) in [(0, 0), (1, 0), (15, 31), (16, 32), (31, 255), (18, 77)] {
            let (quant, index) = (column / 32, column / 32 * 32 + row);
            let mut tile = [0; TILE_BYTES];
            tile[2 * index..2 * index + 2].copy_from_slice(&math::to_bf16(0.5).to_le_bytes());
            tile[512 + 2 * index..514 + 2 * index].copy_from_slice(&math::to_bf16(-2.0).to_le_bytes());
            let at = 1024 + ((row / 16) * 8 + quant) * 256 + 8 * (column % 32) + row % 16 / 2;
            tile[at] = if row % 2 == 0 { 0x0B } else { 0xB0 };
            let operand: Vec<f32> = (0..256).map(|i| i as f32).collect();
            let mut results = [0.0; 32];
            add_product(&tile, &operand, &mut results);
            let total: f32 = (32 * quant..32 * quant + 32).map(|i| i as f32).sum();
            let mut wanted = [0.0; 32];
            wanted[row] = 0.5 * 11.0 * column as f32 - 2.0 * total;
            assert_eq!(results, wanted, "row {row}, column {column}");
        }
    }
}
