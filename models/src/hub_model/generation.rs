//! `generation_config.json`: the sampling that a model's authors suggest.

use crate::error::ModelError;
use crate::json_keys::{Keys, read_object, short};
use crate::sampling::{SamplingParams, SuggestedSampling};
use serde_json::Value;
use std::path::Path;

const FILE: &str = "generation_config.json";
const LIMIT_BYTES: u64 = 1 << 20;
/// Scores kept where the file draws and does not say how many (the library's default).
const DEFAULT_TOP_K: u64 = 50;
/// What the library does and this program does not; each with the number that switches it off, beside false and 0.
const NOT_DONE: [(&str, f64); 12] = [
    ("num_beams", 1.0),
    ("num_beam_groups", 1.0),
    ("typical_p", 1.0),
    ("penalty_alpha", 0.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("guidance_scale", 1.0),
    ("bad_words_ids", 0.0),
    ("suppress_tokens", 0.0),
    ("sequence_bias", 0.0),
];

/// Reads the file in `directory`; `None` where it is not there or suggests what is the default anyway.
///
/// # Errors
/// [`ModelError::Io`]; [`ModelError::Malformed`] for a damaged file and for parameters outside their ranges.
pub(super) fn read(directory: &Path) -> Result<Option<SuggestedSampling>, ModelError> {
    let path = directory.join(FILE);
    if !path.exists() {
        return Ok(None);
    }
    let map = read_object(&path, LIMIT_BYTES)?;
    let keys = Keys { path: &path, map: &map, remedy: "" };
    let number = |key: &str, usual: f64| match keys.get(key) {
        None => Ok(usual),
        Some(value) => {
            value.as_f64().ok_or_else(|| keys.malformed(key, format!("wanted a number, found {}", short(value))))
        }
    };
    let mut params =
        SamplingParams { repetition_penalty: number("repetition_penalty", 1.0)?, ..SamplingParams::default() };
    // Without it the library takes the best token, whatever else the file says.
    if keys.flag("do_sample")? {
        params.temperature = number("temperature", 1.0)?;
        params.top_p = number("top_p", 1.0)?;
        params.min_p = number("min_p", 0.0)?;
        let top_k = number("top_k", DEFAULT_TOP_K as f64)?;
        if !(0.0..=f64::from(u32::MAX)).contains(&top_k) || top_k.fract() != 0.0 {
            return Err(keys.malformed("top_k", format!("wanted a whole number from 0, found {top_k}")));
        }
        params.top_k = top_k as u64;
    }
    params.validate().map_err(|error| keys.malformed("sampling", error.to_string()))?;
    let is_off = |value: &Value, off: f64| match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        value => value == &Value::Bool(false) || value.as_f64().is_some_and(|found| found == 0.0 || found == off),
    };
    let not_done = NOT_DONE.into_iter().filter_map(|(key, off)| Some((key, keys.get(key)?, off)));
    let left_out = not_done.filter(|(_, value, off)| !is_off(value, *off));
    let left_out = left_out.map(|(key, value, _)| format!("{key} = {}", short(value))).collect();
    Ok(SuggestedSampling { params, left_out }.found())
}
