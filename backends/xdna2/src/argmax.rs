//! The published choice of the next token: the largest logit in bf16, the lowest id among equals.

/// Order of bf16 bits as an unsigned number: negative values are reversed below the positive ones.
#[must_use]
pub fn bf16_key(bits: u16) -> u16 {
    bits ^ if bits & 0x8000 != 0 { 0xFFFF } else { 0x8000 }
}

/// Id of the first largest logit; `None` without logits.
#[must_use]
pub fn argmax_bf16(logits: impl IntoIterator<Item = u16>) -> Option<u32> {
    let mut best: Option<(u16, u32)> = None;
    for (id, bits) in logits.into_iter().enumerate() {
        let key = bf16_key(bits);
        if best.is_none_or(|(largest, _)| key > largest) {
            best = Some((key, u32::try_from(id).ok()?));
        }
    }
    best.map(|(_, id)| id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_core::dtype::{bf16_bits, bf16_value};

    #[test]
    fn keys_order_bits_as_numbers() {
        let mut all: Vec<u16> = (0..=u16::MAX).filter(|bits| !bf16_value(*bits).is_nan()).collect();
        all.sort_by_key(|bits| bf16_key(*bits));
        assert!(all.windows(2).all(|pair| bf16_value(pair[0]) <= bf16_value(pair[1])));
        assert!(bf16_key(0x8000) < bf16_key(0), "-0 is below 0");
    }

    #[test]
    fn the_first_largest_wins() {
        let choose = |logits: &[f32]| argmax_bf16(logits.iter().map(|logit| bf16_bits(*logit)));
        assert_eq!(choose(&[-3.0, -1.0, -2.0]), Some(1));
        assert_eq!(choose(&[0.5, 2.0, 2.0, 1.0]), Some(1));
        assert_eq!(choose(&[-0.0, 0.0]), Some(1));
        assert_eq!(choose(&[f32::NEG_INFINITY, -1e30]), Some(1));
        // Equal once they are bf16.
        assert_eq!(choose(&[1.0, 1.001]), Some(0));
        assert_eq!(choose(&[]), None);
    }
}
