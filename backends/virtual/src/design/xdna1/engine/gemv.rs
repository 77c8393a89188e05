//! A GEMV tile: multiplies its rows, keeps the residual stream.

use crate::design::xdna1::fifo::ObjectFifo;
use crate::design::xdna1::shape::{GROUP_ROWS, LOGITS, Model, Shape, TILES};
use crate::design::xdna1::vector::{LANES, add_products, dot, elements, narrow, reduce, rounded, value, widen};
use std::marker::PhantomData;

/// Most rows of a block of the down projection.
const DOWN_ROWS_MAX: usize = 4;

/// The FIFOs that a tile holds an end of.
pub(super) struct Ports<'a> {
    pub(super) weights: &'a mut ObjectFifo<u8>,
    pub(super) broadcast: &'a mut ObjectFifo<u16>,
    pub(super) slice: &'a mut ObjectFifo<u16>,
    /// Hidden state in bf16 (SmolLM), logits in f32 (Qwen); only where the tile has such an output.
    pub(super) result: Option<&'a mut ObjectFifo<u8>>,
}

/// What the tile does next. Numbers are blocks done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Embedding,
    Parameters,
    Projection(usize),
    Attended,
    Output(usize),
    AttentionRows,
    UpGate(usize),
    Activations,
    Down(usize),
    MlpRows,
    FinalNorm,
    Head(usize),
}

/// State of a tile.
#[derive(Debug)]
pub(super) struct Gemv<M> {
    tile: usize,
    layers: usize,
    has_head: bool,
    layer: usize,
    phase: Phase,
    residual: Vec<f32>,
    /// What the rows of the present projection are multiplied with.
    operand: Vec<f32>,
    post_gamma: Vec<f32>,
    bias: Vec<f32>,
    gate: [f32; GROUP_ROWS],
    up: [f32; GROUP_ROWS],
    /// Sums of rows whose columns come in several blocks.
    sums: [[f32; LANES]; DOWN_ROWS_MAX],
    model: PhantomData<M>,
}

impl<M: Model> Gemv<M> {
    pub(super) fn new(tile: usize, layers: usize, has_head: bool) -> Self {
        Self {
            tile,
            layers,
            has_head,
            layer: 0,
            phase: Phase::Embedding,
            residual: Vec::new(),
            operand: Vec::new(),
            post_gamma: Vec::new(),
            bias: Vec::new(),
            gate: [0.0; GROUP_ROWS],
            up: [0.0; GROUP_ROWS],
            sums: [[0.0; LANES]; DOWN_ROWS_MAX],
            model: PhantomData,
        }
    }

    const SHAPE: Shape = M::SHAPE;

    /// What the tile is in the middle of.
    pub(super) fn unfinished(&self) -> Option<String> {
        let shape = &Self::SHAPE;
        let doing = match self.phase {
            Phase::Embedding => return None,
            Phase::Parameters => "waits for the layer's norms".to_owned(),
            Phase::Projection(done) => format!("qkv: {done} of {} blocks", shape.qkv_blocks()),
            Phase::Attended => "waits for the attended values".to_owned(),
            Phase::Output(done) => format!("output projection: {done} of {} blocks", shape.out_blocks(self.tile)),
            Phase::AttentionRows => "waits for the rows of the output projection".to_owned(),
            Phase::UpGate(done) => format!("gate and up: {done} of {} blocks", shape.mlp_blocks(self.tile)),
            Phase::Activations => "waits for the activations".to_owned(),
            Phase::Down(done) => format!("down projection: {done} of {} blocks", shape.down_blocks(self.tile)),
            Phase::MlpRows => "waits for the rows of the down projection".to_owned(),
            Phase::FinalNorm => "waits for the final norm".to_owned(),
            Phase::Head(done) => format!("head: {done} of {} blocks", shape.tail_blocks(self.tile) - 1),
        };
        Some(format!("GEMV {} in layer {}: {doing}", self.tile, self.layer))
    }

    /// Takes one object, where one is there that is wanted.
    pub(super) fn step(&mut self, ports: &mut Ports<'_>) -> bool {
        match self.phase {
            Phase::Embedding | Phase::Attended | Phase::AttentionRows | Phase::Activations | Phase::MlpRows => {
                let Some(object) = ports.broadcast.front() else { return false };
                self.take_broadcast(object);
                ports.broadcast.pop();
            }
            Phase::Parameters => {
                let Some(block) = ports.weights.front() else { return false };
                self.take_parameters(block);
                ports.weights.pop();
            }
            Phase::Projection(_) | Phase::Output(_) | Phase::UpGate(_) | Phase::Down(_) => {
                let (Some(block), Some(slice)) = (ports.weights.front(), ports.slice.free()) else { return false };
                if self.multiply(block, slice) {
                    ports.slice.release();
                }
                ports.weights.pop();
            }
            Phase::FinalNorm => return self.take_final_norm(ports),
            Phase::Head(done) => return self.multiply_head(done, ports),
        }
        true
    }

    fn take_broadcast(&mut self, object: &[u16]) {
        match self.phase {
            Phase::Embedding => {
                self.residual = widen(&object[..Self::SHAPE.hidden]);
                (self.layer, self.phase) = (0, self.next_layer(0));
            }
            Phase::Attended => {
                self.operand = widen(&object[..Self::SHAPE.hidden]);
                self.phase = Phase::Output(0);
            }
            Phase::AttentionRows => {
                self.add_rows(object);
                self.operand = M::norm(&self.residual, &self.post_gamma);
                self.phase = Phase::UpGate(0);
            }
            Phase::Activations => {
                self.operand = widen(object);
                self.phase = Phase::Down(0);
            }
            _ => {
                self.add_rows(object);
                self.layer += 1;
                self.phase = self.next_layer(self.layer);
            }
        }
    }

    fn next_layer(&self, layer: usize) -> Phase {
        let has_tail = !Self::SHAPE.has_head() || self.has_head;
        match layer < self.layers {
            true => Phase::Parameters,
            false if has_tail => Phase::FinalNorm,
            // The first tile says that the last round is over.
            false if self.tile == 0 => Phase::FinalNorm,
            false => Phase::Embedding,
        }
    }

    /// Adds the rows of all tiles to the residual stream.
    fn add_rows(&mut self, object: &[u16]) {
        for (tile, rows) in object.chunks_exact(Self::SHAPE.slice).enumerate().take(TILES) {
            let (start, count) = (Self::SHAPE.out_start(tile), Self::SHAPE.out_rows[tile]);
            let residual = &mut self.residual[start..start + count];
            residual.iter_mut().zip(rows).for_each(|(sum, row)| *sum = rounded(*sum + value(*row)));
        }
    }

    fn take_parameters(&mut self, block: &[u8]) {
        let Shape { hidden, qkv_rows, has_bias, .. } = Self::SHAPE;
        let parameters: Vec<u16> = elements(block).collect();
        self.operand = M::norm(&self.residual, &widen(&parameters[..hidden]));
        self.post_gamma = widen(&parameters[hidden..2 * hidden]);
        let biases = parameters[2 * hidden..].as_chunks::<2>().0.iter().take(qkv_rows).filter(|_| has_bias);
        self.bias.clear();
        self.bias.extend(biases.map(|[low, high]| f32::from_bits(u32::from(*low) | u32::from(*high) << 16)));
        self.phase = Phase::Projection(0);
    }

    /// Multiplies a block; whether it was the last of its slice.
    fn multiply(&mut self, block: &[u8], slice: &mut [u16]) -> bool {
        let shape = &Self::SHAPE;
        let rows = shape.block_rows();
        let products = |operand: &[f32]| -> Vec<f32> {
            block.chunks_exact(2 * shape.hidden).map(|row| rounded(dot(row, operand))).collect()
        };
        let (done, blocks) = match self.phase {
            Phase::Projection(done) => {
                for (row, product) in (rows * done..).zip(products(&self.operand)) {
                    slice[row] = narrow(self.bias.get(row).map_or(product, |bias| product + bias));
                }
                (done + 1, shape.qkv_blocks())
            }
            Phase::Output(done) => {
                for (row, product) in (rows * done..).zip(products(&self.operand)) {
                    slice[row] = narrow(product);
                }
                (done + 1, shape.out_blocks(self.tile))
            }
            Phase::UpGate(done) => {
                self.up_gate(done, &products(&self.operand), slice);
                (done + 1, shape.mlp_blocks(self.tile))
            }
            Phase::Down(done) => {
                self.down(done, block, slice);
                (done + 1, shape.down_blocks(self.tile))
            }
            _ => return false,
        };
        let is_last = done == blocks;
        self.phase = match self.phase {
            Phase::Projection(_) if is_last => Phase::Attended,
            Phase::Projection(_) => Phase::Projection(done),
            Phase::Output(_) if is_last => Phase::AttentionRows,
            Phase::Output(_) => Phase::Output(done),
            Phase::UpGate(_) if is_last => Phase::Activations,
            Phase::UpGate(_) => Phase::UpGate(done),
            _ if is_last => Phase::MlpRows,
            _ => Phase::Down(done),
        };
        is_last
    }

    /// Gate rows of a group, then its up rows.
    fn up_gate(&mut self, done: usize, products: &[f32], slice: &mut [u16]) {
        let shape = &Self::SHAPE;
        let half = GROUP_ROWS / shape.block_rows();
        let (group, part) = (done / (2 * half), done % (2 * half));
        let of = if part < half { &mut self.gate } else { &mut self.up };
        let first = part % half * shape.block_rows();
        of[first..].iter_mut().zip(products).for_each(|(to, product)| *to = *product);
        if part + 1 == 2 * half {
            let rows = &mut slice[group * GROUP_ROWS..];
            rows.iter_mut()
                .zip(self.gate.iter().zip(&self.up))
                .for_each(|(row, (gate, up))| *row = M::activation(*gate, *up));
        }
        // What another round left past the rows would meet zeros of the down projection, and NaN · 0 is NaN.
        slice[shape.mlp_rows[self.tile]..].fill(0);
    }

    fn down(&mut self, done: usize, block: &[u8], slice: &mut [u16]) {
        let shape = &Self::SHAPE;
        let (first, chunk) = (done / shape.down_chunks() * shape.down_rows(), done % shape.down_chunks());
        if chunk == 0 {
            self.sums = [[0.0; LANES]; DOWN_ROWS_MAX];
        }
        let operand = &self.operand[chunk * shape.down_width..(chunk + 1) * shape.down_width];
        for (sums, row) in self.sums.iter_mut().zip(block.chunks_exact(2 * shape.down_width)) {
            add_products(sums, row, operand);
        }
        if chunk + 1 == shape.down_chunks() {
            let sums = self.sums.iter().take(shape.down_rows());
            slice[first..].iter_mut().zip(sums).for_each(|(row, sums)| *row = narrow(reduce(*sums)));
        }
    }

    /// Final norm: the end of SmolLM's token, the operand of Qwen's head. Without a head the first Qwen tile sends an
    /// object of zeros as its end signal; no block comes for it.
    fn take_final_norm(&mut self, ports: &mut Ports<'_>) -> bool {
        if Self::SHAPE.has_head() && !self.has_head {
            let Some(signal) = ports.result.as_mut().and_then(|result| result.free()) else { return false };
            signal.fill(0);
            ports.result.iter_mut().for_each(|result| result.release());
            self.phase = Phase::Embedding;
            return true;
        }
        let Some(block) = ports.weights.front() else { return false };
        if Self::SHAPE.has_head() {
            let gamma: Vec<f32> = elements(block).take(Self::SHAPE.hidden).map(value).collect();
            self.operand = M::final_norm(&self.residual, &gamma);
            self.phase = Phase::Head(0);
        } else {
            if let Some(result) = &mut ports.result {
                let Some(hidden) = result.free() else { return false };
                let gamma: Vec<f32> = elements(block).take(Self::SHAPE.hidden).map(value).collect();
                let normed = M::final_norm(&self.residual, &gamma);
                for (bytes, element) in hidden.as_chunks_mut::<2>().0.iter_mut().zip(normed) {
                    *bytes = narrow(element).to_le_bytes();
                }
                result.release();
            }
            self.phase = Phase::Embedding;
        }
        ports.weights.pop();
        true
    }

    fn multiply_head(&mut self, done: usize, ports: &mut Ports<'_>) -> bool {
        let shape = &Self::SHAPE;
        let Some(result) = &mut ports.result else { return false };
        let (Some(block), Some(logits)) = (ports.weights.front(), result.free()) else { return false };
        let first = done * shape.block_rows() % LOGITS;
        let logits = logits.as_chunks_mut::<4>().0;
        for (logit, row) in logits[first..].iter_mut().zip(block.chunks_exact(2 * shape.hidden)) {
            *logit = dot(row, &self.operand).to_le_bytes();
        }
        if first + shape.block_rows() == LOGITS {
            result.release();
        }
        ports.weights.pop();
        let is_last = done + 1 == shape.head_rows[self.tile] / shape.block_rows();
        self.phase = if is_last { Phase::Embedding } else { Phase::Head(done + 1) };
        true
    }
}
