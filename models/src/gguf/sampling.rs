//! `general.sampling.*`: the sampling that a model's authors suggest, as converters copy it from `generation_config.json`.

use super::GgufFile;
use super::value::Value;
use crate::sampling::{SamplingParams, SuggestedSampling};

const PREFIX: &str = "general.sampling.";
/// Of samplers that other keys switch on; alone they change nothing.
const WITHOUT_INFLUENCE: [&str; 3] = ["xtc_threshold", "mirostat_tau", "mirostat_eta"];

/// What the file suggests. A value that cannot be used is named and left out: a model runs without its suggestions.
pub(super) fn read(file: &GgufFile) -> Option<SuggestedSampling> {
    let mut suggested = SuggestedSampling::default();
    let mut states_temperature = false;
    for (full, value) in file.metadata() {
        let Some(key) = full.strip_prefix(PREFIX) else { continue };
        if WITHOUT_INFLUENCE.contains(&key) {
            continue;
        }
        let number = number(&value).filter(|number| number.is_finite());
        match number.and_then(|number| with(&suggested.params, key, number)) {
            Some(params) => suggested.params = params,
            None => suggested.left_out.push(format!("{full} = {value}")),
        }
        states_temperature |= key == "temp";
    }
    let SamplingParams { top_p, top_k, min_p, .. } = suggested.params;
    // Converters leave out the temperature of the library that the suggestion was written for.
    if !states_temperature && (top_p != 1.0 || top_k != 0 || min_p != 0.0) {
        suggested.params.temperature = 1.0;
    }
    suggested.found()
}

/// `params` with `key` set; `None` for an unknown key or a value outside its range.
fn with(params: &SamplingParams, key: &str, number: f64) -> Option<SamplingParams> {
    let mut params = params.clone();
    let whole = |number: f64| (number.fract() == 0.0 && number <= f64::from(u32::MAX)).then_some(number as u32);
    match key {
        // Below 0 is greedy to the programs that these keys are written for.
        "temp" => params.temperature = number.max(0.0),
        "top_k" => params.top_k = u64::from(whole(number.max(0.0))?),
        "top_p" => params.top_p = number,
        "min_p" => params.min_p = number,
        "penalty_repeat" => params.repetition_penalty = number,
        // -1 is the whole context.
        "penalty_last_n" => params.penalty_window = Some(whole(number.max(0.0))?).filter(|window| *window != 0),
        "xtc_probability" | "mirostat" if number == 0.0 => {}
        _ => return None,
    }
    params.validate().ok().map(|()| params)
}

/// A number of any type; an f32 as the decimal number that it was written as.
fn number(value: &Value<'_>) -> Option<f64> {
    match value {
        Value::F32(number) => number.to_string().parse().ok(),
        Value::F64(number) => Some(*number),
        Value::I8(number) => Some(f64::from(*number)),
        Value::I16(number) => Some(f64::from(*number)),
        Value::I32(number) => Some(f64::from(*number)),
        Value::I64(number) => Some(*number as f64),
        other => other.as_unsigned().map(|number| number as f64),
    }
}
