//! Q4NX files and directories, sound and hostile: one clear line and nothing half-loaded, never a panic.

use npuhal_models::q4nx::{PackOptions, Q4nxFile, TileKind, TiledTensor, directory, pack};
use npuhal_models::source::{Format, LayerTensor};
use npuhal_models::{ModelError, ModelSource, TensorRole, Tokenizer};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A file from its table and its data.
fn file(table: &Value, data: &[u8]) -> Vec<u8> {
    let mut text = table.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(64), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes.extend(data);
    bytes
}

fn open(bytes: &[u8]) -> Result<Q4nxFile, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.q4nx");
    fs::write(&path, bytes).unwrap();
    Q4nxFile::open(&path).map_err(|error| one_line(&error, folder.path()))
}

fn one_line(error: &ModelError, folder: &Path) -> String {
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    text.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn the_table_is_read_in_its_order() {
    let table = json!({
        "b": { "dtype": "BF16", "shape": [3], "data_offsets": [64, 70] },
        "__metadata__": { "format": "q4nx", "source": "x.gguf", "converter": "y" },
        "a": { "dtype": "I8", "shape": [2, 5120], "data_offsets": [0, 64] },
        "note": { "shape": [1] },
    });
    let read = open(&file(&table, &[7; 100])).unwrap();
    let names: Vec<_> = read.tensors().iter().map(|entry| entry.name().to_owned()).collect();
    assert_eq!(names, ["b", "a"]);
    let b = read.tensor("b").unwrap();
    assert_eq!((b.dtype(), b.shape(), b.bytes(), b.avail()), ("BF16", [3].as_slice(), 6, 36));
    assert_eq!(read.metadata()[1], ("source".to_owned(), "x.gguf".to_owned()));
    assert_eq!(read.tensor("note"), None);
}

#[test]
fn lengths_and_offsets_are_checked_without_overflow() {
    for len in 0..8 {
        let error = open(&vec![1; len]).unwrap_err();
        assert!(error.contains("truncated"), "{error}");
    }
    for length in [u64::MAX, u64::MAX - 4, u64::MAX - 8, 1 << 63, 100] {
        let error = open(&length.to_le_bytes()).unwrap_err();
        assert!(error.contains("header past the end of the file"), "{error}");
    }
    let max = u64::MAX;
    for offsets in [
        json!([0]),
        json!([0, 1, 2]),
        json!({}),
        json!(null),
        json!("0,1"),
        json!([1, 0]),
        json!([-1, 1]),
        json!([0, 17]),
        json!([max - 3, max]),
        json!([max, 3]),
        json!([0, max]),
        json!([0.0, 1.0]),
    ] {
        let table = json!({ "t": { "dtype": "I8", "shape": [1], "data_offsets": offsets } });
        let error = open(&file(&table, &[0; 16])).unwrap_err();
        assert!(error.contains("bad data_offsets for t"), "{error}");
    }
    assert!(open(&file(&json!({ "t": { "dtype": "I8", "shape": [1], "data_offsets": [16, 16] } }), &[0; 16])).is_ok());
}

#[test]
fn other_damage_is_named() {
    let entry = json!({ "dtype": "I8", "shape": [1], "data_offsets": [0, 1] });
    for (key, value, wanted) in [
        ("dtype", json!(7), "dtype: wanted a text"),
        ("dtype", Value::Null, "dtype: wanted a text"),
        ("shape", json!("x"), "shape: wanted up to 8 whole numbers"),
        ("shape", json!([1.5]), "shape: wanted up to 8 whole numbers"),
        ("shape", json!([1, 1, 1, 1, 1, 1, 1, 1, 1]), "shape: wanted up to 8 whole numbers"),
        ("shape", json!([u64::MAX]), "shape: wanted up to 8 whole numbers"),
    ] {
        let mut changed = entry.clone();
        changed[key] = value;
        let error = open(&file(&json!({ "t": changed }), &[0; 16])).unwrap_err();
        assert!(error.contains(wanted) && error.contains("tensor \"t\""), "{error}");
    }
    let mut bytes = 60_u64.to_le_bytes().to_vec();
    bytes.extend(format!("{:60}", r#"{"t":{"dtype":"","shape":[]}"#).into_bytes());
    assert!(open(&bytes).unwrap_err().contains("wanted a JSON object"));
    let mut twice =
        br#"{"t":{"dtype":"I8","shape":[1],"data_offsets":[0,0]},"t":{"dtype":"I8","shape":[1],"data_offsets":[0,0]}}"#
            .to_vec();
    let mut bytes = (twice.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut twice);
    assert!(open(&bytes).unwrap_err().contains("found a second"));
    let nested = "[".repeat(100_000);
    let mut bytes = (nested.len() as u64).to_le_bytes().to_vec();
    bytes.extend(nested.into_bytes());
    assert!(open(&bytes).is_err());
}

#[test]
fn tiles_are_counted_by_the_published_rule() {
    for (shape, count) in [
        (json!([7, 5120]), 7),
        (json!([3, 4, 5120]), 12),
        (json!([3, 4, 4736]), 12),
        (json!([10, 4736]), 10),
        (json!([1, 5121]), 2),
        (json!([0, 5120]), 0),
        (json!([-1, 5120]), 0),
        (json!([3, -4, 5120]), 0),
        (json!([5120]), 0),
        (json!([1, 1, 1, 5120]), 0),
        (json!([i64::MAX, i64::MAX, 5120]), 0),
        (json!([]), 0),
    ] {
        let table = json!({ "t": { "dtype": "I8", "shape": shape, "data_offsets": [0, 0] } });
        assert_eq!(open(&file(&table, &[])).unwrap().tensor("t").unwrap().tile_count(), count, "{shape}");
    }
    let tiles = |shape: Value| {
        let table = json!({ "t": { "dtype": "I8", "shape": shape, "data_offsets": [0, 0] } });
        open(&file(&table, &[])).unwrap().tensor("t").unwrap().tiles()
    };
    assert_eq!(tiles(json!([10, 4736])), Ok((TileKind::Q4K, 10)));
    assert_eq!(tiles(json!([2, 3, 8704])), Ok((TileKind::Q8, 6)));
    assert!(tiles(json!([2, 77])).unwrap_err().contains("not a Q4NX chunked tensor (last dimension 77)"));
    assert!(tiles(json!([5120])).unwrap_err().contains("not a Q4NX chunked tensor"));
    assert!(tiles(json!([i64::MAX, 3, 5120])).is_err());
    assert!(tiles(json!([0, 5120])).is_err());
}

/// A directory with one layer: hidden 128, intermediate 128, two tokens, one tile for each projection.
struct Directory {
    folder: TempDir,
    table: Map<String, Value>,
    data: Vec<u8>,
}

impl Directory {
    fn new() -> Self {
        let mut made = Self { folder: tempfile::tempdir().unwrap(), table: Map::new(), data: Vec::new() };
        made.add("model.embed_tokens.weight", "BF16", &[2, 128], 512);
        made.add("model.norm.weight", "BF16", &[128], 256);
        made.add("lm_head.weight", "I8", &[1, 5120], 5120);
        for norm in ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"] {
            made.add(&format!("model.layers.0.{norm}.weight"), "BF16", &[128], 256);
        }
        for part in ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"] {
            made.add(&format!("model.layers.0.{part}_proj.weight"), "I8", &[1, 5120], 5120);
        }
        let config = json!({
            "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1,
            "intermediate_size": 128, "eos_token_id": 1,
        });
        made.write("config.json", config.to_string().as_bytes());
        let tokenizer = json!({
            "added_tokens": [{ "id": 1, "content": "<end>", "special": true }],
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
            "model": { "type": "BPE", "vocab": { "a": 0 }, "merges": [] },
        });
        made.write("tokenizer.json", tokenizer.to_string().as_bytes());
        made
    }

    fn add(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: usize) {
        let start = self.data.len();
        self.data.resize(start + bytes, 1);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, start + bytes] });
        self.table.insert(name.to_owned(), entry);
    }

    fn write(&self, file: &str, contents: &[u8]) {
        fs::write(self.folder.path().join(file), contents).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    fn open(&self) -> Result<ModelSource, String> {
        self.write("model.q4nx", &file(&Value::Object(self.table.clone()), &self.data));
        ModelSource::open(&self.path()).map_err(|error| one_line(&error, self.folder.path()))
    }
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

#[test]
fn a_well_formed_directory_opens() {
    let made = Directory::new();
    let model = made.open().unwrap();
    assert_eq!(model.format(), Format::Q4nx);
    assert_eq!((model.config().vocab_size, model.config().head_dim, model.config().tied_head), (2, 128, false));
    let q: &TiledTensor = model.tiled(TensorRole::Layer(0, LayerTensor::Q)).unwrap();
    assert_eq!((q.kind(), q.tiles(), q.bytes().len(), q.tile(0).unwrap().len()), (TileKind::Q4_1, 1, 5120, 5120));
    assert_eq!((q.tile(1), q.grid()), (None, None));
    assert_eq!(model.tensor(TensorRole::TokenEmbedding).unwrap().rows(), 2);
    // A matrix of tiles is nothing for those who want rows, and says so.
    let error = model.require(TensorRole::Layer(0, LayerTensor::Q)).unwrap_err().to_string();
    assert!(error.contains("q4_1 tiles") && error.contains("GGUF"), "{error}");
    assert!(model.head().is_err());
    // 128 × 128 is no whole number of tiles.
    let error = q.decode_strip(0, None, &mut [0.0; 32 * 128]).unwrap_err().to_string();
    assert!(error.contains("Q4NX tensor size is not whole tiles"), "{error}");
    assert_eq!(model.summary().tiles[&TileKind::Q4_1].tensors, 8);
    assert_eq!(Tokenizer::from_vocabulary(model.vocabulary()).unwrap().eos_ids(), [1]);
}

#[test]
fn tiles_of_every_kind_are_given_as_q4_1_or_refused() {
    let golden = |name: &str| fs::read(format!("{}/tests/data/q4nx/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let mut made = Directory::new();
    for (part, shape, tile) in [
        ("self_attn.k", [1, 5120], golden("tile_q4_1.bin")),
        ("self_attn.v", [1, 4736], golden("tile_q4k.bin")),
        ("self_attn.o", [1, 8704], golden("tile_q8.bin")),
    ] {
        let name = format!("model.layers.0.{part}_proj.weight");
        made.add(&name, "I8", &shape, tile.len());
        let start = made.data.len() - tile.len();
        made.data[start..].copy_from_slice(&tile);
    }
    let model = made.open().unwrap();
    let tile = |part| model.tiled(TensorRole::Layer(0, part)).unwrap().q4_1_tile(0).map(|tile| tile.into_owned());
    assert_eq!(tile(LayerTensor::K).unwrap(), golden("tile_q4_1.bin"));
    assert_eq!(tile(LayerTensor::V).unwrap(), golden("tile_q4k_as_q4_1.bin"));
    let error = tile(LayerTensor::O).unwrap_err().to_string();
    assert!(error.contains("a Q8 tensor does not fit q4_1 (8-bit codes)"), "{error}");
    assert!(model.tiled(TensorRole::Layer(0, LayerTensor::K)).unwrap().q4_1_tile(1).is_err());
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    type Change = fn(&mut Directory);
    let changes: [(Change, &str); 12] = [
        (
            |made| {
                // The last tensor claims more tiles than the file has bytes for.
                made.table["model.layers.0.mlp.down_proj.weight"]["shape"] = json!([4, 5120]);
            },
            "mlp.down_proj.weight runs past the end of the file",
        ),
        (|made| made.table[Q]["shape"] = json!([1, 5000]), "not a Q4NX chunked tensor (last dimension 5000)"),
        (|made| made.table[Q]["shape"] = json!([1_u64 << 60, 1_u64 << 60, 5120]), "wanted a positive number of tiles"),
        (|made| made.table[Q]["shape"] = json!([1_u64 << 55, 5120]), "runs past the end of the file"),
        (|made| drop(made.table.remove(Q)), "self_attn.q_proj.weight\" is missing"),
        (|made| drop(made.table.remove("model.embed_tokens.weight")), "model.embed_tokens.weight\" is missing"),
        (|made| made.table["model.norm.weight"]["dtype"] = json!("F32"), "wanted BF16 [128], found F32 [128]"),
        (|made| made.table["model.norm.weight"]["shape"] = json!([127]), "wanted BF16 [128], found BF16 [127]"),
        (
            |made| made.table["model.embed_tokens.weight"]["shape"] = json!([1_u64 << 40, 128]),
            "model.embed_tokens.weight",
        ),
        (
            |made| made.table["model.embed_tokens.weight"]["shape"] = json!([-2, 128]),
            "wanted a positive number of rows",
        ),
        (|made| made.add("model.layers.1.input_layernorm.weight", "BF16", &[128], 256), "wanted a layer below 1"),
        (
            |made| made.add("model.visual.weight", "BF16", &[128], 256),
            "tensor \"model.visual.weight\" in a qwen3 model",
        ),
    ];
    for (change, wanted) in changes {
        let mut made = Directory::new();
        change(&mut made);
        let error = made.open().unwrap_err();
        assert!(error.contains(wanted), "{error}");
    }
    // Four tiles stated, one declared, the file goes on: within the bound of the file, but not decodable.
    let mut made = Directory::new();
    made.table[Q]["shape"] = json!([4, 5120]);
    let model = made.open().unwrap();
    assert_eq!(model.tiled(TensorRole::Layer(0, LayerTensor::Q)).unwrap().tiles(), 4);
}

#[test]
fn missing_and_damaged_files_are_named() {
    for missing in directory::FILES {
        let made = Directory::new();
        made.open().unwrap();
        fs::remove_file(made.path().join(missing)).unwrap();
        let error = ModelSource::open(&made.path()).unwrap_err().to_string();
        let wanted = if missing == "model.q4nx" { "a Q4NX directory" } else { "not an NPU model directory" };
        assert!(error.contains(wanted), "{error}");
    }
    for (name, text, wanted) in [
        ("config.json", r#"{"model_type":"gemma3"}"#, "model_type 'gemma3' is not supported; supported: qwen3, qwen2"),
        ("config.json", "{", "config.json: the text: wanted a JSON object"),
        ("tokenizer.json", "{", "tokenizer.json: the tokenizer: tokenizer.json"),
        (
            "tokenizer.json",
            r#"{"pre_tokenizer":{"type":"ByteLevel"},"model":{"vocab":{"a":2},"merges":[]}}"#,
            "wanted ids below 2",
        ),
    ] {
        let made = Directory::new();
        made.write(name, text.as_bytes());
        let error = made.open().unwrap_err();
        assert!(error.contains(wanted), "{error}");
    }
    let made = Directory::new();
    made.write(
        "tokenizer.json",
        br#"{"pre_tokenizer":{"type":"BertPreTokenizer"},"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}}"#,
    );
    let model = made.open().unwrap();
    let error = Tokenizer::from_vocabulary(model.vocabulary()).unwrap_err().to_string();
    assert!(error.contains("BertPreTokenizer"), "{error}");
}

#[test]
fn packing_refuses_what_is_no_gguf_file() {
    let made = Directory::new();
    let model = made.path().join("model.q4nx");
    made.open().unwrap();
    let out = made.path().join("out");
    let control = npuhal_core::stage::Control::new();
    let error = pack(&model, &out, &PackOptions::default(), &control, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("wanted \"GGUF\""), "{error}");
    assert!(!out.exists());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Flipped bytes anywhere in the table or the length: an error or a model, never a panic, and tiles stay in the file.
    #[test]
    fn damaged_files_are_survived(flips in prop::collection::vec((0_usize..2300, any::<u8>()), 1..4), cut in 0_usize..70_000) {
        let made = Directory::new();
        let mut bytes = file(&Value::Object(made.table.clone()), &made.data);
        for (at, byte) in flips {
            let len = bytes.len();
            bytes[at % len] ^= byte;
        }
        bytes.truncate(bytes.len().saturating_sub(cut % 50_000 * usize::from(cut > 35_000)));
        made.write("model.q4nx", &bytes);
        if let Ok(model) = ModelSource::open(&made.path()) {
            for (_, tensor) in model.tiled_tensors() {
                for index in 0..tensor.tiles().min(64) {
                    prop_assert!(tensor.tile(index).is_some());
                }
                let mut out = vec![0.0; 32 * tensor.cols()];
                let _ = tensor.decode_strip(0, None, &mut out);
            }
        }
    }

    /// Any text as a table.
    #[test]
    fn any_table_is_survived(text in r#"[{}\[\]",:0-9a-z_ -]{0,80}"#, length in any::<u16>()) {
        let mut bytes = u64::from(length % 100).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        let _ = open(&bytes);
    }
}
