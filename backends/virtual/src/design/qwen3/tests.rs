//! The program behind the kit's and the published control code, against the same arithmetic in f64.

use super::math::{narrow, rounded, widen};
use super::*;
use crate::array::program::ProgramDescription;
use crate::array::{DeviceMemory, ImageId, Loads, Partition, Surroundings, Trouble};
use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use crate::golden::{CAPTURED_LAYERS, shared_golden};
use crate::kit::{image, qwen3_head_code, qwen3_layer_code};
use crate::packet::Arguments;
use npuhal_amdxdna::format::txn::{OpKind, Stream};
use std::cell::RefCell;

/// Distance of the arguments' addresses.
const APART: u64 = 1 << 28;
const POSITIONS: u32 = 48;

/// Buffers as arguments.
struct Buffers(RefCell<Vec<Vec<u8>>>);

impl Buffers {
    fn range(&self, address: u64, len: usize) -> Result<(usize, std::ops::Range<usize>), Diagnosis> {
        let (argument, at) = ((address / APART - 1) as usize, (address % APART) as usize);
        match self.0.borrow().get(argument).is_some_and(|buffer| at + len <= buffer.len()) {
            true => Ok((argument, at..at + len)),
            false => Err(Diagnosis::new(DiagnosisKind::OutsideArguments, format!("{len} bytes at {address:#x}"))),
        }
    }
}

impl DeviceMemory for Buffers {
    fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), Diagnosis> {
        let (argument, range) = self.range(address, dst.len())?;
        dst.copy_from_slice(&self.0.borrow()[argument][range]);
        Ok(())
    }

    fn write(&self, address: u64, src: &[u8]) -> Result<(), Diagnosis> {
        let (argument, range) = self.range(address, src.len())?;
        self.0.borrow_mut()[argument][range].copy_from_slice(src);
        Ok(())
    }

    fn read_code(&self, _address: u64, _len_bytes: u64) -> Result<Vec<u8>, Diagnosis> {
        Err(Diagnosis::new(DiagnosisKind::BadControlCode, "no image is expected"))
    }
}

struct Bench {
    partition: Partition,
    log: DiagnosisLog,
}

impl Bench {
    fn new(dimensions: &Dimensions) -> Self {
        let program = ProgramDescription { id: QWEN3, dimensions: dimensions.to_words().unwrap() };
        let mut bench = Self { partition: Partition::new(8), log: DiagnosisLog::default() };
        let image = image(8, &program).unwrap();
        let memory = Buffers(RefCell::default());
        bench.with(&memory, |partition, around| partition.load_image(ImageId::Unit(0), image, None, around)).unwrap();
        bench
    }

    fn with<T>(
        &mut self,
        memory: &dyn DeviceMemory,
        act: impl FnOnce(&mut Partition, &mut Surroundings<'_>) -> T,
    ) -> T {
        let programs = CoreProgramTable::builtin();
        let mut surroundings =
            Surroundings { memory, programs: &programs, log: &self.log, loads: &mut Loads::default() };
        act(&mut self.partition, &mut surroundings)
    }

    /// Runs code on buffers; everything that was wrong, as text.
    fn run(&mut self, code: &[u8], buffers: &mut Vec<Vec<u8>>) -> Vec<String> {
        let memory = Buffers(RefCell::new(std::mem::take(buffers)));
        let addresses = (1..).map(|argument| argument * APART).take(memory.0.borrow().len()).collect();
        let arguments = Arguments::Packet(addresses);
        let end = self.with(&memory, |partition, around| partition.run(code, &arguments, true, around));
        *buffers = memory.0.into_inner();
        let mut wrong: Vec<String> = self.log.take().iter().map(ToString::to_string).collect();
        if let Err(Trouble::Fault(diagnosis) | Trouble::Hang(diagnosis)) = end {
            wrong.insert(0, diagnosis.to_string());
        }
        wrong
    }
}

/// Numbers that look random (a linear congruence).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Uniform in -1 to 1, as bf16 holds it.
    fn signed(&mut self) -> f32 {
        rounded(self.next() as f32 / (1u32 << 30) as f32 - 1.0)
    }

    fn list(&mut self, len: usize, scale: f32, offset: f32) -> Vec<f32> {
        (0..len).map(|_| rounded(offset + scale * self.signed())).collect()
    }
}

/// A matrix as numbers and as tiles in the order in which groups arrive.
struct Matrix {
    columns: usize,
    values: Vec<f64>,
    groups: Vec<Vec<u8>>,
}

impl Matrix {
    fn new(numbers: &mut Numbers, rows: usize, columns: usize) -> Self {
        let mut values = vec![0.0; rows * columns];
        let spread = 1.0 / (columns as f32).sqrt();
        let mut tile = |first_row: usize, first_column: usize, values: &mut [f64]| {
            let mut bytes = vec![0u8; TILE_BYTES];
            for row in 0..32 {
                for quant in 0..8 {
                    let (scale, index) = (rounded(spread * (0.2 + 0.1 * numbers.signed())), 32 * quant + row);
                    let zero = rounded(-7.5 * scale);
                    bytes[2 * index..2 * index + 2].copy_from_slice(&math::to_bf16(scale).to_le_bytes());
                    bytes[512 + 2 * index..514 + 2 * index].copy_from_slice(&math::to_bf16(zero).to_le_bytes());
                    for column in 0..32 {
                        let code = numbers.next() % 16;
                        let at = 1024 + (row / 16 * 8 + quant) * 256 + 8 * column + row % 16 / 2;
                        bytes[at] |= (code << (row % 2 * 4)) as u8;
                        values[(first_row + row) * columns + first_column + 32 * quant + column] =
                            f64::from(code) * f64::from(scale) + f64::from(zero);
                    }
                }
            }
            bytes
        };
        let groups = (0..rows / 64).map(|group| {
            let tiles = (0..2 * columns / 256).map(|i| tile(64 * group + i % 2 * 32, i / 2 * 256, &mut values));
            tiles.collect::<Vec<_>>().concat()
        });
        let groups = groups.collect();
        Self { columns, values, groups }
    }

    fn times(&self, operand: &[f64]) -> Vec<f64> {
        let row = |row: &[f64]| row.iter().zip(operand).map(|(weight, x)| weight * x).sum();
        self.values.chunks_exact(self.columns).map(row).collect()
    }
}

struct Weights {
    dimensions: Dimensions,
    projections: Matrix,
    output: Matrix,
    up: Matrix,
    gate: Matrix,
    down: Matrix,
    norms: Vec<f32>,
    head_norms: Vec<f32>,
}

impl Weights {
    fn new(dimensions: Dimensions, numbers: &mut Numbers) -> Self {
        let Dimensions { hidden, intermediate, .. } = dimensions;
        let query = dimensions.query_width();
        Self {
            dimensions,
            projections: Matrix::new(numbers, query + 2 * dimensions.kv_width(), hidden),
            output: Matrix::new(numbers, hidden, query),
            up: Matrix::new(numbers, intermediate, hidden),
            gate: Matrix::new(numbers, intermediate, hidden),
            down: Matrix::new(numbers, hidden, intermediate),
            norms: numbers.list(2 * hidden, 0.2, 1.0),
            head_norms: numbers.list(2 * HEAD_DIM, 0.2, 1.0),
        }
    }

    /// The buffer of weights.
    fn packed(&self) -> Vec<u8> {
        let mut packed = [self.projections.groups.concat(), self.output.groups.concat()].concat();
        for (up, gate) in self.up.groups.chunks(8).zip(self.gate.groups.chunks(8)) {
            packed.extend([up.concat(), gate.concat()].concat());
        }
        packed.extend(self.down.groups.concat());
        packed
    }

    /// The layer in f64: residual stream, new key and new value. `cache`: keys and values of earlier positions.
    fn forward(&self, x: &[f64], position: usize, cache: &[(Vec<f64>, Vec<f64>)]) -> Forward {
        let d = &self.dimensions;
        let (query_width, kv_width) = (d.query_width(), d.kv_width());
        let projected = self.projections.times(&norm(x, &self.norms[..d.hidden], d.norm_epsilon));
        let (query, rest) = projected.split_at(query_width);
        let (key, value) = rest.split_at(kv_width);
        let turn = |heads: &[f64], weights: &[f32]| -> Vec<f64> {
            let head = |head: &[f64]| turned(&norm(head, weights, d.norm_epsilon), position);
            heads.chunks_exact(HEAD_DIM).flat_map(head).collect()
        };
        let query = turn(query, &self.head_norms[..HEAD_DIM]);
        let key = turn(key, &self.head_norms[HEAD_DIM..]);
        let all: Vec<_> = cache.iter().cloned().chain([(key.clone(), value.to_vec())]).collect();
        let attention: Vec<f64> = (0..d.heads).flat_map(|head| attend(&query, head, d, &all)).collect();
        let middle: Vec<f64> = x.iter().zip(self.output.times(&attention)).map(|(x, y)| x + y).collect();
        let normed = norm(&middle, &self.norms[d.hidden..], d.norm_epsilon);
        let gate = self.gate.times(&normed);
        let product: Vec<f64> =
            self.up.times(&normed).iter().zip(gate).map(|(up, gate)| up * gate / (1.0 + (-gate).exp())).collect();
        let out = middle.iter().zip(self.down.times(&product)).map(|(x, y)| x + y).collect();
        Forward { out, key, value: value.to_vec() }
    }

    /// Arguments of the layer kernel.
    fn buffers(&self, cache_bytes: usize) -> Vec<Vec<u8>> {
        vec![Vec::new(), self.packed(), narrow(&self.norms), Vec::new(), vec![0; cache_bytes]]
    }

    fn rotation(&self, position: usize) -> Vec<u8> {
        let angles = (0..HEAD_DIM / 2).map(|pair| angle(pair, position));
        let cosines = angles.clone().map(|angle| angle.cos() as f32);
        let all: Vec<f32> =
            cosines.chain(angles.map(|angle| angle.sin() as f32)).chain(self.head_norms.iter().copied()).collect();
        narrow(&all)
    }
}

struct Forward {
    out: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
}

fn norm(values: &[f64], weights: &[f32], epsilon: f32) -> Vec<f64> {
    let mean = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
    let factor = 1.0 / (mean + f64::from(epsilon)).sqrt();
    values.iter().zip(weights).map(|(value, weight)| value * factor * f64::from(*weight)).collect()
}

fn angle(pair: usize, position: usize) -> f64 {
    1e6f64.powf(-(pair as f64) / 64.0) * position as f64
}

fn turned(head: &[f64], position: usize) -> Vec<f64> {
    let half = HEAD_DIM / 2;
    let element = |i: usize| {
        let (sin, cos) = angle(i % half, position).sin_cos();
        if i < half { head[i] * cos - head[i + half] * sin } else { head[i] * cos + head[i - half] * sin }
    };
    (0..HEAD_DIM).map(element).collect()
}

fn attend(query: &[f64], head: usize, d: &Dimensions, all: &[(Vec<f64>, Vec<f64>)]) -> Vec<f64> {
    let kv = head / (d.heads / d.kv_heads) * HEAD_DIM;
    let query = &query[head * HEAD_DIM..(head + 1) * HEAD_DIM];
    let score = |key: &[f64]| (key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>() / (HEAD_DIM as f64).sqrt()).exp();
    let weights: Vec<f64> = all.iter().map(|(key, _)| score(&key[kv..kv + HEAD_DIM])).collect();
    let total: f64 = weights.iter().sum();
    let element = |i| weights.iter().zip(all).map(|(weight, (_, value))| weight * value[kv + i]).sum::<f64>() / total;
    (0..HEAD_DIM).map(element).collect()
}

fn cosine(found: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let dot = |a: &mut dyn Iterator<Item = (f64, f64)>| a.map(|(a, b)| a * b).sum::<f64>();
    let found: Vec<f64> = found.iter().map(|value| f64::from(*value)).collect();
    let both = dot(&mut found.iter().copied().zip(wanted.iter().copied()));
    let squares = dot(&mut found.iter().map(|a| (*a, *a))) * dot(&mut wanted.iter().map(|a| (*a, *a)));
    both / squares.sqrt()
}

fn small() -> Dimensions {
    Dimensions { hidden: 256, heads: 4, kv_heads: 2, intermediate: 512, vocab: 192, norm_epsilon: 1e-6 }
}

fn cache_bytes(dimensions: &Dimensions, positions: u32) -> usize {
    4 * positions as usize * dimensions.cache_row_bytes()
}

fn code_of(dimensions: &Dimensions, context: u32) -> Stream {
    qwen3_layer_code(dimensions, POSITIONS, context).unwrap()
}

/// Rows of the cache at `position`: keys and values of all heads.
fn cached(cache: &[u8], dimensions: &Dimensions, positions: usize, position: usize) -> (Vec<f32>, Vec<f32>) {
    let row = dimensions.cache_row_bytes();
    let region = |region: usize| widen(&cache[(region * positions + position) * row..][..row]);
    ([region(0), region(2)].concat(), [region(1), region(3)].concat())
}

#[test]
fn a_layer_is_the_reference_over_a_growing_context() {
    let wide = Dimensions { hidden: 512, heads: 8, kv_heads: 4, intermediate: 1536, ..small() };
    for (dimensions, contexts) in [(small(), POSITIONS), (wide, 3)] {
        let mut numbers = Numbers(1);
        let weights = Weights::new(dimensions, &mut numbers);
        let mut bench = Bench::new(&dimensions);
        let mut buffers = weights.buffers(cache_bytes(&dimensions, POSITIONS));
        // What the cache held before must not matter, whatever it is.
        buffers[4].fill(0xFF);
        let mut cache = Vec::new();
        for context in 1..=contexts {
            let position = context as usize - 1;
            let x = numbers.list(dimensions.hidden, 1.0, 0.0);
            (buffers[0], buffers[3]) = (narrow(&x), weights.rotation(position));
            let code = code_of(&dimensions, context).encode().unwrap();
            assert_eq!(bench.run(&code, &mut buffers), Vec::<String>::new(), "context {context}");
            let x: Vec<f64> = x.into_iter().map(f64::from).collect();
            let wanted = weights.forward(&x, position, &cache);
            let (key, value) = cached(&buffers[4], &dimensions, POSITIONS as usize, position);
            for (what, found, wanted) in [
                ("residual stream", &widen(&buffers[0]), &wanted.out),
                ("key", &key, &wanted.key),
                ("value", &value, &wanted.value),
            ] {
                let cosine = cosine(found, wanted);
                assert!(cosine > 0.9999, "{what} at {context}: {cosine}");
            }
            cache.push((wanted.key, wanted.value));
        }
    }
}

#[test]
fn the_head_is_the_reference_and_takes_turns_with_layers() {
    // More logits than the streams' buffers hold.
    let dimensions = Dimensions { vocab: 16_448, ..small() };
    let mut numbers = Numbers(2);
    let matrix = Matrix::new(&mut numbers, dimensions.vocab, dimensions.hidden);
    let weights = Weights::new(dimensions, &mut numbers);
    let mut bench = Bench::new(&dimensions);
    for round in 0..2 {
        let x = numbers.list(dimensions.hidden, 1.0, 0.0);
        let mut buffers = weights.buffers(cache_bytes(&dimensions, POSITIONS));
        (buffers[0], buffers[3]) = (narrow(&x), weights.rotation(0));
        assert_eq!(bench.run(&code_of(&dimensions, 1).encode().unwrap(), &mut buffers), Vec::<String>::new());

        let norm_weights = numbers.list(dimensions.hidden, 0.2, 1.0);
        let mut buffers =
            vec![vec![0; 2 * dimensions.vocab], matrix.groups.concat(), narrow(&x), narrow(&norm_weights)];
        let code = qwen3_head_code(&dimensions).unwrap().encode().unwrap();
        assert_eq!(bench.run(&code, &mut buffers), Vec::<String>::new(), "round {round}");
        let x: Vec<f64> = x.into_iter().map(f64::from).collect();
        let wanted = matrix.times(&norm(&x, &norm_weights, dimensions.norm_epsilon));
        let cosine = cosine(&widen(&buffers[0]), &wanted);
        assert!(cosine > 0.9999, "{cosine}");
    }
}

/// What is wrong with a run of a layer at a context of 17 whose code was changed.
fn verdict(change: impl FnOnce(&mut Stream)) -> (Vec<String>, Vec<Vec<u8>>) {
    let dimensions = small();
    let mut numbers = Numbers(3);
    let weights = Weights::new(dimensions, &mut numbers);
    let mut buffers = weights.buffers(cache_bytes(&dimensions, POSITIONS));
    buffers[0] = narrow(&numbers.list(dimensions.hidden, 1.0, 0.0));
    buffers[3] = weights.rotation(16);
    buffers[4] = narrow(&numbers.list(cache_bytes(&dimensions, POSITIONS) / 2, 1.0, 0.0));
    let mut code = code_of(&dimensions, 17);
    change(&mut code);
    let wrong = Bench::new(&dimensions).run(&code.encode().unwrap(), &mut buffers);
    (wrong, buffers)
}

/// The operations that write `old` to a register, in order.
fn rewrite(code: &mut Stream, which: usize, old: u32, new: u32) {
    let mut writes = code.ops.iter_mut().filter_map(|op| match &mut op.kind {
        OpKind::Write { value, .. } if *value == old => Some(value),
        _ => None,
    });
    *writes.nth(which).unwrap() = new;
}

#[test]
fn wrong_words_of_control_code_are_found() {
    let (wrong, right) = verdict(|_| ());
    assert_eq!(wrong, Vec::<String>::new());

    let fails = |change: &dyn Fn(&mut Stream), reason: &str| {
        let (wrong, _) = verdict(change);
        assert!(wrong.iter().any(|line| line.contains(reason)), "{reason}: {wrong:#?}");
    };
    let context = |context| move |code: &mut Stream| (0..8).for_each(|_| rewrite(code, 0, 17, context));
    fails(&|code| rewrite(code, 3, 17, 18), "the attention cores hold different context lengths: [17, 17, 17, 18, 17");
    fails(&context(0), "no context length was written");
    // A block too few: the cores wait for it. A block too many: nobody takes it.
    fails(&context(33), "2 and 2 of 3 blocks of the cache for a context of 33");
    fails(&context(16), "bytes are left in the stream of column 3");
    // Cores that disagree about the mode, or do not know it, do not start.
    fails(&|code| rewrite(code, 4, 1, 2), "mode 2 in core (0, 4) and 1 in the hub");
    fails(&|code| rewrite(code, 32, 1, 3), "mode 3 in the hub; wanted 1 (layer) or 2 (head)");
    // The right number of blocks for another context: other rows are masked.
    let (wrong, other) = verdict(context(18));
    assert_eq!(wrong, Vec::<String>::new());
    assert_ne!(other[0], right[0]);
}

#[test]
fn swapped_tiles_and_stale_rows_change_the_result() {
    let (_, right) = verdict(|_| ());
    let swapped = |code: &mut Stream| {
        let mut offsets = code.ops.iter_mut().filter_map(|op| match &mut op.kind {
            OpKind::DdrPatch(patch) if patch.argument == 1 => Some(&mut patch.offset),
            _ => None,
        });
        let (first, second) = (offsets.next().unwrap(), offsets.next().unwrap());
        std::mem::swap(first, second);
    };
    let (wrong, other) = verdict(swapped);
    assert!(wrong.is_empty() && other[0] != right[0]);
    // New rows that go to a later position leave a stale one at their own.
    let (wrong, other) = verdict(|code| {
        let writes = code.ops.iter_mut().filter_map(|op| match &mut op.kind {
            OpKind::DdrPatch(patch) if patch.argument == 4 => Some(&mut patch.offset),
            _ => None,
        });
        writes.take(1).for_each(|offset| *offset += 256);
    });
    assert!(wrong.is_empty() && other[0] != right[0]);
}

#[test]
fn published_streams_at_published_dimensions() {
    let test = "published_streams_at_published_dimensions";
    let Some(folder) = shared_golden(test, CAPTURED_LAYERS) else { return };
    const REGION_ROWS: usize = 4096;
    let dimensions =
        Dimensions { hidden: 1024, heads: 16, kv_heads: 8, intermediate: 3072, vocab: 151_936, norm_epsilon: 1e-6 };
    let mut numbers = Numbers(4);
    let weights = Weights::new(dimensions, &mut numbers);
    let mut bench = Bench::new(&dimensions);
    let mut buffers = weights.buffers(cache_bytes(&dimensions, REGION_ROWS as u32));
    let row = dimensions.cache_row_bytes();
    for region in buffers[4].chunks_exact_mut(REGION_ROWS * row) {
        region[..256 * row].copy_from_slice(&narrow(&numbers.list(256 * row / 2, 1.0, 0.0)));
    }
    for context in [1, 2, 16, 32, 256] {
        let mut code = std::fs::read(folder.join(format!("layer_L{context}.bin"))).unwrap();
        code[..8].copy_from_slice(&[0, 1, 4, 6, 8, 1, 0, 0]);
        let x = numbers.list(dimensions.hidden, 1.0, 0.0);
        (buffers[0], buffers[3]) = (narrow(&x), weights.rotation(context - 1));
        let widened = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        let cache = (0..context - 1).map(|position| {
            let (key, value) = cached(&buffers[4], &dimensions, REGION_ROWS, position);
            (widened(key), widened(value))
        });
        let cache: Vec<_> = cache.collect();
        assert_eq!(bench.run(&code, &mut buffers), Vec::<String>::new(), "context {context}");
        let wanted = weights.forward(&widened(x), context - 1, &cache);
        let cosine = cosine(&widen(&buffers[0]), &wanted.out);
        assert!(cosine > 0.9999, "context {context}: {cosine}");
    }
}
