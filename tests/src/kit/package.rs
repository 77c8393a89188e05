//! Small xdna1 packages: the widths of a family, few layers, a small vocabulary, random weights.

use super::random::Random;
use npuhal_core::dtype::bf16_bits;
use npuhal_core::stage::Control;
use npuhal_models::package::{ConvertRequest, Family, Identity, Shape, convert};
use serde_json::{Map, Value, json};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// A package with random weights.
#[derive(Debug, Clone, Copy)]
pub struct SmallPackage {
    /// Its family: the widths.
    pub family: Family,
    /// Its layers.
    pub layers: usize,
    /// Rows of its embedding.
    pub vocab_size: usize,
    /// Seed of the weights.
    pub seed: u64,
}

impl SmallPackage {
    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { layers: self.layers, vocab_size: self.vocab_size, ..self.family.shape() }
    }

    /// Writes a checkpoint and converts it into the package `folder/name`. `text` are further files of the checkpoint, e.g.
    /// its tokenizer.
    ///
    /// # Panics
    /// Where the folder cannot be written.
    #[must_use]
    pub fn write(&self, folder: &Path, name: &str, text: &[(&str, &[u8])]) -> PathBuf {
        let source = folder.join(format!("{name}-source"));
        fs::create_dir_all(&source).expect("a folder");
        fs::write(source.join("config.json"), self.config().to_string()).expect("config.json");
        fs::write(source.join("model.safetensors"), self.checkpoint()).expect("model.safetensors");
        for (name, bytes) in text {
            fs::write(source.join(name), bytes).expect("a text file");
        }
        let target = folder.join(name);
        let threads = NonZeroUsize::new(2).unwrap_or(NonZeroUsize::MIN);
        let identity = Identity { model_id: Some(name.to_owned()), ..Identity::default() };
        let shape = Some(self.shape());
        let request = ConvertRequest { source: &source, target: &target, identity, shape, threads, keep: &[] };
        convert(&request, &mut |_| (), &Control::new()).expect("a package");
        fs::remove_dir_all(&source).expect("the checkpoint goes");
        target
    }

    fn config(&self) -> Value {
        let Shape { hidden_size, intermediate_size, heads, kv_heads, layers, vocab_size } = self.shape();
        let (theta, eps) = match self.family {
            Family::Llama => (1e5, 1e-5),
            Family::Qwen2 => (1e6, 1e-6),
        };
        json!({
            "model_type": self.family.name(), "hidden_size": hidden_size, "intermediate_size": intermediate_size,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers,
            "vocab_size": vocab_size, "rope_theta": theta, "rms_norm_eps": eps, "hidden_act": "silu",
        })
    }

    /// The file's bytes: bf16 tensors whose rows have a length of about 1, norms about 1.
    fn checkpoint(&self) -> Vec<u8> {
        let Shape { hidden_size, intermediate_size, layers, vocab_size, .. } = self.shape();
        let (q, kv) = (self.shape().q_width(), self.shape().kv_width());
        let mut tensors: Vec<(String, Vec<usize>)> = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocab_size, hidden_size]),
            ("lm_head.weight".to_owned(), vec![vocab_size, hidden_size]),
            ("model.norm.weight".to_owned(), vec![hidden_size]),
        ];
        for layer in 0..layers {
            let mut add = |part: &str, dims: &[usize]| {
                tensors.push((format!("model.layers.{layer}.{part}"), dims.to_vec()));
            };
            add("input_layernorm.weight", &[hidden_size]);
            add("post_attention_layernorm.weight", &[hidden_size]);
            for (part, rows) in [("q", q), ("k", kv), ("v", kv)] {
                add(&format!("self_attn.{part}_proj.weight"), &[rows, hidden_size]);
                if self.family == Family::Qwen2 {
                    add(&format!("self_attn.{part}_proj.bias"), &[rows]);
                }
            }
            add("self_attn.o_proj.weight", &[hidden_size, q]);
            add("mlp.gate_proj.weight", &[intermediate_size, hidden_size]);
            add("mlp.up_proj.weight", &[intermediate_size, hidden_size]);
            add("mlp.down_proj.weight", &[hidden_size, intermediate_size]);
        }
        let (mut header, mut data) = (Map::new(), Vec::new());
        let mut random = Random::new(self.seed);
        for (name, dims) in tensors {
            let start = data.len();
            let count: usize = dims.iter().product();
            let (offset, spread) = match () {
                () if name.contains("norm") => (1.0, 0.3),
                () if name.ends_with("bias") => (0.0, 0.5),
                () if name.contains("embed") => (0.0, 1.0),
                () if name.contains("lm_head") => (0.0, 4.0 / (dims[1] as f64).sqrt()),
                // A uniform number of ±√3 has a variance of 1.
                () => (0.0, 1.7 / (dims[1] as f64).sqrt()),
            };
            for _ in 0..count {
                data.extend(bf16_bits((offset + spread * random.signed()) as f32).to_le_bytes());
            }
            header.insert(name, json!({ "dtype": "BF16", "shape": dims, "data_offsets": [start, data.len()] }));
        }
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }
}
