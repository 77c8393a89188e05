//! Models whose logits are a table: for tests that need given logits, or a given text, through everything above them.
//!
//! The embedding of a token is a unit vector in the direction of its *state*, large enough that the epsilon of the norm
//! is lost; the only layer adds nothing; a column of the head holds the logits that follow a state. All numbers on the
//! way are powers of two, so that the logits come out bit for bit.

use crate::kit::gguf::{GgufFile, Value};
use crate::kit::model::{Architecture, ModelSpec, Weights, byte_level, token_texts};
use npuhal_models::WeightType;

/// What follows what.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// Token texts beside single bytes and the kit's own.
    texts: Vec<String>,
    /// By state, the logits of tokens; [`UNLIKELY`] for all others.
    states: Vec<Vec<(String, f32)>>,
    /// States of tokens; 0 for all others.
    after: Vec<(String, usize)>,
}

/// Logit of tokens that are not drawn: its exponential is 0 beside any that a script states.
pub const UNLIKELY: f32 = -8192.0;

/// The token that ends a text.
pub const END: &str = "<|im_end|>";

/// Power of 4, so that the root is a power of 2.
const HIDDEN: usize = 64;

impl Script {
    /// Adds the state that the tokens `after` lead to, in which the tokens `next` have these logits. Texts of several bytes
    /// become tokens of their own; they are never part of a prompt.
    ///
    /// # Panics
    /// With more states than the model is wide.
    pub fn state(&mut self, after: &[&str], next: &[(&str, f32)]) {
        let known = token_texts();
        for text in after.iter().copied().chain(next.iter().map(|(text, _)| *text)) {
            if !known.contains(&stored(text)) && !self.texts.iter().any(|held| held == text) {
                self.texts.push(text.to_owned());
            }
        }
        let state = self.states.len();
        assert!(state < HIDDEN, "at most {HIDDEN} states");
        self.states.push(next.iter().map(|(text, logit)| ((*text).to_owned(), *logit)).collect());
        self.after.extend(after.iter().map(|text| ((*text).to_owned(), state)));
    }

    /// Adds states so that `pieces` follow each other from the token `start` on, and then the end of the text.
    pub fn chain(&mut self, start: &str, pieces: &[&str]) {
        let texts = std::iter::once(start).chain(pieces.iter().copied());
        for (text, next) in texts.zip(pieces.iter().copied().chain([END])) {
            self.state(&[text], &[(next, 1.0)]);
        }
    }

    /// The model's file, with `context_length` positions.
    ///
    /// # Panics
    /// Where a token is not in the vocabulary.
    #[must_use]
    pub fn build(&self, context_length: u32) -> GgufFile {
        let spec = ModelSpec {
            hidden: HIDDEN,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: HIDDEN,
            intermediate: HIDDEN,
            tied: false,
            spare_tokens: self.texts.len(),
            context_length,
            ..ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32))
        };
        let mut file = spec.build();
        let own = self.texts.iter().map(|text| stored(text));
        let texts: Vec<String> = token_texts().into_iter().chain(own).collect();
        let id = |text: &str| {
            let stored = stored(text);
            texts.iter().position(|held| *held == stored).unwrap_or_else(|| panic!("a token '{text}'"))
        };
        let mut embedding = vec![0.0; texts.len() * HIDDEN];
        let mut state_of = vec![0; texts.len()];
        for (text, state) in &self.after {
            state_of[id(text)] = *state;
        }
        for (token, state) in state_of.into_iter().enumerate() {
            embedding[token * HIDDEN + state] = LARGE;
        }
        let mut head = vec![UNLIKELY; texts.len() * HIDDEN];
        for (state, next) in self.states.iter().enumerate() {
            for (text, logit) in next {
                head[id(text) * HIDDEN + state] = *logit;
            }
        }
        for tensor in &mut file.tensors {
            let len = tensor.bytes.len() / 4;
            let values = match tensor.name.as_str() {
                "token_embd.weight" => embedding.clone(),
                "output.weight" => head.clone(),
                // The root of the width, undone.
                "output_norm.weight" => vec![1.0 / (HIDDEN as f32).sqrt(); len],
                name if name.contains("norm") => vec![1.0; len],
                _ => vec![0.0; len],
            };
            assert_eq!(values.len(), len, "{}", tensor.name);
            tensor.bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        }
        file.set("tokenizer.ggml.tokens", Value::strings(texts));
        file
    }
}

const LARGE: f32 = 16384.0;

/// The text as the vocabulary holds it; control tokens stand for themselves.
fn stored(text: &str) -> String {
    if text == END { text.to_owned() } else { byte_level(text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::reference::{LogitsOf, Reference};

    #[test]
    fn the_logits_are_those_of_the_script() {
        let mut script = Script::default();
        script.state(&["A"], &[("v", 0.5), ("w", 3.0), ("two words", -1.0)]);
        script.chain("0", &["Hello", " world"]);
        let file = script.build(32);
        let texts = file.get("tokenizer.ggml.tokens").cloned();
        let Some(Value::Array(texts)) = texts else { panic!("{texts:?}") };
        let id = |text: &str| texts.iter().position(|held| held.as_str() == Some(text)).unwrap();
        let run = |tokens: &[u32]| Reference::new(&file).unwrap().forward(tokens, LogitsOf::All).unwrap().logits;
        let logits = run(&[66, 65]);
        // The reference has more digits than the epsilon is lost in.
        let is = |logit: f64, wanted: f32| (logit - f64::from(wanted)).abs() < 1e-6;
        assert!(is(logits[1][id("v")], 0.5) && is(logits[1][id("w")], 3.0) && is(logits[1][id("twoĠwords")], -1.0));
        assert_eq!(logits[1].iter().filter(|logit| !is(**logit, UNLIKELY)).count(), 3);
        let logits = run(&[48, id("Hello") as u32, id("Ġworld") as u32]);
        for (row, next) in ["Hello", "Ġworld", END].into_iter().enumerate() {
            assert!(is(logits[row][id(next)], 1.0), "{next}");
        }
    }
}
