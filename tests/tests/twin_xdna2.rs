//! The xdna2 lane's twin: against the oracle over the same weights, and the lane on a virtual NPU against the twin.

#![allow(clippy::print_stdout, reason = "measured figures are a part of what the tests show")]

use npuhal_amdxdna::NpuDevice;
use npuhal_core::dtype::bf16_bits;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Takes, Tap, TapSink, Want, Yields};
use npuhal_cpu::exact::{ExactOptions, ExactSegment};
use npuhal_cpu::twin::{TwinError, Xdna2Options, Xdna2Segment};
use npuhal_models::map::FileMap;
use npuhal_models::q4nx::{PackOptions, TiledTensor, pack};
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelConfig, ModelSource, Tensor, TensorRole, WeightType};
use npuhal_registry::{DeviceAddress, DeviceChoice, Registry, Request, SegmentSpan, select};
use npuhal_tests::kit::gguf::GgufFile;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::random::Random;
use npuhal_virtual::design::qwen3;
use npuhal_virtual::{VirtualDevice, VirtualSpec, kit};
use npuhal_xdna2::kernels::KernelFiles;
use npuhal_xdna2::lane::{Lane, LaneOptions, LaneSource, LayerTensors};
use npuhal_xdna2::packing::{PackError, SliceTiles, TileSource};
use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Twelve blocks of the cache and a bit; fewer without optimization.
const LONGEST: u32 = if cfg!(debug_assertions) { 40 } else { 200 };
const POSITIONS: u32 = 256;

/// Four layers, hidden size 256, 320 tokens.
fn small(weights: Weights, seed: u64) -> ModelSpec {
    let mut spec = ModelSpec::small(Architecture::Qwen3, weights);
    (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) = (256, 4, 2, 128, 512);
    (spec.layers, spec.seed, spec.spare_tokens) = (4, seed, 320 - 266);
    (spec.rope_theta, spec.eps) = (1e6, 1e-6);
    spec
}

/// A model packed into a directory.
struct Packed {
    _folder: TempDir,
    gguf: PathBuf,
    model: Arc<ModelSource>,
}

impl Packed {
    fn new(spec: &ModelSpec) -> Self {
        Self::of(&spec.build())
    }

    fn of(file: &GgufFile) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (gguf, out) = (folder.path().join("model.gguf"), folder.path().join("packed"));
        file.write(&gguf).unwrap();
        pack(&gguf, &out, &PackOptions::default(), &Control::new(), &mut |_| {}).unwrap();
        let model = Arc::new(ModelSource::open(&out).unwrap());
        Self { _folder: folder, gguf, model }
    }

    /// The same weights as f32 rows.
    fn rows(&self) -> (TempDir, ModelSource) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows");
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
        let mut placed = Vec::new();
        let mut end = 0;
        for (role, tiled) in self.model.tiled_tensors() {
            let start = end;
            let mut strip = vec![0.0; 32 * tiled.cols()];
            for index in 0..tiled.rows() / 32 {
                tiled.decode_strip(index, None, &mut strip).unwrap();
                strip.iter().for_each(|value| file.write_all(&value.to_le_bytes()).unwrap());
                end += 4 * strip.len();
            }
            placed.push((role, tiled.name().to_owned(), tiled.rows(), tiled.cols(), start..end));
        }
        file.into_inner().unwrap().sync_all().unwrap();
        let map = Arc::new(FileMap::open(&path).unwrap());
        let mut tensors: BTreeMap<TensorRole, Tensor> =
            self.model.tensors().map(|(role, tensor)| (role, tensor.clone())).collect();
        for (role, name, rows, cols, range) in placed {
            let tensor = Tensor::new(name, WeightType::F32, rows, cols, Arc::clone(&map), range).unwrap();
            tensors.insert(role, tensor);
        }
        let model = &self.model;
        let (config, vocabulary) = (model.config().clone(), model.vocabulary().clone());
        (folder, ModelSource::new(path, model.format(), config, vocabulary, tensors))
    }
}

/// The lane's view of a packed model.
struct Source(Arc<ModelSource>);

impl Source {
    fn tiles(&self, role: TensorRole) -> Box<dyn TileSource + '_> {
        let tiled: &TiledTensor = self.0.tiled(role).unwrap();
        Box::new(SliceTiles { name: tiled.name(), count: tiled.tiles(), available: tiled.available() })
    }

    fn bytes(&self, role: TensorRole) -> &[u8] {
        self.0.tensor(role).unwrap().bytes()
    }
}

impl LaneSource for Source {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn layer(&self, layer: usize) -> Result<LayerTensors<'_>, PackError> {
        let role = |part| TensorRole::Layer(layer, part);
        Ok(LayerTensors {
            q: self.tiles(role(LayerTensor::Q)),
            k: self.tiles(role(LayerTensor::K)),
            v: self.tiles(role(LayerTensor::V)),
            o: self.tiles(role(LayerTensor::O)),
            gate: self.tiles(role(LayerTensor::Gate)),
            up: self.tiles(role(LayerTensor::Up)),
            down: self.tiles(role(LayerTensor::Down)),
            input_norm: self.bytes(role(LayerTensor::InputNorm)),
            post_attention_norm: self.bytes(role(LayerTensor::PostAttentionNorm)),
            q_norm: Some(self.bytes(role(LayerTensor::QNorm))),
            k_norm: Some(self.bytes(role(LayerTensor::KNorm))),
        })
    }

    fn head(&self) -> Result<Box<dyn TileSource + '_>, PackError> {
        Ok(self.tiles(TensorRole::Head))
    }

    fn final_norm(&self) -> Result<&[u8], PackError> {
        Ok(self.bytes(TensorRole::FinalNorm))
    }

    fn embedding(&self) -> Result<&[u8], PackError> {
        Ok(self.bytes(TensorRole::TokenEmbedding))
    }
}

fn kernels(config: &ModelConfig) -> KernelFiles {
    let dimensions = qwen3::Dimensions {
        hidden: config.hidden_size,
        heads: config.heads,
        kv_heads: config.kv_heads,
        intermediate: config.intermediate_size,
        vocab: config.vocab_size,
        norm_epsilon: config.rms_norm_eps,
    };
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in kit::qwen3(&dimensions, POSITIONS).unwrap().files() {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    KernelFiles::read(folder.path()).unwrap()
}

fn lane(model: &Arc<ModelSource>, files: &KernelFiles) -> (Arc<VirtualDevice>, Lane) {
    let spec: VirtualSpec = "virtual:npu5".parse().unwrap();
    let hardware = VirtualDevice::new(&spec);
    let npu = NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap();
    let source = Box::new(Source(Arc::clone(model)));
    (hardware, Lane::load(Box::new(npu), source, files, LaneOptions::default()).unwrap())
}

fn twin(model: &ModelSource) -> Xdna2Segment {
    twin_of(model, SegmentSpan::whole(model.config()))
}

fn twin_of(model: &ModelSource, span: SegmentSpan) -> Xdna2Segment {
    let threads = NonZeroUsize::new(2).unwrap();
    let options = Xdna2Options { positions: POSITIONS, sequences: 1, threads };
    Xdna2Segment::open(model, span, options).unwrap()
}

fn exact(model: &ModelSource) -> ExactSegment {
    let options = ExactOptions::new(POSITIONS, NonZeroUsize::new(2).unwrap());
    ExactSegment::open(model, SegmentSpan::whole(model.config()), options).unwrap()
}

fn tokens(config: &ModelConfig, count: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(config.vocab_size as u64) as u32).collect()
}

/// Values at taps, by layer and kind.
type Taps = Vec<(Tap, Vec<f32>)>;

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Taps>>);

impl TapSink for Seen {
    fn observe(&mut self, tap: Tap, _row: Row, values: &[f32]) {
        self.0.lock().unwrap().push((tap, values.to_vec()));
    }
}

/// Results and taps of every token, one call each.
fn run(segment: &mut dyn Segment, tokens: &[u32]) -> Vec<(Vec<f32>, Taps)> {
    run_from(segment, tokens, |_| &[])
}

/// The same from the hidden row that `input` gives for each position; an empty one is the token's embedding.
fn run_from<'a>(
    segment: &mut dyn Segment,
    tokens: &[u32],
    input: impl Fn(usize) -> &'a [f32],
) -> Vec<(Vec<f32>, Taps)> {
    let seen = Seen::default();
    segment.observe(Some(Box::new(seen.clone())));
    segment.begin().unwrap();
    let mut step = |(position, token): (u32, &u32)| {
        let row = Row { sequence: SequenceId(0), token: *token, position };
        let input = input(position as usize);
        let mut hidden = HiddenRows::new();
        hidden.reset(1, input.len());
        hidden.as_mut_slice().copy_from_slice(input);
        segment.forward(&[row], &mut hidden, Want::Last, &Control::new()).unwrap();
        (hidden.row(0).to_vec(), std::mem::take(&mut *seen.0.lock().unwrap()))
    };
    let rows = (0..).zip(tokens).map(&mut step).collect();
    segment.end();
    rows
}

/// Values at `tap` of one token.
fn at(taps: &[(Tap, Vec<f32>)], tap: Tap) -> &[f32] {
    &taps.iter().find(|(other, _)| *other == tap).unwrap_or_else(|| panic!("{tap:?} was not shown")).1
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn first_largest(values: &[f32]) -> usize {
    (0..values.len()).fold(0, |best, index| if values[index] > values[best] { index } else { best })
}

/// Distance of the two largest.
fn margin(values: &[f32]) -> f64 {
    let best = first_largest(values);
    let others = values.iter().enumerate().filter(|(index, _)| *index != best);
    f64::from(values[best]) - others.map(|(_, value)| f64::from(*value)).fold(f64::NEG_INFINITY, f64::max)
}

/// Steps of bf16 between two bf16 values.
fn bf16_steps(a: f32, b: f32) -> u32 {
    let place = |x: f32| {
        let bits = i32::from(bf16_bits(x));
        if bits & 0x8000 == 0 { bits } else { 0x8000 - bits }
    };
    place(a).abs_diff(place(b))
}

/// Holds logits against those of the oracle: cosine, and the argmax wherever the margin is above twice the largest error.
fn assert_near_exact(found: &[(Vec<f32>, Taps)], wanted: &[(Vec<f32>, Taps)]) {
    let pairs = || found.iter().map(|(logits, _)| logits).zip(wanted.iter().map(|(logits, _)| logits));
    let errors = pairs().flat_map(|(a, b)| a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())));
    let error = errors.fold(0.0, f64::max);
    let (mut compared, mut lowest) = (0, 1.0);
    for (context, (found, wanted)) in (1..).zip(pairs()) {
        let cosine = cosine(found, wanted);
        lowest = f64::min(lowest, cosine);
        assert!(cosine >= 0.9999, "context {context}: cosine {cosine}");
        if margin(wanted) > 2.0 * error {
            compared += 1;
            assert_eq!(first_largest(found), first_largest(wanted), "context {context}");
        }
    }
    println!("cosine of logits from {lowest:.7}; largest error {error:.4}; argmax compared in {compared} rows");
    assert!(compared > found.len() / 4, "margins above twice {error} in {compared} rows");
}

/// How far the elements of one kind of tap are apart.
#[derive(Default, Clone, Copy)]
struct Distance {
    elements: usize,
    /// Not the same bf16.
    different: usize,
    /// More than one bf16 step of the element.
    steps_apart: usize,
    /// More than one bf16 step at the scale of the row: of the larger element, or of the row's root mean square.
    scale_apart: usize,
    /// Steps of the element.
    most_steps: u32,
}

impl Distance {
    fn add_row(&mut self, found: &[f32], wanted: &[f32]) {
        assert_eq!(found.len(), wanted.len());
        let squares = wanted.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        let scale = (squares / wanted.len() as f64).sqrt();
        for (a, b) in found.iter().zip(wanted) {
            let steps = bf16_steps(*a, *b);
            let (a, b) = (f64::from(*a), f64::from(*b));
            let step = 2f64.powf(a.abs().max(b.abs()).max(scale).log2().floor() - 7.0);
            self.elements += 1;
            self.different += usize::from(steps > 0);
            self.steps_apart += usize::from(steps > 1);
            self.scale_apart += usize::from((a - b).abs() > step);
            self.most_steps = self.most_steps.max(steps);
        }
    }

    fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.different += other.different;
        self.steps_apart += other.steps_apart;
        self.scale_apart += other.scale_apart;
        self.most_steps = self.most_steps.max(other.most_steps);
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { elements, different, steps_apart, scale_apart, most_steps } = self;
        let percent = |part: &usize| 100.0 * *part as f64 / *elements as f64;
        let (steps, scale) = (percent(steps_apart), percent(scale_apart));
        let any = percent(different);
        write!(
            f,
            "of {elements} elements {different} ({any:.3} %) differ, {steps_apart} ({steps:.3} %) more than one bf16 step apart, at most {most_steps}; "
        )?;
        write!(f, "{scale_apart} ({scale:.3} %) at the row's scale")
    }
}

fn distance<'a>(rows: impl IntoIterator<Item = (&'a [f32], &'a [f32])>) -> Distance {
    let mut distance = Distance::default();
    rows.into_iter().for_each(|(found, wanted)| distance.add_row(found, wanted));
    distance
}

/// Lane and twin take their sums in the same order, so that outputs of layers that started from the same rows are the same.
fn assert_same_bits(distance: &Distance) {
    assert!(distance.elements > 0 && distance.different == 0, "{distance}");
}

/// Holds outputs of layers that started from the same rows against each other, whatever the order of their sums: 999 of 1000
/// elements within one bf16 step of their own, and so at the scale of their row.
fn assert_one_step(distance: &Distance) {
    let Distance { elements, steps_apart, scale_apart, .. } = *distance;
    assert!(elements > 0 && steps_apart * 1000 <= elements && scale_apart * 1000 <= elements, "{distance}");
}

/// Compares each layer by itself: the twin's starts from the rows that the lane put into its own, all positions, so that its
/// cache is filled from them too.
fn layers_alone(model: &ModelSource, tokens: &[u32], found: &[(Vec<f32>, Taps)]) -> Distance {
    let mut sum = Distance::default();
    for layer in 0..model.config().layers {
        let takes = if layer == 0 { Takes::Tokens } else { Takes::Hidden };
        let mut alone = twin_of(model, SegmentSpan { layers: layer..layer + 1, takes, yields: Yields::Hidden });
        let number = layer as u32;
        let input = |position: usize| -> &[f32] {
            if layer == 0 { &[] } else { at(&found[position].1, Tap::LayerOut(number - 1)) }
        };
        let wanted = run_from(&mut alone, tokens, input);
        for tap in [Tap::K(number), Tap::V(number), Tap::LayerOut(number)] {
            let rows = found.iter().zip(&wanted).map(|((_, found), (_, wanted))| (at(found, tap), at(wanted, tap)));
            let distance = distance(rows);
            println!("{tap:?}: {distance}");
            if matches!(tap, Tap::LayerOut(_)) {
                sum.add(&distance);
            }
        }
    }
    sum
}

#[test]
fn the_twin_is_near_the_oracle() {
    for (weights, seed) in [(Weights::LikeQ4KM, 1), (Weights::Uniform(WeightType::Q4_1), 2)] {
        let packed = Packed::new(&small(weights, seed));
        let tokens = tokens(packed.model.config(), LONGEST, 3);
        let (_folder, rows) = packed.rows();
        assert_near_exact(&run(&mut twin(&packed.model), &tokens), &run(&mut exact(&rows), &tokens));
    }
}

#[test]
fn the_lane_rounds_as_its_twin() {
    let packed = Packed::new(&small(Weights::LikeQ4KM, 4));
    let tokens = tokens(packed.model.config(), LONGEST, 5);
    let (hardware, mut lane) = lane(&packed.model, &kernels(packed.model.config()));
    let found = run(&mut lane, &tokens);
    assert!(hardware.diagnoses().is_empty(), "{:?}", hardware.diagnoses());
    let wanted = run(&mut twin(&packed.model), &tokens);
    let (_folder, rows) = packed.rows();
    let oracle = run(&mut exact(&rows), &tokens);
    assert_near_exact(&found, &oracle);
    let lowest = found.iter().zip(&wanted).map(|((a, _), (b, _))| cosine(a, b)).fold(1.0, f64::min);
    println!("cosine of lane and twin from {lowest:.8}");
    assert!(lowest >= 0.9999, "cosine {lowest}");
    assert_same_bits(&layers_alone(&packed.model, &tokens, &found));
}

/// Elements of a block of Q4_0, and its bytes.
const BLOCK: (usize, usize) = (32, 18);
/// Bytes of a block of Q4_1.
const Q4_1_BYTES: usize = 20;
const HEAD: usize = 128;

/// The same model with its features in another order: blocks of 32 of the hidden and the feed-forward features reversed, and
/// the heads. Its weights are Q4_0. What is rounded, and to what, is the same; sums have another order.
fn reordered(mut file: GgufFile) -> GgufFile {
    for tensor in &mut file.tensors {
        let cols = tensor.dims[0] as usize;
        let part = tensor.name.trim_end_matches(".weight").rsplit('.').next().unwrap().to_owned();
        // Features that change places together, along a row and from row to row; 0 where they stay.
        let (across, down) = match part.as_str() {
            "token_embd" => (BLOCK.0, 0),
            "attn_q" | "attn_k" | "attn_v" => (BLOCK.0, HEAD),
            "attn_output" => (HEAD, BLOCK.0),
            "ffn_gate" | "ffn_up" | "ffn_down" => (BLOCK.0, BLOCK.0),
            "attn_norm" | "ffn_norm" | "output_norm" => (BLOCK.0, 0),
            "attn_q_norm" | "attn_k_norm" => (0, 0),
            other => panic!("{other}"),
        };
        let is_vector = tensor.dims.len() == 1;
        let bytes_of = |features: usize| if is_vector { 4 * features } else { features / BLOCK.0 * BLOCK.1 };
        if across > 0 {
            let rows = tensor.bytes.chunks_exact(bytes_of(cols));
            tensor.bytes = rows.flat_map(|row| row.rchunks_exact(bytes_of(across)).flatten()).copied().collect();
        }
        if down > 0 {
            tensor.bytes = tensor.bytes.rchunks_exact(down * bytes_of(cols)).flatten().copied().collect();
        }
    }
    file
}

/// A row with its blocks reversed.
fn in_other_order(row: &[f32]) -> Vec<f32> {
    row.rchunks_exact(BLOCK.0).flatten().copied().collect()
}

/// Outputs of each layer by itself, from the rows that the lane put into its own.
fn outputs_alone(model: &ModelSource, tokens: &[u32], layer: usize, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let takes = if layer == 0 { Takes::Tokens } else { Takes::Hidden };
    let mut alone = twin_of(model, SegmentSpan { layers: layer..layer + 1, takes, yields: Yields::Hidden });
    let input = |position: usize| -> &[f32] { if layer == 0 { &[] } else { &inputs[position] } };
    let rows = run_from(&mut alone, tokens, input);
    rows.iter().map(|(_, taps)| at(taps, Tap::LayerOut(layer as u32)).to_vec()).collect()
}

/// The description of the lane does not say in which order its sums are taken. What an order can do is seen on the twin itself.
#[test]
fn other_orders_of_sums_stay_within_a_step() {
    let file = small(Weights::Uniform(WeightType::Q4_0), 14).build();
    let (packed, other) = (Packed::of(&file), Packed::of(&reordered(file.clone())));
    let tokens = tokens(packed.model.config(), LONGEST, 15);
    let (hardware, mut lane) = lane(&packed.model, &kernels(packed.model.config()));
    let found = run(&mut lane, &tokens);
    assert!(hardware.diagnoses().is_empty(), "{:?}", hardware.diagnoses());
    let (mut of_lane, mut of_order) = (Distance::default(), Distance::default());
    let mut inputs = Vec::new();
    for layer in 0..packed.model.config().layers {
        let turned: Vec<_> = inputs.iter().map(|row: &Vec<f32>| in_other_order(row)).collect();
        let wanted = outputs_alone(&packed.model, &tokens, layer, &inputs);
        let turned = outputs_alone(&other.model, &tokens, layer, &turned);
        let tap = Tap::LayerOut(layer as u32);
        inputs = found.iter().map(|(_, taps)| at(taps, tap).to_vec()).collect();
        for ((lane, twin), other) in inputs.iter().zip(&wanted).zip(&turned) {
            of_lane.add_row(lane, twin);
            of_order.add_row(&in_other_order(other), twin);
        }
    }
    println!("lane and twin: {of_lane}");
    println!("twin in two orders: {of_order}");
    assert_same_bits(&of_lane);
    assert_one_step(&of_order);
    assert!(of_order.different > 0, "the order of sums was not changed: {of_order}");
}

/// Recorded control code of the published layer kernel, where it is at hand.
fn published(test: &str) -> Option<KernelFiles> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/xdna2/derived");
    if !folder.is_dir() {
        println!("skipped: {test}: {} is not here", folder.display());
        return None;
    }
    let layer = [1, 2, 17].map(|context| std::fs::read(folder.join(format!("layer_ctx{context}.elf"))).unwrap());
    Some(KernelFiles { layer, head: Vec::new(), pdi: Vec::new() })
}

#[test]
fn published_control_code_drives_a_layer_as_the_twin_computes_it() {
    let Some(recorded) = published("published_control_code") else { return };
    let mut spec = small(Weights::LikeQ4KM, 6);
    (spec.hidden, spec.heads, spec.kv_heads, spec.intermediate, spec.layers) = (1024, 16, 8, 3072, 1);
    spec.context_length = 512;
    let packed = Packed::new(&spec);
    let made = kernels(packed.model.config());
    let files = KernelFiles { layer: recorded.layer, ..made };
    let tokens = tokens(packed.model.config(), 256, 7);
    let (hardware, mut lane) = lane(&packed.model, &files);
    let found = run(&mut lane, &tokens);
    assert!(hardware.diagnoses().is_empty(), "{:?}", hardware.diagnoses());
    let wanted = run(&mut twin(&packed.model), &tokens);
    let mut of_all = Distance::default();
    for (context, ((found, found_taps), (wanted, wanted_taps))) in (1..).zip(found.iter().zip(&wanted)) {
        let cosine = cosine(found, wanted);
        assert!(cosine >= 0.9999, "context {context}: cosine {cosine}");
        for tap in [Tap::K(0), Tap::V(0)] {
            assert_eq!(at(found_taps, tap), at(wanted_taps, tap), "context {context}, {tap:?}");
        }
        let tap = Tap::LayerOut(0);
        let distance = distance([(at(found_taps, tap), at(wanted_taps, tap))]);
        if distance.different > 0 {
            println!("context {context}: cosine of logits {cosine:.8}; {distance}");
        }
        of_all.add(&distance);
    }
    println!("all contexts to 256: {of_all}");
    assert_eq!(of_all.elements, 256 * 1024);
    assert_same_bits(&of_all);
}

/// Keeps of a Q4_1 matrix the blocks that `keep` names by row and block of 32 columns; the others become zero.
fn keep_blocks(file: &mut GgufFile, name: &str, keep: impl Fn(usize, usize) -> bool) {
    let tensor = file.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    let row_bytes = tensor.dims[0] as usize / BLOCK.0 * Q4_1_BYTES;
    for (row, bytes) in tensor.bytes.chunks_exact_mut(row_bytes).enumerate() {
        for (block, bytes) in bytes.as_chunks_mut::<Q4_1_BYTES>().0.iter_mut().enumerate() {
            if !keep(row, block) {
                bytes.fill(0);
            }
        }
    }
}

/// Makes the first rows of a Q4_1 matrix copy their column, and empties the others.
fn copy_columns(file: &mut GgufFile, name: &str, rows: usize) {
    keep_blocks(file, name, |_, _| false);
    let tensor = file.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    let row_bytes = tensor.dims[0] as usize / BLOCK.0 * Q4_1_BYTES;
    for (row, bytes) in tensor.bytes.chunks_exact_mut(row_bytes).enumerate().take(rows) {
        let block = &mut bytes[row / BLOCK.0 * Q4_1_BYTES..][..Q4_1_BYTES];
        let (half, pair) = (row % BLOCK.0 / 16, row % 16);
        // A scale of 1, a zero of 0, one code of 1.
        block[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
        block[4 + pair] = 1 << (4 * half);
    }
}

/// The operands of a layer's products, which no buffer of the lane shows, made visible by weights that copy them into features
/// where the residual stream is zero: attention outputs by the output projection, SwiGLU products by the down projection. All
/// have the twin's bits at all contexts.
#[test]
fn operands_inside_a_layer_have_the_bits_of_the_twin() {
    let mut spec = small(Weights::Uniform(WeightType::Q4_1), 6);
    spec.layers = 1;
    // Half the features, all elements of one head.
    let shown = spec.hidden / 2;
    for (copied, emptied) in [("attn_output", "ffn_down"), ("ffn_down", "attn_output")] {
        let mut file = spec.build();
        keep_blocks(&mut file, "token_embd.weight", |_, block| block >= shown / BLOCK.0);
        keep_blocks(&mut file, &format!("blk.0.{emptied}.weight"), |_, _| false);
        copy_columns(&mut file, &format!("blk.0.{copied}.weight"), shown);
        let packed = Packed::of(&file);
        let tokens = tokens(packed.model.config(), LONGEST, 7);
        let (hardware, mut lane) = lane(&packed.model, &kernels(packed.model.config()));
        let found = run(&mut lane, &tokens);
        assert!(hardware.diagnoses().is_empty(), "{:?}", hardware.diagnoses());
        let wanted = run(&mut twin(&packed.model), &tokens);
        for (context, ((_, found), (_, wanted))) in (1..).zip(found.iter().zip(&wanted)) {
            let operands = &at(found, Tap::LayerOut(0))[..shown];
            assert_eq!(operands, &at(wanted, Tap::LayerOut(0))[..shown], "{copied}, context {context}");
            assert!(
                operands.iter().filter(|operand| **operand != 0.0).count() > shown / 2,
                "{copied}: nothing is shown"
            );
        }
    }
}

#[test]
fn a_gguf_file_of_four_bit_weights_gives_the_bits_of_its_packed_directory() {
    for kind in [WeightType::Q4_0, WeightType::Q4_1, WeightType::Q4K] {
        let packed = Packed::new(&small(Weights::Uniform(kind), 8));
        let tokens = tokens(packed.model.config(), 6, 9);
        let gguf = ModelSource::open(&packed.gguf).unwrap();
        assert_eq!(run(&mut twin(&gguf), &tokens), run(&mut twin(&packed.model), &tokens), "{kind}");
    }
}

#[test]
fn rows_of_one_call_are_the_rows_of_many() {
    let packed = Packed::new(&small(Weights::LikeQ4KM, 10));
    let tokens = tokens(packed.model.config(), 37, 11);
    let alone = run(&mut twin(&packed.model), &tokens);
    let threads = NonZeroUsize::MIN;
    let options = Xdna2Options { positions: 37, sequences: 1, threads };
    let mut together = Xdna2Segment::open(&packed.model, SegmentSpan::whole(packed.model.config()), options).unwrap();
    let row = |(position, token): (u32, &u32)| Row { sequence: SequenceId(0), token: *token, position };
    let rows: Vec<Row> = (0..).zip(&tokens).map(row).collect();
    let mut logits = HiddenRows::new();
    together.forward(&rows, &mut logits, Want::All, &Control::new()).unwrap();
    for (position, (alone, _)) in alone.iter().enumerate() {
        assert_eq!(logits.row(position), alone.as_slice(), "position {position}");
    }
}

#[test]
fn the_route_runs_a_packed_directory_in_the_lanes_numerics() {
    use npuhal_core::stage::Session;
    let packed = Packed::new(&small(Weights::LikeQ4KM, 12));
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let device = DeviceChoice::Pinned(DeviceAddress::Cpu.into());
    let mut request = Request { device, ..Request::default() };
    request.options.set_pair("numerics=xdna2", &[]).unwrap();
    let choice = select(&registry, &packed.model, &request).unwrap();
    let Ok(Session::Stepper(mut stepper)) = choice.open(&registry, &packed.model, &request.options) else {
        panic!("the CPU opens steppers")
    };
    let mut logits = HiddenRows::new();
    let row = Row { sequence: SequenceId(0), token: 3, position: 0 };
    stepper.step(&[row], Want::Last, &mut logits, &Control::new()).unwrap();
    assert_eq!(logits.row(0), run(&mut twin(&packed.model), &[3])[0].0);
}

#[test]
fn what_the_lane_does_not_compute_is_refused_in_one_line() {
    let refused = |spec: ModelSpec| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        spec.build().write(&path).unwrap();
        let model = ModelSource::open(&path).unwrap();
        let options = Xdna2Options { positions: 8, sequences: 1, threads: NonZeroUsize::MIN };
        let error = Xdna2Segment::open(&model, SegmentSpan::whole(model.config()), options).unwrap_err();
        assert!(matches!(error, TwinError::Config { .. } | TwinError::Weights { .. }), "{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        error.to_string()
    };
    let small = || small(Weights::LikeQ4KM, 13);
    let error = refused(small());
    assert!(error.contains("tensor blk.0.attn_v.weight is stored as Q6_K; wanted q4_1 or Q4_K tiles"), "{error}");
    let error = refused(ModelSpec { architecture: Architecture::Qwen2, ..small() });
    assert!(error.contains("numerics xdna2 cannot run this model: model_type is qwen2"), "{error}");
    let error = refused(ModelSpec { head_dim: 64, ..small() });
    assert!(error.contains("head_dim is 64"), "{error}");
    let error = refused(ModelSpec { rope_factor: Some(2.0), ..small() });
    assert!(error.contains("rope.scaling"), "{error}");
    let q4k = Weights::Uniform(WeightType::Q4K);
    let error = refused(ModelSpec { weights: q4k, spare_tokens: 0, ..small() });
    assert!(error.contains("token_embd.weight is stored as 266 x 256 elements, no whole tiles"), "{error}");
}
