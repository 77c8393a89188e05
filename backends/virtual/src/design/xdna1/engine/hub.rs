//! The hub: header, RoPE, attention, and the way of every round's results back to the tiles.

use crate::design::xdna1::fifo::ObjectFifo;
use crate::design::xdna1::shape::{CACHE_ELEMENTS, Model, Shape, TILES, position};
use crate::design::xdna1::vector::{HEAD_DIM, Head, elements, head, narrow, value};
use std::marker::PhantomData;

/// The FIFOs that the hub holds an end of.
pub(super) struct Ports<'a> {
    pub(super) cache: &'a mut ObjectFifo<u8>,
    pub(super) joined: &'a mut ObjectFifo<u16>,
    pub(super) broadcast: &'a mut [ObjectFifo<u16>; TILES],
    pub(super) kv_new: &'a mut ObjectFifo<u16>,
}

impl Ports<'_> {
    /// Fills an object of the broadcast FIFO, where all tiles have room.
    fn send(&mut self, elements: &[u16]) -> bool {
        if self.broadcast.iter_mut().any(|fifo| fifo.free().is_none()) {
            return false;
        }
        for fifo in self.broadcast.iter_mut() {
            if let Some(object) = fifo.free() {
                object[..elements.len()].copy_from_slice(elements);
            }
            fifo.release();
        }
        true
    }
}

#[derive(Debug)]
enum Phase {
    Header,
    Embedding(Vec<u16>),
    Projections,
    /// KV heads done.
    Attention(usize),
    Attended,
    /// Rounds that are forwarded unchanged: output rows, activations, down rows.
    Forward(u8),
    /// The header is impossible; nothing goes on.
    Stuck(String),
}

/// State of the hub.
#[derive(Debug)]
pub(super) struct Hub<M> {
    layers: usize,
    layer: usize,
    phase: Phase,
    table: Vec<u16>,
    position: usize,
    /// Query, key and value heads of the layer; queries and keys after RoPE.
    heads: Vec<Head>,
    attended: Vec<u16>,
    model: PhantomData<M>,
}

impl<M: Model> Hub<M> {
    const SHAPE: Shape = M::SHAPE;

    pub(super) fn new(layers: usize) -> Self {
        Self {
            layers,
            layer: 0,
            phase: Phase::Header,
            table: Vec::new(),
            position: 0,
            heads: Vec::new(),
            attended: Vec::new(),
            model: PhantomData,
        }
    }

    /// What the hub is in the middle of.
    pub(super) fn unfinished(&self) -> Option<String> {
        let doing = match &self.phase {
            Phase::Header => return None,
            Phase::Embedding(_) => "the embedding is not sent".to_owned(),
            Phase::Projections => "waits for query, key and value".to_owned(),
            Phase::Attention(done) => format!("attention: {done} of {} KV heads", Self::SHAPE.kv_heads),
            Phase::Attended => "the attended values are not sent".to_owned(),
            Phase::Forward(round) => format!("round {} of 4", round + 2),
            Phase::Stuck(reason) => reason.clone(),
        };
        Some(format!("hub in layer {}: {doing}", self.layer))
    }

    /// Takes or sends one object, where that is possible.
    pub(super) fn step(&mut self, ports: &mut Ports<'_>) -> bool {
        match &mut self.phase {
            Phase::Header => {
                let Some(object) = ports.cache.front() else { return false };
                self.take_header(object);
                ports.cache.pop();
            }
            Phase::Embedding(embedding) => {
                if !ports.send(embedding) {
                    return false;
                }
                (self.layer, self.phase) = (0, Phase::Projections);
            }
            Phase::Projections => {
                let Some(object) = ports.joined.front() else { return false };
                self.take_projections(object);
                ports.joined.pop();
            }
            Phase::Attention(done) => {
                let done = *done;
                let (Some(cache), Some(new)) = (ports.cache.front(), ports.kv_new.free()) else { return false };
                self.attend(done, cache, new);
                ports.cache.pop();
                self.phase = Phase::Attention(done + 1);
                if done + 1 == Self::SHAPE.kv_heads {
                    ports.kv_new.release();
                    self.phase = Phase::Attended;
                }
            }
            Phase::Attended => {
                if !ports.send(&self.attended) {
                    return false;
                }
                self.phase = Phase::Forward(0);
            }
            Phase::Forward(round) => {
                let round = *round;
                let Some(object) = ports.joined.front() else { return false };
                let object = object.to_vec();
                if !ports.send(&object) {
                    return false;
                }
                ports.joined.pop();
                self.phase = self.after(round);
            }
            Phase::Stuck(_) => return false,
        }
        true
    }

    fn after(&mut self, round: u8) -> Phase {
        if round < 2 {
            return Phase::Forward(round + 1);
        }
        self.layer += 1;
        if self.layer < self.layers { Phase::Projections } else { Phase::Header }
    }

    fn take_header(&mut self, object: &[u8]) {
        let header: Vec<u16> = elements(object).collect();
        let tables = M::TABLES;
        self.table = header[..tables.elements].to_vec();
        self.phase = match position(value(self.table[tables.position])) {
            Ok(position) => {
                self.position = position;
                Phase::Embedding(header[tables.embedding..tables.embedding + Self::SHAPE.hidden].to_vec())
            }
            Err(reason) => Phase::Stuck(format!("the header's position: {reason}")),
        };
    }

    fn take_projections(&mut self, object: &[u16]) {
        let Shape { slice, qkv_rows, heads, kv_heads, .. } = Self::SHAPE;
        let rows: Vec<u16> = object.chunks_exact(slice).flat_map(|slice| &slice[..qkv_rows]).copied().collect();
        let turns = heads + kv_heads;
        self.heads = (0..)
            .zip(rows.as_chunks::<HEAD_DIM>().0)
            .map(|(i, rows)| {
                let head = head(rows.iter().copied());
                if i < turns { M::rotate(&head, &self.table) } else { head }
            })
            .collect();
        self.attended.clear();
        self.phase = Phase::Attention(0);
    }

    /// One KV head: the positions before this one from the cache, the new one from the projections.
    fn attend(&mut self, kv_head: usize, cache: &[u8], new: &mut [u16]) {
        let Shape { heads, kv_heads, .. } = Self::SHAPE;
        let (new_key, new_value) = (self.heads[heads + kv_head], self.heads[heads + kv_heads + kv_head]);
        let (keys, values) = cache.split_at(CACHE_ELEMENTS);
        let rows = |of: &[u8], new: Head| -> Vec<Head> {
            let cached = of.chunks_exact(2 * HEAD_DIM).take(self.position);
            cached.map(|row| head(elements(row))).chain([new]).collect()
        };
        let (keys, values) = (rows(keys, new_key), rows(values, new_value));
        let group = heads / kv_heads;
        for query in &self.heads[kv_head * group..(kv_head + 1) * group] {
            self.attended.extend(M::attend(query, &keys, &values).map(narrow));
        }
        let new = &mut new[2 * HEAD_DIM * kv_head..2 * HEAD_DIM * (kv_head + 1)];
        let row = new_key.iter().chain(&new_value);
        new.iter_mut().zip(row).for_each(|(to, element)| *to = narrow(*element));
    }
}
