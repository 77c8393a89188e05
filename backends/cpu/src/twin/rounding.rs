//! Rounding to bf16 as the lane's cores do it.
//!
//! Every f32 to bf16 conversion of the lane is round to nearest, ties to even: by integer arithmetic in the Qwen engine, and in
//! rounding mode 12 (convergent even) of the core elsewhere. What a Phoenix part was observed to return in that mode is held by
//! a test; it differs from [`npuhal_core::dtype::bf16_bits`] in the bits of NaNs only.

/// Bits of `x` in the core's convergent-even mode. A NaN keeps its upper half, and its lowest bit is set where that would be
/// an infinity.
#[inline]
pub(super) const fn bits(x: f32) -> u16 {
    let wide = x.to_bits();
    if wide & 0x7fff_ffff > 0x7f80_0000 {
        let upper = (wide >> 16) as u16;
        return if upper & 0x7f == 0 { upper | 1 } else { upper };
    }
    ((wide + 0x7fff + ((wide >> 16) & 1)) >> 16) as u16
}

/// The value of bf16 bits.
#[inline]
pub(super) const fn value(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `x`, rounded.
#[inline]
pub(super) const fn bf16(x: f32) -> f32 {
    value(bits(x))
}

/// `x`, rounded to float16 as packages store it.
pub(super) fn f16(x: f32) -> f32 {
    half::f16::from_f32(x).to_f32()
}

/// `x` as three bf16 parts, high, middle, low, each the rounding of what is left.
#[inline]
pub(super) const fn split(x: f32) -> [f32; 3] {
    let high = bf16(x);
    let rest = x - high;
    let middle = bf16(rest);
    [high, middle, bf16(rest - middle)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_silicon() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/data/xdna1/vec_conv_bf16_edge_r12.json")).unwrap();
        let list = |key: &str| -> Vec<u32> { serde_json::from_value(golden[key].clone()).unwrap() };
        let (input, silicon) = (list("input"), list("silicon"));
        assert_eq!((input.len(), silicon.len()), (96, 96));
        for (input, silicon) in input.into_iter().zip(silicon) {
            assert_eq!(u32::from(bits(f32::from_bits(input))), silicon, "{input:#x}");
        }
    }

    #[test]
    fn numbers_round_as_everywhere_else() {
        for wide in (0..=u32::MAX).step_by(0x7ff9).map(f32::from_bits).filter(|x| !x.is_nan()) {
            assert_eq!(bits(wide), npuhal_core::dtype::bf16_bits(wide), "{wide:e}");
        }
    }
}
