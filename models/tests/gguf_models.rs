//! GGUF metadata and tensors as models: architectures, declared features, shapes, vocabulary.

mod common;

use common::{GgufWriter, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, Meta, TOKENS, WIDE, assert_refused, tiny_model};
use npuhal_models::config::{RopePairing, RopeScaling};
use npuhal_models::source::LayerTensor;
use npuhal_models::summary::ParameterGroup;
use npuhal_models::vocabulary::TokenKind;
use npuhal_models::{ModelError, TensorRole, WeightType};

#[test]
fn each_architecture_opens() {
    for (arch, pairing, bias, norm, tied) in [
        ("llama", RopePairing::Interleaved, false, false, true),
        ("qwen2", RopePairing::Halves, true, false, false),
        ("qwen3", RopePairing::Halves, false, true, true),
    ] {
        let model = tiny_model(arch).open().unwrap();
        let config = model.config();
        assert_eq!(config.model_type, arch);
        assert_eq!(config.name, "tiny");
        let shape = [config.hidden_size, config.layers, config.heads, config.kv_heads, config.head_dim];
        assert_eq!(shape, [HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM].map(|size| size as usize), "{arch}");
        assert_eq!((config.intermediate_size, config.context_length), (WIDE as usize, 128));
        assert_eq!(config.vocab_size, TOKENS.len());
        assert_eq!((config.rope.theta, config.rope.dims), (10_000.0, HEAD_DIM as usize));
        assert_eq!((config.rope.pairing, &config.rope.scaling), (pairing, &RopeScaling::None));
        assert_eq!((config.qkv_bias, config.qk_norm, config.tied_head), (bias, norm, tied), "{arch}");
        assert_eq!(model.tensor(TensorRole::Layer(1, LayerTensor::QBias)).is_some(), bias);
        assert_eq!(model.tensor(TensorRole::Layer(1, LayerTensor::KNorm)).is_some(), norm);
        assert_eq!(model.head().unwrap().name(), if tied { "token_embd.weight" } else { "output.weight" });
        let down = model.require(TensorRole::Layer(0, LayerTensor::Down)).unwrap();
        assert_eq!((down.rows(), down.cols(), down.weight_type()), (HIDDEN as usize, WIDE as usize, WeightType::Q8_0));
    }
}

#[test]
fn rows_dequantize_through_the_tensor() {
    let model = tiny_model("llama").open().unwrap();
    let embedding = model.require(TensorRole::TokenEmbedding).unwrap();
    let mut row = vec![0.0; 32];
    embedding.dequantize_row(3, &mut row).unwrap();
    let expected: Vec<f32> = (96..128).map(|code| code as f32).collect();
    assert_eq!(row, expected);
    assert!(embedding.dequantize_row(8, &mut row).unwrap_err().to_string().contains("wanted row 8"));
    assert!(embedding.dequantize_row(0, &mut row[..31]).is_err());
}

#[test]
fn head_dimension_may_differ_from_the_quotient() {
    let (hidden, q, kv) = (HIDDEN, HEADS * 16, KV_HEADS * 16);
    let mut writer = tiny_model("qwen3")
        .set("qwen3.attention.key_length", Meta::U32(16))
        .set("qwen3.attention.value_length", Meta::U32(16));
    for layer in 0..LAYERS {
        for (suffix, dims) in [("attn_q", [hidden, q]), ("attn_k", [hidden, kv]), ("attn_v", [hidden, kv])] {
            let name = format!("blk.{layer}.{suffix}.weight");
            writer = writer.drop_tensor(&name).q8_0(&name, &dims);
        }
        let output = format!("blk.{layer}.attn_output.weight");
        writer = writer.drop_tensor(&output).q8_0(&output, &[q, hidden]);
        for suffix in ["attn_q_norm", "attn_k_norm"] {
            let name = format!("blk.{layer}.{suffix}.weight");
            writer = writer.drop_tensor(&name).ones(&name, &[16]);
        }
    }
    let config = writer.open().unwrap().config().clone();
    assert_eq!((config.head_dim, config.q_width(), config.kv_width(), config.rope.dims), (16, 64, 32, 16));
    let other = writer.set("qwen3.attention.value_length", Meta::U32(8));
    let error = assert_refused("value length", other.open(), &["qwen3.attention.value_length = 8", "key length, 16"]);
    assert!(matches!(error, ModelError::Unsupported { .. }));
}

#[test]
fn per_layer_arrays_are_taken_when_uniform() {
    let heads = |values: &[i32]| tiny_model("llama").set("llama.attention.head_count_kv", Meta::ints(values));
    assert_eq!(heads(&[2, 2]).open().unwrap().config().kv_heads, 2);
    assert_refused("varied", heads(&[2, 4]).open(), &["llama.attention.head_count_kv = [2, 4]", "not supported"]);
    assert_refused("too long", heads(&[2, 2, 2]).open(), &["wanted one value for each of 2 layers, found 3"]);
    assert_refused("negative", heads(&[-2, -2]).open(), &["head_count_kv", "found i32 -2"]);
    assert_refused("no divisor", heads(&[3, 3]).open(), &["wanted a divisor of the 4 query heads, found 3"]);
    assert_refused("none", heads(&[0, 0]).open(), &["wanted a number from 1", "found 0"]);
}

#[test]
fn missing_keys_and_absurd_sizes_are_named() {
    for key in ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"] {
        let key = format!("llama.{key}");
        assert_refused(&key, tiny_model("llama").remove(&key).open(), &["model.gguf", &key, "is missing"]);
        for absurd in [Meta::U32(0), Meta::U64(u64::MAX), Meta::I32(-1)] {
            assert_refused(
                &key,
                tiny_model("llama").set(&key, absurd).open(),
                &["model.gguf", &key, "wanted", "found"],
            );
        }
        let text = tiny_model("llama").set(&key, Meta::text("many"));
        assert_refused(&key, text.open(), &[&key, "wanted an integer", "found string \"many\""]);
    }
    let eps = |value| tiny_model("llama").set("llama.attention.layer_norm_rms_epsilon", value).open();
    assert_refused("epsilon", eps(Meta::F32(f32::NAN)), &["wanted a finite floating-point number, found f32 NaN"]);
    assert_refused("epsilon", eps(Meta::F32(-1e-5)), &["wanted a number between 0 and 1"]);
    assert_eq!(eps(Meta::F64(1e-6)).unwrap().config().rms_norm_eps, 1e-6);
    let theta = tiny_model("llama").set("llama.rope.freq_base", Meta::F32(0.0));
    assert_refused("theta", theta.open(), &["llama.rope.freq_base: wanted a positive number, found 0"]);
    let dims = |value| tiny_model("llama").set("llama.rope.dimension_count", Meta::U32(value)).open();
    assert_refused("odd", dims(7), &["wanted an even number", "found 7"]);
    assert_refused("wide", dims(10), &["wanted a number from 1 to 8, found 10"]);
    assert_eq!(dims(4).unwrap().config().rope.dims, 4);
}

#[test]
fn declared_features_are_refused_by_name_unless_neutral() {
    let with = |key: &str, value: &Meta| tiny_model("llama").set(&format!("llama.{key}"), value.clone()).open();
    for (key, neutral, refused) in [
        ("expert_count", Meta::U32(0), Meta::U32(8)),
        ("attn_logit_softcapping", Meta::F32(0.0), Meta::F32(50.0)),
        ("final_logit_softcapping", Meta::F32(0.0), Meta::F32(30.0)),
        ("logit_scale", Meta::F32(1.0), Meta::F32(0.5)),
        ("embedding_scale", Meta::F32(1.0), Meta::F32(12.0)),
        ("residual_scale", Meta::F32(0.0), Meta::F32(0.22)),
        ("attention.scale", Meta::F32(0.353_553_4), Meta::F32(0.0156)),
        ("attention.clamp_kqv", Meta::F32(0.0), Meta::F32(8.0)),
        ("attention.max_alibi_bias", Meta::F32(0.0), Meta::F32(8.0)),
        ("attention.causal", Meta::Bool(true), Meta::Bool(false)),
        ("use_parallel_residual", Meta::Bool(false), Meta::Bool(true)),
        ("pooling_type", Meta::U32(0), Meta::U32(3)),
        ("rope.dimension_sections", Meta::ints(&[0, 0, 0, 0]), Meta::ints(&[2, 1, 1, 0])),
        ("rope.scaling.attn_factor", Meta::F32(1.0), Meta::F32(1.5)),
        ("rope.scaling.type", Meta::text("none"), Meta::text("dynamic")),
        ("attention.key_length_swa", Meta::U32(8), Meta::U32(16)),
    ] {
        with(key, &neutral).unwrap_or_else(|error| panic!("{error}"));
        let error =
            assert_refused(key, with(key, &refused), &["model.gguf", &format!("llama.{key} = "), "supported: "]);
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
    }
    let window = |arch: &str, value| tiny_model(arch).set(&format!("{arch}.attention.sliding_window"), value).open();
    for arch in ["qwen2", "qwen3"] {
        window(arch, Meta::U32(128)).unwrap();
        window(arch, Meta::U32(0)).unwrap();
        let parts = ["attention.sliding_window = 127", "supported: 0", "sliding_window_pattern, a bool for each layer"];
        assert_refused(arch, window(arch, Meta::U32(127)), &parts);
    }
    assert_refused("unknown", with("warp_factor", &Meta::U32(9)), &["key \"llama.warp_factor\" = 9", "not supported"]);
    with("tensor_data_layout", &Meta::text("Meta AI original pth")).unwrap();
}

#[test]
fn files_of_other_kinds_are_refused_by_name() {
    let with = |key: &str, value: Meta| tiny_model("llama").set(key, value).open();
    assert_refused(
        "mamba",
        tiny_model("mamba").open(),
        &["architecture \"mamba\"", "supported: llama, qwen2, qwen3, gemma3, smollm3"],
    );
    assert_refused("adapter", with("general.type", Meta::text("adapter")), &["general.type = \"adapter\""]);
    assert_refused("split", with("split.count", Meta::U32(3)), &["metadata key split.no is missing"]);
    assert_refused("quantization", with("general.quantization_version", Meta::U32(1)), &["quantization_version = 1"]);
    assert_refused(
        "none",
        tiny_model("llama").remove("general.architecture").open(),
        &["general.architecture is missing"],
    );
    let endless = assert_refused("endless", with("general.type", Meta::text(&"x".repeat(100_000))), &["general.type"]);
    assert!(endless.to_string().len() < 300, "messages clip what they quote");
    with("general.quantization_version", Meta::U32(2)).unwrap();
    with("split.count", Meta::U32(1)).unwrap();
}

#[test]
fn rope_scaling_is_read() {
    let with = |entries: &[(&str, Meta)]| {
        let writer = entries
            .iter()
            .fold(tiny_model("llama"), |writer, (key, value)| writer.set(&format!("llama.rope.{key}"), value.clone()));
        writer.open().map(|model| model.config().rope.scaling.clone())
    };
    let (linear, four) = (Meta::text("linear"), Meta::F32(4.0));
    let stretched = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(with(&[("scaling.type", linear.clone()), ("scaling.factor", four.clone())]).unwrap(), stretched);
    assert_eq!(with(&[("scaling.factor", four.clone())]).unwrap(), stretched);
    assert_eq!(with(&[("scale_linear", four.clone())]).unwrap(), stretched);
    assert_eq!(with(&[("scaling.type", Meta::text("none")), ("scaling.factor", four)]).unwrap(), RopeScaling::None);
    assert_eq!(with(&[("scaling.type", linear), ("scaling.factor", Meta::F32(1.0))]).unwrap(), RopeScaling::None);
    assert_refused("negative", with(&[("scaling.factor", Meta::F32(-2.0))]), &["rope.scaling.factor", "positive"]);
}

#[test]
fn yarn_and_longrope_are_read() {
    let with = |entries: &[(&str, Meta)]| {
        entries
            .iter()
            .fold(tiny_model("llama"), |writer, (key, value)| writer.set(&format!("llama.rope.{key}"), value.clone()))
    };
    let yarn = [
        ("scaling.type", Meta::text("yarn")),
        ("scaling.factor", Meta::F32(4.0)),
        ("scaling.original_context_length", Meta::U32(32)),
    ];
    let read = |writer: GgufWriter| writer.open().unwrap().config().rope.scaling.clone();
    let RopeScaling::Yarn { factor, original_positions, beta_fast, beta_slow, truncate, attention_factor } =
        read(with(&yarn))
    else {
        panic!("yarn was stated")
    };
    assert_eq!((factor, original_positions, beta_fast, beta_slow, truncate), (4.0, 32.0, 32.0, 1.0, true));
    approx::assert_relative_eq!(attention_factor, 0.1 * 4f32.ln() + 1.0);
    assert_refused("factor", with(&yarn[..1]).open(), &["llama.rope.scaling.factor is missing"]);
    let multiplied = with(&yarn).set("llama.rope.scaling.yarn_log_multiplier", Meta::F32(0.1));
    assert_refused("multiplier", multiplied.open(), &["yarn_log_multiplier = 0.1"]);

    let long = || with(&[("scaling.type", Meta::text("longrope")), ("scaling.attn_factor", Meta::F32(1.2))]);
    let list = |values: [f32; 4]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let both = long().tensor("rope_factors_short.weight", 0, &[4], list([1.0, 1.0, 1.0, 2.0])).tensor(
        "rope_factors_long.weight",
        0,
        &[4],
        list([1.0, 2.0, 4.0, 8.0]),
    );
    let RopeScaling::LongRope { original_positions, short, long: longer, attention_factor } = read(both) else {
        panic!("longrope was stated")
    };
    assert_eq!((original_positions, attention_factor), (128.0, 1.2), "the context length where nothing is stated");
    assert_eq!((short, longer), (vec![1.0, 1.0, 1.0, 2.0], vec![1.0, 2.0, 4.0, 8.0]));
    assert_refused("lists", long().open(), &["rope_factors_short.weight", "is missing"]);
    let zero = long().tensor("rope_factors_short.weight", 0, &[4], list([0.0; 4]));
    assert_refused("zero", zero.open(), &["rope_factors_short.weight", "wanted positive divisors, found 0"]);
}

#[test]
fn windows_are_read_by_layer() {
    use npuhal_models::config::{LayerAttention, LayerRope};
    let open = |writer: GgufWriter| writer.open().unwrap().config().features.layers.clone();
    let windowed = LayerAttention { window: Some(32), rope: LayerRope::Global };
    let llama = || tiny_model("llama").set("llama.attention.sliding_window", Meta::U32(32));
    assert_eq!(open(llama()), [windowed; 2]);
    let pattern = |value: Meta| llama().set("llama.attention.sliding_window_pattern", value);
    assert_eq!(open(pattern(Meta::U32(2))), [windowed, LayerAttention::default()]);
    let flags = Meta::Array(7, vec![Meta::Bool(false), Meta::Bool(true)]);
    assert_eq!(open(pattern(flags)), [LayerAttention::default(), windowed]);
    let short = pattern(Meta::Array(7, vec![Meta::Bool(true)]));
    assert_refused("short", short.open(), &["sliding_window_pattern: wanted a bool for each of 2 layers"]);
    let whole = tiny_model("llama").set("llama.attention.sliding_window", Meta::U32(128));
    assert!(open(whole).is_empty(), "a window of the whole context is none");
    let flags = Meta::Array(7, vec![Meta::Bool(false), Meta::Bool(true)]);
    let qwen = tiny_model("qwen2").set("qwen2.attention.sliding_window", Meta::U32(32));
    let qwen = qwen.set("qwen2.attention.sliding_window_pattern", flags);
    assert_eq!(open(qwen), [LayerAttention::default(), windowed]);
}

#[test]
fn rope_factors_are_a_tensor_of_llama() {
    let factors: Vec<u8> = [1.0_f32, 1.0, 2.0, 8.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let model = tiny_model("llama").tensor("rope_freqs.weight", 0, &[4], factors.clone()).open().unwrap();
    assert!(model.tensor(TensorRole::RopeFactors).is_some());
    let found = model.rope_inverse_frequencies(1);
    let expected = [1.0, 0.1, 0.005, 0.001 / 8.0];
    found
        .iter()
        .zip(expected)
        .for_each(|(found, expected)| approx::assert_relative_eq!(*found, expected, epsilon = 1e-12));
    assert_eq!(found.len(), 4);
    let zero = vec![0; 16];
    let bad = tiny_model("llama").tensor("rope_freqs.weight", 0, &[4], zero);
    assert_refused("zero", bad.open(), &["rope_freqs.weight", "wanted positive factors, found 0 in element 0"]);
    let short = tiny_model("llama").ones("rope_freqs.weight", &[3]);
    assert_refused("short", short.open(), &["rope_freqs.weight", "wanted dimensions [4]", "found [3]"]);
    let qwen = tiny_model("qwen2").tensor("rope_freqs.weight", 0, &[4], factors);
    assert_refused("qwen2", qwen.open(), &["rope_freqs.weight", "architecture qwen2", "not supported"]);
}

#[test]
fn every_missing_tensor_is_named() {
    for arch in ["llama", "qwen2", "qwen3"] {
        let names: Vec<String> = tiny_model(arch).tensors.into_iter().map(|tensor| tensor.name).collect();
        for name in names.iter().filter(|name| *name != "output.weight") {
            let error =
                assert_refused(name, tiny_model(arch).drop_tensor(name).open(), &["model.gguf", name, "is missing"]);
            assert!(matches!(error, ModelError::Missing { .. }));
        }
    }
    let partly = tiny_model("llama").ones("blk.0.attn_q.bias", &[32]);
    assert_refused("a single bias", partly.open(), &["blk.0.attn_k.bias", "is missing"]);
}

#[test]
fn every_wrong_shape_is_named() {
    for arch in ["llama", "qwen2", "qwen3"] {
        for tensor in tiny_model(arch).tensors.into_iter().filter(|tensor| tensor.name != "token_embd.weight") {
            // One block more in a row: still whole blocks, so that the reader itself has nothing to object to.
            let wide = tiny_model(arch).edit(&tensor.name, |tensor| {
                tensor.dims[0] += 32;
                let rows: u64 = tensor.dims.iter().skip(1).product();
                tensor.data = vec![0; (tensor.dims[0] * rows * 4) as usize];
            });
            let error =
                assert_refused(&tensor.name, wide.open(), &["model.gguf", &tensor.name, "wanted dimensions", "found"]);
            assert!(matches!(error, ModelError::Malformed { .. }));
        }
    }
}

#[test]
fn unknown_tensors_are_refused_by_name() {
    for name in [
        "blk.0.attn_qkv.weight",
        "blk.0.attn_output.bias",
        "blk.1.ffn_up.bias",
        "blk.0.ffn_gate_exps.weight",
        "blk.0.attn_q_norm.weight",
        "blk.00.attn_norm.weight",
        "blk.+1.attn_norm.weight",
        "output.bias",
        "rope_factors_long.weight",
        "surprise",
    ] {
        let error =
            assert_refused(name, tiny_model("llama").ones(name, &[32]).open(), &["model.gguf", name, "not supported"]);
        assert!(matches!(error, ModelError::Unsupported { .. }));
    }
    let beyond = tiny_model("llama").ones("blk.2.attn_norm.weight", &[32]);
    assert_refused("beyond", beyond.open(), &["blk.2.attn_norm.weight", "wanted a layer below 2", "found 2"]);
    tiny_model("llama").ones("blk.0.attn_rot_embd.weight", &[4]).open().unwrap();
}

#[test]
fn unsupported_tensor_types_are_named_with_their_tensor() {
    for (id, name) in [(16, "IQ2_XXS"), (21, "IQ3_S"), (35, "TQ2_0"), (40, "NVFP4"), (28, "F64"), (250, "number 250")] {
        let writer = tiny_model("llama").edit("blk.1.ffn_up.weight", |tensor| tensor.type_id = id);
        let parts = ["model.gguf", name, "blk.1.ffn_up.weight", "F32, F16, BF16, Q4_0", "Q6_K"];
        assert!(matches!(assert_refused(name, writer.open(), &parts), ModelError::Unsupported { .. }));
    }
}

#[test]
fn the_vocabulary_is_read_whole() {
    let model = tiny_model("llama").open().unwrap();
    let vocabulary = model.vocabulary();
    assert_eq!((vocabulary.model.as_str(), vocabulary.pre_tokenizer.as_str()), ("gpt2", "qwen2"));
    assert_eq!(vocabulary.tokens, TOKENS);
    assert_eq!(vocabulary.kinds[..4], [TokenKind::Unknown, TokenKind::Control, TokenKind::Control, TokenKind::Normal]);
    assert_eq!(vocabulary.merges, ["a b"]);
    assert_eq!((vocabulary.bos, vocabulary.unknown, vocabulary.padding), (Some(1), Some(0), None));
    assert_eq!((vocabulary.add_bos, vocabulary.add_space_prefix), (false, false));
    assert_eq!(vocabulary.chat_template.as_deref(), Some("{{ messages }}"));
    assert!(vocabulary.scores.is_empty());
}

#[test]
fn end_ids_are_united_from_every_place() {
    let ends = |writer: GgufWriter| writer.open().unwrap().vocabulary().eos.clone();
    let plain = || tiny_model("llama").set("tokenizer.ggml.token_type", Meta::ints(&[1; 8]));
    assert_eq!(ends(tiny_model("llama")), [2, 7], "the key and <|im_end|>");
    assert_eq!(ends(plain()), [2], "a text that is no control token ends nothing");
    assert_eq!(ends(plain().set("tokenizer.ggml.eot_token_id", Meta::U32(5))), [2, 5]);
    assert_eq!(ends(plain().set("tokenizer.ggml.eom_token_id", Meta::I32(4))), [2, 4]);
    assert_eq!(ends(plain().set("tokenizer.ggml.eos_token_id", Meta::ints(&[6, 3, 6]))), [3, 6]);
    assert_eq!(ends(plain().set("tokenizer.ggml.eos_token_ids", Meta::ints(&[6, 3]))), [2, 3, 6]);
    assert_eq!(ends(plain().set("tokenizer.ggml.eos_token_id", Meta::U32(u32::MAX))), [0_u32; 0]);
    let named = |writer: GgufWriter| writer.open().unwrap().vocabulary().eos_token;
    assert_eq!(named(tiny_model("llama")), Some(2));
    assert_eq!(named(plain().set("tokenizer.ggml.eos_token_id", Meta::ints(&[6, 3, 6]))), Some(6));
    assert_eq!(named(plain().set("tokenizer.ggml.eos_token_id", Meta::U32(u32::MAX))), None);
}

#[test]
fn the_first_eos_is_the_one_of_templates() {
    let first = |value: Meta| {
        tiny_model("llama").set("tokenizer.ggml.eos_token_id", value).open().unwrap().vocabulary().eos_token
    };
    assert_eq!(first(Meta::U32(3)), Some(3));
    assert_eq!(first(Meta::ints(&[6, 3])), Some(6));
    assert_eq!(first(Meta::ints(&[])), None);
    assert_eq!(first(Meta::I32(-1)), None);
}

#[test]
fn named_templates_and_foreign_normalisation_are_seen() {
    let model = tiny_model("llama")
        .set("tokenizer.chat_template", Meta::text("A"))
        .set("tokenizer.chat_template.tool_use", Meta::text("T"))
        .set("tokenizer.ggml.model", Meta::text("t5"))
        .set("tokenizer.ggml.precompiled_charsmap", Meta::Array(0, vec![Meta::U8(1)]));
    let model = model.open().unwrap();
    let vocabulary = model.vocabulary();
    assert_eq!(vocabulary.chat_template.as_deref(), Some("A"));
    assert_eq!(vocabulary.named_templates.get("tool_use").map(String::as_str), Some("T"));
    let message = npuhal_models::Tokenizer::from_vocabulary(vocabulary).unwrap_err().to_string();
    assert!(message.contains("precompiled map"), "{message}");
}

#[test]
fn vocabulary_defaults_follow_the_tokenizer_model() {
    let silent = tiny_model("llama").set("tokenizer.ggml.model", Meta::text("llama")).open().unwrap();
    assert!(silent.vocabulary().add_bos && silent.vocabulary().add_space_prefix);
    let stated = tiny_model("llama")
        .set("tokenizer.ggml.model", Meta::text("llama"))
        .set("tokenizer.ggml.add_bos_token", Meta::Bool(false))
        .set("tokenizer.ggml.add_space_prefix", Meta::Bool(false))
        .open()
        .unwrap();
    assert!(!stated.vocabulary().add_bos && !stated.vocabulary().add_space_prefix);
    assert!(
        tiny_model("llama").set("tokenizer.ggml.pre", Meta::text("llama-bpe")).open().unwrap().vocabulary().add_bos
    );
    let none = tiny_model("llama").set("tokenizer.ggml.model", Meta::text("none")).open().unwrap();
    assert!(none.vocabulary().tokens.is_empty());
}

#[test]
fn contradictions_in_the_vocabulary_are_named() {
    let with = |key: &str, value: Meta| tiny_model("llama").set(&format!("tokenizer.ggml.{key}"), value).open();
    assert_refused("bos", with("bos_token_id", Meta::U32(8)), &["bos_token_id: wanted an id below 8", "found 8"]);
    assert_refused(
        "eos",
        with("eos_token_id", Meta::ints(&[2, 99])),
        &["eos_token_id: wanted an id below 8", "found 99"],
    );
    assert_refused(
        "eos",
        with("eos_token_id", Meta::texts(&["</s>"])),
        &["element 0: wanted a token id, found string"],
    );
    assert_refused(
        "kinds",
        with("token_type", Meta::ints(&[1])),
        &["wanted one element for each of 8 tokens, found 1"],
    );
    assert_refused(
        "kinds",
        with("token_type", Meta::ints(&[1, 1, 1, 1, 1, 1, 1, 7])),
        &["element 7: wanted a token type"],
    );
    assert_refused(
        "scores",
        with("scores", Meta::ints(&[0; 8])),
        &["scores: element 0: wanted a finite", "found i32 0"],
    );
    assert_refused("merges", with("merges", Meta::ints(&[1])), &["merges: element 0: wanted a string, found i32 1"]);
    assert_refused("tokens", with("tokens", Meta::text("a")), &["tokens: wanted an array, found string"]);
    assert_refused(
        "tokens",
        with("tokens", Meta::Array(8, Vec::new())),
        &["tokens: wanted from 1 to 8 tokens", "found 0"],
    );
    assert_refused("tokens", with("tokens", Meta::texts(&["a"; 9])), &["wanted from 1 to 8 tokens", "found 9"]);
    let silent = tiny_model("llama").remove("tokenizer.ggml.tokens").open();
    assert_refused("tokens", silent, &["tokenizer.ggml.tokens is missing"]);
    assert_refused(
        "model",
        tiny_model("llama").remove("tokenizer.ggml.model").open(),
        &["tokenizer.ggml.model is missing"],
    );
    let size = |value| tiny_model("llama").set("llama.vocab_size", Meta::U32(value)).open();
    assert_refused("size", size(9), &["llama.vocab_size", "wanted the 8 rows", "found 9"]);
    size(8).unwrap();
}

/// Embeddings are often padded to a round number of rows.
#[test]
fn there_may_be_fewer_tokens_than_rows() {
    let padded = tiny_model("llama").drop_tensor("token_embd.weight").q8_0("token_embd.weight", &[HIDDEN, 16]);
    let model = padded.open().unwrap();
    assert_eq!((model.config().vocab_size, model.vocabulary().tokens.len()), (16, 8));
}

#[test]
fn suggested_sampling_is_read_or_left_out_by_name() {
    let with = |entries: &[(&str, Meta)]| {
        let mut writer = tiny_model("llama");
        for (key, value) in entries {
            writer = writer.set(&format!("general.sampling.{key}"), value.clone());
        }
        writer.open().unwrap().suggested_sampling().cloned()
    };
    assert_eq!(with(&[]), None);
    let all = [
        ("temp", Meta::F32(0.6)),
        ("top_k", Meta::I32(20)),
        ("top_p", Meta::F32(0.95)),
        ("min_p", Meta::F32(0.0)),
        ("penalty_repeat", Meta::F32(1.05)),
        ("penalty_last_n", Meta::I32(64)),
        ("mirostat", Meta::I32(0)),
        ("xtc_threshold", Meta::F32(0.1)),
    ];
    let suggested = with(&all).unwrap();
    let params = &suggested.params;
    assert_eq!((params.temperature, params.top_k, params.top_p, params.min_p), (0.6, 20, 0.95, 0.0));
    assert_eq!((params.repetition_penalty, params.penalty_window), (1.05, Some(64)));
    assert!(suggested.left_out.is_empty());
    let text = "temperature 0.6, top-p 0.95, top-k 20, repetition penalty 1.05, over the last 64 tokens";
    assert_eq!(suggested.to_string(), text);
    // The library that the suggestion was written for has a temperature of 1.
    assert_eq!(with(&[("top_k", Meta::I32(64))]).unwrap().params.temperature, 1.0);
    assert_eq!(with(&[("temp", Meta::F32(0.0)), ("top_k", Meta::I32(64))]).unwrap().params.temperature, 0.0);
    assert_eq!(with(&[("temp", Meta::F32(-1.0)), ("penalty_last_n", Meta::I32(-1))]), None);
    let left_out = |key: &str, value: Meta, wanted: &str| {
        assert_eq!(with(&[(key, value)]).unwrap().left_out, [wanted]);
    };
    left_out("temp", Meta::F32(9.0), "general.sampling.temp = 9");
    left_out("temp", Meta::F32(f32::NAN), "general.sampling.temp = NaN");
    left_out("top_p", Meta::F32(0.0), "general.sampling.top_p = 0");
    left_out("top_k", Meta::F32(1.5), "general.sampling.top_k = 1.5");
    left_out("top_k", Meta::text("many"), "general.sampling.top_k = \"many\"");
    left_out("mirostat", Meta::I32(2), "general.sampling.mirostat = 2");
    left_out("sequence", Meta::text("top_k;top_p"), "general.sampling.sequence = \"top_k;top_p\"");
}

#[test]
fn the_summary_adds_up() {
    let model = tiny_model("qwen2").open().unwrap();
    let summary = model.summary();
    let (embedding, attention, wide) = (8 * 32, 2 * (2 * 32 * 32 + 2 * 32 * 16 + 64), 2 * 3 * 32 * 64);
    assert_eq!(summary.groups[&ParameterGroup::Embedding].parameters, embedding);
    assert_eq!(summary.groups[&ParameterGroup::Head].parameters, embedding);
    assert_eq!(summary.groups[&ParameterGroup::Attention].parameters, attention);
    assert_eq!(summary.groups[&ParameterGroup::FeedForward].parameters, wide);
    assert_eq!(summary.groups[&ParameterGroup::Norms].parameters, 5 * 32);
    assert_eq!(summary.total.parameters, summary.groups.values().map(|group| group.parameters).sum::<u64>());
    assert_eq!(summary.total.bytes, summary.types.values().map(|group| group.bytes).sum::<u64>());
    assert_eq!(summary.types[&WeightType::F32].tensors, 5 + 6);
    assert_eq!(summary.decode_bytes, summary.total.bytes - 7 * 34, "all but seven rows of the embedding");
    let tied = tiny_model("llama").open().unwrap().summary();
    assert_eq!(tied.decode_bytes, tied.total.bytes + 34, "the embedding whole as head, and one row of it");
    assert_eq!(model.config().kv_bytes(100, 2), 2 * 2 * 16 * 100 * 2);
    assert_eq!(model.config().kv_bytes(usize::MAX, usize::MAX), u64::MAX);
}
