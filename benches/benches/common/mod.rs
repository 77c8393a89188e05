//! Matrices of random weights, and alternating rounds.
#![allow(dead_code, unreachable_pub, reason = "each benchmark uses its own part")]

use npuhal_cpu::packed::PackedMatrix;
use npuhal_cpu::pool::Pool;
use npuhal_models::map::FileMap;
use npuhal_models::{Tensor, WeightType};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A small generator of reproducible numbers.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// A packed `rows` × `cols` matrix: random codes, scales of about 0.01.
pub fn matrix(weight_type: WeightType, rows: usize, cols: usize, pool: &Pool) -> PackedMatrix {
    const F16_0_01: [u8; 2] = 0x211F_u16.to_le_bytes();
    let mut random = Random(42);
    let scales: &[usize] = match weight_type {
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q6K => &[208],
        _ => &[],
    };
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / weight_type.block_len() {
        let start = bytes.len();
        match weight_type {
            WeightType::F32 => bytes.extend(random.unit().to_le_bytes()),
            WeightType::F16 | WeightType::Bf16 => bytes.extend(F16_0_01),
            _ => bytes.extend((0..weight_type.block_bytes()).map(|_| random.next() as u8)),
        }
        for at in scales {
            bytes[start + at..start + at + 2].copy_from_slice(&F16_0_01);
        }
    }
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(&bytes).expect("room for a matrix");
    let map = Arc::new(FileMap::open(file.path()).expect("a mapping"));
    let tensor = Tensor::new("bench", weight_type, rows, cols, map, 0..bytes.len()).expect("a tensor");
    PackedMatrix::from_tensor(&tensor, pool).expect("a packed matrix")
}

/// Something to measure: `amount` of work a call.
pub struct Case<'a> {
    pub name: String,
    pub amount: f64,
    pub run: Box<dyn FnMut() + 'a>,
}

impl<'a> Case<'a> {
    pub fn new(name: impl Into<String>, amount: usize, run: impl FnMut() + 'a) -> Self {
        Self { name: name.into(), amount: amount as f64, run: Box::new(run) }
    }
}

const ROUNDS: usize = 9;
/// Time of one case in one round.
const SLICE: Duration = Duration::from_millis(8);

/// Measures all cases in alternating rounds and prints the median rate of each, in 10^9 `unit` a second, with its share of the
/// first, which is the limit. Only titles that contain the program's argument, if there is one, are measured.
pub fn compare(title: &str, unit: &str, mut cases: Vec<Case<'_>>) {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !title.contains(&filter)) {
        return;
    }
    let calls: Vec<u32> = cases.iter_mut().map(|case| calls_in_slice(&mut case.run)).collect();
    let mut rates = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for ((case, &calls), rates) in cases.iter_mut().zip(&calls).zip(&mut rates) {
            let start = Instant::now();
            (0..calls).for_each(|_| (case.run)());
            rates.push(case.amount * f64::from(calls) / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    let medians: Vec<f64> = rates.iter_mut().map(|rates| median(rates)).collect();
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{title}");
    for (case, rate) in cases.iter().zip(&medians) {
        let _ = writeln!(out, "  {:28} {rate:8.1} {unit}  {:4.0} %", case.name, 100.0 * rate / medians[0]);
    }
}

fn calls_in_slice(run: &mut dyn FnMut()) -> u32 {
    let (start, mut calls) = (Instant::now(), 0);
    while start.elapsed() < SLICE {
        run();
        calls += 1;
    }
    calls
}

/// The middle one; of an even number, the upper of the two.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Threads to measure with: one, and all.
pub fn thread_counts() -> Vec<usize> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    if all > 1 { vec![1, all] } else { vec![1] }
}
