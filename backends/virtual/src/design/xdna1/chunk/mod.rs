//! Chunked graphs: a few layers of a model for one token in one run.
//!
//! Workers in a row: norm, query-key-value, RoPE, attention (one worker for each KV head), output projection, norm, gate and
//! up (three workers and a merge), activation, down projection. Each waits for the one before, so that a layer is a list of
//! phases here; only the FIFOs of weights run ahead.
//!
//! | Stream | Content |
//! |---|---|
//! | columns 0 to 3, MM2S 0 | weights: query-key-value, output, gate and up, down |
//! | column 0, MM2S 1 | norms of each layer, and biases |
//! | column 1, MM2S 1 | RoPE: 32 cosines, 32 sines, position, 0 |
//! | column 2, MM2S 1 and S2MM 0 | residual stream |
//! | column 3, MM2S 1 and S2MM 0 | cache objects of each layer |
//!
//! Only the weights' shim columns are published; the other streams' places are this model's. A cache object that leaves has
//! the used rows alone, the new one among them: past these it holds what the worker's buffer held before.

mod attention;
mod plan;

pub(crate) use plan::{Blocks, Format, Plan};

use super::fifo::{ObjectFifo, STALE_BYTE};
use super::shape::{CACHE_ELEMENTS, Model, Shape, position};
use super::vector::{HEAD_DIM, Head, elements, head, narrow, rotate, rounded, value, widen};
use crate::array::program::{CoreProgram, Step, StreamKey, Streams};
use std::marker::PhantomData;

/// Elements of the RoPE object.
pub(crate) const ROPE_ELEMENTS: usize = 66;
const ROPE_POSITION: usize = HEAD_DIM;
const DEPTH: usize = 2;

/// Shim channel of a stream of weights: column and channel.
pub(crate) const fn weights_channel(stream: usize) -> (u8, u8) {
    (stream as u8, 0)
}

/// Norms and biases, in.
pub(crate) const PARAMETERS: (u8, u8) = (0, 1);
/// RoPE, in.
pub(crate) const ROPE: (u8, u8) = (1, 1);
/// Residual stream, in.
pub(crate) const HIDDEN_IN: (u8, u8) = (2, 1);
/// Residual stream, out.
pub(crate) const HIDDEN_OUT: (u8, u8) = (2, 0);
/// Cache, in.
pub(crate) const CACHE_IN: (u8, u8) = (3, 1);
/// Cache, out.
pub(crate) const CACHE_OUT: (u8, u8) = (3, 0);

const fn input((column, channel): (u8, u8)) -> StreamKey {
    StreamKey::input(column, channel)
}

const fn output((column, channel): (u8, u8)) -> StreamKey {
    StreamKey::output(column, channel)
}

/// Numbers are blocks done; of attention, KV heads.
#[derive(Debug)]
enum Phase {
    Start,
    Parameters,
    Projection(usize),
    Attention(usize),
    Output(usize),
    UpGate(usize),
    Down(usize),
    Result,
    /// The RoPE object is impossible; nothing goes on.
    Stuck(String),
}

/// A graph of `layers` layers.
#[derive(Debug)]
pub(super) struct Chunk<M> {
    plan: Plan,
    layers: usize,
    layer: usize,
    phase: Phase,
    weights: [ObjectFifo<u8>; 4],
    parameters: ObjectFifo<u8>,
    rope: ObjectFifo<u8>,
    hidden_in: ObjectFifo<u8>,
    hidden_out: ObjectFifo<u8>,
    cache_in: ObjectFifo<u8>,
    /// One for each attention worker.
    cache_out: Vec<ObjectFifo<u8>>,
    /// Worker whose object leaves next.
    next_out: usize,
    table: Vec<u16>,
    position: usize,
    residual: Vec<f32>,
    post_gamma: Vec<f32>,
    bias: Vec<f32>,
    operand: Vec<f32>,
    /// Rows of the present projection, rounded to bf16.
    rows: Vec<f32>,
    model: PhantomData<M>,
}

impl<M: Model> Chunk<M> {
    const SHAPE: Shape = M::SHAPE;

    pub(super) fn new(plan: Plan, layers: usize) -> Self {
        let hidden = || ObjectFifo::new(1, 2 * Self::SHAPE.hidden, STALE_BYTE);
        Self {
            plan,
            layers,
            layer: 0,
            phase: Phase::Start,
            weights: plan.streams.map(|blocks| ObjectFifo::new(DEPTH, blocks.block_bytes(), STALE_BYTE)),
            parameters: ObjectFifo::new(1, 2 * plan.parameters, STALE_BYTE),
            rope: ObjectFifo::new(1, 2 * ROPE_ELEMENTS, STALE_BYTE),
            hidden_in: hidden(),
            hidden_out: hidden(),
            cache_in: ObjectFifo::new(1, 2 * CACHE_ELEMENTS, STALE_BYTE),
            cache_out: (0..Self::SHAPE.kv_heads).map(|_| ObjectFifo::new(1, 2 * CACHE_ELEMENTS, STALE_BYTE)).collect(),
            next_out: 0,
            table: Vec::new(),
            position: 0,
            residual: Vec::new(),
            post_gamma: Vec::new(),
            bias: Vec::new(),
            operand: Vec::new(),
            rows: Vec::new(),
            model: PhantomData,
        }
    }

    fn fill(&mut self, streams: &mut Streams<'_>) -> bool {
        let weights = self.weights.iter_mut().enumerate().map(|(i, fifo)| (weights_channel(i), fifo));
        let small = [
            (ROPE, &mut self.rope),
            (HIDDEN_IN, &mut self.hidden_in),
            (PARAMETERS, &mut self.parameters),
            (CACHE_IN, &mut self.cache_in),
        ];
        for (channel, fifo) in small.into_iter().chain(weights) {
            if fifo.free().is_some_and(|object| streams.read(input(channel), object)) {
                fifo.release();
                return true;
            }
        }
        false
    }

    fn drain(&mut self, streams: &mut Streams<'_>) -> bool {
        let worker = &mut self.cache_out[self.next_out];
        if worker.front().is_some_and(|object| streams.write(output(CACHE_OUT), object)) {
            worker.pop();
            self.next_out = (self.next_out + 1) % self.cache_out.len();
            return true;
        }
        if self.hidden_out.front().is_some_and(|object| streams.write(output(HIDDEN_OUT), object)) {
            self.hidden_out.pop();
            return true;
        }
        false
    }

    fn work(&mut self) -> bool {
        match self.phase {
            Phase::Start => self.start(),
            Phase::Parameters => self.take_parameters(),
            Phase::Projection(done) => self.multiply(0, done),
            Phase::Attention(done) => self.attend(done),
            Phase::Output(done) => self.multiply(1, done),
            Phase::UpGate(done) => self.multiply(2, done),
            Phase::Down(done) => self.multiply(3, done),
            Phase::Result => {
                let Some(object) = self.hidden_out.free() else { return false };
                for (bytes, element) in object.as_chunks_mut::<2>().0.iter_mut().zip(&self.residual) {
                    *bytes = narrow(*element).to_le_bytes();
                }
                self.hidden_out.release();
                self.phase = Phase::Start;
                true
            }
            Phase::Stuck(_) => false,
        }
    }

    fn start(&mut self) -> bool {
        let (Some(rope), Some(hidden)) = (self.rope.front(), self.hidden_in.front()) else { return false };
        self.table = elements(rope).collect();
        self.residual = elements(hidden).map(value).collect();
        self.rope.pop();
        self.hidden_in.pop();
        self.layer = 0;
        self.phase = match position(value(self.table[ROPE_POSITION])) {
            Ok(position) => {
                self.position = position;
                Phase::Parameters
            }
            Err(reason) => Phase::Stuck(format!("the RoPE object's position: {reason}")),
        };
        true
    }

    fn take_parameters(&mut self) -> bool {
        let Shape { hidden, has_bias, .. } = Self::SHAPE;
        let Some(object) = self.parameters.front() else { return false };
        let parameters: Vec<u16> = elements(object).collect();
        self.parameters.pop();
        self.operand = M::norm(&self.residual, &widen(&parameters[..hidden]));
        self.post_gamma = widen(&parameters[hidden..2 * hidden]);
        self.bias.clear();
        if has_bias {
            let (high, low) = parameters[2 * hidden..].split_at(Self::SHAPE.qkv());
            self.bias.extend(high.iter().zip(low).map(|(high, low)| value(*high) + value(*low)));
        }
        self.phase = Phase::Projection(0);
        true
    }

    /// One block of a stream.
    fn multiply(&mut self, stream: usize, done: usize) -> bool {
        let Some(block) = self.weights[stream].front() else { return false };
        let blocks = self.plan.streams[stream];
        if done == 0 {
            self.rows.clear();
            self.rows.resize(blocks.count * blocks.rows, 0.0);
        }
        let first = blocks.first_row(done);
        let products = blocks.products(block, &self.operand);
        self.rows[first..].iter_mut().zip(products).for_each(|(row, product)| *row = rounded(product));
        self.weights[stream].pop();
        let is_last = done + 1 == blocks.count;
        self.phase = match (stream, is_last) {
            (0, false) => Phase::Projection(done + 1),
            (1, false) => Phase::Output(done + 1),
            (2, false) => Phase::UpGate(done + 1),
            (_, false) => Phase::Down(done + 1),
            (0, true) => self.end_projection(),
            (1, true) => {
                self.add_rows();
                self.operand = M::norm(&self.residual, &self.post_gamma);
                Phase::UpGate(0)
            }
            (2, true) => {
                let (gate, up) = self.rows.split_at(Self::SHAPE.intermediate);
                self.operand = gate.iter().zip(up).map(|(gate, up)| value(M::activation(*gate, *up))).collect();
                Phase::Down(0)
            }
            (_, true) => {
                self.add_rows();
                self.layer += 1;
                if self.layer < self.layers { Phase::Parameters } else { Phase::Result }
            }
        };
        true
    }

    fn add_rows(&mut self) {
        self.residual.iter_mut().zip(&self.rows).for_each(|(sum, row)| *sum = rounded(*sum + row));
    }

    /// Biases and RoPE.
    fn end_projection(&mut self) -> Phase {
        self.rows.iter_mut().zip(&self.bias).for_each(|(row, bias)| *row = rounded(*row + bias));
        let turns = Self::SHAPE.heads + Self::SHAPE.kv_heads;
        let (cosines, sines) = self.table[..HEAD_DIM].split_at(HEAD_DIM / 2);
        for head in self.rows.as_chunks_mut::<HEAD_DIM>().0.iter_mut().take(turns) {
            *head = rotate(head, cosines, sines);
        }
        self.operand.clear();
        Phase::Attention(0)
    }

    /// One KV head.
    fn attend(&mut self, kv_head: usize) -> bool {
        let Shape { heads, kv_heads, .. } = Self::SHAPE;
        let (Some(old), Some(kept)) = (self.cache_in.front(), self.cache_out[kv_head].free()) else { return false };
        let rows = self.rows.as_chunks::<HEAD_DIM>().0;
        let new = [rows[heads + kv_head], rows[heads + kv_heads + kv_head]];
        let halves = old.chunks_exact(CACHE_ELEMENTS).zip(kept.chunks_exact_mut(CACHE_ELEMENTS)).zip(new);
        let mut tables: Vec<Vec<Head>> = Vec::new();
        for ((old, kept), new) in halves {
            let used = self.position * 2 * HEAD_DIM;
            kept[..used].copy_from_slice(&old[..used]);
            for (bytes, element) in kept[used..].as_chunks_mut::<2>().0.iter_mut().zip(new) {
                *bytes = narrow(element).to_le_bytes();
            }
            let used = kept.chunks_exact(2 * HEAD_DIM).take(self.position + 1);
            tables.push(used.map(|row| head(elements(row))).collect());
        }
        let group = heads / kv_heads;
        for query in &rows[kv_head * group..(kv_head + 1) * group] {
            self.operand.extend(attention::attend(query, &tables[0], &tables[1]));
        }
        self.cache_in.pop();
        self.cache_out[kv_head].release();
        self.phase = if kv_head + 1 == kv_heads { Phase::Output(0) } else { Phase::Attention(kv_head + 1) };
        true
    }
}

impl<M: Model> CoreProgram for Chunk<M> {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        if self.drain(streams) || self.work() || self.fill(streams) { Step::Progress } else { Step::Waiting }
    }

    fn unfinished(&self) -> Option<String> {
        let blocks = |stream: usize| self.plan.streams[stream].count;
        let doing = match &self.phase {
            Phase::Start => None,
            Phase::Parameters => Some("waits for norms".to_owned()),
            Phase::Projection(done) => Some(format!("qkv: {done} of {} blocks", blocks(0))),
            Phase::Attention(done) => Some(format!("attention: {done} of {} KV heads", Self::SHAPE.kv_heads)),
            Phase::Output(done) => Some(format!("output projection: {done} of {} blocks", blocks(1))),
            Phase::UpGate(done) => Some(format!("gate and up: {done} of {} blocks", blocks(2))),
            Phase::Down(done) => Some(format!("down projection: {done} of {} blocks", blocks(3))),
            Phase::Result => Some("the residual stream is not written".to_owned()),
            Phase::Stuck(reason) => Some(reason.clone()),
        };
        let doing = doing.map(|doing| format!("layer {}: {doing}", self.layer));
        let inputs = [&self.parameters, &self.rope, &self.hidden_in, &self.cache_in];
        let held: usize = self.weights.iter().chain(inputs).map(ObjectFifo::len).sum();
        let held = (held > 0).then(|| format!("{held} objects that no worker has taken"));
        let left = self.cache_out.iter().map(ObjectFifo::len).sum::<usize>() + self.hidden_out.len();
        let left = (left > 0).then(|| format!("{left} objects that have not left"));
        let all: Vec<String> = [doing, held, left].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// The FIFOs of the design are the program's own.
    fn input_buffer_bytes(&self, _input: StreamKey) -> usize {
        0
    }
}
