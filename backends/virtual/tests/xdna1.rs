//! Engines, chunked graphs and projection of first-generation parts on the virtual NPU, through the driver.
//!
//! Streams are made here by the published layouts, and results are held against the same model in f64 with the published
//! rounding points.

mod common;
#[path = "xdna1/model.rs"]
mod model;
#[path = "xdna1/streams.rs"]
mod streams;

use common::{Bench, Flow, buffers, patience};
use model::{Cache, Family, Matrix, Model, bf16, cosine, rms_error, value};
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::RunError;
use npuhal_core::device::{BufferRef, BufferSpec, Context, Device, Kernel, Runlist};
use npuhal_virtual::kit::{Xdna1Design, Xdna1Kernel, Xdna1Kit, Xdna1Model};
use npuhal_virtual::{DiagnosisKind, VirtualSpec};
use sha2::{Digest as _, Sha256};
use streams::{chunk_weights, header, projection_weights, qwen_stream, rope_row, smollm_stream};

const DIGESTS: &str = include_str!("data/xdna1/engine_layout_digests.json");

fn sizes(model: &Model) -> Xdna1Model {
    Xdna1Model {
        hidden: model.hidden,
        intermediate: model.intermediate,
        heads: model.heads,
        kv_heads: model.kv_heads,
        layers: model.layers.len(),
        vocab: model.vocab,
    }
}

/// A kernel in its context, with its buffers.
struct Loaded {
    bench: Bench,
    _context: Box<dyn Context>,
    kernel: Box<dyn Kernel>,
    list: Box<dyn Runlist>,
    buffers: Vec<BufferRef>,
}

impl Loaded {
    fn new(design: Xdna1Design, model: &Xdna1Model, layers: usize) -> Self {
        Self::with(Xdna1Kernel::new(design, model, layers).unwrap(), |bytes| bytes)
    }

    /// With buffers of other lengths.
    fn with(made: Xdna1Kernel, resize: impl Fn(u64) -> u64) -> Self {
        let bench = Bench::new(&VirtualSpec::new(Silicon::Npu1));
        let (mut context, kernel) = bench.load(&made.kit, Flow::Xclbin).unwrap();
        let buffers: Vec<BufferRef> = made
            .arguments
            .iter()
            .map(|argument| {
                let spec = BufferSpec::tensor(resize(argument.bytes as u64), argument.name);
                bench.npu.allocate(&spec).unwrap()
            })
            .collect();
        let list = context.runlist();
        let mut loaded = Self { bench, _context: context, kernel, list, buffers };
        let all: Vec<_> = loaded.buffers.iter().collect();
        loaded.list.push(&*loaded.kernel, &self::buffers(&all)).unwrap();
        loaded
    }

    fn write(&self, argument: usize, bytes: &[u8]) {
        self.buffers[argument].write(0, bytes).unwrap();
    }

    fn read(&self, argument: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.buffers[argument].len_bytes() as usize];
        self.buffers[argument].read(0, &mut bytes).unwrap();
        bytes
    }

    fn read_bits(&self, argument: usize) -> Vec<u16> {
        self.read(argument).as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
    }

    fn run(&mut self) -> Result<(), RunError> {
        self.list.submit()?.wait(patience()).map(|_| ())
    }

    fn run_clean(&mut self, what: &str) {
        self.run().unwrap_or_else(|error| panic!("{what}: {error}: {:#?}", self.bench.hardware.diagnoses()));
        self.bench.assert_clean(what);
    }
}

/// An engine and the host's side of a sequence.
struct Engine<'a> {
    model: &'a Model,
    loaded: Loaded,
    cache: Vec<u16>,
}

struct Step {
    kv_new: Vec<u16>,
    result: Vec<u8>,
}

impl<'a> Engine<'a> {
    fn new(model: &'a Model, design: Xdna1Design) -> Self {
        let loaded = Loaded::new(design, &sizes(model), model.layers.len());
        match model.family {
            Family::SmolLm => loaded.write(0, &smollm_stream(model)),
            Family::Qwen => {
                loaded.buffers[0].fill(&mut |bytes| qwen_stream(model, bytes)).unwrap();
            }
        }
        let objects = 1 + model.layers.len() * model.kv_heads;
        Self { model, loaded, cache: vec![0; objects * 8192] }
    }

    fn step(&mut self, token: usize, position: usize) -> Step {
        self.write_header(token, position);
        self.loaded.run_clean("engine");
        let kv_new = self.loaded.read_bits(2);
        self.store(&kv_new, position);
        Step { kv_new, result: self.loaded.read(3) }
    }

    fn write_header(&mut self, token: usize, position: usize) {
        let header = header(self.model, token, position);
        self.cache[..header.len()].copy_from_slice(&header);
        let bytes: Vec<u8> = self.cache.iter().flat_map(|element| element.to_le_bytes()).collect();
        self.loaded.write(1, &bytes);
    }

    /// What the host does after a step: rows of the new position into the objects.
    fn store(&mut self, kv_new: &[u16], position: usize) {
        for (object, row) in kv_new.chunks_exact(128).enumerate() {
            let at = (1 + object) * 8192 + position * 64;
            self.cache[at..at + 64].copy_from_slice(&row[..64]);
            self.cache[at + 4096..at + 4160].copy_from_slice(&row[64..]);
        }
    }
}

fn values(bits: &[u16]) -> Vec<f64> {
    bits.iter().map(|bits| f64::from(value(*bits))).collect()
}

fn hidden_values(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<2>().0.iter().map(|pair| f64::from(value(u16::from_le_bytes(*pair)))).collect()
}

fn logit_values(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
}

/// Bits that differ, and whether all of those are neighbours.
fn differing(found: &[u16], wanted: &[u16]) -> (usize, bool) {
    assert_eq!(found.len(), wanted.len());
    let mut count = 0;
    let mut are_neighbours = true;
    for (found, wanted) in found.iter().zip(wanted) {
        count += usize::from(found != wanted);
        are_neighbours &= found.abs_diff(*wanted) <= 1;
    }
    (count, are_neighbours)
}

#[test]
fn streams_are_the_published_ones() {
    let digests: serde_json::Value = serde_json::from_str(DIGESTS).unwrap();
    let digest = |bytes: &[u8]| -> String { Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect() };
    let stream = smollm_stream(&Model::published(Family::SmolLm, 2));
    assert_eq!(digest(&stream), digests["smollm"]["sha256_all"]);
    let model = Model::published(Family::Qwen, 1);
    let mut stream = vec![0; streams::qwen_stream_bytes(1)];
    qwen_stream(&model, &mut stream);
    for tile in 0..6 {
        let (at, layers, all) = streams::qwen_tile(1, tile);
        let wanted = &digests["qwen"];
        assert_eq!(digest(&stream[at..at + layers]), wanted["sha256_layer_part_per_tile"][tile]);
        assert_eq!(digest(&stream[at..at + all]), wanted["sha256_per_tile_le_u16"][tile]);
    }
}

#[test]
fn the_smollm_engine_computes_the_model() {
    let model = Model::random(Family::SmolLm, 2, 11);
    let mut engine = Engine::new(&model, Xdna1Design::SmolLmEngine);
    let mut cache = Cache::new(&model);
    for (position, token) in [3, 17, 4, 99, 17, 5].into_iter().enumerate() {
        let step = engine.step(token, position);
        let wanted = model.forward(token, position, &mut cache);
        // The first layer's keys and values depend on norm, projection and RoPE alone.
        let (count, are_neighbours) = differing(&step.kv_new[..384], &wanted.kv_new[..384]);
        assert!(count <= 4 && are_neighbours, "position {position}: {count} of 384 differ");
        let error = rms_error(&values(&step.kv_new[384..]), &values(&wanted.kv_new[384..]));
        assert!(error < 0.02, "position {position}: keys and values of layer 1 are off by {error}");
        let error = rms_error(&hidden_values(&step.result), &wanted.normed);
        assert!(error < 0.02, "position {position}: hidden state is off by {error}");
        // The next step compares one position, not the sum of all errors before.
        cache.replace(&step.kv_new, position);
    }
}

#[test]
fn the_qwen_engine_computes_the_model_with_and_without_head() {
    let model = Model::random(Family::Qwen, 1, 5);
    let mut engine = Engine::new(&model, Xdna1Design::QwenEngine);
    let mut prefill = Engine::new(&model, Xdna1Design::QwenEnginePrefill);
    let mut cache = Cache::new(&model);
    for (position, token) in [3, 17, 4].into_iter().enumerate() {
        let wanted = model.forward(token, position, &mut cache);
        let step = engine.step(token, position);
        let (count, are_neighbours) = differing(&step.kv_new, &wanted.kv_new);
        assert!(count <= 2 && are_neighbours, "position {position}: {count} of 256 differ");
        let logits = logit_values(&step.result);
        let error = rms_error(&logits, &wanted.logits(&model));
        assert!(error < 0.004, "position {position}: logits are off by {error}");
        let before = prefill.loaded.read(3);
        let short = prefill.step(token, position);
        assert_eq!(short.kv_new, step.kv_new);
        // The end signal is one object of logits; no other is touched.
        assert_eq!(short.result[..256], [0; 256]);
        assert_eq!(short.result[256..], before[256..]);
        cache.replace(&step.kv_new, position);
    }
}

/// A chunked graph and the host's side of a sequence.
struct Chunk {
    loaded: Loaded,
}

impl Chunk {
    /// Layers `first` to `first + count` of a model.
    fn new(model: &Model, design: Xdna1Design, first: usize, count: usize) -> Self {
        let loaded = Loaded::new(design, &sizes(model), count);
        let layers = &model.layers[first..first + count];
        loaded.write(0, &chunk_weights(model, layers, design == Xdna1Design::SmolLmChunkW8));
        let parameters: Vec<u8> = layers.iter().flat_map(|layer| streams::chunk_parameters(model, layer)).collect();
        loaded.write(1, &parameters);
        loaded.write(4, &vec![0; loaded.buffers[4].len_bytes() as usize]);
        Self { loaded }
    }

    /// Hidden state in and out.
    fn step(&mut self, model: &Model, position: usize, hidden: &[u16]) -> Vec<u16> {
        let bytes =
            |elements: &[u16]| -> Vec<u8> { elements.iter().flat_map(|element| element.to_le_bytes()).collect() };
        self.loaded.write(2, &bytes(&rope_row(model, position)));
        self.loaded.write(3, &bytes(hidden));
        self.loaded.run_clean("chunk");
        self.loaded.read_bits(3)
    }

    /// Keys and values of a position, in the order of an engine's output.
    fn row(&self, position: usize) -> Vec<u16> {
        let cache = self.loaded.read_bits(4);
        let object = |object: &[u16]| {
            [&object[position * 64..(position + 1) * 64], &object[4096 + position * 64..4096 + (position + 1) * 64]]
                .concat()
        };
        cache.chunks_exact(8192).flat_map(object).collect()
    }
}

fn check_chunks(family: Family, design: Xdna1Design, seed: u64, bound: f64) {
    let mut model = Model::random(family, 2, seed);
    if design == Xdna1Design::SmolLmChunkW8 {
        model.quantize();
    }
    let mut both = Chunk::new(&model, design, 0, 2);
    let mut one_by_one = [0, 1].map(|layer| Chunk::new(&model, design, layer, 1));
    let mut cache = Cache::new(&model);
    cache.has_bf16_rope = true;
    for (position, token) in [3, 17, 4, 99].into_iter().enumerate() {
        let embedding = model.embedding(token);
        let wanted = model.forward(token, position, &mut cache);
        let found = both.step(&model, position, &embedding);
        let middle = one_by_one[0].step(&model, position, &embedding);
        let last = one_by_one[1].step(&model, position, &middle);
        assert_eq!(found, last, "two layers at once and one by one");
        let error = rms_error(&values(&found), &values(&wanted.hidden));
        assert!(error < bound, "{design} at {position}: hidden state is off by {error}");
        let rows = both.row(position);
        let (count, are_neighbours) = differing(&rows[..rows.len() / 2], &wanted.kv_new[..rows.len() / 2]);
        assert!(count <= 4 && are_neighbours, "{design} at {position}: {count} elements of layer 0 differ");
        cache.replace(&rows, position);
    }
    // Rows that were used are all still there.
    assert_eq!(both.row(1), cache.row(1));
}

#[test]
fn chunked_graphs_compute_the_model() {
    check_chunks(Family::SmolLm, Xdna1Design::SmolLmChunk, 21, 0.02);
    check_chunks(Family::SmolLm, Xdna1Design::SmolLmChunkW8, 22, 0.02);
    check_chunks(Family::Qwen, Xdna1Design::QwenChunk, 23, 0.02);
}

#[test]
fn engine_and_chunks_differ_in_attention_alone() {
    let model = Model::random(Family::SmolLm, 1, 31);
    let mut engine = Engine::new(&model, Xdna1Design::SmolLmEngine);
    let mut chunk = Chunk::new(&model, Xdna1Design::SmolLmChunk, 0, 1);
    for (position, token) in [8, 2, 40].into_iter().enumerate() {
        let step = engine.step(token, position);
        let hidden = chunk.step(&model, position, &model.embedding(token));
        assert_eq!(step.kv_new, chunk.row(position), "norm, projections, RoPE at {position}");
        let normed = model.final_normed(&hidden);
        let found: Vec<u16> = hidden_values(&step.result).iter().map(|x| bf16(*x)).collect();
        let (count, are_neighbours) = differing(&found, &normed);
        match position {
            // Nothing to weigh: the whole layer is the same, and the norm above is f64.
            0 => assert!(count <= 6 && are_neighbours, "{count} differ"),
            _ => assert!(cosine(&values(&found), &values(&normed)) > 0.9995, "position {position}"),
        }
    }
}

#[test]
fn the_projection_computes_its_matrix() {
    // 66 blocks: a task of 64 and one of 2.
    let rows = 66 * 32;
    let model = Xdna1Model { hidden: 576, intermediate: 1536, heads: 9, kv_heads: 3, layers: 30, vocab: rows };
    let matrix = Matrix::random(rows, 576, 41, 1.0);
    let mut loaded = Loaded::new(Xdna1Design::W8Projection, &model, 30);
    let (weights, quantized) = projection_weights(&matrix);
    loaded.write(0, &weights);
    for seed in [1, 2] {
        let input = Matrix::random(1, 576, 50 + seed, 1.0);
        loaded.write(1, &input.bits.iter().flat_map(|element| element.to_le_bytes()).collect::<Vec<u8>>());
        loaded.run_clean("projection");
        let wanted: Vec<u16> = quantized
            .iter()
            .map(|row| bf16(row.iter().zip(&input.bits).map(|(weight, x)| weight * f64::from(value(*x))).sum()))
            .collect();
        let (count, are_neighbours) = differing(&loaded.read_bits(2), &wanted);
        assert!(count <= 8 && are_neighbours, "{count} of {rows} differ");
    }
}

#[test]
fn mutations_of_an_engines_input_show() {
    let model = Model::random(Family::SmolLm, 1, 61);
    let mut engine = Engine::new(&model, Xdna1Design::SmolLmEngine);
    let stream = smollm_stream(&model);
    engine.step(3, 0);
    let good = engine.step(17, 1);
    let mut again = |change: &mut dyn FnMut(&mut Engine<'_>)| {
        engine.write_header(17, 1);
        change(&mut engine);
        engine.loaded.run_clean("mutation");
        let step = (engine.loaded.read_bits(2), engine.loaded.read(3));
        engine.loaded.write(0, &stream);
        step
    };
    assert_eq!(again(&mut |_| ()), (good.kv_new.clone(), good.result.clone()));
    // Two blocks of tile 4, which has keys, change places: norms and qkv, qkv, output, gate and up, down.
    for (a, b) in [(0, 1), (1, 2), (21, 22), (33, 35), (97, 98)] {
        let (kv_new, hidden) = again(&mut |engine| {
            let mut swapped = stream.clone();
            let block = |i: usize| 9216 * (4 * 130 + i)..9216 * (4 * 130 + i + 1);
            swapped[block(a)].copy_from_slice(&stream[block(b)]);
            swapped[block(b)].copy_from_slice(&stream[block(a)]);
            engine.loaded.write(0, &swapped);
        });
        assert!(hidden != good.result, "blocks {a} and {b}");
        assert_eq!(kv_new == good.kv_new, a > 20, "blocks {a} and {b}");
    }
    let header = |engine: &mut Engine<'_>, element: usize, bits: u16| {
        engine.loaded.buffers[1].write(2 * element as u64, &bits.to_le_bytes()).unwrap();
    };
    // The position alone: position 0 sees no cached row, and 2 sees one that was never written.
    for position in [0.0f32, 2.0] {
        let (kv_new, hidden) = again(&mut |engine| {
            engine.loaded.buffers[1].write(2 * 64, &bf16(position.into()).to_le_bytes()).unwrap();
        });
        assert_eq!(kv_new, good.kv_new);
        assert!(hidden != good.result, "position {position}");
    }
    // A stale key, a stale value, and rows that are not used.
    for (element, is_used) in [(8192 + 5, true), (8192 + 4096 + 5, true), (8192 + 64 * 5, false)] {
        let (_, hidden) = again(&mut |engine| header(engine, element, 0x4080));
        assert_eq!(hidden != good.result, is_used, "element {element}");
    }
    // A cosine, and the embedding.
    assert!(again(&mut |engine| header(engine, 3, 0x3E80)).0 != good.kv_new);
    assert!(again(&mut |engine| header(engine, 128, 0x4100)).0 != good.kv_new);
    // Elements of the header that the hub leaves alone.
    for element in [80, 127, 704, 8191] {
        assert_eq!(again(&mut |engine| header(engine, element, 0x4100)), (good.kv_new.clone(), good.result.clone()));
    }
}

/// The state in which a run ended, and the kinds of what was diagnosed.
fn failure(loaded: &mut Loaded) -> (String, Vec<DiagnosisKind>) {
    let error = loaded.run().unwrap_err().to_string();
    (error, loaded.bench.hardware.diagnoses().iter().map(|diagnosis| diagnosis.kind).collect())
}

#[test]
fn a_position_outside_the_window_ends_in_the_watch_dog() {
    let model = Model::random(Family::SmolLm, 1, 61);
    for position in [64.0, -1.0, 2.5, f64::NAN] {
        let mut engine = Engine::new(&model, Xdna1Design::SmolLmEngine);
        engine.write_header(3, 0);
        engine.loaded.buffers[1].write(2 * 64, &bf16(position).to_le_bytes()).unwrap();
        let (error, kinds) = failure(&mut engine.loaded);
        assert_eq!(kinds[0], DiagnosisKind::WaitNeverSatisfied, "{position}: {error}");
        let text = engine.loaded.bench.hardware.diagnoses()[0].to_string();
        assert!(text.contains("is no position"), "{text}");
    }
}

#[test]
fn buffers_of_another_length_end_in_the_drivers_error() {
    for (family, designs) in [
        (Family::SmolLm, &[Xdna1Design::SmolLmEngine, Xdna1Design::SmolLmChunk, Xdna1Design::SmolLmChunkW8][..]),
        (Family::Qwen, &[Xdna1Design::QwenChunk][..]),
    ] {
        let model = Model::empty(family, 1);
        for design in designs {
            let kernel = Xdna1Kernel::new(*design, &sizes(&model), 1).unwrap();
            let mut loaded = Loaded::with(kernel, |bytes| bytes / 2 / 4096 * 4096 + 64);
            for argument in 0..loaded.buffers.len() {
                loaded.write(argument, &vec![0; loaded.buffers[argument].len_bytes() as usize]);
            }
            let (error, kinds) = failure(&mut loaded);
            assert!(kinds.contains(&DiagnosisKind::OutsideArguments), "{design}: {error}: {kinds:?}");
        }
    }
}

#[test]
fn a_short_stream_starves_the_engine() {
    // The control code of one layer on a configuration for two: the stream ends in the middle of the second layer.
    let model = Model::empty(Family::SmolLm, 1);
    let mut kernel = Xdna1Kernel::new(Xdna1Design::SmolLmEngine, &sizes(&model), 1).unwrap();
    let two = Xdna1Kernel::new(Xdna1Design::SmolLmEngine, &sizes(&Model::empty(Family::SmolLm, 2)), 2).unwrap();
    kernel.kit.image = two.kit.image.clone();
    let mut loaded = Loaded::with(kernel, |bytes| bytes);
    for argument in 0..2 {
        loaded.write(argument, &vec![0; loaded.buffers[argument].len_bytes() as usize]);
    }
    let (error, kinds) = failure(&mut loaded);
    assert_eq!(kinds[0], DiagnosisKind::WaitNeverSatisfied, "{error}");
    let text = loaded.bench.hardware.diagnoses()[0].to_string();
    assert!(text.contains("GEMV 0 in layer 1"), "{text}");
    // And the other way round: what nobody takes is told.
    let mut kernel = two;
    kernel.kit.image = Xdna1Kernel::new(Xdna1Design::SmolLmEngine, &sizes(&model), 1).unwrap().kit.image;
    let mut loaded = Loaded::with(kernel, |bytes| bytes);
    for argument in 0..2 {
        loaded.write(argument, &vec![0; loaded.buffers[argument].len_bytes() as usize]);
    }
    let (error, kinds) = failure(&mut loaded);
    assert_eq!(kinds[0], DiagnosisKind::WaitNeverSatisfied, "{error}");
}

#[test]
fn kits_say_what_they_hold() {
    let smollm = Xdna1Model { hidden: 576, intermediate: 1536, heads: 9, kv_heads: 3, layers: 30, vocab: 49_152 };
    let kit = Xdna1Kit::complete(&smollm).unwrap();
    let (name, manifest) = kit.files.last().unwrap();
    assert_eq!(name, "kit.json");
    let manifest: serde_json::Value = serde_json::from_slice(manifest).unwrap();
    assert_eq!((&manifest["format"], &manifest["origin"]), (&"npuhal-xdna1-kit-v1".into(), &"virtual".into()));
    let kernels = manifest["kernels"].as_array().unwrap();
    let facts: Vec<_> =
        kernels.iter().map(|kernel| (kernel["design"].as_str().unwrap(), kernel["layers"].as_u64().unwrap())).collect();
    assert_eq!(
        facts,
        [
            ("smollm-engine", 30),
            ("smollm-chunk", 2),
            ("smollm-chunk", 1),
            ("smollm-chunk-w8", 2),
            ("smollm-chunk-w8", 1),
            ("w8-projection", 30)
        ]
    );
    let bytes = |kernel: &serde_json::Value| -> Vec<u64> {
        kernel["arguments"].as_array().unwrap().iter().map(|argument| argument["bytes"].as_u64().unwrap()).collect()
    };
    assert_eq!(bytes(&kernels[0]), [214_050_816, 1_490_944, 23_040, 1152]);
    assert_eq!(bytes(&kernels[1]), [14_155_776, 4608, 132, 1152, 98_304]);
    for kernel in kernels {
        for (file, digest) in [("xclbin", "xclbin"), ("instructions", "instructions")] {
            let (_, bytes) = kit.files.iter().find(|(name, _)| *name == kernel[file]).unwrap();
            let found: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(kernel["sha256"][digest], found);
        }
    }
    let qwen = Xdna1Model { hidden: 896, intermediate: 4864, heads: 14, kv_heads: 2, layers: 24, vocab: 151_936 };
    let engine = Xdna1Kernel::new(Xdna1Design::QwenEngine, &qwen, 24).unwrap();
    let sizes: Vec<_> = engine.arguments.iter().map(|argument| argument.bytes).collect();
    assert_eq!(sizes, [1_011_017_728, 802_816, 12_288, 607_744]);
    let error = Xdna1Kernel::new(Xdna1Design::SmolLmEngine, &qwen, 24).unwrap_err().to_string();
    assert!(error.starts_with("smollm-engine: the model has hidden size 896"), "{error}");
    let error = Xdna1Kernel::new(Xdna1Design::QwenEngine, &qwen, 23).unwrap_err().to_string();
    assert!(error.contains("23 layers of a model of 24"), "{error}");
    let other = Xdna1Model { hidden: 1024, ..qwen };
    assert!(Xdna1Kit::complete(&other).is_err());
}
