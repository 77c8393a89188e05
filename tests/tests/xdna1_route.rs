//! The xdna1 route on the virtual NPU: engine, chunks, int8, head and hybrids of one package, against the CPU's stage and against
//! each other; prefixes, refusals, time-outs.

use npuhal_amdxdna::NpuDevice;
use npuhal_core::card::DeviceCard;
use npuhal_core::device::Device;
use npuhal_core::error::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Session, Stepper, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_cpu::route::CpuRoute;
use npuhal_models::package::{Family, Package, Shape};
use npuhal_models::source::Format;
use npuhal_models::{ModelSource, vocabulary::Vocabulary};
use npuhal_registry::{
    Decline, DeviceUri, Fitness, Host, NpuLayers, Numerics, OpenRequest, Options, Route, RouteError, SegmentRequest,
    SegmentSpan, Service,
};
use npuhal_tests::kit::kernels::{write_kernels, xdna1_kernels};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_tests::models::left_to_soak;
use npuhal_tests::process::resident_bytes;
use npuhal_virtual::{RunFault, VirtualDevice, VirtualSpec};
use npuhal_xdna1::kit::{KIT_FILE, KIT_FOLDER, KitManifest, KitOrigin};
use npuhal_xdna1::route::Xdna1Route;
use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use tempfile::TempDir;

const LAYERS: usize = 4;
const VOCAB: usize = 64;

static PACKAGE: LazyLock<(TempDir, ModelSource)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let path = SmallPackage { family: Family::Llama, layers: LAYERS, vocab_size: VOCAB, seed: 11 }.write(
        folder.path(),
        "p",
        &[],
    );
    let model = model(&path);
    write_kit(&path.join(KIT_FOLDER), &model);
    (folder, model)
});

fn model(path: &Path) -> ModelSource {
    let options =
        npuhal_models::package::OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
    Package::open(path, options).unwrap().model(Vocabulary::default()).unwrap()
}

fn write_kit(folder: &Path, model: &ModelSource) {
    let config = model.config();
    write_kernels(
        folder,
        &xdna1_kernels(Shape {
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            heads: config.heads,
            kv_heads: config.kv_heads,
            layers: config.layers,
            vocab_size: config.vocab_size,
        }),
    );
}

/// A virtual NPU and the CPU, and what crosses between them.
struct Machine {
    hardware: Arc<VirtualDevice>,
    card: DeviceCard,
    devices_opened: AtomicUsize,
    /// Elements of hidden rows that CPU layers were given.
    crossed: Arc<AtomicUsize>,
}

impl Machine {
    fn new() -> Self {
        let spec: VirtualSpec = "virtual:npu1".parse().unwrap();
        let hardware = VirtualDevice::new(&spec);
        let device = NpuDevice::open(hardware.connect(), &hardware.identity()).unwrap();
        let card = device.card().clone();
        Self { hardware, card, devices_opened: AtomicUsize::new(0), crossed: Arc::default() }
    }

    fn fitness(&self, model: &ModelSource, options: &Options) -> Fitness {
        Xdna1Route.fitness(model, std::slice::from_ref(&self.card), options)
    }

    fn service(&self, model: &ModelSource, options: &Options) -> Service {
        match self.fitness(model, options) {
            Fitness::Serves(service) => service,
            Fitness::Declines(decline) => panic!("{decline:?}"),
        }
    }

    fn refusal(&self, model: &ModelSource, options: &Options) -> String {
        match self.fitness(model, options) {
            Fitness::Declines(Decline::Unavailable(reason)) => reason.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn open(&self, model: &ModelSource, options: &Options) -> Box<dyn Stepper> {
        let service = self.service(model, options);
        let devices = std::slice::from_ref(&self.card);
        let request = OpenRequest { model, service: &service, devices, options, host: self };
        match Xdna1Route.open(request).unwrap() {
            Session::Stepper(stepper) => {
                assert_eq!(stepper.placement(), service.placement, "what was promised");
                stepper
            }
            Session::Generator(_) => panic!("a stepper"),
        }
    }

    fn runs(&self) -> u64 {
        self.hardware.statistics().runs
    }
}

impl Host for Machine {
    fn open_device(&self, id: &str) -> Result<Box<dyn Device>, RouteError> {
        assert_eq!(id, self.card.id);
        self.devices_opened.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(NpuDevice::open(self.hardware.connect(), &self.hardware.identity())?))
    }

    fn open_segment(&self, route: &str, request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        assert_eq!(route, "cpu");
        let segment = CpuRoute.segment(request)?;
        Ok(Box::new(Counting { segment, crossed: Arc::clone(&self.crossed) }))
    }

    fn pinned(&self) -> Option<&DeviceUri> {
        None
    }
}

/// Counts the hidden rows that come from the NPU's layers.
struct Counting {
    segment: Box<dyn Segment>,
    crossed: Arc<AtomicUsize>,
}

impl Segment for Counting {
    fn layers(&self) -> Range<usize> {
        self.segment.layers()
    }
    fn takes(&self) -> Takes {
        self.segment.takes()
    }
    fn yields(&self) -> Yields {
        self.segment.yields()
    }
    fn width(&self) -> usize {
        self.segment.width()
    }
    fn capacity(&self) -> SegmentCapacity {
        self.segment.capacity()
    }
    fn device(&self) -> &str {
        self.segment.device()
    }
    fn begin(&mut self) -> Result<(), RunError> {
        self.segment.begin()
    }
    fn end(&mut self) {
        self.segment.end();
    }
    fn forward(
        &mut self,
        rows: &[Row],
        hidden: &mut HiddenRows,
        want: Want<'_>,
        control: &Control,
    ) -> Result<(), RunError> {
        if self.segment.takes() == Takes::Hidden {
            self.crossed.fetch_add(hidden.as_slice().len(), Ordering::Relaxed);
        }
        self.segment.forward(rows, hidden, want, control)
    }
    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        self.segment.truncate(sequence, len)
    }
    fn taps(&self) -> &[Tap] {
        self.segment.taps()
    }
    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.segment.observe(sink);
    }
}

fn options(pairs: &[(&str, &str)], npu_layers: Option<NpuLayers>) -> Options {
    let route_options = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    // The head in the arithmetic of the lane's CPU stage, so that equal means equal.
    let threads = NonZeroUsize::new(2);
    Options { numerics: Numerics::Xdna1Cpu, threads, npu_layers, route_options, ..Options::default() }
}

fn rows(tokens: &[u32], from: usize) -> Vec<Row> {
    let row = |(at, token): (usize, &u32)| Row { sequence: SequenceId(0), token: *token, position: (from + at) as u32 };
    tokens.iter().enumerate().map(row).collect()
}

fn step(stepper: &mut dyn Stepper, tokens: &[u32], from: usize) -> Result<Vec<Vec<f32>>, RunError> {
    let mut logits = HiddenRows::new();
    stepper.step(&rows(tokens, from), Want::All, &mut logits, &Control::new())?;
    Ok((0..logits.rows()).map(|row| logits.row(row).to_vec()).collect())
}

/// Logits of all positions, in a generation of its own from position 0.
fn logits(stepper: &mut dyn Stepper, tokens: &[u32]) -> Vec<Vec<f32>> {
    stepper.begin().unwrap();
    assert_eq!(stepper.truncate(SequenceId(0), 0), 0);
    let logits = step(stepper, tokens, 0).unwrap();
    stepper.end();
    logits
}

/// A CPU segment with the lane's numerics.
fn cpu(
    model: &ModelSource,
    layers: Range<usize>,
    takes: Takes,
    yields: Yields,
    numerics: Numerics,
) -> Box<dyn Segment> {
    let options = Options { numerics, ..Options::default() };
    let span = SegmentSpan { layers, takes, yields };
    CpuRoute.segment(SegmentRequest { model, span, options: &options, positions: Some(64) }).unwrap()
}

fn run(segment: &mut dyn Segment, tokens: &[u32], hidden: &mut HiddenRows) {
    segment.begin().unwrap();
    segment.forward(&rows(tokens, 0), hidden, Want::All, &Control::new()).unwrap();
    segment.end();
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

const TOKENS: [u32; 6] = [3, 60, 17, 17, 42, 8];

/// Logits as the twins compute them: `npu` leading layers as the chunked graphs do, one by one, the rest as the CPU stage.
fn composition(model: &ModelSource, npu: usize, tokens: &[u32]) -> HiddenRows {
    let mut rows = HiddenRows::new();
    for layer in 0..LAYERS {
        let takes = if layer == 0 { Takes::Tokens } else { Takes::Hidden };
        let numerics = if layer < npu { Numerics::Xdna1SmolLmChunk } else { Numerics::Xdna1Cpu };
        run(&mut *cpu(model, layer..layer + 1, takes, Yields::Hidden, numerics), tokens, &mut rows);
    }
    run(&mut *cpu(model, LAYERS..LAYERS, Takes::Hidden, Yields::Logits, Numerics::Xdna1Cpu), tokens, &mut rows);
    rows
}

#[test]
fn hybrids_are_the_composition_of_their_parts() {
    let (_, model) = &*PACKAGE;
    assert_eq!(model.format(), Format::Xdna1Package);
    let machine = Machine::new();
    let mut differing = 0;
    // 0 %, 1 layer, 55 % (2.2), 60 % (2.4), 75 %, 100 % of 4 layers.
    for (asked, npu) in [
        (NpuLayers::Percent(0.0), 0),
        (NpuLayers::Count(1), 1),
        (NpuLayers::Percent(55.0), 2),
        (NpuLayers::Percent(60.0), 2),
        (NpuLayers::Percent(75.0), 3),
        (NpuLayers::Percent(100.0), 4),
    ] {
        let options = options(&[("engine", "off")], Some(asked));
        let mut stepper = machine.open(model, &options);
        machine.crossed.store(0, Ordering::Relaxed);
        let found = logits(&mut *stepper, &TOKENS);
        let crossed = machine.crossed.load(Ordering::Relaxed);
        assert_eq!(crossed, if npu == 0 { 0 } else { TOKENS.len() * 576 }, "one hidden row a token: {asked:?}");
        if npu == 0 {
            assert_eq!(machine.devices_opened.load(Ordering::Relaxed), 0, "no device for no layer");
        }
        let twins = composition(model, npu, &TOKENS);
        for (position, found) in found.iter().enumerate() {
            let wanted = twins.row(position);
            // At the first position no weight of attention is other than one.
            assert!(position > 0 || found == wanted, "{asked:?} at {position}: other bits");
            differing += usize::from(found != wanted);
            let largest = wanted.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
            let error = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // A step of bf16 at the row's scale.
            assert!(error <= largest / 128.0, "{asked:?} at {position}: {error} of {largest}");
        }
    }
    // A sum that lies near the border of two bf16 falls on the other side, and moves all behind it: seen in one of 36 rows or a few.
    assert!(differing <= 6, "{differing} of 36 rows differ");
    assert!(machine.hardware.diagnoses().is_empty(), "{:?}", machine.hardware.diagnoses());
}

#[test]
fn every_form_computes_the_model() {
    let (_, model) = &*PACKAGE;
    let machine = Machine::new();
    /// Options, runs a token, similarity to the CPU stage.
    type Form = (&'static [(&'static str, &'static str)], u64, f64);
    let forms: [Form; 6] = [
        (&[], 1, 0.999),
        (&[("engine", "off")], 2, 0.999),
        (&[("engine", "off"), ("chunk", "1")], 4, 0.999),
        (&[("w8", "on")], 2, 0.995),
        (&[("npu_head", "on")], 3, 0.999),
        (&[("w8", "on"), ("npu_head", "on"), ("prefix_cache", "off")], 3, 0.995),
    ];
    let mut wanted = HiddenRows::new();
    run(&mut *cpu(model, 0..LAYERS, Takes::Tokens, Yields::Logits, Numerics::Xdna1Cpu), &TOKENS, &mut wanted);
    for (pairs, runs, least) in forms {
        let mut stepper = machine.open(model, &options(pairs, None));
        let before = machine.runs();
        let found = logits(&mut *stepper, &TOKENS);
        assert_eq!(machine.runs() - before, runs * TOKENS.len() as u64, "{pairs:?}");
        for (position, found) in found.iter().enumerate() {
            let cosine = cosine(found, wanted.row(position));
            assert!(cosine > least, "{pairs:?} at {position}: {cosine}");
        }
    }
    assert!(machine.hardware.diagnoses().is_empty(), "{:?}", machine.hardware.diagnoses());
}

#[test]
fn a_prefix_is_used_again_bit_for_bit() {
    let (_, model) = &*PACKAGE;
    let machine = Machine::new();
    for pairs in [[("engine", "on")], [("engine", "off")]] {
        let options = options(&pairs, None);
        let mut stepper = machine.open(model, &options);
        logits(&mut *stepper, &TOKENS);
        let next = [TOKENS[0], TOKENS[1], TOKENS[2], 5, 6, 7, 9];
        stepper.begin().unwrap();
        assert_eq!(stepper.truncate(SequenceId(0), 3), 3);
        let before = machine.runs();
        let found = step(&mut *stepper, &next[3..], 3).unwrap();
        stepper.end();
        let a_token = if pairs[0].1 == "on" { 1 } else { 2 };
        assert_eq!(machine.runs() - before, 4 * a_token, "only the new positions");
        let fresh = logits(&mut *machine.open(model, &options), &next);
        assert_eq!(found, fresh[3..], "{pairs:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_loaded() {
    let (folder, model) = &*PACKAGE;
    let machine = Machine::new();
    let with_kernels = |kernels: PathBuf| Options { kernels: Some(kernels), ..options(&[], None) };
    let message = machine.refusal(model, &with_kernels(folder.path().join("nowhere")));
    assert!(message.contains("no kit is there"), "{message}");
    let copy = |change: &dyn Fn(&mut KitManifest)| {
        let to = tempfile::tempdir_in(folder.path()).unwrap().keep();
        for file in fs::read_dir(model.path().join(KIT_FOLDER)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
        let path = to.join(KIT_FILE);
        let mut manifest: KitManifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut manifest);
        fs::write(path, serde_json::to_vec(&manifest).unwrap()).unwrap();
        to
    };
    let message = machine.refusal(model, &with_kernels(copy(&|kit| kit.kernels[0].layout_version = 9)));
    assert!(message.contains("wanted layout version 1, found 9"), "{message}");
    let message = machine.refusal(model, &with_kernels(copy(&|kit| kit.kernels[0].arguments[0].bytes += 64)));
    assert!(message.contains("smollm-engine: argument 0: wanted weights of"), "{message}");
    let message = machine.refusal(model, &with_kernels(copy(&|kit| kit.kernels[0].shape.layers = 30)));
    assert!(message.contains("is compiled for a model of"), "{message}");
    let message = machine.refusal(model, &with_kernels(copy(&|kit| kit.origin = KitOrigin::Imported)));
    assert!(
        message.contains("origin: wanted designs of the virtual NPU, which executes no compiled code"),
        "{message}"
    );
    let hardware = DeviceCard { is_virtual: false, ..machine.card.clone() };
    match Xdna1Route.fitness(model, &[hardware], &options(&[], None)) {
        Fitness::Declines(Decline::Unavailable(reason)) => {
            assert!(reason.to_string().contains("origin: wanted compiled designs, found those of the virtual NPU"));
        }
        other => panic!("{other:?}"),
    }
    // A file that was changed is found when the kit is loaded: no buffer, no context before that.
    let changed = copy(&|kit| kit.kernels[0].sha256.instructions = "0".repeat(64));
    let options_of = with_kernels(changed);
    let service = machine.service(model, &options_of);
    let devices = std::slice::from_ref(&machine.card);
    let request = OpenRequest { model, service: &service, devices, options: &options_of, host: &machine };
    let error = Xdna1Route.open(request).err().unwrap().to_string();
    assert!(error.contains("wanted SHA-256 000"), "{error}");
    assert_eq!(machine.runs(), 0);

    for (pairs, wanted) in [(("w8", "yes"), "w8 cannot be 'yes'; allowed: on, off"), (("cpu_final_norm", "off"), "")] {
        match machine.fitness(model, &options(&[pairs], None)) {
            Fitness::Declines(Decline::Unavailable(reason)) => assert_eq!(reason.to_string(), wanted),
            Fitness::Serves(_) => assert!(wanted.is_empty(), "{pairs:?}: the engine has the norm"),
            other => panic!("{other:?}"),
        }
    }
    let message = machine.refusal(model, &options(&[("engine", "off"), ("cpu_final_norm", "off")], None));
    assert!(message.contains("no design computes the final norm alone"), "{message}");
    let message = machine.refusal(model, &options(&[("cpu_final_norm", "on")], None));
    assert!(message.contains("the engine has the final norm inside; with engine=off"), "{message}");
    let message = machine.refusal(model, &options(&[("cpu_final_norm", "off")], Some(NpuLayers::Count(0))));
    assert!(message.contains("no layer runs on the NPU"), "{message}");
    /// Options, layers on the NPU, what `npuhal routes` says.
    type Detail = (&'static [(&'static str, &'static str)], Option<NpuLayers>, &'static str);
    let details: [Detail; 4] = [
        (&[], None, "one dispatch a token, final norm in it, head on the CPU"),
        (
            &[("engine", "off"), ("cpu_final_norm", "on")],
            None,
            "2 dispatches a token, final norm on the CPU (xdna1-cpu), head on the CPU",
        ),
        (
            &[("npu_head", "on"), ("w8", "on")],
            None,
            "2 dispatches a token, int8 weights, final norm on the CPU (xdna1-cpu), int8 head on the NPU",
        ),
        (
            &[("cpu_stage", "fast")],
            Some(NpuLayers::Count(1)),
            "1 dispatch a token, 3 layers and final norm on the CPU (fast), head on the CPU",
        ),
    ];
    for (pairs, layers, wanted) in details {
        assert_eq!(machine.service(model, &options(pairs, layers)).detail, wanted);
    }
    let message = machine.refusal(model, &options(&[("npu_head", "on")], Some(NpuLayers::Count(2))));
    assert!(message.contains("the head follows the last layer"), "{message}");
    let message = machine.refusal(model, &options(&[], Some(NpuLayers::Count(5))));
    assert_eq!(message, "--npu-layers 5: the model has 4 layers; give 0 to 4");
    let long = Options { context_positions: Some(65), ..options(&[], None) };
    assert!(machine.refusal(model, &long).contains("the designs have 64"));
    // No first-generation NPU: silent, unless layers on one were asked for.
    let silent = Xdna1Route.fitness(model, &[], &options(&[], None));
    assert!(matches!(silent, Fitness::Declines(Decline::Optional(_))));
    let told = Xdna1Route.fitness(model, &[], &options(&[], Some(NpuLayers::Count(1))));
    assert!(matches!(told, Fitness::Declines(Decline::Unavailable(_))));
}

#[test]
fn a_norm_epsilon_that_is_not_compiled_in_is_declined_on_the_npu_alone() {
    let (_, other) = &*PACKAGE;
    let folder = tempfile::tempdir().unwrap();
    let path =
        SmallPackage { family: Family::Llama, layers: 1, vocab_size: VOCAB, seed: 12 }.write(folder.path(), "p", &[]);
    write_kit(&path.join(KIT_FOLDER), &model(&path));
    let machine = Machine::new();
    machine.service(&model(&path), &options(&[], None));
    let metadata = path.join("metadata.json");
    let mut fields: serde_json::Value = serde_json::from_slice(&fs::read(&metadata).unwrap()).unwrap();
    assert_eq!(fields["rms_norm_eps"], 1e-5);
    fields["rms_norm_eps"] = 1e-6.into();
    fs::write(&metadata, fields.to_string()).unwrap();
    let changed = model(&path);
    assert_eq!((other.config().rms_norm_eps, changed.config().rms_norm_eps), (1e-5, 1e-6));
    for pairs in [&[][..], &[("engine", "off")]] {
        let message = machine.refusal(&changed, &options(pairs, None));
        assert!(message.contains("RMSNorm adds 1e-6 to the mean of squares"), "{message}");
        assert!(message.contains("the llama designs have 1e-5 compiled in"), "{message}");
    }
    machine.service(&changed, &options(&[], Some(NpuLayers::Count(0))));
}

/// What `bench --calibrate` asks for: the head part, and a layer where the kit has no chunk of one.
#[test]
fn parts_that_a_kit_cannot_run_are_told_apart() {
    let (_, model) = &*PACKAGE;
    let machine = Machine::new();
    let part = |layers, takes, yields| {
        let options = options(&[], None);
        let span = SegmentSpan { layers, takes, yields };
        let request = SegmentRequest { model, span, options: &options, positions: Some(28) };
        Xdna1Route.segment_on(request, &machine.card.id, &machine).map(|segment| segment.layers())
    };
    let head = part(LAYERS..LAYERS, Takes::Hidden, Yields::Logits);
    assert!(matches!(head, Err(RouteError::NoSegments { .. })), "{head:?}");
    let with_head = part(0..LAYERS, Takes::Tokens, Yields::Logits);
    assert!(matches!(with_head, Err(RouteError::Declined { .. })), "{with_head:?}");
    assert_eq!(part(0..1, Takes::Tokens, Yields::Hidden).unwrap(), 0..1);
}

#[test]
fn a_run_that_hangs_fails_alone() {
    let (_, model) = &*PACKAGE;
    let machine = Machine::new();
    let options = options(&[], None);
    let mut stepper = machine.open(model, &options);
    let wanted = logits(&mut *stepper, &TOKENS);
    machine.hardware.inject(2, RunFault::Timeout);
    stepper.begin().unwrap();
    stepper.truncate(SequenceId(0), 0);
    let error = step(&mut *stepper, &TOKENS, 0).unwrap_err();
    assert!(matches!(error, RunError::TimedOut { .. }), "{error}");
    stepper.end();
    assert_eq!(logits(&mut *stepper, &TOKENS), wanted, "the next request is served");
}

/// 100 completions and as many model switches, with a hanging run in every 17th.
#[test]
fn models_are_switched_and_lost_runs_survived() {
    const ROUNDS: usize = 100;
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        return left_to_soak("models_are_switched_and_lost_runs_survived");
    }
    let (_, first) = &*PACKAGE;
    let folder = tempfile::tempdir().unwrap();
    let path =
        SmallPackage { family: Family::Llama, layers: 2, vocab_size: VOCAB, seed: 5 }.write(folder.path(), "q", &[]);
    let second = model(&path);
    write_kit(&path.join(KIT_FOLDER), &second);
    let machine = Machine::new();
    let options = options(&[], None);
    let models = [first, &second];
    let wanted = models.map(|model| logits(&mut *machine.open(model, &options), &TOKENS));
    let mut resident = Vec::new();
    for round in 0..ROUNDS {
        let model = models[round % 2];
        // Only one model is resident: the other is dropped before this one is opened.
        let mut stepper = machine.open(model, &options);
        if round % 17 == 16 {
            machine.hardware.inject((round % 5) as u64, RunFault::Timeout);
            stepper.begin().unwrap();
            let error = step(&mut *stepper, &TOKENS, 0).unwrap_err();
            assert!(matches!(error, RunError::TimedOut { .. }), "round {round}: {error}");
            stepper.end();
        }
        assert_eq!(logits(&mut *stepper, &TOKENS), wanted[round % 2], "round {round}");
        drop(stepper);
        resident.push(resident_bytes(std::process::id()).unwrap());
    }
    let (early, late) = (resident[ROUNDS / 5], resident[ROUNDS - 1]);
    assert!(late <= early + (32 << 20), "memory grows: {early} bytes after {} rounds, {late} at the end", ROUNDS / 5);
}
