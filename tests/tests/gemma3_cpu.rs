//! The Gemma 3 model of the catalogue: loads, equals the independent reference, and `fast` stays near `exact`.

use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Session, Stepper, TokenId, Want};
use npuhal_models::config::{Activation, LayerRope};
use npuhal_models::{ModelSource, Specials, Tokenizer};
use npuhal_registry::{DeviceAddress, DeviceChoice, Numerics, Options, Registry, Request, select};
use npuhal_tests::kit::gguf::GgufFile;
use npuhal_tests::kit::reference::{LogitsOf, Reference};
use npuhal_tests::models;
use std::path::Path;

// The route is registered by a crate that must be named to be linked.
use npuhal_cpu as _;

const MODEL: &str = "gemma3-270m";
const PROMPT: &str = "The capital of France is";

fn open(model: &ModelSource, numerics: Numerics, positions: u32) -> Box<dyn Stepper> {
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let options = Options { numerics, context_positions: Some(positions), ..Options::default() };
    let request = Request { device: DeviceChoice::Pinned(DeviceAddress::Cpu.into()), options, ..Request::default() };
    let choice = select(&registry, model, &request).unwrap();
    match choice.open(&registry, model, &request.options).unwrap() {
        Session::Stepper(stepper) => stepper,
        Session::Generator(_) => panic!("the CPU route opens steppers"),
    }
}

fn step(stepper: &mut dyn Stepper, tokens: &[TokenId], want: Want<'_>) -> Vec<Vec<f32>> {
    let row = |(position, token): (usize, &TokenId)| Row {
        sequence: SequenceId(0),
        token: *token,
        position: position as u32,
    };
    let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
    let mut logits = HiddenRows::new();
    stepper.step(&rows, want, &mut logits, &Control::new()).unwrap();
    (0..logits.rows()).map(|row| logits.row(row).to_vec()).collect()
}

fn prompt(model: &ModelSource, text: &str) -> Vec<TokenId> {
    let tokenizer = Tokenizer::from_vocabulary(model.vocabulary()).unwrap();
    let mut ids: Vec<TokenId> = model.vocabulary().bos.into_iter().collect();
    ids.extend(tokenizer.encode(text, Specials::Plain).unwrap());
    ids
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn best(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(token, _)| token as TokenId)
}

#[test]
fn its_configuration_is_that_of_the_family() {
    let Some(path) = models::path(MODEL) else { return };
    let model = ModelSource::open(&path).unwrap();
    let config = model.config();
    let features = &config.features;
    assert_eq!(
        (config.model_type.as_str(), config.layers, config.hidden_size, config.head_dim),
        ("gemma3", 18, 640, 256)
    );
    assert_eq!((config.heads, config.kv_heads, config.qk_norm, config.tied_head), (4, 1, true, true));
    assert_eq!((config.rope.theta, features.local_rope.as_ref().unwrap().theta), (1e6, 1e4));
    assert_eq!((features.activation, features.output_norms), (Activation::GeluTanh, true));
    let full: Vec<usize> = (0..18).filter(|layer| features.layer(*layer).window.is_none()).collect();
    assert_eq!(full, [5, 11, 17]);
    let local =
        |layer: usize| features.layer(layer).rope == LayerRope::Local && features.layer(layer).window == Some(512);
    assert!((0..18).filter(|layer| !full.contains(layer)).all(local));
}

#[test]
fn exact_equals_the_reference_and_fast_is_near_it() {
    let Some(path) = models::path(MODEL) else { return };
    let model = ModelSource::open(&path).unwrap();
    let tokens = prompt(&model, PROMPT);
    assert_eq!(tokens.len(), 6, "bos and a token for each word");
    let exact = step(open(&model, Numerics::Exact, 64).as_mut(), &tokens, Want::All);
    let fast = step(open(&model, Numerics::Fast, 64).as_mut(), &tokens, Want::All);
    for (position, (fast, exact)) in fast.iter().zip(&exact).enumerate() {
        assert!(cosine(fast, exact) > 0.999, "position {position}: {}", cosine(fast, exact));
        assert_eq!(best(fast), best(exact), "position {position}");
    }
    let wanted = reference(&path, &tokens);
    let distance = |found: &[f32]| {
        let size = wanted.iter().map(|x| x * x).sum::<f64>().sqrt();
        found.iter().zip(&wanted).map(|(found, wanted)| (f64::from(*found) - wanted).powi(2)).sum::<f64>().sqrt() / size
    };
    let found = distance(exact.last().unwrap());
    assert!(found < 1e-5, "{found:e}");
}

fn reference(path: &Path, tokens: &[TokenId]) -> Vec<f64> {
    let file = GgufFile::parse(&std::fs::read(path).unwrap()).unwrap();
    Reference::new(&file).unwrap().forward(tokens, LogitsOf::Last).unwrap().logits.remove(0)
}

/// More positions than the window, so that layers forget and layers do not.
#[test]
fn past_the_window_exact_and_fast_agree() {
    if std::env::var_os("NPUHAL_SOAK").is_none_or(|value| value != "1") {
        models::left_to_soak("Gemma 3 past its window");
        return;
    }
    let Some(path) = models::path(MODEL) else { return };
    let model = ModelSource::open(&path).unwrap();
    let story = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. ".repeat(40);
    let tokens = prompt(&model, &story);
    assert!(tokens.len() > 600, "{}", tokens.len());
    let exact = step(open(&model, Numerics::Exact, 1024).as_mut(), &tokens, Want::Last).remove(0);
    let fast = step(open(&model, Numerics::Fast, 1024).as_mut(), &tokens, Want::Last).remove(0);
    assert!(cosine(&fast, &exact) > 0.999, "{}", cosine(&fast, &exact));
    assert_eq!(best(&fast), best(&exact));
}
