//! A model with weights that look random, and its forward pass in f64 with the published rounding points.
#![allow(unreachable_pub, reason = "a module of one test file")]

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    SmolLm,
    Qwen,
}

pub fn value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Bits of the nearest bf16, ties to even: of the exact number, through f32 with a sticky bit.
pub fn bf16(x: f64) -> u16 {
    let near = x as f32;
    if !near.is_finite() {
        return (near.to_bits() >> 16) as u16 | if near.is_nan() { 0x40 } else { 0 };
    }
    // f32 towards zero, its lowest bit set where anything was cut off: rounding twice is rounding once.
    let mut bits = near.to_bits();
    if f64::from(near).abs() > x.abs() {
        bits -= 1;
    }
    if f64::from(f32::from_bits(bits)) != x {
        bits |= 1;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn rounded(x: f64) -> f64 {
    value(bf16(x)).into()
}

fn mix(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

/// Uniform in ±`scale`, about `offset`.
fn uniform(seed: u64, index: usize, scale: f64, offset: f64) -> u16 {
    let unit = (mix(seed << 40 ^ index as u64) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    bf16(offset + scale * unit)
}

/// A matrix in bf16, row after row.
#[derive(Debug, Clone, Default)]
pub struct Matrix {
    pub columns: usize,
    pub bits: Vec<u16>,
}

impl Matrix {
    /// Products with vectors of unit variance have the variance `scale²`.
    pub fn random(rows: usize, columns: usize, seed: u64, scale: f64) -> Self {
        let spread = scale * (3.0 / columns as f64).sqrt();
        Self { columns, bits: (0..rows * columns).map(|i| uniform(seed, i, spread, 0.0)).collect() }
    }

    pub fn row(&self, row: usize) -> &[u16] {
        &self.bits[row * self.columns..(row + 1) * self.columns]
    }

    pub fn rows(&self) -> usize {
        self.bits.len() / self.columns
    }

    fn times(&self, operand: &[f64]) -> Vec<f64> {
        let row = |row: &[u16]| row.iter().zip(operand).map(|(bits, x)| f64::from(value(*bits)) * x).sum();
        self.bits.chunks_exact(self.columns).map(row).collect()
    }
}

#[derive(Debug, Clone, Default)]
pub struct Layer {
    pub qkv: Matrix,
    pub bias: Vec<f32>,
    pub o: Matrix,
    pub gate_up: Matrix,
    pub down: Matrix,
    pub input_norm: Vec<u16>,
    pub post_norm: Vec<u16>,
}

#[derive(Debug, Clone)]
pub struct Model {
    pub family: Family,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocab: usize,
    pub layers: Vec<Layer>,
    pub final_norm: Vec<u16>,
    /// Element of the head's matrix.
    pub head: fn(usize, usize) -> u16,
    pub theta: f32,
    epsilon: f64,
}

/// Keys and values of earlier positions.
pub struct Cache {
    rows: Vec<Vec<Vec<u16>>>,
    /// Chunked graphs take cosines and sines as bf16 in both families.
    pub has_bf16_rope: bool,
}

impl Cache {
    pub fn new(model: &Model) -> Self {
        Self { rows: vec![Vec::new(); model.layers.len()], has_bf16_rope: model.family == Family::SmolLm }
    }

    /// Puts what a device computed in the place of a position.
    pub fn replace(&mut self, kv: &[u16], position: usize) {
        let layer_len = kv.len() / self.rows.len();
        for (rows, kv) in self.rows.iter_mut().zip(kv.chunks_exact(layer_len)) {
            rows[position] = kv.to_vec();
        }
    }

    /// A position's keys and values of all layers.
    pub fn row(&self, position: usize) -> Vec<u16> {
        self.rows.iter().flat_map(|rows| rows[position].clone()).collect()
    }
}

/// What a position gives.
pub struct Forward {
    pub kv_new: Vec<u16>,
    /// Residual stream after the last layer.
    pub hidden: Vec<u16>,
    pub normed: Vec<f64>,
}

impl Forward {
    pub fn logits(&self, model: &Model) -> Vec<f64> {
        let logit = |row: usize| -> f64 {
            self.normed.iter().enumerate().map(|(column, x)| f64::from(value((model.head)(row, column))) * x).sum()
        };
        (0..model.vocab).map(logit).collect()
    }
}

impl Model {
    /// Sizes without weights.
    pub fn empty(family: Family, layers: usize) -> Self {
        let (hidden, intermediate, heads, kv_heads, vocab) = match family {
            Family::SmolLm => (576, 1536, 9, 3, 49_152),
            Family::Qwen => (896, 4864, 14, 2, 151_936),
        };
        let (theta, epsilon) = if family == Family::SmolLm { (100_000.0, 1e-5) } else { (1_000_000.0, 1e-6) };
        Self {
            family,
            hidden,
            intermediate,
            heads,
            kv_heads,
            vocab,
            layers: vec![Layer::default(); layers],
            final_norm: Vec::new(),
            head: |_, _| 0,
            theta,
            epsilon,
        }
    }

    pub fn qkv_rows(&self) -> usize {
        64 * (self.heads + 2 * self.kv_heads)
    }

    pub fn random(family: Family, layers: usize, seed: u64) -> Self {
        let mut model = Self::empty(family, layers);
        let Self { hidden, intermediate, .. } = model;
        let qkv_rows = model.qkv_rows();
        let gamma = |seed| (0..hidden).map(|i| uniform(seed, i, 0.3, 1.0)).collect::<Vec<u16>>();
        for (i, layer) in model.layers.iter_mut().enumerate() {
            let seed = 1000 * seed + 10 * i as u64;
            layer.qkv = Matrix::random(qkv_rows, hidden, seed, 1.2);
            layer.o = Matrix::random(hidden, hidden, seed + 1, 1.0);
            layer.gate_up = Matrix::random(2 * intermediate, hidden, seed + 2, 1.5);
            layer.down = Matrix::random(hidden, intermediate, seed + 3, 1.0);
            layer.input_norm = gamma(seed + 4);
            layer.post_norm = gamma(seed + 5);
            layer.bias = (0..qkv_rows).map(|i| (mix(i as u64) % 1000) as f32 / 1234.0 - 0.4).collect();
        }
        model.final_norm = gamma(1000 * seed + 999);
        model.head = |row, column| uniform(77, row * 1024 + column, 0.06, 0.0);
        model
    }

    /// The synthetic model of the published digests.
    pub fn published(family: Family, layers: usize) -> Self {
        fn bits(row: usize, column: usize, layer: usize, tag: usize) -> u16 {
            ((row * 7919 + column * 104_729 + layer * 15_485_863 + tag * 32_452_843) % 0x3F80) as u16
        }
        let mut model = Self::empty(family, layers);
        let (hidden, intermediate, qkv_rows) = (model.hidden, model.intermediate, model.qkv_rows());
        let matrix = |rows: usize, columns, layer, tag| Matrix {
            columns,
            bits: (0..rows * columns).map(|i| bits(i / columns, i % columns, layer, tag)).collect(),
        };
        let gamma = |layer, tag| matrix(1, hidden, layer, tag).bits;
        for (i, layer) in model.layers.iter_mut().enumerate() {
            layer.qkv = matrix(qkv_rows, hidden, i, 1);
            layer.o = matrix(hidden, hidden, i, 2);
            layer.gate_up = matrix(2 * intermediate, hidden, i, 3);
            layer.down = matrix(hidden, intermediate, i, 4);
            layer.input_norm = gamma(i, 5);
            layer.post_norm = gamma(i, 6);
            layer.bias = (0..qkv_rows).map(|c| c as f32 * 0.125 - 64.0 + i as f32).collect();
        }
        model.final_norm = gamma(0, 7);
        model.head = |row, column| bits(row, column, 0, 8);
        model
    }

    /// Weights become what eight bits with a scale for each row hold, in bf16's place: the scale is a power of two, so that
    /// nothing is lost.
    pub fn quantize(&mut self) {
        for layer in &mut self.layers {
            for matrix in [&mut layer.qkv, &mut layer.o, &mut layer.gate_up, &mut layer.down] {
                let scale = super::streams::power_scale(matrix);
                for bits in &mut matrix.bits {
                    *bits = bf16((f64::from(value(*bits)) / scale).round().clamp(-127.0, 127.0) * scale);
                }
            }
        }
    }

    pub fn embedding(&self, token: usize) -> Vec<u16> {
        (0..self.hidden).map(|i| uniform(5, token * 1024 + i, 1.7, 0.0)).collect()
    }

    /// Cosine and sine of a pair at a position, f32.
    pub fn angle(&self, pair: usize, position: usize) -> (f32, f32) {
        let exponent = match self.family {
            Family::SmolLm => -2.0 * pair as f32 / 64.0,
            Family::Qwen => -(pair as f32) / 32.0,
        };
        let (sine, cosine) = (position as f32 * self.theta.powf(exponent)).sin_cos();
        (cosine, sine)
    }

    fn norm(&self, x: &[f64], gamma: &[u16]) -> Vec<f64> {
        let factor = self.norm_factor(x);
        let gammas = gamma.iter().map(|bits| f64::from(value(*bits)));
        match self.family {
            Family::SmolLm => {
                let factor = rounded(factor);
                x.iter().zip(gammas).map(|(x, gamma)| rounded(rounded(x * factor) * gamma)).collect()
            }
            Family::Qwen => x.iter().zip(gammas).map(|(x, gamma)| rounded(x * factor * gamma)).collect(),
        }
    }

    fn norm_factor(&self, x: &[f64]) -> f64 {
        1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + self.epsilon).sqrt()
    }

    /// The final norm of a residual stream: one rounding in both families.
    pub fn final_normed(&self, hidden: &[u16]) -> Vec<u16> {
        let x: Vec<f64> = hidden.iter().map(|bits| value(*bits).into()).collect();
        let factor = self.norm_factor(&x);
        x.iter().zip(&self.final_norm).map(|(x, gamma)| bf16(x * factor * f64::from(value(*gamma)))).collect()
    }

    fn turned(&self, head: &[f64], position: usize, has_bf16_rope: bool) -> Vec<f64> {
        let mut out = head.to_vec();
        for i in 0..32 {
            let (cosine, sine) = self.angle(i, position);
            let (mut cosine, mut sine) = (f64::from(cosine), f64::from(sine));
            if has_bf16_rope {
                (cosine, sine) = (rounded(cosine), rounded(sine));
            }
            out[i] = rounded(head[i] * cosine - head[i + 32] * sine);
            out[i + 32] = rounded(head[i] * sine + head[i + 32] * cosine);
        }
        out
    }

    /// One position; its keys and values join the cache.
    pub fn forward(&self, token: usize, position: usize, cache: &mut Cache) -> Forward {
        let mut x: Vec<f64> = self.embedding(token).iter().map(|bits| value(*bits).into()).collect();
        let mut kv_new = Vec::new();
        for (layer, cached) in self.layers.iter().zip(&mut cache.rows) {
            let projected = layer.qkv.times(&self.norm(&x, &layer.input_norm));
            let bias = |i: usize| if self.family == Family::Qwen { f64::from(layer.bias[i]) } else { 0.0 };
            let projected: Vec<f64> =
                projected.iter().enumerate().map(|(i, x)| rounded(rounded(*x) + bias(i))).collect();
            let heads: Vec<Vec<f64>> = projected
                .chunks_exact(64)
                .enumerate()
                .map(|(i, head)| match i < self.heads + self.kv_heads {
                    true => self.turned(head, position, cache.has_bf16_rope),
                    false => head.to_vec(),
                })
                .collect();
            let new: Vec<u16> = (0..self.kv_heads)
                .flat_map(|head| [self.heads + head, self.heads + self.kv_heads + head])
                .flat_map(|head| heads[head].iter().map(|x| bf16(*x)).collect::<Vec<_>>())
                .collect();
            cached.truncate(position);
            cached.push(new.clone());
            kv_new.extend(new);
            let attended: Vec<f64> = (0..self.heads)
                .flat_map(|head| attend(&heads[head], cached, head / (self.heads / self.kv_heads)))
                .collect();
            x = x.iter().zip(layer.o.times(&attended)).map(|(x, y)| rounded(x + rounded(y))).collect();
            let products = layer.gate_up.times(&self.norm(&x, &layer.post_norm));
            let (gate, up) = products.split_at(self.intermediate);
            let activation = |(gate, up): (&f64, &f64)| {
                let (gate, up) = (rounded(*gate), rounded(*up));
                rounded(gate / (1.0 + (-gate).exp()) * up)
            };
            let activations: Vec<f64> = gate.iter().zip(up).map(activation).collect();
            x = x.iter().zip(layer.down.times(&activations)).map(|(x, y)| rounded(x + rounded(y))).collect();
        }
        let hidden: Vec<u16> = x.iter().map(|x| bf16(*x)).collect();
        let normed = self.final_normed(&hidden).iter().map(|bits| value(*bits).into()).collect();
        Forward { kv_new, hidden, normed }
    }
}

fn attend(query: &[f64], cached: &[Vec<u16>], kv_head: usize) -> Vec<f64> {
    let part = |row: &[u16], half: usize| -> Vec<f64> {
        let at = 128 * kv_head + 64 * half;
        row[at..at + 64].iter().map(|bits| value(*bits).into()).collect()
    };
    let score = |row: &Vec<u16>| query.iter().zip(part(row, 0)).map(|(q, k)| q * k).sum::<f64>() / 8.0;
    let scores: Vec<f64> = cached.iter().map(score).collect();
    let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - peak).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut out = vec![0.0; 64];
    for (weight, row) in weights.iter().zip(cached) {
        out.iter_mut().zip(part(row, 1)).for_each(|(sum, v)| *sum += weight * v / total);
    }
    out.into_iter().map(rounded).collect()
}

/// Root of the mean square of the differences over that of the wanted values.
pub fn rms_error(found: &[f64], wanted: &[f64]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let difference: f64 = found.iter().zip(wanted).map(|(a, b)| (a - b) * (a - b)).sum();
    (difference / wanted.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
