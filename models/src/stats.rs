//! What one generation amounted to.
//!
//! Timing rule: a step is one forward pass and the choice of its token, if one is chosen. Time to first token is the sum of the
//! prompt steps that really ran, so cached positions cost nothing. The decode rate is `decode_steps / decode_time` with
//! `decode_steps = generated − 1`: the first token belongs to the prompt, and a step that yields no token (the one that finds
//! the end of the text) is in neither figure. Time that the receiver of the pieces takes is not counted.

use crate::sampling::SamplingParams;
use crate::speculate::SpeculationStats;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended the text.
    EndOfText,
    /// A stop string was found.
    StopString,
    /// The wanted number of tokens was reached.
    MaxTokens,
    /// There is no position left for a further token.
    ContextFull,
    /// The receiver of the pieces asked for no more.
    Receiver,
}

impl FinishReason {
    /// The word of the public HTTP interface: `stop` or `length`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::EndOfText | Self::StopString | Self::Receiver => "stop",
            Self::MaxTokens | Self::ContextFull => "length",
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EndOfText => "end of text",
            Self::StopString => "stop string",
            Self::MaxTokens => "token limit",
            Self::ContextFull => "context full",
            Self::Receiver => "stopped by the receiver",
        })
    }
}

/// Counts, times and settings of one generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerationStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt positions taken from an earlier generation.
    pub cached_prompt_tokens: usize,
    /// Tokens emitted; an end-of-text token is none.
    pub generated_tokens: usize,
    /// Of these, tokens of thoughts.
    #[serde(default)]
    pub reasoning_tokens: usize,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The stop string that ended it.
    pub stop_sequence: Option<String>,
    /// Time to the first token.
    pub ttft: Duration,
    /// Intervals between emitted tokens: one less than the tokens.
    pub decode_steps: usize,
    /// Time of those intervals.
    pub decode_time: Duration,
    /// What guessing ahead came to, where it was asked for.
    #[serde(default)]
    pub speculation: Option<SpeculationStats>,
    /// The parameters; with `seed` the effective one, or `None` where nothing was drawn.
    pub sampling: SamplingParams,
}

impl GenerationStats {
    /// Prompt positions that were computed, a second. `None` where no time was taken.
    #[must_use]
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        rate(self.prompt_tokens.saturating_sub(self.cached_prompt_tokens), self.ttft)
    }

    /// Tokens after the first, a second. `None` with fewer than two tokens.
    #[must_use]
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        rate(self.decode_steps, self.decode_time)
    }
}

fn rate(count: usize, time: Duration) -> Option<f64> {
    (count > 0 && !time.is_zero()).then(|| count as f64 / time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_timing_rule() {
        let stats = GenerationStats {
            prompt_tokens: 40,
            cached_prompt_tokens: 10,
            generated_tokens: 16,
            reasoning_tokens: 0,
            finish_reason: FinishReason::MaxTokens,
            stop_sequence: None,
            ttft: Duration::from_millis(500),
            decode_steps: 15,
            decode_time: Duration::from_millis(750),
            speculation: None,
            sampling: SamplingParams::default(),
        };
        assert_eq!(stats.prefill_tokens_per_second(), Some(60.0));
        assert_eq!(stats.decode_tokens_per_second(), Some(20.0));
        let single = GenerationStats { decode_steps: 0, decode_time: Duration::ZERO, ..stats };
        assert_eq!(single.decode_tokens_per_second(), None);
    }
}
