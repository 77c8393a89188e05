//! The lane on a device that runs nothing and remembers every call.

mod common;

use common::kernels::{kernel_files, small_config};
use npuhal_core::card::DeviceCard;
use npuhal_core::device::{ArgKind, BufferRef, BufferSpec, Context, Device, Direction, Program, RunIndex};
use npuhal_core::dtype::{bf16_bits, bf16_value};
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Stepper, Tap, TapSink, Want};
use npuhal_models::ModelConfig;
use npuhal_tests::kit::devices::{Call, RecordingDevice};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::kernels::Kernels;
use npuhal_xdna2::lane::{Lane, LaneOptions, LaneSource, LayerTensors};
use npuhal_xdna2::packing::{PackError, RopeTable, SliceTiles, TILE_BYTES, TileSource, source_of, tiles_of};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const POSITIONS: u32 = 64;
const LAYERS: usize = 3;

/// Bytes that differ from place to place.
fn pattern(len_bytes: usize, seed: u32) -> Vec<u8> {
    (0..len_bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 40_503) >> 13) as u8).collect()
}

/// A model with contents that mean nothing.
struct TestModel {
    config: ModelConfig,
    tensors: BTreeMap<String, Vec<u8>>,
}

impl TestModel {
    fn new(config: ModelConfig) -> Self {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.q_width(), config.kv_width());
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, len_bytes: usize| {
            let bytes = pattern(len_bytes, tensors.len() as u32 + 1);
            tensors.insert(name, bytes);
        };
        let tiles = |rows, columns| tiles_of(rows, columns) * TILE_BYTES;
        for layer in 0..config.layers {
            for (name, len_bytes) in [
                ("q", tiles(q, hidden)),
                ("k", tiles(kv, hidden)),
                ("v", tiles(kv, hidden)),
                ("o", tiles(hidden, q)),
                ("gate", tiles(wide, hidden)),
                ("up", tiles(wide, hidden)),
                ("down", tiles(hidden, wide)),
                ("input_norm", 2 * hidden),
                ("post_norm", 2 * hidden),
                ("q_norm", 256),
                ("k_norm", 256),
            ] {
                add(format!("{layer}.{name}"), len_bytes);
            }
        }
        add("head".to_owned(), tiles(config.vocab_size, hidden));
        add("norm".to_owned(), 2 * hidden);
        add("embedding".to_owned(), 2 * hidden * config.vocab_size);
        Self { config, tensors }
    }

    fn tiles<'a>(&'a self, name: &'a str) -> Box<dyn TileSource + 'a> {
        let (name, available) = self.tensors.get_key_value(name).unwrap();
        Box::new(SliceTiles { name, count: available.len() / TILE_BYTES, available })
    }
}

/// Names of a layer's tensors borrow from the map, so that the source can lend them out.
impl LaneSource for TestModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn layer(&self, layer: usize) -> Result<LayerTensors<'_>, PackError> {
        let key = |name: &str| self.tensors.get_key_value(&format!("{layer}.{name}")).unwrap().0.as_str();
        let tiles = |name: &str| self.tiles(key(name));
        let norm = |name: &str| self.tensors[key(name)].as_slice();
        Ok(LayerTensors {
            q: tiles("q"),
            k: tiles("k"),
            v: tiles("v"),
            o: tiles("o"),
            gate: tiles("gate"),
            up: tiles("up"),
            down: tiles("down"),
            input_norm: norm("input_norm"),
            post_attention_norm: norm("post_norm"),
            q_norm: Some(norm("q_norm")),
            k_norm: Some(norm("k_norm")),
        })
    }

    fn head(&self) -> Result<Box<dyn TileSource + '_>, PackError> {
        Ok(self.tiles("head"))
    }

    fn final_norm(&self) -> Result<&[u8], PackError> {
        Ok(&self.tensors["norm"])
    }

    fn embedding(&self) -> Result<&[u8], PackError> {
        Ok(&self.tensors["embedding"])
    }
}

/// Hands out the buffers that were allocated.
#[derive(Clone)]
struct Spy {
    inner: RecordingDevice,
    buffers: Arc<Mutex<BTreeMap<String, BufferRef>>>,
}

impl Spy {
    fn new() -> Self {
        let inner = RecordingDevice::new("npu5");
        let buffer = ArgKind::Buffer { direction: Direction::InOut, min_bytes: 0 };
        inner.define("flinit", &[buffer]);
        inner.define("flhead", &[buffer; 4]);
        inner.script("flhead", |buffers| buffers[0].fill(0));
        (1..=POSITIONS).for_each(|context| inner.define(&format!("fl{context:05}"), &[buffer; 5]));
        Self { inner, buffers: Arc::default() }
    }

    fn buffer(&self, label: &str) -> BufferRef {
        self.buffers.lock().unwrap().get(label).unwrap_or_else(|| panic!("no buffer {label}")).clone()
    }

    fn bytes(&self, label: &str, at_bytes: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        self.buffer(label).read(at_bytes, &mut bytes).unwrap();
        bytes
    }
}

impl Device for Spy {
    fn card(&self) -> &DeviceCard {
        self.inner.card()
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        let buffer = self.inner.allocate(spec)?;
        self.buffers.lock().unwrap().insert(spec.label.clone(), buffer.clone());
        Ok(buffer)
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        self.inner.open_context(boot)
    }
}

fn load_with(options: LaneOptions) -> (Spy, Lane) {
    let spy = Spy::new();
    let config = small_config();
    let files = kernel_files(&Dimensions::of(&config).unwrap(), POSITIONS);
    let lane = Lane::load(Box::new(spy.clone()), Box::new(TestModel::new(config)), &files, options).unwrap();
    (spy, lane)
}

fn load() -> (Spy, Lane) {
    let (spy, mut lane) = load_with(LaneOptions::default());
    let calls = spy.inner.take_calls();
    assert!(!calls.iter().any(|call| matches!(call, Call::Open(..))), "no context is opened at load");
    lane.begin().unwrap();
    (spy, lane)
}

fn row(position: u32) -> Row {
    Row { sequence: SequenceId(0), token: 7 + position % 8, position }
}

fn step(lane: &mut Lane, position: u32, want: Want<'_>) -> Result<HiddenRows, RunError> {
    let mut logits = HiddenRows::new();
    lane.forward(&[row(position)], &mut logits, want, &Control::new())?;
    Ok(logits)
}

/// Calls by kind, without those on buffers.
fn short(calls: &[Call]) -> Vec<String> {
    let one = |call: &Call| match call {
        Call::Open(context, program) => format!("open {context} {program}"),
        Call::Load(context, kernel) => format!("load {context} {kernel}"),
        Call::Push(list, kernel, _) => format!("push {list} {kernel}"),
        Call::Rebind(list, run, kernel) => format!("rebind {list} {} {kernel}", run.0),
        Call::Submit(list, submission, kernels) => format!("submit {list} {submission} {}", kernels.join(" ")),
        Call::Wait(submission) => format!("wait {submission}"),
        Call::Write(label, range) => format!("write {label} {}..{}", range.start, range.end),
        Call::Read(label, range) => format!("read {label} {}..{}", range.start, range.end),
        other => format!("{other:?}"),
    };
    calls.iter().map(one).collect()
}

#[test]
fn a_generation_is_one_context_and_one_list_a_token() {
    let (spy, mut lane) = load();
    assert_eq!(
        short(&spy.inner.take_calls()),
        ["open 0 flinit", "load 0 flinit", "push 0 flinit", "submit 0 0 flinit", "wait 0", "load 0 flhead"]
    );
    step(&mut lane, 0, Want::Last).unwrap();
    let norms = |slot: usize| (0..LAYERS).map(move |layer| format!("write layer {layer} head norms {slot} 0..256"));
    let new_list = |list: usize, kernel: &str| {
        let layers = std::iter::repeat_n(format!("push {list} {kernel}"), LAYERS);
        layers.chain([format!("push {list} flhead")]).collect::<Vec<_>>()
    };
    let mut wanted: Vec<String> = norms(0).collect();
    wanted.push("load 0 fl00001".to_owned());
    wanted.extend(new_list(1, "fl00001"));
    let poison = ["write logits 0..4".to_owned(), "write logits 380..384".to_owned()];
    wanted.extend(poison.clone());
    wanted.push("write act 0..512".to_owned());
    wanted.push("submit 1 1 fl00001 fl00001 fl00001 flhead".to_owned());
    // The next token's list, while this one runs.
    wanted.extend(norms(1));
    wanted.push("load 0 fl00002".to_owned());
    wanted.extend(new_list(2, "fl00002"));
    wanted.extend(["wait 1".to_owned(), "read logits 0..384".to_owned()]);
    assert_eq!(short(&spy.inner.take_calls()), wanted);

    step(&mut lane, 1, Want::Last).unwrap();
    let mut wanted = poison.to_vec();
    wanted.extend(["write act 0..512".to_owned(), "submit 2 2 fl00002 fl00002 fl00002 flhead".to_owned()]);
    wanted.extend(norms(0));
    wanted.push("load 0 fl00003".to_owned());
    wanted.extend((0..LAYERS).map(|layer| format!("rebind 1 {layer} fl00003")));
    wanted.extend(["wait 2".to_owned(), "read logits 0..384".to_owned()]);
    assert_eq!(short(&spy.inner.take_calls()), wanted);

    lane.end();
    assert_eq!(spy.inner.take_calls(), [Call::Close(0)]);
    let error = step(&mut lane, 2, Want::Last).unwrap_err();
    assert!(error.to_string().contains("no generation was begun"), "{error}");
    // What the sequence holds outlives the context.
    lane.begin().unwrap();
    step(&mut lane, 2, Want::Last).unwrap();
}

#[test]
fn a_prompt_runs_the_head_once() {
    let (spy, mut lane) = load();
    spy.inner.take_calls();
    (0..4).for_each(|position| _ = step(&mut lane, position, Want::Nothing).unwrap());
    step(&mut lane, 4, Want::Last).unwrap();
    step(&mut lane, 5, Want::Last).unwrap();
    let calls = spy.inner.take_calls();
    let submitted: Vec<_> = calls
        .iter()
        .filter_map(|call| if let Call::Submit(_, _, kernels) = call { Some(kernels.join(" ")) } else { None })
        .collect();
    let runs = |context: u32, head: &str| format!("fl{context:05} fl{context:05} fl{context:05}{head}");
    let mut wanted: Vec<_> = (1..=4).map(|context| runs(context, "")).collect();
    wanted.extend([runs(5, " flhead"), runs(6, " flhead")]);
    assert_eq!(submitted, wanted);
    // A length is loaded once, and a rotation written once, also where the guess of the next list was wrong.
    let loads = calls.iter().filter(|call| matches!(call, Call::Load(..))).count();
    let rotations = calls.iter().filter(|call| matches!(call, Call::Write(label, _) if label.contains("head norms")));
    assert_eq!((loads, rotations.count()), (7, 7 * LAYERS));
    let reads = calls.iter().filter(|call| matches!(call, Call::Read(label, _) if label == "logits")).count();
    assert_eq!(reads, 2);
}

#[test]
fn the_arguments_of_a_run_are_those_of_its_layer_and_slot() {
    let (spy, mut lane) = load();
    spy.inner.take_calls();
    step(&mut lane, 0, Want::Last).unwrap();
    let pushes: Vec<_> = spy
        .inner
        .take_calls()
        .into_iter()
        .filter_map(|call| if let Call::Push(list, _, labels) = call { Some((list, labels)) } else { None })
        .collect();
    let layer = |layer: usize, slot: usize| {
        ["act".to_owned()]
            .into_iter()
            .chain(
                ["weights", "norms", &format!("head norms {slot}"), "KV cache"].map(|l| format!("layer {layer} {l}")),
            )
            .collect::<Vec<_>>()
    };
    let head: Vec<String> = ["logits", "head weights", "act", "final norm"].map(String::from).into();
    for (slot, list) in [(0, 1), (1, 2)] {
        let of_list: Vec<_> = pushes.iter().filter(|(of, _)| *of == list).map(|(_, labels)| labels.clone()).collect();
        assert_eq!(of_list, [layer(0, slot), layer(1, slot), layer(2, slot), head.clone()]);
    }
}

#[test]
fn buffers_hold_what_the_kernels_read() {
    let (spy, mut lane) = load();
    let dimensions = Dimensions::of(&small_config()).unwrap();
    let kernels = Kernels::new(&kernel_files(&dimensions, POSITIONS), &dimensions).unwrap();
    let allocated: u64 = spy.buffers.lock().unwrap().values().map(BufferRef::len_bytes).sum();
    assert_eq!(allocated, Lane::memory_bytes(&dimensions, &kernels));
    let model = TestModel::new(small_config());
    let tensor = |name: &str| model.tensors[name].clone();
    assert_eq!(spy.bytes("layer 1 norms", 0, 512), tensor("1.input_norm"));
    assert_eq!(spy.bytes("layer 1 norms", 512, 512), tensor("1.post_norm"));
    assert_eq!(spy.bytes("layer 1 norms", 1024, 64), [0; 64]);
    assert_eq!(spy.bytes("final norm", 0, 512), tensor("norm"));
    let rope = RopeTable::new(1e6);
    for slot in 0..2 {
        let norms = spy.bytes(&format!("layer 2 head norms {slot}"), 0, 1024);
        assert_eq!(norms[..256], rope.row(0));
        assert_eq!(norms[256..768], [tensor("2.q_norm"), tensor("2.k_norm")].concat());
        assert!(norms[768..].iter().all(|byte| *byte == 0));
    }
    // Hidden 256: groups of two tiles keep their order; output of 512: groups of four.
    let (q, o) = (tensor("0.q"), tensor("0.o"));
    assert_eq!(spy.bytes("layer 0 weights", 0, q.len()), q);
    let (q_tiles, kv_tiles) = (16, 8);
    let o_at = (q_tiles + 2 * kv_tiles) * TILE_BYTES;
    for tile in 0..16 {
        let packed = spy.bytes("layer 0 weights", (o_at + tile * TILE_BYTES) as u64, TILE_BYTES);
        let from = source_of(tile, 4) * TILE_BYTES;
        assert!(packed == o[from..from + TILE_BYTES], "tile {tile}");
    }
    step(&mut lane, 0, Want::Last).unwrap();
    step(&mut lane, 1, Want::Last).unwrap();
    let embedding = tensor("embedding");
    assert_eq!(spy.bytes("act", 0, 512), embedding[8 * 512..9 * 512]);
    // The slot that ran position 1, and the one that is prepared for position 2.
    assert_eq!(spy.bytes("layer 0 head norms 1", 0, 256), rope.row(1));
    assert_eq!(spy.bytes("layer 0 head norms 0", 0, 256), rope.row(2));
}

#[test]
fn logits_are_the_bf16_values_of_the_buffer() {
    let (spy, mut lane) = load();
    let values: Vec<f32> = (0..192).map(|i| bf16_value(bf16_bits(i as f32 * -0.37 + 20.0))).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| bf16_bits(*value).to_le_bytes()).collect();
    spy.inner.script("flhead", move |buffers| buffers[0][..bytes.len()].copy_from_slice(&bytes));
    let logits = step(&mut lane, 0, Want::Last).unwrap();
    assert_eq!((logits.rows(), logits.row(0)), (1, values.as_slice()));
    assert_eq!(step(&mut lane, 1, Want::Nothing).unwrap().rows(), 0);
}

#[test]
fn logits_that_never_arrive_are_not_those_of_the_token_before() {
    let (spy, mut lane) = load();
    step(&mut lane, 0, Want::Last).unwrap();
    // Completes without a word; then with all but the last.
    for left in [384, 4] {
        spy.inner.script("flhead", move |buffers| buffers[0][..384 - left].fill(0));
        let error = step(&mut lane, 1, Want::Last).unwrap_err();
        let wanted = format!("the logits of position 1 never arrived at byte {:#x}", 384 - left);
        assert!(matches!(error, RunError::Failed { .. }) && error.to_string().contains(&wanted), "{error}");
        assert!(step(&mut lane, 1, Want::Last).unwrap_err().loses_context(), "the context is not trusted any more");
        lane.begin().unwrap();
    }
    step(&mut lane, 1, Want::Nothing).unwrap();
    spy.inner.script("flhead", |buffers| buffers[0].fill(0));
    step(&mut lane, 2, Want::Last).unwrap();
}

#[test]
fn a_time_out_loses_the_context_and_the_next_generation_gets_a_new_one() {
    let (spy, mut lane) = load();
    step(&mut lane, 0, Want::Last).unwrap();
    spy.inner.take_calls();
    spy.inner.lose_next_at(RunIndex(1));
    let error = step(&mut lane, 1, Want::Last).unwrap_err();
    assert!(matches!(error, RunError::TimedOut { run: Some(RunIndex(1)), .. }), "{error}");
    assert!(spy.inner.take_calls().contains(&Call::Close(0)), "a lost context is closed at once");
    let error = step(&mut lane, 1, Want::Last).unwrap_err();
    assert!(
        matches!(&error, RunError::Device(DeviceError::ContextLost { reason }) if reason.contains("timed out")),
        "{error}"
    );
    assert_eq!(spy.inner.take_calls(), []);
    lane.end();
    lane.begin().unwrap();
    assert!(spy.inner.take_calls().contains(&Call::Open(1, "flinit".to_owned())));
    step(&mut lane, 1, Want::Last).unwrap();
    // The initial run may fail as well.
    spy.inner.lose_next_at(RunIndex(0));
    assert!(matches!(lane.begin().unwrap_err(), RunError::TimedOut { .. }));
    assert!(step(&mut lane, 2, Want::Last).is_err());
    lane.begin().unwrap();
    step(&mut lane, 2, Want::Last).unwrap();
}

#[test]
fn rows_that_do_not_fit_are_refused_before_anything_runs() {
    let (spy, mut lane) = load();
    step(&mut lane, 0, Want::Last).unwrap();
    spy.inner.take_calls();
    let mut refuse = |rows: &[Row], want: Want<'_>| {
        lane.forward(rows, &mut HiddenRows::new(), want, &Control::new()).unwrap_err().to_string()
    };
    assert_eq!(refuse(&[row(1), row(2)], Want::Last), "rows of a call: 2 exceeds the limit of 1");
    assert_eq!(refuse(&[Row { sequence: SequenceId(1), ..row(1) }], Want::Last), "sequences: 2 exceeds the limit of 1");
    assert_eq!(refuse(&[row(POSITIONS)], Want::Last), "positions: 65 exceeds the limit of 64");
    assert_eq!(refuse(&[row(3)], Want::Last), "bad rows: position 3 of a sequence that holds 1");
    assert_eq!(refuse(&[Row { token: 192, ..row(1) }], Want::Last), "bad rows: token 192 of a vocabulary of 192");
    assert_eq!(refuse(&[row(1)], Want::Each(&[true, false])), "bad rows: 2 wishes for 1 rows");
    let control = Control::new();
    control.cancel();
    let cancelled = lane.forward(&[row(1)], &mut HiddenRows::new(), Want::Last, &control).unwrap_err();
    assert!(matches!(cancelled, RunError::Cancelled));
    assert_eq!(spy.inner.take_calls(), []);
    lane.forward(&[], &mut HiddenRows::new(), Want::All, &Control::new()).unwrap();
    assert_eq!(spy.inner.take_calls(), []);
}

#[test]
fn the_last_position_prepares_nothing_beyond_it() {
    let (spy, mut lane) = load_with(LaneOptions { positions: Some(2), ..LaneOptions::default() });
    assert_eq!(lane.capacity().positions, 2);
    lane.begin().unwrap();
    step(&mut lane, 0, Want::Last).unwrap();
    step(&mut lane, 1, Want::Last).unwrap();
    let loads = spy.inner.calls().iter().filter(|call| matches!(call, Call::Load(..))).count();
    assert_eq!(loads, 4, "init, head, two lengths");
    let config = small_config();
    let files = kernel_files(&Dimensions::of(&config).unwrap(), POSITIONS);
    let options = LaneOptions { positions: Some(65), ..LaneOptions::default() };
    let error = Lane::load(Box::new(Spy::new()), Box::new(TestModel::new(config)), &files, options).unwrap_err();
    assert_eq!(error.to_string(), "a context of 65 positions was asked for; these kernels serve 1 to 64");
}

#[test]
fn going_back_runs_the_same_lengths_again() {
    let (spy, mut lane) = load();
    (0..4).for_each(|position| _ = step(&mut lane, position, Want::Nothing).unwrap());
    assert_eq!(lane.truncate(SequenceId(0), 10), 4);
    assert_eq!(lane.truncate(SequenceId(3), 1), 0);
    assert_eq!(lane.truncate(SequenceId(0), 1), 1);
    spy.inner.take_calls();
    step(&mut lane, 1, Want::Nothing).unwrap();
    step(&mut lane, 2, Want::Nothing).unwrap();
    let calls = spy.inner.take_calls();
    assert!(!calls.iter().any(|call| matches!(call, Call::Load(..))), "they are still loaded");
    let submitted: Vec<_> = calls
        .iter()
        .filter_map(|call| if let Call::Submit(_, _, kernels) = call { Some(kernels[0].as_str()) } else { None })
        .collect();
    assert_eq!(submitted, ["fl00002", "fl00003"]);
}

#[test]
fn many_lengths_keep_a_bounded_number_of_kernels_loaded() {
    let (spy, mut lane) = load();
    (0..POSITIONS).for_each(|position| _ = step(&mut lane, position, Want::Nothing).unwrap());
    lane.truncate(SequenceId(0), 0);
    spy.inner.take_calls();
    step(&mut lane, 0, Want::Last).unwrap();
    let loads = spy.inner.take_calls().iter().filter(|call| matches!(call, Call::Load(..))).count();
    assert_eq!(loads, 2, "the oldest were let go");
}

type Seen = Arc<Mutex<Vec<(Tap, u32, usize)>>>;

struct Watch(Seen);

impl TapSink for Watch {
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]) {
        self.0.lock().unwrap().push((tap, row.position, values.len()));
    }
}

#[test]
fn observers_see_each_layer() {
    let (spy, mut lane) = load();
    step(&mut lane, 0, Want::Last).unwrap();
    let seen = Seen::default();
    lane.observe(Some(Box::new(Watch(Arc::clone(&seen)))));
    spy.inner.take_calls();
    step(&mut lane, 1, Want::Nothing).unwrap();
    let mut wanted = Vec::new();
    for layer in 0..LAYERS as u32 {
        wanted.extend([(Tap::K(layer), 1, 256), (Tap::V(layer), 1, 256), (Tap::LayerOut(layer), 1, 256)]);
    }
    wanted.push((Tap::Logits, 1, 192));
    assert_eq!(*seen.lock().unwrap(), wanted);
    assert_eq!(lane.taps().len(), wanted.len());
    let calls = spy.inner.take_calls();
    let submitted: Vec<_> = calls
        .iter()
        .filter_map(|call| if let Call::Submit(_, _, kernels) = call { Some(kernels.join(" ")) } else { None })
        .collect();
    assert_eq!(submitted, ["fl00002", "fl00002", "fl00002", "flhead"]);
    // Row 1 of the four regions: keys in the first and third, values in the others.
    let reads: Vec<_> = calls
        .iter()
        .filter_map(|call| match call {
            Call::Read(label, range) if label == "layer 0 KV cache" => Some(range.clone()),
            _ => None,
        })
        .collect();
    let at = |region: u64| (region * 64 + 1) * 256..(region * 64 + 2) * 256;
    assert_eq!(reads, [at(0), at(2), at(1), at(3)]);
    lane.observe(None);
    step(&mut lane, 2, Want::Last).unwrap();
    assert_eq!(seen.lock().unwrap().len(), wanted.len());
}

#[test]
fn a_pipeline_steps_a_prompt() {
    let (_spy, lane) = load_with(LaneOptions::default());
    let mut pipeline = Pipeline::new(vec![Box::new(lane)], LAYERS).unwrap();
    pipeline.begin().unwrap();
    let rows: Vec<Row> = (0..5).map(row).collect();
    let mut logits = HiddenRows::new();
    pipeline.step(&rows, Want::Last, &mut logits, &Control::new()).unwrap();
    assert_eq!((logits.rows(), logits.width()), (1, 192));
    pipeline.end();
}

#[test]
fn a_model_that_does_not_fit_allocates_nothing() {
    let files = kernel_files(&Dimensions::of(&small_config()).unwrap(), POSITIONS);
    let spy = Spy::new();
    let load = |model: TestModel| {
        Lane::load(Box::new(spy.clone()), Box::new(model), &files, LaneOptions::default()).unwrap_err().to_string()
    };
    let mut biased = TestModel::new(small_config());
    biased.config.qkv_bias = true;
    assert!(load(biased).contains("biases"));
    let mut short = TestModel::new(small_config());
    short.tensors.get_mut("embedding").unwrap().pop();
    assert!(load(short).contains("model.embed_tokens.weight has 98303 bytes; wanted 98304"));
    let other = TestModel::new(ModelConfig { intermediate_size: 1024, ..small_config() });
    assert!(load(other).contains("the kernels are for another model"));
    assert_eq!(spy.inner.take_calls(), []);
    let mut cut = TestModel::new(small_config());
    cut.tensors.get_mut("2.up").unwrap().truncate(3 * TILE_BYTES);
    assert!(load(cut).contains("2.up has 3 tiles; a matrix of this model has 16"));
}
