//! The generation loop on a stepper that computes nothing: published decode-loop cases, prefix reuse, failures, limits.

mod fake;

use fake::{EOS, FakeStepper, FakeTokenizer, Rule, VOCAB, begun_and_ended};
use npuhal_core::RunError;
use npuhal_core::stage::{
    Control, Generator, GeneratorOutcome, GeneratorRequest, HiddenRows, SequenceId, Session, Stepper, TokenId, Want,
};
use npuhal_models::generate::{ChoiceReceiver, GenerateError, Generation, Receiver, StepperLoop, TextGenerator};
use npuhal_models::sampling::{SamplingParams, choice_seed};
use npuhal_models::sequence::{Echo, GenerationRequest, Piece, RequestError, Sequence, SequenceLimits, TokenText};
use npuhal_models::speculate::Speculation;
use npuhal_models::stats::FinishReason;
use npuhal_models::stop::StopStrings;
use npuhal_models::thinking::{Thinking, Thoughts};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
                assert_eq!(log.held(0).len(), held);
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
        (
            GenerationRequest {
                sampling: SamplingParams { logit_bias: [(3, 1.0), (10, 1.0)].into(), ..SamplingParams::default() },
                ..good.clone()
            },
            RequestError::UnknownBias { token: 10, vocab_size: VOCAB },
        ),
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
        for sequence in &mut sequences {
            shares.push(sequence.push_rows(2, 0, &mut rows, &mut flags));
        }
        stepper.step(&rows, Want::Each(&flags), &mut logits, &Control::new()).unwrap();
        let mut next = 0;
        for (sequence, share) in sequences.iter_mut().zip(shares) {
            sequence.rows_computed(Duration::from_millis(1));
            for row in next..next + share.wanted {
                sequence.take_logits(logits.row(row)).unwrap();
            }
            sequence.end_step(false);
            next += share.wanted;
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
            let held = log.lock().unwrap().held(0).to_vec();
            prop_assert_eq!(steps.cache().tokens(), &held[..]);
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
        let mut receiver = |piece: &Piece| {
            streamed.append(Thoughts { reasoning: piece.reasoning.clone(), answer: piece.text.clone() });
            ControlFlow::Continue(())
        };
        let request = GenerationRequest {
            thinking: Some(thinking.clone()),
            logprobs: Some(0),
            ..GenerationRequest::greedy(prompt.to_vec(), max_tokens)
        };
        let answer = generator.generate(&request, &tokenizer, &mut receiver, &Control::new()).unwrap();
        let all: Vec<u8> = answer.tokens.iter().flat_map(|&id| tokenizer.token_bytes(id).into_owned()).collect();
        assert_eq!(streamed, Thoughts::split(&String::from_utf8(all).unwrap(), thinking.opened));
        assert_eq!((&streamed.reasoning, &streamed.answer), (&answer.reasoning, &answer.text));
        let stats = &answer.stats;
        assert_eq!((stats.prompt_tokens, stats.generated_tokens), (prompt.len(), answer.tokens.len()));
        let computed = log.lock().unwrap().rows.len();
        (answer.reasoning, answer.text, answer.tokens, computed)
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

#[test]
fn choices_compute_the_prompt_once_and_name_their_seeds() {
    let tokenizer = FakeTokenizer::default();
    let hot = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    let request = |seed| GenerationRequest { sampling: hot(seed), ..GenerationRequest::greedy(vec![1, 2, 3], 5) };
    let single = |seed| {
        let stepper = FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() };
        collect(&mut StepperLoop::new(Box::new(stepper)), &request(Some(seed)), &tokenizer).unwrap().0
    };
    struct Kept(Vec<String>, Vec<usize>);
    impl ChoiceReceiver for Kept {
        fn on_piece(&mut self, choice: usize, piece: &Piece) -> ControlFlow<()> {
            self.0.resize(choice + 1, String::new());
            self.0[choice].push_str(&piece.text);
            ControlFlow::Continue(())
        }
        fn on_end(&mut self, choice: usize, generation: &Generation) {
            assert_eq!(self.0.get(choice).map_or("", String::as_str), generation.text);
            self.1.push(choice);
        }
    }
    for seed in [Some(7), None] {
        let stepper = FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() };
        let log = Arc::clone(&stepper.log);
        let mut generator = TextGenerator::new(Session::Stepper(Box::new(stepper)));
        let mut kept = Kept(Vec::new(), Vec::new());
        let choices = generator.generate_choices(&request(seed), 3, &tokenizer, &mut kept, &Control::new()).unwrap();
        assert_eq!(kept.1, [0, 1, 2]);
        let seeds: Vec<u64> = choices.iter().map(|choice| choice.stats.sampling.seed.unwrap()).collect();
        assert!(seed.is_none_or(|seed| seed == seeds[0]));
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!(seeds[index], choice_seed(seeds[0], index as u32));
            assert_eq!(choice.stats.cached_prompt_tokens, if index == 0 { 0 } else { 2 });
            let alone = single(seeds[index]);
            assert_eq!((&choice.text, &choice.tokens), (&alone.text, &alone.tokens));
        }
        let log = log.lock().unwrap();
        assert_eq!(log.rows.iter().filter(|(row, _)| row.position < 2).count(), 2);
    }
    let mut generator = TextGenerator::new(Session::Stepper(Box::new(FakeStepper::default())));
    let mut stop_all =
        |choice: usize, _: &Piece| if choice == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let run = |generator: &mut TextGenerator, n, receiver: &mut dyn ChoiceReceiver| {
        generator.generate_choices(&request(Some(7)), n, &tokenizer, receiver, &Control::new())
    };
    let broken = run(&mut generator, 3, &mut stop_all).unwrap();
    assert_eq!((broken.len(), broken[1].stats.finish_reason), (2, FinishReason::Receiver));
    for n in [0, 9] {
        let error = run(&mut generator, n, &mut stop_all).unwrap_err().to_string();
        assert!(error.contains(&format!("between 1 and 8; found {n}")), "{error}");
    }
}

#[test]
fn an_echo_comes_first_and_is_scored_where_asked() {
    let tokenizer = FakeTokenizer::default();
    let echo = |is_scored| Some(Echo { text: "<1><2><3>".to_owned(), is_scored });
    let base = GenerationRequest { logprobs: Some(2), ..GenerationRequest::greedy(vec![1, 2, 3], 4) };
    let plain = StepperLoop::new(Box::new(FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() }));
    let (plain, plain_pieces) = collect(&mut { plain }, &base, &tokenizer).unwrap();
    for (is_scored, chunk_rows) in [(false, 16), (true, 16), (true, 1), (true, 2)] {
        let stepper = FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() };
        let mut steps = StepperLoop::new(Box::new(stepper)).with_chunk_rows(chunk_rows);
        let request = GenerationRequest { echo: echo(is_scored), ..base.clone() };
        for _ in 0..2 {
            let (answer, pieces) = collect(&mut steps, &request, &tokenizer).unwrap();
            assert_eq!(answer.text, format!("<1><2><3>{}", plain.text));
            assert_eq!(answer.tokens, plain.tokens);
            assert!(pieces[0].is_echo && pieces[0].text == "<1><2><3>" && pieces[0].tokens == [1, 2, 3]);
            assert_eq!(&pieces[1..], &plain_pieces[..]);
            let scored: Vec<TokenId> = pieces[0].logprobs.iter().map(|entry| entry.chosen.id).collect();
            assert_eq!(scored, if is_scored { vec![2, 3] } else { vec![] });
            if is_scored {
                assert_eq!(answer.stats.cached_prompt_tokens, 0, "every position is computed");
                let mut logits = vec![0.0; VOCAB];
                Rule::Prefix.fill(&[1, 2], &mut logits);
                let wanted = npuhal_models::logprobs::log_softmax(&logits).unwrap()[3];
                assert_eq!(pieces[0].logprobs[1].chosen.logprob, wanted);
                assert_eq!(pieces[0].logprobs[1].top.len(), 2);
            }
        }
    }
}

#[test]
fn a_text_that_repeats_itself_takes_fewer_steps() {
    let steps_of = |speculation| {
        let stepper = FakeStepper { positions: 100, ..FakeStepper::default() };
        let log = Arc::clone(&stepper.log);
        let mut steps = StepperLoop::new(Box::new(stepper));
        let request = GenerationRequest { ignore_eos: true, speculation, ..GenerationRequest::greedy(vec![1, 2], 60) };
        let (answer, _) = collect(&mut steps, &request, &FakeTokenizer::default()).unwrap();
        (log.lock().unwrap().steps, answer)
    };
    let (plain_steps, plain) = steps_of(None);
    let (steps, guessed) = steps_of(Some(Speculation::PromptLookup { max_draft: 8, adaptive: false }));
    assert_eq!((plain_steps, &plain.tokens), (60, &guessed.tokens));
    assert!(steps < 25, "{steps} steps");
    let stats = guessed.stats.speculation.unwrap();
    assert_eq!(stats.acceptance(), Some(1.0), "{stats}");
    assert_eq!((stats.drafted + steps, plain.stats.speculation), (60, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Guessing ahead changes no token, text, log probability or cache, greedy or drawn, whatever ends the answer.
    #[test]
    fn speculation_changes_nothing(
        prompt in prop::collection::vec(0u32..4, 1..12),
        pairs in any::<bool>(),
        temperature in prop::sample::select(vec![0.0, 0.05, 0.9]),
        max_draft in 1usize..9,
        adaptive in any::<bool>(),
        max_tokens in 1usize..30,
        positions in 12u32..40,
        keeps_nothing in any::<bool>(),
        budget in prop::option::of(1usize..6),
        pieces_wanted in 0usize..20,
    ) {
        let tokenizer = FakeTokenizer {
            bytes: [(2, b"<think>".to_vec()), (7, vec![0xC3]), (6, b"</think>".to_vec())].into(),
            ..FakeTokenizer::default()
        };
        let stepper = || FakeStepper {
            rule: if pairs { Rule::Pairs } else { Rule::Prefix }, positions, keeps_nothing, ..FakeStepper::default()
        };
        let plain = GenerationRequest {
            sampling: SamplingParams { temperature, repetition_penalty: 1.01, seed: Some(5), ..SamplingParams::default() },
            logprobs: Some(1),
            stop: StopStrings::new(["<5><5>"]).unwrap(),
            thinking: budget.map(|budget| Thinking { opened: true, budget: Some(budget), closing: vec![6] }),
            ..GenerationRequest::greedy(prompt, max_tokens)
        };
        let speculation = Some(Speculation::PromptLookup { max_draft, adaptive });
        let run = |request: &GenerationRequest| {
            let mut steps = StepperLoop::new(Box::new(stepper()));
            let mut pieces = Vec::new();
            let mut receiver = |piece: &Piece| {
                pieces.push(piece.clone());
                if pieces.len() > pieces_wanted { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let answer = steps.generate(request, &tokenizer, &mut receiver, &Control::new()).unwrap();
            let cache = steps.cache().tokens().to_vec();
            (answer, pieces, cache)
        };
        let (wanted, wanted_pieces, wanted_cache) = run(&plain);
        let (found, pieces, cache) = run(&GenerationRequest { speculation, ..plain });
        prop_assert_eq!((&found.tokens, &found.text, &found.reasoning), (&wanted.tokens, &wanted.text, &wanted.reasoning));
        prop_assert_eq!(pieces, wanted_pieces);
        prop_assert_eq!(found.stats.finish_reason, wanted.stats.finish_reason);
        prop_assert_eq!(found.stats.reasoning_tokens, wanted.stats.reasoning_tokens);
        // A stepper that forgets more than it is asked to is fed again at the next step, if there is one.
        if !keeps_nothing {
            prop_assert!(cache.starts_with(&wanted_cache) || wanted_cache.starts_with(&cache), "{:?} {:?}", cache, wanted_cache);
        }
        let stats = found.stats.speculation.unwrap();
        prop_assert!(stats.accepted <= stats.drafted && stats.drafted <= stats.steps * max_draft);
    }
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
