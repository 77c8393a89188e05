//! Perplexity on a stepper whose distributions are known.

mod fake;

use fake::{FakeStepper, Rule, VOCAB, begun_and_ended};
use npuhal_core::stage::{Control, Stepper, TokenId};
use npuhal_models::logprobs::log_softmax;
use npuhal_models::perplexity::{PerplexityError, Quality, ScoredText, measure};

fn text(ids: Vec<TokenId>, window: usize) -> ScoredText {
    ScoredText { ids, bos: None, window, usable_ids: usize::MAX }
}

fn run(steppers: Vec<FakeStepper>, text: &ScoredText) -> Result<Vec<Quality>, PerplexityError> {
    let mut steppers: Vec<Box<dyn Stepper>> =
        steppers.into_iter().map(|stepper| Box::new(stepper) as Box<dyn Stepper>).collect();
    let mut last = (0, 0);
    let result = measure(&mut steppers, text, &mut |done, total| last = (done, total), &Control::new())?;
    assert_eq!(last, (result[0].scored_tokens, result[0].scored_tokens));
    Ok(result)
}

#[test]
fn a_uniform_model_has_the_perplexity_of_its_vocabulary() {
    let uniform = || FakeStepper { rule: Rule::Fixed(vec![0.25; VOCAB]), ..FakeStepper::default() };
    let ids: Vec<TokenId> = (0..150).map(|id| id % VOCAB as u32).collect();
    for (window, scored) in [(64, 147), (2, 75), (63, 147)] {
        let quality = run(vec![uniform(), uniform()], &text(ids.clone(), window)).unwrap();
        assert_eq!((quality[0].scored_tokens, quality[0].difference), (scored, None), "a window of {window}");
        assert!((quality[0].perplexity - VOCAB as f64).abs() < 1e-9);
        let difference = quality[1].difference.unwrap();
        assert_eq!((difference.kl_max, difference.logit_max, difference.same_top), (0.0, 0.0, 1.0));
    }
    // Padding counts for nothing.
    let few = ScoredText { usable_ids: 4, ..text(vec![1, 2, 3, 0], 8) };
    assert!((run(vec![uniform()], &few).unwrap()[0].perplexity - 4.0).abs() < 1e-9);
    // With an id that begins a text every token is scored.
    let begun = ScoredText { bos: Some(1), ..text(vec![5; 30], 11) };
    assert_eq!(run(vec![uniform()], &begun).unwrap()[0].scored_tokens, 30);
}

#[test]
fn losses_and_differences_are_those_of_the_definition() {
    let ids: Vec<TokenId> = vec![3, 1, 4, 1, 5, 9, 2, 6];
    let other = vec![0.5, -1.0, 0.0, 2.0, 1.0, 0.25, -3.0, 0.0, 0.0, 1.5];
    let steppers = || {
        let prefix = FakeStepper { rule: Rule::Prefix, ..FakeStepper::default() };
        vec![prefix, FakeStepper { rule: Rule::Fixed(other.clone()), ..FakeStepper::default() }]
    };
    let quality = run(steppers(), &text(ids.clone(), 5)).unwrap();
    let (mut losses, mut kl, mut absolute, mut same) = ([0.0, 0.0], Vec::new(), Vec::new(), 0);
    let best = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap();
    for window in ids.chunks(5) {
        for at in 1..window.len() {
            let mut row = vec![0.0; VOCAB];
            Rule::Prefix.fill(&window[..at], &mut row);
            let (p, q) = (log_softmax(&row).unwrap(), log_softmax(&other).unwrap());
            let target = window[at] as usize;
            losses[0] -= p[target];
            losses[1] -= q[target];
            kl.push(p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
            absolute.extend(row.iter().zip(&other).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()));
            same += usize::from(best(&row) == best(&other));
        }
    }
    let rows = kl.len() as f64;
    let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found}, wanted {wanted}");
    for (quality, loss) in quality.iter().zip(losses) {
        assert_eq!(quality.scored_tokens, 6);
        near(quality.loss, loss / rows);
        near(quality.perplexity, (loss / rows).exp());
    }
    let difference = quality[1].difference.unwrap();
    near(difference.kl_mean, kl.iter().sum::<f64>() / rows);
    near(difference.kl_max, kl.iter().copied().fold(0.0, f64::max));
    near(difference.logit_mean, absolute.iter().sum::<f64>() / absolute.len() as f64);
    near(difference.logit_rms, (absolute.iter().map(|x| x * x).sum::<f64>() / absolute.len() as f64).sqrt());
    near(difference.logit_max, absolute.iter().copied().fold(0.0, f64::max));
    near(difference.same_top, same as f64 / rows);
}

#[test]
fn what_cannot_be_scored_is_said() {
    let message =
        |ids: Vec<TokenId>, window| run(vec![FakeStepper::default()], &text(ids, window)).unwrap_err().to_string();
    assert!(message(vec![1], 8).contains("the text has 1 tokens"));
    assert!(message(vec![], 8).contains("the text has 0 tokens"));
    assert!(message(vec![1, 2, 3], 1).contains("a window of 1 positions; wanted 2 to 64"));
    assert!(message(vec![1, 2, 3], 65).contains("wanted 2 to 64"));
    assert!(message(vec![1, 10], 8).contains("token 10 has no logit"));
    let stepper = FakeStepper::default();
    let log = std::sync::Arc::clone(&stepper.log);
    log.lock().unwrap().fail_at = Some(1);
    assert!(matches!(run(vec![stepper], &text(vec![1, 2, 3], 8)), Err(PerplexityError::Run(_))));
    assert_eq!(begun_and_ended(&log), (1, 1));
}
