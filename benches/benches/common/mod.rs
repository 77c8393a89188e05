//! Matrices of random weights, and a loop that only reads.
#![allow(dead_code, unreachable_pub, reason = "each benchmark uses its own part")]

use npuhal_cpu::packed::PackedMatrix;
use npuhal_cpu::pool::Pool;
use npuhal_models::map::FileMap;
use npuhal_models::{Tensor, WeightType};
use std::io::Write;
use std::sync::Arc;

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

/// Reads all bytes on all threads of `pool`: the limit of memory.
pub fn read(pool: &Pool, bytes: &[u8]) -> u64 {
    let sum = std::sync::atomic::AtomicU64::new(0);
    let threads = pool.threads();
    pool.run(&|thread| {
        let part = &bytes[bytes.len() * thread / threads..bytes.len() * (thread + 1) / threads];
        let mut lanes = [0u64; 16];
        for chunk in part.as_chunks::<128>().0 {
            for (lane, word) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *lane ^= u64::from_le_bytes(*word);
            }
        }
        sum.fetch_xor(lanes.iter().fold(0, |all, lane| all ^ lane), std::sync::atomic::Ordering::Relaxed);
    })
    .expect("no panic");
    sum.into_inner()
}

/// Threads to measure with: one, and all.
pub fn thread_counts() -> Vec<usize> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    if all > 1 { vec![1, all] } else { vec![1] }
}
