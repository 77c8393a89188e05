//! The same weights in every kind of file give the same logits; what is missing, foreign or hostile is refused by name.

use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Session, TokenId, Want};
use npuhal_models::q4nx::names::role_of_gguf;
use npuhal_models::q4nx::{PackOptions, TiledTensor, pack};
use npuhal_models::source::Format;
use npuhal_models::{ControlTokens, ModelError, ModelSource, Specials, Tensor, Tokenizer, WeightType};
use npuhal_registry::{DeviceAddress, DeviceChoice, Numerics, Options, Registry, Request, select};
use npuhal_tests::kit::gguf::Value as Meta;
use npuhal_tests::kit::hub::HubDirectory;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Scaling, Weights};
use npuhal_tests::kit::reference::{LogitsOf, Reference};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

// The route is registered by a crate that must be named to be linked.
use npuhal_cpu as _;

const LENGTH: u32 = 9;

/// Logits of every position of a short text.
fn logits(model: &ModelSource, numerics: Numerics) -> Vec<Vec<f32>> {
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let options = Options { numerics, threads: NonZeroUsize::new(1), ..Options::default() };
    let request = Request { device: DeviceChoice::Pinned(DeviceAddress::Cpu.into()), options, ..Request::default() };
    let choice = select(&registry, model, &request).unwrap();
    let Session::Stepper(mut stepper) = choice.open(&registry, model, &request.options).unwrap() else {
        panic!("the CPU route opens steppers")
    };
    let rows: Vec<Row> = tokens().into_iter().zip(0..).map(|(token, position)| row(token, position)).collect();
    let mut logits = HiddenRows::new();
    stepper.step(&rows, Want::All, &mut logits, &Control::new()).unwrap();
    (0..logits.rows()).map(|row| logits.row(row).to_vec()).collect()
}

fn row(token: TokenId, position: u32) -> Row {
    Row { sequence: SequenceId(0), token, position }
}

fn tokens() -> Vec<TokenId> {
    (0..LENGTH).map(|index| (index * 37 + 11) % 256).collect()
}

fn bits(logits: &[Vec<f32>]) -> Vec<Vec<u32>> {
    logits.iter().map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
}

fn farthest(found: &[Vec<f32>], wanted: &[Vec<f32>]) -> f32 {
    let size = wanted.iter().flatten().fold(0f32, |size, logit| size.max(logit.abs()));
    let distances = found.iter().flatten().zip(wanted.iter().flatten()).map(|(a, b)| (a - b).abs());
    distances.fold(0f32, f32::max) / size
}

fn gguf(spec: &ModelSpec, folder: &Path) -> PathBuf {
    let path = folder.join("model.gguf");
    spec.build().write(&path).unwrap();
    path
}

fn hub(directory: &HubDirectory, shards: usize) -> (tempfile::TempDir, Result<ModelSource, ModelError>) {
    let folder = tempfile::tempdir().unwrap();
    directory.write(folder.path(), shards).unwrap();
    let model = ModelSource::open(folder.path());
    (folder, model)
}

fn plain(architecture: Architecture, weight_type: WeightType) -> ModelSpec {
    ModelSpec::small(architecture, Weights::Uniform(weight_type))
}

#[test]
fn hub_directories_and_gguf_files_of_the_same_weights_give_the_same_bits() {
    for architecture in Architecture::ALL {
        for (weight_type, shards) in [(WeightType::F32, 1), (WeightType::F16, 3), (WeightType::Bf16, 2)] {
            let spec = plain(architecture, weight_type);
            let folder = tempfile::tempdir().unwrap();
            let from_gguf = ModelSource::open(&gguf(&spec, folder.path())).unwrap();
            let (_directory, from_hub) = hub(&HubDirectory::new(&spec), shards);
            let from_hub = from_hub.unwrap();
            assert_eq!(from_hub.format(), Format::HubDirectory);
            let wanted = logits(&from_gguf, Numerics::Exact);
            let found = logits(&from_hub, Numerics::Exact);
            assert_eq!(bits(&found), bits(&wanted), "{architecture:?} {weight_type}");
            // The other order of rows adds in another order.
            let distance = farthest(&logits(&from_hub, Numerics::Fast), &wanted);
            assert!(distance < 2e-3, "{architecture:?} {weight_type}: {distance:e}");
        }
    }
}

/// A packed directory rounds what it packs; its own weights, written out as F32, are the same model in the other formats.
#[test]
fn packed_directories_give_the_same_bits_as_their_weights_elsewhere() {
    for architecture in [Architecture::Qwen3, Architecture::Qwen2] {
        let mut spec = ModelSpec::small(architecture, Weights::LikeQ4KM);
        (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) = (256, 2, 1, 128, 512);
        spec.spare_tokens = 512 - 266;
        let folder = tempfile::tempdir().unwrap();
        let packed = folder.path().join("packed");
        let source = gguf(&spec, folder.path());
        pack(&source, &packed, &PackOptions::default(), &Control::new(), &mut |_| {}).unwrap();
        let packed = ModelSource::open(&packed).unwrap();
        assert_eq!(packed.format(), Format::Q4nx);

        // The directory's own head is one of its tiles, whether or not the model's is tied.
        spec.tied = false;
        spec.weights = Weights::Uniform(WeightType::F32);
        let mut file = spec.build();
        for tensor in &mut file.tensors {
            let role = role_of_gguf(&tensor.name).unwrap();
            let values = match packed.tiled(role) {
                Some(tiled) => tiles(tiled),
                None => rows(packed.require(role).unwrap()),
            };
            tensor.bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        }
        let path = folder.path().join("same.gguf");
        file.write(&path).unwrap();
        let from_gguf = logits(&ModelSource::open(&path).unwrap(), Numerics::Exact);
        let (_directory, from_hub) = hub(&HubDirectory::of(&spec, &file), 2);
        let found = bits(&logits(&packed, Numerics::Exact));
        assert_eq!(found, bits(&from_gguf), "{architecture:?}: GGUF");
        assert_eq!(found, bits(&logits(&from_hub.unwrap(), Numerics::Exact)), "{architecture:?}: safetensors");
    }
}

fn tiles(tiled: &TiledTensor) -> Vec<f32> {
    let mut values = vec![0.0; tiled.rows() * tiled.cols()];
    for (strip, values) in values.chunks_exact_mut(32 * tiled.cols()).enumerate() {
        tiled.decode_strip(strip, None, values).unwrap();
    }
    values
}

fn rows(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.rows() * tensor.cols()];
    for (row, values) in values.chunks_exact_mut(tensor.cols()).enumerate() {
        tensor.dequantize_row(row, values).unwrap();
    }
    values
}

#[test]
fn scaled_rotations_agree_between_formats_and_with_the_reference() {
    let small = |architecture, scaling| ModelSpec { scaling, ..plain(architecture, WeightType::F32) };
    let yarn = Scaling::Yarn { factor: 4.0, original: 16 };
    let long = |original| Scaling::LongRope { original, attention_factor: 1.19 };
    let specs = [
        ModelSpec { rope_factor: Some(4.0), ..plain(Architecture::Llama, WeightType::F32) },
        small(Architecture::Llama, Scaling::Llama3 { factor: 8.0, original: 24 }),
        small(Architecture::Llama, yarn.clone()),
        small(Architecture::Qwen3, yarn),
        small(Architecture::MiniCpm, long(64)),
        small(Architecture::MiniCpm, long(256)),
        ModelSpec { layers: 7, window_period: None, window: 3, ..plain(Architecture::Gemma3, WeightType::F32) },
        ModelSpec { rope_factor: Some(8.0), rope_theta: 1e6, ..plain(Architecture::Gemma3, WeightType::F32) },
    ];
    assert_agreement(&specs);
}

#[test]
fn caps_query_scales_and_windows_of_some_layers_agree_between_formats_and_with_the_reference() {
    let gemma = || plain(Architecture::Gemma3, WeightType::F32);
    let specs = [
        ModelSpec { softcap: Some(2.5), ..gemma() },
        ModelSpec { query_scalar: Some(36.0), ..gemma() },
        ModelSpec { softcap: Some(1.5), query_scalar: Some(3.0), window: 2, ..gemma() },
        ModelSpec { windowed_from: Some(1), window: 3, ..plain(Architecture::Qwen2, WeightType::F32) },
        ModelSpec { windowed_from: Some(0), window: 4, ..plain(Architecture::Qwen3, WeightType::F32) },
        ModelSpec { layers: 3, windowed_from: Some(2), window: 1, ..plain(Architecture::Qwen3, WeightType::F32) },
    ];
    assert_agreement(&specs);
    // They make a difference, or the comparison says nothing.
    let unlike = |spec: ModelSpec, other: ModelSpec| {
        let of = |spec: &ModelSpec| {
            let folder = tempfile::tempdir().unwrap();
            logits(&ModelSource::open(&gguf(spec, folder.path())).unwrap(), Numerics::Exact)
        };
        let distance = farthest(&of(&spec), &of(&other));
        assert!(distance > 1e-3, "{distance:e}: {spec:?}");
    };
    for spec in specs {
        let neutral = ModelSpec { softcap: None, query_scalar: None, windowed_from: None, ..spec.clone() };
        unlike(spec, neutral);
    }
}

fn assert_agreement(specs: &[ModelSpec]) {
    for spec in specs {
        let folder = tempfile::tempdir().unwrap();
        let from_gguf = ModelSource::open(&gguf(spec, folder.path())).unwrap();
        let fast = logits(&from_gguf, Numerics::Fast);
        let from_gguf = logits(&from_gguf, Numerics::Exact);
        let from_hub = logits(&hub(&HubDirectory::new(spec), 1).1.unwrap(), Numerics::Exact);
        let file = spec.build();
        let reference = Reference::new(&file).unwrap().forward(&tokens(), LogitsOf::All).unwrap().logits;
        let reference: Vec<Vec<f32>> =
            reference.iter().map(|row| row.iter().map(|logit| *logit as f32).collect()).collect();
        // GGUF files state Llama 3's factors in f32.
        assert!(farthest(&from_hub, &from_gguf) < 1e-5, "{:?}", spec.scaling);
        assert!(farthest(&from_gguf, &reference) < 1e-5, "{spec:?}: {}", farthest(&from_gguf, &reference));
        assert!(farthest(&fast, &reference) < 2e-3, "{spec:?}: {}", farthest(&fast, &reference));
    }
}

#[test]
fn any_part_of_a_split_gguf_opens_the_whole() {
    let spec = plain(Architecture::Granite, WeightType::F16);
    let folder = tempfile::tempdir().unwrap();
    let wanted = bits(&logits(&ModelSource::open(&gguf(&spec, folder.path())).unwrap(), Numerics::Exact));
    let part = |number: usize| folder.path().join(format!("m-{number:05}-of-00003.gguf"));
    let parts = spec.build().split(3);
    for (index, file) in parts.iter().enumerate() {
        file.write(&part(index + 1)).unwrap();
    }
    for number in 1..=3 {
        let model = ModelSource::open(&part(number)).unwrap();
        assert_eq!(bits(&logits(&model, Numerics::Exact)), wanted, "opened by part {number}");
    }
    let refused = |wanted: &[&str]| {
        let error = ModelSource::open(&part(1)).unwrap_err().to_string();
        assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
    };
    let with = |edit: &dyn Fn(&mut npuhal_tests::kit::gguf::GgufFile)| {
        let mut other = parts[2].clone();
        edit(&mut other);
        other.write(&part(3)).unwrap();
    };
    with(&|file| file.set("split.no", Meta::U16(1)));
    refused(&["m-00003-of-00003.gguf", "split.no", "wanted 2, found 1"]);
    with(&|file| file.set("split.tensors.count", Meta::I32(5)));
    refused(&["m-00003-of-00003.gguf", "split.tensors.count", "part of another model"]);
    with(&|file| file.tensors.push(parts[0].tensors[0].clone()));
    refused(&["m-00003-of-00003.gguf", "token_embd.weight", "found it in two"]);
    with(&|file| file.tensors.truncate(1));
    refused(&["split.tensors.count", "in all 3 files"]);
    std::fs::remove_file(part(3)).unwrap();
    refused(&["m-00003-of-00003.gguf", "file 3 of 3 of the model is missing"]);
    let renamed = folder.path().join("other.gguf");
    std::fs::copy(part(1), &renamed).unwrap();
    let error = ModelSource::open(&renamed).unwrap_err().to_string();
    assert!(error.contains("-00001-of-00003") && error.contains("other.gguf"), "{error}");
}

#[test]
fn a_hub_directory_brings_its_tokenizer_ends_and_sampling() {
    let (_folder, model) = hub(&HubDirectory::new(&plain(Architecture::Llama, WeightType::F32)), 1);
    let model = model.unwrap();
    let tokenizer = Tokenizer::from_vocabulary(model.vocabulary()).unwrap();
    let ids = tokenizer.encode("hello the", Specials::Plain).unwrap();
    assert_eq!(tokenizer.decode(&ids, ControlTokens::Show), "hello the");
    assert!(ids.len() < 5, "merges are used: {ids:?}");
    assert!(!model.vocabulary().eos.is_empty());
    let sampling = &model.suggested_sampling().unwrap().params;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.6, 0.95, 50));
    let suggested = |generation: Value| {
        let directory = HubDirectory { generation, ..HubDirectory::new(&plain(Architecture::Llama, WeightType::F32)) };
        hub(&directory, 1).1.unwrap().suggested_sampling().cloned()
    };
    assert_eq!(suggested(json!({ "temperature": 0.6, "num_beams": 1, "typical_p": 1.0 })), None, "it does not draw");
    let beams = suggested(json!({ "num_beams": 4, "bad_words_ids": [[1]], "suppress_tokens": [] })).unwrap();
    assert_eq!(beams.left_out, ["num_beams = 4", "bad_words_ids = [[1]]"]);
    assert_eq!(beams.to_string(), "greedy");
}

#[test]
fn what_a_directory_declares_and_cannot_be_computed_is_named() {
    let good = HubDirectory::new(&plain(Architecture::Llama, WeightType::F32));
    let refused = |edit: &dyn Fn(&mut HubDirectory), wanted: &[&str]| {
        let mut directory = good.clone();
        edit(&mut directory);
        let error = hub(&directory, 1).1.unwrap_err().to_string();
        assert!(wanted.iter().all(|wanted| error.contains(wanted)), "wanted {wanted:?}, found {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let config = |key: &str, value: Value, wanted: &[&str]| {
        refused(&|directory| directory.config[key] = value.clone(), wanted);
    };
    config("model_type", json!("mamba"), &["config.json", "model_type \"mamba\"", "llama, mistral, qwen2"]);
    config("model_type", json!(7), &["model_type: wanted a text, found 7"]);
    config("hidden_act", json!("relu2"), &["hidden_act = \"relu2\""]);
    config("logits_scaling", json!(8.0), &["logits_scaling = 8 in a llama model"]);
    config("num_local_experts", json!(8), &["num_local_experts = 8"]);
    config("quantization_config", json!({"quant_method": "gptq"}), &["quantization_config", "gptq"]);
    config("attn_logit_softcapping", json!(50.0), &["attn_logit_softcapping = 50"]);
    config("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0}), &["rope_type \"dynamic\""]);
    config("rope_scaling", json!({"rope_type": "linear"}), &["factor is missing"]);
    config(
        "rope_scaling",
        json!({"rope_type": "longrope", "short_factor": [1.0]}),
        &["short_factor", "wanted 5 times"],
    );
    config("rope_scaling", json!("yarn"), &["rope_scaling: wanted an object"]);
    config("hidden_size", json!(0), &["hidden_size: wanted a number from 1"]);
    config("hidden_size", json!(40), &["wanted 266 × 40 from config.json, found 266 × 36"]);
    config("num_hidden_layers", json!(1), &["wanted a layer below 1 (num_hidden_layers), found 1"]);
    config("num_hidden_layers", json!(3), &["model.layers.2.input_layernorm.weight", "is missing"]);
    config("num_key_value_heads", json!(3), &["wanted a divisor of the 4 query heads, found 3"]);
    config("vocab_size", json!(300), &["vocab_size: wanted the 266 rows of the embedding, found 300"]);
    config("tie_word_embeddings", json!(false), &["lm_head.weight", "is missing"]);
    config("layer_types", json!(["sliding_attention", "chunked_attention"]), &["layer_types: wanted 2 times"]);
    let bias = |directory: &mut HubDirectory| {
        let mut bias = directory.tensors[0].clone();
        bias.name = "model.layers.0.self_attn.o_proj.bias".to_owned();
        directory.tensors.push(bias);
    };
    refused(&bias, &["model.layers.0.self_attn.o_proj.bias", "not supported"]);
    refused(&|directory| directory.tensors[3].dtype = "F64", &["tensor \"model.", "bytes of"]);
    refused(&|directory| directory.generation["temperature"] = json!(-1), &["generation_config.json", "temperature"]);
    refused(&|directory| directory.generation = json!([1]), &["generation_config.json", "wanted a JSON object"]);
    refused(&|directory| directory.tokenizer = json!({"model": 3}), &["tokenizer"]);
}

#[test]
fn double_precision_is_refused_by_name() {
    let mut directory = HubDirectory::new(&plain(Architecture::Llama, WeightType::F32));
    let norm = directory.tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap();
    norm.bytes = vec![0; 2 * norm.bytes.len()];
    norm.dtype = "F64";
    let error = hub(&directory, 1).1.unwrap_err().to_string();
    assert!(error.contains("element type F64") && error.contains("model.norm.weight"), "{error}");
}

#[test]
fn an_index_that_contradicts_its_shards_is_refused() {
    let directory = HubDirectory::new(&plain(Architecture::Qwen2, WeightType::F32));
    let refused = |text: &str, wanted: &str| {
        let folder = tempfile::tempdir().unwrap();
        directory.write(folder.path(), 2).unwrap();
        std::fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
        let error = ModelSource::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(wanted), "wanted {wanted}, found {error}");
    };
    let shard = "model-00001-of-00002.safetensors";
    refused("{", "wanted an object of file names");
    refused("[]", "wanted an object of file names");
    refused(r#"{"weight_map": {"x": "../../etc/passwd"}}"#, "plain file names");
    refused(r#"{"weight_map": {"x": "absent.safetensors"}}"#, "absent.safetensors");
    refused(&format!(r#"{{"weight_map": {{"x": "{shard}"}}}}"#), "found no such tensor there");
    refused(r#"{"weight_map": {}}"#, "model.embed_tokens.weight");
}

/// A JSON value in the place of another.
fn values() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        Just(json!(0)),
        Just(json!(-1)),
        Just(json!(u64::MAX)),
        Just(json!(1e308)),
        any::<u32>().prop_map(|number| json!(number)),
        any::<f32>().prop_filter_map("finite", |number| number.is_finite().then(|| json!(number))),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        number,
        "[a-z_]{0,12}".prop_map(Value::from),
        Just(json!("linear")),
        Just(json!("yarn")),
        Just(json!("longrope")),
        Just(json!("full_attention")),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,16}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn keys() -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "layer_types",
        "sliding_window",
        "sliding_window_pattern",
        "no_rope_layers",
        "no_rope_layer_interval",
        "tie_word_embeddings",
        "query_pre_attn_scalar",
        "text_config",
        "embedding_multiplier",
        "scale_depth",
        "dim_model_base",
        "hidden_act",
        "max_window_layers",
        "use_sliding_window",
    ]);
    prop_oneof![4 => known.prop_map(str::to_owned), 1 => "[a-z_]{1,20}"]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a configuration says, the answer is a model that can be computed or an error of one line.
    #[test]
    fn hostile_configurations_are_errors_or_models(
        architecture in prop::sample::select(Architecture::ALL.to_vec()),
        edits in prop::collection::vec((keys(), values()), 1..4),
    ) {
        let mut directory = HubDirectory::new(&plain(architecture, WeightType::F32));
        for (key, value) in edits {
            directory.config[key] = value;
        }
        match hub(&directory, 1).1 {
            Ok(model) => {
                // What the CPU refuses is refused by name; the rest is opened.
                if npuhal_cpu::config::check_config(model.config()).is_ok() && model.config().context_length < 5000 {
                    logits_or_error(&model);
                }
            }
            Err(error) => prop_assert_eq!(error.to_string().lines().count(), 1),
        }
    }

    /// Damaged bytes anywhere in the small files and in the header of the weights.
    #[test]
    fn damaged_files_are_errors_or_models(
        file in prop::sample::select(vec!["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let folder = tempfile::tempdir().unwrap();
        HubDirectory::new(&plain(Architecture::Gemma3, WeightType::F32)).write(folder.path(), 1).unwrap();
        let path = folder.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        // The weights themselves may be anything.
        let reach = bytes.len().min(6000);
        for (index, byte) in edits {
            bytes[index.index(reach)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(&path, bytes).unwrap();
        if let Err(error) = ModelSource::open(folder.path()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

/// Two positions: a result or an error, no panic.
fn logits_or_error(model: &ModelSource) {
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let options = Options {
        numerics: Numerics::Exact,
        threads: NonZeroUsize::new(1),
        context_positions: Some(2),
        ..Options::default()
    };
    let request = Request { options, ..Request::default() };
    let Ok(choice) = select(&registry, model, &request) else { return };
    let Ok(Session::Stepper(mut stepper)) = choice.open(&registry, model, &request.options) else { return };
    let _ = stepper.step(&[row(1, 0), row(2, 1)], Want::All, &mut HiddenRows::new(), &Control::new());
}
