//! A writer of small GGUF files, sound or broken on purpose. It shares no code with the reader.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use npuhal_models::{ModelError, ModelSource};
use std::path::PathBuf;
use tempfile::TempDir;

/// A metadata value to write.
#[derive(Debug, Clone)]
pub enum Meta {
    U8(u8),
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    /// Type number of the elements, and the elements.
    Array(u32, Vec<Meta>),
    /// Type number and the bytes as they are.
    Raw(u32, Vec<u8>),
}

impl Meta {
    pub fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub fn texts(texts: &[&str]) -> Self {
        Self::Array(8, texts.iter().map(|text| Self::text(text)).collect())
    }

    pub fn ints(values: &[i32]) -> Self {
        Self::Array(5, values.iter().map(|&value| Self::I32(value)).collect())
    }

    fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Array(..) => 9,
            Self::U64(_) => 10,
            Self::F64(_) => 12,
            Self::Raw(id, _) => *id,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(value) => out.push(*value),
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::I32(value) => out.extend(value.to_le_bytes()),
            Self::U64(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::F64(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Text(text) => write_text(out, text),
            Self::Array(element, values) => {
                out.extend(element.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| value.write(out));
            }
            Self::Raw(_, bytes) => out.extend(bytes),
        }
    }
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor to write. `offset` overrides the place the writer gives it.
#[derive(Debug, Clone)]
pub struct TensorSpec {
    pub name: String,
    pub type_id: u32,
    pub dims: Vec<u64>,
    pub data: Vec<u8>,
    pub offset: Option<u64>,
}

/// A GGUF file in the making.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    pub version: u32,
    pub alignment: u64,
    pub entries: Vec<(String, Meta)>,
    pub tensors: Vec<TensorSpec>,
    pub entry_count: Option<u64>,
    pub tensor_count: Option<u64>,
}

impl GgufWriter {
    pub fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
            entry_count: None,
            tensor_count: None,
        }
    }

    /// Adds the entry or replaces its value.
    pub fn set(mut self, key: &str, value: Meta) -> Self {
        match self.entries.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.entries.push((key.to_owned(), value)),
        }
        self
    }

    pub fn remove(mut self, key: &str) -> Self {
        let before = self.entries.len();
        self.entries.retain(|(known, _)| known != key);
        assert_eq!(self.entries.len() + 1, before, "{key} is not there");
        self
    }

    pub fn tensor(mut self, name: &str, type_id: u32, dims: &[u64], data: Vec<u8>) -> Self {
        self.tensors.push(TensorSpec { name: name.to_owned(), type_id, dims: dims.to_vec(), data, offset: None });
        self
    }

    /// F32 tensor of ones.
    pub fn ones(self, name: &str, dims: &[u64]) -> Self {
        let count: u64 = dims.iter().product();
        let data = (0..count).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
        self.tensor(name, 0, dims, data)
    }

    /// Q8_0 tensor with scale 1 and small codes.
    pub fn q8_0(self, name: &str, dims: &[u64]) -> Self {
        let blocks: u64 = dims.iter().product::<u64>() / 32;
        let block = |index: u64| [0x00, 0x3c].into_iter().chain((0..32).map(move |at| (index * 32 + at) as u8));
        self.tensor(name, 8, dims, (0..blocks).flat_map(block).collect())
    }

    pub fn edit(mut self, name: &str, change: impl FnOnce(&mut TensorSpec)) -> Self {
        change(self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("the tensor is there"));
        self
    }

    pub fn drop_tensor(mut self, name: &str) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|tensor| tensor.name != name);
        assert_eq!(self.tensors.len() + 1, before, "{name} is not there");
        self
    }

    /// Bytes before the tensor data.
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            write_text(&mut out, key);
            out.extend(value.type_id().to_le_bytes());
            value.write(&mut out);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            write_text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
            offset = (offset + tensor.data.len() as u64).next_multiple_of(self.alignment);
        }
        out
    }

    pub fn build(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
            out.extend(&tensor.data);
        }
        out
    }

    pub fn open(&self) -> Result<ModelSource, ModelError> {
        Scratch::new(&self.build()).open()
    }
}

/// A file in a folder of its own, removed at the end.
pub struct Scratch {
    pub path: PathBuf,
    _folder: TempDir,
}

impl Scratch {
    pub fn new(bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, bytes).expect("the file is written");
        Self { path, _folder: folder }
    }

    pub fn open(&self) -> Result<ModelSource, ModelError> {
        ModelSource::open(&self.path)
    }
}

pub const HIDDEN: u64 = 32;
pub const HEADS: u64 = 4;
pub const KV_HEADS: u64 = 2;
pub const HEAD_DIM: u64 = 8;
pub const WIDE: u64 = 64;
pub const LAYERS: u64 = 2;
pub const TOKENS: [&str; 8] = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<|im_start|>", "<|im_end|>"];

/// A sound model of two layers: `llama` (tied head), `qwen2` (biases, a head of its own), `qwen3` (q/k norm, tied head).
pub fn tiny_model(arch: &str) -> GgufWriter {
    let vocab = TOKENS.len() as u64;
    let key = |name: &str| format!("{arch}.{name}");
    let mut writer = GgufWriter::new()
        .set("general.architecture", Meta::text(arch))
        .set("general.name", Meta::text("tiny"))
        .set(&key("block_count"), Meta::U32(LAYERS as u32))
        .set(&key("context_length"), Meta::U32(128))
        .set(&key("embedding_length"), Meta::U32(HIDDEN as u32))
        .set(&key("feed_forward_length"), Meta::U32(WIDE as u32))
        .set(&key("attention.head_count"), Meta::U32(HEADS as u32))
        .set(&key("attention.head_count_kv"), Meta::U32(KV_HEADS as u32))
        .set(&key("attention.layer_norm_rms_epsilon"), Meta::F32(1e-5))
        .set(&key("rope.freq_base"), Meta::F32(10_000.0))
        .set("tokenizer.ggml.model", Meta::text("gpt2"))
        .set("tokenizer.ggml.pre", Meta::text("qwen2"))
        .set("tokenizer.ggml.tokens", Meta::texts(&TOKENS))
        .set("tokenizer.ggml.token_type", Meta::ints(&[2, 3, 3, 1, 1, 1, 3, 3]))
        .set("tokenizer.ggml.merges", Meta::texts(&["a b"]))
        .set("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .set("tokenizer.ggml.eos_token_id", Meta::U32(2))
        .set("tokenizer.chat_template", Meta::text("{{ messages }}"))
        .q8_0("token_embd.weight", &[HIDDEN, vocab])
        .ones("output_norm.weight", &[HIDDEN]);
    if arch == "qwen2" {
        writer = writer.q8_0("output.weight", &[HIDDEN, vocab]);
    }
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for layer in 0..LAYERS {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        writer = writer
            .ones(&name("attn_norm.weight"), &[HIDDEN])
            .q8_0(&name("attn_q.weight"), &[HIDDEN, q])
            .q8_0(&name("attn_k.weight"), &[HIDDEN, kv])
            .q8_0(&name("attn_v.weight"), &[HIDDEN, kv])
            .q8_0(&name("attn_output.weight"), &[q, HIDDEN])
            .ones(&name("ffn_norm.weight"), &[HIDDEN])
            .q8_0(&name("ffn_gate.weight"), &[HIDDEN, WIDE])
            .q8_0(&name("ffn_up.weight"), &[HIDDEN, WIDE])
            .q8_0(&name("ffn_down.weight"), &[WIDE, HIDDEN]);
        if arch == "qwen2" {
            writer = writer
                .ones(&name("attn_q.bias"), &[q])
                .ones(&name("attn_k.bias"), &[kv])
                .ones(&name("attn_v.bias"), &[kv]);
        }
        if arch == "qwen3" {
            writer =
                writer.ones(&name("attn_q_norm.weight"), &[HEAD_DIM]).ones(&name("attn_k_norm.weight"), &[HEAD_DIM]);
        }
    }
    writer
}

/// The error's text, which must hold every one of `parts`.
pub fn assert_refused<T>(what: &str, result: Result<T, ModelError>, parts: &[&str]) -> ModelError {
    let Err(error) = result else { panic!("{what}: accepted") };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{what}: wanted {part:?} in: {text}");
    }
    error
}
