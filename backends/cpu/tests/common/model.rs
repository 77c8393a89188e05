//! Small random models, and an independent scalar forward pass in f64.

use super::{Random, Weights, matrix_bytes};
use npuhal_models::config::{DecoderFeatures, Rope, RopePairing, RopeScaling};
use npuhal_models::map::FileMap;
use npuhal_models::source::{Format, LayerTensor, ModelSource, TensorRole};
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{ModelConfig, Tensor, WeightType};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

/// A model in the manner of `llama` (tied head), `qwen2` (biases) or `qwen3` (head norms, heads wider than the hidden size).
pub fn config(model_type: &str) -> ModelConfig {
    let (qkv_bias, qk_norm) = (model_type == "qwen2", model_type == "qwen3");
    ModelConfig {
        model_type: model_type.to_owned(),
        name: String::new(),
        hidden_size: 256,
        layers: 3,
        heads: 6,
        kv_heads: 2,
        head_dim: if qk_norm { 128 } else { 256 },
        intermediate_size: 512,
        vocab_size: 93,
        context_length: 1024,
        rms_norm_eps: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            dims: if qk_norm { 128 } else { 64 },
            pairing: if model_type == "llama" { RopePairing::Interleaved } else { RopePairing::Halves },
            scaling: if model_type == "llama" { RopeScaling::Linear { factor: 2.0 } } else { RopeScaling::None },
        },
        qkv_bias,
        qk_norm,
        tied_head: model_type == "llama",
        features: DecoderFeatures::default(),
    }
}

/// A model of `config` whose matrices are of `weight_type`.
pub fn model(config: &ModelConfig, weight_type: WeightType, seed: u64) -> ModelSource {
    let mut random = Random(seed);
    let mut bytes = Vec::new();
    let mut places = Vec::new();
    for (role, rows, cols) in roles(config) {
        let start = bytes.len();
        let this_type = if rows > 1 { weight_type } else { WeightType::F32 };
        if rows > 1 {
            bytes.extend(matrix_bytes(weight_type, rows, cols, Weights::Random, &mut random));
        } else {
            let norm =
                !matches!(role, TensorRole::Layer(_, LayerTensor::QBias | LayerTensor::KBias | LayerTensor::VBias));
            for _ in 0..cols {
                let value = random.unit() * 0.3 + if norm { 1.0 } else { 0.0 };
                bytes.extend(value.to_le_bytes());
            }
        }
        places.push((role, this_type, rows, cols, start..bytes.len()));
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    let map = Arc::new(FileMap::open(file.path()).unwrap());
    let tensor = |(role, weight_type, rows, cols, range)| {
        (role, Tensor::new(format!("{role:?}"), weight_type, rows, cols, Arc::clone(&map), range).unwrap())
    };
    let tensors: BTreeMap<TensorRole, Tensor> = places.into_iter().map(tensor).collect();
    ModelSource::new(file.path().to_owned(), Format::Gguf, config.clone(), Vocabulary::default(), tensors)
}

fn roles(config: &ModelConfig) -> Vec<(TensorRole, usize, usize)> {
    let (hidden, inner, q, kv) = (config.hidden_size, config.intermediate_size, config.q_width(), config.kv_width());
    let mut roles = vec![(TensorRole::TokenEmbedding, config.vocab_size, hidden), (TensorRole::FinalNorm, 1, hidden)];
    if !config.tied_head {
        roles.push((TensorRole::Head, config.vocab_size, hidden));
    }
    for layer in 0..config.layers {
        let mut add = |tensor, rows, cols| roles.push((TensorRole::Layer(layer, tensor), rows, cols));
        add(LayerTensor::InputNorm, 1, hidden);
        add(LayerTensor::Q, q, hidden);
        add(LayerTensor::K, kv, hidden);
        add(LayerTensor::V, kv, hidden);
        if config.qkv_bias {
            add(LayerTensor::QBias, 1, q);
            add(LayerTensor::KBias, 1, kv);
            add(LayerTensor::VBias, 1, kv);
        }
        if config.qk_norm {
            add(LayerTensor::QNorm, 1, config.head_dim);
            add(LayerTensor::KNorm, 1, config.head_dim);
        }
        add(LayerTensor::O, hidden, q);
        add(LayerTensor::PostAttentionNorm, 1, hidden);
        add(LayerTensor::Gate, inner, hidden);
        add(LayerTensor::Up, inner, hidden);
        add(LayerTensor::Down, hidden, inner);
    }
    roles
}

/// Keys and values of a layer, by position.
#[derive(Clone, Default)]
struct Cache {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

/// Logits of every position of `tokens`, one after the other, in f64 over dequantized weights.
pub fn exact_logits(model: &ModelSource, tokens: &[u32]) -> Vec<Vec<f64>> {
    let config = model.config();
    let weights = |role| super::dequantized(model.require(role).unwrap());
    let embedding = weights(TensorRole::TokenEmbedding);
    let head = if config.tied_head { embedding.clone() } else { weights(TensorRole::Head) };
    let final_norm = weights(TensorRole::FinalNorm);
    let frequencies = model.rope_inverse_frequencies(config.context_length);
    let dim = config.head_dim;
    let mut caches = vec![Cache::default(); config.layers];
    let mut logits = Vec::new();
    for (position, &token) in tokens.iter().enumerate() {
        let row = token as usize * config.hidden_size;
        let mut x: Vec<f64> = embedding[row..row + config.hidden_size].iter().map(|&x| f64::from(x)).collect();
        for (layer, cache) in caches.iter_mut().enumerate() {
            let weight = |tensor| weights(TensorRole::Layer(layer, tensor));
            let normed = norm(&x, &weight(LayerTensor::InputNorm), config.rms_norm_eps);
            let project = |matrix, bias, head_norm| {
                let mut out = product(&weight(matrix), &normed);
                if config.qkv_bias {
                    out.iter_mut().zip(weight(bias)).for_each(|(out, bias)| *out += f64::from(bias));
                }
                if let Some(head_norm) = head_norm {
                    for head in out.chunks_exact_mut(dim) {
                        if config.qk_norm {
                            head.copy_from_slice(&norm(head, &weight(head_norm), config.rms_norm_eps));
                        }
                        rotate(head, position, &frequencies, config.rope.pairing);
                    }
                }
                out
            };
            let q = project(LayerTensor::Q, LayerTensor::QBias, Some(LayerTensor::QNorm));
            cache.keys.push(project(LayerTensor::K, LayerTensor::KBias, Some(LayerTensor::KNorm)));
            cache.values.push(project(LayerTensor::V, LayerTensor::VBias, None));
            let mut attended = Vec::new();
            for (head, q) in q.chunks_exact(dim).enumerate() {
                let at = head / (config.heads / config.kv_heads) * dim;
                let score = |key: &Vec<f64>| q.iter().zip(&key[at..]).map(|(q, k)| q * k).sum::<f64>();
                let scores: Vec<f64> = cache.keys.iter().map(|key| score(key) / (dim as f64).sqrt()).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in at..at + dim {
                    attended.push(weights.iter().zip(&cache.values).map(|(w, value)| w * value[d]).sum::<f64>() / sum);
                }
            }
            let projected = product(&weight(LayerTensor::O), &attended);
            x.iter_mut().zip(projected).for_each(|(x, y)| *x += y);
            let normed = norm(&x, &weight(LayerTensor::PostAttentionNorm), config.rms_norm_eps);
            let gate = product(&weight(LayerTensor::Gate), &normed);
            let up = product(&weight(LayerTensor::Up), &normed);
            let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let projected = product(&weight(LayerTensor::Down), &inner);
            x.iter_mut().zip(projected).for_each(|(x, y)| *x += y);
        }
        logits.push(product(&head, &norm(&x, &final_norm, config.rms_norm_eps)));
    }
    logits
}

fn norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, &w)| x / (mean + f64::from(eps)).sqrt() * f64::from(w)).collect()
}

fn product(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

fn rotate(head: &mut [f64], position: usize, frequencies: &[f64], pairing: RopePairing) {
    let pairs = frequencies.len();
    for (i, frequency) in frequencies.iter().enumerate() {
        let (a, b) = match pairing {
            RopePairing::Interleaved => (2 * i, 2 * i + 1),
            RopePairing::Halves => (i, i + pairs),
        };
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
    }
}
