//! The CPU backend on real models against reference values.

use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Session, Stepper, Tap, TapSink, Want};
use npuhal_cpu::exact::{ExactOptions, ExactSegment};
use npuhal_models::ModelSource;
use npuhal_registry::{DeviceAddress, DeviceChoice, Numerics, Options, Registry, Request, SegmentSpan, select};
use npuhal_tests::golden::{Golden, Rules, check};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

const SMOLLM2: &str = "smollm2-135m";
const QWEN: &str = "qwen2.5-coder-0.5b";

#[test]
fn exact_smollm2() {
    check(SMOLLM2, Rules::EXACT, open(Numerics::Exact));
}

#[test]
fn exact_qwen() {
    check(QWEN, Rules::EXACT, open(Numerics::Exact));
}

#[test]
fn fast_smollm2() {
    check(SMOLLM2, Rules::FAST, open(Numerics::Fast));
}

#[test]
fn fast_qwen() {
    check(QWEN, Rules::FAST, open(Numerics::Fast));
}

#[test]
fn int8_smollm2() {
    check(SMOLLM2, Rules::INT8, open(Numerics::Int8));
}

#[test]
fn int8_qwen() {
    check(QWEN, Rules::INT8, open(Numerics::Int8));
}

#[test]
fn exact_layers_smollm2() {
    check_layers(SMOLLM2);
}

#[test]
fn exact_layers_qwen() {
    check_layers(QWEN);
}

/// Opens a model as the program does: through the registry, on the CPU.
fn open(numerics: Numerics) -> impl FnOnce(&ModelSource) -> Box<dyn Stepper> {
    move |model| {
        let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
        let device = DeviceChoice::Pinned(DeviceAddress::Cpu.into());
        let options = Options { numerics, context_positions: Some(256), ..Options::default() };
        let request = Request { device, options, ..Request::default() };
        let choice = select(&registry, model, &request).unwrap();
        assert_eq!(choice.route.name(), npuhal_cpu::route::NAME);
        match choice.open(&registry, model, &request.options).unwrap() {
            Session::Stepper(stepper) => stepper,
            Session::Generator(_) => panic!("the CPU route opens steppers"),
        }
    }
}

/// Residual streams at one position, by layer.
struct LayerSink {
    position: u32,
    layers: Arc<Mutex<Vec<Vec<f32>>>>,
}

impl TapSink for LayerSink {
    fn observe(&mut self, tap: Tap, row: Row, values: &[f32]) {
        if let Tap::LayerOut(layer) = tap
            && row.position == self.position
        {
            let mut layers = self.layers.lock().unwrap();
            assert_eq!(layers.len(), layer as usize, "layers come in order");
            layers.push(values.to_vec());
        }
    }
}

/// The residual stream after each layer at the last prompt position.
fn check_layers(name: &str) {
    let Some(path) = npuhal_tests::models::path(name) else { return };
    let model = ModelSource::open(&path).unwrap();
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let span = SegmentSpan::whole(model.config());
    let mut segment = ExactSegment::open(&model, span, ExactOptions::new(256, threads)).unwrap();
    let sequence = SequenceId(0);
    for prompt in Golden::read(name).prompts {
        let layers = Arc::new(Mutex::new(Vec::new()));
        let position = prompt.ids.len() as u32 - 1;
        segment.observe(Some(Box::new(LayerSink { position, layers: Arc::clone(&layers) })));
        segment.truncate(sequence, 0);
        let rows = prompt.ids.iter().enumerate();
        let rows: Vec<Row> = rows.map(|(at, &token)| Row { sequence, token, position: at as u32 }).collect();
        segment.forward(&rows, &mut HiddenRows::new(), Want::Nothing, &Control::new()).unwrap();
        let layers = layers.lock().unwrap();
        assert_eq!(layers.len(), prompt.layers.len());
        for (layer, (found, (l2, head))) in layers.iter().zip(&prompt.layers).enumerate() {
            let found_l2 = found.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            assert!((found_l2 / l2 - 1.0).abs() < 1e-5, "{}: layer {layer}: {found_l2}, wanted {l2}", prompt.text);
            for (found, wanted) in found.iter().zip(head) {
                let distance = (f64::from(*found) - wanted).abs();
                assert!(distance < 1e-4 * (1.0 + wanted.abs()), "layer {layer}: {found}, wanted {wanted}");
            }
        }
    }
}
