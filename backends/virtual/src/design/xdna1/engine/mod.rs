//! Engines: all layers of a model for one token in one run.
//!
//! Six GEMV tiles at (0,2), (0,3), (1,2), (1,3), (2,2) and (2,3), a hub at (3,2), a memory tile at (1,1) that joins the
//! tiles' slices. A run's header, the first object of the cache stream, says position, RoPE and embedding; weights come in
//! the order in which they are used. Rounds of a layer: query, key and value → attention; output projection; gate and up;
//! down. Results of a round go by slice, joined object and broadcast to all tiles, each of which keeps the whole residual
//! stream.
//!
//! | Stream | SmolLM | Qwen2.5 |
//! |---|---|---|
//! | column `i/2`, MM2S `i mod 2` | weights of tile `i` | the same |
//! | column 3, MM2S 0 | header and cache | the same |
//! | column 3, S2MM 0 | new keys and values of each layer | the same |
//! | column 0, S2MM 0 | hidden state after the final norm | |
//! | column `i/2`, S2MM `i mod 2` | | logits of tile `i`; without head the end signal, of tile 0 alone |

mod gemv;
mod hub;

use super::fifo::{ObjectFifo, STALE, STALE_BYTE};
use super::shape::{CACHE_ELEMENTS, LOGITS, Model, Shape, TILES};
use crate::array::program::{CoreProgram, Step, StreamKey, Streams};
use gemv::Gemv;
use hub::Hub;
use std::fmt;

/// Shim channel of a tile's stream: column and channel.
pub(crate) const fn tile_channel(tile: usize) -> (u8, u8) {
    ((tile / 2) as u8, (tile % 2) as u8)
}

/// Shim channel of header and cache, and of the new keys and values.
pub(crate) const HUB_CHANNEL: (u8, u8) = (3, 0);

const DEPTH: usize = 2;

/// The engine of a family.
pub(super) struct Engine<M> {
    tiles: [Gemv<M>; TILES],
    hub: Hub<M>,
    weights: [ObjectFifo<u8>; TILES],
    slices: [ObjectFifo<u16>; TILES],
    joined: ObjectFifo<u16>,
    broadcast: [ObjectFifo<u16>; TILES],
    cache: ObjectFifo<u8>,
    kv_new: ObjectFifo<u16>,
    /// Outputs of tiles.
    results: [Option<ObjectFifo<u8>>; TILES],
    /// Tile that is looked at first.
    turn: usize,
}

impl<M: Model> Engine<M> {
    const SHAPE: Shape = M::SHAPE;

    pub(super) fn new(layers: usize, has_head: bool) -> Self {
        let Shape { hidden, slice, block, cache_depth, joined_depth, .. } = Self::SHAPE;
        let result = |tile| match (Self::SHAPE.has_head(), has_head) {
            (true, true) => Some(ObjectFifo::new(DEPTH, 4 * LOGITS, STALE_BYTE)),
            (true, false) => (tile == 0).then(|| ObjectFifo::new(DEPTH, 4 * LOGITS, STALE_BYTE)),
            (false, _) => (tile == 0).then(|| ObjectFifo::new(1, 2 * hidden, STALE_BYTE)),
        };
        Self {
            tiles: std::array::from_fn(|tile| Gemv::new(tile, layers, has_head)),
            hub: Hub::new(layers),
            weights: std::array::from_fn(|_| ObjectFifo::new(DEPTH, 2 * block, STALE_BYTE)),
            slices: std::array::from_fn(|_| ObjectFifo::new(DEPTH, slice, STALE)),
            joined: ObjectFifo::new(joined_depth, TILES * slice, STALE),
            broadcast: std::array::from_fn(|_| ObjectFifo::new(DEPTH, TILES * slice, STALE)),
            cache: ObjectFifo::new(cache_depth, 2 * CACHE_ELEMENTS, STALE_BYTE),
            kv_new: ObjectFifo::new(1, Self::SHAPE.kv_elements(), STALE),
            results: std::array::from_fn(result),
            turn: 0,
        }
    }

    /// Objects that leave the array.
    fn drain(&mut self, streams: &mut Streams<'_>) -> bool {
        let (column, channel) = HUB_CHANNEL;
        if let Some(object) = self.kv_new.front() {
            let bytes: Vec<u8> = object.iter().flat_map(|element| element.to_le_bytes()).collect();
            if streams.write(StreamKey::output(column, channel), &bytes) {
                self.kv_new.pop();
                return true;
            }
        }
        for (tile, result) in self.results.iter_mut().enumerate() {
            let Some(result) = result else { continue };
            let (column, channel) = tile_channel(tile);
            if result.front().is_some_and(|object| streams.write(StreamKey::output(column, channel), object)) {
                result.pop();
                return true;
            }
        }
        false
    }

    /// The memory tile: slices to joined objects.
    fn join(&mut self) -> bool {
        if self.slices.iter().any(|slice| slice.front().is_none()) {
            return false;
        }
        let Some(joined) = self.joined.free() else { return false };
        for (part, slice) in joined.chunks_exact_mut(Self::SHAPE.slice).zip(&mut self.slices) {
            if let Some(object) = slice.front() {
                part.copy_from_slice(object);
            }
            slice.pop();
        }
        self.joined.release();
        true
    }

    fn hub(&mut self) -> bool {
        self.hub.step(&mut hub::Ports {
            cache: &mut self.cache,
            joined: &mut self.joined,
            broadcast: &mut self.broadcast,
            kv_new: &mut self.kv_new,
        })
    }

    /// One tile after another.
    fn multiply(&mut self) -> bool {
        for tile in (self.turn..self.turn + TILES).map(|tile| tile % TILES) {
            let mut ports = gemv::Ports {
                weights: &mut self.weights[tile],
                broadcast: &mut self.broadcast[tile],
                slice: &mut self.slices[tile],
                result: self.results[tile].as_mut(),
            };
            if self.tiles[tile].step(&mut ports) {
                self.turn = tile + 1;
                return true;
            }
        }
        false
    }

    /// Objects that come into the array.
    fn fill(&mut self, streams: &mut Streams<'_>) -> bool {
        let (column, channel) = HUB_CHANNEL;
        let tiles = self.weights.iter_mut().enumerate().map(|(tile, fifo)| (tile_channel(tile), fifo));
        for ((column, channel), fifo) in [((column, channel), &mut self.cache)].into_iter().chain(tiles) {
            if fifo.free().is_some_and(|object| streams.read(StreamKey::input(column, channel), object)) {
                fifo.release();
                return true;
            }
        }
        false
    }
}

impl<M: Model> CoreProgram for Engine<M> {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        let moved = self.drain(streams) || self.hub() || self.join() || self.multiply() || self.fill(streams);
        if moved { Step::Progress } else { Step::Waiting }
    }

    fn unfinished(&self) -> Option<String> {
        let tiles = self.tiles.iter().filter_map(Gemv::unfinished);
        let weights = self.weights.iter().enumerate().filter(|(_, fifo)| fifo.len() > 0);
        let weights = weights.map(|(tile, fifo)| format!("{} blocks of weights at GEMV {tile}", fifo.len()));
        let cache = (self.cache.len() > 0).then(|| format!("{} cache objects at the hub", self.cache.len()));
        let held: Vec<String> = self.hub.unfinished().into_iter().chain(tiles).chain(weights).chain(cache).collect();
        (!held.is_empty()).then(|| held.join("; "))
    }

    /// The FIFOs of the design are the program's own.
    fn input_buffer_bytes(&self, _input: StreamKey) -> usize {
        0
    }
}

impl<M: Model> fmt::Debug for Engine<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("hub", &self.hub).field("tiles", &self.tiles).finish_non_exhaustive()
    }
}
