//! Every product kernel against a scalar f64 product of the file's blocks, and against every other kernel.

mod common;

use common::{Random, WEIGHTS, Weights, dequantized, matrix_bytes, tensor};
use npuhal_cpu::activations::{
    Activations, BLOCK, BYTE_CODE_MAX, ByteBlock, CODE_MAX, Precision, SplitBlock, WideBlock, quantize_block,
    quantize_byte_block, split_block,
};
use npuhal_cpu::features::Features;
use npuhal_cpu::gemm::{self, Panels};
use npuhal_cpu::gemv;
use npuhal_cpu::packed::decode::{is_quantized, takes_bytes};
use npuhal_cpu::packed::{PackedMatrix, stored_as};
use npuhal_cpu::pool::Pool;
use npuhal_models::WeightType;
use proptest::prelude::*;

/// What the input rows look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inputs {
    Random,
    /// One element in twenty is forty times larger.
    Outliers,
    /// Every code at a limit, sign by `sign(k)`: adds up or cancels.
    AllLargest,
    AllSmallest,
    Alternating,
    /// Alternates by pairs, as the halves of a word of codes do.
    AlternatingPairs,
    Zero,
}

const INPUTS: [Inputs; 7] = [
    Inputs::Random,
    Inputs::Outliers,
    Inputs::AllLargest,
    Inputs::AllSmallest,
    Inputs::Alternating,
    Inputs::AlternatingPairs,
    Inputs::Zero,
];

fn input_rows(kind: Inputs, rows: usize, cols: usize, random: &mut Random) -> Vec<f32> {
    let element = |k: usize, random: &mut Random| match kind {
        Inputs::Random => random.gauss(),
        Inputs::Outliers => random.gauss() * if random.below(20) == 0 { 40.0 } else { 1.0 },
        Inputs::AllLargest => 3.0,
        Inputs::AllSmallest => -3.0,
        Inputs::Alternating => [3.0, -3.0][k % 2],
        Inputs::AlternatingPairs => [3.0, -3.0][k / 2 % 2],
        Inputs::Zero => 0.0,
    };
    (0..rows * cols).map(|at| element(at % cols, random)).collect()
}

fn all_features() -> Vec<Features> {
    std::iter::once(Features::portable()).chain(Features::avx2()).collect()
}

const PRECISIONS: [Precision; 2] = [Precision::Bits15, Precision::Bits8];

/// How a product is computed.
#[derive(Debug, Clone, Copy)]
struct Way {
    features: Features,
    precision: Precision,
    threads: usize,
}

/// One row after the other through GEMV.
fn by_gemv(way: Way, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let (table, pool) = (way.features.table(), Pool::new(way.threads).unwrap());
    let mut inputs = Activations::new();
    let mut out = vec![f32::NAN; x.len() / matrix.cols() * matrix.rows()];
    for (x, out) in x.chunks_exact(matrix.cols()).zip(out.chunks_exact_mut(matrix.rows())) {
        inputs.reset(1, matrix.cols(), way.precision, gemv::forms(matrix.weight_type(), way.precision));
        inputs.fill(table, x);
        gemv::run(&pool, table, [matrix], &inputs, [out]).unwrap();
    }
    out
}

/// All rows through one GEMV region.
fn by_few_rows(way: Way, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let (table, pool) = (way.features.table(), Pool::new(way.threads).unwrap());
    let mut inputs = Activations::new();
    let rows = x.len() / matrix.cols();
    let mut out = vec![f32::NAN; rows * matrix.rows()];
    inputs.reset(rows, matrix.cols(), way.precision, gemv::forms(matrix.weight_type(), way.precision));
    inputs.fill(table, x);
    gemv::run(&pool, table, [matrix], &inputs, [&mut out]).unwrap();
    out
}

/// All rows through one GEMM.
fn by_gemm(way: Way, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let (table, pool) = (way.features.table(), Pool::new(way.threads).unwrap());
    let mut inputs = Activations::new();
    let rows = x.len() / matrix.cols();
    let mut out = vec![f32::NAN; rows * matrix.rows()];
    inputs.reset(rows, matrix.cols(), way.precision, gemm::forms(matrix.weight_type(), way.precision));
    inputs.fill(table, x);
    gemm::run(&pool, table, [matrix], &inputs, [&mut out], &mut Panels::new()).unwrap();
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The input as the kernels see it, in f64.
fn seen(weight_type: WeightType, precision: Precision, x: &[f32]) -> Vec<f64> {
    if !is_quantized(weight_type) {
        return x.iter().map(|&x| f64::from(x)).collect();
    }
    if precision == Precision::Bits8 && takes_bytes(weight_type) {
        let blocks = x.as_chunks::<BLOCK>().0.iter().map(quantize_byte_block);
        return blocks.flat_map(|block| block.q.map(|q| f64::from(q) * f64::from(block.d))).collect();
    }
    let blocks = x.as_chunks::<BLOCK>().0.iter().map(quantize_block);
    blocks.flat_map(|block| block.v.map(|v| f64::from(v) * f64::from(block.d))).collect()
}

/// Compares with the f64 product; the tolerance is that of f32 sums of about fifty terms.
fn check_against_f64(
    weight_type: WeightType,
    precision: Precision,
    weights: &[f32],
    x: &[f32],
    cols: usize,
    out: &[f32],
) {
    let rows = weights.len() / cols;
    for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact(rows)) {
        let x = seen(weight_type, precision, x);
        for (weights, &out) in weights.chunks_exact(cols).zip(out) {
            let terms = || weights.iter().zip(&x).map(|(&w, x)| f64::from(w) * x);
            let (wanted, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            // A minimum and the codes' part may cancel, so the size of both counts.
            // Plain types add all of a row in f32.
            let slack = if is_quantized(weight_type) { 4.0 } else { 1.0 + cols as f64 / 64.0 };
            assert!(
                (f64::from(out) - wanted).abs() <= size * slack * 1e-6 + 1e-30,
                "{weight_type}: {out:e} instead of {wanted:e}, terms add up to {size:e}"
            );
        }
    }
}

fn check(weight_type: WeightType, rows: usize, blocks: usize, tokens: usize, kinds: (Weights, Inputs), seed: u64) {
    let mut random = Random(seed);
    // Plain types take any number of columns.
    let cols = if weight_type.block_len() == 1 { 7 * blocks + blocks % 3 } else { blocks * weight_type.block_len() };
    let source = tensor(weight_type, rows, cols, &matrix_bytes(weight_type, rows, cols, kinds.0, &mut random));
    let weights = dequantized(&source);
    let stored = stored_as(weight_type);
    let matrix = PackedMatrix::from_tensor(&source, &Pool::new(2).unwrap()).unwrap();
    let mut row = vec![0.0; cols];
    for (index, wanted) in weights.chunks_exact(cols).enumerate() {
        matrix.dequantize_row(index, &mut row);
        for (found, wanted) in row.iter().zip(wanted) {
            let size = wanted.abs().max(if is_quantized(stored) { scale_size(&weights) } else { 0.0 });
            // The processor may take denormals for zero, also those that are the scale of larger elements.
            assert!(
                (found - wanted).abs() <= size * 1e-6 + 8.0 * f32::MIN_POSITIVE,
                "{weight_type} row {index}: {found:e}, not {wanted:e}"
            );
        }
    }

    let x = input_rows(kinds.1, tokens, cols, &mut random);
    for precision in PRECISIONS {
        let mut first: Option<Vec<u32>> = None;
        for features in all_features() {
            let way = |threads| Way { features, precision, threads };
            let one = by_gemv(way(1), &matrix, &x);
            check_against_f64(stored, precision, &weights, &x, cols, &one);
            for threads in [2, 3] {
                assert_eq!(bits(&by_gemv(way(threads), &matrix, &x)), bits(&one), "{weight_type}: {:?}", way(threads));
            }
            for threads in [1, 2, 3] {
                let way = way(threads);
                assert_eq!(bits(&by_few_rows(way, &matrix, &x)), bits(&one), "{weight_type}: rows together, {way:?}");
                assert_eq!(bits(&by_gemm(way, &matrix, &x)), bits(&one), "{weight_type}: GEMM, {way:?}");
            }
            if is_quantized(stored) {
                let first = first.get_or_insert_with(|| bits(&one));
                assert_eq!(
                    *first,
                    bits(&one),
                    "{weight_type} {precision:?}: {} differs from portable",
                    features.name()
                );
            }
        }
    }
}

fn scale_size(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0, |max, weight| max.max(weight.abs()))
}

#[test]
fn every_type_meets_every_extreme() {
    let mut seed = 1;
    for weight_type in WeightType::ALL {
        for weights in WEIGHTS {
            for inputs in INPUTS {
                check(weight_type, 19, 2, 4, (weights, inputs), seed);
                seed += 1;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 6 } else { 64 }))]

    #[test]
    fn products_agree(
        weight_type in 0..WeightType::ALL.len(),
        rows in 1..34usize,
        blocks in prop::sample::select(vec![1usize, 2, 3, 6, 16, 17, 33]),
        tokens in 1..12usize,
        weights in 0..WEIGHTS.len(),
        inputs in 0..INPUTS.len(),
        seed: u64,
    ) {
        // More input features than are unpacked at a time, of every type.
        let weight_type = WeightType::ALL[weight_type];
        let blocks = if weight_type.block_len() == 256 { blocks.div_ceil(6) } else { blocks };
        check(weight_type, rows, blocks, tokens, (WEIGHTS[weights], INPUTS[inputs]), seed);
    }

    #[test]
    fn quantizers_agree_and_reconstruct(seed: u64, exponent in -40..30i32, zeros: bool) {
        let mut random = Random(seed);
        let x: [f32; BLOCK] = std::array::from_fn(|_| {
            if zeros && random.below(2) == 0 { 0.0 } else { random.gauss() * 2f32.powi(exponent) }
        });
        let wanted = quantize_block(&x);
        let amax = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for (v, x) in wanted.v.iter().zip(x) {
            prop_assert!((f32::from(*v) * wanted.d - x).abs() <= amax / CODE_MAX * 0.502);
        }
        for features in all_features() {
            let mut wide = [bytemuck::Zeroable::zeroed(); 1];
            features.table().quantize_wide(&x, &mut wide);
            prop_assert_eq!(&wide, &[wanted] as &[WideBlock; 1]);
            let mut split = [bytemuck::Zeroable::zeroed(); 1];
            features.table().quantize_split(&x, &mut split);
            prop_assert_eq!(&split, &[split_block(&wanted)] as &[SplitBlock; 1]);
            let mut byte = [bytemuck::Zeroable::zeroed(); 1];
            features.table().quantize_byte(&x, &mut byte);
            prop_assert_eq!(&byte, &[quantize_byte_block(&x)] as &[ByteBlock; 1]);
            for (q, x) in byte[0].q.iter().zip(x) {
                prop_assert!((f32::from(*q) * byte[0].d - x).abs() <= amax / BYTE_CODE_MAX * 0.502);
            }
            for k in 0..BLOCK {
                let (hi, lo) = (i32::from(split[0].hi[k]), i32::from(split[0].lo[k]));
                prop_assert!(128 * hi + lo == i32::from(wanted.v[k]) && (-64..64).contains(&lo) && hi > -128);
            }
        }
    }
}

#[test]
fn several_matrices_share_one_region() {
    let mut random = Random(5);
    let pool = Pool::new(3).unwrap();
    let types = [WeightType::Q5_0, WeightType::Q4_1, WeightType::Q8_0];
    let matrices = types.map(|weight_type| {
        let bytes = matrix_bytes(weight_type, 29, 96, Weights::Random, &mut random);
        PackedMatrix::from_tensor(&tensor(weight_type, 29, 96, &bytes), &pool).unwrap()
    });
    let x = input_rows(Inputs::Random, 5, 96, &mut random);
    let all = all_features().into_iter().flat_map(|features| PRECISIONS.map(|precision| (features, precision)));
    for (features, precision) in all {
        let (table, way) = (features.table(), Way { features, precision, threads: 1 });
        let forms = matrices.iter().fold(gemm::forms(WeightType::Q8_0, precision), |all, matrix| {
            let weight_type = matrix.weight_type();
            all.or(gemv::forms(weight_type, precision)).or(gemm::forms(weight_type, precision))
        });
        let wanted: Vec<Vec<f32>> = matrices.iter().map(|matrix| by_gemv(way, matrix, &x)).collect();
        let [a, b, c] = &matrices;
        let mut outs = [vec![0.0; 5 * 29], vec![0.0; 5 * 29], vec![0.0; 5 * 29]];
        let mut inputs = Activations::new();
        inputs.reset(5, 96, precision, forms);
        inputs.fill(table, &x);
        let borrowed = outs.each_mut().map(Vec::as_mut_slice);
        gemm::run(&pool, table, [a, b, c], &inputs, borrowed, &mut Panels::new()).unwrap();
        assert!(outs.iter().zip(&wanted).all(|(out, wanted)| bits(out) == bits(wanted)));

        let mut outs = [vec![0.0; 5 * 29], vec![0.0; 5 * 29], vec![0.0; 5 * 29]];
        let borrowed = outs.each_mut().map(Vec::as_mut_slice);
        gemv::run(&pool, table, [a, b, c], &inputs, borrowed).unwrap();
        assert!(outs.iter().zip(&wanted).all(|(out, wanted)| bits(out) == bits(wanted)), "few rows");

        inputs.reset(1, 96, precision, forms);
        inputs.fill(table, &x[..96]);
        let mut outs = [vec![0.0; 29], vec![0.0; 29], vec![0.0; 29]];
        let borrowed = outs.each_mut().map(Vec::as_mut_slice);
        gemv::run(&pool, table, [a, b, c], &inputs, borrowed).unwrap();
        assert!(outs.iter().zip(&wanted).all(|(out, wanted)| bits(out) == bits(&wanted[..29])));
    }
}

/// Several items, the last group not whole, and every number of rows of a job.
#[test]
fn few_rows_of_a_large_matrix_have_the_bits_of_one() {
    let mut random = Random(11);
    for weight_type in WeightType::ALL {
        let (rows, cols) = (8 * 70 + 3, 256);
        let bytes = matrix_bytes(weight_type, rows, cols, Weights::Random, &mut random);
        let matrix =
            PackedMatrix::from_tensor(&tensor(weight_type, rows, cols, &bytes), &Pool::new(2).unwrap()).unwrap();
        for precision in PRECISIONS {
            for features in all_features() {
                let way = Way { features, precision, threads: 1 };
                let x = input_rows(Inputs::Outliers, 17, cols, &mut random);
                let wanted = bits(&by_gemv(way, &matrix, &x));
                for (tokens, threads) in
                    [(1, 3), (2, 1), (3, 3), (4, 1), (5, 3), (6, 1), (7, 3), (8, 1), (9, 3), (17, 2)]
                {
                    let found = bits(&by_few_rows(Way { threads, ..way }, &matrix, &x[..tokens * cols]));
                    assert!(found == wanted[..tokens * rows], "{weight_type} {precision:?}: {tokens} rows");
                }
            }
        }
    }
}

#[test]
fn inputs_that_are_not_finite_stay_so() {
    let mut random = Random(9);
    for weight_type in WeightType::ALL {
        let bytes = matrix_bytes(weight_type, 8, 512, Weights::Random, &mut random);
        let matrix = PackedMatrix::from_tensor(&tensor(weight_type, 8, 512, &bytes), &Pool::new(1).unwrap()).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = input_rows(Inputs::Random, 2, 512, &mut random);
            x[100] = bad;
            x[512 + 300] = bad;
            for features in all_features() {
                for precision in PRECISIONS {
                    let way = Way { features, precision, threads: 1 };
                    for out in [by_gemv(way, &matrix, &x), by_few_rows(way, &matrix, &x), by_gemm(way, &matrix, &x)] {
                        assert!(out.iter().all(|out| !out.is_finite()), "{weight_type} {bad} {precision:?}");
                    }
                }
            }
        }
    }
}
