//! Packed models on the virtual NPU, from the GGUF file to the logits: `pack`, kernels, the route, every driver, against the
//! exact CPU over the very weights that were packed; and what the route says about models and kernels it does not take.

#[path = "../../backends/virtual/tests/common/wrap.rs"]
#[allow(dead_code, reason = "the driver's own tests use the rest")]
mod wrap;

use npuhal_amdxdna::{NpuDevice, NpuIdentity};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::{BufferRef, BufferSpec, Context, Device, Program};
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Session, Stepper, Want};
use npuhal_cpu::exact::{ExactOptions, ExactSegment};
use npuhal_models::q4nx::tile::repack_q4k;
use npuhal_models::q4nx::{PackOptions, Q4nxFile, pack};
use npuhal_models::sampling::{Sampler, SamplingParams};
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelSource, TensorRole, WeightType};
use npuhal_registry::{
    Decline, DeviceUri, Fitness, Host, OpenRequest, Options, Route, RouteError, SegmentRequest, SegmentSpan, Service,
    SpeedClass,
};
use npuhal_tests::kit::gguf::{GgufFile, GgufTensor, type_id};
use npuhal_tests::kit::kernels::{lane_kernels, write_kernels};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::kit::random::Random;
use npuhal_virtual::{Profile, VirtualDevice, VirtualSpec};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::kernels::KernelFiles;
use npuhal_xdna2::lane::{Lane, LaneOptions};
use npuhal_xdna2::route::LaneRoute;
use npuhal_xdna2::source::PackedModel;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use wrap::{Forget, Forgetful, Seen};

const POSITIONS: u32 = 208;
/// Fewer without optimization.
const LONGEST: u32 = if cfg!(debug_assertions) { 40 } else { 200 };

/// Hidden size 256, four layers, two KV heads, 320 tokens.
fn spec() -> ModelSpec {
    ModelSpec {
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        spare_tokens: 320 - 266,
        rope_theta: 1e6,
        ..ModelSpec::small(Architecture::Qwen3, Weights::LikeQ4KM)
    }
}

/// A GGUF file, and the directory it is packed into, with kernels.
struct Scene {
    folder: TempDir,
    gguf: PathBuf,
    packed: PathBuf,
}

impl Scene {
    fn new(spec: &ModelSpec) -> Self {
        let scene = Self::without_kernels(spec);
        write_kernels(&scene.packed.join("npu"), &lane_kernels(scene.model().config(), POSITIONS));
        scene
    }

    fn without_kernels(spec: &ModelSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (gguf, packed) = (folder.path().join("model.gguf"), folder.path().join("packed"));
        spec.build().write(&gguf).unwrap();
        pack(&gguf, &packed, &PackOptions::default(), &Control::new(), &mut |_| {}).unwrap();
        Self { folder, gguf, packed }
    }

    fn model(&self) -> ModelSource {
        ModelSource::open(&self.packed).unwrap()
    }

    /// The exact CPU over what was packed: every tensor of the directory, decoded, in a file of its own.
    fn exact(&self) -> Pipeline {
        let decoded = self.folder.path().join("decoded.gguf");
        decode(&self.gguf, &self.model()).write(&decoded).unwrap();
        let model = ModelSource::open(&decoded).unwrap();
        let options = ExactOptions::new(POSITIONS, NonZeroUsize::MIN);
        let segment = ExactSegment::open(&model, SegmentSpan::whole(model.config()), options).unwrap();
        Pipeline::new(vec![Box::new(segment)], model.config().layers).unwrap()
    }
}

const LAYER: [(LayerTensor, &str); 11] = [
    (LayerTensor::Q, "attn_q"),
    (LayerTensor::K, "attn_k"),
    (LayerTensor::V, "attn_v"),
    (LayerTensor::O, "attn_output"),
    (LayerTensor::Gate, "ffn_gate"),
    (LayerTensor::Up, "ffn_up"),
    (LayerTensor::Down, "ffn_down"),
    (LayerTensor::InputNorm, "attn_norm"),
    (LayerTensor::PostAttentionNorm, "ffn_norm"),
    (LayerTensor::QNorm, "attn_q_norm"),
    (LayerTensor::KNorm, "attn_k_norm"),
];

/// The metadata of the file at `gguf` with the weights of the packed `model` in F32.
fn decode(gguf: &Path, model: &ModelSource) -> GgufFile {
    let file = GgufFile::parse(&fs::read(gguf).unwrap()).unwrap();
    let mut roles = vec![
        (TensorRole::TokenEmbedding, "token_embd.weight".to_owned()),
        (TensorRole::FinalNorm, "output_norm.weight".to_owned()),
        (TensorRole::Head, "output.weight".to_owned()),
    ];
    for layer in 0..model.config().layers {
        roles.extend(LAYER.map(|(part, name)| (TensorRole::Layer(layer, part), format!("blk.{layer}.{name}.weight"))));
    }
    let tensors = roles.into_iter().map(|(role, name)| {
        let (rows, cols, values) = match (model.tiled(role), model.tensor(role)) {
            (Some(tiled), _) => {
                let mut values = vec![0.0; tiled.rows() * tiled.cols()];
                for (strip, rows) in values.chunks_exact_mut(32 * tiled.cols()).enumerate() {
                    tiled.decode_strip(strip, None, rows).unwrap();
                }
                (tiled.rows(), tiled.cols(), values)
            }
            (None, Some(tensor)) => {
                let mut values = vec![0.0; tensor.rows() * tensor.cols()];
                for (row, values) in values.chunks_exact_mut(tensor.cols()).enumerate() {
                    tensor.dequantize_row(row, values).unwrap();
                }
                (tensor.rows(), tensor.cols(), values)
            }
            (None, None) => panic!("{name} is missing"),
        };
        let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        GgufTensor { name, dims, type_id: type_id(WeightType::F32), bytes }
    });
    GgufFile { tensors: tensors.collect(), ..file }
}

/// Opens the one device it has.
struct OneDevice {
    hardware: Arc<VirtualDevice>,
    identity: NpuIdentity,
    driver: Option<Arc<dyn npuhal_amdxdna::driver::Driver>>,
}

impl OneDevice {
    fn new(profile: Profile) -> Self {
        let spec: VirtualSpec = "virtual:npu5".parse().unwrap();
        let hardware = VirtualDevice::new(&spec.with_profile(profile));
        let identity = hardware.identity();
        Self { hardware, identity, driver: None }
    }

    fn npu(&self) -> Result<NpuDevice, DeviceError> {
        let driver = self.driver.clone().unwrap_or_else(|| self.hardware.connect());
        NpuDevice::open(driver, &self.identity)
    }

    fn cards(&self) -> Vec<DeviceCard> {
        vec![NpuDevice::open(self.hardware.connect(), &self.identity).unwrap().card().clone()]
    }

    fn assert_clean(&self, what: &str) {
        let diagnoses: Vec<_> = self.hardware.diagnoses().iter().map(ToString::to_string).collect();
        assert!(diagnoses.is_empty(), "{what}: {diagnoses:#?}");
    }

    /// The model in `directory` through the route.
    fn open(&self, directory: &Path) -> (Service, Box<dyn Stepper>) {
        let model = ModelSource::open(directory).unwrap();
        let (devices, options) = (self.cards(), Options::default());
        let service = match LaneRoute.fitness(&model, &devices, &options) {
            Fitness::Serves(service) => service,
            Fitness::Declines(decline) => panic!("{decline:?}"),
        };
        let request =
            OpenRequest { model: &model, service: &service, devices: &devices, options: &options, host: self };
        match LaneRoute.open(request).unwrap() {
            Session::Stepper(stepper) => (service, stepper),
            Session::Generator(_) => panic!("the lane gives logits"),
        }
    }
}

impl Host for OneDevice {
    fn open_device(&self, id: &str) -> Result<Box<dyn Device>, RouteError> {
        assert_eq!(id, self.identity.id);
        Ok(Box::new(self.npu()?))
    }

    fn open_segment(&self, route: &str, _: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        Err(RouteError::NoRoute { route: route.to_owned(), known: String::new() })
    }

    fn pinned(&self) -> Option<&DeviceUri> {
        None
    }
}

fn step(stepper: &mut dyn Stepper, token: u32, position: u32) -> Result<Vec<f64>, RunError> {
    let mut logits = HiddenRows::new();
    let row = Row { sequence: SequenceId(0), token, position };
    stepper.step(&[row], Want::Last, &mut logits, &Control::new())?;
    Ok(logits.row(0).iter().map(|logit| f64::from(*logit)).collect())
}

fn tokens(vocab: usize, count: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(vocab as u64) as u32).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
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

#[test]
fn a_packed_model_has_the_exact_logits_behind_every_driver() {
    let scene = Scene::new(&spec());
    let tokens = tokens(320, LONGEST, 2);
    let mut exact = scene.exact();
    exact.begin().unwrap();
    let wanted: Vec<Vec<f64>> = (0..).zip(&tokens).map(|(at, token)| step(&mut exact, *token, at).unwrap()).collect();
    for profile in Profile::ALL {
        let bench = OneDevice::new(profile);
        let (service, mut lane) = bench.open(&scene.packed);
        assert_eq!((service.window, service.device.as_str()), (POSITIONS, bench.identity.id.as_str()));
        assert_eq!((service.speed, service.placement[0].layers.clone()), (SpeedClass::Reference, 0..4));
        assert!(service.detail.starts_with("kernels of the virtual NPU in "), "{}", service.detail);
        assert_eq!((lane.capacity().positions, lane.capacity().rows_per_call, lane.vocab_size()), (POSITIONS, 1, 320));
        lane.begin().unwrap();
        let found: Vec<Vec<f64>> =
            (0..).zip(&tokens).map(|(at, token)| step(&mut *lane, *token, at).unwrap()).collect();
        lane.end();
        bench.assert_clean(profile.name());
        // The layers and the head of every token, and the initial run, which alone loads the image.
        let statistics = bench.hardware.statistics();
        assert_eq!((statistics.runs, statistics.pdi_requests), (1 + 5 * u64::from(LONGEST), 1), "{profile}");
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
        assert!(compared > LONGEST / 4, "{profile}: margins above twice {error} in {compared} of {LONGEST} rows");
    }
}

#[test]
fn a_gap_between_generations_passes_and_the_same_gap_inside_one_times_out_and_recovers() {
    let scene = Scene::new(&ModelSpec { layers: 2, ..spec() });
    let mut exact = scene.exact();
    exact.begin().unwrap();
    for profile in Profile::ALL {
        let bench = OneDevice::new(profile);
        let (_, mut lane) = bench.open(&scene.packed);
        exact.truncate(SequenceId(0), 0);
        let mut position = 0;
        let mut check = |lane: &mut dyn Stepper| {
            let token = 40 + position;
            let found = step(lane, token, position);
            // A token that failed is tried again.
            if let Ok(found) = &found {
                exact.truncate(SequenceId(0), position as usize);
                let cosine = cosine(found, &step(&mut exact, token, position).unwrap());
                assert!(cosine >= 0.9999, "{profile}, position {position}: cosine {cosine}");
                position += 1;
            }
            found
        };
        for gap_s in [15, 120, 3600] {
            lane.begin().unwrap();
            check(&mut *lane).unwrap();
            // Shorter gaps are nothing, however many.
            for _ in 0..3 {
                bench.hardware.idle(VirtualDevice::autosuspend_delay() - Duration::from_secs(1));
                check(&mut *lane).unwrap();
            }
            lane.end();
            bench.hardware.idle(Duration::from_secs(gap_s));
            bench.assert_clean(profile.name());
        }
        assert_eq!(bench.hardware.statistics().suspensions, 0);
        for gap_s in [15, 120] {
            lane.begin().unwrap();
            check(&mut *lane).unwrap();
            bench.hardware.idle(Duration::from_secs(gap_s));
            let error = check(&mut *lane).unwrap_err();
            assert!(matches!(error, RunError::TimedOut { .. }) && error.loses_context(), "{profile}: {error}");
            assert!(!bench.hardware.take_diagnoses().is_empty());
            let again = check(&mut *lane).unwrap_err();
            assert!(again.loses_context(), "nothing runs in a lost context: {again}");
            lane.end();
            // Cache and weights have outlived the context.
            lane.begin().unwrap();
            check(&mut *lane).unwrap();
            lane.end();
            bench.assert_clean(profile.name());
        }
        assert_eq!(bench.hardware.statistics().suspensions, 2, "{profile}");
    }
}

/// Hands out the buffers that were allocated.
struct Spy {
    npu: NpuDevice,
    buffers: Arc<Mutex<BTreeMap<String, BufferRef>>>,
}

impl Device for Spy {
    fn card(&self) -> &DeviceCard {
        self.npu.card()
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        let buffer = self.npu.allocate(spec)?;
        self.buffers.lock().unwrap().insert(spec.label.clone(), buffer.clone());
        Ok(buffer)
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        self.npu.open_context(boot)
    }
}

#[test]
fn a_stale_row_of_the_cache_is_seen() {
    let scene = Scene::new(&ModelSpec { layers: 2, ..spec() });
    let bench = OneDevice::new(Profile::MainlineNew);
    let files = KernelFiles::read(&scene.packed.join("npu")).unwrap();
    let tokens = [7, 200, 31, 99];
    let run = |regions: &[u64], row: u64| {
        let buffers = Arc::default();
        let spy = Spy { npu: bench.npu().unwrap(), buffers: Arc::clone(&buffers) };
        let source = Box::new(PackedModel::new(scene.model()).unwrap());
        let lane = Lane::load(Box::new(spy), source, &files, LaneOptions::default()).unwrap();
        let mut lane = Pipeline::new(vec![Box::new(lane)], 2).unwrap();
        lane.begin().unwrap();
        let mut last = Vec::new();
        for (position, token) in (0..).zip(tokens) {
            last = step(&mut lane, token, position).unwrap();
            if position != 2 {
                continue;
            }
            for layer in 0..2 {
                let cache = buffers.lock().unwrap()[&format!("layer {layer} KV cache")].clone();
                for region in regions {
                    // Two KV heads: one in each half, 256 bytes a row.
                    let at_bytes = (region * u64::from(POSITIONS) + row) * 256;
                    let mut older = [0; 256];
                    cache.read(at_bytes - 256, &mut older).unwrap();
                    cache.write(at_bytes, &older).unwrap();
                }
            }
        }
        bench.assert_clean("stale row");
        last
    };
    let wanted = run(&[], 1);
    for row in [1, 2] {
        for region in 0..4 {
            assert_ne!(run(&[region], row), wanted, "region {region}, row {row}");
        }
        let cosine = cosine(&run(&[0, 1, 2, 3], row), &wanted);
        assert!(cosine < 0.9999, "row {row}: cosine {cosine}");
    }
    // A row that the context does not reach.
    assert_eq!(run(&[0, 1, 2, 3], 100), wanted);
}

#[test]
fn a_missing_flush_is_seen() {
    let scene = Scene::new(&ModelSpec { layers: 2, ..spec() });
    let tokens = [7, 200, 31, 99];
    // Flushes until each token is done, and the logits; or the error.
    let run = |forget: Forget| {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut bench = OneDevice::new(Profile::MainlineNew);
        bench.driver = Some(Forgetful::new(bench.hardware.connect(), forget, &seen));
        let (_, mut lane) = bench.open(&scene.packed);
        let mut flushes = Vec::new();
        lane.begin().unwrap();
        let mut logits = Vec::new();
        for (position, token) in (0..).zip(tokens) {
            flushes.push(seen.lock().unwrap().flushes.len());
            match step(&mut *lane, token, position) {
                Ok(row) => logits.push(row),
                Err(_) => return (flushes, None),
            }
        }
        let is_clean = bench.hardware.diagnoses().is_empty();
        (flushes, is_clean.then_some(logits))
    };
    let (flushes, wanted) = run(Forget::Nothing);
    assert!(wanted.is_some());
    assert_eq!(run(Forget::Nothing), (flushes.clone(), wanted.clone()));
    // Every flush for the second token: its embedding, the commands, what is prepared for the third.
    let of_token = flushes[1]..flushes[2];
    assert!(of_token.len() > 3, "{flushes:?}");
    for flush in of_token {
        let (_, found) = run(Forget::Flush(flush));
        assert_ne!(found, wanted, "flush {flush} was forgotten and nothing was seen");
    }
}

/// The directory's file with other tensors: `change` gets name, dtype, shape and bytes.
fn rewrite(directory: &Path, change: impl Fn(&str, &mut Vec<i64>, &mut Vec<u8>)) {
    let path = directory.join("model.q4nx");
    let (mut header, mut data) = (Map::new(), Vec::new());
    {
        let file = Q4nxFile::open(&path).unwrap();
        for entry in file.tensors() {
            let mut shape = entry.shape().to_vec();
            let mut bytes = file.map()[entry.range()].to_vec();
            change(entry.name(), &mut shape, &mut bytes);
            let (begin, end) = (data.len(), data.len() + bytes.len());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(64), 0);
            let tensor = json!({ "dtype": entry.dtype(), "shape": shape, "data_offsets": [begin, end] });
            header.insert(entry.name().to_owned(), tensor);
        }
    }
    let mut header = serde_json::to_vec(&Value::Object(header)).unwrap();
    header.resize(header.len().next_multiple_of(64), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    fs::remove_file(&path).unwrap();
    fs::write(&path, file).unwrap();
}

const Q4K_BYTES: usize = 4736;

/// A random Q4_K tile: scales and minima as bytes, their factors around those of other weights.
fn q4k_tile(random: &mut Random) -> Vec<u8> {
    let mut tile: Vec<u8> = (0..Q4K_BYTES).map(|_| random.below(256) as u8).collect();
    for row in 0..32 {
        let bf16 = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
        tile[4608 + 2 * row..][..2].copy_from_slice(&bf16(1e-4 * (1.0 + random.unit() as f32)));
        tile[4672 + 2 * row..][..2].copy_from_slice(&bf16(-8e-4 * (1.0 + random.unit() as f32)));
    }
    tile
}

#[test]
fn q4k_tiles_are_repacked_as_they_are_loaded() {
    let spec = ModelSpec { layers: 2, ..spec() };
    // The same weights as Q4_K tiles, and as the q4_1 tiles that these are repacked to.
    let logits = [false, true].map(|is_repacked| {
        let scene = Scene::new(&spec);
        rewrite(&scene.packed, |name, shape, bytes| {
            if name.ends_with("_proj.weight") {
                let mut random = Random::new(name.bytes().map(u64::from).sum());
                let tiles = (0..shape[0]).map(|_| q4k_tile(&mut random));
                *bytes = match is_repacked {
                    true => tiles.flat_map(|tile| repack_q4k(&tile).unwrap()).collect(),
                    false => tiles.flatten().collect(),
                };
                shape[1] = if is_repacked { 5120 } else { Q4K_BYTES as i64 };
            }
        });
        let bench = OneDevice::new(Profile::MainlineNew);
        let (_, mut lane) = bench.open(&scene.packed);
        lane.begin().unwrap();
        let rows: Vec<_> = (0..20).map(|position| step(&mut *lane, 50 + position, position).unwrap()).collect();
        bench.assert_clean("Q4_K");
        rows
    });
    assert_eq!(logits[0], logits[1]);
    assert!(logits[0].iter().flatten().all(|logit| logit.is_finite()));
}

/// Order of bf16 bits as an unsigned number, as published: negative values are reversed below the positive ones.
fn published_key(bits: u16) -> u16 {
    bits ^ if bits & 0x8000 != 0 { 0xFFFF } else { 0x8000 }
}

#[test]
fn the_sampler_has_the_published_choice_as_a_mode() {
    let mut random = Random::new(3);
    let mut sampler = Sampler::new(SamplingParams::lane(1.0)).unwrap();
    for _ in 0..2000 {
        // Few distinct values, so that there are ties, and zeros of both signs.
        let few = [0x0000, 0x8000, 0x3F80, 0xBF80, 0x3F81, 0xC000, 0x0001, 0x8001];
        let kinds = 1 + random.below(few.len() as u64);
        let logits: Vec<u16> = (0..40).map(|_| few[random.below(kinds) as usize]).collect();
        let best = logits.iter().map(|bits| published_key(*bits)).max();
        let wanted = logits.iter().position(|bits| Some(published_key(*bits)) == best).unwrap();
        let logits: Vec<f32> = logits.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect();
        assert_eq!(sampler.select(&logits).unwrap() as usize, wanted, "{logits:?}");
    }
    // The last 64 ids of prompt and answer, each once, and only for penalties above 1.
    let mut sampler = Sampler::new(SamplingParams::lane(2.0)).unwrap();
    [1, 1, 2].into_iter().chain(std::iter::repeat_n(9, 61)).for_each(|id| sampler.accept(id));
    let logits = [2.5, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0];
    assert_eq!(sampler.select(&logits).unwrap(), 0, "1 and 2 are halved");
    sampler.accept(9);
    assert_eq!(sampler.select(&logits).unwrap(), 0, "the second 1 is still there");
    sampler.accept(9);
    assert_eq!(sampler.select(&logits).unwrap(), 1);
}

/// What the route says; panics where it serves.
fn declined(model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Decline {
    match LaneRoute.fitness(model, devices, options) {
        Fitness::Declines(decline) => decline,
        Fitness::Serves(service) => panic!("{service:?}"),
    }
}

fn assert_unavailable(decline: &Decline, phrase: &str) {
    assert!(matches!(decline, Decline::Unavailable(_)), "{decline:?}");
    assert_says(decline, phrase);
}

fn assert_says(decline: &Decline, phrase: &str) {
    let reason = decline.reason().map(ToString::to_string).unwrap_or_default();
    assert!(reason.contains(phrase) && reason.lines().count() == 1, "{phrase}: {decline:?}");
}

#[test]
fn it_declines_models_that_do_not_fit_with_the_reason() {
    let devices = OneDevice::new(Profile::MainlineNew).cards();
    let options = Options::default();
    for (change, phrase) in [
        (ModelSpec { heads: 8, head_dim: 64, ..spec() }, "heads of 64 elements; the layer kernel has heads of 128"),
        (ModelSpec { kv_heads: 1, ..spec() }, "4 query heads over 1 KV heads"),
        (ModelSpec { spare_tokens: 352 - 266, ..spec() }, "the vocabulary is 352"),
        (ModelSpec { intermediate: 768, ..spec() }, "the feed-forward size is 768"),
    ] {
        let spec = ModelSpec { layers: 1, ..change };
        let scene = Scene::without_kernels(&spec);
        assert_unavailable(&declined(&scene.model(), &devices, &options), phrase);
        // Others run the file, so that nobody has to be told.
        let decline = declined(&ModelSource::open(&scene.gguf).unwrap(), &devices, &options);
        assert!(matches!(decline, Decline::Optional(_)), "{decline:?}");
        assert_says(&decline, phrase);
    }
    // Biases, and no norms of heads.
    let qwen2 = ModelSpec { architecture: Architecture::Qwen2, layers: 1, ..spec() };
    let scene = Scene::without_kernels(&qwen2);
    assert_unavailable(&declined(&scene.model(), &devices, &options), "model_type 'qwen2': the fast lane serves");
    assert_eq!(declined(&ModelSource::open(&scene.gguf).unwrap(), &devices, &options), Decline::NotMine);

    let scene = Scene::new(&ModelSpec { layers: 1, ..spec() });
    let cpu = DeviceCard { generation: Generation::Cpu, ..devices[0].clone() };
    let npu1 = DeviceCard { generation: Generation::Xdna1, ..devices[0].clone() };
    let decline = declined(&scene.model(), &[cpu, npu1], &options);
    assert!(matches!(decline, Decline::Optional(_)), "{decline:?}");
    assert_says(&decline, "no second-generation NPU");
    let decline = declined(
        &ModelSource::open(&scene.gguf).unwrap(),
        &devices,
        &named(&scene.packed.join("npu"), &Options::default()),
    );
    assert_unavailable(&decline, "it is not packed");
    let decline = declined(&ModelSource::open(&scene.gguf).unwrap(), &devices, &options);
    assert_unavailable(&decline, "no kernels are known for it");
    for (asked, phrase) in [(POSITIONS + 1, "a context of 209 positions"), (0, "a context of 0 positions")] {
        let options = Options { context_positions: Some(asked), ..Options::default() };
        assert_unavailable(&declined(&scene.model(), &devices, &options), phrase);
    }
    let fitness =
        LaneRoute.fitness(&scene.model(), &devices, &Options { context_positions: Some(17), ..Options::default() });
    assert!(matches!(fitness, Fitness::Serves(Service { window: 17, .. })), "{fitness:?}");

    // 8-bit tiles.
    rewrite(&scene.packed, |name, shape, bytes| {
        if name == "model.layers.0.mlp.down_proj.weight" {
            shape[1] = 8704;
            bytes.resize(shape[0] as usize * 8704, 1);
        }
    });
    assert_unavailable(&declined(&scene.model(), &devices, &options), "down_proj.weight is stored as Q8");
}

fn named(folder: &Path, options: &Options) -> Options {
    let mut options = options.clone();
    options.kernels = Some(folder.to_owned());
    options
}

#[test]
fn it_declines_kernels_that_do_not_fit_with_the_reason() {
    let devices = OneDevice::new(Profile::MainlineNew).cards();
    let options = Options::default();
    let scene = Scene::new(&ModelSpec { layers: 1, ..spec() });
    let kernels = scene.packed.join("npu");
    let with = |name: &str, contents: Option<&[u8]>, phrase: &str| {
        let path = kernels.join(name);
        let whole = fs::read(&path).unwrap();
        match contents {
            Some(contents) => fs::write(&path, contents).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        assert_unavailable(&declined(&scene.model(), &devices, &options), phrase);
        // Kernels that the user names are not passed over.
        let decline = declined(&scene.model(), &devices, &named(&kernels, &options));
        assert!(matches!(decline, Decline::Required(_)), "{decline:?}");
        fs::write(&path, whole).unwrap();
    };
    for name in ["layer_ctx1.elf", "layer_ctx2.elf", "layer_ctx17.elf", "lmhead.elf", "layer.pdi"] {
        with(name, None, &format!("{name} is missing"));
        with(name, None, "npuhal kit xdna2 --model");
    }
    let layer = fs::read(kernels.join("layer_ctx1.elf")).unwrap();
    with("layer_ctx1.elf", Some(b"ELF"), "npu/layer_ctx*.elf");
    with("layer_ctx1.elf", Some(&layer[..layer.len() - 4]), "outside the file");
    with("layer_ctx2.elf", Some(&[layer.as_slice(), &[0; 4]].concat()), "context ELFs differ in size");
    with("layer_ctx17.elf", Some(&layer), "is not linear in the context length");
    with("lmhead.elf", Some(&layer[..100]), "npu/lmhead.elf");
    // Another image: the mark is not about it.
    with("layer.pdi", Some(&[0; 64]), "were compiled for hardware");
    // The head of the layer's kernel.
    with("lmhead.elf", Some(&layer), "lmhead.elf");

    // Kernels of another model.
    for (other, phrase) in [
        (
            ModelSpec { hidden: 512, ..spec() },
            "the residual stream in bytes is 1024 in layer_ctx1.elf and 512 in the model",
        ),
        (ModelSpec { heads: 8, ..spec() }, "the kernels are for another model"),
        (ModelSpec { kv_heads: 4, ..spec() }, "half of the KV heads"),
        (ModelSpec { intermediate: 1024, ..spec() }, "the kernels are for another model"),
        (ModelSpec { spare_tokens: 384 - 266, ..spec() }, "lmhead.elf reaches byte 61440 of argument 1 (weights)"),
    ] {
        let other = Scene::new(&ModelSpec { layers: 1, ..other });
        let options = named(&other.packed.join("npu"), &options);
        let decline = declined(&scene.model(), &devices, &options);
        assert!(matches!(decline, Decline::Required(_)), "{decline:?}");
        assert_says(&decline, phrase);
    }

    // Kernels of the virtual NPU on hardware, and the other way round.
    let npu5 = DeviceCard { id: "npu5".to_owned(), is_virtual: false, ..devices[0].clone() };
    assert_unavailable(&declined(&scene.model(), std::slice::from_ref(&npu5), &options), "do nothing on hardware");
    let compiled = scene.folder.path().join("compiled");
    // The mark is the last file.
    let files = lane_kernels(scene.model().config(), POSITIONS);
    write_kernels(&compiled, &files[..files.len() - 1]);
    let options = named(&compiled, &options);
    assert_says(&declined(&scene.model(), &devices, &options), "executes no compiled code");
    let Fitness::Serves(service) = LaneRoute.fitness(&scene.model(), &[npu5], &options) else { panic!("npu5") };
    assert_eq!((service.device.as_str(), service.speed), ("npu5", SpeedClass::Lane));
    let dimensions = Dimensions::of(scene.model().config()).unwrap();
    assert!(service.memory_bytes.unwrap() > (32 << 20) && dimensions.layers == 1, "{service:?}");
}
