//! Decoding while another process has a core: tokens a second of products in a small model's shapes, quiet and beside a process
//! that never sleeps, on one thread and on all. The goal: on all threads beside it, 0.9 of one quiet thread.

mod common;

use common::{Random, matrix};
use npuhal_cpu::activations::{Activations, Precision};
use npuhal_cpu::features::Features;
use npuhal_cpu::gemv;
use npuhal_cpu::packed::PackedMatrix;
use npuhal_cpu::pool::Pool;
use npuhal_models::WeightType;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The argument by which this program becomes the neighbour.
const SPIN: &str = "spin-until-killed";
const LAYERS: usize = 30;
/// Rows and columns of a layer's products; a token does them in order, each one parallel region.
const PRODUCTS: [(usize, usize); 4] = [(960, 576), (576, 576), (3072, 576), (576, 1536)];
const ROUNDS: usize = 5;
/// Long against the time slices of a scheduler, and against how long the pool works alone before it looks again.
const SLICE: Duration = Duration::from_secs(4);

/// A neighbour, killed at the end.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let program = std::env::current_exe().expect("this program's path");
        let child = Command::new(program).arg(SPIN).stdin(Stdio::null()).spawn().expect("a second process");
        Self(child)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // Both fail only if it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Model {
    layers: Vec<[PackedMatrix; PRODUCTS.len()]>,
    inputs: [Activations; PRODUCTS.len()],
}

impl Model {
    fn new() -> Self {
        let pool = Pool::new(1).expect("a thread");
        let weight_type = WeightType::Q4_1;
        let layer = || PRODUCTS.map(|(rows, cols)| matrix(weight_type, rows, cols, &pool));
        let mut random = Random(1);
        let inputs = PRODUCTS.map(|(_, cols)| {
            let x: Vec<f32> = (0..cols).map(|_| random.unit()).collect();
            let mut input = Activations::new();
            input.reset(1, cols, Precision::Bits15, gemv::forms(weight_type, Precision::Bits15));
            input.fill(Features::detect().table(), &x);
            input
        });
        Self { layers: (0..LAYERS).map(|_| layer()).collect(), inputs }
    }

    /// Tokens a second over one slice.
    fn rate(&self, pool: &Pool, out: &mut [f32]) -> f64 {
        let table = Features::detect().table();
        let (start, mut tokens) = (Instant::now(), 0u32);
        while start.elapsed() < SLICE {
            for layer in &self.layers {
                for (matrix, input) in layer.iter().zip(&self.inputs) {
                    gemv::run(pool, table, [matrix], input, [&mut out[..matrix.rows()]]).expect("no panic");
                }
            }
            tokens += 1;
        }
        f64::from(tokens) / start.elapsed().as_secs_f64()
    }
}

fn main() {
    if std::env::args().any(|arg| arg == SPIN) {
        loop {
            std::hint::spin_loop();
        }
    }
    let model = Model::new();
    let mut out = vec![0.0; 4096];
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let pools = [1, all].map(|threads| Pool::new(threads).expect("threads"));
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for (index, pool) in pools.iter().enumerate() {
            rates[index].push(model.rate(pool, &mut out));
            let busy = Busy::start();
            // It has a core by now.
            std::thread::sleep(Duration::from_millis(50));
            rates[2 + index].push(model.rate(pool, &mut out));
            drop(busy);
        }
    }
    let [one, many, one_busy, many_busy] = rates.map(|mut rates: Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "quiet: 1 thread {one:.1} tok/s, {all} threads {many:.1}");
    let _ = writeln!(stdout, "one core busy: 1 thread {one_busy:.1} tok/s, {all} threads {many_busy:.1}");
    let _ = writeln!(stdout, "{all} threads beside a neighbour: {:.2} of one quiet thread", many_busy / one);
}
