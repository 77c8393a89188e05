//! Engines, chunked graphs and the int8 head on a device whose kernels follow a script.

mod common;

use common::{device, kernel_name, open, write_kit};
use npuhal_core::device::RunIndex;
use npuhal_core::dtype::{bf16_bits, bf16_value, f16_value};
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Tap, TapSink, Want, Yields};
use npuhal_models::package::{Family, Package, Shape};
use npuhal_tests::kit::devices::{Call, RecordingDevice};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_xdna1::PackageWeights;
use npuhal_xdna1::chunk::{ChunkFormat, pack_smollm_gammas};
use npuhal_xdna1::kit::{Design, Kit};
use npuhal_xdna1::layout::EngineLayout;
use npuhal_xdna1::segment::{ChunkPlan, Chunked, DISPATCH_TIMEOUT, Engine, NpuHead, SegmentOptions};
use npuhal_xdna1::stream::EngineStream;
use std::num::NonZeroUsize;
use std::sync::{Arc, LazyLock, Mutex};
use tempfile::{TempDir, tempdir};

static SMOLLM: LazyLock<(TempDir, Package)> = LazyLock::new(|| package(Family::Llama, 3));
static QWEN: LazyLock<(TempDir, Package)> = LazyLock::new(|| package(Family::Qwen2, 1));

fn package(family: Family, layers: usize) -> (TempDir, Package) {
    let folder = tempdir().unwrap();
    let path = SmallPackage { family, layers, vocab_size: 128, seed: 7 }.write(folder.path(), "small", &[]);
    let package = open(&path);
    (folder, package)
}

fn options() -> SegmentOptions {
    SegmentOptions::new(64, DISPATCH_TIMEOUT)
}

fn kit(shape: Shape, designs: &[(Design, usize)]) -> (TempDir, Kit) {
    let folder = tempdir().unwrap();
    write_kit(folder.path(), shape, designs);
    let kit = Kit::read(folder.path()).unwrap();
    (folder, kit)
}

fn row(token: u32, position: u32) -> Row {
    Row { sequence: SequenceId(0), token, position }
}

fn forward(segment: &mut dyn Segment, row: Row, want: Want<'_>) -> Result<Vec<f32>, RunError> {
    let mut hidden = HiddenRows::new();
    segment.forward(&[row], &mut hidden, want, &Control::new())?;
    Ok(hidden.as_slice().to_vec())
}

/// The embedding as the NPU gets it.
fn embedding(package: &Package, token: u32) -> Vec<f32> {
    let row = package.raw("token_embedding").unwrap().row(token as usize);
    let value = |bits: &[u8; 2]| bf16_value(bf16_bits(f16_value(u16::from_le_bytes(*bits))));
    row.as_chunks::<2>().0.iter().map(value).collect()
}

fn elements(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks::<2>().0.iter().map(|bits| u16::from_le_bytes(*bits)).collect()
}

fn put(bytes: &mut [u8], values: impl IntoIterator<Item = u16>) {
    for (out, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *out = value.to_le_bytes();
    }
}

/// Calls of a kernel: contents of its buffers as they were when it ran.
type Seen = Arc<Mutex<Vec<Vec<Vec<u8>>>>>;

/// A SmolLM engine whose result is the embedding, and whose new keys and values tell their position.
fn engine_device(designs: &[(Design, usize)], shape: Shape) -> (RecordingDevice, Seen) {
    let device = device(designs, shape);
    let seen = Seen::default();
    for &(design, layers) in designs {
        let seen = Arc::clone(&seen);
        let layout = EngineLayout::for_shape(design.family(), shape).unwrap();
        device.script(&kernel_name(design, layers), move |buffers| {
            seen.lock().unwrap().push(buffers.to_vec());
            let header = elements(&buffers[1][..16384]);
            let position = bf16_value(header[layout.position_at]);
            let kv = layout.kv_new_elements(layers) as u32;
            put(&mut buffers[2], (0..kv).map(|i| bf16_bits(position * 1000.0 + (i % 128) as f32)));
            match design {
                Design::SmolLmEngine => {
                    put(&mut buffers[3], header[layout.embedding_at..][..shape.hidden_size].to_vec());
                }
                Design::QwenEngine => {
                    for (i, out) in buffers[3].as_chunks_mut::<4>().0.iter_mut().enumerate() {
                        *out = (position + i as f32).to_le_bytes();
                    }
                }
                _ => buffers[3][..256].fill(0),
            }
        });
    }
    (device, seen)
}

#[test]
fn the_smollm_engine_writes_headers_and_keeps_keys() {
    let package = &SMOLLM.1;
    let shape = package.metadata().shape;
    let designs = [(Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(shape, &designs);
    let (device, seen) = engine_device(&designs, shape);
    let weights = PackageWeights::new(package).unwrap();
    let mut engine = Engine::load(Arc::new(device.clone()), weights.clone(), 1e5, &kit, options()).unwrap();
    assert_eq!((engine.layers(), engine.yields(), engine.width()), (0..3, Yields::Normed, 576));
    assert!(!device.calls().iter().any(|call| matches!(call, Call::Open(..))), "no context before a generation");
    engine.begin().unwrap();
    for (position, token) in [5, 90, 5].into_iter().enumerate() {
        let hidden = forward(&mut engine, row(token, position as u32), Want::Last).unwrap();
        assert_eq!(hidden, embedding(package, token));
    }
    let seen = seen.lock().unwrap();
    let stream = EngineStream::of_package(&weights).unwrap();
    let mut packed = vec![0; stream.len_bytes()];
    stream.pack(&mut packed, NonZeroUsize::MIN).unwrap();
    assert!(seen[2][0] == packed, "the weights are the package's streams");
    // Layer 1, head 2, at positions 0 and 1 when position 2 is computed; nothing yet at position 2.
    let cache = elements(&seen[2][1]);
    let object = (1 + 3 + 2) * 8192;
    for position in 0..2 {
        let key = &cache[object + position * 64..][..64];
        let value = &cache[object + 4096 + position * 64..][..64];
        let wanted = |first: usize| -> Vec<u16> {
            (first..first + 64).map(|i| bf16_bits(position as f32 * 1000.0 + i as f32)).collect()
        };
        assert_eq!((key, value), (wanted(0).as_slice(), wanted(64).as_slice()));
    }
    assert!(cache[object + 128..object + 192].iter().all(|bits| *bits == 0));
    assert_eq!(cache[64], bf16_bits(2.0), "the position of the header");
    engine.end();
    assert_eq!(device.calls().last(), Some(&Call::Close(0)));
}

#[test]
fn only_new_positions_are_computed_in_the_next_generation() {
    let package = &SMOLLM.1;
    let designs = [(Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(package.metadata().shape, &designs);
    let (device, seen) = engine_device(&designs, package.metadata().shape);
    let load = |options| {
        Engine::load(Arc::new(device.clone()), PackageWeights::new(package).unwrap(), 1e5, &kit, options).unwrap()
    };
    let mut engine = load(options());
    engine.begin().unwrap();
    for position in 0..3 {
        forward(&mut engine, row(position, position), Want::Nothing).unwrap();
    }
    engine.end();
    engine.begin().unwrap();
    assert_eq!(engine.truncate(SequenceId(0), 2), 2);
    let error = forward(&mut engine, row(9, 3), Want::Last).unwrap_err();
    assert!(matches!(error, RunError::BadRows { .. }), "{error}");
    forward(&mut engine, row(9, 2), Want::Last).unwrap();
    assert_eq!(seen.lock().unwrap().len(), 4);
    engine.end();

    let mut fresh = load(SegmentOptions { keeps_prefix: false, ..options() });
    fresh.begin().unwrap();
    forward(&mut fresh, row(1, 0), Want::Nothing).unwrap();
    fresh.end();
    fresh.begin().unwrap();
    assert_eq!(fresh.truncate(SequenceId(0), 1), 0, "each generation starts anew");
}

#[test]
fn a_time_out_ends_the_context_and_not_the_sequence() {
    let package = &SMOLLM.1;
    let designs = [(Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(package.metadata().shape, &designs);
    let (device, _) = engine_device(&designs, package.metadata().shape);
    let mut engine =
        Engine::load(Arc::new(device.clone()), PackageWeights::new(package).unwrap(), 1e5, &kit, options()).unwrap();
    engine.begin().unwrap();
    forward(&mut engine, row(1, 0), Want::Last).unwrap();
    device.lose_next_at(RunIndex(0));
    let error = forward(&mut engine, row(2, 1), Want::Last).unwrap_err();
    assert!(matches!(error, RunError::TimedOut { .. }), "{error}");
    assert!(device.calls().contains(&Call::Close(0)), "a lost context is dropped at once");
    let error = forward(&mut engine, row(2, 1), Want::Last).unwrap_err();
    assert!(matches!(error, RunError::Device(DeviceError::ContextLost { .. })), "{error}");
    engine.end();
    engine.begin().unwrap();
    assert_eq!(engine.truncate(SequenceId(0), 1), 1);
    assert_eq!(forward(&mut engine, row(2, 1), Want::Last).unwrap(), embedding(package, 2));
    engine.end();
    let error = forward(&mut engine, row(2, 2), Want::Last).unwrap_err();
    assert!(error.to_string().contains("no generation was begun"), "{error}");
}

/// A kernel that drains only some of its outputs leaves what was written before: not the token before, but no number.
#[test]
fn an_output_that_never_came_is_no_result() {
    let package = &SMOLLM.1;
    let designs = [(Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(package.metadata().shape, &designs);
    let (device, _) = engine_device(&designs, package.metadata().shape);
    let mut engine =
        Engine::load(Arc::new(device.clone()), PackageWeights::new(package).unwrap(), 1e5, &kit, options()).unwrap();
    engine.begin().unwrap();
    forward(&mut engine, row(1, 0), Want::Last).unwrap();
    device.script(&kernel_name(Design::SmolLmEngine, 3), |buffers| buffers[2].fill(0));
    let error = forward(&mut engine, row(1, 1), Want::Last).unwrap_err();
    assert_eq!(error.to_string(), "the hidden row at position 1 is not finite; the weights or the device are damaged");
    device.script(&kernel_name(Design::SmolLmEngine, 3), |buffers| buffers[3].fill(0));
    let error = forward(&mut engine, row(1, 1), Want::Last).unwrap_err();
    assert!(error.to_string().starts_with("keys or values at position 1"), "{error}");
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let package = &SMOLLM.1;
    let designs = [(Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(package.metadata().shape, &designs);
    let (device, seen) = engine_device(&designs, package.metadata().shape);
    let options = SegmentOptions { positions: 2, ..options() };
    let weights = PackageWeights::new(package).unwrap();
    let mut engine = Engine::load(Arc::new(device), weights, 1e5, &kit, options).unwrap();
    engine.begin().unwrap();
    let mut refuse = |rows: &[Row]| {
        engine.forward(rows, &mut HiddenRows::new(), Want::Last, &Control::new()).unwrap_err().to_string()
    };
    assert_eq!(refuse(&[row(128, 0)]), "bad rows: token 128 of a vocabulary of 128");
    assert_eq!(refuse(&[row(0, 2)]), "positions: 3 exceeds the limit of 2");
    assert_eq!(refuse(&[row(0, 0), row(0, 1)]), "rows of a call: 2 exceeds the limit of 1");
    assert!(refuse(&[Row { sequence: SequenceId(1), ..row(0, 0) }]).contains("sequences"));
    assert!(seen.lock().unwrap().is_empty());
    let cancelled = Control::new();
    cancelled.cancel();
    let error = engine.forward(&[row(0, 0)], &mut HiddenRows::new(), Want::Last, &cancelled).unwrap_err();
    assert!(matches!(error, RunError::Cancelled));
}

#[test]
fn the_qwen_engine_leaves_out_the_head_where_nobody_wants_it() {
    let package = &QWEN.1;
    let shape = package.metadata().shape;
    let designs = [(Design::QwenEngine, 1), (Design::QwenEnginePrefill, 1)];
    let (_folder, kit) = kit(shape, &designs);
    let (device, _) = engine_device(&designs, shape);
    let weights = PackageWeights::new(package).unwrap();
    let mut engine = Engine::load(Arc::new(device.clone()), weights.clone(), 1e6, &kit, options()).unwrap();
    assert_eq!((engine.yields(), engine.width()), (Yields::Logits, 128));
    engine.begin().unwrap();
    let opened = device.calls().iter().filter(|call| matches!(call, Call::Open(..))).count();
    assert_eq!(opened, 2, "two containers, two contexts");
    device.take_calls();
    assert!(forward(&mut engine, row(3, 0), Want::Nothing).unwrap().is_empty());
    let logits = forward(&mut engine, row(4, 1), Want::Last).unwrap();
    assert_eq!((logits[0], logits[127]), (1.0, 128.0));
    let submitted: Vec<String> = device
        .take_calls()
        .into_iter()
        .filter_map(|call| if let Call::Submit(_, _, kernels) = call { Some(kernels.concat()) } else { None })
        .collect();
    assert_eq!(submitted, [kernel_name(Design::QwenEnginePrefill, 1), kernel_name(Design::QwenEngine, 1)]);
    engine.end();

    // A kit without the prefill kernel serves too, with the head at every position.
    let designs = [(Design::QwenEngine, 1)];
    let (_folder, kit) = self::kit(shape, &designs);
    let (device, seen) = engine_device(&designs, shape);
    let mut engine = Engine::load(Arc::new(device), weights, 1e6, &kit, options()).unwrap();
    engine.begin().unwrap();
    assert!(forward(&mut engine, row(3, 0), Want::Nothing).unwrap().is_empty());
    assert_eq!(seen.lock().unwrap().len(), 1);
}

/// Each layer adds 1 to every element of the hidden row, and keeps its position as key and value.
fn chunk_device(designs: &[(Design, usize)], shape: Shape) -> (RecordingDevice, Seen) {
    let device = device(designs, shape);
    let seen = Seen::default();
    for &(design, layers) in designs {
        let seen = Arc::clone(&seen);
        device.script(&kernel_name(design, layers), move |buffers| {
            seen.lock().unwrap().push(buffers.to_vec());
            let position = bf16_value(elements(&buffers[2])[64]);
            let values = elements(&buffers[3]).into_iter().map(|bits| bf16_bits(bf16_value(bits) + layers as f32));
            let values: Vec<u16> = values.collect();
            put(&mut buffers[3], values);
            for object in buffers[4].chunks_exact_mut(16_384) {
                let at = position as usize * 128;
                put(&mut object[at..at + 128], [bf16_bits(position + 1.0); 64]);
                put(&mut object[8192 + at..8192 + at + 128], [bf16_bits(-position - 1.0); 64]);
            }
        });
    }
    (device, seen)
}

#[test]
fn chunks_pass_the_hidden_row_on_and_keep_their_caches() {
    let package = &SMOLLM.1;
    let shape = package.metadata().shape;
    let designs = [(Design::SmolLmChunk, 2), (Design::SmolLmChunk, 1)];
    let (_folder, kit) = kit(shape, &designs);
    let format = ChunkFormat::SmolLmBf16;
    let plan = |layers, limit| ChunkPlan::new(&kit, format, shape, layers, limit).unwrap().chunks;
    assert_eq!(plan(3, 2), [0..2, 2..3]);
    assert_eq!(plan(3, 30), [0..2, 2..3], "the largest kernel there is");
    assert_eq!(plan(3, 1), [0..1, 1..2, 2..3]);
    assert_eq!(plan(1, 2), [0..1; 1]);
    let error = ChunkPlan::new(&kit, ChunkFormat::SmolLmW8, shape, 3, 2).unwrap_err().to_string();
    assert!(error.contains("wanted a kernel of smollm-chunk-w8 for 2 layers"), "{error}");

    // Without a kernel of one layer the largest first would leave one over; six are two of three, not three of two.
    let (_folder, odd) = self::kit(shape, &[(Design::SmolLmChunk, 3), (Design::SmolLmChunk, 2)]);
    let cut = |layers| ChunkPlan::new(&odd, format, shape, layers, 3).map(|plan| plan.chunks);
    assert_eq!(cut(4).unwrap(), [0..2, 2..4]);
    assert_eq!(cut(5).unwrap(), [0..3, 3..5]);
    assert_eq!(cut(6).unwrap(), [0..3, 3..6]);
    assert_eq!(cut(7).unwrap(), [0..3, 3..5, 5..7]);
    let error = cut(1).unwrap_err().to_string();
    assert!(error.contains("wanted a kernel of smollm-chunk for 1 layers"), "{error}");

    let (device, seen) = chunk_device(&designs, shape);
    let weights = PackageWeights::new(package).unwrap();
    let plan = ChunkPlan::new(&kit, format, shape, 3, 2).unwrap();
    let mut chunked =
        Chunked::load(Arc::new(device.clone()), weights.clone(), 1e5, &kit, format, &plan, options()).unwrap();
    assert_eq!((chunked.layers(), chunked.yields(), chunked.width()), (0..3, Yields::Hidden, 576));
    chunked.begin().unwrap();
    let plus_three = |token| -> Vec<f32> {
        let add = |value: &f32| bf16_value(bf16_bits(bf16_value(bf16_bits(value + 2.0)) + 1.0));
        embedding(package, token).iter().map(add).collect()
    };
    for (position, token) in [7, 8].into_iter().enumerate() {
        let hidden = forward(&mut chunked, row(token, position as u32), Want::Last).unwrap();
        assert_eq!(hidden, plus_three(token));
    }
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    let mut packed = vec![0; 2 * format.layer_bytes()];
    format.pack(&weights, 0..2, &mut packed, NonZeroUsize::MIN).unwrap();
    assert!(seen[0][0] == packed);
    let mut gammas = vec![0; 2304];
    pack_smollm_gammas(&weights, 2..3, &mut gammas).unwrap();
    assert_eq!(seen[1][1], gammas);
    // The second token sees the keys of the first, and none of its own yet.
    let keys = elements(&seen[2][4][..256]);
    assert_eq!((keys[0], keys[64]), (bf16_bits(1.0), 0));
}

#[test]
fn keys_that_are_no_numbers_are_not_kept_by_chunks() {
    let package = &SMOLLM.1;
    let shape = package.metadata().shape;
    let designs = [(Design::SmolLmChunk, 3)];
    let (_folder, kit) = kit(shape, &designs);
    let (device, _) = chunk_device(&designs, shape);
    let weights = PackageWeights::new(package).unwrap();
    let format = ChunkFormat::SmolLmBf16;
    let plan = ChunkPlan::new(&kit, format, shape, 3, 3).unwrap();
    let mut chunked = Chunked::load(Arc::new(device.clone()), weights, 1e5, &kit, format, &plan, options()).unwrap();
    chunked.begin().unwrap();
    forward(&mut chunked, row(7, 0), Want::Last).unwrap();
    // The value of the second layer's first head at position 1.
    let at = 3 * 16_384 + 8192 + 128;
    device.script(&kernel_name(Design::SmolLmChunk, 3), move |buffers| put(&mut buffers[4][at..at + 2], [0x7fc0]));
    let error = forward(&mut chunked, row(8, 1), Want::Last).unwrap_err().to_string();
    assert!(error.contains("keys or values of layer 1 at position 1 is not finite"), "{error}");
}

/// Tap, position, values.
type Observation = (Tap, u32, Vec<f32>);

#[derive(Clone, Default)]
struct Collected(Arc<Mutex<Vec<Observation>>>);

impl TapSink for Collected {
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]) {
        self.0.lock().unwrap().push((tap, row.position, values.to_vec()));
    }
}

#[test]
fn observers_see_keys_values_and_what_is_between_chunks() {
    let package = &SMOLLM.1;
    let shape = package.metadata().shape;
    let designs = [(Design::SmolLmChunk, 2), (Design::SmolLmChunk, 1), (Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(shape, &designs);
    let weights = PackageWeights::new(package).unwrap();
    let (device, _) = chunk_device(&designs[..2], shape);
    let plan = ChunkPlan::new(&kit, ChunkFormat::SmolLmBf16, shape, 3, 2).unwrap();
    let format = ChunkFormat::SmolLmBf16;
    let mut chunked = Chunked::load(Arc::new(device), weights.clone(), 1e5, &kit, format, &plan, options()).unwrap();
    let check = |segment: &mut dyn Segment| {
        let sink = Collected::default();
        segment.begin().unwrap();
        // In the middle of a generation.
        segment.observe(Some(Box::new(sink.clone())));
        forward(segment, row(3, 0), Want::Nothing).unwrap();
        segment.observe(None);
        let seen = std::mem::take(&mut *sink.0.lock().unwrap());
        let taps: Vec<Tap> = seen.iter().map(|(tap, ..)| *tap).collect();
        assert_eq!(taps, segment.taps());
        seen
    };
    let seen = check(&mut chunked);
    assert_eq!(seen.len(), 8);
    assert_eq!((seen[0].2[0], seen[0].2.len(), seen[1].2[0]), (1.0, 192, -1.0));
    assert_eq!(seen[4].0, Tap::LayerOut(1));
    assert_eq!(seen[4].2[0], bf16_value(bf16_bits(embedding(package, 3)[0] + 2.0)));

    let (device, _) = engine_device(&designs[2..], shape);
    let mut engine = Engine::load(Arc::new(device), weights, 1e5, &kit, options()).unwrap();
    let seen = check(&mut engine);
    // The second head's key follows the first head's key and value.
    let (tap, _, values) = &seen[3];
    assert_eq!((*tap, values[0], values[64]), (Tap::V(1), 64.0, 64.0));
    assert_eq!(seen[6].0, Tap::Normed);
}

#[test]
fn the_int8_head_computes_what_it_is_given() {
    let package = &SMOLLM.1;
    let shape = package.metadata().shape;
    let designs = [(Design::W8Projection, 3)];
    let (_folder, kit) = kit(shape, &designs);
    let device = device(&designs, shape);
    device.script(&kernel_name(Design::W8Projection, 3), move |buffers| {
        let input: Vec<f32> = elements(&buffers[1]).into_iter().map(bf16_value).collect();
        let (codes, scales) = (32 * 576, 4 * 32);
        let logits: Vec<u16> = buffers[0]
            .chunks_exact(codes + scales)
            .flat_map(|block| {
                let rows = block[..codes].chunks_exact(576).zip(block[codes..].as_chunks::<4>().0);
                rows.map(|(row, scale)| {
                    let sum: f32 = row.iter().zip(&input).map(|(code, x)| f32::from(*code as i8) * x).sum();
                    bf16_bits(sum * f32::from_le_bytes(*scale))
                })
            })
            .collect();
        put(&mut buffers[2], logits);
    });
    let weights = PackageWeights::new(package).unwrap();
    let mut head = NpuHead::load(Arc::new(device), &weights, &kit, options()).unwrap();
    head.begin().unwrap();
    let mut hidden = HiddenRows::new();
    hidden.reset(1, 576);
    let normed: Vec<f32> = (0..576).map(|i| bf16_value(bf16_bits((i as f32 * 0.37).sin()))).collect();
    hidden.row_mut(0).copy_from_slice(&normed);
    head.forward(&[row(0, 0)], &mut hidden, Want::All, &Control::new()).unwrap();
    let matrix = package.quantized("lm_head").unwrap();
    for token in 0..128 {
        let mut weights = vec![0.0; 576];
        matrix.bf16.dequantize_row(token, &mut weights).unwrap();
        let wanted: f32 = weights.iter().zip(&normed).map(|(weight, x)| weight * x).sum();
        assert!((hidden.row(0)[token] - wanted).abs() < 0.05, "{token}: {} {wanted}", hidden.row(0)[token]);
    }
    let mut narrow = HiddenRows::new();
    narrow.reset(1, 64);
    assert!(head.forward(&[row(0, 0)], &mut narrow, Want::All, &Control::new()).is_err());
}

#[test]
fn phases_are_told_where_they_are_asked_for() {
    let package = &SMOLLM.1;
    let designs = [(Design::SmolLmEngine, 3)];
    let (_folder, kit) = kit(package.metadata().shape, &designs);
    let (device, _) = engine_device(&designs, package.metadata().shape);
    let options = SegmentOptions { profiles: true, ..options() };
    let weights = PackageWeights::new(package).unwrap();
    let mut engine = Engine::load(Arc::new(device), weights, 1e5, &kit, options).unwrap();
    engine.begin().unwrap();
    for position in 0..3 {
        forward(&mut engine, row(1, position), Want::Nothing).unwrap();
    }
    let phases: Vec<(&str, u32)> = engine.phases().iter().map(|phase| (phase.name, phase.count)).collect();
    assert_eq!(phases, [("embedding", 3), ("npu_engine", 3), ("kv_store", 3)]);
}
