//! A model is tried before it is called ready: a known prompt, finite numbers, no endless repetition of one token.

use super::Loaded;
use npuhal_core::stage::{Control, Session, Stepper, TokenId};
use npuhal_models::batch::{Batch, BatchEvent};
use npuhal_models::generate::Generation;
use npuhal_models::prompter::text_ids;
use npuhal_models::sequence::{GenerationRequest, Piece};
use npuhal_models::{Specials, Tokenizer};
use std::ops::ControlFlow;

const PROMPT: &str = "The quick brown fox jumps over the lazy dog. The capital of France is";
const TOKENS: usize = 12;

/// Tries `loaded`, and gives it back.
///
/// # Errors
/// What is wrong with it, for the operator.
pub(super) fn run(loaded: Loaded) -> Result<Loaded, String> {
    let failed = |what: String| format!("the model failed its self-test: {what}");
    let tokenizer = &loaded.tokenizer;
    let mut prompt = text_ids(tokenizer, PROMPT, Specials::Plain).map_err(|error| failed(error.to_string()))?;
    // Narrow windows take the end of the prompt; there is always room for one token.
    let room = loaded.resident.context.saturating_sub(TOKENS).max(1);
    prompt.drain(..prompt.len().saturating_sub(room));
    let (session, tokens) = match loaded.session {
        Session::Stepper(stepper) => {
            let (stepper, tokens) = try_stepper(stepper, tokenizer, prompt).map_err(failed)?;
            (Session::Stepper(stepper), tokens)
        }
        Session::Generator(mut generator) => {
            let tokens = try_generator(&mut *generator, prompt).map_err(failed)?;
            (Session::Generator(generator), tokens)
        }
    };
    match tokens.first() {
        Some(first) if tokens.len() == TOKENS && tokens.iter().all(|token| token == first) => {
            Err(failed(format!("it repeats token {first} without end")))
        }
        _ => Ok(Loaded { session, ..loaded }),
    }
}

fn try_stepper(
    stepper: Box<dyn Stepper>,
    tokenizer: &Tokenizer,
    prompt: Vec<TokenId>,
) -> Result<(Box<dyn Stepper>, Vec<TokenId>), String> {
    let mut batch = Batch::new(stepper, tokenizer);
    let request =
        GenerationRequest { logprobs: Some(0), ignore_eos: true, ..GenerationRequest::greedy(prompt, TOKENS) };
    batch.submit(request, Control::new()).map_err(|error| error.to_string())?;
    let mut end: Result<Option<Generation>, String> = Ok(None);
    let mut not_finite = 0;
    let mut on_event = |_, event: BatchEvent| {
        match event {
            BatchEvent::Piece(Piece { logprobs, .. }) => {
                not_finite += logprobs.iter().filter(|entry| !entry.chosen.logprob.is_finite()).count();
            }
            BatchEvent::Ended(generation) => end = Ok(Some(*generation)),
            BatchEvent::Failed(error) => end = Err(error.to_string()),
            _ => {}
        }
        ControlFlow::Continue(())
    };
    while batch.step(&mut on_event) {}
    let stepper = batch.close(&mut |_, _| ControlFlow::Continue(()));
    if not_finite > 0 {
        return Err(format!("{not_finite} of {TOKENS} tokens have no finite probability"));
    }
    Ok((stepper, end?.map(|generation| generation.tokens).unwrap_or_default()))
}

/// A route that chooses tokens itself.
fn try_generator(
    generator: &mut dyn npuhal_core::stage::Generator,
    prompt: Vec<TokenId>,
) -> Result<Vec<TokenId>, String> {
    let request = npuhal_core::stage::GeneratorRequest {
        prompt: &prompt,
        max_tokens: TOKENS as u32,
        repetition_penalty: 1.0,
        penalty_window: 1,
    };
    let outcome = generator.generate(&request, &mut |_| true, &Control::new()).map_err(|error| error.to_string())?;
    if outcome.tokens.is_empty() && !outcome.stopped_at_eos {
        return Err("it gave no token, nor an end".to_owned());
    }
    Ok(outcome.tokens)
}
