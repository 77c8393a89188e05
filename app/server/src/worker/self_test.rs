//! A model is tried before it is called ready: a known prompt, finite numbers, no endless repetition of one token.

use super::Loaded;
use npuhal_core::stage::Control;
use npuhal_models::Specials;
use npuhal_models::sequence::{GenerationRequest, Piece};
use std::ops::ControlFlow;

const PROMPT: &str = "The quick brown fox jumps over the lazy dog. The capital of France is";
const TOKENS: usize = 12;

/// Tries `loaded`.
///
/// # Errors
/// What is wrong with it, for the operator.
pub(super) fn run(loaded: &mut Loaded) -> Result<(), String> {
    let tokenizer = &loaded.tokenizer;
    let mut prompt: Vec<u32> = tokenizer.bos().filter(|_| tokenizer.add_bos()).into_iter().collect();
    let failed = |what: String| format!("the model failed its self-test: {what}");
    tokenizer.encode_into(PROMPT, Specials::Plain, &mut prompt).map_err(|error| failed(error.to_string()))?;
    // Narrow windows take the end of the prompt; there is always room for one token.
    let room = loaded.generator.positions().saturating_sub(TOKENS).max(1);
    prompt.drain(..prompt.len().saturating_sub(room));
    let wants_logprobs = matches!(loaded.generator, npuhal_models::generate::TextGenerator::Stepper(_));
    let request = GenerationRequest {
        logprobs: wants_logprobs.then_some(0),
        ignore_eos: wants_logprobs,
        ..GenerationRequest::greedy(prompt, TOKENS)
    };
    let mut not_finite = 0;
    let mut on_piece = |piece: &Piece| {
        not_finite += piece.logprobs.iter().filter(|entry| !entry.chosen.logprob.is_finite()).count();
        ControlFlow::Continue(())
    };
    let generation = loaded
        .generator
        .generate(&request, tokenizer, &mut on_piece, &Control::new())
        .map_err(|error| failed(error.to_string()))?;
    if not_finite > 0 {
        return Err(failed(format!("{not_finite} of {TOKENS} tokens have no finite probability")));
    }
    match generation.tokens.first() {
        Some(first) if generation.tokens.len() == TOKENS && generation.tokens.iter().all(|token| token == first) => {
            Err(failed(format!("it repeats token {first} without end")))
        }
        _ => Ok(()),
    }
}
