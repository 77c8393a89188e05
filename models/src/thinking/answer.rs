//! Generation of answers whose thoughts are told apart and bounded.

use super::{ThoughtParser, Thoughts};
use crate::generate::{GenerateError, Generation, TextGenerator};
use crate::sequence::{GenerationRequest, Piece, TokenText};
use crate::stats::GenerationStats;
use npuhal_core::stage::{Control, TokenId};
use std::ops::ControlFlow;

/// How a model thinks before one answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Whether the prompt has opened a block of thoughts ([`super::opens_thoughts`]).
    pub opened: bool,
    /// Tokens of thoughts at most; then the block is closed for the model.
    pub budget: Option<usize>,
    /// What closes a block: [`super::closing_ids`]. Needed where there is a budget.
    pub closing: Vec<TokenId>,
}

/// An answer with its thoughts.
#[derive(Debug, Clone, PartialEq)]
pub struct ThoughtfulAnswer {
    /// All text, told apart.
    pub thoughts: Thoughts,
    /// All tokens and the counts of both parts, with those that closed the thoughts.
    pub generation: Generation,
}

impl TextGenerator {
    /// Generates the answer to `request` and hands thoughts and answer to `receiver` as they come; [`ControlFlow::Break`] ends
    /// the generation. Where the budget of thoughts is used up, the block is closed and the model goes on behind it: the prompt
    /// and the thoughts are taken from the KV cache. Draws of a seeded request begin anew there.
    ///
    /// # Errors
    /// As [`TextGenerator::generate`].
    pub fn generate_with_thoughts(
        &mut self,
        request: &GenerationRequest,
        tokenizer: &dyn TokenText,
        thinking: &Thinking,
        receiver: &mut dyn FnMut(&Thoughts) -> ControlFlow<()>,
        control: &Control,
    ) -> Result<ThoughtfulAnswer, GenerateError> {
        let mut parser = ThoughtParser::new(thinking.opened);
        let mut thoughts = Thoughts::default();
        let (mut thought_tokens, mut is_over_budget) = (0, false);
        let mut told = |part: Thoughts, thoughts: &mut Thoughts| {
            let flow = if part == Thoughts::default() { ControlFlow::Continue(()) } else { receiver(&part) };
            thoughts.append(part);
            flow
        };
        let mut on_piece = |piece: &Piece| {
            let flow = told(parser.push(&piece.text), &mut thoughts);
            if flow.is_continue() && parser.is_thinking() {
                thought_tokens += piece.tokens.len();
                is_over_budget = thinking.budget.is_some_and(|budget| thought_tokens >= budget);
            }
            if is_over_budget { ControlFlow::Break(()) } else { flow }
        };
        let mut generation = self.generate(request, tokenizer, &mut on_piece, control)?;
        let rest = request.max_tokens.saturating_sub(generation.tokens.len() + thinking.closing.len());
        let prompt = [&request.prompt, &generation.tokens, &thinking.closing].map(Vec::as_slice).concat();
        if is_over_budget && !thinking.closing.is_empty() && rest > 0 && prompt.len() < self.positions() {
            let closed = tokenizer_text(tokenizer, &thinking.closing);
            let flow = told(parser.push(&closed), &mut thoughts);
            generation.text.push_str(&closed);
            generation.tokens.extend(&thinking.closing);
            if flow.is_continue() {
                let request = GenerationRequest { prompt, max_tokens: rest, ..request.clone() };
                let mut on_piece = |piece: &Piece| told(parser.push(&piece.text), &mut thoughts);
                let answer = self.generate(&request, tokenizer, &mut on_piece, control)?;
                generation.text.push_str(&answer.text);
                generation.tokens.extend(&answer.tokens);
                generation.stats = joined(&generation, answer.stats);
            }
        }
        // Nothing is left to be stopped.
        let _ = told(parser.flush(), &mut thoughts);
        Ok(ThoughtfulAnswer { thoughts, generation })
    }
}

/// The counts of both parts as of one: closing the thoughts is a part of decoding.
fn joined(both: &Generation, answer: GenerationStats) -> GenerationStats {
    let first = &both.stats;
    GenerationStats {
        prompt_tokens: first.prompt_tokens,
        cached_prompt_tokens: first.cached_prompt_tokens,
        generated_tokens: both.tokens.len(),
        ttft: first.ttft,
        decode_steps: both.tokens.len().saturating_sub(1),
        decode_time: first.decode_time + answer.ttft + answer.decode_time,
        ..answer
    }
}

fn tokenizer_text(tokenizer: &dyn TokenText, ids: &[TokenId]) -> String {
    let mut stream = tokenizer.stream();
    let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
    text.push_str(&stream.flush());
    text
}
