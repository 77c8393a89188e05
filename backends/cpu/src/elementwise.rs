//! RMSNorm, RoPE, SwiGLU, exponential: everything between the products.
//!
//! Plain Rust without fused operations, in fixed lanes, compiled once more for AVX2: the same bits on every processor.

use npuhal_models::config::{Rope, RopePairing};

/// Lanes of a reduction.
const LANES: usize = 16;

/// `out = x / sqrt(mean(x²) + eps) × weight`; slices of one length.
#[inline(always)]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane] * chunk[lane];
        }
    }
    for (lane, x) in rest.iter().enumerate() {
        lanes[lane] += x * x;
    }
    let scale = 1.0 / (sum_lanes(lanes) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `gate = silu(gate) × up`; slices of one length.
#[inline(always)]
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// `gate = gelu(gate) × up` with the gelu of [`npuhal_models::config::Activation::GeluTanh`]; slices of one length.
#[inline(always)]
pub fn geglu(gate: &mut [f32], up: &[f32]) {
    /// 2 · √(2/π): half of `1 + tanh(u)` is `1 / (1 + exp(-2u))`.
    const TWICE_ROOT: f32 = 1.595_769;
    for (gate, up) in gate.iter_mut().zip(up) {
        let x = *gate;
        let u = TWICE_ROOT * (x + 0.044_715 * x * x * x);
        *gate = x / (1.0 + exp(-u)) * up;
    }
}

/// `into += x`; slices of one length.
#[inline(always)]
pub fn add(into: &mut [f32], x: &[f32]) {
    for (into, x) in into.iter_mut().zip(x) {
        *into += x;
    }
}

/// The exponential, to about 2 units in the last place; 0 below -87.3, infinite above 88.7.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which then stands in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.7);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.0e-1;
    let value = p * (r * r) + r + 1.0;
    // Two factors, because n reaches 128.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = n >> 1;
    let scale = |n: i32| f32::from_bits(((n + 127) << 23).cast_unsigned());
    let value = value * scale(half) * scale(n - half);
    let value = if x < -87.3 { 0.0 } else { value };
    let value = if x > 88.7 { f32::INFINITY } else { value };
    if x.is_nan() { x } else { value }
}

/// `x = exp(x - shift)`; returns the sum, in fixed lanes. Elements at -∞ become 0.
#[inline(always)]
pub fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            chunk[lane] = exp(chunk[lane] - shift);
            lanes[lane] += chunk[lane];
        }
    }
    for (lane, x) in rest.iter_mut().enumerate() {
        *x = exp(*x - shift);
        lanes[lane] += *x;
    }
    sum_lanes(lanes)
}

/// Frequencies of rotary position embedding.
#[derive(Debug, Clone)]
pub struct Rotation {
    frequencies: Vec<f64>,
    dims: usize,
    pairing: RopePairing,
    magnitude: f64,
}

impl Rotation {
    /// Rotation by `frequencies` (radians a position, one for each pair of `rope.dims`).
    #[must_use]
    pub fn new(rope: &Rope, frequencies: Vec<f64>) -> Self {
        let magnitude = f64::from(rope.magnitude());
        Self { dims: 2 * frequencies.len(), frequencies, pairing: rope.pairing, magnitude }
    }

    /// Elements of [`Rotation::angles`]: cosines, then sines.
    #[must_use]
    pub fn table_len(&self) -> usize {
        self.frequencies.len() * 2
    }

    /// Cosines, then sines, of a position's angles.
    ///
    /// # Panics
    /// When `out` is not [`Rotation::table_len`] long.
    pub fn angles(&self, position: u32, out: &mut [f32]) {
        assert_eq!(out.len(), self.table_len());
        let (cosines, sines) = out.split_at_mut(self.frequencies.len());
        for ((frequency, cosine), sine) in self.frequencies.iter().zip(cosines).zip(sines) {
            let (s, c) = (f64::from(position) * frequency).sin_cos();
            (*cosine, *sine) = ((c * self.magnitude) as f32, (s * self.magnitude) as f32);
        }
    }

    /// Rotates one head.
    pub fn rotate(&self, head: &mut [f32], angles: &[f32]) {
        let (cosines, sines) = angles.split_at(self.frequencies.len());
        match self.pairing {
            RopePairing::Interleaved => {
                for ((pair, c), s) in head[..self.dims].chunks_exact_mut(2).zip(cosines).zip(sines) {
                    let (x, y) = (pair[0], pair[1]);
                    (pair[0], pair[1]) = (x * c - y * s, x * s + y * c);
                }
            }
            RopePairing::Halves => {
                let (first, second) = head[..self.dims].split_at_mut(self.dims / 2);
                for (((x, y), c), s) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                    (*x, *y) = (*x * c - *y * s, *x * s + *y * c);
                }
            }
        }
    }
}

/// The same functions, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    #![allow(unsafe_code, reason = "functions for a detected instruction set")]

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        super::rms_norm(x, weight, eps, out);
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn swiglu(gate: &mut [f32], up: &[f32]) {
        super::swiglu(gate, up);
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn geglu(gate: &mut [f32], up: &[f32]) {
        super::geglu(gate, up);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_models::config::RopeScaling;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0.0f64;
        for step in -87_000..=88_000 {
            let x = step as f32 / 1000.0;
            let wanted = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / wanted - 1.0).abs());
        }
        assert!(worst < 3e-7, "{worst:e}");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_near_its_definition_and_keeps_its_ends() {
        let mut x: Vec<f32> = (-4000..=4000).map(|step| step as f32 / 200.0).collect();
        x.extend([-1e30, 1e10, -90.0, 0.0]);
        let mut gate = x.clone();
        geglu(&mut gate, &vec![1.0; x.len()]);
        for (x, found) in x.iter().zip(gate) {
            let x = f64::from(*x);
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            let wanted = 0.5 * x * (1.0 + u.tanh());
            assert!((f64::from(found) - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "{x}: {found} for {wanted}");
        }
    }

    #[test]
    fn rotation_matches_the_formula_for_both_pairings() {
        for pairing in [RopePairing::Interleaved, RopePairing::Halves] {
            let rope = Rope { theta: 10_000.0, dims: 8, pairing, scaling: RopeScaling::Linear { factor: 2.0 } };
            let factors = [1.0, 2.0, 4.0, 8.0];
            let rotation = Rotation::new(&rope, rope.inverse_frequencies(&factors, 8));
            let mut angles = vec![0.0; rotation.table_len()];
            rotation.angles(7, &mut angles);
            let head: Vec<f32> = (0..10).map(|i| i as f32 - 3.5).collect();
            let mut rotated = head.clone();
            rotation.rotate(&mut rotated, &angles);
            for i in 0..4 {
                let (a, b) = if pairing == RopePairing::Halves { (i, i + 4) } else { (2 * i, 2 * i + 1) };
                let angle = 7.0 / 2.0 / f64::from(factors[i]) * 10_000f64.powf(-(i as f64) / 4.0);
                let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                assert!((f64::from(rotated[a]) - (x * angle.cos() - y * angle.sin())).abs() < 1e-5);
                assert!((f64::from(rotated[b]) - (x * angle.sin() + y * angle.cos())).abs() < 1e-5);
            }
            assert_eq!(rotated[8..], head[8..], "elements past the rotated ones stay");
        }
    }
}
