//! Decode products: bytes of weights a second, beside a loop that only reads the same bytes.

mod common;

use common::{Case, Random, compare, matrix, thread_counts};
use npuhal_cpu::activations::{Activations, Precision};
use npuhal_cpu::features::Features;
use npuhal_cpu::pool::Pool;
use npuhal_cpu::{gemv, limits};
use npuhal_models::WeightType;
use std::hint::black_box;

fn main() {
    let table = Features::detect().table();
    // In cache, and far beyond it.
    for (place, rows, cols) in [("L2", 768, 768), ("DRAM", 98_304, 1024)] {
        for threads in thread_counts() {
            let pool = Pool::new(threads).expect("threads");
            for weight_type in WeightType::ALL {
                if weight_type == WeightType::F32 && place == "DRAM" {
                    continue;
                }
                let matrix = matrix(weight_type, rows, cols, &pool);
                let bytes = matrix.bytes().len();
                let mut random = Random(1);
                let x: Vec<f32> = (0..cols).map(|_| random.unit()).collect();
                let mut cases = vec![Case::new("read only", bytes, || {
                    black_box(limits::read(&pool, matrix.bytes()).expect("no panic"));
                })];
                for (name, precision) in [("15 bits", Precision::Bits15), ("8 bits", Precision::Bits8)] {
                    let mut input = Activations::new();
                    input.reset(1, cols, precision, gemv::forms(weight_type, precision));
                    input.fill(table, &x);
                    let mut out = vec![0.0; rows];
                    let (pool, matrix) = (&pool, &matrix);
                    cases.push(Case::new(name, bytes, move || {
                        gemv::run(pool, table, [matrix], &input, [black_box(&mut out)]).expect("no panic");
                    }));
                }
                compare(&format!("gemv/{place}/{threads}T/{}", weight_type.name()), "GB/s", cases);
            }
        }
    }
}
