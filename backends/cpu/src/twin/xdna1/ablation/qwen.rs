//! The same for the Qwen engine, which has no tables: each place where it rounds to bf16, everything else in f32 or better. One row
//! is told apart, the one that is furthest from exact.

use super::{Bench, POSITIONS, THREADS, agreement, print, product};
use crate::exact::{ExactOptions, ExactSegment};
use crate::twin::rounding::bf16;
use crate::twin::xdna1::weights::LayerWeights;
use crate::twin::xdna1::{Lane, inverse_frequencies};
use npuhal_core::stage::Segment;
use npuhal_models::package::HEAD_DIM;
use npuhal_models::{ModelConfig, TensorRole};
use npuhal_registry::SegmentSpan;
use std::io::Write;

/// A place where the engine rounds to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Residual stream after both additions.
    Residual,
    /// Elements of the layer norms.
    Norm,
    /// Elements of the final norm.
    FinalNorm,
    /// Query, key and value rows as they leave their projection, and with their bias.
    Qkv,
    /// Rotated queries and keys.
    Rotated,
    /// Sum of values.
    Attended,
    /// Rows of the output projection.
    Output,
    /// Gate and up rows.
    GateUp,
    /// Their SwiGLU.
    Gated,
    /// Rows of the down projection.
    Down,
}

impl Place {
    const ALL: [Self; 10] = [
        Self::Residual,
        Self::Norm,
        Self::FinalNorm,
        Self::Qkv,
        Self::Rotated,
        Self::Attended,
        Self::Output,
        Self::GateUp,
        Self::Gated,
        Self::Down,
    ];
}

/// A pass that rounds at `places`.
struct Reading<'a> {
    places: &'a [Place],
    config: &'a ModelConfig,
}

impl Reading<'_> {
    fn round(&self, place: Place, mut values: Vec<f32>) -> Vec<f32> {
        if self.places.contains(&place) {
            values.iter_mut().for_each(|x| *x = bf16(*x));
        }
        values
    }

    fn norm(&self, place: Place, residual: &[f32], gamma: &[f32]) -> Vec<f32> {
        let row = |x: &[f32]| -> Vec<f32> {
            let squares: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let inverse = 1.0 / (squares / x.len() as f64 + f64::from(self.config.rms_norm_eps)).sqrt();
            x.iter().zip(gamma).map(|(x, gamma)| (f64::from(*x) * inverse * f64::from(*gamma)) as f32).collect()
        };
        self.round(place, residual.chunks_exact(gamma.len()).flat_map(row).collect())
    }

    fn rotate(&self, mut values: Vec<f32>, width: usize) -> Vec<f32> {
        let frequencies = inverse_frequencies(self.config.rope.theta);
        for (position, row) in values.chunks_exact_mut(width).enumerate() {
            for head in row.chunks_exact_mut(HEAD_DIM) {
                let (low, high) = head.split_at_mut(HEAD_DIM / 2);
                for ((a, b), frequency) in low.iter_mut().zip(high).zip(frequencies) {
                    let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                    let (x, y) = (f64::from(*a), f64::from(*b));
                    (*a, *b) = ((x * cos - y * sin) as f32, (x * sin + y * cos) as f32);
                }
            }
        }
        self.round(Place::Rotated, values)
    }

    fn attend(&self, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let (width, kv_width) = (self.config.q_width(), self.config.kv_width());
        let group = self.config.heads / self.config.kv_heads;
        let mut attended = vec![0.0; q.len()];
        for (at, (query, out)) in q.chunks_exact(HEAD_DIM).zip(attended.chunks_exact_mut(HEAD_DIM)).enumerate() {
            let (position, head) = (at / (width / HEAD_DIM), at % (width / HEAD_DIM));
            let of = |rows: &[f32], row: usize, element: usize| {
                f64::from(rows[row * kv_width + head / group * HEAD_DIM + element])
            };
            let score = |row: usize| (0..HEAD_DIM).map(|at| f64::from(query[at]) * of(k, row, at)).sum::<f64>() * 0.125;
            let scores: Vec<f64> = (0..=position).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = shares.iter().sum();
            for (element, out) in out.iter_mut().enumerate() {
                let values = shares.iter().enumerate().map(|(row, share)| share * of(v, row, element));
                *out = (values.sum::<f64>() / sum) as f32;
            }
        }
        self.round(Place::Attended, attended)
    }

    fn layer(&self, weights: &LayerWeights, residual: Vec<f32>) -> Vec<f32> {
        let normed = self.norm(Place::Norm, &residual, &weights.input_norm);
        let bias = weights.bias.as_deref().unwrap_or_default();
        let mut start = 0;
        let [q, k, v] = [&weights.q, &weights.k, &weights.v].map(|matrix| {
            let mut rows = self.round(Place::Qkv, product(matrix, &normed));
            let bias = &bias[start..start + matrix.features];
            start += matrix.features;
            rows.chunks_exact_mut(bias.len()).flat_map(|row| row.iter_mut().zip(bias)).for_each(|(x, bias)| *x += bias);
            self.round(Place::Qkv, rows)
        });
        let (q, k) = (self.rotate(q, self.config.q_width()), self.rotate(k, self.config.kv_width()));
        let attended = self.attend(&q, &k, &v);
        let residual = self.add(residual, &self.round(Place::Output, product(&weights.o, &attended)));
        let normed = self.norm(Place::Norm, &residual, &weights.post_attention_norm);
        let [gate, up] = [&weights.gate, &weights.up].map(|matrix| self.round(Place::GateUp, product(matrix, &normed)));
        let swiglu = |(gate, up): (&f32, &f32)| {
            let gate = f64::from(*gate);
            (gate / (1.0 + (-gate).exp()) * f64::from(*up)) as f32
        };
        let wide = self.round(Place::Gated, gate.iter().zip(&up).map(swiglu).collect());
        self.add(residual, &self.round(Place::Down, product(&weights.down, &wide)))
    }

    fn add(&self, mut residual: Vec<f32>, change: &[f32]) -> Vec<f32> {
        residual.iter_mut().zip(change).for_each(|(x, change)| *x += change);
        self.round(Place::Residual, residual)
    }

    /// Logits of all prompts.
    fn logits(&self, bench: &Bench) -> Vec<Vec<f32>> {
        let width = self.config.hidden_size;
        let embedding = bench.model.require(TensorRole::TokenEmbedding).unwrap();
        let mut logits = Vec::new();
        for tokens in &bench.prompts {
            // The embedding of the model is bf16, so no rounding is seen there.
            let mut residual = vec![0.0; tokens.len() * width];
            for (token, out) in tokens.iter().zip(residual.chunks_exact_mut(width)) {
                embedding.dequantize_row(*token as usize, out).unwrap();
            }
            for weights in &bench.weights.layers {
                residual = self.layer(weights, residual);
            }
            let normed = self.norm(Place::FinalNorm, &residual, bench.weights.final_norm.as_deref().unwrap());
            let rows = product(bench.weights.head.as_ref().unwrap(), &normed);
            logits.extend(rows.chunks_exact(self.config.vocab_size).map(<[f32]>::to_vec));
        }
        logits
    }
}

/// The row that is furthest from exact.
fn outlier(found: &[Vec<f32>], exact: &[Vec<f32>]) -> usize {
    let cosines: Vec<f64> = (0..found.len()).map(|row| agreement(&found[row..=row], &exact[row..=row]).0).collect();
    (0..found.len()).min_by(|a, b| cosines[*a].total_cmp(&cosines[*b])).unwrap()
}

/// Prints how near `found` is without the row `outlier`, and how near that is. The least cosine.
fn show(what: &str, found: &[Vec<f32>], exact: &[Vec<f32>], outlier: usize) -> f64 {
    let without = |rows: &[Vec<f32>]| [&rows[..outlier], &rows[outlier + 1..]].concat();
    let others = agreement(&without(found), &without(exact));
    print(what, others);
    let alone = agreement(&found[outlier..=outlier], &exact[outlier..=outlier]);
    print(&format!("{what}: the outlier"), alone);
    others.1.min(alone.1)
}

#[test]
fn what_each_rounding_costs_the_qwen_engine() {
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        let _ = writeln!(
            std::io::stderr().lock(),
            "soak: what_each_rounding_costs_the_qwen_engine runs with NPUHAL_SOAK=1"
        );
        return;
    }
    let bench = Bench::new("qwen2.5-coder-0.5b");
    let config = bench.config();
    let exact = {
        // Nothing is kept dequantized: the head alone would be a gigabyte.
        let options = ExactOptions { dequantized_bytes: 0, ..ExactOptions::new(64, THREADS) };
        let open = || -> Box<dyn Segment> {
            Box::new(ExactSegment::open(&bench.model, SegmentSpan::whole(config), options).unwrap())
        };
        bench.of_segment(&open)
    };
    let of = |places: &[Place]| Reading { places, config }.logits(&bench);
    let all = of(&Place::ALL);
    let outlier = outlier(&all, &exact);
    let (text, position) = (outlier / POSITIONS, outlier % POSITIONS);
    let _ = writeln!(
        std::io::stderr().lock(),
        "the outlier is position {position} of text {text}, token {}",
        bench.prompts[text][position]
    );
    let show = |what: &str, found: &[Vec<f32>]| show(what, found, &exact, outlier);
    assert!(show("no rounding", &of(&[])) > 0.9999, "the rest of the pass is exact");
    show("the twin", &bench.twin(Lane::Qwen));
    show("the CPU stage", &bench.twin(Lane::Cpu));
    show("all roundings", &all);
    for place in Place::ALL {
        show(&format!("{place:?} alone"), &of(&[place]));
        let others: Vec<Place> = Place::ALL.into_iter().filter(|other| *other != place).collect();
        show(&format!("{place:?} exact"), &of(&others));
    }
}
