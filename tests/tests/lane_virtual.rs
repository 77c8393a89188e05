//! The full-ELF lane on the virtual NPU: its files, packing and control on one side, the cores' arithmetic on the other,
//! and a reference in f64 over the same weights.

use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::format::elf::{Elf, Rela, Section};
use npuhal_amdxdna::format::txn::HEADER_BYTES;
use npuhal_core::device::{Arg, BufferSpec, Deadline, Device, Program};
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Tap, TapSink, Want};
use npuhal_models::ModelConfig;
use npuhal_models::config::{DecoderFeatures, Rope, RopePairing, RopeScaling};
use npuhal_tests::kit::random::Random;
use npuhal_virtual::design::qwen3;
use npuhal_virtual::{Profile, VirtualDevice, VirtualSpec, kit};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::full_elf::{FullElfRequest, PdiMode, assemble};
use npuhal_xdna2::instruction_elf::InstructionElf;
use npuhal_xdna2::kernels::{KernelFiles, Kernels};
use npuhal_xdna2::lane::{Lane, LaneError, LaneOptions, LaneSource, LayerTensors};
use npuhal_xdna2::packing::{PackError, SliceTiles, TileSource};
use std::sync::{Arc, Mutex};

const HEAD: usize = 128;
const TILE_BYTES: usize = 5120;
const POSITIONS: u32 = 208;
/// Bytes of a write in control code.
const WRITE_BYTES: usize = 24;
/// Twelve blocks of the cache and a bit; fewer without optimization.
const LONGEST: u32 = if cfg!(debug_assertions) { 72 } else { 200 };

/// A bf16 as a file holds it.
fn bf16(value: f64) -> [u8; 2] {
    let bits = (value as f32).to_bits();
    (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
}

fn value_of(bytes: [u8; 2]) -> f64 {
    f64::from(f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

/// A matrix as a file holds it, and what that means.
struct Matrix {
    tiles: Vec<u8>,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// Random codes; scales such that a row has a length of about `length`.
    fn random(random: &mut Random, rows: usize, columns: usize, length: f64) -> Self {
        let mut matrix = Self {
            tiles: vec![0; rows / 32 * (columns / 256) * TILE_BYTES],
            columns,
            values: vec![0.0; rows * columns],
        };
        let spread = length / (4.6 * (columns as f64).sqrt());
        for row in 0..rows {
            for group in 0..columns / 32 {
                let scale = bf16(spread * (1.0 + 0.5 * random.signed()));
                let zero = bf16(-value_of(scale) * (7.5 + random.signed()));
                let tile = row / 32 * (columns / 256) + group / 8;
                let tile = &mut matrix.tiles[tile * TILE_BYTES..(tile + 1) * TILE_BYTES];
                let (r, g) = (row % 32, group % 8);
                let index = 2 * (32 * g + r);
                tile[index..index + 2].copy_from_slice(&scale);
                tile[512 + index..514 + index].copy_from_slice(&zero);
                for column in 0..32 {
                    let code = random.below(16) as u8;
                    tile[1024 + (r / 16 * 8 + g) * 256 + 8 * column + r % 16 / 2] |= code << (4 * (r % 2));
                    matrix.values[row * columns + 32 * group + column] =
                        f64::from(code) * value_of(scale) + value_of(zero);
                }
            }
        }
        matrix
    }

    fn times(&self, operand: &[f64]) -> Vec<f64> {
        self.values.chunks_exact(self.columns).map(|row| dot(row, operand)).collect()
    }

    fn source<'a>(&'a self, name: &'a str) -> Box<dyn TileSource + 'a> {
        Box::new(SliceTiles { name, count: self.tiles.len() / TILE_BYTES, available: &self.tiles })
    }
}

/// Rows of bf16 as a file holds them, and what that means.
struct Vector {
    bytes: Vec<u8>,
    values: Vec<f64>,
}

impl Vector {
    fn random(random: &mut Random, len: usize, offset: f64, scale: f64) -> Self {
        let bytes: Vec<u8> = (0..len).flat_map(|_| bf16(offset + scale * random.signed())).collect();
        let values = bytes.as_chunks().0.iter().map(|pair| value_of(*pair)).collect();
        Self { bytes, values }
    }
}

struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    input_norm: Vector,
    post_norm: Vector,
    q_norm: Vector,
    k_norm: Vector,
}

struct Weights {
    config: ModelConfig,
    layers: Vec<Layer>,
    head: Matrix,
    final_norm: Vector,
    embedding: Vector,
}

impl Weights {
    fn random(config: ModelConfig, seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let (hidden, wide, query, kv) =
            (config.hidden_size, config.intermediate_size, config.q_width(), config.kv_width());
        let layer = |random: &mut Random| Layer {
            q: Matrix::random(random, query, hidden, 1.0),
            k: Matrix::random(random, kv, hidden, 1.0),
            v: Matrix::random(random, kv, hidden, 1.0),
            o: Matrix::random(random, hidden, query, 1.0),
            gate: Matrix::random(random, wide, hidden, 1.5),
            up: Matrix::random(random, wide, hidden, 1.0),
            down: Matrix::random(random, hidden, wide, 1.0),
            input_norm: Vector::random(random, hidden, 1.0, 0.3),
            post_norm: Vector::random(random, hidden, 1.0, 0.3),
            // Sharper scores would turn the rounding of queries and keys into errors beyond the bound.
            q_norm: Vector::random(random, HEAD, 1.0, 0.3),
            k_norm: Vector::random(random, HEAD, 1.0, 0.3),
        };
        Self {
            layers: (0..config.layers).map(|_| layer(random)).collect(),
            head: Matrix::random(random, config.vocab_size, hidden, 2.0),
            final_norm: Vector::random(random, hidden, 1.0, 0.3),
            embedding: Vector::random(random, hidden * config.vocab_size, 0.0, 1.0),
            config,
        }
    }
}

/// The lane's view of the weights.
struct Source(Arc<Weights>);

impl LaneSource for Source {
    fn config(&self) -> &ModelConfig {
        &self.0.config
    }

    fn layer(&self, layer: usize) -> Result<LayerTensors<'_>, PackError> {
        let layer = &self.0.layers[layer];
        Ok(LayerTensors {
            q: layer.q.source("q_proj"),
            k: layer.k.source("k_proj"),
            v: layer.v.source("v_proj"),
            o: layer.o.source("o_proj"),
            gate: layer.gate.source("gate_proj"),
            up: layer.up.source("up_proj"),
            down: layer.down.source("down_proj"),
            input_norm: &layer.input_norm.bytes,
            post_attention_norm: &layer.post_norm.bytes,
            q_norm: Some(&layer.q_norm.bytes),
            k_norm: Some(&layer.k_norm.bytes),
        })
    }

    fn head(&self) -> Result<Box<dyn TileSource + '_>, PackError> {
        Ok(self.0.head.source("lm_head"))
    }

    fn final_norm(&self) -> Result<&[u8], PackError> {
        Ok(&self.0.final_norm.bytes)
    }

    fn embedding(&self) -> Result<&[u8], PackError> {
        Ok(&self.0.embedding.bytes)
    }
}

/// One row a position.
#[derive(Clone, Default)]
struct Cache {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

/// The model in f64, one token a call.
struct Reference<'a> {
    weights: &'a Weights,
    /// Of each layer.
    cache: Vec<Cache>,
    /// The residual stream behind each layer, for the last token.
    outputs: Vec<Vec<f64>>,
}

impl<'a> Reference<'a> {
    fn new(weights: &'a Weights) -> Self {
        Self { weights, cache: vec![Cache::default(); weights.layers.len()], outputs: Vec::new() }
    }

    fn logits(&mut self, token: u32) -> Vec<f64> {
        let config = &self.weights.config;
        let hidden = config.hidden_size;
        let mut x = self.weights.embedding.values[token as usize * hidden..][..hidden].to_vec();
        let epsilon = f64::from(config.rms_norm_eps);
        self.outputs.clear();
        for (layer, Cache { keys, values }) in self.weights.layers.iter().zip(&mut self.cache) {
            let position = keys.len();
            let normed = rms_norm(&x, &layer.input_norm.values, epsilon);
            let heads = |projection: &Matrix, norm: &Vector| -> Vec<f64> {
                let heads = projection.times(&normed);
                heads
                    .chunks_exact(HEAD)
                    .flat_map(|head| rotated(&rms_norm(head, &norm.values, epsilon), position, config.rope.theta))
                    .collect()
            };
            let query = heads(&layer.q, &layer.q_norm);
            keys.push(heads(&layer.k, &layer.k_norm));
            values.push(layer.v.times(&normed));
            let of_kv = config.heads / config.kv_heads;
            let attended = query.chunks_exact(HEAD).enumerate().flat_map(|(head, query)| {
                let kv = head / of_kv * HEAD..(head / of_kv + 1) * HEAD;
                let scores: Vec<f64> =
                    keys.iter().map(|key| dot(&key[kv.clone()], query) / (HEAD as f64).sqrt()).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let total: f64 = shares.iter().sum();
                let values = &*values;
                kv.map(move |i| values.iter().zip(&shares).map(|(value, share)| value[i] * share / total).sum())
            });
            let attended: Vec<f64> = attended.collect();
            add(&mut x, &layer.o.times(&attended));
            let normed = rms_norm(&x, &layer.post_norm.values, epsilon);
            let gate = layer.gate.times(&normed);
            let product: Vec<f64> =
                layer.up.times(&normed).iter().zip(gate).map(|(up, gate)| up * gate / (1.0 + (-gate).exp())).collect();
            add(&mut x, &layer.down.times(&product));
            self.outputs.push(x.clone());
        }
        self.weights.head.times(&rms_norm(&x, &self.weights.final_norm.values, epsilon))
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn rms_norm(x: &[f64], weights: &[f64], epsilon: f64) -> Vec<f64> {
    let factor = 1.0 / (dot(x, x) / x.len() as f64 + epsilon).sqrt();
    x.iter().zip(weights).map(|(x, weight)| x * factor * weight).collect()
}

fn rotated(head: &[f64], position: usize, theta: f32) -> Vec<f64> {
    let half = HEAD / 2;
    let element = |i: usize| {
        let angle = position as f64 * f64::from(theta).powf(-2.0 * (i % half) as f64 / HEAD as f64);
        let other = if i < half { -head[i + half] } else { head[i - half] };
        head[i] * angle.cos() + other * angle.sin()
    };
    (0..HEAD).map(element).collect()
}

fn config() -> ModelConfig {
    ModelConfig {
        model_type: "qwen3".to_owned(),
        name: "small".to_owned(),
        hidden_size: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: HEAD,
        intermediate_size: 512,
        vocab_size: 320,
        context_length: POSITIONS as usize,
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 1e6, dims: HEAD, pairing: RopePairing::Halves, scaling: RopeScaling::None },
        qkv_bias: false,
        qk_norm: true,
        tied_head: false,
        features: DecoderFeatures::default(),
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

fn load(hardware: &Arc<VirtualDevice>, weights: &Arc<Weights>, files: &KernelFiles) -> Result<Lane, LaneError> {
    let npu = NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap();
    Lane::load(Box::new(npu), Box::new(Source(Arc::clone(weights))), files, LaneOptions::default())
}

/// A lane on a virtual NPU.
struct Bench {
    hardware: Arc<VirtualDevice>,
    lane: Lane,
}

impl Bench {
    fn new(weights: &Arc<Weights>, profile: Profile, files: &KernelFiles) -> Self {
        let spec: VirtualSpec = "virtual:npu5".parse().unwrap();
        let hardware = VirtualDevice::new(&spec.with_profile(profile));
        let lane = load(&hardware, weights, files).unwrap();
        Self { hardware, lane }
    }

    fn begin(&mut self) {
        let begun = self.lane.begin();
        self.assert_clean("begin");
        begun.unwrap();
    }

    fn logits(&mut self, token: u32, position: u32) -> Vec<f64> {
        let mut logits = HiddenRows::new();
        let row = Row { sequence: SequenceId(0), token, position };
        let ran = self.lane.forward(&[row], &mut logits, Want::Last, &Control::new());
        self.assert_clean("forward");
        ran.unwrap();
        logits.row(0).iter().map(|logit| f64::from(*logit)).collect()
    }

    fn assert_clean(&self, what: &str) {
        let diagnoses: Vec<_> = self.hardware.diagnoses().iter().map(ToString::to_string).collect();
        assert!(diagnoses.is_empty(), "{what}: {diagnoses:#?}");
    }
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn first_largest(values: &[f64]) -> usize {
    (0..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best })
}

/// Distance of the two largest.
fn margin(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() - 1] - sorted[sorted.len() - 2]
}

fn tokens(config: &ModelConfig, count: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(config.vocab_size as u64) as u32).collect()
}

#[test]
fn logits_are_the_reference_behind_every_driver() {
    let weights = Arc::new(Weights::random(config(), 1));
    let files = kernels(&weights.config);
    // The drivers differ in what the host does, not in what the array does: one of them goes all the way.
    let longest = [(Profile::MainlineNew, LONGEST), (Profile::MainlineOld, 40), (Profile::OutOfTree, 40)];
    assert_eq!(longest.len(), Profile::ALL.len());
    let tokens = tokens(&weights.config, LONGEST, 2);
    let mut reference = Reference::new(&weights);
    let wanted: Vec<Vec<f64>> = tokens.iter().map(|token| reference.logits(*token)).collect();
    for (profile, contexts) in longest {
        let mut bench = Bench::new(&weights, profile, &files);
        bench.begin();
        let found: Vec<Vec<f64>> =
            (0..contexts).map(|position| bench.logits(tokens[position as usize], position)).collect();
        bench.lane.end();
        bench.assert_clean(profile.name());
        // The layers and the head of every token, and the initial run; the array is configured once.
        let statistics = bench.hardware.statistics();
        assert_eq!((statistics.runs, statistics.pdi_loads), (1 + 5 * u64::from(contexts), 1), "{profile}");
        let pairs = || found.iter().zip(&wanted);
        let distances = pairs().flat_map(|(found, wanted)| found.iter().zip(wanted).map(|(a, b)| (a - b).abs()));
        let error = distances.fold(0.0, f64::max);
        let mut compared = 0;
        for (context, (found, wanted)) in (1..).zip(pairs()) {
            let cosine = cosine(found, wanted);
            assert!(cosine >= 0.9999, "{profile}, context {context}: cosine {cosine}");
            if margin(wanted) > 2.0 * error {
                compared += 1;
                assert_eq!(first_largest(found), first_largest(wanted), "{profile}, context {context}");
            }
        }
        assert!(compared > contexts / 4, "{profile}: margins above twice {error} in {compared} of {contexts} rows");
    }
}

#[test]
fn other_shapes_are_the_reference() {
    // Groups of several tiles, halves of several KV heads, a query head for each, several chunks of the feed-forward block,
    // blocks of projections that do not fill the streams, another base of the rotation.
    for (hidden_size, heads, kv_heads, intermediate_size, theta) in
        [(512, 8, 4, 1536, 1e6), (768, 4, 4, 512, 1e4), (256, 6, 2, 1024, 5e5)]
    {
        let rope = Rope { theta, ..config().rope };
        let config = ModelConfig { hidden_size, heads, kv_heads, intermediate_size, rope, layers: 2, ..config() };
        let weights = Arc::new(Weights::random(config, 11));
        let mut bench = Bench::new(&weights, Profile::MainlineNew, &kernels(&weights.config));
        let mut reference = Reference::new(&weights);
        bench.begin();
        for (position, token) in (0..).zip(tokens(&weights.config, 18, 12)) {
            let cosine = cosine(&bench.logits(token, position), &reference.logits(token));
            assert!(cosine >= 0.9999, "hidden size {hidden_size}, position {position}: cosine {cosine}");
        }
    }
}

#[test]
fn a_second_generation_goes_on_with_the_cache_and_configures_anew() {
    let weights = Arc::new(Weights::random(config(), 3));
    let mut bench = Bench::new(&weights, Profile::MainlineNew, &kernels(&weights.config));
    let tokens = tokens(&weights.config, 20, 4);
    let mut reference = Reference::new(&weights);
    for (position, token) in (0..).zip(&tokens) {
        if position % 10 == 0 {
            bench.begin();
        }
        let (found, wanted) = (bench.logits(*token, position), reference.logits(*token));
        assert!(cosine(&found, &wanted) >= 0.9999, "position {position}");
        if position % 10 == 9 {
            bench.lane.end();
        }
    }
    assert_eq!(bench.hardware.statistics().pdi_loads, 2);
    bench.assert_clean("two generations");
    // Another sequence over what the cache held before: stale rows are masked.
    bench.lane.truncate(SequenceId(0), 0);
    bench.begin();
    let mut reference = Reference::new(&weights);
    for (position, token) in (0..18).zip(tokens.iter().rev()) {
        assert!(cosine(&bench.logits(*token, position), &reference.logits(*token)) >= 0.9999, "position {position}");
    }
    bench.assert_clean("a second sequence");
}

type TapValues = (Tap, Vec<f64>);

/// What an observer has seen.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<TapValues>>>);

impl TapSink for Seen {
    fn observe(&mut self, tap: Tap, _row: Row, values: &[f32]) {
        let values = values.iter().map(|value| f64::from(*value)).collect();
        self.0.lock().unwrap().push((tap, values));
    }
}

#[test]
fn keys_values_and_outputs_of_every_layer_are_the_reference() {
    let weights = Arc::new(Weights::random(config(), 7));
    let mut bench = Bench::new(&weights, Profile::MainlineNew, &kernels(&weights.config));
    let mut reference = Reference::new(&weights);
    let seen = Seen::default();
    bench.lane.observe(Some(Box::new(seen.clone())));
    bench.begin();
    for (position, token) in (0..).zip(tokens(&weights.config, 18, 8)) {
        bench.logits(token, position);
        let logits = reference.logits(token);
        let taps = std::mem::take(&mut *seen.0.lock().unwrap());
        assert_eq!(taps.len(), 4 * 3 + 1);
        for (tap, values) in taps {
            let wanted = match tap {
                Tap::K(layer) => &reference.cache[layer as usize].keys[position as usize],
                Tap::V(layer) => &reference.cache[layer as usize].values[position as usize],
                Tap::LayerOut(layer) => &reference.outputs[layer as usize],
                Tap::Logits => &logits,
                other => panic!("{other:?} was not announced"),
            };
            let cosine = cosine(&values, wanted);
            assert!(cosine >= 0.9999, "{tap:?} at {position}: cosine {cosine}");
        }
    }
}

/// Runs of one token of a model with 28 layers.
const RUNS: usize = 29;

/// `LOADPDI` operations and executed images of one token, after an initial run, where layers and head are assembled so.
fn loads_of_a_token(mode: PdiMode) -> (u64, u64) {
    let config = config();
    let files = kernels(&config);
    let hardware = VirtualDevice::new(&"virtual:npu5".parse().unwrap());
    let npu = NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap();
    let full = |file: &[u8], kernel: &str, mode| {
        let request = FullElfRequest { kernel, mode, pdi: &files.pdi, columns: 8 };
        assemble(&InstructionElf::parse(file).unwrap(), &request).unwrap()
    };
    let init = full(&files.layer[0], "flinit", PdiMode::InitOnly);
    let boot = Program::FullElf { image: &init, kernel: "flinit" };
    let mut context = npu.open_context(&boot).unwrap();
    let buffers: Vec<Arg> =
        (0..5).map(|_| Arg::Buffer(npu.allocate(&BufferSpec::tensor(1 << 20, "any")).unwrap())).collect();
    for buffer in &buffers {
        let Arg::Buffer(buffer) = buffer else { unreachable!() };
        buffer.write(0, &vec![0; 1 << 20]).unwrap();
    }
    let kernel = context.load(&boot).unwrap();
    let mut list = context.runlist();
    list.push(&*kernel, &buffers[..1]).unwrap();
    list.submit().unwrap().wait(Deadline::never()).unwrap();
    let before = hardware.statistics();
    let mut list = context.runlist();
    let (layer, head) = (full(&files.layer[0], "fl00001", mode), full(&files.head, "flhead", mode));
    let layer = context.load(&Program::FullElf { image: &layer, kernel: "fl00001" }).unwrap();
    let head = context.load(&Program::FullElf { image: &head, kernel: "flhead" }).unwrap();
    (1..RUNS).for_each(|_| _ = list.push(&*layer, &buffers).unwrap());
    list.push(&*head, &buffers[..4]).unwrap();
    list.submit().unwrap().wait(Deadline::never()).unwrap();
    let after = hardware.statistics();
    assert!(hardware.diagnoses().is_empty(), "{:?}", hardware.diagnoses());
    assert_eq!((before.pdi_requests, after.runs - before.runs), (1, RUNS as u64));
    (after.pdi_requests - before.pdi_requests, after.pdi_loads - before.pdi_loads)
}

#[test]
fn the_array_is_configured_by_the_initial_run_alone() {
    assert_eq!(loads_of_a_token(PdiMode::None), (0, 0));
    let (requests, _) = loads_of_a_token(PdiMode::Load);
    assert_eq!(requests, RUNS as u64, "an image in every file is loaded in every run");
}

#[test]
fn a_suspended_context_ends_its_generation_and_no_other() {
    let weights = Arc::new(Weights::random(config(), 13));
    let mut bench = Bench::new(&weights, Profile::MainlineNew, &kernels(&weights.config));
    let mut reference = Reference::new(&weights);
    let mut check = |bench: &mut Bench, position: u32| {
        let cosine = cosine(&bench.logits(40 + position, position), &reference.logits(40 + position));
        assert!(cosine >= 0.9999, "position {position}: cosine {cosine}");
    };
    // Between generations nothing is lost.
    bench.begin();
    check(&mut bench, 0);
    bench.lane.end();
    bench.hardware.suspend_and_resume();
    bench.begin();
    check(&mut bench, 1);
    // Within one the configuration is gone.
    bench.hardware.suspend_and_resume();
    let row = Row { sequence: SequenceId(0), token: 42, position: 2 };
    let error = bench.lane.forward(&[row], &mut HiddenRows::new(), Want::Last, &Control::new()).unwrap_err();
    assert!(error.loses_context(), "{error}");
    assert!(!bench.hardware.take_diagnoses().is_empty());
    bench.begin();
    check(&mut bench, 2);
}

#[test]
fn a_changed_weight_is_seen() {
    let weights = Weights::random(config(), 5);
    let files = kernels(&weights.config);
    let token = 7;
    let wanted = Reference::new(&weights).logits(token);
    // Two tiles of one projection change places in the file.
    let mut changed = Weights::random(config(), 5);
    let (first, second) = changed.layers[2].up.tiles.split_at_mut(TILE_BYTES);
    first.swap_with_slice(&mut second[..TILE_BYTES]);
    for (weights, is_right) in [(weights, true), (changed, false)] {
        let mut bench = Bench::new(&Arc::new(weights), Profile::MainlineNew, &files);
        bench.begin();
        let cosine = cosine(&bench.logits(token, 0), &wanted);
        assert_eq!(cosine >= 0.9999, is_right, "cosine {cosine}");
    }
}

/// The files with section `name` of the layers' changed.
fn with_section(files: &KernelFiles, name: &str, change: impl Fn(&mut Section)) -> KernelFiles {
    let layer = files.layer.each_ref().map(|file| {
        let mut elf = Elf::parse(file).unwrap();
        let (index, _) = elf.find(name).unwrap();
        change(&mut elf.sections[index as usize]);
        elf.to_bytes().unwrap()
    });
    KernelFiles { layer, ..files.clone() }
}

#[test]
fn a_wrong_addend_of_a_relocation_is_seen() {
    let weights = Arc::new(Weights::random(config(), 9));
    // Two groups of the value projection take each other's place: behind six small transfers, eight groups of the query
    // projection and four of the key projection.
    let files = with_section(&kernels(&weights.config), ".rela.dyn", |section| {
        let mut relocations = Rela::parse_table(section).unwrap();
        let first = 6 + 8 + 4;
        (relocations[first].addend, relocations[first + 1].addend) =
            (relocations[first + 1].addend, relocations[first].addend);
        section.data = Rela::write_table(&relocations).unwrap();
    });
    let mut bench = Bench::new(&weights, Profile::MainlineNew, &files);
    bench.begin();
    let cosine = cosine(&bench.logits(3, 0), &Reference::new(&weights).logits(3));
    assert!(cosine < 0.999, "cosine {cosine}");
}

#[test]
fn a_context_length_that_one_core_does_not_have_never_ends() {
    let weights = Arc::new(Weights::random(ModelConfig { layers: 1, ..config() }, 10));
    // The fourth core holds 1 for every context.
    let fourth = HEADER_BYTES + 3 * WRITE_BYTES + 16;
    let files = with_section(&kernels(&weights.config), ".ctrltext", |section| {
        section.data[fourth..fourth + 4].copy_from_slice(&1u32.to_le_bytes());
    });
    let mut bench = Bench::new(&weights, Profile::MainlineNew, &files);
    bench.begin();
    bench.logits(3, 0);
    let row = Row { sequence: SequenceId(0), token: 3, position: 1 };
    let error = bench.lane.forward(&[row], &mut HiddenRows::new(), Want::Last, &Control::new()).unwrap_err();
    assert!(error.loses_context(), "{error}");
    let diagnoses: Vec<_> = bench.hardware.take_diagnoses().iter().map(ToString::to_string).collect();
    let reason = "the attention cores hold different context lengths: [2, 2, 2, 1, 2, 2, 2, 2]";
    assert!(diagnoses[0].contains(reason), "{diagnoses:#?}");
    // The next generation has a fresh context.
    bench.lane.truncate(SequenceId(0), 0);
    bench.begin();
    assert!(cosine(&bench.logits(3, 0), &Reference::new(&weights).logits(3)) >= 0.9999);
}

#[test]
fn kits_of_other_models_are_refused() {
    let weights = Arc::new(Weights::random(ModelConfig { layers: 1, ..config() }, 6));
    let hardware = VirtualDevice::new(&"virtual:npu5".parse().unwrap());
    for other in [
        ModelConfig { hidden_size: 512, ..config() },
        ModelConfig { heads: 8, ..config() },
        ModelConfig { heads: 4, kv_heads: 4, ..config() },
        ModelConfig { intermediate_size: 1024, ..config() },
        ModelConfig { vocab_size: 256, ..config() },
    ] {
        let error = load(&hardware, &weights, &kernels(&other)).unwrap_err().to_string();
        assert!(error.contains("the kernels are for another model"), "{error}");
    }
    load(&hardware, &weights, &kernels(&weights.config)).unwrap();
}

#[test]
fn kits_of_many_shapes_pass_the_checks_of_the_lane() {
    for (hidden_size, heads, kv_heads, intermediate_size, vocab_size) in [
        (256, 2, 2, 512, 64),
        (512, 8, 2, 1536, 192),
        (768, 6, 6, 1024, 128),
        // Qwen3-0.6B, 1.7B, 4B and 8B.
        (1024, 16, 8, 3072, 151_936),
        (2048, 16, 8, 6144, 151_936),
        (2560, 32, 8, 9728, 151_936),
        (4096, 32, 8, 12_288, 151_936),
    ] {
        let config = ModelConfig { hidden_size, heads, kv_heads, intermediate_size, vocab_size, ..config() };
        let kernels = Kernels::new(&kernels(&config), &Dimensions::of(&config).unwrap()).unwrap();
        assert_eq!(kernels.positions(), POSITIONS);
    }
}
