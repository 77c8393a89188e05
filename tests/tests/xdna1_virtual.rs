//! The engines of first-generation NPUs on the virtual NPU, against the CPU's twin of their numerics and against `exact`.
//!
//! Host, core programs and twin read the published text on their own. Where it fixes the order of every sum and the place of
//! every rounding (norms, projections, RoPE, activation, residual sums) they have to agree bit for bit; attention goes through
//! tables whose error is published, and the order of its sums is not.

use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::device::Device;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Tap, TapSink, Want};
use npuhal_cpu::exact::{ExactOptions, ExactSegment};
use npuhal_cpu::twin::{Lane, TwinOptions, TwinSegment};
use npuhal_models::package::{ConvertRequest, Family, Identity, OpenOptions, Package, convert};
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{ModelSource, Specials, Tokenizer};
use npuhal_registry::SegmentSpan;
use npuhal_tests::kit::kernels::{write_kernels, xdna1_kernels};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_tests::models::left_to_soak;
use npuhal_virtual::{VirtualDevice, VirtualSpec};
use npuhal_xdna1::PackageWeights;
use npuhal_xdna1::chunk::ChunkFormat;
use npuhal_xdna1::kit::Kit;
use npuhal_xdna1::segment::{ChunkPlan, Chunked, Engine, SegmentOptions, VIRTUAL_DISPATCH_TIMEOUT};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const THREADS: NonZeroUsize = NonZeroUsize::new(2).unwrap();

/// What a segment shows, by position and tap.
type Shown = BTreeMap<(u32, String), Vec<f32>>;

struct Sink(Arc<Mutex<Shown>>);

impl TapSink for Sink {
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]) {
        self.0.lock().unwrap().insert((row.position, format!("{tap:?}")), values.to_vec());
    }
}

/// Feeds `tokens` one by one, from position 0.
fn shown(segment: &mut dyn Segment, tokens: &[u32]) -> Shown {
    shown_in_runs(segment, tokens, 1)
}

/// Feeds `tokens` from position 0, so many a call. For a CPU's segment the number makes no difference but in time.
fn shown_in_runs(segment: &mut dyn Segment, tokens: &[u32], run: usize) -> Shown {
    let seen = Arc::new(Mutex::new(Shown::new()));
    segment.observe(Some(Box::new(Sink(Arc::clone(&seen)))));
    segment.truncate(SequenceId(0), 0);
    segment.begin().unwrap();
    let row = |(position, token): (u32, &u32)| Row { sequence: SequenceId(0), token: *token, position };
    let rows: Vec<Row> = (0..).zip(tokens).map(row).collect();
    for rows in rows.chunks(run) {
        segment.forward(rows, &mut HiddenRows::new(), Want::All, &Control::new()).unwrap();
    }
    segment.end();
    segment.observe(None);
    std::mem::take(&mut seen.lock().unwrap())
}

/// A package, its model and the engine on a virtual NPU.
struct Bench {
    _folder: TempDir,
    hardware: Arc<VirtualDevice>,
    device: Arc<dyn Device>,
    kit: Kit,
    model: ModelSource,
    package: Package,
    engine: Engine,
}

impl Bench {
    /// Of a random model.
    fn random(package: SmallPackage) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = package.write(folder.path(), "random", &[("tokenizer.json", &b"{}"[..])]);
        Self::of(folder, &target)
    }

    /// Of a checkpoint or a GGUF file.
    fn converted(source: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("package");
        let identity = Identity::default();
        let request = ConvertRequest { source, target: &target, identity, shape: None, threads: THREADS, keep: &[] };
        convert(&request, &mut |_| (), &Control::new()).unwrap();
        Self::of(folder, &target)
    }

    fn of(folder: TempDir, target: &Path) -> Self {
        let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
        let package = Package::open(target, options).unwrap();
        let npu = target.join("npu");
        write_kernels(&npu, &xdna1_kernels(package.metadata().shape));
        let hardware = VirtualDevice::new(&VirtualSpec::new(Silicon::Npu1));
        let device: Arc<dyn Device> = Arc::new(NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap());
        let theta = package.metadata().rope_theta;
        let options = SegmentOptions::new(64, VIRTUAL_DISPATCH_TIMEOUT);
        let weights = PackageWeights::new(&package).unwrap();
        let kit = Kit::read(&npu).unwrap();
        let engine = Engine::load(Arc::clone(&device), weights, theta, &kit, options).unwrap();
        let model = package.model(Vocabulary::default()).unwrap();
        Self { _folder: folder, hardware, device, kit, model, package, engine }
    }

    /// The layers as chunked graphs.
    fn chunked(&self, format: ChunkFormat, limit: usize, tokens: &[u32]) -> Shown {
        let (shape, theta) = (self.package.metadata().shape, self.package.metadata().rope_theta);
        let plan = ChunkPlan::new(&self.kit, format, shape, shape.layers, limit).unwrap();
        let options = SegmentOptions::new(64, VIRTUAL_DISPATCH_TIMEOUT);
        let weights = PackageWeights::new(&self.package).unwrap();
        let device = Arc::clone(&self.device);
        let mut graphs = Chunked::load(device, weights, theta, &self.kit, format, &plan, options).unwrap();
        let shown = shown(&mut graphs, tokens);
        self.assert_clean();
        shown
    }

    fn assert_clean(&self) {
        let diagnoses: Vec<_> = self.hardware.diagnoses().iter().map(ToString::to_string).collect();
        assert!(diagnoses.is_empty(), "{diagnoses:#?}");
    }

    fn engine(&mut self, tokens: &[u32]) -> Shown {
        let shown = shown(&mut self.engine, tokens);
        self.assert_clean();
        shown
    }

    fn twin(&self, lane: Lane, tokens: &[u32]) -> Shown {
        let options = TwinOptions { lane, positions: 64, sequences: 1, threads: THREADS };
        let span = SegmentSpan::whole(self.model.config());
        shown_in_runs(&mut TwinSegment::open(&self.model, span, options).unwrap(), tokens, tokens.len())
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Engine against twin: what does not depend on attention is the same bit for bit; the rest is close.
fn compare(engine: &Shown, twin: &Shown, what: &str) {
    for ((position, tap), found) in engine {
        let wanted = &twin[&(*position, tap.clone())];
        assert_eq!(found.len(), wanted.len(), "{what}: {tap}");
        let is_fixed = *position == 0 || tap == "K(0)" || tap == "V(0)";
        if is_fixed {
            let differing = found.iter().zip(wanted).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differing, 0, "{what}: {tap} at {position}: {differing} of {} differ", found.len());
        }
        let cosine = cosine(found, wanted);
        assert!(cosine > 0.999, "{what}: {tap} at {position}: cosine {cosine}");
    }
}

#[test]
fn the_smollm_engine_is_its_twin_on_random_models() {
    for seed in [1, 2] {
        let mut bench = Bench::random(SmallPackage { family: Family::Llama, layers: 2, vocab_size: 64, seed });
        let tokens = [2, 63, 17, 17, 5, 40, 0, 9];
        let found = bench.engine(&tokens);
        assert_eq!(found.len(), tokens.len() * (2 * 2 + 1));
        compare(&found, &bench.twin(Lane::SmolLm, &tokens), &format!("seed {seed}"));
        // Every token at position 0, where no score has anything to be weighed against.
        for token in 0..8 {
            compare(
                &bench.engine(&[token]),
                &bench.twin(Lane::SmolLm, &[token]),
                &format!("seed {seed}, token {token}"),
            );
        }
    }
}

#[test]
fn chunked_graphs_are_the_engine_but_for_attention() {
    let mut bench = Bench::random(SmallPackage { family: Family::Llama, layers: 3, vocab_size: 64, seed: 7 });
    let tokens = [2, 63, 17, 17, 5];
    let engine = bench.engine(&tokens);
    // Two layers and one, or one by one: the same graph.
    let found = bench.chunked(ChunkFormat::SmolLmBf16, 2, &tokens);
    let single = bench.chunked(ChunkFormat::SmolLmBf16, 1, &tokens);
    assert!(found.iter().all(|(of, values)| single[of] == *values));
    let w8 = bench.chunked(ChunkFormat::SmolLmW8, 2, &tokens);
    for ((position, tap), wanted) in &engine {
        // The final norm is not the graphs'.
        if tap == "Normed" {
            continue;
        }
        let of = (*position, tap.clone());
        if *position == 0 || tap == "K(0)" || tap == "V(0)" {
            assert_eq!(found[&of], *wanted, "{tap} at {position}");
        }
        let cosine = cosine(&found[&of], wanted);
        assert!(cosine > 0.999, "{tap} at {position}: cosine {cosine}");
        // Eight bits a weight cost about one part in a hundred a projection.
        let cosine = self::cosine(&w8[&of], wanted);
        assert!(cosine > 0.995, "eight bits, {tap} at {position}: cosine {cosine}");
    }
}

#[test]
#[allow(clippy::print_stderr, reason = "figures belong into the test's output")]
fn the_chunked_graphs_are_their_twin_on_random_models() {
    // More than 16 positions, of which some hold the same token.
    let tokens: Vec<u32> = (0..40).map(|at| (at * at * 7 + at / 3) % 64).collect();
    for seed in [1, 2] {
        let bench = Bench::random(SmallPackage { family: Family::Llama, layers: 3, vocab_size: 64, seed });
        let found = bench.chunked(ChunkFormat::SmolLmBf16, 2, &tokens);
        assert!(found.len() >= tokens.len() * 2 * 3, "{} rows", found.len());
        let twin = bench.twin(Lane::SmolLmChunk, &tokens);
        // All of the first layer, and of the first position; behind them a sum near the border of two bf16 may fall on the other
        // side, which moves all that follows.
        for ((position, tap), values) in &found {
            let wanted = &twin[&(*position, tap.clone())];
            let is_first = *position == 0 || tap.ends_with("(0)");
            assert!(!is_first || values == wanted, "seed {seed}: {tap} at {position}: other bits");
            let largest = wanted.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let error = values.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error <= largest / 64.0, "seed {seed}: {tap} at {position}: {error} of {largest}");
        }
        let differing: Vec<String> = found
            .iter()
            .filter(|(of, values)| twin[*of] != **values)
            .map(|((position, tap), values)| {
                let wanted = &twin[&(*position, tap.clone())];
                let count = values.iter().zip(wanted).filter(|(a, b)| a != b).count();
                format!("{tap} at {position}: {count} of {} differ", values.len())
            })
            .collect();
        eprintln!("seed {seed}: {} of {} rows differ from the twin", differing.len(), found.len());
        assert!(
            differing.len() * 5 <= found.len(),
            "seed {seed}: {} of {}: {differing:#?}",
            differing.len(),
            found.len()
        );
    }
}

#[test]
fn the_qwen_engine_is_its_twin_on_a_random_model() {
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        return left_to_soak("the_qwen_engine_is_its_twin_on_a_random_model");
    }
    let vocab_size = Family::Qwen2.shape().vocab_size;
    let mut bench = Bench::random(SmallPackage { family: Family::Qwen2, layers: 2, vocab_size, seed: 3 });
    let tokens = [2, 100_000, 17, 17];
    let engine = bench.engine(&tokens);
    compare(&engine, &bench.twin(Lane::Qwen, &tokens), "qwen");
    let graphs = bench.chunked(ChunkFormat::QwenBf16, 2, &tokens);
    for (of, values) in graphs.iter().filter(|((_, tap), _)| !tap.starts_with("LayerOut")) {
        let cosine = cosine(values, &engine[of]);
        assert!(cosine > 0.999, "{of:?}: cosine {cosine}");
    }
}

/// Logits of a normed row with a package's head.
fn logits(package: &Package, normed: &[f32]) -> Vec<f32> {
    let head = &package.quantized("lm_head").unwrap().bf16;
    let row = |bytes: &[u8]| {
        let weights = bytes.as_chunks::<2>().0.iter().map(|pair| half::bf16::from_le_bytes(*pair).to_f32());
        weights.zip(normed).map(|(weight, x)| weight * x).sum::<f32>()
    };
    head.bytes().chunks_exact(2 * normed.len()).map(row).collect()
}

fn best_two(logits: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    (order[0], logits[order[0]] - logits[order[1]])
}

/// Openings of three chats, teacher-forced.
const TEXTS: [&str; 3] = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n\
     Explain in simple terms why the sky looks blue during the day.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris. It lies \
     on the river Seine, and more than two million people live there.<|im_end|>\n",
    "<|im_end|>\n\nThe water cycle moves water between the sea, the air and the land. The sun warms the sea, water rises as \
     vapour, cools, and falls as rain or snow on the hills.",
];
const PROMPT_POSITIONS: usize = 32;

/// What the logits of a lane on real weights are held to.
struct Limits {
    mean_cosine: f64,
    least_cosine: f64,
    /// Of a logit.
    largest_error: f32,
    /// Rows that are left out of all this: those with the least cosines, each no less than that.
    outliers: &'static [f64],
    /// Rows whose argmax is that of `exact`, at least.
    agreements: usize,
}

/// Engine, twin and `exact` on the same weights over [`TEXTS`]. The logits of engine and `exact`, row by row.
#[allow(clippy::print_stderr, reason = "figures belong into the test's output")]
fn check_real_weights(bench: &mut Bench, lane: Lane, limits: &Limits) -> Vec<(Vec<f32>, Vec<f32>)> {
    let text = bench.package.text_model().unwrap();
    let tokenizer = Tokenizer::from_vocabulary(text.vocabulary()).unwrap();
    let span = SegmentSpan::whole(bench.model.config());
    let mut exact = ExactSegment::open(&bench.model, span, ExactOptions::new(64, THREADS)).unwrap();
    let mut rows: Vec<(Vec<f32>, Vec<f32>)> = Vec::new();
    let (mut shown_rows, mut same_rows) = (0, 0);
    // First layers, by position, whose keys or values are not the twin's bits.
    let mut first_layers: BTreeMap<u32, usize> = BTreeMap::new();
    for text in TEXTS {
        let mut tokens = Vec::new();
        tokenizer.encode_into(text, Specials::Parse, &mut tokens).unwrap();
        assert!(tokens.len() >= PROMPT_POSITIONS, "{} tokens: {text}", tokens.len());
        tokens.truncate(PROMPT_POSITIONS);
        let found = bench.engine(&tokens);
        let twin = bench.twin(lane, &tokens);
        compare(&found, &twin, &lane.to_string());
        shown_rows += found.len();
        same_rows += found.iter().filter(|(of, values)| twin[*of] == **values).count();
        for position in 0..PROMPT_POSITIONS as u32 {
            let differs = |layer: &u32| {
                ["K", "V"].iter().any(|kind| {
                    let of = (position, format!("{kind}({layer})"));
                    found.get(&of).is_some_and(|values| twin[&of] != *values)
                })
            };
            if let Some(layer) = (0..bench.model.config().layers as u32).find(differs) {
                *first_layers.entry(layer).or_default() += 1;
            }
        }
        let wanted = shown_in_runs(&mut exact, &tokens, tokens.len());
        for position in 0..PROMPT_POSITIONS as u32 {
            let logits = match found.get(&(position, "Logits".to_owned())) {
                Some(logits) => logits.clone(),
                None => logits(&bench.package, &found[&(position, "Normed".to_owned())]),
            };
            rows.push((logits, wanted[&(position, "Logits".to_owned())].clone()));
        }
    }
    let cosines: Vec<f64> = rows.iter().map(|(found, wanted)| cosine(found, wanted)).collect();
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by(|a, b| cosines[*a].total_cmp(&cosines[*b]));
    let (apart, rest) = order.split_at(limits.outliers.len());
    let error = |row: usize| {
        let (found, wanted) = &rows[row];
        found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    let mean = rest.iter().map(|row| cosines[*row]).sum::<f64>() / rest.len() as f64;
    let least = cosines[rest[0]];
    let largest = rest.iter().map(|row| error(*row)).fold(0.0, f32::max);
    let (mut agreements, mut decided) = (0, 0);
    for row in rest {
        let (found, wanted) = &rows[*row];
        let (best, margin) = best_two(wanted);
        let agrees = best_two(found).0 == best;
        // The limit is a number from elsewhere: with the error of these very rows nothing else could be.
        assert!(margin <= 2.0 * limits.largest_error || agrees, "row {row}: margin {margin}");
        decided += usize::from(margin > 2.0 * limits.largest_error);
        agreements += usize::from(agrees);
    }
    eprintln!(
        "{lane}: cosine to exact {mean:.6} in the mean, {least:.6} at least; largest error {largest:.3}; the same argmax in \
         {agreements} of {} rows, {decided} decided; {same_rows} of {shown_rows} rows have the twin's bits; positions by the \
         first layer whose keys or values differ: {first_layers:?}",
        rest.len()
    );
    for (row, limit) in apart.iter().zip(limits.outliers) {
        let (text, position, cosine) = (row / PROMPT_POSITIONS, row % PROMPT_POSITIONS, cosines[*row]);
        eprintln!("{lane}, text {text}, position {position}: cosine {cosine:.6}, error {:.3}", error(*row));
        assert!(cosine >= *limit, "text {text}, position {position}: {cosine}");
    }
    assert!(mean >= limits.mean_cosine && least >= limits.least_cosine, "mean {mean}, least {least}");
    assert!(largest <= limits.largest_error, "{largest}");
    assert!(agreements >= limits.agreements, "{agreements} agree");
    rows
}

#[test]
fn the_default_model_runs_on_the_virtual_npu() {
    let Some(path) = npuhal_tests::models::path("smollm2-135m") else { return };
    let mut bench = Bench::converted(&path);
    // The mean of whole prompts is above 0.999, single rows are not: rounding the residual stream alone to bf16, as every form of
    // the lane does, leaves 0.995 in the worst one. docs/xdna1.md has the cost of each rounding; no single one is the cause.
    let limits = Limits { mean_cosine: 0.999, least_cosine: 0.98, largest_error: 2.0, outliers: &[], agreements: 90 };
    let rows = check_real_weights(&mut bench, Lane::SmolLm, &limits);
    // Published: token 2 at position 0 gives 198. With the four-bit weights of this file `exact` differs, so the lane may.
    let (found, wanted) = rows.get(2 * PROMPT_POSITIONS).map(|(a, b)| (best_two(a).0, best_two(b).0)).unwrap();
    assert!(found == wanted && (found == 198 || wanted != 198), "{found}, exact {wanted}");
}

/// 1 GB of weights for every token: two minutes. One row is far from `exact` in every form of the lane, because keys whose biases
/// are up to 211 are rounded to bf16 (docs/xdna1.md).
#[test]
fn qwen_runs_on_the_virtual_npu() {
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        return left_to_soak("qwen_runs_on_the_virtual_npu");
    }
    let Some(path) = npuhal_tests::models::path("qwen2.5-coder-0.5b") else { return };
    let mut bench = Bench::converted(&path);
    let id = bench.package.metadata().model_id.clone();
    assert_ne!(id.as_deref(), Some("qwen2.5-0.5b-xdna1"), "another checkpoint than the published one");
    let limits =
        Limits { mean_cosine: 0.999, least_cosine: 0.98, largest_error: 2.0, outliers: &[0.7, 0.98], agreements: 90 };
    check_real_weights(&mut bench, Lane::Qwen, &limits);
}
