//! `generation_config.json`: the sampling that a model's authors suggest.

use crate::error::ModelError;
use crate::json_keys::{Keys, read_object};
use crate::sampling::SamplingParams;
use std::path::Path;

const FILE: &str = "generation_config.json";
const LIMIT_BYTES: u64 = 1 << 20;
/// Scores kept where the file draws and does not say how many (the library's default).
const DEFAULT_TOP_K: u64 = 50;

/// Reads the file in `directory`; `None` where it is not there or suggests what is the default anyway.
///
/// # Errors
/// [`ModelError::Io`]; [`ModelError::Malformed`] for a damaged file and for parameters outside their ranges.
pub(super) fn read(directory: &Path) -> Result<Option<SamplingParams>, ModelError> {
    let path = directory.join(FILE);
    if !path.exists() {
        return Ok(None);
    }
    let map = read_object(&path, LIMIT_BYTES)?;
    let keys = Keys { path: &path, map: &map, remedy: "" };
    let number = |key: &str, usual: f64| match keys.get(key) {
        None => Ok(usual),
        Some(value) => value
            .as_f64()
            .ok_or_else(|| keys.malformed(key, format!("wanted a number, found {}", crate::json_keys::short(value)))),
    };
    let mut sampling =
        SamplingParams { repetition_penalty: number("repetition_penalty", 1.0)?, ..SamplingParams::default() };
    // Without it the library takes the best token, whatever else the file says.
    if keys.flag("do_sample")? {
        sampling.temperature = number("temperature", 1.0)?;
        sampling.top_p = number("top_p", 1.0)?;
        sampling.min_p = number("min_p", 0.0)?;
        let top_k = number("top_k", DEFAULT_TOP_K as f64)?;
        if !(0.0..=f64::from(u32::MAX)).contains(&top_k) || top_k.fract() != 0.0 {
            return Err(keys.malformed("top_k", format!("wanted a whole number from 0, found {top_k}")));
        }
        sampling.top_k = top_k as u64;
    }
    sampling.validate().map_err(|error| keys.malformed("sampling", error.to_string()))?;
    Ok(Some(sampling).filter(|sampling| *sampling != SamplingParams::default()))
}
