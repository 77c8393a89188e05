//! Log probabilities of emitted tokens: natural logarithms of the softmax of the raw f32 logits, before penalties and
//! filters, computed in f64.

use npuhal_core::RunError;
use npuhal_core::stage::TokenId;
use serde::{Deserialize, Serialize};

/// Alternatives of one token at most.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// A token and its log probability.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Its id.
    pub id: TokenId,
    /// Its text; bytes that are no UTF-8 by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// An emitted token, its log probability and the likeliest alternatives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The emitted token.
    pub chosen: Alternative,
    /// The likeliest tokens, best first; the lower id first on ties.
    pub top: Vec<Alternative>,
}

/// Logarithm of the sum of exponentials of `logits`.
///
/// # Errors
/// As [`crate::sampling::check_logits`].
pub fn log_sum_exp(logits: &[f32]) -> Result<f64, RunError> {
    crate::sampling::check_logits(logits)?;
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(best)).exp()).sum();
    Ok(f64::from(best) + sum.ln())
}

/// Natural logarithms of the softmax of `logits`.
///
/// # Errors
/// As [`crate::sampling::check_logits`].
pub fn log_softmax(logits: &[f32]) -> Result<Vec<f64>, RunError> {
    let norm = log_sum_exp(logits)?;
    Ok(logits.iter().map(|&logit| f64::from(logit) - norm).collect())
}

/// The log probability of `token` and the `top` likeliest tokens; `bytes_of` gives a token's bytes.
///
/// # Errors
/// As [`crate::sampling::check_logits`]; [`RunError::BadRows`] where `token` has no logit.
pub fn token_logprob(
    logits: &[f32],
    token: TokenId,
    top: usize,
    bytes_of: impl Fn(TokenId) -> Vec<u8>,
) -> Result<TokenLogprob, RunError> {
    let norm = log_sum_exp(logits)?;
    let alternative = |id: TokenId, logit: f32| {
        let bytes = bytes_of(id);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        Alternative { id, token, logprob: f64::from(logit) - norm, bytes }
    };
    let logit = *logits
        .get(token as usize)
        .ok_or_else(|| RunError::BadRows { reason: format!("token {token} has no logit among {}", logits.len()) })?;
    let top = likeliest(logits, top).into_iter().map(|(id, logit)| alternative(id, logit)).collect();
    Ok(TokenLogprob { chosen: alternative(token, logit), top })
}

/// The `count` highest logits, best first, the lower id first on ties.
fn likeliest(logits: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    let count = count.min(logits.len());
    let mut best: Vec<(TokenId, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in logits.iter().enumerate() {
        let enters = best.len() < count || best.last().is_some_and(|&(_, least)| logit > least);
        if count > 0 && enters {
            let at = best.partition_point(|&(_, held)| held >= logit);
            best.insert(at, (id as TokenId, logit));
            best.truncate(count);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_log_softmax() {
        let golden: serde_json::Value = serde_json::from_str(include_str!("../tests/data/stop_vectors.json")).unwrap();
        let case = &golden["log_softmax"];
        let logits: Vec<f32> = case["in"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        for (found, wanted) in log_softmax(&logits).unwrap().iter().zip(case["out"].as_array().unwrap()) {
            approx::assert_abs_diff_eq!(*found, wanted.as_f64().unwrap(), epsilon = 1e-14);
        }
    }

    #[test]
    fn the_list_is_sorted_and_ties_keep_id_order() {
        assert_eq!(likeliest(&[1.0, 3.0, 2.0, 3.0], 3), [(1, 3.0), (3, 3.0), (2, 2.0)]);
        assert_eq!(likeliest(&[1.0], 5), [(0, 1.0)]);
        assert!(likeliest(&[1.0], 0).is_empty());
    }

    #[test]
    fn tokens_carry_text_and_bytes() {
        let entry = token_logprob(&[0.0, 1.0], 0, 1, |id| if id == 0 { vec![0xC3] } else { b"hi".to_vec() }).unwrap();
        assert_eq!((entry.chosen.token.as_str(), entry.chosen.bytes.as_slice()), ("\u{FFFD}", &[0xC3][..]));
        assert_eq!((entry.top[0].id, entry.top[0].token.as_str()), (1, "hi"));
        assert!(token_logprob(&[0.0], 1, 0, |_| Vec::new()).is_err());
        assert!(token_logprob(&[f32::NAN], 0, 0, |_| Vec::new()).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn probabilities_sum_to_one(logits in prop::collection::vec(-80.0f32..80.0, 1..200), top in 0usize..=20) {
            let sum: f64 = log_softmax(&logits).unwrap().into_iter().map(f64::exp).sum();
            prop_assert!((sum - 1.0).abs() < 1e-12, "{sum}");
            let mut sorted: Vec<(TokenId, f32)> = logits.iter().enumerate().map(|(id, l)| (id as TokenId, *l)).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            sorted.truncate(top);
            prop_assert_eq!(likeliest(&logits, top), sorted);
        }
    }
}
