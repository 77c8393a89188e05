//! The xdna1 lane's twins against a published small model, and the rules every segment keeps.

use half::{bf16, f16};
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Takes, Tap, TapSink, Want, Yields};
use npuhal_cpu::twin::{Lane, TwinError, TwinOptions, TwinSegment};
use npuhal_models::config::{DecoderFeatures, Rope, RopePairing, RopeScaling};
use npuhal_models::map::FileMap;
use npuhal_models::source::{Format, LayerTensor, TensorRole};
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{ModelConfig, ModelSource, Tensor, WeightType};
use npuhal_registry::SegmentSpan;
use serde_json::Value;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

fn golden() -> Value {
    serde_json::from_str(include_str!("data/xdna1/cpu_reference_vectors.json")).unwrap()
}

/// The published formula of the small model's weights.
fn value(tag: usize, row: usize, col: usize, layer: usize, scale: f32) -> f32 {
    let whole = (row * 131 + col * 31 + (row * col % 97) * 13 + tag * 17 + layer * 7) % 251;
    (whole as f32 - 125.0) * scale
}

struct Builder {
    bytes: Vec<u8>,
    placed: Vec<(TensorRole, WeightType, usize, usize, usize)>,
    /// Rows are stored as GGUF's `llama` stores them.
    interleaved: bool,
}

impl Builder {
    fn add(
        &mut self,
        role: TensorRole,
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        element: impl Fn(usize, usize) -> f32,
    ) {
        use LayerTensor::{K, KBias, Q, QBias};
        let permuted = self.interleaved && matches!(role, TensorRole::Layer(_, Q | K | QBias | KBias));
        let source = |at: usize| if permuted { at / 64 * 64 + at % 2 * 32 + at % 64 / 2 } else { at };
        self.placed.push((role, weight_type, rows, cols, self.bytes.len()));
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let value = if rows == 1 { element(0, source(col)) } else { element(source(row), col) };
            match weight_type {
                WeightType::F16 => self.bytes.extend(f16::from_f32(value).to_le_bytes()),
                WeightType::Bf16 => self.bytes.extend(bf16::from_f32(value).to_le_bytes()),
                _ => self.bytes.extend(value.to_le_bytes()),
            }
        }
    }
}

/// The published small model; `raw` stores f32 everywhere, to be rounded at load.
fn model(bias: bool, raw: bool, pairing: RopePairing) -> (TempDir, ModelSource) {
    let (theta, eps) = if bias { (1_000_000.0, 1e-6) } else { (10_000.0, 1e-5) };
    let config = ModelConfig {
        model_type: "llama".into(),
        name: "small".into(),
        hidden_size: 128,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 64,
        intermediate_size: 192,
        vocab_size: 50,
        context_length: 64,
        rms_norm_eps: eps,
        rope: Rope { theta, dims: 64, pairing, scaling: RopeScaling::None },
        qkv_bias: bias,
        qk_norm: false,
        tied_head: false,
        features: DecoderFeatures::default(),
    };
    let (matrix, small) = if raw { (WeightType::F32, WeightType::F32) } else { (WeightType::Bf16, WeightType::F16) };
    let mut builder =
        Builder { bytes: Vec::new(), placed: Vec::new(), interleaved: pairing == RopePairing::Interleaved };
    builder.add(TensorRole::TokenEmbedding, small, 50, 128, |r, c| value(10, r, c, 0, 1.0 / 128.0));
    builder.add(TensorRole::FinalNorm, small, 1, 128, |_, c| 1.0 + value(7, 0, c, 0, 1.0 / 512.0));
    builder.add(TensorRole::Head, matrix, 50, 128, |r, c| value(8, r, c, 0, 1.0 / 512.0));
    for layer in 0..2 {
        let role = |part| TensorRole::Layer(layer, part);
        let weight = |tag, first: usize| move |r: usize, c: usize| value(tag, first + r, c, layer, 1.0 / 1024.0);
        let norm = |tag| move |_: usize, c: usize| 1.0 + value(tag, 0, c, layer, 1.0 / 512.0);
        let bias_of = |first: usize| move |_: usize, c: usize| value(9, 0, first + c, layer, 1.0 / 256.0);
        builder.add(role(LayerTensor::InputNorm), small, 1, 128, norm(5));
        builder.add(role(LayerTensor::PostAttentionNorm), small, 1, 128, norm(6));
        builder.add(role(LayerTensor::Q), matrix, 128, 128, weight(1, 0));
        builder.add(role(LayerTensor::K), matrix, 64, 128, weight(1, 128));
        builder.add(role(LayerTensor::V), matrix, 64, 128, weight(1, 192));
        if bias {
            builder.add(role(LayerTensor::QBias), small, 1, 128, bias_of(0));
            builder.add(role(LayerTensor::KBias), small, 1, 64, bias_of(128));
            builder.add(role(LayerTensor::VBias), small, 1, 64, bias_of(192));
        }
        builder.add(role(LayerTensor::O), matrix, 128, 128, weight(2, 0));
        builder.add(role(LayerTensor::Gate), matrix, 192, 128, weight(3, 0));
        builder.add(role(LayerTensor::Up), matrix, 192, 128, weight(3, 192));
        builder.add(role(LayerTensor::Down), matrix, 128, 192, weight(4, 0));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    std::fs::write(&path, &builder.bytes).unwrap();
    let map = Arc::new(FileMap::open(&path).unwrap());
    let tensors: BTreeMap<TensorRole, Tensor> = builder
        .placed
        .into_iter()
        .map(|(role, weight_type, rows, cols, start)| {
            let size = if weight_type == WeightType::F32 { 4 } else { 2 };
            let range = start..start + rows * cols * size;
            (role, Tensor::new(format!("{role:?}"), weight_type, rows, cols, Arc::clone(&map), range).unwrap())
        })
        .collect();
    (folder, ModelSource::new(path, Format::Gguf, config, Vocabulary::default(), tensors))
}

fn open(model: &ModelSource, lane: Lane, span: SegmentSpan, threads: usize) -> Result<TwinSegment, TwinError> {
    let threads = NonZeroUsize::new(threads).unwrap();
    TwinSegment::open(model, span, TwinOptions { lane, positions: 64, sequences: 2, threads })
}

fn whole(model: &ModelSource, lane: Lane, threads: usize) -> TwinSegment {
    open(model, lane, SegmentSpan::whole(model.config()), threads).unwrap()
}

fn row(sequence: u32, token: u32, position: u32) -> Row {
    Row { sequence: SequenceId(sequence), token, position }
}

type Seen = Arc<Mutex<Vec<(Tap, Vec<f32>)>>>;

struct Sink(Seen);

impl TapSink for Sink {
    fn observe(&mut self, tap: Tap, _: Row, values: &[f32]) {
        self.0.lock().unwrap().push((tap, values.to_vec()));
    }
}

/// Logits and what was observed, of one row.
fn step(segment: &mut TwinSegment, row: Row) -> (Vec<f32>, Vec<(Tap, Vec<f32>)>) {
    let seen = Seen::default();
    segment.observe(Some(Box::new(Sink(Arc::clone(&seen)))));
    let mut hidden = HiddenRows::new();
    segment.forward(&[row], &mut hidden, Want::Last, &Control::new()).unwrap();
    segment.observe(None);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (hidden.as_slice().to_vec(), seen)
}

/// Steps between two bf16 values.
fn steps(a: u16, b: u16) -> u32 {
    let order = |bits: u16| if bits & 0x8000 == 0 { i32::from(bits) } else { -i32::from(bits & 0x7fff) };
    order(a).abs_diff(order(b))
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap()
}

#[test]
fn the_cpu_stage_gives_the_published_vectors() {
    for (key, bias) in [("no_bias", false), ("with_bias", true)] {
        let (_folder, model) = model(bias, false, RopePairing::Halves);
        let mut segment = whole(&model, Lane::Cpu, 2);
        let golden = golden();
        let wanted = golden[key]["steps"].as_array().unwrap();
        assert_eq!(wanted.len(), 4);
        let (mut compared, mut differing) = (0, 0);
        for wanted in wanted {
            let number = |key: &str| wanted[key].as_u64().unwrap() as u32;
            let (logits, seen) = step(&mut segment, row(0, number("token"), number("position")));
            for (layer, bits) in wanted["hidden_bf16_bits_after_layer"].as_array().unwrap().iter().enumerate() {
                let bits: Vec<u16> = serde_json::from_value(bits.clone()).unwrap();
                let (_, found) = seen.iter().find(|(tap, _)| *tap == Tap::LayerOut(layer as u32)).unwrap();
                assert_eq!(bits.len(), found.len());
                for (wanted, found) in bits.iter().zip(found) {
                    let apart = steps(*wanted, bf16::from_f32(*found).to_bits());
                    assert!(apart <= 1, "{key} layer {layer}: {wanted} {found}");
                    compared += 1;
                    differing += apart;
                }
            }
            let wanted_logits: Vec<f32> = serde_json::from_value(wanted["logits"].clone()).unwrap();
            for (wanted, found) in wanted_logits.iter().zip(&logits) {
                assert!((wanted - found).abs() <= 2e-2, "{key}: {wanted} {found}");
            }
            if wanted["margin"].as_f64().unwrap() > 0.05 {
                assert_eq!(argmax(&logits) as u32, number("argmax"), "{key}");
            }
        }
        assert!(differing * 50 <= compared, "{key}: {differing} of {compared} elements differ");
    }
}

/// Engines and CPU stage compute the same model; the engines' attention and SiLU are coarser.
#[test]
fn engines_stay_near_the_cpu_stage() {
    for (lane, bias, limit) in [(Lane::SmolLm, false, 0.15), (Lane::Qwen, true, 0.05)] {
        let (_folder, model) = model(bias, false, RopePairing::Halves);
        let (mut engine, mut stage) = (whole(&model, lane, 2), whole(&model, Lane::Cpu, 2));
        for (position, token) in [3, 7, 1, 9, 40, 22, 5, 3].into_iter().enumerate() {
            let row = row(0, token, position as u32);
            let ((found, _), (wanted, _)) = (step(&mut engine, row), step(&mut stage, row));
            let worst = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= limit, "{lane} at {position}: {worst}");
            assert!(worst > 0.0, "{lane} rounds elsewhere");
        }
    }
}

#[test]
fn the_file_does_not_matter() {
    for lane in [Lane::Cpu, Lane::Qwen] {
        let (_folder, packed) = model(true, false, RopePairing::Halves);
        for pairing in [RopePairing::Halves, RopePairing::Interleaved] {
            let (_folder, raw) = model(true, true, pairing);
            let (mut a, mut b) = (whole(&packed, lane, 1), whole(&raw, lane, 1));
            for position in 0..4 {
                let row = row(0, 7 * position + 1, position);
                assert_eq!(step(&mut a, row).0, step(&mut b, row).0, "{lane} {pairing:?}");
            }
        }
    }
}

#[test]
fn batches_threads_prefixes_and_parts_do_not_change_a_row() {
    for lane in [Lane::SmolLm, Lane::Qwen, Lane::Cpu] {
        let (_folder, model) = model(false, false, RopePairing::Halves);
        let tokens = [3, 7, 1, 9, 40];
        let rows: Vec<Row> = (0..).zip(tokens).map(|(position, token)| row(0, token, position)).collect();
        let mut alone = whole(&model, lane, 1);
        let wanted: Vec<f32> = rows.iter().flat_map(|row| step(&mut alone, *row).0).collect();
        let mut batch = whole(&model, lane, 3);
        let mut hidden = HiddenRows::new();
        batch.forward(&rows, &mut hidden, Want::All, &Control::new()).unwrap();
        assert_eq!(hidden.as_slice(), wanted, "{lane}");
        assert_eq!(batch.truncate(SequenceId(0), 2), 2);
        batch.forward(&rows[2..], &mut hidden, Want::Last, &Control::new()).unwrap();
        assert_eq!(hidden.as_slice(), &wanted[200..], "{lane}: after a shared prefix");

        let part = |layers: std::ops::Range<usize>, takes, yields| {
            open(&model, lane, SegmentSpan { layers, takes, yields }, 1).unwrap()
        };
        let mut parts = [
            part(0..1, Takes::Tokens, Yields::Hidden),
            part(1..2, Takes::Hidden, Yields::Normed),
            part(2..2, Takes::Normed, Yields::Logits),
        ];
        for segment in &mut parts {
            segment.forward(&rows, &mut hidden, Want::All, &Control::new()).unwrap();
        }
        assert_eq!(hidden.as_slice(), wanted, "{lane}: one hidden vector crosses");
    }
}

#[test]
fn the_window_is_kept_and_other_models_are_refused() {
    let (_folder, small) = model(true, false, RopePairing::Halves);
    let mut segment = whole(&small, Lane::Cpu, 1);
    let mut hidden = HiddenRows::new();
    let rows: Vec<Row> = (0..64).map(|position| row(1, 3, position)).collect();
    segment.forward(&rows, &mut hidden, Want::Nothing, &Control::new()).unwrap();
    let mut refuse =
        |rows: &[Row]| segment.forward(rows, &mut hidden, Want::Last, &Control::new()).unwrap_err().to_string();
    assert!(refuse(&[row(1, 3, 64)]).contains("limit of 64"));
    assert!(refuse(&[row(0, 3, 1)]).contains("wanted position 0"));
    assert!(refuse(&[row(0, 50, 0)]).contains("token 50"));
    assert!(refuse(&[row(2, 3, 0)]).contains("sequence"));
    let error = open(&small, Lane::SmolLm, SegmentSpan::whole(small.config()), 1).err().unwrap().to_string();
    assert!(error.contains("numerics xdna1-smollm cannot run this model: qkv_bias is on"), "{error}");
}
