//! One row against another.

use npuhal_core::dtype::bf16_bits;
use npuhal_core::stage::TokenId;
use serde::Serialize;

/// What is still parity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tolerance {
    /// Smallest cosine of a row with its counterpart.
    pub cosine: f64,
    /// Largest absolute error of an element, as a share of the root mean square of the reference row.
    pub relative_error: f64,
    /// Another likeliest token is accepted where the reference's two highest logits are closer than this.
    pub near_tie: f64,
}

impl Default for Tolerance {
    /// For a residual stream in bf16 over a few dozen layers: twice what `npuhal parity` finds between `exact` and the xdna1 lane on
    /// the virtual NPU, engine and chunked graphs, with SmolLM2-135M (from its Q4_1 file), 24 drawn ids of each of the seeds 0 to 3
    /// and two prompts of 40 and 38. There 1 - cosine is at most 0.0244 and the error 2.75 of the root mean square, in rows whose
    /// largest elements are much larger than the others; Qwen2.5-Coder-0.5B with a prompt of 37 stays below. Where another token
    /// is likeliest, the two highest logits are at most 0.204 apart; the published comparison of the xdna1 hardware with its
    /// reference lets 0.5 pass.
    fn default() -> Self {
        Self { cosine: 0.95, relative_error: 5.5, near_tie: 0.5 }
    }
}

impl Tolerance {
    /// For f64 against f64 in another order.
    pub const EXACT: Self = Self { cosine: 0.999_999_9, relative_error: 1e-4, near_tie: 1e-3 };

    /// What is parity between two that each have a tolerance of their own.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            cosine: self.cosine.min(other.cosine),
            relative_error: self.relative_error.max(other.relative_error),
            near_tie: self.near_tie.max(other.near_tie),
        }
    }

    pub(super) fn admits(&self, comparison: &Comparison) -> bool {
        // Comparisons that are not numbers are not within anything.
        comparison.cosine >= self.cosine && comparison.relative_error <= self.relative_error
    }
}

pub(super) struct Comparison {
    pub(super) elements: usize,
    pub(super) cosine: f64,
    pub(super) abs_error: f64,
    pub(super) relative_error: f64,
    pub(super) worst_element: usize,
    pub(super) bf16_ulp: u32,
    pub(super) close_elements: usize,
}

/// Compares rows of the same length.
pub(super) fn compare(reference: &[f32], found: &[f32]) -> Comparison {
    let (mut dot, mut reference_norm, mut found_norm) = (0.0, 0.0, 0.0);
    let (mut abs_error, mut worst_element, mut bf16_ulp, mut close_elements) = (0.0, 0, 0, 0);
    let mut is_finite = true;
    for (element, (&wanted, &seen)) in reference.iter().zip(found).enumerate() {
        let (a, b) = (f64::from(wanted), f64::from(seen));
        (dot, reference_norm, found_norm) = (dot + a * b, reference_norm + a * a, found_norm + b * b);
        let error = (a - b).abs();
        if (error > abs_error || error.is_nan()) && is_finite {
            (abs_error, worst_element) = (error, element);
        }
        is_finite &= error.is_finite();
        let distance = bf16_distance(wanted, seen);
        bf16_ulp = bf16_ulp.max(distance);
        close_elements += usize::from(distance <= 1);
    }
    let rms = (reference_norm / reference.len().max(1) as f64).sqrt();
    let norms = (reference_norm * found_norm).sqrt();
    Comparison {
        elements: reference.len(),
        // Two rows of zeros are the same; zeros against something are not.
        cosine: if reference_norm == 0.0 && found_norm == 0.0 { 1.0 } else { dot / norms },
        relative_error: if abs_error == 0.0 { 0.0 } else { abs_error / rms },
        abs_error,
        worst_element,
        bf16_ulp,
        close_elements,
    }
}

/// Steps between the bf16 values nearest to `a` and `b`; zero has one value whatever its sign, and what is not a number is as
/// far away as can be.
#[must_use]
pub fn bf16_distance(a: f32, b: f32) -> u32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() && b.is_nan() { 0 } else { u32::MAX };
    }
    let order = |value: f32| {
        let bits = bf16_bits(value);
        let magnitude = i32::from(bits & 0x7FFF);
        if bits & 0x8000 == 0 { magnitude } else { -magnitude }
    };
    order(a).abs_diff(order(b))
}

pub(super) struct TopComparison {
    pub(super) reference: TokenId,
    pub(super) found: TokenId,
    /// Difference of the reference's two highest logits.
    pub(super) margin: f64,
    /// Of the `top_k` highest logits of each, those that both have.
    pub(super) overlap: usize,
}

pub(super) fn compare_tops(reference: &[f32], found: &[f32], top_k: usize) -> TopComparison {
    let wanted = highest(reference, top_k.max(2));
    let seen = highest(found, top_k.max(2));
    let ids = |top: &[(TokenId, f32)]| top.iter().take(top_k).map(|(id, _)| *id).collect::<Vec<_>>();
    let (wanted_ids, seen_ids) = (ids(&wanted), ids(&seen));
    let first = |top: &[(TokenId, f32)]| top.first().map_or(0, |(id, _)| *id);
    TopComparison {
        reference: first(&wanted),
        found: first(&seen),
        margin: match wanted.as_slice() {
            [(_, first), (_, second), ..] => f64::from(*first) - f64::from(*second),
            _ => f64::INFINITY,
        },
        overlap: seen_ids.iter().filter(|id| wanted_ids.contains(id)).count(),
    }
}

/// The `count` highest, best first, the lower id first on ties; what is not a number comes last.
fn highest(logits: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    let mut best: Vec<(TokenId, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in logits.iter().enumerate() {
        let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        if best.len() < count || best.last().is_some_and(|&(_, least)| logit > least) {
            let at = best.partition_point(|&(_, held)| held >= logit);
            best.insert(at, (id as TokenId, logit));
            best.truncate(count);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_distances_count_steps_through_zero() {
        assert_eq!(bf16_distance(1.0, 1.0 + 1.0 / 128.0), 1);
        assert_eq!(bf16_distance(1.0, 1.0 + 1.0 / 1024.0), 0, "both round to 1");
        assert_eq!(bf16_distance(0.0, -0.0), 0);
        let least = f32::from_bits(0x0001_0000);
        assert_eq!(bf16_distance(least, -least), 2);
        assert_eq!(bf16_distance(f32::NAN, 1.0), u32::MAX);
        assert_eq!(bf16_distance(f32::INFINITY, f32::MAX), 0, "the largest f32 rounds to infinity");
    }

    #[test]
    fn rows_are_measured() {
        let found = compare(&[3.0, 4.0], &[3.0, 4.5]);
        assert_eq!((found.abs_error, found.worst_element), (0.5, 1));
        assert_eq!(found.relative_error, 0.5 / 12.5f64.sqrt());
        assert!((found.cosine - 27.0 / (5.0 * 29.25f64.sqrt())).abs() < 1e-12);
        assert_eq!(compare(&[0.0; 4], &[0.0; 4]).cosine, 1.0);
        let broken = compare(&[1.0, 2.0, 3.0], &[1.0, f32::NAN, 9.0]);
        assert_eq!(broken.worst_element, 1);
        for tolerance in [Tolerance::default(), Tolerance { cosine: -1.0, relative_error: f64::MAX, near_tie: 0.0 }] {
            assert!(!tolerance.admits(&broken), "what is not a number is out of every tolerance");
        }
        assert!(!Tolerance::default().admits(&compare(&[0.0; 4], &[1.0; 4])), "zeros are never taken for a result");
    }

    #[test]
    fn tops_are_compared_by_id_and_margin() {
        let found = compare_tops(&[1.0, 3.0, 2.5, 0.0], &[1.0, 2.0, 2.5, 0.0], 2);
        assert_eq!((found.reference, found.found, found.margin, found.overlap), (1, 2, 0.5, 2));
        let found = compare_tops(&[1.0, 1.0], &[f32::NAN, 1.0], 1);
        assert_eq!((found.reference, found.found, found.margin, found.overlap), (0, 1, 0.0, 0));
    }

    #[test]
    fn the_looser_of_two_tolerances_counts() {
        let loose = Tolerance { cosine: 0.5, relative_error: 0.1, near_tie: 3.0 };
        let both = Tolerance { cosine: 0.9, relative_error: 0.2, near_tie: 1.0 }.with(loose);
        assert_eq!(both, Tolerance { cosine: 0.5, relative_error: 0.2, near_tie: 3.0 });
    }
}
