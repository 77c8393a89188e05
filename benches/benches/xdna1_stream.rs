//! Packing of the SmolLM engine's weight streams: bytes a second, beside a plain copy of as many bytes.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use npuhal_xdna1::layout::SMOLLM;
use npuhal_xdna1::stream::EngineStream;
use npuhal_xdna1::weights::copy_side_by_side;
use npuhal_xdna1::{EngineWeights, Matrix, Vector};
use std::hint::black_box;
use std::num::NonZeroUsize;

/// A model in memory, laid out as a package's files are: one array a matrix.
struct Memory {
    matrices: Vec<[Vec<u8>; 4]>,
}

impl Memory {
    fn new() -> Self {
        let shape = SMOLLM.shape();
        let (hidden, wide) = (shape.hidden_size, shape.intermediate_size);
        let sizes = [shape.qkv_rows() * hidden, hidden * hidden, 2 * wide * hidden, hidden * wide];
        let fill = |layer: usize| sizes.map(|size| (0..2 * size).map(|at| (at * 31 + layer) as u8).collect());
        Self { matrices: (0..shape.layers).map(fill).collect() }
    }

    fn bytes(&self, matrix: Matrix) -> (&[u8], usize) {
        let shape = SMOLLM.shape();
        match matrix {
            Matrix::Qkv(layer) => (&self.matrices[layer][0], shape.hidden_size),
            Matrix::OProj(layer) => (&self.matrices[layer][1], shape.hidden_size),
            Matrix::GateUp(layer) => (&self.matrices[layer][2], shape.hidden_size),
            Matrix::Down(layer) => (&self.matrices[layer][3], shape.intermediate_size),
            Matrix::Head => (&[], 0),
        }
    }
}

impl EngineWeights for Memory {
    fn copy_rows(&self, matrix: Matrix, first: usize, rows: usize, out: &mut [u8]) {
        let (bytes, cols) = self.bytes(matrix);
        copy_side_by_side(&bytes[2 * first * cols..2 * (first + rows) * cols], out);
    }

    fn copy_columns(&self, matrix: Matrix, row: usize, first: usize, columns: usize, out: &mut [u8]) {
        let (bytes, cols) = self.bytes(matrix);
        out.copy_from_slice(&bytes[2 * (row * cols + first)..2 * (row * cols + first + columns)]);
    }

    fn copy_gamma(&self, _: Vector, out: &mut [u8]) {
        out.fill(1);
    }

    fn copy_bias(&self, _: usize, _: usize, out: &mut [f32]) {
        out.fill(1.0);
    }
}

fn pack(criterion: &mut Criterion) {
    let memory = Memory::new();
    let layers = SMOLLM.shape().layers;
    let stream = EngineStream::new(&SMOLLM, &memory, layers);
    let mut out = vec![0u8; stream.len_bytes()];
    let source = vec![1u8; out.len()];
    let mut group = criterion.benchmark_group("xdna1 stream");
    group.sample_size(10).throughput(Throughput::Bytes(out.len() as u64));
    group.bench_function("copy", |bencher| bencher.iter(|| black_box(&mut out).copy_from_slice(black_box(&source))));
    for threads in [1, std::thread::available_parallelism().map_or(1, NonZeroUsize::get)] {
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        group.bench_function(format!("pack/{threads}T"), |bencher| {
            bencher.iter(|| stream.pack(black_box(&mut out), threads));
        });
    }
    group.finish();
}

criterion_group!(benches, pack);
criterion_main!(benches);
