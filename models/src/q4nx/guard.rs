//! The guard against lost scales: a GGUF file may declare factors that every element of an activation or logit is multiplied
//! with; a directory made from it must carry them, or the model answers nonsense with a straight face.
//!
//! A field is known by the last component of its dotted name. Of an array the last element counts; fields without a number
//! are passed over.

use crate::gguf::{GgufFile, Value};
use serde_json::{Map, Value as Json};
use std::fmt;

/// Names that change every result.
pub const CRITICAL: [&str; 8] = [
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "scale_emb",
    "scale_depth",
    "dim_model_base",
    "final_logit_softcapping",
    "attn_logit_softcapping",
];

/// Parts of names that may.
const SUSPECT: [&str; 3] = ["scale", "softcap", "mup"];

/// Largest difference of a value that counts as the same.
const TOLERANCE: f64 = 1e-9;

/// A scale that a GGUF file declares.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredScale {
    /// The field's full name.
    pub field: String,
    /// Last component of the name.
    pub key: String,
    /// Its value.
    pub value: f64,
}

impl DeclaredScale {
    /// Whether it is one of [`CRITICAL`].
    #[must_use]
    pub fn is_critical(&self) -> bool {
        CRITICAL.contains(&self.key.as_str())
    }

    /// Whether a computation without it gives the same: a factor of 1, a cap of 0, and 0 where tools write it for "not set".
    #[must_use]
    pub fn is_neutral(&self) -> bool {
        match self.key.as_str() {
            "embedding_scale" | "residual_scale" | "logit_scale" => self.value == 0.0 || self.value == 1.0,
            "scale_emb" => self.value == 1.0,
            "final_logit_softcapping" | "attn_logit_softcapping" => self.value == 0.0,
            _ => false,
        }
    }
}

/// A declared scale that a directory does not carry.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleProblem {
    /// What the GGUF file declares.
    pub declared: DeclaredScale,
    /// What `config.json` has instead; `None` where it has nothing.
    pub found: Option<f64>,
}

impl fmt::Display for ScaleProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeclaredScale { field, key, value } = &self.declared;
        match self.found {
            None => write!(f, "the GGUF file declares {field} = {value}, config.json has no {key}"),
            Some(found) => write!(f, "the GGUF file declares {field} = {value}, config.json has {key} = {found}"),
        }
    }
}

/// The scales that `file` declares, critical ones and those whose name looks like one.
#[must_use]
pub fn declared(file: &GgufFile) -> Vec<DeclaredScale> {
    let scale = |(field, value): (&str, Value<'_>)| {
        let key = field.rsplit('.').next().unwrap_or(field);
        let lower = key.to_ascii_lowercase();
        if !CRITICAL.contains(&key) && !SUSPECT.iter().any(|part| lower.contains(part)) {
            return None;
        }
        let value = number(&value)?;
        Some(DeclaredScale { field: field.to_owned(), key: key.to_owned(), value })
    };
    file.metadata().filter_map(scale).collect()
}

/// Critical scales that `config` lacks or states otherwise. A configuration that cannot be read counts as an empty one.
#[must_use]
pub fn problems(declared: &[DeclaredScale], config: &Map<String, Json>) -> Vec<ScaleProblem> {
    let problem = |declared: &DeclaredScale| {
        let found = config.get(&declared.key).and_then(Json::as_f64);
        let same = found.is_some_and(|found| (found - declared.value).abs() <= TOLERANCE);
        (!same).then(|| ScaleProblem { declared: declared.clone(), found })
    };
    declared.iter().filter(|scale| scale.is_critical()).filter_map(problem).collect()
}

/// Scales that are not critical and not in `config`: worth a warning.
#[must_use]
pub fn warnings(declared: &[DeclaredScale], config: &Map<String, Json>) -> Vec<DeclaredScale> {
    declared.iter().filter(|scale| !scale.is_critical() && !config.contains_key(&scale.key)).cloned().collect()
}

fn number(value: &Value<'_>) -> Option<f64> {
    match *value {
        Value::U8(value) => Some(value.into()),
        Value::I8(value) => Some(value.into()),
        Value::U16(value) => Some(value.into()),
        Value::I16(value) => Some(value.into()),
        Value::U32(value) => Some(value.into()),
        Value::I32(value) => Some(value.into()),
        Value::F32(value) => Some(value.into()),
        Value::U64(value) => Some(value as f64),
        Value::I64(value) => Some(value as f64),
        Value::F64(value) => Some(value),
        Value::Array(array) => array.iter().last().and_then(|last| match last {
            Value::Array(_) => None,
            other => number(&other),
        }),
        Value::Bool(_) | Value::String(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scale(field: &str, value: f64) -> DeclaredScale {
        let key = field.rsplit('.').next().unwrap().to_owned();
        DeclaredScale { field: field.to_owned(), key, value }
    }

    #[test]
    fn what_is_lost_or_changed_is_a_problem() {
        let declared = [
            scale("minicpm.embedding_scale", 12.0),
            scale("minicpm.residual_scale", 0.2475),
            scale("minicpm.logit_scale", 16.0),
            scale("deepseek2.expert_weights_scale", 2.5),
        ];
        let good = json!({ "embedding_scale": 12.0, "residual_scale": 0.2475, "logit_scale": 16 });
        let good = good.as_object().unwrap();
        assert_eq!(problems(&declared, good), []);
        assert_eq!(warnings(&declared, good), [declared[3].clone()]);
        assert_eq!(problems(&declared, &Map::new()).len(), 3);
        let mut changed = good.clone();
        changed.insert("logit_scale".to_owned(), json!(16.000_001));
        let found = problems(&declared, &changed);
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().contains("logit_scale = 16.000001"), "{}", found[0]);
        changed.insert("logit_scale".to_owned(), json!("16"));
        assert_eq!(problems(&declared, &changed)[0].found, None);
    }

    #[test]
    fn neutral_values() {
        assert!(scale("a.logit_scale", 1.0).is_neutral() && scale("a.final_logit_softcapping", 0.0).is_neutral());
        assert!(!scale("a.logit_scale", 16.0).is_neutral() && !scale("a.scale_depth", 1.0).is_neutral());
    }
}
