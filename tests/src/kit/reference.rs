//! A scalar decoder forward pass in f64 over the weights of a GGUF file: the second reading.
//!
//! Weights are dequantized straight from their blocks; all arithmetic is f64, the KV cache too, and the whole prompt runs at
//! once without any cache logic.

use crate::kit::dequantize;
use crate::kit::gguf::{GgufFile, GgufTensor, Value, block, weight_type};

/// A model to be computed.
pub struct Reference<'a> {
    file: &'a GgufFile,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Rotation of layers that see everything, and of those with a window.
    global: Turns,
    local: Turns,
    interleaved: bool,
    eps: f64,
    family: Family,
}

/// Angles of the rotated pairs for one position, and the factor on what is rotated.
#[derive(Debug, Clone)]
struct Turns {
    frequencies: Vec<f64>,
    magnitude: f64,
}

/// What a family does beyond the plain decoder, after its definition in the transformers library.
#[derive(Debug, Clone)]
struct Family {
    /// `gelu_pytorch_tanh` instead of SiLU.
    gelu: bool,
    embedding_scale: f64,
    residual_scale: f64,
    attention_scale: f64,
    logit_divisor: f64,
    window: Option<usize>,
    /// Every n-th layer has no window; 0 is none of them.
    full_every: usize,
    /// Which layers have the window, where the file tells it one by one.
    windowed: Option<Vec<bool>>,
    softcap: Option<f64>,
    /// Every n-th layer has no rotation; 0 is none of them.
    unrotated_every: usize,
}

/// Everything that a pass can show, by position.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// Residual stream after each layer: `[layer][position]`.
    pub layer_out: Vec<Vec<Vec<f64>>>,
    /// Keys after RoPE: `[layer][position]`, KV heads × head dim.
    pub keys: Vec<Vec<Vec<f64>>>,
    /// Values: `[layer][position]`, KV heads × head dim.
    pub values: Vec<Vec<Vec<f64>>>,
    /// After the final norm: `[position]`.
    pub normed: Vec<Vec<f64>>,
    /// Logits of the positions that were asked for.
    pub logits: Vec<Vec<f64>>,
}

/// For which positions logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    /// All.
    All,
    /// The last.
    Last,
}

impl<'a> Reference<'a> {
    /// Reads the shape of the model in `file`.
    ///
    /// # Errors
    /// A sentence about what is missing.
    pub fn new(file: &'a GgufFile) -> Result<Self, String> {
        let arch = file.get("general.architecture").and_then(Value::as_str).ok_or("no architecture")?;
        let find = |key: &str| file.get(&format!("{arch}.{key}"));
        let count = |key: &str| find(key).and_then(Value::as_usize).ok_or_else(|| format!("no {arch}.{key}"));
        let (hidden, heads) = (count("embedding_length")?, count("attention.head_count")?);
        let head_dim = count("attention.key_length").unwrap_or(hidden / heads);
        let interleaved = match arch {
            "llama" | "smollm3" | "granite" | "minicpm" => true,
            "qwen2" | "qwen3" | "gemma3" => false,
            other => return Err(format!("architecture {other}")),
        };
        let number = |key: &str| find(key).and_then(Value::as_f64);
        let dims = count("rope.dimension_count").unwrap_or(head_dim);
        let theta = number("rope.freq_base").unwrap_or(10_000.0);
        let row = |name: &str| file.tensor(name).map(|tensor| weight_row(tensor, 0)).transpose();
        let mut global = Turns { frequencies: frequencies(theta, dims), magnitude: 1.0 };
        let context = count("context_length")?;
        let original = count("rope.scaling.original_context_length").unwrap_or(context) as f64;
        match find("rope.scaling.type").and_then(Value::as_str) {
            Some("linear") => {
                let factor = number("rope.scaling.factor").ok_or("no scaling factor")?;
                global.frequencies.iter_mut().for_each(|turn| *turn /= factor);
            }
            Some("yarn") => global = yarn(theta, dims, number("rope.scaling.factor").ok_or("no factor")?, original),
            Some("longrope") => {
                // The whole context is made room for.
                let is_long = context as f64 > original;
                let name = if is_long { "rope_factors_long.weight" } else { "rope_factors_short.weight" };
                let divisors = row(name)?.ok_or("no divisors")?;
                global.frequencies.iter_mut().zip(divisors).for_each(|(turn, divisor)| *turn /= divisor);
                global.magnitude = number("rope.scaling.attn_factor").unwrap_or(1.0);
            }
            _ => {}
        }
        if let Some(factors) = row("rope_freqs.weight")? {
            global.frequencies.iter_mut().zip(factors).for_each(|(turn, factor)| *turn /= factor);
        }
        let is_gemma = arch == "gemma3";
        let family = Family {
            gelu: is_gemma,
            embedding_scale: if is_gemma { (hidden as f64).sqrt() } else { number("embedding_scale").unwrap_or(1.0) },
            residual_scale: number("residual_scale").unwrap_or(1.0),
            attention_scale: number("attention.scale").unwrap_or(1.0 / (head_dim as f64).sqrt()),
            logit_divisor: number("logit_scale").unwrap_or(1.0),
            window: count("attention.sliding_window").ok(),
            full_every: if is_gemma { count("attention.sliding_window_pattern").unwrap_or(6) } else { 0 },
            windowed: match find("attention.sliding_window_pattern") {
                Some(Value::Array(flags)) => Some(flags.iter().map(|flag| *flag == Value::Bool(true)).collect()),
                _ => None,
            },
            softcap: number("final_logit_softcapping"),
            unrotated_every: if arch == "smollm3" { 4 } else { 0 },
        };
        let local =
            if is_gemma { Turns { frequencies: frequencies(10_000.0, dims), magnitude: 1.0 } } else { global.clone() };
        Ok(Self {
            file,
            layers: count("block_count")?,
            hidden,
            heads,
            kv_heads: count("attention.head_count_kv").unwrap_or(heads),
            head_dim,
            global,
            local,
            interleaved,
            eps: find("attention.layer_norm_rms_epsilon").and_then(Value::as_f64).ok_or("no epsilon")?,
            family,
        })
    }

    /// Runs `tokens` from position 0.
    ///
    /// # Errors
    /// A tensor that is missing or of the wrong shape, a token outside the embedding.
    pub fn forward(&self, tokens: &[u32], logits_of: LogitsOf) -> Result<Observed, String> {
        let mut seen = Observed::default();
        let embedding = self.tensor("token_embd.weight")?;
        let mut stream =
            tokens.iter().map(|&token| weight_row(embedding, token as usize)).collect::<Result<Vec<_>, _>>()?;
        stream.iter_mut().flatten().for_each(|x| *x *= self.family.embedding_scale);
        for layer in 0..self.layers {
            let normed = self.norm(&stream, &format!("blk.{layer}.attn_norm.weight"))?;
            let attended = self.attention(layer, &normed, &mut seen)?;
            let attended = self.output(&attended, &format!("blk.{layer}.post_attention_norm.weight"))?;
            add(&mut stream, &attended);
            let normed = self.norm(&stream, &format!("blk.{layer}.ffn_norm.weight"))?;
            let gate = self.linear(&format!("blk.{layer}.ffn_gate"), &normed)?;
            let mut up = self.linear(&format!("blk.{layer}.ffn_up"), &normed)?;
            for (up, gate) in up.iter_mut().flatten().zip(gate.iter().flatten()) {
                *up *= if self.family.gelu {
                    let root = (2.0 / std::f64::consts::PI).sqrt();
                    0.5 * gate * (1.0 + (root * (gate + 0.044715 * gate.powi(3))).tanh())
                } else {
                    gate / (1.0 + (-gate).exp())
                };
            }
            let fed = self.linear(&format!("blk.{layer}.ffn_down"), &up)?;
            add(&mut stream, &self.output(&fed, &format!("blk.{layer}.post_ffw_norm.weight"))?);
            seen.layer_out.push(stream.clone());
        }
        seen.normed = self.norm(&stream, "output_norm.weight")?;
        let first = if logits_of == LogitsOf::Last { seen.normed.len().saturating_sub(1) } else { 0 };
        let head = if self.file.tensor("output.weight").is_some() { "output" } else { "token_embd" };
        seen.logits = self.linear(head, &seen.normed[first..])?;
        seen.logits.iter_mut().flatten().for_each(|logit| *logit /= self.family.logit_divisor);
        if let Some(cap) = self.family.softcap {
            seen.logits.iter_mut().flatten().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
        Ok(seen)
    }

    /// What a block adds to the stream: normed where the file has the norm `name`, and scaled.
    fn output(&self, rows: &[Vec<f64>], name: &str) -> Result<Vec<Vec<f64>>, String> {
        let mut rows = match self.file.tensor(name) {
            Some(_) => self.norm(rows, name)?,
            None => rows.to_vec(),
        };
        rows.iter_mut().flatten().for_each(|x| *x *= self.family.residual_scale);
        Ok(rows)
    }

    /// Positions that `layer` sees, the own one included.
    fn window(&self, layer: usize) -> Option<usize> {
        let is_full = match &self.family.windowed {
            Some(windowed) => !windowed[layer],
            None => self.family.full_every != 0 && (layer + 1).is_multiple_of(self.family.full_every),
        };
        self.family.window.filter(|_| !is_full)
    }

    fn attention(&self, layer: usize, input: &[Vec<f64>], seen: &mut Observed) -> Result<Vec<Vec<f64>>, String> {
        let dim = self.head_dim;
        let mut queries = self.linear(&format!("blk.{layer}.attn_q"), input)?;
        let mut keys = self.linear(&format!("blk.{layer}.attn_k"), input)?;
        let values = self.linear(&format!("blk.{layer}.attn_v"), input)?;
        for (rows, name) in [(&mut queries, "attn_q_norm"), (&mut keys, "attn_k_norm")] {
            let weight = self.file.tensor(&format!("blk.{layer}.{name}.weight"));
            let weight = weight.map(|tensor| weight_row(tensor, 0)).transpose()?;
            for (position, row) in rows.iter_mut().enumerate() {
                for head in row.chunks_exact_mut(dim) {
                    if let Some(weight) = &weight {
                        rms_norm(head, weight, self.eps);
                    }
                    let every = self.family.unrotated_every;
                    if every == 0 || !(layer + 1).is_multiple_of(every) {
                        let turns = if self.window(layer).is_some() { &self.local } else { &self.global };
                        self.turn(turns, head, position);
                    }
                }
            }
        }
        let mut outputs = Vec::new();
        for (position, query) in queries.iter().enumerate() {
            let mut output = vec![0.0; self.heads * dim];
            for head in 0..self.heads {
                let kv = head / (self.heads / self.kv_heads) * dim;
                let query = &query[head * dim..(head + 1) * dim];
                let scale = self.family.attention_scale;
                let first = self.window(layer).map_or(0, |window| (position + 1).saturating_sub(window));
                let scores: Vec<f64> =
                    (first..=position).map(|at| dot(query, &keys[at][kv..kv + dim]) * scale).collect();
                let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - best).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (at, weight) in weights.iter().enumerate() {
                    for i in 0..dim {
                        output[head * dim + i] += weight / total * values[first + at][kv + i];
                    }
                }
            }
            outputs.push(output);
        }
        seen.keys.push(keys);
        seen.values.push(values);
        self.linear(&format!("blk.{layer}.attn_output"), &outputs)
    }

    #[cfg(test)]
    fn rotate(&self, head: &mut [f64], position: usize) {
        self.turn(&self.global, head, position);
    }

    fn turn(&self, turns: &Turns, head: &mut [f64], position: usize) {
        let pairs = turns.frequencies.len();
        for (i, frequency) in turns.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (sin, cos) = (sin * turns.magnitude, cos * turns.magnitude);
            let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }

    fn norm(&self, rows: &[Vec<f64>], name: &str) -> Result<Vec<Vec<f64>>, String> {
        let weight = weight_row(self.tensor(name)?, 0)?;
        if weight.len() != self.hidden {
            return Err(format!("{name} has {} elements", weight.len()));
        }
        let mut rows = rows.to_vec();
        rows.iter_mut().for_each(|row| rms_norm(row, &weight, self.eps));
        Ok(rows)
    }

    /// `rows` times the matrix `name.weight`, plus `name.bias` where there is one.
    fn linear(&self, name: &str, rows: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, String> {
        let weight = self.tensor(&format!("{name}.weight"))?;
        let bias = self.file.tensor(&format!("{name}.bias")).map(|tensor| weight_row(tensor, 0)).transpose()?;
        let outputs = weight.dims.get(1).copied().unwrap_or(1) as usize;
        let mut results = vec![vec![0.0; outputs]; rows.len()];
        for output in 0..outputs {
            let weights = weight_row(weight, output)?;
            for (row, result) in rows.iter().zip(&mut results) {
                if row.len() != weights.len() {
                    return Err(format!("{name} takes {}, found {}", weights.len(), row.len()));
                }
                result[output] = dot(row, &weights) + bias.as_ref().map_or(0.0, |bias| bias[output]);
            }
        }
        Ok(results)
    }

    fn tensor(&self, name: &str) -> Result<&'a GgufTensor, String> {
        self.file.tensor(name).ok_or_else(|| format!("no {name}"))
    }
}

fn frequencies(theta: f64, dims: usize) -> Vec<f64> {
    (0..dims / 2).map(|i| 1.0 / theta.powf(2.0 * i as f64 / dims as f64)).collect()
}

/// YaRN with its usual constants, as the transformers library computes it.
fn yarn(theta: f64, dims: usize, factor: f64, original: f64) -> Turns {
    let correction =
        |rotations: f64| dims as f64 * (original / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
    let low = correction(32.0).floor().max(0.0);
    let high = correction(1.0).ceil().min(dims as f64 - 1.0);
    let high = if low == high { high + 0.001 } else { high };
    let frequencies = frequencies(theta, dims).into_iter().enumerate().map(|(i, extrapolated)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        extrapolated / factor * ramp + extrapolated * (1.0 - ramp)
    });
    Turns { frequencies: frequencies.collect(), magnitude: 0.1 * factor.ln() + 1.0 }
}

fn weight_row(tensor: &GgufTensor, row: usize) -> Result<Vec<f64>, String> {
    let kind = weight_type(tensor.type_id).ok_or_else(|| format!("type of {}", tensor.name))?;
    let (block_len, block_bytes) = block(kind);
    let len = tensor.dims.first().copied().unwrap_or(0) as usize / block_len * block_bytes;
    let bytes = tensor.bytes.get(row * len..(row + 1) * len);
    bytes.map(|bytes| dequantize::row(kind, bytes)).ok_or_else(|| format!("row {row} of {}", tensor.name))
}

fn rms_norm(row: &mut [f64], weight: &[f64], eps: f64) {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= weight / (mean + eps).sqrt());
}

fn add(rows: &mut [Vec<f64>], more: &[Vec<f64>]) {
    rows.iter_mut().flatten().zip(more.iter().flatten()).for_each(|(row, more)| *row += more);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::model::{Architecture, ModelSpec, Weights};
    use npuhal_models::WeightType;

    fn spec(architecture: Architecture) -> ModelSpec {
        ModelSpec::small(architecture, Weights::Uniform(WeightType::F32))
    }

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_the_distance_only() {
        for architecture in [Architecture::Llama, Architecture::Qwen2] {
            let file = spec(architecture).build();
            let reference = Reference::new(&file).unwrap();
            let rotated = |values: &[f64], position| {
                let mut head = values.to_vec();
                reference.rotate(&mut head, position);
                head
            };
            let (q, k): (Vec<f64>, Vec<f64>) = (0..10).map(|i| ((i as f64).sin(), (i as f64 * 2.0).cos())).unzip();
            assert_eq!(rotated(&q, 0), q);
            let near = dot(&rotated(&q, 7), &rotated(&k, 4));
            let far = dot(&rotated(&q, 103), &rotated(&k, 100));
            assert!((near - far).abs() < 1e-12);
            assert!((dot(&q, &q) - dot(&rotated(&q, 9), &rotated(&q, 9))).abs() < 1e-12);
            let first = rotated(&q, 1);
            let pair = if architecture == Architecture::Llama { 1 } else { 5 };
            assert!((first[0] - (q[0] * 1f64.cos() - q[pair] * 1f64.sin())).abs() < 1e-15);
        }
    }

    #[test]
    fn scaling_and_factors_stretch_the_angles() {
        let plain = spec(Architecture::Llama).build();
        let linear = ModelSpec { rope_factor: Some(4.0), ..spec(Architecture::Llama) }.build();
        let factors = ModelSpec { rope_factors: true, ..spec(Architecture::Llama) }.build();
        let head = |file: &GgufFile, position| {
            let mut head = vec![1.0; 10];
            Reference::new(file).unwrap().rotate(&mut head, position);
            head
        };
        assert_eq!(head(&linear, 8), head(&plain, 2));
        assert_ne!(head(&factors, 3), head(&plain, 3));
        assert_eq!(head(&factors, 3)[..2], head(&plain, 3)[..2], "the first factor is 1");
    }

    #[test]
    fn positions_do_not_see_what_follows() {
        for architecture in Architecture::ALL {
            let file = spec(architecture).build();
            let reference = Reference::new(&file).unwrap();
            let whole = reference.forward(&[5, 6, 7, 8], LogitsOf::All).unwrap();
            let part = reference.forward(&[5, 6], LogitsOf::All).unwrap();
            assert_eq!(whole.logits[..2], part.logits[..]);
            assert_eq!(reference.forward(&[5, 6], LogitsOf::Last).unwrap().logits[0], part.logits[1]);
            assert!(reference.forward(&[266], LogitsOf::All).is_err());
        }
    }
}
