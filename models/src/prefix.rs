//! Which positions of a sequence still hold valid keys and values.

use npuhal_core::stage::TokenId;

/// The ids whose keys and values are valid at positions `0..n` of one sequence of a session.
///
/// A step at position `p` first cuts the list to `p`; its tokens are added after it succeeded. So a failed step leaves its
/// positions invalid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixCache {
    tokens: Vec<TokenId>,
}

impl PrefixCache {
    /// Nothing is valid.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The ids, by position.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Positions of `prompt` that need not be computed again: the common prefix, but never the last position, whose logits
    /// are wanted.
    #[must_use]
    pub fn reusable(&self, prompt: &[TokenId]) -> usize {
        let common = self.tokens.iter().zip(prompt).take_while(|(held, wanted)| held == wanted).count();
        common.min(prompt.len().saturating_sub(1))
    }

    /// Positions from `len` on are no longer valid.
    pub fn cut(&mut self, len: usize) {
        self.tokens.truncate(len);
    }

    /// `tokens` were computed at `position` and after. Ignored where that does not continue the list.
    pub fn extend(&mut self, position: usize, tokens: impl IntoIterator<Item = TokenId>) {
        if self.tokens.len() == position {
            self.tokens.extend(tokens);
        }
    }

    /// Nothing is valid any more, as after a warm-up or another user of the session.
    pub fn clear(&mut self) {
        self.tokens.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_position_is_always_computed() {
        let mut cache = PrefixCache::new();
        cache.extend(0, [1, 2, 3]);
        assert_eq!(cache.reusable(&[1, 2, 3]), 2);
        assert_eq!(cache.reusable(&[1, 2, 3, 4]), 3);
        assert_eq!(cache.reusable(&[1, 5]), 1);
        assert_eq!(cache.reusable(&[]), 0);
        cache.extend(5, [9]);
        assert_eq!(cache.tokens(), [1, 2, 3]);
        cache.cut(1);
        assert_eq!(cache.tokens(), [1]);
    }
}
