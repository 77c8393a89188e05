//! Which part of a model a segment covers.

use npuhal_core::stage::{Takes, Yields};
use npuhal_models::ModelConfig;
use std::ops::Range;
use thiserror::Error;

/// A span that is no part of the model.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SpanError {
    /// The range does not lie in the model.
    #[error("layers {start}..{end} of a model with {layers} layers")]
    Layers {
        /// First layer asked for.
        start: usize,
        /// End of the range asked for.
        end: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Tokens enter a model at layer 0 only.
    #[error("a segment that starts at layer {start} cannot take tokens; only layer 0 follows the embedding")]
    TokensInside {
        /// First layer asked for.
        start: usize,
    },
    /// Norm and head follow the last layer only.
    #[error(
        "a segment that ends at layer {end} of {layers} cannot yield {yields:?}; only the last layer is followed by the norm and the head"
    )]
    EndInside {
        /// End of the range asked for.
        end: usize,
        /// Layers of the model.
        layers: usize,
        /// What was asked for.
        yields: Yields,
    },
    /// Normed rows go into a head alone.
    #[error(
        "a segment that takes normed rows has no layers and yields logits; asked for layers {start}..{end} and {yields:?}"
    )]
    NotAHead {
        /// First layer asked for.
        start: usize,
        /// End of the range asked for.
        end: usize,
        /// What was asked for.
        yields: Yields,
    },
    /// Hidden rows in, hidden rows out, and no layer between.
    #[error("a segment without layers that yields hidden rows does nothing")]
    Empty,
}

/// A part of a model: consecutive layers, with the embedding before them or the final norm and head behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSpan {
    /// Layers, numbered in the whole model; empty (at the last layer) for the norm and head alone.
    pub layers: Range<usize>,
    /// What goes in; [`Takes::Tokens`] includes the embedding.
    pub takes: Takes,
    /// What comes out; [`Yields::Normed`] includes the final norm, [`Yields::Logits`] the head too.
    pub yields: Yields,
}

impl SegmentSpan {
    /// The whole model: tokens in, logits out.
    #[must_use]
    pub fn whole(config: &ModelConfig) -> Self {
        Self { layers: 0..config.layers, takes: Takes::Tokens, yields: Yields::Logits }
    }

    /// Whether the token embedding belongs to it.
    #[must_use]
    pub fn has_embedding(&self) -> bool {
        self.takes == Takes::Tokens
    }

    /// Whether the final norm belongs to it.
    #[must_use]
    pub fn has_final_norm(&self) -> bool {
        self.takes != Takes::Normed && self.yields != Yields::Hidden
    }

    /// Whether the head belongs to it.
    #[must_use]
    pub fn has_head(&self) -> bool {
        self.yields == Yields::Logits
    }

    /// Elements of a row it hands on.
    #[must_use]
    pub fn width(&self, config: &ModelConfig) -> usize {
        if self.has_head() { config.vocab_size } else { config.hidden_size }
    }

    /// Checks that it is a part of a model of `config`.
    ///
    /// # Errors
    /// The first rule it breaks.
    pub fn check(&self, config: &ModelConfig) -> Result<(), SpanError> {
        let (Range { start, end }, layers, yields) = (self.layers.clone(), config.layers, self.yields);
        if start > end || end > layers {
            return Err(SpanError::Layers { start, end, layers });
        }
        if self.takes == Takes::Tokens && start != 0 {
            return Err(SpanError::TokensInside { start });
        }
        if yields != Yields::Hidden && end != layers {
            return Err(SpanError::EndInside { end, layers, yields });
        }
        if self.takes == Takes::Normed && (start != end || yields != Yields::Logits) {
            return Err(SpanError::NotAHead { start, end, yields });
        }
        if self.takes == Takes::Hidden && yields == Yields::Hidden && start == end {
            return Err(SpanError::Empty);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::config;

    fn check(layers: Range<usize>, takes: Takes, yields: Yields) -> Result<(), SpanError> {
        SegmentSpan { layers, takes, yields }.check(&config("llama", 4))
    }

    #[test]
    fn the_parts_of_a_model_are_accepted() {
        assert_eq!(SegmentSpan::whole(&config("llama", 4)).check(&config("llama", 4)), Ok(()));
        assert_eq!(check(0..2, Takes::Tokens, Yields::Hidden), Ok(()));
        assert_eq!(check(2..4, Takes::Hidden, Yields::Normed), Ok(()));
        assert_eq!(check(4..4, Takes::Hidden, Yields::Logits), Ok(()));
        assert_eq!(check(4..4, Takes::Normed, Yields::Logits), Ok(()));
        assert_eq!(check(0..0, Takes::Tokens, Yields::Hidden), Ok(()), "an embedding alone");
    }

    #[test]
    fn everything_else_is_refused_with_its_rule() {
        assert!(matches!(check(3..5, Takes::Hidden, Yields::Hidden), Err(SpanError::Layers { end: 5, .. })));
        #[expect(clippy::reversed_empty_ranges, reason = "the case under test")]
        let reversed = check(3..1, Takes::Hidden, Yields::Hidden);
        assert!(matches!(reversed, Err(SpanError::Layers { .. })));
        assert_eq!(check(1..2, Takes::Tokens, Yields::Hidden), Err(SpanError::TokensInside { start: 1 }));
        assert!(matches!(check(0..3, Takes::Tokens, Yields::Logits), Err(SpanError::EndInside { .. })));
        assert!(matches!(check(3..4, Takes::Normed, Yields::Logits), Err(SpanError::NotAHead { .. })));
        assert!(matches!(check(4..4, Takes::Normed, Yields::Normed), Err(SpanError::NotAHead { .. })));
        assert_eq!(check(2..2, Takes::Hidden, Yields::Hidden), Err(SpanError::Empty));
    }
}
