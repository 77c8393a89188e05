//! Arithmetic of the oracle: f64 throughout, one fixed order of operations for each element.

use npuhal_models::config::{Activation, Rope, RopePairing};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Lanes of a dot product. The order of additions is fixed by it, whatever the batch.
pub(super) const LANES: usize = 4;
/// Weight rows handled together.
pub(super) const BLOCK: usize = 4;

/// Splits `out` into chunks of `chunk_len` and lets `threads` threads run `job` on them; each thread has a scratch of its own.
pub(super) fn for_each_chunk<S>(
    threads: usize,
    out: &mut [f64],
    chunk_len: usize,
    scratch: impl Fn() -> S + Sync,
    job: impl Fn(usize, &mut [f64], &mut S) + Sync,
) {
    let chunks = out.len().div_ceil(chunk_len.max(1));
    if threads <= 1 || chunks <= 1 {
        let mut own = scratch();
        out.chunks_mut(chunk_len.max(1)).enumerate().for_each(|(index, chunk)| job(index, chunk, &mut own));
        return;
    }
    let work = Mutex::new(out.chunks_mut(chunk_len.max(1)).enumerate());
    let run = || {
        let mut own = scratch();
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((index, chunk)) = next else { break };
            job(index, chunk, &mut own);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(chunks) {
            scope.spawn(run);
        }
        run();
    });
}

/// Rows padded with zeros to a whole number of lanes.
pub(super) fn pad_rows(rows: &[f64], width: usize) -> (Vec<f64>, usize) {
    let stride = width.next_multiple_of(LANES);
    let mut padded = vec![0.0; rows.len() / width.max(1) * stride];
    for (from, to) in rows.chunks_exact(width.max(1)).zip(padded.chunks_exact_mut(stride.max(1))) {
        to[..width].copy_from_slice(from);
    }
    (padded, stride)
}

/// Products of [`BLOCK`] weight rows with every row of `x`: `out[block][row]`. All rows are `stride` long, a multiple of
/// [`LANES`].
pub(super) fn dot_block(weights: &[f64], x: &[f64], stride: usize, out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        #[allow(unsafe_code, reason = "the compiler wants a proof that the processor has the instructions")]
        // SAFETY: AVX2 and FMA were detected.
        return unsafe { dot_block_fma(weights, x, stride, out) };
    }
    dot_block_any::<false>(weights, x, stride, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dot_block_fma(weights: &[f64], x: &[f64], stride: usize, out: &mut [f64]) {
    dot_block_any::<true>(weights, x, stride, out);
}

#[inline(always)]
fn dot_block_any<const FUSED: bool>(weights: &[f64], x: &[f64], stride: usize, out: &mut [f64]) {
    let rows = x.len().checked_div(stride).unwrap_or(0);
    let mut row = 0;
    while row < rows {
        if row + 2 <= rows {
            dot_rows::<2, FUSED>(weights, &x[row * stride..(row + 2) * stride], stride, rows, &mut out[row..]);
            row += 2;
        } else {
            dot_rows::<1, FUSED>(weights, &x[row * stride..(row + 1) * stride], stride, rows, &mut out[row..]);
            row += 1;
        }
    }
}

/// One order of operations for each product, whatever `ROWS` is.
#[inline(always)]
fn dot_rows<const ROWS: usize, const FUSED: bool>(
    weights: &[f64],
    x: &[f64],
    stride: usize,
    out_stride: usize,
    out: &mut [f64],
) {
    let steps = stride / LANES;
    let mut sums = [[[0.0f64; LANES]; ROWS]; BLOCK];
    let weights: [&[[f64; LANES]]; BLOCK] =
        std::array::from_fn(|index| &weights[index * stride..(index + 1) * stride].as_chunks().0[..steps]);
    let x: [&[[f64; LANES]]; ROWS] =
        std::array::from_fn(|index| &x[index * stride..(index + 1) * stride].as_chunks().0[..steps]);
    for step in 0..steps {
        for block in 0..BLOCK {
            for row in 0..ROWS {
                for lane in 0..LANES {
                    let (w, x, sum) = (weights[block][step][lane], x[row][step][lane], &mut sums[block][row][lane]);
                    *sum = if FUSED { w.mul_add(x, *sum) } else { *sum + w * x };
                }
            }
        }
    }
    for block in 0..BLOCK {
        for row in 0..ROWS {
            let [a, b, c, d] = sums[block][row];
            out[block * out_stride + row] = (a + c) + (b + d);
        }
    }
}

/// `x / sqrt(mean(x²) + eps) · weight`.
pub(super) fn rms_norm(x: &[f64], weight: &[f32], eps: f32, out: &mut [f64]) {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * f64::from(*weight);
    }
}

/// Rotation of the layers that share it.
pub(super) struct Rotation {
    /// Angle a position adds to each pair, in radians.
    pub(super) frequencies: Vec<f64>,
    pub(super) pairing: RopePairing,
    /// Factor on the rotated elements.
    pub(super) magnitude: f64,
}

impl Rotation {
    pub(super) fn new(rope: &Rope, frequencies: Vec<f64>) -> Self {
        Self { frequencies, pairing: rope.pairing, magnitude: f64::from(rope.magnitude()) }
    }

    /// Rotates the first elements of a head.
    pub(super) fn rotate(&self, head: &mut [f64], position: u32) {
        for (pair, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            let (sin, cos) = (sin * self.magnitude, cos * self.magnitude);
            let (first, second) = pair_places(self.pairing, self.frequencies.len(), pair);
            let (a, b) = (head[first], head[second]);
            head[first] = a * cos - b * sin;
            head[second] = a * sin + b * cos;
        }
    }
}

/// Where the two elements of a pair lie.
fn pair_places(pairing: RopePairing, pairs: usize, pair: usize) -> (usize, usize) {
    match pairing {
        RopePairing::Interleaved => (2 * pair, 2 * pair + 1),
        RopePairing::Halves => (pair, pair + pairs),
    }
}

/// Product of a query and a key head whose first elements are `pairs` pairs: pair by pair, then the rest, so that files that
/// order the same elements by one or the other pairing give the same bits.
fn score(query: &[f64], key: &[f64], pairing: RopePairing, pairs: usize) -> f64 {
    let rotated = 2 * pairs;
    let mut sum = 0.0;
    match pairing {
        RopePairing::Interleaved => {
            for (q, k) in query[..rotated].chunks_exact(2).zip(key[..rotated].chunks_exact(2)) {
                sum += q[0] * k[0] + q[1] * k[1];
            }
        }
        RopePairing::Halves => {
            let (q, k) = (query[..rotated].split_at(pairs), key[..rotated].split_at(pairs));
            for (((q0, q1), k0), k1) in q.0.iter().zip(q.1).zip(k.0).zip(k.1) {
                sum += q0 * k0 + q1 * k1;
            }
        }
    }
    for (q, k) in query[rotated..].iter().zip(&key[rotated..]) {
        sum += q * k;
    }
    sum
}

/// How the heads of a layer attend.
#[derive(Clone, Copy)]
pub(super) struct HeadAttention {
    /// Factor on products of queries and keys.
    pub(super) scale: f64,
    pub(super) pairing: RopePairing,
    /// Rotated pairs of a head.
    pub(super) pairs: usize,
}

/// Attention of one query head over the rows `seen` of the cache; `at` is the head's place in a cache row.
pub(super) fn attend(
    attention: HeadAttention,
    query: &[f64],
    keys: &[f64],
    values: &[f64],
    kv_width: usize,
    at: usize,
    seen: Range<usize>,
    scores: &mut Vec<f64>,
    out: &mut [f64],
) {
    let HeadAttention { scale, pairing, pairs } = attention;
    let dim = query.len();
    scores.clear();
    scores.extend(seen.clone().map(|position| {
        let key = &keys[position * kv_width + at..][..dim];
        score(query, key, pairing, pairs) * scale
    }));
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut total = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - largest).exp();
        total += *score;
    }
    out.fill(0.0);
    for (position, score) in seen.zip(scores.iter()) {
        let value = &values[position * kv_width + at..][..dim];
        for (out, value) in out.iter_mut().zip(value) {
            *out += score / total * value;
        }
    }
}

/// `activation(gate) · up`, into `gate`.
pub(super) fn gate_with(activation: Activation, gate: &mut [f64], up: &[f64]) {
    match activation {
        Activation::Silu => gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up),
        Activation::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            for (gate, up) in gate.iter_mut().zip(up) {
                let x = *gate;
                *gate = 0.5 * x * (1.0 + (root * (x + 0.044_715 * x * x * x)).tanh()) * up;
            }
        }
        // `check_config` has refused others.
        _ => gate.fill(f64::NAN),
    }
}
