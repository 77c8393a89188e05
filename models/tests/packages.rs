//! Packages: conversion from Hugging Face directories and GGUF files, publishing, opening, listing.

mod common;

use common::{GgufWriter, Meta, tiny_model};
use half::{bf16, f16};
use npuhal_core::stage::Control;
use npuhal_models::config::RopePairing;
use npuhal_models::package::{
    ConvertRequest, Converted, Family, Identity, LayerArray, OpenOptions, Package, PackageError, Shape, convert,
    quantize_row, scan,
};
use npuhal_models::safetensors::{SafetensorsCheckpoint, SafetensorsFile};
use npuhal_models::source::{LayerTensor, TensorRole};
use npuhal_models::vocabulary::Vocabulary;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use tempfile::{TempDir, tempdir};

const SHAPE: Shape = Shape { hidden_size: 128, intermediate_size: 96, heads: 2, kv_heads: 1, layers: 2, vocab_size: 8 };

#[derive(Clone, Copy)]
enum Stored {
    F32,
    F16,
    Bf16,
}

/// Element (row, col) of the tensor with this name: different everywhere, within ±2.
fn weight(name: &str, row: usize, col: usize) -> f32 {
    let seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let mixed = seed.wrapping_add(row as u32 * 7919).wrapping_add(col as u32 * 104_729).wrapping_mul(2_654_435_761);
    (mixed >> 8) as f32 / (1 << 22) as f32 - 2.0
}

/// Names and dimensions of tensors.
type Dimensions = Vec<(String, Vec<usize>)>;

/// A checkpoint's tensors.
fn tensors(bias: bool, head: bool) -> Dimensions {
    let mut all =
        vec![("model.embed_tokens.weight".to_owned(), vec![8, 128]), ("model.norm.weight".to_owned(), vec![128])];
    if head {
        all.push(("lm_head.weight".to_owned(), vec![8, 128]));
    }
    for layer in 0..2 {
        let mut add =
            |suffix: &str, dims: &[usize]| all.push((format!("model.layers.{layer}.{suffix}"), dims.to_vec()));
        add("input_layernorm.weight", &[128]);
        add("post_attention_layernorm.weight", &[128]);
        for (part, rows) in [("q", 128), ("k", 64), ("v", 64)] {
            add(&format!("self_attn.{part}_proj.weight"), &[rows, 128]);
            if bias {
                add(&format!("self_attn.{part}_proj.bias"), &[rows]);
            }
        }
        add("self_attn.o_proj.weight", &[128, 128]);
        add("mlp.gate_proj.weight", &[96, 128]);
        add("mlp.up_proj.weight", &[96, 128]);
        add("mlp.down_proj.weight", &[128, 96]);
    }
    all
}

fn safetensors(tensors: &[(String, Vec<usize>)], stored: Stored) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    for (name, dims) in tensors {
        let start = data.len();
        let (rows, cols) = if dims.len() == 1 { (1, dims[0]) } else { (dims[0], dims[1]) };
        for value in (0..rows * cols).map(|at| weight(name, at / cols, at % cols)) {
            match stored {
                Stored::F32 => data.extend(value.to_le_bytes()),
                Stored::F16 => data.extend(f16::from_f32(value).to_le_bytes()),
                Stored::Bf16 => data.extend(bf16::from_f32(value).to_le_bytes()),
            }
        }
        let dtype = match stored {
            Stored::F32 => "F32",
            Stored::F16 => "F16",
            Stored::Bf16 => "BF16",
        };
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": dims, "data_offsets": [start, data.len()] }));
    }
    file(&Value::Object(header).to_string(), &data)
}

fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn config(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 8, "rope_theta": 100000, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    })
}

/// A checkpoint in one file.
fn checkpoint(folder: &Path, config: &Value, tensors: &[(String, Vec<usize>)], stored: Stored) -> PathBuf {
    let path = folder.join("source");
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    fs::write(path.join("tokenizer.json"), "{\"a\": 1}").unwrap();
    fs::write(path.join("model.safetensors"), safetensors(tensors, stored)).unwrap();
    path
}

fn convert_as(
    source: &Path,
    target: &Path,
    identity: Identity,
    shape: Option<Shape>,
) -> Result<Converted, PackageError> {
    let threads = NonZeroUsize::new(2).unwrap();
    let request = ConvertRequest { source, target, identity, shape, threads, keep: &["npu"] };
    convert(&request, &mut |_| (), &Control::new())
}

fn convert_small(source: &Path, target: &Path) -> Result<Converted, PackageError> {
    convert_as(source, target, Identity::default(), Some(SHAPE))
}

fn open(directory: &Path) -> Result<Package, PackageError> {
    open_counting(directory, false).0
}

/// The package, and the bytes that were hashed for it.
fn open_counting(directory: &Path, verify: bool) -> (Result<Package, PackageError>, u64) {
    let mut hashed = 0;
    let options = OpenOptions { verify, control: &Control::new(), progress: &mut |bytes, _| hashed += bytes };
    let result = Package::open(directory, options);
    (result, hashed)
}

/// A converted small checkpoint of the family `llama`.
fn package() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let source = checkpoint(folder.path(), &config("llama"), &tensors(false, false), Stored::Bf16);
    let target = folder.path().join("package");
    convert_small(&source, &target).unwrap();
    (folder, target)
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_checkpoint_becomes_a_package() {
    for (stored, round) in [
        (Stored::F32, (|x| x) as fn(f32) -> f32),
        (Stored::F16, |x| f16::from_f32(x).to_f32()),
        (Stored::Bf16, |x| bf16::from_f32(x).to_f32()),
    ] {
        let folder = tempdir().unwrap();
        let source = checkpoint(folder.path(), &config("qwen2"), &tensors(true, true), stored);
        let target = folder.path().join("package");
        let identity = Identity {
            model_id: Some("small".into()),
            source_model: Some("owner/small".into()),
            source_revision: Some("abc".into()),
            display_name: Some("Small ü".into()),
        };
        let converted = convert_as(&source, &target, identity, Some(SHAPE)).unwrap();
        assert_eq!((converted.family, converted.model_id.as_deref()), (Family::Qwen2, Some("small")));
        assert_eq!(names(folder.path()), ["package", "source"], "no staging is left");

        let package = open(&target).unwrap();
        let source_of = |name: &str, row: usize, col: usize| round(weight(name, row, col));
        let element = |tensor: &npuhal_models::Tensor, row: usize, col: usize| {
            let mut values = vec![0.0; tensor.cols()];
            tensor.dequantize_row(row, &mut values).unwrap();
            values[col]
        };
        let embedding = package.raw("token_embedding").unwrap();
        let wanted = f16::from_f32(source_of("model.embed_tokens.weight", 3, 5)).to_f32();
        assert_eq!(element(embedding, 3, 5), wanted);
        // Rows of q, k, v; of gate, up.
        let stacked = [
            (LayerArray::Qkv, 127, "self_attn.q_proj", 127),
            (LayerArray::Qkv, 128, "self_attn.k_proj", 0),
            (LayerArray::Qkv, 255, "self_attn.v_proj", 63),
            (LayerArray::GateUp, 95, "mlp.gate_proj", 95),
            (LayerArray::GateUp, 96, "mlp.up_proj", 0),
            (LayerArray::DownProj, 7, "mlp.down_proj", 7),
            (LayerArray::OProj, 9, "self_attn.o_proj", 9),
        ];
        for (array, row, name, source_row) in stacked {
            let quantized = package.layer_quantized(1, array).unwrap();
            let name = format!("model.layers.1.{name}.weight");
            let cols = quantized.bf16.cols();
            let source: Vec<f32> = (0..cols).map(|col| source_of(&name, source_row, col)).collect();
            let mut codes = vec![0i8; cols];
            let scale = quantize_row(&source, &mut codes);
            assert_eq!(element(&quantized.bf16, row, 17), bf16::from_f32(source[17]).to_f32(), "{name}");
            assert_eq!(element(&quantized.scales, 0, row), scale, "{name}");
            let found: Vec<i8> = quantized.code_rows(row, 1).iter().map(|code| code.cast_signed()).collect();
            assert_eq!(found, codes, "{name}");
            for (code, weight) in codes.iter().zip(&source) {
                assert!((f32::from(*code) * scale - weight).abs() <= scale / 2.0 + 1e-6);
            }
        }
        let bias = package.layer_raw(0, LayerArray::QkvBias).unwrap();
        let wanted = f16::from_f32(source_of("model.layers.0.self_attn.k_proj.bias", 0, 2)).to_f32();
        assert_eq!((bias.rows(), bias.cols(), element(bias, 0, 130)), (1, 256, wanted));
        let head = package.quantized("lm_head").unwrap();
        assert_eq!(element(&head.bf16, 2, 3), bf16::from_f32(source_of("lm_head.weight", 2, 3)).to_f32());
        let metadata = package.metadata();
        assert_eq!((metadata.rope_theta, metadata.rms_norm_eps), (100_000.0, 1e-6));
        assert_eq!(metadata.display_name.as_deref(), Some("Small ü"));
        assert_eq!(fs::read(target.join("tokenizer.json")).unwrap(), b"{\"a\": 1}", "copied verbatim");
    }
}

#[test]
fn metadata_is_sorted_and_complete() {
    let (_folder, target) = package();
    let text = fs::read_to_string(target.join("metadata.json")).unwrap();
    assert!(text.starts_with("{\n  \"accumulator_dtype\": \"float32\",\n  \"activation_dtype\""), "{text:.80}");
    assert!(text.ends_with("}\n"));
    let metadata: Map<String, Value> = serde_json::from_str(&text).unwrap();
    let keys: Vec<&String> = metadata.keys().collect();
    let wanted = [
        "accumulator_dtype",
        "activation_dtype",
        "attention_heads",
        "context_length",
        "files",
        "format",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "kv_heads",
        "layers",
        "model_family",
        "rms_norm_eps",
        "rope_theta",
        "tensors",
        "vocab_size",
    ];
    assert_eq!(keys, wanted, "nothing that the caller did not say");
    assert_eq!(metadata["rope_theta"], json!(100_000), "the number as config.json writes it");
    let raw = json!({ "dtype": "float16", "file": "layer01.input_norm.float16.bin", "shape": [128] });
    assert_eq!(metadata["tensors"]["layer01.input_norm"], raw);
    let quantized = json!({
        "bf16_dtype": "bfloat16", "bf16_file": "layer00.qkv.bf16.bin", "layout": "row_major",
        "quantization": "symmetric_per_output_channel", "scale": "layer00.qkv.scale.f32.bin", "scale_dtype": "float32",
        "shape": [256, 128], "weight": "layer00.qkv.w8.bin", "weight_dtype": "int8",
    });
    assert_eq!(metadata["tensors"]["layer00.qkv"], quantized);
    let mut listed: Vec<&str> = metadata["files"].as_object().unwrap().keys().map(String::as_str).collect();
    listed.push("metadata.json");
    listed.sort_unstable();
    assert_eq!(listed, names(&target), "every file but metadata.json is in the manifest");
    // Without a head of its own the embedding is the head; without biases there are zeros.
    let package = open(&target).unwrap();
    let mut row = vec![0.0; 128];
    package.quantized("lm_head").unwrap().bf16.dequantize_row(1, &mut row).unwrap();
    assert_eq!(row[4], bf16::from_f32(weight("model.embed_tokens.weight", 1, 4)).to_f32());
    assert!(package.layer_raw(0, LayerArray::QkvBias).unwrap().bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn shards_and_one_file_give_the_same_package() {
    let (folder, single) = package();
    let source = folder.path().join("sharded");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("config.json"), config("llama").to_string()).unwrap();
    let all = tensors(false, false);
    let (first, second) = all.split_at(9);
    let mut map = Map::new();
    for (name, part) in [("model-1.safetensors", first), ("model-2.safetensors", second)] {
        fs::write(source.join(name), safetensors(part, Stored::Bf16)).unwrap();
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), json!(name))));
    }
    fs::write(source.join("model.safetensors.index.json"), json!({ "metadata": {}, "weight_map": map }).to_string())
        .unwrap();
    let sharded = folder.path().join("other");
    convert_small(&source, &sharded).unwrap();
    for name in names(&sharded).iter().filter(|name| name.ends_with(".bin")) {
        assert_eq!(fs::read(sharded.join(name)).unwrap(), fs::read(single.join(name)).unwrap(), "{name}");
    }
    let index = |value: Value| {
        fs::write(source.join("model.safetensors.index.json"), value.to_string()).unwrap();
        SafetensorsCheckpoint::open(&source).unwrap_err().to_string()
    };
    assert!(index(json!({ "weight_map": { "x": "../up.safetensors" } })).contains("plain file names"));
    assert!(index(json!({ "weight_map": { "x": "model-1.safetensors" } })).contains("no such tensor there"));
    assert!(index(json!({ "weight_map": 3 })).contains("weight_map"));
}

#[test]
fn rejections_name_every_field_and_write_nothing() {
    let folder = tempdir().unwrap();
    let target = folder.path().join("package");
    let refuse = |change: &dyn Fn(&mut Value), shape: Option<Shape>| {
        let mut config = config("llama");
        change(&mut config);
        let source = checkpoint(folder.path(), &config, &tensors(false, false), Stored::Bf16);
        let error = convert_as(&source, &target, Identity::default(), shape).unwrap_err().to_string();
        assert_eq!(names(folder.path()), ["source"], "nothing was written");
        error
    };
    let family = refuse(&|config| config["model_type"] = json!("mistral"), None);
    assert_eq!(family, "unsupported model_type 'mistral'; expected one of llama, qwen2");
    assert_eq!(
        refuse(&|_| (), None),
        "model is incompatible with the selected XDNA1 graph: hidden_size=128 (expected 576), \
         intermediate_size=96 (expected 1536), num_attention_heads=2 (expected 9), num_key_value_heads=1 (expected 3), \
         num_hidden_layers=2 (expected 30), vocab_size=8 (expected 49152)"
    );
    let layers = refuse(&|config| config["num_hidden_layers"] = json!(3), Some(SHAPE));
    assert_eq!(layers, "model is incompatible with the selected XDNA1 graph: num_hidden_layers=3 (expected 2)");
    let head = refuse(&|config| config["head_dim"] = json!(32), Some(SHAPE));
    assert_eq!(head, "head_dim=32 is unsupported; expected 64");
    let scaling = refuse(&|config| config["rope_scaling"] = json!({ "type": "linear", "factor": 2 }), Some(SHAPE));
    assert!(scaling.contains("rope_scaling"), "{scaling}");
    let theta = refuse(&|config| config["rope_theta"] = json!("x"), Some(SHAPE));
    assert!(theta.contains("rope_theta: wanted a positive number"), "{theta}");
}

#[test]
fn tensors_that_are_missing_misshapen_unknown_or_not_finite_are_refused() {
    let folder = tempdir().unwrap();
    let target = folder.path().join("package");
    let refuse = |change: &dyn Fn(&mut Dimensions)| {
        let mut all = tensors(false, false);
        change(&mut all);
        let source = checkpoint(folder.path(), &config("llama"), &all, Stored::F32);
        let error = convert_small(&source, &target).unwrap_err().to_string();
        assert_eq!(names(folder.path()), ["source"]);
        error
    };
    assert!(refuse(&|all| drop(all.remove(1))).contains("tensor \"model.norm.weight\" is missing"));
    assert!(refuse(&|all| all[1].1 = vec![64]).contains("wanted 1 x 128, found 1 x 64"));
    let unknown = refuse(&|all| all.push(("model.layers.0.mlp.gate_proj.bias".into(), vec![96])));
    assert!(unknown.contains("gate_proj.bias"), "{unknown}");
    let source = checkpoint(folder.path(), &config("llama"), &tensors(false, false), Stored::F32);
    let path = source.join("model.safetensors");
    let at = SafetensorsFile::open(&path).unwrap().tensors()[0].range().start;
    let mut bytes = fs::read(&path).unwrap();
    for (value, limit) in [(1e5f32, "up to 65504"), (f32::NAN, "NaN")] {
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = convert_small(&source, &target).unwrap_err().to_string();
        assert!(error.contains("model.embed_tokens.weight") && error.contains(limit), "{error}");
        assert_eq!(names(folder.path()), ["source"], "a failure in the middle leaves no partial files");
    }
}

#[test]
fn an_older_package_is_replaced_and_nothing_else() {
    let (folder, target) = package();
    let source = folder.path().join("source");
    fs::write(target.join("stray"), "x").unwrap();
    fs::create_dir(target.join("npu")).unwrap();
    fs::write(target.join("npu/kit.json"), "mine").unwrap();
    // What a killed conversion has left behind goes.
    fs::create_dir(folder.path().join(".package.packing-1-0")).unwrap();
    assert_eq!(convert_small(&source, &target).unwrap().kept, ["npu"]);
    assert!(!target.join("stray").exists());
    let kit = || fs::read(target.join("npu/kit.json")).unwrap();
    assert_eq!(kit(), b"mine", "what the user put there is not the conversion's");
    assert_eq!(names(folder.path()), ["package", "source"], "neither staging nor backup is left");
    let before = fs::read(target.join("metadata.json")).unwrap();
    fs::write(source.join("model.safetensors"), "short").unwrap();
    convert_small(&source, &target).unwrap_err();
    assert_eq!(fs::read(target.join("metadata.json")).unwrap(), before, "a failed conversion leaves the old package");
    assert_eq!(kit(), b"mine");
    let kept = convert_small(&source, &source).unwrap_err();
    assert!(matches!(kept, PackageError::Model(_)), "{kept}");
    checkpoint(folder.path(), &config("llama"), &tensors(false, false), Stored::Bf16);
    let taken = convert_small(&source, &source).unwrap_err().to_string();
    assert!(taken.contains("a directory that is no package"), "{taken}");
}

/// As if a process were killed at any call: what others see is looked at from another thread all the time.
#[test]
fn a_package_that_is_replaced_is_there_at_any_time() {
    let (folder, target) = package();
    let source = folder.path().join("source");
    fs::create_dir(target.join("npu")).unwrap();
    fs::write(target.join("npu/kit.json"), "mine").unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let missing = std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            let mut missing = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                // One path, one look: each file is in the former package and in the new one.
                let whole = ["metadata.json", "npu/kit.json"].iter().all(|name| target.join(name).exists());
                missing += usize::from(!whole);
            }
            missing
        });
        (0..5).for_each(|_| _ = convert_small(&source, &target).unwrap());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        looker.join().unwrap()
    });
    assert_eq!(missing, 0);
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    let folder = tempdir().unwrap();
    let source = checkpoint(folder.path(), &config("llama"), &tensors(false, false), Stored::F32);
    let target = folder.path().join("package");
    let request = ConvertRequest {
        source: &source,
        target: &target,
        identity: Identity::default(),
        shape: Some(SHAPE),
        threads: NonZeroUsize::MIN,
        keep: &[],
    };
    let control = Control::new();
    let error = convert(&request, &mut |_| control.cancel(), &control).unwrap_err();
    assert!(matches!(error, PackageError::Stopped(npuhal_core::RunError::Cancelled)), "{error}");
    assert_eq!(names(folder.path()), ["source"]);
}

#[test]
fn damage_is_told_in_the_published_words() {
    let (_folder, target) = package();
    let message = || open(&target).unwrap_err().to_string();
    let name = "layer01.o_proj.bf16.bin";
    let sound = fs::read(target.join(name)).unwrap();
    fs::write(target.join(name), &sound[1..]).unwrap();
    assert_eq!(message(), format!("model package file is missing or truncated: {name}"));
    fs::remove_file(target.join(name)).unwrap();
    assert_eq!(message(), format!("model package file is missing or truncated: {name}"));
    let mut damaged = sound.clone();
    damaged[77] ^= 1;
    fs::write(target.join(name), &damaged).unwrap();
    assert_eq!(message(), format!("model package checksum mismatch: {name}"));
    fs::write(target.join(name), &sound).unwrap();
    open(&target).unwrap();

    let path = target.join("metadata.json");
    let metadata: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = metadata.clone();
        change(&mut changed);
        fs::write(&path, changed.to_string()).unwrap();
        message()
    };
    assert_eq!(with(&|m| m["files"] = json!({})), "model package has no integrity manifest; reconvert the model");
    let no_files = with(&|m| drop(m.as_object_mut().unwrap().remove("files")));
    assert_eq!(no_files, "model package has no integrity manifest; reconvert the model");
    let old = with(&|m| drop(m["tensors"]["layer00.qkv"].as_object_mut().unwrap().remove("bf16_file")));
    assert!(old.starts_with("layer00.qkv has no BF16 weights; rerun convert_smollm2.py"), "{old}");
    assert!(with(&|m| m["files"]["../x"] = m["files"][name].clone()).contains("plain names"));
    assert!(with(&|m| m["format"] = json!("xdna1-new")).contains("xdna1-smollm2-w8a16-v1"));
    assert!(with(&|m| m["layers"] = json!(3)).contains("layer02"));
    assert!(with(&|m| m["layers"] = json!(1u64 << 40)).contains("no decoder"));
    assert!(
        with(&|m| m["tensors"]["final_norm"]["file"] = json!("/etc/passwd")).contains("wanted a file of the manifest")
    );
    assert!(with(&|m| m["tensors"]["final_norm"]["shape"] = json!([127])).contains("wanted shape [128]"));
    assert!(with(&|m| m["context_length"] = json!(128)).contains("wanted 64, found 128"));
}

#[test]
fn a_verified_package_is_hashed_again_only_when_it_changed_or_is_asked_to() {
    let (folder, target) = package();
    let (first, hashed) = open_counting(&target, false);
    first.unwrap();
    assert!(hashed > 300_000, "{hashed}");
    assert_eq!(names(folder.path()), [".verified", "package", "source"]);
    let (again, hashed) = open_counting(&target, false);
    again.unwrap();
    assert_eq!(hashed, 0);
    let (forced, hashed) = open_counting(&target, true);
    forced.unwrap();
    assert!(hashed > 300_000);
    let name = target.join("final_norm.float16.bin");
    let mut damaged = fs::read(&name).unwrap();
    damaged[0] ^= 1;
    fs::write(&name, &damaged).unwrap();
    assert!(matches!(open(&target), Err(PackageError::Checksum { .. })), "a change is seen without --verify");
}

/// A GGUF file of the checkpoint's weights, query and key rows permuted as its converters do for `llama`.
fn gguf(arch: &str, name: &str) -> GgufWriter {
    let key = |name: &str| format!("{arch}.{name}");
    let mut writer = tiny_model(arch);
    writer.tensors.clear();
    writer = writer
        .set("general.name", Meta::text(name))
        .set(&key("embedding_length"), Meta::U32(128))
        .set(&key("feed_forward_length"), Meta::U32(96))
        .set(&key("attention.head_count"), Meta::U32(2))
        .set(&key("attention.head_count_kv"), Meta::U32(1));
    let data = |name: &str, rows: usize, cols: usize, permuted: bool| -> Vec<u8> {
        let row_of = |row: usize| match permuted {
            // Rows 0, 32, 1, 33, … of each head of 64.
            true => row / 64 * 64 + row % 2 * 32 + row % 64 / 2,
            false => row,
        };
        let element = |at: usize| match rows {
            1 => weight(name, 0, row_of(at)),
            _ => weight(name, row_of(at / cols), at % cols),
        };
        (0..rows * cols).flat_map(|at| element(at).to_le_bytes()).collect()
    };
    let names = [
        ("input_layernorm.weight", "attn_norm.weight"),
        ("post_attention_layernorm.weight", "ffn_norm.weight"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    for (source, dims) in tensors(arch == "qwen2", false) {
        let stored = match source.strip_prefix("model.layers.") {
            None if source == "model.norm.weight" => "output_norm.weight".to_owned(),
            None => "token_embd.weight".to_owned(),
            Some(rest) => {
                let (layer, part) = rest.split_once('.').unwrap();
                let (from, to) = names.iter().find(|(from, _)| part.starts_with(from)).unwrap();
                format!("blk.{layer}.{}", part.replacen(from, to, 1))
            }
        };
        let permuted = arch == "llama" && (stored.contains("attn_q.") || stored.contains("attn_k."));
        let (rows, cols) = if dims.len() == 1 { (1, dims[0]) } else { (dims[0], dims[1]) };
        let gguf_dims: Vec<u64> = dims.iter().rev().map(|dim| *dim as u64).collect();
        writer = writer.tensor(&stored, 0, &gguf_dims, data(&source, rows, cols, permuted));
    }
    writer
}

#[test]
fn a_gguf_file_gives_the_arrays_of_its_checkpoint() {
    for (arch, bias) in [("llama", false), ("qwen2", true)] {
        let folder = tempdir().unwrap();
        let source = checkpoint(folder.path(), &config(arch), &tensors(bias, false), Stored::F32);
        let direct = folder.path().join("direct");
        convert_small(&source, &direct).unwrap();
        let file = folder.path().join("tiny-f32.gguf");
        fs::write(&file, gguf(arch, "Tiny Coder").build()).unwrap();
        let target = folder.path().join("package");
        let converted = convert_small(&file, &target).unwrap();
        assert_eq!(converted.model_id.as_deref(), Some("tiny-f32-gguf-xdna1"));
        for name in names(&direct).iter().filter(|name| name.ends_with(".bin")) {
            assert_eq!(fs::read(direct.join(name)).unwrap(), fs::read(target.join(name)).unwrap(), "{arch} {name}");
        }
        let text = fs::read(target.join("metadata.json")).unwrap();
        let metadata: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(metadata["source_format"], "gguf");
        assert_eq!(metadata["source_file"], "tiny-f32.gguf");
        assert_eq!(metadata["source_weight_types"], json!(["F32"]));
        assert_eq!(metadata["source_sha256"].as_str().unwrap().len(), 64);
        assert_eq!((&metadata["rms_norm_eps"], &metadata["rope_theta"]), (&json!(1e-5), &json!(10_000.0)));
        let package = open(&target).unwrap();
        for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert!(target.join(name).is_file(), "{name} is made of the file's metadata");
        }
        let again = folder.path().join("again");
        fs::create_dir(&again).unwrap();
        fs::copy(source.join("model.safetensors"), again.join("model.safetensors")).unwrap();
        fs::copy(target.join("config.json"), again.join("config.json")).unwrap();
        convert_small(&again, &folder.path().join("twice")).unwrap();
        check_model(&package, bias);
        let published = if arch == "llama" { "smollm2-135m-xdna1" } else { "qwen2.5-0.5b-xdna1" };
        let identity = Identity { model_id: Some(published.into()), ..Identity::default() };
        let refused = convert_as(&file, &folder.path().join("other"), identity, Some(SHAPE)).unwrap_err();
        assert!(matches!(refused, PackageError::ReservedId { .. }), "{refused}");
    }
}

/// The package as a model has the checkpoint's tensors.
fn check_model(package: &Package, bias: bool) {
    let model = package.model(Vocabulary::default()).unwrap();
    let config = model.config();
    assert_eq!((config.layers, config.qkv_bias, config.context_length), (2, bias, 64));
    assert_eq!(config.rope.pairing, RopePairing::Halves);
    let parts = [
        (LayerTensor::Q, "self_attn.q_proj.weight", 127),
        (LayerTensor::K, "self_attn.k_proj.weight", 63),
        (LayerTensor::V, "self_attn.v_proj.weight", 0),
        (LayerTensor::O, "self_attn.o_proj.weight", 5),
        (LayerTensor::Gate, "mlp.gate_proj.weight", 95),
        (LayerTensor::Up, "mlp.up_proj.weight", 1),
        (LayerTensor::Down, "mlp.down_proj.weight", 64),
    ];
    for (part, name, row) in parts {
        let tensor = model.require(TensorRole::Layer(1, part)).unwrap();
        let mut values = vec![0.0; tensor.cols()];
        tensor.dequantize_row(row, &mut values).unwrap();
        let wanted = bf16::from_f32(weight(&format!("model.layers.1.{name}"), row, 33)).to_f32();
        assert_eq!(values[33], wanted, "{name}");
    }
    if bias {
        let tensor = model.require(TensorRole::Layer(0, LayerTensor::KBias)).unwrap();
        let mut values = vec![0.0; 64];
        tensor.dequantize_row(0, &mut values).unwrap();
        assert_eq!(values[9], f16::from_f32(weight("model.layers.0.self_attn.k_proj.bias", 0, 9)).to_f32());
    }
}

#[test]
fn a_folder_is_listed_and_the_unusable_is_skipped() {
    let folder = tempdir().unwrap();
    let add = |name: &str, text: &str| {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("metadata.json"), text).unwrap();
    };
    add("b", r#"{"model_id": "two", "context_length": 64, "model_family": "llama"}"#);
    add("a", r#"{"model_id": "one", "display_name": "One"}"#);
    add("Qwen2.5-0.5B-Instruct-xdna1-w8a16", "{}");
    add("c-broken", "{");
    add("d-list", "[]");
    add("e-nameless", r#"{"model_id": 5}"#);
    add("f-long", r#"{"model_id": "x", "context_length": 128}"#);
    add("g-float", r#"{"model_id": "x", "context_length": 64.0}"#);
    add("h-twin", r#"{"model_id": "one"}"#);
    add(".staging", r#"{"model_id": "hidden"}"#);
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(folder.path().join("model.gguf"), "x").unwrap();
    let found = scan(folder.path()).unwrap();
    let packages: Vec<_> = found.packages.iter().map(|p| (p.model_id.as_str(), p.display_name.as_str())).collect();
    let qwen = ("qwen2.5-0.5b-xdna1", "Qwen2.5 0.5B Instruct (XDNA1 experimental)");
    assert_eq!(packages, [qwen, ("one", "One"), ("two", "two"), ("one", "one")]);
    let skipped: Vec<_> =
        found.skipped.iter().map(|skipped| skipped.path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(skipped, ["c-broken", "d-list", "e-nameless", "f-long", "g-float"]);
    assert!(found.skipped[3].reason.contains("context_length is 128; wanted 64"));
    let twins = found.duplicates();
    assert_eq!((twins.len(), twins["one"].len()), (1, 2));
    assert_eq!(scan(&folder.path().join("none")).unwrap(), npuhal_models::package::Scan::default());
}

#[test]
fn hostile_safetensors_are_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let refuse = |bytes: &[u8], part: &str| {
        fs::write(&path, bytes).unwrap();
        let error = SafetensorsFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(part), "wanted {part:?} in: {error}");
    };
    refuse(b"", "header length");
    refuse(&[1, 2, 3], "header length");
    refuse(&u64::MAX.to_le_bytes(), "header length");
    refuse(&file("[]", b""), "an object of tensors");
    refuse(&file("{", b""), "header");
    let entry = |shape: &str, offsets: &str| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#);
    let one = |shape: &str, offsets: &str| format!(r#"{{"x":{}}}"#, entry(shape, offsets));
    refuse(&file(&one("[1]", "[0,8]"), &[0; 4]), "cut short");
    refuse(&file(&one("[1]", "[4,0]"), &[0; 4]), "cut short");
    refuse(&file(&one("[2]", "[0,4]"), &[0; 4]), "found 4 bytes");
    refuse(&file(&one("[4611686018427387904,4]", "[0,0]"), &[0; 4]), "found 0 bytes");
    refuse(&file(&one("[-1]", "[0,4]"), &[0; 4]), "header");
    refuse(&file(&one("[1]", "[0,4]"), &[0; 8]), "found the last at");
    refuse(&file(&one("[1]", "[4,8]"), &[0; 8]), "leaves a gap");
    let two = format!(r#"{{"x":{},"y":{}}}"#, entry("[1]", "[0,4]"), entry("[1]", "[0,4]"));
    refuse(&file(&two, &[0; 4]), "overlaps");
    let twice = format!(r#"{{"x":{},"x":{}}}"#, entry("[1]", "[0,4]"), entry("[1]", "[4,8]"));
    refuse(&file(&twice, &[0; 8]), "found a second");
    let odd = r#"{"x":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}}"#;
    refuse(&file(odd, &[0; 4]), "unknown element type");

    let ints = r#"{"x":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},"s":{"dtype":"F32","shape":[],"data_offsets":[16,20]}}"#;
    fs::write(&path, file(ints, &[0; 20])).unwrap();
    let opened = SafetensorsFile::open(&path).unwrap();
    assert!(opened.tensor("x").unwrap_err().to_string().contains("element type I64"));
    assert!(opened.tensor("s").unwrap_err().to_string().contains("one or two dimensions"));
    assert!(opened.tensor("y").unwrap().is_none());
}

/// Overwrites bytes of `sound`, and cuts it.
fn damaged(sound: &[u8], changes: &[(usize, u8)], keep: usize) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    for (at, byte) in changes {
        let at = at % bytes.len();
        bytes[at] = *byte;
    }
    bytes.truncate(keep % (sound.len() + 1));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever happens to a header, opening ends in a file or an error, and every tensor lies in the file.
    #[test]
    fn damaged_safetensors_never_panic(
        changes in prop::collection::vec((0..2600usize, any::<u8>()), 0..4),
        keep in prop::option::weighted(0.3, any::<usize>()),
    ) {
        let sound = safetensors(&tensors(true, true)[..12], Stored::Bf16);
        let folder = tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, damaged(&sound, &changes, keep.unwrap_or(sound.len()))).unwrap();
        if let Ok(file) = SafetensorsFile::open(&path) {
            for info in file.tensors() {
                prop_assert!(info.range().end <= sound.len());
                let _ = file.tensor(info.name());
            }
        }
    }

    /// Whatever happens to the metadata, opening a package ends in a package or an error.
    #[test]
    fn damaged_metadata_never_panics(
        changes in prop::collection::vec((any::<usize>(), any::<u8>()), 1..4),
        keep in prop::option::weighted(0.2, any::<usize>()),
    ) {
        static PACKAGE: std::sync::LazyLock<(TempDir, PathBuf, Vec<u8>)> = std::sync::LazyLock::new(|| {
            let (folder, target) = package();
            let text = fs::read(target.join("metadata.json")).unwrap();
            (folder, target, text)
        });
        let (_, target, sound) = &*PACKAGE;
        fs::write(target.join("metadata.json"), damaged(sound, &changes, keep.unwrap_or(sound.len()))).unwrap();
        if let Ok(package) = open(target) {
            prop_assert!(package.model(Vocabulary::default()).is_ok());
        }
    }
}
