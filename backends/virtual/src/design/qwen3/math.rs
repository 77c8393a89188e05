//! Arithmetic of the cores.

/// The value of two bytes in bf16.
pub(super) fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Bits of the nearest bf16, ties to even. A NaN stays one.
pub(super) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((u64::from(bits) + 0x7FFF + u64::from(bits >> 16 & 1)) >> 16) as u16
}

/// The nearest value that bf16 holds.
pub(super) fn rounded(value: f32) -> f32 {
    from_bf16(to_bf16(value).to_le_bytes())
}

/// Values of bytes in bf16.
pub(super) fn widen(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|pair| from_bf16(*pair)).collect()
}

/// Bytes of values in bf16.
pub(super) fn narrow(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| to_bf16(*value).to_le_bytes()).collect()
}

/// `values / sqrt(mean of squares + epsilon) · weights`, f32.
pub(super) fn rms_norm(values: &[f32], weights: &[f32], epsilon: f32) -> Vec<f32> {
    let squares: f32 = values.iter().map(|value| value * value).sum();
    let factor = 1.0 / (squares / values.len().max(1) as f32 + epsilon).sqrt();
    values.iter().zip(weights).map(|(value, weight)| value * factor * weight).collect()
}

/// Rotates a head whose halves are the two coordinates of its pairs.
pub(super) fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (firsts, seconds) = head.split_at_mut(cosines.len());
    for ((first, second), (cosine, sine)) in firsts.iter_mut().zip(seconds).zip(cosines.iter().zip(sines)) {
        (*first, *second) = (*first * cosine - *second * sine, *second * cosine + *first * sine);
    }
}

/// `x · sigmoid(x)`.
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_rounded_to_nearest_even() {
        for (value, bits) in [(1.0, 0x3F80), (1.0 + 1.0 / 256.0, 0x3F80), (1.0 + 3.0 / 256.0, 0x3F82), (-2.0, 0xC000)] {
            assert_eq!(to_bf16(value), bits, "{value}");
        }
        assert_eq!(to_bf16(f32::MAX), 0x7F80);
        assert_eq!(rounded(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(rounded(f32::from_bits(0x7F80_0001)).is_nan());
        assert_eq!(widen(&narrow(&[0.5, -3.0])), [0.5, -3.0]);
    }

    #[test]
    fn norms_and_rotations() {
        let normed = rms_norm(&[3.0, -4.0], &[1.0, 2.0], 0.0);
        let factor = 1.0 / 12.5f32.sqrt();
        assert!((normed[0] - 3.0 * factor).abs() < 1e-6 && (normed[1] + 8.0 * factor).abs() < 1e-6);
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0]);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6 && silu(-200.0) == 0.0);
    }
}
