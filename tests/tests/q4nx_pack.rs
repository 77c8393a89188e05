//! GGUF files packed into Q4NX directories: what is written, against the kit's own arithmetic; what is refused; what is left
//! behind when packing is stopped; the cache.

use npuhal_core::stage::Control;
use npuhal_models::q4nx::cache::{CacheState, PackCache};
use npuhal_models::q4nx::pack::PackReport;
use npuhal_models::q4nx::stamp::{self, Stamp, StampState};
use npuhal_models::q4nx::verify::{Outcome, VerifyReport, verify};
use npuhal_models::q4nx::{PackError, PackOptions, Q4nxFile, TileKind, pack};
use npuhal_models::source::{Format, LayerTensor};
use npuhal_models::{ModelSource, Specials, TensorRole, Tokenizer, WeightType};
use npuhal_registry::{DeviceAddress, DeviceChoice, Registry, Request, select};
use npuhal_tests::kit::dequantize;
use npuhal_tests::kit::gguf::{GgufFile, GgufTensor, Value, weight_type};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use serde_json::json;
use std::fs::{self, File};
use std::io::{Write, stderr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

// The route is registered by a crate that must be named to be linked.
use npuhal_cpu as _;

/// Hidden 256, intermediate 512, two heads of 128, one of keys and values, 512 tokens.
fn spec(architecture: Architecture, weights: Weights) -> ModelSpec {
    let mut spec = ModelSpec::small(architecture, weights);
    (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) = (256, 2, 1, 128, 512);
    spec.spare_tokens = 512 - 266;
    spec
}

fn mixed() -> ModelSpec {
    let mut spec = spec(Architecture::Qwen3, Weights::Mixed);
    spec.layers = 3;
    spec
}

/// A folder with a GGUF file in it.
struct Bench {
    folder: TempDir,
    gguf: PathBuf,
    out: PathBuf,
}

impl Bench {
    fn new(file: &GgufFile) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (gguf, out) = (folder.path().join("model.gguf"), folder.path().join("packed"));
        file.write(&gguf).unwrap();
        Self { folder, gguf, out }
    }

    fn pack(&self) -> Result<PackReport, PackError> {
        self.pack_with(&PackOptions::default())
    }

    fn pack_with(&self, options: &PackOptions) -> Result<PackReport, PackError> {
        pack(&self.gguf, &self.out, options, &Control::new(), &mut |_| {})
    }

    fn verify(&self) -> VerifyReport {
        verify(&self.gguf, &self.out, None, &Control::new(), &mut |_, _| {}).unwrap()
    }

    /// Files in the folder, hidden ones included.
    fn names(&self) -> Vec<String> {
        names(self.folder.path())
    }

    fn refused(&self) -> String {
        let error = self.pack().unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert_eq!(self.names(), ["model.gguf"], "nothing is left behind");
        error
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn rms(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// Relative RMS distance of a packed matrix from the kit's reading of the GGUF tensor.
fn distance(model: &ModelSource, role: TensorRole, source: &GgufTensor) -> f64 {
    let wanted = dequantize::row(weight_type(source.type_id).unwrap(), &source.bytes);
    let mut found = Vec::new();
    if let Some(tiled) = model.tiled(role) {
        let (down, _) = tiled.grid().unwrap();
        for strip in 0..down {
            let mut rows = vec![0.0; 32 * tiled.cols()];
            tiled.decode_strip(strip, None, &mut rows).unwrap();
            found.extend(rows);
        }
    } else {
        let tensor = model.tensor(role).unwrap();
        for row in 0..tensor.rows() {
            let mut values = vec![0.0; tensor.cols()];
            tensor.dequantize_row(row, &mut values).unwrap();
            found.extend(values);
        }
    }
    assert_eq!(found.len(), wanted.len());
    rms(found.iter().zip(&wanted).map(|(found, wanted)| f64::from(*found) - wanted)) / rms(wanted.iter().copied())
}

const LAYER: [(LayerTensor, &str); 13] = [
    (LayerTensor::Q, "attn_q.weight"),
    (LayerTensor::K, "attn_k.weight"),
    (LayerTensor::V, "attn_v.weight"),
    (LayerTensor::O, "attn_output.weight"),
    (LayerTensor::Gate, "ffn_gate.weight"),
    (LayerTensor::Up, "ffn_up.weight"),
    (LayerTensor::Down, "ffn_down.weight"),
    (LayerTensor::InputNorm, "attn_norm.weight"),
    (LayerTensor::PostAttentionNorm, "ffn_norm.weight"),
    (LayerTensor::QNorm, "attn_q_norm.weight"),
    (LayerTensor::KNorm, "attn_k_norm.weight"),
    (LayerTensor::QBias, "attn_q.bias"),
    (LayerTensor::VBias, "attn_v.bias"),
];

#[test]
fn every_weight_type_packs_and_verifies() {
    let mut cases = vec![(Architecture::Qwen3, Weights::LikeQ4KM), (Architecture::Qwen3, Weights::Mixed)];
    cases.extend(WeightType::ALL.map(|weight_type| (Architecture::Qwen3, Weights::Uniform(weight_type))));
    cases.extend([(Architecture::Qwen2, Weights::LikeQ4KM), (Architecture::Qwen2, Weights::Mixed)]);
    for (architecture, weights) in cases {
        let mut spec = spec(architecture, weights);
        spec.layers = 2;
        let file = spec.build();
        let bench = Bench::new(&file);
        let report = bench.pack().unwrap();
        let tied = usize::from(architecture == Architecture::Qwen3);
        assert_eq!(report.tensors, file.tensors.len() + tied, "{weights:?}");
        assert_eq!(report.exact + report.requantized, 2 * 7 + 1);
        let verified = bench.verify();
        assert!(verified.is_good(), "{architecture:?} {weights:?}: {verified:#?}");
        let model = ModelSource::open(&bench.out).unwrap();
        assert_eq!(model.format(), Format::Q4nx);
        let mut roles = vec![(TensorRole::TokenEmbedding, "token_embd.weight".to_owned())];
        roles.push((TensorRole::FinalNorm, "output_norm.weight".to_owned()));
        roles.push((TensorRole::Head, if tied == 1 { "token_embd.weight" } else { "output.weight" }.to_owned()));
        for layer in 0..2 {
            roles.extend(LAYER.map(|(part, name)| (TensorRole::Layer(layer, part), format!("blk.{layer}.{name}"))));
        }
        let mut compared = 0;
        for (role, name) in roles {
            let Some(source) = file.tensor(&name) else {
                assert!(model.tensor(role).is_none() && model.tiled(role).is_none(), "{role:?}");
                continue;
            };
            compared += 1;
            let kept =
                matches!(weight_type(source.type_id), Some(WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K));
            // Half a step of 15 in a range of about four spreads; half a unit of bf16 in scale and zero.
            let limit = if model.tiled(role).is_none() || kept { 0.012 } else { 0.11 };
            let found = distance(&model, role, source);
            assert!(found < limit, "{architecture:?} {weights:?} {name}: {found}");
        }
        assert!(compared >= 2 * 9 + 3);
    }
}

#[test]
fn the_file_follows_the_conventions() {
    let file = mixed().build();
    let bench = Bench::new(&file);
    bench.pack().unwrap();
    assert_eq!(
        names(&bench.out),
        ["config.json", "model.q4nx", "pack-stamp.txt", "tokenizer.json", "tokenizer_config.json"]
    );
    assert_eq!(bench.names(), ["model.gguf", "packed"]);
    let packed = Q4nxFile::open(&bench.out.join("model.q4nx")).unwrap();
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(packed.metadata(), [pair("format", "q4nx"), pair("source", "model.gguf"), pair("converter", "npuhal")]);
    assert_eq!((packed.data_start() - 8) % 64, 0);
    let names: Vec<_> = packed.tensors().iter().map(npuhal_models::q4nx::container::TensorEntry::name).collect();
    assert_eq!(names.len(), 3 * 11 + 3);
    assert_eq!((names[0], names[1]), ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"));
    assert_eq!(names.last(), Some(&"lm_head.weight"), "the tied head comes last");
    for entry in packed.tensors() {
        assert_eq!((entry.range().start - packed.data_start()) % 64, 0, "{}", entry.name());
    }
    let q = packed.tensor("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!((q.dtype(), q.shape(), q.tile_count()), ("I8", [8, 5120].as_slice(), 8));
    assert_eq!(packed.tensor("model.norm.weight").unwrap().shape(), [256]);
    assert_eq!(packed.tensor("model.embed_tokens.weight").unwrap().shape(), [512, 256]);
    assert_eq!(packed.tensor("lm_head.weight").unwrap().tiles(), Ok((TileKind::Q4_1, 16)));
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(bench.out.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        config,
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 512,
            "bos_token_id": 263, "eos_token_id": [263, 265], "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "hidden_act": "silu", "q4nx_source": { "converter": "npuhal", "gguf": "model.gguf" },
        })
    );
}

#[test]
fn a_packed_directory_is_the_same_model() {
    for architecture in [Architecture::Qwen3, Architecture::Qwen2] {
        let bench = Bench::new(&spec(architecture, Weights::LikeQ4KM).build());
        bench.pack().unwrap();
        let (source, packed) = (ModelSource::open(&bench.gguf).unwrap(), ModelSource::open(&bench.out).unwrap());
        let mut wanted = source.config().clone();
        (wanted.tied_head, wanted.name) = (false, "packed".to_owned());
        assert_eq!(packed.config(), &wanted);
        let (source, packed) = (source.vocabulary(), packed.vocabulary());
        assert_eq!((&packed.tokens, &packed.merges, &packed.eos), (&source.tokens, &source.merges, &source.eos));
        assert_eq!((packed.bos, packed.padding, packed.add_bos), (source.bos, source.padding, source.add_bos));
        assert_eq!((&packed.kinds, &packed.chat_template), (&source.kinds, &source.chat_template));
        let (source, packed) =
            (Tokenizer::from_vocabulary(source).unwrap(), Tokenizer::from_vocabulary(packed).unwrap());
        let text = "hello the <|im_start|> 12 é";
        let encode = |tokenizer: &Tokenizer| tokenizer.encode(text, Specials::Parse).unwrap();
        assert_eq!(encode(&packed), encode(&source));
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    let bench = Bench::new(&mixed().build());
    let bytes = [1, 2, 7].map(|threads| {
        let options = PackOptions { threads: NonZeroUsize::new(threads), replace: true, ..PackOptions::default() };
        bench.pack_with(&options).unwrap();
        fs::read(bench.out.join("model.q4nx")).unwrap()
    });
    assert!(bytes[0] == bytes[1] && bytes[1] == bytes[2]);
    let verify =
        |threads| verify(&bench.gguf, &bench.out, NonZeroUsize::new(threads), &Control::new(), &mut |_, _| {}).unwrap();
    assert_eq!(verify(1), verify(5));
}

#[test]
fn the_cpu_declines_tiles_with_a_reason() {
    let bench = Bench::new(&mixed().build());
    bench.pack().unwrap();
    let model = ModelSource::open(&bench.out).unwrap();
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let device = DeviceChoice::Pinned(DeviceAddress::Cpu.into());
    let error = select(&registry, &model, &Request { device, ..Request::default() }).err().unwrap().to_string();
    assert!(error.contains("q4_1 tiles") && error.contains("GGUF"), "{error}");
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let llama = ModelSpec::small(Architecture::Llama, Weights::LikeQ4KM).build();
    assert!(Bench::new(&llama).refused().contains("architecture 'llama': only qwen3 and qwen2 can be packed"));

    let mut ragged = spec(Architecture::Qwen3, Weights::LikeQ4KM);
    ragged.spare_tokens = 0;
    let error = Bench::new(&ragged.build()).refused();
    assert!(error.contains("token_embd.weight") && error.contains("found 266 × 256"), "{error}");

    let mut narrow = spec(Architecture::Qwen3, Weights::Uniform(WeightType::Q8_0));
    narrow.hidden = 224;
    let error = Bench::new(&narrow.build()).refused();
    assert!(error.contains("wanted rows a multiple of 32 and columns a multiple of 256"), "{error}");

    let mut scaled = mixed();
    scaled.rope_factor = Some(2.0);
    let error = Bench::new(&scaled.build()).refused();
    assert!(error.contains("RoPE"), "{error}");

    let mut file = mixed().build();
    file.tensors.push(GgufTensor {
        name: "blk.0.ffn_sub_norm.weight".to_owned(),
        dims: vec![4],
        type_id: 0,
        bytes: vec![0; 16],
    });
    assert!(Bench::new(&file).refused().contains("blk.0.ffn_sub_norm.weight"));

    let mut file = mixed().build();
    file.set("tokenizer.ggml.model", Value::String("none".to_owned()));
    let error = Bench::new(&file).refused();
    assert!(error.contains("no byte-level BPE vocabulary") && error.contains("--tokenizer"), "{error}");

    for (name, what) in
        [("blk.1.ffn_down.weight", "a scale"), ("output_norm.weight", "a norm"), ("token_embd.weight", "an embedding")]
    {
        let mut file = spec(Architecture::Qwen3, Weights::Uniform(WeightType::F16)).build();
        let tensor = file.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        let at = tensor.bytes.len() - 4;
        let nan: &[u8] = if tensor.type_id == 0 { &[0, 0, 0xC0, 0x7F] } else { &[0, 0x7C, 0, 0xFC] };
        tensor.bytes[at..].copy_from_slice(nan);
        let error = Bench::new(&file).refused();
        assert!(error.contains(name) && error.contains("finite"), "{what}: {error}");
    }
}

#[test]
fn declared_scales_are_carried_or_refused() {
    for (key, value) in [
        ("qwen3.logit_scale", Value::F32(16.0)),
        ("other.embedding_scale", Value::F64(12.0)),
        ("qwen3.final_logit_softcapping", Value::F32(30.0)),
        ("scale_depth", Value::Array(vec![Value::F32(1.0), Value::F32(1.4)])),
        ("dim_model_base", Value::U32(256)),
    ] {
        let mut file = mixed().build();
        file.set(key, value);
        let error = Bench::new(&file).refused();
        assert!(error.contains(key) && error.contains("config.json has no"), "{error}");
    }
    // Neutral ones change nothing and are carried; what is no number is passed over; what may be a scale is a warning.
    let mut file = mixed().build();
    file.set("qwen3.logit_scale", Value::F32(1.0));
    file.set("general.residual_scale", Value::String("twice".to_owned()));
    file.set("general.mup_width", Value::U32(3));
    let bench = Bench::new(&file);
    let report = bench.pack().unwrap();
    assert_eq!(report.warnings.iter().map(|scale| scale.key.as_str()).collect::<Vec<_>>(), ["mup_width"]);
    assert!(bench.verify().is_good());
    assert!(ModelSource::open(&bench.out).is_ok());
    // The negative control: without the key the directory is no longer good.
    let config = bench.out.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    for (from, to) in [("\"logit_scale\": 1.0", "\"x\": 1.0"), ("\"logit_scale\": 1.0", "\"logit_scale\": 1.00001")] {
        assert!(text.contains(from));
        fs::write(&config, text.replace(from, to)).unwrap();
        let report = bench.verify();
        assert_eq!((report.scales.len(), report.is_good()), (1, false));
        assert_eq!(report.good(), report.tensors.len());
    }
    fs::remove_file(&config).unwrap();
    assert_eq!(bench.verify().scales.len(), 1, "a missing config.json counts as an empty one");
}

#[test]
fn nothing_is_written_over() {
    let bench = Bench::new(&mixed().build());
    fs::create_dir(&bench.out).unwrap();
    bench.pack().expect("an empty directory may be filled");
    let before = fs::read(bench.out.join("model.q4nx")).unwrap();
    let error = bench.pack().unwrap_err().to_string();
    assert!(error.contains("is there already") && error.contains("--force"), "{error}");
    let replace = PackOptions { replace: true, ..PackOptions::default() };
    bench.pack_with(&replace).unwrap();
    assert_eq!(fs::read(bench.out.join("model.q4nx")).unwrap(), before);
    assert_eq!(bench.names(), ["model.gguf", "packed"]);
    fs::write(bench.out.join("notes.txt"), "mine").unwrap();
    assert!(bench.pack_with(&replace).unwrap_err().to_string().contains("notes.txt"));
    fs::remove_file(bench.out.join("notes.txt")).unwrap();
    // Kernels stay.
    fs::create_dir(bench.out.join("npu")).unwrap();
    fs::write(bench.out.join("npu/layer.pdi"), "image").unwrap();
    bench.pack_with(&replace).unwrap();
    assert_eq!(fs::read(bench.out.join("npu/layer.pdi")).unwrap(), b"image");
    fs::remove_file(bench.out.join(stamp::FILE)).unwrap();
    assert!(bench.pack_with(&replace).unwrap_err().to_string().contains("stamp"));
    fs::remove_dir_all(&bench.out).unwrap();
    fs::write(&bench.out, "mine").unwrap();
    assert!(bench.pack_with(&replace).unwrap_err().to_string().contains("no directory"));
    assert_eq!(fs::read(&bench.out).unwrap(), b"mine");
}

#[test]
fn a_tokenizer_of_ones_own_is_copied() {
    let bench = Bench::new(&mixed().build());
    let tokenizer = bench.folder.path().join("tokenizer");
    fs::create_dir(&tokenizer).unwrap();
    let options = PackOptions { tokenizer: Some(tokenizer.clone()), ..PackOptions::default() };
    assert!(bench.pack_with(&options).unwrap_err().to_string().contains("there is no tokenizer.json"));
    fs::write(tokenizer.join("tokenizer.json"), "{\"own\":1}").unwrap();
    bench.pack_with(&options).unwrap();
    assert_eq!(fs::read(bench.out.join("tokenizer.json")).unwrap(), b"{\"own\":1}");
    assert!(!bench.out.join("tokenizer_config.json").exists());
}

#[test]
fn a_stopped_pack_leaves_nothing() {
    let bench = Bench::new(&mixed().build());
    let control = Control::new();
    let mut calls = 0;
    let result = pack(&bench.gguf, &bench.out, &PackOptions::default(), &control, &mut |progress| {
        calls += 1;
        assert!(progress.done_bytes <= progress.total_bytes);
        control.cancel();
    });
    assert!(matches!(result, Err(PackError::Stopped(_))) && calls > 0, "{result:?}");
    assert_eq!(bench.names(), ["model.gguf"]);
    let passed = Control::until(Instant::now());
    assert!(pack(&bench.gguf, &bench.out, &PackOptions::default(), &passed, &mut |_| {}).is_err());
    assert!(verify(&bench.gguf, &bench.out, None, &passed, &mut |_, _| {}).is_err());
    assert_eq!(bench.names(), ["model.gguf"]);
    // A file that was cut short after its header was read is no crash: the header does not open.
    let len = fs::metadata(&bench.gguf).unwrap().len();
    File::options().write(true).open(&bench.gguf).unwrap().set_len(len - 4096).unwrap();
    assert!(bench.refused().contains("damaged or cut short"));
}

/// Flips a bit of the byte at `offset` of a packed tensor.
fn flip(bench: &Bench, tensor: &str, offset: usize, bit: u8) {
    let path = bench.out.join("model.q4nx");
    let start = Q4nxFile::open(&path).unwrap().tensor(tensor).unwrap().range().start;
    let mut bytes = fs::read(&path).unwrap();
    bytes[start + offset] ^= 1 << bit;
    fs::write(&path, bytes).unwrap();
}

#[test]
fn a_flipped_bit_is_found() {
    // Q4_0, Q6_K and F32: a code's top bit, a scale's exponent, a norm's exponent.
    for weights in [WeightType::Q4_0, WeightType::Q6K, WeightType::F32] {
        let bench = Bench::new(&spec(Architecture::Qwen3, Weights::Uniform(weights)).build());
        bench.pack().unwrap();
        for (tensor, offset, bit) in [
            ("model.layers.1.mlp.down_proj.weight", 5120 + 1024 + 77, 7),
            ("model.layers.0.self_attn.q_proj.weight", 3, 0),
            ("model.layers.1.self_attn.k_norm.weight", 255, 0),
            ("lm_head.weight", 15 * 5120 + 5119, 3),
            ("model.embed_tokens.weight", 1001, 1),
        ] {
            flip(&bench, tensor, offset, bit);
            let report = bench.verify();
            let bad: Vec<_> = report.tensors.iter().filter(|tensor| !tensor.is_good()).collect();
            assert_eq!(bad.len(), 1, "{weights} {tensor}: {bad:?}");
            assert_eq!((bad[0].name.as_str(), report.good()), (tensor, report.tensors.len() - 1));
            assert!(!report.is_good() && bad[0].to_string().starts_with("BAD"));
            flip(&bench, tensor, offset, bit);
        }
        assert!(bench.verify().is_good());
    }
}

#[test]
fn other_differences_are_found() {
    let bench = Bench::new(&mixed().build());
    bench.pack().unwrap();
    let path = bench.out.join("model.q4nx");
    let good = fs::read(&path).unwrap();
    let rename = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = good.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&path, bytes).unwrap();
        bench.verify()
    };
    let report = rename("layers.2.mlp.up_proj", "layers.2.mlp.xp_proj");
    assert_eq!(report.tensors.iter().filter(|tensor| !tensor.is_good()).count(), 2, "one missing, one too many");
    let report = rename("\"I8\",\"shape\":[8,5120]", "\"I8\",\"shape\":[7,5120]");
    assert_eq!(report.good() + 1, report.tensors.len());
    let report = rename("BF16", "FP16");
    assert_eq!(report.good() + 1, report.tensors.len());
    fs::write(&path, &good).unwrap();
    let config = bench.out.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 1000000.0")).unwrap();
    let report = bench.verify();
    assert_eq!((report.config.len(), report.is_good()), (1, false));
    // Another file's directory: nothing fits.
    fs::write(&config, text).unwrap();
    let mut other = mixed();
    other.seed = 2;
    other.build().write(&bench.gguf).unwrap();
    let report = bench.verify();
    assert!(report.good() == 0, "{}", report.good());
}

#[test]
fn cached_directories_are_checked_before_they_are_used() {
    let mut file = mixed().build();
    file.set("qwen3.logit_scale", Value::F32(1.0));
    let bench = Bench::new(&file);
    let cache = PackCache::new(bench.folder.path().join("cache"));
    let control = Control::new();
    let obtain = || cache.obtain(&bench.gguf, &PackOptions::default(), &control, &mut |_| {}).unwrap();
    let first = obtain();
    assert!(first.packed.is_some() && first.discarded.is_none());
    assert!(first.directory.starts_with(cache.folder()));
    assert_eq!(obtain().packed, None);
    assert_eq!(names(cache.folder()).len(), 1, "{:?}", names(cache.folder()));
    let directory = first.directory;
    let state = || cache.state(&bench.gguf, &directory, &control).unwrap();
    let file_in = |name: &str| directory.join(name);

    // Each of these is discarded and packed again.
    let stamp_text = fs::read_to_string(file_in(stamp::FILE)).unwrap();
    let config_text = fs::read_to_string(file_in("config.json")).unwrap();
    type Damage<'a> = &'a dyn Fn();
    let damages: [(Damage<'_>, &str); 7] = [
        (&|| fs::remove_file(file_in(stamp::FILE)).unwrap(), "provenance check: it has no pack-stamp.txt"),
        (
            &|| fs::write(file_in(stamp::FILE), "converter=someone\n").unwrap(),
            "provenance check: pack-stamp.txt: wanted a line",
        ),
        (
            &|| fs::write(file_in(stamp::FILE), stamp_text.replace("converter=npuhal", "converter=other")).unwrap(),
            "provenance check: wanted a directory made by npuhal",
        ),
        (
            &|| fs::write(file_in(stamp::FILE), stamp_text.replace("layout=1", "layout=0")).unwrap(),
            "provenance check: wanted a directory made by npuhal",
        ),
        (
            &|| {
                let file = File::options().write(true).open(file_in("model.q4nx")).unwrap();
                file.set_len(1000).unwrap();
            },
            "found 1000",
        ),
        (
            &|| fs::write(file_in("config.json"), config_text.replace("\"logit_scale\": 1.0", "\"y\": 1")).unwrap(),
            "declared-scale check",
        ),
        (&|| fs::remove_file(file_in("tokenizer.json")).unwrap(), "incomplete"),
    ];
    for (damage, wanted) in damages {
        damage();
        let CacheState::Stale { reason } = state() else { panic!("{wanted}: {:?}", state()) };
        assert!(reason.contains(wanted), "{reason}");
        let again = obtain();
        assert!(again.packed.is_some() && again.discarded.is_some_and(|said| said.contains(wanted)));
        assert_eq!(state(), CacheState::Sound);
    }

    // Touched, same contents: recognised by its checksum. Changed contents of the same length: not.
    let touch = |seconds: u64| {
        let file = File::options().write(true).open(&bench.gguf).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    };
    touch(1_000_000_000);
    assert_eq!(state(), CacheState::Sound);
    let mut bytes = fs::read(&bench.gguf).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&bench.gguf, &bytes).unwrap();
    touch(1_000_000_001);
    assert!(matches!(state(), CacheState::Stale { reason } if reason.contains("SHA-256")));
    bytes.extend([0; 32]);
    fs::write(&bench.gguf, &bytes).unwrap();
    assert!(matches!(state(), CacheState::Stale { reason } if reason.contains("bytes, which has")));
    obtain();

    // It cannot be told: one warning in a frame for the process, then it is used. The scales are still checked.
    fs::remove_file(file_in(stamp::FILE)).unwrap();
    fs::create_dir(file_in(stamp::FILE)).unwrap();
    assert!(matches!(Stamp::look(&directory), StampState::Unreadable { .. }));
    assert!(matches!(state(), CacheState::Unverified { .. }));
    let warned = obtain();
    let warning = warned.warning.unwrap();
    assert!(warned.packed.is_none() && warning.contains("UNVERIFIED") && warning.starts_with("===="), "{warning}");
    assert_eq!(obtain().warning, None);
    fs::write(file_in("config.json"), "{}").unwrap();
    assert!(matches!(state(), CacheState::Stale { .. }));
}

/// A model of Qwen3-0.6B's shape, of mixed types: minutes of one core and 3 GB of disk.
#[test]
fn a_model_of_real_size_packs_and_verifies() {
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        npuhal_tests::models::left_to_soak("a_model_of_real_size_packs_and_verifies");
        return;
    }
    for weights in [Weights::Mixed, Weights::LikeQ4KM] {
        let mut spec = ModelSpec::small(Architecture::Qwen3, weights);
        (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) = (1024, 16, 8, 128, 3072);
        (spec.layers, spec.spare_tokens, spec.context_length, spec.rope_theta) = (28, 151_936 - 266, 40_960, 1e6);
        let bench = Bench::new(&spec.build());
        let started = Instant::now();
        let report = bench.pack().unwrap();
        let seconds = started.elapsed().as_secs_f64();
        say(format_args!(
            "{weights:?}: {} tensors, {} exact, {} requantized; {:.1} MB from {:.1} MB in {seconds:.2} s",
            report.tensors,
            report.exact,
            report.requantized,
            report.model_bytes as f64 / 1e6,
            report.source_bytes as f64 / 1e6,
        ));
        assert_eq!((report.tensors, report.exact + report.requantized), (311, 197));
        // 311 tensors of Qwen3-0.6B have 683 786 240 bytes, which is a multiple of 64 for each of them.
        let packed = Q4nxFile::open(&bench.out.join("model.q4nx")).unwrap();
        assert_eq!(report.model_bytes - packed.data_start() as u64, 683_786_240);
        let started = Instant::now();
        let verified = bench.verify();
        say(format_args!(
            "verified {}/{} in {:.2} s",
            verified.good(),
            verified.tensors.len(),
            started.elapsed().as_secs_f64()
        ));
        let mut worst = 0.0_f64;
        for tensor in &verified.tensors {
            if let Outcome::Exact { worst: share } = tensor.outcome {
                worst = worst.max(share);
            }
            if tensor.is_sample() {
                say(format_args!("{tensor}"));
            }
        }
        say(format_args!("largest error of exact types: {worst:.6} of the bound"));
        assert!(verified.is_good());
        flip(&bench, "model.layers.27.mlp.gate_proj.weight", 700 * 5120 + 3000, 7);
        let flipped = bench.verify();
        say(format_args!("with one bit flipped: {}/{}", flipped.good(), flipped.tensors.len()));
        assert_eq!((flipped.good(), flipped.is_good()), (310, false));
    }
}

/// A figure for people, past the test harness.
fn say(line: std::fmt::Arguments<'_>) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(stderr().lock(), "{line}");
}
