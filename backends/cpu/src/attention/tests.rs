use super::*;
use crate::features::Features;
use crate::kv::{KvCache, write};
use npuhal_core::stage::{Row, SequenceId};
use proptest::prelude::*;

struct Case {
    shape: KvShape,
    group: usize,
    cache: KvCache,
    rows: Vec<Row>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    q: Vec<f32>,
    /// Positions a row sees.
    window: usize,
}

fn numbers(seed: &mut u64, len: usize, size: f32) -> Vec<f32> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * size
    };
    (0..len).map(|_| next()).collect()
}

/// Two sequences: the first of `positions`, the second of half as many; the last `tail` rows of each are queries.
#[allow(unsafe_code, reason = "writes the cache")]
fn case(shape: KvShape, group: usize, positions: usize, tail: usize, mut seed: u64, size: f32) -> Case {
    let mut cache = KvCache::new(shape, 1, positions, 2);
    let (mut keys, mut values, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, len) in [positions, positions / 2 + 1].into_iter().enumerate() {
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for position in 0..len {
            let row = Row { sequence: SequenceId(sequence as u32), token: 0, position: position as u32 };
            cache.admit(&[row]).unwrap();
            let width = shape.kv_heads * shape.head_dim;
            let (key, value) = (numbers(&mut seed, width, size), numbers(&mut seed, width, 1.0));
            // SAFETY: one position after the other.
            unsafe { write(cache.page_mut(0, row), shape, position, &key, &value) };
            cache.commit(&[row]);
            k.extend(key);
            v.extend(value);
            if position + tail >= len {
                rows.push(row);
            }
        }
        keys.push(k);
        values.push(v);
    }
    let q = numbers(&mut seed, rows.len() * shape.kv_heads * group * shape.head_dim, 1.0);
    Case { shape, group, cache, rows, keys, values, q, window: usize::MAX }
}

impl Case {
    fn first(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window)
    }

    fn run(&self, features: Features, threads: usize, rows: std::ops::Range<usize>) -> Vec<u32> {
        let pool = Pool::new(threads).unwrap();
        let width = self.q.len() / self.rows.len();
        let views: Vec<RowPages<'_>> = self.rows[rows.clone()]
            .iter()
            .map(|row| {
                let position = row.position as usize;
                RowPages { pages: self.cache.pages(0, row.sequence), position, first: self.first(position) }
            })
            .collect();
        let q = &self.q[rows.start * width..rows.end * width];
        let mut out = vec![f32::NAN; q.len()];
        Attention::new().run(&pool, features.table(), self.shape, &views, q, &mut out).unwrap();
        out.iter().map(|out| out.to_bits()).collect()
    }

    /// Row after row, one call each.
    fn one_by_one(&self, features: Features, threads: usize) -> Vec<u32> {
        (0..self.rows.len()).flat_map(|row| self.run(features, threads, row..row + 1)).collect()
    }

    fn exact(&self) -> Vec<f64> {
        let dim = self.shape.head_dim;
        let kv_width = self.shape.kv_heads * dim;
        let rounded = |x: f32| half::f16::from_f32(x).to_f64();
        let mut out = Vec::new();
        for (row, q) in self.rows.iter().zip(self.q.chunks_exact(kv_width * self.group)) {
            let (keys, values) = (&self.keys[row.sequence.0 as usize], &self.values[row.sequence.0 as usize]);
            for (head, q) in q.chunks_exact(dim).enumerate() {
                let at = |position: usize, d: usize| position * kv_width + head / self.group * dim + d;
                let first = self.first(row.position as usize);
                let scores: Vec<f64> = (first..=row.position as usize)
                    .map(|position| (0..dim).map(|d| f64::from(q[d]) * rounded(keys[at(position, d)])).sum())
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let total: f64 = weights.iter().zip(first..).map(|(w, p)| w * rounded(values[at(p, d)])).sum();
                    out.push(total / sum);
                }
            }
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 3 } else { 24 }))]

    #[test]
    fn attention_is_exact_and_depends_on_the_row_alone(
        kv_heads in 1..4usize,
        head_dim in prop::sample::select(vec![8usize, 24, 32, 64, 80, 128]),
        group in 1..8usize,
        positions in prop::sample::select(vec![1usize, 31, 32, 33, 255, 256, 257, 600]),
        tail in 1..40usize,
        size in prop::sample::select(vec![0.1f32, 1.0, 20.0]),
        window in prop::sample::select(vec![usize::MAX, 1, 2, 31, 256, 257, 300]),
        seed: u64,
    ) {
        let case =
            Case { window, ..case(KvShape { kv_heads, head_dim }, group, positions, tail, seed, size) };
        let exact = case.exact();
        for features in std::iter::once(Features::portable()).chain(Features::avx2()) {
            let together = case.run(features, 1, 0..case.rows.len());
            for (found, wanted) in together.iter().zip(&exact) {
                let found = f64::from(f32::from_bits(*found));
                // Scores of size 20 × 128 elements carry the rounding of f32 sums into the exponent.
                prop_assert!((found - wanted).abs() < 2e-6 + 4e-6 * f64::from(size) * head_dim as f64, "{found} {wanted}");
            }
            for threads in [1, 2, 3] {
                prop_assert_eq!(&case.one_by_one(features, threads), &together);
                prop_assert_eq!(&case.run(features, threads, 0..case.rows.len()), &together);
            }
        }
    }
}

#[test]
fn the_cache_admits_only_what_continues_a_sequence() {
    use npuhal_core::error::RunError;
    let row = |sequence, position| Row { sequence: SequenceId(sequence), token: 0, position };
    let mut cache = KvCache::new(KvShape { kv_heads: 1, head_dim: 8 }, 2, 300, 2);
    assert_eq!(cache.allocated_bytes(), 0);
    assert!(matches!(cache.admit(&[row(0, 1)]), Err(RunError::BadRows { .. })));
    assert!(matches!(cache.admit(&[row(0, 0), row(0, 2)]), Err(RunError::BadRows { .. })));
    assert!(matches!(cache.admit(&[row(2, 0)]), Err(RunError::Capacity { what: "sequences", found: 3, limit: 2 })));
    let rows = [row(0, 0), row(1, 0), row(0, 1)];
    cache.admit(&rows).unwrap();
    assert_eq!(cache.len(SequenceId(0)), 0, "admitted is not yet held");
    cache.commit(&rows);
    assert_eq!((cache.len(SequenceId(0)), cache.len(SequenceId(1))), (2, 1));
    let page_bytes = 256 * (8 + 32) * 2;
    assert_eq!(cache.allocated_bytes(), 2 * 2 * page_bytes);
    let more: Vec<Row> = (2..300).map(|position| row(0, position)).collect();
    cache.admit(&more).unwrap();
    cache.commit(&more);
    assert_eq!(cache.allocated_bytes(), 2 * 3 * page_bytes, "a page more for each layer of sequence 0");
    assert!(matches!(cache.admit(&[row(0, 300)]), Err(RunError::Capacity { what: "positions", limit: 300, .. })));
    assert_eq!(cache.truncate(SequenceId(0), 500), 300);
    assert_eq!(cache.truncate(SequenceId(0), 5), 5);
    assert_eq!(cache.truncate(SequenceId(7), 5), 0);
    cache.admit(&[row(0, 5)]).unwrap();
}
