//! Prefill products: multiply-accumulates a second by input rows, beside loops that only multiply.

mod common;

use common::{Case, Random, compare, matrix, thread_counts};
use npuhal_cpu::activations::{Activations, Precision};
use npuhal_cpu::features::Features;
use npuhal_cpu::gemm::{self, Panels};
use npuhal_cpu::gemv;
use npuhal_cpu::limits::{self, MULTIPLIES, Multiply};
use npuhal_cpu::packed::decode::is_quantized;
use npuhal_cpu::pool::Pool;
use npuhal_models::WeightType;
use std::hint::black_box;

fn main() {
    let features = Features::detect();
    let table = features.table();
    let (rows, cols) = (1536, 768);
    for threads in thread_counts() {
        let pool = Pool::new(threads).expect("threads");
        for weight_type in WeightType::ALL {
            let matrix = matrix(weight_type, rows, cols, &pool);
            let precisions: &[_] = if is_quantized(weight_type) {
                &[
                    ("15 bits", Precision::Bits15, Multiply::Words, "limit of 15 bits"),
                    ("8 bits", Precision::Bits8, Multiply::Bytes, "limit of 8 bits"),
                ]
            } else {
                &[("f32", Precision::Bits15, Multiply::Floats, "limit of f32")]
            };
            for &(name, precision, multiply, limit) in precisions {
                if name == "8 bits" && gemm::forms(weight_type, precision).wide {
                    continue;
                }
                let (pool, matrix) = (&pool, &matrix);
                let mut cases = vec![Case::new(limit, threads * MULTIPLIES, || {
                    limits::multiply(pool, features, multiply).expect("no panic");
                })];
                for tokens in [2, 4, 6, 8, 12, 32, 128] {
                    let mut random = Random(1);
                    let x: Vec<f32> = (0..tokens * cols).map(|_| random.unit()).collect();
                    if tokens <= 12 {
                        let mut input = Activations::new();
                        input.reset(tokens, cols, precision, gemv::forms(weight_type, precision));
                        input.fill(table, &x);
                        let mut out = vec![0.0; tokens * rows];
                        cases.push(Case::new(format!("{tokens} rows by GEMV"), rows * cols * tokens, move || {
                            gemv::run(pool, table, [matrix], &input, [black_box(&mut out)]).expect("no panic");
                        }));
                    }
                    let mut input = Activations::new();
                    input.reset(tokens, cols, precision, gemm::forms(weight_type, precision));
                    input.fill(table, &x);
                    let mut out = vec![0.0; tokens * rows];
                    let mut panels = Panels::new();
                    cases.push(Case::new(format!("{tokens} rows"), rows * cols * tokens, move || {
                        gemm::run(pool, table, [matrix], &input, [black_box(&mut out)], &mut panels).expect("no panic");
                    }));
                }
                compare(&format!("gemm/{threads}T/{}/{name}", weight_type.name()), "GMAC/s", cases);
            }
        }
    }
}
