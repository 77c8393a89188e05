//! The exact segment against a plain second implementation, and its promises.

use super::*;
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Stepper, TokenId};
use npuhal_models::config::{DecoderFeatures, Rope, RopePairing, RopeScaling};
use npuhal_models::map::FileMap;
use npuhal_models::source::{Format, LayerTensor};
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{Tensor, TensorRole, WeightType};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex};
use tempfile::NamedTempFile;

/// What a random model looks like.
pub(crate) struct Spec {
    pub(crate) config: ModelConfig,
    rope_factors: bool,
    /// A tensor to leave out.
    without: Option<TensorRole>,
    /// A tensor whose first element is no number.
    poisoned: Option<TensorRole>,
}

/// A model of random f32 weights in a file, changed by `edit`: 3 layers, 4 query heads of 6 over 2 key heads, hidden size 20.
pub(crate) fn random_model(edit: impl FnOnce(&mut Spec)) -> (NamedTempFile, ModelSource) {
    let rope = Rope { theta: 10_000.0, dims: 6, pairing: RopePairing::Halves, scaling: RopeScaling::None };
    let config = ModelConfig {
        model_type: "llama".to_owned(),
        name: "random".to_owned(),
        hidden_size: 20,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        intermediate_size: 27,
        vocab_size: 33,
        context_length: 64,
        rms_norm_eps: 1e-5,
        rope,
        qkv_bias: false,
        qk_norm: false,
        tied_head: true,
        features: DecoderFeatures::default(),
    };
    let mut spec = Spec { config, rope_factors: false, without: None, poisoned: None };
    edit(&mut spec);
    write_model(spec)
}

fn shapes(spec: &Spec) -> Vec<(TensorRole, usize, usize)> {
    let config = &spec.config;
    let (hidden, q, kv, inner) = (config.hidden_size, config.q_width(), config.kv_width(), config.intermediate_size);
    let mut shapes = vec![(TensorRole::TokenEmbedding, config.vocab_size, hidden), (TensorRole::FinalNorm, 1, hidden)];
    if !config.tied_head {
        shapes.push((TensorRole::Head, config.vocab_size, hidden));
    }
    if spec.rope_factors {
        shapes.push((TensorRole::RopeFactors, 1, config.rope.dims / 2));
    }
    for layer in 0..config.layers {
        let mut add = |part, rows, cols| shapes.push((TensorRole::Layer(layer, part), rows, cols));
        add(LayerTensor::InputNorm, 1, hidden);
        add(LayerTensor::Q, q, hidden);
        add(LayerTensor::K, kv, hidden);
        add(LayerTensor::V, kv, hidden);
        add(LayerTensor::O, hidden, q);
        add(LayerTensor::PostAttentionNorm, 1, hidden);
        add(LayerTensor::Gate, inner, hidden);
        add(LayerTensor::Up, inner, hidden);
        add(LayerTensor::Down, hidden, inner);
        if config.qkv_bias {
            add(LayerTensor::QBias, 1, q);
            add(LayerTensor::KBias, 1, kv);
            add(LayerTensor::VBias, 1, kv);
        }
        if config.qk_norm {
            add(LayerTensor::QNorm, 1, config.head_dim);
            add(LayerTensor::KNorm, 1, config.head_dim);
        }
    }
    shapes
}

fn write_model(spec: Spec) -> (NamedTempFile, ModelSource) {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let shapes = shapes(&spec);
    let mut bytes = Vec::new();
    for (role, rows, cols) in &shapes {
        let scale = if *role == TensorRole::TokenEmbedding { 1.0 } else { 0.4 };
        for index in 0..rows * cols {
            let value = match role {
                TensorRole::RopeFactors => 1.0 + index as f32,
                _ if spec.poisoned == Some(*role) && index == 0 => f32::NAN,
                _ => scale * next(),
            };
            bytes.extend_from_slice(&value.to_le_bytes());
        }
    }
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    let map = Arc::new(FileMap::open(file.path()).unwrap());
    let mut tensors = BTreeMap::new();
    let mut at = 0;
    for (role, rows, cols) in shapes {
        let end = at + rows * cols * 4;
        let tensor = Tensor::new(format!("{role:?}"), WeightType::F32, rows, cols, Arc::clone(&map), at..end).unwrap();
        if spec.without != Some(role) {
            tensors.insert(role, tensor);
        }
        at = end;
    }
    let path = file.path().to_owned();
    (file, ModelSource::new(path, Format::Gguf, spec.config, Vocabulary::default(), tensors))
}

/// A second implementation: one position after the other, plain loops, nothing shared with the segment but the formulas.
struct Reference<'a> {
    model: &'a ModelSource,
    keys: Vec<Vec<Vec<f64>>>,
    values: Vec<Vec<Vec<f64>>>,
}

impl<'a> Reference<'a> {
    fn new(model: &'a ModelSource) -> Self {
        let layers = model.config().layers;
        Self { model, keys: vec![Vec::new(); layers], values: vec![Vec::new(); layers] }
    }

    fn weights(&self, role: TensorRole) -> Vec<Vec<f64>> {
        let tensor = self.model.require(role).unwrap();
        let floats = tensor.bytes().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        floats.collect::<Vec<_>>().chunks_exact(tensor.cols()).map(<[f64]>::to_vec).collect()
    }

    fn project(&self, layer: usize, part: LayerTensor, bias: Option<LayerTensor>, x: &[f64]) -> Vec<f64> {
        let weights = self.weights(TensorRole::Layer(layer, part));
        let mut out: Vec<f64> = weights.iter().map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        if let Some(bias) = bias.filter(|_| self.model.config().qkv_bias) {
            let bias = self.weights(TensorRole::Layer(layer, bias));
            out.iter_mut().zip(&bias[0]).for_each(|(out, bias)| *out += bias);
        }
        out
    }

    fn norm(&self, role: TensorRole, x: &[f64]) -> Vec<f64> {
        let weight = &self.weights(role)[0];
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let root = (square + f64::from(self.model.config().rms_norm_eps)).sqrt();
        (0..x.len()).map(|index| x[index] / root * weight[index]).collect()
    }

    /// Heads of `x`, normed and rotated for `position`.
    fn heads(&self, layer: usize, norm: LayerTensor, x: &[f64], position: usize) -> Vec<Vec<f64>> {
        let config = self.model.config();
        let dims = config.rope.dims;
        x.chunks_exact(config.head_dim)
            .map(|head| {
                let mut head = match config.qk_norm {
                    true => self.norm(TensorRole::Layer(layer, norm), head),
                    false => head.to_vec(),
                };
                let before = head.clone();
                for element in 0..dims {
                    let (pair, partner, sign) = match config.rope.pairing {
                        RopePairing::Interleaved => {
                            (element / 2, element ^ 1, if element % 2 == 0 { -1.0 } else { 1.0 })
                        }
                        RopePairing::Halves if element < dims / 2 => (element, element + dims / 2, -1.0),
                        RopePairing::Halves => (element - dims / 2, element - dims / 2, 1.0),
                    };
                    let mut angle =
                        position as f64 / f64::from(config.rope.theta).powf(2.0 * pair as f64 / dims as f64);
                    if self.model.tensor(TensorRole::RopeFactors).is_some() {
                        angle /= 1.0 + pair as f64;
                    }
                    if let RopeScaling::Linear { factor } = config.rope.scaling {
                        angle /= f64::from(factor);
                    }
                    head[element] = before[element] * angle.cos() + sign * before[partner] * angle.sin();
                }
                head
            })
            .collect()
    }

    fn step(&mut self, token: TokenId) -> Vec<f64> {
        let config = self.model.config().clone();
        let position = self.keys[0].len();
        let mut x = self.weights(TensorRole::TokenEmbedding)[token as usize].clone();
        for layer in 0..config.layers {
            let normed = self.norm(TensorRole::Layer(layer, LayerTensor::InputNorm), &x);
            let q = self.project(layer, LayerTensor::Q, Some(LayerTensor::QBias), &normed);
            let k = self.project(layer, LayerTensor::K, Some(LayerTensor::KBias), &normed);
            let v = self.project(layer, LayerTensor::V, Some(LayerTensor::VBias), &normed);
            let q = self.heads(layer, LayerTensor::QNorm, &q, position);
            let k = self.heads(layer, LayerTensor::KNorm, &k, position).concat();
            self.keys[layer].push(k);
            self.values[layer].push(v);
            let mut attended = Vec::new();
            for (head, q) in q.iter().enumerate() {
                let at = head * config.kv_heads / config.heads * config.head_dim;
                let score = |key: &Vec<f64>| -> f64 { (0..q.len()).map(|index| q[index] * key[at + index]).sum() };
                let weights: Vec<f64> =
                    self.keys[layer].iter().map(|key| (score(key) / (q.len() as f64).sqrt()).exp()).collect();
                let total: f64 = weights.iter().sum();
                for index in 0..config.head_dim {
                    let values = self.values[layer].iter().zip(&weights);
                    attended.push(values.map(|(value, weight)| value[at + index] * weight).sum::<f64>() / total);
                }
            }
            let change = self.project(layer, LayerTensor::O, None, &attended);
            x.iter_mut().zip(change).for_each(|(x, change)| *x += change);
            let normed = self.norm(TensorRole::Layer(layer, LayerTensor::PostAttentionNorm), &x);
            let gate = self.project(layer, LayerTensor::Gate, None, &normed);
            let up = self.project(layer, LayerTensor::Up, None, &normed);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            let change = self.project(layer, LayerTensor::Down, None, &inner);
            x.iter_mut().zip(change).for_each(|(x, change)| *x += change);
        }
        let x = self.norm(TensorRole::FinalNorm, &x);
        let head = if config.tied_head { TensorRole::TokenEmbedding } else { TensorRole::Head };
        self.weights(head).iter().map(|row| row.iter().zip(&x).map(|(w, x)| w * x).sum()).collect()
    }
}

const TOKENS: [TokenId; 9] = [3, 32, 0, 7, 7, 19, 4, 11, 28];

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

fn open(model: &ModelSource, span: SegmentSpan, count: usize, dequantized_bytes: u64) -> ExactSegment {
    let options = ExactOptions { sequences: 2, dequantized_bytes, ..ExactOptions::new(16, threads(count)) };
    ExactSegment::open(model, span, options).unwrap()
}

fn whole(model: &ModelSource) -> ExactSegment {
    open(model, SegmentSpan::whole(model.config()), 1, 0)
}

fn rows(sequence: u32, from: usize, tokens: &[TokenId]) -> Vec<Row> {
    let row = |(index, &token)| Row { sequence: SequenceId(sequence), token, position: (from + index) as u32 };
    tokens.iter().enumerate().map(row).collect()
}

/// Bits of all rows.
fn forward(segment: &mut ExactSegment, rows: &[Row]) -> Vec<Vec<u32>> {
    let mut hidden = HiddenRows::new();
    segment.forward(rows, &mut hidden, Want::All, &Control::new()).unwrap();
    (0..hidden.rows()).map(|row| hidden.row(row).iter().map(|value| value.to_bits()).collect()).collect()
}

type Edit = fn(&mut Spec);

fn variants() -> Vec<(&'static str, Edit)> {
    vec![
        ("plain", |_| ()),
        ("interleaved", |spec| spec.config.rope.pairing = RopePairing::Interleaved),
        ("untied head", |spec| spec.config.tied_head = false),
        ("biases", |spec| spec.config.qkv_bias = true),
        ("q/k norm", |spec| spec.config.qk_norm = true),
        ("one key head", |spec| spec.config.kv_heads = 1),
        ("as many key heads", |spec| spec.config.kv_heads = 4),
        ("partial rotation", |spec| spec.config.rope.dims = 4),
        ("no rotation", |spec| spec.config.rope.dims = 0),
        ("linear scaling", |spec| spec.config.rope.scaling = RopeScaling::Linear { factor: 2.5 }),
        ("rope factors", |spec| spec.rope_factors = true),
        ("everything", |spec| {
            spec.config.qkv_bias = true;
            spec.config.qk_norm = true;
            spec.config.tied_head = false;
            spec.config.rope.dims = 4;
            spec.config.rope.pairing = RopePairing::Interleaved;
            spec.config.rope.scaling = RopeScaling::Linear { factor: 4.0 };
            spec.rope_factors = true;
        }),
    ]
}

#[test]
fn every_variant_agrees_with_the_reference() {
    let mut seen = Vec::new();
    for (name, edit) in variants() {
        let (_file, model) = random_model(edit);
        let mut reference = Reference::new(&model);
        let found = forward(&mut whole(&model), &rows(0, 0, &TOKENS));
        for (position, &token) in TOKENS.iter().enumerate() {
            let wanted = reference.step(token);
            for (found, wanted) in found[position].iter().map(|bits| f32::from_bits(*bits)).zip(wanted) {
                let distance = (f64::from(found) - wanted).abs();
                assert!(
                    distance < 1e-6 * (1.0 + wanted.abs()),
                    "{name}, position {position}: {found}, wanted {wanted}"
                );
            }
        }
        assert!(!seen.contains(&found), "{name} changes nothing: the test would not see it");
        seen.push(found);
    }
}

#[test]
fn a_chain_of_segments_is_the_whole() {
    let (_file, model) = random_model(|spec| spec.config.tied_head = false);
    let layers = model.config().layers;
    let segment = |layers, takes, yields| -> Box<dyn Segment> {
        Box::new(open(&model, SegmentSpan { layers, takes, yields }, 2, 0))
    };
    let chains = [
        vec![segment(0..1, Takes::Tokens, Yields::Hidden), segment(1..3, Takes::Hidden, Yields::Logits)],
        vec![segment(0..3, Takes::Tokens, Yields::Normed), segment(3..3, Takes::Normed, Yields::Logits)],
        vec![
            segment(0..0, Takes::Tokens, Yields::Hidden),
            segment(0..3, Takes::Hidden, Yields::Hidden),
            segment(3..3, Takes::Hidden, Yields::Logits),
        ],
    ];
    let wanted = forward(&mut whole(&model), &rows(0, 0, &TOKENS));
    for (index, chain) in chains.into_iter().enumerate() {
        let mut pipeline = Pipeline::new(chain, layers).unwrap();
        let mut logits = HiddenRows::new();
        let flags: Vec<bool> = (0..TOKENS.len()).map(|row| row % 3 == 1).collect();
        pipeline.step(&rows(0, 0, &TOKENS), Want::Each(&flags), &mut logits, &Control::new()).unwrap();
        let kept = wanted.iter().zip(&flags).filter(|(_, flag)| **flag);
        for (row, (wanted, _)) in kept.enumerate() {
            for (found, wanted) in logits.row(row).iter().zip(wanted) {
                // The residual stream is rounded to f32 between segments.
                assert!((found - f32::from_bits(*wanted)).abs() < 1e-5, "chain {index}: {found}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_row_does_not_depend_on_batch_threads_or_storage(
        cuts in proptest::collection::vec(1usize..TOKENS.len(), 0..4),
        count in 1usize..4,
        dequantized in any::<bool>(),
        beside in any::<bool>(),
        variant in 0usize..12,
    ) {
        let (_file, model) = random_model(variants()[variant].1);
        let wanted = forward(&mut whole(&model), &rows(0, 0, &TOKENS));
        let budget = if dequantized { u64::MAX } else { 0 };
        let mut segment = open(&model, SegmentSpan::whole(model.config()), count, budget);
        let mut cuts = cuts;
        cuts.extend([0, TOKENS.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        for cut in cuts.windows(2) {
            let (from, to) = (cut[0], cut[1]);
            let mut batch = rows(0, from, &TOKENS[from..to]);
            if beside {
                // A second sequence in the same calls, before and behind.
                let other = rows(1, from, &TOKENS[from..to]);
                batch.splice(0..0, other[..1].iter().copied());
                batch.extend_from_slice(&other[1..]);
            }
            let found = forward(&mut segment, &batch);
            for (row, found) in batch.iter().zip(&found) {
                prop_assert_eq!(found, &wanted[row.position as usize]);
            }
        }
    }

    #[test]
    fn a_truncated_sequence_continues_with_the_same_bits(keep in 0usize..TOKENS.len(), ask in 0usize..20) {
        let (_file, model) = random_model(|_| ());
        let mut segment = whole(&model);
        let wanted = forward(&mut segment, &rows(0, 0, &TOKENS));
        prop_assert_eq!(segment.truncate(SequenceId(0), ask.max(keep)), ask.max(keep).min(TOKENS.len()));
        prop_assert_eq!(segment.truncate(SequenceId(0), keep), keep);
        let again = forward(&mut segment, &rows(0, keep, &TOKENS[keep..]));
        prop_assert_eq!(&again[..], &wanted[keep..]);
    }
}

#[test]
fn rows_that_do_not_fit_are_refused_and_change_nothing() {
    let (_file, model) = random_model(|_| ());
    let mut segment = whole(&model);
    let wanted = forward(&mut segment, &rows(0, 0, &TOKENS));
    segment.truncate(SequenceId(0), 4);
    let mut message = |rows: &[Row]| {
        let result = segment.forward(rows, &mut HiddenRows::new(), Want::All, &Control::new());
        result.unwrap_err().to_string()
    };
    assert_eq!(message(&rows(0, 5, &[1])), "bad rows: sequence 0: wanted position 4, found 5");
    assert_eq!(message(&rows(0, 3, &[1])), "bad rows: sequence 0: wanted position 4, found 3");
    assert_eq!(message(&rows(0, 4, &[33])), "bad rows: token 33 of a vocabulary of 33");
    assert_eq!(message(&rows(2, 0, &[1])), "sequence: 2 exceeds the limit of 2");
    assert_eq!(message(&rows(0, 4, &[1; 13])), "positions: 17 exceeds the limit of 16");
    assert_eq!(message(&rows(0, 4, &[1; 300])), "rows of a call: 300 exceeds the limit of 256");
    assert_eq!(forward(&mut segment, &rows(0, 4, &TOKENS[4..])), wanted[4..]);
    let span = SegmentSpan { layers: 1..2, takes: Takes::Hidden, yields: Yields::Hidden };
    let mut hidden = HiddenRows::new();
    hidden.reset(2, 20);
    let error = open(&model, span, 1, 0).forward(&rows(0, 0, &[1]), &mut hidden, Want::All, &Control::new());
    assert_eq!(error.unwrap_err().to_string(), "bad rows: wanted 1 x 20 hidden values, found 2 x 20");
}

#[test]
fn a_cancelled_call_can_be_made_again() {
    let (_file, model) = random_model(|_| ());
    let wanted = forward(&mut whole(&model), &rows(0, 0, &TOKENS));

    /// Cancels in the middle of the layers.
    struct Canceller(Control);
    impl TapSink for Canceller {
        fn observe(&mut self, tap: Tap, _: Row, _: &[f32]) {
            if tap == Tap::LayerOut(1) {
                self.0.cancel();
            }
        }
    }

    let mut segment = whole(&model);
    let control = Control::new();
    segment.observe(Some(Box::new(Canceller(control.clone()))));
    let result = segment.forward(&rows(0, 0, &TOKENS), &mut HiddenRows::new(), Want::All, &control);
    assert!(matches!(result, Err(RunError::Cancelled)), "{result:?}");
    segment.observe(None);
    assert_eq!(segment.truncate(SequenceId(0), 0), 0);
    assert_eq!(forward(&mut segment, &rows(0, 0, &TOKENS)), wanted);
}

#[test]
fn taps_show_what_is_announced() {
    struct Counter(Arc<Mutex<BTreeMap<Tap, (usize, usize)>>>);
    impl TapSink for Counter {
        fn observe(&mut self, tap: Tap, _: Row, values: &[f32]) {
            let mut seen = self.0.lock().unwrap();
            let entry = seen.entry(tap).or_insert((0, values.len()));
            entry.0 += 1;
            assert_eq!(entry.1, values.len());
        }
    }

    let (_file, model) = random_model(|_| ());
    let mut segment = whole(&model);
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    segment.observe(Some(Box::new(Counter(Arc::clone(&seen)))));
    let mut hidden = HiddenRows::new();
    segment.forward(&rows(0, 0, &TOKENS), &mut hidden, Want::Last, &Control::new()).unwrap();
    assert_eq!((hidden.rows(), hidden.width()), (1, 33));
    let seen = seen.lock().unwrap();
    let mut announced = segment.taps().to_vec();
    announced.sort_unstable();
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), announced);
    assert_eq!((seen[&Tap::LayerOut(2)], seen[&Tap::K(0)], seen[&Tap::V(1)]), ((9, 20), (9, 12), (9, 12)));
    assert_eq!((seen[&Tap::Normed], seen[&Tap::Logits]), ((1, 20), (1, 33)), "of the wanted row only");
}

#[test]
fn models_that_cannot_be_opened_say_why() {
    let open = |edit: Edit| {
        let (_file, model) = random_model(edit);
        let options = ExactOptions::new(16, threads(1));
        ExactSegment::open(&model, SegmentSpan::whole(model.config()), options).err().map(|error| error.to_string())
    };
    let missing = open(|spec| spec.without = Some(TensorRole::Layer(1, LayerTensor::Up))).unwrap();
    assert!(missing.contains("Layer(1, Up) is missing"), "{missing}");
    let zero = open(|spec| spec.config.context_length = 0).unwrap();
    assert!(zero.contains("context_length is 0"), "{zero}");
    let odd = open(|spec| spec.config.rope.dims = 5).unwrap();
    assert!(odd.contains("rope.dims is 5 for heads of 6"), "{odd}");
    let scaling = open(|spec| spec.config.rope.scaling = RopeScaling::Linear { factor: 0.0 }).unwrap();
    assert!(scaling.contains("rope.scaling is Linear { factor: 0.0 }"), "{scaling}");
    assert_eq!(open(|_| ()), None);

    let (_file, model) = random_model(|_| ());
    let mut config = model.config().clone();
    config.intermediate_size = 28;
    let tensors = model.tensors().map(|(role, tensor)| (role, tensor.clone())).collect();
    let lying = ModelSource::new(model.path().to_owned(), Format::Gguf, config, Vocabulary::default(), tensors);
    let error = ExactSegment::open(&lying, SegmentSpan::whole(lying.config()), ExactOptions::new(16, threads(1)));
    let error = error.err().map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(error, "tensor Layer(0, Gate) is 27 x 20; the configuration says 28 x 20");
}

#[test]
fn damaged_weights_are_noticed() {
    let (_file, model) = random_model(|spec| spec.poisoned = Some(TensorRole::Layer(2, LayerTensor::Down)));
    let result = whole(&model).forward(&rows(0, 0, &[1, 2]), &mut HiddenRows::new(), Want::Last, &Control::new());
    let message = result.unwrap_err().to_string();
    assert!(message.starts_with("Logits of sequence 0 at position 1 is not finite"), "{message}");
}
