//! Several requests at once, and tokens guessed ahead, on the CPU: bit-identical to plain requests alone.

use npuhal_core::stage::{Control, Session, Stepper};
use npuhal_models::batch::{Batch, BatchEvent, RequestId};
use npuhal_models::generate::{Generation, StepperLoop};
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::{GenerationRequest, Piece};
use npuhal_models::speculate::Speculation;
use npuhal_models::{ModelSource, Tokenizer};
use npuhal_registry::{DeviceAddress, DeviceChoice, Numerics, Options, Registry, Request, select};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;

// The route is registered by a crate that must be named to be linked.
use npuhal_cpu as _;

/// Ids of the kit's vocabulary that are plain bytes.
const BYTE_TOKENS: u32 = 256;

fn open(model: &ModelSource, numerics: Numerics, threads: usize, sequences: u32) -> Box<dyn Stepper> {
    let registry = Registry::collect(&["npuhal-cpu"]).unwrap();
    let options =
        Options { numerics, threads: NonZeroUsize::new(threads), sequences: Some(sequences), ..Options::default() };
    let device = DeviceChoice::Pinned(DeviceAddress::Cpu.into());
    let request = Request { device, options, ..Request::default() };
    let choice = select(&registry, model, &request).unwrap();
    match choice.open(&registry, model, &request.options).unwrap() {
        Session::Stepper(stepper) => stepper,
        Session::Generator(_) => panic!("the CPU route opens steppers"),
    }
}

fn alone(steps: &mut StepperLoop, request: &GenerationRequest, tokenizer: &Tokenizer) -> (Generation, Vec<Piece>) {
    let mut pieces = Vec::new();
    let mut receiver = |piece: &Piece| {
        pieces.push(piece.clone());
        ControlFlow::Continue(())
    };
    let generation = steps.generate(request, tokenizer, &mut receiver, &Control::new()).unwrap();
    (generation, pieces)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn requests_together_and_guesses_give_the_bits_of_requests_alone(
        architecture in proptest::sample::select(Architecture::ALL.to_vec()),
        weights in proptest::sample::select(Weights::all()),
        numerics in proptest::sample::select(vec![Numerics::Exact, Numerics::Fast]),
        prompts in proptest::collection::vec((proptest::collection::vec(0..BYTE_TOKENS, 1..20), 0..3usize), 1..6),
        temperature in proptest::sample::select(vec![0.0, 0.8]),
        sequences in 1..5u32,
        threads in 1..3usize,
        max_draft in 1..8usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        ModelSpec::small(architecture, weights).build().write(&path).unwrap();
        let model = ModelSource::open(&path).unwrap();
        let tokenizer = Tokenizer::from_vocabulary(model.vocabulary()).unwrap();
        let requests: Vec<GenerationRequest> = prompts
            .iter()
            .map(|(prompt, _)| GenerationRequest {
                sampling: SamplingParams { temperature, seed: Some(11), ..SamplingParams::default() },
                logprobs: Some(2),
                ignore_eos: true,
                // A prompt that repeats itself gives the guesses something to follow.
                ..GenerationRequest::greedy([&prompt[..], prompt].concat(), 10)
            })
            .collect();
        let mut single = StepperLoop::new(open(&model, numerics, 1, 1));
        let wanted: Vec<_> = requests.iter().map(|request| alone(&mut single, request, &tokenizer)).collect();

        let mut batch = Batch::new(open(&model, numerics, threads, sequences), &tokenizer);
        let mut pieces: BTreeMap<_, Vec<Piece>> = BTreeMap::new();
        let mut ended = BTreeMap::new();
        let mut ids = Vec::new();
        let mut on_event = |id: RequestId, event: BatchEvent| {
            match event {
                BatchEvent::Piece(piece) => pieces.entry(id).or_default().push(piece),
                BatchEvent::Ended(generation) => drop(ended.insert(id, *generation)),
                BatchEvent::Failed(error) => panic!("{error}"),
                _ => {}
            }
            ControlFlow::Continue(())
        };
        for (request, (_, pause)) in requests.iter().zip(&prompts) {
            ids.push(batch.submit(request.clone(), Control::new()).unwrap());
            for _ in 0..*pause {
                batch.step(&mut on_event);
            }
        }
        while batch.step(&mut on_event) {}
        for (id, (generation, wanted_pieces)) in ids.iter().zip(&wanted) {
            prop_assert_eq!(&ended[id].tokens, &generation.tokens);
            // Log probabilities are compared as they are: every bit counts.
            prop_assert_eq!(&pieces[id], wanted_pieces);
        }

        let mut guessing = StepperLoop::new(open(&model, numerics, threads, 1));
        for (request, (generation, wanted_pieces)) in requests.iter().zip(&wanted) {
            let speculation = Some(Speculation::PromptLookup { max_draft, adaptive: false });
            let (found, pieces) = alone(&mut guessing, &GenerationRequest { speculation, ..request.clone() }, &tokenizer);
            prop_assert_eq!(&found.tokens, &generation.tokens);
            prop_assert_eq!(&pieces, wanted_pieces);
        }
    }
}
