//! Vectors of a core: bf16 conversions, products in 32 lanes, reduction.

/// Lanes of a f32 accumulator.
pub(super) const LANES: usize = 32;
/// Elements of a head.
pub(super) const HEAD_DIM: usize = 64;

/// One head's elements.
pub(super) type Head = [f32; HEAD_DIM];

/// The value of bf16 bits.
pub(super) fn value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 to bf16 in the core's rounding mode, which here is *convergent even*: to nearest, ties to even. A NaN keeps its
/// upper half, with the lowest bit set where that would be an infinity.
pub(super) fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    let upper = (bits >> 16) as u16;
    if value.is_nan() {
        return upper | u16::from(upper & 0x7F == 0);
    }
    // Below a NaN the sum stays in 32 bits.
    ((bits + 0x7FFF + u32::from(upper & 1)) >> 16) as u16
}

/// The value nearest to `x` that bf16 holds.
pub(super) fn rounded(x: f32) -> f32 {
    value(narrow(x))
}

/// Values of bf16 bits.
pub(super) fn widen(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|bits| value(*bits)).collect()
}

/// bf16 bits of a DMA element.
pub(super) fn elements(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
    bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair))
}

/// A head out of bf16 bits; zeros where these end.
pub(super) fn head(bits: impl IntoIterator<Item = u16>) -> Head {
    let mut head = [0.0; HEAD_DIM];
    head.iter_mut().zip(bits).for_each(|(element, bits)| *element = value(bits));
    head
}

/// Adds the products of bf16 `weights` (bytes) with `operand`: lane `j` takes columns `j`, `j + 32`, … in this order.
/// Columns past the last whole 32 do not exist in any design.
pub(super) fn add_products(lanes: &mut [f32; LANES], weights: &[u8], operand: &[f32]) {
    let mut sums = *lanes;
    for (weights, operand) in weights.as_chunks::<{ 2 * LANES }>().0.iter().zip(operand.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            let weight = u16::from_le_bytes([weights[2 * lane], weights[2 * lane + 1]]);
            sums[lane] += value(weight) * operand[lane];
        }
    }
    *lanes = sums;
}

/// [`add_products`] for weights of eight bits, whose values bf16 holds.
pub(super) fn add_integer_products(lanes: &mut [f32; LANES], weights: &[u8], operand: &[f32]) {
    let mut sums = *lanes;
    for (weights, operand) in weights.as_chunks::<LANES>().0.iter().zip(operand.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            sums[lane] += f32::from(weights[lane] as i8) * operand[lane];
        }
    }
    *lanes = sums;
}

/// f32 sum of lanes. The order of the core's reduction is not published; taken is that of its library's public sources:
/// upper half onto lower half, until one is left.
pub(super) fn reduce<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut width = N;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// f32 dot product of bf16 `weights` (bytes) with `operand`.
pub(super) fn dot(weights: &[u8], operand: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    add_products(&mut lanes, weights, operand);
    reduce(lanes)
}

/// f32 dot product of two heads.
pub(super) fn dot_heads(a: &Head, b: &Head) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    reduce(lanes)
}

/// f32 sum of squares.
pub(super) fn sum_of_squares(values: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for values in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            lanes[lane] += values[lane] * values[lane];
        }
    }
    reduce(lanes)
}

/// `1/√v`: the start 0x5f3759df, then Newton steps `y·(1.5 − 0.5·v·y·y)` from the left.
pub(super) fn reciprocal_root(v: f32, steps: u32) -> f32 {
    let start = f32::from_bits(0x5F37_59DF_u32.wrapping_sub(v.to_bits() >> 1));
    (0..steps).fold(start, |y, _| y * (1.5 - 0.5 * v * y * y))
}

/// Largest score.
pub(super) fn largest(scores: &[f32]) -> f32 {
    scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// RoPE with bf16 cosines and sines: f32 sums of two products, one rounding each.
pub(super) fn rotate(head: &Head, cosines: &[u16], sines: &[u16]) -> Head {
    let mut out = *head;
    for (i, (cosine, sine)) in cosines.iter().zip(sines).enumerate().take(HEAD_DIM / 2) {
        let (a, b, cosine, sine) = (head[i], head[i + HEAD_DIM / 2], value(*cosine), value(*sine));
        out[i] = rounded(a * cosine - b * sine);
        out[i + HEAD_DIM / 2] = rounded(a * sine + b * cosine);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Conversions that a Phoenix core was seen to do in mode 12: f32 bits and bf16 bits (NOTICE).
    const OBSERVED: &str = include_str!("../../../tests/data/silicon/vec_conv_bf16_edge_r12.json");

    #[test]
    fn conversions_are_those_observed_on_silicon_in_mode_12() {
        let file: serde_json::Value = serde_json::from_str(OBSERVED).unwrap();
        let numbers = |key: &str| -> Vec<u32> {
            file[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
        };
        let (inputs, outputs) = (numbers("input"), numbers("silicon"));
        assert_eq!((inputs.len(), outputs.len()), (96, 96));
        for (input, output) in inputs.into_iter().zip(outputs) {
            assert_eq!(u32::from(narrow(f32::from_bits(input))), output, "{input:#010x}");
        }
    }

    #[test]
    fn lanes_and_reduction_have_their_order() {
        // Lane 0 takes columns 0 and 32 before lane 16 joins it: 2^24 + 1 − 2^24 loses the 1, and the other order keeps it.
        let mut operand = vec![0.0f32; 64];
        (operand[0], operand[32], operand[16]) = (16_777_216.0, 1.0, -16_777_216.0);
        let ones: Vec<u8> = (0..64).flat_map(|_| 0x3F80_u16.to_le_bytes()).collect();
        assert_eq!(dot(&ones, &operand), 0.0);
        (operand[16], operand[32]) = (1.0, -16_777_216.0);
        assert_eq!(dot(&ones, &operand), 1.0);
        let lanes: [f32; 8] = [1e8, 0.0, 0.0, 0.0, -1e8, 1.0, 0.0, 0.0];
        assert_eq!(reduce(lanes), 1.0);
    }

    #[test]
    fn integer_weights_are_signed() {
        let weights: Vec<u8> = (0..32).map(|i| if i == 3 { -127i8 as u8 } else { 0 }).collect();
        let mut lanes = [0.0; LANES];
        add_integer_products(&mut lanes, &weights, &[2.0; 32]);
        assert_eq!(lanes[3], -254.0);
    }

    #[test]
    fn roots_converge_with_their_steps() {
        for v in [1e-5f32, 0.3, 1.0, 7.5, 1234.0] {
            let exact = 1.0 / f64::from(v).sqrt();
            for (steps, bound) in [(2, 5e-6), (3, 3e-7)] {
                let error = (f64::from(reciprocal_root(v, steps)) - exact).abs() / exact;
                assert!(error < bound, "{v}: {error} after {steps} steps");
            }
        }
    }
}
