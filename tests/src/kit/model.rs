//! Random small models as complete GGUF files: weights, byte-level vocabulary, chat template.

use crate::kit::dequantize::f16_bits;
use crate::kit::gguf::{GgufFile, GgufTensor, Value, block, type_id};
use crate::kit::random::Random;
use npuhal_models::WeightType;

/// Architectures of the kit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `llama`: RoPE over adjacent pairs.
    Llama,
    /// `qwen2`: RoPE over halves, biases on query, key and value.
    Qwen2,
    /// `qwen3`: RoPE over halves, RMSNorm of each query and key head.
    Qwen3,
    /// `llama` with a window in every layer.
    Mistral,
    /// `gemma3`: windows and another rotation in some layers, norms over outputs too, GELU.
    Gemma3,
    /// `smollm3`: as `llama`, without rotation in every fourth layer.
    SmolLm3,
    /// `granite`: as `llama`, with scales on embedding, residual, attention and logits.
    Granite,
    /// `minicpm`: as `llama`, with scales on embedding, residual and logits.
    MiniCpm,
}

impl Architecture {
    /// All, for loops.
    pub const ALL: [Self; 8] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mistral,
        Self::Gemma3,
        Self::SmolLm3,
        Self::Granite,
        Self::MiniCpm,
    ];

    /// Name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama | Self::Mistral => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
            Self::SmolLm3 => "smollm3",
            Self::Granite => "granite",
            Self::MiniCpm => "minicpm",
        }
    }

    fn pre_tokenizer(self) -> &'static str {
        match self {
            Self::Qwen2 | Self::Qwen3 => "qwen2",
            _ => "smollm",
        }
    }

    /// Whether rotated pairs are adjacent elements, for which GGUF files permute the rows of query and key.
    #[must_use]
    pub fn is_interleaved(self) -> bool {
        !matches!(self, Self::Qwen2 | Self::Qwen3 | Self::Gemma3)
    }
}

/// Which type each matrix is stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// All the same.
    Uniform(WeightType),
    /// As files named `Q4_K_M` are: Q4_K, with Q6_K for the head and every other value and down projection.
    LikeQ4KM,
    /// Every type somewhere: Q6_K for embedding and head, the matrices of the layers in turn.
    Mixed,
    /// As such files are where rows are no multiple of 256: Q5_0 with Q8_0 for values and head, Q4_K and Q6_K for the down
    /// projection alone.
    LikeQ4KMFallback,
}

impl Weights {
    /// Every uniform type and both mixtures.
    #[must_use]
    pub fn all() -> Vec<Self> {
        WeightType::ALL.into_iter().map(Self::Uniform).chain([Self::LikeQ4KM, Self::LikeQ4KMFallback]).collect()
    }

    fn of(self, name: &str, layer: usize) -> WeightType {
        let important = layer.is_multiple_of(2);
        match (self, name) {
            (Self::Uniform(weight_type), _) => weight_type,
            (Self::Mixed, "token_embd" | "output") => WeightType::Q6K,
            (Self::Mixed, _) => {
                let place = MATRICES.iter().position(|matrix| *matrix == name).unwrap_or(0);
                WeightType::ALL[(MATRICES.len() * layer + place) % WeightType::ALL.len()]
            }
            (Self::LikeQ4KM, "output") => WeightType::Q6K,
            (Self::LikeQ4KM, "attn_v" | "ffn_down") if important => WeightType::Q6K,
            (Self::LikeQ4KM, _) => WeightType::Q4K,
            (Self::LikeQ4KMFallback, "output" | "attn_v") => WeightType::Q8_0,
            (Self::LikeQ4KMFallback, "ffn_down") if important => WeightType::Q6K,
            (Self::LikeQ4KMFallback, "ffn_down") => WeightType::Q4K,
            (Self::LikeQ4KMFallback, _) => WeightType::Q5_0,
        }
    }
}

/// RoPE scaling of a small model.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// None.
    None,
    /// YaRN.
    Yarn {
        /// Stretch.
        factor: f32,
        /// Positions of the first training.
        original: u32,
    },
    /// LongRoPE.
    LongRope {
        /// Positions of the first training.
        original: u32,
        /// Factor on rotated elements.
        attention_factor: f32,
    },
    /// Llama 3, which GGUF files state as factors of the frequencies.
    Llama3 {
        /// Stretch.
        factor: f32,
        /// Positions of the first training.
        original: u32,
    },
}

impl Scaling {
    /// Divisors of LongRoPE for short and for long contexts, for `pairs` rotated pairs.
    #[must_use]
    pub fn divisors(pairs: usize) -> [Vec<f32>; 2] {
        let list = |slope: f32| (0..pairs).map(|pair| 1.0 + slope * pair as f32).collect();
        [list(0.25), list(1.5)]
    }

    /// Factors that divide the frequencies of Llama 3's rotation (low 1, high 4).
    #[must_use]
    pub fn llama3_factors(factor: f32, original: u32, theta: f32, dims: usize) -> Vec<f32> {
        (0..dims / 2)
            .map(|pair| {
                let wave = std::f64::consts::TAU * f64::from(theta).powf(2.0 * pair as f64 / dims as f64);
                let (original, factor) = (f64::from(original), f64::from(factor));
                if wave < original / 4.0 {
                    1.0
                } else if wave > original {
                    factor as f32
                } else {
                    let smooth = (original / wave - 1.0) / 3.0;
                    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                }
            })
            .collect()
    }
}

/// The shape of a small model. Change fields at will; rows must stay whole numbers of blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Architecture.
    pub architecture: Architecture,
    /// Weight types.
    pub weights: Weights,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// No head of its own.
    pub tied: bool,
    /// Tokens beside those of [`token_texts`], to be no part of any text.
    pub spare_tokens: usize,
    /// Base of the RoPE frequencies.
    pub rope_theta: f32,
    /// Linear RoPE scaling.
    pub rope_factor: Option<f32>,
    /// A tensor of factors of the RoPE frequencies (`llama` only).
    pub rope_factors: bool,
    /// Further RoPE scaling.
    pub scaling: Scaling,
    /// Positions that layers with a window see (`Mistral`, `Gemma3`).
    pub window: u32,
    /// Every n-th layer has no window (`Gemma3`), where the file states it.
    pub window_period: Option<u32>,
    /// Layers from this one on have the window (`Qwen2`, `Qwen3`); the others have none.
    pub windowed_from: Option<usize>,
    /// Bound of the logits (`Gemma3`).
    pub softcap: Option<f32>,
    /// What queries are scaled by the inverse root of (`Gemma3`), where that is not the size of a head.
    pub query_scalar: Option<f32>,
    /// Positions.
    pub context_length: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Seed of the weights.
    pub seed: u64,
}

impl ModelSpec {
    /// A model whose rows suit the blocks of `weights`, with grouped queries, a head width that is not hidden ÷ heads, and
    /// matrices whose rows are no multiple of 8 (all have 266 vocabulary rows). All but Qwen2 and Granite are tied.
    #[must_use]
    pub fn small(architecture: Architecture, weights: Weights) -> Self {
        let (hidden, heads, head_dim, intermediate) = match weights {
            Weights::Uniform(weight_type) if block(weight_type).0 == 1 => (36, 4, 10, 52),
            Weights::Uniform(weight_type) if block(weight_type).0 == 32 => (96, 16, 10, 160),
            Weights::LikeQ4KMFallback => (96, 16, 10, 256),
            Weights::Uniform(_) | Weights::LikeQ4KM | Weights::Mixed => (256, 8, 64, 512),
        };
        Self {
            architecture,
            weights,
            hidden,
            // The fourth layer is one without rotation.
            layers: if architecture == Architecture::SmolLm3 { 4 } else { 2 },
            heads,
            kv_heads: 2,
            head_dim,
            intermediate,
            tied: !matches!(architecture, Architecture::Qwen2 | Architecture::Granite),
            spare_tokens: 0,
            rope_theta: 10_000.0,
            rope_factor: None,
            rope_factors: false,
            scaling: Scaling::None,
            window: 5,
            window_period: Some(2),
            windowed_from: None,
            softcap: None,
            query_scalar: None,
            context_length: 256,
            eps: 1e-5,
            seed: 1,
        }
    }

    /// The model's file.
    #[must_use]
    pub fn build(&self) -> GgufFile {
        let mut file = GgufFile { version: 3, metadata: self.metadata(), tensors: Vec::new() };
        let mut random = Random::new(self.seed);
        let vocab = self.token_texts().len();
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut add = |name: &str, layer: Option<usize>, rows: usize, cols: usize| {
            let kind = self.weights.of(name, layer.unwrap_or(0));
            file.tensors.push(matrix(&full_name(name, layer, "weight"), kind, rows, cols, &mut random));
        };
        // The embedding carries larger values than other matrices, as trained ones do.
        add("token_embd", None, vocab, self.hidden);
        if !self.tied {
            add("output", None, vocab, self.hidden);
        }
        for layer in 0..self.layers {
            add("attn_q", Some(layer), q, self.hidden);
            add("attn_k", Some(layer), kv, self.hidden);
            add("attn_v", Some(layer), kv, self.hidden);
            add("attn_output", Some(layer), self.hidden, q);
            add("ffn_gate", Some(layer), self.intermediate, self.hidden);
            add("ffn_up", Some(layer), self.intermediate, self.hidden);
            add("ffn_down", Some(layer), self.hidden, self.intermediate);
        }
        let mut vectors = vec![("output_norm.weight".to_owned(), self.hidden, 1.0)];
        for layer in 0..self.layers {
            let mut vector = |name: &str, part: &str, len: usize, centre: f64| {
                vectors.push((full_name(name, Some(layer), part), len, centre));
            };
            vector("attn_norm", "weight", self.hidden, 1.0);
            vector("ffn_norm", "weight", self.hidden, 1.0);
            if self.architecture == Architecture::Qwen2 {
                vector("attn_q", "bias", q, 0.0);
                vector("attn_k", "bias", kv, 0.0);
                vector("attn_v", "bias", kv, 0.0);
            }
            if self.architecture == Architecture::Gemma3 {
                vector("post_attention_norm", "weight", self.hidden, 1.0);
                vector("post_ffw_norm", "weight", self.hidden, 1.0);
            }
            if matches!(self.architecture, Architecture::Qwen3 | Architecture::Gemma3) {
                vector("attn_q_norm", "weight", self.head_dim, 1.0);
                vector("attn_k_norm", "weight", self.head_dim, 1.0);
            }
        }
        for (name, len, centre) in vectors {
            let bytes = (0..len).flat_map(|_| ((centre + 0.3 * random.signed()) as f32).to_le_bytes()).collect();
            file.tensors.push(GgufTensor { name, dims: vec![len as u64], type_id: type_id(WeightType::F32), bytes });
        }
        let pairs = self.head_dim / 2;
        let mut factors = |name: &str, values: Vec<f32>| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (name, dims) = (name.to_owned(), vec![pairs as u64]);
            file.tensors.push(GgufTensor { name, dims, type_id: type_id(WeightType::F32), bytes });
        };
        if self.rope_factors {
            factors("rope_freqs.weight", (0..pairs).map(|pair| 1.0 + pair as f32).collect());
        }
        match self.scaling {
            Scaling::Llama3 { factor, original } => {
                let values = Scaling::llama3_factors(factor, original, self.rope_theta, self.head_dim);
                factors("rope_freqs.weight", values);
            }
            Scaling::LongRope { .. } => {
                let [short, long] = Scaling::divisors(pairs);
                factors("rope_factors_short.weight", short);
                factors("rope_factors_long.weight", long);
            }
            _ => {}
        }
        file
    }

    /// The scales that the file states.
    #[must_use]
    pub fn scales(&self) -> Scales {
        match self.architecture {
            Architecture::Granite => {
                Scales { embedding: Some(3.5), residual: Some(0.22), attention: Some(0.05), logit_divisor: Some(4.0) }
            }
            Architecture::MiniCpm => Scales {
                embedding: Some(12.0),
                residual: Some((1.4 / (self.layers as f64).sqrt()) as f32),
                attention: None,
                logit_divisor: Some(self.hidden as f32 / 16.0),
            },
            _ => Scales::default(),
        }
    }

    fn token_texts(&self) -> Vec<String> {
        token_texts().into_iter().chain((0..self.spare_tokens).map(|spare| format!("[spare {spare}]"))).collect()
    }

    fn metadata(&self) -> Vec<(String, Value)> {
        let arch = self.architecture.name();
        let texts = self.token_texts();
        let id = |text: &str| Value::U32(texts.iter().position(|held| held == text).unwrap_or(0) as u32);
        let kinds = texts.iter().map(|text| Value::I32(if text.starts_with("<|") { 3 } else { 1 })).collect();
        let mut pairs = vec![
            ("general.architecture".to_owned(), Value::String(arch.to_owned())),
            ("general.name".to_owned(), Value::String(format!("small {arch}"))),
        ];
        let mut own = |key: &str, value: Value| pairs.push((format!("{arch}.{key}"), value));
        own("block_count", Value::U32(self.layers as u32));
        own("context_length", Value::U32(self.context_length));
        own("embedding_length", Value::U32(self.hidden as u32));
        own("feed_forward_length", Value::U32(self.intermediate as u32));
        own("attention.head_count", Value::U32(self.heads as u32));
        own("attention.head_count_kv", Value::U32(self.kv_heads as u32));
        own("attention.key_length", Value::U32(self.head_dim as u32));
        own("attention.value_length", Value::U32(self.head_dim as u32));
        own("attention.layer_norm_rms_epsilon", Value::F32(self.eps));
        own("rope.freq_base", Value::F32(self.rope_theta));
        own("rope.dimension_count", Value::U32(self.head_dim as u32));
        own("vocab_size", Value::U32(texts.len() as u32));
        if let Some(factor) = self.rope_factor {
            own("rope.scaling.type", Value::String("linear".to_owned()));
            own("rope.scaling.factor", Value::F32(factor));
        }
        let mut text = |key: &str, value: &str| own(key, Value::String(value.to_owned()));
        match self.scaling {
            Scaling::Yarn { factor, original } => {
                text("rope.scaling.type", "yarn");
                own("rope.scaling.factor", Value::F32(factor));
                own("rope.scaling.original_context_length", Value::U32(original));
            }
            Scaling::LongRope { original, attention_factor } => {
                text("rope.scaling.type", "longrope");
                own("rope.scaling.original_context_length", Value::U32(original));
                own("rope.scaling.attn_factor", Value::F32(attention_factor));
            }
            _ => {}
        }
        if matches!(self.architecture, Architecture::Mistral | Architecture::Gemma3) {
            own("attention.sliding_window", Value::U32(self.window));
        }
        if let Some(period) = self.window_period.filter(|_| self.architecture == Architecture::Gemma3) {
            own("attention.sliding_window_pattern", Value::U32(period));
        }
        if let Some(first) = self.windowed_from {
            own("attention.sliding_window", Value::U32(self.window));
            let flags = (0..self.layers).map(|layer| Value::Bool(layer >= first)).collect();
            own("attention.sliding_window_pattern", Value::Array(flags));
        }
        if let Some(cap) = self.softcap {
            own("final_logit_softcapping", Value::F32(cap));
        }
        if let Some(scalar) = self.query_scalar {
            own("attention.scale", Value::F32(1.0 / scalar.sqrt()));
        }
        let scales = self.scales();
        for (key, value) in [
            ("embedding_scale", scales.embedding),
            ("residual_scale", scales.residual),
            ("attention.scale", scales.attention),
            ("logit_scale", scales.logit_divisor),
        ] {
            if let Some(value) = value {
                own(key, Value::F32(value));
            }
        }
        let mut tokenizer = |key: &str, value: Value| pairs.push((format!("tokenizer.{key}"), value));
        tokenizer("ggml.model", Value::String("gpt2".to_owned()));
        tokenizer("ggml.pre", Value::String(self.architecture.pre_tokenizer().to_owned()));
        tokenizer("ggml.token_type", Value::Array(kinds));
        tokenizer("ggml.merges", Value::strings(MERGES.map(|(left, right)| format!("{left} {right}"))));
        tokenizer("ggml.bos_token_id", id("<|endoftext|>"));
        tokenizer("ggml.eos_token_id", id("<|im_end|>"));
        tokenizer("ggml.padding_token_id", id("<|endoftext|>"));
        tokenizer("ggml.add_bos_token", Value::Bool(false));
        tokenizer("chat_template", Value::String(CHAT_TEMPLATE.to_owned()));
        tokenizer("ggml.tokens", Value::strings(texts));
        pairs
    }
}

/// Scales of a small model.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Scales {
    /// On the embedding.
    pub embedding: Option<f32>,
    /// On what a block adds.
    pub residual: Option<f32>,
    /// On products of queries and keys.
    pub attention: Option<f32>,
    /// Divides the logits.
    pub logit_divisor: Option<f32>,
}

/// Token texts by id: the 256 bytes in the byte-level alphabet (id = byte), the merged ones, the control tokens.
#[must_use]
pub fn token_texts() -> Vec<String> {
    let bytes = (0..=255u8).map(|byte| byte_char(byte).to_string());
    let merged = MERGES.iter().map(|(left, right)| format!("{left}{right}"));
    bytes.chain(merged).chain(CONTROLS.map(str::to_owned)).collect()
}

/// The merges of the vocabulary, by rank.
#[must_use]
pub fn byte_level_merges() -> Vec<String> {
    MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect()
}

/// `text` in the byte-level alphabet.
#[must_use]
pub fn byte_level(text: &str) -> String {
    text.bytes().map(byte_char).collect()
}

/// Byte-level alphabet of GPT-2: printable Latin-1 bytes stand for themselves, the others for U+0100 and up.
fn byte_char(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(256 + rank).unwrap_or('?')
}

fn full_name(name: &str, layer: Option<usize>, part: &str) -> String {
    layer.map_or_else(|| format!("{name}.{part}"), |layer| format!("blk.{layer}.{name}.{part}"))
}

/// A matrix of random blocks whose values have a spread of about `1/√cols`.
fn matrix(name: &str, kind: WeightType, rows: usize, cols: usize, random: &mut Random) -> GgufTensor {
    let (block_len, _) = block(kind);
    assert!(cols.is_multiple_of(block_len), "{name}: {cols} columns are no whole blocks of {kind}");
    let spread = if name.starts_with("token_embd") { 0.5 } else { 1.0 / (cols as f64).sqrt() };
    let mut bytes = Vec::new();
    (0..rows * cols / block_len).for_each(|_| push_block(kind, spread, random, &mut bytes));
    GgufTensor { name: name.to_owned(), dims: vec![cols as u64, rows as u64], type_id: type_id(kind), bytes }
}

fn push_block(kind: WeightType, spread: f64, random: &mut Random, out: &mut Vec<u8>) {
    // Uniform numbers of [-1, 1) spread by 1/√3.
    let wide = spread * 3f64.sqrt();
    // Codes are uniform: their own spread is a quarter or so of their range.
    let mut scale = |codes_spread: f64| spread / codes_spread * (0.5 + random.unit());
    match kind {
        WeightType::F32 => out.extend(((wide * random.signed()) as f32).to_le_bytes()),
        WeightType::F16 => out.extend(f16_bits(wide * random.signed()).to_le_bytes()),
        WeightType::Bf16 => out.extend(&((wide * random.signed()) as f32).to_le_bytes()[2..]),
        WeightType::Q4_0 => {
            out.extend(f16_bits(scale(4.6)).to_le_bytes());
            push_bytes(16, random, out);
        }
        WeightType::Q4_1 => {
            let scale = scale(4.6);
            out.extend(f16_bits(scale).to_le_bytes());
            out.extend(f16_bits(-scale * (7.0 + random.unit())).to_le_bytes());
            push_bytes(16, random, out);
        }
        WeightType::Q5_0 => {
            out.extend(f16_bits(scale(9.2)).to_le_bytes());
            push_bytes(20, random, out);
        }
        WeightType::Q5_1 => {
            let scale = scale(9.2);
            out.extend(f16_bits(scale).to_le_bytes());
            out.extend(f16_bits(-scale * (15.0 + random.unit())).to_le_bytes());
            push_bytes(20, random, out);
        }
        WeightType::Q8_0 => {
            out.extend(f16_bits(scale(74.0)).to_le_bytes());
            push_bytes(32, random, out);
        }
        WeightType::Q4K | WeightType::Q5K => {
            let (codes, middle) = if kind == WeightType::Q4K { (128, 7.5) } else { (160, 15.5) };
            let scale = scale(0.6 * 36.0 * 2.0 * middle);
            out.extend(f16_bits(scale).to_le_bytes());
            out.extend(f16_bits(scale * middle).to_le_bytes());
            push_bytes(12 + codes, random, out);
        }
        WeightType::Q2K => {
            let scale = scale(0.6 * 9.0 * 3.0);
            push_bytes(80, random, out);
            out.extend(f16_bits(scale).to_le_bytes());
            out.extend(f16_bits(scale * 1.5).to_le_bytes());
        }
        WeightType::Q3K => {
            let scale = scale(18.5 * 2.3);
            push_bytes(108, random, out);
            out.extend(f16_bits(scale).to_le_bytes());
        }
        WeightType::Iq4Nl => {
            out.extend(f16_bits(scale(69.0)).to_le_bytes());
            push_bytes(16, random, out);
        }
        WeightType::Iq4Xs => {
            out.extend(f16_bits(scale(69.0 * 18.5)).to_le_bytes());
            push_bytes(134, random, out);
        }
        WeightType::Mxfp4 => {
            // The power of two nearest to the scale of values spread by 3.
            out.push((127.0 + scale(3.0).log2().round()) as u8);
            push_bytes(16, random, out);
        }
        WeightType::Q6K => {
            let scale = scale(74.0 * 18.5);
            push_bytes(208, random, out);
            out.extend(f16_bits(scale).to_le_bytes());
        }
        other => panic!("{other} is not known to the kit"),
    }
}

fn push_bytes(count: usize, random: &mut Random, out: &mut Vec<u8>) {
    out.extend((0..count).map(|_| random.byte()));
}

/// Matrices of a layer, in the file's order.
const MATRICES: [&str; 7] = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

const MERGES: [(&str, &str); 7] =
    [("Ġ", "t"), ("Ġt", "h"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("he", "ll"), ("hell", "o")];

const CONTROLS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
                             + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}\
                             {{ '<|im_start|>assistant\n' }}{% endif %}";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::dequantize;
    use crate::kit::reference::{LogitsOf, Reference};

    #[test]
    fn every_model_is_well_formed_and_sane() {
        for architecture in Architecture::ALL {
            for weights in Weights::all() {
                let spec = ModelSpec::small(architecture, weights);
                let file = spec.build();
                assert_eq!(GgufFile::parse(&file.to_bytes()).unwrap(), file);
                assert_eq!(file, spec.build(), "the seed decides");
                let seen = Reference::new(&file).unwrap().forward(&[1, 65, 265, 30], LogitsOf::All).unwrap();
                assert_eq!((seen.logits.len(), seen.logits[0].len()), (4, 266));
                let spread = |row: &[f64]| (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64).sqrt();
                for row in seen.logits.iter().chain(seen.layer_out.iter().flatten()) {
                    assert!((0.05..50.0).contains(&spread(row)), "{architecture:?} {weights:?}: {}", spread(row));
                }
            }
        }
    }

    #[test]
    fn blocks_have_the_spread_that_was_asked_for() {
        for kind in WeightType::ALL {
            let tensor = matrix("m", kind, 8, 256, &mut Random::new(3));
            let values = dequantize::row(kind, &tensor.bytes);
            let spread = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt() * 16.0;
            assert!((0.6..1.8).contains(&spread), "{kind}: {spread}");
        }
    }

    #[test]
    fn token_texts_are_distinct() {
        let texts: std::collections::BTreeSet<String> = token_texts().into_iter().collect();
        assert_eq!(texts.len(), 266);
        assert!(texts.contains("Ġthe") && texts.contains("hello"));
    }
}
