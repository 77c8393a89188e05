//! Rotations, as the kernels read them.

use super::{HEAD_DIM, ROPE_BYTES};
use npuhal_core::dtype::bf16_bits;

const PAIRS: usize = HEAD_DIM / 2;
/// Base for which the published host has a table.
const TABLE_THETA: f32 = 1e6;

/// Angle that a position adds to each pair of elements.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    inverse_frequencies: [f32; PAIRS],
}

impl RopeTable {
    /// Table for base `theta`.
    #[must_use]
    pub fn new(theta: f32) -> Self {
        let inverse_frequencies =
            std::array::from_fn(|pair| if theta == TABLE_THETA { tabled(pair) } else { computed(theta, pair) });
        Self { inverse_frequencies }
    }

    /// Angle a position adds to each pair, in radians.
    #[must_use]
    pub fn inverse_frequencies(&self) -> &[f32; PAIRS] {
        &self.inverse_frequencies
    }

    /// Cosines, then sines, of `position` in bf16.
    #[must_use]
    pub fn row(&self, position: u32) -> [u8; ROPE_BYTES] {
        let mut row = [0; ROPE_BYTES];
        let (cosines, sines) = row.split_at_mut(ROPE_BYTES / 2);
        let pairs = cosines.chunks_exact_mut(2).zip(sines.chunks_exact_mut(2));
        for ((cosine, sine), inverse) in pairs.zip(&self.inverse_frequencies) {
            // The product is f32; sine and cosine are those of f32, correctly rounded.
            let (s, c) = f64::from(inverse * position as f32).sin_cos();
            cosine.copy_from_slice(&bf16_bits(c as f32).to_le_bytes());
            sine.copy_from_slice(&bf16_bits(s as f32).to_le_bytes());
        }
        row
    }
}

/// The published host takes a table with five significant digits; computing the powers changes bits from position 3 on.
fn tabled(pair: usize) -> f32 {
    let exact = 10f64.powf(-6.0 * pair as f64 / PAIRS as f64);
    // Five digits always parse.
    format!("{exact:.4e}").parse().unwrap_or(exact as f32)
}

fn computed(theta: f32, pair: usize) -> f32 {
    theta.powf(-2.0 * pair as f32 / HEAD_DIM as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_five_digits() {
        let table = RopeTable::new(1e6);
        let inverse = table.inverse_frequencies();
        for (pair, wanted) in
            [(0, 1.0), (1, 0.80584), (2, 0.64938), (3, 0.52330), (31, 1.2409e-3), (32, 1e-3), (63, 1.2409e-6)]
        {
            assert_eq!(inverse[pair], wanted, "{pair}");
        }
        for (pair, value) in inverse.iter().enumerate() {
            let exact = 1e6f64.powf(-(pair as f64) / 64.0);
            assert!((f64::from(*value) / exact - 1.0).abs() < 5.1e-5, "{pair}");
            let digits = format!("{value:.4e}").parse::<f32>().unwrap();
            assert_eq!(digits, *value, "{pair}");
        }
        let other = RopeTable::new(10_000.0);
        assert_eq!((other.inverse_frequencies()[0], other.inverse_frequencies()[32]), (1.0, 0.01));
    }

    #[test]
    fn rotations_start_at_one_and_follow_the_angle() {
        let table = RopeTable::new(1e6);
        let value = |row: &[u8], i: usize| u16::from_le_bytes([row[2 * i], row[2 * i + 1]]);
        let start = table.row(0);
        assert!((0..64).all(|i| value(&start, i) == 0x3F80 && value(&start, 64 + i) == 0));
        let third = table.row(3);
        // cos 3 = -0.98999, sin 3 = 0.14112; cos and sin of 3 · 0.80584 = -0.74923 and 0.66232.
        assert_eq!((value(&third, 0), value(&third, 64)), (bf16_bits(-0.98999), bf16_bits(0.14112)));
        assert_eq!((value(&third, 1), value(&third, 65)), (bf16_bits(-0.7492), bf16_bits(0.6623)));
    }

    #[test]
    fn the_table_differs_from_computed_powers_where_it_is_said_to() {
        let table = RopeTable::new(1e6);
        let powers = RopeTable { inverse_frequencies: std::array::from_fn(|pair| computed(1e6, pair)) };
        let differs = |position| table.row(position) != powers.row(position);
        assert!((0..64).any(differs));
        assert!(!differs(0));
    }
}
