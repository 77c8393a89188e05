//! The generation loop on a stepper that computes nothing: published decode-loop cases, prefix reuse, failures, limits.

use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, Generator, GeneratorOutcome, GeneratorRequest, HiddenRows, Placement, Row, SegmentCapacity, SequenceId,
    Session, Stepper, TokenId, Want,
};
use npuhal_models::generate::{GenerateError, Generation, Receiver, StepperLoop, TextGenerator};
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::{
    GenerationRequest, Piece, RequestError, Sequence, SequenceLimits, TextStream, TokenText,
};
use npuhal_models::stats::FinishReason;
use npuhal_models::stop::StopStrings;
use npuhal_models::thinking::{Thinking, Thoughts};
use proptest::prelude::*;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const VOCAB: usize = 10;
const EOS: TokenId = 9;

#[test]
fn published_cases() {
    let golden = golden();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let tokenizer = FakeTokenizer::from_case(case);
        let stepper = FakeStepper { rule: Rule::from_case(case), ..FakeStepper::default() };
        let log = Arc::clone(&stepper.log);
        let mut steps = StepperLoop::new(Box::new(stepper));
        let (generation, pieces) = collect(&mut steps, &request_of(case), &tokenizer).unwrap();
        let computed: Vec<bool> = log.lock().unwrap().rows.iter().map(|(_, wanted)| *wanted).collect();
        for (key, wanted) in case.as_object().unwrap() {
            let found = match key.as_str() {
                "tokens" => Value::from(generation.tokens.clone()),
                "text" => Value::from(generation.text.clone()),
                "finish" => Value::from(generation.stats.finish_reason.word()),
                "stop_sequence" => Value::from(generation.stats.stop_sequence.clone()),
                "steps" => Value::from(computed.len()),
                "decode_steps" => Value::from(generation.stats.decode_steps),
                "logits_computed" | "select_called" => Value::from(computed.clone()),
                "pieces" => pieces.iter().map(|piece| Value::from(piece.text.clone())).collect(),
                "entries_per_piece" => pieces.iter().map(|piece| Value::from(piece.logprobs.len())).collect(),
                "logprob_tokens" => pieces
                    .iter()
                    .flat_map(|piece| &piece.logprobs)
                    .map(|entry| Value::from(entry.chosen.token.clone()))
                    .collect(),
                _ => continue,
            };
            assert_eq!(&found, wanted, "{name}: {key}");
        }
        let listed: Vec<&_> = pieces.iter().flat_map(|piece| &piece.logprobs).collect();
        assert!(listed.iter().all(|entry| Some(entry.top.len() as u64) == case["logprobs"].as_u64()), "{name}");
        assert!(listed.iter().all(|entry| entry.chosen.id != EOS), "{name}");
    }
}

#[test]
fn published_prefix_reuse() {
    let golden = golden();
    let stepper = FakeStepper::default();
    let log = Arc::clone(&stepper.log);
    let mut steps = StepperLoop::new(Box::new(stepper));
    for case in golden["prefix_cache"].as_array().unwrap() {
        log.lock().unwrap().rows.clear();
        let (generation, _) = collect(&mut steps, &request_of(case), &FakeTokenizer::default()).unwrap();
        assert_eq!(Value::from(generation.stats.cached_prompt_tokens), case["cached"], "{case}");
        if !case["first_call"].is_null() {
            let first = log.lock().unwrap().rows[0].0;
            assert_eq!(Value::from(vec![first.token, first.position]), case["first_call"], "{case}");
        }
        if !case["tokens"].is_null() {
            assert_eq!(Value::from(generation.tokens), case["tokens"], "{case}");
        }
        if !case["cache_after"].is_null() {
            assert_eq!(Value::from(steps.cache().tokens()), case["cache_after"], "{case}");
        }
    }

    let stepper = FakeStepper::default();
    let log = Arc::clone(&stepper.log);
    let mut steps = StepperLoop::new(Box::new(stepper));
    collect(&mut steps, &GenerationRequest::greedy(vec![1, 2, 3], 4), &FakeTokenizer::default()).unwrap();
    log.lock().unwrap().fail_at = Some(1);
    let error = collect(&mut steps, &GenerationRequest::greedy(vec![1, 9, 9, 9], 4), &FakeTokenizer::default());
    assert!(matches!(error, Err(GenerateError::Run(RunError::Failed { .. }))));
    assert_eq!(Value::from(steps.cache().tokens()), golden["prefix_cache_failure"]["cache_after"]);
}

#[test]
fn every_failure_leaves_a_session_that_works() {
    let request = GenerationRequest::greedy(vec![1, 2, 3, 4, 5], 5);
    let wanted = fresh(&request);
    for chunk_rows in [1, 2, 16] {
        for fail_at in 0..8 {
            let stepper = FakeStepper::default();
            let log = Arc::clone(&stepper.log);
            let mut steps = StepperLoop::new(Box::new(stepper)).with_chunk_rows(chunk_rows);
            log.lock().unwrap().fail_at = Some(fail_at);
            collect(&mut steps, &request, &FakeTokenizer::default()).unwrap_err();
            let held = steps.cache().tokens().len();
            assert!(held <= fail_at as usize, "{held} positions are held after a failure at {fail_at}");
            {
                let mut log = log.lock().unwrap();
                assert_eq!((log.begun, log.ended), (1, 1));
                assert_eq!(log.held.len(), held);
                log.fail_at = None;
            }
            let (again, _) = collect(&mut steps, &request, &FakeTokenizer::default()).unwrap();
            assert_eq!((again.tokens, again.text), wanted);
            assert_eq!(again.stats.cached_prompt_tokens, held.min(4));
        }
    }
}

#[test]
fn logits_that_are_not_finite_end_the_generation_and_are_not_cached() {
    let stepper = FakeStepper { rule: Rule::NanAt(5), ..FakeStepper::default() };
    let mut steps = StepperLoop::new(Box::new(stepper));
    let error = collect(&mut steps, &GenerationRequest::greedy(vec![1, 2, 3], 8), &FakeTokenizer::default());
    assert!(matches!(error, Err(GenerateError::Run(RunError::NotFinite { .. }))));
    assert_eq!(steps.cache().tokens(), [1, 2, 3, 4, 5]);
}

/// Embeddings are padded to round sizes, so models have rows of logits for ids that stand for nothing.
#[test]
fn padding_ids_are_never_chosen_nor_listed() {
    let padded = Rule::Fixed((0..VOCAB).map(|id| id as f32).collect());
    let tokenizer = FakeTokenizer { usable: Some(4), ..FakeTokenizer::default() };
    let hot = SamplingParams { temperature: 2.0, seed: Some(3), ..SamplingParams::default() };
    for sampling in [SamplingParams::default(), hot] {
        let mut steps = StepperLoop::new(Box::new(FakeStepper { rule: padded.clone(), ..FakeStepper::default() }));
        let request = GenerationRequest { sampling, logprobs: Some(4), ..GenerationRequest::greedy(vec![1], 12) };
        let (generation, pieces) = collect(&mut steps, &request, &tokenizer).unwrap();
        assert_eq!(generation.tokens.len(), 12);
        assert!(generation.tokens.iter().all(|&id| id < 4), "{:?}", generation.tokens);
        let listed = pieces.iter().flat_map(|piece| &piece.logprobs).flat_map(|entry| &entry.top);
        assert!(listed.map(|alternative| alternative.id).all(|id| id < 4));
    }
}

#[test]
fn a_failing_begin_is_not_ended() {
    let stepper = FakeStepper::default();
    let log = Arc::clone(&stepper.log);
    log.lock().unwrap().fail_begin = true;
    let mut steps = StepperLoop::new(Box::new(stepper));
    collect(&mut steps, &GenerationRequest::greedy(vec![1], 1), &FakeTokenizer::default()).unwrap_err();
    assert_eq!(begun_and_ended(&log), (0, 0));
}

#[test]
fn cancellation_is_seen_between_steps() {
    let stepper = FakeStepper::default();
    let log = Arc::clone(&stepper.log);
    let mut steps = StepperLoop::new(Box::new(stepper));
    let control = Control::new();
    let hold = control.clone();
    let mut pieces = 0;
    let mut receiver = |_: &Piece| {
        pieces += 1;
        if pieces == 2 {
            hold.cancel();
        }
        ControlFlow::Continue(())
    };
    let request = GenerationRequest::greedy(vec![1], 8);
    let error = steps.generate(&request, &FakeTokenizer::default(), &mut receiver, &control);
    assert!(matches!(error, Err(GenerateError::Run(RunError::Cancelled))));
    assert_eq!(pieces, 2);
    assert_eq!(steps.cache().tokens(), [1, 2], "what was computed stays usable");
    assert_eq!(begun_and_ended(&log), (1, 1));

    struct CancelInPrefill(Control, Vec<(usize, usize)>);
    impl Receiver for CancelInPrefill {
        fn on_prefill(&mut self, done: usize, total: usize) {
            self.1.push((done, total));
            if done == 4 {
                self.0.cancel();
            }
        }
        fn on_piece(&mut self, _: &Piece) -> ControlFlow<()> {
            panic!("no piece can come out of half a prompt")
        }
    }
    let mut steps = StepperLoop::new(Box::new(FakeStepper::default())).with_chunk_rows(2);
    let control = Control::new();
    let mut receiver = CancelInPrefill(control.clone(), Vec::new());
    let request = GenerationRequest::greedy(vec![1, 2, 3, 4, 5, 6, 7], 1);
    let error = steps.generate(&request, &FakeTokenizer::default(), &mut receiver, &control);
    assert!(matches!(error, Err(GenerateError::Run(RunError::Cancelled))));
    assert_eq!(receiver.1, [(2, 7), (4, 7)]);

    let control = Control::until(Instant::now());
    let stepper = FakeStepper::default();
    let log = Arc::clone(&stepper.log);
    let error = StepperLoop::new(Box::new(stepper)).generate(
        &request,
        &FakeTokenizer::default(),
        &mut |_: &Piece| ControlFlow::Continue(()),
        &control,
    );
    assert!(matches!(error, Err(GenerateError::Run(RunError::DeadlinePassed))));
    assert_eq!(log.lock().unwrap().begun, 0);
}

#[test]
fn the_receiver_can_stop_it() {
    let mut steps = StepperLoop::new(Box::new(FakeStepper::default()));
    let mut receiver =
        |piece: &Piece| if piece.text == "<3>" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let request = GenerationRequest::greedy(vec![1], 8);
    let generation = steps.generate(&request, &FakeTokenizer::default(), &mut receiver, &Control::new()).unwrap();
    assert_eq!((generation.text.as_str(), generation.stats.finish_reason), ("<2><3>", FinishReason::Receiver));
}

#[test]
fn requests_that_cannot_run_do_no_work() {
    let stepper = FakeStepper { positions: 4, ..FakeStepper::default() };
    let log = Arc::clone(&stepper.log);
    let mut steps = StepperLoop::new(Box::new(stepper));
    let good = GenerationRequest::greedy(vec![1, 2], 2);
    let hot = SamplingParams { temperature: 3.0, ..SamplingParams::default() };
    for (request, wanted) in [
        (GenerationRequest { prompt: vec![], ..good.clone() }, RequestError::EmptyPrompt),
        (
            GenerationRequest { prompt: vec![1; 5], ..good.clone() },
            RequestError::PromptTooLong { prompt_tokens: 5, positions: 4 },
        ),
        (
            GenerationRequest { prompt: vec![1, 10], ..good.clone() },
            RequestError::UnknownToken { token: 10, position: 1, vocab_size: VOCAB },
        ),
        (GenerationRequest { max_tokens: 0, ..good.clone() }, RequestError::NoTokens),
        (GenerationRequest { logprobs: Some(21), ..good.clone() }, RequestError::TopLogprobs { found: 21, limit: 20 }),
        (
            GenerationRequest { sampling: hot.clone(), ..good.clone() },
            RequestError::Sampling(hot.validate().unwrap_err()),
        ),
    ] {
        match collect(&mut steps, &request, &FakeTokenizer::default()) {
            Err(GenerateError::Request(error)) => assert_eq!(error, wanted),
            other => panic!("wanted {wanted}, found {other:?}"),
        }
    }
    assert_eq!(log.lock().unwrap().begun, 0);
}

#[test]
fn a_full_context_ends_the_text() {
    for (prompt, generated) in [(vec![1, 2, 3, 4], vec![5]), (vec![1, 2], vec![3, 4, 5])] {
        let mut steps = StepperLoop::new(Box::new(FakeStepper { positions: 4, ..FakeStepper::default() }));
        let (generation, _) =
            collect(&mut steps, &GenerationRequest::greedy(prompt, 8), &FakeTokenizer::default()).unwrap();
        assert_eq!(generation.tokens, generated);
        assert_eq!(generation.stats.finish_reason, FinishReason::ContextFull);
        assert_eq!(generation.stats.finish_reason.word(), "length");
    }
}

#[test]
fn eos_can_be_ignored_and_control_tokens_have_no_text() {
    let tokenizer = FakeTokenizer { control: vec![3], ..FakeTokenizer::default() };
    let mut steps = StepperLoop::new(Box::new(FakeStepper::default()));
    let request = GenerationRequest { ignore_eos: true, logprobs: Some(0), ..GenerationRequest::greedy(vec![1], 10) };
    let (generation, pieces) = collect(&mut steps, &request, &tokenizer).unwrap();
    assert_eq!(generation.tokens, [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
    assert_eq!(generation.text, "<2><4><5><6><7><8><9><0><1>");
    assert_eq!(pieces.iter().map(|piece| piece.logprobs.len()).sum::<usize>(), 10);
    assert_eq!(pieces.iter().flat_map(|piece| piece.tokens.clone()).collect::<Vec<_>>(), generation.tokens);
}

#[test]
fn a_stop_string_completed_by_the_flush_counts() {
    // Token 7 is half a character; the flush gives U+FFFD, which is a stop string here.
    let tokenizer = FakeTokenizer { bytes: BTreeMap::from([(7, vec![0xC3])]), ..FakeTokenizer::default() };
    let request =
        GenerationRequest { stop: StopStrings::new(["\u{FFFD}"]).unwrap(), ..GenerationRequest::greedy(vec![5], 2) };
    let (generation, _) =
        collect(&mut StepperLoop::new(Box::new(FakeStepper::default())), &request, &tokenizer).unwrap();
    assert_eq!((generation.text.as_str(), generation.tokens.as_slice()), ("<6>", &[6, 7][..]));
    assert_eq!(generation.stats.finish_reason, FinishReason::StopString);
    assert_eq!(generation.stats.stop_sequence.as_deref(), Some("\u{FFFD}"));
}

#[test]
fn a_stepper_that_forgets_more_than_asked_is_fed_again() {
    let stepper = FakeStepper { keeps_nothing: true, ..FakeStepper::default() };
    let mut steps = StepperLoop::new(Box::new(stepper));
    let request = GenerationRequest::greedy(vec![1, 2, 3], 3);
    let first = collect(&mut steps, &request, &FakeTokenizer::default()).unwrap().0;
    let second = collect(&mut steps, &request, &FakeTokenizer::default()).unwrap().0;
    assert_eq!(second.stats.cached_prompt_tokens, 0);
    assert_eq!(first.tokens, second.tokens);
}

#[test]
fn two_sequences_can_share_a_step() {
    let tokenizer = FakeTokenizer::default();
    let mut stepper = FakeStepper::default();
    let limits = SequenceLimits { positions: 64, vocab_size: VOCAB };
    let requests = [GenerationRequest::greedy(vec![1, 2, 3], 3), GenerationRequest::greedy(vec![5], 4)];
    let mut sequences: Vec<Sequence<'_>> = requests
        .iter()
        .enumerate()
        .map(|(id, request)| Sequence::new(SequenceId(id as u32), request, &tokenizer, limits).unwrap())
        .collect();
    let mut logits = HiddenRows::new();
    while sequences.iter().any(|sequence| sequence.finish_reason().is_none()) {
        let (mut rows, mut flags, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in &sequences {
            let before = rows.len();
            let wanted = sequence.push_rows(2, &mut rows);
            flags.resize(rows.len(), false);
            if wanted {
                *flags.last_mut().unwrap() = true;
            }
            shares.push((rows.len() - before, wanted));
        }
        let started = Instant::now();
        stepper.step(&rows, Want::Each(&flags), &mut logits, &Control::new()).unwrap();
        let mut next = 0;
        for (sequence, (rows, wanted)) in sequences.iter_mut().zip(shares) {
            if rows > 0 {
                sequence.step(rows, wanted.then(|| logits.row(next)), started).unwrap();
                next += usize::from(wanted);
            }
        }
    }
    for (sequence, request) in sequences.iter().zip(&requests) {
        assert_eq!(sequence.generated(), fresh(request).0);
    }
}

#[test]
fn a_route_that_samples_itself_gets_text_and_stop_strings() {
    struct Ramp;
    impl Generator for Ramp {
        fn max_context(&self) -> u32 {
            8
        }
        fn generate(
            &mut self,
            request: &GeneratorRequest<'_>,
            on_token: &mut dyn FnMut(TokenId) -> bool,
            control: &Control,
        ) -> Result<GeneratorOutcome, RunError> {
            assert!(request.prompt.len() + request.max_tokens as usize <= 8);
            let mut outcome = GeneratorOutcome { prefill_ms: 5.0, decode_ms: 2.0, reused: 1, ..Default::default() };
            let mut token = request.prompt[request.prompt.len() - 1];
            for _ in 0..request.max_tokens {
                control.check()?;
                token = (token + 1) % VOCAB as u32;
                outcome.tokens.push(token);
                outcome.stopped_at_eos = token == EOS;
                if outcome.stopped_at_eos || !on_token(token) {
                    break;
                }
            }
            Ok(outcome)
        }
    }
    let run = |request: GenerationRequest| {
        let mut generator = TextGenerator::new(Session::Generator(Box::new(Ramp)));
        let mut receiver = |_: &Piece| ControlFlow::Continue(());
        generator.generate(&request, &FakeTokenizer::default(), &mut receiver, &Control::new())
    };
    let eos = run(GenerationRequest::greedy(vec![6], 5)).unwrap();
    assert_eq!((eos.text.as_str(), eos.stats.finish_reason), ("<7><8>", FinishReason::EndOfText));
    assert_eq!((eos.stats.cached_prompt_tokens, eos.stats.ttft.as_millis(), eos.stats.decode_steps), (1, 5, 1));
    let length = run(GenerationRequest::greedy(vec![1], 2)).unwrap();
    assert_eq!((length.text.as_str(), length.stats.finish_reason), ("<2><3>", FinishReason::MaxTokens));
    let stop = StopStrings::new(["><3"]).unwrap();
    let stopped = run(GenerationRequest { stop, ..GenerationRequest::greedy(vec![1], 5) }).unwrap();
    assert_eq!((stopped.text.as_str(), stopped.stats.finish_reason), ("<2", FinishReason::StopString));
    let full = run(GenerationRequest::greedy(vec![0, 0, 0, 0, 0], 20)).unwrap();
    assert_eq!((full.tokens.len(), full.stats.finish_reason), (3, FinishReason::ContextFull));
    let long = run(GenerationRequest::greedy(vec![0; 8], 1));
    assert!(matches!(long, Err(GenerateError::Request(RequestError::PromptTooLong { .. }))));
    let hot = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let refused = run(GenerationRequest { sampling: hot, ..GenerationRequest::greedy(vec![1], 5) });
    assert!(matches!(refused, Err(GenerateError::Request(RequestError::NotOnThisRoute { .. }))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever was cached and however the prompt is cut into chunks, tokens, text and log probabilities are the same, bit
    /// for bit. The logits depend on the whole prefix.
    #[test]
    fn prefix_reuse_and_chunks_change_nothing(
        prompts in prop::collection::vec(prop::collection::vec(0u32..4, 1..12), 1..6),
        chunk_rows in 1usize..7,
        seed in 0u64..1000,
        fail in prop::option::of(0u32..16),
    ) {
        let stepper = FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() };
        let log = Arc::clone(&stepper.log);
        let mut steps = StepperLoop::new(Box::new(stepper)).with_chunk_rows(chunk_rows);
        for (index, prompt) in prompts.into_iter().enumerate() {
            let sampling = SamplingParams {
                temperature: 0.9, repetition_penalty: 1.1, seed: Some(seed), ..SamplingParams::default()
            };
            let request = GenerationRequest {
                sampling, logprobs: Some(2), stop: StopStrings::new(["<5><", "<1><1>"]).unwrap(),
                ..GenerationRequest::greedy(prompt, 6)
            };
            if index == 1 {
                log.lock().unwrap().fail_at = fail;
                let _ = collect(&mut steps, &request, &FakeTokenizer::default());
                log.lock().unwrap().fail_at = None;
            }
            let (found, pieces) = collect(&mut steps, &request, &FakeTokenizer::default()).unwrap();
            let fresh = FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() };
            let (wanted, fresh_pieces) =
                collect(&mut StepperLoop::new(Box::new(fresh)), &request, &FakeTokenizer::default()).unwrap();
            prop_assert_eq!(found.tokens, wanted.tokens);
            prop_assert_eq!(found.text, wanted.text);
            prop_assert_eq!(pieces, fresh_pieces);
            prop_assert_eq!(steps.cache().tokens(), &log.lock().unwrap().held[..]);
        }
    }
}

#[test]
fn thoughts_are_told_apart_and_bounded() {
    let tokenizer = FakeTokenizer {
        bytes: [(2, b"<think>".to_vec()), (6, b"</think>".to_vec())].into(),
        ..FakeTokenizer::default()
    };
    let answer = |thinking: &Thinking, prompt: &[TokenId], max_tokens| {
        let stepper = FakeStepper::default();
        let log = Arc::clone(&stepper.log);
        let mut generator = TextGenerator::new(Session::Stepper(Box::new(stepper)));
        let mut streamed = Thoughts::default();
        let mut receiver = |part: &Thoughts| {
            streamed.append(part.clone());
            ControlFlow::Continue(())
        };
        let request = GenerationRequest::greedy(prompt.to_vec(), max_tokens);
        let answer =
            generator.generate_with_thoughts(&request, &tokenizer, thinking, &mut receiver, &Control::new()).unwrap();
        assert_eq!(streamed, answer.thoughts);
        assert_eq!(Thoughts::split(&answer.generation.text, thinking.opened), answer.thoughts);
        let stats = &answer.generation.stats;
        assert_eq!((stats.prompt_tokens, stats.generated_tokens), (prompt.len(), answer.generation.tokens.len()));
        let computed = log.lock().unwrap().rows.len();
        (answer.thoughts.reasoning, answer.thoughts.answer, answer.generation.tokens, computed)
    };
    let text = |text: &str| text.to_owned();
    let free = Thinking::default();
    assert_eq!(answer(&free, &[1], 9), (text("<3><4><5>"), text("<7><8>"), vec![2, 3, 4, 5, 6, 7, 8], 8));
    assert_eq!(answer(&free, &[1], 3), (text("<3><4>"), text(""), vec![2, 3, 4], 3));
    // The block is closed after two tokens; the three before are not computed again.
    let bounded = Thinking { budget: Some(2), closing: vec![6], ..Thinking::default() };
    assert_eq!(answer(&bounded, &[1], 9), (text("<3>"), text("<7><8>"), vec![2, 3, 6, 7, 8], 6));
    assert_eq!(answer(&bounded, &[1], 4), (text("<3>"), text("<7>"), vec![2, 3, 6, 7], 4));
    assert_eq!(answer(&bounded, &[6], 9), (text(""), text("<7><8>"), vec![7, 8], 3));
    let opened = Thinking { opened: true, ..bounded };
    assert_eq!(answer(&opened, &[2], 9), (text("<3><4>"), text("<7><8>"), vec![3, 4, 6, 7, 8], 6));
    // Nothing to close with: the thoughts are all there is.
    let stuck = Thinking { budget: Some(2), ..Thinking::default() };
    assert_eq!(answer(&stuck, &[1], 9), (text("<3>"), text(""), vec![2, 3], 2));
}

fn begun_and_ended(log: &Mutex<Log>) -> (usize, usize) {
    let log = log.lock().unwrap();
    (log.begun, log.ended)
}

fn golden() -> Value {
    serde_json::from_str(include_str!("data/decode_loop_vectors.json")).unwrap()
}

fn request_of(case: &Value) -> GenerationRequest {
    let prompt = case["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as TokenId).collect();
    GenerationRequest {
        sampling: case["params"]
            .as_object()
            .map_or_else(SamplingParams::default, |params| SamplingParams::from_json(params).unwrap()),
        stop: StopStrings::from_json(&case["stop"]).unwrap(),
        logprobs: case["logprobs"].as_u64().map(|top| top as usize),
        ..GenerationRequest::greedy(prompt, case["max_new"].as_u64().unwrap() as usize)
    }
}

fn collect(
    steps: &mut StepperLoop,
    request: &GenerationRequest,
    tokenizer: &FakeTokenizer,
) -> Result<(Generation, Vec<Piece>), GenerateError> {
    let mut pieces = Vec::new();
    let mut receiver = |piece: &Piece| {
        pieces.push(piece.clone());
        ControlFlow::Continue(())
    };
    let generation = steps.generate(request, tokenizer, &mut receiver, &Control::new())?;
    let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(text, generation.text);
    Ok((generation, pieces))
}

fn fresh(request: &GenerationRequest) -> (Vec<TokenId>, String) {
    let mut steps = StepperLoop::new(Box::new(FakeStepper::default()));
    let (generation, _) = collect(&mut steps, request, &FakeTokenizer::default()).unwrap();
    (generation.tokens, generation.text)
}

/// Token `t` is `<t>` unless `bytes` says otherwise.
#[derive(Default)]
struct FakeTokenizer {
    bytes: BTreeMap<TokenId, Vec<u8>>,
    control: Vec<TokenId>,
    usable: Option<usize>,
}

impl FakeTokenizer {
    fn from_case(case: &Value) -> Self {
        let bytes = case["bytes"].as_object().into_iter().flatten();
        let list = |value: &Value| value.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
        Self { bytes: bytes.map(|(id, value)| (id.parse().unwrap(), list(value))).collect(), ..Self::default() }
    }
}

impl TokenText for FakeTokenizer {
    fn is_eos(&self, id: TokenId) -> bool {
        id == EOS
    }

    fn is_control(&self, id: TokenId) -> bool {
        self.control.contains(&id)
    }

    fn token_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        match self.bytes.get(&id) {
            Some(bytes) => Cow::Borrowed(bytes),
            None => Cow::Owned(format!("<{id}>").into_bytes()),
        }
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        Box::new(FakeStream { tokenizer: self, held: Vec::new() })
    }

    fn usable_ids(&self) -> usize {
        self.usable.unwrap_or(usize::MAX)
    }
}

struct FakeStream<'t> {
    tokenizer: &'t FakeTokenizer,
    held: Vec<u8>,
}

impl TextStream for FakeStream<'_> {
    fn push(&mut self, id: TokenId) -> String {
        if !self.tokenizer.is_control(id) {
            self.held.extend_from_slice(&self.tokenizer.token_bytes(id));
        }
        let valid = match std::str::from_utf8(&self.held) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        String::from_utf8(self.held.drain(..valid).collect()).unwrap()
    }

    fn flush(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// Which logits follow a row.
#[derive(Clone)]
enum Rule {
    /// 5.0 on the successor.
    Ramp,
    /// 5.0 on the entry for the token.
    Next(BTreeMap<TokenId, TokenId>),
    /// The same for all rows.
    Fixed(Vec<f32>),
    /// A hash of all ids up to the row.
    Prefix,
    /// A ramp, but not a number after this token.
    NanAt(TokenId),
}

impl Rule {
    fn from_case(case: &Value) -> Self {
        let id = |text: &String| text.parse::<TokenId>().unwrap();
        if let Some(next) = case["next"].as_object() {
            return Self::Next(next.iter().map(|(from, to)| (id(from), to.as_u64().unwrap() as TokenId)).collect());
        }
        let Some(fixed) = case["logits"].as_object() else { return Self::Ramp };
        let mut logits = vec![0.0; VOCAB];
        fixed.iter().for_each(|(token, logit)| logits[id(token) as usize] = logit.as_f64().unwrap() as f32);
        Self::Fixed(logits)
    }

    fn fill(&self, prefix: &[TokenId], logits: &mut [f32]) {
        let token = prefix[prefix.len() - 1];
        match self {
            Self::Ramp => logits[(token as usize + 1) % VOCAB] = 5.0,
            Self::Next(next) => logits[next[&token] as usize] = 5.0,
            Self::Fixed(fixed) => logits.copy_from_slice(fixed),
            Self::NanAt(at) if token == *at + 1 => logits[0] = f32::NAN,
            Self::NanAt(_) => logits[(token as usize + 1) % VOCAB] = 5.0,
            Self::Prefix => {
                let mut hash =
                    prefix.iter().fold(7u64, |hash, &id| (hash ^ u64::from(id)).wrapping_mul(0x100_0000_01B3));
                for logit in logits {
                    hash = hash.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *logit = (hash >> 40) as f32 / 4e6;
                }
            }
        }
    }
}

#[derive(Default)]
struct Log {
    rows: Vec<(Row, bool)>,
    held: Vec<TokenId>,
    begun: usize,
    ended: usize,
    fail_at: Option<u32>,
    fail_begin: bool,
}

/// Checks its rows as a real one does, and remembers them.
struct FakeStepper {
    rule: Rule,
    positions: u32,
    keeps_nothing: bool,
    log: Arc<Mutex<Log>>,
    others: BTreeMap<SequenceId, Vec<TokenId>>,
}

impl Default for FakeStepper {
    fn default() -> Self {
        Self { rule: Rule::Ramp, positions: 64, keeps_nothing: false, log: Arc::default(), others: BTreeMap::new() }
    }
}

impl Stepper for FakeStepper {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: self.positions, rows_per_call: u32::MAX, sequences: 2 }
    }

    fn placement(&self) -> Vec<Placement> {
        Vec::new()
    }

    fn begin(&mut self) -> Result<(), RunError> {
        let mut log = self.log.lock().unwrap();
        if log.fail_begin {
            return Err(RunError::Failed { run: None, state: "ERROR".to_owned(), detail: String::new() });
        }
        log.begun += 1;
        Ok(())
    }

    fn end(&mut self) {
        self.log.lock().unwrap().ended += 1;
    }

    fn step(&mut self, rows: &[Row], want: Want<'_>, logits: &mut HiddenRows, _: &Control) -> Result<(), RunError> {
        let mut log = self.log.lock().unwrap();
        assert!(!rows.is_empty());
        logits.reset(want.count(rows.len()), VOCAB);
        let mut next = 0;
        for (index, row) in rows.iter().enumerate() {
            let mut other = self.others.remove(&row.sequence).unwrap_or_default();
            let held = if row.sequence.0 == 0 { &mut log.held } else { &mut other };
            assert_eq!(row.position as usize, held.len(), "rows continue what is held");
            assert!(row.position < self.positions);
            held.push(row.token);
            let prefix = held.clone();
            self.others.insert(row.sequence, other);
            if log.fail_at == Some(row.position) {
                return Err(RunError::Failed { run: None, state: "ERROR".to_owned(), detail: String::new() });
            }
            let wanted = want.selects(index, rows.len());
            log.rows.push((*row, wanted));
            if wanted {
                self.rule.fill(&prefix, logits.row_mut(next));
                next += 1;
            }
        }
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        let mut log = self.log.lock().unwrap();
        let len = if self.keeps_nothing { 0 } else { len };
        log.held.truncate(len);
        log.held.len()
    }
}
