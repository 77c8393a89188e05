//! The default model, converted from its GGUF file to an xdna1 package: streams, chunks and twins on real weights.

use half::bf16;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Want};
use npuhal_cpu::exact::{ExactOptions, ExactSegment};
use npuhal_cpu::twin::{Lane, TwinOptions, TwinSegment};
use npuhal_models::package::{ConvertRequest, Identity, OpenOptions, Package, PackageError, convert};
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelSource, TensorRole};
use npuhal_registry::SegmentSpan;
use npuhal_xdna1::chunk::{ChunkFormat, LAYERS_PER_DISPATCH};
use npuhal_xdna1::layout::{SMOLLM, SMOLLM_DOWN_ROWS};
use npuhal_xdna1::stream::EngineStream;
use npuhal_xdna1::{PackageWeights, weights::Matrix};
use std::num::NonZeroUsize;
use tempfile::TempDir;

const LAYERS: usize = 30;

struct Converted {
    _folder: TempDir,
    file: ModelSource,
    package: Package,
}

fn converted() -> Option<Converted> {
    let path = npuhal_tests::models::path("smollm2-135m")?;
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("package");
    let threads = NonZeroUsize::new(2).unwrap();
    let identity = Identity::default();
    let request = ConvertRequest { source: &path, target: &target, identity, shape: None, threads, keep: &[] };
    let coder = Identity { model_id: Some("smollm-135m-xdna1".into()), ..Identity::default() };
    let other = convert(&ConvertRequest { identity: coder, ..request.clone() }, &mut |_| (), &Control::new());
    assert!(matches!(other, Err(PackageError::ReservedId { .. })), "another checkpoint's id");
    let done = convert(&request, &mut |_| (), &Control::new()).unwrap();
    assert_eq!(done.files, 455 + 5, "arrays, four text files, metadata");
    let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
    let package = Package::open(&target, options).unwrap();
    Some(Converted { _folder: folder, file: ModelSource::open(&path).unwrap(), package })
}

/// Row `row` of a projection as the GGUF file holds it, put into the order of Hugging Face checkpoints and rounded to bf16.
fn file_row(file: &ModelSource, layer: usize, part: LayerTensor, row: usize) -> Vec<u8> {
    let tensor = file.require(TensorRole::Layer(layer, part)).unwrap();
    let stored = match part {
        // First halves of pairs at even rows of a head, second halves at odd ones.
        LayerTensor::Q | LayerTensor::K if row % 64 < 32 => row / 64 * 64 + 2 * (row % 64),
        LayerTensor::Q | LayerTensor::K => row / 64 * 64 + 2 * (row % 64 - 32) + 1,
        _ => row,
    };
    let mut values = vec![0.0; tensor.cols()];
    tensor.dequantize_row(stored, &mut values).unwrap();
    values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
}

fn check_streams(file: &ModelSource, weights: &PackageWeights) {
    let stream = EngineStream::of_package(weights).unwrap();
    let mut buffer = vec![0; stream.len_bytes()];
    stream.pack(&mut buffer, NonZeroUsize::new(2).unwrap()).unwrap();
    assert_eq!(buffer.len(), 214_050_816);
    let block = |tile: usize, layer: usize, number: usize| {
        let at = SMOLLM.tile_offset_bytes(LAYERS, tile) + (layer * 129 + number) * SMOLLM.block_bytes();
        &buffer[at..at + SMOLLM.block_bytes()]
    };
    let rows = |layer, part, first: usize, count: usize| -> Vec<u8> {
        (first..first + count).flat_map(|row| file_row(file, layer, part, row)).collect()
    };
    // qkv rows 160t + 8b: query heads in tiles 0 to 3, keys from row 576, values from row 768.
    assert_eq!(block(2, 7, 1 + 3), rows(7, LayerTensor::Q, 320 + 24, 8));
    assert_eq!(block(3, 29, 1 + 12), rows(29, LayerTensor::K, 0, 8));
    assert_eq!(block(5, 0, 1 + 19), rows(0, LayerTensor::V, 960 - 8 - 768, 8));
    assert_eq!(block(4, 1, 21 + 11), rows(1, LayerTensor::O, 4 * 96 + 88, 8));
    assert_eq!(block(1, 2, 33 + 4 * 9 + 1), rows(2, LayerTensor::Gate, 256 + 16 * 9 + 8, 8));
    assert_eq!(block(1, 2, 33 + 4 * 9 + 2), rows(2, LayerTensor::Up, 256 + 16 * 9, 8));
    assert_eq!(block(0, 15, 97 + 31), rows(15, LayerTensor::Down, 93, SMOLLM_DOWN_ROWS));
}

fn check_chunks(file: &ModelSource, weights: &PackageWeights) {
    let threads = NonZeroUsize::new(2).unwrap();
    let layers = 4..4 + LAYERS_PER_DISPATCH;
    let format = ChunkFormat::SmolLmBf16;
    let mut chunk = vec![0; LAYERS_PER_DISPATCH * format.layer_bytes()];
    format.pack(weights, layers.clone(), &mut chunk, threads).unwrap();
    let (narrow, wide) = (2 * 576, 2 * 1536);
    // All layers' qkv, then o; gate/up blocks of 32 rows go first halves of three workers, then second halves.
    assert_eq!(chunk[960 * narrow..961 * narrow], file_row(file, 5, LayerTensor::Q, 0), "second layer");
    let gate_up = LAYERS_PER_DISPATCH * (960 + 576) * narrow;
    let row = |row: usize| &chunk[gate_up + row * narrow..gate_up + (row + 1) * narrow];
    assert_eq!(row(32), file_row(file, 4, LayerTensor::Gate, 64), "the second block is the second worker's");
    assert_eq!(row(96), file_row(file, 4, LayerTensor::Gate, 32), "the fourth is the first worker's other half");
    assert_eq!(row(6 * 32 + 5), file_row(file, 4, LayerTensor::Gate, 192 + 5));
    let down = gate_up + LAYERS_PER_DISPATCH * 3072 * narrow;
    assert_eq!(chunk[down + 576 * wide..down + 577 * wide], file_row(file, 5, LayerTensor::Down, 0));

    let format = ChunkFormat::SmolLmW8;
    let mut chunk = vec![0; LAYERS_PER_DISPATCH * format.layer_bytes()];
    format.pack(weights, layers, &mut chunk, threads).unwrap();
    let quantized = weights.quantized(Matrix::Qkv(4));
    let block = &chunk[37_120..2 * 37_120];
    assert_eq!(block[..64 * 576], *quantized.code_rows(64, 64));
    assert_eq!(block[64 * 576..], quantized.scales.bytes()[4 * 64..4 * 128]);
    assert!(ChunkFormat::QwenBf16.pack(weights, 0..1, &mut [], threads).is_err(), "another family's graph");
}

fn logits(segment: &mut dyn Segment, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut hidden = HiddenRows::new();
    let row =
        |(position, token): (usize, &u32)| Row { sequence: SequenceId(0), token: *token, position: position as u32 };
    let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
    segment.forward(&rows, &mut hidden, Want::All, &Control::new()).unwrap();
    (0..hidden.rows()).map(|row| hidden.row(row).to_vec()).collect()
}

fn best_two(logits: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    (order[0], logits[order[0]] - logits[order[1]])
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn check_twins(file: &ModelSource, package: &Package) {
    // The start of a chat: token 1 begins a turn; token 2 ends one.
    let tokens = [1, 9690, 198, 2683, 359, 253, 5356, 5646];
    let threads = NonZeroUsize::new(2).unwrap();
    let span = SegmentSpan::whole(file.config());
    let model = package.model(file.vocabulary().clone()).unwrap();
    let exact = |tokens: &[u32]| {
        let options = ExactOptions::new(64, threads);
        logits(&mut ExactSegment::open(file, span.clone(), options).unwrap(), tokens)
    };
    let twin = |model: &ModelSource, lane: Lane, tokens: &[u32]| {
        let options = TwinOptions { lane, positions: 64, sequences: 1, threads };
        logits(&mut TwinSegment::open(model, span.clone(), options).unwrap(), tokens)
    };
    let wanted = exact(&tokens);
    for lane in [Lane::SmolLm, Lane::Cpu] {
        let found = twin(&model, lane, &tokens);
        assert_eq!(found, twin(file, lane, &tokens), "{lane}: package and file are one model");
        let errors = found
            .iter()
            .zip(&wanted)
            .map(|(found, wanted)| found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max));
        let largest = errors.fold(0.0, f32::max);
        let cosines: Vec<f64> = found.iter().zip(&wanted).map(|(found, wanted)| cosine(found, wanted)).collect();
        let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
        // A bf16 residual stream of 30 layers, with any of the lane's norms and softmaxes.
        assert!(mean >= 0.999 && cosines.iter().all(|cosine| *cosine >= 0.997), "{lane}: {cosines:?}");
        for (position, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let (best, margin) = best_two(wanted);
            if margin > 2.0 * largest {
                assert_eq!(best_two(found).0, best, "{lane} at {position}");
            }
        }
        let first = best_two(&twin(&model, lane, &[2])[0]).0;
        let exact_first = best_two(&exact(&[2])[0]).0;
        assert!(first == 198 || exact_first != 198, "{lane}: token 2 gives {first}, exact {exact_first}");
    }
}

#[test]
fn the_default_model_is_converted_packed_and_computed() {
    let Some(Converted { _folder, file, package }) = converted() else { return };
    let weights = PackageWeights::new(&package).unwrap();
    check_streams(&file, &weights);
    check_chunks(&file, &weights);
    check_twins(&file, &package);
}
