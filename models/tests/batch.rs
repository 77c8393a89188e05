//! Several requests at once, against the same requests alone.

mod fake;

use fake::{FakeStepper, FakeTokenizer, Rule, VOCAB, begun_and_ended};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, TokenId};
use npuhal_models::batch::{Batch, BatchEvent, BatchOptions, RequestId};
use npuhal_models::generate::{GenerateError, Generation, StepperLoop};
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::{Echo, GenerationRequest, Piece, RequestError};
use npuhal_models::speculate::Speculation;
use npuhal_models::stats::FinishReason;
use npuhal_models::stop::StopStrings;
use npuhal_models::thinking::Thinking;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// What became of each request.
#[derive(Default)]
struct Outcomes {
    pieces: BTreeMap<RequestId, Vec<Piece>>,
    ended: BTreeMap<RequestId, Generation>,
    failed: BTreeMap<RequestId, GenerateError>,
    order: Vec<RequestId>,
}

impl Outcomes {
    fn note(&mut self, id: RequestId, event: BatchEvent) {
        assert!(!self.order.contains(&id), "nothing comes behind the end");
        match event {
            BatchEvent::Prefill { done, total } => assert!(done <= total),
            BatchEvent::Piece(piece) => self.pieces.entry(id).or_default().push(piece),
            BatchEvent::Ended(generation) => {
                self.ended.insert(id, *generation);
                self.order.push(id);
            }
            BatchEvent::Failed(error) => {
                self.failed.insert(id, error);
                self.order.push(id);
            }
            other => panic!("{other:?}"),
        }
    }

    fn step(&mut self, batch: &mut Batch<'_>) -> bool {
        batch.step(&mut |id, event| {
            self.note(id, event);
            ControlFlow::Continue(())
        })
    }

    fn run(&mut self, batch: &mut Batch<'_>) {
        while self.step(batch) {}
    }
}

fn stepper(sequences: u32) -> FakeStepper {
    FakeStepper { rule: Rule::Prefix, sequences, ..FakeStepper::default() }
}

fn alone(request: &GenerationRequest, tokenizer: &FakeTokenizer) -> (Generation, Vec<Piece>) {
    let mut pieces = Vec::new();
    let mut receiver = |piece: &Piece| {
        pieces.push(piece.clone());
        ControlFlow::Continue(())
    };
    let mut steps = StepperLoop::new(Box::new(stepper(1)));
    let generation = steps.generate(request, tokenizer, &mut receiver, &Control::new()).unwrap();
    (generation, pieces)
}

fn request(prompt: Vec<TokenId>, max_tokens: usize) -> GenerationRequest {
    GenerationRequest { ignore_eos: true, ..GenerationRequest::greedy(prompt, max_tokens) }
}

/// Tokens in order, so that a failure of one request is not a failure of all.
fn same(found: &Generation, wanted: &Generation) {
    assert_eq!((&found.tokens, &found.text, &found.reasoning), (&wanted.tokens, &wanted.text, &wanted.reasoning));
    assert_eq!(found.stats.finish_reason, wanted.stats.finish_reason);
    assert_eq!(found.stats.stop_sequence, wanted.stats.stop_sequence);
    assert_eq!(found.stats.sampling, wanted.stats.sampling);
}

#[test]
fn sequences_that_decode_share_a_step_and_prompts_come_in_parts() {
    let tokenizer = FakeTokenizer::default();
    let stepper = stepper(4);
    let log = Arc::clone(&stepper.log);
    let options = BatchOptions { prefill_rows: 8, interleaved_rows: 3 };
    let mut batch = Batch::new(Box::new(stepper), &tokenizer).with_options(options);
    let mut outcomes = Outcomes::default();
    let short = batch.submit(request(vec![1, 2], 12), Control::new()).unwrap();
    assert!(outcomes.step(&mut batch));
    let long = batch.submit(request(vec![3; 9], 2), Control::new()).unwrap();
    for _ in 0..3 {
        log.lock().unwrap().rows.clear();
        assert!(outcomes.step(&mut batch));
        let log = log.lock().unwrap();
        let of = |sequence: u32| log.rows.iter().filter(|(row, _)| row.sequence.0 == sequence).count();
        assert_eq!((of(0), of(1)), (1, 3), "one token goes on beside three rows of the prompt");
    }
    assert_eq!(outcomes.pieces[&short].len(), 4);
    outcomes.run(&mut batch);
    assert!(batch.is_idle() && outcomes.failed.is_empty());
    assert_eq!(outcomes.order, [long, short]);
    same(&outcomes.ended[&long], &alone(&request(vec![3; 9], 2), &tokenizer).0);
    same(&outcomes.ended[&short], &alone(&request(vec![1, 2], 12), &tokenizer).0);
    let log = log.lock().unwrap();
    assert_eq!((log.begun, log.ended), (1, 1));
}

#[test]
fn requests_beyond_the_sequences_wait_their_turn() {
    let tokenizer = FakeTokenizer::default();
    let mut batch = Batch::new(Box::new(stepper(2)), &tokenizer);
    let mut outcomes = Outcomes::default();
    let ids: Vec<RequestId> =
        (0..5).map(|index| batch.submit(request(vec![index, 1], 4), Control::new()).unwrap()).collect();
    assert_eq!((batch.sequences(), batch.positions(), batch.waiting(), batch.active()), (2, 64, 5, 0));
    outcomes.step(&mut batch);
    assert_eq!((batch.waiting(), batch.active()), (3, 2));
    outcomes.run(&mut batch);
    assert_eq!(outcomes.order, ids, "the first to come are the first to end");
}

#[test]
fn a_request_takes_the_sequence_that_holds_its_prompt() {
    let tokenizer = FakeTokenizer::default();
    let mut batch = Batch::new(Box::new(stepper(3)), &tokenizer);
    let mut outcomes = Outcomes::default();
    for prompt in [vec![1, 1, 1, 1], vec![2, 2, 2, 2], vec![3, 3, 3, 3]] {
        batch.submit(request(prompt, 2), Control::new()).unwrap();
    }
    outcomes.run(&mut batch);
    let again = batch.submit(request(vec![2, 2, 2, 2, 0], 2), Control::new()).unwrap();
    let other = batch.submit(request(vec![4, 4], 2), Control::new()).unwrap();
    outcomes.run(&mut batch);
    assert_eq!(outcomes.ended[&again].stats.cached_prompt_tokens, 4);
    assert_eq!(outcomes.ended[&other].stats.cached_prompt_tokens, 0);
    same(&outcomes.ended[&again], &alone(&request(vec![2, 2, 2, 2, 0], 2), &tokenizer).0);
}

/// Two conversations with one system prompt took the same of four sequences by turns, and each was computed anew.
#[test]
fn alternating_conversations_keep_their_caches() {
    let tokenizer = FakeTokenizer::default();
    let mut batch = Batch::new(Box::new(stepper(4)), &tokenizer);
    let mut outcomes = Outcomes::default();
    let mut cached = |prompt: &[TokenId]| {
        let id = batch.submit(request(prompt.to_vec(), 2), Control::new()).unwrap();
        outcomes.run(&mut batch);
        outcomes.ended[&id].stats.cached_prompt_tokens
    };
    let (a, b) = ([1, 1, 2, 2, 2, 2, 2, 2], [1, 1, 3, 3, 3, 3, 3, 3]);
    assert_eq!([&a, &a, &b, &a, &b].map(|prompt| cached(prompt)), [0, 7, 0, 7, 7]);
    // A new conversation, nearly all of it system prompt, beside a long one.
    let (long, new) = ([[1; 3].as_slice(), &[4; 20]].concat(), [1, 1, 1, 5]);
    assert_eq!([&long[..], &new, &long].map(&mut cached), [0, 0, 22]);
    // What is saved is more than what is lost.
    assert_eq!([[7, 2, 3, 4, 5, 6], [7, 2, 3, 4, 8, 8]].map(|prompt| cached(&prompt)), [0, 4]);
}

/// The cache was asked what it holds before the stepper began, and every second request failed: "a sequence that holds 0".
#[test]
fn a_stepper_that_forgets_when_it_begins_serves_one_prompt_twice() {
    let tokenizer = FakeTokenizer::default();
    let stepper = FakeStepper { forgets_at_begin: true, ..stepper(1) };
    let mut batch = Batch::new(Box::new(stepper), &tokenizer);
    let mut outcomes = Outcomes::default();
    for _ in 0..3 {
        let id = batch.submit(request(vec![1, 2, 3], 2), Control::new()).unwrap();
        outcomes.run(&mut batch);
        assert_eq!(outcomes.ended[&id].stats.cached_prompt_tokens, 0);
    }
}

#[test]
fn a_failure_ends_the_request_it_belongs_to() {
    let tokenizer = FakeTokenizer::default();
    let stepper = stepper(4);
    let log = Arc::clone(&stepper.log);
    log.lock().unwrap().fail_on = Some(8);
    let mut batch = Batch::new(Box::new(stepper), &tokenizer);
    let mut outcomes = Outcomes::default();
    // A prompt that cannot be computed, between two that can; no answer may hold the token either.
    let sound = |prompt| GenerationRequest {
        sampling: SamplingParams { logit_bias: [(8, -100.0)].into(), ..SamplingParams::default() },
        ..request(prompt, 5)
    };
    let first = batch.submit(sound(vec![1, 2, 3]), Control::new()).unwrap();
    let broken = batch.submit(sound(vec![4, 8, 4]), Control::new()).unwrap();
    let third = batch.submit(sound(vec![5]), Control::new()).unwrap();
    outcomes.run(&mut batch);
    let error = &outcomes.failed[&broken];
    assert!(matches!(error, GenerateError::Run(RunError::Failed { .. })), "{error}");
    same(&outcomes.ended[&first], &alone(&sound(vec![1, 2, 3]), &tokenizer).0);
    same(&outcomes.ended[&third], &alone(&sound(vec![5]), &tokenizer).0);
    // The sequence is of use again.
    let later: Vec<RequestId> =
        (0..4).map(|index| batch.submit(sound(vec![4, index]), Control::new()).unwrap()).collect();
    outcomes.run(&mut batch);
    for (index, id) in later.iter().enumerate() {
        same(&outcomes.ended[id], &alone(&sound(vec![4, index as u32]), &tokenizer).0);
    }
    let (begun, ended) = begun_and_ended(&log);
    assert_eq!(begun, ended);
}

#[test]
fn logits_that_are_not_finite_end_one_request() {
    let tokenizer = FakeTokenizer::default();
    let stepper = FakeStepper { rule: Rule::NanAt(4), sequences: 2, ..FakeStepper::default() };
    let mut batch = Batch::new(Box::new(stepper), &tokenizer);
    let mut outcomes = Outcomes::default();
    let bad = batch.submit(request(vec![2], 9), Control::new()).unwrap();
    let good = batch.submit(request(vec![6], 3), Control::new()).unwrap();
    outcomes.run(&mut batch);
    assert!(matches!(outcomes.failed[&bad], GenerateError::Run(RunError::NotFinite { .. })));
    assert_eq!(outcomes.ended[&good].tokens, [7, 8, 9]);
}

#[test]
fn a_device_that_is_not_ready_fails_every_request_with_the_reason() {
    let tokenizer = FakeTokenizer::default();
    let stepper = stepper(2);
    let log = Arc::clone(&stepper.log);
    log.lock().unwrap().fail_begin = true;
    let mut batch = Batch::new(Box::new(stepper), &tokenizer);
    let mut outcomes = Outcomes::default();
    for index in 0..3 {
        batch.submit(request(vec![index], 3), Control::new()).unwrap();
    }
    outcomes.run(&mut batch);
    assert_eq!(outcomes.failed.len(), 3);
    log.lock().unwrap().fail_begin = false;
    let id = batch.submit(request(vec![1], 3), Control::new()).unwrap();
    outcomes.run(&mut batch);
    assert_eq!(outcomes.ended[&id].tokens.len(), 3);
    assert_eq!(begun_and_ended(&log), (1, 1));
}

#[test]
fn cancellation_deadline_and_receiver_end_one_request() {
    let tokenizer = FakeTokenizer::default();
    let mut batch = Batch::new(Box::new(stepper(4)), &tokenizer);
    let mut outcomes = Outcomes::default();
    let hold = Control::new();
    let cancelled = batch.submit(request(vec![1, 2], 20), hold.clone()).unwrap();
    let broken = batch.submit(request(vec![2, 3], 20), Control::new()).unwrap();
    let late = batch.submit(request(vec![3, 4], 20), Control::until(Instant::now())).unwrap();
    let whole = batch.submit(request(vec![4, 5], 20), Control::new()).unwrap();
    let waits = Control::new();
    let waiting = batch.submit(request(vec![4, 5], 20), waits.clone()).unwrap();
    let never = batch.submit(request(vec![4, 5], 20), waits.clone()).unwrap();
    let mut steps = 0;
    while batch.step(&mut |id, event| {
        let stops = id == broken && matches!(&event, BatchEvent::Piece(_));
        outcomes.note(id, event);
        if stops && outcomes.pieces[&id].len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }) {
        steps += 1;
        match steps {
            2 => waits.cancel(),
            5 => hold.cancel(),
            _ => {}
        }
    }
    let is = |id: &RequestId, wanted: &str| assert_eq!(outcomes.failed[id].to_string(), wanted);
    is(&cancelled, "cancelled");
    is(&late, "the request's deadline passed");
    is(&waiting, "cancelled");
    is(&never, "cancelled");
    assert_eq!(outcomes.pieces[&cancelled].len(), 5);
    let stopped = &outcomes.ended[&broken];
    assert_eq!((stopped.tokens.len(), stopped.stats.finish_reason), (3, FinishReason::Receiver));
    same(&outcomes.ended[&whole], &alone(&request(vec![4, 5], 20), &tokenizer).0);
    // All of them cancelled at once.
    let all = Control::new();
    for index in 0..6 {
        batch.submit(request(vec![index], 9), all.clone()).unwrap();
    }
    outcomes.step(&mut batch);
    all.cancel();
    outcomes.run(&mut batch);
    assert_eq!(outcomes.failed.len(), 10);
    let error = batch.submit(request(vec![VOCAB as u32], 1), Control::new()).unwrap_err();
    assert!(matches!(error, RequestError::UnknownToken { .. }));
}

#[test]
fn closing_cancels_what_is_left() {
    let tokenizer = FakeTokenizer::default();
    let stepper = stepper(1);
    let log = Arc::clone(&stepper.log);
    let mut batch = Batch::new(Box::new(stepper), &tokenizer);
    let mut outcomes = Outcomes::default();
    for index in 0..2 {
        batch.submit(request(vec![index], 9), Control::new()).unwrap();
    }
    outcomes.step(&mut batch);
    batch.close(&mut |id, event| {
        outcomes.note(id, event);
        ControlFlow::Continue(())
    });
    assert_eq!(outcomes.failed.len(), 2);
    assert_eq!(begun_and_ended(&log), (1, 1));
}

/// One request of many kinds.
fn any_request() -> impl Strategy<Value = GenerationRequest> {
    let prompt = prop::collection::vec(0u32..5, 1..20);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (prompt, 1usize..14, 0u64..50, prop::sample::select(vec![0.0, 0.8]), flags, prop::option::of(1usize..4)).prop_map(
        |(prompt, max_tokens, seed, temperature, (echo, scored, stop, guesses), budget)| GenerationRequest {
            sampling: SamplingParams {
                temperature,
                seed: (temperature > 0.0).then_some(seed),
                frequency_penalty: 0.1,
                ..SamplingParams::default()
            },
            logprobs: scored.then_some(1),
            echo: echo.then(|| Echo { text: "prompt".to_owned(), is_scored: scored }),
            stop: if stop { StopStrings::new(["<5><", "<1><1>"]).unwrap() } else { StopStrings::default() },
            speculation: guesses.then(Speculation::default),
            thinking: budget.map(|budget| Thinking { opened: true, budget: Some(budget), closing: vec![6] }),
            ..GenerationRequest::greedy(prompt, max_tokens)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever runs beside it, whenever it joins and however the prompts are cut, a request gives what it gives alone.
    #[test]
    fn every_stream_is_that_of_the_request_alone(
        requests in prop::collection::vec((any_request(), 0usize..6), 1..10),
        sequences in 1u32..5,
        prefill_rows in 1usize..20,
        interleaved_rows in 1usize..8,
        cancelled in prop::option::of((0usize..10, 1usize..12)),
    ) {
        let tokenizer = FakeTokenizer { bytes: [(6, b"</think>".to_vec())].into(), ..FakeTokenizer::default() };
        let options = BatchOptions { prefill_rows, interleaved_rows };
        let mut batch = Batch::new(Box::new(stepper(sequences)), &tokenizer).with_options(options);
        let mut outcomes = Outcomes::default();
        let mut ids = Vec::new();
        let mut steps = 0;
        let mut step = |batch: &mut Batch<'_>, outcomes: &mut Outcomes, controls: &[Control]| {
            steps += 1;
            if let Some((index, at)) = cancelled && at == steps && let Some(control) = controls.get(index) {
                control.cancel();
            }
            outcomes.step(batch)
        };
        let mut controls = Vec::new();
        for (request, pause) in &requests {
            controls.push(Control::new());
            ids.push(batch.submit(request.clone(), controls[controls.len() - 1].clone()).unwrap());
            for _ in 0..*pause {
                step(&mut batch, &mut outcomes, &controls);
            }
        }
        while step(&mut batch, &mut outcomes, &controls) {}
        prop_assert_eq!(outcomes.order.len(), requests.len());
        for (id, (request, _)) in ids.iter().zip(&requests) {
            let (wanted, pieces) = alone(request, &tokenizer);
            let found = outcomes.pieces.get(id).map_or(&[][..], Vec::as_slice);
            match outcomes.ended.get(id) {
                Some(generation) => {
                    same(generation, &wanted);
                    prop_assert_eq!(found, &pieces[..]);
                }
                None => prop_assert!(pieces.starts_with(found), "what came out before the end is right"),
            }
        }
    }
}
