//! Dot products in 32 lanes of f32: lane `j` sums the columns that are `j` modulo 32, in order; then lanes are added in halves,
//! 16 apart, 8, 4, 2, 1. Products of bf16 values are exact in f32.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

const LANES: usize = 32;
/// Output features a thread takes at a time.
const RUN: usize = 64;

/// Sum of the lanes.
#[inline(always)]
pub(super) fn reduce<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn accumulate(lanes: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[lane] += a * b;
    }
}

/// Product of two vectors of one length.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    accumulate(&mut lanes, a, b);
    reduce(lanes)
}

/// A matrix, output features × input features.
pub(super) trait Rows: Sync {
    /// Fills `out` with the weights of `feature`. To be inlined: it is compiled for the processor's instructions.
    fn read(&self, feature: usize, out: &mut [f32]);
}

/// Fills `out` with little-endian bf16.
#[inline(always)]
pub(super) fn read_bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, bits) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*bits)) << 16);
    }
}

/// Products of every row of `x` (`rows` × `cols`) with `features` rows of `matrix`: `rows` × `features`, not rounded. Lanes start
/// anew with each of `chunks`, ranges of columns, and keep their sums.
pub(super) fn multiply(
    matrix: &impl Rows,
    features: usize,
    x: &[f32],
    cols: usize,
    chunks: &[Range<usize>],
    threads: NonZeroUsize,
) -> Vec<f32> {
    let rows = x.len() / cols.max(1);
    let mut transposed = vec![0.0; rows * features];
    let work = Mutex::new(transposed.chunks_mut(RUN * rows.max(1)).enumerate());
    let run = || {
        let mut weights = vec![0.0; cols];
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((index, out)) = next else { break };
            for (offset, out) in out.chunks_mut(rows.max(1)).enumerate() {
                products(matrix, index * RUN + offset, x, chunks, &mut weights, out);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.get().min(features.div_ceil(RUN)) {
            scope.spawn(run);
        }
        run();
    });
    let mut result = vec![0.0; rows * features];
    for feature in 0..features {
        for row in 0..rows {
            result[row * features + feature] = transposed[feature * rows + row];
        }
    }
    result
}

fn products(
    matrix: &impl Rows,
    feature: usize,
    x: &[f32],
    chunks: &[Range<usize>],
    weights: &mut [f32],
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        #[allow(unsafe_code, reason = "the compiler wants a proof that the processor has the instructions")]
        // SAFETY: AVX2 was detected.
        return unsafe { products_avx2(matrix, feature, x, chunks, weights, out) };
    }
    products_any(matrix, feature, x, chunks, weights, out);
}

/// The same operations; AVX2 without FMA, so that the bits are the same on every processor.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn products_avx2(
    matrix: &impl Rows,
    feature: usize,
    x: &[f32],
    chunks: &[Range<usize>],
    weights: &mut [f32],
    out: &mut [f32],
) {
    products_any(matrix, feature, x, chunks, weights, out);
}

#[inline(always)]
fn products_any(
    matrix: &impl Rows,
    feature: usize,
    x: &[f32],
    chunks: &[Range<usize>],
    weights: &mut [f32],
    out: &mut [f32],
) {
    matrix.read(feature, weights);
    for (x, out) in x.chunks_exact(weights.len()).zip(out) {
        let mut lanes = [0.0; LANES];
        for chunk in chunks {
            accumulate(&mut lanes, &weights[chunk.clone()], &x[chunk.clone()]);
        }
        *out = reduce(lanes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Matrix(Vec<Vec<u8>>);

    impl Rows for Matrix {
        fn read(&self, feature: usize, out: &mut [f32]) {
            read_bf16(&self.0[feature], out);
        }
    }

    /// Powers of two far apart show in which order numbers were added.
    #[test]
    fn lanes_and_halves_add_in_the_stated_order() {
        let mut lanes = [0.0f32; LANES];
        (lanes[0], lanes[16], lanes[8]) = (1e8, 3.0, -1e8);
        assert_eq!(reduce(lanes), (1e8f32 + 3.0) - 1e8);
        let mut a = [0.0f32; 70];
        (a[1], a[33], a[65]) = (1e8, 3.0, -1e8);
        assert_eq!(dot(&a, &[1.0; 70]), (1e8f32 + 3.0) - 1e8);
        // In chunks of 17, columns 0 and 17 share a lane.
        (a[1], a[33], a[65]) = (0.0, 0.0, 0.0);
        (a[0], a[17], a[34]) = (1e8, 3.0, -1e8);
        let matrix = Matrix(vec![[0x80, 0x3f].repeat(70)]);
        let chunks = [0..17, 17..34, 34..70];
        let found = multiply(&matrix, 1, &a, 70, &chunks, NonZeroUsize::MIN);
        assert_eq!(found, [(1e8f32 + 3.0) - 1e8]);
    }

    #[test]
    fn threads_and_rows_do_not_change_a_product() {
        let bits = |seed: u32| (seed.wrapping_mul(2_654_435_761) >> 16) as u16 & 0xbfff;
        let matrix =
            Matrix((0..200).map(|row| (0..96).flat_map(|col| bits(row * 96 + col).to_le_bytes()).collect()).collect());
        let x: Vec<f32> = (0..3 * 96).map(|at| (at as f32 * 0.37).sin()).collect();
        let whole = 0..96;
        let all = multiply(&matrix, 200, &x, 96, std::slice::from_ref(&whole), NonZeroUsize::new(3).unwrap());
        for row in 0..3 {
            let x = &x[row * 96..(row + 1) * 96];
            let alone = multiply(&matrix, 200, x, 96, std::slice::from_ref(&whole), NonZeroUsize::MIN);
            assert_eq!(alone, all[row * 200..(row + 1) * 200]);
            let mut weights = [0.0; 96];
            matrix.read(7, &mut weights);
            assert_eq!(alone[7], dot(&weights, x));
        }
    }
}
